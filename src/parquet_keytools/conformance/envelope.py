"""What is visible of a file without any key, and the rules about that (spec 5.2, 5.4, 5.5)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.footer_modes import Algorithm, FooterMode
from parquet_keytools.errors import DraftFormatError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    MAGIC_LENGTH,
    TAIL_LENGTH,
    TRAILER_LENGTH,
    refuse_draft_crypto_metadata,
    refuse_draft_footer,
)
from parquet_keytools.format.structs import Aes, EncryptionAlgorithm, FileCryptoMetaData, FileMetaData

_USUAL_FILE_UNIQUE_LENGTH = 8
_CRYPTO_FIELD_IDS = {1, 2}
_AES_FIELD_IDS = {1, 2, 3}


@dataclass(frozen=True)
class Envelope:
    """What a file says before any key is used; nothing of it is authenticated.

    Attributes:
        mode: How the footer is protected.
        footer_offset: Where the footer begins, in bytes; it is preceded by all modules.
        footer_length: Of all that the footer's length covers.
        plaintext: The footer, if it is not encrypted.
        body: The encrypted footer's module, or the plaintext footer's bytes.
        signature: What follows a plaintext footer.
        algorithm: As stated; None in a file that is not encrypted.
        parameters: The AAD fields beside it.
        key_metadata: Of the footer's key.
    """

    mode: FooterMode
    footer_offset: int
    footer_length: int
    plaintext: FileMetaData | None
    body: bytes
    signature: bytes
    algorithm: Algorithm | None
    parameters: Aes
    key_metadata: bytes | None

    @property
    def aad_prefix(self) -> bytes | None:
        """The prefix as stored; some writers store the field empty where there is none."""
        return self.parameters.aad_prefix or None

    @property
    def aad_file_unique(self) -> bytes | None:
        """The file unique as stored."""
        return self.parameters.aad_file_unique or None

    @property
    def supply_aad_prefix(self) -> bool:
        """Whether a prefix was used that is not stored."""
        return bool(self.parameters.supply_aad_prefix)


def read_envelope(source: ByteSource, book: RuleBook) -> Envelope | None:
    """Read what is visible, by two or three reads, and check the rules about it; None where that fails."""
    located = _footer_bytes(source, book)
    if located is None:
        return None
    is_encrypted, offset, data = located
    try:
        envelope = _encrypted(data, offset) if is_encrypted else _plaintext(data, offset)
    except DraftFormatError as error:
        book.broken("draft-2018" if is_encrypted else "draft-2019", str(error), offset=offset)
        return None
    except ParquetFormatError as error:
        book.broken("footer-thrift", str(error), offset=offset)
        return None
    except _UnknownAlgorithmError:
        book.broken("algorithm", "the union of algorithms does not hold exactly one known one.", offset=offset)
        return None
    book.holds("draft-2018" if is_encrypted else "draft-2019", "footer-thrift")
    if envelope.mode is not FooterMode.UNENCRYPTED:
        _check_parameters(envelope, data, book)
    return envelope


def _footer_bytes(source: ByteSource, book: RuleBook) -> tuple[bool, int, bytes] | None:
    size = source.size_bytes
    if size < MAGIC_LENGTH + TRAILER_LENGTH:
        book.broken("magic", f"{size} bytes are too few for a Parquet file.")
        return None
    tail_offset = size - min(size, TAIL_LENGTH)
    tail = bytes(source.read_at(tail_offset, size - tail_offset))
    head = bytes(source.read_at(0, MAGIC_LENGTH))
    magic = tail[-MAGIC_LENGTH:]
    if magic not in (MAGIC, MAGIC_ENCRYPTED_FOOTER) or head != magic:
        book.broken("magic", f"the file begins with {head!r} and ends with {magic!r}.")
        return None
    book.holds("magic")
    (length,) = struct.unpack("<I", tail[-TRAILER_LENGTH:-MAGIC_LENGTH])
    offset = size - TRAILER_LENGTH - length
    if length == 0 or offset < MAGIC_LENGTH:
        book.broken("footer-length", f"{length} bytes do not fit into a file of {size} bytes.")
        return None
    book.holds("footer-length")
    data = tail[offset - tail_offset : -TRAILER_LENGTH] if offset >= tail_offset else None
    return magic == MAGIC_ENCRYPTED_FOOTER, offset, data or bytes(source.read_at(offset, length))


class _UnknownAlgorithmError(Exception):
    pass


def _algorithm_of(stored: EncryptionAlgorithm) -> tuple[Algorithm, Aes]:
    gcm, ctr = stored.aes_gcm_v1, stored.aes_gcm_ctr_v1
    if len(stored.struct.fields) == 1 and gcm is not None:
        algorithm, parameters = Algorithm.AES_GCM_V1, gcm
    elif len(stored.struct.fields) == 1 and ctr is not None:
        algorithm, parameters = Algorithm.AES_GCM_CTR_V1, ctr
    else:
        raise _UnknownAlgorithmError
    # Reading a field checks its type.
    _ = parameters.aad_prefix, parameters.aad_file_unique, parameters.supply_aad_prefix
    return algorithm, parameters


def _encrypted(data: bytes, offset: int) -> Envelope:
    crypto, end = FileCryptoMetaData.read(data)
    refuse_draft_crypto_metadata(crypto)
    algorithm, parameters = _algorithm_of(crypto.encryption_algorithm)
    key_metadata = crypto.key_metadata
    return Envelope(
        FooterMode.ENCRYPTED_FOOTER,
        offset,
        len(data),
        None,
        data[end:],
        b"",
        algorithm,
        parameters,
        key_metadata,
    )


def _plaintext(data: bytes, offset: int) -> Envelope:
    metadata, end = FileMetaData.read(data)
    refuse_draft_footer(metadata)
    check_required(metadata)
    stored = metadata.encryption_algorithm
    algorithm, parameters = _algorithm_of(stored) if stored is not None else (None, Aes())
    return Envelope(
        FooterMode.UNENCRYPTED if algorithm is None else FooterMode.PLAINTEXT_FOOTER,
        offset,
        len(data),
        metadata,
        data[:end],
        data[end:],
        algorithm,
        parameters,
        metadata.footer_signing_key_metadata,
    )


def check_required(metadata: FileMetaData) -> None:
    """Raise `ParquetFormatError` if a footer lacks required fields, or one has another type than it should."""
    _ = metadata.version, metadata.num_rows, metadata.created_by
    for element in metadata.schema:
        _ = element.type, element.name, element.num_children
    for row_group in metadata.row_groups:
        _ = row_group.total_byte_size, row_group.num_rows, row_group.file_offset
        _ = row_group.total_compressed_size, row_group.ordinal
        for chunk in row_group.columns:
            _ = chunk.file_path, chunk.column_index_offset, chunk.column_index_length
            _ = chunk.offset_index_offset, chunk.offset_index_length
            _ = chunk.meta_data, chunk.crypto_metadata, chunk.encrypted_column_metadata
    for entry in metadata.key_value_metadata or ():
        _ = entry.key, entry.value


def _check_parameters(envelope: Envelope, data: bytes, book: RuleBook) -> None:
    offset = envelope.footer_offset
    book.holds("algorithm", "encrypted")
    file_unique = envelope.aad_file_unique
    if file_unique is None:
        book.broken(
            "file-unique",
            "the file has no aad_file_unique: no AAD can be built as the specification says. "
            "DuckDB 2.0 is known to write such files.",
            offset=offset,
        )
    else:
        book.holds("file-unique")
        if len(file_unique) < _USUAL_FILE_UNIQUE_LENGTH:
            book.broken("file-unique-length", f"it has {len(file_unique)} bytes.", offset=offset)
        else:
            book.holds("file-unique-length")
    if envelope.supply_aad_prefix and envelope.aad_prefix is not None:
        book.broken("prefix-flag", "the prefix is stored, and readers are told to supply it.", offset=offset)
    else:
        book.holds("prefix-flag")
    if envelope.supply_aad_prefix or envelope.aad_prefix is not None:
        book.holds("no-prefix")
    else:
        book.broken("no-prefix", "nothing binds the file to its name or version.", offset=offset)
    if envelope.algorithm is Algorithm.AES_GCM_CTR_V1:
        book.broken("ctr", "pages are encrypted with AES-CTR, which authenticates nothing.", offset=offset)
    else:
        book.holds("ctr")
    if envelope.mode is FooterMode.ENCRYPTED_FOOTER:
        crypto, _ = FileCryptoMetaData.read(data)
        unknown = [f"{field_id}" for field_id in crypto.struct.fields if field_id not in _CRYPTO_FIELD_IDS]
        parameters = envelope.parameters.struct.fields
        unknown += [f"AES parameters {field_id}" for field_id in parameters if field_id not in _AES_FIELD_IDS]
        if unknown:
            book.broken("crypto-fields", f"fields that are not known: {', '.join(unknown)}.", offset=offset)
        else:
            book.holds("crypto-fields")
