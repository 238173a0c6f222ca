"""Output and exit status of commands whose KMS is slow, or does not accept their credentials."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from gcp_fake import KEY_RING, FakeGcpKms
from typer.testing import CliRunner

from parquet_keytools import Keytools, cli
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.secret_bytes import SecretBytes

TABLE = pa.table({"a": [1, 2, 3]})
KEY = "k"


def config_of(tmp_path: Path, kms: dict[str, Any]) -> Path:
    tables = {"t": {"footer_key": KEY, "unlisted_columns": "footer_key"}}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"version": 1, "kms": kms, "tables": tables}))
    path.chmod(0o600)
    return path


class Wrapping(InMemoryKms):
    """Makes wrapped keys in the form of a transit engine, or of AWS."""

    prefix = ""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return self.prefix + super()._wrap(key, master_key_id)


def folder_of(tmp_path: Path, kind: str) -> Path:
    """Return three files whose keys were wrapped by a KMS of this kind."""
    kms = Wrapping({KEY: bytes(16)})
    kms.prefix = "vault:v1:" if kind == "vault" else ""
    tools = Keytools.from_yaml(config_of(tmp_path, {"type": "in_memory", "keys": [KEY]}), kms=kms)
    (tmp_path / "data").mkdir()
    for name in "abc":
        tools.write_table(TABLE, tmp_path / "data" / f"{name}.parquet")
    return tmp_path / "data"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


COMMANDS = {
    "check": ["check", "CONFIG"],
    "decrypt": ["decrypt", "DATA", "NEW", "--config", "CONFIG"],
    "rekey": ["rekey", "DATA", "NEW", "--config", "CONFIG"],
    "rotate": ["rotate", "DATA", "--config", "CONFIG"],
    "decrypt one": ["decrypt", "FILE", "NEW", "--config", "CONFIG"],
    "inspect": ["inspect", "FILE", "--config", "CONFIG"],
    "verify": ["verify", "DATA", "--config", "CONFIG"],
    "verify processes": ["verify", "DATA", "--config", "CONFIG", "--processes", "2"],
    "report": ["report", "DATA", "--config", "CONFIG", "--json"],
    "keys": ["keys", "DATA", "--config", "CONFIG"],
}


def called(command: str, folder: Path, config: Path) -> Any:
    places = {"CONFIG": config, "DATA": folder, "FILE": folder / "a.parquet", "NEW": folder.parent / "new"}
    return run(*(places.get(word, word) for word in COMMANDS[command]))


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as a KMS does to expired credentials."""

    status: ClassVar[int]
    body: ClassVar[dict[str, Any]]

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = json.dumps(self.body).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture(params=["aws", "gcp", "vault"])
def expired(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "gcp":
        fake = FakeGcpKms()
        # Cloud KMS answers like this to an expired access token.
        fake.fail("UNAUTHENTICATED", message="Request had invalid authentication credentials.")
        place = dict(zip(("project", "location", "key_ring"), KEY_RING.split("/")[1::2], strict=True))
        yield {"type": "gcp", "endpoint": fake.endpoint, "insecure": True, **place}
        fake.stop()
        return
    answers = {
        "aws": (400, {"__type": "ExpiredTokenException", "message": "The security token included is expired"}),
        "vault": (403, {"errors": ["permission denied"]}),
    }
    status, body = answers[request.param]
    handler = type("Handler", (Refusing,), {"status": status, "body": body})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield {
        "aws": {
            "type": "aws",
            "region": "eu-central-1",
            "endpoint_url": url,
            "access_key_id": "x",
            "secret_access_key": "y",
        },
        "vault": {"type": "vault", "url": url, "token": "t"},
    }[request.param]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", ["check", "decrypt", "rekey", "rotate", "decrypt one"])
def test_expired_credentials_end_commands_alike(tmp_path: Path, expired: dict[str, Any], command: str) -> None:
    folder = folder_of(tmp_path, expired["type"])
    done = called(command, folder, config_of(tmp_path, expired))
    assert done.exit_code == 2, done.output
    assert "expired" in done.output
    if command in ("decrypt", "rekey"):
        # Not once for each file.
        assert len(re.findall("Error:|Failed:", done.stderr)) == 1
        assert "Stopped at the first of 3 files" in done.stderr


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that accepts connections and never answers: its URL, and the connections."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("command", ["rotate", "keys", "verify", "decrypt", "verify processes", "report"])
def test_a_command_waits_once_for_a_silent_kms(
    tmp_path: Path, silent: tuple[str, list[socket.socket]], command: str
) -> None:
    url, connections = silent
    folder = folder_of(tmp_path, "vault")
    # One attempt of half a second is one connection.
    limits = {"max_tries": 1, "call_timeout_seconds": 0.5}
    config = config_of(tmp_path, {"type": "vault", "url": url, "token": "t", **limits})
    done = called(command, folder, config)
    assert done.exit_code == 3, done.output
    assert "did not answer in time" in done.output
    assert len(connections) == 1
