"""The small copies around an off step's target graph, one launch each on a GPU."""

from __future__ import annotations

import torch


def decode_inputs(
    *,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token a request: its id, its slot, and the length with it; one launch on a GPU.

    Args:
        bonus_tokens: [num_requests] int32 or int64, the tokens of position `seq_lens`.
        seq_lens: [num_requests] int32 or int64, KV lengths before the step.
        req_pool_indices: [num_requests] int32 or int64, rows of `req_to_token`.
        req_to_token: [max_requests, max_context] int32, SGLang's slots by request and position.

    Returns:
        `input_ids` and `out_cache_loc`, [num_requests] int64, and `seq_lens + 1`.

    Raises:
        ValueError: the three [num_requests] tensors differ in shape, or one is strided.
    """
    rows = {
        "bonus_tokens": bonus_tokens,
        "seq_lens": seq_lens,
        "req_pool_indices": req_pool_indices,
    }
    for name, tensor in rows.items():
        if tensor.shape != seq_lens.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{seq_lens.shape[0]}], got shape "
                f"{list(tensor.shape)}, strides {tensor.stride()}"
            )
    if seq_lens.is_cuda:
        from ..kernels.triton import off_step

        return off_step.decode_inputs(**rows, req_to_token=req_to_token)
    slots = req_to_token[req_pool_indices.long(), seq_lens.long()]
    return bonus_tokens.to(torch.int64), slots.to(torch.int64), seq_lens + 1


def stage(
    *,
    given: dict[str, torch.Tensor],
    staged: dict[str, torch.Tensor],
    at: int,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
) -> None:
    """Copy a step's rows into static buffers, and its aux hidden states to the requests' own.

    An earlier row of a slot that is given again gets slot -1: its request has left.

    Args:
        given: `aux_hidden_states` [num_rows, num_aux * H_target], whose rows may be strided,
            `token_ids`, `positions` and `out_cache_loc`, [num_rows] int32 or int64, and maybe
            `input_embeds` [num_rows, H].
        staged: buffers of the same names with more rows, the indices int64; written from row `at`.
        at: the first row; the rows before it wait.
        req_pool_indices: [num_rows] int32 or int64, different rows of `kept_hidden_states`.
        kept_hidden_states: [max_requests, num_aux * H_target], written.

    Raises:
        ValueError: a tensor is not as wide or as long as the others, or one of indices is strided.
    """
    num_rows = req_pool_indices.shape[0]
    for name, tensor in (*given.items(), ("req_pool_indices", req_pool_indices)):
        expected = (num_rows, *(staged[name].shape[1:] if name in staged else ()))
        if tensor.shape != expected or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be {list(expected)} with a contiguous last dimension, got "
                f"{list(tensor.shape)}, strides {tensor.stride()}"
            )
    rows = slice(at, at + num_rows)
    if not kept_hidden_states.is_cuda:
        kept_hidden_states[req_pool_indices.long()] = given["aux_hidden_states"]
        taken = torch.isin(staged["out_cache_loc"][:at], given["out_cache_loc"])
        staged["out_cache_loc"][:at][taken] = -1
        for name, tensor in given.items():
            staged[name][rows] = tensor
        return
    from ..kernels.triton import off_step

    if "input_embeds" in given:
        staged["input_embeds"][rows] = given["input_embeds"]
    names = ("aux_hidden_states", "token_ids", "positions", "out_cache_loc")
    off_step.stage(
        given=tuple(given[name] for name in names),
        staged=tuple(staged[name] for name in names),
        at=at,
        req_pool_indices=req_pool_indices,
        kept_hidden_states=kept_hidden_states,
    )
