"""The serving benches: their arithmetic, their parsers, and real servers measured by them."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_fallback.profiling import (
    bench_envelope,
    bench_flip,
    envelope_report,
    nvtx,
    prompt_sets,
    trace_serving,
)
from fused_fallback.profiling.bench_envelope import Rates
from fused_fallback.profiling.serving import MODES, ServerProcess, Spec, Timing, flags
from fused_fallback.profiling.trace_serving import EAGER, GRAPH, TARGET

MODELS = ["--model-path", "target", "--draft-model-path", "draft"]


# ---- envelope


def test_rates_leave_prefill_out_of_the_time_per_token() -> None:
    """Two requests: decoding begins with the second first token, at 3 s.

    One returns a chunk before and one after that, the other nothing but its last token.
    """
    one = Timing(1.0, [(2.0, 1), (2.5, 2), (3.5, 3), (6.5, 5)])
    other = Timing(1.0, [(3.0, 1), (9.0, 4)])
    run = bench_envelope.rates([one, other])
    assert run.tok_s == pytest.approx(9 / 8.0)
    assert run.prefill_ms == pytest.approx(1e3 * 2.0)
    assert run.tpot_ms == pytest.approx(1e3 * (3.0 / 2 + 6.0 / 3) / 2)


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine slows down by half each repeat, and the ratios do not see it."""
    measured = {
        "nospec": [(100.0, 10.0), (50.0, 20.0), (25.0, 40.0)],
        "static": [(200.0, 5.0), (100.0, 10.0), (50.0, 20.0)],
        "threshold": [(196.0, 5.0), (98.0, 10.0), (49.0, 20.0)],
    }
    taken = {mode: [Rates(*run) for run in runs] for mode, runs in measured.items()}
    row = bench_envelope.row(taken, "threshold")
    assert row["tok_s"] == 98.0 and row["tok_s_spread"] == [49.0, 196.0]
    assert row["ratio_nospec"] == 1.96 and row["ratio_nospec_spread"] == [1.96, 1.96]
    assert row["ratio_static"] == row["ratio_best"] == 0.98
    assert row["tpot_ratio_nospec"] == 2.0 and row["tpot_ratio_static"] == 1.0
    assert "ratio_nospec" not in bench_envelope.row(taken, "nospec")


def test_starts_are_taken_together() -> None:
    options = bench_envelope.parse_args(["--model-path", "t", "--draft-model-path", "d"])
    starts = [
        {"nospec": [Rates(100.0, 1.0)] * 2, "off": [Rates(rate, 1.0)] * 2}
        for rate in (98.0, 99.0, 96.0)
    ]
    plain, off = bench_envelope.rows_of(options, 8, starts)
    assert off["mode"] == "off" and off["concurrency"] == 8
    assert off["ratio_nospec"] == 0.98 and off["ratio_nospec_spread"] == [0.96, 0.99]
    assert off["ratio_nospec_of_starts"] == [0.98, 0.99, 0.96]
    assert not any(name.endswith("of_starts") for name in plain)
    (alone, _) = bench_envelope.rows_of(options, 8, starts[:1])
    assert alone == {**plain, "tok_s": 100.0}


def test_requests_that_wait_for_others_do_not_run_together() -> None:
    one, two, late = (
        Timing(0.0, [(first, 1), (last, 128)])
        for first, last in ((1.0, 4.0), (2.0, 5.0), (4.5, 9.0))
    )
    assert bench_envelope.together([one, two])
    assert not bench_envelope.together([one, late])


def test_ramp() -> None:
    assert bench_envelope.ramp_steps(8) == [1, 2, 4, 8, 4, 2, 1]
    assert bench_envelope.ramp_steps(6) == [1, 2, 4, 6, 4, 2, 1]


def test_tokens_of_a_ramp_go_to_the_steps_in_which_they_came() -> None:
    """8 tokens over 4 s, of which 1 s is in the first step and 1 s after the last."""
    timings = [Timing(0.0, [(9.0, 1), (13.0, 8)]), Timing(10.0, [(10.0, 1), (11.0, 5)])]
    assert bench_envelope.step_rates([8.0, 10.0, 12.0], timings) == pytest.approx([1.0, 4.5])


@pytest.mark.parametrize(
    "wrong",
    [["--at-once", "1"], ["--prompts", "coding", "--load-format", "dummy"], ["--modes", "fast"]],
)
def test_options_that_are_refused(wrong: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        bench_envelope.parse_args([*MODELS, *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"concurrency": n, "mode": mode, "tok_s": rate * n, "tpot_ms": 1.0, **ratio}
        for n in (1, 2)
        for mode, rate, ratio in (("nospec", 9.0, {}), ("static", 8.0, {"ratio_nospec": 0.889}))
    ]
    ramp = [{**row, "ramp_step": i} for i, row in enumerate((*rows, *rows[:2]))]
    result = {"rows": rows, "ramp": ramp, "runs": [], "sglang": "0", "device": "cpu"}
    lines = envelope_report.table(rows).splitlines()
    assert lines[0].split() == ["concurrency", "mode", "tok/s", "/nospec", "ms/token"]
    assert lines[4].split() == ["2", "static", "16", "0.889", "1.000"]
    envelope_report.draw(result, tmp_path / "picture.png")
    for name in ("picture.png", "picture_ramp.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# ---- prompts


@pytest.mark.parametrize("name", prompt_sets.NAMES)
def test_every_context_ends_with_a_turn_of_the_user(name: str) -> None:
    contexts = prompt_sets.contexts(name)
    assert len(contexts) >= 12
    assert all(context[-1]["role"] == "user" for context in contexts)
    assert len({json.dumps(context) for context in contexts}) == len(contexts)


def test_agentic_contexts_grow_by_tool_results_in_json() -> None:
    contexts = prompt_sets.contexts("agentic")
    grown = [(a, b) for a, b in pairwise(contexts) if len(b) > len(a)]
    assert len(grown) >= 20
    for shorter, longer in grown:
        assert longer[: len(shorter)] == shorter
        json.loads(longer[-2]["content"])["tool"]
        json.loads(longer[-1]["content"])


def test_prompts_share_no_prefix_and_keep_their_limit() -> None:
    pytest.importorskip("transformers")
    target = str(Path(__file__).parents[1] / "integration" / "demo" / "pair" / "target")
    sets = [
        prompt_sets.text_ids("agentic", 60, most, model_path=target, seed=seed)
        for most, seed in ((1500, 1), (1500, 2), (200, 3))
    ]
    assert max(map(len, sets[0])) == 1500 and {len(ids) for ids in sets[2]} == {200}
    heads = [tuple(ids[: prompt_sets.HEAD_TOKENS]) for ids in sets[0]]
    assert not {*heads} & {tuple(ids[: prompt_sets.HEAD_TOKENS]) for ids in sets[1]}


# ---- servers


def test_modes_differ_in_what_they_should() -> None:
    spec = Spec("nospec", "target", "draft", {"page_size": 1}, threshold=7)
    arguments = {mode: replace(spec, mode=mode).server_arguments() for mode in MODES}
    flag = "speculative_fused_fallback"
    thresholds = {mode: args.get(f"{flag}_threshold") for mode, args in arguments.items()}
    assert [m for m in MODES if flag in arguments[m]] == ["on", "off", "threshold"]
    assert thresholds["off"] == 1 and thresholds["threshold"] == 7
    assert thresholds["on"] > 10**6
    assert "speculative_algorithm" not in arguments["nospec"]
    assert all(args["page_size"] == 1 for args in arguments.values())
    assert len({args["port"] for args in arguments.values()}) == len(MODES)
    warm, cold = (replace(spec, mode=f"step0_{name}") for name in ("warm", "cold"))
    assert warm.environment() == {} and len(cold.environment()) == 1
    config = json.loads(Path(arguments["step0_cold"]["speculative_adaptive_config"]).read_text())
    assert config["1"] == {"candidate_steps": [0]}
    assert all(int(size) > 10**6 for size in config.keys() - {"1"})


def test_flags() -> None:
    arguments = {"model_path": "m", "skip_it": True, "not_it": False, "bs": [1, 2], "n": 3}
    assert flags(arguments) == ["--model-path", "m", "--skip-it", "--bs", "1", "2", "--n", "3"]


@pytest.mark.parametrize(
    ("timeout_s", "env", "error"),
    [
        (0.01, {}, "nospec did not answer within 0.01 s"),
        (60.0, {"PYTHONHOME": "nowhere"}, "nospec ended, see .*\n(.*\n)*Fatal Python error"),
    ],
)
def test_a_server_that_is_late_or_ends(
    timeout_s: float, env: dict[str, str], error: str, tmp_path: Path
) -> None:
    server = ServerProcess(
        Spec("nospec", "target", "draft", env=env), tmp_path / "log", timeout_s=timeout_s
    )
    with pytest.raises(RuntimeError, match=error):
        server.order("server_info")
    with pytest.raises(RuntimeError, match="nospec ended"):
        server.order("server_info")
    server.stop()


# ---- traces


def write_trace(path: Path, *, draft_ends_late: bool = False) -> None:
    """Three steps of 100 us: a target graph of four kernels, an eager one, a draft graph."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]

    def gpu(name: str, ts: float, dur: float, stream: int, correlation: int) -> None:
        args = {"stream": stream, "correlation": correlation}
        events.append({"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args})

    for step in range(3):
        base, target, draft = 1000.0 + 100 * step, 10 * step + 1, 10 * step + 2
        for correlation in (target, draft):
            call = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": base, "dur": 1}
            events.append({**call, "args": {"correlation": correlation}})
        for i in range(4):
            gpu(f"void ns::gemm<{i}>(float*)", base + 20 * i, 20, 7, target)
        gpu("void at::native::copy_kernel(int)", base + 82, 4, 7, 10 * step + 3)
        gpu("draft_step", base + 90, 15 if draft_ends_late else 5, 9, draft)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_a_step_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    write_trace(path)
    first, second = trace_serving.steps(trace_serving.read(path))
    assert [k.source for k in first.kernels] == [TARGET] * 4 + [EAGER, GRAPH]
    assert [k.name for k in second.kernels[3:]] == ["ns::gemm<3>", "copy_kernel", "draft_step"]
    assert trace_serving.figures(first) == {
        "step_us": 100.0,
        "target_graph_us": 80.0,
        "target_busy_us": 80.0,
        "other_busy_us": 9.0,
        "other_graphs_busy_us": 5.0,
        "overlap_with_target_us": 0.0,
        "idle_us": 11.0,
        "target_kernels": 4,
        "other_kernels": 2,
    }


def test_a_draft_step_that_overlaps_the_next_target(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    write_trace(path, draft_ends_late=True)
    first, second = trace_serving.steps(trace_serving.read(path))
    assert trace_serving.figures(first)["overlap_with_target_us"] == 0.0  # none before it
    assert trace_serving.figures(second)["overlap_with_target_us"] == 5.0
    assert trace_serving.figures(second)["idle_us"] == 2.0 + 4.0


def test_a_prefill_is_what_runs_before_the_first_decode_graph(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    write_trace(path)
    decoding = trace_serving.read(path)
    assert trace_serving.prefill(decoding) == []
    first = replace(decoding[4], start=700.0)
    (step,) = trace_serving.prefill([first, *decoding])
    assert step.kernels == (first,)
    found = trace_serving.figures(step)
    assert found["step_us"] == 300.0 and found["other_busy_us"] == 4.0 and found["idle_us"] == 296.0


def test_differences_of_traces(tmp_path: Path) -> None:
    paths = tmp_path / "a.trace.json.gz", tmp_path / "b.trace.json.gz"
    write_trace(paths[0])
    write_trace(paths[1], draft_ends_late=True)
    plain, other = (trace_serving.steps(trace_serving.read(path)) for path in paths)
    (row,) = trace_serving.differences(plain, other)
    assert row == {"source": GRAPH, "name": "draft_step", "count": [1, 1], "us": [5, 15]}
    text = trace_serving.text({"nospec": plain, "off": other})
    assert "+10.0 us of kernel time" in text


@pytest.mark.parametrize(
    ("script", "arguments"), [("nsys_serving.sh", ["report", "off"]), ("ncu_draft_step.sh", [])]
)
def test_a_script_says_what_is_missing(script: str, arguments: list[str], tmp_path: Path) -> None:
    path = Path(trace_serving.__file__).with_name(script)
    ended = subprocess.run(
        ["/bin/sh", path, *arguments], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert f"{script[:4].rstrip('_')} is not installed here" in ended.stderr


# ---- flips


def test_steps_are_sorted_by_what_they_follow() -> None:
    """Two on, two off, two on again; a step beside a flip is not a normal one."""
    modes = [False, False, False, True, True, True, False, False, False]
    steps = [
        {"requests": 4, "off": off, "ms": float(i), "extend_ms": [] if off else [0.5]}
        for i, off in enumerate(modes)
    ]
    steps[6]["extend_ms"] = [0.25, 0.5]  # the catch-up, and the step's own
    kinds = bench_flip.sort(steps, 4)
    assert kinds == {
        "on": [1.0, 7.0],
        "draft_extend": [0.5, 0.5],
        "first_off": [3.0],
        "off": [4.0],
        "first_on": [6.0],
        "catch_up": [0.25],
    }
    assert bench_flip.sort([{**step, "requests": 3} for step in steps], 4) == {}
    with pytest.raises(ValueError, match="too few off, first_on"):
        bench_flip.row(kinds, 4)


def test_the_claim_of_a_flip() -> None:
    kinds = {
        kind: [value, value] for kind, value in zip(bench_flip.KINDS, range(1, 7), strict=True)
    }
    row = bench_flip.row(kinds, 8)
    assert row["first_on_over_limit_ms"] == 3 - (1 + 5)
    assert row["flips"] == 4


# ---- with real servers


def test_ranges_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """On at first, off in steps 3 to 5, and on again."""
    pytest.importorskip("sglang")
    from sglang_server import Server
    from test_server import PROMPTS, encode

    seen: list[str] = []

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"end of {name}")

    monkeypatch.setattr(nvtx, "_backend", lambda: (recorded, seen.append))
    with Server(script=lambda step: 3 <= step <= 5) as server:
        adapter = server.scheduler.draft_worker._fused_fallback
        nvtx.enable_serving(adapter)
        nvtx.enable_serving(adapter)
        server.submit("a", encode(PROMPTS["a"]), 24)
        server.drain()
    off = ["off step", "fused draft step", "end of fused draft step", "end of off step"]
    on = ["draft KV write", "end of draft KV write", "catch-up", "end of catch-up"]
    assert seen[1:] == ["flip off", *off * 3, "flip on", *on]


@pytest.fixture(scope="module")
def bench_arguments() -> list[str]:
    pytest.importorskip("sglang")
    from sglang_server import PAIR, cpu_backends

    arguments = {**cpu_backends(), "disable_cuda_graph": True, "context_length": 1024}
    if not torch.cuda.is_available():
        arguments |= {"device": "cpu", "dtype": "float32", "disable_overlap_schedule": True}
    models = ["--model-path", PAIR / "target", "--draft-model-path", PAIR / "draft"]
    options = ["--input-len", 16, "--commit", "none", "--server-args", json.dumps(arguments)]
    return [str(text) for text in (*models, *options)]


def run(bench: str, *arguments: str, out: Path) -> tuple[str, dict[str, Any]]:
    """What a bench printed and wrote."""
    ended = subprocess.run(
        [sys.executable, "-m", f"fused_fallback.profiling.{bench}", *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-1000:]
    return ended.stdout, json.loads(out.read_text())


def test_envelope_of_real_servers(bench_arguments: list[str], tmp_path: Path) -> None:
    options = ["--modes", "nospec", "off", "--concurrency", "2", "--output-len", "8"]
    printed, result = run(
        "bench_envelope",
        *bench_arguments,
        *options,
        *("--repeats", "1", "--lead-len", "32", "--at-once", "2", "--through", "serve"),
        out=tmp_path / "envelope.json",
    )
    assert result["sglang"] == version("sglang") and result["commit"] == "none"
    found = {(row["concurrency"], row["mode"]): row for row in result["rows"]}
    assert list(found) == [(2, "nospec"), (2, "off")]
    plain, off = found.values()
    assert plain["tok_s"] > 0 and plain["tpot_ms"] > 0
    low, high = off["ratio_nospec_spread"]
    assert 0 < low <= off["ratio_nospec"] <= high
    servers = result["runs"][0]["servers"]
    assert servers["nospec"]["plugin"] is None
    assert servers["off"]["plugin"].startswith("on (worker ")
    assert "off        start" in printed and "warm-up" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a trace without kernels of a GPU")
def test_a_trace_without_a_gpu_is_refused(bench_arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fused_fallback.profiling.trace_serving", *bench_arguments]
    options = ["--modes", "nospec", "--concurrency", "2", "--output-len", "16", "--steps", "4"]
    where = ["--through", "engine", "--keep", tmp_path, "--out", tmp_path / "trace.json"]
    command += [*options, *where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    (trace,) = tmp_path.rglob("*.trace.json.gz")
    assert ended.returncode == 1
    assert f"{trace} holds no whole decode step in a CUDA graph: is there a GPU?" in ended.stderr


@pytest.mark.slow
def test_flips_of_a_real_server(bench_arguments: list[str], tmp_path: Path) -> None:
    _, result = run(
        "bench_flip",
        *bench_arguments,
        *("--concurrency", "2", "--output-len", "96", "--flip-every", "4"),
        out=tmp_path / "flip.json",
    )
    (row,) = result["rows"]
    assert row["flips"] >= 8
    assert all(row[f"{kind}_ms"] > 0 for kind in bench_flip.KINDS)
    limit = row["on_ms"] + row["draft_extend_ms"]
    assert row["first_on_over_limit_ms"] == pytest.approx(row["first_on_ms"] - limit, abs=1e-3)


@pytest.mark.slow
def test_ramp_of_a_real_server(bench_arguments: list[str], tmp_path: Path) -> None:
    options = ["--modes", "threshold", "--threshold", "3", "--concurrency", "4"]
    printed, result = run(
        "bench_envelope",
        *bench_arguments,
        *(*options, "--output-len", "16", "--repeats", "0", "--lead-len", "0"),
        *("--ramps", "1", "--ramp-seconds", "3"),
        out=tmp_path / "envelope.json",
    )
    assert [row["concurrency"] for row in result["ramp"]] == [1, 2, 4, 2, 1]
    assert all(row["tok_s"] > 0 for row in result["ramp"]) and not result["rows"]
    assert re.search(r"[1-9]\d* flips so far", printed)
