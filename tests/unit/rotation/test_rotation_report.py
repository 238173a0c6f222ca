"""What a report counts, names, and omits."""

from __future__ import annotations

from collections import Counter

import pytest

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.report import FileRotation, KmsCalls, RotationOutcome, RotationReport
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import Unseen


@pytest.mark.parametrize("keep_results", [True, False])
def test_all_is_counted_and_what_failed_is_kept(keep_results: bool) -> None:
    rotated = FileRotation("a", RotationOutcome.ROTATED, bytes_written=3, bytes_copied=5)
    failed = FileRotation.failed("c", KeytoolsError("why"))
    report = RotationReport()
    for _ in range(2):
        report.add(rotated, keep_results=keep_results)
    assert report.succeeded and not report.failures
    report.add(failed, keep_results=keep_results)
    report.add(FileRotation("d", RotationOutcome.NOT_ENCRYPTED), keep_results=keep_results)
    assert report.counts == Counter(
        {RotationOutcome.ROTATED: 2, RotationOutcome.FAILED: 1, RotationOutcome.NOT_ENCRYPTED: 1}
    )
    assert (report.bytes_written, report.bytes_copied) == (6, 10)
    assert not report.succeeded and report.failures == [failed]
    assert len(report.files) == (4 if keep_results else 1)
    report.counts.clear()
    report.stopped_by = KeytoolsError("the storage is full")
    assert not report.succeeded


def test_what_is_gone_has_no_files() -> None:
    location = FileLocation.resolve("/folder")
    gone = FileRotation.of_unseen(Unseen(location, FileNotFoundError(2, "no such file")))
    assert (gone.outcome, gone.error) == (RotationOutcome.NOTHING_TO_ROTATE, None)
    assert gone.error_class is None
    assert gone.how == "removed meanwhile" and gone.path == "/folder"
    refused = FileRotation.of_unseen(Unseen(location, PermissionError(13, "no")))
    assert refused.outcome is RotationOutcome.FAILED and refused.error_class == "PermissionError"


def test_summaries_say_why_where_something_failed() -> None:
    error = KeytoolsError("why")
    assert FileRotation.failed("c", error).summary() == {
        "path": "c", "outcome": "failed", "keys": 0, "how": "", "error": error,
    }  # fmt: skip
    assert "error" not in FileRotation("a", RotationOutcome.ROTATED).summary()
    report = RotationReport(dry_run=True, bytes_written=7)
    report.counts[RotationOutcome.WOULD_ROTATE] = 2
    assert report.summary() == {
        "files": {"would rotate": 2}, "dry_run": True, "bytes_written": 7, "stopped_by": None,
    }  # fmt: skip


def test_calls_of_two_kms_are_added() -> None:
    calls = KmsCalls(rewrap=1, unwrap=2, wrap=3, describe=4) + KmsCalls(unwrap=10, describe=20)
    assert calls == KmsCalls(rewrap=1, unwrap=12, wrap=3, describe=24) and calls.total == 40
