"""The tail of a Parquet file, from its footer on, and its key material: read, made anew, and put in place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parquet_keytools.encryption.aad import FOOTER_PLACE
from parquet_keytools.encryption.aad_prefix import AadPrefix
from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import ChangedMeanwhileError, OutputError
from parquet_keytools.files.replacement import replacement
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.collector import paused_collector
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, TRAILER_LENGTH
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.keys.material_store import MAX_FILE_BYTES
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import LocalSink
from parquet_keytools.storage.sources import open_source, read_whole


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


# --- put in place ---


COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time where they go through this process."""


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


def replace_tail(
    location: FileLocation, tail: Tail, new: bytes, check: CheckWritten, *, locked_folder: str | None = None
) -> ReplacedTail:
    """Give a file a new tail: at each moment the file is there, whole, the old or the new one.

    Raises:
        ChangedMeanwhileError: The file is no longer the one that was read; nothing was changed.
        KeytoolsError: What `check` raises; nothing was changed.
        OSError: It cannot be written; nothing was changed.
    """
    reason = why_unconditional(location)
    if reason is None:
        # A store that copies ranges by itself has its own source file.
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return replace_object_tail(location, tail, new, check)
    with replacement(location, lambda: check_unchanged(location, tail), locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            if location.is_local:
                # The data is copied by the operating system.
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
    by_hand = tail.offset if how in (None, COPIED) else 0
    text = f"new tail, data {how}" if how is not None else f"rewritten whole{f'; {reason}' if reason else ''}"
    return ReplacedTail(text, len(new) + by_hand, tail.offset - by_hand)


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition and with its data copied by the store; None if it can.

    Returns:
        For people, where it is in S3; else empty.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.storage.s3_connection import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, and no role that Arrow assumes, the store would copy the data"


REFLINKED = "shared with the old file by the file system"
COPIED_IN_KERNEL = "copied in the kernel"
COPIED = "copied"

_FICLONE = 0x40049409
_NOT_THERE = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
)
"""What a file system answers that cannot do it for these files; an error of the disk is another one."""


def copy_beginning(source: int, target: int, length: int) -> str:
    """Copy the first `length` bytes of a file into an empty one.

    Returns:
        How it was done.

    Raises:
        ChangedMeanwhileError: The source became shorter.
        OSError: It cannot be read, or the target not be written.
    """
    if _reflink(source, target, length):
        return REFLINKED
    copied = _copy_in_kernel(source, target, length)
    if copied == length:
        return COPIED_IN_KERNEL
    while copied < length:
        data = os.pread(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = os.pwrite(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


def _reflink(source: int, target: int, length: int) -> bool:
    """Have the whole file shared and cut off: ranges would have to fit the file system's blocks."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    if os.fstat(target).st_size < length:
        raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
    os.ftruncate(target, length)
    return True


def _copy_in_kernel(source: int, target: int, length: int) -> int:
    """Return how many bytes the kernel copied; fewer than all where it cannot go on."""
    copied = 0
    while copied < length:
        try:
            # The kernel copies no more than about 2 GiB at a time, and may copy less.
            count = os.copy_file_range(source, target, length - copied, copied, copied)
        except OSError as error:
            if error.errno in _NOT_THERE:
                break
            raise
        if count == 0:
            break  # Some file systems end like this what they cannot do; the copy by hand finds the end.
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
        ChangedMeanwhileError: Its content is another one now.
        OutputError: It cannot be written, or does not read back as it was written.
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
            is_written = written.size_bytes == len(new) and bytes(written.read_at(0, len(new))) == new
        if not is_written:
            raise OutputError(f"{location}: what was written does not read back.", hint="CheckWritten the disk.")
