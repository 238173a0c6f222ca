"""Encrypted Iceberg tables in the Hive metastore that comes with Spark."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from iceberg_case import Lake, rows
from iceberg_jvm import SPARK_CLASS_PATH, SPARK_JARS, compile_java, java
from spark_jvm import TRUSTING_OPTIONS

from parquet_keytools.errors import NotEncryptedError, OutputError
from parquet_keytools.iceberg import create_table, load_table

pytest.importorskip("thrift", reason="the package thrift is not installed")
from pyiceberg.catalog.hive import HiveCatalog

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(300),
]

PROGRAM = Path(__file__).with_name("MetastoreProgram.java")
SETTINGS = {
    "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
    "datanucleus.schema.autoCreateAll": "true",
    "datanucleus.connectionPoolingType": "HikariCP",
    "hive.metastore.schema.verification": "false",
    "hive.async.log.enabled": "false",
}
# JDK modules that an old Hive accesses.
OPENED = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "net", "util")]
MOST_SECONDS = 120


@pytest.fixture(scope="module")
def metastore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a metastore; yields its address."""
    folder = tmp_path_factory.mktemp("metastore")
    entries = {**SETTINGS, "hive.metastore.warehouse.dir": f"file://{folder}/warehouse"}
    text = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in entries.items()
    )
    (folder / "hive-site.xml").write_text(f"<configuration>{text}</configuration>")
    compile_java([PROGRAM], folder, sorted(SPARK_JARS.glob("*.jar")))
    class_path = os.pathsep.join(map(str, [*SPARK_CLASS_PATH, folder]))
    port = free_port()
    log = folder / "metastore.log"
    options = [*shlex.split(TRUSTING_OPTIONS), *OPENED, f"-Djava.io.tmpdir={folder}", "-cp", class_path]
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [java(), *options, PROGRAM.stem, "-p", str(port)], cwd=folder, stdout=stream, stderr=stream
        ) as process,
    ):
        try:
            end = time.monotonic() + MOST_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
                    time.sleep(0.1)
            yield f"thrift://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake(tmp_path_factory.mktemp("lake"))


def hive_of(lake: Lake, uri: str) -> HiveCatalog:
    properties = {name: value for name, value in lake.catalog().properties.items() if name != "uri"}
    return HiveCatalog("hive", uri=uri, **properties)


def test_a_table_is_made_written_by_two_read_rotated_and_verified(metastore: str, lake: Lake) -> None:
    catalog = hive_of(lake, metastore)
    catalog.create_namespace("db", {"location": f"file://{lake.warehouse}/db"})
    first = create_table(catalog, "db.people", rows(0, 1).schema, encryption_key="pii")
    first.append(rows(0, 5))
    second = load_table(hive_of(lake, metastore), "db.people")
    first.append(rows(5, 10))
    second.append(rows(10, 15))
    second.delete("id < 2")
    assert len(second.rotate()) == 1
    plain = hive_of(lake, metastore).load_table("db.people")
    assert sorted(plain.scan().to_arrow()["id"].to_pylist()) == list(range(2, 15))
    past = plain.scan(snapshot_id=plain.metadata.snapshots[1].snapshot_id).to_arrow()
    assert sorted(past["id"].to_pylist()) == list(range(10))
    with pytest.raises(NotEncryptedError, match="load_table"):
        plain.append(rows(15, 16))
    assert lake.findings(plain.metadata_location) == []
    lake.assert_no_plaintext()


def test_a_table_whose_metadata_java_has_hashed_is_left_to_java(metastore: str, lake: Lake) -> None:
    catalog = hive_of(lake, metastore)
    catalog.create_namespace("java", {"location": f"file://{lake.warehouse}/java"})
    table = create_table(catalog, "java.people", rows(0, 1).schema, encryption_key="pii")
    table.append(rows(0, 5))
    with catalog._client as client:
        entry = client.get_table(dbname="java", tbl_name="people")
        entry.parameters["metadata_hash"] = "aGFzaA=="
        client.alter_table(dbname="java", tbl_name="people", new_tbl=entry)
    with pytest.raises(OutputError, match="only Iceberg's Java library renews"):
        table.append(rows(5, 6))
    assert load_table(hive_of(lake, metastore), "java.people").scan().to_arrow().num_rows == 5
