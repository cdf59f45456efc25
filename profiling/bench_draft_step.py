"""Time the fused draft step and its peers on a GPU: a table, a JSON file, a picture.

    python -m fused_fallback.profiling.bench_draft_step --output draft_step.json
    python -m fused_fallback.profiling.bench_draft_step --plot draft_step.json   # draws beside it
    python -m fused_fallback.profiling.bench_draft_step --variants variants.json   # of the step

Every number is the median of interleaved replays of CUDA graphs, per step, with weights and inputs
rotated so that none is in L2. The floor is Shape.floor_us. Up to 512 rows it is `fused_draft_step`,
above `write_draft_kv`, as in serving; a peer does the same work, except `cublas`, which is the two
matmuls alone, and `full_layer`, which is more. A peer that this machine lacks is null.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ..integration.demo.checkout import commit
from ..kernels import draft_step, matmul, reference
from ..kernels.cuda import split_k
from ..kernels.cuda.split_k import Tiles
from ..kernels.draft_layer import DraftLayer
from ..kernels.float8 import quantize_layer
from ..kernels.triton import hidden_norm, prepare, store
from .draft_step_peers import (
    SHAPES,
    Shape,
    flashinfer_pieces,
    full_layer,
    matmuls,
    random_layer,
    random_step,
    unfused,
    widened_layer,
    write,
)
from .timing import Work, interleaved_medians

ROTATED_BYTES = 500e6  # several times the H200's 60 MB of L2
ROWS = (1, 4, 16, 64, 128, 256, 512, 2048, 8192)
LARGEST_DECODE = 512
PEERS = ("fused", "triton", "fp8", "cublas", "torch", "compile", "flashinfer", "full_layer")
CUTS = ((1, 4, 2), (1, 4, 3), (1, 2, 4), (1, 2, 6), (2, 1, 4), (2, 1, 6), (2, 2, 2))
"""groups, boxes and in_flight of `Tiles`: what --variants measures beside the default."""


def rotated_layers(shape: Shape) -> list[DraftLayer]:
    """Copies of a random layer, each of which the others drive out of L2."""
    copies = max(2, round(ROTATED_BYTES / shape.weight_bytes()))
    return [random_layer(shape) for _ in range(copies)]


def makers(
    shape: Shape, rows: int, peers: list[str], quantized: dict[int, Any]
) -> dict[str, Callable[[dict[str, Any]], Work]]:
    """For each peer that there is, what makes its work of a step."""
    compiled = torch.compile(unfused, dynamic=True) if "compile" in peers else unfused
    found: dict[str, Callable[[dict[str, Any]], Work]] = {
        "fused": lambda step: lambda: write(step),
        "triton": lambda step: lambda: write(step, "triton"),
        "fp8": lambda step: lambda: write(step, layer=quantized[id(step["layer"])]),
        "cublas": matmuls,
        "torch": lambda step: lambda: unfused(step),
        "compile": lambda step: lambda: compiled(step),
        "flashinfer": flashinfer_pieces,
        "full_layer": lambda step: full_layer(step, shape),
    }
    return {name: found[name] for name in peers if name in found}


def rotations(
    shape: Shape, steps: list[dict[str, Any]], peers: list[str], quantized: dict[int, Any]
) -> dict[str, list[Work]]:
    """One callable a copy of the weights for each peer; says which peers fail, and why."""
    rows, found = steps[0]["next_token_ids"].shape[0], {}
    for name, make in makers(shape, rows, peers, quantized).items():
        try:
            found[name] = [make(step) for step in steps]
            found[name][0]()
            torch.cuda.synchronize()
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            found.pop(name, None)
            print(f"{name}, {rows} rows: null, {type(error).__name__}: {error}", flush=True)
    return found


def measure(name: str, rows_list: list[int], peers: list[str]) -> Iterator[dict[str, Any]]:
    """The results' rows for one shape, printed as they come."""
    shape = SHAPES[name]
    layers = rotated_layers(shape)
    quantized = {id(layer): quantize_layer(layer) for layer in layers if "fp8" in peers}
    for rows in rows_list:
        prefill = rows > LARGEST_DECODE
        steps = [random_step(layer, rows, prefill=prefill) for layer in layers]
        works = rotations(shape, steps, peers, quantized)
        times = interleaved_medians(works, rounds=1 if prefill else 3)
        floor, us = shape.floor_us(rows), times.get("fused")
        line: dict[str, Any] = {"shape": name, "rows": rows, "floor_us": round(floor, 1)}
        if us is not None:
            line |= {
                "us": round(us, 1),
                "gb_per_s": round(shape.weight_bytes() / us / 1e3),
                "percent_of_floor": round(100 * floor / us),
            }
        rounded = {peer: round(times[peer], 1) if peer in times else None for peer in peers}
        line |= {f"{peer}_us": us for peer, us in rounded.items() if peer != "fused"}
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        yield line
        del steps, works
        gc.collect()
        torch.cuda.empty_cache()


def errors(name: str, rows: int) -> dict[str, Any]:
    """Relative error of K and V against fp64, in bfloat16 and with float8 weights."""
    layer = random_layer(SHAPES[name])
    step = random_step(layer, rows)
    wide = {"layer": widened_layer(layer), "aux_hidden_states": step["aux_hidden_states"].double()}
    pools = {pool: torch.zeros_like(step[pool], dtype=torch.float64) for pool in _POOLS}
    reference.write_draft_kv(
        **wide,
        **pools,
        token_ids=step["next_token_ids"],
        positions=step["seq_lens"],
        out_cache_loc=step["out_cache_loc"],
    )
    line: dict[str, Any] = {"shape": name, "rows": rows}
    for kind, of in (("bfloat16", layer), ("float8", quantize_layer(layer))):
        write(step, layer=of)
        for pool, exact in pools.items():
            error = (step[pool].double() - exact).norm() / exact.norm()
            line[f"{pool[0]}_error_{kind}"] = float(f"{error.item():.3g}")
    print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    return line


_POOLS = ("k_buffer", "v_buffer")


Change = tuple[Any, str, Any]
"""A module, a name in it, and what stands there instead."""


@contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """The step with something different, while it is captured."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield


def variants(rows: int) -> dict[str, list[Change]]:
    """What may differ, by a name for it."""
    choose = matmul.split_kernel

    def in_order(
        x: torch.Tensor, weight: torch.Tensor, **options: Any
    ) -> Callable[..., Any] | None:
        """A matmul that does not start beside the kernel before."""
        kernel = choose(x, weight, **options)
        return kernel and (lambda *of, **how: kernel(*of, **how | {"early": False}))

    no_launch: list[Change] = [
        (module, "has_dependent_launch", lambda device: False)
        for module in (hidden_norm, prepare, store)
    ]
    found: dict[str, list[Change]] = {
        "as it is": [],
        "no dependent launch": [*no_launch, (draft_step, "split_kernel", in_order)],
    }
    if rows > split_k.MAX_ROWS:
        return found | {"one stream": [(draft_step, "_side_stream", lambda device: None)]}
    found["Triton alone"] = [(matmul, "can_split", lambda x, weight: False)]
    found["library matmuls"] = [(draft_step, "split_kernel", lambda x, weight, cuda: None)]
    for cut in CUTS:
        tiles = Tiles(split_k.tiles_for(rows, 0, 0).rows, *cut)
        if tiles.stages >= tiles.in_flight:
            found[str(tiles)] = [(split_k, "tiles_for", lambda *sizes, at=tiles: at)]
    return found


def measure_variants(name: str, rows: int) -> dict[str, Any]:
    """The step as it is and with one thing different, and its matmuls by cuBLAS."""
    shape = SHAPES[name]
    steps = [random_step(layer, rows) for layer in rotated_layers(shape)]

    def work(step: dict[str, Any], changes: list[Change]) -> Work:
        def run() -> None:
            with changed(changes):
                write(step)

        return run

    works: dict[str, list[Work]] = {"cublas": [matmuls(step) for step in steps]}
    for label, changes in variants(rows).items():
        try:
            works[label] = [work(step, changes) for step in steps]
            works[label][0]()
            torch.cuda.synchronize()
        except RuntimeError as error:  # such as more shared memory than there is
            del works[label]
            print(f"{label}: {type(error).__name__}: {error}", flush=True)
    times = {label: round(us, 1) for label, us in interleaved_medians(works, rounds=3).items()}
    print(f"{name}, {rows} rows, floor {shape.floor_us(rows):.1f} us")
    for label, us in sorted(times.items(), key=lambda item: item[1]):
        print(f"  {us:7.1f}  {label}", flush=True)
    return {"shape": name, "rows": rows, "floor_us": round(shape.floor_us(rows), 1), "us": times}


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
    decode = [line for line in record["rows"] if line["rows"] <= LARGEST_DECODE]
    names = list(dict.fromkeys(line["shape"] for line in decode))
    figure, panels = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False)
    curves = {
        "floor_us": ("floor", "k--"),
        "us": ("fused", "C3o-"),
        "fp8_us": ("fused, float8 weights", "C1o-"),
        "triton_us": ("Triton alone", "C2^-"),
        "cublas_us": ("cuBLAS, its two matmuls alone", "C0s-"),
        "flashinfer_us": ("flashinfer's pieces and cuBLAS", "C4d-"),
        "compile_us": ("torch.compile", "C5v-"),
        "torch_us": ("unfused torch", "C7v-"),
    }
    for panel, name in zip(panels[0], names, strict=True):
        lines = [line for line in decode if line["shape"] == name]
        for key, (label, style) in curves.items():
            points = [(line["rows"], line[key]) for line in lines if line.get(key) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), style, label=label)
        panel.set(title=f"{name} draft, {record['device']}", xlabel="rows", ylabel="µs a step")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
    panels[0][0].legend()
    figure.tight_layout()
    picture = path.with_suffix(".svg")
    figure.savefig(picture)
    return picture


def write_record(path: Path | None, commit: str | None, **content: Any) -> None:
    """The device and the versions, then the content."""
    import triton

    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": date.today().isoformat(),
        **content,
    }
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON file")
    parser.add_argument("--variants", type=Path, help="measure the settings of the step instead")
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
            write(step, arguments.backend)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return
    start = time.time()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if arguments.variants:
        cells = [(name, rows) for name in arguments.shapes for rows in arguments.rows]
        measured = [measure_variants(name, rows) for name, rows in cells]
        write_record(arguments.variants, arguments.commit, variants=measured)
    else:
        results: list[dict[str, Any]] = []
        accuracy: list[dict[str, Any]] = []
        for name in arguments.shapes:
            for line in measure(name, arguments.rows, arguments.peers):
                results.append(line)
                write_record(arguments.output, arguments.commit, rows=results, errors=accuracy)
            if "fp8" in arguments.peers:
                accuracy += [errors(name, rows) for rows in (64, 512)]
                write_record(arguments.output, arguments.commit, rows=results, errors=accuracy)
            gc.collect()
            torch.cuda.empty_cache()
        print(table(results))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
