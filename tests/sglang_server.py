"""Real SGLang in this process: its Scheduler and EAGLE worker, stepped by hand and recorded."""

from __future__ import annotations

import gc
import inspect
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fused_fallback.integration.flags import FallbackArguments, server_args

PAIR = Path(__file__).parents[1] / "integration" / "demo" / "pair"
SGLANG = version("sglang")
TRITON_RELEASE = SGLANG == "0.5.12.post1"
"""Runs on its Triton backend here, and has a worker for overlap and one without (spec v1)."""

SPECULATIVE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(PAIR / "draft"),
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@dataclass
class ScriptedPolicy:
    """A policy that follows a script instead of the load.

    Args:
        script: whether decode step 1, 2, ... is off.
    """

    script: Callable[[int], bool]
    arguments: FallbackArguments = field(default_factory=FallbackArguments)
    off: bool = False
    flips: int = 0
    held: int = 0
    step: int = 0

    def update(self, num_running: int) -> bool:
        self.step += 1
        off = self.script(self.step)
        self.flips += off != self.off
        self.off = off
        return off


@dataclass
class Recording:
    """What one run did.

    Args:
        tokens: output tokens of each request.
        proposals: the tree's draft tokens by (request, KV length before the step).
        accept_lens: by (request, KV length before the step), steps that speculated only.
        off_from: KV length before each request's first off step.
        off_steps: (request, KV length before the step) of every off step.
        draft_kv: K and V at positions [0, length) of each request, at its last step.
        rows_written: rows of decode steps in each write of the draft's KV.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    proposals: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    accept_lens: dict[tuple[str, int], int] = field(default_factory=dict)
    off_steps: list[tuple[str, int]] = field(default_factory=list)
    draft_kv: dict[str, torch.Tensor] = field(default_factory=dict)
    rows_written: list[int] = field(default_factory=list)

    def after_off(self, key: tuple[str, int]) -> bool:
        """Whether the request of `key` was off at a smaller length."""
        return any(rid == key[0] and length < key[1] for rid, length in self.off_steps)

    def mean_accept_len(self, *, after_off: bool = False) -> float:
        """Mean over the steps that speculated, of those after an off step if asked."""
        lens = [n for key, n in self.accept_lens.items() if not after_off or self.after_off(key)]
        return sum(lens) / len(lens)


class Server:
    """A scheduler without subprocesses.

    Args:
        speculative: EAGLE-3, or no speculation.
        script: with speculation: which decode steps are off; the fused fallback is not even
            installed where None.
        cold: leave the draft's KV unwritten while off, so that tests can see the difference.
        max_rows: rows of decode steps that are written into the draft's KV together at most.
        poison: fill the draft's KV pool with noise of this size first.
        overlap: schedule the next batch before the last one's results are processed, as on a GPU.
        options: further `ServerArgs`.
    """

    def __init__(
        self,
        *,
        speculative: bool = True,
        script: Callable[[int], bool] | None = None,
        cold: bool = False,
        max_rows: int | None = None,
        poison: float = 1.0,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        self.overlap = overlap
        self.results: deque[tuple[Any, Any]] = deque()
        self.speculative = speculative
        self.recording = Recording()
        self.fallback: Any = None
        self.unwritten: dict[str, torch.Tensor] = {}
        self.requests: list[Any] = []
        arguments = {
            "model_path": str(PAIR / "target"),
            "device": "cpu",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": not overlap,
            "mem_fraction_static": 0.2,
            "max_total_tokens": 4096,
            "max_running_requests": 8,
            "context_length": 1024,
            "log_level": "warning",
            "random_seed": 1,
            **cpu_backends(),
            **(SPECULATIVE if speculative else {}),
            **options,
        }
        if script is not None:
            arguments["speculative_fused_fallback"] = True
        with _overlap_on_a_cpu() if overlap and not TRITON_RELEASE else nullcontext():
            self.scheduler = _build_scheduler(arguments)
        if not gc.get_freeze_count():
            gc.freeze()  # SGLang collects garbage at every start, through all that it has imported
        assert self.scheduler.enable_overlap == overlap
        self.scheduler.result_queue = self.results
        if not hasattr(self.scheduler, "schedule_stream"):  # made as the event loop begins
            self.scheduler.schedule_stream = self.scheduler.device_module.Stream()
        worker = self.scheduler.draft_worker
        if not speculative:
            return
        if script is not None:
            self.fallback = worker._fused_fallback.fallback
            self.fallback.policy = ScriptedPolicy(script)
            if cold:
                _leave_cold(self.fallback)
            if max_rows or cold:
                self.fallback.writer = _writer(self.fallback, max_rows)
            self._record_writes(self.fallback.writer)
        self._record(worker)
        noise = torch.Generator().manual_seed(7)
        for buffer in self._draft_buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=noise) * poison)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Queue one greedy request; returns SGLang's `Req`."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = {"temperature": 0, "ignore_eos": True, **(sampling or {})}
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
        params.normalize(self.scheduler.tokenizer)
        values = {
            "rid": rid,
            "input_text": "",
            "input_ids": list(input_ids) if TRITON_RELEASE else array("q", input_ids),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": params,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            **options,
        }
        known = inspect.signature(TokenizedGenerateReqInput).parameters
        self.scheduler.process_input_requests(
            [TokenizedGenerateReqInput(**{k: v for k, v in values.items() if k in known})]
        )
        queues = self.scheduler.waiting_queue, self.scheduler.grammar_manager.grammar_queue
        request = next(r for queue in queues for r in queue if r.rid == rid)
        self.requests.append(request)
        return request

    def abort(self, rid: str) -> None:
        """Abort a request, as a client that hangs up does."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=rid))

    @torch.no_grad()
    def step(self, count: int = 1) -> None:
        """Run the body of SGLang's event loop `count` times, with or without overlap."""
        scheduler = self.scheduler
        for _ in range(count):
            last = scheduler.last_batch
            batch, apart = self._next_batch(last)
            wait = apart or not self.overlap
            if self.overlap and wait:
                self._process_result()
            if batch:
                result = scheduler.run_batch(batch)
                self.results.append((batch.copy() if self.overlap else batch, result))
            if (last and not wait) or (batch and not self.overlap):
                self._process_result()
            if batch and self.overlap and TRITON_RELEASE:
                scheduler.launch_batch_sample_if_needed(result)
            scheduler.last_batch = batch

    def _next_batch(self, last: Any) -> tuple[Any, bool]:
        """The batch to run, and whether the last one's results must be processed before."""
        scheduler = self.scheduler
        if TRITON_RELEASE:
            batch = scheduler.cur_batch = scheduler.get_next_batch_to_run()
            return batch, scheduler.is_disable_overlap_for_batch(batch)
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=last
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        return batch, scheduler.is_disable_overlap_for_batch(batch, last_batch=last)

    def _process_result(self) -> None:
        self.scheduler.process_batch_result(*self.results.popleft())

    def drain(self, limit: int = 1000) -> Recording:
        """Step until every request is finished; return the recording."""
        for _ in range(limit):
            if all(request.finished() for request in self.requests):
                break
            self.step()
        self.step(2)
        if self.fallback is not None:
            self.fallback.write()
        stuck = [r.rid for r in self.requests if not r.finished()]
        assert not stuck, f"requests {stuck} did not finish in {limit} steps"
        for request in self.requests:
            self.recording.tokens[request.rid] = list(request.output_ids_through_stop)
        self._assert_balanced()
        return self.recording

    def load_draft_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """As SGLang's `update_weights_from_tensor` does it in a running server."""
        self._draft_runner().model.load_weights(list(weights.items()))

    def close(self) -> None:
        """Take down SGLang's process groups so that another server can be built."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()

    def _assert_balanced(self) -> None:
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        cached = scheduler.tree_cache.evictable_size()
        total = scheduler.max_total_num_tokens
        assert free + cached == total, f"{total - free - cached} KV slots leaked"
        pool = scheduler.req_to_token_pool
        assert len(pool.free_slots) == pool.size, "rows of the request pool leaked"

    def _draft_runner(self) -> Any:
        worker = _drafter(self.scheduler.draft_worker)
        return worker.model_runner if spec_v1(worker) else worker.draft_runner

    def _draft_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._draft_runner().token_to_kv_pool
        return pool.get_key_buffer(0), pool.get_value_buffer(0)

    def _record(self, worker: Any) -> None:
        recording, drafter = self.recording, _drafter(worker)
        draft, forward = drafter.draft, worker.forward_batch_generation

        def recorded_draft(batch: Any, *args: Any, **kwargs: Any) -> Any:
            keys = [(r.rid, n) for r, n in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)]
            verify_input = draft(batch, *args, **kwargs)
            trees = verify_input.draft_token.view(len(keys), -1).tolist()
            recording.proposals.update(zip(keys, trees, strict=True))
            return verify_input

        def recorded_forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            requests = list(batch.reqs)
            keys = [(r.rid, n) for r, n in zip(requests, batch.seq_lens.tolist(), strict=True)]
            rows = batch.req_pool_indices.tolist()
            decodes = batch.forward_mode.is_decode()
            result = forward(batch, *args, **kwargs)
            if decodes and result.speculative_num_draft_tokens == 1:
                recording.off_steps.extend(keys)
            elif decodes:
                recording.accept_lens.update(zip(keys, _accept_lens(result), strict=True))
            lengths = _new_seq_lens(batch, result)
            for request, row, length in zip(requests, rows, lengths, strict=True):
                # spec v1 knows of a finish at once, and then writes no more draft KV
                if not (spec_v1(worker) and request.finished()):
                    self._record_draft_kv(request.rid, row, length)
            return result

        drafter.draft = recorded_draft
        worker.forward_batch_generation = recorded_forward

    def _record_draft_kv(self, rid: str, row: int, length: int) -> None:
        """K and V now, or as soon as the rows that wait are written: the tree keeps the slots."""
        self.unwritten[rid] = self.scheduler.req_to_token_pool.req_to_token[row, :length].long()
        if self.fallback is None or not self.fallback.writer.num_rows:
            self._read_draft_kv()

    def _read_draft_kv(self) -> None:
        for rid, slots in self.unwritten.items():
            self.recording.draft_kv[rid] = torch.stack([b[slots] for b in self._draft_buffers()])
        self.unwritten.clear()

    def _record_writes(self, writer: Any) -> None:
        write = writer.write

        def recorded_write() -> None:
            rows = writer.num_rows
            write()
            if rows:
                self.recording.rows_written.append(rows)
                self._read_draft_kv()

        writer.write = recorded_write


def spec_v1(worker: Any) -> bool:
    """Whether a worker is `EAGLEWorker`, which is itself the draft's worker."""
    return not hasattr(worker, "draft_runner") and not hasattr(worker, "draft_worker")


def _drafter(worker: Any) -> Any:
    return worker if spec_v1(worker) else worker.draft_worker


def _accept_lens(result: Any) -> list[int]:
    if result.accept_lens is None:  # spec v1
        return [count + 1 for count in result.num_correct_drafts_per_req_cpu]
    return result.accept_lens.tolist()


def _new_seq_lens(batch: Any, result: Any) -> list[int]:
    if result.next_draft_input is None:  # spec v1 advances the batch itself
        return batch.seq_lens.tolist()
    relayed = result.next_draft_input if TRITON_RELEASE else result
    return relayed.new_seq_lens.tolist()


@contextmanager
def _overlap_on_a_cpu() -> Iterator[None]:
    """SGLang switches overlap off for speculation on a CPU, but its scheduler can do it there."""
    from sglang.srt.arg_groups import speculative_hook

    torch.Tensor.record_stream = lambda *_: None  # CPU tensors have no streams to be kept for
    switch_off = speculative_hook._disable_overlap_schedule_for_cpu
    speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
    try:
        yield
    finally:
        speculative_hook._disable_overlap_schedule_for_cpu = switch_off


def _leave_cold(fallback: Any) -> None:
    from fused_fallback.integration.fallback import DraftPool

    pool = fallback.pool
    fallback.pool = DraftPool(torch.empty_like(pool.k_buffer), torch.empty_like(pool.v_buffer))


def _writer(fallback: Any, max_rows: int | None) -> Any:
    """Another one than the fallback made: of the pool that it has by now, or of smaller blocks."""
    from fused_fallback.bindings.graph import DraftKVWriter

    return DraftKVWriter(
        layer=fallback.layer,
        kept_hidden_states=fallback.kept_hidden_states,
        max_rows=max_rows or fallback.writer.max_rows,
        **fallback.pool.as_kwargs(),
    )


def cpu_backends() -> dict[str, str]:
    if TRITON_RELEASE:
        return {"attention_backend": "triton"}
    # Alone, attention_backend="intel_amx" falls back to torch_native, which EAGLE refuses.
    if SGLANG == "0.5.17":
        return {"attention_backend": "intel_amx"}
    return {"prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx"}


def _build_scheduler(arguments: dict[str, Any]) -> Any:
    record = server_args(**arguments)
    import sglang.srt.managers.scheduler as module
    from sglang.srt.server_args import PortArgs

    if SGLANG in ("0.5.12.post1", "0.5.17"):
        if TRITON_RELEASE:
            from sglang.srt.server_args import set_global_server_args_for_scheduler

            set_global_server_args_for_scheduler(record)
        else:
            module.publish(record, role="scheduler")
        ranks = {"gpu_id": 0, "tp_rank": 0, "moe_ep_rank": 0, "pp_rank": 0}
        ranks |= {"attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None}
        return module.Scheduler(record, PortArgs.init_new(record), **ranks)
    record.resolve_once()
    ranks = module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    module.publish(record, role="scheduler", ranks=ranks)
    return module.Scheduler(record, PortArgs.init_new(record))
