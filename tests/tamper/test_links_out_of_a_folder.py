"""Work in place stays in the named folder, wherever links in it lead."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_spark import FakeSpark
from rotation_case import Case, tree_digest
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import OutputError
from parquet_keytools.rotation.report import RotationOutcome, RotationReport
from parquet_keytools.spark import pipelines
from parquet_keytools.storage.locations import FileLocation

Change = Callable[..., RotationReport]

CHANGES: dict[str, Change] = {
    "rotate": lambda tools, path, **options: tools.rotate(path, moves={"ka": "new"}, **options),
    "new keks": lambda tools, path, **options: tools.rotate(path, new_keks=True, **options),
    "rekey": lambda tools, path, **options: tools.rekey_in_place(path, **options),
}


class Folders:
    """A data set `mine`, and another one beside it, `theirs`, with the same keys."""

    def __init__(self, case: Case, tmp_path: Path) -> None:
        self.case = case
        case.write()
        self.mine, self.theirs = case.folder, tmp_path / "theirs"
        shutil.copytree(self.mine, self.theirs)
        (self.file,) = self.theirs.glob("*.parquet")
        case.add_version()

    def tools(self) -> Keytools:
        return self.case.tools()


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(Case.make(tmp_path, "keystore"), tmp_path)


def _to_file(folders: Folders) -> Path:
    link = folders.mine / "link.parquet"
    link.symlink_to(folders.file)
    return link


def _to_file_relative(folders: Folders) -> Path:
    link = folders.mine / "link.parquet"
    link.symlink_to(os.path.relpath(folders.file, folders.mine))
    return link


def _to_folder(folders: Folders) -> Path:
    link = folders.mine / "year=1"
    link.symlink_to(folders.theirs)
    return link


def _through_a_link_inside(folders: Folders) -> Path:
    """A link to a link: the first one leads within the folder."""
    (folders.mine / "_hidden").symlink_to(folders.theirs)
    link = folders.mine / "year=1"
    link.symlink_to("_hidden")
    return link


def _in_the_middle(folders: Folders) -> Path:
    (folders.mine / "a").mkdir()
    link = folders.mine / "a" / "b"
    link.symlink_to("../../theirs")
    return link


def _to_a_folder_above(folders: Folders) -> Path:
    link = folders.mine / "up"
    link.symlink_to(folders.mine.parent)
    return link


LINKS: dict[str, Callable[[Folders], Path]] = {
    "a file": _to_file,
    "a file by a relative link": _to_file_relative,
    "a folder": _to_folder,
    "a folder by two links": _through_a_link_inside,
    "a folder in the middle": _in_the_middle,
    "a folder above": _to_a_folder_above,
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_behind_a_link_out_stays_and_is_reported(
    folders: Folders, change: str, link: Callable[[Folders], Path]
) -> None:
    tools = folders.tools()
    made, before = link(folders), tree_digest(folders.theirs)
    report = CHANGES[change](tools, folders.mine)
    assert tree_digest(folders.theirs) == before
    assert not report.succeeded
    assert [file.path for file in report.failures] == [str(made)]
    (error,) = [file.error for file in report.failures]
    assert isinstance(error, OutputError)
    assert "--follow-links" in error.hint
    assert report.counts[RotationOutcome.FAILED] == 1 and sum(report.counts.values()) == 2


@pytest.mark.parametrize("link", [_to_folder, _in_the_middle])
@pytest.mark.parametrize("change", CHANGES)
def test_follow_links_changes_it(folders: Folders, change: str, link: Callable[[Folders], Path]) -> None:
    tools = folders.tools()
    link(folders)
    before = tree_digest(folders.theirs)
    report = CHANGES[change](tools, folders.mine, follow_links=True)
    assert report.succeeded and sum(report.counts.values()) == 2
    assert tree_digest(folders.theirs) != before


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_named_may_be_a_link(folders: Folders, change: str, tmp_path: Path) -> None:
    tools = folders.tools()
    (tmp_path / "named").symlink_to(folders.mine)
    before = tree_digest(folders.mine)
    report = CHANGES[change](tools, tmp_path / "named")
    assert report.succeeded and sum(report.counts.values()) == 1
    assert tree_digest(folders.mine) != before


@pytest.mark.parametrize("change", ["rotate", "new keks"])
def test_so_may_a_file(folders: Folders, change: str, tmp_path: Path) -> None:
    (tmp_path / "named.parquet").symlink_to(folders.file)
    before = tree_digest(folders.theirs)
    assert CHANGES[change](folders.tools(), tmp_path / "named.parquet").succeeded
    assert tree_digest(folders.theirs) != before
    _to_file(folders)
    assert CHANGES[change](folders.tools(), folders.mine, follow_links=True).succeeded


def test_a_link_within_the_folder_changes_each_file_once(folders: Folders) -> None:
    (folders.mine / "b").mkdir()
    file = Path(shutil.move(folders.file, folders.mine / "b" / "theirs.parquet"))
    (folders.mine / "a").symlink_to("b")
    (folders.mine / "c.parquet").symlink_to(file)
    (folders.mine / "_kept").mkdir()
    shutil.copy(file, folders.mine / "_kept" / "other.parquet")
    for name in ("d", "e"):
        (folders.mine / name).symlink_to("_kept")
    report = folders.case.tools().rekey_in_place(folders.mine)
    assert report.succeeded
    outcomes = {Path(found.path).relative_to(folders.mine).as_posix(): found.outcome for found in report.files}
    rekeyed = {name for name, outcome in outcomes.items() if outcome is RotationOutcome.REKEYED}
    assert rekeyed - {next(folders.mine.glob("*.parquet")).name} == {"b/theirs.parquet", "d/other.parquet"} or (
        {"b/theirs.parquet", "d/other.parquet"} <= rekeyed and len(rekeyed) == 3
    )
    others = {outcome for name, outcome in outcomes.items() if name not in rekeyed}
    assert others == {RotationOutcome.NOTHING_TO_ROTATE} and len(outcomes) == 6


def test_several_named_places_are_one(folders: Folders) -> None:
    """A link between two named folders does not leave them."""
    (folders.mine / "link").symlink_to(folders.theirs)
    both = FileLocation.resolve_all([folders.mine, folders.theirs])
    report = folders.case.tools().rekey_in_place(both)
    assert report.succeeded and report.counts[RotationOutcome.REKEYED] == 2
    glob = FileLocation.resolve_all(folders.mine / "*" / "*.parquet")
    report = folders.case.tools().rekey_in_place(glob)
    assert [Path(file.path) for file in report.failures] == [folders.mine / "link"]


# --- other entry points ---

KEYS = {name: base64.b64encode(name.encode() * 8).decode() for name in ("kf", "ka", "nw")}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "kms": {"type": "in_memory", "keys": KEYS},
                "tables": {
                    "t": {
                        "footer_key": "kf",
                        "column_keys": {"ka": ["a"]},
                        "unlisted_columns": "plaintext",
                        "also_trusted": ["nw"],
                    }
                },
            }
        )
    )
    path.chmod(0o600)
    with Keytools.from_yaml(path) as tools:
        for name in ("mine", "theirs"):
            (tmp_path / name).mkdir()
            tools.write_table(pa.table({"a": [1]}), tmp_path / name / "x.parquet")
    (tmp_path / "mine" / "linked").symlink_to(tmp_path / "theirs")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["rotate", "--from", "ka", "--to", "nw"],
        ["rotate", "--from", "ka", "--to", "nw", "--dry-run"],
        ["rekey", "--in-place"],
    ],
    ids=" ".join,
)
def test_the_command_line_ends_with_status_1(config: Path, command: list[str]) -> None:
    mine, theirs = config.with_name("mine"), config.with_name("theirs")
    before = tree_digest(theirs)
    name, *options = command
    done = CliRunner().invoke(app, [name, str(mine), "--config", str(config), *options])
    assert done.exit_code == 1, done.output
    assert str(mine / "linked") in done.stderr and "--follow-links" in done.stderr
    assert tree_digest(theirs) == before
    done = CliRunner().invoke(app, [name, str(mine), "--config", str(config), *options, "--follow-links"])
    assert done.exit_code == 0, done.output


def test_follow_links_goes_with_in_place_only(config: Path) -> None:
    out = config.with_name("out")
    arguments = ["rekey", str(config.with_name("mine")), str(out), "--config", str(config), "--follow-links"]
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("name", ["rotate", "rekey"])
def test_spark_does_not_follow_them(config: Path, name: str) -> None:
    mine, theirs = config.with_name("mine"), config.with_name("theirs")
    (mine / "again").symlink_to(mine / "x.parquet")
    before = tree_digest(theirs)
    more: dict[str, Any] = {"moves": {"ka": "nw"}} if name == "rotate" else {}
    spark: Any = FakeSpark(2)
    report = getattr(pipelines, name)(spark, mine, config, **more)
    assert not report.succeeded
    rows = {Path(row["path"]).name: row["outcome"] for row in report.rows()}
    done = "rotated" if name == "rotate" else "rekeyed"
    assert rows == {"x.parquet": done, "again": "nothing to rotate", "linked": "failed"}
    assert tree_digest(theirs) == before
    report = getattr(pipelines, name)(spark, mine, config, follow_links=True, **more)
    assert report.succeeded and tree_digest(theirs) != before


@pytest.mark.parametrize("is_file", [True, False], ids=["a file", "a folder"])
@pytest.mark.parametrize("command", ["decrypt", "rekey"])
def test_nothing_is_written_through_a_link_in_the_target(config: Path, command: str, is_file: bool) -> None:
    source, target, theirs = (config.with_name(name) for name in ("source", "target", "theirs"))
    (source / "year=1").mkdir(parents=True)
    shutil.copy(theirs / "x.parquet", source / "year=1" / "x.parquet")
    target.mkdir()
    if is_file:
        (target / "year=1").mkdir()
        (target / "year=1" / "x.parquet").symlink_to(theirs / "x.parquet")
    else:
        (target / "year=1").symlink_to(theirs)
    before = tree_digest(theirs)
    arguments = [command, str(source), str(target), "--config", str(config), "--overwrite"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and "a link leads out of the folder" in done.stderr
    assert tree_digest(theirs) == before
