"""The KMS client of Azure Key Vault and Managed HSM, over a fake of the service: see azure_fake.py."""

import base64
import json
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.identity import CredentialUnavailableError
from azure.keyvault.keys.crypto import CryptographyClient, KeyWrapAlgorithm
from azure_fake import OAEP, WRAP_OPERATIONS, FakeVault, RefusalError, fake_vault, rsa_key
from pydantic import ValidationError
from soak import SecondForm
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools, strict_base64
from parquet_keytools.cli import app
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.azure import AzureKms, AzureSettings
from parquet_keytools.kms.client import KmsClient, WrapRequest
from parquet_keytools.kms.contract_tests import CANARY, KmsClientContract, unwrap_one, wrap_one
from parquet_keytools.secret_bytes import SecretBytes

QUICK = {"max_tries": 3, "call_timeout_seconds": 2, "timeout_seconds": 6}


def settings(vault: FakeVault, **more: Any) -> AzureSettings:
    return AzureSettings.model_validate({"vault_url": vault.url} | QUICK | more)


def client(vault: FakeVault, **more: Any) -> AzureKms:
    return AzureKms(settings(vault, **more), credential=vault.credential())


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVault]:
    with fake_vault(tmp_path / "vault", "one", "two") as vault:
        vault.add_key("hsm", "oct-HSM")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(vault.ca_file))
        yield vault


@pytest.fixture
def environment(vault: FakeVault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A managed identity, as App Service offers it."""
    for name, value in vault.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def kms(vault: FakeVault) -> Iterator[AzureKms]:
    with client(vault) as kms:
        yield kms


@pytest.fixture(autouse=True)
def records() -> Iterator[list[logging.LogRecord]]:
    """The full log, at DEBUG, with Azure's libraries; no test may leave a key or token in it."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = found.append  # type: ignore[assignment, method-assign]
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield found
    root.removeHandler(handler)
    root.setLevel(before)
    assert not shows_secrets(*(str(vars(record)) for record in found))


def shows_secrets(*texts: str) -> bool:
    key = CANARY.reveal()
    spellings = (
        *(key.hex(), repr(key)[2:-1], base64.b64encode(key).decode()[:20]),
        *(base64.urlsafe_b64encode(key).decode()[:20], "secret-token", "secret-header", "hunter2"),
    )
    return any(spelling in text for spelling in spellings for text in texts)


def failure(call: Callable[[], object]) -> KmsError:
    """Return the error of a call, after a search for keys and tokens in all that it shows."""
    with pytest.raises(KmsError) as caught:
        call()
    error = caught.value
    printed = "".join(traceback.TracebackException.from_exception(error).format())
    assert not shows_secrets(str(error), repr(error), repr(vars(error)), printed, str(pickle.dumps(error)))
    assert error.__cause__ is None and error.__context__ is None
    return error


# --- contract ---


class _Contract(KmsClientContract):
    kty = "RSA"
    operations: tuple[str, ...] = (*WRAP_OPERATIONS, "encrypt", "decrypt")

    @pytest.fixture
    def kms(self, vault: FakeVault) -> Iterator[KmsClient]:
        self.vault = vault
        for name in ("first", "second"):
            vault.add_key(name, self.kty, self.operations)
        with client(vault) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return "first"

    @pytest.fixture
    def other_master_key_id(self, vault: FakeVault) -> str:
        return f"{vault.url}/keys/second"

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return "no-such-key"

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        for version in self.vault.keys[master_key_id].versions:
            version.enabled = False

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.vault.deny(master_key_id)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.vault.keys[master_key_id].add_version()


class TestContractOfRsa(SecondForm, _Contract):
    pass


class TestContractOfAesKeyWrap(SecondForm, _Contract):
    kty = "oct-HSM"
    operations = WRAP_OPERATIONS


class TestContractOfAesGcm(_Contract):
    kty = "oct-HSM"


# --- settings and names ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"vault_url": "http://127.0.0.1:8200"},
        {"vault_url": "http://my-vault.vault.azure.net"},
        {"vault_url": "https://localhost"},
        {"vault_url": "https://user:hunter2@my-vault.vault.azure.net"},
        {"vault_url": "https://my-vault.vault.azure.net/keys/one"},
        {"vault_url": "my-vault"},
        {"algorithm": "RSA1_5"},
        {"algorithm": "RSA-OAEP"},
        {"client_secret": "hunter2"},
        {"login": "client_secret", "client_secret": "hunter2"},
        {"login": "certificate", "tenant_id": "t", "client_id": "c"},
        {"login": "managed_identity", "tenant_id": "t"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        AzureSettings.model_validate({"vault_url": "https://my-vault.vault.azure.net"} | wrong)
    assert "hunter2" not in str(caught.value)


def test_a_secret_stays_in_the_settings() -> None:
    known = {"tenant_id": "t", "client_id": "c", "client_secret": "hunter2"}
    found = AzureSettings.model_validate(
        {"vault_url": "https://a.vault.azure.net", "login": "client_secret"} | known
    )
    assert "hunter2" not in f"{found!r} {found} {found.model_dump()}"
    with pytest.raises(TypeError, match="do not pickle"):
        pickle.dumps(found)


def test_a_key_of_another_vault_is_refused(vault: FakeVault, kms: AzureKms) -> None:
    other = "https://other.vault.azure.net/keys/one"
    assert "another vault" in str(failure(lambda: wrap_one(kms, CANARY, other)))
    wrapped_key = wrap_one(kms, CANARY, "one")
    assert "another vault" in str(failure(lambda: unwrap_one(kms, wrapped_key, other)))
    kms.trust(["one"])
    with pytest.raises(MasterKeyNotTrustedError):
        unwrap_one(kms, wrapped_key, other)
    version = f"{vault.url}/keys/one/{vault.keys['one'].versions[0].id}"
    assert "Name the key: one." in failure(lambda: wrap_one(kms, CANARY, version)).hint
    assert kms.identity("ONE") == kms.identity(f"{vault.url}/keys/one") == f"{vault.url}/keys/one"


# --- algorithms and versions ---


@pytest.mark.parametrize(
    ("kty", "operations", "algorithm", "length"),
    [
        ("RSA", WRAP_OPERATIONS, "RSA-OAEP-256", 256),
        ("RSA-HSM", (*WRAP_OPERATIONS, "encrypt", "decrypt"), "RSA-OAEP-256", 256),
        ("oct-HSM", WRAP_OPERATIONS, "A256KW", 8),
        ("oct-HSM", (*WRAP_OPERATIONS, "encrypt", "decrypt"), "A256GCM", 28),
    ],
)
def test_auto_follows_the_key(
    vault: FakeVault, kms: AzureKms, kty: str, operations: tuple[str, ...], algorithm: str, length: int
) -> None:
    key = vault.add_key("Some-Key", kty, operations)
    wrapped_key = wrap_one(kms, CANARY, "Some-Key")
    name, found, version, data = wrapped_key.split(":")
    assert (name, found, version) == ("azure", algorithm, key.versions[0].id)
    assert len(strict_base64.decode(data)) == length + (len(CANARY) if kty == "oct-HSM" else 0)
    # Any spelling of the name unwraps, in this vault and in one where a backup of it was restored.
    assert unwrap_one(kms, wrapped_key, f"{vault.url}/keys/some-key") == CANARY
    assert vault.calls["wrapkey"] + vault.calls["encrypt"] == 1
    assert kms.describe("Some-Key").origin == kty


def test_another_type_of_key_is_refused(vault: FakeVault, kms: AzureKms) -> None:
    vault.add_key("curve", "EC")
    error = failure(lambda: wrap_one(kms, CANARY, "curve"))
    assert isinstance(error, KmsConfigurationError) and "'EC'" in str(error)


@pytest.mark.parametrize(("algorithm", "name"), [("A256GCM", "one"), ("RSA-OAEP-256", "hsm")])
def test_an_algorithm_that_the_key_does_not_have_is_refused(vault: FakeVault, algorithm: str, name: str) -> None:
    with client(vault, algorithm=algorithm) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, name))
    assert isinstance(error, KmsConfigurationError) and "algorithm" in error.hint


def test_a_configured_algorithm_excludes_others(vault: FakeVault, kms: AzureKms) -> None:
    """A caller of wrapKey, or an owner of the public key, must not pass off keys as wrapped by AES-GCM."""
    with client(vault, algorithm="A256KW") as other:
        wrapped_key = wrap_one(other, CANARY, "hsm")
    assert unwrap_one(kms, wrapped_key, "hsm") == CANARY
    before = vault.calls.total()
    with client(vault, algorithm="A256GCM") as strict:
        error = failure(lambda: unwrap_one(strict, wrapped_key, "hsm"))
        assert isinstance(error, WrappedKeyInvalidError) and "A256KW" in str(error)
        assert vault.calls.total() == before
        assert unwrap_one(strict, wrap_one(strict, CANARY, "hsm"), "hsm") == CANARY
    assert vault.calls["get"] == 0  # a configured algorithm needs no permission to read keys


def test_wrapping_is_always_a_call(vault: FakeVault, kms: AzureKms) -> None:
    """Also with an RSA key whose public key is known: otherwise the vault's log would have no record."""
    for _ in range(5):
        wrap_one(kms, CANARY, "one")
    assert (vault.calls["wrapkey"], vault.calls["get"]) == (5, 1)


def test_a_new_version_wraps_and_the_old_one_unwraps(vault: FakeVault, kms: AzureKms) -> None:
    for name in ("one", "hsm"):
        old = wrap_one(kms, CANARY, name)
        key = vault.keys[name]
        for _ in range(4):
            key.add_version()
        new = wrap_one(kms, CANARY, name)
        ids = [version.id for version in key.versions]
        assert (kms.wrapped_key_version(old, name), kms.wrapped_key_version(new, name)) == (ids[0], ids[-1])
        assert unwrap_one(kms, old, name) == unwrap_one(kms, new, name) == CANARY
        description = kms.describe(name)
        assert description.current_version == ids[-1]
        dates = kms.version_dates(name)
        assert list(dates) == ids[::-1] and all(date.tzinfo for date in dates.values())
        key.versions[0].enabled = False
        assert isinstance(failure(lambda: unwrap_one(kms, old, name)), MasterKeyDisabledError)  # noqa: B023
        assert unwrap_one(kms, new, name) == CANARY


def test_an_expired_version_unwraps_and_wraps_nothing(vault: FakeVault, kms: AzureKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    vault.keys["one"].versions[0].exp = int(time.time()) - 10
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, MasterKeyDisabledError) and "expired" in str(error)
    assert not kms.describe("one").enabled


def test_the_public_key_is_enough_to_forge_a_wrapped_key_and_aes_gcm_prevents_it(
    vault: FakeVault, kms: AzureKms
) -> None:
    """The limit of RSA that docs/security.md states."""
    version = vault.keys["one"].versions[0]
    forged = rsa_key(version.rsa).public_key().encrypt(CANARY.reveal(), OAEP)
    text = f"azure:RSA-OAEP-256:{version.id}:{strict_base64.encode(forged)}"
    assert unwrap_one(kms, text, "one") == CANARY
    text = text.replace(version.id, vault.keys["hsm"].versions[0].id)
    assert isinstance(failure(lambda: unwrap_one(kms, text, "hsm")), WrappedKeyInvalidError)
    with client(vault, algorithm="A256GCM") as strict:
        for name in ("one", "hsm"):
            assert isinstance(failure(lambda: unwrap_one(strict, text, name)), WrappedKeyInvalidError)  # noqa: B023


# --- the raw form ---


@pytest.mark.parametrize(
    ("name", "how"), [("one", KeyWrapAlgorithm.rsa_oaep_256), ("hsm", KeyWrapAlgorithm.aes_256)]
)
def test_the_raw_form_is_that_of_azures_own_client(
    vault: FakeVault, kms: AzureKms, name: str, how: KeyWrapAlgorithm
) -> None:
    """Iceberg's `AzureKeyManagementClient` calls wrapKey and unwrapKey of this client."""
    theirs = CryptographyClient(f"{vault.url}/keys/{name}", vault.credential(), api_version="7.4")
    vault.keys[name].operations = WRAP_OPERATIONS
    if name == "hsm":
        # If it may read the AES key, this client wraps with a random key instead, and discards that.
        vault.deny(name, "get")
    wrapped = theirs.wrap_key(how, CANARY.reveal()).encrypted_key
    vault.denied.clear()
    assert vault.calls["wrapkey"] == (name == "hsm")
    assert kms.unwrap_raw(wrapped, name) == CANARY
    assert theirs.unwrap_key(how, kms.wrap_raw(CANARY, name)).key == CANARY.reveal()
    # A raw key names no version, so older versions are tried.
    vault.keys[name].add_version()
    vault.keys[name].add_version()
    assert kms.unwrap_raw(wrapped, name) == CANARY
    vault.keys[name].versions[-1].enabled = False
    assert kms.unwrap_raw(wrapped, name) == CANARY
    vault.keys[name].versions[-1].enabled = True
    for damaged in (wrapped[:-1], wrapped + b"x", b"x", bytes(256)):
        assert isinstance(failure(lambda: kms.unwrap_raw(damaged, name)), WrappedKeyInvalidError)  # noqa: B023


def test_gcm_has_no_raw_form(vault: FakeVault) -> None:
    with client(vault, algorithm="A256GCM") as kms:
        assert "Iceberg" in str(failure(lambda: kms.wrap_raw(CANARY, "hsm")))


# --- the challenge ---


def test_the_token_is_for_the_domain_and_no_key_is_sent_before(vault: FakeVault, kms: AzureKms) -> None:
    wrap_one(kms, CANARY, "one")
    assert vault.scopes == [(f"{vault.resource}/.default", {"tenant_id": "a-tenant"})]
    assert vault.without_token == [b""]


@pytest.mark.parametrize(
    "challenge",
    [
        'Bearer authorization="https://login.example/t", resource="https://management.azure.com"',
        'Bearer authorization="https://login.example/t", resource="{http}"',
        'Bearer authorization="https://login.example/t", resource="https://evil{dot}"',
        'Bearer authorization="https://login.example/t", resource="https://1:1"',
        'Bearer authorization="https://login.example/t", resource="{vault}/other"',
        'Bearer authorization="https://login.example/t", scope="https://graph.microsoft.com/.default"',
        'Bearer resource="https://graph.microsoft.com", scope="{vault}/.default"',
        'Bearer authorization="https://login.example/t"',
        'Basic realm="vault", resource="{vault}"',
        "Bearer",
        "",
    ],
)
def test_no_token_is_requested_for_another_resource(vault: FakeVault, challenge: str) -> None:
    places = {"{http}": f"http://{vault.domain}", "{dot}": f".{vault.domain}", "{vault}": vault.resource}
    for name, value in places.items():
        challenge = challenge.replace(name, value)
    vault.challenge = challenge
    with client(vault) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsConfigurationError) and "vault_url" in error.hint
    assert vault.scopes == [] and not any(vault.without_token)


def test_redirects_are_not_followed(vault: FakeVault, tmp_path: Path) -> None:
    with fake_vault(tmp_path / "other", "one") as other:
        with client(vault) as kms:
            vault.fail((307, {"Location": f"{other.url}/keys/one/wrapkey?api-version=7.4"}, b""))
            error = failure(lambda: wrap_one(kms, CANARY, "one"))
        assert isinstance(error, KmsConfigurationError) and "redirects" in str(error)
        assert not other.calls


def test_the_next_page_is_in_the_same_vault(vault: FakeVault, kms: AzureKms, tmp_path: Path) -> None:
    with fake_vault(tmp_path / "other", "one") as other:
        link = f"{other.url}/keys/one/versions?api-version=7.4"
        vault.spoil = lambda verb, answer: answer | ({"nextLink": link} if verb == "versions" else {})
        error = failure(lambda: kms.version_dates("one"))
        assert isinstance(error, KmsResponseInvalidError) and "another address" in str(error)
        assert not other.calls


def test_another_server_is_not_trusted(vault: FakeVault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with client(vault) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsConfigurationError) and "REQUESTS_CA_BUNDLE" in error.hint
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    with client(vault) as kms:
        assert isinstance(failure(lambda: wrap_one(kms, CANARY, "one")), KmsConfigurationError)
    assert not vault.calls


def test_a_password_for_the_host_does_not_replace_the_token(
    vault: FakeVault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with client(vault) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one") == CANARY


# --- tokens ---


def test_a_token_is_shared_and_renewed(vault: FakeVault) -> None:
    credential = vault.credential()
    with AzureKms(settings(vault), credential=credential) as kms:
        wrapped = kms.wrap_many([WrapRequest(SecretBytes.random(128), "one") for _ in range(64)])
        assert all(isinstance(key, str) for key in wrapped)
        assert len(vault.scopes) == 1
        # The vault no longer accepts the token: it was revoked, or a clock is wrong.
        vault.tokens.clear()
        credential.lifetime_seconds = 30.0
        wrap_one(kms, CANARY, "one")
        assert len(vault.scopes) == 2
        # This token expires too soon for another call.
        wrap_one(kms, CANARY, "one")
        assert len(vault.scopes) == 3


@pytest.mark.parametrize(
    ("failed", "kind", "shown"),
    [
        (ClientAuthenticationError("AADSTS7000222: hunter2 is expired"), KmsConfigurationError, "has expired"),
        (ClientAuthenticationError("AADSTS7000215: hunter2"), KmsConfigurationError, "client secret is wrong"),
        (ClientAuthenticationError("AADSTS65001: hunter2"), KmsConfigurationError, "AADSTS65001"),
        (CredentialUnavailableError("hunter2"), KmsConfigurationError, "az login"),
        (ValueError("hunter2"), KmsConfigurationError, "ValueError"),
        (ServiceRequestError("hunter2"), KmsUnavailableError, "no access token"),
    ],
)
def test_without_a_token(vault: FakeVault, failed: Exception, kind: type[KmsError], shown: str) -> None:
    credential = vault.credential()
    credential.failure = failed
    with AzureKms(settings(vault, timeout_seconds=2), credential=credential) as kms:
        outcomes = kms.wrap_many([WrapRequest(SecretBytes.random(128), "one") for _ in range(40)])
    assert {type(outcome) for outcome in outcomes} == {kind}
    error = outcomes[0]
    assert isinstance(error, KmsError) and shown in str(error) and "hunter2" not in repr(error)
    # Not one login for each key.
    assert len(vault.scopes) <= 3


def test_a_token_that_is_always_refused(vault: FakeVault) -> None:
    with client(vault) as kms:
        vault.fail(RefusalError(401, "Unauthorized", "AKV10032: Invalid issuer. hunter2"))
        outcomes = kms.wrap_many([WrapRequest(SecretBytes.random(128), "one") for _ in range(40)])
    error = outcomes[0]
    assert isinstance(error, KmsConfigurationError) and "AKV10032" in str(error) and "hunter2" not in str(error)
    assert len(vault.scopes) <= 3


# --- refusals ---


@pytest.mark.parametrize(
    ("refusal", "kind", "shown"),
    [
        (RefusalError(403, "Forbidden", "no", "ForbiddenByRbac"), KmsAccessDeniedError, "RBAC"),
        (RefusalError(403, "Forbidden", "no", "ForbiddenByPolicy"), KmsAccessDeniedError, "access policy"),
        (RefusalError(403, "Forbidden", "no"), KmsAccessDeniedError, "Managed HSM"),
        (RefusalError(403, "Forbidden", "no", "ForbiddenByFirewall"), KmsConfigurationError, "firewall"),
        (RefusalError(403, "Forbidden", "no", "ForbiddenByConnection"), KmsConfigurationError, "firewall"),
        (RefusalError(403, "Forbidden", "no", "KeyNotYetValid"), MasterKeyDisabledError, "not valid yet"),
        (RefusalError(403, "Forbidden", "no", "KeyOperationForbidden"), KmsConfigurationError, "key_ops"),
        (RefusalError(409, "Conflict", "no", "ObjectIsDeletedButRecoverable"), MasterKeyDisabledError, "recover"),
        (RefusalError(429, "Throttled", "slow down"), KmsThrottledError, "quota"),
        (RefusalError(500, "InternalError", "no"), KmsUnavailableError, "500"),
        ((503, {}, b"<html>"), KmsUnavailableError, "503"),
        ((404, {}, b"<html>"), KmsResponseInvalidError, "404"),
        ((200, {}, b"[]"), KmsResponseInvalidError, "JSON"),
        ((200, {}, b"[" * 100_000), KmsResponseInvalidError, "JSON"),
        ((418, {}, {"error": {"code": "Teapot"}}), KmsResponseInvalidError, "418"),
    ],
)
def test_each_refusal_has_its_own_error(vault: FakeVault, refusal: Any, kind: type[KmsError], shown: str) -> None:
    with client(vault, algorithm="RSA-OAEP-256", timeout_seconds=2) as kms:
        vault.fail(refusal)
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert type(error) is kind and shown in str(error)


def test_a_throttled_call_waits_as_asked(vault: FakeVault, kms: AzureKms) -> None:
    vault.fail(RefusalError(429, "Throttled", Retry_After="1"), times=1)
    started = time.monotonic()
    wrap_one(kms, CANARY, "one")
    assert time.monotonic() - started >= 1


def test_soft_deleted_keys_are_not_missing(vault: FakeVault, kms: AzureKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    vault.delete("one")
    for call in (
        lambda: wrap_one(kms, CANARY, "one"),
        lambda: unwrap_one(kms, wrapped_key, "one"),
        lambda: kms.describe("one"),
    ):
        error = failure(call)
        assert isinstance(error, MasterKeyDisabledError) and "az keyvault key recover" in error.hint
    del vault.deleted["one"]
    assert isinstance(failure(lambda: unwrap_one(kms, wrapped_key, "one")), MasterKeyNotFoundError)


@pytest.mark.parametrize(
    "spoil",
    [
        {"kid": "https://other.vault.azure.net/keys/two/0123456789abcdef0123456789abcdef"},
        {"kid": "https://other.vault.azure.net/keys/one"},
        {"kid": None},
        {"value": ""},
        {"value": 7},
        {"value": "!"},
    ],
)
def test_wrong_answers_are_refused(vault: FakeVault, kms: AzureKms, spoil: dict[str, Any]) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    vault.spoil = lambda verb, answer: answer | (spoil if verb != "get" else {})
    for call in (lambda: wrap_one(kms, CANARY, "one"), lambda: unwrap_one(kms, wrapped_key, "one")):
        assert isinstance(failure(call), KmsResponseInvalidError)


def test_a_key_in_place_of_its_ciphertext_is_refused(vault: FakeVault, kms: AzureKms) -> None:
    plain = base64.urlsafe_b64encode(bytes(40) + CANARY.reveal()).decode()
    vault.spoil = lambda verb, answer: answer | ({"value": plain} if verb == "wrapkey" else {})
    assert isinstance(failure(lambda: wrap_one(kms, CANARY, "one")), KmsResponseInvalidError)


# --- load ---


def test_many_calls_share_connections(vault: FakeVault) -> None:
    vault.latency_seconds = 0.05
    before = threading.active_count()
    with client(vault, max_concurrent_calls=8) as kms:
        wrapped = kms.wrap_many([WrapRequest(SecretBytes.random(128), "hsm") for _ in range(40)])
        assert all(isinstance(key, str) for key in wrapped)
        assert vault.most_under_way <= 8
    assert threading.active_count() - before < 50


def test_an_unreadable_key_is_asked_for_once(vault: FakeVault, kms: AzureKms) -> None:
    vault.deny("one", "get")
    outcomes = kms.wrap_many([WrapRequest(SecretBytes.random(128), "one") for _ in range(40)])
    assert {type(outcome) for outcome in outcomes} == {KmsAccessDeniedError}
    assert vault.calls["get"] == 1


def test_a_forked_child_has_a_connection_of_its_own(vault: FakeVault, environment: None) -> None:
    with AzureKms(settings(vault, login="managed_identity")) as kms:
        wrapped_key = wrap_one(kms, CANARY, "one")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if unwrap_one(kms, wrapped_key, "one") == CANARY else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert unwrap_one(kms, wrapped_key, "one") == CANARY
    assert len(vault.scopes) == 2


# --- from a configuration to an encrypted file ---


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert not shows_secrets(done.output)
    return done


def configuration(vault: FakeVault, folder: Path, **more: Any) -> Path:
    kms = {"type": "azure", "vault_url": vault.url, "login": "managed_identity"} | more
    table = {"footer_key": "footer", "column_keys": {"pii": ["x"]}, "unlisted_columns": "plaintext"}
    master_keys = {"footer": f"{vault.url}/keys/hsm", "pii": "one"}
    document = {"version": 1, "kms": kms, "master_keys": master_keys, "tables": {"t": table}}
    path = folder / "keytools.yaml"
    path.write_text(json.dumps(document))
    return path


def test_from_nothing_to_a_rotated_file(vault: FakeVault, environment: None, tmp_path: Path) -> None:
    config = configuration(vault, tmp_path)
    table = pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    plain, path = tmp_path / "plain.parquet", tmp_path / "data" / "t.parquet"
    path.parent.mkdir()
    pq.write_table(table, plain)
    for arguments in (["check", config], ["encrypt", plain, path, "--config", config]):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
    with Keytools.from_yaml(config) as keytools:
        assert keytools.read_table(path).equals(table)
        # pyarrow's own reader, with keys that it gets through our client.
        properties = keytools.decryption_properties(path)
        assert pq.read_table(path, decryption_properties=properties).equals(table)
    old = vault.keys["one"].versions[0]
    for name in ("one", "hsm"):
        vault.keys[name].add_version()
    done = run("rotate", path.parent, "--config", config)
    assert done.exit_code == 0, done.output
    old.enabled = vault.keys["hsm"].versions[0].enabled = False
    with Keytools.from_yaml(config) as keytools:
        assert keytools.read_table(path).equals(table)


ROLES = {
    "writer": ("get", "wrapkey", "encrypt"),
    "reader": ("get", "unwrapkey", "decrypt"),
    "rotator": ("get", "wrapkey", "encrypt", "unwrapkey", "decrypt"),
}


@pytest.mark.parametrize("role", ROLES)
def test_documented_permissions_pass_their_own_check_and_no_other(
    vault: FakeVault, environment: None, tmp_path: Path, role: str
) -> None:
    config = configuration(vault, tmp_path)
    for other, allowed in ROLES.items():
        vault.denied.clear()
        for verb in set(ROLES["rotator"]) - set(allowed):
            vault.denied |= {(verb, "one"), (verb, "hsm")}
        done = run("check", config, "--as", role)
        assert (done.exit_code == 0) == (set(ROLES[role]) <= set(allowed)), (other, done.output)


def test_a_login_that_has_expired_ends_a_command(
    vault: FakeVault, environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(vault, tmp_path)
    vault.fail(RefusalError(401, "Unauthorized", "AKV10032"))
    done = run("check", config)
    assert done.exit_code == 2 and "have expired" in " ".join(done.output.split())
    # App Service refuses to issue a token.
    monkeypatch.setenv("IDENTITY_HEADER", "wrong")
    done = run("check", config)
    assert done.exit_code == 2 and "no access token" in " ".join(done.output.split())
