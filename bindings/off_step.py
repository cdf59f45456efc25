"""What the target's plain decode takes, from the state that a speculative step starts with."""

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
