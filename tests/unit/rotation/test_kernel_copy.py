"""The data of a rotated file, copied by the operating system, and every way in which it may refuse."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from rotation_case import TABLE, Case, data_range

from parquet_keytools.rotation.report import FileRotation, Outcome

IN_KERNEL, BY_HAND = "new tail, data copied in the kernel", "new tail, data copied"


def rotated(tmp_path: Path) -> FileRotation:
    """Rotate a file; its data stays, and it can be read."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    data = data_range(path)
    case.add_version()
    (file,) = case.tools().rotate(path).files
    assert data_range(path) == data and case.tools().read_table(path).equals(TABLE)
    if file.outcome is Outcome.ROTATED:
        in_kernel = len(data) if file.how == IN_KERNEL else 0
        assert (file.bytes_copied, file.bytes_written) == (in_kernel, path.stat().st_size - in_kernel)
    return file


def test_in_the_kernel(tmp_path: Path) -> None:
    assert rotated(tmp_path).how == IN_KERNEL


def test_short_copies_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda s, t, n, a, b: original(s, t, min(n, 1000), a, b))
    assert rotated(tmp_path).how == IN_KERNEL


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("done", [0, 100])
def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, done: int) -> None:
    original = os.copy_file_range

    def some(source: int, target: int, count: int, at: int, to: int) -> int:
        if at >= done:
            raise OSError(code, os.strerror(code))
        return original(source, target, done - at, at, to)

    monkeypatch.setattr(os, "copy_file_range", some)
    assert rotated(tmp_path).how == BY_HAND


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_disk_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refused)
    file = rotated(tmp_path)
    assert file.outcome is Outcome.FAILED and os.strerror(code).lower() in str(file.error).lower()


def test_a_file_that_became_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged: it gets another attempt, and stays as another writer left it."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    newer = TABLE.slice(0, 1)
    case.add_version()
    attempts: list[int] = []

    def refused(*_: Any) -> Any:
        attempts.append(1)
        case.write(table=newer)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refused)
    assert case.tools().rotate(path).counts == {Outcome.ALREADY_CURRENT: 1}
    assert len(attempts) == 1 and case.tools().read_table(path).equals(newer)
