"""`erase --rewrite` killed at file system calls, or on a full disk: it can be repeated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from crash_points import RENAMES, WRITES, Crasher, Ended, Job
from rotation_case import TABLE, Case, names, tree_digest
from soak import sample

from parquet_keytools.rotation.report import Outcome

FILES = ("x.parquet", "p=1/y.parquet")
OTHER = "p=1/other.parquet"
WHERE = "a >= 7 AND a < 210"
KEPT = TABLE.filter(pc.or_(pc.less(TABLE["a"], 7), pc.greater_equal(TABLE["a"], 210)))

KINDS: dict[str, dict[str, Any]] = {
    "external": {"key_material": "external"},
    "internal": {},
    "plaintext footer": {"plaintext_footer": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class DataSet:
    """Files with matching rows, one without, and any number of copies of them."""

    def __init__(self, tmp_path: Path, kind: str) -> None:
        self.case = Case.make(tmp_path, "keystore", **KINDS[kind])
        for name in FILES:
            self.case.write(name)
        self.case.write(OTHER, table=TABLE.slice(300))
        self.names = names(self.case.folder)
        self._count = 0
        self._tmp_path = tmp_path

    def copy(self) -> Path:
        self._count += 1
        folder = self._tmp_path / f"copy{self._count}"
        shutil.copytree(self.case.folder, folder)
        return folder

    def job(self, folder: Path) -> Job:
        keystore = self.case.folder.parent / "keystore.json"
        return Job("erase_rows", str(folder), str(keystore), self.case.settings, {"where": WHERE})

    def done(self, folder: Path) -> int:
        """Return how many files are without the rows; each file is intact, either as before or as it should be."""
        tools, done = self.case.tools(), 0
        for name in FILES:
            table = tools.read_table(folder / name)
            assert table.equals(TABLE) or table.equals(KEPT), name
            done += table.num_rows == KEPT.num_rows
        assert (folder / OTHER).read_bytes() == (self.case.folder / OTHER).read_bytes()
        return done

    def assert_finished(self, folder: Path) -> None:
        """A repeated run does only the remaining work, and leaves nothing behind."""
        done, tools = self.done(folder), self.case.tools()
        report = tools.erase_rows(folder, where=WHERE)
        assert report.counts[Outcome.ROWS_REMOVED] == len(FILES) - done and report.succeeded
        assert report.counts[Outcome.NO_MATCHING_ROWS] == 1 + done
        assert self.done(folder) == len(FILES)
        assert names(folder) == self.names
        assert tools.verify_folder(folder).conforms


@every_kind
def test_killed_at_a_call(tmp_path: Path, crasher: Crasher, kind: str) -> None:
    data = DataSet(tmp_path, kind)
    folder = data.copy()
    whole = crasher.run(data.job(folder))
    assert not whole.killed and whole.error is None and data.done(folder) == len(FILES)
    renames = [number for number, (name, _) in enumerate(whole.calls, 1) if name in RENAMES]
    assert len(renames) >= len(FILES) and len(whole.calls) >= 8 * len(FILES)
    points = [(number, "kill") for number in range(1, len(whole.calls) + 1)]
    points += [(number, "torn") for number, (name, _) in enumerate(whole.calls, 1) if name in WRITES]
    chosen = list(sample(points, 20, list(KINDS).index(kind)))
    for point, mode in [*chosen, *((number, mode) for number in renames for mode in ("kill", "after"))]:
        folder = data.copy()
        ended = crasher.run(replace(data.job(folder), point=point, mode=mode))
        assert ended.killed, (point, mode, ended)
        try:
            data.assert_finished(folder)
        except Exception as error:
            error.add_note(f"killed {mode} at {point} of {len(whole.calls)}: {ended.calls[-3:]}")
            raise
        shutil.rmtree(folder)


@every_kind
def test_the_disk_is_full_from_a_call_on(tmp_path: Path, crasher: Crasher, kind: str) -> None:
    data = DataSet(tmp_path, kind)
    whole = crasher.run(data.job(data.copy()))
    for point in sample(range(1, len(whole.calls) + 1), 12, list(KINDS).index(kind)):
        folder = data.copy()
        before = tree_digest(folder)
        ended = crasher.run(replace(data.job(folder), point=point, mode="no_space"))
        try:
            assert "no space left" in (ended.error or "no space left").lower()
            if ended.error is not None:
                assert not set(tree_digest(folder)) - set(before)
            data.assert_finished(folder)
        except Exception as error:
            error.add_note(f"full from {point} of {len(whole.calls)} on: {ended}")
            raise
        shutil.rmtree(folder)


def test_each_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, crasher: Crasher) -> None:
    data = DataSet(tmp_path, "internal")
    ended: Ended = crasher.run(data.job(data.copy()))
    unsynced: set[str] = set()
    for name, path in ended.calls:
        if name in WRITES:
            unsynced.add(path)
        elif name == "fsync":
            unsynced.discard(path)
        elif name in RENAMES:
            assert not unsynced, f"{path} has its name before its data"
    assert {path for name, path in ended.calls if name in RENAMES} == set(FILES)
