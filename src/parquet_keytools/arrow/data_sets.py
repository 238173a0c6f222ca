"""Data sets of encrypted files: each is opened when a scan comes to it, and some ahead of the scan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.arrow.read_options import (
    Filters,
    ReadOptions,
    columns_mentioned,
    hides_denied,
    hint_for_denied,
    nulls_denied,
    refuse_denied_filter,
    schema_for_all,
    shows_stand_ins,
)
from parquet_keytools.arrow.view_files import ViewHandler
from parquet_keytools.config.document import list_of_names
from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.encryption.protection import FooterColumn
from parquet_keytools.errors import FileChangedError
from parquet_keytools.files.files_ahead import FilesAhead
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities, OpenedFile, WantedColumns, read_again_if_changed
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


Reopen = Callable[[list[str], pa.Schema], ds.Dataset]
"""Makes the data set again, of these files and with this schema; can be pickled."""


class EncryptedDataset(ds.FileSystemDataset):  # type: ignore[misc]
    """A data set whose files are opened when they are scanned, some of them ahead of the scan.

    Arrow leaves out partitions by the names of folders. The other files are opened by threads of ours: Arrow waits
    for them, and gets a view or our error.
    """

    _whole: EncryptedDataset | None = None
    _filter: pc.Expression | None = None
    """Of a data set that `filter` made: the data set before all filters, and the filters together."""

    @property
    def partitioning(self) -> ds.Partitioning | None:
        """What the names of folders and files mean."""
        return self.filesystem.handler.partitioning

    def scanner(self, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> SafeScanner:
        """Return a scanner; its files begin to be opened."""
        whole = self._whole or self
        fragments = whole.get_fragments(_both(self._filter, filter))
        self.filesystem.handler.opened.read_ahead(fragment.path for fragment in fragments)
        return SafeScanner(super().scanner(columns, filter, *more, **options))

    def filter(self, expression: pc.Expression) -> EncryptedDataset:
        """Return the same files with a filter for each scan."""
        filtered: EncryptedDataset = super().filter(expression)
        filtered._whole, filtered._filter = self._whole or self, _both(self._filter, expression)
        return filtered

    def replace_schema(self, schema: pa.Schema) -> EncryptedDataset:
        """Return the same files under another schema."""
        fragments = list((self._whole or self).get_fragments())
        replaced = EncryptedDataset(fragments, schema, self.format, self.filesystem)
        return replaced if self._filter is None else replaced.filter(self._filter)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return all batches for another library; `pyarrow.dataset.write_dataset` takes no scanner of ours."""
        return self.scanner().__arrow_c_stream__(requested_schema)

    def __reduce__(self) -> tuple[Any, ...]:
        # No key leaves the process: the files are opened again, with the keys of the process that unpickles.
        paths = [fragment.path for fragment in self.get_fragments()]
        return self.filesystem.handler.reopen, (paths, self.schema)


def _both(first: pc.Expression | None, second: pc.Expression | None) -> pc.Expression | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


class SafeScanner:
    """A scanner whose reader cannot hang; else as `pyarrow.dataset.Scanner`.

    `Scanner.to_reader` holds the interpreter while it waits for a lock of Arrow, and the thread of Arrow that has
    the lock waits for the interpreter to open the next file. `to_batches` releases the interpreter.
    """

    def __init__(self, scanner: ds.Scanner) -> None:
        self._scanner = scanner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scanner, name)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of the batches."""
        return pa.RecordBatchReader.from_batches(self._scanner.projected_schema, self._scanner.to_batches())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the batches for another library."""
        return self.to_reader().__arrow_c_stream__(requested_schema)


class _DataSetHandler(ViewHandler):
    """Serves the views of the files of a data set."""

    def __init__(
        self, filesystem: pafs.FileSystem, opened: FilesAhead, denied_columns: str, reopen: Reopen
    ) -> None:
        super().__init__(filesystem, opened, denied_columns=denied_columns)
        self.opened = opened
        self.reopen = reopen
        self.partitioning: ds.Partitioning | None = None


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
        *,
        wanted: WantedColumns = tuple,
    ) -> None:
        """List the files, unless `paths` has them; only `wanted` columns of them will be read."""
        self._keys = keys
        self._folder = folder
        self._request = request
        self._options = options
        self._wanted = wanted
        self.paths = [file.path for file in _dataset_files(folder)] if paths is None else list(paths)
        self._known: dict[tuple[str, str], SecretBytes] = {}
        self._identities = FileIdentities(refuses=True)
        self._reads_folder_names = True
        self._partition_names: frozenset[str] = frozenset()
        self._checked: set[frozenset[ColumnPath]] = set()
        # Not the data set: it holds our files through Arrow, and they hold this object.
        self._folders: list[tuple[str, pc.Expression]] = []
        self.hidden: frozenset[str] = frozenset()
        self.names: list[str] = []
        self.opened = FilesAhead(self.paths, lambda: partial(self._open, keys.kms_keys(self._known)))

    def dataset(
        self,
        partitioning: Any,
        schema: pa.Schema | None,
        *,
        knows_denied: bool,
        reopen: Reopen = _not_reopened,
    ) -> EncryptedDataset:
        """Return the data set.

        The first file is opened, for the schema. All that the filters of the request leave are opened only where
        the schema must not have what is denied in one of them.

        Args:
            partitioning: As `pyarrow.dataset.dataset` takes it.
            schema: Of the data set; None for that of the first file.
            knows_denied: Whether it must be known before a scan which columns cannot be read.
            reopen: Makes it again in another process.
        """
        keys, request, paths = self._keys, self._request, self.paths
        self._reads_folder_names = partitioning is not None
        (first,) = self.opened.hold(paths[:1])
        handler = _DataSetHandler(
            self._folder.filesystem, self.opened, keys.configuration.reading.denied_columns, reopen
        )
        filesystem = pafs.PyFileSystem(handler)
        file_format = self._options.file_format()
        options = _factory_options(self._folder, partitioning)
        made = ds.FileSystemDatasetFactory(filesystem, paths, file_format, options).finish()
        schema = made.schema if schema is None else schema
        held = [first]
        if knows_denied:
            held = self.opened.hold([paths[0], *_paths_left(made, schema, request.filters)])
        fragments = list(made.get_fragments())
        self._folders = [(fragment.path, fragment.partition_expression) for fragment in fragments]
        handler.partitioning = found = made.partitioning
        self._partition_names = frozenset(() if found is None else found.schema.names)
        for opened in held:
            self._check_folders(opened.protected_columns)
        self.names = list(dict.fromkeys([*schema.names, *(column.path[0] for column in first.footer.columns)]))
        denied = frozenset[str]().union(*(opened.unshown_top_level for opened in held))
        self.hidden = denied if hides_denied(keys) else frozenset()
        if nulls_denied(keys):
            kept = schema_for_all(schema, first)
        else:
            kept = pa.schema([field for field in schema if field.name not in denied], metadata=schema.metadata)
        return EncryptedDataset(fragments, kept, file_format, filesystem)

    def _open(self, kms_keys: KmsKeys, paths: Sequence[str]) -> list[OpenedFile]:
        """Open files, and refuse those that the data set may not have."""
        locations = [FileLocation(self._folder.filesystem, path) for path in paths]
        request = self._request
        with audit.about(self._folder):
            files = self._keys.open_files(
                locations,
                request.table_name,
                request.aad_prefix,
                wanted=self._wanted,
                kms_keys=kms_keys,
                identities=self._identities,
                holds_metadata=True,
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
        if not self._partition_names or protected in self._checked:
            return
        table_check = self._keys.table_check(self._request.table_name)
        keyed = () if table_check is None else table_check.keyed(self._partition_names)
        columns = [*protected, *((name,) for name in keyed)]
        # Most data sets are done with one look at the names of all.
        if protected_names(self._partition_names, columns, table_check):
            for path, expression in self._folders:
                values = ds.get_partition_keys(expression)
                names = {name: f"{name}={value}" for name, value in values.items()}
                refuse_values_of_folders(path, names, columns, table_check)
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


def _paths_left(made: ds.FileSystemDataset, schema: pa.Schema, filters: Filters) -> Iterator[str]:
    """Yield the paths of what filters leave, by the names of folders alone."""
    if filters is None:
        fragments = made.get_fragments()
    else:
        expression = pq.filters_to_expression(filters)
        fragments = made.replace_schema(schema).get_fragments(expression)
    for fragment in fragments:
        yield fragment.path


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
