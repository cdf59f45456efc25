"""What the fused draft step is measured against, on random drafts of the field's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..bindings import ops
from ..kernels.draft_layer import DraftLayer

MAX_POSITION = 4096
COPY_BYTES_PER_US = 4.28e6  # device copy on the H200, bytes read and written
FLOPS_PER_US = 788e6  # 8192 x 8192 x 8192 bfloat16 product on the H200


@dataclass(frozen=True)
class Shape:
    """A draft of the field. The draft's hidden size is the target's."""

    hidden: int
    intermediate: int
    heads: int
    num_aux: int = 3
    kv_heads: int = 8
    head_dim: int = 128
    draft_vocab: int = 32000

    def floor_us(self, rows: int) -> float:
        """The larger of bytes and FLOPs over the H200's measured ceilings."""
        weights = self.hidden * self.num_aux * self.hidden
        weights += 2 * self.kv_heads * self.head_dim * 2 * self.hidden
        row_elements = self.num_aux * self.hidden + self.hidden + 2 * self.kv_heads * self.head_dim
        moved = 2 * (weights + rows * row_elements)
        return max(moved / COPY_BYTES_PER_US, 2 * rows * weights / FLOPS_PER_US)

    def weight_bytes(self) -> int:
        """fc and the K and V rows, bfloat16."""
        kv = 2 * self.kv_heads * self.head_dim * 2 * self.hidden
        return 2 * (self.hidden * self.num_aux * self.hidden + kv)


SHAPES = {
    "8b": Shape(hidden=4096, intermediate=14336, heads=32),
    "70b": Shape(hidden=8192, intermediate=28672, heads=64),
}


def random_layer(shape: Shape, device: str = "cuda") -> DraftLayer:
    """bfloat16 weights of order 1 / sqrt(fan in)."""
    kv, hidden = 2 * shape.kv_heads * shape.head_dim, shape.hidden
    inverse = 500000.0 ** -(torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * inverse

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16) * size[-1] ** -0.5

    return DraftLayer(
        embed_tokens=normal(shape.draft_vocab, hidden) * hidden**0.5,
        fc=normal(hidden, shape.num_aux * hidden),
        fc_bias=None,
        input_norm=None,
        fc_norm=None,
        hidden_norm=torch.ones(hidden, device=device, dtype=torch.bfloat16),
        input_layernorm=torch.ones(hidden, device=device, dtype=torch.bfloat16),
        kv_proj=normal(kv, 2 * hidden),
        kv_bias=None,
        cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1),
        is_neox_style=True,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        num_aux_hidden_states=shape.num_aux,
    )


def random_step(layer: DraftLayer, rows: int, *, prefill: bool = False) -> dict[str, Any]:
    """Arguments of `ops.fused_draft_step`, every row live; for a prefill, which keeps nothing but
    K and V, `kept_hidden_states` is None and only `write` takes them."""
    device, width = layer.hidden_norm.device, layer.num_aux_hidden_states * layer.hidden_size
    pool = torch.zeros(
        rows + 4096, layer.num_kv_heads, layer.head_dim, device=device, dtype=torch.bfloat16
    )
    assert layer.embed_tokens is not None
    vocab = layer.embed_tokens.shape[0]
    return {
        "layer": layer,
        "aux_hidden_states": torch.randn(rows, width, device=device, dtype=torch.bfloat16),
        "next_token_ids": torch.randint(0, vocab, (rows,), device=device),
        "seq_lens": torch.randint(0, MAX_POSITION, (rows,), device=device),
        "req_pool_indices": torch.randperm(rows, device=device),
        "out_cache_loc": torch.randperm(rows + 4096, device=device)[:rows],
        "kept_hidden_states": None
        if prefill
        else torch.zeros(rows, width, device=device, dtype=torch.bfloat16),
        "bonus_tokens": torch.zeros(rows, device=device, dtype=torch.int32),
        "new_seq_lens": torch.zeros(rows, device=device, dtype=torch.int64),
        "k_buffer": pool,
        "v_buffer": pool.clone(),
    }


def widened_layer(layer: DraftLayer) -> DraftLayer:
    """The layer in float64, for an exact result."""
    weights = {field.name: getattr(layer, field.name) for field in fields(layer)}
    wide = {k: v.double() for k, v in weights.items() if isinstance(v, torch.Tensor)}
    return replace(layer, **wide)


def write(step: dict[str, Any], backend: str = "auto", layer: DraftLayer | None = None) -> None:
    """The op itself: `fused_draft_step`, or of a prefill `write_draft_kv`."""
    layer = layer or step["layer"]
    if step["kept_hidden_states"] is not None:
        ops.fused_draft_step(**{**step, "layer": layer}, backend=backend)
        return
    names = ("aux_hidden_states", "out_cache_loc", "k_buffer", "v_buffer")
    ops.write_draft_kv(
        layer=layer,
        token_ids=step["next_token_ids"],
        positions=step["seq_lens"],
        **{name: step[name] for name in names},
        backend=backend,
    )


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _keep(step: dict[str, Any]) -> None:
    """Stages capture_aux_hidden_states and build_draft_input."""
    if step["kept_hidden_states"] is not None:
        step["kept_hidden_states"][step["req_pool_indices"]] = step["aux_hidden_states"]
        step["bonus_tokens"].copy_(step["next_token_ids"])
        torch.add(step["seq_lens"], 1, out=step["new_seq_lens"])


def unfused(step: dict[str, Any]) -> None:
    """The step as a chain of torch calls that a graph can hold: no padding, no checks."""
    layer: DraftLayer = step["layer"]
    aux, tokens, slots = step["aux_hidden_states"], step["next_token_ids"], step["out_cache_loc"]
    _keep(step)
    hidden = _rms_norm(F.linear(aux, layer.fc), layer.hidden_norm)  # type: ignore[arg-type]
    embeds = _rms_norm(F.embedding(tokens, layer.embed_tokens), layer.input_layernorm)  # type: ignore[arg-type]
    kv = F.linear(torch.cat((embeds, hidden), dim=-1), layer.kv_proj)
    k, v = kv.unflatten(-1, (2, layer.num_kv_heads, layer.head_dim)).unbind(1)
    step["k_buffer"][slots] = _rope(k, layer.cos_sin_cache[step["seq_lens"]])
    step["v_buffer"][slots] = v


def matmuls(step: dict[str, Any]) -> Callable[[], object]:
    """cuBLAS for fc and for K and V, and nothing else."""
    layer: DraftLayer = step["layer"]
    aux = step["aux_hidden_states"]
    x = torch.randn(aux.shape[0], 2 * layer.hidden_size, device=aux.device, dtype=aux.dtype)
    return lambda: (F.linear(aux, layer.fc), F.linear(x, layer.kv_proj))  # type: ignore[arg-type]


def flashinfer_pieces(step: dict[str, Any]) -> Callable[[], object]:
    """cuBLAS with flashinfer's own norms, RoPE and paged store; a page holds one slot.

    Raises:
        ImportError: flashinfer is not installed.
    """
    from flashinfer import rmsnorm
    from flashinfer.page import append_paged_kv_cache
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    layer: DraftLayer = step["layer"]
    aux, tokens, hidden_size = step["aux_hidden_states"], step["next_token_ids"], layer.hidden_size
    rows, device = aux.shape[0], aux.device
    x = torch.empty(rows, 2 * hidden_size, device=device, dtype=aux.dtype)
    query = torch.empty(rows, layer.head_dim, device=device, dtype=aux.dtype)
    request = torch.arange(rows + 1, device=device, dtype=torch.int32)
    pages = step["out_cache_loc"].int()
    zeros, ones = torch.zeros_like(pages), torch.ones_like(pages)
    pools = tuple(step[name].unsqueeze(1) for name in ("k_buffer", "v_buffer"))

    def run() -> None:
        _keep(step)
        embeds = F.embedding(tokens, layer.embed_tokens)  # type: ignore[arg-type]
        rmsnorm(embeds, layer.input_layernorm, layer.rms_norm_eps, out=x[:, :hidden_size])
        hidden = F.linear(aux, layer.fc)  # type: ignore[arg-type]
        rmsnorm(hidden, layer.hidden_norm, layer.rms_norm_eps, out=x[:, hidden_size:])
        k, v = F.linear(x, layer.kv_proj).chunk(2, dim=-1)
        apply_rope_with_cos_sin_cache_inplace(
            step["seq_lens"], query, k, layer.head_dim, layer.cos_sin_cache, is_neox=True
        )
        heads = (layer.num_kv_heads, layer.head_dim)
        append_paged_kv_cache(
            k.unflatten(-1, heads), v.unflatten(-1, heads), request[:-1], zeros, pools, pages,
            request, ones,
        )  # fmt: skip

    return run


def full_layer(step: dict[str, Any], shape: Shape) -> Callable[[], object]:
    """A lower bound on what SGLang's step 0 pays for the draft: the layer and lm_head on one token.

    Attention is left out but for its projections: every head takes its own V.
    """
    layer: DraftLayer = step["layer"]
    hidden, heads = shape.hidden, shape.heads

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5

    q_proj, o_proj = normal(heads * 128, 2 * hidden), normal(hidden, heads * 128)
    gate_up, down = normal(2 * shape.intermediate, hidden), normal(hidden, shape.intermediate)
    lm_head = normal(shape.draft_vocab, hidden)
    qkv_proj = torch.cat((q_proj, layer.kv_proj))
    del q_proj
    kv_size = shape.kv_heads * shape.head_dim

    def run() -> torch.Tensor:
        aux, tokens = step["aux_hidden_states"], step["next_token_ids"]
        residual = F.linear(aux, layer.fc)  # type: ignore[arg-type]
        embeds = _rms_norm(F.embedding(tokens, layer.embed_tokens), layer.input_layernorm)  # type: ignore[arg-type]
        x = torch.cat((embeds, _rms_norm(residual, layer.hidden_norm)), dim=-1)
        q, k, v = F.linear(x, qkv_proj).split((heads * 128, kv_size, kv_size), dim=-1)
        k, v = (y.unflatten(-1, (shape.kv_heads, 128)) for y in (k, v))
        cos_sin = layer.cos_sin_cache[step["seq_lens"]]
        _rope(q.unflatten(-1, (heads, 128)), cos_sin)
        step["k_buffer"][step["out_cache_loc"]] = _rope(k, cos_sin)
        step["v_buffer"][step["out_cache_loc"]] = v
        attended = v.repeat_interleave(heads // shape.kv_heads, dim=1).flatten(1)
        residual = residual + F.linear(attended, o_proj)
        gate, up = F.linear(_rms_norm(residual, layer.hidden_norm), gate_up).chunk(2, dim=-1)
        residual = residual + F.linear(F.silu(gate) * up, down)
        return F.linear(_rms_norm(residual, layer.hidden_norm), lm_head).argmax(-1)

    return run
