"""The Thrift structures of Parquet, as records with the fields that are known.

Field ids are those of parquet.thrift (spec 5.2 to 5.5 for the ones about encryption).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.footer_outline import CutChunk, UnreadChunks, read_footer_outline
from parquet_keytools.format.records import (
    BINARY,
    BOOL,
    I16,
    I32,
    I64,
    TEXT,
    Optional,
    Record,
    Required,
    list_of,
    nested,
)
from parquet_keytools.format.thrift_compact import ThriftReader, read_struct
from parquet_keytools.format.thrift_grammar import COLUMN_GROUPS
from parquet_keytools.format.thrift_skim import check_value_count, column_at, skim_struct
from parquet_keytools.format.thrift_values import Struct, ThriftList, WireType, write_value

# --- Encryption (spec 5.2, 5.4) ----------------------------------------------------------------------------


class Aes(Record):
    """AesGcmV1 and AesGcmCtrV1, which have the same fields."""

    aad_prefix = Optional(1, BINARY, refuses_other_types=True)
    aad_file_unique = Optional(2, BINARY, refuses_other_types=True)
    supply_aad_prefix = Optional(3, BOOL, refuses_other_types=True)


class EncryptionAlgorithm(Record):
    """Union of the algorithms: exactly one is set."""

    aes_gcm_v1 = Optional(1, nested(Aes), refuses_other_types=True)
    aes_gcm_ctr_v1 = Optional(2, nested(Aes), refuses_other_types=True)


class FileCryptoMetaData(Record):
    """What comes before an encrypted footer; no key authenticates it."""

    MAX_VALUES = 1_000

    encryption_algorithm = Required(1, nested(EncryptionAlgorithm), refuses_other_types=True)
    key_metadata = Optional(2, BINARY, refuses_other_types=True)


class EncryptionWithFooterKey(Record):
    """Marks a column that is encrypted with the footer key."""


class EncryptionWithColumnKey(Record):
    """Marks a column that is encrypted with a key of its own."""

    path_in_schema = Required(1, list_of(TEXT), refuses_other_types=True)
    key_metadata = Optional(2, BINARY, refuses_other_types=True)


class ColumnCryptoMetaData(Record):
    """Union: exactly one is set."""

    encryption_with_footer_key = Optional(1, nested(EncryptionWithFooterKey), refuses_other_types=True)
    encryption_with_column_key = Optional(2, nested(EncryptionWithColumnKey), refuses_other_types=True)


# --- Footer ------------------------------------------------------------------------------------------------


class KeyValue(Record):
    """A pair of the application's own metadata."""

    key = Required(1, TEXT)
    value = Optional(2, TEXT)


class SchemaElement(Record):
    """A node of the schema; a leaf has no children."""

    type = Optional(1, I32)
    name = Required(4, TEXT)
    num_children = Optional(5, I32)


_USUAL_PATH_LENGTH = 1024

_Path = tuple[str, ...]


def kept_by_path(make: Callable[[_Path], bytes]) -> Callable[[_Path], bytes]:
    """Keep what is made for paths of columns, but not of long ones: files could fill the memory with them."""
    kept = functools.lru_cache(maxsize=32_768)(make)

    @functools.wraps(make)
    def made(path: _Path) -> bytes:
        return kept(path) if sum(map(len, path)) <= _USUAL_PATH_LENGTH else make(path)

    return made


@kept_by_path
def path_bytes(path: tuple[str, ...]) -> bytes:
    """Return the bytes that metadata has for the path of a column, as all writers write it."""
    names = [name.encode("utf-8", "surrogateescape") for name in path]
    return write_value(WireType.LIST, ThriftList(WireType.BINARY, names))


class ColumnMetaData(Record):
    """What a footer says of a column chunk; offsets are from the start of the file, sizes in bytes."""

    OUTLINE_LEVELS = 0

    type = Required(1, I32)
    path_in_schema = Required(3, list_of(TEXT))
    codec = Required(4, I32)
    num_values = Required(5, I64)
    total_uncompressed_size = Required(6, I64)
    total_compressed_size = Required(7, I64)
    data_page_offset = Required(9, I64)
    index_page_offset = Optional(10, I64)
    dictionary_page_offset = Optional(11, I64)
    bloom_filter_offset = Optional(14, I64)
    bloom_filter_length = Optional(15, I32)

    @classmethod
    def is_usual(cls, data: bytes, path: bytes) -> bool:
        """Return whether bytes are the metadata of a column, as writers write it; else they have to be read.

        Args:
            data: The bytes.
            path: The `path_bytes` of the column.
        """
        found = column_at(data, 0)
        return found is not None and found[COLUMN_GROUPS[cls.path_in_schema.field_id][0]] == path

    def has_path(self, path: tuple[str, ...], written: bytes) -> bool:
        """Return whether it is the metadata of a column with this path, whose `path_bytes` are given."""
        own = self.struct.entry_bytes(_PATH_IN_SCHEMA)
        return own == (_LIST, written) or tuple(self.path_in_schema) == path


# Looked up for each chunk of a file; with Python 3.11 that takes as long as a call.
_PATH_IN_SCHEMA = ColumnMetaData.path_in_schema.field_id
_LIST = WireType.LIST


class ColumnChunk(Record):
    """A column chunk: where it lies, and how it is encrypted."""

    file_path = Optional(1, TEXT)
    file_offset = Optional(2, I64)
    meta_data = Optional(3, nested(ColumnMetaData))
    offset_index_offset = Optional(4, I64)
    offset_index_length = Optional(5, I32)
    column_index_offset = Optional(6, I64)
    column_index_length = Optional(7, I32)
    crypto_metadata = Optional(8, nested(ColumnCryptoMetaData), refuses_other_types=True)
    encrypted_column_metadata = Optional(9, BINARY, refuses_other_types=True)

    def cut(self) -> CutChunk:
        """Return the bytes of the chunk, cut where its crypto metadata begins and ends."""
        field_id = type(self).crypto_metadata.field_id
        written = self.serialise()
        places, _ = skim_struct(written, keep=(field_id,))
        if field_id not in places:
            return written, None, b""
        _, start, end = places[field_id]
        return written[:start], written[start:end], written[end:]


class RowGroup(Record):
    """A row group; `total_byte_size` is without compression and without framing."""

    columns = Required(1, list_of(nested(ColumnChunk)))
    total_byte_size = Required(2, I64)
    num_rows = Required(3, I64)
    file_offset = Optional(5, I64)
    total_compressed_size = Optional(6, I64)
    ordinal = Optional(7, I16)

    def with_chunks(self, others: Sequence[bytes | None]) -> Self:
        """Return a row group, to be written only, with the bytes of others in place of chunks; None keeps one."""
        field_id = type(self).columns.field_id
        unread = self.unread_chunks
        chunks = None if unread is None else unread.with_others(others)
        if chunks is None:
            pairs = zip(others, self.columns, strict=True)
            chunks = ThriftList(WireType.STRUCT, [own.struct if other is None else other for other, own in pairs])
        changed = self.shallow_copy()
        changed.struct.set_entry(field_id, (WireType.LIST, chunks))
        return changed

    def cut_chunks(self) -> list[CutChunk]:
        """Return the bytes of each column chunk, cut where its crypto metadata begins and ends."""
        unread = self.unread_chunks
        cut = None if unread is None else unread.cut()
        return [chunk.cut() for chunk in self.columns] if cut is None else cut

    @property
    def unread_chunks(self) -> UnreadChunks | None:
        """Its column chunks, where these were only passed over; to be looked at only."""
        entry = self.struct.entry(type(self).columns.field_id)
        return entry[1] if entry is not None and isinstance(entry[1], UnreadChunks) else None


class FileMetaData(Record):
    """The footer. What lies in a column chunk is read when it is looked at."""

    OUTLINE_LEVELS = 4

    version = Required(1, I32)
    schema = Required(2, list_of(nested(SchemaElement)))
    num_rows = Required(3, I64)
    row_groups = Required(4, list_of(nested(RowGroup)))
    key_value_metadata = Optional(5, list_of(nested(KeyValue)))
    created_by = Optional(6, TEXT)
    encryption_algorithm = Optional(8, nested(EncryptionAlgorithm), refuses_other_types=True)
    footer_signing_key_metadata = Optional(9, BINARY, refuses_other_types=True)

    @classmethod
    def _read_struct(cls, data: bytes | memoryview, offset: int, max_memory: int | None) -> tuple[Struct, int]:
        if max_memory is not None:
            return super()._read_struct(data, offset, max_memory)
        return read_footer_outline(bytes(data), offset, cls.row_groups.field_id)

    @classmethod
    def read_protection(cls, data: bytes) -> tuple[Self, int]:
        """Check the footer that `data` begins with, and build only what says how it is protected.

        Returns:
            A footer that has only these fields, and the offset of the first byte after the whole.

        Raises:
            ParquetFormatError: There is no Thrift struct there, or its encryption algorithm is too large.
        """
        kept: dict[int, tuple[WireType, Any]] = {}
        try:
            spans, end = skim_struct(data, keep=_PROTECTION_FIELDS)
            for field_id, (wire_type, start, _) in spans.items():
                value: Any = None
                if wire_type is WireType.STRUCT and field_id == cls.encryption_algorithm.field_id:
                    check_value_count(data, start, FileCryptoMetaData.MAX_VALUES)
                    value, _ = read_struct(data, start)
                elif wire_type is WireType.BINARY and field_id == cls.footer_signing_key_metadata.field_id:
                    value = ThriftReader(data, start).value(wire_type, 0)
                kept[field_id] = (wire_type, value)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"{cls.__name__}: {error}") from None
        return cls(Struct(kept)), end


_PROTECTION_FIELDS = frozenset({8, 9, 10})
"""The fields that say how a footer is signed, and the one that moved between drafts."""


# --- Pages, indexes, Bloom filters -------------------------------------------------------------------------


class DataPageHeader(Record):
    """Header of a data page V1."""

    num_values = Required(1, I32)


class DictionaryPageHeader(Record):
    """Header of a dictionary page."""

    num_values = Required(1, I32)


class DataPageHeaderV2(Record):
    """Header of a data page V2."""

    num_values = Required(1, I32)


class PageHeader(Record):
    """Header of a page; `compressed_page_size` is the length in bytes of what follows it."""

    type = Required(1, I32)
    uncompressed_page_size = Required(2, I32)
    compressed_page_size = Required(3, I32)
    crc = Optional(4, I32)
    data_page_header = Optional(5, nested(DataPageHeader))
    dictionary_page_header = Optional(7, nested(DictionaryPageHeader))
    data_page_header_v2 = Optional(8, nested(DataPageHeaderV2))

    DATA_PAGE: ClassVar[int] = 0
    INDEX_PAGE: ClassVar[int] = 1
    DICTIONARY_PAGE: ClassVar[int] = 2
    DATA_PAGE_V2: ClassVar[int] = 3


class PageLocation(Record):
    """Where a data page lies; the size is that of header and page together."""

    offset = Required(1, I64)
    compressed_page_size = Required(2, I32)
    first_row_index = Required(3, I64)


class OffsetIndex(Record):
    """Where the data pages of a chunk lie."""

    page_locations = Required(1, list_of(nested(PageLocation)))


class BloomFilterHeader(Record):
    """Header of a Bloom filter; the bitset of `num_bytes` bytes follows it."""

    num_bytes = Required(1, I32)
