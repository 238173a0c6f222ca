"""Files of a data set, opened on demand, and ahead of scans that will need them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from parquet_keytools.errors import FileChangedError
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.runtime.fork_safety import ForkSafeLock

OpenMany = Callable[[Sequence[str]], Sequence[OpenedFile]]
"""Opens files together; raises the error of any of them."""

NewBatch = Callable[[], OpenMany]
"""Returns a function for one batch, which unwraps each key once, also if files are opened again one by one."""

_FIRST_BATCH = 8
_LARGEST_BATCH = 100
"""How many files are opened together: few at first, so that the first rows come soon."""

_THREADS = 2
"""One batch waits for the KMS while the next one is read."""

_SCANS = 4
"""How many scans have files opened ahead; older scans get their files on demand."""

_KEPT = 64
"""How many files are kept after their first use: some readers ask for a file more than once."""


@dataclass
class _Scan:
    """A scan in progress.

    Attributes:
        paths: The files that are not being opened yet, in order.
        ahead: The files that are open or being opened, and have not been used.
        batch: Size of the last batch.
        is_at_end: Whether there are no more paths.
    """

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
        self._waiting: dict[str, Future[OpenedFile]] = {}
        self._kept: OrderedDict[str, OpenedFile] = OrderedDict()
        self._scans: list[_Scan] = []

    def hold(self, paths: Iterable[str]) -> list[OpenedFile]:
        """Open files now, together, in the caller's thread, and keep them.

        Raises:
            KeytoolsError: A file cannot be opened; see `open_files`.
            OSError: A file cannot be read.
        """
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
                    self._waiting.pop(path).cancel()
            scan = _Scan(iter(paths))
            self._scans.append(scan)
            self._open_ahead(scan)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __getitem__(self, path: str) -> OpenedFile:
        """Return an open file.

        Raises:
            FileChangedError: It is not the same file as at its first use, or other columns can be read.
            KeytoolsError: It cannot be opened; see `open_files`.
            OSError: It cannot be read.
        """
        with self._lock:
            self._start_anew_after_fork()
            opened = self._held.get(path) or self._kept.get(path)
            future = self._waiting.pop(path, None)
            # A failure ahead of use may have been temporary.
            if opened is None and (future is None or _has_failed(future)):
                (future,) = self._submit([path])
            for scan in self._scans:
                scan.ahead.discard(path)
                self._open_ahead(scan)
        if opened is not None:
            return opened
        assert future is not None
        opened = future.result()
        identity = _identity(opened)
        with self._lock:
            if self._identities.setdefault(path, identity) != identity:
                raise FileChangedError(
                    "the file, or which of its columns can be read, changed after its footer was verified.",
                    path=path,
                    hint="Open the data set again.",
                )
            self._kept[path] = opened
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return opened

    def _start_anew_after_fork(self) -> None:
        if self._process_id != os.getpid():
            self._start()

    def _open_ahead(self, scan: _Scan) -> None:
        """Begin to open the next files of a scan, unless a whole batch is still ahead of it."""
        while len(scan.ahead) <= scan.batch and not scan.is_at_end:
            scan.batch = min(max(_FIRST_BATCH, 2 * scan.batch), _LARGEST_BATCH)
            paths = list(islice(scan.paths, scan.batch))
            scan.is_at_end = len(paths) < scan.batch
            new = [path for path in paths if not self._is_opened(path)]
            if new:
                self._waiting.update(zip(new, self._submit(new), strict=True))
                scan.ahead.update(new)

    def _is_opened(self, path: str) -> bool:
        return path in self._held or path in self._kept or path in self._waiting

    def _submit(self, paths: Sequence[str]) -> list[Future[OpenedFile]]:
        futures = [Future[OpenedFile]() for _ in paths]
        self._pool.submit(_open, self._new_batch, paths, futures)
        return futures


def _has_failed(future: Future[OpenedFile]) -> bool:
    return future.done() and future.exception() is not None


def _open(new_batch: NewBatch, paths: Sequence[str], futures: Sequence[Future[OpenedFile]]) -> None:
    """Open files for the threads that wait for them; each error goes only to those that wait for that file."""
    wanted = {
        path: future for path, future in zip(paths, futures, strict=True) if future.set_running_or_notify_cancel()
    }
    try:
        open_many = new_batch()
        opened: Sequence[OpenedFile | None] = [None] * len(wanted)
        if len(wanted) > 1:
            with contextlib.suppress(Exception):
                opened = open_many(list(wanted))
        for (path, future), file in zip(wanted.items(), opened, strict=True):
            try:
                future.set_result(file or open_many([path])[0])
            except Exception as error:
                future.set_exception(error)
    except BaseException as error:
        for future in wanted.values():
            if not future.done():
                future.set_exception(error)
        raise


def _identity(opened: OpenedFile) -> bytes:
    """Return a hash of everything that must not change, because Arrow keeps metadata for the next scan.

    Key metadata may change: rotation writes another footer under the same DEK, for the same data.
    """
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
