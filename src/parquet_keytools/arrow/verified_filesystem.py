"""The file system through which Arrow reads: it serves files that were opened, and only as they were then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.decryption_properties import arrow_read_limits
from parquet_keytools.arrow.delegating_filesystem import DelegatingHandler
from parquet_keytools.arrow.redacted_source import redacted_source
from parquet_keytools.arrow.source_file import source_file
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.opened_file import OpenedFile, as_verified
from parquet_keytools.storage import ArrowSource

Decrypt = Callable[[OpenedFile, Sequence[str] | None], pa.Buffer]
"""Returns a plaintext Parquet file of the named columns, None for all, for a file that Arrow cannot decrypt."""


class VerifiedHandler(DelegatingHandler):
    """Serves files whose footers were verified.

    Arrow accepts a plaintext file in place of an encrypted one: a file that is not the one that was verified is
    refused here. A file that Arrow cannot decrypt is decrypted in memory; of a file with columns that cannot be
    read Arrow does not see that these are encrypted.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        files: Iterable[OpenedFile],
        decrypt: Decrypt,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Make one.

        Args:
            filesystem: Where the files lie.
            files: The files.
            decrypt: For a file that Arrow cannot decrypt.
            columns: What will be read of such a file; None for all.
        """
        super().__init__(filesystem)
        self._files = {opened.location.path: opened for opened in files}
        self._decrypt = decrypt
        self._columns = columns

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return what is known of some paths; a decrypted file has another size, which nobody knows yet."""
        return [
            pafs.FileInfo(path, pafs.FileType.File) if path in self._files else info
            for path, info in zip(paths, super().get_file_info(paths), strict=True)
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open one of the files."""
        opened = self._files.get(path)
        if opened is None:
            raise ParquetFormatError(
                "the file was not there when the data set was opened.", path=path, hint="Open it again."
            )
        file = self.filesystem.open_input_file(path)
        source = ArrowSource(path, file, file.size())
        verified = as_verified(opened, source)
        if opened.is_encrypted and arrow_read_limits(opened):
            file.close()
            return pa.BufferReader(self._decrypt(opened, self._columns))
        if opened.denied:
            return source_file(redacted_source(opened, verified), file)
        return file if verified is source else source_file(verified, file)
