"""All answers of a server or a mount, searched for refused values and for keys."""

from __future__ import annotations

import base64
import io
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from soak import SOAK
from unit.serve.serving import opened_by, said
from view_case import ViewCase

from parquet_keytools import SecretBytes
from parquet_keytools.kms.contract_tests import wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.serve.fuse_mount import MountedTree
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer

ROWS = 3_000 if SOAK else 1_000
NUMBERS = [int.from_bytes(os.urandom(7), "little") + (1 << 61) for _ in range(ROWS)]
REALS = [number / 7.0 for number in NUMBERS]
TEXTS = [f"person-{os.urandom(9).hex()}" for _ in range(ROWS)]
TABLE = pa.table(
    {
        "id": range(ROWS),
        "number": pa.array(NUMBERS, pa.int64()),
        "real": REALS,
        "person": [{"name": text, "row": row} for row, text in enumerate(TEXTS)],
        "kind": [TEXTS[row % 7] for row in range(ROWS)],
        "other": [f"row {row}" for row in range(ROWS)],
    }
)
REFUSED = ["number", "real", "person.name", "kind"]


def needles() -> dict[bytes, str]:
    """Return the refused values as a file could contain them: plain, and the minimum and maximum in statistics."""
    rows = [*range(0, ROWS, 50), NUMBERS.index(min(NUMBERS)), NUMBERS.index(max(NUMBERS)), ROWS - 1]
    found = {}
    for row in rows:
        found[struct.pack("<q", NUMBERS[row])] = f"number of row {row}"
        found[struct.pack("<d", REALS[row])] = f"real of row {row}"
        found[str(NUMBERS[row]).encode()] = f"number of row {row} as text"
        found[TEXTS[row].encode()] = f"text of row {row}"
    found[b"person-"] = "any text"
    return found


def forms(key: bytes) -> Iterator[bytes]:
    yield key
    yield key.hex().encode()
    yield key.hex().upper().encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            # Without the characters that the key's neighbours change.
            yield encode(b"\0" * shift + key)[4 if shift else 0 :].rstrip(b"=")[: len(key) * 4 // 3 - 5]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[bytes]]:
    """All keys in this process from now on: master keys, KEKs, DEKs, and the S3 secret."""
    found: set[bytes] = set()
    make = SecretBytes.__init__

    def record(self: SecretBytes, value: Any, *rest: Any) -> None:
        make(self, value, *rest)
        found.add(self.reveal())

    monkeypatch.setattr(SecretBytes, "__init__", record)
    yield found


@pytest.fixture
def case(tmp_path: Path, keys: set[bytes]) -> ViewCase:
    kms = InMemoryKms(dict.fromkeys(("footer", "secret", "hashing")))
    made = ViewCase(
        tmp_path,
        {"column_keys": {"secret": REFUSED}, "unlisted_columns": "footer_key", "hash_key": "p"},
        {},
        kms,
        {
            "hash_keys": {
                "p": {"master_key": "hashing", "wrapped_key": wrap_one(kms, SecretBytes.random(256), "hashing")}
            }
        },
    )
    sink = io.BytesIO()
    pq.write_table(
        TABLE,
        sink,
        row_group_size=ROWS // 3,
        data_page_size=4_000,
        write_page_index=True,
        use_dictionary=["kind"],
        compression="none",
    )
    plain = tmp_path / "plain.parquet"
    plain.write_bytes(sink.getvalue())
    # The search finds what exists.
    assert [where for needle, where in needles().items() if needle in sink.getvalue()] == [
        where for where in needles().values() if not where.endswith("as text")
    ]
    (tmp_path / "data" / "folder").mkdir(parents=True)
    for name in ("x.parquet", "folder/altered.parquet"):
        made.keytools().encrypt_file(plain, tmp_path / "data" / name)
    altered = tmp_path / "data" / "folder" / "altered.parquet"
    content = bytearray(altered.read_bytes())
    content[len(content) // 3] ^= 1
    altered.write_bytes(content)
    (tmp_path / "data" / "notes.txt").write_bytes(TEXTS[0].encode())
    pq.write_table(TABLE.select(["kind"]), tmp_path / "data" / "plaintext.parquet")
    return made


RANGES = [
    *(f"bytes={start}-{start + 19_999}" for start in range(0, 100 * ROWS, 20_000)),
    *("bytes=0-3", "bytes=-8", "bytes=-65536", "bytes=99999999-", "bytes=5-1", "bytes=0-", "bytes=0-1,5-9"),
]
PATHS = [
    "",
    "folder/",
    "x.parquet",
    "folder/altered.parquet",
    "notes.txt",
    "plaintext.parquet",
    "none",
    "../plain",
]


def over_http(server: ViewServer) -> Iterator[bytes]:
    for path in PATHS:
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            yield said(server, f"{method} PATH{path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n".encode())
    for path in ("x.parquet", "folder/altered.parquet"):
        for wanted in RANGES:
            head = f"GET PATH{path} HTTP/1.1\r\nHost: HOST\r\nRange: {wanted}\r\nConnection: close\r\n\r\n"
            yield said(server, head.encode())
    for odd in (
        b"\x00\r\n\r\n",
        b"GET PATHx.parquet HTTP/1.1\r\n\r\n",
        b"GET /x.parquet HTTP/1.1\r\nHost: HOST\r\n\r\n",
    ):
        yield said(server, odd.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))


def over_s3(server: ViewServer) -> Iterator[bytes]:
    host, pair = urlsplit(server.endpoint).netloc, server.key_pair
    assert pair is not None
    credentials = Credentials(pair.access_key_id, pair.secret.reveal().decode())

    def asked(method: str, path: str, **headers: str) -> bytes:
        request = AWSRequest(method, f"{server.endpoint}{path}", headers={"Host": host, **headers})
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        return said(server, f"{method} {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())

    for query in ("", "&delimiter=%2F", "&prefix=folder%2F", "&encoding-type=url", "&max-keys=1", "&max-keys=x"):
        yield asked("GET", f"/view?list-type=2{query}")
    for path in ("/", "/other", "/view?location=", "/view?acl="):
        yield asked("GET", path)
    for path in PATHS[2:]:
        for method in ("GET", "HEAD", "PUT", "DELETE", "POST"):
            yield asked(method, f"/view/{path}")
    for path in ("x.parquet", "folder/altered.parquet"):
        for wanted in RANGES:
            yield asked("GET", f"/view/{path}", Range=wanted)
    # A request that is unsigned, or wrongly signed, gets no data either.
    yield said(server, b"GET /view/x.parquet HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n")
    credentials = Credentials(pair.access_key_id, "another secret")
    yield asked("GET", "/view/x.parquet")
    yield asked("GET", "/view?list-type=2")


def mounted(tree: ServedTree) -> Iterator[bytes]:
    mount = MountedTree(tree, lambda: None)
    for folder in ("/", "/folder"):
        yield repr(list(mount.readdir(folder, 0))).encode()
    for path in PATHS[2:]:
        try:
            size = mount.getattr(f"/{path}")["st_size"]
            handle = opened_by(mount, f"/{path}")
        except OSError as error:
            yield repr(error).encode()
            continue
        # Ranges overlap, so that no value is split into two halves.
        for start in range(0, size, 19_000):
            try:
                yield mount.read(f"/{path}", 20_000, start, handle)
            except OSError as error:
                yield repr(error).encode()
        mount.release(f"/{path}", handle)


def answers_of(case: ViewCase, denied_columns: str) -> tuple[dict[str, list[bytes]], bytes]:
    """Return everything that is sent, and the secret of the URL."""
    folder = case.folder / "data"
    tree = ServedTree(case.keytools(denied_columns=denied_columns).view(folder), folder=folder)
    with ViewServer(tree, with_s3=True) as server:
        answers = {"http": list(over_http(server)), "s3": list(over_s3(server)), "mount": list(mounted(tree))}
    return answers, urlsplit(server.url).path.strip("/").encode()


def found_in(answers: dict[str, list[bytes]], wanted: dict[bytes, str]) -> set[tuple[str, str]]:
    return {
        (kind, where)
        for kind, parts in answers.items()
        for needle, where in wanted.items()
        if any(needle in part for part in parts)
    }


def test_the_search_finds_what_may_be_read(case: ViewCase) -> None:
    answers, _ = answers_of(case, "error")
    everything = {
        (kind, where) for kind in answers for where in needles().values() if not where.endswith("as text")
    }
    assert found_in(answers, needles()) == everything


@pytest.mark.parametrize(
    ("denied_columns", "denied"),
    [
        *((name, ("secret",)) for name in ("error", "hide", "null", "hash")),
        *(
            (name, ("secret", "footer"))
            for name in (("error", "hide", "null", "hash") if SOAK else ("error", "hash"))
        ),
        # Readers who may have the keys, and must not see the values.
        ("hash", ()),
        ("hash", ("hashing",)),
    ],
)
def test_no_refused_value_and_no_key_leaves_in_any_answer(
    case: ViewCase,
    keys: set[bytes],
    denied_columns: str,
    denied: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for master_key_id in denied:
        case.kms.deny(master_key_id)
    with caplog.at_level(logging.DEBUG):
        answers, token = answers_of(case, denied_columns)
    if "footer" not in denied:
        # The readable values are there, so the answers really are files.
        for kind, parts in answers.items():
            assert any(b"row %d" % (ROWS - 1) in part for part in parts), kind
    answers["log"] = [caplog.text.encode(), *(repr(vars(record)).encode() for record in caplog.records)]
    assert len(keys) > 5
    wanted = {**needles(), token: "the secret of the URL"}
    for key in keys:
        wanted |= dict.fromkeys(forms(key), "a key")
    assert found_in(answers, wanted) == set()
