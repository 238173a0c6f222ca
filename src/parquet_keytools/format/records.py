"""Records: typed views on Thrift structs, which keep the fields that they do not know.

A `Record` is a view: it keeps the struct with all its fields, known and unknown, and reads and writes the
ones it knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift import Entry, Struct, Structs, ThriftList, WireType, read_struct

T = TypeVar("T")


class Record:
    """A typed view on a Thrift struct; subclasses list the fields that are known."""

    __slots__ = ("struct",)

    PATH: ClassVar[Sequence[int] | None] = None
    """Ids of fields, from the outermost inwards, whose structs are found on the way; see `read_struct`."""

    def __init__(self, struct: Struct | None = None) -> None:
        self.struct = Struct() if struct is None else struct

    @classmethod
    def read(
        cls,
        data: bytes | bytearray | memoryview,
        offset: int = 0,
        max_memory: int | None = None,
        path: Sequence[int] | None = None,
    ) -> tuple[Self, int]:
        """Read the structure at `offset`; returns it and the offset of the first byte after it.

        Raises:
            ParquetFormatError: There is no Thrift struct there, or it takes more memory than `max_memory`.
        """
        return cls._read(data, offset, path or cls.PATH, max_memory)

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

    def bytes_of(self, field: _Field[Any]) -> bytes | None:
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
        fields = {name: field for name, field in vars(cls).items() if isinstance(field, _Field)}
        return {field.field_id: (name, field.codec.wire_types) for name, field in fields.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and type(self) is type(other) and self.struct == other.struct

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, fields {sorted(self.struct.types())}>"


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
    """The records of a list whose structs are read when they are asked for."""

    __slots__ = ("_record", "_structs")

    def __init__(self, record: type[RecordT], structs: Structs) -> None:
        self._record = record
        self._structs = structs

    def __len__(self) -> int:
        return len(self._structs)

    def __getitem__(self, position: Any) -> Any:
        return self._record(self._structs.read(position, self._record.PATH))

    def __iter__(self) -> Iterator[RecordT]:
        return map(self.__getitem__, range(len(self._structs)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def records_of(record: type[RecordT]) -> _Codec[Sequence[RecordT]]:
    """Return how a long list of records lies in a field: if its structs were only located, so are its records."""
    whole = list_of(nested(record))

    def load(wire_type: WireType, value: ThriftList) -> Sequence[RecordT]:
        if isinstance(value.elements, Structs):
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


class _Field(Generic[T]):
    """A field of a record; writing keeps its place or the order of ids.

    Where a field has another type than ours it is one that we do not know: not read, and kept, as code that Thrift
    generates does. Of the fields that say what is encrypted, and how, other types are refused: an encrypted file
    must not look like one that is not, or like one with another AAD.

    Args:
        field_id: Its id.
        codec: How its value lies there.
        refuses_other_types: Whether another type is an error.
    """

    def __init__(self, field_id: int, codec: _Codec[T], *, refuses_other_types: bool = False) -> None:
        self.field_id = field_id
        self.codec = codec
        self.refuses_other_types = refuses_other_types

    def __set_name__(self, owner: type[Record], name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    def value(self, record: Record) -> T | None:
        """Return the value of the field in a record."""
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

    def _store(self, record: Record, value: T | None) -> None:
        record.struct.set_entry(self.field_id, None if value is None else self.codec.store(value))


class Optional(_Field[T]):
    """An optional field; None where it is not set or has another type, and setting None removes it."""

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T | None: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T | None:
        """Return the value of the field in a record."""
        return self if record is None else self.value(record)

    def __set__(self, record: Record, value: T | None) -> None:
        """Set the field in a record, or remove it."""
        self._store(record, value)


class Required(_Field[T]):
    """A required field; reading one that is not set, or has another type, raises `ParquetFormatError`."""

    @overload
    def __get__(self, record: None, owner: type[Record]) -> Self: ...
    @overload
    def __get__(self, record: Record, owner: type[Record]) -> T: ...
    def __get__(self, record: Record | None, owner: type[Record]) -> Self | T:
        """Return the value of the field in a record."""
        if record is None:
            return self
        value = self.value(record)
        if value is None:
            raise ParquetFormatError(f"{self.name}: is missing")
        return value

    def __set__(self, record: Record, value: T) -> None:
        """Set the field in a record."""
        self._store(record, value)
