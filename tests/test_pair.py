"""The shipped EAGLE-3 pair: files, shapes and the record of its training.

How it behaves in SGLang is tested where SGLang runs; the evaluation's arithmetic is tested here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_fallback.integration.demo import train_pair as tp
from safetensors.torch import load_file
from tokenizers import Tokenizer

PAIR = Path(os.environ.get("FUSED_FALLBACK_PAIR", Path(tp.__file__).parent / "pair"))
TEXTS = [
    "def f(x):\n\treturn  x\n",
    "naïve café, „quoted“",
    "漢字 и кириллица",
    "🙂\x00\r\n",
    "   \n\n  ",
]


@pytest.fixture(scope="module")
def pair() -> tuple[tp.Target, tp.Draft]:
    return tp.load_pair(PAIR)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))


def read(name: str) -> dict:
    return json.loads((PAIR / name).read_text())


def test_files_and_size() -> None:
    files = {
        p.relative_to(PAIR).as_posix(): p.stat().st_size for p in PAIR.rglob("*") if p.is_file()
    }
    assert set(files) == {
        "training.json",
        "target/config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "draft/config.json",
        "draft/model.safetensors",
    }
    assert sum(files.values()) <= 8_000_000


def test_configs_fit_each_other() -> None:
    target, draft = read("target/config.json"), read("draft/config.json")
    assert target["architectures"] == ["LlamaForCausalLM"]
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
    assert draft["target_hidden_size"] == target["hidden_size"] == draft["hidden_size"]
    assert draft["vocab_size"] == target["vocab_size"] > draft["draft_vocab_size"]
    assert draft["num_hidden_layers"] == 1
    aux_layers = draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert len(aux_layers) == 3
    # SGLang captures the output of layer i at layer i + 1, which has to exist.
    assert max(aux_layers) + 1 < target["num_hidden_layers"]
    assert target["num_key_value_heads"] < target["num_attention_heads"]
    assert target["head_dim"] == draft["head_dim"] == 64


@pytest.mark.parametrize("part", ["target", "draft"])
def test_weights_are_bf16_and_complete(part: str) -> None:
    weights = load_file(PAIR / part / "model.safetensors")
    expected = (
        tp.Target() if part == "target" else tp.Draft(torch.arange(tp.DRAFT_VOCAB))
    ).state_dict()
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in expected.items()}
    for name, tensor in weights.items():
        wanted = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
        assert tensor.dtype == wanted, name
        assert tensor.float().isfinite().all(), name


def test_draft_vocabulary_maps_into_the_target_vocabulary() -> None:
    weights = load_file(PAIR / "draft" / "model.safetensors")
    ids = weights["d2t"] + torch.arange(tp.DRAFT_VOCAB)
    assert (ids.diff() > 0).all()
    assert 0 <= ids[0] and ids[-1] < tp.VOCAB
    assert weights["d2t"].any()
    assert torch.equal(weights["t2d"].nonzero().flatten(), ids)


def test_tokenizer_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < tp.VOCAB


def test_auto_tokenizer_agrees(tokenizer: Tokenizer) -> None:
    """In a process of its own: without a GPU, transformers needs the stand-in for torchvision."""
    script = """if True:
        import json, sys
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        ids = [tokenizer.encode(text) for text in json.loads(sys.argv[2])]
        texts = [tokenizer.decode(i) for i in ids]
        print(json.dumps([ids, texts, tokenizer.bos_token_id, tokenizer.eos_token_id]))
    """
    standin = "" if torch.cuda.is_available() else str(Path(tp.__file__).parent / "standin")
    result = subprocess.run(
        [sys.executable, "-c", script, str(PAIR / "target"), json.dumps(TEXTS)],
        env=os.environ | {"PYTHONPATH": standin},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    ids, texts, bos, eos = json.loads(result.stdout)
    assert ids == [tokenizer.encode(text).ids for text in TEXTS]
    assert texts == TEXTS
    assert bos == eos == read("target/config.json")["eos_token_id"]


def test_record_of_the_training() -> None:
    record = read("training.json")
    assert {"device", "python", "torch", "seed", "date", "git_commit", "wall_seconds"} <= set(
        record
    )
    assert record["target"]["tokens"] > record["corpus_tokens"]
    figures = record["evaluation"]
    assert figures["accept_length"] > 2.0
    assert figures["accept_length_without_old_draft_kv"] < figures["accept_length"]
    assert figures["distinct_continuations"] == figures["prompts"]


def test_shipped_weights_still_draft_well(
    pair: tuple[tp.Target, tp.Draft], tokenizer: Tokenizer
) -> None:
    target, draft = pair
    prompts = tp.held_out_prompts(tokenizer, num=4, length=48)
    ids = tp.generate(target, prompts, 48)
    assert tp.accept_statistics(tp.correct_drafts(target, draft, ids), 48)[0] > 2.0


def test_one_pass_count_equals_drafting_step_by_step(pair: tuple[tp.Target, tp.Draft]) -> None:
    """`correct_drafts` scores all roots at once; here the drafts themselves are fed back."""
    target, draft = pair
    torch.manual_seed(0)
    ids = tp.generate(target, torch.randint(tp.VOCAB, (2, 12)), 16)
    counts = tp.correct_drafts(target, draft, ids)
    aux = target(ids)[1]
    for root in range(11, counts.shape[1]):
        text = ids[:, : root + 2]
        states = torch.cat([aux[:, : root + 1], torch.zeros(2, 2, aux.shape[-1])], dim=1)
        for step in range(tp.NUM_DRAFT_STEPS):
            rows = text[:, 1:]
            logits = list(
                draft.unroll(target.model["embed_tokens"](rows), states[:, : rows.shape[1]])
            )
            proposed = draft.hot_token_ids[logits[step][:, root + step].argmax(-1)]
            text = torch.cat([text, proposed[:, None]], dim=1)
        hits = (text[:, root + 2 :] == ids[:, root + 2 : root + 5]).long().cumprod(1).sum(1)
        assert torch.equal(hits, counts[:, root])


def test_a_stale_window_hides_only_older_rows(pair: tuple[tp.Target, tp.Draft]) -> None:
    """With `window=1` a drafting does not depend on anything before its root."""
    target, draft = pair
    torch.manual_seed(0)
    ids = torch.randint(tp.VOCAB, (1, 16))
    aux, embeds = target(ids)[1], target.model["embed_tokens"](ids[:, 1:])
    changed = aux[:, :-1].clone()
    changed[:, :8] = 0
    for window, same in ((1, True), (None, False)):
        before, after = (list(draft.unroll(embeds, a, window)) for a in (aux[:, :-1], changed))
        for step in range(tp.NUM_DRAFT_STEPS):
            rows = slice(8 + step, None)
            assert torch.equal(before[step][:, rows], after[step][:, rows]) == same


def test_held_out_modules_are_not_trained_on() -> None:
    training, held_out = tp.stdlib_modules()
    assert len(training) > 5 * len(held_out) > 50
    assert not set(training) & set(held_out)
    prompt = tp.held_out_prompts(
        Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")), 3, 32
    )
    assert prompt.shape == (3, 32)
    assert len({tuple(row) for row in prompt.tolist()}) == 3
