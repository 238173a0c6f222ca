"""Views that were opened, kept for the next reader of the same files; and one as a file object of Python."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pyarrow import fs as pafs

from parquet_keytools.errors import KEY_REFUSALS, FolderNameError, KeytoolsError, KmsError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.byte_ranges import RangedFile
from parquet_keytools.runtime.endings import in_use, share_with_arrow
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.storage.local_files import state_of_local
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, open_plain_file

_MOST_KEPT = 128
"""How many files are kept; each has a file open, and its footer in memory."""

_MOST_FOLDERS = 1_000
"""How many folders are remembered, where files of any folder are opened."""

_MOST_VERDICTS = 100_000
"""How many files of a listing are remembered."""

_CLOCK_STEP_SECONDS = 2
"""Object stores say to the second when an object was written: within that, another may say the same."""

Version = tuple[object, ...]


class PlainInput(RangedFile):
    """The view of one file, to read and seek in; any number may be open."""

    mode = "rb"
    blocksize = 4 * 1024 * 1024
    """With `cache`, what fsspec's `blockcache` asks for. Its cache is not used and stays empty."""
    cache: Any = None

    def __init__(
        self, file: PlainFile, reopen: Callable[[], Any] | None = None, *, whole_row_groups: bool = False
    ) -> None:
        """Make one; `reopen` opens it again in another process. For `whole_row_groups` see `PlainFile.read_at`."""
        super().__init__()
        self.name = self.path = file.path
        self.size = self.size_bytes = file.size_bytes
        self._file = file
        self._reopen = reopen
        self._whole_row_groups = whole_row_groups
        share_with_arrow(self)

    @property
    def closed(self) -> bool:
        """Whether it is closed; `blockcache` sets that, too, after it has closed it."""
        return super().closed

    @closed.setter
    def closed(self, value: bool) -> None:
        if value:
            self.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return a range, as fsspec's caches ask for it."""
        return self.read_at(start, end - start)

    @in_use()
    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range of the view."""
        return self._file.read_at(offset, length, whole_row_groups=self._whole_row_groups) if length else b""

    def __reduce__(self) -> Any:
        if self._reopen is None:
            raise TypeError("this file cannot be pickled")
        return self._reopen, ()


class PlainFiles:
    """Opens views of the files of a table; for any number of threads.

    An engine opens a file several times for one query. It gets the same view, unless the file was replaced, or the
    keys were fetched longer ago than keys are kept for reading. Of two files of a folder that share their data
    keys the one that is opened later is refused.
    """

    def __init__(
        self,
        keys: KeyService,
        table_name: str | None,
        aad_prefix: str | bytes | None = None,
        *,
        is_one_folder: bool = True,
    ) -> None:
        """Make one; unless all files are of one data set, those are that lie in one folder."""
        self._keys = keys
        self._table_name = table_name
        self._aad_prefix = aad_prefix
        self._is_one_folder = is_one_folder
        self._identities: OrderedDict[str, FileIdentities] = OrderedDict()
        self._cache = PageCache()
        self._kept: OrderedDict[str, tuple[PlainFile, Version, float]] = OrderedDict()
        """Path -> view, version of its file, and when it was opened."""
        self._verdicts: OrderedDict[tuple[str, int | None, int | None], tuple[str, str] | None] = OrderedDict()
        """Path, length and time of a file that was listed -> what `_misplacement` returned."""
        self._sizes: OrderedDict[str, tuple[int, Version, float]] = OrderedDict()
        """Path -> length of the view, version of its file, and when it was opened."""
        self._lock = ForkSafeLock()

    @in_use()
    def open(self, location: FileLocation) -> PlainFile:
        """Return the view of a file; errors as `open_plain_file`, or `ReusedKeysError`."""
        version = _version(location)
        with self._lock:
            file, known, opened_at = self._kept.get(location.path, (None, None, 0.0))
            if file is not None and version is not None and known == version and self._is_fresh(opened_at):
                self._kept.move_to_end(location.path)
                return file
        opened_at = time.monotonic()
        file = open_plain_file(
            self._keys,
            location,
            self._table_name,
            self._aad_prefix,
            cache=self._cache,
            identities=self._identities_beside(location),
        )
        # One that is replaced meanwhile has another version now.
        if version is not None and version == _version(location):
            with self._lock:
                self._kept[location.path] = file, version, opened_at
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return file

    def size_bytes(self, location: FileLocation, info: pafs.FileInfo) -> int:
        """Return the length of the view of a file that was listed; errors as with `open`.

        The footer says it. A folder is listed more often than it changes, and has more files than views are kept:
        the length is remembered as long as the file stays and its keys are kept.
        """
        version = _version(location, info)
        with self._lock:
            size, known, opened_at = self._sizes.get(location.path, (0, None, 0.0))
            if version is not None and known == version and self._is_fresh(opened_at):
                return size
        opened_at = time.monotonic()
        size = self.open(location).size_bytes
        if version is not None:
            with self._lock:
                self._sizes[location.path] = size, version, opened_at
                if len(self._sizes) > _MOST_VERDICTS:
                    self._sizes.popitem(last=False)
        return size

    def _is_fresh(self, opened_at: float) -> bool:
        return time.monotonic() - opened_at < self._keys.configuration.reading.cache_lifetime_seconds

    def refuse_misplaced(self, info: pafs.FileInfo, location: FileLocation, *, is_listed: bool) -> None:
        """Refuse a file whose folders give values to its protected columns.

        Each listing asks again: what was found is remembered, as long as length and time of the file stay. Of a
        file that is listed with others only the footer is read. One that is asked for by name is opened: its view
        is kept for the reader who opens it next.

        Raises:
            FolderNameError: A folder that it lies in gives values to such a column.
            KmsError: The KMS could not be asked for the key of its footer.
        """
        if not names_in_folders(location.path):
            return
        key = location.path, info.size, info.mtime_ns
        with self._lock:
            is_known, verdict = key in self._verdicts, self._verdicts.get(key)
        if not is_known:
            verdict = self._misplacement(location, is_listed=is_listed)
            with self._lock:
                self._verdicts[key] = verdict
                if len(self._verdicts) > _MOST_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict is not None:
            raise FolderNameError(str(location), *verdict)

    def _misplacement(self, location: FileLocation, *, is_listed: bool) -> tuple[str, str] | None:
        """Return the folder that gives values to a protected column of a file, and this column."""
        try:
            if not is_listed:
                self.open(location)
                return None
            self._keys.open_files(
                [location],
                self._table_name,
                self._aad_prefix,
                wanted=lambda _: (),
                identities=self._identities_beside(location),
            )
        except FolderNameError as error:
            return error.folder, error.column or ""
        except KmsError as error:
            # Who may not have the key sees a file that does not open.
            if not isinstance(error, KEY_REFUSALS):
                raise
        except (KeytoolsError, OSError):
            pass  # Who opens it gets the error.
        return None

    def _identities_beside(self, location: FileLocation) -> FileIdentities:
        """Return what remembers the files that must not share keys with a file."""
        folder = "" if self._is_one_folder else location.path.rpartition("/")[0]
        with self._lock:
            found = self._identities.setdefault(folder, FileIdentities(refuses=True))
            self._identities.move_to_end(folder)
            if len(self._identities) > _MOST_FOLDERS:
                self._identities.popitem(last=False)
            return found


def _version(location: FileLocation, info: pafs.FileInfo | None = None) -> Version | None:
    """Return what changes when a file is replaced; None where that cannot be known."""
    if location.is_local:
        return state_of_local(location.path)  # A file that is open keeps its inode.
    info = info or location.info()
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(str(location))
    if info.mtime_ns is None or time.time() - info.mtime_ns / 1e9 < _CLOCK_STEP_SECONDS:
        return None
    return info.size, info.mtime_ns
