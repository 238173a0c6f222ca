"""A FileIO of PyIceberg that encrypts what it writes: no manifest and no data file is stored in plaintext."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyiceberg.io import FileIO, InputFile, OutputFile, OutputStream

from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.file_encryptor import encrypt_source
from parquet_keytools.errors import NotEncryptedError, OutputError
from parquet_keytools.iceberg.ags1 import Ags1Reader, Ags1Writer
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.file_io import EncryptedFileIO, EncryptedInputFile
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.iceberg.table_files import check_length, decrypt_data_file
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.storage.outputs import StreamSink
from parquet_keytools.storage.sources import BufferSource


class StoredFileIO(FileIO):
    """Reads and writes files of a table as they are stored: metadata files in plaintext, and ciphertext.

    Args:
        reader: What reads the table.
        places: Where it may write and delete; None for a new table, which lies where its maker says.
    """

    def __init__(self, reader: EncryptedFileIO, places: TablePlaces | None) -> None:
        super().__init__(reader.properties)
        self._reader = reader
        self._places = places

    def new_input(self, location: str) -> InputFile:
        """Return a file to read."""
        return self._reader.stored_input(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write; a location outside of the places of the table is refused."""
        if self._places is not None:
            self._places.check(location)
        return self._reader.storage(location).new_output(self._reader.mapped(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; a location outside of the places of the table is refused."""
        if self._places is not None:
            self._places.check(location if isinstance(location, str) else location.location)
        self._reader.delete(location)


class WritingFileIO(FileIO):
    """Reads like another FileIO, and encrypts what it writes: `.avro` as AGS1, `.parquet` as Parquet.

    The reader decrypts what was written elsewhere; a table that is refreshed sets it.
    """

    def __init__(self, reader: EncryptedFileIO, length_bits: int, places: TablePlaces) -> None:
        super().__init__(reader.properties)
        self.reader = reader
        self.storage = StoredFileIO(reader, places)
        self._length_bits = length_bits
        self._written: dict[str, StandardKeyMetadata] = {}
        self._begun: dict[str, None] = {}

    def new_input(self, location: str) -> InputFile:
        """Return a file to read, decrypted."""
        if location not in self._written:
            return self.reader.new_input(location)
        return EncryptedInputFile(location, self.storage.new_input, self._open_written)

    def _open_written(self, location: str) -> Any:
        stored, key_metadata = self.storage.new_input(location).open(), self._written[location]
        if location.endswith(".avro"):
            return Ags1Reader(stored, key_metadata, path=location)
        with stored:
            source = BufferSource(location, stored.read())
            check_length(source.size_bytes, key_metadata, None, f"data file {location}")
            return pa.BufferReader(decrypt_data_file(source, key_metadata, f"data file {location}"))

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write, which encrypts; a file of a kind that cannot be encrypted is refused."""
        if not location.endswith((".avro", ".parquet")):
            raise OutputError(
                f"{location}: a file of this kind would be written in plaintext into an encrypted table.",
                hint="Write data files in Parquet; statistics files are not supported.",
            )
        self._begun[location] = None
        return _EncryptedOutput(
            location, self.storage.new_output(location), self._length_bits, self._written.__setitem__
        )

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file."""
        self.storage.delete(location)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads only, and learns the keys again: a pickle holds none.
        return self.reader.__reduce__()

    def key_metadata(self, location: str) -> StandardKeyMetadata:
        """Return the key metadata of a file; one that was not written here is refused (`NotEncryptedError`)."""
        metadata = self._written.get(location)
        if metadata is None:
            raise NotEncryptedError(
                f"{location}: the file was not written by this table, and would be a plaintext file in "
                "an encrypted table.",
                hint="Read the file, and append its rows.",
            )
        return metadata

    def take_begun(self) -> Iterator[str]:
        """Yield, once, each location that was begun to be written, whether or not it was finished."""
        while self._begun:
            yield self._begun.popitem()[0]

    def keep_begun(self) -> None:
        """Forget what was begun: it belongs to the table now."""
        self._begun.clear()


class _EncryptedOutput(OutputFile):
    """A file that is written once, with a key of its own."""

    def __init__(
        self,
        location: str,
        file: OutputFile,
        length_bits: int,
        finished: Callable[[str, StandardKeyMetadata], None],
    ) -> None:
        super().__init__(location)
        self._file = file
        self._length_bits = length_bits
        self._finished = finished

    def __len__(self) -> int:
        return len(self._file)

    def exists(self) -> bool:
        return self._file.exists()

    def to_input_file(self) -> InputFile:
        return self._file.to_input_file()

    def create(self, overwrite: bool = False) -> OutputStream:
        # A key for each stream: an output that is created twice never encrypts two files under one key.
        metadata = StandardKeyMetadata.fresh(self._length_bits)
        stream = self._file.create(overwrite=overwrite)

        def finished(length: int) -> None:
            self._finished(self.location, replace(metadata, file_length=length))

        if self.location.endswith(".avro"):
            return Ags1Writer(stream, metadata, finished)
        return _ParquetOutput(self.location, stream, metadata, finished)


class _ParquetOutput(io.BytesIO):
    """Takes a plaintext file of Parquet in memory, and writes it encrypted when it is closed."""

    def __init__(
        self,
        location: str,
        stream: OutputStream,
        metadata: StandardKeyMetadata,
        finished: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._location = location
        self._stream = stream
        self._metadata = metadata
        self._finished = finished
        share_with_arrow(self)

    def close(self) -> None:
        if self.closed:
            return
        plaintext = self.getvalue()
        super().close()
        encryption = FileEncryption(
            self._metadata.encryption_key, aad_prefix=self._metadata.aad_prefix, store_aad_prefix=False
        )
        sink = StreamSink(self._stream)
        try:
            # A file that a failure left without its end is no Parquet: nothing of it is written.
            encrypt_source(BufferSource(self._location, plaintext), sink, encryption)
        finally:
            self._stream.close()
        self._finished(sink.length)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            super().close()
            self._stream.close()

    def __del__(self) -> None:
        # io.BytesIO would call `close`, and what nobody closed is not complete.
        pass
