"""The keys of files, which the authentic footer refers to, in the footer itself or in the key material file."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsError,
    StorageFailedError,
    value_or_raise,
)
from parquet_keytools.files.opened_file import VerifiedTail, naming_place
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, KeyReference, parse_key_metadata
from parquet_keytools.keys.key_wrapping import DataKeys, decode_master_key_id, dek_of
from parquet_keytools.keys.material_store import parse_key_materials, read_key_material_file
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.rewrapper import NewMaterial, RewrapTask, WrappedKey
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import state_of_local
from parquet_keytools.storage.locations import FileLocation, ends_with, key_material_location, open_source

R = TypeVar("R")

# --- the file as it was read ---


@dataclass(frozen=True)
class Tail(VerifiedTail):
    """The tail of a file as it was read. Its content is not verified yet.

    `state` is the `file_state` from before it was read.
    """

    state: tuple[object, ...]


def read_tail(location: FileLocation) -> tuple[Tail, FooterEnvelope]:
    """Read the tail of a file, and the part of its footer that needs no key."""
    # Before the file is read: a change during the read shows when the states are compared.
    state = file_state(location)
    with open_source(location) as source:
        envelope = read_envelope(source)
    offset, data = envelope.footer_offset, envelope.tail
    return Tail(offset + len(data), offset, data, state), envelope


def check_unchanged(location: FileLocation, tail: Tail) -> None:
    """Raise `ChangedMeanwhileError` if a file changed after its tail was read, or is gone."""
    try:
        if file_state(location) == tail.state:
            with open_source(location) as source:
                if ends_with(source, tail.offset, tail.data):
                    return
    except FileNotFoundError:
        pass
    raise changed_while_rotated(location)


@contextlib.contextmanager
def unless_changed(location: FileLocation, tail: Tail) -> Iterator[None]:
    """Raise `ChangedMeanwhileError` in place of an error if the file changed after its tail was read."""
    try:
        yield
    except StorageFailedError:
        raise
    except (KeytoolsError, OSError):
        check_unchanged(location, tail)
        raise


def changed_while_rotated(location: FileLocation) -> ChangedMeanwhileError:
    """Return the error for a file that changed during the rotation."""
    return ChangedMeanwhileError(f"{location} changed while it was processed.", hint="Try again.")


def file_state(location: FileLocation) -> tuple[object, ...]:
    """Return attributes of a file that change when it is replaced or written to."""
    if location.is_local:
        return state_of_local(location.path)
    if location.is_in_s3:
        with location.filesystem.open_input_file(location.path) as file:
            said = dict(file.metadata())
            # Times are whole seconds: two rotations of one file may take less.
            return file.size(), said.get("ETag") or said.get("Last-Modified")
    info = location.info()
    if info.size is None:
        raise FileNotFoundError(f"there is no file {location}")
    return info.size, info.mtime_ns


# --- the keys of one file ---


@dataclass(eq=False)
class FileKey:
    """A wrapped key of a file.

    Attributes:
        material: Its key material, with the decoded identifier of its master key; once the file refers to it, with
            the name of its KMS, too.
        text: The same as stored: key metadata, or an entry of the key material file.
        reference: Its name in the key material file; None if it is internal.
        task: How it is re-wrapped; None if it stays.
        is_proven: Whether it stays, and is unwrapped and proven.
    """

    material: KeyMaterial = field(repr=False)
    text: str | bytes = field(repr=False)
    reference: str | None
    task: RewrapTask | None = None
    new: NewMaterial | None = None
    is_proven: bool = False
    is_referenced: bool = False

    def __post_init__(self) -> None:
        self.material = replace(self.material, master_key_id=decode_master_key_id(self.material.master_key_id))

    @property
    def wrapped_key(self) -> WrappedKey:
        """The key that the KMS wrapped: the KEK, or with single wrapping the DEK."""
        return WrappedKey(self.material.master_key_id, self.material.kms_wrapped_key)


AadPrefixOf = Callable[[FileLocation, bytes | None], AadPrefix]
"""Takes a file and its stored AAD prefix, and returns the expected one; None accepts any.

The stored prefix is empty if the file has none, and None if it has one that it does not store.
"""

Unwrapped = Mapping[WrappedKey, SecretBytes | KmsError]

_SECONDS_IN_THE_MAKING = 3600.0


@dataclass(frozen=True)
class ExternalMaterial:
    """A key material file as it was read."""

    location: FileLocation
    content: bytes = field(repr=False)
    by_reference: dict[str, FileKey]

    @property
    def may_be_in_the_making(self) -> bool:
        """Whether a writer may be about to put a Parquet file in place that refers to unreferenced entries.

        Key material is written first (docs/adr/0005). A lock keeps out writers of this machine; for a store, only
        the time since the last change shows it.
        """
        if self.location.is_local:
            return False
        changed_at = self.location.info().mtime
        return changed_at is None or time.time() - changed_at.timestamp() < _SECONDS_IN_THE_MAKING

    def with_new(self, new_texts: Mapping[str, str], dropped: Collection[str]) -> bytes:
        """Return the content with some entries replaced and some dropped; all others and their order stay."""
        texts = {reference: held.text for reference, held in self.by_reference.items() if reference not in dropped}
        return json.dumps({**texts, **new_texts}, separators=(",", ":")).encode()


def read_external_material(parquet_file: FileLocation) -> ExternalMaterial:
    """Read the key material file of a Parquet file."""
    location, content = key_material_location(parquet_file), read_key_material_file(parquet_file)
    materials = parse_key_materials(content, str(location))
    texts: dict[str, str] = json.loads(content)
    held = {reference: FileKey(material, texts[reference], reference) for reference, material in materials.items()}
    return ExternalMaterial(location, content, held)


@dataclass(eq=False, repr=False)
class FileKeys:
    """A file of a run, and once it was read its keys: a `KeySource`.

    Until the footer is authentic, only the key of the footer is known, and nothing about it is proven.

    Attributes:
        external: Its key material file; None if no key metadata so far refers to it.
        internal: Key metadata that is key material -> the key.
        referenced: The keys that key metadata refers to: first the footer's, and after `open` the columns'.
        footer: The authentic footer, after `open`.
        instance_id: The KMS that the key material of the footer names; None if it names none.
        aad_prefix: The expected AAD prefix; None accepts the stored one.
        failure: Why the file failed.
    """

    location: FileLocation
    data_keys: DataKeys
    kms: KmsClient | None = None
    is_read: bool = False
    tail: Tail = field(init=False)
    envelope: FooterEnvelope = field(init=False)
    external: ExternalMaterial | None = None
    internal: dict[bytes, FileKey] = field(default_factory=dict)
    referenced: list[FileKey] = field(default_factory=list)
    footer: Footer | None = None
    instance_id: str | None = None
    aad_prefix: AadPrefix = None
    footer_dek: SecretBytes | None = None
    failure: KeytoolsError | OSError | None = None

    def read(self) -> None:
        """Read the tail of the file, and the key material of its footer. No key is needed."""
        self.tail, self.envelope = read_tail(self.location)
        if self.is_encrypted:
            self._add([self.envelope.key_metadata])
            held = self.footer_key
            if held is not None and not held.material.is_footer_key:
                # Readers refuse it, too.
                check_unchanged(self.location, self.tail)
                raise KeyMaterialError("isFooterKey: is false in the footer's", path=str(self.location))
        self.is_read = True

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is encrypted."""
        return self.envelope.mode is not FooterMode.UNENCRYPTED

    @property
    def unreferenced(self) -> list[FileKey]:
        """Entries of the key material file that the authentic footer does not refer to."""
        if self.external is None or (self.is_encrypted and self.footer is None):
            return []
        return [held for held in self.external.by_reference.values() if not held.is_referenced]

    @property
    def footer_key(self) -> FileKey | None:
        """The footer's key; None if it is a data key, or missing in the key material file."""
        return self.key_of(self.envelope.key_metadata)

    @property
    def changing(self) -> list[FileKey]:
        """The wrapped keys that change."""
        return [held for held in self.referenced if held.task is not None]

    def key_of(self, key_metadata: bytes | None) -> FileKey | None:
        """Return the wrapped key of key metadata; None for a data key."""
        if key_metadata in self.internal:
            return self.internal[key_metadata]
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference) and self.external is not None:
            return self.external.by_reference.get(parsed.reference)
        return None

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material of key metadata; None for a data key."""
        held = self.key_of(key_metadata)
        return None if held is None else held.material

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        """Return the name of a data key; see `DataKeys.name_without_metadata`."""
        return self.data_keys.name_without_metadata(column_path)

    def column_keys(self) -> Iterator[tuple[FooterColumn, FileKey]]:
        """Yield the columns of the authentic footer that have a wrapped key, with that key."""
        if self.footer is not None and self.is_encrypted:
            for column in own_key_columns(self.footer):
                held = self.key_of(column.key_metadata)
                if held is not None:
                    yield column, held

    def dek(self, held: FileKey, unwrapped: Unwrapped | None) -> SecretBytes:
        """Return the DEK of one of the keys; `unwrapped` is None without a KMS."""
        if unwrapped is None:
            raise KeyNotAvailableError(
                f"{self.location}: no KMS unwraps its keys, and unproven keys show nothing.",
                hint="Name a configuration whose KMS unwraps them.",
            )
        return dek_of(held.material, value_or_raise(unwrapped[held.wrapped_key]))

    def find_footer_dek(self, unwrapped: Unwrapped | None) -> SecretBytes:
        """Return the DEK of the footer, which may be a data key; see `dek`."""
        held = self.footer_key
        if held is not None:
            return self.dek(held, unwrapped)
        parsed = parse_key_metadata(self.envelope.key_metadata)
        name = parsed.name if isinstance(parsed, DataKeyId) else self.name_without_metadata(None)
        try:
            return self.data_keys.find(name, "the footer")
        except KeyNotAvailableError as error:
            raise KeyNotAvailableError(
                f"{self.location}: {error} Which keys its columns have cannot be seen."
            ) from None

    def expect_prefix(self, aad_prefix_of: AadPrefixOf) -> None:
        """Take the AAD prefix that is expected of the file, after checking that the file may have it."""
        if self.is_encrypted:
            envelope, stored = self.envelope, self.envelope.aad_prefix
            if stored is None and not envelope.supply_aad_prefix:
                stored = b""
            self.aad_prefix = aad_prefix_of(self.location, stored)
            envelope.file_aads(self.aad_prefix)

    def open(self, footer_dek: SecretBytes | None) -> Footer:
        """Authenticate the footer, and add the keys of columns."""
        with naming_place(self.location):
            self.footer = self.envelope.open(footer_dek, self.aad_prefix)
        self.footer_dek = footer_dek
        self._add(column.key_metadata for column in own_key_columns(self.footer))
        return self.footer

    def prove(self, column: FooterColumn, dek: SecretBytes) -> None:
        """Prove that a DEK belongs to a column by decrypting metadata of the column."""
        assert self.footer is not None
        if self.footer.row_groups:
            with naming_place(self.location, self.footer.columns):
                self.footer.chunk_metadata(0, column, self.footer.cipher_of(column, dek))

    def _add(self, all_key_metadata: Iterable[bytes | None]) -> None:
        try:
            for key_metadata in all_key_metadata:
                if key_metadata is None or key_metadata in self.internal:
                    continue
                parsed = parse_key_metadata(key_metadata)
                if isinstance(parsed, KeyMaterial):
                    self.internal[key_metadata] = held = FileKey(parsed, key_metadata, None)
                elif isinstance(parsed, KeyReference):
                    if self.external is None:
                        self.external = read_external_material(self.location)
                    if parsed.reference not in self.external.by_reference:
                        raise KeyMaterialError(f"the key material file has no {parsed.reference!r}")
                    held = self.external.by_reference[parsed.reference]
                else:
                    continue
                if not held.is_referenced:
                    self._refer_to(held)
        except KeyMaterialError as error:
            # The key material may belong to a file that replaced this one.
            check_unchanged(self.location, self.tail)
            raise _naming(error, self.location) from None

    def _refer_to(self, held: FileKey) -> None:
        """Note that the file refers to a key, and name its master key; see `KmsClient.id_of_file`."""
        material = held.material
        if not self.referenced and material.is_footer_key:
            # The key of the footer, which is added first, names the KMS of the file.
            self.instance_id = material.kms_instance_id
        if self.kms is not None:
            master_key_id = self.kms.id_of_file(material.master_key_id, self.instance_id)
            held.material = replace(material, master_key_id=master_key_id)
        held.is_referenced = True
        self.referenced.append(held)


def _naming(error: KeyMaterialError, location: FileLocation) -> KeyMaterialError:
    """Return an error that names the file."""
    return error if error.path is not None else KeyMaterialError(str(error), path=str(location))


def own_key_columns(footer: Footer) -> list[FooterColumn]:
    """Return the columns that have a key of their own."""
    return [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]


# --- many files ---


FILES_PER_BATCH = 1000
"""For about how many files the KMS is called together."""

BYTES_PER_BATCH = 8 * 1024 * 1024
"""About the largest total size of footers and key material in a batch; parsed, they take many times as much."""

FILES_PER_READ = 64


def read_batch(
    pool: Executor, locations: Iterator[FileLocation], data_keys: DataKeys, kms: KmsClient | None
) -> list[FileKeys]:
    """Read the keys of the next files; return an empty list at the end."""
    files: list[FileKeys] = []
    size_bytes = 0
    while len(files) < FILES_PER_BATCH and size_bytes < BYTES_PER_BATCH:
        batch = [FileKeys(location, data_keys, kms) for location in itertools.islice(locations, FILES_PER_READ)]
        if not batch:
            break
        for file in step(pool, FileKeys.read, batch):
            size_bytes += len(file.tail.data) + len(file.external.content if file.external else b"")
        files += batch
    return files


def step(pool: Executor, function: Callable[[FileKeys], object], files: Sequence[FileKeys]) -> list[FileKeys]:
    """Do a step for each file that has not failed; return the files that did not fail in it."""
    list(outcomes(pool, function, files))
    return [file for file in files if file.failure is None]


def outcomes(
    pool: Executor, function: Callable[[FileKeys], R], files: Sequence[FileKeys]
) -> Iterator[R | KeytoolsError | OSError]:
    """Call a function for files that have not failed, in threads; yield results or failures, in order."""

    def guarded(file: FileKeys) -> R | KeytoolsError | OSError:
        try:
            return function(file) if file.failure is None else file.failure
        except KeyMaterialError as error:
            file.failure = _naming(error, file.location)
        except (KeytoolsError, OSError) as error:
            file.failure = error
        return file.failure

    # The context of the run, such as which files keys are for, holds in its threads, too.
    context = contextvars.copy_context()
    return pool.map(lambda file: context.copy().run(guarded, file), list(files))
