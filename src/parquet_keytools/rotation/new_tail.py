"""A footer with other key metadata: encrypted or signed anew with the same DEK, and the same AAD."""

from __future__ import annotations

import os
from collections.abc import Mapping

from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.footer import Footer, FooterMode, read_envelope
from parquet_keytools.encryption.module_cipher import FOOTER_PLACE, ModuleCipher
from parquet_keytools.errors import OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.rotation.tail import Tail, footer_of, with_trailer
from parquet_keytools.secret_bytes import SecretBytes


def new_tail(tail: Tail, footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a tail with key metadata replaced; every field that is not key metadata stays as it is.

    The footer's DEK encrypts or signs once more, with a fresh nonce: nothing counts how often it did before. The
    limit of 2**32 (spec 4.1.4) is far beyond what rotations come to.

    Args:
        tail: As it was read.
        footer: Of that tail, authenticated. Changed by this call.
        new_key_metadata: Old key metadata -> new.
    """
    assert footer.cipher is not None
    for chunks in footer.chunks:
        for chunk in chunks:
            crypto = chunk.crypto_metadata
            column = crypto.encryption_with_column_key if crypto is not None else None
            # A record is a view: this changes what the footer is serialised from.
            if column is not None:
                column.key_metadata = _replaced(column.key_metadata, new_key_metadata)
    metadata = footer.metadata
    if footer.mode is FooterMode.ENCRYPTED_FOOTER:
        crypto_metadata, _ = FileCryptoMetaData.read(footer_of(tail.data))
        crypto_metadata.key_metadata = _replaced(crypto_metadata.key_metadata, new_key_metadata)
        module = footer.cipher.encrypt(metadata.serialise(), FOOTER_PLACE)
        return with_trailer(crypto_metadata.serialise() + module, MAGIC_ENCRYPTED_FOOTER)
    metadata.footer_signing_key_metadata = _replaced(metadata.footer_signing_key_metadata, new_key_metadata)
    serialised = metadata.serialise()
    return with_trailer(serialised + _signature(footer.cipher, serialised), MAGIC)


def _replaced(key_metadata: bytes | None, new: Mapping[bytes, bytes]) -> bytes | None:
    return None if key_metadata is None else new.get(key_metadata, key_metadata)


def _signature(cipher: ModuleCipher, serialised: bytes) -> bytes:
    cipher.reserve(1)
    nonce = os.urandom(NONCE_LENGTH)
    return nonce + cipher.gcm.tag(nonce, serialised, FOOTER_PLACE.aad(cipher.file_aad))


def check_new_tail(
    source: ByteSource, offset: int, tail: bytes, footer_dek: SecretBytes, aad_prefix: bytes | None, old: Footer
) -> None:
    """Read a file with a new tail as a reader does, with the DEK that the new key material leads to.

    Args:
        source: What was written.
        offset: Where its footer must begin.
        tail: What must lie there.
        footer_dek: The DEK of the footer.
        aad_prefix: The AAD prefix, if the file does not store it.
        old: The footer that takes part in `tail`.

    Raises:
        OutputError: It is not what was to be written.
        KeytoolsError: It does not authenticate, or is not what the format says.
    """
    if source.size_bytes != offset + len(tail) or bytes(source.read_at(offset, len(tail))) != tail:
        raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")
    footer = read_envelope(source).open(footer_dek, aad_prefix)
    if footer.file_aad != old.file_aad or footer.metadata != old.metadata:
        raise OutputError(f"{source.path}: the new footer is not that of the file.")
