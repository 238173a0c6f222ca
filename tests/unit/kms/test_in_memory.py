import base64
from pathlib import Path

import pytest
from pydantic import ValidationError

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms, InMemorySettings
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes(b"sixteen key byte")


def from_yaml(keys: object) -> InMemoryKms:
    return InMemoryKms.from_settings(InMemorySettings.model_validate({"type": "in_memory", "keys": keys}), Path())


@pytest.mark.parametrize(
    ("master_key", "master_key_id", "wrapped_kek", "kek_id", "wrapped_dek"),
    [
        (
            b"0123456789012345",
            "kf",
            "kWHNReXsULhmTplhvImESLFTXV91t5CyoqaEVYLk7k0jD8oeTDDJCUnIiCs=",
            "NFkiTmDXYzZMTb+O3b9nSA==",
            "FLQDczpR9upRCqUjtzac5N1PbdduFekfeklLxi4VwOLul7un1iBcdAsJAXc=",
        ),
        (
            b"1234567890123450",
            "kc1",
            "lriDjlnkKi5MvjdHb0+pA2Xc9FtpK5lUti3TwNzUNS7vbPfuxiChBbb0Tf4=",
            "obYT2tJ6W3JI9Pv7E8LgPQ==",
            "bdm0fNsrrL6Nxu8pbx1KNOLrGoZ8nKhezu+ctInKwAbau1rgjXULcIJQAoc=",
        ),
    ],
)
def test_unwraps_what_parquet_java_wrapped(
    master_key: bytes, master_key_id: str, wrapped_kek: str, kek_id: str, wrapped_dek: str
) -> None:
    """Known answers: key material of the public file external_key_material_java.parquet.encrypted."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    kek = unwrap_one(InMemoryKms({master_key_id: master_key}), wrapped_kek, master_key_id)
    data = base64.b64decode(wrapped_dek)
    # Unwrapping parquet-java's key with it shows that it is the right KEK.
    dek = AESGCM(kek.reveal()).decrypt(data[:12], data[12:], base64.b64decode(kek_id))
    assert len(dek) == 16


def test_wraps_in_parquet_javas_format() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    wrapped = base64.b64decode(wrap_one(InMemoryKms({"é": bytes(32)}), KEY, "é"))
    assert len(wrapped) == 12 + 16 + 16
    assert AESGCM(bytes(32)).decrypt(wrapped[:12], wrapped[12:], "é".encode()) == KEY.reveal()


@pytest.mark.parametrize("length", [16, 24, 32])
def test_keys_of_the_configuration(length: int) -> None:
    key = bytes(range(length))
    text = base64.b64encode(key).decode()
    for keys in ({"a": text}, {"a": [text]}):
        kms = from_yaml(keys)
        assert not kms.has_generated_keys
        assert unwrap_one(kms, wrap_one(InMemoryKms({"a": key}), KEY, "a"), "a") == KEY


def test_names_only_are_generated() -> None:
    kms = from_yaml(["a", "b"])
    assert kms.has_generated_keys
    assert kms.master_key_ids() == {"a", "b"}
    wrapped = wrap_one(kms, KEY, "a")
    with pytest.raises(
        WrappedKeyInvalidError, match="unwrap with master key 'a': the wrapped key does not belong"
    ):
        unwrap_one(from_yaml(["a", "b"]), wrapped, "a")


def test_one_generated_key_among_given_ones_counts() -> None:
    text = base64.b64encode(bytes(16)).decode()
    assert from_yaml({"a": text, "b": None}).has_generated_keys
    kms = from_yaml({"a": text})
    kms.add_version("a", bytes(32))
    assert not kms.has_generated_keys
    kms.add_version("a")
    assert kms.has_generated_keys


def test_versions_of_the_configuration_are_oldest_first() -> None:
    old, new = bytes(16), bytes(range(32))
    kms = from_yaml({"a": [base64.b64encode(old).decode(), base64.b64encode(new).decode()]})
    assert unwrap_one(kms, wrap_one(InMemoryKms({"a": old}), KEY, "a"), "a") == KEY
    assert unwrap_one(InMemoryKms({"a": new}), wrap_one(kms, KEY, "a"), "a") == KEY
    assert kms.describe("a").current_version == "2"


@pytest.mark.parametrize(
    "keys",
    [
        {"a": "canary"},
        {"a": ["canarycanarycanarycana=="]},  # 16 bytes, but not in canonical base64
        {"a": "Y2FuYXJ5"},
        {"a": "canary\n"},
        {"a": []},
        {"a": 5},
        {"": None},
        {"a": {"b": "canary"}},
        ["a", "a"],
        ["a", 5],
        [["a"]],
        "canary",
        5,
    ],
)
def test_wrong_keys_are_refused_and_not_shown(keys: object) -> None:
    with pytest.raises(ValidationError) as caught:
        InMemorySettings.model_validate({"keys": keys})
    assert "canary" not in str(caught.value)
    assert "canary" not in repr(caught.value.errors(include_input=False))
    assert caught.value.errors()[0]["loc"][0] == "keys"


def test_settings_do_not_show_keys() -> None:
    text = base64.b64encode(b"canary key bytes").decode()
    settings = InMemorySettings.model_validate({"keys": {"a": text}})
    assert text not in repr(settings) + str(settings) + settings.model_dump_json()
    assert text not in repr(vars(InMemoryKms.from_settings(settings, Path())))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"a": bytes(15)}, "16, 24 or 32 bytes, not 15"),
        ({"a": []}, "'a' has no version"),
        ({"a": [bytes(16), bytes(1)]}, "16, 24 or 32 bytes, not 1$"),
        ({"": None}, "is empty or taken"),
    ],
)
def test_wrong_keys_from_python(keys: dict[str, bytes | list[bytes] | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InMemoryKms(keys)


def test_a_key_is_created_once() -> None:
    kms = InMemoryKms({"a": bytes(16)})
    wrapped = wrap_one(kms, KEY, "a")
    with pytest.raises(ValueError, match="taken"):
        kms.create_key("a")
    assert unwrap_one(kms, wrapped, "a") == KEY
    kms.create_key("b", SecretBytes(bytes(24)))
    assert kms.master_key_ids() == {"a", "b"}


def test_a_disabled_version() -> None:
    kms = InMemoryKms({"a": bytes(16)})
    old = wrap_one(kms, KEY, "a")
    assert kms.add_version("a") == 2
    new = wrap_one(kms, KEY, "a")
    kms.disable("a", 1)
    assert unwrap_one(kms, new, "a") == KEY
    with pytest.raises(MasterKeyDisabledError, match="version"):
        unwrap_one(kms, old, "a")
    with pytest.raises(WrappedKeyInvalidError, match="unwrap with master key 'a'"):
        unwrap_one(kms, old[::-1], "a")
    assert kms.describe("a").enabled
    kms.enable("a", 1)
    assert unwrap_one(kms, old, "a") == KEY


def test_a_disabled_current_version_does_not_wrap_with_an_older_one() -> None:
    kms = InMemoryKms({"a": [bytes(16), bytes(32)]})
    kms.disable("a", 2)
    with pytest.raises(MasterKeyDisabledError, match="its current version"):
        wrap_one(kms, KEY, "a")
    assert not kms.describe("a").enabled


def test_enabling_a_key_leaves_its_disabled_versions_disabled() -> None:
    kms = InMemoryKms({"a": bytes(16)})
    old = wrap_one(kms, KEY, "a")
    kms.add_version("a")
    kms.disable("a", 1)
    kms.disable("a")
    assert not kms.describe("a").enabled
    with pytest.raises(MasterKeyDisabledError, match=r"the master key is disabled\. Enable"):
        wrap_one(kms, KEY, "a")
    kms.enable("a")
    assert kms.describe("a").enabled
    with pytest.raises(MasterKeyDisabledError, match="version"):
        unwrap_one(kms, old, "a")


def test_denied_and_allowed_again() -> None:
    kms = InMemoryKms({"a": None})
    wrapped = wrap_one(kms, KEY, "a")
    kms.deny("a")
    with pytest.raises(KmsAccessDeniedError) as caught:
        unwrap_one(kms, wrapped, "a")
    assert caught.value.master_key_id == "a"
    with pytest.raises(KmsAccessDeniedError, match="describe with master key 'a'"):
        kms.describe("a")
    kms.allow("a")
    assert unwrap_one(kms, wrapped, "a") == KEY


@pytest.mark.parametrize("method", ["add_version", "disable", "enable", "deny", "allow"])
def test_an_operator_cannot_change_what_is_not_there(method: str) -> None:
    with pytest.raises(MasterKeyNotFoundError, match="update with master key 'b'"):
        getattr(InMemoryKms({"a": None}), method)("b")


@pytest.mark.parametrize("version", [0, 2, -1])
def test_a_version_that_is_not_there(version: int) -> None:
    with pytest.raises(ValueError, match="no version"):
        InMemoryKms({"a": None}).disable("a", version)
