"""The microbenchmark's cases under pytest-benchmark. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_fallback.bindings import ops
from fused_fallback.profiling.draft_step_peers import SHAPES, random_layer, random_step, unfused
from fused_fallback.profiling.timing import capture

pytest.importorskip("pytest_benchmark")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to be timed")

STEPS = {"fused": lambda step: ops.fused_draft_step(**step), "unfused torch": unfused}


@needs_gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("peer", STEPS)
def test_draft_step_8b(benchmark: Any, peer: str, rows: int) -> None:
    """Four steps over four copies of the weights, so that none is in L2."""
    steps = [random_step(random_layer(SHAPES["8b"]), rows) for _ in range(4)]
    graph = capture([lambda step=step: STEPS[peer](step) for step in steps], rounds=1)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.extra_info["floor_us"] = 4 * SHAPES["8b"].floor_us(rows)
    benchmark.pedantic(replay, warmup_rounds=3, rounds=20)


def test_floors_are_the_documented_ones() -> None:
    """Against the table in the results: bytes decide below 256 rows, FLOPs from there on."""
    floors = {rows: round(SHAPES["8b"].floor_us(rows), 1) for rows in (1, 64, 128, 512)}
    assert floors == {1: 31.4, 64: 31.9, 128: 32.5, 512: 87.2}
    assert round(SHAPES["70b"].floor_us(1), 1) == 109.8
