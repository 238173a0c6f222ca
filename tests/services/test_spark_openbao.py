"""Spark's own reader and writer on a cluster whose executors call OpenBao, each with its own token."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flights import every_nth_flight
from openbao import OpenBao
from spark_cluster import HOSTS, TOKEN_FILE, SparkCluster
from spark_driver import SparkDriver
from test_spark_bridge import ends, expected_rows, kms_calls

from parquet_keytools import Keytools

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

YAML = """
version: 1
kms: {{type: vault, url: "{url}", token_file: "${{{variable}}}", audit_log: true}}
tables:
  flights:
    footer_key: footer
    column_keys: {{pii: [tailnum], times: ["*dep_time", "*arr_time", "time_hour"]}}
    unlisted_columns: footer_key
"""
MASTER_KEYS = ("footer", "pii", "times")
DRIVER = "driver"


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    return every_nth_flight(20)


class Run:
    """The results of one session on the cluster, and its requests to OpenBao."""

    def __init__(
        self, folder: Path, flights: pa.Table, server: OpenBao, driver: SparkDriver, cluster: SparkCluster
    ) -> None:
        self.folder = folder
        self.tokens = make_tokens(server)
        files = {host: cluster.folder / f"token-{host}" for host in HOSTS} | {DRIVER: driver.folder / "token"}
        for name, token in self.tokens.items():
            files[name].touch(0o600)
            files[name].write_text(token)
        for name in ("events", "local"):
            (folder / name).mkdir()
        (folder / "flights.yaml").write_text(YAML.format(url=server.url, variable=TOKEN_FILE))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_FILE, str(files[DRIVER]))
            self.keytools = Keytools.from_yaml(folder / "flights.yaml")
            pq.write_table(flights, folder / "plain.parquet", row_group_size=5000)
            self.keytools.write_dataset(flights, folder / "dataset")
            (folder / "modules").mkdir()
            self.keytools.encrypt_file(folder / "plain.parquet", folder / "modules" / "part.parquet")
            before = server.requests_of_tokens()
            self.results, self.output = run_program(driver, cluster, folder)
        for path in files.values():
            path.unlink()
        self.logs = cluster.executor_logs(self.results["settings"]["spark.app.id"])
        self.cluster_logs = cluster.all_logs()
        self.requests = server.requests_of_tokens() - before
        self.cluster = cluster


def make_tokens(server: OpenBao) -> dict[str, str]:
    """Create master keys, and a token for the driver and each host that can use them and nothing else."""
    for name in MASTER_KEYS:
        server.create_key(name)
    allowed = {"encrypt": ["update"], "decrypt": ["update"], "keys": ["read"]}
    policy = server.write_policy(
        {f"transit/{operation}/{name}": may for operation, may in allowed.items() for name in MASTER_KEYS}
    )
    return {name: server.create_token(policy, display_name=name) for name in (DRIVER, *HOSTS)}


def run_program(driver: SparkDriver, cluster: SparkCluster, folder: Path) -> tuple[dict[str, Any], str]:
    # Both executors get tasks of the write: the job waits for both, and not for the one that has the data.
    settings = {
        "spark.locality.wait": "0s",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.shuffle.reduceLocality.enabled": "false",
    }
    job = {"master": cluster.url, "folder": folder, "parts": ["write", "read"], "settings": settings}
    return driver.do(kind="bridge", **job), driver.output


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    flights: pa.Table,
    spark_driver: SparkDriver,
    spark_cluster: SparkCluster,
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("spark-openbao")
    (folder / "openbao").mkdir()
    server = OpenBao(folder / "openbao", in_memory=True, audit=True)
    try:
        server.start()
        yield Run(folder, flights, server, spark_driver, spark_cluster)
    finally:
        server.stop()


def test_spark_reads_what_spark_and_keytools_wrote(run: Run, flights: pa.Table) -> None:
    expected = expected_rows(flights)
    assert len(expected) > 20
    for writer in ("spark", "dataset", "modules"):
        assert run.results["read"][writer]["rows"] == expected, writer
        assert run.results["read"][writer]["total"] == flights.num_rows
    assert run.results["read"]["everything"] == run.results["read"]["plain"]


def test_keytools_reads_what_spark_wrote(run: Run, flights: pa.Table) -> None:
    folder = run.folder / "spark"
    assert {path.name for path in folder.glob("month=*")} == {f"month={month}" for month in range(1, 13)}
    table = run.keytools.read_table(folder)
    order = [(name, "ascending") for name in ("time_hour", "carrier", "flight")]
    names = [name for name in flights.column_names if name != "month"]
    back = table.sort_by(order).select(names)
    assert back.equals(flights.sort_by(order).select(names).cast(back.schema))
    assert run.keytools.verify_folder(folder).conforms


def test_each_executor_asks_openbao_for_few_keys(run: Run) -> None:
    assert len(list((run.folder / "spark").rglob("*.parquet"))) >= 24
    logs = {name.partition("/")[0]: log for name, log in run.logs.items()}
    assert set(logs) == set(HOSTS) and len(run.logs) == len(HOSTS)
    for host, log in logs.items():
        asked, counts = requests_of(run, host), kms_calls(log)
        # As with a keystore: a KEK for each master key and writer (the executors and Keytools).
        assert counts["wrap keys"] == len(MASTER_KEYS), counts
        assert counts["unwrap keys"] <= (len(HOSTS) + 3) * len(MASTER_KEYS), counts
        # The worker's audit log agrees with OpenBao's; a request may hold several keys.
        assert asked["encrypt"] == counts["wrap keys"], (counts, asked)
        assert 0 < asked["decrypt"] <= counts["unwrap keys"], (counts, asked)
    # The driver has each key wrapped before the only write. Executors read the footers for schemas, too.
    by_driver = requests_of(run, DRIVER)
    assert by_driver["encrypt"] == len(MASTER_KEYS) and not by_driver["decrypt"], by_driver


def requests_of(run: Run, name: str) -> Counter[str]:
    """Return operation -> number of requests for keys, with the token of the driver or a host."""
    asked = Counter[str]()
    for (token, path), number in run.requests.items():
        # OpenBao replaces dots by hyphens.
        if token == f"token-{name.replace('.', '-')}" and path.startswith("transit/"):
            asked[path.split("/")[1]] += number
    return asked


def test_no_token_comes_out(run: Run) -> None:
    texts = {"settings": json.dumps(run.results["settings"]), "output": run.output}
    logs = run.folder.glob("events/**/*")
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in logs if path.is_file()}
    texts |= run.cluster_logs
    assert sum("parquet.keytools.configuration" in text for text in texts.values()) >= 2, "the event log is there"
    found = [(name, whose) for name, text in texts.items() for whose, token in run.tokens.items() if token in text]
    assert found == []


def test_no_worker_is_left(run: Run) -> None:
    assert ends(lambda: not run.cluster.kms_workers())
