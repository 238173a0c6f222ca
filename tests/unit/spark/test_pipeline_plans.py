"""Plans of pipelines: what is listed, how it is cut, and how the limits of a KMS are divided."""

from __future__ import annotations

import base64
import gc
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_spark import FakeSpark

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ConfigurationError, OutputError, ParquetFormatError
from parquet_keytools.kms.keystore import KeystoreSettings
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.spark import pipelines
from parquet_keytools.spark.pipelines import encryption, rotation, worker_keys
from parquet_keytools.spark.pipelines.file_tables import (
    TaskResult,
    cut,
    cut_by_group,
    node_location,
    number_of_pieces,
    packed,
    place_of,
    plan_data_set,
    unpacked,
)
from parquet_keytools.spark.pipelines.finished_files import FinishedFiles, RecordFolder, state_of
from parquet_keytools.spark.pipelines.job import Job
from parquet_keytools.spark.pipelines.worker_keys import (
    first_pause_seconds,
    most_tasks_of,
    shared_settings,
    task_slots,
)
from parquet_keytools.storage.locations import FileLocation

EMPTY_KEY_MATERIAL = "_KEY_MATERIAL_FOR_a.parquet.json"


def names_in(pieces: list[bytes]) -> list[list[str]]:
    return [unpacked(piece)["path"].to_pylist() for piece in pieces]


def table_of(sizes: dict[str, int], groups: list[int] | None = None) -> pa.Table:
    table = pa.table({"path": list(sizes), "size_bytes": pa.array(sizes.values(), pa.int64())})
    return table if groups is None else table.append_column("group", pa.array(groups, pa.int64()))


def test_a_plan_has_all_that_lies_there(tmp_path: Path) -> None:
    for name in ("a=1/a.parquet", "a=1/b.parquet", "c.parquet", "_metadata", ".hidden", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "a=1" / EMPTY_KEY_MATERIAL).touch()
    (tmp_path / EMPTY_KEY_MATERIAL).touch()
    (tmp_path / "a=1" / "loop").symlink_to(tmp_path)
    plan = plan_data_set(FileLocation.resolve(tmp_path))
    assert sorted(plan.table["path"].to_pylist()) == ["a=1/a.parquet", "a=1/b.parquet", "c.parquet"]
    assert sum(plan.table["size_bytes"].to_pylist()) == 15
    reasons = {row["path"]: row["reason"] for row in plan.left_out.to_pylist()}
    # Key material belongs to its Parquet file; what has none is told.
    assert reasons.keys() == {"_metadata", ".hidden", "notes.txt", EMPTY_KEY_MATERIAL}
    (unseen,) = plan.unseen
    assert unseen.path == str(tmp_path / "a=1" / "loop") and "a link to a folder that contains it" in unseen.reason
    (single,) = plan_data_set(FileLocation.resolve(tmp_path / "c.parquet")).table.to_pylist()
    assert single == {"path": "", "size_bytes": 5}
    with pytest.raises(FileNotFoundError):
        plan_data_set(FileLocation.resolve(tmp_path / "nowhere"))


def test_a_name_that_is_not_utf_8_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with open(str(tmp_path).encode() + b"/\xff.parquet", "wb"):  # noqa: PTH123
        pass
    plan = plan_data_set(FileLocation.resolve(tmp_path))
    assert plan.table["path"].to_pylist() == ["a.parquet"]
    (unseen,) = plan.unseen
    assert unseen.path == f"{tmp_path}/\\xff.parquet" and "not valid UTF-8" in unseen.reason


@pytest.mark.parametrize("pieces", [1, 2, 5, 100])
def test_pieces_have_every_file_once(pieces: int) -> None:
    table = table_of({f"{number:03}": number * 10_000_000 for number in range(57)})
    found = names_in(cut(table, pieces))
    assert list(itertools.chain(*found)) == table["path"].to_pylist()
    assert len(found) <= pieces
    if pieces == 2:
        # The first ones are small.
        assert len(found[0]) > len(found[1])


def test_few_pieces_share_a_group() -> None:
    groups = [number % 3 for number in range(30)] + [7] * 300
    table = table_of({f"{number:03}": 1 for number in range(330)}, groups)
    found = names_in(cut_by_group(table, 33, 4))
    assert sorted(itertools.chain(*found)) == table["path"].to_pylist()
    of_group = dict(zip(table["path"].to_pylist(), groups, strict=True))
    holders = [{of_group[name] for name in piece} for piece in found]
    assert sum(7 in holder for holder in holders) == 4
    for group in range(3):
        assert sum(group in holder for holder in holders) == 1
    assert cut_by_group(table.slice(0, 0), 5, 4) == []


def test_how_many_pieces() -> None:
    assert number_of_pieces(12, 2, None) == 12
    assert number_of_pieces(1000, 2, None) == 16
    assert number_of_pieces(1_000_000, 2, None) == 2000
    assert number_of_pieces(1_000_000, 2, 5) == 5
    assert number_of_pieces(0, 2, None) == 1


def test_limits_are_divided() -> None:
    settings = RemoteKmsSettings(type="aws", max_calls_per_second=10, max_concurrent_calls=32, timeout_seconds=20)
    share = shared_settings(settings, 8)
    assert isinstance(share, RemoteKmsSettings)
    assert (share.max_calls_per_second, share.max_concurrent_calls) == (1.25, 4)
    # Twenty calls may wait for their turn.
    assert share.timeout_seconds == 20
    few = shared_settings(settings, 100)
    assert isinstance(few, RemoteKmsSettings)
    assert (few.max_calls_per_second, few.max_concurrent_calls, few.timeout_seconds) == (0.1, 1, 200)
    assert shared_settings(settings, 1) is settings
    unlimited = shared_settings(RemoteKmsSettings(type="aws"), 8)
    assert isinstance(unlimited, RemoteKmsSettings) and unlimited.max_calls_per_second is None
    keystore = KeystoreSettings(type="keystore", path="k", passphrase="x" * 20)  # type: ignore[arg-type]
    assert shared_settings(keystore, 8) is keystore
    # Tasks that start together ask one after the other.
    assert [first_pause_seconds(settings, 4, position) for position in range(5)] == [
        0,
        0.1,
        0.2,
        pytest.approx(0.3),
        0,
    ]
    assert first_pause_seconds(keystore, 4, 3) == 0


def test_an_explicit_limit_of_calls_at_a_time_limits_tasks() -> None:
    def configuration(**settings: object) -> object:
        kms = {"type": "aws", "region": "eu-west-1", **settings}
        return parse_configuration({"version": 1, "kms": kms})

    assert most_tasks_of(configuration(), None) is None  # type: ignore[arg-type]
    limited = [configuration(max_concurrent_calls=number) for number in (7, 5)]
    assert most_tasks_of(*limited) == 5  # type: ignore[arg-type]


AWS = {
    "version": 1,
    "kms": {"type": "aws", "region": "eu-west-1", "max_concurrent_calls": 4},
}


@pytest.mark.parametrize(("speculation", "tasks"), [("false", 4), ("TRUE", 2)])
def test_a_job_has_no_more_tasks_than_calls_at_a_time(speculation: str, tasks: int) -> None:
    spark: Any = FakeSpark([8], spark_speculation=speculation, spark_master="local[8]")
    job = Job(spark, ".", parse_configuration(AWS))
    groups = cut_by_group(table_of({str(number): 1 for number in range(20)}, [1] * 11 + [2] * 9), 4, 4)
    # Groups are cut a little finer than asked for.
    assert len(groups) > 4
    seen: list[int] = []

    def work(position: int, attempt: int, piece: bytes) -> TaskResult:
        seen.append(unpacked(piece).num_rows)
        return TaskResult()

    results = list(job.run("count", work, groups))
    assert sum(seen) == 20 and len(results) == len(groups)
    assert spark.partitions == [tasks] and job.tasks == tasks
    # Copies of tasks have their share of the limits too.
    assert job.carried_keys(len(groups)).tasks == 4


def test_the_executors_of_a_new_session_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(time=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(worker_keys, "time", clock)
    cluster = "spark://host:7077"
    assert task_slots(FakeSpark([0, 0, 0, 16, 16, 32, 32, 48], spark_master=cluster)) == 48
    assert 1 < now[0] < 5
    # None comes: Spark itself waits for the first one.
    assert task_slots(FakeSpark([0], spark_master=cluster)) == 1
    now[0] = 1000.0
    assert task_slots(FakeSpark([16, 32], spark_master=cluster)) == 16
    assert now[0] == 1000.0


def test_an_executor_with_all_cores_of_its_host_has_no_known_number_of_them() -> None:
    settings = {"spark_dynamicAllocation_enabled": "true", "spark_dynamicAllocation_maxExecutors": "10"}
    assert task_slots(FakeSpark([16], spark_master="spark://host:7077", **settings)) is None
    cores = {"spark_executor_cores": "4"}
    assert task_slots(FakeSpark([16], spark_master="spark://host:7077", **settings, **cores)) == 40
    assert task_slots(FakeSpark([16], spark_master="yarn", **settings)) == 16


KEYS = {
    name: base64.b64encode(bytes([number]) * 32).decode() for number, name in enumerate(("footer", "pii", "new"))
}


@pytest.fixture
def encrypted(tmp_path: Path) -> tuple[Keytools, Path]:
    """A configuration from a file, and a folder with an encrypted file."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"version: 1\nkms: {{type: in_memory, keys: {KEYS}}}\n"
        "tables: {t: {footer_key: footer, column_keys: {pii: [a]}}}\n"
    )
    keytools = Keytools.from_yaml(config)
    (tmp_path / "data").mkdir()
    keytools.write_table(pa.table({"a": [1, 2, 3], "b": [4, 5, 6]}), tmp_path / "data" / "part-0.parquet")
    return keytools, tmp_path / "data"


def piece_of(folder: Path) -> bytes:
    return packed(plan_data_set(FileLocation.resolve(folder)).table)


def test_later_tasks_of_a_job_have_a_share_of_their_own(encrypted: tuple[Keytools, Path]) -> None:
    spark: Any = FakeSpark([8], spark_master="local[8]")
    job = Job(spark, encrypted[1], encrypted[0].configuration)
    first, second = (worker_keys.worker_keys(job.carried_keys(pieces)) for pieces in (1, 5))
    assert first is not second
    assert worker_keys.worker_keys(job.carried_keys(5)) is second


def test_two_attempts_of_one_task_do_no_harm_to_each_other(
    encrypted: tuple[Keytools, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from parquet_keytools.rotation import rewrapping
    from parquet_keytools.rotation.rotation_plan import plan_rotation

    keytools, folder = encrypted
    spark: Any = FakeSpark([2], spark_master="local[2]")
    job = Job(spark, folder, keytools.configuration)
    plan = plan_rotation(job.keys, moves={"pii": "new"})
    opening = rotation.OpeningTask(job.carried_keys(1), str(folder), None, None, plan)
    distinct = opening(0, 0, piece_of(folder)).other
    assert keytools.kms is not None
    given = rotation._rewrap(keytools.kms, rewrapping.Rewrapping(job.keys, plan), distinct)
    assert len(given) == 1
    broadcast: Any = SimpleNamespace(value=given)
    writing = rotation.WritingTask(job.carried_keys(1), str(folder), None, None, plan, broadcast)
    attempts: list[TaskResult] = []
    replace_tail = rewrapping.replace_tail

    def attempt(number: int) -> TaskResult:
        # Each is a process of its own.
        monkeypatch.setattr(worker_keys._Held, "job", None)
        return writing(0, number, piece_of(folder))

    def replace_after_another_attempt(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(rewrapping, "replace_tail", replace_tail)
        attempts.append(attempt(1))
        return replace_tail(*arguments, **options)

    monkeypatch.setattr(rewrapping, "replace_tail", replace_after_another_attempt)
    attempts.append(attempt(0))
    assert [found.outcomes for found in attempts] == [{"rotated": 1}, {"nothing to rotate": 1}]
    assert {use.master_key_id for file in keytools.key_inventory(folder) for use in file.uses} == {"footer", "new"}
    assert [path.name for path in folder.iterdir()] == ["part-0.parquet"]


def test_a_move_to_another_kms_goes_on_where_names_are_swapped(encrypted: tuple[Keytools, Path]) -> None:
    keytools, folder = encrypted
    keytools.write_table(pa.table({"a": [7], "b": [8]}), folder / "part-1.parquet")
    keytools.write_table(pa.table({"a": [9], "b": [9]}), folder / "part-2.parquet")
    theirs = folder.with_name("theirs.yaml")
    other_keys = {name: base64.b64encode(name.encode().ljust(32)).decode() for name in KEYS}
    text = folder.with_name("config.yaml").read_text()
    theirs.write_text(text.replace(str(KEYS), str(other_keys)).replace("footer_key: footer", "footer_key: pii"))
    theirs.write_text(theirs.read_text().replace("{pii: [a]}", "{footer: [a]}"))
    spark: Any = FakeSpark([2], spark_master="local[2]")
    options: Any = {"moves": {"footer": "pii", "pii": "footer"}, "to": theirs}
    config = folder.with_name("config.yaml")
    assert rotation.rotate(spark, folder / "part-1.parquet", config, **options).outcomes == {"rotated": 1}
    # As after a run that was cut off.
    report = rotation.rotate(spark, folder, config, **options)
    assert report.outcomes == {"rotated": 2, "already current": 1}
    table = Keytools.from_yaml(theirs).read_table(folder)
    assert sorted(table["a"].to_pylist()) == [1, 2, 3, 7, 9]
    assert rotation.rotate(spark, folder, config, **options).outcomes == {"already current": 3}


@pytest.mark.parametrize("name", ["rotate", "rekey", "keys", "verify"])
def test_a_file_that_no_task_can_be_told_of_is_not_passed_over(
    encrypted: tuple[Keytools, Path], name: str
) -> None:
    _, folder = encrypted
    os.link(os.fsencode(folder) + b"/part-0.parquet", os.fsencode(folder) + b"/\xff.parquet")
    spark: Any = FakeSpark([2], spark_master="local[2]")
    report = getattr(pipelines, name)(spark, folder, folder.with_name("config.yaml"))
    assert not report.succeeded
    (row,) = [row for row in report.rows() if row["error"] is not None]
    assert "not valid UTF-8" in row["error"] and row["path"].endswith("\\xff.parquet")
    assert sum(report.outcomes.values()) == 2


def test_a_plaintext_file_in_a_folder_is_not_rekeyed(encrypted: tuple[Keytools, Path]) -> None:
    keytools, folder = encrypted
    pq.write_table(pa.table({"a": [1]}), folder / "plain.parquet")
    spark: Any = FakeSpark([2], spark_master="local[2]")
    job = Job(spark, folder, keytools.configuration)
    task = rotation.RekeyTask(job.carried_keys(1), str(folder), None, None, "t")
    assert task(0, 0, piece_of(folder)).outcomes == {"rekeyed": 1, "not encrypted": 1}
    alone = rotation.RekeyTask(job.carried_keys(1), str(folder / "plain.parquet"), None, None, "t")
    assert alone(0, 0, piece_of(folder / "plain.parquet")).outcomes == {"failed": 1}


def write_plain(folder: Path, name: str = "part-0.parquet") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": [1, 2, 3], "ab": [4, 5, 6]}), folder / name)
    return folder


def test_what_the_configuration_says_of_rotations_holds(encrypted: tuple[Keytools, Path]) -> None:
    _, folder = encrypted
    config = folder.with_name("config.yaml")
    config.write_text(config.read_text() + "rotation: {moves: {pii: new}}\n")
    spark: Any = FakeSpark([2], spark_master="local[2]")
    (row,) = rotation.rotate(spark, folder, config).rows()
    assert [(key["master_key"], key["new_master_key"]) for key in row["keys"]] == [("pii", "new")]
    with pytest.raises(ConfigurationError, match="moves are within one KMS, but another one is given"):
        rotation.rotate(spark, folder, config, to=config)
    # What a caller says is stronger.
    (row,) = rotation.rotate(spark, folder, config, moves={"footer": "new"}).rows()
    assert [(key["master_key"], key["new_master_key"]) for key in row["keys"]] == [("footer", "new")]
    assert [path.name for path in folder.iterdir()] == ["part-0.parquet"]
    config.write_text(config.read_text().replace("pii: new", "pii: nwe"))
    with pytest.raises(ConfigurationError, match=r"rotation\.moves\.pii"):
        rotation.rotate(spark, folder, config)


def test_a_call_that_is_refused_leaves_a_complete_target_complete(
    encrypted: tuple[Keytools, Path], tmp_path: Path
) -> None:
    spark: Any = FakeSpark([2], spark_master="local[2]")
    target, empty = tmp_path / "target", tmp_path / "empty"
    assert encryption.encrypt(spark, write_plain(tmp_path / "source"), target, tmp_path / "config.yaml").succeeded
    empty.mkdir()
    with pytest.raises(ParquetFormatError, match="no Parquet files"):
        encryption.encrypt(spark, empty, target, tmp_path / "config.yaml", overwrite=True)
    within = write_plain(target / "source")
    with pytest.raises(OutputError, match="is inside the target"):
        encryption.encrypt(spark, within, target, tmp_path / "config.yaml", overwrite=True)
    assert {path.name for path in target.iterdir()} == {"_SUCCESS", "part-0.parquet", "source"}


def test_a_folder_of_somebody_else_is_not_removed_with_the_records(
    encrypted: tuple[Keytools, Path], tmp_path: Path
) -> None:
    spark: Any = FakeSpark([2], spark_master="local[2]")
    source = write_plain(tmp_path / "source") / "part-0.parquet"
    own = tmp_path / ".target.parquet" / "notes"
    own.parent.mkdir()
    own.write_text("of this user")
    config = tmp_path / "config.yaml"
    assert encryption.encrypt(spark, source, tmp_path / "target.parquet", config).succeeded
    assert [path.name for path in own.parent.iterdir()] == ["notes"]
    assert encryption.encrypt(spark, source, tmp_path / "other.parquet", config).succeeded
    assert not (tmp_path / ".other.parquet").exists()


@pytest.mark.parametrize("forgery", ["plaintext", "of the table"])
def test_records_beside_the_data_are_not_believed(
    encrypted: tuple[Keytools, Path], tmp_path: Path, forgery: str
) -> None:
    """Between two runs somebody replaces a file that was finished by one of the same length and time."""
    spark: Any = FakeSpark([2], spark_master="local[2]")
    source, target = tmp_path / "source", tmp_path / "target"
    write_plain(write_plain(source), "part-1.parquet")
    damaged = source / "part-1.parquet"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    assert encryption.encrypt(spark, source, target, tmp_path / "config.yaml").outcomes["encrypted"] == 1
    finished, forged = target / "part-0.parquet", tmp_path / "forged"
    if forgery == "plaintext":
        pq.write_table(pa.table({"a": [0], "ab": [0]}), forged)
    else:
        encrypted[0].write_table(pa.table({"a": [0], "ab": [0]}), forged)
    state, data = finished.stat(), forged.read_bytes()
    offset = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    finished.write_bytes(data[:offset] + bytes(state.st_size - len(data)) + data[offset:])
    os.utime(finished, ns=(state.st_atime_ns, state.st_mtime_ns))
    damaged.write_bytes(good)
    report = encryption.encrypt(spark, source, target, tmp_path / "config.yaml")
    assert report.succeeded and report.outcomes == {"encrypted": 2}
    assert encrypted[0].read_table(target)["a"].to_pylist() == [1, 2, 3] * 2


def test_values_of_a_column_with_a_key_do_not_stay_in_the_names_of_folders(
    encrypted: tuple[Keytools, Path], tmp_path: Path
) -> None:
    spark: Any = FakeSpark([2], spark_master="local[2]")
    source = write_plain(tmp_path / "source", "x=1/a%20c=canary/part-0.parquet")
    config = tmp_path / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("[a]", '["a*"]'))
    with pytest.raises(ConfigurationError, match=r"'a c' are in the names of folders.*under the key 'pii'"):
        encryption.encrypt(spark, source, tmp_path / "target", config)
    assert not (tmp_path / "target").exists()
    config.write_text(text.replace("[a]}", "[a]}, unlisted_columns: footer_key"))
    with pytest.warns(UserWarning, match="are in the names of folders"):
        assert encryption.encrypt(spark, source, tmp_path / "target", config).succeeded


def test_places_are_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of("flights") == str(tmp_path / "flights")
    assert place_of("s3a://bucket/flights") == "s3://bucket/flights"
    assert place_of("abfss://container@account.dfs.core.windows.net/x").startswith("abfss:")
    with pytest.raises(ConfigurationError, match="credentials in the URI") as raised:
        place_of("s3://AKIA:canary@bucket/flights")
    assert "canary" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="scheme 'ftp'"):
        node_location("ftp://host/x")


def test_records_tell_what_is_finished(tmp_path: Path) -> None:
    records = RecordFolder(FileLocation.resolve(tmp_path / ".records"), "run")
    assert not records.exists() and not records.other_runs()
    records.begin()
    assert records.exists()
    assert RecordFolder(records.folder, "other").other_runs() and not records.other_runs()
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)
    source, target = (FileLocation.resolve(tmp_path / name) for name in ("source", "target"))
    states = state_of(source), state_of(target)
    assert states[0] is not None and states[1] is not None
    first = FinishedFiles(records, "job-0", 0, {})
    assert not first.is_finished("a", *states)
    first.add("a", states[0], states[1])
    first.flush()
    # Another attempt of the same task sees it, another task does not look.
    assert FinishedFiles(records, "job-0", 1, {}).is_finished("a", *states)
    assert not FinishedFiles(records, "job-1", 1, {}).is_finished("a", *states)
    assert records.read()["path"].to_pylist() == ["a"]
    (tmp_path / "source").write_text("changed")
    assert not FinishedFiles(records, "job-0", 1, {}).is_finished("a", state_of(source), states[1])
    (tmp_path / ".records" / "run" / "job-0-0-1.finished").write_bytes(b"cut off")
    assert records.read().num_rows == 1
    records.remove()
    assert not records.exists()
    records.remove()


def test_a_plaintext_file_beside_encrypted_ones_is_named(encrypted: tuple[Keytools, Path]) -> None:
    _, folder = encrypted
    pq.write_table(pa.table({"a": [1], "b": [2]}), folder / "part-1.parquet")
    spark: Any = FakeSpark([2], spark_master="local[2]")
    report = pipelines.verify(spark, folder, folder.with_name("config.yaml"))
    assert not report.succeeded
    broken = {row["rule"]: row for row in report.rule_rows() if row["outcome"] == "broken"}
    assert broken["encrypted"]["file"] == str(folder / "part-1.parquet")
    assert broken["plaintext-among"]["message"] == "part-1.parquet is not encrypted."


def test_tasks_spare_the_collector_of_garbage_what_they_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: what is spared is never freed."""
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(worker_keys._Held, "spared_modules", len(sys.modules))

    def work(position: int, attempt: int, piece: bytes) -> TaskResult:
        if piece:
            monkeypatch.setitem(sys.modules, piece.decode(), ModuleType(piece.decode()))
        return TaskResult()

    spark: Any = FakeSpark([2], spark_master="local[2]")
    job = Job(spark, ".", parse_configuration("version: 1\ntables: {}"))
    for piece, expected in ((b"", []), (b"imported", ["collect", "freeze"]), (b"", ["collect", "freeze"])):
        assert len(list(job.run("import", work, [piece]))) == 1
        assert done == expected
