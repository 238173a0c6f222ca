"""AES, and the ciphers of modules: length, nonce, ciphertext, tag (spec 4.1 and 5.1).

Ciphers work on views and write into views, so that a page is never copied just to be encrypted. They release
the interpreter lock while they work on a large page.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.encryption.aad import FOOTER_PLACE, MAX_ORDINAL, ModulePlace, ModuleType, module_aad
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import FormatLimitError
from parquet_keytools.format.file_layout import Bytes
from parquet_keytools.secret_bytes import SecretBytes

__all__ = ["KEY_LENGTHS_BITS", "NONCE_LENGTH", "TAG_LENGTH", "AesCtr", "AesGcm", "InvalidTag"]

NONCE_LENGTH = 12
TAG_LENGTH = 16
KEY_LENGTHS_BITS = (128, 192, 256)

_INITIAL_COUNTER = b"\x00\x00\x00\x01"


def _check_length(dek: SecretBytes) -> None:
    if dek.length_bits not in KEY_LENGTHS_BITS:
        raise FormatLimitError(f"a key of {dek.length_bits} bits is not an AES key (128, 192 or 256 bits).")


def _copied_into(cipher: Callable[[Bytes, Bytes, Bytes], bytes]) -> Callable[[Bytes, Bytes, Bytes, Bytes], int]:
    """Return `encrypt` or `decrypt` of a cipher as `encrypt_into` or `decrypt_into`."""

    def into(nonce: Bytes, data: Bytes, aad: Bytes, out: Bytes) -> int:
        result = cipher(nonce, data, aad)
        # Raises ValueError where the lengths differ.
        memoryview(out)[:] = result
        return len(result)

    return into


class AesGcm:
    """AES-GCM under one key, for any number of threads (NIST SP 800-38D, spec 4.1.1); the tag ends ciphertexts."""

    __slots__ = ("decrypt", "decrypt_into", "encrypt", "encrypt_into")

    encrypt: Callable[[Bytes, Bytes, Bytes], bytes]
    decrypt: Callable[[Bytes, Bytes, Bytes], bytes]
    encrypt_into: Callable[[Bytes, Bytes, Bytes, Bytes], int]
    decrypt_into: Callable[[Bytes, Bytes, Bytes, Bytes], int]

    def __init__(self, dek: SecretBytes) -> None:
        _check_length(dek)
        cipher = AESGCM(dek.reveal())
        # The bound methods themselves: pages are many, and a call in between costs as much as a small page.
        self.encrypt = cipher.encrypt
        self.decrypt = cipher.decrypt
        # From cryptography 48 on; before, each result is copied.
        if hasattr(cipher, "encrypt_into"):
            self.encrypt_into = cipher.encrypt_into
            self.decrypt_into = cipher.decrypt_into
        else:
            self.encrypt_into = _copied_into(cipher.encrypt)
            self.decrypt_into = _copied_into(cipher.decrypt)

    def tag(self, nonce: Bytes, data: Bytes, aad: bytes) -> bytes:
        """Return the tag alone, of 16 bytes, which is all that a signature keeps (spec 5.5)."""
        return self.encrypt(nonce, data, aad)[-TAG_LENGTH:]


class AesCtr:
    """AES-CTR under one key, for one thread (NIST SP 800-38A, spec 4.1.2); decrypting is encrypting."""

    __slots__ = ("_context",)

    def __init__(self, dek: SecretBytes) -> None:
        _check_length(dek)
        block = bytes(NONCE_LENGTH) + _INITIAL_COUNTER
        self._context = Cipher(algorithms.AES(dek.reveal()), modes.CTR(block)).encryptor()

    def apply_into(self, nonce: Bytes, data: Bytes, aad: Bytes, out: Bytes) -> None:
        """Encrypt or decrypt `data` into `out`, which has its length. No AAD is authenticated."""
        del aad  # Only there so that both modes are called in the same way.
        self._context.reset_nonce(bytes(nonce) + _INITIAL_COUNTER)
        self._context.update_into(data, out)


LENGTH_LENGTH = 4
"""Length of the length field that begins a module."""

GCM_FRAMING = LENGTH_LENGTH + NONCE_LENGTH + TAG_LENGTH
"""How many bytes longer a module is than its plaintext with AES-GCM."""

_COVERED_FRAMING = NONCE_LENGTH + TAG_LENGTH
"""As much of it as the length field counts."""

CTR_FRAMING = LENGTH_LENGTH + NONCE_LENGTH
"""How many bytes longer a page is than its plaintext with AES-CTR."""

MAX_INVOCATIONS = 2**32
"""How often one key may encrypt (NIST SP 800-38D section 8.3, spec 4.1.4)."""

MAX_MODULE_LENGTH = 2**31 - 1
"""Longest module that the readers of the format can take: lengths are signed there."""

_PARQUET_JAVA_HINT = (
    "If Spark wrote the file with V2 data pages: parquet-java leaves their levels in plaintext, before the "
    "module, and no other engine can read that."
)


_pack_length = struct.Struct("<I").pack
_read_length = struct.Struct("<I").unpack_from


class ModuleCipher:
    """Encrypts and decrypts the modules of one file under one DEK, and counts how many it encrypts."""

    def __init__(self, dek: SecretBytes, file_aad: bytes, *, invocation_limit: int = MAX_INVOCATIONS) -> None:
        self._dek = dek
        self.file_aad = file_aad
        self.gcm = AesGcm(dek)
        self._invocation_limit = min(invocation_limit, MAX_INVOCATIONS)
        self._invocations = 0

    def ctr(self) -> AesCtr:
        """Return AES-CTR under the same key, for the thread that asks."""
        return AesCtr(self._dek)

    def signed(self, footer: bytes) -> bytes:
        """Return a serialised plaintext footer with its signature: a fresh nonce, and the tag (spec 5.5)."""
        self.reserve(1)
        nonce = os.urandom(NONCE_LENGTH)
        return b"".join((footer, nonce, self.gcm.tag(nonce, footer, FOOTER_PLACE.aad(self.file_aad))))

    def reserve(self, invocations: int) -> None:
        """Count modules to be encrypted; raise `FormatLimitError` beyond what a key may encrypt (spec 4.1.4)."""
        if self._invocations + invocations > self._invocation_limit:
            raise FormatLimitError(
                f"one key would encrypt {self._invocations + invocations} modules of a file, and no key may "
                f"encrypt more than {self._invocation_limit} (spec 4.1.4).",
                hint="Give columns keys of their own, or write more and smaller files.",
            )
        self._invocations += invocations

    def encrypt(self, plaintext: Bytes, place: ModulePlace) -> bytes:
        """Return the module of a plaintext, with AES-GCM and a fresh nonce."""
        self.reserve(1)
        return self.module(plaintext, place.aad(self.file_aad), place.module_type)

    def module(self, plaintext: Bytes, aad: bytes, module_type: ModuleType) -> bytes:
        """Return the module of a plaintext that `reserve` has counted."""
        length = len(plaintext) + _COVERED_FRAMING
        if length > MAX_MODULE_LENGTH:
            length += LENGTH_LENGTH
            raise FormatLimitError(f"{module_type.title}: {length} bytes are too long for a module.")
        nonce = os.urandom(NONCE_LENGTH)
        return b"".join((_pack_length(length), nonce, self.gcm.encrypt(nonce, plaintext, aad)))

    def decrypt(self, module: Bytes, place: ModulePlace) -> bytes:
        """Return the plaintext of a module that fills its container exactly."""
        length = len(module)
        if length < GCM_FRAMING:
            raise place.error(f"a module of {length} bytes is too short.")
        if _read_length(module)[0] != length - LENGTH_LENGTH:
            check_length_field(module, length, place)
        view = memoryview(module)
        try:
            return self.gcm.decrypt(view[4:16], view[16:], place.aad(self.file_aad))
        except InvalidTag:
            raise place.not_authentic() from None


def check_length_field(module: Bytes, length: int, place: ModulePlace) -> None:
    """Raise `DecryptionError` unless the length field of a module says what its container says."""
    (stored,) = _read_length(module)
    if stored != length - LENGTH_LENGTH:
        raise place.error(
            f"its length field says {stored} bytes, its container {length - LENGTH_LENGTH}.",
            hint=_PARQUET_JAVA_HINT if place.module_type is ModuleType.DATA_PAGE else "",
        )


NO_PAGE_ORDINAL = -1
"""Stands for the dictionary page, which has none."""

_pack_ordinal = struct.Struct("<h").pack
_pack_ordinals = struct.Struct("<2h").pack
_TYPE_BYTES = [bytes((module_type,)) for module_type in ModuleType]
_DATA, _DATA_HEADER = _TYPE_BYTES[ModuleType.DATA_PAGE], _TYPE_BYTES[ModuleType.DATA_PAGE_HEADER]
_DICTIONARY, _DICTIONARY_HEADER = (
    _TYPE_BYTES[ModuleType.DICTIONARY_PAGE],
    _TYPE_BYTES[ModuleType.DICTIONARY_PAGE_HEADER],
)
_CTR = Algorithm.AES_GCM_CTR_V1


class ChunkCipher:
    """Encrypts or decrypts the modules of one column chunk."""

    __slots__ = (
        "_header_aad",
        "_ordinals",
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
        self.pages_are_gcm = algorithm is not _CTR
        self.page_framing = GCM_FRAMING if self.pages_are_gcm else CTR_FRAMING
        if not (0 <= row_group_ordinal <= MAX_ORDINAL and 0 <= column_ordinal <= MAX_ORDINAL):
            module_aad(b"", ModuleType.COLUMN_META_DATA, row_group_ordinal, column_ordinal)  # raises
        self._ordinals = ordinals = _pack_ordinals(row_group_ordinal, column_ordinal)
        file_aad = cipher.file_aad
        self._header_aad = file_aad + _DATA_HEADER + ordinals
        self._page_aad = file_aad + _DATA + ordinals

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
        """Return the AADs of a page's header and of the page; the ordinal is at most `MAX_ORDINAL`."""
        if page_ordinal == NO_PAGE_ORDINAL:
            file_aad, ordinals = self.cipher.file_aad, self._ordinals
            return file_aad + _DICTIONARY_HEADER + ordinals, file_aad + _DICTIONARY + ordinals
        ordinal = _pack_ordinal(page_ordinal)
        return self._header_aad + ordinal, self._page_aad + ordinal

    def pages_into(self, *, encrypt: bool) -> Callable[[Bytes, Bytes, Bytes, Bytes], object]:
        """Return what enciphers pages, for the thread that asks: `(nonce, input, aad, output)`, with the tag."""
        if not self.pages_are_gcm:
            return self.cipher.ctr().apply_into
        gcm = self.cipher.gcm
        return gcm.encrypt_into if encrypt else gcm.decrypt_into

    def encrypt_reserved(self, plaintext: bytes | memoryview, module_type: ModuleType) -> bytes:
        """Return the module of a plaintext that is not a page; its invocation is reserved."""
        aad = self.cipher.file_aad + _TYPE_BYTES[module_type] + self._ordinals
        return self.cipher.module(plaintext, aad, module_type)

    def decrypt(self, module: bytes | memoryview, module_type: ModuleType) -> bytes:
        """Return the plaintext of a module that is not a page."""
        return self.cipher.decrypt(module, self.place(module_type))
