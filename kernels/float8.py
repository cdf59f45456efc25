"""float8_e4m3fn: what this torch writes on overflow, and weights rounded to it by output row."""

from __future__ import annotations

from dataclasses import replace

import torch

from .draft_layer import DraftLayer

# 448, the largest value, since torch 2.13 or so; NaN before. The kernels write the same bytes.
E4M3_OVERFLOW: int = int(torch.tensor([1000.0]).to(torch.float8_e4m3fn).view(torch.uint8))
E4M3_MAX = 448.0


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float8_e4m3fn and [N] float32, whose product is the weight [N, K] rounded."""
    largest = weight.abs().amax(dim=1).float()
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    rounded = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for to, rows, scales in zip(
        rounded.split(512), weight.split(512), scale.split(512), strict=True
    ):
        to.copy_(rows.float() / scales[:, None])  # 512 at a time: float32 takes four times the room
    return rounded, scale


def quantize_layer(layer: DraftLayer) -> DraftLayer:
    """The layer with fc and kv_proj in float8_e4m3fn, half their bytes; for `backend="triton"`.

    Only the draft's K and V change by it: how often drafts are accepted, never what is answered.

    Raises:
        ValueError: the layer is not bfloat16, already quantised, or fc and kv_proj have sides that
            are no multiples of 16.
    """
    reason = quantize_reason(layer)
    if reason:
        raise ValueError(f"the draft's weights cannot be float8: {reason}")
    kv_proj, kv_weight_scale = quantize_weight(layer.kv_proj)
    fc, fc_weight_scale = (None, None) if layer.fc is None else quantize_weight(layer.fc)
    return replace(
        layer,
        fc=fc,
        fc_weight_scale=fc_weight_scale,
        kv_proj=kv_proj,
        kv_weight_scale=kv_weight_scale,
    )


def quantize_reason(layer: DraftLayer) -> str | None:
    """Name what keeps `quantize_layer` from this layer; None if nothing does."""
    if layer.kv_weight_scale is not None:
        return "they already are"
    if layer.dtype != torch.bfloat16:
        return f"they are {layer.dtype}; torch._scaled_mm returns bfloat16 alone"
    for name, weight in (("fc", layer.fc), ("kv_proj", layer.kv_proj)):
        if weight is not None and any(side % 16 for side in weight.shape):
            return f"{name} has shape {list(weight.shape)}; its sides must be multiples of 16"
    return None
