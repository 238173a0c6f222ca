"""Files re-keyed in place, while others write and rotate."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs as pafs
from rotation_case import TABLE, Case, external_entries, materials, names, read_with_pyarrow

from parquet_keytools import KeytoolsError
from parquet_keytools.errors import KeyMaterialError, OutputError
from parquet_keytools.format.file_layout import shortened
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation import rekeying
from parquet_keytools.rotation import rotate as tail
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import without_leftovers
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import whole_output

KINDS: dict[str, dict[str, Any]] = {
    "encrypted footer": {},
    "plaintext footer": {"plaintext_footer": True},
    "external": {"key_material": "external"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_readers_read_it(tmp_path: Path, kind: str) -> None:
    case = Case.make(tmp_path, "in_memory", **KINDS[kind])
    path = case.write()
    old_size_bytes = path.stat().st_size
    (file,) = case.tools().rekey_in_place(path).files
    assert read_with_pyarrow(case.kms, path).equals(TABLE)
    assert file.old_size_bytes == old_size_bytes
    assert file.bytes_written == file.new_size_bytes == path.stat().st_size


def test_key_material_moves_inside_and_outside(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    assert case.tools(key_material="internal").rekey_in_place(path).succeeded
    assert names(case.folder) == ["x.parquet"]
    assert case.tools().rekey_in_place(path).succeeded
    assert len(external_entries(path)) == 5
    assert case.tools().read_table(path).equals(TABLE)


def test_a_rotation_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes while it is re-keyed: it is read again, and the output from the old file is discarded."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    original, turns = rekeying.check_rekeyed, []

    def check(*arguments: Any, **options: Any) -> None:
        turns.append(1)
        if len(turns) == 1:
            case.write(table=TABLE.slice(0, 10))
        original(*arguments, **options)

    monkeypatch.setattr(rekeying, "check_rekeyed", check)
    assert case.tools().rekey_in_place(path).succeeded
    assert len(turns) == 2
    assert case.tools().read_table(path).equals(TABLE.slice(0, 10))
    assert names(case.folder) == ["x.parquet"]


@pytest.mark.parametrize("moment", ["_open", "_write"])
@pytest.mark.parametrize("error", [KeytoolsError("half old, half new"), OSError(5, "half old, half new")])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, moment: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of two files fails in some way: neither file is reported as failed."""
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    original, turns = getattr(rekeying.Rekeying, moment), []

    def replaced_meanwhile(*arguments: Any, **options: Any) -> Any:
        turns.append(1)
        if len(turns) == 1:
            case.write(table=TABLE.slice(0, 10))
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(rekeying.Rekeying, moment, replaced_meanwhile)
    (file,) = case.tools().rekey_in_place(path).files
    assert len(turns) == 2 and names(case.folder) == ["x.parquet"]
    assert case.tools().read_table(path).equals(TABLE.slice(0, 10))
    assert file.new_size_bytes == path.stat().st_size


def test_a_file_that_is_changed_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    original = rekeying.check_rekeyed

    def check(*arguments: Any, **options: Any) -> None:
        # By a process that ignores the lock.
        path.write_bytes(path.read_bytes())
        original(*arguments, **options)

    monkeypatch.setattr(rekeying, "check_rekeyed", check)
    with pytest.raises(OutputError, match="constantly being changed by others"):
        case.tools().rekey_in_place(path)
    assert names(case.folder) == ["x.parquet"]


def test_rotations_and_rekeys_at_the_same_time(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    errors: list[BaseException] = []

    def work(rekeys: bool) -> None:
        tools = case.tools()
        try:
            for _ in range(5):
                if rekeys:
                    assert tools.rekey_in_place(case.folder).succeeded
                else:
                    assert tools.rotate(case.folder, new_keks=True).succeeded
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert case.tools().read_table(path).equals(TABLE)


@pytest.mark.parametrize(
    ("offset", "said"),
    [(40, r".*the module does not authenticate"), (-20, r"footer: the module does not authenticate")],
)
def test_a_new_file_that_does_not_open_does_not_take_the_place(
    tmp_path: Path, offset: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page, or the footer: the error is about the new file, and does not tell anyone to restore the old one."""
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    before = path.read_bytes()
    original = rekeying.file_encryption.encrypt_opened

    def damage(source: Any, sink: Any, *arguments: Any, **options: Any) -> None:
        original(source, sink, *arguments, **options)
        sink.write_at(offset if offset > 0 else source.size_bytes + offset, b"\0" * 8)

    monkeypatch.setattr(rekeying.file_encryption, "encrypt_opened", damage)
    with pytest.raises(
        OutputError, match=rf"^{path}: the new file cannot be read: {said}\. The file is as it was"
    ) as raised:
        case.tools().rekey_in_place(path)
    assert str(raised.value).count(str(path)) == 1
    assert path.read_bytes() == before
    assert names(case.folder) == ["x.parquet"]


@pytest.mark.parametrize("rekeys", [True, False])
def test_a_new_file_that_becomes_shorter_is_made_again(
    tmp_path: Path, rekeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a store, others may replace it: that file changed meanwhile, and is not damaged."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    case.add_version()
    module, turns = rekeying if rekeys else tail, []
    original = module.read_envelope

    def shorter(source: Any, *arguments: Any, **options: Any) -> Any:
        turns.append(source)
        if len(turns) == 1:
            raise shortened(source.path)
        return original(source, *arguments, **options)

    monkeypatch.setattr(module, "read_envelope", shorter)
    tools = case.tools()
    report = tools.rekey_in_place(path) if rekeys else tools.rotate(path)
    assert report.succeeded and len(turns) == 2
    assert case.tools().read_table(path).equals(TABLE)
    assert names(case.folder) == ["x.parquet"]


def test_a_new_file_that_lacks_rows_does_not_take_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right keys, and authentic: the content is compared."""
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    before = path.read_bytes()
    original = rekeying.file_encryption.encrypt_opened

    def one_row_less(source: Any, sink: Any, footer: Any, *arguments: Any, **options: Any) -> None:
        footer.metadata.num_rows -= 1
        original(source, sink, footer, *arguments, **options)
        footer.metadata.num_rows += 1

    monkeypatch.setattr(rekeying.file_encryption, "encrypt_opened", one_row_less)
    with pytest.raises(OutputError, match=r"x\.parquet.* differs from the old file\. The file is as it was"):
        case.tools().rekey_in_place(path)
    assert path.read_bytes() == before
    assert names(case.folder) == ["x.parquet"]


def test_a_kms_that_wraps_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory", double_wrapping=False)
    path = case.write()
    before = path.read_bytes()
    wrap = InMemoryKms._wrap
    monkeypatch.setattr(InMemoryKms, "_wrap", lambda kms, key, name: wrap(kms, SecretBytes.random(128), name))
    with pytest.raises(KeyMaterialError, match="does not unwrap to itself"):
        case.tools().rekey_in_place(path)
    assert path.read_bytes() == before


def test_columns_with_the_data_keys_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    before = path.read_bytes()
    original = rekeying.file_encryption.encrypt_opened

    def swap(source: Any, sink: Any, footer: Any, deks: Any, new: Any, **options: Any) -> None:
        columns = dict(new.columns)
        columns["a",], columns["b",] = columns["b",], columns["a",]
        original(source, sink, footer, deks, dataclasses.replace(new, columns=columns), **options)

    monkeypatch.setattr(rekeying.file_encryption, "encrypt_opened", swap)
    with pytest.raises(OutputError, match=r"the new file cannot be read: .* does not authenticate"):
        case.tools().rekey_in_place(path)
    assert path.read_bytes() == before
    assert names(case.folder) == ["x.parquet"]


def test_a_kek_that_leaked_is_not_taken_from_a_cache_of_others(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", double_wrapping=True)
    tools = case.tools()
    path, other = case.write(tools=tools), case.folder / "other.parquet"
    new_tools = case.tools()
    # Both have cached KEKs, which would wrap the keys of their next files.
    case.write(other.name, tools=new_tools)
    leaked = {material.kek_id for file in (path, other) for material in materials(tools, file)}
    assert tools.rekey_in_place(path, new_keytools=new_tools).succeeded
    assert leaked.isdisjoint({material.kek_id for material in materials(tools, path)})


def test_results_need_not_be_kept(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write()
    seen: list[Any] = []
    report = case.tools().rekey_in_place(case.folder, keep_results=False, on_file=seen.append)
    assert report.files == [] and len(seen) == 1 and report.succeeded


def test_what_another_process_writes_is_not_left_over(tmp_path: Path) -> None:
    target = FileLocation.resolve(tmp_path / "x")
    target_path = Path(target.path)
    target_path.write_bytes(b"old")
    with whole_output(target) as pending:
        assert list(without_leftovers([target])) == [target]
        with pending.open_sink() as sink:
            sink.write_at(0, b"new")
        assert list(without_leftovers([target])) == [target]
    assert target_path.read_bytes() == b"new"
    assert names(tmp_path) == ["x"]
    with pytest.raises(RuntimeError), whole_output(target):
        raise RuntimeError
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_file_system_that_is_not_local(tmp_path: Path, kind: str) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    memory = MemoryFileSystem()
    folder = f"/rekey-{kind.replace(' ', '-')}"
    memory.makedirs(folder, exist_ok=True)
    case = Case.make(tmp_path, "in_memory", **KINDS[kind])
    filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(memory))
    tools = case.tools()
    tools.write_table(TABLE, f"{folder}/x.parquet", filesystem=filesystem)
    before = memory.cat(f"{folder}/x.parquet")
    report = tools.rekey_in_place(folder, filesystem=filesystem)
    assert report.succeeded, report.failures
    assert memory.cat(f"{folder}/x.parquet") != before
    assert isinstance(tools.read_table(f"{folder}/x.parquet", filesystem=filesystem), pa.Table)
    assert len(memory.ls(folder)) == (2 if kind == "external" else 1)
