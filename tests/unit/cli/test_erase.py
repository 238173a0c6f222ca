"""`erase`: one tenant's data becomes unreadable, all other data stays readable, and a certificate states it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import ErasureRefusedError, KeytoolsError, KmsUnavailableError
from parquet_keytools.kms.client import UnwrapRequest
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.secret_bytes import SecretBytes

TENANTS = ("acme", "bolt")
DATA = pa.table({"tenant": ["acme", "bolt"], "day": [1, 2], "email": ["a@x", "b@x"], "note": ["p", "q"]})


class Place:
    """A keystore with the keys of tenants, a configuration, and a data set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.certificate = folder, folder / "events", folder / "certificate.json"
        self.passphrase = lambda: SecretBytes(b"long enough")
        (folder / "passphrase").write_text("long enough")
        (folder / "passphrase").chmod(0o600)
        self.keystore = Keystore.create(folder / "keystore.json", self.passphrase, scrypt_n=2**14)
        for name in ("footer", "shared", *TENANTS):
            self.keystore.create_key(name if name in ("footer", "shared") else f"prod/{name}")
        self.document: dict[str, Any] = {
            "version": 1,
            "kms": {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"},
            "master_keys": {"tenant-{tenant}": "prod/{tenant}"},
            "tables": {
                "events": {
                    "footer_key": "footer",
                    "column_keys": {"tenant-{tenant}": ["email"], "footer": ["note"]},
                    "key_values": {"tenant": {"from": "partition", "pattern": "[a-z]{1,9}"}},
                    "plaintext_columns": ["day", "tenant"],
                }
            },
        }
        self.save()

    @property
    def table(self) -> dict[str, Any]:
        return self.document["tables"]["events"]

    def save(self) -> Path:
        path = self.folder / "keytools.yaml"
        path.write_text(yaml.safe_dump(self.document))
        return path

    def tools(self) -> Keytools:
        return Keytools.from_yaml(self.save())

    def write(self, **partitioning: Any) -> None:
        with self.tools() as tools:
            tools.write_dataset(DATA, self.data, table_name="events", partitioning=["tenant"], **partitioning)

    def read(self, tenant: str) -> list[str]:
        with self.tools() as tools:
            found = tools.read_table(self.data / f"tenant={tenant}", table_name="events")
            return found["email"].to_pylist()

    def erase(
        self, *more: str, tenant: str = "acme", answer: str | None = None, path: Path | None = None
    ) -> Result:
        arguments = ["erase", str(path or self.data), "--config", str(self.save()), "--where", f"tenant={tenant}"]
        if len(self.document["tables"]) > 1:
            arguments += ["--table", "events"]
        return CliRunner().invoke(app, [*arguments, *more], input=answer)

    def keys(self) -> set[str]:
        return set(Keystore(self.keystore.path, self.passphrase).open().master_keys)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.write()
    return made


ALL_KEYS = {"footer", "shared", "prod/acme", "prod/bolt"}


def check_certificate(document: dict[str, Any], folder: Path | None) -> None:
    """Check a certificate as docs/erase.md describes it, with only the standard library.

    Args:
        document: The certificate.
        folder: The folder that paths of files are relative to, if the files still exist.
    """
    claimed = document["sha256"]
    rest = {name: value for name, value in document.items() if name != "sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    assert hashlib.sha256(canonical).hexdigest() == claimed
    assert (document["format"], document["version"]) == ("parquet-keytools erasure certificate", 1)
    assert document["started_at"] <= document["proof"]["at"] <= document["finished_at"]
    ids = {key["master_key_id"] for key in document["keys"]}
    assert ids and all(key["state"] in ("scheduled", "deleted") for key in document["keys"])
    assert all((key["state"] == "scheduled") == (key["deletes_at"] is not None) for key in document["keys"])
    proof = document["proof"]
    assert proof["wrapped_keys"] == sum(proof["outcomes"].values())
    if proof["obtained"]:
        assert set(proof["outcomes"]) <= {"MasterKeyNotFoundError", "MasterKeyDisabledError"}
        assert proof["wrapped_keys"] > 0 and not proof["reason"]
    for file in document["files"]:
        assert file["columns"] and all(column["master_key_id"] in ids for column in file["columns"])
        if file["version_id"] is not None or folder is None:
            continue
        data = Path(file["path"]).read_bytes()
        assert len(data) == file["size_bytes"]
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        assert hashlib.sha256(data[footer:]).hexdigest() == file["footer_sha256"]


def test_one_tenant_becomes_unreadable_and_all_others_are_read(place: Place) -> None:
    assert place.read("acme") == ["a@x"]
    done = place.erase("--certificate", str(place.certificate), answer="acme\n")
    assert done.exit_code == 0, done.output
    assert place.keys() == ALL_KEYS - {"prod/acme"}
    with pytest.raises(KeytoolsError):
        place.read("acme")
    assert place.read("bolt") == ["b@x"]
    document = json.loads(place.certificate.read_text())
    check_certificate(document, place.folder)
    (file,) = document["files"]
    assert "tenant=acme" in file["path"] and file["footer_authenticated"]
    assert [(c["column"], c["key_version"]) for c in file["columns"]] == [("email", "1")]
    (key,) = document["keys"]
    assert (key["state"], key["kms"], key["requested_at"] is not None) == ("deleted", "keystore", True)
    assert document["proof"]["obtained"] and "@" in document["run_by"]["name"]
    texts = {note["text"]: note["examples"] for note in document["not_reached"]}
    assert texts["plaintext columns"] == ["day"] and texts["columns under other keys"] == ["note"]
    assert "cannot be cancelled" in done.stdout and "acme" in done.stdout


def test_a_dry_run_and_a_wrong_answer_change_nothing(place: Place) -> None:
    dry = place.erase("--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    document = json.loads(dry.stdout)
    assert document["problems"] == [] and len(document["files"]) == 1
    assert place.erase(answer="bolt\n").exit_code == 2
    assert place.erase(answer="").exit_code == 2
    assert place.erase("--yes", "acm").exit_code == 2
    taken = place.certificate
    taken.write_text("kept")
    assert place.erase("--yes", "acme", "--certificate", str(taken)).exit_code == 2
    assert place.erase("--yes", "acme", "--certificate", str(place.folder / "no" / "folder")).exit_code == 2
    assert place.erase("--yes", "acme", "--waiting-days", "7").exit_code == 2
    assert taken.read_text() == "kept" and place.keys() == ALL_KEYS
    assert place.read("acme") == ["a@x"]


def test_a_repeated_run_gives_the_same_inventory_and_a_certificate(place: Place) -> None:
    first = json.loads(place.erase("--yes", "acme", "--json").stdout)
    again = place.erase("--yes", "acme", "--json", "--certificate", str(place.certificate))
    assert again.exit_code == 0, again.output
    second = json.loads(again.stdout)
    check_certificate(second, place.folder)
    assert second["files"] == first["files"]
    assert second["keys"][0]["requested_at"] is None and second["proof"]["obtained"]
    assert any("the deletion itself" in note["text"] for note in second["not_reached"])
    assert json.loads(place.certificate.read_text()) == second


@pytest.mark.parametrize("key_material", ["internal", "external"])
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_footers_under_the_key_of_the_tenant(tmp_path: Path, key_material: str, plaintext_footer: bool) -> None:
    place = Place(tmp_path)
    del place.table["plaintext_columns"]
    place.table.update(
        footer_key="tenant-{tenant}",
        column_keys={"tenant-{tenant}": ["email"]},
        unlisted_columns="footer_key",
        key_material=key_material,
        plaintext_footer=plaintext_footer,
    )
    place.write()
    first = place.erase("--yes", "acme", "--json")
    assert first.exit_code == 0, first.output
    # The footer is under the deleted key: the repeated run names the file without its hidden columns.
    second = place.erase("--yes", "acme", "--json")
    assert second.exit_code == 0, second.output
    one, two = (json.loads(done.stdout) for done in (first, second))
    for document in (one, two):
        check_certificate(document, place.folder)
    assert {"(footer)", "email", "note"} <= {column["column"] for column in one["files"][0]["columns"]}
    assert [file["path"] for file in one["files"]] == [file["path"] for file in two["files"]]
    assert one["files"][0]["footer_authenticated"] and not two["files"][0]["footer_authenticated"]
    assert place.read("bolt") == ["b@x"]


def test_values_of_arguments_and_two_keys_of_a_tenant(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.keystore.create_key("pay-acme")
    place.keystore.create_key("pay-bolt")
    place.table["column_keys"] = {"tenant-{tenant}": ["email"], "pay-{tenant}": ["note"]}
    place.table["key_values"]["tenant"]["from"] = "argument"
    with place.tools() as tools:
        for row, tenant in enumerate(TENANTS):
            path = place.data / f"{tenant}.parquet"
            path.parent.mkdir(exist_ok=True)
            tools.write_table(DATA.slice(row, 1), path, key_values={"tenant": tenant})
    done = place.erase("--yes", "acme", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    check_certificate(document, place.folder)
    assert {key["master_key_id"] for key in document["keys"]} == {"prod/acme", "pay-acme"}
    assert [Path(file["path"]).name for file in document["files"]] == ["acme.parquet"]
    assert place.keys() == ALL_KEYS - {"prod/acme"} | {"pay-bolt"}
    with place.tools() as tools:
        assert tools.read_table(place.data / "bolt.parquet")["note"].to_pylist() == ["q"]


@pytest.mark.parametrize("footer", [False, True])
def test_a_run_that_ended_between_two_keys_continues(tmp_path: Path, footer: bool) -> None:
    place = Place(tmp_path)
    place.keystore.create_key("pay-acme")
    place.keystore.create_key("pay-bolt")
    place.table["column_keys"] = {"tenant-{tenant}": ["email"], "pay-{tenant}": ["note"]}
    # A template for which no tenant has a key.
    place.table["also_trusted"] = ["old-{tenant}"]
    if footer:
        place.table["footer_key"] = "tenant-{tenant}"
    place.write()
    place.keystore.destroy_key("prod/acme")
    assert place.erase("--status").exit_code == 1
    done = place.erase("--yes", "acme", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    check_certificate(document, place.folder)
    requested = {key["master_key_id"]: key["requested_at"] is not None for key in document["keys"]}
    assert requested == {"prod/acme": False, "pay-acme": True}
    assert place.read("bolt") == ["b@x"]
    assert place.erase("--status").exit_code == 0


# --- refusals ---


def refused(place: Place, words: str) -> None:
    done = place.erase("--yes", "acme", "--json")
    assert done.exit_code == 1, done.output
    problems = json.loads(done.stdout)["problems"]
    assert any(words in problem["text"] for problem in problems), problems
    assert place.keys() == ALL_KEYS
    with place.tools() as tools, pytest.raises(ErasureRefusedError, match=words[:20]):
        erasure = tools.erasure(place.data, {"tenant": "acme"}, table_name="events")
        erasure.run(erasure.plan())
    assert place.keys() == ALL_KEYS


def test_a_file_of_another_tenant_is_under_the_key(place: Place) -> None:
    (file,) = (place.data / "tenant=acme").iterdir()
    file.rename(place.data / "tenant=bolt" / "moved.parquet")
    refused(place, "another tenant")


def test_a_file_of_the_tenant_has_columns_under_another_key_of_the_template(place: Place) -> None:
    (file,) = (place.data / "tenant=bolt").iterdir()
    file.rename(place.data / "tenant=acme" / "moved.parquet")
    refused(place, "more than one tenant")


def test_a_file_of_the_tenant_was_written_before_the_template(place: Place) -> None:
    place.table["column_keys"] = {"shared": ["email"], "footer": ["note"]}
    place.table["key_values"] = {}
    with place.tools() as tools:
        tools.write_table(DATA.drop_columns(["tenant"]), place.data / "tenant=acme" / "old.parquet")
    place.table["column_keys"] = {"tenant-{tenant}": ["email"], "footer": ["note"]}
    place.table["key_values"] = {"tenant": {"from": "partition", "pattern": "[a-z]{1,9}"}}
    refused(place, "column email of this tenant is not under its key")


def test_another_table_uses_the_master_key(place: Place) -> None:
    other = {"footer_key": "footer", "column_keys": {"acme-key": ["x"]}, "unlisted_columns": "plaintext"}
    place.document["tables"]["other"] = other
    place.document["master_keys"]["acme-key"] = "prod/acme"
    # Another name of the same key is refused before any file is read.
    assert place.erase("--yes", "acme").exit_code == 2
    del place.document["master_keys"]["acme-key"]
    other["column_keys"] = {"prod/acme": ["x"]}
    refused(place, "prod/acme")
    other["column_keys"] = {"prod/{region}": ["x"]}
    other["key_values"] = {"region": {"from": "argument", "pattern": "[a-z]+"}}
    refused(place, "can mean the same master key")
    # Azure ignores case.
    other["column_keys"] = {"PROD/{region}": ["x"]}
    refused(place, "can mean the same master key")
    other["column_keys"] = {"prod/{region}": ["x"]}
    other["key_values"] = {"region": {"from": "argument", "pattern": "eu-[a-z]+"}}
    assert place.erase("--dry-run").exit_code == 0
    # The same template is the same tenant.
    other["column_keys"] = {"tenant-{tenant}": ["x"]}
    other["key_values"] = {"tenant": {"from": "argument", "pattern": "[a-z]+"}}
    done = place.erase("--dry-run")
    assert done.exit_code == 0 and "files of other tables" in done.stdout


def test_a_file_that_cannot_be_checked_may_need_the_key(place: Place) -> None:
    hidden = place.data / "tenant=bolt" / "_old.parquet"
    (file,) = (place.data / "tenant=bolt").iterdir()
    hidden.write_bytes(file.read_bytes())
    refused(place, "unknown")
    assert place.erase("--yes", "acme", "--ignore-skipped").exit_code == 0
    assert place.read("bolt") == ["b@x"]


def test_two_templates_give_one_key_to_two_values(place: Place) -> None:
    place.document["master_keys"] = {"tenant-{tenant}": "prod/{tenant}", "note-{tenant}": "prod/bo{tenant}"}
    place.table["column_keys"] = {"tenant-{tenant}": ["email"], "note-{tenant}": ["note"]}
    place.keystore.create_key("prod/bobolt")
    # The key of the notes of `lt`, whose files may be elsewhere.
    done = place.erase("--yes", "bolt", tenant="bolt")
    assert done.exit_code == 1 and "'note-{tenant}' of table 'events' can mean the same" in done.stdout
    assert place.keys() >= ALL_KEYS


@pytest.mark.parametrize("name", ["keystore.json", "events/tenant=bolt/part-0.parquet"])
def test_a_certificate_replaces_no_file(place: Place, name: str) -> None:
    before = (place.folder / name).read_bytes()
    done = place.erase("--yes", "acme", "--certificate", str(place.folder / name))
    assert done.exit_code == 2 and "exists already" in done.stderr
    assert (place.folder / name).read_bytes() == before and place.keys() == ALL_KEYS


def test_a_kms_has_two_names(place: Place) -> None:
    kms = place.document["kms"]
    place.document["kms"] = {"one": kms, "two": kms | {"path": "./keystore.json"}}
    of_tenants, footer = {"kms": "one", "id": "prod/{tenant}"}, {"kms": "one", "id": "footer"}
    place.document["master_keys"] = {"tenant-{tenant}": of_tenants, "footer": footer}
    used = {"two::prod/acme": ["email"], "footer": ["note"]}
    other = {"footer_key": "footer", "column_keys": used, "plaintext_columns": ["day", "tenant"]}
    place.document["tables"]["other"] = other
    refused(place, "'two::prod/acme', which is the same master key")
    with place.tools() as tools:
        path = place.data / "tenant=bolt" / "b.parquet"
        tools.write_table(DATA, path, table_name="other")
    del place.document["tables"]["other"]
    refused(place, "files of another tenant are under the same master key")


def test_another_master_key_of_the_same_name_wrapped_the_keys(place: Place) -> None:
    backup = place.keystore.path.read_bytes()
    place.keystore.destroy_key("prod/acme")
    place.keystore.create_key("prod/acme")
    refused(place, "'prod/acme' does not unwrap keys of some files")
    place.keystore.path.write_bytes(backup)
    assert place.read("acme") == ["a@x"]


def test_wrong_values(place: Place) -> None:
    assert place.erase("--yes", "zeta", tenant="zeta").exit_code == 2, "the KMS has no such key"
    assert place.erase("--yes", "ACME", tenant="ACME").exit_code == 2, "the pattern refuses it"
    runner = CliRunner()
    for where in ("acme", "region=eu", "tenant="):
        config = str(place.save())
        done = runner.invoke(app, ["erase", str(place.data), "--config", config, "--where", where])
        assert done.exit_code == 2, done.output
    place.table.update(column_keys={"shared": ["email"], "footer": ["note"]}, key_values={})
    assert place.erase("--yes", "acme").exit_code == 2
    assert place.keys() == ALL_KEYS


# --- status, cancellation, and misbehaving KMSs ---


def test_status_follows_the_deletion(place: Place) -> None:
    before = place.erase("--status", "--json")
    assert before.exit_code == 1 and json.loads(before.stdout)["keys"][0]["state"] == "usable"
    assert place.erase("--cancel").exit_code == 2
    place.erase("--yes", "acme")
    after = place.erase("--status", "--json")
    assert after.exit_code == 0 and json.loads(after.stdout)["keys"][0]["state"] == "deleted"
    done = place.erase("--cancel")
    assert done.exit_code == 2 and "no deletion to cancel" in done.stderr
    assert place.erase("--status", "--cancel").exit_code == 2


class Stubborn(InMemoryKms):
    """Reports that a key is deleted, and unwraps with it; or cannot be reached after the deletion."""

    unreachable = False
    deleted = False

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> Any:
        self.deleted = True
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> Any:
        from parquet_keytools.kms.client import KeyDeletion

        return (
            KeyDeletion(master_key_id, "deleted") if self.deleted else super()._key_deletion_state(master_key_id)
        )

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        if self.deleted and self.unreachable:
            raise KmsUnavailableError
        return super()._unwrap(wrapped_key, master_key_id)


@pytest.mark.parametrize("unreachable", [False, True])
def test_what_is_no_proof(tmp_path: Path, unreachable: bool) -> None:
    kms = Stubborn({"footer": None, "prod/acme": None, "prod/bolt": None})
    kms.unreachable = unreachable
    document = Place(tmp_path).document
    del document["kms"]
    tools = Keytools.from_mapping(document, kms=kms)
    tools.write_dataset(DATA, tmp_path / "d", partitioning=["tenant"])
    erasure = tools.erasure(tmp_path / "d", {"tenant": "acme"})
    pauses: list[float] = []
    erasure.sleep = pauses.append
    made = erasure.run(erasure.plan())
    assert not made.proof.obtained and made.proof.reason
    assert made.proof.unreachable is unreachable
    assert bool(pauses) is not unreachable
    assert any("NOT obtained" in line for line in made.lines())
    check_certificate(made.to_dict(), None)


def test_nothing_is_deleted_if_the_kms_does_not_say_who_asks(tmp_path: Path) -> None:
    class Silent(InMemoryKms):
        def _caller_identity(self) -> Any:
            raise KmsUnavailableError

    document = Place(tmp_path).document
    del document["kms"]
    kms = Silent({"footer": None, "prod/acme": None, "prod/bolt": None})
    tools = Keytools.from_mapping(document, kms=kms)
    tools.write_dataset(DATA, tmp_path / "d", partitioning=["tenant"])
    erasure = tools.erasure(tmp_path / "d", {"tenant": "acme"})
    plan = erasure.plan()
    with pytest.raises(KmsUnavailableError):
        erasure.run(plan)
    assert "prod/acme" in kms.master_key_ids()


def test_the_proof_is_by_a_client_without_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    unwrap_many = KeystoreKms._unwrap_many
    known: dict[tuple[int, UnwrapRequest], Any] = {}

    def remembered(self: KeystoreKms, requests: Sequence[UnwrapRequest]) -> list[Any]:
        """Repeat this client's earlier answer."""
        missing = [request for request in requests if (id(self), request) not in known]
        for request, answer in zip(missing, unwrap_many(self, missing) if missing else [], strict=True):
            known[id(self), request] = answer
        return [known[id(self), request] for request in requests]

    monkeypatch.setattr(KeystoreKms, "_unwrap_many", remembered)
    with place.tools() as tools:
        assert tools.read_table(place.data).num_rows == 2
        erasure = tools.erasure(place.data, {"tenant": "acme"})
        erasure.sleep = lambda _: None
        assert erasure.run(erasure.plan()).proof.obtained


def test_a_key_that_was_disabled_before_cannot_be_compared_with_the_files(place: Place) -> None:
    Keystore(place.keystore.path, place.passphrase).set_enabled("prod/acme", False)
    done = place.erase("--dry-run")
    assert done.exit_code == 0, done.output
    assert (
        "whether a master key that was disabled before is the one that wrapped the keys: prod/acme" in done.stdout
    )
