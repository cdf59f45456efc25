"""compute-sanitizer over the draft step: memcheck, racecheck and initcheck of each case.

    python -m fused_fallback.profiling.sanitize_draft_step --output draft_step_sanitizer.json

Every run is a process of its own that makes its tensors on the host, so that the step's kernels are
all that run on the GPU and all are checked, without torch's caching of memory, which would hide
bounds. A run also compares K and V with the reference. Needs a GPU and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..bindings.graph import DraftKVWriter
from ..integration.demo.checkout import commit
from ..kernels.float8 import quantize_layer
from .bench_draft_step import write_record
from .draft_step_peers import Shape, random_layer, random_step, write

SHAPE = Shape(hidden=512, intermediate=1024, heads=8, kv_heads=2, draft_vocab=100)
TOOLS = ("memcheck", "racecheck", "initcheck")
CASES = {  # backend, float8 weights, rows, and which kernels run
    "split in CUDA, 9 rows": ("auto", False, 9, "prepare, split_k.cu, hidden_norm, store"),
    "split in CUDA, 70 rows": ("auto", False, 70, "the same"),
    "two steps of a block": ("auto", False, 10, "stage, and the same"),
    "split in Triton": ("triton", False, 9, "prepare, split_k, hidden_norm, store"),
    "split in Triton, float8 weights": ("triton", True, 9, "the same, widening"),
    "library": ("auto", False, 130, "prepare, cuBLAS, hidden_norm, store"),
    "library, float8 weights": ("auto", True, 130, "the same, with quantize_rows"),
}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
KERNEL = re.compile(r"\b(?:at|in) (?:void )?([\w:]*?\w+)(?:<.*?>)?(?:\(.*?\))?\+0x[0-9a-f]+")


def drive(case: str) -> None:
    """One step with a padding row, compared with the reference on the host.

    Raises:
        AssertionError: K or V differ by more than rounding and float8 explain.
    """
    backend, float8, rows, _ = CASES[case]
    layer = random_layer(SHAPE, "cpu")
    step = random_step(layer, rows)
    step["out_cache_loc"][rows // 2] = -1
    if float8:
        step["layer"] = quantize_layer(layer)
    weights = {field.name: getattr(step["layer"], field.name) for field in fields(layer)}
    moved = {k: v.cuda() for k, v in weights.items() if isinstance(v, torch.Tensor)}
    on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in step.items()}
    on_gpu["layer"] = replace(step["layer"], **moved)
    (write_block if "block" in case else write)(on_gpu, backend)
    write(step, "torch")
    for name in ("k_buffer", "v_buffer"):
        ours, exact = on_gpu[name].cpu().double(), step[name].double()
        error = float((ours - exact).norm() / exact.norm())
        limit = 0.1 if float8 else 0.02
        assert error < limit, f"{name} is off by {error:.3f}"
    print("drive: K and V agree with the reference")


def write_block(step: dict[str, Any], backend: str) -> None:
    """The same rows, as two steps that waited for each other."""
    rows = step["out_cache_loc"].shape[0]
    names = ("layer", "kept_hidden_states", "k_buffer", "v_buffer")
    writer = DraftKVWriter(**{name: step[name] for name in names}, max_rows=rows, backend=backend)
    names = ("aux_hidden_states", "next_token_ids", "seq_lens", "req_pool_indices", "out_cache_loc")
    for part in (slice(0, rows // 2), slice(rows // 2, rows)):
        writer.stage(**{name: step[name][part] for name in names})
    writer.write()


def verdict(output: str, code: int | None) -> str:
    """What a run of compute-sanitizer says; `code` is None if it ran out of time."""
    if code is None:
        return "no result: out of time"
    found = SUMMARY.findall(output)
    if not found or "Internal Sanitizer Error" in output:
        lines = [line for line in output.splitlines() if line.strip()]
        return f"tool error, exit code {code}: {lines[-1] if lines else 'no output'}"
    kernels = sorted(set(KERNEL.findall(output)))
    agrees = "drive: K and V agree" in output
    return (
        found[-1]
        + (f", in {', '.join(kernels)}" if kernels else "")
        + ("" if agrees else ", and the step itself failed")
    )


def check(case: str, tool: str, timeout: float, log: Path | None) -> dict[str, Any]:
    """Run one case under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", f"{__package__}.sanitize_draft_step", "--drive", case]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=env, timeout=timeout, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(errors="replace"), None
    if log:
        (log / f"{re.sub('[^a-z0-9]+', '_', case)}_{tool}.log").write_text(output)
    backend, _, rows, kernels = CASES[case]
    line = {"case": case, "backend": backend, "rows": rows, "kernels": kernels, "tool": tool}
    line["verdict"] = verdict(output, code)
    print(f"{case}, {tool}: {line['verdict']}", flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--timeout", type=float, default=40, help="seconds a run")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--logs", type=Path, help="folder for what the tools printed")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON file")
    parser.add_argument("--drive", choices=CASES, help="only run this case, without a tool")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive)
        return
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    for case in arguments.cases:  # compiles, so that no run under a tool has to
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.sanitize_draft_step", "--drive", case],
            check=True,
        )
    with ThreadPoolExecutor(arguments.parallel) as pool:
        runs = [
            pool.submit(check, case, tool, arguments.timeout, arguments.logs)
            for case, tool in product(arguments.cases, arguments.tools)
        ]
        lines = [run.result() for run in runs]
    write_record(arguments.output, arguments.commit, runs=lines)


if __name__ == "__main__":
    main()
