"""Spark's own reader and writer, and a pipeline, on a cluster whose executors use an HSM and Azure Key Vault.

The HSM is SoftHSM, and Azure is a fake over HTTPS; see azure_fake.py. Secrets are in files. Executors get the
location of the HSM's token, and the certificate to trust, from `spark.executorEnv`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure_fake import FakeVault, fake_vault
from flights import every_nth_flight
from softhsm import PIN, SoftHsm, needs_softhsm
from spark_cluster import HOSTS, SparkCluster
from spark_driver import SparkDriver
from test_spark_bridge import kms_calls

from parquet_keytools import Keytools
from parquet_keytools.kms.pkcs11 import Pkcs11Kms, Pkcs11Settings

pytestmark = [
    needs_softhsm,
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

TABLES = ("hsm", "azure")
POD_TOKEN = "token-of-the-pod-not-to-be-shown"
SETTINGS = {
    # Both executors get tasks: the job waits for both, and Spark does not wait for the executor that has the data.
    "spark.locality.wait": "0s",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


class Run:
    """The results of a session on the cluster, with the bridge, and then with pipelines."""

    def __init__(self, folder: Path, vault: FakeVault, patch: pytest.MonkeyPatch, cluster: SparkCluster) -> None:
        self.folder, self.flights = folder, every_nth_flight(50)
        settings = SoftHsm(folder, patch).settings(pin=None, pin_file=str(folder / "pin"))
        for name, secret in {"pin": PIN, "pod-token": POD_TOKEN}.items():
            (folder / name).touch(0o600)
            (folder / name).write_text(secret)
        azure = {"type": "azure", "vault_url": vault.url, "login": "workload_identity"}
        azure |= {"tenant_id": "a-tenant", "client_id": "an-application"}
        table = {
            "footer_key": "{}-footer",
            "column_keys": {"{}-pii": ["tailnum"]},
            "unlisted_columns": "footer_key",
        }
        document = {
            "version": 1,
            "kms": {"hsm": settings | {"audit_log": True}, "azure": azure | {"audit_log": True}},
            "master_keys": {
                f"{kms}-{key}": {"kms": kms, "id": key} for kms in TABLES for key in ("footer", "pii")
            },
            "tables": {name: json.loads(json.dumps(table).replace("{}", name)) for name in TABLES},
        }
        self.configuration = folder / "flights.yaml"
        self.configuration.write_text(json.dumps(document))
        environment = {
            **vault.environment_of_entra(),
            "SOFTHSM2_CONF": os.environ["SOFTHSM2_CONF"],
            "AZURE_FEDERATED_TOKEN_FILE": str(folder / "pod-token"),
        }
        for name, value in environment.items():
            patch.setenv(name, value)
        for name in ("events", "local", "spark", "driver", *(f"keytools/{name}" for name in TABLES)):
            (folder / name).mkdir(parents=True)
        vault.accepts = lambda form: form.get("client_assertion") == POD_TOKEN
        with Pkcs11Kms(Pkcs11Settings.model_validate(settings)) as hsm:
            for key in ("footer", "pii"):
                hsm.create_key(key)
            self.keytools = Keytools.from_yaml(self.configuration)
            pq.write_table(self.flights, folder / "plain.parquet", row_group_size=1000)
            for name in TABLES:
                self.keytools.write_table(
                    self.flights, folder / "keytools" / name / "part.parquet", table_name=name
                )
            driver = SparkDriver(
                Path(__file__).with_name("spark_jobs.py"), folder / "driver", {"PYSPARK_PYTHON": sys.executable}
            )
            of_executors = {f"spark.executorEnv.{name}": value for name, value in environment.items()}
            settings = SETTINGS | of_executors
            job = {"kind": "bridge", "master": cluster.url, "folder": folder, "settings": settings, "keep": True}
            with contextlib.closing(driver):
                self.results = driver.do(parts=["each_table"], **job)
                self.read_of_spark = {
                    name: in_order(self.keytools.read_table(folder / "spark" / name, table_name=name))
                    for name in TABLES
                }
                # The old versions, which wrapped all keys so far, are disabled after the rotation.
                for key in ("footer", "pii"):
                    hsm.rotate_key(key)
                    vault.keys[key].add_version()
                self.rotations = driver.do(parts=["rotate_tables"], **job)["rotate_tables"]
                for key in ("footer", "pii"):
                    hsm.set_enabled(key, False, 1)
                    vault.keys[key].versions[0].enabled = False
                self.output = driver.output
        self.logs = cluster.executor_logs(self.results["settings"]["spark.app.id"])
        self.cluster_logs = cluster.all_logs()


def in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in ("time_hour", "carrier", "flight")])


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, spark_driver: SparkDriver, spark_cluster: SparkCluster
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("spark-hsm-and-azure")
    # The session that other tests share would keep the executors.
    spark_driver.do(kind="stop")
    with pytest.MonkeyPatch.context() as patch, fake_vault(folder / "vault", "footer") as vault:
        vault.add_key("pii", "oct-HSM")
        yield Run(folder, vault, patch, spark_cluster)


def test_spark_reads_what_spark_and_keytools_wrote(run: Run) -> None:
    found = dict(run.results["each_table"])
    expected = found.pop("plain")
    assert expected[1] == run.flights.num_rows
    assert found == {f"{writer} {name}": expected for name in TABLES for writer in ("spark", "keytools")}
    # Keys were wrapped and unwrapped in both executors, in their own Python processes.
    assert {name.partition("/")[0] for name in run.logs} == set(HOSTS)
    for log in run.logs.values():
        counts = kms_calls(log)
        assert counts["wrap keys"] and counts["unwrap keys"], counts


@pytest.mark.parametrize("name", TABLES)
def test_keytools_reads_what_spark_wrote_and_rotated(run: Run, name: str) -> None:
    written = run.read_of_spark[name]
    assert written.equals(in_order(run.flights).cast(written.schema))
    rotation = run.rotations[name]
    assert rotation["succeeded"], rotation
    assert set(rotation["outcomes"]) == {"rotated"} and rotation["outcomes"]["rotated"] >= 4
    # A configuration that was not used before: no key is cached.
    again = run.folder / f"{name}.yaml"
    again.write_text(run.configuration.read_text() + "\n")
    with Keytools.from_yaml(again) as keytools:
        assert in_order(keytools.read_table(run.folder / "spark" / name, table_name=name)).equals(written)
        assert keytools.verify_folder(run.folder / "spark" / name, table_name=name).conforms


def test_no_secret_comes_out(run: Run) -> None:
    texts = {"settings": json.dumps(run.results["settings"]), "output": run.output} | run.cluster_logs
    logs = (run.folder / "events").glob("**/*")
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in logs if path.is_file()}
    assert sum("parquet.keytools.configuration" in text for text in texts.values()) >= 2, "the event log is there"
    assert not [name for name, text in texts.items() for secret in (PIN, POD_TOKEN) if secret in text]
