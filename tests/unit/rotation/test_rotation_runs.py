"""Runs that are interrupted, repeated, disturbed by others, or lose their KMS."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import FaultyKms
from rotation_case import COLUMNS, MASTER_KEYS, TABLE, Case, key_material_file, materials, tree_digest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    FileChangedError,
    KeyMaterialError,
    KmsUnavailableError,
    StorageFailedError,
)
from parquet_keytools.keys import key_wrapping as file_key_retriever
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation import file_keys, rotate
from parquet_keytools.rotation.report import FileRotation, KmsCalls, Outcome
from parquet_keytools.storage.local_files import LOCK_NAME, exclusive_folder
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import LocalSink

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])


class CutOffError(BaseException):
    """Simulates the end of a process."""


def cut_off_after(count: int) -> Callable[[FileRotation], None]:
    told: list[FileRotation] = []

    def on_file(result: FileRotation) -> None:
        told.append(result)
        if len(told) == count:
            raise CutOffError

    return on_file


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "FILES_PER_BATCH", 4)
    monkeypatch.setattr(file_keys, "FILES_PER_READ", 2)


def make(tmp_path: Path, count: int, kind: str = "keystore", **settings: Any) -> Case:
    case = Case.make(tmp_path, kind, **settings)
    tools = case.tools()
    first = case.write("000.parquet", tools=tools)
    for i in range(1, count):
        # Copies are separate files here, and faster to make.
        shutil.copy(first, case.folder / f"{i:03}.parquet")
        if key_material_file(first).exists():
            shutil.copy(key_material_file(first), key_material_file(case.folder / f"{i:03}.parquet"))
    return case


# --- interrupted, and called again ---


@every_key_material
@pytest.mark.usefixtures("small_batches")
def test_a_run_continues_where_files_show_their_version(tmp_path: Path, key_material: str) -> None:
    case = make(tmp_path, 10, key_material=key_material)
    case.add_version()
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(6))
    between = tree_digest(case.folder)
    report = case.tools().rotate(case.folder)
    # The interrupted batch was finished.
    current = report.counts[Outcome.ALREADY_CURRENT]
    assert 6 <= current <= 8 and report.counts == {Outcome.ALREADY_CURRENT: current, Outcome.ROTATED: 10 - current}
    after = tree_digest(case.folder)
    assert after.keys() == between.keys() and sum(after[name] != between[name] for name in after) == 10 - current
    case.disable(1)
    assert case.tools().dataset(case.folder).to_table().num_rows == 10 * TABLE.num_rows


@every_key_material
@pytest.mark.parametrize("options", [{}, {"new_keks": True}], ids=["versions are hidden", "new KEKs"])
@pytest.mark.usefixtures("small_batches")
def test_a_run_starts_over_where_files_do_not_show_what_was_done(
    tmp_path: Path, key_material: str, options: dict[str, Any]
) -> None:
    """At full cost, and without loss: re-wrapped keys are re-wrapped once more."""
    case = make(tmp_path, 6, "keystore" if options else "in_memory", key_material=key_material)
    # Each file has its own keys.
    for path in sorted(case.folder.glob("*.parquet")):
        case.write(path.name)
    case.add_version()
    before = tree_digest(case.folder)
    first: list[FileRotation] = []

    def on_file(file: FileRotation) -> None:
        first.append(file)
        if len(first) == 5:
            raise CutOffError

    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=on_file, **options)
    assert all(case.tools().read_table(case.folder / f"00{number}.parquet").equals(TABLE) for number in range(6))
    report = case.tools().rotate(case.folder, **options)
    assert report.counts == Counter({Outcome.ROTATED: 6})
    # With new KEKs, the files of the first run share three of them.
    assert report.kms_calls.total >= 6 * len(("kf", "ka", "kb")) or options
    assert tree_digest(case.folder).keys() == before.keys()
    case.disable(1)
    assert case.tools().dataset(case.folder).to_table().num_rows == 6 * TABLE.num_rows


def test_a_move_to_another_kms_continues(tmp_path: Path) -> None:
    """The moved keys unwrap there, and not in the remaining KMS."""
    case, other = make(tmp_path, 3), InMemoryKms(dict.fromkeys(MASTER_KEYS))
    with pytest.raises(CutOffError):
        case.move_to(other, case.folder, on_file=cut_off_after(2))
    assert case.move_to(other, case.folder).succeeded
    assert case.tools(other).dataset(case.folder).to_table().num_rows == 3 * TABLE.num_rows


@pytest.mark.parametrize("new_keks", [False, True])
def test_a_new_version_begins_anew(tmp_path: Path, new_keks: bool) -> None:
    """With new KEKs, too, where no other code looks up the newest version."""
    case = make(tmp_path, 4)
    case.add_version()
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, new_keks=new_keks, on_file=cut_off_after(3))
    case.add_version()
    assert case.tools().rotate(case.folder, new_keks=new_keks).counts == Counter({Outcome.ROTATED: 4})
    case.disable(1)
    case.disable(2)
    assert case.tools().dataset(case.folder).to_table().num_rows == 4 * TABLE.num_rows


@pytest.mark.parametrize("rotated_before", [[], ["kb"]])
def test_a_new_version_of_what_was_current_begins_anew(tmp_path: Path, rotated_before: list[str]) -> None:
    case = make(tmp_path, 3)
    for name in rotated_before:
        case.add_version(name)
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(2))
    case.add_version("ka")
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ROTATED: 3})
    case.disable(1, "ka")
    assert case.tools().dataset(case.folder).to_table().num_rows == 3 * TABLE.num_rows


def test_failed_files_get_another_turn(tmp_path: Path) -> None:
    case = make(tmp_path, 3, key_material="external")
    case.add_version()
    lost = key_material_file(case.folder / "000.parquet")
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(2))
    lost.write_bytes(content)
    outcomes = [file.outcome for file in case.tools().rotate(case.folder).files]
    assert sorted(outcome.value for outcome in outcomes) == ["already current", "already current", "rotated"]


@every_key_material
def test_within_a_kms_files_go_on_to_name_their_instance(tmp_path: Path, key_material: str) -> None:
    """Files of another KMS get its name; here only the master key's version has changed."""
    case = make(tmp_path, 1, "in_memory", key_material=key_material)
    path = case.folder / "000.parquet"
    kms = {"type": "in_memory", "keys": list(MASTER_KEYS), "instance_id": "another"}
    document = {
        "version": 1,
        "kms": kms,
        "tables": {"t": {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings}},
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    before = {material.kms_instance_id for material in materials(tools, path)}
    assert tools.rotate(path).counts == Counter({Outcome.ROTATED: 1})
    assert {material.kms_instance_id for material in materials(tools, path)} == before != {"another"}


# --- others that change the same files ---


def around_replacements(monkeypatch: pytest.MonkeyPatch, act: Callable[[Callable[[], Any]], Any]) -> None:
    """Wrap the replacement of a file, after its keys were re-wrapped; replacements by `act` are not wrapped."""
    acting: list[bool] = []

    def disturbed(replace: Callable[..., Any], *arguments: Any) -> Any:
        if acting:
            return replace(*arguments)
        acting.append(True)
        try:
            return act(partial(replace, *arguments))
        finally:
            acting.clear()

    for name in ("replace_tail", "replace_external_material"):
        monkeypatch.setattr(rotate, name, partial(disturbed, getattr(rotate, name)))


@every_key_material
def test_a_file_that_is_replaced_between_read_and_replace(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path = case.write()
    case.add_version()
    newer = TABLE.slice(0, 10)

    def disturbed(replace: Callable[[], Any]) -> Any:
        case.write(table=newer)
        return replace()

    around_replacements(monkeypatch, disturbed)
    report = case.tools().rotate(path)
    # The new file was written with the new version.
    assert report.counts == Counter({Outcome.ALREADY_CURRENT: 1})
    assert case.tools().read_table(path).equals(newer)


def test_a_file_that_is_replaced_while_its_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key material file is the new file's, or gone, when it is looked up."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    case.add_version()
    read = file_keys.read_external_material
    for changes in ({}, {"key_material": "internal"}):
        turns = []

        def disturbed(location: FileLocation, changes: Any = changes, turns: list[Any] = turns) -> Any:
            turns.append(location)
            if len(turns) == 1:
                case.write(tools=case.tools(**changes))
            return read(location)

        monkeypatch.setattr(file_keys, "read_external_material", disturbed)
        assert case.tools().rotate(path).counts == Counter({Outcome.ALREADY_CURRENT: 1})
        assert len(turns) == (1 if changes else 2)
        assert case.tools().read_table(path).equals(TABLE)


@every_key_material
def test_somebody_who_never_stops(tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path = case.write()
    other, tools = case.tools(), case.tools()
    turns: list[bool] = []

    def disturbed(replace: Callable[[], Any]) -> Any:
        is_locked = (case.folder / LOCK_NAME).exists()
        turns.append(is_locked)
        if not is_locked:
            other.rotate(path)
        return replace()

    around_replacements(monkeypatch, disturbed)
    assert tools.rotate(path).counts == Counter({Outcome.ROTATED: 1})
    # In the last attempt, the folder is locked.
    assert turns == [False, True]
    assert tools.read_table(path).equals(TABLE)


def test_a_writer_that_minds_no_lock_and_never_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()

    def disturbed(replace: Callable[[], Any]) -> Any:
        copy = path.with_name(".copy")
        shutil.copy(path, copy)
        copy.rename(path)
        return replace()

    around_replacements(monkeypatch, disturbed)
    before = path.read_bytes()
    (file,) = case.tools().rotate(path).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "OutputError")
    assert path.read_bytes() == before
    assert [name.name for name in case.folder.iterdir()] == [path.name]


def test_waits_for_the_lock_of_the_folder(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    before = path.read_bytes()
    with exclusive_folder(FileLocation.resolve(path)):
        thread = threading.Thread(target=lambda: case.tools().rotate(path))
        thread.start()
        thread.join(1)
        assert thread.is_alive() and path.read_bytes() == before
    thread.join(30)
    assert path.read_bytes() != before and case.tools().read_table(path).equals(TABLE)


@every_key_material
def test_many_threads_rotate_and_read(tmp_path: Path, key_material: str) -> None:
    case = make(tmp_path, 3, "in_memory", key_material=key_material)
    failures: list[BaseException | FileRotation] = []
    done = threading.Event()

    def rotate() -> None:
        try:
            for _ in range(2):
                failures.extend(case.tools().rotate(case.folder).failures)
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                for path in case.folder.glob("*.parquet"):
                    assert case.tools().read_table(path).equals(TABLE)
        except BaseException as error:
            failures.append(error)

    rotating = [threading.Thread(target=rotate) for _ in range(4)]
    reading = threading.Thread(target=read)
    for thread in [*rotating, reading]:
        thread.start()
    for thread in rotating:
        thread.join()
    done.set()
    reading.join()
    assert failures == []


def test_a_file_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(tmp_path, 2)
    case.add_version()
    read = file_keys.read_tail

    def remove_first(location: FileLocation) -> Any:
        (case.folder / "000.parquet").unlink(missing_ok=True)
        return read(location)

    monkeypatch.setattr(file_keys, "read_tail", remove_first)
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.NOTHING_TO_ROTATE: 1, Outcome.ROTATED: 1}) and report.succeeded


@every_key_material
def test_a_file_that_is_away_for_a_moment_is_not_passed_over(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(tmp_path, 1, key_material=key_material)
    path = case.folder / "000.parquet"
    case.add_version()
    replaced = path if key_material == "internal" else key_material_file(path)
    away: list[Path] = []

    def disturbed(replace: Callable[[], Any]) -> Any:
        if away:
            return replace()
        away.append(replaced.rename(tmp_path / "away"))
        try:
            return replace()
        finally:
            away[0].rename(replaced)

    around_replacements(monkeypatch, disturbed)
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ROTATED: 1})
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


# --- the KMS ---


def test_a_kms_that_is_down_ends_the_run(tmp_path: Path, small_batches: None) -> None:
    kms = FaultyKms({name: name.ljust(16).encode() for name in MASTER_KEYS})
    case = Case(tmp_path / "data", kms, None)
    case.folder.mkdir()
    for i in range(8):
        case.write(f"{i}.parquet")
    before = tree_digest(case.folder)
    kms.fail("timeout")
    report = case.tools().rotate(case.folder)
    assert isinstance(report.stopped_by, KmsUnavailableError) and not report.succeeded
    assert report.counts == Counter({Outcome.FAILED: 1, Outcome.NOT_ATTEMPTED: 7})
    assert tree_digest(case.folder) == before
    kms.failure = None
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 8})


def test_a_kms_that_refuses_one_key_does_not_end_it(tmp_path: Path, small_batches: None) -> None:
    kms = FaultyKms({name: name.ljust(16).encode() for name in MASTER_KEYS})
    case = Case(tmp_path / "data", kms, None, {"column_keys": {"ka": ["a"]}})
    case.folder.mkdir()
    for i in range(8):
        case.write(f"{i}.parquet", tools=case.tools(footer_key="kb") if i % 4 == 3 else None)
    kms.fail("refused", "kf")
    report = case.tools().rotate(case.folder)
    assert report.stopped_by is None
    assert report.counts == Counter({Outcome.FAILED: 6, Outcome.ROTATED: 2})


def test_a_kms_that_returns_wrong_keys_changes_nothing(tmp_path: Path) -> None:
    kms = FaultyKms({name: name.ljust(16).encode() for name in MASTER_KEYS})
    case = Case(tmp_path / "data", kms, None)
    case.folder.mkdir()
    for key_material in ("internal", "external"):
        for double in (True, False):
            tools = case.tools(key_material=key_material, double_wrapping=double)
            case.write(f"{key_material}-{double}.parquet", tools=tools)
    before = tree_digest(case.folder)
    kms.fail("wrong_key")
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.FAILED: 4})
    assert tree_digest(case.folder) == before


def test_caches_of_the_tools_play_no_part(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path, tools = case.write(), case.tools()
    for _ in range(2):
        tools.read_table(path)
        before = {material.wrapped_kek for material in materials(tools, path)}
        assert tools.rotate(path).kms_calls == KmsCalls(rewrap=3, unwrap=3)
        assert not before & {material.wrapped_kek for material in materials(tools, path)}


# --- readers ---


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key material is looked up after it was replaced with the new file's, or removed."""
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    newer = TABLE.slice(0, 10)
    read = file_key_retriever.read_key_materials
    for changes in ({}, {"key_material": "internal"}):
        turns: list[FileLocation] = []

        def disturbed(location: FileLocation, changes: Any = changes, turns: list[Any] = turns) -> Any:
            turns.append(location)
            if len(turns) == 1:
                case.write(table=newer, tools=case.tools(**changes))
            return read(location)

        monkeypatch.setattr(file_key_retriever, "read_key_materials", disturbed)
        assert case.tools().read_table(path).equals(newer)
        monkeypatch.undo()
        case.write()


def test_somebody_who_replaces_a_file_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    read = file_key_retriever.read_key_materials

    def disturbed(location: FileLocation) -> Any:
        monkeypatch.setattr(file_key_retriever, "read_key_materials", read)
        case.write()
        monkeypatch.setattr(file_key_retriever, "read_key_materials", disturbed)
        return read(location)

    monkeypatch.setattr(file_key_retriever, "read_key_materials", disturbed)
    with pytest.raises(FileChangedError, match="Open it again"):
        case.tools().read_table(path)


def test_key_material_that_is_missing_is_said(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    key_material_file(path).write_text("{}")
    with pytest.raises(KeyMaterialError, match="has no 'footerKey'"):
        case.tools().read_table(path)


# --- the storage ---


@pytest.mark.parametrize(
    ("number", "key_material"),
    [(errno.ENOSPC, "internal"), (errno.EDQUOT, "external"), (errno.EROFS, "internal")],
)
def test_a_storage_that_takes_no_more_ends_the_run(
    tmp_path: Path, key_material: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(tmp_path, 20, "in_memory", key_material=key_material)
    before = tree_digest(case.folder)
    write, left = LocalSink.write_at, [3]

    def write_at(self: LocalSink, offset: int, data: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        write(self, offset, data)

    monkeypatch.setattr(LocalSink, "write_at", write_at)
    report = case.tools().rotate(case.folder)
    assert isinstance(report.stopped_by, StorageFailedError) and not report.succeeded
    assert os.strerror(number).lower() in str(report.stopped_by)
    assert report.counts[Outcome.FAILED] == 1 and report.counts[Outcome.ROTATED] <= 3
    assert report.counts[Outcome.NOT_ATTEMPTED] >= 16 and len(report.failures) == 1
    assert sum(report.counts.values()) == 20
    monkeypatch.undo()
    changed = {name for name, digest in tree_digest(case.folder).items() if before.get(name) != digest}
    assert len(changed) == report.counts[Outcome.ROTATED] and set(tree_digest(case.folder)) == set(before)
    report = case.tools().rotate(case.folder)
    assert report.succeeded and sum(report.counts.values()) == 20


# --- keys that the KMS does not re-wrap by itself ---


class KmsWithoutRewrap(InMemoryKms):
    """Does the same as Cloud KMS, which re-wraps by unwrapping and wrapping."""

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("moved", "plaintext_footer", "key_material"),
    [(False, False, "internal"), (False, True, "external"), (True, False, "external"), (True, True, "internal")],
)
@pytest.mark.usefixtures("small_batches")
def test_keys_that_must_be_unwrapped_cost_one_call_each(
    tmp_path: Path, moved: bool, plaintext_footer: bool, key_material: str
) -> None:
    """If the KMS does not re-wrap, or for a move to another KMS: new KEKs replace the old ones."""
    kms, other = KmsWithoutRewrap(dict.fromkeys(MASTER_KEYS)), InMemoryKms(dict.fromkeys(MASTER_KEYS))
    settings = {"key_material": key_material, "plaintext_footer": plaintext_footer}
    case = Case(tmp_path / "data", kms, None, {**COLUMNS, **settings})
    # Each writer has its own KEKs: 6 for each of 3 master keys.
    paths = [case.write(f"{i}.parquet") for i in range(6)]
    whole = shutil.copytree(case.folder, tmp_path / "whole")
    old = {material.kek_id for path in paths for material in materials(case.tools(), path)}
    rotate = partial(case.move_to, other) if moved else case.tools().rotate
    foreseen = rotate(case.folder, dry_run=True).expected_kms_calls
    with pytest.raises(CutOffError):
        rotate(case.folder, on_file=cut_off_after(4))
    assert rotate(case.folder).succeeded
    tools = case.tools(other if moved else kms)
    new = {material.kek_id for path in paths for material in materials(tools, path)}
    # One for each master key; for each of the two runs if the second one continues.
    assert len(old) == 18 and len(new) == (6 if moved else 3) and not old & new
    assert all(tools.read_table(path).equals(TABLE) for path in paths)
    done = rotate(whole).kms_calls
    assert (done.wrap, done.unwrap, done.rewrap) == (3, 18 + 3, 0)
    assert (done.wrap, done.unwrap, done.rewrap) == (foreseen.wrap, foreseen.unwrap, foreseen.rewrap)
