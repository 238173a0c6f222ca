"""The fsspec file system `keytools`: what is written through it is encrypted, and what is read is decrypted."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import logging
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import fsspec
import pyarrow as pa
from fsspec.callbacks import DEFAULT_CALLBACK
from pyarrow import fs as pafs

from parquet_keytools.errors import KEY_REFUSALS, FolderNameError, KeytoolsError, KmsError, OutputError
from parquet_keytools.files.conversion import rekey_file
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.plaintext_spool import SpoolRoom
from parquet_keytools.keys.material_store import read_key_materials, remove_key_materials
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.storage.listing import is_utf8
from parquet_keytools.storage.locations import (
    OBJECT_STORES,
    FileLocation,
    PathLike,
    arrow_filesystem,
    fsspec_of,
    key_material_location,
)
from parquet_keytools.storage.locks import exclusive_folder
from parquet_keytools.storage.made_folders import MadeFolders
from parquet_keytools.storage.printable import escaped_path
from parquet_keytools.storage.walk import all_files, infos_in, names_in, parquet_file_of
from parquet_keytools.view.encrypted_output import EncryptedOutput, refuse_partition_folders
from parquet_keytools.view.plain_files import PlainFiles, PlainInput

_log = logging.getLogger(__name__)

_FEW_FILES = 4

_TYPES = {pafs.FileType.Directory: "directory", pafs.FileType.File: "file"}


class _MakesFileSystems(Protocol):
    """`Keytools`, as far as file systems know it."""

    def filesystem(self, table_name: str | None = None, filesystem: Any = None) -> KeytoolsFileSystem: ...
    def view(
        self, path: FileLocation, *, table_name: str | None = None, aad_prefix: str | bytes | None = None
    ) -> KeytoolsFileSystem: ...


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
        aad_prefix: str | bytes | None = None,
    ) -> None:
        """Make one.

        Args:
            keytools: What it is of, and what is pickled with it.
            keys: Of the configuration.
            table_name: The table of all files; None where the configuration has only one.
            filesystem: The `pyarrow.fs` or fsspec file system in which they lie; None for the local one.
            root: The folder, or the only file, that paths begin at; None for the root of the file system.
            aad_prefix: The AAD prefix that each file that is read must have; None for the prefix of the table.
        """
        super().__init__()
        self._keytools = keytools
        self._keys = keys
        self._table_name = table_name
        self._is_rooted = root is not None
        # What the caller named, with its subtree; a root says where it is itself.
        self._below = root.filesystem if isinstance(root, FileLocation) else arrow_filesystem(filesystem)
        self._root = FileLocation.resolve("/" if root is None else root, self._below)
        self._aad_prefix = aad_prefix
        self._files = PlainFiles(keys, table_name, aad_prefix, is_one_folder=self._is_rooted)
        self._made = MadeFolders(self._root.filesystem)
        self._room: tuple[int, SpoolRoom] | None = None
        share_with_arrow(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._identity[0], self._keytools, *self._identity[1:])

    @property
    def _identity(self) -> tuple[str, str | None, pafs.FileSystem, FileLocation | None, str | bytes | None]:
        """What makes two of them the same: configuration, table, place and AAD prefix."""
        root = self._root if self._is_rooted else None
        return _token_of(self._keytools), self._table_name, self._below, root, self._aad_prefix

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeytoolsFileSystem) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash((_token_of(self._keytools), self._table_name, self._root.path))

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
        return pafs.PyFileSystem(_Handler(self))

    # --- Files ---------------------------------------------------------------------------------------------

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        whole_row_groups: bool = True,
        **options: Any,
    ) -> Any:
        """Open a file: `rb`, which decrypts what is read, or `wb` and `xb`, which encrypt when it is closed.

        DuckDB reads whole row groups where it needs nearly all of them: `PlainFile.read_at` says what it gets.
        """
        location = self._location(path)
        if mode == "rb":
            file = PlainInput(
                self._files.open(location),
                partial(self.open, path),
                whole_row_groups=whole_row_groups,
            )
            file.path = path  # By which caches of fsspec know it.
            return file
        if mode not in ("wb", "xb"):
            raise OutputError(
                f"{location} is not opened with mode {mode!r}: a Parquet file is written as a whole.",
                hint="Use the mode 'wb'.",
            )
        if mode == "xb" and location.info().type != pafs.FileType.NotFound:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(location))
        refuse_partition_folders(self._keys, self._table_to_write(), location.path)
        self._made.begin(location.path)
        if location.is_local and not (location.makes_folders or Path(location.path).parent.is_dir()):
            raise FileNotFoundError(errno.ENOENT, "the folder of this file does not exist", str(location))
        try:
            return self._output(location, overwrite=mode == "wb", commits_on_close=autocommit)
        except BaseException:
            self._made.remove_empty(location.path)
            raise

    def _output(
        self, location: FileLocation, *, overwrite: bool = True, commits_on_close: bool = True
    ) -> EncryptedOutput:
        return EncryptedOutput(
            self._keys,
            self._table_to_write(),
            location,
            self._room_for(location),
            overwrite=overwrite,
            commits_on_close=commits_on_close,
            # Engines make folders named after values, and leave them behind when a file in them is refused.
            on_discarded=partial(self._made.remove_empty, location.path),
        )

    def _table_to_write(self) -> str:
        table_name, _ = self._keys.configuration.select_table(self._table_name)
        return table_name

    def _room_for(self, location: FileLocation) -> SpoolRoom:
        """Return where plaintext is collected: one room for all files that this process writes."""
        if self._room is None or self._room[0] != os.getpid():
            self._room = (os.getpid(), SpoolRoom(location))
        return self._room[1]

    def _location(self, path: str, *, follows_link: bool = True) -> FileLocation:
        """Return the place of a file; unless `follows_link`, a path may be a link that leads out of the root."""
        text = str(self._strip_protocol(path))
        if not self._is_rooted:
            is_in_store = self._root.filesystem.type_name in OBJECT_STORES
            return FileLocation.resolve(text.lstrip("/") if is_in_store else text, self._below)
        parts = PurePosixPath(text.strip("/")).parts
        if not is_utf8(text):
            raise OSError(errno.EILSEQ, "this name is not valid UTF-8: rename it", escaped_path(text))
        location = self._root.child("/".join(parts)) if parts else self._root
        if ".." in parts or "\0" in text or not self._is_within(location, follows_link=follows_link):
            raise PermissionError(f"{path!r} is outside of {self._root}")
        return location

    def _is_within(self, location: FileLocation, *, follows_link: bool) -> bool:
        """Return whether a file is below the root, wherever links lead."""
        if not self._root.is_local or location == self._root:
            return True
        path = Path(location.path)
        leads_to = os.path.realpath(path if follows_link else path.parent)
        return Path(leads_to).is_relative_to(os.path.realpath(self._root.path))

    def _as_dict(self, name: str, info: pafs.FileInfo) -> dict[str, Any]:
        return {
            "name": name,
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
                return self._files.size_bytes(FileLocation(self._root.filesystem, info.path), info)
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
        return self._as_dict(self._name(path), found)

    def _refuse_misplaced(self, info: pafs.FileInfo, *, is_listed: bool = False) -> None:
        if info.type == pafs.FileType.File:
            self._files.refuse_misplaced(info, FileLocation(self._root.filesystem, info.path), is_listed=is_listed)

    def _may_be_listed(self, info: pafs.FileInfo, *, is_listed: bool) -> bool:
        try:
            self._refuse_misplaced(info, is_listed=is_listed)
        except FolderNameError as error:
            # A file that may not be opened does not hide those beside it.
            _log.warning("not listed: %s", error)
            return False
        return True

    def _name(self, path: str) -> str:
        """Return the name of a file in listings: it begins as the caller's path does, also with a relative one."""
        name = str(self._strip_protocol(path))
        return "/".join(PurePosixPath(name).parts) if self._is_rooted else name

    def _found(self, location: FileLocation) -> pafs.FileInfo:
        """Return what is known of a file or folder that is there."""
        info = location.info()
        if info.type == pafs.FileType.NotFound and self._made.is_promised(location.path):
            return pafs.FileInfo(location.path, pafs.FileType.Directory)
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(f"there is no file or folder {location}")
        return info

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what is in a folder, by name; see `infos_in` for names that are not UTF-8."""
        location = self._location(path)
        found = self._found(location)
        name = self._name(path)
        if found.type != pafs.FileType.Directory:
            self._refuse_misplaced(found)
            entries = [self._as_dict(name, found)]
        else:
            start = f"{name.rstrip('/')}/" if name else ""
            found_infos = [] if self._made.is_promised(location.path) else list(infos_in(location))
            # Of a few files the views are opened, and kept: a reader opens them next.
            is_listed = len(found_infos) > _FEW_FILES
            infos = (info for info in found_infos if self._may_be_listed(info, is_listed=is_listed))
            entries = [self._as_dict(start + PurePosixPath(info.path).name, info) for info in infos]
            entries.sort(key=lambda entry: str(entry["name"]))
            for entry in entries:
                if entry["type"] == "directory" and _leads_back(location, str(entry["name"]).rpartition("/")[2]):
                    entry["type"] = "other"  # Its end would never come.
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
        location = self._location(path)
        below: Any = fsspec_of(location.filesystem)
        # Arrow knows no times of other file systems of fsspec.
        return below.modified(location.path) if changed is None and below is not None else changed

    def ukey(self, path: str) -> str:
        """Return what changes with a file: caches of fsspec read a file again when it differs."""
        key = str(super().ukey(path))
        location = self._location(path)
        below: Any = fsspec_of(location.filesystem)
        return key if below is None else f"{key}-{below.ukey(location.path)}"

    def checksum(self, path: str) -> int:
        """Return a number that changes with a file, as `ukey` does."""
        return int(hashlib.sha256(self.ukey(path).encode()).hexdigest(), 16)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Create a folder, a partition folder (`name=value`) together with the first file that is opened in it.

        The root of a view is not created, because it may become a file.
        """
        if self.exists(path):
            raise FileExistsError(path)
        location = self._location(path)
        refuse_partition_folders(self._keys, self._table_to_write(), location.path)
        if not (self._is_rooted and location == self._root):
            self._made.promise(location.path, recursive=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and those above it."""
        if not (exist_ok and self.isdir(path)):
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        location = self._location(path)
        if self._found(location).type != pafs.FileType.Directory or _is_link(location):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if not self._made.is_promised(location.path):
            _remove_empty_folder(location)
        self._made.forget(location.path)

    def rm_file(self, path: str) -> None:
        """Remove a file, and the key material beside it; of a link the link itself.

        Raises:
            OutputError: It lies behind a partition folder that is a link.
        """
        location = self._location(path, follows_link=False)
        _refuse_linked_partitions(location)
        with exclusive_folder(location):
            location.filesystem.delete_file(location.path)
            remove_key_materials(location, None)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or folders with what is in them; of a link the link itself, not what it leads to.

        Args:
            path: A path, a pattern, or a list of these.
            recursive: Whether folders are removed, too.
            maxdepth: How many levels of folders are emptied; None for all.

        Raises:
            FileNotFoundError: There is nothing of that name.
            IsADirectoryError: It is a folder, and `recursive` is not set.
            OutputError: It lies behind a partition folder that is a link.
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        # Where a pattern names a folder and what is in it, the folder is removed last.
        for name in sorted(self._existing(path), reverse=True):
            location = self._location(name, follows_link=False)
            _refuse_linked_partitions(location)
            kind = location.info().type
            self._made.forget(location.path)
            if _is_link(location):
                self.rm_file(name)
            elif kind == pafs.FileType.Directory:
                if not recursive:
                    raise IsADirectoryError(errno.EISDIR, "this is a folder: set recursive=True", name)
                self._remove_folder(name, maxdepth)
            elif kind != pafs.FileType.NotFound:  # Key material goes with its file.
                self.rm_file(name)

    def rm_contents(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove what is in a folder, and not the folder; links as `rm`.

        Raises:
            OutputError: It is a link: what it leads to would be removed.
        """
        _refuse_link(self._location(path, follows_link=False))
        try:
            names = self._names_in(path)
        except FileNotFoundError:
            if not missing_ok:
                raise
        else:
            self.rm([name for name in names if self._is_there(name)], recursive=True)

    def _is_there(self, name: str) -> bool:
        location = self._location(name, follows_link=False)
        if self._made.is_promised(location.path):
            return True
        try:
            # Also a file that may not be opened where it lies.
            return _is_link(location) or bool(location.info().type != pafs.FileType.NotFound)
        except OSError as error:
            # A link to itself, in a file system of fsspec that does not show links.
            if error.errno == errno.ELOOP:
                return False
            raise

    def _existing(self, path: Any) -> set[str]:
        """Return the names of files and folders that are there; one that is there is no pattern.

        A pattern names links, and not what is behind a link that it matches.
        """
        names: set[str] = set()
        for one in [path] if isinstance(path, (str, os.PathLike)) else path:
            name = str(self._strip_protocol(one))
            if self._is_there(name):
                names.add(name)
            elif has_magic(name):
                names.update(self._matching(name))
            else:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return names

    def _matching(self, pattern: str) -> Iterator[str]:
        """Yield the names that a pattern has."""
        parts = pattern.split("/")
        fixed = next(number for number, part in enumerate(parts) if has_magic(part))
        for name in self.expand_path(pattern):
            above = name.split("/")[:-1]
            folders = ("/".join(above[:length]) for length in range(fixed + 1, len(above) + 1))
            if not any(_is_link(self._location(folder, follows_link=False)) for folder in folders):
                yield name

    def _names_in(self, path: str) -> list[str]:
        """Return the names of all that is in a folder, also of links that lead nowhere."""
        start = self._name(path).rstrip("/")
        if self._made.is_promised(self._location(path).path):
            return []
        return [f"{start}/{name}" if start else name for name, _, _ in names_in(self._location(path))]

    def _remove_folder(self, name: str, depth: int | None) -> None:
        location = self._location(name)
        if depth is None:
            if location.path == "/" and location.is_local:
                raise PermissionError("the root of the file system is not removed")
            location.filesystem.delete_dir(location.path)  # It does not follow links.
            return
        for below in self._names_in(name):
            inner = self._location(below, follows_link=False)
            if _is_link(inner) or not inner.is_folder():
                self.rm_file(below)
            elif depth > 1:
                self._remove_folder(below, depth - 1)
            else:
                self.rmdir(below)
        self.rmdir(name)

    # --- Copies and moves: what arrives is encrypted, as what is written is ---------------------------------

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file: the copy is encrypted with keys of its own, as its table says. For a folder, make one.

        Raises:
            NotEncryptedError: The file is not encrypted.
            ColumnAccessDeniedError: A column of it cannot be read, and the copy would lack it.
            OutputError: It would be copied onto itself, or cannot be written there.
            KeytoolsError: Another subclass says what is wrong with the file or its keys, or with the new place.
        """
        source = self._location(path1)
        found = self._found(source)
        if found.type == pafs.FileType.Directory:
            self.makedirs(path2, exist_ok=True)
        elif parquet_file_of(source) is None:  # The copy of its Parquet file gets its own.
            with self._in_new_folders(path2):
                target = self._location(path2)
                if found.size:
                    rekey_file(
                        self._keys, self._keys, source, target, self._table_name, self._table_to_write(), None
                    )
                else:
                    self._output(target).close()  # A mark, or refused.

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **options: Any
    ) -> None:
        """Write a local file, which must be plain Parquet, as `open` does. For a folder, make one."""
        if mode != "overwrite":  # Old versions of fsspec do not take it.
            options["mode"] = mode
        with contextlib.nullcontext() if Path(lpath).is_dir() else self._in_new_folders(rpath):
            super().put_file(lpath, rpath, callback=callback, **options)

    @contextlib.contextmanager
    def _in_new_folders(self, path: str) -> Iterator[None]:
        """Make the folders of a file; those that are new do not stay if the file cannot be written."""
        location = self._location(path)
        refuse_partition_folders(self._keys, self._table_to_write(), location.path)
        self._made.create(str(PurePosixPath(location.path).parent), recursive=True)
        try:
            yield
        except BaseException:
            self._made.remove_empty(location.path)
            raise

    def mv(
        self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **options: Any
    ) -> None:
        """Move a file or a folder; into `path2`, if that is a folder. A link is moved, not what it leads to.

        A file keeps its bytes and keys. One that is bound to its name, by an AAD prefix or by key material beside
        it, is copied as `cp_file` does, and removed then.

        Raises:
            NotEncryptedError: The file, or one in the folder, is not encrypted. Nothing is moved then.
            KeytoolsError: Another subclass says what is wrong with a file or its keys, or with the new place.
        """
        source, target = self._location(path1, follows_link=False), self._location(path2)
        if target.is_folder() and not source.is_same_file(target):
            path2 = f"{str(self._strip_protocol(path2)).rstrip('/')}/{source.name}"
            target = self._location(path2)
        if source.is_same_file(target):
            raise OutputError(f"{source} and {target} are the same file.", hint="Name another place.")
        is_folder = not _is_link(source) and self._found(source).type == pafs.FileType.Directory
        refuse_partition_folders(self._keys, self._table_to_write(), target.path)
        for file in all_files(source) if is_folder else [source]:
            inner = file.path_within(source)
            if inner:
                refuse_partition_folders(self._keys, self._table_to_write(), target.below(inner).path)
            if not self._is_protected(file) or (not is_folder and self._is_bound(source, target)):
                if is_folder or parquet_file_of(source) is not None:
                    raise OutputError(
                        f"{source} is not moved: {file} is not an encrypted Parquet file.",
                        hint="Move the encrypted Parquet files, and other files through another file system.",
                    )
                self.cp_file(path1, path2)
                self.rm_file(path1)
                return
        self._made.begin(target.path)
        with exclusive_folder(target):
            source.filesystem.move(source.path, target.path)
            if not is_folder:
                remove_key_materials(target, None)

    def _is_protected(self, file: FileLocation) -> bool:
        """Return whether a file may come to another place as it is stored; errors as `PlainFiles.open`."""
        if _is_link(file) and not file.is_file():
            return True  # No data comes with it.
        if parquet_file := parquet_file_of(file):
            read_key_materials(parquet_file)
            return True
        if file.name.startswith(("_", ".")) and not file.size_bytes():
            return True  # A mark, such as _SUCCESS.
        return self._files.open(file).is_encrypted

    def _is_bound(self, source: FileLocation, target: FileLocation) -> bool:
        """Return whether a file could not be read under another name."""
        prefixes = [table.aad_prefix or "" for table in self._keys.configuration.tables.values()]
        is_renamed = source.name != target.name and any("{file_name}" in prefix for prefix in prefixes)
        return is_renamed or key_material_location(source).is_file()


def _is_link(location: FileLocation) -> bool:
    return location.is_local and Path(location.path).is_symlink()


def _refuse_link(location: FileLocation) -> None:
    """Refuse to remove what is behind a link: anyone who may write to a data set can put one there."""
    if _is_link(location):
        raise OutputError(
            f"{location} is a link, and what is behind it would be deleted.",
            hint="Remove the link first, or name the folder that it leads to.",
        )


def _refuse_linked_partitions(location: FileLocation) -> None:
    """Refuse to remove what is behind a partition folder that is a link.

    Engines that overwrite a partition remove each file in its folder. That the folder is a link does not show in
    the calls that they make.
    """
    if location.is_local:
        for folder in PurePosixPath(location.path).parents:
            if "=" in folder.name:
                _refuse_link(FileLocation(location.filesystem, str(folder)))


def _leads_back(folder: FileLocation, name: str) -> bool:
    """Return whether an entry of a folder is a link to a folder that was passed on the way to it."""
    path = Path(folder.path, name)
    if not (folder.is_local and path.is_symlink()):
        return False
    passed = {os.path.realpath(parent) for parent in path.parents}
    return os.path.realpath(path) in passed


def _remove_empty_folder(location: FileLocation) -> None:
    if location.is_local:
        Path(location.path).rmdir()
    elif infos_in(location):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), location.path)
    else:
        location.filesystem.delete_dir(location.path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    """The handler of pyarrow, with the root of a view, and links as in Arrow's local file system."""

    fs: KeytoolsFileSystem

    def normalize_path(self, path: str) -> str:
        """Return a path as `ls` names it: pyarrow would find no files in a view whose root is "/" or "."."""
        return "/".join(PurePosixPath(path.strip("/")).parts) if isinstance(self.fs, PlainView) else path

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file for Arrow, which gets our error if it reads a refused column along with others."""
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return pa.PythonFile(self.fs.open(path, mode="rb", whole_row_groups=False), mode="r")

    open_input_stream = open_input_file

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remove what is in a folder, links that lead nowhere or out of a view included."""
        self.fs.rm_contents(path, missing_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Remove what is in a view; what is in a whole file system is not removed."""
        if not isinstance(self.fs, PlainView):
            raise PermissionError("the contents of the root of the file system are not removed")
        self.delete_dir_contents("")


class _StoreFileSystem(KeytoolsFileSystem):
    """One whose paths begin with a bucket, or another name, and with no slash."""

    root_marker = ""


def class_over(filesystem: Any) -> type[KeytoolsFileSystem]:
    """Return the class for a file system, by how paths begin there."""
    below = arrow_filesystem(filesystem)
    fsspec = fsspec_of(below)
    has_slash = isinstance(below, pafs.LocalFileSystem) if fsspec is None else fsspec.root_marker == "/"
    return KeytoolsFileSystem if has_slash else _StoreFileSystem


class PlainView(KeytoolsFileSystem):
    """One whose paths begin at a folder, or at a file, whose path is empty."""

    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.strip("/") if isinstance(stripped, str) else stripped


_tokens: weakref.WeakKeyDictionary[_MakesFileSystems, str] = weakref.WeakKeyDictionary()
"""What names a `Keytools` in all processes that it was pickled to."""
_tokens_lock = ForkSafeLock()

_MOST_RESTORED = 16
_restored_before: list[KeytoolsFileSystem] = []
_restored_lock = ForkSafeLock()


def _token_of(keytools: _MakesFileSystems) -> str:
    with _tokens_lock:
        return _tokens.setdefault(keytools, secrets.token_hex(16))


def _restored(
    token: str,
    keytools: _MakesFileSystems,
    table_name: str | None,
    filesystem: Any,
    root: FileLocation | None,
    aad_prefix: str | bytes | None,
) -> KeytoolsFileSystem:
    """Return what was pickled: one for all tasks of a worker process, so that these share KEKs and connections."""
    with _tokens_lock:
        _tokens[keytools] = token
    with _restored_lock:
        if root is None:
            made = keytools.filesystem(table_name, filesystem)
        else:
            made = keytools.view(root, table_name=table_name, aad_prefix=aad_prefix)
        for restored in _restored_before:
            if restored == made:
                return restored
        _restored_before.append(made)
        del _restored_before[:-_MOST_RESTORED]
    return made
