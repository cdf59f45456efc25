"""The small copies around an off step's two graphs, one launch each instead of one per tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, BLOCK_WIDE = 128, 4096  # elements of a program (arbitrary)


@triton.jit
def decode_inputs_kernel(
    bonus_tokens_ptr,  # [rows]
    seq_lens_ptr,  # [rows]
    requests_ptr,  # [rows]
    req_to_token_ptr,  # [requests, positions]
    stride_requests,
    input_ids_ptr,  # [rows] int64 (output)
    slots_ptr,  # [rows] int64 (output)
    new_seq_lens_ptr,  # [rows] (output)
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    seq_len = tl.load(seq_lens_ptr + row, mask=live, other=0)
    request = tl.load(requests_ptr + row, mask=live, other=0).to(tl.int64)
    at = request * stride_requests + seq_len.to(tl.int64)
    slot = tl.load(req_to_token_ptr + at, mask=live, other=0)
    token = tl.load(bonus_tokens_ptr + row, mask=live, other=0)
    tl.store(input_ids_ptr + row, token.to(tl.int64), mask=live)
    tl.store(slots_ptr + row, slot.to(tl.int64), mask=live)
    tl.store(new_seq_lens_ptr + row, seq_len + 1, mask=live)


@triton.jit
def stage_kernel(
    wide_ptr,  # [rows, width]
    stride_wide,
    staged_wide_ptr,  # [size, width] (output)
    stride_staged,
    width,
    first_ptr,  # [rows]
    staged_first_ptr,  # [size] (output)
    second_ptr,  # [rows]
    staged_second_ptr,  # [size] (output) -1 from `num_rows` on
    num_rows,
    HAS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    live = row < num_rows
    if HAS_WIDE:
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = live & (column < width)
        values = tl.load(wide_ptr + row * stride_wide + column, mask=mask)
        tl.store(staged_wide_ptr + row * stride_staged + column, values, mask=mask)
    if block == 0:
        first = tl.load(first_ptr + row, mask=live, other=0)
        second = tl.load(second_ptr + row, mask=live, other=-1)
        tl.store(staged_first_ptr + row, first.to(staged_first_ptr.dtype.element_ty), mask=live)
        tl.store(staged_second_ptr + row, second.to(staged_second_ptr.dtype.element_ty))


def decode_inputs(
    *,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `bindings.off_step.decode_inputs`, on a GPU."""
    num_rows = seq_lens.shape[0]
    input_ids, slots = (torch.empty_like(seq_lens, dtype=torch.int64) for _ in range(2))
    new_seq_lens = torch.empty_like(seq_lens)
    decode_inputs_kernel[(triton.cdiv(num_rows, BLOCK),)](
        bonus_tokens,
        seq_lens,
        req_pool_indices,
        req_to_token,
        req_to_token.stride(0),
        input_ids,
        slots,
        new_seq_lens,
        num_rows,
        BLOCK=BLOCK,
    )
    return input_ids, slots, new_seq_lens


def stage(
    *,
    size: int,
    first: torch.Tensor,
    staged_first: torch.Tensor,
    second: torch.Tensor,
    staged_second: torch.Tensor,
    wide: torch.Tensor | None = None,
    staged_wide: torch.Tensor | None = None,
) -> None:
    """Copy a batch into static buffers, in one launch.

    Args:
        size: rows of the graph that reads them, at least those given.
        first, second: [rows] integers of any width; rows of `staged_second` up to `size` that were
            not given become -1, of the others they keep what they hold.
        wide: [rows, width], rows may be strided, or None.
        staged_first, staged_second, staged_wide: the buffers, of `size` rows or more.
    """
    given = first.unsqueeze(1) if wide is None else wide
    to = staged_first.unsqueeze(1) if staged_wide is None else staged_wide
    stage_kernel[(size, triton.cdiv(given.shape[1], BLOCK_WIDE))](
        given,
        given.stride(0),
        to,
        to.stride(0),
        given.shape[1],
        first,
        staged_first,
        second,
        staged_second,
        first.shape[0],
        HAS_WIDE=wide is not None,
        BLOCK=BLOCK_WIDE,
    )
