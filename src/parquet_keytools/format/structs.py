"""The Thrift structures of Parquet, as records with the fields that are known.

Field ids are those of parquet.thrift (spec 5.2 to 5.5 for the ones about encryption).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

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
    records_of,
)
from parquet_keytools.format.thrift import ThriftList, WireType, write_value

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


def path_bytes(path: tuple[str, ...]) -> bytes:
    """Return the bytes that metadata has for the path of a column, as all writers write it."""
    names = [name.encode("utf-8", "surrogateescape") for name in path]
    return write_value(WireType.LIST, ThriftList(WireType.BINARY, names))


class ColumnMetaData(Record):
    """What a footer says of a column chunk; offsets are from the start of the file, sizes in bytes."""

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

    def has_path(self, path: tuple[str, ...], written: bytes) -> bool:
        """Return whether it is the metadata of a column with this path, whose `path_bytes` are given."""
        own = self.struct.entry_bytes(_PATH_IN_SCHEMA)
        return own == (WireType.LIST, written) or tuple(self.path_in_schema) == path


_PATH_IN_SCHEMA = ColumnMetaData.path_in_schema.field_id


class ColumnChunk(Record):
    """A column chunk: where it lies, and how it is encrypted."""

    PATH = (3,)  # Its metadata.

    file_path = Optional(1, TEXT)
    file_offset = Optional(2, I64)
    meta_data = Optional(3, nested(ColumnMetaData))
    offset_index_offset = Optional(4, I64)
    offset_index_length = Optional(5, I32)
    column_index_offset = Optional(6, I64)
    column_index_length = Optional(7, I32)
    crypto_metadata = Optional(8, nested(ColumnCryptoMetaData), refuses_other_types=True)
    encrypted_column_metadata = Optional(9, BINARY, refuses_other_types=True)


class RowGroup(Record):
    """A row group; `total_byte_size` is without compression and without framing."""

    columns = Required(1, records_of(ColumnChunk))
    total_byte_size = Required(2, I64)
    num_rows = Required(3, I64)
    file_offset = Optional(5, I64)
    total_compressed_size = Optional(6, I64)
    ordinal = Optional(7, I16)

    def with_chunks(self, others: Sequence[bytes | None]) -> Self:
        """Return a row group, to be written only, with the bytes of others in place of chunks; None keeps one."""
        pairs = zip(others, self.columns, strict=True)
        chunks = [own.struct if other is None else other for other, own in pairs]
        changed = self.shallow_copy()
        changed.struct.set_entry(type(self).columns.field_id, (WireType.LIST, ThriftList(WireType.STRUCT, chunks)))
        return changed

    def cut_chunks(self) -> list[tuple[bytes, bytes | None, bytes]]:
        """Return the bytes of each column chunk, cut around its crypto metadata; see `Struct.cut`."""
        return [chunk.struct.cut(ColumnChunk.crypto_metadata.field_id) for chunk in self.columns]


class FileMetaData(Record):
    """The footer."""

    PATH = (4, 1)  # Row groups, and where their chunks lie.
    METADATA_PATH = (
        4,
        1,
        3,
    )  # And their metadata: faster if all is needed.

    version = Required(1, I32)
    schema = Required(2, list_of(nested(SchemaElement)))
    num_rows = Required(3, I64)
    row_groups = Required(4, list_of(nested(RowGroup)))
    key_value_metadata = Optional(5, list_of(nested(KeyValue)))
    created_by = Optional(6, TEXT)
    encryption_algorithm = Optional(8, nested(EncryptionAlgorithm), refuses_other_types=True)
    footer_signing_key_metadata = Optional(9, BINARY, refuses_other_types=True)


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
