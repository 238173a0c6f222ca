"""The tail of a Parquet file, from its footer on: read, made anew, and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from parquet_keytools.encryption.aad import FOOTER_PLACE, AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    FileChangedError,
    KeytoolsError,
    OutputError,
)
from parquet_keytools.files.opened_file import VerifiedTail
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, TRAILER_LENGTH, with_trailer
from parquet_keytools.format.records import Record
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionWithColumnKey,
    FileCryptoMetaData,
    FileMetaData,
    RowGroup,
)
from parquet_keytools.format.thrift import Entry
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import state_of_local
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import ends_with, open_source


@dataclass(frozen=True)
class Tail(VerifiedTail):
    """The tail of a file as it was read; of what it says, nothing was verified yet.

    Attributes:
        state: What the operating system or the store said of the file before it was read.
    """

    state: tuple[object, ...]


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
                if ends_with(source, tail.offset, tail.data):
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
        return state_of_local(location.path)
    if location.is_in_s3:
        with location.filesystem.open_input_file(location.path) as file:
            said = dict(file.metadata())
            # Times there are whole seconds: two rotations of one file may take less.
            return file.size(), said.get("ETag") or said.get("Last-Modified")
    info = location.info()
    if info.size is None:
        raise FileNotFoundError(f"there is no file {location}")
    return info.size, info.mtime_ns


def footer_of(tail: bytes) -> bytes:
    """Return a tail without length and magic."""
    return tail[:-TRAILER_LENGTH]


def new_tail(tail: Tail, footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a tail with key metadata replaced; every field that is not key metadata stays as it is.

    The footer's DEK encrypts or signs once more, with a fresh nonce: nothing counts how often it did before. The
    limit of 2**32 (spec 4.1.4) is far beyond what rotations come to.

    Args:
        tail: As it was read.
        footer: Of that tail, authenticated. It stays as it is: `check_new_tail` compares with it.
        new_key_metadata: Old key metadata -> new.
    """
    assert footer.cipher is not None
    known: dict[bytes, bytes] = {}

    def changed(crypto: bytes) -> bytes:
        # The same in every row group, as a rule.
        if crypto not in known:
            read, _ = ColumnCryptoMetaData.read(crypto)
            column = read.encryption_with_column_key
            if column is not None:
                column.key_metadata = _replaced(column.key_metadata, new_key_metadata)
            known[crypto] = read.serialise()
        return known[crypto]

    metadata = footer.metadata.shallow_copy()
    metadata.row_groups = [
        row_group.with_chunks(
            [
                None if crypto is None else b"".join((before, changed(crypto), after))
                for before, crypto, after in row_group.cut_chunks()
            ]
        )
        for row_group in footer.row_groups
    ]
    if footer.mode is FooterMode.ENCRYPTED_FOOTER:
        crypto_metadata, _ = FileCryptoMetaData.read(footer_of(tail.data))
        crypto_metadata.key_metadata = _replaced(crypto_metadata.key_metadata, new_key_metadata)
        module = footer.cipher.encrypt(metadata.serialise(), FOOTER_PLACE)
        return with_trailer(crypto_metadata.serialise() + module, MAGIC_ENCRYPTED_FOOTER)
    metadata.footer_signing_key_metadata = _replaced(metadata.footer_signing_key_metadata, new_key_metadata)
    return with_trailer(footer.cipher.signed(metadata.serialise()), MAGIC)


def _replaced(key_metadata: bytes | None, new: Mapping[bytes, bytes]) -> bytes | None:
    return None if key_metadata is None else new.get(key_metadata, key_metadata)


REFUSED_HINT = (
    "The file is as it was: it was changed while it was rotated, or this is a fault of parquet-keytools. Check it "
    "with `verify`, and rotate it again. If it conforms and is refused again, report that with this message."
)
"""What to do when the proof of new bytes fails, before they take the place of the old ones."""


@contextlib.contextmanager
def proving(what: str, path: str) -> Iterator[None]:
    """Read new bytes as a reader does, before they take the place of the old ones.

    Args:
        what: What they are, for people.
        path: The file.

    Raises:
        OutputError: They do not authenticate, or are not what the format says.
        FileChangedError: Somebody changes them just now; all is read again.
    """
    try:
        yield
    except (FileChangedError, OutputError):
        raise
    except KeytoolsError as error:
        # What this error advises is for readers of the file, which is as it was.
        reason = str(error).removesuffix(error.hint).removeprefix(f"{path}: ").rstrip(" .")
        raise OutputError(f"{path}: {what} cannot be read: {reason}.", hint=REFUSED_HINT) from error


def check_new_tail(
    source: ByteSource,
    offset: int,
    tail: bytes,
    footer_dek: SecretBytes,
    aad_prefix: AadPrefix,
    old: Footer,
    new_key_metadata: Mapping[bytes, bytes],
) -> None:
    """Read a file with a new tail as a reader does, with the DEK that the new key material leads to.

    Args:
        source: The file.
        offset: Where the tail begins.
        tail: What was written there.
        footer_dek: See above.
        aad_prefix: The one that is expected.
        old: The footer as it was read before; nothing that `new_tail` wrote proves itself.
        new_key_metadata: As for `new_tail`.

    Raises:
        OutputError: It is not what was to be written, or does not authenticate.
        FileChangedError: Somebody changes it just now.
    """
    check_read_back(source, offset, tail)
    with proving("the new footer", source.path):
        new = read_envelope(source).open(footer_dek, aad_prefix)
    if not _is_same_footer(new, old, new_key_metadata):
        raise OutputError(f"{source.path}: the new footer is not that of the file.", hint=REFUSED_HINT)


def check_read_back(source: ByteSource, offset: int, written: bytes) -> None:
    """Raise `OutputError` if a file does not end, from an offset on, with what was written there."""
    if not ends_with(source, offset, written):
        raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")


def _is_same_footer(new: Footer, old: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bool:
    """Return whether two footers differ in key metadata alone, which is replaced wherever it occurs."""
    if new.mode is not old.mode or new.file_aad != old.file_aad:
        return False
    if new.key_metadata != _replaced(old.key_metadata, new_key_metadata):
        return False
    replaced = [FileMetaData.row_groups.field_id]
    if old.mode is FooterMode.PLAINTEXT_FOOTER:
        replaced.append(FileMetaData.footer_signing_key_metadata.field_id)
    elif _crypto_metadata_of(new) != _crypto_metadata_of(old):
        return False
    if _without(new.metadata, *replaced) != _without(old.metadata, *replaced):
        return False
    return _are_same_row_groups(new, old, new_key_metadata)


def _crypto_metadata_of(footer: Footer) -> dict[int, Entry]:
    crypto_metadata, _ = FileCryptoMetaData.read(footer_of(footer.envelope.tail))
    return _without(crypto_metadata, FileCryptoMetaData.key_metadata.field_id)


def _are_same_row_groups(new: Footer, old: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bool:
    proven: set[tuple[bytes, bytes]] = set()

    def is_same_crypto(new_crypto: bytes | None, old_crypto: bytes | None) -> bool:
        if new_crypto is None or old_crypto is None:
            return new_crypto is old_crypto
        pair = new_crypto, old_crypto
        if pair not in proven:
            if not _is_same_crypto(new_crypto, old_crypto, new_key_metadata):
                return False
            # The same in every row group, as a rule.
            proven.add(pair)
        return True

    columns = RowGroup.columns.field_id
    if len(new.row_groups) != len(old.row_groups):
        return False
    for new_group, old_group in zip(new.row_groups, old.row_groups, strict=True):
        if _without(new_group, columns) != _without(old_group, columns):
            return False
        new_chunks, old_chunks = new_group.cut_chunks(), old_group.cut_chunks()
        if len(new_chunks) != len(old_chunks):
            return False
        for (before, crypto, after), (old_before, old_crypto, old_after) in zip(
            new_chunks, old_chunks, strict=True
        ):
            if before != old_before or after != old_after or not is_same_crypto(crypto, old_crypto):
                return False
    return True


def _is_same_crypto(new: bytes, old: bytes, new_key_metadata: Mapping[bytes, bytes]) -> bool:
    new_crypto, old_crypto = ColumnCryptoMetaData.read(new)[0], ColumnCryptoMetaData.read(old)[0]
    new_column, old_column = new_crypto.encryption_with_column_key, old_crypto.encryption_with_column_key
    if new_column is None or old_column is None:
        return new_crypto == old_crypto
    with_column_key = ColumnCryptoMetaData.encryption_with_column_key.field_id
    key_metadata = EncryptionWithColumnKey.key_metadata.field_id
    return (
        new_column.key_metadata == _replaced(old_column.key_metadata, new_key_metadata)
        and _without(new_column, key_metadata) == _without(old_column, key_metadata)
        and _without(new_crypto, with_column_key) == _without(old_crypto, with_column_key)
    )


def _without(record: Record, *field_ids: int) -> dict[int, Entry]:
    return {field_id: entry for field_id, entry in record.struct.fields.items() if field_id not in field_ids}


CheckWritten = Callable[[ByteSource], None]
"""Raises if what was written is not what was meant; called before the file takes its place."""


@dataclass(frozen=True)
class ReplacedTail:
    """How a tail was replaced.

    Attributes:
        how: For people.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
    """

    how: str
    bytes_written: int
    bytes_copied: int
