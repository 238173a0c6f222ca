"""Draws the figures of docs/performance.md: bars, or lines on logarithmic axes.

`benchmarks/figures.json` has the results of the other benchmarks on a quiet machine: change it when you
measure again. `make docs` draws them into the site; to view a single one:

    python benchmarks/plots.py kms > kms.svg
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape

FIGURES = Path(__file__).with_name("figures.json")
_WIDTH, _LEFT, _BAR = 760, 220, 28


def figures() -> dict[str, dict[str, Any]]:
    """Return each plot by name: its title, and `bars` with a unit, or `lines` with the axes."""
    document: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return document


def plot(name: str) -> str:
    """Return a plot as SVG."""
    chart = figures()[name]
    return lines(chart) if "lines" in chart else bars(chart)


def bars(chart: dict[str, Any]) -> str:
    """Return a bar chart as SVG."""
    longest = max(value for _, value in chart["bars"])
    scale = (_WIDTH - _LEFT - 90) / longest
    parts = [f'<text x="24" y="30" font-weight="600">{escape(chart["title"])}</text>']
    for index, (label, value) in enumerate(chart["bars"]):
        y = 50 + index * _BAR
        width = value * scale
        parts += [
            f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="20" fill="#4f8fea"/>',
            f'<text x="{_LEFT + width + 8:.1f}" y="{y + 14}">{value:g} {escape(chart["unit"])}</text>',
        ]
    height = 62 + len(chart["bars"]) * _BAR
    if "reference" in chart:
        x = _LEFT + chart["reference"] * scale
        parts.append(f'<path d="M{x:.1f} 44 V{height - 14}" stroke="#e0694b" stroke-dasharray="4 3"/>')
    return str(_pictures().svg(_WIDTH, height, parts, chart["title"]))


_COLOURS = ("#4f8fea", "#e0694b", "#3fa66b", "#a06fd6")
_AREA = 70, 50, 470, 260
"""Left, top, width and height of the area between the axes."""


def lines(chart: dict[str, Any]) -> str:
    """Return lines on logarithmic axes as SVG."""
    left, top, width, height = _AREA
    points = [point for line in chart["lines"] for point in line["points"]]
    decades = [_decades(values) for values in zip(*points, strict=True)]

    def place(x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = decades
        across, up = (math.log10(x) - x0) / (x1 - x0), (math.log10(y) - y0) / (y1 - y0)
        return left + across * width, top + (1 - up) * height

    parts = [f'<text x="24" y="30" font-weight="600">{escape(chart["title"])}</text>']
    parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" class="axis"/>')
    for power in range(decades[0][0], decades[0][1] + 1):
        x, _ = place(10.0**power, 10.0 ** decades[1][0])
        parts.append(f'<path class="axis" d="M{x:.1f} {top} v{height}"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{10.0**power:,g}</text>')
    for power in range(decades[1][0], decades[1][1] + 1):
        _, y = place(10.0 ** decades[0][0], 10.0**power)
        parts.append(f'<path class="axis" d="M{left} {y:.1f} h{width}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g} s</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">{escape(chart["axis"])}</text>'
    )
    for index, line in enumerate(chart["lines"]):
        colour = _COLOURS[index // 2 % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 4"' if line["dashed"] else ""
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in line["points"]))
        y = top + 14 + index * 22
        key = left + width + 16
        parts += [
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>',
            f'<path d="M{key} {y - 4} h24" stroke="{colour}" stroke-width="2"{dashes}/>',
            f'<text x="{key + 32}" y="{y}">{escape(line["label"])}</text>',
        ]
    return str(_pictures().svg(_WIDTH, top + height + 56, parts, chart["title"]))


def _decades(values: tuple[float, ...]) -> tuple[int, int]:
    """Return the powers of ten between which values lie."""
    low = math.floor(math.log10(min(values)))
    return low, max(math.ceil(math.log10(max(values))), low + 1)


def _pictures() -> ModuleType:
    path = Path(__file__).parents[1] / "docs" / "modules_picture.py"
    spec = importlib.util.spec_from_file_location("modules_picture", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(plot(sys.argv[1]))
