"""Outputs while others do what they can: links in place of names, files that land meanwhile, processes killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools.errors import ChangedMeanwhileError, OutputError, StorageFailedError
from parquet_keytools.storage import local_output, temporary_files
from parquet_keytools.storage.local_files import UnsupportedRenameError
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import PendingOutput, discarded_unless_done, pending_output
from parquet_keytools.storage.temporary_files import (
    OccasionalScan,
    parse_temporary_name,
    temporary_name,
    without_leftovers,
)

KINDS = ("unnamed", "named", "named, plain renames")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do: files without names, and renames that exchange."""
    if request.param != "unnamed":
        monkeypatch.setattr(local_output, "_NO_DESCRIPTORS", True)
    if request.param == "named, plain renames":

        def unsupported(*_: object) -> None:
            raise UnsupportedRenameError

        monkeypatch.setattr(local_output, "exchange", unsupported)
        monkeypatch.setattr(local_output, "rename_new", unsupported)
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
    """Write a file that takes its place when the block ends, as all writers do."""
    with discarded_unless_done(pending_output(target, **options)) as pending:
        yield pending
        pending.commit(check)


def write(pending: PendingOutput, data: bytes) -> None:
    with pending.open_sink() as sink:
        sink.write_at(0, data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_sync(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something when the new file is brought to the disk, which may take long."""
    fsync, done = os.fsync, []

    def synced(descriptor: int) -> None:
        if not done:
            done.append(True)
            act()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)


# --- by descriptor ---


def test_a_link_in_place_of_the_new_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given the mode of the file was what the link led to: a passphrase, for everybody."""
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
    if kind == "unnamed":
        with whole_output(at(folder / "x")) as pending:
            write(pending, b"new")
        assert (folder / "x").read_bytes() == b"new" and not (folder / "x").is_symlink()
    else:
        with (
            pytest.raises(OutputError, match="not the file that was written"),
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
    """In a folder that all may write to: else who put it there would own what replaces it."""
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


# --- compared last ---


def land(path: Path, data: bytes) -> None:
    """Put a file in its place as other writers do."""
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
    """The file system can tell what came out; where it has no exchange, as near as it can be."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with (
        pytest.raises(ChangedMeanwhileError, match="x was changed by another process"),
        whole_output(at(path), check=lambda: land(path, b"of another writer")) as pending,
    ):
        write(pending, b"new")
    assert path.read_bytes() == b"of another writer" and names(tmp_path) == ["x"]


@pytest.mark.parametrize("landings", [1, 2, 3])
def test_what_lands_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landings: int
) -> None:
    """Between the check and the exchange, and before each exchange that puts it back."""
    path, count = tmp_path / "x", 0
    path.write_bytes(b"old")
    exchange = local_output.exchange

    def exchanged(*arguments: Any) -> None:
        nonlocal count
        if count < landings:
            count += 1
            land(path, b"version %d of another writer" % count)
        exchange(*arguments)

    monkeypatch.setattr(local_output, "exchange", exchanged)
    with pytest.raises(ChangedMeanwhileError), whole_output(at(path), check=lambda: None) as pending:
        write(pending, b"new")
    assert path.read_bytes() == b"version %d of another writer" % landings
    assert names(tmp_path) == ["x"]


def test_a_file_that_is_removed_meanwhile_does_not_come_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ChangedMeanwhileError), whole_output(at(path), check=path.unlink) as pending:
        write(pending, b"new")
    assert names(tmp_path) == []


def test_killed_between_exchange_and_putting_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the other writer is found again by the next run, and not taken for what is left over."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        exchange = local_output.exchange

        def killed(*arguments: Any) -> None:
            land(path, b"of another writer")
            exchange(*arguments)
            os._exit(0)

        monkeypatch.setattr(local_output, "exchange", killed)
        with whole_output(at(path), check=lambda: None) as pending:
            write(pending, b"new")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b"new" and len(names(tmp_path)) == 2
    assert list(without_leftovers([at(path)])) == [at(path)]
    assert path.read_bytes() == b"of another writer" and names(tmp_path) == ["x"]


def test_nobody_has_a_file_replaced_that_they_may_not_replace(
    tmp_path: Path, dead_name: Callable[[str], str]
) -> None:
    """In a folder with the sticky bit: their file is named like one that came while another one was replaced."""
    path = tmp_path / "x"
    path.write_bytes(b"of this user")
    tmp_path.chmod(0o1777)
    planted = tmp_path / dead_name("x").replace(".tmp", f".{path.stat().st_ino:x}-1-1.swap")
    planted.write_bytes(b"of another user")
    os.chown(planted, 65534, 65534)
    assert list(without_leftovers([at(path)])) == [at(path)]
    assert path.read_bytes() == b"of this user" and planted.read_bytes() == b"of another user"


# --- what is left ---


def killed_while_writing(path: Path, **options: Any) -> None:
    child = os.fork()
    if child == 0:
        with discarded_unless_done(pending_output(at(path), **options)) as pending:
            write(pending, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "x")
    assert names(tmp_path) == []


def test_the_next_run_removes_what_is_left(tmp_path: Path, kind: str) -> None:
    killed_while_writing(tmp_path / "x", keeps_open=False)
    left = [name for name in names(tmp_path) if parse_temporary_name(name)]
    assert len(left) == 1 and (tmp_path / left[0]).read_bytes() == b"half"
    with whole_output(at(tmp_path / "x")) as pending:
        write(pending, b"whole")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"whole"


def test_long_names(tmp_path: Path, kind: str) -> None:
    """A name of 255 bytes leaves none for more."""
    path = tmp_path / ("ä" * 120 + "x" * 15)
    for data in (b"first", b"second"):
        with whole_output(at(path)) as pending:
            write(pending, data)
        assert path.read_bytes() == data
    with whole_output(at(path), check=lambda: None) as pending:
        write(pending, b"third")
    assert path.read_bytes() == b"third" and names(tmp_path) == [path.name]


@pytest.fixture
def dead_name(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def make(target: str) -> str:
        program = f"from parquet_keytools.storage.temporary_files import temporary_name as n; print(n({target!r}))"
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()

    return make


def test_only_what_is_surely_ours_and_dead_is_removed(tmp_path: Path, dead_name: Callable[[str], str]) -> None:
    other_machine = dead_name("x").split("-")
    other_machine[1] = "00000000"
    kept = [
        temporary_name("x"),  # of this process, which lives
        ".x.0123456789ab.tmp",  # of somebody else
        "-".join(other_machine),  # of a machine that nobody can ask, and new
    ]
    for name in kept:
        (tmp_path / name).write_bytes(b"kept")
    link, folder, foreign, old = (dead_name(name) for name in ("link", "folder", "foreign", "old"))
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / link).symlink_to(tmp_path / "victim")
    (tmp_path / folder).mkdir()
    (tmp_path / foreign).write_bytes(b"kept")
    os.chown(tmp_path / foreign, 65534, 65534)
    old = "-".join([old.split("-")[0], "00000000", *old.split("-")[2:]])
    (tmp_path / old).write_bytes(b"removed")
    os.utime(tmp_path / old, (1, 1))
    (tmp_path / dead_name("x")).write_bytes(b"removed")
    assert list(without_leftovers([at(tmp_path / "x")]))
    assert names(tmp_path) == sorted([*kept, link, folder, foreign, "victim"])


def test_what_cannot_be_removed_is_no_failure(
    tmp_path: Path, dead_name: Callable[[str], str], monkeypatch
) -> None:
    (tmp_path / dead_name("x")).write_bytes(b"left")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(temporary_files.os, "unlink", refused)
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
    # Threads of other tests in this process may have theirs.
    assert [place for place in open_places() if place.startswith(str(tmp_path.resolve()))] == []


def open_places() -> list[str]:
    """Return what the descriptors of this process lead to."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no path objects
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return found


def test_an_open_descriptor_would_be_found(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w"):
        assert str((tmp_path / "x").resolve()) in open_places()
