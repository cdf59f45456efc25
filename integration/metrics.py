"""Keeps off steps out of SGLang's accept length and rate, which speak of speculation alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .symbols import Attributes, Hook, Symbol

_COMPONENTS = "sglang.srt.managers.scheduler_components"
PROCESSOR = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
REPORTER = f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter"
SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{PROCESSOR}._resolve_spec_v2_tokens", "result batch"),
    Hook(f"{REPORTER}.update_spec_metrics"),
    Hook(f"{REPORTER}.report_decode_stats"),
    Attributes(PROCESSOR, "metrics_reporter"),
    Attributes(REPORTER, "spec_num_forward_ct spec_total_num_forward_ct"),
    Attributes(
        "sglang.srt.managers.schedule_batch.Req", "spec_verify_ct spec_correct_drafts_histogram"
    ),
)

_OFF = "_fused_fallback_off_step"


def leave_out_of_request(
    resolve: Callable[..., Any], processor: Any, result: Any, batch: Any
) -> Any:
    """Take back what `_resolve_spec_v2_tokens` counts as a verify step of each request."""
    off = result.speculative_num_draft_tokens == 1
    setattr(processor.metrics_reporter, _OFF, off)
    if not off:
        return resolve(processor, result, batch)
    before = [req.spec_verify_ct for req in batch.reqs]
    tokens = resolve(processor, result, batch)
    for req, count in zip(batch.reqs, before, strict=True):
        if req.spec_verify_ct != count:
            req.spec_verify_ct = count
            req.spec_correct_drafts_histogram[0] -= 1
    return tokens


def leave_out_of_server(update: Callable[..., None], reporter: Any, *args: Any, **kw: Any) -> None:
    """Skip `update_spec_metrics` for an off step."""
    if not getattr(reporter, _OFF, False):
        update(reporter, *args, **kw)


def report_without_division_by_zero(
    report: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any
) -> Any:
    """Log an accept length of 0.00 where no step of the interval speculated.

    `report_decode_stats` divides by the interval's verify steps, which is never 0 in stock SGLang.
    """
    if reporter.spec_num_forward_ct:
        return report(reporter, *args, **kwargs)
    total = reporter.spec_total_num_forward_ct
    reporter.spec_num_forward_ct = 1
    try:
        return report(reporter, *args, **kwargs)
    finally:
        reporter.spec_num_forward_ct = 0
        reporter.spec_total_num_forward_ct = total
