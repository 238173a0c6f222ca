"""The walk by itself; for its use in commands, see tests/tamper/test_walk_matrix.py."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from delegating_handler import DelegatingHandler
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs

from parquet_keytools import Keytools
from parquet_keytools.errors import NoParquetFilesError, OutputError
from parquet_keytools.storage import walk
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import LeftOut, LeftOutReason, ParquetFile, Unseen, data_set


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a=1/x.parquet", "a=2/x.parquet", "z.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    return tmp_path


def found(folder: Path, **options: Any) -> dict[str, Any]:
    """The entries found, by their path within the folder."""
    return {
        os.path.relpath(entry.location.path, folder): entry
        for entry in data_set(FileLocation.resolve(folder), **options)
    }


def files_of(entries: dict[str, Any]) -> set[str]:
    return {name for name, entry in entries.items() if isinstance(entry, ParquetFile)}


def test_a_folder_that_breaks_off_while_it_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries listed before count, and the walk reports that there may be more."""
    scandir = os.scandir

    class Broken:
        def __init__(self, path: str) -> None:
            self._entries = scandir(path)
            self._breaks = path.endswith("a=1")

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __iter__(self) -> Any:
            yield from self._entries
            if self._breaks:
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(walk.os, "scandir", Broken)
    entries = found(root)
    assert files_of(entries) == {"a=1/x.parquet", "a=2/x.parquet", "z.parquet"}
    unseen = entries["a=1"]
    assert isinstance(unseen, Unseen) and unseen.error.errno == errno.EIO and not unseen.is_gone
    assert unseen.error.filename == str(root / "a=1")


def test_a_folder_that_is_removed_meanwhile(root: Path) -> None:
    walking = walk.walk(FileLocation.resolve(root))
    assert isinstance(next(walking), ParquetFile)
    (root / "a=2" / "x.parquet").unlink()
    (root / "a=2").rmdir()
    entries = list(walking)
    (gone,) = [entry for entry in entries if isinstance(entry, Unseen)]
    assert gone.is_gone and gone.path == str(root / "a=2")


def test_a_folder_that_is_replaced_by_a_file(root: Path) -> None:
    walking = walk.walk(FileLocation.resolve(root))
    next(walking)
    (root / "a=2" / "x.parquet").unlink()
    (root / "a=2").rmdir()
    (root / "a=2").write_bytes(b"PAR1")
    (unseen,) = [entry for entry in walking if isinstance(entry, Unseen)]
    assert not unseen.is_gone and unseen.error.errno == errno.ENOTDIR


@pytest.fixture
def deep_path() -> Iterator[Path]:
    """A folder that is removed without recursion."""
    path = Path(tempfile.mkdtemp(prefix="keytools-"))
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def make_deep(path: Path, name: str, depth: int) -> int:
    """Create nested folders, and return a descriptor of the last one."""
    folder = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=folder)
        below = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    return folder


def test_folders_may_lie_deeper_than_python_calls(deep_path: Path) -> None:
    folder = make_deep(deep_path, "d", 1700)
    os.close(os.open("x.parquet", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.close(folder)
    (entry,) = data_set(FileLocation.resolve(deep_path))
    assert isinstance(entry, ParquetFile)
    assert entry.location.path == f"{deep_path}{1700 * '/d'}/x.parquet"


def test_a_path_that_is_too_long_is_reported(deep_path: Path) -> None:
    os.close(make_deep(deep_path, "d" * 200, 30))
    (unseen,) = data_set(FileLocation.resolve(deep_path))
    assert isinstance(unseen, Unseen) and unseen.error.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("content", ["nothing", "notes", "passed over"])
def test_a_folder_without_parquet_files(tmp_path: Path, content: str) -> None:
    if content == "notes":
        (tmp_path / "notes.txt").write_text("notes")
    if content == "passed over":
        (tmp_path / "_x.parquet").write_bytes(b"PAR1")
    with pytest.raises(NoParquetFilesError, match="the folder has no Parquet files"):
        list(data_set(FileLocation.resolve(tmp_path)))


def test_what_is_in_folders_that_are_passed_over(root: Path) -> None:
    (root / "_old" / "deeper").mkdir(parents=True)
    (root / "_old" / "deeper" / "x.parquet").write_bytes(b"PAR1")
    (root / "_old" / "link").symlink_to("/nowhere")
    entries = found(root)
    assert entries["_old"].may_be_data and len(entries) == 4
    entries = found(root, into_passed_over=True)
    assert {name for name, entry in entries.items() if isinstance(entry, LeftOut)} == {
        "_old/deeper/x.parquet",
        "_old/link",
    }
    assert {entry.reason for entry in entries.values() if isinstance(entry, LeftOut)} == {
        LeftOutReason.PASSED_OVER
    }


def test_what_the_caller_names_may_be_called_anything(tmp_path: Path) -> None:
    folder = tmp_path / "_hidden" / ".deep"
    folder.mkdir(parents=True)
    (folder / "x.parquet").touch()
    assert files_of(found(folder)) == {"x.parquet"}


def test_a_name_is_not_opened_to_look_for_magic(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "has_magic", lambda path: pytest.fail(path))
    (root / "part-00001-a1b2").touch()
    assert files_of(found(root)) == {"a=1/x.parquet", "a=2/x.parquet", "z.parquet", "part-00001-a1b2"}


# --- other file systems ---


class Refusing(MemoryFileSystem):
    """A store whose client may not list one folder, and caches its listings."""

    protocol = "refusing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refused: type[Exception] | None = PermissionError

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.refused is not None and path.rstrip("/").endswith("a=1"):
            raise self.refused("https://store/?signature=canary")
        return super().ls(path, detail, **options)


@pytest.mark.parametrize("refused", [PermissionError, RuntimeError, TimeoutError])
def test_what_fsspec_may_not_list_is_not_left_out_in_silence(refused: type[Exception]) -> None:
    filesystem = Refusing(skip_instance_cache=True)
    filesystem.refused = refused
    for name in ("a=1/x.parquet", "a=2/x.parquet"):
        filesystem.pipe(f"/refusing/{name}", b"PAR1")
    entries = list(data_set(FileLocation.resolve("/refusing", filesystem)))
    (unseen,) = [entry for entry in entries if isinstance(entry, Unseen)]
    assert unseen.location.path == "/refusing/a=1"
    assert "canary" not in unseen.reason or issubclass(refused, OSError)
    (file,) = [entry for entry in entries if isinstance(entry, ParquetFile)]
    assert file.location.path == "/refusing/a=2/x.parquet"


class Listing(DelegatingHandler):
    """A file system with a given listing."""

    def __init__(self, infos: Callable[[str], list[pafs.FileInfo]]) -> None:
        super().__init__(pafs.LocalFileSystem())
        self._infos = infos

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [pafs.FileInfo(path, pafs.FileType.Directory) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._infos(selector.base_dir)


def walked(infos: Callable[[str], list[pafs.FileInfo]]) -> dict[str, Any]:
    filesystem = pafs.PyFileSystem(Listing(infos))
    return {entry.location.path: entry for entry in data_set(FileLocation(filesystem, "bucket/d"))}


def test_what_a_store_cannot_name_is_reported() -> None:
    """Such as the object `d//x.parquet`, whose folder has no name."""
    odd = [
        pafs.FileInfo("bucket/d", pafs.FileType.Directory),
        pafs.FileInfo("bucket/d/", pafs.FileType.File, size=0),
        pafs.FileInfo("bucket/d//e", pafs.FileType.Directory),
        pafs.FileInfo("bucket/d//x.parquet", pafs.FileType.File, size=4),
        pafs.FileInfo("bucket/d/u.parquet", pafs.FileType.Unknown),
        pafs.FileInfo("bucket/d/good.parquet", pafs.FileType.File, size=4),
    ]
    entries = walked(lambda path: odd)
    assert {path for path, entry in entries.items() if isinstance(entry, Unseen)} == {
        "bucket/d//e",
        "bucket/d//x.parquet",
        "bucket/d/u.parquet",
    }
    assert isinstance(entries["bucket/d/good.parquet"], ParquetFile)


def test_folders_without_an_end_come_to_one() -> None:
    entries = walked(lambda path: [pafs.FileInfo(f"{path}/e", pafs.FileType.Directory)])
    (unseen,) = entries.values()
    assert isinstance(unseen, Unseen) and "too deep" in unseen.reason


def test_many_folders_of_a_store_come_in_order_and_once() -> None:
    def infos(path: str) -> list[pafs.FileInfo]:
        if path == "bucket/d":
            return [pafs.FileInfo(f"{path}/p={i:03}", pafs.FileType.Directory) for i in range(100)]
        return [pafs.FileInfo(f"{path}/x.parquet", pafs.FileType.File, size=4)]

    assert list(walked(infos)) == [f"bucket/d/p={i:03}/x.parquet" for i in range(100)]


def test_a_listing_that_was_kept_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/kept/x.parquet", b"PAR1")
    forgotten: list[str] = []
    monkeypatch.setattr(filesystem, "invalidate_cache", forgotten.append)
    list(data_set(FileLocation.resolve("/kept", filesystem)))
    assert forgotten == ["/kept"]


# --- written files are read ---


def tools(**table: Any) -> Keytools:
    settings = {"footer_key": "f", "unlisted_columns": "footer_key", **table}
    kms = {"type": "in_memory", "keys": ["f"]}
    return Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"t": settings}})


TABLE = pa.table({"_year": [2013, 2014, 2013], "c": ["_x", "y", ".z"], "v": [1, 2, 3]})


def test_partitions_whose_names_begin_with_an_underscore_are_read(tmp_path: Path) -> None:
    keytools = tools()
    keytools.write_dataset(TABLE, tmp_path, partitioning=["_year"])
    assert keytools.read_table(tmp_path).sort_by("v").select(TABLE.column_names).to_pydict() == TABLE.to_pydict()
    some = keytools.dataset(tmp_path).to_table(filter=ds.field("_year") == 2013)
    assert sorted(some["v"].to_pylist()) == [1, 3]


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"partitioning": ds.partitioning(pa.schema([("c", pa.string())]))}, "_x"),
        ({"partitioning": ds.partitioning(pa.schema([("c", pa.string())]), flavor="filename")}, "_part-0.parquet"),
        ({"basename_template": "_part-{i}.parquet"}, "_part-0.parquet"),
        ({"basename_template": ".part-{i}.parquet"}, ".part-0.parquet"),
    ],
)
def test_what_no_reader_would_look_at_is_not_written(
    tmp_path: Path, options: dict[str, Any], name: str, plaintext_footer: bool
) -> None:
    with pytest.raises(OutputError, match="readers of data sets skip names") as caught:
        tools(plaintext_footer=plaintext_footer).write_dataset(TABLE, tmp_path, **options)
    assert "hive" in caught.value.hint
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_column_whose_name_begins_with_a_dot_is_no_partition(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"'\.c="):
        tools().write_dataset(TABLE.rename_columns(["_year", ".c", "v"]), tmp_path, partitioning=[".c"])
