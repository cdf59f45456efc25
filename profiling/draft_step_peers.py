"""What the fused draft step is measured against, on random drafts of the field's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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


def random_step(layer: DraftLayer, rows: int) -> dict[str, Any]:
    """Arguments of `ops.fused_draft_step`, every row live."""
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
        "kept_hidden_states": torch.zeros(rows, width, device=device, dtype=torch.bfloat16),
        "bonus_tokens": torch.zeros(rows, device=device, dtype=torch.int32),
        "new_seq_lens": torch.zeros(rows, device=device, dtype=torch.int64),
        "k_buffer": pool,
        "v_buffer": pool.clone(),
    }


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def unfused(step: dict[str, Any]) -> None:
    """The step as a chain of torch calls that a graph can hold: no padding, no checks."""
    layer: DraftLayer = step["layer"]
    aux, tokens, slots = step["aux_hidden_states"], step["next_token_ids"], step["out_cache_loc"]
    step["kept_hidden_states"][step["req_pool_indices"]] = aux
    step["bonus_tokens"].copy_(tokens)
    torch.add(step["seq_lens"], 1, out=step["new_seq_lens"])
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
