"""An attacker who can write to the storage, while keys of a cloud KMS are rotated, listed and restored.

The same as `tamper/test_hostile_rotation.py`, for each KMS that can run here, and through Python, the command
line and Spark tasks. Each attack is on one file of a data set, beside an untouched file.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import boto3
import pytest
from aws_fake import REGION, FakeKms, serve
from fake_spark import FakeSpark
from gcp_fake import FakeGcpKms, State, fake_gcp_kms
from moto_server import moto_server
from openbao import OpenBao
from rotation_case import COLUMNS, TABLE, external_entries, key_material_file, tree_digest
from soak import SOAK
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import KmsError
from parquet_keytools.format.file_layout import with_trailer
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.rotation.file_keys import read_tail
from parquet_keytools.rotation.rotate import footer_of
from parquet_keytools.spark import pipelines
from parquet_keytools.storage.locations import FileLocation

ROLES = ("kf", "ka", "kb", "new")
MOTO_ACCOUNT = "123456789012"
CREDENTIALS = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": "secret"}

Entry = dict[str, Any]
Entries = dict[str, Entry]


@dataclass
class Service:
    """A KMS, and the tasks of its operator.

    Attributes:
        settings: The settings under `kms:`.
        ids: Purpose of a master key -> its identifier.
        add_version: Adds a version to a master key.
        disable: Disables a master key for unwrapping.
        knows_versions: Whether a wrapped key names the version that wrapped it.
    """

    settings: dict[str, Any]
    ids: dict[str, str]
    add_version: Callable[[str], object]
    disable: Callable[[str], object]
    knows_versions: bool = False


@pytest.fixture(scope="module")
def aws() -> Iterator[tuple[FakeKms, str]]:
    fake = FakeKms()
    with serve(fake) as url:
        yield fake, url


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def gcp() -> Iterator[FakeGcpKms]:
    with fake_gcp_kms() as server:
        yield server


def openbao_service(server: OpenBao) -> Service:
    ids = {role: server.create_key() for role in ROLES}
    settings = {"type": "vault", "url": server.url, "token": server.root_token}
    return Service(settings, ids, server.rotate_key, server.disable_key, knows_versions=True)


def aws_service(server: tuple[FakeKms, str]) -> Service:
    fake, url = server
    keys = {key.arn: key for key in (fake.add_key() for _ in ROLES)}

    def disable(arn: str) -> None:
        keys[arn].state = "Disabled"

    settings = {"type": "aws", "region": REGION, "endpoint_url": url, **CREDENTIALS}
    ids = dict(zip(ROLES, keys, strict=True))
    return Service(settings, ids, lambda arn: keys[arn].rotate(), disable)


def moto_service(url: str) -> Service:
    from moto.kms.models import kms_backends

    make_client: Any = boto3.client
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = make_client("kms", region_name=REGION, endpoint_url=url, **keys)
    settings = {"type": "aws", "region": REGION, "endpoint_url": url, **CREDENTIALS}
    ids = {role: client.create_key()["KeyMetadata"]["Arn"] for role in ROLES}

    def disable(arn: str) -> None:
        # A disabled key of moto still works, so it is removed.
        key_id = arn.rpartition("/")[2]
        del kms_backends[MOTO_ACCOUNT][REGION].keys[key_id]

    return Service(settings, ids, lambda arn: client.rotate_key_on_demand(KeyId=arn), disable)


def gcp_service(server: FakeGcpKms) -> Service:
    keys = {key.name: key for key in (server.add_key(f"k{len(server.keys)}") for _ in ROLES)}
    settings = {"type": "gcp", "endpoint": server.endpoint, "insecure": True}
    ids = dict(zip(ROLES, keys, strict=True))
    return Service(
        settings, ids, lambda name: keys[name].add_version(), lambda name: keys[name].set_state(State.DISABLED)
    )


MAKERS: dict[str, tuple[str, Callable[[Any], Service]]] = {
    "openbao": ("openbao", openbao_service),
    "aws": ("aws", aws_service),
    "moto": ("moto", moto_service),
    "gcp": ("gcp", gcp_service),
}


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Service:
    fixture, maker = MAKERS[request.param]
    return maker(request.getfixturevalue(fixture))


@pytest.fixture
def place(service: Service, tmp_path: Path) -> Iterator[Place]:
    with Place(service, tmp_path) as place:
        yield place


class Place(ExitStack):
    """A data set under the keys of a service, and the ways in which keys are rotated and listed."""

    def __init__(self, service: Service, tmp_path: Path) -> None:
        super().__init__()
        self.service = service
        self.folder = tmp_path / "data"
        self.folder.mkdir()
        self.config = self.configuration("config")

    def configuration(self, name: str, **changes: Any) -> Path:
        path = self.folder.parent / f"{name}.json"
        table = {
            "footer_key": "kf",
            "unlisted_columns": "plaintext",
            **COLUMNS,
            "key_material": "external",
            **changes,
        }
        document = {
            "version": 1,
            "kms": self.service.settings,
            "master_keys": self.service.ids,
            "tables": {"t": table},
        }
        path.touch(0o600)
        path.write_text(json.dumps(document))
        return path

    def tools(self, **changes: Any) -> Keytools:
        name = "-".join(f"{key}={value}" for key, value in changes.items()) or "config"
        return self.enter_context(Keytools.from_yaml(self.configuration(name, **changes)))

    def write(self, tools: Keytools, name: str) -> Path:
        path = self.folder / f"{name}.parquet"
        tools.write_table(TABLE, path, row_group_size=250)
        return path

    def of(self, role: str, entries: Entries) -> list[Entry]:
        """Return the entries of key material under a master key."""
        master_key_id = quote(self.service.ids[role], safe="")
        found = [
            entry for entry in entries.values() if quote(unquote(entry["masterKeyID"]), safe="") == master_key_id
        ]
        assert found
        return found

    def add_versions(self) -> None:
        for master_key_id in self.service.ids.values():
            self.service.add_version(master_key_id)

    def run(self, *arguments: object) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, [*map(str, arguments), "--config", str(self.config)])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    def rotate(
        self,
        way: str,
        *,
        dry_run: bool = False,
        only_master_key: list[str] | None = None,
        moves: dict[str, str] | None = None,
        status: int = 1,
    ) -> dict[str, str]:
        """Rotate; returns name -> outcome. The command line ends with the status if a file failed."""
        options: dict[str, Any] = {"dry_run": dry_run, "only_master_keys": only_master_key, "moves": moves}
        if way == "python":
            with Keytools.from_yaml(self.config) as tools:
                report = tools.rotate(self.folder, **options)
            assert report.succeeded is (not report.failures)
            outcomes = [(file.path, file.outcome.value) for file in report.files]
        elif way == "cli":
            flags = ["--dry-run"] if dry_run else []
            flags += [text for key in only_master_key or () for text in ("--only-master-key", key)]
            flags += [text for old, new in (moves or {}).items() for text in ("--from", old, "--to", new)]
            ended, out, err = self.run("rotate", self.folder, "--json", "--verbose", *flags)
            outcomes = [(file["path"], file["outcome"]) for file in json.loads(out)["files"]]
            failed = [path for path, outcome in outcomes if outcome == "failed"]
            assert ended == (status if failed else 0), err
            assert all(re.search(rf"Failed: .*{re.escape(path)}: ", err) for path in failed), err
        else:
            spark: Any = FakeSpark(2)
            rows = pipelines.rotate(spark, self.folder, self.config, **options).rows()
            outcomes = [(row["path"], row["outcome"]) for row in rows]
        return {Path(path).stem: outcome for path, outcome in outcomes}

    def unknown(self, way: str, master_key_id: str) -> set[str]:
        """Return the files for which it is unknown whether they need a key."""
        if way == "python":
            with Keytools.from_yaml(self.config) as tools:
                files = [(file.path, file.unknown is not None) for file in tools.key_inventory(self.folder)]
        elif way == "cli":
            status, out, err = self.run("keys", self.folder, "--json", "--fail-if-uses", master_key_id)
            files = [(file["path"], not file["all_keys_seen"]) for file in json.loads(out)["files"]]
            assert status == (1 if any(unknown for _, unknown in files) else 0), err
            if status:
                assert "Nothing here needs" not in err, err
        else:
            spark: Any = FakeSpark(2)
            rows = pipelines.keys(spark, self.folder, self.config).rows()
            files = [(row["path"], row["outcome"] != pipelines.LISTED) for row in rows]
        return {Path(path).stem for path, unknown in files if unknown}


def ways(**of_service: str) -> pytest.MarkDecorator:
    """Run a test with these services, and for each service in these ways."""
    pairs = [(service, way) for service, text in of_service.items() for way in text.split()]
    return pytest.mark.parametrize(("service", "way"), pairs, indirect=["service"])


ALL_WAYS = "python cli spark"
# The answers of a KMS do not depend on the way: each service runs, and each way.
_SAMPLE = {"openbao": "python", "aws": "cli", "gcp": "spark"}
some_ways = ways(**(dict.fromkeys(_SAMPLE, ALL_WAYS) if SOAK else _SAMPLE))
every_way = ways(**(dict.fromkeys(_SAMPLE, ALL_WAYS) if SOAK else _SAMPLE), moto="python")


# --- attacks on key material: each changes the entries of a file, given another file's newer entries


def another_master_key(place: Place, entries: Entries, newer: Entries) -> None:
    place.of("ka", entries)[0]["masterKeyID"] = place.of("kb", entries)[0]["masterKeyID"]


def a_master_key_of_no_table(place: Place, entries: Entries, newer: Entries) -> None:
    place.of("ka", entries)[0]["masterKeyID"] = place.service.ids["new"]


def the_wrapped_key_of_another_master_key(place: Place, entries: Entries, newer: Entries) -> None:
    of_ka, of_kb = place.of("ka", entries)[0], place.of("kb", entries)[0]
    of_ka[wrapped(of_ka)] = of_kb[wrapped(of_kb)]


def the_dek_of_another_column(place: Place, entries: Entries, newer: Entries) -> None:
    one, other = place.of("ka", entries)[:2]
    one["wrappedDEK"], other["wrappedDEK"] = other["wrappedDEK"], one["wrappedDEK"]


def the_keys_of_two_columns(place: Place, entries: Entries, newer: Entries) -> None:
    one, other, *_ = [name for name, entry in entries.items() if entry in place.of("ka", entries)]
    entries[one], entries[other] = entries[other], entries[one]


def the_same_column_of_another_file(place: Place, entries: Entries, newer: Entries) -> None:
    name = next(name for name, entry in entries.items() if entry in place.of("ka", entries))
    entries[name] = newer[name]


def the_footer_key_of_another_file(place: Place, entries: Entries, newer: Entries) -> None:
    entries["footerKey"] = newer["footerKey"]


def the_label_of_a_newer_version(place: Place, entries: Entries, newer: Entries) -> None:
    of_old, of_new = place.of("ka", entries)[0], place.of("ka", newer)[0]
    of_old[wrapped(of_old)] = relabelled(of_old[wrapped(of_old)], of_new[wrapped(of_new)])


def the_label_of_a_newer_version_for_the_footer(place: Place, entries: Entries, newer: Entries) -> None:
    field = wrapped(entries["footerKey"])
    entries["footerKey"][field] = relabelled(entries["footerKey"][field], newer["footerKey"][field])


ATTACKS: list[Callable[[Place, Entries, Entries], None]] = [
    another_master_key,
    a_master_key_of_no_table,
    the_wrapped_key_of_another_master_key,
    the_dek_of_another_column,
    the_keys_of_two_columns,
    the_same_column_of_another_file,
    the_footer_key_of_another_file,
    the_label_of_a_newer_version,
    the_label_of_a_newer_version_for_the_footer,
]


def wrapped(entry: Entry) -> str:
    """Return the field with the key that the KMS wrapped."""
    return "wrappedKEK" if entry["doubleWrapping"] else "wrappedDEK"


def relabelled(old: str, new: str) -> str:
    """Return an old wrapped key with the beginning of a new one, if a KMS states the version there."""
    if old.startswith("vault:"):
        return new[: len("vault:v2:")] + old[len("vault:v1:") :]
    start, rest = base64.b64decode(new), base64.b64decode(old)
    # A version's tag, or the key name and the version: all that precedes the nonce.
    length = len(rest) - 12 - 16 - 16
    if start[:length] == rest[:length]:
        # A service without versions.
        return base64.b64encode(start[:-16] + rest[-16:]).decode()
    return base64.b64encode(start[:length] + rest[length:]).decode()


@every_way
def test_no_entry_that_was_changed_is_believed(place: Place, way: str) -> None:
    old = {
        double: place.write(place.tools(double_wrapping=double), f"../old-{double}") for double in (True, False)
    }
    place.add_versions()
    new = {
        double: place.write(place.tools(double_wrapping=double), f"../new-{double}") for double in (True, False)
    }
    attacked = set()
    for attack in ATTACKS:
        for double in (True, False):
            if double or attack is not the_dek_of_another_column:
                name = f"{attack.__name__}-{double}"
                entries = external_entries(old[double])
                attack(place, entries, external_entries(new[double]))
                copy_with(entries, old[double], place.folder / f"{name}.parquet")
                attacked.add(name)
    intact = place.folder / "intact.parquet"
    copy_with(external_entries(old[True]), old[True], intact)
    before = {name: digest for name, digest in tree_digest(place.folder).items() if "intact" not in name}
    # A dry run unwraps no key that would change. "Would be rotated" is not "done".
    foreseen = place.rotate(way, dry_run=True)
    assert set(foreseen.values()) <= {"failed", "would rotate"} and foreseen["intact"] == "would rotate"
    assert place.rotate(way) == dict.fromkeys(attacked, "failed") | {"intact": "rotated"}
    again = place.rotate(way, only_master_key=["kb"])
    assert again.pop("intact") == ("already current" if place.service.knows_versions else "rotated")
    assert again == dict.fromkeys(attacked, "failed")
    assert place.unknown(way, "new") == attacked
    after = tree_digest(place.folder)
    assert {name: digest for name, digest in after.items() if "intact" not in name} == before
    assert place.tools().read_table(intact).equals(TABLE)


def copy_with(entries: Entries, path: Path, to: Path) -> None:
    """Copy a file, with other key material."""
    if path != to:
        shutil.copy(path, to)
    key_material_file(to).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))


def denied(metadata: FileMetaData) -> None:
    """State in the metadata that nothing is encrypted."""
    metadata.encryption_algorithm = metadata.footer_signing_key_metadata = None


def renamed(metadata: FileMetaData) -> None:
    """Rename a plain column."""
    metadata.schema[-1].name = "other"


def counted(metadata: FileMetaData) -> None:
    metadata.num_rows += 1


def unstored_columns(metadata: FileMetaData) -> None:
    """State in the metadata that columns are not encrypted."""
    for row_group in metadata.row_groups:
        for chunk in row_group.columns:
            chunk.crypto_metadata = None


@some_ways
def test_a_plaintext_footer_is_believed_when_it_is_authentic(place: Place, way: str) -> None:
    """All its keys are current and correct. An attacker without a key changes the metadata of columns."""
    tools = place.tools(plaintext_footer=True, key_material="internal")
    whole = place.write(tools, "intact")
    attacked = set()
    for change in (denied, renamed, counted, unstored_columns):
        path = place.folder / f"{change.__name__}.parquet"
        shutil.copy(whole, path)
        tail, _ = read_tail(FileLocation.resolve(path))
        footer = footer_of(tail.data)
        metadata, end = FileMetaData.read(footer)
        change(metadata)
        signature = b"" if change is denied else footer[end:]
        changed_tail = with_trailer(metadata.serialise() + signature, b"PAR1")
        path.write_bytes(path.read_bytes()[: tail.offset] + changed_tail)
        attacked.add(change.__name__)
    before = tree_digest(place.folder)
    done = "already current" if place.service.knows_versions else "rotated"
    assert place.rotate(way, dry_run=True)["intact"] in (done, "would rotate")
    assert place.rotate(way) == dict.fromkeys(attacked, "failed") | {"intact": done}
    assert place.unknown(way, "new") == attacked
    after = tree_digest(place.folder)
    assert {name for name in before if after[name] != before[name]} <= {"intact.parquet"}
    assert place.tools().read_table(whole).equals(TABLE)


@every_way
def test_a_stashed_key_does_not_outlive_its_master_key(place: Place, way: str) -> None:
    path, stolen = place.write(place.tools(), "x"), place.write(place.tools(), "../stolen")
    wrapped_key = stash(place, path, stolen)
    place.add_versions()
    assert place.rotate(way, moves={"ka": "new"}) == {"x": "rotated"}
    entries = external_entries(path)
    assert len(entries) == 5 and wrapped_key not in key_material_file(path).read_text()
    assert len(place.of("new", entries)) == 3 and len({entry["wrappedKEK"] for entry in entries.values()}) == 3
    # No stashed key is left under the new master key, and the old one opens nothing.
    ids = place.service.ids
    with Keytools.from_yaml(place.config) as tools:
        assert tools.kms is not None
        place.service.disable(ids["ka"])
        with pytest.raises(KmsError):
            unwrap_one(tools.kms, wrapped_key, ids["ka"])
    moved = place.configuration("moved", column_keys={"new": ["a", "nested"], "kb": ["b"]})
    with Keytools.from_yaml(moved) as tools:
        assert tools.read_table(path).equals(TABLE)
        assert [file.path for file in tools.files_using(ids["ka"], path)] == []


def stash(place: Place, path: Path, stolen: Path) -> str:
    """Put the key of another data set into a key material file; return its wrapped key."""
    (entry, *_) = place.of("ka", external_entries(stolen))
    copy_with({"stash": entry, **external_entries(path), "columnKey99": entry}, path, path)
    return str(entry["wrappedKEK"])


@some_ways
def test_what_a_kms_refuses_is_never_done_nor_unneeded(place: Place, way: str) -> None:
    """Each key is current: only the KMS knows that the columns' key is correct."""
    for key_material in ("internal", "external"):
        place.write(place.tools(key_material=key_material), key_material)
    before = tree_digest(place.folder)
    place.service.disable(place.service.ids["ka"])
    everything = {"internal", "external"}
    assert place.rotate(way, status=3) == dict.fromkeys(everything, "failed")
    assert place.unknown(way, "new") == everything
    assert tree_digest(place.folder) == before


@pytest.mark.parametrize("service", ["openbao", "aws", "gcp"], indirect=True)
def test_what_the_command_line_says(place: Place) -> None:
    """In a data set in which one entry names another master key, before somebody disables a key."""
    path = place.write(place.tools(), "x")
    entries = external_entries(path)
    another_master_key(place, entries, entries)
    copy_with(entries, path, path)
    place.add_versions()
    before = tree_digest(place.folder)
    for options in ([], ["--only-master-key", "kf"]):
        status, out, err = place.run("rotate", place.folder, *options)
        assert status == 3 and f"Failed: {path}: " in err and "1 failed" in out, err
        assert "does not belong to this master key, or is damaged" in err, err
    # A moved file is compared with its table before any KMS call.
    status, out, err = place.run("rotate", place.folder, "--from", "ka", "--to", "new")
    assert status == 1 and f"Failed: {path}: this is not a file of the table" in err and "1 failed" in out, err
    for key in ("ka", "kb", "new"):
        status, out, err = place.run("keys", place.folder, "--fail-if-uses", key)
        assert status == 1 and "Nothing here needs" not in out + err and str(path) in out + err, err
    assert tree_digest(place.folder) == before


# --- costs without an attack ---


@pytest.mark.parametrize("double", [True, False])
def test_cloud_kms_is_asked_once_for_each_old_kek(gcp: FakeGcpKms, tmp_path: Path, double: bool) -> None:
    """It cannot re-wrap: a key that it wrapped itself costs three requests."""
    with Place(gcp_service(gcp), tmp_path) as place:
        count = 4
        for number in range(count):
            with Keytools.from_yaml(place.configuration("writer", double_wrapping=double)) as tools:
                place.write(tools, str(number))
        place.add_versions()
        gcp.calls.clear()
        assert set(place.rotate("python").values()) == {"rotated"}
        keks = 3
        wanted = {"Decrypt": count * keks + keks, "Encrypt": keks}
        if not double:
            wanted = {"Decrypt": 2 * 5 * count, "Encrypt": 5 * count}
        assert {name: gcp.calls[name] for name in wanted} == wanted
        with Keytools.from_yaml(place.config) as tools:
            assert tools.dataset(place.folder).to_table().num_rows == count * TABLE.num_rows


def test_the_transit_engine_moves_no_kek_to_another_key(openbao: OpenBao, tmp_path: Path) -> None:
    """It re-wraps only under the same key. There, a KEK is unwrapped only for the proof."""
    with Place(openbao_service(openbao), tmp_path) as place:
        path = place.write(place.tools(), "x")
        keks = {entry["masterKeyID"]: entry["keyEncryptionKeyID"] for entry in external_entries(path).values()}
        place.add_versions()
        assert place.rotate("python", moves={"ka": "new"}) == {"x": "rotated"}
        assert place.rotate("python", only_master_key=["kb"]) == {"x": "rotated"}
        ids = place.service.ids
        moved = {entry["masterKeyID"]: entry["keyEncryptionKeyID"] for entry in external_entries(path).values()}
        assert moved.pop(ids["new"]) != keks.pop(ids["ka"]) and moved == keks
