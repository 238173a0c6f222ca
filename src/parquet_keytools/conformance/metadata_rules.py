"""Metadata that is encrypted or signed: the footer, opened, and column metadata (spec 5.3 to 5.5)."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parquet_keytools.conformance.chunk_layout import ChunkNumbers, Column, OpenFooter, chunk_place
from parquet_keytools.conformance.chunk_verifier import Chunk, check_padding
from parquet_keytools.conformance.file_keys import FOOTER, Expectation, FileKeys, fingerprint
from parquet_keytools.conformance.footer_rules import check_required, plaintext_metadata
from parquet_keytools.conformance.nonces import FileNonces, nonce_entry
from parquet_keytools.conformance.report import RuleBook, Scope
from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES, FOOTER_PLACE, ModuleType, module_behind
from parquet_keytools.encryption.aes import NONCE_LENGTH, TAG_LENGTH, InvalidTag
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ModuleCipher
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.partial_footers import shown_metadata
from parquet_keytools.format.structs import ColumnMetaData, FileMetaData
from parquet_keytools.format.thrift import WireType
from parquet_keytools.runtime.presentation import escaped_bytes
from parquet_keytools.secret_bytes import SecretBytes

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

    def __init__(self, envelope: Envelope, expectation: Expectation, keys: FileKeys, nonces: FileNonces) -> None:
        self._envelope = envelope
        self._expectation = expectation
        self._keys = keys
        self._book: RuleBook = keys.book
        self._nonces = nonces

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
        """Return a plaintext footer; a forged one only where that costs little."""
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
            message = f"it is {_text(stored)}, and {_text(expected.candidates[0])} is expected."
            # What the file itself stores is still what its modules are checked with.
            book.check("prefix-expected", bool(found), message, FOOTER_PLACE)
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
        envelope, signature = self._envelope, self._envelope.signature
        if len(signature) != _SIGNATURE_LENGTH:
            return False
        end = envelope.footer_offset + len(envelope.body)
        self._nonces.add(key, nonce_entry(signature[:NONCE_LENGTH], end, signature[-4:]))
        is_valid = self._authenticates(cipher)
        if is_valid and envelope.supply_aad_prefix:
            self._book.holds("prefix-expected")
        return self._book.check("signature-valid", is_valid, "the signature is wrong.", FOOTER_PLACE)

    def _authenticates(self, cipher: ModuleCipher) -> bool:
        """Return whether the footer authenticates with a cipher."""
        envelope = self._envelope
        if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            nonce, tag = envelope.signature[:NONCE_LENGTH], envelope.signature[NONCE_LENGTH:]
            if len(envelope.signature) != _SIGNATURE_LENGTH:
                return False
            aad = FOOTER_PLACE.aad(cipher.file_aad)
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
        self._nonces.add(key, nonce_entry(body[4:16], offset, body[-4:]))
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


# --- Metadata of column chunks ---


_MOST_LEFT_BYTES = 64 * 1024

_ENCODINGS_FIELD_ID = 2
"""Of `encodings` in ColumnMetaData, which is required and of no use here."""

_REQUIRED = {
    ColumnMetaData.type.field_id: WireType.I32,
    _ENCODINGS_FIELD_ID: WireType.LIST,
    ColumnMetaData.path_in_schema.field_id: WireType.LIST,
    ColumnMetaData.codec.field_id: WireType.I32,
    ColumnMetaData.num_values.field_id: WireType.I64,
    ColumnMetaData.total_uncompressed_size.field_id: WireType.I64,
    ColumnMetaData.total_compressed_size.field_id: WireType.I64,
    ColumnMetaData.data_page_offset.field_id: WireType.I64,
}
"""Ids of the required fields, and their types."""


_AUTHENTIC = (ModuleType.COLUMN_META_DATA, "authentic")
_BROKEN = (ModuleType.COLUMN_META_DATA, "broken")


class MetadataReader:
    """Reads the metadata of chunks, and checks the rules about it."""

    def __init__(self, envelope: Envelope, footer: OpenFooter, book: RuleBook) -> None:
        self._envelope = envelope
        self._footer = footer
        self._book = book
        self._modules = 0
        self._right_paths: dict[int, bytes] = {}
        self._first_offset = envelope.footer_offset + envelope.footer_length

    def read(self, chunk: Chunk) -> ChunkNumbers | None:
        """Return what the metadata of a chunk says, its own where it can be decrypted, else what is visible."""
        row_group_ordinal, ciphers = chunk.row_group_ordinal, chunk.ciphers
        column = ciphers.column
        unusable = self._footer.unusable
        if unusable and (row_group_ordinal, column.ordinal) in unusable:
            self._book.scope_not_checked(Scope.COLUMN, f"{column.name!r}: a chunk cannot be checked")
            return None
        stored = self._footer.chunks[row_group_ordinal][column.ordinal]
        hidden, visible = stored.hidden, stored.visible
        found: ColumnMetaData | None = visible
        numbers: ChunkNumbers | None = None
        try:
            if visible is not None:
                numbers = self._check_metadata(visible, column)
            # Beside metadata in the place where it belongs, a second copy is a breach of its own.
            is_in_place = (
                self._envelope.mode is FooterMode.ENCRYPTED_FOOTER
                and column.encryption is ColumnEncryption.FOOTER_KEY
                and visible is not None
            )
            if hidden is not None and ciphers.cipher is not None and not is_in_place:
                found = self._decrypted(chunk, hidden)
                numbers = None if found is None else self._check_metadata(found, column)
        except ParquetFormatError as error:
            place = chunk_place(row_group_ordinal, column.ordinal)
            self._book.broken("metadata-path", str(error), place)
            numbers = None
        if numbers is None:
            self._book.scope_not_checked(Scope.COLUMN, f"{column.name!r}: the metadata of a chunk cannot be read")
            return None
        ciphers.held.add("metadata-path")
        if visible is None or found is None or found is visible:
            return numbers
        if self._envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            self._check_agreement(visible, found, chunk)
        return numbers

    def _decrypted(self, chunk: Chunk, module: bytes) -> ColumnMetaData | None:
        ciphers = chunk.ciphers
        # It lies somewhere in the footer; a number after its end tells it apart from all others.
        self._modules += 1
        if len(module) >= GCM_FRAMING:
            offset = self._first_offset + self._modules
            ciphers.nonces.add(ciphers.fingerprint, nonce_entry(module[4:16], offset, module[-4:]))
        plaintext = chunk.plaintext(ModuleType.COLUMN_META_DATA, module, None, self._book)
        ciphers.counts[_BROKEN if plaintext is None else _AUTHENTIC] += 1
        if plaintext is None:
            return None
        metadata, end = ColumnMetaData.read(plaintext)
        check_padding(plaintext, end, chunk.place(ModuleType.COLUMN_META_DATA), self._book)
        return metadata

    def _check_metadata(self, metadata: ColumnMetaData, column: Column) -> ChunkNumbers:
        """Raise `ParquetFormatError` if a required field is missing, or the metadata is another column's."""
        if not metadata.struct.has_types(_REQUIRED):
            _refuse_incomplete(metadata)
        numbers = ChunkNumbers.of(metadata)
        if numbers.type != column.type:
            raise ParquetFormatError(f"its type is {metadata.type}, and its column has type {column.type}.")
        # Byte for byte the same in every row group, as a rule.
        path = metadata.bytes_of(ColumnMetaData.path_in_schema)
        if path is None or path != self._right_paths.get(column.ordinal):
            if tuple(metadata.path_in_schema) != column.path:
                raise ParquetFormatError(f"the metadata names column {'.'.join(metadata.path_in_schema)!r}.")
            assert path is not None
            self._right_paths[column.ordinal] = path
        return numbers

    def _check_agreement(self, visible: ColumnMetaData, found: ColumnMetaData, chunk: Chunk) -> None:
        written, full_bytes = visible.struct.as_bytes(), found.struct.as_bytes()
        if written is not None and full_bytes is not None and full_bytes.startswith(written[:-1]):
            # The same fields, and then perhaps others: so most writers leave out what must not be shown.
            chunk.ciphers.held.add("metadata-agrees")
            return
        full = found.struct.fields
        shown, _ = shown_metadata(visible)  # What is not to be shown is a breach of its own.
        differing = sorted(
            field_id for field_id, value in shown.struct.fields.items() if full.get(field_id) != value
        )
        message = f"the fields {differing} differ."
        place = chunk_place(chunk.row_group_ordinal, chunk.ciphers.column.ordinal)
        self._book.check("metadata-agrees", not differing, message, place)


def check_left_metadata(
    source: ByteSource, gaps: Iterable[tuple[int, int]], columns: Iterable[Column], book: RuleBook
) -> None:
    """Check that no metadata of encrypted columns was left in plaintext behind their chunks (spec 5.3).

    Some writers repeat the metadata of a chunk behind it, as the first versions of the format wanted it.
    """
    encrypted = {column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT}
    for offset, length in gaps:
        data = bytes(source.read_at(offset, min(length, _MOST_LEFT_BYTES)))
        for at, path in _left_metadata(data):
            if path in encrypted:
                message = f"the metadata of column {'.'.join(path)!r} can be read there."
                book.broken("metadata-leaked", message, offset=offset + at)
    book.holds("metadata-leaked")


def _left_metadata(data: bytes) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield where column metadata begins, and of which column it is; as long as there is nothing else."""
    at = 0
    while at < len(data):
        try:
            metadata, end = ColumnMetaData.read(data, at)
            path = tuple(metadata.path_in_schema)
        except ParquetFormatError:
            return
        yield at, path
        at = end


def _refuse_incomplete(metadata: ColumnMetaData) -> None:
    """Raise `ParquetFormatError` if a required field is missing or has another type; it says which."""
    _ = metadata.type, metadata.codec, metadata.num_values, metadata.total_uncompressed_size
    _ = metadata.total_compressed_size, metadata.data_page_offset
    if metadata.struct.entry(_ENCODINGS_FIELD_ID) is None:
        raise ParquetFormatError("ColumnMetaData.encodings: is missing")
