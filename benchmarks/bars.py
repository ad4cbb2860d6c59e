"""A bar chart as SVG text, with nothing to install."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars"]

_COLOURS = ("#8c8c8c", "#1f77b4")
_LEFT, _BAR, _GAP, _TOP, _LENGTH = 110, 18, 14, 64, 460


def bars(title: str, sides: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Horizontal bars: for each row one bar a side, at most two, all on one linear scale from 0."""
    longest = max(value for values in rows.values() for value in values)
    height = _TOP + len(rows) * (len(sides) * _BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" font-family="sans-serif">',
        f'<rect width="720" height="{height}" fill="white"/>',
        '<g font-size="12">',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i, side in enumerate(sides):
        x = _LEFT + i * 200
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{_COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 18}" y="44">{escape(side)}</text>')
    y = _TOP
    for name, values in rows.items():
        middle = y + len(values) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        for i, value in enumerate(values):
            length = _LENGTH * value / longest
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{_COLOURS[i]}"/>')
            ratio = f" ({values[0] / value:.1f}x faster)" if i and value < values[0] else ""
            parts.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 12}">{value:.0f}{ratio}</text>')
            y += _BAR
        y += _GAP
    return "\n".join([*parts, "</g></svg>", ""])
