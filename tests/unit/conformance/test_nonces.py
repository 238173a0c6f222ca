"""Nonces of one file, and of several files under one DEK."""

from __future__ import annotations

import base64
import random
import shutil
import tracemalloc
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from fake_spark import FakeSpark

from parquet_keytools import Keytools
from parquet_keytools.conformance import file_keys
from parquet_keytools.conformance.file_keys import FileNonces, NoncePart, SharedNonces, nonce_entry
from parquet_keytools.conformance.report import (
    FILE_SCOPES,
    FileReport,
    Outcome,
    RuleBook,
    RuleResult,
    Scope,
    Verdict,
)
from parquet_keytools.errors import KeyNotAvailableError
from parquet_keytools.keys.key_wrapping import FileKeyRetriever
from parquet_keytools.spark import pipelines

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


def outcomes(files: dict[str, tuple[Made, bytes]]) -> dict[str, tuple[Outcome, list[str]]]:
    """Compare files."""
    passes = []

    def read_again(names: Collection[str], part: NoncePart) -> Iterator[tuple[str, FileNonces | None]]:
        passes.append(part)
        return ((name, made_of(*files[name], part)) for name in names)

    shared = SharedNonces(read_again)
    for name, (found, check) in files.items():
        made = made_of(found, check)
        shared.add_file(name, made.invocations)
    book = RuleBook([Scope.DATA_SET])
    shared.check(book)
    return {
        result.rule.id: (result.outcome, [finding.message for finding in result.findings] + list(result.reasons))
        for result in book.results()
        if result.rule.id in ("nonce-shared", "invocations-shared")
    }


def test_many_deks_take_little_memory() -> None:
    """Each column of a wide table has its own DEK."""
    tracemalloc.start()
    made = FileNonces()
    for number in range(10_000):
        made.add(number.to_bytes(16, "big"), nonce_entry(b"n" * 12, number, b"tag."))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made.invocations) == 10_000
    assert taken < 10_000_000


@pytest.mark.parametrize("memory_bytes", [2**26, 25_000])
def test_a_nonce_that_comes_twice_is_found_in_one_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", memory_bytes)
    found = random_nonces(5_000, 1)
    found.append(found[2_000])
    made = made_of({DEK: found})
    parts = made.part.parts
    assert (parts > 1) is (memory_bytes < 2**26)
    assert made.kept_bytes <= memory_bytes
    others = [made_of({DEK: found}, part=NoncePart(part, parts)) for part in range(1, parts)]
    assert repeated(made, *others) == ["it has the nonce of the module at byte 2000."]
    kept = {entry[:12] for each in (made, *others) for entry in each.entries(DEK)}
    assert kept == set(found)
    assert all(each.invocations == {DEK: (5_001, 5_001)} for each in (made, *others))


def test_one_nonce_for_all_modules_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", 10_000)
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
    # The same module again, and another module with its nonce.
    made.add(DEK, entries[5] + nonce_entry(found[7], 100_000, b"tag."))
    assert repeated(made) == ["it has the nonce of the module at byte 7."]


@pytest.mark.parametrize("memory_bytes", [2**26, 10_000])
def test_a_nonce_of_two_files_is_found(monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> None:
    first, second = random_nonces(300, 1), random_nonces(300, 2)
    files = {"a": ({DEK: first, OTHER_DEK: second}, b"aaaa"), "b": ({DEK: [*second, first[250]]}, b"bbbb")}
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", memory_bytes)
    assert outcomes(files) == {
        "nonce-shared": (Outcome.BROKEN, ["one module has the same DEK and nonce in a and b."]),
        "invocations-shared": (Outcome.HOLDS, []),
    }


def test_a_nonce_under_two_deks_is_no_reuse() -> None:
    found = random_nonces(10, 1)
    files = {"a": ({DEK: found}, b"aaaa"), "b": ({OTHER_DEK: found}, b"bbbb")}
    assert outcomes(files)["nonce-shared"][0] is Outcome.HOLDS


def test_a_copy_is_no_reuse() -> None:
    found = {DEK: random_nonces(10, 1)}
    files = {"a": (found, b"aaaa"), "copy of a": (found, b"aaaa")}
    assert outcomes(files)["nonce-shared"][0] is Outcome.HOLDS
    assert outcomes(files | {"c": (found, b"cccc")})["nonce-shared"] == (
        Outcome.BROKEN,
        ["10 modules have the same DEK and nonce in a and c."],
    )


def test_invocations_of_all_files_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number}": ({DEK: random_nonces(10, number)}, b"tag.") for number in range(3)}
    monkeypatch.setattr(file_keys, "MAX_INVOCATIONS", 60)
    assert outcomes(files)["invocations-shared"][0] is Outcome.HOLDS
    monkeypatch.setattr(file_keys, "MAX_INVOCATIONS", 59)
    assert outcomes(files)["invocations-shared"] == (
        Outcome.BROKEN,
        ["one DEK encrypts 30 modules of 3 files, of which 30 are pages."],
    )


# --- files that have changed when they are read again ---

FIRST, SECOND = random_nonces(300, 1), random_nonces(300, 2)
NOT_READ_AGAIN = "changed or could not be read again"


def shared_result(
    before: dict[str, Made], later: Callable[[str, NoncePart], FileNonces | None], missing: str = ""
) -> tuple[Outcome, tuple[str, ...], int]:
    """Compare files whose nonces are read again."""

    def read_again(names: Collection[str], part: NoncePart) -> Iterator[tuple[str, FileNonces | None]]:
        return ((name, later(name, part)) for name in names if name != missing)

    shared = SharedNonces(read_again)
    for name, found in before.items():
        shared.add_file(name, made_of(found).invocations)
    book = RuleBook([Scope.DATA_SET])
    shared.check(book)
    (result,) = (result for result in book.results() if result.rule.id == "nonce-shared")
    return result.outcome, result.reasons, result.breaches


def test_a_file_that_cannot_be_read_again_is_no_pass() -> None:
    files = {"a": {DEK: FIRST}, "b": {DEK: SECOND}}
    reasons = (f"a: it {NOT_READ_AGAIN}", f"b: it {NOT_READ_AGAIN}")
    assert shared_result(files, lambda *_: None) == (Outcome.NOT_CHECKED, reasons, 0)
    # As with keys that are refused now.
    assert shared_result(files, lambda _, part: FileNonces(part)) == (Outcome.NOT_CHECKED, reasons, 0)


@pytest.mark.parametrize("memory_bytes", [2**26, 10_000])
@pytest.mark.parametrize(
    "changed",
    [{}, {DEK: SECOND[:-1]}, {DEK: [*SECOND, b"n" * 12]}, {OTHER_DEK: SECOND}, {DEK: SECOND, OTHER_DEK: SECOND}],
    ids=["empty", "less", "more", "another DEK", "one more DEK"],
)
def test_a_file_that_is_another_one_when_it_is_read_again_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, changed: Made, memory_bytes: int
) -> None:
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", memory_bytes)
    third = random_nonces(300, 3)
    files: dict[str, Made] = {"a": {DEK: FIRST, OTHER_DEK: FIRST}, "b": {DEK: SECOND}, "c": {OTHER_DEK: third}}
    last_part = []

    def later(name: str, part: NoncePart) -> FileNonces:
        # Only in the last pass: all earlier passes were fine.
        is_last = part.part == part.parts - 1
        last_part.append(is_last)
        return made_of(changed if name == "b" and is_last else files[name], part=part)

    assert shared_result(files, later) == (Outcome.NOT_CHECKED, (f"b: it {NOT_READ_AGAIN}",), 0)
    assert (False in last_part) is (memory_bytes < 2**26)
    same = shared_result(files, lambda name, part: made_of(files[name], part=part))
    assert same == (Outcome.HOLDS, (), 0)


def test_a_file_that_is_missing_when_files_are_read_again_is_no_pass() -> None:
    files = {"a": {DEK: FIRST}, "b": {DEK: SECOND}}
    result = shared_result(files, lambda name, part: made_of(files[name], part=part), missing="a")
    assert result == (Outcome.NOT_CHECKED, (f"a: it {NOT_READ_AGAIN}",), 0)


def test_other_deks_of_a_file_do_not_matter_when_it_is_read_again() -> None:
    alone = b"dek" * 5 + b"3"
    files: dict[str, Made] = {"a": {DEK: FIRST, OTHER_DEK: FIRST}, "b": {DEK: SECOND}}
    later: dict[str, Made] = {"a": {DEK: FIRST}, "b": {DEK: SECOND, alone: SECOND}}
    assert shared_result(files, lambda name, part: made_of(later[name], part=part))[0] is Outcome.HOLDS


def test_a_breach_stays_one_though_a_file_could_not_be_read_again() -> None:
    files = {name: {DEK: [*random_nonces(30, seed), b"n" * 12]} for seed, name in enumerate("abc")}

    def later(name: str, part: NoncePart) -> FileNonces | None:
        return None if name == "c" else made_of(files[name], name.encode() * 4, part)

    assert shared_result(files, later) == (Outcome.BROKEN, (f"c: it {NOT_READ_AGAIN}",), 1)


# --- the same with files ---


@pytest.fixture
def keytools() -> Keytools:
    """Keys of the files."""
    key = base64.b64encode(b"k" * 16).decode()
    table = {"footer_key": "key", "unlisted_columns": "footer_key"}
    return Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": {"key": key}}, "tables": {"t": table}}
    )


@pytest.fixture
def folder(tmp_path: Path, keytools: Keytools) -> Path:
    """Two files, one a copy of the other: they share a DEK, but no nonce for two plaintexts."""
    folder = tmp_path / "data"
    folder.mkdir()
    keytools.write_table(pa.table({f"column {number}": [1, 2, 3] for number in range(15)}), folder / "a.parquet")
    shutil.copy(folder / "a.parquet", folder / "b.parquet")
    return folder


def refuse_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise KeyNotAvailableError("the KMS refuses.")

    monkeypatch.setattr(FileKeyRetriever, "footer_dek", refused)


def overwrite_footer(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"not what it was")


def empty(path: Path) -> None:
    path.write_bytes(b"")


changes = pytest.mark.parametrize("change", ["keys", overwrite_footer, empty])


def make_change(change: str | Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if callable(change):
        change(path)
    else:
        refuse_keys(monkeypatch)


def result_of(rules: Iterable[RuleResult], rule_id: str) -> RuleResult:
    return next(result for result in rules if result.rule.id == rule_id)


@changes
@pytest.mark.parametrize("is_broken", [False, True], ids=["", "and was broken before"])
def test_a_file_that_changes_between_its_passes_is_no_pass(
    monkeypatch: pytest.MonkeyPatch,
    keytools: Keytools,
    folder: Path,
    change: str | Callable[[Path], None],
    is_broken: bool,
) -> None:
    path = folder / "a.parquet"
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", 1_000)
    report = keytools.verify_file(path)
    assert report.verdict is Verdict.WEAK  # It has no AAD prefix.
    assert report.result("nonce-reuse").outcome is Outcome.HOLDS
    check = FileNonces.check

    def check_and_change(self: FileNonces, book: RuleBook) -> None:
        check(self, book)
        if is_broken:
            book.broken("nonce-reuse", "it has the nonce of another one.")
        make_change(change, path, monkeypatch)

    monkeypatch.setattr(FileNonces, "check", check_and_change)
    result = keytools.verify_file(path).result("nonce-reuse")
    assert result.outcome is (Outcome.BROKEN if is_broken else Outcome.NOT_CHECKED)
    assert result.reasons == (f"the file {NOT_READ_AGAIN}",)


@changes
def test_a_file_of_a_folder_that_changes_before_it_is_read_again_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, keytools: Keytools, folder: Path, change: str | Callable[[Path], None]
) -> None:
    monkeypatch.setattr(file_keys, "MEMORY_BYTES", 1_000)
    unchanged = result_of(keytools.verify_folder(folder).rules, "nonce-shared")
    assert (unchanged.outcome, unchanged.reasons) == (Outcome.HOLDS, ())

    def on_progress(report: FileReport) -> None:
        if report.path.endswith("b.parquet"):
            make_change(change, folder / "a.parquet", monkeypatch)

    result = result_of(keytools.verify_folder(folder, on_progress=on_progress).rules, "nonce-shared")
    assert result.outcome is Outcome.NOT_CHECKED
    changed = ["a.parquet", "b.parquet"] if change == "keys" else ["a.parquet"]
    assert result.reasons == tuple(f"{name}: it {NOT_READ_AGAIN}" for name in changed)


@changes
def test_a_file_that_changes_before_spark_reads_it_again_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, change: str | Callable[[Path], None]
) -> None:
    pytest.importorskip("pyspark")
    config = tmp_path / "keys.yaml"
    key = base64.b64encode(b"k" * 16).decode()
    config.write_text(
        f"{{version: 1, kms: {{type: in_memory, keys: {{key: {key}}}}}, "
        "tables: {t: {footer_key: key, unlisted_columns: footer_key}}}"
    )

    def rows() -> list[dict[str, Any]]:
        report = pipelines.verify(FakeSpark(2), folder, config)
        return [row for row in report.rule_rows() if row["rule"] == "nonce-shared"]

    assert [row["outcome"] for row in rows()] == [Outcome.HOLDS.value]
    check = SharedNonces.check

    def change_and_check(nonces: SharedNonces, book: RuleBook) -> None:
        make_change(change, folder / "a.parquet", monkeypatch)
        check(nonces, book)

    monkeypatch.setattr(SharedNonces, "check", change_and_check)
    changed = ["a.parquet", "b.parquet"] if change == "keys" else ["a.parquet"]
    found = {(row["outcome"], row["message"]) for row in rows()}
    assert found == {(Outcome.NOT_CHECKED.value, f"{name}: it {NOT_READ_AGAIN}") for name in changed}
