"""StandardKeyMetadata: from other writers, and invalid."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iceberg_reader import key_metadata

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes

KEY, PREFIX = bytes(range(16)), bytes(range(100, 116))
BY_JAVA = bytes.fromhex("01207a418042c5ef94a586cd83a178aa48000220809f4f195d95e8552a1bba97ef79023e02924b")


def decode(data: bytes) -> StandardKeyMetadata:
    return StandardKeyMetadata.decode(SecretBytes(data), "snapshot 7")


def test_what_java_wrote_is_read_and_written_byte_by_byte() -> None:
    metadata = decode(BY_JAVA)
    assert metadata.encryption_key == SecretBytes(bytes.fromhex("7a418042c5ef94a586cd83a178aa4800"))
    assert metadata.aad_prefix == bytes.fromhex("809f4f195d95e8552a1bba97ef79023e")
    assert metadata.file_length == 4809
    assert metadata.encode() == SecretBytes(BY_JAVA)


@given(
    st.sampled_from([16, 24, 32]).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    st.binary(max_size=300),
    st.one_of(st.none(), st.integers(0, 2**63 - 1)),
)
def test_another_reader_of_avro_reads_what_is_written(key: bytes, prefix: bytes, length: int | None) -> None:
    written = StandardKeyMetadata(SecretBytes(key), prefix, length)
    assert key_metadata(written.encode().reveal()) == (key, prefix, length)
    assert decode(written.encode().reveal()) == written


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"\x02" + BY_JAVA[1:], "it has version 2, and only version 1 is known"),
        (BY_JAVA[:1], "it ends within its encryption_key"),
        (BY_JAVA[:10], "its encryption_key does not end within it"),
        (BY_JAVA[:18], "it ends within its aad_prefix"),
        (BY_JAVA[:-3], "it ends within its file_length"),
        (BY_JAVA[:-1], "it ends within its file_length"),
        (BY_JAVA + b"\0", "1 bytes follow its last field"),
        (b"\x01\x1e" + KEY[:15] + b"\0\0", "its key has 120 bits, not 128, 192 or 256"),
        (b"\x01\x1f" + KEY + b"\0\0", "its encryption_key does not end within it"),
        (b"\x01\x20" + KEY + b"\x04\0", "its aad_prefix is neither null nor a value"),
        (b"\x01\x20" + KEY + b"\x01\0", "its aad_prefix is neither null nor a value"),
        (b"\x01\x20" + KEY + b"\0\x02\x01", "its file_length is negative"),
        (b"\x01\xa0\x00" + KEY + b"\0\0", "its encryption_key has a number that Avro does not write"),
        (b"\x01" + b"\xff" * 12 + KEY + b"\0\0", "its encryption_key has a number that Avro does not write"),
        (
            b"\x01\x20" + KEY + b"\0\x02" + b"\xff" * 9 + b"\x02",
            "file_length has a number that Avro does not write",
        ),
        (b"\x01" + bytes(1 << 17), "it has 131073 bytes"),
    ],
)
def test_anything_else_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(KeyMaterialError) as caught:
        decode(data)
    assert "the key metadata of snapshot 7 is not valid" in str(caught.value)
    assert reason in str(caught.value)


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=60).map(lambda rest: b"\x01\x20" + KEY + rest)))
def test_any_bytes_are_read_back_to_the_same_bytes_or_refused(data: bytes) -> None:
    try:
        metadata = decode(data)
    except KeyMaterialError as error:
        assert error.__context__ is None
        return
    # An empty AAD prefix is the same as none; everything else has one spelling.
    again = metadata.encode().reveal()
    assert again == data or (metadata.aad_prefix == b"" and decode(again) == metadata)


def test_the_key_is_not_shown() -> None:
    metadata = decode(BY_JAVA)
    for text in (repr(metadata), str(metadata), repr(metadata.encode())):
        assert "7a418042" not in text
        assert repr(bytes.fromhex("7a418042"))[2:-1] not in text
    with pytest.raises(TypeError):
        pickle.dumps(metadata)


def test_fresh_key_metadata_has_a_random_key_and_prefix() -> None:
    made = [StandardKeyMetadata.fresh(bits) for bits in (128, 192, 256, 128)]
    assert [m.encryption_key.length_bits for m in made] == [128, 192, 256, 128]
    assert all(len(m.aad_prefix) == 16 and m.file_length is None for m in made)
    assert made[0].encryption_key != made[3].encryption_key
    assert made[0].aad_prefix != made[3].aad_prefix


@pytest.mark.parametrize("length", [-1, 2**63])
def test_a_length_that_is_none_is_not_written(length: int) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        StandardKeyMetadata(SecretBytes(KEY), PREFIX, length).encode()
