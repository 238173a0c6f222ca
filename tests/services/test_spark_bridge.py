"""Spark's own reader and writer with our KMS clients: in one JVM, and workers that fail on a cluster.

test_spark_openbao.py writes and reads on the cluster.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyspark
import pytest
from flights import every_nth_flight
from spark_cluster import PASSPHRASE, VARIABLE, SparkCluster
from spark_driver import MOST_SECONDS, SparkDriver
from spark_jvm import JAVA_OPTIONS

from parquet_keytools import Keytools, load_configuration
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.storage.locations import FileLocation

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

PROGRAM = Path(__file__).with_name("spark_program.py")
YAML = """
version: 1
kms: {type: keystore, path: keystore.json, passphrase: "${PASSPHRASE_OF_THE_SPARK_TESTS}", audit_log: true}
tables:
  flights:
    footer_key: footer
    column_keys: {pii: [tailnum], times: ["*dep_time", "*arr_time", "time_hour"]}
    unlisted_columns: footer_key
    data_key_length_bits: 256
  single:
    footer_key: footer
    column_keys: {pii: [tailnum], times: ["*dep_time", "*arr_time", "time_hour"]}
    unlisted_columns: plaintext
    double_wrapping: false
  # They share the KEKs of flights.
  few: {footer_key: footer, column_keys: {pii: [tailnum]}, unlisted_columns: footer_key, data_key_length_bits: 256}
  nested:
    footer_key: footer
    column_keys: {pii: [tags, m.key_value.value, s.a], times: [l.list.element.x]}
    unlisted_columns: plaintext
    data_key_length_bits: 256
  odd:
    footer_key: footer
    column_keys: {pii: ["a b", "größe 大"]}
    unlisted_columns: footer_key
    data_key_length_bits: 256
  ctr: {footer_key: footer, column_keys: {pii: [tailnum]}, unlisted_columns: plaintext, algorithm: AES_GCM_CTR_V1}
  ctr_signed: {footer_key: footer, column_keys: {pii: [tailnum]}, algorithm: AES_GCM_CTR_V1,
    unlisted_columns: plaintext, plaintext_footer: true}
  # Not stored: a reader has to supply it.
  prefix:
    footer_key: footer
    column_keys: {pii: [tailnum]}
    unlisted_columns: plaintext
    aad_prefix: "p/{file_name}"
    store_aad_prefix: false
"""
MASTER_KEYS = ("footer", "pii", "times")

# In one JVM, Spark does not retry tasks.
ON_THE_CLUSTER = pytest.mark.parametrize("place", ["cluster"], indirect=True)
IN_ONE_JVM = pytest.mark.parametrize("place", ["one JVM"], indirect=True)


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    return every_nth_flight(20)


class Place:
    """A folder with keystore, configuration and data; and the Spark that uses it."""

    def __init__(self, folder: Path, flights: pa.Table, driver: SparkDriver, cluster: SparkCluster | None) -> None:
        self.folder = folder
        self.driver = driver
        self.cluster = cluster
        self.keystore = Keystore.create(
            folder / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
        )
        for name in MASTER_KEYS:
            self.keystore.create_key(name)
        for name in ("events", "local", "no"):
            (folder / name).mkdir()
        (folder / "flights.yaml").write_text(YAML)
        (folder / "other.yaml").write_text(YAML.replace("data_key_length_bits: 256", "data_key_length_bits: 128"))
        (folder / "shipped.yaml").write_text(YAML.replace("keystore.json", str(folder / "keystore.json")))
        self.keytools = Keytools.from_yaml(folder / "flights.yaml")
        pq.write_table(flights, folder / "plain.parquet", row_group_size=20_000)
        pq.write_table(flights, folder / "no" / "plain.parquet")
        self.keytools.write_dataset(flights, folder / "dataset", table_name="flights")
        for name, table_name in (
            ("modules", "flights"),
            ("ctr", "ctr"),
            ("ctr-signed", "ctr_signed"),
            ("prefix", "prefix"),
        ):
            (folder / name).mkdir()
            self.keytools.encrypt_file(
                folder / "plain.parquet", folder / name / "part.parquet", table_name=table_name
            )

    def run(self, *parts: str, **arguments: Any) -> dict[str, Any]:
        """Run parts of the program in a separate session, or in the session that is kept for equal jobs."""
        found: dict[str, Any] = self.driver.do(**self.job(*parts, **arguments))
        return found

    def submit(self, *parts: str, **arguments: Any) -> dict[str, Any]:
        """Run parts of the program by spark-submit."""
        done = subprocess.run(
            [
                Path(pyspark.__file__).parent / "bin" / "spark-submit",
                PROGRAM,
                json.dumps(self.job(*parts, **arguments), default=str),
            ],
            capture_output=True,
            text=True,
            cwd=self.folder,
            # It would use the program named python3.
            env={**os.environ, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": JAVA_OPTIONS},
            timeout=MOST_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def job(self, *parts: str, settings: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
        master = self.cluster.url if self.cluster else "local[2]"
        return {
            "kind": "bridge",
            "master": master,
            "folder": self.folder,
            "parts": parts,
            "settings": settings or {},
            **arguments,
        }


@pytest.fixture(scope="module", params=["one JVM", "cluster"])
def place(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    flights: pa.Table,
    spark_driver: SparkDriver,
) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, PASSPHRASE)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        cluster = request.getfixturevalue("spark_cluster") if request.param == "cluster" else None
        yield Place(tmp_path_factory.mktemp("spark-bridge"), flights, spark_driver, cluster)


@pytest.fixture(scope="module")
def results(place: Place) -> dict[str, Any]:
    """The results of one session in one JVM."""
    before = len(place.driver.output)
    found = place.run("write", "read", "refused_writes", "plaintext", "ways_to_write")
    return found | {"output": place.driver.output[before:]}


def assert_same_rows(keytools: Keytools, folder: Path, table_name: str, flights: pa.Table) -> None:
    """Every row exists once, with all its values."""
    found = keytools.read_table(folder, table_name=table_name)
    order = [(name, "ascending") for name in ("time_hour", "carrier", "flight")]
    back = found.select(flights.column_names).cast(flights.schema).sort_by(order)
    assert back.equals(flights.sort_by(order))


def expected_rows(flights: pa.Table) -> list[list[Any]]:
    chosen = flights.filter((pc.field("distance") > 2500) & (pc.field("month") == 3))
    return sorted(([row["flight"], row["tailnum"]] for row in chosen.to_pylist()), key=lambda row: str(tuple(row)))


@IN_ONE_JVM
def test_spark_reads_what_spark_and_keytools_wrote(results: dict[str, Any], flights: pa.Table) -> None:
    expected = expected_rows(flights)
    assert len(expected) > 20
    for writer in ("spark", "dataset", "modules"):
        assert results["read"][writer]["rows"] == expected, writer
        assert results["read"][writer]["total"] == flights.num_rows
    assert results["read"]["everything"] == results["read"]["plain"]


@IN_ONE_JVM
def test_filters_and_projection_reach_the_reader(results: dict[str, Any]) -> None:
    for writer in ("spark", "dataset", "modules"):
        plan = results["read"][writer]["plan"]
        assert "GreaterThan(distance,2500" in re.search(r"PushedFilters: \[(.*?)\]", plan)[1]  # type: ignore[index]
        schema = re.search(r"ReadSchema: struct<(.*?)>", plan)[1]  # type: ignore[index]
        assert {part.partition(":")[0] for part in schema.split(",")} - {"month"} == {
            "distance",
            "flight",
            "tailnum",
        }


@IN_ONE_JVM
def test_keytools_reads_what_spark_wrote(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    folder = place.folder / "spark"
    assert {path.name for path in folder.glob("month=*")} == {f"month={month}" for month in range(1, 13)}
    assert_same_rows(place.keytools, folder, "flights", flights)
    dataset = place.keytools.dataset(folder, columns=["flight", "tailnum"], table_name="flights")
    rows = dataset.to_table(columns=["flight", "tailnum"], filter=pc.field("month") == 3)
    assert rows.num_rows == pc.sum(pc.equal(flights["month"], 3)).as_py()
    report = place.keytools.verify_folder(folder, table_name="flights")
    assert report.conforms, report


@IN_ONE_JVM
def test_polars_reads_what_spark_wrote(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    path = next((place.folder / "spark" / "month=3").glob("*.parquet"))
    service = KeyService(load_configuration(place.folder / "flights.yaml"), None, time.monotonic)
    (opened,) = service.open_files([FileLocation.resolve(path, None)], "flights")
    decryption = pl.ParquetDecryptionProperties(
        footer_key=opened.retriever.footer_dek(opened.footer.key_metadata).reveal(),
        column_keys={".".join(leaf): dek.reveal() for leaf, dek in opened.deks.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = pl.read_parquet(path, decryption=decryption, hive_partitioning=False)
    assert frame.height > 0 and set(frame["tailnum"].drop_nulls()) <= set(flights["tailnum"].to_pylist())


@IN_ONE_JVM
@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        ("without options", "would be written in plaintext. Give the write .options"),
        ("a new column", "new are [ssn]"),
        ("a column less", "missing are [year]"),
        ("of another configuration", "made by another configuration than the one that the session has"),
        ("V2 pages", "parquet-java leaves the levels of V2 data pages in plaintext"),
        ("external", "External key material may be left behind"),
        ("by hand", "were not made by parquet-keytools"),
        ("partitioned unannounced", "missing are [month]"),
        ("a key column as partition", "'tailnum' would be in the names of folders"),
    ],
)
def test_nothing_is_written_in_plaintext_in_silence(
    place: Place, results: dict[str, Any], attempt: str, text: str
) -> None:
    assert text in results["refused_writes"][attempt]
    assert not list((place.folder / "refused").rglob("part-*.parquet"))


@IN_ONE_JVM
def test_all_of_sparks_ways_to_write_encrypt(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    found = results["ways_to_write"]
    for name in ("partitions", "merged", "tables", "grown", "streams", "nested", "odd"):
        expected, there = found[name]
        assert there == expected, name
    written = [
        *(place.folder / "ways").rglob("part-*.parquet"),
        *(place.folder / "warehouse").rglob("part-*.parquet"),
    ]
    assert len(written) > 20
    assert {path.read_bytes()[:4] for path in written} == {b"PARE"}
    for table_name in ("nested", "odd"):
        report = place.keytools.verify_folder(place.folder / "ways" / table_name, table_name=table_name)
        assert report.conforms, report
    # Plaintext values would show in the files, or in the files beside them.
    values = {value.encode() for value in flights.filter(pc.field("day") == 15)["tailnum"].to_pylist() if value}
    beside = [path for name in ("ways", "warehouse", "checkpoints") for path in (place.folder / name).rglob("*")]
    content = b"".join(path.read_bytes() for path in beside if path.is_file())
    assert not [value for value in values if value in content]


@IN_ONE_JVM
@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        ("a table without options", "would be written in plaintext"),
        ("a stream without options", "would be written in plaintext"),
        ("summary", "A summary file would show the statistics of encrypted columns in plaintext"),
        ("ignoreCorruptFiles", "would leave out, in silence, files that somebody changed"),
        ("spark.sql.files.ignoreCorruptFiles", "would leave out, in silence, files that somebody changed"),
    ],
)
def test_what_spark_would_do_in_silence_fails(results: dict[str, Any], attempt: str, text: str) -> None:
    assert text in results["ways_to_write"][attempt]


@IN_ONE_JVM
def test_plaintext_files_are_read_where_they_are_meant(results: dict[str, Any]) -> None:
    found = results["plaintext"]
    assert "no error" not in (found["rejected"], found["schema"])
    assert found["meant"] == 10


@IN_ONE_JVM
def test_files_of_aes_ctr_are_rejected_where_the_configuration_says_so(
    results: dict[str, Any], flights: pa.Table
) -> None:
    found = results["plaintext"]
    assert "part.parquet says AES_GCM_CTR_V1" in found["ctr"]
    assert "part.parquet says AES_GCM_CTR_V1" in found["ctr, plaintext footer"]
    assert found["ctr, allowed"] == found["gcm"] == flights.num_rows


@IN_ONE_JVM
def test_a_file_must_have_the_aad_prefix_that_is_expected(results: dict[str, Any], flights: pa.Table) -> None:
    found = results["plaintext"]
    assert found["prefix"] == found["prefix of the table alone"] == flights.num_rows
    assert "is not authentic with the AAD prefix that is expected" in found["another prefix"]
    assert "an AAD prefix is expected, and the file was written without one" in found["no prefix"]


def kms_calls(log: str) -> dict[str, int]:
    """Return how many keys a worker's audit log names."""
    return {
        f"{name} keys": len(re.findall(rf"parquet_keytools\.audit: operation='{name}' ", log))
        for name in ("wrap", "unwrap")
    }


@IN_ONE_JVM
def test_kms_calls_do_not_grow_with_files(place: Place, results: dict[str, Any]) -> None:
    assert len(list((place.folder / "spark").rglob("*.parquet"))) >= 24
    assert len(results["kms_workers"]) == 1
    counts = kms_calls(results["output"])
    # A KEK for each master key; a reader unwraps each KEK once: of Spark's writer, and Keytools' of each length.
    # Refused writes make no requests.
    assert counts["wrap keys"] == len(MASTER_KEYS), counts
    assert counts["unwrap keys"] <= 4 * len(MASTER_KEYS), counts


def ends(is_so: Callable[[], bool]) -> bool:
    """Return whether the condition holds within half a minute: on a busy machine, processes end slowly."""
    end = time.monotonic() + 30
    while not is_so() and time.monotonic() < end:
        time.sleep(0.1)
    return is_so()


def shipped(place: Place) -> dict[str, Any]:
    """Options of a job whose configuration comes as one of Spark's files."""
    return {"file_on_nodes": "shipped.yaml", "settings": {"spark.files": str(place.folder / "shipped.yaml")}}


@pytest.fixture(scope="module")
def failing(place: Place) -> dict[str, Any]:
    """Options of the jobs that share a session: of its first workers, two fail and one hangs."""
    marks = place.folder / "marks"
    marks.mkdir()
    python = place.folder / "python"
    failing = f'for n in 1 2; do mkdir "{marks}/$n" 2>/dev/null && exit 3; done'
    hanging = f'mkdir "{marks}/3" 2>/dev/null && exec sleep 600'
    python.write_text(f'#!/bin/sh\n{failing}\n{hanging}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = shipped(place)
    options["settings"]["spark.hadoop.parquet.keytools.worker.timeout.seconds"] = "10"
    return {"python": str(python), "keep": True, **options}


@pytest.fixture(scope="module")
def survived(place: Place, failing: dict[str, Any]) -> dict[str, Any]:
    """The results of the session while workers failed, and what the driver wrote meanwhile."""
    before = len(place.driver.output)
    return place.run("many_requests", **failing) | {"output": place.driver.output[before:]}


@ON_THE_CLUSTER
def test_a_worker_that_fails_or_hangs_fails_the_task_which_is_tried_again(
    place: Place, flights: pa.Table, survived: dict[str, Any]
) -> None:
    assert survived["many_requests"]["rows"] == 6 * flights.num_rows
    for number in range(6):
        assert_same_rows(place.keytools, place.folder / f"single-{number}", "single", flights)
    assert len(list((place.folder / "marks").iterdir())) == 3
    assert "Lost task" in survived["output"]
    assert "ended with exit status 3" in survived["output"]
    assert "The KMS gave no answer in 10 seconds" in survived["output"]


@ON_THE_CLUSTER
@pytest.mark.usefixtures("survived")
def test_a_worker_that_is_killed_is_replaced(place: Place, flights: pa.Table, failing: dict[str, Any]) -> None:
    assert place.cluster is not None
    for number in range(6):
        shutil.rmtree(place.folder / f"single-{number}", ignore_errors=True)
    place.driver.begin(**place.job("many_requests", **failing))
    killed: set[int] = set()
    over = threading.Event()

    def kill() -> None:
        assert place.cluster is not None
        seen: dict[int, float] = {}
        while not over.wait(0.05):
            for worker in place.cluster.kms_workers() - killed:
                # It is serving by now; and the cluster survives a few kills only.
                if time.monotonic() - seen.setdefault(worker, time.monotonic()) > 1.0 and len(killed) < 4:
                    os.kill(worker, signal.SIGKILL)
                    killed.add(worker)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = place.driver.result()["many_requests"]
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 2
    assert found["rows"] == 6 * flights.num_rows
    assert found["tailnums"] == len(set(flights["tailnum"].to_pylist()))
    for number in range(6):
        assert_same_rows(place.keytools, place.folder / f"single-{number}", "single", flights)
    logs = "".join(place.cluster.executor_logs().values())
    assert all(f"The KMS worker process {worker} ended with exit status 137" in logs for worker in killed)


def test_columns_of_a_refused_key(request: pytest.FixtureRequest, place: Place, flights: pa.Table) -> None:
    """In one JVM by spark-submit, whose JVM runs already: it gets our jar, and has no cached keys."""
    if place.cluster is None:
        request.getfixturevalue("results")
    else:
        # Under keys that the session has not unwrapped yet.
        shutil.copytree(place.folder / "dataset", place.folder / "spark")
    place.keystore.set_enabled("pii", False)
    try:
        if place.cluster is None:
            job = place.submit("refused_columns", **shipped(place))
        else:
            job = place.run("refused_columns", **request.getfixturevalue("failing"))
    finally:
        place.keystore.set_enabled("pii", True)
    found = job["refused_columns"]
    assert found["others"] == sorted([row[:1] for row in expected_rows(flights)], key=lambda row: str(tuple(row)))
    text = "KeyAccessDeniedException: keystore: unwrap with master key 'pii': the master key is disabled"
    assert text in found["selected"] and text in found["filtered"]
    assert "wrap with master key 'pii': the master key is disabled" in found["written"]
    # The driver checks before anything is deleted.
    assert "wrap with master key 'pii': the master key is disabled" in found["overwritten"]
    assert found["kept"]
    if place.cluster is None:
        # No worker outlives the JVM.
        assert job["kms_workers"]
        for worker in job["kms_workers"]:
            assert ends(lambda worker=worker: not Path(f"/proc/{worker}").exists())  # type: ignore[misc]


def test_nothing_secret_comes_out(request: pytest.FixtureRequest, place: Place) -> None:
    """Must be the last test: it reads what earlier tests logged."""
    results = request.getfixturevalue("survived" if place.cluster else "results")
    opened = place.keystore.open()
    canaries = {PASSPHRASE}
    for name in MASTER_KEYS:
        key = opened.key(name, opened.master_key(name, "test").versions[-1]).reveal()
        canaries |= {base64.b64encode(key).decode(), key.hex(), str(list(key))}
    texts = {"settings": json.dumps(results["settings"]), "output": place.driver.output}
    texts |= place.cluster.all_logs() if place.cluster else {}
    logs = place.folder.glob("events/**/*")
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in logs if path.is_file()}
    assert sum("parquet.keytools.configuration" in text for text in texts.values()) >= 2, "the event log is there"
    for name, value in results["settings"].items():
        if name.endswith("parquet.keytools.configuration"):
            texts["configuration"] = base64.b64decode(value).decode()
    # The cluster got it as a file.
    assert ("shipped.yaml" if place.cluster else f"${{{VARIABLE}}}") in texts["configuration"]
    assert [name for name, text in texts.items() if any(canary in text for canary in canaries)] == []
