"""Every public file as a view: values are equal, and pages equal the plaintext file's byte for byte."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from key_services import key_service
from memory_files import MemorySource, decrypted
from soak import SOAK
from test_public_files import FILES, keys_of
from test_public_verdicts import keytools_for
from view_case import ViewCase, same_contents, whole

from parquet_keytools.encryption.footer import read_footer
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, open_plain_file

WAYS = list(
    itertools.product(("AES_GCM_V1", "AES_GCM_CTR_V1"), (False, True), ("footer key", "column key", "one column"))
)
if not SOAK:
    # Each pair of algorithm, footer and layout occurs.
    WAYS = [way for number, way in enumerate(WAYS) if (number // 6 + number // 3 + number % 3) % 2 == 0]


def read(data: bytes) -> pa.Table | str:
    """Return the table that pyarrow reads, or its error."""
    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        return str(error)


def check_ranges(file: PlainFile, data: bytes, count: int) -> None:
    """Read ranges in any order; no byte of `file` was read before."""
    choose = random.Random(len(data))
    for _ in range(count):
        start = choose.randrange(len(data) + 1)
        end = min(start + choose.choice((0, 1, 8, 100, 5_000, len(data))), len(data))
        assert bytes(file.read_at(start, end - start)) == data[start:end], (start, end)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_every_plain_file_comes_back_through_its_view(
    parquet_test_data: Path, tmp_path: Path, way: tuple[str, bool, str]
) -> None:
    algorithm, plaintext_footer, layout = way
    seen = 0
    for number, path in enumerate(sorted(parquet_test_data.glob("*.parquet"))):
        if not SOAK and number % 3 != WAYS.index(way) % 3:
            continue
        plain = path.read_bytes()
        if len(plain) > 100_000 and not SOAK and layout != "one column":
            continue
        table: dict[str, Any] = {"algorithm": algorithm, "plaintext_footer": plaintext_footer}
        if layout == "footer key":
            table["unlisted_columns"] = "footer_key"
        else:
            leaves = read_footer(MemorySource(plain), None).leaves
            table["column_keys"] = {"secret": ["*"] if layout == "column key" else [leaves[0].dotted_path]}
        case = ViewCase(tmp_path, table)
        encrypted = case.encrypt(path, path.name)
        file = case.view(encrypted)
        data = whole(file)
        assert len(data) == encrypted.stat().st_size, path.name
        assert same_contents(data, plain), path.name
        found, expected = read(data), read(plain)
        assert type(found) is type(expected), path.name
        if isinstance(found, pa.Table):
            # NaN is not equal to itself; its bytes are compared above.
            assert found.equals(expected) or "nan" in path.name, path.name
            assert plaintext_footer or found.schema.equals(expected.schema, check_metadata=True), path.name
        check_ranges(case.view(encrypted), data, 25)
        seen += 1
    assert seen > (30 if SOAK else 8)


@pytest.mark.parametrize("name", FILES)
def test_the_public_encrypted_files(parquet_test_data: Path, name: str) -> None:
    path = parquet_test_data / name
    keys = keytools_for(name)
    location = FileLocation.resolve(path)
    prefix = "tester" if "aad" in name else None
    data = whole(open_plain_file(key_service(keys), location, aad_prefix=prefix, cache=PageCache()))
    plain = decrypted(path.read_bytes(), keys_of(name))
    assert same_contents(data, plain)
    assert pq.read_table(pa.BufferReader(data)).equals(pq.read_table(pa.BufferReader(plain)))
    check_ranges(open_plain_file(key_service(keys), location, cache=PageCache()), data, 300)
