"""Whether the pages of a file are encrypted with AES-CTR, where the file says so (spec 4.2.2).

No key authenticates the algorithm beside an encrypted footer (spec 5.4): who can write to the storage can turn
AES_GCM_V1 into AES_GCM_CTR_V1, and readers that believe it take any bytes for pages. That a page does not
authenticate with AES-GCM says little: one flipped bit is enough for that. So proof is asked for the other way
round, that pages are encrypted with AES-CTR, and one that has it is enough, for a file has one algorithm:

- Page headers are authentic with both algorithms. They say how long a page is as it is stored, and how long
  without compression; where it is not compressed the difference is the framing, and AES-GCM needs 16 bytes more.
- A compressed page begins as its codec says. Its first block is encrypted with that block of the key stream with
  which AES-GCM masks its tag: without the key nobody can make a page that begins right.

Where codecs begin in no particular way (LZ4, Brotli) there is no proof, and whether a page authenticates with
AES-GCM is all that can be found out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.module_cipher import (
    CTR_FRAMING,
    GCM_FRAMING,
    LENGTH_LENGTH,
    NONCE_LENGTH,
    ChunkCipher,
    InvalidTag,
    ModuleCipher,
    check_length_field,
)
from parquet_keytools.encryption.page_walk import HeaderWindow, Page, walk_pages
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterColumn
from parquet_keytools.errors import DecryptionError, KeytoolsError, ParquetFormatError
from parquet_keytools.format.file_layout import ByteSource, regions_of
from parquet_keytools.format.pages import PageContents, compressed_beginning, read_page_contents
from parquet_keytools.secret_bytes import SecretBytes

_UNCOMPRESSED = 0
"""Codec, as column metadata names it."""

_BLOCK_LENGTH = 16
"""Of AES. Only the first block of a page proves something: the rest of the key stream is the same with AES-GCM."""

_ENOUGH_BYTES = 4
"""How many bytes must begin pages right, all together: a guess is right for one file of 2**32."""

_MOST_TRIALS = 8
"""How many pages are tried with AES-GCM at most: an attacker who damages so many can damage all."""

_HINT = (
    "Somebody changed the algorithm where no key protects it (spec 5.4), and perhaps pages: restore the file. "
    "`verify` says more."
)


_BEGINNING_LENGTH = LENGTH_LENGTH + NONCE_LENGTH + _BLOCK_LENGTH
"""Length field, nonce, and one block."""


@dataclass(frozen=True, slots=True)
class _FirstPage:
    """The first page of a chunk, and its beginning as it is stored; its header is authentic."""

    reader: ChunkCipher
    codec: int
    page: Page
    contents: PageContents | None
    """None where the header does not say: its lengths prove nothing, and the page itself does."""
    beginning: memoryview

    @property
    def length(self) -> int:
        """Length of the page as it is stored, in bytes."""
        return self.page.facts.page_length

    def error(self, message: str) -> DecryptionError:
        """Return an error that names the place of this page."""
        return self.reader.page_place(self.page.ordinal).error(message, hint=_HINT)

    def framing(self) -> int | None:
        """Return how many bytes the page is longer than its plaintext; None where that is unknown."""
        if self.contents is None:
            return None
        is_compressed = self.codec != _UNCOMPRESSED and self.contents.is_compressed
        return None if is_compressed else self.length - self.contents.uncompressed_length

    def right_beginning(self) -> tuple[int, bool]:
        """Return how many bytes of the plaintext are known, and whether they are what they should be."""
        if self.contents is None:
            return 0, True
        # The levels of a data page V2 are not compressed, and come first.
        levels = self.contents.levels_length
        expected = compressed_beginning(self.codec, self.contents.uncompressed_length - levels)
        length = levels + len(expected)
        if not expected or length > min(_BLOCK_LENGTH, self.length - CTR_FRAMING):
            return 0, True
        plaintext = bytearray(length)
        module = self.beginning
        self.reader.cipher.ctr().apply_into(module[4:16], module[16 : 16 + length], b"", plaintext)
        return len(expected), plaintext[levels:] == expected

    def is_gcm(self, source: ByteSource) -> bool:
        """Tell whether it authenticates with AES-GCM."""
        module = memoryview(source.read_at(self.page.offset, self.length))
        out = bytearray(len(module) - GCM_FRAMING)
        try:
            self.reader.cipher.gcm.decrypt_into(
                module[4:16], module[16:], self.reader.page_aads(self.page.ordinal)[1], out
            )
        except InvalidTag:
            return False
        return True


def check_stated_algorithm(
    source: ByteSource, footer: Footer, deks: Mapping[tuple[str, ...], SecretBytes]
) -> None:
    """Refuse a file that says AES_GCM_CTR_V1 and was not written so; any other file is not looked at.

    The first pages of column chunks are looked at, one after another, until there is proof; mostly one is enough,
    and 64 KB of it are read. DEKs are needed only of columns with a column key, and only of some.
    """
    if footer.algorithm is not Algorithm.AES_GCM_CTR_V1:
        return
    proven_bytes = trials = 0
    suspect: _FirstPage | None = None
    for page in _first_pages(source, footer, deks):
        framing = page.framing()
        if framing == CTR_FRAMING or page.length < GCM_FRAMING:
            return
        if framing == GCM_FRAMING:
            raise _is_gcm(page, footer)
        known_bytes, is_right = page.right_beginning()
        if known_bytes and is_right:
            proven_bytes += known_bytes
            if proven_bytes >= _ENOUGH_BYTES:
                return
        # A byte or two may be right by chance.
        if trials < _MOST_TRIALS:
            trials += 1
            if page.is_gcm(source):
                raise _is_gcm(page, footer)
        if not is_right:
            suspect = suspect or page
    if suspect is not None:
        raise suspect.error(
            f"{footer.path}: the file states AES_GCM_CTR_V1, and the page is not what that algorithm makes."
        )


def _is_gcm(page: _FirstPage, footer: Footer) -> DecryptionError:
    return page.error(f"{footer.path}: the page is encrypted with AES-GCM, and the file states AES_GCM_CTR_V1.")


def _first_pages(
    source: ByteSource, footer: Footer, deks: Mapping[tuple[str, ...], SecretBytes]
) -> Iterator[_FirstPage]:
    """Yield the first page of each chunk whose key is there, but of those that no reader could read."""
    ciphers: list[tuple[FooterColumn, ModuleCipher]] = []
    for column in footer.columns:
        if column.encryption is not ColumnEncryption.COLUMN_KEY or column.path in deks:
            cipher = footer.cipher_of(column, deks.get(column.path))
            if cipher is not None:
                ciphers.append((column, cipher))
    for row_group_ordinal in range(len(footer.row_groups)):
        for column, cipher in ciphers:
            try:
                page = _first_page(source, footer, row_group_ordinal, column, cipher)
            except KeytoolsError:
                continue  # Damaged: reading it reports which part is.
            if page is not None:
                yield page


def _first_page(
    source: ByteSource, footer: Footer, row_group_ordinal: int, column: FooterColumn, cipher: ModuleCipher
) -> _FirstPage | None:
    """Return the first page of a chunk; None where it has none."""
    metadata = footer.chunk_metadata(row_group_ordinal, column, cipher)
    chunk = footer.chunks[row_group_ordinal][column.ordinal]
    pages = regions_of(chunk, metadata, row_group_ordinal, column.ordinal)[0]
    if not pages.length:
        return None
    reader = ChunkCipher(cipher, footer.algorithm, row_group_ordinal, column.ordinal)
    end = min(pages.offset + pages.length, footer.envelope.footer_offset)
    window = HeaderWindow(source, pages.offset, end)
    expects_dictionary_page = bool(metadata.dictionary_page_offset)
    walk = walk_pages(
        window, pages.offset, end, reader, expects_dictionary_page=expects_dictionary_page, path=source.path
    )
    page = next(walk, None)
    if page is None:
        return None
    length = page.facts.page_length
    beginning = window.view(page.offset, min(_BEGINNING_LENGTH, length))
    check_length_field(beginning, length, reader.page_place(page.ordinal))
    contents = None
    with contextlib.suppress(ParquetFormatError):
        contents = read_page_contents(page.facts)
    return _FirstPage(reader, metadata.codec, page, contents, beginning)
