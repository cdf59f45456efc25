"""The inputs of the target's plain decode, and the copies into the rows that wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_fallback.bindings.off_step import decode_inputs, stage
from fused_fallback.kernels.triton import off_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.int32, torch.int64)


def rows(num_rows: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + high)
    return torch.randint(high, (num_rows,), generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 127, 300])
def test_decode_inputs_are_the_next_token_its_slot_and_the_length(
    num_rows: int, dtype: torch.dtype
) -> None:
    req_to_token = rows(400 * 64, 1 << 30, torch.int32).view(400, 64)
    given = {
        "bonus_tokens": rows(num_rows, 1 << 17, dtype),
        "seq_lens": rows(num_rows, 64, dtype),
        "req_pool_indices": rows(num_rows, 400, dtype),
    }
    slots = [
        req_to_token[request, position].item()
        for request, position in zip(
            given["req_pool_indices"].tolist(), given["seq_lens"].tolist(), strict=True
        )
    ]
    for outputs in (
        decode_inputs(**given, req_to_token=req_to_token),
        off_step.decode_inputs(**given, req_to_token=req_to_token),  # on a CPU, interpreted
    ):
        input_ids, out_cache_loc, new_seq_lens = outputs
        assert input_ids.dtype == out_cache_loc.dtype == torch.int64
        assert new_seq_lens.dtype == dtype
        assert input_ids.tolist() == given["bonus_tokens"].tolist()
        assert out_cache_loc.tolist() == slots
        assert new_seq_lens.tolist() == [length + 1 for length in given["seq_lens"].tolist()]


def test_decode_inputs_name_a_wrong_shape() -> None:
    req_to_token = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    three, two = rows(3, 4, torch.int64), rows(2, 4, torch.int64)
    with pytest.raises(ValueError, match=r"req_pool_indices must be contiguous \[3\], got .*\[2\]"):
        decode_inputs(
            bonus_tokens=three, seq_lens=three, req_pool_indices=two, req_to_token=req_to_token
        )
    strided = rows(6, 4, torch.int64)[::2]
    with pytest.raises(ValueError, match=r"bonus_tokens must be contiguous .* strides \(2,\)"):
        decode_inputs(
            bonus_tokens=strided, seq_lens=three, req_pool_indices=three, req_to_token=req_to_token
        )


@pytest.mark.parametrize("width", [3, 5000])
@pytest.mark.parametrize(("num_rows", "at"), [(1, 0), (5, 3), (3, 16)])
def test_a_step_is_staged_from_a_row_on(num_rows: int, at: int, width: int) -> None:
    names = ("token_ids", "positions", "out_cache_loc")
    dtypes = (torch.int32, torch.int64, torch.int32)
    given = {
        "aux_hidden_states": torch.randn(num_rows, width + 2, device=DEVICE)[:, 1:-1],
        **{n: rows(num_rows, 1000 + i, dtypes[i]) for i, n in enumerate(names)},
    }
    requests = torch.randperm(9)[:num_rows].to(DEVICE, torch.int32)
    last = at + num_rows
    for launch in (stage, interpreted_stage):
        staged = {n: torch.full((30,), 7, dtype=torch.int64, device=DEVICE) for n in names}
        staged["aux_hidden_states"] = torch.full((30, width), 7.0, device=DEVICE)
        kept = torch.full((9, width + 1), 7.0, device=DEVICE)[:, :-1]
        launch(
            given=given, staged=staged, at=at, req_pool_indices=requests, kept_hidden_states=kept
        )
        for name, buffer in staged.items():
            assert torch.equal(buffer[at:last], given[name].to(buffer.dtype)), name
            assert (buffer[:at] == 7).all() and (buffer[last:] == 7).all(), name
        assert torch.equal(kept[requests.long()], given["aux_hidden_states"])
        assert (kept == 7).all(1).sum() == 9 - num_rows


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_row_that_waits_for_a_slot_given_again_is_dropped(num_rows: int) -> None:
    names, at = ("token_ids", "positions", "out_cache_loc"), 20
    given = {n: torch.arange(num_rows, dtype=torch.int32, device=DEVICE) for n in names}
    given["aux_hidden_states"] = torch.zeros(num_rows, 4, device=DEVICE)
    for launch in (stage, interpreted_stage):
        waiting = torch.arange(30, device=DEVICE) % 10
        staged = {n: waiting.clone() for n in names}
        staged["aux_hidden_states"] = torch.zeros(30, 4, device=DEVICE)
        kept = torch.zeros(9, 4, device=DEVICE)
        requests = torch.arange(num_rows, device=DEVICE)
        launch(
            given=given, staged=staged, at=at, req_pool_indices=requests, kept_hidden_states=kept
        )
        dropped = [-1 if slot < num_rows else slot for slot in range(10)]
        assert staged["out_cache_loc"].tolist() == [*dropped, *dropped, *range(10)]
        assert torch.equal(staged["token_ids"], waiting)  # the rest of a dropped row stays


def interpreted_stage(
    *, given: dict[str, torch.Tensor], staged: dict[str, torch.Tensor], **options: Any
) -> None:
    """The kernel alone: on a CPU, interpreted."""
    names = ("aux_hidden_states", "token_ids", "positions", "out_cache_loc")
    off_step.stage(
        given=tuple(given[n] for n in names), staged=tuple(staged[n] for n in names), **options
    )
