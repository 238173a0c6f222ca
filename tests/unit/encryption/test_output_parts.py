"""Threads that write one output."""

from __future__ import annotations

import io
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, NamedKeys, decrypted, encrypted

from parquet_keytools.encryption import output_parts
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.output_parts import BytesPart, write_parts
from parquet_keytools.encryption.protection import ColumnEncryption


class SlowSink(MemorySink):
    """A sink that takes a second for a thousand writes."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        time.sleep(0.001)
        super().write_at(offset, data)


def test_no_thread_goes_on_where_another_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write on when the caller has closed the file, and another one may have its number."""
    monkeypatch.setattr(output_parts, "SEGMENT_LENGTH", 1)
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "parquet-keytools-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    sink = SlowSink()
    sink.reserve(1000)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        write_parts([BytesPart(1, lambda: b"x")] * 1000, sink, threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name == "parquet-keytools-1"]


class HeldSink(MemorySink):
    """A sink that holds the first write of another thread until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self.main_thread = threading.current_thread()

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        if threading.current_thread() is not self.main_thread and not self.is_held.is_set():
            self.is_held.set()
            assert self.may_go_on.wait(60)
        super().write_at(offset, data)


@pytest.mark.parametrize("interrupted", ["while it starts", "while it is waited for"])
def test_no_thread_goes_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, interrupted: str) -> None:
    monkeypatch.setattr(output_parts, "SEGMENT_LENGTH", 1)
    sink = HeldSink()
    sink.reserve(1000)
    start, join = threading.Thread.start, threading.Thread.join
    joined: list[threading.Thread] = []

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        assert sink.is_held.wait(60)
        if interrupted == "while it starts":
            sink.may_go_on.set()
            raise KeyboardInterrupt

    def interrupt_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread)
        if len(joined) == 1 and interrupted == "while it is waited for":
            raise KeyboardInterrupt
        sink.may_go_on.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    monkeypatch.setattr(threading.Thread, "join", interrupt_and_join)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_parts([BytesPart(1, lambda: b"x")] * 1000, sink, threads=2)
        assert not [thread for thread in threading.enumerate() if thread.name == "parquet-keytools-1"]
    finally:
        sink.may_go_on.set()


@pytest.mark.parametrize("length", [1, 300, 3_000])
def test_chunks_are_written_in_pieces_of_whole_pages(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """One page at a time, or several; encrypted, decrypted, and copied as they are."""
    monkeypatch.setattr(output_parts, "SEGMENT_LENGTH", length)
    stream = io.BytesIO()
    table = pa.table({"a": [f"text {i}" for i in range(5_000)], "b": list(range(5_000))})
    pq.write_table(table, stream, data_page_size=500, write_batch_size=50, row_group_size=2_500)
    data, keys = stream.getvalue(), NamedKeys()
    copied = {("b",): ColumnEncryption.PLAINTEXT}
    back = decrypted(encrypted(data, FileEncryption(keys.new(b"kf"), b"kf", copied)), keys)
    assert pq.read_table(io.BytesIO(back)).equals(table)
    assert back[: -8 - int.from_bytes(back[-8:-4], "little")] == data[: -8 - int.from_bytes(data[-8:-4], "little")]
