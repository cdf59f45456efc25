"""Device time of small GPU work: CUDA graphs, cold L2, interleaved repeats, medians.

Each variant is a list of callables that do the same work on different memory. They are captured
one after another in one graph, so that a callable finds its weights evicted by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

Work = Callable[[], object]


def capture(rotation: Sequence[Work], rounds: int) -> torch.cuda.CUDAGraph:
    """A graph of `rounds` passes over the rotation, after an eager pass to compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in rotation:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for work in rotation:
                work()
    return graph


def interleaved_medians(
    variants: Mapping[str, Sequence[Work]], *, rounds: int = 4, repeats: int = 15
) -> dict[str, float]:
    """Microseconds per call of each variant: the median over repeats that take turns."""
    graphs = {name: capture(rotation, rounds) for name, rotation in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(repeats + 2):  # the first two warm the clocks
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            calls = rounds * len(variants[name])
            if repeat >= 2:
                times[name].append(1000 * start.elapsed_time(end) / calls)
    return {name: median(values) for name, values in times.items()}
