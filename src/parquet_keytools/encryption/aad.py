"""What a module is and where it belongs, and the AAD that binds it to that place in its file (spec 4.4)."""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import NamedTuple

from parquet_keytools.errors import DecryptionError, FormatLimitError

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


_FOOTER, _DATA_PAGE, _DATA_PAGE_HEADER = ModuleType.FOOTER, ModuleType.DATA_PAGE, ModuleType.DATA_PAGE_HEADER
_HAS_PAGE_ORDINAL = (_DATA_PAGE, _DATA_PAGE_HEADER)

_pack_two_ordinals = struct.Struct("<B2h").pack
_pack_three_ordinals = struct.Struct("<B3h").pack

_CHOSEN_BY_VALUES = (ModuleType.DATA_PAGE, ModuleType.DICTIONARY_PAGE)
"""Modules whose bytes are those of values; whoever has values written chooses them."""


_OTHERS_THAN_FOOTERS = tuple(ModuleType)[1:]


def module_behind(prefix: bytes, file_unique: bytes) -> ModuleType | None:
    """Return the type of the module whose AAD makes that of a footer; None where none does.

    The AAD of a footer ends with one byte 0, and so does that of other modules whose last ordinal is below 256. So
    the AAD of a data page is that of a footer whose file unique takes in what stands before the 0: whoever chooses
    values, and can write to the storage, could have a page pass for a footer. Of random bytes of such a length,
    less than 3 % look so.

    He can also move bytes from there to the AAD prefix, so that the file unique has 8 bytes again. Then only the
    end of both tells, and random bytes must not: pages are looked for alone, of row groups and columns below 256.
    Fewer than 2 in 100,000 files that store a prefix look so.

    Args:
        prefix: The AAD prefix; empty where there is none.
        file_unique: As the file stores it.
    """
    behind = file_unique[FILE_UNIQUE_LENGTH_BYTES:]
    for module_type in _OTHERS_THAN_FOOTERS if behind else ():
        if len(behind) == _length_behind(module_type) and behind[0] == module_type:
            return module_type
    if not prefix and len(file_unique) == FILE_UNIQUE_LENGTH_BYTES:
        return None
    whole = prefix + file_unique
    for module_type in _CHOSEN_BY_VALUES:
        behind = whole[FILE_UNIQUE_LENGTH_BYTES:][-_length_behind(module_type) :]
        # Ordinals are little-endian: these are their high bytes, but for that of the last one.
        if len(behind) == _length_behind(module_type) and behind[0] == module_type and not any(behind[2::2]):
            return module_type
    return None


def random_file_unique() -> bytes:
    """Return the file unique of a new file, which no reader takes for a part of another module's AAD.

    Random bytes alone would make 2 in 100,000 files that readers refuse unless they expect the prefix.
    """
    while True:
        file_unique = os.urandom(FILE_UNIQUE_LENGTH_BYTES)
        # All bytes looked at are at its end when a prefix is long enough; this one says nothing itself.
        if module_behind(b"\x7f" * FILE_UNIQUE_LENGTH_BYTES, file_unique) is None:
            return file_unique


def _length_behind(module_type: ModuleType) -> int:
    """Return how many bytes the AAD of a module has behind the file unique, without the last one."""
    return 6 if module_type in _HAS_PAGE_ORDINAL else 4


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
    if module_type is _FOOTER:
        return file_aad + b"\x00"
    ordinals: tuple[int | None, ...] = (row_group_ordinal, column_ordinal)
    pack = _pack_two_ordinals
    if module_type is _DATA_PAGE or module_type is _DATA_PAGE_HEADER:
        ordinals = (row_group_ordinal, column_ordinal, page_ordinal)
        pack = _pack_three_ordinals
    for ordinal in ordinals:
        if ordinal is None or not 0 <= ordinal <= MAX_ORDINAL:
            raise FormatLimitError(
                f"{module_type.title}: ordinal {ordinal} is not in 0..{MAX_ORDINAL}.",
                hint="Write fewer row groups, columns or pages into one file.",
            )
    return file_aad + pack(module_type, *ordinals)


_HINT = "The key or the AAD prefix is not the one that it was encrypted with, or the file was altered."


class ModulePlace(NamedTuple):
    """What a module is and where it belongs; says which AAD it has, and where an error is."""

    module_type: ModuleType
    row_group_ordinal: int | None = None
    column_ordinal: int | None = None
    page_ordinal: int | None = None

    def aad(self, file_aad: bytes) -> bytes:
        """Return the module AAD (spec 4.4); see `module_aad`."""
        return module_aad(file_aad, *self)

    def error(self, message: str, *, hint: str = "") -> DecryptionError:
        """Return an error that names this place."""
        return DecryptionError(
            message,
            module_type=self.module_type.title,
            row_group_ordinal=self.row_group_ordinal,
            column_ordinal=self.column_ordinal,
            page_ordinal=self.page_ordinal,
            hint=hint,
        )

    def not_authentic(self) -> DecryptionError:
        """Return the error for a module whose tag is wrong."""
        return self.error("the module does not authenticate.", hint=_HINT)


FOOTER_PLACE = ModulePlace(ModuleType.FOOTER)
