"""The rules about what a table of the configuration wants of a file."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from parquet_keytools.conformance.envelope import Envelope
from parquet_keytools.conformance.expectation import Expectation, ExpectedTable
from parquet_keytools.conformance.footer_rules import OpenFooter
from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.footer_columns import ColumnEncryption
from parquet_keytools.encryption.footer_modes import FooterMode
from parquet_keytools.errors import ConfigurationError


def check_configuration(
    expectation: Expectation,
    envelope: Envelope,
    footer: OpenFooter,
    key_names: Mapping[str, str],
    book: RuleBook,
) -> None:
    """Compare a file with what its table wants.

    Args:
        expectation: Says what the table wants.
        envelope: What is visible of the file.
        footer: Its footer.
        key_names: Dotted column path, or `footer` -> identifier of its master key, or id of its data key.
        book: Where findings go.
    """
    if expectation.table_of is None:
        return
    try:
        table = expectation.table_of([column.path for column in footer.columns])
    except ConfigurationError as error:
        book.broken("wanted-columns", str(error))
        return
    book.holds("wanted-columns")
    stated = envelope.algorithm.value if envelope.algorithm else None
    message = f"it is {stated}, and {table.algorithm.value} is wanted."
    book.check("wanted-algorithm", envelope.algorithm is table.algorithm, message)
    is_hidden = envelope.mode is FooterMode.ENCRYPTED_FOOTER
    book.check("wanted-footer", is_hidden or table.plaintext_footer, "the footer is in plaintext.")
    _check_key("footer", table.footer_key_name, key_names, book)
    if footer.row_groups:
        _check_columns(footer, table, key_names, book)


def _check_columns(footer: OpenFooter, table: ExpectedTable, key_names: Mapping[str, str], book: RuleBook) -> None:
    for column in footer.columns:
        wanted = table.columns.get(column.path)
        if wanted is None or wanted.encryption is ColumnEncryption.PLAINTEXT:
            continue
        message = f"column {column.name!r} is in plaintext."
        is_encrypted = column.encryption is not ColumnEncryption.PLAINTEXT
        if not book.check("wanted-encryption", is_encrypted, message):
            continue
        if column.encryption is not wanted.encryption:
            message = f"column {column.name!r} is under the {column.encryption.value}, "
            book.broken("wanted-keys", f"{message}and the {wanted.encryption.value} is wanted.")
        elif column.encryption is ColumnEncryption.COLUMN_KEY and wanted.key_name is not None:
            _check_key(column.name, wanted.key_name, key_names, book)


def _check_key(name: str, wanted: str, key_names: Mapping[str, str], book: RuleBook) -> None:
    found = key_names.get(name)
    if found is None:
        book.not_checked("wanted-keys", f"{name}: its key metadata names no key")
        return
    # Files that were written through pyarrow carry an encoded identifier.
    message = f"{name} is under {found[:200]!r}, and {wanted!r} is wanted."
    book.check("wanted-keys", wanted in (found, unquote(found)), message)
