"""All tests, on a fresh machine: makes an environment for each SGLang release and runs them there.

    python3 tests/run.py [--sglang 0.5.23] [--jobs N] [pytest arguments]

The first run installs three environments (about 70 s each on a CPU). Without a GPU, two releases
are tested at a time, GPU tests are skipped with a reason, Triton kernels run in Triton's
interpreter and `integration/demo/standin` takes the place of sgl_kernel. What a part prints comes
in one piece when it ends. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration" / "demo"))

from environment import VERSIONS, SetupError, create, has_cuda_gpu  # noqa: E402

ON_EVERY_RELEASE = (
    "tests/test_server.py",
    "tests/test_flags_in_sglang.py",
    "tests/test_check.py",
    "tests/test_real_server.py",
    "tests/test_standin.py",
)
ONCE = VERSIONS[0]
"""The release on which everything else is tested as well."""
PROGRESS_INTERVAL_S = 30.0
BEGAN = time.monotonic()


@dataclass
class Part:
    """Commands of one environment's Python, run one after another.

    Args:
        name: for the report.
        version: SGLang's.
        commands: modules to run, with their arguments.
    """

    name: str
    version: str
    commands: list[list[str]]
    output: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self) -> Part:
        """Make the environment and run every command; `output` and `failed` say how it went."""
        try:
            environment = create(self.version, progress=self._note)
        except SetupError as error:
            self.output.append(f"{error}\n")
            self.failed.append("installation")
            return self
        env = environment.env() | {"PYTHONUNBUFFERED": "1"}
        if environment.device == "cpu":
            env["TRITON_INTERPRET"] = "1"  # SGLang's paged allocator has Triton kernels too
        for arguments in self.commands:
            command = [str(environment.python), "-m", *arguments]
            self.output.append(f"--- {' '.join(command[1:])}\n")
            began = shown = time.monotonic()
            with subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                for line in process.stdout:
                    self.output.append(line)
                    if line.endswith("%]\n") and time.monotonic() - shown > PROGRESS_INTERVAL_S:
                        shown = time.monotonic()
                        self._note(line[line.rindex("[") :].strip())
            if process.returncode:
                self.failed.append(f"{arguments[0]} with exit code {process.returncode}")
            self._note(f"{arguments[0]} ended after {time.monotonic() - began:.0f} s")
        return self

    def _note(self, text: str) -> None:
        print(f"[{time.monotonic() - BEGAN:5.0f} s] {self.name}: {text}", flush=True)


def parts(versions: list[str], pytest_arguments: list[str]) -> list[Part]:
    """What to run, the longest first."""
    every = [path for path in ON_EVERY_RELEASE if (ROOT / path).exists()]
    found = [
        Part(f"SGLang {version}", version, [["pytest", *every, *pytest_arguments]])
        for version in reversed(versions)
    ]
    others = [f"--ignore={path}" for path in every]
    once = ONCE if ONCE in versions else versions[0]
    checks = [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    found.append(Part("the rest", once, [*checks, ["pytest", *others, *pytest_arguments]]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang", choices=VERSIONS, help="only this release (default: all)")
    jobs = 1 if has_cuda_gpu() else min(2, len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=jobs, help="parts at a time (%(default)s)")
    options, pytest_arguments = parser.parse_known_args()
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = parts([options.sglang] if options.sglang else list(VERSIONS), pytest_arguments)
        for part in as_completed([pool.submit(part.run) for part in running]):
            part = part.result()
            print(f"\n======== {part.name}\n{''.join(part.output)}", flush=True)
            failed += [f"{part.name}: {what}" for what in part.failed]
    print(f"{time.monotonic() - BEGAN:.0f} s, {'; '.join(failed) or 'all passed'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
