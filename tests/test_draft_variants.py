"""Drafts of other shapes on real SGLang: each must get the KV that SGLang's own draft writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang_server import Server
from test_server import assert_same_drafts, assert_same_tokens

VOCAB, HIDDEN, HEAD_DIM, LAYERS = 160, 128, 64, 6
TARGET_HEADS, KV_HEADS = 2, 1


def config(architecture: str, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": TARGET_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    } | more


class Weights(dict):
    """Seeded random weights by name."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, *shape: int) -> None:
        self[name] = torch.randn(*shape, generator=self.random) / shape[-1] ** 0.5

    def norm(self, name: str, size: int) -> None:
        self[name] = 1 + 0.3 * torch.randn(size, generator=self.random)

    def layer(self, prefix: str, hidden: int, qkv_in: int) -> None:
        queries, keys = TARGET_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            self.matrix(f"{prefix}.self_attn.{name}_proj.weight", rows, qkv_in)
        self.matrix(f"{prefix}.self_attn.o_proj.weight", hidden, queries)
        self.matrix(f"{prefix}.mlp.gate_proj.weight", 96, hidden)
        self.matrix(f"{prefix}.mlp.up_proj.weight", 96, hidden)
        self.matrix(f"{prefix}.mlp.down_proj.weight", hidden, 96)
        self.norm(f"{prefix}.input_layernorm.weight", hidden)
        self.norm(f"{prefix}.post_attention_layernorm.weight", hidden)

    def save(self, directory: Path, config: dict[str, Any]) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.contiguous() for name, tensor in self.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = Weights(seed=1)
    weights.matrix("model.embed_tokens.weight", VOCAB, HIDDEN)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    weights.norm("model.norm.weight", HIDDEN)
    for i in range(LAYERS):
        weights.layer(f"model.layers.{i}", HIDDEN, HIDDEN)
    directory = tmp_path_factory.mktemp("variants") / "target"
    weights.save(directory, config("LlamaForCausalLM", HIDDEN, LAYERS))
    return directory


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "both norms": {"fc_norm": True, "norm_before_fc": True},
    "bias": {"bias": True},
    "norm_output": {"norm_output": True},
    "one aux state, so no fc": {"aux_layers": [2]},
    "two aux states": {"aux_layers": [1, 3]},
    "four aux states": {"aux_layers": [0, 1, 2, 4]},
    "another hidden size": {"hidden_size": 192},
    "llama-3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def draft(directory: Path, *, aux_layers: tuple[int, ...] = (0, 2, 4), **variant: Any) -> Path:
    hidden, count = variant.get("hidden_size", HIDDEN), len(aux_layers)
    weights = Weights(seed=2)
    weights.layer("midlayer", hidden, 2 * hidden)
    weights.norm("midlayer.hidden_norm.weight", hidden)
    weights.norm("norm.weight", hidden)
    weights.matrix("embed_tokens.weight", VOCAB, hidden)
    weights.matrix("lm_head.weight", VOCAB, hidden)
    weights.matrix("fc.weight", hidden, count * HIDDEN)
    if variant.get("bias"):
        weights.matrix("fc.bias", hidden)
    if variant.get("norm_before_fc"):
        weights.norm("input_norm.weight", count * HIDDEN)
    if variant.get("fc_norm"):
        for i in range(count):
            weights.norm(f"fc_norm.{i}.weight", HIDDEN)
    more = {
        "draft_vocab_size": VOCAB,
        "target_hidden_size": HIDDEN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers)},
    }
    path = directory / "draft"
    weights.save(path, config("LlamaForCausalLMEagle3", hidden, 1, **more | variant))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_gets_sglang_s_own_draft_kv(variant: str, target: Path, tmp_path: Path) -> None:
    options = {
        "model_path": str(target),
        "speculative_draft_model_path": str(draft(tmp_path, **VARIANTS[variant])),
    }

    def run(**server: Any) -> Any:
        with Server(**options, **server) as running:
            for rid, length in (("a", 20), ("b", 5)):
                running.submit(rid, [(7 * i + length) % VOCAB for i in range(length)], 40)
            return running.drain()

    never, recording = run(), run(script=lambda step: step % 3 != 0)
    assert len(recording.off_steps) > 20
    assert_same_tokens(recording, never, frozenset())
    assert_same_drafts(recording, never)
