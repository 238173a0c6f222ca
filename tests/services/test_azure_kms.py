"""The KMS client of Azure Key Vault and Managed HSM, over a fake of the service: see azure_fake.py."""

import base64
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azure_fake import WRAP_OPERATIONS, FakeVault, fake_vault

from parquet_keytools.errors import (
    KmsError,
)
from parquet_keytools.kms.azure import AzureKms
from parquet_keytools.kms.azure.connection import AzureSettings
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import CANARY, KmsClientContract

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
def kms(vault: FakeVault) -> Iterator[AzureKms]:
    with client(vault) as kms:
        yield kms


@pytest.fixture(autouse=True)
def records() -> Iterator[list[logging.LogRecord]]:
    """All that is logged, at DEBUG, Azure's libraries included; no test may leave a key or token in it."""
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
    """Return the error a call ends in, after a search for keys and tokens in all that it shows."""
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


class TestContractOfRsa(_Contract):
    pass


class TestContractOfAesKeyWrap(_Contract):
    kty = "oct-HSM"
    operations = WRAP_OPERATIONS


class TestContractOfAesGcm(_Contract):
    kty = "oct-HSM"
