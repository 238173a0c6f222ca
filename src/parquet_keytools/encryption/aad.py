"""Additional authenticated data: what binds a module to its place in its file (spec 4.4)."""

from __future__ import annotations

import struct
from enum import IntEnum

from parquet_keytools.errors import FormatLimitError

MAX_ORDINAL = 32_767
"""Ordinals are signed 16-bit integers; one that wrapped around would make two modules share an AAD."""

MAX_COUNT = 32_767
"""How many row groups, columns, and pages of a chunk are written: other writers and readers count no further."""

FILE_UNIQUE_LENGTH_BYTES = 8
"""Length of the file unique that we write, as Arrow and parquet-java do; read files may have any."""


class ModuleType(IntEnum):
    """The type byte of a module (spec 4.4.2)."""

    FOOTER = 0
    COLUMN_META_DATA = 1
    DATA_PAGE = 2
    DICTIONARY_PAGE = 3
    DATA_PAGE_HEADER = 4
    DICTIONARY_PAGE_HEADER = 5
    COLUMN_INDEX = 6
    OFFSET_INDEX = 7
    BLOOM_FILTER_HEADER = 8
    BLOOM_FILTER_BITSET = 9

    @property
    def title(self) -> str:
        """The name for people, such as `data page header`."""
        return self.name.lower().replace("_", " ")


_HAS_PAGE_ORDINAL = (ModuleType.DATA_PAGE, ModuleType.DATA_PAGE_HEADER)


def module_aad(
    file_aad: bytes,
    module_type: ModuleType,
    row_group_ordinal: int | None = None,
    column_ordinal: int | None = None,
    page_ordinal: int | None = None,
) -> bytes:
    """Return the AAD of one module (spec 4.4.2).

    Args:
        file_aad: AAD prefix, if any, and then the file unique.
        module_type: Its type; says which of the ordinals belong to it.
        row_group_ordinal: Of its row group; for all modules but the footer.
        column_ordinal: Position of its leaf in the file's schema; for all modules but the footer.
        page_ordinal: Position among the data pages of its chunk; for data pages and their headers.

    Raises:
        FormatLimitError: An ordinal does not fit into 16 bits with a sign.
    """
    ordinals: tuple[int | None, ...]
    if module_type is ModuleType.FOOTER:
        ordinals = ()
    elif module_type in _HAS_PAGE_ORDINAL:
        ordinals = (row_group_ordinal, column_ordinal, page_ordinal)
    else:
        ordinals = (row_group_ordinal, column_ordinal)
    for ordinal in ordinals:
        if ordinal is None or not 0 <= ordinal <= MAX_ORDINAL:
            raise FormatLimitError(
                f"{module_type.title}: ordinal {ordinal} is not in 0..{MAX_ORDINAL}.",
                hint="Write fewer row groups, columns or pages into one file.",
            )
    return file_aad + struct.pack(f"<B{len(ordinals)}h", module_type, *ordinals)
