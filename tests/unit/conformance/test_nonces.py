"""Nonces of one file, and of several under one DEK."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Collection, Iterator

import pytest

from parquet_keytools.conformance import nonces
from parquet_keytools.conformance.nonces import FileNonces, NoncePart, SharedNonces, nonce_entry
from parquet_keytools.conformance.report import FILE_SCOPES, Outcome, RuleBook, Scope

DEK, OTHER_DEK = b"dek" * 5 + b"1", b"dek" * 5 + b"2"

Made = dict[bytes, list[bytes]]


def made_of(found: Made, check: bytes = b"tag.", part: NoncePart | None = None) -> FileNonces:
    made = FileNonces(part)
    for dek, its_nonces in found.items():
        for offset, nonce in enumerate(its_nonces):
            made.add(dek, nonce_entry(nonce, offset, check), 1)
    return made


def random_nonces(count: int, seed: int) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(12) for _ in range(count)]


def repeated(*passes: FileNonces) -> list[str]:
    book = RuleBook(FILE_SCOPES)
    for made in passes:
        made.check_repeated(book)
    (result,) = (result for result in book.results() if result.rule.id == "nonce-reuse")
    return [finding.message for finding in result.findings]


def outcomes(
    files: dict[str, tuple[Made, bytes]], *, is_kept: bool = True
) -> dict[str, tuple[Outcome, list[str]]]:
    """Compare files, with nonces that are kept or that are read again."""
    passes = []

    def read_again(names: Collection[str], part: NoncePart) -> Iterator[tuple[str, FileNonces | None]]:
        passes.append(part)
        return ((name, made_of(*files[name], part)) for name in names)

    shared = SharedNonces(read_again)
    for name, (found, check) in files.items():
        made = made_of(found, check)
        shared.add_file(name, made.invocations, made if is_kept else None)
    book = RuleBook([Scope.DATA_SET])
    shared.check(book)
    assert is_kept or passes
    return {
        result.rule.id: (result.outcome, [finding.message for finding in result.findings] + list(result.reasons))
        for result in book.results()
        if result.rule.id in ("nonce-shared", "invocations-shared")
    }


def test_many_deks_take_little_memory() -> None:
    """Each column of a wide table has a DEK of its own."""
    tracemalloc.start()
    made = FileNonces()
    for number in range(10_000):
        made.add(number.to_bytes(16, "big"), nonce_entry(b"n" * 12, number, b"tag."))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.invocations) == 10_000
    assert taken < 10_000_000


@pytest.mark.parametrize("memory_bytes", [2**26, 100_000])
def test_a_nonce_that_comes_twice_is_found_in_one_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(nonces, "MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(nonces, "_BUCKET_BYTES", 10_000)
    found = random_nonces(20_000, 1)
    found.append(found[7_000])
    made = made_of({DEK: found})
    parts = made.part.parts
    assert (parts > 1) is (memory_bytes < 2**26)
    assert made.kept_bytes <= memory_bytes
    others = [made_of({DEK: found}, part=NoncePart(part, parts)) for part in range(1, parts)]
    assert repeated(made, *others) == ["it has the nonce of the module at byte 7000."]
    kept = {entry[:12] for each in (made, *others) for entry in each.entries(DEK)}
    assert kept == set(found)
    assert all(each.invocations == {DEK: (20_001, 20_001)} for each in (made, *others))


def test_one_nonce_for_all_modules_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonces, "MEMORY_BYTES", 10_000)
    made = made_of({DEK: [b"n" * 12] * 5_000})
    assert made.kept_bytes <= 10_000
    assert made.part.parts == 1
    assert repeated(made)


def test_nonces_of_a_chunk_are_added_at_once() -> None:
    found = random_nonces(1_000, 1)
    entries = [nonce_entry(nonce, offset, b"tag.") for offset, nonce in enumerate(found)]
    made = FileNonces()
    for start in range(0, len(entries), 100):
        made.add(DEK, b"".join(entries[start : start + 100]), 40)
    made.add(OTHER_DEK, b"")
    assert made.invocations == {DEK: (1_000, 400)}
    assert list(made.entries(DEK)) == entries
    # The same module, met again, and another one with its nonce.
    made.add(DEK, entries[5] + nonce_entry(found[7], 100_000, b"tag."))
    assert repeated(made) == ["it has the nonce of the module at byte 7."]


both = pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "read again"])


@both
@pytest.mark.parametrize("memory_bytes", [2**26, 10_000])
def test_a_nonce_of_two_files_is_found(monkeypatch: pytest.MonkeyPatch, memory_bytes: int, is_kept: bool) -> None:
    first, second = random_nonces(300, 1), random_nonces(300, 2)
    files = {"a": ({DEK: first, OTHER_DEK: second}, b"aaaa"), "b": ({DEK: [*second, first[250]]}, b"bbbb")}
    monkeypatch.setattr(nonces, "MEMORY_BYTES", memory_bytes)
    assert outcomes(files, is_kept=is_kept and memory_bytes == 2**26) == {
        "nonce-shared": (Outcome.BROKEN, ["one module has the same DEK and nonce in a and b."]),
        "invocations-shared": (Outcome.HOLDS, []),
    }


def test_a_nonce_under_two_deks_is_no_reuse() -> None:
    found = random_nonces(10, 1)
    files = {"a": ({DEK: found}, b"aaaa"), "b": ({OTHER_DEK: found}, b"bbbb")}
    assert outcomes(files)["nonce-shared"][0] is Outcome.HOLDS


@both
def test_a_copy_is_no_reuse(is_kept: bool) -> None:
    found = {DEK: random_nonces(10, 1)}
    files = {"a": (found, b"aaaa"), "copy of a": (found, b"aaaa")}
    assert outcomes(files, is_kept=is_kept)["nonce-shared"][0] is Outcome.HOLDS
    assert outcomes(files | {"c": (found, b"cccc")}, is_kept=is_kept)["nonce-shared"] == (
        Outcome.BROKEN,
        ["10 modules have the same DEK and nonce in a and c."],
    )


def test_invocations_of_all_files_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number}": ({DEK: random_nonces(10, number)}, b"tag.") for number in range(3)}
    monkeypatch.setattr(nonces, "MAX_INVOCATIONS", 60)
    assert outcomes(files)["invocations-shared"][0] is Outcome.HOLDS
    monkeypatch.setattr(nonces, "MAX_INVOCATIONS", 59)
    assert outcomes(files)["invocations-shared"] == (
        Outcome.BROKEN,
        ["one DEK encrypts 30 modules of 3 files, of which 30 are pages."],
    )


def test_a_file_that_cannot_be_read_again_is_no_pass() -> None:
    shared = SharedNonces(lambda names, _: [(name, None) for name in names])
    for name in "ab":
        shared.add_file(name, made_of({DEK: random_nonces(3, 1)}).invocations, None)
    book = RuleBook([Scope.DATA_SET])
    shared.check(book)
    (result,) = (result for result in book.results() if result.rule.id == "nonce-shared")
    assert result.outcome is Outcome.NOT_CHECKED
    assert result.reasons == ("a: it cannot be read again", "b: it cannot be read again")
