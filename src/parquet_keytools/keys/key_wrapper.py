"""Wraps DEKs for writing: makes key material, with as few calls to the KMS as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parquet_keytools.errors import KmsError, value_or_raise
from parquet_keytools.keys.kek import Kek
from parquet_keytools.keys.kek_cache import Clock, KekCache
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.kms.client import KmsClient, WrapRequest
from parquet_keytools.secret_bytes import SecretBytes


@dataclass(frozen=True)
class DekToWrap:
    """A DEK, and the master key that shall protect it."""

    dek: SecretBytes
    master_key_id: str
    is_footer_key: bool


@dataclass(frozen=True)
class Wrapping:
    """How DEKs are wrapped.

    Attributes:
        double_wrapping: Whether KEKs stand between master keys and DEKs.
        kek_length_bits: Length of the KEKs.
        cache_lifetime_seconds: For how long a KEK is used for new files.
        kms_instance_id: Written into the footer's key material.
    """

    double_wrapping: bool
    kek_length_bits: int
    cache_lifetime_seconds: float
    kms_instance_id: str


@dataclass(frozen=True)
class _WrappedKek:
    kek: Kek
    wrapped_kek: str


class KeyWrapper:
    """Wraps DEKs with the master keys of one KMS; KEKs are kept and used for many files."""

    def __init__(self, kms: KmsClient, clock: Clock) -> None:
        self._kms = kms
        self._keks: KekCache[tuple[str, int], _WrappedKek] = KekCache(clock, "wrapped")

    def wrap(self, deks: Sequence[DekToWrap], wrapping: Wrapping) -> list[KeyMaterial]:
        """Wrap DEKs; the KMS is asked once, for all that it has to wrap.

        Raises:
            KmsError: One of them cannot be wrapped. Nothing may then be written.
        """
        if wrapping.double_wrapping:
            return self._wrap_with_keks(deks, wrapping)
        wrapped = self._kms.wrap_many([WrapRequest(item.dek, item.master_key_id) for item in deks])
        return [
            KeyMaterial(
                is_footer_key=item.is_footer_key,
                master_key_id=item.master_key_id,
                wrapped_dek=value_or_raise(outcome),
                kms_instance_id=wrapping.kms_instance_id,
            )
            for item, outcome in zip(deks, wrapped, strict=True)
        ]

    def clear_cache(self) -> None:
        """Use fresh KEKs from now on."""
        self._keks.clear()

    def _wrap_with_keks(self, deks: Sequence[DekToWrap], wrapping: Wrapping) -> list[KeyMaterial]:
        keks = self._keks.get_many(
            [(item.master_key_id, wrapping.kek_length_bits) for item in deks],
            self._make_keks,
            wrapping.cache_lifetime_seconds,
        )
        materials = []
        for item, outcome in zip(deks, keks, strict=True):
            kek = value_or_raise(outcome)
            materials.append(
                KeyMaterial(
                    is_footer_key=item.is_footer_key,
                    master_key_id=item.master_key_id,
                    wrapped_dek=kek.kek.wrap_dek(item.dek),
                    kek_id=kek.kek.kek_id,
                    wrapped_kek=kek.wrapped_kek,
                    kms_instance_id=wrapping.kms_instance_id,
                )
            )
        return materials

    def _make_keks(self, wanted: list[tuple[str, int]]) -> list[_WrappedKek | KmsError]:
        keks = [Kek.generate(length_bits) for _, length_bits in wanted]
        wrapped = self._kms.wrap_many(
            [WrapRequest(kek.key, master_key_id) for kek, (master_key_id, _) in zip(keks, wanted, strict=True)]
        )
        return [
            outcome if isinstance(outcome, KmsError) else _WrappedKek(kek, outcome)
            for kek, outcome in zip(keks, wrapped, strict=True)
        ]
