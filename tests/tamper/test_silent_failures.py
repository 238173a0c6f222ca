"""Failures that would be silent: lost files, values in plaintext, checks that do not happen."""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.encryption import file_rewriter
from parquet_keytools.errors import (
    AadPrefixError,
    ColumnAccessDeniedError,
    ConfigurationError,
    KeytoolsError,
    OutputError,
)
from parquet_keytools.files import placement
from parquet_keytools.format.file_layout import read_footer_bytes
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.storage.locations import BufferSource, FileLocation
from parquet_keytools.tables import file_systems

TABLE = pa.table({"a": [1, 2, 3, 4], "secret": ["x", None, "yy", "z"], "part": ["p", "q", "p", "q"]})


def keytools(kms: Any = None, **table: Any) -> Keytools:
    settings = {"footer_key": "kf", "column_keys": {"kc": ["secret"]}, "unlisted_columns": "plaintext"} | table
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "kc"]}, "tables": {"t": settings}}
    return Keytools(parse_configuration(document), kms=kms)


@pytest.mark.parametrize("settings", [{}, {"aad_prefix": "p"}, {"key_material": "external"}])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_replaced_data_set_is_there(tmp_path: Path, where: str, settings: dict[str, str]) -> None:
    """fsspec lists paths in another form than the given one: the new files were deleted as old ones."""
    tools = keytools(**settings)
    filesystem = fsspec.filesystem(where)
    folder = "out" if where == "memory" else str(tmp_path / "out")
    for _ in range(2):
        tools.write_dataset(
            TABLE,
            folder,
            partitioning=["part"],
            filesystem=filesystem,
            existing_data_behavior="delete_matching",
        )
        assert tools.read_table(folder, filesystem=filesystem).num_rows == 4
    filesystem.rm(folder, recursive=True)


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    """fsspec's own move treats them as patterns."""
    filesystem = fsspec.filesystem("memory")
    for name in ("/x*.parquet", "/x[1].parquet"):
        assert keytools().write_table(TABLE, name, filesystem=filesystem).size_bytes == filesystem.size(name)


class Uploads(MemoryFileSystem):
    """A store that uploads a file when it is closed, from the buffers that were written."""

    protocol = "uploads"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        # The class's buffers are shared by all instances.
        self.store, self.pseudo_dirs = {}, [""]  # type: ignore[misc]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode, **options) if mode == "rb" else Upload(self, self._strip_protocol(path))


class Upload(io.RawIOBase):
    """A file that is written to such a store."""

    def __init__(self, store: Uploads, path: str) -> None:
        super().__init__()
        self._store, self._path, self._kept = store, path, list[Any]()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._kept.append(data)
        return len(memoryview(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            MemoryFile(self._store, self._path, b"".join(self._kept)).commit()


def by_pyarrow(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    assert tools.write_table(pq.read_table(plain), path, filesystem=uploads, row_group_size=1).engine == "pyarrow"


def by_the_module_encryptor(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    prefixed = keytools(tools.kms, aad_prefix="p")
    written = prefixed.write_table(pq.read_table(plain), path, filesystem=uploads, row_group_size=1)
    assert written.engine == "module encryptor"


def as_a_data_set(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    tools.write_dataset(pq.read_table(plain), path, filesystem=uploads, max_rows_per_group=1)


def through_a_view(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    with tools.filesystem(filesystem=uploads).open(path, "wb") as file:
        file.write(plain.read_bytes())


def encrypted(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    tools.encrypt_file(plain, path, target_filesystem=uploads)


def rekeyed(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    tools.encrypt_file(plain, plain.parent / "x")
    tools.rekey_file(plain.parent / "x", path, target_filesystem=uploads)


def decrypted(tools: Keytools, path: str, plain: Path, uploads: Uploads) -> None:
    tools.encrypt_file(plain, plain.parent / "x")
    tools.decrypt_file(plain.parent / "x", path, target_filesystem=uploads)


WRITERS = (by_pyarrow, by_the_module_encryptor, as_a_data_set, through_a_view, encrypted, rekeyed, decrypted)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_store_that_keeps_buffers_gets_bytes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Keytools, str, Path, Uploads], None]
) -> None:
    """The buffer of one part was refilled with the next part, and a multipart upload sent that."""
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", 200)
    tools, uploads, plain = keytools(), Uploads(), tmp_path / "plain.parquet"
    pq.write_table(TABLE, plain, row_group_size=1)
    write(tools, "/written.parquet", plain, uploads)
    if write is decrypted:
        assert pq.read_table(pa.BufferReader(uploads.cat_file("/written.parquet"))).equals(TABLE)
        return
    reader = keytools(tools.kms, aad_prefix="p") if write is by_the_module_encryptor else tools
    found = reader.read_table("/written.parquet", filesystem=uploads)
    # The threads of pyarrow write the batches of a data set in any order, unless `preserve_order` is set.
    assert (found.sort_by("a") if write is as_a_data_set else found).equals(TABLE)
    assert reader.verify_folder("/written.parquet", filesystem=uploads).conforms


def test_two_writers_of_one_file_with_external_key_material(tmp_path: Path) -> None:
    """Parquet file and key material of different writers do not fit together."""
    for prefix in (None, "p"):
        tools = keytools(key_material="external", **({"aad_prefix": prefix} if prefix else {}))
        for number in range(8):
            path = tmp_path / f"{prefix}{number}.parquet"
            start = threading.Barrier(4)

            def write(path: Path = path, start: threading.Barrier = start, tools: Keytools = tools) -> None:
                start.wait()
                try:
                    tools.write_table(TABLE, path)
                except OutputError as error:
                    assert "written by another process" in str(error)

            threads = [threading.Thread(target=write) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert tools.read_table(path).equals(TABLE)


def test_partitioning_by_unlisted_columns_is_told(tmp_path: Path) -> None:
    tools = keytools(unlisted_columns="footer_key")
    with pytest.warns(UserWarning, match="'part' would be in the names of folders"):
        tools.write_dataset(TABLE, tmp_path / "d", partitioning=["part"])


def test_no_size_statistics_in_a_plaintext_footer(tmp_path: Path) -> None:
    """Arrow leaves the number of nulls and the lengths of strings there."""
    path = tmp_path / "x.parquet"
    keytools(plaintext_footer=True).write_table(TABLE, path)
    metadata, _ = FileMetaData.read(read_footer_bytes(BufferSource("x", path.read_bytes())).data)
    visible = metadata.row_groups[0].columns[1].meta_data
    assert visible is not None and not {12, 13, 14, 15, 16, 17} & visible.struct.fields.keys()


def test_collectors_of_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metadata_collector"):
        keytools().write_table(TABLE, tmp_path / "x.parquet", metadata_collector=[])
    with pytest.raises(TypeError, match="file_visitor"):
        keytools().write_dataset(TABLE, tmp_path / "d", file_visitor=print)
    assert list(tmp_path.iterdir()) == []


def test_write_options_that_pyarrow_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    """Older versions have fewer of them."""
    refused = pytest.raises(TypeError, match="no_such_option")
    with refused:
        keytools().write_table(TABLE, tmp_path / "x.parquet", no_such_option=1)
    with refused:
        keytools().write_dataset(TABLE, tmp_path / "d", write_options={"no_such_option": 1})
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_folder_are_not_dropped(tmp_path: Path) -> None:
    tools = keytools()
    tools.write_dataset(TABLE, tmp_path / "d")
    with pytest.raises(TypeError, match="bogus"):
        tools.read_table(tmp_path / "d", bogus=1)


def test_a_renamed_file_where_every_table_has_a_prefix(tmp_path: Path) -> None:
    table = {"footer_key": "kf", "column_keys": {"kc": ["secret"]}, "unlisted_columns": "plaintext"}
    tools = Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["kf", "kc"]},
            "tables": {
                "t": table | {"aad_prefix": "t/{file_name}"},
                "u": table | {"aad_prefix": "u/{file_name}"},
            },
        }
    )
    tools.write_table(TABLE, tmp_path / "x.parquet", table_name="u")
    assert tools.read_table(tmp_path / "x.parquet", table_name="u").equals(TABLE)
    with pytest.raises(AadPrefixError, match="another AAD prefix"):
        tools.read_table(tmp_path / "x.parquet", table_name="t")
    (tmp_path / "x.parquet").rename(tmp_path / "y.parquet")
    with pytest.raises(AadPrefixError, match="another AAD prefix"):
        tools.read_table(tmp_path / "y.parquet", table_name="u")
    with pytest.raises(ConfigurationError, match="there are 2 tables"):
        tools.read_table(tmp_path / "y.parquet")


def test_named_columns_are_columns(tmp_path: Path) -> None:
    """An unknown name let any column through, and Arrow aborts on a column whose key is refused."""
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert isinstance(tools.kms, InMemoryKms)
    tools.kms.deny("kc")
    tools.clear_caches()
    with pytest.raises(TypeError):
        tools.decryption_properties(tmp_path / "x.parquet", columns="secret")
    with pytest.raises(ValueError, match="'secrt'"):
        tools.decryption_properties(tmp_path / "x.parquet", columns=["secrt"])
    with pytest.raises(ColumnAccessDeniedError):
        tools.decryption_properties(tmp_path / "x.parquet", columns=["secret"])
    properties = tools.decryption_properties(tmp_path / "x.parquet", columns=["a"])
    assert pq.read_table(tmp_path / "x.parquet", columns=["a"], decryption_properties=properties).num_rows == 4


def test_the_damaged_page_of_a_folder_is_named(tmp_path: Path) -> None:
    tools = keytools(unlisted_columns="footer_key")
    tools.write_dataset(TABLE, tmp_path / "d")
    (path,) = (tmp_path / "d").iterdir()
    data = path.read_bytes()
    noticed = []
    for offset in range(len(data) // 8, len(data) // 2, 7):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        try:
            # The KMS named in a file is informational, and not authenticated.
            assert tools.read_table(tmp_path / "d").equals(TABLE)
        except KeytoolsError as error:
            noticed.append(getattr(error, "module_type", None))
    assert {"data page", "dictionary page"} & set(noticed), noticed


def test_what_a_late_link_leads_to_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed folder is replaced by another one before its files are deleted."""
    tools, elsewhere, folder = keytools(), tmp_path / "elsewhere", tmp_path / "d"
    for place in (elsewhere, folder):
        tools.write_dataset(TABLE, place, partitioning=["part"], basename_template="old-{i}.parquet")
    put = file_systems.put_all_in_place

    def swap(outputs: Any, **options: Any) -> None:
        put(outputs, **options)
        (folder / "part=q").rename(tmp_path / "moved")
        (folder / "part=q").symlink_to(elsewhere / "part=q")

    monkeypatch.setattr(file_systems, "put_all_in_place", swap)
    with pytest.raises(OutputError, match=r"part=q/old-0\.parquet is not removed: 'part=q' is a link"):
        tools.write_dataset(TABLE, folder, partitioning=["part"], existing_data_behavior="delete_matching")
    assert tools.read_table(elsewhere / "part=q" / "old-0.parquet", partitioning=None).num_rows == 2


@pytest.mark.parametrize("key_material", ["external", "internal"])
def test_key_material_stays_in_the_folder_of_its_file(
    tmp_path: Path, key_material: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who could move the folder could have another file's key material replaced: that file was lost."""
    tools, elsewhere, folder = keytools(key_material="external"), tmp_path / "elsewhere", tmp_path / "d"
    for place in (elsewhere, folder):
        place.mkdir()
        tools.write_table(TABLE, place / "x.parquet")
    sync, swapped = placement.sync_folder, []

    def swap(target: FileLocation) -> None:
        sync(target)
        if not swapped:
            swapped.append(folder.rename(tmp_path / "moved"))
            folder.symlink_to(elsewhere)

    monkeypatch.setattr(placement, "sync_folder", swap)
    # With internal key material, the old file's key material is removed.
    tools = keytools(tools.kms, key_material=key_material)
    with pytest.raises(OutputError, match=r"folder of .*_KEY_MATERIAL_FOR_x.* was moved"):
        tools.write_table(TABLE, folder / "x.parquet")
    assert tools.read_table(elsewhere / "x.parquet").equals(TABLE)
    assert tools.read_table(tmp_path / "moved" / "x.parquet").equals(TABLE)
