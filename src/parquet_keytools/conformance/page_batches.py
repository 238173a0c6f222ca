"""The pages of many chunks, authenticated by several threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parquet_keytools.conformance.chunk_modules import Window, ends_of_runs
from parquet_keytools.conformance.chunk_verifier import ChunkVerifier, Task
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.runtime.working_threads import in_threads

_STEP = 4 * 1024 * 1024
"""How much is read at once."""

_SMALL_PAGE = 32 * 1024
"""Up to how many bytes the thread that walks authenticates a page itself: to hand it over would take longer."""

_BATCH_BYTES = 32 * 1024 * 1024
"""How much is walked before it is authenticated: large enough that threads seldom wait for each other."""


def authenticate_pages(source: ByteSource, verifiers: Sequence[ChunkVerifier], threads: int) -> None:
    """Walk chunks one after another, and authenticate their pages.

    To walk is Python's work and to authenticate is the cipher's, which lets go of the interpreter. Threads that do
    both at once wait for each other more than they work: so one thread walks, and then all authenticate, each into
    memory that it uses again and again. Small pages, for which the cipher takes no longer than Python, are
    authenticated on the way.
    """
    scratches = [bytearray(_SMALL_PAGE) for _ in range(threads)]
    for batch in _batches(source, verifiers):
        longest = max(len(stored) for _, _, stored, _ in batch)
        for position, scratch in enumerate(scratches):
            if len(scratch) < longest:
                scratches[position] = bytearray(longest)
        shares = [(batch[position::threads], scratch) for position, scratch in enumerate(scratches)]
        in_threads(_authenticate, shares, threads)


def _authenticate(share: tuple[list[Task], bytearray]) -> None:
    tasks, scratch = share
    view = memoryview(scratch)
    for verifier, page, stored, module in tasks:
        verifier.check_page(page, stored, module, view)


def _batches(source: ByteSource, verifiers: Sequence[ChunkVerifier]) -> Iterator[list[Task]]:
    """Authenticate small pages, and yield others, those of about `_BATCH_BYTES` of the file together."""
    scratch = memoryview(bytearray(_SMALL_PAGE))
    window = Window(source, _STEP)
    ends = ends_of_runs([(verifier.region.offset, verifier.end) for verifier in verifiers])
    batch: list[Task] = []
    size = 0
    for verifier, window.end in zip(verifiers, ends, strict=True):
        for task in verifier.walk(window):
            _, page, stored, module = task
            # One page keeps all that was read with it: small ones count, too.
            size += page.offset - page.header_offset + len(stored)
            if len(stored) <= _SMALL_PAGE:
                verifier.check_page(page, stored, module, scratch)
            else:
                batch.append(task)
            if size >= _BATCH_BYTES:
                if batch:
                    yield batch
                batch, size = [], 0
    if batch:
        yield batch
