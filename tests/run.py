"""All tests, on a fresh machine: makes an environment for each SGLang release and runs them there.

    python3 tests/run.py [--sglang 0.5.23] [pytest arguments]

The first run installs three environments (about 70 s each on a CPU). Without a GPU, GPU tests are
skipped with a reason, Triton kernels run in Triton's interpreter and `integration/demo/standin`
takes the place of sgl_kernel. Standard library only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration" / "demo"))

from environment import VERSIONS, Environment, SetupError, create  # noqa: E402

ON_EVERY_RELEASE = (
    "tests/test_server.py",
    "tests/test_flags_in_sglang.py",
    "tests/test_check.py",
    "tests/test_real_server.py",
    "tests/test_standin.py",
)


def run(environment: Environment, *arguments: str) -> int:
    """Run a module of the environment's Python in the repository's root."""
    command = [str(environment.python), "-m", *arguments]
    print(f"--- SGLang {environment.version}: {' '.join(command[1:])}", flush=True)
    env = environment.env()
    if environment.device == "cpu":
        env["TRITON_INTERPRET"] = "1"  # SGLang's paged allocator has Triton kernels too
    return subprocess.run(command, cwd=ROOT, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang", choices=VERSIONS, help="only this release (default: all)")
    options, pytest_arguments = parser.parse_known_args()
    versions = [options.sglang] if options.sglang else list(VERSIONS)
    failed = []
    for version in versions:
        first = version == versions[0]
        try:
            environment = create(version)
        except SetupError as error:
            print(f"SGLang {version}: {error}", file=sys.stderr)
            return 2
        if first and (
            run(environment, "ruff", "check", ".")
            or run(environment, "ruff", "format", "--check", ".")
        ):
            failed.append("ruff")
        paths = [] if first else [path for path in ON_EVERY_RELEASE if (ROOT / path).exists()]
        if run(environment, "pytest", *paths, *pytest_arguments):
            failed.append(f"pytest on SGLang {version}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
