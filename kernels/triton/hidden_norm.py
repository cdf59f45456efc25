"""The norm between the draft step's two matmuls, over fc's partial sums or its output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..draft_layer import DraftLayer
from .dependent_launch import has_dependent_launch, start_next, wait_for_previous
from .prepare import inverse_rms, num_warps_for
from .split_k import summed


@triton.jit(do_not_specialize=["rows"])
def hidden_norm_kernel(
    hidden_ptr,  # [SPLITS, rows, H] of fc: partial sums, or the sum
    weight_scale_ptr,  # [H] float32 or None
    bias_ptr,  # [H] or None
    weight_ptr,  # [H]
    x_ptr,  # [rows, 2 * H] (output) its right half
    rows,
    eps,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    hidden = summed(hidden_ptr, row, rows, h, h < H, weight_scale_ptr, bias_ptr, H, SPLITS)
    hidden = hidden.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = hidden * inverse_rms(tl.sum(hidden * hidden, axis=0), H, eps) * weight
    tl.store(x_ptr + row * (2 * H) + H + h, y.to(x_ptr.dtype.element_ty), mask=h < H)


def hidden_norm(layer: DraftLayer, hidden: torch.Tensor, x: torch.Tensor) -> None:
    """Sum fc's output up and norm it into the right half of the projection's input.

    Args:
        hidden: [splits, rows, H], float32 partial sums without scales and bias, or [1, rows, H] in
            the weights' dtype with them.
        x: [rows, 2 * H], written.
    """
    splits, rows, hidden_size = hidden.shape
    partial = hidden.dtype != layer.dtype
    dependent = has_dependent_launch(x.device)
    hidden_norm_kernel[(rows,)](
        hidden,
        layer.fc_weight_scale if partial else None,
        layer.fc_bias if partial else None,
        layer.hidden_norm,
        x,
        rows,
        layer.rms_norm_eps,
        H=hidden_size,
        SPLITS=splits,
        BLOCK_H=triton.next_power_of_2(hidden_size),
        DEPENDENT=dependent,
        num_warps=num_warps_for(hidden_size),
        launch_pdl=dependent,
    )
