"""Views that were opened are kept, and no longer than they are right."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pyarrow as pa
import pytest
from view_case import ViewCase, parquet_bytes

from parquet_keytools.errors import KmsAccessDeniedError
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.plain_files import PlainFiles


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    return ViewCase(tmp_path, {"unlisted_columns": "footer_key"})


def test_a_file_is_opened_once_and_again_when_it_was_replaced(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3]})))
    location = FileLocation.resolve(path)
    files = PlainFiles(case.keytools()._keys, None)
    first = files.open(location)
    assert files.open(location) is first
    before = bytes(first.read_at(0, first.size_bytes))
    case.encrypt(parquet_bytes(pa.table({"a": [7, 8, 9]})))
    second = files.open(location)
    assert second is not first
    assert bytes(second.read_at(0, second.size_bytes)) != before
    # Who has it open reads the file that was opened.
    assert bytes(first.read_at(0, first.size_bytes)) == before


def test_nothing_is_kept_longer_than_keys(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(pa.table({"a": [1]})))
    files = PlainFiles(case.keytools(cache_lifetime_seconds=0)._keys, None)
    files.open(FileLocation.resolve(path))
    case.kms.deny("footer")
    with pytest.raises(KmsAccessDeniedError):
        files.open(FileLocation.resolve(path))


def test_a_view_that_nobody_has_is_gone_at_once(case: ViewCase) -> None:
    """It has a file open, and what it decrypted is in the cache."""
    path = case.encrypt(parquet_bytes(pa.table({"a": range(10_000)}), write_page_index=True))
    file = case.view(path)
    file.read_at(0, file.size_bytes)
    reference = weakref.ref(file)
    gc.disable()
    try:
        del file
        assert reference() is None
    finally:
        gc.enable()
