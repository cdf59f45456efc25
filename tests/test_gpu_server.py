"""The shipped pair on a GPU: CUDA graphs, overlap scheduling, and every flip's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
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
ENGINE = """
import json, sys
import sglang
from fused_fallback.integration.flags import server_args

if __name__ == "__main__":
    options, waves = json.loads(sys.stdin.read())
    engine = sglang.Engine(server_args=server_args(**options))
    answers = []
    for prompts, lengths in waves:
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        answers.append([output["output_ids"] for output in outputs])
    state = engine.get_server_info()["internal_states"][0]
    answer = [answers, state.get("fused_fallback"), state.get("avg_spec_accept_length")]
    print(json.dumps(answer))
    engine.shutdown()
"""


def waves() -> list[tuple[list[list[int]], list[int]]]:
    """Waves of requests of which most end early: each crosses the threshold down and up again."""
    texts = [f"# {i}\n{PROMPTS['abcd'[i % 4]]}" for i in range(NUM_PROMPTS)]
    lengths = [20, 24, 28, 32, 36, 40, 44, 120]
    starts = [8 * wave % NUM_PROMPTS for wave in range(WAVES)]
    return [([encode(t) for t in texts[i : i + 8]], lengths) for i in starts]


def run(tmp_path: Path, **options: Any) -> Any:
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    arguments = {
        "model_path": str(PAIR / "target"),
        "dtype": "float32",
        "attention_backend": "triton",
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


def test_tokens_are_those_of_no_speculation_across_flips(tmp_path: Path) -> None:
    plain, _, _, _ = run(tmp_path)
    fallback = {
        "speculative_fused_fallback": True,
        "speculative_fused_fallback_threshold": 4,
        "speculative_fused_fallback_min_steps": 2,
    }
    answers, state, accept_length, log = run(tmp_path, **SPECULATIVE, **fallback)
    print(state, accept_length, [line for line in log.splitlines() if "fused fallback" in line])
    assert answers == plain
    assert state["flips"] >= 20
    assert state["steps_off"] > 100
    assert state["steps_on"] > 100
    assert accept_length > 2
    assert "graphs up to 16 requests" in log
