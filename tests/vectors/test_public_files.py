"""The public encrypted files, whose keys are known, decrypt to the expected data."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, MemorySource, NamedKeys, decrypted, encrypted, rekey_source

from parquet_keytools.encryption.file_encryption import FileEncryption, encrypt_source
from parquet_keytools.encryption.footer import read_footer
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.errors import AadPrefixError, AlreadyEncryptedError, DecryptionError
from parquet_keytools.secret_bytes import SecretBytes

FILES = [
    "encrypt_columns_and_footer.parquet.encrypted",
    "encrypt_columns_and_footer_aad.parquet.encrypted",
    "encrypt_columns_and_footer_ctr.parquet.encrypted",
    "encrypt_columns_plaintext_footer.parquet.encrypted",
    "uniform_encryption.parquet.encrypted",
    "aes256/encrypt_columns_and_footer.parquet.encrypted",
]


def keys_of(name: str) -> NamedKeys:
    """Return the published keys of a file."""
    if not name.startswith("aes256/"):
        columns = {b"kc%d" % number: b"123456789012345%d" % (number - 1) for number in (1, 2)}
        return NamedKeys({k: SecretBytes(v) for k, v in {b"kf": b"0123456789012345", **columns}.items()})
    columns = {b"kc%d" % number: b"1234567890123456789012345678901%d" % (number + 1) for number in range(1, 9)}
    footer = {b"kf": b"01234567890123456789012345678901"}
    return NamedKeys({key: SecretBytes(value) for key, value in {**footer, **columns}.items()})


@pytest.mark.parametrize("name", FILES)
def test_the_file_decrypts_to_the_expected_data(parquet_test_data: Path, name: str) -> None:
    table = pq.read_table(pa.BufferReader(decrypted((parquet_test_data / name).read_bytes(), keys_of(name))))
    assert (table.num_rows, table.num_columns) == (50, 8)
    assert pc.sum(table["double_field"]).as_py() == pytest.approx(1361.1110975, abs=1e-6)


@pytest.mark.parametrize("name", FILES)
def test_the_footer_says_how_the_file_is_encrypted(parquet_test_data: Path, name: str) -> None:
    footer = read_footer(MemorySource((parquet_test_data / name).read_bytes()), keys_of(name))
    assert footer.key_metadata == b"kf"
    assert footer.algorithm is (Algorithm.AES_GCM_CTR_V1 if "ctr" in name else Algorithm.AES_GCM_V1)
    plaintext_footer = "plaintext_footer" in name
    assert footer.mode is (FooterMode.PLAINTEXT_FOOTER if plaintext_footer else FooterMode.ENCRYPTED_FOOTER)
    assert footer.envelope.aad_prefix == (b"tester" if "aad" in name else None)
    how = {column.path[0]: column.encryption for column in footer.columns}
    if name.startswith("uniform"):
        assert set(how.values()) == {ColumnEncryption.FOOTER_KEY}
    else:
        assert how["double_field"] is how["float_field"] is ColumnEncryption.COLUMN_KEY


@pytest.mark.parametrize("name", FILES)
def test_a_rekeyed_file_has_the_same_data(parquet_test_data: Path, name: str) -> None:
    data, sink, keys = (parquet_test_data / name).read_bytes(), MemorySink(), NamedKeys()
    encryption = FileEncryption(keys.new(b"new", 192), b"new", aad_prefix=b"p", plaintext_footer=True)
    rekey_source(MemorySource(data), sink, keys_of(name), encryption)
    one = pq.read_table(pa.BufferReader(decrypted(data, keys_of(name))))
    other = pq.read_table(pa.BufferReader(decrypted(sink.contents(), keys, b"p")))
    assert one.equals(other)


def test_the_stored_aad_prefix_is_compared_with_the_one_expected(parquet_test_data: Path) -> None:
    name = "encrypt_columns_and_footer_aad.parquet.encrypted"
    data = (parquet_test_data / name).read_bytes()
    decrypted(data, keys_of(name), b"tester")
    with pytest.raises(AadPrefixError, match="stores another AAD prefix"):
        decrypted(data, keys_of(name), b"another")


def test_a_prefix_that_the_file_was_written_without_is_refused(parquet_test_data: Path) -> None:
    name = "uniform_encryption.parquet.encrypted"
    with pytest.raises(AadPrefixError, match="written without one"):
        decrypted((parquet_test_data / name).read_bytes(), keys_of(name), b"tester")


@pytest.mark.parametrize("name", FILES)
def test_another_key_does_not_open_the_file(parquet_test_data: Path, name: str) -> None:
    keys = keys_of(name)
    keys.deks[b"kf"] = SecretBytes(hashlib.md5(b"another").digest())
    with pytest.raises(DecryptionError):
        decrypted((parquet_test_data / name).read_bytes(), keys)


@pytest.mark.parametrize("name", FILES)
def test_an_encrypted_file_is_not_encrypted_again(parquet_test_data: Path, name: str) -> None:
    with pytest.raises(AlreadyEncryptedError, match="rekey"):
        encrypt_source(
            MemorySource((parquet_test_data / name).read_bytes()),
            MemorySink(),
            FileEncryption(SecretBytes.random(128)),
        )


def test_every_footer_is_written_back_byte_for_byte(parquet_test_data: Path) -> None:
    for path in sorted(parquet_test_data.glob("*.parquet")):
        data = path.read_bytes()
        length = int.from_bytes(data[-8:-4], "little")
        footer = read_footer(MemorySource(data), None)
        assert footer.metadata.serialise() == data[-8 - length : -8], path.name


def test_the_plain_files_are_encrypted_in_the_mode_that_is_asked_for(parquet_test_data: Path) -> None:
    data = (parquet_test_data / "alltypes_plain.parquet").read_bytes()
    dek = SecretBytes.random(128)
    assert encrypted(data, FileEncryption(dek))[:4] == b"PARE"
    assert encrypted(data, FileEncryption(dek, plaintext_footer=True))[:4] == b"PAR1"
