"""The raw form of wrapped keys, over the clients that need no service; the same as in Iceberg's own test KMS."""

import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsConfigurationError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import CANARY, unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.secret_bytes import SecretBytes

MASTER_KEY = b"0123456789012345"


@pytest.fixture
def operator(tmp_path: Path) -> Keystore:
    keystore = Keystore.create(tmp_path / "keystore.json", lambda: SecretBytes(b"correct horse"), scrypt_n=2**14)
    keystore.create_key("one")
    keystore.create_key("two")
    return keystore


@pytest.fixture(params=["in_memory", "keystore"])
def kms(request: pytest.FixtureRequest, operator: Keystore) -> KmsClient:
    if request.param == "in_memory":
        return InMemoryKms({"one": MASTER_KEY, "two": None})
    return KeystoreKms(operator.path, lambda: SecretBytes(b"correct horse"))


@pytest.mark.parametrize("length", [16, 24, 32])
def test_unwraps_what_it_wrapped(kms: KmsClient, length: int) -> None:
    key = SecretBytes.random(length * 8)
    wrapped_key = kms.wrap_raw(key, "one")
    assert len(wrapped_key) == 12 + length + 16
    assert kms.unwrap_raw(wrapped_key, "one") == key
    assert kms.call_counts == {"wrap": 1, "unwrap": 1}


def test_damage_and_other_master_keys_are_found(kms: KmsClient) -> None:
    wrapped_key = kms.wrap_raw(CANARY, "one")
    damaged = [
        wrapped_key[:n] + bytes([wrapped_key[n] ^ 1]) + wrapped_key[n + 1 :] for n in range(len(wrapped_key))
    ]
    for data in (*damaged, wrapped_key[:-1], wrapped_key[1:], wrapped_key * 2):
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(data, "one")
    with pytest.raises(WrappedKeyInvalidError):
        kms.unwrap_raw(wrapped_key, "two")
    for data in (b"", bytes(20_000)):
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(data, "one")
    with pytest.raises(MasterKeyNotFoundError) as missing:
        kms.wrap_raw(CANARY, "three")
    assert missing.value.master_key_id == "three"
    with pytest.raises(MasterKeyNotFoundError) as missing:
        kms.unwrap_raw(wrapped_key, "three")
    assert missing.value.master_key_id == "three"
    with pytest.raises(ValueError, match="16, 24 or 32"):
        kms.wrap_raw(SecretBytes(b"short"), "one")


def test_the_two_forms_are_not_taken_for_each_other(kms: KmsClient) -> None:
    """A writer of Parquet key material must not get raw keys unwrapped, which nothing binds."""
    raw = kms.wrap_raw(CANARY, "one")
    for text in (strict_base64.encode(raw), f"keystore:v1:{strict_base64.encode(raw)}"):
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(kms, text, "one")
    bound = strict_base64.decode(wrap_one(kms, CANARY, "one").rpartition(":")[2])
    with pytest.raises(WrappedKeyInvalidError):
        kms.unwrap_raw(bound, "one")


def test_it_is_that_of_icebergs_test_kms() -> None:
    kms = InMemoryKms({"keyA": MASTER_KEY})
    nonce = os.urandom(12)
    theirs = nonce + AESGCM(MASTER_KEY).encrypt(nonce, CANARY.reveal(), None)
    assert kms.unwrap_raw(theirs, "keyA") == CANARY
    ours = kms.wrap_raw(CANARY, "keyA")
    assert AESGCM(MASTER_KEY).decrypt(ours[:12], ours[12:], None) == CANARY.reveal()


def test_old_versions_unwrap_until_they_are_disabled(operator: Keystore) -> None:
    kms = KeystoreKms(operator.path, lambda: SecretBytes(b"correct horse"))
    old = kms.wrap_raw(CANARY, "one")
    operator.rotate_key("one")
    new = kms.wrap_raw(CANARY, "one")
    assert kms.unwrap_raw(old, "one") == kms.unwrap_raw(new, "one") == CANARY
    operator.set_enabled("one", False, version=1)
    assert kms.unwrap_raw(new, "one") == CANARY
    with pytest.raises(MasterKeyDisabledError):
        kms.unwrap_raw(old, "one")


def test_a_wrapped_key_that_is_base64_of_its_raw_form_needs_no_more_code() -> None:
    """The hooks of a backend such as AWS: keys are wrapped for Iceberg in the same way as for Parquet."""
    asked: list[tuple[object, str]] = []

    class Base64Kms(InMemoryKms):
        _wrap_raw = KmsClient._wrap_raw
        _unwrap_raw = KmsClient._unwrap_raw

        def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
            asked.append((key, master_key_id))
            return "AAEC"

        def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
            asked.append((wrapped_key, master_key_id))
            return CANARY

    kms = Base64Kms({"one": MASTER_KEY})
    assert kms.wrap_raw(CANARY, "one") == bytes([0, 1, 2])
    assert kms.unwrap_raw(bytes([0, 1, 2]), "one") == CANARY
    assert asked == [(CANARY, "one"), ("AAEC", "one")]


def test_raw_keys_are_audited_and_trusted_by_their_master_key(
    kms: KmsClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(kms), "_may_be_of_others", lambda self, master_key_id: master_key_id == "two")
    ours, theirs = kms.wrap_raw(CANARY, "one"), kms.wrap_raw(CANARY, "two")
    kms.audit_log = True
    kms.trust(["one"])
    with caplog.at_level("INFO", "parquet_keytools.audit"):
        assert kms.unwrap_raw(ours, "one") == CANARY
        with pytest.raises(MasterKeyNotTrustedError) as caught:
            kms.unwrap_raw(theirs, "two")
        kms.wrap_raw(CANARY, "two")
    assert caught.value.master_key_id == "two"
    records: list[Any] = list(caplog.records)
    assert [(record.operation, record.master_key_id, record.outcome) for record in records] == [
        ("unwrap", "one", "ok"),
        ("unwrap", "two", "MasterKeyNotTrustedError"),
        ("wrap", "two", "ok"),
    ]


def test_a_backend_without_a_raw_form_says_so() -> None:
    class Plain(InMemoryKms):
        def _raw_obstacle(self) -> str:
            return "this backend has no raw form, which Iceberg needs"

    kms = Plain({"one": MASTER_KEY})
    for call in (lambda: kms.wrap_raw(CANARY, "one"), lambda: kms.unwrap_raw(bytes(44), "one")):
        with pytest.raises(KmsConfigurationError, match="no raw form"):
            call()
