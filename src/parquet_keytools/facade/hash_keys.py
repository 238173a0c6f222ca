"""Secrets of digests that are shown in place of values."""

from __future__ import annotations

from parquet_keytools.config.key_names import MasterKeyReference, hash_key_reference, resolve_key
from parquet_keytools.config.settings import HashKeySettings
from parquet_keytools.errors import ConfigurationError, KmsResponseInvalidError
from parquet_keytools.facade.configured import Configured
from parquet_keytools.files.digested_columns import SECRET_LENGTH_BITS, unwrapped_secret
from parquet_keytools.secret_bytes import SecretBytes


class HashKeys(Configured):
    """Makes and re-wraps the secrets of digests."""

    def check_hash_keys(self) -> None:
        """Unwrap each secret under `hash_keys`.

        Raises:
            ConfigurationError: What the KMS unwraps is no secret of digests.
            KmsError: The KMS does not unwrap one.
        """
        for name in self.configuration.hash_keys:
            unwrapped_secret(self.configuration, name, self._keys.kms_keys())

    def wrap_hash_key(self, name: str, master_key: str | None = None) -> HashKeySettings:
        """Return what the configuration shall say of a secret under `hash_keys`.

        A secret that the configuration has is re-wrapped under the current version of its master key, or under
        another one, and digests stay the same. Otherwise it is a new one, of random bytes.

        Args:
            name: Of the secret.
            master_key: Name of the master key that wraps it; None for the one that the configuration says.

        Raises:
            ConfigurationError: The master key is unknown, a data key, or not given for a new secret.
            KmsResponseInvalidError: What the KMS returned does not unwrap to the secret.
            KmsError: The KMS does not wrap or unwrap it.
        """
        known = self.configuration.hash_keys.get(name)
        if master_key is None and known is None:
            raise ConfigurationError(
                f"the configuration has no secret {name!r} under hash_keys.",
                hint="Name the master key that shall wrap a new one: --master-key on the command line.",
            )
        if master_key is None and known is not None:
            master_key = known.master_key
            reference = hash_key_reference(self.configuration, name)
        else:
            assert master_key is not None
            found = resolve_key(self.configuration, master_key)
            if not isinstance(found, MasterKeyReference):
                raise ConfigurationError(f"{master_key!r} is a data key: master keys wrap secrets of digests.")
            reference = found
        if known is None:
            secret = SecretBytes.random(SECRET_LENGTH_BITS)
        else:
            secret = unwrapped_secret(self.configuration, name, self._keys.kms_keys())
        assert self.kms is not None
        master_key_id = reference.master_key_id
        wrapped = self.kms.wrap(secret, master_key_id)
        # All digests would be lost with a wrapped secret that does not open.
        if self.kms.unwrap(wrapped, master_key_id) != secret:
            raise KmsResponseInvalidError(
                "the wrapped secret does not unwrap to the secret",
                backend=self.kms.backend,
                operation="wrap",
                master_key_id=master_key_id,
            )
        return HashKeySettings(master_key=master_key, wrapped_key=wrapped)
