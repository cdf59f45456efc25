"""A matmul for few rows in Triton, split over K: a walk over the weights, once.

Every block takes a tile of weight rows and a share of K and leaves float32 partial sums, which the
kernel that follows adds up (`summed`) in the order of the shares, so that the same inputs give the
same bytes. float8 weights (`quantize_layer`) are widened as they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from ..splits import num_splits
from .dependent_launch import has_dependent_launch, start_next, wait_for_previous

INTERPRETED_MULTIPROCESSORS = 8  # arbitrary
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # interpreted: float32 alone


@dataclass(frozen=True)
class Tiles:
    """How `split_k_kernel` cuts its work.

    Args:
        rows: batch rows of a tile, a power of two from 16.
        weight_rows, k: the tile of weights that is on its way in one of `num_stages` buffers.
    """

    rows: int
    weight_rows: int
    k: int
    num_warps: int
    num_stages: int


def tiles_for(rows: int) -> Tiles:
    """Tiles that keep 120 KiB or more of weights in flight and read a batch row few times.

    The best of those tried for 8B and 70B drafts together on an H200.
    """
    if rows <= 16:
        return Tiles(16, weight_rows=64, k=256, num_warps=4, num_stages=4)
    return Tiles(64, weight_rows=128, k=128, num_warps=8, num_stages=4)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def multiply_share(
    x_row_ptrs,  # [BLOCK_M, 1]
    weight_row_ptrs,  # [BLOCK_N, 1]
    in_rows,  # [BLOCK_M, 1]
    in_weight_rows,  # [BLOCK_N, 1]
    begin,
    end,
    k_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """x @ weight.T over the steps [begin, end) of `k_size` columns."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(begin, end):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_row_ptrs + k, mask=in_rows & (k < k_size), other=0.0)
        weight = tl.load(
            weight_row_ptrs + k,
            mask=in_weight_rows & (k < k_size),
            other=0.0,
            eviction_policy="evict_first",
        )
        acc = tl.dot(x.to(OPERAND), tl.trans(weight.to(OPERAND)), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def split_k_kernel(
    x_ptr,  # [rows, WIDTH]
    weight_ptr,  # [N, WIDTH] of the dtype of x, or float8
    partials_ptr,  # [SPLITS, rows, N] float32 (output)
    rows,
    stride_x,
    num_weight_rows,  # N
    width,
    k_size,  # width, or half of it where the kernel before writes the other half
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    SECOND_HALF_IS_LATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    x_row_ptrs = x_ptr + m.to(tl.int64) * stride_x
    weight_row_ptrs = weight_ptr + n[:, None].to(tl.int64) * width
    in_rows, in_weight_rows = m < rows, n < num_weight_rows
    steps = tl.cdiv(k_size, BLOCK_K)
    begin, end = steps * split // num_splits, steps * (split + 1) // num_splits
    acc = multiply_share(
        x_row_ptrs, weight_row_ptrs, in_rows, in_weight_rows[:, None],
        begin, end, k_size, BLOCK_M, BLOCK_N, BLOCK_K, OPERAND,
    )  # fmt: skip
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    if SECOND_HALF_IS_LATE:
        acc += multiply_share(
            x_row_ptrs + k_size, weight_row_ptrs + k_size, in_rows, in_weight_rows[:, None],
            begin, end, k_size, BLOCK_M, BLOCK_N, BLOCK_K, OPERAND,
        )  # fmt: skip
    to = partials_ptr + (split * rows + m).to(tl.int64) * num_weight_rows + n[None, :]
    tl.store(to, acc, mask=in_rows & in_weight_rows[None, :])


@triton.jit
def summed(
    partials_ptr,  # [SPLITS, rows, N] float32, or [1, rows, N] in the weights' dtype
    row,
    rows,
    columns,
    mask,
    weight_scale_ptr,  # [N] float32 or None
    bias_ptr,  # [N] or None
    N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Columns of a row of the product, in float32."""
    at = row * N + columns
    y = tl.load(partials_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(partials_ptr + rows.to(tl.int64) * N * split + at, mask=mask, other=0.0)
    if weight_scale_ptr is not None:
        y *= tl.load(weight_scale_ptr + columns, mask=mask, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return y


def split_k(
    x: torch.Tensor, weight: torch.Tensor, *, early: bool, second_half_is_late: bool = False
) -> torch.Tensor:
    """Partial sums [splits, rows, N] float32 of `x @ weight.T`; scales and bias are not applied.

    Args:
        x: [rows, K], at most 64 rows.
        weight: [N, K] in the dtype of x or float8_e4m3fn.
        early: start beside the kernel before, which must be one of this package.
        second_half_is_late: whether the kernel before writes the second half of the columns of `x`;
            if not, it writes nothing of `x`.
    """
    rows, (n, width) = x.shape[0], weight.shape
    k = width // 2 if second_half_is_late else width
    tiles = tiles_for(rows)
    weight_tiles = triton.cdiv(n, tiles.weight_rows)
    splits = num_splits(
        weight_tiles=weight_tiles,
        steps=triton.cdiv(k, tiles.k),
        multiprocessors=_multiprocessors(x.device),
    )
    partials = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
    dependent = has_dependent_launch(x.device)
    split_k_kernel[(weight_tiles, splits)](
        x,
        weight,
        partials,
        rows,
        x.stride(0),
        n,
        width,
        k,
        splits,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.weight_rows,
        BLOCK_K=tiles.k,
        OPERAND=_OPERANDS[x.dtype] if x.is_cuda else tl.float32,
        SECOND_HALF_IS_LATE=second_half_is_late,
        DEPENDENT=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent and early,
    )
    return partials
