"""The draft step around two library matmuls: four Triton kernels for everything that is not one.

Two halves, so that serving can start the first before the target's sampler: `project` needs the aux
hidden states alone (kept row, packing and norms, fc, hidden_norm into the right half of the
projection's input), `write_projected` the sampled token (bonus token and new length, embedding with
its norm into the left half, K/V projection, RoPE, conversion to the pool's dtype, store).

Bytes per row of a bf16 draft besides the matmuls: 2 * H for the embedding, 4 * H written and 4 * H
read of the projection's input, 4 * H for the fc output, 8 * num_kv_heads * head_dim for K and V.
A padding row (negative slot) is not read, and nothing of it is stored; its part of the
intermediates is zero.

Launches: `keep`, matmul, `hidden_norm`; `embed`, matmul, `store`. Without fc the first half is
`keep` alone; with nothing to keep, pack or norm it is the other two. The intermediates come from
torch's caching allocator, that is from the graph's pool in a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..draft_layer import DraftLayer
from ..float8 import E4M3_OVERFLOW

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]

CAST, FLOAT8_E4M3, FLOAT8_E5M2 = 0, 1, 2
_CONVERSIONS = {torch.float8_e4m3fn: FLOAT8_E4M3, torch.float8_e5m2: FLOAT8_E5M2}


@triton.jit
def load_part(
    row,  # int64
    columns,  # [BLOCK]
    mask,
    aux_0_ptr,
    aux_1_ptr,
    aux_2_ptr,
    aux_3_ptr,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    PART: tl.constexpr,
):
    """Elements of one row of one of up to four aux tensors."""
    if PART == 0:
        x = tl.load(aux_0_ptr + row * stride_0 + columns, mask=mask, other=0.0)
    elif PART == 1:
        x = tl.load(aux_1_ptr + row * stride_1 + columns, mask=mask, other=0.0)
    elif PART == 2:
        x = tl.load(aux_2_ptr + row * stride_2 + columns, mask=mask, other=0.0)
    else:
        x = tl.load(aux_3_ptr + row * stride_3 + columns, mask=mask, other=0.0)
    return x


@triton.jit
def normalized(x, scale, weight_ptr, mask):
    """x * scale * weight in float32, rounded once to the dtype of x."""
    weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * scale * weight).to(x.dtype)


@triton.jit
def to_float8_bits(x, FORMAT: tl.constexpr, E4M3_OVERFLOW: tl.constexpr):
    """Round float32 to float8 as torch does: to nearest even, e5m2 overflows to infinity.

    The hardware conversion always saturates, which is not always what `set_kv_buffer` writes.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    OVERFLOW: tl.constexpr = 0x43F00000 if FORMAT == 1 else 0x47800000  # 480 and 65536
    OVERFLOWN: tl.constexpr = E4M3_OVERFLOW if FORMAT == 1 else 0x7C
    SUBNORMAL_BELOW: tl.constexpr = (128 - BIAS) << 23
    MAGIC: tl.constexpr = (127 - BIAS + 24 - MANTISSA) << 23
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Adding a power of two whose last mantissa bit is the smallest subnormal lets the adder round.
    magic = tl.full(bits.shape, MAGIC, tl.int32)
    subnormal = bits.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = subnormal.to(tl.int32, bitcast=True) - MAGIC
    odd = (bits >> SHIFT) & 1
    normal = (bits - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    out = tl.where(bits < SUBNORMAL_BELOW, subnormal, normal)
    out = tl.where((bits >= OVERFLOW) | (out > OVERFLOWN), OVERFLOWN, out)
    out = tl.where(bits > 0x7F800000, 0x7F, out)
    return (out | sign).to(tl.uint8)


@triton.jit
def keep_kernel(
    aux_0_ptr,  # [rows, width of a part]
    aux_1_ptr,
    aux_2_ptr,
    aux_3_ptr,
    stride_aux_0,
    stride_aux_1,
    stride_aux_2,
    stride_aux_3,
    rows_ptr,  # [programs] source rows of the aux states
    slots_ptr,  # [programs]
    requests_ptr,  # [programs]
    kept_ptr,  # [max_requests, aux width] (output)
    stride_kept,
    aux_norm_ptr_0,  # [part width] weights before fc
    aux_norm_ptr_1,
    aux_norm_ptr_2,
    aux_norm_ptr_3,
    input_norm_ptr,  # [aux width]
    packed_ptr,  # [rows, aux width] (output) aux states as fc reads them
    stride_packed,
    hidden_norm_ptr,  # [H], applied here only without fc
    x_ptr,  # [rows, 2 * H] (output) without fc: the right half of the projection's input
    stride_x,
    eps,
    PART_WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PER_PART: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_PACKED: tl.constexpr,
    HAS_INPUT_NORM: tl.constexpr,
    HAS_FC_NORM: tl.constexpr,
    HAS_X: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    live = True
    if HAS_SLOTS:
        live = tl.load(slots_ptr + row) >= 0
    request = tl.full((), 0, tl.int64)
    if HAS_KEPT:
        request = tl.load(requests_ptr + row).to(tl.int64)
        keep = live & (request >= 0)
    source = row
    if HAS_ROWS:
        source = tl.load(rows_ptr + row, mask=keep, other=0).to(tl.int64)
    NUM_CHUNKS: tl.constexpr = NUM_PARTS * CHUNKS_PER_PART
    columns = tl.arange(0, BLOCK_CHUNK)
    in_chunk = columns < CHUNK

    aux_scale = tl.full((), 1.0, tl.float32)
    if HAS_INPUT_NORM or HAS_X:
        square_sum = tl.full((), 0.0, tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            x = load_part(
                source, chunk % CHUNKS_PER_PART * CHUNK + columns, in_chunk & live,
                aux_0_ptr, aux_1_ptr, aux_2_ptr, aux_3_ptr,
                stride_aux_0, stride_aux_1, stride_aux_2, stride_aux_3,
                PART=chunk // CHUNKS_PER_PART,
            ).to(tl.float32)  # fmt: skip
            square_sum += tl.sum(x * x, axis=0)
        aux_scale = tl.math.rsqrt(square_sum / (NUM_PARTS * PART_WIDTH) + eps)

    for chunk in tl.static_range(NUM_CHUNKS):
        raw = load_part(
            source, chunk % CHUNKS_PER_PART * CHUNK + columns, in_chunk & live,
            aux_0_ptr, aux_1_ptr, aux_2_ptr, aux_3_ptr,
            stride_aux_0, stride_aux_1, stride_aux_2, stride_aux_3,
            PART=chunk // CHUNKS_PER_PART,
        )  # fmt: skip
        at = chunk * CHUNK + columns
        if HAS_KEPT:
            tl.store(kept_ptr + request * stride_kept + at, raw, mask=in_chunk & keep)
        if HAS_PACKED:
            y = raw
            if HAS_INPUT_NORM:
                y = normalized(y, aux_scale, input_norm_ptr + at, in_chunk)
            if HAS_FC_NORM:
                wide = y.to(tl.float32)
                scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / CHUNK + eps)
                if chunk == 0:
                    y = normalized(y, scale, aux_norm_ptr_0 + columns, in_chunk)
                elif chunk == 1:
                    y = normalized(y, scale, aux_norm_ptr_1 + columns, in_chunk)
                elif chunk == 2:
                    y = normalized(y, scale, aux_norm_ptr_2 + columns, in_chunk)
                else:
                    y = normalized(y, scale, aux_norm_ptr_3 + columns, in_chunk)
            tl.store(packed_ptr + row * stride_packed + at, y, mask=in_chunk)
        if HAS_X:
            y = normalized(raw, aux_scale, hidden_norm_ptr + at, in_chunk)
            tl.store(x_ptr + row * stride_x + NUM_CHUNKS * CHUNK + at, y, mask=in_chunk)


@triton.jit
def embed_kernel(
    slots_ptr,  # [rows]
    tokens_ptr,  # [rows]
    seq_lens_ptr,  # [rows]
    bonus_ptr,  # [rows] int32 (output)
    new_seq_lens_ptr,  # [rows] (output)
    embeds_ptr,  # [vocab, H] or, by row, [rows, H]
    stride_embeds,
    num_embeds,
    input_layernorm_ptr,  # [H]
    x_ptr,  # [rows, 2 * H] (output) the left half of the projection's input
    stride_x,
    eps,
    H: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_DRAFT_INPUT: tl.constexpr,
    HAS_X: tl.constexpr,
    GATHER_EMBEDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    live = True
    if HAS_SLOTS:
        live = tl.load(slots_ptr + row) >= 0
    token = tl.load(tokens_ptr + row, mask=live, other=0)
    if HAS_DRAFT_INPUT:
        tl.store(bonus_ptr + row, token.to(tl.int32), mask=live)
        seq_len = tl.load(seq_lens_ptr + row, mask=live, other=0)
        tl.store(new_seq_lens_ptr + row, seq_len + 1, mask=live)
    if HAS_X:
        embed_row = token.to(tl.int64) if GATHER_EMBEDS else row
        h = tl.arange(0, BLOCK_H)
        readable = (h < H) & live & (embed_row >= 0) & (embed_row < num_embeds)
        embed = tl.load(embeds_ptr + embed_row * stride_embeds + h, mask=readable, other=0.0)
        wide = embed.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
        y = normalized(embed, scale, input_layernorm_ptr + h, h < H)
        tl.store(x_ptr + row * stride_x + h, y, mask=h < H)


@triton.jit
def hidden_norm_kernel(
    hidden_ptr,  # [rows, H]
    weight_ptr,  # [H]
    x_ptr,  # [rows, 2 * H] (output) its right half
    stride_hidden,
    stride_x,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    in_h = h < H
    hidden = tl.load(hidden_ptr + row * stride_hidden + h, mask=in_h, other=0.0)
    wide = hidden.to(tl.float32)
    norm = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    weight = tl.load(weight_ptr + h, mask=in_h, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * stride_x + H + h, (wide * norm * weight).to(hidden.dtype), mask=in_h)


@triton.jit
def store_converted(
    buffer_ptr,
    offsets,
    value,
    scale,
    mask,
    HAS_SCALE: tl.constexpr,
    CONVERSION: tl.constexpr,
    E4M3_OVERFLOW: tl.constexpr,
):
    """Divide by the scale, round to the weights' dtype, convert to the pool's, store."""
    if HAS_SCALE:
        value = tl.math.div_rn(value.to(tl.float32), tl.full(value.shape, 1.0, tl.float32) * scale)
        value = value.to(tl.bfloat16) if HAS_SCALE == 1 else value.to(tl.float16)
    if CONVERSION == 0:
        tl.store(buffer_ptr + offsets, value.to(buffer_ptr.dtype.element_ty), mask=mask)
    else:
        bits = to_float8_bits(value.to(tl.float32), CONVERSION, E4M3_OVERFLOW)
        tl.store(buffer_ptr + offsets, bits, mask=mask)


@triton.jit
def store_kernel(
    kv_ptr,  # [rows, 2 * heads * HEAD_DIM] K heads, then V heads
    positions_ptr,  # [rows]
    slots_ptr,  # [rows]
    cos_sin_ptr,  # [max_position, ROTARY_DIM] float32
    k_buffer_ptr,  # [slots, heads, HEAD_DIM] (output)
    v_buffer_ptr,  # [slots, heads, HEAD_DIM] (output)
    num_slots,
    stride_k,
    stride_v,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    CONVERSION: tl.constexpr,
    E4M3_OVERFLOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        d = tl.arange(0, BLOCK_D)
        in_d = d < HEAD_DIM
        k_head_ptr = kv_ptr + row * (2 * HEADS * HEAD_DIM) + head * HEAD_DIM
        HALF: tl.constexpr = ROTARY_DIM // 2
        if IS_NEOX:
            first, partner, frequency = d < HALF, tl.where(d < HALF, d + HALF, d - HALF), d % HALF
        else:
            first, partner, frequency = d % 2 == 0, d ^ 1, d // 2
        rotated = d < ROTARY_DIM
        k = tl.load(k_head_ptr + d, mask=in_d, other=0.0)
        other = tl.load(k_head_ptr + partner, mask=rotated, other=0.0).to(tl.float32)
        position = tl.load(positions_ptr + row).to(tl.int64)
        cos_ptr = cos_sin_ptr + position * ROTARY_DIM + frequency
        cos = tl.load(cos_ptr, mask=rotated, other=1.0)
        sin = tl.load(cos_ptr + HALF, mask=rotated, other=0.0)
        turned = k.to(tl.float32) * cos + tl.where(first, -other, other) * sin
        k = tl.where(rotated, turned, k.to(tl.float32)).to(kv_ptr.dtype.element_ty)
        v = tl.load(k_head_ptr + HEADS * HEAD_DIM + d, mask=in_d, other=0.0)
        out = head * HEAD_DIM + d
        store_converted(
            k_buffer_ptr,
            slot * stride_k + out,
            k,
            k_scale,
            in_d,
            HAS_K_SCALE,
            CONVERSION,
            E4M3_OVERFLOW,
        )
        store_converted(
            v_buffer_ptr,
            slot * stride_v + out,
            v,
            v_scale,
            in_d,
            HAS_V_SCALE,
            CONVERSION,
            E4M3_OVERFLOW,
        )


def num_warps_for(elements: int) -> int:
    """Sixteen bf16 elements a thread, as two 16-byte loads; between 1 and 16 warps (arbitrary)."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


def keep(
    *,
    num_programs: int,
    parts: Sequence[torch.Tensor],
    num_aux: int,
    layer: DraftLayer | None = None,
    rows: torch.Tensor | None = None,
    out_cache_loc: torch.Tensor | None = None,
    req_pool_indices: torch.Tensor | None = None,
    kept_hidden_states: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """One read of the aux states for all that is made of them, one program a row.

    Args:
        num_programs: rows written.
        parts: the aux states, packed or in `num_aux` parts.
        rows: [num_programs] source rows of the kept rows.
        packed: [num_programs, num_aux * H_target], written with what fc reads.
        x: [num_programs, 2 * H], its right half written; only where the layer has no fc.
    """
    part_width = parts[0].shape[1]
    chunk = len(parts) * part_width // num_aux
    aux = [parts[min(i, len(parts) - 1)] for i in range(4)]
    norms = (layer.fc_norm if layer is not None else None) or (parts[0],)

    def use(tensor: torch.Tensor | None) -> torch.Tensor:
        return parts[0] if tensor is None else tensor  # an argument that the kernel will not read

    keep_kernel[(num_programs,)](
        *aux,
        *(part.stride(0) for part in aux),
        use(rows),
        use(out_cache_loc),
        use(req_pool_indices),
        use(kept_hidden_states),
        use(kept_hidden_states).stride(0),
        *(norms[min(i, len(norms) - 1)] for i in range(4)),
        use(layer.input_norm if layer else None),
        use(packed),
        use(packed).stride(0),
        use(layer.hidden_norm if layer else None),
        use(x),
        use(x).stride(0),
        layer.rms_norm_eps if layer else 0.0,
        PART_WIDTH=part_width,
        NUM_PARTS=len(parts),
        CHUNK=chunk,
        CHUNKS_PER_PART=part_width // chunk,
        HAS_ROWS=rows is not None,
        HAS_SLOTS=out_cache_loc is not None,
        HAS_KEPT=kept_hidden_states is not None,
        HAS_PACKED=packed is not None,
        HAS_INPUT_NORM=packed is not None and layer is not None and layer.input_norm is not None,
        HAS_FC_NORM=packed is not None and layer is not None and layer.fc_norm is not None,
        HAS_X=x is not None,
        BLOCK_CHUNK=triton.next_power_of_2(chunk),
        num_warps=num_warps_for(chunk),
    )


def embed(
    *,
    token_ids: torch.Tensor,
    layer: DraftLayer | None = None,
    out_cache_loc: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    bonus_tokens: torch.Tensor | None = None,
    new_seq_lens: torch.Tensor | None = None,
    input_embeds: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """What is made of the sampled tokens: the next draft input, and the left half of `x`."""
    embeds = input_embeds
    if embeds is None and layer is not None:
        embeds = layer.embed_tokens
    hidden_size = layer.hidden_size if layer is not None else 1

    def use(tensor: torch.Tensor | None) -> torch.Tensor:
        return token_ids if tensor is None else tensor  # an argument that the kernel will not read

    embed_kernel[(token_ids.shape[0],)](
        use(out_cache_loc),
        token_ids,
        use(seq_lens),
        use(bonus_tokens),
        use(new_seq_lens),
        use(embeds),
        use(embeds).stride(0),
        use(embeds).shape[0],
        use(layer.input_layernorm if layer else None),
        use(x),
        use(x).stride(0),
        layer.rms_norm_eps if layer else 0.0,
        H=hidden_size,
        HAS_SLOTS=out_cache_loc is not None,
        HAS_DRAFT_INPUT=bonus_tokens is not None,
        HAS_X=x is not None,
        GATHER_EMBEDS=input_embeds is None,
        BLOCK_H=triton.next_power_of_2(hidden_size),
        num_warps=num_warps_for(hidden_size),
    )


def store(
    *,
    layer: DraftLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None,
    v_scale: float | None,
) -> None:
    """RoPE on K, conversion and store, one program a row and head."""
    conversion = _CONVERSIONS.get(k_buffer.dtype, CAST)
    scaled = k_buffer.dtype != kv.dtype
    rounding = 1 if kv.dtype == torch.bfloat16 else 2
    pools = (k_buffer, v_buffer)
    if conversion != CAST:
        pools = (k_buffer.view(torch.uint8), v_buffer.view(torch.uint8))
    store_kernel[(kv.shape[0], layer.num_kv_heads)](
        kv,
        positions,
        out_cache_loc,
        layer.cos_sin_cache,
        *pools,
        k_buffer.shape[0],
        k_buffer.stride(0),
        v_buffer.stride(0),
        _rounded(k_scale, kv),
        _rounded(v_scale, kv),
        HEADS=layer.num_kv_heads,
        HEAD_DIM=layer.head_dim,
        ROTARY_DIM=layer.rotary_dim,
        IS_NEOX=layer.is_neox_style,
        HAS_K_SCALE=rounding if scaled and k_scale is not None else 0,
        HAS_V_SCALE=rounding if scaled and v_scale is not None else 0,
        CONVERSION=conversion,
        E4M3_OVERFLOW=E4M3_OVERFLOW,
        BLOCK_D=triton.next_power_of_2(layer.head_dim),
        num_warps=1,
    )


def _rounded(scale: float | None, kv: torch.Tensor) -> float:
    """torch on a GPU casts the scale, a float32 tensor there, to the dividend's dtype."""
    if scale is None or not kv.is_cuda:
        return 1.0 if scale is None else scale
    return torch.tensor(scale).to(kv.dtype).item()


def capture_aux_hidden_states(
    *,
    aux_hidden_states: AuxHiddenStates,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Stage 1 alone: one program a request."""
    parts = _parts(aux_hidden_states)
    keep(
        num_programs=req_pool_indices.shape[0],
        parts=parts,
        num_aux=len(parts),
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
    embed(
        token_ids=next_token_ids,
        seq_lens=seq_lens,
        bonus_tokens=bonus_tokens,
        new_seq_lens=new_seq_lens,
    )


def project(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor | None = None,
    kept_hidden_states: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> torch.Tensor:
    """The half of the step that no sampled token is needed for.

    Returns:
        `x`, or a new [rows, 2 * H], the input of the K/V projection: its right half is written.
    """
    parts = _parts(aux_hidden_states)
    num_rows, hidden_size = parts[0].shape[0], layer.hidden_size
    if x is None:
        x = layer.kv_proj.new_empty((num_rows, 2 * hidden_size))
    packed = None
    normed = layer.input_norm is not None or layer.fc_norm is not None
    if layer.fc is not None and (len(parts) > 1 or normed):
        packed = layer.kv_proj.new_empty((num_rows, layer.fc.shape[1]))
    if kept_hidden_states is not None or packed is not None or layer.fc is None:
        keep(
            num_programs=num_rows,
            parts=parts,
            num_aux=layer.num_aux_hidden_states,
            layer=layer,
            out_cache_loc=out_cache_loc,
            req_pool_indices=req_pool_indices,
            kept_hidden_states=kept_hidden_states,
            packed=packed,
            x=x if layer.fc is None else None,
        )
    if layer.fc is not None:
        hidden = F.linear(parts[0] if packed is None else packed, layer.fc, layer.fc_bias)
        hidden_norm_kernel[(num_rows,)](
            hidden,
            layer.hidden_norm,
            x,
            hidden.stride(0),
            x.stride(0),
            layer.rms_norm_eps,
            H=hidden_size,
            BLOCK_H=triton.next_power_of_2(hidden_size),
            num_warps=num_warps_for(hidden_size),
        )
    return x


def write_projected(
    *,
    layer: DraftLayer,
    x: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None = None,
    v_scale: float | None = None,
    input_embeds: torch.Tensor | None = None,
    bonus_tokens: torch.Tensor | None = None,
    new_seq_lens: torch.Tensor | None = None,
) -> None:
    """The other half: `x` is what `project` returned, its left half is written here."""
    embed(
        token_ids=token_ids,
        layer=layer,
        out_cache_loc=out_cache_loc,
        seq_lens=positions,
        bonus_tokens=bonus_tokens,
        new_seq_lens=new_seq_lens,
        input_embeds=input_embeds,
        x=x,
    )
    store(
        layer=layer,
        kv=F.linear(x, layer.kv_proj, layer.kv_bias),
        positions=positions,
        out_cache_loc=out_cache_loc,
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def write_draft_kv(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    out_cache_loc: torch.Tensor,
    **rest: Any,
) -> None:
    """Stage 3: both halves, nothing kept. Arguments as in the reference."""
    x = project(layer=layer, aux_hidden_states=aux_hidden_states, out_cache_loc=out_cache_loc)
    write_projected(layer=layer, x=x, out_cache_loc=out_cache_loc, **rest)


def fused_draft_step(
    *,
    layer: DraftLayer,
    aux_hidden_states: AuxHiddenStates,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    **rest: Any,
) -> None:
    """The three stages for one token a request, both halves. Arguments as in the reference."""
    x = project(
        layer=layer,
        aux_hidden_states=aux_hidden_states,
        out_cache_loc=out_cache_loc,
        req_pool_indices=req_pool_indices,
        kept_hidden_states=kept_hidden_states,
    )
    write_projected(
        layer=layer,
        x=x,
        token_ids=next_token_ids,
        positions=seq_lens,
        out_cache_loc=out_cache_loc,
        **rest,
    )


def _parts(aux_hidden_states: AuxHiddenStates) -> list[torch.Tensor]:
    if isinstance(aux_hidden_states, torch.Tensor):
        return [aux_hidden_states]
    return list(aux_hidden_states)
