"""The cipher of one column chunk: what the modules of a chunk have in common."""

from __future__ import annotations

import struct
from collections.abc import Callable

from parquet_keytools.encryption.aad import MAX_ORDINAL, ModuleType
from parquet_keytools.encryption.footer import Algorithm
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, ModuleCipher, ModulePlace
from parquet_keytools.errors import FormatLimitError
from parquet_keytools.format.byte_ranges import Bytes

NO_PAGE_ORDINAL = -1
"""Stands for the dictionary page, which has none."""

_pack_ordinal = struct.Struct("<h").pack


class ChunkCipher:
    """Encrypts or decrypts the modules of one column chunk.

    Attributes:
        cipher: Under the column's DEK.
        row_group_ordinal: Of its row group.
        column_ordinal: Of its column.
        page_framing: How many bytes longer a page is than its plaintext.
        pages_are_gcm: Whether pages are encrypted with AES-GCM; else with AES-CTR (spec 4.2).
    """

    __slots__ = (
        "_header_aad",
        "_page_aad",
        "cipher",
        "column_ordinal",
        "page_framing",
        "pages_are_gcm",
        "row_group_ordinal",
    )

    def __init__(
        self, cipher: ModuleCipher, algorithm: Algorithm | None, row_group_ordinal: int, column_ordinal: int
    ) -> None:
        self.cipher = cipher
        self.row_group_ordinal = row_group_ordinal
        self.column_ordinal = column_ordinal
        self.pages_are_gcm = algorithm is not Algorithm.AES_GCM_CTR_V1
        self.page_framing = GCM_FRAMING if self.pages_are_gcm else CTR_FRAMING
        self._header_aad = self.place(ModuleType.DATA_PAGE_HEADER, 0).aad(cipher.file_aad)[:-2]
        self._page_aad = self.place(ModuleType.DATA_PAGE, 0).aad(cipher.file_aad)[:-2]

    def place(self, module_type: ModuleType, page_ordinal: int | None = None) -> ModulePlace:
        """Return the place of a module of this chunk."""
        return ModulePlace(module_type, self.row_group_ordinal, self.column_ordinal, page_ordinal)

    def header_place(self, page_ordinal: int) -> ModulePlace:
        """Return the place of a page header."""
        if page_ordinal == NO_PAGE_ORDINAL:
            return self.place(ModuleType.DICTIONARY_PAGE_HEADER)
        return self.place(ModuleType.DATA_PAGE_HEADER, page_ordinal)

    def page_place(self, page_ordinal: int) -> ModulePlace:
        """Return the place of a page."""
        if page_ordinal == NO_PAGE_ORDINAL:
            return self.place(ModuleType.DICTIONARY_PAGE)
        return self.place(ModuleType.DATA_PAGE, page_ordinal)

    def page_aads(self, page_ordinal: int) -> tuple[bytes, bytes]:
        """Return the AADs of a page's header and of the page, without building places for them.

        Raises:
            FormatLimitError: The ordinal does not fit into 16 bits with a sign.
        """
        if page_ordinal == NO_PAGE_ORDINAL:
            file_aad = self.cipher.file_aad
            return (
                self.header_place(page_ordinal).aad(file_aad),
                self.page_place(page_ordinal).aad(file_aad),
            )
        if page_ordinal > MAX_ORDINAL:
            raise FormatLimitError(f"page ordinal {page_ordinal} is more than {MAX_ORDINAL}.")
        ordinal = _pack_ordinal(page_ordinal)
        return self._header_aad + ordinal, self._page_aad + ordinal

    def pages_into(self, *, encrypt: bool) -> Callable[[Bytes, Bytes, Bytes, Bytes], object]:
        """Return what enciphers pages, for the thread that asks: `(nonce, input, aad, output)`.

        With AES-GCM input or output end with the tag; decrypting raises `InvalidTag`.
        """
        if not self.pages_are_gcm:
            return self.cipher.ctr().apply_into
        gcm = self.cipher.gcm
        return gcm.encrypt_into if encrypt else gcm.decrypt_into

    def encrypt_reserved(self, plaintext: bytes | memoryview, module_type: ModuleType) -> bytes:
        """Return the module of a plaintext that is not a page; its invocation is reserved."""
        return self.cipher.encrypt_reserved(plaintext, self.place(module_type))

    def decrypt(self, module: bytes | memoryview, module_type: ModuleType) -> bytes:
        """Return the plaintext of a module that is not a page."""
        return self.cipher.decrypt(module, self.place(module_type))
