"""Random draft layers, pools and batches for the op tests, and the error bound they share."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from fused_fallback.bindings import ops
from fused_fallback.kernels import reference
from fused_fallback.kernels.draft_layer import DraftLayer

MAX_POSITION = 97


@dataclass(frozen=True)
class Case:
    """One draft layer's shape and the pool it writes to."""

    hidden: int = 128
    target: int = 96
    num_aux: int = 3
    heads: int = 2
    head_dim: int = 64
    rotary_dim: int | None = None
    neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    pool: torch.dtype | None = None
    fc: bool = True
    bias: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    vocab: int = 61

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


# Each line moves one thing that a draft in the field moves, and one or two sizes with it.
CASES = (
    Case(),
    Case(dtype=torch.float16, head_dim=128, heads=1),
    Case(head_dim=96, heads=3, hidden=144, target=144),
    Case(head_dim=256, heads=1, num_aux=4, target=40),
    Case(hidden=2880 // 8, target=2880 // 8, num_aux=2),
    Case(neox=False, head_dim=128, num_aux=1),
    Case(rotary_dim=32),
    Case(rotary_dim=64, head_dim=128, neox=False),
    Case(bias=True),
    Case(input_norm=True),
    Case(fc_norm=True, target=200),
    Case(input_norm=True, fc_norm=True, bias=True),
    Case(fc=False, hidden=192, target=64),
    Case(pool=torch.float16),
    Case(pool=torch.float8_e4m3fn, head_dim=128),
    Case(pool=torch.float8_e5m2, dtype=torch.float16),
)


def make_layer(case: Case, device: str = "cpu", seed: int = 0) -> DraftLayer:
    """Weights scaled so that every stage's output is of order one."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=gen, device=device) * scale + offset
        return values.to(case.dtype)

    width, kv = case.num_aux * case.target, 2 * case.heads * case.head_dim
    rotary = case.rotary_dim or case.head_dim
    inverse = 10000.0 ** -(torch.arange(0, rotary, 2, device=device) / rotary)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * inverse
    return DraftLayer(
        embed_tokens=normal(case.vocab, case.hidden),
        fc=normal(case.hidden, width, scale=width**-0.5) if case.fc else None,
        fc_bias=normal(case.hidden) if case.fc and case.bias else None,
        input_norm=normal(width, scale=0.2, offset=1.0) if case.input_norm else None,
        fc_norm=tuple(normal(case.target, scale=0.2, offset=1.0) for _ in range(case.num_aux))
        if case.fc_norm
        else None,
        hidden_norm=normal(case.hidden, scale=0.2, offset=1.0),
        input_layernorm=normal(case.hidden, scale=0.2, offset=1.0),
        kv_proj=normal(kv, 2 * case.hidden, scale=(2 * case.hidden) ** -0.5),
        kv_bias=normal(kv) if case.bias else None,
        cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1),
        is_neox_style=case.neox,
        num_kv_heads=case.heads,
        head_dim=case.head_dim,
        rms_norm_eps=1e-5,
        num_aux_hidden_states=case.num_aux,
    )


def make_step(
    case: Case,
    rows: int,
    *,
    layer: DraftLayer | None = None,
    device: str = "cpu",
    seed: int = 1,
    dead: tuple[int, ...] = (),
    packed: bool = True,
    index_dtype: torch.dtype = torch.int64,
    num_slots: int = 300,
) -> dict[str, Any]:
    """Arguments of `ops.fused_draft_step`. Dead rows hold NaN and indices that must not be used."""
    gen = torch.Generator(device=device).manual_seed(seed)
    layer = layer or make_layer(case, device)
    width = case.num_aux * case.target

    def choose(high: int, unique: bool = False) -> torch.Tensor:
        if unique:
            return torch.randperm(high, generator=gen, device=device)[:rows].to(index_dtype)
        return torch.randint(0, high, (rows,), generator=gen, device=device).to(index_dtype)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    aux = noise(rows, width).to(case.dtype)
    step: dict[str, Any] = {
        "layer": layer,
        "next_token_ids": choose(case.vocab),
        "seq_lens": choose(MAX_POSITION),
        "req_pool_indices": choose(rows + 5, unique=True),
        "out_cache_loc": choose(num_slots, unique=True),
        "kept_hidden_states": noise(rows + 5, width).to(case.dtype),
        "bonus_tokens": torch.full((rows,), -7, dtype=torch.int32, device=device),
        "new_seq_lens": torch.full((rows,), -7, dtype=index_dtype, device=device),
    }
    for name in ("k_buffer", "v_buffer"):
        pool = noise(num_slots, case.heads, case.head_dim)
        step[name] = pool.to(case.pool or case.dtype)
    for row in dead:
        aux[row] = float("nan")
        step["out_cache_loc"][row] = -1
        step["next_token_ids"][row] = 2**31 - 1
        step["seq_lens"][row] = 2**31 - 2
        step["req_pool_indices"][row] = 2**31 - 1
    parts = [part.contiguous() for part in aux.chunk(case.num_aux, dim=-1)]
    step["aux_hidden_states"] = aux if packed else parts
    return step


WRITTEN = ("kept_hidden_states", "bonus_tokens", "new_seq_lens", "k_buffer", "v_buffer")


def copy_written(step: dict[str, Any]) -> dict[str, Any]:
    """The same step with its own copy of everything that is written."""
    return {**step, **{name: step[name].clone() for name in WRITTEN}}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def widened(step: dict[str, Any]) -> dict[str, Any]:
    """The same step in float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, list | tuple):
            return type(value)(wide(item) for item in value)
        return value

    layer = step["layer"]
    weights = {f.name: wide(getattr(layer, f.name)) for f in fields(layer)}
    return {**{k: wide(v) for k, v in step.items()}, "layer": replace(layer, **weights)}


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def error_tolerance(dtype: torch.dtype) -> float:
    """How much more error than plain torch is let pass: another order of summation (arbitrary).

    Triton's interpreter truncates where the GPU rounds to bfloat16: twice the error per rounding,
    always towards zero, so that it adds up over the kernels.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and dtype == torch.bfloat16
    return 4.0 if interpreted else 1.15


def check_step(step: dict[str, Any], backend: str) -> None:
    """Run the step with `backend`; copies are bitwise, K and V as near to fp64 as plain torch."""
    tolerance = error_tolerance(step["layer"].dtype)
    ours, plain, exact = copy_written(step), copy_written(step), copy_written(widened(step))
    ops.fused_draft_step(**ours, backend=backend)
    reference.fused_draft_step(**plain)
    reference.fused_draft_step(**exact)
    for name in ("kept_hidden_states", "bonus_tokens", "new_seq_lens"):
        assert torch.equal(as_bytes(ours[name]), as_bytes(plain[name])), name
    slots = step["out_cache_loc"]
    live = slots[slots >= 0].long()
    for name in ("k_buffer", "v_buffer"):
        untouched = torch.ones(ours[name].shape[0], dtype=torch.bool, device=slots.device)
        untouched[live] = False
        before, after = as_bytes(step[name]), as_bytes(ours[name])
        assert torch.equal(after[untouched], before[untouched]), f"{name}: another slot changed"
        if live.numel():
            ours_error = relative_error(ours[name][live].double(), exact[name][live])
            plain_error = relative_error(plain[name][live].double(), exact[name][live])
            assert ours_error <= tolerance * plain_error, (name, ours_error, plain_error)
