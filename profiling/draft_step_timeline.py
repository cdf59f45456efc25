"""When each kernel of the draft step starts and ends, beside cuBLAS's two matmuls alone.

    python -m fused_fallback.profiling.draft_step_timeline --output draft_step_timeline.json

From torch.profiler over replays of a CUDA graph, weights and inputs rotated as in bench_draft_step.
Kernels overlap: with programmatic dependent launch one is resident before it may read what the one
before writes. Between the end of a matmul that reads its weights at full bandwidth and the end of
the step lies what the floor leaves out. Tracing itself makes a step a little slower.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, mode
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..integration.demo.checkout import commit
from .bench_draft_step import rotated_layers, write_record
from .draft_step_peers import SHAPES, matmuls, random_step, write
from .timing import Work, capture
from .trace_serving import Kernel, read

REPLAYS, ROUNDS = 4, 3


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[Kernel]:
    """Every kernel of a few replays, in order of their start."""
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return read(path)


def timeline(works: list[Work]) -> list[dict[str, Any]]:
    """Median start and end of every kernel of one call, in us after the first kernel's start."""
    kernels = kernels_of(capture(works, ROUNDS))
    count = len(kernels) // (REPLAYS * ROUNDS * len(works))
    first = len(works) * ROUNDS * count  # the first replay is left out
    steps = [kernels[i : i + count] for i in range(first, len(kernels), count)]
    lines = []
    for place in zip(*steps, strict=True):
        zeros = [step[0].start for step in steps]
        begins = [kernel.start - zero for kernel, zero in zip(place, zeros, strict=True)]
        ends = [kernel.end - zero for kernel, zero in zip(place, zeros, strict=True)]
        lines.append(
            {
                "kernel": mode(kernel.name for kernel in place),
                "start_us": round(median(begins), 1),
                "end_us": round(median(ends), 1),
            }
        )
    return lines


def measure(name: str, rows: int) -> dict[str, Any]:
    shape = SHAPES[name]
    steps = [random_step(layer, rows) for layer in rotated_layers(shape)]
    kinds: dict[str, Callable[[dict[str, Any]], Work]] = {
        "fused": lambda step: lambda: write(step),
        "cublas": matmuls,
    }
    line: dict[str, Any] = {"shape": name, "rows": rows, "floor_us": round(shape.floor_us(rows), 1)}
    for kind, make in kinds.items():
        line[kind] = timeline([make(step) for step in steps])
        print(f"{name}, {rows} rows, {kind}")
        for kernel in line[kind]:
            print("  {start_us:7.1f} {end_us:7.1f}  {kernel}".format(**kernel), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128, 256, 512])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("draft_step_timeline needs a GPU")
    lines = []
    for name in arguments.shapes:
        for rows in arguments.rows:
            lines.append(measure(name, rows))
            gc.collect()
            torch.cuda.empty_cache()
    write_record(arguments.output, arguments.commit, timelines=lines)


if __name__ == "__main__":
    main()
