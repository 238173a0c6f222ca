"""Seals a plaintext file according to the specification, with fixed nonces, and with a hook at each step.

This is a third implementation, independent of the module encryptor and the verifier: it shares only the Thrift
structures.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.format.structs import (
    Aes,
    ColumnChunk,
    ColumnCryptoMetaData,
    ColumnMetaData,
    EncryptionAlgorithm,
    EncryptionWithColumnKey,
    EncryptionWithFooterKey,
    FileCryptoMetaData,
    FileMetaData,
    OffsetIndex,
    PageHeader,
    RowGroup,
)
from vector_kit.plain_file import PlainChunk, PlainFile, PlainPage

FOOTER_KEY = "footer key"
"""Marks a column that is encrypted with the footer's key."""

(
    FOOTER,
    COLUMN_META_DATA,
    DATA_PAGE,
    DICTIONARY_PAGE,
    DATA_PAGE_HEADER,
    DICTIONARY_PAGE_HEADER,
    COLUMN_INDEX,
    OFFSET_INDEX,
    BLOOM_FILTER_HEADER,
    BLOOM_FILTER_BITSET,
) = range(10)

Place = tuple[int, ...]
"""Module type, row group ordinal, column ordinal, page ordinal, if the type has them."""


_NOT_SHOWN = (8, 12, 13, 14, 15, 16, 17)
"""Fields of ColumnMetaData that a plaintext footer does not show: key-value metadata, statistics, Bloom filter."""


@dataclass
class Module:
    """A module that is about to be encrypted."""

    place: Place
    plaintext: bytes
    nonce: bytes
    aad: bytes
    key: bytes
    is_ctr: bool
    counter: bytes = b"\0\0\0\1"
    """The first counter value of AES-CTR (spec 4.2.2)."""

    def seal(self) -> bytes:
        """Return its bytes (spec 5.1)."""
        if self.is_ctr:
            mode = modes.CTR(self.nonce + self.counter)
            body = Cipher(algorithms.AES(self.key), mode).encryptor().update(self.plaintext)
        else:
            body = AESGCM(self.key).encrypt(self.nonce, self.plaintext, self.aad)
        return struct.pack("<I", len(self.nonce) + len(body)) + self.nonce + body


def _same(*arguments: Any) -> Any:
    return arguments[-1]


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Hooks:
    """What a breach changes, and where. Each either changes its last argument, or returns another one."""

    pages: Callable[[int, int, list[PlainPage]], list[PlainPage]] = _same
    chunk_tail: Callable[[int, int], tuple[bytes, bool]] = lambda r, c: (b"", False)
    """The bytes after the pages of a chunk, and whether its size includes them."""
    page_header: Callable[[Place, PageHeader], None] = _nothing
    module: Callable[[Module], None] = _nothing
    sealed: Callable[[Place, bytes], bytes] = _same
    padding: Callable[[bytes], bytes] = _same
    offset_index: Callable[[int, int, OffsetIndex], None] = _nothing
    metadata: Callable[[int, int, ColumnMetaData], None] = _nothing
    visible: Callable[[int, int, ColumnMetaData], None] = _nothing
    chunk: Callable[[int, int, ColumnChunk], None] = _nothing
    row_group: Callable[[int, RowGroup], None] = _nothing
    footer: Callable[[FileMetaData], None] = _nothing
    crypto: Callable[[FileCryptoMetaData], None] = _nothing
    footer_block: Callable[[bytes], bytes] = _same
    file: Callable[[bytes], bytes] = _same


@dataclass
class Recipe:
    """How a file is sealed.

    Attributes:
        seed: Of nonces and file unique.
        footer_key: Encrypts or signs the footer.
        footer_key_metadata: The key metadata in the file.
        columns: Ordinal -> key and key metadata, or `FOOTER_KEY`; others are plaintext.
    """

    seed: int
    footer_key: bytes
    footer_key_metadata: bytes | None
    columns: dict[int, tuple[bytes, bytes | None] | str]
    plaintext_footer: bool = False
    is_ctr: bool = False
    aad_prefix: bytes | None = b"kit"
    store_aad_prefix: bool = True
    file_unique_length: int = 8
    hooks: Hooks = field(default_factory=Hooks)


class Sealer:
    """Seals one file."""

    def __init__(self, plain: PlainFile, recipe: Recipe) -> None:
        self.plain = plain
        self.recipe = recipe
        self.hooks = recipe.hooks
        generator = random.Random(recipe.seed)
        self.file_unique = generator.randbytes(recipe.file_unique_length)
        self._nonce = lambda: generator.randbytes(12)
        self.file_aad = (recipe.aad_prefix or b"") + self.file_unique

    def seal(self) -> bytes:
        """Return the file."""
        magic = b"PAR1" if self.recipe.plaintext_footer else b"PARE"
        out = bytearray(magic)
        chunks: list[list[ColumnChunk]] = []
        full: dict[tuple[int, int], ColumnMetaData] = {}
        starts: dict[int, int] = {}
        page_places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for r, row_group_chunks in enumerate(self.plain.chunks):
            starts[r] = len(out)
            chunks.append([plain.chunk.shallow_copy() for plain in row_group_chunks])
            for c, plain in enumerate(row_group_chunks):
                full[r, c], page_places[r, c] = self._pages(out, r, c, plain)
        for r, row_group_chunks in enumerate(self.plain.chunks):
            for c, plain in enumerate(row_group_chunks):
                self._indexes(out, r, c, plain, chunks[r][c], full[r, c], page_places[r, c])
        footer = self.plain.footer.shallow_copy()
        row_groups = []
        for r, row_group in enumerate(self.plain.footer.row_groups):
            new = row_group.shallow_copy()
            for c, chunk in enumerate(chunks[r]):
                self.hooks.metadata(r, c, full[r, c])
                self._protect(r, c, chunk, full[r, c])
                self.hooks.chunk(r, c, chunk)
            new.file_offset = starts[r]
            new.total_compressed_size = sum(full[r, c].total_compressed_size for c in range(len(chunks[r])))
            new.ordinal = r
            new.columns = chunks[r]
            self.hooks.row_group(r, new)
            row_groups.append(new)
        footer.row_groups = row_groups
        block = self.hooks.footer_block(self._footer(footer))
        out += block + struct.pack("<I", len(block)) + magic
        return self.hooks.file(bytes(out))

    # --- Modules -------------------------------------------------------------------------------------------

    def _key(self, c: int) -> bytes | None:
        choice = self.recipe.columns.get(c)
        if choice is None:
            return None
        return self.recipe.footer_key if isinstance(choice, str) else choice[0]

    def _module(self, place: Place, plaintext: bytes, key: bytes) -> bytes:
        is_ctr = self.recipe.is_ctr and place[0] in (DATA_PAGE, DICTIONARY_PAGE)
        aad = self.file_aad + bytes([place[0]]) + struct.pack(f"<{len(place) - 1}H", *place[1:])
        module = Module(place, plaintext, self._nonce(), aad, key, is_ctr)
        self.hooks.module(module)
        return self.hooks.sealed(place, module.seal())

    def _stored(self, place: Place, plaintext: bytes, key: bytes | None) -> bytes:
        return plaintext if key is None else self._module(place, plaintext, key)

    def _pages(
        self, out: bytearray, r: int, c: int, plain: PlainChunk
    ) -> tuple[ColumnMetaData, list[tuple[int, int]]]:
        metadata, key, start = plain.metadata.shallow_copy(), self._key(c), len(out)
        places: list[tuple[int, int]] = []
        metadata.dictionary_page_offset = None
        for page in self.hooks.pages(r, c, plain.pages):
            place = (DICTIONARY_PAGE, r, c) if page.is_dictionary else (DATA_PAGE, r, c, len(places))
            stored = self._stored(place, page.body, key)
            header = page.header.shallow_copy()
            header.compressed_page_size = len(stored)
            if header.crc is not None:
                crc = zlib.crc32(stored)
                header.crc = crc - (1 << 32) if crc >> 31 else crc
            self.hooks.page_header(place, header)
            stored_header = self._stored((place[0] + 2, *place[1:]), header.serialise(), key)
            if page.is_dictionary:
                metadata.dictionary_page_offset = len(out)
            elif not page.is_index:
                places.append((len(out), len(stored_header) + len(stored)))
            out += stored_header + stored
        metadata.data_page_offset = places[0][0] if places else len(out)
        metadata.total_compressed_size = len(out) - start
        tail, is_counted = self.hooks.chunk_tail(r, c)
        out += tail
        metadata.total_compressed_size += len(tail) if is_counted else 0
        return metadata, places

    def _indexes(
        self,
        out: bytearray,
        r: int,
        c: int,
        plain: PlainChunk,
        chunk: ColumnChunk,
        metadata: ColumnMetaData,
        places: list[tuple[int, int]],
    ) -> None:
        key = self._key(c)
        if plain.bloom_filter_header is not None and plain.bloom_filter_bitset is not None:
            start = len(out)
            out += self._stored((BLOOM_FILTER_HEADER, r, c), plain.bloom_filter_header, key)
            out += self._stored((BLOOM_FILTER_BITSET, r, c), plain.bloom_filter_bitset, key)
            metadata.bloom_filter_offset, metadata.bloom_filter_length = start, len(out) - start
        if plain.column_index is not None:
            stored = self._stored((COLUMN_INDEX, r, c), plain.column_index, key)
            chunk.column_index_offset, chunk.column_index_length = len(out), len(stored)
            out += stored
        if plain.offset_index is not None:
            index, _ = OffsetIndex.read(plain.offset_index)
            locations = index.page_locations
            for location, (offset, length) in zip(locations, places, strict=False):
                location.offset, location.compressed_page_size = offset, length
            self.hooks.offset_index(r, c, index)
            stored = self._stored((OFFSET_INDEX, r, c), index.serialise(), key)
            chunk.offset_index_offset, chunk.offset_index_length = len(out), len(stored)
            out += stored

    # --- Footer --------------------------------------------------------------------------------------------

    def _protect(self, r: int, c: int, chunk: ColumnChunk, metadata: ColumnMetaData) -> None:
        choice, key = self.recipe.columns.get(c), self._key(c)
        chunk.meta_data = metadata
        if choice is None or key is None:
            return
        crypto = ColumnCryptoMetaData()
        if isinstance(choice, str):
            crypto.encryption_with_footer_key = EncryptionWithFooterKey()
        else:
            own = EncryptionWithColumnKey()
            own.path_in_schema = self.plain.chunks[r][c].metadata.path_in_schema
            own.key_metadata = choice[1]
            crypto.encryption_with_column_key = own
        chunk.crypto_metadata = crypto
        if isinstance(choice, str) and not self.recipe.plaintext_footer:
            return
        chunk.encrypted_column_metadata = self._module((COLUMN_META_DATA, r, c), metadata.serialise(), key)
        chunk.meta_data = None
        if self.recipe.plaintext_footer:
            visible = metadata.shallow_copy()
            for field_id in _NOT_SHOWN:
                visible.struct.set_entry(field_id, None)
            self.hooks.visible(r, c, visible)
            chunk.meta_data = visible

    def _footer(self, footer: FileMetaData) -> bytes:
        recipe = self.recipe
        parameters = Aes()
        if recipe.aad_prefix is not None and recipe.store_aad_prefix:
            parameters.aad_prefix = recipe.aad_prefix
        parameters.aad_file_unique = self.file_unique
        if recipe.aad_prefix is not None and not recipe.store_aad_prefix:
            parameters.supply_aad_prefix = True
        algorithm = EncryptionAlgorithm()
        if recipe.is_ctr:
            algorithm.aes_gcm_ctr_v1 = parameters
        else:
            algorithm.aes_gcm_v1 = parameters
        if recipe.plaintext_footer:
            footer.encryption_algorithm = algorithm
            footer.footer_signing_key_metadata = recipe.footer_key_metadata
            self.hooks.footer(footer)
            serialised = footer.serialise()
            nonce = self._nonce()
            tag = AESGCM(recipe.footer_key).encrypt(nonce, serialised, self.file_aad + b"\0")[-16:]
            return serialised + nonce + tag
        self.hooks.footer(footer)
        crypto = FileCryptoMetaData()
        crypto.encryption_algorithm, crypto.key_metadata = algorithm, recipe.footer_key_metadata
        self.hooks.crypto(crypto)
        plaintext = self.hooks.padding(footer.serialise())
        return crypto.serialise() + self._module((FOOTER,), plaintext, recipe.footer_key)
