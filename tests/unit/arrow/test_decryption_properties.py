"""What our decryption properties need to know of pyarrow: these tests fail first when it changes."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.arrow import read_options
from parquet_keytools.errors import ColumnAccessDeniedError

MASTER_KEYS = {"kf": b"0123456789012345", "ka": b"1234567890123450", "kb": b"1234567890123451"}
TABLE = pa.table({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})
CHANGED = (
    f"pyarrow {pa.__version__} is not as arrow/read_options.py expects it. Reading stays safe: it is "
    "refused without names of columns. See _RefusalBeforeArrow: "
)


@pytest.fixture(params=[False, True], ids=["single wrapping", "double wrapping"])
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Keytools, Path]:
    """An encrypted file, and tools that are refused the key of its column b."""
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "t": {"footer_key": "kf", "column_keys": {"ka": ["a"], "kb": ["b"]}, "double_wrapping": request.param}
        },
    }
    kms = FaultyKms(MASTER_KEYS)
    path = tmp_path / "x.parquet"
    Keytools(parse_configuration(document), kms=kms).write_table(TABLE, path)
    kms.fail("refused", "kb")
    return Keytools(parse_configuration(document), kms=kms), path


def test_read_table_is_a_function_of_python_with_the_arguments_that_are_looked_up() -> None:
    assert inspect.isfunction(inspect.unwrap(pq.read_table)), (
        CHANGED + "read_table is no function of Python any more."
    )
    gone = set(read_options._LOOKED_AT) - inspect.signature(pq.read_table).parameters.keys()
    assert not gone, f"{CHANGED}read_table has no arguments {gone} any more."


def test_columns_that_read_table_does_not_ask_for_may_be_refused(refused: tuple[Keytools, Path]) -> None:
    keytools, path = refused
    properties = keytools.decryption_properties(path)
    try:
        found = pq.read_table(path, columns=["a", "c"], decryption_properties=properties)
    except ColumnAccessDeniedError as error:
        pytest.fail(
            f"{CHANGED}the arguments of read_table are not found where Arrow asks for the footer key: {error}"
        )
    assert found.equals(TABLE.select(["a", "c"]))
    with pytest.raises(ColumnAccessDeniedError, match="cannot read 'b'"):
        pq.read_table(path, decryption_properties=keytools.decryption_properties(path))
    with pytest.raises(ColumnAccessDeniedError, match="cannot read 'b'"):
        properties = keytools.decryption_properties(path)
        pq.read_table(path, columns=["a"], filters=[("b", ">", 4)], decryption_properties=properties)


def test_other_readers_have_to_name_their_columns(refused: tuple[Keytools, Path]) -> None:
    keytools, path = refused
    with pytest.raises(ColumnAccessDeniedError, match="Name the columns that you need"):
        pq.ParquetFile(path, decryption_properties=keytools.decryption_properties(path))
    named = keytools.decryption_properties(path, columns=["a"])
    assert pq.ParquetFile(path, decryption_properties=named).read(["a"]).equals(TABLE.select(["a"]))


@pytest.mark.parametrize("change", ["renamed arguments", "not a function of Python"])
def test_a_read_table_that_is_not_known_reads_nothing_unasked(
    refused: tuple[Keytools, Path], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keytools, path = refused
    read_table = pq.read_table
    if change == "renamed arguments":
        monkeypatch.setattr(read_options, "_LOOKED_AT", ("columns", "filter_expression"))
    else:
        monkeypatch.setattr(read_options.pq, "read_table", len)
    with pytest.raises(ColumnAccessDeniedError, match="Name the columns that you need"):
        read_table(path, columns=["a"], decryption_properties=keytools.decryption_properties(path))
    named = keytools.decryption_properties(path, columns=["a"])
    assert read_table(path, columns=["a"], decryption_properties=named).equals(TABLE.select(["a"]))


def test_threads_of_arrow_are_told_from_those_of_python(
    refused: tuple[Keytools, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With single wrapping Arrow asks for the footer key of a row group again, on threads of its own."""
    keytools, path = refused
    # The threads that `threading` lists would not do: logging adds those of Arrow on which it was called.
    caller = threading.get_ident()
    asked: set[tuple[bool, bool]] = set()
    check: Any = read_options._RefusalBeforeArrow.check

    def recording(self: Any, wrapped_key: str, master_key_id: str, is_thread_of_arrow: bool) -> None:
        asked.add((threading.get_ident() == caller, is_thread_of_arrow))
        check(self, wrapped_key, master_key_id, is_thread_of_arrow)

    monkeypatch.setattr(read_options._RefusalBeforeArrow, "check", recording)
    pq.read_table(path, columns=["a", "c"], decryption_properties=keytools.decryption_properties(path))
    assert (True, False) in asked
    assert asked <= {(True, False), (False, True)}, f"{CHANGED}its threads are not told from ours: {asked}"
