"""A real server in a process of its own, whose decode steps `step_recorder` records."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fused_fallback.profiling.serving import ServerProcess, Spec

STEP_RECORDER = Path(__file__).with_name("step_recorder")


class Step(NamedTuple):
    """A decode step of one request: `position` output tokens before it, `accept` more after."""

    position: int
    accept: int
    off: bool


class Engine(ServerProcess):
    """A server from its start to `kill`.

    Args:
        spec: of the server.
        folder: gets its log and the record of its steps.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        folder.mkdir()
        self._steps = folder / "steps"
        self._steps.touch()
        path = os.pathsep.join([str(STEP_RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = spec.env | {"PYTHONPATH": path, "STEP_RECORD": str(self._steps)}
        super().__init__(replace(spec, env=env), folder / "log", timeout_s=400.0)

    def steps(self) -> dict[str, list[Step]]:
        """Every recorded step by request, in order."""
        steps: dict[str, list[Step]] = {}
        for line in self._steps.read_text().splitlines():
            for rid, *step in json.loads(line):
                steps.setdefault(rid, []).append(Step(*step))
        return steps
