"""RoPE on K, conversion to the pool's dtype, and the store, behind the K and V matmul.

Bytes per row: 4 * num_kv_heads * head_dim elements of K and V (in partial sums float32, times their
number), and half as many elements written. A padding row (negative slot) stores nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..draft_layer import DraftLayer
from ..float8 import E4M3_OVERFLOW
from .dependent_launch import has_dependent_launch, wait_for_previous
from .float8 import FLOAT8_E4M3, FLOAT8_E5M2, to_float8_bits
from .split_k import summed

CAST = 0
_CONVERSIONS = {torch.float8_e4m3fn: FLOAT8_E4M3, torch.float8_e5m2: FLOAT8_E5M2}


@triton.jit
def store_converted(
    buffer_ptr,
    offsets,
    value,
    scale,
    mask,
    HAS_SCALE: tl.constexpr,
    CONVERSION: tl.constexpr,
    E4M3_OVERFLOW: tl.constexpr,
):
    """Divide by the scale, round to the weights' dtype, convert to the pool's, store."""
    if HAS_SCALE:
        dtype: tl.constexpr = value.dtype
        value = tl.math.div_rn(value.to(tl.float32), tl.full(value.shape, 1.0, tl.float32) * scale)
        value = value.to(dtype)
    if CONVERSION == 0:
        tl.store(buffer_ptr + offsets, value.to(buffer_ptr.dtype.element_ty), mask=mask)
    else:
        bits = to_float8_bits(value.to(tl.float32), CONVERSION, E4M3_OVERFLOW)
        tl.store(buffer_ptr + offsets, bits, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def store_kernel(
    kv_ptr,  # [SPLITS, rows, 2 * heads * HEAD_DIM] K heads, then V heads: partial sums, or the sum
    weight_scale_ptr,  # [2 * heads * HEAD_DIM] float32 or None
    bias_ptr,  # [2 * heads * HEAD_DIM] or None
    dtype_ptr,  # of the weights' dtype, not read
    positions_ptr,  # [rows]
    slots_ptr,  # [rows]
    cos_sin_ptr,  # [max_position, ROTARY_DIM] float32
    k_buffer_ptr,  # [slots, heads, HEAD_DIM] (output)
    v_buffer_ptr,  # [slots, heads, HEAD_DIM] (output)
    rows,
    num_slots,
    stride_k,
    stride_v,
    k_scale,
    v_scale,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    CONVERSION: tl.constexpr,
    E4M3_OVERFLOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    d = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        first, partner, frequency = d < HALF, tl.where(d < HALF, d + HALF, d - HALF), d % HALF
    else:
        first, partner, frequency = d % 2 == 0, d ^ 1, d // 2
    rotated = (d < ROTARY_DIM) & live
    position = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int64)
    cos_ptr = cos_sin_ptr + position * ROTARY_DIM + frequency
    cos = tl.load(cos_ptr, mask=rotated, other=1.0)
    sin = tl.load(cos_ptr + HALF, mask=rotated, other=0.0)
    wait_for_previous(DEPENDENT)
    if live:
        DTYPE: tl.constexpr = dtype_ptr.dtype.element_ty
        N: tl.constexpr = 2 * HEADS * HEAD_DIM
        out = head * HEAD_DIM + d
        in_d = d < HEAD_DIM
        k = summed(kv_ptr, row, rows, out, in_d, weight_scale_ptr, bias_ptr, N, SPLITS)
        other = head * HEAD_DIM + partner
        other = summed(kv_ptr, row, rows, other, rotated, weight_scale_ptr, bias_ptr, N, SPLITS)
        k, other = k.to(DTYPE).to(tl.float32), other.to(DTYPE).to(tl.float32)
        turned = k * cos + tl.where(first, -other, other) * sin
        k = tl.where(rotated, turned, k).to(DTYPE)
        column = HEADS * HEAD_DIM + out
        v = summed(kv_ptr, row, rows, column, in_d, weight_scale_ptr, bias_ptr, N, SPLITS)
        store_converted(
            k_buffer_ptr, slot * stride_k + out, k, k_scale, in_d,
            HAS_K_SCALE, CONVERSION, E4M3_OVERFLOW,
        )  # fmt: skip
        store_converted(
            v_buffer_ptr, slot * stride_v + out, v.to(DTYPE), v_scale, in_d,
            HAS_V_SCALE, CONVERSION, E4M3_OVERFLOW,
        )  # fmt: skip


def store(
    *,
    layer: DraftLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """RoPE on K, conversion and store, one program a row and head.

    Args:
        kv: [splits, rows, 2 * num_kv_heads * head_dim], float32 partial sums without scales and
            bias, or [1, rows, ...] in the weights' dtype with them.
    """
    splits, rows, _ = kv.shape
    partial = kv.dtype != layer.dtype
    conversion = _CONVERSIONS.get(k_buffer.dtype, CAST)
    scaled = k_buffer.dtype != layer.dtype
    pools = (k_buffer, v_buffer)
    if conversion != CAST:
        pools = (k_buffer.view(torch.uint8), v_buffer.view(torch.uint8))
    dependent = has_dependent_launch(kv.device)
    store_kernel[(rows, layer.num_kv_heads)](
        kv,
        layer.kv_weight_scale if partial else None,
        layer.kv_bias if partial else None,
        layer.hidden_norm,
        positions,
        out_cache_loc,
        layer.cos_sin_cache,
        *pools,
        rows,
        k_buffer.shape[0],
        k_buffer.stride(0),
        v_buffer.stride(0),
        _rounded(k_scale, layer.hidden_norm),
        _rounded(v_scale, layer.hidden_norm),
        SPLITS=splits,
        HEADS=layer.num_kv_heads,
        HEAD_DIM=layer.head_dim,
        ROTARY_DIM=layer.rotary_dim,
        IS_NEOX=layer.is_neox_style,
        HAS_K_SCALE=scaled and k_scale is not None,
        HAS_V_SCALE=scaled and v_scale is not None,
        CONVERSION=conversion,
        E4M3_OVERFLOW=E4M3_OVERFLOW,
        BLOCK_D=triton.next_power_of_2(layer.head_dim),
        DEPENDENT=dependent,
        num_warps=1,
        launch_pdl=dependent,
    )


def _rounded(scale: float | None, like: torch.Tensor) -> float:
    """torch on a GPU casts the scale, a float32 tensor there, to the dividend's dtype."""
    if scale is None or not like.is_cuda:
        return 1.0 if scale is None else scale
    return torch.tensor(scale).to(like.dtype).item()
