"""Links below `filesystem()` and views: removed and moved as links, followed for reading, never in circles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs

from parquet_keytools import Keytools
from parquet_keytools.errors import OutputError

TABLE = pa.table({"x": [1, 2]})


@pytest.fixture
def keytools() -> Keytools:
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["footer"]},
            "tables": {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
        }
    )


@pytest.fixture
def lake(tmp_path: Path, keytools: Keytools) -> Path:
    """A folder `job` with links of every kind, and the folder `archive`, the target of some of them."""
    for name in ("archive/deep", "job/sub"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("archive/precious", "archive/deep/precious", "job/a", "job/sub/b"):
        keytools.write_table(TABLE, tmp_path / f"{name}.parquet")
    for link, target in {
        "job/link": "../archive",
        "job/sub/link": "../../archive/deep",
        "job/file.parquet": "../archive/precious.parquet",
        "job/nowhere": "nothing",
        "job/here": ".",
        "job/self": "self",
        "archive/back": "../job",
        "top": "archive",
    }.items():
        (tmp_path / link).symlink_to(target)
    return tmp_path


def archived(lake: Path) -> list[str]:
    return sorted(str(path.relative_to(lake / "archive")) for path in (lake / "archive").rglob("*"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


ARCHIVED = ["back", "deep", "deep/precious.parquet", "precious.parquet"]

FileSystems = Callable[[Keytools, Path], tuple[Any, str]]
FILE_SYSTEMS: dict[str, FileSystems] = {
    "filesystem": lambda keytools, lake: (keytools.filesystem(), f"{lake}/"),
    "view": lambda keytools, lake: (keytools.view(lake), ""),
    "subtree": lambda keytools, lake: (
        keytools.filesystem(filesystem=pafs.SubTreeFileSystem(str(lake), pafs.LocalFileSystem())),
        "",
    ),
    "fsspec": lambda keytools, lake: (keytools.filesystem(filesystem=fsspec.filesystem("file")), f"{lake}/"),
    "dir": lambda keytools, lake: (
        keytools.filesystem(filesystem=fsspec.filesystem("dir", path=str(lake), fs=fsspec.filesystem("file"))),
        "",
    ),
}

REMOVALS: dict[str, Callable[[Any, str], Any]] = {
    "rm": lambda filesystem, folder: filesystem.rm(folder, recursive=True),
    "rm of a list": lambda filesystem, folder: filesystem.rm([folder], recursive=True),
    "delete": lambda filesystem, folder: filesystem.delete(folder, recursive=True),
    "arrow": lambda filesystem, folder: filesystem.arrow.delete_dir(folder),
    "pyarrow's handler": lambda filesystem, folder: pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)).delete_dir(
        folder
    ),
    "contents": lambda filesystem, folder: filesystem.arrow.delete_dir_contents(folder),
    "pyarrow's handler, contents": lambda filesystem, folder: pafs.PyFileSystem(
        pafs.FSSpecHandler(filesystem)
    ).delete_dir_contents(folder),
}


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("removal", REMOVALS)
def test_what_links_lead_to_stays(lake: Path, keytools: Keytools, kind: str, removal: str) -> None:
    filesystem, start = FILE_SYSTEMS[kind](keytools, lake)
    REMOVALS[removal](filesystem, f"{start}job")
    assert archived(lake) == ARCHIVED
    # pyarrow's own handler skips dangling links.
    spared = {"nowhere", "self"} if removal.startswith("pyarrow's") or kind == "dir" else set()
    assert set(names(lake / "job")) <= spared
    assert (lake / "job").exists() is ("contents" in removal)


@pytest.mark.parametrize("kind", ["filesystem", "view", "subtree", "fsspec"])
@pytest.mark.parametrize(
    "removal",
    {
        "rm": lambda filesystem, link: filesystem.rm(link),
        "recursive": lambda filesystem, link: filesystem.rm(link, recursive=True),
        "rm_file": lambda filesystem, link: filesystem.rm_file(link),
        "delete_dir": lambda filesystem, link: filesystem.arrow.delete_dir(link),
    }.items(),
    ids=lambda case: case[0],
)
def test_a_link_itself_is_removed(lake: Path, keytools: Keytools, kind: str, removal: Any) -> None:
    filesystem, start = FILE_SYSTEMS[kind](keytools, lake)
    for link in ("top", "job/link", "job/file.parquet", "job/nowhere", "job/self", "job/here"):
        removal[1](filesystem, f"{start}{link}")
        assert not (lake / link).is_symlink(), link
    assert archived(lake) == ARCHIVED
    assert names(lake / "job") == ["a.parquet", "sub"]


def test_a_link_out_of_a_view_is_removed_and_not_opened(lake: Path, keytools: Keytools) -> None:
    view = keytools.view(lake / "job")
    with pytest.raises(PermissionError):
        view.open("link/precious.parquet")
    with pytest.raises(PermissionError):
        view.rm("link/precious.parquet")
    with pytest.raises(PermissionError):
        view.rm("link/deep", recursive=True)
    view.rm("link")
    view.arrow.delete_dir_contents("", accept_root_dir=True)
    assert archived(lake) == ARCHIVED and names(lake / "job") == []


def test_a_path_through_a_link_names_what_is_there(lake: Path, keytools: Keytools) -> None:
    filesystem = keytools.filesystem()
    filesystem.rm(f"{lake}/job/link/deep", recursive=True)
    assert archived(lake) == ["back", "precious.parquet"]
    with pytest.raises(NotADirectoryError):
        filesystem.rmdir(f"{lake}/top")
    with pytest.raises(OutputError, match="is a link"):
        filesystem.arrow.delete_dir_contents(f"{lake}/top")
    with pytest.raises(PermissionError):
        filesystem.rm("/", recursive=True)
    with pytest.raises(PermissionError):
        filesystem.arrow.delete_dir_contents("/", accept_root_dir=True)


@pytest.mark.parametrize("kind", ["filesystem", "view", "subtree"])
def test_listings_end_where_links_lead_back(lake: Path, keytools: Keytools, kind: str) -> None:
    filesystem, start = FILE_SYSTEMS[kind](keytools, lake)
    expected = {
        "job/a.parquet",
        "job/file.parquet",
        "job/link/deep/precious.parquet",
        "job/link/precious.parquet",
        "job/sub/b.parquet",
        "job/sub/link/precious.parquet",
    }
    found = {name.removeprefix(start) for name in filesystem.find(f"{start}job")}
    assert {name for name in found if name.endswith(".parquet")} == expected
    assert found - expected == {"job/here", "job/link/back"}
    globbed = {name.removeprefix(start) for name in filesystem.glob(f"{start}job/**/*.parquet")}
    assert globbed == expected
    assert filesystem.du(f"{start}job") > 0
    assert ds.dataset([f"{start}{name}" for name in sorted(expected)], filesystem=filesystem).count_rows() == 12


@pytest.mark.parametrize("method", ["mv", "arrow"])
@pytest.mark.parametrize("name", ["job", "top", "job/file.parquet", "job/nowhere", "link.parquet"])
def test_folders_and_links_are_not_moved(lake: Path, keytools: Keytools, method: str, name: str) -> None:
    pa.parquet.write_table(TABLE, lake / "plain.parquet")
    (lake / "link.parquet").symlink_to("plain.parquet")
    before = sorted(str(path) for path in lake.rglob("*"))
    filesystem = keytools.filesystem()
    move = filesystem.mv if method == "mv" else filesystem.arrow.move
    with pytest.raises((OutputError, FileNotFoundError)):
        move(f"{lake}/{name}", f"{lake}/moved")
    assert sorted(str(path) for path in lake.rglob("*")) == before


@pytest.mark.parametrize("kind", ["filesystem", "view"])
def test_writing_with_delete_matching_keeps_what_links_lead_to(lake: Path, keytools: Keytools, kind: str) -> None:
    filesystem, start = FILE_SYSTEMS[kind](keytools, lake)
    ds.write_dataset(
        TABLE,
        f"{start}job",
        filesystem=filesystem,
        format="parquet",
        existing_data_behavior="delete_matching",
        basename_template="new-{i}.parquet",
    )
    assert archived(lake) == ARCHIVED
    assert (lake / "job/new-0.parquet").exists() and not (lake / "job/a.parquet").exists()


def _pandas(folder: str, filesystem: Any) -> None:
    PARTED.to_pandas().to_parquet(
        folder, partition_cols=["part"], filesystem=filesystem, existing_data_behavior="delete_matching"
    )


PARTED = pa.table({"x": [1, 2], "part": ["a", "b"]})
OVERWRITES: dict[str, Callable[[str, Any], object]] = {
    "pyarrow": lambda folder, filesystem: pq.write_to_dataset(
        PARTED,
        folder,
        partition_cols=["part"],
        filesystem=filesystem.arrow,
        existing_data_behavior="delete_matching",
    ),
    "pyarrow's handler": lambda folder, filesystem: pq.write_to_dataset(
        PARTED, folder, partition_cols=["part"], filesystem=filesystem, existing_data_behavior="delete_matching"
    ),
    "folders without names": lambda folder, filesystem: ds.write_dataset(
        PARTED,
        folder,
        partitioning=["part"],
        format="parquet",
        filesystem=filesystem.arrow,
        existing_data_behavior="delete_matching",
    ),
    "pandas": _pandas,
}


@pytest.mark.parametrize("kind", ["filesystem", "view", "subtree", "fsspec"])
@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_no_overwrite_empties_a_linked_partition(
    lake: Path, keytools: Keytools, kind: str, overwrite: str
) -> None:
    filesystem, start = FILE_SYSTEMS[kind](keytools, lake)
    (lake / "job/part=a").symlink_to("../archive")
    (lake / "job/a").symlink_to("../archive")
    with pytest.raises(Exception, match="link"):
        OVERWRITES[overwrite](f"{start}job", filesystem)
    assert archived(lake) == ARCHIVED


def test_nor_does_duckdb(lake: Path, keytools: Keytools) -> None:
    (lake / "set").mkdir()
    (lake / "set/part=a").symlink_to("../archive")
    connection = pytest.importorskip("duckdb").connect()
    connection.register_filesystem(keytools.filesystem())
    connection.register("parted", PARTED)
    with pytest.raises(Exception, match="is a link"):
        connection.sql(
            f"copy (from parted) to 'keytools://{lake}/set' (format parquet, partition_by (part), overwrite)"
        )
    assert archived(lake) == ARCHIVED


@pytest.mark.parametrize("pattern", ["job/**", "job/*/*", "job/l*/**", "j*/link/*", "**/precious.parquet"])
def test_a_pattern_removes_nothing(lake: Path, keytools: Keytools, pattern: str) -> None:
    before = names(lake / "job")
    with pytest.raises(FileNotFoundError):
        keytools.filesystem().rm([f"{lake}/job/a.parquet", f"{lake}/{pattern}"], recursive=True)
    assert archived(lake) == ARCHIVED and names(lake / "job") == before


def test_dask_overwrites_a_folder_and_not_what_links_lead_to(lake: Path, keytools: Keytools) -> None:
    dask = pytest.importorskip("dask.dataframe")
    frame = dask.from_pandas(TABLE.to_pandas(), npartitions=1)
    frame.to_parquet(f"{lake}/job", filesystem=keytools.filesystem(), overwrite=True, write_metadata_file=False)
    assert archived(lake) == ARCHIVED
    assert keytools.read_table(lake / "job").num_rows == 2 and not (lake / "job/a.parquet").exists()
