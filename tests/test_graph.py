"""Rows that wait are written once, together, before they are needed; with graphs as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_step_cases import Case, as_bytes, make_layer, make_step, relative_error
from fused_fallback.bindings import ops
from fused_fallback.bindings.graph import DraftKVWriter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: CUDA graphs")
CASE = Case(hidden=512, target=512) if DEVICE == "cuda" else Case(dtype=torch.float32)
LAYER = make_layer(CASE, DEVICE)
MAX_ROWS = 160  # whose matmuls are the library's on a GPU
MAX_REQUESTS = 40
INPUTS = (
    "aux_hidden_states",
    "next_token_ids",
    "seq_lens",
    "req_pool_indices",
    "out_cache_loc",
)
STEPS = 14


@pytest.fixture
def pool() -> dict[str, Any]:
    """What is written: the K and V buffers and the kept states."""
    step = make_step(CASE, MAX_REQUESTS, layer=LAYER, device=DEVICE)
    return {name: step[name] for name in ("kept_hidden_states", "k_buffer", "v_buffer")}


def writer_of(pool: dict[str, Any], *, layer: Any = LAYER, captured: bool = False) -> DraftKVWriter:
    writer = DraftKVWriter(layer=layer, max_rows=MAX_ROWS, **pool)
    if captured:
        writer.capture()
    return writer


def inputs(requests: list[int], step: int) -> dict[str, Any]:
    """Step number `step` of these requests: `STEPS` slots each, the same for r and r + 21."""
    made = make_step(CASE, len(requests), layer=LAYER, device=DEVICE, seed=step)
    rows = torch.tensor(requests, device=DEVICE)
    made["req_pool_indices"] = rows
    made["out_cache_loc"] = rows * STEPS % 294 + step % STEPS
    return {name: made[name] for name in INPUTS}


def eagerly(pool: dict[str, Any], step: dict[str, Any]) -> None:
    ops.fused_draft_step(
        layer=LAYER,
        bonus_tokens=torch.empty_like(step["next_token_ids"], dtype=torch.int32),
        new_seq_lens=torch.empty_like(step["seq_lens"]),
        **step,
        **pool,
    )


def assert_written(pool: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("k_buffer", "v_buffer"):  # other sizes sum in another order
        error = relative_error(pool[name].double(), expected[name].double())
        assert error < 4e-3, (name, error)
    kept, expected_kept = pool["kept_hidden_states"], expected["kept_hidden_states"]
    assert torch.equal(as_bytes(kept), as_bytes(expected_kept))


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=needs_gpu)])
def test_batches_that_change_are_written_as_if_each_at_once(
    pool: dict[str, Any], captured: bool
) -> None:
    """Requests leave, their slots become others'; blocks fill up; what was given is overwritten."""
    eager = {name: tensor.clone() for name, tensor in pool.items()}
    writer = writer_of(pool, captured=captured)
    batches = ([3], [3, 5, 7], [7, 5, 3], [5], list(range(20)), [24])
    for batch in batches:
        for step in range(STEPS):
            given = inputs(batch, step)
            eagerly(eager, given)
            writer.stage(**given)
            for tensor in given.values():
                tensor.fill_(0)
    assert writer.num_rows == 4 * 20 + STEPS  # those of request 3 wait for slots that 24 has now
    writer.write()
    assert writer.num_rows == 0
    assert_written(pool, eager)


def test_rows_wait_until_a_block_is_full(pool: dict[str, Any]) -> None:
    writer = writer_of(pool)
    waiting = []
    for batch in ([1, 2], [1, 2], [2, 1], [2], *[list(range(MAX_REQUESTS))] * 5):
        writer.stage(**inputs(batch, 0))
        waiting.append(writer.num_rows)
    assert waiting == [2, 4, 6, 7, 47, 87, 127, 40, 80]


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=needs_gpu)])
def test_what_was_written_is_not_written_again(pool: dict[str, Any], captured: bool) -> None:
    """A slot may have become another request's by the next write."""
    writer = writer_of(pool, captured=captured)
    writer.stage(**inputs(list(range(20)), 0))
    writer.write()
    writer.stage(**inputs([30], 0))
    for tensor in pool.values():
        tensor.fill_(1)
    writer.write()
    writer.write()
    ones = torch.ones_like(pool["k_buffer"])
    changed = (pool["k_buffer"] != ones).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == inputs([30], 0)["out_cache_loc"].tolist()


@needs_gpu
def test_capture_writes_nothing_and_reports_memory(pool: dict[str, Any]) -> None:
    before = {name: tensor.clone() for name, tensor in pool.items()}
    writer = writer_of(pool)
    buffers = writer.memory_bytes
    assert buffers >= MAX_ROWS * CASE.num_aux * CASE.target * 2
    writer.capture()
    torch.cuda.synchronize()
    assert writer.memory_bytes >= buffers
    assert writer.sizes == [8, 16, 32, 64, 128, MAX_ROWS]
    for name, tensor in pool.items():
        assert torch.equal(as_bytes(tensor), as_bytes(before[name])), name


@needs_gpu
@pytest.mark.parametrize("rows", [3, 40])
def test_nothing_allocates_or_synchronises(pool: dict[str, Any], rows: int) -> None:
    writer = writer_of(pool, captured=True)
    steps = [inputs(list(range(rows)), step) for step in range(STEPS)]

    def run() -> None:
        for step in steps:
            writer.stage(**step)
        writer.write()

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_embeddings_travel_where_the_layer_has_no_table(pool: dict[str, Any]) -> None:
    eager = {name: tensor.clone() for name, tensor in pool.items()}
    writer = writer_of(pool, layer=replace(LAYER, embed_tokens=None))
    for step in range(3):
        given = inputs([4, 9], step)
        eagerly(eager, given)
        writer.stage(**given, input_embeds=LAYER.embed_tokens[given["next_token_ids"].long()])
    writer.write()
    assert_written(pool, eager)


def test_what_does_not_fit_is_named(pool: dict[str, Any]) -> None:
    writer = writer_of(pool)
    given = inputs([1, 2, 3], 0)
    with pytest.raises(ValueError, match="161 rows exceed max_rows 160"):
        writer.stage(**{**given, "req_pool_indices": torch.arange(161, device=DEVICE)})
    with pytest.raises(ValueError, match="an embedding table, got some for input_embeds"):
        writer.stage(**given, input_embeds=given["aux_hidden_states"][:, : CASE.hidden])
    without_table = writer_of(pool, layer=replace(LAYER, embed_tokens=None))
    with pytest.raises(ValueError, match="no embedding table, got none for input_embeds"):
        without_table.stage(**given)
    with pytest.raises(ValueError, match=r"token_ids must be \[3\] .* got \[2\]"):
        writer.stage(**{**given, "next_token_ids": given["next_token_ids"][:2]})
    with pytest.raises(ValueError, match=r"out_cache_loc must be \[3\] .* strides \(2,\)"):
        strided = given["out_cache_loc"].repeat_interleave(2)[::2]
        writer.stage(**{**given, "out_cache_loc": strided})
    with pytest.raises(ValueError, match="max_rows must be positive, got 0"):
        DraftKVWriter(layer=LAYER, max_rows=0, **pool)
    assert writer.num_rows == 0
    writer.stage(**given)
    with pytest.raises(RuntimeError, match="3 rows wait: call write before capture"):
        writer.capture()
