"""The flag in real server processes: `sglang serve`, `launch_server`, an engine, two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fused_fallback.integration.demo.servers import free_port
from sglang_server import PAIR, SPECULATIVE, TRITON_RELEASE, Server, cpu_backends
from test_server import PROMPTS, encode

FLAG = "--speculative-fused-fallback"
FALLBACK = (FLAG, f"{FLAG}-threshold", "3", f"{FLAG}-resume", "1", f"{FLAG}-min-steps", "2")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
START_TIMEOUT_S = 300  # with another release under test beside it


def command(program: tuple[str, ...], *extra: str) -> list[str]:
    """The command line of a small speculative server."""
    options = {
        "model_path": PAIR / "target",
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 8192,
        "context_length": 1024,
        **cpu_backends(),
        **SPECULATIVE,
    }
    flags = [text for k, v in options.items() for text in (f"--{k.replace('_', '-')}", str(v))]
    return [*program, *flags, "--disable-cuda-graph", *extra]


@contextmanager
def running(
    log: Path, program: tuple[str, ...], *extra: str, **env: str
) -> Iterator[tuple[str, Path]]:
    """A server process group that is gone when the block ends; yields its address and log."""
    port = free_port()  # below 55536: 0.5.12.post1 adds 10000 to it
    with log.open("w") as output:
        process = subprocess.Popen(
            # SGLang would look for the second one long before it takes it
            command(program, "--port", str(port), "--nccl-port", str(port + 1), *extra),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | env,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(address):
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"no server:\n{log.read_text()[-3000:]}"
            time.sleep(0.5)
        yield address, log
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except OSError:
        return False


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST of JSON where there is a body."""
    request = urllib.request.Request(
        address + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=120))


def generate(address: str, rid: str, max_new_tokens: int) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": encode(PROMPTS[rid]), "sampling_params": sampling}
    return ask(address, "/generate", body)["output_ids"]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What a server without speculation answers."""
    with Server(speculative=False) as server:
        for rid, text in PROMPTS.items():
            server.submit(rid, encode(text), 100)
        return server.drain().tokens


def check_answers_and_flips(address: str, expected: dict[str, list[int]]) -> dict[str, Any]:
    """Four requests at once, of which one outlives the others, and then one alone."""
    lengths = {"a": 60, "b": 40, "c": 100, "d": 60}
    with ThreadPoolExecutor(len(lengths)) as threads:
        answers = dict(
            zip(
                lengths,
                threads.map(lambda rid: generate(address, rid, lengths[rid]), lengths),
                strict=True,
            )
        )
    for rid, answer in answers.items():
        assert answer == expected[rid][: lengths[rid]], f"request {rid}"
    assert generate(address, "b", 50) == expected["b"][:50]
    state = ask(address, "/server_info")["internal_states"][0]["fused_fallback"]
    assert state["steps_off"] > 0
    assert state["steps_on"] > 0
    assert state["catch_ups"] > 0
    assert state["off"] is False
    return state


def lines_about_it(log: Path) -> list[str]:
    return re.findall(r"fused fallback: (?:on|off).*", log.read_text())


@pytest.mark.parametrize("worker", ["EAGLEWorker" if TRITON_RELEASE else "EAGLEWorkerV2"])
def test_sglang_serve(tmp_path: Path, expected: dict[str, list[int]], worker: str) -> None:
    overlap = () if worker == "EAGLEWorkerV2" else ("--disable-overlap-schedule",)
    with running(tmp_path / "log", SERVE, *FALLBACK, *overlap) as (address, log):
        state = check_answers_and_flips(address, expected)
    assert state["flips"] >= 2
    (line,) = lines_about_it(log)
    assert f"worker {worker}," in line
    assert "off from 3 running requests, on again at 1, at least 2 steps each" in line


@pytest.mark.skipif(TRITON_RELEASE, reason="minutes in Triton's interpreter")
def test_two_ranks_decide_alike(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    extra = (*FALLBACK, "--tp-size", "2")
    with running(tmp_path / "log", LAUNCH_SERVER, *extra, **ranks) as (address, log):
        check_answers_and_flips(address, expected)
    assert len(lines_about_it(log)) == 1


ENGINE = """
import json, sys
import sglang
from fused_fallback.integration.flags import server_args

if __name__ == "__main__":
    options, prompts = json.loads(sys.argv[1])
    engine = sglang.Engine(server_args=server_args(**options))
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    state = engine.get_server_info()["internal_states"][0]["fused_fallback"]
    print(json.dumps([[output["output_ids"] for output in outputs], state]))
    engine.shutdown()
"""


@pytest.mark.skipif(TRITON_RELEASE, reason="minutes in Triton's interpreter")
def test_engine(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    options = {
        "model_path": str(PAIR / "target"),
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "max_total_tokens": 8192,
        "nccl_port": free_port(),
        "speculative_fused_fallback": True,
        "speculative_fused_fallback_threshold": 3,
        **cpu_backends(),
        **SPECULATIVE,
    }
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    output = subprocess.run(
        [sys.executable, program, json.dumps([options, [encode(t) for t in PROMPTS.values()]])],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert output.returncode == 0, output.stderr[-3000:]
    answers, state = json.loads(output.stdout.strip().splitlines()[-1])
    assert answers == [expected[rid][:40] for rid in PROMPTS]
    assert state["steps_off"] > 0
