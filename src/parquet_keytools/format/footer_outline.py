"""Reads the outer structs of a footer, and keeps the bytes of the rest; see `thrift_outline`.

What a footer has beside its column chunks is the same in thousands of files of a data set: schema, key-value
metadata, column orders. And of thousands of chunks most work looks at a few. So its lists are their bytes until
somebody looks at an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift_compact import LAST_WIRE_TYPE, WIRE_TYPES, ThriftReader
from parquet_keytools.format.thrift_grammar import CRYPTO_GROUP, usual
from parquet_keytools.format.thrift_outline import Outliner, UnreadStruct, outlined
from parquet_keytools.format.thrift_skim import MAX_FIELD_ID, Skimmer, Spans, skimmer_of
from parquet_keytools.format.thrift_values import INTEGER_BITS, Struct, ThriftList, WireType, varint

_LEVELS = 4
"""Footer, row groups in their list, and column chunks in theirs."""


def read_footer_outline(data: bytes, offset: int, row_groups_field_id: int) -> tuple[Struct, int]:
    """Read the struct of a footer: its row groups down to column chunks, and no other list.

    Args:
        data: The bytes; what is returned holds on to them.
        offset: Where the struct begins.
        row_groups_field_id: The id of the field that has them.

    Returns:
        The struct, and the offset of the first byte after it.

    Raises:
        ParquetFormatError: As `read_struct`, for what is not read, too.
    """
    return _FooterOutliner(data, offset, row_groups_field_id).whole_struct()


class _FooterOutliner(Outliner):
    """As the outliner, for a footer."""

    __slots__ = ("crypto", "row_groups_field_id")

    def __init__(self, data: bytes, offset: int, row_groups_field_id: int) -> None:
        super().__init__(data, offset, _LEVELS)
        self.row_groups_field_id = row_groups_field_id
        self.crypto: dict[int, bytes] = {}

    def struct(self, depth: int) -> Struct:
        """Read a struct; of that of the footer itself, pass over lists."""
        if depth:
            return super().struct(depth)
        fields: dict[int, tuple[WireType, Any]] = {}
        field_id = 0
        data = self.data
        while header := data[self.offset]:
            self.offset += 1
            field_id = field_id + (header >> 4) if header > 0x0F else self.zigzag(16)
            code = header & 0x0F
            if code == 0 or code > LAST_WIRE_TYPE:
                raise ParquetFormatError(f"Thrift type {code} does not exist")
            wire_type = WIRE_TYPES[code]
            value: Any = None
            if wire_type is WireType.LIST and field_id != self.row_groups_field_id:
                start = self.offset
                self.offset = pass_known_list(self.skimmer)
                value = UnreadList(data[start : self.offset])
            elif wire_type is WireType.I32 or wire_type is WireType.I64:
                value = self.varint(64)
                if value >> INTEGER_BITS[wire_type]:
                    raise ParquetFormatError(f"a Thrift integer of type {wire_type.name} is too long")
                value = (value >> 1) ^ -(value & 1)
            elif wire_type is not WireType.TRUE and wire_type is not WireType.FALSE:
                value = self.value(wire_type, 1)
            if field_id in fields:
                raise ParquetFormatError(f"Thrift field {field_id} comes twice")
            if field_id > MAX_FIELD_ID:
                raise ParquetFormatError(f"Thrift field {field_id} is out of range")
            fields[field_id] = (wire_type, value)
        self.offset += 1
        return Struct(fields)

    def unread_structs(self, count: int, depth: int) -> ThriftList:
        """Pass over column chunks."""
        skimmer = self.skimmer
        places = pass_chunks(skimmer, count, self.crypto)
        if places is None:
            return super().unread_structs(count, depth)
        self.offset = skimmer.offset
        return UnreadChunks(self.data, places)


def _read_chunks(data: bytes, bounds: Sequence[int]) -> list[Struct]:
    return outlined(skimmer_of(data, bounds[0]), len(bounds) - 1, _LEVELS)[0]


# --- Lists that are their bytes ---


_KNOWN_BYTES = 64 * 1024
_MOST_KNOWN = 8

_known: tuple[bytes, ...] = ()


def pass_known_list(skimmer: Skimmer) -> int:
    """Pass over a list of a footer, at once if its bytes are those of one of the last lists; return where it ends.

    That they were there before says no more than that they are a list, whoever wrote them.
    """
    global _known
    data, start = skimmer.data, skimmer.offset
    for known in _known:
        if data.startswith(known, start):
            return start + len(known)
    skimmer.pass_list(1)
    passed = data[start : min(skimmer.offset, start + _KNOWN_BYTES)]
    if start + len(passed) == skimmer.offset and len(passed) > 1:
        _known = (passed, *_known[: _MOST_KNOWN - 1])
    return skimmer.offset


CutChunk = tuple[bytes, bytes | None, bytes]
"""The bytes of a column chunk: before its crypto metadata, those of it (None where it has none), and after."""


class UnreadList(ThriftList):
    """A list whose bytes are valid; it is read once somebody takes its elements, to change them perhaps."""

    __slots__ = ("_written",)

    def __init__(self, written: bytes) -> None:
        """Make one of the bytes of a list, its header included."""
        self._written: bytes | None = written

    def as_bytes(self) -> bytes | None:
        """Return the bytes; None once somebody took the elements."""
        return self._written

    def __getattr__(self, name: str) -> Any:
        # Python comes here for what is not set yet.
        written = self._written if name in ("elements", "element_type") else None
        if written is not None:
            self.element_type, self.elements = self._read(written)
            self._written = None
        elif name not in ("elements", "element_type"):
            raise AttributeError(name)
        # Else another thread has just read them: footers are shared.
        return object.__getattribute__(self, name)

    def _read(self, written: bytes) -> tuple[WireType, list[Any]]:
        read = ThriftReader(written, 0).list(1)
        return read.element_type, read.elements

    def __eq__(self, other: object) -> bool:
        # Bytes that nobody took elements of are those that were read, never what a serialiser made.
        own = self.as_bytes()
        return (own is not None and isinstance(other, UnreadList) and own == other.as_bytes()) or (
            super().__eq__(other)
        )

    __hash__ = None


class UnreadChunks(UnreadList):
    """The column chunks of a row group.

    Attributes:
        crypto: The crypto metadata of each; None where it has no field of encryption. Equal ones are mostly one
            object in all row groups.
    """

    __slots__ = ("_bounds", "_data", "_modules", "crypto")

    def __init__(self, data: bytes, places: _ChunkPlaces) -> None:
        """Make one of the bytes of the footer, and what `pass_chunks` returns."""
        super().__init__(b"")
        self._data = data
        self._bounds, self._modules, self.crypto = places

    def __len__(self) -> int:
        return len(self.crypto)

    def as_bytes(self) -> bytes | None:
        """Return the bytes; None once somebody took the elements."""
        if self._written is None:
            return None
        header = bytes((len(self) << 4 | WireType.STRUCT,)) if len(self) < 15 else b"\xfc" + varint(len(self))
        return header + self._data[self._bounds[0] : self._bounds[-1]]

    def chunk(self, ordinal: int) -> Struct:
        """Return a chunk, to be looked at only."""
        if self._written is None:
            element: Struct = self.elements[ordinal]
            return element
        return _read_chunks(self._data, self._bounds[ordinal : ordinal + 2])[0]

    def module(self, ordinal: int) -> bytes | None:
        """Return the encrypted metadata of a chunk; None where it has to be looked for."""
        start = self._modules[ordinal]
        return self._data[start : self._bounds[ordinal + 1] - 1] if start and self._written is not None else None

    def cut(self) -> list[CutChunk] | None:
        """Return the bytes of the chunks, cut; None where they have to be read for that."""
        if self._written is None:
            return None
        data = self._data
        found: list[CutChunk] = []
        start = self._bounds[0]
        for end, module, crypto in zip(self._bounds[1:], self._modules, self.crypto, strict=True):
            if crypto is None:
                found.append((data[start:end], None, b""))
            else:
                # The struct's last byte ends the chunk; encrypted metadata has a header and one or two of length.
                after = end - 1 if not module else module - (2 if end - 1 - module < 0x80 else 3)
                if not data.startswith(crypto, before := after - len(crypto)):
                    return None
                found.append((data[start:before], crypto, data[after:end]))
            start = end
        return found

    def with_others(self, others: Sequence[bytes | None]) -> ThriftList | None:
        """Return the list, to be written only, with the bytes of others for some chunks; None as of `cut`."""
        if self._written is None:
            return None
        data, bounds = self._data, self._bounds
        spans = zip(others, bounds, bounds[1:], strict=False)
        return ThriftList(
            WireType.STRUCT, [data[start:end] if other is None else other for other, start, end in spans]
        )

    def _read(self, written: bytes) -> tuple[WireType, list[Any]]:
        return WireType.STRUCT, self._bare() or _read_chunks(self._data, self._bounds)

    def _bare(self) -> list[Any]:
        """Return the structs, if all have an offset, crypto metadata and encrypted metadata, and nothing else."""
        data, start = self._data, self._bounds[0]
        found: list[Any] = []
        for end, module, crypto in zip(self._bounds[1:], self._modules, self.crypto, strict=True):
            if crypto is None or not module:
                return []
            after = module - (2 if end - 1 - module < 0x80 else 3)
            before = after - len(crypto)
            # The first header says that no field lies before the crypto metadata but the offset. The second one is
            # not where it should be if the length that follows it takes more bytes than it needs.
            if data[before - 1] != _AFTER_OFFSET or data[after] != _ENCRYPTED[0]:
                return []
            spans: Spans = {
                2: (_I64, start + 1, before - 1, None),
                8: (_STRUCT, before, after, None),
                9: (_BINARY, after + 1, end - 1, None),
            }
            found.append(UnreadStruct(data, start, end, spans))
            start = end
        return found


_ChunkPlaces = tuple[list[int], list[int], list[bytes | None]]


def pass_chunks(skimmer: Skimmer, count: int, known: dict[int, bytes]) -> _ChunkPlaces | None:
    """Pass over the column chunks of a row group, if all are as writers write them.

    Args:
        skimmer: Stands where the first one begins; afterwards, where the last one ends.
        count: How many there are.
        known: Ordinal -> crypto metadata of the chunk in row groups before; what is new is put there.

    Returns:
        Where each begins, and where the last one ends; where its encrypted metadata begins, which ends with the
        chunk, or 0; and its crypto metadata. None where a chunk is another one: then the skimmer stays.
    """
    if not skimmer.uses_expression:
        return None
    match_chunk, match_crypto = usual()[3:]
    data = skimmer.data
    end = len(data)
    startswith = data.startswith
    at = skimmer.offset
    bounds = [at]
    modules = []
    all_crypto: list[bytes | None] = []
    for ordinal in range(count):
        crypto = known.get(ordinal)
        if crypto is not None and startswith(_NO_OFFSET, at) and startswith(crypto, at + len(_NO_OFFSET)):
            # The expression would match as much; most chunks after the first row group are like this.
            at += len(_NO_OFFSET) + len(crypto)
        else:
            found = match_chunk(data, at)
            if found is None:
                return None
            at = found.end()
            if found.lastindex != CRYPTO_GROUP:
                crypto = None
            else:
                if crypto is None or not startswith(crypto, at):
                    found = match_crypto(data, at)
                    if found is None:
                        return None
                    after = found.end()
                    if found.lastindex:
                        after = _end_of_text(data, after)
                        if not startswith(_TWO_STOPS, after):
                            return None
                        after += len(_TWO_STOPS)
                    crypto = known[ordinal] = data[at:after]
                at += len(crypto)
        module = 0
        if crypto is not None and startswith(_ENCRYPTED, at):
            module = at + 2
            if module >= end:
                return None
            length = data[at + 1]
            if length > 0x7F:
                if data[module] > 0x7F:
                    return None
                length = length & 0x7F | data[module] << 7
                module += 1
            at = module + length
        if at >= end or data[at]:
            return None
        at += 1
        bounds.append(at)
        modules.append(module)
        all_crypto.append(crypto)
    skimmer.offset = at
    return bounds, modules, all_crypto


_I64, _BINARY, _STRUCT = WireType.I64, WireType.BINARY, WireType.STRUCT
_AFTER_OFFSET = 0x6C
_NO_OFFSET = b"\x26\x00\x6c"
"""A chunk with the offset 0, as writers write it today, up to its crypto metadata."""
_TWO_STOPS = b"\0\0"
_ENCRYPTED = b"\x18"
"""The header of encrypted metadata, whose field follows that of crypto metadata."""


def _end_of_text(data: bytes, at: int) -> int:
    """Return where a text ends whose length takes one or two bytes; the end of all bytes for others."""
    end = len(data)
    if at + 2 > end:
        return end
    length = data[at]
    at += 1
    if length > 0x7F:
        if data[at] > 0x7F:
            return end
        length = length & 0x7F | data[at] << 7
        at += 1
    return min(at + length, end)
