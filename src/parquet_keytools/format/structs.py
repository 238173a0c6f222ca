"""Field tables of the Thrift structures of Parquet, as typed views on what was read.

A `Record` is a view: it keeps the struct with all its fields, known and unknown, and reads and writes the
ones it knows. Field ids are those of parquet.thrift (spec 5.2 to 5.5 for the ones about encryption).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift_compact import Struct, ThriftList, WireType, read_struct, write_struct

T = TypeVar("T")


class Record:
    """A typed view on a Thrift struct; subclasses list the fields that are known."""

    __slots__ = ("struct",)

    def __init__(self, struct: Struct | None = None) -> None:
        self.struct = Struct() if struct is None else struct

    @classmethod
    def read(cls, data: bytes | memoryview, offset: int = 0) -> tuple[Self, int]:
        """Read the structure at `offset`; returns it and the offset of the first byte after it.

        Raises:
            ParquetFormatError: There is no Thrift struct there.
        """
        try:
            struct, end = read_struct(data, offset)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"{cls.__name__}: {error}") from None
        return cls(struct), end

    def serialise(self) -> bytes:
        """Return the bytes of the structure, unknown fields included."""
        return write_struct(self.struct)

    def copy(self) -> Self:
        """Return a copy that shares nothing with this one."""
        return type(self)(copy.deepcopy(self.struct))

    def shallow_copy(self) -> Self:
        """Return a copy whose fields can be set without changing this one; what is in them is shared."""
        return type(self)(Struct(dict(self.struct.fields)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and type(self) is type(other) and self.struct == other.struct

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, fields {sorted(self.struct.fields)}>"


@dataclass(frozen=True)
class _Codec(Generic[T]):
    """How a Python value lies in a field."""

    wire_types: tuple[WireType, ...]
    load: Callable[[WireType, Any], T]
    store: Callable[[T], tuple[WireType, Any]]


def _plain(wire_type: WireType) -> _Codec[Any]:
    return _Codec((wire_type,), lambda _, value: value, lambda value: (wire_type, value))


def _load_text(_: WireType, value: bytes) -> str:
    # Names that are not UTF-8 must survive a rewrite too.
    return value.decode("utf-8", "surrogateescape")


_BOOL: _Codec[bool] = _Codec(
    (WireType.TRUE, WireType.FALSE),
    lambda wire_type, _: wire_type is WireType.TRUE,
    lambda value: (WireType.TRUE if value else WireType.FALSE, None),
)
_I16: _Codec[int] = _plain(WireType.I16)
_I32: _Codec[int] = _plain(WireType.I32)
_I64: _Codec[int] = _plain(WireType.I64)
_BINARY: _Codec[bytes] = _plain(WireType.BINARY)
_TEXT: _Codec[str] = _Codec(
    (WireType.BINARY,), _load_text, lambda value: (WireType.BINARY, value.encode("utf-8", "surrogateescape"))
)

RecordT = TypeVar("RecordT", bound=Record)


def _nested(record: type[RecordT]) -> _Codec[RecordT]:
    return _Codec(
        (WireType.STRUCT,),
        lambda _, value: record(value),
        lambda value: (WireType.STRUCT, value.struct),
    )


def _list_of(codec: _Codec[T]) -> _Codec[list[T]]:
    (element_type,) = codec.wire_types

    def load(_: WireType, value: ThriftList) -> list[T]:
        # Some writers give an empty list the element type 0 or any other.
        if value.elements and value.element_type is not element_type:
            raise ParquetFormatError(
                f"a list has elements of type {value.element_type.name}, not {element_type.name}"
            )
        return [codec.load(element_type, element) for element in value.elements]

    def store(values: list[T]) -> tuple[WireType, Any]:
        return WireType.LIST, ThriftList(element_type, [codec.store(value)[1] for value in values])

    return _Codec((WireType.LIST,), load, store)


class _Field(Generic[T]):
    """A field of a record: reading checks its type, writing keeps its place or the order of ids."""

    def __init__(self, field_id: int, codec: _Codec[T]) -> None:
        self.field_id = field_id
        self.codec = codec

    def __set_name__(self, owner: type[Record], name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    def _load(self, record: Record) -> T | None:
        entry = record.struct.fields.get(self.field_id)
        if entry is None:
            return None
        wire_type, value = entry
        if wire_type not in self.codec.wire_types:
            raise ParquetFormatError(f"{self.name}: has the Thrift type {wire_type.name}")
        try:
            return self.codec.load(wire_type, value)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"{self.name}: {error}") from None

    def _store(self, record: Record, value: T | None) -> None:
        fields = record.struct.fields
        if value is None:
            fields.pop(self.field_id, None)
            return
        is_new = self.field_id not in fields
        fields[self.field_id] = self.codec.store(value)
        if is_new and any(field_id > self.field_id for field_id in fields):
            record.struct.fields = dict(sorted(fields.items()))


class Optional(_Field[T]):
    """An optional field; None where it is not set, and setting None removes it."""

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T | None: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T | None:
        """Return the value of the field in a record."""
        return self if record is None else self._load(record)

    def __set__(self, record: Record, value: T | None) -> None:
        """Set the field in a record, or remove it."""
        self._store(record, value)


class Required(_Field[T]):
    """A required field; reading one that is not set raises `ParquetFormatError`."""

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T:
        """Return the value of the field in a record."""
        if record is None:
            return self
        value = self._load(record)
        if value is None:
            raise ParquetFormatError(f"{self.name}: is missing")
        return value

    def __set__(self, record: Record, value: T) -> None:
        """Set the field in a record."""
        self._store(record, value)


# --- Encryption (spec 5.2, 5.4) ----------------------------------------------------------------------------


class Aes(Record):
    """AesGcmV1 and AesGcmCtrV1, which have the same fields."""

    aad_prefix = Optional(1, _BINARY)
    aad_file_unique = Optional(2, _BINARY)
    supply_aad_prefix = Optional(3, _BOOL)


class EncryptionAlgorithm(Record):
    """Union of the algorithms: exactly one is set."""

    aes_gcm_v1 = Optional(1, _nested(Aes))
    aes_gcm_ctr_v1 = Optional(2, _nested(Aes))


class FileCryptoMetaData(Record):
    """What comes before an encrypted footer."""

    encryption_algorithm = Required(1, _nested(EncryptionAlgorithm))
    key_metadata = Optional(2, _BINARY)


class EncryptionWithFooterKey(Record):
    """Marks a column that is encrypted with the footer key."""


class EncryptionWithColumnKey(Record):
    """Marks a column that is encrypted with a key of its own."""

    path_in_schema = Required(1, _list_of(_TEXT))
    key_metadata = Optional(2, _BINARY)


class ColumnCryptoMetaData(Record):
    """Union: exactly one is set."""

    encryption_with_footer_key = Optional(1, _nested(EncryptionWithFooterKey))
    encryption_with_column_key = Optional(2, _nested(EncryptionWithColumnKey))


# --- Footer ------------------------------------------------------------------------------------------------


class KeyValue(Record):
    """A pair of the application's own metadata."""

    key = Required(1, _TEXT)
    value = Optional(2, _TEXT)


class SchemaElement(Record):
    """A node of the schema; a leaf has no children."""

    type = Optional(1, _I32)
    name = Required(4, _TEXT)
    num_children = Optional(5, _I32)


class ColumnMetaData(Record):
    """What a footer says of a column chunk; offsets are from the start of the file, sizes in bytes."""

    type = Required(1, _I32)
    path_in_schema = Required(3, _list_of(_TEXT))
    codec = Required(4, _I32)
    num_values = Required(5, _I64)
    total_uncompressed_size = Required(6, _I64)
    total_compressed_size = Required(7, _I64)
    data_page_offset = Required(9, _I64)
    index_page_offset = Optional(10, _I64)
    dictionary_page_offset = Optional(11, _I64)
    bloom_filter_offset = Optional(14, _I64)
    bloom_filter_length = Optional(15, _I32)

    SENSITIVE_FIELD_IDS: ClassVar[tuple[int, ...]] = (12, 13, 14, 15, 16, 17)
    """What a plaintext footer must not show of an encrypted column (spec 5.5): statistics, page encoding
    statistics, Bloom filter offset and length, size statistics, geospatial statistics."""


class ColumnChunk(Record):
    """A column chunk: where it lies, and how it is encrypted."""

    file_path = Optional(1, _TEXT)
    file_offset = Optional(2, _I64)
    meta_data = Optional(3, _nested(ColumnMetaData))
    offset_index_offset = Optional(4, _I64)
    offset_index_length = Optional(5, _I32)
    column_index_offset = Optional(6, _I64)
    column_index_length = Optional(7, _I32)
    crypto_metadata = Optional(8, _nested(ColumnCryptoMetaData))
    encrypted_column_metadata = Optional(9, _BINARY)


class RowGroup(Record):
    """A row group; `total_byte_size` is without compression and without framing."""

    columns = Required(1, _list_of(_nested(ColumnChunk)))
    total_byte_size = Required(2, _I64)
    num_rows = Required(3, _I64)
    file_offset = Optional(5, _I64)
    total_compressed_size = Optional(6, _I64)
    ordinal = Optional(7, _I16)


class FileMetaData(Record):
    """The footer."""

    version = Required(1, _I32)
    schema = Required(2, _list_of(_nested(SchemaElement)))
    num_rows = Required(3, _I64)
    row_groups = Required(4, _list_of(_nested(RowGroup)))
    key_value_metadata = Optional(5, _list_of(_nested(KeyValue)))
    created_by = Optional(6, _TEXT)
    encryption_algorithm = Optional(8, _nested(EncryptionAlgorithm))
    footer_signing_key_metadata = Optional(9, _BINARY)


# --- Pages, indexes, Bloom filters -------------------------------------------------------------------------


class DataPageHeader(Record):
    """Header of a data page V1."""

    num_values = Required(1, _I32)


class DictionaryPageHeader(Record):
    """Header of a dictionary page."""

    num_values = Required(1, _I32)


class DataPageHeaderV2(Record):
    """Header of a data page V2."""

    num_values = Required(1, _I32)


class PageHeader(Record):
    """Header of a page; `compressed_page_size` is the length in bytes of what follows it."""

    type = Required(1, _I32)
    uncompressed_page_size = Required(2, _I32)
    compressed_page_size = Required(3, _I32)
    crc = Optional(4, _I32)
    data_page_header = Optional(5, _nested(DataPageHeader))
    dictionary_page_header = Optional(7, _nested(DictionaryPageHeader))
    data_page_header_v2 = Optional(8, _nested(DataPageHeaderV2))

    DATA_PAGE: ClassVar[int] = 0
    INDEX_PAGE: ClassVar[int] = 1
    DICTIONARY_PAGE: ClassVar[int] = 2
    DATA_PAGE_V2: ClassVar[int] = 3


class PageLocation(Record):
    """Where a data page lies; the size is that of header and page together."""

    offset = Required(1, _I64)
    compressed_page_size = Required(2, _I32)
    first_row_index = Required(3, _I64)


class OffsetIndex(Record):
    """Where the data pages of a chunk lie."""

    page_locations = Required(1, _list_of(_nested(PageLocation)))


class BloomFilterHeader(Record):
    """Header of a Bloom filter; the bitset of `num_bytes` bytes follows it."""

    num_bytes = Required(1, _I32)
