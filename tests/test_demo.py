"""The demo: its parts and its processes always, the whole of it where FUSED_FALLBACK_DEMO=1."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from fused_fallback.integration.demo import report  # noqa: E402
from fused_fallback.integration.demo.demo import parse_args  # noqa: E402
from fused_fallback.integration.demo.environment import VERSIONS  # noqa: E402
from fused_fallback.integration.demo.load import (  # noqa: E402
    PROMPT_CHARACTERS,
    Answer,
    Phase,
    Sample,
    prompts,
    ramp,
    snippets,
)
from fused_fallback.integration.demo.servers import (  # noqa: E402
    HOST,
    LOG_LINES,
    Server,
    ServerError,
    Verifications,
    free_port,
)

DEMO = Path(__file__).parents[1] / "integration" / "demo" / "demo.py"
ANSWER = Answer(prompt=0, concurrency=1, text="pass\n", token_ids=(5, 6, 7), finish_reason="length")
BEGIN = Sample(seconds=0.0, target=1, running=1, tokens=0, verifications=Verifications(), off=False)

needs_permission = pytest.mark.skipif(
    os.environ.get("FUSED_FALLBACK_DEMO") != "1",
    reason="starts real servers for a minute or two: set FUSED_FALLBACK_DEMO=1",
)


# ---- options and load


@pytest.mark.parametrize("sglang", VERSIONS)
def test_options(sglang: str) -> None:
    options = parse_args(["--concurrency", "12", "--sglang", sglang, "--venv", "there"])
    assert (options.concurrency, options.sglang, options.venv) == (12, sglang, Path("there"))


@pytest.mark.parametrize(
    "arguments", [["--concurrency", "3"], ["--concurrency", "many"], ["--sglang", "0.5.20"]]
)
def test_options_outside_their_range(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_every_option_is_explained() -> None:
    result = subprocess.run(
        [sys.executable, DEMO, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    lines = result.stdout.splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("  --")]
    assert len(options) == 8
    for i in options:
        assert len(lines[i].split("  ")) > 2 or lines[i + 1].startswith(" " * 20), lines[i]


@pytest.mark.parametrize(
    ("peak", "phases"),
    [
        (4, [1, 2, 4, 2, 1]),
        (12, [1, 2, 4, 8, 12, 8, 4, 2, 1]),
        (16, [1, 2, 4, 8, 16, 8, 4, 2, 1]),
    ],
)
def test_ramp(peak: int, phases: list[int]) -> None:
    assert ramp(peak) == phases


def test_prompts_are_whole_lines_from_all_sources() -> None:
    source = "import os\n" + "".join(
        f"\ndef {{name}}_{i}(x):\n" + "    x = x + 1\n" * 40 for i in range(3)
    )
    texts = snippets([source.replace("{name}", name) for name in "ab"], 6)
    assert [text.split("(")[0] for text in texts] == [
        f"def {name}_{i}" for i in range(3) for name in "ab"
    ]
    assert all(len(text) <= PROMPT_CHARACTERS and text.endswith("1\n") for text in texts)
    lengths = {prompt.max_tokens for prompt in prompts([source], 3, 20)}
    assert len(lengths) == 3 and min(lengths) >= 10 and max(lengths) == 20
    with pytest.raises(ValueError, match="7 prompts are needed"):
        snippets([source], 7)


# ---- the comparison


def test_equal_answers() -> None:
    comparison = report.compare([ANSWER, replace(ANSWER, concurrency=16)], [ANSWER])
    assert comparison == report.Comparison(2, near_ties=[], differences=[], unstable=[])
    assert comparison.equal == 2


@pytest.mark.parametrize(
    "change",
    [{"text": "pass"}, {"token_ids": (5, 6)}, {"finish_reason": "stop"}, {"prompt": 1}],
)
def test_a_difference_is_found(change: dict[str, Any]) -> None:
    for likeliest in ([], [replace(ANSWER, likeliest=TIED)]):
        other = replace(ANSWER, **change)
        comparison = report.compare([ANSWER, other], [ANSWER], likeliest)
        assert len(comparison.differences) == 1 and not comparison.near_ties
        assert comparison.differences[0]["prompt"] == change.get("prompt", 0)
        assert comparison.equal == 1


TIED = (((-0.1, 5), (-3.0, 9)), ((-0.7, 6), (-0.75, 8)), ((-0.2, 7), (-2.0, 6)))


@pytest.mark.parametrize(
    ("token_ids", "excused"),
    [
        ((5, 8, 1), True),  # the second likeliest where they nearly tie, and anything after it
        ((5, 9, 7), False),  # a third token there
        ((9, 6, 7), False),  # the second likeliest, far behind
    ],
)
def test_a_near_tie_has_to_be_shown(token_ids: tuple[int, ...], excused: bool) -> None:
    other = replace(ANSWER, token_ids=token_ids, text="x", concurrency=8)
    comparison = report.compare([other], [ANSWER], [replace(ANSWER, likeliest=TIED)])
    assert (len(comparison.near_ties), len(comparison.differences)) == (excused, not excused)
    if excused:
        (tie,) = comparison.near_ties
        assert (tie["prompt"], tie["running"], tie["position"]) == (0, 8, 1)
        assert tie["margin"] == pytest.approx(0.05)
    assert not report.compare([other], [ANSWER]).near_ties


def test_a_tied_token_the_other_way_round() -> None:
    """The reference itself may have taken the second likeliest by a rounding error."""
    reference = replace(ANSWER, token_ids=(5, 8, 7), likeliest=TIED)
    comparison = report.compare([ANSWER], [replace(ANSWER, prompt=1)], [reference])
    assert len(comparison.near_ties) == 1


def test_a_reference_with_two_answers_is_named() -> None:
    other = replace(ANSWER, text="return\n")
    comparison = report.compare([ANSWER, other], [ANSWER, other, ANSWER])
    assert comparison.unstable == [0] and not comparison.differences


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps_off": 0, "flips": 0}, "never went off"),
        ({"off": True, "flips": 1}, "did not come back"),
        ({"flips": 1}, "did not come back"),
        ({"steps_on": 0}, "never on"),
    ],
)
def test_problems(change: dict[str, Any], problem: str) -> None:
    good = report.compare([ANSWER], [ANSWER])
    final = replace(BEGIN, flips=2, steps_on=9, steps_off=9)
    assert report.problems(good, final) == []
    (found,) = report.problems(good, replace(final, **change))
    assert problem in found
    bad = report.compare([replace(ANSWER, text="x")], [ANSWER])
    (found,) = report.problems(bad, final)
    assert "1 of 1 answers differ" in found
    (found,) = report.problems(report.compare([], [ANSWER]), final)
    assert "no request" in found


# ---- table, record, picture


def samples() -> list[Sample]:
    """A second on, a second off, a second on, sampled four times a second."""
    counters: list[Sample] = []
    tokens = verified = on = off = 0
    for i in range(13):
        is_off = 4 <= i < 8
        counters.append(
            Sample(
                seconds=i / 4,
                target=8 if is_off else 1,
                running=8 if is_off else 1,
                tokens=tokens,
                verifications=Verifications(verified, 2.5 * verified),
                off=is_off,
                flips=(i >= 4) + (i >= 8),
                steps_on=on,
                steps_off=off,
            )
        )
        tokens += 200 if is_off else 50
        verified, on, off = verified + 20 * (not is_off), on + 20 * (not is_off), off + 25 * is_off
    return counters


def record() -> dict[str, Any]:
    taken = samples()
    phases = [Phase(taken[begin].target, 5, taken[begin], taken[begin + 4]) for begin in (0, 4, 8)]
    return {
        **{"sglang": "0.5.23", "device": "a CPU", "threshold": 8, "resume": 4, "num_steps": 3},
        **{"answers": 15, "answers_equal": 15, "flips": 2, "differences": [], "failures": []},
        **{"near_ties": [], "dtype": "bfloat16"},
        "prompts_with_two_reference_answers": [],
        "phases": report.summarise(phases, phases),
        "samples": report.rates(taken),
    }


def test_phases_and_table() -> None:
    on, off, again = record()["phases"]
    assert on["accept_length"] == again["accept_length"] == 2.5
    assert off["accept_length"] is None
    assert [row["share_off"] for row in (on, off, again)] == [0, 1, 0]
    assert (off["steps_on"], off["steps_off"]) == (0, 100)
    assert on["tokens_per_second"] == pytest.approx(200)
    assert off["tokens_per_second_without_speculation"] == pytest.approx(800)
    lines = report.table([on, off, again]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["8", "5", "800", "800", "100%", "-", "0", "100"]


def test_status_names_the_mode() -> None:
    taken = samples()
    assert "speculating" in report.status(taken[3], taken[0])
    assert "accept length 2.50" in report.status(taken[3], taken[0])
    off = report.status(taken[6], taken[2])
    assert "| off " in off and "accept length    -" in off and "1 flips" in off
    plain = report.status(replace(taken[3], off=None), replace(taken[0], off=None))
    assert "no speculation" in plain and "flips" not in plain


def test_no_accept_length_while_off() -> None:
    rates = report.rates(samples())
    assert [sample["accept_length"] is None for sample in rates] == [
        i == 0 or 4 <= i <= 8
        for i in range(13)  # at 8 the last second holds no verify step yet
    ]


def test_periods() -> None:
    parts = report.periods(record()["samples"])
    assert [(part[0]["off"], part[0]["seconds"], part[-1]["seconds"]) for part in parts] == [
        (False, 0.0, 1.0),
        (True, 1.0, 2.0),
        (False, 2.0, 3.0),
    ]


def test_record_and_picture_are_written(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    report.write(record(), tmp_path)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["phases"][0]["tokens_per_second"] == 200
    assert [sample["off"] for sample in written["samples"]].count(True) == 4
    pixels = image.imread(tmp_path / "demo.png")
    assert pixels.shape[:2] == (1200, 1500)
    shade = [int(report.SHADE[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    columns = (abs(pixels[..., :3] - shade).max(-1) < 0.01).sum(0).nonzero()[0]
    # The middle second of three is shaded, about a third of the axes.
    assert 300 < columns.min() and columns.max() < 1200
    assert 350 < columns.max() - columns.min() < 550


def test_verdict() -> None:
    assert report.verdict(record()).splitlines() == [
        "15 of 15 answers equal those of the server without speculation; 2 flips",
        "passed",
    ]
    ties = [{"prompt": 1, "running": 8, "position": 4, "margin": m} for m in (0.01, 0.0625)]
    assert report.verdict(record() | {"near_ties": ties, "answers_equal": 13}).splitlines()[:2] == [
        "13 of 15 answers equal those of the server without speculation; 2 flips",
        "2 leave them where the two likeliest tokens nearly tie in bfloat16: "
        "log probabilities at most 0.062 apart, 0.125 allowed",
    ]
    difference = {"prompt": 3, "running": 8, "answer": "x", "expected": ["y"]}
    bad = record() | {"differences": [difference], "failures": ["an answer differs"]}
    text = report.verdict(bad)
    assert "prompt 3, sent with 8 running" in text and "expected 'y'" in text
    assert text.endswith("FAILED: an answer differs")


# ---- servers and signals


def test_verifications_are_read_from_the_log(tmp_path: Path) -> None:
    head = "[2026-12-01 03:50:34] Decode batch, #running-req: {}, #token: 16, token usage: 0.00, "
    line = head + "accept len: {}, accept rate: 1.00, cpu graph: False, gen throughput: 1.4\n"
    server = Server([], env={}, log=tmp_path / "log", timeout=1)
    with server.log.open("w") as log:
        log.write(line.format(1, "4.00") + "a prefill\n" + line.format(4, "2.50")[:60])
        log.flush()
        assert server.verifications() == Verifications(1, 4.0)
        off = line.format(16, "0.00").replace("accept len: 0.00, accept rate: 1.00, ", "")
        log.write(line.format(4, "2.50")[60:] + off)
        log.flush()
        assert server.verifications() == Verifications(5, 14.0)
    assert server.verifications() == Verifications(5, 14.0)


async def start(server: Server) -> None:
    async with aiohttp.ClientSession() as session, server:
        await server.wait_until_ready(session)


def python(program: str, log: Path, timeout: float = 20) -> Server:
    """A program in place of SGLang; the server's arguments follow as its own."""
    return Server([sys.executable, "-c", program], env=dict(os.environ), log=log, timeout=timeout)


def test_a_server_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    program = "for i in range(100): print('line', i)\nraise SystemExit('no such model')"
    with pytest.raises(ServerError) as error:
        asyncio.run(start(python(program, tmp_path / "server.log")))
    text = str(error.value)
    assert "exit code 1" in text and "no such model" in text and str(tmp_path) in text
    assert "line 99" in text and f"line {100 - LOG_LINES}\n" not in text


def test_a_server_that_never_answers_is_given_up_and_killed(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(60)"
    )
    server = python(program, tmp_path / "server.log", timeout=2)
    with pytest.raises(ServerError, match="did not answer within 2 seconds"):
        asyncio.run(start(server))
    child = int(server.log.read_text().split()[1])
    wait_for(lambda: not alive(child), "the child of the server ended")


def test_a_taken_port_is_left(tmp_path: Path) -> None:
    program = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n        self.end_headers()\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "http.server.HTTPServer((sys.argv[sys.argv.index('--host') + 1], port), Handler)"
        ".serve_forever()"
    )
    server = python(program, tmp_path / "server.log")
    taken = server.port
    blocker = subprocess.Popen(
        [sys.executable, "-c", BLOCKER, HOST, str(taken)], stdout=subprocess.PIPE
    )
    try:
        assert blocker.stdout is not None and blocker.stdout.readline()
        assert free_port() != taken
        asyncio.run(start(server))
        assert server.port != taken
    finally:
        blocker.kill()
        blocker.wait()


BLOCKER = """
import socket, sys
blocker = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("taken", flush=True)
while True:
    blocker.accept()[0].close()
"""


@pytest.fixture
def descendants() -> Iterator[Callable[[subprocess.Popen[str]], list[int]]]:
    """Process ids below a process, read from /proc, so that those of other sessions are found."""

    def find(process: subprocess.Popen[str]) -> list[int]:
        found = [process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        return found[1:]

    yield find


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_installation(
    number: signal.Signals, tmp_path: Path, descendants: Callable[..., list[int]]
) -> None:
    command = [sys.executable, DEMO, "--venv", tmp_path / "venv", "--out", tmp_path / "out"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        # The environment's maker and the maker of the virtual environment that it started.
        wait_for(lambda: len(descendants(demo)) >= 2, "the installation began")
        started = descendants(demo)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=20)
    assert demo.returncode == 128 + number
    assert f"ended by {number.name}" in output
    wait_for(lambda: not any(map(alive, started)), "the installation ended")


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


# ---- the whole


def sglang() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        pytest.skip("SGLang is not installed")


def demo_command(out: Path) -> list[str]:
    small = ["--concurrency", "8", "--max-tokens", "64", "--phase-seconds", "1.5"]
    return [
        sys.executable,
        str(DEMO),
        "--use-running",
        "--sglang",
        sglang(),
        "--out",
        str(out),
        *small,
    ]


@needs_permission
def test_demo_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        [*demo_command(tmp_path), "--keep-log"], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "\npassed\n" in result.stdout
    assert " running | speculating " in result.stdout
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["answers_equal"] == written["answers"] >= 20
    assert [phase["running"] for phase in written["phases"]] == ramp(8)
    peak = max(written["phases"], key=lambda phase: phase["running"])
    assert peak["share_off"] > 0.8 and peak["steps_off"] > 10
    assert {sample["off"] for sample in written["samples"]} == {False, True}
    for phase in (written["phases"][0], written["phases"][-1]):
        assert phase["share_off"] == 0 and phase["accept_length"] > 2
    for key in ("device", "sglang", "torch", "python", "commit", "date"):
        assert key in written
    for name in ("demo.png", "server-plain.log", "server-fused.log"):
        assert (tmp_path / name).stat().st_size > 1000


@needs_permission
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_starting_server(
    number: signal.Signals, tmp_path: Path, descendants: Callable[..., list[int]]
) -> None:
    with subprocess.Popen(
        demo_command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as demo:
        # `sglang serve`, its resource tracker, scheduler and detokenizer.
        wait_for(lambda: len(descendants(demo)) >= 4, "the server's processes began", 120)
        started = descendants(demo)
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 128 + number
    assert f"ended by {number.name}" in errors
    wait_for(lambda: not any(map(alive, started)), "the server ended")
