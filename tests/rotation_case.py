"""Data sets whose master keys tests rotate, in two KMSs, and pyarrow's own reader for them."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from key_services import key_service

from parquet_keytools import Keytools
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.keys.key_material import KeyMaterial, KeyReference
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.kms.named import NamedKmss
from parquet_keytools.rotation.report import RotationReport
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source

MASTER_KEYS = ("kf", "ka", "kb", "new")
TABLE = pa.table(
    {
        "a": pa.array(range(500), pa.int64()),
        "b": [f"text {i % 17}" for i in range(500)],
        "nested": [{"x": i, "y": [i, None]} for i in range(500)],
        "plain": pa.array([i / 7 for i in range(500)]),
    }
)
COLUMNS: dict[str, Any] = {"column_keys": {"ka": ["a", "nested"], "kb": ["b"]}}
UNIFORM: dict[str, Any] = {"column_keys": {}, "unlisted_columns": "footer_key"}


def passphrase() -> SecretBytes:
    return SecretBytes(b"canary horse battery")


@cache
def new_keystore(master_keys: tuple[str, ...]) -> bytes:
    """A keystore with these master keys: its salt is fixed, so the key is derived from the passphrase once."""
    with tempfile.TemporaryDirectory() as folder:
        keystore = Keystore.create(Path(folder) / "keystore.json", passphrase, scrypt_n=2**14)
        for name in master_keys:
            keystore.create_key(name)
        return keystore.path.read_bytes()


@cache
def changed_keystore(content: bytes, change: str, arguments: tuple[tuple[Any, ...], ...]) -> bytes:
    """The content of a keystore after a method was called once with each of the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keystore.json"
        path.touch(mode=0o600)
        path.write_bytes(content)
        keystore = Keystore(path, passphrase)
        for one in arguments:
            getattr(keystore, change)(*one)
        return path.read_bytes()


@dataclass
class Case:
    """A KMS, a folder for data, and what an operator does with both."""

    folder: Path
    kms: KmsClient
    keystore: Keystore | None
    settings: dict[str, Any] = field(default_factory=lambda: dict(COLUMNS))

    @classmethod
    def make(cls, tmp_path: Path, kind: str, master_keys: tuple[str, ...] = MASTER_KEYS, **settings: Any) -> Case:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        table = {**COLUMNS, **settings}
        if kind == "in_memory":
            return cls(folder, InMemoryKms(dict.fromkeys(master_keys)), None, table)
        path = tmp_path / f"{kind}.json"
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(new_keystore(master_keys))
        keystore = Keystore(path, passphrase)
        return cls(folder, KeystoreKms(path, passphrase), keystore, table)

    def tools(self, kms: KmsClient | None = None, **changes: Any) -> Keytools:
        from parquet_keytools import parse_configuration

        document = {
            "version": 1,
            # The KMS is passed in; the configuration only states that one exists.
            "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
            "tables": {"t": {"footer_key": "kf", "unlisted_columns": "plaintext", **self.settings, **changes}},
            # Many files are copies of one, which is faster.
            "reading": {"reused_encryption_properties": "allow"},
        }
        return Keytools(parse_configuration(document), kms=kms or self.kms)

    def move_to(self, other: KmsClient, path: Path, **options: Any) -> RotationReport:
        """Move all keys of a file or folder to the master keys of the same names in another KMS."""
        from parquet_keytools import parse_configuration

        one = {"type": "in_memory", "keys": list(MASTER_KEYS)}
        document = {
            "version": 1,
            "kms": {"default": "old", "old": one, "other": one},
            "tables": {"t": {"footer_key": "kf", "unlisted_columns": "plaintext", **self.settings}},
            "rotation": {"moves": {f"old::{name}": f"other::{name}" for name in MASTER_KEYS}},
        }
        kms = NamedKmss({"old": self.kms, "other": other}, "old")
        return Keytools(parse_configuration(document), kms=kms).rotate(path, **options)

    def write(
        self,
        name: str = "x.parquet",
        *,
        tools: Keytools | None = None,
        table: pa.Table = TABLE,
        row_group_size: int = 250,
    ) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (tools or self.tools()).write_table(table, path, row_group_size=row_group_size)
        return path

    def add_version(self, *master_keys: str) -> None:
        master_keys = master_keys or MASTER_KEYS
        if self.keystore is not None:
            self._change_keystore("rotate_key", *((name,) for name in master_keys))
            return
        assert isinstance(self.kms, InMemoryKms)
        for name in master_keys:
            self.kms.add_version(name)

    def disable(self, version: int | None, *master_keys: str) -> None:
        master_keys = master_keys or MASTER_KEYS
        if self.keystore is not None:
            self._change_keystore("set_enabled", *((name, False, version) for name in master_keys))
            return
        assert isinstance(self.kms, InMemoryKms)
        for name in master_keys:
            self.kms.disable(name, version)

    def _change_keystore(self, change: str, *arguments: tuple[Any, ...]) -> None:
        """Change the keystore, or copy what the same change has made of it before, which is much faster."""
        assert self.keystore is not None
        path = self.keystore.path
        content = changed_keystore(path.read_bytes(), change, arguments)
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(content)
        new.replace(path)


class AnyKms(pe.KmsClient):
    """The settings of a pyarrow user who writes under the same master keys."""

    def __init__(self, kms: KmsClient) -> None:
        super().__init__()
        self._kms = kms

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        from urllib.parse import unquote

        return wrap_one(self._kms, SecretBytes(key_bytes), unquote(master_key_identifier))

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        from urllib.parse import unquote

        return unwrap_one(self._kms, wrapped_key, unquote(master_key_identifier)).reveal()


def crypto_factory(kms: KmsClient) -> pe.CryptoFactory:
    return pe.CryptoFactory(lambda _: AnyKms(kms))


def place_of(path: Path) -> tuple[str, pa.fs.FileSystem] | tuple[()]:
    """Return the arguments with which pyarrow finds external key material, from version 23 on."""
    method = pe.CryptoFactory.file_encryption_properties
    takes_place = "parquet_file_path" in inspect.signature(method).parameters
    return (str(path), pa.fs.LocalFileSystem()) if takes_place else ()


def read_with_pyarrow(kms: KmsClient, path: Path) -> pa.Table:
    """Read with a plain CryptoFactory of pyarrow."""
    properties = crypto_factory(kms).file_decryption_properties(
        pe.KmsConnectionConfig(), pe.DecryptionConfiguration(), *place_of(path)
    )
    with pq.ParquetFile(path, decryption_properties=properties) as file:
        # Threads of older versions share one decryptor, and corrupt each other's data.
        return file.read(use_threads=False)


def write_with_pyarrow(kms: KmsClient, path: Path, table: pa.Table = TABLE, **options: Any) -> None:
    """Write with a plain CryptoFactory of pyarrow."""
    defaults: dict[str, Any] = {
        "footer_key": "kf",
        "column_keys": {"ka": ["a", "nested.x", "nested.y.list.element"], "kb": ["b"]},
    }
    configuration = pe.EncryptionConfiguration(**{**defaults, **options})
    properties = crypto_factory(kms).file_encryption_properties(
        pe.KmsConnectionConfig(), configuration, *place_of(path)
    )
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=250)


def data_range(path: Path) -> bytes:
    """Return everything before the footer."""
    with open_source(FileLocation.resolve(path)) as source:
        offset = read_envelope(source).footer_offset
        return bytes(source.read_at(0, offset))


def materials(tools: Keytools, path: Path) -> list[KeyMaterial]:
    """Return the stored key material of a file: first the footer's, then the columns'."""
    (opened,) = key_service(tools).open_files([FileLocation.resolve(path)])
    metadata = [opened.footer.key_metadata, *(c.key_metadata for c in opened.footer.columns if c.key_metadata)]
    found = [opened.retriever.parsed(item) for item in metadata]
    external = opened.retriever.key_materials or {}
    found = [external[item.reference] if isinstance(item, KeyReference) else item for item in found]
    return [material for material in found if isinstance(material, KeyMaterial)]


def tree_digest(folder: Path) -> dict[str, str]:
    """Return the contents of a folder: path -> digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def key_material_file(path: Path) -> Path:
    return path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json")


def external_entries(path: Path) -> dict[str, dict[str, Any]]:
    content: Mapping[str, str] = json.loads(key_material_file(path).read_text())
    return {reference: json.loads(text) for reference, text in content.items()}


def text_of(key: bytes) -> str:
    return base64.b64encode(key).decode()
