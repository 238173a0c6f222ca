"""Footers with other key metadata: everything else in them stays, byte for byte."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from key_services import key_service
from rotation_case import TABLE, UNIFORM, Case, data_range, materials, read_with_pyarrow

from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.errors import OutputError
from parquet_keytools.format.file_layout import MAGIC_ENCRYPTED_FOOTER, with_trailer
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionWithFooterKey,
    FileCryptoMetaData,
    FileMetaData,
)
from parquet_keytools.format.thrift import Struct, ThriftList, WireType
from parquet_keytools.keys.key_wrapping import dek_of
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.rotation import rotate
from parquet_keytools.rotation.file_keys import read_tail
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.rotation.rotate import check_new_tail, footer_of, new_tail
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import BufferSource, FileLocation

every_footer = pytest.mark.parametrize("plaintext_footer", [True, False])

UNKNOWN: dict[int, tuple[WireType, Any]] = {
    99: (WireType.BINARY, b"\xff not text"),
    100: (WireType.LIST, ThriftList(WireType.STRUCT, [Struct({1: (WireType.TRUE, None)})])),
}


def opened_footer(case: Case, path: Path) -> Footer:
    (opened,) = key_service(case.tools()).open_files([FileLocation.resolve(path)])
    return opened.footer


def footer_dek(case: Case, path: Path) -> SecretBytes:
    material, *_ = materials(case.tools(), path)
    return dek_of(material, unwrap_one(case.kms, material.kms_wrapped_key, material.master_key_id))


def set_unknown(struct: Struct) -> None:
    for field_id, entry in UNKNOWN.items():
        struct.set_entry(field_id, entry)


def add_unknown_fields(case: Case, path: Path) -> None:
    """Write a footer as a newer writer might."""
    footer = opened_footer(case, path)
    tail, envelope = read_tail(FileLocation.resolve(path))
    set_unknown(footer.metadata.struct)
    for chunks in footer.chunks:
        for chunk in chunks:
            set_unknown(chunk.struct)
            crypto = chunk.crypto_metadata
            if crypto is not None and crypto.encryption_with_column_key is not None:
                set_unknown(crypto.encryption_with_column_key.struct)
    new = new_tail(tail, footer, {})
    if envelope.key_metadata and new.endswith(MAGIC_ENCRYPTED_FOOTER):
        crypto_metadata, end = FileCryptoMetaData.read(footer_of(new))
        set_unknown(crypto_metadata.struct)
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
    dek = footer_dek(case, path)
    new = new_tail(tail, footer, {})
    data = data_range(path)

    def check(content: bytes, key: SecretBytes = dek) -> None:
        check_new_tail(BufferSource("x", content), len(data), new, key, None, footer, {})

    check(data + new)
    for wrong in (data + tail.data, data[:-1] + new, data + new[:-1], b"P" + data + new):
        with pytest.raises(OutputError):
            check(wrong)
    with pytest.raises(OutputError, match="cannot be read"):
        check(data + new, SecretBytes.random(128))
    footer.metadata.num_rows += 1
    with pytest.raises(OutputError, match="does not match the file"):
        check(data + new)


def _flip(data: bytes | None) -> bytes:
    assert data is not None
    return data[:-1] + bytes((data[-1] ^ 1,))


def _set_unknown(record: Any) -> None:
    record.struct.set_entry(77, (WireType.I32, 1))


def _with_footer_key() -> ColumnCryptoMetaData:
    crypto = ColumnCryptoMetaData()
    crypto.encryption_with_footer_key = EncryptionWithFooterKey()
    return crypto


def _change(footer: Footer, name: str, change: Callable[[Any], Any]) -> None:
    """Change a field of the footer, or of the last row group or chunk with a key of its own."""
    owner, _, field_name = name.rpartition(".")
    own_key = [chunk for chunk in footer.row_groups[-1].columns if chunk.crypto_metadata is not None]
    records = {"": footer.metadata, "row_group": footer.row_groups[-1], "chunk": own_key[-1]}
    setattr(records[owner], field_name, change(getattr(records[owner], field_name)))


DIFFERENCES: dict[str, Callable[[Footer], Any]] = {
    "version": lambda footer: _change(footer, "version", lambda old: old + 1),
    "rows": lambda footer: _change(footer, "num_rows", lambda old: old + 1),
    "created by": lambda footer: _change(footer, "created_by", lambda _: "somebody else"),
    "no creator": lambda footer: _change(footer, "created_by", lambda _: None),
    "key-value metadata": lambda footer: _change(footer, "key_value_metadata", lambda old: old[:-1]),
    "unknown field": lambda footer: _set_unknown(footer.metadata),
    "unknown field of the schema": lambda footer: _set_unknown(footer.metadata.schema[-1]),
    "rows of a row group": lambda footer: _change(footer, "row_group.num_rows", lambda old: old + 1),
    "no ordinal": lambda footer: _change(footer, "row_group.ordinal", lambda _: None),
    "one row group less": lambda footer: footer.row_groups.pop(),
    "unknown field of a row group": lambda footer: _set_unknown(footer.row_groups[1]),
    "offset of a chunk": lambda footer: _change(footer, "chunk.file_offset", lambda old: old + 1),
    "metadata of a chunk": lambda footer: _change(footer, "chunk.encrypted_column_metadata", _flip),
    "unknown field of a chunk": lambda footer: _set_unknown(footer.row_groups[1].columns[1]),
    "unknown field of a key": lambda footer: [
        _set_unknown(row_group.columns[0].crypto_metadata.encryption_with_column_key)  # type: ignore[union-attr]
        for row_group in footer.row_groups
    ],
    "the footer key for a column": lambda footer: [
        setattr(row_group.columns[0], "crypto_metadata", _with_footer_key()) for row_group in footer.row_groups
    ],
}


@every_footer
def test_a_footer_that_says_anything_else_is_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "in_memory", plaintext_footer=plaintext_footer)
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    old = opened_footer(case, path)
    dek = footer_dek(case, path)
    data = data_range(path)
    before = old.metadata.serialise()
    a, b, footer_key = old.columns[0].key_metadata, old.columns[1].key_metadata, old.key_metadata
    assert a and b and footer_key
    new_key_metadata = {a: b"new a", b: b"k" * 20_000, footer_key: b"new f"}

    def check(new: bytes, expected: dict[bytes, bytes] = new_key_metadata) -> None:
        check_new_tail(BufferSource("x", data + new), len(data), new, dek, None, old, expected)

    right = new_tail(tail, old, new_key_metadata)
    check(right)
    assert old.metadata.serialise() == before, "the footer that the new one is compared with was changed"
    other_keys = [{}, {**new_key_metadata, a: b"k"}, {**new_key_metadata, footer_key: b"k"}, {a: b, b: a}]
    for other in other_keys:
        with pytest.raises(OutputError, match="does not match the file"):
            check(new_tail(tail, old, other))
        with pytest.raises(OutputError, match="does not match the file"):
            check(right, other)
    for name, make in DIFFERENCES.items():
        different = opened_footer(case, path)
        make(different)
        with pytest.raises(OutputError, match="does not match the file"):
            check(new_tail(tail, different, new_key_metadata))
            pytest.fail(f"accepted: {name}")
    check(right)


def test_what_comes_before_an_encrypted_footer_stays(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    footer = opened_footer(case, path)
    data = data_range(path)
    new = new_tail(tail, footer, {})
    crypto_metadata, end = FileCryptoMetaData.read(footer_of(new))
    _set_unknown(crypto_metadata)
    new = with_trailer(crypto_metadata.serialise() + footer_of(new)[end:], MAGIC_ENCRYPTED_FOOTER)
    dek = footer_dek(case, path)

    with pytest.raises(OutputError, match="does not match the file"):
        check_new_tail(BufferSource("x", data + new), len(data), new, dek, None, footer, {})


@every_footer
def test_the_aad_prefix_stays_where_there_may_be_another_one(tmp_path: Path, plaintext_footer: bool) -> None:
    settings = {"aad_prefix": "one", "store_aad_prefix": False}
    case = Case.make(tmp_path, "in_memory", plaintext_footer=plaintext_footer, **settings)
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    old = opened_footer(case, path)
    data = data_range(path)
    dek = footer_dek(case, path)
    other = old.file_aad.replace(b"one", b"two")
    assert other != old.file_aad

    for file_aad, is_right in ((old.file_aad, True), (other, False)):
        new = new_tail(tail, dataclasses.replace(old, cipher=ModuleCipher(dek, file_aad)), {})
        source = BufferSource("x", data + new)
        expected = ExpectedAadPrefix((old.aad_prefix, old.aad_prefix.replace(b"one", b"two")))
        with contextlib.nullcontext() if is_right else pytest.raises(OutputError, match="does not match the file"):
            check_new_tail(source, len(data), new, dek, expected, old, {})


def test_a_serialiser_that_loses_a_field_does_not_prove_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    before = path.read_bytes()
    case.add_version()
    serialise = FileMetaData.serialise

    def lossy(record: FileMetaData) -> bytes:
        record.created_by = None
        return serialise(record)

    monkeypatch.setattr(FileMetaData, "serialise", lossy)
    (file,) = case.tools().rotate(path).files
    assert isinstance(file.error, OutputError) and "does not match the file" in str(file.error)
    assert path.read_bytes() == before
    assert "The file is as it was" in file.error.hint and "`verify`, and rotate it again" in file.error.hint


def test_a_new_footer_that_does_not_authenticate_says_that_the_file_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    before = path.read_bytes()
    case.add_version()
    make = rotate.new_tail

    def damaged(*arguments: Any) -> bytes:
        new = bytearray(make(*arguments))
        new[-20] ^= 1
        return bytes(new)

    monkeypatch.setattr(rotate, "new_tail", damaged)
    (file,) = case.tools().rotate(path).files
    assert isinstance(file.error, OutputError)
    reason = "footer: the module does not authenticate"
    said = f"{path}: the new footer cannot be read: {reason}. The file is as it was"
    assert str(file.error).startswith(said), file.error
    assert path.read_bytes() == before


def test_nonces_are_fresh(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    footer = opened_footer(case, path)
    assert len({new_tail(tail, footer, {}) for _ in range(10)} | {tail.data}) == 11
