"""Removes rows from the files of a data set: each file with matching rows is replaced by a file without them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.config.document import did_you_mean, one_of
from parquet_keytools.conformance.data_set import is_table_metadata
from parquet_keytools.conformance.file_verifier import FileEnd
from parquet_keytools.encryption.file_encryption import StreamedFile
from parquet_keytools.encryption.protection import FooterColumn
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    OutputError,
)
from parquet_keytools.files.key_service import KeyService, NewFileKeys
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    VerifiedTail,
    as_verified,
    columns_named,
    naming_place,
)
from parquet_keytools.files.table_check import names_in_folders, partition_names, seen_key
from parquet_keytools.format.file_layout import (
    MAGIC,
    ByteSink,
    ByteSource,
    HeldSource,
    leaf_columns,
    read_footer_bytes,
    with_trailer,
)
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.keys.key_wrapping import FileKeyRetriever
from parquet_keytools.rotation.data_set_run import OnFile, RunOptions, change_each_file
from parquet_keytools.rotation.file_keys import read_tail, unless_changed
from parquet_keytools.rotation.rekeying import check_new_file, keys_of_new_version, replaced_whole
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.storage.locations import BufferSource, FileLocation, open_source
from parquet_keytools.storage.walk import file_or_folder
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, PlainInput

_TABLE_FOLDERS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
_KEPT_ENCODINGS = {"DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "BYTE_STREAM_SPLIT"}
_CODECS = {"UNCOMPRESSED": "none", "LZ4_RAW": "lz4"}
NOT_COVERED = (
    "backups, snapshots and older versions of objects, which keep the old files under the same master keys",
    "blocks of the disk that the old files had, until the file system reuses them",
    "files that this run did not read: other folders, copies, exports, summaries such as _metadata",
    "key-value metadata of the files",
)
"""What the removal of rows does not reach."""

_LATER = "Read it with the engine that wrote it, and write it without these rows."


@dataclass(frozen=True, slots=True, repr=False)
class FileRewrite(FileRotation):
    """The result for a file: its rows before, the matching rows, and its end before and after, as far as known."""

    rows: int | None = None
    rows_removed: int = 0
    before: FileEnd | None = None
    after: FileEnd | None = None


def rewrite_rows(
    keys: KeyService,
    location: FileLocation,
    *,
    where: str,
    table_name: str | None = None,
    dry_run: bool = False,
    keep_results: bool = True,
    on_file: OnFile | None = None,
    on_search: Callable[[Iterable[FileRewrite]], None] | None = None,
) -> RotationReport:
    """Remove the rows that match a filter; see `Keytools.erase_rows`."""
    table_name, _ = keys.configuration.select_table(table_name)
    file_or_folder(location)
    _refuse_table_around(location)
    rewriting = Rewriting(keys, table_name, parse_filter(where))

    def on_found(file: FileRotation) -> None:
        if isinstance(file.error, ConfigurationError | ColumnAccessDeniedError):
            raise file.error
        if isinstance(file, FileRewrite):
            rewriting.found[file.path] = file
        if dry_run and on_file is not None:
            on_file(file)

    # Worker processes get a pickled copy of `rewriting`.
    found = change_each_file(location, rewriting.search, RunOptions(keep_results, on_found))
    for left in found.skipped:
        if is_table_metadata(left.location):
            raise _is_table(left.path, "Iceberg")
        if left.location.name in _TABLE_FOLDERS:
            raise _is_table(left.path, _TABLE_FOLDERS[left.location.name])
    if dry_run:
        found.dry_run = True
        return found
    if found.stopped_by is not None:
        raise found.stopped_by
    if on_search is not None:
        on_search(rewriting.found.values())
    return change_each_file(location, rewriting.rewrite, RunOptions(keep_results, on_file))


def _refuse_table_around(location: FileLocation) -> None:
    """Refuse the folder of a table, or one in it, whose metadata would not fit the new files."""
    for folder in [location.path, *map(str, PurePosixPath(location.path).parents)]:
        selector = pafs.FileSelector(f"{folder.rstrip('/')}/metadata", allow_not_found=True)
        with contextlib.suppress(OSError, pa.ArrowException):
            for info in location.filesystem.get_file_info(selector):
                if is_table_metadata(file := FileLocation(location.filesystem, info.path)):
                    raise _is_table(str(file), "Iceberg")


def _is_table(path: str, kind: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} belongs to a table of {kind}: its metadata would not fit rewritten files.",
        hint="Delete the rows with an engine that writes the table, then expire its older snapshots.",
    )


class Rewriting:
    """Removes the matching rows of files; `found` has what a search found in each file."""

    def __init__(self, keys: KeyService, table_name: str, conditions: Sequence[Condition]) -> None:
        self._keys = keys
        self._table_name = table_name
        self._conditions = conditions
        self.found: dict[str, FileRewrite] = {}

    def search(self, location: FileLocation) -> FileRewrite:
        """Count the matching rows of a file."""
        tail, _ = read_tail(location)
        with _explaining(location), unless_changed(location, tail):
            opened = self._open(location, self._in_filter)
            with open_source(location) as source:
                found = self._search(opened, as_verified(opened, source))
            if found.rows_removed:
                self._open(location)
        return found

    def rewrite(self, location: FileLocation) -> FileRotation:
        """Replace a file with matching rows."""
        tail, _ = read_tail(location)
        end = FileEnd.of(tail.offset, tail.data)
        found = self.found.get(str(location))
        if found is None or found.before != end:
            found = self.search(location)
        if not found.rows_removed:
            return dataclasses.replace(found, outcome=RotationOutcome.NO_MATCHING_ROWS)
        with _explaining(location), unless_changed(location, tail):
            opened = self._open(location)
            values = self._values_of_keys(opened)
            policy, new = keys_of_new_version(self._keys, opened, self._table_name, values)
        rows: list[int] = []
        after: list[FileEnd] = []

        def write(sink: ByteSink) -> None:
            with _explaining(location), open_source(location) as source:
                rows.extend(self.write_rows(opened, as_verified(opened, source), new, sink))

        def check(written: ByteSource) -> None:
            after.append(self.check_output(opened, written, new, rows, found))

        done = replaced_whole(
            location, tail, new, RotationOutcome.ROWS_REMOVED, policy, write, check, other_names_keep="the rows"
        )
        facts = {each.name: getattr(done, each.name) for each in dataclasses.fields(done)}
        return FileRewrite(**facts, rows=found.rows, rows_removed=found.rows_removed, before=end, after=after[0])

    # --- reading ---

    def _open(self, location: FileLocation, wanted: Any = tuple) -> OpenedFile:
        """Open a file whose wanted columns can be read."""
        # The file gets new keys, so sharing the old keys with another file does not matter.
        (opened,) = self._keys.open_files(
            [location], self._table_name, again=False, wanted=wanted, identities=FileIdentities(refuses=False)
        )
        opened.refuse_unencrypted()
        names = [".".join(column.path) for column in wanted(opened.footer.columns)]
        opened.refuse_denied(names, hint="Erasing rows needs the keys of all columns.")
        return dataclasses.replace(opened, digests=None)

    def _in_filter(self, columns: Sequence[FooterColumn]) -> list[FooterColumn]:
        """Return the columns of the filter with all their fields: a view shows whole columns."""
        used = {c.path[0] for condition in self._conditions for c in columns_named(columns, condition.column)}
        return [column for column in columns if column.path[0] in used]

    def _filter(self, schema: pa.Schema, opened: OpenedFile) -> FileFilter:
        path = opened.location.path
        folder_names = partition_names(names_in_folders(path))
        try:
            return FileFilter(self._conditions, schema, folder_names, [c.path[0] for c in opened.footer.columns])
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error.args[0]}", hint=error.hint) from None

    def _search(self, opened: OpenedFile, source: ByteSource) -> FileRewrite:
        view = _View(opened, source)
        file = view.file
        # All values are read: statistics are no proof that a row is not there.
        row_filter = self._filter(file.schema_arrow, opened)
        removed = 0
        for ordinal in range(file.num_row_groups):
            table = view.read(ordinal, row_filter.columns)
            removed += _count(row_filter.matches(table))
        outcome = RotationOutcome.WOULD_REMOVE_ROWS if removed else RotationOutcome.NO_MATCHING_ROWS
        before = FileEnd.of(opened.tail.offset, opened.tail.data)
        rows = file.metadata.num_rows
        return FileRewrite(str(opened.location), outcome, rows=rows, rows_removed=removed, before=before)

    def _values_of_keys(self, opened: OpenedFile) -> dict[str, str]:
        """Return the values of placeholders in names of keys that the file has from its writer."""
        check = self._keys.table_check(self._table_name)
        assert check is not None
        places = [(opened.footer.key_metadata, None), *((c.key_metadata, c.path) for c in opened.footer.columns)]
        return check.values_of(
            str(opened.location),
            [seen_key(opened.retriever, metadata, path) for metadata, path in places if metadata is not None],
        )

    # --- writing ---

    def write_rows(self, opened: OpenedFile, source: ByteSource, new: NewFileKeys, sink: ByteSink) -> list[int]:
        """Write the rows that stay; return the number of rows of each new row group."""
        view = _View(opened, source)
        row_filter = self._filter(view.file.schema_arrow, opened)
        writer = PlainWriter(opened, view)
        encrypted = StreamedFile(sink, new.encryption, writer.part(None, {}))
        rows: list[int] = []
        with naming_place(opened.location, opened.footer.columns):
            for ordinal in range(view.file.num_row_groups):
                table = view.read(ordinal)
                kept = table.filter(pc.invert(row_filter.matches(table)))
                if kept.num_rows:
                    encrypted.append(writer.part(kept, _options(view.file, ordinal)))
                    rows.append(kept.num_rows)
        encrypted.finish(writer.part(None, {}))
        return rows

    def check_output(
        self, opened: OpenedFile, written: ByteSource, new: NewFileKeys, rows: list[int], found: FileRewrite
    ) -> FileEnd:
        """Read the new file as its readers will; refuse it if a matching row is in it, or another row is not."""
        kms_keys = self._keys.kms_keys()
        footer, deks = check_new_file(written, new, kms_keys)
        retriever = FileKeyRetriever(kms_keys, self._keys.data_keys, opened.location)
        tail = VerifiedTail.of(footer.envelope)
        view = _View(OpenedFile(opened.location, footer, tail, retriever, kms_keys, deks, {}), written)
        row_filter = self._filter(view.file.schema_arrow, opened)
        read: list[int] = []
        for ordinal in range(view.file.num_row_groups):
            table = view.read(ordinal)
            read.append(table.num_rows)
            if _count(row_filter.matches(table)):
                raise OutputError(f"{opened.location}: the new file still has matching rows.")
        if read != rows or sum(read) != (found.rows or 0) - found.rows_removed:
            raise OutputError(f"{opened.location}: the new file has other rows than the old file.")
        return FileEnd.of(tail.offset, tail.data)


@contextlib.contextmanager
def _explaining(location: FileLocation) -> Iterator[None]:
    try:
        yield
    except pa.ArrowNotImplementedError as error:
        raise OutputError(f"{location} has a type that pyarrow cannot filter: {error}", hint=_LATER) from None


class _View:
    """The view of a file, read by pyarrow; columns that are not wanted are hidden."""

    def __init__(self, opened: OpenedFile, source: ByteSource) -> None:
        plain = PlainFile(opened, source, "hide", PageCache())
        # Values of extension types cannot be compared.
        name = "arrow_extensions_enabled"
        options = {name: False} if name in _options_of(pq.ParquetFile) else {}
        self.file = pq.ParquetFile(PlainInput(plain), **options)
        self._in_microseconds = pq.ParquetFile(PlainInput(plain), coerce_int96_timestamp_unit="us", **options)
        self._path = str(opened.location)
        columns = map(self.file.schema.column, range(len(self.file.schema)))
        self.int96 = [column.path for column in columns if column.physical_type == "INT96"]

    def read(self, ordinal: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return some or all columns of a row group; refuse timestamps of 96 bits that overflow 64 bits."""
        int96 = [path for path in self.int96 if columns is None or any(_is_in(path, name) for name in columns)]
        if int96:
            table = self.file.read_row_group(ordinal, columns=int96)
            exact = self._in_microseconds.read_row_group(ordinal, columns=int96)
            if not table.cast(exact.schema, safe=False).equals(exact):
                raise OutputError(
                    f"{self._path} has 96-bit timestamps before 1678 or after 2261, which pyarrow cannot keep.",
                    hint=_LATER,
                )
        return self.file.read_row_group(ordinal, columns=columns)


def _is_in(path: str, name: str) -> bool:
    return f"{path}.".startswith(f"{name}.")


def _options_of(function: Any) -> Collection[str]:
    """Return the names of the arguments of a class of pyarrow, which differ between versions."""
    return inspect.signature(function).parameters.keys()


def _count(matches: Any) -> int:
    return pc.sum(matches).as_py() or 0


class PlainWriter:
    """Writes row groups as plain files in memory, with the schema and metadata of another file."""

    def __init__(self, opened: OpenedFile, view: _View) -> None:
        """Find the options with which pyarrow writes the same physical schema."""
        self._path = str(opened.location)
        self._old = opened.footer.metadata
        self._schema = view.file.schema_arrow.remove_metadata()
        for position, field in enumerate(self._schema if view.int96 else ()):
            if pa.types.is_timestamp(field.type) and field.name not in view.int96:
                # As the file has it: pyarrow would write all timestamps with 96 bits.
                self._schema = self._schema.set(position, field.with_type(pa.int64()))
        columns = map(view.file.schema.column, range(len(view.file.schema)))
        kinds = {(column.logical_type.type, column.physical_type) for column in columns}
        self._options = {
            "store_schema": False,
            "use_deprecated_int96_timestamps": bool(view.int96),
            "store_decimal_as_integer": bool(kinds & {("DECIMAL", "INT32"), ("DECIMAL", "INT64")}),
        }
        if not self._is_same():
            self._options["use_compliant_nested_type"] = False
            if not self._is_same():
                raise OutputError(f"{self._path}: pyarrow cannot write the schema of this file.", hint=_LATER)

    def part(self, table: pa.Table | None, options: Mapping[str, Any]) -> ByteSource:
        """Return a plain file with one row group, or without any."""
        source, metadata = self._written(table, options)
        # Names and logical types that pyarrow does not know stay as they are.
        metadata.version, metadata.schema = self._old.version, self._old.schema
        metadata.key_value_metadata = self._old.key_value_metadata
        end = with_trailer(metadata.serialise(), MAGIC)
        return HeldSource(source, read_footer_bytes(source).offset, end, is_end=True)

    def _written(self, table: pa.Table | None, options: Mapping[str, Any]) -> tuple[ByteSource, FileMetaData]:
        buffer, known = pa.BufferOutputStream(), _options_of(pq.ParquetWriter)
        options = {name: value for name, value in {**self._options, **options}.items() if name in known}
        with pq.ParquetWriter(buffer, self._schema, **options) as writer:
            if table is not None:
                writer.write_table(table.cast(self._schema), table.num_rows)
        source = BufferSource(self._path, buffer.getvalue())
        metadata, _ = FileMetaData.read(read_footer_bytes(source).data)
        return source, metadata

    def _is_same(self) -> bool:
        _, new = self._written(None, {})
        return _physical(new) == _physical(self._old)


def _physical(metadata: FileMetaData) -> list[object]:
    """Return what pages depend on: names, types, lengths and repetitions, but not the name of the root."""
    # Fields of a SchemaElement: type, its length, repetition, name, number of children.
    elements = [tuple(map(element.struct.entry_bytes, range(1, 6))) for element in metadata.schema]
    return [len(leaf_columns(metadata.schema)), *elements[1:]]


def _options(file: pq.ParquetFile, ordinal: int) -> dict[str, Any]:
    """Return options with which pyarrow writes a row group like one of a file."""
    row_group = file.metadata.row_group(ordinal)
    chunks = {chunk.path_in_schema: chunk for chunk in map(row_group.column, range(row_group.num_columns))}
    options = {
        "compression": {path: _CODECS.get(chunk.compression, chunk.compression) for path, chunk in chunks.items()},
        "use_dictionary": [path for path, chunk in chunks.items() if chunk.has_dictionary_page],
        "write_statistics": [path for path, chunk in chunks.items() if chunk.is_stats_set],
        "column_encoding": {
            path: encoding
            for path, chunk in chunks.items()
            for encoding in chunk.encodings
            if encoding in _KEPT_ENCODINGS and not chunk.has_dictionary_page
        },
        "write_page_index": any(chunk.has_offset_index for chunk in chunks.values()),
        "sorting_columns": row_group.sorting_columns or None,
        # Before pyarrow 24, this is neither shown nor written.
        "bloom_filter_options": {
            path: {"ndv": max(chunk.num_values, 1)}
            for path, chunk in chunks.items()
            if getattr(chunk, "bloom_filter_offset", None) is not None
        },
    }
    return {name: value for name, value in options.items() if value not in (None, {})}


# --- the filter: conditions joined by AND, as `customer = 4711 AND country IN ('DE', 'FR')` ---

_LITERAL = r"(?:'(?:[^']|'')*'|-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?(?!\w)|true\b|false\b)"
_LITERALS = re.compile(_LITERAL, re.IGNORECASE)
_CONDITION = re.compile(
    rf"""\s*(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<name>[^\W\d][\w.]*))\s*
    (?: (?P<operator><=|>=|!=|<>|[=<>])\s*(?P<literal>{_LITERAL})
      | \bIN\s*\((?P<literals>\s*{_LITERAL}\s*(?:,\s*{_LITERAL}\s*)*)\)
      | \bIS\s+(?P<negation>NOT\s+)?NULL\b )
    \s*(?:(?P<more>\bAND\b)|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_GRAMMAR = (
    "A filter is COLUMN OPERATOR LITERAL, joined by AND. Operators: =, !=, <, <=, >, >=, IN (...), IS NULL, "
    "IS NOT NULL. Write texts, dates and timestamps in single quotes, and names of columns that are not words in "
    "double quotes."
)


def _is_one_of(values: Any, literals: pa.Array) -> Any:
    if pa.types.is_floating(literals.type):
        # As for `=`, -0.0 is 0.0: pyarrow's function compares bits.
        values, literals = (pc.if_else(pc.equal(each, 0.0), 0.0, each) for each in (values, literals))
    return pc.if_else(pc.is_valid(values), pc.is_in(values, literals), None)


_COMPARE: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "IN": _is_one_of,
    "IS NULL": lambda values, _: pc.is_null(values),
    "IS NOT NULL": lambda values, _: pc.is_valid(values),
}
_TEMPORAL = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_time)
_QUOTED = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_TEMPORAL)
_BARE = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
_UUID = pa.binary(16)


@dataclass(frozen=True)
class Condition:
    """A comparison of a column, or a field of a struct, with literals, which are written here without quotes."""

    column: str
    operator: str
    literals: tuple[str, ...] = ()
    is_quoted: bool = False

    def typed(self, kind: pa.DataType) -> pa.Array:
        """Return the literals in the type of the column."""
        if not self.literals:
            return None
        if not any(is_kind(kind) for is_kind in (*_QUOTED, *_BARE)) and kind != _UUID:
            raise ConfigurationError(f"column {self.column!r} is {kind}, which a filter cannot compare.")
        wants_quotes = kind == _UUID or any(is_kind(kind) for is_kind in _QUOTED)
        if self.is_quoted is not wants_quotes:
            quotes = "with" if wants_quotes else "without"
            raise ConfigurationError(
                f"column {self.column!r} is {kind}: its literals are written {quotes} single quotes."
            )
        try:
            if kind == _UUID:
                return pa.array([uuid.UUID(text).bytes for text in self.literals], kind)
            return pa.array(self.literals, pa.string()).cast(kind)
        except (pa.ArrowException, ValueError) as error:
            raise ConfigurationError(
                f"column {self.column!r} is {kind}, and a literal of the filter is not: {error}"
            ) from None


def parse_filter(text: str) -> tuple[Condition, ...]:
    """Parse a filter."""
    conditions: list[Condition] = []
    position, more = 0, True
    while more:
        found = _CONDITION.match(text, position)
        if found is None:
            where = f"at {text[position:].strip()[:40]!r}" if text[position:].strip() else "at its end"
            raise ConfigurationError(f"the filter is not valid {where}.", hint=_GRAMMAR)
        name = found["name"] or found["quoted"].replace('""', '"')
        operator = found["operator"] or ("IN" if found["literals"] else "IS NULL")
        if found["negation"]:
            operator = "IS NOT NULL"
        literals = _LITERALS.findall(found["literal"] or found["literals"] or "")
        quoted = {literal[0] == "'" for literal in literals}
        if len(quoted) > 1:
            raise ConfigurationError(f"the literals for column {name!r} are of several types.")
        plain = tuple(text[1:-1].replace("''", "'") if text[0] == "'" else text.lower() for text in literals)
        conditions.append(Condition(name, operator, plain, quoted == {True}))
        position, more = found.end(), bool(found["more"])
    return tuple(conditions)


class FileFilter:
    """A filter for files of one schema."""

    def __init__(
        self,
        conditions: Sequence[Condition],
        schema: pa.Schema,
        folder_names: Collection[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        """Type the literals; `names` are names of other columns of the file, for errors."""
        self._checks: list[tuple[Condition, tuple[str, ...], pa.Array]] = []
        for condition in conditions:
            name = condition.column
            if name in folder_names:
                # Readers may show the value of the folder, whatever the file has.
                raise ConfigurationError(
                    f"column {name!r} is in the names of folders, and a filter compares values of files alone.",
                    hint="Leave this condition out, and name the folder in place of the data set. To remove all "
                    "rows of a folder, delete the folder.",
                )
            column = _column_in(schema, name)
            if column is None:
                known = list(dict.fromkeys([*schema.names, *names]))
                raise ConfigurationError(
                    f"there is no column {name!r}.", hint=did_you_mean(name, known) or one_of(known)
                )
            path, kind = column
            self._checks.append((condition, path, condition.typed(kind)))
        self.columns = [condition.column for condition in conditions]

    def matches(self, table: pa.Table) -> pa.ChunkedArray | pa.Array:
        """Return for each row whether it matches, never null; the table has the columns of the filter."""

        def results() -> Iterator[Any]:
            for condition, path, literals in self._checks:
                one = literals[0] if literals is not None and condition.operator != "IN" else literals
                yield _COMPARE[condition.operator](_values(table, path), one)

        return pc.fill_null(reduce(pc.and_kleene, results()), False)


def _column_in(schema: pa.Schema, name: str) -> tuple[tuple[str, ...], pa.DataType] | None:
    """Return path and type of a column, or of a field of structs; None if there is none."""
    path = (name,) if name in schema.names else tuple(name.split("."))
    kind: Any = schema
    for part in path:
        if not isinstance(kind, pa.Schema) and not pa.types.is_struct(kind):
            return None
        position = kind.get_field_index(part)
        if position < 0:
            return None
        kind = kind.field(position).type
    return path, kind.value_type if pa.types.is_dictionary(kind) else kind


def _values(table: pa.Table, path: tuple[str, ...]) -> Any:
    values = table.column(path[0])
    if len(path) > 1:
        values = pc.struct_field(values, list(path[1:]))
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
