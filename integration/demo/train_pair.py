"""Train the small EAGLE-3 pair of the demo and the tests on the standard library's own sources.

    python -m fused_fallback.integration.demo.train_pair --out DIR [--minutes N | --steps N]
        [--device cuda|cpu]

`DIR/target` is a `LlamaForCausalLM` and `DIR/draft` a `LlamaForCausalLMEagle3` as SGLang loads
them; `DIR/training.json` records how they were made and how well the draft predicts the target on
modules that neither has seen.

Rows of the draft follow SGLang: row p pairs the target's aux states of position p with token p+1,
is rotated at position p and predicts token p+2. At draft step j > 0 the target has no states for
the row yet: it takes the draft's own output of row p-1, before the final norm, instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from .checkout import commit

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
NUM_LAYERS, TARGET_MLP, DRAFT_MLP = 4, 512, 384
VOCAB, DRAFT_VOCAB = 1024, 768
AUX_LAYERS = (0, 1, 2)  # whose outputs the draft sees; SGLang cannot capture the last layer's
NORM_EPS, ROPE_THETA, MAX_POSITIONS = 1e-5, 10000.0, 2048
END_OF_TEXT = "<|endoftext|>"  # id 0: ends and therefore also begins every module
NUM_DRAFT_STEPS = 3
PROMPT_TOKENS, NEW_TOKENS = 64, 128  # of the evaluation

# Left out: tables rather than code, generated text, and parts that many installations lack.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idlelib encodings pydoc_data turtledemo lib2to3 "
    "distutils ensurepip".split()
)
HELD_OUT_SHARE = 12  # one module in so many, by a hash of its path: the same in every version


# --------------------------------------------------------------------------------------------- text


def stdlib_modules() -> tuple[dict[str, str], dict[str, str]]:
    """The running Python's standard library as (training, held out): {relative path: text}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts[:-1]) or path.stat().st_size < 500:
            continue
        part = training if zlib.crc32(name.as_posix().encode()) % HELD_OUT_SHARE else held_out
        part[name.as_posix()] = path.read_text(encoding="utf-8", errors="ignore")
    return training, held_out


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB ids: it encodes any text and decodes it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one int64 stream, each ended by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in [*encoding.ids, end]]
    return torch.tensor([end, *ids])


def held_out_prompts(tokenizer: Tokenizer, num: int, length: int, seed: int = 0) -> Tensor:
    """[num, length] int64: parts of the held-out modules in turn, each beginning with a line."""
    rng = random.Random(seed)
    texts = list(stdlib_modules()[1].values())
    rng.shuffle(texts)
    prompts: list[list[int]] = []
    while len(prompts) < num:
        text = texts[len(prompts) % len(texts)]
        start = text.find("\n", rng.randrange(len(text) // 2)) + 1
        ids = tokenizer.encode(text[start : start + 12 * length]).ids
        if len(ids) < length:
            rng.shuffle(texts)
            continue
        prompts.append(ids[:length])
    return torch.tensor(prompts)


# ------------------------------------------------------------------------------------------- models


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, halves paired (neox). x [B, heads, T, HEAD_DIM], positions [T]."""
    frequency = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angle = positions[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def norm() -> nn.RMSNorm:
    return nn.RMSNorm(HIDDEN, eps=NORM_EPS)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values the caller keeps."""

    def __init__(self, width_in: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width_in, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(width_in, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(width_in, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, width_in] -> [B, T, HIDDEN] and the (keys, values) of `past` and x.

        Without a mask it is causal, and `past` may then come with a single row only.
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None and past is None
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, width, bias=False)
        self.up_proj = nn.Linear(HIDDEN, width, bias=False)
        self.down_proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(HIDDEN), Mlp(TARGET_MLP)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.dropout = dropout

    def forward(
        self, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, past = self.self_attn(self.input_layernorm(x), positions, past, None)
        x = x + F.dropout(out, self.dropout, self.training)
        out = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(out, self.dropout, self.training), past


class Target(nn.Module):
    """State dict in Hugging Face's Llama names."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCAB, HIDDEN),
                "layers": nn.ModuleList(TargetLayer(dropout) for _ in range(NUM_LAYERS)),
                "norm": norm(),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(
        self, ids: Tensor, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """ids [B, T] -> logits [B, T, VOCAB], aux_hidden_states [B, T, 3 * HIDDEN], past.

        A call with the `past` of an earlier one takes one id a row.
        """
        start = past[0][0].shape[2] if past else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        x, aux, new_past = self.model["embed_tokens"](ids), [], []
        for i, layer in enumerate(self.model["layers"]):
            x, kv = layer(x, positions, past[i] if past else None)
            new_past.append(kv)
            if i in AUX_LAYERS:
                aux.append(x)
        return self.lm_head(self.model["norm"](x)), torch.cat(aux, dim=-1), new_past


class DraftLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(2 * HIDDEN), Mlp(DRAFT_MLP)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            norm(),
            norm(),
            norm(),
        )

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        past: tuple[Tensor, Tensor] | None,
        mask: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        out, past = self.self_attn(x, positions, past, mask)
        x = hidden + out
        return x + self.mlp(self.post_attention_layernorm(x)), past


class Draft(nn.Module):
    """State dict in EAGLE-3's names.

    d2t[i] is the target id of draft id i, minus i; t2d[id] says whether target id has a draft id.
    """

    def __init__(self, hot_token_ids: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(len(AUX_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer, self.norm = DraftLayer(), norm()
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
        self.register_buffer(
            "d2t", hot_token_ids - torch.arange(DRAFT_VOCAB, device=hot_token_ids.device)
        )
        self.register_buffer(
            "t2d", torch.zeros(VOCAB, dtype=torch.bool, device=hot_token_ids.device)
        )
        self.t2d[hot_token_ids] = True

    @property
    def hot_token_ids(self) -> Tensor:
        return self.d2t + torch.arange(DRAFT_VOCAB, device=self.d2t.device)

    def unroll(
        self, embeds: Tensor, aux_hidden_states: Tensor, window: int | None = None
    ) -> Iterator[Tensor]:
        """Logits [B, R, DRAFT_VOCAB] of each draft step, for every row as if it were drafted.

        embeds [B, R, HIDDEN] of token p+1, aux_hidden_states [B, R, 3 * HIDDEN] of position p.
        Step j at row p belongs to the drafting rooted at row p-j (void where p < j) and finds in
        the KV pool: step 0's rows up to its root, then one row of each step. `window` shows only
        that many of step 0's rows; 1 is a pool without any KV from before the root.
        """
        row = torch.arange(embeds.shape[1], device=embeds.device)
        back = row[:, None] - row
        hidden, past = self.fc(aux_hidden_states), None
        for j in range(NUM_DRAFT_STEPS):
            visible = [(back >= j) & (back < j + (window or len(row)))]
            visible += [back == j - i for i in range(1, j + 1)]
            mask = torch.cat(visible, dim=1)
            hidden, past = self.midlayer(embeds, hidden, row, past, mask)
            yield self.lm_head(self.norm(hidden))
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]


# ----------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Budget:
    """What one stage may spend: it ends when `minutes` or `steps` (if any) are used up."""

    steps: int | None
    minutes: float
    batch: int
    sequence: int
    learning_rate: float


def optimise(
    name: str,
    module: nn.Module,
    loss_of: Callable[[], Tensor],
    budget: Budget,
    report: Callable[[], str] = lambda: "",
) -> dict[str, float]:
    """AdamW with a short warm-up and linear decay, on the loss of a batch that `loss_of` draws.

    Returns the steps taken, the tokens they saw and the last loss.
    """
    device = next(module.parameters()).device
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    bf16 = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    begin, step, progress, next_report = time.monotonic(), 0, 0.0, 0.0
    module.train()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = budget.learning_rate * min(1, (step + 1) / 100, 1.02 - progress)
        with bf16:
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        used = (time.monotonic() - begin) / (60 * budget.minutes)
        progress = max(used, step / budget.steps if budget.steps else 0)
        if progress >= next_report and step % 10 == 0:
            next_report += 0.05
            speed = step * budget.batch * budget.sequence / (time.monotonic() - begin)
            line = (
                f"{name} step {step} {progress:4.0%} loss {loss.item():.3f} {speed:,.0f} tokens/s"
            )
            print(line, report(), flush=True)
    module.eval()
    tokens = step * budget.batch * budget.sequence
    return {"steps": step, "tokens": tokens, "loss": loss.item()}


def windows(stream: Tensor, num: int, length: int, generator: torch.Generator) -> Tensor:
    """[num, length] ids at random places of the stream."""
    start = torch.randint(len(stream) - length, (num,), generator=generator).to(stream.device)
    return stream[start[:, None] + torch.arange(length, device=stream.device)]


@torch.no_grad()
def text_loss(target: Target, stream: Tensor, sequence: int, limit: int = 64) -> float:
    """Mean next-token loss in nats over up to `limit` consecutive windows."""
    num = min(limit, (len(stream) - 1) // sequence)
    ids, labels = (stream[i : i + num * sequence].view(num, sequence) for i in (0, 1))
    was_training = target.training
    target.eval()
    losses = [
        F.cross_entropy(target(x)[0].float().flatten(0, 1), y.flatten())
        for x, y in zip(ids.split(8), labels.split(8), strict=True)
    ]
    target.train(was_training)
    return torch.stack(losses).mean().item()


def draft_loss(target: Target, draft: Draft, ids: Tensor) -> Tensor:
    """Cross-entropy of all steps against the target's distribution over the draft's vocabulary.

    It is not renormalised: where the target wants other tokens, the row weighs less.
    """
    with torch.no_grad():
        logits, aux, _ = target(ids)
        embeds = target.model["embed_tokens"](ids[:, 1:])
        wanted = logits[:, 1:].float().softmax(-1)[..., draft.hot_token_ids]
    loss = torch.zeros((), device=ids.device)
    for j, predicted in enumerate(draft.unroll(embeds, aux[:, :-1])):
        loss = loss - (wanted * predicted.float().log_softmax(-1)).sum(-1)[:, j:].mean()
    return loss / NUM_DRAFT_STEPS


@torch.no_grad()
def generate(target: Target, prompts: Tensor, num_new: int) -> Tensor:
    """Greedy continuation: prompts [B, T] -> [B, T + num_new]."""
    ids, last, past = [prompts], prompts, None
    for _ in range(num_new):
        logits, _, past = target(last, past)
        last = logits[:, -1:].argmax(-1)
        ids.append(last)
    return torch.cat(ids, dim=1)


# --------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def correct_drafts(target: Target, draft: Draft, ids: Tensor, window: int | None = None) -> Tensor:
    """[B, R] number of correct drafts, 0 to NUM_DRAFT_STEPS, of a drafting rooted at row r.

    ids [B, T] is the target's greedy text. Step j of root r lies at row r+j and has to hit token
    r+j+2. A step counts only if those before it hit, so feeding it the text instead of the drafts
    changes nothing, and one pass covers all roots.
    """
    _, aux, _ = target(ids)
    embeds = target.model["embed_tokens"](ids[:, 1:])
    num_roots = ids.shape[1] - 1 - NUM_DRAFT_STEPS
    hit = torch.ones(len(ids), num_roots, dtype=torch.bool, device=ids.device)
    count = torch.zeros(len(ids), num_roots, dtype=torch.int64, device=ids.device)
    for j, logits in enumerate(draft.unroll(embeds, aux[:, :-1], window)):
        proposed = draft.hot_token_ids[logits[:, j : j + num_roots].argmax(-1)]
        hit &= proposed == ids[:, j + 2 : j + 2 + num_roots]
        count += hit
    return count


def accept_statistics(counts: Tensor, prompt_length: int) -> tuple[float, list[float]]:
    """Walk along the rows of counts [B, R] as greedy speculative decoding does after the prompt.

    Returns the mean accept length (bonus token included) and, for each draft position, the share
    of verifications that accept it.
    """
    walked: list[int] = []
    for row in counts.tolist():
        root = prompt_length - 1
        while root < len(row):
            walked.append(row[root])
            root += row[root] + 1
    rates = [sum(w > j for w in walked) / len(walked) for j in range(NUM_DRAFT_STEPS)]
    return 1 + sum(rates), rates


def distinct_share(ids: Tensor, size: int = 4) -> float:
    """Mean share of distinct `size`-grams among a row's: near 0 for a row stuck in a loop."""
    rows = [list(zip(*(row[i:] for i in range(size)), strict=False)) for row in ids.tolist()]
    return sum(len(set(grams)) / len(grams) for grams in rows) / len(rows)


def evaluate(
    target: Target, draft: Draft, tokenizer: Tokenizer, held_out: Tensor, num_prompts: int
) -> dict[str, object]:
    """Figures on the held-out modules; `held_out` [N] is their id stream."""
    prompts = held_out_prompts(tokenizer, num=num_prompts, length=PROMPT_TOKENS)
    ids = generate(target, prompts.to(held_out.device), NEW_TOKENS)
    new = ids[:, PROMPT_TOKENS:]
    for row in ids[:6].tolist():
        print("-" * 100, tokenizer.decode(row[:PROMPT_TOKENS]), sep="\n", end=" >>>")
        print(tokenizer.decode(row[PROMPT_TOKENS:], skip_special_tokens=False))
    warm = accept_statistics(correct_drafts(target, draft, ids), PROMPT_TOKENS)
    cold = accept_statistics(correct_drafts(target, draft, ids, window=1), PROMPT_TOKENS)
    text = held_out[: len(held_out) // NEW_TOKENS * NEW_TOKENS].view(-1, NEW_TOKENS)
    return {
        "held_out_loss": text_loss(target, held_out, 512),
        "accept_length": warm[0],
        "accept_rate_per_position": warm[1],
        "accept_length_without_old_draft_kv": cold[0],
        "accept_rate_per_position_without_old_draft_kv": cold[1],
        "prompts": num_prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "distinct_continuations": len({tuple(row) for row in new.tolist()}),
        "distinct_4gram_share": distinct_share(new),
        "distinct_4gram_share_of_text": distinct_share(text),
        "continuations_with_end_of_text": int((new == 0).any(dim=1).sum()),
    }


# -------------------------------------------------------------------------------------------- files


def write_model(folder: Path, module: nn.Module, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous().cpu() for name, tensor in module.state_dict().items()}
    weights = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    common = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | common, indent=2) + "\n")


def write_pair(out: Path, target: Target, draft: Draft, tokenizer: Tokenizer) -> None:
    """The two model folders; weights in bf16."""
    write_model(
        out / "target",
        target,
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": NUM_LAYERS,
            "intermediate_size": TARGET_MLP,
        },
    )
    write_model(
        out / "draft",
        draft,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "intermediate_size": DRAFT_MLP,
            "draft_vocab_size": DRAFT_VOCAB,
            "target_hidden_size": HIDDEN,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
                "use_aux_hidden_state": True,
            },
        },
    )
    tokenizer.save(str(out / "target" / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (out / "target" / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_pair(folder: Path) -> tuple[Target, Draft]:
    """The pair that `write_pair` wrote, in fp32 on the CPU, for evaluation."""
    target, draft = Target(), Draft(torch.arange(DRAFT_VOCAB))
    for name, module in (("target", target), ("draft", draft)):
        module.load_state_dict(load_file(folder / name / "model.safetensors"))
    return target.eval(), draft.eval()


# --------------------------------------------------------------------------------------------- main


def train_target(
    stream: Tensor, held_out: Tensor, budget: Budget, dropout: float, seed: int
) -> tuple[Target, dict[str, float]]:
    """A target trained on the id stream [N], and how it went."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    target = Target(dropout)
    for weight in target.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    target.to(stream.device)

    def loss_of() -> Tensor:
        ids = windows(stream, budget.batch, budget.sequence + 1, generator)
        return F.cross_entropy(target(ids[:, :-1])[0].float().flatten(0, 1), ids[:, 1:].flatten())

    def report() -> str:
        return f"held-out {text_loss(target, held_out, 512):.3f}"

    return target, optimise("target", target, loss_of, budget, report)


def train_draft(
    stream: Tensor, target: Target, budget: Budget, num_own: int, seed: int
) -> tuple[Draft, dict[str, float]]:
    """A draft trained for the target, and how it went.

    Half of every batch is text, half comes from `num_own` greedy continuations that the target
    writes first: what the draft will have to predict.
    """
    torch.manual_seed(seed + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    counts = stream.bincount(minlength=VOCAB)
    hot_token_ids = counts.topk(DRAFT_VOCAB).indices.sort().values
    print(f"draft vocabulary: {counts[hot_token_ids].sum() / len(stream):.1%} of the text")
    draft = Draft(hot_token_ids.cpu()).to(stream.device)
    draft.norm.load_state_dict(target.model["norm"].state_dict())
    draft.lm_head.weight.data.copy_(target.lm_head.weight[hot_token_ids])

    prompts = windows(stream, num_own, PROMPT_TOKENS, generator)
    own = torch.cat([generate(target, part, NEW_TOKENS) for part in prompts.split(2048)])
    print(f"{num_own} continuations, distinct 4-gram share {distinct_share(own):.2f}", flush=True)
    num_text = budget.batch // 2
    num_chosen = num_text * budget.sequence // own.shape[1]

    def loss_of() -> Tensor:
        text = windows(stream, num_text, budget.sequence, generator)
        chosen = torch.randint(num_own, (num_chosen,), generator=generator).to(own.device)
        return (draft_loss(target, draft, text) + draft_loss(target, draft, own[chosen])) / 2

    return draft, optimise("draft", draft, loss_of, budget)


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Train the EAGLE-3 pair on stdlib sources.")
    parser.add_argument("--out", type=Path, required=True, help="gets target/, draft/, a record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--minutes", type=float, help="limit of both stages; 4.5 on cuda, 50 on cpu"
    )
    parser.add_argument("--steps", type=int, help="limit of each stage; 3000 on cuda, none on cpu")
    parser.add_argument("--batch", type=int, help="sequences a step; 32 on cuda, 4 on cpu")
    parser.add_argument("--sequence", type=int, help="tokens; 1024 on cuda, 512 on cpu")
    parser.add_argument("--dropout", type=float, help="of the target; 0.1 on cuda, 0 on cpu")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts to evaluate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=commit(), help="to record; default: git's HEAD")
    args = parser.parse_args()
    # A CPU sees the text a few times only: it needs no dropout, and more steps of fewer tokens.
    preset = {"minutes": 50.0, "steps": None, "batch": 4, "sequence": 512, "dropout": 0.0}
    if args.device == "cuda":
        preset = {"minutes": 4.5, "steps": 3000, "batch": 32, "sequence": 1024, "dropout": 0.1}
    for name, value in preset.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse_args()
    begin, cuda = time.monotonic(), args.device == "cuda"
    training, held_out = stdlib_modules()
    tokenizer = train_tokenizer(iter(training.values()))
    stream, held_out_stream = (
        encode(tokenizer, list(part.values())).to(args.device) for part in (training, held_out)
    )
    print(f"training: {len(training)} modules, {len(stream):,} tokens", flush=True)
    print(f"held out: {len(held_out)} modules, {len(held_out_stream):,} tokens", flush=True)

    budget = Budget(args.steps, 0.55 * args.minutes, args.batch, args.sequence, 3e-3)
    target, target_run = train_target(stream, held_out_stream, budget, args.dropout, args.seed)
    budget = replace(budget, minutes=0.45 * args.minutes, learning_rate=2e-3)
    num_own = 16384 if cuda else 256
    draft, draft_run = train_draft(stream, target, budget, num_own, args.seed)

    for weight in (*target.parameters(), *draft.parameters()):
        weight.data = weight.data.to(torch.bfloat16).float()
    figures = evaluate(target, draft, tokenizer, held_out_stream, args.prompts)
    write_pair(args.out, target, draft, tokenizer)
    record = {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": args.seed,
        "modules": len(training),
        "corpus_tokens": len(stream),
        "batch": args.batch,
        "sequence": args.sequence,
        "dropout": args.dropout,
        "target": target_run,
        "draft": draft_run,
        "evaluation": figures,
        "wall_seconds": time.monotonic() - begin,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": args.commit,
    }
    record = json.loads(json.dumps(record), parse_float=lambda x: round(float(x), 4))
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
