"""Wrapped keys are re-wrapped: the number of KMS calls, and the detection of wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults import FaultyKms
from rotation_case import MASTER_KEYS, TABLE, Case

from parquet_keytools.errors import KmsAccessDeniedError, KmsError, KmsResponseInvalidError, KmsUnavailableError
from parquet_keytools.keys.key_wrapping import Kek
from parquet_keytools.kms.client import KmsClient, RewrapRequest
from parquet_keytools.kms.contract_tests import wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.named import NamedKmss
from parquet_keytools.rotation import file_keys as module
from parquet_keytools.rotation.file_keys import Rewrapped, Rewrapper, RewrapTask, WrappedKey
from parquet_keytools.rotation.report import KmsCalls, Outcome
from parquet_keytools.secret_bytes import SecretBytes

KEYS = {"a": b"0123456789012345", "b": b"5432109876543210"}


class RewrappingKms(InMemoryKms):
    """Re-wraps by itself, as AWS and Vault do: no key leaves it."""

    wrong = False

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        outcomes: list[str | KmsError] = []
        for request in requests:
            key = self._unwrap(request.wrapped_key, request.master_key_id)
            if self.wrong:
                key = SecretBytes.random(128)
            outcomes.append(self._wrap(key, request.new_master_key_id))
        return outcomes


def tasks_of(kms: InMemoryKms | FaultyKms, count: int, *, is_kek: bool = True) -> list[RewrapTask]:
    return [
        RewrapTask(WrappedKey("a", wrap_one(kms, SecretBytes.random(128), "a")), "a", is_kek) for _ in range(count)
    ]


def moved(kms: KmsClient, other: KmsClient, tasks: list[RewrapTask]) -> tuple[NamedKmss, list[RewrapTask]]:
    """Return the two KMSs as one, and tasks that move keys between them."""
    both = NamedKmss({"one": kms, "other": other})
    tasks = [replace(task, old=replace(task.old, master_key_id="one::a")) for task in tasks]
    return both, [replace(task, new_master_key_id="other::a") for task in tasks]


@pytest.mark.parametrize("is_kek", [True, False])
def test_each_distinct_key_is_asked_for_once(is_kek: bool) -> None:
    kms = RewrappingKms(KEYS)
    rewrapper = Rewrapper(kms, new_keks=False)
    tasks = tasks_of(kms, 3, is_kek=is_kek)
    before = kms.call_counts
    first = rewrapper.rewrap(tasks * 5)
    second = rewrapper.rewrap(tasks)
    assert first == second and len(first) == 3
    assert rewrapper.calls == KmsCalls(rewrap=3, unwrap=3)
    assert kms.call_counts - before == {"rewrap": 3, "unwrap": 3}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_KEYS", 2)
    kms = RewrappingKms(KEYS)
    rewrapper = Rewrapper(kms, new_keks=False)
    tasks = tasks_of(kms, 3)
    assert len(rewrapper.rewrap(tasks)) == 3
    rewrapper.rewrap(tasks[1:])
    assert rewrapper.calls.rewrap == 3
    rewrapper.rewrap(tasks[:1])
    assert rewrapper.calls.rewrap == 4


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("wrong", ["kf", "ka"])
def test_another_key_is_noticed_where_it_opens_nothing(tmp_path: Path, wrong: str, double: bool) -> None:
    kms = RewrappingKms(dict.fromkeys(MASTER_KEYS))
    case = Case(tmp_path, kms, None, {"column_keys": {"ka": ["a"]}, "double_wrapping": double})
    path = case.write()
    before = path.read_bytes()
    kms.wrong = True
    (file,) = case.tools().rotate(path, only_master_keys=[wrong]).files
    assert file.outcome is Outcome.FAILED and str(path) in str(file.error)
    assert path.read_bytes() == before
    kms.wrong = False
    assert case.tools().rotate(path).succeeded and case.tools().read_table(path).equals(TABLE)


@pytest.mark.parametrize("new_keks", [True, False])
def test_another_key_on_the_way_to_another_kms_is_noticed(new_keks: bool) -> None:
    kms, other = InMemoryKms(KEYS), FaultyKms(KEYS)
    other.fail("wrong_key")
    both, tasks = moved(kms, other, tasks_of(kms, 1))
    (outcome,) = Rewrapper(both, new_keks=new_keks).rewrap(tasks).values()
    assert isinstance(outcome, KmsResponseInvalidError)
    assert "the new wrapped key does not unwrap to the same key" in str(outcome)
    assert (outcome.backend, outcome.master_key_id) == (other.backend, "other::a")


def test_a_new_kek_that_does_not_lead_to_the_same_dek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the column would be unreadable."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    before = path.read_bytes()
    case.add_version()
    wrap_dek = Kek.wrap_dek
    with monkeypatch.context() as patched:
        patched.setattr(Kek, "wrap_dek", lambda kek, dek: wrap_dek(kek, SecretBytes.random(128)))
        (file,) = case.tools().rotate(path, new_keks=True).files
    assert file.outcome is Outcome.FAILED and str(path) in str(file.error)
    assert "the new KEK does not lead to the same DEK" in str(file.error)
    assert path.read_bytes() == before
    assert case.tools().rotate(path).succeeded and case.tools().read_table(path).equals(TABLE)


def refuse(kms: InMemoryKms, requests_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(requests: Sequence[Any]) -> list[KmsError]:
        return [
            KmsAccessDeniedError(backend=kms.backend, operation=requests_of, master_key_id="a") for _ in requests
        ]

    monkeypatch.setattr(kms, requests_of, refused)


@pytest.mark.parametrize("is_kek", [True, False])
@pytest.mark.parametrize("refused", ["_wrap_many", "_unwrap_many"])
def test_a_new_kms_that_refuses(refused: str, is_kek: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the error of each key, and none is re-wrapped."""
    kms, other = InMemoryKms(KEYS), InMemoryKms(KEYS)
    refuse(other, refused, monkeypatch)
    both, tasks = moved(kms, other, tasks_of(kms, 2, is_kek=is_kek))
    outcomes = Rewrapper(both, new_keks=True).rewrap(tasks)
    assert [type(outcome) for outcome in outcomes.values()] == [KmsAccessDeniedError] * 2


def test_what_the_kms_re_wrapped_and_does_not_unwrap_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kms = RewrappingKms(KEYS)
    tasks = tasks_of(kms, 2)
    refuse(kms, "_unwrap_many", monkeypatch)
    outcomes = Rewrapper(kms, new_keks=False).rewrap(tasks)
    assert [type(outcome) for outcome in outcomes.values()] == [KmsAccessDeniedError] * 2


def test_a_dry_run_counts_each_key_once() -> None:
    kms = RewrappingKms(KEYS)
    tasks = tasks_of(kms, 3)
    rewrapper = Rewrapper(kms, dry_run=True)
    for _ in range(2):
        rewrapper.expect([task.old for task in tasks])
    assert rewrapper.expected_calls == KmsCalls(unwrap=3)
    for _ in range(2):
        assert rewrapper.rewrap(tasks[:2]) == {}
        rewrapper.expect(tasks[:2])
    assert rewrapper.expected_calls == KmsCalls(unwrap=5, rewrap=2)
    assert rewrapper.calls == KmsCalls()


def test_failures_are_not_remembered() -> None:
    kms = FaultyKms(KEYS)
    tasks = tasks_of(kms, 2)
    rewrapper = Rewrapper(kms, new_keks=False)
    kms.fail("refused")
    assert all(isinstance(outcome, KmsAccessDeniedError) for outcome in rewrapper.rewrap(tasks).values())
    kms.fail("timeout")
    assert all(isinstance(outcome, KmsUnavailableError) for outcome in rewrapper.rewrap(tasks).values())
    kms.failure = None
    assert all(isinstance(outcome, Rewrapped) for outcome in rewrapper.rewrap(tasks).values())


def test_no_error_and_no_text_shows_a_key() -> None:
    kms = RewrappingKms(KEYS)
    key = SecretBytes(b"canary key bytes")
    task = RewrapTask(WrappedKey("a", wrap_one(kms, key, "a")), "a", False)
    found = Rewrapper(kms, new_keks=False).rewrap([task])
    assert "canary" not in repr(found)
