"""Which keys a file has: what its authentic footer refers to, in the footer or in its key material file."""

from __future__ import annotations

import contextvars
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.errors import (
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsError,
    value_or_raise,
)
from parquet_keytools.files.opened_file import naming_place
from parquet_keytools.keys.kek import dek_of
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, KeyReference, parse_key_metadata
from parquet_keytools.keys.key_wrapping import DataKeys, decode_master_key_id
from parquet_keytools.keys.material_store import parse_key_materials, read_key_material_file
from parquet_keytools.rotation.report import FileRotation
from parquet_keytools.rotation.rewrapper import NewMaterial, RewrapTask, WrappedKey
from parquet_keytools.rotation.tail import Tail, check_unchanged, read_tail
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, key_material_location


@dataclass(frozen=True)
class FileKey:
    """A wrapped key of a file.

    Attributes:
        text: The same as it lies in the file: key metadata, or an entry of the key material file.
        reference: Its name in the key material file; None where it is internal.
    """

    material: KeyMaterial = field(repr=False)
    text: str | bytes = field(repr=False)
    reference: str | None

    @property
    def wrapped_key(self) -> WrappedKey:
        """What the KMS wrapped: the KEK, or with single wrapping the DEK."""
        return WrappedKey(decode_master_key_id(self.material.master_key_id), self.material.kms_wrapped_key)


AadPrefixOf = Callable[[FileLocation, bytes | None], AadPrefix]
"""Returns the AAD prefix that a file must have, given what `stated_aad_prefix` says; None takes what it stores."""

Unwrapped = Mapping[WrappedKey, SecretBytes | KmsError]
"""What the KMS unwrapped, or why it did not."""


_SECONDS_IN_THE_MAKING = 3600.0


@dataclass(frozen=True)
class ExternalMaterial:
    """A key material file as it was read."""

    location: FileLocation
    content: bytes = field(repr=False)
    by_reference: Mapping[str, FileKey]

    @property
    def held(self) -> tuple[FileKey, ...]:
        """Its keys, also those that the Parquet file does not refer to."""
        return tuple(self.by_reference.values())

    @property
    def may_be_in_the_making(self) -> bool:
        """Whether a writer may just now put a Parquet file in place that needs entries which nobody refers to yet.

        Key material is written first (docs/adr/0005). On this machine a lock keeps such writers out; elsewhere
        there is none, and only time tells.
        """
        if self.location.is_local:
            return False
        changed_at = self.location.info().mtime
        return changed_at is None or time.time() - changed_at.timestamp() < _SECONDS_IN_THE_MAKING

    def with_new(self, new_texts: Mapping[str, str], dropped: Collection[str]) -> bytes:
        """Return the content with some entries replaced, and some left out; the others and their order stay."""
        texts = {reference: held.text for reference, held in self.by_reference.items() if reference not in dropped}
        return json.dumps({**texts, **new_texts}, separators=(",", ":")).encode()


def read_external_material(parquet_file: FileLocation) -> ExternalMaterial:
    """Read the key material file of a Parquet file.

    Raises:
        KeyMaterialError: There is none, or it is not valid.
    """
    location, content = key_material_location(parquet_file), read_key_material_file(parquet_file)
    materials = parse_key_materials(content, str(location))
    texts: dict[str, str] = json.loads(content)
    held = {reference: FileKey(material, texts[reference], reference) for reference, material in materials.items()}
    return ExternalMaterial(location, content, held)


@dataclass
class FileKeys:
    """The keys of one file.

    Before its footer is authentic only the key of the footer is known, and nothing that is said of it is proven.

    Attributes:
        envelope: What its footer says without a key.
        external: Its key material file; None where no key metadata that was seen refers to it.
        internal: Key metadata that is key material -> the key.
    """

    location: FileLocation
    tail: Tail
    envelope: FooterEnvelope
    external: ExternalMaterial | None = None
    internal: dict[bytes, FileKey] = field(default_factory=dict)
    footer: Footer | None = None
    _referenced: dict[int, FileKey] = field(default_factory=dict)

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is encrypted at all."""
        return self.envelope.mode is not FooterMode.UNENCRYPTED

    @property
    def referenced(self) -> list[FileKey]:
        """The wrapped keys that key metadata refers to: the footer's first; those of columns once it is opened."""
        return list(self._referenced.values())

    @property
    def unreferenced(self) -> list[FileKey]:
        """Entries of the key material file that the authentic footer does not refer to: they are nobody's."""
        if self.external is None or (self.is_encrypted and self.footer is None):
            return []
        return [held for held in self.external.held if id(held) not in self._referenced]

    @property
    def footer_key(self) -> FileKey | None:
        """The footer's key; None where a data key takes its place, or the key material file lacks it."""
        return self.key_of(self.envelope.key_metadata)

    def key_of(self, key_metadata: bytes | None) -> FileKey | None:
        """Return the wrapped key that key metadata stands for; None for a data key."""
        if key_metadata in self.internal:
            return self.internal[key_metadata]
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference) and self.external is not None:
            return self.external.by_reference.get(parsed.reference)
        return None

    def column_keys(self) -> Iterator[tuple[FooterColumn, FileKey]]:
        """Yield the columns of the authentic footer that have a wrapped key, and that key."""
        if self.footer is not None and self.is_encrypted:
            for column in own_key_columns(self.footer):
                held = self.key_of(column.key_metadata)
                if held is not None:
                    yield column, held

    def data_key(self, data_keys: DataKeys) -> SecretBytes:
        """Return the data key of the footer.

        Raises:
            KeyNotAvailableError: It is not known.
        """
        parsed = parse_key_metadata(self.envelope.key_metadata)
        name = parsed.name if isinstance(parsed, DataKeyId) else data_keys.footer_without_metadata
        try:
            return data_keys.find(name, "the footer")
        except KeyNotAvailableError as error:
            raise KeyNotAvailableError(
                f"{self.location}: {error} Which keys its columns have cannot be seen."
            ) from None

    def dek(self, held: FileKey, unwrapped: Unwrapped | None) -> SecretBytes:
        """Return the DEK of one of the keys.

        Raises:
            KeyNotAvailableError: There is no KMS.
            KmsError: The KMS did not unwrap it.
            KeyMaterialError: What it unwrapped is not the KEK of the wrapped DEK.
        """
        if unwrapped is None:
            raise KeyNotAvailableError(
                f"{self.location}: no KMS unwraps its keys, and unproven keys show nothing.",
                hint="Name a configuration whose KMS unwraps them.",
            )
        return dek_of(held.material, value_or_raise(unwrapped[held.wrapped_key]))

    def footer_dek(self, unwrapped: Unwrapped | None, data_keys: DataKeys) -> SecretBytes:
        """Return the DEK of the footer, or the data key in its place; see `dek` and `data_key`."""
        held = self.footer_key
        return self.data_key(data_keys) if held is None else self.dek(held, unwrapped)

    def expected_prefix(self, aad_prefix_of: AadPrefixOf) -> AadPrefix:
        """Return the AAD prefix that is expected of the file, if it may have it; no key is needed for that.

        Raises:
            AadPrefixError: The file has another one, or one that nobody supplies.
            ParquetFormatError: It has no file unique.
        """
        if not self.is_encrypted:
            return None
        expected = aad_prefix_of(self.location, stated_aad_prefix(self.envelope))
        self.envelope.file_aads(expected)
        return expected

    def open(self, footer_dek: SecretBytes | None, aad_prefix: AadPrefix) -> None:
        """Authenticate the footer, and take in what it says of columns.

        Raises:
            ChangedMeanwhileError: Somebody replaces the file just now.
            DecryptionError: The footer does not authenticate.
            KeyMaterialError: Key metadata of a column is not valid, or refers to what is not there.
            ParquetFormatError: The footer is not what the format says.
        """
        with naming_place(self.location):
            footer = self.envelope.open(footer_dek, aad_prefix)
        self.footer = footer
        try:
            self._add(column.key_metadata for column in own_key_columns(footer))
        except KeyMaterialError:
            check_unchanged(self.location, self.tail)
            raise

    def prove(self, column: FooterColumn, dek: SecretBytes) -> None:
        """Decrypt metadata of a column with a DEK: that proves that it is this column's.

        Raises:
            DecryptionError: It is not.
            ParquetFormatError: The metadata is missing, or not what the format says.
        """
        assert self.footer is not None
        if self.footer.row_groups:
            with naming_place(self.location, self.footer.columns):
                self.footer.chunk_metadata(0, column, self.footer.cipher_of(column, dek))

    def add_footer_key(self) -> None:
        """Take in the key metadata of the footer.

        Raises:
            KeyMaterialError: It is not valid, or refers to what is not there, or says that it is no footer's.
        """
        self._add([self.envelope.key_metadata])
        held = self.footer_key
        if held is not None and not held.material.is_footer_key:
            # Readers refuse it, too.
            raise KeyMaterialError("isFooterKey: is false in the footer's", path=str(self.location))

    def _add(self, all_key_metadata: Iterable[bytes | None]) -> None:
        try:
            for key_metadata in all_key_metadata:
                if key_metadata is None or key_metadata in self.internal:
                    continue
                parsed = parse_key_metadata(key_metadata)
                if isinstance(parsed, KeyMaterial):
                    held = FileKey(parsed, key_metadata, None)
                    self.internal[key_metadata] = self._referenced[id(held)] = held
                elif isinstance(parsed, KeyReference):
                    if self.external is None:
                        self.external = read_external_material(self.location)
                    if parsed.reference not in self.external.by_reference:
                        raise KeyMaterialError(f"the key material file has no {parsed.reference!r}")
                    held = self.external.by_reference[parsed.reference]
                    self._referenced[id(held)] = held
        except KeyMaterialError as error:
            if error.path is not None:
                raise
            raise KeyMaterialError(str(error), path=str(self.location)) from None


def stated_aad_prefix(envelope: FooterEnvelope) -> bytes | None:
    """Return the AAD prefix of a file, empty where it has none; None where it has one that it does not store."""
    if envelope.aad_prefix is None and not envelope.supply_aad_prefix:
        return b""
    return envelope.aad_prefix


def own_key_columns(footer: Footer) -> list[FooterColumn]:
    """Return the columns that have a key of their own."""
    return [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]


def read_file_keys(location: FileLocation) -> FileKeys:
    """Read what shows without a key and is needed for the footer: its tail, and its key material file.

    Raises:
        ChangedMeanwhileError: Somebody replaces the file just now, and its key material is that of the other one.
        KeyMaterialError: Key metadata or key material is not valid, or its file is missing.
        ParquetFormatError: It is not a Parquet file.
        OSError: It cannot be read.
    """
    tail, envelope = read_tail(location)
    keys = FileKeys(location, tail, envelope)
    if keys.is_encrypted:
        try:
            keys.add_footer_key()
        except KeyMaterialError:
            check_unchanged(location, tail)
            raise
    return keys


# --- many files ---


FILES_PER_BATCH = 1000
"""For how many files, about, the KMS is asked together."""

BYTES_PER_BATCH = 8 * 1024 * 1024
"""To how many bytes, about, their footers and key material may come; parsed they take many times that."""

FILES_PER_READ = 64


@dataclass
class BatchFile:
    """A file on its way.

    Attributes:
        tasks: For each wrapped key that shall change, what is to be done.
        aad_prefix: The AAD prefix that is expected of the file; None takes what it stores.
        footer_dek: The DEK of its footer, once that is needed and known.
        new: For each wrapped key that changed, what it became.
        unwrapped: The keys of columns that stay, and that the KMS is asked to unwrap.
        shares_keys_with: See `FileRotation`.
    """

    location: FileLocation
    keys: FileKeys | None = None
    tasks: dict[int, tuple[FileKey, RewrapTask]] = field(default_factory=dict)
    aad_prefix: AadPrefix = None
    footer_dek: SecretBytes | None = None
    new: dict[int, NewMaterial] = field(default_factory=dict)
    unwrapped: set[int] = field(default_factory=set)
    shares_keys_with: str | None = None
    result: FileRotation | None = None
    failure: KeytoolsError | OSError | None = None

    @property
    def read_keys(self) -> FileKeys:
        """Its keys; only after they were read."""
        assert self.keys is not None
        return self.keys

    @property
    def size_bytes(self) -> int:
        """How much of the file is kept in memory, before it is parsed."""
        if self.keys is None:
            return 0
        return len(self.keys.tail.data) + len(self.keys.external.content if self.keys.external else b"")


def read_batch(pool: Executor, locations: Iterator[FileLocation]) -> list[BatchFile]:
    """Read the keys of the next files, as many as one window takes; of none when there are no more."""
    works: list[BatchFile] = []
    size_bytes = 0
    while len(works) < FILES_PER_BATCH and size_bytes < BYTES_PER_BATCH:
        batch = [BatchFile(location) for location in itertools.islice(locations, FILES_PER_READ)]
        if not batch:
            break
        size_bytes += sum(work.size_bytes for work in step(pool, _read, batch))
        works += batch
    return works


def _read(work: BatchFile) -> None:
    work.keys = read_file_keys(work.location)


def step(pool: Executor, function: Callable[[BatchFile], None], works: Sequence[BatchFile]) -> Iterator[BatchFile]:
    """Do a step with each file by itself; yield those that go on: what fails is nothing to the others."""
    return (work for work in step_each(pool, function, works) if work.failure is None)


def step_each(
    pool: Executor, function: Callable[[BatchFile], None], works: Sequence[BatchFile]
) -> Iterator[BatchFile]:
    """Do a step with each file, by several threads; yield each when it is done."""

    def guarded(work: BatchFile) -> BatchFile:
        try:
            function(work)
        except KeyMaterialError as error:
            # What unwraps a key does not know of which file it is.
            named = error.path is not None
            work.failure = error if named else KeyMaterialError(str(error), path=str(work.location))
        except (KeytoolsError, OSError) as error:
            work.failure = error
        return work

    # What is said of the run, such as which files keys are for, is known in its threads, too.
    context = contextvars.copy_context()
    return pool.map(lambda work: context.copy().run(guarded, work), works)
