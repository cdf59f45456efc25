"""Off, catch-up and the rules between them, on real SGLang: tokens, proposals, draft KV, slots.

Each case drives one server without speculation, one that speculates and is never off (without the
plugin's flag), and one that follows a script of off steps. Tokens must equal those of the first;
proposals, accept lengths and the draft's KV those of the second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang_server import PAIR, SGLANG, SPECULATIVE, TRITON_RELEASE, Recording, Server

Script = Callable[[int], bool]

PROMPTS = {
    "a": "def read_lines(path):\n    with open(path) as file:\n",
    "b": "class Node:\n",
    "c": (
        "import os\nimport sys\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--verbose', action='store_true')\n    args = parser.parse_args("
    ),
    "d": "    def __init__(self, name, value=None):\n        self.name = name\n",
}
LENGTHS = {"a": 48, "b": 57, "c": 51, "d": 60}

SCRIPTS: dict[str, Script] = {
    "one step": lambda step: step == 6,
    "eight steps": lambda step: 4 <= step < 12,
    "every other step": lambda step: step % 2 == 0,
    "fifty steps": lambda step: 3 <= step < 53,
    "always": lambda step: True,
}


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PAIR / "target")


def encode(text: str) -> list[int]:
    """Token ids of `text` in the pair's vocabulary."""
    return _tokenizer().encode(text)


# ---- what the requests do


def one(server: Server) -> None:
    server.submit("a", encode(PROMPTS["a"]), 90)


def four(server: Server) -> None:
    for rid, text in PROMPTS.items():
        server.submit(rid, encode(text), LENGTHS[rid])


def join_and_finish(server: Server) -> None:
    server.submit("a", encode(PROMPTS["a"]), 48)
    server.submit("b", encode(PROMPTS["b"]), 8)
    server.step(9)
    server.submit("c", encode(PROMPTS["c"]), 40)
    server.step(6)
    server.submit("d", encode(PROMPTS["d"]), 30)


def chunked_prefill(server: Server) -> None:
    server.submit("a", encode(PROMPTS["a"]), 48)
    server.step(5)
    server.submit("long", encode("\n".join(PROMPTS.values()) * 3), 40)


def radix_reuse(server: Server) -> None:
    """The second wave starts from a prefix that the first decoded while off."""
    prompt = encode(PROMPTS["a"])
    server.submit("a", prompt, 40)
    server.drain()
    output = list(server.requests[0].output_ids_through_stop)
    if TRITON_RELEASE and not server.overlap:
        # its spec v1 leaves the draft KV of a request's last step unwritten, if that speculates
        output = output[: -SPECULATIVE["speculative_num_draft_tokens"]]
    server.submit("branch", prompt + output[:30] + encode("\nreturn"), 40)
    server.submit("longer", prompt + output, 30)
    server.drain()
    cached = [request.cached_tokens for request in server.requests[1:]]
    assert min(cached) >= len(prompt), f"the prefix was not reused: {cached}"


def abort(server: Server) -> None:
    four(server)
    server.step(7)
    server.abort("c")
    server.step(3)
    server.submit("again", encode(PROMPTS["c"]), 30)


def retraction(server: Server) -> None:
    for i in range(6):
        # SGLang never overcommits the pool for requests that ignore eos.
        prompt, sampling = encode(PROMPTS["abcd"[i % 4]] + "\n" * i), {"ignore_eos": False}
        server.submit(f"r{i}", prompt, 60, sampling=sampling)
    server.drain(3000)
    if server.speculative:
        retracted = sum(request.retraction_count for request in server.requests)
        assert retracted, "the pool was not small enough to retract a request"


@dataclass(frozen=True)
class Case:
    drive: Callable[[Server], None]
    options: dict[str, Any] = field(default_factory=dict)
    scripts: tuple[str, ...] = ("eight steps", "every other step", "always")
    may_end_apart: frozenset[str] = frozenset()
    """Requests whose length depends on timing: only their common beginning is compared."""


CHUNKED = {"chunked_prefill_size": 64}
OVERCOMMITTED = {"schedule_conservativeness": 0.1}
TOPK_2 = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}

CASES = {
    "one": Case(one, scripts=tuple(SCRIPTS)),
    "four": Case(four, scripts=tuple(SCRIPTS)),
    "join and finish": Case(join_and_finish),
    "chunked prefill": Case(chunked_prefill, CHUNKED),
    "radix reuse": Case(radix_reuse),
    "abort": Case(abort, may_end_apart=frozenset("c")),
    "retraction": Case(retraction, {"max_total_tokens": 384} | OVERCOMMITTED),
    "page size 16": Case(four, {"page_size": 16}),
    "page size 64": Case(join_and_finish, {"page_size": 64}),
    "page size 16, radix reuse": Case(radix_reuse, {"page_size": 16}),
    "page size 16, retraction": Case(
        retraction, {"page_size": 16, "max_total_tokens": 432} | OVERCOMMITTED
    ),
    "topk 2": Case(four, TOPK_2),
    "topk 2, radix reuse": Case(radix_reuse, TOPK_2),
}
if SGLANG not in ("0.5.12.post1", "0.5.17"):  # these switch mixed chunks off for speculation
    CASES["mixed chunks"] = Case(chunked_prefill, CHUNKED | {"enable_mixed_chunk": True})


OVERLAPPED = ["four", "join and finish", "radix reuse", "abort", "retraction", "topk 2"]
if TRITON_RELEASE:  # overlap means another worker, which takes topk 1 only
    OVERLAPPED[-1:] = ["one", "chunked prefill", "page size 16", "page size 16, radix reuse"]
CASES |= {
    f"overlap, {name}": replace(CASES[name], options=CASES[name].options | {"overlap": True})
    for name in OVERLAPPED
}
CASES = {
    name: replace(case, scripts=case.scripts[:2]) if case.options else case
    for name, case in CASES.items()
}
if SGLANG != "0.5.23":  # every case on one release, on the others what they change
    scripts = ("eight steps",) if TRITON_RELEASE else ("eight steps", "every other step")
    left_out = {"page size 64", "page size 16, radix reuse", "topk 2, radix reuse"}
    if TRITON_RELEASE:  # slow, in Triton's interpreter
        left_out |= {"page size 16, retraction", "abort", "overlap, abort", "overlap, one"}
        left_out |= {"overlap, join and finish", "overlap, page size 16, radix reuse"}
    CASES = {
        name: replace(case, scripts=scripts[-1:] if case.options else scripts)
        for name, case in CASES.items()
        if name not in left_out
    }


def run(case: str, **server: Any) -> Recording:
    """Drive a case on a server of its own."""
    with Server(**server, **CASES[case].options) as running:
        CASES[case].drive(running)
        return running.drain(3000)


def without_speculation(case: str) -> Recording:
    """Its tokens depend on what the requests do, not on page size, pool or chunks."""
    return _without_speculation(CASES[case].drive, CASES[case].options.get("overlap", False))


@cache
def _without_speculation(drive: Callable[[Server], None], overlap: bool) -> Recording:
    with Server(speculative=False, overlap=overlap) as running:
        drive(running)
        return running.drain(3000)


@cache
def never_off(case: str) -> Recording:
    return run(case)


@pytest.mark.parametrize(
    ("case", "script"), [(name, script) for name, case in CASES.items() for script in case.scripts]
)
def test_off_and_on_again_equals_never_off(case: str, script: str) -> None:
    plain, never, recording = without_speculation(case), never_off(case), run_off(case, script)
    assert recording.off_steps
    assert_same_tokens(recording, plain, CASES[case].may_end_apart)
    assert_same_tokens(never, plain, CASES[case].may_end_apart)
    assert_same_drafts(recording, never)


@cache
def run_off(case: str, script: str) -> Recording:
    return run(case, script=SCRIPTS[script])


def assert_same_tokens(recording: Recording, plain: Recording, may_end_apart: frozenset) -> None:
    assert recording.tokens.keys() == plain.tokens.keys()
    for rid, tokens in recording.tokens.items():
        expected = plain.tokens[rid]
        if rid in may_end_apart:
            length = min(len(tokens), len(expected))
            tokens, expected = tokens[:length], expected[:length]
        assert tokens == expected, f"request {rid}"


def assert_same_drafts(recording: Recording, never: Recording) -> None:
    common = recording.proposals.keys() & never.proposals.keys()
    for key in common:
        assert recording.proposals[key] == never.proposals[key], f"proposals at {key}"
    for key in recording.accept_lens.keys() & never.accept_lens.keys():
        assert recording.accept_lens[key] == never.accept_lens[key], f"accept length at {key}"
    for rid, kv in recording.draft_kv.items():
        length = min(kv.shape[1], never.draft_kv[rid].shape[1])
        torch.testing.assert_close(
            kv[:, :length], never.draft_kv[rid][:, :length], atol=1e-5, rtol=1e-5
        )


@pytest.mark.skipif(SGLANG != "0.5.23", reason="the same on every release")
@pytest.mark.parametrize("max_rows", [3, 11])
@pytest.mark.parametrize("case", ["retraction", "overlap, join and finish"])
def test_any_size_of_a_block_writes_the_same(case: str, max_rows: int) -> None:
    """Steps of more rows are written at once, others when a block is full."""
    recording = run(case, script=SCRIPTS["eight steps"], max_rows=max_rows)
    assert max(recording.rows_written, default=0) <= max_rows
    assert_same_tokens(recording, without_speculation(case), frozenset())
    assert_same_drafts(recording, never_off(case))


@pytest.mark.skipif(SGLANG != "0.5.23", reason="the same on every release")
def test_steps_of_the_same_requests_are_written_together() -> None:
    assert 32 in run_off("four", "eight steps").rows_written  # eight steps of four requests


@pytest.mark.skipif(SGLANG != "0.5.23", reason="the same on every release")
def test_off_steps_follow_an_update_of_the_weights() -> None:
    new_weights = {
        name: weight.flip(0)
        for name, weight in load_file(PAIR / "draft" / "model.safetensors").items()
        if any(part in name for part in ("fc", "k_proj", "v_proj", "hidden_norm"))
    }

    def drive(**server: Any) -> Recording:
        with Server(**server) as running:
            four(running)
            running.step(3)
            running.load_draft_weights(new_weights)
            return running.drain()

    never, off = drive(), drive(script=SCRIPTS["eight steps"])
    assert off.off_steps
    assert_same_drafts(off, never)
    with pytest.raises(AssertionError):  # the update changed what is compared
        assert_same_drafts(off, never_off("four"))


def test_proposals_after_a_flip_were_compared() -> None:
    """The equalities above are not empty: every request drafts again, at compared positions."""
    for case, script in (("four", "eight steps"), ("four", "every other step")):
        never, recording = never_off(case), run_off(case, script)
        after = {key for key in recording.proposals if recording.after_off(key)}
        assert {rid for rid, _ in after} == recording.tokens.keys()
        assert len(after & never.proposals.keys()) >= 10


def test_cold_loses_acceptance() -> None:
    """Without the KV write the same comparison fails, in the pool and in the accept length."""
    case, script = "one", "fifty steps"
    never, warm = never_off(case), run_off(case, script)
    cold = run(case, script=SCRIPTS[script], cold=True)
    assert_same_tokens(cold, without_speculation(case), frozenset())
    with pytest.raises(AssertionError):
        assert_same_drafts(cold, never)
    assert cold.mean_accept_len(after_off=True) < 0.9 * warm.mean_accept_len(after_off=True)


@pytest.mark.skipif(not TRITON_RELEASE, reason="later releases have that graph right")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_catch_up_leaves_out_the_graph_that_misreads_its_rows(overlap: bool) -> None:
    class Graphs:
        asked = 0

        def can_run(self, forward_batch: Any) -> bool:
            self.asked += 1
            return False

    with Server(script=SCRIPTS["every other step"], overlap=overlap) as server:
        worker = server.scheduler.draft_worker
        drafter = worker.draft_worker if overlap else worker
        drafter.cuda_graph_runner_for_draft_extend = graphs = Graphs()
        one(server)
        server.drain()
        statistics = server.fallback.statistics
    assert drafter.cuda_graph_runner_for_draft_extend is graphs
    questions = 2 if overlap else 1  # of a step
    assert 0 < graphs.asked <= questions * statistics.steps_on
    assert statistics.catch_ups >= 10


# ---- what a request can ask for, across flips

ACROSS_FLIPS = SCRIPTS["every other step"]
each_worker = pytest.mark.parametrize("overlap", [False, True] if TRITON_RELEASE else [False])


def logprobs(**options: Any) -> list[Any]:
    with Server(**options) as server:
        ask = {"return_logprob": True, "top_logprobs_num": 2}
        request = server.submit("a", encode(PROMPTS["a"]), 40, **ask)
        server.submit("b", encode(PROMPTS["b"]), 40, **ask)
        server.drain()
        record = getattr(request, "logprob", request)
        return [
            record.output_token_logprobs_idx[:40],
            record.output_token_logprobs_val[:40],
            record.output_top_logprobs_idx[:40],
            record.output_top_logprobs_val[:40],
        ]


@each_worker
def test_logprobs(overlap: bool) -> None:
    plain = logprobs(speculative=False, overlap=overlap)
    off = logprobs(script=ACROSS_FLIPS, overlap=overlap)
    for index, values in ((0, 1), (2, 3)):
        assert off[index] == plain[index]
        torch.testing.assert_close(
            torch.tensor(off[values]), torch.tensor(plain[values]), atol=1e-4, rtol=1e-4
        )


def hidden_states(**options: Any) -> torch.Tensor:
    with Server(enable_return_hidden_states=True, **options) as server:
        request = server.submit("a", encode(PROMPTS["a"]), 30, return_hidden_states=True)
        server.drain()
        return torch.tensor(request.hidden_states[1:30])


@pytest.mark.skipif(TRITON_RELEASE, reason="it returns one hidden state a step, not a token")
def test_return_hidden_states() -> None:
    torch.testing.assert_close(
        hidden_states(script=ACROSS_FLIPS), hidden_states(), atol=1e-4, rtol=1e-4
    )


def constrained(**options: Any) -> str:
    with Server(skip_tokenizer_init=False, **options) as server:
        pattern = r"[a-z_]{8,24} = (True|False)\n# [0-9]{12}\n"
        sampling = {"regex": pattern, "ignore_eos": False}
        request = server.submit("a", encode(PROMPTS["a"]), 60, sampling=sampling)
        server.submit("b", encode(PROMPTS["b"]), 40)
        server.drain(4000)
        text = _tokenizer().decode(list(request.output_ids_through_stop), skip_special_tokens=True)
    assert re.fullmatch(pattern, text), text
    return text


@pytest.mark.skipif(SGLANG == "0.5.17", reason="its grammar path pins memory, which needs a GPU")
@each_worker
def test_grammar(overlap: bool) -> None:
    plain = constrained(speculative=False, overlap=overlap)
    assert constrained(overlap=overlap) == plain
    assert constrained(script=ACROSS_FLIPS, overlap=overlap) == plain
    assert constrained(script=SCRIPTS["always"], overlap=overlap) == plain


def stopped(**options: Any) -> tuple[list[int], Any]:
    with Server(skip_tokenizer_init=False, **options) as server:
        sampling = {"stop": ["args.verbose = args", "never"], "ignore_eos": False}
        request = server.submit("c", encode(PROMPTS["c"]), 80, sampling=sampling)
        server.drain()
    return list(request.output_ids_through_stop), request.finished_reason.to_json()


def test_stop_strings() -> None:
    plain = stopped(speculative=False)
    assert plain[1]["type"] == "stop", "the prompt does not lead to a stop string"
    assert stopped() == plain
    assert stopped(script=ACROSS_FLIPS) == plain
    assert stopped(script=SCRIPTS["always"]) == plain


def penalized(**options: Any) -> dict[str, list[int]]:
    with Server(**options) as server:
        sampling = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
        for rid in "ad":
            server.submit(rid, encode(PROMPTS[rid]), 40, sampling=sampling)
        return server.drain().tokens


@each_worker
def test_penalties_while_off(overlap: bool) -> None:
    """Always off: verify counts one token a step only, so flips change penalized answers."""
    plain = penalized(speculative=False, overlap=overlap)
    assert plain["a"] != without_speculation("four").tokens["a"][:40]
    assert penalized(script=SCRIPTS["always"], overlap=overlap) == plain


def test_sampled_requests_finish_across_flips() -> None:
    with Server(script=ACROSS_FLIPS) as server:
        sampling = {"temperature": 0.8, "top_p": 0.9}
        for rid, text in PROMPTS.items():
            server.submit(rid, encode(text), 30, sampling=sampling)
        recording = server.drain()
    assert {len(tokens) for tokens in recording.tokens.values()} == {30}


@each_worker
def test_metrics_speak_of_speculation_alone(overlap: bool) -> None:
    with Server(script=SCRIPTS["every other step"], overlap=overlap) as server:
        request = server.submit("a", encode(PROMPTS["a"]), 60)
        recording = server.drain()
        reporter = getattr(server.scheduler, "metrics_reporter", server.scheduler)
        counted = reporter.spec_total_num_forward_ct + reporter.spec_num_forward_ct
    assert request.spec_verify_ct == len(recording.accept_lens) == counted
    assert sum(request.spec_correct_drafts_histogram) == len(recording.accept_lens)
    assert recording.off_steps


@each_worker
def test_an_interval_without_a_speculative_step_logs_no_accept_length(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = SCRIPTS["eight steps"]
    with (
        Server(script=script, decode_log_interval=1, log_level="info", overlap=overlap) as server,
        caplog.at_level(logging.INFO, "sglang"),
    ):
        server.submit("a", encode(PROMPTS["a"]), 40)
        recording = server.drain()
    lines = [r.getMessage() for r in caplog.records if "Decode batch" in r.getMessage()]
    logged = [re.search(r"accept len: ([\d.]+)", line) for line in lines]
    off = len(recording.off_steps)
    assert [match for match in logged if not match] == [None] * off
    lengths = [float(match[1]) for match in logged if match]
    assert lengths == pytest.approx(list(recording.accept_lens.values()))


def test_state_is_reported() -> None:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    with Server(script=SCRIPTS["eight steps"]) as server:
        four(server)
        server.drain()
        output = server.scheduler.get_internal_state(GetInternalStateReq())
    state = output.internal_state["fused_fallback"]
    assert state["off"] is False
    assert state["flips"] == 2
    assert state["steps_off"] == 8
    assert state["catch_ups"] == 1
