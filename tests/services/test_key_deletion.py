"""The end of a master key in each KMS: deletion, its state, its cancellation, and the recorded caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import boto3
import pytest
from azure_fake import fake_vault
from botocore.stub import Stubber
from gcp_fake import KEY_RING, State, fake_gcp_kms
from moto_server import moto_server
from openbao import OpenBao
from softhsm import SoftHsm, needs_softhsm

from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
)
from parquet_keytools.kms.aws import AwsKms, AwsSettings
from parquet_keytools.kms.azure import AzureKms, AzureSettings
from parquet_keytools.kms.client import KmsClient, SingleKeyKmsClient, UnwrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.gcp import GcpKms, GcpSettings
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.kms.named import NamedKmss
from parquet_keytools.kms.pkcs11 import Pkcs11Kms, Pkcs11Settings
from parquet_keytools.kms.vault import VaultKms, VaultSettings
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes(bytes(range(32)))
REGION = "eu-central-1"
DELAYED = ("aws", "gcp", "azure")
"""KMSs that delete later, so that a deletion can be cancelled."""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


def aws_client(url: str, service: str = "kms") -> Any:
    make: Any = boto3.client
    return make(service, endpoint_url=url, region_name=REGION, aws_access_key_id="a", aws_secret_access_key="b")


def aws_kms(url: str) -> AwsKms:
    return AwsKms(AwsSettings(endpoint_url=url, region=REGION, access_key_id="a", secret_access_key="b"))  # type: ignore[arg-type]


class Place:
    """A KMS with two master keys."""

    def __init__(self, kind: str, kms: KmsClient, keys: tuple[str, str], caller: str) -> None:
        self.kind = kind
        self.kms = kms
        self.doomed, self.other = keys
        self.caller = caller


@pytest.fixture(
    params=[
        "in_memory",
        "keystore",
        "vault",
        "aws",
        "aws_alias",
        "gcp",
        "azure",
        pytest.param("pkcs11", marks=needs_softhsm),
        "named",
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    kind = request.param
    if kind in ("in_memory", "named"):
        kms: KmsClient = InMemoryKms({"doomed": None, "other": None})
        if kind == "named":
            kms = NamedKmss({"eu": InMemoryKms({"footer": None}), "us": kms})
            yield Place(kind, kms, ("us::doomed", "us::other"), "@")
        else:
            yield Place(kind, kms, ("doomed", "other"), "@")
    elif kind == "keystore":
        path, passphrase = tmp_path / "keystore.json", lambda: SecretBytes(b"long enough")
        keystore = Keystore.create(path, passphrase, scrypt_n=2**14)
        for name in ("doomed", "other"):
            keystore.create_key(name)
        yield Place(kind, KeystoreKms(path, passphrase), ("doomed", "other"), "@")
    elif kind == "vault":
        server = cast(OpenBao, request.getfixturevalue("openbao"))
        keys = server.create_key(), server.create_key()
        settings = VaultSettings.model_validate({"url": server.url, "token": server.root_token})
        with VaultKms(settings) as vault:
            yield Place(kind, vault, keys, "root")
    elif kind in ("aws", "aws_alias"):
        url = request.getfixturevalue("moto")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        client = aws_client(url)
        arns = [client.create_key()["KeyMetadata"]["Arn"] for _ in range(2)]
        doomed = arns[0]
        if kind == "aws_alias":
            client.create_alias(AliasName=f"alias/{tmp_path.name}", TargetKeyId=arns[0])
            doomed = f"alias/{tmp_path.name}"
        with aws_kms(url) as aws:
            yield Place("aws", aws, (doomed, arns[1]), "arn:aws:sts::")
    elif kind == "gcp":
        with fake_gcp_kms("doomed", "other") as google:
            google.key("doomed").add_version()
            project = {"project": "test-project", "location": "europe-west1", "key_ring": "test-ring"}
            given = {"endpoint": google.endpoint, "insecure": True, **project}
            with GcpKms(GcpSettings.model_validate(given)) as gcp:
                yield Place(kind, gcp, ("doomed", f"{KEY_RING}/cryptoKeys/other"), "")
    elif kind == "azure":
        with fake_vault(tmp_path / "vault", "doomed", "other") as fake:
            for name, value in fake.environment().items():
                monkeypatch.setenv(name, value)
            with AzureKms(AzureSettings(vault_url=fake.url), credential=fake.credential()) as azure:
                yield Place(kind, azure, ("doomed", "other"), "")
    else:
        hsm = SoftHsm(tmp_path, monkeypatch)
        with Pkcs11Kms(Pkcs11Settings.model_validate(hsm.settings())) as token:
            for name in ("doomed", "other"):
                token.create_key(name)
            token.rotate_key("doomed")
            yield Place(kind, token, ("doomed", "other"), "@")


def test_a_deleted_key_unwraps_nothing_and_all_others_do(place: Place) -> None:
    kms = place.kms
    wrapped, other = wrap_one(kms, KEY, place.doomed), wrap_one(kms, KEY, place.other)
    before = kms.key_deletion_state(place.doomed)
    assert before.state == "usable" and not before.is_gone
    assert place.caller in kms.caller_identity(place.doomed).name

    found = kms.schedule_key_deletion(before.key)
    assert found.state == ("scheduled" if place.kind in DELAYED else "deleted"), found
    assert (found.deletes_at is not None) == (place.kind in DELAYED)
    (answer,) = kms.unwrap_many([UnwrapRequest(wrapped, place.doomed)])
    assert isinstance(answer, MasterKeyDisabledError | MasterKeyNotFoundError), answer
    assert unwrap_one(kms, other, place.other) == KEY
    # A repeated call, for example after a killed run, changes nothing.
    again = kms.schedule_key_deletion(before.key)
    assert (again.state, again.deletes_at) == (found.state, found.deletes_at)
    assert kms.key_deletion_state(place.other).state == "usable"

    if place.kind in DELAYED:
        back = kms.cancel_key_deletion(place.doomed)
        assert back.state == ("usable" if place.kind == "azure" else "disabled")
    with pytest.raises(KmsConfigurationError, match="no deletion to cancel"):
        kms.cancel_key_deletion(place.doomed)


def test_the_waiting_period_of_aws(moto: str) -> None:
    client = aws_client(moto)
    arn = client.create_key()["KeyMetadata"]["Arn"]
    with aws_kms(moto) as kms:
        with pytest.raises(KmsConfigurationError, match="7 to 30 days"):
            kms.schedule_key_deletion(arn, waiting_days=3)
        assert client.describe_key(KeyId=arn)["KeyMetadata"]["KeyState"] == "Enabled"
        short = kms.schedule_key_deletion(arn, waiting_days=7).deletes_at
        default = kms.schedule_key_deletion(client.create_key()["KeyMetadata"]["Arn"]).deletes_at
        assert short is not None and default is not None and 22 <= (default - short).days <= 23
    with InMemoryKms({"k": None}) as memory:
        with pytest.raises(KmsConfigurationError, match="cannot be chosen"):
            memory.schedule_key_deletion("k", waiting_days=7)
        assert memory.key_deletion_state("k").state == "usable"


@pytest.mark.parametrize(
    "regions", [{"MultiRegionKeyType": "REPLICA"}, {"ReplicaKeys": [{"Region": "us-east-1"}]}]
)
def test_a_key_with_replicas_is_not_deleted(regions: dict[str, Any]) -> None:
    arn = f"arn:aws:kms:{REGION}:123456789012:key/mrk-1234abcd12ab34cd56ef1234567890ab"
    metadata = {"Arn": arn, "KeyId": arn.rpartition("/")[2], "KeyState": "Enabled"}
    client = aws_client("http://127.0.0.1:9")
    with Stubber(client) as stub:
        stub.add_response("describe_key", {"KeyMetadata": metadata | {"MultiRegionConfiguration": regions}})
        with AwsKms(client=client) as kms, pytest.raises(KmsConfigurationError, match="replicas"):
            kms.schedule_key_deletion(arn)
        stub.assert_no_pending_responses()


def test_a_deletion_in_cloud_kms_that_ended_halfway_continues() -> None:
    with fake_gcp_kms("doomed") as google:
        key = google.key("doomed")
        key.add_version()
        key.versions[0].state = State.DESTROY_SCHEDULED
        project = {"project": "test-project", "location": "europe-west1", "key_ring": "test-ring"}
        given = {"endpoint": google.endpoint, "insecure": True, **project}
        with GcpKms(GcpSettings.model_validate(given)) as kms:
            assert kms.key_deletion_state("doomed").state == "usable"
            assert kms.schedule_key_deletion("doomed").state == "scheduled"
        assert google.calls["DestroyCryptoKeyVersion"] == 1


def test_a_client_without_the_hooks_says_so() -> None:
    class Plugin(SingleKeyKmsClient):
        backend = "plugin"
        from_settings = _wrap = _unwrap = _describe = cast(Any, None)

    kms = cast(Callable[[], KmsClient], Plugin)()
    for call in (kms.schedule_key_deletion, kms.key_deletion_state, kms.cancel_key_deletion):
        with pytest.raises(KmsConfigurationError, match="does not delete master keys") as caught:
            call("k")
        assert "KMS's own tools" in str(caught.value)


def test_an_unreachable_kms_is_no_deleted_key() -> None:
    settings = VaultSettings.model_validate({"url": "http://127.0.0.1:9", "token": "t", "timeout_seconds": 0.2})
    with VaultKms(settings) as kms, pytest.raises(KmsUnavailableError):
        kms.key_deletion_state("doomed")


def test_a_policy_without_the_right_to_delete(openbao: OpenBao) -> None:
    name = openbao.create_key()
    rules = {f"transit/keys/{name}": ["read"], f"transit/keys/{name}/config": ["update"]}
    token = openbao.create_token(openbao.write_policy(rules))
    settings = VaultSettings.model_validate({"url": openbao.url, "token": token})
    with VaultKms(settings) as kms, pytest.raises(KmsError) as caught:
        kms.schedule_key_deletion(name)
    assert caught.value.operation == "delete" and openbao.has_key(name)


def test_the_audit_log_has_deletions(caplog: pytest.LogCaptureFixture) -> None:
    kms = InMemoryKms({"doomed": None})
    kms.audit_log = True
    with caplog.at_level(logging.INFO, "parquet_keytools.audit"):
        kms.schedule_key_deletion("doomed")
        kms.key_deletion_state("doomed")
    (record,) = caplog.records
    assert "operation='delete'" in record.getMessage() and "'doomed'" in record.getMessage()
