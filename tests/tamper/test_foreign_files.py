"""Files that do not match their table: from another table, or forged by somebody who may use some key of the KMS.

An attacker can write to the storage, and may use master keys of other tables. Whatever they put there, no reader
uses a byte of it, no command writes one, and nothing is unwrapped for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from faults import FaultyKms
from pyarrow_versions import DECRYPTS_IN_THREADS
from soak import SOAK
from typer.testing import CliRunner

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.cli import app
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    KmsAccessDeniedError,
    MasterKeyDisabledError,
    TableMismatchError,
)
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.keys import key_wrapping as file_key_retriever
from parquet_keytools.keys.material_store import read_key_materials
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.rotation.report import RotationOutcome

pytestmark = pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")

MASTER_KEYS = {name: hashlib.sha256(name.encode()).digest()[:16] for name in ("kf", "ka", "kb", "ads", "old")}
DATA_KEYS = {
    name: base64.b64encode(hashlib.sha256(name.encode()).digest()[:16]).decode() for name in ("df", "da", "db")
}
TABLE = pa.table({"plain": range(100), "a": range(100), "b": [f"secret {number}" for number in range(100)]})
POLICY: dict[str, Any] = {
    "footer_key": "kf",
    "column_keys": {"ka": ["a"], "kb": ["b"]},
    "unlisted_columns": "plaintext",
}
ADS: dict[str, Any] = {"footer_key": "ads", "unlisted_columns": "footer_key"}
DATA_POLICY: dict[str, Any] = {
    "footer_key": "df",
    "column_keys": {"da": ["a"], "db": ["b"]},
    "unlisted_columns": "plaintext",
}

LATER = {"also_trusted": ["ads", "da"], "unlisted_columns": "footer_key"}

FORGERIES: dict[str, tuple[dict[str, Any], list[tuple[str, str | None]]]] = {
    "a file of another table": (
        ADS,
        [("footer key", None), ("column key", "a"), ("column key", "b"), ("column key", "plain")],
    ),
    "a footer under another key": (POLICY | {"footer_key": "ads"}, [("footer key", None)]),
    "a column under a foreign key": (POLICY | {"column_keys": {"ads": ["a"], "kb": ["b"]}}, [("column key", "a")]),
    "columns under the footer key": (
        {"footer_key": "kf", "unlisted_columns": "footer_key"},
        [("column key", "a"), ("column key", "b")],
    ),
    "a column under the footer's master key": (
        POLICY | {"column_keys": {"kf": ["a"], "kb": ["b"]}},
        [("column key", "a")],
    ),
    "columns that changed their keys": (
        POLICY | {"column_keys": {"ka": ["b"], "kb": ["a"]}},
        [("column key", "a"), ("column key", "b")],
    ),
    "a column in plaintext": (POLICY | {"column_keys": {"ka": ["a"]}}, [("plaintext column", "b")]),
    "all columns in plaintext": (
        {"footer_key": "kf", "unlisted_columns": "plaintext"},
        [("plaintext column", "a"), ("plaintext column", "b")],
    ),
    "what is in plaintext under a foreign key": (
        POLICY | {"column_keys": {"ka": ["a"], "kb": ["b"], "ads": ["plain"]}},
        [("column key", "plain")],
    ),
    "another algorithm": (POLICY | {"algorithm": "AES_GCM_CTR_V1"}, [("algorithm", None)]),
    "data keys": (DATA_POLICY, [("footer key", None), ("column key", "a"), ("column key", "b")]),
    "a column under a data key": (POLICY | {"column_keys": {"da": ["a"], "kb": ["b"]}}, [("column key", "a")]),
}
FORMS: dict[str, dict[str, Any]] = {
    "internal": {},
    "external": {"key_material": "external"},
    "single": {"double_wrapping": False},
    "plaintext footer": {"plaintext_footer": True},
}


def document(kms: dict[str, Any], reading: dict[str, Any] | None = None, **tables: Any) -> dict[str, Any]:
    made = {"version": 1, "kms": kms, "data_keys": DATA_KEYS, "reading": reading or {}}
    return made | {"tables": {"own": POLICY} | tables}


def in_memory() -> dict[str, Any]:
    return {"type": "in_memory", "keys": {n: base64.b64encode(key).decode() for n, key in MASTER_KEYS.items()}}


@pytest.fixture(scope="module")
def keystore(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("keystore") / "keystore.json"
    made = Keystore.create(path, lambda: passphrase_from_text("a long passphrase"), scrypt_n=2**14)
    for name in MASTER_KEYS:
        made.create_key(name)
    return {"type": "keystore", "path": str(path), "passphrase": "a long passphrase"}


def aliases() -> dict[str, Any]:
    return {name: f"arn:aws:kms:eu-west-1:111122223333:key/{name}" for name in MASTER_KEYS}


@pytest.fixture(params=["in_memory", "keystore", "aliases"])
def made_of(request: pytest.FixtureRequest, keystore: dict[str, Any]) -> dict[str, Any]:
    """The parts of a configuration that define the KMS."""
    if request.param == "keystore":
        return {"kms": keystore}
    if request.param == "in_memory":
        return {"kms": in_memory()}
    keys = {aliases()[name]: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    return {"kms": {"type": "in_memory", "keys": keys}, "master_keys": aliases()}


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


USES: dict[str, Callable[[Keytools, Path, Path], Any]] = {
    "read_table": lambda tools, path, out: tools.read_table(path, table_name="own"),
    "a plaintext column": lambda tools, path, out: tools.read_table(path, columns=["plain"], table_name="own"),
    "a folder": lambda tools, path, out: tools.read_table(path.parent, table_name="own"),
    "dataset": lambda tools, path, out: tools.dataset(path.parent, table_name="own", columns=["plain"]),
    "decryption_properties": lambda tools, path, out: tools.decryption_properties(path, table_name="own"),
    "decrypt_file": lambda tools, path, out: tools.decrypt_file(path, out, table_name="own"),
    "salvage_file": lambda tools, path, out: tools.salvage_file(path, out, table_name="own"),
    "rekey_file": lambda tools, path, out: tools.rekey_file(path, out, table_name="own"),
    "rekey_file to another table": lambda tools, path, out: tools.rekey_file(
        path, out, table_name="own", new_table_name="ads"
    ),
    "rekey_in_place": lambda tools, path, out: tools.rekey_in_place(path, table_name="own"),
    "rekey_in_place to another table": lambda tools, path, out: tools.rekey_in_place(
        path, table_name="own", new_table_name="ads"
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_reader_takes_it_and_no_file_is_written(tmp_path: Path, forgery: str, form: str) -> None:
    policy, expected = FORGERIES[forgery]
    if form == "external" and policy is DATA_POLICY:
        form = "internal"  # Data keys have no key material.
    kms = FaultyKms(MASTER_KEYS)
    tables = {"ads": ADS, "forged": policy | FORMS[form]}
    tools = Keytools(
        parse_configuration(document({"type": "in_memory", "keys": list(MASTER_KEYS)}, **tables)), kms=kms
    )
    folder = tmp_path / "own"
    tools.write_dataset(TABLE, folder, table_name="own", max_rows_per_file=40, max_rows_per_group=40)
    path = folder / "part-1.parquet"
    for beside in folder.glob("*part-1*"):
        beside.unlink()
    kms.keys_seen.clear()
    tools.write_table(TABLE, path, table_name="forged")
    forged = set(kms.keys_seen)
    before = digests(tmp_path)
    for name, use in USES.items():
        tools.clear_caches()
        kms.keys_seen.clear()
        asked = kms.call_counts
        moves = name == "rekey_in_place to another table"
        if moves and policy is ADS and form != "plaintext footer":
            # As an interrupted run left it: its readers would accept the file from anywhere.
            assert use(tools, path, tmp_path).counts == {RotationOutcome.ALREADY_CURRENT: 1}
            assert digests(tmp_path) == before, name
            continue
        with pytest.raises(TableMismatchError) as caught:
            use(tools, path, tmp_path / "out.parquet")
        error = caught.value
        assert (error.path, error.table) == (str(path), "own"), name
        found = sorted((mismatch.what, mismatch.column or "") for mismatch in error.mismatches)
        # Errors in the footer are found before columns are checked.
        whole = sorted((what, column or "") for what, column in expected)
        assert found == [entry for entry in whole if not entry[1]] or found == whole, name
        assert found, name
        asked = kms.call_counts - asked
        assert not asked.keys() - {"unwrap"}, name
        # Under the footer key of the new table, the file may be one that was moved before.
        footers = 0 if any(column is None for _, column in expected) and not moves else 1
        assert len(forged.intersection(kms.keys_seen)) <= footers, f"{name}: at most the key of the footer"
        if name not in ("a folder", "dataset"):
            # The other files of a folder are fine.
            assert asked["unwrap"] <= footers, f"{name}: at most the key of the footer"
        assert digests(tmp_path) == before, name
    report = tools.verify_file(path, table_name="own")
    rules = {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}
    assert rules & {"wanted-keys", "wanted-encryption", "wanted-algorithm"}
    assert not report.conforms


def test_a_folder_in_place_leaves_the_foreign_file_and_does_the_others(tmp_path: Path) -> None:
    """The file of another table is not encrypted under keys that somebody else may use."""
    kms = FaultyKms(MASTER_KEYS)
    tools = Keytools(
        parse_configuration(document({"type": "in_memory", "keys": list(MASTER_KEYS)}, ads=ADS)), kms=kms
    )
    folder = tmp_path / "ads"
    tools.write_dataset(TABLE, folder, table_name="ads", max_rows_per_file=40, max_rows_per_group=40)
    planted = folder / "part-9.parquet"
    tools.write_table(TABLE, tmp_path / "own.parquet", table_name="own")
    shutil.copy(tmp_path / "own.parquet", planted)
    before = digests(folder)
    kms.fail("refused", "kf", "ka", "kb")
    report = tools.rekey_in_place(folder, table_name="ads")
    assert [(file.path, type(file.error)) for file in report.failures] == [(str(planted), TableMismatchError)]
    assert not report.succeeded
    after = digests(folder)
    assert [name for name in before if before[name] == after[name]] == ["part-9.parquet"]
    assert after.keys() == before.keys()
    assert tools.read_table(folder / "part-0.parquet", table_name="ads").num_rows == 40
    with pytest.raises(TableMismatchError, match=r"part-9\.parquet"):
        tools.read_table(folder, table_name="ads")


# --- every KMS, and the command line ---


@pytest.fixture
def configured(made_of: dict[str, Any], tmp_path: Path) -> Iterator[tuple[Keytools, Path]]:
    """Tools whose configuration has the forgeries' tables, too, and a configuration file without them."""
    made = document({}, ads=ADS) | made_of
    path = tmp_path / "keytools.yaml"
    path.write_text(yaml.safe_dump(made))
    path.chmod(0o600)
    for number, (policy, _) in enumerate(FORGERIES.values()):
        made["tables"][f"forged {number}"] = policy
    with Keytools.from_mapping(made) as tools:
        yield tools, path


def test_every_kms_trusts_keys_for_their_tables_only(configured: tuple[Keytools, Path], tmp_path: Path) -> None:
    tools, _ = configured
    for number, (forgery, (_, expected)) in enumerate(FORGERIES.items()):
        path = tmp_path / f"{number}.parquet"
        tools.write_table(TABLE, path, table_name=f"forged {number}")
        with pytest.raises(TableMismatchError) as caught:
            tools.read_table(path, table_name="own")
        assert caught.value.mismatches[0].what in {what for what, _ in expected}, forgery
        assert tools.read_table(path, table_name=f"forged {number}").equals(TABLE), forgery


SOME = {
    "a file of another table",
    "a column under a foreign key",
    "columns that changed their keys",
    "a column in plaintext",
}

COMMANDS: dict[str, list[str]] = {
    "decrypt": ["decrypt", "SRC", "DST"],
    "decrypt --salvage": ["decrypt", "SRC", "DST", "--salvage"],
    "rekey": ["rekey", "SRC", "DST"],
    "rekey --to-table": ["rekey", "SRC", "DST", "--to-table", "ads"],
    "rekey --in-place": ["rekey", "SRC", "--in-place"],
    "rekey --in-place --to-table": ["rekey", "SRC", "--in-place", "--to-table", "ads"],
}


@pytest.mark.parametrize(
    ("name", "is_folder"),
    [
        (name, is_folder)
        for number, name in enumerate(COMMANDS)
        # `--in-place` takes a file or a folder.
        for is_folder in ((False, True) if SOAK else (number % 2 == 0,))
    ],
)
def test_the_command_line_refuses_it_too(
    configured: tuple[Keytools, Path], tmp_path: Path, name: str, is_folder: bool
) -> None:
    tools, config = configured
    command = COMMANDS[name]
    for number, forgery in enumerate(FORGERIES):
        if forgery not in SOME:
            continue
        folder = tmp_path / f"own {number}"
        folder.mkdir()
        path = folder / "x.parquet"
        tools.write_table(TABLE, path, table_name=f"forged {number}")
        before = digests(tmp_path)
        places = {"SRC": folder if is_folder else path, "DST": tmp_path / f"out {number}"}
        arguments = [str(places.get(part, part)) for part in command]
        done = CliRunner().invoke(app, [*arguments, "--config", str(config), "--table", "own"])
        if name == "rekey --in-place --to-table" and FORGERIES[forgery][0] is ADS:
            assert "1 already current" in done.output and digests(tmp_path) == before
            continue
        assert done.exit_code == 1, (forgery, done.output)
        assert "x.parquet: this is not a file of the table 'own'" in done.stderr, forgery
        assert digests(tmp_path) == before, forgery
        checked = CliRunner().invoke(app, ["verify", str(path), "--config", str(config), "--table", "own"])
        assert checked.exit_code == 1, forgery
        assert "DOES NOT CONFORM" in checked.output, forgery


@pytest.mark.parametrize("looks", [1, 2])
def test_key_material_that_comes_after_the_comparison_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The storage has no key material when columns are compared, and foreign key material afterwards."""
    kms = FaultyKms(MASTER_KEYS)
    tables = {
        "ads": ADS,
        "forged": POLICY | {"column_keys": {"ads": ["a"], "kb": ["b"]}, "key_material": "external"},
    }
    made = document({"type": "in_memory", "keys": list(MASTER_KEYS)}, **tables)
    tools = Keytools(parse_configuration(made), kms=kms)
    path, out = tmp_path / "own" / "x.parquet", tmp_path / "out.parquet"
    path.parent.mkdir()
    tools.write_table(TABLE, path, table_name="forged")
    _say_footer_key_in_the_footer(path)
    before = digests(tmp_path)
    seen: list[str] = []

    def late(parquet_file: Any) -> Any:
        seen.append(str(parquet_file))
        if len(seen) <= looks:
            raise KeyMaterialError("the key material file is not there yet", path=str(parquet_file))
        return read_key_materials(parquet_file)

    monkeypatch.setattr(file_key_retriever, "read_key_materials", late)
    for name, use in USES.items():
        if name in ("a plaintext column", "dataset", "decryption_properties"):
            continue
        seen.clear()
        tools.clear_caches()
        asked = kms.call_counts
        try:
            use(tools, path, out)
        except ColumnAccessDeniedError as error:
            assert set(error.columns) == {"a", "b"}, name
            assert "not there yet" in str(error), name
        except TableMismatchError:
            assert len(seen) > looks, f"{name}: compared with what is there now"
        else:
            raise AssertionError(f"{name} took it")
        assert (kms.call_counts - asked)["unwrap"] <= 1, f"{name}: only the key of the footer"
        assert digests(tmp_path) == before, name


def _say_footer_key_in_the_footer(path: Path) -> None:
    """Move the external key material of the footer into the footer, which nothing authenticates."""
    data = path.read_bytes()
    start = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    crypto, end = FileCryptoMetaData.read(data[start:-8])
    materials = json.loads(path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json").read_text())
    crypto.key_metadata = json.dumps(json.loads(materials["footerKey"]) | {"internalStorage": True}).encode()
    footer = crypto.serialise() + data[start:-8][end:]
    path.write_bytes(data[:start] + footer + struct.pack("<I", len(footer)) + data[-4:])


# --- which table it is ---


READS: dict[str, Callable[[Keytools, Path, Path], object]] = {
    "read_table": lambda tools, path, out: tools.read_table(path),
    "a folder": lambda tools, path, out: tools.read_table(path.parent),
    "dataset": lambda tools, path, out: tools.dataset(path.parent),
    "decryption_properties": lambda tools, path, out: tools.decryption_properties(path),
    "decrypt_file": lambda tools, path, out: tools.decrypt_file(path, out),
    "salvage_file": lambda tools, path, out: tools.salvage_file(path, out),
    "rekey_file": lambda tools, path, out: tools.rekey_file(path, out, new_table_name="ads"),
    "rekey_in_place": lambda tools, path, out: tools.rekey_in_place(path, new_table_name="ads"),
    "rekey_in_place of a folder": lambda tools, path, out: tools.rekey_in_place(path.parent, new_table_name="ads"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("aad_prefix", [None, "ads"])
def test_of_several_tables_one_has_to_be_named(
    tmp_path: Path, read: Callable[[Keytools, Path, Path], object], aad_prefix: str | None
) -> None:
    prefixed = {} if aad_prefix is None else {"aad_prefix": aad_prefix}
    tools = Keytools(parse_configuration(document(in_memory(), ads=ADS | prefixed)))
    folder = tmp_path / "data"
    folder.mkdir()
    tools.write_table(TABLE, folder / "x.parquet", table_name="ads")
    before = digests(tmp_path)
    asked = tools.kms.call_counts  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="there are 2 tables, so a table name is required") as caught:
        read(tools, folder / "x.parquet", tmp_path / "out.parquet")
    assert "'ads', 'own'" in caught.value.hint and "--table" in caught.value.hint
    assert digests(tmp_path) == before
    assert tools.kms.call_counts == asked  # type: ignore[union-attr]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_line_wants_a_table_too(tmp_path: Path, command: list[str]) -> None:
    config, path = tmp_path / "keytools.yaml", tmp_path / "x.parquet"
    config.write_text(yaml.safe_dump(document(in_memory(), ads=ADS)))
    config.chmod(0o600)
    with Keytools.from_yaml(config) as tools:
        tools.write_table(TABLE, path, table_name="own")
    before = digests(tmp_path)
    places = {"SRC": path, "DST": tmp_path / "out.parquet"}
    done = CliRunner().invoke(app, [*(str(places.get(part, part)) for part in command), "--config", str(config)])
    assert done.exit_code == 2
    assert "there are 2 tables" in done.stderr and "--table" in done.stderr
    assert digests(tmp_path) == before


def test_a_configuration_without_tables_reads_what_its_keys_open(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    Keytools(parse_configuration(document(in_memory()))).write_table(TABLE, path)
    without = Keytools(parse_configuration({"version": 1, "kms": in_memory()}))
    assert without.read_table(path).equals(TABLE)
    with pytest.raises(ConfigurationError, match="no table 'own'"):
        without.read_table(path, table_name="own")


# --- former keys of a table ---


def test_files_from_before_a_move_are_read(tmp_path: Path) -> None:
    """Until they are rotated, and after: the configuration names the move, and neither key is a foreign one."""
    before = POLICY | {"column_keys": {"old": ["a"], "kb": ["b"]}}
    made = document(in_memory(), before=before)
    tools = Keytools(parse_configuration(made))
    tools.write_table(TABLE, tmp_path / "x.parquet", table_name="before")
    with pytest.raises(TableMismatchError, match="under the master key 'old', and the table has"):
        tools.read_table(tmp_path / "x.parquet", table_name="own")
    moving = Keytools(parse_configuration(made | {"rotation": {"moves": {"old": "ka"}}}))
    for name in ("own", "before"):
        assert moving.read_table(tmp_path / "x.parquet", table_name=name).equals(TABLE)
    assert moving.rotate(tmp_path / "x.parquet").succeeded
    for name in ("own", "before"):
        assert moving.read_table(tmp_path / "x.parquet", table_name=name).equals(TABLE)
    assert tools.read_table(tmp_path / "x.parquet", table_name="own").equals(TABLE)


def test_a_key_that_is_also_trusted_opens_files_and_makes_none(tmp_path: Path) -> None:
    tools = Keytools(parse_configuration(document(in_memory(), ads=ADS, later=POLICY | LATER)))
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path, table_name="ads")
    assert tools.read_table(path, table_name="later").equals(TABLE)
    tools.rekey_in_place(path, table_name="later")
    assert tools.read_table(path, table_name="own").equals(TABLE), "the new file is under the keys of the table"
    with pytest.raises(TableMismatchError):
        tools.read_table(path, table_name="ads")


def test_files_of_an_older_schema_and_without_rows_are_files_of_the_table(tmp_path: Path) -> None:
    tools = Keytools(parse_configuration(document(in_memory(), older=POLICY | {"column_keys": {"ka": ["a"]}})))
    older = TABLE.select(["plain", "a"])
    tools.write_table(older, tmp_path / "older.parquet", table_name="older")
    assert tools.read_table(tmp_path / "older.parquet", table_name="own").equals(older)
    if DECRYPTS_IN_THREADS:
        assert tools.decryption_properties(tmp_path / "older.parquet", table_name="own")
    tools.write_table(TABLE.slice(0, 0), tmp_path / "empty.parquet", table_name="own")
    assert tools.read_table(tmp_path / "empty.parquet", table_name="own").num_rows == 0
    tools.write_table(older.slice(0, 0), tmp_path / "none.parquet", table_name="older")
    assert tools.read_table(tmp_path / "none.parquet", table_name="own").num_rows == 0


def test_permission_for_plaintext_files_is_none_for_plaintext_columns(tmp_path: Path) -> None:
    tools = Keytools(
        parse_configuration(
            document(
                in_memory(),
                reading={"plaintext_files": "allow"},
                bare={"footer_key": "kf", "unlisted_columns": "plaintext"},
            )
        )
    )
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE, path)
    assert tools.read_table(path, table_name="own").equals(TABLE)
    tools.write_table(TABLE, path, table_name="bare")
    with pytest.raises(TableMismatchError, match="column 'a' is in plaintext"):
        tools.read_table(path, table_name="own")


# --- data keys, and no key metadata ---


def data_tools(reading: dict[str, Any] | None = None, **tables: Any) -> Keytools:
    made = {
        "version": 1,
        "data_keys": DATA_KEYS,
        "tables": {"own": DATA_POLICY} | tables,
        "reading": reading or {},
    }
    return Keytools(parse_configuration(made))


def test_data_keys_are_trusted_per_table(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    tools = data_tools(swapped=DATA_POLICY | {"column_keys": {"da": ["b"], "db": ["a"]}})
    tools.write_table(TABLE, path, table_name="swapped")
    with pytest.raises(TableMismatchError, match="column 'a' is under the data key 'db'"):
        tools.read_table(path, table_name="own")


def test_a_file_that_names_no_keys_is_under_those_that_the_configuration_names(tmp_path: Path) -> None:
    from pyarrow.parquet import encryption as pe

    path = tmp_path / "x.parquet"
    key = base64.b64decode(DATA_KEYS["df"])
    pq.write_table(TABLE, path, encryption_properties=pe.create_encryption_properties(key))
    whole = {"footer_key": "df", "unlisted_columns": "footer_key"}
    with pytest.raises(TableMismatchError, match="under a key that the file does not name") as caught:
        data_tools(whole=whole).read_table(path, table_name="whole")
    assert "keys_without_metadata" in caught.value.hint
    named = {"keys_without_metadata": {"footer": "df"}}
    assert data_tools(named, whole=whole).read_table(path, table_name="whole").equals(TABLE)
    with pytest.raises(
        TableMismatchError, match="the footer is under the data key 'df', and the table has the data"
    ):
        data_tools(named, whole=whole | {"footer_key": "da"}).read_table(path, table_name="whole")
    without = Keytools(parse_configuration({"version": 1, "data_keys": DATA_KEYS}))
    with pytest.raises(KeyNotAvailableError, match="keys_without_metadata"):
        without.read_table(path)


# --- columns that are hidden ---


def external(tmp_path: Path, **changes: Any) -> tuple[FaultyKms, Keytools, Path]:
    kms = FaultyKms(MASTER_KEYS)
    table = POLICY | {"key_material": "external", "double_wrapping": False} | changes
    made = document({"type": "in_memory", "keys": list(MASTER_KEYS)}, reading={"denied_columns": "hide"})
    tools = Keytools(parse_configuration(made | {"tables": {"own": table}}), kms=kms)
    tools.write_table(TABLE, tmp_path / "x.parquet")
    return kms, tools, tmp_path / "x.parquet"


def edit(path: Path, **changed: str) -> None:
    """Change fields of the key material of column `b`, which nothing authenticates."""
    beside = path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json")
    materials = {name: json.loads(text) for name, text in json.loads(beside.read_text()).items()}
    next(fields for fields in materials.values() if fields["masterKeyID"] == "kb").update(changed)
    beside.write_text(json.dumps({name: json.dumps(fields) for name, fields in materials.items()}))


HIDING_READS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda tools, path: tools.read_table(path),
    "some columns": lambda tools, path: tools.read_table(path, columns=["plain", "b"]),
    "a folder": lambda tools, path: tools.read_table(path.parent),
    "dataset": lambda tools, path: tools.dataset(path.parent),
}


@pytest.mark.parametrize("read", HIDING_READS.values(), ids=HIDING_READS)
@pytest.mark.parametrize("named", ["old", "ads", "nobody's", "ka", "%6Bb2", "KB"])
def test_another_master_key_in_key_material_hides_no_column(
    tmp_path: Path, named: str, read: Callable[[Keytools, Path], object]
) -> None:
    """The reader may not use the key named there, or no such key exists: an error, and no missing column."""
    kms, tools, path = external(tmp_path)
    edit(path, masterKeyID=named)
    kms.fail("refused", "old", "ads")
    with pytest.raises(TableMismatchError, match="column 'b' is under the master key"):
        read(tools, path)


@pytest.mark.parametrize("read", HIDING_READS.values(), ids=HIDING_READS)
def test_a_key_that_stands_for_that_of_the_table_hides_no_column(
    tmp_path: Path, read: Callable[[Keytools, Path], object]
) -> None:
    """An attacker who can edit key material can choose among the keys that a table trusts."""
    kms, tools, path = external(tmp_path, also_trusted=["old"])
    edit(path, masterKeyID="old")
    kms.fail("refused", "old")
    with pytest.raises(ColumnAccessDeniedError) as caught:
        read(tools, path)
    assert isinstance(caught.value.causes[0], KmsAccessDeniedError)
    assert caught.value.columns == ("b",)


@pytest.mark.parametrize("read", HIDING_READS.values(), ids=HIDING_READS)
def test_the_very_key_of_the_table_hides_its_column(
    tmp_path: Path, read: Callable[[Keytools, Path], object]
) -> None:
    kms, tools, path = external(tmp_path)
    kms.fail("refused", "kb")
    assert tools.read_table(path).equals(TABLE.drop_columns(["b"]))
    read(tools, path)


def test_a_disabled_version_in_a_wrapped_key_hides_no_column(tmp_path: Path, keystore: dict[str, Any]) -> None:
    """The version that wrapped a key is in the wrapped key, and nothing else authenticates it."""
    path = tmp_path / "keystore.json"
    shutil.copy(keystore["path"], path)
    made = document(keystore | {"path": str(path)}, reading={"denied_columns": "hide"})
    made["tables"]["own"] = POLICY | {"key_material": "external", "double_wrapping": False}
    opened = Keystore(path, lambda: passphrase_from_text("a long passphrase"))
    opened.rotate_key("kb")
    file = tmp_path / "data" / "x.parquet"
    file.parent.mkdir()
    with Keytools(parse_configuration(made)) as tools:
        tools.write_table(TABLE, file)
        assert tools.read_table(file).equals(TABLE)
    opened.set_enabled("kb", False, 1)
    beside = file.with_name(f"_KEY_MATERIAL_FOR_{file.name}.json")
    genuine = beside.read_text()
    wrapped = next(
        fields["wrappedDEK"]
        for fields in map(json.loads, json.loads(genuine).values())
        if fields["masterKeyID"] == "kb"
    )
    assert wrapped.startswith("keystore:v2:")
    edit(file, wrappedDEK=wrapped.replace("keystore:v2:", "keystore:v1:"))
    for read in HIDING_READS.values():
        with Keytools(parse_configuration(made)) as tools, pytest.raises(ColumnAccessDeniedError) as caught:
            read(tools, file)
        assert isinstance(caught.value.causes[0], MasterKeyDisabledError)
    # A whole key is different: its owner decides.
    beside.write_text(genuine)
    opened.set_enabled("kb", False)
    with Keytools(parse_configuration(made)) as tools:
        assert tools.read_table(file).equals(TABLE.drop_columns(["b"]))


def test_without_a_table_nothing_is_hidden(tmp_path: Path) -> None:
    kms, tools, path = external(tmp_path)
    kms.fail("refused", "kb")
    assert tools.read_table(path).equals(TABLE.drop_columns(["b"]))
    made = {"version": 1, "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)}}
    bare = Keytools(parse_configuration(made | {"reading": {"denied_columns": "hide"}}), kms=kms)
    for read in HIDING_READS.values():
        with pytest.raises(ColumnAccessDeniedError):
            read(bare, path)
    assert bare.read_table(path, columns=["plain", "a"]).equals(TABLE.drop_columns(["b"]))


# --- values from folder names ---


FOLDER_READS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda tools, path: tools.read_table(path),
    "a column": lambda tools, path: tools.read_table(path, columns=["b"]),
    "another column": lambda tools, path: tools.read_table(path, columns=["plain"]),
    "a filter": lambda tools, path: tools.read_table(path, filters=[("b", "=", "forged")]),
    "dataset": lambda tools, path: tools.dataset(path),
    "a name of a column": lambda tools, path: tools.dataset(path, partitioning=["b"]),
}


def folder_with_moved_file(tools: Keytools, folder: Path, name: str, table: pa.Table = TABLE) -> None:
    (folder / name).mkdir(parents=True)
    tools.write_table(TABLE.slice(0, 50), folder / "x.parquet")
    tools.write_table(table.slice(50), folder / name / "y.parquet")


@pytest.mark.parametrize("read", FOLDER_READS, ids=FOLDER_READS)
def test_a_folder_gives_no_values_to_an_encrypted_column(tmp_path: Path, read: str) -> None:
    """An attacker without a key moves an authentic file to `b=forged`: Arrow would take that for values of `b`."""
    name = "forged" if read == "a name of a column" else "b=forged"
    bare = {"version": 1, "kms": in_memory()}
    tools = Keytools(parse_configuration(document(in_memory())))
    folder_with_moved_file(tools, tmp_path / "data", name)
    for reader in (tools, Keytools(parse_configuration(bare))):
        with pytest.raises(DecryptionError, match=r"y\.parquet: the name of a folder gives values to 'b'"):
            FOLDER_READS[read](reader, tmp_path / "data")
        found = reader.dataset(tmp_path / "data", partitioning=None).to_table()
        assert found.sort_by("plain").equals(TABLE)


@pytest.mark.parametrize("read", FOLDER_READS, ids=FOLDER_READS)
def test_nor_to_one_that_the_table_has_under_a_key_and_the_file_lacks(tmp_path: Path, read: str) -> None:
    name = "forged" if read == "a name of a column" else "b=forged"
    tools = Keytools(parse_configuration(document(in_memory(), older=POLICY | {"column_keys": {"ka": ["a"]}})))
    folder = tmp_path / "data" / name
    folder.mkdir(parents=True)
    tools.write_table(TABLE.select(["plain", "a"]), folder / "y.parquet", table_name="older")
    own = Keytools(parse_configuration(document(in_memory())))
    with pytest.raises(DecryptionError, match=r"y\.parquet: the name of a folder gives values to 'b'"):
        FOLDER_READS[read](own, tmp_path / "data")


@pytest.mark.parametrize("pattern", ["person.ssn", "person.*", "person"])
def test_nor_to_a_column_of_which_a_part_is_under_a_key(tmp_path: Path, pattern: str) -> None:
    """A file from before the table had the column: only the folder gives its value."""
    older = Keytools(
        parse_configuration(
            document(in_memory()) | {"tables": {"own": {"footer_key": "kf", "unlisted_columns": "plaintext"}}}
        )
    )
    folder = tmp_path / "data" / "person=forged"
    folder.mkdir(parents=True)
    older.write_table(TABLE.select(["plain"]), folder / "y.parquet")
    table = {"footer_key": "kf", "column_keys": {"ka": [pattern]}, "unlisted_columns": "plaintext"}
    tools = Keytools(parse_configuration(document(in_memory()) | {"tables": {"own": table}}))
    for read in (tools.read_table, tools.dataset):
        with pytest.raises(DecryptionError, match=r"y\.parquet: the name of a folder gives values to 'person'"):
            read(tmp_path / "data")
    (tmp_path / "data" / "person=forged").rename(tmp_path / "data" / "pers=right")
    assert tools.read_table(tmp_path / "data")["pers"].to_pylist() == ["right"] * 100


def test_folders_give_values_to_columns_that_are_under_no_key(tmp_path: Path) -> None:
    table = POLICY | {"unlisted_columns": "footer_key"}
    tools = Keytools(parse_configuration(document(in_memory()) | {"tables": {"own": table}}))
    with pytest.warns(UserWarning, match="in the names of folders"):
        tools.write_dataset(TABLE.slice(0, 3), tmp_path / "data", partitioning=["plain"])
    assert sorted(tools.read_table(tmp_path / "data")["plain"].to_pylist()) == [0, 1, 2]
    folder_with_moved_file(tools, tmp_path / "more", "year=2020")
    assert tools.read_table(tmp_path / "more")["year"].null_count == 50
