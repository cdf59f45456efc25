"""Prompts: random token ids, and the two text sets under `prompts/`.

`prompts/NAME.jsonl` holds one list of chat messages a line, the last of them for the model to
answer: `coding`, completions and edits of code; `agentic`, tool-using dialogues cut before each
turn of the assistant, so that the contexts of one dialogue grow.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

NAMES = ("coding", "agentic")
FOLDER = Path(__file__).parent / "prompts"

Messages = list[dict[str, str]]


def random_ids(count: int, length: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """[count][length] token ids from 3 on."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def dialogues(name: str) -> list[Messages]:
    """The set's lines in their order."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def text_ids(name: str, count: int, most: int, *, model_path: str, seed: int) -> list[list[int]]:
    """`count` prompts of the set in turns, by the model's tokenizer and chat template.

    Args:
        most: tokens of a prompt at most; a longer one keeps its end.
        seed: begins every prompt, so that no other seed's prompt shares its prefix.
    """
    found = dialogues(name)
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
        prompts.append(ids[:1] + ids[1:][1 - most :] if most > 1 else ids[-1:])
    return prompts


def plain(messages: Messages) -> str:
    """The messages as text, for a model without a chat template."""
    turns = [f"{message['role']}:\n{message['content']}\n\n" for message in messages]
    return "".join(turns) + "assistant:\n"


@cache
def _tokenizer(model_path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
