"""Draws the upper part of a report for an auditor: an SVG picture that has the report's own HTML in it."""

from __future__ import annotations

import tempfile
from base64 import b64encode
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools
from parquet_keytools.cli.report import html_page
from parquet_keytools.protection_report import make_report
from parquet_keytools.storage.locations import FileLocation

_WIDTH, _HEIGHT = 900, 1440

_KEYS = {name: b64encode(name.ljust(16).encode()).decode() for name in ("footer", "pii", "times")}
_CONFIGURATION = {
    "version": 1,
    "kms": {"type": "in_memory", "keys": _KEYS},
    "tables": {
        "bookings": {
            "footer_key": "footer",
            "column_keys": {"pii": ["name", "iban"], "times": ["*_time"]},
            "unlisted_columns": "plaintext",
            "aad_prefix": "{file_name}",
        }
    },
}


def sample_picture() -> str:
    """Return the picture of a report on two encrypted files and one that is plaintext."""
    table = pa.table({"id": [1], "name": ["Ada"], "iban": ["DE02"], "dep_time": [517], "arr_time": [830]})
    # An analyst, whose KMS refuses `pii`.
    keys = {name: key for name, key in _KEYS.items() if name != "pii"}
    analyst = {"version": 1, "kms": {"type": "in_memory", "keys": keys}}
    with tempfile.TemporaryDirectory() as name, Keytools.from_mapping(_CONFIGURATION) as keytools:
        folder = Path(name, "bookings")
        folder.mkdir()
        keytools.write_table(table, folder / "january.parquet")
        keytools.write_table(table, folder / "february.parquet")
        pq.write_table(table, folder / "export.parquet")
        with Keytools.from_mapping(analyst) as reader:
            report = make_report(keytools, FileLocation.resolve(folder), {"analyst": reader, "owner": keytools})
        page = html_page(report).replace(f"{name}/", "")
    style = page[page.index("<style>") : page.index("</style>")] + "</style>"
    main = page[page.index("<main>") : page.index("</main>")] + "</main>"
    main = main.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">'
        f'<foreignObject width="{_WIDTH}" height="{_HEIGHT}">'
        f'<body xmlns="http://www.w3.org/1999/xhtml">{style}{main}</body></foreignObject></svg>'
    )
