"""What the CUDA matmul's host side decides. Its results: test_fused_draft_step.py, on a GPU."""

from __future__ import annotations

import pytest
import torch
from fused_fallback.kernels.cuda.split_k import MAX_ROWS, can_split, tiles_for, unavailable

MULTIPROCESSORS = 132  # of an H200
SHARED_BYTES = 227 * 1024  # that a block may have on compute capability 9.0


@pytest.mark.parametrize("weight_rows", [512, 2048, 4096, 8192])
def test_tiles_fit_a_multiprocessor_and_hold_what_is_in_flight(weight_rows: int) -> None:
    for rows in range(1, MAX_ROWS + 1):
        tiles = tiles_for(rows, weight_rows, MULTIPROCESSORS)
        assert tiles.rows >= rows
        assert tiles.stages >= tiles.in_flight
        assert tiles.stages * tiles.stage_bytes + 1024 <= SHARED_BYTES
        assert tiles.in_flight * 2 * tiles.k * tiles.weight_rows == 64 * 1024


def test_tiles_halve_the_reads_of_x_where_that_costs_no_split() -> None:
    assert tiles_for(128, 4096, MULTIPROCESSORS).groups == 1
    assert tiles_for(128, 8192, MULTIPROCESSORS).groups == 2


def test_not_on_a_cpu() -> None:
    x, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (4, 128))
    assert not can_split(x, weight)
    assert "compute capability 9.0" in (unavailable(x.device) or "")
