"""Files opened: footers authenticated, compared with their tables, and keys fetched, for all files together.

No two files may have the same data key and file unique, because modules can be moved between them undetected
(spec 4.4.1). It happens if pyarrow's encryption properties are used for two files, and if a file is copied. A file
unique has 8 random bytes: two of 100,000 files share one by chance with a probability of 1 in 3 billion, and never
the data key as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    KEY_REFUSALS,
    ColumnAccessDeniedError,
    DecryptionError,
    FileChangedError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsConfigurationError,
    NotEncryptedError,
    ParquetFormatError,
    ReusedKeysError,
    TableMismatchError,
)
from parquet_keytools.files.table_check import KeySource, SeenColumn, TableCheck, column_value, seen_key
from parquet_keytools.format.file_layout import ByteSource, HeldSource
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import DataKeys, FileKeyRetriever, KmsKeys
from parquet_keytools.runtime.presentation import warn_caller
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock
from parquet_keytools.runtime.worker_processes import shared_with_workers
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, ends_with, open_source

T = TypeVar("T")

_log = logging.getLogger(__name__)

WantedColumns = Callable[[Sequence[FooterColumn]], Sequence[FooterColumn]]
"""Selects the columns of a file that will be read."""


@dataclass(frozen=True)
class VerifiedTail:
    """The end of a file, from its footer on, when the footer was verified; `size_bytes` is of the whole file."""

    size_bytes: int
    offset: int
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, envelope: FooterEnvelope) -> VerifiedTail:
        """Return the tail of a file, with the bytes that its envelope was read from."""
        offset, data = envelope.footer_offset, envelope.tail
        return cls(offset + len(data), offset, data)


@dataclass(frozen=True)
class ColumnDigests:
    """The leaf columns that are shown as digests, the secret if it is available, and the DEKs of columns."""

    columns: frozenset[tuple[str, ...]]
    secret: SecretBytes | None = field(default=None, repr=False)
    deks: Mapping[tuple[str, ...], SecretBytes | None] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class OpenedFile:
    """A file that may be read.

    Attributes:
        footer: Its footer, authenticated.
        tail: The footer as it was read.
        kms_keys: The keys that the KMS unwrapped for it, and for files that were opened with it.
        deks: DEKs of columns with a column key, as far as they are available.
        denied: Paths of columns that cannot be read, and why.
        refused: The denied columns of which the KMS refuses the keys that the table names. All other errors may be
            temporary, or an attack. With `denied_columns: hash`, the columns that are shown as digests instead.
        digests: Inputs for digests; None if no column of the file is shown as digests.
        not_wanted: Denied columns that the reader will not read: no key was fetched for them.
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
        """Whether the file is encrypted; a plaintext file is opened only if the configuration allows it."""
        return self.footer.mode is not FooterMode.UNENCRYPTED

    @property
    def protected_columns(self) -> frozenset[tuple[str, ...]]:
        """Leaf paths of columns that are encrypted, or shown as digests."""
        digested = frozenset(() if self.digests is None else self.digests.columns)
        return digested | self.footer.protected_columns

    def refuse_unencrypted(self) -> None:
        """Raise `NotEncryptedError` if the file is not encrypted."""
        if not self.is_encrypted:
            raise NotEncryptedError(f"{self.location} is not encrypted.")

    def column_materials(self) -> list[KeyMaterial]:
        """Return the key material of each column key, as far as it is valid."""
        return _materials(self.retriever, [column.key_metadata for column in _with_own_key(self.footer.columns)])

    def refuse_denied(self, names: Sequence[str] | None, *, hint: str = "", hides_refused: bool = False) -> None:
        """Raise an error if one of these columns (None: of all) cannot be read."""
        # `hides_refused` accepts columns in `refused`. An unavailable KMS or a damaged key is still an error:
        # otherwise results would sometimes lack columns.
        columns = self.footer.columns
        wanted = columns if names is None else [one for name in names for one in columns_named(columns, name)]
        failing = self.denied.keys() - self.refused if hides_refused else self.denied.keys()
        if denied := [column.path for column in wanted if column.path in failing]:
            raise self.denial(denied, hint=hint)

    def denial(self, paths: Sequence[tuple[str, ...]], *, hint: str = "") -> KeytoolsError:
        """Return the error for columns in `denied`: damage, wrong credentials, or `ColumnAccessDeniedError`."""
        causes = [self.denied[path] for path in paths]
        # Invalid metadata is not a matter of keys, and is never hidden. A failed authentication may be: the key or
        # the bytes may be wrong. Credentials that expired are not a matter of columns.
        for cause in causes:
            is_damage = isinstance(cause, ParquetFormatError) and not isinstance(cause, KeyMaterialError)
            if is_damage or isinstance(cause, KmsConfigurationError):
                return cause.with_traceback(None)
        return ColumnAccessDeniedError([".".join(path) for path in paths], causes, hint=hint)

    @property
    def denied_top_level(self) -> frozenset[str]:
        """Names of top-level columns that cannot be read as a whole."""
        return frozenset(path[0] for path in self.denied)

    @property
    def unshown_top_level(self) -> frozenset[str]:
        """The names in `denied_top_level` that are not shown as digests."""
        shown = frozenset(() if self.digests is None else self.refused)
        return frozenset(path[0] for path in self.denied if path not in shown)


def columns_named(columns: Sequence[FooterColumn], name: str) -> list[FooterColumn]:
    """Return the leaf columns that a name in a projection means: a column, a parent, or a dotted path."""
    return [
        column
        for column in columns
        if name == column.path[0] or f"{'.'.join(column.path)}.".startswith(f"{name}.")
    ]


# --- files are opened ---


@dataclass
class _Opening:
    """A file that is being opened."""

    location: FileLocation
    envelope: FooterEnvelope
    retriever: FileKeyRetriever
    table_check: TableCheck | None
    prefix: AadPrefix = None
    columns: Sequence[FooterColumn] = ()

    @contextlib.contextmanager
    def errors_of_this_file(self) -> Iterator[None]:
        """Replace an error by `FileChangedError` if the file was replaced while its key material was read."""
        try:
            yield
        except (KeyMaterialError, TableMismatchError):
            try:
                is_there = VerifiedTail.of(envelope_at(self.location)) == VerifiedTail.of(self.envelope)
            except (KeytoolsError, OSError):
                is_there = False
            if is_there:
                raise
            raise FileChangedError(
                "the file was replaced while its keys were fetched.",
                path=str(self.location),
                hint="Open it again.",
            ) from None


def open_files(
    locations: Sequence[FileLocation],
    kms_keys: KmsKeys,
    data_keys: DataKeys,
    *,
    aad_prefix_of: Callable[[FileLocation, bytes | None], AadPrefix] = lambda _, stored: None,
    table_check: TableCheck | None = None,
    allow_plaintext: bool = False,
    allow_ctr: bool = True,
    wanted: WantedColumns = tuple,
) -> list[OpenedFile]:
    """Open files: read and authenticate their footers, and fetch the keys of the wanted columns."""
    # The KMS is called twice for all files together: for footer keys, then for column keys. Before each call, all
    # files are compared with their table, so that no key of a file of another table is unwrapped. Columns that
    # cannot be read are in `OpenedFile.denied`; so are all that are not wanted.
    with ThreadPoolExecutor(min(_CONCURRENT_FILES, max(1, len(locations)))) as pool:
        # A thread for one file would only cost time.
        read = map if len(locations) == 1 else pool.map
        openings = [
            _Opening(location, envelope, FileKeyRetriever(kms_keys, data_keys, location), table_check)
            for location, envelope in zip(locations, read(envelope_at, locations), strict=True)
        ]
        for opening in openings:
            if opening.envelope.mode is FooterMode.UNENCRYPTED and not allow_plaintext:
                raise NotEncryptedError(
                    f"{opening.location} is not encrypted.",
                    hint="If that is intended, set `plaintext_files: allow` under `reading`.",
                )
            if opening.envelope.algorithm is Algorithm.AES_GCM_CTR_V1 and not allow_ctr:
                raise DecryptionError(
                    f"{opening.location} is encrypted with AES_GCM_CTR_V1, and the configuration rejects such "
                    "files.",
                    hint="If page data need not be authenticated, set `ctr_files: allow` under `reading`.",
                )
            if table_check is not None:
                with opening.errors_of_this_file():
                    check_footer_key(table_check, str(opening.location), opening.envelope, opening.retriever)
            opening.prefix = aad_prefix_of(opening.location, opening.envelope.aad_prefix)
            if opening.envelope.mode is not FooterMode.UNENCRYPTED:
                opening.envelope.file_aads(opening.prefix)
        kms_keys.fetch(
            material
            for opening in openings
            for material in _materials(opening.retriever, [opening.envelope.key_metadata])
        )
        footers = []
        for opening in openings:
            envelope = opening.envelope
            if envelope.algorithm is Algorithm.AES_GCM_CTR_V1:
                _log.warning(
                    "%s is encrypted with AES_GCM_CTR_V1: changes to its page data would go undetected",
                    envelope.path,
                )
            with opening.errors_of_this_file():
                with naming_place(opening.location):
                    dek = None
                    if envelope.mode is not FooterMode.UNENCRYPTED:
                        dek = opening.retriever.footer_dek(envelope.key_metadata)
                    # What reads a chunk checks it: most readers want few columns.
                    footer = envelope.open(dek, opening.prefix, checks_chunks=False)
                if table_check is not None:
                    opening.table_check = check_column_keys(
                        table_check, str(opening.location), footer, opening.retriever
                    )
            is_plaintext = footer.mode is FooterMode.UNENCRYPTED
            opening.columns = footer.columns if is_plaintext else wanted(footer.columns)
            footers.append(footer)
        kms_keys.fetch(
            material
            for opening in openings
            for material in _materials(
                opening.retriever, [column.key_metadata for column in _with_own_key(opening.columns)]
            )
        )
        files = [
            _open_columns(opening, footer, kms_keys) for opening, footer in zip(openings, footers, strict=True)
        ]
        stating_ctr = [opened for opened in files if opened.footer.algorithm is Algorithm.AES_GCM_CTR_V1]
        list(pool.map(_check_algorithm, stating_ctr))
        return files


_CONCURRENT_FILES = 16
"""How many footers are read at a time; each takes two reads, which on an object store is mostly waiting."""


def envelope_at(location: FileLocation) -> FooterEnvelope:
    """Read the envelope of the footer of a file."""
    with open_source(location) as source:
        return read_envelope(source)


def check_footer_key(table_check: TableCheck, path: str, envelope: FooterEnvelope, keys: KeySource) -> None:
    """Refuse an encrypted file whose footer is not under its table's key, before that key is unwrapped."""
    if envelope.algorithm is not None:
        key = seen_key(keys, envelope.key_metadata, None)
        table_check = table_check.for_file(path, [key])
        table_check.refuse(path, table_check.footer_mismatches(envelope.algorithm, key))


def check_column_keys(table_check: TableCheck, path: str, footer: Footer, keys: KeySource) -> TableCheck:
    """Refuse an encrypted file whose columns are not under their table's keys, before these are unwrapped."""
    # Returns the comparison for this file. A column without valid key metadata is skipped: it cannot be read.
    if footer.mode is FooterMode.UNENCRYPTED or not footer.row_groups:
        return table_check
    seen = []
    for column in footer.columns:
        key = None
        if column.encryption is ColumnEncryption.COLUMN_KEY:
            try:
                key = seen_key(keys, column.key_metadata, column.path)
            except KeytoolsError:
                continue
        seen.append(SeenColumn(column.path, column.encryption, key))
    footer_key = seen_key(keys, footer.key_metadata, None)
    table_check = table_check.for_file(path, [footer_key, *(column.key for column in seen)])
    table_check.refuse(path, table_check.column_mismatches(footer_key, seen))
    check_column_values(table_check, path, footer, {})
    return table_check


def check_column_values(
    table_check: TableCheck, path: str, footer: Footer, deks: Mapping[tuple[str, ...], SecretBytes]
) -> None:
    """Refuse a file whose columns have another value than its keys, as far as their statistics are readable."""
    # Without DEKs, the columns without a key of their own are compared; otherwise the columns with these DEKs.
    names = [name for name in table_check.settings.value_columns if not deks or (name,) in deks]
    found = {name: column_value(footer, name, deks) for name in names}
    table_check.refuse(path, table_check.value_mismatches({k: v for k, v in found.items() if v is not None}))


def _with_own_key(columns: Iterable[FooterColumn]) -> list[FooterColumn]:
    return [column for column in columns if column.encryption is ColumnEncryption.COLUMN_KEY]


def _materials(retriever: FileKeyRetriever, all_key_metadata: Iterable[bytes | None]) -> list[KeyMaterial]:
    """Return the key materials of key metadata. Errors are raised later, when the key is needed."""
    found = []
    for key_metadata in all_key_metadata:
        with contextlib.suppress(KeytoolsError):
            found.append(retriever.material(key_metadata))
    return [material for material in found if material is not None]


def _open_columns(opening: _Opening, footer: Footer, kms_keys: KmsKeys) -> OpenedFile:
    tail, wanted, table_check = VerifiedTail.of(opening.envelope), opening.columns, opening.table_check
    opened = OpenedFile(opening.location, footer, tail, opening.retriever, kms_keys, {}, {})
    not_wanted: frozenset[tuple[str, ...]] = frozenset()
    if len(wanted) < len(footer.columns):
        kept = {column.ordinal for column in wanted}
        not_wanted = frozenset(column.path for column in footer.columns if column.ordinal not in kept)
        reason = KeyNotAvailableError("it was not asked for when the file was opened.")
        opened.denied.update(dict.fromkeys(not_wanted, reason))
    columns = _with_own_key(wanted)
    outcomes = opened.retriever.column_deks([(column.path, column.key_metadata) for column in columns])
    refused = set()
    for column, outcome in zip(columns, outcomes, strict=True):
        if isinstance(outcome, SecretBytes):
            opened.deks[column.path] = outcome
            continue
        opened.denied[column.path] = outcome
        if _is_refused(opened, column, outcome, table_check):
            refused.add(column.path)
    # Arrow aborts the process on column metadata that does not decrypt, so it must not be the first to try.
    for column in wanted:
        if column.path in opened.denied:
            continue
        try:
            footer.check_column(column, opened.deks.get(column.path))
        except KeytoolsError as error:
            name_place(error, opened.location, footer.columns)
            opened.denied[column.path] = error
            opened.deks.pop(column.path, None)
    if table_check is not None and opened.deks:
        check_column_values(table_check, str(opened.location), footer, opened.deks)
    return dataclasses.replace(opened, refused=frozenset(refused), not_wanted=not_wanted)


def _is_refused(
    opened: OpenedFile, column: FooterColumn, error: KeytoolsError, table_check: TableCheck | None
) -> bool:
    """Return whether the KMS refuses the key that the table names for a column, and not another key."""
    if table_check is None or not isinstance(error, KEY_REFUSALS):
        return False
    material = opened.retriever.material(column.key_metadata)
    key = seen_key(opened.retriever, column.key_metadata, column.path)
    paths = [leaf.path for leaf in opened.footer.columns]
    return (
        material is not None
        and table_check.names_key(column.path, paths, key)
        and opened.kms_keys.unwrapper.refuses_key(material, error)
    )


def _check_algorithm(opened: OpenedFile) -> None:
    """Refuse a file that claims AES-CTR and was written with AES-GCM; pyarrow would trust it."""
    with open_source(opened.location) as source, naming_place(opened.location, opened.footer.columns):
        check_stated_algorithm(source, opened.footer, opened.deks)


@contextlib.contextmanager
def naming_place(location: FileLocation, columns: Sequence[FooterColumn] = ()) -> Iterator[None]:
    """Name the file and the column in decryption errors; lower layers know only ordinals."""
    try:
        yield
    except DecryptionError as error:
        name_place(error, location, columns)
        raise


def name_place(error: KeytoolsError, location: FileLocation, columns: Sequence[FooterColumn]) -> None:
    """Name the file and the column in a decryption error."""
    if isinstance(error, DecryptionError):
        error.path = str(location)
        if error.column_ordinal is not None and error.column_ordinal < len(columns):
            error.column = ".".join(columns[error.column_ordinal].path)


# --- files that change ---


def as_verified(opened: OpenedFile, source: ByteSource) -> ByteSource:
    """Return a file as it was when its footer was verified; raise `FileChangedError` if its data may be other."""
    # The footer is not read again, because the beginning of an encrypted footer is not authenticated, and a parser
    # must not see another one than was checked. A rotation changes key metadata, and no data.
    tail = opened.tail
    if not ends_with(source, tail.offset, tail.data) and not _has_new_key_metadata(opened, source):
        raise FileChangedError(
            "the file changed after its footer was verified.",
            path=str(opened.location),
            hint="Open it again.",
        )
    return HeldSource(source, tail.offset, tail.data, is_end=True)


def _has_new_key_metadata(opened: OpenedFile, source: ByteSource) -> bool:
    """Return whether a file has the data of the opened file, and another footer under the same DEK."""
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


_ATTEMPTS = 8
"""How often files are opened for one read if they keep changing."""


def read_again_if_changed(read: Callable[[], T]) -> T:
    """Call a function that reads files, again if a file changed: another look tells a change from an attack."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileChangedError):
            return read()
    return read()


# --- files that share keys ---

MOST_REMEMBERED = 100_000
"""Maximum number of files that are remembered; the oldest are forgotten first."""

REMEDY = "Remove copies, and give the others keys of their own: `parquet-keytools rekey FOLDER --in-place`."


class FileIdentities:
    """Remembers the files of one folder, whose copies it refuses, or all files of a process. Thread-safe.

    Copies in worker processes share what they remember; other copies begin empty.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        # So that no one else can compute the digests of data keys.
        self._salt = secrets.token_bytes(16)
        self._files: MutableMapping[bytes, FileLocation] = {}
        self._lock = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        shared = shared_with_workers(self._files)
        if shared is not None:
            self._files = shared
        # An empty shared dictionary is false.
        files = {} if shared is None else shared
        return {"_refuses": self._refuses, "_salt": self._salt, "_files": files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ForkSafeLock()

    def compare(self, opened: OpenedFile) -> None:
        """Remember a file; refuse it, or warn, if it shares data key and file unique with another one."""
        # There is no warning if the other file was moved or replaced since, or has the same bytes, as in a backup:
        # no module could be exchanged.
        if not opened.is_encrypted:
            return
        envelope = opened.footer.envelope
        file_unique = envelope.aad_file_unique or b""
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        other = self.other(opened.location, dek, file_unique)
        if other is None:
            return
        if self._refuses and not _is_there(other, file_unique):
            # The file was moved here, or the other one was replaced: views live longer than names of files.
            with self._lock:
                self._files.pop(self._digest(dek, file_unique), None)
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
        """Remember a file; return another file, not a link to it, with the same data key and file unique."""
        digest = self._digest(footer_dek, file_unique)
        with self._lock:
            # One step, because worker processes may do it at the same time.
            found = self._files.setdefault(digest, location)
            # With `refuses`, the first file stays, so that the other one is refused again.
            if not self._refuses and found != location:
                self._files[digest] = location
            if isinstance(self._files, dict) and len(self._files) > MOST_REMEMBERED:
                del self._files[next(iter(self._files))]
        return None if found == location or found.is_same_file(location) else found

    def _digest(self, footer_dek: SecretBytes, file_unique: bytes) -> bytes:
        return hashlib.sha256(self._salt + footer_dek.reveal() + file_unique).digest()[:16]


def _is_there(location: FileLocation, file_unique: bytes) -> bool:
    """Return whether a file with this file unique is still there, or cannot be read."""
    try:
        with open_source(location) as source:
            return (read_envelope(source).aad_file_unique or b"") == file_unique
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (KeytoolsError, OSError):
        return True


def _differs(location: FileLocation, opened: OpenedFile) -> bool:
    """Return whether another file has the file unique of the opened one, and other data."""
    try:
        envelope = envelope_at(location)
    except (KeytoolsError, OSError):
        return False
    is_other = VerifiedTail.of(envelope) != opened.tail
    return is_other and envelope.aad_file_unique == opened.footer.envelope.aad_file_unique
