"""Our KMS client for Iceberg's Java library, and Java as a reader of our tables."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from iceberg_case import CANARY, Lake, rows
from iceberg_jvm import IcebergJvm, JavaError, iceberg_jars, iceberg_jvm
from openbao import OpenBao

from parquet_keytools import KmsClient, SecretBytes, load_configuration
from parquet_keytools.errors import WrappedKeyInvalidError
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.kms.registry import make_client

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

PASSPHRASE = "a passphrase of the tests of iceberg"
KEK = bytes(range(64, 80))


@dataclass
class KeystoreLake(Lake):
    """A catalog whose master keys are in a keystore file: `people` and `others`."""

    def configure(self) -> None:
        path = self.folder / "keystore.json"
        self.keystore = Keystore.create(path, lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14)
        for name in ("people", "others"):
            self.keystore.create_key(name)
        self.config.write_text(
            "version: 1\nkms: {type: keystore, path: keystore.json, passphrase: '${PASSPHRASE_OF_ICEBERG}'}\n"
            "master_keys: {pii: people}\n"
        )

    @property
    def config(self) -> Path:
        return self.folder / "keytools.yaml"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeystoreLake]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PASSPHRASE_OF_ICEBERG", PASSPHRASE)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.delenv("PARQUET_KEYTOOLS_CONFIG", raising=False)
        yield KeystoreLake(tmp_path_factory.mktemp("iceberg-java"))


@pytest.fixture(scope="module")
def jvm(lake: KeystoreLake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IcebergJvm]:
    with iceberg_jvm(tmp_path_factory.mktemp("jvm"), VAULT_TOKEN="set by its tests") as started:
        yield started


def client_of(config: Path) -> KmsClient:
    configuration = load_configuration(config)
    assert configuration.kms is not None
    return make_client(configuration.kms, configuration.folder)


@pytest.mark.parametrize("length", [16, 24, 32])
def test_what_java_wraps_python_unwraps_and_the_other_way_round(
    jvm: IcebergJvm, lake: KeystoreLake, length: int
) -> None:
    key = os.urandom(length)
    jvm.initialize(lake.config)
    with client_of(lake.config) as kms:
        wrapped = jvm.wrap(key, "people")
        assert len(wrapped) == 12 + length + 16
        assert kms.unwrap_raw(wrapped, "people").reveal() == key
        assert jvm.unwrap(kms.wrap_raw(SecretBytes(key), "people"), "people") == key
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(wrapped, "others")
        # The name in the configuration works as well as the identifier in the KMS.
        assert jvm.unwrap(wrapped, "pii") == key


def test_openbao(jvm: IcebergJvm, openbao: OpenBao, tmp_path: Path) -> None:
    key, config, token = openbao.create_key(), tmp_path / "vault.yaml", tmp_path / "token"
    token.touch(0o600)
    token.write_text(openbao.root_token)
    config.write_text(f'version: 1\nkms: {{type: vault, url: "{openbao.url}", token_file: "{token}"}}\n')
    jvm.initialize(config)
    wrapped = jvm.wrap(KEK, key)
    assert wrapped.startswith(b"vault:v1:")
    with client_of(config) as kms:
        assert kms.unwrap_raw(wrapped, key).reveal() == KEK
        assert jvm.unwrap(kms.wrap_raw(SecretBytes(KEK), key), key) == KEK


@pytest.fixture(scope="module")
def location(lake: KeystoreLake) -> str:
    """Return the metadata file of a table with the ids 0 to 39 and 100 to 102, whose KEK was rotated."""
    table = lake.create()
    table.append(rows(0, 50))
    table.overwrite(rows(100, 103), "id >= 40")
    lake.keystore.rotate_key("people")
    assert len(table.rotate()) == 1
    return lake.load().metadata_location


ROWS = [[n, f"{CANARY}-{n}"] for n in [*range(40), *range(100, 103)]]


def test_parquet_java_reads_the_rows_of_our_table(jvm: IcebergJvm, lake: KeystoreLake, location: str) -> None:
    jvm.initialize(lake.config)
    assert sorted(jvm.do("rows", metadata=location, prefix="its own")) == ROWS
    for prefix in ("another", "none"):
        with pytest.raises(JavaError):
            jvm.do("rows", metadata=location, prefix=prefix)


@pytest.mark.skipif(not iceberg_jars(), reason="ICEBERG_JARS does not name the jars of Iceberg")
def test_icebergs_own_classes_read_it(jvm: IcebergJvm, lake: KeystoreLake, location: str) -> None:
    """They create our client from the properties of a catalog, and its encryption manager can be serialized."""
    jvm.initialize(lake.config)
    assert sorted(jvm.do("rows by Iceberg", metadata=location)) == ROWS


@pytest.mark.parametrize("serializer", ["java", "kryo"])
def test_a_client_travels_without_what_is_secret_in_the_catalog(
    jvm: IcebergJvm, lake: KeystoreLake, serializer: str
) -> None:
    given = {"token": "secret-of-the-catalog", "s3.secret-access-key": "s3-secret", "keytools.python": ""}
    text = jvm.initialize(lake.config, **given)
    wrapped = jvm.wrap(KEK, "people")
    sent = base64.b64decode(jvm.do("send", **{"with": serializer}))
    # Kryo marks the end of a text in its last byte.
    assert str(lake.config).encode()[:-1] in sent
    for secret in (b"secret-of-the-catalog", b"s3-secret", PASSPHRASE.encode(), KEK):
        assert secret not in sent and secret.decode(errors="replace") not in text
    assert jvm.unwrap(wrapped, "people") == KEK


def test_a_refused_key_and_a_wrapped_key_that_was_changed(jvm: IcebergJvm, lake: KeystoreLake) -> None:
    jvm.initialize(lake.config)
    wrapped = jvm.wrap(KEK, "others")
    for position in (0, 12, len(wrapped) - 1):
        changed = bytearray(wrapped)
        changed[position] ^= 1
        with pytest.raises(JavaError, match="with master key 'others': the wrapped key"):
            jvm.unwrap(bytes(changed), "others")
    lake.keystore.set_enabled("others", False)
    try:
        with pytest.raises(JavaError, match=r"KeyAccessDenied.* wrap .*'others': the master key is disabled"):
            jvm.wrap(KEK, "others")
    finally:
        lake.keystore.set_enabled("others", True)
    with pytest.raises(JavaError, match="no such master key"):
        jvm.wrap(KEK, "nobody")


@pytest.mark.parametrize(
    ("key", "by", "text"),
    [
        (b"short", "people", "16, 24 or 32 bytes, not 5"),
        (KEK, None, "it has no property encryption.key-id"),
        (KEK, "", "it has no property encryption.key-id"),
        (KEK, "x" * 70_000, "The identifier of a master key has 70000 bytes"),
    ],
)
def test_what_is_no_request(jvm: IcebergJvm, lake: KeystoreLake, key: bytes, by: str | None, text: str) -> None:
    jvm.initialize(lake.config)
    with pytest.raises(JavaError, match=re.escape(text)):
        jvm.wrap(key, by)


def test_a_kms_that_is_away(jvm: IcebergJvm, tmp_path: Path) -> None:
    config = tmp_path / "away.yaml"
    config.write_text(
        'version: 1\nkms: {type: vault, url: "http://127.0.0.1:1", token: x, timeout_seconds: 0.2}\n'
    )
    jvm.initialize(config)
    with pytest.raises(JavaError, match=r"vault: unwrap with master key 'people'.*unavailable"):
        jvm.unwrap(b"vault:v1:" + base64.b64encode(KEK), "people")


def test_a_configuration_that_is_missing(jvm: IcebergJvm, tmp_path: Path) -> None:
    with pytest.raises(
        JavaError, match=r"no property keytools\.config, and .* no variable PARQUET_KEYTOOLS_CONFIG"
    ):
        jvm.initialize(None)
    jvm.initialize(tmp_path / "nowhere.yaml")
    with pytest.raises(JavaError, match=r"nowhere\.yaml: there is no such file"):
        jvm.wrap(KEK, "people")
    jvm.initialize(tmp_path / "nowhere.yaml", **{"keytools.python": "/nowhere/python"})
    with pytest.raises(JavaError, match=r"could not be started with /nowhere/python.*keytools\.python"):
        jvm.wrap(KEK, "people")


def test_nothing_secret_is_logged(jvm: IcebergJvm, lake: KeystoreLake) -> None:
    """Must be the last test: it reads what earlier tests logged."""
    opened = lake.keystore.open()
    secrets: dict[str, Any] = {"a KEK": KEK, "the passphrase": PASSPHRASE.encode()}
    for name in ("people", "others"):
        secrets[name] = opened.key(name, opened.master_key(name, "test").versions[-1]).reveal()
    output = jvm.output
    assert "KeyAccessDenied" in output and "KMS worker" in output
    for name, secret in secrets.items():
        forms = {secret.decode("latin-1"), base64.b64encode(secret).decode(), secret.hex(), str(list(secret))}
        assert not [form for form in forms if form in output], name
    assert CANARY not in output
    assert json.dumps(PASSPHRASE) not in output
