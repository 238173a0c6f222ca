"""Pipelines over data sets: in one JVM, and on a cluster of two executors, some of which are killed at work."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aws_fake
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from flights import every_nth_flight
from soak import SOAK
from spark_cluster import PASSPHRASE, VARIABLE, SparkCluster
from spark_driver import SparkDriver

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

ROWS_OF_A_FILE = 100
MOVED_TO = "    also_trusted: [new, times]\n"
TABLE = f"""
  flights:
    footer_key: footer
    column_keys: {{pii: [tailnum], times: ["*dep_time", "*arr_time", "time_hour"]}}
    unlisted_columns: footer_key
{MOVED_TO}"""
KEYSTORE = (
    f'version: 1\nkms: {{type: keystore, path: keystore.json, passphrase: "${{{VARIABLE}}}"}}\ntables:{TABLE}'
)
MASTER_KEYS = ("footer", "pii", "times", "new")
MONTHS = range(1, 13)

ON_THE_CLUSTER = pytest.mark.parametrize("place", ["cluster"], indirect=True)
IN_ONE_JVM = pytest.mark.parametrize("place", ["one JVM"], indirect=True)


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    return every_nth_flight(100)


RETRIES = {"spark.task.maxFailures": "8"}
"""The settings of the shared session: executors are killed in it."""


class Place:
    """A folder with keystore, configuration and plaintext data; and the Spark that uses it."""

    def __init__(self, folder: Path, flights: pa.Table, driver: SparkDriver, cluster: SparkCluster | None) -> None:
        self.folder = folder
        self.driver = driver
        self.cluster = cluster
        keystore = Keystore.create(
            folder / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
        )
        for name in MASTER_KEYS:
            keystore.create_key(name)
        self.configuration = folder / "flights.yaml"
        self.configuration.write_text(KEYSTORE)
        self.keytools = Keytools.from_yaml(self.configuration)
        self.plain = folder / "plain"
        write_plain(flights, self.plain)

    def call(self, *calls: Any, **arguments: Any) -> list[dict[str, Any]]:
        """Make calls, `(name, arguments, options)`, in the running session if its settings are the same."""
        self.begin(*calls, **arguments)
        found: list[dict[str, Any]] = self.driver.result()
        return found

    def begin(self, *calls: Any, settings: dict[str, str] | None = None, **arguments: Any) -> None:
        """Start calls; `self.driver.result` waits for their end."""
        master = self.cluster.url if self.cluster else "local[2]"
        job = {"kind": "pipelines", "master": master, "folder": self.folder, "calls": calls}
        self.driver.begin(**job, settings=settings or RETRIES, **arguments)


def write_plain(table: pa.Table, folder: Path) -> None:
    ds.write_dataset(
        table,
        folder,
        format="parquet",
        partitioning=["month"],
        partitioning_flavor="hive",
        basename_template="part-{i}-of-month.parquet",
        max_rows_per_file=ROWS_OF_A_FILE,
        max_rows_per_group=ROWS_OF_A_FILE,
    )
    pq.write_metadata(table.schema, folder / "_common_metadata")
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").write_text("not Parquet")


# Python workers get the same tasks in both: once is enough.
@pytest.fixture(scope="module", params=["one JVM", "cluster"] if SOAK else ["cluster"])
def place(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    flights: pa.Table,
    spark_driver: SparkDriver,
) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        # The driver's environment has it, too.
        for name, value in spark_driver.environment.items():
            patch.setenv(name, value)
        cluster = request.getfixturevalue("spark_cluster") if request.param == "cluster" else None
        yield Place(tmp_path_factory.mktemp("spark-pipelines"), flights, spark_driver, cluster)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def sorted_rows(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in ("time_hour", "carrier", "flight")])


def assert_same(keytools: Keytools, folder: Path, flights: pa.Table) -> None:
    """Every row exists once, no file is in plaintext, and nothing else exists."""
    assert_same_rows(keytools, folder, flights)
    assert not [path for path in folder.rglob(".*") if path.is_file()], "nothing is left behind"


def assert_same_rows(keytools: Keytools, folder: Path, flights: pa.Table) -> None:
    """Every row exists once, with all its values, in the folder of its month; and no file is in plaintext."""
    found = keytools.read_table(folder, table_name="flights").select(flights.column_names)
    assert sorted_rows(found.cast(flights.schema)).equals(sorted_rows(flights))
    assert all(path.read_bytes()[:4] == b"PARE" for path in files_of(folder))


@pytest.fixture(scope="module")
def results(place: Place) -> dict[str, dict[str, Any]]:
    """The results of one session on one data set, step by step."""
    target, config = place.folder / "encrypted", place.configuration
    calls = {
        "encrypt": ("encrypt", [place.plain, target, config], {}),
        "again": ("encrypt", [place.plain, target, config], {}),
        "keys": ("keys", [target, config], {}),
        "verify": ("verify", [target, config], {}),
        "dry run": ("rotate", [target, config], {"moves": {"pii": "new"}, "dry_run": True}),
        "rotate": ("rotate", [target, config], {"moves": {"pii": "new"}}),
        "rotate again": ("rotate", [target, config], {"moves": {"pii": "new"}}),
        "keys after": ("keys", [target, config], {}),
        "rekey": ("rekey", [target, config], {}),
        "verify after": ("verify", [target, config], {}),
        "decrypt": ("decrypt", [target, place.folder / "decrypted", config], {}),
    }
    return dict(zip(calls, place.call(*calls.values()), strict=True))


def test_encrypt_mirrors_the_folder(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    found, target = results["encrypt"], place.folder / "encrypted"
    number = len(files_of(place.plain))
    assert number > 30
    assert found["outcomes"] == {"encrypted": number, "skipped": 2}
    # Eight for each of two cores.
    assert found["tasks"] > 8
    assert {path.relative_to(target) for path in files_of(target)} == {
        path.relative_to(place.plain) for path in files_of(place.plain)
    }
    left = {Path(row["path"]).name: row["detail"] for row in found["rows"] if row["outcome"] == "skipped"}
    assert "statistics in plaintext" in left["_common_metadata"]
    assert left["notes.txt"] == "not a Parquet file"
    assert (target / "_SUCCESS").read_bytes() == b""
    assert not (target / "_common_metadata").exists() and not (target / "notes.txt").exists()
    row = next(row for row in found["rows"] if row["outcome"] == "encrypted")
    used = {key["master_key"]: key["number"] for key in row["keys"]}
    assert used == {"footer": 1, "pii": 1, "times": 5}
    assert row["bytes"] > 0 and row["seconds"] > 0 and row["error"] is None


def test_a_complete_target_is_not_written_to(results: dict[str, Any]) -> None:
    assert results["again"]["raised"] == "OutputError"
    assert "is not empty" in results["again"]["text"]


def test_values_are_the_same_after_all_pipelines(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    target = place.folder / "encrypted"
    assert_same(place.keytools, target, flights)
    rows = place.keytools.dataset(target, table_name="flights").to_table(columns=["flight"])
    assert rows.num_rows == flights.num_rows


def test_kms_calls_do_not_grow_with_files(place: Place, results: dict[str, Any]) -> None:
    workers, number = 2, len(files_of(place.plain))
    # A Python worker that Spark did not reuse calls once more: some leeway.
    assert results["encrypt"]["kms_keys"]["wrap"] <= 3 * 2 * workers < number
    # Each worker proves the KEKs that it meets: of three keys, one from each worker that encrypted.
    assert results["keys"]["kms_keys"]["unwrap"] <= 3 * 2 * 2 * workers
    assert results["verify"]["kms_keys"]["unwrap"] <= 3 * 2 * 2 * workers
    assert results["rekey"]["kms_keys"]["wrap"] <= 3 * 2 * workers


def test_rotate_rewraps_each_distinct_key_once(place: Place, results: dict[str, Any]) -> None:
    number = len(files_of(place.plain))
    keks = {key["kek_id"] for row in results["keys"]["rows"] for key in row["keys"] if key["master_key"] == "pii"}
    assert results["rotate"]["outcomes"] == {"rotated": number}
    assert results["rotate"]["kms_keys"]["rewrap"] == len(keks) <= 4
    assert results["dry run"]["outcomes"] == {"would rotate": number}
    assert "rewrap" not in results["dry run"]["kms_keys"]
    # The files themselves show that no key is left under the old master key.
    assert results["rotate again"]["outcomes"] == {"nothing to rotate": number}
    row = results["rotate"]["rows"][0]
    assert [(key["master_key"], key["new_master_key"], key["number"]) for key in row["keys"]] == [
        ("pii", "new", 1)
    ]


def test_keys_lists_master_keys_and_versions(results: dict[str, Any]) -> None:
    def master_keys(found: dict[str, Any]) -> Counter[str]:
        return Counter(key["master_key"] for row in found["rows"] for key in row["keys"])

    number = len(results["keys"]["rows"])
    assert master_keys(results["keys"]) == {"footer": number, "pii": number, "times": 5 * number}
    assert master_keys(results["keys after"]) == {"footer": number, "new": number, "times": 5 * number}
    key = next(key for key in results["keys"]["rows"][0]["keys"] if key["column"] == "tailnum")
    assert (key["version"], key["wrapping"], key["is_footer"]) == ("1", "double", False)


@pytest.mark.parametrize("name", ["verify", "verify after"])
def test_verify_finds_that_all_conforms(place: Place, results: dict[str, Any], name: str) -> None:
    found = results[name]
    # No AAD prefix is a weakness.
    assert found["verdict"] == "conforms, with weaknesses" and found["succeeded"]
    assert {row["outcome"] for row in found["rows"]} == {"conforms, with weaknesses"}
    broken = {(row["rule"], row["severity"]) for row in found["rules"] if row["outcome"] == "broken"}
    assert all(severity != "violation" for _, severity in broken), broken
    of_data_set = {row["rule"]: row["outcome"] for row in found["rules"] if row["file"].endswith("/encrypted")}
    assert {of_data_set[rule] for rule in ("file-copied", "dek-shared", "nonce-shared", "same-columns")} == {
        "holds"
    }


def test_the_rules_are_those_of_one_machine(place: Place, results: dict[str, Any]) -> None:
    report = place.keytools.verify_folder(place.folder / "encrypted", table_name="flights")
    ours = Counter((row["rule"], row["outcome"]) for row in results["verify after"]["rules"])
    theirs = Counter(
        (result.rule.id, result.outcome.value)
        for part in (*report.files, report)
        for result in part.rules
        for _ in result.findings or [None]
        if result.outcome.value != "not applicable"
    )
    assert ours == theirs


def test_decrypt_gives_the_values_back(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    folder, number = place.folder / "decrypted", len(files_of(place.plain))
    assert results["decrypt"]["outcomes"] == {"decrypted": number}
    assert (folder / "_SUCCESS").exists()
    found = ds.dataset(files_of(folder), partitioning=ds.partitioning(flavor="hive")).to_table()
    found = found.select(flights.column_names).cast(flights.schema)
    assert sorted_rows(found).equals(sorted_rows(flights))


def test_nothing_secret_comes_out(place: Place, results: dict[str, Any]) -> None:
    logs = place.cluster.all_logs() if place.cluster else {}
    assert not [text for text in (place.driver.output, *logs.values()) if PASSPHRASE in text]


@IN_ONE_JVM
def test_master_keys_move_in_every_way(place: Place, flights: pa.Table, tmp_path: Path) -> None:
    some = flights.slice(0, 8 * ROWS_OF_A_FILE)
    write_plain(some, tmp_path / "source")
    base = tmp_path / "base"
    for path in files_of(tmp_path / "source"):
        there = base / path.relative_to(tmp_path / "source")
        there.parent.mkdir(parents=True, exist_ok=True)
        place.keytools.encrypt_file(path, there)
    number = len(files_of(base))
    config = place.configuration
    ways: dict[str, dict[str, Any]] = {
        "moved": {"moves": {"pii": "new", "footer": "times"}},
        "fresh": {"moves": {"pii": "new"}, "only_master_keys": ["pii"], "new_keks": True},
    }
    for way in ways:
        shutil.copytree(base, tmp_path / way)
    calls = {way: ("rotate", [tmp_path / way, config], options) for way, options in ways.items()}
    found = dict(zip(calls, place.call(*calls.values()), strict=True))
    assert all(result.get("outcomes") == {"rotated": number} for result in found.values()), found
    uses = {way: list(place.keytools.key_inventory(tmp_path / way)) for way in ways}
    names = {way: {use.master_key_id for file in files for use in file.uses} for way, files in uses.items()}
    assert names == {
        "moved": {"new", "times"},
        "fresh": {"footer", "new", "times"},
    }
    before = {use.kek_id for file in place.keytools.key_inventory(base) for use in file.uses}
    keks = {way: {use.kek_id for file in files for use in file.uses} for way, files in uses.items()}
    assert keks["moved"] == before
    assert len(keks["fresh"] & before) == 2
    for way in ways:
        assert_same_rows(place.keytools, tmp_path / way, some)


@IN_ONE_JVM
def test_single_failures_are_reported_and_done_later(place: Place, flights: pa.Table, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    some = flights.slice(0, 10 * ROWS_OF_A_FILE)
    write_plain(some, source)
    damaged, good = files_of(source)[0], files_of(source)[0].read_bytes()
    damaged.write_bytes(good[:-30])
    (place.folder / "encrypted-one.parquet").unlink(missing_ok=True)
    other = source / "month=1" / "encrypted.parquet"
    place.keytools.encrypt_file(files_of(source)[1], other)
    (first,) = place.call(("encrypt", [source, target, place.configuration], {}))
    failed = {row["path"]: row["error_class"] for row in first["rows"] if row["outcome"] == "failed"}
    assert failed == {str(damaged): "ParquetFormatError", str(other): "AlreadyEncryptedError"}
    assert not (target / "_SUCCESS").exists() and not first["succeeded"]
    damaged.write_bytes(good)
    other.unlink()
    (again,) = place.call(("encrypt", [source, target, place.configuration], {"skip_existing": True}))
    assert again["outcomes"]["encrypted"] == 1
    assert again["outcomes"]["finished before"] == len(files_of(source)) - 1
    assert (target / "_SUCCESS").exists()
    assert_same(place.keytools, target, some)


@IN_ONE_JVM
def test_a_configuration_that_does_not_work_on_executors_is_one_clear_error(place: Place, tmp_path: Path) -> None:
    config = tmp_path / "flights.yaml"
    config.write_text(KEYSTORE.replace("keystore.json", str(place.folder / "keystore.json")))
    calls = ("encrypt", [place.plain, tmp_path / "target", config], {"file_on_nodes": "/nowhere/flights.yaml"})
    (found,) = place.call(calls)
    assert found["raised"] == "ConfigurationError"
    assert "/nowhere/flights.yaml: there is no such file" in found["text"]


def killer_of(
    victim: Callable[[], set[int]], most: int, mark: Path
) -> tuple[threading.Thread, threading.Event, set[int]]:
    """Kill processes of the cluster a moment after each appears, until the end is signalled.

    Args:
        mark: A file that exists once a process was killed.
    """
    over, killed = threading.Event(), set[int]()

    def kill() -> None:
        seen: dict[int, float] = {}
        while not over.wait(0.05):
            for process in victim() - killed:
                if time.monotonic() - seen.setdefault(process, time.monotonic()) > 0.1 and len(killed) < most:
                    try:
                        os.kill(process, signal.SIGKILL)
                        killed.add(process)
                        mark.touch()
                    except ProcessLookupError:
                        continue

    return threading.Thread(target=kill), over, killed


def children(place: Place, text: str) -> set[int]:
    """Return the processes under the cluster's workers whose command line has this text, and that use CPU."""
    assert place.cluster is not None
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode("latin-1")
            environment = (entry / "environ").read_bytes().decode("latin-1")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if text in command and str(place.cluster.folder) in command + environment + str(
            (entry / "cwd").readlink()
        ):
            found.add(int(entry.name))
    return found


COPIES = range(4)
"""Enough files that a job is writing some of them when an executor is killed; its last task waits for that."""


@pytest.fixture(scope="module")
def copies(place: Place, flights: pa.Table) -> dict[str, Path]:
    """Folders with copies of the same files: `plain` ones, and `encrypted` ones."""
    folders = {name: place.folder / f"copies-{name}" for name in ("plain", "encrypted")}
    for name, folder in folders.items():
        first = folder / f"copy={COPIES[0]}"
        if name == "plain":
            write_plain(flights, first)
            (first / "_common_metadata").unlink()
        else:
            for path in files_of(folders["plain"] / first.name):
                there = first / path.relative_to(folders["plain"] / first.name)
                there.parent.mkdir(parents=True, exist_ok=True)
                place.keytools.encrypt_file(path, there)
        for copy in COPIES[1:]:
            shutil.copytree(first, folder / f"copy={copy}")
    return folders


WORKER, EXECUTOR = "pyspark.daemon", "CoarseGrainedExecutorBackend"
KILLED = [("encrypt", EXECUTOR), ("rekey", WORKER)]
if SOAK:
    KILLED = list(itertools.product(("encrypt", "rotate", "rekey"), (EXECUTOR, WORKER)))


@ON_THE_CLUSTER
@pytest.mark.parametrize(("name", "victim"), KILLED)
def test_an_executor_that_is_killed_costs_nothing(
    place: Place, flights: pa.Table, copies: dict[str, Path], tmp_path: Path, name: str, victim: str
) -> None:
    source, target = copies["plain"], tmp_path / "target"
    number = len(files_of(source))
    before = None
    if name != "encrypt":
        shutil.copytree(copies["encrypted"], target)
        before = {path: path.read_bytes() for path in files_of(target)}
    call = {
        "encrypt": ("encrypt", [source, target, place.configuration], {}),
        "rotate": ("rotate", [target, place.configuration], {"moves": {"pii": "new", "footer": "times"}}),
        "rekey": ("rekey", [target, place.configuration], {}),
    }[name]
    # A new executor is a new JVM.
    most = 2 if victim == WORKER or SOAK else 1
    mark = tmp_path / "killed"
    killer, over, killed = killer_of(lambda: at_work(place, victim, target, before), most, mark)
    place.begin(call, held=mark)
    killer.start()
    try:
        (found,) = place.driver.result()
    finally:
        over.set()
        killer.join()
    assert killed, "the job was over before anything was killed"
    assert found.get("succeeded"), found
    assert len([row for row in found["rows"] if row["outcome"] != "skipped"]) == number
    assert len({row["path"] for row in found["rows"]}) == len(found["rows"])
    assert len(files_of(target)) == number
    if name == "rekey":
        assert all(path.read_bytes() != data for path, data in (before or {}).items())
    for copy in COPIES:
        assert_same_rows(place.keytools, target / f"copy={copy}", flights)
    inventory = list(place.keytools.key_inventory(target))
    used = {use.master_key_id for file in inventory for use in file.uses}
    assert used == ({"new", "times"} if name == "rotate" else {"footer", "pii", "times"})


def at_work(place: Place, victim: str, target: Path, before: dict[Path, bytes] | None) -> set[int]:
    """Return the victims once files are being written."""
    if before is None:
        begun = any(target.rglob("*.parquet"))
    else:
        begun = any(path.read_bytes() != data for path, data in list(before.items())[::7])
    return children(place, victim) if begun else set()


@ON_THE_CLUSTER
def test_copies_of_a_slow_task_lose_and_double_nothing(place: Place, flights: pa.Table, tmp_path: Path) -> None:
    some = flights.slice(0, 24 * ROWS_OF_A_FILE)
    source, target = tmp_path / "source", tmp_path / "target"
    write_plain(some, source)
    number = len(files_of(source))
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.locality.wait": "0s",
    }
    config = place.configuration
    encrypted, rotated = place.call(
        ("encrypt", [source, target, config], {}),
        ("rotate", [target, config], {"moves": {"pii": "new"}}),
        settings=settings,
        slow=str(tmp_path),
    )
    # Both tasks had a faster copy, and no late attempt is still running.
    assert encrypted["at_work"] == rotated["at_work"] == []
    attempts = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {f"{name} {attempt}" for name in ("encrypt", "rotate") for attempt in (0, 1)} <= attempts
    assert encrypted["outcomes"] == {"encrypted": number, "skipped": 2}, encrypted
    assert rotated["outcomes"] == {"rotated": number}, rotated
    for found, folder in ((encrypted, source), (rotated, target)):
        rows = Counter(row["path"] for row in found["rows"] if row["outcome"] != "skipped")
        assert rows == Counter(str(path) for path in files_of(folder))
    assert len(files_of(target)) == number
    assert_same_rows(place.keytools, target, some)
    used = {use.master_key_id for file in place.keytools.key_inventory(target) for use in file.uses}
    assert used == {"footer", "new", "times"}


# The files do not show where tasks ran. This test follows the shared session of pipelines, which it ends.
@ON_THE_CLUSTER
def test_spark_reads_what_the_pipeline_wrote(place: Place, results: dict[str, Any], flights: pa.Table) -> None:
    count, distance, tailnums = place.driver.do(
        kind="read", config=place.configuration, path=place.folder / "encrypted"
    )
    assert count == flights.num_rows
    assert distance == sum(flights["distance"].to_pylist())
    # Spark counts no nulls.
    assert tailnums == len(set(flights["tailnum"].to_pylist()) - {None})


@pytest.fixture
def counting_kms() -> Iterator[tuple[aws_fake.FakeKms, str, list[float]]]:
    fake = aws_fake.FakeKms()
    times: list[float] = []

    def note(operation: str, request: Any, reply: aws_fake.Reply) -> aws_fake.Reply:
        times.append(time.monotonic())
        return reply

    fake.always = note
    with aws_fake.serve(fake) as url:
        yield fake, url, times


@IN_ONE_JVM
def test_the_limits_of_the_kms_hold_for_all_tasks_together(
    place: Place,
    flights: pa.Table,
    counting_kms: tuple[aws_fake.FakeKms, str, list[float]],
    tmp_path: Path,
) -> None:
    fake, url, times = counting_kms
    arns = {name: fake.add_key().arn for name in ("footer", "pii", "times")}
    keys = "".join(f"\n  {name}: {arn}" for name, arn in arns.items())
    config = tmp_path / "aws.yaml"
    config.write_text(
        f"version: 1\nkms: {{type: aws, region: {aws_fake.REGION}, endpoint_url: '{url}', "
        f"max_calls_per_second: 4, max_concurrent_calls: 2}}\nmaster_keys:{keys}\n"
        f"tables:{TABLE.replace(MOVED_TO, '')}    double_wrapping: false\n"
    )
    source = tmp_path / "source"
    write_plain(flights.slice(0, 4 * ROWS_OF_A_FILE), source)
    fake.latency_seconds = 0.05
    (found,) = place.call(("encrypt", [source, tmp_path / "target", config], {}))
    number = len(files_of(source))
    assert found["outcomes"]["encrypted"] == number
    calls = sorted(times)
    # The driver tests each master key before the first task.
    assert len(calls) == fake.counts["Encrypt"] == 7 * number + 3 == found["kms_keys"]["wrap"]
    assert fake.most_at_once <= 2
    # Four a second: twelve in any three seconds, and one more for each task whose turn falls on both ends.
    assert calls[-1] - calls[0] > 5
    for start in calls:
        assert len([at for at in calls if start <= at < start + 3]) <= 12 + 2


@IN_ONE_JVM
def test_an_object_store(place: Place, flights: pa.Table, tmp_path: Path) -> None:
    from moto_server import moto_server
    from pyarrow import fs

    with moto_server() as url:
        address = url.removeprefix("http://")
        query = f"?scheme=http&endpoint_override={address}"
        store = fs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)
        store.create_dir("lake")
        write_plain(flights.slice(0, 6 * ROWS_OF_A_FILE), tmp_path / "source")
        fs.copy_files(str(tmp_path / "source"), "lake/plain", destination_filesystem=store)
        target, config = f"s3a://lake/encrypted{query}", place.configuration
        encrypted, rotated, verified = place.call(
            ("encrypt", [f"s3://lake/plain{query}", target, config], {}),
            ("rotate", [target, config], {"moves": {"pii": "new"}}),
            ("verify", [target, config], {}),
        )
        # The table says otherwise, and all else is right.
        broken = {rule["rule"] for rule in verified["rules"] if rule["outcome"] == "broken"}
        number = len(files_of(tmp_path / "source"))
        assert encrypted["outcomes"] == {"encrypted": number, "skipped": 2}, encrypted
        assert rotated["outcomes"] == {"rotated": number}, rotated
        assert broken <= {"wanted-keys", "no-prefix"}, broken
        found = [
            info.path
            for info in store.get_file_info(fs.FileSelector("lake/encrypted", recursive=True))
            if info.type == fs.FileType.File
        ]
        assert len(found) == number + 1 and "lake/encrypted/_SUCCESS" in found
        table = place.keytools.read_table("lake/encrypted", table_name="flights", filesystem=store)
        assert table.num_rows == 6 * ROWS_OF_A_FILE
