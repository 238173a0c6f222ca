"""Digests that are shown in place of values: the bytes that they are made of, the schema, and the column chunks.

Values are equal here where SQL says so, whatever the width of integers, the scale of decimals or the unit of
times. The length of a chunk of digests depends on the footer alone, because the length of a view must be known
before anything is decrypted: nulls leave room, which is filled with definition levels, as runs of no values.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import inspect
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import MAGIC, LeafColumn, Region, with_trailer
from parquet_keytools.format.pages import MAX_PAGE_LENGTH, padded_header, plain_page_header, read_page_header
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
    RowGroup,
    SchemaElement,
)
from parquet_keytools.format.thrift import Struct, WireType
from parquet_keytools.secret_bytes import SecretBytes

_TYPE_LENGTH, REPETITION_FIELD_ID, _CONVERTED_TYPE, _SCALE, _PRECISION, _LOGICAL_TYPE = 2, 3, 6, 7, 8, 10
"""Field ids of SchemaElement."""

_BOOLEAN, _INT32, _INT64, _INT96, _FLOAT, _DOUBLE, _BYTE_ARRAY, _FIXED = range(8)
"""Physical types."""

_STRING_TYPE, _ENUM_TYPE, _DECIMAL_TYPE, _DATE_TYPE, _TIME_TYPE, _TIMESTAMP_TYPE = 1, 4, 5, 6, 7, 8
_INTEGER_TYPE, _JSON_TYPE, _FLOAT16_TYPE, _VARIANT_TYPE = 10, 12, 15, 16
"""Field ids of the union LogicalType."""

_OF_CONVERTED = {
    0: (_STRING_TYPE, 0),
    4: (_ENUM_TYPE, 0),
    5: (_DECIMAL_TYPE, 0),
    6: (_DATE_TYPE, 0),
    7: (_TIME_TYPE, 1),
    8: (_TIME_TYPE, 2),
    9: (_TIMESTAMP_TYPE, 1),
    10: (_TIMESTAMP_TYPE, 2),
    **dict.fromkeys((11, 12, 13, 14), (_INTEGER_TYPE, 0)),
    19: (_JSON_TYPE, 0),
}
"""ConvertedType -> logical type, and unit: 1 for milliseconds, 2 for microseconds. Others mean nothing here."""

_NANOSECONDS = {1: 1_000_000, 2: 1_000, 3: 1}
"""Field id in the union TimeUnit -> nanoseconds."""

_JULIAN_DAY_OF_1970 = 2_440_588

_MOST_DIGITS = 4_300
"""Most digits of a decimal, as of the text of a Python integer."""

Canonical = Callable[[Any], bytes]
"""Returns the canonical bytes of a stored value: an int, a float, a bool, or bytes."""


@dataclass(frozen=True)
class DigestKind:
    """A kind of values, and what makes their bytes; kinds with different names have different digests."""

    name: str
    canonical: Canonical

    @property
    def is_binary(self) -> bool:
        """Whether digests are shown as bytes, not as hexadecimal digits."""
        return self.name == "binary"


def leaf_chains(schema: Sequence[SchemaElement]) -> list[list[SchemaElement]]:
    """Return the elements that lead to each leaf, from the top-level column to the leaf."""
    elements = iter(schema)
    return list(_chains(elements, next(elements).num_children or 0, []))


def _chains(
    elements: Iterator[SchemaElement], children: int, above: list[SchemaElement]
) -> Iterator[list[SchemaElement]]:
    for element in islice(elements, children):
        chain = [*above, element]
        if element.num_children:
            yield from _chains(elements, element.num_children, chain)
        elif element.type is not None:
            yield chain


def repetition(element: SchemaElement) -> int:
    """Return 0 for required, 1 for optional, 2 for repeated."""
    return _number(element.struct, REPETITION_FIELD_ID) or 0


def highest_levels(chain: Sequence[SchemaElement]) -> tuple[int, int]:
    """Return the highest definition and repetition level of a leaf."""
    kinds = [repetition(element) for element in chain]
    return sum(kind != 0 for kind in kinds), kinds.count(2)


def digest_kind(leaf: SchemaElement) -> DigestKind:
    """Return the kind of a leaf column's values; an invalid scale of a decimal is refused."""
    physical, of = leaf.type or 0, leaf.struct
    logical, facts, unit = _logical_type(of)
    if physical == _BOOLEAN:
        return DigestKind("boolean", lambda value: b"true" if value else b"false")
    if physical in (_FLOAT, _DOUBLE):
        return DigestKind("float", _float)
    if physical == _INT96:
        return DigestKind("timestamp", _int96)
    if logical == _DECIMAL_TYPE and physical in (_INT32, _INT64, _BYTE_ARRAY, _FIXED):
        scale = _number(facts, 1) if facts is not None else _number(of, _SCALE)
        return DigestKind("number", _decimal(scale or 0))
    if physical in (_INT32, _INT64):
        if logical == _DATE_TYPE:
            return DigestKind("date", _decimal_text)
        if logical in (_TIME_TYPE, _TIMESTAMP_TYPE):
            nanoseconds = _NANOSECONDS[unit]
            name = "time" if logical == _TIME_TYPE else "timestamp"
            return DigestKind(name, lambda value: _decimal_text(value * nanoseconds))
        is_signed = None if facts is None else facts.entry(2)
        if logical == _INTEGER_TYPE and not (is_signed is not None and is_signed[0] is WireType.TRUE):
            mask = (1 << (32 if physical == _INT32 else 64)) - 1
            return DigestKind("number", lambda value: _decimal_text(value & mask))
        return DigestKind("number", _decimal_text)
    if logical == _FLOAT16_TYPE and physical == _FIXED and _number(of, _TYPE_LENGTH) == 2:
        return DigestKind("float", lambda value: _float(struct.unpack("<e", value)[0]))
    if logical in (_STRING_TYPE, _ENUM_TYPE, _JSON_TYPE) and physical == _BYTE_ARRAY:
        return DigestKind("string", bytes)
    return DigestKind("binary", bytes)


def digest_schema(schema: Sequence[SchemaElement], kinds: Mapping[int, DigestKind]) -> list[SchemaElement]:
    """Return a file's schema in which the leaves with kinds hold digests."""
    changed: dict[int, SchemaElement] = {}
    for ordinal, chain in enumerate(leaf_chains(schema)):
        if ordinal not in kinds:
            continue
        changed[id(chain[-1])] = _digest_leaf(chain[-1], kinds[ordinal])
        for group in chain[:-1]:
            logical, _, _ = _logical_type(group.struct)
            if logical == _VARIANT_TYPE:  # Digests cannot be parts of a variant.
                changed[id(group)] = without_annotations(group)
    return [changed.get(id(element), element) for element in schema]


def without_annotations(element: SchemaElement) -> SchemaElement:
    """Return an element with its physical type alone."""
    new = element.shallow_copy()
    for field_id in (_CONVERTED_TYPE, _SCALE, _PRECISION, _LOGICAL_TYPE):
        new.struct.set_entry(field_id, None)
    return new


def _digest_leaf(leaf: SchemaElement, kind: DigestKind) -> SchemaElement:
    new = without_annotations(leaf)
    new.struct.set_entry(_TYPE_LENGTH, None)
    new.type = _BYTE_ARRAY
    if not kind.is_binary:
        new.struct.set_entry(_CONVERTED_TYPE, (WireType.I32, 0))
        string = Struct({_STRING_TYPE: (WireType.STRUCT, Struct())})
        new.struct.set_entry(_LOGICAL_TYPE, (WireType.STRUCT, string))
    return new


def _logical_type(of: Struct) -> tuple[int | None, Struct | None, int]:
    """Return the logical type of an element, its facts where it has any, and the unit of a time."""
    entry = of.entry(_LOGICAL_TYPE)
    if entry is not None and entry[0] is WireType.STRUCT:
        for logical, (wire_type, facts) in entry[1].fields.items():
            if wire_type is not WireType.STRUCT:
                continue
            if logical not in (_TIME_TYPE, _TIMESTAMP_TYPE):
                return logical, facts, 0
            of_time = facts.entry(2)
            has_unit = of_time is not None and of_time[0] is WireType.STRUCT
            unit = next(iter(of_time[1].fields), 0) if has_unit else 0
            # Of an unknown unit, the numbers as they are.
            return (logical, facts, unit) if unit in _NANOSECONDS else (None, facts, 0)
    converted = _number(of, _CONVERTED_TYPE)
    logical, unit = _OF_CONVERTED.get(-1 if converted is None else converted, (None, 0))
    return logical, None, unit


def _number(of: Struct, field_id: int) -> int | None:
    entry = of.entry(field_id)
    return entry[1] if entry is not None and entry[0] is WireType.I32 else None


def _decimal_text(value: int) -> bytes:
    return b"%d" % value


def _int96(value: bytes) -> bytes:
    """Return nanoseconds since 1970 of the nanoseconds of a day and its Julian number."""
    nanoseconds, day = struct.unpack("<qi", value)
    return _decimal_text((day - _JULIAN_DAY_OF_1970) * 86_400 * 10**9 + nanoseconds)


def _decimal(scale: int) -> Canonical:
    if not 0 <= scale <= _MOST_DIGITS:
        raise ParquetFormatError(f"a decimal column that is shown as digests has a scale of {scale}.")

    def canonical(value: int | bytes) -> bytes:
        unscaled = int.from_bytes(value, "big", signed=True) if isinstance(value, bytes) else value
        digits = str(abs(unscaled)).rjust(scale + 1, "0")
        whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :].rstrip("0")
        sign = "-" if unscaled < 0 else ""
        return f"{sign}{whole}.{fraction}".rstrip(".").encode()

    return canonical


def _float(value: float) -> bytes:
    """Return the big-endian bytes of a double; both zeros are equal, and so are all NaN."""
    return struct.pack(">d", math.nan if math.isnan(value) else value + 0.0)


def digest_arrow_schema(value: str, leaves: Sequence[LeafColumn], kinds: Mapping[int, DigestKind]) -> str | None:
    """Return Arrow's schema, which readers compare, with the types of digests; None if it fits no columns."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except (pa.ArrowException, ValueError, OSError):
        return None
    fields = []
    for position, field in enumerate(schema):
        ordinals = [leaf.ordinal for leaf in leaves if leaf.top_level_position == position]
        if not kinds.keys().isdisjoint(ordinals):
            rest = iter(ordinals)
            try:
                field = field.with_type(_with_digests(field.type, rest, kinds))
            except StopIteration:
                return None
            if next(rest, None) is not None:
                return None
        fields.append(field)
    return base64.b64encode(pa.schema(fields, schema.metadata).serialize()).decode()


def _with_digests(of: pa.DataType, ordinals: Iterator[int], kinds: Mapping[int, DigestKind]) -> pa.DataType:
    """Return a type with digests in its leaves, whose ordinals are taken one by one."""
    if isinstance(of, pa.BaseExtensionType):
        return _with_digests(of.storage_type, ordinals, kinds)
    if pa.types.is_struct(of):
        fields = [of.field(position) for position in range(of.num_fields)]
        return pa.struct([field.with_type(_with_digests(field.type, ordinals, kinds)) for field in fields])
    if pa.types.is_map(of):
        key = of.key_field.with_type(_with_digests(of.key_type, ordinals, kinds))
        return pa.map_(key, of.item_field.with_type(_with_digests(of.item_type, ordinals, kinds)))
    if pa.types.is_nested(of) and of.num_fields == 1:
        # Readers convert any kind of list.
        return pa.list_(of.value_field.with_type(_with_digests(of.value_type, ordinals, kinds)))
    kind = kinds.get(next(ordinals))
    if kind is None:
        return of
    return pa.binary() if kind.is_binary else pa.string()


# --- Column chunks --------------------------------------------------------------------------------------------

DIGEST_LENGTH = 16
"""Length of a digest in bytes; its text has twice as many digits."""

_PAGE_VALUES = 16 * 1024
"""About this many values make a page."""

_HEADER_LENGTH = 64
"""Length of a page header: the fields take at most 40 bytes, the rest is padding."""

_LEVELS_SLACK = 16
"""Room for the lengths of both kinds of levels, and for an incomplete last run."""

_ENCODINGS_FIELD_ID = 2


def digest(secret: SecretBytes, kind: DigestKind, value: object) -> bytes:
    """Return the digest of a value, as docs/views.md describes it."""
    message = kind.name.encode() + b"\0" + kind.canonical(value)
    return hmac.digest(secret.reveal(), message, "sha256")[:DIGEST_LENGTH]


@dataclass(frozen=True)
class StandIn:
    """A chunk of digests that will be made when it is read, from `offset` of the view on.

    `chain` leads to the column in the file's schema; `metadata` and `region` are of the chunk in the file.
    """

    chain: Sequence[SchemaElement]
    kind: DigestKind
    metadata: ColumnMetaData
    region: Region
    num_rows: int
    created_by: str | None
    offset: int

    @property
    def length(self) -> int:
        """Length in bytes."""
        values = self.metadata.num_values
        pages = -(-self.num_rows // self._page_rows) if self.num_rows else 1
        eights = (values + 7 * pages) // 8
        return pages * (_HEADER_LENGTH + _LEVELS_SLACK) + self._value_length * values + self._level_length * eights

    @property
    def end(self) -> int:
        """Where it ends in the view."""
        return self.offset + self.length

    @property
    def _page_rows(self) -> int:
        return max(1, _PAGE_VALUES * self.num_rows // max(self.metadata.num_values, 1))

    @property
    def _value_length(self) -> int:
        return 4 + (DIGEST_LENGTH if self.kind.is_binary else 2 * DIGEST_LENGTH)

    @property
    def _level_length(self) -> int:
        """Most bytes of the levels of eight values: bit-packed, with the header of the run."""
        return sum(1 + level.bit_length() for level in highest_levels(self.chain) if level)

    def make(self, pages: memoryview, secret: SecretBytes) -> bytes:
        """Make the digests from the plaintext pages of the chunk; the text of an error has no value."""
        rows = None
        if self.num_rows:
            # The text of the error may contain values.
            with contextlib.suppress(pa.ArrowException, OSError, ValueError, OverflowError):
                rows = self._digests(pages, secret)
            if rows is None:
                raise ParquetFormatError("the values of a column that is shown as digests cannot be decoded.")
            if rows.num_rows != self.num_rows:
                raise ParquetFormatError(f"a chunk has {rows.num_rows} rows, and its row group {self.num_rows}.")
        made: list[bytes] = []
        num_values = 0
        step = self._page_rows
        for start in range(0, max(self.num_rows, 1), step):
            # Without rows, the page has the lengths of empty levels.
            lengths = bytes(4 * sum(level > 0 for level in highest_levels(self.chain)))
            body, count = (lengths, 0) if rows is None else _arrow_page(rows.slice(start, step))
            num_values += count
            length = _LEVELS_SLACK + self._value_length * count + self._level_length * -(-count // 8)
            if start + step >= self.num_rows:
                length = self.length - sum(map(len, made)) - _HEADER_LENGTH
            made.append(self._page(body, count, length))
        if num_values != self.metadata.num_values:
            raise ParquetFormatError(
                f"a chunk has {num_values} values, and its metadata says {self.metadata.num_values}."
            )
        return b"".join(made)

    def _page(self, body: bytes, count: int, length: int) -> bytes:
        """Return a page of pyarrow's levels and values in `body`, padded to `length` bytes behind its header."""
        definition, repetition = highest_levels(self.chain)
        start = 4 + _length_at(body, 0) if repetition else 0
        if definition:
            levels_end = start + 4 + _length_at(body, start)
            room = length - len(body) + levels_end - start - 4
            if room < levels_end - start - 4:
                raise ParquetFormatError("the levels of a column that is shown as digests are too long.")
            levels = body[start + 4 : levels_end].ljust(room, b"\0")
            body = b"".join((body[:start], struct.pack("<I", room), levels, body[levels_end:]))
        header = plain_page_header(count, len(body))
        # A required column has no levels to pad, and as many values as rows.
        return padded_header(header.serialise(), _HEADER_LENGTH + length - len(body)) + body

    def _digests(self, pages: memoryview, secret: SecretBytes) -> pa.Table:
        """Return the column with digests in place of its values."""
        # As pyarrow reads it without annotations: a list for each repeated field.
        file = pq.ParquetFile(pa.BufferReader(self._file_of(pages)), pre_buffer=False)
        # All threads of Arrow may be waiting for this one.
        table = file.read(use_threads=False)
        chunks = table.column(0).chunks or [pa.array([], table.schema.field(0).type)]
        column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        leaf = column
        while pa.types.is_nested(leaf.type):
            leaf = leaf.field(0) if pa.types.is_struct(leaf.type) else leaf.values
        encoded = leaf.dictionary_encode()
        digests = _with_leaf(column, self._of_distinct(encoded.dictionary, secret).take(encoded.indices))
        return pa.table([digests], schema=pa.schema([table.schema.field(0).with_type(digests.type)]))

    def _of_distinct(self, values: pa.Array, secret: SecretBytes) -> pa.Array:
        found_type = pa.large_binary() if self.kind.is_binary else pa.large_string()
        parts = [pa.array([], found_type)]
        # Python objects take many times the memory of their values.
        for start in range(0, len(values), _PAGE_VALUES):
            digests = [digest(secret, self.kind, value) for value in values.slice(start, _PAGE_VALUES).to_pylist()]
            parts.append(
                pa.array(digests if self.kind.is_binary else [part.hex() for part in digests], found_type)
            )
        return pa.concat_arrays(parts)

    def _file_of(self, pages: memoryview) -> pa.Buffer:
        """Return a Parquet file with this chunk only."""
        moved = self.region.offset - len(MAGIC)
        metadata = ColumnMetaData()
        old = self.metadata
        metadata.path_in_schema, metadata.codec = old.path_in_schema, old.codec
        # pyarrow's timestamps are not exact for distant years.
        metadata.type = _FIXED if old.type == _INT96 else old.type
        encodings = old.struct.entry(_ENCODINGS_FIELD_ID)
        if encodings is not None:
            metadata.struct.set_entry(_ENCODINGS_FIELD_ID, encodings)
        metadata.num_values = old.num_values
        metadata.total_uncompressed_size = old.total_uncompressed_size
        metadata.total_compressed_size = old.total_compressed_size
        # Some writers leave 0 if there is only a dictionary.
        metadata.data_page_offset = max(old.data_page_offset - moved, len(MAGIC))
        if old.dictionary_page_offset:
            metadata.dictionary_page_offset = old.dictionary_page_offset - moved
        chunk = ColumnChunk()
        chunk.file_offset = 0
        chunk.meta_data = metadata
        row_group = RowGroup()
        row_group.columns = [chunk]
        row_group.total_byte_size = old.total_uncompressed_size
        row_group.num_rows = self.num_rows
        root = SchemaElement()
        root.name = "schema"
        root.num_children = 1
        footer = FileMetaData()
        footer.version = 2
        schema = [root]
        for element in self.chain:
            alone = without_annotations(element)
            if alone.num_children:
                alone.num_children = 1
            if alone.type == _INT96:
                alone.type = _FIXED
                alone.struct.set_entry(_TYPE_LENGTH, (WireType.I32, 12))
            schema.append(alone)
        footer.schema = schema
        footer.num_rows = self.num_rows
        footer.row_groups = [row_group]
        footer.created_by = self.created_by
        return pa.py_buffer(b"".join((MAGIC, pages, with_trailer(footer.serialise(), MAGIC))))


def _with_leaf(column: pa.Array, leaf: pa.Array) -> pa.Array:
    """Return a column with other values in its leaf."""
    if not pa.types.is_nested(column.type):
        return leaf
    if column.offset:
        raise ValueError("a slice")
    if pa.types.is_struct(column.type):
        inner = _with_leaf(column.field(0), leaf)
        fields = [column.type.field(0).with_type(inner.type)]
        own: list[pa.Buffer | None] = column.buffers()[:1]
        return pa.Array.from_buffers(pa.struct(fields), len(column), own, column.null_count, 0, [inner])
    inner = _with_leaf(column.values, leaf)
    kind = pa.list_(column.type.value_field.with_type(inner.type))
    own = column.buffers()[:2]
    return pa.Array.from_buffers(kind, len(column), own, column.null_count, 0, [inner])


_PYARROW_LIMITS_ROWS = "max_rows_per_page" in inspect.signature(pq.write_table).parameters
"""From version 23 on, pyarrow begins a new page after 20,000 rows by default."""


def _arrow_page(rows: pa.Table) -> tuple[bytes, int]:
    """Return a page of rows as pyarrow writes it, without its header, and its number of values."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        data_page_version="1.0",
        data_page_size=MAX_PAGE_LENGTH,
        row_group_size=rows.num_rows,
        store_schema=False,
        **({"max_rows_per_page": rows.num_rows} if _PYARROW_LIMITS_ROWS else {}),
    )
    written = memoryview(sink.getvalue()).cast("B")
    facts = read_page_header(written, len(MAGIC))
    start = len(MAGIC) + facts.length
    header, _ = PageHeader.read(written, len(MAGIC))
    assert header.data_page_header is not None
    return bytes(written[start : start + facts.page_length]), header.data_page_header.num_values


def _length_at(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", data, offset)[0])
