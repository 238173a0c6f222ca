"""A file whose footer is authentic and whose keys are at hand, as far as they can be had."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from parquet_keytools.encryption.footer import (
    Algorithm,
    ColumnEncryption,
    Footer,
    FooterColumn,
    FooterEnvelope,
    FooterMode,
    read_envelope,
)
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    KEY_REFUSALS,
    ColumnAccessDeniedError,
    DecryptionError,
    FileChangedError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.keys.file_key_retriever import DataKeys, FileKeyRetriever
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_unwrapper import KmsKeys
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage import FileLocation, open_source

_log = logging.getLogger(__name__)

_CONCURRENT_FILES = 16
"""How many footers are read at a time; each takes two reads, which on an object store is mostly waiting."""

_NOT_FOR_THIS_READER = (*KEY_REFUSALS, KeyNotAvailableError)


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
    def of(cls, source: ByteSource, offset: int) -> VerifiedTail:
        """Return that of a file whose footer begins there."""
        return cls(source.size_bytes, offset, bytes(source.read_at(offset, source.size_bytes - offset)))


@dataclass(frozen=True)
class OpenedFile:
    """A file that may be read.

    Attributes:
        location: Where it lies.
        footer: Its footer, authenticated.
        tail: The footer as it was read.
        retriever: Where its keys came from.
        kms_keys: What the KMS answered for it, and for other files that were opened with it.
        deks: DEKs of columns with a column key, as far as they can be had.
        denied: Paths of columns that cannot be read, and why.
    """

    location: FileLocation
    footer: Footer = field(repr=False)
    tail: VerifiedTail = field(repr=False)
    retriever: FileKeyRetriever = field(repr=False)
    kms_keys: KmsKeys = field(repr=False)
    deks: dict[tuple[str, ...], SecretBytes]
    denied: dict[tuple[str, ...], KeytoolsError]

    @property
    def is_encrypted(self) -> bool:
        """Whether it is; a plaintext file is opened only where the configuration allows it."""
        return self.footer.mode is not FooterMode.UNENCRYPTED

    def refuse_unencrypted(self) -> None:
        """Raise `NotEncryptedError` if it is not encrypted."""
        if not self.is_encrypted:
            raise NotEncryptedError(f"{self.location} is not encrypted.")

    def columns_named(self, name: str) -> list[FooterColumn]:
        """Return the leaf columns that a name in a projection means: a column, a parent, or a dotted path."""
        return [
            column
            for column in self.footer.columns
            if name == column.path[0] or f"{'.'.join(column.path)}.".startswith(f"{name}.")
        ]

    def refuse_denied(self, names: Sequence[str] | None, *, hint: str = "", hides_refused: bool = False) -> None:
        """Raise `ColumnAccessDeniedError` if one of these columns cannot be read; None means all.

        Args:
            names: Of columns, as in a projection.
            hint: For the error.
            hides_refused: Whether columns whose keys this reader is not to have are left out, and no error. A
                KMS that is down, or a key that was altered, is one nevertheless: a result would lack columns
                today that it had yesterday.
        """
        wanted = (
            list(self.footer.columns)
            if names is None
            else [column for name in names for column in self.columns_named(name)]
        )
        denied = [
            column.path
            for column in wanted
            if column.path in self.denied
            and not (hides_refused and isinstance(self.denied[column.path], _NOT_FOR_THIS_READER))
        ]
        if denied:
            raise ColumnAccessDeniedError(
                [".".join(path) for path in denied], [self.denied[path] for path in denied], hint=hint
            )

    @property
    def denied_top_level(self) -> frozenset[str]:
        """Names of top-level columns that cannot be read as a whole."""
        return frozenset(path[0] for path in self.denied)


@contextlib.contextmanager
def naming_place(location: FileLocation, columns: Sequence[FooterColumn] = ()) -> Iterator[None]:
    """Say in errors which file does not decrypt, and the name of the column; those below know ordinals only."""
    try:
        yield
    except DecryptionError as error:
        error.path = str(location)
        if error.column_ordinal is not None and error.column_ordinal < len(columns):
            error.column = ".".join(columns[error.column_ordinal].path)
        raise


def open_files(
    locations: Sequence[FileLocation],
    kms_keys: KmsKeys,
    data_keys: DataKeys,
    *,
    aad_prefix_of: Callable[[FileLocation, bytes | None], bytes | None] = lambda _, stored: None,
    allow_plaintext: bool = False,
    allow_ctr: bool = True,
) -> list[OpenedFile]:
    """Open files: read and authenticate their footers, and get the keys of all their columns.

    The KMS is asked twice for all files together: for the footer keys, then for those of columns.

    Args:
        locations: The files.
        kms_keys: Collects what the KMS answers.
        data_keys: The data keys that the caller manages.
        aad_prefix_of: Returns the AAD prefix that is expected of a file that stores this one; None takes that.
        allow_plaintext: Whether a file that is not encrypted may be among them.
        allow_ctr: Whether a file may be among them whose page data is not authenticated.

    Raises:
        NotEncryptedError: A file is not encrypted.
        FileChangedError: A file was replaced just now.
        DecryptionError: A file says AES-CTR and must not, or was written with AES-GCM; or a footer does not
            authenticate.
        KeytoolsError: A footer cannot be read; columns that cannot be are in `OpenedFile.denied`.
    """
    with ThreadPoolExecutor(min(_CONCURRENT_FILES, max(1, len(locations)))) as pool:
        envelopes = list(pool.map(_read_envelope, locations))
        retrievers = [FileKeyRetriever(kms_keys, data_keys, location) for location in locations]
        for location, (envelope, _) in zip(locations, envelopes, strict=True):
            if envelope.mode is FooterMode.UNENCRYPTED and not allow_plaintext:
                raise NotEncryptedError(
                    f"{location} is not encrypted.",
                    hint="If that is right, say `plaintext_files: allow` under `reading`.",
                )
            if envelope.algorithm is Algorithm.AES_GCM_CTR_V1 and not allow_ctr:
                raise DecryptionError(
                    f"{location} says AES_GCM_CTR_V1, and the configuration rejects such files.",
                    hint="Where page data need not be authenticated, say `ctr_files: allow` under `reading`.",
                )
        kms_keys.fetch(
            material
            for retriever, (envelope, _) in zip(retrievers, envelopes, strict=True)
            for material in _materials(retriever, [envelope.key_metadata])
        )
        footers = []
        for location, retriever, (envelope, tail) in zip(locations, retrievers, envelopes, strict=True):
            try:
                with naming_place(location):
                    footers.append(_open_footer(envelope, retriever, aad_prefix_of(location, envelope.aad_prefix)))
            except KeyMaterialError:
                _check_still_there(location, tail)
                raise
        kms_keys.fetch(
            material
            for retriever, footer in zip(retrievers, footers, strict=True)
            for material in _materials(retriever, [c.key_metadata for c in _columns_with_keys(footer)])
        )
        files = [
            _open_columns(location, footer, tail, retriever, kms_keys)
            for location, footer, retriever, (_, tail) in zip(
                locations, footers, retrievers, envelopes, strict=True
            )
        ]
        list(pool.map(_check_algorithm, files))
        return files


def _read_envelope(location: FileLocation) -> tuple[FooterEnvelope, VerifiedTail]:
    with open_source(location) as source:
        envelope = read_envelope(source)
        return envelope, VerifiedTail.of(source, envelope.footer_offset)


def _check_still_there(location: FileLocation, tail: VerifiedTail) -> None:
    """Raise `FileChangedError` if a file is another one now: then its key material was found, not that of this."""
    try:
        _, now = _read_envelope(location)
        is_there = now == tail
    except (KeytoolsError, OSError):
        is_there = False
    if not is_there:
        raise FileChangedError(
            "the file was replaced while its keys were looked for.", path=str(location), hint="Open it again."
        )


def _materials(retriever: FileKeyRetriever, all_key_metadata: Iterable[bytes | None]) -> Iterator[KeyMaterial]:
    """Yield the key materials among key metadata; what is wrong is told where its key is needed."""
    for key_metadata in all_key_metadata:
        with contextlib.suppress(KeytoolsError):
            material = retriever.material(key_metadata)
            if material is not None:
                yield material


def _open_footer(envelope: FooterEnvelope, retriever: FileKeyRetriever, aad_prefix: bytes | None) -> Footer:
    if envelope.mode is FooterMode.UNENCRYPTED:
        return envelope.open(None)
    if envelope.algorithm is Algorithm.AES_GCM_CTR_V1:
        _log.warning("%s says AES_GCM_CTR_V1: changes of its page data would go unnoticed", envelope.path)
    # What is wrong with the AAD is found before the KMS is asked.
    envelope.file_aad(aad_prefix)
    return envelope.open(retriever.footer_dek(envelope.key_metadata), aad_prefix)


def _columns_with_keys(footer: Footer) -> list[FooterColumn]:
    return [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]


def _open_columns(
    location: FileLocation,
    footer: Footer,
    tail: VerifiedTail,
    retriever: FileKeyRetriever,
    kms_keys: KmsKeys,
) -> OpenedFile:
    columns = _columns_with_keys(footer)
    outcomes = retriever.column_deks([(column.path, column.key_metadata) for column in columns])
    opened = OpenedFile(location, footer, tail, retriever, kms_keys, {}, {})
    for column, outcome in zip(columns, outcomes, strict=True):
        if isinstance(outcome, KeytoolsError):
            opened.denied[column.path] = outcome
        else:
            opened.deks[column.path] = outcome
    # Arrow aborts the process on column metadata that does not decrypt: it must not be the first to try.
    for column in footer.columns:
        if column.path in opened.denied:
            continue
        try:
            with naming_place(location, footer.columns):
                cipher = footer.cipher_of(column, opened.deks.get(column.path))
                for row_group_ordinal in range(len(footer.row_groups)):
                    footer.chunk_metadata(row_group_ordinal, column, cipher)
        except KeytoolsError as error:
            opened.denied[column.path] = error
            opened.deks.pop(column.path, None)
    return opened


def _check_algorithm(opened: OpenedFile) -> None:
    """Refuse a file that says AES-CTR and was written with AES-GCM; pyarrow would believe it."""
    if opened.footer.algorithm is Algorithm.AES_GCM_CTR_V1:
        with open_source(opened.location) as source, naming_place(opened.location, opened.footer.columns):
            check_stated_algorithm(source, opened.footer, opened.deks)


def as_verified(opened: OpenedFile, source: ByteSource) -> ByteSource:
    """Return a file as it was when its footer was verified.

    Keys are rotated while files are read: the file has a footer with other key metadata then, and the same data.
    The data is read from there, and the footer is the one that was verified.

    Raises:
        FileChangedError: It is another file, or was altered.
    """
    tail = opened.tail
    if source.size_bytes == tail.size_bytes:
        now = source.read_at(tail.offset, tail.size_bytes - tail.offset)
        if bytes(now) == tail.data:
            return source
    if _has_new_key_metadata(opened, source):
        return _WithVerifiedTail(source, tail)
    raise FileChangedError(
        "the file changed after its footer was verified.",
        path=str(opened.location),
        hint="Open it again.",
    )


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


class _WithVerifiedTail:
    """The data of a file, and the footer that was verified."""

    def __init__(self, source: ByteSource, tail: VerifiedTail) -> None:
        self.path = source.path
        self.size_bytes = tail.size_bytes
        self._source = source
        self._tail = tail

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        start = self._tail.offset
        if offset + length <= start:
            return self._source.read_at(offset, length)
        if offset + length > self.size_bytes:
            raise ParquetFormatError("the file ends before.", path=self.path)
        data = b"" if offset >= start else bytes(self._source.read_at(offset, start - offset))
        return data + self._tail.data[max(offset - start, 0) : offset + length - start]
