"""Key material left beside a plaintext file by an earlier, encrypted file of the same name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools
from parquet_keytools.kms.in_memory import InMemoryKms


def test_a_plaintext_file_beside_leftover_key_material_is_encrypted_in_place(tmp_path: Path) -> None:
    """The new key material replaces it, and another file's stays."""
    table = {"footer_key": "footer", "unlisted_columns": "footer_key", "key_material": "external"}
    kms = InMemoryKms({"footer": None})
    keytools = Keytools.from_mapping({"version": 1, "tables": {"people": table}}, kms=kms)
    rows = pa.table({"a": [1, 2]})
    path, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    for one in (path, other):
        keytools.write_table(rows, one)
    material = tmp_path / "_KEY_MATERIAL_FOR_a.parquet.json"
    left = material.read_bytes()
    pq.write_table(rows, path)

    report = keytools.encrypt_in_place(tmp_path, keep_results=True)

    assert [file.error for file in report.files] == [None, None]
    assert material.read_bytes() != left
    assert keytools.read_table(path) == keytools.read_table(other) == rows
    assert keytools.verify_folder(tmp_path).conforms
