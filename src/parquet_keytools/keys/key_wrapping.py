"""Wrap DEKs for writing, and unwrap the DEKs of files, with few KMS calls, through cached KEKs."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from urllib.parse import unquote

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import telemetry
from parquet_keytools.errors import (
    KEY_REFUSALS,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    value_or_raise,
)
from parquet_keytools.keys.key_material import (
    KEK_ID_LENGTH_BYTES,
    DataKeyId,
    KeyMaterial,
    KeyMetadata,
    KeyReference,
    decode_base64,
    parse_key_metadata,
)
from parquet_keytools.keys.material_store import read_key_materials
from parquet_keytools.kms.aes_key_wrap import ADDED_LENGTH, unwrap_bytes, wrap_by
from parquet_keytools.kms.client import KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, OwnerProcess
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation


@dataclass(frozen=True)
class Kek:
    """A KEK, which wraps DEKs with AES-GCM; its id is the AAD, as in parquet-java and Arrow."""

    kek_id: bytes
    key: SecretBytes

    @classmethod
    def generate(cls, length_bits: int) -> Kek:
        """Return a new KEK of `length_bits` bits with a random id."""
        return cls(secrets.token_bytes(KEK_ID_LENGTH_BYTES), SecretBytes.random(length_bits))

    @functools.cached_property
    def _cipher(self) -> AESGCM:
        return AESGCM(self.key.reveal())

    def wrap_dek(self, dek: SecretBytes) -> str:
        """Return base64 of nonce, ciphertext and tag."""
        return wrap_by(self._cipher, dek, self.kek_id)

    def unwrap_dek(self, wrapped_dek: str) -> SecretBytes:
        """Return the DEK; `KeyMaterialError` if it was wrapped by another KEK, or is damaged."""
        buffer = decode_base64(wrapped_dek, "wrappedDEK")
        if len(buffer) <= ADDED_LENGTH:
            raise KeyMaterialError("wrappedDEK: too short")
        try:
            dek = unwrap_bytes(self._cipher, buffer, self.kek_id)
        except InvalidTag:
            raise KeyMaterialError(
                "wrappedDEK: does not belong to its KEK, or is damaged",
                hint="If the key material of the file was altered, restore it.",
            ) from None
        if dek.length_bits not in (128, 192, 256):
            raise KeyMaterialError(f"wrappedDEK: holds a key of {dek.length_bits} bits")
        return dek


def dek_of(material: KeyMaterial, kms_key: SecretBytes) -> SecretBytes:
    """Return the DEK of key material, with the key that the KMS unwrapped: the KEK, or the DEK itself."""
    kek_id = material.kek_id
    return kms_key if kek_id is None else Kek(kek_id, kms_key).unwrap_dek(material.wrapped_dek)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Monotonic clock in seconds; `time.monotonic` except in tests."""


class KekCache(Generic[K, V]):
    """Caches keys of one KMS client, and so of one backend, configuration and principal.

    An error is raised in every thread that waits for the key, and is not cached. A forked child starts with an
    empty cache.
    """

    def __init__(self, clock: Clock, name: str = "other") -> None:
        """Create an empty cache with a name in metrics."""
        self._clock = clock
        self._name = name
        self._lock = ForkSafeLock()
        self._owner = OwnerProcess()
        self._entries: dict[K, tuple[V, float, float]] = {}
        """Each with the times when it was loaded, and when it expires."""
        self._loading: dict[K, Future[dict[K, V | KmsError]]] = {}
        self._next_purge = 0.0
        self._clearings = 0

    def get_many(
        self, wanted: Sequence[K], load: Callable[[list[K]], Sequence[V | KmsError]], lifetime_seconds: float
    ) -> list[V | KmsError]:
        """Return keys from the cache, and load the missing keys in one call.

        `load` is called without a lock, for keys that are neither cached nor being loaded by another thread. The
        lifetime is for the loaded keys, and the maximum age of cached keys for this caller.
        """
        mine: list[K] = []
        loading: Future[dict[K, V | KmsError]] = Future()
        try:
            found, others, clearings = self._look_up(wanted, lifetime_seconds, mine, loading)
            # Load our own keys before waiting: two threads that wait for each other's keys would deadlock.
            if mine:
                loaded = dict(zip(mine, load(mine), strict=True))
                with self._lock:
                    now = self._clock()
                    for key, value in loaded.items():
                        del self._loading[key]
                        if not isinstance(value, KmsError) and clearings == self._clearings:
                            self._entries[key] = value, now, now + lifetime_seconds
                loading.set_result(loaded)
                found |= loaded
        except BaseException as error:
            with self._lock:
                for key in mine:
                    if self._loading.get(key) is loading:
                        del self._loading[key]
            # An interruption such as Ctrl-C is for this thread only. Waiting threads load the keys themselves.
            if isinstance(error, Exception):
                loading.set_exception(error)
            else:
                loading.cancel()
            raise
        given_up: list[K] = []
        for key, future in others.items():
            try:
                found[key] = future.result()[key]
            except CancelledError:
                given_up.append(key)
        if given_up:
            found.update(zip(given_up, self.get_many(given_up, load, lifetime_seconds), strict=True))
        return [found[key] for key in wanted]

    def _look_up(
        self, wanted: Sequence[K], lifetime_seconds: float, mine: list[K], loading: Future[dict[K, V | KmsError]]
    ) -> tuple[dict[K, V | KmsError], dict[K, Future[dict[K, V | KmsError]]], int]:
        """Return cached keys, keys that other threads load, and the number of clearings; add others to `mine`."""
        found: dict[K, V | KmsError] = {}
        others: dict[K, Future[dict[K, V | KmsError]]] = {}
        now = self._clock()
        with self._lock:
            if not self._owner.is_here:
                # The loading threads do not exist in a forked child, and the child uses its own KEKs.
                self._owner, self._entries, self._loading = OwnerProcess(), {}, {}
            clearings = self._clearings
            if now >= self._next_purge:
                self._next_purge = now + lifetime_seconds
                self._entries = {key: entry for key, entry in self._entries.items() if now < entry[2]}
            for key in dict.fromkeys(wanted):
                entry = self._entries.get(key)
                if entry is not None and now < min(entry[2], entry[1] + lifetime_seconds):
                    found[key] = entry[0]
                elif key in self._loading:
                    others[key] = self._loading[key]
                else:
                    mine.append(key)
                    self._loading[key] = loading
        for result, number in {"hit": len(found), "wait": len(others), "miss": len(mine)}.items():
            telemetry.count("kek_cache.requests", number, {"cache": self._name, "result": result})
        return found, others, clearings

    def clear(self) -> None:
        """Drop all keys; keys that are being loaded now are not cached."""
        with self._lock:
            self._clearings += 1
            self._entries.clear()


@dataclass(frozen=True)
class DekToWrap:
    """A DEK, and the master key that must wrap it."""

    dek: SecretBytes
    master_key_id: str
    is_footer_key: bool


class KeyWrapper:
    """Wraps DEKs with the master keys of one KMS, or of several; caches KEKs and uses them for many files."""

    def __init__(self, kms: KmsClient, clock: Clock) -> None:
        self._kms = kms
        self._keks: KekCache[tuple[str, int], tuple[Kek, str]] = KekCache(clock, "wrapped")

    def wrap(
        self,
        deks: Sequence[DekToWrap],
        kms_instance_id: str | None,
        *,
        kek_length_bits: int | None,
        cache_lifetime_seconds: float = 0,
    ) -> list[KeyMaterial]:
        """Wrap DEKs, with one request to the KMS for all missing keys.

        Footers name the KMS `kms_instance_id`; None if their key is in none. A KEK wraps the DEKs, and is used for
        new files as long as it may be cached; without `kek_length_bits`, master keys wrap the DEKs.

        Raises:
            KmsError: A key cannot be wrapped. The caller must then write nothing.
        """
        wrapped: Sequence[tuple[Kek | None, str] | KmsError]
        if kek_length_bits is not None:
            kinds = [(item.master_key_id, kek_length_bits) for item in deks]
            wrapped = self._keks.get_many(kinds, self._make_keks, cache_lifetime_seconds)
        else:
            outcomes = self._kms.wrap_many([WrapRequest(item.dek, item.master_key_id) for item in deks])
            wrapped = [outcome if isinstance(outcome, KmsError) else (None, outcome) for outcome in outcomes]
        materials = []
        for item, found in zip(deks, wrapped, strict=True):
            kek, wrapped_key = value_or_raise(found)
            materials.append(
                KeyMaterial(
                    is_footer_key=item.is_footer_key,
                    master_key_id=self._kms.id_in_file(item.master_key_id, kms_instance_id),
                    wrapped_dek=wrapped_key if kek is None else kek.wrap_dek(item.dek),
                    kek_id=None if kek is None else kek.kek_id,
                    wrapped_kek=None if kek is None else wrapped_key,
                    kms_instance_id=kms_instance_id or "DEFAULT",
                )
            )
        return materials

    def clear_cache(self) -> None:
        """Drop the cached KEKs; later files get new KEKs."""
        self._keks.clear()

    def _make_keks(self, wanted: list[tuple[str, int]]) -> list[tuple[Kek, str] | KmsError]:
        keks = [(Kek.generate(length_bits), master_key_id) for master_key_id, length_bits in wanted]
        wrapped = self._kms.wrap_many([WrapRequest(kek.key, master_key_id) for kek, master_key_id in keks])
        outcomes = zip(keks, wrapped, strict=True)
        return [new if isinstance(new, KmsError) else (kek, new) for (kek, _), new in outcomes]


class KeyUnwrapper:
    """Unwraps keys with the master keys of one KMS, or of several.

    Files never choose a KMS: its URL in key material is ignored, and its instance only selects among the KMSs that
    the configuration names.
    """

    def __init__(self, kms: KmsClient | None, clock: Clock) -> None:
        self._kms = kms
        self._keys: KekCache[tuple[str, str], SecretBytes] = KekCache(clock, "unwrapped")

    def kms_keys(
        self, materials: Sequence[KeyMaterial], cache_lifetime_seconds: float
    ) -> list[SecretBytes | KeytoolsError]:
        """Return the unwrapped KEK, or DEK with single wrapping, of each key material, or the error.

        One request to the KMS unwraps all distinct keys that are not in the cache.
        """
        if self._kms is None:
            error = KeyNotAvailableError(
                "the file's keys are wrapped by a KMS, and the configuration has none.",
                hint="Add a `kms:` section to the configuration.",
            )
            return [error] * len(materials)
        wanted = [(material.kms_wrapped_key, material.master_key_id) for material in materials]
        return list(self._keys.get_many(wanted, self._unwrap, cache_lifetime_seconds))

    def refuses_key(self, material: KeyMaterial, error: KeytoolsError) -> bool:
        """Return whether the KMS refused the master key itself, independent of the wrapped key.

        The wrapped key selects the version of the master key, and an attacker may have changed it. If a version is
        disabled, `describe` reports whether the whole master key is disabled.
        """
        if isinstance(error, MasterKeyDisabledError) and self._kms is not None:
            try:
                return not self._kms.describe(material.master_key_id).enabled
            except KmsError:
                return False
        return isinstance(error, KEY_REFUSALS)

    def of_file(self, material: KeyMaterial, instance_id: str | None) -> KeyMaterial:
        """Return key material of a file with the identifier of its master key; see `KmsClient.id_of_file`."""
        master_key_id = decode_master_key_id(material.master_key_id)
        if self._kms is not None:
            master_key_id = self._kms.id_of_file(master_key_id, instance_id)
        same = master_key_id == material.master_key_id
        return material if same else replace(material, master_key_id=master_key_id)

    @property
    def kms_instances(self) -> frozenset[str]:
        """The names of KMSs that files may name; see `KmsClient.instances`."""
        return frozenset() if self._kms is None else self._kms.instances

    def clear_cache(self) -> None:
        """Drop the cached keys; later reads call the KMS again."""
        self._keys.clear()

    def _unwrap(self, wanted: list[tuple[str, str]]) -> list[SecretBytes | KmsError]:
        assert self._kms is not None
        return self._kms.unwrap_many([UnwrapRequest(*item) for item in wanted])


@dataclass(eq=False, repr=False)
class KmsKeys:
    """The keys that the KMS unwrapped for one operation on one or more files.

    Attributes:
        cache_lifetime_seconds: Maximum age of a cached key from another operation.
        known: Keys that the caller has already, as in `answers`.
        answers: (wrapped key, master key id) -> the key, or the error.
        unavailable: The error of a KMS that could not be reached, which all further calls would have, too; None if
            there is none, or another KMS may answer.
    """

    unwrapper: KeyUnwrapper
    cache_lifetime_seconds: float
    known: Mapping[tuple[str, str], SecretBytes] | None = None
    answers: dict[tuple[str, str], SecretBytes | KeytoolsError] = field(default_factory=dict, init=False)
    unavailable: KmsUnavailableError | None = field(default=None, init=False)

    @property
    def keys(self) -> dict[tuple[str, str], SecretBytes]:
        """`answers` without errors."""
        return {identity: key for identity, key in self.answers.items() if isinstance(key, SecretBytes)}

    def fetch(self, materials: Iterable[KeyMaterial]) -> None:
        """Unwrap the missing keys of key materials, with one request to the KMS."""
        missing = {_identity(material): material for material in materials}
        for identity in missing.keys() & self.answers.keys():
            del missing[identity]
        known = self.known or {}
        for identity in missing.keys() & known.keys():
            self.answers[identity] = known[identity]
            del missing[identity]
        if missing:
            found = self.unwrapper.kms_keys(list(missing.values()), self.cache_lifetime_seconds)
            self.answers.update(zip(missing, found, strict=True))
            self.unavailable = next(
                (one for one in found if isinstance(one, KmsUnavailableError) and not one.others_may_answer), None
            )

    def deks(self, materials: Sequence[KeyMaterial]) -> list[SecretBytes | KeytoolsError]:
        """Return the DEK of each key material, or the error."""
        self.fetch(materials)
        return [self._dek(material) for material in materials]

    def _dek(self, material: KeyMaterial) -> SecretBytes | KeytoolsError:
        kms_key = self.answers[_identity(material)]
        if isinstance(kms_key, KeytoolsError):
            return kms_key
        try:
            return dek_of(material, kms_key)
        except KeytoolsError as error:
            return error


def _identity(material: KeyMaterial) -> tuple[str, str]:
    return material.kms_wrapped_key, material.master_key_id


def encode_master_key_id(master_key_id: str) -> str:
    """Return a master key id in a form for pyarrow's list of column keys, which uses `:;,` as separators."""
    return "".join(f"%{ord(char):02X}" if char in "%:;, " else char for char in master_key_id)


def decode_master_key_id(master_key_id: str) -> str:
    """Return the master key id in the KMS; files written through pyarrow hold the encoded id."""
    return unquote(master_key_id) if "%" in master_key_id else master_key_id


# --- the keys of one file ---


@dataclass(frozen=True)
class DataKeys:
    """Data keys that the caller manages (spec 4.3).

    Attributes:
        by_name: Name -> key.
        footer_without_metadata: Name of the key for footers without key metadata.
        columns_without_metadata: Dotted column path -> name of the key for columns without key metadata.
    """

    by_name: Mapping[str, SecretBytes] = field(default_factory=dict)
    footer_without_metadata: str | None = None
    columns_without_metadata: Mapping[str, str] = field(default_factory=dict)

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return the name of the data key for the footer (None) or a column without key metadata."""
        if column_path is None:
            return self.footer_without_metadata
        return self.columns_without_metadata.get(".".join(column_path))

    def find(self, parsed: KeyMetadata | None, column_path: tuple[str, ...] | None) -> SecretBytes:
        """Return the data key of the footer (None) or a column; `KeyNotAvailableError` if it is unknown."""
        what = "the footer" if column_path is None else f"column {'.'.join(column_path)!r}"
        name = parsed.name if isinstance(parsed, DataKeyId) else self.name_without_metadata(column_path)
        if name is None:
            raise KeyNotAvailableError(
                f"{what} has no key metadata.", hint="Name its data key under `reading.keys_without_metadata`."
            )
        key = self.by_name.get(name)
        if key is None:
            raise KeyNotAvailableError(
                f"{what} is encrypted with the data key {name[:128]!r}, which is not known.",
                hint="Add it to `data_keys`.",
            )
        return key


@dataclass(eq=False, repr=False)
class FileKeyRetriever:
    """A `KeyRetriever` for one file.

    Attributes:
        uses_data_keys: Whether any retrieved key is a data key.
        key_materials: External key material of the file; None until it is needed.
        written_ids: (wrapped key, master key id as the file has it) -> the identifier of the master key.
    """

    kms_keys: KmsKeys
    data_keys: DataKeys
    parquet_file: FileLocation
    uses_data_keys: bool = False
    key_materials: dict[str, KeyMaterial] | None = None
    written_ids: dict[tuple[str, str], str] = field(default_factory=dict)
    _not_read: KeytoolsError | None = None
    _instance_id: str | None = None
    _parsed: dict[bytes | None, KeyMetadata | None] = field(default_factory=dict)

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the DEK of the footer; see `KeyRetriever`."""
        material = self.material(key_metadata)
        if material is not None and not material.is_footer_key:
            raise KeyMaterialError(
                "isFooterKey: is false in the key material of the footer", path=str(self.parquet_file)
            )
        return value_or_raise(self.column_deks([(None, key_metadata)])[0])

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...] | None, bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return the DEKs of columns, or of the footer (None); see `KeyRetriever`."""
        found = [self._found(path, key_metadata) for path, key_metadata in columns]
        deks = iter(self.kms_keys.deks([one for one in found if isinstance(one, KeyMaterial)]))
        return [next(deks) if isinstance(one, KeyMaterial) else one for one in found]

    def parsed(self, key_metadata: bytes | None) -> KeyMetadata | None:
        """Return the result of `parse_key_metadata`, which is called once for each value."""
        if key_metadata not in self._parsed:
            self._parsed[key_metadata] = parse_key_metadata(key_metadata)
        return self._parsed[key_metadata]

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return the name of a data key; see `DataKeys.name_without_metadata`."""
        return self.data_keys.name_without_metadata(column_path)

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material in key metadata or in the key material file; None for a data key.

        The footer's key comes first: it names the KMS of the other keys.
        """
        parsed = self.parsed(key_metadata)
        if isinstance(parsed, KeyReference):
            material = self._external().get(parsed.reference)
            if material is None:
                raise KeyMaterialError(
                    f"the key material file has no {parsed.reference!r}", path=str(self.parquet_file)
                )
        elif isinstance(parsed, KeyMaterial):
            material = parsed
        else:
            return None
        if self._instance_id is None and material.is_footer_key:
            self._instance_id = material.kms_instance_id
        found = self.kms_keys.unwrapper.of_file(material, self._instance_id)
        self.written_ids[_identity(material)] = found.master_key_id
        return found

    @property
    def kms_instances(self) -> frozenset[str]:
        """The names of KMSs that files may name; see `KmsClient.instances`."""
        return self.kms_keys.unwrapper.kms_instances

    def kek_length_bits(self, material: KeyMaterial) -> int | None:
        """Return the length of the KEK, if there is one that the KMS has unwrapped."""
        kek = self.kms_keys.answers.get(_identity(material)) if material.double_wrapping else None
        return kek.length_bits if isinstance(kek, SecretBytes) else None

    def _external(self) -> dict[str, KeyMaterial]:
        """Return the external key material of the file.

        The file is read once, and an error is raised again on each call. A concurrent rotation must not mix old
        and new key material, and every key must have been compared with the table before its use.
        """
        if self._not_read is not None:
            raise self._not_read
        if self.key_materials is None:
            try:
                self.key_materials = read_key_materials(self.parquet_file)
            except KeytoolsError as error:
                self._not_read = error
                raise
        return self.key_materials

    def _found(
        self, path: tuple[str, ...] | None, key_metadata: bytes | None
    ) -> KeyMaterial | SecretBytes | KeytoolsError:
        """Return the key material of a key, or a data key."""
        try:
            material = self.material(key_metadata)
            if material is not None:
                return material
            key = self.data_keys.find(self.parsed(key_metadata), path)
        except KeytoolsError as error:
            return error
        self.uses_data_keys = True
        return key
