"""A file that is written row group by row group: input that does not belong in it."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, MemorySource

from parquet_keytools.encryption import aad
from parquet_keytools.encryption.file_encryption import FileEncryption, StreamedFile
from parquet_keytools.errors import FormatLimitError, ParquetFormatError
from parquet_keytools.secret_bytes import SecretBytes


class GrowingSink(MemorySink):
    """Collects its input at the end."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        assert offset == len(self.data)
        self.data += data


def plain(*names: str, rows: int = 3, path: str = "part.parquet") -> MemorySource:
    """Return a file with a row group for each row."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(range(rows), pa.int64()) for name in names}), buffer, row_group_size=1)
    return MemorySource(buffer.getvalue(), path)


@pytest.fixture
def sink() -> MemorySink:
    return GrowingSink(takes_any_order=False)


@pytest.fixture
def file(sink: MemorySink) -> StreamedFile:
    return StreamedFile(sink, FileEncryption(SecretBytes.random(128), b"kf"), plain("a", "b", rows=0))


def test_another_schema_is_refused(file: StreamedFile, sink: MemorySink) -> None:
    file.append(plain("a", "b"))
    written = bytes(sink.data)
    for names in (("a", "c"), ("b", "a"), ("a",), ("a", "b", "c")):
        with pytest.raises(
            ParquetFormatError, match=r"part\.parquet: a row group has another schema than the file"
        ):
            file.append(plain(*names))
        with pytest.raises(
            ParquetFormatError, match=r"part\.parquet: the footer has another schema than the file"
        ):
            file.finish(plain(*names, rows=0))
    assert bytes(sink.data) == written and file.num_rows == 3


def test_no_more_row_groups_than_there_are_ordinals(
    file: StreamedFile, sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aad, "MAX_COUNT", 5)
    file.append(plain("a", "b"))
    written = bytes(sink.data)
    with pytest.raises(FormatLimitError, match=r"part\.parquet: .* at most 5 row groups .* Write larger"):
        file.append(plain("a", "b"))
    assert bytes(sink.data) == written
    file.append(plain("a", "b", rows=2))
    assert file.num_rows == 5
