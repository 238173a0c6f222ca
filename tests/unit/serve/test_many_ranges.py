"""Many ranges of many readers at the same time: each is the slice of the whole."""

from __future__ import annotations

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor

from soak import how_many
from unit.serve.serving import asked, connected, served

from parquet_keytools.serve.view_server import ViewServer

CONTENT = os.urandom(2_500_000)
READERS = 64


def wrong_ranges(server: ViewServer, seed: int, count: int) -> list[str]:
    """Ask for ranges on one connection, and return those that were answered wrongly."""
    chance = random.Random(seed)
    wrong = []
    with contextlib.closing(connected(server)) as connection:
        for _ in range(count):
            size = len(CONTENT)
            start = chance.choice([0, size - 1, chance.randrange(size), chance.randrange(size + 100)])
            length = chance.choice([1, 2, 8, 100, 5000, chance.randrange(1, 70_000)])
            text, found = chance.choice(
                [
                    (f"bytes={start}-{start + length - 1}", CONTENT[start : start + length]),
                    (f"bytes={max(start, size - length)}-", CONTENT[max(start, size - length) :]),
                    (f"bytes=-{length}", CONTENT[-length:]),
                ]
            )
            status, headers, body = asked(connection, server, "file", headers={"Range": text})
            expected_status = 206 if found else 416
            place = f"bytes {CONTENT.find(found)}-" if found and len(found) > 8 else "bytes "
            if (
                status != expected_status
                or (found and body != found)
                or not headers["Content-Range"].startswith(place)
            ):
                wrong.append(text)
    return wrong


def test_every_range_is_the_slice_of_the_whole() -> None:
    each = how_many(1_280, 100_000) // READERS
    with served({"file": CONTENT}) as server, ThreadPoolExecutor(READERS) as pool:
        found = [pool.submit(wrong_ranges, server, seed, each) for seed in range(READERS)]
        assert [text for each_found in found for text in each_found.result()] == []
