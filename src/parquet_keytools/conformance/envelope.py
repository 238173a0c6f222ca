"""What is visible of a file without any key, and the rules about that (spec 5.2, 5.4, 5.5)."""

from __future__ import annotations

import struct
from dataclasses import replace

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES
from parquet_keytools.encryption.protection import Algorithm, Envelope, FooterMode, UnknownAlgorithmError
from parquet_keytools.errors import DraftFormatError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    MAGIC_LENGTH,
    TAIL_LENGTH,
    TRAILER_LENGTH,
    FooterBytes,
    check_footer_length,
    unauthenticated_limit,
    with_trailer,
)
from parquet_keytools.format.structs import ColumnChunk, FileCryptoMetaData, FileMetaData
from parquet_keytools.format.thrift import WireType

_STRUCT, _BINARY = WireType.STRUCT, WireType.BINARY
_CRYPTO, _HIDDEN = ColumnChunk.crypto_metadata.field_id, ColumnChunk.encrypted_column_metadata.field_id

_CRYPTO_FIELD_IDS = {1, 2}
_AES_FIELD_IDS = {1, 2, 3}


def check_envelope(source: ByteSource, book: RuleBook) -> Envelope | None:
    """Read what is visible, by two or three reads, and check the rules about it; None where that fails.

    What it says is parsed as for readers; opening the footer, and the walk over pages, are the verifier's own.

    Raises:
        ParquetFormatError: The footer is longer than the configuration accepts, which breaks no rule.
    """
    footer = _footer_bytes(source, book)
    if footer is None:
        return None
    draft_rule = "draft-2018" if footer.is_encrypted else "draft-2019"
    offset = footer.offset
    try:
        envelope = Envelope.of(footer, source.path)
    except DraftFormatError as error:
        book.broken(draft_rule, str(error), offset=offset)
        return None
    except UnknownAlgorithmError:
        book.broken("algorithm", "the union of algorithms does not hold exactly one known one.", offset=offset)
        return None
    except ParquetFormatError as error:
        book.broken("footer-thrift", str(error), offset=offset)
        return None
    book.holds(draft_rule, "footer-thrift")
    # Some writers store fields empty that are not there.
    envelope = replace(envelope, aad_file_unique=envelope.aad_file_unique or None)
    if envelope.mode is not FooterMode.UNENCRYPTED:
        _check_parameters(envelope, bytes(footer.data), book)
    return envelope


def _footer_bytes(source: ByteSource, book: RuleBook) -> FooterBytes | None:
    size = source.size_bytes
    if size < MAGIC_LENGTH + TRAILER_LENGTH:
        book.broken("magic", f"{size} bytes are too few for a Parquet file.")
        return None
    tail_offset = size - min(size, TAIL_LENGTH)
    tail = bytes(source.read_at(tail_offset, size - tail_offset))
    head = bytes(source.read_at(0, MAGIC_LENGTH))
    magic = tail[-MAGIC_LENGTH:]
    is_magic = magic in (MAGIC, MAGIC_ENCRYPTED_FOOTER) and head == magic
    if not book.check("magic", is_magic, f"the file begins with {head!r} and ends with {magic!r}."):
        return None
    (length,) = struct.unpack("<I", tail[-TRAILER_LENGTH:-MAGIC_LENGTH])
    offset = size - TRAILER_LENGTH - length
    message = f"{length} bytes do not fit into a file of {size} bytes."
    if not book.check("footer-length", length > 0 and offset >= MAGIC_LENGTH, message):
        return None
    check_footer_length(length, source.path)
    if offset >= tail_offset:
        tail = tail[offset - tail_offset :]
    else:
        tail = with_trailer(bytes(source.read_at(offset, length)), magic)
    return FooterBytes(magic == MAGIC_ENCRYPTED_FOOTER, offset, tail)


def plaintext_metadata(envelope: Envelope, book: RuleBook, *, is_authentic: bool = False) -> FileMetaData | None:
    """Build the footer; None where it is encrypted, or breaks the format, which goes into the book.

    Args:
        envelope: The file's envelope.
        book: Where findings go.
        is_authentic: Whether its signature was verified; if not, it may not take more memory than honest ones.
    """
    if envelope.mode is FooterMode.ENCRYPTED_FOOTER:
        return None
    try:
        limit = None if is_authentic else unauthenticated_limit(len(envelope.body))
        metadata, _ = FileMetaData.read(envelope.body, max_memory=limit)
        check_required(metadata)
    except ParquetFormatError as error:
        book.broken("footer-thrift", str(error), offset=envelope.footer_offset)
        return None
    return metadata


def check_required(metadata: FileMetaData) -> None:
    """Raise `ParquetFormatError` if a footer lacks required fields, or one has another type than it should."""
    _ = metadata.version, metadata.num_rows, metadata.created_by
    for element in metadata.schema:
        _ = element.type, element.name, element.num_children
    for row_group in metadata.row_groups:
        _ = row_group.total_byte_size, row_group.num_rows, row_group.file_offset
        _ = row_group.total_compressed_size, row_group.ordinal
        for chunk in row_group.columns:
            # The other fields are optional, and not there where they have another type.
            types = chunk.struct.types()
            if types.get(_CRYPTO, _STRUCT) is not _STRUCT or types.get(_HIDDEN, _BINARY) is not _BINARY:
                _ = chunk.crypto_metadata, chunk.encrypted_column_metadata
    for entry in metadata.key_value_metadata or ():
        _ = entry.key, entry.value


def _check_parameters(envelope: Envelope, data: bytes, book: RuleBook) -> None:
    offset = envelope.footer_offset
    book.holds("algorithm", "encrypted")
    file_unique = envelope.aad_file_unique
    message = "the file has no aad_file_unique: no AAD can be built as the specification says. "
    message += "DuckDB 2.0 is known to write such files."
    if book.check("file-unique", file_unique is not None, message, offset=offset):
        length = len(file_unique or b"")
        message = f"it has {length} bytes: it may hold the end of a prefix, or lack what went into one."
        book.check("file-unique-length", length == FILE_UNIQUE_LENGTH_BYTES, message, offset=offset)
    supplied, stored = envelope.supply_aad_prefix, envelope.aad_prefix is not None
    message = "the prefix is stored, and the file also says that readers must supply it."
    book.check("prefix-flag", not (supplied and stored), message, offset=offset)
    book.check("no-prefix", supplied or stored, "nothing binds the file to its name or version.", offset=offset)
    message = "pages are encrypted with AES-CTR, which authenticates nothing."
    book.check("ctr", envelope.algorithm is not Algorithm.AES_GCM_CTR_V1, message, offset=offset)
    if envelope.mode is FooterMode.ENCRYPTED_FOOTER:
        crypto, _ = FileCryptoMetaData.read(data)
        unknown = [f"{field_id}" for field_id in crypto.struct.types() if field_id not in _CRYPTO_FIELD_IDS]
        algorithm = crypto.encryption_algorithm
        for parameters in filter(None, (algorithm.aes_gcm_v1, algorithm.aes_gcm_ctr_v1)):
            unknown += [f"AES parameters {i}" for i in parameters.struct.types() if i not in _AES_FIELD_IDS]
        message = f"fields that are not known: {', '.join(unknown)}."
        book.check("crypto-fields", not unknown, message, offset=offset)
