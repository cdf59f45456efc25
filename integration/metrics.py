"""Keeps off steps out of SGLang's accept length and rate, which speak of speculation alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .symbols import Attributes, Hook, Symbol

_COMPONENTS = "sglang.srt.managers.scheduler_components"
PROCESSOR = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
REPORTER = f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter"
REQ = "sglang.srt.managers.schedule_batch.Req"
SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{PROCESSOR}._resolve_spec_v2_tokens", "result batch"),
    Hook(f"{REPORTER}.update_spec_metrics"),
    Hook(f"{REPORTER}.report_decode_stats"),
    Attributes(PROCESSOR, "metrics_reporter"),
    Attributes(REPORTER, "scheduler spec_num_forward_ct"),
    Attributes("sglang.srt.managers.scheduler.Scheduler", "spec_algorithm"),
    Attributes(REQ, "spec_verify_ct spec_correct_drafts_histogram"),
)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
"""In 0.5.12.post1 it processes and reports itself."""
_SYMBOLS_OF_SCHEDULER: tuple[Symbol, ...] = (
    Hook(f"{SCHEDULER}.update_spec_metrics"),
    Hook(f"{SCHEDULER}.report_decode_stats"),
    Attributes(SCHEDULER, "spec_num_forward_ct spec_algorithm"),
)
SYMBOLS_OF_0512: tuple[Symbol, ...] = (
    Hook(f"{SCHEDULER}._resolve_spec_overlap_tokens", "result batch"),
    Attributes(REQ, "spec_verify_ct spec_correct_drafts_histogram"),
    *_SYMBOLS_OF_SCHEDULER,
)
SYMBOLS_OF_SPEC_V1: tuple[Symbol, ...] = (
    Hook(f"{SCHEDULER}.process_batch_result_decode", "batch result"),
    *_SYMBOLS_OF_SCHEDULER,
)

_OFF = "_fused_fallback_off_step"


def leave_out_of_request(
    resolve: Callable[..., Any], processor: Any, result: Any, batch: Any
) -> Any:
    """Take back what resolving spec v2's tokens counts as a verify step of each request."""
    off = result.speculative_num_draft_tokens == 1
    setattr(getattr(processor, "metrics_reporter", processor), _OFF, off)
    if not off:
        return resolve(processor, result, batch)
    before = [req.spec_verify_ct for req in batch.reqs]
    tokens = resolve(processor, result, batch)
    for req, count in zip(batch.reqs, before, strict=True):
        if req.spec_verify_ct != count:
            req.spec_verify_ct = count
            req.spec_correct_drafts_histogram[0] -= 1
    return tokens


def note_mode(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Tell `leave_out_of_server` the mode of spec v1, which counts a request's steps itself."""
    setattr(scheduler, _OFF, result.speculative_num_draft_tokens == 1)
    return process(scheduler, batch, result)


def leave_out_of_server(update: Callable[..., None], reporter: Any, *args: Any, **kw: Any) -> None:
    """Skip `update_spec_metrics` for an off step."""
    if not getattr(reporter, _OFF, False):
        update(reporter, *args, **kw)


def report_speculation_only_where_there_was_some(
    report: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any
) -> Any:
    """Log no accept length, as without speculation, where no step of the interval speculated.

    `report_decode_stats` divides by the interval's verify steps, which is never 0 in stock SGLang.
    """
    if reporter.spec_num_forward_ct:
        return report(reporter, *args, **kwargs)
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    scheduler = getattr(reporter, "scheduler", reporter)  # itself in 0.5.12.post1
    algorithm, scheduler.spec_algorithm = scheduler.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        return report(reporter, *args, **kwargs)
    finally:
        scheduler.spec_algorithm = algorithm


HOOKS: dict[str, Callable[..., Any]] = {
    f"{PROCESSOR}._resolve_spec_v2_tokens": leave_out_of_request,
    f"{REPORTER}.update_spec_metrics": leave_out_of_server,
    f"{REPORTER}.report_decode_stats": report_speculation_only_where_there_was_some,
}
HOOKS_OF_0512: dict[str, Callable[..., Any]] = {
    f"{SCHEDULER}._resolve_spec_overlap_tokens": leave_out_of_request,
    f"{SCHEDULER}.update_spec_metrics": leave_out_of_server,
    f"{SCHEDULER}.report_decode_stats": report_speculation_only_where_there_was_some,
}
HOOKS_OF_SPEC_V1: dict[str, Callable[..., Any]] = {
    f"{SCHEDULER}.process_batch_result_decode": note_mode,
    f"{SCHEDULER}.update_spec_metrics": leave_out_of_server,
    f"{SCHEDULER}.report_decode_stats": report_speculation_only_where_there_was_some,
}
