"""AES, and the ciphers of modules: length, nonce, ciphertext, tag (spec 4.1 and 5.1).

Ciphers work on views and write into views, so that a page is never copied just to be encrypted. They release
the interpreter lock while they work on a large page.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.encryption.aad import FOOTER_PLACE, MAX_ORDINAL, ModulePlace, ModuleType, module_aad
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import FormatLimitError
from parquet_keytools.format.file_layout import Bytes
from parquet_keytools.runtime.operating_system import register_at_fork
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
    """AES-GCM under one key, for any number of threads (NIST SP 800-38D, spec 4.1.1).

    Attributes:
        encrypt: `(nonce, plaintext, aad)`; returns the ciphertext and the tag.
        decrypt: `(nonce, ciphertext and tag, aad)`; returns the plaintext. Raises `InvalidTag`.
        encrypt_into: `(nonce, plaintext, aad, out)`; `out` has the length of the plaintext and of the tag.
        decrypt_into: `(nonce, ciphertext and tag, aad, out)`; `out` has the length of the plaintext. Raises
            `InvalidTag`, and `out` is worth nothing then.
    """

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
    """AES-CTR under one key, for one thread (NIST SP 800-38A, spec 4.1.2).

    The initial counter block is the nonce and then 31 bits of 0 and one of 1. Decrypting is encrypting.
    """

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

_MOST_NONCES = 1_024


class _Nonces:
    """Nonces, taken from the system many at once: a call for each takes longer than a small page.

    They are random, so that it does not matter which key takes which.
    """

    __slots__ = ("_lock", "_next", "_position", "_taken")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 16
        self._position = 0
        self._taken = b""

    def take(self, count: int) -> bytes:
        """Return the bytes of nonces that nobody else gets."""
        with self._lock:
            start = self._position
            end = self._position = start + NONCE_LENGTH * count
            if end > len(self._taken):
                self._taken = os.urandom(NONCE_LENGTH * (count + self._next))
                self._next = min(2 * self._next, _MOST_NONCES)
                start, end = 0, NONCE_LENGTH * count
                self._position = end
            return self._taken[start:end]


_nonces = _Nonces()


def _begin_anew() -> None:
    # What was left, the parent uses too, and the lock may be shut. A child has one thread here: of several that
    # began anew only when they take nonces, two could take the same.
    global _nonces
    _nonces = _Nonces()


register_at_fork(after_in_child=_begin_anew)


class ModuleCipher:
    """Encrypts and decrypts the modules of one file under one DEK, and counts how many it encrypts.

    Attributes:
        file_aad: AAD prefix, if any, and then the file unique.
        gcm: The cipher itself, for those who encipher many pages; `reserve` first.
    """

    def __init__(self, dek: SecretBytes, file_aad: bytes, *, invocation_limit: int = MAX_INVOCATIONS) -> None:
        self._dek = dek
        self.file_aad = file_aad
        self.gcm = AesGcm(dek)
        self._invocation_limit = min(invocation_limit, MAX_INVOCATIONS)
        self._invocations = 0

    def nonces(self, count: int) -> bytes:
        """Return the bytes of fresh nonces; for any number of threads."""
        return _nonces.take(count)

    def ctr(self) -> AesCtr:
        """Return AES-CTR under the same key, for the thread that asks."""
        return AesCtr(self._dek)

    def signed(self, footer: bytes) -> bytes:
        """Return a serialised plaintext footer with its signature: a fresh nonce, and the tag (spec 5.5).

        Raises:
            FormatLimitError: The key has encrypted as much as it may.
        """
        self.reserve(1)
        nonce = _nonces.take(1)
        return b"".join((footer, nonce, self.gcm.tag(nonce, footer, FOOTER_PLACE.aad(self.file_aad))))

    def reserve(self, invocations: int) -> None:
        """Count modules that are going to be encrypted with this key.

        Raises:
            FormatLimitError: They would be more than one key may encrypt (spec 4.1.4).
        """
        if self._invocations + invocations > self._invocation_limit:
            raise FormatLimitError(
                f"one key would encrypt {self._invocations + invocations} modules of a file, and no key may "
                f"encrypt more than {self._invocation_limit} (spec 4.1.4).",
                hint="Give columns keys of their own, or write more and smaller files.",
            )
        self._invocations += invocations

    def encrypt(self, plaintext: Bytes, place: ModulePlace) -> bytes:
        """Return the module of a plaintext, with AES-GCM and a fresh nonce.

        Raises:
            FormatLimitError: The key has encrypted as much as it may, the module is too long, or an ordinal
                too large.
        """
        self.reserve(1)
        return self.encrypt_reserved(plaintext, place)

    def encrypt_reserved(self, plaintext: Bytes, place: ModulePlace) -> bytes:
        """Do the same for a module that `reserve` has counted already."""
        return self.module(plaintext, place.aad(self.file_aad), place.module_type)

    def module(self, plaintext: Bytes, aad: bytes, module_type: ModuleType) -> bytes:
        """Do the same where the AAD is at hand."""
        length = len(plaintext) + _COVERED_FRAMING
        if length > MAX_MODULE_LENGTH:
            length += LENGTH_LENGTH
            raise FormatLimitError(f"{module_type.title}: {length} bytes are too long for a module.")
        nonce = _nonces.take(1)
        return b"".join((_pack_length(length), nonce, self.gcm.encrypt(nonce, plaintext, aad)))

    def decrypt(self, module: Bytes, place: ModulePlace) -> bytes:
        """Return the plaintext of a module that fills its container exactly.

        Raises:
            DecryptionError: The length field does not fit the container, or the module is not authentic.
        """
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
    """Check that the length field of a module says what its container says.

    Args:
        module: The module; four bytes at least.
        length: Length of the whole module, its length field included.
        place: For the error.

    Raises:
        DecryptionError: It does not.
    """
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
        """Return the AADs of a page's header and of the page, without building places for them.

        Args:
            page_ordinal: Up to `MAX_ORDINAL`; whoever walks over pages counts them.
        """
        if page_ordinal == NO_PAGE_ORDINAL:
            file_aad, ordinals = self.cipher.file_aad, self._ordinals
            return file_aad + _DICTIONARY_HEADER + ordinals, file_aad + _DICTIONARY + ordinals
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
        return self.cipher.module(plaintext, self._aad(module_type), module_type)

    def decrypt(self, module: bytes | memoryview, module_type: ModuleType) -> bytes:
        """Return the plaintext of a module that is not a page."""
        return self.cipher.decrypt(module, self.place(module_type))

    def _aad(self, module_type: ModuleType) -> bytes:
        """Return the AAD of a module that is not a page."""
        return self.cipher.file_aad + _TYPE_BYTES[module_type] + self._ordinals
