"""A data set without partitions through the module encryptor: row group by row group, one file after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from parquet_keytools.arrow.encryption_properties import ArrowEncryptor
from parquet_keytools.arrow.file_writer import MAX_ROW_GROUP_ROWS, ModuleEncryptedFile
from parquet_keytools.arrow.output_filesystem import PendingHandler
from parquet_keytools.arrow.tabular import row_groups_of
from parquet_keytools.files.key_service import TablePolicy
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import all_files

STREAMED_OPTIONS = frozenset(
    {
        "basename_template",
        "create_dir",
        "max_open_files",
        "max_partitions",
        "max_rows_per_file",
        "max_rows_per_group",
        "min_rows_per_group",
        "preserve_order",
        "use_threads",
    }
)
"""Options of `pyarrow.dataset.write_dataset` that mean something or nothing where there is one file at a time."""


def stream_files(
    encryptor: ArrowEncryptor,
    policy: TablePolicy,
    handler: PendingHandler,
    folder: FileLocation,
    source: pa.Table | pa.RecordBatchReader,
    write_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> int:
    """Write the files of a data set, for `PendingHandler.commit` to put in their places.

    No more than one row group is held.

    Args:
        encryptor: Makes the keys.
        policy: What the table asks for.
        handler: Has the outputs.
        folder: Of the data set; it must hold no files.
        source: The data.
        write_options: Of the Parquet writer.
        options: Some of `STREAMED_OPTIONS`.

    Returns:
        How many rows were written.

    Raises:
        pyarrow.ArrowInvalid: The folder holds files.
    """
    template = options.get("basename_template", "part-{i}.parquet")
    if "{i}" not in template:
        raise ValueError("basename_template did not contain '{i}'")
    if next(all_files(folder), None) is not None:
        raise pa.ArrowInvalid(
            f"Could not write to {folder.path} as the directory is not empty and existing_data_behavior is error"
        )
    if options.get("create_dir", True):
        handler.create_dir(folder.path, recursive=True)
    group_rows = min(options.get("max_rows_per_group") or MAX_ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS)
    group_rows = max(min(options["min_rows_per_group"] or group_rows, group_rows), 1)
    total = 0
    files = _by_files(source, group_rows, options.get("max_rows_per_file") or 0)
    for number, tables in enumerate(files):
        pending = handler.begin(folder.child(template.format(i=number)).path)
        file = ModuleEncryptedFile(encryptor, policy, pending, source.schema, write_options)
        try:
            for table in tables:
                file.write(table, group_rows)
                total += table.num_rows
            handler.complete(file.finish())
        except BaseException:
            file.abandon()
            raise
    return total


def _by_files(
    source: pa.Table | pa.RecordBatchReader, group_rows: int, file_rows: int
) -> Iterator[Iterator[pa.Table]]:
    """Yield the tables of one file after the other; each is to be read to its end."""
    tables = iter(row_groups_of(source, group_rows))
    rest: pa.Table | None = next(tables, None)
    if rest is None or not rest.num_rows:
        return  # As pyarrow does.

    def one_file() -> Iterator[pa.Table]:
        nonlocal rest
        room = file_rows
        while rest is not None:
            if not file_rows or rest.num_rows <= room:
                room -= rest.num_rows
                yield rest
                rest = next(tables, None)
                if file_rows and not room:
                    return
            else:
                head, rest = rest.slice(0, room), rest.slice(room)
                yield head
                return

    while rest is not None:
        yield one_file()
