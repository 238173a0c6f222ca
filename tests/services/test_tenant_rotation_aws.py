"""Rotation of tenants' keys in AWS KMS, named by templates of ARNs and of aliases."""

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
import yaml
from moto_server import moto_server
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import MasterKeyNotTrustedError, TableMismatchError
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.secret_bytes import SecretBytes

REGION, ACCOUNT = "eu-west-1", "123456789012"
TENANTS = ("acme", "bolt")
FORMS = {"alias": "alias/", "ARN of an alias": f"arn:aws:kms:{REGION}:{ACCOUNT}:alias/"}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


class Place:
    def __init__(self, folder: Path, moto: str, form: str) -> None:
        self.folder = folder / "events"
        self.config = folder / "c.yaml"
        self.start = f"{FORMS[form]}{uuid.uuid4()}"
        make: Any = boto3.client
        self.client = make(
            "kms", region_name=REGION, endpoint_url=moto, aws_access_key_id="a", aws_secret_access_key="b"
        )
        self.kms = {
            "type": "aws",
            "region": REGION,
            "endpoint_url": moto,
            "access_key_id": "a",
            "secret_access_key": "b",
        }
        self.write()
        self.create("footer", *TENANTS)

    def write(self, **changes: Any) -> None:
        document = {
            "version": 1,
            "kms": self.kms,
            "master_keys": {"footer": f"{self.start}-footer", "tenant-{tenant}": f"{self.start}-{{tenant}}"},
            "tables": {
                "events": {
                    "footer_key": "footer",
                    "column_keys": {"tenant-{tenant}": ["email"]},
                    "unlisted_columns": "plaintext",
                    "key_values": {"tenant": {"from": "partition", "pattern": "[a-z]+"}},
                }
            },
            **changes,
        }
        self.config.write_text(yaml.safe_dump(document))

    def create(self, *names: str) -> None:
        for name in names:
            key = self.client.create_key()["KeyMetadata"]["KeyId"]
            self.client.create_alias(
                AliasName=f"alias/{self.start.partition('alias/')[2]}-{name}", TargetKeyId=key
            )

    def data(self) -> pa.Table:
        return pa.table({"tenant": list(TENANTS), "email": ["a@x", "b@x"]})

    def run(self, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(app, [*arguments, "--config", str(self.config)])
        assert result.exit_code == status, result.output
        return result

    def counts(self, *arguments: str) -> dict[str, int]:
        counts = json.loads(self.run("rotate", str(self.folder), "--json", *arguments).stdout)["counts"]
        return {name: number for name, number in counts.items() if number}


every_form = pytest.mark.parametrize("place", FORMS, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, moto: str, tmp_path: Path) -> Place:
    place = Place(tmp_path, moto, getattr(request, "param", "alias"))
    with Keytools.from_yaml(place.config) as keytools:
        keytools.write_dataset(place.data(), place.folder, partitioning=["tenant"])
    return place


def check_readable(place: Place) -> None:
    with Keytools.from_yaml(place.config) as keytools:
        assert keytools.read_table(place.folder).num_rows == 2


@every_form
def test_all_keys_are_rotated(place: Place) -> None:
    assert place.counts("--new-keks") == {"rotated": 2}
    check_readable(place)
    assert place.counts("--only-master-key", f"{place.start}-acme", "--new-keks")["rotated"] == 1
    check_readable(place)
    place.run("verify", str(place.folder))


@every_form
def test_one_tenant_is_moved_to_another_key(place: Place) -> None:
    place.create("acme-2")
    move = {f"{place.start}-acme": f"{place.start}-acme-2"}
    place.write(rotation={"moves": move})
    assert place.counts() == {"rotated": 1, "nothing to rotate": 1}
    check_readable(place)
    assert f"{place.start}-acme-2" in place.run("keys", str(place.folder), "--json").stdout
    place.run("verify", str(place.folder))


def test_the_footer_key_is_moved(place: Place) -> None:
    """Files of all tenants are compared with their table, and their keys are unwrapped to prove the footer's."""
    place.create("footer-2")
    place.write(rotation={"moves": {f"{place.start}-footer": f"{place.start}-footer-2"}})
    assert place.counts() == {"rotated": 2}
    check_readable(place)


def test_a_file_of_another_tenant_is_not_moved(place: Place) -> None:
    (acme,) = (place.folder / "tenant=acme").glob("*.parquet")
    moved = place.folder / "tenant=bolt" / "moved.parquet"
    shutil.copy(acme, moved)
    place.create("acme-2")
    place.write(rotation={"moves": {f"{place.start}-acme": f"{place.start}-acme-2"}})
    before = moved.read_bytes()
    result = place.run("rotate", str(place.folder), status=1)
    assert "moved.parquet" in result.stderr
    assert moved.read_bytes() == before
    with Keytools.from_yaml(place.config) as keytools, pytest.raises(TableMismatchError):
        keytools.read_table(moved)


@pytest.mark.parametrize("several", [False, True])
def test_only_keys_of_allowed_values_are_trusted(moto: str, tmp_path: Path, several: bool) -> None:
    place = Place(tmp_path, moto, "ARN of an alias")
    place.create("other")
    if several:
        names = {"footer": f"aws::{place.start}-footer", "tenant-{tenant}": f"aws::{place.start}-{{tenant}}"}
        place.write(
            kms={"aws": place.kms, "memory": {"type": "in_memory", "keys": {"k": "A" * 22 + "=="}}},
            master_keys=names,
        )
    key = SecretBytes(bytes(16))
    with Keytools.from_yaml(place.config) as keytools:
        kms, start = keytools.kms, f"aws::{place.start}" if several else place.start
        assert kms is not None
        wrapped = wrap_one(kms, key, f"{start}-acme")
        assert unwrap_one(kms, wrapped, f"{start}-acme") == key
        for another in (f"{start}-ACME", f"{start}-a/b", start.replace(ACCOUNT, "9" * 12) + "-acme"):
            with pytest.raises(MasterKeyNotTrustedError):
                unwrap_one(kms, wrapped, another)
