"""What is visible of a file without any key, and the rules about that and about a footer that was opened.

That is the envelope, how columns are encrypted, and where their metadata is (spec 5.2, 5.4, 5.5).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from parquet_keytools.conformance.chunk_layout import ChunkEntry, Column, OpenFooter, chunk_place
from parquet_keytools.conformance.report import RuleBook
from parquet_keytools.encryption.aad import FILE_UNIQUE_LENGTH_BYTES, FOOTER_PLACE, MAX_COUNT, ModulePlace
from parquet_keytools.encryption.protection import (
    Algorithm,
    ColumnEncryption,
    Envelope,
    FooterMode,
    UnknownAlgorithmError,
)
from parquet_keytools.errors import DraftFormatError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    MAGIC_LENGTH,
    TAIL_LENGTH,
    TRAILER_LENGTH,
    ByteSource,
    FooterBytes,
    LeafColumn,
    check_footer_length,
    leaf_columns,
    unauthenticated_limit,
    with_trailer,
)
from parquet_keytools.format.partial_footers import hidden_chunk_fields, shown_metadata, wrongly_shown
from parquet_keytools.format.schema_key_values import VisibleKeyValues
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileCryptoMetaData,
    FileMetaData,
    RowGroup,
    SchemaElement,
)
from parquet_keytools.format.thrift import WireType

if TYPE_CHECKING:
    from parquet_keytools.files.table_check import TableCheck

_STRUCT, _BINARY = WireType.STRUCT, WireType.BINARY
_CRYPTO, _HIDDEN = ColumnChunk.crypto_metadata.field_id, ColumnChunk.encrypted_column_metadata.field_id

_CRYPTO_FIELD_IDS = {1, 2}
_AES_FIELD_IDS = {1, 2, 3}


def check_envelope(source: ByteSource, book: RuleBook) -> Envelope | None:
    """Read what is visible, by two or three reads, and check the rules about it; None where that fails.

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
        metadata, _ = FileMetaData.read_whole(envelope.body, max_memory=limit)
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


# --- A footer that was opened ---


_SIGNATURE_LENGTH = 28
"""Of nonce and tag; the cipher's own source file would take long to import, for a look at a footer."""

_MOST_NAMED = 5


def check_footer(
    envelope: Envelope,
    metadata: FileMetaData,
    path: str,
    book: RuleBook,
    table: TableCheck | None = None,
) -> OpenFooter | None:
    """Check the rules about a footer; None where nothing behind it can be found."""
    try:
        row_groups = metadata.row_groups
        chunks = [[ChunkEntry.of(chunk) for chunk in row_group.columns] for row_group in row_groups]
        schema = metadata.schema
        leaves = leaf_columns(schema)
    except ParquetFormatError as error:
        book.broken("schema", str(error), FOOTER_PLACE)
        return None
    _check_mode_fields(envelope, metadata, book)
    is_encrypted = envelope.mode is not FooterMode.UNENCRYPTED
    if is_encrypted and max(len(leaves), len(row_groups)) > MAX_COUNT:
        book.broken(
            "ordinal-limit", f"there are {len(row_groups)} row groups of {len(leaves)} columns.", FOOTER_PLACE
        )
        return None
    book.holds("ordinal-limit")
    for ordinal, row_group_chunks in enumerate(chunks):
        if len(row_group_chunks) != len(leaves):
            message = f"row group {ordinal} has {len(row_group_chunks)} chunks for {len(leaves)} leaves."
            book.broken("schema", message, FOOTER_PLACE)
            return None
    book.holds("schema")
    _check_row_groups(metadata, row_groups, is_encrypted, book)
    columns, unusable = _columns(leaves, chunks, envelope, book)
    columns = [
        replace(column, is_flat=leaf.is_flat, type=leaf.physical_type)
        for column, leaf in zip(columns, leaves, strict=True)
    ]
    if is_encrypted and row_groups and columns:
        has_encrypted = any(column.encryption is not ColumnEncryption.PLAINTEXT for column in columns)
        book.check("columns-encrypted", has_encrypted, "all columns are in plaintext.", FOOTER_PLACE)
    _check_names(envelope, columns, book)
    footer = OpenFooter(metadata, row_groups, chunks, columns, unusable)
    _check_values(envelope, footer, book, () if table is None else table.settings.plaintext_footer_keys)
    _check_folders(path, columns, book, table)
    _check_types(footer, schema, book)
    return footer


def _check_mode_fields(envelope: Envelope, metadata: FileMetaData, book: RuleBook) -> None:
    if envelope.mode is FooterMode.ENCRYPTED_FOOTER:
        fields = metadata.struct.types()
        message = "the encrypted footer states an algorithm, or a key for signing, of its own."
        book.check("algorithm-place", 8 not in fields and 9 not in fields, message, FOOTER_PLACE)
    elif envelope.mode is FooterMode.UNENCRYPTED:
        signs = []
        if metadata.footer_signing_key_metadata is not None:
            signs.append("it has metadata of a key for signing")
        if len(envelope.signature) == _SIGNATURE_LENGTH:
            signs.append("it is followed by as many bytes as a signature has")
        if signs:
            book.broken("algorithm-stated", f"the footer names no algorithm, and {', and '.join(signs)}.")


def _check_names(envelope: Envelope, columns: Sequence[Column], book: RuleBook) -> None:
    names = [column.name for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT]
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER and names:
        shown = f"{', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
        book.broken("names-visible", f"{shown} can be seen without a key.", FOOTER_PLACE)
    elif envelope.mode is FooterMode.ENCRYPTED_FOOTER:
        book.holds("names-visible")


def _check_values(envelope: Envelope, footer: OpenFooter, book: RuleBook, shown_keys: Collection[str]) -> None:
    """Check what a plaintext footer shows beside the metadata of chunks (spec 5.5)."""
    encrypted = {c.ordinal for c in footer.columns if c.encryption is not ColumnEncryption.PLAINTEXT}
    if envelope.mode is not FooterMode.PLAINTEXT_FOOTER or not encrypted:
        return
    shown = wrongly_shown(footer.metadata, footer.row_groups, encrypted)
    allowed = VisibleKeyValues(frozenset(shown_keys))
    for entry in footer.metadata.key_value_metadata or ():
        if allowed.hides(entry):
            shown.append(f"the value of key {entry.key[:80]!r}")
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    message = f"it shows {', '.join(shown[:_MOST_NAMED])}{more}."
    book.check("footer-values", not shown, message, FOOTER_PLACE)


def _check_types(footer: OpenFooter, schema: Sequence[SchemaElement], book: RuleBook) -> None:
    metadata = footer.metadata
    names = dict.fromkeys(metadata.fields_of_other_types())
    for record in (*schema, *footer.row_groups, *(metadata.key_value_metadata or ())):
        names.update(dict.fromkeys(record.fields_of_other_types()))
    for chunk in itertools.chain.from_iterable(footer.chunks):
        if chunk.other_types:
            names.update(dict.fromkeys(chunk.other_types))
        if chunk.visible is not None:
            names.update(dict.fromkeys(chunk.visible.fields_of_other_types()))
    book.check("field-types", not names, f"{', '.join(sorted(names))}: another type.", FOOTER_PLACE)


def _check_folders(path: str, columns: Sequence[Column], book: RuleBook, table: TableCheck | None) -> None:
    if "=" not in path and "%" not in path:
        # What compares names takes long to import, for a look at a file without a configuration.
        book.holds("folder-name")
        return
    from parquet_keytools.files.table_check import names_in_folders, protected_names

    names = names_in_folders(path)
    protected = [column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT]
    for name, column in protected_names(names, protected, table).items():
        book.broken("folder-name", f"the folder {names[name][:200]!r} gives values to column {column[:200]!r}.")
    book.holds("folder-name")


def _check_row_groups(
    metadata: FileMetaData, row_groups: Sequence[RowGroup], is_encrypted: bool, book: RuleBook
) -> None:
    numbers = [row_group.num_rows for row_group in row_groups]
    message = f"the file has {metadata.num_rows} rows, its row groups {sum(numbers)}."
    book.check("row-count", sum(numbers) == metadata.num_rows, message, FOOTER_PLACE)
    if min(numbers, default=0) < 0:
        book.broken("row-count", f"a row group has {min(numbers)} rows.", FOOTER_PLACE)
    for position, row_group in enumerate(row_groups if is_encrypted else ()):
        is_set, message = row_group.ordinal is not None, f"row group {position} has no ordinal."
        if book.check("row-group-ordinal-set", is_set, message, FOOTER_PLACE):
            message = f"row group {position} says that its ordinal is {row_group.ordinal}."
            book.check("row-group-ordinal", row_group.ordinal == position, message, FOOTER_PLACE)


def _columns(
    leaves: Sequence[LeafColumn], chunks: Sequence[Sequence[ChunkEntry]], envelope: Envelope, book: RuleBook
) -> tuple[list[Column], frozenset[tuple[int, int]]]:
    columns: list[Column] = []
    unusable: set[tuple[int, int]] = set()
    for leaf in leaves:
        column: Column | None = None
        known: dict[bytes, _Crypto] = {}
        right: object = None
        for row_group_ordinal, row_group_chunks in enumerate(chunks):
            chunk = row_group_chunks[leaf.ordinal]
            kind = _kind(chunk, envelope)
            if kind == right:
                continue
            breaches = book.breaches
            place = chunk_place(row_group_ordinal, leaf.ordinal)
            found = _column(leaf, chunk, place, envelope, book, known)
            if found is None:
                unusable.add((row_group_ordinal, leaf.ordinal))
                continue
            column = column or found
            message = f"column {leaf.dotted_path!r} is encrypted in another way than before."
            if not book.check("crypto-metadata-same", found == column, message, place):
                unusable.add((row_group_ordinal, leaf.ordinal))
            if book.breaches == breaches:
                right = kind
        columns.append(column or Column(leaf.path, leaf.ordinal, ColumnEncryption.PLAINTEXT, None))
    return columns, frozenset(unusable)


def _kind(chunk: ChunkEntry, envelope: Envelope) -> tuple[object, ...]:
    """Return all that the rules about the entries of a column's chunks look at."""
    kind = (chunk.crypto, chunk.hidden is None, chunk.visible is None)
    if envelope.mode is not FooterMode.PLAINTEXT_FOOTER:
        return kind
    # What an encrypted column may show depends on the types of its fields, and of what is in lists (spec 5.5).
    types = tuple(chunk.chunk.struct.types().items())
    if chunk.visible is None:
        return *kind, types
    struct = chunk.visible.struct
    lists = (struct.entry_bytes(field_id) for field_id in _LIST_FIELD_IDS)
    return *kind, types, tuple(struct.types().items()), *lists


_LIST_FIELD_IDS = (2, ColumnMetaData.path_in_schema.field_id)
"""Of `encodings`, which is of no use here, and `path_in_schema`: the fields that are lists and may be shown."""


class _Crypto(NamedTuple):
    """What the crypto metadata of a chunk says.

    Attributes:
        is_one_known: Whether it holds exactly one kind, and a known one.
        path: Of the column that it is of; None where it names none.
    """

    is_one_known: bool
    is_own: bool
    path: tuple[str, ...] | None
    key_metadata: bytes | None


def _crypto_of(chunk: ChunkEntry, known: dict[bytes, _Crypto]) -> _Crypto | None:
    """Return what a chunk says of its encryption; `known` is what the same bytes say in other row groups."""
    stored = chunk.crypto
    if stored is None:
        return None
    if stored not in known:
        crypto = chunk.chunk.crypto_metadata
        if crypto is None:
            return None
        with_footer_key, own = crypto.encryption_with_footer_key, crypto.encryption_with_column_key
        known[stored] = _Crypto(
            len(crypto.struct.types()) == 1 and (with_footer_key is None) is not (own is None),
            own is not None,
            None if own is None else tuple(own.path_in_schema),
            None if own is None else own.key_metadata,
        )
    return known[stored]


def _column(
    leaf: LeafColumn,
    chunk: ChunkEntry,
    place: ModulePlace,
    envelope: Envelope,
    book: RuleBook,
    known: dict[bytes, _Crypto],
) -> Column | None:
    """Check one chunk's entry, and return how it is encrypted; None where that cannot be told."""
    try:
        crypto = _crypto_of(chunk, known)
    except ParquetFormatError as error:
        book.broken("crypto-metadata", str(error), place)
        return None
    message = "the chunk has encrypted metadata and does not say with which key."
    if not book.check("crypto-metadata-set", crypto is not None or chunk.hidden is None, message, place):
        return None
    if crypto is None:
        is_there, message = chunk.visible is not None, "a plaintext column has no metadata."
        is_readable = book.check("metadata-visible", is_there, message, place)
        return Column(leaf.path, leaf.ordinal, ColumnEncryption.PLAINTEXT, None) if is_readable else None
    if not book.check("crypto-metadata", crypto.is_one_known, "it does not hold exactly one known kind.", place):
        return None
    if envelope.mode is FooterMode.UNENCRYPTED:
        message = f"column {leaf.dotted_path!r} is encrypted, and the footer names no algorithm."
        book.broken("algorithm-stated", message, place)
        return None
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
        book.holds("algorithm-stated")
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER and (hidden_ids := hidden_chunk_fields(chunk.chunk.struct)):
        book.broken("metadata-stripped", f"its chunk shows the fields {sorted(hidden_ids)}.", place)
    path = leaf.path if crypto.path is None else crypto.path
    message = f"the crypto metadata of {leaf.dotted_path!r} names column {'.'.join(path)!r}."
    book.check("crypto-metadata-path", path == leaf.path, message, place)
    encryption = ColumnEncryption.COLUMN_KEY if crypto.is_own else ColumnEncryption.FOOTER_KEY
    is_usable = _check_placement(encryption, chunk, envelope, place, book)
    return Column(leaf.path, leaf.ordinal, encryption, crypto.key_metadata) if is_usable else None


def _check_placement(
    encryption: ColumnEncryption, chunk: ChunkEntry, envelope: Envelope, place: ModulePlace, book: RuleBook
) -> bool:
    """Check where the metadata of an encrypted chunk is; returns whether its full metadata is there at all."""
    hidden, visible = chunk.hidden, chunk.visible
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
        if book.check("metadata-visible", visible is not None, "meta_data is not set.", place):
            assert visible is not None
            _, hidden_ids = shown_metadata(visible)
            message = f"it shows the fields {sorted(hidden_ids)}."
            book.check("metadata-stripped", not hidden_ids, message, place)
        return book.check("metadata-encrypted", hidden is not None, "there is none.", place)
    if encryption is ColumnEncryption.FOOTER_KEY:
        message = "meta_data is not set." if visible is None else "there is an encrypted copy too."
        book.check("metadata-in-place", visible is not None and hidden is None, message, place)
        return visible is not None or hidden is not None
    book.check("metadata-hidden", visible is None, "meta_data is set.", place)
    return book.check("metadata-encrypted", hidden is not None, "there is none.", place)
