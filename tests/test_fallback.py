"""What the fallback does with a prefill, apart from SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_step_cases import Case, make_step
from fused_fallback.integration import fallback
from fused_fallback.integration.flags import FallbackArguments
from fused_fallback.integration.policy import FallbackPolicy


@pytest.mark.parametrize("rows_at_once", [16, 25])
def test_a_long_prefill_is_written_in_parts(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(Case(dtype=torch.float32), 50)
    last_rows, requests = torch.tensor([9, 30, 49]), [4, 0, 2]

    def prefill() -> fallback.FusedFallback:
        pool = fallback.DraftPool(step["k_buffer"].clone(), step["v_buffer"].clone())
        fused = fallback.FusedFallback(
            policy=FallbackPolicy(FallbackArguments()),
            layer=step["layer"],
            pool=pool,
            max_requests=6,
            topk=1,
        )
        fused.prefill(
            aux_hidden_states=step["aux_hidden_states"],
            token_ids=step["next_token_ids"],
            positions=step["seq_lens"],
            out_cache_loc=step["out_cache_loc"],
            last_rows=last_rows,
            next_token_ids=step["next_token_ids"][last_rows],
            req_pool_indices=torch.tensor(requests),
            requests=requests,
        )
        return fused

    whole = prefill()
    monkeypatch.setattr(fallback, "ROWS_AT_ONCE", rows_at_once)
    parts = prefill()
    assert not torch.equal(whole.pool.k_buffer, step["k_buffer"])
    for name in ("k_buffer", "v_buffer"):
        torch.testing.assert_close(getattr(parts.pool, name), getattr(whole.pool, name))
    kept = parts.kept_hidden_states
    assert torch.equal(kept[requests], step["aux_hidden_states"][last_rows])
    assert parts.pending([4, 0, 2, 1]) == [True, True, True, False]


@pytest.mark.parametrize("with_table", [True, False])
def test_warming_up_leaves_nothing(with_table: bool) -> None:
    step = make_step(Case(dtype=torch.float32), 1)
    layer = step["layer"] if with_table else replace(step["layer"], embed_tokens=None)
    pool = fallback.DraftPool(step["k_buffer"].clone(), step["v_buffer"].clone())
    fused = fallback.FusedFallback(
        policy=FallbackPolicy(FallbackArguments()), layer=layer, pool=pool, max_requests=2, topk=1
    )
    before = fused.state()
    fused.warm_up()
    assert torch.equal(pool.k_buffer, step["k_buffer"])
    assert torch.equal(pool.v_buffer, step["v_buffer"])
    assert not fused.kept_hidden_states.any() and not fused.writer.num_rows
    assert fused.state() == before and fused.pending([0, 1]) == [False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a compiler")
@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
def test_nothing_is_compiled_after_the_start(
    tokens: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    step = make_step(Case(hidden=512, target=512), 300, device="cuda")
    fused = fallback.FusedFallback(
        policy=FallbackPolicy(FallbackArguments()),
        layer=step["layer"],
        pool=fallback.DraftPool(step["k_buffer"], step["v_buffer"]),
        max_requests=300,
        topk=1,
    )
    fused.warm_up()
    fused.writer.capture()
    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for rows in (1, 5, 16, 37, 300):
        part = {name: step[name][:rows] for name in ("aux_hidden_states", "out_cache_loc")}
        indices = torch.arange(rows, device="cuda")
        part |= {"req_pool_indices": indices, "requests": list(range(rows))}
        sampled = step["next_token_ids"][:rows].to(tokens)
        for _ in range(3):
            fused.decode(next_token_ids=sampled, seq_lens=step["seq_lens"][:rows], **part)
        fused.write()
        fused.prefill(
            token_ids=step["next_token_ids"][:rows],
            positions=step["seq_lens"][:rows],
            last_rows=indices,
            next_token_ids=sampled,
            **part,
        )
    assert not compiled
