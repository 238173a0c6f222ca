"""Encrypted Iceberg tables under keys of four KMSs, with the configurations of docs/iceberg.md."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from azure.keyvault.keys.crypto import CryptographyClient, KeyWrapAlgorithm
from azure_fake import fake_vault
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gcp_fake import KEY_RING, fake_gcp_kms
from iceberg_case import Lake, rows
from iceberg_tables import MASTER_KEYS, ExpectedTable, assert_is_snapshot
from moto_server import moto_server
from openbao import OpenBao

from parquet_keytools.errors import KmsError
from parquet_keytools.iceberg import IcebergKeyManagementClient
from parquet_keytools.kms.gcp import open_client

PAGE = (Path(__file__).parents[2] / "docs" / "iceberg.md").read_text(encoding="utf-8")


def configuration(name: str) -> str:
    """Return the page's block for the file of this name."""
    (text,) = re.findall(rf"^```yaml\n# {name}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(text)


def check(lake: Lake) -> list[str]:
    """Create, write, rotate and read a table; return its KEKs before and after."""
    table = lake.create()
    table.append(rows(0, 5))
    table.delete("id = 1")
    keks = [lake.metadata()["encryption-keys"][0]["encrypted-key-metadata"]]
    assert len(lake.load().rotate()) == 1
    keks.append(lake.metadata()["encryption-keys"][0]["encrypted-key-metadata"])
    lake.load().append(rows(5, 6))
    assert lake.ids() == [0, 2, 3, 4, 5]
    lake.assert_no_plaintext()
    return keks


def exchange_kek(lake: Lake, decrypt: Callable[[bytes], bytes], encrypt: Callable[[bytes], bytes]) -> None:
    """Unwrap the KEK of the table and wrap it again, as another client does; the table is read afterwards."""
    path = Path(lake.load().metadata_location.removeprefix("file://"))
    document = json.loads(path.read_text())
    entry = document["encryption-keys"][0]
    assert entry["encrypted-by-id"] == document["properties"]["encryption.key-id"]
    kek = decrypt(base64.b64decode(entry["encrypted-key-metadata"]))
    assert len(kek) == 16
    wrapped = base64.b64encode(encrypt(kek)).decode()
    assert wrapped != entry["encrypted-key-metadata"]
    entry["encrypted-key-metadata"] = wrapped
    path.write_text(json.dumps(document))
    # With a changed configuration, no key is cached.
    configuration = lake.folder / "keytools.yaml"
    configuration.write_text(configuration.read_text() + "\n")
    before = lake.ids()
    lake.load().append(rows(100, 101))
    assert lake.ids() == [*before, 100]


def exchange_with_client(
    config: Path, master_key_id: str, decrypt: Callable[[bytes], bytes], encrypt: Callable[[bytes], bytes]
) -> None:
    """Unwrap with a plain client of the service what our client for PyIceberg wrapped, and the other way round."""
    client = IcebergKeyManagementClient({"keytools.config": str(config)})
    for length in (16, 24, 32):
        key = os.urandom(length)
        assert decrypt(client.wrap_key(key, master_key_id)) == key
        wrapped = encrypt(key)
        assert client.unwrap_key(wrapped, master_key_id) == client.unwrap_key(wrapped, "pii") == key
        with pytest.raises(KmsError):
            client.unwrap_key(wrapped[:-1] + bytes([wrapped[-1] ^ 1]), master_key_id)


def test_openbao(tmp_path: Path, openbao: OpenBao, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_TOKEN", openbao.root_token)
    lake = Lake(tmp_path)
    key = openbao.create_key()
    text = configuration("vault.yaml").replace("http://127.0.0.1:8200", openbao.url)
    (tmp_path / "keytools.yaml").write_text(text.replace("people-pii", key))
    before, after = check(lake)
    assert before != after

    def decrypt(wrapped: bytes) -> bytes:
        answer = openbao.ask("POST", f"transit/decrypt/{key}", {"ciphertext": wrapped.decode()})
        return base64.b64decode(answer.content["data"]["plaintext"])

    def encrypt(kek: bytes) -> bytes:
        plaintext = base64.b64encode(kek).decode()
        answer = openbao.ask("POST", f"transit/encrypt/{key}", {"plaintext": plaintext})
        return bytes(answer.content["data"]["ciphertext"].encode())

    exchange_with_client(tmp_path / "keytools.yaml", key, decrypt, encrypt)


def test_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with moto_server() as url:
        client = boto3.client("kms", endpoint_url=url)
        arn = client.create_key()["KeyMetadata"]["Arn"]
        text = configuration("aws.yaml").replace("region: eu-west-1", f'region: eu-west-1, endpoint_url: "{url}"')
        lake = Lake(tmp_path)
        (tmp_path / "keytools.yaml").write_text(re.sub(r'"arn:.*?"', f'"{arn}"', text))
        before, after = check(lake)
        assert before != after
        assert lake.metadata()["properties"]["encryption.key-id"] == arn
        # The requests of Iceberg's AwsKeyManagementClient: with the algorithm, and without an encryption context.
        how = {"KeyId": arn, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT"}

        def decrypt(blob: bytes) -> bytes:
            return client.decrypt(CiphertextBlob=blob, **how)["Plaintext"]

        def encrypt(kek: bytes) -> bytes:
            return client.encrypt(Plaintext=kek, **how)["CiphertextBlob"]

        exchange_kek(lake, decrypt, encrypt)
        exchange_with_client(tmp_path / "keytools.yaml", arn, decrypt, encrypt)


def test_google(tmp_path: Path) -> None:
    with fake_gcp_kms("people-pii") as server:
        # Iceberg's GcpKeyManagementClient needs the full name, and sends no additional authenticated data.
        name = f"{KEY_RING}/cryptoKeys/people-pii"
        text = configuration("google.yaml").replace(
            "type: gcp", f'type: gcp, endpoint: "{server.endpoint}", insecure: true'
        )
        lake = Lake(tmp_path)
        (tmp_path / "keytools.yaml").write_text(re.sub(r'"projects/.*?"', f'"{name}"', text))
        before, after = check(lake)
        assert before != after
        assert lake.metadata()["properties"]["encryption.key-id"] == name
        client = open_client(server.endpoint, insecure=True)

        def decrypt(ciphertext: bytes) -> bytes:
            return bytes(client.decrypt(request={"name": name, "ciphertext": ciphertext}).plaintext)

        def encrypt(kek: bytes) -> bytes:
            return bytes(client.encrypt(request={"name": name, "plaintext": kek}).ciphertext)

        exchange_kek(lake, decrypt, encrypt)
        exchange_with_client(tmp_path / "keytools.yaml", name, decrypt, encrypt)
        client.transport.close()


def test_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vault(tmp_path / "vault", "people-pii") as vault:
        for name, value in vault.environment().items():
            monkeypatch.setenv(name, value)
        text = configuration("azure.yaml").replace("https://my-vault.vault.azure.net", vault.url)
        lake = Lake(tmp_path)
        (tmp_path / "keytools.yaml").write_text(text)
        before, after = check(lake)
        assert before != after
        assert lake.metadata()["properties"]["encryption.key-id"] == "people-pii"
        # The operations of Iceberg's AzureKeyManagementClient: Azure's own client, which wraps in this process.
        client = CryptographyClient(f"{vault.url}/keys/people-pii", vault.credential(), api_version="7.4")
        how = KeyWrapAlgorithm.rsa_oaep_256
        exchange_kek(
            lake,
            lambda ciphertext: client.unwrap_key(how, ciphertext).key,
            lambda kek: client.wrap_key(how, kek).encrypted_key,
        )
        # KEKs under an older version of the key are read and rotated, too.
        vault.keys["people-pii"].add_version()
        lake.load().append(rows(6, 7))
        assert len(lake.load().rotate()) == 1
        vault.keys["people-pii"].versions[0].enabled = False
        assert 6 in lake.ids()


@pytest.mark.parametrize("name", ["people_128", "kek_rotated"])
def test_a_table_of_iceberg_java_under_azure(
    tmp_path: Path, iceberg_test_data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The state that Iceberg Java with its Azure client leaves: its table, and KEKs wrapped by Azure's own client.

    The client of Iceberg calls `wrapKey` with RSA-OAEP-256, and Iceberg stores the bare ciphertext, as base64. The
    table was written with another KMS, which shows only in the wrapped KEKs: they are wrapped again.
    """
    with fake_vault(tmp_path / "vault", "people-pii") as vault:
        for variable, value in vault.environment().items():
            monkeypatch.setenv(variable, value)
        client = CryptographyClient(f"{vault.url}/keys/people-pii", vault.credential(), api_version="7.4")
        lake = Lake(tmp_path)
        text = configuration("azure.yaml").replace("https://my-vault.vault.azure.net", vault.url)
        (tmp_path / "keytools.yaml").write_text(text)
        shutil.copytree(iceberg_test_data / "warehouse" / name, lake.warehouse / name)
        expected = ExpectedTable.read(iceberg_test_data, name)
        path = lake.warehouse / expected.metadata.removeprefix("file:/warehouse/")
        document = json.loads(path.read_text())
        keks = [entry for entry in document["encryption-keys"] if entry["encrypted-by-id"] in MASTER_KEYS]
        for entry in keks:
            wrapped = base64.b64decode(entry["encrypted-key-metadata"])
            kek = AESGCM(MASTER_KEYS[entry["encrypted-by-id"]]).decrypt(wrapped[:12], wrapped[12:], None)
            wrapped = client.wrap_key(KeyWrapAlgorithm.rsa_oaep_256, kek).encrypted_key
            entry |= {
                "encrypted-by-id": "people-pii",
                "encrypted-key-metadata": base64.b64encode(wrapped).decode(),
            }
        document["properties"]["encryption.key-id"] = "people-pii"
        path.write_text(json.dumps(document))

        mapping = {"keytools.location-mapping": f"file:/warehouse=file://{lake.warehouse}"}
        lake.catalog(**mapping).register_table(f"db.{name}", expected.metadata)
        table = lake.load(f"db.{name}", **mapping)
        for snapshot in expected.snapshots:
            assert_is_snapshot(table.scan(snapshot_id=snapshot["snapshot_id"]).to_arrow(), snapshot)
        vault.keys["people-pii"].add_version()
        assert len(table.rotate()) == len(keks)
        vault.keys["people-pii"].versions[0].enabled = False
        # With a changed configuration, no key is cached.
        (tmp_path / "keytools.yaml").write_text(text + "\n")
        rotated = lake.load(f"db.{name}", **mapping)
        assert_is_snapshot(rotated.scan().to_arrow(), expected.snapshots[-1])
        # Azure's own client unwraps keys of the new version.
        entries = json.loads((path.parent / Path(rotated.metadata_location).name).read_text())["encryption-keys"]
        client = CryptographyClient(f"{vault.url}/keys/people-pii", vault.credential(), api_version="7.4")
        rewrapped = [entry for entry in entries if entry["encrypted-by-id"] == "people-pii"]
        assert len(rewrapped) >= len(keks)
        wrapped = base64.b64decode(rewrapped[-1]["encrypted-key-metadata"])
        assert len(client.unwrap_key(KeyWrapAlgorithm.rsa_oaep_256, wrapped).key) == 16
