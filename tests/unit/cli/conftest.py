import base64
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from parquet_keytools.cli import app
from parquet_keytools.kms.in_memory import InMemoryKms

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
"""

Run = Callable[..., Result]

PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs the command line in this process; nothing that it prints may hold a master key."""
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
def on_a_terminal() -> Callable[..., tuple[str, bytes]]:
    """Runs the command line in a process whose stderr is a terminal; returns what is shown there, and stdout."""

    def invoke(*arguments: object) -> tuple[str, bytes]:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        command = [*PROGRAM, *map(str, arguments)]
        process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=environment)
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux says so where the other end of a terminal is closed.
                break
            if not part:
                break
            shown += part
        os.close(ours)
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 0, shown
        return shown.decode(), stdout

    return invoke


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGURATION)
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
