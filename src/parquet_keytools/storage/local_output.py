"""A local file that is written beside its target and then takes the target's place.

The folder is opened once, and what happens in it is asked for relative to that (not on Windows): a path leads
elsewhere when somebody who may write to one of its folders puts a link there. The new file has no name until it is
complete, where the file system can do that (`O_TMPFILE`): nothing is left of it when the process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from parquet_keytools.errors import ChangedMeanwhileError, OutputError
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.failures import failing_as_output
from parquet_keytools.storage.local_files import (
    Folder,
    FolderIdentity,
    Identity,
    UnsupportedRenameError,
    exchange,
    folder_moved,
    identity_of_folder,
    may_give_attributes,
    remove_hadoop_checksums,
    rename_new,
    take_attributes,
)
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.temporary_files import Swap, remove_leftovers, temporary_name

_DESCRIPTORS = "/proc/self/fd"
_NO_DESCRIPTORS = not (operating_system.POSIX and hasattr(os, "O_TMPFILE") and Path(_DESCRIPTORS).is_dir())
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENOTDIR)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL
_NOT_THE_FILE = operating_system.NOT_A_FILE | {errno.ENOENT}
_MOST_EXCHANGES = 10

Check = Callable[[], None]


class LocalFile:
    """A new local file, and how it takes its place.

    Args:
        target: Where it will be.
        mode: Its permissions, whatever the umask is and whatever it replaces; None for the usual ones.
        like: The file that it is another version of, from which it takes owner, mode and all attributes.
        keeps_open: Whether it stays open until it is in its place; a process may have only so many open files.
        folder: Device and inode that its folder must have; None for any.
        durable: Whether it is synced to the disk before it is in its place.

    Raises:
        OutputError: The folder is another one.
        OSError: It cannot be created.
    """

    def __init__(
        self,
        target: FileLocation,
        *,
        mode: int | None,
        like: FileLocation | None,
        keeps_open: bool,
        folder: FolderIdentity | None = None,
        durable: bool = True,
    ) -> None:
        self._target = target
        self._durable = durable
        self._folder_path = str(PurePosixPath(target.path).parent)
        self._name = PurePosixPath(target.path).name
        self._mode = mode
        self._like = like
        self._is_synced = False
        self._temporary: str | None = None
        self._folder: Folder | None = Folder(self._folder_path)
        self._file: int | None = None
        try:
            self.folder = self._folder.identity()
            if folder not in (None, self.folder):
                raise folder_moved(target)
            remove_leftovers(self._folder)
            self._file = self._create(self._folder, self._permissions(self._folder), anonymous=keeps_open)
            self._identity = _identity(os.fstat(self._file))
        except BaseException:
            self.close()
            raise
        if not keeps_open:
            self._close_descriptors()

    @property
    def name(self) -> str | None:
        """Its name as long as it is not in its place; None where it has none."""
        return self._temporary

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield its file descriptor."""
        with self._opened() as (_, file):
            yield file

    def replace(self, *, overwrite: bool, check: Check | None, syncs_folder: bool = True) -> None:
        """Put the complete file in its place.

        Args:
            overwrite: Whether it may replace something.
            check: Raises if what is there is no longer what may be replaced; nothing else is then replaced, nor
                what comes there later.
            syncs_folder: Whether the folder is synced, too. Otherwise the caller does it, with `sync_folder`.

        Raises:
            OutputError: There is something, and it must not be replaced; or the folder was moved.
            ChangedMeanwhileError: It came after `check` had passed, and stays.
            OSError: The file system failed; what was there is still there, or the new file is.
        """
        with self._opened() as (folder, file), failing_as_output(self._target, only_writing=True):
            self._sync(folder, file)
            if operating_system.POSIX:
                self._put_in_place(folder, file, overwrite, check)
                if syncs_folder:
                    folder.sync()
        if not operating_system.POSIX:
            # It does not rename files that are open.
            self._close_descriptors()
            with Folder(self._folder_path) as folder, failing_as_output(self._target, only_writing=True):
                self._put_in_place(folder, -1, overwrite, check)
        self.close()

    def _put_in_place(self, folder: Folder, file: int, overwrite: bool, check: Check | None) -> None:
        self._require_same_folder()
        if check is not None:
            self._replace_checked(folder, file, check)
        elif overwrite:
            remove_hadoop_checksums(folder, self._name)
            self._replace_any(folder, file)
        else:
            self._appear(folder, file)
            remove_hadoop_checksums(folder, self._name)
        found = self._look(folder, self._name)
        if found is None or (found.device, found.inode) != self._identity[:2]:
            raise self._exchanged()

    def sync(self) -> None:
        """Bring the complete file to the disk, which may take long: before locks are taken.

        Raises:
            OSError: The file system failed.
        """
        with self._opened() as (folder, file), failing_as_output(self._target, only_writing=True):
            self._sync(folder, file)

    def _sync(self, folder: Folder, file: int) -> None:
        if not self._is_synced:
            self._set_attributes(folder, file)
            self._identity = _identity(os.fstat(file))
            if self._durable:
                operating_system.sync(file)
            self._is_synced = True

    def close(self) -> None:
        """Remove what is not in its place, and close what is open."""
        if not operating_system.POSIX:
            # It does not remove files that are open.
            self._close_descriptors()
        with contextlib.suppress(OSError):
            if self._temporary is not None:
                with contextlib.ExitStack() as opened:
                    folder = self._folder or opened.enter_context(Folder(self._folder_path))
                    if _identity(folder.look(self._temporary)) == self._identity:
                        folder.unlink(self._temporary)
        self._temporary = None
        self._close_descriptors()

    # --- how it comes to be ---

    def _permissions(self, folder: Folder) -> int:
        """Return the most that others may do with it while it is written."""
        if self._mode is not None or self._like is not None:
            return 0o600
        found = self._replaced(folder)
        return 0o666 if found is None else found.st_mode & 0o666 | 0o600

    def _replaced(self, folder: Folder) -> os.stat_result | None:
        """Return what is there and decides who may use what replaces it."""
        try:
            found = folder.look(self._name)
        except FileNotFoundError:
            return None
        return found if may_give_attributes(found, folder.status()) else None

    def _create(self, folder: Folder, permissions: int, *, anonymous: bool) -> int:
        with failing_as_output(self._target, only_writing=True):
            if sys.platform == "linux" and anonymous and not _NO_DESCRIPTORS:
                try:
                    return os.open(".", os.O_TMPFILE | os.O_RDWR, permissions, dir_fd=folder.descriptor)
                except OSError as error:
                    if error.errno not in _NO_TMPFILE:
                        raise
            name = temporary_name(self._name)
            file = folder.open(name, _CREATE, permissions)
            self._temporary = name
            return file

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Folder, int]]:
        """Yield folder and file; they are opened again where they did not stay open."""
        if self._folder is not None and self._file is not None:
            yield self._folder, self._file
            return
        assert self._temporary is not None
        with contextlib.ExitStack() as descriptors:
            folder = descriptors.enter_context(Folder(self._folder_path))
            if folder.identity() != self.folder:
                raise folder_moved(self._target)
            try:
                file = folder.open(self._temporary, os.O_RDWR)
            except OSError as error:
                if error.errno not in _NOT_THE_FILE:
                    raise
                raise self._exchanged() from None
            descriptors.callback(os.close, file)
            if _identity(os.fstat(file)) != self._identity:
                raise self._exchanged()
            yield folder, file

    def _close_descriptors(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._folder is not None:
            self._folder.close()
        self._file = self._folder = None

    # --- how it takes its place ---

    def _set_attributes(self, folder: Folder, file: int) -> None:
        if self._mode is not None:
            operating_system.change_mode(file, self._mode)
            return
        try:
            if self._like is not None:
                old = operating_system.open_file(self._like.path, os.O_RDONLY, follow_link=True)
            elif self._replaced(folder) is not None:
                old = folder.open(self._name, os.O_RDONLY)
            else:
                return
        except FileNotFoundError:
            return
        except PermissionError:
            # Its owner may not even read it; nobody else may then.
            operating_system.change_mode(file, 0o600)
            return
        try:
            found = os.fstat(old)
            if self._like is not None or may_give_attributes(found, folder.status()):
                take_attributes(file, old, all_attributes=self._like is not None)
        finally:
            os.close(old)

    def _replace_any(self, folder: Folder, file: int) -> None:
        folder.replace(self._named(folder, file), self._name)
        self._temporary = None

    def _appear(self, folder: Folder, file: int) -> None:
        """Take a name that nothing has."""
        try:
            if self._temporary is None:
                os.link(f"{_DESCRIPTORS}/{file}", self._name, dst_dir_fd=folder.descriptor, follow_symlinks=True)
                return
            try:
                rename_new(folder.descriptor, self._temporary, self._name)
            except UnsupportedRenameError:
                self._appear_by_link(folder, self._temporary)
        except FileExistsError:
            raise exists_already(self._target) from None
        self._temporary = None

    def _appear_by_link(self, folder: Folder, temporary: str) -> None:
        try:
            folder.link(temporary, self._name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # A file system without links: an empty file holds the place.
            os.close(folder.open(self._name, _CREATE))
            folder.replace(temporary, self._name)
        else:
            folder.unlink(temporary)

    def _replace_checked(self, folder: Folder, file: int, check: Check) -> None:
        """Exchange names with what is there, and look at what that was: it may have come after the check."""
        found = self._look(folder, self._name)
        check()
        if found is None:
            # A check that passes although nothing is there is about this.
            try:
                self._appear(folder, file)
            except OutputError:
                raise changed_meanwhile(self._target) from None
            return
        name = self._named(folder, file, Swap(self._identity[1], found.inode, found.changed_ns))
        remove_hadoop_checksums(folder, self._name)
        try:
            exchange(folder.descriptor, name, self._name)
        except FileNotFoundError:
            raise changed_meanwhile(self._target) from None
        except UnsupportedRenameError:
            # As near to the rename as it can be.
            if self._look(folder, self._name) != found:
                raise changed_meanwhile(self._target) from None
            folder.replace(name, self._name)
            self._temporary = None
            return
        self._temporary = None  # What has this name now is not ours to remove before it was looked at.
        out = self._look(folder, name)
        if out == found:
            folder.unlink(name)
            return
        self._put_back(folder, name, Identity.of(os.fstat(file)))
        raise changed_meanwhile(self._target)

    def _put_back(self, folder: Folder, name: str, ours: Identity) -> None:
        """Give the name back to a file that was not to be replaced, and what comes out meanwhile its own."""
        newest, replaced = self._look(folder, name), ours
        for _ in range(_MOST_EXCHANGES):
            exchange(folder.descriptor, name, self._name)
            out = self._look(folder, name)
            if out is None:
                return
            if (out.device, out.inode) == (replaced.device, replaced.inode):
                folder.unlink(name)
                return
            # Someone replaced that in this moment: what came out is the newest, and goes back in its turn.
            newest, replaced = out, newest or ours
        raise OutputError(
            f"{self._target} is constantly being replaced by others; one version of it is in {name!r}.",
            hint="Stop its writers, and check which version is right.",
        )

    def _named(self, folder: Folder, file: int, swap: Swap | None = None) -> str:
        """Give the file a temporary name, or another one."""
        name = temporary_name(self._name, swap)
        if self._temporary is None:
            os.link(f"{_DESCRIPTORS}/{file}", name, dst_dir_fd=folder.descriptor, follow_symlinks=True)
        elif swap is None:
            return self._temporary
        else:
            folder.replace(self._temporary, name)
        self._temporary = name
        return name

    @staticmethod
    def _look(folder: Folder, name: str) -> Identity | None:
        try:
            return Identity.of(folder.look(name))
        except FileNotFoundError:
            return None

    # --- what is refused ---

    def _require_same_folder(self) -> None:
        try:
            found = identity_of_folder(self._folder_path)
        except FileNotFoundError:
            raise folder_moved(self._target) from None
        if found != self.folder:
            raise folder_moved(self._target)

    def _exchanged(self) -> OutputError:
        return OutputError(
            f"what lies at {self._target} is not the file that was written.",
            hint="Another process writes there: check who may write to this folder.",
        )


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file from one of another user, which may get the inode of one that was removed."""
    return found.st_dev, found.st_ino, found.st_uid


class TargetExistsError(OutputError):
    """The target is there, and must not be replaced."""


def exists_already(target: FileLocation) -> TargetExistsError:
    """Return the error for a target that is there and must not be replaced."""
    return TargetExistsError(f"{target} exists already.", hint="Use --overwrite to replace it.")


def changed_meanwhile(target: FileLocation) -> ChangedMeanwhileError:
    """Return the error for a target that is no longer what was to be replaced."""
    return ChangedMeanwhileError(f"{target} was changed by another process meanwhile.", hint="Try again.")
