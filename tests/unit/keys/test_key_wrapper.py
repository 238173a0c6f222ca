import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from faults import FaultyKms, TurnedClock

from parquet_keytools.errors import KmsAccessDeniedError, KmsError, KmsResponseInvalidError, KmsUnavailableError
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import DekToWrap, Kek, KeyWrapper
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.secret_bytes import SecretBytes

DOUBLE: dict[str, Any] = {"kms_instance_id": "instance", "kek_length_bits": 128, "cache_lifetime_seconds": 600}
SINGLE: dict[str, Any] = {**DOUBLE, "kek_length_bits": None}


@pytest.fixture
def kms() -> FaultyKms:
    return FaultyKms({"kf": b"0123456789012345", "kc": b"1234567890123450"})


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def wrapper(kms: FaultyKms, clock: TurnedClock) -> KeyWrapper:
    return KeyWrapper(kms, clock)


def deks(columns: int = 3) -> list[DekToWrap]:
    """Return a footer's DEK and columns' DEKs under another master key."""
    return [DekToWrap(SecretBytes.random(128), "kf", True)] + [
        DekToWrap(SecretBytes.random(256), "kc", False) for _ in range(columns)
    ]


def unwrapped(kms: FaultyKms, material: KeyMaterial) -> SecretBytes:
    key = unwrap_one(kms, material.kms_wrapped_key, material.master_key_id)
    return key if material.kek_id is None else Kek(material.kek_id, key).unwrap_dek(material.wrapped_dek)


@pytest.mark.parametrize("wrapping", [SINGLE, DOUBLE])
def test_materials_lead_back_to_the_deks(wrapper: KeyWrapper, kms: FaultyKms, wrapping: dict[str, Any]) -> None:
    wanted = deks()
    materials = wrapper.wrap(wanted, **wrapping)
    assert [unwrapped(kms, material) for material in materials] == [item.dek for item in wanted]
    assert [material.master_key_id for material in materials] == ["kf", "kc", "kc", "kc"]
    assert [material.is_footer_key for material in materials] == [True, False, False, False]
    assert [material.double_wrapping for material in materials] == [wrapping is DOUBLE] * 4
    assert materials[0].kms_instance_id == "instance"


@pytest.mark.parametrize("wrapping", [SINGLE, DOUBLE])
def test_one_round_to_the_kms(wrapper: KeyWrapper, kms: FaultyKms, wrapping: dict[str, Any]) -> None:
    wrapper.wrap(deks(), **wrapping)
    assert kms.wrap_rounds == [2 if wrapping is DOUBLE else 4]


def test_keks_serve_many_files(wrapper: KeyWrapper, kms: FaultyKms) -> None:
    """But DEKs are not shared: every file has its own."""
    first = wrapper.wrap(deks(), **DOUBLE)
    second = wrapper.wrap(deks(), **DOUBLE)
    assert kms.call_counts["wrap"] == 2
    assert [material.wrapped_kek for material in first] == [material.wrapped_kek for material in second]
    assert len({material.wrapped_dek for material in first + second}) == 8


def test_one_kek_for_each_master_key(wrapper: KeyWrapper) -> None:
    """A KEK under two master keys would give a user of one the columns of the other."""
    footer, *columns = wrapper.wrap(deks(), **DOUBLE)
    assert footer.kek_id not in {column.kek_id for column in columns}
    assert len({column.kek_id for column in columns}) == 1


@pytest.mark.parametrize("length_bits", [128, 192, 256])
def test_keks_have_the_length_asked_for(wrapper: KeyWrapper, kms: FaultyKms, length_bits: int) -> None:
    """A KEK weaker than its DEKs makes them as weak; a cached KEK of another length must not be used."""
    wrapper.wrap(deks(), **{**DOUBLE, "kek_length_bits": 384 - length_bits})
    (material, *_) = wrapper.wrap(deks(), **{**DOUBLE, "kek_length_bits": length_bits})
    assert unwrap_one(kms, material.wrapped_kek or "", "kf").length_bits == length_bits


def test_keks_expire(wrapper: KeyWrapper, kms: FaultyKms, clock: TurnedClock) -> None:
    first = wrapper.wrap(deks(), **DOUBLE)
    clock.seconds += 599
    wrapper.wrap(deks(), **DOUBLE)
    assert kms.call_counts["wrap"] == 2
    clock.seconds += 1
    later = wrapper.wrap(deks(), **DOUBLE)
    assert kms.call_counts["wrap"] == 4
    assert first[0].kek_id != later[0].kek_id


def test_fresh_keks_after_clear_cache(wrapper: KeyWrapper, kms: FaultyKms) -> None:
    wrapper.wrap(deks(), **DOUBLE)
    wrapper.clear_cache()
    wrapper.wrap(deks(), **DOUBLE)
    assert kms.call_counts["wrap"] == 4


def test_32_threads_wrap_one_kek(wrapper: KeyWrapper, kms: FaultyKms) -> None:
    barrier = threading.Barrier(32)

    def wrap(_: int) -> list[KeyMaterial]:
        barrier.wait(20)
        return wrapper.wrap(deks(), **DOUBLE)

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(wrap, range(32), timeout=60))
    assert kms.call_counts["wrap"] == 2
    assert len({material.kek_id for materials in results for material in materials}) == 2


@pytest.mark.parametrize("wrapping", [SINGLE, DOUBLE])
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("refused", KmsAccessDeniedError),
        ("timeout", KmsUnavailableError),
        ("wrong_length", KmsResponseInvalidError),
        ("not_bytes", KmsResponseInvalidError),
        ("foreign", KmsResponseInvalidError),
    ],
)
def test_one_refusal_is_the_refusal_of_all(
    wrapper: KeyWrapper, kms: FaultyKms, wrapping: dict[str, Any], failure: str, kind: type[KmsError]
) -> None:
    """A file with a key that cannot be unwrapped would be lost."""
    kms.fail(failure, "kc")
    with pytest.raises(kind) as caught:
        wrapper.wrap(deks(), **wrapping)
    assert caught.value.master_key_id == "kc"
    kms.failure = None
    assert len(wrapper.wrap(deks(), **wrapping)) == 4, "the error was kept"
