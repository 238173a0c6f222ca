"""Files that share data keys and file unique: refused in a folder, with a warning elsewhere."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import ReusedKeysError
from parquet_keytools.files import opened_file
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation

FRAME = pd.DataFrame({"a": range(10), "b": range(10), "c": [0, 1] * 5})
SCHEMA = pa.Schema.from_pandas(FRAME[["a", "b"]], preserve_index=False)


def document(**reading: Any) -> dict[str, Any]:
    keys = {name: base64.b64encode(name.encode() * 16).decode() for name in "fp"}
    table = {"footer_key": "f", "column_keys": {"p": ["a"]}, "unlisted_columns": "plaintext"}
    return {"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}, "reading": reading}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(document()))
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files that pandas wrote with the same properties."""
    tools = Keytools.from_mapping(document())
    properties = tools.encryption_properties("t", SCHEMA, "any.parquet")
    FRAME.to_parquet(tmp_path / "data", partition_cols=["c"], encryption_properties=properties)
    return tmp_path / "data"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def made_again(dataset: Any) -> Any:
    """Return a data set as another process makes it: keys in a configuration cannot be pickled."""
    make, arguments, *_ = dataset.__reduce__()
    return make(*arguments)


WAYS: dict[str, Callable[[Keytools, Path], object]] = {
    "read_table": lambda tools, folder: tools.read_table(folder),
    "one column": lambda tools, folder: tools.read_table(folder, columns=["b"]),
    "dataset": lambda tools, folder: tools.dataset(folder).to_table(),
    "count_rows": lambda tools, folder: tools.dataset(folder).count_rows(),
    "batches": lambda tools, folder: list(tools.dataset(folder).to_batches()),
    "columns are named": lambda tools, folder: tools.dataset(folder, columns=["a"]).to_table(),
    "a list of files": lambda tools, folder: tools.read_table(files_of(folder)),
    "made again": lambda tools, folder: made_again(tools.dataset(folder)).to_table(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_is_refused(folder: Path, way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            ReusedKeysError, match=r"share their data keys and file unique.*rekey FOLDER"
        ) as caught:
            WAYS[way](Keytools.from_mapping(document()), folder)
    assert {caught.value.path, caught.value.other_path} == {str(path) for path in files_of(folder)}


def test_a_folder_is_refused_where_the_index_is_read_too(tmp_path: Path) -> None:
    """The index columns are known only after the first file was opened: the files are opened once more."""
    table = pa.Table.from_pandas(FRAME.set_index(pd.Index(map(str, range(10)), name="i")))
    tools = Keytools.from_mapping(document())
    properties = tools.encryption_properties("t", table.schema, "any.parquet")
    (tmp_path / "data").mkdir()
    for name in ("1.parquet", "2.parquet"):
        pq.write_table(table, tmp_path / "data" / name, encryption_properties=properties)
    with pytest.raises(ReusedKeysError):
        tools.read_table(tmp_path / "data", columns=["a"], use_pandas_metadata=True)


def test_the_setting_allows_it_without_a_word(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tools = Keytools.from_mapping(document(reused_encryption_properties="allow"))
        assert tools.read_table(folder).num_rows == 10
        assert sum(tools.read_table(path).num_rows for path in files_of(folder)) == 10


def test_what_a_filter_leaves_out_is_not_compared(folder: Path) -> None:
    tools = Keytools.from_mapping(document())
    assert tools.read_table(folder, filters=[("c", "=", 0)]).num_rows == 5


@pytest.mark.parametrize("table", ["t", "rotated"])
def test_a_copy_is_refused_also_after_the_original_was_rotated(tmp_path: Path, table: str) -> None:
    tools = Keytools.from_mapping(document())
    folder = tmp_path / "copies"
    folder.mkdir()
    tools.write_table(FRAME, folder / "a.parquet")
    shutil.copy(folder / "a.parquet", folder / "b.parquet")
    if table == "rotated":
        assert tools.rotate(folder / "a.parquet").succeeded
        assert (folder / "a.parquet").read_bytes() != (folder / "b.parquet").read_bytes()
    with pytest.raises(ReusedKeysError):
        tools.read_table(folder)


def test_one_file_under_two_names_is_no_copy(tmp_path: Path) -> None:
    tools = Keytools.from_mapping(document())
    folder = tmp_path / "linked"
    folder.mkdir()
    tools.write_table(FRAME, folder / "a.parquet")
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    assert tools.read_table(folder).num_rows == 20


def test_files_under_one_data_key_of_the_caller_differ_in_their_file_unique(tmp_path: Path) -> None:
    mapping = {
        "version": 1,
        "data_keys": {"k": base64.b64encode(bytes(16)).decode()},
        "tables": {"t": {"footer_key": "k", "unlisted_columns": "footer_key"}},
    }
    tools = Keytools.from_mapping(mapping)
    (tmp_path / "own").mkdir()
    for name in "abc":
        tools.write_table(FRAME, tmp_path / "own" / f"{name}.parquet")
    assert tools.read_table(tmp_path / "own").num_rows == 30


def test_single_reads_warn_once_both_were_seen(folder: Path) -> None:
    first, second = files_of(folder)
    tools = Keytools.from_mapping(document())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            tools.read_table(first)
        Keytools.from_mapping(document()).read_table(second)
    with pytest.warns(UserWarning, match="share their data keys") as caught:
        tools.read_table(second)
    # Before Python 3.12, a library cannot get its caller's line.
    assert len(caught) == 1 and (sys.version_info < (3, 12) or caught[0].filename == __file__)
    with pytest.warns(UserWarning, match="share their data keys"):
        tools.decryption_properties(first)


def test_a_file_that_was_moved_shares_its_keys_with_nobody(tmp_path: Path) -> None:
    tools = Keytools.from_mapping(document())
    tools.write_table(FRAME, tmp_path / "a.parquet")
    tools.read_table(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tools.read_table(tmp_path / "b.parquet")
        tools.write_table(FRAME, tmp_path / "a.parquet")
        assert tools.read_table(tmp_path / "a.parquet").num_rows == 10


def test_a_backup_of_a_file_is_no_reason_to_warn(tmp_path: Path) -> None:
    tools = Keytools.from_mapping(document())
    tools.write_table(FRAME, tmp_path / "a.parquet")
    shutil.copy(tmp_path / "a.parquet", tmp_path / "backup.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("a", "backup"):
            assert tools.read_table(tmp_path / f"{name}.parquet").num_rows == 10


def test_two_writes_with_the_same_properties_share_them(tmp_path: Path) -> None:
    tools = Keytools.from_mapping(document())
    (tmp_path / "two").mkdir()
    table = pa.Table.from_pandas(FRAME[["a", "b"]], preserve_index=False)
    properties = tools.encryption_properties("t", SCHEMA, "any.parquet")
    for name in "ab":
        pq.write_table(table, tmp_path / "two" / f"{name}.parquet", encryption_properties=properties)
    with pytest.raises(ReusedKeysError):
        tools.read_table(tmp_path / "two")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_commands_refuse_report_and_repair(folder: Path, config: Path, tmp_path: Path) -> None:
    decrypted = run("decrypt", folder, tmp_path / "plain", "--config", config)
    assert decrypted.exit_code == 1
    assert "share their data keys and file unique" in decrypted.stderr
    assert len(files_of(tmp_path / "plain")) == 1
    verified = run("verify", folder, "--config", config)
    assert verified.exit_code == 1
    assert "violation file-copied" in verified.stdout
    assert run("rotate", folder, "--config", config).exit_code == 0
    # As the hint says.
    assert run("rekey", folder, "--in-place", "--config", config).exit_code == 0
    assert run("verify", folder, "--config", config).exit_code == 0
    assert Keytools.from_mapping(document()).read_table(folder).num_rows == 10


def test_rekey_of_a_folder_gives_each_file_its_own(folder: Path, config: Path, tmp_path: Path) -> None:
    done = run("rekey", folder, tmp_path / "new", "--config", config)
    assert done.exit_code == 0
    assert "share their data keys" in done.stderr
    assert Keytools.from_mapping(document()).read_table(tmp_path / "new").num_rows == 10


def test_many_files_take_little_memory_and_do_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand files represent a hundred thousand."""
    assert opened_file.MOST_REMEMBERED == 100_000
    monkeypatch.setattr(opened_file, "MOST_REMEMBERED", 10_000)
    identities = FileIdentities(refuses=True)
    dek = SecretBytes(bytes(16))
    filesystem = pafs.LocalFileSystem()
    uniques = [os.urandom(8) for _ in range(opened_file.MOST_REMEMBERED)]
    paths = [f"/data/part-{number}.parquet" for number in range(len(uniques))]
    tracemalloc.start()
    try:
        for path, unique in zip(paths, uniques, strict=True):
            assert identities.other(FileLocation(filesystem, path), dek, unique) is None
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4_000_000
    # The first file is still known. With one more file, it is forgotten.
    assert identities.other(FileLocation(filesystem, "/other"), dek, uniques[0]) is not None
    identities.other(FileLocation(filesystem, "/more"), dek, os.urandom(8))
    assert identities.other(FileLocation(filesystem, "/other"), dek, uniques[0]) is None
    # Another data key is another file.
    assert identities.other(FileLocation(filesystem, "/x"), SecretBytes(b"1" * 16), uniques[5]) is None
