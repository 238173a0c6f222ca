"""Each Azure login against fakes of the token issuers, as azure-identity calls them; see azure_fake.py."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from azure_fake import ENTRA, FakeVault, fake_vault, rsa_key
from cryptography.hazmat.primitives import serialization

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.azure import AzureKms, AzureSettings
from parquet_keytools.kms.contract_tests import CANARY, unwrap_one, wrap_one

APPLICATION = {"tenant_id": "a-tenant", "client_id": "an-application"}
ENDPOINT = "/a-tenant/oauth2/v2.0/token"
SECRET = "hunter2-of-the-application"
POD_TOKEN = "hunter2-of-the-pod"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVault]:
    with fake_vault(tmp_path / "vault", "one") as vault:
        for name, value in vault.environment_of_entra().items():
            monkeypatch.setenv(name, value)
        yield vault


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture, vault: FakeVault) -> Iterator[list[str]]:
    """Texts that must not contain a secret; the full log is among them."""
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    yield texts
    texts += [f"{record.getMessage()} {vars(record)}" for record in caplog.get_records("call")]
    key = rsa_key(1).private_numbers().d
    secrets = [SECRET, POD_TOKEN, "hunter2", "secret-token", "PRIVATE KEY", str(key), f"{key:x}"]
    secrets += [form["client_assertion"] for _, form in vault.logins if "client_assertion" in form]
    assert not [(secret, text) for secret in secrets for text in texts if secret in text]


def client_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return APPLICATION | {"client_secret": SECRET}


def default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As set in the environment; the other sources of Azure's default chain have nothing."""
    names = {"TENANT_ID": "a-tenant", "CLIENT_ID": "an-application", "CLIENT_SECRET": SECRET}
    for name, value in names.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    return {}


def certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    secret = rsa_key(1).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "application.pem").write_bytes(secret + (folder / "vault" / "vault.crt").read_bytes())
    return APPLICATION | {"certificate_file": "application.pem"}


def workload_identity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As Kubernetes gives it to a pod."""
    (folder / "token").write_text(POD_TOKEN)
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(folder / "token"))
    return APPLICATION


def has_secret(form: dict[str, str]) -> bool:
    return form.get("client_secret") == SECRET


def has_signature(form: dict[str, str]) -> bool:
    claims = jwt.decode(
        form["client_assertion"],
        rsa_key(1).public_key(),
        algorithms=["PS256", "RS256"],
        audience=f"https://{ENTRA}{ENDPOINT}",
    )
    return claims["iss"] == claims["sub"] == "an-application" and form["client_assertion_type"] == ASSERTION


def has_token_of_pod(form: dict[str, str]) -> bool:
    return form.get("client_assertion") == POD_TOKEN and form["client_assertion_type"] == ASSERTION


@pytest.mark.parametrize(
    ("login", "accepts"),
    [
        (default, has_secret),
        (client_secret, has_secret),
        (certificate, has_signature),
        (workload_identity, has_token_of_pod),
    ],
)
def test_an_application_logs_in(
    vault: FakeVault,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    login: Callable[..., dict[str, Any]],
    accepts: Callable[[dict[str, str]], bool],
) -> None:
    settings = AzureSettings.model_validate(
        {"vault_url": vault.url, "login": login.__name__} | login(tmp_path, monkeypatch)
    )
    vault.accepts = accepts
    with AzureKms(settings, tmp_path) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one") == CANARY
        shown += [repr(kms), repr(vars(kms)), repr(settings), str(settings), str(settings.model_dump())]
    # One login, at the tenant's endpoint, for the domain of the vault and nothing else.
    ((path, form),) = vault.logins
    assert path == ENDPOINT
    assert (form["client_id"], form["grant_type"]) == ("an-application", "client_credentials")
    assert form["scope"] == f"{vault.resource}/.default"
    assert vault.without_token == [b""]

    # Entra ID refuses, and quotes the request.
    vault.accepts = lambda form: False
    with AzureKms(settings, tmp_path) as kms, pytest.raises(KmsConfigurationError) as caught:
        wrap_one(kms, CANARY, "one")
    error = caught.value
    assert "the client secret is wrong, AADSTS7000215" in str(error) and "expired" in error.hint
    shown += [str(error), repr(error), repr(vars(error)), str(pickle.dumps(error))]
    shown += traceback.format_exception(error)
    assert vault.without_token == [b"", b""]


def test_a_virtual_machine_has_an_identity(vault: FakeVault, shown: list[str]) -> None:
    settings = AzureSettings.model_validate({"vault_url": vault.url, "login": "managed_identity"})
    with AzureKms(settings) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one") == CANARY
    assert vault.scopes == [(vault.resource, {})] and not vault.logins
