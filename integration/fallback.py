"""What stays between steps while speculation is off, free of SGLang.

Rules that hold after every step, whoever runs next (catch-up, prefill, radix insertion):

1. Target and draft KV are complete for positions [0, seq_len) of every request, or `write` makes
   the draft's complete.
2. Every request is either pending (its last aux hidden states are kept) or has a valid draft state.
3. Lengths come from `seq_lens` alone, slots from `req_to_token` alone; nothing is allocated in the
   KV pool.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import torch

from ..bindings.graph import MAX_ROWS, DraftKVWriter
from ..bindings.ops import capture_aux_hidden_states, fused_draft_step, write_draft_kv
from ..kernels.draft_layer import DraftLayer
from .policy import FallbackPolicy

logger = logging.getLogger(__name__)

# Rows of a prefill that are written at a time. On an H200 four times 2048 take no longer than 8192
# at once (profiling/results/draft_step_h200.json), with a quarter of the memory in between.
ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class DraftPool:
    """The draft's paged KV pool, as one layer sees it.

    Args:
        k_buffer, v_buffer: [num_slots, num_kv_heads, head_dim] in the pool's dtype.
        k_scale, v_scale: divisors applied where the pool's dtype is not the model's.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    k_scale: float | None = None
    v_scale: float | None = None

    def as_kwargs(self) -> dict[str, torch.Tensor | float | None]:
        """The arguments under which the ops take the pool."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class NextDraftInput:
    """The fields of the next `EagleDraftInput`; the last three are constant stubs.

    Args:
        bonus_tokens: [num_requests], the sampled tokens.
        topk_p: [num_requests, topk] float32 zeros.
        topk_index: [num_requests, topk] int64 zeros.
        hidden_states: [num_requests, draft hidden size] zeros in the draft's dtype.
    """

    bonus_tokens: torch.Tensor
    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden_states: torch.Tensor


@dataclass
class Statistics:
    """Counted since start."""

    steps_on: int = 0
    steps_off: int = 0
    prefills_off: int = 0
    catch_ups: int = 0


class FusedFallback:
    """Decides the mode, writes the draft's KV while off, and keeps what a catch-up needs.

    Args:
        policy: decides the mode of each decode step.
        layer: the draft layer's weights.
        pool: the draft's KV pool.
        max_requests: rows of SGLang's request pool, its dummy row included.
        topk: `speculative_eagle_topk`.
        max_rows: rows of decode steps that are written together at most.
    """

    def __init__(
        self,
        *,
        policy: FallbackPolicy,
        layer: DraftLayer,
        pool: DraftPool,
        max_requests: int,
        topk: int,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.policy = policy
        self.layer = layer
        self.pool = pool
        self.statistics = Statistics()
        weight = layer.hidden_norm
        width = layer.num_aux_hidden_states * layer.target_hidden_size
        self.kept_hidden_states = weight.new_zeros(max_requests, width)
        self.writer = DraftKVWriter(
            layer=layer,
            kept_hidden_states=self.kept_hidden_states,
            max_rows=max_rows,
            **pool.as_kwargs(),
        )
        self._pending = [False] * max_requests
        self._topk_p = weight.new_zeros(max_requests, topk, dtype=torch.float32)
        self._topk_index = weight.new_zeros(max_requests, topk, dtype=torch.int64)
        self._hidden_states = weight.new_zeros(max_requests, layer.hidden_size)

    @property
    def off(self) -> bool:
        """The mode of the last decode step, which prefill follows."""
        return self.policy.off

    def update(self, num_running: int) -> bool:
        """Advance the policy by one decode step, log a flip, and return whether the step is off."""
        flips = self.policy.flips
        off = self.policy.update(num_running)
        if self.policy.flips != flips:
            logger.info(
                "fused fallback: speculation %s at %d running requests (flip %d)",
                "off" if off else "on",
                num_running,
                self.policy.flips,
            )
        return off

    def state(self) -> dict[str, int | bool]:
        """Mode and counters, for SGLang's `/server_info`."""
        policy = self.policy
        counters = {"flips": policy.flips, "held": policy.held, **asdict(self.statistics)}
        return {"off": policy.off, **counters}

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile at the start what the first steps off would; writes into no slot."""
        weight = self.layer.hidden_norm
        nothing = weight.new_zeros(1, dtype=torch.int64)
        has_table = self.layer.embed_tokens is not None
        row = {
            "aux_hidden_states": weight.new_zeros(1, self.kept_hidden_states.shape[1]),
            "out_cache_loc": nothing - 1,
            "req_pool_indices": nothing,
            "requests": [0],
            "input_embeds": None if has_table else weight.new_zeros(1, self.layer.hidden_size),
        }
        for dtype in (torch.int32, torch.int64):  # of sampled tokens, by SGLang's sampling backend
            tokens = nothing.to(dtype)
            self.decode(next_token_ids=tokens, seq_lens=nothing, **row)
            self.prefill(
                token_ids=nothing,
                positions=nothing,
                last_rows=nothing,
                next_token_ids=tokens,
                **row,
            )
            self.write()
        self.settle([0])
        self.statistics = Statistics()

    @torch.no_grad()
    def decode(
        self,
        *,
        aux_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        requests: list[int],
        input_embeds: torch.Tensor | None = None,
    ) -> NextDraftInput:
        """Finish a decode step without speculation: one row a request.

        Args:
            aux_hidden_states: [num_requests, num_aux * H_target] of position `seq_lens`.
            next_token_ids: [num_requests], sampled there.
            seq_lens: [num_requests], KV lengths before the step.
            req_pool_indices: [num_requests], rows of the request pool.
            out_cache_loc: [num_requests], the slot of position `seq_lens`.
            requests: `req_pool_indices` as host integers.
            input_embeds: [num_requests, H] where the layer holds no embedding table.
        """
        rows = {
            "aux_hidden_states": aux_hidden_states,
            "next_token_ids": next_token_ids,
            "seq_lens": seq_lens,
            "req_pool_indices": req_pool_indices,
            "out_cache_loc": out_cache_loc,
            "input_embeds": input_embeds,
        }
        if self.writer.takes(len(requests)):
            self.writer.stage(**rows)
        else:  # so many rows have nothing to gain by waiting for more
            self.writer.write()
            fused_draft_step(
                layer=self.layer,
                kept_hidden_states=self.kept_hidden_states,
                bonus_tokens=torch.empty_like(next_token_ids, dtype=torch.int32),
                new_seq_lens=torch.empty_like(seq_lens),
                **rows,
                **self.pool.as_kwargs(),
            )
        self.statistics.steps_off += 1
        return self._pending_input(next_token_ids, requests)

    @torch.no_grad()
    def write(self) -> None:
        """Write the draft's KV of the steps that wait, before what follows on this stream."""
        self.writer.write()

    @torch.no_grad()
    def prefill(
        self,
        *,
        aux_hidden_states: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        last_rows: torch.Tensor,
        next_token_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        requests: list[int],
        input_embeds: torch.Tensor | None = None,
    ) -> NextDraftInput:
        """Write the draft's KV of a prefill while off: many rows a request.

        Args:
            aux_hidden_states: [num_tokens, num_aux * H_target].
            token_ids: [num_tokens], the token after each position.
            positions, out_cache_loc: [num_tokens].
            last_rows: [num_requests], each request's last row.
            next_token_ids: [num_requests], sampled there.
            req_pool_indices, requests: as in `decode`.
            input_embeds: [num_tokens, H] where the layer holds no embedding table.
        """
        for start in range(0, token_ids.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            write_draft_kv(
                layer=self.layer,
                aux_hidden_states=aux_hidden_states[rows],
                token_ids=token_ids[rows],
                positions=positions[rows],
                out_cache_loc=out_cache_loc[rows],
                input_embeds=None if input_embeds is None else input_embeds[rows],
                **self.pool.as_kwargs(),
            )
        capture_aux_hidden_states(
            aux_hidden_states=aux_hidden_states,
            req_pool_indices=req_pool_indices,
            kept_hidden_states=self.kept_hidden_states,
            rows=last_rows,
        )
        self.statistics.prefills_off += 1
        return self._pending_input(next_token_ids, requests)

    def pending(self, requests: list[int]) -> list[bool]:
        """Which of these requests need a catch-up before they can draft."""
        return [self._pending[i] for i in requests]

    def settle(self, requests: list[int]) -> None:
        """Note that these requests have a valid draft state."""
        for i in requests:
            self._pending[i] = False

    def is_stub(self, hidden_states: torch.Tensor | None) -> bool:
        """Whether these are the constant ones of an off step's `NextDraftInput`."""
        stub = self._hidden_states.data_ptr()
        return hidden_states is not None and hidden_states.data_ptr() == stub

    def _pending_input(self, bonus_tokens: torch.Tensor, requests: list[int]) -> NextDraftInput:
        for i in requests:
            self._pending[i] = True
        rows = slice(len(requests))
        return NextDraftInput(
            bonus_tokens=bonus_tokens,
            topk_p=self._topk_p[rows],
            topk_index=self._topk_index[rows],
            hidden_states=self._hidden_states[rows],
        )
