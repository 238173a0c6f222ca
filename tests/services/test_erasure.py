"""Erasure of a tenant in OpenBao, and in AWS KMS and a versioned bucket of moto."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
from moto_server import moto_server
from openbao import OpenBao
from pyarrow import fs as pafs
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import KeytoolsError

DATA = pa.table({"tenant": ["acme", "bolt"], "email": ["a@x", "b@x"]})
TABLE = {
    "footer_key": "footer",
    "column_keys": {"tenant-{tenant}": ["email"]},
    "key_values": {"tenant": {"from": "partition", "pattern": "[a-z]{1,9}"}},
    "plaintext_columns": ["tenant"],
}
REGION = "us-east-1"


def emails(tools: Keytools, path: str, tenant: str, **options: Any) -> list[str]:
    tools.clear_caches()
    found: list[str] = tools.read_table(f"{path}/tenant={tenant}", **options)["email"].to_pylist()
    return found


def erase(config: Path, path: str, *more: str) -> Any:
    arguments = ["erase", path, "--config", str(config), "--where", "tenant=acme", "--json", *more]
    return CliRunner().invoke(app, arguments)


def write_config(folder: Path, document: dict[str, Any]) -> Path:
    config = folder / "keytools.yaml"
    config.write_text(json.dumps(document))
    config.chmod(0o600)
    return config


# --- OpenBao ---


def documented_policy(mount: str) -> dict[str, list[str]]:
    """Return the eraser's rules on the page about Vault, for another mount."""
    page = (Path(__file__).parents[2] / "docs" / "kms-vault.md").read_text()
    block = re.findall(r"```hcl\n(.*?)```", page, flags=re.DOTALL)[3]
    rules = re.findall(r'path "transit/([^"]+)"\s+\{ capabilities = (\[.*?\]) \}', block)
    assert len(rules) == 4
    return {f"{mount}/{path}": json.loads(allowed) for path, allowed in rules}


@pytest.mark.parametrize("named", [False, True])
def test_a_tenant_in_openbao(openbao: OpenBao, tmp_path: Path, named: bool) -> None:
    mount = openbao.new_name("transit")
    openbao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
    for name in ("footer", "prod-acme", "prod-bolt"):
        openbao.create_key(name, mount)
    eraser = openbao.create_token(openbao.write_policy(documented_policy(mount)), display_name="officer")

    def document(token: str) -> dict[str, Any]:
        kms: dict[str, Any] = {"type": "vault", "url": openbao.url, "token": token, "mount_point": mount}
        keys: dict[str, Any] = {"tenant-{tenant}": "prod-{tenant}"}
        if named:
            kms = {"eu": kms, "us": kms | {"url": "http://127.0.0.1:9"}}
            keys = {
                "tenant-{tenant}": {"kms": "eu", "id": "prod-{tenant}"},
                "footer": {"kms": "eu", "id": "footer"},
            }
        return {"version": 1, "kms": kms, "master_keys": keys, "tables": {"events": TABLE}}

    with Keytools.from_mapping(document(openbao.root_token)) as tools:
        tools.write_dataset(DATA, tmp_path / "events", partitioning=["tenant"])
        done = erase(write_config(tmp_path, document(eraser)), str(tmp_path / "events"), "--yes", "acme")
        assert done.exit_code == 0, done.output
        certificate = json.loads(done.stdout)
        assert "officer" in certificate["run_by"]["name"]
        assert certificate["run_by"]["source"] == "auth/token/lookup-self"
        (key,) = certificate["keys"]
        assert key["state"] == "deleted" and key["kms"] == "vault" and key["versions"] == {"1": "deleted"}
        assert certificate["proof"]["outcomes"] == {"MasterKeyNotFoundError": 1}
        assert openbao.ask("GET", f"{mount}/keys/prod-acme", may_fail=True).status != 200
        assert emails(tools, str(tmp_path / "events"), "bolt") == ["b@x"]
        with pytest.raises(KeytoolsError):
            emails(tools, str(tmp_path / "events"), "acme")


def test_an_eraser_without_rights_changes_nothing(openbao: OpenBao, tmp_path: Path) -> None:
    mount = openbao.new_name("transit")
    openbao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
    for name in ("footer", "prod-acme", "prod-bolt"):
        openbao.create_key(name, mount)
    rules = {f"{mount}/decrypt/*": ["update"], f"{mount}/keys/*": ["read"]}
    kms = {"type": "vault", "url": openbao.url, "mount_point": mount}
    document = {"version": 1, "master_keys": {"tenant-{tenant}": "prod-{tenant}"}, "tables": {"events": TABLE}}
    with Keytools.from_mapping(document | {"kms": kms | {"token": openbao.root_token}}) as tools:
        tools.write_dataset(DATA, tmp_path / "events", partitioning=["tenant"])
        token = openbao.create_token(openbao.write_policy(rules))
        config = write_config(tmp_path, document | {"kms": kms | {"token": token}})
        certificate = tmp_path / "certificate.json"
        done = erase(config, str(tmp_path / "events"), "--yes", "acme", "--certificate", str(certificate))
        assert done.exit_code == 3 and "access denied" in done.stderr, done.output
        assert not list(tmp_path.glob("*certificate*"))
        assert emails(tools, str(tmp_path / "events"), "acme") == ["a@x"]


# --- AWS ---


class Cloud:
    """AWS KMS, and a bucket with versions."""

    def __init__(self, url: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        make: Any = boto3.client
        options = {"endpoint_url": url, "region_name": REGION}
        for name, value in {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL_STS": url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        self.kms, self.s3 = make("kms", **options), make("s3", **options)
        self.s3.create_bucket(Bucket=bucket)
        self.s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        self.arns = {}
        for name in ("footer", "acme", "bolt"):
            self.arns[name] = self.kms.create_key()["KeyMetadata"]["Arn"]
            self.kms.create_alias(AliasName=f"alias/{bucket}/{name}", TargetKeyId=self.arns[name])
        self.document = {
            "version": 1,
            "kms": {"type": "aws", "endpoint_url": url, "region": REGION},
            "master_keys": {
                "tenant-{tenant}": f"alias/{bucket}/{{tenant}}",
                "footer": self.arns["footer"],
            },
            "tables": {"events": TABLE},
        }
        self.filesystem = pafs.S3FileSystem(endpoint_override=url, region=REGION, scheme="http")
        address = url.removeprefix("http://")
        self.path, self.uri = f"{bucket}/events", f"s3://{bucket}/events?endpoint_override={address}&scheme=http"
        self.bucket = bucket

    def state(self, name: str) -> str:
        return str(self.kms.describe_key(KeyId=self.arns[name])["KeyMetadata"]["KeyState"])


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def cloud(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(moto, tmp_path.name.replace("_", "-"), monkeypatch)


def test_a_tenant_in_aws_with_older_versions_of_its_files(cloud: Cloud, tmp_path: Path) -> None:
    with Keytools.from_mapping(cloud.document) as tools:
        for _ in range(2):
            # Each write replaces the objects, and keeps the older ones as versions.
            tools.write_dataset(
                DATA,
                cloud.path,
                partitioning=["tenant"],
                filesystem=cloud.filesystem,
                existing_data_behavior="overwrite_or_ignore",
            )
        config, certificate = write_config(tmp_path, cloud.document), tmp_path / "certificate.json"
        arguments = ("--yes", "acme", "--certificate", str(certificate), "--waiting-days", "7")
        done = erase(config, cloud.uri, *arguments)
        assert done.exit_code == 0, done.output
        made = json.loads(certificate.read_text())
        (key,) = made["keys"]
        # The alias is resolved: another key may get it later.
        assert key["key"] == cloud.arns["acme"] and key["state"] == "scheduled"
        assert key["answer"]["KeyState"] == "PendingDeletion" and key["deletes_at"]
        assert made["run_by"]["source"] == "sts:GetCallerIdentity" and ":sts::" in made["run_by"]["name"]
        assert made["proof"]["obtained"] and made["proof"]["outcomes"] == {"MasterKeyDisabledError": 1}
        versions = cloud.s3.list_object_versions(Bucket=cloud.bucket, Prefix="events/tenant=acme/")["Versions"]
        assert {file["version_id"] for file in made["files"]} == {
            None if found["IsLatest"] else found["VersionId"] for found in versions if found["Size"]
        }
        # Two writes, each with a temporary object that was copied and deleted.
        assert len(made["files"]) == 4
        assert (cloud.state("acme"), cloud.state("bolt")) == ("PendingDeletion", "Enabled")
        assert emails(tools, cloud.path, "bolt", filesystem=cloud.filesystem) == ["b@x"]
        with pytest.raises(KeytoolsError):
            emails(tools, cloud.path, "acme", filesystem=cloud.filesystem)

        assert erase(config, cloud.uri, "--status").exit_code == 0
        again = erase(config, cloud.uri, "--yes", "acme")
        assert again.exit_code == 0 and json.loads(again.stdout)["files"] == made["files"]
        other = tools.erasure(cloud.path, {"tenant": "acme"}, filesystem=cloud.filesystem)
        plan = other.plan()
        back = erase(config, cloud.uri, "--cancel")
        assert back.exit_code == 0 and "enable it" in back.stderr, back.output
        cloud.kms.enable_key(KeyId=cloud.arns["acme"].rpartition("/")[2])
        assert emails(tools, cloud.path, "acme", filesystem=cloud.filesystem) == ["a@x"]
        # A run whose plan is older than the cancellation checks again.
        late = other.run(plan, waiting_days=7)
        assert late.proof.obtained and late.requested_at and cloud.state("acme") == "PendingDeletion"


def test_an_older_version_of_another_tenant_is_under_the_key(cloud: Cloud, tmp_path: Path) -> None:
    with Keytools.from_mapping(cloud.document) as tools:
        tools.write_dataset(DATA, cloud.path, partitioning=["tenant"], filesystem=cloud.filesystem)
    acme, bolt = (f"events/tenant={name}/part-0.parquet" for name in ("acme", "bolt"))
    right = cloud.s3.get_object(Bucket=cloud.bucket, Key=bolt)["Body"].read()
    cloud.s3.copy_object(Bucket=cloud.bucket, Key=bolt, CopySource={"Bucket": cloud.bucket, "Key": acme})
    cloud.s3.put_object(Bucket=cloud.bucket, Key=bolt, Body=right)
    done = erase(write_config(tmp_path, cloud.document), cloud.uri, "--yes", "acme")
    assert done.exit_code == 1, done.output
    assert any("older versions" in problem["text"] for problem in json.loads(done.stdout)["problems"])
    assert cloud.state("acme") == "Enabled"


def test_older_versions_that_may_not_be_read_are_named(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError

    from parquet_keytools.rotation.s3_replacement import client_of

    with Keytools.from_mapping(cloud.document) as tools:
        tools.write_dataset(DATA, cloud.path, partitioning=["tenant"], filesystem=cloud.filesystem)

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "ListObjectVersions")

    with_query, _ = pafs.FileSystem.from_uri(cloud.uri)
    client_of(with_query).meta.events.register("before-call.s3.ListObjectVersions", refuse)
    done = erase(write_config(tmp_path, cloud.document), cloud.uri, "--yes", "acme")
    assert done.exit_code == 0, done.output
    texts = [note["text"] for note in json.loads(done.stdout)["not_reached"]]
    assert any("older versions" in text and "AccessDenied" in text for text in texts), texts


def test_an_alias_that_means_the_key_of_the_tenant(cloud: Cloud, tmp_path: Path) -> None:
    with Keytools.from_mapping(cloud.document) as tools:
        tools.write_dataset(DATA, cloud.path, partitioning=["tenant"], filesystem=cloud.filesystem)
    other = {"footer_key": "footer", "column_keys": {cloud.arns["acme"]: ["x"]}, "unlisted_columns": "plaintext"}
    document = cloud.document | {"tables": {"events": TABLE, "other": other}}
    done = erase(write_config(tmp_path, document), cloud.uri, "--table", "events", "--yes", "acme")
    assert done.exit_code == 1, done.output
    assert any("is the same master key" in problem["text"] for problem in json.loads(done.stdout)["problems"])
    assert cloud.state("acme") == "Enabled"


def test_a_moved_alias_is_not_the_key_of_the_files(cloud: Cloud, tmp_path: Path) -> None:
    with Keytools.from_mapping(cloud.document) as tools:
        tools.write_dataset(DATA, cloud.path, partitioning=["tenant"], filesystem=cloud.filesystem)
    alias = f"alias/{cloud.bucket}/acme"
    cloud.arns["new"] = cloud.kms.create_key()["KeyMetadata"]["Arn"]
    cloud.kms.delete_alias(AliasName=alias)
    cloud.kms.create_alias(AliasName=alias, TargetKeyId=cloud.arns["new"])
    config = write_config(tmp_path, cloud.document)
    done = erase(config, cloud.uri, "--yes", "acme")
    assert done.exit_code == 1, done.output
    assert any("does not unwrap" in problem["text"] for problem in json.loads(done.stdout)["problems"])
    assert (cloud.state("acme"), cloud.state("new")) == ("Enabled", "Enabled")
