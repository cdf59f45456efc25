"""SGLang's `EAGLEWorkerV2` (0.5.17 and 0.5.23): one step with speculation off, and the way back.

A step in spec v2 begins with `batch.seq_lens` = L, the KV length, and `spec_info.bonus_tokens` =
the token of position L. The scheduler has allocated the slots from L on, and restores every field
of the batch after the step (`Scheduler._forward_isolation`), so a step is free to change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from ...bindings.ops import can_fuse
from ...kernels.draft_layer import DraftLayer
from .. import metrics
from ..fallback import DraftPool, FusedFallback, NextDraftInput
from ..flags import FallbackArguments
from ..policy import FallbackPolicy
from ..symbols import Attributes, Call, Hook, Symbol
from . import decode_graphs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

MODULE = "sglang.srt.speculative.eagle_worker_v2"


class EagleWorkerV2:
    """Hands the worker's tensors to a `FusedFallback` and its results back to the scheduler.

    Args:
        worker: a started `EAGLEWorkerV2`.
        arguments: the flags' values.

    Raises:
        ValueError: the loaded draft cannot be fused; the text says why.
    """

    worker_class = "EAGLEWorkerV2"
    """What SGLang must select as the worker."""

    read_done_event = "shared_read_done_event"
    """The runner's event after which the scheduler may overwrite shared buffers."""

    def __init__(self, worker: Any, arguments: FallbackArguments) -> None:
        self.worker = worker
        self.target = worker.target_worker.model_runner
        self.draft = worker.draft_worker.draft_runner
        self.req_to_token = self.target.req_to_token_pool.req_to_token
        layer, pool = self._draft_layer(), self._draft_pool()
        reason = can_fuse(layer=layer, k_buffer=pool.k_buffer, v_buffer=pool.v_buffer)
        if reason:
            raise ValueError(f"fused fallback: this draft is not supported: {reason}")
        self.fallback = FusedFallback(
            policy=FallbackPolicy(arguments),
            layer=layer,
            pool=pool,
            max_requests=self.req_to_token.shape[0],
            topk=worker.topk,
        )
        self.graphs = decode_graphs.capture(self.target, self.fallback)

    # ---- before the start

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        """What this adapter uses of SGLang, for the check before the start."""
        return (*SYMBOLS, *SYMBOLS_OF_0523)

    @staticmethod
    def setting(server_args: ServerArgs, name: str) -> Any:
        """The resolved value of a server argument, None where SGLang has no such argument."""
        from sglang.srt.arg_groups.overrides import resolution_result

        return resolution_result(server_args, name)

    @classmethod
    def draft_config(cls, server_args: ServerArgs) -> Any:
        """The draft's Hugging Face configuration, loaded without its weights."""
        from sglang.srt.utils.hf_transformers_utils import get_config

        return get_config(
            cls.setting(server_args, "speculative_draft_model_path"),
            trust_remote_code=cls.setting(server_args, "trust_remote_code"),
            revision=cls.setting(server_args, "speculative_draft_model_revision"),
        )

    # ---- the two entry points of the hooks

    def forward(
        self,
        forward: Callable[..., GenerationBatchResult],
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> GenerationBatchResult:
        """`EAGLEWorkerV2.forward_batch_generation`: `forward` is SGLang's own."""
        if not (
            batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.forward_mode.is_idle()
            or batch.spec_info is None
        ):
            if self.fallback.update(len(batch.reqs)):
                return self._decode_off(batch, on_publish, grammar_barrier)
            self._catch_up(batch)
            self.fallback.statistics.steps_on += 1
        return forward(
            self.worker, batch, on_publish=on_publish, grammar_barrier=grammar_barrier, **kwargs
        )

    def draft_prefill(
        self,
        draft_prefill: Callable[..., Any],
        batch: ScheduleBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        mm_input_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`EagleDraftWorker._draft_extend_for_prefill`: `draft_prefill` is SGLang's own."""
        if not self.fallback.off or mm_input_embeds is not None or batch.forward_mode.is_idle():
            self.fallback.settle(_requests(batch))
            return draft_prefill(
                self.worker.draft_worker,
                batch,
                target_hidden_states,
                next_token_ids,
                mm_input_embeds,
                **kwargs,
            )
        return self._draft_input(self._prefill_off(batch, target_hidden_states, next_token_ids))

    # ---- off

    def _decode_off(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

        seq_lens, bonus_tokens = batch.seq_lens, batch.spec_info.bonus_tokens
        rows = batch.req_pool_indices.long()
        batch.spec_info = None
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids = bonus_tokens.to(torch.int64)
        batch.out_cache_loc = self.req_to_token[rows, seq_lens.long()].to(torch.int64)
        _set_seq_lens(batch, seq_lens + 1, 1)
        if batch.has_grammar and grammar_barrier is not None:
            grammar_barrier()
        with self.graphs.in_place_of_verify(self.target):
            result = self.worker.target_worker.forward_batch_generation(
                batch, capture_hidden_mode=CaptureHiddenMode.FULL
            )
        if on_publish is not None:
            on_publish(batch.seq_lens)
        output = result.logits_output
        draft_input = self.fallback.decode(
            aux_hidden_states=output.hidden_states,
            next_token_ids=result.next_token_ids,
            seq_lens=seq_lens,
            req_pool_indices=batch.req_pool_indices,
            out_cache_loc=batch.out_cache_loc,
            requests=_requests(batch),
            input_embeds=self._input_embeds(result.next_token_ids),
        )
        num_requests = len(batch.reqs)
        result.next_draft_input = self._draft_input(draft_input)
        result.new_seq_lens = batch.seq_lens
        result.accept_lens = torch.ones(num_requests, dtype=torch.int32, device=seq_lens.device)
        result.speculative_num_draft_tokens = 1  # the stride of next_token_ids
        if batch.return_logprob and output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs.view(num_requests, 1)
        # The graph that wrote them may be replayed before they are read.
        output.hidden_states = output.hidden_states.clone() if batch.return_hidden_states else None
        self._hand_over_read_done_event()
        return result

    def _hand_over_read_done_event(self) -> None:
        """The scheduler waits for the draft runner, but the target was this step's last reader."""
        event = getattr(self.target, self.read_done_event)
        setattr(self.draft, self.read_done_event, event)
        setattr(self.target, self.read_done_event, None)

    def _prefill_off(
        self, batch: ScheduleBatch, aux_hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> NextDraftInput:
        from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

        device = batch.input_ids.device
        lens = torch.tensor(batch.extend_lens)
        prefix_lens = torch.tensor(batch.prefix_lens)
        ends = lens.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - lens).repeat_interleave(lens)
        positions = (prefix_lens.repeat_interleave(lens) + within).to(device, non_blocking=True)
        last_rows = (ends - 1).to(device, non_blocking=True)
        token_ids = batch.input_ids.roll(-1)
        token_ids[last_rows] = _eagle_prefill_tail_tokens(batch, next_token_ids)
        return self.fallback.prefill(
            aux_hidden_states=aux_hidden_states,
            token_ids=token_ids,
            positions=positions,
            out_cache_loc=batch.out_cache_loc,
            last_rows=last_rows,
            next_token_ids=next_token_ids,
            req_pool_indices=batch.req_pool_indices,
            requests=_requests(batch),
            input_embeds=self._input_embeds(token_ids),
        )

    # ---- and back on

    def _catch_up(self, batch: ScheduleBatch) -> None:
        """Give pending requests the draft state that a never-off run would have here.

        One draft extend of SGLang's own, rooted at the last off position with its kept aux hidden
        states. It takes `speculative_num_draft_tokens` rows a request: the first is real, the
        others write slots that the following draft and verify overwrite.
        """
        requests = _requests(batch)
        pending = self.fallback.pending(requests)
        if not any(pending):
            return
        spec_info = batch.spec_info
        extended = self._draft_extend(batch, spec_info.bonus_tokens, pending)
        mask = None if all(pending) else torch.tensor(pending, device=batch.seq_lens.device)
        for name in ("topk_p", "topk_index", "hidden_states"):
            new, old = getattr(extended, name), getattr(spec_info, name)
            if mask is not None:
                new = torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old.to(new.dtype))
            setattr(spec_info, name, new)
        # Only the draft extend that ends this step may tell the scheduler that reading is done.
        setattr(self.draft, self.read_done_event, None)
        self.fallback.settle(requests)
        self.fallback.statistics.catch_ups += 1

    def _draft_extend(
        self, batch: ScheduleBatch, token_ids: torch.Tensor, pending: list[bool]
    ) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        width = self.worker.speculative_num_draft_tokens
        seq_lens, device = batch.seq_lens, batch.seq_lens.device
        rows = batch.req_pool_indices.long()
        num_requests = len(pending)
        columns = seq_lens.long()[:, None] - 1 + torch.arange(width, device=device)
        out_cache_loc = self.req_to_token[rows[:, None], columns].to(torch.int64)
        if not all(pending):  # the others' KV is complete: their rows go to the dummy slot
            out_cache_loc *= torch.tensor(pending, device=device)[:, None]
        kept = self.fallback.kept_hidden_states
        hidden_states = kept.new_zeros(num_requests, width, kept.shape[1])
        hidden_states[:, 0] = kept[rows]
        tokens = torch.zeros(num_requests, width, dtype=torch.int64, device=device)
        tokens[:, 0] = token_ids
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(
                next_token_logits=None, hidden_states=hidden_states.flatten(0, 1)
            ),
            next_token_ids=tokens.flatten(),
            accept_lens=torch.ones(num_requests, dtype=torch.int32, device=device),
            new_seq_lens=seq_lens,
            next_draft_input=EagleDraftInput(bonus_tokens=token_ids),
        )
        plan_stream = self.worker.draft_worker.plan_stream
        if plan_stream:  # 0.5.17 plans a draft extend without waiting for the forward stream
            plan_stream.wait_stream(torch.get_device_module(device).current_stream())
        with _restored(batch), self._draft_context():
            batch.out_cache_loc = out_cache_loc.flatten()
            _set_seq_lens(batch, seq_lens - 1, -1)
            self.worker.draft_worker._draft_extend_for_decode(batch, result)
        return result.next_draft_input

    # ---- what the loaded draft looks like

    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        from sglang.srt.speculative.spec_utils import draft_tp_context

        return draft_tp_context(self.worker.draft_worker.parallel_layout)

    def _draft_layer(self) -> DraftLayer:
        model = self.draft.model.model
        layer = model.layers[0]
        attention = layer.self_attn
        projection, rotary = attention.qkv_proj, attention.rotary_emb
        aux_width = model.hidden_size_in * model.num_aux_hidden_states
        has_fc = aux_width != layer.hidden_norm.weight.shape[0]
        bias, fc_norm, input_norm = projection.bias, model.fc_norm, model.input_norm
        whole_vocabulary = model.embed_tokens.tp_size == 1
        return DraftLayer(
            embed_tokens=model.embed_tokens.weight.data if whole_vocabulary else None,
            fc=model.fc.weight.data if has_fc else None,
            fc_bias=model.fc.bias.data if has_fc and model.fc.bias is not None else None,
            input_norm=input_norm.weight.data if has_fc and input_norm is not None else None,
            fc_norm=tuple(n.weight.data for n in fc_norm) if has_fc and fc_norm else None,
            hidden_norm=layer.hidden_norm.weight.data,
            input_layernorm=layer.input_layernorm.weight.data,
            kv_proj=projection.weight.data[attention.q_size :],
            kv_bias=None if bias is None else bias.data[attention.q_size :],
            cos_sin_cache=rotary.cos_sin_cache,
            is_neox_style=rotary.is_neox_style,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rms_norm_eps=layer.hidden_norm.variance_epsilon,
            num_aux_hidden_states=model.num_aux_hidden_states,
        )

    def _draft_pool(self) -> DraftPool:
        attention = self.draft.model.model.layers[0].self_attn.attn
        pool = self.draft.token_to_kv_pool
        return DraftPool(
            k_buffer=pool.get_key_buffer(attention.layer_id),
            v_buffer=pool.get_value_buffer(attention.layer_id),
            k_scale=attention.k_scale_float,
            v_scale=attention.v_scale_float,
        )

    def _input_embeds(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        if self.fallback.layer.embed_tokens is not None:
            return None
        with self._draft_context():
            return self.draft.model.model.embed_tokens(token_ids)

    @staticmethod
    def _draft_input(draft_input: NextDraftInput) -> Any:
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        return EagleDraftInput(
            bonus_tokens=draft_input.bonus_tokens,
            topk_p=draft_input.topk_p,
            topk_index=draft_input.topk_index,
            hidden_states=draft_input.hidden_states,
        )


class EagleWorkerV2Of0517(EagleWorkerV2):
    """The names that SGLang 0.5.17 has for the same things."""

    read_done_event = "war_fastpath_read_done_event"

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        return (*SYMBOLS, *SYMBOLS_OF_0517)

    @staticmethod
    def setting(server_args: ServerArgs, name: str) -> Any:
        return getattr(server_args, name, None)

    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.worker.draft_worker.draft_tp_context(self.draft.tp_group)


def _requests(batch: ScheduleBatch) -> list[int]:
    return batch.req_pool_indices_cpu.tolist()


def _set_seq_lens(batch: ScheduleBatch, seq_lens: torch.Tensor, change: int) -> None:
    """Set the device lengths and, where the batch mirrors them on the host, the mirror."""
    batch.seq_lens = seq_lens
    batch.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + change
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


@contextlib.contextmanager
def _restored(batch: ScheduleBatch) -> Iterator[None]:
    """Undo what the block does to the batch's fields."""
    before = {field.name: getattr(batch, field.name) for field in fields(batch)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
KV_POOL = "sglang.srt.mem_cache.memory_pool"
LLAMA_EAGLE3 = "sglang.srt.models.llama_eagle3"
ROTARY = "sglang.srt.layers.rotary_embedding.RotaryEmbedding"

SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{MODULE}.EAGLEWorkerV2.forward_batch_generation", "batch on_publish grammar_barrier"),
    Hook(
        f"{MODULE}.EagleDraftWorker._draft_extend_for_prefill",
        "batch target_hidden_states next_token_ids mm_input_embeds",
    ),
    Call(f"{MODULE}.EagleDraftWorker._draft_extend_for_decode", "batch batch_result"),
    Attributes(
        f"{MODULE}.EAGLEWorkerV2", "target_worker draft_worker topk speculative_num_draft_tokens"
    ),
    Attributes(f"{MODULE}.EagleDraftWorker", "draft_runner plan_stream"),
    Call(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "batch",
        "capture_hidden_mode",
    ),
    Attributes("sglang.srt.managers.tp_worker.TpModelWorker", "model_runner"),
    Attributes(MODEL_RUNNER, "model req_to_token_pool token_to_kv_pool"),
    Attributes(f"{KV_POOL}.ReqToTokenPool", "req_to_token"),
    Call(f"{KV_POOL}.KVCache.get_key_buffer", "layer_id"),
    Call(f"{KV_POOL}.KVCache.get_value_buffer", "layer_id"),
    Attributes(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "forward_mode is_extend_in_batch spec_info reqs seq_lens seq_lens_cpu seq_lens_sum "
        "req_pool_indices req_pool_indices_cpu input_ids out_cache_loc extend_lens prefix_lens "
        "has_grammar return_logprob return_hidden_states",
    ),
    Attributes(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "logits_output next_token_ids accept_lens new_seq_lens next_draft_input "
        "speculative_num_draft_tokens",
    ),
    Attributes(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "next_token_logits hidden_states next_token_logprobs",
    ),
    Attributes(
        "sglang.srt.speculative.eagle_info.EagleDraftInput",
        "bonus_tokens topk_p topk_index hidden_states",
    ),
    Attributes(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode", "DECODE is_extend is_idle"
    ),
    Attributes("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode", "FULL"),
    Call("sglang.srt.speculative.eagle_utils._eagle_prefill_tail_tokens", "batch next_token_ids"),
    Call(
        "sglang.srt.utils.hf_transformers_utils.get_config", "model", "trust_remote_code revision"
    ),
    Attributes(f"{LLAMA_EAGLE3}.LlamaForCausalLMEagle3", "model"),
    Attributes(
        f"{LLAMA_EAGLE3}.LlamaModel",
        "embed_tokens hidden_size_in num_aux_hidden_states fc fc_norm input_norm layers",
    ),
    Attributes(f"{LLAMA_EAGLE3}.LlamaDecoderLayer", "self_attn hidden_norm input_layernorm"),
    Attributes(
        "sglang.srt.models.llama.LlamaAttention",
        "qkv_proj rotary_emb attn q_size num_kv_heads head_dim",
    ),
    Attributes(
        "sglang.srt.layers.radix_attention.RadixAttention", "layer_id k_scale_float v_scale_float"
    ),
    Attributes("sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding", "tp_size"),
    Attributes("sglang.srt.layers.layernorm.RMSNorm", "weight variance_epsilon"),
    Attributes(ROTARY, "cos_sin_cache is_neox_style"),
    *metrics.SYMBOLS,
    *decode_graphs.SYMBOLS,
)
SYMBOLS_OF_0523: tuple[Symbol, ...] = (
    Attributes(MODEL_RUNNER, "shared_read_done_event"),
    Call("sglang.srt.arg_groups.overrides.resolution_result", "server_args field"),
    Attributes("sglang.srt.server_args.ServerArgs", "resolve_once"),
    Call("sglang.srt.speculative.spec_utils.draft_tp_context", "layout"),
    Attributes(f"{MODULE}.EagleDraftWorker", "parallel_layout"),
)
SYMBOLS_OF_0517: tuple[Symbol, ...] = (
    Attributes(MODEL_RUNNER, "war_fastpath_read_done_event tp_group"),
    Attributes(f"{MODULE}.EagleDraftWorker", "draft_tp_context"),
)
