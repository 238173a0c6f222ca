"""Metadata files and plaintext manifests that somebody made to do harm: they end in errors, within bounds."""

from __future__ import annotations

import bz2
import io
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import pytest
import zstandard
from iceberg_case import Lake, rows

from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.iceberg import manifests
from parquet_keytools.iceberg.loading import located_table
from parquet_keytools.iceberg.manifests import files_in, manifests_in
from parquet_keytools.iceberg.table_audit import TableAudit, TableReport

BOMB = 64 << 20


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path)
    lake.create().append(rows(0, 5))
    return lake


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def claim(lake: Lake, change: Callable[[dict[str, Any]], None]) -> str:
    """Change the current metadata file, and return its location."""
    location = lake.load().metadata_location
    document = json.loads(path_of(location).read_text())
    change(document)
    path_of(location).write_text(json.dumps(document))
    return location


def audit(lake: Lake, location: str) -> TableReport:
    return TableAudit(located_table(location, lake.folder / "keytools.yaml"), with_data=True).run()


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:1/latest/meta-data",
        "HTTPS://127.0.0.1:1/x",
        "s3://bucket/list.avro",
        "hdfs://127.0.0.1:1/x",
        "ftp://127.0.0.1/x",
        "unknown://x",
        "http://[::1",
    ],
)
def test_no_request_goes_where_a_changed_metadata_file_says(lake: Lake, location: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["snapshots"][0]["manifest-list"] = location

    metadata = claim(lake, change)
    with pytest.raises(ParquetFormatError, match=r"it names .*, which is in") as caught:
        lake.catalog().load_table("db.people").scan().to_arrow()
    assert location in str(caught.value)
    # Whoever does have files there says so.
    with pytest.raises((KeytoolsError, OSError)) as after:
        lake.load(**{"keytools.location-mapping": f"{location}=file:///nowhere"}).scan().to_arrow()
    assert "which is in" not in str(after.value)
    claim(lake, lambda document: document.update({"statistics": [{"statistics-path": location}]}))
    problems = [problem for link, problem in audit(lake, metadata).findings if location in link]
    assert sum("which is in" in problem for problem in problems) == 2


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "null byte", "traversal"])
def test_what_is_no_file_is_not_read(lake: Lake, kind: str) -> None:
    place = lake.folder / "odd"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    secret = lake.folder / "secret"
    secret.write_text("top secret text")
    location = {
        "device": "file:///dev/zero",
        "null byte": "file:///tmp/a\0b",
        "traversal": f"file://{lake.warehouse}/db/people/metadata/../../../../secret",
    }.get(kind, f"file://{place}")

    def change(document: dict[str, Any]) -> None:
        document["snapshots"][0]["manifest-list"] = location
        # Without a key, it would be read as plaintext.
        del document["snapshots"][0]["key-id"]

    metadata = claim(lake, change)
    report = audit(lake, metadata)
    problems = [problem for link, problem in report.findings if "manifest list" in link]
    assert len(problems) == 2 and not any("secret text" in problem for problem in problems)
    with pytest.raises(KeytoolsError) as caught:
        lake.load().scan().to_arrow()
    assert "secret text" not in str(caught.value)


def number(value: int) -> bytes:
    """Return a positive number as Avro has it."""
    out = bytearray()
    value <<= 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def string(text: str) -> bytes:
    return number(len(text)) + text.encode("ascii")


LIST = {"type": "record", "name": "manifest_file", "fields": [
    {"name": "manifest_path", "type": "string", "field-id": 500},
    {"name": "manifest_length", "type": "long", "field-id": 501},
]}  # fmt: skip


def avro(schema: dict[str, Any] | str, codec: str, records: int, data: bytes) -> bytes:
    """Return an Avro file with one block of any content; its schema may come as JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    header = number(2) + string("avro.schema") + string(text) + string("avro.codec") + string(codec) + number(0)
    sync = b"s" * 16
    return b"Obj\x01" + header + sync + number(records) + number(len(data)) + data + sync


def deflated() -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


def bunzipped() -> bytes:
    compressor = bz2.BZ2Compressor(9)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


def zstandarded() -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


EMPTY = {"type": "record", "name": "r1", "fields": []}


def with_list(items: Any) -> dict[str, Any]:
    extra = {"name": "x", "type": {"type": "array", "items": items, "element-id": 9}, "field-id": 8}
    return {**LIST, "fields": [*LIST["fields"], extra]}  # type: ignore[misc]


def nested(depth: int) -> str:
    """Return a schema as JSON: no depth may be too much for what makes it."""
    marked = json.dumps(with_list("nested"))
    records = (
        f'{{"type": "record", "name": "r{n}", "fields": [{{"name": "f", "field-id": {n + 1000}, "type": '
        for n in range(depth)
    )
    return marked.replace('"nested"', "".join(records) + '"string"' + "}]}" * depth)


HUGE = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
"""2^62 - 1 as Avro has it."""

HOSTILE = {
    "deflate bomb": lambda: avro(LIST, "deflate", 1, deflated()),
    "bzip2 bomb": lambda: avro(LIST, "bzip2", 1, bunzipped()),
    "zstandard bomb": lambda: avro(LIST, "zstandard", 1, zstandarded()),
    "records without bytes": lambda: avro({**LIST, "fields": []}, "null", 1 << 60, b""),
    "more records than bytes": lambda: avro(LIST, "null", 1 << 40, b"\x02a\x02"),
    "elements without bytes": lambda: avro(with_list(EMPTY), "null", 1, b"\x02a\x02" + HUGE + b"\0"),
    "a string beyond the end": lambda: avro(LIST, "null", 1, b"\x80\x80\x80\x04abc"),
    "a list that goes back": lambda: avro(with_list("string"), "null", 1, b"\x02a\x02\x01\x05\0"),
    "a block beyond the end": lambda: avro(LIST, "null", 1, b"")[:-18] + b"\x02" + HUGE,
    "a cut block": lambda: avro(LIST, "deflate", 1, zlib.compress(b"\x02a\x02")[2:-6]),
    "no Avro at all": lambda: b"Obj\x01" + bytes(1000),
    "deep nesting": lambda: avro(nested(3_000), "null", 1, b"\x02a\x02\0"),
    "deepest nesting": lambda: avro(nested(30_000), "null", 1, b"\x02a\x02\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plaintext_manifest_list_that_does_harm_is_reported(
    lake: Lake, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snapshot,) = json.loads(path_of(lake.load().metadata_location).read_text())["snapshots"]
    path_of(snapshot["manifest-list"]).write_bytes(HOSTILE[name]())
    metadata = claim(lake, lambda document: document["snapshots"][0].pop("key-id"))
    monkeypatch.setattr(manifests, "MAX_PLAINTEXT_BYTES", 4 << 20)
    tracemalloc.start()
    try:
        report = audit(lake, metadata)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    problems = [problem for link, problem in report.findings if "manifest list" in link]
    assert len(problems) == 2 and "cannot be decoded" in problems[1]


def test_what_is_honest_is_read_within_bounds(lake: Lake) -> None:
    table = lake.load()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    content, snapshot_id = table.reader.read_all(snapshot.manifest_list), snapshot.snapshot_id
    assert manifests_in(content, "x", snapshot_id, authentic=False) == manifests_in(
        content, "x", snapshot_id, authentic=True
    )
    (manifest,) = manifests_in(content, "x", snapshot_id, authentic=True)
    content = table.reader.read_all(manifest.location)
    files = files_in(content, "x", authentic=True)
    assert len(files) == 1 and files_in(content, "x", authentic=False) == files
    for codec in ("null", "deflate", "bzip2"):
        reader = fastavro.reader(io.BytesIO(content))
        again = io.BytesIO()
        fastavro.writer(again, reader.writer_schema, list(reader), codec=codec)
        assert files_in(again.getvalue(), "x", authentic=False) == files
