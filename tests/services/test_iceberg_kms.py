"""Encrypted tables of Iceberg under keys of OpenBao and of AWS, with the configurations of docs/iceberg.md."""

from __future__ import annotations

import re
from pathlib import Path

import boto3
import pytest
from iceberg_case import Lake, rows
from moto.server import ThreadedMotoServer
from openbao import OpenBao

PAGE = (Path(__file__).parents[2] / "docs" / "iceberg.md").read_text(encoding="utf-8")


def configuration(name: str) -> str:
    """Return the block of the page that is a file of this name."""
    (text,) = re.findall(rf"^```yaml\n# {name}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(text)


def check(lake: Lake) -> list[str]:
    """Make, write, rotate and read a table; return its KEKs before and after."""
    table = lake.create()
    table.append(rows(0, 5))
    table.delete("id = 1")
    keks = [lake.metadata()["encryption-keys"][0]["encrypted-key-metadata"]]
    assert len(lake.load().rotate()) == 1
    keks.append(lake.metadata()["encryption-keys"][0]["encrypted-key-metadata"])
    lake.load().append(rows(5, 6))
    assert lake.ids() == [0, 2, 3, 4, 5]
    lake.assert_no_plaintext()
    return keks


def test_openbao(tmp_path: Path, openbao: OpenBao, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_TOKEN", openbao.root_token)
    lake = Lake(tmp_path)
    key = openbao.create_key()
    text = configuration("vault.yaml").replace("http://127.0.0.1:8200", openbao.url)
    (tmp_path / "keytools.yaml").write_text(text.replace("people-pii", key))
    before, after = check(lake)
    assert before != after


def test_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        arn = boto3.client("kms", endpoint_url=url).create_key()["KeyMetadata"]["Arn"]
        text = configuration("aws.yaml").replace("region: eu-west-1", f'region: eu-west-1, endpoint_url: "{url}"')
        lake = Lake(tmp_path)
        (tmp_path / "keytools.yaml").write_text(re.sub(r'"arn:.*?"', f'"{arn}"', text))
        before, after = check(lake)
        assert before != after
        assert lake.metadata()["properties"]["encryption.key-id"] == arn
    finally:
        server.stop()
