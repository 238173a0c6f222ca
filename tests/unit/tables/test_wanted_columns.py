"""`read_table` fetches only the keys of columns that it reads or filters by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError
from parquet_keytools.format.file_layout import with_trailer
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.tables.reading import columns_mentioned

KEYS = ("k0", "k1", "k2", "k3")
MASTER_KEYS = {name: b"0123456789abcde" + name[-1:].encode() for name in ("kf", *KEYS)}
TABLE = pa.table(
    {
        "c0": range(40),
        "c1": [{"x": number, "y": -number} for number in range(40)],
        "c2.z": range(40),
        "c3": [str(number) for number in range(40)],
    }
)


def keytools(**reading: Any) -> tuple[Keytools, FaultyKms]:
    """Return tools with a key for each column, and their KMS."""
    kms = FaultyKms(MASTER_KEYS)
    columns = dict(zip(KEYS, (["c0"], ["c1.*"], ["c2.z"], ["c3"]), strict=True))
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": {"footer_key": "kf", "column_keys": columns, "unlisted_columns": "plaintext"}},
        "reading": reading,
    }
    return Keytools(parse_configuration(document), kms=kms), kms


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    keytools()[0].write_table(TABLE, path, row_group_size=10)
    return path


def in_a_folder(path: Path) -> Path:
    return path.parent


READS: list[Any] = [
    pytest.param({"columns": ["c0"]}, 1, id="one"),
    pytest.param({"columns": ["c1"]}, 1, id="a parent"),
    pytest.param({"columns": ["c1.x"]}, 1, id="a leaf"),
    pytest.param({"columns": ["c2.z"]}, 1, id="a name with a dot"),
    pytest.param({"columns": ["c0", "c3"]}, 2, id="two"),
    pytest.param({"columns": []}, 0, id="none"),
    pytest.param({"columns": ["c0"], "filters": [("c3", "==", "7")]}, 2, id="a filter"),
    pytest.param({"columns": ["c0"], "filters": pc.field("c3") == "7"}, 2, id="an expression"),
    pytest.param({"columns": ["c0"], "filters": pc.field("c1", "x") == 7}, 2, id="a nested field"),
    pytest.param({"columns": ["c0"], "filters": pc.field(0) == 7}, 4, id="a position"),
    pytest.param({"columns": ["c0"], "use_pandas_metadata": True}, 4, id="with an index"),
    pytest.param({}, 4, id="all"),
]


@pytest.mark.parametrize(("arguments", "keys"), READS)
def test_keys_of_what_is_read(written: Path, arguments: dict[str, Any], keys: int) -> None:
    tools, kms = keytools()
    plain = written.with_name("plain")
    pq.write_table(TABLE, plain, row_group_size=10)
    assert tools.read_table(written, **arguments).equals(pq.read_table(plain, **arguments))
    assert kms.call_counts == {"unwrap": 1 + keys}


@pytest.mark.parametrize(("arguments", "keys"), READS)
def test_keys_of_what_is_read_of_a_folder(written: Path, arguments: dict[str, Any], keys: int) -> None:
    tools, kms = keytools()
    plain = written.parent / "_plain"
    pq.write_table(TABLE, plain, row_group_size=10)
    assert tools.read_table(written.parent, **arguments).equals(pq.read_table(plain, **arguments))
    assert kms.call_counts == {"unwrap": 1 + keys}


def test_without_double_wrapping_the_same(tmp_path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {
            "t": {
                "footer_key": "kf",
                "column_keys": {"k0": ["c0", "c1.*", "c3"]},
                "unlisted_columns": "plaintext",
                "double_wrapping": False,
            }
        },
    }
    tools = Keytools(parse_configuration(document), kms=kms)
    tools.write_table(TABLE, tmp_path / "t.parquet", row_group_size=10)
    wraps = kms.call_counts["wrap"]
    assert tools.read_table(tmp_path / "t.parquet", columns=["c0", "c2.z"]).num_columns == 2
    assert kms.call_counts == {"wrap": wraps, "unwrap": 2}


@pytest.mark.parametrize("place", [Path, in_a_folder], ids=["file", "folder"])
@pytest.mark.parametrize("denied_columns", ["error", "hide"])
def test_a_refused_key_of_another_column_is_no_matter(
    written: Path, place: Callable[[Path], Path], denied_columns: str
) -> None:
    tools, kms = keytools(denied_columns=denied_columns)
    kms.fail("refused", "k1")
    assert tools.read_table(place(written), columns=["c0", "c3"]).equals(TABLE.select(["c0", "c3"]))
    if denied_columns == "error":
        with pytest.raises(ColumnAccessDeniedError, match=r"c1\.x"):
            tools.read_table(place(written), columns=["c1"])
    else:
        assert tools.read_table(place(written), columns=["c0", "c1"]).column_names == ["c0"]


def test_a_column_is_refused_in_a_file_whose_root_says_a_type(tmp_path: Path) -> None:
    """Some writers give the root of the schema a type, which means nothing."""
    pq.write_table(TABLE, tmp_path / "plain")
    data = (tmp_path / "plain").read_bytes()
    offset = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, _ = FileMetaData.read(data[offset:-8])
    schema = footer.schema
    schema[0].type = 1
    footer.schema = schema
    (tmp_path / "plain").write_bytes(data[:offset] + with_trailer(footer.serialise(), b"PAR1"))
    tools, kms = keytools(denied_columns="hide")
    tools.encrypt_file(tmp_path / "plain", tmp_path / "t.parquet")
    kms.fail("refused", "k1")
    assert tools.dataset(tmp_path / "t.parquet").to_table().equals(TABLE.drop_columns("c1"))
    tools, kms = keytools()
    kms.fail("refused", "k3")
    shown = tools.dataset(tmp_path / "t.parquet", columns=["c0"])
    assert shown.to_table(columns=["c0", "c1"]).equals(TABLE.select(["c0", "c1"]))
    (fragment,) = shown.get_fragments()
    assert fragment.metadata.row_group(0).column(4).physical_type == "BYTE_ARRAY"


def test_one_column_of_a_file_that_is_not_encrypted(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet")
    tools, kms = keytools(plaintext_files="allow")
    assert tools.read_table(tmp_path / "t.parquet", columns=["c0"]).equals(TABLE.select(["c0"]))
    assert kms.call_counts == {}


@pytest.mark.parametrize("settings", [{"plaintext_footer": True}, {"unlisted_columns": "footer_key"}])
def test_other_kinds_of_files(tmp_path: Path, settings: dict[str, Any]) -> None:
    kms = FaultyKms(MASTER_KEYS)
    table = {
        "footer_key": "kf",
        "column_keys": {"k0": ["c0"], "k3": ["c3"]},
        "unlisted_columns": "plaintext",
    } | settings
    document = {"version": 1, "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)}, "tables": {"t": table}}
    tools = Keytools(parse_configuration(document), kms=kms)
    tools.write_table(TABLE, tmp_path / "t.parquet", row_group_size=10)
    for names in (["c0"], ["c1.y"], ["c2.z", "c3"], ["c1"]):
        read = tools.read_table(tmp_path / "t.parquet", columns=names)
        pq.write_table(TABLE, tmp_path / "plain")
        assert read.equals(pq.read_table(tmp_path / "plain", columns=names))


def test_a_file_that_arrow_cannot_decrypt(tmp_path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    columns = {"k0": ["c0"], "k1": ["c1.*"], "k3": ["c3"]}
    table = {
        "footer_key": "kf",
        "column_keys": columns,
        "unlisted_columns": "plaintext",
        "aad_prefix": "{file_name}",
        "store_aad_prefix": False,
    }
    document = {"version": 1, "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)}, "tables": {"t": table}}
    tools = Keytools(parse_configuration(document), kms=kms)
    tools.write_table(TABLE, tmp_path / "t.parquet", row_group_size=10)
    tools.clear_caches()
    before = kms.call_counts["unwrap"]
    read = tools.read_table(tmp_path / "t.parquet", columns=["c0"], filters=[("c3", "==", "7")])
    assert read.to_pydict() == {"c0": [7]}
    assert kms.call_counts["unwrap"] - before == 3


def test_what_filters_mention() -> None:
    names = ["a", "b", "a b", "ab"]
    assert columns_mentioned([("a", "=", 1)], names) == ["a"]
    assert set(columns_mentioned([("a b", "=", 1)], names)) >= {"a b"}
    assert columns_mentioned(pc.field(0) == 1, names) == names
