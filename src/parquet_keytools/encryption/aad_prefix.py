"""The AAD prefix that a file must have, and where it ends (spec 4.4.1).

The AAD is the prefix and then the file unique, without a boundary, and both stand unauthenticated in
FileCryptoMetaData: prefix `part1` and file unique `0` + U make the AAD of `part10` and U. Whoever can write to the
storage moves bytes from one to the other. So where a prefix is expected, the file unique has exactly 8 bytes, and
prefixes that we write end in NUL, which occurs in no name of a file. See docs/aad-prefix-boundary.md.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES, module_behind
from parquet_keytools.errors import AadPrefixError, DecryptionError, ParquetFormatError

PREFIX_DELIMITER = b"\0"
"""Ends the prefixes that we write: no name of a file and no argument of a command can hold it."""


def delimited_prefix(text: str) -> bytes:
    """Return the AAD prefix that is written for a text.

    Raises:
        AadPrefixError: The text is empty, or holds the delimiter itself.
    """
    prefix = text.encode()
    if not prefix:
        raise AadPrefixError(
            "an empty AAD prefix names no file.", hint="Leave it out to accept the prefix that the file stores."
        )
    if PREFIX_DELIMITER in prefix:
        raise AadPrefixError(
            f"the AAD prefix {text[:200]!r} contains NUL, which marks the end of a prefix.",
            hint="Give the text without it: readers look for the prefix with and without NUL at its end.",
        )
    return prefix + PREFIX_DELIMITER


def without_delimiter(prefix: bytes) -> bytes:
    """Return the text of a prefix, without the NUL at the end of those that we write."""
    return prefix.removesuffix(PREFIX_DELIMITER)


@dataclass(frozen=True)
class ExpectedAadPrefix:
    """The AAD prefix that a file must have.

    Attributes:
        candidates: The forms that its text takes, the one that we write first.
        any_file_unique: Whether the file unique may have another length than 8 bytes.
    """

    candidates: tuple[bytes, ...]
    any_file_unique: bool = False

    @classmethod
    def of_text(cls, text: str, *, any_file_unique: bool = False) -> ExpectedAadPrefix:
        """Return what is expected of a file whose prefix is a text: it with NUL at its end, or without.

        Raises:
            AadPrefixError: The text is empty or holds NUL.
        """
        written = delimited_prefix(text)
        return cls((written, without_delimiter(written)), any_file_unique)

    def check(
        self, stored: bytes | None, file_unique: bytes, path: str, *, supply_aad_prefix: bool
    ) -> tuple[bytes, ...]:
        """Return the prefixes that the file may have: one where it stores it.

        Args:
            stored: As the file stores it, or None.
            file_unique: As the file stores it.
            path: The file, for error texts.
            supply_aad_prefix: Whether the file was written with a prefix that is not stored.

        Raises:
            AadPrefixError: The file has another prefix or none, or a file unique that may hold a part of one.
        """
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
                hint="It is not the requested file, or another configuration wrote it.",
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
                "With `reading.file_unique_lengths: any`, a prefix that does not end in NUL has to be that of the "
                "table: set it as its aad_prefix, or use `exact`."
            )
        return "It is another file, or another version of the file, than the requested one."


def expected_aad_prefix(
    given: str | None, rendered: Collection[str], *, any_file_unique: bool
) -> ExpectedAadPrefix | None:
    """Return what is expected of a file, by its caller or its table; None where any prefix will do.

    With `any_file_unique` only a delimiter keeps one prefix from being the beginning of another. The prefixes of
    tables are compared with each other when the configuration is read; one that is given is not among them, and
    is accepted with NUL at its end alone.

    Args:
        given: The prefix that the caller expects, or None.
        rendered: What the table says for this file, or the tables where none is named.
        any_file_unique: As the configuration says.

    Raises:
        AadPrefixError: The prefix is empty or holds NUL.
    """
    if given is None:
        text = next(iter(rendered), None)
        return None if text is None else ExpectedAadPrefix.of_text(text, any_file_unique=any_file_unique)
    expected = ExpectedAadPrefix.of_text(given, any_file_unique=any_file_unique)
    if any_file_unique and given not in rendered:
        return ExpectedAadPrefix(expected.candidates[:1], any_file_unique=True)
    return expected


AadPrefix = ExpectedAadPrefix | bytes | None
"""What a caller expects: a prefix in its forms, these very bytes, or None to take what the file stores."""


def aad_prefixes(
    expected: AadPrefix, stored: bytes | None, file_unique: bytes | None, path: str, *, supply_aad_prefix: bool
) -> tuple[bytes, ...]:
    """Return the prefixes that a file may have, the likeliest first; one unless it does not store it.

    Raises:
        AadPrefixError: See `ExpectedAadPrefix.check`; or the prefix is needed and not given.
        DecryptionError: The file unique shows that another module is in the place of the footer.
        ParquetFormatError: The file has no file unique.
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
