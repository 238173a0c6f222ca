"""Footers of encrypted files: what is needed to open them, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, NamedKeys, encrypted

from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.errors import (
    AadPrefixError,
    DecryptionError,
    DraftFormatError,
    FooterSignatureError,
    KeyNotAvailableError,
    ParquetFormatError,
)
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionAlgorithm,
    FileCryptoMetaData,
    FileMetaData,
)
from parquet_keytools.format.thrift import WireType
from parquet_keytools.secret_bytes import SecretBytes


def _plain() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", "y"], "c": [{"d": 1}, {"d": 2}]}), stream)
    return stream.getvalue()


@pytest.fixture
def keys() -> NamedKeys:
    made = NamedKeys()
    made.new(b"kf")
    made.new(b"ka", 256)
    return made


def _encryption(keys: NamedKeys, **options: object) -> FileEncryption:
    columns = {("a",): ColumnKey(keys.deks[b"ka"], b"ka"), ("b",): ColumnEncryption.PLAINTEXT}
    return FileEncryption(keys.deks[b"kf"], b"kf", columns, **options)  # type: ignore[arg-type]


def _with_footer(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    footer = change(data[-8 - length : -8])
    return data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:]


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_a_footer_is_opened_in_three_steps(keys: NamedKeys, plaintext_footer: bool) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=plaintext_footer, aad_prefix=b"p"))
    envelope = read_envelope(MemorySource(data))
    assert envelope.mode is (FooterMode.PLAINTEXT_FOOTER if plaintext_footer else FooterMode.ENCRYPTED_FOOTER)
    assert envelope.key_metadata == b"kf"
    assert (envelope.aad_prefix, envelope.supply_aad_prefix) == (b"p", False)
    footer = envelope.open(keys.deks[b"kf"], b"p")
    assert [(c.path, c.ordinal, c.encryption, c.key_metadata) for c in footer.columns] == [
        (("a",), 0, ColumnEncryption.COLUMN_KEY, b"ka"),
        (("b",), 1, ColumnEncryption.PLAINTEXT, None),
        (("c", "d"), 2, ColumnEncryption.FOOTER_KEY, None),
    ]
    assert set(footer.column_metadata({})) == {(0, 1), (0, 2)}
    metadata = footer.column_metadata({("a",): keys.deks[b"ka"]})
    assert metadata[0, 0].num_values == 2
    assert 12 in metadata[0, 0].struct.fields
    with pytest.raises(DecryptionError) as caught:
        footer.column_metadata({("a",): SecretBytes.random(256)})
    assert caught.value.module_type == "column meta data"


def test_the_footer_of_a_plaintext_file_needs_no_key() -> None:
    footer = read_footer(MemorySource(_plain()), None)
    assert footer.mode is FooterMode.UNENCRYPTED and footer.algorithm is None
    assert len(footer.column_metadata({})) == 3


def test_an_encrypted_footer_without_a_key_is_not_opened(keys: NamedKeys) -> None:
    with pytest.raises(KeyNotAvailableError):
        read_footer(MemorySource(encrypted(_plain(), _encryption(keys))), None)


def test_a_prefix_that_is_not_stored_must_be_supplied(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, aad_prefix=b"p", store_aad_prefix=False))
    assert read_envelope(MemorySource(data)).supply_aad_prefix
    with pytest.raises(AadPrefixError, match="Supply the AAD prefix"):
        read_footer(MemorySource(data), keys)
    with pytest.raises(DecryptionError, match="footer"):
        read_footer(MemorySource(data), keys, b"q")
    assert read_footer(MemorySource(data), keys, b"p").file_aad[:1] == b"p"


def test_the_wrong_key_does_not_open_it(keys: NamedKeys) -> None:
    for plaintext_footer in (False, True):
        data = encrypted(_plain(), _encryption(keys, plaintext_footer=plaintext_footer))
        error = FooterSignatureError if plaintext_footer else DecryptionError
        with pytest.raises(error):
            read_envelope(MemorySource(data)).open(SecretBytes.random(128))


def test_every_bit_of_a_plaintext_footer_is_signed(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=True))
    length = int.from_bytes(data[-8:-4], "little")
    accepted = []
    for position in range(len(data) - 8 - length, len(data) - 8):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        try:
            read_envelope(MemorySource(altered)).open(keys.deks[b"kf"])
            accepted.append(position)
        except (ParquetFormatError, DecryptionError):
            pass
    assert not accepted


@pytest.mark.parametrize("kept", [0, 27, 29])
def test_a_missing_signature_is_named(keys: NamedKeys, kept: int) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=True))
    cut = _with_footer(data, lambda footer: footer[:-28] + bytes(kept))
    with pytest.raises(FooterSignatureError, match=f"{kept} bytes where its signature"):
        read_footer(MemorySource(cut), keys)


def test_an_encrypted_file_that_is_made_to_look_plain_is_refused(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=True))

    def strip(footer: bytes) -> bytes:
        metadata, _ = FileMetaData.read(footer)
        metadata.encryption_algorithm = metadata.footer_signing_key_metadata = None
        return metadata.serialise()

    with pytest.raises(ParquetFormatError, match="names no encryption algorithm"):
        read_footer(MemorySource(_with_footer(data, strip)), keys)


def test_a_file_without_file_unique_is_named(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys))

    def strip(footer: bytes) -> bytes:
        crypto, end = FileCryptoMetaData.read(footer)
        crypto.encryption_algorithm.aes_gcm_v1.struct.set_entry(2, None)  # type: ignore[union-attr]
        return crypto.serialise() + footer[end:]

    changed = _with_footer(data, strip)
    assert read_envelope(MemorySource(changed)).aad_file_unique is None
    with pytest.raises(ParquetFormatError, match="DuckDB"):
        read_footer(MemorySource(changed), keys)


def test_the_2018_draft_is_recognised(keys: NamedKeys) -> None:
    def draft(footer: bytes) -> bytes:
        crypto, end = FileCryptoMetaData.read(footer)
        crypto.struct.set_entry(2, (WireType.TRUE, None))
        return crypto.serialise() + footer[end:]

    with pytest.raises(DraftFormatError, match="2018"):
        read_envelope(MemorySource(_with_footer(encrypted(_plain(), _encryption(keys)), draft)))


def test_the_2019_draft_is_recognised(keys: NamedKeys) -> None:
    def draft(footer: bytes) -> bytes:
        metadata, end = FileMetaData.read(footer)
        metadata.struct.set_entry(9, (WireType.TRUE, None))
        return metadata.serialise() + footer[end:]

    signed = encrypted(_plain(), _encryption(keys, plaintext_footer=True))
    with pytest.raises(DraftFormatError, match="2019"):
        read_envelope(MemorySource(_with_footer(signed, draft)))


def test_an_encrypted_footer_has_no_signature(keys: NamedKeys) -> None:
    assert read_envelope(MemorySource(encrypted(_plain(), _encryption(keys)))).signature == b""


def test_an_unknown_algorithm_is_refused(keys: NamedKeys) -> None:
    def other(footer: bytes) -> bytes:
        crypto, end = FileCryptoMetaData.read(footer)
        fields = crypto.encryption_algorithm.struct.fields
        crypto.encryption_algorithm = EncryptionAlgorithm(type(crypto.struct)({3: fields[1]}))
        return crypto.serialise() + footer[end:]

    with pytest.raises(ParquetFormatError, match="none of AES_GCM_V1"):
        read_envelope(MemorySource(_with_footer(encrypted(_plain(), _encryption(keys)), other)))


def test_unverified_footers_are_for_showing_only(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=True))
    footer = read_envelope(MemorySource(data)).unverified_footer()
    assert footer is not None and footer.columns[0].key_metadata == b"ka"
    with pytest.raises(ParquetFormatError, match="column metadata is missing"):
        footer.chunk_metadata(0, footer.columns[0], None)
    assert read_envelope(MemorySource(encrypted(_plain(), _encryption(keys)))).unverified_footer() is None


@pytest.mark.parametrize("algorithm", Algorithm)
def test_nothing_secret_is_shown(keys: NamedKeys, algorithm: Algorithm) -> None:
    encryption = _encryption(keys, algorithm=algorithm)
    footer = read_footer(MemorySource(encrypted(_plain(), encryption)), keys)
    for key in keys.deks.values():
        for text in (repr(encryption), repr(footer), repr(footer.envelope), str(vars(footer))):
            assert key.reveal().hex() not in text and repr(key.reveal()) not in text


def test_crypto_metadata_of_another_column_is_refused(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=True))

    def swap(footer: bytes) -> bytes:
        metadata, _ = FileMetaData.read(footer)
        row_groups = metadata.row_groups
        chunks = row_groups[0].columns
        assert isinstance(chunks[0].crypto_metadata, ColumnCryptoMetaData)
        chunks[2].crypto_metadata = chunks[0].crypto_metadata
        row_groups[0].columns = chunks
        metadata.row_groups = row_groups
        return metadata.serialise() + footer[-28:]

    changed = read_envelope(MemorySource(_with_footer(data, swap)))
    with pytest.raises(ParquetFormatError, match="crypto metadata of another one"):
        changed.unverified_footer()
    with pytest.raises(FooterSignatureError):
        changed.open(keys.deks[b"kf"])


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_a_footer_is_sealed_by_its_own_cipher_alone(keys: NamedKeys, plaintext_footer: bool) -> None:
    """A second read may return another file: it must not pass for the file whose footer was opened."""
    data = encrypted(_plain(), _encryption(keys, plaintext_footer=plaintext_footer))
    envelope = read_envelope(MemorySource(data))
    cipher = envelope.open(keys.deks[b"kf"]).cipher
    assert cipher is not None and envelope.is_sealed_by(cipher)
    assert read_envelope(MemorySource(data)).is_sealed_by(cipher)
    assert not envelope.is_sealed_by(ModuleCipher(SecretBytes.random(128), cipher.file_aad))
    assert not envelope.is_sealed_by(ModuleCipher(keys.deks[b"kf"], cipher.file_aad + b"x"))
    altered = bytearray(envelope.body)
    altered[-1] ^= 1
    assert not replace(envelope, body=memoryview(altered)).is_sealed_by(cipher)
    # The same keys, written again: another file unique.
    again = encrypted(_plain(), _encryption(keys, plaintext_footer=plaintext_footer))
    assert not read_envelope(MemorySource(again)).is_sealed_by(cipher)


def test_a_column_without_its_key_has_no_cipher(keys: NamedKeys) -> None:
    columns = {("c", "d"): ColumnKey(keys.deks[b"ka"], b"ka")}
    footer = read_footer(MemorySource(encrypted(_plain(), FileEncryption(keys.deks[b"kf"], b"kf", columns))), keys)
    column = next(column for column in footer.columns if column.path == ("c", "d"))
    with pytest.raises(KeyNotAvailableError, match=r"memory\.parquet: no key is given for column 'c\.d'"):
        footer.cipher_of(column, None)


def test_metadata_of_all_row_groups(keys: NamedKeys) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": range(6), "b": range(6)}), stream, row_group_size=2)
    footer = read_footer(MemorySource(encrypted(stream.getvalue(), _encryption(keys))), keys)
    deks = {("a",): keys.deks[b"ka"]}
    assert set(footer.column_metadata(deks)) == {(group, column) for group in range(3) for column in range(2)}
    assert set(footer.column_metadata({})) == {(0, 1), (1, 1), (2, 1)}


def test_metadata_of_another_column_is_refused() -> None:
    """Otherwise, a reader would look for the values of one column in the pages of another."""

    def swapped(footer: bytes) -> bytes:
        metadata, end = FileMetaData.read(footer)
        (group,) = metadata.row_groups
        first, second, *others = group.columns
        group.columns = [second, first, *others]
        metadata.row_groups = [group]
        return metadata.serialise() + footer[end:]

    footer = read_footer(MemorySource(_with_footer(_plain(), swapped)), None)
    with pytest.raises(ParquetFormatError, match="row group 0, column 'a': the metadata belongs to column 'b'"):
        footer.column_metadata({})


def test_another_prefix_is_said_of_the_file(keys: NamedKeys) -> None:
    data = encrypted(_plain(), _encryption(keys, aad_prefix=b"p"))
    with pytest.raises(AadPrefixError, match=r"^memory\.parquet: the file stores another AAD prefix"):
        read_envelope(MemorySource(data)).file_aads(b"q")


def test_a_footer_that_no_key_opened_has_no_prefix(keys: NamedKeys) -> None:
    plain = read_footer(MemorySource(_plain()), None)
    signed = encrypted(_plain(), _encryption(keys, plaintext_footer=True, aad_prefix=b"p"))
    shown = read_envelope(MemorySource(signed)).unverified_footer()
    assert shown is not None
    for footer in (plain, shown):
        assert footer.file_aad == b"" and footer.aad_prefix == b"" and footer.cipher is None
