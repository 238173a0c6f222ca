"""Footers with other key metadata: what is in them otherwise stays, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rotation_case import TABLE, UNIFORM, Case, data_range, read_with_pyarrow

from parquet_keytools.encryption.footer import Footer
from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.format.file_layout import MAGIC_ENCRYPTED_FOOTER
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.format.thrift_compact import Struct, ThriftList, WireType
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.rotation.tail import check_new_tail, footer_of, new_tail, read_tail, with_trailer
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import BufferSource

every_footer = pytest.mark.parametrize("plaintext_footer", [True, False])

UNKNOWN: dict[int, tuple[WireType, Any]] = {
    99: (WireType.BINARY, b"\xff not text"),
    100: (WireType.LIST, ThriftList(WireType.STRUCT, [Struct({1: (WireType.TRUE, None)})])),
}


def opened_footer(case: Case, path: Path) -> Footer:
    (opened,) = case.tools()._keys.open_files([FileLocation.resolve(path)])
    return opened.footer


def add_unknown_fields(case: Case, path: Path) -> None:
    """Write a footer as a newer writer might."""
    footer = opened_footer(case, path)
    tail, envelope = read_tail(FileLocation.resolve(path))
    footer.metadata.struct.fields.update(UNKNOWN)
    for chunks in footer.chunks:
        for chunk in chunks:
            chunk.struct.fields.update(UNKNOWN)
            crypto = chunk.crypto_metadata
            if crypto is not None and crypto.encryption_with_column_key is not None:
                crypto.encryption_with_column_key.struct.fields.update(UNKNOWN)
    new = new_tail(tail, footer, {})
    if envelope.key_metadata and new.endswith(MAGIC_ENCRYPTED_FOOTER):
        crypto_metadata, end = FileCryptoMetaData.read(footer_of(new))
        crypto_metadata.struct.fields.update(UNKNOWN)
        new = with_trailer(crypto_metadata.serialise() + footer_of(new)[end:], MAGIC_ENCRYPTED_FOOTER)
    path.write_bytes(path.read_bytes()[: tail.offset] + new)


@every_footer
def test_fields_that_nobody_knows(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path = case.write()
    add_unknown_fields(case, path)
    before = opened_footer(case, path)
    case.add_version()
    assert case.tools().rotate(path).counts[Outcome.ROTATED] == 1
    after = opened_footer(case, path)
    assert UNKNOWN.items() <= after.metadata.struct.fields.items()
    for old_chunks, new_chunks in zip(before.chunks, after.chunks, strict=True):
        for old, new in zip(old_chunks, new_chunks, strict=True):
            assert UNKNOWN.items() <= new.struct.fields.items()
            assert list(old.struct.fields) == list(new.struct.fields)
            assert old.encrypted_column_metadata == new.encrypted_column_metadata
            if new.crypto_metadata is not None:
                assert new.crypto_metadata.encryption_with_column_key is not None
                assert UNKNOWN.items() <= new.crypto_metadata.encryption_with_column_key.struct.fields.items()
    if not plaintext_footer:
        tail, _ = read_tail(FileLocation.resolve(path))
        crypto_metadata, _ = FileCryptoMetaData.read(footer_of(tail.data))
        assert UNKNOWN.items() <= crypto_metadata.struct.fields.items()
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


@every_footer
def test_nothing_but_key_metadata_changes(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path = case.write()
    before = opened_footer(case, path)
    case.add_version()
    case.tools().rotate(path)
    after = opened_footer(case, path)
    for footer in (before, after):
        footer.metadata.footer_signing_key_metadata = None
        for chunks in footer.chunks:
            for chunk in chunks:
                if chunk.crypto_metadata and chunk.crypto_metadata.encryption_with_column_key:
                    chunk.crypto_metadata.encryption_with_column_key.key_metadata = None
    assert before.metadata.serialise() == after.metadata.serialise()
    assert before.file_aad == after.file_aad and before.algorithm == after.algorithm


@every_footer
@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_aes_gcm_ctr(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer, algorithm="AES_GCM_CTR_V1")
    path = case.write()
    data = data_range(path)
    case.add_version()
    assert case.tools().rotate(path).succeeded
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE) and data_range(path) == data


@every_footer
@pytest.mark.parametrize("settings", [{}, UNIFORM], ids=["columns", "uniform"])
def test_a_footer_longer_than_what_is_read_at_once(
    tmp_path: Path, plaintext_footer: bool, settings: dict[str, Any]
) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer, **settings)
    table = TABLE.replace_schema_metadata({"note": "x" * 200_000})
    path = case.write(table=table)
    data = data_range(path)
    case.add_version()
    assert case.tools().rotate(path).succeeded
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE) and data_range(path) == data
    assert read_with_pyarrow(case.kms, path).equals(TABLE)


def test_a_wide_file_with_many_row_groups(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(60)]
    table = pa.table({name: list(range(20)) for name in names})
    case = Case.make(tmp_path, "keystore", column_keys={"ka": names[:30], "kb": names[30:50]})
    path = case.folder / "x.parquet"
    case.tools().write_table(table, path, row_group_size=1)
    case.add_version()
    (file,) = case.tools().rotate(path).files
    assert sorted((change.master_key_id, change.keys) for change in file.keys) == [
        ("ka", 30),
        ("kb", 20),
        ("kf", 1),
    ]
    case.disable(1)
    assert case.tools().read_table(path).equals(table)


@every_footer
def test_what_was_written_is_looked_at(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    footer = opened_footer(case, path)
    dek = footer.cipher._dek  # type: ignore[union-attr]
    new = new_tail(tail, footer, {})
    data = data_range(path)

    def check(content: bytes, key: SecretBytes = dek) -> None:
        check_new_tail(BufferSource("x", content), len(data), new, key, None, footer)

    check(data + new)
    for wrong in (data + tail.data, data[:-1] + new, data + new[:-1], b"P" + data + new):
        with pytest.raises(OutputError):
            check(wrong)
    with pytest.raises(KeytoolsError):
        check(data + new, SecretBytes.random(128))
    footer.metadata.num_rows += 1
    with pytest.raises(OutputError, match="not that of the file"):
        check(data + new)


def test_nonces_are_fresh(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    footer = opened_footer(case, path)
    assert len({new_tail(tail, footer, {}) for _ in range(10)} | {tail.data}) == 11
