"""KV copies, slot tables and token rotation; outputs are arguments, indices int32 or int64.

A span is the half-open range [start, end) of one request; flat tensors hold spans end to end.
"""

import ctypes

import torch


def spans(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Span number and position of every element of the spans, both [sum(lengths)] int64."""
    lengths = lengths.long()
    span = torch.repeat_interleave(lengths)
    offset = torch.arange(span.numel()) - (lengths.cumsum(0) - lengths)[span]
    return span, starts.long()[span] + offset


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Scatters flat `out_cache_loc` into the spans of `req_to_token` [pool_rows, pool_len]."""
    span, position = spans(start_offset, end_offset - start_offset)
    slots = out_cache_loc[: span.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices[span], position] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Gathers the spans of `req_to_token` [pool_rows, pool_len] into flat `out_cache_loc`."""
    span, position = spans(start_offset, end_offset - start_offset)
    out_cache_loc[: span.numel()] = req_to_token[req_pool_indices[span], position]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Gathers the `topk * num_steps` slots from position `seq_lens` on, for each request."""
    position = seq_lens[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], position].flatten())


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copies slots `src_loc` to `tgt_loc` in every buffer, all sources read before any write.

    `data_ptrs` [buffers] holds addresses, `strides` [buffers] the bytes of one slot.
    """
    if tgt_loc.numel() == 0:
        return
    slots = 1 + int(torch.maximum(tgt_loc.max(), src_loc.max()))
    for address, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * width)).from_address(address)
        pool = torch.frombuffer(memory, dtype=torch.uint8).view(slots, width)
        pool.index_copy_(0, tgt_loc.long(), pool.index_select(0, src_loc))


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Writes each request's last accepted token; `accept_tokens` is flat [batch, accept_stride]."""
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Packs the slots of the accepted nodes (`accept_index` entries other than -1), in order."""
    accepted = accept_index[accept_index != -1]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shifts each request's tokens one to the left and puts its `topk_index` token at the end.

    With `select_index` [batch] (flat positions) the token goes there instead of the end.
    """
    _, position = spans(extend_start_loc, (extend_seq_lens - 1).clamp(min=0))
    input_ids[position] = input_ids[position + 1]
    last = extend_start_loc + extend_seq_lens - 1 if select_index is None else select_index
    present = extend_seq_lens > 0
    input_ids[last[present].long()] = topk_index.flatten()[present].to(input_ids.dtype)
