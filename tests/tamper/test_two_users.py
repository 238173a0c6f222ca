"""Commands of one user in a folder where another user may write, and attacks at each of their steps.

Whatever that user puts there, no file elsewhere changes, no value can be read, and no success is reported falsely.
Where the folder protects its users' files from each other (its sticky bit), nothing is lost.
"""

from __future__ import annotations

import builtins
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from crash_points import Crasher, Ended, Job
from crash_writers import NEW, OLD, SETTINGS, TARGET, write_dataset
from other_users import ATTACKER, ATTACKS, PRIVATE, VICTIM
from pyarrow import fs as pafs
from rotation_case import Case, tree_digest
from soak import SOAK

from parquet_keytools import errors

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")

LOCAL = pafs.LocalFileSystem()
FILES = (TARGET, "p=1/y.parquet")
SHOWN_ATTACKS = ("link visible", "link elsewhere")
"""Others see their changes at once: readers, and the command when it checks again."""


@dataclass(frozen=True)
class Scenario:
    """What a user does.

    Attributes:
        action: Method of `Keytools`.
        key_material: Where the files' key material is.
        options: The method's options.
    """

    action: str
    key_material: str
    options: dict[str, Any] = field(default_factory=dict)


SCENARIOS = [
    Scenario("rotate", "internal", {"older_than": "1000000"}),
    Scenario("rotate", "external", {"older_than": "1000000"}),
    Scenario("rekey_in_place", "external"),
    Scenario("decrypt_file", "internal"),
    Scenario("write_dataset", "external", {"existing_data_behavior": "delete_matching"}),
]


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that all may reach."""
    path = Path(tempfile.mkdtemp(prefix="keytools-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


class Place:
    """A data set that two users may write to, and a folder of one user only."""

    def __init__(self, base: Path, scenario: Scenario, mode: int) -> None:
        self.base, self.scenario, self.mode = base, scenario, mode
        self.case = Case.make(base, "keystore", **SETTINGS, key_material=scenario.key_material)
        self.before = self.case.folder
        source = base / "source"
        source.mkdir()
        self.case.tools().write_table(NEW, source / "encrypted.parquet")
        if scenario.action == "write_dataset":
            options = {"basename_template": "old-{i}.parquet"}
            write_dataset(self.case.tools(), source, self.before, LOCAL, options, OLD)
        else:
            for name in FILES:
                self.case.write(name, table=NEW)
        if scenario.action == "decrypt_file":
            pq.write_table(OLD, self.before / TARGET)
        shutil.copytree(self.before, base / "warm")
        shutil.copytree(self.before, base / "private before")
        (base / "private before" / "secret").write_bytes(b"a passphrase")
        (base / "state").mkdir()
        for path in (base / "state", source, base / "private before"):
            path.chmod(0o700)
        for path in (base / "keystore.json", base / "private before" / "secret"):
            path.chmod(0o600)
        self._restore()
        self.private = self._private()
        self._count = 0

    def _restore(self) -> None:
        shutil.rmtree(self.base / PRIVATE, ignore_errors=True)
        shutil.copytree(self.base / "private before", self.base / PRIVATE)

    def _private(self) -> dict[str, tuple[object, ...]]:
        digests = tree_digest(self.base / PRIVATE)
        found = {name: (self.base / PRIVATE / name).lstat() for name in digests}
        return {name: (digests[name], seen.st_mode, seen.st_nlink) for name, seen in found.items()}

    def job(self, attack: str, point: int, user: int) -> Job:
        self._count += 1
        folder = self.base / f"copy{self._count}"
        shutil.copytree(self.before, folder)
        self._restore()
        for path in (self.base / "keystore.json", self.base / "source", self.base / "state", self.base / PRIVATE):
            for each in (path, *path.rglob("*")):
                os.chown(each, user, user)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
            path.chmod(self.mode if path.is_dir() else 0o600)
        return Job(
            self.scenario.action,
            str(folder),
            str(self.base / "keystore.json"),
            {**self.case.settings, **SETTINGS},
            self.scenario.options,
            point,
            "attack",
            attack,
            user,
        )

    def check(self, job: Job, ended: Ended) -> None:
        assert ended.text == "", ended.text
        if ended.error is not None:
            name, _, text = ended.error.partition(": ")
            kind: type = getattr(errors, name, None) or getattr(builtins, name)
            assert issubclass(kind, errors.KeytoolsError | OSError) and str(self.base) in text, ended.error
        assert all(str(self.base) in text for text in ended.failures), ended.failures
        self._check_private(job)
        folder = Path(job.folder)
        is_sticky = bool(self.mode & stat.S_ISVTX)
        is_done = not (ended.error or ended.failures)
        if self.scenario.action == "write_dataset":
            if is_sticky or (is_done and job.attack not in SHOWN_ATTACKS):
                self._check_dataset(folder, is_done=is_done)
        elif is_sticky or (is_done and job.attack not in SHOWN_ATTACKS):
            for name in FILES:
                assert (folder / name).lstat().st_uid != ATTACKER and not (folder / name).is_symlink(), name
                self._check_table(folder / name, is_done=is_done)

    def _check_private(self, job: Job) -> None:
        """Files elsewhere are unchanged; the target of a folder's link may have been rotated, and nothing else."""
        now = self._private()
        if job.attack == "link elsewhere":
            # New files may appear: files of a data set.
            assert all(now[name][1:] == self.private[name][1:] for name in self.private)
            if self.scenario.action == "write_dataset":
                assert all(now[name] == self.private[name] for name in self.private)
            else:
                assert now.keys() <= self.private.keys()
            assert now["secret"] == self.private["secret"]
            if self.scenario.action != "write_dataset":
                assert now[TARGET] == self.private[TARGET]
                assert self.case.tools().read_table(self.base / PRIVATE / FILES[1]).equals(NEW)
        else:
            assert now == self.private

    def _check_dataset(self, folder: Path, *, is_done: bool) -> None:
        for part in ("p", "q"):
            found = [path for path in (folder / f"part={part}").glob("*.parquet") if path.name[0] not in "._"]
            tables = [self.case.tools().read_table(path, partitioning=None) for path in found]
            new, old = (table.filter(pc.equal(table["part"], part)).drop_columns(["part"]) for table in (NEW, OLD))
            assert tables and all(table.equals(new) or (not is_done and table.equals(old)) for table in tables)

    def _check_table(self, path: Path, *, is_done: bool) -> None:
        if self.scenario.action == "decrypt_file" and path.name == TARGET:
            plain = pq.read_table(path)
            assert plain.equals(NEW) or (not is_done and plain.equals(OLD))
            assert path.stat().st_mode & 0o777 == 0o600
        else:
            assert self.case.tools().read_table(path, partitioning=None).equals(NEW)


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.action}-{scenario.key_material}")
def test_what_another_user_puts_into_the_folder(
    base: Path, crasher: Crasher, scenario: Scenario, mode: int
) -> None:
    place = Place(base, scenario, mode)
    whole = crasher.run(place.job("link hidden", 0, VICTIM))
    assert whole.error is None and whole.failures == [], whole
    count = len(whole.calls)
    for number, attack in enumerate(ATTACKS):
        step = 1 if SOAK else max(1, count // 2)
        points = range(1 + (0 if SOAK else (number * 5 + SCENARIOS.index(scenario)) % step), count + 1, step)
        # Each point in one kind of folder, or in both.
        for point in points if SOAK else points[int(mode == 0o777) :: 2]:
            for user in (VICTIM, 0) if SOAK else (VICTIM if (point + number) % 2 else 0,):
                job = place.job(attack, point, user)
                ended = crasher.run(job)
                try:
                    place.check(job, ended)
                except Exception as error:
                    where = whole.calls[point - 1]
                    error.add_note(f"{attack} at {point} of {count} ({where}) for user {user}: {ended}")
                    raise
                shutil.rmtree(job.folder)
