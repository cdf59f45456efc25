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
    Attributes(
        REPORTER,
        "spec_num_forward_ct spec_num_accept_tokens "
        "spec_total_num_forward_ct spec_total_num_accept_tokens",
    ),
    Attributes(REQ, "spec_verify_ct spec_correct_drafts_histogram"),
)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
"""In 0.5.12.post1 it processes and reports itself."""
_SYMBOLS_OF_SCHEDULER: tuple[Symbol, ...] = (
    Hook(f"{SCHEDULER}.update_spec_metrics"),
    Hook(f"{SCHEDULER}.report_decode_stats"),
    Attributes(
        SCHEDULER,
        "spec_num_forward_ct spec_num_accept_tokens "
        "spec_total_num_forward_ct spec_total_num_accept_tokens",
    ),
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


def report_without_division_by_zero(
    report: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any
) -> Any:
    """Log an accept length of 0.00 where no step of the interval speculated.

    `report_decode_stats` divides by the interval's verify steps, which is never 0 in stock SGLang.
    0.5.12.post1 takes correct drafts for the difference between accept tokens and steps, and logs
    a length of 1.00.
    """
    if reporter.spec_num_forward_ct:
        return report(reporter, *args, **kwargs)
    totals = ("spec_total_num_forward_ct", "spec_total_num_accept_tokens")
    before = {name: getattr(reporter, name) for name in totals}
    reporter.spec_num_forward_ct = 1
    if not hasattr(reporter, "spec_num_correct_drafts"):
        reporter.spec_num_accept_tokens = 1
    try:
        return report(reporter, *args, **kwargs)
    finally:
        reporter.spec_num_forward_ct = reporter.spec_num_accept_tokens = 0
        for name, value in before.items():
            setattr(reporter, name, value)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{PROCESSOR}._resolve_spec_v2_tokens": leave_out_of_request,
    f"{REPORTER}.update_spec_metrics": leave_out_of_server,
    f"{REPORTER}.report_decode_stats": report_without_division_by_zero,
}
HOOKS_OF_0512: dict[str, Callable[..., Any]] = {
    f"{SCHEDULER}._resolve_spec_overlap_tokens": leave_out_of_request,
    f"{SCHEDULER}.update_spec_metrics": leave_out_of_server,
    f"{SCHEDULER}.report_decode_stats": report_without_division_by_zero,
}
HOOKS_OF_SPEC_V1: dict[str, Callable[..., Any]] = {
    f"{SCHEDULER}.process_batch_result_decode": note_mode,
    f"{SCHEDULER}.update_spec_metrics": leave_out_of_server,
    f"{SCHEDULER}.report_decode_stats": report_without_division_by_zero,
}
