"""A file whose footer is authentic and whose keys are at hand, as far as they are available; and others like it.

No two files may have the same data key and file unique. They are the same where pyarrow's encryption properties
served two files, and where a file is a copy of another. Modules can be moved between such files, and nothing
detects that (spec 4.4.1). A file unique has 8 random bytes: by chance two of 100,000 files share one with a
probability of 1 in 3 billion, and never the data key too.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import FooterColumn, FooterMode
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    DecryptionError,
    FileChangedError,
    KeyMaterialError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
    ReusedKeysError,
)
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.keys.key_wrapping import FileKeyRetriever, KmsKeys
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.runtime.presentation import warn_caller
from parquet_keytools.runtime.worker_processes import shared_with_workers
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import ends_with, open_source

T = TypeVar("T")


@dataclass(frozen=True)
class VerifiedTail:
    """The end of a file as it was when its footer was verified.

    Attributes:
        size_bytes: Length of the whole file.
        offset: Where the footer begins.
        data: From there to the end.
    """

    size_bytes: int
    offset: int
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, envelope: FooterEnvelope) -> VerifiedTail:
        """Return that of a file, in the very bytes that its envelope was read from."""
        offset, data = envelope.footer_offset, envelope.tail
        return cls(offset + len(data), offset, data)


@dataclass(frozen=True)
class ColumnDigests:
    """What digests of the columns of a file are made with.

    Attributes:
        columns: Leaf paths of all columns that are shown as digests, if they are shown at all.
        secret: The key of the digests; None where it is unavailable, or not needed.
        deks: Leaf path of each of them that can be read -> its DEK; None where it has none of its own.
    """

    columns: frozenset[tuple[str, ...]]
    secret: SecretBytes | None = field(default=None, repr=False)
    deks: Mapping[tuple[str, ...], SecretBytes | None] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class OpenedFile:
    """A file that may be read.

    Attributes:
        location: Where it lies.
        footer: Its footer, authenticated.
        tail: The footer as it was read.
        retriever: Where its keys came from.
        kms_keys: What the KMS answered for it, and for other files that were opened with it.
        deks: DEKs of columns with a column key, as far as they are available.
        denied: Paths of columns that cannot be read, and why.
        refused: Those of them whose keys this reader is not to have: the KMS refuses the very keys that the table
            names. All else may be another answer tomorrow, or an attack. Where the configuration says
            `denied_columns: hash`, those that are shown as digests instead.
        digests: What these are made with; None where no column of the file is to be shown so.
        not_wanted: Paths of columns in `denied` that the reader will not read: no key was fetched for them.
    """

    location: FileLocation
    footer: Footer = field(repr=False)
    tail: VerifiedTail = field(repr=False)
    retriever: FileKeyRetriever = field(repr=False)
    kms_keys: KmsKeys = field(repr=False)
    deks: dict[tuple[str, ...], SecretBytes]
    denied: dict[tuple[str, ...], KeytoolsError]
    refused: frozenset[tuple[str, ...]] = frozenset()
    digests: ColumnDigests | None = None
    not_wanted: frozenset[tuple[str, ...]] = frozenset()

    @property
    def is_encrypted(self) -> bool:
        """Whether it is; a plaintext file is opened only where the configuration allows it."""
        return self.footer.mode is not FooterMode.UNENCRYPTED

    @property
    def protected_columns(self) -> frozenset[tuple[str, ...]]:
        """Leaf paths of columns that are encrypted, or shown as digests."""
        digested = frozenset(() if self.digests is None else self.digests.columns)
        return digested | self.footer.protected_columns

    def refuse_unencrypted(self) -> None:
        """Raise `NotEncryptedError` if it is not encrypted."""
        if not self.is_encrypted:
            raise NotEncryptedError(f"{self.location} is not encrypted.")

    def columns_named(self, name: str) -> list[FooterColumn]:
        """Return the leaf columns that a name in a projection means; see `columns_named`."""
        return columns_named(self.footer.columns, name)

    def refuse_denied(self, names: Sequence[str] | None, *, hint: str = "", hides_refused: bool = False) -> None:
        """Raise an error if one of these columns cannot be read; None means all.

        Args:
            names: Of columns, as in a projection.
            hint: For the error.
            hides_refused: Whether columns in `refused` are left out, and no error. A KMS that is down, or a key
                that was altered, is one nevertheless: a result would lack columns today that it had yesterday.

        Raises:
            ColumnAccessDeniedError: Keys are unavailable.
            ParquetFormatError: The metadata of a column is damaged.
        """
        wanted = (
            list(self.footer.columns)
            if names is None
            else [column for name in names for column in self.columns_named(name)]
        )
        denied = [
            column.path
            for column in wanted
            if column.path in self.denied and not (hides_refused and column.path in self.refused)
        ]
        if denied:
            raise self.denial(denied, hint=hint)

    def denial(self, paths: Sequence[tuple[str, ...]], *, hint: str = "") -> KeytoolsError:
        """Return the error for columns in `denied`: their damage, or `ColumnAccessDeniedError`."""
        causes = [self.denied[path] for path in paths]
        # Metadata that is not what the format says is no matter of keys, and is not to be hidden. What does not
        # authenticate may be: the key is another one, or the bytes are.
        for cause in causes:
            if isinstance(cause, ParquetFormatError) and not isinstance(cause, KeyMaterialError):
                return cause.with_traceback(None)
        return ColumnAccessDeniedError([".".join(path) for path in paths], causes, hint=hint)

    @property
    def denied_top_level(self) -> frozenset[str]:
        """Names of top-level columns that cannot be read as a whole."""
        return frozenset(path[0] for path in self.denied)

    @property
    def unshown_top_level(self) -> frozenset[str]:
        """Those of `denied_top_level` of which no digests are shown."""
        shown = frozenset(() if self.digests is None else self.refused)
        return frozenset(path[0] for path in self.denied if path not in shown)


def columns_named(columns: Sequence[FooterColumn], name: str) -> list[FooterColumn]:
    """Return the leaf columns that a name in a projection means: a column, a parent, or a dotted path."""
    return [
        column
        for column in columns
        if name == column.path[0] or f"{'.'.join(column.path)}.".startswith(f"{name}.")
    ]


@contextlib.contextmanager
def naming_place(location: FileLocation, columns: Sequence[FooterColumn] = ()) -> Iterator[None]:
    """Say in errors which file does not decrypt, and the name of the column; those below know ordinals only."""
    try:
        yield
    except DecryptionError as error:
        name_place(error, location, columns)
        raise


def name_place(error: KeytoolsError, location: FileLocation, columns: Sequence[FooterColumn]) -> None:
    """Say in an error of what does not decrypt which file it is, and the name of the column."""
    if isinstance(error, DecryptionError):
        error.path = str(location)
        if error.column_ordinal is not None and error.column_ordinal < len(columns):
            error.column = ".".join(columns[error.column_ordinal].path)


def as_verified(opened: OpenedFile, source: ByteSource) -> ByteSource:
    """Return a file as it was when its footer was verified.

    The data is read from there; the footer is always the one that was verified, and is not read again: nothing
    authenticates the beginning of an encrypted footer, and who parses the file must not see another one than was
    checked. Keys are rotated while files are read: the file has a footer with other key metadata then, and the
    same data.

    Raises:
        FileChangedError: It is another file, or was altered.
    """
    tail = opened.tail
    if not ends_with(source, tail.offset, tail.data) and not _has_new_key_metadata(opened, source):
        raise FileChangedError(
            "the file changed after its footer was verified.",
            path=str(opened.location),
            hint="Open it again.",
        )
    return WithTail(source, tail.offset, tail.data)


def _has_new_key_metadata(opened: OpenedFile, source: ByteSource) -> bool:
    """Return whether a file has the data of the one that was opened, and another footer under the same DEK."""
    was = opened.footer
    try:
        now = read_envelope(source)
    except KeytoolsError:
        return False
    return (
        was.cipher is not None
        and (now.mode, now.algorithm) == (was.mode, was.algorithm)
        and (now.aad_file_unique, now.footer_offset) == (was.envelope.aad_file_unique, was.envelope.footer_offset)
        and now.is_sealed_by(was.cipher)
    )


class WithTail:
    """The data of a file, and another tail than lies there: one that was verified, or that is to come."""

    def __init__(self, source: ByteSource, offset: int, tail: bytes) -> None:
        self.path = source.path
        self.size_bytes = offset + len(tail)
        self._source = source
        self._offset = offset
        self._tail = tail

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes of the file as it is with the tail."""
        start = self._offset
        if offset + length <= start:
            return self._source.read_at(offset, length)
        if offset + length > self.size_bytes:
            raise ParquetFormatError("the file ends before.", path=self.path)
        data = b"" if offset >= start else bytes(self._source.read_at(offset, start - offset))
        return data + self._tail[max(offset - start, 0) : offset + length - start]


_LOOKS = 8
"""How often files are opened for one read, where others replace them all the time."""


def read_again_if_changed(read: Callable[[], T]) -> T:
    """Read files, and again where one is another file than a moment ago: a new look tells that from an attack.

    Raises:
        FileChangedError: Each look found a file that changed.
    """
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(FileChangedError):
            return read()
    return read()


MOST_REMEMBERED = 100_000
"""How many files are remembered; the one that was opened first is forgotten first."""

REMEDY = "Remove copies, and give the others keys of their own: `parquet-keytools rekey FOLDER --in-place`."


class KnownFiles:
    """Digest of data key and file unique -> the file that has them; of all worker processes together."""

    def __init__(self, files: MutableMapping[bytes, FileLocation] | None = None) -> None:
        self._files = {} if files is None else files
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        shared = shared_with_workers(self._files)
        if shared is not None:
            self._files = shared
        # Another program has opened other files.
        return KnownFiles, () if shared is None else (shared,)

    def remember(self, digest: bytes, location: FileLocation, *, first_stays: bool) -> FileLocation:
        """Remember a file; return the file that is remembered with this digest: another one, or this one."""
        with self._lock:
            # One step, also where worker processes do it at the same time.
            found = self._files.setdefault(digest, location)
            if not first_stays and found != location:
                self._files[digest] = location
            if isinstance(self._files, dict) and len(self._files) > MOST_REMEMBERED:
                del self._files[next(iter(self._files))]
        return found

    def forget(self, digest: bytes) -> None:
        """Forget the file that is remembered with a digest."""
        with self._lock:
            self._files.pop(digest, None)


class FileIdentities:
    """Remembers the files of one folder, or all that one process opened. May be used by any number of threads.

    In worker processes it remembers those of all of them.

    Args:
        refuses: Whether a file with keys of another one is refused, as in a folder; else there is a warning.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        # What is remembered of a data key is no hash that anybody else could make.
        self._salt = secrets.token_bytes(16)
        self._known = KnownFiles()

    def compare(self, opened: OpenedFile) -> None:
        """Remember a file; refuse it, or warn, if it shares data key and file unique with another one.

        There is no warning of a file that was moved or replaced since, nor of the same bytes elsewhere, as in a
        backup: there is nothing to be exchanged.

        Raises:
            ReusedKeysError: It does, and is refused.
        """
        if not opened.is_encrypted:
            return
        envelope = opened.footer.envelope
        file_unique = envelope.aad_file_unique or b""
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        other = self.other(opened.location, dek, file_unique)
        if other is None:
            return
        if self._refuses and not _is_there(other, file_unique):
            # It was moved here, or replaced there: a view lives longer than files keep their names.
            self.forget(dek, file_unique)
            self.other(opened.location, dek, file_unique)
            return
        if not (self._refuses or _differs(other, opened)):
            return
        error = ReusedKeysError(
            str(opened.location),
            str(other),
            hint=f"{REMEDY} To read them as they are, set `reused_encryption_properties: allow` under `reading`.",
        )
        if self._refuses:
            raise error
        warn_caller(str(error))

    def other(self, location: FileLocation, footer_dek: SecretBytes, file_unique: bytes) -> FileLocation | None:
        """Remember a file; return another one that was opened before with the same data key and file unique.

        One file under two names, by way of links, is no other one.

        Args:
            location: The file.
            footer_dek: Of its footer.
            file_unique: The random part of its AAD (spec 4.4.1).
        """
        # Who is refused once is refused again when it is opened again: the first file is the one that stays.
        digest = self._digest(footer_dek, file_unique)
        found = self._known.remember(digest, location, first_stays=self._refuses)
        return None if found == location or found.is_same_file(location) else found

    def forget(self, footer_dek: SecretBytes, file_unique: bytes) -> None:
        """Forget the file that is remembered with this data key and file unique."""
        self._known.forget(self._digest(footer_dek, file_unique))

    def _digest(self, footer_dek: SecretBytes, file_unique: bytes) -> bytes:
        return hashlib.sha256(self._salt + footer_dek.reveal() + file_unique).digest()[:16]


def _is_there(location: FileLocation, file_unique: bytes) -> bool:
    """Tell whether a file is still there, as far as its file unique says; who cannot look says that it is."""
    try:
        with open_source(location) as source:
            return (read_envelope(source).aad_file_unique or b"") == file_unique
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (KeytoolsError, OSError):
        return True


def _differs(location: FileLocation, opened: OpenedFile) -> bool:
    """Tell whether another file is there that has the file unique of the one that was opened, and other data."""
    try:
        with open_source(location) as source:
            envelope = read_envelope(source)
    except (KeytoolsError, OSError):
        return False
    is_copy = VerifiedTail.of(envelope) == opened.tail
    return not is_copy and envelope.aad_file_unique == opened.footer.envelope.aad_file_unique
