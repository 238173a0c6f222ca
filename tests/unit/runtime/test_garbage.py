"""A call leaves no keys and footers to Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from parquet_keytools import Keytools
from parquet_keytools.kms.in_memory import InMemoryKms

CALLS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda keytools, folder: keytools.read_table(folder / "a.parquet", columns=["a"]),
    "read_table, folder": lambda keytools, folder: keytools.read_table(folder),
    "dataset": lambda keytools, folder: keytools.dataset(folder).to_table(),
    "view": lambda keytools, folder: keytools.view(folder).find(str(folder)),
    "decrypt": lambda keytools, folder: keytools.decrypt_file(folder / "a.parquet", folder.parent / "plain"),
    "rekey": lambda keytools, folder: keytools.rekey_file(folder / "a.parquet", folder.parent / "new"),
    "verify": lambda keytools, folder: keytools.verify_file(folder / "a.parquet"),
    "verify, folder": lambda keytools, folder: keytools.verify_folder(folder),
    "inspect": lambda keytools, folder: keytools.inspect_file(folder / "a.parquet"),
    "keys": lambda keytools, folder: keytools.key_inventory(folder),
    "rotate": lambda keytools, folder: keytools.rotate(folder),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_leaves_no_garbage(call: Callable[[Keytools, Path], object], tmp_path: Path) -> None:
    """A wide file takes megabytes, which would stay until a full collection."""
    # What earlier tests imported and made is not visited again in each collection.
    gc.freeze()
    table = {"footer_key": "footer", "column_keys": {"private": ["a"]}, "unlisted_columns": "footer_key"}
    kms = InMemoryKms({"footer": None, "private": None})
    keytools = Keytools.from_mapping({"version": 1, "tables": {"people": table}}, kms=kms)
    folder = tmp_path / "people"
    folder.mkdir()
    for name in ("a", "b"):
        keytools.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), folder / f"{name}.parquet")
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call(keytools, folder)
        gc.collect()
        left = {
            type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("parquet_keytools")
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == set()
