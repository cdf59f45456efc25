"""The whole step, every backend of this machine against the reference and float64."""

from __future__ import annotations

import os

import pytest
import torch
from draft_step_cases import (
    CASES,
    WRITTEN,
    Case,
    as_bytes,
    check_step,
    copy_written,
    make_layer,
    make_step,
)
from fused_fallback.bindings import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if DEVICE == "cuda" or INTERPRETED else []
if DEVICE == "cuda":
    BACKENDS.append("auto")

pytestmark = pytest.mark.skipif(
    not BACKENDS, reason="needs a GPU, or TRITON_INTERPRET=1 to run Triton on the CPU"
)


def skip_unsupported(step: dict, backend: str) -> None:
    buffers = {name: step[name] for name in ("layer", "k_buffer", "v_buffer")}
    reason = ops.can_fuse(**buffers, backend=backend)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "parts"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_matches_reference(case: Case, packed: bool, backend: str) -> None:
    index_dtype = torch.int64 if packed else torch.int32
    step = make_step(case, 7, device=DEVICE, dead=(0, 4), packed=packed, index_dtype=index_dtype)
    skip_unsupported(step, backend)
    check_step(step, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 31, 64, 65, 127, 128])
def test_row_counts(rows: int, backend: str) -> None:
    if DEVICE == "cpu" and rows > 9:
        pytest.skip("minutes in Triton's interpreter")
    check_step(make_step(Case(), rows, device=DEVICE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
def test_scales(pool: torch.dtype, backend: str) -> None:
    step = make_step(Case(pool=pool), 5, device=DEVICE)
    check_step({**step, "k_scale": 0.37, "v_scale": 1.3}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_padding_changes_nothing(backend: str) -> None:
    step = make_step(Case(), 4, device=DEVICE, dead=(0, 1, 2, 3))
    before = copy_written(step)
    ops.fused_draft_step(**step, backend=backend)
    for name in WRITTEN:
        assert torch.equal(as_bytes(step[name]), as_bytes(before[name])), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_and_given_embeddings(backend: str) -> None:
    case = Case()
    step = make_step(case, 6, device=DEVICE)
    wide = torch.full((6, 400), float("nan"), dtype=case.dtype, device=DEVICE)
    wide[:, 8 : 8 + 288] = step["aux_hidden_states"]
    step["aux_hidden_states"] = wide[:, 8 : 8 + 288]
    embeds = torch.randn(6, 2, case.hidden, device=DEVICE).to(case.dtype)
    check_step({**step, "input_embeds": embeds[:, 1]}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_bitwise_equal(backend: str) -> None:
    step = make_step(Case(hidden=512, target=512), 9, device=DEVICE)
    first, second = copy_written(step), copy_written(step)
    ops.fused_draft_step(**first, backend=backend)
    ops.fused_draft_step(**second, backend=backend)
    for name in WRITTEN:
        assert torch.equal(as_bytes(first[name]), as_bytes(second[name])), name


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: 8 GiB of KV pool")
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_beyond_31_bit_offsets(backend: str) -> None:
    case = Case(heads=8, head_dim=128)
    step = make_step(case, 3, device=DEVICE)
    num_slots = 2_097_152 + 64  # elements of a pool pass 2**31
    for name in ("k_buffer", "v_buffer"):
        step[name] = torch.zeros(num_slots, 8, 128, dtype=case.dtype, device=DEVICE)
    step["out_cache_loc"][:] = torch.tensor([num_slots - 1, 2_097_152, 5], device=DEVICE)
    check_step(step, backend)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: large matmuls")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", [2880, 3584, 4096, 5120, 8192])
def test_sizes_of_the_field(hidden: int, backend: str) -> None:
    case = Case(hidden=hidden, target=hidden, heads=8, head_dim=128)
    layer = make_layer(case, DEVICE)
    for rows in (1, 17, 64, 100):
        check_step(make_step(case, rows, layer=layer, device=DEVICE, dead=(0,)), backend)
