"""Folder names that give values to protected columns: a file below such a folder is not read, and is an error."""

from __future__ import annotations

import contextlib
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs
from typer.testing import CliRunner
from unit.serve.serving import ask, opened_by
from view_case import ViewCase

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.errors import FolderNameError
from parquet_keytools.serve.fuse_mount import MountedTree
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer

TABLE = pa.table(
    {
        "id": [1, 2],
        "ssn": ["078-05", "219-09"],
        "straße": ["a", "b"],
        "person": [{"email": "a@b", "age": 1}, {"email": "c@d", "age": 2}],
        "plain": [7, 8],
    }
)
COLUMN_KEYS = {"secret": ["ssn", "straße", "person.email"], "public": ["id", "person.age"]}


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    made = ViewCase(tmp_path, {"column_keys": COLUMN_KEYS})
    (tmp_path / "data").mkdir()
    made.keytools().write_table(TABLE, tmp_path / "data" / "beside.parquet")
    return made


def moved(case: ViewCase, folder: str, name: str = "p0.parquet") -> Path:
    """Write a file and move it to a folder, as anyone without a key can."""
    place = case.folder / "data" / folder
    place.mkdir(parents=True, exist_ok=True)
    case.keytools().write_table(TABLE, case.folder / name)
    return Path(shutil.move(case.folder / name, place / name))


FOLDERS = {
    "as it is": "ssn=EVIL",
    "upper case": "SSN=EVIL",
    "escaped": "s%73n=EVIL",
    "escaped twice": "s%2573n=EVIL",
    "an escaped sign": "ssn%3DEVIL",
    "below another": "year=2024/ssn=EVIL",
    "above another": "ssn=EVIL/year=2024",
    "behind a backslash": "year\\ssn=EVIL",
    "behind an escaped separator": "year%2Fssn=EVIL",
    "two signs": "ssn=EV=IL",
    "no value": "ssn=",
    "a null": "ssn=__HIVE_DEFAULT_PARTITION__",
    "another key": "id=99",
    "case that folds": "STRASSE=EVIL",
    "another form of Unicode": unicodedata.normalize("NFKD", "ｓｓｎ") + "=EVIL",
    "full width": "ｓｓｎ=EVIL",
    "a parent": "person=EVIL",
    "a part": "Person.Email=EVIL",
    "a part that is under another key": "person.age=99",
}

OPENINGS: dict[str, Callable[[Keytools, Path], object]] = {
    "open": lambda keytools, path: keytools.open(path),
    "filesystem": lambda keytools, path: keytools.filesystem().open(str(path)),
    "info": lambda keytools, path: keytools.filesystem().info(str(path)),
    "ls": lambda keytools, path: keytools.filesystem().ls(str(path)),
    "arrow": lambda keytools, path: pq.read_table(str(path), filesystem=keytools.filesystem().arrow),
    "view of the file": lambda keytools, path: keytools.view(path).open(""),
    "view of the folder": lambda keytools, path: keytools.view(path.parent).open(path.name),
    "read_table": lambda keytools, path: keytools.read_table(path),
    "read_table of the folder": lambda keytools, path: keytools.read_table(path.parent),
    "dataset": lambda keytools, path: keytools.dataset([path]),
    "scan_polars": lambda keytools, path: keytools.scan_polars(path.parent),
    "schema": lambda keytools, path: keytools.schema(path),
    "metadata": lambda keytools, path: keytools.metadata(path),
    "decryption_properties": lambda keytools, path: keytools.decryption_properties(path),
    "decrypt_file": lambda keytools, path: keytools.decrypt_file(path, path.parents[3] / "out.parquet"),
    "salvage_file": lambda keytools, path: keytools.salvage_file(path, path.parents[3] / "out.parquet"),
    "rekey_file": lambda keytools, path: keytools.rekey_file(path, path.parents[3] / "out.parquet"),
}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_a_file_is_not_opened_below_a_folder_with_the_name_of_a_protected_column(
    case: ViewCase, folder: str
) -> None:
    path = moved(case, folder)
    keytools = case.keytools()
    for name, opening in OPENINGS.items():
        with pytest.raises(FolderNameError) as caught:
            opening(keytools, path)
        assert str(path) in str(caught.value), name
        assert caught.value.folder in (folder, *folder.split("/"), "year/ssn=EVIL", "ssn=EVIL", "s%73n=EVIL"), name
        assert "Move the file" in caught.value.hint, name


@pytest.mark.parametrize("folder", ["year=2024", "plain=9", "ss=1", "ssn", "ssns=1", "=ssn", "x=ssn=1"])
def test_other_folders_do_no_harm(case: ViewCase, folder: str) -> None:
    path = moved(case, folder)
    keytools = case.keytools()
    assert pq.read_table(keytools.open(path)).equals(TABLE)
    view = keytools.view(case.folder / "data")
    assert set(view.find("")) == {"beside.parquet", f"{folder}/p0.parquet"}
    assert keytools.verify_file(path).result("folder-name").outcome is Outcome.HOLDS
    assert [uses.unknown for uses in keytools.key_inventory(path)] == [None]


def test_a_link_to_such_a_folder_is_judged_by_its_own_name(case: ViewCase) -> None:
    path = moved(case, "ssn=EVIL")
    keytools = case.keytools()
    (case.folder / "data" / "harmless").symlink_to(path.parent)
    assert pq.read_table(keytools.open(case.folder / "data" / "harmless" / "p0.parquet")).equals(TABLE)
    moved(case, "real")
    (case.folder / "data" / "SSN=EVIL").symlink_to(case.folder / "data" / "real")
    with pytest.raises(FolderNameError):
        keytools.open(case.folder / "data" / "SSN=EVIL" / "p0.parquet")


def test_without_partitions_a_reader_of_the_data_set_may_have_it(case: ViewCase) -> None:
    path = moved(case, "ssn=EVIL")
    keytools = case.keytools()
    assert keytools.read_table(path, partitioning=None).equals(TABLE)
    assert keytools.dataset(path.parent, partitioning=None).to_table().equals(TABLE)
    for partitioning in (["SSN"], ds.partitioning(pa.schema([("ssn", pa.string())]))):
        for names in ("EVIL", "evil=1"):
            other = moved(case, names)
            with pytest.raises(FolderNameError):
                keytools.dataset(other.parent.parent, partitioning=partitioning)
            shutil.rmtree(other.parent)


# --- listings ---


def listed(view: Any) -> set[str]:
    """Return the result of every way to list; all agree."""
    answers = [
        set(view.find("")),
        set(view.glob("**/*.parquet")),
        set(view.glob("*/*.parquet")) | set(view.glob("*.parquet")),
        {f"{folder}/{name}".strip("/") for folder, _, names in view.walk("") for name in names},
        {info.path for info in view.arrow.get_file_info(pafs.FileSelector("", recursive=True)) if info.is_file},
    ]
    files = [{name for name in answer if name.endswith(".parquet")} for answer in answers]
    assert all(answer == files[0] for answer in files), answers
    return files[0]


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_it_is_not_listed_and_those_beside_it_are(case: ViewCase, denied_columns: str) -> None:
    evil = moved(case, "ssn=EVIL")
    moved(case, "year=2024")
    (evil.parent / "_SUCCESS").touch()
    view = case.keytools(denied_columns=denied_columns).view(case.folder / "data")
    for _ in range(2):
        assert listed(view) == {"beside.parquet", "year=2024/p0.parquet"}
    assert not view.exists("ssn=EVIL/p0.parquet")
    # Moved back to its place, it is listed again.
    shutil.move(evil, case.folder / "data" / "back.parquet")
    assert "back.parquet" in view.find("")


def test_the_secret_of_a_column_that_is_hidden_is_not_made_up(case: ViewCase) -> None:
    moved(case, "ssn=EVIL")
    case.kms.deny("secret")
    view = case.keytools(denied_columns="hide").view(case.folder / "data")
    assert listed(view) == {"beside.parquet"}


# --- engines ---


ENGINES: dict[str, Callable[[Any], list[dict[str, Any]]]] = {}


def engine(read: Callable[[Any], list[dict[str, Any]]]) -> Callable[[Any], list[dict[str, Any]]]:
    ENGINES[read.__name__] = read
    return read


@engine
def duckdb_reads(view: Any) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        connection.register_filesystem(view)
        rows = connection.sql("select ssn from read_parquet('keytools://**/*.parquet', hive_partitioning = true)")
        return rows.to_arrow_table().to_pylist()


@engine
def pyarrow_reads(view: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset("", filesystem=view.arrow, partitioning="hive").to_table().to_pylist()
    return found


@engine
def pandas_reads(view: Any) -> list[dict[str, Any]]:
    import pandas as pd

    found: list[dict[str, Any]] = pd.read_parquet("", filesystem=view).to_dict("records")
    return found


@pytest.mark.parametrize("read", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("folder", ["ssn=EVIL", "SSN=EVIL", "s%73n=EVIL"])
def test_no_engine_shows_the_name_of_the_folder(
    case: ViewCase, folder: str, read: Callable[[Any], list[dict[str, Any]]]
) -> None:
    moved(case, folder)
    assert {row["ssn"] for row in read(case.keytools().view(case.folder / "data"))} == {"078-05", "219-09"}
    (case.folder / "data" / "beside.parquet").unlink()
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(Exception):  # Some engines refuse a folder without files.
        rows = read(case.keytools().view(case.folder / "data"))
    assert not rows


@pytest.fixture
def server(case: ViewCase) -> Iterator[ViewServer]:
    folder = case.folder / "data"
    with ViewServer(ServedTree(case.keytools().view(folder), folder=folder), with_s3=True) as running:
        yield running


def test_it_is_not_served(case: ViewCase, server: ViewServer) -> None:
    moved(case, "ssn=EVIL")
    assert ask(server, "beside.parquet")[0] == 200
    for key in ("ssn=EVIL/p0.parquet", "ssn%3DEVIL/p0.parquet"):
        for method in ("GET", "HEAD"):
            assert ask(server, key, method)[0] >= 400
    assert b"p0.parquet" not in ask(server, "ssn=EVIL/")[2]
    shown = pl.read_parquet(f"{server.url}beside.parquet")["ssn"].to_list()
    assert shown == TABLE["ssn"].to_pylist()
    with pytest.raises(Exception):  # noqa: B017 - Polars has errors of its own
        pl.scan_parquet(f"{server.url}ssn=EVIL/p0.parquet", hive_partitioning=True).collect()


def test_it_is_not_mounted(case: ViewCase) -> None:
    moved(case, "ssn=EVIL")
    folder = case.folder / "data"
    mounted = MountedTree(ServedTree(case.keytools().view(folder), folder=folder), lambda: None)
    assert {name for name, *_ in mounted.readdir("/ssn=EVIL", 0)} == {".", ".."}
    assert {name for name, *_ in mounted.readdir("/", 0)} == {".", "..", "beside.parquet", "ssn=EVIL"}
    for attempt in (
        lambda: mounted.getattr("/ssn=EVIL/p0.parquet"),
        lambda: opened_by(mounted, "/ssn=EVIL/p0.parquet"),
    ):
        with pytest.raises(OSError):
            attempt()


def test_other_file_systems_are_judged_alike(case: ViewCase) -> None:
    memory = fsspec.filesystem("memory")
    root = f"/folder_names_{case.folder.name}"
    data = (case.folder / "data" / "beside.parquet").read_bytes()
    for name in ("ssn=EVIL/p0.parquet", "year=1/beside.parquet"):
        memory.pipe_file(f"{root}/{name}", data)
    keytools = case.keytools()
    view = keytools.view(root, filesystem=memory)
    assert listed(view) == {"year=1/beside.parquet"}
    with pytest.raises(FolderNameError):
        keytools.open(f"{root}/ssn=EVIL/p0.parquet", filesystem=memory)
    report = keytools.verify_file(f"{root}/ssn=EVIL/p0.parquet", filesystem=memory)
    assert report.result("folder-name").outcome is Outcome.BROKEN
    memory.rm(root, recursive=True)


# --- commands of the files' owner ---


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_verify_and_keys_do_not_pass_it(case: ViewCase, folder: str) -> None:
    path = moved(case, folder)
    keytools = case.keytools()
    assert not keytools.verify_file(path).conforms
    assert keytools.verify_file(path).result("folder-name").outcome is Outcome.BROKEN
    assert not keytools.verify_folder(case.folder / "data").conforms
    assert [finding.rule.id for finding in keytools.inspect_file(path).flaws] == ["folder-name"]
    unknown = {Path(uses.path).name: uses.unknown for uses in keytools.key_inventory(case.folder / "data")}
    assert unknown["beside.parquet"] is None
    assert isinstance(unknown["p0.parquet"], FolderNameError)


def test_a_plaintext_footer_shows_it_without_keys(case: ViewCase) -> None:
    case.table["plaintext_footer"] = True
    path = moved(case, "SSN=EVIL")
    for command in (["verify", str(path)], ["inspect", str(path)]):
        done = CliRunner().invoke(app, command)
        assert "SSN=EVIL" in done.stdout, command
