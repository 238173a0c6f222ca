"""AGS1: streams that others wrote, streams that others read, and each way to alter one."""

from __future__ import annotations

import base64
import gc
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
from parquet_keytools.iceberg import ags1
from parquet_keytools.iceberg.ags1 import BLOCK_LENGTH, Ags1Reader, Ags1Writer
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes

METADATA = StandardKeyMetadata(SecretBytes(bytes(range(16))), bytes(range(50, 66)))
FULL = BLOCK_LENGTH + 28
LENGTHS = [0, 1, 1000, BLOCK_LENGTH - 1, BLOCK_LENGTH, BLOCK_LENGTH + 1, 2 * BLOCK_LENGTH, 2 * BLOCK_LENGTH + 5]


class Kept(io.BytesIO):
    """A file whose bytes stay when it is closed."""

    data = b""

    def close(self) -> None:
        if not self.closed:
            self.data = self.getvalue()
        super().close()


def plaintext_of(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def written(plaintext: bytes, metadata: StandardKeyMetadata = METADATA, piece: int = 400_000) -> bytes:
    file = Kept()
    with Ags1Writer(file, metadata) as stream:
        for start in range(0, len(plaintext), piece):
            assert stream.write(plaintext[start : start + piece]) == len(plaintext[start : start + piece])
        assert stream.tell() == len(plaintext)
    blocks = max(1, -(-len(plaintext) // BLOCK_LENGTH))
    assert stream.encrypted_length == len(file.data) == 8 + len(plaintext) + blocks * 28
    return file.data


def reader(data: bytes, metadata: StandardKeyMetadata | None = None, **changes: Any) -> Ags1Reader:
    metadata = metadata or replace(METADATA, **{"file_length": len(data), **changes})
    return Ags1Reader(io.BytesIO(data), metadata, path="lake/m0.avro")


@pytest.mark.parametrize("length", LENGTHS)
def test_streams_are_written_and_read_like_those_of_others(length: int) -> None:
    plaintext = plaintext_of(length)
    stream = written(plaintext)
    assert open_stream(METADATA.encode().reveal(), stream) == plaintext
    theirs = write_stream(METADATA.encode().reveal(), plaintext)
    assert len(theirs) == len(stream)
    with reader(theirs) as opened:
        assert opened.size_bytes == length
        assert opened.read() == plaintext
        assert opened.read() == b""


def test_pieces_of_any_size_make_the_same_stream_and_no_empty_block() -> None:
    plaintext = plaintext_of(2 * BLOCK_LENGTH)
    for piece in (BLOCK_LENGTH, BLOCK_LENGTH // 3, 2 * BLOCK_LENGTH):
        stream = written(plaintext, piece=piece)
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


@given(st.lists(st.tuples(st.integers(0, 2 * BLOCK_LENGTH + 9), st.integers(0, 90)), max_size=12), st.booleans())
@settings(max_examples=60)
def test_ranges_are_those_of_the_plaintext(ranges: list[tuple[int, int]], far: bool) -> None:
    plaintext = plaintext_of(2 * BLOCK_LENGTH + 5)
    with reader(_RANGED) as opened:
        for offset, length in ranges:
            length = length * 30_000 if far else length
            assert opened.read_at(offset, length) == plaintext[offset : offset + length]
            assert opened.seek(offset) == offset
            buffer = bytearray(length)
            count = opened.readinto(buffer)
            assert buffer[:count] == plaintext[offset : offset + length]
            assert opened.tell() == offset + count


_RANGED = written(plaintext_of(2 * BLOCK_LENGTH + 5))


def test_positions_and_ends() -> None:
    opened = reader(written(b"0123456789"))
    assert opened.readable() and opened.seekable() and not opened.writable()
    assert (opened.seek(-3, os.SEEK_END), opened.read(2), opened.tell()) == (7, b"78", 9)
    assert (opened.seek(-1, os.SEEK_CUR), opened.read(None)) == (8, b"89")
    assert (opened.seek(50), opened.read(), opened.tell()) == (50, b"", 50)
    for offset, whence in ((-1, os.SEEK_SET), (-11, os.SEEK_END), (0, 9)):
        with pytest.raises(ValueError, match="no such position"):
            opened.seek(offset, whence)
    with pytest.raises(ValueError, match="negative"):
        opened.read_at(0, -1)
    opened.close()
    with pytest.raises(ValueError, match="closed"):
        opened.read()


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
        with Ags1Reader(file, metadata, path=str(path)) as opened:
            assert opened.read_at(BLOCK_LENGTH - 2, 5) == plaintext[BLOCK_LENGTH - 2 : BLOCK_LENGTH + 3]
            assert opened.read() == plaintext
        assert file.closed


def test_pyarrow_reads_through_the_stream() -> None:
    plaintext = plaintext_of(BLOCK_LENGTH + 5)
    file = pa.PythonFile(reader(written(plaintext)), mode="r")
    assert file.size() == len(plaintext)
    assert file.read_at(10, BLOCK_LENGTH - 3) == plaintext[BLOCK_LENGTH - 3 : BLOCK_LENGTH + 5]


class Dribbling(io.BytesIO):
    """Returns fewer bytes than are asked for, as a socket may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 7_001))


def test_short_reads_of_the_file_are_continued() -> None:
    plaintext = plaintext_of(BLOCK_LENGTH + 5)
    data = written(plaintext)
    metadata = replace(METADATA, file_length=len(data))
    assert Ags1Reader(Dribbling(data), metadata, path="x").read() == plaintext


class Counting(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


def test_a_range_costs_its_blocks_and_the_block_read_last_costs_nothing_again() -> None:
    data = written(plaintext_of(3 * BLOCK_LENGTH))
    file = Counting(data)
    opened = Ags1Reader(file, replace(METADATA, file_length=len(data)), path="x")
    assert file.count == 8
    opened.read_at(BLOCK_LENGTH + 1, 5)
    assert file.count == 8 + FULL
    opened.read_at(BLOCK_LENGTH + 900, 5)
    assert file.count == 8 + FULL


def test_memory_is_bounded_however_long_the_stream_is() -> None:
    class Sink(io.RawIOBase):
        def write(self, data: Any, /) -> int:
            return len(data)

    piece = bytes(300_000)
    data = written(plaintext_of(24 * BLOCK_LENGTH))
    gc.collect()
    tracemalloc.start()
    try:
        with Ags1Writer(Sink(), METADATA) as stream:
            for _ in range(80):
                stream.write(piece)
        opened = reader(data)
        for _ in range(240):
            opened.read(BLOCK_LENGTH // 10)
        assert tracemalloc.get_traced_memory()[1] < 10 * BLOCK_LENGTH
    finally:
        tracemalloc.stop()


# --- what is altered is refused ---


def refused(data: bytes, **changes: Any) -> str:
    with pytest.raises(DecryptionError) as caught, reader(data, **changes) as opened:
        opened.read()
    assert caught.value.path == "lake/m0.avro"
    assert str(caught.value).startswith("lake/m0.avro: ")
    return str(caught.value)


STREAM = written(plaintext_of(2 * BLOCK_LENGTH + 500))
OTHER = written(plaintext_of(2 * BLOCK_LENGTH + 500))


def test_a_cut_stream_is_refused_before_a_byte_is_read() -> None:
    for length in (8 + FULL, 8 + 2 * FULL, len(STREAM) - 1, 8 + 28, 8, 0):
        file = Counting(STREAM[:length])
        with pytest.raises(DecryptionError) as caught:
            Ags1Reader(file, replace(METADATA, file_length=len(STREAM)), path="x")
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


def test_ranges_before_an_altered_block_are_read_and_none_that_touches_it() -> None:
    opened = reader(flip(STREAM, 8 + FULL + 77))
    plaintext = plaintext_of(2 * BLOCK_LENGTH + 500)
    assert opened.read_at(0, BLOCK_LENGTH) == plaintext[:BLOCK_LENGTH]
    assert opened.read_at(2 * BLOCK_LENGTH, 500) == plaintext[2 * BLOCK_LENGTH :]
    buffer = bytearray(10)
    opened.seek(BLOCK_LENGTH - 5)
    with pytest.raises(DecryptionError, match="block 1"):
        opened.readinto(buffer)
    assert buffer == bytes(10)


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


def test_a_file_that_becomes_shorter_is_refused() -> None:
    file = io.BytesIO(STREAM)
    opened = Ags1Reader(file, replace(METADATA, file_length=len(STREAM)), path="x")
    file.truncate(8 + FULL + 10)
    with pytest.raises(DecryptionError, match="it became shorter while it was read"):
        opened.read_at(BLOCK_LENGTH, 5)


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


# --- writing ---


def test_a_writer_left_by_an_error_leaves_no_valid_stream() -> None:
    file = Kept()
    with pytest.raises(RuntimeError), Ags1Writer(file, METADATA) as stream:
        stream.write(b"half of a manifest")
        raise RuntimeError
    assert stream.closed and file.closed
    assert b"half" not in file.data
    with pytest.raises(DecryptionError, match="cut within a block"):
        reader(file.data)


def test_a_closed_writer_takes_nothing_and_closes_once() -> None:
    stream = Ags1Writer(Kept(), METADATA)
    stream.close()
    stream.close()
    assert stream.encrypted_length == 36
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"x")


def test_no_block_beyond_those_that_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ags1, "MAX_BLOCKS", 1)
    stream = Ags1Writer(Kept(), METADATA)
    stream.write(bytes(BLOCK_LENGTH + 1))
    with pytest.raises(KeytoolsError, match="no more than 1 blocks"):
        stream.close()
    assert "more blocks than AGS1 can count" in refused(STREAM)


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
