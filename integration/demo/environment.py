"""Environments that run real SGLang with EAGLE-3, on a CUDA GPU or on a machine without one.

    python integration/demo/environment.py --sglang 0.5.23 --dir DIR

makes a virtual environment once (about a minute on a CPU) and prints shell lines that put it to
use. With a GPU it holds stock SGLang; without one, the same SGLang release on CPU dependencies,
and `standin/` takes the place of sgl_kernel. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
STANDIN = HERE / "standin"
REQUIREMENTS = HERE / "requirements"
VERSIONS = ("0.5.23", "0.5.17", "0.5.12.post1")
TRITON_RELEASES = ("0.5.12.post1",)  # EAGLE on a CPU takes their Triton backend, interpreted
TORCHVISION = "torchvision==0.28.0"  # the release for torch 2.13
# Any release of it satisfies SGLang 0.5.12.post1, but its transformers 5.6.0 does not import with
# kernels 0.17.2; with 0.14.1 it does.
ON_A_GPU = {"0.5.12.post1": ("kernels<0.15",)}
STAMP = ".fused-fallback-environment"
PROGRESS_INTERVAL_S = 5.0
ERROR_LINES = 15


class SetupError(RuntimeError):
    """An environment could not be made; the text says which step failed and what to do."""


@dataclass(frozen=True)
class Environment:
    """A Python with SGLang, and how to start it.

    Args:
        version: SGLang's version.
        device: "cuda" or "cpu".
        python: the interpreter.
    """

    version: str
    device: str
    python: Path

    def env(self) -> dict[str, str]:
        """The whole environment for a process of `python`: this process's, plus what SGLang needs.

        Numbers of threads, malloc settings and HF_HUB_OFFLINE are left as they are where set.
        """
        variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.device == "cpu":
            # half of the cores for the scheduler: tokenizer, detokenizer and clients need some too
            variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
            # without them every gathered K and V is mapped and page-faulted anew, 10 times slower
            variables["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)  # glibc's upper limit
            variables["MALLOC_TRIM_THRESHOLD_"] = str(256 << 20)
        variables |= os.environ
        variables["PATH"] = _prepend(self.python.parent, variables.get("PATH"))
        if self.device == "cpu":
            variables["PYTHONPATH"] = _prepend(STANDIN, variables.get("PYTHONPATH"))
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request compiles C++ for 17 s
            if self.version in TRITON_RELEASES:
                variables["TRITON_INTERPRET"] = "1"
        return variables

    def server_options(self, *, max_total_tokens: int = 16384) -> dict[str, str | int | bool]:
        """The `ServerArgs` fields that this device asks for, none on a GPU.

        Args:
            max_total_tokens: size of the KV pool; SGLang would otherwise fill the host's memory.
        """
        if self.device == "cuda":
            return {}
        triton = self.version in TRITON_RELEASES
        backend = "triton" if triton else "intel_amx"
        return {
            "device": "cpu",
            "dtype": "float32",
            **({"disable_cuda_graph": True} if triton else {}),  # it looks for one of the draft
            # given one by one: SGLang 0.5.23 turns a common intel_amx into torch_native, which
            # EAGLE refuses, on a processor without AMX
            "prefill_attention_backend": backend,
            "decode_attention_backend": backend,
            # speculation on a CPU runs without overlap; so does, for comparison, every other server
            "disable_overlap_schedule": True,
            "max_total_tokens": max_total_tokens,
        }

    def server_arguments(self, *, max_total_tokens: int = 16384) -> list[str]:
        """`server_options` as command line arguments."""
        options = self.server_options(max_total_tokens=max_total_tokens)
        arguments = []
        for name, value in options.items():
            arguments.append("--" + name.replace("_", "-"))
            if value is not True:
                arguments.append(str(value))
        return arguments


def create(
    version: str,
    directory: Path | None = None,
    *,
    device: str | None = None,
    use_running: bool = False,
    progress: Callable[[str], None] = print,
) -> Environment:
    """Makes the environment for one SGLang version, or finds it made already (well under 1 s).

    A change of the requirement files rebuilds it, and so does an interrupted earlier call.

    Args:
        version: one of `VERSIONS`.
        directory: default `.venv/sglang-<version>` in the repository.
        device: "cuda" or "cpu"; default: "cuda" where a CUDA GPU is there.
        use_running: take the running interpreter if it has this version of SGLang.
        progress: is given one line at a time.

    Raises:
        ValueError: an unknown version or device.
        SetupError: Python is too old, `directory` holds something else, or a step failed.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (nothing else keeps an older Python from here)
        raise SetupError(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if version not in VERSIONS:
        raise ValueError(f"SGLang version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    device = device or ("cuda" if has_cuda_gpu() else "cpu")
    if use_running and running_sglang() == version:
        return Environment(version, device, Path(sys.executable))

    directory = (directory or REPOSITORY / ".venv" / f"sglang-{version}").absolute()
    environment = Environment(version, device, directory / "bin" / "python")
    stamp = directory / STAMP
    if directory.exists() and any(directory.iterdir()) and not stamp.exists():
        raise SetupError(f"{directory} was not made by this program: remove it or name another")
    directory.mkdir(parents=True, exist_ok=True)
    steps = _steps(version, device, directory)
    wanted = _fingerprint(steps)
    with stamp.open("a+") as record:
        fcntl.flock(record, fcntl.LOCK_EX)  # one maker at a time; others find it made
        record.seek(0)
        if record.read() == wanted and environment.python.exists():
            progress(f"SGLang {version} ({device}) is ready in {directory}")
            return environment
        record.truncate(0)
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != stamp:
                path.unlink()
        for number, (label, command) in enumerate(steps, start=1):
            _run(f"[{number}/{len(steps)}] {label}", command, progress)
        record.write(wanted)
    progress(f"SGLang {version} ({device}) is ready in {directory}")
    return environment


def has_cuda_gpu() -> bool:
    """Whether the CUDA driver sees a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return False
    return count.value > 0


def running_sglang() -> str | None:
    """The version of SGLang in the running interpreter."""
    try:
        return installed_version("sglang")
    except PackageNotFoundError:
        return None


def _prepend(path: Path, paths: str | None) -> str:
    return os.pathsep.join([str(path), *filter(None, [paths])])


def _steps(version: str, device: str, directory: Path) -> list[tuple[str, list[str]]]:
    """What is done, in order: a label and a command."""
    # -I: a PYTHONPATH of the caller would make pip take its packages for installed
    pip = [str(directory / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--progress-bar", "off"]
    tools = ["-r", str(REQUIREMENTS / "tools.txt")]
    base_python = getattr(sys, "_base_executable", sys.executable)
    steps = [("virtual environment", [base_python, "-I", "-m", "venv", str(directory)])]
    if device == "cuda":
        packages = (f"sglang=={version}", *ON_A_GPU.get(version, ()))
        steps += [(f"SGLang {version}", [*install, *packages, *tools])]
    else:
        # SGLang's pins ask for the CUDA stack, torchvision's for one exact build of torch
        pins = ["-r", str(REQUIREMENTS / f"sglang-{version}-cpu.txt")]
        without_pins = ["--no-deps", f"sglang=={version}", TORCHVISION]
        steps += [
            (f"what SGLang {version} needs on a CPU", [*install, *pins, *tools]),
            (f"SGLang {version}", [*install, *without_pins]),
        ]
    steps += [("this project", [*install, "--no-deps", "-e", str(REPOSITORY)])]
    return steps


def _fingerprint(steps: list[tuple[str, list[str]]]) -> str:
    """Changes with the Python version, the commands and the requirement files."""
    digest = hashlib.sha256(repr((sys.version_info[:2], steps[1:])).encode())
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(label: str, command: list[str], progress: Callable[[str], None]) -> None:
    progress(f"{label} ...")
    started = shown = time.monotonic()
    tail: deque[str] = deque(maxlen=ERROR_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip()[:300])  # pip lists every release it knows in one line
            if time.monotonic() - shown >= PROGRESS_INTERVAL_S:
                shown = time.monotonic()
                progress(f"    {shown - started:.0f} s: {line.strip()[:80]}")
    if process.returncode:
        raise SetupError(
            f"{label} failed with exit code {process.returncode}: {shlex.join(command)}\n"
            + "\n".join(f"    {line}" for line in tail)
        )
    progress(f"{label}: {time.monotonic() - started:.0f} s")


def main() -> None:
    """Command line: progress goes to stderr, shell lines for `eval` to stdout."""
    parser = argparse.ArgumentParser(
        description="Make an environment that runs real SGLang with EAGLE-3, and print shell lines "
        "that set it up: exports, $sglang_python and $sglang_server_arguments."
    )
    parser.add_argument("--sglang", choices=VERSIONS, default=VERSIONS[0], help="SGLang version")
    parser.add_argument("--dir", type=Path, help="default: .venv/sglang-VERSION in the repository")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--use-running", action="store_true", help="take this interpreter if it has that SGLang"
    )
    arguments = parser.parse_args()
    try:
        environment = create(
            arguments.sglang,
            arguments.dir,
            device=arguments.device,
            use_running=arguments.use_running,
            progress=partial(print, file=sys.stderr, flush=True),
        )
    except SetupError as error:
        sys.exit(f"error: {error}")
    for name, value in environment.env().items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")
    print(f"sglang_python={shlex.quote(str(environment.python))}")
    print(f"sglang_server_arguments={shlex.quote(shlex.join(environment.server_arguments()))}")


if __name__ == "__main__":
    main()
