"""The draft step on a GPU: five kernels a step, of which the two matmuls read all the weights.

`prepare`, fc, `hidden_norm`, the K and V rows of `qkv_proj`, `store`. For few rows the matmuls are
split over K and leave partial sums, which the kernel that follows adds up; every kernel but the
first then starts while the one before still runs (`triton/dependent_launch.py`), so that the
weights keep coming. For many rows the matmuls are the library's, and what needs no fc runs beside
it on a second stream. Without fc the second and third kernel go.

The intermediates come from torch's caching allocator, that is from the graph's pool in a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .draft_layer import DraftLayer
from .matmul import library_linear, split_kernel
from .triton.hidden_norm import hidden_norm
from .triton.prepare import prepare
from .triton.store import store

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]


def capture_aux_hidden_states(
    *,
    aux_hidden_states: AuxHiddenStates,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Stage 1 alone: one program a request."""
    prepare(
        num_programs=req_pool_indices.shape[0],
        parts=_parts(aux_hidden_states),
        num_aux=len(_parts(aux_hidden_states)),
        rows=rows,
        req_pool_indices=req_pool_indices,
        kept_hidden_states=kept_hidden_states,
    )


def build_draft_input(
    *,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
) -> None:
    """Stage 2 alone."""
    prepare(
        num_programs=next_token_ids.shape[0],
        token_ids=next_token_ids,
        seq_lens=seq_lens,
        bonus_tokens=bonus_tokens,
        new_seq_lens=new_seq_lens,
    )


def write_draft_kv(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    input_embeds: torch.Tensor | None = None,
    req_pool_indices: torch.Tensor | None = None,
    kept_hidden_states: torch.Tensor | None = None,
    bonus_tokens: torch.Tensor | None = None,
    new_seq_lens: torch.Tensor | None = None,
    cuda: bool = True,
    **pool: Any,
) -> None:
    """Stage 3; with the four arguments before `cuda`, which travel together, the whole step.

    Args:
        cuda: whether CUDA kernels may take part where they are faster; Triton's alone otherwise.
        pool: the reference's arguments `k_buffer`, `v_buffer`, `k_scale` and `v_scale`.
    """
    num_rows = out_cache_loc.shape[0]
    x = layer.hidden_norm.new_empty((num_rows, 2 * layer.hidden_size))
    packed = _packed(layer, aux_hidden_states)
    fc_input = _parts(aux_hidden_states)[0] if packed is None else packed
    split_fc = layer.fc is not None and split_kernel(fc_input, layer.fc, cuda=cuda)
    fc_stands_alone = layer.fc is not None and packed is None and not split_fc
    side = _side_stream(x.device) if fc_stands_alone else None
    with torch.cuda.stream(side):
        prepare(
            num_programs=num_rows,
            layer=layer,
            parts=_parts(aux_hidden_states),
            num_aux=layer.num_aux_hidden_states,
            out_cache_loc=out_cache_loc,
            token_ids=token_ids,
            input_embeds=input_embeds,
            x=x,
            packed=packed,
            req_pool_indices=req_pool_indices,
            kept_hidden_states=kept_hidden_states,
            seq_lens=positions,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
        )
    if layer.fc is not None:
        if split_fc:
            hidden = split_fc(fc_input, layer.fc, early=packed is None)
        else:
            hidden = library_linear(fc_input, layer.fc, layer.fc_weight_scale, layer.fc_bias)
        hidden_norm(layer, hidden, x)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    if split_kv := split_kernel(x, layer.kv_proj, cuda=cuda):
        after_norm = layer.fc is not None
        kv = split_kv(x, layer.kv_proj, early=after_norm, second_half_is_late=after_norm)
    else:
        kv = library_linear(x, layer.kv_proj, layer.kv_weight_scale, layer.kv_bias)
    store(layer=layer, kv=kv, positions=positions, out_cache_loc=out_cache_loc, **pool)


def fused_draft_step(
    *, next_token_ids: torch.Tensor, seq_lens: torch.Tensor, **step: object
) -> None:
    """The three stages for one token a request; arguments as in the reference, and `cuda`."""
    write_draft_kv(token_ids=next_token_ids, positions=seq_lens, **step)  # type: ignore[arg-type]


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """In a capture, a stream that waits for what came before.

    Outside of a graph launches cost more than it saves.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    side = _stream(device)
    side.wait_stream(torch.cuda.current_stream())
    return side


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _packed(layer: DraftLayer, aux_hidden_states: AuxHiddenStates) -> torch.Tensor | None:
    """Room for what fc reads where that is not the aux states as they come."""
    if layer.fc is None:
        return None
    parts = _parts(aux_hidden_states)
    if len(parts) == 1 and layer.input_norm is None and layer.fc_norm is None:
        return None
    return layer.hidden_norm.new_empty((parts[0].shape[0], layer.fc.shape[1]))


def _parts(aux_hidden_states: AuxHiddenStates) -> list[torch.Tensor]:
    if isinstance(aux_hidden_states, torch.Tensor):
        return [aux_hidden_states]
    return list(aux_hidden_states)
