"""The draft step in plain torch: one function per stage, and their composition.

This is the oracle of every test and the CPU path. It rounds where SGLang's unfused modules round:
after each norm, fc, the projection, RoPE, and the division by the KV scale. A row whose slot is
negative is padding: it is neither read nor written. Rows are selected with a boolean index, so
these functions synchronise on a GPU and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .draft_layer import DraftLayer

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]


def pack(aux_hidden_states: AuxHiddenStates) -> torch.Tensor:
    """[rows, num_aux * H_target] from the packed tensor itself or its `num_aux` parts."""
    if isinstance(aux_hidden_states, torch.Tensor):
        return aux_hidden_states
    return torch.cat(list(aux_hidden_states), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32 (or wider), rounded once to the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return (y * weight.to(wide)).to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`F.linear`; a float8 weight with its scales in float32 (or wider), rounded once."""
    if weight_scale is None:
        return F.linear(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), weight.to(wide)) * weight_scale.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def apply_rope(
    k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox_style: bool
) -> torch.Tensor:
    """Rotate the first `rotary_dim` elements of `k` [rows, heads, head_dim], rounded once."""
    rotary_dim = cos_sin_cache.shape[1]
    wide = torch.promote_types(k.dtype, torch.float32)
    cos, sin = cos_sin_cache[positions].to(wide).unsqueeze(1).chunk(2, dim=-1)
    rotated = k[..., :rotary_dim].to(wide)
    if is_neox_style:
        x1, x2 = rotated.chunk(2, dim=-1)
    else:
        x1, x2 = rotated[..., ::2], rotated[..., 1::2]
    parts = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    out = torch.cat(parts, -1) if is_neox_style else torch.stack(parts, -1).flatten(-2)
    return torch.cat((out.to(k.dtype), k[..., rotary_dim:]), dim=-1)


def project_hidden_states(layer: DraftLayer, packed: torch.Tensor) -> torch.Tensor:
    """fc and its norms: [rows, num_aux * H_target] to [rows, H]."""
    if layer.fc is None:
        return packed
    if layer.input_norm is not None:
        packed = rms_norm(packed, layer.input_norm, layer.rms_norm_eps)
    if layer.fc_norm is not None:
        chunks = packed.chunk(layer.num_aux_hidden_states, dim=-1)
        normed = (
            rms_norm(chunk, weight, layer.rms_norm_eps)
            for chunk, weight in zip(chunks, layer.fc_norm, strict=True)
        )
        packed = torch.cat(list(normed), dim=-1)
    return linear(packed, layer.fc, layer.fc_weight_scale, layer.fc_bias)


def draft_kv(
    layer: DraftLayer, packed: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K (rotated) and V, [rows, num_kv_heads, head_dim] each, in the weights' dtype."""
    hidden = rms_norm(project_hidden_states(layer, packed), layer.hidden_norm, layer.rms_norm_eps)
    embeds = rms_norm(embeds, layer.input_layernorm, layer.rms_norm_eps)
    x = torch.cat((embeds, hidden), dim=-1)
    kv = linear(x, layer.kv_proj, layer.kv_weight_scale, layer.kv_bias)
    k, v = kv.unflatten(-1, (2, layer.num_kv_heads, layer.head_dim)).unbind(1)
    return apply_rope(k, positions, layer.cos_sin_cache, layer.is_neox_style), v


def store_kv(
    values: torch.Tensor, out_cache_loc: torch.Tensor, buffer: torch.Tensor, scale: float | None
) -> None:
    """Convert as SGLang's `set_kv_buffer` does, and store the rows at their slots."""
    if values.dtype != buffer.dtype:
        if scale is not None:
            # A tensor divisor: torch on a GPU multiplies by the reciprocal of a Python number.
            values = values / torch.tensor(scale, dtype=torch.float32, device=values.device)
        values = values.to(buffer.dtype)
    if buffer.dtype.itemsize == 1:  # index_put has no float8 kernel
        values, buffer = values.view(torch.uint8), buffer.view(torch.uint8)
    buffer[out_cache_loc] = values


def capture_aux_hidden_states(
    *,
    aux_hidden_states: AuxHiddenStates,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Stage 1: copy row `rows[i]` (or i) to `kept_hidden_states[req_pool_indices[i]]`.

    A negative index is padding.
    """
    live = req_pool_indices >= 0
    packed = pack(aux_hidden_states)
    source = live.nonzero().squeeze(1) if rows is None else rows[live]
    kept_hidden_states[req_pool_indices[live]] = packed[source]


def build_draft_input(
    *,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Stage 2: the fields of the next draft input that change. Rows of a negative slot stay."""
    live = slice(None) if out_cache_loc is None else out_cache_loc >= 0
    bonus_tokens[live] = next_token_ids[live].to(bonus_tokens.dtype)
    new_seq_lens[live] = (seq_lens[live] + 1).to(new_seq_lens.dtype)


def write_draft_kv(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None = None,
    v_scale: float | None = None,
    input_embeds: torch.Tensor | None = None,
) -> None:
    """Stage 3: the draft's K and V of every row, stored into the paged pool."""
    live = out_cache_loc >= 0
    packed, slots = pack(aux_hidden_states)[live], out_cache_loc[live].long()
    if input_embeds is not None:
        embeds = input_embeds[live]
    elif layer.embed_tokens is None:
        raise ValueError("input_embeds must be given, because layer.embed_tokens is None")
    else:
        embeds = F.embedding(token_ids[live], layer.embed_tokens)
    k, v = draft_kv(layer, packed, embeds, positions[live].long())
    store_kv(k, slots, k_buffer, k_scale)
    store_kv(v, slots, v_buffer, v_scale)


def fused_draft_step(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None = None,
    v_scale: float | None = None,
    input_embeds: torch.Tensor | None = None,
) -> None:
    """The three stages for one token a request. A negative slot makes the whole row padding."""
    capture_aux_hidden_states(
        aux_hidden_states=aux_hidden_states,
        req_pool_indices=torch.where(out_cache_loc >= 0, req_pool_indices, -1),
        kept_hidden_states=kept_hidden_states,
    )
    build_draft_input(
        next_token_ids=next_token_ids,
        seq_lens=seq_lens,
        bonus_tokens=bonus_tokens,
        new_seq_lens=new_seq_lens,
        out_cache_loc=out_cache_loc,
    )
    write_draft_kv(
        layer=layer,
        aux_hidden_states=aux_hidden_states,
        token_ids=next_token_ids,
        positions=seq_lens,
        out_cache_loc=out_cache_loc,
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        k_scale=k_scale,
        v_scale=v_scale,
        input_embeds=input_embeds,
    )
