"""Prompts: random token ids, and the two text sets under `prompts/`.

`prompts/NAME.jsonl` holds one dialogue a line, a list of chat messages: `coding`, completions and
edits of code; `agentic`, work through tools whose results are JSON. Every turn of the user makes a
prompt of the dialogue up to there, so that the contexts of one dialogue grow.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("coding", "agentic")
HEAD_TOKENS = 32  # that a shortened prompt keeps of its beginning: no other has the same
FOLDER = Path(__file__).parent / "prompts"

Messages = list[dict[str, str]]


def random_ids(count: int, length: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """[count][length] token ids from 3 on."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def contexts(name: str) -> list[Messages]:
    """The set's prompts, dialogue by dialogue, the shortest context of each first."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues: list[Messages] = [json.loads(line) for line in lines]
    return [
        dialogue[:end]
        for dialogue in dialogues
        for end in range(1, len(dialogue) + 1)
        if dialogue[end - 1]["role"] == "user"
    ]


def text_ids(name: str, count: int, most: int, *, model_path: str, seed: int) -> list[list[int]]:
    """`count` prompts of the set in turns, by the model's tokenizer and chat template if any.

    Args:
        most: tokens of a prompt at most; a longer one loses what follows its head.
        seed: begins every prompt, so that no other seed's prompt shares its prefix.
    """
    found = contexts(name)
    chosen = [found[i % len(found)] for i in range(count)]
    tokenizer = _tokenizer(model_path)
    prompts = []
    for i, messages in enumerate(chosen):
        head = {"role": "system", "content": f"Session {seed}-{i // len(found)}."}
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                [head, *messages], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(plain([head, *messages]))
        cut = max(len(ids) - most, 0)
        prompts.append(ids[:HEAD_TOKENS] + ids[HEAD_TOKENS + cut :])
    return prompts


def plain(messages: Messages) -> str:
    """The messages as text, for a model without a chat template."""
    turns = [f"{message['role']}:\n{message['content']}\n\n" for message in messages]
    return "".join(turns) + "assistant:\n"


@cache
def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
