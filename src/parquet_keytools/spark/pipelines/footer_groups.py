"""Files brought together by the wrapped key of their footer: then few tasks need the same one.

This reads the end of each file and asks the KMS nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.held_keys import read_file_keys
from parquet_keytools.rotation.rewrapper import WrappedKey
from parquet_keytools.spark.pipelines.job import Job
from parquet_keytools.spark.pipelines.planned_files import (
    concatenated,
    cut,
    cut_by_group,
    file_at,
    node_location,
    packed,
    rows_of,
    unpacked,
)
from parquet_keytools.spark.pipelines.report import TaskResult

MOST_PIECES_A_GROUP = 16
"""Into how many pieces the files of one footer key are cut where only their ends are read and written: so many
tasks, at most, unwrap it."""

_GROUPED = pa.schema(
    [("path", pa.string()), ("size_bytes", pa.int64()), ("group", pa.int64()), ("is_encrypted", pa.bool_())]
)


@dataclass(frozen=True)
class GroupedFiles:
    """Files, each with the group it is in.

    Attributes:
        table: `path`, `size_bytes`, `group`, and `is_encrypted`.
    """

    table: pa.Table

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


def group_files(job: Job, place: str, files: pa.Table) -> GroupedFiles:
    """Read the footers' wrapped keys of files, in a job of its own."""
    # To read the end of a file costs the same for each.
    alike = files.set_column(1, "size_bytes", pa.nulls(files.num_rows, pa.int64()).fill_null(0))
    pieces = cut(alike, job.number_of_pieces(files.num_rows))
    task = partial(_group_piece, place)
    tables = [result.rows for result in job.run(f"find the keys of {node_location(place)}", task, pieces)]
    grouped = concatenated(tables, _GROUPED).drop_columns("size_bytes").join(files, "path")
    return GroupedFiles(grouped.select(_GROUPED.names))


def _group_piece(place: str, position: int, attempt: int, piece: bytes) -> TaskResult:
    root = node_location(place)
    rows = []
    for file in rows_of(unpacked(piece)):
        group, is_encrypted = 0, False
        try:
            keys = read_file_keys(file_at(root, file["path"]))
            held = keys.footer_key
            if held is not None:
                group = _group(held.wrapped_key)
            is_encrypted = keys.is_encrypted
        except (KeytoolsError, OSError):
            # Whoever works on it says what is wrong with it.
            pass
        rows.append({**file, "group": group, "is_encrypted": is_encrypted})
    return TaskResult(packed(pa.Table.from_pylist(rows, _GROUPED)))


def _group(key: WrappedKey) -> int:
    text = f"{key.master_key_id}\n{key.wrapped_key}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)
