"""Our KMS clients behind the interface of Iceberg's Python library."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import iceberg
from parquet_keytools.errors import (
    ConfigurationError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.iceberg import IcebergKeyManagementClient
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

PASSPHRASE = "a passphrase of the tests"
KEK = bytes(range(64, 80))


@pytest.fixture(params=["in_memory", "keystore"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with the master keys `people` and `others`."""
    monkeypatch.delenv("PARQUET_KEYTOOLS_CONFIG", raising=False)
    monkeypatch.setenv("PASSPHRASE", PASSPHRASE)
    path = tmp_path / "keytools.yaml"
    if request.param == "in_memory":
        keys = ", ".join(f"{name}: {base64.b64encode(os.urandom(16)).decode()}" for name in ("people", "others"))
        kms = f"{{type: in_memory, keys: {{{keys}}}}}"
    else:
        keystore = Keystore.create(
            tmp_path / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
        )
        for name in ("people", "others"):
            keystore.create_key(name)
        kms = "{type: keystore, path: keystore.json, passphrase: '${PASSPHRASE}'}"
    path.write_text(f"version: 1\nkms: {kms}\nmaster_keys: {{pii: people}}\n")
    path.chmod(0o600)
    return path


def master_key(config: Path) -> bytes:
    """Return the bytes of the master key `people`."""
    text = config.read_text()
    if "in_memory" in text:
        return base64.b64decode(text.partition("people: ")[2].partition(",")[0])
    opened = Keystore(config.with_name("keystore.json"), lambda: passphrase_from_text(PASSPHRASE)).open()
    return opened.key("people", opened.master_key("people", "test").versions[-1]).reveal()


def client_of(config: Path, **more: str) -> IcebergKeyManagementClient:
    return IcebergKeyManagementClient({"keytools.config": str(config), **more})


@pytest.mark.parametrize("length", [16, 24, 32])
def test_what_it_wraps_others_unwrap_and_the_other_way_round(config: Path, length: int) -> None:
    """Others do the same as the KMS in Iceberg's own tests: nonce, AES-GCM, tag, no AAD."""
    client, key, cipher = client_of(config), os.urandom(length), AESGCM(master_key(config))
    wrapped = client.wrap_key(key, "people")
    assert cipher.decrypt(wrapped[:12], wrapped[12:], None) == key
    nonce = os.urandom(12)
    theirs = nonce + cipher.encrypt(nonce, key, None)
    assert client.unwrap_key(theirs, "people") == client.unwrap_key(theirs, "pii") == key


def test_it_is_loaded_by_its_path(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the properties, without any, and with `initialize`, as both proposals for PyIceberg do."""
    module, _, name = "parquet_keytools.iceberg.IcebergKeyManagementClient".rpartition(".")
    loaded: Any = getattr(importlib.import_module(module), name)
    properties = {"keytools.config": str(config)}
    wrapped = loaded(properties).wrap_key(KEK, "people")
    initialized = loaded()
    initialized.initialize(properties)
    assert initialized.unwrap_key(wrapped, "people") == KEK
    with pytest.raises(ConfigurationError, match=r"'keytools\.config' is not among the properties"):
        loaded().unwrap_key(wrapped, "people")
    monkeypatch.setenv("PARQUET_KEYTOOLS_CONFIG", str(config))
    assert loaded().unwrap_key(wrapped, "people") == KEK
    assert loaded({"type": "rest"}).unwrap_key(wrapped, "people") == KEK


def test_it_is_of_the_class_of_pyiceberg_where_there_is_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KeyManagementClient:
        """Stands in for PyIceberg's."""

    package, module = types.ModuleType("pyiceberg.encryption"), types.ModuleType("pyiceberg.encryption.kms")
    module.KeyManagementClient = KeyManagementClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = Path(str(iceberg.__file__)).with_name("kms_client.py")
    spec = importlib.util.spec_from_file_location("loaded_with_pyiceberg", source)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    client = loaded.IcebergKeyManagementClient({"keytools.config": str(config)})
    assert isinstance(client, KeyManagementClient)
    assert client.unwrap_key(client.wrap_key(KEK, "people"), "people") == KEK


def test_it_lets_no_kms_generate_keys(config: Path) -> None:
    client = client_of(config)
    assert client.supports_key_generation() is False
    with pytest.raises(NotImplementedError):
        client.generate_key("people")


def test_keys_and_master_keys_that_are_wrong(config: Path) -> None:
    client = client_of(config)
    wrapped = client.wrap_key(KEK, "people")
    for position in (0, 12, len(wrapped) - 1):
        changed = bytearray(wrapped)
        changed[position] ^= 1
        with pytest.raises(WrappedKeyInvalidError):
            client.unwrap_key(bytes(changed), "people")
    with pytest.raises(WrappedKeyInvalidError):
        client.unwrap_key(wrapped, "others")
    with pytest.raises(MasterKeyNotFoundError):
        client.wrap_key(KEK, "nobody")
    with pytest.raises(ValueError, match="16, 24 or 32 bytes, not 5"):
        client.wrap_key(b"short", "people")


def test_it_travels_without_secrets(config: Path) -> None:
    client = client_of(config, **{"token": "secret-of-the-catalog", "s3.secret-access-key": "s3-secret"})
    wrapped = client.wrap_key(KEK, "people")
    sent = pickle.dumps(client)
    key = master_key(config)
    for secret in (b"secret-of-the-catalog", b"s3-secret", PASSPHRASE.encode(), KEK, key, base64.b64encode(key)):
        assert secret not in sent and secret.decode(errors="replace") not in repr(vars(client))
    assert pickle.loads(sent).unwrap_key(wrapped, "people") == KEK


def test_properties_of_a_table_choose_no_other_configuration(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARQUET_KEYTOOLS_CONFIG", str(config))
    assert client_of(config).wrap_key(KEK, "people")
    with pytest.raises(ConfigurationError, match=r"forged\.yaml.*do not trust the table"):
        client_of(tmp_path / "forged.yaml")


def test_a_configuration_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARQUET_KEYTOOLS_CONFIG", raising=False)
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml: there is no such file"):
        client_of(tmp_path / "nowhere.yaml")
    (tmp_path / "wrong.yaml").write_text("version: 1\nkms: {type: nobody}\n")
    with pytest.raises(ConfigurationError, match=r"wrong\.yaml"):
        client_of(tmp_path / "wrong.yaml")
