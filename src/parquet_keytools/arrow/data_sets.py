"""Data sets of encrypted files: each is opened when a scan comes to it, and some ahead of the scan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.arrow.callbacks import DelegatingHandler
from parquet_keytools.arrow.encryption_properties import FOREVER, has_arrow_encryption
from parquet_keytools.arrow.lazy_dataset import DataSetHandler, LazyDataset, Reopen, needs_properties
from parquet_keytools.arrow.read_options import (
    Filters,
    ReadOptions,
    arrow_read_limits,
    columns_mentioned,
    has_stand_ins,
    hides_denied,
    hint_for_denied,
    make_decryption_properties,
    nulls_denied,
    refuse_denied_filter,
    schema_for_all,
    shows_stand_ins,
)
from parquet_keytools.config.document import list_of_names
from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.encryption.protection import FooterColumn
from parquet_keytools.errors import FileChangedError
from parquet_keytools.files.files_ahead import FilesAhead
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities, OpenedFile, read_again_if_changed
from parquet_keytools.files.table_check import protected_names, refuse_values_of_folders
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.secret_bytes import SecretBytes
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
    aad_prefix: str | bytes | None

    def __post_init__(self) -> None:
        """Refuse one name in place of several."""
        if self.columns is not None:
            object.__setattr__(self, "columns", list_of_names("columns", self.columns))

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


def _dataset_files(folder: FileLocation) -> list[FileLocation]:
    """Return the files of a data set, in order. What is missing there would be rows that nobody misses.

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
    # Files that are named one by one keep the order in which they were.
    return files if folder.only else sorted(files, key=lambda file: file.path)


def _not_reopened(paths: list[str], schema: pa.Schema) -> ds.Dataset:
    raise TypeError("this data set cannot be pickled")


class DataSetFiles:
    """The files of a folder on their way to be a data set, whose hidden columns are known once there is one."""

    def __init__(
        self,
        keys: KeyService,
        folder: FileLocation,
        request: ReadRequest,
        options: ReadOptions,
        paths: Sequence[str] | None = None,
    ) -> None:
        """List the files, unless `paths` has them."""
        self._keys = keys
        self._folder = folder
        self._request = request
        self._options = options
        self.paths = [file.path for file in _dataset_files(folder)] if paths is None else list(paths)
        self._known: dict[tuple[str, str], SecretBytes] = {}
        self._identities = FileIdentities(refuses=True)
        self._reads_folder_names = True
        self._partition_names: frozenset[str] = frozenset()
        self._checked: set[frozenset[ColumnPath]] = set()
        self._layout: ds.FileSystemDataset | None = None
        self.hidden: frozenset[str] = frozenset()
        self.opened = FilesAhead(self.paths, lambda: partial(self._open, keys.kms_keys(self._known)))

    def dataset(
        self,
        partitioning: Any,
        schema: pa.Schema | None,
        *,
        knows_denied: bool,
        reopen: Reopen = _not_reopened,
    ) -> LazyDataset:
        """Return the data set.

        The first file is opened, for the schema. All that the filters of the request leave are opened only where
        the schema shall not have what is denied in one of them, or where the first file needs decryption
        properties of its own: then others will.

        Args:
            partitioning: As `pyarrow.dataset.dataset` takes it.
            schema: Of the data set; None for that of the first file.
            knows_denied: Whether it must be known before a scan which columns cannot be read.
            reopen: Makes it again in another process.
        """
        keys, request, paths = self._keys, self._request, self.paths
        self._reads_folder_names = partitioning is not None
        (first,) = self.opened.hold(paths[:1])
        handler = DataSetHandler(
            self._folder.filesystem,
            self.opened,
            self._known,
            reopen,
            denied_columns=keys.configuration.reading.denied_columns,
        )
        filesystem = pafs.PyFileSystem(handler)
        if keys.configuration.reading.denied_columns == "hash":
            shared = self._options.file_format()
        else:
            shared = _shared_format(self._known, self._options)
        formats = _formats([first], handler, self._options)
        first_format = formats.get(paths[0], shared)
        file_schema = first_format.make_fragment(paths[0], filesystem).physical_schema
        options = _factory_options(self._folder, partitioning)
        stub = pafs.PyFileSystem(_StubHandler(self._folder.filesystem, file_schema))
        # Arrow would hold our files, and these hold what is kept here: for itself it gets a data set of its own.
        self._layout = ds.FileSystemDatasetFactory(stub, paths, ds.ParquetFileFormat(), options).finish()
        made = ds.FileSystemDatasetFactory(filesystem, paths, shared, options).finish(self._layout.schema)
        schema = self._layout.schema if schema is None else schema
        held = [first]
        if knows_denied or needs_properties(first):
            held = self.opened.hold([paths[0], *_paths_left(self._layout, schema, request.filters)])
            formats = _formats(held, handler, self._options)
        handler.partitioning = found = self._layout.partitioning
        self._partition_names = frozenset(() if found is None else found.schema.names)
        for opened in held:
            self._check_folders(opened.protected_columns)
        # What is not in the schema cannot be projected or filtered, so that Arrow never asks for its key.
        denied = frozenset[str]().union(*(opened.unshown_top_level for opened in held))
        self.hidden = denied if hides_denied(keys) else frozenset()
        fragments = list(made.get_fragments())
        if formats:
            fragments = [
                formats[fragment.path].make_fragment(
                    fragment.path, filesystem, partition_expression=fragment.partition_expression
                )
                if fragment.path in formats
                else fragment
                for fragment in fragments
            ]
        if nulls_denied(keys):
            kept = schema_for_all(schema, first)
        else:
            kept = pa.schema([field for field in schema if field.name not in denied], metadata=schema.metadata)
        return LazyDataset(fragments, kept, first_format, filesystem)

    def _open(self, kms_keys: KmsKeys, paths: Sequence[str]) -> list[OpenedFile]:
        """Open files, and refuse those that the data set may not have."""
        locations = [FileLocation(self._folder.filesystem, path) for path in paths]
        request = self._request
        with audit.about(self._folder):
            files = self._keys.open_files(
                locations,
                request.table_name,
                request.aad_prefix,
                kms_keys=kms_keys,
                identities=self._identities,
                reads_folder_names=self._reads_folder_names,
            )
        self._known.update(kms_keys.keys)
        stand_ins = shows_stand_ins(self._keys)
        hides = hides_denied(self._keys) or stand_ins
        hint = hint_for_denied(self._keys)
        for opened in files:
            refuse_denied_filter(opened, request.filters, has_stand_ins=stand_ins)
            opened.refuse_denied(request.columns, hint=hint, hides_refused=hides)
            self._check_folders(opened.protected_columns)
        return files

    def _check_folders(self, protected: frozenset[ColumnPath]) -> None:
        """Refuse folders that give values to columns that are protected in some file, or that the table keeps."""
        if not self._partition_names or self._layout is None or protected in self._checked:
            return
        table_check = self._keys.table_check(self._request.table_name)
        keyed = () if table_check is None else table_check.keyed(self._partition_names)
        columns = [*protected, *((name,) for name in keyed)]
        # Most data sets are done with one look at the names of all.
        if protected_names(self._partition_names, columns, table_check):
            for fragment in self._layout.get_fragments():
                values = ds.get_partition_keys(fragment.partition_expression)
                names = {name: f"{name}={value}" for name, value in values.items()}
                refuse_values_of_folders(fragment.path, names, columns, table_check)
        self._checked.add(protected)


def open_dataset(
    keys: KeyService,
    folder: FileLocation,
    request: ReadRequest,
    options: ReadOptions,
    partitioning: Any,
    schema: pa.Schema | None,
    paths: Sequence[str] | None,
    reopen: Reopen,
) -> ds.Dataset:
    """Return a data set of encrypted files; see `Keytools.dataset`, and `DataSetFiles.dataset`.

    Raises:
        ColumnAccessDeniedError: A column of the data set cannot be read.
        FolderNameError: The name of a folder gives values to a column that is under a key.
    """
    folder = options.mapped(folder)
    knows_denied = request.columns is not None or hides_denied(keys)

    def make() -> ds.Dataset:
        files = DataSetFiles(keys, folder, request, options, paths)
        return files.dataset(partitioning, schema, knows_denied=knows_denied, reopen=reopen)

    # While the schema is read; a reader of a file that is replaced later gets an error.
    return read_again_if_changed(make)


def _paths_left(layout: ds.FileSystemDataset, schema: pa.Schema, filters: Filters) -> Iterator[str]:
    """Yield the paths of what filters leave, by the names of folders alone."""
    if filters is None:
        fragments = layout.get_fragments()
    else:
        expression = pq.filters_to_expression(filters)
        fragments = layout.replace_schema(schema).get_fragments(expression)
    for fragment in fragments:
        yield fragment.path


def _shared_format(known: Mapping[tuple[str, str], SecretBytes], options: ReadOptions) -> ds.ParquetFileFormat:
    """Return the format of all files whose keys are wrapped by the KMS: its factory answers from known keys."""
    if not has_arrow_encryption():
        return options.file_format()
    from parquet_keytools.arrow.arrow_kms import READING_CONNECTION, AnsweringKms, pe

    kms = AnsweringKms(known)
    configuration = ds.ParquetDecryptionConfig(
        pe.CryptoFactory(lambda _: kms),
        pe.KmsConnectionConfig(**READING_CONNECTION),
        pe.DecryptionConfiguration(cache_lifetime=FOREVER),
    )
    return options.file_format(decryption_config=configuration)


class _StubHandler(DelegatingHandler):
    """Serves an empty file for every path: Arrow finds the partitions in the names of files."""

    def __init__(self, filesystem: pafs.FileSystem, schema: pa.Schema) -> None:
        super().__init__(filesystem)
        sink = pa.BufferOutputStream()
        # Not `schema.empty_table()`, which Arrow cannot make of extension types in lists or structs.
        pq.ParquetWriter(sink, schema).close()
        self._content = sink.getvalue()

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open the content."""
        return pa.BufferReader(self._content)


def _formats(
    held: Sequence[OpenedFile], handler: DataSetHandler, options: ReadOptions
) -> dict[str, ds.ParquetFileFormat]:
    """Return formats with decryption properties for the files that need their own, by path; tell the handler."""
    formats = {}
    for opened in held:
        is_plain = not opened.is_encrypted or has_stand_ins(opened, handler.denied_columns)
        if not is_plain and needs_properties(opened) and not arrow_read_limits(opened):
            properties = make_decryption_properties(opened, columns=[])
            formats[opened.location.path] = options.file_format(decryption_properties=properties)
    handler.with_properties.update(formats)
    return formats


def _factory_options(folder: FileLocation, partitioning: Any) -> ds.FileSystemFactoryOptions:
    if isinstance(partitioning, str):
        partitioning = ds.partitioning(flavor=partitioning)
    elif isinstance(partitioning, (list, tuple)):
        partitioning = ds.partitioning(field_names=list(partitioning))
    # Of files that are named one by one, all `name=value` in their paths counts, as pyarrow has it.
    named_by_parts = bool(folder.only) and (
        isinstance(partitioning, ds.HivePartitioning) or getattr(partitioning, "type_name", "") == "hive"
    )
    options = ds.FileSystemFactoryOptions(partition_base_dir="" if named_by_parts else folder.path)
    if isinstance(partitioning, ds.PartitioningFactory):
        options.partitioning_factory = partitioning
    elif partitioning is not None:
        options.partitioning = partitioning
    return options
