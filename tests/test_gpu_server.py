"""The shipped pair in real servers across flips: answers, and accept lengths after a flip.

On a GPU with CUDA graphs, in bfloat16, with each attention backend, with overlap scheduling and
without; elsewhere once, small. All servers are up at the same time. Where the environment variable
FUSED_FALLBACK_RESULTS names a folder, it gets the figures as `pair_<device>_<sglang>.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import Engine, Step
from fused_fallback.integration.demo.report import NEAR_TIE, near_tie
from fused_fallback.profiling.serving import (
    PORTS_PER_SERVER,
    Answer,
    Spec,
    provenance,
    refusal,
    result_path,
)
from sglang_server import PAIR, TRITON_RELEASE, cpu_backends
from test_server import PROMPTS, encode

ON_GPU = torch.cuda.is_available()
SETTINGS = (
    [(backend, overlap) for backend in ("fa3", "triton", "flashinfer") for overlap in (True, False)]
    if ON_GPU
    else [("cpu", not TRITON_RELEASE)]
)
"""Attention backend and overlap scheduling; the latter selects the worker on 0.5.12.post1."""
NUM_PROMPTS = 64
NUM_WAVES = 12 if ON_GPU else 1  # two flips each
OFF_FROM, ON_AGAIN = 8, 6
SHORT, LONG = range(20, 40, 2), 80  # output tokens; the long requests live through both flips
STEPS = 8  # after a flip
FIRST_PORT = 14000  # the last ones are still below those that Linux hands out to connections


@dataclass(frozen=True)
class Wave:
    """Requests sent at once: ten short ones, then those that are left when speculation is on."""

    prompts: list[list[int]]
    lengths: list[int]


@cache
def waves() -> list[Wave]:
    texts = [f"# {i}\n{PROMPTS['abcd'[i % 4]]}" for i in range(NUM_PROMPTS)]
    prompts = [encode(text) for text in texts]
    lengths = [*SHORT, *[LONG] * ON_AGAIN]
    starts = [len(lengths) * wave % NUM_PROMPTS for wave in range(NUM_WAVES)]
    return [Wave(prompts[i : i + len(lengths)], lengths) for i in starts]


def in_turn(engine: Engine) -> list[Answer]:
    tops = 2 if engine.spec.mode == "nospec" else 0
    return [
        answer
        for wave in waves()
        for answer in engine.generate(wave.prompts, wave.lengths, tops=tops)
    ]


# ---- the servers


def common_arguments(backend: str, overlap: bool) -> dict[str, Any]:
    arguments = {
        "max_running_requests": 2 * OFF_FROM,
        "max_total_tokens": 16384,
        "context_length": 1024,
        "log_level": "info",
        "disable_overlap_schedule": not overlap,
    }
    if not ON_GPU:
        small = {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
        return arguments | small | cpu_backends()
    prefill_graph = (
        "disable_piecewise_cuda_graph" if TRITON_RELEASE else "disable_prefill_cuda_graph"
    )
    return arguments | {
        "dtype": "bfloat16",
        "attention_backend": backend,
        "mem_fraction_static": 0.8,  # of what others leave; max_total_tokens is far less
        prefill_graph: True,
    }


class Servers:
    """All servers that the selected settings need, started at once; each runs the waves."""

    def __init__(self, folder: Path, settings: Sequence[tuple[str, bool]]) -> None:
        self.folder = folder
        self.engines: dict[tuple[str, str, bool], Engine] = {}
        step0 = {"1": {"candidate_steps": [3]}, str(ON_AGAIN + 1): {"candidate_steps": [0]}}
        (folder / "step0.json").write_text(json.dumps(step0))
        fallback = {
            "speculative_fused_fallback_resume": ON_AGAIN,
            "speculative_fused_fallback_min_steps": 2,
        }
        adaptive = {"speculative_adaptive_config": str(folder / "step0.json")}
        for backend, overlap in settings:
            self._start("nospec", backend, True)
            self._start("static", backend, overlap or not TRITON_RELEASE)
            self._start("threshold", backend, overlap, **fallback)
        if ON_GPU and not refusal("step0_cold"):
            self._start("step0_cold", *settings[0], **adaptive)
        waves()  # transformers is not to be imported in several threads at once
        self._threads = ThreadPoolExecutor(len(self.engines))
        self._answers: dict[tuple[str, str, bool], Future[list[Answer]]] = {
            key: self._threads.submit(in_turn, engine)
            for key, engine in self.engines.items()
            if engine.spec.mode != "static"
        }

    def answers(self, *key: Any) -> list[Answer]:
        return self._answers[key].result()

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self._threads.shutdown()

    def _start(self, mode: str, backend: str, overlap: bool, **arguments: Any) -> None:
        key = mode, backend, overlap
        if key not in self.engines:
            number = len(self.engines)
            port = FIRST_PORT + PORTS_PER_SERVER * number
            arguments |= {"port": port, "nccl_port": port + 1}
            spec = Spec(
                mode=mode,
                model_path=str(PAIR / "target"),
                draft_model_path=str(PAIR / "draft"),
                arguments=common_arguments(backend, overlap) | arguments,
                threshold=OFF_FROM,
            )
            self.engines[key] = Engine(spec, self.folder / str(number))


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    items = [item for item in request.session.items if "servers" in item.fixturenames]
    settings = dict.fromkeys(
        (item.callspec.params["backend"], item.callspec.params["overlap"]) for item in items
    )
    servers = Servers(tmp_path_factory.mktemp("servers"), list(settings))
    yield servers
    servers.stop()


# ---- what they answered


def near_ties(plain: Sequence[Answer], other: Sequence[Answer]) -> list[float]:
    """The margins at which unequal answers leave the plain server's, each by its second token.

    Raises:
        AssertionError: one leaves it where its two likeliest tokens do not nearly tie.
    """
    margins = []
    for request, (a, b) in enumerate(zip(plain, other, strict=True)):
        assert len(a.tokens) == len(b.tokens)
        if a.tokens != b.tokens:
            tie = near_tie(b.tokens, a.tokens, a.tops)
            i = next(i for i, token in enumerate(a.tokens) if token != b.tokens[i])
            assert tie, f"request {request}, position {i}: {b.tokens[i]} for {a.tops[i]}"
            margins.append(tie["margin"])
    return margins


@dataclass
class AfterFlips:
    """Accept lengths of the first steps after the way back, and those of a server never off.

    Args:
        requests: how many came back.
        accept: [requests, STEPS at most] after it.
        never_off: the same steps on a server that was given the prompt and the output up to there.
    """

    requests: int
    accept: list[list[int]]
    never_off: list[list[int]]

    def figures(self) -> dict[str, Any]:
        after, never = mean(self.accept), mean(self.never_off)
        return {
            "requests": self.requests,
            "accept_length": round(after, 4),
            "accept_length_never_off": round(never, 4),
            "ratio": round(after / never, 4),
            "first_step": round(mean([steps[:1] for steps in self.accept]), 4),
            "first_step_never_off": round(mean([steps[:1] for steps in self.never_off]), 4),
        }


def mean(steps: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, steps)) / sum(map(len, steps))


def after_flips(engine: Engine, answers: Sequence[Answer], never_off: Engine) -> AfterFlips:
    """Compare the first steps after an off step with a server that starts from the same place."""
    prompts = [prompt for wave in waves() for prompt in wave.prompts]
    steps = engine.steps()
    accept, continued = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        found = way_back(steps.get(answer.rid, []))
        if found:
            accept.append([step.accept for step in found])
            # the step's root is sampled once more, from the KV before it
            continued.append(prompt + answer.tokens[: found[0].position - 1])
    length = STEPS * 4 + 8
    again, width = [], 2 * OFF_FROM
    for i in range(0, len(continued), width):
        some = continued[i : i + width]
        again += never_off.generate(some, [length] * len(some))
    steps = never_off.steps()
    pairs = zip(again, accept, strict=True)
    return AfterFlips(
        requests=len(accept),
        accept=accept,
        never_off=[[step.accept for step in steps[a.rid][: len(own)]] for a, own in pairs],
    )


def way_back(steps: Sequence[Step]) -> list[Step]:
    """The first steps after the last off step."""
    last = max((i for i, step in enumerate(steps) if step.off), default=len(steps))
    return list(steps[last + 1 : last + 1 + STEPS])


# ---- the tests


TOPS = [[(-0.1, 5), (-3.0, 9)], [(-0.7, 6), (-0.75, 8)], [(-0.2, 7), (-2.0, 6)]]


@pytest.mark.parametrize(
    ("tokens", "margins"),
    [
        ([5, 6, 7], []),
        ([5, 8, 1], [0.05]),  # the second likeliest where they nearly tie, and anything after it
        ([5, 9, 7], None),  # a third token there
        ([9, 6, 7], None),  # the second likeliest, far behind
    ],
)
def test_an_answer_may_differ_at_a_near_tie(tokens: list[int], margins: list[float] | None) -> None:
    plain, other = Answer("a", [5, 6, 7], TOPS), Answer("b", tokens, [])
    if margins is None:
        with pytest.raises(AssertionError, match="request 0, position"):
            near_ties([plain], [other])
    else:
        assert near_ties([plain], [other]) == pytest.approx(margins)


def test_the_first_steps_after_the_last_off_step() -> None:
    modes = [False, True, False, True, True, *[False] * 10]
    steps = [Step(position, 2, off) for position, off in enumerate(modes)]
    assert [step.position for step in way_back(steps)] == list(range(5, 13))
    assert way_back(steps[:1]) == way_back(steps[:2]) == []


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The figures so far."""
    return []


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    record = {
        **provenance(os.environ.get("COMMIT")),
        "dtype": "bfloat16" if ON_GPU else "float32",
        "prompts": NUM_PROMPTS,
        "near_tie": NEAR_TIE,
        "steps_after_flip": STEPS,
        "rows": rows,
    }
    (folder / result_path("pair").name).write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "overlap"), SETTINGS)
def test_answers_and_accept_lengths_across_flips(
    servers: Servers, rows: list[dict[str, Any]], backend: str, overlap: bool
) -> None:
    """An answer in bfloat16 may leave the plain server's only where its two top logits tie."""
    plain = servers.answers("nospec", backend, True)
    answers = servers.answers("threshold", backend, overlap)
    fused = servers.engines["threshold", backend, overlap]
    never_off = servers.engines["static", backend, overlap or not TRITON_RELEASE]
    log = fused.log.read_text()
    state = fused.order("server_info")["internal_states"][0]
    fallback = state["fused_fallback"]
    margins = near_ties(plain, answers)
    figures = after_flips(fused, answers, never_off).figures()
    row = {
        "attention_backend": backend,
        "overlap": overlap,
        "worker": log.split("fused fallback: on (worker ")[1].split(",")[0],
        "answers": len(answers),
        "equal": len(answers) - len(margins),
        "margins_of_the_others": sorted(round(margin, 4) for margin in margins),
        **{name: fallback[name] for name in ("flips", "steps_off", "steps_on", "catch_ups")},
        "accept_length": state.get("avg_spec_accept_length"),
        "after_flips": figures,
        "start_s": round(fused.start_s, 1),
    }
    if ("step0_cold", backend, overlap) in servers.engines:
        cold = servers.engines["step0_cold", backend, overlap]
        cold_answers = servers.answers("step0_cold", backend, overlap)
        row["after_cold_step_0"] = after_flips(cold, cold_answers, never_off).figures()
    print(json.dumps(row))
    rows.append(row)
    if folder := os.environ.get("FUSED_FALLBACK_RESULTS"):
        write(rows, Path(folder))

    assert len(margins) <= (len(plain) // 4 if ON_GPU else 0)
    assert fallback["flips"] >= 2 * NUM_WAVES
    assert fallback["catch_ups"] >= NUM_WAVES
    assert not fallback["off"]
    assert figures["requests"] >= 5 * NUM_WAVES
    # 0.5.12.post1 with Triton attention misreads the draft's rows in every step that speculates
    assert figures["ratio"] >= (0.9 if TRITON_RELEASE and backend == "triton" else 0.99)
    if "after_cold_step_0" in row:
        assert row["after_cold_step_0"]["ratio"] < figures["ratio"]
    if ON_GPU:
        assert "graphs up to 16 requests" in log
