"""Nonces of one file, and of several under one DEK."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from parquet_keytools.conformance import nonce_ledger
from parquet_keytools.conformance.findings import FILE_SCOPES, RuleBook, Scope
from parquet_keytools.conformance.nonce_ledger import NonceLedger, SharedNonces, nonce_entry
from parquet_keytools.conformance.report import Outcome

DEK, OTHER_DEK = b"dek" * 5 + b"1", b"dek" * 5 + b"2"


def ledger(nonces: dict[bytes, list[bytes]], check: bytes = b"tag.") -> NonceLedger:
    made = NonceLedger()
    for dek, found in nonces.items():
        for offset, nonce in enumerate(found):
            made.of(dek).add(nonce_entry(nonce, offset, check), 1)
    return made


def random_nonces(count: int, seed: int) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(12) for _ in range(count)]


def outcomes(shared: SharedNonces) -> dict[str, tuple[Outcome, list[str]]]:
    book = RuleBook([Scope.DATA_SET])
    shared.check(book)
    return {
        result.rule.id: (result.outcome, [finding.message for finding in result.findings] + list(result.reasons))
        for result in book.results()
        if result.rule.id in ("nonce-shared", "invocations-shared")
    }


def test_many_deks_take_little_memory() -> None:
    """Each column of a wide table has a DEK of its own."""
    tracemalloc.start()
    made = NonceLedger()
    for number in range(10_000):
        made.of(number.to_bytes(16, "big")).add(nonce_entry(b"n" * 12, number, b"tag."))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.fingerprints) == 10_000
    assert taken < 10_000_000


def test_a_dek_with_many_nonces_is_checked_as_one_with_few() -> None:
    nonces = random_nonces(100_000, 1)
    made = ledger({DEK: [*nonces, nonces[70_000]]})
    book = RuleBook(FILE_SCOPES)
    made.check(book)
    (result,) = (result for result in book.results() if result.rule.id == "nonce-reuse")
    assert [finding.message for finding in result.findings] == ["it has the nonce of the module at byte 70000."]
    assert made.invocations(DEK) == (100_001, 100_001)
    assert sorted(nonce for nonce, _ in made.nonces(DEK)) == sorted([*nonces, nonces[70_000]])


def test_nonces_of_a_chunk_are_added_at_once() -> None:
    nonces = random_nonces(100_000, 1)
    entries = [nonce_entry(nonce, offset, b"tag.") for offset, nonce in enumerate(nonces)]
    made = NonceLedger()
    for start in range(0, len(entries), 1_000):
        made.of(DEK).add(b"".join(entries[start : start + 1_000]), 400)
    assert made.invocations(DEK) == (100_000, 40_000)
    assert sorted(made.nonces(DEK)) == sorted((nonce, b"tag.") for nonce in nonces)
    # The same module, met again, and another one with its nonce.
    made.of(DEK).add(entries[5] + nonce_entry(nonces[7], 100_000, b"tag."))
    made.of(OTHER_DEK)
    assert made.fingerprints == (DEK,)
    book = RuleBook(FILE_SCOPES)
    made.check(book)
    (result,) = (result for result in book.results() if result.rule.id == "nonce-reuse")
    assert [finding.message for finding in result.findings] == ["it has the nonce of the module at byte 7."]


@pytest.mark.parametrize("memory_bytes", [2**26, 1000], ids=["in memory", "in a temporary file"])
def test_a_nonce_of_two_files_is_found(memory_bytes: int) -> None:
    first, second = random_nonces(500, 1), random_nonces(500, 2)
    shared = SharedNonces(memory_bytes)
    shared.add_file("a", ledger({DEK: first, OTHER_DEK: second}, b"aaaa"))
    shared.add_file("b", ledger({DEK: [*second, first[250]]}, b"bbbb"))
    assert outcomes(shared) == {
        "nonce-shared": (Outcome.BROKEN, ["one module has the same DEK and nonce in a and b."]),
        "invocations-shared": (Outcome.HOLDS, []),
    }


def test_a_nonce_under_two_deks_is_no_reuse() -> None:
    nonces = random_nonces(10, 1)
    shared = SharedNonces()
    shared.add_file("a", ledger({DEK: nonces}, b"aaaa"))
    shared.add_file("b", ledger({OTHER_DEK: nonces}, b"bbbb"))
    assert outcomes(shared)["nonce-shared"][0] is Outcome.HOLDS


def test_a_copy_is_no_reuse() -> None:
    nonces = random_nonces(10, 1)
    shared = SharedNonces()
    shared.add_file("a", ledger({DEK: nonces}))
    shared.add_file("copy of a", ledger({DEK: nonces}))
    assert outcomes(shared)["nonce-shared"][0] is Outcome.HOLDS
    shared = SharedNonces()
    for name, check in (("a", b"aaaa"), ("copy of a", b"aaaa"), ("c", b"cccc")):
        shared.add_file(name, ledger({DEK: nonces}, check))
    assert outcomes(shared)["nonce-shared"] == (
        Outcome.BROKEN,
        ["10 modules have the same DEK and nonce in a and c."],
    )


def test_invocations_of_all_files_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonce_ledger, "MAX_INVOCATIONS", 60)
    shared = SharedNonces()
    for number in range(3):
        shared.add_file(f"{number}", ledger({DEK: random_nonces(10, number)}))
    assert outcomes(shared)["invocations-shared"][0] is Outcome.HOLDS
    shared = SharedNonces()
    for number in range(3):
        shared.add_file(f"{number}", ledger({DEK: random_nonces(10, number)}))
    monkeypatch.setattr(nonce_ledger, "MAX_INVOCATIONS", 59)
    assert outcomes(shared)["invocations-shared"] == (
        Outcome.BROKEN,
        ["one DEK encrypts 30 modules of 3 files, of which 30 are pages."],
    )


def test_no_room_for_a_temporary_file_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    shared = SharedNonces(memory_bytes=100)
    for number in range(2):
        shared.add_file(f"{number}", ledger({DEK: random_nonces(10, number)}))
    outcome, reasons = outcomes(shared)["nonce-shared"]
    assert outcome is Outcome.NOT_CHECKED
    assert reasons == ["there is no room for a temporary file of nonces: No space left on device"]
