"""A file that others write as plain Parquet, and that is encrypted when it is closed."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

from parquet_keytools import audit
from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.files.conversion import encrypt_pending
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.plaintext_spool import PlaintextSpool, SpoolRoom
from parquet_keytools.files.replacement import NewKeyMaterial, put_in_place
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER
from parquet_keytools.runtime.endings import ExceptionWatch, share_with_arrow
from parquet_keytools.runtime.fork_safety import OwnerProcess
from parquet_keytools.storage.failures import failing_as_output, refuse_in_child
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import PendingOutput, pending_output, write_whole

_log = logging.getLogger(__name__)


class EncryptedOutput(io.RawIOBase):
    """Takes a plain Parquet file and writes it encrypted, whole or not at all.

    When it is closed, the module encryptor writes the file as its table says. It does not appear if it is closed
    by a `with` statement that an exception ends, that of a writer on top of it included, or with an exception on
    its way, nor in a forked child.
    """

    def __init__(
        self,
        keys: KeyService,
        table_name: str,
        target: FileLocation,
        room: SpoolRoom,
        *,
        overwrite: bool = True,
        commits_on_close: bool = True,
        on_discarded: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one; nothing is written yet.

        With `commits_on_close` it takes its place when it is closed; otherwise `commit` does that. If it does not
        take its place, `on_discarded` is called.

        Raises:
            ConfigurationError: Values of a column under a key stand in the names of its folders.
            OutputError: It cannot be written there.
        """
        super().__init__()
        self._keys = keys
        self._table_name = table_name
        self._target = target
        self._commits_on_close = commits_on_close
        self._owner = OwnerProcess()
        self._watch = ExceptionWatch()
        self._spool = PlaintextSpool(room, str(target))
        self._beginning = bytearray()
        self._overwrite = overwrite
        self._pending: PendingOutput | None = None
        self._finish: Callable[[], None] | None = None
        share_with_arrow(self)
        self._on_discarded = on_discarded
        self._is_done = False
        if target.name == "_metadata":
            raise OutputError(
                f"{target} is not written: it would hold the statistics of all files, and the places of their "
                "columns before they were encrypted.",
                hint="Write the data set without a _metadata file.",
            )
        refuse_partition_folders(keys, table_name, target.path)
        if target.is_local:
            # What cannot be written is refused now. There may be more files than a process may have open.
            pending_output(target, overwrite=overwrite).discard()

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._spool.size_bytes

    def write(self, data: Any) -> int:
        """Take some bytes of the plain file; those of no Parquet file are refused, and nothing is written."""
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
        """Encrypt what was written.

        Raises:
            KeytoolsError: It is no plain Parquet file, or its table does not allow it; nothing is written then.
            BaseException: One was raised since it was opened, and is on its way: rows may be missing.
        """
        if self.closed:
            return
        super().close()
        try:
            refuse_in_child(self._owner, self._target)
            self._watch.refuse(self._target)
            with audit.about(self._target), failing_as_output(self._target):
                self._pending = pending_output(self._target, overwrite=self._overwrite)
                self._finish = self._encrypted(self._pending)
            if self._commits_on_close:
                self.commit()
        finally:
            self._spool.close()
            if self._finish is None:
                self.discard()

    def commit(self) -> None:
        """Put the file in its place, if it was closed and was not discarded."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                with failing_as_output(self._target):
                    finish()
                self._is_done = True
            finally:
                self.discard()

    def discard(self) -> None:
        """Write nothing."""
        pending, self._pending, self._finish = self._pending, None, None
        if pending is not None:
            pending.discard()
        if not self.closed:
            super().close()
        self._spool.close()
        if not self._is_done and self._owner.is_here:
            self._is_done = True
            self._on_discarded()

    def _encrypted(self, pending: PendingOutput) -> Callable[[], None]:
        """Encrypt the file; returns what puts it in its place."""
        if not self._spool.size_bytes:
            if self._target.name.startswith(("_", ".")):
                # A mark, such as _SUCCESS: there is nothing in it that would be protected.
                return lambda: write_whole(self._target, b"")
            raise self._not_parquet()
        names = names_in_folders(self._target.path)
        new: NewKeyMaterial = encrypt_pending(
            self._keys, self._table_name, self._spool, pending, folder_names=names
        )
        return lambda: put_in_place(pending, new)

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
        # Whoever did not close it may not have written all of it.
        if not self.closed:
            if self._spool.size_bytes and self._owner.is_here:
                _log.warning(
                    "%s is not written, because it was never closed: open it in a `with` block", self._target
                )
            with contextlib.suppress(KeytoolsError, OSError):
                self.discard()


def refuse_partition_folders(keys: KeyService, table_name: str, path: str) -> None:
    """Refuse a path in which values of a protected column stand, before a folder or a file has that name."""
    check = keys.table_check(table_name)
    assert check is not None
    check.refuse_folder_names([f"{path}/"], is_planned=True)
