"""How a console and a notebook show a result: in one line, however many files and columns there are."""

from __future__ import annotations

import pickle
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from parquet_keytools import Keytools, parse_configuration

NAMES = [f"column_{number}" for number in range(40)]


@pytest.fixture
def keytools(tmp_path: Path) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"ka": NAMES}, "unlisted_columns": "plaintext"}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "ka"]}, "tables": {"t": table}}
    found = Keytools(parse_configuration(document))
    for number in range(20):
        found.write_table(pa.table({name: [1, 2] for name in NAMES}), tmp_path / f"<{number}>.parquet")
    return found


def test_results_are_shown_in_a_line(keytools: Keytools, tmp_path: Path) -> None:
    path = tmp_path / "<0>.parquet"
    folder = keytools.verify_folder(tmp_path)
    rotation = keytools.rotate(tmp_path)
    results = {
        "Keytools kms='in_memory', tables=['t']": keytools,
        "verdict='conforms, with weaknesses', files={'conforms, with weaknesses': 20}": folder,
        "verdict='conforms, with weaknesses', broken=['no-prefix']": folder.files[0],
        "algorithm='AES_GCM_V1', footer_key='kf', columns=40, rows=2": keytools.inspect_file(path),
        "files={'rotated': 20}": rotation,
        "outcome='rotated'": rotation.files[0],
        "keys=['ka', 'kf'], unknown=None": next(iter(keytools.key_inventory(path))),
    }
    for text, result in results.items():
        assert text in repr(result) and len(repr(result)) < 400, repr(result)
        html = result._repr_html_()
        rows = ElementTree.fromstring(html).findall("tr")
        assert len(rows) == len(result.summary()) and len(html) < 1500
    assert pickle.loads(pickle.dumps(folder)) == folder
