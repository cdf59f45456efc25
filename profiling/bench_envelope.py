"""Tokens per second over concurrency, of servers that take turns on one GPU.

    python -m fused_fallback.profiling.bench_envelope --model-path TARGET --draft-model-path DRAFT
        [--modes nospec static off threshold] [--concurrency 8 32 64 128 256] [--repeats 5]
        [--input-len 256] [--output-len 128] [--prompts random|coding|agentic]
        [--starts 3] [--through engine|serve] [--ramps 1] [--server-args JSON]

Modes: no speculation; always on; SGLang's adaptive speculation held at step 0, with and without
its draft extend; the fused fallback with a threshold above (`on`), below (`off`) and amid
(`threshold`) the load. Every mode is a server of its own. As many as fit into the GPU's memory are
up at once; where not all fit, the next ones follow, and the first mode stays and is measured again
as their reference. `--load-format dummy --simulate-accept-length 2.8` times a model from its
config.json alone.

A run sends `concurrency` requests at once, `--output-len` tokens each, behind one of `--lead-len`
tokens: while the server reads that, all of them arrive. Otherwise chance would decide how they fall
into prefill batches, which is worth some per cent. `tok_s` is output tokens over the time from when
the first of all was done. `prefill_ms` is from then to the arrival of the last first token, and
`tpot_ms` the time per output token of the decode steps alone: from a request's first chunk of
tokens after that to its last token, over the tokens in between, mean over the requests. The step
between the two is in neither: what it lasts depends on when the client hears of the first tokens,
by as much as 1 % of 128 steps. A run in which a request ended before another's first token came is
taken again.

In each repeat every mode has the same prompts, and the order of the modes alternates. Ratios are
taken within a repeat; the median over the repeats and their range are reported. A ratio above 1 is
faster, also that of `tpot_ms`. `ratio_best` is to the faster of `nospec` and `static`. Two servers
of one mode differ by up to 1 % on an H200 for as long as they live: `--starts N` starts all of
them N times and takes the repeats of all starts together.

`--ramps N` adds N times, for each mode, a ramp: 1, 2, 4, ... requests running, up to the largest
concurrency and down again, some seconds each; it counts the tokens of each step, its transition
included. `--repeats 0` leaves out the single loads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import envelope_report, prompt_sets
from .serving import (
    MODES,
    ServerProcess,
    Timing,
    add_options,
    kv_tokens,
    provenance,
    refuse,
    result_path,
    spec_of,
    vocab_size,
)

FREE_GB = 2.0  # to be left when another server is started, arbitrary
WARM_UP = -1  # the number of the repeat that is not counted, of loads and ramps
SEEDS = itertools.count(1)
TRIES = 3  # of a run, for all requests to run together; arbitrary


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_options(parser, concurrency=[8, 32, 64, 128, 256])
    add("--modes", nargs="+", choices=MODES, default=["nospec", "static", "off", "threshold"])
    add("--prompts", choices=("random", *prompt_sets.NAMES), default="random")
    add("--repeats", type=int, default=5, help="of each load, for each start (%(default)s)")
    add("--starts", type=int, default=1, help="of every server (%(default)s)")
    add(
        "--lead-len",
        type=int,
        default=4096,
        help="tokens of a request ahead (%(default)s); 0: none",
    )
    add("--ramps", type=int, default=0, help="repeats of a ramp, after the single loads")
    add("--ramp-seconds", type=float, default=4.0, help="for each step (%(default)s)")
    add("--at-once", type=int, help="start so many servers together, and measure no memory")
    add("--append", action="store_true", help="keep the other rows of an existing result")
    add("--out", type=Path, help="default: profiling/results/envelope_<device>_<sglang>.json")
    options = parser.parse_args(argv)
    if options.at_once is not None and options.at_once < 2:
        parser.error("--at-once must be 2 or more")
    if options.ramps and options.prompts != "random":
        parser.error("--ramps sends random prompts")
    if options.prompts != "random" and options.load_format == "dummy":
        parser.error(f"--prompts {options.prompts} needs a real model, not --load-format dummy")
    return options


# ---- the servers


class Servers:
    """The servers that are up, and what their starts took.

    Args:
        options: of the command line.
        log: progress lines go there.
    """

    def __init__(self, options: argparse.Namespace, log: Callable[[str], None]) -> None:
        self.options, self.log = options, log
        self.logs = Path(tempfile.mkdtemp(prefix="envelope_"))
        self.up: list[ServerProcess] = []
        self.starts: dict[str, dict[str, Any]] = {}
        self._largest_gb = 0.0

    def groups(self, modes: list[str]) -> Iterator[list[ServerProcess]]:
        """Start as many as fit, yield them, stop all but the first, and so on."""
        waiting = list(modes)
        while waiting:
            count = self.options.at_once
            if count:
                fresh, waiting = waiting[: count - len(self.up)], waiting[count - len(self.up) :]
                self._start(fresh)
            else:
                while waiting and (len(self.up) < 2 or free_gb() > self._largest_gb + FREE_GB):
                    try:
                        self._start(waiting[:1])
                    except RuntimeError as error:
                        if len(self.up) < 3:  # more memory than this there will not be
                            raise
                        self.up.pop().stop()
                        self.log(f"{waiting[0]} waits for the next group: {error}")
                        break
                    del waiting[0]
            yield self.up
            for server in self.up[1:]:
                server.stop()
            del self.up[1:]

    def stop(self) -> None:
        for server in self.up:
            server.stop()

    def _start(self, modes: list[str]) -> None:
        free = free_gb()
        servers = [
            ServerProcess(spec_of(self.options, mode), self.logs / f"{mode}.log") for mode in modes
        ]
        self.up += servers
        for server in servers:
            server.wait_until_ready()
            held = server.info["max_total_num_tokens"]
            if held < 0.99 * kv_tokens(self.options):
                raise RuntimeError(
                    f"{server.spec.mode}: memory for {held} of {kv_tokens(self.options)} KV tokens"
                )
            start = {
                "start_s": round(server.start_s, 1),
                "plugin": server.info.get("_fused_fallback"),
            }
            if len(servers) == 1 and free:
                start["gpu_gb"] = round(free - free_gb(), 2)
            self.starts[server.spec.mode] = start
            self.log(f"{server.spec.mode} is up: {start}, log {server.log}")
        for server in servers:  # compiles and allocates what a start leaves for later
            for concurrency in sorted(
                {min(self.options.concurrency), max(self.options.concurrency)}
            ):
                server.burst(prompts(self.options, concurrency), self.options.output_len)
        if len(servers) == 1:
            self._largest_gb = max(self._largest_gb, free - free_gb())


def free_gb() -> float:
    """Free memory of the GPU in GB; 0 without one."""
    import torch

    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0


# ---- the load


def prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    """Token ids; no two calls share a prefix, so that the radix cache helps no server."""
    seed, length = next(SEEDS), options.input_len
    if options.prompts == "random":
        return prompt_sets.random_ids(count, length, vocab_size=vocab_size(options), seed=seed)
    return prompt_sets.text_ids(
        options.prompts, count, length, model_path=options.model_path, seed=seed
    )


class Rates(NamedTuple):
    """Of one run: tokens per second of all, and milliseconds of its two parts."""

    tok_s: float
    tpot_ms: float = 0.0
    prefill_ms: float = 0.0


def rates(timings: list[Timing]) -> Rates:
    """See the module's text."""
    tokens = sum(timing.tokens for timing in timings)
    begin, decoding = min(t.begin for t in timings), max(t.first for t in timings)
    seconds = max(t.last for t in timings) - begin
    per_token = []
    for timing in timings:
        later = (chunk for chunk in timing.chunks[:-1] if chunk[0] > decoding)
        since, had = next(later, (decoding, timing.chunks[0][1]))
        per_token.append((timing.last - since) / max(timing.tokens - had, 1))
    return Rates(tokens / seconds, 1e3 * statistics.mean(per_token), 1e3 * (decoding - begin))


def together(timings: list[Timing]) -> bool:
    """Whether all requests decoded at one time."""
    return max(timing.first for timing in timings) < min(timing.last for timing in timings)


def load(
    options: argparse.Namespace,
    server: ServerProcess,
    batch: list[list[int]],
    log: Callable[[str], None],
) -> list[Timing]:
    """The batch at once, or another like it where not all of it ran together."""
    for _ in range(TRIES):
        (lead,) = prompt_sets.random_ids(
            1, options.lead_len, vocab_size=vocab_size(options), seed=next(SEEDS)
        )
        timings = server.burst(batch, options.output_len, lead)
        if together(timings):
            break
        log(f"{server.spec.mode}: {len(batch)} requests did not all run at one time")
        batch = prompts(options, len(batch))
    return timings


Taken = dict[str, list[Rates]]
"""Of each repeat by mode, of servers of one start."""


def measure(
    options: argparse.Namespace,
    servers: list[ServerProcess],
    concurrency: int,
    log: Callable[[str], None],
) -> Taken:
    """All repeats of these servers at one concurrency."""
    taken: Taken = {server.spec.mode: [] for server in servers}
    for repeat in range(WARM_UP, options.repeats):
        batch = prompts(options, concurrency)
        for server in servers if repeat % 2 else servers[::-1]:
            run = rates(load(options, server, batch, log))
            if repeat != WARM_UP:
                taken[server.spec.mode].append(run)
            log(
                f"concurrency {concurrency:4d}  {server.spec.mode:10s} "
                f"{name_of(repeat)}  "
                f"{run.tok_s:9.0f} tok/s  {run.tpot_ms:8.3f} ms a token  "
                f"prefill {run.prefill_ms:7.1f} ms"
            )
    return taken


def name_of(repeat: int) -> str:
    return "warm-up " if repeat == WARM_UP else f"repeat {repeat}"


def rows_of(
    options: argparse.Namespace, concurrency: int, starts: list[Taken]
) -> list[dict[str, Any]]:
    """Rows of the result for one concurrency, of all starts together."""
    about = {"concurrency": concurrency, "input_len": options.input_len, "prompts": options.prompts}
    together = {mode: [run for taken in starts for run in taken[mode]] for mode in starts[0]}
    rows = []
    for mode in together:
        line = row(together, mode)
        if len(starts) > 1:
            each = [row(taken, mode) for taken in starts]
            ratios = [name for name in line if "ratio" in name and "spread" not in name]
            line |= {f"{name}_of_starts": [start[name] for start in each] for name in ratios}
        rows.append({**about, "mode": mode, **line})
    return rows


def row(taken: Taken, mode: str) -> dict[str, Any]:
    """Medians and ranges of a mode and of its ratios to the modes beside it."""
    ours = Rates(*zip(*taken[mode], strict=True))
    result = {**middle("tok_s", ours.tok_s, 1), **middle("tpot_ms", ours.tpot_ms, 4)}
    result |= middle("prefill_ms", ours.prefill_ms, 1)
    for other in ("nospec", "static"):
        if other in taken and other != mode:
            theirs = Rates(*zip(*taken[other], strict=True))
            result |= middle(f"ratio_{other}", divide(ours.tok_s, theirs.tok_s), 4)
            result |= middle(f"tpot_ratio_{other}", divide(theirs.tpot_ms, ours.tpot_ms), 4)
    if mode == "threshold" and {"nospec", "static"} <= taken.keys():
        pairs = zip(taken["nospec"], taken["static"], strict=True)
        best = [max(plain.tok_s, static.tok_s) for plain, static in pairs]
        result |= middle("ratio_best", divide(ours.tok_s, best), 4)
    return result


def middle(name: str, values: Any, digits: int) -> dict[str, Any]:
    values = sorted(values)
    return {
        name: round(statistics.median(values), digits),
        f"{name}_spread": [round(values[0], digits), round(values[-1], digits)],
    }


def divide(numerators: Any, denominators: Any) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


# ---- the ramp


def ramp_steps(peak: int) -> list[int]:
    """1, 2, 4, ... `peak` ... 4, 2, 1."""
    rising = [1 << i for i in range(peak.bit_length()) if 1 << i < peak]
    return [*rising, peak, *reversed(rising)]


def step_rates(begins: list[float], timings: list[Timing]) -> list[float]:
    """Tokens per second of each step; a request's tokens are spread evenly over its decoding."""
    tokens = [0.0] * (len(begins) - 1)
    for timing in timings:
        span = max(timing.last - timing.first, 1e-9)
        for i in range(len(tokens)):
            inside = min(timing.last, begins[i + 1]) - max(timing.first, begins[i])
            tokens[i] += timing.tokens * max(inside, 0.0) / span
    return [count / (begins[i + 1] - begins[i]) for i, count in enumerate(tokens)]


def measure_ramp(
    options: argparse.Namespace, servers: list[ServerProcess], log: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows so far after each repeat of the ramp: one for each step and mode."""
    steps = ramp_steps(max(options.concurrency))
    taken: dict[str, list[list[float]]] = {server.spec.mode: [] for server in servers}
    for repeat in range(WARM_UP, options.ramps):
        seed = next(SEEDS)
        for server in servers if repeat % 2 else servers[::-1]:
            mode = server.spec.mode
            begins, timings = server.order(
                "ramp",
                steps=steps,
                seconds=options.ramp_seconds,
                input_len=options.input_len,
                new_tokens=options.output_len,
                vocab_size=vocab_size(options),
                seed=seed,
            )
            found = step_rates(begins, [Timing(*timing) for timing in timings])
            if repeat != WARM_UP:
                taken[mode].append(found)
            flips = (server.state() or {}).get("flips", "no")
            listed = " ".join(f"{rate:.0f}" for rate in found)
            log(f"ramp {mode:10s} {name_of(repeat)}  {listed} tok/s, {flips} flips so far")
        if repeat == WARM_UP:
            continue
        rows = []
        for i, concurrency in enumerate(steps):
            at_step = {
                mode: [Rates(ramp[i], 1.0) for ramp in ramps] for mode, ramps in taken.items()
            }
            for mode in at_step:
                of_all = row(at_step, mode)
                figures = {
                    k: v for k, v in of_all.items() if "tpot" not in k and "prefill" not in k
                }
                rows.append({"ramp_step": i, "concurrency": concurrency, "mode": mode, **figures})
        yield rows


# ---- the result


def key(entry: dict[str, Any]) -> tuple[Any, ...]:
    load = (entry.get("ramp_step", 0), entry.get("prompts", ""), entry.get("input_len", 0))
    return *load, entry["concurrency"], MODES.index(entry["mode"])


def main() -> None:
    options = parse_args()
    refuse(options.modes)
    out = options.out or result_path("envelope")
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"rows": [], "ramp": [], "runs": []}
    if options.append and out.exists():
        result |= json.loads(out.read_text())
    about = provenance(options.commit)
    run = {name: about[name] for name in ("command", "commit", "date")}
    result |= {name: value for name, value in about.items() if name != "command"}
    result["runs"].append(run)

    def log(line: str) -> None:
        print(line, flush=True)

    def keep(rows: list[dict[str, Any]], where: str) -> None:
        """Write now, so that an end before time loses nothing."""
        kept = {key(entry): entry for entry in (*result[where], *rows)}
        result[where] = [kept[name] for name in sorted(kept)]
        run["servers"] = servers.starts
        out.write_text(json.dumps(result, indent=1) + "\n")

    taken: dict[tuple[Any, ...], list[Taken]] = defaultdict(list)
    for start in range(options.starts):
        servers = Servers(options, log)
        try:
            for group in servers.groups(options.modes):
                modes = tuple(server.spec.mode for server in group)
                for concurrency in options.concurrency if options.repeats else ():
                    starts = taken[modes, concurrency]
                    starts.append(measure(options, group, concurrency, log))
                    rows = rows_of(options, concurrency, starts)
                    keep(rows, "rows")
                    log(envelope_report.table(rows))
                if options.ramps and start == options.starts - 1:
                    for rows in measure_ramp(options, group, log):
                        keep(rows, "ramp")
        finally:
            servers.stop()
    log(f"\n{envelope_report.text(result)}\nwritten to {out}")
    envelope_report.draw(result, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
