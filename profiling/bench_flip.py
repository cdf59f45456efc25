"""What a flip costs, in both directions.

    python -m fused_fallback.profiling.bench_flip --model-path TARGET --draft-model-path DRAFT
        [--concurrency 1 8 32 64] [--flip-every 16] [--load-format dummy ...]

One server whose mode flips every `--flip-every` decode steps while a fixed number of requests
decode. A step lasts from its beginning to the next one's, by CUDA events on the scheduler's forward
stream (`step_clock.py`). Medians, ms:

    on, off          steps that neither follow nor precede a flip
    first_on         the first step that speculates again, the catch-up of its drafts included
    first_off        the first step without speculation
    draft_extend     SGLang's own at the end of an on step
    catch_up         the one that a flip on adds

The claim: `first_on <= on + draft_extend`. Written to
`profiling/results/flip_<device>_<sglang>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from . import prompt_sets
from .serving import ServerProcess, add_options, provenance, result_path, spec_of, vocab_size

KINDS = ("on", "off", "first_on", "first_off", "draft_extend", "catch_up")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_options(parser, concurrency=[1, 8, 32, 64])
    add("--flip-every", type=int, default=16, help="decode steps (%(default)s)")
    add("--out", type=Path, help="default: profiling/results/flip_<device>_<sglang>.json")
    parser.set_defaults(output_len=768)
    return parser.parse_args(argv)


def sort(steps: list[dict[str, Any]], requests: int) -> dict[str, list[float]]:
    """Milliseconds by kind, of the steps that ran with all requests."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        if {before["requests"], step["requests"], after["requests"]} != {requests}:
            continue
        mode = "off" if step["off"] else "on"
        if before["off"] != step["off"]:
            kinds[f"first_{mode}"].append(step["ms"])
            kinds["catch_up"] += step["extend_ms"][:-1]
        elif after["off"] == step["off"]:
            kinds[mode].append(step["ms"])
            kinds["draft_extend"] += step["extend_ms"]
    return kinds


def row(kinds: dict[str, list[float]], requests: int) -> dict[str, Any]:
    """Medians, quartiles and the claim.

    Raises:
        ValueError: a kind of step never ran.
    """
    missing = [kind for kind in KINDS if len(kinds[kind]) < 2]
    if missing:
        raise ValueError(f"too few {', '.join(missing)} at {requests} requests: more output tokens")
    result: dict[str, Any] = {"concurrency": requests}
    for kind in KINDS:
        low, middle, high = statistics.quantiles(kinds[kind], n=4)
        result[f"{kind}_ms"] = round(middle, 4)
        result[f"{kind}_ms_quartiles"] = [round(low, 4), round(high, 4)]
    result["flips"] = len(kinds["first_on"]) + len(kinds["first_off"])
    limit = result["on_ms"] + result["draft_extend_ms"]
    result["first_on_over_limit_ms"] = round(result["first_on_ms"] - limit, 4)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["requests" + "".join(f"{kind:>14s}" for kind in KINDS) + "    first_on - limit"]
    for found in rows:
        cells = "".join(f"{found[f'{kind}_ms']:14.3f}" for kind in KINDS)
        lines.append(f"{found['concurrency']:8d}{cells}{found['first_on_over_limit_ms']:20.3f}")
    return "\n".join(lines)


def main() -> None:
    options = parse_args()
    spec = spec_of(
        options,
        "on",
        FUSED_FALLBACK_PROFILE="step_clock",
        FUSED_FALLBACK_FLIP_EVERY=str(options.flip_every),
    )
    out = options.out or result_path("flip")
    out.parent.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(spec, Path(tempfile.mkdtemp(prefix="flip_")) / "server.log")
    rows: list[dict[str, Any]] = []
    try:
        server.wait_until_ready()
        print(f"the server is up after {server.start_s:.0f} s, log {server.log}", flush=True)
        for requests in options.concurrency:
            for seed in range(2):  # the first is a warm-up
                prompts = prompt_sets.random_ids(
                    requests, options.input_len, vocab_size=vocab_size(options), seed=seed
                )
                server.state()
                server.burst(prompts, options.output_len)
            rows.append(row(sort(server.state()["clock"], requests), requests))
            print(table(rows[-1:]), flush=True)
            result = {**provenance(options.commit), "flip_every": options.flip_every, "rows": rows}
            out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        server.stop()
    print(f"\n{table(rows)}\nwritten to {out}")


if __name__ == "__main__":
    main()
