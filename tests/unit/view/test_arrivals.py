"""Files that arrive through `filesystem()` are encrypted or refused, and a refused file leaves nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError, KeytoolsError, OutputError
from parquet_keytools.kms.in_memory import InMemoryKms

TABLE = pa.table({"a": [1, 2], "b": ["canary-1", "canary-2"]})


def tools(kms: InMemoryKms | None = None, *, reading: dict[str, Any] | None = None, **settings: Any) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"kb": ["b"]}, "unlisted_columns": "footer_key", **settings}
    document = {"version": 1, "tables": {"t": table}, "reading": reading or {}}
    return Keytools.from_mapping(document, kms=kms or InMemoryKms(dict.fromkeys(("kf", "kb"))))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder `stage` with files that must not arrive in `lake` unchanged."""
    (tmp_path / "stage/deep").mkdir(parents=True)
    (tmp_path / "lake").mkdir()
    pq.write_table(TABLE, tmp_path / "stage/plain.parquet")
    pq.write_table(TABLE, tmp_path / "stage/deep/plain.parquet")
    pq.write_table(TABLE, tmp_path / "stage/_metadata")
    (tmp_path / "stage/rows.csv").write_text("a,b\n1,canary-1\n")
    (tmp_path / "stage/rows.json").write_text('{"b": "canary-1"}')
    (tmp_path / "stage/_KEY_MATERIAL_FOR_plain.parquet.json").write_text('{"b": "canary-1"}')
    (tmp_path / "stage/.rows.parquet").write_text("canary-1")
    (tmp_path / "stage/empty.parquet").write_bytes(b"")
    return tmp_path


NAMES = [
    "plain.parquet",
    "_metadata",
    "rows.csv",
    "rows.json",
    "_KEY_MATERIAL_FOR_plain.parquet.json",
    ".rows.parquet",
    "empty.parquet",
    "deep",
    "",
]


def put(filesystem: Any, old: str, new: str) -> None:
    filesystem.put(old, new, recursive=True)


def as_is(filesystem: Any, old: str, new: str) -> None:
    filesystem.pipe_file(new, Path(old).read_bytes())


def appended(filesystem: Any, old: str, new: str) -> None:
    with filesystem.arrow.open_append_stream(new) as stream:
        stream.write(Path(old).read_bytes())


def streamed(filesystem: Any, old: str, new: str) -> None:
    with filesystem.arrow.open_output_stream(new) as stream:
        stream.write(Path(old).read_bytes())


Way = Callable[[Any, str, str], Any]
# Without threads: after one file has failed, they would continue with the others for a moment.
WAYS: dict[str, Way] = {
    "cp": lambda filesystem, old, new: filesystem.cp(old, new, recursive=True),
    "copy": lambda filesystem, old, new: filesystem.copy(old, new, recursive=True),
    "cp_file": lambda filesystem, old, new: filesystem.cp_file(old, new),
    "mv": lambda filesystem, old, new: filesystem.mv(old, new, recursive=True),
    "move": lambda filesystem, old, new: filesystem.move(old, new),
    "rename": lambda filesystem, old, new: filesystem.rename(old, new),
    "put": put,
    "upload": lambda filesystem, old, new: filesystem.upload(old, new, recursive=True),
    "put_file": lambda filesystem, old, new: filesystem.put_file(old, new),
    "pipe": as_is,
    "append": appended,
    "stream": streamed,
    "append by open": lambda filesystem, old, new: filesystem.open(new, "ab").write(Path(old).read_bytes()),
    "update by open": lambda filesystem, old, new: filesystem.open(new, "r+b").write(Path(old).read_bytes()),
    "text": lambda filesystem, old, new: filesystem.write_text(new, "canary-1"),
    "touch": lambda filesystem, old, new: filesystem.touch(new),
    "mapper": lambda filesystem, old, new: filesystem.get_mapper(str(Path(new).parent)).__setitem__(
        Path(new).name, Path(old).read_bytes()
    ),
    "arrow's move": lambda filesystem, old, new: filesystem.arrow.move(old, new),
    "arrow's copy": lambda filesystem, old, new: filesystem.arrow.copy_file(old, new),
    "copy_files": lambda filesystem, old, new: pafs.copy_files(
        old, new, source_filesystem=filesystem.arrow, destination_filesystem=filesystem.arrow, use_threads=False
    ),
    "copy_files from elsewhere": lambda filesystem, old, new: pafs.copy_files(
        old,
        new,
        source_filesystem=pafs.LocalFileSystem(),
        destination_filesystem=filesystem.arrow,
        use_threads=False,
    ),
}


def is_soon_empty(folder: Path) -> bool:
    end = time.monotonic() + 10
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    return list(folder.iterdir()) == []


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plaintext_files", ["reject", "allow"])
def test_nothing_arrives_in_plaintext(places: Path, way: str, plaintext_files: str) -> None:
    keytools = tools(reading={"plaintext_files": plaintext_files})
    filesystem = keytools.filesystem()
    for name in NAMES:
        new = places / "lake/sub/deeper" / (name or "all")
        refused = False
        try:
            WAYS[way](filesystem, str(places / "stage" / name), str(new))
        except (KeytoolsError, OSError, ValueError, NotImplementedError):
            refused = True
        for path in files_in(places / "lake"):
            content = path.read_bytes()
            assert b"canary" not in content and b"PAR1" not in content[-4:], (name, path)
            assert content[-4:] == b"PARE" or (not content and path.name.startswith("_")), (name, path)
            assert keytools.verify_file(path).conforms
            path.unlink()
        # fsspec's mapper creates folders itself, before it writes.
        if refused and name not in ("", "deep") and way != "mapper":
            assert is_soon_empty(places / "lake"), name
        # Arrow may still remove its folders.
        shutil.rmtree(places / "lake", ignore_errors=True)
        (places / "lake").mkdir(exist_ok=True)
    kept = {path.relative_to(places / "stage").as_posix() for path in files_in(places / "stage")}
    assert kept >= {name for name in NAMES if name not in ("", "deep")}


SETTINGS: list[dict[str, Any]] = [{}, {"aad_prefix": "{file_name}"}, {"key_material": "external"}]
KINDS = ["filesystem", "view", "memory"]


@pytest.mark.parametrize(
    ("way", "settings", "kind"),
    [
        (way, settings, kind)
        for row, way in enumerate(["cp_file", "cp", "mv", "arrow's move", "arrow's copy", "copy_files"])
        for column, settings in enumerate(SETTINGS)
        for number, kind in enumerate(KINDS)
        if SOAK or (row + column) % 3 == number
    ],
)
def test_an_encrypted_file_is_itself_in_its_new_place(
    tmp_path: Path, way: str, settings: dict[str, Any], kind: str
) -> None:
    keytools = tools(**settings)
    below = fsspec.filesystem("memory") if kind == "memory" else None
    start = f"/{tmp_path.name}/" if kind == "memory" else f"{tmp_path}/"
    filesystem: Any = keytools.filesystem(filesystem=below)
    filesystem.makedirs(f"{start}other")
    if kind == "view":
        filesystem, start = keytools.view(tmp_path), ""
    names = ["old.parquet", "new.parquet", "other/old.parquet"]
    filesystem.pipe_file(f"{start}old.parquet", _plain())
    for old, new in zip(names, [*names[1:], "other/last.parquet"], strict=True):
        WAYS[way](filesystem, f"{start}{old}", f"{start}{new}")
        with filesystem.open(f"{start}{new}") as file:
            assert pq.read_table(file).equals(TABLE)
        assert filesystem.exists(f"{start}{old}") is ("mv" not in way and "move" not in way)
    root = f"/{tmp_path.name}" if kind == "memory" else str(tmp_path)
    # All files together: none shares keys with another one.
    read = keytools.read_table(root, filesystem=below)
    count = len([name for name in filesystem.find(start) if name.endswith(".parquet")])
    assert read.num_rows == 2 * count
    materials = [name for name in filesystem.find(start) if "_KEY_MATERIAL_FOR_" in name]
    assert len(materials) == (count if "key_material" in settings else 0)


def _plain() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return bytes(sink.getvalue())


def test_folders_are_copied_with_keys_and_marks_and_not_moved(tmp_path: Path) -> None:
    keytools = tools(key_material="external")
    filesystem = keytools.filesystem()
    keytools.write_dataset(TABLE, tmp_path / "set/deep")
    filesystem.touch(f"{tmp_path}/set/_SUCCESS")
    filesystem.cp(f"{tmp_path}/set", f"{tmp_path}/copy", recursive=True)
    for move in (filesystem.mv, filesystem.arrow.move):
        with pytest.raises(OutputError, match="in the file system below"):
            move(f"{tmp_path}/set", f"{tmp_path}/moved")
    (tmp_path / "copy").rename(tmp_path / "moved")
    for folder in ("set", "moved"):
        assert keytools.read_table(tmp_path / folder).equals(TABLE)
        assert (tmp_path / folder / "_SUCCESS").exists()
        assert len(files_in(tmp_path / folder)) == 3


def test_key_material_is_not_moved_from_its_file(tmp_path: Path) -> None:
    keytools = tools(key_material="external")
    keytools.write_table(TABLE, tmp_path / "x.parquet")
    with pytest.raises(OutputError, match="is not moved"):
        keytools.filesystem().mv(f"{tmp_path}/_KEY_MATERIAL_FOR_x.parquet.json", f"{tmp_path}/y.json")
    assert keytools.read_table(tmp_path / "x.parquet").equals(TABLE)


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
@pytest.mark.parametrize("way", ["cp_file", "mv"])
def test_a_copy_lacks_no_column(tmp_path: Path, denied_columns: str, way: str) -> None:
    kms = InMemoryKms(dict.fromkeys(("kf", "kb")))
    reading = {"denied_columns": denied_columns}
    writer = tools(kms, aad_prefix="{file_name}")
    writer.write_table(TABLE, tmp_path / "old.parquet")
    kms.deny("kb")
    filesystem = tools(kms, reading=reading, aad_prefix="{file_name}").filesystem()
    with pytest.raises(ColumnAccessDeniedError, match="b"):
        WAYS[way](filesystem, f"{tmp_path}/old.parquet", f"{tmp_path}/new.parquet")
    assert files_in(tmp_path) == [tmp_path / "old.parquet"]


@pytest.mark.parametrize("way", ["cp_file", "mv", "put_file", "rename"])
def test_values_under_a_key_do_not_become_names_of_folders(tmp_path: Path, way: str) -> None:
    keytools = tools()
    keytools.write_table(TABLE, tmp_path / "old.parquet")
    with pytest.raises(ConfigurationError, match="names of folders"):
        WAYS[way](keytools.filesystem(), f"{tmp_path}/old.parquet", f"{tmp_path}/lake/b=canary/new.parquet")
    assert files_in(tmp_path) == [tmp_path / "old.parquet"] and not (tmp_path / "lake").exists()


def test_a_file_of_another_table_does_not_arrive(tmp_path: Path) -> None:
    kms = InMemoryKms(dict.fromkeys(("kf", "kb", "other")))
    table = {"footer_key": "kf", "column_keys": {"kb": ["b"]}, "unlisted_columns": "footer_key"}
    document = {
        "version": 1,
        "tables": {"t": table, "u": {"footer_key": "other", "unlisted_columns": "footer_key"}},
    }
    keytools = Keytools.from_mapping(document, kms=kms)
    keytools.write_table(TABLE, tmp_path / "u.parquet", table_name="u")
    (tmp_path / "lake").mkdir()
    for way in ("cp_file", "mv"):
        with pytest.raises(KeytoolsError):
            WAYS[way](keytools.filesystem("t"), f"{tmp_path}/u.parquet", f"{tmp_path}/lake/u.parquet")
    assert files_in(tmp_path) == [tmp_path / "u.parquet"]


def test_a_copy_onto_itself_and_a_move_onto_itself(tmp_path: Path) -> None:
    keytools = tools(key_material="external")
    path = f"{tmp_path}/x.parquet"
    keytools.write_table(TABLE, path)
    filesystem = keytools.filesystem()
    for way in (filesystem.cp_file, filesystem.mv):
        with pytest.raises(OutputError):
            way(path, path)
    assert keytools.read_table(path).equals(TABLE) and len(files_in(tmp_path)) == 2


def test_a_copy_by_its_bytes_can_be_copied_so_again(tmp_path: Path) -> None:
    keytools = tools(aad_prefix="{file_name}")
    filesystem = keytools.filesystem()
    keytools.write_table(TABLE, tmp_path / "0.parquet", data_page_version="2.0", write_page_checksum=True)
    for number in range(4):
        data = filesystem.cat_file(f"{tmp_path}/{number}.parquet")
        assert pq.read_table(pa.BufferReader(data)).equals(TABLE)
        filesystem.pipe_file(f"{tmp_path}/{number + 1}.parquet", data)
        assert keytools.verify_file(tmp_path / f"{number + 1}.parquet").conforms
    assert keytools.read_table(tmp_path).num_rows == 10
