"""The output of an earlier run is skipped; any other file in its place is not."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.kms.in_memory import InMemoryKms

TABLE = pa.table({"a": range(100), "b": [f"text {number % 7}" for number in range(100)], "c": [1.5] * 100})
NAMES = ("kf", "ka", "kb")
POLICIES: list[dict[str, Any]] = [
    {},
    {"plaintext_footer": True},
    {"key_material": "external"},
    {"unlisted_columns": "footer_key", "aad_prefix": "{table_name}/x", "store_aad_prefix": False},
    {"double_wrapping": False, "algorithm": "AES_GCM_CTR_V1"},
]


def tools(kms: InMemoryKms, **settings: Any) -> Keytools:
    table = {
        "footer_key": "kf",
        "column_keys": {"ka": ["a"]},
        "unlisted_columns": "plaintext",
        "cache_lifetime_seconds": 0,
        **settings,
    }
    document = {"version": 1, "kms": {"type": "in_memory", "keys": list(NAMES)}, "tables": {"t": table}}
    return Keytools(parse_configuration(document), kms=kms)


@pytest.fixture
def kms() -> InMemoryKms:
    return InMemoryKms(dict.fromkeys(NAMES))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.parquet"
    pq.write_table(TABLE, path, row_group_size=30, write_page_index=True)
    return path


def age(path: Path, seconds: int) -> None:
    """Make a file older."""
    then = path.stat().st_mtime_ns - seconds * 1_000_000_000
    os.utime(path, ns=(then, then))


@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_what_was_made_before_is_skipped(
    tmp_path: Path, kms: InMemoryKms, plain: Path, settings: dict[str, Any]
) -> None:
    keytools = tools(kms, **settings)
    places = {name: tmp_path / f"{name}.parquet" for name in ("encrypted", "rekeyed", "decrypted")}

    def run() -> list[bool]:
        return [
            keytools.encrypt_file(plain, places["encrypted"], overwrite=False, skip_existing=True).skipped,
            keytools.rekey_file(
                places["encrypted"], places["rekeyed"], overwrite=False, skip_existing=True
            ).skipped,
            keytools.decrypt_file(
                places["rekeyed"], places["decrypted"], overwrite=False, skip_existing=True
            ).skipped,
        ]

    assert run() == [False] * 3
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run() == [True] * 3
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert pq.read_table(places["decrypted"]).equals(TABLE)


def test_footers_are_compared_without_copies_of_what_is_in_them(
    tmp_path: Path, kms: InMemoryKms, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep copies of 10,000 chunks took most of the time."""
    keytools, target = tools(kms), tmp_path / "encrypted.parquet"
    keytools.encrypt_file(plain, target)
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("a deep copy"))
    assert keytools.encrypt_file(plain, target, skip_existing=True).skipped


def other_source(tmp_path: Path, plain: Path, target: Path) -> None:
    pq.write_table(TABLE.set_column(0, "a", pa.array(range(1, 101))), plain, row_group_size=30)
    age(plain, 3600)


def newer_source(tmp_path: Path, plain: Path, target: Path) -> None:
    age(target, 3600)


def plaintext_target(tmp_path: Path, plain: Path, target: Path) -> None:
    target.write_bytes(plain.read_bytes())


def damaged_target(tmp_path: Path, plain: Path, target: Path) -> None:
    data = bytearray(target.read_bytes())
    data[-20] ^= 1
    target.write_bytes(data)


def cut_target(tmp_path: Path, plain: Path, target: Path) -> None:
    target.write_bytes(target.read_bytes()[:-100])


@pytest.mark.parametrize(
    "change", [other_source, newer_source, plaintext_target, damaged_target, cut_target], ids=lambda f: f.__name__
)
def test_something_else_is_not_skipped(tmp_path: Path, kms: InMemoryKms, plain: Path, change: Any) -> None:
    keytools, target = tools(kms), tmp_path / "encrypted.parquet"
    keytools.encrypt_file(plain, target)
    change(tmp_path, plain, target)
    before = target.read_bytes()
    with pytest.raises(
        OutputError, match=r"encrypted\.parquet exists already, and differs from what .* --overwrite"
    ):
        keytools.encrypt_file(plain, target, overwrite=False, skip_existing=True)
    assert target.read_bytes() == before
    assert not keytools.encrypt_file(plain, target, skip_existing=True).skipped
    assert keytools.read_table(target).equals(pq.read_table(plain))


def test_a_target_under_other_keys_is_not_skipped(tmp_path: Path, kms: InMemoryKms, plain: Path) -> None:
    target = tmp_path / "encrypted.parquet"
    tools(kms).encrypt_file(plain, target)
    for settings in (
        {"column_keys": {"kb": ["a"]}},
        {"column_keys": {"ka": ["a", "b"]}},
        {"footer_key": "kb", "unlisted_columns": "plaintext"},
    ):
        with pytest.raises(OutputError, match="differs from what"):
            tools(kms, **settings).encrypt_file(plain, target, overwrite=False, skip_existing=True)


def test_what_the_kms_does_not_tell_is_an_error(tmp_path: Path, kms: InMemoryKms, plain: Path) -> None:
    keytools, target = tools(kms), tmp_path / "encrypted.parquet"
    keytools.encrypt_file(plain, target)
    before = target.read_bytes()
    kms.deny("ka")
    with pytest.raises(KeytoolsError, match="access denied"):
        tools(kms).encrypt_file(plain, target, skip_existing=True)
    assert target.read_bytes() == before


def test_without_times_nothing_is_skipped(kms: InMemoryKms, plain: Path) -> None:
    """In a store without modification times, it is unknown whether the source is newer."""
    keytools, memory = tools(kms), fsspec.filesystem("memory")
    memory.makedirs("/timeless", exist_ok=True)
    options: dict[str, Any] = {"overwrite": False, "skip_existing": True, "target_filesystem": memory}
    try:
        assert not keytools.encrypt_file(plain, "/timeless/encrypted.parquet", **options).skipped
        with pytest.raises(OutputError, match="differs from what"):
            keytools.encrypt_file(plain, "/timeless/encrypted.parquet", **options)
    finally:
        memory.rm("/timeless", recursive=True)
