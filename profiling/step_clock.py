"""The time of every decode step inside a server, and flips on schedule instead of by load.

In the scheduler of a server that starts with FUSED_FALLBACK_PROFILE=step_clock and
FUSED_FALLBACK_FLIP_EVERY=N, the mode flips every N decode steps, and `/server_info` carries
`fused_fallback.clock`: what happened since it was last asked for.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from ..integration.policy import FallbackPolicy

DRAFT_EXTENDS = {
    "EAGLEWorkerV2": ("draft_worker", "_draft_extend_for_decode"),
    "EAGLEWorker": (None, "forward_draft_extend_after_decode"),
}
"""Whose method each worker's draft extend of a decode step is; None for its own."""


class FlipEvery(FallbackPolicy):
    """Flips every `steps` decode steps, whatever the load; begins with speculation on."""

    steps: int = 1
    _step: int = 0

    def update(self, num_running: int) -> bool:
        off = self._step // self.steps % 2 == 1
        self._step += 1
        self.flips += off != self.off
        self.off = off
        return off


class Instant:
    """A point in the current stream's work, or in the CPU's where there is no GPU."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self.event:
            self.event.record()
        else:
            self.seconds = time.perf_counter()

    def ms_to(self, later: Instant) -> float:
        """Milliseconds; both must have passed."""
        if self.event:
            return self.event.elapsed_time(later.event)
        return 1e3 * (later.seconds - self.seconds)


def enable_serving(adapter: Any) -> None:
    """Install the clock and the schedule.

    Args:
        adapter: an `integration.adapters.adapter.Adapter`.
    """
    fallback = adapter.fallback
    fallback.policy = FlipEvery(fallback.policy.arguments)
    fallback.policy.steps = int(os.environ["FUSED_FALLBACK_FLIP_EVERY"])
    begins: list[tuple[Instant, int, bool]] = []
    extends: list[tuple[int, Instant, Instant]] = []

    update, state = fallback.update, fallback.state
    owner, method = DRAFT_EXTENDS[type(adapter.worker).__name__]
    drafter = getattr(adapter.worker, owner) if owner else adapter.worker
    extend = getattr(drafter, method)

    @wraps(update)
    def timed_update(num_running: int) -> bool:
        begin = Instant()
        off = update(num_running)
        begins.append((begin, num_running, off))
        return off

    @wraps(extend)
    def timed_extend(*args: Any, **kwargs: Any) -> Any:
        begin = Instant()
        result = extend(*args, **kwargs)
        extends.append((len(begins) - 1, begin, Instant()))
        return result

    @wraps(state)
    def state_with_clock() -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steps = [
            {"requests": requests, "off": off, "ms": begin.ms_to(after), "extend_ms": []}
            for (begin, requests, off), (after, _, _) in pairwise(begins)
        ]
        for step, begin, end in extends:
            if 0 <= step < len(steps):
                steps[step]["extend_ms"].append(begin.ms_to(end))
        begins.clear()
        extends.clear()
        return {**state(), "clock": steps}

    fallback.update, fallback.state = timed_update, state_with_clock
    setattr(drafter, method, timed_extend)
