"""Files made to crash the verifier, to keep it busy, or to pass as something else."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest
from key_services import key_service
from memory_files import MemorySource
from vector_kit.plain_file import plain_bytes
from vector_kit.sealed_file import (
    BLOOM_FILTER_HEADER,
    COLUMN_INDEX,
    COLUMN_META_DATA,
    DATA_PAGE,
    DATA_PAGE_HEADER,
    DICTIONARY_PAGE_HEADER,
    Module,
    Place,
)
from vector_kit.vector import (
    MASTER_KEYS,
    SealedFile,
    as_metadata,
    base_columns,
    data_key,
    key_material,
    recipe,
)
from vector_kit.write_kit import data_keys

from parquet_keytools import Keytools
from parquet_keytools.conformance.file_keys import Expectation
from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.conformance.inspection import inspect_source
from parquet_keytools.conformance.report import FileReport, Loss, Outcome, Verdict
from parquet_keytools.conformance.verification import finder_of
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.format.file_layout import read_footer_bytes
from parquet_keytools.format.structs import (
    BloomFilterHeader,
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
    RowGroup,
    SchemaElement,
)
from parquet_keytools.format.thrift import Struct, ThriftList, WireType, read_struct
from parquet_keytools.storage.locations import BufferSource, FileLocation

_PRICE = 2
_HEADER_V2, _DEFINITION_LEVELS_LENGTH = 8, 5
"""Fields of `PageHeader`, and of the header in it."""


def verified(data: bytes, expectation: Expectation | None = None) -> FileReport:
    keys = {name: base64.b64encode(key).decode() for name, key in data_keys().items()}
    masters = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    kms = {"type": "in_memory", "keys": masters}
    with Keytools.from_mapping({"version": 1, "kms": kms, "data_keys": keys}) as keytools:
        finder = finder_of(key_service(keytools), FileLocation.resolve("/nowhere/file.parquet"))
        return verify_source(MemorySource(data), finder, expectation)[0]


def broken(report: FileReport) -> set[str]:
    return {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}


@pytest.mark.parametrize("is_ctr", [False, True])
@pytest.mark.parametrize("left", range(0, 40, 4))
def test_a_page_v2_whose_levels_leave_no_room_for_a_module(left: int, is_ctr: bool) -> None:
    """The header says that nearly the whole page is levels; the rest looks like a module."""

    def page_header(place: Place, header: PageHeader) -> None:
        if place[0] == DATA_PAGE and place[2] == _PRICE:
            inner = header.struct.fields[_HEADER_V2][1]
            levels = header.compressed_page_size - 4 - left
            inner.set_entry(_DEFINITION_LEVELS_LENGTH, (WireType.I32, levels))

    def sealed(place: Place, data: bytes) -> bytes:
        if place[0] != DATA_PAGE or place[2] != _PRICE:
            return data
        return b"\1\0\0\0" + data[4 : -4 - left] + struct.pack("<I", left) + data[len(data) - left :]

    data = SealedFile(recipe(1, page_header=page_header, sealed=sealed, is_ctr=is_ctr), {"v2": True}).make()
    assert broken(verified(data)) & {"module-length", "page-v2-whole"}


def bloom_filters_in_each_other(columns: int, body_bytes: int) -> bytes:
    """Return a plaintext file whose Bloom filters have no stated length, and all reach to its end."""
    out = bytearray(b"PAR1")
    root = SchemaElement()
    root.name, root.num_children = "root", columns
    schema, chunks = [root], []
    for column in range(columns):
        header = BloomFilterHeader()
        header.num_bytes = body_bytes
        for field_id in (2, 3, 4):
            header.struct.set_entry(field_id, (WireType.STRUCT, Struct()))
        leaf, chunk, metadata = SchemaElement(), ColumnChunk(), ColumnMetaData()
        leaf.type, leaf.name = 1, f"c{column}"
        metadata.struct.set_entry(2, (WireType.LIST, ThriftList(WireType.I32, [0])))
        metadata.type, metadata.codec, metadata.path_in_schema = 1, 0, [f"c{column}"]
        metadata.num_values = metadata.total_uncompressed_size = metadata.total_compressed_size = 0
        metadata.data_page_offset, metadata.bloom_filter_offset = 4, len(out)
        chunk.file_offset, chunk.meta_data = 0, metadata
        out += header.serialise().ljust(16, b"\0")
        schema.append(leaf)
        chunks.append(chunk)
    out += bytes(body_bytes)
    footer, row_group = FileMetaData(), RowGroup()
    row_group.columns, row_group.total_byte_size, row_group.num_rows = chunks, 0, 0
    footer.version, footer.num_rows, footer.schema, footer.row_groups = 1, 0, schema, [row_group]
    serialised = footer.serialise()
    return bytes(out) + serialised + struct.pack("<I", len(serialised)) + b"PAR1"


def test_bloom_filters_in_each_other_are_not_read_again_and_again() -> None:
    source = MemorySource(bloom_filters_in_each_other(100, 1_000_000))
    report, _ = verify_source(source, None, Expectation(allow_plaintext=True))
    assert broken(report) == {"bloom-filter"}
    assert report.result("bloom-filter").breaches == 99
    assert sum(length for _, length in source.reads) < 2 * source.size_bytes


def changed_plain(change: Any) -> bytes:
    """Return the kit's plaintext file with another footer."""
    data = plain_bytes()
    found = read_footer_bytes(BufferSource("plain", data))
    footer, _ = FileMetaData.read(found.data)
    serialised = change(footer) or footer.serialise()
    return data[: found.offset] + serialised + struct.pack("<I", len(serialised)) + b"PAR1"


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        (lambda footer: footer.serialise() + bytes(28), "as a signature has"),
        (lambda footer: setattr(footer, "footer_signing_key_metadata", b"kf"), "a key for signing"),
    ],
)
def test_what_is_left_of_a_signature_shows_that_the_algorithm_was_removed(change: Any, sign: str) -> None:
    report = verified(changed_plain(change), Expectation(allow_plaintext=True))
    assert broken(report) == {"algorithm-stated"}
    assert sign in report.findings[0].message
    assert broken(verified(changed_plain(lambda _: None), Expectation(allow_plaintext=True))) == set()


@pytest.mark.parametrize("entry", [None, (WireType.I64, 40)], ids=["missing", "of another type"])
def test_an_index_without_a_length_costs_the_index_alone(entry: Any) -> None:
    """No reader can find its end, so nothing in it can be checked: such a file does not conform."""

    def change(metadata: FileMetaData) -> None:
        groups = metadata.row_groups
        chunks = groups[0].columns
        chunks[1].struct.set_entry(ColumnChunk.column_index_length.field_id, entry)
        groups[0].columns = chunks
        metadata.row_groups = groups

    report = verified(changed_plain(change), Expectation(allow_plaintext=True))
    assert "layout-range" in broken(report) and not report.conforms
    assert [index[:2] for index in report.damage.damaged_indexes] == [(0, 1)]
    assert not report.damage.losses


def test_row_groups_do_not_have_fewer_than_no_rows() -> None:
    def footer(metadata: FileMetaData) -> None:
        groups = metadata.row_groups
        groups[0].num_rows, groups[1].num_rows = 90, -30
        metadata.row_groups = groups

    assert "row-count" in broken(verified(SealedFile(recipe(1, footer=footer)).make()))


def test_a_column_that_does_not_repeat_has_as_many_values_as_its_row_group_has_rows() -> None:
    """The sum over all row groups is right, and each one alone is wrong."""

    def footer(metadata: FileMetaData) -> None:
        groups = metadata.row_groups
        groups[0].num_rows, groups[1].num_rows = 31, 29
        metadata.row_groups = groups

    report = verified(SealedFile(recipe(1, footer=footer)).make())
    assert broken(report) == {"value-count"}
    assert report.result("value-count").breaches == 6
    nested = verified(SealedFile(recipe(1, footer=footer), {"nested": True}).make())
    assert nested.result("value-count").breaches == 6, "a list may have any number of values"


def test_first_rows_are_the_sums_of_the_values_before() -> None:
    def offset_index(r: int, c: int, index: Any) -> None:
        if c == 0:
            locations = index.page_locations
            locations[1].first_row_index += 1

    report = verified(SealedFile(recipe(1, offset_index=offset_index)).make())
    assert broken(report) == {"offset-index-rows"}
    assert "[0, 11, 20], and they begin at [0, 10, 20]" in report.findings[0].message


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd"])
@pytest.mark.parametrize("v2", [False, True])
def test_a_page_of_ctr_whose_beginning_was_altered_shows_where_it_is_compressed(
    compression: str, v2: bool
) -> None:
    data = bytearray(SealedFile(recipe(1, is_ctr=True), {"compression": compression, "v2": v2}).make())
    whole = verified(bytes(data))
    assert whole.result("page-content").outcome is Outcome.HOLDS
    with Keytools.from_mapping(
        {"version": 1, "data_keys": {n: base64.b64encode(k).decode() for n, k in data_keys().items()}}
    ) as keytools:
        shown = inspect_source(
            MemorySource(bytes(data)),
            finder_of(key_service(keytools), FileLocation.resolve("/nowhere/file.parquet")),
        )
    page = shown.chunks[0].modules[1]
    for at in range(16, 28):  # In V2 pages, levels come first.
        data[page.offset + at] ^= 0x55
    report = verified(bytes(data))
    assert broken(report) == {"ctr", "page-content"}
    assert report.damage is not None
    assert report.damage.losses[0].pages == (0,)


@pytest.mark.parametrize("row_group", [0, 1])
def test_what_a_later_chunk_of_a_column_shows_is_found_too(row_group: int) -> None:
    """Chunks whose entries are equal are checked once: one that differs is checked, too."""

    def statistics(r: int, c: int, visible: ColumnMetaData) -> None:
        if (r, c) == (row_group, 0):
            visible.struct.set_entry(12, (WireType.STRUCT, Struct({5: (WireType.BINARY, b"\x07" * 8)})))

    def list_of_texts(r: int, c: int, visible: ColumnMetaData) -> None:
        if (r, c) == (row_group, 0):
            visible.struct.set_entry(2, (WireType.LIST, ThriftList(WireType.BINARY, [b"value"])))

    def unknown(r: int, c: int, chunk: ColumnChunk) -> None:
        if (r, c) == (row_group, 0):
            chunk.struct.set_entry(77, (WireType.BINARY, b"value"))

    for hooks in ({"visible": statistics}, {"visible": list_of_texts}, {"chunk": unknown}):
        report = verified(SealedFile(recipe(1, plaintext_footer=True, **hooks)).make())
        (finding,) = report.result("metadata-stripped").findings
        assert finding.place == ModulePlace(ModuleType.COLUMN_META_DATA, row_group, 0)
    hidden = {"chunk": lambda r, c, chunk: setattr(chunk, "crypto_metadata", None) if (r, c) == (1, 0) else None}
    report = verified(SealedFile(recipe(1, **hidden)).make())
    assert broken(report) == {"crypto-metadata-set"}


def test_page_indexes_are_read_together_and_never_beyond_those_that_lie_in_the_file() -> None:
    data = plain_bytes()

    def longer_last_index(footer: FileMetaData) -> None:
        groups = footer.row_groups
        chunks = groups[-1].columns
        last = max(chunks, key=lambda chunk: chunk.offset_index_offset or 0)
        last.offset_index_length = len(data)
        groups[-1].columns = chunks
        footer.row_groups = groups

    source = MemorySource(changed_plain(longer_last_index))
    report, _ = verify_source(source, None, Expectation(allow_plaintext=True))
    assert broken(report) == {"layout-range"}
    assert report.result("offset-index").outcome is Outcome.HOLDS
    assert all(offset + length <= source.size_bytes for offset, length in source.reads)
    whole = MemorySource(data)
    verify_source(whole, None, Expectation(allow_plaintext=True))
    chunks = sum(len(group.columns) for group in FileMetaData.read(read_footer_bytes(whole).data)[0].row_groups)
    assert len(whole.reads) < 2 * chunks, "fewer reads than there are indexes"


def test_an_offset_index_that_cannot_be_read_proves_nothing_about_rows() -> None:
    data = bytearray(plain_bytes())
    group = FileMetaData.read(read_footer_bytes(MemorySource(bytes(data))).data)[0].row_groups
    for chunk in (chunk for columns in group for chunk in columns.columns):
        data[chunk.offset_index_offset or 0] = 0xFF
    report, _ = verify_source(MemorySource(bytes(data)), None, Expectation(allow_plaintext=True))
    assert broken(report) == {"offset-index"}
    assert report.result("offset-index-rows").outcome is Outcome.NOT_APPLICABLE


# --- Required fields ---------------------------------------------------------------------------------------


def _without(wanted: Place, *path: int) -> Callable[[Module], None]:
    """Return a hook that drops a field of the structure in a module."""

    def module(module: Module) -> None:
        if module.place == wanted:
            root, _ = read_struct(module.plaintext)
            holder = root
            for field_id in path[:-1]:
                holder = holder.fields[field_id][1]
            holder.set_entry(path[-1], None)
            module.plaintext = root.as_bytes()

    return module


@pytest.mark.parametrize(
    ("place", "field_ids", "rule"),
    [
        *(((DATA_PAGE_HEADER, 0, 0, 1), (5, field_id), "page-header") for field_id in (1, 2, 3, 4)),
        *(((DICTIONARY_PAGE_HEADER, 0, 1), (7, field_id), "page-header") for field_id in (1, 2)),
        ((COLUMN_META_DATA, 0, 0), (2,), "metadata-path"),
        ((COLUMN_INDEX, 0, 0), (4,), "column-index"),
        *(((BLOOM_FILTER_HEADER, 0, 1), (field_id,), "bloom-filter") for field_id in (2, 3, 4)),
    ],
)
def test_a_required_field_that_is_missing(place: Place, field_ids: tuple[int, ...], rule: str) -> None:
    """Other readers refuse such structures, so they do not pass, however authentic they are."""
    data = SealedFile(recipe(1, module=_without(place, *field_ids))).make()
    assert broken(verified(data)) == {rule}


@pytest.mark.parametrize("field_id", range(1, 7))
def test_a_required_field_of_a_page_v2_that_is_missing(field_id: int) -> None:
    hook = _without((DATA_PAGE_HEADER, 0, 0, 1), 8, field_id)
    assert broken(verified(SealedFile(recipe(1, module=hook), {"v2": True}).make())) == {"page-header"}


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1])
def test_levels_that_are_no_part_of_their_page(length: int) -> None:
    def page_header(place: Place, header: PageHeader) -> None:
        if place == (DATA_PAGE, 0, _PRICE, 1):
            inner = header.struct.fields[_HEADER_V2][1]
            inner.set_entry(_DEFINITION_LEVELS_LENGTH, (WireType.I32, length))

    data = SealedFile(recipe(1, page_header=page_header), {"v2": True}).make()
    assert broken(verified(data)) == {"page-header"}


# --- Authentic metadata that is wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("codec", 1, "page-content"), ("codec", 6, "page-content"), ("type", 5, "metadata-path")],
)
def test_metadata_that_says_what_its_pages_are_not(name: str, value: int, rule: str) -> None:
    def metadata(row_group: int, column: int, record: ColumnMetaData) -> None:
        if (row_group, column) == (0, 0):
            setattr(record, name, value)

    report = verified(SealedFile(recipe(1, metadata=metadata)).make())
    assert broken(report) == {rule}
    assert report.damage is not None
    assert report.damage.readable_row_groups == (1,)


def test_pages_that_are_smaller_than_their_headers_say() -> None:
    def page_header(place: Place, header: PageHeader) -> None:
        if place == (DATA_PAGE, 0, 0, 1):
            header.uncompressed_page_size += 1

    for plain in ({"compression": "snappy"}, {"compression": "snappy", "v2": True}):
        assert broken(verified(SealedFile(recipe(1, page_header=page_header), plain).make())) == {"page-content"}


def test_a_chunk_in_another_file_is_lost() -> None:
    def chunk(row_group: int, column: int, record: ColumnChunk) -> None:
        if (row_group, column) == (0, 0):
            record.file_path = "other.parquet"

    report = verified(SealedFile(recipe(1, chunk=chunk)).make())
    assert "layout-range" in broken(report)
    assert report.damage is not None
    assert report.damage.losses == (Loss(0, 0, "id", None),)
    assert report.damage.readable_row_groups == (1,)


# --- Key metadata of other key managers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "key_metadata",
    [b"\x00\xff\xfe binary", b'{"keyId": "k1"}', b'{"version": 2, "dek": ["a"]}', b"{not JSON", b"[]"],
)
def test_key_metadata_of_any_kind_is_legal_and_no_pass(key_metadata: bytes) -> None:
    """The specification leaves it to the writer (4.3)."""
    columns = base_columns() | {0: (data_key("k1"), key_metadata)}
    report = verified(SealedFile(recipe(1, columns=columns)).make())
    assert not broken(report)
    assert report.verdict is Verdict.INCOMPLETE
    assert list(report.denied) == ["id"]


def test_key_material_of_another_type_is_named() -> None:
    material = key_material(1, data_key("k1"), is_footer_key=False, keyMaterialType="PKMT2")
    columns = base_columns() | {0: (data_key("k1"), as_metadata(material))}
    assert broken(verified(SealedFile(recipe(1, columns=columns)).make())) == {"key-material"}
