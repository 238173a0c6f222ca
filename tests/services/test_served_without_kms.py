"""A real KMS that goes down under `serve`, and comes back."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openbao import OpenBao
from unit.cli.conftest import PROGRAM

from parquet_keytools import Keytools

TABLE = pa.table({"a": range(100_000)})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OpenBao]:
    (tmp_path / "openbao").mkdir()
    server = OpenBao(tmp_path / "openbao")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def got(url: str, **headers: str) -> tuple[int, Message, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_a_kms_that_goes_away_and_comes_back(tmp_path: Path, server: OpenBao) -> None:
    server.create_key("footer")
    kms = {"type": "vault", "url": server.url, "token": server.root_token, "timeout_seconds": 2}
    tables = {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}}
    config = tmp_path / "config.yaml"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"version": 1, "kms": kms, "tables": tables}))
    (tmp_path / "data").mkdir()
    # Each with its own KEK.
    for name in ("open", "other"):
        with Keytools.from_yaml(config) as keytools:
            keytools.write_table(TABLE, tmp_path / "data" / f"{name}.parquet")
    command = [*PROGRAM, "serve", str(tmp_path / "data"), "--config", str(config), "--json"]
    log = tmp_path / "log"
    with log.open("wb") as errors, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors))
        stack.callback(process.kill)
        assert process.stdout is not None
        lines = []
        for line in iter(process.stdout.readline, b""):
            lines.append(line)
            if line == b"}\n":
                break
        url = json.loads(b"".join(lines))["url"]
        whole = got(f"{url}open.parquet")[2]
        assert pq.read_table(pa.BufferReader(whole)).equals(TABLE)
        server.kill()
        assert got(f"{url}open.parquet", Range="bytes=500-999")[::2] == (206, whole[500:1000])
        begun = time.monotonic()
        status, headers, body = got(f"{url}other.parquet")
        # Of the 60 seconds that a client may wait, the KMS gets 2.
        assert time.monotonic() - begun < 30
        assert (status, headers["Retry-After"]) == (503, "5")
        assert b"the connection was refused" in body and server.root_token.encode() not in body
        assert got(f"{url}open.parquet")[::2] == (200, whole)
        server.start()
        end = time.monotonic() + 30
        while (found := got(f"{url}other.parquet"))[0] == 503 and time.monotonic() < end:
            time.sleep(0.2)
        assert found[0] == 200
        assert pq.read_table(pa.BufferReader(found[2])).equals(TABLE)
        process.terminate()
        assert process.wait(30) == 0
    text = log.read_text()
    assert "status=503" in text and "the connection was refused" in text
    assert server.root_token not in text and "Traceback" not in text
