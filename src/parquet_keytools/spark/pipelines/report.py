"""What came of a pipeline: a row for each file, kept packed until somebody looks at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark.pipelines.planned_files import packed, rows_of, unpacked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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

RULE_ROWS = pa.schema(
    [
        ("file", pa.string()),
        ("rule", pa.string()),
        ("severity", pa.string()),
        ("outcome", pa.string()),
        ("message", pa.string()),
        ("place", pa.string()),
        ("offset", pa.int64()),
    ]
)
"""A row for each rule and file, or for each finding; those of the data set as a whole have its path."""


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
