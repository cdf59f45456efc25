"""A matmul's input rounded to float8_e4m3fn, each row by its own scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..float8 import E4M3_MAX, E4M3_OVERFLOW
from .float8 import FLOAT8_E4M3, to_float8_bits
from .prepare import num_warps_for


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [rows, WIDTH]
    stride_x,
    y_ptr,  # [rows, WIDTH] uint8, the bits of float8_e4m3fn (output)
    scale_ptr,  # [rows] float32 (output)
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.full((), 0.0, tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        at = start + column
        x = tl.load(x_ptr + row * stride_x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    tl.store(scale_ptr + row, scale)
    for start in tl.static_range(0, WIDTH, BLOCK):
        at = start + column
        x = tl.load(x_ptr + row * stride_x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        bits = to_float8_bits(x / scale, FORMAT, OVERFLOW)
        tl.store(y_ptr + row * WIDTH + at, bits, mask=at < WIDTH)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, width] float8_e4m3fn and [rows, 1] float32: x is their product."""
    rows, width = x.shape
    y = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(width))  # arbitrary
    quantize_rows_kernel[(rows,)](
        x,
        x.stride(0),
        y.view(torch.uint8),
        scale,
        WIDTH=width,
        LARGEST=E4M3_MAX,
        OVERFLOW=E4M3_OVERFLOW,
        FORMAT=FLOAT8_E4M3,
        BLOCK=block,
        num_warps=num_warps_for(block),
    )
    return y, scale
