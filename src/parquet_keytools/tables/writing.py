"""Writing encrypted files and data sets from pyarrow data and from DataFrames of other libraries."""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.aad import (
    MAX_COUNT,
    WRITE_LARGER_PAGES,
    WRITE_LARGER_ROW_GROUPS,
    refuse_more_than_ordinals,
)
from parquet_keytools.encryption.file_encryption import StreamedFile, read_plaintext_footer
from parquet_keytools.errors import ConfigurationError, FormatLimitError, OutputError
from parquet_keytools.files.field_labels import labels_of_schema
from parquet_keytools.files.key_service import TablePolicy, no_one_value
from parquet_keytools.files.placement import KeyMaterials, put_in_place
from parquet_keytools.runtime.threads_and_forks import ExceptionWatch, OwnerProcess, leave_to_parent
from parquet_keytools.storage.local_files import failing_as_output, refuse_in_child, without_leftovers
from parquet_keytools.storage.locations import BufferSource, FileLocation
from parquet_keytools.storage.outputs import PendingOutput, pending_output, written_bytes
from parquet_keytools.storage.walk import all_files
from parquet_keytools.tables.file_systems import PendingHandler
from parquet_keytools.tables.properties import ArrowEncryptor, arrow_leaf_paths, arrow_limits

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_log = logging.getLogger(__name__)

MAX_ROW_GROUP_ROWS = 1024 * 1024
"""Most rows of a row group by default, as with pyarrow."""

_MOST_ROW_GROUP_ROWS = 64 * 1024 * 1024
"""pyarrow takes larger numbers for this one."""

_OURS = {
    "encryption_config": "the table says how files are encrypted",
    "encryption_properties": "the encryption properties are made here",
    "metadata_collector": "it would reveal statistics of encrypted columns",
    "filesystem": "the file system is an argument of its own",
}

_NAMING_COLUMNS = {"use_dictionary", "write_statistics", "use_byte_stream_split"}
"""Options that are a bool or a list of column names."""

Engine = Literal["pyarrow", "module encryptor"]


@dataclass(frozen=True)
class WriteResult:
    """What was written.

    Attributes:
        path: The file, or the folder of the data set.
        engine: What encrypted it.
        reasons: Why pyarrow did not, a phrase each; empty if it did.
        files: Number of files.
        rows: Number of rows.
        size_bytes: Length of all files together.
        plaintext_columns: Dotted paths of the leaf columns that are in plaintext.
    """

    path: str
    engine: Engine
    reasons: tuple[str, ...]
    files: int
    rows: int
    size_bytes: int
    plaintext_columns: tuple[str, ...] = ()


class EncryptedParquetWriter:
    """Writes one encrypted file, row group by row group; `Keytools.writer` makes it.

    It has the methods of `pyarrow.parquet.ParquetWriter`. The file appears under its name when the writer is
    closed. It does not appear if a method, or the block of a `with` statement, raises an exception, or if the
    writer is never closed.

    Attributes:
        schema: Schema of the data.
        result: What was written; None until the writer is closed.
    """

    def __init__(
        self,
        encryptor: ArrowEncryptor,
        target: FileLocation,
        schema: pa.Schema,
        table_name: str | None,
        options: Mapping[str, Any],
        *,
        overwrite: bool = True,
        key_values: Mapping[str, str] | None = None,
    ) -> None:
        """Begin a file; see `Keytools.writer`."""
        options = without_ours(options)
        paths = arrow_leaf_paths(schema, options)
        # Some versions of Arrow go on after the last ordinal.
        refuse_more_than_ordinals(target, columns=len(paths))
        policy = encryptor.keys.policy(table_name, paths, partial(labels_of_schema, schema), key_values)
        self._labels = LabelsOfData(policy.table.labels.field, schema)
        reasons = arrow_limits(policy, options)
        self.result: WriteResult | None = None
        self._target = target
        self._reasons = tuple(reasons)
        self._plaintext_columns = policy.plaintext_columns
        self._rows = 0
        self._owner = OwnerProcess()
        self._watch = ExceptionWatch()
        self._pending = pending_output(target, overwrite=overwrite)
        self._discard = weakref.finalize(self, self._pending.discard)
        make = _ByModuleEncryptor if reasons else _ByArrow
        try:
            with audit.about(target), failing_as_output(target):
                self._file: _ByArrow | _ByModuleEncryptor = make(encryptor, policy, self._pending, schema, options)
        except BaseException:
            self._discard()
            raise
        leave_to_parent(self._file)
        self.schema: pa.Schema = self._file.schema

    def write(self, table_or_batch: pa.Table | pa.RecordBatch, row_group_size: int | None = None) -> None:
        """Write a table or a batch, as row groups of their own.

        Args:
            table_or_batch: The data, with the schema of the file.
            row_group_size: Most rows of a row group; None or -1 for 1,048,576.

        Raises:
            TypeError: `row_group_size` is not a whole number.
            ValueError: The data has another schema, the writer is closed, or `row_group_size` is less than 1.
            OutputError: The storage refuses the data.
        """
        if isinstance(table_or_batch, pa.RecordBatch):
            table_or_batch = pa.Table.from_batches([table_or_batch])
        self.write_table(table_or_batch, row_group_size)

    def write_batch(self, batch: pa.RecordBatch, row_group_size: int | None = None) -> None:
        """Write a batch; see `write`."""
        self.write_table(pa.Table.from_batches([batch]), row_group_size)

    def write_table(self, table: pa.Table, row_group_size: int | None = None) -> None:
        """Write a table; see `write`."""
        row_group_size = row_group_rows(row_group_size)
        with self._all_or_nothing():
            self._labels.refuse_others(table.schema)
            self._file.write(table, row_group_size)
        self._rows += table.num_rows

    def add_key_value_metadata(self, key_value_metadata: Mapping[Any, Any]) -> None:
        """Add key-value metadata to the footer."""
        with self._all_or_nothing():
            self._file.add_key_value_metadata(key_value_metadata)

    @property
    def is_open(self) -> bool:
        """Whether the writer takes more data."""
        return bool(self._discard.alive)

    def close(self) -> WriteResult | None:
        """Finish the file, and put it in its place.

        Returns:
            What was written; None if the file was discarded before.

        Raises:
            OutputError: The file cannot be written; an older file stays.
            KeytoolsError: The footer would show what the table hides.
            BaseException: An exception that was raised since the writer was opened is being handled: rows may be
                missing.
        """
        if self.is_open:
            with self._all_or_nothing():
                self._watch.refuse(self._target)
                put_in_place(self._pending, self._file.finish())
            self._discard()
            engine: Engine = "module encryptor" if self._reasons else "pyarrow"
            size = written_bytes([self._target])
            self.result = WriteResult(
                str(self._target), engine, self._reasons, 1, self._rows, size, self._plaintext_columns
            )
            _log.info("%s was encrypted by %s%s", self._target, engine, because(self._reasons))
        return self.result

    def discard(self) -> None:
        """Close without writing the file; does nothing after `close`."""
        if self.is_open:
            if self._owner.is_here:
                self._file.abandon()
            self._discard()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        if not self.is_open:
            raise ValueError(f"{self._target} is closed")
        refuse_in_child(self._owner, self._target)
        try:
            with (
                audit.about(self._target),
                failing_as_output(self._target),
                refusing_beyond_ordinals(self._target),
            ):
                yield
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def without_ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for pyarrow's Parquet writer, without options that are set here and given as None."""
    for name in _OURS.keys() & options.keys():
        if options[name] is not None:
            raise TypeError(f"{name} is not supported: {_OURS[name]}")
    for name in _NAMING_COLUMNS & options.keys():
        if isinstance(options[name], (str, bytes)):
            list_of_names(name, options[name])
    return {name: value for name, value in options.items() if name not in _OURS}


def row_group_rows(given: Any) -> int | None:
    """Return the most rows of a row group from `row_group_size`; None for the default, given as None or -1."""
    if given is None or given == -1:
        return None
    return min(whole_number("row_group_size", given, least=1), _MOST_ROW_GROUP_ROWS)


def whole_number(argument: str, given: Any, *, least: int) -> int:
    """Return the value of an argument as an int, or raise an error; as with pyarrow, 5.0 is 5."""
    try:
        number = int(given) if isinstance(given, float) and given.is_integer() else operator.index(given)
    except TypeError:
        raise TypeError(f"{argument} takes a whole number, not {given!r}.") from None
    if number < least:
        raise ValueError(f"{argument} takes {least} or more, not {given!r}.")
    return number


def because(reasons: Sequence[str]) -> str:
    """Return why pyarrow did not encrypt, for the log."""
    return f", because of pyarrow: {'; '.join(reasons)}" if reasons else ""


@contextlib.contextmanager
def refusing_beyond_ordinals(target: FileLocation) -> Iterator[None]:
    """Raise `FormatLimitError` where Arrow refuses more pages or row groups than there are ordinals."""
    try:
        yield
    except OSError as error:
        # Arrow has no class for these errors.
        if error.errno is None and "row groups in an encrypted" in str(error):
            raise FormatLimitError(
                f"{target}: a file would have more than {MAX_COUNT} row groups.", hint=WRITE_LARGER_ROW_GROUPS
            ) from None
        if error.errno is None and "pages per chunk" in str(error):
            raise FormatLimitError(
                f"{target}: a column chunk would have more than {MAX_COUNT} pages.", hint=WRITE_LARGER_PAGES
            ) from None
        raise


class _ByArrow:
    """pyarrow encrypts."""

    def __init__(
        self,
        encryptor: ArrowEncryptor,
        policy: TablePolicy,
        pending: PendingOutput,
        schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> None:
        properties = encryptor.made_for(policy)[0]
        self._target = pending.target
        self._row_groups = 0
        self._stream = pending.open_stream()
        try:
            self._writer = pq.ParquetWriter(self._stream, schema, encryption_properties=properties, **options)
        except BaseException:
            self._stream.close()
            raise
        self.schema = self._writer.schema

    def write(self, table: pa.Table, row_group_size: int | None) -> None:
        size = min(row_group_size or MAX_ROW_GROUP_ROWS, max(table.num_rows, 1))
        self._row_groups += max(-(-table.num_rows // size), 1) if size > 0 else 0
        refuse_more_than_ordinals(self._target, row_groups=self._row_groups)
        self._writer.write_table(table, row_group_size)

    def add_key_value_metadata(self, entries: Mapping[Any, Any]) -> None:
        self._writer.add_key_value_metadata(entries)

    def finish(self) -> KeyMaterials | None:
        self._writer.close()
        self._stream.close()
        return None

    def abandon(self) -> None:
        for close in (self._writer.close, self._stream.close):
            with contextlib.suppress(pa.ArrowException, OSError, ValueError):
                close()


class _ByModuleEncryptor:
    """The module encryptor encrypts; pyarrow writes each row group as a plain file, in memory only."""

    def __init__(
        self,
        encryptor: ArrowEncryptor,
        policy: TablePolicy,
        pending: PendingOutput,
        schema: pa.Schema,
        options: Mapping[str, Any],
    ) -> None:
        self._keys = encryptor.keys
        self._policy = policy
        self._pending = pending
        self._path = str(pending.target)
        self._whole_schema = schema
        self._options = options
        # Only the footer holds the schema and key-value metadata.
        self._plain_schema = schema.remove_metadata()
        self._plain_options = {**options, "store_schema": False}
        self._entries: dict[Any, Any] = {}
        self._first, self.schema = self._in_memory(schema, options)
        self._opened = contextlib.ExitStack()
        self._file: StreamedFile | None = None
        if not policy.table.value_columns:
            self._begin(policy)

    def _begin(self, policy: TablePolicy) -> StreamedFile:
        """Begin the file, with the keys of the values that its columns have."""
        self._new = self._keys.new_file_keys(policy, self._pending.target)
        self._policy = policy
        try:
            sink = self._opened.enter_context(self._pending.open_sink())
            self._file = StreamedFile(sink, self._new.encryption, self._first)
        except BaseException:
            self._opened.close()
            raise
        return self._file

    def _for(self, row_group: BufferSource) -> StreamedFile:
        """Return the file for its next row group, which must have the values of the earlier ones."""
        policy = self._policy
        if policy.table.value_columns:
            policy = policy.with_column_values(read_plaintext_footer(row_group))
            if self._file is not None and policy.column_values != self._policy.column_values:
                columns = ", ".join(policy.table.value_columns)
                raise no_one_value(self._path, f"a row group has another value of {columns} than the first")
        return self._file or self._begin(policy)

    def _in_memory(
        self, schema: pa.Schema, options: Mapping[str, Any], table: pa.Table | None = None
    ) -> tuple[BufferSource, pa.Schema]:
        """Return a plain file of one row group, or a footer with the key-value metadata so far, and its schema."""
        buffer = pa.BufferOutputStream()
        with pq.ParquetWriter(buffer, schema, **options) as writer:
            if table is not None:
                writer.write_table(table, max(table.num_rows, 1))
            elif self._entries:
                writer.add_key_value_metadata(self._entries)
        return BufferSource(self._path, buffer.getvalue()), writer.schema

    def write(self, table: pa.Table, row_group_size: int | None) -> None:
        size = min(table.num_rows, MAX_ROW_GROUP_ROWS) if row_group_size is None else row_group_size
        for start in range(0, max(table.num_rows, 1), max(size, 1)):
            part = table.slice(start, size)
            if self._policy.table.value_columns and not part.num_rows:
                continue
            row_group, _ = self._in_memory(self._plain_schema, self._plain_options, part)
            self._for(row_group).append(row_group)

    def add_key_value_metadata(self, entries: Mapping[Any, Any]) -> None:
        self._entries.update(entries)

    def finish(self) -> KeyMaterials | None:
        template, _ = self._in_memory(self._whole_schema, self._options)
        file = self._file or self._for(template)
        with self._opened:
            file.finish(template)
        return self._new.key_materials

    def abandon(self) -> None:
        with contextlib.suppress(OSError, OutputError):
            self._opened.close()


_STREAM_ROWS = 1024 * 1024
_STREAM_BYTES = 128 * 1024 * 1024
"""How many bytes of a stream make a row group, and are in memory at a time."""

_TAKEN = (
    "a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, a list of tables or batches, or "
    "an object with __arrow_c_stream__, such as a pandas or Polars DataFrame or a DuckDB relation"
)

_REFUSED = {
    "file_visitor": "it would reveal statistics of encrypted columns",
    "format": "only Parquet is encrypted",
    "file_options": "the options of the Parquet writer are given as `write_options`",
}


def as_stream(data: Any) -> pa.Table | pa.RecordBatchReader:
    """Return data that `as_dataset_source` takes as a table or as a stream of batches."""
    source = as_dataset_source(data)
    if isinstance(source, (pa.Table, pa.RecordBatchReader)):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, list):
        return pa.concat_tables(map(as_stream, source))
    return source.scanner().to_reader()


def row_groups_of(source: pa.Table | pa.RecordBatchReader, row_group_rows: int | None) -> Iterator[pa.Table]:
    """Yield a table as it is, or a stream as tables of a few row groups: its batches may be small."""
    if isinstance(source, pa.Table):
        yield source
        return
    batches: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    is_empty = True
    for batch in source:
        if batch.num_rows == 0:
            continue
        is_empty = False
        batches.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= (row_group_rows or _STREAM_ROWS) or (row_group_rows is None and size_bytes >= _STREAM_BYTES):
            full = pa.Table.from_batches(batches)
            wanted = row_group_rows or rows
            yield full.slice(0, rows // wanted * wanted)
            batches = full.slice(rows // wanted * wanted).to_batches()
            rows, size_bytes = rows % wanted, sum(rest.nbytes for rest in batches)
    if batches or is_empty:
        yield pa.Table.from_batches(batches, source.schema)


def as_dataset_source(data: Any) -> Any:
    """Return data as `pyarrow.dataset.write_dataset` takes it, or raise `TypeError`. Streams stay streams."""
    if isinstance(data, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return data
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

    from parquet_keytools.tables.reading import EncryptedDataset

    if isinstance(data, EncryptedDataset):
        return data.scanner().to_reader()
    if isinstance(data, ds.Dataset):
        return data
    if isinstance(data, ds.Scanner):
        return data.to_reader()
    try:
        if type(data).__module__.partition(".")[0] == "pandas":
            # With the metadata from which pandas makes the same index again.
            return pa.table(data)
        if hasattr(data, "__arrow_c_stream__"):
            return _without_views(pa.RecordBatchReader.from_stream(data))
    except pa.ArrowInvalid as error:
        if "non-struct" not in str(error):
            raise
        raise TypeError(
            f"{type(data).__qualname__} is one column, not a table: give a DataFrame, such as `data.to_frame()`."
        ) from None
    if hasattr(data, "collect") and hasattr(data, "lazy"):
        raise TypeError(f"{type(data).__qualname__} is a query that has not run: give `data.collect()`.")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        parts = [as_dataset_source(part) for part in data]
        if parts and all(isinstance(part, (pa.Table, pa.RecordBatch)) for part in parts):
            return parts
    raise TypeError(f"{type(data).__qualname__} is not tabular data: give {_TAKEN}.")


def _without_views(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return a stream without string views, which Polars gives: Arrow cannot partition or filter them."""
    fields = [field.with_type(_without_view(field.type)) for field in reader.schema]
    schema = pa.schema(fields, metadata=reader.schema.metadata)
    return reader if schema == reader.schema else reader.cast(schema)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_view(field.type)) for field in kind])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_without_view(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_view(kind.value_type)), kind.list_size)
    return _VIEWS.get(kind, kind)


_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def write_table(
    encryptor: ArrowEncryptor,
    data: Any,
    target: FileLocation,
    table_name: str | None,
    options: Mapping[str, Any],
    *,
    overwrite: bool = True,
    key_values: Mapping[str, str] | None = None,
) -> WriteResult:
    """Write one file, whole or not at all; see `Keytools.write_table`."""
    # `chunk_size` is pyarrow's other name for it.
    row_group_size = row_group_rows(options.get("chunk_size", options.get("row_group_size")))
    options = {name: value for name, value in options.items() if name not in ("row_group_size", "chunk_size")}
    source = as_stream(data)
    _labels_of_data(encryptor, table_name, source.schema, data)
    with EncryptedParquetWriter(
        encryptor, target, source.schema, table_name, options, overwrite=overwrite, key_values=key_values
    ) as writer:
        for table in row_groups_of(source, row_group_size):
            writer.write_table(table, row_group_size)
    assert writer.result is not None
    return writer.result


class LabelsOfData:
    """The labels of the schema that decided about the keys of a file, for data that comes later."""

    def __init__(self, field: str | None, schema: pa.Schema) -> None:
        """Keep the labels; `field` is the metadata entry that holds them, None if labels of data do not count."""
        self._field = field
        self._labels = {} if field is None else labels_of_schema(schema, field)
        self._seen = schema
        self._names = frozenset(schema.names)

    def refuse_others(self, schema: pa.Schema) -> None:
        """Refuse data with a label that the schema did not have: its column may be plaintext."""
        if self._field is None or schema is self._seen:
            return
        for path, label in labels_of_schema(schema, self._field).items():
            if path[0] in self._names and self._labels.get(path) != label:
                raise ConfigurationError(
                    f"the field {'.'.join(path)!r} of some of the data has the label {label!r}, and the schema "
                    "that decides does not.",
                    hint="Give the field its label in the schema of the writer or of the data set.",
                )
        self._seen = schema


def _labels_of_data(
    encryptor: ArrowEncryptor, table_name: str | None, schema: pa.Schema, data: Any
) -> LabelsOfData:
    """Return the labels of a schema, usually of the first file; refuse a data set with a file that has others."""
    _, table = encryptor.keys.configuration.select_table(table_name)
    labels = LabelsOfData(table.labels.field, schema)
    if table.labels.field is not None and hasattr(data, "get_fragments"):
        fragments_of = getattr(data, "unfiltered_fragments", data.get_fragments)
        try:
            fragments = fragments_of()
        except ValueError:
            raise ConfigurationError(
                "labels in the files of a filtered data set cannot be seen.",
                hint="Make it with a schema that has all labels, and give `dataset.scanner(filter=...)`.",
            ) from None
        for fragment in fragments:
            labels.refuse_others(fragment.physical_schema)
    return labels


def write_dataset(
    encryptor: ArrowEncryptor,
    data: Any,
    folder: FileLocation,
    table_name: str | None,
    *,
    partitioning: Any,
    partitioning_flavor: str | None,
    write_options: Mapping[str, Any],
    overwrite: bool,
    durable: bool,
    options: Mapping[str, Any],
    key_values: Mapping[str, str] | None = None,
) -> WriteResult:
    """Write a data set; see `Keytools.write_dataset`."""
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

    keys = encryptor.keys
    parameters = inspect.signature(ds.write_dataset).parameters
    # pyarrow ignores arguments that are None and that are None by default.
    options = {
        name: value
        for name, value in options.items()
        if value is not None or name not in parameters or parameters[name].default is not None
    }
    if options.get("format") == "parquet":
        del options["format"]
    for name in _REFUSED.keys() & options.keys():
        raise TypeError(f"{name} is not supported: {_REFUSED[name]}")
    if not overwrite and options.get("existing_data_behavior") == "delete_matching":
        raise ValueError("overwrite=False and existing_data_behavior='delete_matching' contradict each other.")
    write_options = without_ours(write_options)
    schema = options.get("schema")
    if isinstance(data, Iterator) and schema is not None:
        data = pa.RecordBatchReader.from_batches(schema, data)
        options = {name: value for name, value in options.items() if name != "schema"}
    given, data = data, as_dataset_source(data)
    if schema is None:
        schema = data[0].schema if isinstance(data, list) else data.schema
    partitioning, partition_names = _partitioning(partitioning, partitioning_flavor, schema)
    if partition_names:
        leaves = arrow_leaf_paths(schema, write_options)
        all_columns = keys.policy(table_name, leaves, partial(labels_of_schema, schema))
        all_columns.check_partition_columns(partition_names)
    labels = _labels_of_data(encryptor, table_name, schema, given)
    for part in data if isinstance(data, list) else ():
        labels.refuse_others(part.schema)
    schema = pa.schema([field for field in schema if field.name not in partition_names])
    paths = arrow_leaf_paths(schema, write_options)
    refuse_more_than_ordinals(folder, columns=len(paths))
    options |= _row_limits(options, len(paths))
    policy = keys.policy(table_name, paths, partial(labels_of_schema, schema), key_values)
    policy.refuse_folder_names(partition_names)
    reasons = arrow_limits(policy, write_options)
    if not policy.table.double_wrapping:
        reasons.append("it would call the KMS while it writes a data set with single wrapping")
    # Errors of the KMS are raised here, before Arrow's threads start.
    if reasons:
        keys.wrap_keks(policy)
        encryption = None
    else:
        encryption = ds.ParquetEncryptionConfig(*encryptor.made_for(policy)[1])
    file_options = ds.ParquetFileFormat().make_write_options(encryption_config=encryption, **write_options)
    handler = PendingHandler(
        folder,
        keys if reasons else None,
        policy.table_name,
        overwrite=overwrite,
        durable=durable,
        key_values=key_values,
    )
    engine: Engine = "module encryptor" if reasons else "pyarrow"
    _log.info("%s is encrypted by %s%s", folder, engine, because(reasons))
    if folder.is_local:
        # What a killed process left would look to Arrow like a data set that exists.
        for _ in without_leftovers(all_files(folder)):
            pass
    rows: list[int] = []
    row_groups = [0]

    def count(written: Any) -> None:
        rows.append(written.metadata.num_rows)
        row_groups.append(written.metadata.num_row_groups)

    try:
        with failing_as_output(folder), refusing_beyond_ordinals(folder):
            ds.write_dataset(
                handler.until_failure(data) if isinstance(data, pa.RecordBatchReader) else data,
                folder.path,
                format="parquet",
                filesystem=pafs.PyFileSystem(handler),
                file_options=file_options,
                partitioning=partitioning,
                file_visitor=count,
                **options,
            )
            refuse_more_than_ordinals(folder, row_groups=max(row_groups))
            files = handler.commit()
    except BaseException:
        handler.discard()
        raise
    size = written_bytes(files)
    plaintext = policy.plaintext_columns
    return WriteResult(str(folder), engine, tuple(reasons), len(files), sum(rows), size, plaintext)


_ROW_GROUP_BYTES = 64 * 1024 * 1024
_VALUE_BYTES = 16
"""Assumed length of a value."""


def _row_limits(options: Mapping[str, Any], column_count: int) -> dict[str, int]:
    """Return the limits of rows, given or by default: pyarrow takes some negative numbers for large ones."""
    least = {"max_rows_per_file": 0, "max_rows_per_group": 1, "min_rows_per_group": 0}
    limits = {name: whole_number(name, options[name], least=least[name]) for name in least.keys() & options.keys()}
    file_rows = limits.get("max_rows_per_file") or None
    if file_rows is not None:
        limits.setdefault("max_rows_per_group", min(file_rows, MAX_ROW_GROUP_ROWS))
    group_rows = limits.get("max_rows_per_group", MAX_ROW_GROUP_ROWS)
    if file_rows is not None and group_rows > file_rows:
        raise ValueError(f"max_rows_per_group is {group_rows}, more than max_rows_per_file, {file_rows}.")
    if limits.get("min_rows_per_group", 0) > group_rows:
        raise ValueError(
            f"min_rows_per_group is {limits['min_rows_per_group']}, more than max_rows_per_group, {group_rows}."
        )
    # By default, pyarrow makes a row group of each batch.
    rows = max(_ROW_GROUP_BYTES // (_VALUE_BYTES * max(column_count, 1)), 1024)
    limits.setdefault("min_rows_per_group", min(group_rows, MAX_ROW_GROUP_ROWS, rows))
    return limits


def _partitioning(
    partitioning: Any, flavor: str | None, schema: pa.Schema
) -> tuple[ds.Partitioning | None, frozenset[str]]:
    """Return the partitioning, hive-style where only names are given, and the names of its fields."""
    import pyarrow.dataset as ds

    if partitioning is None:
        return None, frozenset()
    if not isinstance(partitioning, (list, tuple, str, bytes)) and not hasattr(partitioning, "schema"):
        raise TypeError(
            f"{partitioning!r} is not a partitioning for writing: give a list of names of columns, or a pyarrow "
            "partitioning with a schema."
        )
    if isinstance(partitioning, (list, tuple, str, bytes)):
        partitioning = list_of_names("partitioning", partitioning)
        fields = pa.schema([schema.field(name) for name in partitioning])
        partitioning = ds.partitioning(fields, flavor=flavor or "hive")
    return partitioning, frozenset(partitioning.schema.names)
