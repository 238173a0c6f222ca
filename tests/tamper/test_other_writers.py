"""Commands while others write: files that arrive meanwhile, the locks of our writers, the mode of the output."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rotation_case import TABLE, Case, key_material_file, names

from parquet_keytools.errors import OutputError, StorageFailedError
from parquet_keytools.files import placement
from parquet_keytools.storage.local_files import LOCK_NAME, temporary_name


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case.make(tmp_path, "in_memory")


def at_first_sync(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    fsync, done = os.fsync, []

    def synced(descriptor: int) -> None:
        if not done:
            done.append(True)
            act()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)


@pytest.mark.parametrize("action", ["rotate", "rekey_in_place"])
def test_a_file_that_lands_during_a_slow_sync_is_not_lost(
    case: Case, action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, tools = case.write(), case.tools()
    newer = TABLE.slice(0, 7)
    tools.write_table(newer, tmp_path / "newer")
    case.add_version()
    at_first_sync(monkeypatch, lambda: (tmp_path / "newer").rename(path))
    assert getattr(tools, action)(path).succeeded
    assert tools.read_table(path).equals(newer)
    assert names(case.folder) == ["x.parquet"]


def test_what_is_behind_a_link_is_not_deleted(tmp_path: Path, case: Case) -> None:
    """A user who may write to a data set puts a link there: overwriting it may delete more than they could."""
    tools, folder, elsewhere = case.tools(), tmp_path / "data set", tmp_path / "elsewhere"
    options: dict[str, Any] = {"existing_data_behavior": "delete_matching"}
    (elsewhere / "below").mkdir(parents=True)
    for path in (elsewhere / "part-0.parquet", elsewhere / "below" / "x"):
        path.write_bytes(b"not of the data set")
    tools.write_dataset(TABLE, folder, **options)
    for name in ("link", "_link"):
        (folder / name).symlink_to(elsewhere)
    tools.write_dataset(TABLE, folder, **options)
    assert names(folder) == ["part-0.parquet"]
    table = TABLE.append_column("year", pa.array([1] * len(TABLE)))
    (folder / "year=1").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="year=1 is a link, and what is behind it would be deleted"):
        tools.write_dataset(table, folder, partitioning=["year"], partitioning_flavor="hive", **options)
    assert {path.name for path in elsewhere.rglob("*")} == {"part-0.parquet", "below", "x"}
    assert (elsewhere / "part-0.parquet").read_bytes() == b"not of the data set"


def test_a_data_set_is_overwritten_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rotation overwrites new key material with old, and the file is lost."""
    case = Case.make(tmp_path, "in_memory", key_material="external")
    tools = case.tools()
    options: dict[str, Any] = {"existing_data_behavior": "overwrite_or_ignore"}
    tools.write_dataset(TABLE, case.folder, **options)
    seen: list[bool] = []
    write = placement.write_key_materials

    def watched(*arguments: Any, **named: Any) -> None:
        seen.append((case.folder / LOCK_NAME).exists())
        write(*arguments, **named)

    monkeypatch.setattr(placement, "write_key_materials", watched)
    tools.write_dataset(TABLE.slice(0, 9), case.folder, **options)
    assert seen == [True, True], "key material for both files, and then for the new one alone"
    (path,) = case.folder.glob("*.parquet")
    assert tools.read_table(path).equals(TABLE.slice(0, 9)) and key_material_file(path).exists()
    assert names(case.folder) == sorted([path.name, key_material_file(path).name])


@pytest.mark.parametrize("action", ["encrypt_file", "decrypt_file", "rekey_file"])
def test_nothing_is_replaced_in_a_race(
    case: Case, action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools, source, target = case.tools(), case.write(), tmp_path / "target"
    if action == "encrypt_file":
        pq.write_table(TABLE, source)
    at_first_sync(monkeypatch, lambda: target.write_bytes(b"of somebody else"))
    with pytest.raises(OutputError, match="target exists already"):
        getattr(tools, action)(source, target, overwrite=False)
    assert target.read_bytes() == b"of somebody else"
    assert "target" in names(tmp_path) and not [name for name in names(tmp_path) if name.startswith((".", "_"))]


@pytest.mark.parametrize("mode", [None, 0o640])
@pytest.mark.parametrize("existing", [None, 0o644])
def test_decrypted_files_are_private(case: Case, tmp_path: Path, mode: int | None, existing: int | None) -> None:
    source, target = case.write(), tmp_path / "plain.parquet"
    source.chmod(0o644)
    if existing is not None:
        target.touch()
        target.chmod(existing)
    before = os.umask(0)
    try:
        case.tools().decrypt_file(source, target, mode=mode)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == (mode or 0o600)
    assert pq.read_table(target).equals(TABLE)


def test_a_full_disk_ends_a_rekey_of_a_folder_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        case.write(f"{number}.parquet")
    before = {path.name: path.read_bytes() for path in case.folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    report = case.tools().rekey_in_place(case.folder)
    monkeypatch.undo()
    assert isinstance(report.stopped_by, StorageFailedError) and "no space left" in str(report.stopped_by)
    assert len(report.failures) == 1
    assert {path.name: path.read_bytes() for path in case.folder.iterdir()} == before
    assert isinstance(case.tools().read_table(case.folder / "4.parquet"), pa.Table)


@pytest.mark.parametrize("action", ["rekey_in_place", "write_table"])
def test_key_material_stays_with_a_file_that_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """An error after the rename is reported, and removes no keys of the file that is there by then."""
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path, tools = case.write(), case.tools()
    inode, fsync = path.stat().st_ino, os.fsync

    def broken(descriptor: int) -> None:
        fsync(descriptor)
        if path.stat().st_ino != inode:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageFailedError, match="input/output error"):
        tools.write_table(TABLE, path) if action == "write_table" else tools.rekey_in_place(path)
    monkeypatch.undo()
    assert path.stat().st_ino != inode
    assert tools.read_table(path).equals(TABLE)


def test_key_material_of_a_file_that_was_not_replaced_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path, tools = case.write(), case.tools()
    target = tmp_path / "target"
    stray = tmp_path / "_KEY_MATERIAL_FOR_target.json"
    stray.write_bytes(b'{"footerKey": "of a writer who is about to write the file"}')
    link = os.link

    def linked(*arguments: Any, **named: Any) -> None:
        if arguments[1] == "target":
            target.write_bytes(b"of somebody else")
        link(*arguments, **named)

    monkeypatch.setattr(os, "link", linked)
    with pytest.raises(OutputError, match="target exists already"):
        tools.rekey_file(path, target, overwrite=False)
    assert target.read_bytes() == b"of somebody else"
    assert stray.read_bytes() == b'{"footerKey": "of a writer who is about to write the file"}'


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_replaced(case: Case, tmp_path: Path, kind: str) -> None:
    source, target = case.write(), tmp_path / "target"
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    with pytest.raises(OutputError, match="is not a regular file" if kind == "pipe" else "is a folder"):
        case.tools().decrypt_file(source, target)
    assert target.is_fifo() or target.is_dir()


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_data_set_is_written_where_a_killed_process_left_a_part(
    case: Case, tmp_path: Path, is_dead: bool
) -> None:
    """Arrow writes only into an empty folder, and would count the temporary file."""
    folder = tmp_path / "killed"
    folder.mkdir()
    left = folder / temporary_name("part-0.parquet")
    with left.open("wb") as file:
        file.write(b"PAR1")
        file.flush()
        if not is_dead:
            # Its writer holds this lock as long as it lives.
            fcntl.flock(file, fcntl.LOCK_EX)
            before = names(folder)
            with pytest.raises(pa.ArrowInvalid):
                case.tools().write_dataset(TABLE, folder)
            assert names(folder) == before
            return
    case.tools().write_dataset(TABLE, folder)
    assert names(folder) == ["part-0.parquet"]
