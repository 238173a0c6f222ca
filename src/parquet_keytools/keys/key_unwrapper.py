"""Unwraps keys for reading, with as few calls to the KMS as can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from parquet_keytools.errors import KeyNotAvailableError, KeytoolsError, KmsError
from parquet_keytools.keys.kek import Kek
from parquet_keytools.keys.kek_cache import Clock, KekCache
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.kms.client import KmsClient, UnwrapRequest
from parquet_keytools.secret_bytes import SecretBytes


class KeyUnwrapper:
    """Unwraps what the master keys of one KMS wrapped; files never choose the KMS.

    A KMS instance or URL in key material is for people: it is not looked at here.
    """

    def __init__(self, kms: KmsClient | None, clock: Clock) -> None:
        self._kms = kms
        self._keys: KekCache[tuple[str, str], SecretBytes] = KekCache(clock, "unwrapped")

    def kms_keys(
        self, materials: Sequence[KeyMaterial], cache_lifetime_seconds: float
    ) -> list[SecretBytes | KeytoolsError]:
        """Return what the KMS has to unwrap for each key material: KEK, or DEK with single wrapping.

        The KMS is asked once, for all that are not in the cache, each distinct one once.
        """
        if self._kms is None:
            error = KeyNotAvailableError(
                "the file's keys are wrapped by a KMS, and the configuration has none.",
                hint="Add a `kms:` section to the configuration.",
            )
            return [error] * len(materials)
        wanted = [
            (material.kms_wrapped_key, decode_master_key_id(material.master_key_id)) for material in materials
        ]
        return list(self._keys.get_many(wanted, self._unwrap, cache_lifetime_seconds))

    def clear_cache(self) -> None:
        """Ask the KMS again from now on."""
        self._keys.clear()

    def _unwrap(self, wanted: list[tuple[str, str]]) -> list[SecretBytes | KmsError]:
        assert self._kms is not None
        return self._kms.unwrap_many([UnwrapRequest(*item) for item in wanted])


class KmsKeys:
    """The keys that one operation had from the KMS, for however many files it is about.

    Attributes:
        answers: (wrapped key, master key id as the file writes it) -> the key, or why it cannot be had.
    """

    def __init__(self, unwrapper: KeyUnwrapper, cache_lifetime_seconds: float) -> None:
        self._unwrapper = unwrapper
        self._cache_lifetime_seconds = cache_lifetime_seconds
        self.answers: dict[tuple[str, str], SecretBytes | KeytoolsError] = {}

    def fetch(self, materials: Iterable[KeyMaterial]) -> None:
        """Ask the KMS, once, for what these key materials need and is not there yet."""
        missing = {_identity(material): material for material in materials}
        for identity in missing.keys() & self.answers.keys():
            del missing[identity]
        if missing:
            found = self._unwrapper.kms_keys(list(missing.values()), self._cache_lifetime_seconds)
            self.answers.update(zip(missing, found, strict=True))

    def deks(self, materials: Sequence[KeyMaterial]) -> list[SecretBytes | KeytoolsError]:
        """Return the DEK of each key material, or why it cannot be had."""
        self.fetch(materials)
        return [_dek(material, self.answers[_identity(material)]) for material in materials]


def _identity(material: KeyMaterial) -> tuple[str, str]:
    return material.kms_wrapped_key, material.master_key_id


def encode_master_key_id(master_key_id: str) -> str:
    """Return a master key id as pyarrow can carry it, whose list of column keys is written with `:;,`."""
    return "".join(f"%{ord(char):02X}" if char in "%:;, " else char for char in master_key_id)


def decode_master_key_id(master_key_id: str) -> str:
    """Return the identifier that the KMS knows; in files written through pyarrow it is encoded."""
    return unquote(master_key_id)


def _dek(material: KeyMaterial, kms_key: SecretBytes | KeytoolsError) -> SecretBytes | KeytoolsError:
    if material.kek_id is None or isinstance(kms_key, KeytoolsError):
        return kms_key
    try:
        return Kek(material.kek_id, kms_key).unwrap_dek(material.wrapped_dek)
    except KeytoolsError as error:
        return error
