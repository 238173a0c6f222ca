"""What a rotation asks the KMS: versions of master keys, and new wrapped keys, each distinct key once.

Where the KMS re-wraps by itself, the old key is never unwrapped here, but the new one is. What it opens proves it:
a KEK unwraps DEKs, and a DEK decrypts the footer or column metadata.

Where the KMS does not re-wrap, and for another KMS, the old key has to be unwrapped here. Fresh KEKs, one for each
master key, then replace the old KEKs: an old KEK costs one request instead of three, and no KEK is valid in two
KMSs. A DEK that the KMS itself wrapped costs three: unwrap, wrap, and unwrap again as the proof.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyNotFoundError,
)
from parquet_keytools.keys.key_material import KeyMaterial, parse_object
from parquet_keytools.keys.key_wrapping import Kek, decode_master_key_id, dek_of, encode_master_key_id
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.strict_base64 import encode

K = TypeVar("K")
V = TypeVar("V")


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


Outcomes = dict[RewrapTask, Rewrapped | KmsError]

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
    _fresh_keks: dict[tuple[str, int], tuple[Kek, str]] = field(default_factory=dict, init=False)
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

    def rewrap(self, wanted: Iterable[RewrapTask]) -> Outcomes:
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

    def _rewrap_inside(self, tasks: Sequence[RewrapTask]) -> Outcomes:
        """Have the KMS re-wrap keys, and unwrap the results."""
        missing = [task for task in tasks if task not in self.given]
        requests = [
            RewrapRequest(task.old.wrapped_key, task.old.master_key_id, task.new_master_key_id) for task in missing
        ]
        self._calls["rewrap"] += len(requests)
        wrapped = dict(zip(missing, self.kms.rewrap_many(requests), strict=True))
        wrapped |= {task: self.given[task] for task in tasks if task in self.given}
        new = self._unwrap_new({task: (task.new_master_key_id, wrapped[task]) for task in tasks})
        return {task: pair if isinstance(pair, KmsError) else Rewrapped(*pair) for task, pair in new.items()}

    def _replace(self, tasks: Sequence[RewrapTask]) -> Outcomes:
        """Unwrap keys, and have the KMS wrap the same DEKs, or fresh KEKs."""
        unwrapped = dict(zip(tasks, self._unwrap([task.old for task in tasks]), strict=True))
        outcomes: Outcomes = {task: key for task, key in unwrapped.items() if isinstance(key, KmsError)}
        keys = {task: key for task, key in unwrapped.items() if not isinstance(key, KmsError)}
        deks = self._wrap({task: (task.new_master_key_id, key) for task, key in keys.items() if not task.is_kek})
        kinds = {(task.new_master_key_id, key.length_bits) for task, key in keys.items() if task.is_kek}
        failed = self._make_keks(kinds)
        for task, key in keys.items():
            kind = task.new_master_key_id, key.length_bits
            new = failed.get(kind) if task.is_kek else deks[task]
            if isinstance(new, KmsError):
                outcomes[task] = new
            elif new is not None:
                outcomes[task] = Rewrapped(new, key)
            else:
                fresh, wrapped = self._fresh_keks[kind]
                outcomes[task] = Rewrapped(wrapped, key, fresh)
        return outcomes

    def _make_keks(self, kinds: set[tuple[str, int]]) -> dict[tuple[str, int], KmsError]:
        """Make one fresh KEK for each master key and length, once in the whole run; return what failed."""
        new = {kind: Kek.generate(kind[1]) for kind in sorted(kinds - self._fresh_keks.keys())}
        failed: dict[tuple[str, int], KmsError] = {}
        for kind, wrapped in self._wrap({kind: (kind[0], kek.key) for kind, kek in new.items()}).items():
            if isinstance(wrapped, KmsError):
                failed[kind] = wrapped
            else:
                self._fresh_keks[kind] = new[kind], wrapped
        return failed

    # --- calls of the KMS, counted ---

    def _wrap(self, keys: Mapping[K, tuple[str, SecretBytes]]) -> dict[K, str | KmsError]:
        """Have the KMS wrap keys under master keys; each result is proven by unwrapping it."""
        requests = [WrapRequest(key, master_key_id) for master_key_id, key in keys.values()]
        self._calls["wrap"] += len(requests)
        wrapped = dict(zip(keys, self.kms.wrap_many(requests), strict=True))
        outcomes: dict[K, str | KmsError] = {}
        found = self._unwrap_new({name: (keys[name][0], new) for name, new in wrapped.items()})
        for name, outcome in found.items():
            master_key_id, key = keys[name]
            if isinstance(outcome, KmsError):
                outcomes[name] = outcome
            elif outcome[1] != key:
                outcomes[name] = KmsResponseInvalidError(
                    "the new wrapped key does not unwrap to the same key",
                    backend=self.kms.parts(master_key_id)[0].backend,
                    operation="wrap",
                    master_key_id=master_key_id,
                )
            else:
                outcomes[name] = outcome[0]
        return outcomes

    def _unwrap_new(
        self, new: Mapping[K, tuple[str, str | KmsError]]
    ) -> dict[K, tuple[str, SecretBytes] | KmsError]:
        """Unwrap new wrapped keys, given with their master keys; return both. An error in place of a key stays."""
        made = {name: WrappedKey(id_, key) for name, (id_, key) in new.items() if isinstance(key, str)}
        keys = dict(zip(made, self._unwrap(list(made.values())), strict=True))
        outcomes: dict[K, tuple[str, SecretBytes] | KmsError] = {}
        for name, (_, wrapped) in new.items():
            key = wrapped if isinstance(wrapped, KmsError) else keys[name]
            outcomes[name] = key if isinstance(key, KmsError) else (made[name].wrapped_key, key)
        return outcomes

    def _unwrap(self, keys: Sequence[WrappedKey]) -> list[SecretBytes | KmsError]:
        self._calls["unwrap"] += len(keys)
        return self.kms.unwrap_many([UnwrapRequest(key.wrapped_key, key.master_key_id) for key in keys])


# --- key material ---


@dataclass(frozen=True)
class NewMaterial:
    """New key material, and its DEK as unwrapped from it."""

    text: str
    dek: SecretBytes


def new_material(
    text: str | bytes,
    material: KeyMaterial,
    rewrapped: Rewrapped,
    written_id: str,
    instance_id: str | None,
) -> NewMaterial:
    """Return key material with its wrapped key replaced; unknown fields stay.

    `written_id` is from `KmsClient.id_in_file`; `instance_id` is the KMS that the key material of a footer names,
    and None leaves it.
    """
    fields = parse_object(text, "key material")
    fields["masterKeyID"] = _in_the_same_form(fields["masterKeyID"], written_id)
    dek = dek_of(material, rewrapped.key)
    fields["wrappedDEK" if material.kek_id is None else "wrappedKEK"] = rewrapped.wrapped_key
    kek = rewrapped.new_kek
    if kek is not None:
        fields["keyEncryptionKeyID"] = encode(kek.kek_id)
        fields["wrappedDEK"] = kek.wrap_dek(dek)
        if kek.unwrap_dek(fields["wrappedDEK"]) != dek:
            raise KeyMaterialError("wrappedDEK: the new KEK does not lead to the same DEK")
    if instance_id is not None and material.is_footer_key:
        fields["kmsInstanceID"] = instance_id
        fields["kmsInstanceURL"] = "DEFAULT"
    return NewMaterial(json.dumps(fields, separators=(",", ":")), dek)


def renamed_material(text: str | bytes, written_id: str) -> str | None:
    """Return key material with another identifier for the same master key; None if it has this one."""
    fields = parse_object(text, "key material")
    if decode_master_key_id(fields["masterKeyID"]) == written_id:
        return None
    fields["masterKeyID"] = _in_the_same_form(fields["masterKeyID"], written_id)
    return json.dumps(fields, separators=(",", ":"))


def _in_the_same_form(stored: str, new_master_key_id: str) -> str:
    """Return a master key id percent-encoded if the old one was, as the file's readers expect."""
    if decode_master_key_id(stored) == new_master_key_id:
        return stored
    was_encoded = decode_master_key_id(stored) != stored
    return encode_master_key_id(new_master_key_id) if was_encoded else new_master_key_id
