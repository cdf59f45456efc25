"""The draft step's ops: checks once, then one `torch.library` call that marks what it writes.

`fused_draft_step` is the composition of the three stages for one decoded token a request;
`write_draft_kv` alone serves prefill. Backends: "torch" is the reference; "triton" is Triton's
kernels alone, on a GPU or interpreted; "auto" is the reference on the CPU, and on a GPU Triton's
kernels with the CUDA matmul where that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from ..kernels.draft_layer import DraftLayer

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]

BACKENDS = ("auto", "torch", "triton")
WEIGHT_DTYPES = (torch.bfloat16, torch.float16)
CPU_WEIGHT_DTYPES = (*WEIGHT_DTYPES, torch.float32, torch.float64)
POOL_DTYPES = (*WEIGHT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
INDEX_DTYPES = (torch.int32, torch.int64)
HEAD_DIMS = (64, 96, 128, 256)
MAX_AUX_HIDDEN_STATES = 4

_LAYER_SCHEMA = (
    "Tensor? embed_tokens, Tensor? fc, Tensor? fc_bias, Tensor? input_norm, Tensor[] fc_norm, "
    "Tensor hidden_norm, Tensor input_layernorm, Tensor kv_proj, Tensor? kv_bias, "
    "Tensor cos_sin_cache, bool is_neox_style, int num_kv_heads, int head_dim, "
    "float rms_norm_eps, int num_aux_hidden_states, Tensor? fc_weight_scale, "
    "Tensor? kv_weight_scale"
)
_LAYER_FIELDS = tuple(field.name for field in fields(DraftLayer))

_LIBRARY = torch.library.Library("fused_fallback", "DEF")
_LIBRARY.define(
    "capture_aux_hidden_states(Tensor[] aux_hidden_states, Tensor req_pool_indices, "
    "Tensor(a!) kept_hidden_states, Tensor? rows, str backend) -> ()"
)
_LIBRARY.define(
    "build_draft_input(Tensor next_token_ids, Tensor seq_lens, Tensor(a!) bonus_tokens, "
    "Tensor(b!) new_seq_lens, str backend) -> ()"
)
_LIBRARY.define(
    f"write_draft_kv({_LAYER_SCHEMA}, Tensor[] aux_hidden_states, Tensor token_ids, "
    "Tensor positions, Tensor out_cache_loc, Tensor(a!) k_buffer, Tensor(b!) v_buffer, "
    "float? k_scale, float? v_scale, Tensor? input_embeds, str backend) -> ()"
)
_LIBRARY.define(
    f"fused_draft_step({_LAYER_SCHEMA}, Tensor[] aux_hidden_states, Tensor next_token_ids, "
    "Tensor seq_lens, Tensor req_pool_indices, Tensor out_cache_loc, "
    "Tensor(a!) kept_hidden_states, Tensor(b!) bonus_tokens, Tensor(c!) new_seq_lens, "
    "Tensor(d!) k_buffer, Tensor(e!) v_buffer, float? k_scale, float? v_scale, "
    "Tensor? input_embeds, str backend) -> ()"
)


def capture_aux_hidden_states(
    *,
    aux_hidden_states: AuxHiddenStates,
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    rows: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Keep the aux hidden states that each request's catch-up will start from.

    Args:
        aux_hidden_states: [num_rows, num_aux * H_target], or `num_aux` tensors [num_rows,
            H_target] that are read in place. Rows may be strided.
        req_pool_indices: [num_requests] int32 or int64; negative is padding and keeps nothing.
        kept_hidden_states: [max_requests, num_aux * H_target], written.
        rows: [num_requests] int32 or int64, the source row of each request; row i without it.

    Raises:
        ValueError: a shape, dtype, device, stride or CPU index range is wrong; the backend is
            unknown or does not exist for this device.
    """
    aux = _as_parts(aux_hidden_states)
    num_rows, width = aux[0].shape[0], sum(part.shape[1] for part in aux)
    num_requests = num_rows if rows is None else rows.shape[0]
    _check_aux(aux, rows=num_rows, width=width, like=kept_hidden_states)
    _check("kept_hidden_states", kept_hidden_states, shape=(None, width), last_stride=True)
    device = kept_hidden_states.device
    _check_index("req_pool_indices", req_pool_indices, num_requests, device)
    _check_range("req_pool_indices", req_pool_indices, kept_hidden_states.shape[0])
    if rows is not None:
        _check_index("rows", rows, num_requests, device)
        _check_range("rows", rows, num_rows, slots=req_pool_indices)
    torch.ops.fused_fallback.capture_aux_hidden_states(
        aux, req_pool_indices, kept_hidden_states, rows, _resolve(backend, device)
    )


def build_draft_input(
    *,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    backend: str = "auto",
) -> None:
    """The fields of the next `EagleDraftInput` that change from step to step.

    `topk_p`, `topk_index` and `hidden_states` are not read before the catch-up: the caller holds
    constant zeros of their shapes.

    Args:
        next_token_ids: [num_rows] int32 or int64, the sampled tokens.
        seq_lens: [num_rows] int32 or int64, the KV lengths before the step.
        bonus_tokens: [num_rows] int32, written.
        new_seq_lens: [num_rows] of the dtype of `seq_lens`, written with `seq_lens + 1`.

    Raises:
        ValueError: a shape, dtype, device or stride is wrong.
    """
    _check_draft_input(next_token_ids, seq_lens, bonus_tokens, new_seq_lens)
    torch.ops.fused_fallback.build_draft_input(
        next_token_ids,
        seq_lens,
        bonus_tokens,
        new_seq_lens,
        _resolve(backend, next_token_ids.device),
    )


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
    backend: str = "auto",
) -> None:
    """Write the draft's K and V of every row into the paged pool, without running the draft.

    Args:
        layer: the draft layer's weights.
        aux_hidden_states: [num_rows, num_aux * H_target], or `num_aux` tensors [num_rows,
            H_target] that are read in place, in the weights' dtype. Rows may be strided.
        token_ids: [num_rows] int32 or int64, the token after each position.
        positions: [num_rows] int32 or int64.
        out_cache_loc: [num_rows] int32 or int64 slots; negative is padding, writes nothing and is
            not read.
        k_buffer, v_buffer: [num_slots, num_kv_heads, head_dim] in bfloat16, float16,
            float8_e4m3fn or float8_e5m2 (or the weights' dtype), written.
        k_scale, v_scale: K and V are divided by these if the pool's dtype is not the weights'.
        input_embeds: [num_rows, H] instead of `layer.embed_tokens[token_ids]`.

    Raises:
        ValueError: a shape, dtype, device, stride or CPU index range is wrong, the backend is
            unknown, or `can_fuse` names why it does not support this case.
    """
    aux = _as_parts(aux_hidden_states)
    num_rows = aux[0].shape[0]
    backend = _fusible_backend(layer, k_buffer, v_buffer, backend)
    _check_rows(layer, aux, token_ids, positions, out_cache_loc, k_buffer, input_embeds)
    _check_scales(k_scale, v_scale)
    if num_rows == 0:
        return
    torch.ops.fused_fallback.write_draft_kv(
        *_flatten(layer),
        aux,
        token_ids,
        positions,
        out_cache_loc,
        k_buffer,
        v_buffer,
        k_scale,
        v_scale,
        input_embeds,
        backend,
    )


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
    backend: str = "auto",
) -> None:
    """One step with speculation off, one row a request: the three stages in one call.

    Row i stands at position `seq_lens[i]`, the KV length before the step. A negative
    `out_cache_loc[i]` makes the whole row padding: nothing of it is read or written. Arguments are
    those of `capture_aux_hidden_states`, `build_draft_input` and `write_draft_kv`.

    Raises:
        ValueError: as the three stages do.
    """
    aux = _as_parts(aux_hidden_states)
    num_rows = aux[0].shape[0]
    backend = _fusible_backend(layer, k_buffer, v_buffer, backend)
    _check_rows(layer, aux, next_token_ids, seq_lens, out_cache_loc, k_buffer, input_embeds)
    _check_draft_input(next_token_ids, seq_lens, bonus_tokens, new_seq_lens)
    width = layer.num_aux_hidden_states * layer.target_hidden_size
    _check(
        "kept_hidden_states",
        kept_hidden_states,
        shape=(None, width),
        dtypes=(aux[0].dtype,),
        device=k_buffer.device,
        last_stride=True,
    )
    _check_index("req_pool_indices", req_pool_indices, num_rows, k_buffer.device)
    _check_range(
        "req_pool_indices", req_pool_indices, kept_hidden_states.shape[0], slots=out_cache_loc
    )
    _check_scales(k_scale, v_scale)
    if num_rows == 0:
        return
    torch.ops.fused_fallback.fused_draft_step(
        *_flatten(layer),
        aux,
        next_token_ids,
        seq_lens,
        req_pool_indices,
        out_cache_loc,
        kept_hidden_states,
        bonus_tokens,
        new_seq_lens,
        k_buffer,
        v_buffer,
        k_scale,
        v_scale,
        input_embeds,
        backend,
    )


def can_fuse(
    *, layer: DraftLayer, k_buffer: torch.Tensor, v_buffer: torch.Tensor, backend: str = "auto"
) -> str | None:
    """Name what keeps this layer and pool from being fused; None if nothing does.

    Args:
        layer: the draft layer's weights.
        k_buffer, v_buffer: the pool of that layer, [num_slots, num_kv_heads, head_dim].
        backend: "auto", "torch" or "triton".

    Raises:
        ValueError: the backend is unknown.
    """
    backend = _resolve(backend, k_buffer.device)
    return (
        _layer_reason(layer, backend)
        or _float8_reason(layer, backend)
        or _pool_reason(layer, k_buffer, v_buffer)
    )


def _layer_reason(layer: DraftLayer, backend: str) -> str | None:
    hidden, num_aux = layer.hidden_size, layer.num_aux_hidden_states
    width = num_aux * layer.target_hidden_size
    dtype, device = layer.dtype, layer.kv_proj.device
    allowed = CPU_WEIGHT_DTYPES if backend == "torch" else WEIGHT_DTYPES
    if dtype not in allowed:
        return f"hidden_norm is {dtype}; backend {backend!r} takes {_names(allowed)}"
    if not 1 <= num_aux <= MAX_AUX_HIDDEN_STATES:
        return f"num_aux_hidden_states is {num_aux}; 1 to {MAX_AUX_HIDDEN_STATES} are supported"
    if backend != "torch" and layer.head_dim not in HEAD_DIMS:
        return f"head_dim is {layer.head_dim}; backend {backend!r} takes {HEAD_DIMS}"
    if layer.fc is None and (layer.input_norm is not None or layer.fc_norm is not None):
        return "input_norm or fc_norm is set without fc; SGLang applies neither then"
    if width != (hidden if layer.fc is None else layer.fc.shape[1]):
        return f"the aux states' width does not divide by num_aux_hidden_states {num_aux}"
    rotary_dim = layer.rotary_dim
    if rotary_dim % 2 or rotary_dim > layer.head_dim:
        return f"rotary_dim is {rotary_dim}; it must be even and at most head_dim {layer.head_dim}"
    kv_rows = 2 * layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int | None, ...]] = {
        "embed_tokens": (None, hidden),
        "fc": (hidden, width),
        "fc_bias": (hidden,),
        "input_norm": (width,),
        "hidden_norm": (hidden,),
        "input_layernorm": (hidden,),
        "kv_proj": (kv_rows, 2 * hidden),
        "kv_bias": (kv_rows,),
    }
    weights = [(name, getattr(layer, name), shape) for name, shape in shapes.items()]
    norms = layer.fc_norm or ()
    if layer.fc_norm is not None and len(norms) != num_aux:
        return f"fc_norm has {len(norms)} weights; num_aux_hidden_states is {num_aux}"
    target = (layer.target_hidden_size,)
    weights += [(f"fc_norm[{i}]", weight, target) for i, weight in enumerate(norms)]
    for name, weight, shape in weights:
        if weight is None:
            continue
        quantized = name in ("fc", "kv_proj") and layer.kv_weight_scale is not None
        dtypes = (torch.float8_e4m3fn,) if quantized else (dtype,)
        reason = _mismatch(name, weight, shape=shape, dtypes=dtypes, device=device)
        if reason or not weight.is_contiguous():
            return reason or f"{name} must be contiguous, got strides {weight.stride()}"
    return _mismatch(
        "cos_sin_cache",
        layer.cos_sin_cache,
        shape=(None, rotary_dim),
        dtypes=(torch.float32, *((dtype,) if backend == "torch" else ())),
        device=device,
    )


def _float8_reason(layer: DraftLayer, backend: str) -> str | None:
    """Of a layer that `quantize_layer` made."""
    if layer.kv_weight_scale is None:
        return None if layer.fc_weight_scale is None else "fc_weight_scale is set alone"
    device = layer.kv_proj.device
    if (layer.fc is None) != (layer.fc_weight_scale is None):
        return "fc and fc_weight_scale must both be set or None"
    for name, weight in (("fc", layer.fc), ("kv", layer.kv_proj)):
        scale = getattr(layer, f"{name}_weight_scale")
        if weight is None:
            continue
        name = f"{name}_weight_scale"
        shape, dtypes = (weight.shape[0],), (torch.float32,)
        reason = _mismatch(name, scale, shape=shape, dtypes=dtypes, device=device)
        if reason or not scale.is_contiguous():
            return reason or f"{name} must be contiguous, got strides {scale.stride()}"
    if backend != "torch" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (9, 0):
            return f"float8 weights need compute capability 9.0 or newer, {device} has {capability}"
    return None


def _pool_reason(layer: DraftLayer, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> str | None:
    dtype = layer.dtype
    for name, buffer in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        reason = _mismatch(
            name,
            buffer,
            shape=(k_buffer.shape[0], layer.num_kv_heads, layer.head_dim),
            dtypes=tuple(dict.fromkeys((dtype, *POOL_DTYPES))),
            device=layer.kv_proj.device,
        )
        if reason:
            return reason
        if buffer.stride()[1:] != (layer.head_dim, 1):
            return f"a slot of {name} must be contiguous [head, dim], got {buffer.stride()}"
    if k_buffer.dtype != v_buffer.dtype:
        return f"k_buffer is {k_buffer.dtype} and v_buffer {v_buffer.dtype}; both must be one dtype"
    return None


def _fusible_backend(
    layer: DraftLayer, k_buffer: torch.Tensor, v_buffer: torch.Tensor, backend: str
) -> str:
    """`backend` as `_resolve` names it; raises where `can_fuse` has a reason."""
    reason = can_fuse(layer=layer, k_buffer=k_buffer, v_buffer=v_buffer, backend=backend)
    if reason:
        raise ValueError(f"backend {backend!r} does not support this draft: {reason}")
    return _resolve(backend, k_buffer.device)


def _resolve(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return "torch" if backend == "auto" and device.type == "cpu" else backend


def _as_parts(aux_hidden_states: AuxHiddenStates) -> list[torch.Tensor]:
    if isinstance(aux_hidden_states, torch.Tensor):
        parts = [aux_hidden_states]
    else:
        parts = list(aux_hidden_states)
    if not parts or any(part.dim() != 2 for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"aux_hidden_states must be one or more 2-d tensors, got shapes {shapes}")
    return parts


def _check_aux(
    aux: list[torch.Tensor], *, rows: int, width: int, like: torch.Tensor, parts: int | None = None
) -> None:
    if parts is not None and len(aux) not in (1, parts):
        raise ValueError(
            f"aux_hidden_states must be packed or {parts} tensors (num_aux_hidden_states), "
            f"got {len(aux)}"
        )
    for i, part in enumerate(aux):
        _check(
            f"aux_hidden_states[{i}]" if len(aux) > 1 else "aux_hidden_states",
            part,
            shape=(rows, width // len(aux)),
            dtypes=(like.dtype,),
            device=like.device,
            last_stride=True,
        )


def _check_rows(
    layer: DraftLayer,
    aux: list[torch.Tensor],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    input_embeds: torch.Tensor | None,
) -> None:
    num_rows, device = aux[0].shape[0], k_buffer.device
    num_aux = layer.num_aux_hidden_states
    width = num_aux * layer.target_hidden_size
    _check_aux(aux, rows=num_rows, width=width, like=layer.hidden_norm, parts=num_aux)
    _check_index("token_ids", token_ids, num_rows, device)
    _check_index("positions (seq_lens)", positions, num_rows, device)
    _check_index("out_cache_loc", out_cache_loc, num_rows, device)
    if input_embeds is not None:
        _check(
            "input_embeds",
            input_embeds,
            shape=(num_rows, layer.hidden_size),
            dtypes=(layer.dtype,),
            device=device,
            last_stride=True,
        )
    elif layer.embed_tokens is None:
        raise ValueError("input_embeds must be given, because layer.embed_tokens is None")
    live = {"low": 0, "slots": out_cache_loc}
    _check_range("out_cache_loc", out_cache_loc, k_buffer.shape[0])
    _check_range("positions (seq_lens)", positions, layer.cos_sin_cache.shape[0], **live)
    if input_embeds is None and layer.embed_tokens is not None:
        _check_range("token_ids", token_ids, layer.embed_tokens.shape[0], **live)


def _check_draft_input(
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
) -> None:
    num_rows, device = next_token_ids.shape[0], next_token_ids.device
    _check_index("next_token_ids", next_token_ids, num_rows, device)
    _check_index("seq_lens", seq_lens, num_rows, device)
    _check_index("bonus_tokens", bonus_tokens, num_rows, device, (torch.int32,))
    _check_index("new_seq_lens", new_seq_lens, num_rows, device, (seq_lens.dtype,))


def _check_index(
    name: str,
    tensor: torch.Tensor,
    num_rows: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES,
) -> None:
    _check(name, tensor, shape=(num_rows,), dtypes=dtypes, device=device, last_stride=True)


def _check_range(
    name: str,
    index: torch.Tensor,
    limit: int,
    *,
    low: int | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Values of live rows, on the CPU only: on a GPU looking at them would synchronise."""
    if index.device.type != "cpu":
        return
    if slots is not None:
        index = index[slots >= 0]
    if index.numel() == 0:
        return
    smallest, largest = int(index.min()), int(index.max())
    if largest >= limit or (low is not None and smallest < low):
        raise ValueError(f"{name} must be below {limit}, got values from {smallest} to {largest}")


def _check_scales(k_scale: float | None, v_scale: float | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not (isinstance(scale, int | float) and scale > 0):
            raise ValueError(f"{name} must be a positive Python number or None, got {scale!r}")


def _check(name: str, tensor: torch.Tensor, **expected: Any) -> None:
    reason = _mismatch(name, tensor, **expected)
    if reason:
        raise ValueError(reason)


def _mismatch(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    last_stride: bool = False,
) -> str | None:
    actual = tuple(tensor.shape)
    wrong = len(actual) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, actual, strict=False)
    )
    if wrong:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        return f"{name} must have shape [{wanted}], got {list(actual)}"
    if dtypes is not None and tensor.dtype not in dtypes:
        return f"{name} must be {_names(dtypes)}, got {tensor.dtype}"
    if device is not None and tensor.device != device:
        return f"{name} must be on {device}, got {tensor.device}"
    if last_stride and actual[-1] > 1 and tensor.stride(-1) != 1:
        return f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}"
    return None


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _flatten(layer: DraftLayer) -> list[Any]:
    values = {name: getattr(layer, name) for name in _LAYER_FIELDS}
    values["fc_norm"] = list(layer.fc_norm or ())
    return list(values.values())


def _unflatten(values: Sequence[Any]) -> DraftLayer:
    record = dict(zip(_LAYER_FIELDS, values, strict=True))
    record["fc_norm"] = tuple(record["fc_norm"]) or None
    return DraftLayer(**record)


def _kernels(backend: str) -> tuple[Any, dict[str, bool]]:
    """The module that implements a backend, and what its matmuls are asked for."""
    if backend == "torch":
        from ..kernels import reference

        return reference, {}
    from ..kernels import draft_step  # imports Triton

    return draft_step, {"cuda": backend == "auto"}


def _packed(aux: list[torch.Tensor]) -> AuxHiddenStates:
    return aux[0] if len(aux) == 1 else aux


def _capture_aux_hidden_states(
    aux: list[torch.Tensor],
    req_pool_indices: torch.Tensor,
    kept_hidden_states: torch.Tensor,
    rows: torch.Tensor | None,
    backend: str,
) -> None:
    with torch.cuda.device_of(kept_hidden_states):
        _kernels(backend)[0].capture_aux_hidden_states(
            aux_hidden_states=_packed(aux),
            req_pool_indices=req_pool_indices,
            kept_hidden_states=kept_hidden_states,
            rows=rows,
        )


def _build_draft_input(
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    backend: str,
) -> None:
    with torch.cuda.device_of(next_token_ids):
        _kernels(backend)[0].build_draft_input(
            next_token_ids=next_token_ids,
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
        )


def _write_draft_kv(*args: Any) -> None:
    split = len(_LAYER_FIELDS)
    layer, (aux, token_ids, positions, slots, k_buffer, v_buffer, *rest) = (
        _unflatten(args[:split]),
        args[split:],
    )
    k_scale, v_scale, input_embeds, backend = rest
    kernels, options = _kernels(backend)
    with torch.cuda.device_of(k_buffer):
        kernels.write_draft_kv(
            layer=layer,
            aux_hidden_states=_packed(aux),
            token_ids=token_ids,
            positions=positions,
            out_cache_loc=slots,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            k_scale=k_scale,
            v_scale=v_scale,
            input_embeds=input_embeds,
            **options,
        )


def _fused_draft_step(*args: Any) -> None:
    split = len(_LAYER_FIELDS)
    layer, (aux, tokens, seq_lens, requests, slots, kept, *rest) = (
        _unflatten(args[:split]),
        args[split:],
    )
    bonus_tokens, new_seq_lens, k_buffer, v_buffer, k_scale, v_scale, embeds, backend = rest
    kernels, options = _kernels(backend)
    with torch.cuda.device_of(k_buffer):
        kernels.fused_draft_step(
            layer=layer,
            aux_hidden_states=_packed(aux),
            next_token_ids=tokens,
            seq_lens=seq_lens,
            req_pool_indices=requests,
            out_cache_loc=slots,
            kept_hidden_states=kept,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            k_scale=k_scale,
            v_scale=v_scale,
            input_embeds=embeds,
            **options,
        )


def _writes_nothing_new(*args: Any) -> None:
    """The fake of every op: outputs are arguments, so there is no shape to compute."""


for _name, _implementation in (
    ("capture_aux_hidden_states", _capture_aux_hidden_states),
    ("build_draft_input", _build_draft_input),
    ("write_draft_kv", _write_draft_kv),
    ("fused_draft_step", _fused_draft_step),
):
    _LIBRARY.impl(_name, _implementation, "CPU")
    _LIBRARY.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"fused_fallback::{_name}", _writes_nothing_new, lib=_LIBRARY)
