"""One encrypted file as plaintext: decrypted ranges, refused columns, and the bytes read for them."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from key_services import key_service
from pyarrow_versions import bloom_filters
from view_case import KEYS, ViewCase, contents, parquet_bytes, same_contents, table_of, whole

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    DecryptionError,
    FileChangedError,
    NotEncryptedError,
    ParquetFormatError,
    TableMismatchError,
)
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, open_plain_file

ROWS = 4_000
COLUMNS = {"public": ["name"], "secret": ["amount", "deep"]}


def make_table() -> pa.Table:
    choose = random.Random(1)
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "name": pa.array([f"name {choose.randrange(50)}" for _ in range(ROWS)]),
            "amount": pa.array([f"amount {choose.random()}" for _ in range(ROWS)]),
            "deep": pa.array([[{"a": n, "b": None if n % 3 else f"b {n}"}] * (n % 4) for n in range(ROWS)]),
        }
    )


TABLE = make_table()
OPTIONS: dict[str, dict[str, Any]] = {
    "many pages": {"data_page_size": 2_000, "row_group_size": 1_500, "write_batch_size": 100},
    "indexes": {"data_page_size": 2_000, "write_page_index": True, "write_batch_size": 100},
    "checksums": {"data_page_size": 2_000, "write_page_checksum": True, "write_batch_size": 100},
    "v2 and bloom": {"data_page_version": "2.0", **bloom_filters({"name": {"ndv": 100}})},
}


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    return ViewCase(tmp_path, {"column_keys": COLUMNS, "unlisted_columns": "footer_key"})


@pytest.mark.parametrize("algorithm", ["AES_GCM_V1", "AES_GCM_CTR_V1"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ranges_are_slices_of_the_whole(case: ViewCase, options: dict[str, Any], algorithm: str) -> None:
    case.table["algorithm"] = algorithm
    plain = parquet_bytes(TABLE, **options)
    path = case.encrypt(plain)
    file = case.view(path)
    data = whole(file)
    assert same_contents(data, plain)
    assert pq.read_table(pa.BufferReader(data), page_checksum_verification=True).equals(TABLE)
    choose = random.Random(7)
    for _ in range(20):
        other = case.view(path)
        for _ in range(20):
            start = choose.randrange(len(data))
            end = min(start + int(10 ** choose.uniform(0, 5)), len(data))
            assert bytes(other.read_at(start, end - start)) == data[start:end]


def test_ranges_outside_of_the_file_are_refused(case: ViewCase) -> None:
    file = case.view(case.encrypt(parquet_bytes(TABLE)))
    for start, length in ((-1, 1), (0, file.size_bytes + 1), (file.size_bytes, 1)):
        with pytest.raises(ParquetFormatError, match="outside"):
            file.read_at(start, length)


class CountedSource:
    """A source that records its reads."""

    def __init__(self, source: Any) -> None:
        self.path, self.size_bytes, self.source = source.path, source.size_bytes, source
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> Any:
        self.reads.append((offset, length))
        return self.source.read_at(offset, length)


def counted(monkeypatch: pytest.MonkeyPatch, case: ViewCase, path: Path) -> tuple[PlainFile, CountedSource]:
    sources = []

    def as_verified(opened: Any, source: Any) -> CountedSource:
        sources.append(CountedSource(source))
        return sources[-1]

    monkeypatch.setattr("parquet_keytools.view.plain_file.as_verified", as_verified)
    return case.view(path), sources[-1]


def test_a_whole_chunk_takes_one_read_of_its_bytes(case: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["many pages"]))
    offsets = contents(whole(case.view(path)))[1, "amount"]["offsets"]
    start, length = offsets[0][0], sum(size for _, size in offsets)
    file, source = counted(monkeypatch, case, path)
    assert source.reads == []
    file.read_at(start, length)
    assert source.reads == [(start, length)]


def test_neighbouring_chunks_of_a_remote_file_take_one_read(
    case: ViewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["v2 and bloom"]))
    data = whole(case.view(path))
    remote = fsspec.filesystem("memory", skip_instance_cache=True)
    remote.pipe_file("/folder/x.parquet", path.read_bytes())
    location = FileLocation.resolve("/folder/x.parquet", remote)
    assert not location.is_local
    sources = []

    def as_verified(opened: Any, source: Any) -> CountedSource:
        sources.append(CountedSource(source))
        return sources[-1]

    monkeypatch.setattr("parquet_keytools.view.plain_file.as_verified", as_verified)
    keytools = case.keytools()
    file = open_plain_file(key_service(keytools), location, cache=PageCache())
    assert bytes(file.read_at(0, len(data))) == data
    assert len(sources[0].reads) == 1
    choose = random.Random(3)
    for _ in range(100):
        start = choose.randrange(len(data))
        end = min(start + int(10 ** choose.uniform(0, 5)), len(data))
        assert bytes(file.read_at(start, end - start)) == data[start:end]
    assert keytools.view("/folder", filesystem=remote).cat("x.parquet") == data


def test_a_page_in_the_middle_takes_little_more(case: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.encrypt(parquet_bytes(TABLE, use_dictionary=False, **OPTIONS["indexes"]))
    found = contents(whole(case.view(path)))[0, "amount"]["offsets"]
    assert found[-2][0] - found[0][0] > 70_000
    start, length = found[-2]
    file, source = counted(monkeypatch, case, path)
    file.read_at(start, length)
    # The page, and the offset index, which has the page's position in the chunk.
    assert len(source.reads) == 2 and sum(read for _, read in source.reads) < length + 2_000
    file.read_at(start + 5, 10)
    assert len(source.reads) == 3


def test_the_rest_of_a_page_is_not_read_again(case: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["many pages"]))
    start, length = contents(whole(case.view(path)))[0, "amount"]["offsets"][1]
    file, source = counted(monkeypatch, case, path)
    parts = [bytes(file.read_at(start + at, min(100, length - at))) for at in range(0, length, 100)]
    assert b"".join(parts) == whole(case.view(path))[start : start + length]
    read = sum(length for _, length in source.reads)
    assert read < 70_000 + length
    assert sum(at >= start for at, _ in source.reads) <= 3


def test_a_page_that_was_altered_is_not_given_out(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["many pages"]))
    data = whole(case.view(path))
    pages = contents(data)[0, "amount"]["offsets"]
    for number, where in ((2, 0), (2, 30), (len(pages) - 1, -1), (0, 60)):
        start, length = pages[number]
        altered = bytearray(path.read_bytes())
        altered[start + where % length] ^= 1
        target = path.with_name("altered.parquet")
        target.write_bytes(altered)
        file = case.view(target)
        with pytest.raises((DecryptionError, ParquetFormatError)) as caught:
            file.read_at(start + length - 1, 1)
        assert "altered.parquet" in str(caught.value)
        with pytest.raises((DecryptionError, ParquetFormatError)):
            file.read_at(pages[0][0], pages[-1][0] + pages[-1][1] - pages[0][0])
        if number:
            before, size = pages[number - 1]
            assert bytes(file.read_at(before, size)) == data[before : before + size]


def test_pages_that_changed_places_are_refused(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE, use_dictionary=False, compression="none", data_page_size=1))
    data = bytearray(path.read_bytes())
    pages = contents(whole(case.view(path)))[0, "id"]["offsets"]
    one, other = next((a, b) for a, b in itertools.pairwise(pages) if a[1] == b[1])
    (first, size), (second, _) = one, other
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    path.write_bytes(data)
    with pytest.raises(DecryptionError) as caught:
        case.view(path).read_at(first, 10)
    assert caught.value.column == "id"


def test_an_altered_page_with_a_checksum_is_refused_with_ctr(case: ViewCase) -> None:
    case.table["algorithm"] = "AES_GCM_CTR_V1"
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["checksums"]))
    start, length = contents(whole(case.view(path)))[0, "id"]["offsets"][1]
    data = bytearray(path.read_bytes())
    data[start + length - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ParquetFormatError, match="CRC"):
        case.view(path).read_at(start, length)


def test_what_a_table_does_not_have_is_refused(case: ViewCase, tmp_path: Path) -> None:
    plain = tmp_path / "plain.parquet"
    plain.write_bytes(parquet_bytes(TABLE))
    with pytest.raises(NotEncryptedError):
        case.view(plain)
    assert whole(case.view(plain, plaintext_files="allow")) == plain.read_bytes()
    other = ViewCase(tmp_path, {"column_keys": {"secret": ["name"]}}, kms=case.kms)
    with pytest.raises(TableMismatchError):
        other.view(case.encrypt(parquet_bytes(TABLE)))
    case.table["algorithm"] = "AES_GCM_CTR_V1"
    with pytest.raises(DecryptionError, match="AES_GCM_CTR_V1"):
        case.view(case.encrypt(parquet_bytes(TABLE)), ctr_files="reject")


def test_many_readers_of_one_view(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["many pages"]))
    data = whole(case.view(path))
    file = case.view(path)
    together = threading.Barrier(64)

    def read(number: int) -> None:
        choose = random.Random(number)
        together.wait()
        for _ in range(20):
            start = choose.randrange(len(data))
            end = min(start + choose.choice((10, 3_000, 200_000)), len(data))
            assert bytes(file.read_at(start, end - start)) == data[start:end]

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(read, range(64)))


def test_the_cache_is_bounded(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE, **OPTIONS["many pages"]))
    cache = PageCache(10_000)
    file = open_plain_file(key_service(case.keytools()), FileLocation.resolve(path), cache=cache)
    for offset in range(0, file.size_bytes - 10, 500):
        file.read_at(offset, 10)
        assert cache.held_bytes <= 10_000
    assert cache.held_bytes > 0
    del file
    assert cache.held_bytes == 0


# --- Columns whose keys are refused --------------------------------------------------------------------------


def names_of(file: PlainFile) -> list[str]:
    return list(table_of(file).column_names)


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_nothing_of_a_refused_column_is_in_the_view(
    case: ViewCase, denied_columns: str, plaintext_footer: bool
) -> None:
    case.table["plaintext_footer"] = plaintext_footer
    path = case.encrypt(parquet_bytes(TABLE, compression="none", **OPTIONS["indexes"]))
    assert b"amount 0." in whole(case.view(path))
    case.kms.deny("secret")
    file = case.view(path, denied_columns=denied_columns)
    data = whole(file)
    assert b"amount 0." not in data and b"name 17" in data
    assert file.size_bytes == path.stat().st_size
    stored = path.read_bytes()
    # Not even as ciphertext, nor as key material.
    assert b"PKMT1" not in data and b"wrappedDEK" not in data
    start = stored.index(b"PAR", 4) if not plaintext_footer else 0
    assert start >= 0
    shared = sum(stored[at : at + 64] in data for at in range(4, 200_000, 4_096) if any(stored[at : at + 64]))
    assert shared == 0
    read = pq.read_table(pa.BufferReader(data), columns=["id", "name"])
    assert read.equals(TABLE.select(["id", "name"]))


def test_refused_columns_are_hidden(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE.slice(0, 50), sorting_columns=[pq.SortingColumn(2)]))
    case.kms.deny("secret")
    table = table_of(case.view(path, denied_columns="hide"))
    assert table.equals(TABLE.slice(0, 50).select(["id", "name"]))


def test_refused_columns_are_null(case: ViewCase) -> None:
    required = pa.schema([field.with_nullable(False) for field in TABLE.schema])
    path = case.encrypt(parquet_bytes(TABLE.cast(required), row_group_size=1_500))
    case.kms.deny("secret")
    table = table_of(case.view(path, denied_columns="null"))
    assert table.schema.names == TABLE.schema.names
    assert [field.type for field in table.schema] == [field.type for field in TABLE.schema]
    assert [field.nullable for field in table.schema] == [False, False, True, True]
    assert table["amount"].null_count == table["deep"].null_count == ROWS
    assert table.select(["id", "name"]).to_pydict() == TABLE.select(["id", "name"]).to_pydict()


def test_to_read_a_refused_column_is_an_error(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE))
    case.kms.deny("secret")
    file = case.view(path)
    source = pa.PythonFile(_AsFile(file), mode="r")
    with pq.ParquetFile(source, pre_buffer=False) as parquet:
        assert parquet.schema_arrow.names == TABLE.schema.names
        assert parquet.read(["id"]).equals(TABLE.select(["id"]))
        with pytest.raises(ColumnAccessDeniedError, match="amount"):
            parquet.read(["amount"])
        with pytest.raises(ColumnAccessDeniedError, match="amount"):
            parquet.read(["id", "amount"])


class _AsFile:
    """The minimum that pyarrow needs of a file."""

    closed = False

    def __init__(self, file: PlainFile) -> None:
        self.file, self.position = file, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (self.file.size_bytes if whence == 2 else 0)
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        data = bytes(self.file.read_at(self.position, min(size, self.file.size_bytes - self.position)))
        self.position += len(data)
        return data

    def close(self) -> None:
        pass


@pytest.mark.parametrize("denied_columns", ["hide", "null"])
def test_a_key_that_is_not_refused_but_wrong_hides_nothing(case: ViewCase, denied_columns: str) -> None:
    keys = {name: name.ljust(16).encode() for name in KEYS}
    case.kms = InMemoryKms(keys)
    path = case.encrypt(parquet_bytes(TABLE))
    case.kms = InMemoryKms(keys | {"secret": b"another key here"})
    keytools = case.keytools(denied_columns=denied_columns)
    with pytest.raises(ColumnAccessDeniedError):
        open_plain_file(key_service(keytools), FileLocation.resolve(path), cache=PageCache())


def test_a_file_that_changes_is_reported(case: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.encrypt(parquet_bytes(TABLE))
    other = case.encrypt(parquet_bytes(TABLE.slice(0, 10)), "other.parquet")

    def replaced(location: FileLocation) -> Any:
        from parquet_keytools.storage.locations import open_source

        return open_source(FileLocation.resolve(other))

    monkeypatch.setattr("parquet_keytools.view.plain_file.open_source", replaced)
    with pytest.raises(FileChangedError):
        case.view(path)


def test_statistics_are_there_for_who_may_have_them(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE))
    chunk = pq.ParquetFile(pa.BufferReader(whole(case.view(path)))).metadata.row_group(0).column(0)
    assert chunk.statistics.max == pc.max(TABLE["id"]).as_py()


# --- Storage that fails --------------------------------------------------------------------------------------


class FlakyFiles(LocalFileSystem):  # type: ignore[misc]
    """Local files whose reads fail from one on."""

    protocol = "flaky"
    cachable = False

    def __init__(self, fails_at: int, error: Exception) -> None:
        super().__init__()
        self.reads, self.fails_at, self.error = 0, fails_at, error

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        file, files = super()._open(path, *args, **options), self

        class Flaky:
            def read(self, *args: int) -> bytes:
                files.reads += 1
                if files.reads >= files.fails_at:
                    raise files.error
                return bytes(file.read(*args))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Flaky()


@pytest.mark.parametrize("error", [ConnectionError("lost"), TimeoutError("late"), OSError("broken"), OSError()])
def test_storage_that_fails_is_one_error_that_names_the_file(case: ViewCase, error: OSError) -> None:
    case.encrypt(parquet_bytes(TABLE))
    for fails_at in itertools.count(1):
        files = FlakyFiles(fails_at, error)
        view = case.keytools().view(str(case.folder), filesystem=files)
        try:
            assert pq.read_table("x.parquet", filesystem=view).equals(TABLE)
        except OSError as found:
            assert type(found) is type(error) and str(error) in str(found)
            assert "x.parquet" in str(found)
        else:
            break
    assert 3 < fails_at < 30
    # No state of the failure remains.
    files.fails_at, files.reads = 10**9, 0
    assert pq.read_table("x.parquet", filesystem=view).equals(TABLE)
