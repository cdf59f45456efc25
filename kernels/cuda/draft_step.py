"""Host side of the one-launch draft step (draft_step.cu) for Hopper GPUs.

Launches: one; two if a norm stands before fc. Bytes moved per step: the fc and K/V weights once,
and per row the aux states, an embedding row, and 2 * num_kv_heads * head_dim elements of K and V;
the float32 partial sums stay in L2. A padding row (negative slot) writes nothing.

Sums are taken in a fixed order: the same inputs give the same bytes on every run and in a graph.
The workspace of a device is shared by all its steps, so they must be ordered (one stream, or
events); it is grown on first use and must not grow in a capture: run the size once before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from ..draft_layer import DraftLayer
from ..float8 import E4M3_OVERFLOW

AuxHiddenStates = torch.Tensor | Sequence[torch.Tensor]

MAX_ROWS = 64  # above, library matmuls and the Triton kernels are faster (profiling/results)
THREADS = 384
FC_ROWS, KV_ROWS, TILE_K, WEIGHT_BYTES = 256, 128, 64, 16384
MAX_KV_SPLITS = 32  # arbitrary
# Weight tiles of a block that are requested and have not landed: enough to cover the latency, and
# no queue for partial sums to wait in (3, 4, 6, 13 at 64 rows: 53.9, 52.0, 55.5, 56.3 us).
IN_FLIGHT = 4
NUM_COUNTERS = 64  # of each of the two sets, behind 32 integers of which the first is the turn
# Batch tile: weight tiles and batch tiles in flight. What fits the 227 KiB of a block, with as many
# bytes of weights in flight as that leaves.
RINGS = {8: (13, 8), 16: (12, 8), 32: (11, 8), 64: (9, 8)}
POOLS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Plan:
    """How a step is cut into units: tiles of weight rows times splits of K."""

    batch_tile: int
    fc_tiles: int
    fc_splits: int
    kv_tiles: int
    kv_splits: int

    @property
    def fc_partial_bytes(self) -> int:
        """float32 sums of every unit."""
        return 4 * self.fc_tiles * self.fc_splits * FC_ROWS * self.batch_tile

    @property
    def kv_partial_bytes(self) -> int:
        """float32 sums of every unit."""
        return 4 * self.kv_tiles * self.kv_splits * KV_ROWS * self.batch_tile


@cache
def _device_reason(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it is written for GPUs of compute capability 9.0 (H100, H200)"
    return None if find_spec("cupy") else "cupy is not installed"


def unsupported(
    *,
    layer: DraftLayer,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    aux: Sequence[torch.Tensor] = (),
    input_embeds: torch.Tensor | None = None,
) -> str | None:
    """Name what this backend lacks for the case; None if nothing."""
    reason = _device_reason(k_buffer.device)
    if reason:
        return reason
    if layer.fc is None:
        return "the draft has no fc"
    if layer.kv_weight_scale is not None:
        return "its weights are float8"
    if aux and aux[0].shape[0] > MAX_ROWS:
        return f"{aux[0].shape[0]} rows exceed {MAX_ROWS}"
    if layer.head_dim > KV_ROWS and layer.is_neox_style:
        if KV_ROWS < layer.rotary_dim < layer.head_dim:
            return f"rotary_dim {layer.rotary_dim} of head_dim {layer.head_dim}, neox style"
    for name, width in (("hidden", layer.hidden_size), ("target", layer.target_hidden_size)):
        if width % 8:
            return f"{name}_size {width} is not a multiple of 8"
    embeds = layer.embed_tokens if input_embeds is None else input_embeds
    for name, tensor in (
        ("fc", layer.fc),
        ("kv_proj", layer.kv_proj),
        ("input_layernorm", layer.input_layernorm),
        ("the embeddings", embeds),
        *((f"aux_hidden_states[{i}]", part) for i, part in enumerate(aux)),
    ):
        if tensor is None:
            continue
        if tensor.data_ptr() % 16 or (tensor.dim() > 1 and tensor.stride(0) % 8):
            return f"the rows of {name} are not 16-byte aligned"
    for name, pool in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        if pool.data_ptr() % 16 or pool.stride(0) % 4:
            return f"the slots of {name} are not aligned to four elements"
    return None


@cache
def make_plan(
    *, rows: int, hidden: int, fc_steps: int, kv_rows: int, head_dim: int, blocks: int
) -> Plan:
    """One unit a block where that can be: split K by as much as the blocks allow."""
    used = KV_ROWS // head_dim * head_dim if head_dim < KV_ROWS else KV_ROWS
    fc_tiles, kv_tiles = ceil_div(hidden, FC_ROWS), ceil_div(kv_rows, used)
    kv_steps = ceil_div(hidden, TILE_K)
    return Plan(
        batch_tile=next(tile for tile in RINGS if rows <= tile),
        fc_tiles=fc_tiles,
        fc_splits=max(1, min(blocks // fc_tiles, fc_steps)),
        kv_tiles=kv_tiles,
        kv_splits=max(1, min(blocks // kv_tiles, kv_steps, MAX_KV_SPLITS)),
    )


_workspaces: dict[tuple[torch.device, int], list[torch.Tensor]] = {}


def _workspace(device: torch.device, fill: int, num_bytes: int) -> torch.Tensor:
    """Memory of a device, first filled with a byte; graphs hold its address, so it is never freed.

    Filled with 0 it starts with the counters, filled with 255 it holds the empty partial sums.
    """
    held = _workspaces.setdefault((device, fill), [])
    if not held or held[-1].numel() < num_bytes:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the workspace must grow to {num_bytes} bytes, which a graph capture cannot do: "
                "run the step once with this size before capturing"
            )
        held.append(torch.full((num_bytes,), fill, dtype=torch.uint8, device=device))
    return held[-1]


@lru_cache(maxsize=1)
def _structures() -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """`Params` and `NormParams` of draft_step.cu, field by field."""
    from .driver import TensorMap

    pointer, i64, i32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

    def group(kind: Any, names: str) -> list[tuple[str, Any]]:
        return [(name, kind) for name in names.split()]

    class Params(ctypes.Structure):
        _fields_ = (
            *group(TensorMap, "fc_map kv_map"),
            ("aux_maps", TensorMap * 4),
            *group(TensorMap, "embed_map hidden_map"),
            ("aux", pointer * 4),
            ("aux_stride", i64 * 4),
            *group(pointer, "slots tokens seq_lens requests kept"),
            ("kept_stride", i64),
            *group(pointer, "bonus_tokens new_seq_lens embeds"),
            ("embeds_stride", i64),
            *group(pointer, "input_layernorm fc_bias hidden_norm kv_bias cos_sin"),
            *group(pointer, "k_buffer v_buffer"),
            *group(i64, "k_stride v_stride num_slots max_requests num_embeds"),
            *group(pointer, "embed_rows hidden_rows square_sums fc_partials kv_partials counters"),
            *group(i32, "rows hidden_size num_parts part_width num_map_parts map_part_width"),
            *group(i32, "heads head_dim rotary_dim is_neox"),
            *group(i32, "fc_tiles fc_splits kv_tiles kv_splits"),
            *group(i32, "tokens_wide seq_lens_wide requests_wide slots_wide"),
            *group(i32, "gather_embeds pool has_k_scale has_v_scale"),
            *group(f32, "k_scale v_scale eps"),
            ("padding", ctypes.c_uint8 * 64),  # the kernel's struct is a multiple of 64 bytes
        )

    class NormParams(ctypes.Structure):
        _fields_ = (
            ("aux", pointer * 4),
            ("aux_stride", i64 * 4),
            ("input_norm", pointer),
            ("fc_norm", pointer * 4),
            *group(pointer, "packed slots"),
            *group(i32, "part_width num_aux target_width slots_wide"),
            ("eps", f32),
        )

    return Params, NormParams


def _normalize_aux(
    layer: DraftLayer, parts: Sequence[torch.Tensor], slots: torch.Tensor, packed: torch.Tensor
) -> None:
    from . import driver

    params = _structures()[1](
        aux=driver.pointers(parts, 4),
        aux_stride=(ctypes.c_int64 * 4)(*(part.stride(0) for part in parts)),
        input_norm=_address(layer.input_norm),
        fc_norm=driver.pointers(layer.fc_norm or (), 4),
        packed=packed.data_ptr(),
        slots=slots.data_ptr(),
        part_width=parts[0].shape[1],
        num_aux=layer.num_aux_hidden_states,
        target_width=layer.target_hidden_size,
        slots_wide=_is_wide(slots),
        eps=layer.rms_norm_eps,
    )
    defines = _defines(8, layer.kv_proj.dtype)
    kernel = driver.load_kernel("normalize_aux_kernel", defines, 0, packed.device.index)
    driver.launch(kernel, params, grid=parts[0].shape[0], block=512)


def _defines(batch_tile: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    names = ("BATCH_TILE", "WEIGHT_TILES", "BATCH_TILES", "IN_FLIGHT")
    defines = list(zip(names, (batch_tile, *RINGS[batch_tile], IN_FLIGHT), strict=True))
    defines.append(("E4M3_OVERFLOW", E4M3_OVERFLOW))
    if dtype == torch.float16:
        defines.append(("WEIGHTS_ARE_HALF", 1))
    return tuple(defines)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rounded(scale: float | None, dtype: torch.dtype) -> float:
    """torch casts the scale, a float32 tensor on the GPU, to the dividend's dtype."""
    return 1.0 if scale is None else torch.tensor(scale).to(dtype).item()


def _is_wide(tensor: torch.Tensor | None) -> int:
    return int(tensor is not None and tensor.dtype == torch.int64)


def _shared_bytes(batch_tile: int) -> int:
    """sizeof(Shared), rounded up, as draft_step.cu lays it out."""
    weight_tiles, batch_tiles = RINGS[batch_tile]
    tiles = weight_tiles * WEIGHT_BYTES + batch_tiles * batch_tile * TILE_K * 2
    items = 2 * batch_tile // 8
    batch = 4 if items >= 32 else 2 if items >= 16 else 1
    staging = 8 * (KV_ROWS + 4) * 4 * max(1, batch // 2) + 2304 * batch + 256 * batch
    staging += 4 * batch_tile
    return ceil_div(tiles + staging + 16 * (weight_tiles + batch_tiles), 1024) * 1024


@dataclass(frozen=True)
class _Regions:
    """The workspaces of a step: scratch that starts with the counters, and the partial sums."""

    counters: int
    square_sums: int
    embed_rows: torch.Tensor
    hidden_rows: torch.Tensor
    packed: torch.Tensor | None
    fc_partials: int
    kv_partials: int


def _regions(layer: DraftLayer, plan: Plan, rows: int, packed_width: int) -> _Regions:
    dtype, device, hidden = layer.kv_proj.dtype, layer.kv_proj.device, layer.hidden_size
    sizes = {
        "counters": 4 * (32 + 2 * NUM_COUNTERS),
        "square_sums": 8 * plan.fc_tiles * plan.batch_tile,
        "embed_rows": 2 * rows * hidden,
        "hidden_rows": 2 * rows * hidden,
        "packed": 2 * rows * packed_width,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += ceil_div(size, 256) * 256
    scratch = _workspace(device, 0, end)
    partials = _workspace(device, 255, plan.fc_partial_bytes + plan.kv_partial_bytes).data_ptr()

    def matrix(name: str, columns: int) -> torch.Tensor:
        region = scratch[offsets[name] : offsets[name] + 2 * rows * columns]
        return region.view(dtype).view(rows, columns)

    return _Regions(
        counters=scratch.data_ptr() + offsets["counters"],
        square_sums=scratch.data_ptr() + offsets["square_sums"],
        embed_rows=matrix("embed_rows", hidden),
        hidden_rows=matrix("hidden_rows", hidden),
        packed=matrix("packed", packed_width) if packed_width else None,
        fc_partials=partials,
        kv_partials=partials + plan.fc_partial_bytes,
    )


def _layer_fields(layer: DraftLayer, fc: torch.Tensor, embeds: torch.Tensor) -> dict[str, Any]:
    """What of `Params` the draft alone decides."""
    from . import driver

    return {
        "fc_map": driver.map_of(fc, 64, weights=True),
        "kv_map": driver.map_of(layer.kv_proj, 64, weights=True),
        "embeds": embeds.data_ptr(),
        "embeds_stride": embeds.stride(0),
        "num_embeds": embeds.shape[0],
        "input_layernorm": layer.input_layernorm.data_ptr(),
        "fc_bias": _address(layer.fc_bias),
        "hidden_norm": layer.hidden_norm.data_ptr(),
        "kv_bias": _address(layer.kv_bias),
        "cos_sin": layer.cos_sin_cache.data_ptr(),
        "hidden_size": layer.hidden_size,
        "heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rotary_dim": layer.rotary_dim,
        "is_neox": int(layer.is_neox_style),
        "eps": layer.rms_norm_eps,
    }


def _plan_fields(plan: Plan, regions: _Regions) -> dict[str, Any]:
    """What of `Params` says how the work is cut, and where it meets."""
    from . import driver

    return {
        "embed_map": driver.map_of(regions.embed_rows, plan.batch_tile),
        "hidden_map": driver.map_of(regions.hidden_rows, plan.batch_tile),
        "embed_rows": regions.embed_rows.data_ptr(),
        "hidden_rows": regions.hidden_rows.data_ptr(),
        "square_sums": regions.square_sums,
        "fc_partials": regions.fc_partials,
        "kv_partials": regions.kv_partials,
        "counters": regions.counters,
        "fc_tiles": plan.fc_tiles,
        "fc_splits": plan.fc_splits,
        "kv_tiles": plan.kv_tiles,
        "kv_splits": plan.kv_splits,
    }


def _pool_fields(
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float | None,
    v_scale: float | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What of `Params` says where K and V go, and as what."""
    scaled = k_buffer.dtype != dtype
    return {
        "k_buffer": k_buffer.data_ptr(),
        "v_buffer": v_buffer.data_ptr(),
        "k_stride": k_buffer.stride(0),
        "v_stride": v_buffer.stride(0),
        "num_slots": k_buffer.shape[0],
        "pool": POOLS.index(k_buffer.dtype),
        "has_k_scale": int(scaled and k_scale is not None),
        "has_v_scale": int(scaled and v_scale is not None),
        "k_scale": _rounded(k_scale, dtype),
        "v_scale": _rounded(v_scale, dtype),
    }


def _kept_fields(
    req_pool_indices: torch.Tensor | None,
    kept_hidden_states: torch.Tensor | None,
    bonus_tokens: torch.Tensor | None,
    new_seq_lens: torch.Tensor | None,
) -> dict[str, Any]:
    """What of `Params` serves the first two stages; nulls for K and V alone."""
    kept = kept_hidden_states
    return {
        "requests": _address(req_pool_indices),
        "requests_wide": _is_wide(req_pool_indices),
        "kept": _address(kept),
        "kept_stride": 0 if kept is None else kept.stride(0),
        "max_requests": 0 if kept is None else kept.shape[0],
        "bonus_tokens": _address(bonus_tokens),
        "new_seq_lens": _address(new_seq_lens),
    }


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
    req_pool_indices: torch.Tensor | None = None,
    kept_hidden_states: torch.Tensor | None = None,
    bonus_tokens: torch.Tensor | None = None,
    new_seq_lens: torch.Tensor | None = None,
) -> None:
    """Stage 3; with the last four arguments, which travel together, the whole step."""
    from . import driver

    parts = _parts(aux_hidden_states)
    fc, dtype = layer.fc, layer.kv_proj.dtype
    embeds = layer.embed_tokens if input_embeds is None else input_embeds
    if fc is None or embeds is None:
        raise ValueError("the CUDA draft step needs layer.fc, and embed_tokens or input_embeds")
    rows, width = parts[0].shape[0], fc.shape[1]
    normed = layer.input_norm is not None or layer.fc_norm is not None
    map_width = width if normed else parts[0].shape[1]
    blocks = torch.cuda.get_device_properties(fc.device).multi_processor_count
    plan = make_plan(
        rows=rows,
        hidden=layer.hidden_size,
        fc_steps=width // map_width * ceil_div(map_width, TILE_K),
        kv_rows=layer.kv_proj.shape[0],
        head_dim=layer.head_dim,
        blocks=blocks,
    )
    regions = _regions(layer, plan, rows, width if normed else 0)
    map_parts = parts
    if regions.packed is not None:
        map_parts = [regions.packed]
        _normalize_aux(layer, parts, out_cache_loc, regions.packed)
    params = _structures()[0](
        aux_maps=(driver.TensorMap * 4)(*(driver.map_of(x, plan.batch_tile) for x in map_parts)),
        num_map_parts=len(map_parts),
        map_part_width=map_width,
        aux=driver.pointers(parts, 4),
        aux_stride=(ctypes.c_int64 * 4)(*(part.stride(0) for part in parts)),
        num_parts=len(parts),
        part_width=parts[0].shape[1],
        rows=rows,
        tokens=token_ids.data_ptr(),
        tokens_wide=_is_wide(token_ids),
        seq_lens=positions.data_ptr(),
        seq_lens_wide=_is_wide(positions),
        slots=out_cache_loc.data_ptr(),
        slots_wide=_is_wide(out_cache_loc),
        gather_embeds=int(input_embeds is None),
        **_layer_fields(layer, fc, embeds),
        **_plan_fields(plan, regions),
        **_pool_fields(k_buffer, v_buffer, k_scale, v_scale, dtype),
        **_kept_fields(req_pool_indices, kept_hidden_states, bonus_tokens, new_seq_lens),
    )
    shared_bytes, defines = _shared_bytes(plan.batch_tile), _defines(plan.batch_tile, dtype)
    driver.launch(
        driver.load_kernel("draft_step_kernel", defines, shared_bytes, fc.device.index),
        params,
        grid=blocks,
        block=THREADS,
        shared_bytes=shared_bytes,
        cooperative=True,
    )


def fused_draft_step(
    *, next_token_ids: torch.Tensor, seq_lens: torch.Tensor, **step: object
) -> None:
    """The three stages for one token a request; arguments as in the reference."""
    write_draft_kv(token_ids=next_token_ids, positions=seq_lens, **step)  # type: ignore[arg-type]


def _parts(aux_hidden_states: AuxHiddenStates) -> list[torch.Tensor]:
    if isinstance(aux_hidden_states, torch.Tensor):
        return [aux_hidden_states]
    return list(aux_hidden_states)
