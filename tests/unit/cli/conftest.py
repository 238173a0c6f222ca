import base64
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rotation_case import new_keystore
from soak import SOAK
from typer.testing import CliRunner, Result
from warm_python import WarmPython

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file

MASTER_KEYS = {name: (name[:1] * 16).encode() for name in ("footer", "pii", "times")}
LISTED = ", ".join(f"{name}: {base64.b64encode(key).decode()}" for name, key in MASTER_KEYS.items())
CONFIGURATION = f"""\
version: 1
kms:
  type: in_memory
  keys: {{{LISTED}}}
tables:
  people:
    footer_key: footer
    column_keys: {{pii: [name]}}
    unlisted_columns: plaintext
"""

Run = Callable[..., Result]

PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]


@pytest.fixture
def program(warm_python: WarmPython) -> list[str]:
    """The command line in a process of its own; in a soak, that process starts as users' do."""
    return PROGRAM if SOAK else [str(warm_python.python), *PROGRAM[1:]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs the command line in this process; its output must not contain a master key."""
    outputs: list[str] = []

    def invoke(*arguments: object) -> Result:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        outputs.append(done.output)
        return done

    yield invoke
    for output in outputs:
        for key in MASTER_KEYS.values():
            assert not any(text in output for text in (key.decode(), key.hex(), base64.b64encode(key).decode()))


@pytest.fixture
def on_a_terminal(program: list[str]) -> Callable[..., tuple[str, bytes]]:
    """Runs the command line in a process whose stderr is a terminal; returns its output there, and stdout.

    With `stdout_too`, both are the terminal.
    """

    def invoke(*arguments: object, stdout_too: bool = False) -> tuple[str, bytes]:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        command = [*program, *map(str, arguments)]
        stdout = theirs if stdout_too else subprocess.PIPE
        process = subprocess.Popen(command, stderr=theirs, stdout=stdout, env=environment)
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux raises it once the other end of a terminal is closed.
                break
            if not part:
                break
            shown += part
        os.close(ours)
        answer, _ = process.communicate(timeout=60)
        assert process.returncode == 0, shown
        return shown.decode(), answer

    return invoke


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGURATION)
    path.chmod(0o600)  # It contains keys.
    return path


@pytest.fixture
def table() -> pa.Table:
    return pa.table({"id": range(100), "name": [f"name {number}" for number in range(100)]})


@pytest.fixture
def plain(tmp_path: Path, table: pa.Table) -> Path:
    path = tmp_path / "plain.parquet"
    pq.write_table(table, path)
    return path


@pytest.fixture
def folder(tmp_path: Path, table: pa.Table) -> Path:
    """A folder with two partitions and three files."""
    root = tmp_path / "folder"
    for name in ("year=1/a.parquet", "year=1/b.parquet", "year=2/c.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / name)
    return root


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the in_memory KMS of later runs refuse some master keys."""
    original = InMemoryKms.from_settings.__func__  # type: ignore[attr-defined]

    def deny_master_keys(*master_key_ids: str) -> None:
        def from_settings(cls, settings, folder):
            kms = original(cls, settings, folder)
            for master_key_id in master_key_ids:
                kms.deny(master_key_id)
            return kms

        monkeypatch.setattr(InMemoryKms, "from_settings", classmethod(from_settings))

    return deny_master_keys


@dataclass
class KeystoreCase:
    """A keystore with versions of master keys, a configuration, and an encrypted data set.

    Attributes:
        config: The configuration.
        keystore: The keystore, as its operator opens it.
        data: The data set's folder.
        files: Its two files.
        table: The contents of each file.
    """

    config: Path
    keystore: Keystore
    data: Path
    files: tuple[Path, ...]
    table: pa.Table

    def digest(self) -> dict[str, bytes]:
        """The contents of the folder."""
        return {str(path): path.read_bytes() for path in sorted(self.data.rglob("*")) if path.is_file()}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.data.rglob("*") if path.is_file())

    def read(self) -> None:
        """Read all files with fresh caches, and compare."""
        with Keytools.from_yaml(self.config) as keytools:
            for path in self.files:
                assert keytools.read_table(path).equals(self.table)


@pytest.fixture
def keystore_case(tmp_path: Path, table: pa.Table) -> Callable[..., KeystoreCase]:
    """Creates a data set whose footer is under `footer` and whose column `name` is under `pii`."""

    def make(more: str = "", **settings: object) -> KeystoreCase:
        passphrase = tmp_path / "passphrase"
        passphrase.touch(mode=0o600)
        passphrase.write_text("canary horse battery")
        path = tmp_path / "keystore.json"
        path.touch(mode=0o600, exist_ok=False)
        # With the passphrase of these tests.
        path.write_bytes(new_keystore(("footer", "pii", "times")))
        keystore = Keystore(path, lambda: passphrase_from_file(passphrase))
        config = tmp_path / "keystore.yaml"
        people = {
            "footer_key": "footer",
            "column_keys": {"pii": ["name"]},
            "unlisted_columns": "plaintext",
            **settings,
        }
        config.write_text(
            "version: 1\nkms: {type: keystore, path: keystore.json, passphrase_file: passphrase}\n"
            f"tables:\n  people: {json.dumps(people)}\n{more}"
        )
        data = tmp_path / "data"
        files = data / "year=1" / "a.parquet", data / "year=2" / "b.parquet"
        with Keytools.from_yaml(config) as keytools:
            for path in files:
                path.parent.mkdir(parents=True)
                keytools.write_table(table, path, table_name="people", row_group_size=40)
        return KeystoreCase(config, keystore, data, files, table)

    return make
