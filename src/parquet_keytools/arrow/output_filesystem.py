"""The file system through which Arrow writes a data set: nothing is visible before everything is complete."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.delegating_filesystem import DelegatingHandler
from parquet_keytools.arrow.process_end import share_with_arrow
from parquet_keytools.errors import OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.keys.material_store import key_material_location, remove_key_materials
from parquet_keytools.storage import BufferSource, FileLocation, PendingOutput

Finish = Callable[[], None]
"""What is left to do when a file is in its place."""

Place = Callable[[], Finish]
"""Puts key material beside a file, just before the file takes its place."""

Encrypt = Callable[[ByteSource, PendingOutput], Place]
"""Encrypts a plaintext file from memory into a pending output."""


class PendingHandler(DelegatingHandler):
    """Writes files under temporary names; `commit` gives them their names, `discard` removes them.

    What Arrow deletes because new data replaces it stays until `commit`, too. After a failure threads of Arrow
    may go on for a while: nothing comes of that.
    """

    def __init__(self, filesystem: pafs.FileSystem, encrypt: Encrypt | None) -> None:
        """Make one.

        Args:
            filesystem: Where the files go.
            encrypt: Encrypts each file when it is complete; None where Arrow has encrypted it.
        """
        super().__init__(filesystem)
        self._encrypt = encrypt
        self._pending: list[PendingOutput] = []
        self._places: list[Place] = []
        self._finish: list[Finish] = []
        self._replaced: list[str] = []
        self._state = threading.Condition()
        self._encrypting = 0
        self._discarded = False

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open the temporary file for a file."""
        pending = PendingOutput.beside(FileLocation(self.filesystem, path))
        with self._state:
            if self._discarded:
                raise OutputError(f"{path} is not written: the data set failed.")
            self._pending.append(pending)
            if self._encrypt is None:
                self._finish.append(functools.partial(remove_key_materials, pending.target))
                return self.filesystem.open_output_stream(pending.location.path, compression=None)
        return pa.PythonFile(_EncryptedOnClose(functools.partial(self._complete, pending)), mode="w")

    def _complete(self, pending: PendingOutput, content: bytearray) -> None:
        """Encrypt a file whose plaintext is complete."""
        assert self._encrypt is not None
        with self._state:
            if self._discarded:
                return
            self._encrypting += 1
        try:
            self._places.append(self._encrypt(BufferSource(str(pending.target), content), pending))
        finally:
            with self._state:
                self._encrypting -= 1
                self._state.notify_all()

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remember what is to be deleted."""
        selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
        self._replaced += [
            info.path for info in self.filesystem.get_file_info(selector) if info.type == pafs.FileType.File
        ]

    def delete_dir(self, path: str) -> None:
        """Remember what is to be deleted."""
        self.delete_dir_contents(path)

    def delete_file(self, path: str) -> None:
        """Remember what is to be deleted."""
        self._replaced.append(path)

    def commit(self) -> None:
        """Put all files in their places, then delete what they replace."""
        self._finish += [place() for place in self._places]
        for pending in self._pending:
            pending.commit()
        kept = {pending.target.path for pending in self._pending}
        # What there is to do about key material is done by those who wrote it.
        kept |= {key_material_location(pending.target).path for pending in self._pending}
        # Some file systems list paths with a slash in front and some without.
        kept = {path.lstrip("/") for path in kept}
        for path in self._replaced:
            if path.lstrip("/") not in kept:
                with contextlib.suppress(FileNotFoundError):
                    self.filesystem.delete_file(path)
        for finish in self._finish:
            finish()

    def discard(self) -> None:
        """Remove what was written, and what is being written just now."""
        with self._state:
            self._discarded = True
            self._state.wait_for(lambda: self._encrypting == 0)
        for pending in self._pending:
            pending.discard()


class _EncryptedOnClose(io.RawIOBase):
    """Collects a plaintext file in memory, where alone it ever is, and encrypts it when it is closed."""

    def __init__(self, complete: Callable[[bytearray], None]) -> None:
        super().__init__()
        self._buffer = bytearray()
        self._complete = complete
        share_with_arrow(self)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._buffer += data
        return len(data)

    def tell(self) -> int:
        return len(self._buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._complete(self._buffer)
            self._buffer = bytearray()
