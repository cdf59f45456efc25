"""Where the time of a decode step or a prefill goes: GPU kernels of servers side by side.

    python -m fused_fallback.profiling.trace_serving --model-path TARGET --draft-model-path DRAFT
        [--modes nospec off] [--concurrency 64] [--steps 12] [--prefill] [--load-format dummy ...]

Starts `sglang serve` for each mode, all at once, lets `--concurrency` requests decode, and has
SGLang trace some steps by torch's profiler. Writes `profiling/results/trace_<device>_<sglang>.json`
or `trace_prefill_...`, and `.txt` beside it:

- GPU time of a step in each mode: the target's graph, other kernels, idle;
- every kernel whose number or time differs between the first mode and another;
- all kernels of one step, the one of median length, with start, duration and stream.

A step lasts from the first kernel of one launch of the target's graph to that of the next; the
target's is the graph with the most kernels. With `--prefill` there is one step, all that ran before
the first launch: the prefill of all requests. `--keep FOLDER` keeps the full traces, for Perfetto,
with the ranges of `nvtx.py` in them. The profiler itself slows the CPU side: read durations and
order, not tokens per second.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import prompt_sets
from .serving import (
    MODES,
    ServerProcess,
    add_options,
    provenance,
    refuse,
    result_path,
    spec_of,
    vocab_size,
)

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_WIDTH = 96
LEAST_DIFFERENCE_US = 0.3  # a step, of a kernel that both modes run as often
MOST_LINES = 80  # of the text that is printed too
TARGET, GRAPH, EAGER = "target", "graph", ""


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the GPU.

    Args:
        start, duration: microseconds, `start` since the trace's own zero.
        source: TARGET for the target's graph, GRAPH for another one, EAGER for a launch of its own.
        launch: the same for all that one launch of a graph ran.
    """

    name: str
    start: float
    duration: float
    stream: int
    source: str
    launch: int

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Step:
    """What ran on the GPU between the beginnings of two launches of the target's graph.

    Args:
        begin, end: of the step, microseconds.
        kernels: those that started in it.
        earlier: those that started before it and ended in it.
    """

    begin: float
    end: float
    kernels: tuple[Kernel, ...]
    earlier: tuple[Kernel, ...]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_options(parser, concurrency=[64])
    add("--modes", nargs="+", choices=MODES, default=["nospec", "off"])
    add("--steps", type=int, default=12, help="to trace (%(default)s)")
    add("--prefill", action="store_true", help="the prefill of all requests, not decode steps")
    add("--keep", type=Path, help="folder for the full traces, for Perfetto")
    add("--nsys", action="store_true", help="open nsys's capture range instead: nsys_serving.sh")
    add("--out", type=Path, help="default: profiling/results/trace_<device>_<sglang>.json")
    parser.set_defaults(through="serve")
    options = parser.parse_args(argv)
    if len(options.concurrency) != 1:
        parser.error("it traces one concurrency")
    return options


# ---- reading a trace


def read(path: Path) -> list[Kernel]:
    """The GPU's work of a Chrome trace by torch's profiler, in order of start."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    launches = {
        event["args"]["correlation"]
        for event in events
        if "GraphLaunch" in event.get("name", "") and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in GPU_CATEGORIES]
    sizes = Counter(event["args"].get("correlation") for event in work)
    largest = max((sizes[launch] for launch in launches), default=0)

    def kernel(event: dict[str, Any]) -> Kernel:
        launch = event["args"].get("correlation", -1)
        of_graph = TARGET if sizes[launch] > largest / 2 else GRAPH
        return Kernel(
            name=shorten(event["name"]),
            start=float(event["ts"]),
            duration=float(event.get("dur", 0)),
            stream=event["args"].get("stream", -1),
            source=of_graph if launch in launches else EAGER,
            launch=launch,
        )

    return sorted(map(kernel, work), key=lambda kernel: kernel.start)


def shorten(name: str) -> str:
    """A kernel's name without return type, arguments and the most common namespaces."""
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|cutlass::|c10::", "", name)
    return name.partition("(")[0].strip()[:NAME_WIDTH]


def steps(kernels: Sequence[Kernel]) -> list[Step]:
    """The whole steps between the first and the last launch of the target's graph."""
    begins: dict[int, float] = {}
    for kernel in kernels:
        if kernel.source == TARGET:
            begins.setdefault(kernel.launch, kernel.start)
    bounds = sorted(begins.values())
    return [
        Step(
            begin,
            end,
            kernels=tuple(k for k in kernels if begin <= k.start < end),
            earlier=tuple(k for k in kernels if k.start < begin < k.end),
        )
        for begin, end in itertools.pairwise(bounds)
    ]


def prefill(kernels: Sequence[Kernel]) -> list[Step]:
    """What ran before the first launch of the target's graph, as one step."""
    begins = [kernel.start for kernel in kernels if kernel.source == TARGET]
    if not begins or kernels[0].start == begins[0]:
        return []
    before = tuple(kernel for kernel in kernels if kernel.start < begins[0])
    return [Step(before[0].start, begins[0], kernels=before, earlier=())]


# ---- what it says


def covered(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as disjoint spans in order."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def common(
    these: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Where two unions overlap."""
    pairs = ((max(a, c), min(b, d)) for a, b in these for c, d in others)
    return [(begin, end) for begin, end in pairs if begin < end]


def figures(step: Step) -> dict[str, float]:
    """Microseconds of one step, and counts."""

    def spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
        return covered((max(k.start, step.begin), min(k.end, step.end)) for k in kernels)

    running = (*step.earlier, *step.kernels)
    target = [kernel for kernel in running if kernel.source == TARGET]
    others = [kernel for kernel in running if kernel.source != TARGET]
    beside = [kernel for kernel in others if kernel.source == GRAPH]
    return {
        "step_us": step.end - step.begin,
        "target_graph_us": target[-1].end - target[0].start if target else 0.0,
        "target_busy_us": length(spans(target)),
        "other_busy_us": length(spans(others)),
        "other_graphs_busy_us": length(spans(beside)),
        "overlap_with_target_us": length(common(spans(target), spans(others))),
        "idle_us": step.end - step.begin - length(spans(running)),
        "target_kernels": len(target),
        "other_kernels": len(others),
    }


def summarise(of_mode: Sequence[Step]) -> dict[str, float]:
    """Medians of `figures` over the steps."""
    each = [figures(step) for step in of_mode]
    return {name: round(statistics.median(f[name] for f in each), 2) for name in each[0]}


def per_step(of_mode: Sequence[Step]) -> dict[tuple[str, str], tuple[float, float]]:
    """By source and name: how many a step, and their microseconds a step; means."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in of_mode:
        for kernel in step.kernels:
            entry = totals[kernel.source, kernel.name]
            entry[0] += 1
            entry[1] += kernel.duration
    return {key: (n / len(of_mode), us / len(of_mode)) for key, (n, us) in totals.items()}


def differences(plain: Sequence[Step], other: Sequence[Step]) -> list[dict[str, Any]]:
    """Kernels of which `other` runs another number, or takes other time; the largest first."""
    before, after = per_step(plain), per_step(other)
    rows = []
    for source, name in before.keys() | after.keys():
        count, us = before.get((source, name), (0.0, 0.0))
        new_count, new_us = after.get((source, name), (0.0, 0.0))
        if abs(new_us - us) > LEAST_DIFFERENCE_US or round(count) != round(new_count):
            rows.append(
                {
                    "source": source,
                    "name": name,
                    "count": [round(count, 2), round(new_count, 2)],
                    "us": [round(us, 2), round(new_us, 2)],
                }
            )
    return sorted(rows, key=lambda row: row["us"][0] - row["us"][1])


def text(found: dict[str, list[Step]]) -> str:
    """Everything, for reading."""
    modes = list(found)
    summaries = {mode: summarise(found[mode]) for mode in modes}
    lines = [f"{'median':26s}" + "".join(f"{mode:>14s}" for mode in modes)]
    for name in summaries[modes[0]]:
        lines.append(f"{name:26s}" + "".join(f"{summaries[m][name]:14.2f}" for m in modes))
    for mode in modes[1:]:
        rows = differences(found[modes[0]], found[mode])
        total = sum(row["us"][1] - row["us"][0] for row in rows)
        lines.append(
            f"\nkernels a step, {modes[0]} -> {mode} (mean): {total:+.1f} us of kernel time"
        )
        lines.append("   from us      to us      diff   from     to  graph   kernel")
        for row in rows:
            (count, new_count), (us, new_us) = row["count"], row["us"]
            lines.append(
                f"{us:10.2f} {new_us:10.2f} {new_us - us:+9.2f} {count:6.1f} {new_count:6.1f}  "
                f"{row['source']:6s}  {row['name']}"
            )
    for mode in modes:
        step = sorted(found[mode], key=lambda step: step.end - step.begin)[len(found[mode]) // 2]
        lines.append(f"\none step of {mode}, {step.end - step.begin:.1f} us")
        lines.append("     start  duration     gap  stream  graph   kernel")
        busy_until = step.begin
        for k in step.kernels:
            gap = k.start - busy_until
            busy_until = max(busy_until, k.end)
            lines.append(
                f"{k.start - step.begin:10.2f} {k.duration:9.2f} {gap:7.2f} {k.stream:7d}  "
                f"{k.source:6s}  {k.name}"
            )
    return "\n".join(lines) + "\n"


# ---- tracing


def trace(options: argparse.Namespace, server: ServerProcess, folder: Path) -> None:
    """Have a server trace into `folder` while it decodes, or from its prefill on.

    Raises:
        RuntimeError: the server ended.
    """
    (concurrency,) = options.concurrency
    ids = [
        prompt_sets.random_ids(
            concurrency, options.input_len, vocab_size=vocab_size(options), seed=seed
        )
        for seed in range(2)
    ]
    server.burst(ids[0], options.output_len)
    server.order(
        "burst",
        prompts=ids[1],
        new_tokens=options.output_len,
        prefill=options.prefill,
        profile={
            "output_dir": str(folder),
            "num_steps": options.steps,
            "activities": ["CUDA_PROFILER"] if options.nsys else ["CPU", "GPU"],
            "with_stack": False,
            "record_shapes": False,
        },
    )


def traced(folder: Path, split: Callable[[Sequence[Kernel]], list[Step]]) -> list[Step]:
    """The steps of the one trace in a folder, cut by `steps` or `prefill`.

    Raises:
        SystemExit: it holds none.
    """
    (path,) = folder.rglob("*.trace.json.gz")
    found = split(read(path))
    if not found:
        what = "prefill before a decode step" if split is prefill else "whole decode step"
        raise SystemExit(f"{path} holds no {what} in a CUDA graph: is there a GPU?")
    return found


def main() -> None:
    options = parse_args()
    refuse(options.modes)
    out = options.out or result_path("trace_prefill" if options.prefill else "trace")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="trace_"))
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Step]] = {}
    servers = [  # all start at once
        ServerProcess(spec_of(options, mode, FUSED_FALLBACK_PROFILE="nvtx"), folder / f"{mode}.log")
        for mode in options.modes
    ]
    for mode, server in zip(options.modes, servers, strict=True):
        server.wait_until_ready()
        print(f"{mode} is up after {server.start_s:.0f} s, log {server.log}", flush=True)
    for mode, server in zip(options.modes, servers, strict=True):
        trace(options, server, folder / mode)
        server.stop()
        if options.nsys:
            continue
        found[mode] = traced(folder / mode, prefill if options.prefill else steps)
        first = found[options.modes[0]]
        result = {
            **provenance(options.commit),
            "concurrency": options.concurrency[0],
            "of": "prefill" if options.prefill else "decode step",
            "modes": {name: summarise(of_mode) for name, of_mode in found.items()},
            "differences": {
                name: differences(first, of_mode)
                for name, of_mode in found.items()
                if of_mode is not first
            },
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
        out.with_suffix(".txt").write_text(text(found))
    if options.nsys:
        return
    print("\n".join(text(found).splitlines()[:MOST_LINES]))
    print(f"written to {out} and {out.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
