"""One module that fills its container, checked: its length, and its tag (spec 5.1)."""

from __future__ import annotations

import struct

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ModuleCipher

AUTHENTICITY_RULES = {
    ModuleType.COLUMN_META_DATA: "column-metadata-authentic",
    ModuleType.DATA_PAGE: "data-page-authentic",
    ModuleType.DICTIONARY_PAGE: "dictionary-page-authentic",
    ModuleType.DATA_PAGE_HEADER: "data-page-header-authentic",
    ModuleType.DICTIONARY_PAGE_HEADER: "dictionary-page-header-authentic",
    ModuleType.COLUMN_INDEX: "column-index-authentic",
    ModuleType.OFFSET_INDEX: "offset-index-authentic",
    ModuleType.BLOOM_FILTER_HEADER: "bloom-filter-header-authentic",
    ModuleType.BLOOM_FILTER_BITSET: "bloom-filter-bitset-authentic",
}


def check_module(
    cipher: ModuleCipher, stored: bytes | memoryview, place: ModulePlace, offset: int | None, book: RuleBook
) -> bytes | None:
    """Return the plaintext of a module that fills `stored`; None where it is not authentic, which is reported."""
    view = memoryview(stored)
    length = len(view)
    field = struct.unpack_from("<I", view)[0] if length >= LENGTH_LENGTH else 0
    if length < GCM_FRAMING or field != length - LENGTH_LENGTH:
        message = f"its length field says {field} bytes, its place has {length - LENGTH_LENGTH}."
        book.broken("module-length", message, place, offset)
        return None
    out = bytearray(length - GCM_FRAMING)
    try:
        cipher.gcm.decrypt_into(view[4:16], view[16:], place.aad(cipher.file_aad), out)
    except InvalidTag:
        rule_id = AUTHENTICITY_RULES[place.module_type]
        book.broken(rule_id, "the module does not authenticate.", place, offset)
        return None
    book.holds(AUTHENTICITY_RULES[place.module_type], "module-length")
    return bytes(out)


def check_padding(plaintext: bytes | bytearray, end: int, place: ModulePlace, book: RuleBook) -> None:
    """Check that a Thrift structure that ends at `end` fills the plaintext of its module."""
    book.check("padding", end == len(plaintext), f"{len(plaintext) - end} bytes follow it.", place)
