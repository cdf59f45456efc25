"""Tokens per second over concurrency: no speculation, always on, step 0, off, and the threshold.

    python profiling/bench_envelope.py --model-path TARGET --draft-model-path DRAFT
        [--modes nospec static off threshold] [--concurrency 8 32 64 128 256] [--repeats 5]

Every mode is a server of its own (`sglang.Engine` in a subprocess, as a user would start it). All
are up at the same time and take turns, so that each repeat compares them on one machine within
seconds. `--load-format dummy` with `--simulate-accept-length 2.8` times a model from its
config.json alone.

A run sends `concurrency` requests at once: random prompts of `--input-len` tokens, `--output-len`
tokens each. `tok_s` is output tokens over the whole time; `tpot_ms` is the time per output token
without prefill: the same prompts are sent for one token more, and that time is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODES = ("nospec", "static", "step0_warm", "step0_cold", "off", "threshold")
RESULTS = Path(__file__).parent / "results"
WARMUP_OUTPUT = 8


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model-path", required=True)
    add("--draft-model-path", required=True)
    add("--modes", nargs="+", choices=MODES, default=["nospec", "static", "off", "threshold"])
    add("--concurrency", nargs="+", type=int, default=[8, 32, 64, 128, 256])
    add("--input-len", type=int, default=256)
    add("--output-len", type=int, default=128)
    add("--repeats", type=int, default=5)
    add("--threshold", type=int, default=192, help="of the threshold mode (%(default)s)")
    add("--simulate-accept-length", type=float, help="SGLANG_SIMULATE_ACC_LEN of every server")
    add("--load-format", default="auto")
    add("--kv-tokens", type=int, help="size of each KV pool (default: what the load needs)")
    add("--server-args", type=json.loads, default={}, metavar="JSON", help="further ServerArgs")
    add("--commit", help="recorded; default: the repository's HEAD")
    add("--out", type=Path, help="default: profiling/results/envelope_<device>_<sglang>.json")
    add("--serve", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# ---- one server, in a process of its own


def server_options(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What `sglang.Engine` (through `flags.server_args`) is given in this mode."""
    most = max(options.concurrency)
    tokens = most * (options.input_len + options.output_len + 64)
    arguments: dict[str, Any] = {
        "model_path": options.model_path,
        "load_format": options.load_format,
        "skip_tokenizer_init": True,
        "max_running_requests": most,
        "cuda_graph_max_bs_decode": most,
        "max_total_tokens": options.kv_tokens or tokens,
        "mem_fraction_static": 0.8,
        "random_seed": 1,
        "port": 30000 + 500 * MODES.index(mode),  # ports are found upwards from here
        **options.server_args,
    }
    if mode == "nospec":
        return arguments
    arguments |= {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": options.draft_model_path,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    if mode.startswith("step0"):
        config = Path(tempfile.mkdtemp()) / "step0.json"
        config.write_text(json.dumps({"1": {"candidate_steps": [0]}}))
        arguments |= {"speculative_adaptive": True, "speculative_adaptive_config": str(config)}
    if mode in ("off", "threshold"):
        arguments["speculative_fused_fallback"] = True
        arguments["speculative_fused_fallback_threshold"] = (
            1 if mode == "off" else options.threshold
        )
    return arguments


def serve(options: argparse.Namespace, mode: str) -> None:
    """Answer one JSON line with timings for each JSON line of prompts."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if mode == "step0_cold":
        os.environ["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
    if options.simulate_accept_length:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(options.simulate_accept_length)
    import sglang
    from fused_fallback.integration.flags import server_args

    began = time.perf_counter()
    engine = sglang.Engine(server_args=server_args(**server_options(options, mode)))
    print(json.dumps({"start_s": time.perf_counter() - began}), file=answers, flush=True)

    def timed(prompts: list[list[int]], new_tokens: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        began = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert all(len(output["output_ids"]) >= new_tokens for output in outputs)
        return time.perf_counter() - began

    for line in sys.stdin:
        work = json.loads(line)
        seconds = [timed(prompts, n) for prompts, n in work]
        state = engine.get_server_info()["internal_states"][0].get("fused_fallback")
        print(json.dumps({"seconds": seconds, "state": state}), file=answers, flush=True)
    engine.shutdown()


# ---- all servers in turns


class Server:
    """A mode's subprocess."""

    def __init__(self, mode: str, log: Path) -> None:
        self.mode, self.log = mode, log
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.mode} ended, see {self.log}:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def run(self, work: list[tuple[list[list[int]], int]]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        return self.answer()


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts; no two share a prefix, so that the radix cache never helps."""
    import random

    generator = random.Random(seed)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(options: argparse.Namespace, servers: list[Server]) -> list[dict[str, Any]]:
    """All repeats of all modes, as the rows of the result file."""
    config = json.loads((Path(options.model_path) / "config.json").read_text())
    rows = []
    for concurrency in options.concurrency:
        taken: dict[str, list[tuple[float, float]]] = {server.mode: [] for server in servers}
        for repeat in range(-1, options.repeats):  # the first is a warm-up
            order = servers if repeat % 2 else servers[::-1]
            for server in order:
                seed = hash((concurrency, repeat, server.mode)) & 0xFFFFFFFF
                first, second = (
                    prompts(concurrency, options.input_len, config["vocab_size"], seed + i)
                    for i in (0, 1)
                )
                work = [(first, options.output_len), (second, 1)]
                whole, prefill = server.run(work)["seconds"]
                if repeat >= 0:
                    taken[server.mode].append((whole, prefill))
                print(
                    f"concurrency {concurrency:4d}  {server.mode:10s} repeat {repeat:2d}  "
                    f"{concurrency * options.output_len / whole:9.0f} tok/s",
                    flush=True,
                )
        for mode, times in taken.items():
            tokens = concurrency * options.output_len
            rates = [tokens / whole for whole, _ in times]
            per_token = [1e3 * (w - p) / (options.output_len - 1) for w, p in times]
            rows.append(
                {
                    "concurrency": concurrency,
                    "mode": mode,
                    "tok_s": round(statistics.median(rates), 1),
                    "tok_s_spread": [round(min(rates), 1), round(max(rates), 1)],
                    "tpot_ms": round(statistics.median(per_token), 4),
                    "tpot_ms_spread": [round(min(per_token), 4), round(max(per_token), 4)],
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens per second and its ratio to no speculation, and the time per token."""
    by_key = {(row["concurrency"], row["mode"]): row for row in rows}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = ["concurrency  mode          tok/s   /nospec   tpot ms   /nospec"]
    for concurrency in dict.fromkeys(row["concurrency"] for row in rows):
        base = by_key.get((concurrency, "nospec"))
        for mode in modes:
            row = by_key[concurrency, mode]
            ratio = row["tok_s"] / base["tok_s"] if base else float("nan")
            speed = base["tpot_ms"] / row["tpot_ms"] if base else float("nan")
            lines.append(
                f"{concurrency:11d}  {mode:10s} {row['tok_s']:9.0f} {ratio:9.3f} "
                f"{row['tpot_ms']:9.3f} {speed:9.3f}"
            )
    return "\n".join(lines)


def _head() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    options = parse_args()
    if options.serve:
        serve(options, options.serve)
        return
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    name = f"envelope_{device.split()[-1].lower()}_{version('sglang')}.json"
    out = options.out or RESULTS / name
    out.parent.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="envelope_"))
    servers = [Server(mode, logs / f"{mode}.log") for mode in options.modes]
    starts = {server.mode: round(server.answer()["start_s"], 1) for server in servers}
    print(f"servers are up after {starts} s, logs in {logs}", flush=True)
    try:
        rows = measure(options, servers)
    finally:
        for server in servers:
            server.process.stdin.close()
            server.process.wait(60)
    result = {
        "device": device,
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "commit": options.commit or _head(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "start_s": starts,
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
