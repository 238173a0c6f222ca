"""What a run has finished, written down as it goes, so that one that was cut off goes on where it was.

A journal is lines of JSON: the parameters of the rotation, the versions of master keys as they were met, and one
line for each finished file. It is removed when all files had their turn.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import OutputError
from parquet_keytools.rotation.report import FileRotation, Outcome

JOURNAL_NAME = "._parquet_keytools_rotation.journal"
"""In the folder of a local data set; readers of data sets pass over it."""

_SYNC_SECONDS = 2.0
_FORMAT = 1
_NOT_FINISHED = (Outcome.FAILED, Outcome.WOULD_ROTATE, Outcome.FINISHED_BEFORE)


def kms_digest(*configurations: Configuration | None) -> str:
    """Return what tells the KMSs of configurations apart, for the parameters of a journal.

    What a run moved to one KMS is not finished for a run that moves to another one.
    """
    # The text of settings shows no secrets, and so not those that differ from run to run.
    said = [(str(found.folder), repr(found.kms)) for found in configurations if found is not None]
    return hashlib.blake2b(repr(said).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class JournalInUseError(OutputError):
    """Another run writes this journal now."""


class Journal:
    """A journal that this process writes; nobody else does meanwhile.

    Args:
        path: Where it is, or will be.
        parameters: Of the rotation; those in a journal that is there must be the same.

    Raises:
        JournalInUseError: Another run has it.
        OutputError: It is of a rotation with other parameters, or is no journal, or cannot be written.
    """

    def __init__(self, path: Path, parameters: dict[str, Any]) -> None:
        self.path = path
        self._finished: set[bytes] = set()
        self._versions: dict[str, str | None] = {}
        self._synced_at = time.monotonic()
        self._file_descriptor = _open_locked(path)
        try:
            end = self._read(json.loads(json.dumps(parameters)))
            # A line that was cut off goes; the next one must not be glued to it.
            os.ftruncate(self._file_descriptor, end)
            if end == 0:
                self._write(_head_line(parameters))
            self.sync()
        except BaseException:
            os.close(self._file_descriptor)
            raise

    @property
    def finished_count(self) -> int:
        """How many files it says are finished."""
        return len(self._finished)

    @property
    def versions(self) -> dict[str, str | None]:
        """Master key -> its newest version when its first keys were rotated."""
        return dict(self._versions)

    def is_finished(self, path: str, state: tuple[object, ...]) -> bool:
        """Return whether a file was finished and is the same since."""
        return bool(self._finished) and _digest(path, state) in self._finished

    def forget_finished(self) -> None:
        """Begin anew: what was finished is of older versions of the master keys."""
        self._finished.clear()
        self._versions.clear()
        self._append({"begun_anew": True})

    def add_version(self, master_key_id: str, version: str | None) -> None:
        """Note the newest version of a master key."""
        if master_key_id not in self._versions:
            self._versions[master_key_id] = version
            self._append({"master_key": master_key_id, "version": version})

    def add(self, result: FileRotation, state: tuple[object, ...] | None) -> None:
        """Note what became of a file, and its state now."""
        line: dict[str, Any] = {"file": result.path, "outcome": result.outcome.value}
        if state is not None and result.outcome not in _NOT_FINISHED:
            line["state"] = _digest(result.path, state).hex()
        if result.error is not None:
            line["error"] = result.error_class
        self._append(line)
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have what was written on the disk."""
        os.fsync(self._file_descriptor)
        self._synced_at = time.monotonic()

    def close(self, *, remove: bool) -> None:
        """End the run, and remove the journal if all files had their turn."""
        if remove:
            self.path.unlink(missing_ok=True)
        else:
            self.sync()
        os.close(self._file_descriptor)

    def _append(self, line: dict[str, Any]) -> None:
        self._write(_serialised(line))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file_descriptor, data) :]

    def _read(self, parameters: dict[str, Any]) -> int:
        """Take in what is there. Returns the length of its whole lines."""
        end = 0
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
                        self._take(entry)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise OutputError(
                        f"{self.path}, line {number + 1}: this is no line of a journal of a rotation.",
                        hint="Remove the file, or name another one for the journal.",
                    ) from None
                end += len(line)
        return end

    def _check_head(self, entry: dict[str, Any], parameters: dict[str, Any]) -> None:
        if entry["rotation_journal"] != _FORMAT or entry["parameters"] != parameters:
            raise OutputError(
                f"{self.path} is the journal of a rotation with other parameters that was not finished.",
                hint="Repeat that rotation to its end, or remove the journal, or name another one.",
            )

    def _take(self, entry: dict[str, Any]) -> None:
        if "begun_anew" in entry:
            self._finished.clear()
            self._versions.clear()
        elif "master_key" in entry:
            self._versions[entry["master_key"]] = entry["version"]
        elif "state" in entry:
            self._finished.add(bytes.fromhex(entry["state"]))
        else:
            # It failed, or was not changed; it gets another turn.
            entry["file"]


def _head_line(parameters: dict[str, Any]) -> bytes:
    return _serialised({"rotation_journal": _FORMAT, "parameters": parameters})


def _serialised(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _open_locked(path: Path) -> int:
    """Open a journal for this process alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    while True:
        try:
            file_descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise OutputError(f"the journal {path} cannot be written: {os.strerror(error.errno or 0)}.") from None
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file_descriptor)
            raise JournalInUseError(f"another run writes the journal {path} now.") from None
        # A run that ended in between may have removed what was opened.
        if path.exists() and path.samefile(f"/dev/fd/{file_descriptor}"):
            return file_descriptor
        os.close(file_descriptor)


def _digest(path: str, state: tuple[object, ...]) -> bytes:
    # Of bounded size for a million files.
    return hashlib.blake2b(repr((path, state)).encode("utf-8", "surrogateescape"), digest_size=16).digest()
