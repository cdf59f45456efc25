"""The small copies around an off step's two graphs, one launch each instead of one per tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128  # arbitrary: a few programs even at the largest batches


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
    tokens_ptr,  # [rows]
    seq_lens_ptr,  # [rows]
    requests_ptr,  # [rows]
    slots_ptr,  # [rows]
    staged_tokens_ptr,  # [size] (output)
    staged_seq_lens_ptr,  # [size] (output)
    staged_requests_ptr,  # [size] (output)
    staged_slots_ptr,  # [size] (output) -1 from `num_rows` on
    num_rows,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    token = tl.load(tokens_ptr + row, mask=live, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=live, other=0)
    request = tl.load(requests_ptr + row, mask=live, other=0)
    slot = tl.load(slots_ptr + row, mask=live, other=-1)
    staged = row < size
    tl.store(staged_tokens_ptr + row, token.to(staged_tokens_ptr.dtype.element_ty), mask=live)
    tl.store(staged_seq_lens_ptr + row, seq_len.to(staged_seq_lens_ptr.dtype.element_ty), mask=live)
    tl.store(staged_requests_ptr + row, request.to(staged_requests_ptr.dtype.element_ty), mask=live)
    tl.store(staged_slots_ptr + row, slot.to(staged_slots_ptr.dtype.element_ty), mask=staged)


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
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    staged: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Copy tokens, lengths, request rows and slots into static buffers; rows up to `size` pad.

    Args:
        size: rows of the graph, at least those given.
        given: four [rows] integer tensors of any width.
        staged: four buffers [size or more]; the slots of rows that were not given become -1.
    """
    num_rows = given[0].shape[0]
    stage_kernel[(triton.cdiv(size, BLOCK),)](*given, *staged, num_rows, size, BLOCK=BLOCK)
