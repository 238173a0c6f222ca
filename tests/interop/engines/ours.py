"""parquet-keytools: pyarrow with our keys, and the module encryptor."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engines.policy import AAD_PREFIX, EncryptedFile, Policy
from engines.sample import MASTER_KEYS, column_keys, sample, write_options, write_plain
from parquet_keytools import Keytools
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.storage.locations import FileLocation

ARROW_PATH = "ours (Arrow)"
MODULE_PATH = "ours (module)"

DATA_KEYS = {name: secrets.token_hex(8).encode() for name in MASTER_KEYS}
"""Name -> data key, for the policies where the caller manages them."""


def base64_keys(keys: Mapping[str, bytes]) -> dict[str, str]:
    """Return keys in the form of a configuration."""
    return {name: base64.b64encode(key).decode() for name, key in keys.items()}


def keytools(policy: Policy, *, keys_in_file: bool = True, moves: Mapping[str, str] | None = None) -> Keytools:
    """Return a Keytools for a policy.

    Args:
        policy: The policy.
        keys_in_file: Whether files carry key metadata; if not, the configuration assigns the data keys.
        moves: Former master keys of files, and their present ones.
    """
    document: dict[str, object] = {
        "version": 1,
        "tables": {"sample": table_settings(policy)},
    }
    if not policy.data_keys:
        document["kms"] = {"type": "in_memory", "keys": base64_keys(MASTER_KEYS)}
        document["rotation"] = {"moves": dict(moves or {})}
        return Keytools.from_mapping(document)
    document["data_keys"] = base64_keys(DATA_KEYS)
    if not keys_in_file:
        columns = {column: name for name, columns in column_keys(policy).items() for column in columns}
        document["reading"] = {"keys_without_metadata": {"footer": "footer", "columns": columns}}
    return Keytools.from_mapping(document)


def table_settings(policy: Policy) -> dict[str, object]:
    """Return a policy as a table of a configuration."""
    settings: dict[str, object] = {
        "footer_key": "footer",
        "column_keys": column_keys(policy),
        "unlisted_columns": "plaintext"
        if policy.column_keys and not policy.unlisted_with_footer_key
        else "footer_key",
        "plaintext_footer": policy.plaintext_footer,
        "algorithm": policy.algorithm,
        "data_key_length_bits": policy.length_bits,
        "double_wrapping": policy.double_wrapping,
        "key_material": policy.key_material,
    }
    if policy.aad_prefix != "none":
        settings["aad_prefix"] = AAD_PREFIX
    if policy.aad_prefix == "supplied":
        settings["store_aad_prefix"] = False
    return settings


class ArrowPath:
    """`Keytools.write_table` and `read_table`, for policies that pyarrow supports."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample; refuses anything that needs the module encryptor."""
        path = folder / "file.parquet"
        result = keytools(policy).write_table(sample(policy), path, **write_options(policy))
        # pyarrow would show size statistics of encrypted columns in a plaintext footer, and replace external key
        # material before the file.
        is_ours = policy.plaintext_footer or policy.key_material == "external"
        assert result.engine == ("module encryptor" if is_ours else "pyarrow"), result.reasons
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file."""
        return keytools_for(file).read_table(file.path)


class ModulePath:
    """`Keytools.encrypt_file` and `decrypt_file`."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Encrypt the plaintext file."""
        path = folder / "file.parquet"
        keytools(policy).encrypt_file(write_plain(folder / "plain.parquet", policy), path)
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Decrypt a file and read the plaintext file with pyarrow."""
        plain = file.path.with_name("decrypted.parquet")
        keytools_for(file).decrypt_file(file.path, plain)
        return pq.read_table(plain, page_checksum_verification=True)


def keytools_for(file: EncryptedFile) -> Keytools:
    return keytools(file.policy, keys_in_file=file.writer in (ARROW_PATH, MODULE_PATH))


@dataclass(frozen=True)
class Deks:
    """The DEKs of a file, for engines without a KMS client.

    Attributes:
        footer: The footer's DEK.
        columns: Dotted path -> DEK of the columns that have their own key.
        aad_prefix: The AAD prefix, if it must be supplied.
    """

    footer: bytes
    columns: dict[str, bytes]
    aad_prefix: str | None


def column_data_keys(policy: Policy) -> dict[str, bytes]:
    """Return dotted path -> data key of the columns that have their own key."""
    return {column: DATA_KEYS[name] for name, columns in column_keys(policy).items() for column in columns}


def deks_of(file: EncryptedFile) -> Deks:
    """Return the DEKs of a file: the data keys, or the DEKs in its key material."""
    if file.policy.data_keys and file.policy.aad_prefix != "supplied":
        # Only DuckDB can open the files that it writes.
        return Deks(DATA_KEYS["footer"], column_data_keys(file.policy), None)
    service = KeyService(keytools_for(file).configuration, None, lambda: 0.0)
    (opened,) = service.open_files([FileLocation.resolve(file.path, None)])
    # Not every writer ends it with NUL.
    prefix = opened.footer.aad_prefix.decode() if file.policy.aad_prefix == "supplied" else None
    if file.policy.data_keys:
        return Deks(DATA_KEYS["footer"], column_data_keys(file.policy), prefix)
    return Deks(
        opened.retriever.footer_dek(opened.footer.key_metadata).reveal(),
        {".".join(path): dek.reveal() for path, dek in opened.deks.items()},
        prefix,
    )
