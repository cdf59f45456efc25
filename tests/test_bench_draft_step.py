"""The microbenchmark under pytest-benchmark, which needs a GPU, and what its peers compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_fallback.bindings import ops
from fused_fallback.profiling.draft_step_peers import (
    SHAPES,
    Shape,
    flashinfer_pieces,
    random_layer,
    random_step,
    unfused,
    write,
)
from fused_fallback.profiling.sanitize_draft_step import verdict
from fused_fallback.profiling.timing import capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
WRITTEN = ("kept_hidden_states", "bonus_tokens", "new_seq_lens", "k_buffer", "v_buffer")
AGREES = "drive: K and V agree with the reference"
STEPS = {"fused": lambda step: ops.fused_draft_step(**step), "unfused torch": unfused}


@needs_gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("peer", STEPS)
def test_draft_step_8b(request: pytest.FixtureRequest, peer: str, rows: int) -> None:
    """Four steps over four copies of the weights, so that none is in L2."""
    pytest.importorskip("pytest_benchmark")
    benchmark = request.getfixturevalue("benchmark")
    steps = [random_step(random_layer(SHAPES["8b"]), rows) for _ in range(4)]
    graph = capture([lambda step=step: STEPS[peer](step) for step in steps], rounds=1)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.extra_info["floor_us"] = 4 * SHAPES["8b"].floor_us(rows)
    benchmark.pedantic(replay, warmup_rounds=3, rounds=20)


def written_by(peer: Any, step: dict[str, Any]) -> dict[str, torch.Tensor]:
    own = {
        name: value.clone() for name, value in step.items() if name in WRITTEN and value is not None
    }
    peer({**step, **own})
    return own


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "peer",
    [unfused, pytest.param(lambda step: flashinfer_pieces(step)(), id="flashinfer")],
)
def test_peers_write_what_the_op_writes(peer: Any, prefill: bool) -> None:
    if peer is not unfused:
        pytest.importorskip("flashinfer")
        if DEVICE == "cpu":
            pytest.skip("needs a GPU")
    shape = Shape(hidden=256, intermediate=512, heads=4, kv_heads=2, draft_vocab=100)
    step = random_step(random_layer(shape, DEVICE), 9, prefill=prefill)
    ours, theirs = written_by(write, step), written_by(peer, step)
    assert ours.keys() == theirs.keys()
    assert not torch.equal(ours["k_buffer"], step["k_buffer"])
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0.02, atol=0.02)


def test_floors_are_the_documented_ones() -> None:
    """Against the table in the results: bytes decide below 256 rows, FLOPs from there on."""
    floors = {rows: round(SHAPES["8b"].floor_us(rows), 1) for rows in (1, 64, 128, 512)}
    assert floors == {1: 31.4, 64: 31.9, 128: 32.5, 512: 87.2}
    assert round(SHAPES["70b"].floor_us(1), 1) == 109.8


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        (f"{AGREES}\n========= ERROR SUMMARY: 0 errors\n", 0, "0 errors"),
        (
            f"{AGREES}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            0,
            "0 hazards displayed (0 errors, 0 warnings)",
        ),
        (
            f"{AGREES}\n=========     at store_kernel+0x140 in store.py:9\n"
            "========= ERROR SUMMARY: 3 errors\n",
            9,
            "3 errors, in store_kernel",
        ),
        ("========= ERROR SUMMARY: 0 errors\n", 1, "0 errors, and the step itself failed"),
        (
            "========= Internal Sanitizer Error: x\n",
            1,
            "tool error, exit code 1: ========= Internal",
        ),
        ("", 1, "tool error, exit code 1: no output"),
        (AGREES, None, "no result: out of time"),
    ],
    ids=["clean", "no race", "errors", "wrong result", "tool broke", "silent", "late"],
)
def test_verdicts_of_the_sanitizer(output: str, code: int | None, expected: str) -> None:
    assert verdict(output, code).startswith(expected)
