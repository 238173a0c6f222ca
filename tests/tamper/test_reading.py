"""Files that an attacker altered or exchanged, and the errors in reading them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms
from key_services import key_service
from pyarrow_versions import DECRYPTS_IN_THREADS

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import (
    AadPrefixError,
    ColumnAccessDeniedError,
    DecryptionError,
    FooterSignatureError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
    TableMismatchError,
    WrappedKeyInvalidError,
)
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData
from parquet_keytools.storage.locations import FileLocation, open_source

MASTER_KEYS = {"kf": b"0123456789012345", "ka": b"1234567890123450", "kb": b"1234567890123451"}
TABLE = pa.table({"plain": range(1000), "a": range(1000), "b": [f"text {i}" for i in range(1000)]})


def keytools(kms: FaultyKms | None = None, reading: dict[str, Any] | None = None, **settings: Any) -> Keytools:
    table = {
        "footer_key": "kf",
        "column_keys": {"ka": ["a"], "kb": ["b"]},
        "unlisted_columns": "plaintext",
    } | settings
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table},
        "reading": reading or {},
    }
    return Keytools(parse_configuration(document), kms=kms or FaultyKms(MASTER_KEYS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.parquet"


READERS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda tools, path: tools.read_table(path),
    "dataset": lambda tools, path: tools.dataset(path.parent).to_table(),
    "dataset_of_one": lambda tools, path: tools.dataset(path).to_table(),
    "folder": lambda tools, path: tools.read_table(path.parent),
    "decryption_properties": lambda tools, path: tools.decryption_properties(path),
}
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


# --- plaintext in place of an encrypted file ---


@every_reader
def test_a_plaintext_file_is_refused(path: Path, read: Callable[[Keytools, Path], object]) -> None:
    """Otherwise, anyone who can write to the storage could put any data there; pyarrow accepts it."""
    pq.write_table(TABLE, path)
    with pytest.raises(NotEncryptedError, match="plaintext_files"):
        read(keytools(), path)


def test_one_plaintext_file_among_many(tmp_path: Path) -> None:
    tools = keytools()
    tools.write_dataset(TABLE, tmp_path, max_rows_per_file=100, max_rows_per_group=100)
    pq.write_table(TABLE, tmp_path / "part-5.parquet")
    dataset = tools.dataset(tmp_path)
    for read in (
        lambda: dataset.to_table(columns=["plain"]),
        lambda: dataset.count_rows(),
        lambda: tools.dataset(tmp_path, columns=["plain"]),
        lambda: tools.read_table(tmp_path, columns=["plain"]),
    ):
        with pytest.raises(NotEncryptedError, match=r"part-5\.parquet"):
            read()
    tools.write_table(TABLE, tmp_path / "part-5.parquet")
    pq.write_table(TABLE, tmp_path / "part-0.parquet")
    with pytest.raises(NotEncryptedError, match=r"part-0\.parquet"):
        tools.dataset(tmp_path)


@every_reader
def test_a_file_of_ctr_may_be_refused(path: Path, read: Callable[[Keytools, Path], object]) -> None:
    keytools(algorithm="AES_GCM_CTR_V1").write_table(TABLE, path)
    read(keytools(algorithm="AES_GCM_CTR_V1"), path)
    with pytest.raises(TableMismatchError, match="the algorithm is AES_GCM_CTR_V1, and the table has AES_GCM_V1"):
        read(keytools(), path)
    with pytest.raises(DecryptionError, match="ctr_files"):
        read(keytools(algorithm="AES_GCM_CTR_V1", reading={"ctr_files": "reject"}), path)


@pytest.mark.parametrize("has_table", [True, False])
def test_no_command_takes_a_refused_file_of_ctr(path: Path, tmp_path: Path, *, has_table: bool) -> None:
    """Without a table, nothing else says which algorithm is right."""
    keytools(algorithm="AES_GCM_CTR_V1").write_table(TABLE, path)
    tools = keytools(algorithm="AES_GCM_CTR_V1", reading={"ctr_files": "reject"})
    if not has_table:
        document = {"version": 1, "reading": {"ctr_files": "reject"}}
        tools = Keytools.from_mapping(document, kms=tools.kms)
    before, target = path.read_bytes(), tmp_path / "target"
    uses: dict[str, Callable[[], object]] = {
        "decrypt_file": lambda: tools.decrypt_file(path, target),
        "salvage_file": lambda: tools.salvage_file(path, target),
        "rekey_file": lambda: tools.rekey_file(path, target, new_keytools=keytools()),
        "rekey_in_place": lambda: tools.rekey_in_place(path, new_keytools=keytools()),
    }
    for name, use in uses.items():
        with pytest.raises(DecryptionError, match="ctr_files"):
            use()
        assert not target.exists(), name
        assert path.read_bytes() == before, name


def test_plaintext_files_may_be_allowed(path: Path) -> None:
    pq.write_table(TABLE, path)
    tools = keytools(reading={"plaintext_files": "allow"})
    assert tools.read_table(path).equals(TABLE)
    assert tools.dataset(path.parent).to_table().equals(TABLE)


def test_a_plaintext_footer_without_its_signature(path: Path) -> None:
    """The field that marks the file as encrypted is itself in the footer, which anyone can rewrite."""
    keytools(plaintext_footer=True).write_table(TABLE, path)
    metadata = _plaintext_footer(path)
    metadata.encryption_algorithm = None
    _replace_footer(path, metadata.serialise())
    with pytest.raises(KeytoolsError) as caught:
        keytools().read_table(path)
    assert isinstance(caught.value, (NotEncryptedError, ParquetFormatError))


def _plaintext_footer(path: Path) -> FileMetaData:
    with open_source(FileLocation.resolve(path)) as source:
        footer = read_envelope(source).unverified_footer()
        assert footer is not None
        return FileMetaData.read(footer.metadata.serialise())[0]


def _footer_offset(path: Path) -> int:
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _replace_footer(path: Path, footer: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: _footer_offset(path)] + footer + len(footer).to_bytes(4, "little") + data[-4:])


# --- swapped between opening and reading ---


def swap_for_plaintext(path: Path) -> None:
    _put(path, lambda other: pq.write_table(TABLE, other))


def swap_for_another_encrypted(path: Path) -> None:
    """Genuine, and readable with the same keys, but not the file that was opened."""
    _put(path, lambda other: keytools().write_table(TABLE.slice(1), other))


def swap_for_an_older_version(path: Path) -> None:
    _put(path, lambda other: keytools().write_table(TABLE, other))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit_of_the_footer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def _put(path: Path, write: Callable[[Path], object]) -> None:
    other = path.parent.parent / "other.parquet"
    write(other)
    other.replace(path)


def test_a_data_set_whose_keys_are_rotated_is_read_on(file_of_data_set: Path) -> None:
    """The data is the same, and so is the DEK: the verified footer is used."""
    for settings in ({}, {"plaintext_footer": True}, {"aad_prefix": "t"}, {"algorithm": "AES_GCM_CTR_V1"}):
        kms = FaultyKms(MASTER_KEYS)
        tools = keytools(kms, **settings)
        tools.write_table(TABLE, file_of_data_set)
        dataset = tools.dataset(file_of_data_set.parent)
        before = file_of_data_set.read_bytes()
        assert tools.rotate(file_of_data_set.parent).succeeded
        assert file_of_data_set.read_bytes() != before
        for _ in range(2):
            assert dataset.to_table().equals(TABLE)
            assert dataset.to_table(columns=["plain"], filter=pc.field("a") > 5).num_rows == 994
        assert dataset.count_rows(filter=pc.field("a") > 5) == 994


def test_a_data_set_with_refused_columns_is_read_on(file_of_data_set: Path) -> None:
    keytools().write_table(TABLE, file_of_data_set)
    kms = FaultyKms(MASTER_KEYS)
    kms.failure, kms.failing = "refused", frozenset(["kb"])
    dataset = keytools(kms, reading={"denied_columns": "hide"}).dataset(file_of_data_set.parent)
    assert keytools().rotate(file_of_data_set).succeeded
    assert dataset.to_table().equals(TABLE.drop_columns(["b"]))


SWAPS = [
    swap_for_plaintext,
    swap_for_another_encrypted,
    swap_for_an_older_version,
    truncate,
    flip_a_bit_of_the_footer,
]


@pytest.fixture
def file_of_data_set(tmp_path: Path) -> Path:
    (tmp_path / "data set").mkdir()
    return tmp_path / "data set" / "part-0.parquet"


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("settings", [{}, {"aad_prefix": "t"}, {"key_material": "external"}])
def test_a_data_set_whose_file_is_swapped(
    file_of_data_set: Path, swap: Callable[[Path], None], settings: dict[str, Any]
) -> None:
    tools = keytools(**settings)
    tools.write_table(TABLE, file_of_data_set)
    dataset = tools.dataset(file_of_data_set.parent)
    assert dataset.to_table().equals(TABLE)
    swap(file_of_data_set)
    for read in (
        lambda: dataset.to_table(),
        lambda: dataset.to_table(columns=["plain"]),
        lambda: dataset.count_rows(filter=pc.field("a") > 5),
        lambda: list(dataset.to_batches()),
        lambda: dataset.head(1),
    ):
        with pytest.raises(ParquetFormatError, match="changed after its footer was verified"):
            read()


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("settings", [{}, {"aad_prefix": "t"}])
def test_a_file_that_is_swapped_while_it_is_read(
    file_of_data_set: Path, swap: Callable[[Path], None], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our read of the footer and pyarrow's own opening of the file: the footer is then read again."""
    tools = keytools(**settings)
    tools.write_table(TABLE, file_of_data_set)
    make_factory = ds.FileSystemDatasetFactory
    swaps = [swap]

    def swapped(*arguments: Any) -> ds.FileSystemDatasetFactory:
        while swaps:
            swaps.pop()(file_of_data_set)
        return make_factory(*arguments)

    monkeypatch.setattr(ds, "FileSystemDatasetFactory", swapped)
    if not settings and swap in (swap_for_another_encrypted, swap_for_an_older_version):
        # These cannot be distinguished from a file that its owner has just written.
        found = tools.read_table(file_of_data_set)
        assert found.equals(TABLE if swap is swap_for_an_older_version else TABLE.slice(1))
    else:
        with pytest.raises((ParquetFormatError, NotEncryptedError, DecryptionError)):
            tools.read_table(file_of_data_set)
    assert not swaps


def test_a_file_that_comes_later_is_not_in_the_data_set(tmp_path: Path) -> None:
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "part-0.parquet")
    dataset = tools.dataset(tmp_path)
    pq.write_table(TABLE, tmp_path / "part-1.parquet")
    assert dataset.to_table().num_rows == 1000


def test_a_file_that_is_deleted(tmp_path: Path) -> None:
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "part-0.parquet")
    dataset = tools.dataset(tmp_path)
    (tmp_path / "part-0.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        dataset.to_table()


# --- damaged footers ---


@every_reader
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_every_truncation_of_the_tail(
    path: Path, plaintext_footer: bool, read: Callable[[Keytools, Path], object]
) -> None:
    tools = keytools(plaintext_footer=plaintext_footer)
    tools.write_table(TABLE, path)
    data = path.read_bytes()
    offset = _footer_offset(path)
    for length in {0, 3, 4, 11, 12, offset // 2, offset, offset + 10, len(data) - 8, len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(ParquetFormatError):
            read(tools, path)


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_flipped_bits_of_the_footer(path: Path, plaintext_footer: bool, key_material: str) -> None:
    """Each ends in our error before pyarrow sees it, or changes nothing.

    The part before an encrypted footer is not authenticated: `kmsInstanceURL` may have any value there.
    """
    tools = keytools(plaintext_footer=plaintext_footer, key_material=key_material)
    tools.write_table(TABLE, path)
    data = path.read_bytes()
    refused = 0
    places = range(_footer_offset(path), len(data), 7)
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            assert tools.read_table(path).equals(TABLE), place
        except KeytoolsError:
            refused += 1
    assert refused == len(places) if plaintext_footer else refused > len(places) * 0.7


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_altered_fields_of_the_footers_key_material(path: Path, plaintext_footer: bool, double: bool) -> None:
    """Before an encrypted footer, it is not authenticated. What we accept, pyarrow must accept too."""
    tools = keytools(double_wrapping=double)
    tools.write_table(TABLE, path)
    data = path.read_bytes()
    stored = data[_footer_offset(path) : -8]
    crypto, end = FileCryptoMetaData.read(stored)
    fields = json.loads(crypto.key_metadata or b"")
    texts: list[str] = []
    for name, value in fields.items():
        changed: list[Any] = [None, 1, "", "x", not value, [value], {"x": value}]
        texts += [json.dumps(fields | {name: other}) for other in changed]
        texts.append(json.dumps({other: fields[other] for other in fields if other != name}))
    texts += [json.dumps(fields | {"other": 1}), json.dumps(fields, indent=3), " " + json.dumps(fields)]
    texts += [json.dumps(fields).replace("PKMT1", "PKMT\\u0031"), json.dumps(fields) + "\n"]
    for text in texts:
        crypto.key_metadata = text.encode()
        path.write_bytes(data)
        _replace_footer(path, crypto.serialise() + stored[end:])
        try:
            found = tools.read_table(path)
        except KeytoolsError:
            continue
        assert found.equals(TABLE), text
        if DECRYPTS_IN_THREADS:
            assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(TABLE)


def test_errors_say_what_is_wrong(path: Path) -> None:
    tools = keytools()
    tools.write_table(TABLE, path)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DecryptionError, match="does not authenticate") as caught:
        tools.read_table(path)
    assert caught.value.module_type is not None
    assert caught.value.path == str(path) and str(caught.value).startswith(f"{path}: footer: ")
    tools.write_table(TABLE, path)
    data = bytearray(path.read_bytes())
    page = next(chunk for chunk in tools.inspect_file(path).chunks if chunk.column_ordinal == 1).modules[-1]
    data[page.offset + 20] ^= 1
    path.write_bytes(data)
    for read in (
        lambda: tools.read_table(path),
        lambda: tools.read_table(path.parent),
        lambda: tools.decrypt_file(path, path.parent / "plain"),
        lambda: tools.rekey_file(path, path.parent / "new"),
    ):
        with pytest.raises(DecryptionError) as caught:
            read()
        name = TABLE.column_names[1]
        assert (caught.value.path, caught.value.column) == (str(path), name)
        assert f"{path}: data page, row group 0, column 1 ({name!r}), page 0: " in str(caught.value)
    keytools(plaintext_footer=True).write_table(TABLE, path)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(FooterSignatureError, match="signature of the plaintext footer is wrong"):
        tools.read_table(path)


# --- AAD prefixes ---


def test_a_file_under_another_name(tmp_path: Path) -> None:
    """The purpose of the AAD prefix: last month's file must not pass for this month's."""
    tools = keytools(aad_prefix="t/{file_name}")
    tools.write_table(TABLE, tmp_path / "january.parquet")
    shutil.copy(tmp_path / "january.parquet", tmp_path / "february.parquet")
    assert tools.read_table(tmp_path / "january.parquet").equals(TABLE)
    with pytest.raises(AadPrefixError, match="another AAD prefix"):
        tools.read_table(tmp_path / "february.parquet")
    with pytest.raises(AadPrefixError):
        tools.dataset(tmp_path)


def test_the_kms_is_not_asked_for_a_file_with_a_wrong_prefix(path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    keytools(kms, aad_prefix="one").write_table(TABLE, path)
    tools = keytools(kms, aad_prefix="other")
    for read in READERS.values():
        with pytest.raises(AadPrefixError):
            read(tools, path)


@pytest.mark.parametrize("store", [True, False])
def test_aad_prefix_given_by_the_caller(path: Path, store: bool) -> None:
    tools = keytools(aad_prefix="right", store_aad_prefix=store)
    tools.write_table(TABLE, path)
    assert tools.read_table(path).equals(TABLE)
    assert tools.read_table(path, aad_prefix="right").equals(TABLE)
    with pytest.raises(DecryptionError):
        tools.read_table(path, aad_prefix="wrong")
    with pytest.raises(DecryptionError):
        tools.dataset(path.parent, aad_prefix="wrong")


def test_a_prefix_that_is_neither_stored_nor_given(path: Path) -> None:
    keytools(aad_prefix="right", store_aad_prefix=False).write_table(TABLE, path)
    with pytest.raises(AadPrefixError, match="Supply the AAD prefix"):
        keytools().read_table(path)


def test_a_file_without_the_prefix_that_its_table_asks_for(path: Path) -> None:
    """Otherwise, a genuine file of another table without a prefix would pass."""
    keytools().write_table(TABLE, path)
    with pytest.raises(AadPrefixError):
        keytools(aad_prefix="t/{file_name}").read_table(path)


# --- key material ---


def exchange(file: Path, change: Callable[[dict[str, dict[str, Any]]], None]) -> None:
    """Alter the key material file of a Parquet file."""
    location = file.with_name(f"_KEY_MATERIAL_FOR_{file.name}.json")
    materials = {name: json.loads(text) for name, text in json.loads(location.read_text()).items()}
    change(materials)
    location.write_text(json.dumps({name: json.dumps(fields) for name, fields in materials.items()}))


@pytest.mark.parametrize("double", [True, False])
def test_key_material_exchanged_between_columns(path: Path, double: bool) -> None:
    """That file is not authenticated. A column read with the key of another is not authentic."""
    tools = keytools(key_material="external", double_wrapping=double)
    tools.write_table(TABLE, path)

    def swap(materials: dict[str, dict[str, Any]]) -> None:
        first, second = (name for name in materials if name != "footerKey")
        materials[first], materials[second] = materials[second], materials[first]

    exchange(path, swap)
    with pytest.raises(TableMismatchError) as refused:
        tools.read_table(path, columns=["plain"])
    assert [(found.what, found.column) for found in refused.value.mismatches] == [
        ("column key", "a"),
        ("column key", "b"),
    ]
    # Even where the table trusts each key for both.
    tools = keytools(key_material="external", double_wrapping=double, also_trusted=["ka", "kb"])
    with pytest.raises(ColumnAccessDeniedError, match="does not authenticate") as caught:
        tools.read_table(path)
    assert caught.value.columns == ("a", "b")
    assert tools.read_table(path, columns=["plain"]).num_rows == 1000
    with pytest.raises(ColumnAccessDeniedError):
        tools.dataset(path.parent)


def test_key_material_of_a_column_for_the_footer(path: Path) -> None:
    tools = keytools(key_material="external")
    tools.write_table(TABLE, path)
    exchange(path, lambda materials: materials.update(footerKey=materials["columnKey0"]))
    with pytest.raises(TableMismatchError, match="the footer is under the master key 'ka'"):
        tools.read_table(path)
    tools = keytools(key_material="external", also_trusted=["ka", "kb"])
    with pytest.raises(KeyMaterialError, match="isFooterKey"):
        tools.read_table(path)
    instance = {"isFooterKey": True, "kmsInstanceID": "DEFAULT", "kmsInstanceURL": "DEFAULT"}
    exchange(path, lambda materials: materials["footerKey"].update(instance))
    with pytest.raises(DecryptionError, match="does not authenticate"):
        tools.read_table(path)


def test_key_material_of_another_file(tmp_path: Path) -> None:
    tools = keytools(key_material="external")
    for name in ("x", "y"):
        tools.write_table(TABLE, tmp_path / f"{name}.parquet")
    shutil.copy(tmp_path / "_KEY_MATERIAL_FOR_y.parquet.json", tmp_path / "_KEY_MATERIAL_FOR_x.parquet.json")
    for read in READERS.values():
        with pytest.raises(DecryptionError, match="does not authenticate"):
            read(tools, tmp_path / "x.parquet")


def test_kek_of_another_key(path: Path) -> None:
    tools = keytools(key_material="external")
    tools.write_table(TABLE, path)

    def mix(materials: dict[str, dict[str, Any]]) -> None:
        first, second = (name for name in materials if name != "footerKey")
        for field in ("wrappedKEK", "keyEncryptionKeyID", "masterKeyID"):
            materials[first][field] = materials[second][field]

    exchange(path, mix)
    with pytest.raises(TableMismatchError, match=r"column '(a|b)' is under the master key 'k(a|b)'"):
        tools.read_table(path)
    tools = keytools(key_material="external", also_trusted=["ka", "kb"])
    with pytest.raises(ColumnAccessDeniedError) as caught:
        tools.read_table(path)
    assert isinstance(caught.value.causes[0], KeyMaterialError)


def test_master_key_of_another_column(path: Path) -> None:
    """A reader who may use one master key must not get keys that another one wrapped."""
    tools = keytools(key_material="external")
    tools.write_table(TABLE, path)

    def rename(materials: dict[str, dict[str, Any]]) -> None:
        for fields in materials.values():
            fields["masterKeyID"] = "kf"

    exchange(path, rename)
    with pytest.raises(TableMismatchError, match="column 'a' is under the master key 'kf'"):
        tools.read_table(path)
    tools = keytools(key_material="external", also_trusted=["kf"])
    with pytest.raises(ColumnAccessDeniedError) as caught:
        tools.read_table(path)
    assert all(isinstance(cause, WrappedKeyInvalidError) for cause in caught.value.causes)


def test_a_url_in_key_material_is_not_called(path: Path) -> None:
    tools = keytools(key_material="external")
    tools.write_table(TABLE, path)
    evil = {"kmsInstanceURL": "https://evil.example", "kmsInstanceID": "evil"}
    exchange(path, lambda materials: materials["footerKey"].update(evil))
    assert tools.read_table(path).equals(TABLE)
    if DECRYPTS_IN_THREADS:
        assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(TABLE)


def test_without_a_kms_in_the_configuration(path: Path) -> None:
    keytools().write_table(TABLE, path)
    with pytest.raises(KeyNotAvailableError, match="kms:"):
        Keytools.from_mapping({"version": 1}).read_table(path)


# --- damaged column metadata ---


@pytest.fixture
def file_with_damaged_column(path: Path) -> Path:
    """Column a's encrypted metadata is damaged in an authentic footer: its writer did that."""
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms)
    tools.write_table(TABLE, path, row_group_size=400)
    opened = key_service(tools).open_files([FileLocation.resolve(path)])[0]
    row_groups = opened.footer.row_groups
    module = bytearray(row_groups[1].columns[1].encrypted_column_metadata or b"")
    module[30] ^= 1
    chunks = row_groups[1].columns
    chunks[1].encrypted_column_metadata = bytes(module)
    row_groups[1].columns = chunks
    metadata = opened.footer.metadata
    metadata.row_groups = row_groups
    assert opened.footer.cipher is not None
    from parquet_keytools.encryption.aad import FOOTER_PLACE

    data = path.read_bytes()
    stored = data[_footer_offset(path) : -8]
    end = len(stored) - len(opened.footer.envelope.body)
    _replace_footer(path, stored[:end] + opened.footer.cipher.encrypt(metadata.serialise(), FOOTER_PLACE))
    return path


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
import pyarrow.compute as pc, pyarrow.parquet as pq
import test_reading as t
path = t.Path(sys.argv[3])
tools = t.keytools()
reads = {
    "all": lambda: tools.read_table(path),
    "column": lambda: tools.read_table(path, columns=["a"]),
    "filter": lambda: tools.read_table(path, columns=["plain"], filters=pc.field("a") > 5),
    "dataset": lambda: tools.dataset(path.parent),
    "fragments": lambda: [f.to_table(filter=pc.field("a") > 5)
                          for f in tools.dataset(path, columns=["plain"]).get_fragments()],
    "plain": lambda: pq.read_table(path, decryption_properties=tools.decryption_properties(path)),
    "plain filter": lambda: pq.read_table(path, columns=["plain"], filters=[("a", ">", 5)],
                                          decryption_properties=tools.decryption_properties(path)),
    "metadata": lambda: pq.read_metadata(path, decryption_properties=tools.decryption_properties(path)).to_dict(),
}
for name, read in reads.items():
    if name.startswith(("plain", "metadata")) and not t.DECRYPTS_IN_THREADS:
        continue
    try:
        read()
    except t.ColumnAccessDeniedError as error:
        assert error.columns == ("a",) and isinstance(error.causes[0], t.DecryptionError), error
        continue
    sys.exit(f"{name} did not fail")
assert tools.read_table(path, columns=["plain", "b"]).num_rows == 1000
print("all refused")
"""


def test_column_metadata_that_is_damaged(file_with_damaged_column: Path) -> None:
    """Arrow aborts the process on it, so Arrow must not read it first; hence a separate process."""
    tests = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tests), str(tests.parent), str(file_with_damaged_column)],
        env=os.environ | {"PYTHONPATH": str(Path(sys.modules["parquet_keytools"].__file__ or "").parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "all refused"), run.stderr


# --- denied columns ---


def test_hidden_columns(tmp_path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms, reading={"denied_columns": "hide"})
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path)
    kms.fail("refused", "ka")
    visible = TABLE.select(["plain", "b"])
    assert tools.read_table(path).equals(visible)
    assert tools.read_table(path, columns=["a", "b"]).equals(TABLE.select(["b"]))
    assert tools.read_table(tmp_path).equals(visible)
    assert tools.read_table(tmp_path, columns=["a", "b"]).equals(TABLE.select(["b"]))
    dataset = tools.dataset(tmp_path)
    assert dataset.schema.names == ["plain", "b"]
    assert dataset.to_table().equals(visible)
    for read in (
        lambda: tools.read_table(path, filters=[("a", ">", 5)]),
        lambda: tools.read_table(tmp_path, filters=pc.field("a") > 5),
        lambda: tools.dataset(tmp_path, filters=pc.field("a") > 5),
    ):
        # Rows without the filter would be wrong, and filtered rows would reveal the column's values.
        with pytest.raises(ColumnAccessDeniedError):
            read()


@pytest.mark.parametrize("failure", ["timeout", "foreign", "wrong_key"])
def test_only_a_refusal_hides_columns(tmp_path: Path, failure: str) -> None:
    """A result must not lack a column because the KMS was down, or an attacker altered a wrapped key."""
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms, reading={"denied_columns": "hide"})
    tools.write_table(TABLE, tmp_path / "x.parquet")
    kms.fail(failure, "ka")
    for read in (
        lambda: tools.read_table(tmp_path / "x.parquet"),
        lambda: tools.read_table(tmp_path / "x.parquet", columns=["a", "b"]),
        lambda: tools.read_table(tmp_path),
        lambda: tools.dataset(tmp_path),
    ):
        tools.clear_caches()
        with pytest.raises(ColumnAccessDeniedError) as caught:
            read()
        assert caught.value.columns == ("a",)
    assert tools.read_table(tmp_path, columns=["plain", "b"]).equals(TABLE.select(["plain", "b"]))


def test_hidden_columns_of_some_files(tmp_path: Path) -> None:
    """One column has two master keys, and one of them is refused: the column is hidden in the whole data set."""
    kms = FaultyKms(MASTER_KEYS)
    keytools(kms, column_keys={"ka": ["a"]}).write_table(TABLE, tmp_path / "1.parquet")
    keytools(kms, column_keys={"kb": ["a"]}).write_table(TABLE, tmp_path / "2.parquet")
    tools = keytools(kms, column_keys={"kb": ["a"]}, also_trusted=["ka"], reading={"denied_columns": "hide"})
    kms.fail("refused", "kb")
    assert tools.dataset(tmp_path).schema.names == ["plain", "b"]
    assert tools.read_table(tmp_path).num_rows == 2000
    kms.fail("refused", "ka")
    tools.clear_caches()
    # This is not the table's key: an attacker can make a file name any refused key.
    with pytest.raises(ColumnAccessDeniedError):
        tools.dataset(tmp_path)


def test_hidden_nested_column(tmp_path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    table = pa.table({"s": [{"x": 1, "y": 2}] * 3, "plain": [1, 2, 3]})
    tools = keytools(kms, reading={"denied_columns": "hide"}, column_keys={"ka": ["s.x"]})
    for prefix in (None, "t"):
        keytools(kms, column_keys={"ka": ["s.x"]}, aad_prefix=prefix).write_table(table, tmp_path / "x.parquet")
        kms.fail("refused", "ka")
        tools = keytools(kms, reading={"denied_columns": "hide"}, column_keys={"ka": ["s.x"]}, aad_prefix=prefix)
        assert tools.read_table(tmp_path / "x.parquet").equals(table.select(["plain"]))
        kms.failure = None


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("settings", [{}, {"aad_prefix": "t"}, {"unlisted_columns": "footer_key"}])
def test_the_rest_of_a_file_with_refused_columns(
    path: Path, plaintext_footer: bool, settings: dict[str, Any]
) -> None:
    """Arrow then sees another footer than the file's: the rest must be the same nevertheless."""
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms, plaintext_footer=plaintext_footer, **settings)
    tools.write_table(TABLE, path, row_group_size=300, compression="none")
    kms.fail("refused", "ka")
    tools.clear_caches()
    rest = TABLE.select(["plain", "b"])
    assert tools.read_table(path, columns=["plain", "b"]).equals(rest)
    found = tools.read_table(path, columns=["b"], filters=[("plain", ">", 950)])
    assert found.equals(TABLE.filter(pc.field("plain") > 950).select(["b"]))
    dataset = tools.dataset(path, columns=["plain", "b"])
    assert dataset.to_table().equals(rest)
    assert dataset.count_rows() == 1000
    assert path.stat().st_size < 1_000_000, "the file itself was changed"


@pytest.mark.parametrize("settings", [{}, {"aad_prefix": "t", "store_aad_prefix": False}])
def test_a_refused_column_is_not_full_of_nulls(path: Path, settings: dict[str, Any]) -> None:
    """Arrow fills a column that a file lacks with nulls. It decrypts one of these files by itself."""
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms, **settings)
    indexed = pa.Table.from_pandas(TABLE.to_pandas().set_index("a"), preserve_index=True)
    tools.write_table(indexed, path)
    kms.fail("refused", "ka")
    tools.clear_caches()
    replaced = tools.dataset(path.parent, columns=["plain"]).replace_schema(indexed.schema)
    fragments = list(tools.dataset(path.parent, columns=["plain"]).get_fragments())
    for read in (
        lambda: replaced.to_table(),
        lambda: replaced.count_rows(filter=pc.field("a") == 7),
        lambda: fragments[0].to_table(columns=["a"]),
        lambda: tools.read_table(path, columns=["plain"], use_pandas_metadata=True),
    ):
        with pytest.raises(ColumnAccessDeniedError):
            read()


def test_refusal_names_column_and_reason(path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms)
    tools.write_table(TABLE, path)
    kms.fail("refused", "ka")
    tools.clear_caches()
    with pytest.raises(ColumnAccessDeniedError) as caught:
        tools.read_table(path)
    assert caught.value.columns == ("a",)
    assert "'a'" in str(caught.value) and "'ka'" in str(caught.value) and "access denied" in str(caught.value)


def test_a_literal_with_the_name_of_a_refused_column(path: Path) -> None:
    """The filter is searched as text; in doubt, it must refuse and not read."""
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms)
    tools.write_table(TABLE, path)
    kms.fail("refused", "ka")
    tools.clear_caches()
    assert tools.read_table(path, columns=["plain"], filters=[("b", "==", "text 5")]).num_rows == 1
    with pytest.raises(ColumnAccessDeniedError):
        tools.read_table(path, columns=["plain"], filters=[("plain", "==", 1), ("a", "in", [1])])
    with pytest.raises(ColumnAccessDeniedError):
        tools.read_table(path, columns=["plain"], filters=~pc.field("a").is_null())
