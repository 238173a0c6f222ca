"""Writes the parts of an output file, with several threads where the sink takes ranges in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from parquet_keytools.encryption.output_parts import SEGMENT_LENGTH, Part, Piece
from parquet_keytools.format.byte_ranges import ByteSink

Batch = tuple[int, int, list[Piece]]
"""Offset and length in bytes of neighbouring pieces that are written together, and the pieces."""


def write_parts(
    parts: Iterable[Part],
    sink: ByteSink,
    *,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Make all parts and write them one after another.

    Args:
        parts: In the order in which they lie in the file.
        sink: Where they go; its space is reserved.
        threads: How many threads work; the calling one is among them.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        KeytoolsError: A part cannot be made. What was written so far is worth nothing then.
        OSError: The sink cannot be written.
    """
    work = _Work(_batches(parts), sink, on_progress)
    helpers = [
        threading.Thread(target=work.run, name=f"parquet-keytools-{number}", daemon=True)
        for number in range(1, threads if sink.takes_any_order else 1)
    ]
    for helper in helpers:
        helper.start()
    try:
        work.run()
    except BaseException:
        work.stop()
        raise
    finally:
        for helper in helpers:
            helper.join()
    work.raise_failure()


def _batches(parts: Iterable[Part]) -> Iterator[Batch]:
    offset = length = 0
    batch: list[Piece] = []
    for part in parts:
        for piece in part.pieces():
            if batch and length + piece.length > SEGMENT_LENGTH:
                yield offset, length, batch
                offset, length, batch = offset + length, 0, []
            batch.append(piece)
            length += piece.length
    if batch:
        yield offset, length, batch


class _Work:
    """What the threads share: the batches that are left, and the first failure."""

    def __init__(
        self, batches: Iterator[Batch], sink: ByteSink, on_progress: Callable[[int], None] | None
    ) -> None:
        self._batches = batches
        self._sink = sink
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._stopped = False

    def run(self) -> None:
        buffer = bytearray()
        try:
            while True:
                with self._lock:
                    if self._stopped:
                        return
                    batch = next(self._batches, None)
                if batch is None:
                    return
                offset, length, pieces = batch
                if len(buffer) < length:
                    buffer = bytearray(length)
                view = memoryview(buffer)
                start = 0
                for piece in pieces:
                    piece.make(view[start : start + piece.length])
                    start += piece.length
                self._sink.write_at(offset, view[:length])
                if self._on_progress is not None:
                    self._on_progress(length)
        except BaseException as error:
            # The thread that called raises it; the others stop.
            with self._lock:
                self._failure = self._failure or error
            self.stop()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
