"""`check --as`: the policies of the documentation, on a real OpenBao."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from openbao import OpenBao
from typer.testing import CliRunner, Result

from parquet_keytools import cli
from parquet_keytools.kms.in_memory import InMemoryKms

PAGE = Path(__file__).parents[2] / "docs" / "kms-vault.md"
NAMES = ("flights-footer", "flights-pii", "flights-times")
RULE = re.compile(r'path "([^"]+)"\s+\{ capabilities = \["(\w+)"\] \}')


def documented_policies() -> dict[str, dict[str, list[str]]]:
    """Return the rules of the page's policies, by the role that each is for."""
    blocks = re.findall(r"```hcl\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return {
        role: {path: [capability] for path, capability in RULE.findall(block)}
        for role, block in zip(("writer", "reader", "rotator"), blocks, strict=True)
    }


def check(openbao: OpenBao, tmp_path: Path, role: str, policy: str, names: set[str]) -> Result:
    kms = {
        "type": "vault",
        "url": openbao.url,
        "token": openbao.create_token(openbao.write_policy(POLICIES[policy])),
    }
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps({"version": 1, "kms": kms, "master_keys": {name: name for name in sorted(names)}})
    )
    config.chmod(0o600)
    return CliRunner().invoke(cli.app, ["check", str(config), "--as", role, "--json"])


POLICIES = documented_policies()


@pytest.fixture
def transit_keys(openbao: OpenBao) -> None:
    for name in NAMES:
        if not openbao.has_key(name):
            openbao.create_key(name)


@pytest.mark.parametrize("role", ["writer", "reader", "rotator"])
def test_a_documented_policy_passes_its_own_check_and_no_other(
    openbao: OpenBao, transit_keys: None, tmp_path: Path, role: str
) -> None:
    names = {path.rpartition("/")[2] for path in POLICIES[role]}
    done = check(openbao, tmp_path, role, role, names)
    assert done.exit_code == 0, done.output
    assert {key["outcome"] for key in json.loads(done.stdout)["master_keys"]} == {"ok"}
    for other in {"writer", "reader", "rotator"} - {role}:
        done = check(openbao, tmp_path, other, role, names)
        assert done.exit_code == 3, done.output
        missing = {"writer": "wrap", "reader": "unwrap", "rotator": "rewrap"}[other]
        keys = json.loads(done.stdout)["master_keys"]
        assert {key["missing_permission"] for key in keys} == {missing}
        assert f"Missing permission: {missing} with {', '.join(sorted(names))}." in done.stderr


def test_a_reader_without_one_key_is_told_which(openbao: OpenBao, transit_keys: None, tmp_path: Path) -> None:
    done = check(openbao, tmp_path, "reader", "reader", set(NAMES))
    assert done.exit_code == 3
    assert "Missing permission: unwrap with flights-pii." in done.stderr


def test_a_writer_is_not_asked_to_unwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the KMS was asked to unwrap")

    monkeypatch.setattr(InMemoryKms, "_unwrap_many", refused)
    config = tmp_path / "config.yaml"
    config.write_text('{"version": 1, "kms": {"type": "in_memory", "keys": ["k"]}, "master_keys": {"k": "k"}}')
    assert CliRunner().invoke(cli.app, ["check", str(config), "--as", "writer"]).exit_code == 0
