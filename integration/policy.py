"""When speculation is off: a threshold with hysteresis and a minimum stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from .flags import FallbackArguments


@dataclass
class FallbackPolicy:
    """Decides the mode of each decode step from the number of running requests alone.

    Every tensor-parallel rank schedules the same batches, so every rank decides the same without
    a message (ranks that disagree would deadlock in the next collective).

    Args:
        arguments: threshold, resume and minimum stay.
    """

    arguments: FallbackArguments
    off: bool = field(default=False, init=False)
    flips: int = field(default=0, init=False)
    held: int = field(default=0, init=False)
    """Steps in which only the minimum stay kept the mode."""
    _stay: int = field(default=0, init=False)

    def update(self, num_running: int) -> bool:
        """Advance by one decode step of `num_running` requests; return whether it is off."""
        self._stay += 1
        wanted = (
            num_running > self.arguments.resume
            if self.off
            else num_running >= self.arguments.threshold
        )
        if wanted != self.off:
            # A fresh server has no mode to keep: its first flip needs no stay.
            if self.flips and self._stay < self.arguments.min_steps:
                self.held += 1
            else:
                self.off, self._stay = wanted, 0
                self.flips += 1
        return self.off
