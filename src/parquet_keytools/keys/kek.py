"""Key encryption keys (KEKs) for double wrapping, and their cache."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import telemetry
from parquet_keytools.errors import KeyMaterialError, KmsError
from parquet_keytools.keys.key_material import KEK_ID_LENGTH_BYTES, KeyMaterial, decode_base64
from parquet_keytools.kms.aes_key_wrap import ADDED_LENGTH, unwrap_bytes, wrap_by
from parquet_keytools.runtime.fork_safety import ForkSafeLock, OwnerProcess
from parquet_keytools.secret_bytes import SecretBytes


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
        """Return the DEK.

        Raises:
            KeyMaterialError: The DEK was wrapped by another KEK, or is damaged.
        """
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
    """Return the DEK of key material.

    Args:
        material: The key material.
        kms_key: The key that the KMS unwrapped: the KEK, or the DEK with single wrapping.

    Raises:
        KeyMaterialError: `kms_key` is not the KEK of the wrapped DEK.
    """
    kek_id = material.kek_id
    return kms_key if kek_id is None else Kek(kek_id, kms_key).unwrap_dek(material.wrapped_dek)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Monotonic clock in seconds; `time.monotonic` except in tests."""


@dataclass(frozen=True)
class _Entry(Generic[V]):
    value: V
    loaded_at: float
    expires_at: float


class KekCache(Generic[K, V]):
    """Caches keys of one KMS client, and so of one backend, configuration and principal.

    An error is raised in every thread that waits for the key, and is not cached. A forked child starts with an
    empty cache.
    """

    def __init__(self, clock: Clock, name: str = "other") -> None:
        """Create an empty cache.

        Args:
            clock: Clock for the expiry of keys.
            name: Name of the cache in metrics.
        """
        self._clock = clock
        self._name = name
        self._lock = ForkSafeLock()
        self._owner = OwnerProcess()
        self._entries: dict[K, _Entry[V]] = {}
        self._loading: dict[K, Future[V | KmsError]] = {}
        self._next_purge = 0.0
        self._clearings = 0

    def get_many(
        self, wanted: Sequence[K], load: Callable[[list[K]], Sequence[V | KmsError]], lifetime_seconds: float
    ) -> list[V | KmsError]:
        """Return keys from the cache, and load the missing keys in one call.

        Args:
            wanted: Identities of the keys; may contain duplicates.
            load: Called without a lock, for keys that are neither cached nor being loaded by another thread.
            lifetime_seconds: Lifetime of the loaded keys, and the maximum age of cached keys for this caller.
        """
        found: dict[K, V | KmsError] = {}
        mine: dict[K, Future[V | KmsError]] = {}
        others: dict[K, Future[V | KmsError]] = {}
        now = self._clock()
        with self._lock:
            self._start_anew_after_fork()
            clearings = self._clearings
            self._purge(now, lifetime_seconds)
            for key in dict.fromkeys(wanted):
                entry = self._entries.get(key)
                if entry and now < min(entry.expires_at, entry.loaded_at + lifetime_seconds):
                    found[key] = entry.value
                elif key in self._loading:
                    others[key] = self._loading[key]
                else:
                    mine[key] = self._loading[key] = Future()
        for result, number in {"hit": len(found), "wait": len(others), "miss": len(mine)}.items():
            telemetry.count("kek_cache.requests", number, {"cache": self._name, "result": result})
        if mine:
            self._load(mine, load, lifetime_seconds, clearings)
        # Load our own keys before waiting: two threads that wait for each other's keys would deadlock.
        given_up: list[K] = []
        for key, future in {**mine, **others}.items():
            try:
                found[key] = future.result()
            except CancelledError:
                given_up.append(key)
        if given_up:
            found.update(zip(given_up, self.get_many(given_up, load, lifetime_seconds), strict=True))
        return [found[key] for key in wanted]

    def clear(self) -> None:
        """Drop all keys; keys that are being loaded now are not cached."""
        with self._lock:
            self._clearings += 1
            self._entries.clear()

    def _load(
        self,
        mine: dict[K, Future[V | KmsError]],
        load: Callable[[list[K]], Sequence[V | KmsError]],
        lifetime_seconds: float,
        clearings: int,
    ) -> None:
        try:
            loaded = load(list(mine))
            with self._lock:
                now = self._clock()
                for key, value in zip(mine, loaded, strict=True):
                    del self._loading[key]
                    if not isinstance(value, KmsError) and clearings == self._clearings:
                        self._entries[key] = _Entry(value, now, now + lifetime_seconds)
            for future, value in zip(mine.values(), loaded, strict=True):
                future.set_result(value)
        except BaseException as error:
            with self._lock:
                for key in mine:
                    self._loading.pop(key, None)
            for future in mine.values():
                # An interruption such as Ctrl-C is for this thread only. Waiting threads load the key themselves.
                if not isinstance(error, Exception):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
            raise

    def _purge(self, now: float, lifetime_seconds: float) -> None:
        if now < self._next_purge:
            return
        self._next_purge = now + lifetime_seconds
        self._entries = {key: entry for key, entry in self._entries.items() if now < entry.expires_at}

    def _start_anew_after_fork(self) -> None:
        if not self._owner.is_here:
            # The loading threads do not exist in the child, and the child uses its own KEKs.
            self._owner = OwnerProcess()
            self._entries = {}
            self._loading = {}
