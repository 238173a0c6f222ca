"""What goes through jobs of Spark as columns of Arrow: files, cut into pieces, and what came of each.

A million files are about a hundred megabytes so; as objects of Python they would be a gigabyte. Rows of a
report stay packed until somebody looks at them.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from parquet_keytools.errors import ConfigurationError, KeytoolsError
from parquet_keytools.rotation.report import FileRotation
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.printable import escaped_path
from parquet_keytools.storage.walk import (
    BehindLink,
    Entry,
    LeftOut,
    ParquetFile,
    Unseen,
    data_set,
    data_set_in_place,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OBJECT_STORES = ("s3", "gcs", "abfs")
"""Types of file systems that have no folders to create, no locks, and no replacement in one step with a check."""

_HADOOP_S3 = re.compile(r"s3[an]:", re.IGNORECASE)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

_FLUSH_ROWS = 16_384
_FILE_COST_BYTES = 2_000_000
"""What a file costs beside its bytes, in bytes: to open it, and to put it in its place."""

_MOST_FILES_A_PIECE = 500
_PIECES_A_TASK_SLOT = 8
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def place_of(path: str | os.PathLike[str]) -> str:
    """Return a path or URI as it goes to executors.

    Raises:
        ConfigurationError: There are credentials in it: tasks are sent as they are, and Spark may log them.
    """
    text = os.fspath(path)
    if not _URI.match(text):
        return str(expanded(text).absolute())
    if ":" in urlsplit(text).netloc.rpartition("@")[0]:
        raise ConfigurationError(
            "there are credentials in the URI, which must not be sent to Spark's executors.",
            hint="Give every node its own: an instance profile, environment variables or files.",
        )
    return _HADOOP_S3.sub("s3:", text)


def node_location(place: str) -> FileLocation:
    """Return where a place is, with this node's credentials; refuse a URI that pyarrow does not know."""
    try:
        return FileLocation.resolve(place)
    except (ValueError, NotImplementedError):
        scheme = place.partition(":")[0]
        raise ConfigurationError(f"pyarrow cannot open this URI of the scheme {scheme!r}.") from None


def is_object_store(location: FileLocation) -> bool:
    """Return whether a location is in an object store."""
    return location.filesystem.type_name in OBJECT_STORES


def file_at(root: FileLocation, name: str) -> FileLocation:
    """Return a file of a data set; without a name, the one that the place itself is."""
    return root.child(name) if name else root


@dataclass(frozen=True)
class PlannedFiles:
    """What lies in a folder.

    Attributes:
        table: `path` within the folder, and `size_bytes`; a single file has an empty path.
        left_out: `path` of what else is there, and `reason`.
        unseen: What could not be looked into, such as names that are not valid UTF-8.
        behind_links: What is not changed under this name, for work in place.
    """

    table: pa.Table
    left_out: pa.Table
    unseen: list[Unseen] = field(default_factory=list)
    behind_links: list[FileRotation] = field(default_factory=list)


def plan_data_set(
    root: FileLocation,
    refuse_folder: Callable[[str], None] | None = None,
    on_left_out: Callable[[LeftOut], None] | None = None,
    *,
    follow_links: bool | None = None,
) -> PlannedFiles:
    """List a folder, or take a single file.

    For each folder with files, `refuse_folder` raises where it must not be taken. `on_left_out` gets each thing
    that does not belong to the data set. For work in place, `follow_links` says whether files are taken that links
    lead to, outside of what was named.

    Raises:
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: The folder has no Parquet files, and nothing that may hold some.
    """
    files = _Columns(pa.schema([("path", pa.string()), ("size_bytes", pa.int64())]))
    left_out = _Columns(pa.schema([("path", pa.string()), ("reason", pa.string())]))
    unseen: list[Unseen] = []
    behind: list[FileRotation] = []
    start = len(root.path.rstrip("/")) + 1
    last_folder = None
    entries: Iterator[Entry | BehindLink] = data_set(root, into_passed_over=True)
    if follow_links is not None:
        entries = data_set_in_place(root, follow_links=follow_links, into_passed_over=True)
    for found in entries:
        if isinstance(found, BehindLink):
            behind.append(FileRotation.of_link(found))
            continue
        if isinstance(found, Unseen):
            unseen.append(found)
            continue
        # A single file has no name in itself.
        name = found.location.path[start:]
        folder = name.rpartition("/")[0]
        if folder != last_folder and refuse_folder is not None:
            refuse_folder(os.path.dirname(found.location.path))  # noqa: PTH120 - for each of a million files
            last_folder = folder
        if isinstance(found, ParquetFile):
            files.add(name, found.size_bytes)
        else:
            left_out.add(escaped_path(name), found.reason.value)
            if on_left_out is not None:
                on_left_out(found)
    return PlannedFiles(files.table(), left_out.table(), unseen, behind)


def number_of_pieces(files: int, task_slots: int, most_tasks: int | None) -> int:
    """Return into how many pieces files are cut."""
    if most_tasks is not None:
        return max(1, min(files, most_tasks))
    return max(1, min(files, max(_PIECES_A_TASK_SLOT * task_slots, -(-files // _MOST_FILES_A_PIECE))))


def cut(table: pa.Table, pieces: int) -> list[bytes]:
    """Cut a table into pieces that take about the same time, in the order of its rows."""
    table = table.combine_chunks()
    costs = pc.cumulative_sum(pc.add(table["size_bytes"], _FILE_COST_BYTES))
    total = costs[-1].as_py() if table.num_rows else 0
    bounds = [0]
    for number in range(1, pieces):
        bounds.append(
            max(bounds[-1], bisect.bisect_left(costs, total * number // pieces, key=methodcaller("as_py")))
        )
    bounds.append(table.num_rows)
    return [packed(table.slice(start, end - start)) for start, end in itertools.pairwise(bounds) if end > start]


def cut_by_group(table: pa.Table, pieces: int, most_pieces_a_group: int) -> list[bytes]:
    """Cut a table with a column `group` so that as few pieces as can be have files of the same group."""
    table = table.sort_by([("group", "ascending"), ("path", "ascending")]).combine_chunks()
    if not table.num_rows:
        return []
    counts = pa.TableGroupBy(table, "group", use_threads=False).aggregate([([], "count_all")])
    target = max(1, -(-table.num_rows // pieces))
    found: list[bytes] = []
    start = waiting = 0
    # Groups are in order; small ones share a piece, and large ones are cut.
    for count in counts["count_all"].to_pylist():
        if waiting and waiting + count > target:
            found.append(packed(table.slice(start, waiting)))
            start, waiting = start + waiting, 0
        if count > target:
            found += cut(table.slice(start, count), min(most_pieces_a_group, -(-count // target)))
            start += count
        else:
            waiting += count
    if waiting:
        found.append(packed(table.slice(start, waiting)))
    return found


def packed(table: pa.Table) -> bytes:
    """Return a table as it goes through Spark."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_COMPRESSED) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unpacked(data: bytes) -> pa.Table:
    """Return what `packed` took."""
    return pa.ipc.open_stream(data).read_all()


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, some in memory at a time."""
    for batch in table.to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


class _Columns:
    """Rows on their way into columns of Arrow, some as objects of Python at a time."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._waiting: list[tuple[object, ...]] = []
        self._parts = [schema.empty_table()]

    def add(self, *values: object) -> None:
        self._waiting.append(values)
        if len(self._waiting) >= _FLUSH_ROWS:
            self._flush()

    def table(self) -> pa.Table:
        self._flush()
        return pa.concat_tables(self._parts).combine_chunks()

    def _flush(self) -> None:
        if self._waiting:
            columns = zip(*self._waiting, strict=True)
            self._parts.append(pa.table([pa.array(column) for column in columns], schema=self._schema))
            self._waiting = []


FAILED = "failed"
LEFT_OUT = "left out"

KEY = pa.struct(
    [
        ("master_key", pa.string()),
        ("version", pa.string()),
        ("new_master_key", pa.string()),
        ("new_version", pa.string()),
        ("number", pa.int64()),
        ("column", pa.string()),
        ("is_footer", pa.bool_()),
        ("wrapping", pa.string()),
        ("kek_id", pa.string()),
        ("data_key", pa.string()),
    ]
)
"""Keys of a file. What a pipeline has nothing to say of is null."""

FILE_ROWS = pa.schema(
    [
        ("path", pa.string()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
        ("keys", pa.list_(KEY)),
        ("bytes", pa.int64()),
        ("seconds", pa.float64()),
        ("error_class", pa.string()),
        ("error", pa.string()),
    ]
)
"""A row for each file."""


@dataclass
class TaskResult:
    """What a task sends to the driver.

    Attributes:
        rows: Packed rows of files.
        outcomes: How many files had each outcome.
        kms_keys: For how many keys the KMS was asked, by operation.
        error: Why the task could not begin; then there is nothing else.
        other: What else the pipeline wants to know.
    """

    rows: bytes = b""
    outcomes: Counter[str] = field(default_factory=Counter)
    kms_keys: Counter[str] = field(default_factory=Counter)
    error: KeytoolsError | None = None
    other: Any = None


def file_row(
    path: str,
    outcome: str,
    *,
    detail: str = "",
    keys: Sequence[Mapping[str, Any]] = (),
    size_bytes: int = 0,
    seconds: float = 0.0,
    error: Exception | None = None,
) -> dict[str, Any]:
    """Return the row of a file."""
    return {
        "path": path,
        "outcome": outcome,
        "detail": detail or None,
        "keys": list(keys),
        "bytes": size_bytes,
        "seconds": seconds,
        "error_class": None if error is None else type(error).__name__,
        "error": None if error is None else _error_text(error),
    }


def _error_text(error: Exception) -> str:
    """Return what happened, as one text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def task_result(rows: Sequence[dict[str, Any]], other: Any = None) -> TaskResult:
    """Return what a task found of its files."""
    table = pa.Table.from_pylist(list(rows), FILE_ROWS)
    return TaskResult(packed(table), Counter(row["outcome"] for row in rows), other=other)


@dataclass(frozen=True)
class PipelineReport:
    """What came of a pipeline.

    Attributes:
        session: The session.
        packed_files: Rows of files, packed by task.
        outcomes: How many files had each outcome.
        kms_keys: For how many keys the KMS was asked, by operation, by the driver and all tasks that ended well.
        tasks: How many tasks there were.
        seconds: How long it took.
    """

    session: SparkSession
    packed_files: Sequence[bytes]
    outcomes: Counter[str]
    kms_keys: Counter[str]
    tasks: int
    seconds: float

    @property
    def files(self) -> DataFrame:
        """A row for each file: path, outcome, detail, keys, bytes, seconds, error_class, error."""
        return frame_of(self.session, self.packed_files, FILE_ROWS)

    @property
    def succeeded(self) -> bool:
        """Whether nothing failed."""
        return not self.outcomes[FAILED]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the same rows as dictionaries, without Spark."""
        for data in self.packed_files:
            yield from rows_of(unpacked(data))

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of files that failed."""
        return (row for row in self.rows() if row["outcome"] == FAILED)


def frame_of(session: SparkSession, parts: Sequence[bytes], schema: pa.Schema) -> DataFrame:
    """Return packed rows as a DataFrame; they are unpacked where they are needed."""
    from pyspark.sql.pandas.types import from_arrow_schema

    rows = session.sparkContext.parallelize(list(parts), max(1, len(parts))).flatMap(
        partial(_tuples, names=tuple(schema.names))
    )
    return session.createDataFrame(rows, from_arrow_schema(schema), verifySchema=False)


def _tuples(data: bytes, names: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    for row in rows_of(unpacked(data)):
        yield tuple(row[name] for name in names)
