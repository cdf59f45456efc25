"""The graph runner: replay equals eager, pads up, survives new inputs. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_step_cases import WRITTEN, Case, as_bytes, copy_written, make_layer, make_step
from fused_fallback.bindings import ops
from fused_fallback.bindings.graph import DraftStepGraphRunner

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU: CUDA graphs")
INPUTS = (
    "aux_hidden_states",
    "next_token_ids",
    "seq_lens",
    "req_pool_indices",
    "out_cache_loc",
)
SIZES = (1, 2, 4, 8, 16)


def build_runner(step: dict[str, Any], **options: Any) -> DraftStepGraphRunner:
    names = ("layer", "kept_hidden_states", "k_buffer", "v_buffer")
    return DraftStepGraphRunner(
        **{name: step[name] for name in names}, batch_sizes=SIZES, **options
    )


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_replay_equals_eager(backend: str) -> None:
    case = Case(hidden=512, target=512)
    layer = make_layer(case, "cuda")
    pool = make_step(case, 16, layer=layer, device="cuda")
    runner = build_runner(pool, backend=backend)
    eager = copy_written(pool)
    for rows in (16, 1, 3, 8, 5, 9, 2, 16):
        step = make_step(case, rows, layer=layer, device="cuda", seed=rows)
        inputs = {name: step[name] for name in INPUTS}
        runner.replay(**inputs)
        runner.join()
        # The size that the graph was captured for chooses the kernel's tile, hence the sums' order.
        size = next(size for size in SIZES if size >= rows)
        expected = run_padded(inputs, layer, eager, size, backend)
        assert torch.equal(runner.bonus_tokens[:rows], expected[0])
        assert torch.equal(runner.new_seq_lens[:rows], expected[1])
        for name in ("kept_hidden_states", "k_buffer", "v_buffer"):
            assert torch.equal(as_bytes(pool[name]), as_bytes(eager[name])), (rows, name)


def run_padded(
    inputs: dict[str, Any], layer: Any, written: dict[str, Any], size: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = inputs["next_token_ids"].shape[0]

    def pad(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        padded = tensor.new_full((size, *tensor.shape[1:]), fill)
        padded[:rows] = tensor
        return padded

    aux = inputs["aux_hidden_states"]
    bonus = torch.zeros(size, dtype=torch.int32, device="cuda")
    new_seq_lens = torch.zeros(size, dtype=torch.int64, device="cuda")
    ops.fused_draft_step(
        layer=layer,
        aux_hidden_states=(
            pad(aux, 0) if isinstance(aux, torch.Tensor) else [pad(part, 0) for part in aux]
        ),
        next_token_ids=pad(inputs["next_token_ids"], 0),
        seq_lens=pad(inputs["seq_lens"], 0),
        req_pool_indices=pad(inputs["req_pool_indices"], 0),
        out_cache_loc=pad(inputs["out_cache_loc"], -1),
        bonus_tokens=bonus,
        new_seq_lens=new_seq_lens,
        backend=backend,
        **{name: written[name] for name in ("kept_hidden_states", "k_buffer", "v_buffer")},
    )
    return bonus[:rows], new_seq_lens[:rows]


@needs_gpu
def test_capture_writes_nothing_and_reports_memory() -> None:
    step = make_step(Case(), 16, device="cuda")
    before = copy_written(step)
    runner = build_runner(step)
    torch.cuda.synchronize()
    for name in WRITTEN:
        assert torch.equal(as_bytes(step[name]), as_bytes(before[name])), name
    assert runner.memory_bytes >= 0
    assert runner.can_replay(16) and not runner.can_replay(17)


@needs_gpu
def test_replay_neither_allocates_nor_synchronises() -> None:
    case = Case()
    step = make_step(case, 16, device="cuda")
    runner = build_runner(step)
    inputs = {name: make_step(case, 5, device="cuda")[name] for name in INPUTS}
    runner.replay(**inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.replay(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@needs_gpu
def test_replays_in_flight_keep_their_own_inputs() -> None:
    """A second replay waits for the first's buffers, and a caller may overwrite what it gave."""
    case = Case(hidden=512, target=512)
    layer = make_layer(case, "cuda")
    pool = make_step(case, 16, layer=layer, device="cuda")
    runner = build_runner(pool)
    steps = [make_step(case, 16, layer=layer, device="cuda", seed=seed) for seed in range(1, 9)]
    eager = copy_written(pool)
    for step in steps:
        run_padded({name: step[name] for name in INPUTS}, layer, eager, 16, "auto")
    given = {name: steps[0][name].clone() for name in INPUTS}
    for step in steps:
        for name in INPUTS:
            given[name].copy_(step[name])
        runner.replay(**given)
    for name in INPUTS:
        given[name].fill_(0)
    runner.join()
    for name in ("kept_hidden_states", "k_buffer", "v_buffer"):
        assert torch.equal(as_bytes(pool[name]), as_bytes(eager[name])), name


@needs_gpu
def test_replay_names_what_does_not_fit() -> None:
    case = Case()
    step = make_step(case, 16, device="cuda")
    runner = build_runner(step)
    with pytest.raises(ValueError, match="17 rows exceed the largest captured size 16"):
        runner.replay(**{name: make_step(case, 17, device="cuda")[name] for name in INPUTS})
    given = {name: make_step(case, 3, device="cuda")[name] for name in INPUTS}
    with pytest.raises(ValueError, match="built without input_embeds, got some"):
        runner.replay(**given, input_embeds=given["aux_hidden_states"][:, : case.hidden])


def test_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="must be on a GPU"):
        build_runner(make_step(Case(), 2))
