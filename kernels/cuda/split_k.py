"""Host side of split_k.cu, for GPUs of compute capability 9.0 (H100, H200)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ..splits import num_splits

MAX_ROWS = 128  # above, the library's matmuls are faster
BOX_K = 64
# Of the 227 KiB that a block may have: a small kernel of the target's stream fits beside it.
RING_BYTES = 192 * 1024
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tiles:
    """How `split_k_kernel` cuts its work; the names are its macros'."""

    rows: int
    groups: int
    boxes: int
    in_flight: int

    @property
    def weight_rows(self) -> int:
        return 64 * self.groups

    @property
    def k(self) -> int:
        return BOX_K * self.boxes

    @property
    def stage_bytes(self) -> int:
        return 2 * self.k * (self.weight_rows + self.rows)

    @property
    def stages(self) -> int:
        return RING_BYTES // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + 1024  # barriers

    def macros(self, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """What split_k.cu is compiled with."""
        sizes = {
            "ROWS": self.rows,
            "GROUPS": self.groups,
            "BOXES": self.boxes,
            "STAGES": self.stages,
            "IN_FLIGHT": self.in_flight,
        }
        half = {"WEIGHTS_ARE_HALF": 1} if dtype == torch.float16 else {}
        return tuple((sizes | half).items())


def tiles_for(rows: int, weight_rows: int, multiprocessors: int) -> Tiles:
    """64 KiB of weights in flight: enough for the bandwidth, and a short queue.

    Tiles of 64 weight rows need half the splits, thus half the partial sums, of tiles of 128, which
    need half the reads of x. The best for 8B and 70B drafts on an H200, of those that
    `profiling/bench_draft_step.py --variants` measures.
    """
    x_rows = next(size for size in (8, 16, 32, 64, 128) if rows <= size)
    if rows <= 16:
        return Tiles(x_rows, groups=1, boxes=4, in_flight=2)
    if rows <= 64 or weight_rows <= 32 * multiprocessors:
        return Tiles(x_rows, groups=1, boxes=2, in_flight=4)
    return Tiles(x_rows, groups=2, boxes=1, in_flight=4)


def _kernel(tiles: Tiles, dtype: torch.dtype, device: torch.device) -> Any:
    from . import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.load_kernel("split_k_kernel", tiles.macros(dtype), tiles.shared_bytes, index)


@cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernel does not run there; None where it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it is written for compute capability 9.0 (H100, H200)"
    if find_spec("cupy") is None:
        return "cupy is not installed, pip install cupy-cuda13x"
    try:
        _kernel(tiles_for(1, 1, 1), torch.bfloat16, device)
    except Exception as error:  # cupy, NVRTC and the driver have types of their own
        return f"it does not load, {type(error).__name__}: {error}"
    return None


@cache
def _multiprocessors(device: torch.device) -> int:
    """0 where the kernel does not run."""
    if unavailable(device):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_split(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `split_k` takes these: few rows, 16-bit weights, rows on 16-byte boundaries."""
    return (
        x.shape[0] <= MAX_ROWS
        and weight.dtype == x.dtype
        and x.dtype in DTYPES
        and weight.shape[1] % 16 == 0  # so that half a row is a multiple of 16 bytes too
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and _multiprocessors(x.device) > 0
    )


@cache
def _params() -> type[ctypes.Structure]:
    """`Params` of split_k.cu, field by field."""
    from .driver import TensorMap

    class Params(ctypes.Structure):
        _fields_ = (
            ("weight", TensorMap * 2),
            ("x", TensorMap * 2),
            ("partials", ctypes.c_void_p),
            *((name, ctypes.c_int32) for name in "rows n tiles splits runs steps late".split()),
            ("padding", ctypes.c_uint8 * 64),  # the kernel's struct is a multiple of 64 bytes
        )

    return Params


def split_k(
    x: torch.Tensor, weight: torch.Tensor, *, early: bool, second_half_is_late: bool = False
) -> torch.Tensor:
    """Partial sums [splits, rows, N] float32 of `x @ weight.T`; a bias is not applied.

    Args:
        x: [rows, K], weight: [N, K], that `can_split` accepts.
        early: start beside the kernel before, which must be one of this package.
        second_half_is_late: whether the kernel before writes the second half of the columns of `x`;
            if not, it writes nothing of `x`.
    """
    from . import driver

    rows, (n, width) = x.shape[0], weight.shape
    runs = 2 if second_half_is_late else 1
    k = width // runs
    multiprocessors = _multiprocessors(x.device)
    at = tiles_for(rows, n, multiprocessors)
    tiles, steps = -(-n // at.weight_rows), -(-k // at.k)
    splits = num_splits(weight_tiles=tiles, steps=steps, multiprocessors=multiprocessors)
    partials = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)

    def maps(matrix: torch.Tensor, box_rows: int, *, weights: bool) -> ctypes.Array:
        columns = matrix.split(k, dim=1)
        return (driver.TensorMap * 2)(
            *(driver.map_of(run, box_rows, weights=weights) for run in columns)
        )

    driver.launch(
        _kernel(at, x.dtype, x.device),
        _params()(
            weight=maps(weight, at.weight_rows, weights=True),
            x=maps(x, at.rows, weights=False),
            partials=partials.data_ptr(),
            rows=rows,
            n=n,
            tiles=tiles,
            splits=splits,
            runs=runs,
            steps=steps,
            late=1 if second_half_is_late else runs,
        ),
        grid=tiles * splits,
        block=128 * at.groups + 64,
        shared_bytes=at.shared_bytes,
        dependent=early,
    )
    return partials
