"""New key metadata and key material in place of the old: made, checked, and put in place.

At each moment, either the old file is there, complete, or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parquet_keytools.encryption.aad import FOOTER_PLACE, AadPrefix
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import ChangedMeanwhileError, FileChangedError, KeytoolsError, OutputError
from parquet_keytools.files.replacement import replacement
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    TRAILER_LENGTH,
    ByteSource,
    with_trailer,
)
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionWithColumnKey,
    FileCryptoMetaData,
    FileMetaData,
    Record,
    RowGroup,
)
from parquet_keytools.format.thrift import Entry
from parquet_keytools.keys.material_store import MAX_FILE_BYTES
from parquet_keytools.rotation.file_keys import Tail, changed_while_rotated, check_unchanged
from parquet_keytools.runtime import operating_system
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, ends_with, open_source, read_whole
from parquet_keytools.storage.outputs import LocalSink

# --- a new tail ---


def footer_of(tail: bytes) -> bytes:
    """Return a tail without length and magic."""
    return tail[:-TRAILER_LENGTH]


def new_tail(tail: Tail, footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a tail with key metadata replaced; all other fields stay as they are.

    The footer's DEK encrypts or signs once more, with a fresh nonce. Rotations stay far below the limit of 2**32
    invocations (spec 4.1.4), so they are not counted.

    Args:
        tail: The tail as it was read.
        footer: Its footer, authenticated. It is not changed: `check_new_tail` compares with it.
        new_key_metadata: Old key metadata -> new.
    """
    assert footer.cipher is not None
    known: dict[bytes, bytes] = {}

    def changed(crypto: bytes) -> bytes:
        # Usually the same in every row group.
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


# --- checks of a new file, before it replaces the old one ---


REFUSED_HINT = (
    "The file is as it was: it was changed while it was rotated, or this is a fault of parquet-keytools. Check it "
    "with `verify`, and rotate it again. If it conforms and is refused again, report that with this message."
)


@contextlib.contextmanager
def proving(what: str, path: str) -> Iterator[None]:
    """Read new bytes as a reader does.

    Args:
        what: What they are, for people.
        path: The file.

    Raises:
        OutputError: They do not authenticate, or are not valid.
        FileChangedError: They changed just now; everything has to be read again.
    """
    try:
        yield
    except (FileChangedError, OutputError):
        raise
    except KeytoolsError as error:
        # Its hint is for readers of the file, which is as it was.
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
    """Read a file with a new tail as a reader does, and compare its footer with the old one.

    Args:
        source: The file.
        offset: Where the tail begins.
        tail: What was written there.
        footer_dek: The DEK that the new key material leads to.
        aad_prefix: The expected AAD prefix.
        old: The old footer. What `new_tail` made of it is no proof.
        new_key_metadata: As for `new_tail`.

    Raises:
        OutputError: It was not written as intended, or does not authenticate.
        FileChangedError: It changed just now.
    """
    check_read_back(source, offset, tail)
    with proving("the new footer", source.path):
        new = read_envelope(source).open(footer_dek, aad_prefix)
    if _content(new, {}) != _content(old, new_key_metadata):
        raise OutputError(f"{source.path}: the new footer is not that of the file.", hint=REFUSED_HINT)


def check_read_back(source: ByteSource, offset: int, written: bytes) -> None:
    """Raise `OutputError` if a file does not end, from an offset on, with what was written there."""
    if not ends_with(source, offset, written):
        raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")


def _content(footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> tuple[object, ...]:
    """Return all that a footer says, with key metadata replaced."""
    replaced = [FileMetaData.row_groups.field_id]
    crypto_metadata: dict[int, Entry] = {}
    if footer.mode is FooterMode.PLAINTEXT_FOOTER:
        replaced.append(FileMetaData.footer_signing_key_metadata.field_id)
    else:
        read, _ = FileCryptoMetaData.read(footer_of(footer.envelope.tail))
        crypto_metadata = _without(read, FileCryptoMetaData.key_metadata.field_id)
    known: dict[bytes | None, object] = {None: None}

    def of_crypto(crypto: bytes | None) -> object:
        if crypto not in known:
            known[crypto] = _content_of_crypto(crypto, new_key_metadata)
        return known[crypto]

    return (
        footer.mode,
        footer.file_aad,
        _replaced(footer.key_metadata, new_key_metadata),
        crypto_metadata,
        _without(footer.metadata, *replaced),
        [
            (
                _without(row_group, RowGroup.columns.field_id),
                [(before, of_crypto(crypto), after) for before, crypto, after in row_group.cut_chunks()],
            )
            for row_group in footer.row_groups
        ],
    )


def _content_of_crypto(crypto: bytes | None, new_key_metadata: Mapping[bytes, bytes]) -> object:
    assert crypto is not None
    read, _ = ColumnCryptoMetaData.read(crypto)
    column = read.encryption_with_column_key
    if column is None:
        return _without(read)
    return (
        _without(read, ColumnCryptoMetaData.encryption_with_column_key.field_id),
        _without(column, EncryptionWithColumnKey.key_metadata.field_id),
        _replaced(column.key_metadata, new_key_metadata),
    )


def _without(record: Record, *field_ids: int) -> dict[int, Entry]:
    return {field_id: entry for field_id, entry in record.struct.fields.items() if field_id not in field_ids}


# --- new bytes put in place ---


CheckWritten = Callable[[ByteSource], None]
"""Raises an error if a file was not written as intended; called before it replaces the old file."""

COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time if they go through this process."""


@dataclass(frozen=True)
class ReplacedTail:
    """How a tail was replaced.

    Attributes:
        how: For people.
        bytes_written: Bytes that went through this process.
        bytes_copied: Bytes that the operating system or the store copied.
    """

    how: str
    bytes_written: int
    bytes_copied: int


def replace_tail(
    location: FileLocation, tail: Tail, new: bytes, check: CheckWritten, *, locked_folder: str | None = None
) -> ReplacedTail:
    """Give a file a new tail.

    Raises:
        ChangedMeanwhileError: The file changed after it was read; nothing was changed here.
        KeytoolsError: Any error of `check`; nothing was changed.
        OSError: The file cannot be written; nothing was changed.
    """
    reason = why_unconditional(location)
    if reason is None:
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return ReplacedTail(*replace_object_tail(location, tail, new, check))
    with replacement(location, lambda: check_unchanged(location, tail), locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            if location.is_local:
                assert isinstance(sink, LocalSink)
                with Path(location.path).open("rb") as opened:
                    how = copy_beginning(opened.fileno(), sink.file_descriptor, tail.offset)
            else:
                how = None
                sink.reserve(tail.offset + len(new))
                with open_source(location) as source:
                    for offset in range(0, tail.offset, COPY_LENGTH):
                        sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
            sink.write_at(tail.offset, new)
        with pending.open_written() as written:
            check(written)
    by_hand = 0 if how == COPIED_IN_KERNEL else tail.offset
    text = f"new tail, data {how}" if how is not None else f"rewritten whole{f'; {reason}' if reason else ''}"
    return ReplacedTail(text, len(new) + by_hand, tail.offset - by_hand)


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition, its data copied by the store; None if it can.

    Returns:
        The reason for people if the file is in S3; else an empty text.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.rotation.s3_replacement import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, and no role that Arrow assumes, the store would copy the data"


COPIED_IN_KERNEL = "copied in the kernel"
COPIED = "copied"

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY)
"""Errors of a file system whose files the kernel cannot copy; all others are errors of the disk."""


def copy_beginning(source: int, target: int, length: int) -> str:
    """Copy the first `length` bytes of a file into an empty one.

    Returns:
        How they were copied.

    Raises:
        ChangedMeanwhileError: The source became shorter.
        OSError: The source cannot be read, or the target cannot be written.
    """
    copied = _copy_in_kernel(source, target, length)
    if copied == length:
        return COPIED_IN_KERNEL
    while copied < length:
        data = operating_system.read_at(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = operating_system.write_at(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


def _copy_in_kernel(source: int, target: int, length: int) -> int:
    """Return how many bytes the kernel copied, or shared between the files; fewer than all if it cannot go on."""
    copied = 0
    if sys.platform != "linux" or not hasattr(os, "copy_file_range"):
        return copied
    while copied < length:
        try:
            # At most about 2 GiB at a time, and possibly less.
            count = os.copy_file_range(source, target, length - copied, copied, copied)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            raise
        if count == 0:
            break  # Some file systems return 0 if they do not support it; the copy by hand finds the end.
        copied += count
    return copied


def replace_external_material(
    location: FileLocation,
    old: bytes,
    new: bytes,
    check_parquet_file: Callable[[], None],
    *,
    locked_folder: str | None = None,
) -> None:
    """Replace a key material file.

    Raises:
        ChangedMeanwhileError: Its content changed.
        OutputError: It cannot be written, or does not read back.
    """

    def check() -> None:
        try:
            check_parquet_file()
            if read_whole(location, MAX_FILE_BYTES) == old:
                return
        except FileNotFoundError:
            pass
        raise changed_while_rotated(location)

    if why_unconditional(location) is None:
        from parquet_keytools.rotation.s3_replacement import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check, locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, new)
        with pending.open_written() as written:
            check_read_back(written, 0, new)
