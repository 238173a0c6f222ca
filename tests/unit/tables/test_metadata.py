"""`Keytools.schema` and `Keytools.metadata`: a footer's contents, as pyarrow reads it with the keys."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError, DecryptionError, NotEncryptedError

FRAME = pd.DataFrame(
    {"a": [1, 2, 3], "b": ["x", "y", "z"], "c": [0.5, None, 2.5]}, index=pd.Index([7, 8, 9], name="i")
)
MASTER_KEYS = {name: name.encode() * 4 for name in ("foot", "cola", "colb")}


def tools(kms: FaultyKms | None = None, *, reading: dict[str, Any] | None = None, **settings: Any) -> Keytools:
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    table = {"footer_key": "foot", "column_keys": {"cola": ["a"], "colb": ["b"]}, "unlisted_columns": "footer_key"}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "tables": {"t": table | settings},
        "reading": reading or {},
    }
    return Keytools(parse_configuration(document), kms=kms)


@pytest.mark.parametrize(
    "settings",
    [{}, {"plaintext_footer": True}, {"aad_prefix": "{file_name}"}, {"unlisted_columns": "plaintext"}],
    ids=str,
)
def test_they_say_what_pyarrow_says_of_the_plaintext_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    keytools = tools(**settings)
    frame = FRAME.reset_index() if settings.get("plaintext_footer") else FRAME
    keytools.write_table(frame, tmp_path / "x.parquet", row_group_size=2)
    keytools.decrypt_file(tmp_path / "x.parquet", tmp_path / "plain.parquet")
    expected = pq.read_metadata(tmp_path / "plain.parquet")
    found = keytools.metadata(tmp_path / "x.parquet")
    schema = keytools.schema(tmp_path / "x.parquet")
    assert schema.equals(pq.read_schema(tmp_path / "plain.parquet"), check_metadata=True)
    assert found.schema.equals(expected.schema)
    assert (found.num_rows, found.num_row_groups, found.num_columns) == (
        3,
        2,
        frame.reset_index().shape[1] - (1 if settings.get("plaintext_footer") else 0),
    )
    for row_group in range(2):
        for column in range(found.num_columns):
            ours = found.row_group(row_group).column(column)
            theirs = expected.row_group(row_group).column(column)
            assert ours.path_in_schema == theirs.path_in_schema
            assert ours.statistics == theirs.statistics


def test_offsets_are_those_of_the_encrypted_file_as_pyarrow_has_them(tmp_path: Path) -> None:
    keytools = tools(unlisted_columns="plaintext")
    path = tmp_path / "x.parquet"
    keytools.write_table(FRAME, path)
    theirs = pq.read_metadata(path, decryption_properties=keytools.decryption_properties(path))
    ours = keytools.metadata(path)
    for column in range(ours.num_columns):
        found, expected = ours.row_group(0).column(column), theirs.row_group(0).column(column)
        assert found.data_page_offset == expected.data_page_offset
        assert found.statistics == expected.statistics


def test_only_the_footer_is_read(tmp_path: Path) -> None:
    keytools = tools()
    path = tmp_path / "x.parquet"
    keytools.write_table(pa.table({"a": [1] * 100, "b": ["x"] * 100, "c": [1.0] * 100}), path)
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)
    path.write_bytes(data)
    assert keytools.metadata(path).num_rows == 100
    data[-20] ^= 1
    path.write_bytes(data)
    for method in (keytools.metadata, keytools.schema):
        with pytest.raises(DecryptionError):
            method(path)


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_refused_columns_are_errors_or_hidden(tmp_path: Path, aad_prefix: str | None) -> None:
    path = tmp_path / "x.parquet"
    tools(aad_prefix=aad_prefix).write_table(FRAME, path)
    kms = FaultyKms(MASTER_KEYS)
    kms.failure, kms.failing = "refused", frozenset({"cola"})
    for method in (tools(kms, aad_prefix=aad_prefix).metadata, tools(kms, aad_prefix=aad_prefix).schema):
        with pytest.raises(ColumnAccessDeniedError, match="'a'") as caught:
            method(path)
        assert "denied_columns: hide" in caught.value.hint
    hiding = tools(kms, reading={"denied_columns": "hide"}, aad_prefix=aad_prefix)
    assert hiding.schema(path).names == ["b", "c", "i"]
    assert hiding.metadata(path).num_columns == 3
    # Like its data set.
    assert hiding.dataset(path).schema.names == ["b", "c", "i"]


def test_folders_and_plaintext_files(tmp_path: Path) -> None:
    keytools = tools()
    keytools.write_dataset(pa.table({"a": [1], "b": ["x"], "c": [2.0]}), tmp_path / "data")
    assert keytools.schema(tmp_path / "data").names == ["a", "b", "c"]
    assert keytools.schema(str(tmp_path / "data" / "*")).names == ["a", "b", "c"]
    with pytest.raises(IsADirectoryError, match="name one of its files"):
        keytools.metadata(tmp_path / "data")
    FRAME.to_parquet(tmp_path / "plain.parquet")
    with pytest.raises(NotEncryptedError):
        keytools.metadata(tmp_path / "plain.parquet")
    allowing = tools(reading={"plaintext_files": "allow"})
    assert allowing.metadata(tmp_path / "plain.parquet").num_rows == 3
