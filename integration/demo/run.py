"""The demo inside its environment: two servers one after the other, one load, one comparison.

`demo.py` sets the environment up and starts this as `-m fused_fallback.integration.demo.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from . import report
from .checkout import commit
from .demo import parse_args
from .environment import Environment, create
from .load import Answer, Load, Phase, Prompt, Sample, prompts, ramp
from .servers import Server, ServerError

PAIR = Path(__file__).with_name("pair")
NUM_PROMPTS = 48
NUM_STEPS = 3  # drafts of a verify step
MIN_STEPS = 4
START_TIMEOUT = 300.0  # seconds


class Display:
    """Progress lines; the line of the running stage is overwritten on a terminal.

    Args:
        began: when the demo was started, on the monotonic clock.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.overwrites = sys.stdout.isatty()
        self._shown = float("-inf")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def line(self, text: str, *, stays: bool = True) -> None:
        begin, end = ("\r\x1b[K", "\n" if stays else "") if self.overwrites else ("", "\n")
        print(f"{begin}[{self.seconds:5.1f} s] {text}", end=end, flush=True)
        if stays:
            self._shown = float("-inf")  # the next stage shows its first line at once

    def update(self, text: str, *, every: float) -> None:
        """A line that the next one overwrites on a terminal; elsewhere one each `every` seconds."""
        if self.overwrites or self.seconds - self._shown >= every:
            self._shown = self.seconds
            self.line(text, stays=False)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Show the last sample."""
        self.update(report.status(samples[-1], report.before(samples, samples[-1])), every=1)


class Demo:
    """Both servers under the same load, and what follows from their answers."""

    def __init__(self, options: argparse.Namespace, environment: Environment) -> None:
        self.options, self.environment = options, environment
        self.display = Display(options.began)
        self.phases = ramp(options.concurrency)
        self.threshold, self.resume = options.concurrency // 2, options.concurrency // 4
        self.dtype = environment.server_options().get("dtype", "bfloat16")  # else the pair's own
        self.prompts: list[Prompt] = []
        self.likeliest: list[Answer] = []
        self.stages: dict[str, float] = {}

    async def run(self) -> int:
        """Run everything that follows the install.

        Returns:
            The exit code: 0, or 1 where an answer differs (in bfloat16: but at a near tie) or
            speculation did not go off and back.

        Raises:
            ServerError: a server did not start, ended, or did not answer.
        """
        self.options.out.mkdir(parents=True, exist_ok=True)
        self.stages["install"] = self.display.seconds
        self.prompts = demo_prompts(self.options.max_tokens)
        with tempfile.TemporaryDirectory(prefix="fused-fallback-") as scratch:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                plain = await self._drive("plain", [], session, scratch)
                fused = await self._drive("fused", self._speculation(), session, scratch)
        return self._report(plain, fused)

    def _speculation(self) -> list[str]:
        return [
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(PAIR / "draft")),
            *("--speculative-num-steps", str(NUM_STEPS)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(NUM_STEPS + 1)),
            "--speculative-fused-fallback",
            *("--speculative-fused-fallback-threshold", str(self.threshold)),
            *("--speculative-fused-fallback-resume", str(self.resume)),
            *("--speculative-fused-fallback-min-steps", str(MIN_STEPS)),
        ]

    async def _drive(
        self, name: str, flags: list[str], session: aiohttp.ClientSession, scratch: str
    ) -> tuple[Load, list[Phase]]:
        """Start a server, put the load on it and stop it."""
        sglang = self.environment.python.with_name("sglang")
        command = [str(sglang), "serve", "--model-path", str(PAIR / "target")]
        what = "with the fused fallback" if flags else "without speculation"
        async with Server(
            [*command, *self.environment.server_arguments(), *flags],
            # SGLang leaves its sockets behind in the folder for temporary files.
            env={**self.environment.env(), "TMPDIR": scratch},
            log=self.options.out / f"server-{name}.log",
            timeout=START_TIMEOUT,
        ) as server:
            await server.wait_until_ready(
                session, lambda: self.display.update(f"starting sglang serve {what} ...", every=15)
            )
            self.stages[f"start {what}"] = server.seconds_to_start
            self.display.line(f"it answers at {server.url} after {server.seconds_to_start:.0f} s")
            began = self.display.seconds
            load = Load(server, session, self.prompts, self.display.samples)
            await load.ask([0], 1)  # what a first request compiles is no part of the load
            held = await load.run(self.phases, self.options.phase_seconds)
            if not flags:
                unasked = set(range(len(self.prompts))) - {a.prompt for a in load.answers}
                await load.ask(sorted(unasked), self.options.concurrency)
                if self.dtype != "float32":  # near ties decide otherwise in another batch
                    self.likeliest = await load.likeliest()
            self.stages[f"load {what}"] = self.display.seconds - began
            self.display.line(f"{len(load.answers)} answers, {load.tokens} tokens")
        return load, held

    def _report(self, plain: tuple[Load, list[Phase]], fused: tuple[Load, list[Phase]]) -> int:
        comparison = report.compare(fused[0].answers, plain[0].answers, self.likeliest)
        final = fused[1][-1].end
        failures = report.problems(comparison, final)
        record: dict[str, Any] = {
            **surroundings(),
            "threshold": self.threshold,
            "resume": self.resume,
            "min_steps": MIN_STEPS,
            "num_steps": NUM_STEPS,
            "max_tokens": self.options.max_tokens,
            "prompts": len(self.prompts),
            "phases": report.summarise(fused[1], plain[1]),
            "samples": report.rates(fused[0].samples),
            "flips": final.flips,
            "accept_length": report.accept_length(fused[0].samples[0], final),
            "dtype": self.dtype,
            "answers": comparison.answers,
            "answers_equal": comparison.equal,
            "near_ties": comparison.near_ties,
            "differences": comparison.differences,
            "prompts_with_two_reference_answers": comparison.unstable,
            "failures": failures,
            "stage_seconds": {**self.stages, "total": self.display.seconds},
        }
        report.write(record, self.options.out)
        print(f"\n{report.table(record['phases'])}\n")
        print(report.verdict(record))
        print(f"demo.json and demo.png are in {self.options.out}")
        if not (failures or self.options.keep_log):
            for name in ("plain", "fused"):
                (self.options.out / f"server-{name}.log").unlink()
        return 1 if failures else 0


def demo_prompts(max_tokens: int) -> list[Prompt]:
    """Beginnings of functions in standard library modules that the pair was not trained on."""
    from .train_pair import stdlib_modules

    return prompts(stdlib_modules()[1].values(), NUM_PROMPTS, max_tokens)


def surroundings() -> dict[str, Any]:
    """Where and with what the demo ran."""
    return {
        "device": device_name(),
        "sglang": version("sglang"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name() -> str:
    """The GPU's name, or the CPU's with its number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


async def run_until_signal(demo: Demo) -> int:
    """Run the demo; SIGINT, SIGTERM and SIGHUP cancel it, so that its servers are killed first."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await demo.run()
    except asyncio.CancelledError:
        print(
            f"\nended by {signal.Signals(received[0]).name}; nothing is left running",
            file=sys.stderr,
        )
        return 128 + received[0]
    except ServerError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def main() -> None:
    options = parse_args()
    if find_spec("matplotlib") is None:
        raise SystemExit("error: the picture needs matplotlib (pip install matplotlib)")
    environment = create(options.sglang, use_running=True)
    raise SystemExit(asyncio.run(run_until_signal(Demo(options, environment))))


if __name__ == "__main__":
    main()
