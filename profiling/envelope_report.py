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


def text(result: dict[str, Any]) -> str:
    """All that the result holds."""
    parts = [table(rows) for rows in (result["rows"], result["ramp"]) if rows]
    return "\n\n".join([*parts, *(starts(run) for run in result["runs"])])


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens/s over concurrency, with the upper envelope of the two stock modes, as a PNG.

    Says so where there is nothing to draw or no matplotlib to draw it with.
    """
    rows = result["rows"] or result["ramp"]
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError:
        print("no picture: matplotlib is not installed; envelope_report draws it elsewhere")
        return
    along = "ramp_step" if not result["rows"] else "concurrency"
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    curves = {
        mode: {row[along]: row["tok_s"] for row in rows if row["mode"] == mode} for mode in modes
    }
    stock = [curves[mode] for mode in ("nospec", "static") if mode in curves]
    places = sorted({place for curve in stock for place in curve})
    if len(stock) == 2:
        best = [max(curve.get(place, 0) for curve in stock) for place in places]
        axes.plot(
            places, best, color="#f0c98f", lw=9, solid_capstyle="round", label="better of the two"
        )
    for mode, curve in curves.items():
        x = sorted(curve)
        style = {"lw": 1.8, "marker": "o", "ms": 4, "color": COLOURS[mode]}
        axes.plot(x, [curve[place] for place in x], **style, label=mode)
    if along == "concurrency":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        labels = [str(place) for place in places]
    else:
        labels = [str(row["concurrency"]) for row in rows if row["mode"] == modes[0]]
    if labels:
        axes.set_xticks(sorted(curves[modes[0]]), labels)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"SGLang {result['sglang']}, {result['device']}", fontsize=10)
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
