"""Files in folders, encrypted with keys in memory, and their views."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from key_services import key_service
from memory_files import MemorySource

from parquet_keytools import Keytools
from parquet_keytools.encryption.footer import read_footer
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.format.structs import BloomFilterHeader, OffsetIndex
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, open_plain_file

KEYS = ("footer", "public", "secret")


@dataclass
class ViewCase:
    """A table `t` with keys in memory, in a folder.

    Attributes:
        folder: Where its files are.
        table: Settings in addition to the footer key.
        reading: Settings of reading.
        kms: The KMS, which can deny keys.
        more: Settings in addition to these.
    """

    folder: Path
    table: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)
    kms: InMemoryKms = field(default_factory=lambda: InMemoryKms(dict.fromkeys(KEYS)))
    more: dict[str, Any] = field(default_factory=dict)

    def keytools(self, **reading: Any) -> Keytools:
        document = {
            "version": 1,
            **self.more,
            "tables": {"t": {"footer_key": "footer", "unlisted_columns": "plaintext", **self.table}},
            "reading": {**self.reading, **reading},
        }
        return Keytools.from_mapping(document, kms=self.kms)

    def encrypt(self, source: Path | bytes, name: str = "x.parquet") -> Path:
        target = self.folder / name
        if isinstance(source, bytes):
            plain = self.folder / f"_plain-{name}"
            plain.write_bytes(source)
            source = plain
        self.keytools().encrypt_file(source, target)
        return target

    def view(self, path: Path, **reading: Any) -> PlainFile:
        keytools = self.keytools(**reading)
        return open_plain_file(key_service(keytools), FileLocation.resolve(path), cache=PageCache())


def whole(file: PlainFile) -> bytes:
    return bytes(file.read_at(0, file.size_bytes))


def table_of(file: PlainFile, **options: Any) -> pa.Table:
    return pq.read_table(pa.BufferReader(whole(file)), **options)


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def contents(data: bytes) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the contents of a plaintext file's chunks: pages without headers, indexes, Bloom filters."""
    source = MemorySource(data)
    footer = read_footer(source, None)
    result = {}
    for ordinal, chunks in enumerate(footer.chunks):
        for leaf, chunk in zip(footer.leaves, chunks, strict=True):
            metadata = chunk.meta_data
            assert metadata is not None
            offsets = (metadata.data_page_offset, metadata.dictionary_page_offset)
            start = min((offset for offset in offsets if offset), default=0)
            end = start + metadata.total_compressed_size
            pages = walk_chunk(
                source, start, end, limit=end, reader=None, writer=None, expects_dictionary_page=False
            )
            found: dict[str, Any] = {"pages": [], "offsets": [], "codec": metadata.codec}
            at = start
            for header_length, length, *_ in pages.each(0, pages.count):
                found["pages"].append(data[at + header_length : at + header_length + length])
                found["offsets"].append((at, header_length + length))
                at += header_length + length
            if chunk.column_index_offset is not None and chunk.column_index_length is not None:
                found["column index"] = data[chunk.column_index_offset :][: chunk.column_index_length]
            if chunk.offset_index_offset is not None and chunk.offset_index_length is not None:
                index, _ = OffsetIndex.read(data[chunk.offset_index_offset :][: chunk.offset_index_length])
                places = [(p.offset, p.compressed_page_size) for p in index.page_locations]
                assert set(places) <= set(found["offsets"])
                found["rows"] = [p.first_row_index for p in index.page_locations]
            if metadata.bloom_filter_offset is not None:
                begin = metadata.bloom_filter_offset
                header, bitset = BloomFilterHeader.read(data, begin)
                found["bloom"] = data[begin : bitset + header.num_bytes]
                assert metadata.bloom_filter_length in (None, len(found["bloom"]))
            result[ordinal, leaf.dotted_path] = found
    return result


def same_contents(data: bytes, plain: bytes) -> bool:
    """Return whether all chunks of two plaintext files are equal, apart from their positions."""

    def without_offsets(file: bytes) -> Any:
        return {
            place: {name: value for name, value in found.items() if name != "offsets"}
            for place, found in contents(file).items()
        }

    return bool(without_offsets(data) == without_offsets(plain))


def encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()
