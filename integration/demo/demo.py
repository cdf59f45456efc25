#!/usr/bin/env python3
"""Real SGLang with the fused fallback under a rising and falling load, set up by one command.

    python3 integration/demo/demo.py

It makes a virtual environment with stock SGLang, for the GPU where there is one and for the CPU
otherwise. Then two servers run one after the other under the same load: one without speculation,
one with the EAGLE-3 pair and the fused fallback. Every answer of the second has to equal that of
the first, but for near ties of two tokens in bfloat16; the exit code says whether it does.
"""

# This file needs the standard library alone: it sets the environment up and hands over to run.py.

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .environment import Environment

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = "fused_fallback.integration.demo.run"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The demo's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    versions = ("0.5.23", "0.5.17", "0.5.12.post1")
    add(
        "--sglang",
        choices=versions,
        default=versions[0],
        help="version (%(default)s); without a GPU 0.5.12.post1 drafts in Triton's interpreter, "
        "some ten times slower",
    )
    add(
        "--out",
        type=Path,
        default=REPOSITORY / ".out",
        metavar="DIR",
        help="gets demo.json, demo.png and, after a failure, the servers' logs "
        "(.out in the repository)",
    )
    add("--keep-log", action="store_true", help="keep the servers' logs after a success as well")
    add(
        "--concurrency",
        type=at_least(4),
        default=16,
        metavar="N",
        help="requests running at the peak; speculation is off from half of them on and back on "
        "at a quarter (%(default)s)",
    )
    add(
        "--max-tokens",
        type=at_least(2),
        default=64,
        metavar="N",
        help="length of the longest answer; the shortest has half of it (%(default)s)",
    )
    add(
        "--phase-seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="how long each level of the load is held (%(default)s)",
    )
    add(
        "--venv",
        type=Path,
        metavar="DIR",
        help="the virtual environment (.venv/sglang-VERSION in the repository)",
    )
    add(
        "--use-running",
        action="store_true",
        help="use the running Python instead if it has this SGLang; this project has to be "
        "installed in it",
    )
    add("--began", type=float, default=time.monotonic(), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, `least` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"must be {least} or more, a whole number, got {text!r}"
            )
        return value

    return number


def install(options: argparse.Namespace) -> Environment:
    """Make the environment, in a process group that ends with this process's wait for it."""
    import environment  # beside this script

    command = [sys.executable, environment.__file__, "--sglang", options.sglang]
    command += ["--dir", str(options.venv)] if options.venv else []
    command += ["--use-running"] if options.use_running else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise SystemExit(code)
    return environment.create(
        options.sglang, options.venv, use_running=options.use_running, progress=lambda line: None
    )


def end(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler: leave by an exception, which ends the installation on its way."""
    print(f"\nended by {signal.Signals(number).name}; nothing is left running", file=sys.stderr)
    raise SystemExit(128 + number)


def main() -> NoReturn:
    options = parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    python = str(install(options).python)
    # -P: the current folder's kernels/ would otherwise come before the installed packages
    command = [python, "-P", "-m", RUN, *sys.argv[1:], "--began", str(options.began)]
    os.execv(python, command)


if __name__ == "__main__":
    main()
