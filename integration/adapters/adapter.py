"""What the adapters of all workers share: when a step is off, and the draft as the kernels see it.

A decode step begins with `batch.seq_lens` = L, the KV length, and `spec_info.bonus_tokens` = the
token of position L, in every worker.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...bindings.ops import can_fuse
from ...kernels.draft_layer import DraftLayer
from ...kernels.float8 import quantize_layer
from ..fallback import DraftPool, FusedFallback, NextDraftInput
from ..flags import FallbackArguments
from ..policy import FallbackPolicy
from ..symbols import Attributes, Call, Symbol
from . import decode_graphs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

    Batch = ScheduleBatch | ModelWorkerBatch


class Adapter(ABC):
    """Hands the worker's tensors to a `FusedFallback` and its results back to the scheduler.

    Args:
        worker: a started worker of `worker_class`.
        arguments: the flags' values.

    Raises:
        ValueError: the loaded draft cannot be fused; the text says why.
    """

    worker_class: ClassVar[str]
    """What SGLang must select as the worker."""
    forward_target: ClassVar[str]
    """The worker's step, which `forward` wraps."""
    prefill_target: ClassVar[str]
    """The draft's prefill, which `draft_prefill` wraps."""
    metrics_hooks: ClassVar[dict[str, Callable[..., Any]]]
    """What keeps off steps out of SGLang's metrics: hooks by their targets."""
    relay_target: ClassVar[str | None] = None
    """What hands a step's results to the next one under overlap, which `relay` wraps."""
    graph_runner: ClassVar[decode_graphs.RunnerNames]

    def __init__(self, worker: Any, arguments: FallbackArguments) -> None:
        self.worker = worker
        self.target = worker.target_worker.model_runner
        self.draft = self._draft_runner()
        self.req_to_token = self.target.req_to_token_pool.req_to_token
        layer, pool = self._draft_layer(), self._draft_pool()
        if arguments.float8:
            layer = quantize_layer(layer)
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
        self.fallback.warm_up()
        self.graphs = decode_graphs.capture(self.target, self.fallback, self.graph_runner)

    # ---- before the start

    @classmethod
    @abstractmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        """What this adapter uses of SGLang, for the check before the start."""

    @staticmethod
    def setting(server_args: ServerArgs, name: str) -> Any:
        """The resolved value of a server argument, None where SGLang has no such argument."""
        return getattr(server_args, name, None)

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

    @property
    def hooked(self) -> tuple[Any, ...]:
        """The objects whose methods are hooked."""
        return (self.worker,)

    def forward(
        self,
        forward: Callable[..., GenerationBatchResult],
        batch: Batch,
        *args: Any,
        **kwargs: Any,
    ) -> GenerationBatchResult:
        """The worker's `forward_batch_generation`: `forward` is SGLang's own."""
        decodes = not (
            batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.forward_mode.is_idle()
            or batch.spec_info is None
        )
        if decodes and self.fallback.update(len(batch.reqs)):
            return self._decode_off(batch, *args, **kwargs)
        self.fallback.write()
        if decodes:
            self._catch_up(batch)
            self.fallback.statistics.steps_on += 1
        return forward(self.worker, batch, *args, **kwargs)

    @abstractmethod
    def draft_prefill(
        self, draft_prefill: Callable[..., Any], batch: Batch, *args: Any, **kwargs: Any
    ) -> Any:
        """The draft's prefill: `draft_prefill` is SGLang's own."""

    # ---- off

    @abstractmethod
    def _decode_off(self, batch: Batch, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        """One decode step without speculation."""

    def _draft_step(
        self, batch: Batch, result: GenerationBatchResult, seq_lens: torch.Tensor
    ) -> Any:
        """SGLang's next draft input, after the target's plain decode at position `seq_lens`."""
        draft_input = self.fallback.decode(
            aux_hidden_states=result.logits_output.hidden_states,
            next_token_ids=result.next_token_ids,
            seq_lens=seq_lens,
            req_pool_indices=batch.req_pool_indices,
            out_cache_loc=batch.out_cache_loc,
            requests=self._requests(batch),
            input_embeds=self._input_embeds(result.next_token_ids),
        )
        return self._draft_input(draft_input)

    def _fuses_prefill(self, batch: Batch, mm_input_embeds: torch.Tensor | None) -> bool:
        if self.fallback.off and mm_input_embeds is None and not batch.forward_mode.is_idle():
            return True
        self.fallback.settle(self._requests(batch))
        return False

    def _prefill_off(
        self, batch: Batch, aux_hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> NextDraftInput:
        device, total = batch.input_ids.device, batch.input_ids.shape[0]
        lens, prefix_lens = to_device(self._extend_lens(batch), device)
        ends = lens.cumsum(0)
        offsets = (prefix_lens + lens - ends).repeat_interleave(lens, output_size=total)
        positions = torch.arange(total, device=device) + offsets
        last_rows = ends - 1
        token_ids = batch.input_ids.roll(-1)
        token_ids[last_rows] = self._tail_tokens(batch, next_token_ids)
        return self.fallback.prefill(
            aux_hidden_states=aux_hidden_states,
            token_ids=token_ids,
            positions=positions,
            out_cache_loc=batch.out_cache_loc,
            last_rows=last_rows,
            next_token_ids=next_token_ids,
            req_pool_indices=batch.req_pool_indices,
            requests=self._requests(batch),
            input_embeds=self._input_embeds(token_ids),
        )

    # ---- and back on

    def _catch_up(self, batch: Batch) -> None:
        """Give pending requests the draft state that a never-off run would have here.

        One draft extend of SGLang's own, rooted at the last off position with its kept aux hidden
        states.
        """
        requests = self._requests(batch)
        pending = self.fallback.pending(requests)
        if not any(pending):
            return
        spec_info = batch.spec_info
        extended = self._draft_extend(batch, spec_info.bonus_tokens, pending)
        mask = None if all(pending) else to_device(pending, batch.seq_lens.device)
        for name in ("topk_p", "topk_index", "hidden_states"):
            new, old = getattr(extended, name), getattr(spec_info, name)
            if mask is not None:
                new = torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old.to(new.dtype))
            setattr(spec_info, name, new)
        self.fallback.settle(requests)
        self.fallback.statistics.catch_ups += 1

    @abstractmethod
    def _draft_extend(self, batch: Batch, token_ids: torch.Tensor, pending: list[bool]) -> Any:
        """SGLang's draft input [num_requests] after the last off position; `batch` is left as is.

        Rows of requests that are not pending write their K and V to the dummy slot.
        """

    def _slots(self, batch: Batch, width: int, pending: list[bool]) -> torch.Tensor:
        """The slots of `width` positions from the last off position on, [num_requests, width]."""
        device = batch.seq_lens.device
        columns = batch.seq_lens.long()[:, None] - 1 + torch.arange(width, device=device)
        rows = batch.req_pool_indices.long()[:, None]
        out_cache_loc = self.req_to_token[rows, columns].to(torch.int64)
        if not all(pending):
            out_cache_loc *= to_device(pending, device)[:, None]
        return out_cache_loc

    # ---- names that differ

    @staticmethod
    def _requests(batch: Batch) -> list[int]:
        """`req_pool_indices` as host integers; 0, the padding row, for a request finished since."""
        return [req.req_pool_idx or 0 for req in batch.reqs]

    @staticmethod
    def _extend_lens(batch: Batch) -> tuple[list[int], list[int]]:
        """Rows and cached prefix of each request of a prefill."""
        return batch.extend_lens, batch.prefix_lens

    @staticmethod
    def _tail_tokens(batch: Batch, next_token_ids: torch.Tensor) -> torch.Tensor:
        """The token after each request's last row, [num_requests], as the draft's prefill has it.

        Before 0.5.17 that is the sampled token even where the prompt goes on in another chunk.
        """
        return next_token_ids

    # ---- what the loaded draft looks like

    @abstractmethod
    def _draft_runner(self) -> Any:
        """The draft's model runner."""

    @abstractmethod
    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        """What SGLang runs the draft in."""

    def _draft_layer(self) -> DraftLayer:
        model = self.draft.model.model
        layer = model.layers[0]
        attention = layer.self_attn
        projection, rotary = attention.qkv_proj, attention.rotary_emb
        aux_width = model.hidden_size_in * model.num_aux_hidden_states
        has_fc = aux_width != layer.hidden_norm.weight.shape[0]
        bias, fc_norm = projection.bias, model.fc_norm
        input_norm = getattr(model, "input_norm", None)  # not in 0.5.12.post1
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
    def _draft_input(draft_input: NextDraftInput, **further: Any) -> Any:
        """SGLang's own draft input."""
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        return EagleDraftInput(
            bonus_tokens=draft_input.bonus_tokens,
            topk_p=draft_input.topk_p,
            topk_index=draft_input.topk_index,
            hidden_states=draft_input.hidden_states,
            **further,
        )


def to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Host values as a tensor, in stream order: the host waits for nothing."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def set_seq_lens(batch: Batch, seq_lens: torch.Tensor, change: int) -> None:
    """Set the device lengths and, where the batch mirrors them on the host, the mirror."""
    batch.seq_lens = seq_lens
    batch.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + change
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


@contextlib.contextmanager
def restored(batch: Batch) -> Iterator[None]:
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

SYMBOLS: tuple[Symbol, ...] = (
    Attributes("sglang.srt.managers.tp_worker.TpModelWorker", "model_runner"),
    Attributes(MODEL_RUNNER, "model req_to_token_pool token_to_kv_pool"),
    Attributes(f"{KV_POOL}.ReqToTokenPool", "req_to_token"),
    Call(f"{KV_POOL}.KVCache.get_key_buffer", "layer_id"),
    Call(f"{KV_POOL}.KVCache.get_value_buffer", "layer_id"),
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
    Call(
        "sglang.srt.utils.hf_transformers_utils.get_config", "model", "trust_remote_code revision"
    ),
    Attributes(f"{LLAMA_EAGLE3}.LlamaForCausalLMEagle3", "model"),
    Attributes(
        f"{LLAMA_EAGLE3}.LlamaModel",
        "embed_tokens hidden_size_in num_aux_hidden_states fc fc_norm layers",
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
    Attributes("sglang.srt.layers.rotary_embedding.RotaryEmbedding", "cos_sin_cache is_neox_style"),
)
