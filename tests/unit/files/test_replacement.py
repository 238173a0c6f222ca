"""How the files of a data set are put in place together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import OutputError, StorageFailedError
from parquet_keytools.files import conversion
from parquet_keytools.storage import outputs
from parquet_keytools.storage.locations import FileLocation

TABLE = pa.table({"part": [number % 6 for number in range(60)], "a": range(60)})


def tools(**settings: Any) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext", **settings}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "ka"]}, "tables": {"t": table}}
    return Keytools(parse_configuration(document))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was synced and renamed: (`file`, `folder` or `appears`, path)."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append(("folder" if path.is_dir() else "file", str(path)))

    def replaced(source: str, target: str, **folders: int) -> None:
        replace(source, target, **folders)
        folder = Path(f"/proc/self/fd/{folders['dst_dir_fd']}").readlink()
        seen.append(("appears", str(folder / target)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


@pytest.mark.parametrize("partitioned", [True, False])
def test_all_are_on_the_disk_before_the_first_appears(
    tmp_path: Path, calls: list[tuple[str, str]], partitioned: bool
) -> None:
    keytools, folder = tools(), tmp_path / "data"
    where: dict[str, Any] = {"partitioning": ["part"]} if partitioned else {"max_rows_per_file": 10}
    if not partitioned:
        where["max_rows_per_group"] = 10
    keytools.write_dataset(TABLE, folder, **where)
    kinds = [kind for kind, _ in calls]
    assert kinds.count("file") == kinds.count("appears") == 6
    assert "file" not in kinds[kinds.index("appears") :]
    # One sync of each folder, after the last file has appeared in it.
    synced = [Path(path) for kind, path in calls if kind == "folder"]
    assert sorted(synced) == sorted({path.parent for path in files_of(folder)})
    for place in synced:
        last = max(at for at, (kind, path) in enumerate(calls) if kind == "appears" and Path(path).parent == place)
        assert calls.index(("folder", str(place))) > last
    assert keytools.dataset(folder).to_table().num_rows == 60


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_data_set_that_need_not_last_is_not_synced(
    tmp_path: Path, calls: list[tuple[str, str]], partitioned: bool
) -> None:
    keytools, folder = tools(), tmp_path / "data"
    where: dict[str, Any] = {"partitioning": ["part"]} if partitioned else {}
    keytools.write_dataset(TABLE, folder, durable=False, **where)
    assert [kind for kind, _ in calls] == ["appears"] * len(files_of(folder))
    assert keytools.dataset(folder).to_table().num_rows == 60


def test_old_keys_go_when_it_is_on_the_disk_that_new_files_are_there(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    keytools, folder = tools(key_material="external"), tmp_path / "data"
    names = {"basename_template": "{i}.parquet", "existing_data_behavior": "overwrite_or_ignore"}
    keytools.write_dataset(TABLE, folder, **names)
    calls.clear()
    keytools.write_dataset(TABLE, folder, durable=False, **names)
    appeared = calls.index(("appears", str(folder / "0.parquet")))
    assert calls[appeared + 1] == ("folder", str(folder))
    assert keytools.dataset(folder).to_table().num_rows == 60


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_a_file_that_cannot_be_synced_keeps_all_from_appearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_material: str
) -> None:
    keytools, folder = tools(key_material=key_material), tmp_path / "data"
    keytools.write_dataset(TABLE, folder, partitioning=["part"])
    before = {path: path.read_bytes() for path in files_of(folder)}
    fsync, done = os.fsync, []

    def broken(descriptor: int) -> None:
        done.append(descriptor)
        if len(done) == 4:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageFailedError, match="part="):
        keytools.write_dataset(TABLE, folder, partitioning=["part"], existing_data_behavior="overwrite_or_ignore")
    assert {path: path.read_bytes() for path in files_of(folder)} == before


def test_a_data_set_in_memory(tmp_path: Path) -> None:
    filesystem = pa.fs.FileSystem.from_uri("mock:///")[0]
    filesystem.create_dir("data")
    keytools = tools()
    keytools.write_dataset(TABLE, "data", partitioning=["part"], filesystem=filesystem)
    found = keytools.dataset("data", filesystem=filesystem)
    assert isinstance(found, ds.Dataset) and found.count_rows() == 60


def removed(path: Path) -> None:
    path.unlink()


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture(params=[removed, replaced_by_a_folder], ids=lambda act: act.__name__)
def is_gone_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have somebody remove `x.parquet` or `0-0.parquet` as soon as they are in place."""
    commit = outputs.LocalOutput.commit

    def committed(output: outputs.PendingOutput, *arguments: Any, **options: Any) -> None:
        commit(output, *arguments, **options)  # type: ignore[arg-type]
        if Path(output.target.path).name in ("x.parquet", "0-0.parquet"):
            request.param(Path(output.target.path))

    monkeypatch.setattr(outputs.LocalOutput, "commit", committed)


def encrypts(keytools: Keytools, folder: Path) -> None:
    pq.write_table(TABLE, folder / "plain.parquet")
    keytools.encrypt_file(folder / "plain.parquet", folder / "x.parquet")


def rekeys(keytools: Keytools, folder: Path) -> None:
    keytools.write_table(TABLE, folder / "y.parquet")
    keytools.rekey_file(folder / "y.parquet", folder / "x.parquet")


def decrypts(keytools: Keytools, folder: Path) -> None:
    keytools.write_table(TABLE, folder / "y.parquet")
    keytools.decrypt_file(folder / "y.parquet", folder / "x.parquet")


def salvages(keytools: Keytools, folder: Path) -> None:
    keytools.write_table(TABLE, folder / "y.parquet")
    keytools.salvage_file(folder / "y.parquet", folder / "x.parquet")


def writes_a_table(keytools: Keytools, folder: Path) -> None:
    keytools.write_table(TABLE, folder / "x.parquet")


def writes_a_data_set(keytools: Keytools, folder: Path) -> None:
    keytools.write_dataset(TABLE, folder, partitioning=["part"], basename_template="0-{i}.parquet")


@pytest.mark.parametrize(
    "write",
    [encrypts, rekeys, decrypts, salvages, writes_a_table, writes_a_data_set],
    ids=lambda write: write.__name__,
)
@pytest.mark.usefixtures("is_gone_at_once")
def test_a_written_file_that_is_gone_is_named(tmp_path: Path, write: Callable[[Keytools, Path], None]) -> None:
    """Its length was None, and a sum of these a TypeError."""
    with pytest.raises(
        OutputError, match=r"/(x|0-0)\.parquet was written, and was removed or replaced meanwhile\."
    ):
        write(tools(), tmp_path)


@pytest.mark.usefixtures("is_gone_at_once")
def test_what_was_rekeyed_in_place_has_its_length_though_it_is_gone(tmp_path: Path) -> None:
    keytools, path = tools(), tmp_path / "x.parquet"
    keytools.write_table(TABLE, tmp_path / "y.parquet")
    (tmp_path / "y.parquet").rename(path)
    (file,) = keytools.rekey_in_place(path).files
    assert file.new_size_bytes is not None and file.new_size_bytes > 1000


def test_a_source_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keytools, source, target = tools(), tmp_path / "plain.parquet", tmp_path / "x.parquet"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*plain\.parquet"):
        FileLocation.resolve(source).size_bytes()
    encrypts(keytools, tmp_path)
    is_there_already = conversion.is_there_already

    def found(*arguments: Any, **options: Any) -> bool:
        assert is_there_already(*arguments, **options)
        source.unlink()
        return True

    monkeypatch.setattr(conversion, "is_there_already", found)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*plain\.parquet"):
        keytools.encrypt_file(source, target, skip_existing=True)
