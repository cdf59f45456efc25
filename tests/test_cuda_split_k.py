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
        assert tiles.shared_bytes <= SHARED_BYTES
        assert tiles.in_flight * 2 * tiles.k * tiles.weight_rows == 64 * 1024


def test_tiles_halve_the_reads_of_x_where_that_costs_no_split() -> None:
    assert tiles_for(128, 4096, MULTIPROCESSORS).groups == 1
    assert tiles_for(128, 8192, MULTIPROCESSORS).groups == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles_without_spills_for_every_tile(dtype: torch.dtype) -> None:
    pytest.importorskip("cupy")
    from fused_fallback.kernels.cuda import driver

    sizes = [(8, 4096), (16, 4096), (32, 4096), (64, 4096), (128, 4096), (128, 8192)]
    for rows, weight_rows in sizes:
        macros = tiles_for(rows, weight_rows, MULTIPROCESSORS).macros(dtype)
        cubin, log = driver.compile_cubin(macros, "--ptxas-options=-v")
        assert cubin and "0 bytes spill stores" in log
        assert "serialized" not in log, log  # wgmma that waits for every instruction


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = unavailable(torch.device("cuda:7"))
    assert reason and ("cupy is not installed" in reason or "it does not load, " in reason)


def test_not_on_a_cpu() -> None:
    x, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (4, 128))
    assert not can_split(x, weight)
    assert "compute capability 9.0" in (unavailable(x.device) or "")
