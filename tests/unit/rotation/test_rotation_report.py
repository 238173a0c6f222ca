"""What a report counts, names, and leaves out."""

from __future__ import annotations

from collections import Counter

import pytest

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.report import (
    MOST_LEFT_BEHIND,
    FileRotation,
    KmsCalls,
    RotationOutcome,
    RotationReport,
)
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import Unseen


def test_what_stays_is_named_once_and_up_to_a_limit() -> None:
    report = RotationReport()
    for number in (1, 2, 1, *range(MOST_LEFT_BEHIND + 5)):
        report.note_left_behind(f"thing {number}")
    assert len(report.left_behind) == len(set(report.left_behind)) == MOST_LEFT_BEHIND
    assert report.left_behind[:3] == ["thing 1", "thing 2", "thing 0"]


@pytest.mark.parametrize("keep_results", [True, False])
def test_all_is_counted_and_what_failed_is_kept(keep_results: bool) -> None:
    rotated = FileRotation("a", RotationOutcome.ROTATED, bytes_written=3, bytes_copied=5, shares_keys_with="b")
    failed = FileRotation.failed("c", KeytoolsError("why"))
    report = RotationReport()
    report.add([FileRotation("e", RotationOutcome.REKEYED)], keep_results=False)
    assert not report.shared_keys and not report.files and report.counts.pop(RotationOutcome.REKEYED) == 1
    report.add([rotated] * (MOST_LEFT_BEHIND + 1), keep_results=keep_results)
    assert report.succeeded and not report.failures
    report.add([failed, FileRotation("d", RotationOutcome.NOT_ENCRYPTED)], keep_results=keep_results)
    assert report.counts == Counter(
        {RotationOutcome.ROTATED: 101, RotationOutcome.FAILED: 1, RotationOutcome.NOT_ENCRYPTED: 1}
    )
    assert (report.bytes_written, report.bytes_copied) == (303, 505)
    assert report.shared_keys == ["a and b"] * MOST_LEFT_BEHIND
    assert not report.succeeded and report.failures == [failed]
    assert len(report.files) == (103 if keep_results else 1)
    report.counts.clear()
    report.stopped_by = KeytoolsError("the storage is full")
    assert not report.succeeded


def test_what_is_gone_has_no_files() -> None:
    location = FileLocation.resolve("/folder")
    gone = FileRotation.of_unseen(Unseen(location, FileNotFoundError(2, "no such file"), is_gone=True))
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
