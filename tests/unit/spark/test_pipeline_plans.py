"""Plans of pipelines: what is listed, how it is cut, and how the limits of a KMS are divided."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest

from parquet_keytools import parse_configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.keystore import KeystoreSettings
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.spark.pipelines.finished_files import FinishedFiles, RecordFolder, state_of
from parquet_keytools.spark.pipelines.kms_share import first_pause_seconds, most_tasks_of, shared_settings
from parquet_keytools.spark.pipelines.places import location_of, place_of
from parquet_keytools.spark.pipelines.planned_files import (
    cut,
    cut_by_group,
    number_of_pieces,
    plan_files,
    unpacked,
)
from parquet_keytools.storage import FileLocation

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
    plan = plan_files(FileLocation.resolve(tmp_path))
    assert sorted(plan.table["path"].to_pylist()) == ["a=1/a.parquet", "a=1/b.parquet", "c.parquet"]
    assert plan.size_bytes == 15
    reasons = {row["path"]: row["reason"] for row in plan.left_out.to_pylist()}
    # Key material belongs to its Parquet file; what has none is told.
    assert reasons.keys() == {"_metadata", ".hidden", "notes.txt", EMPTY_KEY_MATERIAL, "a=1/loop"}
    assert "a link to a folder that it lies in" in reasons["a=1/loop"]
    (single,) = plan_files(FileLocation.resolve(tmp_path / "c.parquet")).table.to_pylist()
    assert single == {"path": "", "size_bytes": 5}
    with pytest.raises(FileNotFoundError):
        plan_files(FileLocation.resolve(tmp_path / "nowhere"))


def test_a_name_that_is_not_utf_8_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with open(str(tmp_path).encode() + b"/\xff.parquet", "wb"):  # noqa: PTH123
        pass
    plan = plan_files(FileLocation.resolve(tmp_path))
    assert plan.table["path"].to_pylist() == ["a.parquet"]
    assert len(plan.unreadable) == 1 and ".parquet" in plan.unreadable[0]


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


def test_places_are_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of("flights") == str(tmp_path / "flights")
    assert place_of("s3a://bucket/flights") == "s3://bucket/flights"
    assert place_of("abfss://container@account.dfs.core.windows.net/x").startswith("abfss:")
    with pytest.raises(ConfigurationError, match="credentials in the URI") as raised:
        place_of("s3://AKIA:canary@bucket/flights")
    assert "canary" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="scheme 'ftp'"):
        location_of("ftp://host/x")


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
