"""Tests of crypto metadata that is recognised by its bytes."""

from __future__ import annotations

import pytest

from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionWithColumnKey,
    EncryptionWithFooterKey,
    usual_key_metadata,
)
from parquet_keytools.format.thrift import WireType

PATH = ("person", "ssn")


def with_column_key(key_metadata: bytes | None) -> ColumnCryptoMetaData:
    """Return crypto metadata of a column with its own key."""
    own_key = EncryptionWithColumnKey()
    own_key.path_in_schema = list(PATH)
    own_key.key_metadata = key_metadata
    crypto = ColumnCryptoMetaData()
    crypto.encryption_with_column_key = own_key
    return crypto


@pytest.mark.parametrize("length", [0, 1, 127, 128, 20_000])
def test_key_metadata_of_any_length_is_found(length: int) -> None:
    """As the general reader parses it."""
    stored = with_column_key(b"k" * length).serialise()
    assert usual_key_metadata(stored, PATH) == b"k" * length
    assert usual_key_metadata(stored, ("person", "ssn2")) is None


def test_all_other_crypto_metadata_is_left_to_the_general_reader() -> None:
    """The general reader reports what is wrong with it."""
    footer_key = ColumnCryptoMetaData()
    footer_key.encryption_with_footer_key = EncryptionWithFooterKey()
    both = with_column_key(b"k")
    both.encryption_with_footer_key = EncryptionWithFooterKey()
    more = with_column_key(b"k")
    own_key = more.encryption_with_column_key
    assert own_key is not None
    own_key.struct.set_entry(7, (WireType.I32, 1))
    unknown = with_column_key(b"k")
    unknown.struct.set_entry(3, (WireType.I32, 1))
    usual = with_column_key(b"kk").serialise()
    others = [crypto.serialise() for crypto in (footer_key, both, more, unknown, with_column_key(None))]
    others += [usual[:-1], usual[:-3] + b"\0\0", usual + b"\0", usual[:-2], b""]
    assert [usual_key_metadata(stored, PATH) for stored in others] == [None] * len(others)
