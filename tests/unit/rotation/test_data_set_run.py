"""One run over a data set: which files get another attempt, and when it ends."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from parquet_keytools.errors import KmsUnavailableError, StorageFailedError
from parquet_keytools.rotation import data_set_run
from parquet_keytools.rotation.data_set_run import (
    ChangeFiles,
    EachFile,
    FileOutcome,
    Outcomes,
    RunOptions,
    change_data_set,
)
from parquet_keytools.rotation.file_keys import changed_while_rotated
from parquet_keytools.rotation.report import FileRotation, Outcome, RotationReport
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import Unseen

NAMES = ["a.parquet", "b.parquet", "c.parquet", "d.parquet"]
FULL = OSError(errno.ENOSPC, "No space left on device")
SILENT = KmsUnavailableError(backend="in_memory", operation="unwrap")


@pytest.fixture
def folder(tmp_path: Path) -> FileLocation:
    for name in NAMES:
        (tmp_path / name).touch()
    return FileLocation.resolve(tmp_path)


class Changes:
    """Has an outcome for each file."""

    def __init__(self, **outcomes: Exception | None) -> None:
        self.outcomes = outcomes
        self.calls = ""

    def __call__(self, pool: Executor, locations: Iterator[FileLocation]) -> Outcomes:
        for location in locations:
            self.calls += location.name[0]
            yield location, self.outcome(location)

    def outcome(self, location: FileLocation) -> FileOutcome:
        error = self.outcomes.get(location.name[0])
        if isinstance(error, OSError):
            return FileRotation.failed(str(location), error)
        return FileRotation(str(location), Outcome.ROTATED)


class Disturbed(Changes):
    """Some files are changed by others in the first attempts."""

    disturbed = "ab"
    left = 2

    def outcome(self, location: FileLocation) -> FileOutcome:
        if location.name[0] in self.disturbed and self.left:
            self.left -= 1
            return changed_while_rotated(location)
        return super().outcome(location)


def run(folder: FileLocation, change: ChangeFiles) -> RotationReport:
    report = RotationReport()
    change_data_set(folder, change, report, RunOptions())
    return report


def done(report: RotationReport) -> str:
    return "".join(Path(f.path).name[0] for f in report.files if f.outcome is not Outcome.NOT_ATTEMPTED)


def test_files_that_others_changed_get_another_attempt(folder: FileLocation) -> None:
    change = Disturbed()
    report = run(folder, change)
    assert sorted(done(report)) == list("abcd") and report.counts == {Outcome.ROTATED: 4}
    assert change.calls == "abcdab"


def test_what_could_not_be_looked_into_is_a_failure(folder: FileLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = data_set_run.data_set_in_place
    unseen = Unseen(folder.below("locked"), PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(
        data_set_run, "data_set_in_place", lambda path, **options: itertools.chain([unseen], walk(path, **options))
    )
    report = run(folder, Changes())
    assert report.counts == {Outcome.ROTATED: 4, Outcome.FAILED: 1} and not report.succeeded
    assert [(file.path, file.error_class) for file in report.failures] == [(unseen.path, "PermissionError")]


def test_a_run_over_a_single_file_raises_its_failure(folder: FileLocation) -> None:
    change = Changes(a=FULL)
    with pytest.raises(OSError, match="No space left"):
        change_data_set(folder, change, RotationReport(), RunOptions(raises_failures=True))
    assert change.calls == "a"


def test_a_storage_that_takes_no_more_ends_the_run_also_where_other_files_need_nothing(
    folder: FileLocation,
) -> None:
    change = Changes(c=FULL)
    report = run(folder, change)
    assert done(report) == "abc" and change.calls == "abc"
    assert isinstance(report.stopped_by, StorageFailedError) and not report.succeeded


@pytest.mark.parametrize("error", [FULL, SILENT])
def test_what_the_next_file_would_meet_too_ends_a_run_over_one_after_the_other(
    folder: FileLocation, error: OSError | KmsUnavailableError
) -> None:
    begun: list[str] = []

    def change(location: FileLocation) -> FileRotation:
        begun.append(location.name)
        if len(begun) == 2:
            raise error
        return FileRotation(str(location), Outcome.REKEYED)

    report = run(folder, EachFile(change))
    assert begun == NAMES[:2] and report.counts == {
        Outcome.REKEYED: 1,
        Outcome.FAILED: 1,
        Outcome.NOT_ATTEMPTED: 2,
    }
    assert report.stopped_by is not None and not report.succeeded


@pytest.mark.parametrize("error", [FULL, SILENT], ids=["full disk", "silent KMS"])
def test_no_large_file_is_begun_after_an_error_that_ends_the_run(
    folder: FileLocation, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes leave large files to the main process, even files that they were given before the error."""

    class Workers:
        processes = 2

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def outcomes(self, locations: Iterator[FileLocation]) -> Iterator[tuple[FileLocation, FileOutcome | None]]:
            first, *others = locations
            yield first, FileRotation.failed(str(first), error)
            yield from ((location, None) for location in others)

    monkeypatch.setattr(data_set_run, "FileWorkers", Workers)
    monkeypatch.setattr(data_set_run, "may_start_processes", lambda: True)
    begun: list[FileLocation] = []

    def change(location: FileLocation) -> FileRotation:
        begun.append(location)
        return FileRotation(str(location), Outcome.ROTATED)

    report = run(folder, EachFile(change))
    assert not begun and report.stopped_by is not None
    assert report.counts == {Outcome.FAILED: 1, Outcome.NOT_ATTEMPTED: len(NAMES) - 1}
