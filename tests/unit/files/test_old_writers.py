"""Files with wrong statements by their writers, which other engines read: encryption corrects these."""

from __future__ import annotations

import io
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileMetaData, PageHeader

ROWS = pa.table({"nation": [f"nation {number % 5}" for number in range(50)], "key": list(range(50))})

OLD = ["parquet-mr", "parquet-mr version 1.2.8 (build abc)", "parquet-mr version 1.1.0", "parquet-mr version 1.2"]


@pytest.fixture
def keytools() -> Keytools:
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
            "tables": {
                "t": {"footer_key": "footer", "column_keys": {"pii": ["nation"]}, "unlisted_columns": "footer_key"}
            },
        }
    )


def old_file(
    created_by: str, *, forgets_header: bool = True, file_path: str | None = "", names_dictionary: bool = False
) -> bytes:
    """Return a file of parquet-mr before 1.2.9: sizes lack the header of the dictionary page (PARQUET-816)."""
    sink = io.BytesIO()
    pq.write_table(ROWS, sink, use_dictionary=["nation"], compression="snappy", data_page_version="1.0")
    data = sink.getvalue()
    length = int.from_bytes(data[-8:-4], "little")
    footer, _ = FileMetaData.read(data[-8 - length : -8])
    footer.created_by = created_by
    (group,) = footer.row_groups
    chunks = group.columns
    for chunk in chunks:
        metadata = chunk.meta_data
        assert metadata is not None
        chunk.file_path = file_path
        if metadata.dictionary_page_offset is None:
            continue
        start = metadata.dictionary_page_offset
        if forgets_header:
            _, header_length = PageHeader.read(memoryview(data)[start:])
            metadata.total_compressed_size -= header_length
            metadata.total_uncompressed_size -= header_length
            group.total_byte_size -= header_length
        if not names_dictionary:
            # Old writers omitted it: the first page is at the stated offset of the data pages.
            metadata.dictionary_page_offset = None
            metadata.data_page_offset = start
        chunk.meta_data = metadata
    group.columns = chunks
    footer.row_groups = [group]
    serialised = footer.serialise()
    return data[: -8 - length] + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("created_by", OLD)
@pytest.mark.parametrize("names_dictionary", [False, True])
def test_a_last_page_that_goes_on_after_its_chunk(
    created_by: str, names_dictionary: bool, keytools: Keytools, tmp_path: Path
) -> None:
    plain, encrypted, decrypted = (tmp_path / f"{name}.parquet" for name in ("plain", "encrypted", "decrypted"))
    plain.write_bytes(old_file(created_by, names_dictionary=names_dictionary))
    assert pq.read_table(plain).equals(ROWS)
    keytools.encrypt_file(plain, encrypted)
    assert keytools.read_table(encrypted).equals(ROWS)
    assert keytools.verify_file(encrypted).conforms
    keytools.rekey_file(encrypted, tmp_path / "rekeyed.parquet")
    assert keytools.read_table(tmp_path / "rekeyed.parquet").equals(ROWS)
    # A view, for readers of plaintext files.
    viewed = tmp_path / "viewed.parquet"
    viewed.write_bytes(keytools.open(encrypted).read())
    keytools.decrypt_file(encrypted, decrypted)
    for file in (viewed, decrypted):
        assert pq.read_table(file).equals(ROWS)
        assert pl.read_parquet(file).to_arrow().cast(ROWS.schema).equals(ROWS)
        assert duckdb.sql(f"select * from '{file}'").fetchall() == [
            tuple(row.values()) for row in ROWS.to_pylist()
        ]
    group = pq.read_metadata(decrypted).row_group(0)
    true = pq.read_metadata(pa.BufferReader(old_file("x", forgets_header=False))).row_group(0)
    for found, wanted in ((group.column(0), true.column(0)), (group.column(1), true.column(1))):
        assert found.total_compressed_size == wanted.total_compressed_size
        assert found.total_uncompressed_size == wanted.total_uncompressed_size
        assert found.file_path == ""
    assert group.total_byte_size == true.total_byte_size


def test_a_writer_that_forgets_nothing_is_not_trusted_with_it(keytools: Keytools, tmp_path: Path) -> None:
    for created_by in (
        "parquet-mr version 1.2.9",
        "parquet-mr version 1.10.0",
        "parquet-cpp-arrow version 26.0.0",
    ):
        plain = tmp_path / "plain.parquet"
        plain.write_bytes(old_file(created_by))
        with pytest.raises(ParquetFormatError, match="goes on after its chunk"):
            keytools.encrypt_file(plain, tmp_path / "encrypted.parquet")
        assert not (tmp_path / "encrypted.parquet").exists()


def test_data_in_another_file_is_refused(keytools: Keytools, tmp_path: Path) -> None:
    plain = tmp_path / "plain.parquet"
    plain.write_bytes(old_file("parquet-mr", file_path="part-0.parquet"))
    with pytest.raises(ParquetFormatError, match="in another file"):
        keytools.encrypt_file(plain, tmp_path / "encrypted.parquet")


@pytest.mark.parametrize("denied", ["error", "hide", "null"])
def test_damage_of_a_plaintext_file_is_not_a_matter_of_keys(denied: str, tmp_path: Path) -> None:
    """The metadata of a column names another one."""
    sink = io.BytesIO()
    pq.write_table(ROWS, sink)
    data = sink.getvalue()
    length = int.from_bytes(data[-8:-4], "little")
    footer, _ = FileMetaData.read(data[-8 - length : -8])
    metadata = footer.row_groups[0].columns[0].meta_data
    assert metadata is not None
    metadata.path_in_schema = ["other"]
    serialised = footer.serialise()
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "x.parquet"
    file.write_bytes(data[: -8 - length] + serialised + len(serialised).to_bytes(4, "little") + b"PAR1")
    keytools = Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["footer"]},
            "tables": {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
            "reading": {"plaintext_files": "allow", "denied_columns": denied},
        }
    )
    for read in (
        lambda: keytools.read_table(file),
        lambda: keytools.read_table(folder),
        lambda: keytools.dataset(folder).to_table(),
        lambda: keytools.schema(file),
        lambda: keytools.encrypt_file(file, tmp_path / "out.parquet"),
    ):
        with pytest.raises(ParquetFormatError, match="the metadata belongs to column 'other'") as caught:
            read()
        assert "denied_columns" not in str(caught.value)
    assert keytools.read_table(file, columns=["key"]).num_rows == 50
