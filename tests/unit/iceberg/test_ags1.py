"""AGS1: streams from other writers, streams for other readers, and each way to alter one."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iceberg_reader import KEYS, Warehouse, current_metadata, open_sealed, open_stream, write_stream
from soak import how_many

from parquet_keytools.errors import DecryptionError, KeytoolsError, NotEncryptedError
from parquet_keytools.iceberg.ags1 import BLOCK_LENGTH, decrypted, encrypted
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes

METADATA = StandardKeyMetadata(SecretBytes(bytes(range(16))), bytes(range(50, 66)))
FULL = BLOCK_LENGTH + 28
LENGTHS = [0, 1, 1000, BLOCK_LENGTH - 1, BLOCK_LENGTH, BLOCK_LENGTH + 1, 2 * BLOCK_LENGTH, 2 * BLOCK_LENGTH + 5]


def plaintext_of(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def written(plaintext: bytes, metadata: StandardKeyMetadata = METADATA) -> bytes:
    stream = b"".join(encrypted(plaintext, metadata))
    blocks = max(1, -(-len(plaintext) // BLOCK_LENGTH))
    assert len(stream) == 8 + len(plaintext) + blocks * 28
    return stream


def reader(data: bytes, metadata: StandardKeyMetadata | None = None, **changes: Any) -> io.BytesIO:
    metadata = metadata or replace(METADATA, **{"file_length": len(data), **changes})
    return io.BytesIO(decrypted(io.BytesIO(data), metadata, path="lake/m0.avro"))


@pytest.mark.parametrize("length", LENGTHS)
def test_streams_are_written_and_read_like_those_of_others(length: int) -> None:
    plaintext = plaintext_of(length)
    stream = written(plaintext)
    assert open_stream(METADATA.encode().reveal(), stream) == plaintext
    theirs = write_stream(METADATA.encode().reveal(), plaintext)
    assert len(theirs) == len(stream)
    assert reader(theirs).read() == plaintext


def test_no_stream_ends_with_an_empty_block() -> None:
    plaintext = plaintext_of(2 * BLOCK_LENGTH)
    stream = written(plaintext)
    assert len(stream) == 8 + 2 * FULL
    assert open_stream(METADATA.encode().reveal(), stream) == plaintext


@pytest.mark.parametrize("bits", [128, 192, 256])
@pytest.mark.parametrize("prefix", [b"", b"p" * 16])
def test_each_length_of_keys_and_no_prefix(bits: int, prefix: bytes) -> None:
    metadata = replace(StandardKeyMetadata.fresh(bits), aad_prefix=prefix)
    assert reader(written(b"abc", metadata), metadata).read() == b"abc"


def test_each_nonce_is_another_one() -> None:
    plaintext = plaintext_of(2 * BLOCK_LENGTH)
    streams = [written(plaintext), written(plaintext)]
    nonces = [stream[start : start + 12] for stream in streams for start in (8, 8 + FULL)]
    assert len(set(nonces)) == 4


def test_files_of_each_library_are_read(tmp_path: Path) -> None:
    plaintext = plaintext_of(BLOCK_LENGTH + 5)
    path = tmp_path / "m0.avro"
    path.write_bytes(written(plaintext))
    metadata = replace(METADATA, file_length=path.stat().st_size)
    files = [
        path.open("rb"),
        path.open("rb", buffering=0),
        pa.fs.LocalFileSystem().open_input_file(str(path)),
        fsspec.filesystem("file").open(str(path), "rb"),
        pa.OSFile(str(path)),
    ]
    for file in files:
        with file:
            assert decrypted(file, metadata, path=str(path)) == plaintext


class Dribbling(io.BytesIO):
    """Returns fewer bytes than requested, as a socket may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 7_001))


def test_short_reads_of_the_file_are_continued() -> None:
    plaintext = plaintext_of(BLOCK_LENGTH + 5)
    data = written(plaintext)
    metadata = replace(METADATA, file_length=len(data))
    assert decrypted(Dribbling(data), metadata, path="x") == plaintext


class Counting(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


# --- altered streams are refused ---


def refused(data: bytes, **changes: Any) -> str:
    with pytest.raises(DecryptionError) as caught:
        reader(data, **changes)
    assert caught.value.path == "lake/m0.avro"
    assert str(caught.value).startswith("lake/m0.avro: ")
    return str(caught.value)


STREAM = written(plaintext_of(2 * BLOCK_LENGTH + 500))
OTHER = written(plaintext_of(2 * BLOCK_LENGTH + 500))


def test_memory_is_a_multiple_of_what_is_authentic_however_long_a_file_without_a_length_is(tmp_path: Path) -> None:
    path = tmp_path / "m0.avro"
    path.write_bytes(STREAM)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with path.open("rb") as file, pytest.raises(DecryptionError, match="block 2 is not authentic"):
            decrypted(file, replace(METADATA, file_length=None), path="x")
        assert tracemalloc.get_traced_memory()[1] < 24 * BLOCK_LENGTH
    finally:
        tracemalloc.stop()


def test_a_cut_stream_is_refused_before_a_byte_is_read() -> None:
    for length in (8 + FULL, 8 + 2 * FULL, len(STREAM) - 1, 8 + 28, 8, 0):
        file = Counting(STREAM[:length])
        with pytest.raises(DecryptionError) as caught:
            decrypted(file, replace(METADATA, file_length=len(STREAM)), path="x")
        assert file.count <= 8
        assert length < 8 or f"the file has {length} bytes, and its key metadata says {len(STREAM)}" in str(
            caught.value
        )
    assert "blocks were cut off or added" in refused(STREAM + STREAM[8:36], file_length=len(STREAM))


def test_lengths_that_no_stream_has_are_refused() -> None:
    for length in (8, 9, 35, 8 + FULL + 1, 8 + FULL + 28):
        assert "it is cut within a block" in refused(STREAM[:length].ljust(length, b"x"))


@pytest.mark.parametrize(
    ("what", "data", "block"),
    [
        ("first nonce", lambda s: flip(s, 8), 0),
        ("ciphertext", lambda s: flip(s, 8 + FULL + 5_000), 1),
        ("tag", lambda s: flip(s, 8 + 2 * FULL - 1), 1),
        ("last tag", lambda s: flip(s, len(s) - 1), 2),
        (
            "blocks exchanged",
            lambda s: s[:8] + s[8 + FULL : 8 + 2 * FULL] + s[8 : 8 + FULL] + s[8 + 2 * FULL :],
            0,
        ),
        ("block twice", lambda s: s[: 8 + FULL] + s[8 : 8 + FULL] + s[8 + 2 * FULL :], 1),
        ("last block moved", lambda s: s[:8] + s[8 + 2 * FULL :], 0),
    ],
)
def test_each_alteration_names_the_block(what: str, data: Any, block: int) -> None:
    assert f"block {block} is not authentic" in refused(data(STREAM)), what


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_nothing_of_another_stream_another_key_or_another_prefix_is_taken() -> None:
    stranger = StandardKeyMetadata.fresh(128)
    foreign = written(plaintext_of(2 * BLOCK_LENGTH + 500), replace(METADATA, aad_prefix=b"q" * 16))
    assert "block 0 is not authentic" in refused(STREAM, encryption_key=stranger.encryption_key)
    assert "block 0 is not authentic" in refused(STREAM, aad_prefix=stranger.aad_prefix)
    assert "block 1 is not authentic" in refused(STREAM[: 8 + FULL] + foreign[8 + FULL :])


def test_an_empty_stream_is_checked_too() -> None:
    empty = written(b"")
    assert len(empty) == 36
    assert reader(empty).read() == b""
    assert "block 0 is not authentic" in refused(flip(empty, 30))


@pytest.mark.parametrize("header", [b"AGS2\0\0\x10\0", b"AGS1\0\0\x20\0", b"AGS1\0\0\0\0", b"\0" * 8])
def test_another_header_is_refused(header: bytes) -> None:
    assert "it does not begin like an AGS1 stream" in refused(header + STREAM[8:])


@pytest.mark.parametrize(("magic", "kind"), [(b"Obj\x01", "Avro"), (b"PAR1", "Parquet"), (b"PFA1", "Puffin")])
def test_a_plaintext_file_in_its_place_is_named(magic: bytes, kind: str) -> None:
    with pytest.raises(NotEncryptedError, match=f"lake/m0.avro: it is a plaintext {kind} file"):
        reader(magic + bytes(500))


def test_without_a_length_only_a_last_block_that_is_not_full_shows_the_end() -> None:
    assert reader(STREAM, file_length=None).read() == plaintext_of(2 * BLOCK_LENGTH + 500)
    assert reader(written(b""), file_length=None).read() == b""
    for cut in (8 + FULL, 8 + 2 * FULL):
        assert "no file_length, and its last block is full" in refused(STREAM[:cut], file_length=None)
    # A block that is not full would be the end, if it were authentic.
    with pytest.raises(DecryptionError, match="block 1 is not authentic"):
        reader(STREAM[: 8 + FULL + 100], file_length=None)


class Shrinking(io.BytesIO):
    """Becomes shorter after its header was read."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if len(data) == 8:
            self.truncate(8 + FULL + 10)
        return data


def test_a_file_that_becomes_shorter_is_refused() -> None:
    with pytest.raises(DecryptionError, match="it became shorter while it was read"):
        decrypted(Shrinking(STREAM), replace(METADATA, file_length=len(STREAM)), path="x")


@given(st.data())
@settings(max_examples=how_many(100, 10_000))
def test_mutants_of_a_stream_end_in_our_errors(data: st.DataObject) -> None:
    stream = written(b"some rows of a manifest list")
    mutant = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, max(0, len(mutant) - 1)))
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set" and mutant:
            mutant[position] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del mutant[position : position + data.draw(st.integers(1, 50))]
        else:
            mutant[position:position] = data.draw(st.binary(min_size=1, max_size=20))
    known = data.draw(st.sampled_from([None, len(stream), len(mutant)]))
    try:
        plaintext = reader(bytes(mutant), file_length=known).read()
    except KeytoolsError:
        return
    assert (bytes(mutant), plaintext) == (stream, b"some rows of a manifest list")


# --- streams of other implementations ---


@pytest.mark.parametrize(
    "table", ["people_128", "evolved", "with_deletes", "kek_rotated", "avro_data", "plain_leak"]
)
def test_streams_of_iceberg_java_are_read(iceberg_test_data: Path, table: str) -> None:
    warehouse = Warehouse(iceberg_test_data / "warehouse")
    metadata = current_metadata(warehouse.folder / table)
    streams = 0
    for snapshot_id in warehouse.snapshots(metadata):
        for manifest in warehouse.manifests(metadata, snapshot_id):
            found = [(manifest["manifest_path"], manifest["key_metadata"])] + [
                (entry["data_file"]["file_path"], entry["data_file"]["key_metadata"])
                for entry in warehouse.entries(metadata, snapshot_id)
                if not entry["data_file"]["file_path"].endswith(".parquet")
            ]
            for path, encoded in found:
                data = warehouse.read(path)
                key_metadata = StandardKeyMetadata.decode(SecretBytes(encoded), path)
                assert key_metadata.file_length == len(data)
                assert key_metadata.encode() == SecretBytes(encoded)
                assert reader(data, key_metadata).read() == open_stream(encoded, data)
                streams += 1
    assert streams >= 2


def test_the_manifest_list_of_iceberg_rust_is_read(iceberg_test_data: Path) -> None:
    folder = iceberg_test_data / "iceberg-rust"
    metadata = json.loads((folder / "TableMetadataV3ValidEncryption.json").read_text())
    entries = {entry["key-id"]: entry for entry in metadata["encryption-keys"]}
    (snapshot,) = metadata["snapshots"]
    entry = entries[snapshot["key-id"]]
    wrapped = entries[entry["encrypted-by-id"]]
    kek = open_sealed(KEYS["master-1"], base64.b64decode(wrapped["encrypted-key-metadata"]), None)
    timestamp = wrapped["properties"]["KEY_TIMESTAMP"].encode()
    encoded = open_sealed(kek, base64.b64decode(entry["encrypted-key-metadata"]), timestamp)
    key_metadata = StandardKeyMetadata.decode(SecretBytes(encoded), "the manifest list")
    assert key_metadata.file_length is None
    plaintext = reader((folder / "manifest-list-v3-encrypted.avro").read_bytes(), key_metadata).read()
    assert len(plaintext) == 1532
    assert hashlib.sha256(plaintext).hexdigest() == (
        "0e5275412c60ba163e9510f2c3faad8411f9472bfe429de9827255ae7539cfab"
    )
