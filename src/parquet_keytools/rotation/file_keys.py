"""The keys of files, which the authentic footer refers to, and what a rotation asks the KMS about them.

Where the KMS re-wraps by itself, the old key is never unwrapped here, but the new one is. What it opens proves it:
a KEK unwraps DEKs, and a DEK decrypts the footer or column metadata.

Where the KMS does not re-wrap, and for another KMS, the old key has to be unwrapped here. Fresh KEKs, one for each
master key, then replace the old KEKs: an old KEK costs one request instead of three, and no KEK is valid in two
KMSs. A DEK that the KMS itself wrapped costs three: unwrap, wrap, and unwrap again as the proof.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    ConfigurationError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyNotFoundError,
    StorageFailedError,
    value_or_raise,
)
from parquet_keytools.files.opened_file import VerifiedTail, naming_place
from parquet_keytools.keys.key_material import (
    KeyMaterial,
    KeyReference,
    parse_key_metadata,
    parse_object,
)
from parquet_keytools.keys.key_wrapping import DataKeys, Kek, decode_master_key_id, dek_of, encode_master_key_id
from parquet_keytools.keys.material_store import key_material_location, parse_key_materials, read_key_material_file
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import state_of_local
from parquet_keytools.storage.locations import FileLocation, ends_with, open_source
from parquet_keytools.strict_base64 import encode

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A wrapped key, and the id in the KMS of the master key that wrapped it."""

    master_key_id: str
    wrapped_key: str


# --- master keys and their versions ---

SameMasterKey = Callable[[str, str], "bool | None"]
"""Whether two identifiers mean one master key; None where the KMS does not say."""

KnownVersions = Mapping[str, "str | None"]
"""Master key id -> the newest version."""

_NUMBER = re.compile(r"v?([0-9]{1,18})")


def same_master_key(kms: KmsClient | None) -> SameMasterKey:
    """Return a comparison of master key identifiers that treats an alias and its key as equal."""
    identities: dict[str, str | None] = {}

    def same(one: str, other: str) -> bool | None:
        if one == other or kms is None:
            return one == other
        for name in (one, other):
            if name not in identities:
                identities[name] = kms.identity(name)
        found = identities[one], identities[other]
        return None if None in found else found[0] == found[1]

    return same


class MasterKeyVersions:
    """Versions of master keys; each master key is described once in a run. `known` has those looked up before."""

    def __init__(self, kms: KmsClient, known: KnownVersions | None = None) -> None:
        self._kms = kms
        self._lock = threading.Lock()
        self._current = dict(known or {})
        self._same = same_master_key(kms)

    @property
    def calls(self) -> KmsCalls:
        """How many master keys were described."""
        return KmsCalls(describe=len(self._current))

    @property
    def known(self) -> KnownVersions:
        """The versions that were looked up so far."""
        with self._lock:
            return dict(self._current)

    def as_named(self, master_key_id: str, names: frozenset[str]) -> str:
        """Return which of some names means this master key; its own name if none does, as far as the KMS says."""
        if master_key_id in names:
            return master_key_id
        return next((name for name in sorted(names) if self._same(master_key_id, name)), master_key_id)

    def of(self, key: WrappedKey) -> str | None:
        """Return the version that wrapped a key; None if it is unknown."""
        return self._kms.wrapped_key_version(key.wrapped_key, key.master_key_id)

    def describe(self, master_key_id: str) -> MasterKeyDescription | None:
        """Return the description of a master key; None if it is unavailable, but may exist."""
        try:
            description = self._kms.describe(master_key_id)
        except MasterKeyNotFoundError:
            raise
        except KmsError:
            description = None
        self._current[master_key_id] = description.current_version if description else None
        return description

    def current(self, master_key_id: str) -> str | None:
        """Return the version of a master key that wraps now; None if it is unknown."""
        with self._lock:
            if master_key_id not in self._current:
                try:
                    self.describe(master_key_id)
                except MasterKeyNotFoundError:
                    self._current[master_key_id] = None
            return self._current[master_key_id]


def is_same_version(version: str, other: str) -> bool:
    """Return whether two names mean the same version: `v2` is 2."""
    return _version(version) == _version(other)


def is_older_version(version: str, than: str) -> bool:
    """Return whether a version is older; names that are not numbers have no order, and any other name is older."""
    number, than_number = _version(version), _version(than)
    if isinstance(number, int) and isinstance(than_number, int):
        return number < than_number
    if isinstance(number, int):
        raise ConfigurationError(f"{than!r} is no version of this KMS, which counts versions: {version} is one.")
    return version != than


def check_version(master_key_id: str, version: str, newest: str | None) -> None:
    """Refuse a version that a master key cannot have, where the KMS counts them: no file would seem to need it."""
    number, newest_number = _version(version), _version(newest or "")
    if isinstance(newest_number, int) and not (isinstance(number, int) and 1 <= number <= newest_number):
        raise ConfigurationError(
            f"the master key {master_key_id!r} has no version {version!r}: its newest is {newest}."
        )


def _version(name: str) -> int | str:
    number = _NUMBER.fullmatch(name)
    return int(number[1]) if number else name


# --- new wrapped keys ---


@dataclass(frozen=True, slots=True)
class RewrapTask:
    """A wrapped key, a KEK or a DEK, that the current version of a master key will wrap."""

    old: WrappedKey
    new_master_key_id: str
    is_kek: bool


@dataclass(frozen=True)
class Rewrapped:
    """A new wrapped key, the key that was wrapped before, and the fresh KEK in its place, if there is one."""

    wrapped_key: str
    key: SecretBytes
    new_kek: Kek | None = None


RewrapOutcomes = dict[RewrapTask, Rewrapped | KmsError]

REMEMBERED_KEYS = 100_000
"""Maximum number of distinct keys that a run remembers, so that a KEK of many files is re-wrapped once."""


class _Remembered(dict[K, V]):
    """Forgets the oldest entries."""

    def remember(self, new: Mapping[K, V | KmsError]) -> None:
        for key, value in new.items():
            if not isinstance(value, KmsError):
                self[key] = value
                if len(self) > REMEMBERED_KEYS:
                    del self[next(iter(self))]

    def split(self, wanted: Iterable[K]) -> tuple[dict[K, V], list[K]]:
        """Return the entries that are known, and the keys that are not, each once."""
        each = dict.fromkeys(wanted)
        return {key: self[key] for key in each if key in self}, [key for key in each if key not in self]


@dataclass(eq=False, repr=False)
class Rewrapper:
    """Re-wraps keys for one run.

    Attributes:
        new_keks: Whether fresh KEKs replace all KEKs, even if the KMS could re-wrap them.
        dry_run: Whether calls that re-wrap are counted instead of made; keys are unwrapped.
        given: What the KMS has already re-wrapped, or its errors. It is still proven here.
    """

    kms: KmsClient
    new_keks: bool = False
    dry_run: bool = False
    given: Mapping[RewrapTask, str | KmsError] = field(default_factory=dict)
    _rewrapped: _Remembered[RewrapTask, Rewrapped] = field(default_factory=_Remembered, init=False)
    _unwrapped: _Remembered[WrappedKey, SecretBytes] = field(default_factory=_Remembered, init=False)
    _fresh_keks: dict[tuple[str, int], Rewrapped] = field(default_factory=dict, init=False)
    _counted: _Remembered[RewrapTask | WrappedKey, None] = field(default_factory=_Remembered, init=False)
    _counted_keks: set[str] = field(default_factory=set, init=False)
    _calls: Counter[str] = field(default_factory=Counter, init=False)
    _expected: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def calls(self) -> KmsCalls:
        """The calls that were made."""
        return KmsCalls(**self._calls)

    @property
    def expected_calls(self) -> KmsCalls:
        """The calls that a rotation would make, as counted by a dry run."""
        return KmsCalls(**self._expected)

    def expect(self, keys: Iterable[RewrapTask | WrappedKey]) -> None:
        """Count the calls for keys that would be re-wrapped, or stay and be unwrapped, each key once."""
        _, new = self._counted.split(keys)
        self._counted.remember(dict.fromkeys(new))
        for key in new:
            if isinstance(key, WrappedKey):
                self._expected.update(unwrap=1)
            elif not self.is_unwrapped(key):
                self._expected.update(rewrap=1, unwrap=1)
            elif not key.is_kek:
                self._expected.update(unwrap=2, wrap=1)
            else:
                # One fresh KEK for each master key. Its length is unknown, and taken to be the same for all.
                fresh = int(key.new_master_key_id not in self._counted_keks)
                self._counted_keks.add(key.new_master_key_id)
                self._expected.update(unwrap=1 + fresh, wrap=fresh)

    def unwrap(self, wanted: Iterable[WrappedKey]) -> dict[WrappedKey, SecretBytes | KmsError]:
        """Unwrap keys that stay as they are."""
        known, missing = self._unwrapped.split(wanted)
        new = dict(zip(missing, self._unwrap(missing), strict=True))
        self._unwrapped.remember(new)
        return {**known, **new}

    def rewrap(self, wanted: Iterable[RewrapTask]) -> RewrapOutcomes:
        """Re-wrap keys, all that are new together; return nothing in a dry run."""
        if self.dry_run:
            return {}
        known, missing = self._rewrapped.split(wanted)
        new = self._replace([task for task in missing if self.is_unwrapped(task)])
        new |= self._rewrap_inside([task for task in missing if not self.is_unwrapped(task)])
        self._rewrapped.remember(new)
        return {**known, **new}

    def is_unwrapped(self, task: RewrapTask) -> bool:
        """Return whether a key has to be unwrapped here: another KMS wraps it, or another KEK replaces it."""
        old, new = task.old.master_key_id, task.new_master_key_id
        if self.kms.instance_of(old) != self.kms.instance_of(new):
            return True
        return task.is_kek and (self.new_keks or not self.kms.rewraps_by_itself(old, new))

    def _rewrap_inside(self, tasks: Sequence[RewrapTask]) -> RewrapOutcomes:
        """Have the KMS re-wrap keys, and unwrap the results."""
        missing = [task for task in tasks if task not in self.given]
        requests = [
            RewrapRequest(task.old.wrapped_key, task.old.master_key_id, task.new_master_key_id) for task in missing
        ]
        self._calls["rewrap"] += len(requests)
        wrapped = dict(zip(missing, self.kms.rewrap_many(requests), strict=True))
        wrapped |= {task: self.given[task] for task in tasks if task in self.given}
        return self._unwrap_new({task: (task.new_master_key_id, wrapped[task]) for task in tasks})

    def _replace(self, tasks: Sequence[RewrapTask]) -> RewrapOutcomes:
        """Unwrap keys, and have the KMS wrap the same DEKs, or one fresh KEK for each master key and length."""
        keys = dict(zip(tasks, self._unwrap([task.old for task in tasks]), strict=True))
        outcomes: RewrapOutcomes = {task: key for task, key in keys.items() if isinstance(key, KmsError)}
        new: dict[object, tuple[str, SecretBytes]] = {}
        fresh: dict[tuple[str, int], Kek] = {}
        for task, key in keys.items():
            if isinstance(key, KmsError):
                continue
            kind = task.new_master_key_id, key.length_bits
            if not task.is_kek:
                new[task] = task.new_master_key_id, key
            elif kind not in fresh and kind not in self._fresh_keks:
                fresh[kind] = Kek.generate(key.length_bits)
                new[kind] = task.new_master_key_id, fresh[kind].key
        wrapped = self._wrap(new)
        for kind, kek in fresh.items():
            found = wrapped[kind]
            if not isinstance(found, KmsError):
                self._fresh_keks[kind] = replace(found, new_kek=kek)
        for task, key in keys.items():
            if not isinstance(key, KmsError):
                kind = task.new_master_key_id, key.length_bits
                found = (self._fresh_keks.get(kind) or wrapped[kind]) if task.is_kek else wrapped[task]
                outcomes[task] = found if isinstance(found, KmsError) else replace(found, key=key)
        return outcomes

    # --- calls of the KMS, counted ---

    def _wrap(self, keys: Mapping[K, tuple[str, SecretBytes]]) -> dict[K, Rewrapped | KmsError]:
        """Have the KMS wrap keys, given with their master keys; each result is proven by unwrapping it."""
        requests = [WrapRequest(key, master_key_id) for master_key_id, key in keys.values()]
        self._calls["wrap"] += len(requests)
        wrapped = zip(keys, self.kms.wrap_many(requests), strict=True)
        outcomes = self._unwrap_new({name: (keys[name][0], new) for name, new in wrapped})
        for name, (master_key_id, key) in keys.items():
            outcome = outcomes[name]
            if isinstance(outcome, Rewrapped) and outcome.key != key:
                outcomes[name] = KmsResponseInvalidError(
                    "the new wrapped key does not unwrap to the same key",
                    backend=self.kms.parts(master_key_id)[0].backend,
                    operation="wrap",
                    master_key_id=master_key_id,
                )
        return outcomes

    def _unwrap_new(self, new: Mapping[K, tuple[str, str | KmsError]]) -> dict[K, Rewrapped | KmsError]:
        """Unwrap new wrapped keys, given with their master keys. An error in place of a key stays."""
        made = {name: WrappedKey(id_, key) for name, (id_, key) in new.items() if isinstance(key, str)}
        outcomes: dict[K, Rewrapped | KmsError] = {
            name: key for name, (_, key) in new.items() if isinstance(key, KmsError)
        }
        for name, key in zip(made, self._unwrap(list(made.values())), strict=True):
            outcomes[name] = key if isinstance(key, KmsError) else Rewrapped(made[name].wrapped_key, key)
        return outcomes

    def _unwrap(self, keys: Sequence[WrappedKey]) -> list[SecretBytes | KmsError]:
        self._calls["unwrap"] += len(keys)
        return self.kms.unwrap_many([UnwrapRequest(key.wrapped_key, key.master_key_id) for key in keys])


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
        new: The new key material, once the key was re-wrapped, and the DEK as unwrapped from it.
        is_proven: Whether it stays, and is unwrapped and proven.
    """

    material: KeyMaterial = field(repr=False)
    text: str | bytes = field(repr=False)
    reference: str | None
    task: RewrapTask | None = None
    new: tuple[str, SecretBytes] | None = field(default=None, repr=False)
    is_proven: bool = False
    is_referenced: bool = False

    def __post_init__(self) -> None:
        self.material = replace(self.material, master_key_id=decode_master_key_id(self.material.master_key_id))

    @property
    def wrapped_key(self) -> WrappedKey:
        """The key that the KMS wrapped: the KEK, or with single wrapping the DEK."""
        return WrappedKey(self.material.master_key_id, self.material.kms_wrapped_key)

    def replaced(self, rewrapped: Rewrapped, written_id: str, instance_id: str | None) -> tuple[str, SecretBytes]:
        """Return the key material with its wrapped key replaced, unknown fields as they are, and the DEK.

        `written_id` is from `KmsClient.id_in_file`; `instance_id` is the KMS that the key material of a footer
        names, and None leaves it.
        """
        fields = self._renamed(written_id)
        dek, kek = dek_of(self.material, rewrapped.key), rewrapped.new_kek
        fields["wrappedDEK" if self.material.kek_id is None else "wrappedKEK"] = rewrapped.wrapped_key
        if kek is not None:
            fields["keyEncryptionKeyID"] = encode(kek.kek_id)
            fields["wrappedDEK"] = kek.wrap_dek(dek)
            if kek.unwrap_dek(fields["wrappedDEK"]) != dek:
                raise KeyMaterialError("wrappedDEK: the new KEK does not lead to the same DEK")
        if instance_id is not None and self.material.is_footer_key:
            fields["kmsInstanceID"] = instance_id
            fields["kmsInstanceURL"] = "DEFAULT"
        return json.dumps(fields, separators=(",", ":")), dek

    def renamed(self, written_id: str) -> str | None:
        """Return the key material with another identifier for the same master key; None if it has this one."""
        if decode_master_key_id(parse_object(self.text, "key material")["masterKeyID"]) == written_id:
            return None
        return json.dumps(self._renamed(written_id), separators=(",", ":"))

    def _renamed(self, written_id: str) -> dict[str, Any]:
        """Return the fields with an identifier, percent-encoded if the old one was, as readers expect."""
        fields = parse_object(self.text, "key material")
        stored = fields["masterKeyID"]
        decoded = decode_master_key_id(stored)
        if decoded != written_id:
            fields["masterKeyID"] = written_id if decoded == stored else encode_master_key_id(written_id)
        return fields


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
    def dropped(self) -> frozenset[str]:
        """Entries of the key material file to drop, because the authentic footer does not refer to them.

        They are not re-wrapped either: a key that an attacker put there must not outlive its master key.
        """
        external = self.external
        if external is None or (self.is_encrypted and self.footer is None):
            return frozenset()
        found = frozenset(name for name, held in external.by_reference.items() if not held.is_referenced)
        return frozenset() if found and external.may_be_in_the_making else found

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
        try:
            return self.data_keys.find(parse_key_metadata(self.envelope.key_metadata), None)
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
