"""What is expected of a file beyond the specification, and the rules about what a table wants of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parquet_keytools.conformance.chunk_layout import OpenFooter
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, KeyUser, title_of
from parquet_keytools.conformance.findings import RuleBook, Scope
from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import ConfigurationError, KeytoolsError, TableMismatch

if TYPE_CHECKING:
    # These take long to import, for a look at a file without a configuration.
    from parquet_keytools.config.key_policy import KeyReference
    from parquet_keytools.files.table_check import SeenColumn, TableCheck


@dataclass(frozen=True)
class Expectation:
    """What is expected of one file.

    Attributes:
        path: Where it lies, whose folders must not give values to its protected columns.
        aad_prefix: The AAD prefix that it must have; None takes what it stores.
        table: Compares it with its table, as readers do; None where there is none.
        without_table: Why there is none, though there are tables; empty where there are none.
    """

    aad_prefix: ExpectedAadPrefix | None = None
    allow_plaintext: bool = False
    table: TableCheck | None = None
    without_table: str = ""
    path: str = ""


_RULE_OF = {
    "algorithm": "wanted-algorithm",
    "footer key": "wanted-keys",
    "column key": "wanted-keys",
    "plaintext column": "wanted-encryption",
}


def check_table_of_footer(expectation: Expectation, envelope: Envelope, keys: FileKeys, book: RuleBook) -> None:
    """Compare what is visible of a file with what its table wants; this needs no key."""
    table = expectation.table
    if table is None:
        if expectation.without_table:
            book.scope_not_checked(Scope.CONFIGURATION, expectation.without_table)
        return
    is_hidden = envelope.mode is FooterMode.ENCRYPTED_FOOTER
    book.check("wanted-footer", is_hidden or table.settings.plaintext_footer, "the footer is in plaintext.")
    if envelope.algorithm is None:
        book.broken("wanted-algorithm", "the file is not encrypted, and the table has it encrypted.")
        return
    is_stored = envelope.aad_prefix is not None
    may_be_stored = table.settings.store_aad_prefix
    book.check("wanted-prefix", may_be_stored or not is_stored, "the prefix is stored.")
    is_known, key = _key(FOOTER, envelope.key_metadata, keys, book)
    found = table.footer_mismatches(envelope.algorithm, key)
    _note(found if is_known else [mismatch for mismatch in found if mismatch.what == "algorithm"], book)
    book.holds("wanted-algorithm", *(["wanted-keys"] if is_known else []))


def check_table_of_columns(
    expectation: Expectation, envelope: Envelope, footer: OpenFooter, keys: FileKeys, book: RuleBook
) -> None:
    """Compare the columns of a file with what its table wants."""
    table = expectation.table
    if table is None:
        return
    try:
        table.check_patterns([column.path for column in footer.columns])
        book.holds("wanted-columns")
    except ConfigurationError as error:
        # Readers take files of another schema, and compare the columns that are there: so the rest is done, too.
        book.broken("wanted-columns", str(error))
    is_known, footer_key = _key(FOOTER, envelope.key_metadata, keys, book)
    if envelope.algorithm is not None:
        _check_length(FOOTER, footer_key, table, keys, book)
    if not footer.row_groups or not is_known:
        return
    from parquet_keytools.files.table_check import SeenColumn

    seen: list[SeenColumn] = []
    for column in footer.columns:
        key = None
        if column.encryption is ColumnEncryption.COLUMN_KEY:
            is_known, key = _key(column.path, column.key_metadata, keys, book)
            if not is_known:
                continue
            _check_length(column.path, key, table, keys, book)
        seen.append(SeenColumn(column.path, column.encryption, key))
    try:
        _note(table.column_mismatches(footer_key, seen), book)
    except ConfigurationError as error:
        for rule_id in ("wanted-keys", "wanted-encryption"):
            book.not_checked(rule_id, str(error))
    if any(column.encryption is not ColumnEncryption.PLAINTEXT for column in seen):
        book.holds("wanted-keys", "wanted-encryption")


def _key(
    user: KeyUser, key_metadata: bytes | None, keys: FileKeys, book: RuleBook
) -> tuple[bool, KeyReference | None]:
    """Return whether it is known what key metadata says, and the key that it names."""
    from parquet_keytools.files.table_check import seen_key

    assert keys.finder is not None
    try:
        return True, seen_key(keys.finder, key_metadata, user or None)
    except (KeytoolsError, OSError):
        # What is wrong with it is a matter of other rules.
        book.not_checked("wanted-keys", f"{title_of(user)}: its key is unknown")
        return False, None


def _note(mismatches: Sequence[TableMismatch], book: RuleBook) -> None:
    for mismatch in mismatches:
        book.broken(_RULE_OF[mismatch.what], f"{mismatch}.")


def _check_length(
    user: KeyUser, key: KeyReference | None, table: TableCheck, keys: FileKeys, book: RuleBook
) -> None:
    """Check the length of a DEK that a master key wraps; that of a data key is its owner's affair."""
    from parquet_keytools.config.key_policy import MasterKeyReference

    if not isinstance(key, MasterKeyReference):
        return
    least, length = table.settings.data_key_length_bits, keys.dek_lengths_bits.get(user)
    if length is None:
        book.not_checked("wanted-key-length", f"{title_of(user)}: its key is unavailable")
    else:
        message = f"the DEK of {title_of(user)} has {length} bits, and {least} are wanted."
        book.check("wanted-key-length", length >= least, message)
