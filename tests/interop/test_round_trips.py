"""Encrypted tables are read back equal, in every way that pyarrow has."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms
from pyarrow import fs as pafs

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.demo import read_flights
from parquet_keytools.errors import ConfigurationError, KmsAccessDeniedError, UnsupportedByArrowError
from parquet_keytools.tables.properties import arrow_leaf_paths

MASTER_KEYS = {"kf": b"0123456789012345", "kc1": b"1234567890123450", "kc2": b"1234567890123451"}
MAGIC_ENCRYPTED_FOOTER = b"PARE"


def keytools(column_keys: Mapping[str, Sequence[str]], **settings: Any) -> Keytools:
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    columns = {key: list(names) for key, names in column_keys.items() if names}
    table = {"footer_key": "kf", "column_keys": columns, "unlisted_columns": "plaintext"} | settings
    return Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}}
    )


def assert_reads_back(tools: Keytools, path: Path, expected: pa.Table) -> None:
    """Compare through read_table, a data set, and plain pyarrow with our properties."""
    assert path.read_bytes()[:4] == MAGIC_ENCRYPTED_FOOTER
    assert tools.read_table(path).equals(expected)
    assert tools.dataset(path).to_table().equals(expected)
    assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(expected)


# --- the flights ---


@pytest.fixture(scope="session")
def flights() -> pa.Table:
    return read_flights()


TIMES = ["dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"]


@pytest.mark.parametrize("aad_prefix", [None, "flights/{file_name}"], ids=["by_pyarrow", "by_module_encryptor"])
def test_flights(flights: pa.Table, tmp_path: Path, aad_prefix: str | None) -> None:
    tools = keytools({"kc1": ["tailnum"], "kc2": TIMES}, aad_prefix=aad_prefix)
    path = tmp_path / "flights.parquet"
    tools.write_table(flights, path, row_group_size=100_000)
    assert flights.num_rows == 336_776 and flights.num_columns == 19
    assert tools.read_table(path).equals(flights)
    found = tools.read_table(path, columns=["tailnum"], filters=[("dep_delay", ">", 120)])
    assert found.equals(flights.filter(pc.field("dep_delay") > 120).select(["tailnum"]))
    assert b"N14228" not in path.read_bytes(), "the first tail number is in the file"


def test_flights_as_a_data_set(flights: pa.Table, tmp_path: Path) -> None:
    tools = keytools({"kc1": ["tailnum"], "kc2": TIMES})
    tools.write_dataset(flights, tmp_path, partitioning=["origin"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin=EWR", "origin=JFK", "origin=LGA"]
    dataset = tools.dataset(tmp_path)
    assert dataset.count_rows() == flights.num_rows
    order = [(name, "ascending") for name in ("time_hour", "flight", "tailnum")]
    names = [name for name, _ in order]
    one = dataset.to_table(columns=names, filter=pc.field("origin") == "JFK").sort_by(order)
    assert one.equals(flights.filter(pc.field("origin") == "JFK").select(names).sort_by(order))


# --- every readable public file ---


def readable_files() -> list[Path]:
    default = Path(__file__).resolve().parents[3] / "shared" / "parquet-testing" / "data"
    folder = Path(os.environ.get("PARQUET_TEST_DATA", default))
    files = []
    for path in sorted(folder.glob("*.parquet")):
        try:
            pq.read_table(path)
        except (pa.ArrowException, OSError):
            continue
        files.append(path)
    return files


@pytest.mark.parametrize("path", readable_files(), ids=lambda path: path.name)
@pytest.mark.parametrize("by_arrow", [True, False], ids=["by_pyarrow", "by_module_encryptor"])
def test_public_files(parquet_test_data: Path, path: Path, by_arrow: bool, tmp_path: Path) -> None:
    table = pq.read_table(path)
    paths = arrow_leaf_paths(table.schema)
    names = list(dict.fromkeys(leaf[0] for leaf in paths))
    settings = {} if by_arrow else {"aad_prefix": "t/{file_name}"}
    tools = keytools({"kc1": names[::2], "kc2": names[1::2]}, **settings)
    result = tools.write_table(table, tmp_path / "x.parquet")
    assert result.engine == ("pyarrow" if by_arrow else "module encryptor")
    written = tmp_path / "x.parquet"
    expected = io.BytesIO()
    pq.write_table(table, expected)
    # Parquet does not restore every type; encryption must not change the types that it restores.
    if by_arrow:
        assert_equal(pq.read_table(written, decryption_properties=tools.decryption_properties(written)), expected)
    assert_equal(tools.read_table(written), expected)
    assert_equal(tools.dataset(tmp_path).to_table(), expected)


def test_there_are_public_files(parquet_test_data: Path) -> None:
    """Otherwise the test above has no cases."""
    assert len(readable_files()) >= 25


def assert_equal(found: pa.Table, expected: io.BytesIO) -> None:
    plain = pq.read_table(expected)
    assert found.schema.equals(plain.schema)
    # NaN is not equal to itself; its bytes are.
    assert found.equals(plain) or repr(found.to_pydict()) == repr(plain.to_pydict())


# --- names ---

ODD_NAMES = [
    "dotted.name",
    " leading",
    "trailing ",
    "a b",
    "comma,comma",
    "colon:colon",
    "semi;colon",
    "имя",
    "名前 🔑",
    "[brackets]",
    "{file_name}",
    "50%",
    "%2C",
    "",
    "a/b\\c",
    'quote"',
    "tab\t",
    "kc1",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_column_names(name: str, tmp_path: Path) -> None:
    """pyarrow's own list of column keys is a text in which some of them have a meaning."""
    table = pa.table([[1, 2, 3], ["x", "y", "z"]], names=[name, "other"])
    tools = keytools({"kc1": ["other"]}, unlisted_columns="footer_key") if not name else keytools({"kc1": [name]})
    path = tmp_path / "x.parquet"
    tools.write_table(table, path)
    assert tools.read_table(path).equals(table)
    assert tools.dataset(path).to_table().equals(table)
    tools.kms.deny("kc1")  # type: ignore[union-attr]
    tools.clear_caches()
    assert tools.read_table(path, columns=["other" if name else ""]).num_columns == 1


def test_all_odd_names_in_one_file(tmp_path: Path) -> None:
    names = [name for name in ODD_NAMES if name]
    table = pa.table([[number] * 3 for number in range(len(names))], names=names)
    tools = keytools({"kc1": names[::2], "kc2": names[1::2]})
    tools.write_table(table, tmp_path / "x.parquet")
    assert_reads_back_by_us(tools, tmp_path / "x.parquet", table)


def assert_reads_back_by_us(tools: Keytools, path: Path, expected: pa.Table) -> None:
    assert tools.read_table(path).equals(expected)
    assert tools.dataset(path).to_table().equals(expected)


def test_a_dotted_column_beside_a_nested_one(tmp_path: Path) -> None:
    """`a.b` means two leaf columns; pyarrow cannot give them different keys and must not get the file."""
    table = pa.table({"a.b": [1, 2], "a": [{"b": 3}, {"b": 4}]})
    tools = keytools({"kc1": ["a.b"]})
    tools.write_table(table, tmp_path / "x.parquet")
    assert_reads_back_by_us(tools, tmp_path / "x.parquet", table)


@pytest.mark.parametrize(
    "master_key_id",
    [
        "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
        "projects/p/locations/europe-west1/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1",
        "alias/my key",
        "a,b;c:d",
        "ключ",
        " spaces ",
    ],
)
@pytest.mark.parametrize("double", [True, False])
def test_odd_master_key_ids(master_key_id: str, double: bool, tmp_path: Path) -> None:
    kms = FaultyKms({master_key_id: b"0123456789012345", f"{master_key_id}2": b"1234567890123450"})
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["unused"]},
        "master_keys": {"pii": master_key_id, "footer": f"{master_key_id}2"},
        "tables": {
            "t": {
                "footer_key": "footer",
                "column_keys": {"pii": ["a", "b.*"]},
                "unlisted_columns": "plaintext",
                "double_wrapping": double,
            }
        },
    }
    tools = Keytools(parse_configuration(document), kms=kms)
    table = pa.table({"a": [1, 2], "b": [{"x": 1, "y": [2]}, None], "c": ["x", "y"]})
    path = tmp_path / "x.parquet"
    assert tools.write_table(table, path).engine == "pyarrow"
    assert_reads_back(tools, path, table)
    tools.write_dataset(table, tmp_path / "many")
    assert tools.dataset(tmp_path / "many").to_table().equals(table)
    kms.fail("refused", master_key_id)
    tools.clear_caches()
    assert tools.read_table(path, columns=["c"]).num_rows == 2


# --- nested columns ---

NESTED = pa.table(
    {
        "passenger": [{"name": "a", "papers": [{"kind": "id", "number": 1}]}, None, {"name": None, "papers": []}],
        "tags": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "legs": [[["JFK", "EWR"], []], None, [None]],
        "plain": [1, 2, 3],
    }
)


@pytest.mark.parametrize(
    "column_keys",
    [
        {"kc1": ["passenger"], "kc2": ["tags", "legs"]},
        {"kc1": ["passenger.name"], "kc2": ["passenger.papers"]},
        {"kc1": ["passenger.papers.list.element.number"]},
        {"kc1": ["tags.key_value.key"], "kc2": ["tags.key_value.value"]},
        {"kc1": ["p*.name", "legs"]},
    ],
)
@pytest.mark.parametrize("unlisted", ["plaintext", "footer_key"])
def test_nested_columns(column_keys: dict[str, list[str]], unlisted: str, tmp_path: Path) -> None:
    tools = keytools(column_keys, unlisted_columns=unlisted)
    path = tmp_path / "x.parquet"
    tools.write_table(NESTED, path)
    assert_reads_back_by_us(tools, path, NESTED)
    assert tools.read_table(path, columns=["passenger", "plain"]).equals(NESTED.select(["passenger", "plain"]))


# --- other ways to write and read ---


TABLE = pa.table({"a": range(1000), "b": [f"text {i}" for i in range(1000)], "part": ["x", "y"] * 500})


def test_parquet_writer(tmp_path: Path) -> None:
    tools = keytools({"kc1": ["b"]})
    path = tmp_path / "x.parquet"
    properties = tools.encryption_properties("t", TABLE.schema, path)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        for batch in TABLE.to_batches(max_chunksize=100):
            writer.write_batch(batch)
    assert_reads_back(tools, path, TABLE)
    file = pq.ParquetFile(path, decryption_properties=tools.decryption_properties(path))
    assert file.num_row_groups == 10 and file.read_row_group(3, columns=["b"]).num_rows == 100
    assert file.metadata.row_group(0).column(1).statistics.has_min_max


def test_pyarrow_reads_external_key_material_and_does_not_write_it(tmp_path: Path) -> None:
    takes_path = int(pa.__version__.partition(".")[0]) >= 23
    tools = keytools({"kc1": ["b"]}, key_material="external")
    path = tmp_path / "x.parquet"
    with pytest.raises(UnsupportedByArrowError, match="external key material"):
        tools.encryption_properties("t", TABLE.schema, path)
    tools.write_table(TABLE, path)
    if takes_path:
        properties = tools.decryption_properties(path)
        (tmp_path / "_KEY_MATERIAL_FOR_x.parquet.json").write_text("{}")
        assert pq.read_table(path, decryption_properties=properties).equals(TABLE)
    else:
        with pytest.raises(UnsupportedByArrowError, match="external key material"):
            tools.decryption_properties(path)


@pytest.mark.parametrize("key_material", ["internal", "external"])
@pytest.mark.parametrize("aad_prefix", [None, "x"])
def test_a_file_is_written_over(tmp_path: Path, key_material: str, aad_prefix: str | None) -> None:
    tools = keytools({"kc1": ["b"]}, key_material=key_material, aad_prefix=aad_prefix)
    path = tmp_path / "x.parquet"
    for length in (10, 20, 30):
        tools.write_table(TABLE.slice(0, length), path)
        assert tools.read_table(path).equals(TABLE.slice(0, length))
    assert {file.name for file in tmp_path.iterdir()} - {"_KEY_MATERIAL_FOR_x.parquet.json"} == {"x.parquet"}


def test_a_failed_write_over_leaves_the_old_readable(tmp_path: Path) -> None:
    """With external key material there are two files, and the old one needs its own."""
    tools = keytools({"kc1": ["b"]}, key_material="external")
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    tools.clear_caches()
    tools.kms.deny("kc1")  # type: ignore[union-attr]
    with pytest.raises(KmsAccessDeniedError):
        tools.write_table(TABLE.slice(5), path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    tools.kms.allow("kc1")  # type: ignore[union-attr]
    assert tools.read_table(path).equals(TABLE)


def test_pandas(tmp_path: Path) -> None:
    frame = TABLE.to_pandas().set_index("part")
    tools = keytools({"kc1": ["b"], "kc2": ["part"]})
    path = tmp_path / "x.parquet"
    schema = pa.Schema.from_pandas(frame)
    frame.to_parquet(path, encryption_properties=tools.encryption_properties("t", schema, path))
    assert path.read_bytes()[:4] == MAGIC_ENCRYPTED_FOOTER
    found = pd.read_parquet(path, decryption_properties=tools.decryption_properties(path))
    pd.testing.assert_frame_equal(found, frame)
    pd.testing.assert_frame_equal(
        pd.read_parquet(path, columns=["a"], decryption_properties=tools.decryption_properties(path)), frame[["a"]]
    )
    pd.testing.assert_frame_equal(tools.read_table(path).to_pandas(), frame)


@pytest.mark.parametrize("aad_prefix", [None, "x"])
@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_file_systems(tmp_path: Path, aad_prefix: str | None, key_material: str) -> None:
    tools = keytools({"kc1": ["b"]}, aad_prefix=aad_prefix, key_material=key_material)
    memory = pafs._MockFileSystem()
    memory.create_dir("bucket")
    (tmp_path / "tree").mkdir()
    places: list[tuple[str | Path, Any]] = [
        ("bucket/x.parquet", memory),
        ("x.parquet", pafs.SubTreeFileSystem("bucket", memory)),
        ("x.parquet", pafs.SubTreeFileSystem(str(tmp_path / "tree"), pafs.LocalFileSystem())),
        (str(tmp_path / "y.parquet"), pafs.LocalFileSystem()),
        (f"file://{tmp_path}/z%20z.parquet", None),
        (tmp_path / "path object.parquet", None),
    ]
    for path, filesystem in places:
        tools.write_table(TABLE, path, filesystem=filesystem)
        assert tools.read_table(path, filesystem=filesystem).equals(TABLE)
        assert tools.dataset(path, filesystem=filesystem).to_table().equals(TABLE)
        if aad_prefix is None and key_material == "internal":
            properties = tools.decryption_properties(path, filesystem=filesystem)
            assert pq.read_table(path, filesystem=filesystem, decryption_properties=properties).equals(TABLE)
    assert (tmp_path / "z z.parquet").exists()


# --- data sets ---


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


VARIANTS = [
    pytest.param({}, id="by_pyarrow"),
    pytest.param({"aad_prefix": "t/{file_name}"}, id="by_module_encryptor"),
    pytest.param({"double_wrapping": False}, id="single_wrapping"),
    pytest.param({"key_material": "external"}, id="external"),
]


@pytest.mark.parametrize("settings", VARIANTS)
def test_hive_partitions(tmp_path: Path, settings: dict[str, Any]) -> None:
    tools = keytools({"kc1": ["b"]}, **settings)
    tools.write_dataset(TABLE, tmp_path, partitioning=["part"], max_rows_per_file=200, max_rows_per_group=100)
    parquet = list(tmp_path.rglob("*.parquet"))
    assert len(parquet) == 6 and {path.parent.name for path in parquet} == {"part=x", "part=y"}
    assert all(path.read_bytes()[:4] == MAGIC_ENCRYPTED_FOOTER for path in parquet)
    assert len({path.read_bytes()[4:200] for path in parquet}) == 6, "two files have the same keys"
    assert tools.dataset(tmp_path).to_table().sort_by("a").select(TABLE.column_names).equals(TABLE)
    found = tools.read_table(tmp_path).sort_by("a").select(TABLE.column_names)
    assert found.cast(TABLE.schema).equals(TABLE)
    assert tools.dataset(tmp_path).to_table(columns=["b"], filter=pc.field("part") == "x").num_rows == 500


@pytest.mark.parametrize("settings", VARIANTS)
def test_existing_data(tmp_path: Path, settings: dict[str, Any]) -> None:
    tools = keytools({"kc1": ["b"]}, **settings)

    def write(table: pa.Table, behaviour: str, **options: Any) -> None:
        tools.write_dataset(table, tmp_path, partitioning=["part"], existing_data_behavior=behaviour, **options)

    def rows() -> dict[str, int]:
        found = tools.dataset(tmp_path).to_table()["part"].to_pylist()
        return {name: found.count(name) for name in sorted(set(found))}

    write(TABLE, "error")
    with pytest.raises(pa.ArrowInvalid):
        write(TABLE, "error")
    assert rows() == {"x": 500, "y": 500}
    write(TABLE.slice(0, 10), "overwrite_or_ignore", basename_template="more-{i}.parquet")
    assert rows() == {"x": 505, "y": 505}
    write(TABLE.slice(0, 10), "overwrite_or_ignore")
    assert rows() == {"x": 10, "y": 10}
    write(TABLE.filter(pc.field("part") == "x"), "delete_matching")
    assert rows() == {"x": 500, "y": 5 + 5}
    assert not [name for name in files_under(tmp_path) if "/." in name or name.startswith(".")]


@pytest.mark.parametrize("through", ["write_dataset", "filesystem"])
def test_an_overwrite_leaves_a_running_write_alone(tmp_path: Path, through: str) -> None:
    tools = keytools({"kc1": ["b"]})
    with tools.writer(tmp_path / "w.parquet", TABLE.schema) as writer:
        writer.write_table(TABLE)
        if through == "write_dataset":
            tools.write_dataset(TABLE, tmp_path, existing_data_behavior="delete_matching")
        else:
            pq.write_to_dataset(
                TABLE, str(tmp_path), filesystem=tools.filesystem().arrow, existing_data_behavior="delete_matching"
            )
    assert tools.read_table(tmp_path / "w.parquet").equals(TABLE)
    assert tools.read_table(tmp_path).num_rows == 2 * TABLE.num_rows


class InterruptedWriteError(Exception):
    """Raised in the middle of the data."""


def failing_batches(rows: int) -> pa.RecordBatchReader:
    def batches():
        for number, batch in enumerate(TABLE.to_batches(max_chunksize=100)):
            if number * 100 >= rows:
                raise InterruptedWriteError
            yield batch

    return pa.RecordBatchReader.from_batches(TABLE.schema, batches())


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("behaviour", ["overwrite_or_ignore", "delete_matching"])
def test_a_data_set_that_fails_leaves_the_old_one(
    tmp_path: Path, settings: dict[str, Any], behaviour: str
) -> None:
    """Arrow deletes and overwrites as it goes; half a data set looks like a whole one."""
    tools = keytools({"kc1": ["b"]}, **settings)
    tools.write_dataset(TABLE, tmp_path, partitioning=["part"])
    before = files_under(tmp_path)
    with pytest.raises(InterruptedWriteError):
        tools.write_dataset(
            failing_batches(600),
            tmp_path,
            partitioning=["part"],
            existing_data_behavior=behaviour,
            max_rows_per_file=100,
            max_rows_per_group=50,
        )
    assert files_under(tmp_path) == before
    assert tools.dataset(tmp_path).to_table().num_rows == 1000


@pytest.mark.parametrize("behaviour", ["overwrite_or_ignore", "delete_matching"])
def test_key_material_that_lost_its_file(tmp_path: Path, behaviour: str) -> None:
    """Arrow deletes it with the rest of the folder, after the new file of that name has written its own there."""
    tools = keytools({"kc1": ["b"]}, key_material="external")
    options: dict[str, Any] = {"partitioning": ["part"], "existing_data_behavior": behaviour}
    tools.write_dataset(TABLE, tmp_path, **options)
    for path in tmp_path.rglob("*.parquet"):
        path.unlink()
    tools.write_dataset(TABLE, tmp_path, **options)
    assert tools.dataset(tmp_path).to_table().num_rows == 1000


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_data_set_that_the_kms_refuses(tmp_path: Path, settings: dict[str, Any]) -> None:
    tools = keytools({"kc1": ["b"]}, **settings)
    tools.kms.deny("kc1")  # type: ignore[union-attr]
    with pytest.raises(KmsAccessDeniedError):
        tools.write_dataset(TABLE, tmp_path / "new", partitioning=["part"])
    assert files_under(tmp_path) == {}


def test_the_source_may_be_a_data_set_or_batches(tmp_path: Path) -> None:
    tools = keytools({"kc1": ["b"]})
    tools.write_dataset(ds.dataset(TABLE), tmp_path / "1")
    tools.write_dataset(TABLE.to_reader(), tmp_path / "2")
    tools.write_dataset(TABLE.to_batches(max_chunksize=100), tmp_path / "3")
    tools.write_dataset(iter(TABLE.to_batches()), tmp_path / "4", schema=TABLE.schema)
    tools.write_dataset([TABLE.slice(0, 500), TABLE.slice(500)], tmp_path / "5")
    for number in range(1, 6):
        assert tools.read_table(tmp_path / str(number)).num_rows == 1000


def test_an_encrypted_data_set_is_the_source(tmp_path: Path) -> None:
    """Re-encryption in one process: reading and writing share Arrow's threads and our caches."""
    tools = keytools({"kc1": ["b"]})
    tools.write_dataset(TABLE, tmp_path / "old", max_rows_per_file=100, max_rows_per_group=100)
    tools.write_dataset(tools.dataset(tmp_path / "old"), tmp_path / "new", partitioning=["part"])
    assert tools.dataset(tmp_path / "new").to_table().sort_by("a").select(TABLE.column_names).equals(TABLE)


def test_partitions_need_no_key(tmp_path: Path) -> None:
    """The values of a partition column are in folder names."""
    for pattern in ("part", "p*"):
        tools = keytools({"kc1": [pattern]})
        with pytest.raises(ConfigurationError, match="'part' would be in the names of folders"):
            tools.write_dataset(TABLE, tmp_path, partitioning=["part"])
        assert files_under(tmp_path) == {}


def test_empty_tables(tmp_path: Path) -> None:
    tools = keytools({"kc1": ["b"]})
    for number, empty in enumerate([TABLE.slice(0, 0), TABLE.select(["b"]).slice(0, 0)]):
        path = tmp_path / f"{number}.parquet"
        tools.write_table(empty, path)
        assert tools.read_table(path).equals(empty)
        assert tools.dataset(path).to_table().equals(empty)


def test_write_options_are_kept(tmp_path: Path) -> None:
    tools = keytools({"kc1": ["b"]})
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path, compression="zstd", row_group_size=300, data_page_version="2.0")
    metadata = pq.read_metadata(path, decryption_properties=tools.decryption_properties(path))
    assert metadata.num_row_groups == 4 and metadata.row_group(0).column(0).compression == "ZSTD"
    with pytest.raises(TypeError, match="encryption_properties is not supported"):
        tools.write_table(TABLE, path, encryption_properties=object())
