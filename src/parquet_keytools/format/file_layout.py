"""What lies where in a Parquet file: magic, footer, leaf columns (spec 5.4, 5.5)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from parquet_keytools.errors import DraftFormatError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData, SchemaElement
from parquet_keytools.format.thrift_compact import Struct, WireType

MAGIC = b"PAR1"
MAGIC_ENCRYPTED_FOOTER = b"PARE"
MAGIC_LENGTH = 4
TRAILER_LENGTH = 8
"""Length of the footer's length and the magic that end a file."""

TAIL_LENGTH = 64 * 1024
"""How many bytes of the end of a file are read at once, in the hope that the footer is among them."""

MAX_SCHEMA_DEPTH = 256
"""How deep groups of a schema may nest; keeps the paths of all leaves proportional to the schema's bytes."""

_BOOLEAN = (WireType.TRUE, WireType.FALSE)


@dataclass(frozen=True, slots=True)
class FooterBytes:
    """The footer as it lies in the file; nothing of it is authenticated.

    Attributes:
        is_encrypted: Whether the magic is PARE: FileCryptoMetaData and an encrypted footer.
        offset: Where the footer begins, in bytes from the start of the file.
        data: From there up to the footer's length, which is not included.
    """

    is_encrypted: bool
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LeafColumn:
    """A leaf of the schema.

    Attributes:
        path: Names from below the root to the leaf.
        ordinal: Position among the leaves, which is that of its chunk in every row group.
        top_level_position: Position, among the children of the root, of the one it lies under.
    """

    path: tuple[str, ...]
    ordinal: int
    top_level_position: int

    @property
    def dotted_path(self) -> str:
        """The path as people and configurations write it."""
        return ".".join(self.path)


def read_footer_bytes(source: ByteSource) -> FooterBytes:
    """Read the footer of a file, from its tail, by one read, or two where the footer is long.

    Raises:
        ParquetFormatError: The file is too short, or not a Parquet file, or its footer does not fit into it.
    """
    size = source.size_bytes
    if size < MAGIC_LENGTH + TRAILER_LENGTH:
        raise ParquetFormatError(f"{size} bytes are too few for a Parquet file.", path=source.path)
    tail_offset = size - min(size, TAIL_LENGTH)
    tail = source.read_at(tail_offset, size - tail_offset)
    magic = bytes(tail[-MAGIC_LENGTH:])
    if magic not in (MAGIC, MAGIC_ENCRYPTED_FOOTER):
        raise ParquetFormatError("the file does not end with PAR1 or PARE.", path=source.path)
    head = tail[:MAGIC_LENGTH] if tail_offset == 0 else source.read_at(0, MAGIC_LENGTH)
    if bytes(head) != magic:
        raise ParquetFormatError(
            f"the file ends with {magic.decode()} but does not begin with it.", path=source.path
        )
    (length,) = struct.unpack("<I", tail[-TRAILER_LENGTH:-MAGIC_LENGTH])
    end = size - TRAILER_LENGTH
    offset = end - length
    if length == 0 or offset < MAGIC_LENGTH:
        raise ParquetFormatError(
            f"a footer of {length} bytes does not fit into a file of {size} bytes.", path=source.path
        )
    data = tail[offset - tail_offset : end - tail_offset] if offset >= tail_offset else None
    if data is None:
        data = source.read_at(offset, length)
    return FooterBytes(magic == MAGIC_ENCRYPTED_FOOTER, offset, bytes(data))


def refuse_draft_crypto_metadata(metadata: FileCryptoMetaData) -> None:
    """Refuse the FileCryptoMetaData of the 2018 draft, which is another structure under the same magic.

    Raises:
        DraftFormatError: It has `encrypted_footer`, `footer_offset` or `iv_prefix`.
    """
    fields = metadata.struct.fields
    if _type_of(fields, 2) in _BOOLEAN or 4 in fields or 5 in fields:
        _refuse("2018", "its FileCryptoMetaData has encrypted_footer, footer_offset or iv_prefix")


def refuse_draft_footer(metadata: FileMetaData) -> None:
    """Refuse a plaintext footer of the 2019 draft, where field 9 is `signed_footer`.

    Raises:
        DraftFormatError: It has that field, or the key metadata in field 10.
    """
    fields = metadata.struct.fields
    if 8 in fields and (_type_of(fields, 9) in _BOOLEAN or (9 not in fields and 10 in fields)):
        _refuse("2019", "field 9 of its footer is signed_footer")


def _type_of(fields: dict[int, tuple[WireType, Struct]], field_id: int) -> WireType | None:
    entry = fields.get(field_id)
    return entry[0] if entry else None


def _refuse(year: str, reason: str) -> NoReturn:
    raise DraftFormatError(
        f"the file follows the {year} draft of the encryption specification ({reason}).",
        hint="That draft was never in force; write the file anew with a current writer.",
    )


def leaf_columns(schema: list[SchemaElement]) -> tuple[LeafColumn, ...]:
    """Return the leaves of a schema in the order of their chunks.

    Args:
        schema: The flattened schema of a footer: depth first, the root first.

    Raises:
        ParquetFormatError: The numbers of children do not fit the elements, or groups nest too deep.
    """
    if not schema:
        raise ParquetFormatError("the schema is empty.")
    leaves: list[LeafColumn] = []
    names: list[str] = []
    waiting = [schema[0].num_children or 0]  # For each open group, how many children are still to come.
    top_level_position = -1
    for element in schema[1:]:
        while waiting and waiting[-1] == 0:
            waiting.pop()
            del names[len(waiting) - 1 if waiting else 0 :]
        if not waiting or waiting[-1] < 0:
            raise ParquetFormatError("the schema has more elements than its groups have children.")
        waiting[-1] -= 1
        if len(waiting) == 1:
            top_level_position += 1
        children = element.num_children or 0
        if children:
            if element.type is not None:
                raise ParquetFormatError("an element of the schema is a group and a leaf at once.")
            if len(waiting) >= MAX_SCHEMA_DEPTH:
                raise ParquetFormatError(f"groups of the schema nest more than {MAX_SCHEMA_DEPTH} deep.")
            names.append(element.name)
            waiting.append(children)
        elif element.type is not None:
            leaves.append(LeafColumn((*names, element.name), len(leaves), top_level_position))
    if any(waiting):
        raise ParquetFormatError("a group of the schema has more children than elements follow.")
    return tuple(leaves)
