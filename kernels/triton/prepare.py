"""What a row does alone before the matmuls: keep it, next draft input, embedding, aux norms.

Bytes per row of a bf16 draft: 4 * num_aux * H_target to keep it (as much again where it is packed
or normed), 4 * H for the embedding, gathered and normed straight into the left half of the
projection's input, so that no cat is needed. A padding row (negative slot) is not read; its row of
the projection's input is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..draft_layer import DraftLayer
from .dependent_launch import has_dependent_launch, start_next


def num_warps_for(elements: int) -> int:
    """Sixteen bf16 elements a thread, as two 16-byte loads; between 1 and 16 warps (arbitrary)."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


@triton.jit
def load_chunk(
    aux_ptrs, aux_strides, row, columns, mask,
    INDEX: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_PER_PART: tl.constexpr,
):  # fmt: skip
    """One layer's aux state of a row, from the packed tensor or that layer's own."""
    part: tl.constexpr = INDEX // CHUNKS_PER_PART
    at = INDEX % CHUNKS_PER_PART * CHUNK + columns
    return tl.load(aux_ptrs[part] + row * aux_strides[part] + at, mask=mask, other=0.0)


@triton.jit
def inverse_rms(square_sum, COUNT: tl.constexpr, eps):
    return tl.math.rsqrt(square_sum / COUNT + eps)


@triton.jit
def normed(x, scale, weight_ptr, mask):
    """x * scale * weight in float32, rounded once to the dtype of x."""
    weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * scale * weight).to(x.dtype)


@triton.jit
def norm_embedding(
    embed_ptr,  # [H]
    readable,
    weight_ptr,  # [H]
    x_ptr,  # [H] (output) zero if the embedding is not readable
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    h = tl.arange(0, BLOCK_H)
    embed = tl.load(embed_ptr + h, mask=(h < H) & readable, other=0.0)
    wide = embed.to(tl.float32)
    scale = inverse_rms(tl.sum(wide * wide, axis=0), H, eps)
    tl.store(x_ptr + h, normed(embed, scale, weight_ptr + h, h < H), mask=h < H)


@triton.jit
def prepare_kernel(
    aux_ptrs,  # up to four of [rows, width of a part], or None
    aux_strides,
    rows_ptr,  # [programs] or None: source rows of the aux states
    slots_ptr,  # [programs] or None
    requests_ptr,  # [programs] or None
    kept_ptr,  # [max_requests, aux width] (output) or None
    stride_kept,
    tokens_ptr,  # [programs] or None
    seq_lens_ptr,  # [programs] or None
    bonus_ptr,  # [programs] int32 (output) or None
    new_seq_lens_ptr,  # [programs] (output) or None
    embeds_ptr,  # [vocab, H] or, by row, [rows, H]
    stride_embeds,
    num_embeds,
    input_layernorm_ptr,  # [H]
    input_norm_ptr,  # [aux width] or None
    fc_norm_ptrs,  # one [H_target] a chunk, or None
    packed_ptr,  # [rows, aux width] (output) or None: aux states as fc reads them
    hidden_norm_ptr,  # [H] or None: applied here where there is no fc
    x_ptr,  # [rows, 2 * H] (output) or None: the projection's input
    eps,
    H: tl.constexpr,
    CHUNK: tl.constexpr,  # H_target
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PER_PART: tl.constexpr,
    AUX_PROGRAMS: tl.constexpr,  # programs of a row that take its aux states: 0, 1, or NUM_CHUNKS
    GATHER_EMBEDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    live = True
    if slots_ptr is not None:
        live = tl.load(slots_ptr + row) >= 0
    if program == AUX_PROGRAMS:
        # Stage build_draft_input.
        if bonus_ptr is not None:
            token = tl.load(tokens_ptr + row, mask=live, other=0)
            tl.store(bonus_ptr + row, token.to(tl.int32), mask=live)
            seq_len = tl.load(seq_lens_ptr + row, mask=live, other=0)
            tl.store(new_seq_lens_ptr + row, seq_len + 1, mask=live)
        # Stage write_draft_kv: the embedding half of the projection's input.
        if x_ptr is not None:
            source = row
            if GATHER_EMBEDS:
                source = tl.load(tokens_ptr + row, mask=live, other=0).to(tl.int64)
            readable = live & (source >= 0) & (source < num_embeds)
            embed_ptr = embeds_ptr + source * stride_embeds
            norm_embedding(
                embed_ptr, readable, input_layernorm_ptr, x_ptr + row * (2 * H), eps, H, BLOCK_H
            )
    elif AUX_PROGRAMS > 0:
        columns = tl.arange(0, BLOCK_CHUNK)
        in_chunk = columns < CHUNK
        keep, request, source = live, row, row
        if kept_ptr is not None:
            request = tl.load(requests_ptr + row).to(tl.int64)
            keep = live & (request >= 0)
        if rows_ptr is not None:
            source = tl.load(rows_ptr + row, mask=keep, other=0).to(tl.int64)
        row_scale = 1.0
        if input_norm_ptr is not None or hidden_norm_ptr is not None:
            square_sum = tl.full((), 0.0, tl.float32)
            for chunk in tl.static_range(NUM_CHUNKS):
                state = load_chunk(
                    aux_ptrs, aux_strides, source, columns, in_chunk & live,
                    chunk, CHUNK, CHUNKS_PER_PART,
                ).to(tl.float32)  # fmt: skip
                square_sum += tl.sum(state * state, axis=0)
            row_scale = inverse_rms(square_sum, NUM_CHUNKS * CHUNK, eps)
        for chunk in tl.static_range(NUM_CHUNKS):
            if (program == chunk) | (AUX_PROGRAMS == 1):
                raw = load_chunk(
                    aux_ptrs, aux_strides, source, columns, in_chunk & live,
                    chunk, CHUNK, CHUNKS_PER_PART,
                )  # fmt: skip
                at = chunk * CHUNK + columns
                # Stage capture_aux_hidden_states.
                if kept_ptr is not None:
                    tl.store(kept_ptr + request * stride_kept + at, raw, mask=in_chunk & keep)
                # Stage write_draft_kv: what fc reads, or without fc the projection.
                if packed_ptr is not None:
                    y = raw
                    if input_norm_ptr is not None:
                        y = normed(y, row_scale, input_norm_ptr + at, in_chunk)
                    if fc_norm_ptrs is not None:
                        wide = y.to(tl.float32)
                        scale = inverse_rms(tl.sum(wide * wide, axis=0), CHUNK, eps)
                        y = normed(y, scale, fc_norm_ptrs[chunk] + columns, in_chunk)
                    to = packed_ptr + row * (NUM_CHUNKS * CHUNK) + at
                    tl.store(to, y, mask=in_chunk)
                if hidden_norm_ptr is not None:
                    y = normed(raw, row_scale, hidden_norm_ptr + at, in_chunk)
                    tl.store(x_ptr + row * (2 * H) + H + at, y, mask=in_chunk)


def prepare(
    *,
    num_programs: int,
    parts: Sequence[torch.Tensor] = (),
    num_aux: int = 1,
    layer: DraftLayer | None = None,
    rows: torch.Tensor | None = None,
    out_cache_loc: torch.Tensor | None = None,
    req_pool_indices: torch.Tensor | None = None,
    kept_hidden_states: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    bonus_tokens: torch.Tensor | None = None,
    new_seq_lens: torch.Tensor | None = None,
    input_embeds: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """Whatever of a row's own work is asked for, in one launch: what is None is left out.

    Args:
        num_programs: rows, or requests where `rows` says which row is whose.
        parts: the aux states, packed in one or one a layer.
        packed: [rows, num_aux * H_target], written with the aux states as fc reads them.
        token_ids: what the next draft input and the left half of `x` are made of.
        x: [rows, 2 * H]; its right half is written from `parts` without fc.
    """
    hidden_norm = input_norm = fc_norm = None
    embeds, hidden_size = input_embeds, 1
    if layer is not None:
        hidden_size = layer.hidden_size
        embeds = layer.embed_tokens if input_embeds is None else input_embeds
        hidden_norm = layer.hidden_norm if layer.fc is None else None
        if packed is not None:
            input_norm, fc_norm = layer.input_norm, layer.fc_norm
    chunk = sum(part.shape[1] for part in parts) // num_aux if parts else 1
    aux_programs = 0
    if kept_hidden_states is not None or packed is not None or hidden_norm is not None:
        # A norm over a whole row keeps the row in one program.
        aux_programs = num_aux if input_norm is None and hidden_norm is None else 1
    device = (parts[0] if parts else token_ids).device
    prepare_kernel[(num_programs, aux_programs + int(token_ids is not None))](
        tuple(parts) or None,
        tuple(part.stride(0) for part in parts) or None,
        rows,
        out_cache_loc,
        req_pool_indices,
        kept_hidden_states,
        0 if kept_hidden_states is None else kept_hidden_states.stride(0),
        token_ids,
        seq_lens,
        bonus_tokens,
        new_seq_lens,
        embeds,
        0 if embeds is None else embeds.stride(0),
        0 if embeds is None else embeds.shape[0],
        None if layer is None else layer.input_layernorm,
        input_norm,
        fc_norm,
        packed,
        hidden_norm,
        x,
        0.0 if layer is None else layer.rms_norm_eps,
        H=hidden_size,
        CHUNK=chunk,
        NUM_CHUNKS=num_aux,
        CHUNKS_PER_PART=num_aux // max(1, len(parts)),
        AUX_PROGRAMS=aux_programs,
        GATHER_EMBEDS=input_embeds is None,
        BLOCK_H=triton.next_power_of_2(hidden_size),
        BLOCK_CHUNK=triton.next_power_of_2(chunk),
        DEPENDENT=has_dependent_launch(device),
        num_warps=num_warps_for(max(chunk, hidden_size)),
    )
