"""The numbers of parts, and the missing ones, are derived from AAD prefixes and names (spec 4.4.1)."""

from __future__ import annotations

import time

import pytest

from parquet_keytools.conformance.data_set import missing_parts, part_number

UUID = "8a4f9c2e-0d11-4b7a-9e1c-55f0a2b3c4d5"
OTHER_UUID = "11112222-3333-4444-5555-666677778888"


def missing(*names: str) -> dict[str, list[int]]:
    return dict(missing_parts([name] for name in names))


@pytest.mark.parametrize(
    ("names", "gaps"),
    [
        (["part-0.parquet", "part-1.parquet"], []),
        (["part-0.parquet", "part-2.parquet"], [1]),
        (["part-1.parquet", "part-2.parquet"], [0]),
        ([f"part-0000{n}-{UUID}-c000.snappy.parquet" for n in (0, 1, 3)], [2]),
        (["data_0.parquet", "data_2.parquet", "data_3.parquet"], [1]),
        (["0.parquet", "1.parquet", "3.parquet"], [2]),
        (["file1.parquet", "file2.parquet", "file4.parquet"], [3]),
        (["000000_0", "000001_0", "000003_0"], [2]),
        # No numbering: dates, sizes, one number only.
        (["sales-20240101.parquet", "sales-20240105.parquet"], []),
        (["2019.parquet", "2021.parquet"], []),
        (["version7.parquet", "readme.parquet"], []),
        (["part-20240101.parquet", "part-20240105.parquet"], []),
    ],
)
def test_gaps_are_found(names: list[str], gaps: list[int]) -> None:
    assert [gap for found in missing(*names).values() for gap in found] == gaps


def test_jobs_of_spark_are_numbered_apart() -> None:
    """A job's missing part is missing even if another job has a part of that number."""
    names = [f"part-0000{n}-{uuid}-c000.parquet" for uuid in (UUID, OTHER_UUID) for n in range(3)]
    assert missing(*names) == {}
    names.remove(f"part-00001-{UUID}-c000.parquet")
    assert missing(*names) == {f"part-#-{UUID}.parquet": [1]}


def test_files_of_one_task_of_spark_are_one_part() -> None:
    names = [f"part-0000{n}-{UUID}-c000.parquet" for n in range(3)] + [f"part-00002-{UUID}-c001.parquet"]
    assert missing(*names) == {}


def test_prefixes_come_before_names() -> None:
    names = [["employees_23May2018.part1", "part-7.parquet"], ["employees", "part-2.parquet"]]
    assert [found and found[1] for found in map(part_number, [*names, ["stranger.parquet"]])] == [1, 2, None]


def test_a_great_number_of_numberings_takes_no_time() -> None:
    started = time.process_time()
    names = [[f"part-999999-{number}x.parquet"] for number in range(5_000)]
    assert all(missing[0] == 0 for _, missing in missing_parts(names))
    assert time.process_time() - started < 2
