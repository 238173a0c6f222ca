"""Decryption properties for pyarrow's own readers: they have the keys that were unwrapped at their creation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms
from pyarrow_versions import DECRYPTS_IN_THREADS

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError

MASTER_KEYS = {"kf": b"0123456789012345", "ka": b"1234567890123450", "kb": b"1234567890123451"}
TABLE = pa.table({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})

pytestmark = pytest.mark.skipif(not DECRYPTS_IN_THREADS, reason="this pyarrow does not decrypt in several threads")


@pytest.fixture(params=[False, True], ids=["single wrapping", "double wrapping"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Keytools, FaultyKms, Path]:
    """Return tools, their KMS, and an encrypted file."""
    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "t": {
                "footer_key": "kf",
                "column_keys": {"ka": ["a"], "kb": ["b"]},
                "unlisted_columns": "plaintext",
                "double_wrapping": request.param,
            }
        },
    }
    kms = FaultyKms(MASTER_KEYS)
    path = tmp_path / "x.parquet"
    Keytools(parse_configuration(document), kms=kms).write_table(TABLE, path, row_group_size=1)
    return Keytools(parse_configuration(document), kms=kms), kms, path


def test_keys_of_the_named_columns_are_unwrapped_by_the_call(written: tuple[Keytools, FaultyKms, Path]) -> None:
    keytools, kms, path = written
    kms.fail("refused", "kb")
    properties = keytools.decryption_properties(path, columns=["a", "c"])
    assert kms.call_counts["unwrap"] == 2
    assert pq.read_table(path, columns=["a", "c"], decryption_properties=properties).equals(
        TABLE.select(["a", "c"])
    )
    with pq.ParquetFile(path, decryption_properties=properties) as file:
        assert file.read(["a"]).equals(TABLE.select(["a"]))
    assert kms.call_counts["unwrap"] == 2, "pyarrow makes no KMS call"


def test_without_names_the_keys_of_all_columns_are_unwrapped(written: tuple[Keytools, FaultyKms, Path]) -> None:
    keytools, kms, path = written
    properties = keytools.decryption_properties(path)
    assert kms.call_counts["unwrap"] == 3
    assert pq.read_table(path, decryption_properties=properties).equals(TABLE)
    assert kms.call_counts["unwrap"] == 3


@pytest.mark.parametrize("columns", [None, ["b"], ["a", "b"]])
def test_a_refused_key_is_an_error_of_the_call(
    written: tuple[Keytools, FaultyKms, Path], columns: list[str] | None
) -> None:
    keytools, kms, path = written
    kms.fail("refused", "kb")
    with pytest.raises(ColumnAccessDeniedError, match="cannot read 'b'"):
        keytools.decryption_properties(path, columns=columns)
