"""The table, the JSON and the plot of what was measured."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hot_path.measure import Row

__all__ = ["as_json", "header", "line", "plot"]

_WIDTH = 28


def header(title: str) -> str:
    columns = f"{'reference':>26} {'kvpool':>26} {'ratio':>22} {'at least':>9}   keys and waves"
    return f"{title}: median (min to max), ms\n{'':{_WIDTH}}{columns}"


def line(row: Row, *, bound: bool = True) -> str:
    """One row; without ``bound`` nothing is asked of it."""
    low, high = row.ratios
    verdict = (f"{row.bound:9g}" + ("  " if row.ratio >= row.bound else " !")) if bound else " " * 11
    counts = ", ".join(f"{name} {count:,}" for name, count in row.counts.items())
    ratio = f"{row.ratio:.1f} ({low:.1f} to {high:.1f})"
    return f"{row.name:{_WIDTH}}{_ms(row.reference):>26} {_ms(row.ours):>26} {ratio:>22} {verdict} {counts}"


def _ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.4g} ({min(seconds) * 1e3:.4g} to {max(seconds) * 1e3:.4g})"


def as_json(rows: Sequence[Row], delayed: Mapping[str, Sequence[Row]], inputs: Mapping[str, Any]) -> str:
    """``ratios``: by name, of the 0 ms store unless the row says otherwise; ``rows``, ``delayed``: in seconds."""

    def details(row: Row) -> dict[str, Any]:
        return {
            "ratio": row.ratio,
            "ratio_spread": row.ratios,
            "at_least": row.bound,
            "reference_s": row.reference,
            "kvpool_s": row.ours,
            "counts": row.counts,
        }

    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return json.dumps(
        {
            "ratios": {row.name: row.ratio for row in rows},
            "rows": {row.name: details(row) for row in rows},
            "delayed": {ms: {row.name: details(row) for row in some} for ms, some in delayed.items()},
            "inputs": {**inputs, **machine},
        },
        indent=1,
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """An SVG with one bar a row, ratios on a logarithmic axis; the tick on a bar is what is asked at least."""
    left, step, width, decades = 210, 24, 520, 4
    height = step * len(rows) + 50

    def x(ratio: float) -> float:
        return left + width * min(max(math.log10(max(ratio, 0.1)), 0), decades) / decades

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{height}"',
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for decade in range(decades + 1):
        at = x(10**decade)
        parts.append(f'<line x1="{at:.1f}" y1="10" x2="{at:.1f}" y2="{height - 34}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 18}" text-anchor="middle">{10**decade:,}</text>')
    for i, row in enumerate(rows):
        y = 14 + i * step
        colour = "#3b7dd8" if row.ratio >= row.bound else "#d8743b"
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{row.name}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{x(row.ratio) - left:.1f}" height="16" fill="{colour}"/>')
        at = x(row.bound)
        parts.append(f'<line x1="{at:.1f}" y1="{y - 2}" x2="{at:.1f}" y2="{y + 18}" stroke="black" stroke-width="2"/>')
        parts.append(f'<text x="{x(row.ratio) + 5:.1f}" y="{y + 12}">{row.ratio:.3g}</text>')
    caption = "reference / kvpool; the black tick is what is asked at least"
    parts.append(f'<text x="{left + width / 2}" y="{height - 4}" text-anchor="middle">{caption}</text></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
