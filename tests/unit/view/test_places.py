"""Any file system below `filesystem()`: files are written, read, listed and removed where they are without us."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs

from parquet_keytools import Keytools

TABLE = pa.table({"x": [1, 2, 3], "part": ["a", "a", "b"]})


@pytest.fixture
def keytools() -> Keytools:
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": {"footer": "MDEyMzQ1Njc4OTAxMjM0NQ=="}},
            "tables": {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
        }
    )


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current folder in which no unexpected file may appear."""
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    empty_memory()
    yield
    empty_memory()


def empty_memory() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Handler(pafs.FileSystemHandler):
    """A third-party file system whose paths are absolute and which is not local."""

    def __init__(self) -> None:
        self.local = pafs.LocalFileSystem()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handler)

    def __getattribute__(self, name: str) -> Any:
        methods = {
            "delete_root_dir_contents": lambda: None,
            "get_type_name": lambda: "other",
            "open_input_file": lambda path: self.local.open_input_file(path),
            "open_output_stream": lambda path, metadata: self.local.open_output_stream(path),
            "get_file_info_selector": lambda selector: self.local.get_file_info(selector),
            "delete_dir_contents": lambda path, missing_ok: self.local.delete_dir_contents(
                path, missing_dir_ok=missing_ok
            ),
            "create_dir": lambda path, recursive: self.local.create_dir(path, recursive=recursive),
            "move": lambda old, new: self.local.move(old, new),
        }
        return methods.get(name) or super().__getattribute__(name)

    def _local(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def get_file_info(self, paths: list[str]) -> Any:
        return self.local.get_file_info(paths)

    def delete_dir(self, path: str) -> None:
        self.local.delete_dir(path)

    def delete_file(self, path: str) -> None:
        self.local.delete_file(path)

    def normalize_path(self, path: str) -> str:
        return path


for _name in pafs.FileSystemHandler.__abstractmethods__ - set(vars(Handler)):
    setattr(Handler, _name, Handler._local)
Handler.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Rooted(LocalFileSystem):
    """A class derived from fsspec's local file system, whose root is a folder."""

    protocol = "file"
    root = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = os.fspath(path)
        return text if text.startswith(cls.root) else cls.root + "/" + text.strip("/")


def in_tree(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


def in_memory(tmp_path: Path) -> list[str]:
    return sorted(MemoryFileSystem.store)


def subtree(tmp_path: Path) -> pafs.FileSystem:
    (tmp_path / "base/inner").mkdir(parents=True)
    return pafs.SubTreeFileSystem(str(tmp_path / "base"), pafs.LocalFileSystem())


def rooted(tmp_path: Path) -> Any:
    Rooted.root = str(tmp_path / "base")
    (tmp_path / "base").mkdir()
    return Rooted(auto_mkdir=True, skip_instance_cache=True)


def mock_names(filesystem: pafs.FileSystem) -> list[str]:
    infos = filesystem.get_file_info(pafs.FileSelector("", recursive=True))
    return sorted(info.path for info in infos if info.is_file)


memory = lambda tmp_path: MemoryFileSystem()  # noqa: E731
local = lambda tmp_path: fsspec.filesystem("file", auto_mkdir=True)  # noqa: E731

Make = Callable[[Path], Any]
PLACES: dict[str, tuple[Make, str]] = {
    "none": (lambda tmp_path: None, "{tmp}/"),
    "local of Arrow": (lambda tmp_path: pafs.LocalFileSystem(), "{tmp}/"),
    "local of Arrow, relative": (lambda tmp_path: pafs.LocalFileSystem(), ""),
    "local of Arrow, mapped": (lambda tmp_path: pafs.LocalFileSystem(use_mmap=True), "{tmp}/"),
    "subtree": (subtree, ""),
    "subtree, absolute": (subtree, "/"),
    "subtree in a subtree": (lambda tmp_path: pafs.SubTreeFileSystem("inner", subtree(tmp_path)), ""),
    "subtree of the root": (lambda tmp_path: pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), "{tmp}/"),
    "subtree of fsspec": (
        lambda tmp_path: pafs.SubTreeFileSystem(
            str(tmp_path), pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("file")))
        ),
        "",
    ),
    "subtree of memory": (
        lambda tmp_path: pafs.SubTreeFileSystem(
            "/base", pafs.PyFileSystem(pafs.FSSpecHandler(MemoryFileSystem()))
        ),
        "",
    ),
    "URI of a folder": (lambda tmp_path: tmp_path.as_uri(), ""),
    "mock": (lambda tmp_path: pafs._MockFileSystem(), ""),
    "mock, absolute": (lambda tmp_path: pafs._MockFileSystem(), "/"),
    "of somebody else": (lambda tmp_path: pafs.PyFileSystem(Handler()), "{tmp}/"),
    "memory": (memory, "/"),
    "memory, relative": (memory, ""),
    "memory of Arrow": (lambda tmp_path: pafs.PyFileSystem(pafs.FSSpecHandler(MemoryFileSystem())), "/"),
    "local of fsspec": (local, "{tmp}/"),
    "local of fsspec, relative": (local, ""),
    "derived from local": (rooted, ""),
    "derived from local, absolute": (rooted, "/"),
    "dir": (lambda tmp_path: fsspec.filesystem("dir", path=str(tmp_path), fs=local(tmp_path)), ""),
    "dir, absolute": (lambda tmp_path: fsspec.filesystem("dir", path=str(tmp_path), fs=local(tmp_path)), "/"),
    "dir in memory": (lambda tmp_path: fsspec.filesystem("dir", path="/base", fs=MemoryFileSystem()), ""),
    "simplecache": (
        lambda tmp_path: fsspec.filesystem("simplecache", fs=local(tmp_path), cache_storage=f"{tmp_path}-cache"),
        "{tmp}/",
    ),
}


def write_and_remove(filesystem: Any, start: str) -> list[tuple[str, Any]]:
    """Do what people do with a file system of pyarrow or fsspec; return the results."""
    seen: list[tuple[str, Any]] = []
    arrow = filesystem
    if not isinstance(filesystem, pafs.FileSystem):
        arrow = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    arrow.create_dir(f"{start}new/deep")
    pq.write_table(TABLE, f"{start}new/one.parquet", filesystem=filesystem)
    pq.write_table(TABLE, f"{start}new/deep/two.parquet", filesystem=filesystem)
    pq.write_table(TABLE.slice(1), f"{start}new/one.parquet", filesystem=filesystem)
    ds.write_dataset(
        TABLE,
        f"{start}set",
        filesystem=filesystem,
        format="parquet",
        partitioning=["part"],
        partitioning_flavor="hive",
    )
    seen.append(("table", pq.read_table(f"{start}new/one.parquet", filesystem=filesystem).to_pylist()))
    data_set = ds.dataset(f"{start}set", filesystem=filesystem, format="parquet", partitioning="hive")
    seen.append(("data set", sorted(row["x"] for row in data_set.to_table().to_pylist())))
    seen.append(("files", sorted(name.lstrip("/").removeprefix(start.lstrip("/")) for name in data_set.files)))
    pq.write_table(TABLE, f"{start}new/away.parquet", filesystem=filesystem)
    arrow.delete_file(f"{start}new/away.parquet")
    arrow.move(f"{start}new/one.parquet", f"{start}new/moved.parquet")
    arrow.create_dir(f"{start}old/deep")
    pq.write_table(TABLE, f"{start}old/deep/x.parquet", filesystem=filesystem)
    arrow.delete_dir_contents(f"{start}old")
    arrow.delete_dir(f"{start}old")
    kinds = [arrow.get_file_info(f"{start}{name}").type for name in ("new", "new/moved.parquet", "nothing", "old")]
    seen.append(("kinds", kinds))
    return seen


def underneath(tmp_path: Path, filesystem: Any) -> list[str]:
    mock = mock_names(filesystem) if getattr(filesystem, "type_name", "") == "mock" else []
    return [*in_tree(tmp_path), *in_memory(tmp_path), *mock]


# pyarrow cannot list file systems that return other names than requested.
ONLY_WITH_US = {"memory, relative", "derived from local", "derived from local, absolute"}


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ONLY_WITH_US])
def test_everything_is_where_it_is_without_us(tmp_path: Path, keytools: Keytools, place: str) -> None:
    make, start = PLACES[place]
    results = []
    for folder, encrypts in (("without", False), ("with", True)):
        (tmp_path / folder).mkdir()
        empty_memory()
        below = make(tmp_path / folder)
        filesystem = keytools.filesystem(filesystem=below) if encrypts else _plain(below)
        begin = start.format(tmp=tmp_path / folder)
        os.chdir(tmp_path / folder if "relative" in place and "memory" not in place else tmp_path / "current")
        seen = write_and_remove(filesystem, begin)
        results.append((seen, underneath(tmp_path / folder, below)))
        if encrypts:
            assert keytools.read_table(f"{begin}new/moved.parquet", filesystem=below).num_rows == 2
            assert keytools.dataset(f"{begin}set", filesystem=below).count_rows() == 3
            assert keytools.view(f"{begin}new", filesystem=below).find("") == ["deep/two.parquet", "moved.parquet"]
            with keytools.view(f"{begin}new", filesystem=below).open("moved.parquet") as file:
                assert pq.read_table(file).num_rows == 2
    assert results[0] == results[1]
    assert results[0][1], "nothing was written"
    assert in_tree(tmp_path / "current") == []


def _plain(filesystem: Any) -> Any:
    if isinstance(filesystem, str):
        found, path = pafs.FileSystem.from_uri(filesystem)
        return pafs.SubTreeFileSystem(path, found)
    return pafs.LocalFileSystem() if filesystem is None else filesystem


@pytest.mark.parametrize("place", PLACES)
def test_tables_and_data_sets_of_keytools_are_written_there(
    tmp_path: Path, keytools: Keytools, place: str
) -> None:
    make, start = PLACES[place]
    below = make(tmp_path)
    begin = start.format(tmp=tmp_path)
    if begin in ("", "/") and place.startswith("local"):
        os.chdir(tmp_path)
    keytools.write_table(TABLE, f"{begin}t.parquet", filesystem=below)
    keytools.write_dataset(TABLE, f"{begin}set", filesystem=below, partitioning=["part"])
    keytools.write_dataset(
        TABLE, f"{begin}set", filesystem=below, partitioning=["part"], existing_data_behavior="delete_matching"
    )
    with keytools.writer(f"{begin}w.parquet", TABLE.schema, filesystem=below) as writer:
        writer.write_table(TABLE)
    assert keytools.read_table(f"{begin}t.parquet", filesystem=below).equals(TABLE)
    assert keytools.read_table(f"{begin}w.parquet", filesystem=below).equals(TABLE)
    assert keytools.dataset(f"{begin}set", filesystem=below).count_rows() == 3
    assert keytools.schema(f"{begin}t.parquet", filesystem=below) == TABLE.schema
    assert keytools.metadata(f"{begin}t.parquet", filesystem=below).num_rows == 3
    files = keytools.filesystem(filesystem=below)
    names = sorted(name.removeprefix(begin) for name in files.find(f"{begin}set"))
    assert names == ["set/part=a/part-0.parquet", "set/part=b/part-0.parquet"]
    assert in_tree(tmp_path / "current") == []
    assert {name.rsplit("/", 1)[-1] for name in underneath(tmp_path, below)} == {
        "t.parquet",
        "w.parquet",
        "part-0.parquet",
    }


def test_patterns_begin_as_paths_do(tmp_path: Path, keytools: Keytools) -> None:
    for place, pattern in (("subtree", "*.parquet"), ("memory", "/*.parquet"), ("mock", "*.parquet")):
        make, start = PLACES[place]
        filesystem = keytools.filesystem(filesystem=make(tmp_path))
        pq.write_table(TABLE, f"{start}x.parquet", filesystem=filesystem)
        assert filesystem.glob(pattern) == [f"{start}x.parquet"]


@pytest.mark.parametrize("folder", ["relative", "./relative", "relative/", "."])
@pytest.mark.parametrize("wrapped", [True, False])
def test_relative_folders(tmp_path: Path, keytools: Keytools, folder: str, wrapped: bool) -> None:
    filesystem = keytools.filesystem()
    given = filesystem.arrow if wrapped else filesystem
    pq.write_to_dataset(TABLE, folder, partition_cols=["part"], filesystem=given)
    assert len(in_tree(tmp_path / "current")) == 2
    assert pq.read_table(folder, filesystem=given).num_rows == 3
    assert ds.dataset(folder, filesystem=given, partitioning="hive").count_rows() == 3
    assert len(filesystem.glob(f"{folder.rstrip('/')}/**/*.parquet")) == 2
    assert keytools.read_table(folder).num_rows == 3


def test_a_text_that_names_no_folder_is_no_file_system(tmp_path: Path, keytools: Keytools) -> None:
    (tmp_path / "file").write_bytes(b"")
    for text in ((tmp_path / "file").as_uri(), (tmp_path / "nothing").as_uri(), "relative", "C:"):
        with pytest.raises(ValueError, match="folder"):
            keytools.write_table(TABLE, "x.parquet", filesystem=text)
        with pytest.raises(ValueError, match="folder"):
            keytools.filesystem(filesystem=text)


def test_local_folders_are_made_only_where_fsspec_would(tmp_path: Path, keytools: Keytools) -> None:
    path = f"{tmp_path}/a/b/x.parquet"
    for below in (None, fsspec.filesystem("file")):
        with pytest.raises(FileNotFoundError):
            pq.write_table(TABLE, path, filesystem=keytools.filesystem(filesystem=below))
    assert not (tmp_path / "a").exists()
    making = fsspec.filesystem("file", auto_mkdir=True)
    pq.write_table(TABLE, path, filesystem=keytools.filesystem(filesystem=making))
    keytools.write_table(TABLE, f"{tmp_path}/c/d/x.parquet", filesystem=making)
    with keytools.view(f"{tmp_path}/e", filesystem=making).open("f/x.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    assert in_tree(tmp_path) == ["a/b/x.parquet", "c/d/x.parquet", "e/f/x.parquet"]


def test_archives_and_references_are_read(tmp_path: Path, keytools: Keytools) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    keytools.write_table(TABLE, tmp_path / "in/deep/x.parquet")
    archive = fsspec.filesystem("zip", fo=str(tmp_path / "a.zip"), mode="w")
    archive.put_file(str(tmp_path / "in/deep/x.parquet"), "deep/x.parquet")
    archive.close()
    size = (tmp_path / "in/deep/x.parquet").stat().st_size
    references = {"deep/x.parquet": [(tmp_path / "in/deep/x.parquet").as_uri(), 0, size]}
    for below in (
        fsspec.filesystem("zip", fo=str(tmp_path / "a.zip")),
        fsspec.filesystem("reference", fo=references, remote_protocol="file"),
    ):
        filesystem = keytools.filesystem(filesystem=below)
        assert pq.read_table("deep/x.parquet", filesystem=filesystem).equals(TABLE)
        assert filesystem.find("deep") == ["deep/x.parquet"]
        assert keytools.view("deep", filesystem=below).find("") == ["x.parquet"]
        assert keytools.read_table("deep", filesystem=below).num_rows == 3
        with pytest.raises(Exception):  # noqa: B017 - of fsspec
            filesystem.pipe_file("deep/y.parquet", (tmp_path / "in/deep/x.parquet").read_bytes())


@pytest.mark.parametrize(
    ("protocol", "order"),
    [
        ("simplecache", "above"),
        ("filecache", "above"),
        ("blockcache", "above"),
        ("simplecache", "below"),
        ("filecache", "below"),
    ],
)
def test_caches_above_and_below(tmp_path: Path, keytools: Keytools, protocol: str, order: str) -> None:
    keytools.write_table(TABLE, tmp_path / "x.parquet")
    options = {"cache_storage": str(tmp_path / "cache")}
    if order == "above":
        filesystem = fsspec.filesystem(protocol, fs=keytools.filesystem(), **options)
    else:
        cached = fsspec.filesystem(protocol, fs=fsspec.filesystem("file"), **options)
        filesystem = keytools.filesystem(filesystem=cached)
    for _ in range(2):
        with filesystem.open(f"{tmp_path}/x.parquet", "rb") as file:
            assert pq.read_table(file).equals(TABLE)
        assert pq.read_table(f"{tmp_path}/x.parquet", filesystem=filesystem).equals(TABLE)


@pytest.mark.parametrize("place", ["memory", "subtree of memory", "local"])
def test_a_cache_that_checks_files_notices_a_new_one(tmp_path: Path, keytools: Keytools, place: str) -> None:
    memory = MemoryFileSystem()
    name = f"{tmp_path}/x.parquet"
    below: Any = {
        "memory": memory,
        "subtree of memory": pafs.SubTreeFileSystem("/sub", pafs.PyFileSystem(pafs.FSSpecHandler(memory))),
        "local": None,
    }[place]
    filesystem = keytools.filesystem(filesystem=below)
    seen = []
    for value in (1, 2):
        filesystem.makedirs(str(tmp_path), exist_ok=True)
        pq.write_table(pa.table({"x": [value]}), name, filesystem=filesystem)
        cache = fsspec.filesystem(
            "filecache",
            fs=filesystem,
            check_files=True,
            cache_storage=str(tmp_path / "cache"),
            skip_instance_cache=True,
        )
        assert pq.read_table(cache.open(name))["x"].to_pylist() == [value]
        seen.append((filesystem.ukey(name), filesystem.modified(name)))
    assert all(before != after for before, after in zip(*seen, strict=True))


@pytest.mark.parametrize("below", ["memory", "file"])
def test_delete_matching_makes_a_data_set_that_was_not_there(
    tmp_path: Path, keytools: Keytools, below: str
) -> None:
    filesystem = keytools.filesystem(filesystem=fsspec.filesystem(below))
    for _ in range(2):
        pq.write_to_dataset(
            pa.table({"x": [1, 2], "part": ["a", "b"]}),
            f"{tmp_path}/set",
            partition_cols=["part"],
            filesystem=filesystem.arrow,
            existing_data_behavior="delete_matching",
        )
    assert len(filesystem.find(f"{tmp_path}/set")) == 2


def test_urls_of_chains(tmp_path: Path, keytools: Keytools) -> None:
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": {"footer": "MDEyMzQ1Njc4OTAxMjM0NQ=="}},
        "tables": {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
    }
    tools = Keytools.from_mapping(document)
    (tmp_path / "deep").mkdir()
    tools.write_table(TABLE, tmp_path / "deep/x.parquet")
    tools.write_table(TABLE, "/deep/x.parquet", filesystem=MemoryFileSystem())
    for url in (
        f"keytools://x.parquet::file://{tmp_path}/deep",
        f"keytools://deep/x.parquet::{tmp_path.as_uri()}",
        "keytools://x.parquet::memory://deep",
        f"keytools://x.parquet::dir://deep::file://{tmp_path}",
        f"blockcache::keytools://x.parquet::file://{tmp_path}/deep",
        f"simplecache::keytools://x.parquet::file://{tmp_path}/deep",
    ):
        options: dict[str, Any] = {"keytools": {"config": document}}
        for cache in ("blockcache", "simplecache"):
            options[cache] = {"cache_storage": str(tmp_path / cache)}
        used = {name: value for name, value in options.items() if f"{name}:" in url}
        with fsspec.open(url, "rb", **used) as file:
            assert pq.read_table(file).equals(TABLE), url


@pytest.mark.parametrize("place", ["none", "subtree", "memory", "dir", "local of fsspec"])
def test_copies_by_pickle_are_equal(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOOTER", "MDEyMzQ1Njc4OTAxMjM0NQ==")
    configuration = tmp_path / "keytools.yaml"
    configuration.write_text(
        "{version: 1, kms: {type: in_memory, keys: {footer: '${FOOTER}'}}, "
        "tables: {t: {footer_key: footer, unlisted_columns: footer_key}}}"
    )
    keytools = Keytools.from_yaml(configuration)
    make, start = PLACES[place]
    below = make(tmp_path)
    begin = start.format(tmp=tmp_path)
    filesystem = keytools.filesystem(filesystem=below)
    pq.write_table(TABLE, f"{begin}x.parquet", filesystem=filesystem)
    again = pickle.loads(pickle.dumps(filesystem))
    assert again == filesystem and hash(again) == hash(filesystem) and type(again) is type(filesystem)
    assert again.arrow == filesystem.arrow and keytools.filesystem(filesystem=below) == filesystem
    assert pickle.loads(pickle.dumps(again)) == filesystem
    assert again != keytools.filesystem(filesystem=pafs._MockFileSystem()) and again != keytools.view(tmp_path)
    view = keytools.view(begin or "/", filesystem=below)
    assert pickle.loads(pickle.dumps(view)) == view != filesystem
    assert view != keytools.view(f"{begin}x.parquet", filesystem=below)
    with again.open(f"{begin}x.parquet") as file:
        assert pq.ParquetFile(file).metadata.num_rows == 3


class Interrupted(LocalFileSystem):
    """A local file system in which another thread acts while the folder `set` is looked up."""

    meanwhile: Callable[[], None] | None = None

    def info(self, path: str, **options: Any) -> Any:
        try:
            return super().info(path, **options)
        finally:
            if path.endswith("/set") and self.meanwhile is not None:
                task, self.meanwhile = self.meanwhile, None
                task()


@pytest.mark.parametrize("action", ["open", "mkdir"])
def test_threads_begin_partitions_of_a_new_folder_together(
    tmp_path: Path, keytools: Keytools, action: str
) -> None:
    below = Interrupted(skip_instance_cache=True)
    filesystem = keytools.filesystem(filesystem=below)
    for part in "ab":
        filesystem.mkdir(f"{tmp_path}/set/part={part}")

    def write(part: str) -> None:
        pq.write_table(TABLE.select(["x"]), f"{tmp_path}/set/part={part}/x.parquet", filesystem=filesystem)

    below.meanwhile = lambda: write("a")
    if action == "open":
        write("b")
    else:
        filesystem.mkdir(f"{tmp_path}/set/part=c", create_parents=False)
        write("c")
    assert below.meanwhile is None
    assert len(in_tree(tmp_path)) == 2
