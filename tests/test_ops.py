"""The op boundary: schemas, fakes, and errors that name what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_step_cases import Case, make_layer, make_step
from fused_fallback.bindings import ops

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def step_operands(step: dict[str, Any]) -> tuple[Any, ...]:
    aux = step["aux_hidden_states"]
    return (
        *ops._flatten(step["layer"]),
        [aux] if isinstance(aux, torch.Tensor) else aux,
        *(step[n] for n in ("next_token_ids", "seq_lens", "req_pool_indices", "out_cache_loc")),
        *(step[n] for n in ("kept_hidden_states", "bonus_tokens", "new_seq_lens")),
        *(step["k_buffer"], step["v_buffer"], None, None, None, "torch"),
    )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "parts"])
def test_opcheck_fused_draft_step(packed: bool) -> None:
    step = make_step(Case(fc_norm=True), 3, device=DEVICE, packed=packed)
    torch.library.opcheck(torch.ops.fused_fallback.fused_draft_step.default, step_operands(step))


def test_opcheck_stages() -> None:
    step = make_step(Case(), 3, device=DEVICE)
    library = torch.ops.fused_fallback
    torch.library.opcheck(
        library.capture_aux_hidden_states.default,
        (
            [step["aux_hidden_states"]],
            step["req_pool_indices"],
            step["kept_hidden_states"],
            None,
            "torch",
        ),
    )
    names = ("next_token_ids", "seq_lens", "bonus_tokens", "new_seq_lens")
    torch.library.opcheck(
        library.build_draft_input.default, (*(step[name] for name in names), "torch")
    )
    names = ("next_token_ids", "seq_lens", "out_cache_loc", "k_buffer", "v_buffer")
    torch.library.opcheck(
        library.write_draft_kv.default,
        (
            *ops._flatten(step["layer"]),
            [step["aux_hidden_states"]],
            *(step[name] for name in names),
            *(None, None, None, "torch"),
        ),
    )


def test_compiled_step_writes_what_eager_writes() -> None:
    step, again = (make_step(Case(), 3, device=DEVICE) for _ in range(2))
    ops.fused_draft_step(**step, backend="torch")
    operands = step_operands(again)

    def call(*args: Any) -> None:
        torch.ops.fused_fallback.fused_draft_step(*args)

    torch.compile(call, backend="aot_eager", fullgraph=True)(*operands)
    assert torch.equal(step["k_buffer"], again["k_buffer"])


WRONG = {
    "rows": (dict(next_token_ids=torch.zeros(4, dtype=torch.int64)), "shape [3], got [4]"),
    "float indices": (dict(seq_lens=torch.zeros(3)), "int32 or int64, got torch.float32"),
    "bonus dtype": (dict(bonus_tokens=torch.zeros(3, dtype=torch.int64)), "must be int32"),
    "lengths dtype": (
        dict(new_seq_lens=torch.zeros(3, dtype=torch.int32)),
        "new_seq_lens must be int64",
    ),
    "aux width": (dict(aux_hidden_states=torch.zeros(3, 287).bfloat16()), "[3, 288], got [3, 287]"),
    "aux dtype": (dict(aux_hidden_states=torch.zeros(3, 288)), "must be bfloat16"),
    "aux stride": (
        dict(aux_hidden_states=torch.zeros(288, 3).bfloat16().T),
        "contiguous in its last dimension",
    ),
    "aux parts": (
        dict(aux_hidden_states=[torch.zeros(3, 144).bfloat16()] * 2),
        "packed or 3 tensors",
    ),
    "kept width": (dict(kept_hidden_states=torch.zeros(8, 96).bfloat16()), "kept_hidden_states"),
    "pool heads": (dict(k_buffer=torch.zeros(300, 3, 64).bfloat16()), "k_buffer must have shape"),
    "pool dtypes": (dict(v_buffer=torch.zeros(300, 2, 64).half()), "both must be one dtype"),
    "pool stride": (
        dict(k_buffer=torch.zeros(300, 64, 2).bfloat16().transpose(1, 2)),
        "must be contiguous [head, dim]",
    ),
    "embeds": (dict(input_embeds=torch.zeros(3, 64).bfloat16()), "input_embeds must have shape"),
    "scale": (dict(k_scale=0.0), "k_scale must be a positive"),
    "tensor scale": (dict(v_scale=torch.ones(1)), "v_scale must be a positive"),
    "backend": (dict(backend="trition"), "backend must be one of"),
}
OUT_OF_RANGE = {
    "slot": (dict(out_cache_loc=torch.tensor([1, 300, 2])), "out_cache_loc must be below 300"),
    "position": (dict(seq_lens=torch.tensor([1, 97, 2])), "below 97, got values from 1 to 97"),
    "negative position": (dict(seq_lens=torch.tensor([1, -1, 2])), "from -1 to 2"),
    "token": (dict(next_token_ids=torch.tensor([61, 0, 0])), "token_ids must be below 61"),
    "request": (dict(req_pool_indices=torch.tensor([0, 8, 1])), "req_pool_indices must be below"),
}


@pytest.mark.parametrize(("change", "message"), [*WRONG.values(), *OUT_OF_RANGE.values()])
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    step = make_step(Case(), 3)
    before = step["k_buffer"].clone()
    with pytest.raises(ValueError) as error:
        ops.fused_draft_step(**{**step, **change})
    assert message in str(error.value)
    assert torch.equal(step["k_buffer"], before)


LAYERS = {
    "norm without fc": (dict(fc=None), "the aux states' width"),
    "too many aux": (dict(num_aux_hidden_states=5), "1 to 4 are supported"),
    "strided weight": (
        dict(kv_proj=torch.zeros(256, 256).bfloat16().T),
        "kv_proj must be contiguous",
    ),
    "bias size": (dict(fc_bias=torch.zeros(64).bfloat16()), "fc_bias must have shape [128]"),
    "mixed dtypes": (dict(input_layernorm=torch.zeros(128)), "input_layernorm must be bfloat16"),
    "cache dtype": (dict(cos_sin_cache=torch.zeros(97, 64).half()), "cos_sin_cache must be"),
    "odd rotary": (dict(cos_sin_cache=torch.zeros(97, 63)), "rotary_dim is 63"),
    "long rotary": (dict(cos_sin_cache=torch.zeros(97, 128)), "rotary_dim is 128"),
    "head dim": (dict(head_dim=32, num_kv_heads=4), "head_dim is 32"),
}


@pytest.mark.parametrize(("change", "reason"), LAYERS.values(), ids=list(LAYERS))
def test_can_fuse_names_what_it_lacks(change: dict[str, Any], reason: str) -> None:
    layer = replace(make_layer(Case()), **change)
    pool = torch.zeros(8, layer.num_kv_heads, layer.head_dim).bfloat16()
    found = ops.can_fuse(layer=layer, k_buffer=pool, v_buffer=pool, backend="triton")
    assert found is not None and reason in found


def test_can_fuse_takes_the_default() -> None:
    pool = torch.zeros(8, 2, 64).bfloat16()
    assert ops.can_fuse(layer=make_layer(Case()), k_buffer=pool, v_buffer=pool) is None


def test_missing_embeddings_are_named() -> None:
    step = make_step(Case(), 3)
    step["layer"] = replace(step["layer"], embed_tokens=None)
    with pytest.raises(ValueError, match="input_embeds must be given"):
        ops.fused_draft_step(**step)


def test_no_rows_is_no_work() -> None:
    step = make_step(Case(), 1)
    empty = {
        name: value[:0] if isinstance(value, torch.Tensor) and value.shape[0] == 1 else value
        for name, value in step.items()
    }
    ops.fused_draft_step(**empty)
