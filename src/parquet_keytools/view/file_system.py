"""The fsspec file system `keytools`: what is written through it is encrypted, and what is read is decrypted."""

from __future__ import annotations

import datetime
import errno
import inspect
import logging
import os
import secrets
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, Protocol

import fsspec
from pyarrow import fs as pafs

from parquet_keytools.errors import KEY_REFUSALS, FolderNameError, KeytoolsError, KmsError, OutputError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.plaintext_spool import SpoolRoom
from parquet_keytools.keys.material_store import remove_key_materials
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.storage.listing import is_utf8
from parquet_keytools.storage.locations import FileLocation, PathLike, key_material_location
from parquet_keytools.storage.locks import exclusive_folder
from parquet_keytools.storage.made_folders import MadeFolders
from parquet_keytools.storage.printable import escaped_path
from parquet_keytools.storage.walk import infos_in
from parquet_keytools.view.encrypted_output import EncryptedOutput, refuse_partition_folders
from parquet_keytools.view.plain_files import PlainFiles, PlainInput

_log = logging.getLogger(__name__)

_TYPES = {pafs.FileType.Directory: "directory", pafs.FileType.File: "file"}


class _MakesFileSystems(Protocol):
    """`Keytools`, as far as file systems know it."""

    def filesystem(self, table_name: str | None = None, filesystem: Any = None) -> KeytoolsFileSystem: ...
    def view(self, path: FileLocation, *, table_name: str | None = None) -> KeytoolsFileSystem: ...


class KeytoolsFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Stands in front of another file system, whose Parquet files are encrypted.

    Whoever writes a plain Parquet file through it, be it pyarrow, pandas, Polars, Dask, Ray or DuckDB, gets a file
    that is encrypted as its table says, with keys of its own. Nothing else than Parquet can be written.

    Whoever reads an encrypted file through it sees a plain one, decrypted as it is read, of the same length unless
    columns are shown as digests.

    It may be pickled, as `Keytools` may.
    """

    protocol = "keytools"
    root_marker = "/"
    cachable = False

    def __init__(
        self,
        keytools: _MakesFileSystems,
        keys: KeyService,
        table_name: str | None = None,
        filesystem: Any = None,
        root: PathLike | FileLocation | None = None,
    ) -> None:
        """Make one.

        Args:
            keytools: What it is of, and what is pickled with it.
            keys: Of the configuration.
            table_name: The table of all files; None where the configuration has only one.
            filesystem: The `pyarrow.fs` or fsspec file system in which they lie; None for the local one.
            root: The folder, or the only file, that paths begin at; None for the root of the file system.
        """
        super().__init__()
        self._keytools = keytools
        self._pickled_as = secrets.token_hex(16)
        self._keys = keys
        self._table_name = table_name
        self._root = FileLocation.resolve("/" if root is None else root, filesystem)
        self._is_rooted = root is not None
        self._files = PlainFiles(keys, table_name, is_one_folder=self._is_rooted)
        self._made = MadeFolders(self._root.filesystem)
        self._room: tuple[int, SpoolRoom] | None = None
        share_with_arrow(self)

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._root if self._is_rooted else None
        return _restored, (self._pickled_as, self._keytools, self._table_name, self._root.filesystem, root)

    # fsspec keeps what a file system was made with, and shows and serialises it: here it may be a configuration.

    @property
    def storage_args(self) -> tuple[Any, ...]:
        """What it was made with by position, without the secrets of a configuration."""
        return self._storage_args

    @storage_args.setter
    def storage_args(self, arguments: tuple[Any, ...]) -> None:
        self._storage_args = tuple(map(self._without_secrets, arguments))

    @property
    def storage_options(self) -> dict[str, Any]:
        """What it was made with by name, without the secrets of a configuration."""
        return self._storage_options

    @storage_options.setter
    def storage_options(self, options: dict[str, Any]) -> None:
        config = {"config": self._without_secrets(options["config"])} if "config" in options else {}
        self._storage_options = {**options, **config}

    def _without_secrets(self, argument: Any) -> Any:
        source = self._keys.configuration.source
        return source.shown if source is not None and isinstance(argument, Mapping) else argument

    @cached_property
    def arrow(self) -> pafs.PyFileSystem:
        """The same as a `pyarrow.fs` file system."""
        return pafs.PyFileSystem(_RootedHandler(self) if self._is_rooted else pafs.FSSpecHandler(self))

    # --- Files ---------------------------------------------------------------------------------------------

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Open a file: `rb`, which decrypts what is read, or `wb` and `xb`, which encrypt when it is closed."""
        location = self._location(path)
        if mode == "rb":
            return PlainInput(
                self._files.open(location),
                partial(self.open, path),
                whole_row_groups=_is_opened_by_duckdb(inspect.currentframe()),
            )
        if mode not in ("wb", "xb"):
            raise OutputError(
                f"{location} is not opened with mode {mode!r}: a Parquet file is written as a whole.",
                hint="Use the mode 'wb'.",
            )
        table_name, _ = self._keys.configuration.select_table(self._table_name)
        return EncryptedOutput(
            self._keys,
            table_name,
            location,
            self._room_for(location),
            overwrite=mode == "wb",
            commits_on_close=autocommit,
            # Engines make folders named after values, and leave them behind when a file in them is refused.
            on_discarded=partial(self._made.remove_empty, location.path),
        )

    def _room_for(self, location: FileLocation) -> SpoolRoom:
        """Return where plaintext is collected: one room for all files that this process writes."""
        if self._room is None or self._room[0] != os.getpid():
            self._room = (os.getpid(), SpoolRoom(location))
        return self._room[1]

    def _location(self, path: str) -> FileLocation:
        text = str(self._strip_protocol(path))
        if not self._is_rooted:
            return FileLocation.resolve(text if self._root.is_local else text.lstrip("/"), self._root.filesystem)
        parts = PurePosixPath(text.strip("/")).parts
        if not is_utf8(text):
            raise OSError(errno.EILSEQ, "this name is not valid UTF-8: rename it", escaped_path(text))
        location = self._root.child("/".join(parts)) if parts else self._root
        if ".." in parts or "\0" in text or not self._is_within(location):
            raise PermissionError(f"{path!r} is outside of {self._root}")
        return location

    def _is_within(self, location: FileLocation) -> bool:
        """Return whether a file is below the root, wherever links lead."""
        if not self._root.is_local:
            return True
        return Path(os.path.realpath(location.path)).is_relative_to(os.path.realpath(self._root.path))

    def _as_dict(self, info: pafs.FileInfo) -> dict[str, Any]:
        path = PurePosixPath(info.path)
        if self._is_rooted:
            path = path.relative_to(self._root.path)
        return {
            "name": "" if path == PurePosixPath() else str(path),
            "size": self._size(info),
            # Neither is a pipe, a socket or a device; nobody opens one here.
            "type": _TYPES.get(info.type, "other"),
            "created": info.mtime,
            "modified": info.mtime,
        }

    def _size(self, info: pafs.FileInfo) -> int:
        """Return the length of a file as it is read: with digests it is longer than it is stored."""
        if info.type == pafs.FileType.File and self._keys.configuration.reading.denied_columns == "hash":
            try:
                return self._files.open(FileLocation(self._root.filesystem, info.path)).size_bytes
            except KeytoolsError as error:
                # A file that cannot be opened does not hide those beside it.
                if isinstance(error, KmsError) and not isinstance(error, KEY_REFUSALS):
                    raise
        return info.size or 0

    # --- Folders: as they are in the file system below -----------------------------------------------------

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return what is known of a file or folder: name, size, type, created and modified.

        Raises:
            FolderNameError: It is a file whose folders give values to its protected columns.
        """
        found = self._found(self._location(path))
        self._refuse_misplaced(found)
        return self._as_dict(found)

    def _refuse_misplaced(self, info: pafs.FileInfo) -> None:
        if info.type == pafs.FileType.File:
            self._files.refuse_misplaced(info, FileLocation(self._root.filesystem, info.path))

    def _may_be_listed(self, info: pafs.FileInfo) -> bool:
        try:
            self._refuse_misplaced(info)
        except FolderNameError as error:
            # A file that may not be opened does not hide those beside it.
            _log.warning("not listed: %s", error)
            return False
        return True

    def _found(self, location: FileLocation) -> pafs.FileInfo:
        """Return what is known of a file or folder that is there."""
        info = location.info()
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(f"there is no file or folder {location}")
        return info

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what is in a folder, by name; see `infos_in` for names that are not UTF-8."""
        location = self._location(path)
        found = self._found(location)
        if found.type == pafs.FileType.Directory:
            infos = [info for info in infos_in(location) if self._may_be_listed(info)]
        else:
            self._refuse_misplaced(found)
            infos = [found]
        entries = sorted(map(self._as_dict, infos), key=lambda entry: str(entry["name"]))
        return entries if detail else [entry["name"] for entry in entries]

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = None, **options: Any
    ) -> Any:
        """Yield what is in a folder and below; with fsspec, a folder that cannot be listed is an empty one."""
        return super().walk(path, maxdepth, topdown, on_error or _raise_unless_missing, **options)

    def created(self, path: str) -> datetime.datetime:
        """Return when a file was made: of an encrypted file, which is replaced as a whole, its last change."""
        return self.modified(path)

    def modified(self, path: str) -> datetime.datetime:
        """Return when a file was changed last."""
        changed: datetime.datetime = self.info(path)["modified"]
        return changed

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Create a folder; not the root of a view, which may become a file."""
        if self.exists(path):
            raise FileExistsError(path)
        location = self._location(path)
        table_name, _ = self._keys.configuration.select_table(self._table_name)
        refuse_partition_folders(self._keys, table_name, location.path)
        if not (self._is_rooted and location == self._root):
            self._made.create(location.path, recursive=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and those above it."""
        if not (exist_ok and self.isdir(path)):
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        if self.ls(path, detail=False):
            raise OSError(f"the folder {path} is not empty")
        location = self._location(path)
        location.filesystem.delete_dir(location.path)

    def rm_file(self, path: str) -> None:
        """Remove a file, and the key material beside it."""
        location = self._location(path)
        with exclusive_folder(location):
            location.filesystem.delete_file(location.path)
            remove_key_materials(location, None)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or folders with what is in them."""
        for name in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.isdir(name):
                self.rmdir(name)
            elif self.exists(name):  # Key material goes with its file.
                self.rm_file(name)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file as it is stored: the copy has the same keys."""
        source, target = self._moved(path1, path2)
        source.filesystem.copy_file(source.path, target.path)

    def mv(
        self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **options: Any
    ) -> None:
        """Rename a file or folder as it is stored, with all that is in it."""
        source, target = self._moved(path1, path2)
        source.filesystem.move(source.path, target.path)

    def _moved(self, path1: str, path2: str) -> tuple[FileLocation, FileLocation]:
        """Return both places, if the file can be read in the new one."""
        source, target = self._location(path1), self._location(path2)
        if self._found(source).type == pafs.FileType.Directory:
            return source, target
        prefixes = [table.aad_prefix or "" for table in self._keys.configuration.tables.values()]
        is_bound = source.name != target.name and any("{file_name}" in prefix for prefix in prefixes)
        if is_bound or key_material_location(source).is_file():
            raise OutputError(
                f"{source} is not renamed: it is bound to its name by an AAD prefix or by key material beside it.",
                hint="Write the file again under the other name.",
            )
        return source, target


def _is_opened_by_duckdb(frame: FrameType | None) -> bool:
    """Tell whether DuckDB opens a file: on a thread of its own, or from its package."""
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "fsspec.spec"):
        frame = frame.f_back
    return frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in ("duckdb", "_duckdb")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class _RootedHandler(pafs.FSSpecHandler):  # type: ignore[misc]
    """Takes "/" and "." for the root, too: pyarrow would find no files there, for their names begin otherwise."""

    def normalize_path(self, path: str) -> str:
        """Return a path as `ls` names it."""
        return "/".join(PurePosixPath(path.strip("/")).parts)


class PlainView(KeytoolsFileSystem):
    """One whose paths begin at a folder, or at a file, whose path is empty."""

    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.strip("/") if isinstance(stripped, str) else stripped


_MOST_RESTORED = 16
_restored_before: dict[str, KeytoolsFileSystem] = {}
_restored_lock = ForkSafeLock()


def _restored(
    pickled_as: str,
    keytools: _MakesFileSystems,
    table_name: str | None,
    filesystem: Any,
    root: FileLocation | None,
) -> KeytoolsFileSystem:
    """Return what was pickled: one for all tasks of a worker process, so that these share KEKs and connections."""
    with _restored_lock:
        restored = _restored_before.get(pickled_as)
        if restored is None:
            if len(_restored_before) >= _MOST_RESTORED:
                del _restored_before[next(iter(_restored_before))]
            if root is None:
                restored = keytools.filesystem(table_name, filesystem)
            else:
                restored = keytools.view(root, table_name=table_name)
            _restored_before[pickled_as] = restored
    return restored
