"""Reading encrypted files and data sets with pyarrow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.decryption_properties import (
    Filters,
    arrow_read_limits,
    columns_mentioned,
    make_decryption_properties,
    refuse_denied_filter,
)
from parquet_keytools.arrow.delegating_filesystem import DelegatingHandler
from parquet_keytools.arrow.verified_filesystem import VerifiedHandler
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn
from parquet_keytools.errors import FileChangedError
from parquet_keytools.files.conversion import decrypted_buffer
from parquet_keytools.files.key_service import KeyService, read_again_if_changed
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.files.table_check import refuse_values_of_folders
from parquet_keytools.runtime import audit
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import LeftOutReason, ParquetFile, Unseen, data_set, raise_for_unseen

_log = logging.getLogger(__name__)

_MOST_SHOWN = 5


@dataclass(frozen=True)
class ReadRequest:
    """What a reader asks for.

    Attributes:
        columns: Names to read, or None for all.
        filters: As pyarrow takes them.
        table_name: The table of the files; None where the configuration has only one.
        aad_prefix: The AAD prefix that each file must have; None for what the table says.
    """

    columns: Sequence[str] | None
    filters: Filters
    table_name: str | None
    aad_prefix: str | None

    def wanted(self, columns: Sequence[FooterColumn]) -> Sequence[FooterColumn]:
        """Return the columns of a file that are read or filtered by: each whole, if only a part of it is."""
        if self.columns is None:
            return columns
        roots = {name.partition(".")[0] for name in self.columns} | set(self.columns)
        names = dict.fromkeys(column.path[0] for column in columns)
        if self.filters is not None:
            roots.update(columns_mentioned(self.filters, names))
        # A name may have dots of its own.
        wanted = {name for name in names if name in roots or any(root.startswith(f"{name}.") for root in roots)}
        return [column for column in columns if column.path[0] in wanted]

    @property
    def decrypted_columns(self) -> Sequence[str] | None:
        """What has to be decrypted of a file: a filter may look at columns that are not read."""
        return self.columns if self.filters is None else None


def read_table(
    keys: KeyService, location: FileLocation, request: ReadRequest, options: Mapping[str, Any]
) -> pa.Table:
    """Read a file, or a folder as a data set; see `Keytools.read_table`.

    Args:
        keys: Of the configuration.
        location: The file or folder.
        request: What is read.
        options: Further arguments of `pyarrow.parquet.read_table`.

    Raises:
        ColumnAccessDeniedError: A column that is asked for, or that a filter looks at, cannot be read.
        DecryptionError: A part of the file does not authenticate.
    """

    def read() -> pa.Table:
        if location.info().type == pafs.FileType.Directory:
            return _read_folder(keys, location, request, dict(options))
        # With `use_pandas_metadata` pyarrow reads the columns of the index, too.
        wanted = tuple if options.get("use_pandas_metadata") else request.wanted
        (opened,) = keys.open_files([location], request.table_name, request.aad_prefix, again=False, wanted=wanted)
        return _read_file(keys, opened, request, options)

    return read_again_if_changed(read)


def _read_file(keys: KeyService, opened: OpenedFile, request: ReadRequest, options: Mapping[str, Any]) -> pa.Table:
    columns = request.columns
    refuse_denied_filter(opened, request.filters)
    if _hides_denied(keys) and opened.denied:
        opened.refuse_denied(columns, hides_refused=True)
        columns = _without_denied(opened, columns)
    opened.refuse_denied(columns)
    limits = arrow_read_limits(opened) if opened.is_encrypted else []
    _log.info("%s is decrypted by %s", opened.location, "the module encryptor" if limits else "pyarrow")
    properties = None
    if opened.is_encrypted and not limits:
        properties = make_decryption_properties(opened, columns or [])
    decrypted_columns = columns if request.filters is None else None
    handler = VerifiedHandler(opened.location.filesystem, [opened], decrypted_columns)
    try:
        return pq.read_table(
            opened.location.path,
            filesystem=pafs.PyFileSystem(handler),
            columns=None if columns is None else list(columns),
            filters=request.filters,
            decryption_properties=properties,
            **options,
        )
    except OSError:
        # pyarrow does not say which module failed. Going over them again does, if one is damaged.
        if properties is not None:
            decrypted_buffer(opened, decrypted_columns)
        raise


def _read_folder(
    keys: KeyService, folder: FileLocation, request: ReadRequest, options: dict[str, Any]
) -> pa.Table:
    partitioning, schema = options.pop("partitioning", "hive"), options.pop("schema", None)
    if options:
        raise TypeError(f"not taken for a folder: {', '.join(options)}")
    files = _open_folder(keys, folder, request)
    dataset = _make_dataset(keys, folder, files, request, partitioning, schema)
    hidden = _denied_columns(files) if _hides_denied(keys) else frozenset[str]()
    expression = None if request.filters is None else pq.filters_to_expression(request.filters)
    names = None if request.columns is None else [name for name in request.columns if name not in hidden]
    try:
        return dataset.to_table(columns=names, filter=expression)
    except OSError:
        # pyarrow does not say which module of which file failed. Going over them again does.
        for opened in files:
            decrypted_buffer(opened, request.decrypted_columns)
        raise


def _hides_denied(keys: KeyService) -> bool:
    """Tell whether columns whose keys are refused are left out."""
    return keys.configuration.reading.denied_columns == "hide"


def _without_denied(opened: OpenedFile, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        columns = list(dict.fromkeys(column.path[0] for column in opened.footer.columns))
    denied = opened.denied_top_level
    return [name for name in columns if not any(column.path[0] in denied for column in opened.columns_named(name))]


def _dataset_files(folder: FileLocation) -> list[FileLocation]:
    """Return the files of a data set, by path. What is missing there would be rows that nobody misses.

    Raises:
        FileNotFoundError: There is nothing of that name.
        FileChangedError: Something was removed while the folder was listed.
        IncompleteDataSetError: Something could not be looked into.
        NoParquetFilesError: There are no Parquet files.
    """
    files: list[FileLocation] = []
    unseen: list[Unseen] = []
    others: list[str] = []
    for entry in data_set(folder):
        if isinstance(entry, ParquetFile):
            files.append(entry.location)
        elif isinstance(entry, Unseen):
            unseen.append(entry)
        elif entry.reason is LeftOutReason.NOT_PARQUET:
            others.append(entry.path)
    raise_for_unseen(
        unseen, hint="Repair or remove it, or begin its name with a dot or an underscore, so that readers skip it."
    )
    if unseen:
        raise FileChangedError("it was removed while its folder was read.", path=unseen[0].path)
    if others:
        shown = ", ".join(others[:_MOST_SHOWN]) + (" and more" if len(others) > _MOST_SHOWN else "")
        _log.warning("skipped, because these are not Parquet files: %s", shown)
    return sorted(files, key=lambda file: file.path)


def open_dataset(
    keys: KeyService, folder: FileLocation, request: ReadRequest, partitioning: Any, schema: pa.Schema | None
) -> ds.Dataset:
    """Return a data set of encrypted files; see `Keytools.dataset`.

    Raises:
        ColumnAccessDeniedError: A column of the data set cannot be read.
        DecryptionError: The name of a folder gives values to a column that is under a key.
    """

    def make() -> ds.Dataset:
        files = _open_folder(keys, folder, request)
        return _make_dataset(keys, folder, files, request, partitioning, schema)

    # While the schema is read; a reader of a file that is replaced later gets an error.
    return read_again_if_changed(make)


def _open_folder(keys: KeyService, folder: FileLocation, request: ReadRequest) -> list[OpenedFile]:
    with audit.about(folder):
        return keys.open_files(_dataset_files(folder), request.table_name, request.aad_prefix, again=False)


def _make_dataset(
    keys: KeyService,
    folder: FileLocation,
    files: Sequence[OpenedFile],
    request: ReadRequest,
    partitioning: Any,
    schema: pa.Schema | None,
) -> ds.Dataset:
    hide_denied = _hides_denied(keys)
    for opened in files:
        refuse_denied_filter(opened, request.filters)
        hint = "Name the columns that you need, or set `denied_columns: hide` under `reading`."
        opened.refuse_denied(request.columns, hint="" if hide_denied else hint, hides_refused=hide_denied)
    handler = VerifiedHandler(folder.filesystem, files, request.decrypted_columns)
    filesystem = pafs.PyFileSystem(handler)
    formats = [_file_format(opened) for opened in files]
    file_schema = formats[0].make_fragment(files[0].location.path, filesystem).physical_schema
    layout = _layout(folder, files, file_schema, partitioning)
    partitions = {fragment.path: fragment.partition_expression for fragment in layout.get_fragments()}
    encrypted = _encrypted_columns(files)
    table_check = keys.table_check(request.table_name)
    seen: set[frozenset[str]] = set()
    for path, expression in partitions.items():
        names = frozenset(ds.get_partition_keys(expression))
        if names not in seen:
            seen.add(names)
            refuse_values_of_folders(table_check, path, names, encrypted)
    fragments = [
        file_format.make_fragment(path, filesystem, partition_expression=partitions[path])
        for file_format, path in zip(formats, (opened.location.path for opened in files), strict=True)
    ]
    # What is not in the schema cannot be projected or filtered, so that Arrow never asks for its key.
    denied = _denied_columns(files)
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


def _denied_columns(files: Sequence[OpenedFile]) -> frozenset[str]:
    """Return the names of top-level columns that cannot be read in some file."""
    return frozenset[str]().union(*(opened.denied_top_level for opened in files))


def _encrypted_columns(files: Sequence[OpenedFile]) -> frozenset[str]:
    """Return the names of top-level columns that are encrypted in some file, as a whole or in parts."""
    return frozenset(
        column.path[0]
        for opened in files
        for column in opened.footer.columns
        if column.encryption is not ColumnEncryption.PLAINTEXT
    )


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
