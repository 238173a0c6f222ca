"""The facade that users import: one configuration, and all that can be done with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.facade.key_rotation import KeyRotation
from parquet_keytools.facade.views import Views
from parquet_keytools.facade.whole_files import WholeFiles
from parquet_keytools.keys.kek import Clock
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.runtime.presentation import Summarised
from parquet_keytools.storage.locations import PathLike


class Keytools(Views, WholeFiles, KeyRotation, Summarised):
    """Encrypts and decrypts Parquet files as a configuration says.

    May be used from any number of threads, after a fork, and pickled to worker processes; a pickle holds the
    configuration without its secrets, and no key.

    Each part has the methods of one subject: `Tables` reads and writes with pyarrow and Spark, `Views` shows files
    to programs that know nothing of encryption, `WholeFiles` converts and checks files as they are, and
    `KeyRotation` changes keys.
    """

    def __init__(
        self, configuration: Configuration, *, kms: KmsClient | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Make one; the KMS is asked nothing yet.

        Args:
            configuration: Made by `load_configuration` or `parse_configuration`.
            kms: A KMS client to use in place of the configuration's; a configuration that was made with it
                needs no `kms`.
            clock: Seconds for the expiry of caches.

        Raises:
            ConfigurationError: The configuration names keys that do not exist.
        """
        super().__init__(configuration, kms=kms, clock=clock)

    @classmethod
    def from_yaml(cls, path: PathLike, *, kms: KmsClient | None = None) -> Self:
        """Load a configuration from a YAML file.

        Args:
            path: The file.
            kms: A KMS client to use; with it the file needs no `kms`, and no client is made of what it says there.

        Raises:
            ConfigurationError: It has mistakes; the text says in which line, and what to write instead.
        """
        return cls(load_configuration(path, kms=kms), kms=kms)

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any], *, kms: KmsClient | None = None) -> Self:
        """Take a configuration from a mapping with the same content as a YAML file.

        Args:
            document: The mapping.
            kms: As with `from_yaml`.

        Raises:
            ConfigurationError: It has mistakes.
        """
        return cls(parse_configuration(document, kms=kms), kms=kms)

    def close(self) -> None:
        """Give back the connections of the KMS client, and forget all keys."""
        self.clear_caches()
        if self._keys.kms is not None:
            self._keys.kms.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        backend = self._keys.kms.backend if self._keys.kms is not None else None
        return {"kms": backend, "tables": sorted(self.configuration.tables)}
