"""Our KMS clients behind the interface for KMS clients of Iceberg's Python library.

PyIceberg 0.12 has no such interface. The proposed one (apache/iceberg-python#3968) follows iceberg-rust and
Iceberg's Java library: a class that is named by its path wraps and unwraps the KEKs of tables. All that may still
change is in this source file: the base class, how a client is constructed, and the form of keys.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyiceberg.typedef import EMPTY_DICT, Properties

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.iceberg.file_io import (
    CONFIG_PROPERTY,
    CONFIG_VARIABLE,
    configuration_file,
    known_tables,
)
from parquet_keytools.iceberg.key_chain import IcebergKeys
from parquet_keytools.secret_bytes import SecretBytes

if TYPE_CHECKING:
    Interface = object
else:
    try:
        from pyiceberg.encryption.kms import KeyManagementClient as Interface
    except ModuleNotFoundError:
        Interface = object


class IcebergKeyManagementClient(Interface):
    """Wraps and unwraps the KEKs of Iceberg tables with the KMS of a configuration.

    A wrapped key is the bare ciphertext of the KMS, which Iceberg's own clients for the same KMS read and write;
    with Vault it is the text `vault:v1:...`.

    It takes the property `keytools.config` from the catalog: path of the YAML configuration with the KMS; by
    default the environment variable `PARQUET_KEYTOOLS_CONFIG`. Of the other properties it keeps none.

    Any number of threads may use it. It can be pickled; a pickle holds no key.
    """

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        """Take the properties of a catalog; a library that gives none here calls `initialize`.

        Raises:
            ConfigurationError: As with `initialize`.
        """
        self.properties: Properties = EMPTY_DICT
        if properties:
            self.initialize(properties)

    def initialize(self, properties: Properties) -> None:
        """Take the properties of a catalog, and load the configuration. No KMS call is made yet.

        Raises:
            ConfigurationError: There is no configuration, it has mistakes, or the properties name another file
                than the environment.
        """
        named, of_environment = properties.get(CONFIG_PROPERTY), os.environ.get(CONFIG_VARIABLE)
        # A library may add properties of tables, which anyone who can write to the storage may have changed.
        if named and of_environment and named != of_environment:
            raise ConfigurationError(
                f"the property {CONFIG_PROPERTY} is {named!r}, and the environment variable {CONFIG_VARIABLE} is "
                f"{of_environment!r}.",
                hint="If you set both, remove one. If not, do not trust the table: someone may have changed its "
                "properties.",
            )
        self.properties = {CONFIG_PROPERTY: configuration_file(properties, needed_by=type(self).__name__)}
        self._keys()

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        """Wrap a KEK under the current version of a master key; the wrapped key is unwrapped and compared.

        Args:
            key: 16, 24 or 32 bytes.
            wrapping_key_id: The identifier of the master key in the KMS, or its name in the configuration.

        Raises:
            ValueError: The key has another length.
            MasterKeyNotTrustedError: The configuration does not name this master key, which could be anyone's.
            KmsError: The KMS does not wrap or unwrap the key.
        """
        return self._keys().wrap_kek(SecretBytes(key), wrapping_key_id)

    def unwrap_key(self, wrapped_key: bytes, wrapping_key_id: str) -> bytes:
        """Unwrap a KEK that this class, or another client of the same KMS, wrapped.

        The key leaves `SecretBytes` here, for the library takes bytes. It stays in a cache for
        `reading.cache_lifetime_seconds`.

        Raises:
            WrappedKeyInvalidError: The wrapped key was altered, or another master key wrapped it.
            KmsError: Another subclass gives the reason.
        """
        return self._keys().kek(wrapped_key, wrapping_key_id).reveal()

    def supports_key_generation(self) -> bool:
        """Return False: the library generates KEKs, and `wrap_key` checks what the KMS returns."""
        return False

    def generate_key(self, wrapping_key_id: str) -> object:
        """Raise `NotImplementedError`; see `supports_key_generation`."""
        raise NotImplementedError("parquet-keytools wraps keys, and does not let the KMS generate them")

    def _keys(self) -> IcebergKeys:
        if not self.properties:
            # Given no properties at all.
            self.properties = {CONFIG_PROPERTY: configuration_file(EMPTY_DICT, needed_by=type(self).__name__)}
        return known_tables(self.properties[CONFIG_PROPERTY]).keys
