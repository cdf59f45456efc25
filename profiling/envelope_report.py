"""The table and the picture of an envelope's result.

    python -m fused_fallback.profiling.envelope_report RESULT.json

prints the table and draws RESULT.png, tokens/s over concurrency.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "nospec": "#666666",
    "static": "#1f5fa8",
    "step0_warm": "#b58ac7",
    "step0_cold": "#8e5aa8",
    "on": "#5fa3d9",
    "off": "#d9822b",
    "threshold": "#3a8f4d",
}
COLUMNS = (
    ("tok/s", "tok_s", "{:.0f}"),
    ("/nospec", "ratio_nospec", "{:.3f}"),
    ("range", "ratio_nospec_spread", "{0[0]:.3f}-{0[1]:.3f}"),
    ("/static", "ratio_static", "{:.3f}"),
    ("/best", "ratio_best", "{:.3f}"),
    ("ms/token", "tpot_ms", "{:.3f}"),
    ("/nospec", "tpot_ratio_nospec", "{:.4f}"),
    ("range", "tpot_ratio_nospec_spread", "{0[0]:.4f}-{0[1]:.4f}"),
    ("/static", "tpot_ratio_static", "{:.4f}"),
    ("prefill ms", "prefill_ms", "{:.1f}"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row; columns that no row has are left out."""
    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    lines = [["concurrency", "mode", *(title for title, _, _ in columns)]]
    for row in rows:
        cells = [form.format(row[name]) if name in row else "" for _, name, form in columns]
        lines.append([str(row["concurrency"]), row["mode"], *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def starts(run: dict[str, Any]) -> str:
    """Seconds and memory of each server's start, and what that is above `static`."""
    servers = run.get("servers", {})
    lines = []
    for mode, start in servers.items():
        line = f"{mode:10s} start {start['start_s']:6.1f} s"
        line += f"  {start['gpu_gb']:6.2f} GB" if "gpu_gb" in start else ""
        static = servers.get("static")
        if start.get("plugin") and static:
            line += f"  {start['start_s'] - static['start_s']:+.1f} s"
            if "gpu_gb" in start and "gpu_gb" in static:
                line += f", {1e3 * (start['gpu_gb'] - static['gpu_gb']):+.0f} MB against static"
        lines.append(line + (f"\n{'':10s} {start['plugin']}" if start.get("plugin") else ""))
    return "\n".join(lines)


def loads(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The rows by what was sent: (input length, prompts)."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row.get("input_len"), row.get("prompts")), []).append(row)
    return found


def text(result: dict[str, Any]) -> str:
    """All that the result holds."""
    parts = [
        f"{prompts} prompts of up to {input_len} tokens\n{table(rows)}"
        for (input_len, prompts), rows in loads(result["rows"]).items()
    ]
    if result["ramp"]:
        parts.append(f"ramp\n{table(result['ramp'])}")
    return "\n\n".join([*parts, *(starts(run) for run in result["runs"])])


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens/s over concurrency, with the upper envelope of the two stock modes, as a PNG.

    Of several loads that of most concurrencies. A ramp goes to a second PNG, `<stem>_ramp`. Says
    so where there is no matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no picture: matplotlib is not installed; envelope_report draws it elsewhere")
        return
    title = f"SGLang {result['sglang']}, {result['device']}"
    if result["rows"]:
        rows = max(loads(result["rows"]).values(), key=len)
        draw_curves(rows, "concurrency", title, path)
    if result["ramp"]:
        ramp = path.with_name(f"{path.stem}_ramp{path.suffix}")
        draw_curves(result["ramp"], "ramp_step", f"{title}, load up and down", ramp)


def draw_curves(rows: Sequence[dict[str, Any]], along: str, title: str, path: Path) -> None:
    """One curve a mode over `along`, a key of the rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        curves.setdefault(row["mode"], {})[row[along]] = row["tok_s"]
    places = {row[along]: row["concurrency"] for row in rows}
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    if {"nospec", "static"} <= curves.keys():
        both = sorted(curves["nospec"].keys() & curves["static"].keys())
        best = [max(curves["nospec"][x], curves["static"][x]) for x in both]
        label = "better of nospec and static"
        axes.plot(both, best, color="#f0c98f", lw=9, solid_capstyle="round", label=label)
    for mode, curve in curves.items():
        style = {"lw": 1.8, "marker": "o", "ms": 4, "color": COLOURS[mode]}
        axes.plot(sorted(curve), [curve[x] for x in sorted(curve)], **style, label=mode)
    if along == "concurrency":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted(places), [str(places[x]) for x in sorted(places)])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(color="#e4e4e4", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.9)
    figure.savefig(path)
    print(f"drawn to {path}")


def main() -> None:
    path = Path(sys.argv[1])
    result = json.loads(path.read_text())
    print(text(result))
    draw(result, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
