"""Every way in which Spark writes and reads Parquet: the tables of docs/spark.md show the results."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from free_ports import free_port
from spark_driver import SparkDriver
from spark_ways import FOLDERS, READS, WRITES, canaries

from parquet_keytools import Keytools

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"
YAML = """
version: 1
kms: {type: in_memory, keys: {footer: AAECAwQFBgcICQoLDA0ODw==, pii: AAECAwQFBgcICQoLDA0OAQ==,
  other: AAECAwQFBgcICQoLDA0OAg==}}
tables:
  few: {footer_key: footer, column_keys: {pii: [name]}, unlisted_columns: footer_key}
  foreign: {footer_key: other, column_keys: {other: [name]}, unlisted_columns: footer_key}
  forged: {footer_key: footer, column_keys: {other: [name]}, unlisted_columns: footer_key}
"""
CLASS_IS_MISSING = "parquet_keytools.KeytoolsCryptoFactory"
SESSIONS = [
    f"{session}, {given}" for session in ("configured", "not configured") for given in ("with options", "without")
]


def prepare(folder: Path) -> None:
    """Make configurations, and files to read."""
    for name in ("events", "local", "ways"):
        (folder / name).mkdir(parents=True)
    # Files with keys in them are private.
    for name, text in (("c.yaml", YAML), ("other.yaml", YAML.replace("few:", "less:"))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    (folder / "numbers").mkdir()
    (folder / "numbers" / "ids.csv").write_text("".join(f"{number}\n" for number in range(20)))
    tools = Keytools.from_yaml(folder / "c.yaml")
    ids = pa.array(range(20), pa.int64())
    table = pa.table(
        {"id": ids, "name": [f"n{number}" for number in range(20)], "part": pa.array([0] * 20, pa.int32())}
    )
    names = dict(zip(FOLDERS, ["few", None, "few", "foreign", "forged"], strict=True))
    for kind, table_name in names.items():
        path = folder / "inputs" / kind / "part-1.parquet"
        path.parent.mkdir(parents=True)
        if table_name is None:
            pq.write_table(table, path)
        else:
            tools.write_table(table, path, table_name=table_name)
    pq.write_table(table, folder / "inputs" / "both" / "part-2.parquet")


def run(driver: SparkDriver, folder: Path, *, configured: bool, later: bool = False) -> dict[str, Any]:
    prepare(folder)
    job = {"kind": "ways", "folder": folder, "configured": configured, "later": later, "port": free_port()}
    found: dict[str, Any] = driver.do(**job)
    (folder / "results.json").write_text(json.dumps(found, indent=1))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark-ways")


@pytest.fixture(scope="module")
def bare(folder: Path, spark_driver: SparkDriver) -> dict[str, Any]:
    """The results of a session that was not configured, in a JVM that never had our jar."""
    spark_driver.close()
    return run(spark_driver, folder / "bare", configured=False)


@pytest.fixture(scope="module")
def later(folder: Path, spark_driver: SparkDriver, bare: dict[str, Any]) -> dict[str, Any]:
    """The results of a session that ran before it was configured, in a JVM that had not had our jar until then.

    It comes after `bare`, whose JVM no other test can use.
    """
    spark_driver.close()
    return run(spark_driver, folder / "later", configured=False, later=True)


@pytest.fixture(scope="module")
def configured(folder: Path, spark_driver: SparkDriver, later: dict[str, Any]) -> dict[str, Any]:
    """The results of a session made with `configure`, in a JVM that never failed to find our classes."""
    return run(spark_driver, folder / "configured", configured=True)


def documented(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table under a heading of the document."""
    section = DOCUMENT.read_text().split(f"### {heading}\n")[1]
    lines = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


def written(configured: dict[str, Any], bare: dict[str, Any]) -> dict[str, list[str]]:
    """Return the result of each way to write, in the order of `SESSIONS`."""
    return {
        way: [
            session["writes"][f"{way}|{given}"]["outcome"]
            for session in (configured, bare)
            for given in ("with options", "without options")
        ]
        for way in WRITES
    }


def test_every_way_to_write_is_documented(configured: dict[str, Any], bare: dict[str, Any]) -> None:
    assert written(configured, bare) == documented("Ways to write")


def read(session: dict[str, Any], way: str, kind: str, given: str) -> str:
    return "read" if session["reads"][f"{way}|{kind}|{given}"] == rows_of(kind) else "refused"


def rows_of(kind: str) -> int:
    return 40 if kind == "both" else 20


@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_is_documented(configured: dict[str, Any], bare: dict[str, Any], way: str) -> None:
    found = {
        kind: [
            read(session, way, kind, given)
            for session in (configured, bare)
            for given in ("with options", "without options")
        ]
        for kind in FOLDERS
    }
    assert found == documented("Ways to read")
    assert way in " ".join(DOCUMENT.read_text().split("### Ways to read\n")[1].split())


def test_nothing_that_should_be_encrypted_is_plaintext_anywhere(
    folder: Path, configured: dict[str, Any], bare: dict[str, Any]
) -> None:
    """In the event log, which is written to the end, and in all other files there."""
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert any("events" in path.parts and path.stat().st_size > 10_000 for path in left)
    contents = {path: path.read_bytes() for path in left}
    for kind, session in ((True, configured), (False, bare)):
        for attempt, found in session["writes"].items():
            label = f"{kind}-{attempt.replace('|', '-')}".replace("'", "").replace("`", "")
            values = canaries(label)
            holders = [str(path) for path, content in contents.items() if any(v in content for v in values)]
            if found["outcome"] != "plaintext":
                assert holders == [], attempt
            assert not [path for path in holders if "events" in Path(path).parts], attempt


def test_without_our_jar_the_class_is_missing(bare: dict[str, Any]) -> None:
    refused = {way: found for way, found in bare["writes"].items() if found["outcome"] == "refused"}
    # Spark does not support append by the V2 writer to such a table.
    others = {way for way, found in refused.items() if CLASS_IS_MISSING not in found["error"]}
    assert others == {f"`df.writeTo(...).append`|{given}" for given in ("with options", "without options")}
    assert len(refused) > 20


def is_error(found: object) -> bool:
    """Return whether reading raised an error, and returned no number of rows."""
    return isinstance(found, str)


def test_what_a_configured_session_says(configured: dict[str, Any]) -> None:
    for attempt, found in configured["writes"].items():
        if attempt.endswith("|without options") and found["outcome"] == "refused" and "append`" not in attempt:
            assert "would be written in plaintext" in found["error"], attempt
    reads = configured["reads"]
    # A stream's error is mostly its plan.
    for way in READS.keys() - {"the Parquet source of a stream"}:
        assert is_error(reads[f"{way}|both|with options"]), way
        for given in ("with options", "without options"):
            assert is_error(reads[f"{way}|plaintext|{given}"]), way
        assert "is read without a table, and the configuration has 3" in reads[f"{way}|encrypted|without options"]
        foreign = reads[f"{way}|of another table|with options"]
        assert all(text in foreign for text in ("of another table/part-1.parquet", "'few'", "'other'", "'footer'"))
        forged = reads[f"{way}|column of another key|with options"]
        assert all(
            text in forged for text in ("column of another key/part-1.parquet", "'name'", "'other'", "'pii'")
        )
    assert configured["meant"] == 20


def test_an_insert_into_a_table_of_a_configured_session(
    folder: Path, configured: dict[str, Any], bare: dict[str, Any]
) -> None:
    assert bare["ddl"] == configured["ddl"]
    assert "KeytoolsCryptoFactory" in configured["ddl"]
    assert bare["insert"]["outcome"] == "refused"
    assert CLASS_IS_MISSING in bare["insert"]["error"]
    parts = list((folder / "configured" / "warehouse" / "stored").glob("*.parquet"))
    assert parts and {path.read_bytes()[-4:] for path in parts} == {b"PARE"}


def test_a_session_that_runs_is_configured(later: dict[str, Any]) -> None:
    assert later["returned"] is True
    assert later["with options"]["outcome"] == "encrypted"
    assert later["read"] == 20
    assert "would be written in plaintext" in later["overwritten"]
    assert later["kept"] is True
    assert later["without options"]["outcome"] == "refused"
    assert "would be written in plaintext" in later["without options"]["error"]
    assert is_error(later["plaintext"])
    assert "Spark is already running with another configuration" in later["other configuration"]


def test_a_session_that_looked_for_our_classes_is_started_again(bare: dict[str, Any]) -> None:
    assert "looked for them before they were there. Start Spark again" in bare["configured too late"]


def test_a_server_of_spark_connect_has_our_settings_or_is_refused(
    configured: dict[str, Any], bare: dict[str, Any]
) -> None:
    assert configured["connect"] == 3
    assert "the server of Spark Connect was started without our settings" in bare["connect"]
