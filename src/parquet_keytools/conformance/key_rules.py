"""The rules about the DEKs of a file, compared with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from parquet_keytools.conformance.file_keys import FileKeys
from parquet_keytools.conformance.footer_rules import Column
from parquet_keytools.conformance.rule_book import RuleBook


def check_deks(
    footer_fingerprint: bytes | None, columns: Sequence[tuple[Column, bytes]], keys: FileKeys, book: RuleBook
) -> None:
    """Check that keys that have two names are two.

    Args:
        footer_fingerprint: Of the footer's DEK; None where it is not known.
        columns: Columns with keys of their own, and the fingerprints of their DEKs.
        keys: Knows the names.
        book: Where findings go.
    """
    names: defaultdict[bytes, dict[str, str]] = defaultdict(dict)
    for column, fingerprint in columns:
        book.holds("dek-distinct")
        if fingerprint == footer_fingerprint:
            message = f"column {column.name!r} says that it has a key of its own, and that is the footer's DEK."
            book.broken("dek-distinct", message)
        name = keys.key_names.get(column.path, repr(column.key_metadata))
        names[fingerprint].setdefault(name, column.name)
    for users in names.values():
        if len(users) > 1:
            shown = ", ".join(f"{key[:200]!r} (column {column!r})" for key, column in list(users.items())[:5])
            book.broken("dek-distinct", f"one DEK is that of {shown}.")
