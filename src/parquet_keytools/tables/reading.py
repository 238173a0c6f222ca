"""Reading encrypted files and data sets with pyarrow, over views, and with Polars over pyarrow data sets.

The files of a data set are opened when a scan reaches them, some of them ahead of the scan.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.config.document import did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError, FileChangedError
from parquet_keytools.files.denied_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    WantedColumns,
    as_verified,
    read_again_if_changed,
)
from parquet_keytools.files.table_check import protected_names, refuse_values_of_folders
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.walk import LeftOutReason, ParquetFile, Unseen, data_set, raise_for_unseen
from parquet_keytools.tables.file_systems import FOOTER_READ_BYTES, FilesAhead, Reopen, ViewHandler
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, PlainInput

if TYPE_CHECKING:
    import polars as pl

_log = logging.getLogger(__name__)

_MOST_SHOWN = 5

Filters = Any
"""As `pyarrow.parquet.read_table` takes them: an expression, or tuples in disjunctive normal form."""

# --- What a reader asks for -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRequest:
    """What a reader asks for; arguments as of `Keytools.read_table`."""

    columns: Sequence[str] | None
    filters: Filters
    table_name: str | None
    aad_prefix: str | bytes | None

    def __post_init__(self) -> None:
        """Refuse one name in place of several."""
        if self.columns is not None:
            object.__setattr__(self, "columns", list_of_names("columns", self.columns))

    def wanted(self, columns: Sequence[FooterColumn]) -> Sequence[FooterColumn]:
        """Return the leaf columns that are read or filtered, and all other parts of their top-level columns."""
        if self.columns is None:
            return columns
        roots = {name.partition(".")[0] for name in self.columns} | set(self.columns)
        names = dict.fromkeys(column.path[0] for column in columns)
        if self.filters is not None:
            roots.update(columns_mentioned(self.filters, names))
        # A name may contain dots.
        wanted = {name for name in names if name in roots or any(root.startswith(f"{name}.") for root in roots)}
        return [column for column in columns if column.path[0] in wanted]


_OURS = frozenset({"source", "columns", "filters", "filesystem", "decryption_properties"})
_OF_A_TABLE = frozenset({"use_threads", "use_pandas_metadata", "schema", "partitioning"})
"""Options of `pyarrow.parquet.read_table` that data sets take in another place."""

_REFUSED = {
    "decryption_properties": "each file is decrypted with its own keys",
    "ignore_prefixes": "one rule says which files belong to a data set: names that begin with `.` or `_` do not",
}


@dataclass(frozen=True)
class ReadOptions:
    """Options of one read: of the file format, named as in `pyarrow.parquet.read_table`, and of the table."""

    format: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, method: str) -> ReadOptions:
        """Check the options of `read_table`, or of `dataset`, which has no options of tables."""
        known = inspect.signature(pq.read_table).parameters.keys() - _OURS - _REFUSED.keys()
        if method != "read_table":
            known -= _OF_A_TABLE
        options = {name: value for name, value in options.items() if name not in _REFUSED or value is not None}
        if options.get("read_dictionary") is not None:
            list_of_names("read_dictionary", options["read_dictionary"])
        for name in options:
            if name in _REFUSED:
                raise TypeError(f"{method} does not take {name!r}: {_REFUSED[name]}.")
            if name not in known:
                raise TypeError(
                    f"{method} has no option {name!r}. Options of pyarrow: {', '.join(sorted(known))}."
                )
        return cls(
            # pyarrow cannot map a view into memory.
            {name: value for name, value in options.items() if name not in {"memory_map", *_OF_A_TABLE}},
            {name: options[name] for name in options if name in _OF_A_TABLE},
        )

    def file_format(self) -> ds.ParquetFileFormat:
        """Return a file format for data sets."""
        given = {name: value for name, value in self.format.items() if value is not None}
        if "read_dictionary" in given:
            given["dictionary_columns"] = given.pop("read_dictionary")
        # 0 means no buffer.
        if buffer_size := given.pop("buffer_size", 0):
            given |= {"use_buffered_stream": True, "buffer_size": buffer_size}
        # Arrow would read small gaps, too. A damaged page of another column there would break the scan.
        given.setdefault("cache_options", pa.CacheOptions(hole_size_limit=0))
        return ds.ParquetFileFormat(**given)


_HINTS_FOR_DENIED = {
    "hash": f"Name the columns that you need. {NEEDS_KEY}",
    "error": "Name the columns that you need, or set `denied_columns: hide` under `reading`.",
}


def columns_mentioned(filters: Filters, names: Iterable[str]) -> list[str]:
    """Return the names of columns that filters use, and perhaps more names.

    An expression does not list its fields, so its text is searched, where a literal may look like a column. A
    field that is given by its position may be any column.
    """
    text = str(pq.filters_to_expression(filters))
    if "FieldPath(" in text:
        return list(names)
    return [name for name in names if name in text and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


# --- Data sets ----------------------------------------------------------------------------------------------


def _dataset_files(folder: FileLocation) -> list[FileLocation]:
    """Return the files of a data set, in order; an incomplete list is an error, because rows would be missing."""
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
        raise FileChangedError("it was removed while its folder was listed.", path=unseen[0].path)
    if others:
        shown = ", ".join(others[:_MOST_SHOWN]) + (" and more" if len(others) > _MOST_SHOWN else "")
        _log.warning("skipped, because these are not Parquet files: %s", shown)
    # Files that are named one by one keep their order.
    return files if folder.only else sorted(files, key=lambda file: file.path)


class EncryptedDataset(ds.FileSystemDataset):  # type: ignore[misc]
    """A data set whose files are opened when they are scanned, some of them ahead; folders exclude partitions."""

    _whole: EncryptedDataset | None = None
    _filter: pc.Expression | None = None
    """Of a filtered data set: the data set without filters, and all filters."""

    @property
    def partitioning(self) -> ds.Partitioning | None:
        """How the names of folders and files are read as values."""
        return self.filesystem.handler.partitioning

    def scanner(self, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> SafeScanner:
        """Return a scanner, and begin to open its files."""
        fragments = self.unfiltered_fragments(filter)
        self.filesystem.handler.files.read_ahead(fragment.path for fragment in fragments)
        return SafeScanner(super().scanner(columns, filter, *more, **options))

    def unfiltered_fragments(self, filter: Any = None) -> Iterator[ds.Fragment]:
        """Return the files with all their rows, without partitions that filters exclude."""
        whole = self._whole or self
        fragments: Iterator[ds.Fragment] = whole.get_fragments(_both(self._filter, filter))
        return fragments

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
        """Return all batches for another library."""
        return self.scanner().__arrow_c_stream__(requested_schema)

    def __reduce__(self) -> tuple[Any, ...]:
        # No key leaves the process: the process that unpickles opens the files again.
        paths = [fragment.path for fragment in self.get_fragments()]
        return self.filesystem.handler.reopen, (paths, self.schema)


def _both(first: pc.Expression | None, second: pc.Expression | None) -> pc.Expression | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


class SafeScanner:
    """A `pyarrow.dataset.Scanner` whose reader cannot hang.

    `Scanner.to_reader` holds the interpreter while it waits for a lock of Arrow. The thread of Arrow that has the
    lock waits for the interpreter to open the next file. `to_batches` releases the interpreter.
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


class _DataSetFiles:
    """The files of a folder, from which `dataset` makes a data set; then `names` has all top-level columns."""

    def __init__(
        self,
        keys: KeyService,
        folder: FileLocation,
        request: ReadRequest,
        options: ReadOptions,
        paths: Sequence[str] | None = None,
        *,
        wanted: WantedColumns = tuple,
        is_single_file: bool = False,
    ) -> None:
        """List the files, unless `paths` names them; only `wanted` columns will be read."""
        self._keys = keys
        self._denied_columns = keys.configuration.denied_columns
        self._folder = folder
        self._request = request
        self._options = options
        self._wanted = wanted
        self.paths = [file.path for file in _dataset_files(folder)] if paths is None else list(paths)
        self._known: dict[tuple[str, str], SecretBytes] = {}
        # A single file is compared with all files that were opened before, which only warns.
        self._identities = None if is_single_file else FileIdentities(refuses=True)
        self._reads_folder_names = True
        self._partition_names: frozenset[str] = frozenset()
        self._checked: set[frozenset[ColumnPath]] = set()
        # Not the data set itself, which would be a cycle of references through Arrow.
        self._folders: list[tuple[str, pc.Expression]] = []
        self.hidden: frozenset[str] = frozenset()
        self.names: list[str] = []

    def dataset(
        self,
        partitioning: Any,
        schema: pa.Schema | None,
        *,
        knows_denied: bool,
        reads_folder_names: bool | None = None,
        reopen: Reopen | None = None,
    ) -> EncryptedDataset:
        """Return the data set.

        This opens the first file, for the schema, and with `knows_denied`, for a schema without columns that
        cannot be read, all files that the filters leave. Without `reads_folder_names`, `partitioning` says whether
        folders may give values to columns. `reopen` makes the data set again in another process.
        """
        request, paths = self._request, self.paths
        self._reads_folder_names = partitioning is not None if reads_folder_names is None else reads_folder_names
        # `files` calls this object, which must not refer to it: keys would live until a garbage collection.
        files = FilesAhead(paths, lambda: partial(self._open, self._keys.kms_keys(self._known)))
        (first,) = files.hold(paths[:1])
        handler = ViewHandler(self._folder.filesystem, files, self._denied_columns, reopen)
        filesystem = pafs.PyFileSystem(handler)
        file_format = self._options.file_format()
        options = _factory_options(self._folder, partitioning)
        made = ds.FileSystemDatasetFactory(filesystem, paths, file_format, options).finish()
        schema = made.schema if schema is None else schema
        held = [first]
        if knows_denied:
            # The files that filters leave, by the names of folders alone.
            left = made if request.filters is None else made.replace_schema(schema)
            expression = None if request.filters is None else pq.filters_to_expression(request.filters)
            held = files.hold([paths[0], *(one.path for one in left.get_fragments(expression))])
        fragments = list(made.get_fragments())
        self._folders = [(fragment.path, fragment.partition_expression) for fragment in fragments]
        handler.partitioning = found = made.partitioning
        self._partition_names = frozenset(() if found is None else found.schema.names)
        for opened in held:
            self._check_folders(opened.protected_columns)
        self.names = list(dict.fromkeys([*schema.names, *(column.path[0] for column in first.footer.columns)]))
        denied = frozenset[str]().union(*(opened.unshown_top_level for opened in held))
        self.hidden = denied if self._denied_columns == "hide" else frozenset()
        if self._denied_columns == "null":
            # Columns with keys of their own may be null for some readers.
            own = {c.path[0] for c in first.footer.columns if c.encryption is ColumnEncryption.COLUMN_KEY}
            fields = [field.with_nullable(field.nullable or field.name in own) for field in schema]
        else:
            fields = [field for field in schema if field.name not in denied]
        kept = pa.schema(fields, metadata=schema.metadata)
        return EncryptedDataset(fragments, kept, file_format, filesystem)

    def hides(self, name: str) -> bool:
        """Return whether a name in a projection means a hidden column; names may contain dots."""
        return name in self.hidden or (name not in self.names and name.partition(".")[0] in self.hidden)

    def _open(self, kms_keys: KmsKeys, paths: Sequence[str]) -> list[OpenedFile]:
        """Open files, and check each of them against the request."""
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
                reads_folder_names=self._reads_folder_names,
            )
        self._known.update(kms_keys.keys)
        hint = _HINTS_FOR_DENIED.get(self._denied_columns, "")
        for opened in files:
            if request.filters is not None and opened.denied:
                names = columns_mentioned(request.filters, sorted(opened.denied_top_level))
                opened.refuse_denied(names, hides_refused=self._denied_columns in ("null", "hash"))
            opened.refuse_denied(request.columns, hint=hint, hides_refused=self._denied_columns != "error")
            self._check_folders(opened.protected_columns)
        return files

    def _check_folders(self, protected: frozenset[ColumnPath]) -> None:
        """Refuse folders that give values to columns that a file protects, or that the table has under a key."""
        if not self._partition_names or protected in self._checked:
            return
        table_check = self._keys.table_check(self._request.table_name)
        keyed = () if table_check is None else table_check.keyed(self._partition_names)
        columns = [*protected, *((name,) for name in keyed)]
        # For most data sets, one check of all names suffices.
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
    """Return a data set of encrypted files; see `Keytools.dataset`."""
    knows_denied = request.columns is not None or keys.configuration.denied_columns == "hide"

    def make() -> ds.Dataset:
        files = _DataSetFiles(keys, folder, request, options, paths)
        return files.dataset(partitioning, schema, knows_denied=knows_denied, reopen=reopen)

    # This covers the schema. A file that is replaced later is an error of the scan.
    return read_again_if_changed(make)


def _factory_options(folder: FileLocation, partitioning: Any) -> ds.FileSystemFactoryOptions:
    if isinstance(partitioning, str):
        partitioning = ds.partitioning(flavor=partitioning)
    elif isinstance(partitioning, (list, tuple)):
        partitioning = ds.partitioning(field_names=list(partitioning))
    # As in pyarrow, of files that are named one by one, each `name=value` in the whole path counts.
    named_by_parts = bool(folder.only) and (
        isinstance(partitioning, ds.HivePartitioning) or getattr(partitioning, "type_name", "") == "hive"
    )
    options = ds.FileSystemFactoryOptions(partition_base_dir="" if named_by_parts else folder.path)
    if isinstance(partitioning, ds.PartitioningFactory):
        options.partitioning_factory = partitioning
    elif partitioning is not None:
        options.partitioning = partitioning
    return options


# --- Tables, footers and schemas ------------------------------------------------------------------------------


def read_table(keys: KeyService, location: FileLocation, request: ReadRequest, options: ReadOptions) -> pa.Table:
    """Read a file, or a folder as a data set; see `Keytools.read_table`."""
    return read_again_if_changed(lambda: _read_table(keys, location, request, options))


def read_metadata(
    keys: KeyService, location: FileLocation, table_name: str | None, aad_prefix: str | bytes | None
) -> pq.FileMetaData:
    """Return the decrypted metadata of a file; see `Keytools.metadata`."""
    if location.is_folder():
        raise IsADirectoryError(f"{location} is a folder: name one of its files")
    (opened,) = keys.open_files([location], table_name, aad_prefix)
    hint = NEEDS_KEY
    if opened.digests is None:
        hint = "To leave these columns out, set `denied_columns: hide` under `reading`."
    opened.refuse_denied(None, hint=hint, hides_refused=keys.configuration.denied_columns != "error")
    shown = "hide" if opened.digests is None else "hash"
    with open_source(location) as source:
        view = PlainFile(opened, as_verified(opened, source), shown, PageCache(), gap=FOOTER_READ_BYTES)
        return pq.read_metadata(PlainInput(view))


def read_schema(
    keys: KeyService, location: FileLocation, table_name: str | None, aad_prefix: str | bytes | None
) -> pa.Schema:
    """Return the schema of a file or a data set; see `Keytools.schema`."""
    denied_columns = keys.configuration.denied_columns
    # Columns that are shown as nulls may be null, whatever the file says.
    if not (location.only or location.is_folder() or denied_columns == "null"):
        return read_metadata(keys, location, table_name, aad_prefix).schema.to_arrow_schema()
    files = _DataSetFiles(keys, location, ReadRequest(None, None, table_name, aad_prefix), ReadOptions())
    return files.dataset("hive", None, knows_denied=denied_columns == "hide").schema


def _read_table(keys: KeyService, location: FileLocation, request: ReadRequest, options: ReadOptions) -> pa.Table:
    partitioning, schema = options.table.get("partitioning", "hive"), options.table.get("schema")
    reads_folder_names = partitioning is not None
    paths = None
    is_single_file = not (location.only or location.is_folder())
    if is_single_file:
        # A single file gets no values from folder names, and may have any name.
        paths, partitioning = [location.path], None
    elif partitioning == "hive":
        # As in `pyarrow.parquet.read_table`, but not in data sets.
        partitioning = ds.HivePartitioning.discover(infer_dictionary=True)
    of_files = options
    if "arrow_extensions_enabled" in inspect.signature(pq.read_table).parameters:
        # The default of `read_table`, which data sets do not have; pyarrow has it from version 21 on.
        of_files = replace(options, format={"arrow_extensions_enabled": True, **options.format})
    knows_denied = keys.configuration.denied_columns == "hide"
    # The index columns are known after a file was opened.
    finds_index = bool(options.table.get("use_pandas_metadata"))
    wanted = tuple if finds_index else request.wanted
    files = _DataSetFiles(keys, location, request, of_files, paths, wanted=wanted, is_single_file=is_single_file)
    dataset = files.dataset(partitioning, schema, knows_denied=knows_denied, reads_folder_names=reads_folder_names)
    if finds_index and request.columns is not None:
        metadata = json.loads((dataset.schema.metadata or {}).get(b"pandas", b"{}"))
        index = {name for name in metadata.get("index_columns", ()) if isinstance(name, str)}
        if index := index - set(request.columns):
            with_index = replace(request, columns=[*request.columns, *sorted(index)])
            return _read_table(keys, location, with_index, options)
    expression = None if request.filters is None else pq.filters_to_expression(request.filters)
    known = files.names
    names = None if request.columns is None else [name for name in request.columns if not files.hides(name)]
    for name in names or ():
        if name not in known and name.partition(".")[0] not in known:
            raise ValueError(f"{location} has no column {name!r}. {did_you_mean(name, known) or one_of(known)}")
    threads = options.table.get("use_threads", True)
    return dataset.to_table(columns=names, filter=expression, use_threads=threads)


_BATCHES_AHEAD_OF_A_THREAD = 2
_BATCHES_AHEAD = 16
"""What Arrow reads ahead by default."""


OpenColumns = Callable[..., ds.Dataset]
"""Opens a data set for the argument `columns`; None for all columns."""


@dataclass(frozen=True)
class PolarsSource:
    """What Polars scans: a data set that is opened for each scan, with the keys of its columns only."""

    schema: pa.Schema
    open_columns: OpenColumns

    def to_batches(
        self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Scan; Arrow would decode two million rows ahead, whose new memory costs more than waiting."""
        options.setdefault("batch_readahead", min(_BATCHES_AHEAD, _BATCHES_AHEAD_OF_A_THREAD * pa.cpu_count()))
        names = list(self.schema.names if columns is None else columns)
        wanted = dict.fromkeys(names)
        if filter is not None:
            wanted |= dict.fromkeys(columns_mentioned(filter, self.schema.names))
        dataset = self.open_columns(columns=list(wanted))
        batches: Iterator[pa.RecordBatch] = dataset.to_batches(columns=names, filter=filter, **options)
        return batches


def scan_polars(open_columns: OpenColumns, open_file: Callable[[str], PlainInput]) -> pl.LazyFrame:
    """Return a lazy frame over a data set, and the view of one of its files; see `Keytools.scan_polars`."""
    try:
        import polars as pl
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        raise ConfigurationError("Polars is not installed.", hint="pip install polars") from None
    return pl.scan_pyarrow_dataset(PolarsSource(_schema(open_columns, open_file), open_columns))


def _schema(open_columns: OpenColumns, open_file: Callable[[str], PlainInput]) -> pa.Schema:
    """Return the schema of all columns, including columns that cannot be read."""
    try:
        return open_columns(columns=None).schema
    except ColumnAccessDeniedError:
        dataset = open_columns(columns=[])
        with open_file(next(dataset.get_fragments()).path) as file:
            whole = pq.read_schema(file)
        found = [whole.field(name) for name in whole.names if name not in dataset.schema.names]
        return pa.schema([*dataset.schema, *found])
