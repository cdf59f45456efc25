"""The inputs of the target's plain decode, and the copies into the draft step's static buffers."""

from __future__ import annotations

import pytest
import torch
from fused_fallback.bindings.off_step import decode_inputs
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
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (5, 8)])
def test_staged_rows_beyond_the_batch_are_padding(num_rows: int, size: int, width: int) -> None:
    indices = tuple(
        rows(num_rows, 1000 + i, dtype)
        for i, dtype in enumerate((torch.int32, torch.int64, torch.int64, torch.int32))
    )
    aux = torch.randn(num_rows, width + 2, device=DEVICE)[:, 1:-1]
    staged_aux = torch.full((10, width), 7.0, device=DEVICE)
    buffers = tuple(torch.full((10,), 7, dtype=torch.int64, device=DEVICE) for _ in indices)
    off_step.stage(size=size, given=(aux, *indices), staged=(staged_aux, *buffers))
    assert torch.equal(staged_aux[:num_rows], aux) and (staged_aux[num_rows:] == 7).all()
    for source, buffer in zip(indices, buffers, strict=True):
        assert buffer[:num_rows].tolist() == source.tolist()
        assert (buffer[size:] == 7).all()
    assert (buffers[-1][num_rows:size] == -1).all()
