"""The number of KMS calls: keys cost money, and an exceeded quota stops the whole cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms, TurnedClock
from pyarrow_versions import DECRYPTS_IN_THREADS

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError, KmsAccessDeniedError, KmsUnavailableError

MASTER_KEYS = {"kf": b"0123456789012345"} | {f"k{i}": b"123456789012345%d" % i for i in range(5)}
TABLE = pa.table({f"c{i}": range(40) for i in range(5)} | {"plain": range(40)})


def keytools(clock: TurnedClock | None = None, **settings: Any) -> tuple[Keytools, FaultyKms]:
    """Return tools with a footer key and five column keys, and their KMS."""
    kms = FaultyKms(MASTER_KEYS)
    table = {
        "footer_key": "kf",
        "column_keys": {f"k{i}": [f"c{i}"] for i in range(5)},
        "unlisted_columns": "plaintext",
    } | settings
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table},
        "reading": {"cache_lifetime_seconds": 600},
    }
    return Keytools(parse_configuration(document), kms=kms, clock=clock or TurnedClock()), kms


def with_properties(tools: Keytools, path: Path) -> None:
    properties = tools.encryption_properties("t", TABLE.schema, path)
    pq.write_table(TABLE, path, encryption_properties=properties, row_group_size=10)


def with_write_table(tools: Keytools, path: Path) -> None:
    tools.write_table(TABLE, path, row_group_size=10)


WRITERS: list[Any] = [
    pytest.param(with_write_table, {}, id="write_table"),
    pytest.param(with_properties, {}, id="encryption_properties"),
    pytest.param(with_write_table, {"aad_prefix": "{file_name}"}, id="module_encryptor"),
    pytest.param(with_write_table, {"key_material": "external"}, id="external"),
]


@pytest.mark.parametrize(("write", "settings"), WRITERS)
def test_many_files_cost_6_wraps_and_6_unwraps(
    tmp_path: Path, write: Callable[[Keytools, Path], None], settings: dict[str, Any]
) -> None:
    tools, kms = keytools(**settings)
    paths = [tmp_path / f"{number}.parquet" for number in range(12)]
    for path in paths:
        write(tools, path)
    assert kms.call_counts == {"wrap": 6}
    for path in paths:
        assert tools.read_table(path).num_rows == 40
    assert kms.call_counts == {"wrap": 6, "unwrap": 6}
    assert tools.dataset(tmp_path).to_table().num_rows == 12 * 40
    if not settings and DECRYPTS_IN_THREADS:
        for path in paths:
            assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).num_rows == 40
    assert kms.call_counts == {"wrap": 6, "unwrap": 6}


def test_a_data_set_of_many_files_costs_6_wraps(tmp_path: Path) -> None:
    for settings in ({}, {"aad_prefix": "{file_name}"}):
        tools, kms = keytools(**settings)
        folder = tmp_path / str(len(settings))
        data = pa.concat_tables([TABLE] * 20)
        tools.write_dataset(data, folder, max_rows_per_file=40, max_rows_per_group=10)
        assert len(list(folder.iterdir())) == 20
        assert kms.call_counts == {"wrap": 6}


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_single_wrapping_unwraps_each_key_once(tmp_path: Path, aad_prefix: str | None) -> None:
    """Arrow by itself makes 1 + 7 x columns x row groups calls for each file."""
    tools, kms = keytools(double_wrapping=False, aad_prefix=aad_prefix)
    for number in range(3):
        tools.write_table(TABLE, tmp_path / f"{number}.parquet", row_group_size=10)
    assert kms.call_counts == {"wrap": 18}
    for _ in range(2):
        assert tools.read_table(tmp_path / "0.parquet").num_rows == 40
        assert tools.dataset(tmp_path).to_table().num_rows == 120
    assert kms.call_counts == {"wrap": 18, "unwrap": 18}


def test_single_wrapping_with_plain_pyarrow(tmp_path: Path) -> None:
    tools, kms = keytools(double_wrapping=False)
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path, row_group_size=10)
    for _ in range(3):
        pq.read_table(path, decryption_properties=tools.decryption_properties(path))
    assert kms.call_counts == {"wrap": 6, "unwrap": 6}


def test_keys_of_many_files_are_asked_for_together(tmp_path: Path) -> None:
    """One request for all footers of a batch, and one for all columns: 20 files x 2 round trips would be slow."""
    tools, kms = keytools(double_wrapping=False)
    for number in range(20):
        tools.write_table(TABLE, tmp_path / f"{number}.parquet")
    dataset = tools.dataset(tmp_path)
    assert kms.unwrap_rounds == [1, 5]
    assert dataset.to_table().num_rows == 800
    assert dataset.count_rows() == 800
    # The first file is there; two threads open eight and eleven.
    assert sorted(kms.unwrap_rounds) == sorted([1, 5, 7, 35, 12, 60])
    assert tools.dataset(tmp_path, columns=["plain"]).to_table().num_rows == 800
    assert kms.call_counts["unwrap"] == 120, "the cache has them"
    tools.clear_caches()
    kms.unwrap_rounds.clear()
    named = tools.dataset(tmp_path, columns=["c0"])
    assert kms.unwrap_rounds == [1, 5, 19, 95], "which columns are refused has to be known for all files"
    assert named.to_table(columns=["c0"]).num_rows == 800
    assert sum(kms.unwrap_rounds) == 120


def test_a_long_data_set_asks_for_keys_of_a_hundred_files(tmp_path: Path) -> None:
    tools, kms = keytools(double_wrapping=False, column_keys={}, unlisted_columns="footer_key")
    table = TABLE.slice(0, 1).select(["plain"])
    for number in range(225):
        tools.write_table(table, tmp_path / f"{number:03}.parquet")
    assert tools.dataset(tmp_path).to_table().num_rows == 225
    assert sum(kms.unwrap_rounds) == 225
    assert max(kms.unwrap_rounds) == 100
    assert len(kms.unwrap_rounds) <= 7


def test_nobody_asks_for_columns_that_are_not_encrypted(tmp_path: Path) -> None:
    tools, kms = keytools(column_keys={}, unlisted_columns="footer_key")
    tools.write_table(TABLE, tmp_path / "x.parquet")
    tools.read_table(tmp_path / "x.parquet")
    assert kms.call_counts == {"wrap": 1, "unwrap": 1}


# --- threads ---


def in_32_threads(work: Callable[[int], object]) -> list[object]:
    barrier = threading.Barrier(32)

    def run(number: int) -> object:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(run, range(32), timeout=120))


@pytest.mark.parametrize("double", [True, False])
def test_32_threads_read_with_one_call_for_each_key(tmp_path: Path, double: bool) -> None:
    tools, kms = keytools(double_wrapping=double)
    tools.write_table(TABLE, tmp_path / "x.parquet")
    tables = in_32_threads(lambda _: tools.read_table(tmp_path / "x.parquet"))
    assert all(table == TABLE for table in tables)
    assert kms.call_counts["unwrap"] == 6


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_32_threads_write_with_one_call_for_each_key(tmp_path: Path, aad_prefix: str | None) -> None:
    meeting = threading.Barrier(2)

    def meet() -> None:
        """Wait a moment, so that two threads can be there at once."""
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)

    tools, kms = keytools(aad_prefix=aad_prefix)
    kms.before_answer = meet
    in_32_threads(lambda number: tools.write_table(TABLE, tmp_path / f"{number}.parquet"))
    assert kms.call_counts == {"wrap": 6}
    assert tools.dataset(tmp_path).count_rows() == 32 * 40


def test_32_threads_wait_for_one_load_and_share_its_error(tmp_path: Path) -> None:
    """The first thread is inside the KMS while all others arrive."""
    tools, kms = keytools()
    tools.write_table(TABLE, tmp_path / "x.parquet")
    started, go_on = threading.Event(), threading.Event()

    def blocked() -> None:
        started.set()
        assert go_on.wait(30)

    kms.before_answer = blocked
    kms.fail("timeout")

    def read(_: int) -> object:
        try:
            return tools.read_table(tmp_path / "x.parquet")
        except KmsUnavailableError as error:
            return error

    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(read, number) for number in range(32)]
        assert started.wait(30)
        go_on.set()
        assert all(isinstance(future.result(60), KmsUnavailableError) for future in futures)
    kms.failure = None
    assert tools.read_table(tmp_path / "x.parquet") == TABLE, "the error was kept"


# --- expiry ---


def test_keys_for_reading_expire(tmp_path: Path) -> None:
    """Arrow's own read cache keeps them forever: a reader who lost the permission could still read."""
    clock = TurnedClock()
    tools, kms = keytools(clock)
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path)
    tools.read_table(path)
    kms.fail("refused", "k1")
    clock.seconds += 599
    assert tools.read_table(path) == TABLE
    clock.seconds += 1
    with pytest.raises(ColumnAccessDeniedError):
        tools.read_table(path)
    with pytest.raises(ColumnAccessDeniedError):
        tools.dataset(tmp_path)
    if DECRYPTS_IN_THREADS:
        with pytest.raises(ColumnAccessDeniedError):
            pq.read_table(path, decryption_properties=tools.decryption_properties(path))


def keks(path: Path) -> set[str]:
    """Return the ids of the KEKs in a file with external key material."""
    text = path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json").read_text()
    return {part.split('\\"')[2] for part in text.split('\\"keyEncryptionKeyID')[1:]}


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_keks_for_writing_expire(tmp_path: Path, aad_prefix: str | None) -> None:
    clock = TurnedClock()
    tools, kms = keytools(clock, aad_prefix=aad_prefix, cache_lifetime_seconds=600, key_material="external")
    for number, seconds in enumerate([0, 599, 1, 600]):
        clock.seconds += seconds
        tools.write_table(TABLE, tmp_path / f"{number}.parquet")
    assert kms.call_counts == {"wrap": 18}
    first, second, third, fourth = (keks(tmp_path / f"{number}.parquet") for number in range(4))
    assert first == second and len(first | third | fourth) == 18


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_keks_for_writing_a_data_set_expire(tmp_path: Path, aad_prefix: str | None) -> None:
    clock = TurnedClock()
    tools, kms = keytools(clock, aad_prefix=aad_prefix)
    for number in range(3):
        tools.write_dataset(TABLE, tmp_path / str(number))
        clock.seconds += 300
    assert kms.call_counts == {"wrap": 12}


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_lifetime_zero_keeps_no_kek(tmp_path: Path, aad_prefix: str | None) -> None:
    tools, kms = keytools(aad_prefix=aad_prefix, cache_lifetime_seconds=0)
    for number in range(3):
        tools.write_table(TABLE, tmp_path / f"{number}.parquet")
    assert kms.call_counts == {"wrap": 18}


@pytest.mark.parametrize("aad_prefix", [None, "{file_name}"])
def test_a_refused_wrap_is_asked_for_again(tmp_path: Path, aad_prefix: str | None) -> None:
    """By default, Arrow keeps a KEK that it could not wrap."""
    tools, kms = keytools(aad_prefix=aad_prefix)
    kms.fail("refused", "k3")
    with pytest.raises(KmsAccessDeniedError):
        tools.write_table(TABLE, tmp_path / "x.parquet")
    kms.failure = None
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert tools.read_table(tmp_path / "x.parquet") == TABLE


def test_clear_caches(tmp_path: Path) -> None:
    for settings in ({}, {"aad_prefix": "x"}):
        tools, kms = keytools(**settings)
        for _ in range(2):
            tools.write_table(TABLE, tmp_path / "x.parquet")
            tools.read_table(tmp_path / "x.parquet")
            tools.clear_caches()
        assert kms.call_counts == {"wrap": 12, "unwrap": 12}
        tools.read_table(tmp_path / "x.parquet")
        assert kms.call_counts["unwrap"] == 18, "keys of files that were read are forgotten, too"


def test_two_tables_with_other_lifetimes_do_not_share_keks(tmp_path: Path) -> None:
    """A table with a lifetime of 60 seconds must not get a KEK that is an hour old."""
    clock = TurnedClock()
    kms = FaultyKms(MASTER_KEYS)
    table = {"footer_key": "kf", "column_keys": {"k0": ["c0"]}, "unlisted_columns": "plaintext"}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "long": table | {"cache_lifetime_seconds": 3600},
            "short": table | {"cache_lifetime_seconds": 60},
        },
    }
    tools = Keytools(parse_configuration(document), kms=kms, clock=clock)
    tools.write_table(TABLE, tmp_path / "x.parquet", table_name="long")
    clock.seconds += 61
    tools.write_table(TABLE, tmp_path / "x.parquet", table_name="short")
    assert kms.call_counts["wrap"] == 4
    clock.seconds += 60
    tools.write_table(TABLE, tmp_path / "x.parquet", table_name="short")
    assert kms.call_counts["wrap"] == 6


# --- threads that call the KMS ---


@pytest.mark.parametrize("double", [True, False])
def test_no_thread_of_arrow_asks_the_kms(tmp_path: Path, double: bool) -> None:
    """An exception there may abort the process; and the call would block one of Arrow's few threads."""
    for settings in ({}, {"aad_prefix": "{file_name}"}):
        tools, kms = keytools(double_wrapping=double, **settings)
        tools.write_dataset(
            pa.concat_tables([TABLE] * 5),
            tmp_path / "d",
            max_rows_per_file=40,
            max_rows_per_group=10,
            existing_data_behavior="delete_matching",
        )
        written = set(kms.threads)
        tools.write_table(TABLE, tmp_path / "x.parquet")
        tools.read_table(tmp_path / "x.parquet")
        tools.dataset(tmp_path / "d").to_table()
        assert kms.threads - written <= {threading.get_ident()} | kms.openers
        if double:
            assert kms.threads - kms.openers == {threading.get_ident()}
