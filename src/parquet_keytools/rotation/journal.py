"""What a run has made, written down as it goes, so that one that was cut off goes on where it was.

Most files show by themselves that they are finished: the version of a master key stands in what it wrapped, and is
proven by the unwrap. A journal is for the rest: fresh KEKs, and KMSs that hide versions. It is lines of JSON: the
parameters of the run, the versions of master keys as they were met, and a digest of each key that was made. It
says nothing of files: each one is opened and authenticated again, and a key is passed over only if it is one of
those.
A journal is removed when all files were processed.

Whoever can write a journal can have keys passed over. So it is a regular file of this user alone, reached by no
link, and never lies in the data set, where others may write.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, OutputError, StorageFailedError
from parquet_keytools.rotation.rewrapper import Remembered, WrappedKey
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.worker_processes import StaysInParent
from parquet_keytools.storage.locations import FileLocation

FORMER_JOURNAL_NAME = "._parquet_keytools_rotation.journal"
"""Where former versions had the journal, in the folder of a data set. It is not read."""

KEPT_SECONDS = 30 * 24 * 3600.0
"""How long a journal in the folder of this user's state is kept that no run has touched."""

_SYNC_SECONDS = 2.0
_FORMAT = 2
_DIGEST_LENGTH = 16
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HINT = "Name a file in a folder of your own with --journal, or set XDG_STATE_HOME to one."


def kms_digest(*configurations: Configuration | None) -> str:
    """Return what tells the KMSs of configurations apart, for the parameters of a journal.

    What a run moved to one KMS is not finished for a run that moves to another one.
    """
    # The text of settings shows no secrets, and so not those that differ from run to run. It has no bytes of names
    # that are not UTF-8: they are escaped.
    said = [(str(found.folder), repr(found.kms)) for found in configurations if found is not None]
    return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()


class JournalInUseError(OutputError):
    """Another run writes this journal now."""


class JournalUnsafeError(OutputError):
    """Others than this user may have written the journal, or may write it."""


class Journal(StaysInParent):
    """A journal that this process writes, also for its worker processes; nobody else does meanwhile.

    Args:
        path: Where it is, or will be; None for the folder of this user's state.
        parameters: Of the run; those in a journal that is there must be the same.

    Raises:
        JournalInUseError: Another run has it.
        JournalUnsafeError: Others may have written it.
        OutputError: It is of a run with other parameters, or is no journal, or cannot be written.
    """

    def __init__(self, path: Path | None, parameters: dict[str, Any]) -> None:
        self.path = path if path is not None else _own_folder() / f"{_digest(_head_line(parameters)).hex()}.jsonl"
        self._made = b""
        self._written: Remembered[bytes, None] = Remembered()
        self._versions: dict[str, str | None] = {}
        self._synced_at = time.monotonic()
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._file_descriptor = _open_locked(self.path, self._open)
        try:
            end = self._read(json.loads(json.dumps(parameters)))
            # A line that was cut off goes; the next one must not be glued to it.
            os.ftruncate(self._file_descriptor, end)
            if end == 0:
                self._write(_head_line(parameters))
            self.sync()
        except BaseException:
            self._open.close()
            raise

        if path is None:
            _remove_stale(self.path.parent)

    @property
    def versions(self) -> dict[str, str | None]:
        """Master key -> its newest version when its first keys were rotated."""
        return dict(self._versions)

    def was_made(self, key: WrappedKey | bytes) -> bool:
        """Return whether an earlier run made a wrapped key, or what these bytes identify."""
        if not self._made:
            return False
        wanted = _made_digest(key)
        position = bisect.bisect_left(range(len(self._made) // _DIGEST_LENGTH), wanted, key=self._made_at)
        return self._made_at(position) == wanted

    def _made_at(self, position: int) -> bytes:
        """Return one of the sorted digests, which lie one after the other: a million of them take 16 MB."""
        return self._made[position * _DIGEST_LENGTH : (position + 1) * _DIGEST_LENGTH]

    def add_made(self, keys: Iterable[WrappedKey | bytes]) -> None:
        """Note what was made.

        Raises:
            StorageFailedError: The journal cannot be written.
        """
        with self._lock:
            missing = self._written.split(map(_made_digest, keys), {})
            for made in missing:
                self._written.remember(made, None)
            self._append(*({"made": made.hex()} for made in missing))
            if time.monotonic() - self._synced_at > _SYNC_SECONDS:
                self.sync()

    def forget_made(self) -> None:
        """Begin again: what was made is of older versions of the master keys."""
        self._made = b""
        self._versions.clear()
        self._append({"begun_anew": True})

    def add_version(self, master_key_id: str, version: str | None) -> None:
        """Note the newest version of a master key."""
        if master_key_id not in self._versions:
            self._versions[master_key_id] = version
            self._append({"master_key": master_key_id, "version": version})

    def sync(self) -> None:
        """Have what was written on the disk."""
        with self._failing():
            operating_system.sync(self._file_descriptor)
        self._synced_at = time.monotonic()

    def close(self, *, remove: bool) -> None:
        """End the run, and remove the journal if all files were processed."""
        try:
            if remove:
                _remove(self.path, self._file_descriptor, self._open)
            else:
                self.sync()
        finally:
            # Worker processes may still say what they made, if they were not waited for: not to another file.
            with self._lock:
                self._open.close()
                self._file_descriptor = -1

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            number = error.errno or 0
            raise StorageFailedError(
                f"the journal {self.path} cannot be written: {os.strerror(number).lower()}.",
                error_number=number,
                hint="Make space, then repeat the command.",
            ) from None

    def _append(self, *lines: dict[str, Any]) -> None:
        if lines:
            self._write(b"".join(map(_serialised, lines)))

    def _write(self, data: bytes) -> None:
        with self._failing():
            while data:
                data = data[os.write(self._file_descriptor, data) :]

    def _read(self, parameters: dict[str, Any]) -> int:
        """Take in what is there. Returns the length of its whole lines."""
        end = 0
        made: list[bytes] = []
        with os.fdopen(os.dup(self._file_descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file):
                is_whole = line.endswith(b"\n")
                if not is_whole and (number or _head_line(parameters).startswith(line)):
                    break
                try:
                    entry = json.loads(line)
                    if number == 0:
                        self._check_head(entry, parameters)
                    else:
                        self._take(entry, made)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise OutputError(
                        f"{self.path}, line {number + 1}: this is not a line of a rotation journal.",
                        hint="Remove the file, or choose another one for the journal.",
                    ) from None
                end += len(line)
        made.sort()
        self._made = b"".join(made)
        return end

    def _check_head(self, entry: dict[str, Any], parameters: dict[str, Any]) -> None:
        if entry["rotation_journal"] != _FORMAT or entry["parameters"] != parameters:
            raise OutputError(
                f"{self.path} is the journal of a rotation with other parameters that was not finished.",
                hint="Finish that rotation first, or remove the journal, or choose another one.",
            )

    def _take(self, entry: dict[str, Any], made: list[bytes]) -> None:
        if "begun_anew" in entry:
            made.clear()
            self._versions.clear()
        elif "master_key" in entry:
            self._versions[str(entry["master_key"])] = entry["version"]
        else:
            digest = bytes.fromhex(entry["made"])
            if len(digest) != _DIGEST_LENGTH:
                raise ValueError(len(digest))
            made.append(digest)


def refuse_inside(journal: Path, data_set: FileLocation) -> None:
    """Refuse a journal in the data set itself: who may write there could say that all is done.

    Raises:
        ConfigurationError: It would lie there.
    """
    if is_inside(journal, data_set):
        raise ConfigurationError(
            f"the journal {journal} would lie in the data set {data_set}: whoever may write there could make the "
            "rotation skip files.",
            hint="Choose a file outside of it, in a folder of your own.",
        )


def is_inside(journal: Path, data_set: FileLocation) -> bool:
    """Return whether a journal would lie under the folder of a data set, by whatever links."""
    if not data_set.is_local or not data_set.is_folder():
        return False
    folder = Path(os.path.realpath(data_set.path))
    return any(
        place == folder or folder in place.parents
        for place in (Path(os.path.realpath(journal.parent)), Path(os.path.realpath(journal)))
    )


def journal_folder() -> Path:
    """Return the folder of journals, in this user's state (XDG base directory specification).

    Raises:
        OutputError: This user has no home.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if given.startswith("/") else expanded("~/.local/state")
    except FileNotFoundError:
        raise OutputError("this user has no home folder, where journals are kept.", hint=_HINT) from None
    return base / "parquet-keytools" / "journals"


def _own_folder() -> Path:
    """Make the folder of journals, and see that it is this user's.

    Raises:
        JournalUnsafeError: It is somebody else's, or a link, or others may write there.
        OutputError: It cannot be made.
    """
    folder = journal_folder()
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder):
            with contextlib.suppress(FileExistsError):
                made.mkdir(mode=0o700)
            found = made.lstat()
            if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
                raise JournalUnsafeError(
                    f"{made}, the folder of journals, is not a folder that only this user may write to.",
                    hint=_HINT,
                )
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise OutputError(f"the folder of journals {folder} cannot be made: {reason}.", hint=_HINT) from None
    return folder


def _remove_stale(folder: Path) -> None:
    """Remove journals that nobody goes on with: such a run begins again, which does no harm."""
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError, OutputError):
            if _is_stale(path.lstat()):
                # One that a run has just now is in use, and stays.
                with contextlib.ExitStack() as opened:
                    file_descriptor = _open_locked(path, opened)
                    if _is_stale(os.fstat(file_descriptor)):
                        _remove(path, file_descriptor, opened)


def _is_stale(found: os.stat_result) -> bool:
    return time.time() - found.st_mtime > KEPT_SECONDS


def _is_own(found: os.stat_result) -> bool:
    may_write = operating_system.permissions(found, _OTHERS_MAY_WRITE)
    return found.st_uid == operating_system.own_user_id() and not may_write


def _head_line(parameters: dict[str, Any]) -> bytes:
    return _serialised({"rotation_journal": _FORMAT, "parameters": parameters})


def _serialised(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _made_digest(made: WrappedKey | bytes) -> bytes:
    if isinstance(made, bytes):
        return _digest(made)
    return _digest(json.dumps([made.master_key_id, made.wrapped_key]).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_LENGTH).digest()


def _open_locked(path: Path, opened: contextlib.ExitStack) -> int:
    """Open a journal for this process alone, until `opened` is closed."""
    while True:
        try:
            # Neither a link nor a pipe that somebody else put there is followed or waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            file_descriptor = operating_system.open_file(path, flags, follow_link=False)
        except OSError as error:
            if path.is_symlink():
                raise JournalUnsafeError(f"the journal {path} is a link.", hint=_HINT) from None
            reason = os.strerror(error.errno or 0)
            raise OutputError(f"the journal {path} cannot be written: {reason}.", hint=_HINT) from None
        opened.callback(os.close, file_descriptor)
        try:
            _check_own(path, file_descriptor)
            if not _try_lock(path, file_descriptor, opened):
                raise JournalInUseError(f"another run writes the journal {path} now.")
            # A run that ended in between may have removed what was opened.
            if _is_there(path, file_descriptor):
                return file_descriptor
        except BaseException:
            opened.close()
            raise
        opened.close()


def _try_lock(path: Path, file_descriptor: int, opened: contextlib.ExitStack) -> bool:
    if operating_system.POSIX:
        return operating_system.try_lock(file_descriptor)
    try:
        opened.enter_context(operating_system.locked_path(f"{path}.lock", 0))
    except TimeoutError:
        return False
    return True


def _check_own(path: Path, file_descriptor: int) -> None:
    """Refuse what others made, or may write."""
    found = os.fstat(file_descriptor)
    if not stat.S_ISREG(found.st_mode) or not _is_own(found) or found.st_nlink > 1:
        raise JournalUnsafeError(
            f"the journal {path} is not a regular file that only this user may write to.", hint=_HINT
        )


def _is_there(path: Path, file_descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file_descriptor))
    except FileNotFoundError:
        return False


def _remove(path: Path, file_descriptor: int, opened: contextlib.ExitStack) -> None:
    if _is_there(path, file_descriptor):
        if not operating_system.POSIX:
            # It does not remove files that are open.
            opened.close()
        path.unlink(missing_ok=True)
