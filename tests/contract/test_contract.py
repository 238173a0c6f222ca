"""The contract of KmsClient, over every client that needs no service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import KmsClientContract
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.secret_bytes import SecretBytes


class TestInMemoryKms(KmsClientContract):
    @pytest.fixture
    def kms(self) -> KmsClient:
        return InMemoryKms({"one": SecretBytes.random(256), "two": bytes(16)})

    @pytest.fixture
    def master_key_id(self) -> str:
        return "one"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return "two"

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.disable(master_key_id)

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.deny(master_key_id)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.add_version(master_key_id)


class TestKeystoreKms(KmsClientContract):
    """An operator uses another process's view of the file: a separate keystore."""

    # A keystore has no principals, so access cannot be denied: only that test is skipped.

    @pytest.fixture
    def operator(self, tmp_path: Path) -> Keystore:
        keystore = Keystore.create(
            tmp_path / "keystore.json", lambda: SecretBytes(b"correct horse"), scrypt_n=2**14
        )
        keystore.create_key("one")
        keystore.create_key("one é:,; 1")
        return keystore

    @pytest.fixture
    def kms(self, operator: Keystore) -> Iterator[KmsClient]:
        settings = KeystoreKms.Settings.model_validate(
            {"type": "keystore", "path": operator.path.name, "passphrase": "correct horse"}
        )
        with KeystoreKms.from_settings(settings, operator.path.parent) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return "one"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return "one é:,; 1"

    @pytest.fixture(autouse=True)
    def _remember(self, operator: Keystore) -> None:
        self.operator_of_this_test = operator

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.operator_of_this_test.set_enabled(master_key_id, False)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.operator_of_this_test.rotate_key(master_key_id)
