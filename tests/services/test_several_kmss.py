"""Several KMSs in one configuration: two OpenBao transit engines, and moto's AWS KMS."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto_server import moto_server
from openbao import OpenBao
from rotation_case import new_keystore, passphrase
from soak import SecondForm
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    KeyNotAvailableError,
    KmsAccessDeniedError,
    KmsUnavailableError,
    TableMismatchError,
)
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import KmsClientContract
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.named import NamedKmsSettings
from parquet_keytools.kms.registry import client_class, make_client

TABLE = pa.table({"id": [1, 2, 3], "name": ["x", "y", "z"], "claim": [1.5, 2.5, None]})
REGION = "eu-central-1"
AWS = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": "secret", "region": REGION}
FORMS: dict[str, dict[str, Any]] = {
    "pyarrow": {},
    "module encryptor": {"aad_prefix": "t/{file_name}"},
    "external": {"key_material": "external"},
    "plaintext footer": {"plaintext_footer": True},
    "single wrapping": {"double_wrapping": False},
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class TestContract(KmsClientContract):
    """The contract, with one master key in a keystore, and another one in OpenBao."""

    @pytest.fixture
    def kms(self, openbao: OpenBao, tmp_path: Path) -> Iterator[KmsClient]:
        self.server = openbao
        allowed = {path: ["create", "read", "update"] for path in ("transit/+/*", "transit/keys/*")}
        self.policy = openbao.write_policy(allowed)
        path = tmp_path / "keystore.json"
        path.touch(mode=0o600)
        path.write_bytes(new_keystore(("one",)))
        self.keystore = Keystore(path, passphrase)
        settings = {
            "local": {"type": "keystore", "path": path.name, "passphrase": passphrase().reveal().decode()},
            "bao": {"type": "vault", "url": openbao.url, "token": openbao.create_token(self.policy)},
        }
        made = {
            name: client_class(one["type"]).Settings.model_validate(one | {"instance_id": name})
            for name, one in settings.items()
        }
        with make_client(NamedKmsSettings(kmss=made), tmp_path) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return "local::one"

    @pytest.fixture
    def other_master_key_id(self, openbao: OpenBao) -> str:
        return f"bao::{openbao.create_key()}"

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return "local::no-such-master-key"

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        name, _, within = master_key_id.partition("::")
        if name == "local":
            self.keystore.set_enabled(within, False)
        else:
            self.server.disable_key(within)

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        name, _, within = master_key_id.partition("::")
        if name == "local":
            pytest.skip("a keystore has no principals")
        self.server.write_policy({"transit/+/*": ["update"], f"transit/+/{within}": ["deny"]}, self.policy)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        name, _, within = master_key_id.partition("::")
        (self.keystore if name == "local" else self.server).rotate_key(within)


class TestContractTheOtherWayRound(SecondForm, TestContract):
    """The same, with the two master keys exchanged."""

    @pytest.fixture
    def master_key_id(self, openbao: OpenBao) -> str:
        return f"bao::{openbao.create_key()}"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return "local::one"

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return "bao::no-such-master-key"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def cloud_keys(moto: str) -> list[str]:
    client = boto3.client(
        "kms",
        region_name=REGION,
        endpoint_url=moto,
        aws_access_key_id=AWS["access_key_id"],
        aws_secret_access_key=AWS["secret_access_key"],
    )
    arns: list[str] = [client.create_key()["KeyMetadata"]["Arn"] for _ in range(3)]
    return arns


class Place:
    """Master keys in two transit engines and in moto; both engines have a master key named `pii`."""

    def __init__(
        self, server: OpenBao, mounts: dict[str, str], moto: str, cloud_keys: list[str], folder: Path
    ) -> None:
        self.server = server
        self.folder = folder
        self.mounts = mounts
        self.kms: dict[str, Any] = {
            name: {"type": "vault", "url": server.url, "token": server.root_token, "mount_point": mount}
            for name, mount in mounts.items()
        }
        self.kms["cloud"] = {"type": "aws", "endpoint_url": moto, **AWS}
        self.master_keys: dict[str, Any] = {
            "footer": {"kms": "eu", "id": "footer"},
            "pii": {"kms": "eu", "id": "pii"},
            "claims": {"kms": "us", "id": "pii"},
            **{f"cloud{number}": {"kms": "cloud", "id": arn} for number, arn in enumerate(cloud_keys)},
        }

    def document(self, kms: dict[str, Any] | None = None, **table: Any) -> dict[str, Any]:
        columns = {"pii": ["name"], "claims": ["claim"]}
        given = {"footer_key": "footer", "column_keys": columns, "unlisted_columns": "plaintext", **table}
        return {"version": 1, "kms": kms or self.kms, "master_keys": self.master_keys, "tables": {"t": given}}

    def tools(self, kms: dict[str, Any] | None = None, reading: Any = None, **table: Any) -> Keytools:
        return Keytools.from_mapping(self.document(kms, **table) | {"reading": reading or {}})

    def only_eu(self) -> dict[str, Any]:
        """The KMSs for a reader who may use one of the two engines."""
        mount = self.mounts["eu"]
        token = self.server.create_token(self.server.write_policy({f"{mount}/*": ["read", "update"]}))
        return {name: one | ({"token": token} if name != "cloud" else {}) for name, one in self.kms.items()}

    def us_down(self, port: int) -> dict[str, Any]:
        down = {"url": f"http://127.0.0.1:{port}", "timeout_seconds": 1.0}
        return {name: settings | (down if name == "us" else {}) for name, settings in self.kms.items()}

    def command(self, document: dict[str, Any], *arguments: object) -> Result:
        config = self.folder / "config.yaml"
        config.write_text(json.dumps(document))
        config.chmod(0o600)
        how = [str(config)] if arguments[0] == "check" else ["--config", str(config)]
        return CliRunner().invoke(app, [*map(str, arguments), *how])


@pytest.fixture(scope="module")
def mounts(openbao: OpenBao) -> dict[str, str]:
    mounts = {name: openbao.new_name(name) for name in ("eu", "us")}
    for mount in mounts.values():
        openbao.ask("POST", f"sys/mounts/{mount}", {"type": "transit"})
        for key in ("footer", "pii"):
            openbao.create_key(key, mount)
    return mounts


@pytest.fixture
def place(openbao: OpenBao, mounts: dict[str, str], moto: str, cloud_keys: list[str], tmp_path: Path) -> Place:
    return Place(openbao, mounts, moto, cloud_keys, tmp_path)


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def uses(keytools: Keytools, path: Path) -> dict[str | None, str | None]:
    (file,) = keytools.key_inventory(path)
    assert file.unknown is None
    return {use.column: use.master_key_id for use in file.uses}


def changed(path: Path, old: bytes, new: bytes) -> None:
    """Alter the key material of an encrypted footer, which is not authenticated, by text of the same length."""
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    path.write_bytes(content.replace(old, new))


# --- files ---


@EVERY_FORM
def test_columns_under_two_kmss(place: Place, form: dict[str, Any]) -> None:
    path = place.folder / "file.parquet"
    place.tools(**form).write_table(TABLE, path)
    keytools = place.tools(**form)
    assert keytools.read_table(path).equals(TABLE)
    assert pq.read_table(path, decryption_properties=keytools.decryption_properties(path)).equals(TABLE)
    assert uses(keytools, path) == {None: "eu::footer", "name": "eu::pii", "claim": "us::pii"}
    report = keytools.verify_file(path)
    assert report.conforms and "kms-named" not in [result.rule.id for result in report.rules if result.findings]


@EVERY_FORM
def test_the_data_set_is_rotated_to_a_third_kms(
    place: Place, form: dict[str, Any], cloud_keys: list[str], free_port: int
) -> None:
    folder = place.folder / "data"
    folder.mkdir()
    for number in range(2):
        place.tools(**form).write_table(TABLE, folder / f"{number}.parquet")
    moves = {"footer": "cloud0", "pii": "cloud1", "claims": "cloud2"}
    document = place.document(**form) | {"rotation": {"moves": moves}}
    # First the column under the second KMS, then all others.
    done = place.command(document, "rotate", folder, "--from", "us::pii", "--to", "cloud2", "--json")
    assert done.exit_code == 0, done.output
    keytools = Keytools.from_mapping(document)
    assert uses(keytools, folder / "0.parquet") == {
        None: "eu::footer",
        "name": "eu::pii",
        "claim": f"cloud::{cloud_keys[2]}",
    }
    assert keytools.rotate(folder).succeeded
    # Without the former KMSs, all data is readable; the files look as if they had always been in one KMS.
    others = {"url": f"http://127.0.0.1:{free_port}", "timeout_seconds": 0.5}
    kms = {name: settings | (others if name != "cloud" else {}) for name, settings in place.kms.items()}
    keytools = Keytools.from_mapping(document | {"kms": kms})
    assert keytools.read_table(folder).num_rows == 6
    assert set(uses(keytools, folder / "1.parquet").values()) == {f"cloud::{arn}" for arn in cloud_keys}
    master_keys = dict(zip(("footer", "pii", "claims"), cloud_keys, strict=True))
    one = {"kms": place.kms["cloud"], "master_keys": master_keys}
    assert Keytools.from_mapping(place.document(**form) | one).read_table(folder).num_rows == 6


# --- users of only one KMS ---


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_a_reader_who_may_use_one_of_them(place: Place, denied_columns: str) -> None:
    path = place.folder / "file.parquet"
    place.tools().write_table(TABLE, path)
    reader = place.tools(place.only_eu(), {"denied_columns": denied_columns})
    assert reader.read_table(path, columns=["id", "name"]).equals(TABLE.select(["id", "name"]))
    if denied_columns == "error":
        with pytest.raises(ColumnAccessDeniedError) as caught:
            reader.read_table(path)
        assert caught.value.columns == ("claim",)
        (cause,) = caught.value.causes
        assert isinstance(cause, KmsAccessDeniedError) and cause.kms == "us" and cause.master_key_id == "us::pii"
        assert str(cause).startswith("us (vault): unwrap with master key 'us::pii': access denied")
    elif denied_columns == "hide":
        assert reader.read_table(path).column_names == ["id", "name"]
    else:
        assert reader.read_table(path)["claim"].null_count == 3


def test_a_writer_who_may_use_one_of_them_writes_nothing(place: Place) -> None:
    path = place.folder / "file.parquet"
    with pytest.raises(KmsAccessDeniedError, match=r"us \(vault\)"):
        place.tools(place.only_eu()).write_table(TABLE, path)
    assert not path.exists()


# --- KMSs named in a file ---


@pytest.fixture
def old_file(place: Place) -> Path:
    """A file from before there were several KMSs: it names DEFAULT."""
    path = place.folder / "old.parquet"
    document = place.document(column_keys={"pii": ["name"]})
    document |= {"kms": place.kms["eu"], "master_keys": {}}
    Keytools.from_mapping(document).write_table(TABLE, path)
    assert b'"kmsInstanceID":"DEFAULT"' in path.read_bytes()
    return path


def test_a_file_that_says_default(place: Place, old_file: Path) -> None:
    with pytest.raises(KeyNotAvailableError, match=r"does not name the KMS.*'footer'.*`default:` under `kms:`"):
        place.tools(column_keys={"pii": ["name"]}).read_table(old_file)
    keytools = place.tools(place.kms | {"default": "eu"}, column_keys={"pii": ["name"]})
    assert keytools.read_table(old_file).equals(TABLE)
    assert uses(keytools, old_file) == {None: "eu::footer", "name": "eu::pii"}
    wrong = place.tools(place.kms | {"default": "us"}, column_keys={"pii": ["name"]})
    with pytest.raises(TableMismatchError, match="us::footer"):
        wrong.read_table(old_file)


def test_a_rotation_names_the_kms_of_a_file_that_says_default(place: Place, old_file: Path) -> None:
    keytools = place.tools(place.kms | {"default": "eu"}, column_keys={"pii": ["name"]})
    keytools.rotate(old_file, new_keks=True)
    assert b'"kmsInstanceID":"eu"' in old_file.read_bytes()
    assert place.tools(column_keys={"pii": ["name"]}).read_table(old_file).equals(TABLE)


def test_a_file_that_names_a_kms_that_the_configuration_does_not_have(place: Place) -> None:
    path = place.folder / "file.parquet"
    place.tools().write_table(TABLE, path)
    changed(path, b'"kmsInstanceID":"eu"', b'"kmsInstanceID":"xx"')
    keytools = place.tools()
    with pytest.raises(KeyNotAvailableError, match=r"names the KMS 'xx'.*'footer'.*cloud"):
        keytools.read_table(path)
    (file,) = keytools.key_inventory(path)
    assert "names the KMS 'xx'" in str(file.unknown)
    report = keytools.verify_file(path)
    assert not report.conforms and "names the KMS 'xx'" in report.denied["footer"]
    assert not keytools.rotate(path).succeeded
    assert b'"kmsInstanceID":"xx"' in path.read_bytes()


def test_a_file_whose_instance_was_altered(place: Place) -> None:
    """The master key of the same name in another KMS is a different one, also for the table."""
    path = place.folder / "file.parquet"
    place.tools().write_table(TABLE, path)
    changed(path, b'"kmsInstanceID":"eu"', b'"kmsInstanceID":"us"')
    with pytest.raises(TableMismatchError, match="us::footer"):
        place.tools().read_table(path)
    document = place.document()
    del document["tables"]
    keytools = Keytools.from_mapping(document)
    with pytest.raises(Exception, match=r"us \(vault\): unwrap with master key 'us::footer'"):
        keytools.read_table(path)
    assert keytools.kms is not None
    # The other KMS was not called.
    assert keytools.kms.call_counts["unwrap"] == 1


def test_a_forged_file_under_a_master_key_of_the_same_name(place: Place) -> None:
    """A user of one KMS cannot write a file that passes as encrypted under the other."""
    path = place.folder / "file.parquet"
    forger = place.document()
    forger["master_keys"] = {name: {"kms": "us", "id": "pii"} for name in ("footer", "pii", "claims")}
    Keytools.from_mapping(forger).write_table(TABLE, path)
    with pytest.raises(TableMismatchError):
        place.tools().read_table(path)


# --- a KMS that is down ---


@pytest.fixture
def data_set(place: Place) -> Path:
    """Files that need one KMS, the other, or both."""
    folder = place.folder / "data"
    for name, columns in {"eu": {"pii": ["name"]}, "both": {"pii": ["name"], "claims": ["claim"]}}.items():
        (folder / name).mkdir(parents=True)
        for number in range(3):
            place.tools(column_keys=columns).write_table(TABLE, folder / name / f"{number}.parquet")
    return folder


def test_one_kms_is_down(place: Place, data_set: Path, free_port: int) -> None:
    keytools = place.tools(place.us_down(free_port))
    path = data_set / "both" / "0.parquet"
    assert keytools.read_table(path, columns=["id", "name"]).num_rows == 3
    with pytest.raises(ColumnAccessDeniedError) as caught:
        keytools.read_table(path)
    (cause,) = caught.value.causes
    assert isinstance(cause, KmsUnavailableError) and cause.kms == "us" and cause.tries > 0
    # It is not called again at once.
    with pytest.raises(ColumnAccessDeniedError) as caught:
        keytools.read_table(path)
    assert "not attempted" in str(caught.value.causes[0]) and caught.value.causes[0].tries == 0
    other = place.tools(place.us_down(free_port), column_keys={"pii": ["name"]})
    assert other.read_table(data_set / "eu").num_rows == 9


def test_a_rotation_while_one_kms_is_down(place: Place, data_set: Path, free_port: int) -> None:
    document = place.document(place.us_down(free_port))
    del document["tables"]
    done = place.command(document, "rotate", data_set, "--new-keks", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 3, done.output
    assert report["counts"] == {"rotated": 3, "failed": 3} and report["stopped_by"] is None
    failed = {Path(file["path"]).parent.name for file in report["files"] if file["message"]}
    assert failed == {"both"} and "us (vault)" in done.stderr


def test_verify_while_one_kms_is_down(place: Place, data_set: Path, free_port: int) -> None:
    document = place.document(place.us_down(free_port))
    del document["tables"]
    done = place.command(document, "verify", data_set, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 3, done.output
    verdicts = {Path(file["path"]).parent.name: file for file in report["files"]}
    assert verdicts["eu"]["denied"] == {} and "us (vault)" in verdicts["both"]["denied"]["claim"]


def test_inspect_shows_the_kms_of_a_file(place: Place) -> None:
    place.tools().write_table(TABLE, place.folder / "file.parquet")
    assert "KMS instance 'eu'" in CliRunner().invoke(app, ["inspect", str(place.folder / "file.parquet")]).output


def test_encrypt_and_keys_while_one_kms_is_down(place: Place, data_set: Path, free_port: int) -> None:
    pq.write_table(TABLE, place.folder / "plain.parquet")
    document = place.document(place.us_down(free_port), column_keys={"pii": ["name"]})
    target = place.folder / "new.parquet"
    assert place.command(document, "encrypt", place.folder / "plain.parquet", target).exit_code == 0
    done = place.command(document, "keys", data_set, "--json")
    assert "us (vault)" in done.output and "eu::footer" in done.output


def test_check_while_one_kms_is_down(place: Place, free_port: int) -> None:
    done = place.command(place.document(place.us_down(free_port)), "check", "--json")
    assert done.exit_code == 3
    found = {key["name"]: key for key in json.loads(done.stdout)["master_keys"]}
    assert found["footer"]["outcome"] == found["cloud0"]["outcome"] == "ok"
    assert found["claims"]["outcome"] == "failed" and "us (vault)" in done.output
    assert found["claims"]["master_key_id"] == "us::pii"
    assert found["footer"]["backend"] == "vault" and found["cloud0"]["backend"] == "aws"


# --- the audit log ---


def test_the_audit_log_names_the_kms(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    kms = {name: settings | {"audit_log": True} for name, settings in place.kms.items()}
    with caplog.at_level(logging.INFO, "parquet_keytools.audit"):
        place.tools(kms).write_table(TABLE, place.folder / "file.parquet")
    records = [record.getMessage() for record in caplog.records]
    found = {re.search(r"kms_instance='(\w+)' master_key_id='(\w+)'", text).groups() for text in records}  # type: ignore[union-attr]
    assert found == {("eu", "footer"), ("eu", "pii"), ("us", "pii")}
