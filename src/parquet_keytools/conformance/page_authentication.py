"""All pages of a file authenticated, by several threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from parquet_keytools.conformance.chunk_modules import Page
from parquet_keytools.conformance.chunk_verifier import ChunkVerifier
from parquet_keytools.format.byte_ranges import ByteSource

_BATCH_BYTES = 32 * 1024 * 1024
"""How much is walked before it is authenticated: large enough that threads seldom wait for each other."""

Task = tuple[ChunkVerifier, Page, memoryview]


def authenticate_pages(source: ByteSource, verifiers: Iterable[ChunkVerifier], threads: int) -> None:
    """Walk chunks one after another, and authenticate their pages.

    To walk is Python's work and to authenticate is the cipher's, which lets go of the interpreter. Threads that do
    both at once wait for each other more than they work: so one thread walks, and then all authenticate, each into
    memory that it uses again and again.

    Args:
        source: The file.
        verifiers: Those of its chunks.
        threads: How many threads work; the calling one is among them.
    """
    scratches = [bytearray() for _ in range(threads)]
    with ThreadPoolExecutor(max(1, threads - 1)) as pool:
        for batch in _batches(source, verifiers):
            longest = max(len(stored) for _, _, stored in batch)
            for position, scratch in enumerate(scratches):
                if len(scratch) < longest:
                    scratches[position] = bytearray(longest)
            shares = [batch[position::threads] for position in range(threads)]
            others = [
                pool.submit(_authenticate, share, memoryview(scratch))
                for share, scratch in zip(shares[1:], scratches[1:], strict=True)
            ]
            _authenticate(shares[0], memoryview(scratches[0]))
            for other in others:
                other.result()


def _authenticate(share: list[Task], scratch: memoryview) -> None:
    for verifier, page, stored in share:
        verifier.check_page(page, stored, scratch)


def _batches(source: ByteSource, verifiers: Iterable[ChunkVerifier]) -> Iterator[list[Task]]:
    """Yield pages that are about `_BATCH_BYTES` together."""
    batch: list[Task] = []
    size = 0
    for verifier in verifiers:
        for page, stored in verifier.walk(source):
            batch.append((verifier, page, stored))
            size += len(stored)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
