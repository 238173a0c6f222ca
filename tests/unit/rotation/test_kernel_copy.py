"""The data range copied by the operating system, in each way in which it may refuse."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools.errors import ChangedMeanwhileError
from parquet_keytools.rotation.rotate import COPIED, COPIED_IN_KERNEL, copy_beginning

CONTENT = os.urandom(300_000)
LENGTH = 250_001


def copy(tmp_path: Path, length: int = LENGTH) -> tuple[str, bytes]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(CONTENT)
    target.write_bytes(b"")
    with source.open("rb") as opened, target.open("r+b") as written:
        how = copy_beginning(opened.fileno(), written.fileno(), length)
    return how, target.read_bytes()


def refuse(code: int) -> Any:
    def refused(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refused


def test_in_the_kernel(tmp_path: Path) -> None:
    how, content = copy(tmp_path)
    assert how == COPIED_IN_KERNEL and content == CONTENT[:LENGTH]


def test_short_copies_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda s, t, n, a, b: original(s, t, min(n, 1000), a, b))
    assert copy(tmp_path) == (COPIED_IN_KERNEL, CONTENT[:LENGTH])


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("done", [0, 100_000])
def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, done: int) -> None:
    original = os.copy_file_range

    def some(source: int, target: int, count: int, at: int, to: int) -> int:
        if at >= done:
            raise OSError(code, os.strerror(code))
        return original(source, target, done - at, at, to)

    monkeypatch.setattr(os, "copy_file_range", some)
    assert copy(tmp_path) == (COPIED, CONTENT[:LENGTH])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_disk_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "copy_file_range", refuse(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        copy(tmp_path)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    with pytest.raises(ChangedMeanwhileError):
        copy(tmp_path, len(CONTENT) + 1)
