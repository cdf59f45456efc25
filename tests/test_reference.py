"""The oracle against SGLang's own modules: norms, RoPE, the KV pool, and the whole of step 0."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from draft_step_cases import Case, as_bytes, make_layer, make_step
from fused_fallback.kernels import reference

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # else its layers look for GPU kernels
pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def sglang_context():
    """What SGLang's layers look up when they are built outside a server."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_sglang_s(dtype: torch.dtype) -> None:
    norm = RMSNorm(144, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(144).to(dtype)
    x = torch.randn(7, 144).to(dtype)
    ours = reference.rms_norm(x, norm.weight.data, 1e-5)
    assert torch.equal(ours, norm.forward_native(x))


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 64), (256, 256)])
def test_rope_is_sglang_s(head_dim: int, rotary_dim: int, neox: bool, scaling: dict | None) -> None:
    rope = get_rope(
        head_dim,
        rotary_dim=rotary_dim,
        max_position=128,
        base=10000,
        is_neox_style=neox,
        rope_scaling=scaling,
        dtype=torch.float32,
    )
    positions, k = torch.randint(0, 128, (9,)), torch.randn(9, 3, head_dim)
    cache = rope.cos_sin_cache.float()
    ours = reference.apply_rope(k, positions, cache, neox)
    flat = k.flatten(1)
    theirs = rope.forward_native(positions, flat.clone(), flat.clone())[1]
    torch.testing.assert_close(ours.flatten(1), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize(
    "pool_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_stored_bytes_are_set_kv_buffer_s(pool_dtype: torch.dtype, scale: float | None) -> None:
    pool = MHATokenToKVPool(
        size=40,
        page_size=1,
        dtype=pool_dtype,
        head_num=2,
        head_dim=64,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    # Up to 1000: e4m3 overflows at 464.
    k, v = (torch.randn(6, 2, 64).mul(300).bfloat16() for _ in range(2))
    slots = torch.tensor([3, 40, 1, 17, 8, 25])
    ours = torch.zeros_like(pool.get_key_buffer(0)).view(pool_dtype)
    reference.store_kv(k, slots, ours, scale)
    tensor_scale = None if scale is None else torch.tensor(scale)
    layer = SimpleNamespace(layer_id=0)
    pool.set_kv_buffer(layer, slots, k.clone(), v, tensor_scale, tensor_scale)
    theirs = pool.get_key_buffer(0)
    assert torch.equal(as_bytes(ours)[slots], as_bytes(theirs)[slots])


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.float32),
        Case(dtype=torch.float32, fc_norm=True),
        Case(dtype=torch.float32, input_norm=True, bias=True),
        Case(dtype=torch.float32, fc=False, hidden=192, target=64),
    ],
    ids=str,
)
def test_draft_kv_follows_llama_eagle3(case: Case) -> None:
    """The forward of `LlamaModel` in llama_eagle3.py up to the attention, with SGLang's layers."""
    layer, step = make_layer(case), make_step(case, 5)

    def norm(weight: torch.Tensor) -> RMSNorm:
        module = RMSNorm(weight.shape[0], eps=layer.rms_norm_eps)
        module.weight.data = weight
        return module

    hidden = step["aux_hidden_states"]
    embeds = layer.embed_tokens[step["next_token_ids"]]
    if hidden.shape[-1] != embeds.shape[-1]:
        if layer.input_norm is not None:
            hidden = norm(layer.input_norm).forward_native(hidden)
        if layer.fc_norm is not None:
            chunks = hidden.chunk(layer.num_aux_hidden_states, dim=-1)
            normed = [norm(w).forward_native(x) for w, x in zip(layer.fc_norm, chunks, strict=True)]
            hidden = torch.cat(normed, dim=-1)
        hidden = torch.nn.functional.linear(hidden, layer.fc, layer.fc_bias)
    hidden = norm(layer.hidden_norm).forward_native(hidden)
    embeds = norm(layer.input_layernorm).forward_native(embeds)
    qkv_input = torch.cat([embeds, hidden], dim=-1)
    kv = torch.nn.functional.linear(qkv_input, layer.kv_proj, layer.kv_bias)
    k, v = kv.chunk(2, dim=-1)
    rope = get_rope(
        case.head_dim,
        rotary_dim=case.head_dim,
        max_position=layer.cos_sin_cache.shape[0],
        base=10000,
        is_neox_style=case.neox,
        dtype=torch.float32,
    )
    k = rope.forward_native(step["seq_lens"], k.clone(), k.clone())[1]

    reference.write_draft_kv(
        layer=layer,
        aux_hidden_states=step["aux_hidden_states"],
        token_ids=step["next_token_ids"],
        positions=step["seq_lens"],
        out_cache_loc=step["out_cache_loc"],
        k_buffer=step["k_buffer"],
        v_buffer=step["v_buffer"],
    )
    slots = step["out_cache_loc"]
    for name, theirs in (("k_buffer", k), ("v_buffer", v)):
        ours = step[name][slots].flatten(1)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
