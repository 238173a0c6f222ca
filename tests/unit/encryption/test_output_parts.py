"""Threads that write one output."""

from __future__ import annotations

import io
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, NamedKeys, decrypted, encrypted

from parquet_keytools.encryption import file_rewriter
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.file_rewriter import BytesPart, write_parts
from parquet_keytools.encryption.protection import ColumnEncryption


class ClosedSink(MemorySink):
    """A sink that takes a second for a thousand writes, and records writes after it is closed."""

    is_closed = is_written_closed = False

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        time.sleep(0.001)
        self.is_written_closed |= self.is_closed
        super().write_at(offset, data)


def test_no_thread_goes_on_when_one_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late thread would write after the caller has closed the file, whose descriptor another file may have."""
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", 1)
    sink, start, started = ClosedSink(), threading.Thread.start, list[threading.Thread]()

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    sink.reserve(1000)
    with pytest.raises(KeyboardInterrupt):
        write_parts([BytesPart(1, lambda: b"x")] * 1000, sink, threads=2)
    sink.is_closed = True
    for thread in started:
        thread.join(60)
    assert len(started) == 1 and not sink.is_written_closed


@pytest.mark.parametrize("length", [1, 300, 3_000])
def test_chunks_are_written_in_pieces_of_whole_pages(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """One page at a time, or several; encrypted, decrypted, and copied as they are."""
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", length)
    stream = io.BytesIO()
    table = pa.table({"a": [f"text {i}" for i in range(5_000)], "b": list(range(5_000))})
    pq.write_table(table, stream, data_page_size=500, write_batch_size=50, row_group_size=2_500)
    data, keys = stream.getvalue(), NamedKeys()
    copied = {("b",): ColumnEncryption.PLAINTEXT}
    back = decrypted(encrypted(data, FileEncryption(keys.new(b"kf"), b"kf", copied)), keys)
    assert pq.read_table(io.BytesIO(back)).equals(table)
    assert back[: -8 - int.from_bytes(back[-8:-4], "little")] == data[: -8 - int.from_bytes(data[-8:-4], "little")]
