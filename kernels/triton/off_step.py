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
    aux_ptr,  # [rows, width]
    stride_aux,
    tokens_ptr,  # [rows]
    seq_lens_ptr,  # [rows]
    requests_ptr,  # [rows]
    slots_ptr,  # [rows]
    staged_aux_ptr,  # [size, width] (output)
    staged_tokens_ptr,  # [size] (output)
    staged_seq_lens_ptr,  # [size] (output)
    staged_requests_ptr,  # [size] (output)
    staged_slots_ptr,  # [size] (output) -1 from `num_rows` on
    num_rows,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    live = row < num_rows
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = live & (column < width)
    aux = tl.load(aux_ptr + row * stride_aux + column, mask=mask)
    tl.store(staged_aux_ptr + row * width + column, aux, mask=mask)
    if block == 0:
        token = tl.load(tokens_ptr + row, mask=live, other=0)
        seq_len = tl.load(seq_lens_ptr + row, mask=live, other=0)
        request = tl.load(requests_ptr + row, mask=live, other=0)
        slot = tl.load(slots_ptr + row, mask=live, other=-1)
        tl.store(staged_tokens_ptr + row, token.to(tl.int64))
        tl.store(staged_seq_lens_ptr + row, seq_len.to(staged_seq_lens_ptr.dtype.element_ty))
        tl.store(staged_requests_ptr + row, request.to(tl.int64))
        tl.store(staged_slots_ptr + row, slot.to(tl.int64))


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
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    staged: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Copy a batch into static buffers of `size` rows or more, which it pads.

    Args:
        size: rows of the graph that reads them, at least those given.
        given: aux hidden states [rows, width], of which rows may be strided, then tokens, lengths,
            request rows and slots, [rows] integers of any width.
        staged: the buffers in the same order; of rows that are not given the slot becomes -1.
    """
    aux = given[0]
    num_rows, width = aux.shape
    stage_kernel[(size, triton.cdiv(width, BLOCK_WIDE))](
        aux, aux.stride(0), *given[1:], *staged, num_rows, width, BLOCK=BLOCK_WIDE
    )
