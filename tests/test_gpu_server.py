"""The shipped pair on a GPU: CUDA graphs, overlap scheduling, and every flip's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_server import PAIR, SPECULATIVE
from test_server import PROMPTS, encode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, for CUDA graphs and overlap scheduling"
)

NUM_PROMPTS, WAVES = 64, 11
NEAR_TIE = 0.125  # of two log probabilities in bfloat16, arbitrary
ENGINE = """
import json, sys
import sglang
from fused_fallback.integration.flags import server_args

if __name__ == "__main__":
    options, waves = json.loads(sys.stdin.read())
    engine = sglang.Engine(server_args=server_args(**options))
    answers, margins = [], []
    for prompts, lengths in waves:
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        for output in engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=2
        ):
            answers.append(output["output_ids"])
            tops = output["meta_info"]["output_top_logprobs"]
            margins.append([first[0] - second[0] for first, second in tops])
    state = engine.get_server_info()["internal_states"][0]
    accept_length = state.get("avg_spec_accept_length")
    print(json.dumps([answers, margins, state.get("fused_fallback"), accept_length]))
    engine.shutdown()
"""


def waves() -> list[tuple[list[list[int]], list[int]]]:
    """Waves of requests of which most end early: each crosses the threshold down and up again."""
    texts = [f"# {i}\n{PROMPTS['abcd'[i % 4]]}" for i in range(NUM_PROMPTS)]
    lengths = [20, 24, 28, 32, 36, 40, 44, 120]
    starts = [8 * wave % NUM_PROMPTS for wave in range(WAVES)]
    return [([encode(t) for t in texts[i : i + 8]], lengths) for i in starts]


def run(tmp_path: Path, **options: Any) -> Any:
    tmp_path.mkdir()
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    arguments = {
        "model_path": str(PAIR / "target"),
        "max_running_requests": 16,
        "max_total_tokens": 16384,
        "context_length": 1024,
        "log_level": "info",
        **options,
    }
    ended = subprocess.run(
        [sys.executable, program],
        input=json.dumps([arguments, waves()]),
        capture_output=True,
        text=True,
        timeout=400,
    )
    log = ended.stderr + ended.stdout
    assert ended.returncode == 0, log[-4000:]
    return *json.loads(ended.stdout.strip().splitlines()[-1]), log


def first_differences(plain: list[list[int]], other: list[list[int]]) -> list[tuple[int, int]]:
    """(request, position) where each unequal answer leaves the plain one."""
    assert [len(answer) for answer in plain] == [len(answer) for answer in other]
    return [
        (request, next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
        for request, (a, b) in enumerate(zip(plain, other, strict=True))
        if a != b
    ]


@pytest.mark.parametrize("attention_backend", ["fa3", "triton"])
def test_tokens_are_those_of_no_speculation_across_flips(
    tmp_path: Path, attention_backend: str
) -> None:
    """In bfloat16: an answer may leave the plain server's only where its two top logits tie."""
    fallback = {
        "speculative_fused_fallback": True,
        "speculative_fused_fallback_threshold": 4,
        "speculative_fused_fallback_min_steps": 2,
    }
    options = {"attention_backend": attention_backend}
    with ThreadPoolExecutor() as threads:
        server = threads.submit(run, tmp_path / "plain", port=31000, **options)
        other = threads.submit(
            run, tmp_path / "other", port=31500, **options, **SPECULATIVE, **fallback
        )
        plain, margins, _, _, _ = server.result()
        answers, _, state, accept_length, log = other.result()
    differences = first_differences(plain, answers)
    print(state, accept_length, [(r, i, margins[r][i]) for r, i in differences])
    for request, position in differences:
        assert margins[request][position] < NEAR_TIE, f"request {request}, position {position}"
    assert len(differences) < len(plain) / 4
    assert state["flips"] >= 20
    assert state["steps_off"] > 100
    assert state["steps_on"] > 100
    assert accept_length > 2
    assert "graphs up to 16 requests" in log
