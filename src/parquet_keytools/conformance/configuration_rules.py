"""The rules about what a table of the configuration wants of a file."""

from __future__ import annotations

from urllib.parse import unquote

from parquet_keytools.conformance.envelope import Envelope
from parquet_keytools.conformance.expectation import Expectation, ExpectedTable
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, KeyUser, title_of
from parquet_keytools.conformance.footer_rules import OpenFooter
from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.footer_columns import ColumnEncryption
from parquet_keytools.encryption.footer_modes import FooterMode
from parquet_keytools.errors import ConfigurationError


def check_configuration(
    expectation: Expectation, envelope: Envelope, footer: OpenFooter, keys: FileKeys, book: RuleBook
) -> None:
    """Compare a file with what its table wants.

    Args:
        expectation: Says what the table wants.
        envelope: What is visible of the file.
        footer: Its footer.
        keys: Whose names and lengths are known by now.
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
    stated = "the file is not encrypted" if envelope.algorithm is None else f"it is {envelope.algorithm.value}"
    message = f"{stated}, and {table.algorithm.value} is wanted."
    book.check("wanted-algorithm", envelope.algorithm is table.algorithm, message)
    is_hidden = envelope.mode is FooterMode.ENCRYPTED_FOOTER
    book.check("wanted-footer", is_hidden or table.plaintext_footer, "the footer is in plaintext.")
    if envelope.mode is not FooterMode.UNENCRYPTED:
        is_stored = envelope.aad_prefix is not None
        book.check("wanted-prefix", table.stores_aad_prefix or not is_stored, "the prefix is stored.")
        _check_key(FOOTER, table.footer_key_name, table, keys, book)
    if footer.row_groups:
        _check_columns(footer, table, keys, book)


def _check_columns(footer: OpenFooter, table: ExpectedTable, keys: FileKeys, book: RuleBook) -> None:
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
            _check_key(column.path, wanted.key_name, table, keys, book)


def _check_key(user: KeyUser, wanted: str, table: ExpectedTable, keys: FileKeys, book: RuleBook) -> None:
    found = keys.key_names.get(user)
    if found is None:
        book.not_checked("wanted-keys", f"{title_of(user)}: its key metadata names no key")
    else:
        # Files that were written through pyarrow carry an encoded identifier.
        message = f"{title_of(user)} is under {found[:200]!r}, and {wanted!r} is wanted."
        book.check("wanted-keys", wanted in (found, unquote(found)), message)
    least, length = table.dek_lengths_bits.get(wanted), keys.dek_lengths_bits.get(user)
    if least is not None and length is None:
        book.not_checked("wanted-key-length", f"{title_of(user)}: its key cannot be had")
    elif least is not None and length is not None:
        message = f"the DEK of {title_of(user)} has {length} bits, and {least} are wanted."
        book.check("wanted-key-length", length >= least, message)
