"""SGLang's `EAGLEWorkerV2` (0.5.12.post1, 0.5.17, 0.5.23): one step off, and the way back.

The scheduler has allocated the slots from L on. It restores every field of the batch after the
step (`Scheduler._forward_isolation`) or hands over one that is thrown away (0.5.12.post1), so a
step is free to change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...bindings.off_step import decode_inputs
from .. import metrics
from ..flags import FallbackArguments
from ..symbols import Attributes, Call, Hook, Symbol
from . import decode_graphs
from .adapter import MODEL_RUNNER, Adapter, restored, set_seq_lens
from .adapter import SYMBOLS as SYMBOLS_OF_ADAPTER
from .decode_graphs import swapped

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

MODULE = "sglang.srt.speculative.eagle_worker_v2"
FUTURE_MAP = "sglang.srt.managers.overlap_utils.FutureMap"


class EagleWorkerV2(Adapter):
    """`EAGLEWorkerV2` of 0.5.23."""

    worker_class = "EAGLEWorkerV2"
    forward_target = f"{MODULE}.EAGLEWorkerV2.forward_batch_generation"
    prefill_target = f"{MODULE}.EagleDraftWorker._draft_extend_for_prefill"
    relay_target: ClassVar[str | None] = f"{FUTURE_MAP}.stash"
    metrics_hooks = metrics.HOOKS
    graph_runner = decode_graphs.DECODE_RUNNER
    read_done_event: ClassVar[str | None] = "shared_read_done_event"
    """The runner's event after which the scheduler may overwrite shared buffers."""

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        return (*SYMBOLS, *SYMBOLS_OF_0523)

    @staticmethod
    def setting(server_args: ServerArgs, name: str) -> Any:
        from sglang.srt.arg_groups.overrides import resolution_result

        return resolution_result(server_args, name)

    def __init__(self, worker: Any, arguments: FallbackArguments) -> None:
        super().__init__(worker, arguments)
        self._ones = self.req_to_token.new_ones(self.req_to_token.shape[0], dtype=torch.int32)
        row = self._ones.new_zeros(1, dtype=torch.int64)
        for tokens in (row.int(), row):  # compiles it
            decode_inputs(
                bonus_tokens=tokens,
                seq_lens=row,
                req_pool_indices=row,
                req_to_token=self.req_to_token,
            )

    @property
    def hooked(self) -> tuple[Any, ...]:
        return (self.worker, self.worker.draft_worker)

    def draft_prefill(
        self,
        draft_prefill: Callable[..., Any],
        batch: ScheduleBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        mm_input_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not self._fuses_prefill(batch, mm_input_embeds):
            return draft_prefill(
                self.worker.draft_worker,
                batch,
                target_hidden_states,
                next_token_ids,
                mm_input_embeds,
                **kwargs,
            )
        return self._draft_input(self._prefill_off(batch, target_hidden_states, next_token_ids))

    def relay(
        self,
        stash: Callable[..., None],
        future_map: Any,
        future_indices: torch.Tensor,
        payload: Any,
    ) -> None:
        """`FutureMap.stash`; of an off step the tokens alone, since nobody reads its stubs."""
        has_buffers = getattr(future_map, "topk_p_buf", None) is not None
        if not (has_buffers and self.fallback.is_stub(payload.hidden_states)):
            return stash(future_map, future_indices, payload)
        tokens_alone = type(payload)(bonus_tokens=payload.bonus_tokens)
        with swapped(future_map, need_topk=False, need_hidden_states=False):
            stash(future_map, future_indices, tokens_alone)

    def _decode_off(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        **_: Any,
    ) -> GenerationBatchResult:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        seq_lens, num_requests = batch.seq_lens, len(batch.reqs)
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids, batch.out_cache_loc, new_seq_lens = decode_inputs(
            bonus_tokens=batch.spec_info.bonus_tokens,
            seq_lens=seq_lens,
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token,
        )
        batch.spec_info = None
        set_seq_lens(batch, new_seq_lens, 1)
        # Known before the target runs, so the scheduler's next step need not wait for it.
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.has_grammar and grammar_barrier is not None:
            grammar_barrier()
        with self.graphs.in_place_of_verify(self.target):
            result = self._run_target(batch)
        output = result.logits_output
        result.next_draft_input = self._draft_step(batch, result, seq_lens)
        result.new_seq_lens = new_seq_lens
        result.accept_lens = self._ones[:num_requests]
        result.speculative_num_draft_tokens = 1  # the stride of next_token_ids
        if batch.return_logprob and output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs.view(num_requests, 1)
        # The graph that wrote them may be replayed before they are read.
        asked = any(req.return_hidden_states for req in batch.reqs)
        output.hidden_states = output.hidden_states.clone() if asked else None
        self._hand_over_read_done_event()
        return result

    def _run_target(self, batch: ScheduleBatch) -> GenerationBatchResult:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        return self.worker.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _hand_over_read_done_event(self) -> None:
        """The scheduler waits for the draft runner, but the target was this step's last reader."""
        if self.read_done_event is not None:
            event = getattr(self.target, self.read_done_event)
            setattr(self.draft, self.read_done_event, event)
            setattr(self.target, self.read_done_event, None)

    def _draft_extend(
        self, batch: ScheduleBatch, token_ids: torch.Tensor, pending: list[bool]
    ) -> Any:
        """`speculative_num_draft_tokens` rows a request, of which the first is real.

        The others write slots that the following draft and verify overwrite.
        """
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        width = self.worker.speculative_num_draft_tokens
        seq_lens, device = batch.seq_lens, batch.seq_lens.device
        num_requests = len(pending)
        kept = self.fallback.kept_hidden_states
        hidden_states = kept.new_zeros(num_requests, width, kept.shape[1])
        hidden_states[:, 0] = kept[batch.req_pool_indices.long()]
        tokens = torch.zeros(num_requests, width, dtype=torch.int64, device=device)
        tokens[:, 0] = token_ids
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(
                next_token_logits=None, hidden_states=hidden_states.flatten(0, 1)
            ),
            next_token_ids=tokens.flatten(),
            accept_lens=torch.ones(num_requests, dtype=torch.int32, device=device),
            next_draft_input=EagleDraftInput(bonus_tokens=token_ids),
        )
        result.new_seq_lens = seq_lens
        plan_stream = self.worker.draft_worker.plan_stream
        if plan_stream:  # not every release waits for the forward stream before it plans
            plan_stream.wait_stream(torch.get_device_module(device).current_stream())
        with restored(batch), self._draft_context():
            batch.out_cache_loc = self._slots(batch, width, pending).flatten()
            set_seq_lens(batch, seq_lens - 1, -1)
            self.worker.draft_worker._draft_extend_for_decode(batch, result)
        if self.read_done_event is not None:
            # Only the draft extend that ends this step may tell the scheduler that reading is done.
            setattr(self.draft, self.read_done_event, None)
        return result.next_draft_input

    @staticmethod
    def _requests(batch: ScheduleBatch) -> list[int]:
        return batch.req_pool_indices_cpu.tolist()

    @staticmethod
    def _tail_tokens(batch: ScheduleBatch, next_token_ids: torch.Tensor) -> torch.Tensor:
        from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

        return _eagle_prefill_tail_tokens(batch, next_token_ids)

    def _draft_runner(self) -> Any:
        return self.worker.draft_worker.draft_runner

    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        from sglang.srt.speculative.spec_utils import draft_tp_context

        return draft_tp_context(self.worker.draft_worker.parallel_layout)


class EagleWorkerV2Of0517(EagleWorkerV2):
    """The names that SGLang 0.5.17 has for the same things."""

    read_done_event = "war_fastpath_read_done_event"
    setting = staticmethod(Adapter.setting)

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        return (*SYMBOLS, *SYMBOLS_OF_0517)

    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.worker.draft_worker.draft_tp_context(self.draft.tp_group)


class EagleWorkerV2Of0512(EagleWorkerV2Of0517):
    """0.5.12.post1: the worker takes a `ModelWorkerBatch`, and the draft input relays more."""

    relay_target = None
    metrics_hooks = metrics.HOOKS_OF_0512
    graph_runner = decode_graphs.CUDA_RUNNER
    read_done_event = None
    _requests = staticmethod(Adapter._requests)
    _tail_tokens = staticmethod(Adapter._tail_tokens)

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        return SYMBOLS_OF_0512

    def draft_prefill(
        self, draft_prefill: Callable[..., Any], batch: ModelWorkerBatch, *args: Any, **kwargs: Any
    ) -> Any:
        seq_lens = batch.seq_lens
        draft_input = super().draft_prefill(draft_prefill, batch, *args, **kwargs)
        draft_input.new_seq_lens = seq_lens
        return draft_input

    def _decode_off(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        stream = torch.get_device_module(batch.seq_lens.device)
        batch.seq_lens.record_stream(stream.current_stream())  # the scheduler's stream made it
        published = stream.Event()
        result = super()._decode_off(batch, on_publish=lambda _: published.record())
        result.next_draft_input.new_seq_lens = batch.seq_lens
        result.next_draft_input.verify_done = published  # the scheduler reads the lengths after it
        return result

    def _draft_extend(
        self, batch: ModelWorkerBatch, token_ids: torch.Tensor, pending: list[bool]
    ) -> Any:
        with decode_graphs.without_triton_draft_extend(self.worker.draft_worker):
            return super()._draft_extend(batch, token_ids, pending)

    def _run_target(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        return self.worker.target_worker.forward_batch_generation(batch)

    @staticmethod
    def _extend_lens(batch: ModelWorkerBatch) -> tuple[list[int], list[int]]:
        return batch.extend_seq_lens, batch.extend_prefix_lens


UTILS = "sglang.srt.managers.utils"
DRAFT_INPUT = "sglang.srt.speculative.eagle_info.EagleDraftInput"
TP_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"

SYMBOLS_OF_ALL: tuple[Symbol, ...] = (
    Hook(
        f"{MODULE}.EagleDraftWorker._draft_extend_for_prefill",
        "batch target_hidden_states next_token_ids mm_input_embeds",
    ),
    Call(f"{MODULE}.EagleDraftWorker._draft_extend_for_decode", "batch batch_result"),
    Attributes(
        f"{MODULE}.EAGLEWorkerV2", "target_worker draft_worker topk speculative_num_draft_tokens"
    ),
    Attributes(f"{MODULE}.EagleDraftWorker", "draft_runner plan_stream"),
    Attributes(
        f"{UTILS}.GenerationBatchResult",
        "logits_output next_token_ids accept_lens next_draft_input speculative_num_draft_tokens",
    ),
    Attributes("sglang.srt.managers.schedule_batch.Req", "return_hidden_states"),
    *SYMBOLS_OF_ADAPTER,
)
SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{MODULE}.EAGLEWorkerV2.forward_batch_generation", "batch on_publish grammar_barrier"),
    Call(f"{TP_WORKER}.forward_batch_generation", "batch", "capture_hidden_mode"),
    Attributes(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "forward_mode is_extend_in_batch spec_info reqs seq_lens seq_lens_cpu seq_lens_sum "
        "req_pool_indices req_pool_indices_cpu input_ids out_cache_loc extend_lens prefix_lens "
        "has_grammar return_logprob",
    ),
    Attributes(f"{UTILS}.GenerationBatchResult", "new_seq_lens"),
    Hook(f"{FUTURE_MAP}.stash", "future_indices payload"),
    Attributes(FUTURE_MAP, "need_topk need_hidden_states topk_p_buf"),
    Attributes("sglang.srt.managers.overlap_utils.RelayPayload", "bonus_tokens hidden_states"),
    Attributes("sglang.srt.managers.scheduler.Scheduler", "future_map"),
    Call("sglang.srt.speculative.eagle_utils._eagle_prefill_tail_tokens", "batch next_token_ids"),
    Attributes("sglang.srt.models.llama_eagle3.LlamaModel", "input_norm"),
    *SYMBOLS_OF_ALL,
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
SYMBOLS_OF_0512: tuple[Symbol, ...] = (
    Hook(f"{MODULE}.EAGLEWorkerV2.forward_batch_generation", "model_worker_batch"),
    Call(f"{TP_WORKER}.forward_batch_generation", "model_worker_batch"),
    Attributes(
        "sglang.srt.managers.schedule_batch.ModelWorkerBatch",
        "forward_mode is_extend_in_batch spec_info reqs seq_lens seq_lens_cpu seq_lens_sum "
        "req_pool_indices input_ids out_cache_loc extend_seq_lens extend_prefix_lens has_grammar "
        "return_logprob capture_hidden_mode",
    ),
    Attributes("sglang.srt.managers.schedule_batch.Req", "req_pool_idx"),
    Attributes(DRAFT_INPUT, "new_seq_lens verify_done"),
    Attributes(MODEL_RUNNER, "tp_group"),
    Attributes(f"{MODULE}.EagleDraftWorker", "draft_tp_context"),
    *decode_graphs.draft_extend_symbols(f"{MODULE}.EagleDraftWorker"),
    *SYMBOLS_OF_ALL,
    *metrics.SYMBOLS_OF_0512,
    *decode_graphs.SYMBOLS_OF_0512,
)
