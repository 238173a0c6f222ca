"""Avro that anybody may have made, because it is plaintext: read within bounds, whatever it claims.

PyIceberg's fast decoder does not look where its buffer ends, and its codecs decompress without end.
"""

from __future__ import annotations

import bz2
import io
import zlib
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import zstandard
from pyiceberg.avro.codecs import AVRO_CODEC_KEY
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.avro.file import SYNC_SIZE, AvroFile, Block
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.types import FixedType, IcebergType, ListType, MapType, StructType

MAX_STORED_BYTES = 64 << 20
MAX_PLAINTEXT_BYTES = 256 << 20
MAX_RECORDS = 1_000_000
"""Manifests have 8 MiB and some ten thousand records."""

D = TypeVar("D")


def read_plaintext(stored: pa.NativeFile) -> bytes:
    """Return a file; of one that is too large for a manifest, one byte more than a manifest may have."""
    return bytes(stored.read(min(stored.size(), MAX_STORED_BYTES + 1)))


class _CheckedDecoder(StreamingBinaryDecoder):
    def skip(self, n: int) -> None:
        if n < 0:
            raise ValueError("it would be read again from a place before")
        super().skip(n)


class BoundedAvroFile(AvroFile[D]):  # type: ignore[type-var]
    """Reads as PyIceberg does, up to the limits.

    Raises:
        ValueError: A limit is exceeded, or blocks, lists or maps have more elements than bytes.
    """

    def __enter__(self) -> BoundedAvroFile[D]:
        with self.input_file.open() as file:
            self.decoder = _CheckedDecoder(file.read(MAX_STORED_BYTES + 1))
        if len(self.input_file) > MAX_STORED_BYTES:
            raise ValueError("it is larger than any manifest")
        self.header = self._read_header()
        self.schema = self.header.get_schema()
        self.read_schema = self.schema
        self.reader = resolve_reader(self.schema, self.schema)
        if _has_elements_without_bytes(self.schema.as_struct()):
            raise ValueError("a list of elements without bytes would have no end")
        self._bytes_left = MAX_PLAINTEXT_BYTES
        self._records_left = MAX_RECORDS
        return self

    def _read_block(self) -> int:
        if self.block and self.decoder.read(SYNC_SIZE) != self.header.sync:
            raise ValueError("a block ends elsewhere")
        if self.decoder.tell() == len(self.input_file):
            raise EOFError
        try:
            records = self.decoder.read_int()
            data = self.decoder.read_bytes()
        except EOFError:
            # PyIceberg would take it for the end of the file.
            raise ValueError("it is cut within a block") from None
        codec = self.header.meta.get(AVRO_CODEC_KEY, "null")
        decompress = _CODECS.get(codec)
        if decompress is not None:
            data = decompress(data, self._bytes_left + 1)
        elif codec_class := self.header.compression_codec():
            # Snappy says its length first, and PyIceberg has no library for it but where somebody installs it.
            data = codec_class.decompress(data)
        self._bytes_left -= len(data)
        self._records_left -= records
        if self._bytes_left < 0 or self._records_left < 0 or records > len(data):
            raise ValueError("it is larger than any manifest")
        self.block = Block(reader=self.reader, block_records=records, block_decoder=_CheckedDecoder(data))
        return int(records)


def _inflate(data: bytes, limit: int) -> bytes:
    return zlib.decompressobj(-15).decompress(data, limit)


def _bunzip2(data: bytes, limit: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, limit)


def _unzstd(data: bytes, limit: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=MAX_PLAINTEXT_BYTES).stream_reader(io.BytesIO(data)) as reader:
        return bytes(reader.read(limit))


_CODECS: dict[str, Callable[[bytes, int], bytes]] = {"deflate": _inflate, "bzip2": _bunzip2, "zstandard": _unzstd}


def _has_elements_without_bytes(kind: IcebergType) -> bool:
    match kind:
        case StructType():
            return any(_has_elements_without_bytes(field.field_type) for field in kind.fields)
        case ListType():
            return (kind.element_required and _may_be_empty(kind.element_type)) or _has_elements_without_bytes(
                kind.element_type
            )
        case MapType():
            # A key has bytes: the length of a string.
            return _may_be_empty(kind.key_type) or _has_elements_without_bytes(kind.value_type)
    return False


def _may_be_empty(kind: IcebergType) -> bool:
    if isinstance(kind, StructType):
        return all(field.required and _may_be_empty(field.field_type) for field in kind.fields)
    return isinstance(kind, FixedType) and not len(kind)
