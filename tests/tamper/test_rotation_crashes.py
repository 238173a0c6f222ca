"""Rotations that are killed at file system calls, or find the disk full there: in a soak at every call."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crash_points import RENAMES, WRITES, Crasher, Ended, Job
from rotation_case import (
    MASTER_KEYS,
    TABLE,
    Case,
    external_entries,
    key_material_file,
    materials,
    names,
    tree_digest,
)
from soak import SOAK, sample

from parquet_keytools import Keytools
from parquet_keytools.format.file_layout import MAGIC_ENCRYPTED_FOOTER, with_trailer
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.file_keys import read_tail
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.rotation.rotate import footer_of
from parquet_keytools.storage.local_files import LOCK_NAME
from parquet_keytools.storage.locations import FileLocation

FILES = ("x.parquet", "p=1/y.parquet")
TESTS = Path(__file__).resolve().parents[1]

KINDS: dict[str, dict[str, Any]] = {
    "external": {"key_material": "external"},
    "internal, encrypted footer": {"key_material": "internal"},
    "internal, plaintext footer": {"key_material": "internal", "plaintext_footer": True},
}


@dataclass(frozen=True)
class Scenario:
    """An operation on a data set.

    Attributes:
        kind: The kind of its files.
        action: Method of `Keytools`.
        options: Its options.
        files: The minimum number of points for each of its files.
    """

    kind: str
    action: str = "rotate"
    options: tuple[tuple[str, Any], ...] = ()
    least_points: int = 8

    def __str__(self) -> str:
        return ", ".join([self.action, self.kind, *(name for name, _ in self.options)])


SCENARIOS = [
    *(Scenario(kind) for kind in KINDS),
    *(Scenario(kind, options=(("new_keks", True),)) for kind in ("external", "internal, encrypted footer")),
    *(Scenario(kind, "rekey_in_place") for kind in KINDS),
]


class DataSet:
    """Files in their state before a rotation, any number of copies of them, and an undisturbed run."""

    def __init__(self, tmp_path: Path, scenario: Scenario, crasher: Crasher) -> None:
        self.scenario = scenario
        self.case = Case.make(tmp_path, "keystore", column_keys={"ka": ["a"]}, **KINDS[scenario.kind])
        for name in FILES:
            self.case.write(name)
        self.old_keks = {material.kek_id for material in self.materials(self.case.folder)}
        self.case.add_version()
        self.names = names(self.case.folder)
        self._count = 0
        self._tmp_path = tmp_path
        self.finished = self.copy()
        self.whole = crasher.run(self.job(self.finished))
        assert not self.whole.killed and self.whole.error is None and self.whole.failures == []

    @property
    def tools(self) -> Keytools:
        return self.case.tools()

    def copy(self) -> Path:
        """Return a folder with a copy of the files."""
        self._count += 1
        folder = self._tmp_path / f"copy{self._count}"
        shutil.copytree(self.case.folder, folder)
        return folder

    def job(self, folder: Path) -> Job:
        scenario, keystore = self.scenario, self.case.folder.parent / "keystore.json"
        return Job(scenario.action, str(folder), str(keystore), self.case.settings, dict(scenario.options))

    def materials(self, folder: Path) -> list[KeyMaterial]:
        return [material for name in FILES for material in materials(self.tools, folder / name)]

    def assert_readable(self, folder: Path) -> None:
        """Each file has all values."""
        table = self.tools.dataset(folder, partitioning=None).to_table()
        assert table.equals(pa.concat_tables([TABLE] * len(FILES)))

    def assert_finished(self, folder: Path) -> None:
        """A repeated run completes, and leaves nothing behind that is not documented."""
        report = getattr(self.tools, self.scenario.action)(folder, **dict(self.scenario.options))
        assert report.succeeded, report
        self.assert_readable(folder)
        found = self.materials(folder)
        kms = self.case.kms
        assert {kms.wrapped_key_version(one.kms_wrapped_key, one.master_key_id) for one in found} == {"2"}
        if self.scenario.action == "rekey_in_place" or self.scenario.options:
            assert not self.old_keks & {one.kek_id for one in found}
        assert names(folder) == self.names
        # The old keys are no longer needed, also for files that the killed run wrote.
        if self.scenario.action == "rotate":
            assert [file.unknown for file in self.tools.key_inventory(folder)] == [None] * len(FILES)
            assert list(self.tools.files_using("kf", folder, version="1")) == []


@pytest.fixture(scope="module", params=SCENARIOS, ids=str)
def data(request: pytest.FixtureRequest, folder_in_memory: Path, crasher: Crasher) -> DataSet:
    return DataSet(Path(tempfile.mkdtemp(dir=folder_in_memory)), request.param, crasher)


def test_killed_at_a_call(crasher: Crasher, data: DataSet) -> None:
    scenario, whole = data.scenario, data.whole
    assert len(whole.calls) >= scenario.least_points * len(FILES), whole.calls
    data.assert_finished(data.finished)
    points = [(number, "kill") for number in range(1, len(whole.calls) + 1)]
    points += [(number, "torn") for number, (name, _) in enumerate(whole.calls, 1) if name in WRITES]
    for point, mode in sample(points, 20, SCENARIOS.index(scenario)):
        folder = data.copy()
        ended = crasher.run(replace(data.job(folder), point=point, mode=mode))
        assert ended.killed, (point, mode, ended)
        try:
            data.assert_readable(folder)
            data.assert_finished(folder)
        except Exception as error:
            error.add_note(f"killed {mode} at {point} of {len(whole.calls)}: {ended.calls[-3:]}")
            raise
        shutil.rmtree(folder)
    print(f"\n{scenario}: {len(whole.calls)} calls, {len(points)} points")


def test_killed_on_both_sides_of_each_rename(crasher: Crasher, data: DataSet) -> None:
    whole = data.whole
    renames = [number for number, (name, _) in enumerate(whole.calls, 1) if name in RENAMES]
    assert len(renames) >= len(FILES), whole.calls
    cases = list(itertools.product(renames, ("kill", "after")))
    for point, mode in sample(cases, 3, SCENARIOS.index(data.scenario)):
        folder = data.copy()
        ended = crasher.run(replace(data.job(folder), point=point, mode=mode))
        assert ended.killed and len(ended.calls) == point, (point, mode, ended)
        try:
            data.assert_readable(folder)
            data.assert_finished(folder)
        except Exception as error:
            error.add_note(f"killed {mode} at {point} of {len(whole.calls)}: {ended.calls[-3:]}")
            raise
        shutil.rmtree(folder)


def test_the_disk_is_full_from_a_call_on(crasher: Crasher, data: DataSet) -> None:
    whole = data.whole
    for point in sample(range(1, len(whole.calls) + 1), 20, SCENARIOS.index(data.scenario)):
        folder = data.copy()
        before = tree_digest(folder)
        ended = crasher.run(replace(data.job(folder), point=point, mode="no_space"))
        try:
            data.assert_readable(folder)
            # Files that could not be written are reported.
            is_told = bool(ended.failures) or ended.error is not None
            assert is_told or point > _last_that_takes_space(ended), ended
            assert all(
                "no space left" in text.lower() for text in [*ended.failures, ended.error or "no space left"]
            )
            if is_told:
                left = set(tree_digest(folder)) - set(before)
                assert not left
            data.assert_finished(folder)
        except Exception as error:
            error.add_note(f"full from {point} of {len(whole.calls)} on: {ended}")
            raise
        shutil.rmtree(folder)


def _last_that_takes_space(ended: Ended) -> int:
    from crash_points import TAKES_SPACE

    return max((number for number, (name, _) in enumerate(ended.calls, 1) if name in TAKES_SPACE), default=0)


TEMPORARY = re.compile(r"\.[0-9a-f]{12}-[0-9a-f]{8}\.tmp$")


def test_what_has_its_name_is_on_the_disk(data: DataSet) -> None:
    """After a power failure: each file was synced before its rename, and each rename before the next one."""
    unsynced: set[str] = set()
    unsynced_folders: set[str] = set()
    replaced: list[str] = []
    for name, path in data.whole.calls:
        if Path(path).name == LOCK_NAME:
            continue
        folder = str(Path(path).parent)
        is_temporary = TEMPORARY.search(path) is not None
        if name in (*WRITES, "ftruncate", "posix_fallocate"):
            unsynced.add(path)
        elif name == "fsync":
            unsynced.discard(path)
            unsynced_folders.discard(path)
        elif name in RENAMES and not is_temporary:
            # Files are written one after the other.
            assert not [path for path in unsynced if TEMPORARY.search(path)], (
                f"{path} has its name before its data"
            )
            # Otherwise the key material could be older than the file that needs it.
            assert folder not in unsynced_folders, f"{path} takes its place before the last one surely has"
            unsynced_folders.add(folder)
            replaced.append(path)
        elif name == "unlink" and path not in replaced and not is_temporary:
            assert folder not in unsynced_folders, f"{path} is removed before what replaced it surely is there"
    assert unsynced_folders == set()
    assert len(replaced) >= len(FILES)


def test_the_points_are_all_there_are(tmp_path: Path, crasher: Crasher) -> None:
    """Each kind of call that is known to occur does occur: otherwise a wrapper is in the wrong place."""
    data = DataSet(tmp_path, Scenario("internal, encrypted footer"), crasher)
    calls = Counter(name for name, _ in data.whole.calls)
    expected = {"open", "copy_file_range", "pwrite", "fsync", "fchmod", "replace", "unlink"}
    assert expected <= set(calls), calls


ROTATE = """
import sys
from pathlib import Path
from rotation_case import Case, passphrase
from parquet_keytools.kms.keystore_file import KeystoreKms

folder, keystore = map(Path, sys.argv[1:])
Case(folder, KeystoreKms(keystore, passphrase), None).tools().rotate(folder)
"""


def test_many_files_after_sigkill(tmp_path: Path) -> None:
    """A run that writes eight files at a time is killed: the next run does only the remaining work."""
    case = Case.make(tmp_path, "keystore")
    first = case.write("000.parquet")
    paths = [case.folder / f"{number:03}.parquet" for number in range(1000 if SOAK else 150)]
    for path in paths[1:]:
        shutil.copy(first, path)
    case.add_version()
    whole = names(case.folder)
    before = {path: path.stat().st_ino for path in paths}

    def changed() -> set[Path]:
        return {path for path in paths if path.stat().st_ino != before[path]}

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", ROTATE, str(case.folder), str(tmp_path / "keystore.json")], env=environment
    )
    try:
        while len(changed()) < len(paths) // 10:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = changed()
    tools = case.tools()
    assert all(tools.read_table(path).equals(TABLE) for path in paths[::25])
    between = {path: path.stat().st_ino for path in paths}
    report = tools.rotate(case.folder)
    assert report.counts == {Outcome.ALREADY_CURRENT: len(done), Outcome.ROTATED: len(paths) - len(done)}
    assert {path for path in paths if path.stat().st_ino != between[path]} == set(paths) - done
    # Nothing else is left behind.
    assert names(case.folder) == whole
    case.disable(1)
    tools = case.tools()
    assert [file.unknown for file in tools.key_inventory(case.folder)] == [None] * len(paths)
    assert all(tools.read_table(path).equals(TABLE) for path in paths[::25])


def test_a_file_with_keys_in_two_places_is_not_moved_to_another_kms(tmp_path: Path) -> None:
    """Either its footer or its key material file would be replaced first: a crash would leave it unreadable."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    entries = external_entries(path)
    inside = json.dumps(entries["footerKey"] | {"internalStorage": True}).encode()
    location = FileLocation.resolve(path)
    tail, envelope = read_tail(location)
    crypto_metadata, end = FileCryptoMetaData.read(footer_of(tail.data))
    crypto_metadata.key_metadata = inside
    footer = crypto_metadata.serialise() + footer_of(tail.data)[end:]
    path.write_bytes(path.read_bytes()[: tail.offset] + with_trailer(footer, MAGIC_ENCRYPTED_FOOTER))
    assert envelope.key_metadata != inside and case.tools().read_table(path).equals(TABLE)
    before = tree_digest(case.folder)
    other = InMemoryKms(dict.fromkeys(MASTER_KEYS))
    (file,) = case.move_to(other, path).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "OutputError")
    assert "one step" in str(file.error) and tree_digest(case.folder) == before
    # Within one KMS, either place is readable by itself.
    case.add_version()
    assert case.tools().rotate(path).succeeded
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)
    assert case.tools().rekey_in_place(path).succeeded and case.move_to(other, path).succeeded
    assert case.tools(other).read_table(path).equals(TABLE)


def test_what_was_finished_is_not_done_again(tmp_path: Path, crasher: Crasher) -> None:
    """A killed run is continued: files whose keys are current stay as they are."""
    data = DataSet(tmp_path, Scenario("external"), crasher)
    finished = 0
    for point in sample(range(1, len(data.whole.calls) + 1), 12, 0):
        folder = data.copy()
        crasher.run(replace(data.job(folder), point=point))
        report = data.tools.rotate(folder)
        assert report.succeeded
        finished = max(finished, sum(file.outcome.value == "already current" for file in report.files))
        assert sorted(names(folder)) == sorted(data.names)
        assert all(key_material_file(folder / name).exists() for name in FILES)
    assert finished >= 1
