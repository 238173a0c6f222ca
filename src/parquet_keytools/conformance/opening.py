"""The footer of a file that is verified, opened: decrypted, or its signature verified (spec 5.4, 5.5).

And what is expected of a file beyond the specification, by its configuration or by whoever asks.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parquet_keytools.conformance.chunk_ciphers import check_padding
from parquet_keytools.conformance.envelope import check_required, plaintext_metadata
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, fingerprint
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.conformance.rules import Scope
from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES, FOOTER_PLACE, ModuleType, module_behind
from parquet_keytools.encryption.aad_prefix import ExpectedAadPrefix
from parquet_keytools.encryption.aes import NONCE_LENGTH, TAG_LENGTH, InvalidTag
from parquet_keytools.encryption.envelope import Envelope
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, MAX_INVOCATIONS, ModuleCipher
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.printable import escaped_bytes

if TYPE_CHECKING:
    # These take long to import, for a look at a file without a configuration.
    from parquet_keytools.config.table_settings import TableSettings
    from parquet_keytools.files.table_check import TableCheck


@dataclass(frozen=True)
class ExpectedTable:
    """What a table wants of a file.

    Attributes:
        check: Compares keys, algorithm and plaintext columns, as readers do.
        check_columns: Raises `ConfigurationError` where the patterns do not fit a file with these leaf paths.
    """

    check: TableCheck
    settings: TableSettings
    check_columns: Callable[[Sequence[tuple[str, ...]]], object]


@dataclass(frozen=True)
class Expectation:
    """What is expected of one file.

    Attributes:
        aad_prefix: The AAD prefix that it must have; None takes what it stores.
        table: What its table wants; None where there is none.
        without_table: Why there is none, though there are tables; empty where there are none.
        invocation_limit: How often one DEK may encrypt (spec 4.1.4); lower ones are for tests.
    """

    aad_prefix: ExpectedAadPrefix | None = None
    allow_plaintext: bool = False
    table: ExpectedTable | None = None
    without_table: str = ""
    invocation_limit: int = MAX_INVOCATIONS


_SIGNATURE_LENGTH = NONCE_LENGTH + TAG_LENGTH

FORGED_FOOTER_LENGTH = 64 * 1024
"""Up to how many bytes a plaintext footer is looked into though its signature is missing or wrong."""


@dataclass(frozen=True)
class OpenedEnvelope:
    """A footer that can be looked into.

    Attributes:
        file_aad: AAD prefix and file unique; None where it is not known.
        cipher: Under the footer's DEK; None without it.
    """

    metadata: FileMetaData
    file_aad: bytes | None
    cipher: ModuleCipher | None
    fingerprint: bytes
    is_authentic: bool


class FooterOpener:
    """Opens the footer, and checks the rules about that."""

    def __init__(self, envelope: Envelope, expectation: Expectation, keys: FileKeys, ledger: NonceLedger) -> None:
        self._envelope = envelope
        self._expectation = expectation
        self._keys = keys
        self._book: RuleBook = keys.book
        self._ledger = ledger

    def open(self) -> OpenedEnvelope | None:
        """Open the footer; None where it is not plaintext and cannot be decrypted."""
        envelope = self._envelope
        dek = self._keys.footer_dek(envelope.key_metadata)
        file_aads = self._file_aads()
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            self._check_signature_length()
        if dek is None or not file_aads:
            reason = self._keys.denied.get(FOOTER) or "the AAD prefix is missing or wrong, or the file unique is"
            if envelope.mode is FooterMode.ENCRYPTED_FOOTER:
                self._book.scope_not_checked(Scope.FOOTER, f"footer: {reason}")
            else:
                # What it shows can be checked; only that it is authentic cannot.
                self._book.not_checked("signature-valid", f"footer: {reason}")
            return self._unauthenticated(next(iter(file_aads), None))
        cipher = self._cipher(dek, file_aads)
        file_aad = cipher.file_aad
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            is_authentic = self._verify(cipher, fingerprint(dek))
            metadata = self._signed(is_authentic=is_authentic)
        else:
            plaintext = self._decrypt(cipher, fingerprint(dek))
            metadata = None if plaintext is None else self._parsed(plaintext)
            is_authentic = True
        if metadata is None:
            self._book.scope_not_checked(Scope.FOOTER, "the footer cannot be read")
            return None
        return OpenedEnvelope(metadata, file_aad, cipher, fingerprint(dek), is_authentic)

    def _signed(self, *, is_authentic: bool) -> FileMetaData | None:
        """Return a plaintext footer; one that is known to be somebody else's only where that costs little."""
        if not is_authentic and len(self._envelope.body) > FORGED_FOOTER_LENGTH:
            return None
        return plaintext_metadata(self._envelope, self._book, is_authentic=is_authentic)

    def _unauthenticated(self, file_aad: bytes | None) -> OpenedEnvelope | None:
        metadata = plaintext_metadata(self._envelope, self._book)
        return None if metadata is None else OpenedEnvelope(metadata, file_aad, None, b"", False)

    def _cipher(self, dek: SecretBytes, file_aads: Sequence[bytes]) -> ModuleCipher:
        """Return the cipher with which the footer authenticates; the first one where none does."""
        ciphers = [ModuleCipher(dek, file_aad) for file_aad in file_aads]
        return next(filter(self._authenticates, ciphers[1:]), ciphers[0]) if ciphers[1:] else ciphers[0]

    def _file_aads(self) -> tuple[bytes, ...]:
        """Return what may begin all AADs; nothing where it is not known (spec 4.4.1)."""
        envelope, expected, book = self._envelope, self._expectation.aad_prefix, self._book
        stored = envelope.aad_prefix
        if envelope.supply_aad_prefix and stored is None:
            if expected is None:
                book.not_checked("prefix-expected", "readers must supply the prefix, and none is given")
                return ()
            if self._keys.finder is None:
                book.not_checked("prefix-expected", "the prefix is not stored: without keys nothing shows it")
        elif expected is not None:
            found = [c for c in expected.candidates if stored is not None and hmac.compare_digest(stored, c)]
            is_right = bool(found)
            message = f"it is {_text(stored)}, and {_text(expected.candidates[0])} is expected."
            # What the file itself stores is still what its modules are checked with.
            book.check("prefix-expected", is_right, message, FOOTER_PLACE)
        file_unique = envelope.aad_file_unique
        length = len(file_unique or b"")
        if expected is not None and not expected.any_file_unique and length != FILE_UNIQUE_LENGTH_BYTES:
            reason = f"with a file unique of {length} bytes nothing shows where the prefix ends"
            book.not_checked("prefix-expected", reason)
        if file_unique is None:
            return ()
        if stored is None and envelope.supply_aad_prefix and expected is not None:
            return tuple(candidate + file_unique for candidate in expected.candidates)
        return ((stored or b"") + file_unique,)

    def _check_signature_length(self) -> None:
        length = len(self._envelope.signature)
        message = f"{length} bytes follow the footer, and the signature has {_SIGNATURE_LENGTH}."
        self._book.check("signature-present", length == _SIGNATURE_LENGTH, message, FOOTER_PLACE)

    def _verify(self, cipher: ModuleCipher, key: bytes) -> bool:
        signature = self._envelope.signature
        if len(signature) != _SIGNATURE_LENGTH:
            return False
        nonce, tag = signature[:NONCE_LENGTH], signature[NONCE_LENGTH:]
        self._ledger.add(key, nonce, self._envelope.footer_offset + len(self._envelope.body), tag[-4:])
        is_valid = hmac.compare_digest(
            cipher.gcm.tag(nonce, self._envelope.body, FOOTER_PLACE.aad(cipher.file_aad)), tag
        )
        if is_valid and self._envelope.supply_aad_prefix:
            self._book.holds("prefix-expected")
        return self._book.check("signature-valid", is_valid, "the signature is wrong.", FOOTER_PLACE)

    def _authenticates(self, cipher: ModuleCipher) -> bool:
        """Return whether the footer authenticates with a cipher."""
        envelope = self._envelope
        aad = FOOTER_PLACE.aad(cipher.file_aad)
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            nonce, tag = envelope.signature[:NONCE_LENGTH], envelope.signature[NONCE_LENGTH:]
            if len(envelope.signature) != _SIGNATURE_LENGTH:
                return False
            return hmac.compare_digest(cipher.gcm.tag(nonce, envelope.body, aad), tag)
        try:
            cipher.decrypt(envelope.body, FOOTER_PLACE)
        except (DecryptionError, ParquetFormatError):
            return False
        return True

    def _decrypt(self, cipher: ModuleCipher, key: bytes) -> bytes | None:
        envelope, book = self._envelope, self._book
        body = memoryview(envelope.body)
        offset = envelope.footer_offset + envelope.footer_length - len(body)
        stored = struct.unpack_from("<I", body)[0] if len(body) >= LENGTH_LENGTH else 0
        message = f"its length field says {stored} bytes, and {len(body) - LENGTH_LENGTH} follow."
        if not book.check("footer-framing", stored == len(body) - LENGTH_LENGTH, message, FOOTER_PLACE):
            # The module itself may still be whole.
            body = body[: stored + LENGTH_LENGTH]
        if len(body) < GCM_FRAMING or stored != len(body) - LENGTH_LENGTH:
            return None
        self._ledger.add(key, body[4:16], offset, bytes(body[-4:]))
        out = bytearray(len(body) - GCM_FRAMING)
        try:
            cipher.gcm.decrypt_into(body[4:16], body[16:], cipher.file_aad + bytes([ModuleType.FOOTER]), out)
        except InvalidTag:
            book.broken("footer-authentic", "the footer does not authenticate.", FOOTER_PLACE, offset)
            return None
        behind = self._module_behind()
        if behind is not None:
            message = f"it may be a {behind.title}: prefix and file unique end as the AAD of one does."
            book.broken("footer-authentic", message, FOOTER_PLACE, offset)
            return None
        book.holds("footer-authentic")
        if envelope.supply_aad_prefix:
            book.holds("prefix-expected")
        return bytes(out)

    def _module_behind(self) -> ModuleType | None:
        expected, file_unique = self._expectation.aad_prefix, self._envelope.aad_file_unique or b""
        # Of a prefix that is expected nothing but its end is unknown; `file-unique-length` is about that.
        return module_behind(b"" if expected is not None else self._envelope.aad_prefix or b"", file_unique)

    def _parsed(self, plaintext: bytes) -> FileMetaData | None:
        try:
            metadata, end = FileMetaData.read(plaintext)
            check_required(metadata)
            check_padding(plaintext, end, FOOTER_PLACE, self._book)
        except ParquetFormatError as error:
            self._book.broken("footer-thrift", str(error), FOOTER_PLACE, self._envelope.footer_offset)
            return None
        return metadata


def _text(prefix: bytes | None) -> str:
    return "none" if prefix is None else f"'{escaped_bytes(prefix[:200])}'"
