"""Outputs while others interfere: links in place of names, files that arrive meanwhile, killed processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools.errors import ChangedMeanwhileError, OutputError, StorageFailedError
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage import local_files, outputs
from parquet_keytools.storage.local_files import (
    OccasionalScan,
    parse_temporary_name,
    temporary_name,
    without_leftovers,
)
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import PendingOutput, discarded_unless_done, pending_output

KINDS = ("links and locks", "no links", "no locks")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system supports."""
    if request.param == "no links":

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    elif request.param == "no locks":

        def unsupported(*_: object) -> bool:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(operating_system, "try_lock", unsupported)
    return str(request.param)


@pytest.fixture(autouse=True)
def every_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OccasionalScan, "is_due", lambda *_: True)


def at(path: Path) -> FileLocation:
    return FileLocation.resolve(path)


@contextlib.contextmanager
def whole_output(
    target: FileLocation, *, check: Callable[[], object] | None = None, **options: Any
) -> Iterator[PendingOutput]:
    """Write a file that is put in place when the block ends, as all writers do."""
    with discarded_unless_done(pending_output(target, **options)) as pending:
        yield pending
        pending.commit(check)


def write(pending: PendingOutput, data: bytes) -> None:
    with pending.open_sink() as sink:
        sink.write_at(0, data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_sync(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something while the new file is synced to the disk, which may take long."""
    fsync, done = os.fsync, []

    def synced(descriptor: int) -> None:
        if not done:
            done.append(True)
            act()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)


# --- by descriptor ---


def test_a_link_in_place_of_the_new_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's target got the mode of the file: a passphrase, readable by everyone."""
    victim = tmp_path / "passphrase"
    victim.write_bytes(b"secret")
    victim.chmod(0o600)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_bytes(b"old")
    (folder / "x").chmod(0o666)

    def swap() -> None:
        for path in folder.glob(".x.*"):
            path.unlink()
            path.symlink_to(victim)

    at_sync(monkeypatch, swap)
    with (
        pytest.raises(OutputError, match="not the one that was written"),
        whole_output(at(folder / "x")) as pending,
    ):
        write(pending, b"new")
    assert victim.read_bytes() == b"secret" and victim.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_moved(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "x").write_bytes(b"of somebody else")

    def move() -> None:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(other)

    at_sync(monkeypatch, move)
    with pytest.raises(OutputError, match=r"folder of .* was moved"), whole_output(at(folder / "x")) as pending:
        write(pending, b"new")
    assert (other / "x").read_bytes() == b"of somebody else" and names(other) == ["x"]
    assert names(tmp_path / "moved") == []


@pytest.mark.parametrize("keeps_open", [True, False])
def test_a_link_as_target_is_replaced_and_not_followed(tmp_path: Path, keeps_open: bool) -> None:
    (tmp_path / "elsewhere").write_bytes(b"stays")
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    with discarded_unless_done(pending_output(at(tmp_path / "x"), keeps_open=keeps_open)) as pending:
        write(pending, b"new")
        pending.commit()
    assert (tmp_path / "elsewhere").read_bytes() == b"stays"
    assert (tmp_path / "x").read_bytes() == b"new" and not (tmp_path / "x").is_symlink()


def test_a_file_that_anybody_may_have_put_there_says_nothing(tmp_path: Path) -> None:
    """In a folder that all may write to: otherwise, the user who put it there would own its replacement."""
    tmp_path.chmod(0o1777)
    (tmp_path / "x").touch()
    os.chown(tmp_path / "x", 65534, 65534)
    (tmp_path / "x").chmod(0o666)
    with whole_output(at(tmp_path / "x")) as pending:
        write(pending, b"new")
    found = (tmp_path / "x").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o666 & ~umask())


def umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


def test_owner_and_mode_of_another_version_are_kept(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(0o640)
    os.chown(tmp_path / "x", 12345, 12346)
    os.setxattr(tmp_path / "x", "user.note", b"kept")
    with whole_output(at(tmp_path / "x"), like=at(tmp_path / "x")) as pending:
        write(pending, b"new")
    found = (tmp_path / "x").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 12346, 0o640)
    assert os.getxattr(tmp_path / "x", "user.note") == b"kept"


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_lost_access_list_takes_the_permissions_of_the_group_along(
    tmp_path: Path, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group bits are the mask of the list: without the list, the group would have these permissions."""
    path = tmp_path / "x"
    path.touch()
    path.chmod(0o664)
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    monkeypatch.setattr(os, "getxattr", lambda *_: b"a list")

    def copied(*_: object) -> None:
        if not is_copied:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "setxattr", copied)
    with whole_output(at(path), like=at(path)) as pending:
        write(pending, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == (0o664 if is_copied else 0o604)


# --- no replacement ---


def test_nothing_is_replaced_without_overwrite(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_sync(monkeypatch, lambda: (tmp_path / "x").write_bytes(b"came meanwhile") and None)
    with (
        pytest.raises(OutputError, match=r"x exists already\. Use --overwrite"),
        whole_output(at(tmp_path / "x"), overwrite=False) as pending,
    ):
        write(pending, b"new")
    assert (tmp_path / "x").read_bytes() == b"came meanwhile" and names(tmp_path) == ["x"]


def test_a_link_that_leads_nowhere_is_there(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_sync(monkeypatch, lambda: (tmp_path / "x").symlink_to(tmp_path / "nowhere"))
    with (
        pytest.raises(OutputError, match="exists already"),
        whole_output(at(tmp_path / "x"), overwrite=False) as pending,
    ):
        write(pending, b"new")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").is_symlink()


def test_a_new_file_without_overwrite(tmp_path: Path, kind: str) -> None:
    with whole_output(at(tmp_path / "x"), overwrite=False) as pending:
        write(pending, b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and names(tmp_path) == ["x"]
    with pytest.raises(OutputError, match="exists already"), whole_output(at(tmp_path / "x"), overwrite=False):
        pytest.fail("the work was begun")


# --- the last comparison ---


def land(path: Path, data: bytes) -> None:
    """Put a file in place as other writers do."""
    new = path.with_name("landing")
    new.write_bytes(data)
    new.rename(path)


def test_what_lands_while_it_is_synced_stays(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    before = path.stat().st_ino

    def check() -> None:
        if path.stat().st_ino != before:
            raise ChangedMeanwhileError("changed")

    at_sync(monkeypatch, lambda: land(path, b"of another writer"))
    with pytest.raises(ChangedMeanwhileError), whole_output(at(path), check=check) as pending:
        write(pending, b"new")
    assert path.read_bytes() == b"of another writer" and names(tmp_path) == ["x"]


def test_what_lands_after_the_check_stays(tmp_path: Path, kind: str) -> None:
    """Another writer's file is detected by a last check just before the rename."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with (
        pytest.raises(ChangedMeanwhileError, match="x was changed by another process"),
        whole_output(at(path), check=lambda: land(path, b"of another writer")) as pending,
    ):
        write(pending, b"new")
    assert path.read_bytes() == b"of another writer" and names(tmp_path) == ["x"]


def test_a_file_that_is_removed_meanwhile_does_not_come_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ChangedMeanwhileError), whole_output(at(path), check=path.unlink) as pending:
        write(pending, b"new")
    assert names(tmp_path) == []


# --- leftovers ---


def killed_while_writing(path: Path, **options: Any) -> None:
    child = os.fork()
    if child == 0:
        with discarded_unless_done(pending_output(at(path), **options)) as pending:
            write(pending, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("keeps_open", [True, False])
def test_the_next_run_removes_what_is_left(tmp_path: Path, keeps_open: bool) -> None:
    killed_while_writing(tmp_path / "x", keeps_open=keeps_open)
    left = [name for name in names(tmp_path) if parse_temporary_name(name)]
    assert len(left) == 1 and (tmp_path / left[0]).read_bytes() == b"half"
    with whole_output(at(tmp_path / "x")) as pending:
        write(pending, b"whole")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"whole"


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("put", [None, b"another file"])
def test_a_temporary_file_that_was_replaced_does_not_get_into_place(
    tmp_path: Path, overwrite: bool, put: bytes | None
) -> None:
    target = tmp_path / "x"
    if overwrite:
        target.write_bytes(b"old")
    with pytest.raises(OutputError), whole_output(at(target), overwrite=overwrite) as pending:
        write(pending, b"new")
        (temporary,) = (path for path in tmp_path.iterdir() if path.name != "x")
        temporary.unlink()
        if put is not None:
            temporary.write_bytes(put)
    assert target.exists() == overwrite
    assert not overwrite or target.read_bytes() == b"old"


@pytest.mark.parametrize("keeps_open", [True, False])
def test_a_running_write_is_never_disturbed(
    tmp_path: Path, kind: str, keeps_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by another writer in the folder, however long it takes, nor where it cannot stay open."""
    if not keeps_open:
        monkeypatch.setattr(outputs, "MOST_STAYING_OPEN", 0)
    with whole_output(at(tmp_path / "x"), keeps_open=keeps_open) as pending:
        write(pending, b"of the first")
        child = os.fork()
        if child == 0:
            with whole_output(at(tmp_path / "y")) as other:
                write(other, b"of the second")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert names(tmp_path) == ["x", "y"]
    assert (tmp_path / "x").read_bytes() == b"of the first"


def open_in(folder: Path) -> list[str]:
    """Return the open places in a folder: other tests' sockets may close at any time."""
    return [place for place in open_places() if place.startswith(str(folder.resolve()))]


def test_more_files_than_may_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_STAYING_OPEN", 2)
    with contextlib.ExitStack() as opened:
        for number in range(5):
            target = at(tmp_path / str(number))
            pending = opened.enter_context(whole_output(target, keeps_open=False))
            write(pending, b"%d" % number)
        assert len(open_in(tmp_path)) == 4
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(n): str(n) for n in range(5)}
    assert open_in(tmp_path) == []


def test_long_names(tmp_path: Path, kind: str) -> None:
    """A name of 255 bytes leaves no room for more."""
    path = tmp_path / ("ä" * 120 + "x" * 15)
    for data in (b"first", b"second"):
        with whole_output(at(path)) as pending:
            write(pending, data)
        assert path.read_bytes() == data
    with whole_output(at(path), check=lambda: None) as pending:
        write(pending, b"third")
    assert path.read_bytes() == b"third" and names(tmp_path) == [path.name]


def test_only_what_is_surely_ours_and_not_written_is_removed(tmp_path: Path) -> None:
    running, unlockable = temporary_name("x"), temporary_name("x", is_locked=False)
    other_machine = re.sub("-[0-9a-f]{8}", "-01234567", temporary_name("x"))
    kept = [running, unlockable, other_machine, ".x.0123456789ab.tmp"]  # The last one belongs to another program.
    for name in kept:
        (tmp_path / name).write_bytes(b"kept")
    link, folder, foreign = (temporary_name(name) for name in ("link", "folder", "foreign"))
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / link).symlink_to(tmp_path / "victim")
    (tmp_path / folder).mkdir()
    (tmp_path / foreign).write_bytes(b"kept")
    os.chown(tmp_path / foreign, 65534, 65534)
    for old in (temporary_name("x", is_locked=False), re.sub("-[0-9a-f]{8}", "-01234567", temporary_name("x"))):
        (tmp_path / old).write_bytes(b"removed")
        os.utime(tmp_path / old, (1, 1))
    (tmp_path / temporary_name("x")).write_bytes(b"removed")
    with (tmp_path / running).open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        os.utime(tmp_path / running, (1, 1))
        assert list(without_leftovers([at(tmp_path / "x")]))
    assert names(tmp_path) == sorted([*kept, link, folder, foreign, "victim"])


def test_what_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / temporary_name("x")).write_bytes(b"left")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(local_files.os, "unlink", refused)
    assert list(without_leftovers([at(tmp_path / "x")]))


# --- failures ---


@pytest.mark.parametrize("number", [5, 28, 30, 122])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_failures_of_the_file_system_have_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with (
        pytest.raises(StorageFailedError, match="x cannot be written: ") as caught,
        whole_output(at(tmp_path / "x")) as pending,
        pending.open_sink() as sink,
    ):
        sink.reserve(10)
        sink.write_at(0, b"new")
    monkeypatch.undo()
    assert caught.value.error_number == number
    assert (tmp_path / "x").read_bytes() == b"old" and names(tmp_path) == ["x"]


@pytest.fixture(autouse=True)
def no_descriptors_leak(tmp_path: Path) -> Iterator[None]:
    yield
    assert open_in(tmp_path) == []


def open_places() -> list[str]:
    """Return the targets of this process's descriptors."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no path objects
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return found


def test_an_open_descriptor_would_be_found(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w"):
        assert str((tmp_path / "x").resolve()) in open_places()
