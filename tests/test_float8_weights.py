"""fc and K/V weights in float8: what they cost in accuracy, and what refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_step_cases import (
    Case,
    check_step,
    copy_written,
    make_layer,
    make_step,
    relative_error,
    widened,
)
from fused_fallback.bindings import ops
from fused_fallback.kernels import reference
from fused_fallback.kernels.float8 import quantize_layer, quantize_weight
from test_fused_draft_step import BACKENDS, DEVICE

triton_only = pytest.mark.skipif(not BACKENDS, reason="needs a GPU or TRITON_INTERPRET=1")


def scaled_mm_takes_rows() -> bool:
    """Whether `torch._scaled_mm` takes a scale a row on this device: not on every torch's CPU."""
    a = torch.zeros(16, 16, device=DEVICE).to(torch.float8_e4m3fn)
    ones = torch.ones(16, 1, device=DEVICE)
    try:
        torch._scaled_mm(a, a.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def test_weights_are_off_by_at_most_half_a_step() -> None:
    weight = torch.randn(33, 256) * torch.logspace(-6, 3, 33)[:, None]
    weight[7] = 0
    rounded, scale = quantize_weight(weight.bfloat16())
    assert rounded.dtype == torch.float8_e4m3fn and scale.shape == (33,)
    exact = weight.bfloat16().double()
    error = (rounded.double() * scale.double()[:, None] - exact).abs()
    smallest_step = 2.0**-9 * scale.double()[:, None]
    assert (error <= torch.maximum(exact.abs() / 16, smallest_step / 2) * (1 + 1e-6)).all()


@triton_only
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "parts"])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(bias=True, head_dim=128, heads=1), Case(fc=False, hidden=192, target=64)],
    ids=str,
)
def test_few_rows_match_the_reference(case: Case, packed: bool) -> None:
    layer = quantize_layer(make_layer(case, DEVICE))
    step = make_step(case, 7, layer=layer, device=DEVICE, dead=(0, 4), packed=packed)
    check_step(step, "triton")


@triton_only
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_add_the_error_of_rounded_inputs(bias: bool) -> None:
    """Inputs rounded to float8 cost about what weights rounded to float8 do (1.5: arbitrary)."""
    if not scaled_mm_takes_rows():
        pytest.skip("this torch._scaled_mm takes no scale a row on this device")
    case = Case(bias=bias)
    step = make_step(case, 130, device=DEVICE, dead=(5,), num_slots=200)
    rounded = {**step, "layer": quantize_layer(step["layer"])}
    ours, exact = copy_written(rounded), copy_written(widened(step))
    exact_rounded = copy_written(widened(rounded))
    ops.fused_draft_step(**ours, backend="triton")
    reference.fused_draft_step(**exact)
    reference.fused_draft_step(**exact_rounded)
    slots = step["out_cache_loc"]
    live = slots[slots >= 0]
    for name in ("k_buffer", "v_buffer"):
        of_inputs = relative_error(ours[name][live], exact_rounded[name][live])
        of_weights = relative_error(exact_rounded[name][live], exact[name][live])
        assert 0.01 < of_weights < 0.05
        assert of_inputs <= 1.5 * of_weights, name


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(dtype=torch.float16), "returns bfloat16 alone"),
        (Case(target=40), r"fc has shape \[128, 120\]; its sides must be multiples of 16"),
    ],
    ids=["float16", "sides"],
)
def test_layers_that_cannot_be_float8_are_refused(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_layer(make_layer(case))


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="they already are"):
        quantize_layer(quantize_layer(make_layer(Case())))


def test_can_fuse_names_what_does_not_fit() -> None:
    layer = quantize_layer(make_layer(Case()))
    pool = torch.zeros(8, 2, 64).bfloat16()

    def reason(backend: str = "triton", **change: object) -> str | None:
        changed = replace(layer, **change)
        return ops.can_fuse(layer=changed, k_buffer=pool, v_buffer=pool, backend=backend)

    assert reason() is None and reason("torch") is None
    assert "must both be set" in reason(fc_weight_scale=None)
    assert "fc must be bfloat16" in reason(kv_weight_scale=None, fc_weight_scale=None)
    assert "kv_weight_scale must have shape [256]" in reason(kv_weight_scale=torch.ones(255))
    assert "fc must be float8_e4m3fn" in reason(fc=make_layer(Case()).fc)
