"""The page walk in a chunk that ends before its pages do."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, encrypted

from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.module_cipher import ChunkCipher, ModuleCipher
from parquet_keytools.encryption.page_walk import ChunkPages, HeaderWindow, Page, walk_chunk, walk_pages
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.secret_bytes import SecretBytes

DEK = SecretBytes(bytes(16))


class Chunk:
    """The only chunk of a small file: a dictionary page and a data page."""

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
    """Otherwise, bytes of another column would be taken as part of it."""
    chunk = Chunk(algorithm)
    assert chunk.walk(chunk.end, chunk.end).source_end == chunk.end
    messages = set()
    for limit in range(chunk.start + 1, chunk.end):
        with pytest.raises(ParquetFormatError) as caught:
            chunk.walk(chunk.end, limit)
        assert str(caught.value).startswith("x.parquet: ")
        messages.add(str(caught.value).partition(" goes on after its chunk.")[0])
    assert f"x.parquet: the page at byte {chunk.start}" in messages
    # Where the metadata is incomplete, the page header gives the page's end.
    assert chunk.walk(chunk.end - 1, chunk.end).source_end == chunk.end


def first_page(
    source: MemorySource, start: int, end: int, reader: ChunkCipher, *, expects_dictionary_page: bool
) -> Page:
    window = HeaderWindow(source, start, end)
    return next(
        walk_pages(window, start, end, reader, expects_dictionary_page=expects_dictionary_page, path="x.parquet")
    )


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_neither_does_the_first_page(algorithm: Algorithm) -> None:
    chunk = Chunk(algorithm)
    assert chunk.cipher is not None
    page = first_page(chunk.source, chunk.start, chunk.end, chunk.cipher, expects_dictionary_page=True)
    page_end = page.offset + page.facts.page_length
    for end in range(chunk.start + 1, page_end):
        what = "the page at byte 4 goes on after its chunk" if end >= page.offset else "its chunk"
        with pytest.raises(ParquetFormatError, match=what):
            first_page(chunk.source, chunk.start, end, chunk.cipher, expects_dictionary_page=True)
    assert first_page(chunk.source, chunk.start, page_end, chunk.cipher, expects_dictionary_page=True) == page


DATA, DICTIONARY = PageHeader.DATA_PAGE, PageHeader.DICTIONARY_PAGE
DATA_HEADER, DICTIONARY_HEADER = ModuleType.DATA_PAGE_HEADER, ModuleType.DICTIONARY_PAGE_HEADER


def sealed(*pages: tuple[int, ModulePlace], stated_length: int = 32) -> tuple[MemorySource, ChunkCipher]:
    """Return a chunk of empty pages: the type that each header states, and the position it is encrypted for."""
    cipher = ModuleCipher(DEK, b"file")
    data = b""
    for page_type, place in pages:
        header = PageHeader()
        header.type, header.uncompressed_page_size, header.compressed_page_size = page_type, 0, stated_length
        data += cipher.encrypt(header.serialise(), place) + bytes(32)
    return MemorySource(data, "x.parquet"), ChunkCipher(cipher, Algorithm.AES_GCM_V1, 0, 0)


def walked(source: MemorySource, reader: ChunkCipher, *, expects_dictionary_page: bool = False) -> ChunkPages:
    size = source.size_bytes
    return walk_chunk(
        source,
        0,
        size,
        limit=size,
        reader=reader,
        writer=None,
        expects_dictionary_page=expects_dictionary_page,
    )


@pytest.mark.parametrize("expects_dictionary_page", [False, True])
@pytest.mark.parametrize("page_type", [DATA, DICTIONARY])
def test_the_first_page_is_read_whatever_the_metadata_names(page_type: int, expects_dictionary_page: bool) -> None:
    """Old writers omit the offset of a dictionary page."""
    first = (DATA, ModulePlace(DATA_HEADER, 0, 0, 0))
    second = (DATA, ModulePlace(DATA_HEADER, 0, 0, 1))
    if page_type == DICTIONARY:
        first, second = (DICTIONARY, ModulePlace(DICTIONARY_HEADER, 0, 0)), first
    source, reader = sealed(first, second)
    pages = walked(source, reader, expects_dictionary_page=expects_dictionary_page)
    assert (pages.count, pages.has_dictionary_page) == (2, page_type == DICTIONARY)
    found = first_page(source, 0, source.size_bytes, reader, expects_dictionary_page=expects_dictionary_page)
    assert found.facts.page_type == page_type


@pytest.mark.parametrize("place", [ModulePlace(DICTIONARY_HEADER, 0, 0), ModulePlace(DATA_HEADER, 0, 0, 0)])
def test_a_page_has_the_aad_of_its_ordinal_alone(place: ModulePlace) -> None:
    """A dictionary page, or an earlier page, in place of the second data page."""
    page_type = DICTIONARY if place.module_type is DICTIONARY_HEADER else DATA
    source, reader = sealed((DATA, ModulePlace(DATA_HEADER, 0, 0, 0)), (page_type, place))
    with pytest.raises(DecryptionError, match="does not authenticate") as caught:
        walked(source, reader)
    assert (caught.value.module_type, caught.value.page_ordinal) == ("data page header", 1)


@pytest.mark.parametrize(
    ("page_type", "place"),
    [(DICTIONARY, ModulePlace(DATA_HEADER, 0, 0, 0)), (DATA, ModulePlace(DICTIONARY_HEADER, 0, 0))],
)
def test_a_page_has_the_type_of_its_module(page_type: int, place: ModulePlace) -> None:
    with pytest.raises(ParquetFormatError, match="its page type does not fit its module"):
        walked(*sealed((page_type, place)))


@pytest.mark.parametrize("stated_length", [0, 31])
def test_an_encrypted_page_has_its_framing(stated_length: int) -> None:
    place = ModulePlace(DATA_HEADER, 0, 0, 0)
    with pytest.raises(ParquetFormatError, match=f"an encrypted page of {stated_length} bytes is too short"):
        walked(*sealed((DATA, place), stated_length=stated_length))


@pytest.mark.parametrize("length", [0, 27, 1_000])
def test_an_encrypted_header_fits(length: int) -> None:
    source, reader = sealed((DATA, ModulePlace(DATA_HEADER, 0, 0, 0)))
    changed = length.to_bytes(4, "little") + bytes(source.data[4:])
    with pytest.raises(ParquetFormatError, match=f"a module of {length + 4} bytes does not fit into its chunk"):
        walked(MemorySource(changed), reader)
    with pytest.raises(ParquetFormatError, match="byte 0: it goes on after its chunk"):
        walked(MemorySource(changed[:3]), reader)
