"""Decryption properties for Polars' own reader."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    AadPrefixError,
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    NotEncryptedError,
    TableMismatchError,
    UnsupportedByPolarsError,
)

MASTER_KEYS = {"kf": b"0123456789012345", "ka": b"1234567890123450", "kb": b"1234567890123451"}
TABLE = pa.table({"a": [1, 2, 3], "b": [{"x": 4, "y": "canary"}] * 3, "c": [7, 8, 9]})
COLUMNS = {"column_keys": {"ka": ["a"], "kb": ["b.x", "b.y"]}, "unlisted_columns": "footer_key"}
POLICIES: dict[str, dict[str, Any]] = {
    "uniform": {"unlisted_columns": "footer_key"},
    "columns": COLUMNS,
    "plaintext columns": COLUMNS | {"unlisted_columns": "plaintext"},
    "plaintext footer": COLUMNS | {"plaintext_footer": True},
    "uniform plaintext footer": {"unlisted_columns": "footer_key", "plaintext_footer": True},
    "stored prefix": COLUMNS | {"aad_prefix": "t/{file_name}"},
    "supplied prefix": COLUMNS | {"aad_prefix": "t/{file_name}", "store_aad_prefix": False},
    "256 bits": COLUMNS | {"data_key_length_bits": 256},
    "external": COLUMNS | {"key_material": "external"},
}


def tools(policy: dict[str, Any], kms: FaultyKms | None = None, **reading: Any) -> Keytools:
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": {"footer_key": "kf", **policy}},
        "reading": reading,
    }
    return Keytools.from_mapping(document, kms=kms or FaultyKms(MASTER_KEYS))


def read(path: Path, decryption: pl.ParquetDecryptionProperties) -> pl.DataFrame:
    return pl.scan_parquet(path, decryption=decryption).collect()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_polars_reads_with_its_own_reader(policy: dict[str, Any], tmp_path: Path) -> None:
    path, kms = tmp_path / "x.parquet", FaultyKms(MASTER_KEYS)
    tools(policy).write_table(TABLE, path, row_group_size=2)
    decryption = tools(policy, kms).polars_decryption(path)
    unwraps = kms.call_counts["unwrap"]
    assert read(path, decryption).equals(pl.from_arrow(TABLE))
    query = pl.scan_parquet(path, decryption=decryption).filter(pl.col("a") > 1).select("c", "b")
    assert query.collect(engine="streaming")["c"].to_list() == [8, 9]
    assert kms.call_counts["unwrap"] == unwraps == len(kms.keys_seen)


def test_keys_of_the_named_columns_alone_are_unwrapped(tmp_path: Path) -> None:
    path, kms = tmp_path / "x.parquet", FaultyKms(MASTER_KEYS)
    tools(COLUMNS).write_table(TABLE, path)
    kms.fail("refused", "kb")
    decryption = tools(COLUMNS, kms).polars_decryption(path, columns=["a", "c"])
    scan = pl.scan_parquet(path, decryption=decryption)
    assert scan.select("a", "c").collect().equals(pl.from_arrow(TABLE.select(["a", "c"])))
    # Polars raises an error, and shows no nulls instead.
    with pytest.raises(pl.exceptions.ComputeError):
        scan.collect()


@pytest.mark.parametrize("columns", [None, ["b"], ["b.x"], ["a", "b"]])
def test_a_refused_key_is_an_error_before_polars_reads(columns: list[str] | None, tmp_path: Path) -> None:
    path, kms = tmp_path / "x.parquet", FaultyKms(MASTER_KEYS)
    tools(COLUMNS).write_table(TABLE, path)
    kms.fail("refused", "kb")
    with pytest.raises(ColumnAccessDeniedError, match=r"cannot read 'b\.x'") as caught:
        tools(COLUMNS, kms).polars_decryption(path, columns=columns)
    assert ("polars_decryption(path, columns=[...])" in str(caught.value)) is (columns is None)
    with pytest.raises(ValueError, match="has no column 'd'"):
        tools(COLUMNS).polars_decryption(path, columns=["a", "d"])
    with pytest.raises(TypeError, match="columns"):
        tools(COLUMNS).polars_decryption(path, columns="a")


@pytest.mark.parametrize("stores", [True, False], ids=["stored", "supplied"])
def test_a_file_with_another_prefix_is_refused_by_both(stores: bool, tmp_path: Path) -> None:
    """Two files under one data key that the caller manages: their prefix distinguishes them."""
    document = {
        "version": 1,
        "data_keys": {"kd": base64.b64encode(MASTER_KEYS["ka"]).decode()},
        "tables": {
            "t": {
                "footer_key": "kd",
                "unlisted_columns": "footer_key",
                "aad_prefix": "t/{file_name}",
                "store_aad_prefix": stores,
            }
        },
    }
    keytools, path, other = Keytools.from_mapping(document), tmp_path / "x.parquet", tmp_path / "y.parquet"
    for file in (path, other):
        keytools.write_table(TABLE, file)
    decryption = keytools.polars_decryption(path)
    assert read(path, decryption).equals(pl.from_arrow(TABLE))
    with pytest.raises(pl.exceptions.ComputeError):
        read(other, decryption)
    other.rename(path)
    with pytest.raises((AadPrefixError, DecryptionError)):
        keytools.polars_decryption(path)
    assert read(path, keytools.polars_decryption(path, aad_prefix="t/y.parquet")).equals(pl.from_arrow(TABLE))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (COLUMNS | {"algorithm": "AES_GCM_CTR_V1"}, "AES_GCM_V1 only"),
        (COLUMNS | {"data_key_length_bits": 192}, "192 bits"),
    ],
)
@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_what_polars_cannot_decrypt(policy: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    tools(policy).write_table(TABLE, path)
    with pytest.raises(UnsupportedByPolarsError, match=reason) as caught:
        tools(policy).polars_decryption(path)
    assert len(caught.value.reasons) == 1 and "scan_polars" in str(caught.value)
    frame = tools(policy).scan_polars(path).collect()
    assert frame.equals(pl.from_arrow(TABLE))


def test_columns_with_one_dotted_path(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    policy = {"column_keys": {"ka": ["*"]}, "footer_key": "kf"}
    tools(policy).write_table(pa.table({"a.b": [1], "a": [{"b": 2}]}), path)
    with pytest.raises(UnsupportedByPolarsError, match="dotted paths"):
        tools(policy).polars_decryption(path)


@pytest.mark.parametrize("plaintext_files", ["reject", "allow"])
def test_a_plaintext_file_has_no_keys(plaintext_files: str, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE, path)
    keytools = tools(COLUMNS | {"unlisted_columns": "plaintext"}, plaintext_files=plaintext_files)
    with pytest.raises(NotEncryptedError):
        keytools.polars_decryption(path)


def test_the_file_is_compared_with_its_table(tmp_path: Path) -> None:
    path, kms = tmp_path / "x.parquet", FaultyKms(MASTER_KEYS)
    tools(COLUMNS | {"column_keys": {}}).write_table(TABLE, path)
    with pytest.raises(TableMismatchError):
        tools(COLUMNS, kms).polars_decryption(path)


def test_what_polars_does_not_check(tmp_path: Path) -> None:
    """As documented: it reads a plaintext file in place of the encrypted one, and refuses all others."""
    path, other = tmp_path / "x.parquet", tmp_path / "y.parquet"
    keytools = tools(COLUMNS)
    keytools.write_table(TABLE, path)
    decryption = keytools.polars_decryption(path)
    keytools.write_table(TABLE, other)
    with pytest.raises(pl.exceptions.ComputeError):
        read(other, decryption)
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 1
    other.write_bytes(damaged)
    with pytest.raises(pl.exceptions.ComputeError):
        read(other, decryption)
    pq.write_table(TABLE, other)
    assert read(other, decryption).equals(pl.from_arrow(TABLE))


def test_keys_do_not_leave_the_process(tmp_path: Path) -> None:
    path, kms = tmp_path / "x.parquet", FaultyKms(MASTER_KEYS)
    tools(COLUMNS).write_table(TABLE, path)
    decryption = tools(COLUMNS, kms).polars_decryption(path)
    scan = pl.scan_parquet(path, decryption=decryption)
    with pytest.raises(TypeError):
        pickle.dumps(decryption)
    with pytest.raises(pl.exceptions.ComputeError):
        scan.serialize()
    for text in (repr(decryption), scan.explain(optimized=False)):
        assert not any(key.hex() in text or repr(key) in text for key in kms.keys_seen)


def test_a_polars_that_cannot_decrypt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    tools(COLUMNS).write_table(TABLE, path)
    monkeypatch.delattr(pl, "ParquetDecryptionProperties")
    with pytest.raises(ConfigurationError, match="too old"):
        tools(COLUMNS).polars_decryption(path)
