"""The footer of a file that is verified, opened: decrypted, or its signature verified (spec 5.4, 5.5)."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from parquet_keytools.conformance.envelope import Envelope, check_required
from parquet_keytools.conformance.expectation import Expectation
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, fingerprint
from parquet_keytools.conformance.module_check import check_padding
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.conformance.rules import Scope
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aes import NONCE_LENGTH, TAG_LENGTH, InvalidTag
from parquet_keytools.encryption.footer_modes import FooterMode
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ModuleCipher
from parquet_keytools.encryption.module_place import FOOTER_PLACE
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileMetaData

_SIGNATURE_LENGTH = NONCE_LENGTH + TAG_LENGTH


@dataclass(frozen=True)
class OpenedEnvelope:
    """A footer that can be looked into.

    Attributes:
        metadata: The footer.
        file_aad: AAD prefix and file unique; None where it is not known.
        cipher: Under the footer's DEK; None without it.
        fingerprint: Of this DEK.
        is_authentic: Whether the footer authenticates.
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
        file_aad = self._file_aad()
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            self._check_signature_length()
        if dek is None or file_aad is None:
            reason = self._keys.denied.get(FOOTER) or "the AAD prefix is missing or wrong, or the file unique is"
            if envelope.plaintext is None:
                self._book.scope_not_checked(Scope.FOOTER, f"footer: {reason}")
            else:
                # What it shows can be checked; only that it is authentic cannot.
                self._book.not_checked("signature-valid", f"footer: {reason}")
            return self._unauthenticated(file_aad)
        cipher = ModuleCipher(dek, file_aad)
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            is_authentic = self._verify(cipher, fingerprint(dek))
            assert envelope.plaintext is not None
            return OpenedEnvelope(envelope.plaintext, file_aad, cipher, fingerprint(dek), is_authentic)
        plaintext = self._decrypt(cipher, fingerprint(dek))
        metadata = None if plaintext is None else self._parsed(plaintext)
        if metadata is None:
            self._book.scope_not_checked(Scope.FOOTER, "the footer cannot be read")
            return None
        return OpenedEnvelope(metadata, file_aad, cipher, fingerprint(dek), True)

    def _unauthenticated(self, file_aad: bytes | None) -> OpenedEnvelope | None:
        if self._envelope.plaintext is None:
            return None
        return OpenedEnvelope(self._envelope.plaintext, file_aad, None, b"", False)

    def _file_aad(self) -> bytes | None:
        """Return what begins all AADs; None where it is not known (spec 4.4.1)."""
        envelope, expected, book = self._envelope, self._expectation.aad_prefix, self._book
        stored = envelope.aad_prefix
        if envelope.supply_aad_prefix and stored is None:
            if expected is None:
                book.not_checked("prefix-expected", "readers must supply the prefix, and none is given")
                return None
            if self._keys.finder is None:
                book.not_checked("prefix-expected", "the prefix is not stored: without keys nothing shows it")
        elif expected is not None:
            is_right = stored is not None and hmac.compare_digest(stored, expected)
            message = f"it is {_text(stored)}, and {_text(expected)} is expected."
            # What the file itself stores is still what its modules are checked with.
            book.check("prefix-expected", is_right, message, FOOTER_PLACE)
        if envelope.aad_file_unique is None:
            return None
        prefix = stored if stored is not None else (expected if envelope.supply_aad_prefix else None)
        return (prefix or b"") + envelope.aad_file_unique

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
        book.holds("footer-authentic")
        if envelope.supply_aad_prefix:
            book.holds("prefix-expected")
        return bytes(out)

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
    return "none" if prefix is None else repr(prefix.decode("utf-8", "replace")[:200])
