"""What an off step adds to a decode step without speculation, by where its draft step runs.

    python -m fused_fallback.profiling.bench_off_step --output off_step.json
        [--shape 8b] [--rows 8 64 128] [--layers 32]

No server: an imitation of its decode steps on the GPU. The target is a CUDA graph of its layers'
matmuls, norms and small kernels and of lm_head; then come argmax and the dozen small kernels that
SGLang runs between two steps, with the tokens copied to the host on a second stream. The host
enqueues the steps ahead. To that is added:

    tiny kernel     one tiny kernel on a third stream, and no draft step: what another busy stream
                    costs alone
    aux             the aux hidden states in the target's graph, and no draft step
    own stream      aux, and the draft step in a graph of its own on a third stream
    in order        aux, and that graph on the target's stream
    beside          aux, and the draft step as a branch of the target's next graph

Medians over rounds in which the variants take turns, of microseconds a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..bindings.graph import DraftStepGraphRunner
from ..integration.demo.checkout import commit
from .bench_draft_step import write_record
from .draft_step_peers import SHAPES, Shape, random_layer, random_step

VOCAB = 128256  # Llama 3's
STEPS, ROUNDS = 12, 15  # a round's steps are enqueued at once
Run = Callable[[], None]


class Target:
    """Decode steps of `rows` requests, with random weights of a Llama's shape."""

    def __init__(self, shape: Shape, rows: int, layers: int) -> None:
        hidden, heads = shape.hidden, shape.heads + 2 * shape.kv_heads

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5

        self.layers = [
            (
                normal(heads * shape.head_dim, hidden),
                normal(hidden, hidden),
                normal(2 * shape.intermediate, hidden),
                normal(hidden, shape.intermediate),
            )
            for _ in range(layers)
        ]
        self.embedding, self.lm_head = normal(VOCAB, hidden), normal(VOCAB, hidden)
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.aux_layers = {layers - 1 - 2 * i for i in range(shape.num_aux)}
        self.stream, self.copies, self.other = (torch.cuda.Stream() for _ in range(3))

        def integers(high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.randint(1, high, (rows,), device="cuda", dtype=dtype)

        self.ids, self.seq_lens, self.slots = integers(VOCAB), integers(2048), integers(4096)
        self.inputs = [torch.zeros_like(self.ids) for _ in range(3)]
        self.requests = torch.randperm(rows, device="cuda")
        self.relayed = [torch.zeros(rows, device="cuda", dtype=torch.int64) for _ in range(2)]
        self.lengths = torch.zeros(rows + 1, device="cuda", dtype=torch.int32)
        self.pages, self.table = torch.zeros(2, rows, 64, device="cuda", dtype=torch.int32)
        self.scratch = torch.zeros(2, 512, device="cuda")
        self.on_host = torch.zeros(rows, dtype=torch.int64, pin_memory=True)

    def forward(self, aux: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits float32, and the aux hidden states side by side."""
        x, kept = self.embedding[self.ids], []
        residual = torch.zeros_like(x)
        for i, (qkv, output, gate_up, down) in enumerate(self.layers):
            if aux and i in self.aux_layers:
                kept.append(x + residual)
            attended = F.linear(self._normed(x), qkv)[:, : x.shape[1]].contiguous()
            for _ in range(3):  # rope, store and attention of short sequences
                attended = attended * 1.0
            x = x + F.linear(attended, output)
            gate, up = F.linear(self._normed(x), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        logits = F.linear(self._normed(x), self.lm_head).float()
        return logits, torch.cat(kept, -1) if aux else None

    def between(self, tokens: torch.Tensor) -> None:
        """The small kernels from a step's tokens to the next step's graph."""
        self.relayed[0][self.requests] = tokens
        self.copies.wait_stream(self.stream)
        with torch.cuda.stream(self.copies):
            self.on_host.copy_(tokens, non_blocking=True)
        self.relayed[1][self.requests] = self.seq_lens
        ids = self.relayed[0][self.requests]
        torch._foreach_copy_(self.inputs, [ids, self.seq_lens.clamp(min=0), self.slots])
        self.lengths[1:].copy_(self.seq_lens)
        self.pages.copy_(self.table)
        self.scratch[0].copy_(self.scratch[1])
        self.scratch[1].fill_(0)

    def captured(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = work()
        return graph, result

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[1],), self.norm, 1e-5)


def variants(
    target: Target, at_once: DraftStepGraphRunner, later: DraftStepGraphRunner, rows: int
) -> dict[str, Run]:
    """One step of each kind."""
    plain, (plain_logits, _) = target.captured(lambda: target.forward(aux=False))
    capturing, (logits, aux) = target.captured(lambda: target.forward(aux=True))

    def with_branch() -> tuple[torch.Tensor, torch.Tensor | None]:
        with later.beside(rows):
            return target.forward(aux=True)

    branched, (branched_logits, branched_aux) = target.captured(with_branch)
    tiny = torch.zeros(8, device="cuda")

    def stage(runner: DraftStepGraphRunner, tokens: torch.Tensor, aux: torch.Tensor | None) -> None:
        runner.stage(
            aux_hidden_states=aux,
            next_token_ids=tokens,
            seq_lens=target.seq_lens,
            req_pool_indices=target.requests,
            out_cache_loc=target.slots,
        )

    def without() -> torch.Tensor:
        plain.replay()
        tokens = plain_logits.argmax(-1)
        target.seq_lens.add_(0)
        return tokens

    def no_speculation() -> None:
        target.between(without())

    def tiny_kernel() -> None:
        tokens = without()
        target.other.wait_stream(target.stream)
        with torch.cuda.stream(target.other):
            tiny.add_(1)
        target.between(tokens)

    def aux_alone() -> None:
        capturing.replay()
        tokens = logits.argmax(-1)
        target.seq_lens.add_(0)
        target.between(tokens)

    def own_stream() -> None:
        at_once.before_replay(rows)
        capturing.replay()
        tokens = logits.argmax(-1)
        stage(at_once, tokens, aux)
        target.between(tokens)

    def in_order() -> None:
        capturing.replay()
        tokens = logits.argmax(-1)
        stage(later, tokens, aux)
        later.write()
        target.between(tokens)

    def beside() -> None:
        later.before_replay(rows)
        branched.replay()
        tokens = branched_logits.argmax(-1)
        stage(later, tokens, branched_aux)
        target.between(tokens)

    return {
        "no speculation": no_speculation,
        "tiny kernel": tiny_kernel,
        "aux": aux_alone,
        "own stream": own_stream,
        "in order": in_order,
        "beside": beside,
    }


def step_us(target: Target, run: Run) -> float:
    """Microseconds of one of many steps that the host enqueues ahead."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(target.stream):
        run()
        begin.record()
        for _ in range(STEPS):
            run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / STEPS


def measure(shape: Shape, rows: int, layers: int) -> list[dict[str, Any]]:
    """A result for each variant."""
    layer = random_layer(shape)
    step = random_step(layer, rows)
    written = ("kept_hidden_states", "k_buffer", "v_buffer")
    at_once, later = (
        DraftStepGraphRunner(
            layer=layer,
            batch_sizes=[rows],
            beside_from=beside_from,
            **{name: step[name] for name in written},
        )
        for beside_from in (rows + 1, 1)
    )
    target = Target(shape, rows, layers)
    runs = variants(target, at_once, later, rows)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(ROUNDS + 1):  # the first warms up
        for name in runs if repeat % 2 else reversed(runs):
            later.write()
            took = step_us(target, runs[name])
            if repeat:
                times[name].append(took)
    results = []
    for name, taken in times.items():
        added = [a - b for a, b in zip(taken, times["no speculation"], strict=True)]
        results.append(
            {
                "rows": rows,
                "draft_step": name,
                "step_us": round(statistics.median(taken), 1),
                "added_us": round(statistics.median(added), 1),
                "added_us_spread": [round(min(added), 1), round(max(added), 1)],
            }
        )
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--layers", type=int, default=32, help="of the target (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=commit(), help="recorded in the JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_off_step needs a GPU")
    results: list[dict[str, Any]] = []
    for rows in arguments.rows:
        results += measure(SHAPES[arguments.shape], rows, arguments.layers)
        torch.cuda.empty_cache()
        about = {"shape": arguments.shape, "layers": arguments.layers}
        write_record(arguments.output, arguments.commit, **about, rows=results)


if __name__ == "__main__":
    main()
