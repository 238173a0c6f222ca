"""Rotation of the master keys of files and data sets: what changes, what does not, and who can read it after."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms
from rotation_case import (
    MASTER_KEYS,
    TABLE,
    UNIFORM,
    Case,
    data_range,
    external_entries,
    key_material_file,
    materials,
    names,
    read_with_pyarrow,
    tree_digest,
    write_with_pyarrow,
)
from soak import SOAK

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    ConfigurationError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    NoParquetFilesError,
    TableMismatchError,
)
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation import rotate as tail
from parquet_keytools.rotation.report import KeyChange, KmsCalls, Outcome

VARIANTS = [
    {
        "key_material": key_material,
        "plaintext_footer": plaintext_footer,
        "double_wrapping": double,
        **(UNIFORM if uniform else {}),
    }
    for key_material, plaintext_footer, double, uniform in itertools.product(
        ["internal", "external"], [False, True], [True, False], [False, True]
    )
]


def variant_id(variant: dict[str, Any]) -> str:
    return "-".join(
        [
            variant["key_material"],
            "plaintext_footer" if variant["plaintext_footer"] else "encrypted_footer",
            "double" if variant["double_wrapping"] else "single",
            "uniform" if "unlisted_columns" in variant else "columns",
        ]
    )


KINDS = ["in_memory", "keystore"]
# A file has the same bytes whichever KMS wrapped its keys.
every_variant_and_kms = pytest.mark.parametrize(
    ("variant", "kind"),
    [
        (variant, kind)
        for row, variant in enumerate(VARIANTS)
        for column, kind in enumerate(KINDS)
        if SOAK or (row % 3 == 0 and row % 2 == column)
    ],
    ids=lambda value: variant_id(value) if isinstance(value, dict) else value,
)
every_kms = pytest.mark.parametrize("kind", KINDS)
every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])


def mixed_folder(case: Case, count: int = 4) -> list[Path]:
    return [case.write(f"part={i % 2}/file-{i}.parquet") for i in range(count)]


# --- its purpose ---


@every_variant_and_kms
def test_everything_reads_when_the_old_version_is_disabled(
    tmp_path: Path, kind: str, variant: dict[str, Any]
) -> None:
    case = Case.make(tmp_path, kind, **variant)
    path = case.write()
    data = data_range(path)
    case.add_version()
    report = case.tools().rotate(path)
    assert [file.outcome for file in report.files] == [Outcome.ROTATED] and report.succeeded
    case.disable(1)
    assert data_range(path) == data
    assert case.tools().read_table(path).equals(TABLE)
    assert case.tools().dataset(case.folder).to_table().equals(TABLE)
    assert read_with_pyarrow(case.kms, path).equals(TABLE)
    assert case.tools().verify_file(path).conforms
    assert not [name for name in names(case.folder) if name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("internal", "plaintext_footer", "double", "kind"),
    [
        (True, True, True, "in_memory"),
        (True, False, False, "keystore"),
        (False, True, False, "keystore"),
        (False, False, True, "in_memory"),
    ],
)
def test_files_of_pyarrow(tmp_path: Path, kind: str, internal: bool, plaintext_footer: bool, double: bool) -> None:
    case = Case.make(tmp_path, kind)
    path = case.folder / "x.parquet"
    write_with_pyarrow(
        case.kms,
        path,
        internal_key_material=internal,
        plaintext_footer=plaintext_footer,
        double_wrapping=double,
    )
    case.add_version()
    (file,) = case.tools().rotate(case.folder).files
    assert file.outcome is Outcome.ROTATED and sum(change.keys for change in file.keys) == 5
    case.disable(1)
    assert read_with_pyarrow(case.kms, path).equals(TABLE)
    assert case.tools().read_table(path).equals(TABLE)


def test_uniform_file_of_pyarrow(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", **UNIFORM)
    path = case.folder / "x.parquet"
    write_with_pyarrow(case.kms, path, column_keys=None, uniform_encryption=True)
    case.add_version()
    assert case.tools().rotate(path).succeeded
    case.disable(1)
    assert read_with_pyarrow(case.kms, path).equals(TABLE)


@every_key_material
def test_the_version_shows_that_each_rotation_is_one(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path, tools = case.write(), case.tools()
    for version in (2, 3, 4):
        case.add_version()
        (file,) = tools.rotate(path).files
        assert {(change.version, change.new_version) for change in file.keys} == {(str(version - 1), str(version))}
        assert tools.read_table(path).equals(TABLE)
        wrapped = {material.wrapped_kek for material in materials(tools, path)}
        assert all(key is not None and key.startswith(f"keystore:v{version}:") for key in wrapped)


def test_where_the_version_is_unknown_it_wraps_anew_each_time(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", key_material="external")
    path, tools = case.write(), case.tools()
    seen = set()
    for _ in range(3):
        assert tools.rotate(path).counts == Counter({Outcome.ROTATED: 1})
        seen.add(key_material_file(path).read_bytes())
    assert len(seen) == 3


def test_what_is_current_stays(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write()
    before = tree_digest(case.folder)
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ALREADY_CURRENT: 1})
    # Each key is unwrapped, which proves that it is current.
    assert report.kms_calls == KmsCalls(unwrap=3, describe=3)
    assert tree_digest(case.folder) == before


# --- which keys ---


def test_only_some_master_keys(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    case.add_version()
    (file,) = case.tools().rotate(path, only_master_keys=["kb"]).files
    assert file.keys == (KeyChange("kb", "kb", "1", "2", 1),)
    (again,) = case.tools().rotate(path, only_master_keys=["kb"]).files
    assert again.outcome is Outcome.ALREADY_CURRENT
    case.disable(1, "kb")
    assert case.tools().read_table(path).equals(TABLE)


def test_none_of_the_master_keys(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(path, only_master_keys=["new"]).files
    assert (file.outcome, file.how) == (Outcome.NOTHING_TO_ROTATE, "none of the master keys")
    assert tree_digest(case.folder) == before


def test_older_than(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    first = case.write("1.parquet")
    case.add_version()
    second = case.write("2.parquet")
    case.add_version()
    tools = case.tools()
    outcomes = {Path(file.path): file.outcome for file in tools.rotate(case.folder, older_than="2").files}
    assert outcomes == {first: Outcome.ROTATED, second: Outcome.ALREADY_CURRENT}
    case.disable(1)
    assert tools.dataset(case.folder).to_table().num_rows == 2 * TABLE.num_rows


@every_variant_and_kms
def test_moves_to_another_master_key(tmp_path: Path, kind: str, variant: dict[str, Any]) -> None:
    case = Case.make(tmp_path, kind, **variant)
    path = case.write()
    report = case.tools().rotate(path, moves={"kf": "new"})
    assert report.succeeded
    assert {(change.master_key_id, change.new_master_key_id) for change in report.files[0].keys} == {("kf", "new")}
    case.disable(None, "kf")
    assert case.tools(also_trusted=["new"]).read_table(path).equals(TABLE)
    with pytest.raises(
        TableMismatchError, match="under the master key 'new', and the table has the master key 'kf'"
    ):
        case.tools().read_table(path)
    assert read_with_pyarrow(case.kms, path).equals(TABLE)
    # A second run finds nothing more to move.
    assert case.tools().rotate(path, moves={"kf": "new"}).counts == Counter({Outcome.NOTHING_TO_ROTATE: 1}) or (
        "unlisted_columns" not in variant
    )


def test_names_of_the_configuration(tmp_path: Path) -> None:
    kms = InMemoryKms({"arn:aws:kms:eu:1:key/a": None, "arn:aws:kms:eu:1:key/b": None})
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["arn:aws:kms:eu:1:key/a", "arn:aws:kms:eu:1:key/b"]},
        "master_keys": {"old": "arn:aws:kms:eu:1:key/a", "new": "arn:aws:kms:eu:1:key/b"},
        "tables": {
            "t": {"footer_key": "old", "unlisted_columns": "plaintext", "also_trusted": ["new"], **UNIFORM}
        },
    }
    tools = Keytools(parse_configuration(document), kms=kms)
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path)
    (file,) = tools.rotate(path, moves={"old": "new"}).files
    assert file.keys == (KeyChange("arn:aws:kms:eu:1:key/a", "arn:aws:kms:eu:1:key/b", None, None, 1),)
    with pytest.raises(ConfigurationError, match="mean the same one"):
        tools.rotate(path, moves={"old": "new", "arn:aws:kms:eu:1:key/a": "arn:aws:kms:eu:1:key/c"})
    assert materials(tools, path)[0].master_key_id in (
        "arn:aws:kms:eu:1:key/b",
        "arn%3Aaws%3Akms%3Aeu%3A1%3Akey/b",
    )


@every_key_material
def test_encoded_master_key_ids_stay_encoded(tmp_path: Path, key_material: str) -> None:
    ids = ("arn:a;1", "arn:b,2")
    case = Case.make(tmp_path, "keystore", (*MASTER_KEYS, *ids))
    path = case.folder / "x.parquet"
    write_with_pyarrow(
        case.kms,
        path,
        column_keys={"arn%3Aa%3B1": ["a"], "kb": ["b"]},
        internal_key_material=key_material == "internal",
    )
    case.keystore.rotate_key("arn:a;1")  # type: ignore[union-attr]
    columns = {"arn:a;1": ["a"], "kb": ["b"]}
    tools = case.tools(column_keys=columns, also_trusted=["arn:b,2", "new"], key_material=key_material)
    (file,) = tools.rotate(path).files
    assert file.keys == (KeyChange("arn:a;1", "arn:a;1", "1", "2", 1),)
    assert materials(tools, path)[1].master_key_id == "arn%3Aa%3B1"
    (file,) = tools.rotate(path, moves={"arn:a;1": "arn:b,2", "kb": "new"}).files
    assert [change.new_master_key_id for change in file.keys] == ["arn:b,2", "new"]
    assert [material.master_key_id for material in materials(tools, path)] == ["kf", "arn%3Ab%2C2", "new"]
    # Identifiers that are not encoded stay so.
    assert tools.rotate(path, moves={"kf": "arn:b,2"}).succeeded
    assert [material.master_key_id for material in materials(tools, path)] == ["arn:b,2", "arn%3Ab%2C2", "new"]
    assert tools.read_table(path).equals(TABLE) and read_with_pyarrow(case.kms, path).equals(TABLE)


def test_moves_that_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write()
    before = tree_digest(case.folder)
    with pytest.raises(ConfigurationError, match="'ka' is to be moved and is the target"):
        case.tools().rotate(case.folder, moves={"kf": "ka", "ka": "kb"})
    with pytest.raises(MasterKeyNotFoundError):
        case.tools().rotate(case.folder, moves={"kf": "nope"})
    for mistyped in ({"moves": {"kg": "new"}}, {"only_master_keys": ["kg"]}):
        with pytest.raises(ConfigurationError, match="no master key 'kg'"):
            case.tools().rotate(case.folder, **mistyped)
    # If the KMS does not list its master keys, it is called for each.
    monkeypatch.setattr(type(case.kms), "master_key_ids", lambda _: None)
    for mistyped in ({"moves": {"kg": "new"}}, {"only_master_keys": ["kg"]}):
        with pytest.raises(ConfigurationError, match="'kg': no such master key"):
            case.tools().rotate(case.folder, **mistyped)
    case.disable(None, "new")
    with pytest.raises(MasterKeyDisabledError):
        case.tools().rotate(case.folder, moves={"kf": "new"})
    assert tree_digest(case.folder) == before


@every_key_material
@pytest.mark.parametrize("double", [True, False])
def test_to_another_kms(tmp_path: Path, key_material: str, double: bool) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material, double_wrapping=double)
    path = case.write()
    if key_material == "external":
        # Other writers name the KMS's address, too.
        content = key_material_file(path).read_text()
        named = content.replace(r"\"kmsInstanceURL\":\"DEFAULT\"", r"\"kmsInstanceURL\":\"https://old.example\"")
        assert named != content
        key_material_file(path).write_text(named)
    other = InMemoryKms(dict.fromkeys(MASTER_KEYS))
    assert case.move_to(other, path).succeeded
    new_tools = case.tools(other)
    assert new_tools.read_table(path).equals(TABLE) and read_with_pyarrow(other, path).equals(TABLE)
    footer_material, *others = materials(new_tools, path)
    assert (footer_material.kms_instance_id, footer_material.kms_instance_url) == ("other", "DEFAULT")
    assert {material.kms_instance_id for material in others} == {"DEFAULT"}
    # An interrupted run is repeated: moved keys stay.
    before = tree_digest(case.folder)
    assert case.move_to(other, path).counts == Counter({Outcome.NOTHING_TO_ROTATE: 1})
    assert tree_digest(case.folder) == before


@every_kms
@every_key_material
def test_new_keks(tmp_path: Path, kind: str, key_material: str) -> None:
    case = Case.make(tmp_path, kind, key_material=key_material)
    paths = [case.write(f"{i}.parquet", tools=case.tools()) for i in range(3)]
    tools = case.tools()
    old = [material for path in paths for material in materials(tools, path)]
    report = tools.rotate(case.folder, new_keks=True)
    assert report.succeeded
    new = [material for path in paths for material in materials(tools, path)]
    # One for each master key in the whole run.
    assert len({material.kek_id for material in old}) == 9 and len({material.kek_id for material in new}) == 3
    assert not {material.kek_id for material in old} & {material.kek_id for material in new}
    assert not {material.wrapped_dek for material in old} & {material.wrapped_dek for material in new}
    assert report.kms_calls.wrap == 3
    assert tools.dataset(case.folder).to_table().num_rows == 3 * TABLE.num_rows
    assert all(read_with_pyarrow(case.kms, path).equals(TABLE) for path in paths)


# --- costs ---


@every_key_material
def test_a_shared_kek_is_rewrapped_once(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    tools = case.tools()
    for i in range(5):
        case.write(f"{i}.parquet", tools=tools)
    case.add_version()
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 5})
    assert report.kms_calls == KmsCalls(rewrap=3, unwrap=3, describe=3)


def test_single_wrapped_keys_on_the_way_to_another_kms_cost_three_calls(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", double_wrapping=False)
    path = case.write()
    other = InMemoryKms(dict.fromkeys(MASTER_KEYS))
    done = case.move_to(other, path).kms_calls
    assert (done.wrap, done.unwrap, done.rewrap) == (5, 2 * 5, 0)
    assert case.tools(other).read_table(path).equals(TABLE)


def test_the_kms_is_asked_in_rounds(tmp_path: Path) -> None:
    kms = FaultyKms({name: os.urandom(16) for name in MASTER_KEYS})
    case = Case(tmp_path, kms, None, {"column_keys": {"ka": ["a"], "kb": ["b"]}})
    for i in range(10):
        case.write(f"{i}.parquet")
    kms.unwrap_rounds.clear()
    tools = case.tools()
    report = tools.rotate(tmp_path)
    assert report.kms_calls == KmsCalls(rewrap=30, unwrap=30, describe=report.kms_calls.describe)
    # Footers, then columns; the base class unwraps keys to re-wrap them, and each new key is unwrapped as proof.
    assert kms.unwrap_rounds == [10, 10, 20, 20]


def test_what_is_written(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    big = pa.table({name: range(100_000) for name in ("a", "b", "nested")})
    path = case.write(table=big)
    case.add_version()
    (file,) = case.tools().rotate(path).files
    size = path.stat().st_size
    assert file.bytes_written + file.bytes_copied == size
    assert file.how == "new tail, data copied in the kernel"
    assert file.bytes_copied == len(data_range(path))


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    tools = case.tools()
    for i, key_material in enumerate(["internal", "external", "internal"]):
        case.write(f"{i}.parquet", tools=case.tools(key_material=key_material))
    case.add_version()
    before = tree_digest(case.folder)
    report = tools.rotate(case.folder, dry_run=True)
    assert report.counts == Counter({Outcome.WOULD_ROTATE: 3}) and report.dry_run
    assert {(c.version, c.new_version) for file in report.files for c in file.keys} == {("1", "2")}
    assert tree_digest(case.folder) == before
    done = tools.rotate(case.folder)
    assert (done.kms_calls.rewrap, done.kms_calls.unwrap) == (
        report.expected_kms_calls.rewrap,
        report.expected_kms_calls.unwrap,
    )
    assert [file.keys for file in done.files] == [file.keys for file in report.files]


@pytest.mark.parametrize(
    ("moves", "key_material", "plaintext_footer"),
    [
        ({"ka": "new"}, "internal", True),
        ({"ka": "new"}, "external", False),
        ({"kf": "new"}, "internal", False),
        ({"kf": "new"}, "external", True),
        ({}, "internal", True),
    ],
)
def test_a_dry_run_foresees_every_call(
    tmp_path: Path, plaintext_footer: bool, key_material: str, moves: dict[str, str]
) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material, plaintext_footer=plaintext_footer)
    tools = case.tools()
    for i in range(2):
        case.write(f"{i}.parquet", tools=tools)
    case.write("3.parquet", tools=case.tools(double_wrapping=False))
    case.add_version("kb")
    foreseen = tools.rotate(case.folder, moves=moves, dry_run=True).expected_kms_calls
    assert tools.rotate(case.folder, moves=moves).kms_calls == foreseen


@pytest.mark.parametrize("new_keks", [True, False])
def test_a_dry_run_foresees_moves_to_another_kms(tmp_path: Path, new_keks: bool) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    case.write("x.parquet", tools=case.tools(double_wrapping=False))
    case.write("y.parquet")
    other = InMemoryKms(dict.fromkeys(MASTER_KEYS))
    before = tree_digest(case.folder)
    foreseen = case.move_to(other, case.folder, new_keks=new_keks, dry_run=True).expected_kms_calls
    assert tree_digest(case.folder) == before
    done = case.move_to(other, case.folder, new_keks=new_keks).kms_calls
    assert (done.wrap, done.unwrap, done.rewrap) == (foreseen.wrap, foreseen.unwrap, foreseen.rewrap)


# --- unchanged parts ---


def test_fields_that_nobody_knows_stay(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    location = key_material_file(path)
    entries = external_entries(path)
    entries["footerKey"]["comment"] = {"by": "somebody"}
    location.write_text(json.dumps({reference: json.dumps(fields) for reference, fields in entries.items()}))
    case.add_version()
    assert case.tools().rotate(path).succeeded
    assert external_entries(path)["footerKey"]["comment"] == {"by": "somebody"}
    assert list(external_entries(path)) == list(entries)
    assert external_entries(path)["columnKey0"]["wrappedDEK"] == entries["columnKey0"]["wrappedDEK"]


def test_only_the_entries_that_change(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    before = json.loads(key_material_file(path).read_text())
    case.add_version("kb")
    case.tools().rotate(path)
    after = json.loads(key_material_file(path).read_text())
    changed = [reference for reference in before if before[reference] != after[reference]]
    assert [json.loads(after[reference])["masterKeyID"] for reference in changed] == ["kb"]


@every_key_material
def test_mode_owner_attributes_and_links(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path = case.write()
    replaced = path if key_material == "internal" else key_material_file(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = replaced.rename(elsewhere / replaced.name)
    replaced.symlink_to(real)
    real.chmod(0o640)
    try:
        os.setxattr(real, "user.note", b"kept")
    except (AttributeError, OSError):
        pytest.skip("no extended attributes here")
    case.add_version()
    assert case.tools().rotate(path).succeeded
    assert replaced.is_symlink() and not real.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert os.getxattr(real, "user.note") == b"kept"
    assert case.tools().read_table(path).equals(TABLE)
    assert sorted(file.name for file in elsewhere.iterdir()) == [real.name]


@every_key_material
def test_who_may_not_give_files_away_leaves_them_to_their_group(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path = case.write()
    found = path.stat()
    given: list[tuple[int, int]] = []

    def only_groups(file_descriptor: int, owner: int, group: int) -> None:
        if owner != -1:
            raise PermissionError(1, "not permitted")
        given.append((owner, group))

    monkeypatch.setattr(os, "fchown", only_groups)
    case.add_version()
    assert case.tools().rotate(path).succeeded
    assert given == [(-1, found.st_gid)]


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    os.rename(path, os.fsencode(case.folder) + b"/caf\xe9.parquet")  # noqa: PTH104 - a path of bytes
    other = case.write("other.parquet")
    case.add_version()
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 1, Outcome.FAILED: 1}) and not report.succeeded
    (failed,) = report.failures
    assert failed.path.endswith("caf\\xe9.parquet") and "not valid UTF-8" in str(failed.error)
    seen, unseen = case.tools().key_inventory(case.folder)
    assert seen.path == str(other) and seen.unknown is None
    assert unseen.path == failed.path and "not valid UTF-8" in str(unseen.unknown)
    assert unseen.depends_on("pii") is None


# --- AAD prefixes ---


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_a_file_without_a_prefix_is_not_left_behind(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path = case.write()
    case.add_version()
    tools = case.tools(aad_prefix="t/{file_name}")
    # If a prefix is expected, the file must have it.
    assert tools.rotate(path, aad_prefix="t/x.parquet").files[0].error_class == "AadPrefixError"
    assert [file.unknown for file in tools.key_inventory(path)] == [None]
    assert tools.rotate(path).counts == Counter({Outcome.ROTATED: 1})
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


@pytest.mark.parametrize("plaintext_footer", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_aad_prefixes(tmp_path: Path, plaintext_footer: bool, stored: bool) -> None:
    case = Case.make(
        tmp_path,
        "keystore",
        aad_prefix="t/{file_name}",
        store_aad_prefix=stored,
        plaintext_footer=plaintext_footer,
    )
    path = case.write()
    case.add_version()
    report = case.tools().rotate(path)
    assert report.succeeded and report.counts[Outcome.ROTATED] == 1
    assert [file.unknown for file in case.tools().key_inventory(path)] == [None]
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


def test_an_aad_prefix_that_is_not_known(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write(tools=case.tools(aad_prefix="secret", store_aad_prefix=False))
    case.add_version()
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(path).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "AadPrefixError")
    assert tree_digest(case.folder) == before
    assert case.tools().rotate(path, aad_prefix="secret").counts == Counter({Outcome.ROTATED: 1})
    case.disable(1)
    assert case.tools().read_table(path, aad_prefix="secret").equals(TABLE)


def test_a_stored_prefix_of_another_table_is_no_obstacle(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", aad_prefix="right")
    path = case.write(tools=case.tools(aad_prefix="other"))
    case.add_version()
    assert case.tools().rotate(path).counts == Counter({Outcome.ROTATED: 1})
    assert case.tools().rotate(path, aad_prefix="right").files[0].error_class == "AadPrefixError"


def test_a_stored_prefix_of_another_table_is_one_where_others_come_to_read(tmp_path: Path) -> None:
    """Users of the new master key can then read the file: the prefix is checked, even with only one table."""
    case = Case.make(tmp_path, "keystore", aad_prefix="right", also_trusted=["new"])
    path = case.write(tools=case.tools(aad_prefix="other"))
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(path, moves={"kf": "new"}).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "AadPrefixError")
    assert tree_digest(case.folder) == before
    assert case.tools(aad_prefix="other").rotate(path, moves={"kf": "new"}).succeeded


def test_only_the_table_of_the_rotation_is_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    case = Case.make(tmp_path, "in_memory", also_trusted=["new"])
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "t": {"footer_key": "kf", "unlisted_columns": "plaintext", **case.settings},
            "u": {"footer_key": "kf", "unlisted_columns": "plaintext", **UNIFORM},
        },
    }
    path = case.write()
    tools = Keytools(parse_configuration(document), kms=case.kms)
    assert tools.rotate(path, moves={"kf": "new"}, table_name="t", dry_run=True).succeeded and not recwarn.list
    assert tools.rotate(path, moves={"kf": "new"}, dry_run=True).succeeded
    (warning,) = recwarn.list
    assert "files of the table 'u'" in str(warning.message)


# --- other files ---


def test_file_systems_that_are_not_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import fs as pafs

    # So a small file has several copies.
    monkeypatch.setattr(tail, "COPY_LENGTH", 100)

    class Elsewhere(pafs.FileSystemHandler):  # type: ignore[misc]
        """The local file system, under another name."""

        def __init__(self) -> None:
            self.inner = pafs.LocalFileSystem()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Elsewhere)

        def get_type_name(self) -> str:
            return "elsewhere"

        def get_file_info_selector(self, selector: Any) -> Any:
            return self.inner.get_file_info(selector)

        def get_file_info(self, paths: Any) -> Any:
            return self.inner.get_file_info(paths)

        def move(self, source: str, target: str) -> None:
            self.inner.move(source, target)

        def delete_file(self, path: str) -> None:
            self.inner.delete_file(path)

        def open_input_file(self, path: str) -> Any:
            return self.inner.open_input_file(path)

        def open_input_stream(self, path: str) -> Any:
            return self.inner.open_input_stream(path)

        def open_output_stream(self, path: str, metadata: Any) -> Any:
            return self.inner.open_output_stream(path, metadata=metadata)

        def normalize_path(self, path: str) -> str:
            return path

        def copy_file(self, *_: Any) -> None:
            raise NotImplementedError

        create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = copy_file
        open_append_stream = copy_file

    filesystem = pafs.PyFileSystem(Elsewhere())
    case = Case.make(tmp_path, "keystore")
    paths = [
        case.write(f"{name}.parquet", tools=case.tools(key_material=name)) for name in ("internal", "external")
    ]
    case.add_version()
    report = case.tools().rotate(case.folder, filesystem=filesystem)
    assert report.counts == Counter({Outcome.ROTATED: 2}), report.files
    assert {file.how for file in report.files} == {"rewritten whole", "new key material file"}
    (internal,) = [file for file in report.files if file.how == "rewritten whole"]
    assert (internal.bytes_written, internal.bytes_copied) == (paths[0].stat().st_size, 0)
    case.disable(1)
    tools = case.tools()
    assert all(tools.read_table(path).equals(TABLE) for path in paths)


def test_partitions_and_hidden_files(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    mixed_folder(case)
    case.write("_temporary/hidden.parquet")
    (case.folder / "_SUCCESS").touch()
    (case.folder / "notes.txt").write_text("no Parquet")
    case.add_version()
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 4})
    assert not list(case.folder.glob(".*"))


def test_a_file_without_row_groups(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write(table=TABLE.slice(0, 0))
    case.add_version()
    assert case.tools().rotate(path).succeeded
    case.disable(1)
    assert case.tools().read_table(path).num_rows == 0


def test_every_file_has_its_own_fate(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    good = case.write("good.parquet")
    pq.write_table(TABLE, case.folder / "plaintext.parquet")
    truncated = case.write("truncated.parquet")
    truncated.write_bytes(truncated.read_bytes()[:-100])
    key_material_file(case.write("missing.parquet", tools=case.tools(key_material="external"))).unlink()
    refused = case.write("refused.parquet", tools=case.tools(footer_key="new"))
    foreign = case.write("foreign.parquet", tools=case.tools(key_material="external"))
    key_material_file(foreign).write_text('{"footerKey": "{\\"keyMaterialType\\": \\"XYZ\\"}"}')
    case.add_version()
    case.disable(1, "new")
    before = tree_digest(case.folder)
    report = case.tools().rotate(case.folder)
    fates = {Path(file.path).stem: (file.outcome, file.error_class) for file in report.files}
    assert fates == {
        "good": (Outcome.ROTATED, None),
        "plaintext": (Outcome.NOTHING_TO_ROTATE, None),
        "truncated": (Outcome.FAILED, "ParquetFormatError"),
        "missing": (Outcome.FAILED, "KeyMaterialError"),
        "refused": (Outcome.FAILED, "MasterKeyDisabledError"),
        "foreign": (Outcome.FAILED, "KeyMaterialError"),
    }
    assert not report.succeeded and len(report.failures) == 4
    after = tree_digest(case.folder)
    assert {name for name in before if before[name] != after[name]} == {good.name} and refused.name in after
    assert all(file.error is None or file.error.__traceback__ is None for file in report.files)


def test_data_keys_of_the_caller(tmp_path: Path) -> None:
    keys = {"dk": "MDEyMzQ1Njc4OTAxMjM0NQ=="}
    case = Case.make(tmp_path, "keystore")
    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "data_keys": keys,
        "tables": {
            "all": {"footer_key": "dk", "unlisted_columns": "plaintext", **UNIFORM},
            "mixed": {"footer_key": "dk", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext"},
        },
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    tools.write_table(TABLE, case.folder / "all.parquet", table_name="all")
    tools.write_table(TABLE, case.folder / "mixed.parquet", table_name="mixed")
    case.add_version()
    fates = {Path(file.path).stem: file for file in tools.rotate(case.folder).files}
    assert (fates["all"].outcome, fates["all"].how) == (Outcome.NOTHING_TO_ROTATE, "data keys only")
    assert fates["mixed"].keys == (KeyChange("ka", "ka", "1", "2", 1),)
    case.disable(1)
    assert tools.read_table(case.folder / "mixed.parquet", table_name="mixed").equals(TABLE)
    # Without the data key, the content is unknown.
    (file,) = case.tools().rotate(case.folder / "all.parquet").files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "KeyNotAvailableError")
    with pytest.raises(ConfigurationError, match="a data key"):
        tools.rotate(case.folder, moves={"dk": "ka"})


def test_a_refused_column_key_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    assert isinstance(case.kms, InMemoryKms)
    case.kms.deny("kb")
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(path).files
    assert file.error_class == "KmsAccessDeniedError" and "kb" in str(file.error)
    assert tree_digest(case.folder) == before
    assert case.tools().rotate(path, only_master_keys=["kf", "ka"]).succeeded


def test_a_forged_plaintext_footer_is_not_signed_anew(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=True)
    path = case.write()
    content = bytearray(path.read_bytes())
    position = content.rindex(b"parquet-cpp-arrow")
    content[position] ^= 1
    path.write_bytes(content)
    case.add_version()
    (file,) = case.tools().rotate(path).files
    assert file.error_class == "FooterSignatureError" and path.read_bytes() == content


def test_nothing_there(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    with pytest.raises(FileNotFoundError):
        case.tools().rotate(tmp_path / "nope")
    with pytest.raises(NoParquetFilesError, match="no Parquet files"):
        case.tools().rotate(case.folder)
    assert not list(case.folder.iterdir())


def test_without_a_kms(tmp_path: Path) -> None:
    document = {
        "version": 1,
        "data_keys": {"dk": "MDEyMzQ1Njc4OTAxMjM0NQ=="},
        "tables": {"t": {"footer_key": "dk", "unlisted_columns": "plaintext", **UNIFORM}},
    }
    with pytest.raises(ConfigurationError, match="no KMS"):
        Keytools.from_mapping(document).rotate(tmp_path)


def test_results_need_not_be_kept(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    mixed_folder(case)
    case.write("bad.parquet").write_bytes(b"PAR1")
    case.add_version()
    told: list[str] = []
    report = case.tools().rotate(
        case.folder, keep_results=False, on_file=lambda file: told.append(Path(file.path).name)
    )
    assert [Path(file.path).name for file in report.files] == ["bad.parquet"]
    assert len(told) == 5 and report.counts == Counter({Outcome.ROTATED: 4, Outcome.FAILED: 1})
