"""Files brought together by the wrapped key of their footer: then few tasks need the same one.

This reads the end of each file and asks the KMS nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.file_keys import read_file_keys
from parquet_keytools.rotation.rewrap_task import WrappedKey
from parquet_keytools.spark.pipelines.job import Job
from parquet_keytools.spark.pipelines.places import file_at, location_of
from parquet_keytools.spark.pipelines.planned_files import (
    concatenated,
    cut,
    cut_by_group,
    packed,
    rows_of,
    unpacked,
)
from parquet_keytools.spark.pipelines.report import TaskResult

MOST_PIECES_A_GROUP = 16
"""Into how many pieces the files of one footer key are cut where only their ends are read and written: so many
tasks, at most, unwrap it."""

_GROUPED = pa.schema(
    [("path", pa.string()), ("size_bytes", pa.int64()), ("group", pa.int64()), ("hides", pa.bool_())]
)

KeyOf = tuple[WrappedKey, bool]
"""A wrapped key, and whether it is a KEK."""


@dataclass(frozen=True)
class GroupedFiles:
    """Files, each with the group it is in.

    Attributes:
        table: `path`, `size_bytes`, `group`, and `hides`: whether keys of columns are in its encrypted footer.
        visible: The wrapped keys that show without a key; empty where they were not asked for.
    """

    table: pa.Table
    visible: set[KeyOf]

    def pieces(self, job: Job, table: pa.Table | None = None, *, whole_files: bool = False) -> list[bytes]:
        """Return the files, or some of them, cut into pieces by group.

        Args:
            job: The pipeline.
            table: Some of the files; None for all.
            whole_files: Whether files are read as a whole. Then no task slot shall be idle, and a footer key is
                unwrapped in each Python worker rather than by few tasks.
        """
        table = self.table if table is None else table
        pieces = job.number_of_pieces(table.num_rows)
        return cut_by_group(table, pieces, pieces if whole_files else MOST_PIECES_A_GROUP)


def group_files(job: Job, place: str, files: pa.Table, *, with_keys: bool = False) -> GroupedFiles:
    """Read the footers' wrapped keys of files, in a job of its own.

    Args:
        job: The pipeline.
        place: Of the data set.
        files: `path` and `size_bytes`.
        with_keys: Whether the wrapped keys that show are wanted.
    """
    # To read the end of a file costs the same for each.
    alike = files.set_column(1, "size_bytes", pa.nulls(files.num_rows, pa.int64()).fill_null(0))
    pieces = cut(alike, job.number_of_pieces(files.num_rows))
    tables: list[bytes] = []
    visible: set[KeyOf] = set()
    for result in job.run(
        f"find the keys of {location_of(place)}", partial(_group_piece, place, with_keys), pieces
    ):
        tables.append(result.rows)
        visible |= result.other
    grouped = concatenated(tables, _GROUPED).drop_columns("size_bytes").join(files, "path")
    return GroupedFiles(grouped.select(_GROUPED.names), visible)


def _group_piece(place: str, with_keys: bool, position: int, attempt: int, piece: bytes) -> TaskResult:
    root = location_of(place)
    rows = []
    visible: set[KeyOf] = set()
    for file in rows_of(unpacked(piece)):
        group, hides = 0, False
        try:
            keys = read_file_keys(file_at(root, file["path"]))
            held = keys.footer_key
            if held is not None:
                group = _group(held.wrapped_key)
            hides = keys.hides_columns
            if with_keys:
                visible |= {(held.wrapped_key, held.material.double_wrapping) for held in keys.held}
        except (KeytoolsError, OSError):
            # Whoever works on it says what is wrong with it.
            pass
        rows.append({"path": file["path"], "size_bytes": file["size_bytes"], "group": group, "hides": hides})
    return TaskResult(packed(pa.Table.from_pylist(rows, _GROUPED)), other=visible)


def _group(key: WrappedKey) -> int:
    text = f"{key.master_key_id}\n{key.wrapped_key}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)
