"""A real `sglang.Engine` in a process of its own; `step_recorder` records its decode steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any, NamedTuple

from fused_fallback.integration.demo.servers import kill_group

STEP_RECORDER = Path(__file__).with_name("step_recorder")
TIMEOUT_S = 400.0  # of a start, in which kernels may be compiled, and of an order


class Step(NamedTuple):
    """A decode step of one request: `position` output tokens before it, `accept` more after."""

    position: int
    accept: int
    off: bool


@dataclass(frozen=True)
class Answer:
    """What one request returned.

    Args:
        rid: SGLang's name for it.
        tokens: the output.
        tops: by position, the two likeliest tokens as (log probability, token), where asked for.
    """

    rid: str
    tokens: list[int]
    tops: list[list[tuple[float, int]]]


class Engine:
    """A server that starts at once and in the background.

    Args:
        folder: gets its log and the record of its steps.
        env: further environment variables.
        arguments: `ServerArgs` by name, the fused fallback's among them.
    """

    def __init__(
        self, folder: Path, *, env: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        folder.mkdir()
        self.log_file, self._steps = folder / "log", folder / "steps"
        self._steps.touch()
        path = os.pathsep.join([str(STEP_RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._began, self.start_s = time.monotonic(), 0.0
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log_file.open("w"),
            text=True,
            env=os.environ | (env or {}) | {"PYTHONPATH": path, "STEP_RECORD": str(self._steps)},
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Return once it takes requests.

        Raises:
            RuntimeError: it ended or is late; the text holds the end of its log.
        """
        if not self.start_s:
            self._read()
            self.start_s = time.monotonic() - self._began

    def generate(
        self, prompts: Sequence[list[int]], lengths: Sequence[int], *, tops: bool = False
    ) -> list[Answer]:
        """Greedy answers of exactly these lengths, all requests at once.

        Raises:
            RuntimeError: the server ended or is late; the text holds the end of its log.
        """
        return [Answer(*a) for a in self._ask("generate", list(prompts), list(lengths), tops)]

    def state(self) -> dict[str, Any]:
        """`internal_states[0]` of `/server_info`."""
        return self._ask("state")

    def steps(self) -> dict[str, list[Step]]:
        """Every recorded step by request, in order."""
        steps: dict[str, list[Step]] = {}
        for line in self._steps.read_text().splitlines():
            for rid, *step in json.loads(line):
                steps.setdefault(rid, []).append(Step(*step))
        return steps

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """Kill the server with everything that it started."""
        kill_group(self._process)

    def _ask(self, *order: Any) -> Any:
        self.wait_until_ready()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as `_read` says
        return self._read()

    def _read(self) -> Any:
        answered, _, _ = select([self._process.stdout], [], [], TIMEOUT_S)
        line = self._process.stdout.readline() if answered else ""
        if not line:
            what = "ended" if answered else f"did not answer within {TIMEOUT_S:.0f} s"
            raise RuntimeError(f"the server {what}, see {self.log_file}:\n{self.log()[-4000:]}")
        return json.loads(line)


# ---- in the server's process


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to the standard output too
    import sglang
    from fused_fallback.integration.flags import server_args

    engine = sglang.Engine(server_args=server_args(**json.loads(sys.argv[1])))

    def generate(
        prompts: list[list[int]], lengths: list[int], tops: bool
    ) -> list[tuple[str, list[int], list[Any]]]:
        outputs = engine.generate(
            input_ids=prompts,
            sampling_params=[
                {"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths
            ],
            **({"return_logprob": True, "top_logprobs_num": 2} if tops else {}),
        )
        return [
            (
                output["meta_info"]["id"],
                output["output_ids"],
                [
                    [top[:2] for top in position]
                    for position in output["meta_info"].get("output_top_logprobs", ())
                ],
            )
            for output in outputs
        ]

    def state() -> dict[str, Any]:
        return engine.get_server_info()["internal_states"][0]

    def answer(value: Any) -> None:
        print(json.dumps(value, default=str), file=answers, flush=True)

    answer("ready")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer({"generate": generate, "state": state}[name](*arguments))
    engine.shutdown()


if __name__ == "__main__":
    main()
