"""The AAD that binds a module to its place in its file, and the AAD prefix that a file must have (spec 4.4).

The AAD is the prefix and then the file unique, without a boundary, and both stand unauthenticated in
FileCryptoMetaData: prefix `part1` and file unique `0` + U make the AAD of `part10` and U. Whoever can write to the
storage moves bytes from one to the other. So where a prefix is expected, the file unique has exactly 8 bytes, and
prefixes that we write end in NUL, which occurs in no name of a file. See docs/aad-prefix-boundary.md.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from parquet_keytools import strict_base64
from parquet_keytools.errors import AadPrefixError, DecryptionError, FormatLimitError, ParquetFormatError

MAX_ORDINAL = 32_767
"""Ordinals are signed 16-bit integers; one that wrapped around would make two modules share an AAD."""

MAX_COUNT = MAX_ORDINAL + 1
"""How many row groups, columns, and pages of a chunk fit into an encrypted file: ordinals begin with 0."""


WRITE_LARGER_PAGES = "Write larger pages, or smaller row groups."
WRITE_LARGER_ROW_GROUPS = "Write larger row groups, or more files."


def refuse_more_than_ordinals(path: object, *, row_groups: int = 0, columns: int = 0) -> None:
    """Raise `FormatLimitError` for more row groups or columns than there are ordinals (spec 4.4.2)."""
    if max(row_groups, columns) > MAX_COUNT:
        what = f"{row_groups} row groups" if row_groups > MAX_COUNT else f"{columns} columns"
        raise FormatLimitError(
            f"{path}: an encrypted file has at most {MAX_COUNT} row groups and {MAX_COUNT} columns, and this one "
            f"would have {what}.",
            hint=WRITE_LARGER_ROW_GROUPS if row_groups > MAX_COUNT else "Write fewer columns.",
        )


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
"""Modules that hold values: a user who chooses the values of a file chooses their bytes."""


_OTHERS_THAN_FOOTERS = tuple(ModuleType)[1:]


def module_behind(prefix: bytes, file_unique: bytes) -> ModuleType | None:
    """Return the type of the module whose AAD is equal to the AAD of a footer; None if there is none.

    The AAD of a footer ends with one byte 0, and so does the AAD of other modules whose last ordinal is below 256.
    So the AAD of a data page equals the AAD of a footer whose file unique contains the bytes before the 0: an
    attacker who chooses values, and can write to the storage, could have a page pass for a footer. Less than 3 %
    of random file uniques of such a length look like that.

    The attacker can also move bytes from there to the AAD prefix, so that the file unique has 8 bytes again. Then
    only the end of both shows it. Random bytes must not be mistaken for that, so only pages of row groups and
    columns below 256 are looked for: fewer than 2 in 100,000 files that store a prefix are.
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
    """Return the file unique of a new file, which no reader takes for a part of another module's AAD."""
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
    """Return the AAD of one module (spec 4.4.2); raise `FormatLimitError` if an ordinal is out of range."""
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


PREFIX_DELIMITER = b"\0"
"""Ends the prefixes that we write: no name of a file and no argument of a command can hold it."""


BASE64 = "base64:"
"""Begins the text form of a prefix that is bytes, in configurations, on the command line and in answers."""


def filled_prefix(template: str, fill: Callable[[str], str]) -> str:
    """Return a template whose placeholders are filled, in the form of `prefix_bytes`.

    The name of a file must not decide the form: a copy of `a` named `base64:YQA=` would have the prefix of `a`.
    """
    if template.startswith(BASE64):
        return template
    text = fill(template)
    return BASE64 + strict_base64.encode(text.encode()) if text.startswith(BASE64) else text


def prefix_bytes(prefix: str | bytes) -> bytes:
    """Return the bytes of an AAD prefix that is given as bytes, as `base64:` with base64 of them, or as text.

    Raises `AadPrefixError` if it is empty, the base64 is not valid, or a text holds the delimiter.
    """
    if isinstance(prefix, bytes):
        found = prefix
    elif prefix.startswith(BASE64):
        try:
            found = strict_base64.decode(prefix.removeprefix(BASE64))
        except ValueError:
            raise AadPrefixError(
                f"the AAD prefix {prefix[:200]!r} is not base64 after {BASE64!r}.",
                hint="Give a text that begins so as base64, too.",
            ) from None
    else:
        found = prefix.encode()
        if PREFIX_DELIMITER in found:
            raise AadPrefixError(
                f"the AAD prefix {prefix[:200]!r} contains NUL, which marks the end of a prefix.",
                hint="Give the text without it: readers look for the prefix with and without NUL at its end. "
                "A prefix with other NULs is given as bytes.",
            )
    if not found:
        raise AadPrefixError(
            "an empty AAD prefix names no file.", hint="Leave it out to accept the prefix that the file stores."
        )
    return found


def prefix_text(prefix: bytes) -> str:
    """Return the text that `prefix_bytes` takes for a prefix that a file stores."""
    bare = without_delimiter(prefix)
    with contextlib.suppress(UnicodeDecodeError):
        text = bare.decode()
        if text and "\0" not in text and not text.startswith(BASE64):
            return text
    return BASE64 + strict_base64.encode(bare if without_delimiter(bare) == bare != b"" else prefix)


def delimited_prefix(prefix: str | bytes) -> bytes:
    """Return the AAD prefix that is written for what `prefix_bytes` takes."""
    return without_delimiter(prefix_bytes(prefix)) + PREFIX_DELIMITER


def without_delimiter(prefix: bytes) -> bytes:
    """Return the text of a prefix, without the NUL at the end of those that we write."""
    return prefix.removesuffix(PREFIX_DELIMITER)


@dataclass(frozen=True)
class ExpectedAadPrefix:
    """The AAD prefix that a file must have, in the forms that its text takes: first the one that we write."""

    candidates: tuple[bytes, ...]
    any_file_unique: bool = False

    @classmethod
    def of(cls, prefix: str | bytes, *, any_file_unique: bool = False) -> ExpectedAadPrefix:
        """Return what is expected of a file with a prefix: the prefix with NUL at its end, or without."""
        given, written = prefix_bytes(prefix), delimited_prefix(prefix)
        # Bytes that end in NUL say whether the file has it.
        return cls(tuple(dict.fromkeys((written, given))), any_file_unique)

    def check(
        self, stored: bytes | None, file_unique: bytes, path: str, *, supply_aad_prefix: bool
    ) -> tuple[bytes, ...]:
        """Return the prefixes that the file may have, one where it stores it; if none fits, `AadPrefixError`."""
        if stored is not None:
            found = [candidate for candidate in self.candidates if hmac.compare_digest(candidate, stored)]
            if not found:
                raise AadPrefixError(
                    f"{path}: the file stores another AAD prefix than the one expected.", hint=self._hint(stored)
                )
        elif supply_aad_prefix:
            found = list(self.candidates)
        else:
            raise AadPrefixError(
                f"{path}: an AAD prefix is expected, and the file was written without one.",
                hint="It is not the requested file, or another configuration wrote it. If its table had no "
                "aad_prefix, describe that form as a second table, and run `rekey --table OLD --to-table NEW`.",
            )
        if not self.any_file_unique and len(file_unique) != FILE_UNIQUE_LENGTH_BYTES:
            raise AadPrefixError(
                f"{path}: an AAD prefix is expected, and the file unique has {len(file_unique)} bytes, not "
                f"{FILE_UNIQUE_LENGTH_BYTES}: the end of another prefix may have been moved into it, or its own "
                "beginning out of it.",
                hint="`reading.file_unique_lengths: any` accepts files of writers that use other lengths.",
            )
        return tuple(found)

    def _hint(self, stored: bytes) -> str:
        if self.any_file_unique and stored + PREFIX_DELIMITER in self.candidates:
            return (
                "With `reading.file_unique_lengths: any`, a prefix that does not end in NUL has to be the "
                "table's: set it as aad_prefix, or use `exact`."
            )
        return "It is another file, or another version of the file, than the requested one."


def expected_aad_prefix(
    given: str | bytes | None, rendered: Collection[str], *, any_file_unique: bool
) -> ExpectedAadPrefix | None:
    """Return what is expected of a file, by its caller or its table; None where any prefix will do.

    With `any_file_unique` only a delimiter keeps one prefix from being the beginning of another. The prefixes of
    tables (`rendered`) are compared with each other when the configuration is read; one that is given is not among
    them, and is accepted with NUL at its end alone.
    """
    if given is None:
        text = next(iter(rendered), None)
        return None if text is None else ExpectedAadPrefix.of(text, any_file_unique=any_file_unique)
    expected = ExpectedAadPrefix.of(given, any_file_unique=any_file_unique)
    if any_file_unique and prefix_bytes(given) not in map(prefix_bytes, rendered):
        return ExpectedAadPrefix(expected.candidates[:1], any_file_unique=True)
    return expected


AadPrefix = ExpectedAadPrefix | bytes | None
"""What a caller expects: a prefix in its forms, these very bytes, or None to take what the file stores."""


def aad_prefixes(
    expected: AadPrefix, stored: bytes | None, file_unique: bytes | None, path: str, *, supply_aad_prefix: bool
) -> tuple[bytes, ...]:
    """Return the prefixes that a file may have, the likeliest first; one unless it does not store it.

    Raises errors of `ExpectedAadPrefix.check`; `AadPrefixError` if a prefix is needed and not given;
    `DecryptionError` if another module is in the place of the footer; and `ParquetFormatError` if the file has no
    file unique.
    """
    if file_unique is None:
        raise ParquetFormatError(
            "the file has no aad_file_unique, which every AAD needs (spec 4.4.2).",
            path=path,
            hint="DuckDB 2.0 is known to write such files; no other engine can read them.",
        )
    if expected is None:
        if stored is None and supply_aad_prefix:
            raise AadPrefixError(
                f"{path}: the file was written with an AAD prefix that is not stored in it.",
                hint="Supply the AAD prefix (spec 4.4.1).",
            )
        prefixes: tuple[bytes, ...] = (stored or b"",)
    else:
        if isinstance(expected, bytes):
            expected = ExpectedAadPrefix((expected,))
        prefixes = expected.check(stored, file_unique, path, supply_aad_prefix=supply_aad_prefix)
        if not expected.any_file_unique:
            return prefixes
    # Where the prefix is expected, nothing of the AAD can have been moved into it.
    _refuse_module(b"" if expected is not None else prefixes[0], file_unique, path)
    return prefixes


def _refuse_module(prefix: bytes, file_unique: bytes, path: str) -> None:
    """Refuse a file whose footer may be another module; where prefix and length are given, it cannot be."""
    behind = module_behind(prefix, file_unique)
    if behind is None:
        return
    length = f"the file unique has {len(file_unique)} bytes, not {FILE_UNIQUE_LENGTH_BYTES}, and"
    if len(file_unique) == FILE_UNIQUE_LENGTH_BYTES:
        length = "the AAD prefix and the file unique together have an AAD that"
    raise DecryptionError(
        f"{path}: {length} ends like the AAD of a {behind.title}: a {behind.title} is in the place of the footer.",
        hint="Do not trust this file. If you know its AAD prefix, supply it: with "
        "`reading.file_unique_lengths: exact` that shows whether the file is authentic.",
    )
