"""The draft step's two matmuls: which kernel takes how many rows.

Measured on an H200 with drafts of 8B and 70B targets: `profiling/bench_draft_step.py --variants`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .cuda.split_k import can_split
from .cuda.split_k import split_k as cuda_split_k
from .triton.quantize import quantize_rows
from .triton.split_k import split_k as triton_split_k

MAX_TRITON_ROWS = 64  # above, the library's matmuls are faster


def split_kernel(
    x: torch.Tensor, weight: torch.Tensor, *, cuda: bool
) -> Callable[..., torch.Tensor] | None:
    """What multiplies `x @ weight.T` split over K; None for more rows than that is worth.

    Args:
        cuda: whether it may be the CUDA kernel.
    """
    if cuda and can_split(x, weight):
        return cuda_split_k
    return triton_split_k if x.shape[0] <= MAX_TRITON_ROWS else None


def library_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`x @ weight.T + bias` [1, rows, N] in the dtype of x, as one share.

    With float8 weights x is rounded to float8 as well, each row by its own scale.
    """
    if weight_scale is None:
        return F.linear(x, weight, bias).unsqueeze(0)
    quantized, scale = quantize_rows(x)
    product = torch._scaled_mm(
        quantized,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.unsqueeze(0),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return product.unsqueeze(0)
