"""The file system through which Arrow writes a data set: nothing is visible before everything is complete."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import DelegatingHandler
from parquet_keytools.errors import OutputError
from parquet_keytools.files.conversion import encrypt_pending
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.plaintext_spool import PlaintextSpool, SpoolRoom
from parquet_keytools.files.replacement import NewKeyMaterial, put_all_in_place
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.storage.local_files import FolderIdentity, identity_of_folder, remove_beneath
from parquet_keytools.storage.locations import FileLocation, key_material_location
from parquet_keytools.storage.locks import exclusive_folder
from parquet_keytools.storage.made_folders import MadeFolders
from parquet_keytools.storage.outputs import PendingOutput, pending_output
from parquet_keytools.storage.walk import all_files, names_passed_over


class PendingHandler(DelegatingHandler):
    """Writes files under temporary names; `commit` gives them their names, `discard` removes them.

    What Arrow deletes because new data replaces it stays until `commit`, too. After a failure threads of Arrow
    may go on for a while: nothing comes of that.

    What fails here is raised by `commit`: an error while Arrow opens or closes a file may end the process, for
    Arrow's writer of data sets goes on with what it has freed.
    """

    def __init__(
        self, folder: FileLocation, keys: KeyService | None, table_name: str, *, durable: bool = True
    ) -> None:
        """Make one for a folder; its keys encrypt each file that is complete, or are None where Arrow does.

        Local files are synced to the disk, unless not `durable`, all together, before the first appears.
        """
        super().__init__(folder.filesystem)
        self._folder = folder
        self._start = len(folder.path.rstrip("/"))
        self._keys = keys
        self._table_name = table_name
        self._durable = durable
        self._pending: list[PendingOutput] = []
        self._key_materials: dict[str, NewKeyMaterial] = {}
        self._replaced: list[str] = []
        self._replaced_in: FolderIdentity | None = None
        self._made = MadeFolders(folder.filesystem)
        self._state = threading.Condition()
        self._encrypting = 0
        self._discarded = False
        self._failure: Exception | None = None
        self._room = SpoolRoom(folder.child("file"))

    def begin(self, path: str) -> PendingOutput:
        """Return the output of a file that the caller encrypts itself; `complete` says what lies beside it."""
        self._refuse_passed_over(path)
        self._pending.append(self._begun(path))
        return self._pending[-1]

    def complete(self, key_material: NewKeyMaterial) -> None:
        """Remember what lies beside a file."""
        self._key_materials[key_material.parquet_file.path] = key_material

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open the temporary file for a file; after a failure, one that is forgotten."""
        if self._failure is None:
            with self._failing_at_commit():
                return self._open_pending(path)
        return pa.PythonFile(_EncryptedOnClose(None, self._failing_at_commit), mode="w")

    @contextlib.contextmanager
    def _failing_at_commit(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def until_failure(self, source: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """Return a stream that ends after a failure: what follows would be read in vain, perhaps for hours."""

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in source:
                yield batch
                if self._failure is not None:
                    return

        return pa.RecordBatchReader.from_batches(source.schema, batches())

    def _open_pending(self, path: str) -> pa.NativeFile:
        self._refuse_passed_over(path)
        with self._state:
            if self._discarded:
                raise OutputError(f"{path} is not written: the data set failed.")
            pending = self._begun(path)
            self._pending.append(pending)
            if self._keys is None:
                return pending.open_stream()
        spool = PlaintextSpool(self._room, str(pending.target))
        complete = functools.partial(self._complete, self._keys, pending, spool)
        return pa.PythonFile(_EncryptedOnClose(spool, self._failing_at_commit, complete), mode="w")

    def _begun(self, path: str) -> PendingOutput:
        # There may be more files than a process may have open.
        return pending_output(FileLocation(self.filesystem, path), keeps_open=False, durable=self._durable)

    def _complete(self, keys: KeyService, pending: PendingOutput, source: PlaintextSpool) -> None:
        """Encrypt a file whose plaintext is complete."""
        with self._state:
            if self._discarded or self._failure is not None:
                return
            self._encrypting += 1
        try:
            key_material = encrypt_pending(keys, self._table_name, source, pending)
            self.complete(key_material)
        finally:
            with self._state:
                self._encrypting -= 1
                self._state.notify_all()

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return the files of a folder: folders without any, as a killed process leaves them, hold no data."""
        return [info for info in super().get_file_info_selector(selector) if info.type != pafs.FileType.Directory]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder; `discard` removes it again. After a failure nothing is created."""
        with self._failing_at_commit(), self._state:
            self._refuse_passed_over(path)
            if not self._discarded and self._failure is None:
                self._made.create(path, recursive=recursive)

    def _refuse_links(self, path: str) -> None:
        """Refuse to delete what is behind a link in the data set: whoever may write there can put one."""
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
        """Refuse names that no reader of the data set would look at: its rows would be lost without a word."""
        lost = names_passed_over(path[self._start :])
        if lost:
            raise OutputError(
                f"{path} is not written: readers of data sets skip names such as {lost[0]!r}, which begin "
                "with a dot or an underscore.",
                hint="Partition hive-style, with names such as `column=value`, or choose other names.",
            )

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remember what is to be deleted: links themselves, and nothing that they lead to."""
        with self._failing_at_commit():
            self._refuse_links(path)
            self._remember_folder()
            self._replaced += [file.path for file in all_files(FileLocation(self.filesystem, path))]

    def delete_dir(self, path: str) -> None:
        """Remember what is to be deleted."""
        self.delete_dir_contents(path)

    def delete_file(self, path: str) -> None:
        """Remember what is to be deleted."""
        self._remember_folder()
        self._replaced.append(path)

    def _remember_folder(self) -> None:
        if self._folder.is_local and self._replaced_in is None:
            with contextlib.suppress(FileNotFoundError):
                self._replaced_in = identity_of_folder(self._folder.path)

    def commit(self) -> list[FileLocation]:
        """Put all files in their places, then delete what they replace; raise what failed before."""
        if self._failure is not None:
            raise self._failure
        put_all_in_place(
            [
                (pending, self._key_materials.get(pending.target.path, NewKeyMaterial(pending.target)))
                for pending in self._pending
            ],
            durable=self._durable,
        )
        kept = {pending.target.path for pending in self._pending}
        # What there is to do about key material is done by those who wrote it.
        kept |= {key_material_location(pending.target).path for pending in self._pending}
        # Some file systems list paths with a slash in front and some without.
        kept = {path.lstrip("/") for path in kept}
        replaced = [FileLocation(self.filesystem, path) for path in self._replaced]
        materials = {key_material_location(location).path for location in replaced}
        # A file without its key material could not be read, should this end in between.
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
        """Remove what was written, and what is being written just now, and folders made for it."""
        with self._state:
            self._discarded = True
            self._state.wait_for(lambda: self._encrypting == 0)
        for pending in self._pending:
            pending.discard()
        with self._state:
            self._made.remove_empty()


class _EncryptedOnClose(io.RawIOBase):
    """Collects a plaintext file, which is encrypted when it is closed; after a failure, takes and forgets it."""

    def __init__(
        self,
        spool: PlaintextSpool | None,
        failing_later: Callable[[], contextlib.AbstractContextManager[None]],
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._spool = spool
        self._failing_later = failing_later
        self._complete = complete
        self._size_bytes = 0
        share_with_arrow(self)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._size_bytes += len(data)
        if self._spool is not None:
            with self._failing_later():
                return self._spool.write(data)
            self._forget()
        return len(data)

    def tell(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._spool is not None:
                with self._failing_later():
                    self._complete()
                self._forget()

    def _forget(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
