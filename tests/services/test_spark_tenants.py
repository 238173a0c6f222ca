"""Keys by template in Spark: each tenant's files are under its own key, written and read on a cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aws_fake import ACCOUNT, REGION, FakeKms, serve
from spark_cluster import PASSPHRASE, VARIABLE, SparkCluster
from spark_driver import SparkDriver
from test_spark_bridge import kms_calls

from parquet_keytools import Keytools
from parquet_keytools.errors import TableMismatchError
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
]

TENANTS = [f"t{number:02}" for number in range(50)]
ODD = "a b=c"  # Spark escapes it in folder names.
TABLE = """
    footer_key: footer
    column_keys: {"tenant-{tenant}": [email]}
    plaintext_columns: [day, tenant]
    key_values: {tenant: {from: """
YAML = f"""
version: 1
kms: {{type: keystore, path: keystore.json, passphrase: "${{{VARIABLE}}}"}}
master_keys: {{"tenant-{{tenant}}": "prod/{{tenant}}"}}
tables:
  events:{TABLE}partition, pattern: "[a-z0-9-]{{1,8}}|{ODD}|__.*"}}}}
  given:{TABLE}argument, pattern: "[a-z0-9-]{{1,8}}"}}}}
  valued:{TABLE}column, pattern: "[a-z0-9-]{{1,8}}"}}}}
  of t02:
    footer_key: footer
    column_keys: {{prod/t02: [email]}}
    plaintext_columns: [day, tenant]
"""


class Lake:
    """A folder with keystore and configuration, and the Spark that uses it: the cluster, or one JVM."""

    def __init__(self, folder: Path, driver: SparkDriver, cluster: SparkCluster) -> None:
        self.folder, self._driver, self._cluster = folder, driver, cluster
        self.keystore = Keystore.create(
            folder / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
        )
        for name in ("footer", *(f"prod/{tenant}" for tenant in (*TENANTS, ODD))):
            self.keystore.create_key(name)
        self.config = folder / "c.yaml"
        self.config.write_text(YAML)
        self.tools = Keytools.from_yaml(self.config)

    def on_the_cluster(self, *calls: Any) -> dict[str, Any]:
        """Make calls in a session whose executors have no cached keys."""
        return self._do(self._cluster.url, *calls)

    def in_one_jvm(self, *calls: Any) -> list[Any]:
        found: list[Any] = self._do("local[2]", *calls)["found"]
        return found

    def _do(self, master: str, *calls: Any) -> dict[str, Any]:
        job = {"master": master, "folder": self.folder, "config": self.config}
        found: dict[str, Any] = self._driver.do(kind="tenants", calls=calls, **job)
        return found


@pytest.fixture(scope="module")
def lake(
    tmp_path_factory: pytest.TempPathFactory, spark_driver: SparkDriver, spark_cluster: SparkCluster
) -> Iterator[Lake]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, PASSPHRASE)
        yield Lake(tmp_path_factory.mktemp("tenants"), spark_driver, spark_cluster)


@pytest.fixture(scope="module")
def events(lake: Lake) -> dict[str, Any]:
    """The results of a session that wrote and read all tenants."""
    return lake.on_the_cluster(("write", "events", {"tenants": [*TENANTS, ODD]}), ("read", "events", {}))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def email_key_of(lake: Lake, path: Path) -> str:
    keys = {column.path: column.key for column in lake.tools.inspect_file(path).columns}
    key = keys["email"]
    assert key is not None and key.name is not None
    # parquet-java's list of columns does not allow all characters.
    return unquote(key.name)


def assert_under_own_keys(lake: Lake, name: str) -> None:
    files = files_of(lake.folder / name)
    assert files
    for path in files:
        assert path.read_bytes()[:4] == b"PARE" and b"canary" not in path.read_bytes()
        assert email_key_of(lake, path) == f"prod/{unquote(path.parent.name.partition('=')[2])}"


def test_each_partition_is_under_the_key_of_its_value(
    lake: Lake, spark_cluster: SparkCluster, events: dict[str, Any]
) -> None:
    expected = [[tenant, 4] for tenant in sorted([*TENANTS, ODD])]
    assert events["found"] == ["written", expected]
    assert len(files_of(lake.folder / "events")) > 2 * len(TENANTS)
    assert_under_own_keys(lake, "events")
    back = lake.tools.read_table(lake.folder / "events", table_name="events")
    assert back.num_rows == 4 * (len(TENANTS) + 1)
    assert lake.tools.verify_folder(lake.folder / "events", table_name="events").conforms
    # One call for each tenant, and the footer, and each of two executors.
    for log in spark_cluster.executor_logs(events["application"]).values():
        assert kms_calls(log)["wrap keys"] <= len(TENANTS) + 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": ({"tenants": ["t01", "T02"]}, "the pattern refuses the value 'T02' of tenant"),
    "dynamic overwrite": (
        {"tenants": ["t02", "T02"], "change": {"partitionOverwriteMode": "dynamic"}},
        "the pattern refuses the value 'T02' of tenant",
    ),
    "null": ({"tenants": ["t01", None]}, "the pattern refuses the value '__HIVE_DEFAULT_PARTITION__' of tenant"),
    "no key": ({"tenants": ["t01", "unknown"]}, "prod/unknown"),
    "no partition": ({"tenants": ["t01"], "by": ["day"]}, "the write has no value of tenant"),
    "differs": ({"tenants": ["t01"], "key_values": {"tenant": "t02"}}, "differ: 't01', 't02'"),
    "argument": ({"tenants": ["t01"], "key_values": {"tenant": "T02"}}, "the pattern refuses the value 'T02'"),
    "no argument": ({"tenants": ["t01"], "by": ["day"], "table": "given"}, "the write has no value of tenant"),
    "argument without key": (
        {"tenants": ["t01"], "by": ["day"], "table": "given", "key_values": {"tenant": "unknown"}},
        "prod/unknown",
    ),
    "stock options": (
        {"tenants": ["t01"], "change": {"parquet.encryption.column.keys": "prod/t02:email"}},
        "The options of this write were made by another configuration",
    ),
}
# Either the driver refuses the write, before Spark empties the target; or Spark replaces files only at the end.
KEEPS_TARGET = ("no partition", "no argument", "argument without key", "stock options", "dynamic overwrite")


@pytest.fixture(scope="module")
def session(lake: Lake, events: dict[str, Any]) -> dict[str, Any]:
    """The results of one session in one JVM: each way to write, and reads of files that are in the wrong place."""
    shutil.copytree(lake.folder / "events" / "tenant=t01", lake.folder / "moved" / "tenant=t01")
    shutil.copytree(lake.folder / "events" / "tenant=t02", lake.folder / "moved" / "tenant=t02")
    shutil.copy(files_of(lake.folder / "moved" / "tenant=t01")[0], lake.folder / "moved/tenant=t02/part-9.parquet")
    shutil.copytree(lake.folder / "events" / "tenant=t01", lake.folder / "nowhere")
    for name, table in (("own", "valued"), ("others", "of t02")):
        rows = pa.table({"tenant": ["t01"], "email": ["t01-1@canary"], "day": [1]})
        (lake.folder / "valued" / name).mkdir(parents=True)
        lake.tools.write_table(rows, lake.folder / "valued" / name / "x.parquet", table_name=table)
    given = {"table": "given", "tenants": ["t07"], "by": ["day"], "key_values": {"tenant": "t07"}}
    calls = {
        # The JVM then has the file's keys cached: they match the table, but the folder is wrong.
        "moved own": ("read", "moved", {"where": "tenant = 't01'"}),
        "moved others": ("read", "moved", {"where": "tenant = 't02'"}),
        "nowhere": ("read", "nowhere", {}),
        "valued own": ("read", "valued/own", {"table": "valued"}),
        "valued others": ("read", "valued/others", {"table": "valued"}),
        "one folder": ("write", "static/tenant=t03", {"tenants": ["t03"], "by": ["day"]}),
        "given": ("write", "given", given),
        "read given": ("read", "given", {"table": "given"}),
        "table": ("table", "catalog", {"tenants": ["t01", "t02"], "insert": ["t02", "t03"]}),
        "elsewhere": ("elsewhere", "catalog", "t05"),
        "stream": ("stream", "streamed", {"tenants": ["t01", "t02"]}),
        "read stream": ("read", "streamed", {}),
        "overwritten before": ("write", "overwritten", {"tenants": ["t01"]}),
    }
    for name, (options, _) in REFUSED.items():
        keeps = name in KEEPS_TARGET
        path = "overwritten" if keeps else f"refused/{name}"
        calls[name] = ("write", path, options | {"mode": "overwrite" if keeps else "append"})
    return dict(zip(calls, lake.in_one_jvm(*calls.values()), strict=True))


def test_a_file_of_another_tenant_is_refused(lake: Lake, session: dict[str, Any]) -> None:
    assert session["moved own"] == [["t01", 4]]
    others = session["moved others"]
    assert "part-9.parquet" in others and "'prod/t01'" in others and "'prod/t02'" in others
    assert "the key 'tenant-{tenant}' of one value" in session["nowhere"]
    with pytest.raises(TableMismatchError):
        lake.tools.read_table(lake.folder / "moved", table_name="events")


def test_a_file_is_under_the_key_of_its_column(session: dict[str, Any]) -> None:
    assert session["valued own"] == [["t01", 1]]
    others = session["valued others"]
    assert "x.parquet" in others and "it has another value" in others and "the keys of 't02'" in others


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_without_one_allowed_value_is_refused(lake: Lake, session: dict[str, Any], name: str) -> None:
    assert REFUSED[name][1] in session[name]
    # A task may have committed the file of another tenant.
    for path in (lake.folder / "refused").rglob("*"):
        assert path.is_dir() or b"canary" not in path.read_bytes()
    assert files_of(lake.folder / "overwritten")


def test_other_ways_to_write(lake: Lake, session: dict[str, Any]) -> None:
    for name in ("one folder", "given", "table", "stream", "overwritten before"):
        assert session[name] == "written", name
    for name in ("catalog", "streamed", "overwritten"):
        assert_under_own_keys(lake, name)
    assert {email_key_of(lake, path) for path in files_of(lake.folder / "static")} == {"prod/t03"}
    assert {email_key_of(lake, path) for path in files_of(lake.folder / "given")} == {"prod/t07"}
    assert "has no value of tenant" in session["elsewhere"] and not files_of(lake.folder / "elsewhere")
    assert session["read given"] == [["t07", 4]]
    assert session["read stream"] == [["t01", 4], ["t02", 4]]
    assert lake.tools.read_table(lake.folder / "given", table_name="given").num_rows == 4
    assert lake.tools.read_table(lake.folder / "catalog", table_name="events").num_rows == 10


def test_the_data_of_one_tenant_becomes_unreadable(lake: Lake, events: dict[str, Any]) -> None:
    lake.keystore.set_enabled("prod/t07", False)
    try:
        others, own, everything, days = lake.on_the_cluster(
            ("read", "events", {"where": "tenant <> 't07'"}),
            ("read", "events", {"where": "tenant = 't07'"}),
            ("read", "events", {}),
            ("write", "disabled", {"tenants": ["t07"]}),
        )["found"]
    finally:
        lake.keystore.set_enabled("prod/t07", True)
    assert others == [[tenant, 4] for tenant in sorted([*TENANTS, ODD]) if tenant != "t07"]
    for found in (own, everything, days):
        assert "prod/t07" in found
    assert not files_of(lake.folder / "disabled")


ARN = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/"
FOREIGN = """
version: 1
kms: {{type: aws, region: {region}, endpoint_url: "{url}"}}
master_keys: {{footer: alias/footer, "tenant-{{tenant}}": "{arn}{{tenant}}"}}
tables:
  given:{table}argument, pattern: "[a-z0-9-]{{1,8}}"}}}}
"""


def test_a_new_worker_trusts_the_keys_of_values(
    tmp_path: Path, spark_driver: SparkDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ARNs may name keys of other accounts: only a compared file makes a process trust them."""
    for name, value in spark_driver.environment.items():
        monkeypatch.setenv(name, value)
    fake = FakeKms()
    fake.add_key("footer")
    fake.add_key(key_id="t01")
    config = tmp_path / "c.yaml"
    with serve(fake) as url:
        config.write_text(FOREIGN.format(region=REGION, url=url, arn=ARN, table=TABLE))
        for name in ("first", "second"):
            # Each has its own KEKs, which the JVM has not cached.
            rows = pa.table({"tenant": ["t01"], "email": ["t01-1@canary"], "day": [1]})
            with Keytools.from_yaml(config) as tools:
                tools.write_table(rows, tmp_path / f"{name}.parquet", key_values={"tenant": "t01"})
        given = {"table": "given"}
        calls = [("read", "first.parquet", given), ("kill",), ("read", "second.parquet", given)]
        job = {"master": "local[1]", "folder": tmp_path, "config": config}
        found = spark_driver.do(kind="tenants", calls=calls, **job)["found"]
    assert found[0] == found[2] == [["t01", 1]] and found[1] >= 1


@pytest.fixture(scope="module")
def pipelines(lake: Lake, spark_driver: SparkDriver) -> dict[str, Any]:
    """The results of the pipelines on the files of tenants."""
    names = [*TENANTS[:20], ODD]
    rows = pa.table({"tenant": names * 4, "email": [f"{name}@canary" for name in names * 4], "day": [1] * 84})
    plain, target, config = lake.folder / "plain", lake.folder / "piped", lake.config
    for part in range(3):
        pq.write_to_dataset(rows, str(plain), ["tenant"], basename_template=f"{part}-{{i}}.parquet")
    wrong = lake.folder / "wrong"
    for folder in ("tenant=t01", "tenant=T02", "x"):
        shutil.copytree(plain / "tenant=t01", wrong / folder)
    of_values = lake.folder / "plain by column"
    of_values.mkdir()
    for name, tenants in {"t01": ["t01", "t01"], "two": ["t01", "t02"]}.items():
        pq.write_table(rows.slice(0, 2).set_column(0, "tenant", pa.array(tenants)), of_values / f"{name}.parquet")
    named = {"table_name": "events"}
    calls = {
        "encrypt": ("encrypt", [plain, target, config], named),
        "wrong": ("encrypt", [wrong, lake.folder / "of wrong", config], named),
        "by column": ("encrypt", [of_values, lake.folder / "by column", config], {"table_name": "valued"}),
        "verify": ("verify", [target, config], named),
        "rotate": ("rotate", [target, config], {**named, "new_keks": True}),
        "rekey": ("rekey", [target, config], named),
        "keys": ("keys", [target, config], named),
        "decrypt": ("decrypt", [target, lake.folder / "back", config], named),
    }
    job = {"kind": "pipelines", "master": "local[2]", "folder": lake.folder, "settings": {}}
    return dict(zip(calls, spark_driver.do(calls=list(calls.values()), **job), strict=True))


def test_pipelines_keep_each_tenant_under_its_key(lake: Lake, pipelines: dict[str, Any]) -> None:
    for name in ("encrypt", "verify", "rotate", "rekey", "keys", "decrypt"):
        assert pipelines[name].get("succeeded"), pipelines[name]
    assert_under_own_keys(lake, "piped")
    assert len(files_of(lake.folder / "piped")) == 3 * 21
    assert lake.tools.read_table(lake.folder / "piped", table_name="events").num_rows == 3 * 84
    assert len({key["master_key"] for row in pipelines["keys"]["rows"] for key in row["keys"]}) == 22
    # One call for each tenant, and the footer, of each of two workers, and some leeway.
    assert pipelines["encrypt"]["kms_keys"]["wrap"] <= 22 * 2 + 4


def test_pipelines_refuse_files_without_one_value(lake: Lake, pipelines: dict[str, Any]) -> None:
    rows = {Path(row["path"]).parent.name: row for row in pipelines["wrong"]["rows"]}
    assert not pipelines["wrong"]["succeeded"]
    assert "the pattern refuses the value 'T02'" in rows["tenant=T02"]["error"]
    assert "has no value of tenant" in rows["x"]["error"]
    assert {path.parent.name for path in files_of(lake.folder / "of wrong")} == {"tenant=t01"}
    rows = {Path(row["path"]).name: row for row in pipelines["by column"]["rows"]}
    assert "column 'tenant' has several values" in rows["two.parquet"]["error"]
    (only,) = files_of(lake.folder / "by column")
    assert email_key_of(lake, only) == "prod/t01"
