"""Column chunks that stand for others, whose metadata or values a reader does not get."""

from __future__ import annotations

from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, DataPageHeader, PageHeader, path_bytes
from parquet_keytools.format.thrift_compact import Struct, ThriftList, WireType
from parquet_keytools.format.thrift_skim import skim_struct
from parquet_keytools.format.thrift_values import varint, write_value

_PLAIN, _RLE = 0, 3
_ENCODINGS_FIELD_ID = 2
_STATISTICS_FIELD_ID = 12
_NULL_COUNT_FIELD_ID = 3
_METADATA_FIELDS = (
    ColumnChunk.meta_data.field_id,
    ColumnMetaData.path_in_schema.field_id,
    ColumnMetaData.data_page_offset.field_id,
)


def generated_chunk(
    physical_type: int,
    path: tuple[str, ...],
    num_values: int,
    offset: int,
    length: int,
    *,
    is_null: bool = False,
    has_levels: bool = False,
) -> ColumnChunk:
    """Return a plaintext chunk without compression.

    Args:
        physical_type: Of its column.
        path: Of its column.
        num_values: How many values it has, nulls included.
        offset: Where its first page begins.
        length: Of its pages with their headers, in bytes.
        is_null: Whether all values are null.
        has_levels: Whether its pages have levels, where not all values are null.
    """
    metadata = ColumnMetaData()
    metadata.type = physical_type
    encodings = [_PLAIN, _RLE] if is_null or has_levels else [_PLAIN]
    metadata.struct.fields[_ENCODINGS_FIELD_ID] = (WireType.LIST, ThriftList(WireType.I32, encodings))
    metadata.path_in_schema = list(path)
    metadata.codec = 0
    metadata.num_values = num_values
    metadata.total_uncompressed_size = metadata.total_compressed_size = length
    metadata.data_page_offset = offset
    if is_null:
        statistics = Struct({_NULL_COUNT_FIELD_ID: (WireType.I64, num_values)})
        metadata.struct.set_entry(_STATISTICS_FIELD_ID, (WireType.STRUCT, statistics))
    chunk = ColumnChunk()
    chunk.file_offset = 0
    chunk.meta_data = metadata
    return chunk


class ChunkTemplate:
    """A generated chunk of which only path and offset differ between columns."""

    def __init__(self, physical_type: int, num_values: int, length: int) -> None:
        """Make one; see `generated_chunk`."""
        written = generated_chunk(physical_type, ("",), num_values, 0, length).serialise()
        metadata = skim_struct(written, keep=_METADATA_FIELDS)[0][ColumnChunk.meta_data.field_id]
        places = skim_struct(written, metadata[1], keep=_METADATA_FIELDS)[0]
        _, path_start, path_end = places[ColumnMetaData.path_in_schema.field_id]
        _, offset_start, offset_end = places[ColumnMetaData.data_page_offset.field_id]
        self._pieces = written[:path_start], written[path_end:offset_start], written[offset_end:]

    def chunk(self, path: tuple[str, ...], offset: int) -> bytes:
        """Return the bytes of a chunk."""
        before, between, after = self._pieces
        return b"".join((before, path_bytes(path), between, write_value(WireType.I64, offset), after))


def null_page(num_rows: int, max_definition_level: int, max_repetition_level: int) -> bytes:
    """Return a V1 data page of rows in each of which the outermost field is null or empty.

    Args:
        num_rows: How many.
        max_definition_level: Of the column; at least 1.
        max_repetition_level: Of the column.
    """
    levels = b"".join(_zeros(num_rows, level) for level in (max_repetition_level, max_definition_level) if level)
    header = plain_page_header(num_rows, len(levels))
    return header.serialise() + levels


def plain_page_header(num_values: int, length: int) -> PageHeader:
    """Return the header of a V1 data page that is neither compressed nor encoded by a dictionary.

    Args:
        num_values: How many values it has.
        length: Of the page in bytes, without this header.
    """
    data_page = DataPageHeader()
    data_page.num_values = num_values
    for field_id, encoding in ((2, _PLAIN), (3, _RLE), (4, _RLE)):
        data_page.struct.set_entry(field_id, (WireType.I32, encoding))
    header = PageHeader()
    header.type = PageHeader.DATA_PAGE
    header.uncompressed_page_size = header.compressed_page_size = length
    header.data_page_header = data_page
    return header


def _zeros(count: int, max_level: int) -> bytes:
    """Return one run of zeros, as levels lie in a V1 page: their length, and then the run."""
    run = varint(count << 1) + bytes((max_level.bit_length() + 7) // 8) if count else b""
    return len(run).to_bytes(4, "little") + run
