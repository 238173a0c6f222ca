"""What a run has finished, written down by its tasks, so that one that was cut off goes on where it was.

Records lie in a hidden folder of the data set, which readers pass over; it is removed when all is done. Each says
which source became which target, with the length and time of both: one that changed since is done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.spark.pipelines.file_tables import is_object_store, packed, unpacked
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.sources import read_whole

_RECORDS = pa.schema(
    [
        ("path", pa.string()),
        ("source_bytes", pa.int64()),
        ("source_time", pa.int64()),
        ("target_bytes", pa.int64()),
        ("target_time", pa.int64()),
    ]
)
_MOST_RECORD_BYTES = 1 << 30
_FILES_A_RECORD = 64
_SECONDS_A_RECORD = 20.0
_SUFFIX = ".finished"

State = tuple[int, int]
"""Length in bytes, and time of the last change in nanoseconds."""


def state_of(location: FileLocation) -> State | None:
    """Return what changes when a file is written; None where there is none."""
    info = location.info()
    if info.type != pafs.FileType.File:
        return None
    return int(info.size or 0), int(info.mtime_ns or 0)


def parameters_hash(parameters: Mapping[str, Any]) -> str:
    """Return what tells runs apart that do different things."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RecordFolder:
    """Where the records of runs of a pipeline are."""

    folder: FileLocation
    run: str

    @property
    def _own(self) -> FileLocation:
        return self.folder.child(self.run)

    def other_runs(self) -> bool:
        """Whether a run that did something else was not finished."""
        selector = pafs.FileSelector(self.folder.path, allow_not_found=True, recursive=True)
        prefix = f"{self._own.path}/"
        return any(
            info.type == pafs.FileType.File and not info.path.startswith(prefix)
            for info in self.folder.filesystem.get_file_info(selector)
        )

    def exists(self) -> bool:
        """Whether this run was begun before."""
        return bool(self._files(""))

    def begin(self) -> None:
        """Write that the run has begun, before anything else is written."""
        if not is_object_store(self.folder):
            self.folder.filesystem.create_dir(self._own.path, recursive=True)
        self.write("begun", [])

    def write(self, name: str, records: list[dict[str, Any]]) -> None:
        """Write records under a name of their own."""
        write_whole(self._own.child(f"{name}{_SUFFIX}"), packed(pa.Table.from_pylist(records, _RECORDS)))

    def read(self, prefix: str = "") -> pa.Table:
        """Read the records whose names begin so; what cannot be read counts as not finished."""
        tables = [_RECORDS.empty_table()]
        for path in self._files(prefix):
            with contextlib.suppress(OSError, pa.ArrowInvalid):
                tables.append(unpacked(read_whole(FileLocation(self.folder.filesystem, path), _MOST_RECORD_BYTES)))
        return pa.concat_tables(tables)

    def remove(self) -> None:
        """Remove all records, of other runs too."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.filesystem.delete_dir(self.folder.path)

    def _files(self, prefix: str) -> list[str]:
        selector = pafs.FileSelector(self._own.path, allow_not_found=True)
        return [
            info.path
            for info in self.folder.filesystem.get_file_info(selector)
            if info.base_name.startswith(prefix) and info.base_name.endswith(_SUFFIX)
        ]


class FinishedFiles:
    """The records that one attempt of a task reads and writes, beside those that the driver read, by path.

    Names of this task's records begin with its own, whatever the attempt.
    """

    def __init__(
        self, folder: RecordFolder, task: str, attempt: int, known: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._folder = folder
        self._name = f"{task}-{attempt}"
        self._known = dict(known)
        self._waiting: list[dict[str, Any]] = []
        self._written = 0
        self._written_at = time.monotonic()
        if attempt:
            # An attempt before this one, or one that still runs, may have done most of it.
            self._known |= {record["path"]: record for record in folder.read(f"{task}-").to_pylist()}

    def is_finished(self, path: str, source: State | None, target: State | None) -> bool:
        """Return whether a file was done, and neither source nor target changed since."""
        record = self._known.get(path)
        if record is None or source is None or target is None:
            return False
        return (record["source_bytes"], record["source_time"], record["target_bytes"], record["target_time"]) == (
            *source,
            *target,
        )

    def add(self, path: str, source: State, target: State) -> None:
        """Note that a file is done."""
        values = (path, *source, *target)
        self._waiting.append(dict(zip(_RECORDS.names, values, strict=True)))
        if len(self._waiting) >= _FILES_A_RECORD or time.monotonic() - self._written_at > _SECONDS_A_RECORD:
            self.flush()

    def flush(self) -> None:
        """Write what is noted."""
        if self._waiting:
            self._folder.write(f"{self._name}-{self._written}", self._waiting)
            self._written += 1
        self._waiting = []
        self._written_at = time.monotonic()
