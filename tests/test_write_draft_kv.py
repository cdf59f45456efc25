"""The stages alone: K and V of many rows (prefill), kept rows, and the next draft input."""

from __future__ import annotations

import pytest
import torch
from draft_step_cases import Case, as_bytes, error_tolerance, make_step, relative_error, widened
from fused_fallback.bindings import ops
from fused_fallback.kernels import reference
from test_fused_draft_step import BACKENDS, DEVICE


def write_arguments(step: dict) -> dict:
    names = ("layer", "aux_hidden_states", "out_cache_loc", "k_buffer", "v_buffer")
    return {
        **{name: step[name] for name in names},
        "token_ids": step["next_token_ids"],
        "positions": step["seq_lens"],
    }


@pytest.mark.skipif(not BACKENDS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("rows", [130, 2048])
def test_prefill_rows(rows: int) -> None:
    if DEVICE == "cpu" and rows > 130:
        pytest.skip("minutes in Triton's interpreter")
    step = make_step(Case(), rows, device=DEVICE, dead=(3, rows - 1), num_slots=rows + 100)
    plain, exact = write_arguments(step), write_arguments(widened(step))
    for arguments in (plain, exact):
        for name in ("k_buffer", "v_buffer"):
            arguments[name] = arguments[name].clone()
    ops.write_draft_kv(**write_arguments(step), backend="triton")
    reference.write_draft_kv(**plain)
    reference.write_draft_kv(**exact)
    for name in ("k_buffer", "v_buffer"):
        plain_error = relative_error(plain[name], exact[name])
        tolerance = error_tolerance(torch.bfloat16)
        assert relative_error(step[name], exact[name]) <= tolerance * plain_error


@pytest.mark.parametrize("backend", ["torch", *(b for b in BACKENDS if b == "triton")])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "parts"])
def test_kept_rows_are_copies(packed: bool, backend: str) -> None:
    step = make_step(Case(), 9, device=DEVICE, packed=packed)
    requests = torch.tensor([4, -1, 0, 7], device=DEVICE)
    rows = torch.tensor([8, 2**31, 3, 5], device=DEVICE)
    kept = step["kept_hidden_states"].clone()
    ops.capture_aux_hidden_states(
        aux_hidden_states=step["aux_hidden_states"],
        req_pool_indices=requests,
        kept_hidden_states=kept,
        rows=rows,
        backend=backend,
    )
    expected = step["kept_hidden_states"].clone()
    source = reference.pack(step["aux_hidden_states"])
    expected[[4, 0, 7]] = source[[8, 3, 5]]
    assert torch.equal(as_bytes(kept), as_bytes(expected))


@pytest.mark.parametrize("backend", ["torch", *(b for b in BACKENDS if b == "triton")])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_next_draft_input(dtype: torch.dtype, backend: str) -> None:
    tokens = torch.tensor([5, 128255, 0], dtype=dtype, device=DEVICE)
    seq_lens = torch.tensor([1, 131071, 77], dtype=dtype, device=DEVICE)
    bonus = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    new_seq_lens = torch.full((3,), -1, dtype=dtype, device=DEVICE)
    ops.build_draft_input(
        next_token_ids=tokens,
        seq_lens=seq_lens,
        bonus_tokens=bonus,
        new_seq_lens=new_seq_lens,
        backend=backend,
    )
    assert bonus.tolist() == [5, 128255, 0]
    assert new_seq_lens.tolist() == [2, 131072, 78]


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_bfloat16_becomes_torch_s_float8(dtype: torch.dtype) -> None:
    """The V of a layer is stored as it is projected: an identity projection stores any value."""
    bits = torch.arange(2**16, device=DEVICE, dtype=torch.int32).to(torch.uint16)
    values = bits.view(torch.bfloat16).reshape(-1, 1, 256)  # few programs to interpret
    values = torch.where(values.isfinite(), values, 0)
    rows = values.shape[0]
    from fused_fallback.kernels.triton.store import store

    case = Case(pool=dtype, heads=1, head_dim=256)
    step = make_step(case, rows, device=DEVICE, num_slots=rows)
    store(
        layer=step["layer"],
        kv=torch.stack((values, values), dim=1).reshape(1, rows, -1).contiguous(),
        positions=step["seq_lens"],
        out_cache_loc=step["out_cache_loc"],
        k_buffer=step["k_buffer"],
        v_buffer=step["v_buffer"],
        k_scale=None,
        v_scale=None,
    )
    assert torch.equal(
        as_bytes(step["v_buffer"])[step["out_cache_loc"]], as_bytes(values.to(dtype))
    )
