"""Which version of a master key wrapped a key, and which one wraps now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from parquet_keytools.errors import KmsError, MasterKeyNotFoundError
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.rotation.rewrapper import WrappedKey

SameMasterKey = Callable[[str, str], "bool | None"]
"""Whether two identifiers mean one master key; None where the KMS does not tell."""


KnownVersions = Mapping[tuple[bool, str], str | None]
"""Whether it is one of the new KMS, where that is another one, and the master key -> its newest version."""


def same_master_key(kms: KmsClient | None) -> SameMasterKey:
    """Return what compares identifiers of master keys: an alias and the key that it stands for are one."""
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
    """Versions, as two KMS clients tell them; each master key is described once in a run.

    Args:
        kms: The KMS whose master keys wrapped what is there.
        new_kms: The one whose master keys shall wrap it; None for the same.
        known: Versions that are not asked for again, as `known` of another one has them.
    """

    def __init__(
        self, kms: KmsClient, new_kms: KmsClient | None = None, known: KnownVersions | None = None
    ) -> None:
        self._kms = kms
        self._new_kms = kms if new_kms is None else new_kms
        self._lock = threading.Lock()
        self._current = dict(known or {})
        self._same = same_master_key(kms)
        self._named: dict[tuple[str, frozenset[str]], str] = {}

    def as_named(self, master_key_id: str, names: frozenset[str]) -> str:
        """Return which of some names means this master key; its own where none does, as far as the KMS tells."""
        if not names or master_key_id in names:
            return master_key_id
        with self._lock:
            found = self._named.get((master_key_id, names))
        if found is None:
            found = next((name for name in sorted(names) if self._same(master_key_id, name)), master_key_id)
            with self._lock:
                self._named[master_key_id, names] = found
        return found

    @property
    def calls(self) -> KmsCalls:
        """How often a KMS was asked."""
        return KmsCalls(describe=len(self._current))

    @property
    def known(self) -> KnownVersions:
        """What was asked for so far."""
        with self._lock:
            return dict(self._current)

    @property
    def known_new(self) -> dict[str, str | None]:
        """Master key of the new KMS -> its newest version, as far as it was asked for."""
        is_new = self._new_kms is not self._kms
        return {key: version for (is_of_new, key), version in self.known.items() if is_of_new == is_new}

    def of(self, key: WrappedKey, *, new: bool = False) -> str | None:
        """Return the version that wrapped a key, of the new KMS or the other one; None where nobody can tell."""
        kms = self._new_kms if new else self._kms
        return kms.wrapped_key_version(key.wrapped_key, key.master_key_id)

    def describe(self, master_key_id: str, *, new: bool = False) -> MasterKeyDescription | None:
        """Return what the new KMS, or the other one, says of a master key; None where it does not tell.

        Raises:
            MasterKeyNotFoundError: There is no such master key.
        """
        kms = self._new_kms if new else self._kms
        try:
            description = kms.describe(master_key_id)
        except MasterKeyNotFoundError:
            raise
        except KmsError:
            description = None
        with self._lock:
            key = (kms is not self._kms, master_key_id)
            self._current[key] = description.current_version if description is not None else None
        return description

    def current(self, master_key_id: str, *, new: bool = False) -> str | None:
        """Return the version of a master key that wraps now, or None where the KMS does not tell."""
        kms = self._new_kms if new else self._kms
        with self._lock:
            key = (kms is not self._kms, master_key_id)
            if key not in self._current:
                try:
                    self._current[key] = kms.describe(master_key_id).current_version
                except KmsError:
                    # Who may wrap need not be allowed to describe; then its keys are simply re-wrapped.
                    self._current[key] = None
            return self._current[key]
