"""What the fused fallback does not support, said by name before any weights load."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .flags import FLAG

Setting = Callable[[str], Any]

DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle3"
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp16", "float16", "fp8_e4m3", "fp8_e5m2")

UNSUPPORTED = {
    "speculative_adaptive": "--speculative-adaptive also switches speculation: use one of the two",
    "enable_multi_layer_eagle": (
        "multi-layer EAGLE is not supported: drop --enable-multi-layer-eagle"
    ),
    "speculative_use_rejection_sampling": (
        "rejection sampling needs draft probabilities, which no off step has: "
        "drop --speculative-use-rejection-sampling"
    ),
    "speculative_draft_window_size": (
        "a sliding-window draft is not supported: drop --speculative-draft-window-size"
    ),
    "enable_dp_attention": "DP attention is not supported: drop --enable-dp-attention",
    "enable_two_batch_overlap": (
        "two-batch overlap is not supported: drop --enable-two-batch-overlap"
    ),
    "enable_pdmux": "PDMux is not supported: drop --enable-pdmux",
    "enable_lora": "LoRA is not supported: drop --enable-lora and --lora-paths",
    "lora_paths": "LoRA is not supported: drop --enable-lora and --lora-paths",
    "enable_hierarchical_cache": (
        "hierarchical cache is not supported: drop --enable-hierarchical-cache"
    ),
    "enable_unified_memory": "unified memory is not supported: drop --enable-unified-memory",
}
"""Settings that must be unset, with what to change."""


def refuse_settings(setting: Setting) -> str | None:
    """Name the first server setting that the fused fallback does not support.

    Args:
        setting: SGLang's resolved value of a `ServerArgs` field by its name, None if it has none.
    """
    algorithm = setting("speculative_algorithm")
    if algorithm != "EAGLE3":
        return f"it needs --speculative-algorithm EAGLE3, got {algorithm}"
    if setting("speculative_draft_model_path") is None:
        return "it needs --speculative-draft-model-path with an EAGLE-3 draft"
    for name, what_to_change in UNSUPPORTED.items():
        if setting(name):
            return what_to_change
    if (setting("pp_size") or 1) > 1:
        return f"pipeline parallelism is not supported: set --pp-size 1, got {setting('pp_size')}"
    mode = setting("disaggregation_mode")
    if mode not in (None, "null"):
        return f"PD disaggregation is not supported: drop --disaggregation-mode {mode}"
    dtype = setting("kv_cache_dtype")
    if dtype not in KV_CACHE_DTYPES:
        return f"--kv-cache-dtype {dtype} is not supported: use one of {', '.join(KV_CACHE_DTYPES)}"
    if setting("device") not in ("cuda", "cpu"):
        return f"--device {setting('device')} is not supported: use cuda"
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "").lower() in ("1", "true", "yes"):
        return "the head-major KV layout is not supported: unset SGLANG_USE_HND_KVCACHE"
    return None


def refuse_draft(config: Any) -> str | None:
    """Name what about the draft's `config.json` the fused fallback does not support.

    Args:
        config: the draft's Hugging Face configuration.
    """
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    if architecture != DRAFT_ARCHITECTURE:
        return f"the draft is a {architecture}: only {DRAFT_ARCHITECTURE} is supported"
    if config.num_hidden_layers != 1:
        return f"the draft has {config.num_hidden_layers} layers: only drafts of one are supported"
    for name in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (getattr(config, name, None) or {}):
            return "a draft with multimodal rotary positions (mrope) is not supported"
    return None


def warn_threshold(setting: Setting, threshold: int) -> str | None:
    """Say if the cap on running requests keeps the threshold from ever being reached."""
    cap = setting("max_running_requests")
    if cap is not None and cap < threshold:
        return (
            f"speculation will never be off: {FLAG}-threshold {threshold} is above "
            f"--max-running-requests {cap}"
        )
    return None
