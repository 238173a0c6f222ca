"""Column chunks of digests that stand for those of a file: how long one is, and how it is made.

A stand-in is as long as its values could need, which the footer alone says: a view has to know its length before
anything is decrypted. It has V1 pages of digests in plain encoding. Where some values are null, the room that they
leave is in the definition levels: runs of no values, which are all zeros.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import MAGIC, Region, with_trailer
from parquet_keytools.format.pages import MAX_PAGE_LENGTH, padded_header, plain_page_header, read_page_header
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
    RowGroup,
    SchemaElement,
)
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.digest_kinds import INT96, DigestKind, highest_levels, without_annotations

DIGEST_LENGTH = 16
"""Length of a digest in bytes; as text it has twice as many digits."""

_PAGE_VALUES = 16 * 1024
"""About how many values a page has."""

_HEADER_LENGTH = 64
"""Of each page: the fields of the header take at most 40 bytes, the rest is padding."""

_LEVELS_SLACK = 16
"""Bytes of the lengths of both kinds of levels, and of a last run that is not full."""

_ENCODINGS_FIELD_ID = 2


def digest(secret: SecretBytes, kind: DigestKind, value: object) -> bytes:
    """Return the digest of a value; docs/views.md describes it for others."""
    message = kind.name.encode() + b"\0" + kind.canonical(value)
    return hmac.digest(secret.reveal(), message, "sha256")[:DIGEST_LENGTH]


@dataclass(frozen=True)
class StandIn:
    """A chunk of digests, yet to be made.

    Attributes:
        chain: The elements of the file's schema that lead to the column.
        kind: What its values are.
        metadata: Of the chunk in the file.
        region: Where the pages of the chunk lie in the file.
        num_rows: Of its row group.
        created_by: The writer of the file.
        offset: Where the stand-in begins in the view.
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
        """How many bytes the levels of eight values take at most: bit-packed, with the header of the run."""
        return sum(1 + level.bit_length() for level in highest_levels(self.chain) if level)

    def make(self, pages: memoryview, secret: SecretBytes) -> bytes:
        """Return the stand-in for the pages of the chunk in plaintext.

        Raises:
            ParquetFormatError: The pages are not what the footer says, or cannot be decoded. No value is in its
                text.
        """
        rows = None
        if self.num_rows:
            # The text of the error may quote values.
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
            # Without rows, the page has lengths of levels that are not there.
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
        """Return a page of `length` bytes beyond the header's: levels and values as pyarrow has them in `body`."""
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
        # A required column has no levels that could be longer, and as many values as there are rows.
        return padded_header(header.serialise(), _HEADER_LENGTH + length - len(body)) + body

    def _digests(self, pages: memoryview, secret: SecretBytes) -> pa.Table:
        """Return the column with digests in place of its values."""
        table = self._decoded(pages, "ns")
        nanoseconds = None
        if self.chain[-1].type == INT96:
            # One of the two overflows for distant years, and the other is not exact.
            nanoseconds, table = _leaf_of(_array(table)), self._decoded(pages, "us")
        column = _array(table)
        leaf = _leaf_of(column)
        if nanoseconds is not None:
            leaf = _exact_text(leaf.cast(pa.int64()), nanoseconds.cast(pa.int64()))
        encoded = leaf.dictionary_encode()
        digests = _with_leaf(column, self._of_distinct(encoded.dictionary, secret).take(encoded.indices))
        return pa.table([digests], schema=pa.schema([table.schema.field(0).with_type(digests.type)]))

    def _of_distinct(self, values: pa.Array, secret: SecretBytes) -> pa.Array:
        found_type = pa.large_binary() if self.kind.is_binary else pa.large_string()
        parts = [pa.array([], found_type)]
        # Objects of Python take many times what their values do.
        for start in range(0, len(values), _PAGE_VALUES):
            digests = [digest(secret, self.kind, value) for value in values.slice(start, _PAGE_VALUES).to_pylist()]
            parts.append(
                pa.array(digests if self.kind.is_binary else [part.hex() for part in digests], found_type)
            )
        return pa.concat_arrays(parts)

    def _decoded(self, pages: memoryview, int96_unit: str) -> pa.Table:
        """Return the column as pyarrow reads it, without what types mean: a list for all that is repeated."""
        file = pq.ParquetFile(
            pa.BufferReader(self._file_of(pages)), pre_buffer=False, coerce_int96_timestamp_unit=int96_unit
        )
        # Threads of Arrow may wait for this already.
        return file.read(use_threads=False)

    def _file_of(self, pages: memoryview) -> pa.Buffer:
        """Return a file that has only this chunk."""
        moved = self.region.offset - len(MAGIC)
        metadata = ColumnMetaData()
        old = self.metadata
        metadata.type, metadata.path_in_schema, metadata.codec = old.type, old.path_in_schema, old.codec
        encodings = old.struct.entry(_ENCODINGS_FIELD_ID)
        if encodings is not None:
            metadata.struct.set_entry(_ENCODINGS_FIELD_ID, encodings)
        metadata.num_values = old.num_values
        metadata.total_uncompressed_size = old.total_uncompressed_size
        metadata.total_compressed_size = old.total_compressed_size
        # Some writers leave 0 where there is a dictionary only.
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
        footer.schema = [root, *(_alone(element) for element in self.chain)]
        footer.num_rows = self.num_rows
        footer.row_groups = [row_group]
        footer.created_by = self.created_by
        return pa.py_buffer(b"".join((MAGIC, pages, with_trailer(footer.serialise(), MAGIC))))


def _alone(element: SchemaElement) -> SchemaElement:
    """Return an element with no more than one child, and nothing that says what its values mean."""
    new = without_annotations(element)
    if new.num_children:
        new.num_children = 1
    return new


def _array(table: pa.Table) -> pa.Array:
    chunks = table.column(0).chunks
    return (
        chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.array([], table.schema.field(0).type)])
    )


def _exact_text(microseconds: pa.Array, nanoseconds: pa.Array) -> pa.Array:
    """Return timestamps in nanoseconds, as decimal digits: they may have more than 64 bits.

    The microseconds are rounded down, and the nanoseconds are the last 64 bits.
    """
    pairs = zip(microseconds.to_pylist(), nanoseconds.to_pylist(), strict=True)
    exact = [
        None if micros is None else micros * 1000 + (nanos - micros * 1000) % (1 << 64) for micros, nanos in pairs
    ]
    return pa.array([None if value is None else b"%d" % value for value in exact], pa.binary())


def _leaf_of(column: pa.Array) -> pa.Array:
    """Return the values of the leaf of a column that has only one."""
    while pa.types.is_nested(column.type):
        column = column.field(0) if pa.types.is_struct(column.type) else column.values
    return column


def _with_leaf(column: pa.Array, leaf: pa.Array) -> pa.Array:
    """Return a column with other values in its leaf, as many as `_leaf_of` returns."""
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
"""From version 23 on, pyarrow begins a new page after 20,000 rows, unless a page may have more."""


def _arrow_page(rows: pa.Table) -> tuple[bytes, int]:
    """Return a page of rows as pyarrow writes it, without its header, and how many values it has."""
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


class StandIns:
    """Chunks of digests, one behind the other; for any number of threads, one of which makes a chunk at a time."""

    def __init__(
        self, number: int, cache: PageCache, chunks: Sequence[StandIn], secret: SecretBytes | None
    ) -> None:
        """Make one of chunks in the order of their offsets; no digest is made yet."""
        self._number = number
        self._cache = cache
        self._chunks = chunks
        self._starts = [chunk.offset for chunk in chunks]
        self._secret = secret
        self._lock = ForkSafeLock()
        self._last: tuple[int, memoryview] | None = None

    def read_into(self, pages_of: Callable[[Region], memoryview], path: str, offset: int, out: memoryview) -> None:
        """Put digests into `out`, from `offset` of the view on, within the chunks.

        Of a chunk of the file, `pages_of` returns the pages in plaintext.

        Raises:
            DecryptionError: A page does not authenticate.
            ParquetFormatError: A chunk is not what its metadata says.
        """
        stop = offset + len(out)
        at = offset
        while at < stop:
            position = bisect_right(self._starts, at) - 1
            chunk = self._chunks[position]
            end = min(stop, chunk.end)
            data = self._made(position, pages_of, path)
            out[at - offset : end - offset] = data[at - chunk.offset : end - chunk.offset]
            at = end

    def _made(self, position: int, pages_of: Callable[[Region], memoryview], path: str) -> memoryview:
        chunk = self._chunks[position]
        key = (self._number, chunk.offset)
        data = self._cache.get(key)
        if data is not None:
            return data
        with self._lock:
            data = self._cache.get(key)
            last = self._last
            if data is None and last is not None and last[0] == position:
                data = last[1]
            if data is None:
                assert self._secret is not None
                pages = pages_of(chunk.region)
                try:
                    data = memoryview(chunk.make(pages, self._secret))
                except ParquetFormatError as error:
                    raise ParquetFormatError(str(error), path=path) from None
                self._cache.put(key, data)
                # One that is too long for the cache is wanted again at once, by who reads it in parts.
                self._last = None if self._cache.get(key) is not None else (position, data)
            return data
