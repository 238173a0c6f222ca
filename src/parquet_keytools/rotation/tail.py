"""The tail of a Parquet file: everything from its footer on, which is all that a rotation replaces."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from parquet_keytools.encryption.aad import FOOTER_PLACE
from parquet_keytools.encryption.aad_prefix import AadPrefix
from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import ChangedMeanwhileError, OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.collector import paused_collector
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, TRAILER_LENGTH
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source


@dataclass(frozen=True)
class Tail:
    """The tail of a file as it was read.

    Attributes:
        data: From there to the end.
        state: What the operating system or the store said of the file before it was read.
    """

    size_bytes: int
    offset: int
    data: bytes = field(repr=False)
    state: tuple[object, ...]

    @property
    def sha256(self) -> str:
        """Digest of the tail."""
        return hashlib.sha256(self.data).hexdigest()


def read_tail(location: FileLocation) -> tuple[Tail, FooterEnvelope]:
    """Read the tail of a file, and what its footer says without a key.

    Raises:
        ParquetFormatError: It is not a Parquet file.
        OSError: It cannot be read.
    """
    # Taken before the file is read: a change while it is read shows when the state is compared.
    state = file_state(location)
    with open_source(location) as source:
        envelope = read_envelope(source)
    offset, data = envelope.footer_offset, envelope.tail
    return Tail(offset + len(data), offset, data, state), envelope


def check_unchanged(location: FileLocation, tail: Tail) -> None:
    """Raise if a file is no longer the one whose tail was read.

    Raises:
        ChangedMeanwhileError: It changed, or is gone.
    """
    try:
        if file_state(location) == tail.state:
            with open_source(location) as source:
                if source.size_bytes == tail.size_bytes:
                    data = source.read_at(tail.offset, tail.size_bytes - tail.offset)
                    if bytes(data) == tail.data:
                        return
    except FileNotFoundError:
        pass
    raise changed_while_rotated(location)


def changed_while_rotated(location: FileLocation) -> ChangedMeanwhileError:
    """Return the error for a file that somebody else changed."""
    return ChangedMeanwhileError(f"{location} changed while its keys were rotated.", hint="Try again.")


def file_state(location: FileLocation) -> tuple[object, ...]:
    """Return what changes when a file is replaced or written to.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if location.is_local:
        # Follows links, as reading does.
        found = os.stat(location.path)  # noqa: PTH116 - one call, and no object for each of a million files
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    if location.is_in_s3:
        with location.filesystem.open_input_file(location.path) as file:
            said = dict(file.metadata())
            # Times there are whole seconds: two rotations of one file may take less.
            return file.size(), said.get("ETag") or said.get("Last-Modified")
    info = location.info()
    if info.size is None:
        raise FileNotFoundError(f"there is no file {location}")
    return info.size, info.mtime_ns


def with_trailer(footer: bytes, magic: bytes) -> bytes:
    """Return the tail that a footer makes, with what belongs to it, its length and the magic."""
    return footer + struct.pack("<I", len(footer)) + magic


def footer_of(tail: bytes) -> bytes:
    """Return a tail without length and magic."""
    return tail[:-TRAILER_LENGTH]


@paused_collector()
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
    source: ByteSource, offset: int, tail: bytes, footer_dek: SecretBytes, aad_prefix: AadPrefix, old: Footer
) -> None:
    """Read a file with a new tail as a reader does, with the DEK that the new key material leads to.

    Raises:
        OutputError: It is not what was to be written.
        KeytoolsError: It does not authenticate, or is not what the format says.
    """
    if source.size_bytes != offset + len(tail) or bytes(source.read_at(offset, len(tail))) != tail:
        raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")
    if not _is_same_footer(read_envelope(source), footer_dek, aad_prefix, old):
        raise OutputError(f"{source.path}: the new footer is not that of the file.")


@paused_collector()
def _is_same_footer(envelope: FooterEnvelope, footer_dek: SecretBytes, aad_prefix: AadPrefix, old: Footer) -> bool:
    footer = envelope.open(footer_dek, aad_prefix)
    return footer.file_aad == old.file_aad and footer.metadata == old.metadata
