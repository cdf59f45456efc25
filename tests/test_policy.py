"""The threshold, its hysteresis and the minimum stay."""

from __future__ import annotations

import pytest
from fused_fallback.integration.flags import FallbackArguments
from fused_fallback.integration.policy import FallbackPolicy


def modes(arguments: FallbackArguments, loads: list[int]) -> str:
    """The mode of each step as one letter: speculating (s) or off (o)."""
    policy = FallbackPolicy(arguments)
    return "".join("o" if policy.update(load) else "s" for load in loads)


def test_off_from_the_threshold_and_on_at_resume() -> None:
    arguments = FallbackArguments(threshold=8, resume=4, min_steps=1)
    assert modes(arguments, [1, 7, 8, 20, 8, 7, 5, 4, 5, 7, 8]) == "ssooooosss" + "o"


def test_between_resume_and_threshold_the_mode_is_kept() -> None:
    arguments = FallbackArguments(threshold=8, resume=4, min_steps=1)
    assert modes(arguments, [6] * 5 + [8] + [6] * 5 + [4] + [6] * 5) == "s" * 5 + "o" * 6 + "s" * 6


def test_minimum_stay_counts_from_the_flip() -> None:
    arguments = FallbackArguments(threshold=2, resume=1, min_steps=4)
    assert modes(arguments, [2, 1, 1, 1, 1, 2, 2, 2, 2, 2]) == "oooosssso" + "o"
    assert modes(arguments, [2, 1] * 6) == "ooooosssssoo"


def test_the_first_flip_does_not_wait() -> None:
    assert modes(FallbackArguments(threshold=2, min_steps=100), [2, 1, 1]) == "ooo"


def test_threshold_one_is_always_off() -> None:
    assert modes(FallbackArguments(threshold=1, min_steps=1), [1, 5, 1]) == "ooo"


def test_it_comes_back_after_every_rise() -> None:
    policy = FallbackPolicy(FallbackArguments(threshold=4, resume=2, min_steps=3))
    for _ in range(50):
        for load in [1] * 5 + [6] * 5:
            policy.update(load)
    assert policy.flips == 99
    assert not any(policy.update(1) for _ in range(9) if policy.flips > 99)


def test_held_steps_are_counted() -> None:
    policy = FallbackPolicy(FallbackArguments(threshold=2, resume=1, min_steps=4))
    for load in [2, 1, 1, 1, 1]:
        policy.update(load)
    assert (policy.flips, policy.held) == (2, 3)


def test_equal_loads_decide_equally_on_every_rank() -> None:
    arguments = FallbackArguments(threshold=3, resume=1, min_steps=2)
    loads = [(7 * i * i + 3 * i) % 5 for i in range(300)]
    assert modes(arguments, loads) == modes(arguments, loads)
    assert set(modes(arguments, loads)) == {"s", "o"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": 0}, "threshold must be 1 or more, got 0"),
        ({"min_steps": 0}, "min-steps must be 1 or more, got 0"),
        ({"threshold": 8, "resume": 8}, r"between 0 and .*threshold - 1 = 7, got 8"),
        ({"threshold": 8, "resume": -1}, "got -1"),
    ],
)
def test_bad_values_are_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FallbackArguments(**values)


@pytest.mark.parametrize(("threshold", "resume"), [(1, 0), (2, 1), (3, 2), (8, 6), (64, 48)])
def test_default_resume_lies_below_the_threshold(threshold: int, resume: int) -> None:
    assert FallbackArguments(threshold=threshold).resume == resume
