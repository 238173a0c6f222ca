"""New keys that cannot be put in place, or not reliably."""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rotation_case import TABLE, Case, tree_digest

from parquet_keytools.errors import OutputError
from parquet_keytools.rotation import rotate
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.storage.outputs import LocalSink

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])


@every_key_material
@pytest.mark.parametrize("kind", ["in_memory", "keystore"])
def test_a_folder_that_is_there_twice(tmp_path: Path, key_material: str, kind: str) -> None:
    case = Case.make(tmp_path, kind, key_material=key_material)
    path, tools = case.write("p=1/x.parquet"), case.tools()
    (case.folder / "p=2").symlink_to(path.parent)
    before = tree_digest(path.parent)
    case.add_version()
    report = tools.rotate(case.folder)
    assert report.succeeded and report.counts == {Outcome.ROTATED: 1, Outcome.NOTHING_TO_ROTATE: 1}
    assert tree_digest(path.parent).keys() == before.keys()
    assert tools.read_table(path).equals(TABLE)


@every_key_material
def test_a_rotation_that_fails_leaves_nothing(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path = case.write()
    before = tree_digest(case.folder)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(rotate, "replace_external_material", fail)
    monkeypatch.setattr(rotate, "replace_tail", fail)
    (file,) = case.tools().rotate(path).files
    assert file.outcome is Outcome.FAILED and tree_digest(case.folder) == before


@every_key_material
def test_an_error_after_the_new_keys_are_in_place(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    before = tree_digest(case.folder)
    sync = os.fsync

    def fail(descriptor: int) -> None:
        # Of the folder, after the rename.
        if (
            stat.S_ISDIR(os.fstat(descriptor).st_mode)
            and tree_digest(case.folder).items() & before.items() != before.items()
        ):
            raise OSError(5, "the disk is broken")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    (file,) = tools.rotate(path).files
    monkeypatch.undo()
    assert file.outcome is Outcome.FAILED and "input/output error" in str(file.error)
    assert tools.read_table(path).equals(TABLE)
    assert tools.rotate(path).counts == Counter({Outcome.ROTATED: 1})
    assert tools.read_table(path).equals(TABLE) and tree_digest(case.folder).keys() == before.keys()


@every_key_material
def test_a_disk_that_does_not_keep_what_is_written(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path, tools = case.write(), case.tools()
    case.add_version()
    before = tree_digest(case.folder)
    write_at = LocalSink.write_at

    def write_wrong(sink: LocalSink, offset: int, data: Any) -> None:
        wrong = bytearray(data)
        wrong[-9] ^= 1
        write_at(sink, offset, bytes(wrong))

    with monkeypatch.context() as patched:
        patched.setattr(LocalSink, "write_at", write_wrong)
        (file,) = tools.rotate(path).files
    assert isinstance(file.error, OutputError) and "does not read back" in str(file.error)
    assert tree_digest(case.folder) == before
    assert tools.rotate(path).succeeded
