"""The files of a data set in S3: the same rules as in folders."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from s3_store import BUCKET, S3Store

from parquet_keytools import Keytools
from parquet_keytools.errors import NoParquetFilesError
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import LeftOut, LeftOutReason, ParquetFile, Unseen, data_set

TABLE = pa.table({"_year": [2013, 2014, 2013], "v": [1, 2, 3]})
BELONG = (
    "ODD.PARQUET",
    "_y=1/p",
    "a%2Fb.parquet",
    "sp ace=1/z.parquet",
    "x.parquet",
    "x.parquet/c.parquet",
    "é.parquet",
)


def tools() -> Keytools:
    table = {"footer_key": "f", "unlisted_columns": "footer_key", "also_trusted": ["new"]}
    kms = {"type": "in_memory", "keys": ["f", "new"]}
    return Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"t": table}})


def test_the_same_rule_holds(store: S3Store) -> None:
    for name in (*BELONG, "_SUCCESS", "_delta_log/1.parquet", ".x.parquet.crc", "_metadata"):
        store.put(f"d/{name}", b"PAR1....PAR1")
    store.put("d/notes.txt", b"some notes")
    store.put("d/empty/", b"")
    location = FileLocation(store.filesystem(), f"{BUCKET}/d")
    found: dict[str, Any] = {
        entry.location.path.removeprefix(f"{BUCKET}/d/"): entry for entry in data_set(location)
    }
    assert {name for name, entry in found.items() if isinstance(entry, ParquetFile)} == set(BELONG)
    assert {name: entry.reason for name, entry in found.items() if isinstance(entry, LeftOut)} == {
        "_SUCCESS": LeftOutReason.PASSED_OVER,
        "_delta_log": LeftOutReason.PASSED_OVER,
        ".x.parquet.crc": LeftOutReason.PASSED_OVER,
        "_metadata": LeftOutReason.SUMMARY,
        "notes.txt": LeftOutReason.NOT_PARQUET,
    }


def test_all_readers_and_commands_see_the_same(store: S3Store, caplog: pytest.LogCaptureFixture) -> None:
    keytools, filesystem = tools(), store.filesystem()
    place: Any = f"{BUCKET}/d"
    keytools.write_dataset(TABLE, place, partitioning=["_year"], filesystem=filesystem)
    assert sorted(keytools.read_table(place, filesystem=filesystem)["v"].to_pylist()) == [1, 2, 3]
    names = {f"s3:{place}/_year={year}/part-0.parquet" for year in (2013, 2014)}
    assert {file.path for file in keytools.key_inventory(place, filesystem=filesystem)} == names
    report = keytools.rotate(place, moves={"f": "new"}, filesystem=filesystem)
    assert report.succeeded and {file.path for file in report.files} == names
    assert {file.path for file in keytools.verify_folder(place, filesystem=filesystem).files} == names
    store.put("d/notes.txt", b"some notes")
    assert keytools.dataset(place, filesystem=filesystem).count_rows() == 3
    assert "notes.txt" in caplog.text


def test_a_folder_without_parquet_files(store: S3Store) -> None:
    store.put("d/_x.parquet", b"PAR1....PAR1")
    for ask in (tools().rotate, lambda *place, **more: list(tools().key_inventory(*place, **more))):
        with pytest.raises(NoParquetFilesError):
            ask(f"{BUCKET}/d", filesystem=store.filesystem())


def test_what_a_prefix_refuses_is_reported(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role may list only some prefixes: Arrow reports it, and the other prefixes are listed."""
    for name in ("a=1/x.parquet", "a=2/x.parquet"):
        store.put(f"d/{name}", b"PAR1....PAR1")
    from parquet_keytools.storage import walk

    selector = walk.pafs.FileSelector

    def refused(path: str, *more: Any, **options: Any) -> Any:
        if path.endswith("a=1"):
            raise OSError("When listing objects in bucket 'bucket': AWS Error ACCESS_DENIED")
        return selector(path, *more, **options)

    monkeypatch.setattr(walk.pafs, "FileSelector", refused)
    entries = list(data_set(FileLocation(store.filesystem(), f"{BUCKET}/d")))
    (unseen,) = [entry for entry in entries if isinstance(entry, Unseen)]
    assert unseen.location.path == f"{BUCKET}/d/a=1" and "ACCESS_DENIED" in unseen.reason
    assert [type(entry) for entry in entries].count(ParquetFile) == 1
