"""What the demo says in the end: the comparison of answers, the table, the record, the picture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .load import Answer, Phase, Sample

HEADINGS = (
    "running",
    "requests",
    "tokens/s",
    "tokens/s without speculation",
    "off",
    "accept length",
    "steps on",
    "steps off",
)
BLUE, ORANGE, GREEN, GREY, SHADE = "#1f5fa8", "#d9822b", "#3a8f4d", "#666666", "#f3e3cf"
WINDOW_SECONDS = 1.0  # of the rates in the picture and in the status line
LABEL_SHARE = 0.1  # of the picture's width that a period must have to be labelled
NEAR_TIE = 0.125  # of two log probabilities in bfloat16, arbitrary


# ------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class Comparison:
    """Answers against those of the server without speculation.

    Args:
        answers: how many were compared.
        near_ties: those that leave the reference at a near tie of its two likeliest tokens.
        differences: those that equal no reference answer to their prompt otherwise.
        unstable: prompts that the server without speculation itself answered in two ways.
    """

    answers: int
    near_ties: list[dict[str, Any]]
    differences: list[dict[str, Any]]
    unstable: list[int]

    @property
    def equal(self) -> int:
        return self.answers - len(self.near_ties) - len(self.differences)


def compare(
    answers: Iterable[Answer], reference: Iterable[Answer], likeliest: Iterable[Answer] = ()
) -> Comparison:
    """Compare text, tokens and finish reason of every answer.

    Args:
        answers: to be compared.
        reference: answers without speculation, any number to a prompt.
        likeliest: more of those, with the two likeliest tokens, where a near tie may decide.
    """
    by_prompt = {answer.prompt: answer for answer in likeliest}
    expected: dict[int, list[Answer]] = {}
    for answer in (*reference, *by_prompt.values()):
        known = expected.setdefault(answer.prompt, [])
        if answer.content not in [other.content for other in known]:
            known.append(answer)
    answers, near_ties, differences = list(answers), [], []
    for answer in answers:
        known = expected.get(answer.prompt, [])
        if answer.content in [other.content for other in known]:
            continue
        found = {"prompt": answer.prompt, "running": answer.concurrency}
        shown = by_prompt.get(answer.prompt)
        tie = shown and near_tie(answer.token_ids, shown.token_ids, shown.likeliest)
        if tie:
            near_ties.append(found | tie)
        else:
            expected_texts = [other.text for other in known]
            differences.append(found | {"answer": answer.text, "expected": expected_texts})
    unstable = sorted(prompt for prompt, known in expected.items() if len(known) > 1)
    return Comparison(len(answers), near_ties, differences, unstable)


def near_tie(
    token_ids: Sequence[int],
    reference: Sequence[int],
    likeliest: Sequence[Sequence[tuple[float, int]]],
) -> dict[str, Any] | None:
    """Where and by what margin an answer leaves the reference; None if not at a near tie.

    It has to go on with the reference's second likeliest token.

    Args:
        token_ids: of the answer.
        reference: token ids of the reference.
        likeliest: by position, the reference's two likeliest tokens as (log probability, id).
    """
    pairs = enumerate(zip(token_ids, reference, strict=False))
    position = next((i for i, (own, other) in pairs if own != other), None)
    if position is None:
        return None
    (first, token), (second, other_token) = likeliest[position]
    taken = {token_ids[position], reference[position]}
    if taken != {token, other_token} or first - second >= NEAR_TIE:
        return None
    return {"position": position, "margin": first - second}


def problems(comparison: Comparison, final: Sample) -> list[str]:
    """Why the demo fails; empty where it does not."""
    found = []
    if not comparison.answers:
        found.append("no request was answered")
    if comparison.differences:
        found.append(
            f"{len(comparison.differences)} of {comparison.answers} answers differ from those "
            "without speculation"
        )
    if not final.steps_off:
        found.append("speculation never went off: the load did not reach the threshold")
    elif final.off or final.flips < 2:
        found.append("speculation did not come back when the load fell")
    elif not final.steps_on:
        found.append("speculation was never on")
    return found


# --------------------------------------------------------------------------------------- the phases


def tokens_per_second(begin: Sample, end: Sample) -> float:
    return (end.tokens - begin.tokens) / max(end.seconds - begin.seconds, 1e-9)


def accept_length(begin: Sample, end: Sample) -> float | None:
    """Mean over the verify steps between two samples; None where there was none."""
    count = end.verifications.count - begin.verifications.count
    return (end.verifications.tokens - begin.verifications.tokens) / count if count else None


def before(samples: Sequence[Sample], sample: Sample) -> Sample:
    """The sample about WINDOW_SECONDS earlier, or the first."""
    return next(
        (s for s in reversed(samples) if s.seconds <= sample.seconds - WINDOW_SECONDS), samples[0]
    )


def summarise(phases: Sequence[Phase], reference: Sequence[Phase]) -> list[dict[str, Any]]:
    """One row a phase; `reference` are the same phases on the server without speculation."""
    rows = []
    for phase, plain in zip(phases, reference, strict=True):
        on = phase.end.steps_on - phase.begin.steps_on
        off = phase.end.steps_off - phase.begin.steps_off
        rows.append(
            {
                "running": phase.concurrency,
                "requests": phase.requests,
                "begin_seconds": phase.begin.seconds,
                "end_seconds": phase.end.seconds,
                "tokens_per_second": tokens_per_second(phase.begin, phase.end),
                "tokens_per_second_without_speculation": tokens_per_second(plain.begin, plain.end),
                "share_off": off / max(on + off, 1),
                "accept_length": accept_length(phase.begin, phase.end),
                "steps_on": on,
                "steps_off": off,
            }
        )
    return rows


def rates(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The samples with rates over the second before each, for the record and the picture."""
    return [
        {
            "seconds": sample.seconds,
            "running": sample.running,
            "off": sample.off,
            "tokens_per_second": tokens_per_second(before(samples, sample), sample),
            "accept_length": None if sample.off else accept_length(before(samples, sample), sample),
            "flips": sample.flips,
            "steps_on": sample.steps_on,
            "steps_off": sample.steps_off,
            "verifications": sample.verifications.count,
            "verified_tokens": sample.verifications.tokens,
        }
        for sample in samples
    ]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows of `summarise` as aligned text."""
    lines = [HEADINGS]
    for row in rows:
        accept = row["accept_length"]
        lines.append(
            (
                str(row["running"]),
                str(row["requests"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second_without_speculation']:.0f}",
                f"{row['share_off']:.0%}",
                "-" if accept is None else f"{accept:.2f}",
                str(row["steps_on"]),
                str(row["steps_off"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def status(sample: Sample, earlier: Sample) -> str:
    """One line: running requests, mode, accept length, tokens/s, flips."""
    mode = {None: "no speculation", False: "speculating", True: "off"}[sample.off]
    accept = None if sample.off else accept_length(earlier, sample)
    parts = [f"load {sample.target:2}, {sample.running:2} running", f"{mode:14}"]
    if sample.off is not None:
        parts.append(f"accept length {'   -' if accept is None else f'{accept:4.2f}'}")
    parts.append(f"{tokens_per_second(earlier, sample):6.0f} tokens/s")
    if sample.off is not None:
        parts.append(f"{sample.flips} flips")
    return " | ".join(parts)


# -------------------------------------------------------------------------------------- the picture


def periods(samples: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """The samples cut where the mode changes; each part ends with the first of the next."""
    cuts = [i for i in range(1, len(samples)) if samples[i]["off"] != samples[i - 1]["off"]]
    return [
        samples[begin : end + 1]
        for begin, end in itertools.pairwise([0, *cuts, len(samples) - 1])
        if begin < end
    ]


def draw(record: dict[str, Any], path: Path) -> None:
    """Throughput, load and mode, and accept length over time as a PNG of 1500 x 1200 pixels."""
    from matplotlib.figure import Figure

    samples = record["samples"]
    seconds = [sample["seconds"] for sample in samples]
    figure = Figure(figsize=(10, 8), dpi=150, layout="constrained")
    throughput, load, accept = figure.subplots(3, sharex=True, height_ratios=(3, 2, 2))
    figure.suptitle("Speculative decoding off under load, and back on warm", fontsize=14)
    throughput.set_title(
        f"SGLang {record['sglang']}, EAGLE-3 demo pair, {record['device']}; "
        f"{record['answers_equal']} of {record['answers']} answers equal those without speculation"
        + (f", {len(ties)} leave them at near ties" if (ties := record["near_ties"]) else ""),
        fontsize=9,
        color=GREY,
    )
    line = {"color": BLUE, "lw": 1.8}

    speeds = [sample["tokens_per_second"] for sample in samples]
    throughput.plot(seconds, speeds, **line, label="with the fused fallback")
    for phase in record["phases"]:
        throughput.hlines(
            phase["tokens_per_second_without_speculation"],
            phase["begin_seconds"],
            phase["end_seconds"],
            color=GREY,
            lw=1.6,
            ls=(0, (3, 2)),
            label="without speculation, same load" if phase is record["phases"][0] else None,
        )
    throughput.set_ylabel("tokens/s")

    running = [sample["running"] for sample in samples]
    load.step(seconds, running, where="post", **line, label="requests running")
    for name, colour, text in (("threshold", ORANGE, "off from"), ("resume", GREEN, "on again at")):
        load.axhline(record[name], color=colour, lw=1, ls="--", label=f"{text} {record[name]}")
    load.set_ylabel("requests, mode")

    lengths = [float("nan") if s["accept_length"] is None else s["accept_length"] for s in samples]
    accept.plot(seconds, lengths, **line, label="accept length, mean over 1 s")
    accept.set_ylabel("tokens per verify step")
    accept.set_ylim(1, 1 + record["num_steps"])
    accept.set_xlabel("seconds")

    for part in periods(samples):
        begin, end = part[0], part[-1]
        middle = (begin["seconds"] + end["seconds"]) / 2
        label = {"ha": "center", "fontsize": 9, "color": GREY}
        if begin["off"]:
            for axes in (throughput, load, accept):
                axes.axvspan(begin["seconds"], end["seconds"], color=SHADE, lw=0, zorder=0)
        if end["seconds"] - begin["seconds"] < LABEL_SHARE * seconds[-1]:
            continue
        if begin["off"]:
            load.text(middle, 0.6, "speculation off", **label)
            accept.text(middle, 1.2, "nothing drafted", **label)
        elif (count := end["verifications"] - begin["verifications"]) > 0:
            mean = (end["verified_tokens"] - begin["verified_tokens"]) / count
            accept.text(middle, 1.2, f"mean {mean:.2f}", **label)

    for axes in (throughput, load, accept):
        axes.grid(axis="y", color="#e4e4e4", lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", fontsize=8, framealpha=0.9)
        axes.set_xlim(0, seconds[-1])
    for axes in (throughput, load):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    figure.align_ylabels()
    figure.savefig(path)


# --------------------------------------------------------------------------------------- the record


def write(record: dict[str, Any], folder: Path) -> None:
    """Write demo.json and demo.png."""
    short = json.loads(json.dumps(record), parse_float=lambda text: round(float(text), 3))
    (folder / "demo.json").write_text(json.dumps(short, indent=1) + "\n", encoding="utf-8")
    draw(record, folder / "demo.png")


def verdict(record: dict[str, Any]) -> str:
    """The last lines: answers that differ, then what failed or that all is well."""
    lines = []
    for difference in record["differences"]:
        lines.append(f"prompt {difference['prompt']}, sent with {difference['running']} running:")
        lines += [f"  expected {text!r}" for text in difference["expected"]]
        lines.append(f"  answered {difference['answer']!r}")
    if record["prompts_with_two_reference_answers"]:
        lines.append(
            "the server without speculation itself gave two answers (a near tie of two tokens) to "
            f"prompts {record['prompts_with_two_reference_answers']}; either was taken as equal"
        )
    lines.append(
        f"{record['answers_equal']} of {record['answers']} answers equal those of the server "
        f"without speculation; {record['flips']} flips"
    )
    if record["near_ties"]:
        margin = max(tie["margin"] for tie in record["near_ties"])
        lines.append(
            f"{len(record['near_ties'])} leave them where the two likeliest tokens nearly tie in "
            f"{record['dtype']}: log probabilities at most {margin:.3f} apart, {NEAR_TIE} allowed"
        )
    lines += [f"FAILED: {failure}" for failure in record["failures"]] or ["passed"]
    return "\n".join(lines)
