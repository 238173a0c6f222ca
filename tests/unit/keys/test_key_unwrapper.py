from dataclasses import replace

import pytest
from faults import FAILURES, FaultyKms, TurnedClock
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools.errors import (
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    WrappedKeyInvalidError,
)
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import (
    DekToWrap,
    KeyUnwrapper,
    KeyWrapper,
    KmsKeys,
    decode_master_key_id,
    encode_master_key_id,
)
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.secret_bytes import SecretBytes

ARN = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.fixture
def kms() -> FaultyKms:
    return FaultyKms({"kf": b"0123456789012345", "kc": b"1234567890123450", ARN: b"1234567890123451"})


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def unwrapper(kms: FaultyKms, clock: TurnedClock) -> KeyUnwrapper:
    return KeyUnwrapper(kms, clock)


def wrap(kms: KmsClient, *ids: str, double: bool = True) -> tuple[list[SecretBytes], list[KeyMaterial]]:
    """Return DEKs and their key materials."""
    deks = [SecretBytes.random(128) for _ in ids]
    length_bits = 128 if double else None
    items = [DekToWrap(dek, id_, False) for dek, id_ in zip(deks, ids, strict=True)]
    return deks, KeyWrapper(kms, TurnedClock()).wrap(items, "DEFAULT", kek_length_bits=length_bits)


@pytest.mark.parametrize("double", [False, True])
def test_deks_come_back_in_order_in_one_round(kms: FaultyKms, unwrapper: KeyUnwrapper, double: bool) -> None:
    deks, materials = wrap(kms, "kc", "kf", "kc", ARN, double=double)
    assert KmsKeys(unwrapper, 600).deks(materials) == deks
    assert kms.unwrap_rounds == [3 if double else 4]


def test_each_distinct_wrapped_key_once(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    deks, materials = wrap(kms, "kc", double=False)
    assert KmsKeys(unwrapper, 600).deks(materials * 50) == deks * 50
    assert kms.call_counts["unwrap"] == 1


def test_one_operation_asks_once_even_without_a_cache(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    """An operation keeps the keys that it fetched: no KMS call happens in the middle of a read."""
    deks, materials = wrap(kms, "kc", "kf")
    keys = KmsKeys(unwrapper, 0)
    keys.fetch(materials)
    keys.fetch(materials)
    assert keys.deks(materials) == deks
    assert kms.call_counts["unwrap"] == 2


# --- failures ---


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_concerns_its_own_keys(
    kms: FaultyKms, unwrapper: KeyUnwrapper, double: bool, failure: str
) -> None:
    deks, materials = wrap(kms, "kc", "kf", double=double)
    kms.fail(failure, "kc")
    refused, good = KmsKeys(unwrapper, 600).deks(materials)
    assert good == deks[1]
    if failure == "wrong_key" and not double:
        assert refused != deks[0]  # Only the modules can show it.
    else:
        assert isinstance(refused, KeytoolsError)
    if failure != "wrong_key":
        kms.failure = None
        assert KmsKeys(unwrapper, 600).deks(materials) == deks, "the failure was kept"


def test_wrapped_key_of_another_master_key(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    _, (material,) = wrap(kms, "kc")
    (outcome,) = KmsKeys(unwrapper, 600).deks([replace(material, master_key_id="kf")])
    assert isinstance(outcome, WrappedKeyInvalidError)


def test_key_encryption_key_of_another_file(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    """A wrapped DEK under a KEK that is genuine but not its own."""
    _, (one,) = wrap(kms, "kc")
    _, (other,) = wrap(kms, "kc")
    (outcome,) = KmsKeys(unwrapper, 600).deks([replace(one, kek_id=other.kek_id, wrapped_kek=other.wrapped_kek)])
    assert isinstance(outcome, KeyMaterialError)


def test_without_a_kms() -> None:
    material = KeyMaterial(True, "kf", "d2Rlaw==")
    (outcome,) = KmsKeys(KeyUnwrapper(None, TurnedClock()), 600).deks([material])
    assert isinstance(outcome, KeyNotAvailableError) and "`kms:`" in str(outcome)
    assert "wrapped by a KMS" in str(outcome)


class MasterKeysThatFail(InMemoryKms):
    """A KMS with a settable answer to describe calls."""

    described = 0
    failure: KmsError | None = None

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        self.described += 1
        if self.failure is not None:
            raise self.failure
        return super()._describe(master_key_id)


def error_of(kms: InMemoryKms, material: KeyMaterial) -> tuple[KmsKeys, KmsError]:
    keys = KmsKeys(KeyUnwrapper(kms, TurnedClock()), 600)
    (error,) = keys.deks([keys.unwrapper.of_file(material, None)])
    assert isinstance(error, KmsError)
    return keys, error


@pytest.mark.parametrize("refusal", ["deny", "disable"])
def test_a_refused_master_key_is_a_refusal(refusal: str) -> None:
    kms = MasterKeysThatFail({"a:b": b"0123456789012345"})
    material = replace(wrap(kms, "a:b")[1][0], master_key_id=encode_master_key_id("a:b"))
    getattr(kms, refusal)("a:b")
    keys, error = error_of(kms, material)
    assert keys.unwrapper.refuses_key(keys.unwrapper.of_file(material, None), error)
    assert kms.described == (refusal == "disable")


def test_a_master_key_that_does_not_exist_is_a_refusal() -> None:
    kms = MasterKeysThatFail({"kc": b"0123456789012345"})
    material = replace(wrap(kms, "kc")[1][0], master_key_id="nobody")
    keys, error = error_of(kms, material)
    assert keys.unwrapper.refuses_key(material, error) and kms.described == 0


def test_a_version_that_is_disabled_refuses_no_master_key() -> None:
    """A writer of key material can name an old version: that would hide columns from their readers."""
    kms = MasterKeysThatFail({"kc": b"0123456789012345"})
    (material,) = wrap(kms, "kc")[1]
    kms.add_version("kc")
    kms.disable("kc", 1)
    keys, error = error_of(kms, material)
    assert isinstance(error, MasterKeyDisabledError)
    assert not keys.unwrapper.refuses_key(material, error)
    # Without an answer, nothing is known, so nothing is hidden.
    kms.disable("kc")
    assert keys.unwrapper.refuses_key(material, error)
    kms.failure = KmsUnavailableError(backend="test", operation="describe")
    assert not keys.unwrapper.refuses_key(material, error)


def test_what_a_damaged_key_ends_in_is_no_refusal() -> None:
    kms = MasterKeysThatFail({"kf": b"0123456789012345", "kc": b"1234567890123450"})
    material = replace(wrap(kms, "kc")[1][0], master_key_id="kf")
    keys, error = error_of(kms, material)
    assert isinstance(error, WrappedKeyInvalidError)
    assert not keys.unwrapper.refuses_key(material, error) and kms.described == 0


def test_files_never_choose_the_kms(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    deks, (material,) = wrap(kms, "kc")
    forged = replace(material, kms_instance_url="https://evil.example", kms_instance_id="evil")
    assert KmsKeys(unwrapper, 600).deks([forged]) == deks


# --- identifiers as pyarrow can carry them ---


@pytest.mark.parametrize(
    "master_key_id",
    [ARN, "projects/p/locations/l/keyRings/r/cryptoKeys/k", "alias/a b", "a;b,c:d", "ключ", "50%", "%3A", " x "],
)
def test_master_key_ids_survive_pyarrow(master_key_id: str) -> None:
    encoded = encode_master_key_id(master_key_id)
    assert not set(encoded) & set(":;, ")
    assert decode_master_key_id(encoded) == master_key_id


@given(st.text())
def test_any_master_key_id_survives(master_key_id: str) -> None:
    assert decode_master_key_id(encode_master_key_id(master_key_id)) == master_key_id


def test_both_spellings_are_one_key(kms: FaultyKms, unwrapper: KeyUnwrapper) -> None:
    """Files written through pyarrow carry the encoded identifier, others the plain one."""
    deks, (material,) = wrap(kms, ARN)
    encoded = replace(material, master_key_id=encode_master_key_id(ARN))
    keys = KmsKeys(unwrapper, 600)
    assert keys.deks([keys.unwrapper.of_file(one, None) for one in (material, encoded)]) == deks * 2
    assert kms.call_counts["unwrap"] == 1
