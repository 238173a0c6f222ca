"""Writers that are killed at file system calls, or find the disk full there: in a soak at every call.

No existing file is lost, every file is intact, no value is left in plaintext, and the next run for the
same target removes the leftovers of a killed run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash_points import TAKES_SPACE, WRITES, Crasher, Ended, Job
from crash_writers import NEW, OLD, SECRET, SETTINGS, TARGET, WRITERS, write_dataset
from pyarrow import fs as pafs
from rotation_case import Case, names, passphrase, tree_digest
from soak import SOAK, sample
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.storage.local_files import OccasionalScan

LOCAL = pafs.LocalFileSystem()


@dataclass(frozen=True)
class Scenario:
    """An operation that writes.

    Attributes:
        action: Method of `Keytools`.
        key_material: Where the table's key material is.
        replaces: Whether the target exists.
        options: The method's options.
    """

    action: str
    key_material: str = "internal"
    replaces: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        texts = [self.action, self.key_material, *(["replaces"] if self.replaces else []), *self.options.values()]
        return ", ".join(texts)

    @property
    def is_dataset(self) -> bool:
        return self.action == "write_dataset"


SCENARIOS = [
    Scenario("write_table"),
    Scenario("write_table", "external"),
    Scenario("write_table", "external", replaces=True),
    Scenario("write_dataset"),
    Scenario("write_dataset", "external", True, {"existing_data_behavior": "overwrite_or_ignore"}),
    Scenario("write_dataset", "internal", True, {"existing_data_behavior": "delete_matching"}),
    Scenario("write_dataset", "external", True, {"existing_data_behavior": "delete_matching"}),
    Scenario("encrypt_file", "external"),
    Scenario("encrypt_file", "external", replaces=True),
    Scenario("decrypt_file"),
    Scenario("decrypt_file", replaces=True),
    Scenario("rekey_file", "external", replaces=True),
]


@pytest.fixture(autouse=True)
def _each_run_looks_for_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the first run of a process; this process plays many."""
    monkeypatch.setattr(OccasionalScan, "is_due", lambda *_: True)


class Place:
    """The state before a write, and any number of copies of it."""

    def __init__(self, tmp_path: Path, scenario: Scenario) -> None:
        self.scenario = scenario
        self.case = Case.make(tmp_path, "keystore", **SETTINGS, key_material=scenario.key_material)
        self.source, self.before = tmp_path / "source", self.case.folder
        self.source.mkdir()
        pq.write_table(NEW, self.source / "plain.parquet", row_group_size=150)
        self.tools.write_table(NEW, self.source / "encrypted.parquet", row_group_size=150)
        assert SECRET in (self.source / "plain.parquet").read_bytes()
        if scenario.replaces and scenario.is_dataset:
            is_deleted = scenario.options["existing_data_behavior"] == "delete_matching"
            names_of_old = {"basename_template": "old-{i}.parquet"} if is_deleted else {}
            write_dataset(self.tools, self.source, self.before, LOCAL, names_of_old, OLD)
        elif scenario.replaces and scenario.action == "decrypt_file":
            pq.write_table(OLD, self.before / TARGET)
        elif scenario.replaces:
            self.tools.write_table(OLD, self.before / TARGET)
        whole = self.copy("whole")
        self.write(whole)
        self.names = names(whole)
        self._count = 0

    @property
    def tools(self) -> Keytools:
        return self.case.tools()

    def copy(self, name: str | None = None) -> Path:
        """Return a folder with a copy of that state."""
        if name is None:
            self._count += 1
            name = f"copy{self._count}"
        folder = self.before.parent / name
        shutil.copytree(self.before, folder)
        return folder

    def job(self, folder: Path) -> Job:
        settings = {**self.case.settings, **SETTINGS}
        keystore = self.before.parent / "keystore.json"
        return Job(self.scenario.action, str(folder), str(keystore), settings, self.scenario.options)

    def write(self, folder: Path) -> None:
        WRITERS[self.scenario.action](self.tools, self.source, folder, LOCAL, self.scenario.options)

    def read(self, path: Path) -> pa.Table:
        if self.scenario.action == "decrypt_file":
            return pq.read_table(path)
        return self.tools.read_table(path, partitioning=None)

    def assert_whole(self, folder: Path) -> None:
        """Each file is the old one or the new one, and exists; readers can see nothing else."""
        assert all(self.holds(path, OLD, NEW) for path in visible(folder))
        if not self.scenario.replaces:
            return
        for part in ("p", "q") if self.scenario.is_dataset else (None,):
            place = folder if part is None else folder / f"part={part}"
            assert visible(place), f"what was there is lost: {names(folder)}"

    def holds(self, path: Path, *tables: pa.Table) -> bool:
        """Return whether a file has the values of one of the tables."""
        if self.scenario.is_dataset:
            part = path.parent.name.removeprefix("part=")
            tables = tuple(
                table.filter(pa.compute.equal(table["part"], part)).drop_columns(["part"]) for table in tables
            )
        found = self.read(path)
        return any(found.equals(table) for table in tables)

    def assert_secret(self, folder: Path) -> None:
        """Values are in plaintext only in decrypted output, which only its user can read while it is written."""
        for path in folder.rglob("*"):
            if path.is_file() and SECRET in path.read_bytes():
                assert self.scenario.action == "decrypt_file", path
                is_target = path.name == TARGET
                assert is_target or path.stat().st_mode & 0o777 == 0o600, path

    def assert_finished(self, folder: Path) -> None:
        """The next run completes, and leaves nothing of the earlier run."""
        if self.scenario.is_dataset and not self.scenario.replaces and visible(folder):
            # Some files are in their places, and the caller must be informed.
            with pytest.raises(pa.ArrowInvalid):
                self.write(folder)
            write_dataset(self.tools, self.source, folder, LOCAL, {"existing_data_behavior": "delete_matching"})
        else:
            self.write(folder)
        assert names(folder) == self.names
        assert all(self.holds(path, NEW) for path in visible(folder))


def visible(folder: Path) -> list[Path]:
    """Return the files that readers of a data set see."""
    return sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith((".", "_")))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_killed_or_without_space(tmp_path: Path, crasher: Crasher, scenario: Scenario) -> None:
    place = Place(tmp_path, scenario)
    folder = place.copy()
    whole = crasher.run(place.job(folder))
    assert not whole.killed and whole.error is None, whole
    assert names(folder) == place.names and all(place.holds(path, NEW) for path in visible(folder))
    killed(place, crasher, whole, SCENARIOS.index(scenario))
    without_space(place, crasher, whole, SCENARIOS.index(scenario))


def killed(place: Place, crasher: Crasher, whole: Ended, offset: int) -> None:
    """The process ends at a call, or after half of a write."""
    points = [(number, "kill") for number in range(1, len(whole.calls) + 1)]
    points += [(number, "torn") for number, (name, _) in enumerate(whole.calls, 1) if name in WRITES]
    for point, mode in sample(points, 60, 5 * offset):
        folder = place.copy()
        ended = crasher.run(replace(place.job(folder), point=point, mode=mode))
        assert ended.killed, (point, mode, ended)
        try:
            place.assert_whole(folder)
            place.assert_secret(folder)
            place.assert_finished(folder)
        except Exception as error:
            error.add_note(f"killed {mode} at {point} of {len(whole.calls)}: {ended.calls[-3:]}")
            raise
        shutil.rmtree(folder)
    print(f"\n{place.scenario}: {len(whole.calls)} calls, {len(points)} points")


def without_space(place: Place, crasher: Crasher, whole: Ended, offset: int) -> None:
    """The disk is full from a call on."""
    for point in sample(range(1, len(whole.calls) + 1), 80, 7 * offset):
        folder = place.copy()
        before = tree_digest(folder)
        ended = crasher.run(replace(place.job(folder), point=point, mode="no_space"))
        try:
            is_said = ended.error is not None
            assert is_said or point > last_that_takes_space(ended), ended
            if is_said:
                assert str(ended.error).lower().count("no space left") == 1, ended.error
                assert str(ended.error).startswith("StorageFailedError: "), ended.error
            place.assert_whole(folder)
            place.assert_secret(folder)
            # Each file is in its place, or was there before.
            assert set(names(folder)) <= {*place.names, *(Path(name).name for name in before)}
            place.assert_finished(folder)
        except Exception as error:
            error.add_note(f"full from {point} of {len(whole.calls)} on: {ended}")
            raise
        shutil.rmtree(folder)


def last_that_takes_space(ended: Ended) -> int:
    return max((number for number, (name, _) in enumerate(ended.calls, 1) if name in TAKES_SPACE), default=0)


# --- the command line ---

COMMANDS: dict[str, list[str]] = {
    "encrypt": ["encrypt", "SOURCE/plain", "FOLDER/out"],
    "decrypt": ["decrypt", "SOURCE/encrypted", "FOLDER/out"],
    "decrypt --salvage": ["decrypt", "SOURCE/encrypted", "FOLDER/out", "--salvage"],
    "rekey": ["rekey", "SOURCE/encrypted", "FOLDER/out"],
    "rekey --in-place": ["rekey", "FOLDER", "--in-place"],
    "rotate": ["rotate", "FOLDER"],
    "rotate --new-keks": ["rotate", "FOLDER", "--new-keks"],
}
FILES = ("1.parquet", "2.parquet")


@pytest.mark.parametrize("key_material", ["internal", "external"] if SOAK else ["external"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_full_disk(tmp_path: Path, crasher: Crasher, command: str, key_material: str) -> None:
    """The error is reported once, with an exit status, and each file is complete or absent."""
    if key_material == "external" and command.startswith("decrypt"):
        key_material = "internal, plaintext footer"
    settings = {**SETTINGS, "plaintext_footer": "plaintext" in key_material}
    case = Case.make(tmp_path, "keystore", **settings, key_material=key_material.partition(",")[0])
    config = configuration(tmp_path, case)
    source, before, is_in_place = tmp_path / "source", case.folder, "FOLDER" in COMMANDS[command]
    for folder in (source / "plain", source / "encrypted", *([before] if is_in_place else [])):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if folder.name == "plain":
                pq.write_table(NEW, folder / name, row_group_size=150)
            else:
                case.tools().write_table(NEW, folder / name, row_group_size=150)
    case.add_version()
    number = 0

    def job(point: int = 0) -> Job:
        nonlocal number
        number += 1
        folder = tmp_path / f"copy{number}"
        shutil.copytree(before, folder)
        words = [word.replace("SOURCE", str(source)).replace("FOLDER", str(folder)) for word in COMMANDS[command]]
        arguments = {"arguments": [*words, "--config", str(config)]}
        return Job("command", str(folder), str(tmp_path / "keystore.json"), {}, arguments, point, "no_space")

    first = job()
    whole = crasher.run(first)
    assert (whole.status, whole.error) == (0, None), whole
    expected = names(Path(first.folder))
    points = range(1, len(whole.calls) + 1)
    for point in sample(points, 60, 5 * list(COMMANDS).index(command)):
        asked = job(point)
        folder = Path(asked.folder)
        ended = crasher.run(asked)
        try:
            assert ended.error is None, ended
            is_said = ended.status != 0
            assert is_said or point > last_that_takes_space(ended)
            if is_said:
                assert ended.status in (1, 2) and ended.text.lower().count("no space left") == 1
            else:
                assert "no space left" not in ended.text.lower()
            left = set(names(folder)) - set(names(before)) - set(expected)
            assert not left
            for path in visible(folder):
                table = pq.read_table(path) if command.startswith("decrypt") else case.tools().read_table(path)
                assert table.equals(NEW), path
            assert not is_in_place or len(visible(folder)) == len(FILES)
            again = [*asked.options["arguments"], *([] if is_in_place else ["--overwrite"])]
            done = CliRunner().invoke(app, again)
            assert done.exit_code == 0, done.stderr
            assert names(folder) == expected
        except Exception as error:
            error.add_note(f"full from {point} of {len(whole.calls)} on: {ended}")
            raise
        shutil.rmtree(folder)


def configuration(tmp_path: Path, case: Case) -> Path:
    secret = tmp_path / "passphrase"
    secret.write_bytes(passphrase().reveal())
    path = tmp_path / "config.json"
    kms = {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"}
    for file in (secret, path):
        file.touch()
        file.chmod(0o600)
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "kms": kms,
                "tables": {"t": {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings}},
            }
        )
    )
    return path
