"""`denied_columns: hash`: columns are shown as keyed digests, and nothing of their values is."""

from __future__ import annotations

import datetime
import hmac
import itertools
import json
import math
import pickle
import struct
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from key_services import key_service
from pyarrow import fs as pafs
from pyarrow_versions import bloom_filters
from view_case import ViewCase, parquet_bytes, table_of, whole

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    KeytoolsError,
    KmsUnavailableError,
    ParquetFormatError,
    UnsupportedByArrowError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.format.structs import SchemaElement
from parquet_keytools.format.thrift import WireType
from parquet_keytools.iceberg.key_chain import IcebergKeys
from parquet_keytools.kms.contract_tests import wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.spark.session import session_settings
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view import plain_file
from parquet_keytools.view.digests import StandIn, digest_kind
from parquet_keytools.view.plain_file import PlainFile, PlainInput

SECRET = bytes(range(32))
EPOCH = datetime.datetime(1970, 1, 1)


def hexed(kind: str, canonical: bytes | str) -> str:
    """Recompute a digest as described in docs/views.md."""
    data = canonical.encode() if isinstance(canonical, str) else canonical
    return hmac.new(SECRET, kind.encode() + b"\0" + data, "sha256").digest()[:16].hex()


def text(value: str | None) -> str | None:
    return None if value is None else hexed("string", value)


def number(value: int | None) -> str | None:
    return None if value is None else hexed("number", str(value))


def hash_case(folder: Path, table: dict[str, Any] | None = None, **more: Any) -> ViewCase:
    kms = InMemoryKms(dict.fromkeys(("footer", "public", "secret", "hashing")))
    hash_keys = {"p": {"master_key": "hashing", "wrapped_key": wrap_one(kms, SecretBytes(SECRET), "hashing")}}
    table = {"column_keys": {"secret": ["*"]}} if table is None else table
    return ViewCase(folder, {"hash_key": "p", **table}, {}, kms, {"hash_keys": hash_keys, **more})


PEOPLE = pa.table(
    {
        "id": pa.array(range(3_000), pa.int64()),
        "name": [None if n % 7 == 0 else f"PLAINNAME{n:05d}" for n in range(3_000)],
        "seat": [f"VISIBLE{n % 30}" for n in range(3_000)],
        "deep": [None if n % 5 == 0 else {"a": n, "b": [f"PLAINDEEP{n}", None] * (n % 3)} for n in range(3_000)],
    },
    pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.dictionary(pa.int32(), pa.string())),
            pa.field("seat", pa.string()),
            pa.field("deep", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.string()))])),
        ]
    ),
)
DIGESTS = {
    "id": [number(n) for n in range(3_000)],
    "name": [text(name) for name in PEOPLE["name"].to_pylist()],
    "seat": PEOPLE["seat"].to_pylist(),
    "deep": [
        value and {"a": number(value["a"]), "b": [text(item) for item in value["b"]]}
        for value in PEOPLE["deep"].to_pylist()
    ],
}


@pytest.fixture
def people(tmp_path: Path) -> ViewCase:
    case = hash_case(tmp_path, {"column_keys": {"secret": ["id", "name", "deep"], "public": ["seat"]}})
    case.table["shown_columns"] = ["seat"]
    return case


def people_file(case: ViewCase, name: str = "x.parquet") -> Path:
    options = {"write_page_index": True, **bloom_filters({"name": {"ndv": 3_000}})}
    return case.encrypt(parquet_bytes(PEOPLE, row_group_size=1_000, **options), name)


# --- digests ---

NAN = b"\x7f\xf8" + bytes(6)
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)
NOON_NS = str(int((NOON - EPOCH).total_seconds()) * 10**9)
TYPES: dict[str, tuple[pa.Array, str, list[bytes | str | None]]] = {
    "bool": (pa.array([True, None, False]), "boolean", ["true", None, "false"]),
    "int8": (pa.array([-5, None, 0], pa.int8()), "number", ["-5", None, "0"]),
    "int32": (pa.array([-(2**31), None], pa.int32()), "number", [str(-(2**31)), None]),
    "int64": (pa.array([2**63 - 1, -1], pa.int64()), "number", [str(2**63 - 1), "-1"]),
    "uint8": (pa.array([255], pa.uint8()), "number", ["255"]),
    "uint32": (pa.array([2**32 - 1], pa.uint32()), "number", [str(2**32 - 1)]),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), "number", [str(2**64 - 1)]),
    "decimal32": (pa.array([Decimal("-1.50"), Decimal("7")], pa.decimal32(9, 2)), "number", ["-1.5", "7"]),
    "decimal128": (
        pa.array([Decimal("-0.05"), None, Decimal(0)], pa.decimal128(30, 9)),
        "number",
        ["-0.05", None, "0"],
    ),
    "decimal256": (pa.array([Decimal(10**50)], pa.decimal256(60, 4)), "number", [str(10**50)]),
    "float16": (pa.array([1.5, -0.0], pa.float16()), "float", [struct.pack(">d", 1.5), bytes(8)]),
    "float32": (
        pa.array([1.5, math.nan], pa.float32()),
        "float",
        [struct.pack(">d", 1.5), NAN],
    ),
    "float64": (
        pa.array([-math.inf, -0.0, struct.unpack(">d", b"\xff\xf8" + bytes(5) + b"\1")[0]]),
        "float",
        [struct.pack(">d", -math.inf), bytes(8), NAN],
    ),
    "string": (pa.array(["é", None, ""]), "string", ["é", None, ""]),
    "large_string": (pa.array(["é"], pa.large_string()), "string", ["é"]),
    "string_view": (pa.array(["é"], pa.string_view()), "string", ["é"]),
    "dictionary": (pa.array(["é", "é"]).dictionary_encode(), "string", ["é", "é"]),
    "json": (pa.array(["{}"], pa.json_()), "string", ["{}"]),
    "date32": (pa.array([DAY, datetime.date(1, 1, 1)]), "date", ["19782", "-719162"]),
    "date64": (pa.array([DAY], pa.date64()), "date", ["19782"]),
    "time32": (pa.array([datetime.time(0, 0, 1)], pa.time32("ms")), "time", ["1000000000"]),
    "time64": (pa.array([datetime.time(0, 0, 1)], pa.time64("us")), "time", ["1000000000"]),
    "timestamp_ms": (pa.array([NOON], pa.timestamp("ms", "UTC")), "timestamp", [NOON_NS]),
    "timestamp_us": (
        pa.array([NOON, datetime.datetime(9999, 12, 31)], pa.timestamp("us")),
        "timestamp",
        [NOON_NS, "253402214400000000000"],
    ),
    "timestamp_ns": (pa.array([NOON], pa.timestamp("ns", "Europe/Paris")), "timestamp", [NOON_NS]),
    "binary": (pa.array([b"\0x", None]), "binary", [b"\0x", None]),
    "large_binary": (pa.array([b"\0x"], pa.large_binary()), "binary", [b"\0x"]),
    "fixed": (pa.array([b"\0x"], pa.binary(2)), "binary", [b"\0x"]),
    "uuid": (pa.array([bytes(range(16))], pa.uuid()), "binary", [bytes(range(16))]),
    "null": (pa.nulls(2), "number", [None, None]),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("nullable", [True, False])
def test_a_digest_says_which_value_by_its_type(tmp_path: Path, name: str, nullable: bool) -> None:
    values, kind, canonical = TYPES[name]
    if not nullable:
        values = values.drop_null() if name != "null" else values
        canonical = [value for value in canonical if value is not None] if name != "null" else canonical
    field = pa.field("x", values.type, nullable=nullable or name == "null")
    case = hash_case(tmp_path)
    path = case.encrypt(parquet_bytes(pa.table([values], schema=pa.schema([field]))))
    found = case.keytools(denied_columns="hash").read_table(path)["x"]
    digests = [None if value is None else hexed(kind, value) for value in canonical]
    if kind == "binary":
        assert found.type == pa.binary()
        assert found.to_pylist() == [None if value is None else bytes.fromhex(value) for value in digests]
    else:
        assert found.type == pa.string()
        assert found.to_pylist() == digests


@pytest.mark.parametrize("scale", [-1, 4_301, 2**31 - 1])
def test_a_scale_that_no_decimal_has_is_an_error(scale: int) -> None:
    leaf = SchemaElement()
    leaf.type = 1
    for field_id, number_of_it in ((6, 5), (7, scale)):
        leaf.struct.set_entry(field_id, (WireType.I32, number_of_it))
    with pytest.raises(ParquetFormatError, match=f"a scale of {scale}"):
        digest_kind(leaf)


def test_int96_is_a_timestamp_of_any_year(tmp_path: Path) -> None:
    years = [NOON, datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1), None]
    exact = pa.array([1], pa.timestamp("ns"))
    plain = [
        parquet_bytes(pa.table({"x": values}), use_deprecated_int96_timestamps=True)
        for values in (pa.array(years, pa.timestamp("us")), exact)
    ]
    case = hash_case(tmp_path)
    found = [
        case.keytools(denied_columns="hash").read_table(case.encrypt(data, f"{place}.parquet"))["x"].to_pylist()
        for place, data in enumerate(plain)
    ]
    seconds = [None if year is None else str(int((year - EPOCH).total_seconds()) * 10**9) for year in years]
    assert found[0] == [None if value is None else hexed("timestamp", value) for value in seconds]
    assert found[1] == [hexed("timestamp", "1")]


NESTED = {
    "list": pa.array([[1, None], None, [], [3]] * 4_500, pa.list_(pa.int32())),
    "map": pa.array([[("k", 1)], None, [], [("a", None), ("b", 2)]] * 4_500, pa.map_(pa.string(), pa.int64())),
    "deep": pa.array(
        [[{"x": [["a"], None, []]}], None, [None, {"x": None}], []] * 4_500,
        pa.list_(pa.struct([("x", pa.list_(pa.list_(pa.string())))])),
    ),
    "struct": pa.array([{"p": {"q": 1}}, {"p": None}, None, {"p": {"q": None}}] * 4_500),
}


def digested(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: digested(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(digested(item) for item in value)
    return number(value) if isinstance(value, int) else text(value)


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_levels_are_kept(tmp_path: Path, name: str, version: str) -> None:
    case = hash_case(tmp_path)
    case.encrypt(parquet_bytes(pa.table({"x": NESTED[name]}), data_page_version=version))
    view = case.view(tmp_path / "x.parquet", denied_columns="hash")
    assert table_of(view)["x"].to_pylist() == [digested(value) for value in NESTED[name].to_pylist()]


def test_equal_values_join_whatever_their_width(tmp_path: Path) -> None:
    case = hash_case(tmp_path)
    small = pa.table({"k": pa.array([1, 2, 3], pa.int32()), "a": ["x", "y", "z"]})
    large = pa.table({"k": pa.array([Decimal("3.00"), Decimal("1.50")]), "b": ["p", "q"]})
    paths = [case.encrypt(parquet_bytes(t), f"{place}.parquet") for place, t in enumerate((small, large))]
    one, other = (case.keytools(denied_columns="hash").read_table(path) for path in paths)
    assert one.join(other, "k", join_type="inner").to_pydict() == {
        "k": [number(3)],
        "a": [text("z")],
        "b": [text("p")],
    }


# --- visibility by reader ---


def test_readers_see_digests(people: ViewCase) -> None:
    path = people_file(people)
    keytools = people.keytools(denied_columns="hash")
    table = keytools.read_table(path)
    assert table.to_pydict() == DIGESTS
    assert keytools.dataset(path.parent / "x.parquet").to_table().to_pydict() == DIGESTS
    assert table_of(people.view(path, denied_columns="hash")).to_pydict() == DIGESTS
    assert pq.read_table(keytools.open(path)).to_pydict() == DIGESTS
    assert keytools.read_table(path, columns=["name"]).to_pydict() == {"name": DIGESTS["name"]}
    assert keytools.scan_polars(path).select("id", "deep").collect().to_dict(as_series=False) == {
        name: DIGESTS[name] for name in ("id", "deep")
    }
    assert keytools.schema(path).equals(table.schema)
    assert people.keytools().read_table(path).equals(PEOPLE)


def test_engines_that_compare_with_the_schema_of_arrow_read_digests(people: ViewCase, tmp_path: Path) -> None:
    nested = {name: values.slice(0, 8) for name, values in NESTED.items()}
    lists = {"large": pa.array([["a"]] * 8, pa.large_list(pa.large_string()))}
    lists["fixed"] = pa.array([["a", "b"]] * 8, pa.list_(pa.string_view(), 2))
    table = pa.table({**nested, **lists, "when": pa.array([NOON] * 8, pa.timestamp("us", "Europe/Paris"))})
    people.table = {"hash_key": "p", "column_keys": {"secret": ["*"]}, "shown_columns": ["when", "struct.p"]}
    path = people.encrypt(parquet_bytes(table))
    plain = tmp_path / "view.parquet"
    plain.write_bytes(people.keytools(denied_columns="hash").open(path).read())
    # Engines represent maps differently.
    names = [name for name in (*nested, *lists) if name != "map"]
    expected = {name: [digested(value) for value in table[name].to_pylist()] for name in names}
    expected |= {name: table[name].to_pylist() for name in ("when", "struct")}
    for found in (
        pq.read_table(plain),
        duckdb.sql(f"select * from '{plain}'").to_arrow_table(),
        datafusion.SessionContext().read_parquet(str(plain)).to_arrow_table(),
        pl.read_parquet(plain).to_arrow(),
    ):
        assert {name: found[name].to_pylist() for name in expected} == expected
    assert pq.read_schema(plain).field("when").type == pa.timestamp("us", "Europe/Paris")


def test_a_filter_sees_digests(people: ViewCase) -> None:
    path = people_file(people)
    keytools = people.keytools(denied_columns="hash")
    for read in (keytools.read_table, lambda path, filters: keytools.dataset(path).to_table(filter=filters)):
        assert read(path, filters=pc.field("name") == "PLAINNAME00001").num_rows == 0
        assert read(path, filters=pc.field("name") == text("PLAINNAME00001")).num_rows == 1
        assert read(path, filters=pc.field("name") > "PLAINNAME02990").num_rows < 3_000
        with pytest.raises((pa.ArrowException, KeytoolsError)):
            read(path, filters=pc.field("id") > 2_990)
        assert read(path, filters=pc.field("seat") == "VISIBLE3").num_rows > 0


def test_footers_say_nothing_of_values(people: ViewCase) -> None:
    path = people_file(people)
    keytools = people.keytools(denied_columns="hash")
    for metadata in (keytools.metadata(path), pq.read_metadata(keytools.open(path))):
        for group, column in itertools.product(range(metadata.num_row_groups), (0, 1, 3, 4)):
            chunk = metadata.row_group(group).column(column)
            assert not chunk.is_stats_set and not chunk.has_column_index and not chunk.has_offset_index
            assert chunk.bloom_filter_offset is None and chunk.dictionary_page_offset is None
        assert metadata.row_group(0).column(2).statistics.min.startswith("VISIBLE")
        assert metadata.row_group(0).sorting_columns == ()
    schema = pq.read_schema(keytools.open(path))
    assert schema.field("id").type == pa.string() and not schema.field("id").nullable


def test_no_plaintext_is_in_a_view(people: ViewCase) -> None:
    view = people.view(people_file(people), denied_columns="hash")
    data = whole(view)
    assert b"PLAIN" not in data and b"VISIBLE" in data
    for number_ in (2_999, 2_432):
        assert struct.pack("<q", number_) not in data
    assert whole(people.view(people.folder / "x.parquet")).count(b"PLAINDEEP") > 1


def test_no_value_is_in_what_pandas_and_others_say(tmp_path: Path) -> None:
    frame = pd.DataFrame({"c": pd.Categorical(["PLAINA", "PLAINB"])}, index=pd.Index([1, 2], name="i"))
    frame.attrs = {"note": "PLAINATTRIBUTE"}
    table = pa.Table.from_pandas(frame).replace_schema_metadata
    metadata = dict(pa.Table.from_pandas(frame).schema.metadata)
    metadata |= {b"geo": b'{"bbox": "PLAINBOX"}', b"org.apache.spark.version": b"4.0.0"}
    field = pa.field("e", pa.string(), metadata={"_PL_ENUM_VALUES": "PLAINENUM"})
    data = table(metadata).append_column(field, pa.array(["PLAINE", "PLAINF"]))
    case = hash_case(tmp_path)
    path = case.encrypt(parquet_bytes(data))
    view = case.view(path, denied_columns="hash")
    assert b"PLAIN" not in whole(view)
    found = table_of(view)
    assert found.schema.metadata[b"org.apache.spark.version"] == b"4.0.0" and b"geo" not in found.schema.metadata
    assert "num_categories" not in json.dumps(json.loads(found.schema.metadata[b"pandas"]))
    read = found.to_pandas()
    assert list(read.index) == [number(1), number(2)] and list(read["c"]) == [text("PLAINA"), text("PLAINB")]
    assert pl.read_parquet(whole(view)).height == 2


def test_a_key_that_is_refused_is_an_error(people: ViewCase) -> None:
    path = people_file(people)
    people.kms.deny("secret")
    keytools = people.keytools(denied_columns="hash")
    assert keytools.read_table(path, columns=["seat"]).num_rows == 3_000
    for columns in (None, ["name"]):
        with pytest.raises(ColumnAccessDeniedError, match="need the key of the column"):
            keytools.read_table(path, columns=columns)
    with pytest.raises(ColumnAccessDeniedError):
        keytools.dataset(path).to_table()
    file = people.view(path, denied_columns="hash")
    assert table_of_seat(file) == PEOPLE["seat"].to_pylist()
    # `hide` would show the values of all other columns.
    for reading in (lambda: pq.read_table(PlainInput(file)), lambda: keytools.metadata(path)):
        with pytest.raises(ColumnAccessDeniedError, match="need the key of the column") as caught:
            reading()
        assert "hide" not in str(caught.value)
    assert b"PLAIN" not in whole(file)


def table_of_seat(file: Any) -> list[Any]:
    return list(pq.ParquetFile(PlainInput(file)).read(columns=["seat"])["seat"].to_pylist())


@pytest.mark.parametrize("failure", ["denied", "down"])
def test_without_the_secret_there_is_an_error_and_no_value(
    people: ViewCase, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = people_file(people)
    unwrap = people.kms._unwrap

    def down(wrapped_key: str, master_key_id: str) -> object:
        if master_key_id == "hashing":
            raise KmsUnavailableError("no answer", backend="in_memory", operation="unwrap")
        return unwrap(wrapped_key, master_key_id)

    if failure == "denied":
        people.kms.deny("hashing")
    else:
        monkeypatch.setattr(people.kms, "_unwrap", down)
    keytools = people.keytools(denied_columns="hash")
    with pytest.raises(ColumnAccessDeniedError):
        keytools.read_table(path)
    with pytest.raises(ColumnAccessDeniedError):
        keytools.dataset(path).to_table()
    assert keytools.read_table(path, columns=["seat"]).num_rows == 3_000
    file = people.view(path, denied_columns="hash")
    assert table_of_seat(file) == PEOPLE["seat"].to_pylist()
    with pytest.raises(UnsupportedByArrowError):
        keytools.decryption_properties(path, columns=["seat"])


def test_nothing_else_gives_values_out(people: ViewCase, tmp_path: Path) -> None:
    path = people_file(people)
    keytools = people.keytools(denied_columns="hash")
    with pytest.raises(UnsupportedByArrowError, match="denied_columns: hash"):
        keytools.decryption_properties(path, columns=["seat"])
    with pytest.raises(ColumnAccessDeniedError, match="digests only"):
        keytools.decrypt_file(path, tmp_path / "plain.parquet")
    assert not (tmp_path / "plain.parquet").exists()
    with pytest.raises(ConfigurationError, match="not decrypted"):
        keytools.salvage_file(path, tmp_path / "plain.parquet")
    with pytest.raises(ColumnAccessDeniedError, match="digests only"):
        keytools.rekey_file(path, tmp_path / "other.parquet")
    fragment = next(iter(keytools.dataset(path).get_fragments()))
    assert fragment.physical_schema.field("id").type == pa.string()
    assert fragment.to_table().to_pydict() == DIGESTS
    with pytest.raises(OSError):
        keytools.dataset(path).format.make_fragment(str(path), pafs.LocalFileSystem()).to_table()
    statistics = [group.statistics for group in fragment.row_groups]
    assert "VISIBLE" in str(statistics) and "PLAIN" not in str(statistics) and "'id'" not in str(statistics)


def test_a_plaintext_file_shows_digests_too(people: ViewCase, tmp_path: Path) -> None:
    path = tmp_path / "plain.parquet"
    path.write_bytes(parquet_bytes(PEOPLE))
    keytools = people.keytools(denied_columns="hash", plaintext_files="allow")
    assert keytools.read_table(path).to_pydict() == DIGESTS
    assert b"PLAIN" not in keytools.open(path).read()


def test_a_folder_gives_no_values_to_a_digest(people: ViewCase) -> None:
    folder = people.folder / "name=PLAIN"
    folder.mkdir()
    people_file(people).rename(folder / "x.parquet")
    with pytest.raises(DecryptionError, match="name of a folder"):
        people.keytools(denied_columns="hash").dataset(people.folder).to_table()


def test_a_worker_gets_no_key(tmp_path: Path) -> None:
    keys = dict.fromkeys(("footer", "secret", "hashing"), "MDEyMzQ1Njc4OWFiY2RlZg==")
    kms = InMemoryKms({name: SecretBytes(b"0123456789abcdef") for name in keys})
    configuration = tmp_path / "keytools.yaml"
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "hash_keys": {
            "p": {"master_key": "hashing", "wrapped_key": wrap_one(kms, SecretBytes(SECRET), "hashing")}
        },
        "tables": {
            "t": {
                "footer_key": "footer",
                "hash_key": "p",
                "column_keys": {"secret": ["x"]},
                "unlisted_columns": "plaintext",
            }
        },
        "reading": {"denied_columns": "hash"},
    }
    configuration.write_text(json.dumps(document))
    configuration.chmod(0o600)
    keytools = Keytools.from_yaml(configuration)
    keytools.write_table(pa.table({"x": ["a"]}), tmp_path / "x.parquet")
    data_set = keytools.dataset(tmp_path / "x.parquet")
    assert data_set.to_table().to_pydict() == {"x": [text("a")]}
    pickled = pickle.dumps((keytools, data_set, keytools.view(tmp_path)))
    assert SECRET not in pickled
    restored, again, view = pickle.loads(pickled)
    assert again.to_table().to_pydict() == {"x": [text("a")]}
    assert ds.dataset("x.parquet", filesystem=view.arrow).to_table().to_pydict() == {"x": [text("a")]}
    (opened,) = key_service(restored).open_files([FileLocation.resolve(tmp_path / "x.parquet")])
    assert opened.deks == {} and SECRET.hex() not in repr(opened) and repr(SECRET)[2:-1] not in repr(opened)


def test_a_view_says_how_long_a_file_is(people: ViewCase) -> None:
    people_file(people)
    (people.folder / "_SUCCESS").write_text("")
    view = people.keytools(denied_columns="hash").view(people.folder)
    with view.open("x.parquet") as file:
        length = len(file.read())
    assert view.info("x.parquet")["size"] == length > (people.folder / "x.parquet").stat().st_size
    assert {entry["name"]: entry["size"] for entry in view.ls("")}["x.parquet"] == length
    assert view.info("_SUCCESS")["size"] == 0


def test_lengths_of_views_are_read_from_footers_once(people: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has more files than views stay open."""
    monkeypatch.setattr(plain_file, "MOST_KEPT", 1)
    opened: list[str] = []
    open_plain_file = plain_file.open_plain_file

    def watched(keys: KeyService, location: FileLocation, *arguments: Any, **named: Any) -> PlainFile:
        opened.append(location.name)
        return open_plain_file(keys, location, *arguments, **named)

    monkeypatch.setattr(plain_file, "open_plain_file", watched)
    keytools = people.keytools(denied_columns="hash")
    data = people.folder / "data"
    data.mkdir()
    for name in "abc":
        keytools.write_table(PEOPLE.slice(0, 50), data / f"{name}.parquet")
    view = keytools.view(data)
    first = {entry["name"]: entry["size"] for entry in view.ls("")}
    assert sorted(opened) == ["a.parquet", "b.parquet", "c.parquet"]
    assert {entry["name"]: entry["size"] for entry in view.ls("")} == first
    assert len(opened) == 3
    keytools.write_table(PEOPLE.slice(0, 2_000), data / "b.parquet")
    again = {entry["name"]: entry["size"] for entry in view.ls("")}
    assert opened[3:] == ["b.parquet"]
    assert again["b.parquet"] > first["b.parquet"] and again["a.parquet"] == first["a.parquet"]


def test_a_footer_costs_no_digests(people: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = people_file(people)
    made: list[int] = []
    make = StandIn.make

    def counted(chunk: StandIn, pages: memoryview, secret: SecretBytes) -> bytes:
        made.append(chunk.region.column_ordinal)
        return make(chunk, pages, secret)

    monkeypatch.setattr(StandIn, "make", counted)
    keytools = people.keytools(denied_columns="hash")
    keytools.schema(path)
    assert keytools.metadata(path).num_rows == keytools.dataset(path).count_rows()
    assert keytools.view(people.folder).info("x.parquet")["size"] > 0
    assert made == []
    keytools.read_table(path, columns=["seat"])
    assert made == []
    keytools.read_table(path, columns=["name"])
    assert sorted(made) == [1, 1, 1]


def test_what_is_altered_is_no_digest(people: ViewCase) -> None:
    path = people_file(people)
    data = bytearray(path.read_bytes())
    data[2_000] ^= 1
    path.write_bytes(data)
    with pytest.raises((DecryptionError, OSError), match=r"authentic|decrypt"):
        people.keytools(denied_columns="hash").read_table(path, columns=["id"])


# --- configuration ---


def test_each_table_needs_a_hash_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    lines = [
        "version: 1",
        "kms: {type: in_memory, keys: {f: MDEyMzQ1Njc4OWFiY2RlZg==}}",
        "reading: {denied_columns: hash}",
        "tables:",
        "  t:",
        "    footer_key: f",
    ]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigurationError, match="needs a hash_key") as raised:
        Keytools.from_yaml(file)
    assert (raised.value.line, raised.value.yaml_path) == (5, "tables.t")
    assert "hash-key" in raised.value.hint


@pytest.mark.parametrize(
    ("hash_keys", "table", "message"),
    [
        ({"pseudonyms": {"master_key": "f", "wrapped_key": "x"}}, {"hash_key": "pseudonym"}, "Did you mean"),
        ({}, {"shown_columns": ["a"]}, "needs hash_key"),
        ({"p": {"master_key": "d", "wrapped_key": "x"}}, {"hash_key": "p"}, "is a data key"),
    ],
)
def test_a_wrong_hash_key_is_an_error(hash_keys: Any, table: Any, message: str) -> None:
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": {"f": "MDEyMzQ1Njc4OWFiY2RlZg=="}},
        "data_keys": {"d": "MDEyMzQ1Njc4OWFiY2RlZg=="},
        "hash_keys": hash_keys,
        "tables": {"t": {"footer_key": "f", "unlisted_columns": "plaintext", **table}},
    }
    with pytest.raises(ConfigurationError, match=message):
        Keytools.from_mapping(document)


def test_without_tables_there_are_no_digests() -> None:
    with pytest.raises(ConfigurationError, match="Describe them under `tables:`"):
        Keytools.from_mapping({"version": 1, "reading": {"denied_columns": "hash"}})


def test_who_cannot_show_digests_refuses_them(people: ViewCase) -> None:
    keytools = people.keytools(denied_columns="hash")
    with pytest.raises(ConfigurationError, match="Spark's own reader"):
        keytools.spark_read_options("t")
    with pytest.raises(ConfigurationError, match="Spark's own reader"):
        session_settings(keytools.configuration, jar="x")
    with pytest.raises(ConfigurationError, match="Iceberg"):
        IcebergKeys(KeyService(keytools.configuration, people.kms, time.monotonic))


def test_a_secret_has_256_bits(people: ViewCase) -> None:
    path = people_file(people)
    wrapped = wrap_one(people.kms, SecretBytes(bytes(16)), "hashing")
    people.more = {"hash_keys": {"p": {"master_key": "hashing", "wrapped_key": wrapped}}}
    with pytest.raises(ConfigurationError, match="128 bits"):
        people.keytools(denied_columns="hash").read_table(path)


# --- classes ---

CLASSES = {"payment": {"key": "secret", "denied": "hash"}, "pii": {"key": "public"}, "open": "plaintext"}


def class_case(folder: Path, table: dict[str, Any], **more: Any) -> tuple[ViewCase, Callable[..., Keytools]]:
    """Return a case, and a factory of `Keytools` with digests for the class `payment`."""
    case = hash_case(folder, table, **{"classes": CLASSES, **more})

    def tools(**reading: Any) -> Keytools:
        document = {"version": 1, **case.more, "reading": reading}
        document["tables"] = {"t": {"footer_key": "footer", **case.table}}
        return Keytools.from_mapping(document, kms=case.kms)

    return case, tools


@pytest.mark.parametrize(
    "table",
    [
        {"labels_from": [{"columns": {"id": "payment", "name": "payment", "deep": "payment", "seat": "pii"}}]},
        # The labels came with the data: readers know only the key.
        {"labels_from": [{"arrow": {}}], "unlabelled": "pii"},
        {"labels_from": [{"columns": {"seat": "pii"}}], "unlabelled": "payment"},
        {"column_keys": {"secret": ["id", "name", "deep"], "public": ["seat"]}},
    ],
    ids=["labels", "labels of the data", "other columns", "column_keys"],
)
def test_readers_see_digests_of_the_columns_of_a_class(tmp_path: Path, table: dict[str, Any]) -> None:
    case, tools = class_case(tmp_path, table)
    fields = [
        field if field.name == "seat" else field.with_metadata({"class": "payment"}) for field in PEOPLE.schema
    ]
    path = tmp_path / "x.parquet"
    tools().write_table(PEOPLE.cast(pa.schema(fields)), path)
    keytools = tools()
    opened = keytools.open(path)
    for found in (keytools.read_table(path), keytools.dataset(path).to_table(), pq.read_table(opened)):
        assert found.to_pydict() == DIGESTS
    assert b"PLAIN" not in keytools.open(path).read()
    with pytest.raises(KeytoolsError):
        keytools.decrypt_file(path, tmp_path / "y.parquet")
    # Columns that the table shows explicitly are shown.
    case.table["shown_columns"] = ["name"]
    assert tools().read_table(path)["name"].to_pylist() == PEOPLE["name"].to_pylist()
    # A refused key is an error.
    case.table["shown_columns"] = []
    case.kms.deny("secret")
    with pytest.raises(ColumnAccessDeniedError):
        tools().read_table(path)
    assert tools().read_table(path, columns=["seat"]).num_rows == 3_000


def test_a_class_of_digests_in_a_plaintext_file(tmp_path: Path) -> None:
    _, tools = class_case(tmp_path, {"labels_from": [{"columns": {"name": "payment"}}], "unlabelled": "open"})
    path = tmp_path / "plain.parquet"
    path.write_bytes(parquet_bytes(PEOPLE))
    found = tools(plaintext_files="allow").read_table(path)
    assert found["name"].to_pylist() == DIGESTS["name"]
    assert found["seat"].to_pylist() == PEOPLE["seat"].to_pylist()


def test_files_under_the_key_from_before_show_digests_too(tmp_path: Path) -> None:
    case, tools = class_case(tmp_path, {"column_keys": {"public": ["*"]}})
    path = tmp_path / "x.parquet"
    tools().write_table(PEOPLE.select(["name"]), path)
    for table, rotation in (({}, {"moves": {"public": "secret"}}), ({"also_trusted": ["public"]}, {})):
        case.table = {"hash_key": "p", "column_keys": {"secret": ["*"]}, **table}
        case.more["rotation"] = rotation
        assert tools().read_table(path)["name"].to_pylist() == DIGESTS["name"]


@pytest.mark.parametrize(
    ("classes", "reading", "message"),
    [
        (CLASSES, {"denied_columns": "hide"}, "contradicts the class 'payment'"),
        (CLASSES, {"denied_columns": "null"}, "contradicts the class 'payment'"),
        ({"payment": {"key": None, "denied": "hash"}}, {}, "a key is missing"),
        ({"payment": {"key": "secret", "denied": "hide"}}, {}, "denied"),
    ],
)
def test_a_wrong_class_of_digests(tmp_path: Path, classes: Any, reading: Any, message: str) -> None:
    _, tools = class_case(tmp_path, {"unlisted_columns": "plaintext"}, classes=classes)
    with pytest.raises(ConfigurationError, match=message):
        tools(**reading)


def test_a_class_of_digests_needs_a_hash_key_and_refuses_what_cannot_show_them(tmp_path: Path) -> None:
    case, tools = class_case(tmp_path, {"unlisted_columns": "plaintext"})
    with pytest.raises(ConfigurationError, match="Iceberg"):
        IcebergKeys(KeyService(tools().configuration, case.kms, time.monotonic))
    del case.table["hash_key"]
    with pytest.raises(ConfigurationError, match="needs a hash_key"):
        tools()
