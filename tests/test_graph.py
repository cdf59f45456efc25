"""The graph runner: what is staged gets written once, alone or beside other work. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_step_cases import (
    WRITTEN,
    Case,
    as_bytes,
    copy_written,
    make_layer,
    make_step,
    relative_error,
)
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
LARGEST = 160  # whose matmuls are the library's
SIZES = (1, 2, 4, 8, 16, LARGEST)
BESIDE_FROM = 8


def build_runner(step: dict[str, Any], **options: Any) -> DraftStepGraphRunner:
    names = ("layer", "kept_hidden_states", "k_buffer", "v_buffer")
    return DraftStepGraphRunner(
        **{name: step[name] for name in names},
        batch_sizes=SIZES,
        beside_from=BESIDE_FROM,
        **options,
    )


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_what_is_written_alone_equals_eager(backend: str) -> None:
    case = Case(hidden=512, target=512)
    layer = make_layer(case, "cuda")
    pool = make_step(case, LARGEST, layer=layer, device="cuda")
    runner = build_runner(pool, backend=backend)
    eager = copy_written(pool)
    for rows in (16, 1, 3, 150, 8, 5, 9, 2, 16):
        step = make_step(case, rows, layer=layer, device="cuda", seed=rows)
        inputs = {name: step[name] for name in INPUTS}
        runner.stage(**inputs)
        runner.write()
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
    step = make_step(Case(), LARGEST, device="cuda")
    before = copy_written(step)
    runner = build_runner(step)
    torch.cuda.synchronize()
    for name in WRITTEN:
        assert torch.equal(as_bytes(step[name]), as_bytes(before[name])), name
    assert runner.memory_bytes >= 0
    assert runner.fits(LARGEST) and not runner.fits(LARGEST + 1)


@needs_gpu
@pytest.mark.parametrize("rows", [3, 5])
def test_nothing_allocates_or_synchronises(rows: int) -> None:
    case = Case()
    step = make_step(case, LARGEST, device="cuda")
    runner = build_runner(step)
    inputs = {name: make_step(case, rows, device="cuda")[name] for name in INPUTS}

    def run() -> None:
        for size in (4, 8, 8):
            runner.stage(**inputs)
            runner.before_replay(size)
        runner.before_replay(8)  # clears the slots
        runner.stage(**inputs)
        runner.write()

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


class Beside:
    """Graphs of other work, with a branch for the staged step, and a pool that is written."""

    def __init__(self) -> None:
        self.case = Case(hidden=512, target=512)
        self.layer = make_layer(self.case, "cuda")
        self.pool = make_step(self.case, LARGEST, layer=self.layer, device="cuda")
        self.runner = build_runner(self.pool)
        self.work = torch.randn(512, 512, device="cuda")
        self.work @ self.work  # not for the first time in a capture
        self.graphs = {size: self._capture(size) for size in SIZES}

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self.runner.beside(size):
            for _ in range(10):
                self.work @ self.work
        return graph

    def replay(self, size: int) -> None:
        self.runner.before_replay(size)
        self.graphs[size].replay()

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        step = make_step(self.case, rows, layer=self.layer, device="cuda", seed=rows)
        return {name: step[name] for name in INPUTS}


@needs_gpu
@pytest.mark.parametrize("way", ["beside", "by the next one", "alone"])
def test_a_staged_step_is_written_whatever_comes_next(way: str) -> None:
    """Batches shrink and grow; a caller overwrites what it gave."""
    beside = Beside()
    eager = copy_written(beside.pool)
    before: dict[str, torch.Tensor] = {}
    for rows in (16, 15, 150, 140, 9, 8, 3, 4, 16, 1, 5):
        if way == "beside":
            beside.replay(next(size for size in SIZES if size >= rows))
        elif way == "alone":
            beside.runner.write()
        inputs = beside.inputs(rows)
        run_padded(inputs, beside.layer, eager, LARGEST, "auto")
        beside.runner.stage(**inputs)
        for given in before.values():
            given.fill_(0)
        before = inputs
    beside.runner.write()
    for name in ("k_buffer", "v_buffer"):  # another size sums in another order
        error = relative_error(beside.pool[name].double(), eager[name].double())
        assert error < 4e-3, name
    kept = as_bytes(beside.pool["kept_hidden_states"])
    assert torch.equal(kept, as_bytes(eager["kept_hidden_states"]))


@needs_gpu
@pytest.mark.parametrize("way", ["beside", "alone"])
@pytest.mark.parametrize("rows", [3, 5])
def test_what_was_written_is_not_written_again(rows: int, way: str) -> None:
    """Between two steps a slot may have become another request's."""
    beside = Beside()
    beside.runner.stage(**beside.inputs(rows))
    if way == "alone":
        beside.runner.write()
    else:
        beside.replay(8)
    torch.cuda.synchronize()
    for name in WRITTEN:
        beside.pool[name].fill_(1)
    expected = copy_written(beside.pool)
    beside.replay(8)
    for name in WRITTEN:
        assert torch.equal(as_bytes(beside.pool[name]), as_bytes(expected[name])), name


@needs_gpu
def test_stage_names_what_does_not_fit() -> None:
    case = Case()
    step = make_step(case, LARGEST, device="cuda")
    runner = build_runner(step)
    with pytest.raises(ValueError, match="161 rows exceed the largest captured size 160"):
        runner.stage(**{name: make_step(case, LARGEST + 1, device="cuda")[name] for name in INPUTS})
    given = {name: make_step(case, 3, device="cuda")[name] for name in INPUTS}
    with pytest.raises(ValueError, match="built without input_embeds, got some"):
        runner.stage(**given, input_embeds=given["aux_hidden_states"][:, : case.hidden])


def test_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="must be on a GPU"):
        build_runner(make_step(Case(), 2))
