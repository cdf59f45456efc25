"""The small copies around an off step's target graph, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, BLOCK_WIDE = 128, 4096  # elements of a program (arbitrary)
# Numbers that differ from step to step are not specialised: each kind would compile while serving.


@triton.jit(do_not_specialize=["num_rows"])
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


@triton.jit(do_not_specialize=["at"])
def stage_kernel(
    aux_ptr,  # [rows, width]
    stride_aux,
    tokens_ptr,  # [rows]
    positions_ptr,  # [rows]
    slots_ptr,  # [rows]
    requests_ptr,  # [rows]
    staged_aux_ptr,  # [max_rows, width] (output from row `at`)
    staged_tokens_ptr,  # [max_rows] int64 (output from row `at`)
    staged_positions_ptr,  # [max_rows] int64 (output from row `at`)
    staged_slots_ptr,  # [max_rows] int64 (output from row `at`, and before where taken)
    kept_ptr,  # [max_requests, width] (output)
    stride_kept,
    at,
    width,
    MAX_ROWS: tl.constexpr,  # rounded up to a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = tl.load(requests_ptr + row).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    aux = tl.load(aux_ptr + row * stride_aux + column, mask=mask)
    tl.store(staged_aux_ptr + (at + row) * width + column, aux, mask=mask)
    tl.store(kept_ptr + request * stride_kept + column, aux, mask=mask)
    if block == 0:
        tl.store(staged_tokens_ptr + at + row, tl.load(tokens_ptr + row).to(tl.int64))
        tl.store(staged_positions_ptr + at + row, tl.load(positions_ptr + row).to(tl.int64))
        slot = tl.load(slots_ptr + row).to(tl.int64)
        tl.store(staged_slots_ptr + at + row, slot)
        before = tl.arange(0, MAX_ROWS)
        waits = before < at
        theirs = tl.load(staged_slots_ptr + before, mask=waits, other=-1)
        tl.store(staged_slots_ptr + before, -1, mask=waits & (theirs == slot))


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
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    staged: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    at: int,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
) -> None:
    """As `bindings.off_step.stage`, on a GPU, without embeddings.

    Args:
        given: aux hidden states, tokens, positions and slots.
        staged: the buffers in the same order.
    """
    aux = given[0]
    num_rows, width = aux.shape
    stage_kernel[(num_rows, triton.cdiv(width, BLOCK_WIDE))](
        aux,
        aux.stride(0),
        *given[1:],
        req_pool_indices,
        *staged,
        kept_hidden_states,
        kept_hidden_states.stride(0),
        at,
        width,
        MAX_ROWS=triton.next_power_of_2(staged[0].shape[0]),
        BLOCK=BLOCK_WIDE,
    )
