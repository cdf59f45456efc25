"""Attention over SGLang's slot-addressed KV pool: `torch.ops.sgl_kernel.*_attention_cpu`.

Shapes: query rows [rows, num_heads, head_dim], pools [slots, num_kv_heads, head_dim],
`req_to_token` [pool_rows, max_context] int32 (slot of each position). A batch whose requests all
have the same number of query rows (decode, verify, draft extend) is one padded call; otherwise
(prefill) requests go one by one.
"""

from importlib.metadata import version

import torch
import torch.nn.functional as F

# SGLang passes the arguments by position; 0.5.17 passes all but the two scales
_DECODE = """decode_attention_cpu(
    Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, {scales}
    Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits,
    Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap,
    bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"""
_EXTEND = """extend_attention_cpu(
    Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend,
    Tensor k_buffer, Tensor v_buffer, {scales} Tensor req_to_token, Tensor req_pool_indices,
    Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend,
    float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window,
    Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal=True) -> ()"""
_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def register() -> None:
    """Defines both operators, in the form that the installed SGLang calls."""
    scaled = not version("sglang").startswith("0.5.17")
    for schema, function, scales_at in (
        (_DECODE, decode_attention_cpu, 3),
        (_EXTEND, extend_attention_cpu, 6),
    ):
        _library.define(schema.format(scales="float k_scale, float v_scale," if scaled else ""))

        def unscaled(*args, function=function, scales_at=scales_at) -> None:
            function(*args[:scales_at], 1.0, 1.0, *args[scales_at:])

        _library.impl(function.__name__, function if scaled else unscaled, "CPU")


def decode_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One query row per request: stores `key`/`value` at `loc` if given, then writes `output`.

    Row i attends to the first `seq_lens[i]` positions of `req_to_token[req_pool_indices[i]]`, its
    own position included. `attn_logits` is scratch of the compiled operator and is left alone.
    """
    _refuse_unsupported(
        "decode_attention_cpu",
        k_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        logit_cap=logit_cap,
        is_cross_attn=is_cross_attn,
        sliding_window=sliding_window,
        sinks=sinks,
    )
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    if seq_lens.numel() == 0:
        return
    position = torch.arange(int(seq_lens.max()))
    output.copy_(
        _attend(
            query[:, None],
            k_cache,
            v_cache,
            slots=req_to_token[req_pool_indices, : position.numel()],
            visible=(position < seq_lens[:, None])[:, None],
            sm_scale=sm_scale,
        )[:, 0]
    )


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool = True,
) -> None:
    """The last `extend_seq_lens[i]` of `seq_lens[i]` positions attend; writes `o_extend`.

    Request i's query rows start at `extend_start_loc[i]`. SGLang has stored their keys and values
    in the pool before the call, so `k_extend` and `v_extend` are not read. `tree_mask`: bool, flat
    [batch, extend, extend]: which of the extended positions a row sees, instead of causality.
    """
    _refuse_unsupported(
        "extend_attention_cpu",
        k_buffer,
        k_scale=k_scale,
        v_scale=v_scale,
        logit_cap=logit_cap,
        is_cross_attn=is_cross_attn,
        sliding_window=sliding_window,
        sinks=sinks,
        not_causal=not is_causal,
    )
    lengths = extend_seq_lens.tolist()
    if len(set(lengths)) <= 1:
        groups = [list(range(len(lengths)))]
    elif tree_mask is None:
        groups = [[i] for i in range(len(lengths))]
    else:
        raise NotImplementedError(
            f"extend_attention_cpu: tree_mask with extend_seq_lens={lengths} is not in the "
            "CPU stand-in, only equal lengths"
        )
    for group in groups:
        extend = lengths[group[0]] if group else 0
        if extend == 0:
            continue
        row = torch.arange(extend)
        query_rows = extend_start_loc[group, None] + row
        position = torch.arange(int(seq_lens[group].max()))
        prefix_lens = (seq_lens[group] - extend)[:, None, None]
        if tree_mask is None:
            visible = position <= prefix_lens + row[:, None]
        else:
            tree = tree_mask.view(-1, extend, extend)
            column = (position - prefix_lens).clamp(0, extend - 1).expand(-1, extend, -1)
            visible = (position < prefix_lens) | tree.gather(2, column)
            visible &= position < prefix_lens + extend
        o_extend[query_rows] = _attend(
            q_extend[query_rows],
            k_buffer,
            v_buffer,
            slots=req_to_token[req_pool_indices[group], : position.numel()],
            visible=visible,
            sm_scale=sm_scale,
        )


def _attend(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    slots: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """query [batch, rows, heads, dim], slots [batch, keys], visible [batch, rows, keys]."""
    keys, values = (
        # index_select on flat rows is 10 times faster on a CPU than pool[slots]
        pool.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:])
        for pool in (k_pool, v_pool)
    )
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.to(query.dtype).transpose(1, 2),
        values.to(query.dtype).transpose(1, 2),
        attn_mask=visible[:, None],
        scale=sm_scale,
        enable_gqa=True,
    ).transpose(1, 2)


def _refuse_unsupported(operator: str, pool: torch.Tensor, **settings: object) -> None:
    neutral = {"k_scale": 1.0, "v_scale": 1.0, "sinks": None}
    for name, setting in settings.items():
        if setting != neutral.get(name, 0):
            raise NotImplementedError(f"{operator}: {name}={setting} is not in the CPU stand-in")
    if pool.dtype.itemsize == 1:
        raise NotImplementedError(f"{operator}: a {pool.dtype} KV pool is not in the CPU stand-in")
