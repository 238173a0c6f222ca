"""The Thrift structures of Parquet, as records with the fields that are known.

Field ids are those of parquet.thrift (spec 5.2 to 5.5 for the ones about encryption).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift import (
    Entry,
    Struct,
    Structs,
    ThriftList,
    WireType,
    read_struct,
    read_varint,
    write_value,
)

# --- Records: typed views on Thrift structs, which keep the fields that they do not know ---
# A record keeps the struct with all its fields, known and unknown, and reads and writes the ones it knows.

T = TypeVar("T")


class Record:
    """A typed view on a Thrift struct; subclasses list the fields that are known.

    To compare two, compare what `serialise` returns: `==` says only whether they are one object.
    """

    __slots__ = ("struct",)

    PATH: ClassVar[Sequence[int] | None] = None
    """Ids of fields, from the outermost inwards, whose structs are found on the way; see `read_struct`."""

    def __init__(self, struct: Struct | None = None) -> None:
        self.struct = Struct() if struct is None else struct

    @classmethod
    def read(
        cls, data: bytes | bytearray | memoryview, offset: int = 0, max_memory: int | None = None
    ) -> tuple[Self, int]:
        """Read the structure at `offset`; returns it and the offset of the first byte after it."""
        return cls._read(data, offset, cls.PATH, max_memory)

    @classmethod
    def read_outline(cls, data: bytes | bytearray | memoryview) -> tuple[Self, int]:
        """Read the structure that `data` begins with; all that lies in its fields is only passed over."""
        return cls._read(data, 0, None, None)

    @classmethod
    def _read(
        cls, data: bytes | bytearray | memoryview, offset: int, path: Sequence[int] | None, max_memory: int | None
    ) -> tuple[Self, int]:
        try:
            struct, end = read_struct(data, offset, path, max_memory)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"{cls.__name__}: {error}") from None
        return cls(struct), end

    def bytes_of(self, field: Optional[Any]) -> bytes | None:
        """Return the bytes of a field's type and value; None where it is not set."""
        entry = self.struct.entry_bytes(field.field_id)
        return None if entry is None else bytes((entry[0],)) + entry[1]

    def serialise(self) -> bytes:
        """Return the bytes of the structure, unknown fields included."""
        return self.struct.as_bytes()

    def shallow_copy(self) -> Self:
        """Return a copy whose fields can be set without changing this one; what is in them is shared."""
        return type(self)(self.struct.copy())

    def fields_of_other_types(self) -> list[str]:
        """Return the names of fields that are there with another type than ours, and so are not read."""
        known = self._known_types()
        return [
            f"{type(self).__name__}.{known[field_id][0]}"
            for field_id, wire_type in self.struct.types().items()
            if field_id in known and wire_type not in known[field_id][1]
        ]

    @classmethod
    @functools.cache
    def _known_types(cls) -> dict[int, tuple[str, tuple[WireType, ...]]]:
        fields = {name: field for name, field in vars(cls).items() if isinstance(field, Optional)}
        return {field.field_id: (name, field.codec.wire_types) for name, field in fields.items()}


@dataclass(frozen=True)
class _Codec(Generic[T]):
    """How a Python value lies in a field."""

    wire_types: tuple[WireType, ...]
    load: Callable[[WireType, Any], T]
    store: Callable[[T], Entry]


def _plain(wire_type: WireType) -> _Codec[Any]:
    return _Codec((wire_type,), lambda _, value: value, lambda value: (wire_type, value))


def _load_text(_: WireType, value: bytes) -> str:
    # Names that are not UTF-8 must survive a rewrite too.
    return value.decode("utf-8", "surrogateescape")


BOOL: _Codec[bool] = _Codec(
    (WireType.TRUE, WireType.FALSE),
    lambda wire_type, _: wire_type is WireType.TRUE,
    lambda value: (WireType.TRUE if value else WireType.FALSE, None),
)
I16: _Codec[int] = _plain(WireType.I16)
I32: _Codec[int] = _plain(WireType.I32)
I64: _Codec[int] = _plain(WireType.I64)
BINARY: _Codec[bytes] = _plain(WireType.BINARY)
TEXT: _Codec[str] = _Codec(
    (WireType.BINARY,), _load_text, lambda value: (WireType.BINARY, value.encode("utf-8", "surrogateescape"))
)

RecordT = TypeVar("RecordT", bound=Record)


def nested(record: type[RecordT]) -> _Codec[RecordT]:
    """Return how a record lies in a field."""
    return _Codec(
        (WireType.STRUCT,), lambda _, value: record(value), lambda value: (WireType.STRUCT, value.struct)
    )


class Records(Sequence[RecordT]):
    """The records of a long list, each of which is made when it is asked for, as is its struct if only located."""

    __slots__ = ("_record", "_structs")

    def __init__(self, record: type[RecordT], structs: Structs | list[Struct]) -> None:
        self._record = record
        self._structs = structs

    def __len__(self) -> int:
        return len(self._structs)

    def __getitem__(self, position: Any) -> Any:
        structs = self._structs
        if isinstance(position, slice):
            return [self[number] for number in range(len(self))[position]]
        if isinstance(structs, list):
            return self._record(structs[position])
        return self._record(structs.read(position, self._record.PATH))

    def __iter__(self) -> Iterator[RecordT]:
        return map(self.__getitem__, range(len(self._structs)))

    def passing(self) -> Iterator[RecordT]:
        """Yield the records; structs that are read for this are not kept."""
        structs = self._structs
        return map(self._record, structs if isinstance(structs, list) else structs.passing())


def records_of(record: type[RecordT]) -> _Codec[Sequence[RecordT]]:
    """Return how a long list of records lies in a field; see `Records`."""
    whole = list_of(nested(record))

    def load(wire_type: WireType, value: ThriftList) -> Sequence[RecordT]:
        if value.element_type is WireType.STRUCT:
            return Records(record, value.elements)
        return whole.load(wire_type, value)

    return _Codec(whole.wire_types, load, lambda values: whole.store(list(values)))


def list_of(codec: _Codec[T]) -> _Codec[list[T]]:
    """Return how a list of values lies in a field."""
    (element_type,) = codec.wire_types

    def load(_: WireType, value: ThriftList) -> list[T]:
        # Some writers give an empty list the element type 0 or any other.
        if value.elements and value.element_type is not element_type:
            raise ParquetFormatError(
                f"a list has elements of type {value.element_type.name}, not {element_type.name}"
            )
        return [codec.load(element_type, element) for element in value.elements]

    def store(values: list[T]) -> Entry:
        return WireType.LIST, ThriftList(element_type, [codec.store(value)[1] for value in values])

    return _Codec((WireType.LIST,), load, store)


class Optional(Generic[T]):
    """An optional field of a record; None where it is not set, and setting None removes it.

    Writing keeps its place or the order of ids. A field of another type is one that we do not know: not read, and
    kept, as code that Thrift generates does. In fields that say what is encrypted, and how, it is refused: an
    encrypted file must not look like one that is not, or like one with another AAD.
    """

    def __init__(self, field_id: int, codec: _Codec[T], *, refuses_other_types: bool = False) -> None:
        self.field_id = field_id
        self.codec = codec
        self.refuses_other_types = refuses_other_types

    def __set_name__(self, owner: type[Record], name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T | None: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T | None:
        """Return the value of the field in a record."""
        if record is None:
            return self
        codec = self.codec
        try:
            entry = record.struct.entry(self.field_id, codec.wire_types)
            if entry is None:
                return None
            wire_type, value = entry
            if wire_type in codec.wire_types:
                return codec.load(wire_type, value)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"{self.name}: {error}") from None
        if self.refuses_other_types:
            raise ParquetFormatError(f"{self.name}: has the Thrift type {wire_type.name}")
        return None

    def __set__(self, record: Record, value: T | None) -> None:
        """Set the field in a record, or remove it."""
        record.struct.set_entry(self.field_id, None if value is None else self.codec.store(value))


class Required(Optional[T]):
    """A required field; reading one that is not set, or has another type, raises `ParquetFormatError`."""

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T:
        """Return the value of the field in a record."""
        value = super().__get__(record, owner)
        if value is None:
            raise ParquetFormatError(f"{self.name}: is missing")
        return value


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

    def has_path(self, path: tuple[str, ...]) -> bool:
        """Return whether it is about a column with this path."""
        return _has_path(self, EncryptionWithColumnKey.path_in_schema, path)


def usual_key_metadata(crypto_metadata: bytes, path: tuple[str, ...]) -> bytes | None:
    """Return the key metadata of a column with this path and a key of its own, from its `ColumnCryptoMetaData`.

    None if the bytes are not those that nearly all writers write: the general reader is needed.
    """
    # A file has thousands of columns, and comparing is faster than reading: field 2 of the union, with the path
    # and the key metadata.
    before = b"\x2c\x19" + path_bytes(path) + b"\x18"
    if not crypto_metadata.startswith(before) or crypto_metadata[-2:] != b"\0\0":
        return None
    length, start = read_varint(crypto_metadata, len(before))
    return crypto_metadata[start:-2] if start + length == len(crypto_metadata) - 2 else None


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


@functools.lru_cache(maxsize=4096)
def path_bytes(path: tuple[str, ...]) -> bytes:
    """Return the bytes that metadata has for the path of a column, as all writers write it."""
    names = [name.encode("utf-8", "surrogateescape") for name in path]
    return write_value(WireType.LIST, ThriftList(WireType.BINARY, names))


def _has_path(record: Record, field: Required[list[str]], path: tuple[str, ...]) -> bool:
    stored = record.struct.entry_bytes(field.field_id)
    return stored == (WireType.LIST, path_bytes(path)) or tuple(field.__get__(record, type(record))) == path


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

    def has_path(self, path: tuple[str, ...]) -> bool:
        """Return whether it is the metadata of a column with this path."""
        return _has_path(self, ColumnMetaData.path_in_schema, path)


class Statistics(Record):
    """The least and the greatest value of a chunk, in the plain encoding, and how many values are null."""

    null_count = Optional(3, I64)
    max_value = Optional(5, BINARY)
    min_value = Optional(6, BINARY)


class ChunkStatistics(Record):
    """The part of `ColumnMetaData` that says which values a chunk has; few readers need it."""

    statistics = Optional(12, nested(Statistics))


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

    version = Required(1, I32)
    schema = Required(2, list_of(nested(SchemaElement)))
    num_rows = Required(3, I64)
    row_groups = Required(4, list_of(nested(RowGroup)))
    key_value_metadata = Optional(5, list_of(nested(KeyValue)))
    created_by = Optional(6, TEXT)
    encryption_algorithm = Optional(8, nested(EncryptionAlgorithm), refuses_other_types=True)
    footer_signing_key_metadata = Optional(9, BINARY, refuses_other_types=True)

    @classmethod
    def read_whole(cls, data: bytes | bytearray | memoryview, max_memory: int | None = None) -> tuple[Self, int]:
        """Read a footer whose chunks will all be looked at: one pass finds them and their metadata."""
        return cls._read(data, 0, (*cls.PATH, *ColumnChunk.PATH), max_memory)


# --- Pages, indexes, Bloom filters -------------------------------------------------------------------------


class DataPageHeader(Record):
    """Header of a data page V1."""

    num_values = Required(1, I32)


class PageHeader(Record):
    """Header of a page; `compressed_page_size` is the length in bytes of what follows it."""

    type = Required(1, I32)
    uncompressed_page_size = Required(2, I32)
    compressed_page_size = Required(3, I32)
    crc = Optional(4, I32)
    data_page_header = Optional(5, nested(DataPageHeader))

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
