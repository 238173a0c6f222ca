"""Opened views are cached, but no longer than they are valid."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from key_services import key_service
from view_case import ViewCase, parquet_bytes

from parquet_keytools.errors import KmsAccessDeniedError, ReusedKeysError
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.plain_file import PlainFiles


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    return ViewCase(tmp_path, {"unlisted_columns": "footer_key"})


def test_a_file_is_opened_once_and_again_when_it_was_replaced(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3]})))
    location = FileLocation.resolve(path)
    files = PlainFiles(key_service(case.keytools()), None)
    first = files.open(location)
    assert files.open(location) is first
    before = bytes(first.read_at(0, first.size_bytes))
    case.encrypt(parquet_bytes(pa.table({"a": [7, 8, 9]})))
    second = files.open(location)
    assert second is not first
    assert bytes(second.read_at(0, second.size_bytes)) != before
    # A reader who has it open reads the file that was opened.
    assert bytes(first.read_at(0, first.size_bytes)) == before


def test_nothing_is_kept_longer_than_keys(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(pa.table({"a": [1]})))
    files = PlainFiles(key_service(case.keytools(cache_lifetime_seconds=0)), None)
    files.open(FileLocation.resolve(path))
    case.kms.deny("footer")
    with pytest.raises(KmsAccessDeniedError):
        files.open(FileLocation.resolve(path))


def test_a_view_that_nobody_has_is_gone_at_once(case: ViewCase) -> None:
    """It has a file open, and its decrypted data is in the cache."""
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


# --- Files that share keys -----------------------------------------------------------------------------------


def copied(case: ViewCase, name: str) -> Path:
    target = case.folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(case.folder / "x.parquet", target)
    return target


def test_files_of_a_folder_that_share_their_keys_are_refused(case: ViewCase) -> None:
    case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3]})))
    copied(case, "month=2/y.parquet")
    view = case.keytools().view(case.folder)
    assert pq.read_table("x.parquet", filesystem=view).num_rows == 3
    for _ in range(2):
        with pytest.raises(ReusedKeysError, match=r"y\.parquet.*x\.parquet.*rekey FOLDER"):
            view.open("month=2/y.parquet")
        assert pq.read_table("x.parquet", filesystem=view).num_rows == 3
    with pytest.raises(ReusedKeysError):
        ds.dataset([f"{case.folder}/month=2/y.parquet", f"{case.folder}/x.parquet"], filesystem=view_of_all(case))
    allowing = case.keytools(reused_encryption_properties="allow").view(case.folder)
    assert len(pq.read_table("x.parquet", filesystem=allowing)) == 3
    assert len(pq.read_table("month=2/y.parquet", filesystem=allowing)) == 3


def view_of_all(case: ViewCase) -> Any:
    view = case.keytools().view("/")
    view.open(str(case.folder / "x.parquet"))
    return view


def test_a_file_that_was_renamed_is_the_same_file(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3]})))
    view = case.keytools().view(case.folder)
    view.open("x.parquet")
    path.rename(case.folder / "y.parquet")
    view.open("y.parquet")
    # Another file under the old name, and then a copy of the first one again.
    case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3, 4]})))
    assert pq.read_table("x.parquet", filesystem=view).num_rows == 4
    shutil.copy(case.folder / "y.parquet", path)
    with pytest.raises(ReusedKeysError):
        view.open("x.parquet")


def test_by_urls_each_folder_is_one_of_its_own(case: ViewCase) -> None:
    """A process may read a table and a backup of it."""
    case.encrypt(parquet_bytes(pa.table({"a": [1, 2, 3]})))
    copied(case, "backup/x.parquet")
    copied(case, "z.parquet")
    files = case.keytools().filesystem()
    for name in ("x.parquet", "backup/x.parquet"):
        assert pq.read_table(str(case.folder / name), filesystem=files).num_rows == 3
    with pytest.raises(ReusedKeysError):
        files.open(str(case.folder / "z.parquet"))
