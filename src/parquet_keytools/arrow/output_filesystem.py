"""The file system through which Arrow writes a data set: nothing is visible before everything is complete."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.delegating_filesystem import DelegatingHandler
from parquet_keytools.arrow.process_end import share_with_arrow
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.keys.material_store import remove_key_materials
from parquet_keytools.storage import BufferSource, FileLocation, PendingOutput

Finish = Callable[[], None]
"""What is left to do when a file is in its place."""

Encrypt = Callable[[ByteSource, PendingOutput], Finish]
"""Encrypts a plaintext file from memory into a pending output."""


class PendingHandler(DelegatingHandler):
    """Writes files under temporary names; `commit` gives them their names, `discard` removes them.

    What Arrow deletes because new data replaces it stays until `commit`, too.
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
        self._finish: list[Finish] = []
        self._replaced: list[str] = []

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open the temporary file for a file."""
        pending = PendingOutput.beside(FileLocation(self.filesystem, path))
        self._pending.append(pending)
        if self._encrypt is None:
            self._finish.append(functools.partial(remove_key_materials, pending.target))
            return self.filesystem.open_output_stream(pending.location.path, compression=None)
        return pa.PythonFile(_EncryptedOnClose(pending, self._encrypt, self._finish), mode="w")

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
        for pending in self._pending:
            pending.commit()
        written = {pending.target.path for pending in self._pending}
        for path in self._replaced:
            if path not in written:
                with contextlib.suppress(FileNotFoundError):
                    self.filesystem.delete_file(path)
        for finish in self._finish:
            finish()

    def discard(self) -> None:
        """Remove what was written."""
        for pending in self._pending:
            pending.discard()


class _EncryptedOnClose(io.RawIOBase):
    """Collects a plaintext file in memory, where alone it ever is, and encrypts it when it is closed."""

    def __init__(self, pending: PendingOutput, encrypt: Encrypt, finish: list[Finish]) -> None:
        super().__init__()
        self._buffer = bytearray()
        self._pending = pending
        self._encrypt = encrypt
        self._finish = finish
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
            source = BufferSource(str(self._pending.target), self._buffer)
            self._finish.append(self._encrypt(source, self._pending))
            self._buffer = bytearray()
