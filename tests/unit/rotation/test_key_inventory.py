"""Which files and columns depend on which master key."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, encrypted
from rotation_case import (
    MASTER_KEYS,
    TABLE,
    UNIFORM,
    Case,
    external_entries,
    key_material_file,
    write_with_pyarrow,
)

from parquet_keytools import Keytools, KeytoolsError, parse_configuration
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import ConfigurationError, KmsAccessDeniedError
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.inventory import FileKeyUses, why_unknown
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import LeftOut, LeftOutReason

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])
every_footer = pytest.mark.parametrize("plaintext_footer", [True, False])


def only(tools: Keytools, path: Path) -> FileKeyUses:
    (file,) = tools.key_inventory(path)
    return file


@every_key_material
@every_footer
@pytest.mark.parametrize("double", [True, False])
def test_every_key_of_a_file(tmp_path: Path, key_material: str, plaintext_footer: bool, double: bool) -> None:
    case = Case.make(
        tmp_path,
        "keystore",
        key_material=key_material,
        plaintext_footer=plaintext_footer,
        double_wrapping=double,
    )
    case.write()
    case.add_version("kb")
    case.tools().rotate(case.folder)
    file = only(case.tools(), case.folder)
    found = {(use.column, use.is_footer): (use.master_key_id, use.version) for use in file.uses}
    assert found == {
        (None, True): ("kf", "1"),
        ("a", False): ("ka", "1"),
        ("nested.x", False): ("ka", "1"),
        ("nested.y.list.element", False): ("ka", "1"),
        ("b", False): ("kb", "2"),
    }
    assert file.unknown is None and file.is_encrypted
    assert {use.wrapping for use in file.uses} == {"double" if double else "single"}
    assert all((use.kek_id is not None) == double for use in file.uses)
    assert all((use.reference is not None) == (key_material == "external") for use in file.uses)


def test_dependence() -> None:
    from parquet_keytools.rotation.inventory import UsedKey

    def uses(*versions: str | None, unknown: KeytoolsError | None = None) -> FileKeyUses:
        found = tuple(UsedKey("a", False, "k", version) for version in versions)
        return FileKeyUses("x", True, found, unknown)

    assert uses("1").depends_on("k") and uses("1").depends_on("k", "1")
    assert uses("1").depends_on("k", "v1") and uses("1").depends_on("k", "v2") is False
    assert uses("1").depends_on("other") is False and uses("1").depends_on("k", "2") is False
    assert uses(None).depends_on("k") and uses(None).depends_on("k", "2") is None
    assert uses("1", unknown=KeytoolsError("?")).depends_on("other") is None
    assert uses("1", unknown=KeytoolsError("?")).depends_on("k", "1") is True


@every_key_material
def test_it_says_what_happens_when_a_key_is_disabled(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    case.write("old.parquet")
    case.add_version()
    case.write("new.parquet")
    of_other: dict[str, Any] = {
        "footer_key": "new",
        "column_keys": {"new": ["a"]},
        "unlisted_columns": "plaintext",
    }
    case.write("other.parquet", tools=case.tools(**of_other))
    tools = case.tools()
    foretold = {
        (key, version): {Path(file.path).name for file in tools.files_using(key, case.folder, version=version)}
        for key in MASTER_KEYS
        for version in ("1", "2")
    }
    for (key, version), names in foretold.items():
        case.disable(int(version), key)
        fails = set()
        for path in case.folder.glob("*.parquet"):
            try:
                case.tools(**(of_other if path.name == "other.parquet" else {})).read_table(path)
            except KeytoolsError:
                fails.add(path.name)
        assert fails == names, (key, version)
        case.keystore.set_enabled(key, True, int(version))  # type: ignore[union-attr]


@every_footer
def test_a_refused_footer_key(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "in_memory", plaintext_footer=plaintext_footer)
    path = case.write()
    assert isinstance(case.kms, InMemoryKms)
    case.kms.deny("kf")
    file = only(case.tools(), path)
    # The columns that a plaintext footer shows are listed; only its signature proves that there are no others.
    assert type(file.unknown).__name__ == "KmsAccessDeniedError"
    assert file.depends_on("kf") and file.depends_on("new") is None
    assert file.depends_on("ka") is (True if plaintext_footer else None)
    assert [found.path for found in case.tools().files_using("new", path)] == [str(path)]


def test_a_refused_footer_key_with_external_key_material(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path = case.write()
    assert isinstance(case.kms, InMemoryKms)
    case.kms.deny("kf")
    file = only(case.tools(), path)
    assert file.unknown is not None and file.depends_on("ka") and file.depends_on("new") is None
    assert {use.reference for use in file.uses} == set(external_entries(path))


def test_files_of_all_kinds(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "data_keys": {"dk": "MDEyMzQ1Njc4OTAxMjM0NQ=="},
        "master_keys": {"name of kf": "kf"},
        "tables": {
            "t": {"footer_key": "dk", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext"},
            "u": {"footer_key": "kf", "unlisted_columns": "plaintext", **UNIFORM},
        },
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    tools.write_table(TABLE, case.folder / "data_key.parquet", table_name="t")
    tools.write_table(TABLE, case.folder / "uniform.parquet", table_name="u")
    pq.write_table(TABLE, case.folder / "plaintext.parquet")
    (case.folder / "bad.parquet").write_bytes(b"PAR1")
    write_with_pyarrow(case.kms, case.folder / "pyarrow.parquet")
    found = {Path(file.path).stem: file for file in tools.key_inventory(case.folder)}
    assert [(use.data_key, use.master_key_id) for use in found["data_key"].uses] == [("dk", None), (None, "ka")]
    assert [(use.column, use.master_key_id) for use in found["uniform"].uses] == [(None, "kf")]
    assert found["bad"].is_encrypted and found["bad"].is_unseen and not found["pyarrow"].is_unseen
    assert not found["plaintext"].is_encrypted and found["plaintext"].depends_on("kf") is False
    assert type(found["bad"].unknown).__name__ == "ParquetFormatError" and found["bad"].depends_on("kf") is None
    assert len(found["pyarrow"].uses) == 5
    using = {Path(file.path).stem for file in tools.files_using("name of kf", case.folder)}
    assert using == {"uniform", "pyarrow", "bad"}


@pytest.mark.parametrize("name", ["_x.parquet", "_metadata", "_KEY_MATERIAL_FOR_z.parquet.json"])
@pytest.mark.parametrize("start", [b"PARE", b"PAR1", b"what"])
def test_what_no_data_set_has_may_need_keys(tmp_path: Path, name: str, start: bytes) -> None:
    """Arrow reads such a file if it is named, even if its first bytes are wrong."""
    case = Case.make(tmp_path, "keystore")
    content = case.write().read_bytes()
    (case.folder / name).write_bytes(start + content[4:])
    (case.folder / "_KEY_MATERIAL_FOR_y.parquet.json").write_text("{}")
    (case.folder / "_half").write_bytes(content[:-4])
    (case.folder / "_no_parquet").write_bytes(b"what" * 9)
    inventory = {Path(file.path).name: file for file in case.tools().key_inventory(case.folder)}
    assert inventory.keys() == {"x.parquet", name}
    assert inventory["x.parquet"].unknown is None and inventory[name].depends_on("new") is None
    assert inventory[name].is_encrypted and inventory[name].is_skipped
    assert len(list(case.tools().key_inventory(case.folder, ignore_skipped=True))) == 1


def test_what_is_passed_over_in_a_store(tmp_path: Path) -> None:
    """A look at this machine's disk does not help."""
    from fsspec.implementations.memory import MemoryFileSystem

    case, memory = Case.make(tmp_path, "keystore"), MemoryFileSystem()
    content = case.write().read_bytes()
    root = f"/{tmp_path.name}"
    for name, data in {"x.parquet": content, "_x.parquet": content, "_SUCCESS": b"", "_note": b"text" * 9}.items():
        memory.pipe_file(f"{root}/{name}", data)
    found = [Path(file.path).name for file in case.tools().key_inventory(root, filesystem=memory)]
    assert sorted(found) == ["_x.parquet", "x.parquet"]
    # Removed since it was listed: it is not a dangling link, as there are none.
    gone = FileLocation.resolve(f"{root}/_x.parquet", memory)
    memory.rm(f"{root}/_x.parquet")
    assert why_unknown(LeftOut(gone, LeftOutReason.PASSED_OVER)) is None
    memory.rm(root, recursive=True)


def test_what_is_passed_over_and_is_no_file(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write()
    os.mkfifo(case.folder / "_pipe.parquet")
    (case.folder / "_nowhere.parquet").symlink_to("nowhere")
    (case.folder / ".#lock").symlink_to("somebody@machine:1")
    (case.folder / "_itself").symlink_to("_itself")
    unknown = {Path(file.path).name: str(file.unknown) for file in case.tools().key_inventory(case.folder)}
    assert unknown.keys() == {"x.parquet", "_nowhere.parquet", "_itself"}
    assert "it is a dangling link" in unknown["_nowhere.parquet"]
    assert "cannot be read: Too many levels of symbolic links" in unknown["_itself"]
    # A folder that cannot be listed may hold anything.
    folder = LeftOut(FileLocation.resolve(case.folder), LeftOutReason.PASSED_OVER)
    assert "cannot be read" in str(why_unknown(folder))


def test_a_folder_where_nothing_can_be_looked_into(tmp_path: Path) -> None:
    """It does not pass as a folder in which no file needs a key."""
    case = Case.make(tmp_path, "keystore")
    case.write().rename(case.folder / "_x.parquet")
    (case.folder / "y.parquet").symlink_to("nowhere")
    found = list(case.tools().files_using("kf", case.folder))
    assert {Path(file.path).name for file in found} == {"_x.parquet", "y.parquet"}
    assert all(file.is_encrypted and file.unknown is not None for file in found)
    assert {file.is_unseen for file in found} == {file.is_skipped for file in found} == {True, False}


def test_the_key_of_a_column_is_proven(tmp_path: Path) -> None:
    """The KMS unwraps an entry of another file, which opens nothing here: the column needs a key that is lost."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path, other = case.write(), case.write("y.parquet")
    texts, others = (json.loads(key_material_file(file).read_text()) for file in (path, other))
    key_material_file(path).write_text(json.dumps({**texts, "columnKey0": others["columnKey0"]}))
    found = {Path(file.path).name: file for file in case.tools().key_inventory(case.folder)}
    assert isinstance(found["x.parquet"].unknown, KeytoolsError) and found["y.parquet"].unknown is None
    assert found["x.parquet"].depends_on("new") is None and found["y.parquet"].depends_on("new") is False


def test_a_prefix_that_is_not_stored(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", aad_prefix="here", store_aad_prefix=False)
    path = case.write()
    assert only(case.tools(), path).unknown is None
    (file,) = case.tools().key_inventory(path, aad_prefix="there")
    assert isinstance(file.unknown, KeytoolsError) and file.depends_on("kf") and file.depends_on("new") is None


@pytest.mark.parametrize("of", ["a column", "a column that is not authentic", "the footer", "a schema"])
def test_key_metadata_that_nobody_understands(tmp_path: Path, of: str) -> None:
    """It does not end the inventory; it is unknown which key the file needs."""
    case = Case.make(tmp_path, "in_memory")
    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "data_keys": {"dk": base64.b64encode(bytes(16)).decode()},
        "tables": {
            "t": {
                "footer_key": "dk",
                "column_keys": {"ka": ["a"]},
                "unlisted_columns": "plaintext",
                "plaintext_footer": True,
            }
        },
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    path = case.folder / "x.parquet"
    tools.write_table(TABLE, path)
    plain, odd = io.BytesIO(), b'{"keyMaterialType":"PKMT1"}'
    pq.write_table(TABLE, plain)
    dek = SecretBytes(bytes(15) + b"1" if "not" in of else bytes(16))
    key_metadata = odd if of == "the footer" else read_envelope(MemorySource(path.read_bytes())).key_metadata
    encryption = FileEncryption(
        dek, key_metadata, {("a",): ColumnKey(SecretBytes.random(128), odd)}, plaintext_footer=True
    )
    data = encrypted(plain.getvalue(), encryption)
    if of == "a schema":
        # The list of columns is unknown then, too.
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        footer, length = FileMetaData.read(data[start:])
        footer.schema = footer.schema[:-1]
        content = footer.serialise() + data[start + length : -8]
        data = data[:start] + content + len(content).to_bytes(4, "little") + data[-4:]
    (case.folder / "odd.parquet").write_bytes(data)
    found = {Path(file.path).stem: file for file in tools.key_inventory(case.folder)}
    assert found["x"].unknown is None and found["x"].depends_on("ka") and found["x"].depends_on("new") is False
    assert isinstance(found["odd"].unknown, KeytoolsError) and found["odd"].is_encrypted
    assert found["odd"].depends_on("ka") is None
    assert found["odd"].summary()["keys"] == ([] if of == "the footer" else ["dk"])


def test_without_a_kms(tmp_path: Path) -> None:
    """A key that a KMS wrapped is listed, but not proven."""
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    document: dict[str, Any] = {
        "version": 1,
        "data_keys": {"dk": base64.b64encode(bytes(16)).decode()},
        "tables": {"t": {"footer_key": "dk", "column_keys": {}, "unlisted_columns": "footer_key"}},
    }
    tools = Keytools(parse_configuration(document))
    tools.write_table(TABLE, case.folder / "own.parquet")
    file = only(tools, path)
    assert isinstance(file.unknown, KeytoolsError) and file.depends_on("kf")
    assert [(use.master_key_id, use.version) for use in file.uses] == [("kf", None)]
    own = only(tools, case.folder / "own.parquet")
    assert own.unknown is None and {use.data_key for use in own.uses} == {"dk"}


def test_entries_that_nothing_refers_to(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    location = key_material_file(path)
    texts = json.loads(location.read_text())
    left = json.loads(texts["columnKey0"]) | {"masterKeyID": "new"}
    location.write_text(json.dumps({**texts, "left": json.dumps(left)}))
    file = only(case.tools(), path)
    assert [(use.column, use.master_key_id) for use in file.uses if use.reference == "left"] == [(None, "new")]


def test_the_kms_is_asked_once(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    tools = case.tools()
    for i in range(10):
        case.write(f"{i}.parquet", tools=tools)
    before = case.kms.call_counts["unwrap"]
    assert len(list(case.tools().key_inventory(case.folder))) == 10
    assert case.kms.call_counts["unwrap"] == before + 3


class AliasingKms(InMemoryKms):
    """Also knows the master key `ka` as `alias`, as AWS does."""

    tells = True

    def _identity(self, master_key_id: str) -> str:
        if not self.tells:
            raise KmsAccessDeniedError
        return {"alias": "ka"}.get(master_key_id, master_key_id)


def test_a_master_key_by_another_name(tmp_path: Path) -> None:
    """After a key is renamed to its alias, files must not seem to need no key."""
    key = b"0123456789abcdef"
    kms = AliasingKms(dict.fromkeys(MASTER_KEYS) | {"ka": key, "alias": key})
    case = Case(tmp_path, kms, None, {"column_keys": {"alias": ["a"], "kb": ["b"]}})
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": [*MASTER_KEYS, "alias"]},
        "tables": {"t": {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings}},
    }
    tools = Keytools(parse_configuration(document), kms=kms)
    path = case.write(tools=tools)
    assert [file.path for file in tools.files_using("ka", path)] == [str(path)]
    assert list(tools.files_using("new", path)) == []
    (file,) = tools.rotate(path, moves={"ka": "new"}).files
    assert [(change.master_key_id, change.new_master_key_id) for change in file.keys] == [("alias", "new")]
    kms.tells = False
    assert [found.path for found in tools.files_using("ka", path)] == [str(path)]


def test_moves_that_contradict_each_other_by_another_name(tmp_path: Path) -> None:
    """A second run would move keys from `ka` to the target of its alias, which others may use."""
    key = b"0123456789abcdef"
    kms = AliasingKms(dict.fromkeys(MASTER_KEYS) | {"ka": key, "alias": key})
    case = Case(tmp_path, kms, None)
    path = case.write()
    before = path.read_bytes()
    mistakes: dict[str, dict[str, str]] = {
        "'alias' is to be moved and is the target of a move, as 'ka'": {"kb": "ka", "alias": "new"},
        "'ka' is to be moved and is the target of a move, as 'alias'": {"kb": "alias", "ka": "new"},
        "'alias' and 'ka' are one master key, and are to be moved to different ones": {"alias": "new", "ka": "kf"},
    }
    for mistake, moves in mistakes.items():
        with pytest.raises(ConfigurationError, match=mistake):
            case.tools().rotate(path, moves=moves)
    assert path.read_bytes() == before
    # Both names of it, and one by the other.
    for moves in ({"alias": "new", "ka": "new"}, {"alias": "ka"}):
        assert case.tools().rotate(path, moves=moves, dry_run=True).succeeded
