"""Draws where the modules of a file are, coloured by master key: an SVG picture from what `inspect` sees.

The documentation site shows a sample file. For a file of your own:

    python docs/modules_picture.py FILE CONFIG > modules.svg
"""

from __future__ import annotations

import sys
import tempfile
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from parquet_keytools import Keytools

if TYPE_CHECKING:
    from parquet_keytools.conformance.inspection import Inspection

_WIDTH, _LEFT, _LANE = 760, 120, 30
_COLORS = ("#4f8fea", "#e0694b", "#3fa65c", "#a675d6", "#d0a13a", "#3aa7a7")

_SAMPLE = {
    "version": 1,
    "kms": {"type": "in_memory", "keys": ["footer", "pii", "times"]},
    "tables": {
        "flights": {
            "footer_key": "footer",
            "column_keys": {"pii": ["tailnum"], "times": ["*_time"]},
            "unlisted_columns": "footer_key",
        }
    },
}


def sample_picture() -> str:
    """Return the picture of a sample file that is encrypted as the README's example."""
    import pyarrow as pa

    numbers = range(20_000)
    table = pa.table(
        {
            "flight": [number % 3_000 for number in numbers],
            "tailnum": [f"N{number * 7_919 % 9_000}" for number in numbers],
            "dep_time": [float(number * 17 % 2_400) for number in numbers],
            "arr_time": [float(number * 31 % 2_400) for number in numbers],
        }
    )
    with tempfile.TemporaryDirectory() as folder, Keytools.from_mapping(_SAMPLE) as keytools:
        path = f"{folder}/flights.parquet"
        keytools.write_table(table, path, row_group_size=10_000)
        return picture(keytools.inspect_file(path))


def picture(inspection: Inspection) -> str:
    """Return an SVG picture: a lane for each column and for the footer, and in it each module at its place."""
    scale = (_WIDTH - _LEFT - 16) / inspection.size_bytes
    footer_key = inspection.footer_key.name if inspection.footer_key else None
    lanes = [("footer", footer_key, [(inspection.footer_offset, inspection.footer_length, "footer")])]
    for ordinal, column in enumerate(inspection.columns):
        key = None if column.key_title(None) == "plaintext" else column.key.name if column.key else footer_key
        modules = [
            (module.offset, module.length, f"{module.module_type.title}, row group {chunk.row_group_ordinal}")
            for chunk in inspection.chunks
            if chunk.column_ordinal == ordinal
            for module in chunk.modules
        ]
        lanes.append((column.path, key, modules))
    keys = sorted({key for _, key, _ in lanes if key})
    colors = {key: _COLORS[index % len(_COLORS)] for index, key in enumerate(keys)}

    parts = []
    for lane, (column_path, key, modules) in enumerate(lanes[1:] + lanes[:1]):
        y = 46 + lane * _LANE
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(column_path)}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT} {y + 20} H{_WIDTH - 16}"/>')
        for offset, length, name in modules:
            place = f'x="{_LEFT + offset * scale:.1f}" width="{max(length * scale, 1.5):.1f}" y="{y}" height="20"'
            title = f"<title>{escape(name)}: {length:,} bytes</title>"
            parts.append(f'<rect {place} fill="{colors.get(key or "", "#8c959f")}">{title}</rect>')
    x = _LEFT
    for key, color in colors.items():
        parts.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="27">{escape(key)}</text>')
        x += 40 + 8 * len(key)
    return svg(_WIDTH, 56 + len(lanes) * _LANE, parts, "The modules of a file, coloured by master key")


def svg(width: int, height: int, parts: list[str], title: str) -> str:
    """Return a picture that can be read on a light and on a dark page."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            "<style>",
            ".panel { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328 } .axis { stroke: #d0d7de }",
            "@media (prefers-color-scheme: dark) {",
            ".panel { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .axis { stroke: #3d444d }",
            "}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    with Keytools.from_yaml(sys.argv[2]) as opened:
        sys.stdout.write(picture(opened.inspect_file(sys.argv[1])))
