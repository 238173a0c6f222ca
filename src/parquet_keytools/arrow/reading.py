"""Reading encrypted files and data sets with pyarrow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.decryption_properties import (
    Filters,
    arrow_read_limits,
    make_decryption_properties,
    refuse_denied_filter,
)
from parquet_keytools.arrow.delegating_filesystem import DelegatingHandler
from parquet_keytools.arrow.verified_filesystem import Decrypt, VerifiedHandler
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.opened_file import OpenedFile
from parquet_keytools.storage import FileLocation

_log = logging.getLogger(__name__)


def read_table(
    opened: OpenedFile,
    decrypt: Decrypt,
    *,
    columns: Sequence[str] | None,
    filters: Filters,
    hide_denied: bool,
    options: dict[str, Any],
) -> pa.Table:
    """Read one opened file; see `Keytools.read_table`.

    Args:
        opened: The file.
        decrypt: For a file that Arrow cannot decrypt.
        columns: Names to read, or None for all.
        filters: As pyarrow takes them.
        hide_denied: Whether columns whose keys are refused are left out.
        options: Further arguments of `pyarrow.parquet.read_table`.

    Raises:
        ColumnAccessDeniedError: A column that is asked for, or that a filter looks at, cannot be read.
        DecryptionError: A part of the file does not authenticate.
    """
    refuse_denied_filter(opened, filters)
    if hide_denied and opened.denied:
        opened.refuse_denied(columns, hides_refused=True)
        columns = _without_denied(opened, columns)
    opened.refuse_denied(columns)
    limits = arrow_read_limits(opened) if opened.is_encrypted else []
    _log.info("%s is decrypted by %s", opened.location, "the module encryptor" if limits else "pyarrow")
    properties = None
    if opened.is_encrypted and not limits:
        properties = make_decryption_properties(opened, columns or [])
    # A filter may look at columns that are not read.
    handler = VerifiedHandler(opened.location.filesystem, [opened], decrypt, columns if filters is None else None)
    try:
        return pq.read_table(
            opened.location.path,
            filesystem=pafs.PyFileSystem(handler),
            columns=None if columns is None else list(columns),
            filters=filters,
            decryption_properties=properties,
            **options,
        )
    except OSError:
        # pyarrow does not say which module failed. Going over them again does, if one is damaged.
        if properties is not None:
            decrypt(opened, columns if filters is None else None)
        raise


def _without_denied(opened: OpenedFile, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        columns = list(dict.fromkeys(column.path[0] for column in opened.footer.columns))
    denied = opened.denied_top_level
    return [name for name in columns if not any(column.path[0] in denied for column in opened.columns_named(name))]


def dataset_files(folder: FileLocation) -> list[FileLocation]:
    """Return the files of a data set, by name; those that begin with `_` or `.` do not count.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ParquetFormatError: There are no files.
    """
    info = folder.info()
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {folder}")
    if info.type == pafs.FileType.File:
        return [folder]
    found = folder.filesystem.get_file_info(pafs.FileSelector(folder.path, recursive=True))
    base = PurePosixPath(folder.path)
    files = [
        FileLocation(folder.filesystem, entry.path)
        for entry in sorted(found, key=lambda entry: entry.path)
        if entry.type == pafs.FileType.File
        and not any(part.startswith(("_", ".")) for part in PurePosixPath(entry.path).relative_to(base).parts)
    ]
    if not files:
        raise ParquetFormatError("the folder has no files.", path=str(folder))
    return files


def open_dataset(
    folder: FileLocation,
    files: Sequence[OpenedFile],
    decrypt: Decrypt,
    *,
    columns: Sequence[str] | None,
    filters: Filters,
    hide_denied: bool,
    partitioning: Any,
    schema: pa.Schema | None,
) -> ds.Dataset:
    """Return a data set of opened files; see `Keytools.dataset`.

    Raises:
        ColumnAccessDeniedError: A column of the data set cannot be read.
    """
    for opened in files:
        refuse_denied_filter(opened, filters)
        hint = "Name the columns that you need, or say `denied_columns: hide` under `reading`."
        opened.refuse_denied(columns, hint="" if hide_denied else hint, hides_refused=hide_denied)
    handler = VerifiedHandler(folder.filesystem, files, decrypt, columns if filters is None else None)
    filesystem = pafs.PyFileSystem(handler)
    formats = [_file_format(opened) for opened in files]
    file_schema = formats[0].make_fragment(files[0].location.path, filesystem).physical_schema
    layout = _layout(folder, files, file_schema, partitioning)
    partitions = {fragment.path: fragment.partition_expression for fragment in layout.get_fragments()}
    fragments = [
        file_format.make_fragment(path, filesystem, partition_expression=partitions[path])
        for file_format, path in zip(formats, (opened.location.path for opened in files), strict=True)
    ]
    # What is not in the schema cannot be projected or filtered, so that Arrow never asks for its key.
    denied = denied_columns(files)
    kept = [field for field in schema or layout.schema if field.name not in denied]
    dataset_schema = pa.schema(kept, metadata=(schema or layout.schema).metadata)
    return ds.FileSystemDataset(fragments, dataset_schema, formats[0], filesystem)


def _file_format(opened: OpenedFile) -> ds.ParquetFileFormat:
    """Return the format of one file, which carries its decryption properties."""
    if not opened.is_encrypted or arrow_read_limits(opened):
        return ds.ParquetFileFormat()
    properties = make_decryption_properties(opened, columns=[])
    return ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(decryption_properties=properties)
    )


def _layout(
    folder: FileLocation, files: Sequence[OpenedFile], schema: pa.Schema, partitioning: Any
) -> ds.FileSystemDataset:
    """Return a data set of empty files of the same names: Arrow finds the partitions in these names."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    stub = _StubHandler(folder.filesystem, sink.getvalue())
    return ds.FileSystemDatasetFactory(
        pafs.PyFileSystem(stub),
        [opened.location.path for opened in files],
        ds.ParquetFileFormat(),
        _factory_options(folder, partitioning),
    ).finish()


class _StubHandler(DelegatingHandler):
    """Serves the same content for every file."""

    def __init__(self, filesystem: pafs.FileSystem, content: pa.Buffer) -> None:
        super().__init__(filesystem)
        self._content = content

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open the content."""
        return pa.BufferReader(self._content)


def denied_columns(files: Sequence[OpenedFile]) -> frozenset[str]:
    """Return the names of top-level columns that cannot be read in some file."""
    return frozenset[str]().union(*(opened.denied_top_level for opened in files))


def _factory_options(folder: FileLocation, partitioning: Any) -> ds.FileSystemFactoryOptions:
    if isinstance(partitioning, str):
        partitioning = ds.partitioning(flavor=partitioning)
    elif isinstance(partitioning, (list, tuple)):
        partitioning = ds.partitioning(field_names=list(partitioning))
    options = ds.FileSystemFactoryOptions(partition_base_dir=folder.path)
    if isinstance(partitioning, ds.PartitioningFactory):
        options.partitioning_factory = partitioning
    elif partitioning is not None:
        options.partitioning = partitioning
    return options


def dataset_to_table(
    dataset: ds.Dataset, columns: Sequence[str] | None, filters: Filters, hidden: frozenset[str]
) -> pa.Table:
    """Read a data set, without those of the named columns that are hidden."""
    expression = None if filters is None else pq.filters_to_expression(filters)
    names = None if columns is None else [name for name in columns if name not in hidden]
    return dataset.to_table(columns=names, filter=expression)
