"""The fsspec file system `keytools`: it encrypts files that are written and decrypts files that are read."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools import audit
from parquet_keytools.errors import KEY_REFUSALS, ConfigurationError, KeytoolsError, KmsError, OutputError
from parquet_keytools.files.conversion import encrypt_pending, rekey_file
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.placement import put_in_place
from parquet_keytools.files.plaintext_spool import PlaintextSpool, SpoolRoom
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER
from parquet_keytools.keys.material_store import parquet_file_of, remove_key_materials
from parquet_keytools.runtime.presentation import escaped_path
from parquet_keytools.runtime.threads_and_forks import ExceptionWatch, OwnerProcess, share_with_arrow
from parquet_keytools.storage.local_files import (
    belongs_to_writer,
    exclusive_folder,
    failing_as_output,
    refuse_in_child,
    state_of_local,
)
from parquet_keytools.storage.locations import OBJECT_STORES, FileLocation, PathLike, arrow_filesystem, fsspec_of
from parquet_keytools.storage.outputs import MadeFolders, discarded_unless_done, pending_output, write_whole
from parquet_keytools.storage.walk import infos_in, is_utf8, leads_back, names_in
from parquet_keytools.view.plain_file import PlainFiles, PlainInput

_log = logging.getLogger(__name__)

_TYPES = {pafs.FileType.Directory: "directory", pafs.FileType.File: "file"}


class EncryptedOutput(io.RawIOBase):
    """Takes a plain Parquet file and writes it encrypted, whole or not at all, when it is closed.

    No file appears if an exception ends a `with` statement of this file or of a writer on top of it, if an
    exception is being handled when it is closed, or in a forked child.
    """

    def __init__(
        self,
        keys: KeyService,
        table_name: str,
        target: FileLocation,
        room: SpoolRoom,
        *,
        overwrite: bool = True,
        on_discarded: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a file; nothing is written yet. If it does not appear, `on_discarded` is called."""
        super().__init__()
        self._keys = keys
        self._table_name = table_name
        self._target = target
        self._owner = OwnerProcess()
        self._watch = ExceptionWatch()
        self._spool = PlaintextSpool(room, str(target))
        self._beginning = bytearray()
        self._overwrite = overwrite
        share_with_arrow(self)
        self._on_discarded = on_discarded
        self._is_done = False
        if target.name == "_metadata":
            raise OutputError(
                f"{target} is not written: it would hold the statistics of all files, and the places of their "
                "columns before they were encrypted.",
                hint="Write the data set without a _metadata file.",
            )
        if target.is_local:
            # Fail now, not when the file is closed. There may be more files than a process may have open.
            pending_output(target, overwrite=overwrite).discard()

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._spool.size_bytes

    def write(self, data: Any) -> int:
        """Take bytes of the plain file; other formats than Parquet are refused."""
        if self.closed:
            raise ValueError("write to closed file")
        refuse_in_child(self._owner, self._target)
        view = memoryview(data).cast("B")
        if len(self._beginning) < len(MAGIC):
            self._beginning += view[: len(MAGIC) - len(self._beginning)]
            if not any(magic.startswith(self._beginning) for magic in (MAGIC, MAGIC_ENCRYPTED_FOOTER)):
                self.discard()
                raise self._not_parquet()
        return self._spool.write(view)

    def close(self) -> None:
        """Encrypt the file, unless an exception that was raised since it was opened is being handled."""
        if self.closed:
            return
        super().close()
        try:
            refuse_in_child(self._owner, self._target)
            self._watch.refuse(self._target)
            with audit.about(self._target), failing_as_output(self._target):
                self._encrypt()
            self._is_done = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Write nothing."""
        if not self.closed:
            super().close()
        self._spool.close()
        if not self._is_done and self._owner.is_here:
            self._is_done = True
            self._on_discarded()

    def _encrypt(self) -> None:
        """Encrypt the file, and put it in its place."""
        if not self._spool.size_bytes:
            if not self._target.name.startswith(("_", ".")):
                raise self._not_parquet()
            write_whole(self._target, b"")  # A mark, such as _SUCCESS.
            return
        names = names_in_folders(self._target.path)
        with discarded_unless_done(pending_output(self._target, overwrite=self._overwrite)) as pending:
            new, _ = encrypt_pending(self._keys, self._table_name, self._spool, pending, folder_names=names)
            put_in_place(pending, new)

    def _not_parquet(self) -> OutputError:
        return OutputError(
            f"{self._target} is not written: this is not a whole Parquet file, and nothing else is encrypted.",
            hint="Write files of other formats through another file system.",
        )

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # A file that was not closed may be incomplete.
        if not self.closed:
            if self._spool.size_bytes and self._owner.is_here:
                _log.warning(
                    "%s is not written, because it was never closed: open it in a `with` block", self._target
                )
            with contextlib.suppress(KeytoolsError, OSError):
                self.discard()


class KeytoolsFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Encrypts and decrypts the Parquet files of another file system.

    A plain Parquet file that pyarrow, pandas, Polars, Dask, Ray or DuckDB writes through it is encrypted as its
    table says, with keys of its own. Only Parquet files can be written.

    An encrypted file that is read through it is plain Parquet, decrypted as it is read, and of the same length
    unless columns are shown as digests.

    It can be pickled if its `Keytools` can be pickled.
    """

    protocol = "keytools"
    root_marker = "/"
    cachable = False

    def __init__(
        self,
        keytools: Any,
        keys: KeyService,
        table_name: str | None = None,
        filesystem: Any = None,
        root: PathLike | FileLocation | None = None,
        aad_prefix: str | bytes | None = None,
    ) -> None:
        """Make a file system; for its arguments see `Keytools.filesystem` and `Keytools.view`.

        `root` is the folder, or the only file, at which paths begin; None stands for the root of the file system.
        """
        super().__init__()
        self._keytools = keytools
        self._keys = keys
        self._table_name = table_name
        self._is_rooted = root is not None
        # A root has its own file system.
        self._below = root.filesystem if isinstance(root, FileLocation) else arrow_filesystem(filesystem)
        self._root = FileLocation.resolve("/" if root is None else root, self._below)
        self._aad_prefix = aad_prefix
        self._files = PlainFiles(keys, table_name, aad_prefix, is_one_folder=self._is_rooted)
        self._made = MadeFolders(self._root.filesystem)
        self._room: tuple[int, SpoolRoom] | None = None
        share_with_arrow(self)

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._root if self._is_rooted else None
        return _restored, (self._keytools, self._table_name, self._below, root, self._aad_prefix)

    def _identity(self) -> tuple[object, ...]:
        """Equal for equal file systems: configuration, table, place and AAD prefix."""
        _, (keytools, *place) = self.__reduce__()
        with contextlib.suppress(ConfigurationError):  # A KMS client that was passed in cannot be pickled.
            keytools = pickle.dumps(keytools)
        return keytools, *place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeytoolsFileSystem) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self._table_name, self._root.path))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; arguments, which fsspec shows and serialises, lose the secrets of a configuration."""
        if name == "storage_args":
            value = tuple(map(self._without_secrets, value))
        elif name == "storage_options" and "config" in value:
            value = {**value, "config": self._without_secrets(value["config"])}
        super().__setattr__(name, value)

    def _without_secrets(self, argument: Any) -> Any:
        source = self._keys.configuration.source
        return source.document if source is not None and isinstance(argument, Mapping) else argument

    @cached_property
    def arrow(self) -> pafs.PyFileSystem:
        """This file system for `pyarrow.fs`."""
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
        """Open a file to be read (`rb`), or written and encrypted when it is closed (`wb`, `xb`)."""
        location = self._location(path)
        if mode == "rb":
            file = PlainInput(
                self._files.open(location), partial(self.open, path), whole_row_groups=whole_row_groups
            )
            file.path = path  # For fsspec's caches.
            return file
        if not autocommit:
            raise OutputError(
                f"{location} is not written in a transaction of fsspec.",
                hint="Write it without one: each file appears whole, or not at all.",
            )
        if mode not in ("wb", "xb"):
            raise OutputError(
                f"{location} is not opened with mode {mode!r}: a Parquet file is written as a whole.",
                hint="Use the mode 'wb'.",
            )
        if mode == "xb" and location.info().type != pafs.FileType.NotFound:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(location))
        self._refuse_partition_folders(location)
        self._made.begin(location.path)
        if location.is_local and not (location.makes_folders or Path(location.path).parent.is_dir()):
            raise FileNotFoundError(errno.ENOENT, "the folder of this file does not exist", str(location))
        try:
            return self._output(location, overwrite=mode == "wb")
        except BaseException:
            self._made.remove_empty(location.path)
            raise

    def _refuse_partition_folders(self, location: FileLocation) -> None:
        """Refuse a path in which values of a protected column stand, before a folder or a file has that name."""
        check = self._keys.table_check(self._table_to_write())
        assert check is not None
        check.refuse_folder_names([f"{location.path}/"], is_planned=True)

    def _output(self, location: FileLocation, *, overwrite: bool = True) -> EncryptedOutput:
        # All files that this process writes share the room.
        if self._room is None or self._room[0] != os.getpid():
            self._room = (os.getpid(), SpoolRoom(location))
        return EncryptedOutput(
            self._keys,
            self._table_to_write(),
            location,
            self._room[1],
            overwrite=overwrite,
            # Engines make folders named after values, and leave them if a file in them is refused.
            on_discarded=partial(self._made.remove_empty, location.path),
        )

    def _table_to_write(self) -> str:
        table_name, _ = self._keys.configuration.select_table(self._table_name)
        return table_name

    def _location(self, path: str, *, follows_link: bool = True) -> FileLocation:
        """Return the place of a file; unless `follows_link`, it may be a link that leads out of the root."""
        text = str(self._strip_protocol(path))
        if not self._is_rooted:
            is_in_store = self._root.filesystem.type_name in OBJECT_STORES
            return FileLocation.resolve(text.lstrip("/") if is_in_store else text, self._below)
        parts = PurePosixPath(text.strip("/")).parts
        if not is_utf8(text):
            raise OSError(errno.EILSEQ, "this name is not valid UTF-8: rename it", escaped_path(text))
        location = self._root.below("/".join(parts)) if parts else self._root
        is_within = ".." not in parts and "\0" not in text
        if is_within and self._root.is_local and location != self._root:
            path_below = Path(location.path)
            leads_to = os.path.realpath(path_below if follows_link else path_below.parent)
            is_within = Path(leads_to).is_relative_to(os.path.realpath(self._root.path))
        if not is_within:
            raise PermissionError(f"{path!r} is outside of {self._root}")
        return location

    def _as_dict(self, name: str, info: pafs.FileInfo) -> dict[str, Any]:
        return {
            "name": name,
            "size": self._size(info),
            # A pipe, a socket or a device is neither.
            "type": _TYPES.get(info.type, "other"),
            "created": info.mtime,
            "modified": info.mtime,
        }

    def _size(self, info: pafs.FileInfo) -> int:
        """Return the length of a file as it is read: with digests, it is longer than the stored file."""
        if info.type == pafs.FileType.File and self._keys.configuration.denied_columns == "hash":
            try:
                return self._files.size_bytes(FileLocation(self._root.filesystem, info.path), info)
            except KeytoolsError as error:
                # A file that cannot be opened must not hide the others.
                if isinstance(error, KmsError) and not isinstance(error, KEY_REFUSALS):
                    raise
        return info.size or 0

    # --- Folders: as they are in the file system below -----------------------------------------------------

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size, type, created and modified of a file or folder."""
        found = self._found(self._location(path))
        self._refuse_misplaced(found)
        return self._as_dict(self._name(path), found)

    def _refuse_misplaced(self, info: pafs.FileInfo) -> None:
        if info.type == pafs.FileType.File:
            for error in self._files.misplaced(self._root.filesystem, [info]).values():
                raise error

    def _listed(self, infos: list[pafs.FileInfo]) -> list[pafs.FileInfo]:
        """Return infos of a folder without files whose folders give values to their protected columns."""
        files = [info for info in infos if info.type == pafs.FileType.File]
        hidden = self._files.misplaced(self._root.filesystem, files)
        for error in hidden.values():
            _log.warning("not listed: %s", error)
        return [info for info in infos if info.path not in hidden]

    def _name(self, path: str) -> str:
        """Return the name of a file in listings, which begins as the caller's path does, also with "."."""
        name = str(self._strip_protocol(path))
        if not self._is_rooted:
            return name
        start = (".",) if name.partition("/")[0] == "." else ()
        return "/".join((*start, *PurePosixPath(name).parts))

    def _found(self, location: FileLocation) -> pafs.FileInfo:
        """Return the info of an existing file or folder."""
        if self._made.is_promised(location.path):
            return pafs.FileInfo(location.path, pafs.FileType.Directory)
        info = location.info()
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(f"there is no file or folder {location}")
        return info

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the content of a folder, by name; a name that is not UTF-8 is an error."""
        location = self._location(path)
        found = self._found(location)
        name = self._name(path)
        if found.type != pafs.FileType.Directory:
            self._refuse_misplaced(found)
            entries = [self._as_dict(name, found)]
        else:
            start = f"{name.rstrip('/')}/" if name else ""
            infos = [] if self._made.is_promised(location.path) else self._listed(infos_in(location))
            entries = [self._as_dict(start + PurePosixPath(info.path).name, info) for info in infos]
            entries.sort(key=lambda entry: str(entry["name"]))
            for entry in entries if location.is_local else ():
                base_name = str(entry["name"]).rpartition("/")[2]
                if entry["type"] == "directory" and leads_back(f"{location.path}/{base_name}"):
                    entry["type"] = "other"
        return entries if detail else [entry["name"] for entry in entries]

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = None, **options: Any
    ) -> Any:
        """Yield folders and files; a folder that cannot be listed is an error, and not empty as in fsspec."""

        def raise_unless_missing(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        return super().walk(path, maxdepth, topdown, on_error or raise_unless_missing, **options)

    def modified(self, path: str) -> datetime.datetime:
        """Return when a file was last changed."""
        changed: datetime.datetime = self.info(path)["modified"]
        location = self._location(path)
        below: Any = fsspec_of(location.filesystem)
        # Arrow does not take times from fsspec file systems.
        return below.modified(location.path) if changed is None and below is not None else changed

    created = modified  # Files are replaced as a whole.

    def ukey(self, path: str) -> str:
        """Return a text that changes with a file, for fsspec's caches."""
        key, location = super().ukey(path), self._location(path)
        below: Any = fsspec_of(location.filesystem)
        more: object = None if below is None else below.ukey(location.path)
        if location.is_local and not self._made.is_promised(location.path):
            more = state_of_local(location.path)  # It differs even within the same moment.
        return f"{key}-{more}"

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Create a folder, a partition folder (`name=value`) together with the first file that is opened in it.

        The root of a view is not created, because it may become a file.
        """
        if self.exists(path):
            raise FileExistsError(path)
        location = self._location(path)
        self._refuse_partition_folders(location)
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
        if self._made.is_promised(location.path):
            pass
        elif location.is_local:
            Path(location.path).rmdir()
        elif infos_in(location):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        else:
            location.filesystem.delete_dir(location.path)
        self._made.forget(location.path)

    def rm_file(self, path: str) -> None:
        """Remove a file and the key material beside it, or a link, but not its target."""
        location = self._location(path, follows_link=False)
        _refuse_linked_partitions(location)
        with exclusive_folder(location):
            location.filesystem.delete_file(location.path)
            remove_key_materials(location, None)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and folders with their content; links themselves, but not their targets.

        Nothing is removed if a path does not exist. A pattern is taken for the name of a file.
        """
        if maxdepth is not None:
            raise NotImplementedError("maxdepth is not supported")
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        # What is in a folder comes before the folder.
        names = sorted({str(self._strip_protocol(one)) for one in paths}, reverse=True)
        for name in names:
            if not self._is_there(name):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        for name in names:
            location = self._location(name, follows_link=False)
            _refuse_linked_partitions(location)
            kind = location.info().type
            self._made.forget(location.path)
            if _is_link(location):
                self.rm_file(name)
            elif kind == pafs.FileType.Directory:
                if not recursive:
                    raise IsADirectoryError(errno.EISDIR, "this is a folder: set recursive=True", name)
                if location.path == "/" and location.is_local:
                    raise PermissionError("the root of the file system is not removed")
                location.filesystem.delete_dir(location.path)  # It does not follow links.
            elif kind != pafs.FileType.NotFound:  # Key material goes with its file.
                self.rm_file(name)

    def rm_contents(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove the content of a folder that is not a link, but not the folder; links as `rm`."""
        _refuse_link(self._location(path, follows_link=False))
        location, start = self._location(path), self._name(path).rstrip("/")
        try:
            names = [] if self._made.is_promised(location.path) else names_in(location)
        except FileNotFoundError:
            if not missing_ok:
                raise
        else:
            # Another writer may be at work: it removes its own files.
            names = [name for name in names if not belongs_to_writer(name)]
            paths = [f"{start}/{name}" if start else name for name in names]
            self.rm([one for one in paths if self._is_there(one)], recursive=True)

    def _is_there(self, name: str) -> bool:
        location = self._location(name, follows_link=False)
        if self._made.is_promised(location.path):
            return True
        try:
            # A file that may not be opened exists, too.
            return _is_link(location) or bool(location.info().type != pafs.FileType.NotFound)
        except OSError as error:
            # A link to itself, in a file system of fsspec that does not show links.
            if error.errno == errno.ELOOP:
                return False
            raise

    # --- Copies and moves: new files are encrypted, as written files are ------------------------------------

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file, encrypted with new keys as its table says. Of a folder, make an empty one."""
        source = self._location(path1)
        found = self._found(source)
        if found.type == pafs.FileType.Directory:
            self.makedirs(path2, exist_ok=True)
        elif parquet_file_of(source) is None:  # Copies of Parquet files get their own key material.
            with self._in_new_folders(path2) as target:
                if found.size:
                    table_name = self._table_to_write()
                    rekey_file(self._keys, self._keys, source, target, self._table_name, table_name, None)
                else:
                    self._output(target).close()  # A mark, or refused.

    @contextlib.contextmanager
    def _in_new_folders(self, path: str) -> Iterator[FileLocation]:
        """Make the folders of a file, and yield its place; remove new folders if the file cannot be written."""
        location = self._location(path)
        self._refuse_partition_folders(location)
        self._made.create(str(PurePosixPath(location.path).parent), recursive=True)
        try:
            yield location
        except BaseException:
            self._made.remove_empty(location.path)
            raise

    def mv(
        self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **options: Any
    ) -> None:
        """Copy a file as `cp_file` does, into `path2` if that is a folder; then remove it."""
        source, target = self._location(path1, follows_link=False), self._location(path2)
        is_file = self._found(source).type == pafs.FileType.File and parquet_file_of(source) is None
        if _is_link(source) or not is_file:
            raise OutputError(
                f"{source} is not moved: only Parquet files are.",
                hint="Move folders and links in the file system below. Files keep their keys there.",
            )
        if target.is_folder():
            path2 = f"{str(self._strip_protocol(path2)).rstrip('/')}/{source.name}"
            target = self._location(path2)
        if source.is_same_file(target):
            raise OutputError(f"{source} and {target} are the same file.", hint="Name another place.")
        version = self.ukey(path1)
        self.cp_file(path1, path2)
        if self.ukey(path1) != version:
            raise OutputError(
                f"{source} was replaced while it was moved. It stays, and {target} has the earlier content.",
                hint="Remove the copy, then move the file again.",
            )
        self.rm_file(path1)


def _is_link(location: FileLocation) -> bool:
    return location.is_local and Path(location.path).is_symlink()


def _refuse_link(location: FileLocation) -> None:
    """Refuse to remove files behind a link: anyone who may write to a data set can put one there."""
    if _is_link(location):
        raise OutputError(
            f"{location} is a link, and what is behind it would be deleted.",
            hint="Remove the link first, or name the folder that it leads to.",
        )


def _refuse_linked_partitions(location: FileLocation) -> None:
    """Refuse to remove files behind a partition folder that is a link: engines name such files by their paths."""
    if location.is_local:
        for folder in PurePosixPath(location.path).parents:
            if "=" in folder.name:
                _refuse_link(FileLocation(location.filesystem, str(folder)))


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    """pyarrow's handler, with the root of a view, and with links as in Arrow's local file system."""

    fs: KeytoolsFileSystem

    def normalize_path(self, path: str) -> str:
        """Return a path as `ls` names it: otherwise pyarrow finds no files in a view whose root is "/" or "."."""
        return "/".join(PurePosixPath(path.strip("/")).parts) if isinstance(self.fs, PlainView) else path

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file; a read that includes a refused column is an error."""
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return pa.PythonFile(self.fs.open(path, mode="rb", whole_row_groups=False), mode="r")

    open_input_stream = open_input_file

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remove the content of a folder, including links that are broken or lead out of a view."""
        self.fs.rm_contents(path, missing_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Remove the content of a view, but not of a whole file system."""
        if not isinstance(self.fs, PlainView):
            raise PermissionError("the contents of the root of the file system are not removed")
        self.delete_dir_contents("")


class _StoreFileSystem(KeytoolsFileSystem):
    """A file system whose paths begin with a bucket or another name, not with a slash."""

    root_marker = ""


def class_over(filesystem: Any) -> type[KeytoolsFileSystem]:
    """Return the class for a file system, by how its paths begin."""
    below = arrow_filesystem(filesystem)
    fsspec = fsspec_of(below)
    has_slash = isinstance(below, pafs.LocalFileSystem) if fsspec is None else fsspec.root_marker == "/"
    return KeytoolsFileSystem if has_slash else _StoreFileSystem


class PlainView(KeytoolsFileSystem):
    """A file system whose paths begin at a folder, or at a file, whose path is empty."""

    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.strip("/") if isinstance(stripped, str) else stripped


def _restored(
    keytools: Any, table_name: str | None, below: Any, root: FileLocation | None, aad_prefix: str | bytes | None
) -> KeytoolsFileSystem:
    if root is None:
        return _first_of_equals(keytools.filesystem(table_name, below))
    return _first_of_equals(keytools.view(root, table_name=table_name, aad_prefix=aad_prefix))


@lru_cache(maxsize=16)
def _first_of_equals(restored: KeytoolsFileSystem) -> KeytoolsFileSystem:
    """Return one file system for all tasks of a worker process, which share KEKs and connections."""
    return restored
