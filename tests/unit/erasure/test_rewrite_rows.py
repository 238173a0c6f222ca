import shutil
import stat
import uuid
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow_versions import bloom_filters
from rotation_case import TABLE, Case, names, read_with_pyarrow, tree_digest

from parquet_keytools import Keytools
from parquet_keytools.conformance.file_verifier import FileEnd
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.erasure import rewrite
from parquet_keytools.erasure.rewrite import FileRewrite
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    KmsAccessDeniedError,
    NoParquetFilesError,
    NotEncryptedError,
    OutputError,
)
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.report import Outcome, RotationReport
from parquet_keytools.storage.locations import FileLocation, open_source

KINDS: dict[str, dict[str, Any]] = {
    "internal": {},
    "external": {"key_material": "external"},
    "plaintext footer": {"plaintext_footer": True},
    "prefix": {"aad_prefix": "t/{file_name}"},
    "prefix that is not stored": {"aad_prefix": "t", "store_aad_prefix": False},
    "data key of 256 bits": {"data_key_length_bits": 256, "double_wrapping": False},
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def without(table: pa.Table, *values: int) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table["a"], pa.array(values, pa.int64()))))


def end_of(path: Path) -> FileEnd:
    with open_source(FileLocation.resolve(path)) as source:
        envelope = read_envelope(source)
        return FileEnd.of(envelope.footer_offset, envelope.tail)


def by_name(report: RotationReport) -> dict[str, Any]:
    return {Path(file.path).name: file for file in report.files}


@every_kind
def test_rows_are_removed_and_other_files_stay(tmp_path: Path, settings: dict[str, Any]) -> None:
    case = Case.make(tmp_path, "in_memory", **settings)
    with_match = case.write("x.parquet", row_group_size=100)
    other = case.write("p=1/y.parquet", table=TABLE.slice(200))
    before, all_names, was = end_of(with_match), names(case.folder), tree_digest(case.folder)
    report = case.tools().erase_rows(case.folder, where="a IN (3, 150) AND b != 'text 0'")
    assert report.succeeded and report.counts == {Outcome.ROWS_REMOVED: 1, Outcome.NO_MATCHING_ROWS: 1}
    found = by_name(report)
    x, y = found["x.parquet"], found["y.parquet"]
    assert (x.rows, x.rows_removed, x.before, x.after) == (500, 2, before, end_of(with_match))
    assert x.before != x.after
    assert (y.rows, y.rows_removed, y.before, y.after) == (300, 0, end_of(other), None)
    tools = case.tools()
    assert tools.read_table(with_match).equals(without(TABLE, 3, 150))
    assert [tools.metadata(with_match).row_group(i).num_rows for i in range(5)] == [99, 99, 100, 100, 100]
    assert names(case.folder) == all_names
    now = tree_digest(case.folder)
    assert {name for name in now if now[name] != was[name]} <= {"x.parquet", "_KEY_MATERIAL_FOR_x.parquet.json"}
    assert tools.verify_folder(case.folder).conforms
    # A second run changes nothing.
    report = tools.erase_rows(case.folder, where="a IN (3, 150)")
    assert report.counts == {Outcome.NO_MATCHING_ROWS: 2} and tree_digest(case.folder) == now


def test_other_readers_read_the_new_file(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    assert case.tools().erase_rows(path, where="nested.x < 490").succeeded
    assert read_with_pyarrow(case.kms, path).equals(TABLE.slice(490))


@every_kind
def test_a_file_without_rows_stays_as_an_empty_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    case = Case.make(tmp_path, "in_memory", **settings)
    path, other = case.write("x.parquet"), case.write("y.parquet", table=TABLE.slice(499))
    report = case.tools().erase_rows(case.folder, where="a < 499")
    assert by_name(report)["x.parquet"].rows_removed == 499
    report = case.tools().erase_rows(case.folder, where="a >= 0")
    assert [file.rows_removed for file in report.files] == [1, 1]
    tools = case.tools()
    assert tools.read_table(path).equals(TABLE.slice(0, 0)) and tools.read_table(path).schema.equals(TABLE.schema)
    assert tools.read_table([path, other]).num_rows == 0 and tools.verify_folder(case.folder).conforms
    assert tools.erase_rows(case.folder, where="a >= 0").counts == {Outcome.NO_MATCHING_ROWS: 2}


def test_null_is_not_equal(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["a"]})
    path = case.write(table=pa.table({"a": [1, None, 2], "b": ["x", "y", "z"]}))
    case.tools().erase_rows(path, where="a != 1")
    assert case.tools().read_table(path)["b"].to_pylist() == ["x", "y"]
    case.tools().erase_rows(path, where="a IS NULL")
    assert case.tools().read_table(path)["b"].to_pylist() == ["x"]


def test_all_that_a_reader_sees_of_the_file_stays(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["a"]})
    fields = [
        pa.field("a", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "7", "unit": "m"}),
        pa.field("b", pa.large_string()),
        pa.field("c", pa.dictionary(pa.int32(), pa.string())),
        pa.field("d", pa.int32()),
    ]
    text = [f"t{number}" for number in range(300)]
    data = [
        pa.array(range(300)),
        pa.array(text, pa.large_string()),
        pa.array(text).dictionary_encode(),
        range(300),
    ]
    table = pa.table(data, schema=pa.schema(fields, metadata={"owner": "risk"}))
    options: dict[str, Any] = {
        "compression": {"a": "zstd", "b": "gzip", "c": "none", "d": "snappy"},
        "use_dictionary": ["c"],
        "column_encoding": {"a": "DELTA_BINARY_PACKED", "d": "BYTE_STREAM_SPLIT"},
        "write_statistics": ["a", "b"],
        "write_page_index": True,
        "sorting_columns": [pq.SortingColumn(0)],
        **bloom_filters({"b": {"ndv": 100}}),
    }
    plain = tmp_path / "plain.parquet"
    pq.write_table(table, plain, row_group_size=100, **options)
    path, tools = case.folder / "x.parquet", case.tools()
    tools.encrypt_file(plain, path)
    before = tools.metadata(path)
    tools.erase_rows(path, where="d = 120")
    after = tools.metadata(path)
    assert after.schema.equals(before.schema) and after.metadata == before.metadata
    assert after.schema.to_arrow_schema().equals(table.schema, check_metadata=True)
    assert [after.row_group(i).num_rows for i in range(3)] == [100, 99, 100]
    for name in "compression", "encodings", "is_stats_set", "has_column_index", "has_offset_index":
        for ordinal in range(4):
            new, old = after.row_group(1).column(ordinal), before.row_group(1).column(ordinal)
            assert getattr(new, name) == getattr(old, name), (name, ordinal)
    if options.keys() & {"bloom_filter_options"}:
        assert [after.row_group(0).column(i).bloom_filter_offset is not None for i in range(4)] == [
            before.row_group(0).column(i).bloom_filter_offset is not None for i in range(4)
        ]
    assert after.row_group(1).sorting_columns == before.row_group(1).sorting_columns
    read = tools.read_table(path)
    assert read.equals(table.filter(pc.not_equal(table["d"], 120)))


def test_logical_types_that_are_not_read_stay(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["a"]})
    path, plain, tools = case.folder / "x.parquet", tmp_path / "plain.parquet", case.tools()
    ones = [uuid.UUID(int=number).bytes for number in range(3)]
    table = pa.table({"a": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(ones, pa.binary(16)))})
    pq.write_table(table, plain, store_schema=False)
    tools.encrypt_file(plain, path)
    before = tools.metadata(path).schema
    assert tools.erase_rows(path, where=f"a = '{uuid.UUID(int=1)}'").succeeded
    assert tools.metadata(path).schema.equals(before) and tools.metadata(path).num_rows == 2
    assert str(tools.metadata(path).schema.column(0).logical_type) == str(before.column(0).logical_type)


def as_spark_writes(path: Path, at: datetime) -> pa.Table:
    """Write 96-bit timestamps, decimals as integers, and lists whose elements have another name."""
    table = pa.table(
        {
            "a": [1, 2],
            "at": pa.array([at, None], pa.timestamp("us")),
            "price": pa.array([Decimal("1.50"), Decimal("2.50")], pa.decimal128(8, 2)),
            "list": pa.array([[1], []], pa.list_(pa.field("item", pa.int32()))),
            "share": [float("nan"), 1.0],
        }
    )
    options = {"use_deprecated_int96_timestamps": True, "store_decimal_as_integer": True}
    pq.write_table(table, path, use_compliant_nested_type=False, store_schema=False, **options)
    return table


def test_a_file_as_spark_writes_it(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["a"]})
    path, plain, tools = case.folder / "x.parquet", tmp_path / "plain.parquet", case.tools()
    table = as_spark_writes(plain, datetime(1969, 1, 1, 0, 0, 0, 1))
    tools.encrypt_file(plain, path)
    before = tools.metadata(path).schema
    assert tools.erase_rows(path, where="a = 2").succeeded
    assert tools.metadata(path).schema.equals(before)
    kept = tools.read_table(path, coerce_int96_timestamp_unit="us")
    assert kept.drop_columns("share").equals(table.drop_columns("share").slice(0, 1))


def test_timestamps_that_overflow_are_refused(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["a"]})
    path, plain, tools = case.folder / "x.parquet", tmp_path / "plain.parquet", case.tools()
    as_spark_writes(plain, datetime(9999, 12, 31))
    tools.encrypt_file(plain, path)
    before = tree_digest(case.folder)
    for where in ("a = 2", "at > '2026-01-01'", "at < '1900-01-01'"):
        with pytest.raises(OutputError, match="before 1678 or after 2261"):
            tools.erase_rows(path, where=where)
    assert tree_digest(case.folder) == before


def test_attributes_stay_and_stale_checksums_go(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    path.chmod(0o640)
    checksum = path.with_name(f".{path.name}.crc")
    checksum.write_bytes(b"crc\0\0\0\2\0")
    link = tmp_path / path.name
    link.symlink_to(path)
    assert case.tools().erase_rows(link, where="a = 1").succeeded
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640 and not checksum.exists()


def test_other_names_would_keep_the_rows(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    (tmp_path / "backup.parquet").hardlink_to(path)
    before = tree_digest(case.folder)
    with pytest.raises(OutputError, match="2 names"):
        case.tools().erase_rows(path, where="a = 1")
    assert tree_digest(case.folder) == before
    assert case.tools().erase_rows(path, where="a = -1").succeeded


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet")
    outside = tmp_path / "outside.parquet"
    shutil.copy(case.folder / "x.parquet", outside)
    (case.folder / "y.parquet").symlink_to(outside)
    was = outside.read_bytes()
    report = case.tools().erase_rows(case.folder, where="a = 1")
    assert report.counts == {Outcome.ROWS_REMOVED: 1, Outcome.FAILED: 1} and outside.read_bytes() == was


def test_files_that_cannot_be_read_fail_and_others_are_done(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("good.parquet")
    damaged = case.write("damaged.parquet")
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.write_bytes(data)
    cut = case.write("cut.parquet")
    cut.write_bytes(cut.read_bytes()[:-1])
    pq.write_table(TABLE, case.folder / "plain.parquet")
    case.write("other.parquet", tools=case.tools(footer_key="new"))
    before = tree_digest(case.folder)
    report = case.tools().erase_rows(case.folder, where="a = 1")
    errors = {Path(file.path).name: file.error_class for file in report.failures}
    assert errors == {
        "damaged.parquet": "DecryptionError",
        "cut.parquet": "ParquetFormatError",
        "plain.parquet": "NotEncryptedError",
        "other.parquet": "TableMismatchError",
    }
    after = tree_digest(case.folder)
    assert {name for name in after if after[name] != before[name]} == {"good.parquet"} and not report.succeeded
    with pytest.raises(NotEncryptedError):
        case.tools().erase_rows(case.folder / "plain.parquet", where="a = 1")


@pytest.mark.parametrize(
    ("values", "kind", "where"),
    [([1.0, 2.0], pa.float16(), "c = 1"), (["x", "y"], pa.string_view(), "c IN ('x', 'z')")],
    ids=["float16", "string view"],
)
def test_types_that_pyarrow_cannot_filter_fail_and_others_are_done(
    tmp_path: Path, values: list[Any], kind: pa.DataType, where: str
) -> None:
    case = Case.make(tmp_path, "in_memory", column_keys={"ka": ["c"]}, unlisted_columns="footer_key")
    tools = case.tools()
    # Older versions of pyarrow accept only NumPy values.
    column = pa.array(np.array(values, np.float16)) if pa.types.is_floating(kind) else pa.array(values, kind)
    tools.write_table(pa.table({"c": column}), case.folder / "b.parquet")
    for name in ("a.parquet", "c.parquet"):
        tools.write_table(pa.table({"c": values}), case.folder / name)
    report = tools.erase_rows(case.folder, where=where)
    assert report.counts == {Outcome.ROWS_REMOVED: 2, Outcome.FAILED: 1}
    assert [(Path(file.path).name, file.error_class) for file in report.failures] == [("b.parquet", "OutputError")]


@pytest.mark.parametrize("where", ["a = 'x'", "aa = 1", "a = 1 OR b = 'x'", "p = 1"])
def test_a_filter_that_does_not_fit_changes_nothing(tmp_path: Path, where: str) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("p=1/x.parquet"), case.write("y.parquet")
    before = tree_digest(case.folder)
    with pytest.raises(ConfigurationError):
        case.tools().erase_rows(case.folder, where=where)
    assert tree_digest(case.folder) == before


@pytest.mark.parametrize(("where", "names"), [("b = 'text 1'", ["b"]), ("a = 1", ["b"])])
def test_a_column_that_cannot_be_read_changes_nothing(tmp_path: Path, where: str, names: list[str]) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet"), case.write("y.parquet")
    assert isinstance(case.kms, InMemoryKms)
    before = tree_digest(case.folder)
    case.kms.deny("kb")
    for denied_columns in ("error", "hide", "null"):
        tools = case.tools()
        reading = tools.configuration.reading.model_copy(update={"denied_columns": denied_columns})
        configuration = tools.configuration.model_copy(update={"reading": reading})
        with pytest.raises(ColumnAccessDeniedError) as raised:
            Keytools(configuration, kms=case.kms).erase_rows(case.folder, where=where)
        assert list(raised.value.columns) == names
        assert tree_digest(case.folder) == before
    # It searches a file whose other columns it cannot read, and finds nothing.
    assert case.tools().erase_rows(case.folder, where="a = 1000").counts == {Outcome.NO_MATCHING_ROWS: 2}


def test_a_kms_that_refuses_the_footer_key_changes_nothing(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet"), case.write("y.parquet")
    before = tree_digest(case.folder)
    assert isinstance(case.kms, InMemoryKms)
    case.kms.deny("kf")
    report = case.tools().erase_rows(case.folder, where="a = 1")
    assert not report.succeeded and tree_digest(case.folder) == before
    with pytest.raises(KmsAccessDeniedError):
        case.tools().erase_rows(case.folder / "x.parquet", where="a = 1")


@pytest.mark.parametrize(
    ("marker", "folder", "kind"),
    [
        ("metadata/v1.metadata.json", "", "Iceberg"),
        ("metadata/00001-x.metadata.json", "data", "Iceberg"),
        ("metadata/00001-x.metadata.json.gz", "data/p=1/x.parquet", "Iceberg"),
        ("data/metadata/v1.metadata.json", "", "Iceberg"),
        ("_delta_log/0.json", "", "Delta Lake"),
        (".hoodie/hoodie.properties", "", "Hudi"),
    ],
)
def test_tables_with_metadata_are_refused(tmp_path: Path, marker: str, folder: str, kind: str) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("data/p=1/x.parquet")
    (case.folder / marker).parent.mkdir()
    (case.folder / marker).write_text("{}")
    before = tree_digest(case.folder)
    with pytest.raises(ConfigurationError, match=f"belongs to a table of {kind}"):
        case.tools().erase_rows(case.folder / folder, where="a = 1")
    assert tree_digest(case.folder) == before


def test_nothing_to_search(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    with pytest.raises(NoParquetFilesError):
        case.tools().erase_rows(case.folder, where="a = 1")
    with pytest.raises(FileNotFoundError):
        case.tools().erase_rows(case.folder / "gone.parquet", where="a = 1")


def test_a_dry_run_counts(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet"), case.write("y.parquet", table=TABLE.slice(10))
    before, seen = tree_digest(case.folder), []
    report = case.tools().erase_rows(case.folder, where="a < 20", dry_run=True, on_file=seen.append)
    assert report.dry_run and report.counts == {Outcome.WOULD_REMOVE_ROWS: 2}
    assert [file.rows_removed for file in report.files] == [20, 10] and seen == report.files
    assert tree_digest(case.folder) == before


def test_a_partition_is_no_column(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    for value in ("acme", "bolt"):
        case.write(f"tenant={value}/x.parquet")
    before = tree_digest(case.folder)
    with pytest.raises(ConfigurationError, match="'tenant' is in the names of folders") as caught:
        case.tools().erase_rows(case.folder, where="a < 100 AND tenant = 'acme'")
    assert "name the folder" in caught.value.hint and tree_digest(case.folder) == before
    report = case.tools().erase_rows(case.folder / "tenant=acme", where="a < 100")
    assert [file.rows_removed for file in report.files] == [100]


@pytest.mark.parametrize("source", ["argument", "partition"])
def test_a_file_keeps_the_key_of_its_tenant(tmp_path: Path, source: str) -> None:
    kms = InMemoryKms(dict.fromkeys(["kf", "tenant-acme", "tenant-bolt"]))
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(kms.master_key_ids() or ())},
        "tables": {
            "t": {
                "footer_key": "kf",
                "column_keys": {"tenant-{tenant}": ["a"]},
                "unlisted_columns": "plaintext",
                "key_values": {"tenant": {"from": source, "pattern": "[a-z]+"}},
            }
        },
    }
    tools = Keytools.from_mapping(document, kms=kms)
    for tenant in ("acme", "bolt"):
        path = (
            tmp_path / f"tenant={tenant}" / "x.parquet"
            if source == "partition"
            else tmp_path / f"{tenant}.parquet"
        )
        path.parent.mkdir(exist_ok=True)
        tools.write_table(TABLE, path, key_values={"tenant": tenant} if source == "argument" else None)
    keys = [[use.master_key_id for use in file.uses] for file in tools.key_inventory(tmp_path)]
    assert tools.erase_rows(tmp_path, where="a = 1").counts == {Outcome.ROWS_REMOVED: 2}
    assert [[use.master_key_id for use in file.uses] for file in tools.key_inventory(tmp_path)] == keys
    assert sum(map(len, keys)) == 4 and tools.read_table(tmp_path).num_rows == 998


def test_a_file_that_changes_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "in_memory")
    path, newer = case.write("x.parquet"), tmp_path / "newer.parquet"
    case.tools().write_table(TABLE.slice(0, 300), newer)
    write, attempts = rewrite.Rewriting.write_rows, []

    def change(self: Any, *arguments: Any) -> Any:
        rows = write(self, *arguments)
        if not attempts:
            newer.replace(path)
        attempts.append(sum(rows))
        return rows

    monkeypatch.setattr(rewrite.Rewriting, "write_rows", change)
    report = case.tools().erase_rows(case.folder, where="a = 1")
    (file,) = report.files
    assert isinstance(file, FileRewrite) and (file.rows, file.rows_removed) == (300, 1) and attempts == [499, 299]
    assert case.tools().read_table(path).equals(without(TABLE.slice(0, 300), 1))
    assert names(case.folder) == ["x.parquet"]


def test_a_new_file_that_is_not_as_it_should_be_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet")
    before = tree_digest(case.folder)
    part = rewrite.PlainWriter.part

    def short(self: Any, table: pa.Table | None, options: Any) -> Any:
        return part(self, None if table is None else table.slice(1), options)

    monkeypatch.setattr(rewrite.PlainWriter, "part", short)
    (file,) = case.tools().erase_rows(case.folder, where="a = 1").files
    assert file.error_class == "OutputError" and tree_digest(case.folder) == before

    def unfiltered(self: Any, table: pa.Table | None, options: Any) -> Any:
        # As if the filter had kept the row, and lost another one.
        return part(self, None if table is None else TABLE.slice(1, table.num_rows), options)

    monkeypatch.setattr(rewrite.PlainWriter, "part", unfiltered)
    (file,) = case.tools().erase_rows(case.folder, where="a = 1").files
    assert file.error_class == "OutputError" and "matching rows" in str(file.error)
    assert tree_digest(case.folder) == before


def test_the_table_never_gives_less_protection(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("x.parquet")
    before = tree_digest(case.folder)
    weaker = case.tools(column_keys={"ka": ["a"]}, also_trusted=["kb"])
    (file,) = weaker.erase_rows(case.folder, where="a = 1").files
    assert file.error_class == "OutputError" and "in plaintext in the table" in str(file.error)
    assert tree_digest(case.folder) == before
