"""The file systems that pyarrow calls: it reads views through one, and writes data sets through the other."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import FileChangedError, OutputError, ParquetFormatError
from parquet_keytools.files.conversion import encrypt_pending
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, as_verified
from parquet_keytools.files.placement import KeyMaterials, put_all_in_place
from parquet_keytools.files.plaintext_spool import PlaintextSpool, SpoolRoom
from parquet_keytools.format.file_layout import ByteSource, RangedFile
from parquet_keytools.keys.material_store import key_material_location
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, in_threads, in_use, share_with_arrow
from parquet_keytools.storage.local_files import (
    FolderIdentity,
    belongs_to_writer,
    exclusive_folder,
    identity_of_folder,
    remove_beneath,
)
from parquet_keytools.storage.locations import ArrowSource, FileLocation, PartialHandler
from parquet_keytools.storage.outputs import MadeFolders, PendingOutput, pending_output
from parquet_keytools.storage.walk import all_files, names_passed_over
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile

if TYPE_CHECKING:
    import pyarrow.dataset as ds

# --- Files of a data set, opened on demand, and ahead of scans that will need them ---

OpenMany = Callable[[Sequence[str]], Sequence[OpenedFile]]
"""Opens files together; raises the error of any of them."""

NewBatch = Callable[[], OpenMany]
"""Returns a function for one batch, which unwraps each key once, also if files are opened again one by one."""

_Batch = Future[tuple[Callable[[str], OpenedFile], dict[str, OpenedFile]]]
"""A function that opens one file of a batch, and files that are not used yet: none if one could not be opened."""

_FIRST_BATCH = 8
_LARGEST_BATCH = 100
"""How many files are opened together: few at first, so that the first rows come soon."""

_THREADS = 2
"""One batch waits for the KMS while the next one is read."""

_SCANS = 4
"""How many scans have files opened ahead; older scans get their files on demand."""

KEPT_FILES = 64
"""How many files are kept after their first use: some readers ask for a file more than once."""


@dataclass
class _Scan:
    """A scan in progress: files that are not being opened yet, and files that are open and not used."""

    paths: Iterator[str]
    ahead: set[str] = field(default_factory=set)
    batch: int = 0
    is_at_end: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all files have been used."""
        return self.is_at_end and not self.ahead


class FilesAhead:
    """Files by path, opened on demand by threads of its own, which call the KMS.

    A file that was used must stay the same file: another one under its name is refused, even if it is valid.
    Thread-safe; may be used in a forked child.
    """

    def __init__(self, paths: Iterable[str], new_batch: NewBatch) -> None:
        self._paths = frozenset(paths)
        self._new_batch = new_batch
        self._held: dict[str, OpenedFile] = {}
        self._identities: dict[str, bytes] = {}
        self._lock = ForkSafeLock()
        self._start()

    def _start(self) -> None:
        """Begin empty; a forked child has no threads to finish what its parent began."""
        self._process_id = os.getpid()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="keytools-open")
        self._waiting: dict[str, _Batch] = {}
        self._kept: OrderedDict[str, OpenedFile] = OrderedDict()
        self._scans: list[_Scan] = []

    def hold(self, paths: Iterable[str]) -> list[OpenedFile]:
        """Open files now, together, in the caller's thread, and keep them."""
        paths = list(dict.fromkeys(paths))
        new = [path for path in paths if path not in self._held]
        if new:
            self._held.update(zip(new, self._new_batch()(new), strict=True))
        return [self._held[path] for path in paths]

    def read_ahead(self, paths: Iterable[str]) -> None:
        """Open files ahead of a scan that will use them in this order, some at a time."""
        with self._lock:
            self._start_anew_after_fork()
            self._scans = [scan for scan in self._scans if not scan.is_over]
            while len(self._scans) >= _SCANS:
                for path in self._scans.pop(0).ahead:
                    del self._waiting[path]
            scan = _Scan(iter(paths))
            self._scans.append(scan)
            self._open_ahead(scan)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __getitem__(self, path: str) -> OpenedFile:
        """Return an open file; `FileChangedError` if it, or which of its columns can be read, has changed."""
        with self._lock:
            self._start_anew_after_fork()
            opened = self._held.get(path) or self._kept.get(path)
            batch = self._waiting.pop(path, None)
            for scan in self._scans:
                scan.ahead.discard(path)
                self._open_ahead(scan)
        if opened is not None:
            return opened
        if batch is None:
            (opened,) = self._pool.submit(self._new_batch(), [path]).result()
        else:
            open_one, files = batch.result()
            # A failure of a batch is of one of its files, and may have been temporary.
            opened = files.pop(path, None) or self._pool.submit(open_one, path).result()
        identity = _identity(opened)
        with self._lock:
            if self._identities.setdefault(path, identity) != identity:
                raise FileChangedError(
                    "the file, or which of its columns can be read, changed after its footer was verified.",
                    path=path,
                    hint="Open the data set again.",
                )
            self._kept[path] = opened
            if len(self._kept) > KEPT_FILES:
                self._kept.popitem(last=False)
        return opened

    def _start_anew_after_fork(self) -> None:
        if self._process_id != os.getpid():
            self._start()

    def _open_ahead(self, scan: _Scan) -> None:
        """Begin to open the next files of a scan, unless a whole batch is still ahead of it."""
        opened = self._held, self._kept, self._waiting
        while len(scan.ahead) <= scan.batch and not scan.is_at_end:
            scan.batch = min(max(_FIRST_BATCH, 2 * scan.batch), _LARGEST_BATCH)
            paths = list(islice(scan.paths, scan.batch))
            scan.is_at_end = len(paths) < scan.batch
            new = [path for path in paths if not any(path in known for known in opened)]
            if new:
                self._waiting.update(dict.fromkeys(new, self._pool.submit(self._open, new)))
                scan.ahead.update(new)

    def _open(self, paths: Sequence[str]) -> tuple[Callable[[str], OpenedFile], dict[str, OpenedFile]]:
        open_many, one_at_a_time = self._new_batch(), threading.Lock()
        files: dict[str, OpenedFile] = {}
        with contextlib.suppress(Exception):
            files.update(zip(paths, open_many(paths), strict=True))

        def open_one(path: str) -> OpenedFile:
            with one_at_a_time:
                return open_many([path])[0]

        return open_one, files


def _identity(opened: OpenedFile) -> bytes:
    """Return a hash of everything that must not change between scans; rotation changes key metadata only."""
    digest = hashlib.sha256()
    envelope = opened.footer.envelope
    if opened.is_encrypted:
        digest.update(opened.retriever.footer_dek(envelope.key_metadata).reveal())
        digest.update(opened.footer.file_aad)
    else:
        digest.update(opened.tail.data)
    denied = [column.ordinal for column in opened.footer.columns if column.path in opened.denied]
    keys = opened.retriever.uses_data_keys, opened.retriever.key_materials is None
    digest.update(repr((envelope.mode, envelope.algorithm, envelope.footer_offset, denied, keys)).encode())
    return digest.digest()


# --- File systems ---

PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_A_TIME = 4

_MOST_VIEWS = 64
"""How many views are kept: Arrow opens a file for its schema, and again for its data."""

FOOTER_READ_BYTES = 64 * 1024
"""Arrow reads this much from the end of a file for its footer. A gap of this length keeps pages out of that read:
they would be decrypted for nothing, and a damaged page would break reads of other columns."""


class LookingHandler(PartialHandler):
    """Looks into another file system, and refuses all other operations."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self.filesystem = filesystem
        share_with_arrow(self)

    def get_type_name(self) -> str:
        """Return the name of the file system underneath."""
        return str(self.filesystem.type_name)

    def normalize_path(self, path: str) -> str:
        """Return the path in its usual form."""
        return str(self.filesystem.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return what is known of some paths."""
        return list(self.filesystem.get_file_info(paths))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return what is known of the files of a folder."""
        return list(self.filesystem.get_file_info(selector))


Reopen = Callable[[list[str], pa.Schema], "ds.Dataset"]
"""Makes a data set of these files with this schema, in another process."""


class ViewHandler(LookingHandler):
    """Opens views of files whose footers were verified, and no other files.

    Columns that cannot be read are in the view, and reading them raises our error: Arrow would fill a missing
    column with nulls.
    """

    partitioning: ds.Partitioning | None = None
    """How a data set reads the names of its folders and files as values."""

    def __init__(
        self, filesystem: pafs.FileSystem, files: FilesAhead, denied_columns: str, reopen: Reopen | None
    ) -> None:
        """Serve files; `denied_columns` is the setting of the configuration."""
        super().__init__(filesystem)
        self.files = files
        self.reopen = reopen
        self._denied_columns = denied_columns
        self._pages = PageCache()
        self._lock = ForkSafeLock()
        self._views: OrderedDict[str, tuple[OpenedFile, PlainFile]] = OrderedDict()

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return the types of some paths. The length of a view is unknown before it is opened."""
        return [
            pafs.FileInfo(path, pafs.FileType.File) if path in self.files else info
            for path, info in zip(paths, super().get_file_info(paths), strict=True)
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open the view of a file."""
        if path not in self.files:
            raise ParquetFormatError(
                "the file was not there when the data set was opened.", path=path, hint="Open it again."
            )
        with in_use():
            opened = self.files[path]
            file = self.filesystem.open_input_file(path)
            source: ByteSource = ArrowSource(path, file, file.size())
            if not opened.location.is_local:
                source = SourceInParts(source)
            source = as_verified(opened, source)
            if opened.is_encrypted or opened.digests is not None:
                with self._lock:
                    known, view = self._views.get(path, (None, None))
                if view is not None and known is opened:
                    source = view.over(source)
                else:
                    has_stand_ins = opened.digests is not None or (
                        self._denied_columns == "null" and opened.refused
                    )
                    shown = self._denied_columns if has_stand_ins else "error"
                    source = view = PlainFile(opened, source, shown, self._pages, gap=FOOTER_READ_BYTES)
                    with self._lock:
                        self._views[path] = opened, view
                        if len(self._views) > _MOST_VIEWS:
                            self._views.popitem(last=False)
        return pa.PythonFile(_ViewInput(source, file), mode="r")


class SourceInParts:
    """A source on another machine whose long ranges are read in parts, at once: Arrow reads one at a time."""

    def __init__(self, source: ByteSource) -> None:
        self.path = source.path
        self.size_bytes = source.size_bytes
        self._source = source

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return a range."""
        if length <= PART_BYTES:
            return self._source.read_at(offset, length)
        parts = [
            (start, min(PART_BYTES, offset + length - start))
            for start in range(offset, offset + length, PART_BYTES)
        ]
        return b"".join(in_threads(lambda part: self._source.read_at(*part), parts, _PARTS_AT_A_TIME))


class _ViewInput(RangedFile):
    """A view as a Python file. Arrow locks it while it reads."""

    read = RangedFile.read_uncopied  # type: ignore[assignment]  # Arrow takes any buffer.

    def __init__(self, source: ByteSource, file: pa.NativeFile) -> None:
        """Make one; closing it closes `file`, from which the source reads."""
        super().__init__()
        self._source = source
        self._file = file
        self.size_bytes = source.size_bytes
        share_with_arrow(self)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        if not length:
            return b""
        with in_use():
            if not isinstance(self._source, PlainFile):
                return self._source.read_at(offset, length)
            # Arrow's pool reuses memory. New memory from the operating system costs more than decryption.
            out = memoryview(pa.allocate_buffer(length)).cast("B")
            self._source.read_into(offset, out)
            return out

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class PendingHandler(LookingHandler):
    """Writes encrypted files under temporary names; `commit` gives them their names.

    What Arrow deletes because new data replaces it stays until `commit`, too. An error while Arrow opens or closes
    a file may end the process, because Arrow's writer then uses memory that it has freed: `commit` raises such
    errors, and until then nothing more is written.
    """

    def __init__(
        self,
        folder: FileLocation,
        keys: KeyService | None,
        table_name: str,
        *,
        overwrite: bool = True,
        durable: bool = True,
        key_values: Mapping[str, str] | None = None,
    ) -> None:
        """Make one for a folder; each file is encrypted with `keys` when it is closed, unless pyarrow encrypts.

        Without `overwrite`, no file is replaced, even one that appears during the work. With `durable`, local
        files are synced to disk, all together, before the first appears.
        """
        super().__init__(folder.filesystem)
        self._folder = folder
        self._start = len(folder.path.rstrip("/"))
        self._keys = keys
        self._table_name = table_name
        self._overwrite = overwrite
        self._durable = durable
        self._key_values = key_values
        self._pending: list[PendingOutput] = []
        self._key_materials: dict[str, KeyMaterials | None] = {}
        self._replaced: list[str] = []
        self._replaced_in: FolderIdentity | None = None
        self._made = MadeFolders(folder.filesystem)
        self._state = threading.Condition()
        self._encrypting = 0
        self._is_discarded = False
        self._failure: Exception | None = None
        self._room = SpoolRoom(folder.below("file"))

    @contextlib.contextmanager
    def failing_at_commit(self) -> Iterator[None]:
        """Keep an error for `commit`."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def until_failure(self, source: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """Return a stream that ends after a failure: Arrow would read the rest in vain, perhaps for hours."""

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in source:
                yield batch
                if self._failure is not None:
                    return

        return pa.RecordBatchReader.from_batches(source.schema, batches())

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file that is encrypted when it is closed; after a failure, a file that is forgotten."""
        spool = pending = None
        with self.failing_at_commit():
            self._refuse_passed_over(path)
            with self._state:
                if self._goes_on:
                    # There may be more files than a process may have open.
                    pending = pending_output(
                        FileLocation(self.filesystem, path),
                        overwrite=self._overwrite,
                        keeps_open=False,
                        durable=self._durable,
                    )
                    self._pending.append(pending)
                    if self._keys is None:
                        return pending.open_stream()
                    spool = PlaintextSpool(self._room, str(pending.target))
        return pa.PythonFile(_EncryptedOnClose(self, pending, spool), mode="w")

    @property
    def _goes_on(self) -> bool:
        return not self._is_discarded and self._failure is None

    def encrypt(self, pending: PendingOutput, source: PlaintextSpool) -> None:
        """Encrypt a file whose plaintext is complete."""
        with self._state:
            if not self._goes_on or self._keys is None:
                return
            self._encrypting += 1
        try:
            self._key_materials[pending.target.path], _ = encrypt_pending(
                self._keys, self._table_name, source, pending, key_values=self._key_values
            )
        finally:
            with self._state:
                self._encrypting -= 1
                self._state.notify_all()

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return the files of a folder: empty folders, as a killed process leaves them, hold no data."""
        return [info for info in super().get_file_info_selector(selector) if info.type != pafs.FileType.Directory]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder; `discard` removes it again. After a failure nothing is created."""
        with self.failing_at_commit(), self._state:
            self._refuse_passed_over(path)
            if self._goes_on:
                self._made.create(path, recursive=recursive)

    def _refuse_links(self, path: str) -> None:
        """Refuse to delete what is behind a link: anyone who may write to the data set can put one there."""
        if not isinstance(self.filesystem, pafs.LocalFileSystem):
            return
        names = path[self._start :].strip("/").split("/")
        for length in range(1, len(names) + 1):
            folder = Path(path[: self._start], *names[:length])
            if names[0] and folder.is_symlink():
                raise OutputError(
                    f"{folder} is a link, and what is behind it would be deleted.",
                    hint="Remove the link, or choose another existing_data_behavior.",
                )

    def _refuse_passed_over(self, path: str) -> None:
        """Refuse names that readers of data sets skip: the rows would be lost silently."""
        lost = names_passed_over(path[self._start :])
        if lost:
            raise OutputError(
                f"{path} is not written: readers of data sets skip names such as {lost[0]!r}, which begin "
                "with a dot or an underscore.",
                hint="Partition hive-style, with names such as `column=value`, or choose other names.",
            )

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remember what `commit` deletes: links themselves, and nothing that they lead to."""
        with self.failing_at_commit():
            self._refuse_links(path)
            self._remember_folder()
            found = [file.path for file in all_files(FileLocation(self.filesystem, path))]
            # Another writer may be at work.
            self._replaced += [file for file in found if not belongs_to_writer(PurePosixPath(file).name)]

    delete_dir = delete_dir_contents

    def delete_file(self, path: str) -> None:
        """Remember what `commit` deletes."""
        self._remember_folder()
        self._replaced.append(path)

    def _remember_folder(self) -> None:
        if self._folder.is_local and self._replaced_in is None:
            with contextlib.suppress(FileNotFoundError):
                self._replaced_in = identity_of_folder(self._folder.path)

    def commit(self) -> list[FileLocation]:
        """Put all files in their places, then delete what they replace; raise the first error so far."""
        if self._failure is not None:
            raise self._failure
        put_all_in_place(
            [(pending, self._key_materials.get(pending.target.path)) for pending in self._pending],
            durable=self._durable,
        )
        kept = {pending.target.path for pending in self._pending}
        # `put_all_in_place` replaced their key material.
        kept |= {key_material_location(pending.target).path for pending in self._pending}
        # Some file systems list paths with a slash in front and some without.
        kept = {path.lstrip("/") for path in kept}
        replaced = [FileLocation(self.filesystem, path) for path in self._replaced]
        materials = {key_material_location(location).path for location in replaced}
        # Files before their key material: after an interruption, a file without it could not be read.
        for location in sorted(replaced, key=lambda location: location.path in materials):
            path = location.path
            if path.lstrip("/") not in kept:
                with contextlib.suppress(FileNotFoundError), exclusive_folder(location):
                    if self._replaced_in is None:
                        self.filesystem.delete_file(path)
                    else:
                        remove_beneath(self._folder, self._replaced_in, location)
        return [pending.target for pending in self._pending]

    def discard(self) -> None:
        """Remove what was written, and folders made for it, after files that are being encrypted now."""
        with self._state:
            self._is_discarded = True
            self._state.wait_for(lambda: self._encrypting == 0)
        for pending in self._pending:
            pending.discard()
        with self._state:
            self._made.remove_empty()


class _EncryptedOnClose(io.RawIOBase):
    """Collects a plaintext file, which is encrypted when it is closed; without a spool, forgets it."""

    def __init__(
        self, handler: PendingHandler, pending: PendingOutput | None, spool: PlaintextSpool | None
    ) -> None:
        super().__init__()
        self._handler = handler
        self._pending = pending
        self._spool = spool
        self._size_bytes = 0
        share_with_arrow(self)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._size_bytes += len(data)
        if self._spool is not None:
            with self._handler.failing_at_commit():
                return self._spool.write(data)
            self._forget()
        return len(data)

    def tell(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._spool is not None and self._pending is not None:
                with self._handler.failing_at_commit():
                    self._handler.encrypt(self._pending, self._spool)
                self._forget()

    def _forget(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
