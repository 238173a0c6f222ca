"""`erase` killed at each step: the repeated command ends with the key deleted, and a complete certificate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from crash_points import WRITES, Crasher, Ended, Job
from rotation_case import new_keystore, passphrase

from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.kms.keystore_file import Keystore

DATA = pa.table({"tenant": ["acme", "bolt"], "email": ["a@x", "b@x"]})
KEYS = ("footer", "prod/acme", "prod/bolt")


@pytest.fixture(scope="module")
def crasher() -> Iterator[Crasher]:
    made = Crasher()
    yield made
    made.close()


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "keystore.json").write_bytes(new_keystore(KEYS))
    (folder / "keystore.json").chmod(0o600)
    (folder / "passphrase").write_bytes(passphrase().reveal())
    (folder / "passphrase").chmod(0o600)
    document = {
        "version": 1,
        "kms": {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"},
        "master_keys": {"tenant-{tenant}": "prod/{tenant}"},
        "tables": {
            "events": {
                "footer_key": "footer",
                "column_keys": {"tenant-{tenant}": ["email"]},
                "key_values": {"tenant": {"from": "partition", "pattern": "[a-z]+"}},
                "plaintext_columns": ["tenant"],
            }
        },
    }
    (folder / "keytools.yaml").write_text(yaml.safe_dump(document))
    with Keytools.from_yaml(folder / "keytools.yaml") as tools:
        tools.write_dataset(DATA, folder / "events", partitioning=["tenant"])
    return folder


def job(folder: Path, point: int = 0, mode: str = "kill") -> Job:
    arguments = ["erase", "events", "--config", "keytools.yaml", "--where", "tenant=acme", "--yes", "acme"]
    arguments[1], arguments[3] = str(folder / "events"), str(folder / "keytools.yaml")
    arguments += ["--certificate", str(folder / "certificate.json")]
    options = {"arguments": arguments}
    return Job("command", str(folder), str(folder / "keystore.json"), {}, options, point=point, mode=mode)


def test_a_run_that_is_killed_continues_when_repeated(crasher: Crasher, tmp_path: Path) -> None:
    template = make(tmp_path / "template")
    whole = crasher.run(job(Path(shutil.copytree(template, tmp_path / "whole"))))
    assert whole.status == 0, whole.text
    names = [name for name, _ in whole.calls]
    # First the keystore, then the certificate, each by a rename.
    assert len(names) >= 6 and sum(name in ("rename", "replace", "link") for name in names) >= 2, whole.calls
    states = set()
    for point, name in enumerate(names, 1):
        # After one call is before the next one.
        modes = ["kill", *(["torn"] if name in WRITES else []), *(["after"] if point == len(names) else [])]
        for mode in modes:
            folder = Path(shutil.copytree(template, tmp_path / f"{mode}-{point}"))
            ended: Ended = crasher.run(job(folder, point, mode))
            if not ended.killed:
                assert mode == "torn" or ended.status == 0
            certificate = folder / "certificate.json"
            gone = "prod/acme" not in Keystore(folder / "keystore.json", passphrase).open().master_keys
            # No certificate without a deletion, and no partial certificate.
            assert gone or not certificate.exists()
            if certificate.exists():
                assert json.loads(certificate.read_text())["proof"]["obtained"]
            states.add((gone, certificate.exists()))
            again = None
            if not certificate.exists():
                again = crasher.run(job(folder))
                assert again.status == 0, again.text
            made = json.loads(certificate.read_text())
            assert made["proof"]["obtained"] and len(made["files"]) == 1
            with Keytools.from_yaml(folder / "keytools.yaml") as tools:
                assert tools.read_table(folder / "events" / "tenant=bolt")["email"].to_pylist() == ["b@x"]
                with pytest.raises(KeytoolsError):
                    tools.read_table(folder / "events" / "tenant=acme")
            if again is not None:
                # The next writer in the folder removes what a killed process left.
                assert not list(folder.glob(".certificate*")) and not list(folder.glob("*.tmp"))
            shutil.rmtree(folder)
    assert states == {(False, False), (True, False), (True, True)}
