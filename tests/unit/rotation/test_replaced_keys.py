"""Old keys kept, put back, and dropped."""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs as pafs
from rotation_case import MASTER_KEYS, TABLE, Case, key_material_file, names, read_with_pyarrow, tree_digest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError, MasterKeyDisabledError, OutputError
from parquet_keytools.rotation import data_set_run, replaced_keys, restoring, rewrapping
from parquet_keytools.rotation.replaced_keys import (
    SUFFIX,
    keep,
    kept_files_in,
    may_be_in_place,
    new_rotation_id,
    remove_kept,
)
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.rotation.tail import changed_while_rotated, read_tail
from parquet_keytools.storage.failures import naming_left_behind
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import LocalSink

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])
every_footer = pytest.mark.parametrize("plaintext_footer", [True, False])


def kept(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.endswith(".old_keys")]


@every_key_material
@every_footer
def test_undo(tmp_path: Path, key_material: str, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material, plaintext_footer=plaintext_footer)
    path = case.write("p=1/x.parquet")
    before = tree_digest(case.folder)
    case.add_version()
    tools = case.tools()
    assert tools.rotate(case.folder, keep_old=True).succeeded
    assert len(kept(case.folder)) == 1
    # Readers of data sets pass over it.
    assert tools.dataset(case.folder).to_table().num_rows == TABLE.num_rows
    assert tools.verify_folder(case.folder).conforms
    assert tools.undo_rotation(case.folder).counts == Counter({Outcome.RESTORED: 1})
    assert tree_digest(case.folder) == before
    assert tools.read_table(path).equals(TABLE) and read_with_pyarrow(case.kms, path).equals(TABLE)
    assert tools.undo_rotation(path).counts == Counter({Outcome.NOTHING_TO_RESTORE: 1})


@every_key_material
@pytest.mark.parametrize("keys", [("dk", "ka"), ("kf", "dk")])
def test_undo_beside_a_data_key(tmp_path: Path, key_material: str, keys: tuple[str, str]) -> None:
    """No KMS has to do with the data key, of the footer or of a column; it needs no key material."""
    case = Case.make(tmp_path, "keystore")
    footer_key, column_key = keys
    table = {
        "footer_key": footer_key,
        "column_keys": {column_key: ["a"], "kb": ["b"]},
        "key_material": key_material,
    }
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "data_keys": {"dk": "MDEyMzQ1Njc4OTAxMjM0NQ=="},
        "tables": {"t": table},
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    path = case.write(tools=tools)
    before = tree_digest(case.folder)
    case.add_version()
    assert tools.rotate(path, keep_old=True).succeeded and tree_digest(case.folder) != before
    assert tools.undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert tree_digest(case.folder) == before
    assert tools.read_table(path).equals(TABLE)


@every_key_material
@every_footer
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("moved", ["kf", "ka"])
def test_old_keys_that_nobody_can_unwrap_do_not_replace_the_new_ones(
    tmp_path: Path, key_material: str, plaintext_footer: bool, double: bool, moved: str
) -> None:
    settings: dict[str, Any] = {
        "key_material": key_material,
        "plaintext_footer": plaintext_footer,
        "double_wrapping": double,
    }
    case = Case.make(tmp_path, "keystore", **settings)
    path, tools = case.write(), case.tools(also_trusted=["new"])
    before = tree_digest(case.folder)
    assert tools.rotate(path, moves={moved: "new"}, keep_old=True).succeeded
    # What this process has unwrapped before proves nothing.
    tools.read_table(path)
    rotated = tree_digest(case.folder)
    case.disable(None, moved)
    (file,) = tools.undo_rotation(case.folder).files
    assert file.outcome is Outcome.FAILED and isinstance(file.error, MasterKeyDisabledError)
    assert tree_digest(case.folder) == rotated
    assert case.tools(also_trusted=["new"]).read_table(path).equals(TABLE)
    case.keystore.set_enabled(moved, True)  # type: ignore[union-attr]
    # Keys that the rotation left alone need not be there for its undoing.
    case.disable(None, "kb")
    report = tools.undo_rotation(case.folder)
    assert report.counts == Counter({Outcome.RESTORED: 1}) and report.kms_calls.unwrap
    assert tree_digest(case.folder) == before


def test_undo_with_an_aad_prefix_that_is_not_stored(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write(tools=case.tools(aad_prefix="secret", store_aad_prefix=False))
    before = tree_digest(case.folder)
    assert case.tools().rotate(path, moves={"kf": "new"}, aad_prefix="secret", keep_old=True).succeeded
    (file,) = case.tools().undo_rotation(path).files
    assert file.error_class == "AadPrefixError"
    assert case.tools().undo_rotation(path, aad_prefix="secret").succeeded
    assert tree_digest(case.folder) == before


@every_key_material
def test_undo_without_a_kms(tmp_path: Path, key_material: str) -> None:
    """Old keys that nobody unwraps are not put back."""
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path = case.write()
    case.add_version()
    assert case.tools().rotate(path, keep_old=True).succeeded
    before = tree_digest(case.folder)
    table = {"footer_key": "dk", "column_keys": {}, "unlisted_columns": "footer_key"}
    document = {"version": 1, "data_keys": {"dk": "MDEyMzQ1Njc4OTAxMjM0NQ=="}, "tables": {"t": table}}
    (file,) = Keytools.from_mapping(document).undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and "no KMS unwraps its keys" in str(file.error)
    assert tree_digest(case.folder) == before


@every_key_material
def test_several_rotations_are_undone_one_by_one(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    changing = path if key_material == "internal" else key_material_file(path)
    contents = []
    for _ in range(3):
        contents.append(changing.read_bytes())
        assert tools.rotate(path, keep_old=True).succeeded
    for content in reversed(contents):
        assert tools.undo_rotation(path).succeeded
        assert changing.read_bytes() == content
    assert kept(case.folder) == []


@every_key_material
def test_a_file_that_others_change_while_it_is_undone(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is attempted again, and the last time its folder is kept from others."""
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    before = tree_digest(case.folder)
    assert tools.rotate(path, keep_old=True).succeeded
    name = "replace_tail" if key_material == "internal" else "replace_external_material"
    replace, locked = getattr(restoring, name), []

    def disturbed(*arguments: Any, locked_folder: str | None = None) -> Any:
        locked.append(locked_folder)
        if locked_folder is None:
            os.utime(path)
        return replace(*arguments, locked_folder=locked_folder)

    monkeypatch.setattr(restoring, name, disturbed)
    assert tools.undo_rotation(case.folder).counts == Counter({Outcome.RESTORED: 1})
    assert locked == [None] * data_set_run.ATTEMPTS + [str(case.folder)]
    assert tree_digest(case.folder) == before


@every_key_material
def test_two_at_once_do_not_undo_two_rotations(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    assert tools.rotate(path, keep_old=True).succeeded
    once = {name: digest for name, digest in tree_digest(case.folder).items() if not name.endswith(SUFFIX)}
    assert tools.rotate(path, keep_old=True).succeeded
    read = restoring.read_kept

    def overtaken(file: Any) -> Any:
        monkeypatch.setattr(restoring, "read_kept", read)
        assert case.tools().undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
        return read(file)

    monkeypatch.setattr(restoring, "read_kept", overtaken)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and "by another process meanwhile" in str(file.error)
    now = tree_digest(case.folder)
    assert {name: digest for name, digest in now.items() if not name.endswith(SUFFIX)} == once
    assert len(kept(case.folder)) == 1


def test_a_file_that_changes_when_half_of_it_is_back_is_not_attempted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of other writers has keys in both places: the next attempt would undo an earlier rotation in one."""
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path, tools = case.write(), case.tools()
    location = FileLocation.resolve(path)
    assert tools.rotate(path, keep_old=True).succeeded
    once = key_material_file(path).read_bytes()
    assert tools.rotate(path, keep_old=True).succeeded
    tail, _ = read_tail(location)
    keep(location, location, "tail", tail.offset, tail.data, tail.data, new_rotation_id())
    before = kept(case.folder)
    attempts: list[Any] = []

    def changed(*arguments: Any) -> Any:
        attempts.append(arguments)
        raise changed_while_rotated(location)

    monkeypatch.setattr(restoring, "_restore_tail", changed)
    (file,) = tools.undo_rotation(path).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "OutputError")
    assert isinstance(file.error, OutputError) and file.error.hint == "Undo the rotation again."
    assert len(attempts) == 1
    assert key_material_file(path).read_bytes() == once and len(kept(case.folder)) == len(before) - 1
    # Where nothing is back yet, it is.
    material = [name for name in kept(case.folder) if "key_material" in name]
    for name in material:
        (case.folder / name).unlink()
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and "constantly being changed" in str(file.error)
    assert len(attempts) > 2


@every_key_material
@pytest.mark.parametrize("kind", ["in_memory", "keystore"])
def test_a_folder_that_is_there_twice(tmp_path: Path, key_material: str, kind: str) -> None:
    case = Case.make(tmp_path, kind, key_material=key_material)
    path, tools = case.write("p=1/x.parquet"), case.tools()
    (case.folder / "p=2").symlink_to(path.parent)
    before = tree_digest(path.parent)
    case.add_version()
    report = tools.rotate(case.folder, keep_old=True)
    assert report.succeeded and report.counts == {Outcome.ROTATED: 1, Outcome.NOTHING_TO_ROTATE: 1}
    assert tools.undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert tree_digest(path.parent) == before


@every_key_material
def test_a_file_that_changed_since_is_left_as_it_is(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    tools.rotate(path, keep_old=True)
    case.write(table=TABLE.slice(0, 7))
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(case.folder).files
    assert file.outcome is Outcome.FAILED and "changed since" in str(file.error)
    assert tree_digest(case.folder) == before


@every_key_material
def test_drop(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    tools = case.tools()
    for name in ("x.parquet", "x.parquet.1-a.parquet"):
        case.write(name)
    for _ in range(2):
        tools.rotate(case.folder, keep_old=True)
    assert len(kept(case.folder)) == 4
    assert tools.drop_old_keys(case.folder / "x.parquet") == 2 and len(kept(case.folder)) == 2
    assert tools.drop_old_keys(case.folder) == 2 and kept(case.folder) == []


@every_key_material
def test_a_rotation_that_fails_keeps_nothing(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path = case.write()
    before = tree_digest(case.folder)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(rewrapping, "replace_external_material", fail)
    monkeypatch.setattr(rewrapping, "replace_tail", fail)
    (file,) = case.tools().rotate(path, keep_old=True).files
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
    # The first folder that is synced is that of what is kept.
    monkeypatch.setattr(rewrapping, "keep", lambda *rest: undisturbed(lambda: keep(*rest)))

    def undisturbed(call: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            return call()

    (file,) = tools.rotate(path, keep_old=True).files
    monkeypatch.undo()
    assert file.outcome is Outcome.FAILED and "input/output error" in str(file.error)
    assert tools.read_table(path).equals(TABLE) and len(kept(case.folder)) == 1
    assert tools.undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert tree_digest(case.folder) == before


@every_key_material
def test_what_a_crash_leaves(tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    changing = path if key_material == "internal" else key_material_file(path)
    old = changing.read_bytes()
    tools.rotate(path, keep_old=True)
    (name,) = kept(case.folder)
    # After the old keys are back, and before what was kept is removed.
    saved = (case.folder / name).read_bytes()
    tools.undo_rotation(path)
    (case.folder / name).write_bytes(saved)
    assert tools.undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert changing.read_bytes() == old and kept(case.folder) == []
    # After something was kept, and before it is replaced: it fits nothing, and another one does.
    (case.folder / name).write_bytes(saved)
    tools.rotate(path, keep_old=True)
    (case.folder / name.replace(".2", ".9", 1)).write_bytes(saved)
    assert tools.undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert changing.read_bytes() == old


def test_a_disk_that_does_not_keep_what_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "keystore")
    path, tools = case.write(), case.tools()
    case.add_version()
    assert tools.rotate(path, keep_old=True).succeeded
    before = tree_digest(case.folder)
    write_at = LocalSink.write_at

    def write_wrong(sink: LocalSink, offset: int, data: Any) -> None:
        wrong = bytearray(data)
        wrong[-9] ^= 1
        write_at(sink, offset, bytes(wrong))

    with monkeypatch.context() as patched:
        patched.setattr(LocalSink, "write_at", write_wrong)
        (file,) = tools.undo_rotation(path).files
    assert isinstance(file.error, OutputError) and "does not read back" in str(file.error)
    assert tree_digest(case.folder) == before
    assert tools.undo_rotation(path).succeeded and kept(case.folder) == []


def test_damaged(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path, tools = case.write(), case.tools()
    tools.rotate(path, keep_old=True)
    (name,) = kept(case.folder)
    content = bytearray((case.folder / name).read_bytes())
    content[-1] ^= 1
    head, _, old = (case.folder / name).read_bytes().partition(b"\n")
    # Of a newer version; that of another kind of file; and JSON that is no object, or too deep for one.
    newer, renamed = head.replace(b': 1, "kind"', b': 2, "kind"'), head.replace(b'"tail"', b'"key_material"')
    assert head not in (newer, renamed)
    forged = [b"\n".join((line, old)) for line in (newer, renamed, b"[]", b"[" * 100_000)]
    for damaged in (bytes(content), b"", b"{}\n", b"no JSON\nold", head, *forged):
        (case.folder / name).write_bytes(damaged)
        before = tree_digest(case.folder)
        (file,) = tools.undo_rotation(path).files
        assert file.error_class == "KeyMaterialError" and "damaged" in str(file.error)
        assert file.error is not None and getattr(file.error, "path", "").endswith(name)
        assert tree_digest(case.folder) == before
        # Nothing else is removed either, whatever its name is.
        assert tools.drop_old_keys(path) == (damaged == bytes(content))
        assert damaged == bytes(content) or tree_digest(case.folder) == before


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


def test_what_is_in_place_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can tell, old keys stay."""
    file = FileLocation(pafs.LocalFileSystem(), str(tmp_path / "x"))
    assert not may_be_in_place(file, 4, b"tail")
    for content, is_there in [
        (b"datatail", True),
        (b"dataliat", False),
        (b"datatail!", False),
        (b"datata", False),
    ]:
        (tmp_path / "x").write_bytes(content)
        assert may_be_in_place(file, 4, b"tail") == is_there
    for error in (PermissionError(13, "no"), KeytoolsError("no")):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(replaced_keys, "open_source", fail)
            assert may_be_in_place(file, 4, b"tail")
            assert not replaced_keys.KeptFile(file, "tail").looks_kept()


def test_what_is_kept_is_a_file(tmp_path: Path) -> None:
    """On any file system; that on this machine a link is none, tests/tamper/test_hostile_rotation.py has."""
    memory, _ = pafs.FileSystem.from_uri("mock:///")
    memory.create_dir("d")
    name = ".x.parquet.20260131T120000000000Z-0011.tail.old_keys"
    memory.create_dir(f"d/{name}")
    with memory.open_output_stream(f"d/{name.replace('11', '22')}"):
        pass
    found = kept_files_in(memory, "d")["x.parquet"]
    assert [(kept.location.name, kept.is_regular) for kept in found] == [
        (name.replace("11", "22"), True),
        (name, False),
    ]
    (tmp_path / name).mkdir()
    assert [kept.is_regular for kept in kept_files_in(pafs.LocalFileSystem(), str(tmp_path))["x.parquet"]] == [
        False
    ]


def test_what_somebody_else_removed_is_removed(tmp_path: Path) -> None:
    left: list[str] = []
    with naming_left_behind(left.append):
        remove_kept(FileLocation(pafs.LocalFileSystem(), str(tmp_path / "x")))
    assert left == []


def test_what_is_kept_is_as_private_as_the_file(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    path.chmod(0o600)
    case.tools().rotate(path, keep_old=True)
    (name,) = kept(case.folder)
    assert (case.folder / name).stat().st_mode & 0o777 == 0o600


def test_folders_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory")
    for i in range(5):
        case.write(f"{i}.parquet")
    listed: list[str] = []
    find = restoring.kept_files_in

    def counted(filesystem: Any, folder: str) -> Any:
        listed.append(folder)
        return find(filesystem, folder)

    monkeypatch.setattr(restoring, "kept_files_in", counted)
    assert case.tools().undo_rotation(case.folder).counts == Counter({Outcome.NOTHING_TO_RESTORE: 5})
    assert len(listed) == 1


@every_key_material
def test_what_may_not_be_removed_is_named(tmp_path: Path, key_material: str) -> None:
    """The keys are back in any case: that is no failure."""

    class NoDelete(pafs.LocalFileSystem):  # type: ignore[misc]
        def delete_file(self, path: str) -> None:
            raise PermissionError(13, "AWS Error ACCESS_DENIED during DeleteObject operation")

    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    path, tools = case.write(), case.tools()
    before = tree_digest(case.folder)
    assert tools.rotate(path, keep_old=True).succeeded
    (left,) = kept(case.folder)
    report = tools.undo_rotation(str(case.folder), filesystem=NoDelete())
    assert report.succeeded and report.counts == Counter({Outcome.RESTORED: 1})
    (text,) = report.left_behind
    assert left in text and "cannot be removed: remove it" in text
    after = tree_digest(case.folder)
    assert {name: digest for name, digest in after.items() if not name.endswith(SUFFIX)} == before
