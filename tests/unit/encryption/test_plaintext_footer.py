"""Plaintext footers reveal nothing of encrypted columns: values planted everywhere are in no written file."""

from __future__ import annotations

import base64
import io
import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource
from pyarrow_versions import bloom_filters
from soak import sample

from parquet_keytools import Keytools
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.errors import FooterSignatureError, UnsupportedByArrowError, VisibleMetadataError
from parquet_keytools.format.partial_footers import VisibleKeyValues, schema_alone, spark_schema_alone
from parquet_keytools.format.structs import FileMetaData, KeyValue
from parquet_keytools.format.thrift import Struct, ThriftList, WireType

CANARY = b"CANARY-4711"
_TEXT = (WireType.BINARY, CANARY)
_UNKNOWN_ID = 300


def keytools(**settings: Any) -> Keytools:
    table = {
        "footer_key": "kf",
        "column_keys": {"kc": ["secret"]},
        "unlisted_columns": "plaintext",
        "plaintext_footer": True,
        **settings,
    }
    hidden = {"footer_key": "kf", "column_keys": {"kc": ["secret"]}, "unlisted_columns": "plaintext"}
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["kf", "kc"]},
            "tables": {"shown": table, "hidden": hidden},
        }
    )


def table() -> pa.Table:
    values = pa.array([CANARY.decode(), None] * 50)
    field = pa.field("secret", pa.string(), metadata={"categories": CANARY.decode()})
    schema = pa.schema(
        [field, pa.field("open", pa.int64())],
        metadata={
            "pandas": json.dumps({"index_columns": [{"start": 0, "stop": CANARY.decode()}]}),
            "geo": json.dumps({"columns": {"secret": {"bbox": [CANARY.decode()]}}}),
            CANARY.decode(): "a key can be a value too",
            "iceberg.schema": json.dumps({"fields": [{"initial-default": CANARY.decode()}]}),
            "org.apache.spark.version": CANARY.decode() + " not a version",
            "org.apache.spark.sql.parquet.row.metadata": json.dumps(
                {
                    "type": "struct",
                    "fields": [
                        {
                            "name": "secret",
                            "type": "string",
                            "nullable": True,
                            "metadata": {"ml_attr": {"vals": [CANARY.decode()]}, "comment": CANARY.decode()},
                            "more": CANARY.decode(),
                        }
                    ],
                }
            ),
        },
    )
    return pa.table([values, pa.array(range(100), pa.int64())], schema=schema)


def plain_bytes(**options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table(),
        sink,
        compression="none",
        row_group_size=50,
        write_page_index=True,
        sorting_columns=[pq.SortingColumn(1), pq.SortingColumn(0)],
        **bloom_filters({"secret": {"ndv": 5, "fpp": 0.1}}),
        **options,
    )
    return sink.getvalue()


def with_footer(data: bytes, change: Callable[[FileMetaData], None]) -> bytes:
    (length,) = struct.unpack("<I", data[-8:-4])
    footer, _ = FileMetaData.read(data[-8 - length : -8])
    change(footer)
    new = footer.serialise()
    return data[: -8 - length] + new + struct.pack("<I", len(new)) + data[-4:]


def structs(footer: FileMetaData) -> Iterator[Struct]:
    """Yield every struct, except the chunk of a plaintext column and its own key-value metadata."""
    yield footer.struct
    yield from (element.struct for element in footer.schema)
    for element in footer.schema:
        logical = element.struct.fields.get(10)
        if logical is not None:
            yield from (logical[1], *(member for _, member in logical[1].fields.values()))
    yield from (order for order in footer.struct.fields[7][1].elements)
    yield from (entry.struct for entry in footer.key_value_metadata or ())
    for row_group in footer.row_groups:
        yield row_group.struct
        yield from row_group.struct.fields[4][1].elements
        chunk = row_group.columns[0]
        assert chunk.meta_data is not None
        yield from (chunk.struct, chunk.meta_data.struct)


def plant_everywhere(footer: FileMetaData) -> None:
    for found in structs(footer):
        found.set_entry(_UNKNOWN_ID, _TEXT)
        found.set_entry(_UNKNOWN_ID + 1, (WireType.STRUCT, Struct({1: _TEXT})))
    for row_group in footer.row_groups:
        metadata = row_group.columns[0].meta_data
        assert metadata is not None
        box = Struct(dict.fromkeys(range(1, 5), (WireType.DOUBLE, CANARY[:8])))
        # Key-value metadata of the chunk, and known fields of other types.
        metadata.struct.set_entry(8, (WireType.LIST, ThriftList(WireType.STRUCT, [Struct({1: _TEXT, 2: _TEXT})])))
        metadata.struct.set_entry(10, (WireType.LIST, ThriftList(WireType.BINARY, [CANARY])))
        metadata.struct.set_entry(17, (WireType.STRUCT, Struct({1: (WireType.STRUCT, box)})))
        row_group.columns[0].struct.set_entry(1, (WireType.LIST, ThriftList(WireType.BINARY, [CANARY])))


def source(folder: Path) -> Path:
    path = folder / "plain.parquet"
    path.write_bytes(with_footer(plain_bytes(), plant_everywhere))
    assert path.read_bytes().count(CANARY) > 60
    return path


def encrypted(tools: Keytools, folder: Path) -> Path:
    tools.encrypt_file(source(folder), folder / "x.parquet", table_name="shown")
    return folder / "x.parquet"


def rekeyed(tools: Keytools, folder: Path) -> Path:
    """From a complete encrypted footer to a plaintext one."""
    tools.encrypt_file(source(folder), folder / "hidden.parquet", table_name="hidden")
    tools.rekey_file(folder / "hidden.parquet", folder / "x.parquet", table_name="shown")
    return folder / "x.parquet"


def rekeyed_in_place(tools: Keytools, folder: Path) -> Path:
    tools.rekey_file(encrypted(tools, folder), folder / "y.parquet", table_name="shown")
    return folder / "y.parquet"


def written(tools: Keytools, folder: Path) -> Path:
    tools.write_table(table(), folder / "x.parquet", table_name="shown", compression="none")
    return folder / "x.parquet"


def written_data_set(tools: Keytools, folder: Path) -> Path:
    tools.write_dataset(table(), folder / "d", table_name="shown")
    (path,) = (folder / "d").glob("*.parquet")
    return path


@pytest.mark.parametrize("write", [encrypted, rekeyed, rekeyed_in_place, written, written_data_set])
def test_no_planted_value_is_in_the_file(
    write: Callable[[Keytools, Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keytools() as tools:
        caplog.set_level(logging.WARNING)
        path = write(tools, tmp_path)
        data = path.read_bytes()
        assert data[-4:] == b"PAR1"
        for form in (CANARY, base64.b64encode(CANARY)[:-2], CANARY[:-4]):
            assert form not in data
        shown = pq.read_metadata(path).metadata
        assert set(shown) <= {b"ARROW:schema", b"org.apache.spark.sql.parquet.row.metadata"}
        assert CANARY not in base64.b64decode(shown[b"ARROW:schema"])
        back = tools.read_table(path, table_name="shown")
        assert back["secret"].to_pylist() == [CANARY.decode(), None] * 50
        # Nothing is omitted silently.
        assert "'pandas'" in caplog.text and "'geo'" in caplog.text and "'ARROW:schema'" in caplog.text
        report = tools.verify_file(path, table_name="shown")
        broken = {result.rule.id for result in report.rules if result.outcome.value == "broken"}
        assert broken <= {"names-visible", "no-prefix"}


def test_nothing_of_the_column_itself_is_lost(tmp_path: Path) -> None:
    with keytools() as tools:
        path = encrypted(tools, tmp_path)
        tools.decrypt_file(path, tmp_path / "back.parquet", table_name="shown")
    before = read_footer(MemorySource(source(tmp_path).read_bytes()), None)
    after = read_footer(MemorySource((tmp_path / "back.parquet").read_bytes()), None)
    offsets = {7, 9, 11, 14, 15}
    for chunks, other in zip(before.chunks, after.chunks, strict=True):
        for chunk, now in zip(chunks, other, strict=True):
            assert chunk.meta_data is not None and now.meta_data is not None
            fields, now_fields = chunk.meta_data.struct.fields, now.meta_data.struct.fields
            assert {k: v for k, v in fields.items() if k not in offsets} == {
                k: v for k, v in now_fields.items() if k not in offsets
            }


def test_a_logical_type_that_says_nothing_stays(tmp_path: Path) -> None:
    """Readers do not interpret the column by its converted type, as they would without it."""

    def empty_types(footer: FileMetaData) -> None:
        for element in footer.schema[1:]:
            element.struct.set_entry(10, (WireType.STRUCT, Struct()))

    plain = tmp_path / "plain.parquet"
    plain.write_bytes(with_footer(plain_bytes(), empty_types))
    with keytools(plaintext_footer_keys=[CANARY.decode(), "geo", "iceberg.schema"]) as tools:
        tools.encrypt_file(plain, tmp_path / "x.parquet", table_name="shown")
    shown = read_envelope(MemorySource((tmp_path / "x.parquet").read_bytes())).unverified_footer()
    assert shown is not None
    assert [element.struct.fields.get(10) for element in shown.metadata.schema[1:]] == [
        (WireType.STRUCT, Struct()),
        (WireType.STRUCT, Struct()),
    ]


def test_an_encrypted_footer_keeps_everything(tmp_path: Path) -> None:
    with keytools() as tools:
        tools.encrypt_file(source(tmp_path), tmp_path / "x.parquet", table_name="hidden")
        assert CANARY not in (tmp_path / "x.parquet").read_bytes()
        tools.decrypt_file(tmp_path / "x.parquet", tmp_path / "back.parquet", table_name="hidden")
    before = read_footer(MemorySource(source(tmp_path).read_bytes()), None).metadata.struct.fields
    after = read_footer(MemorySource((tmp_path / "back.parquet").read_bytes()), None).metadata.struct.fields
    assert {k: v for k, v in before.items() if k != 4} == {k: v for k, v in after.items() if k != 4}


def test_a_table_can_refuse_what_would_be_lost(tmp_path: Path) -> None:
    with keytools(plaintext_footer_key_values="refuse") as tools:
        with pytest.raises(VisibleMetadataError, match=r"the value of key 'pandas'.*\n?.*plaintext_footer_keys"):
            encrypted(tools, tmp_path)
        with pytest.raises(VisibleMetadataError, match="'geo'"):
            written(tools, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["plain.parquet"]
        tools.write_table(
            table().replace_schema_metadata().select(["open"]).append_column("secret", table()["secret"]),
            tmp_path / "x.parquet",
            table_name="shown",
        )
        assert tools.read_table(tmp_path / "x.parquet", table_name="shown").num_rows == 100


def test_unknown_fields_are_left_out_of_no_footer_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields of a chunk, a row group, and the file: they are not in the encrypted metadata of a column."""
    plain, target = tmp_path / "plain.parquet", tmp_path / "x.parquet"

    def plant(where: str) -> None:
        def change(footer: FileMetaData) -> None:
            footer.key_value_metadata = None
            for row_group in footer.row_groups:
                row_group.struct.set_entry(4, None)
            row_group = footer.row_groups[0]
            places = {"file": footer, "row group": row_group, "chunk": row_group.columns[0]}
            if where in places:
                places[where].struct.set_entry(_UNKNOWN_ID, _TEXT)

        plain.write_bytes(with_footer(plain_bytes(), change))

    plant("nowhere")
    with keytools(plaintext_footer_key_values="refuse") as tools:
        tools.encrypt_file(plain, target, table_name="shown")
        # No key-value metadata is added, either.
        assert pq.read_metadata(target).metadata is None
        target.unlink()
        for where in ("file", "row group", "chunk"):
            plant(where)
            with pytest.raises(VisibleMetadataError, match=rf"field {_UNKNOWN_ID}\b"):
                tools.encrypt_file(plain, target, table_name="shown")
            assert not target.exists()
    with keytools() as tools:
        for where in ("file", "row group", "chunk"):
            caplog.clear()
            plant(where)
            tools.encrypt_file(plain, target, table_name="shown")
            assert f"field {_UNKNOWN_ID}" in caplog.text, where
            target.unlink()


def test_keys_that_the_table_lists_stay(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"secret": ["a", "b"]}, index=pandas.RangeIndex(5, 7))
    data = pa.Table.from_pandas(frame).replace_schema_metadata(
        {**(pa.Table.from_pandas(frame).schema.metadata or {}), b"owner": b"us"}
    )
    listed = ["owner", "pandas", "ARROW:schema"]
    with (
        keytools(plaintext_footer_keys=listed[:2], plaintext_footer_key_values="refuse") as tools,
        pytest.raises(VisibleMetadataError, match="parts of the value of key 'ARROW:schema'"),
    ):
        tools.write_table(data, tmp_path / "x.parquet", table_name="shown")
    with keytools(plaintext_footer_keys=listed, plaintext_footer_key_values="refuse") as tools:
        tools.write_table(data, tmp_path / "x.parquet", table_name="shown")
        shown = pq.read_metadata(tmp_path / "x.parquet").metadata
        assert shown[b"owner"] == b"us" and b"stop" in shown[b"pandas"]
        assert list(tools.read_table(tmp_path / "x.parquet", table_name="shown").to_pandas().index) == [5, 6]
        report = tools.verify_file(tmp_path / "x.parquet", table_name="shown")
        assert next(r for r in report.rules if r.rule.id == "footer-values").outcome.value != "broken"


def test_all_columns_in_plaintext_hide_nothing(tmp_path: Path) -> None:
    with keytools(column_keys={}) as tools:
        tools.write_table(table(), tmp_path / "x.parquet", table_name="shown")
    assert b"geo" in pq.read_metadata(tmp_path / "x.parquet").metadata


def test_what_rows_are_sorted_by_is_shown_up_to_the_first_encrypted_column(tmp_path: Path) -> None:
    with keytools() as tools:
        footer = read_envelope(MemorySource(encrypted(tools, tmp_path).read_bytes())).unverified_footer()
    assert footer is not None
    for row_group in footer.row_groups:
        assert [element.fields[1][1] for element in row_group.struct.fields[4][1].elements] == [1]


def test_pyarrows_own_properties_are_refused(tmp_path: Path) -> None:
    """Its writer leaves size statistics of encrypted columns, and all key-value metadata, in plaintext footers."""
    with keytools() as tools, pytest.raises(UnsupportedByArrowError, match="size statistics") as caught:
        tools.encryption_properties("shown", table().schema, tmp_path / "x.parquet")
    assert "Keytools.writer" in str(caught.value)


# --- Schemas of Arrow and Spark -----------------------------------------------------------------------------

_WITH = {b"note": CANARY}


def _field(of: pa.DataType, name: str = "f") -> pa.Field:
    return pa.field(name, of, metadata=_WITH)


TYPES = [
    pa.int8(),
    pa.float16(),
    pa.large_string(),
    pa.binary(7),
    pa.time64("ns"),
    pa.timestamp("ns", "Europe/Berlin"),
    pa.duration("s"),
    pa.month_day_nano_interval(),
    pa.decimal256(50, 3),
    pa.null(),
    pa.string_view(),
    pa.struct([_field(pa.int8(), "a"), _field(pa.timestamp("s", "UTC"), "b")]),
    pa.list_(_field(pa.list_(_field(pa.int8()), 3))),
    pa.large_list_view(_field(pa.string())),
    pa.map_(_field(pa.string(), "key").with_nullable(False), _field(pa.int8(), "value")),
    pa.dictionary(pa.int16(), pa.timestamp("s", "UTC"), True),
    pa.run_end_encoded(pa.int32(), pa.string()),
    pa.dense_union([_field(pa.int8(), "x"), _field(pa.string(), "y")], [3, 7]),
    pa.uuid(),
    pa.fixed_shape_tensor(pa.int8(), [2, 3]),
]


@pytest.mark.parametrize("of", TYPES, ids=str)
def test_an_arrow_schema_without_its_metadata_is_the_same_schema(of: pa.DataType) -> None:
    schema = pa.schema([_field(of, "one"), _field(of, "two")], metadata={**_WITH, b"pandas": CANARY})
    message = schema.serialize().to_pybytes()
    assert CANARY in message
    alone = schema_alone(message)
    assert alone is not None and CANARY not in alone and b"note" not in alone
    read = pa.ipc.read_schema(pa.py_buffer(alone))
    assert read.equals(schema) and not read.metadata


def test_extension_types_of_others_are_taken_for_metadata() -> None:
    metadata = {b"ARROW:extension:name": b"shop.names", b"ARROW:extension:metadata": CANARY}
    message = pa.schema([pa.field("a", pa.string(), metadata=metadata)]).serialize().to_pybytes()
    alone = schema_alone(message)
    assert alone is not None and CANARY not in alone
    assert pa.ipc.read_schema(pa.py_buffer(alone)).equals(pa.schema([("a", pa.string())]))


def test_what_is_no_arrow_schema_is_not_shown() -> None:
    message = pa.schema([_field(of, str(n)) for n, of in enumerate(TYPES)]).serialize().to_pybytes()
    for length in sample(range(len(message)), 40, 0):
        assert schema_alone(message[:length]) is None
    for position in sample(range(len(message)), 7, 3):
        schema_alone(message[:position] + b"\xff" + message[position + 1 :])
    assert schema_alone(CANARY * 10) is None


def test_bytes_that_no_reader_of_arrow_looks_at_are_hidden() -> None:
    """Arrow reads the same schema with and without them, metadata included."""
    message = pa.schema([("a", pa.string())]).serialize().to_pybytes()
    length = len(message) - 8 + len(CANARY)
    grown = message[:4] + struct.pack("<I", length) + message[8:] + CANARY
    read = pa.ipc.read_schema(pa.py_buffer(grown))
    assert read.equals(pa.ipc.read_schema(pa.py_buffer(message)), check_metadata=True)
    alone = schema_alone(grown)
    assert alone is not None and CANARY not in alone
    entry = KeyValue()
    for value, hides in ((message, False), (grown, True)):
        entry.key, entry.value = "ARROW:schema", base64.b64encode(value).decode()
        assert VisibleKeyValues().hides(entry) is hides


def test_fields_that_are_shared_are_no_arrow_schema() -> None:
    """Arrow copies each of them: it reads 45 KB, in which many fields share one long name, as 1 GB."""
    message = bytearray(pa.schema([("a", pa.int8()), ("a", pa.int8())]).serialize().to_pybytes())

    def number(layout: str, place: int) -> int:
        return int(struct.unpack_from(layout, message, place)[0])

    def target(table: int, slot: int) -> int:
        place = table + number("<H", table - number("<i", table) + 4 + 2 * slot)
        return place + number("<I", place)

    fields = target(target(8 + number("<I", 8), 2), 1)
    assert number("<I", fields) == 2 and schema_alone(bytes(message)) is not None
    struct.pack_into("<I", message, fields + 8, number("<I", fields + 4) - 4)
    assert pa.ipc.read_schema(pa.py_buffer(message)).names == ["a", "a"]
    assert schema_alone(bytes(message)) is None


def test_a_spark_schema_keeps_types_only() -> None:
    inner = {"type": "array", "elementType": "integer", "containsNull": True, "note": "x"}
    fields = [
        {"name": "a", "type": inner, "nullable": False, "metadata": {"__CHAR_VARCHAR_TYPE_STRING": "varchar(9)"}},
        {"name": "b", "type": "string", "nullable": True, "metadata": {"__CHAR_VARCHAR_TYPE_STRING": "CANARY"}},
    ]
    found = spark_schema_alone(json.dumps({"type": "struct", "fields": fields}))
    assert found is not None and "CANARY" not in found and "note" not in found
    assert json.loads(found)["fields"][0] == fields[0] | {"type": {k: inner[k] for k in list(inner)[:3]}}
    assert spark_schema_alone("[1]") is None and spark_schema_alone("x") is None


def test_each_byte_of_the_signature_counts(tmp_path: Path) -> None:
    """The 28 bytes before the length: 12 of the nonce, 16 of the tag (spec 4.2, 5.2)."""
    path, target = tmp_path / "x.parquet", tmp_path / "target.parquet"
    with keytools() as tools:
        written = pa.table({"secret": ["x"], "open": [1]})
        tools.write_table(written, path, table_name="shown")
        data = path.read_bytes()
        readers: dict[str, Callable[[], object]] = {
            "read_table": lambda: tools.read_table(path, table_name="shown"),
            "plaintext column": lambda: tools.read_table(path, table_name="shown", columns=["open"]),
            "dataset": lambda: tools.dataset(path, table_name="shown").to_table(),
            "view": lambda: tools.open(path, table_name="shown").read(),
            "metadata": lambda: tools.metadata(path, table_name="shown"),
            "decrypt_file": lambda: tools.decrypt_file(path, target, table_name="shown"),
            "rekey_file": lambda: tools.rekey_file(path, target, table_name="shown"),
            "salvage_file": lambda: tools.salvage_file(path, target, table_name="shown"),
            "rekey_in_place": lambda: tools.rekey_in_place(path, table_name="shown"),
        }
        for place in range(28):
            damaged = bytearray(data)
            damaged[len(data) - 8 - 28 + place] ^= 1 << place % 8
            path.write_bytes(damaged)
            for name, read in readers.items():
                with pytest.raises(FooterSignatureError):
                    read()
                    pytest.fail(f"{name} with another byte {place}")
            report = tools.verify_file(path, table_name="shown")
            assert report.result("signature-valid").outcome is Outcome.BROKEN, place
            (rotated,) = tools.rotate(path, older_than="2").files
            assert isinstance(rotated.error, FooterSignatureError), place
            assert path.read_bytes() == damaged and not target.exists()
        path.write_bytes(data)
        assert tools.read_table(path, table_name="shown").equals(written)
        assert tools.verify_file(path, table_name="shown").result("signature-valid").outcome is Outcome.HOLDS
