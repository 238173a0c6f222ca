"""Draws the figures of docs/performance.md as bar charts.

`benchmarks/figures.json` has the figures that the other benchmarks printed on a quiet machine: change it when you
measure again. `make docs` draws them into the site; to look at one alone:

    python benchmarks/plots.py kms > kms.svg
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape

FIGURES = Path(__file__).with_name("figures.json")
_WIDTH, _LEFT, _BAR = 760, 220, 28


def figures() -> dict[str, dict[str, Any]]:
    """Return title, unit, reference line and bars of each plot, by name."""
    document: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return document


def plot(name: str) -> str:
    """Return a bar chart as SVG."""
    chart = figures()[name]
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
    return _pictures().svg(_WIDTH, height, parts, chart["title"])


def _pictures() -> ModuleType:
    path = Path(__file__).parents[1] / "docs" / "modules_picture.py"
    spec = importlib.util.spec_from_file_location("modules_picture", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(plot(sys.argv[1]))
