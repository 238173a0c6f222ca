"""`parquet-keytools tenants create`: master keys of tenants, in each KMS that can create them."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
import yaml
from azure_fake import FakeVault, fake_vault
from gcp_fake import KEY_RING, fake_gcp_kms
from moto_server import moto_server
from openbao import OpenBao
from softhsm import SoftHsm, needs_softhsm
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import KmsConfigurationError, KmsError
from parquet_keytools.kms.azure import AzureKms, AzureSettings
from parquet_keytools.kms.client import MasterKeyDescription, SingleKeyKmsClient
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.secret_bytes import SecretBytes

REGION = "eu-west-1"
DATA = pa.table({"email": ["a@x", "b@x"]})
KEY = SecretBytes(bytes(range(16)))


class Place:
    """A configuration, and the command for it."""

    def __init__(self, folder: Path, kms: dict[str, Any], identifier: str, *, is_footer: bool = True) -> None:
        table = {
            "footer_key": "tenant-{tenant}",
            "column_keys": {} if is_footer else {"tenant-{tenant}": ["email"]},
            "unlisted_columns": "footer_key",
            "key_values": {"tenant": {"from": "argument", "pattern": "[A-Za-z0-9-]{1,64}"}},
        }
        document = {
            "version": 1,
            "kms": kms,
            "master_keys": {"tenant-{tenant}": identifier},
            "tables": {"events": table},
        }
        self.folder = folder
        self.config = folder / "c.yaml"
        self.config.write_text(yaml.safe_dump(document))

    def create(self, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(app, ["tenants", "create", *arguments, "--config", str(self.config)])
        assert result.exit_code == status, result.output
        return result

    def check_writes(self, tenant: str) -> None:
        with Keytools.from_yaml(self.config) as keytools:
            path = self.folder / f"{tenant}.parquet"
            keytools.write_table(DATA, path, key_values={"tenant": tenant})
            assert keytools.read_table(path).equals(DATA)

    def template(self, **content: Any) -> str:
        (self.folder / "template.json").write_text(json.dumps(content))
        return str(self.folder / "template.json")


def test_in_a_keystore(tmp_path: Path) -> None:
    (tmp_path / "passphrase").write_text("a passphrase that is long enough")
    (tmp_path / "passphrase").chmod(0o600)
    kms = {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"}
    place = Place(tmp_path, kms, "prod/{tenant}")
    runner = CliRunner()
    created = runner.invoke(
        app,
        [
            "keystore",
            "create",
            "--path",
            f"{tmp_path}/keystore.json",
            "--passphrase-file",
            f"{tmp_path}/passphrase",
        ],
    )
    assert created.exit_code == 0, created.output
    first = place.create("acme", "bolt").stdout
    assert first == "acme: created: prod/acme\nbolt: created: prod/bolt\n"
    second = json.loads(place.create("acme", "new", "--json").stdout)
    assert second == [
        {"value": "acme", "master_key_id": "prod/acme", "created": False},
        {"value": "new", "master_key_id": "prod/new", "created": True},
    ]
    for tenant in ("acme", "new"):
        place.check_writes(tenant)
    # No key is created if one value is refused, and no key has tags.
    assert "refuses" in place.create("later", "no good", status=2).stderr
    assert "tags" in place.create("later", "--template", place.template(tags={"a": "b"}), status=2).stderr
    assert "exists" not in place.create("later").stdout


def test_in_one_of_several_kmss(tmp_path: Path) -> None:
    (tmp_path / "passphrase").write_text("a passphrase that is long enough")
    (tmp_path / "passphrase").chmod(0o600)
    keystore = {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"}
    memory = {"type": "in_memory", "keys": {"other": "A" * 22 + "=="}}
    place = Place(tmp_path, {"eu": keystore, "us": memory}, "eu::prod/{tenant}")
    runner, source = CliRunner(), ["--passphrase-file", str(tmp_path / "passphrase")]
    assert (
        runner.invoke(app, ["keystore", "create", "--path", f"{tmp_path}/keystore.json", *source]).exit_code == 0
    )
    assert place.create("acme").stdout == "acme: created: eu::prod/acme\n"
    assert place.create("acme").stdout == "acme: exists: eu::prod/acme\n"
    place.check_writes("acme")
    other = Place(tmp_path, {"eu": keystore, "us": memory}, "us::prod/{tenant}")
    assert "cannot create master keys" in other.create("acme", status=2).stderr


def test_in_openbao(openbao: OpenBao, tmp_path: Path) -> None:
    prefix = openbao.new_name("tenants")
    kms = {"type": "vault", "url": openbao.url, "token": openbao.root_token, "allow_http": True}
    place = Place(tmp_path, kms, f"{prefix}-{{tenant}}")
    with Keytools.from_yaml(place.config) as keytools, pytest.raises(KmsError):
        keytools.write_table(DATA, tmp_path / "x.parquet", key_values={"tenant": "acme"})
    assert not openbao.has_key(f"{prefix}-acme")
    assert "acme: created" in place.create("acme").stdout
    assert "acme: exists" in place.create("acme").stdout
    found = openbao.ask("GET", f"transit/keys/{prefix}-acme").content["data"]
    assert (found["type"], found["latest_version"], found["exportable"]) == ("aes256-gcm96", 1, False)
    place.check_writes("acme")
    # A token that may use keys, but not create them.
    policy = openbao.write_policy({"transit/keys/*": ["read"], "transit/encrypt/*": ["update"]})
    weak = Place(tmp_path, {**kms, "token": openbao.create_token(policy)}, f"{prefix}-{{tenant}}")
    weak.create("other", status=3)
    assert not openbao.has_key(f"{prefix}-other")


@pytest.fixture
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


def moto_client(url: str) -> Any:
    make: Any = boto3.client
    return make("kms", region_name=REGION, endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b")


def keys_of(url: str) -> set[str]:
    return {key["KeyId"] for key in moto_client(url).list_keys(Limit=1000)["Keys"]}


def aws(url: str) -> dict[str, Any]:
    return {
        "type": "aws",
        "region": REGION,
        "endpoint_url": url,
        "access_key_id": "a",
        "secret_access_key": "b",
    }


@pytest.mark.parametrize("start", ["alias/", f"arn:aws:kms:{REGION}:123456789012:alias/"])
def test_in_aws(moto: str, tmp_path: Path, start: str) -> None:
    # Servers in one process share their keys.
    client, before = moto_client(moto), keys_of(moto)
    name = f"tenant-{uuid.uuid4()}"
    place = Place(tmp_path, aws(moto), f"{start}{name}-{{tenant}}")
    policy = {"Version": "2012-10-17", "Id": "key of {tenant}", "Statement": []}
    template = place.template(tags={"tenant": "{tenant}", "cost": "x"}, policy=policy)
    assert "acme: created" in place.create("acme", "--template", template).stdout
    assert "acme: exists" in place.create("acme", "--template", template).stdout
    (key,) = keys_of(moto) - before
    assert client.describe_key(KeyId=f"alias/{name}-acme")["KeyMetadata"]["KeyId"] == key
    tags = {tag["TagKey"]: tag["TagValue"] for tag in client.list_resource_tags(KeyId=key)["Tags"]}
    assert tags == {"tenant": "acme", "cost": "x"}
    assert json.loads(client.get_key_policy(KeyId=key, PolicyName="default")["Policy"])["Id"] == "key of acme"
    place.check_writes("acme")


@pytest.mark.parametrize(
    ("identifier", "message"),
    [
        (f"arn:aws:kms:{REGION}:999999999999:alias/{{tenant}}", "account"),
        (f"arn:aws:kms:{REGION}:123456789012:key/{{tenant}}", "alias"),
        ("{tenant}", "alias"),
    ],
)
def test_what_aws_cannot_create(moto: str, tmp_path: Path, identifier: str, message: str) -> None:
    client, before = moto_client(moto), keys_of(moto)
    place = Place(tmp_path, aws(moto), identifier)
    assert message in place.create("nobody", status=2).stderr
    states = [client.describe_key(KeyId=key)["KeyMetadata"]["KeyState"] for key in keys_of(moto) - before]
    assert states == (["PendingDeletion"] if message == "account" else [])
    assert not [alias for alias in client.list_aliases()["Aliases"] if "nobody" in alias["AliasName"]]


def test_in_cloud_kms(tmp_path: Path) -> None:
    with fake_gcp_kms() as server:
        _, project, _, location, _, key_ring = KEY_RING.split("/")
        kms = {
            "type": "gcp",
            "project": project,
            "location": location,
            "key_ring": key_ring,
            "endpoint": server.endpoint,
            "insecure": True,
        }
        place = Place(tmp_path, kms, "tenant-{tenant}")
        template = place.template(tags={"tenant": "{tenant}"})
        assert "acme: created" in place.create("acme", "--template", template).stdout
        assert "acme: exists" in place.create("acme").stdout
        assert server.key("tenant-acme").labels == {"tenant": "acme"}
        assert server.calls["CreateCryptoKey"] == 1
        place.check_writes("acme")


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVault]:
    with fake_vault(tmp_path / "vault") as vault:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(vault.ca_file))
        yield vault


@pytest.mark.parametrize("algorithm", ["auto", "RSA-OAEP-256", "A256KW", "A256GCM"])
def test_in_azure(vault: FakeVault, algorithm: str) -> None:
    settings = AzureSettings.model_validate({"type": "azure", "vault_url": vault.url, "algorithm": algorithm})
    with AzureKms(settings, credential=vault.credential()) as kms:
        assert kms.create_master_key("tenant-acme", {"tenant": "acme"})
        assert not kms.create_master_key("tenant-acme")
        key = vault.keys["tenant-acme"]
        assert (len(key.versions), key.tags) == (1, {"tenant": "acme"})
        assert key.kty == ("oct-HSM" if algorithm.startswith("A256") else "RSA")
        assert unwrap_one(kms, wrap_one(kms, KEY, "tenant-acme"), "tenant-acme") == KEY
        # An older key would come back.
        vault.delete("tenant-acme")
        with pytest.raises(KmsError, match="soft-deleted"):
            kms.create_master_key("tenant-acme")
        assert not vault.keys


@needs_softhsm
def test_in_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, {"type": "pkcs11", **SoftHsm(tmp_path, monkeypatch).settings()}, "tenant-{tenant}")
    assert "acme: created" in place.create("acme").stdout
    assert "acme: exists" in place.create("acme").stdout
    place.check_writes("acme")


def test_kmss_without_the_hook(tmp_path: Path) -> None:
    place = Place(tmp_path, {"type": "in_memory", "keys": {"other": "A" * 22 + "=="}}, "prod/{tenant}")
    assert "cannot create master keys" in place.create("acme", status=2).stderr

    class Plugin(SingleKeyKmsClient):
        backend = "plugin"

        def _describe(self, master_key_id: str) -> MasterKeyDescription:
            from parquet_keytools.errors import MasterKeyNotFoundError

            raise MasterKeyNotFoundError

        @classmethod
        def from_settings(cls, settings: Any, folder: Path) -> "Plugin":
            return cls()

        def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
            return ""

        def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
            return KEY

    with pytest.raises(KmsConfigurationError, match="cannot create master keys") as caught:
        Plugin().create_master_key("acme")
    assert "plugin" in str(caught.value)


def test_a_table_without_placeholders(tmp_path: Path) -> None:
    place = Place(tmp_path, {"type": "in_memory", "keys": {"other": "A" * 22 + "=="}}, "prod/{tenant}")
    document = yaml.safe_load(place.config.read_text())
    document["tables"]["events"] = {"footer_key": "other", "unlisted_columns": "footer_key"}
    place.config.write_text(yaml.safe_dump(document))
    assert "key_values" in place.create("acme", status=2).stderr
