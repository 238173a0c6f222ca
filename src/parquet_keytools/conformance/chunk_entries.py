"""What a footer says of column chunks, taken from it once: chunks are many, and rules look at the same fields."""

from __future__ import annotations

from typing import NamedTuple

from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData
from parquet_keytools.format.thrift_values import IntegerFields, WireType

_I32, _I64 = WireType.I32, WireType.I64

_META_DATA = ColumnChunk.meta_data.field_id
_FILE_PATH = ColumnChunk.file_path.field_id
_HIDDEN = ColumnChunk.encrypted_column_metadata.field_id

_USUAL_TYPES = {
    _FILE_PATH: WireType.BINARY,
    ColumnChunk.file_offset.field_id: _I64,
    _META_DATA: WireType.STRUCT,
    ColumnChunk.offset_index_offset.field_id: _I64,
    ColumnChunk.offset_index_length.field_id: _I32,
    ColumnChunk.column_index_offset.field_id: _I64,
    ColumnChunk.column_index_length.field_id: _I32,
    ColumnChunk.crypto_metadata.field_id: WireType.STRUCT,
    _HIDDEN: WireType.BINARY,
}

_INDEXES = IntegerFields(
    (ColumnChunk.column_index_offset.field_id, _I64),
    (ColumnChunk.column_index_length.field_id, _I32),
    (ColumnChunk.offset_index_offset.field_id, _I64),
    (ColumnChunk.offset_index_length.field_id, _I32),
)
_INDEX_IDS = frozenset(field_id for field_id, _ in _INDEXES.types)

_NUMBERS = IntegerFields(
    (ColumnMetaData.type.field_id, _I32),
    (ColumnMetaData.codec.field_id, _I32),
    (ColumnMetaData.num_values.field_id, _I64),
    (ColumnMetaData.total_compressed_size.field_id, _I64),
    (ColumnMetaData.data_page_offset.field_id, _I64),
    (ColumnMetaData.index_page_offset.field_id, _I64),
    (ColumnMetaData.dictionary_page_offset.field_id, _I64),
    (ColumnMetaData.bloom_filter_offset.field_id, _I64),
    (ColumnMetaData.bloom_filter_length.field_id, _I32),
)


class ChunkIndexes(NamedTuple):
    """Where the page indexes of a chunk are; None where one is not there."""

    column_index_offset: int | None
    column_index_length: int | None
    offset_index_offset: int | None
    offset_index_length: int | None


class ChunkEntry(NamedTuple):
    """What a row group says of one of its chunks.

    Attributes:
        chunk: All of it.
        crypto: The bytes of what it says of its encryption; None where it says nothing.
        hidden: The module of its metadata.
        visible: Its metadata, where that is not encrypted, or is repeated for readers without keys.
        other_types: Names of fields that have another type than ours, and so are not read.
        is_elsewhere: Whether its data lies in another file.
        indexes: Where its page indexes are; None where it has none.
    """

    chunk: ColumnChunk
    crypto: bytes | None
    hidden: bytes | None
    visible: ColumnMetaData | None
    other_types: tuple[str, ...]
    is_elsewhere: bool
    indexes: ChunkIndexes | None

    @classmethod
    def of(cls, chunk: ColumnChunk) -> ChunkEntry:
        """Take what is looked at out of an entry of a footer with which `check_required` found nothing wrong."""
        struct = chunk.struct
        types = struct.types()
        hidden = struct.entry(_HIDDEN) if _HIDDEN in types else None
        visible = struct.entry(_META_DATA) if types.get(_META_DATA) is WireType.STRUCT else None
        return _entry(
            (
                chunk,
                chunk.bytes_of(ColumnChunk.crypto_metadata),
                None if hidden is None else hidden[1],
                None if visible is None else ColumnMetaData(visible[1]),
                () if types.items() <= _USUAL_TYPES.items() else tuple(chunk.fields_of_other_types()),
                types.get(_FILE_PATH) is WireType.BINARY,
                None if types.keys().isdisjoint(_INDEX_IDS) else ChunkIndexes(*struct.numbers(_INDEXES)),
            )
        )


_entry = ChunkEntry._make


NOT_STATED = -1


class ChunkNumbers(NamedTuple):
    """What the metadata of a chunk says.

    Attributes:
        type: Its physical type; `NOT_STATED` where it is missing, and so is `codec`.
    """

    type: int
    codec: int
    num_values: int
    total_compressed_size: int
    data_page_offset: int
    index_page_offset: int | None
    dictionary_page_offset: int | None
    bloom_filter_offset: int | None
    bloom_filter_length: int | None

    @classmethod
    def of(cls, metadata: ColumnMetaData) -> ChunkNumbers:
        """Take the numbers out of metadata.

        Raises:
            ParquetFormatError: It does not say how many values there are, or where they lie.
        """
        physical_type, codec, num_values, size, *offsets = metadata.struct.numbers(_NUMBERS)
        if num_values is None or size is None or offsets[0] is None:
            _ = metadata.data_page_offset, metadata.total_compressed_size, metadata.num_values  # raises
        if physical_type is None or codec is None:
            physical_type = NOT_STATED if physical_type is None else physical_type
            codec = NOT_STATED if codec is None else codec
        return _numbers((physical_type, codec, num_values, size, *offsets))


_numbers = ChunkNumbers._make
