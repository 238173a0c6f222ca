"""Files of one tenant in another tenant's place, and values that would name another key: each is refused."""

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.conformance.report import Verdict
from parquet_keytools.errors import ConfigurationError, KeytoolsError, TableMismatchError

DATA = pa.table({"email": ["a@x", "b@x"], "day": [1, 2]})
TENANTS = ("acme", "bolt")
KEYS = {
    name: base64.b64encode(name.ljust(16).encode()).decode()
    for name in ("footer", "new", "new-footer", *(f"prod/{tenant}" for tenant in TENANTS))
}
FORMS: dict[str, dict[str, Any]] = {
    "columns": {"footer_key": "footer", "column_keys": {"prod/{tenant}": ["email"]}},
    "footer": {"footer_key": "prod/{tenant}", "unlisted_columns": "footer_key", "plaintext_columns": []},
    "plaintext footer": {
        "footer_key": "footer",
        "column_keys": {"prod/{tenant}": ["email"]},
        "plaintext_footer": True,
    },
    "external": {
        "footer_key": "footer",
        "column_keys": {"prod/{tenant}": ["email"]},
        "key_material": "external",
    },
}


def document(form: str, *, moves: Any = None, **table: Any) -> dict[str, Any]:
    values = {"tenant": {"from": "partition", "pattern": "[a-z]{1,9}"}}
    return {
        "version": 1,
        "kms": {"type": "in_memory", "keys": KEYS},
        "tables": {"events": {"plaintext_columns": ["day"], "key_values": values, **FORMS[form], **table}},
        "rotation": {"moves": moves or {}},
    }


class Moved:
    """A data set of two tenants, and a file of `acme` that was moved to `bolt`."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder, form
        self.data = folder / "events"
        self.keytools = Keytools.from_mapping(document(form))
        for tenant in TENANTS:
            (self.data / f"tenant={tenant}").mkdir(parents=True)
            self.keytools.write_table(DATA, self.data / f"tenant={tenant}" / f"{tenant}.parquet")
        self.file = self.data / "tenant=bolt" / "moved.parquet"
        origin = self.data / "tenant=acme"
        for path in list(origin.iterdir()):
            path.rename(self.file.with_name(path.name.replace("acme.parquet", "moved.parquet")))

    def command(self, *arguments: str, status: int, **changes: Any) -> str:
        config = self.folder / "c.yaml"
        config.write_text(yaml.safe_dump(document(self.form, **changes)))
        result = CliRunner().invoke(app, [*arguments, "--config", str(config)])
        assert result.exit_code == status, result.output
        return result.output


@pytest.fixture(params=FORMS)
def moved(request: pytest.FixtureRequest, tmp_path: Path) -> Moved:
    return Moved(tmp_path, request.param)


def with_duckdb(keytools: Keytools, path: Path) -> object:
    with duckdb.connect() as connection:
        connection.register_filesystem(keytools.view(path))
        return connection.execute("select * from read_parquet('keytools://**/*.parquet')").fetchall()


def with_pyarrow(keytools: Keytools, path: Path) -> object:
    view = keytools.view(path)
    return [pq.read_table(name, filesystem=view) for name in view.find("") if name.endswith("parquet")]


READERS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda keytools, path: keytools.read_table(path),
    "one column": lambda keytools, path: keytools.read_table(path, columns=["day"]),
    "dataset": lambda keytools, path: keytools.dataset(path).to_table(),
    "scan_polars": lambda keytools, path: keytools.scan_polars(path).collect(),
    "pyarrow over the view": with_pyarrow,
    "duckdb over the view": with_duckdb,
    "metadata": lambda keytools, path: keytools.metadata(path / "tenant=bolt" / "moved.parquet"),
    "open": lambda keytools, path: keytools.open(path / "tenant=bolt" / "moved.parquet").read(),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_it(moved: Moved, reader: str) -> None:
    read = READERS[reader]
    # DuckDB and Polars wrap what their file systems raise.
    kinds = (KeytoolsError, OSError, duckdb.Error) if reader[:4] in ("duck", "scan") else TableMismatchError
    with pytest.raises(kinds, match=r"prod/|tenant|moved"):
        read(moved.keytools, moved.data)
    moved.file.unlink()
    shutil.rmtree(moved.data / "tenant=acme")
    if reader not in ("metadata", "open"):
        assert read(moved.keytools, moved.data) is not None


def test_verify_finds_it(moved: Moved) -> None:
    report = moved.keytools.verify_folder(moved.data)
    assert report.verdict is Verdict.VIOLATED
    assert [Path(file.path).name for file in report.files if not file.conforms] == ["moved.parquet"]
    assert "wanted-keys" in moved.command("verify", str(moved.data), status=1)


@pytest.mark.parametrize("command", ["rotate", "rekey --in-place", "rekey", "decrypt"])
def test_no_command_changes_it(moved: Moved, command: str) -> None:
    before = {path: path.read_bytes() for path in moved.data.rglob("*") if path.is_file()}
    name, *options = command.split()
    target = [] if name == "rotate" or options else [str(moved.folder / "out")]
    moves = {"prod/acme": "new", "footer": "new-footer"} if name == "rotate" else None
    text = moved.command(name, str(moved.data), *target, *options, status=1, moves=moves)
    assert "moved.parquet" in text and "table 'events'" in text
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert not [path for path in changed if "moved.parquet" in path.name]
    assert not list(moved.folder.glob("out/**/moved.parquet"))


def test_a_rotation_of_its_own_key_opens_it_to_nobody(moved: Moved) -> None:
    """It stays under the same master key; a file that is left out would lose its key with the old version."""
    moved.command("rotate", str(moved.data), "--new-keks", status=0)
    with pytest.raises(TableMismatchError):
        moved.keytools.read_table(moved.file)


# --- values that would name another key ---

LITERALS = ("footer", "Straße", "prod/all")
ANY = ".+"


def of_any(template: str, **table: Any) -> Keytools:
    mapping = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": {**KEYS, "Straße": KEYS["new"], "prod/all": KEYS["new"]}},
        "master_keys": {"all": "prod/all"},
        "tables": {
            "events": {
                "footer_key": "footer",
                "column_keys": {template: ["email"], "all": ["day"]},
                "also_trusted": ["Straße"],
                "key_values": {"tenant": {"from": "argument", "pattern": ANY}},
                **table,
            }
        },
    }
    return Keytools.from_mapping(mapping)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{tenant}", "footer"),
        ("{tenant}", "FOOTER"),
        ("{tenant}", "ｆooter"),
        ("{tenant}", "STRASSE"),
        ("{tenant}", "prod/all"),
        ("{tenant}", "all"),
        ("prod/{tenant}", "all"),
        ("prod/{tenant}", "ALL"),
        ("prod/{tenant}", "../footer"),
        ("prod/{tenant}", ".."),
        ("prod/{tenant}", "."),
        ("prod/{tenant}", "x/../all"),
        ("prod/{tenant}", "x\\..\\all"),
        ("prod/{tenant}", ""),
        ("prod/{tenant}", "%61ll"),
        ("prod/{tenant}", "a\x00"),
        ("prod/{tenant}", "{tenant}"),
    ],
)
def test_values_that_would_name_another_key(tmp_path: Path, template: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"another key|refuses"):
        of_any(template).write_table(DATA, tmp_path / "x.parquet", key_values={"tenant": value})
    assert not list(tmp_path.iterdir())
    # Nor from a path.
    partitioned = of_any(template, key_values={"tenant": {"from": "partition", "pattern": ANY}})
    folder = tmp_path / f"tenant={quote(value, safe='')}"
    folder.mkdir()
    with pytest.raises(ConfigurationError):
        partitioned.write_table(DATA, folder / "x.parquet")
    # Nor from a column.
    of_column = of_any(
        template,
        key_values={"tenant": {"from": "column", "pattern": ANY}},
        column_keys={template: ["email"], "all": ["day"]},
        plaintext_columns=["tenant"],
    )
    data = DATA.append_column("tenant", pa.array([value] * 2))
    with pytest.raises(ConfigurationError):
        of_column.write_table(data, tmp_path / "x.parquet")
    assert list(tmp_path.rglob("*")) == [folder]


@pytest.mark.parametrize("value", ["acm\xe9", "acme\u0301", "\uff41cme", "ACME", "acme ", ""])
def test_folders_that_look_like_the_one_of_a_tenant(tmp_path: Path, value: str) -> None:
    folder = f"tenant={value}"
    keytools = Keytools.from_mapping(document("columns"))
    (tmp_path / folder).mkdir()
    with pytest.raises(ConfigurationError):
        keytools.write_table(DATA, tmp_path / folder / "x.parquet")
    (tmp_path / "tenant=acme").mkdir()
    keytools.write_table(DATA, tmp_path / "tenant=acme" / "x.parquet")
    (tmp_path / "tenant=acme" / "x.parquet").rename(tmp_path / folder / "x.parquet")
    with pytest.raises(TableMismatchError):
        keytools.read_table(tmp_path / folder / "x.parquet")
