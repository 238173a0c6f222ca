"""The walk over pages where a chunk ends before its pages do."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, encrypted

from parquet_keytools.encryption.chunk_pages import ChunkPages
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.module_cipher import ChunkCipher, ModuleCipher
from parquet_keytools.encryption.page_walk import read_first_page, walk_chunk
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.secret_bytes import SecretBytes

DEK = SecretBytes(bytes(16))


class Chunk:
    """The one chunk of a small file: a dictionary page and a data page."""

    def __init__(self, algorithm: Algorithm | None) -> None:
        buffer = io.BytesIO()
        pq.write_table(pa.table({"a": ["x", "y", "x"]}), buffer, write_page_checksum=True)
        data = buffer.getvalue()
        if algorithm is not None:
            data = encrypted(data, FileEncryption(DEK, b"kf", algorithm=algorithm))
        self.source = MemorySource(data, "x.parquet")
        footer = read_envelope(self.source).open(None if algorithm is None else DEK)
        self.cipher = None
        column_cipher = None
        if algorithm is not None:
            column_cipher = footer.cipher_of(footer.columns[0], None)
            assert column_cipher is not None
            self.cipher = ChunkCipher(column_cipher, algorithm, 0, 0)
        metadata = footer.chunk_metadata(0, footer.columns[0], column_cipher)
        assert metadata.dictionary_page_offset is not None
        self.start = metadata.dictionary_page_offset
        self.end = self.start + metadata.total_compressed_size

    def walk(self, end: int, limit: int) -> ChunkPages:
        return walk_chunk(
            self.source,
            self.start,
            end,
            limit=limit,
            reader=self.cipher,
            writer=None if self.cipher is not None else ChunkCipher(ModuleCipher(DEK, b"new"), None, 0, 0),
            expects_dictionary_page=True,
        )


every_chunk = pytest.mark.parametrize("algorithm", [None, *Algorithm], ids=lambda algorithm: str(algorithm))


@every_chunk
def test_no_page_goes_on_after_its_chunk(algorithm: Algorithm | None) -> None:
    """Else bytes of another column would be taken for a part of it."""
    chunk = Chunk(algorithm)
    assert chunk.walk(chunk.end, chunk.end).source_end == chunk.end
    messages = set()
    for limit in range(chunk.start + 1, chunk.end):
        with pytest.raises(ParquetFormatError) as caught:
            chunk.walk(chunk.end, limit)
        assert str(caught.value).startswith("x.parquet: ")
        messages.add(str(caught.value).partition(" goes on after its chunk.")[0])
    assert f"x.parquet: the page at byte {chunk.start}" in messages
    # Where the metadata says too little, a page ends where it ends.
    assert chunk.walk(chunk.end - 1, chunk.end).source_end == chunk.end


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_neither_does_the_first_page(algorithm: Algorithm) -> None:
    chunk = Chunk(algorithm)
    assert chunk.cipher is not None
    page = read_first_page(chunk.source, chunk.start, chunk.end, chunk.cipher, expects_dictionary_page=True)
    page_end = page.offset + page.header.compressed_page_size
    for end in range(chunk.start + 1, page_end):
        what = "the page at byte 4 goes on after its chunk" if end >= page.offset else "its chunk"
        with pytest.raises(ParquetFormatError, match=what):
            read_first_page(chunk.source, chunk.start, end, chunk.cipher, expects_dictionary_page=True)
    assert read_first_page(chunk.source, chunk.start, page_end, chunk.cipher, expects_dictionary_page=True) == page
