"""Each command with each odd entry of a folder: all see the same files, and none skips a file silently."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_spark import FakeSpark
from odd_entries import ENTRIES, Odd, Verdict
from soak import SOAK
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import IncompleteDataSetError, KeytoolsError
from parquet_keytools.runtime.presentation import escaped_path
from parquet_keytools.spark import pipelines

TABLE = pa.table({"id": range(10), "name": [f"name {number}" for number in range(10)]})
KEYS = {name: base64.b64encode(name.encode().ljust(16)).decode() for name in ("footer", "pii", "new")}


@dataclass
class Seen:
    """A command's view of a folder.

    Attributes:
        files: Paths that it reports as files of the data set, or as unreadable.
        failed: The paths among these with an error, and the errors.
        text: All of its output.
        succeeded: Whether it reports success.
    """

    files: list[str]
    failed: dict[str, str]
    text: str = ""
    succeeded: bool = True


@dataclass
class Place:
    """A folder with one good file, and the configuration of its data set."""

    config: Path
    folder: Path
    elsewhere: Path
    target: Path
    plain: bool
    keytools: Keytools = field(init=False)

    def __post_init__(self) -> None:
        self.keytools = Keytools.from_mapping(json.loads(self.config.read_text()))
        self.folder.mkdir()
        self.elsewhere.mkdir()
        self.good(self.folder / "good.parquet")

    def good(self, path: Path) -> None:
        if self.plain:
            pq.write_table(TABLE, path)
        else:
            self.keytools.write_table(TABLE, path)

    def cli(self, *arguments: object) -> tuple[dict[str, Any], str]:
        """Run a command, and return its JSON document and exit status."""
        done = CliRunner().invoke(app, [*map(str, arguments), "--config", str(self.config), "--json"])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code in (0, 1), done.stderr
        return {"succeeded": done.exit_code == 0, **json.loads(done.stdout)}, done.stderr


def converted(place: Place, *arguments: object) -> Seen:
    document, text = place.cli(*arguments)
    failed = {failure["source"]: failure["message"] for failure in document["failures"]}
    files = [file["source"] for file in document["files"]] + list(failed)
    return Seen(files, failed, text, document["succeeded"])


def listed(place: Place, *arguments: object) -> Seen:
    document, text = place.cli(*arguments)
    failed = {file["path"]: file["message"] for file in document["files"] if file["error"] is not None}
    return Seen([file["path"] for file in document["files"]], failed, text, document["succeeded"])


def verified(place: Place) -> Seen:
    document, text = place.cli("verify", place.folder)
    failed = {
        file["path"]: json.dumps(file["rules"], ensure_ascii=False)
        for file in document["files"]
        if not file["verdict"].startswith("conforms")
    }
    # A file that is reached twice, or a summary, is a finding of its own.
    return Seen([file["path"] for file in document["files"]], failed, text, not failed)


def of_report(report: Any) -> Seen:
    failed = {file.path: str(file.error) for file in report.files if file.error is not None}
    return Seen([file.path for file in report.files], failed, "", report.succeeded)


def pipeline(place: Place, name: str, *more: Any, **options: Any) -> Seen:
    pytest.importorskip("pyspark")
    spark: Any = FakeSpark(2)
    report = getattr(pipelines, name)(spark, place.folder, *more, place.config, **options)
    rows = [row for row in report.rows() if row["outcome"] not in ("skipped", "copied")]
    bad = ("failed", "incomplete", "does not conform")
    failed = {row["path"]: str(row["error"]) for row in rows if row["error"] is not None or row["outcome"] in bad}
    if name == "verify":
        return Seen([row["path"] for row in rows], failed, "", not failed)
    return Seen([row["path"] for row in rows], failed, "", report.succeeded)


def inventory(place: Place) -> Seen:
    files = list(place.keytools.key_inventory(place.folder))
    failed = {file.path: str(file.unknown) for file in files if file.unknown is not None}
    unknown = {file.path for file in place.keytools.files_using("new", place.folder)}
    assert unknown == failed.keys()
    return Seen([file.path for file in files], failed, "", not failed)


def asked(place: Place) -> Seen:
    seen = listed(place, "keys", place.folder, "--fail-if-uses", "new")
    assert ("Nothing here needs new" in seen.text) == seen.succeeded
    assert ("all keys are visible" in seen.text) == seen.succeeded
    return seen


COMMANDS: dict[str, Callable[[Place], Seen]] = {
    "encrypt": lambda place: converted(place, "encrypt", place.folder, place.target),
    "decrypt": lambda place: converted(place, "decrypt", place.folder, place.target),
    "salvage": lambda place: converted(place, "decrypt", place.folder, place.target, "--salvage"),
    "rekey": lambda place: converted(place, "rekey", place.folder, place.target),
    "rekey in place": lambda place: listed(place, "rekey", place.folder, "--in-place"),
    "rotate": lambda place: listed(place, "rotate", place.folder, "--from", "pii", "--to", "new"),
    "dry run": lambda place: listed(place, "rotate", place.folder, "--from", "pii", "--to", "new", "--dry-run"),
    "keys": lambda place: listed(place, "keys", place.folder),
    "keys --fail-if-uses": asked,
    "verify": verified,
    "Keytools.rotate": lambda place: of_report(place.keytools.rotate(place.folder, moves={"pii": "new"})),
    "Keytools.rekey_in_place": lambda place: of_report(place.keytools.rekey_in_place(place.folder)),
    "Keytools.key_inventory": inventory,
    "pipelines.encrypt": lambda place: pipeline(place, "encrypt", place.target),
    "pipelines.rotate": lambda place: pipeline(place, "rotate", moves={"pii": "new"}),
    "pipelines.rekey": lambda place: pipeline(place, "rekey"),
    "pipelines.keys": lambda place: pipeline(place, "keys"),
    "pipelines.verify": lambda place: pipeline(place, "verify"),
}
LIST_KEYS = {"keys", "keys --fail-if-uses", "Keytools.key_inventory", "pipelines.keys"}
"""These also check what readers skip: an encrypted file needs its keys, whatever its name."""

PASSED_OVER = {
    "hidden file": ".odd.parquet",
    "underscore": "_odd.parquet",
    "hidden folder": "_delta_log/1.parquet",
    "summary": "_metadata",
    "hidden dangling link": "_odd.parquet",
}
IN_PLACE = {
    "rekey in place",
    "rotate",
    "dry run",
    "Keytools.rotate",
    "Keytools.rekey_in_place",
    "pipelines.rotate",
    "pipelines.rekey",
}
"""These do not follow links out of the named folder: the target of such a link fails."""

OUTSIDE = {"link to a file": "odd.parquet", "link to a folder": "linked"}


def make_place(tmp_path: Path, *, plain: bool) -> Place:
    config = tmp_path / "config.yaml"
    table = {"footer_key": "footer", "column_keys": {"pii": ["name"]}, "unlisted_columns": "plaintext"}
    # JSON is valid YAML.
    config.write_text(
        json.dumps({"version": 1, "kms": {"type": "in_memory", "keys": KEYS}, "tables": {"t": table}})
    )
    config.chmod(0o600)
    return Place(config, tmp_path / "data", tmp_path / "elsewhere", tmp_path / "target", plain)


def expected_paths(place: Place, odd: Odd) -> set[str]:
    names = () if odd.verdict in (Verdict.LEFT_OUT, Verdict.NOT_PARQUET) else odd.names
    return {str(place.folder / name) for name in ("good.parquet", *names)}


def chosen() -> list[tuple[str, str]]:
    """Return a quarter of all pairs, with each command and entry several times, and the special pairs; or all."""
    return [
        (command, entry)
        for row, command in enumerate(COMMANDS)
        for column, entry in enumerate(ENTRIES)
        if SOAK
        or (row + column) % 4 == 0
        or (command in IN_PLACE and entry in OUTSIDE)
        or (command in LIST_KEYS and entry in PASSED_OVER)
    ]


@pytest.mark.parametrize(("command", "entry"), chosen())
def test_every_command_sees_the_same(tmp_path: Path, command: str, entry: str) -> None:
    odd = ENTRIES[entry]
    if command in IN_PLACE and entry in OUTSIDE:
        odd = replace(odd, verdict=Verdict.UNSEEN, names=(OUTSIDE[entry],))
    place = make_place(tmp_path, plain=command in ("encrypt", "pipelines.encrypt"))
    odd.make(place.folder, place.elsewhere, place.good)
    seen = COMMANDS[command](place)
    unknown = {str(place.folder / PASSED_OVER[entry])} if command in LIST_KEYS and entry in PASSED_OVER else set()
    assert sorted(seen.files) == sorted(expected_paths(place, odd) | unknown)
    fails = odd.verdict in (Verdict.UNSEEN, Verdict.DAMAGED)
    assert set(seen.failed) == ({str(place.folder / name) for name in odd.names} if fails else unknown)
    assert all(text and text != "None" for text in seen.failed.values()) or command == "pipelines.verify"
    assert seen.succeeded == (not fails and not unknown)
    if fails and seen.text:
        # Its name is printed, and without characters that control a terminal.
        assert all(escaped_path(str(place.folder / name)) in seen.text for name in odd.names)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("reader", ["read_table", "dataset"])
def test_every_reader_sees_the_same(
    tmp_path: Path, reader: str, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd = ENTRIES[entry]
    place = make_place(tmp_path, plain=False)
    odd.make(place.folder, place.elsewhere, place.good)

    def read() -> pa.Table:
        if reader == "read_table":
            return place.keytools.read_table(place.folder)
        return place.keytools.dataset(place.folder).to_table()

    if odd.verdict in (Verdict.BELONGS, Verdict.LEFT_OUT, Verdict.NOT_PARQUET):
        assert read().num_rows == 10 * (1 + odd.files)
        warned = [record.getMessage() for record in caplog.records if "not Parquet files" in record.getMessage()]
        assert len(warned) == (odd.verdict is Verdict.NOT_PARQUET)
        assert all(str(place.folder / odd.names[0]) in text for text in warned)
        return
    kind = IncompleteDataSetError if odd.verdict is Verdict.UNSEEN else KeytoolsError
    with pytest.raises(kind) as caught:
        read()
    assert str(place.folder / odd.names[0]) in str(caught.value)
    if odd.verdict is not Verdict.DAMAGED:
        assert "begin its name with a dot or an underscore" in str(caught.value)


# --- as another user, without root's rights ---

NOBODY = 65534


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder of the user `nobody`."""
    path = Path(tempfile.mkdtemp(prefix="keytools-"))
    yield path
    shutil.rmtree(path)


def as_nobody(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a process of another user."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        result: dict[str, Any] = {"error": "the process ended"}
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            result = function()
        except BaseException as error:  # the parent fails
            result = {"error": repr(error), "names": str(error)}
        finally:
            os.write(theirs, json.dumps(result).encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return found


def close_some(place: Place) -> list[str]:
    """Put entries that another user cannot read beside the good file; return their paths."""
    for name in ("closed/odd.parquet", "named/odd.parquet", "secret"):
        (place.folder / name).parent.mkdir(exist_ok=True)
        place.good(place.folder / name)
    for path in (place.config.parent, *place.config.parent.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    for name, mode in (("closed", 0o700), ("named", 0o744), ("secret", 0o600)):
        os.chown(place.folder / name, 0, 0)
        (place.folder / name).chmod(mode)
    return [str(place.folder / name) for name in ("closed", "named/odd.parquet", "secret")]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_another_user_may_not_look_into(open_path: Path, command: str) -> None:
    plain = command in ("encrypt", "pipelines.encrypt")
    (open_path / "before").mkdir()
    # The other user could not import anything later.
    COMMANDS[command](make_place(open_path / "before", plain=plain))
    shutil.rmtree(open_path / "state", ignore_errors=True)
    (open_path / "now").mkdir()
    place = make_place(open_path / "now", plain=plain)
    closed = close_some(place)
    os.chown(open_path, NOBODY, NOBODY)
    found = as_nobody(lambda: asdict(COMMANDS[command](place)))
    assert "error" not in found, found
    assert sorted(found["files"]) == sorted([*closed, str(place.folder / "good.parquet")])
    assert sorted(found["failed"]) == sorted(closed)
    assert not found["succeeded"]


@pytest.mark.parametrize("reader", ["read_table", "dataset"])
def test_what_another_user_may_not_read(open_path: Path, reader: str) -> None:
    place = make_place(open_path, plain=False)
    read = getattr(place.keytools, reader)
    assert read(place.folder) is not None
    closed = close_some(place)
    found = as_nobody(lambda: {"rows": read(place.folder).num_rows})
    assert found["error"].startswith("IncompleteDataSetError")
    assert all(path in found["names"] for path in closed)
