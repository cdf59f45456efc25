"""SGLang's `EAGLEWorker` (spec v1, overlap off; last in 0.5.12.post1): one step off and back.

The worker gets the scheduler's own `ScheduleBatch` and keeps the books itself: slots, lengths and
everything about the requests that `EagleVerifyInput.verify` does when speculation is on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import metrics
from ..symbols import Attributes, Call, Hook, Symbol
from . import decode_graphs
from .adapter import MODEL_RUNNER, Adapter, restored, set_seq_lens, to_device
from .adapter import SYMBOLS as SYMBOLS_OF_ADAPTER
from .decode_graphs import without_triton_draft_extend

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

MODULE = "sglang.srt.speculative.eagle_worker"


class EagleWorkerV1(Adapter):
    """`EAGLEWorker` of 0.5.12.post1."""

    worker_class = "EAGLEWorker"
    forward_target = f"{MODULE}.EAGLEWorker.forward_batch_generation"
    prefill_target = f"{MODULE}.EAGLEWorker.forward_draft_extend"
    metrics_hooks = metrics.HOOKS_OF_SPEC_V1
    graph_runner = decode_graphs.CUDA_RUNNER

    @classmethod
    def symbols(cls) -> tuple[Symbol, ...]:
        return SYMBOLS

    def draft_prefill(
        self,
        draft_prefill: Callable[..., None],
        batch: ScheduleBatch,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        mm_input_embeds: torch.Tensor | None = None,
    ) -> None:
        if self._fuses_prefill(batch, mm_input_embeds):
            draft_input = self._prefill_off(batch, hidden_states, next_token_ids)
            batch.spec_info = self._draft_input(draft_input)
        else:
            draft_prefill(
                self.worker, batch, hidden_states, next_token_ids, seq_lens_cpu, mm_input_embeds
            )

    def _decode_off(self, batch: ScheduleBatch) -> GenerationBatchResult:
        seq_lens = batch.seq_lens
        result = self._run_target(batch)
        # The host waits for the tokens alone; what follows runs while it processes them.
        token_ids = result.next_token_ids.to("cpu", non_blocking=True)
        sampled = torch.get_device_module(seq_lens.device).Event()
        sampled.record()
        draft_input = self._draft_step(batch, result, seq_lens)
        sampled.synchronize()
        tokens = token_ids.tolist()
        for req, token in zip(batch.reqs, tokens, strict=True):
            _append(req, token, batch.model_config.think_end_id)
        if batch.return_logprob:
            _append_logprobs(batch.reqs, tokens, result.logits_output)
        self._keep_unfinished(batch, draft_input, tokens)
        result.num_correct_drafts_per_req_cpu = [0] * len(tokens)
        result.speculative_num_draft_tokens = 1  # marks an off step for the metrics
        return result

    def _run_target(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """The target's plain decode, prepared as `ScheduleBatch.prepare_for_decode` does it."""
        from sglang.srt.mem_cache.common import alloc_for_decode
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        batch.input_ids = batch.spec_info.bonus_tokens.to(torch.int64)
        penalizers = batch.sampling_info.penalizer_orchestrator
        if penalizers.is_required:
            penalizers.cumulate_output_tokens(batch.input_ids)
        batch.out_cache_loc = alloc_for_decode(batch, token_per_req=1)
        for req in batch.reqs:
            req.decode_batch_idx += 1
        set_seq_lens(batch, batch.seq_lens + 1, 1)
        batch.spec_info = None
        model_worker_batch = batch.get_model_worker_batch()
        model_worker_batch.capture_hidden_mode = CaptureHiddenMode.FULL
        with self.graphs.in_place_of_verify(self.target):
            return self.worker.target_worker.forward_batch_generation(model_worker_batch)

    def _keep_unfinished(self, batch: ScheduleBatch, draft_input: Any, tokens: list[int]) -> None:
        """The scheduler drops finished requests from the batch, but takes the draft input as is."""
        kept = [t for req, t in zip(batch.reqs, tokens, strict=True) if not req.finished()]
        if not kept:
            self.worker._draft_preprocess_idle(batch)
            return
        if len(kept) < len(tokens):
            draft_input.bonus_tokens = to_device(kept, batch.seq_lens.device)
            for name in ("topk_p", "topk_index", "hidden_states"):  # the same in every row
                setattr(draft_input, name, getattr(draft_input, name)[: len(kept)])
        batch.spec_info = draft_input

    def _draft_extend(
        self, batch: ScheduleBatch, token_ids: torch.Tensor, pending: list[bool]
    ) -> Any:
        """As after a verify step that accepted one token of each request."""
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

        ones = torch.ones(len(pending), dtype=torch.int32, device=batch.seq_lens.device)
        with restored(batch), self._draft_context(), without_triton_draft_extend(self.worker):
            batch.out_cache_loc = self._slots(batch, 1, pending).flatten()
            batch.spec_info = EagleDraftExtendInput(
                hidden_states=self.fallback.kept_hidden_states[batch.req_pool_indices.long()],
                num_correct_drafts=ones - 1,
                num_accept_tokens=ones,
                num_accept_tokens_cpu=[1] * len(pending),
                input_ids=token_ids,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu,
                req_pool_indices=batch.req_pool_indices,
            )
            return self.worker.forward_draft_extend_after_decode(batch)

    def _draft_runner(self) -> Any:
        return self.worker.model_runner

    def _draft_context(self) -> contextlib.AbstractContextManager[Any]:
        return self.worker.draft_tp_context(self.draft.tp_group)


def _append(req: Req, token: int, think_end_id: int | None) -> None:
    """What a verify step does with each token of a request."""
    req.output_ids.append(token)
    if req.require_reasoning and think_end_id is not None:
        req.update_reasoning_tokens(token, think_end_id)
    req.check_finished()
    if req.grammar is not None and not req.finished():
        req.grammar.accept_token(token)
        req.check_finished()
    req.kv_committed_len += 1
    req.kv_allocated_len = req.kv_committed_len


def _append_logprobs(reqs: list[Req], tokens: list[int], output: LogitsProcessorOutput) -> None:
    """What spec v1 does besides: the scheduler reads no logprobs from its results."""
    values = output.next_token_logprobs.tolist()
    for i, req in enumerate(reqs):
        if not req.return_logprob:
            continue
        req.output_token_logprobs_val.append(values[i])
        req.output_token_logprobs_idx.append(tokens[i])
        if req.top_logprobs_num > 0:
            req.output_top_logprobs_val.append(_as_list(output.next_token_top_logprobs_val[i]))
            req.output_top_logprobs_idx.append(_as_list(output.next_token_top_logprobs_idx[i]))
        if req.token_ids_logprob is not None:
            req.output_token_ids_logprobs_val.append(
                _as_list(output.next_token_token_ids_logprobs_val[i])
            )
            req.output_token_ids_logprobs_idx.append(output.next_token_token_ids_logprobs_idx[i])


def _as_list(values: torch.Tensor | list[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else values


EAGLE_INFO = "sglang.srt.speculative.eagle_info"
TP_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch"

SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{MODULE}.EAGLEWorker.forward_batch_generation", "batch"),
    Hook(
        f"{MODULE}.EAGLEWorker.forward_draft_extend",
        "batch hidden_states next_token_ids seq_lens_cpu mm_input_embeds",
    ),
    Call(f"{MODULE}.EAGLEWorker.forward_draft_extend_after_decode", "batch"),
    Call(f"{MODULE}.EAGLEWorker._draft_preprocess_idle", "batch"),
    Attributes(f"{MODULE}.EAGLEWorker", "target_worker model_runner topk draft_tp_context"),
    *decode_graphs.draft_extend_symbols(f"{MODULE}.EAGLEWorker"),
    Call(f"{TP_WORKER}.forward_batch_generation", "model_worker_batch"),
    Call("sglang.srt.mem_cache.common.alloc_for_decode", "batch", "token_per_req"),
    Call(f"{SCHEDULE_BATCH}.ScheduleBatch.get_model_worker_batch"),
    Attributes(
        f"{SCHEDULE_BATCH}.ScheduleBatch",
        "forward_mode is_extend_in_batch spec_info reqs seq_lens seq_lens_cpu seq_lens_sum "
        "req_pool_indices input_ids out_cache_loc extend_lens prefix_lens sampling_info "
        "model_config return_logprob",
    ),
    Attributes(f"{SCHEDULE_BATCH}.ModelWorkerBatch", "capture_hidden_mode"),
    Attributes(
        f"{SCHEDULE_BATCH}.Req",
        "req_pool_idx output_ids require_reasoning update_reasoning_tokens check_finished finished "
        "grammar kv_committed_len kv_allocated_len decode_batch_idx return_logprob "
        "top_logprobs_num token_ids_logprob output_token_logprobs_val output_token_logprobs_idx "
        "output_top_logprobs_val output_top_logprobs_idx output_token_ids_logprobs_val "
        "output_token_ids_logprobs_idx",
    ),
    Attributes(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator",
        "is_required cumulate_output_tokens",
    ),
    Attributes(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "logits_output next_token_ids num_correct_drafts_per_req_cpu speculative_num_draft_tokens",
    ),
    Attributes(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "next_token_top_logprobs_val next_token_top_logprobs_idx "
        "next_token_token_ids_logprobs_val next_token_token_ids_logprobs_idx",
    ),
    Attributes(
        f"{EAGLE_INFO}.EagleDraftExtendInput",
        "hidden_states num_correct_drafts num_accept_tokens num_accept_tokens_cpu input_ids "
        "seq_lens seq_lens_cpu req_pool_indices",
    ),
    Attributes(MODEL_RUNNER, "tp_group"),
    *SYMBOLS_OF_ADAPTER,
    *metrics.SYMBOLS_OF_SPEC_V1,
    *decode_graphs.SYMBOLS_OF_0512,
)
