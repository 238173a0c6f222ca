"""The one value that a column has in a file, on which the keys of the file depend.

The value comes from the statistics in the footer, so no page is read. The minimum and the maximum of each row
group must be equal, and no value may be null. A writer that shortens long values makes the two differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import (
    ChunkStatistics,
    ColumnMetaData,
    FileMetaData,
    SchemaElement,
    Statistics,
)
from parquet_keytools.secret_bytes import SecretBytes

_INT32, _INT64, _BYTE_ARRAY = 1, 2, 6
_CONVERTED_TYPE, _LOGICAL_TYPE = 6, 10


@dataclass(frozen=True)
class ColumnValue:
    """What a column says about the value of its file.

    Attributes:
        value: The value; None if the file has no rows, or if there is a problem.
        problem: Why the column gives no value; empty if it gives one, or has no rows.
    """

    value: str | None = None
    problem: str = ""


def column_value(footer: Footer, name: str, deks: Mapping[tuple[str, ...], SecretBytes]) -> ColumnValue | None:
    """Return the value of a top-level column; None if its metadata is encrypted with a key that is not given.

    Raises:
        DecryptionError: The metadata of a chunk does not authenticate.
        ParquetFormatError: The metadata of a chunk is not valid.
    """
    column = next((column for column in footer.columns if column.path == (name,)), None)
    if column is None:
        return ColumnValue(problem=f"there is no column {name!r} at the top level")
    dek = deks.get(column.path)
    if column.encryption is ColumnEncryption.COLUMN_KEY and dek is None:
        return None
    cipher = footer.cipher_of(column, dek)
    chunks = [footer.chunk_metadata(ordinal, column, cipher) for ordinal in range(len(footer.row_groups))]
    return value_of_chunks(name, footer.metadata.schema, column.ordinal, chunks)


def values_in_footer(data: bytes, names: Iterable[str]) -> dict[str, ColumnValue]:
    """Return the values of top-level columns, from the bytes of a plaintext or decrypted footer.

    Raises:
        ParquetFormatError: These are not the bytes of a footer.
    """
    footer, _ = FileMetaData.read(data)
    return {name: _value_in(footer, name) for name in names}


def _value_in(footer: FileMetaData, name: str) -> ColumnValue:
    chunks: list[ColumnMetaData] = []
    position = 0
    for group in footer.row_groups:
        for ordinal, chunk in enumerate(group.columns):
            crypto = chunk.crypto_metadata
            own_key = None if crypto is None else crypto.encryption_with_column_key
            if own_key is not None and tuple(own_key.path_in_schema) == (name,):
                return ColumnValue(problem=f"column {name!r} has a key of its own, which is not known here")
            if chunk.meta_data is not None and tuple(chunk.meta_data.path_in_schema) == (name,):
                position = ordinal
                chunks.append(chunk.meta_data)
    if footer.row_groups and not chunks:
        return ColumnValue(problem=f"there is no column {name!r} at the top level")
    return value_of_chunks(name, footer.schema, position, chunks) if chunks else ColumnValue()


def value_of_chunks(
    name: str, schema: Sequence[SchemaElement], ordinal: int, chunks: Iterable[ColumnMetaData]
) -> ColumnValue:
    """Return the value of a top-level column."""
    element = [node for node in schema[1:] if not node.num_children][ordinal]
    is_plain = all(element.struct.entry(field) is None for field in (_CONVERTED_TYPE, _LOGICAL_TYPE))
    if element.type != _BYTE_ARRAY and not (element.type in (_INT32, _INT64) and is_plain):
        return ColumnValue(problem=f"column {name!r} has neither strings nor integers of 32 or 64 bits")
    found: set[bytes] = set()
    for chunk in chunks:
        try:
            number, stated = chunk.num_values, ChunkStatistics(chunk.struct).statistics or Statistics()
            nulls, least, greatest = stated.null_count, stated.min_value, stated.max_value
        except ParquetFormatError:
            return ColumnValue(problem=f"the statistics of column {name!r} are damaged")
        if number == 0:
            continue
        if nulls:
            return ColumnValue(problem=f"column {name!r} has nulls")
        if nulls is None or least is None or greatest is None:
            return ColumnValue(problem=f"column {name!r} has no complete statistics")
        found |= {bytes(least), bytes(greatest)}
    if len(found) > 1:
        return ColumnValue(problem=f"column {name!r} has several values")
    for data in found:
        if element.type != _BYTE_ARRAY:
            return ColumnValue(str(int.from_bytes(data, "little", signed=True)))
        try:
            return ColumnValue(data.decode())
        except UnicodeDecodeError:
            return ColumnValue(problem=f"column {name!r} has a value that is not UTF-8")
    return ColumnValue()
