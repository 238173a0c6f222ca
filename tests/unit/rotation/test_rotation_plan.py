"""Which keys a rotation changes, and to what."""

from __future__ import annotations

from typing import Any

import pytest

from parquet_keytools.errors import ConfigurationError, MasterKeyNotFoundError
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.file_keys import MasterKeyVersions, check_version, is_same_version
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.rotation.rotate import RotationPlan


def target(plan: RotationPlan, key: str, version: str | None, current: str | None, *, has_kek: bool = True) -> Any:
    return plan.new_master_key_id(key, version=version, current_version=lambda _: current, has_kek=has_kek)


@pytest.mark.parametrize(
    ("version", "current", "expected"),
    [("1", "2", "k"), ("2", "2", None), (None, "2", "k"), ("2", None, "k"), (None, None, "k")],
)
def test_without_options_what_is_not_known_to_be_current(
    version: str | None, current: str | None, expected: str | None
) -> None:
    assert target(RotationPlan(), "k", version, current) == expected


def test_the_newest_version_is_asked_for_only_where_it_matters() -> None:
    def never(_: str) -> str:
        raise AssertionError

    for plan in (
        RotationPlan(moves={"k": "n"}),
        RotationPlan(new_keks=True),
        RotationPlan(older_than="5"),
        RotationPlan(only_master_keys=frozenset({"other"})),
    ):
        plan.new_master_key_id("k", version="1", current_version=never, has_kek=True)


def test_moves_leave_other_master_keys_alone() -> None:
    plan = RotationPlan(moves={"a": "b"})
    assert target(plan, "a", "2", "2") == "b"
    assert target(plan, "b", "1", "2") is None and target(plan, "c", "1", "2") is None


def test_moves_and_a_choice_of_master_keys() -> None:
    plan = RotationPlan(moves={"a": "b"}, only_master_keys=frozenset({"a", "c"}))
    assert [target(plan, key, "1", "2") for key in "abc"] == ["b", None, "c"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("9", "k"), ("10", None), ("11", None), ("v9", "k"), ("v10", None), (None, "k"), ("abc", "k")],
)
def test_older_than(version: str | None, expected: str | None) -> None:
    assert target(RotationPlan(older_than="10"), "k", version, "99") == expected


def test_older_than_what_is_no_version() -> None:
    """It would count as older than everything, and everything would be re-wrapped."""
    with pytest.raises(ConfigurationError, match="'x' is no version of this KMS"):
        target(RotationPlan(older_than="x"), "k", "9", "99")
    assert target(RotationPlan(older_than="x"), "k", "y", "z") == "k"


@pytest.mark.parametrize(
    ("one", "other", "same"), [("2", "v2", True), ("v2", "v2", True), ("1", "v2", False), ("main", "main", True)]
)
def test_names_of_versions(one: str, other: str, same: bool) -> None:
    assert is_same_version(one, other) == is_same_version(other, one) == same


def test_new_keks_are_for_keks() -> None:
    plan = RotationPlan(new_keks=True)
    assert target(plan, "k", "2", "2", has_kek=True) == "k"
    assert target(plan, "k", "2", "2", has_kek=False) is None


def test_identifiers_that_readers_would_decode_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must not contain `%`"):
        RotationPlan(moves={"a": "my%20key"})


# --- versions in two KMSs ---


def test_a_master_key_is_described_once() -> None:
    kms = InMemoryKms({"k": [bytes(16), bytes(32)]})
    versions = MasterKeyVersions(kms, {"known": "7"})
    for _ in range(2):
        assert versions.current("k") == "2"
        assert versions.current("known") == "7", "it was asked for before, by another process"
    assert kms.call_counts["describe"] == 1 and versions.calls == KmsCalls(describe=2)
    assert versions.known == {"known": "7", "k": "2"}
    described = MasterKeyVersions(kms)
    assert described.describe("k") is not None and described.current("k") == "2"
    assert kms.call_counts["describe"] == 2


def test_who_may_not_describe_a_master_key_may_wrap_with_it() -> None:
    kms = InMemoryKms({"k": None})
    kms.deny("k")
    versions = MasterKeyVersions(kms)
    assert versions.describe("k") is None and versions.known == {"k": None}
    assert MasterKeyVersions(kms).current("k") is None
    with pytest.raises(MasterKeyNotFoundError):
        MasterKeyVersions(kms).describe("none")


@pytest.mark.parametrize(
    ("version", "newest"),
    [("1", "2"), ("v2", "2"), ("2", "v2"), ("any", None), ("7", None), ("any", "material-id")],
)
def test_versions_that_a_master_key_may_have(version: str, newest: str | None) -> None:
    check_version("k", version, newest)


@pytest.mark.parametrize("version", ["0", "3", "v3", "any", ""])
def test_versions_that_a_master_key_cannot_have(version: str) -> None:
    """No file would seem to need them, and somebody would disable keys that are needed."""
    with pytest.raises(ConfigurationError, match=f"'k' has no version {version!r}: its newest is v2"):
        check_version("k", version, "v2")
