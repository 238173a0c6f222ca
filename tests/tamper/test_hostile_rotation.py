"""An attacker who can write to the storage, while keys are rotated and listed.

Nothing in a data set, or beside its files, is believed without proof: no label, and no key material that no
authentic footer refers to. A rotation reports "done" and `keys` reports "not used" only for what was proven.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_spark import FakeSpark
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs
from rotation_case import MASTER_KEYS, TABLE, Case, external_entries, key_material_file, tree_digest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.format.file_layout import with_trailer
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.file_keys import read_tail
from parquet_keytools.rotation.report import FileRotation, Outcome
from parquet_keytools.rotation.rotate import footer_of
from parquet_keytools.storage.locations import FileLocation

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])
every_footer = pytest.mark.parametrize("plaintext_footer", [False, True])


class CutOffError(BaseException):
    """Simulates the end of a process."""


def cut_off_after(count: int) -> Callable[[FileRotation], None]:
    seen: list[FileRotation] = []

    def on_file(result: FileRotation) -> None:
        seen.append(result)
        if len(seen) == count:
            raise CutOffError

    return on_file


def unknown_of(tools: Keytools, path: Path) -> Exception:
    """Return why the keys of a file are not all known; whether it needs some other key is then unknown, too."""
    (file,) = tools.key_inventory(path)
    assert file.unknown is not None and file.depends_on("new") is not False
    assert [found.path for found in tools.files_using("new", path)] == [str(path)]
    return file.unknown


def replace_tail(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file from its footer on."""
    tail, _ = read_tail(FileLocation.resolve(path))
    path.write_bytes(path.read_bytes()[: tail.offset] + change(tail.data))


# --- restored old files ---


@every_key_material
def test_an_old_file_with_its_old_times_is_not_taken_for_finished(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    paths = [case.write(f"{number}.parquet") for number in range(3)]
    case.add_version()
    old = {path: (path.read_bytes(), path.stat()) for path in case.folder.iterdir()}
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(2))
    for path, (content, stat) in old.items():
        if path.name.removeprefix("_KEY_MATERIAL_FOR_").startswith("0"):
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = case.tools().rotate(case.folder)
    assert report.files[0].outcome is Outcome.ROTATED
    assert report.counts[Outcome.ALREADY_CURRENT] >= 1 and report.succeeded
    case.disable(1)
    assert all(case.tools().read_table(path).equals(TABLE) for path in paths)


@every_key_material
def test_a_rekeyed_file_that_was_put_back_is_rekeyed_again(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    for name in ("0.parquet", "1.parquet"):
        case.write(name)
    old = {path: path.read_bytes() for path in case.folder.iterdir()}
    with pytest.raises(CutOffError):
        case.tools().rekey_in_place(case.folder, on_file=cut_off_after(1))
    for path, content in old.items():
        path.write_bytes(content)
    report = case.tools().rekey_in_place(case.folder)
    assert report.counts == Counter({Outcome.REKEYED: 2})
    assert all(path.read_bytes() != content for path, content in old.items())


# --- labels ---


def relabel(data: bytes) -> bytes:
    """Relabel everything that the first version wrapped as wrapped by the second one."""
    assert b"keystore:v1:" in data
    return data.replace(b"keystore:v1:", b"keystore:v2:")


@every_key_material
@every_footer
@pytest.mark.parametrize("double", [True, False])
def test_a_label_of_a_version_is_not_believed(
    tmp_path: Path, key_material: str, plaintext_footer: bool, double: bool
) -> None:
    settings: dict[str, Any] = {
        "key_material": key_material,
        "plaintext_footer": plaintext_footer,
        "double_wrapping": double,
    }
    case = Case.make(tmp_path, "keystore", **settings)
    path = case.write()
    case.add_version()
    if key_material == "internal":
        replace_tail(path, relabel)
    else:
        material = key_material_file(path)
        material.write_bytes(relabel(material.read_bytes()))
    before = tree_digest(case.folder)
    for options in ({}, {"dry_run": True}, {"older_than": "2"}, {"only_master_keys": ["kf"]}):
        (file,) = case.tools().rotate(case.folder, **options).files
        assert file.outcome is Outcome.FAILED and file.path == str(path), options
    assert tree_digest(case.folder) == before
    assert type(unknown_of(case.tools(), path)).__name__ in ("WrappedKeyInvalidError", "FooterSignatureError")


@every_footer
@pytest.mark.parametrize("reference", ["footerKey", "columnKey0", "columnKey3"])
@pytest.mark.parametrize("change", [{"masterKeyID": "new"}, {"wrappedKEK": "v2"}, {"wrappedDEK": "other"}])
def test_an_entry_that_was_changed_is_not_believed(
    tmp_path: Path, plaintext_footer: bool, reference: str, change: dict[str, str]
) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external", plaintext_footer=plaintext_footer)
    path = case.write()
    case.add_version()
    entries = external_entries(path)
    fields = entries[reference]
    for name, value in change.items():
        if name == "masterKeyID":
            fields[name] = value
        elif name == "wrappedKEK":
            fields[name] = relabel(fields[name].encode()).decode()
        else:
            # From another column: the KEK is right, and the DEK belongs to none of these columns.
            others = [other for other in entries if other != reference and other.startswith("column")]
            same_kek = [o for o in others if entries[o]["wrappedKEK"] == fields["wrappedKEK"]]
            fields[name] = entries[(same_kek or others)[0]][name]
    key_material_file(path).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))
    before = tree_digest(case.folder)
    outcomes = {
        options: case.tools().rotate(case.folder, only_master_keys=list(options) or None).files[0].outcome
        for options in ((), ("kf",), ("ka",), ("kb",), ("new",))
    }
    assert set(outcomes.values()) == {Outcome.FAILED}, outcomes
    assert tree_digest(case.folder) == before
    unknown_of(case.tools(), path)


def test_the_new_key_of_a_footer_does_not_vouch_for_old_keys_of_columns(tmp_path: Path) -> None:
    """The footer's key metadata precedes the encrypted footer: it can be combined with an older footer, too."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    old = footer_of(tail.data)
    _, old_end = FileCryptoMetaData.read(old)
    case.add_version()
    assert case.tools().rotate(path).succeeded

    def with_old_module(new: bytes) -> bytes:
        _, end = FileCryptoMetaData.read(footer_of(new))
        return with_trailer(new[:end] + old[old_end:], b"PARE")

    replace_tail(path, with_old_module)
    used = {(use.master_key_id, use.version) for file in case.tools().key_inventory(path) for use in file.uses}
    assert used == {("kf", "2"), ("ka", "1"), ("kb", "1")}
    (file,) = case.tools().rotate(path).files
    assert file.outcome is Outcome.ROTATED
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


def test_a_footer_that_denies_its_encryption(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=True)
    path = case.write()
    case.add_version()

    def denied(tail: bytes) -> bytes:
        metadata, _ = FileMetaData.read(footer_of(tail))
        metadata.encryption_algorithm = None
        metadata.footer_signing_key_metadata = None
        return with_trailer(metadata.serialise(), b"PAR1")

    replace_tail(path, denied)
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(case.folder).files
    assert file.outcome is Outcome.FAILED and str(path) in str(file.error)
    unknown_of(case.tools(), path)
    assert [found.is_encrypted for found in case.tools().key_inventory(path)] == [True]
    assert tree_digest(case.folder) == before


# --- key material that no footer refers to ---


def stash(case: Case, path: Path) -> str:
    """Put the key of another data set into a key material file; return its wrapped key."""
    stolen = case.write("../stolen.parquet", tools=case.tools(key_material="external"))
    text = json.loads(key_material_file(stolen).read_text())["columnKey0"]
    material = key_material_file(path)
    texts = json.loads(material.read_text())
    material.write_text(json.dumps({"stash": text, **texts, "columnKey99": text}))
    return str(json.loads(text)["wrappedKEK"])


@every_footer
@pytest.mark.parametrize("older_than", [None, "9"])
def test_a_key_that_was_stashed_dies_with_its_master_key(
    tmp_path: Path, plaintext_footer: bool, older_than: str | None
) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external", plaintext_footer=plaintext_footer)
    path = case.write()
    references = set(external_entries(path))
    wrapped = stash(case, path)
    case.add_version()
    before = case.kms.call_counts
    foreseen = case.tools().rotate(case.folder, dry_run=True, older_than=older_than)
    assert "2 entries of the key material file dropped" in foreseen.files[0].how
    (file,) = case.tools().rotate(case.folder, older_than=older_than).files
    assert file.outcome is Outcome.ROTATED and "2 entries of the key material file dropped" in file.how
    asked = case.kms.call_counts - before
    assert asked["rewrap"] == 3
    assert set(external_entries(path)) == references
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)
    with pytest.raises(KeytoolsError):
        unwrap_one(case.kms, wrapped, "ka")


def test_what_is_nobodys_is_dropped_where_nothing_else_is_to_do(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    whole = external_entries(path)
    stash(case, path)
    assert [file.path for file in case.tools().files_using("ka", path)] == [str(path)]
    (file,) = case.tools().rotate(case.folder).files
    assert file.outcome is Outcome.ROTATED and file.keys == () and external_entries(path) == whole
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ALREADY_CURRENT: 1})


@pytest.mark.parametrize("seconds_ago", [0, 2 * 3600, None])
def test_elsewhere_a_writer_on_another_machine_may_need_it_yet(tmp_path: Path, seconds_ago: int | None) -> None:
    """Key material is written before the file that refers to it: without its entries, that file would be lost."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    stash(case, path)
    store: Any = MemoryFileSystem()
    store.store.clear()
    if seconds_ago is not None:
        store = pafs._MockFileSystem(datetime.now(UTC) - timedelta(seconds=seconds_ago))
    location = FileLocation.resolve("data", store)
    location.filesystem.create_dir(location.path)
    for file in (path, key_material_file(path)):
        with location.filesystem.open_output_stream(f"{location.path}/{file.name}") as out:
            out.write(file.read_bytes())
    assert (location.below(path.name).info().mtime is None) == (seconds_ago is None)
    case.add_version()
    (rotated,) = case.tools().rotate("data", filesystem=store).files
    assert rotated.outcome is Outcome.ROTATED
    assert ("2 entries of the key material file dropped" in rotated.how) == (seconds_ago == 2 * 3600)
    with location.filesystem.open_input_stream(f"{location.path}/{key_material_file(path).name}") as content:
        assert ({"stash", "columnKey99"} <= json.loads(content.read()).keys()) == (seconds_ago != 2 * 3600)


def test_in_spark_no_task_has_it_re_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parquet_keytools.spark import pipelines

    keys = {name: base64.b64encode(name.encode().ljust(32)).decode() for name in MASTER_KEYS}
    kms = InMemoryKms({name: base64.b64decode(key) for name, key in keys.items()})
    case = Case(tmp_path / "data", kms, None, {"column_keys": {"ka": ["a"]}, "key_material": "external"})
    case.folder.mkdir()
    path = case.write()
    stash(case, path)
    config = tmp_path / "config.yaml"
    table = {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings}
    config.write_text(
        json.dumps({"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}})
    )
    rewrapped: list[str] = []
    rewrap_many = InMemoryKms.rewrap_many

    def counted(self: InMemoryKms, requests: Any) -> Any:
        rewrapped.extend(request.wrapped_key for request in requests)
        return rewrap_many(self, requests)

    monkeypatch.setattr(InMemoryKms, "rewrap_many", counted)
    spark: Any = FakeSpark(2)
    assert pipelines.rotate(spark, case.folder, config).outcomes == {"rotated": 1}
    assert len(rewrapped) == 2 and set(external_entries(path)) == {"footerKey", "columnKey0"}
    # A forged entry does not count, either.
    entries = external_entries(path)
    entries["columnKey0"]["masterKeyID"] = "kb"
    key_material_file(path).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))
    assert pipelines.keys(spark, case.folder, config).outcomes == {"not all keys can be seen": 1}
    assert pipelines.rotate(spark, case.folder, config, only_master_keys=["kf"]).outcomes == {"failed": 1}


# --- moves to master keys that others may use ---


@every_key_material
@every_footer
@pytest.mark.parametrize("where", ["moves", "another KMS"])
def test_a_file_of_another_table_is_not_moved(
    tmp_path: Path, key_material: str, plaintext_footer: bool, where: str
) -> None:
    """Tables share the master key of footers, and an attacker copied a file of one into the other's folder."""
    case = Case.make(
        tmp_path, "in_memory", key_material=key_material, plaintext_footer=plaintext_footer, aad_prefix="logs"
    )
    own = case.write("own.parquet")
    foreign = {
        "of another prefix": case.tools(aad_prefix="customers"),
        "under other column keys": case.tools(column_keys={"kb": ["a", "nested"], "ka": ["b"]}),
        "under another footer key": case.tools(footer_key="kb"),
        "with a column in plaintext": case.tools(column_keys={"ka": ["a", "nested"]}),
    }
    paths = [case.write(f"{name}.parquet", tools=tools) for name, tools in foreign.items()]
    before = tree_digest(case.folder)
    rotate = partial(case.tools().rotate, moves={"kf": "new"})
    if where != "moves":
        rotate = partial(case.move_to, InMemoryKms(dict.fromkeys(MASTER_KEYS)))
    for table_name in (None, "t"):
        dry = rotate(case.folder, table_name=table_name, dry_run=True)
        assert {file.path for file in dry.failures} == set(map(str, paths))
    report = rotate(case.folder)
    outcomes = {Path(file.path): file for file in report.files}
    assert outcomes[own].outcome is Outcome.ROTATED
    for path in paths:
        assert outcomes[path].outcome is Outcome.FAILED and str(path) in str(outcomes[path].error), path
    changed = {name for name, digest in tree_digest(case.folder).items() if before.get(name) != digest}
    assert all("own" in name for name in changed)
    # A run that continues finds files that are moved already.
    again = rotate(case.folder)
    assert {file.path for file in again.failures} == set(map(str, paths)) and not again.counts[Outcome.ROTATED]


def test_with_several_tables_a_file_is_of_one_of_them(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("own.parquet")
    case.write("other.parquet", tools=case.tools(column_keys={"kb": ["a", "nested"], "ka": ["b"]}))
    foreign = case.write("foreign.parquet", tools=case.tools(column_keys={"kb": ["a", "nested", "b"]}))
    table = {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table, "u": {**table, "column_keys": {"kb": ["a", "nested"], "ka": ["b"]}}},
    }
    report = Keytools(parse_configuration(document), kms=case.kms).rotate(case.folder, moves={"kf": "new"})
    assert report.counts == Counter({Outcome.ROTATED: 2, Outcome.FAILED: 1})
    assert [file.path for file in report.failures] == [str(foreign)]


def test_the_keys_of_footer_and_columns_are_those_of_one_table(tmp_path: Path) -> None:
    """A mixture of two tables belongs to neither, and no footer key is unwrapped for a file of no table."""
    case = Case.make(tmp_path, "in_memory")
    of_other: dict[str, Any] = {
        "footer_key": "ka",
        "column_keys": {"kb": ["a", "nested"], "ka": ["b"]},
        "unlisted_columns": "plaintext",
    }
    case.write("own.parquet")
    mixed = case.write(
        "mixed.parquet", tools=case.tools(**{"unlisted_columns": "plaintext", **of_other, "footer_key": "kf"})
    )
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "t": {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings},
            "u": {**case.settings, **of_other},
        },
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    report = tools.rotate(case.folder, moves={"kf": "new"})
    assert report.counts == Counter({Outcome.ROTATED: 1, Outcome.FAILED: 1})
    assert [(file.path, file.error_class) for file in report.failures] == [(str(mixed), "TableMismatchError")]
    foreign = case.write("../foreign.parquet", tools=case.tools(footer_key="kb"))
    before = case.kms.call_counts
    assert tools.rotate(foreign, moves={"kf": "new"}).failures[0].error_class == "TableMismatchError"
    assert (case.kms.call_counts - before)["unwrap"] == 0


def test_a_new_version_opens_nothing_to_others_and_takes_every_file(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", aad_prefix="logs")
    case.write("own.parquet")
    case.write("other.parquet", tools=case.tools(aad_prefix="customers", footer_key="kb"))
    case.add_version()
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ROTATED: 2})
