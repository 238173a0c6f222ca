"""The file of the public test data that parquet-java wrote with key material in a JSON file."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError, KeyMaterialError

NAME = "external_key_material_java.parquet.encrypted"
KEYS = {"kf": b"0123456789012345", "kc1": b"1234567890123450", "kc2": b"1234567890123451"}


@pytest.fixture
def tools() -> Keytools:
    keys = {name: base64.b64encode(key).decode() for name, key in KEYS.items()}
    return Keytools.from_mapping({"version": 1, "kms": {"type": "in_memory", "keys": keys}})


@pytest.fixture
def path(parquet_test_data: Path, tmp_path: Path) -> Path:
    """Return a copy of the file, with its key material beside it, in a new folder."""
    for name in (NAME, f"_KEY_MATERIAL_FOR_{NAME}.json"):
        shutil.copy(parquet_test_data / name, tmp_path)
    return tmp_path / NAME


def test_three_ways_to_read(tools: Keytools, path: Path) -> None:
    table = tools.read_table(path)
    assert table["integers"].to_pylist() == list(range(100))
    assert table["strings"].to_pylist()[:3] == ["a0", "b1", "c2"]
    assert tools.dataset(path.parent).to_table().equals(table)
    assert tools.dataset(path).to_table().equals(table)
    assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(table)
    assert tools.kms is not None and tools.kms.call_counts["unwrap"] == 3


def test_the_original_where_it_lies(tools: Keytools, parquet_test_data: Path) -> None:
    assert tools.read_table(parquet_test_data / NAME).num_rows > 0


def test_a_column_that_is_refused(tools: Keytools, path: Path) -> None:
    tools.kms.deny("kc1")  # type: ignore[union-attr]
    with pytest.raises(ColumnAccessDeniedError) as caught:
        tools.read_table(path)
    assert caught.value.columns == ("integers",)
    assert tools.read_table(path, columns=["strings"]).num_rows > 0


def test_key_material_of_another_master_key(tools: Keytools, path: Path) -> None:
    """The JSON file is not authenticated; a change in it must still end in an error."""
    file = path.with_name(f"_KEY_MATERIAL_FOR_{NAME}.json")
    materials = json.loads(file.read_text())
    materials["columnKey0"], materials["columnKey1"] = materials["columnKey1"], materials["columnKey0"]
    file.write_text(json.dumps(materials))
    with pytest.raises(ColumnAccessDeniedError, match="does not authenticate"):
        tools.read_table(path)


def test_without_its_key_material(tools: Keytools, path: Path) -> None:
    path.with_name(f"_KEY_MATERIAL_FOR_{NAME}.json").unlink()
    with pytest.raises(KeyMaterialError, match="is missing"):
        tools.read_table(path)
    with pytest.raises(KeyMaterialError, match="is missing"):
        tools.decryption_properties(path)
