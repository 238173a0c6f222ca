"""The fsspec file system: everything written through it is encrypted, or absent."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    AlreadyEncryptedError,
    ConfigurationError,
    IncompleteDataSetError,
    KeytoolsError,
    OutputError,
)
from parquet_keytools.fsspec_chain import KeytoolsUrls
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.file_system import KeytoolsFileSystem

KEY = "YSBtYXN0ZXIga2V5ISEhIQ=="
CANARY = "canary-of-a-secret-value"
TABLE = pa.table(
    {"a": range(100), "b": [f"{CANARY}-{i}" for i in range(100)], "part": [i % 3 for i in range(100)]}
)


def tools(**settings: Any) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"kb": ["b"]}, "unlisted_columns": "footer_key", **settings}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "kb"]}, "tables": {"t": table}}
    return Keytools(parse_configuration(document))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", [".", "./", "./part=1", "part=1", ""])
def test_pandas_reads_a_view_by_any_name_of_its_folder(tmp_path: Path, path: str) -> None:
    keytools = tools()
    table = TABLE.drop_columns("part")
    (tmp_path / "part=1").mkdir()
    keytools.write_table(table, tmp_path / "part=1" / "a.parquet")
    for filesystem in (keytools.view(tmp_path), keytools.view(tmp_path).arrow):
        frame = pd.read_parquet(path, filesystem=filesystem)
        assert frame["b"].tolist() == table["b"].to_pylist()


def test_frames_of_pandas_and_polars_are_encrypted(tmp_path: Path) -> None:
    keytools = tools()
    filesystem = keytools.filesystem()
    TABLE.to_pandas().to_parquet(tmp_path / "one.parquet", filesystem=filesystem)
    TABLE.to_pandas().to_parquet(str(tmp_path / "parts"), partition_cols=["part"], filesystem=filesystem)
    with filesystem.open(str(tmp_path / "polars.parquet"), "wb") as file:
        pl.from_arrow(TABLE).write_parquet(file)
    for name in ("one.parquet", "polars.parquet"):
        assert keytools.read_table(tmp_path / name).sort_by("a").to_pydict() == TABLE.to_pydict()
    assert keytools.read_table(tmp_path / "parts").num_rows == 100
    assert len(files_in(tmp_path)) == 5
    for path in files_in(tmp_path):
        assert CANARY.encode() not in path.read_bytes()
        assert keytools.verify_file(path).conforms
    assert pd.read_parquet(tmp_path / "one.parquet", filesystem=filesystem)["a"].sum() == sum(range(100))


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"P", b"PAR1", b"PAR1 and no more", b""])
def test_nothing_but_parquet_is_written(tmp_path: Path, content: bytes) -> None:
    with (
        pytest.raises(KeytoolsError, match=r"x\.parquet"),
        tools().filesystem().open(str(tmp_path / "x.parquet"), "wb") as file,
    ):
        file.write(content)
    assert files_in(tmp_path) == []


def test_an_encrypted_file_is_not_encrypted_again(tmp_path: Path) -> None:
    keytools = tools()
    keytools.write_table(TABLE, tmp_path / "once.parquet")
    with pytest.raises(AlreadyEncryptedError):
        keytools.filesystem().pipe_file(str(tmp_path / "twice.parquet"), (tmp_path / "once.parquet").read_bytes())
    assert files_in(tmp_path) == [tmp_path / "once.parquet"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    filesystem = tools().filesystem()
    path = str(tmp_path / "x.parquet")
    with pytest.raises(ZeroDivisionError), pq.ParquetWriter(path, TABLE.schema, filesystem=filesystem) as writer:
        writer.write_table(TABLE)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), filesystem.open(path, "wb") as file:
        pq.write_table(TABLE, file)
        raise ZeroDivisionError
    assert files_in(tmp_path) == []


def test_a_file_that_is_never_closed_is_missed_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filesystem = tools().filesystem()
    path = tmp_path / "x.parquet"
    # Python's own files would be complete after this: code that relies on that must not lose rows silently.
    pl.from_arrow(TABLE).write_parquet(filesystem.open(str(path), "wb"))  # type: ignore[union-attr]
    gc.collect()
    assert files_in(tmp_path) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is not written, because it was never closed: open it in a `with` block"
    ]
    caplog.clear()
    filesystem.open(str(path), "wb").discard()
    with filesystem.open(str(path), "wb") as file:
        pq.write_table(TABLE, file)
    del file
    gc.collect()
    assert files_in(tmp_path) == [path]
    assert not caplog.records


@pytest.mark.parametrize("place", ["memory://", "s3://bucket/folder", "/data/folder", "folder/x.parquet"])
def test_a_place_is_no_table(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is a path, and `filesystem` takes .* a table\. Open files"):
        tools().filesystem(place)
    with pytest.raises(ConfigurationError, match="there is no table 'other'"):
        tools().filesystem("other")


@pytest.mark.parametrize("engine", ["duckdb", "pyarrow"])
def test_values_under_a_key_are_not_in_names_of_folders(tmp_path: Path, engine: str) -> None:
    keytools = tools(column_keys={"kb": ["b*"]})
    frame = pa.table({"b c": ["canary-1", "canary-2"], "b": [1, 2]})
    folder = tmp_path / "folder"
    with pytest.raises((ConfigurationError, duckdb.Error), match="names of folders"):
        if engine == "duckdb":
            # It escapes the name of the column.
            with duckdb.connect() as connection:
                connection.register_filesystem(keytools.filesystem())
                connection.execute(
                    f"copy (from frame) to 'keytools://{folder}' (format parquet, partition_by (\"b c\"))"
                )
        else:
            pq.write_to_dataset(frame, str(folder), partition_cols=["b c"], filesystem=keytools.filesystem().arrow)
    assert "canary" not in " ".join(str(path) for path in tmp_path.rglob("*"))


def test_marks_are_written_and_what_tells_statistics_is_not(tmp_path: Path) -> None:
    filesystem = tools().filesystem()
    filesystem.touch(str(tmp_path / "_SUCCESS"))
    assert files_in(tmp_path) == [tmp_path / "_SUCCESS"]
    with pytest.raises(OutputError, match="statistics"):
        filesystem.open(str(tmp_path / "_metadata"), "wb")


def test_nothing_is_written_in_a_transaction(tmp_path: Path) -> None:
    filesystem = tools().filesystem()
    with pytest.raises(OutputError, match="transaction"), filesystem.transaction:
        pq.write_table(TABLE, str(tmp_path / "x.parquet"), filesystem=filesystem)
    assert files_in(tmp_path) == []


def test_methods_take_arguments_by_position_as_fsspec_has_them(tmp_path: Path) -> None:
    for name, method in vars(KeytoolsFileSystem).items():
        theirs = getattr(fsspec.AbstractFileSystem, name, None)
        if name.startswith("_") or not inspect.isfunction(method) or theirs is None:
            continue
        names = [parameter.name for parameter in inspect.signature(theirs).parameters.values()]
        assert [name for name in inspect.signature(method).parameters if name != "options"] == [
            name for name in names if name != "kwargs"
        ], name
    keytools = tools()
    filesystem = keytools.filesystem()
    (tmp_path / "a").mkdir()
    keytools.write_table(TABLE, tmp_path / "a" / "x.parquet")
    filesystem.mv(str(tmp_path / "a" / "x.parquet"), str(tmp_path / "y.parquet"), False, None)
    assert keytools.read_table(tmp_path / "y.parquet").num_rows == 100
    assert files_in(tmp_path) == [tmp_path / "y.parquet"]


def test_a_file_that_is_replaced_while_it_is_moved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keytools = tools()
    filesystem, old = keytools.filesystem(), tmp_path / "x.parquet"
    keytools.write_table(TABLE, old)
    copy = filesystem.cp_file

    def copied_and_replaced(*arguments: Any, **options: Any) -> None:
        copy(*arguments, **options)
        keytools.write_table(TABLE.slice(0, 7), old)

    monkeypatch.setattr(filesystem, "cp_file", copied_and_replaced)
    with pytest.raises(OutputError, match="was replaced while it was moved"):
        filesystem.mv(str(old), str(tmp_path / "y.parquet"))
    assert keytools.read_table(old).num_rows == 7


def test_a_mark_that_is_moved_into_its_own_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(OutputError, match="are the same file"):
        tools().filesystem().mv(str(tmp_path / "_SUCCESS"), str(tmp_path))
    assert files_in(tmp_path) == [tmp_path / "_SUCCESS"]


@pytest.mark.parametrize("settings", [{"aad_prefix": "{file_name}"}, {"key_material": "external"}])
@pytest.mark.parametrize("method", ["mv", "cp_file", "copy", "arrow move", "arrow copy"])
def test_a_file_that_is_bound_to_its_name_is_readable_under_another_one(
    tmp_path: Path, settings: dict[str, Any], method: str
) -> None:
    keytools = tools(**settings)
    filesystem = keytools.filesystem()
    old, new = str(tmp_path / "x.parquet"), str(tmp_path / "new" / "y.parquet")
    filesystem.pipe_file(old, _plain())
    (tmp_path / "new").mkdir()
    filesystem.pipe_file(new, _plain(TABLE.slice(50)))  # With its own key material.
    methods = {"arrow move": filesystem.arrow.move, "arrow copy": filesystem.arrow.copy_file}
    (methods.get(method) or getattr(filesystem, method))(old, new)
    assert keytools.read_table(new).equals(TABLE) and keytools.verify_file(new).conforms
    is_moved = method in ("mv", "arrow move")
    assert filesystem.exists(old) is not is_moved
    assert len(files_in(tmp_path)) == (1 if is_moved else 2) * (2 if "key_material" in settings else 1)


@pytest.mark.parametrize("root", ["/", "", "."])
def test_a_data_set_of_a_view_begins_at_its_root(tmp_path: Path, root: str) -> None:
    keytools = tools()
    (tmp_path / "of").mkdir()
    keytools.write_table(TABLE, tmp_path / "of/one.parquet")
    view = keytools.view(tmp_path).arrow
    data_set = ds.dataset(root, filesystem=view, format="parquet")
    assert data_set.files == ["of/one.parquet"]
    assert data_set.to_table().equals(TABLE)


def _plain(table: pa.Table = TABLE) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


WRITERS: dict[str, Callable[[Keytools, pa.Table, Path], Any]] = {
    "properties": lambda keytools, data, path: data.to_pandas().to_parquet(
        path,
        encryption_properties=keytools.encryption_properties("t", pa.Schema.from_pandas(data.to_pandas()), path),
    ),
    "writer": lambda keytools, data, path: keytools.writer(path, data.schema),
    "table": lambda keytools, data, path: keytools.write_table(data, path),
    "dataset": lambda keytools, data, path: keytools.write_dataset(data, path.parent / "d"),
    "partitioned": lambda keytools, data, path: keytools.write_dataset(
        data, path.parent / "d", partitioning=["new"]
    ),
    "frame": lambda keytools, data, path: data.to_pandas().to_parquet(path, filesystem=keytools.filesystem()),
    "frame in parts": lambda keytools, data, path: data.to_pandas().to_parquet(
        path.parent / "d", partition_cols=["new"], filesystem=keytools.filesystem()
    ),
    "file": lambda keytools, data, path: keytools.filesystem().pipe_file(str(path), _plain(data)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_column_that_is_new_upstream_is_not_written_in_plaintext(tmp_path: Path, writer: str) -> None:
    keytools = tools(unlisted_columns="error", plaintext_columns=["a", "part"])
    with pytest.raises(ConfigurationError, match=r"does not say how to protect .*'new'"):
        WRITERS[writer](keytools, TABLE.append_column("new", TABLE["b"]), tmp_path / "x.parquet")
    assert files_in(tmp_path) == []
    if "part" not in writer:
        WRITERS[writer](keytools, TABLE, tmp_path / "x.parquet")
        if writer != "writer":
            assert len(files_in(tmp_path)) == 1


# --- Names that are not UTF-8 --------------------------------------------------------------------------------


def folder_with(tmp_path: Path, name: bytes) -> Any:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_bytes(b"y")
    return Keytools.from_mapping({"version": 1}).view(tmp_path)


@pytest.mark.parametrize("name", [b"b\xff.txt", b"b\xff.parquet"])
def test_a_folder_with_a_name_that_is_not_utf8_is_not_listed(tmp_path: Path, name: bytes) -> None:
    view = folder_with(tmp_path, name)
    for listing in (lambda: view.ls(""), lambda: view.glob("*.parquet"), lambda: view.find("")):
        with pytest.raises(IncompleteDataSetError, match="a name is not valid UTF-8"):
            listing()
    with pytest.raises(OSError, match="rename it"):
        view.info(os.fsdecode(name))


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec silently omits such folders: rows would be missing."""
    view = folder_with(tmp_path, b"c.parquet")
    assert view.glob("**/*.parquet") == ["c.parquet"]
    assert view.glob("nothing/*.parquet") == []

    def fail(folder: FileLocation) -> Any:
        raise ConnectionError(f"no connection for {folder.name}")

    monkeypatch.setattr("parquet_keytools.view.file_system.infos_in", fail)
    for listing in (lambda: view.glob("**/*.parquet"), lambda: view.find(""), lambda: list(view.walk(""))):
        with pytest.raises(ConnectionError, match="no connection"):
            listing()


SECRET = "hvs.c2VjcmV0IG9mIGEgdGVzdA=="
INLINE_SECRETS: dict[str, dict[str, Any]] = {
    "vault": {"url": "https://vault.example", "token": SECRET},
    "vault login": {"url": "https://vault.example", "approle": {"role_id": "r", "secret_id": SECRET}},
    "vault proxy": {
        "url": "https://vault.example",
        "token": "${HOME}",
        "proxy": f"http://u:{SECRET[:10]}@proxy:1",
    },
    "aws": {"region": "eu-west-1", "access_key_id": "a", "secret_access_key": SECRET, "session_token": SECRET},
    "keystore": {"passphrase": SECRET},
    "in_memory": {"keys": {"kf": KEY, "kb": KEY}},
    "vault and data keys": {"url": "https://vault.example", "token": "${HOME}"},
}


@pytest.mark.parametrize("name", INLINE_SECRETS)
def test_a_file_system_does_not_show_the_secrets_of_its_configuration(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    kind = name.partition(" ")[0]
    config: dict[str, Any] = {
        "version": 1,
        "kms": {"type": kind, **INLINE_SECRETS[name]},
        "tables": {"t": {"footer_key": "kf", "column_keys": {"kb": ["b"]}, "unlisted_columns": "footer_key"}},
    }
    if name.endswith("data keys"):
        config["data_keys"] = {"own": KEY}
    if kind == "keystore":
        path = tmp_path / "keystore.json"
        config["kms"]["path"] = str(path)
        keystore = Keystore.create(path, lambda: passphrase_from_text(SECRET), scrypt_n=2**14)
        for master_key_id in ("kf", "kb"):
            keystore.create_key(master_key_id)
    given = copy.deepcopy(config)
    chained = {"fo": str(tmp_path), "target_protocol": "file"}
    for made in (
        KeytoolsUrls(config=config, table="t"),
        KeytoolsUrls(config, "t"),
        KeytoolsUrls(config=config, **chained),
        KeytoolsUrls(config, **chained),
    ):
        shown = [
            *(made.to_json(), repr(made.to_dict()), repr(made.storage_options), repr(made.storage_args)),
            *(repr(made), str(made), repr(vars(made)), repr(made.arrow), caplog.text),
        ]
        with pytest.raises(ConfigurationError, match="must not be pickled") as caught:
            pickle.dumps(made)
        shown.append(str(caught.value))
        for text in shown:
            assert not any(secret in text for secret in (SECRET, SECRET[:10], KEY))
        # A shown configuration creates no other file system that would call the KMS with a wrong secret.
        (shown_config,) = [made.storage_options.get("config"), *made.storage_args][:1]
        shown_config = shown_config or made.storage_args[0]
        assert shown_config["tables"] == config["tables"]
        with pytest.raises(ConfigurationError, match="the secret was withheld"):
            KeytoolsUrls(config=shown_config)
    assert config == given


def test_a_configuration_without_secrets_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", SECRET)
    kms = {"type": "vault", "url": "https://vault.example", "token": "${TOKEN_OF_A_TEST}"}
    tables = {"t": {"footer_key": "kf", "column_keys": {"kb": ["b"]}, "unlisted_columns": "error"}}
    config = {"version": 1, "kms": kms, "tables": tables}
    made = KeytoolsUrls(config=config)
    assert made.storage_options == {"config": config}
    assert json.loads(made.to_json())["config"] == config
    assert SECRET not in made.to_json() + repr(pickle.dumps(made))
