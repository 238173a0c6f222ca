"""One encrypted file written table by table, for every policy."""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import audit
from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.aad import (
    MAX_COUNT,
    WRITE_LARGER_PAGES,
    WRITE_LARGER_ROW_GROUPS,
    refuse_more_than_ordinals,
)
from parquet_keytools.encryption.file_encryptor import StreamedFile, read_plaintext_footer
from parquet_keytools.errors import FormatLimitError, OutputError
from parquet_keytools.files.conversion import new_file_encryption
from parquet_keytools.files.field_labels import LabelsOfData, labels_of_schema
from parquet_keytools.files.key_service import TablePolicy, no_one_value
from parquet_keytools.files.replacement import NewKeyMaterial, put_in_place
from parquet_keytools.runtime.endings import ExceptionWatch
from parquet_keytools.runtime.fork_safety import OwnerProcess, leave_to_parent
from parquet_keytools.storage.local_files import failing_as_output, refuse_in_child
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import PendingOutput, pending_output, written_bytes
from parquet_keytools.storage.sources import BufferSource
from parquet_keytools.tables.properties import ArrowEncryptor, arrow_leaf_paths, arrow_limits

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
    """Return options for pyarrow's Parquet writer, without options that are set here and given as None.

    Raises:
        TypeError: An option is set here, or is one name in place of a list.
    """
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
        properties = encryptor.properties_of(policy)
        self._new = NewKeyMaterial(pending.target)
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
        refuse_more_than_ordinals(self._new.parquet_file, row_groups=self._row_groups)
        self._writer.write_table(table, row_group_size)

    def add_key_value_metadata(self, entries: Mapping[Any, Any]) -> None:
        self._writer.add_key_value_metadata(entries)

    def finish(self) -> NewKeyMaterial:
        self._writer.close()
        self._stream.close()
        return self._new

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
        self._first = self._template()
        self._opened = contextlib.ExitStack()
        self._file: StreamedFile | None = None
        if not policy.table.value_columns:
            self._begin(policy)

    def _begin(self, policy: TablePolicy) -> StreamedFile:
        """Begin the file, with the keys of the values that its columns have."""
        encryption, self._new = new_file_encryption(self._keys, policy, self._pending.target)
        self._policy = policy
        try:
            sink = self._opened.enter_context(self._pending.open_sink())
            self._file = StreamedFile(sink, encryption, self._first)
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

    def _template(self) -> BufferSource:
        def write_nothing(writer: pq.ParquetWriter) -> None:
            self.schema = writer.schema
            if self._entries:
                writer.add_key_value_metadata(self._entries)

        return self._in_memory(self._whole_schema, self._options, write_nothing)

    def _in_memory(
        self, schema: pa.Schema, options: Mapping[str, Any], write: Callable[[pq.ParquetWriter], None]
    ) -> BufferSource:
        buffer = pa.BufferOutputStream()
        with pq.ParquetWriter(buffer, schema, **options) as writer:
            write(writer)
        return BufferSource(self._path, buffer.getvalue())

    def write(self, table: pa.Table, row_group_size: int | None) -> None:
        size = min(table.num_rows, MAX_ROW_GROUP_ROWS) if row_group_size is None else row_group_size
        for start in range(0, max(table.num_rows, 1), max(size, 1)):
            part = table.slice(start, size)
            if self._policy.table.value_columns and not part.num_rows:
                continue
            row_group = self._in_memory(
                self._plain_schema,
                self._plain_options,
                lambda writer, part=part: writer.write_table(part, max(part.num_rows, 1)),  # type: ignore[misc]
            )
            self._for(row_group).append(row_group)

    def add_key_value_metadata(self, entries: Mapping[Any, Any]) -> None:
        self._entries.update(entries)

    def finish(self) -> NewKeyMaterial:
        template = self._template()
        file = self._file or self._for(template)
        with self._opened:
            file.finish(template)
        return self._new

    def abandon(self) -> None:
        with contextlib.suppress(OSError, OutputError):
            self._opened.close()
