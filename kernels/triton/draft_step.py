"""The draft step in Triton: five kernels a step, of which the two matmuls read all the weights.

Up to `MAX_SPLIT_ROWS` rows every kernel but the first starts while the one before still runs
(`dependent_launch.py`), so that the weights keep coming: `prepare`, fc split over K, `hidden_norm`
which adds the shares up, K and V split over K, `store` which adds those up. Above, the matmuls are
the library's, and what a row does alone runs beside fc on a second stream. Without fc the second
and third kernel go.

The intermediates come from torch's caching allocator, that is from the graph's pool in a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..draft_layer import DraftLayer
from .dependent_launch import has_dependent_launch, start_next, wait_for_previous
from .matmul import MAX_SPLIT_ROWS, library_linear, split_k, summed
from .prepare import inverse_rms, num_warps_for, prepare
from .store import store

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]


@triton.jit(do_not_specialize=["rows"])
def hidden_norm_kernel(
    hidden_ptr,  # [SPLITS, rows, H] of fc: partial sums, or the sum
    weight_scale_ptr,  # [H] float32 or None
    bias_ptr,  # [H] or None
    weight_ptr,  # [H]
    x_ptr,  # [rows, 2 * H] (output) its right half
    rows,
    eps,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    hidden = summed(hidden_ptr, row, rows, h, h < H, weight_scale_ptr, bias_ptr, H, SPLITS)
    hidden = hidden.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = hidden * inverse_rms(tl.sum(hidden * hidden, axis=0), H, eps) * weight
    tl.store(x_ptr + row * (2 * H) + H + h, y.to(x_ptr.dtype.element_ty), mask=h < H)


def hidden_norm(layer: DraftLayer, hidden: torch.Tensor, x: torch.Tensor) -> None:
    """Sum fc's output up and norm it into the right half of the projection's input.

    Args:
        hidden: [splits, rows, H], float32 partial sums without scales and bias, or [1, rows, H] in
            the weights' dtype with them.
        x: [rows, 2 * H], written.
    """
    splits, rows, hidden_size = hidden.shape
    partial = hidden.dtype != layer.dtype
    dependent = has_dependent_launch(x.device)
    hidden_norm_kernel[(rows,)](
        hidden,
        layer.fc_weight_scale if partial else None,
        layer.fc_bias if partial else None,
        layer.hidden_norm,
        x,
        rows,
        layer.rms_norm_eps,
        H=hidden_size,
        SPLITS=splits,
        BLOCK_H=triton.next_power_of_2(hidden_size),
        DEPENDENT=dependent,
        num_warps=num_warps_for(hidden_size),
        launch_pdl=dependent,
    )


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
    **pool: Any,
) -> None:
    """Stage 3; with the four arguments before `pool`, which travel together, the whole step.

    `pool` are the reference's arguments `k_buffer`, `v_buffer`, `k_scale` and `v_scale`.
    """
    num_rows = out_cache_loc.shape[0]
    x = layer.hidden_norm.new_empty((num_rows, 2 * layer.hidden_size))
    packed = _packed(layer, aux_hidden_states)
    row = {
        "num_programs": num_rows,
        "layer": layer,
        "out_cache_loc": out_cache_loc,
        "token_ids": token_ids,
    }
    embedding = {"input_embeds": input_embeds, "x": x}
    keep = {
        "parts": _parts(aux_hidden_states),
        "num_aux": layer.num_aux_hidden_states,
        "req_pool_indices": req_pool_indices,
        "kept_hidden_states": kept_hidden_states,
        "seq_lens": positions,
        "bonus_tokens": bonus_tokens,
        "new_seq_lens": new_seq_lens,
    }
    side = _side_stream(x, packed) if layer.fc is not None else None
    if side is None:
        prepare(**row, **keep, **embedding, packed=packed)
    if layer.fc is not None:
        hidden = _fc(layer, aux_hidden_states, packed, after_prepare=side is None)
        if side is not None:
            with torch.cuda.stream(side):
                prepare(**row, **embedding)
                embedded = side.record_event()
                if kept_hidden_states is not None:
                    prepare(**row, **keep)
        hidden_norm(layer, hidden, x)
    if side is not None:
        torch.cuda.current_stream().wait_event(embedded)
    kv = _kv_proj(layer, x)
    store(layer=layer, kv=kv, positions=positions, out_cache_loc=out_cache_loc, **pool)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


def fused_draft_step(
    *, next_token_ids: torch.Tensor, seq_lens: torch.Tensor, **step: object
) -> None:
    """The three stages for one token a request; arguments as in the reference."""
    write_draft_kv(token_ids=next_token_ids, positions=seq_lens, **step)  # type: ignore[arg-type]


def _side_stream(x: torch.Tensor, packed: torch.Tensor | None) -> torch.cuda.Stream | None:
    """For many rows in a graph, a stream that waits for what came before.

    None if fc waits for `prepare`. Outside of a graph launches cost more than it saves.
    """
    if x.shape[0] <= MAX_SPLIT_ROWS or packed is not None or not x.is_cuda:
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    side = _stream(x.device)
    side.wait_stream(torch.cuda.current_stream())
    return side


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _fc(
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    packed: torch.Tensor | None,
    *,
    after_prepare: bool,
) -> torch.Tensor:
    """fc's output in the form that `hidden_norm` takes."""
    x = _parts(aux_hidden_states)[0] if packed is None else packed
    if x.shape[0] > MAX_SPLIT_ROWS:
        return library_linear(x, layer.fc, layer.fc_weight_scale, layer.fc_bias)
    return split_k(x, layer.fc, early=after_prepare and packed is None)


def _kv_proj(layer: DraftLayer, x: torch.Tensor) -> torch.Tensor:
    """K and V in the form that `store` takes."""
    if x.shape[0] > MAX_SPLIT_ROWS:
        return library_linear(x, layer.kv_proj, layer.kv_weight_scale, layer.kv_bias)
    after_norm = layer.fc is not None
    return split_k(x, layer.kv_proj, early=after_norm, second_half_is_late=after_norm)


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
