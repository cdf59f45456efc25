"""The weights of an EAGLE-3 draft layer that decide its K and V, under the names SGLang gives them.

Every version of the ops (plain torch, Triton, CUDA) reads this record, and none imports another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftLayer:
    """What a draft's K and V depend on besides the request: no q, o_proj, MLP, norm or lm_head.

    `H` is the draft's hidden size, `H_target` the target's. All weights share one dtype (bfloat16,
    float16, or float32 on the CPU) and one device; fc and kv_proj may be float8 (`quantize_layer`).

    Args:
        embed_tokens: [vocab, H], or None when the caller hands `input_embeds` to the ops (a
            vocabulary split over ranks needs an all-reduce that does not belong here).
        fc: [H, num_aux_hidden_states * H_target], or None where SGLang skips fc because the packed
            aux states already are H wide. Without fc there is no input_norm and no fc_norm.
        fc_bias: [H] or None.
        input_norm: [num_aux_hidden_states * H_target] or None (`norm_before_fc`).
        fc_norm: one [H_target] per aux state, or None (`fc_norm`, `use_aux_norm`).
        hidden_norm: [H].
        input_layernorm: [H], applied to the embedding.
        kv_proj: [2 * num_kv_heads * head_dim, 2 * H], the K then the V rows of
            `qkv_proj.weight`; columns take the embedding first, the hidden state second.
        kv_bias: [2 * num_kv_heads * head_dim] or None.
        cos_sin_cache: [max_position, rotary_dim], cosines then sines, float32 (SGLang on the CPU
            holds it in the weights' dtype; that is taken as well).
        is_neox_style: halves are rotated if true, neighbouring pairs if false.
        num_kv_heads: KV heads held by this rank.
        head_dim: elements of one head.
        rms_norm_eps: of every norm above.
        num_aux_hidden_states: 1 to 4.
        fc_weight_scale: [H] float32 if fc is float8_e4m3fn: its rows are to be multiplied by it.
        kv_weight_scale: [2 * num_kv_heads * head_dim] float32, likewise of kv_proj.
    """

    embed_tokens: torch.Tensor | None
    fc: torch.Tensor | None
    fc_bias: torch.Tensor | None
    input_norm: torch.Tensor | None
    fc_norm: tuple[torch.Tensor, ...] | None
    hidden_norm: torch.Tensor
    input_layernorm: torch.Tensor
    kv_proj: torch.Tensor
    kv_bias: torch.Tensor | None
    cos_sin_cache: torch.Tensor
    is_neox_style: bool
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    num_aux_hidden_states: int
    fc_weight_scale: torch.Tensor | None = None
    kv_weight_scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, norms and embeddings; of fc and kv_proj too unless they are float8."""
        return self.hidden_norm.dtype

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.hidden_norm.shape[0]

    @property
    def target_hidden_size(self) -> int:
        """H_target."""
        packed = self.hidden_size if self.fc is None else self.fc.shape[1]
        return packed // self.num_aux_hidden_states

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a K head that are rotated."""
        return self.cos_sin_cache.shape[1]
