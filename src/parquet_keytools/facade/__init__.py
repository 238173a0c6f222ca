"""The parts of `Keytools`, and what all of them stand on: a configuration with its keys."""

from __future__ import annotations

from typing import Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.keys.kek import Clock
from parquet_keytools.kms.client import KmsClient


class Configured:
    """A configuration with its keys.

    Attributes:
        configuration: The configuration.
    """

    def __init__(self, configuration: Configuration, *, kms: KmsClient | None, clock: Clock) -> None:
        self.configuration = configuration
        self._keys = KeyService(configuration, kms, clock)

    def __reduce__(self) -> tuple[Any, ...]:
        _, (configuration, identities) = self._keys.__reduce__()
        return type(self), (configuration,), identities

    def __setstate__(self, identities: FileIdentities) -> None:
        self._keys.identities = identities

    @property
    def kms(self) -> KmsClient | None:
        """The KMS client; None where the configuration has data keys only."""
        return self._keys.kms

    def clear_caches(self) -> None:
        """Forget all keys: the KMS is asked again, and new files get fresh KEKs."""
        self._keys.clear_caches()
