"""Many ranges of many concurrent readers: each equals the slice of the whole file."""

from __future__ import annotations

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from soak import how_many
from unit.serve.serving import asked, connected, served

from parquet_keytools.serve.view_server import ViewServer

CONTENT = os.urandom(2_500_000)
READERS = 64


def asked_as_s3(
    connection: HTTPConnection, server: ViewServer, key: str, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    pair = server.key_pair
    assert pair is not None
    request = AWSRequest("GET", f"{server.endpoint}/view/{key}", headers=headers)
    request.headers["Host"] = urlsplit(server.endpoint).netloc
    S3SigV4Auth(Credentials(pair.access_key_id, pair.secret.reveal().decode()), "s3", "x").add_auth(request)
    connection.request("GET", f"/view/{key}", headers=dict(request.headers.items()))
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


def wrong_ranges(server: ViewServer, protocol: str, seed: int, count: int) -> list[str]:
    """Request ranges on one connection, and return the ranges with wrong answers."""
    chance = random.Random(seed)
    wrong = []
    ask = asked_as_s3 if protocol == "s3" else asked
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
            status, headers, body = ask(connection, server, "file", headers={"Range": text})
            expected_status = 206 if found else 416
            place = f"bytes {CONTENT.find(found)}-" if found and len(found) > 8 else "bytes "
            if (
                status != expected_status
                or (found and body != found)
                or not headers["Content-Range"].startswith(place)
            ):
                wrong.append(text)
    return wrong


@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_every_range_is_the_slice_of_the_whole(protocol: str) -> None:
    each = -(-how_many(320, 100_000) // READERS)
    with served({"file": CONTENT}, with_s3=True) as server, ThreadPoolExecutor(READERS) as pool:
        found = [pool.submit(wrong_ranges, server, protocol, seed, each) for seed in range(READERS)]
        assert [text for each_found in found for text in each_found.result()] == []
