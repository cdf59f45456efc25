"""Time the fused draft step and its peers on a GPU: a table, a JSON file, a picture.

    python -m fused_fallback.profiling.bench_draft_step --output draft_step.json
    python -m fused_fallback.profiling.bench_draft_step --plot draft_step.json   # draws beside it

Every number is the median of interleaved replays of CUDA graphs, per step, with weights and inputs
rotated so that none is in L2. The floor is Shape.floor_us.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..bindings import ops
from ..kernels.cuda.draft_step import MAX_ROWS
from .draft_step_peers import (
    SHAPES,
    Shape,
    full_layer,
    matmuls,
    random_layer,
    random_step,
    unfused,
)
from .timing import interleaved_medians

ROTATED_BYTES = 500e6  # several times the H200's 60 MB of L2
DECODE_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
PREFILL_ROWS = (2048, 8192)
PEERS = ("fused", "triton", "cublas", "torch", "compile", "full_layer")


def fastest(step: dict[str, Any]) -> str:
    """One launch as far as its kernel goes, five above."""
    return "cuda" if step["next_token_ids"].shape[0] <= MAX_ROWS else "triton"


def variants(
    shape: Shape, steps: list[dict[str, Any]], peers: list[str]
) -> dict[str, list[Callable[[], object]]]:
    """One callable a copy of the weights, for each peer."""
    compiled = torch.compile(unfused, dynamic=False) if "compile" in peers else unfused

    def each(make: Callable[[dict[str, Any]], Callable[[], object]]) -> list[Callable[[], object]]:
        return [make(step) for step in steps]

    makers: dict[str, Callable[[dict[str, Any]], Callable[[], object]]] = {
        "fused": lambda step: lambda: ops.fused_draft_step(**step, backend=fastest(step)),
        "triton": lambda step: lambda: ops.fused_draft_step(**step, backend="triton"),
        "cublas": matmuls,
        "torch": lambda step: lambda: unfused(step),
        "compile": lambda step: lambda: compiled(step),
        "full_layer": lambda step: full_layer(step, shape),
    }
    return {name: each(makers[name]) for name in peers}


def measure(name: str, rows_list: list[int], peers: list[str], rounds: int) -> list[dict[str, Any]]:
    """Rows of the results for one shape; prints each as it comes."""
    shape = SHAPES[name]
    copies = max(2, round(ROTATED_BYTES / shape.weight_bytes()))
    layers = [random_layer(shape) for _ in range(copies)]
    results = []
    for rows in rows_list:
        steps = [random_step(layer, rows) for layer in layers]
        times = interleaved_medians(variants(shape, steps, peers), rounds=rounds)
        floor = shape.floor_us(rows)
        line = {"shape": name, "rows": rows, "floor_us": round(floor, 1)}
        if "fused" in times:
            fused = times.pop("fused")
            line |= {
                "us": round(fused, 1),
                "gb_per_s": round(shape.weight_bytes() / fused / 1e3),
                "percent_of_floor": round(100 * floor / fused),
            }
        line |= {f"{peer}_us": round(us, 1) for peer, us in times.items()}
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        results.append(line)
        del steps
        gc.collect()
        torch.cuda.empty_cache()
    return results


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table of what `measure` returned."""
    columns = list(dict.fromkeys(key for line in results for key in line))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(line.get(column, "")) for column in columns] for line in results]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(path: Path) -> Path:
    """Microseconds over rows, one panel a shape, the floor drawn in; an SVG beside the JSON."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    record = json.loads(path.read_text())
    decode = [line for line in record["rows"] if line["rows"] <= max(DECODE_ROWS)]
    names = list(dict.fromkeys(line["shape"] for line in decode))
    figure, panels = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False)
    curves = {
        "floor_us": ("floor", "k--"),
        "us": ("fused", "C3o-"),
        "cublas_us": ("cuBLAS, its two matmuls alone", "C0s-"),
        "triton_us": ("Triton and cuBLAS", "C2^-"),
        "torch_us": ("unfused torch", "C7v-"),
    }
    for panel, name in zip(panels[0], names, strict=True):
        lines = [line for line in decode if line["shape"] == name]
        for key, (label, style) in curves.items():
            points = [(line["rows"], line[key]) for line in lines if key in line]
            if points:
                panel.plot(*zip(*points, strict=True), style, label=label)
        panel.set(title=f"{name} draft, {record['device']}", xlabel="rows", ylabel="us a step")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
    panels[0][0].legend()
    figure.tight_layout()
    picture = path.with_suffix(".svg")
    figure.savefig(picture)
    return picture


def commit() -> str | None:
    """The commit of the checkout, if there is one."""
    found = subprocess.run(
        ("git", "rev-parse", "HEAD"), cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[*DECODE_ROWS, *PREFILL_ROWS])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON file")
    parser.add_argument("--plot", type=Path, help="only draw this JSON file")
    parser.add_argument(
        "--once",
        type=int,
        metavar="N",
        help="only run N steps, the last between cudaProfilerStart and cudaProfilerStop",
    )
    parser.add_argument("--backend", default="auto", help="of --once (%(default)s)")
    arguments = parser.parse_args()
    if arguments.plot:
        print(draw(arguments.plot))
        return
    if not torch.cuda.is_available():
        sys.exit("bench_draft_step needs a GPU")
    if arguments.once:
        step = random_step(random_layer(SHAPES[arguments.shapes[0]]), arguments.rows[0])
        for i in range(arguments.once):
            if i == arguments.once - 1:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            ops.fused_draft_step(**step, backend=arguments.backend)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return
    start, results = time.time(), []
    for name in arguments.shapes:
        decode = [rows for rows in arguments.rows if rows <= max(DECODE_ROWS)]
        prefill = [rows for rows in arguments.rows if rows > max(DECODE_ROWS)]
        results += measure(name, decode, arguments.peers, rounds=3)
        peers = [peer for peer in arguments.peers if peer in ("fused", "cublas", "torch")]
        results += measure(name, prefill, peers, rounds=1)
    import triton

    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit,
        "date": date.today().isoformat(),
        "rows": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results))
    print(f"{record['device']}, torch {record['torch']}, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
