"""The lock of a folder, with other users of the machine."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from parquet_keytools.errors import OutputError
from parquet_keytools.storage import local_files
from parquet_keytools.storage.local_files import LOCK_NAME, exclusive_folder
from parquet_keytools.storage.locations import FileLocation

OTHER = 65534
"""A user who owns nothing here."""


def in_folder(folder: Path) -> FileLocation:
    return FileLocation.resolve(folder / "x")


@contextmanager
def child(act: Callable[[], None], *, user: int = 0) -> Iterator[int]:
    """Fork a process that does something, and then waits until it is killed. Yields when it is done."""
    done, to_parent = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        signal.alarm(60)
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            act()
            os.write(to_parent, b"done")
            signal.pause()
        finally:
            os._exit(1)
    os.close(to_parent)
    try:
        assert os.read(done, 4) == b"done", "the other process failed"
        yield process_id
    finally:
        os.close(done)
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may read and reach: not below pytest's folder, which each pytest run closes."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_who_may_only_read_blocks_nobody(folder: Path) -> None:
    """Anyone who may read the folder could hold a lock on the folder itself, forever."""

    def hold_all() -> None:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)

    with child(hold_all, user=OTHER):
        started = time.monotonic()
        with exclusive_folder(in_folder(folder)):

            def open_lock() -> None:
                with pytest.raises(PermissionError):
                    os.open(folder / LOCK_NAME, os.O_RDONLY)

            with child(open_lock, user=OTHER):
                pass
        assert time.monotonic() - started < 30
    assert list(folder.iterdir()) == []


_held = ExitStack()
"""Never released: its process is killed."""


def hold(folder: Path) -> None:
    _held.enter_context(exclusive_folder(in_folder(folder)))


def test_a_dead_process_blocks_nobody(folder: Path) -> None:
    with child(lambda: hold(folder)):
        assert (folder / LOCK_NAME).exists()
    assert (folder / LOCK_NAME).exists(), "it was killed"
    with exclusive_folder(in_folder(folder)):
        pass
    assert list(folder.iterdir()) == []


def test_a_living_process_is_waited_for(folder: Path) -> None:
    with child(lambda: hold(folder)):
        waiting, to_parent = os.pipe()
        waiter = os.fork()
        if waiter == 0:
            signal.alarm(60)
            with exclusive_folder(in_folder(folder)):
                os.write(to_parent, b"entered")
            os._exit(0)
        os.set_blocking(waiting, False)
        time.sleep(0.5)
        with pytest.raises(BlockingIOError):
            os.read(waiting, 7)
    assert os.waitpid(waiter, 0)[1] == 0
    assert os.read(waiting, 7) == b"entered"
    os.close(waiting)
    os.close(to_parent)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_what_is_no_lock_is_not_followed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "victim").write_bytes(b"secret")
    lock = folder / LOCK_NAME
    if kind == "link":
        lock.symlink_to(elsewhere / "victim")
    elif kind == "dangling link":
        lock.symlink_to(elsewhere / "nothing")
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with (
        pytest.raises(OutputError, match=r"its lock .* is not a regular file"),
        exclusive_folder(in_folder(folder)),
    ):
        pytest.fail("went on")
    assert [(path.name, path.read_bytes()) for path in elsewhere.iterdir()] == [("victim", b"secret")]


def test_a_lock_that_others_may_open_is_made_anew(folder: Path) -> None:
    """From a time when everyone could write to the folder: a reader could hold it forever."""
    (folder / LOCK_NAME).touch()
    (folder / LOCK_NAME).chmod(0o666)

    def hold_it() -> None:
        fcntl.flock(os.open(folder / LOCK_NAME, os.O_RDONLY), fcntl.LOCK_EX)

    with child(hold_it, user=OTHER), exclusive_folder(in_folder(folder)):
        assert (folder / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    assert list(folder.iterdir()) == []


def test_who_writes_to_the_folder_can_take_what_the_superuser_left(folder: Path) -> None:
    """An operator's process was killed; the folder's owner continues."""
    os.chown(folder, OTHER, OTHER)
    with child(lambda: hold(folder)):
        pass
    assert (folder / LOCK_NAME).exists()

    def take() -> None:
        with exclusive_folder(in_folder(folder)):
            pass

    with child(take, user=OTHER):
        pass
    assert list(folder.iterdir()) == []


def test_where_all_may_write_each_has_a_lock(folder: Path) -> None:
    folder.chmod(0o1777)
    with child(lambda: hold(folder), user=OTHER):
        left = [path.name for path in folder.iterdir()]
        with exclusive_folder(in_folder(folder)):
            assert len(list(folder.iterdir())) == 2
        assert [path.name for path in folder.iterdir()] == left == [f".parquet-keytools.{OTHER}.lock"]


@pytest.mark.parametrize(("name", "now"), [(".parquet-keytools.0.lock", 0o1777), (LOCK_NAME, 0o755)])
@pytest.mark.parametrize("kind", ["held", "link", "pipe"])
@pytest.mark.timeout(60)
def test_a_lock_that_somebody_else_planted_is_removed(folder: Path, name: str, now: int, kind: str) -> None:
    """Like our locks, only its owner may open it; root opens it, and would wait forever."""
    folder.chmod(0o1777)

    def plant() -> None:
        if kind == "link":
            (folder / name).symlink_to("/dev/null")
        elif kind == "pipe":
            os.mkfifo(folder / name, 0o600)
        else:
            lock = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)

    with child(plant, user=OTHER):
        folder.chmod(now)
        with exclusive_folder(in_folder(folder)):
            assert (folder / name).lstat().st_uid == 0
    assert list(folder.iterdir()) == []


def test_a_folder_in_place_of_a_lock_is_named(folder: Path) -> None:
    folder.chmod(0o1777)
    with (
        child((folder / ".parquet-keytools.0.lock").mkdir, user=OTHER),
        pytest.raises(OutputError, match="put there by another user"),
        exclusive_folder(in_folder(folder)),
    ):
        pytest.fail("went on")


def test_the_lock_of_another_user_is_not_waited_for_without_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o775)
    os.chown(folder, 0, OTHER)
    (folder / LOCK_NAME).touch(0o600)

    def refused() -> None:
        monkeypatch.setattr(local_files, "FOREIGN_LOCK_SECONDS", 0.3)
        with pytest.raises(OutputError, match="belongs to another user"), exclusive_folder(in_folder(folder)):
            pytest.fail("went on")

    with child(refused, user=OTHER):
        pass
    assert (folder / LOCK_NAME).exists()
