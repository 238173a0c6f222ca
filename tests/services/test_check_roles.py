"""`check --as`: the policies of the documentation, on a real OpenBao and on fakes of AWS and Google Cloud."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aws_fake import ACCOUNT, REGION, FakeKms, serve
from gcp_fake import KEY_RING, fake_gcp_kms
from openbao import OpenBao
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools, cli
from parquet_keytools.kms.in_memory import InMemoryKms

PAGE = Path(__file__).parents[2] / "docs" / "kms-vault.md"
NAMES = ("flights-footer", "flights-pii", "flights-times")
RULE = re.compile(r'path "([^"]+)"\s+\{ capabilities = \["(\w+)"\] \}')


def documented_policies() -> dict[str, dict[str, list[str]]]:
    """Return the rules of the page's policies, by role."""
    blocks = re.findall(r"```hcl\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return {
        role: {path: [capability] for path, capability in RULE.findall(block)}
        # `check` has no eraser role; test_erasure.py uses the eraser's policy.
        for role, block in zip(("writer", "reader", "rotator"), blocks[:3], strict=True)
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
VERBS = {"writer": "encrypt", "reader": "decrypt", "rotator": "rewrap"}


@pytest.fixture
def transit_keys(openbao: OpenBao) -> None:
    for name in NAMES:
        if not openbao.has_key(name):
            openbao.create_key(name)


@pytest.mark.parametrize("role", ["writer", "reader", "rotator"])
def test_a_documented_policy_passes_its_own_check_and_no_other(
    openbao: OpenBao, transit_keys: None, tmp_path: Path, role: str
) -> None:
    names = {path.rpartition("/")[2] for path in POLICIES[role] if path.startswith(f"transit/{VERBS[role]}/")}
    done = check(openbao, tmp_path, role, role, names)
    assert done.exit_code == 0, done.output
    assert {key["outcome"] for key in json.loads(done.stdout)["master_keys"]} == {"ok"}
    for other in {"writer", "reader", "rotator"} - {role}:
        done = check(openbao, tmp_path, other, role, names)
        if all(f"transit/{VERBS[other]}/{name}" in POLICIES[role] for name in names):
            # A rotator proves each new key: it may unwrap.
            assert (role, other, done.exit_code) == ("rotator", "reader", 0)
            continue
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


def test_every_rule_of_a_documented_policy_is_needed(
    openbao: OpenBao, transit_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("writer", "reader", "rotator"):
        verb = f"transit/{VERBS[role]}/"
        names = {path.removeprefix(verb) for path in POLICIES[role] if path.startswith(verb)}
        for path in POLICIES[role]:
            if not path.startswith(verb):
                continue  # The page says which alternatives there are; the next test of a rotator needs it.
            rest = {other: rule for other, rule in POLICIES[role].items() if other != path}
            monkeypatch.setitem(POLICIES, "rest", rest)
            assert check(openbao, tmp_path, role, "rest", names).exit_code == 3, path


# --- AWS KMS ---

AWS_PAGE = PAGE.with_name("kms-aws.md")


def documented_statements() -> dict[str, list[dict[str, Any]]]:
    """Return the statements of the page's policies, by role."""
    blocks = re.findall(r"^```json\n(.*?)^```", AWS_PAGE.read_text(), re.M | re.S)
    return {
        role: json.loads(block)["Statement"]
        for role, block in zip(("writer", "reader", "rotator"), blocks, strict=True)
    }


STATEMENTS = documented_statements()


def check_aws(tmp_path: Path, role: str, policy: list[dict[str, Any]], resources: list[str], **kms: Any) -> Result:
    """Run `check --as` where a policy limits the caller. A rotator moves the first key to the second."""
    fake = FakeKms()
    for arn in resources:
        assert arn.startswith(f"arn:aws:kms:{REGION}:{ACCOUNT}:key/")
        fake.add_key(key_id=arn.rpartition("/")[2])
    fake.policy = policy
    names = {f"k{number}": arn for number, arn in enumerate(resources)}
    config = tmp_path / "config.yaml"
    with serve(fake) as url:
        connection = {"endpoint_url": url, "access_key_id": "AKIAEXAMPLE", "secret_access_key": "secret"}
        kms = {"type": "aws", "region": REGION, "encryption_context": {"application": "flights"}} | kms
        document: dict[str, Any] = {"version": 1, "kms": kms | connection, "master_keys": names}
        if role == "rotator":
            document["rotation"] = {"moves": {"k0": "k1"}}
        config.write_text(json.dumps(document))
        config.chmod(0o600)
        done = CliRunner().invoke(cli.app, ["check", str(config), "--as", role, "--json"])
    if role != "writer":
        assert "CiphertextBlob" not in str(fake.log) and "Plaintext" not in str(fake.log)
    return done


def keys_of(policy: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(arn for statement in policy for arn in statement["Resource"]))


@pytest.mark.parametrize("role", ["writer", "reader", "rotator"])
def test_a_documented_policy_of_aws_passes_its_own_check_and_needs_each_action(tmp_path: Path, role: str) -> None:
    policy = STATEMENTS[role]
    keys = keys_of(policy)
    done = check_aws(tmp_path, role, policy, keys)
    assert done.exit_code == 0, done.output
    assert [key["outcome"] for key in json.loads(done.stdout)["master_keys"]] == ["ok"] * len(keys)
    removed = 0
    for statement in policy:
        if statement["Action"] == ["kms:DescribeKey"]:
            continue  # For `describe` and aliases only.
        for arn in statement["Resource"]:
            rest = [other for other in policy if other is not statement]
            rest.append({**statement, "Resource": [other for other in statement["Resource"] if other != arn]})
            done = check_aws(tmp_path, role, rest, keys)
            assert done.exit_code == 3, (statement["Action"], done.output)
            missing = {"writer": "wrap", "reader": "unwrap", "rotator": "rewrap"}[role]
            found = {key["master_key_id"]: key for key in json.loads(done.stdout)["master_keys"]}
            assert found[arn]["missing_permission"] == missing
            assert f"Missing permission: {missing} with k{keys.index(arn)}." in done.stderr
            removed += 1
    assert removed == {"writer": 3, "reader": 2, "rotator": 2}[role]


def test_the_encryption_context_that_a_policy_requires_is_part_of_the_check(tmp_path: Path) -> None:
    for role, policy in STATEMENTS.items():
        done = check_aws(tmp_path, role, policy, keys_of(policy), encryption_context={"application": "other"})
        assert done.exit_code == 3, done.output


def test_a_rotator_without_moves_needs_both_permissions_on_each_key(tmp_path: Path) -> None:
    (key, _) = keys_of(STATEMENTS["rotator"])
    action = {"Action": ["kms:ReEncryptFrom", "kms:ReEncryptTo"], "Resource": [key]}
    fake = FakeKms()
    fake.add_key(key_id=key.rpartition("/")[2])
    config = tmp_path / "config.yaml"
    with serve(fake) as url:
        connection = {"endpoint_url": url, "access_key_id": "AKIAEXAMPLE", "secret_access_key": "secret"}
        kms = {"type": "aws", "region": REGION} | connection
        config.write_text(json.dumps({"version": 1, "kms": kms, "master_keys": {"k": key}}))
        config.chmod(0o600)
        for allowed, status in ((action["Action"], 0), (["kms:ReEncryptFrom"], 3), (["kms:ReEncryptTo"], 3)):
            fake.policy = [{**action, "Action": allowed}]
            assert CliRunner().invoke(cli.app, ["check", str(config), "--as", "rotator"]).exit_code == status


# --- Google Cloud KMS ---

METHODS = {
    "useToEncrypt": "Encrypt",
    "useToDecrypt": "Decrypt",
    "get": "GetCryptoKey",
    "list": "ListCryptoKeyVersions",
}


def documented_methods() -> dict[str, set[str]]:
    """Return the methods that the page's permissions allow, by role."""
    rows = re.findall(r"^\| `check --as (\w+)` \|[^|]*\|([^|]*)\|", PAGE.with_name("kms-gcp.md").read_text(), re.M)
    return {role: {METHODS[name] for name in re.findall(r"\.(\w+)`", allowed)} for role, allowed in rows}


def check_gcp(tmp_path: Path, role: str, allowed: set[str]) -> Result:
    names = ("footer", "pii")
    with fake_gcp_kms(*names) as server:
        for name in names:
            server.deny(name, *(set(METHODS.values()) - allowed))
        _, project, _, location, _, key_ring = KEY_RING.split("/")
        kms = {"project": project, "location": location, "key_ring": key_ring, "endpoint": server.endpoint}
        config = tmp_path / "config.yaml"
        config.write_text(
            json.dumps(
                {
                    "version": 1,
                    "kms": {"type": "gcp", "insecure": True} | kms,
                    "master_keys": {name: name for name in names},
                }
            )
        )
        return CliRunner().invoke(cli.app, ["check", str(config), "--as", role, "--json"])


@pytest.mark.parametrize("role", ["writer", "reader", "rotator"])
def test_documented_permissions_of_google_cloud_pass_their_own_check_and_each_is_needed(
    tmp_path: Path, role: str
) -> None:
    allowed = documented_methods()[role]
    done = check_gcp(tmp_path, role, allowed)
    assert done.exit_code == 0, done.output
    assert [key["outcome"] for key in json.loads(done.stdout)["master_keys"]] == ["ok", "ok"]
    missing = {"Encrypt": "wrap", "Decrypt": "unwrap"}
    for method in allowed:
        done = check_gcp(tmp_path, role, allowed - {method})
        assert done.exit_code == 3, (method, done.output)
        keys = json.loads(done.stdout)["master_keys"]
        assert {key["missing_permission"] for key in keys} == {missing[method]}
        assert f"Missing permission: {missing[method]} with footer, pii." in done.stderr


def test_the_documented_rotator_rotates_a_file(openbao: OpenBao, transit_keys: None, tmp_path: Path) -> None:
    def config(token: str) -> Path:
        kms = {"type": "vault", "url": openbao.url, "token": token}
        table = {
            "footer_key": "flights-footer",
            "column_keys": {"flights-pii": ["a"]},
            "unlisted_columns": "error",
        }
        path = tmp_path / "rotator.yaml"
        path.write_text(json.dumps({"version": 1, "kms": kms, "tables": {"t": table}}))
        path.chmod(0o600)
        return path

    file = tmp_path / "a.parquet"
    with Keytools.from_yaml(config(openbao.root_token)) as keytools:
        keytools.write_table(pa.table({"a": [1]}), file)
    openbao.rotate_key("flights-pii")
    token = openbao.create_token(openbao.write_policy(POLICIES["rotator"]))
    command = ["rotate", str(file), "--config", str(config(token)), "--only-master-key", "flights-pii", "--json"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kms_calls"]["rewrap"] == 1
