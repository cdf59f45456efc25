"""What SGLang 0.5.12.post1 needs on a CPU, where it has no EAGLE path: its Triton backend there.

With TRITON_INTERPRET=1 its own index kernels run in Triton's interpreter; attention, which takes
the time, goes through torch. Both EAGLE workers then run, with and without overlap.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from .attention import _attend, _refuse_unsupported
from .cache import assign_extend_cache_locs_cpu
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

_ATTENTION = "sglang.srt.layers.attention.triton_ops"
_SPECULATIVE = "sglang.srt.speculative"


def register() -> None:
    """Registers the hooks, and fills in what this release imports on a GPU only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import eagle_utils

    for target, hook, kind in (
        (f"{_ATTENTION}.decode_attention.decode_attention_fwd", decode, HookType.REPLACE),
        (f"{_ATTENTION}.extend_attention.extend_attention_fwd", extend, HookType.REPLACE),
        (f"{_SPECULATIVE}.eagle_utils.verify_tree_greedy_func", verify, HookType.REPLACE),
        (f"{_SPECULATIVE}.eagle_info_v2.assign_extend_cache_locs_func", slots, HookType.REPLACE),
        (
            f"{_SPECULATIVE}.eagle_info.EagleDraftExtendInput.generate_attn_arg_prefill",
            prefix_only,
            HookType.AROUND,
        ),
        (
            "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
            apply_vocab_mask,
            HookType.REPLACE,
        ),
    ):
        HookRegistry.register(target, hook, kind)
    eagle_utils.sgl_build_tree_kernel_efficient = build_tree_kernel_efficient_cpu
    torch.cuda.synchronize = lambda device=None: None  # called when the draft gets its embedding
    torch.Tensor.record_stream = lambda tensor, stream: None  # CPU memory is not kept for streams


def decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    **options: Any,
) -> None:
    """`decode_attention_fwd`: row i of `q` over slots kv_indices[kv_indptr[i] : kv_indptr[i + 1]].

    q, o [rows, num_heads, head_dim]; the tensors in between are scratch of the Triton kernels.
    """
    _refuse("decode_attention_fwd", k_buffer, k_scale=k_scale, v_scale=v_scale, **options)
    starts, lengths = kv_indptr[: len(q), None].long(), kv_indptr[: len(q) + 1].diff()[:, None]
    position = torch.arange(int(lengths.max()))
    visible = position < lengths
    o.copy_(
        _attend(
            q[:, None],
            k_buffer,
            v_buffer,
            slots=kv_indices[(starts + position) * visible],
            visible=visible[:, None],
            sm_scale=sm_scale,
        )[:, 0]
    )


def extend(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float,
    **options: Any,
) -> None:
    """`extend_attention_fwd`: rows qo_indptr[i] : qo_indptr[i + 1] over a prefix and themselves.

    The prefix is kv_indices[kv_indptr[i] : kv_indptr[i + 1]] and visible to every row; among
    themselves rows see earlier ones, or what `custom_mask` says, flat [rows, prefix + rows] from
    mask_indptr[i] on.
    """
    _refuse("extend_attention_fwd", k_buffer, k_scale=k_scale, v_scale=v_scale, **options)
    if not is_causal:
        raise NotImplementedError("extend_attention_fwd: is_causal=False is not in the stand-in")
    prefixes = pairwise(kv_indptr.tolist())
    for i, ((start, end), (first, last)) in enumerate(
        zip(pairwise(qo_indptr.tolist()), prefixes, strict=False)
    ):
        rows, prefix = end - start, last - first
        visible = torch.ones(rows, prefix + rows, dtype=torch.bool).tril(prefix)
        if custom_mask is not None:
            assert mask_indptr is not None
            at = int(mask_indptr[i])
            visible[:, prefix:] = custom_mask[at : at + visible.numel()].view_as(visible)[
                :, prefix:
            ]
        keys, values = (
            torch.cat((pool[kv_indices[first:last]].to(new.dtype), new[start:end]))
            for pool, new in ((k_buffer, k_extend), (v_buffer, v_extend))
        )
        o_extend[start:end] = F.scaled_dot_product_attention(
            *(rows_.transpose(0, 1) for rows_ in (q_extend[start:end], keys, values)),
            attn_mask=visible,
            scale=sm_scale,
            enable_gqa=True,
        ).transpose(0, 1)


def _refuse(
    operator: str,
    pool: torch.Tensor,
    *,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    sliding_window_size: int = -1,
    xai_temperature_len: int = -1,
    **_scratch: Any,
) -> None:
    _refuse_unsupported(
        operator,
        pool,
        logit_cap=logit_cap,
        sinks=sinks,
        sliding_window=sliding_window_size + 1,
        xai_temperature_len=xai_temperature_len + 1,
        **{name: _scratch[name] for name in ("k_scale", "v_scale")},
    )


def verify(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`verify_tree_greedy_func`: writes and returns its first three arguments."""
    verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_predict,
    )
    return predicts, accept_index, accept_token_num


def slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: str,
) -> torch.Tensor:
    """`assign_extend_cache_locs_func`: slots of each request's `draft_token_num` positions."""
    out_cache_loc = torch.empty(batch_size * draft_token_num, dtype=torch.int64)
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        start_offset,
        end_offset,
        out_cache_loc,
        req_to_token.shape[1],
    )
    return out_cache_loc


def prefix_only(
    original: Callable[..., Any],
    draft_extend: Any,
    req_pool_indices: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    paged_kernel_lens_sum: int | None,
    req_to_token: torch.Tensor,
) -> Any:
    """`generate_attn_arg_prefill` for a kernel that takes the extended keys besides the prefix.

    The Triton backend asks for slots up to the end of the extended rows, and its kernel then
    counts those rows twice: what a draft proposes would depend on how many tokens the step before
    accepted. Other backends of this release count them once.
    """
    prefix_lens = paged_kernel_lens - draft_extend.num_accept_tokens
    return original(draft_extend, req_pool_indices, prefix_lens, None, req_to_token)


def apply_vocab_mask(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """The grammar's mask, [rows, words of 32 tokens] int32, applied to `logits` in place."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
