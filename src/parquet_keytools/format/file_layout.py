"""What lies where in a Parquet file: magic, footer, leaf columns, regions of column chunks (spec 5.4, 5.5).

A file is read and written by ranges, so that no file is held whole.
"""

from __future__ import annotations

import io
import os
import re
import struct
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NoReturn, Protocol

from parquet_keytools.errors import DraftFormatError, FileChangedError, ParquetFormatError
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileCryptoMetaData,
    FileMetaData,
    SchemaElement,
)
from parquet_keytools.format.thrift import IntegerFields, WireType
from parquet_keytools.runtime import operating_system

Bytes = bytes | bytearray | memoryview


class ByteSource(Protocol):
    """A file to read from, by ranges, from any number of threads."""

    @property
    def path(self) -> str:
        """The name for error texts."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the file in bytes."""
        ...

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `offset`, without a copy where they are in memory."""
        ...


def check_range(source: ByteSource, offset: int, length: int) -> None:
    """Raise `ParquetFormatError` for a range that is not in a file."""
    if offset < 0 or length < 0 or offset + length > source.size_bytes:
        raise ParquetFormatError(
            f"bytes {offset} to {offset + length} are outside of the file of {source.size_bytes} bytes",
            path=source.path,
        )


class HeldSource:
    """A source of which a part, from `offset`, is in memory; with `is_end`, the file ends with that part."""

    def __init__(self, source: ByteSource, offset: int, data: bytes | memoryview, *, is_end: bool = False) -> None:
        self.path = source.path
        self._source = source
        self._start = offset
        self._end = offset + len(data)
        self._data = memoryview(data)
        self.size_bytes = self._end if is_end else source.size_bytes

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes of the source."""
        check_range(self, offset, length)
        end = offset + length
        start, stop = self._start, self._end
        if start <= offset and end <= stop:
            return self._data[offset - start : end - start]
        if end <= start or offset >= stop:
            return self._source.read_at(offset, length)
        before = self._source.read_at(offset, start - offset) if offset < start else b""
        after = self._source.read_at(stop, end - stop) if end > stop else b""
        return b"".join((before, self._data[max(offset - start, 0) : end - start], after))


@dataclass(frozen=True)
class FileSource:
    """An open local file; never mapped: one that another process truncates would end this process with SIGBUS."""

    path: str
    file_descriptor: int
    size_bytes: int

    @classmethod
    def of(cls, path: str, file_descriptor: int) -> FileSource:
        """Return a source for an open file as long as it is now."""
        return cls(path, file_descriptor, os.fstat(file_descriptor).st_size)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read one range."""
        check_range(self, offset, length)
        data = operating_system.read_at(self.file_descriptor, length, offset)
        if len(data) == length:
            return data
        # The operating system reads no more than about 2 GiB at a time.
        parts = [data]
        while data and (length := length - len(data)):
            offset += len(data)
            data = operating_system.read_at(self.file_descriptor, length, offset)
            parts.append(data)
        if not data:
            raise shortened(self.path)
        return b"".join(parts)


def shortened(path: str) -> FileChangedError:
    """Return the error for a file that became shorter while it was read."""
    return FileChangedError(
        "the file ends early: it became shorter while it was read.", path=path, hint="Try again."
    )


class ByteSink(Protocol):
    """A file to write to."""

    @property
    def takes_any_order(self) -> bool:
        """Whether ranges may be written in any order and by several threads; else in order, without gaps."""
        ...

    def reserve(self, length: int) -> None:
        """Say how many bytes the file will have, before the first one is written."""
        ...

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write `data` at `offset`."""
        ...


class RangedFile(io.RawIOBase):
    """A file object of Python over what is read by ranges.

    It has one position, but a thread that goes to one reads there, wherever others go meanwhile: DuckDB reads
    a file by several threads, of which each goes to its place and then reads.
    """

    size_bytes: int
    _position = 0

    def __init__(self) -> None:
        super().__init__()
        self._sought: dict[int, int] = {}
        """Thread -> where it went to and has not read yet."""

    @abstractmethod
    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset`; it is called with a length of 0 behind the end, too."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the start."""
        return self._sought.get(threading.get_ident(), self._position)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position, which may lie behind the end, and return it."""
        self._refuse_closed()
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size_bytes}.get(whence)
        if start is None or start + offset < 0:
            raise ValueError(f"no such position: {offset} with whence {whence}")
        self._position = self._sought[threading.get_ident()] = start + offset
        return start + offset

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes from the position, all that follow where it is negative or None."""
        return bytes(self.read_uncopied(size))

    def read_uncopied(self, size: int | None = -1) -> bytes | memoryview:
        """Read like `read`, without a copy where the bytes are in memory."""
        self._refuse_closed()
        start = self._sought.pop(threading.get_ident(), None)
        if start is None:
            # Threads take turns: what one of them did last counts for all.
            self._sought.clear()
            start = self._position
        left = max(self.size_bytes - start, 0)
        data = self.read_at(start, left if size is None or size < 0 else min(size, left))
        self._position = start + len(data)
        return data

    def readall(self) -> bytes:
        """Return all that follows."""
        return self.read()

    def readinto(self, buffer: Bytes, /) -> int:  # type: ignore[override]
        """Read into memory of the caller, and return the number of bytes: fewer than fit only at the end."""
        view = memoryview(buffer).cast("B")
        data = self.read_uncopied(len(view))
        view[: len(data)] = data
        return len(data)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")


MAGIC = b"PAR1"
MAGIC_ENCRYPTED_FOOTER = b"PARE"
MAGIC_LENGTH = 4
TRAILER_LENGTH = 8
"""Length of the footer's length and the magic that end a file."""

TAIL_LENGTH = 64 * 1024
"""How many bytes of the end of a file are read at once, in the hope that the footer is among them."""

MAX_SCHEMA_DEPTH = 256
"""How deep groups of a schema may nest; keeps the paths of all leaves proportional to the schema's bytes."""

MAX_PATHS_LENGTH = 32 * 1024 * 1024
"""How long the paths of all leaves may be together, in characters: as texts, each has the names of its groups."""

_BOOLEAN = (WireType.TRUE, WireType.FALSE)


UNAUTHENTICATED_FACTOR = 16
"""How many times its length a footer may take in memory that nothing authenticates; honest ones take up to 12."""

UNAUTHENTICATED_BASE = 32 * 1024 * 1024
"""What it may take beyond that, in bytes."""

MAX_FOOTER_BYTES = 64 * 1024 * 1024
"""How long a footer may be where no configuration says otherwise."""

_stated_max_footer_bytes = 0


def accept_footers_up_to(max_footer_bytes: int) -> None:
    """Note the longest footer that a configuration accepts; the largest of all used in this process counts."""
    global _stated_max_footer_bytes
    _stated_max_footer_bytes = max(_stated_max_footer_bytes, max_footer_bytes)


def check_footer_length(length: int, path: str) -> None:
    """Refuse a footer that is too long to be read: anyone can write one, and all of it is held in memory."""
    limit = _stated_max_footer_bytes or MAX_FOOTER_BYTES
    if length > limit:
        raise ParquetFormatError(
            f"the footer has {length:,} bytes, and at most {limit:,} are accepted.",
            path=path,
            hint="If you trust the file, raise `max_footer_bytes` under `reading` in the configuration.",
        )


@dataclass(frozen=True, slots=True)
class FooterBytes:
    """The footer as it lies in the file, which nothing authenticates; `tail` also has its length and the magic."""

    is_encrypted: bool
    offset: int
    tail: bytes

    @property
    def data(self) -> memoryview:
        """The footer up to its length, which is not included. A view: footers of wide tables are megabytes."""
        return memoryview(self.tail)[:-TRAILER_LENGTH]


def with_trailer(footer: bytes, magic: bytes) -> bytes:
    """Return the end of a file: the footer with what belongs to it, its length, and the magic."""
    return footer + struct.pack("<I", len(footer)) + magic


@dataclass(frozen=True, slots=True)
class LeafColumn:
    """A leaf of the schema; its ordinal is the position of its chunk in every row group.

    `top_level_position` is the position of its ancestor among the children of the root. It is flat if it has one
    value, or null, for each row: neither it nor a group around it repeats.
    """

    path: tuple[str, ...]
    ordinal: int
    top_level_position: int
    physical_type: int
    is_flat: bool = False

    @property
    def dotted_path(self) -> str:
        """The path as people and configurations write it."""
        return ".".join(self.path)


def read_footer_bytes(source: ByteSource, *, reads_head: bool = True) -> FooterBytes:
    """Read the footer of a file from its tail, by one or two reads; `reads_head` compares the first magic, too."""
    path, size = source.path, source.size_bytes
    if size < MAGIC_LENGTH + TRAILER_LENGTH:
        raise ParquetFormatError(f"{size} bytes are too few for a Parquet file.", path=path)
    tail_offset = size - min(size, TAIL_LENGTH)
    tail = source.read_at(tail_offset, size - tail_offset)
    magic = bytes(tail[-MAGIC_LENGTH:])
    if magic not in (MAGIC, MAGIC_ENCRYPTED_FOOTER):
        raise ParquetFormatError(
            "the file does not end with PAR1 or PARE: it is not a Parquet file, or was cut off.", path=path
        )
    if reads_head:
        head = tail[:MAGIC_LENGTH] if tail_offset == 0 else source.read_at(0, MAGIC_LENGTH)
        if bytes(head) != magic:
            raise ParquetFormatError(f"the file ends with {magic.decode()} but does not begin with it.", path=path)
    trailer = tail[-TRAILER_LENGTH:]
    (length,) = struct.unpack("<I", trailer[:-MAGIC_LENGTH])
    offset = size - TRAILER_LENGTH - length
    if length == 0 or offset < MAGIC_LENGTH:
        raise ParquetFormatError(
            f"a footer of {length} bytes does not fit into a file of {size} bytes.", path=path
        )
    check_footer_length(length, path)
    if offset < tail_offset:
        tail, tail_offset = source.read_at(offset, length + TRAILER_LENGTH), offset
        if tail[-TRAILER_LENGTH:] != trailer:
            raise FileChangedError("the file was replaced meanwhile.", path=path, hint="Try again.")
    return FooterBytes(magic == MAGIC_ENCRYPTED_FOOTER, offset, bytes(tail[offset - tail_offset :]))


def unauthenticated_limit(length: int) -> int:
    """Return how many bytes of memory a footer of a length may take that nothing authenticates."""
    return UNAUTHENTICATED_FACTOR * length + UNAUTHENTICATED_BASE


def refuse_draft_crypto_metadata(metadata: FileCryptoMetaData) -> None:
    """Refuse the FileCryptoMetaData of the 2018 draft, which is another structure under the same magic."""
    types = metadata.struct.types()
    if types.get(2) in _BOOLEAN or 4 in types or 5 in types:
        _refuse("2018", "its FileCryptoMetaData has encrypted_footer, footer_offset or iv_prefix")


def refuse_draft_footer(metadata: FileMetaData) -> None:
    """Refuse a plaintext footer of the 2019 draft, where field 9 is `signed_footer`."""
    types = metadata.struct.types()
    if 8 in types and (types.get(9) in _BOOLEAN or (9 not in types and 10 in types)):
        _refuse("2019", "field 9 of its footer is signed_footer")


def _refuse(year: str, reason: str) -> NoReturn:
    raise DraftFormatError(
        f"the file follows the {year} draft of the encryption specification ({reason}).",
        hint="That draft was never in force; write the file again with a current writer.",
    )


_REPETITION_TYPE_ID, _REPEATED = 3, (WireType.I32, 2)
"""Of `repetition_type` in SchemaElement."""


def leaf_columns(schema: list[SchemaElement]) -> tuple[LeafColumn, ...]:
    """Return the leaves of a flattened schema (depth first, the root first) in the order of their chunks."""
    if not schema:
        raise ParquetFormatError("the schema is empty.")
    leaves: list[LeafColumn] = []
    names: list[str] = []
    waiting = [schema[0].num_children or 0]  # For each open group, how many children are still to come.
    flat = [True]  # For each open group, whether neither it nor a group around it repeats.
    top_level_position = -1
    paths_length = 0
    for element in schema[1:]:
        while waiting and waiting[-1] == 0:
            waiting.pop()
            flat.pop()
            del names[len(waiting) - 1 if waiting else 0 :]
        if not waiting or waiting[-1] < 0:
            raise ParquetFormatError("the schema has more elements than its groups have children.")
        waiting[-1] -= 1
        if len(waiting) == 1:
            top_level_position += 1
        children = element.num_children or 0
        is_flat = flat[-1] and element.struct.entry(_REPETITION_TYPE_ID) != _REPEATED
        if children:
            if element.type is not None:
                raise ParquetFormatError("an element of the schema is a group and a leaf at once.")
            if len(waiting) >= MAX_SCHEMA_DEPTH:
                raise ParquetFormatError(f"groups of the schema nest more than {MAX_SCHEMA_DEPTH} deep.")
            names.append(element.name)
            waiting.append(children)
            flat.append(is_flat)
        elif (physical_type := element.type) is not None:
            path = (*names, element.name)
            paths_length += sum(map(len, path))
            if paths_length > MAX_PATHS_LENGTH:
                raise ParquetFormatError(
                    f"the paths of the columns are longer than {MAX_PATHS_LENGTH} characters together."
                )
            leaves.append(LeafColumn(path, len(leaves), top_level_position, physical_type, is_flat))
    if any(waiting):
        raise ParquetFormatError("a group of the schema has more children than elements follow.")
    return tuple(leaves)


_FORGOTTEN_LENGTH = 100
"""How many bytes of a dictionary page's header parquet-mr before 1.2.9 left out of its sizes (PARQUET-816)."""

_PARQUET_MR = re.compile(r"parquet-mr(?: version (\d+)(?:\.(\d+))?(?:\.(\d+))?)?", re.IGNORECASE)
_LAST_FORGETFUL = (1, 2, 8)


def _forgets_bytes(created_by: str | None) -> bool:
    """Return whether a writer left bytes out of its sizes; one that states no version is as old as that."""
    found = _PARQUET_MR.match(created_by or "")
    return found is not None and tuple(int(number or 0) for number in found.groups()) <= _LAST_FORGETFUL


class RegionKind(IntEnum):
    """What lies in a region."""

    PAGES = 0
    BLOOM_FILTER = 1
    COLUMN_INDEX = 2
    OFFSET_INDEX = 3


_LENGTH_FIELD_IDS = {
    RegionKind.OFFSET_INDEX: ColumnChunk.offset_index_length.field_id,
    RegionKind.COLUMN_INDEX: ColumnChunk.column_index_length.field_id,
}


class Region(NamedTuple):
    """A byte range of a column chunk; a Bloom filter may state no length. `arranged` sets its limit."""

    kind: RegionKind
    row_group_ordinal: int
    column_ordinal: int
    offset: int
    length: int | None
    limit: int = 0

    @property
    def chunk_key(self) -> tuple[int, int]:
        """The ordinals of row group and column of the chunk that it belongs to."""
        return self.row_group_ordinal, self.column_ordinal

    @property
    def title(self) -> str:
        """The kind for people."""
        return self.kind.name.lower().replace("_", " ")


_FILE_PATH = ColumnChunk.file_path.field_id
_region = Region._make  # Twice as fast as calling the class.
_PAGES = RegionKind.PAGES


class ChunkPlaces(NamedTuple):
    """What column metadata says of where a chunk lies; offsets are from the start of the file, all in bytes."""

    data_page_offset: int
    dictionary_page_offset: int | None
    index_page_offset: int | None
    total_compressed_size: int
    bloom_filter_offset: int | None
    bloom_filter_length: int | None


def places_of(metadata: ColumnMetaData) -> Places:
    """Return the places in a chunk's metadata."""
    data, dictionary, index, length, bloom_filter, bloom_filter_length = metadata.struct.numbers(_PLACES)
    if data is None or length is None:
        # One of them says what is missing.
        data, length = metadata.data_page_offset, metadata.total_compressed_size
    return data, dictionary, index, length, bloom_filter, bloom_filter_length


Places = tuple[int, int | None, int | None, int, int | None, int | None]
"""The fields of `ChunkPlaces`, in their order."""

_PLACES: IntegerFields = (
    (ColumnMetaData.data_page_offset.field_id, WireType.I64),
    (ColumnMetaData.dictionary_page_offset.field_id, WireType.I64),
    (ColumnMetaData.index_page_offset.field_id, WireType.I64),
    (ColumnMetaData.total_compressed_size.field_id, WireType.I64),
    (ColumnMetaData.bloom_filter_offset.field_id, WireType.I64),
    (ColumnMetaData.bloom_filter_length.field_id, WireType.I32),
)

INDEX_PLACES: IntegerFields = (
    (ColumnChunk.column_index_offset.field_id, WireType.I64),
    (ColumnChunk.column_index_length.field_id, WireType.I32),
    (ColumnChunk.offset_index_offset.field_id, WireType.I64),
    (ColumnChunk.offset_index_length.field_id, WireType.I32),
)


def regions_of(
    chunk: ColumnChunk,
    metadata: ColumnMetaData,
    row_group_ordinal: int,
    column_ordinal: int,
    places: Places | None = None,
) -> list[Region]:
    """Return the regions of a chunk, from its full metadata; raise `ParquetFormatError` for wrong lengths."""
    # Old writers state an empty path for data in the file itself.
    if chunk.struct.has(_FILE_PATH) and chunk.file_path:
        raise ParquetFormatError(
            f"the data of column {'.'.join(metadata.path_in_schema)!r} is in another file, "
            f"{chunk.file_path!r}: this is a summary file (_metadata).",
            hint="Use the data files themselves.",
        )
    if places is None:
        places = places_of(metadata)
    regions = regions_at(places, chunk.struct.numbers(INDEX_PLACES), row_group_ordinal, column_ordinal)
    for region in regions[1:]:
        if region.length is None and region.kind is not RegionKind.BLOOM_FILTER:
            if not chunk.struct.has(_LENGTH_FIELD_IDS[region.kind]):
                raise ParquetFormatError(f"the {region.title} has no length.")
            regions.remove(region)  # A length of another type: no reader can find the index.
    return regions


def regions_at(
    places: Places, indexes: Sequence[int | None], row_group_ordinal: int, column_ordinal: int
) -> list[Region]:
    """Return the regions of a chunk: its pages, Bloom filter and indexes; see `ChunkPlaces` and `INDEX_PLACES`."""
    data_page, dictionary_page, index_page, length, bloom_filter, bloom_filter_length = places
    # Writers leave 0 where there is no such page.
    start = data_page
    for page in (dictionary_page, index_page):
        if page and (page < start or not start):
            start = page
    regions = [_region((_PAGES, row_group_ordinal, column_ordinal, start, length, 0))]
    column_index, column_index_length, offset_index, offset_index_length = indexes
    for kind, offset, index_length in (
        (RegionKind.BLOOM_FILTER, bloom_filter, bloom_filter_length),
        (RegionKind.COLUMN_INDEX, column_index, column_index_length),
        (RegionKind.OFFSET_INDEX, offset_index, offset_index_length),
    ):
        if offset is not None:
            regions.append(_region((kind, row_group_ordinal, column_ordinal, offset, index_length, 0)))
    return regions


def arranged(regions: Iterable[Region], footer_offset: int, created_by: str | None) -> list[Region]:
    """Return the regions of all chunks, none of which overlap, in the order of their offsets with their limits."""
    tolerance = _FORGOTTEN_LENGTH if _forgets_bytes(created_by) else 0
    # The numbers of a region itself make that no two of them are the same.
    ordered = sorted([(region[3], region[4] or 0, region[0], region) for region in regions], reverse=True)
    result: list[Region] = []
    next_offset = footer_offset
    for offset, _, kind, region in ordered:
        _, row_group_ordinal, column_ordinal, _, length, _ = region
        if length == 0:
            limit = offset
        else:
            end = offset + (1 if length is None else length)
            if offset < MAGIC_LENGTH or (length is not None and length < 0) or end > footer_offset:
                raise ParquetFormatError(f"{_name(region)}: {length} bytes at {offset} are not before the footer.")
            if end > next_offset:
                raise ParquetFormatError(f"{_name(region)} overlaps with what begins at byte {next_offset}.")
            if length is None:
                limit = next_offset
            elif tolerance and kind is _PAGES:
                limit = min(next_offset, end + tolerance)
            else:
                limit = end
            next_offset = offset
        result.append(_region((kind, row_group_ordinal, column_ordinal, offset, length, limit)))
    result.reverse()
    return result


def _name(region: Region) -> str:
    return f"row group {region.row_group_ordinal}, column {region.column_ordinal}, {region.title}"
