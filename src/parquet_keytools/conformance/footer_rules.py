"""The rules about what is visible of a file without any key, about its footer, and about what lies where.

That is the envelope, how columns are encrypted, where their metadata is (spec 5.2, 5.4, 5.5), and that chunks
lie in the file, do not overlap, and leave no gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from parquet_keytools.conformance.report import RuleBook
from parquet_keytools.encryption.aad import (
    FILE_UNIQUE_LENGTH_BYTES,
    FOOTER_PLACE,
    MAX_COUNT,
    ModulePlace,
    ModuleType,
)
from parquet_keytools.encryption.footer import SIGNATURE_LENGTH, FooterEnvelope
from parquet_keytools.encryption.protection import (
    Algorithm,
    ColumnEncryption,
    Envelope,
    FooterMode,
    UnknownAlgorithmError,
)
from parquet_keytools.errors import DraftFormatError, FileChangedError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    MAGIC_LENGTH,
    TRAILER_LENGTH,
    Bytes,
    ByteSource,
    ChunkPlaces,
    FooterBytes,
    LeafColumn,
    Region,
    RegionKind,
    leaf_columns,
    places_of,
    read_footer_bytes,
    unauthenticated_limit,
)
from parquet_keytools.format.partial_footers import (
    VisibleKeyValues,
    hidden_chunk_fields,
    shown_metadata,
    wrongly_shown,
)
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

_CRYPTO_FIELD_IDS = {1, 2}
_AES_FIELD_IDS = {1, 2, 3}


def check_envelope(source: ByteSource, book: RuleBook) -> FooterEnvelope | None:
    """Read what is visible, and check the rules about it; None where that fails.

    A footer that is longer than the configuration accepts breaks no rule, and is an error.
    """
    footer = _footer_bytes(source, book)
    if footer is None:
        return None
    draft_rule = "draft-2018" if footer.is_encrypted else "draft-2019"
    offset = footer.offset
    try:
        envelope = FooterEnvelope.of(footer, source.path)
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
    try:
        footer = read_footer_bytes(source)
    except FileChangedError:
        raise
    except ParquetFormatError as error:
        size, magic = source.size_bytes, b""
        if size >= MAGIC_LENGTH + TRAILER_LENGTH:
            magic, end = bytes(source.read_at(0, MAGIC_LENGTH)), bytes(source.read_at(size - 8, TRAILER_LENGTH))
            length = int.from_bytes(end[:MAGIC_LENGTH], "little")
            if magic in (MAGIC, MAGIC_ENCRYPTED_FOOTER) and end.endswith(magic):
                if 0 < length <= size - MAGIC_LENGTH - TRAILER_LENGTH:
                    raise  # It is longer than the configuration accepts.
                book.broken("footer-length", str(error))
                return None
        book.broken("magic", str(error))
        return None
    book.holds("magic", "footer-length")
    return footer


def read_metadata(
    envelope: Envelope, data: Bytes, book: RuleBook, *, is_authentic: bool = False
) -> FileMetaData | None:
    """Parse the plaintext of a footer; None where it breaks the format, which goes into the book.

    Unless it was authenticated, it may not take more memory than honest ones.
    """
    is_encrypted = envelope.mode is FooterMode.ENCRYPTED_FOOTER
    place = FOOTER_PLACE if is_encrypted else None
    try:
        limit = None if is_authentic else unauthenticated_limit(len(data))
        metadata, end = FileMetaData.read_whole(data, max_memory=limit)
        _check_required(metadata)
    except ParquetFormatError as error:
        book.broken("footer-thrift", str(error), place, envelope.footer_offset)
        return None
    if is_encrypted:
        book.check("padding", end == len(data), f"{len(data) - end} bytes follow it.", place)
    return metadata


def _check_required(metadata: FileMetaData) -> None:
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
            if types.get(_CRYPTO) is not WireType.STRUCT or types.get(_HIDDEN) is not WireType.BINARY:
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

ChunkKey = tuple[int, int]
"""Row group ordinal and column ordinal."""


@dataclass(frozen=True)
class Column:
    """A leaf column of a file that is verified; a flat one has one value, or null, for each row."""

    path: tuple[str, ...]
    ordinal: int
    encryption: ColumnEncryption
    key_metadata: bytes | None
    is_flat: bool
    type: int

    @classmethod
    def of(cls, leaf: LeafColumn, encryption: ColumnEncryption, key_metadata: bytes | None = None) -> Column:
        """Return the column of a leaf."""
        return cls(leaf.path, leaf.ordinal, encryption, key_metadata, leaf.is_flat, leaf.physical_type)

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)


@dataclass(frozen=True)
class OpenFooter:
    """A footer that was opened, and its parts; `unusable` chunks cannot be looked into."""

    metadata: FileMetaData
    row_groups: Sequence[RowGroup]
    chunks: Sequence[Sequence[ColumnChunk]]
    columns: Sequence[Column]
    unusable: frozenset[ChunkKey]


class ChunkNumbers(NamedTuple):
    """What the metadata of a chunk says; all of it would take much memory."""

    codec: int
    num_values: int
    places: ChunkPlaces

    @classmethod
    def of(cls, metadata: ColumnMetaData) -> ChunkNumbers:
        """Take the numbers out of metadata; raises `ParquetFormatError` if one is missing."""
        return cls(metadata.codec, metadata.num_values, ChunkPlaces(*places_of(metadata)))


def chunk_place(row_group_ordinal: int, column_ordinal: int) -> ModulePlace:
    """Return the place that stands for a chunk: the place of its metadata."""
    return ModulePlace(ModuleType.COLUMN_META_DATA, row_group_ordinal, column_ordinal)


_MOST_NAMED = 5

_CRYPTO, _HIDDEN = ColumnChunk.crypto_metadata.field_id, ColumnChunk.encrypted_column_metadata.field_id
_META_DATA = ColumnChunk.meta_data.field_id


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
        chunks = [list(row_group.columns) for row_group in row_groups]
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
        if len(envelope.signature) == SIGNATURE_LENGTH:
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
    names = set(metadata.fields_of_other_types())
    for record in (*schema, *footer.row_groups, *(metadata.key_value_metadata or ())):
        names.update(record.fields_of_other_types())
    kinds: set[frozenset[tuple[int, WireType]]] = set()  # Chunks are many, and most are of one kind.
    for chunk in itertools.chain.from_iterable(footer.chunks):
        if (kind := frozenset(chunk.struct.types().items())) not in kinds:
            kinds.add(kind)
            names.update(chunk.fields_of_other_types())
        if chunk.struct.has(_META_DATA) and (visible := chunk.meta_data) is not None:
            names.update(visible.fields_of_other_types())
    book.check("field-types", not names, f"{', '.join(sorted(names))}: another type.", FOOTER_PLACE)


def _check_folders(path: str, columns: Sequence[Column], book: RuleBook, table: TableCheck | None) -> None:
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
    leaves: Sequence[LeafColumn], chunks: Sequence[Sequence[ColumnChunk]], envelope: Envelope, book: RuleBook
) -> tuple[list[Column], frozenset[ChunkKey]]:
    columns: list[Column] = []
    unusable: set[ChunkKey] = set()
    for leaf in leaves:
        column: Column | None = None
        checked: object = None
        for row_group_ordinal, row_group_chunks in enumerate(chunks):
            chunk = row_group_chunks[leaf.ordinal]
            # The same in every row group, as a rule. What a plaintext footer shows may differ.
            kind = chunk.struct.entry_bytes(_CRYPTO), chunk.struct.types()
            if kind == checked and envelope.mode is not FooterMode.PLAINTEXT_FOOTER:
                continue
            place = chunk_place(row_group_ordinal, leaf.ordinal)
            found = _column(leaf, chunk, place, envelope, book)
            column = column or found
            message = f"column {leaf.dotted_path!r} is encrypted in another way than before."
            if found is None or not book.check("crypto-metadata-same", found == column, message, place):
                unusable.add((row_group_ordinal, leaf.ordinal))
            else:
                checked = kind
        columns.append(column or Column.of(leaf, ColumnEncryption.PLAINTEXT))
    return columns, frozenset(unusable)


def _column(
    leaf: LeafColumn, chunk: ColumnChunk, place: ModulePlace, envelope: Envelope, book: RuleBook
) -> Column | None:
    """Check one chunk's entry, and return how it is encrypted; None where that is unknown."""
    has_hidden = chunk.struct.has(_HIDDEN)
    try:
        crypto = chunk.crypto_metadata
        own = None if crypto is None else crypto.encryption_with_column_key
        path = leaf.path if own is None else tuple(own.path_in_schema)
        is_known = own is not None or (crypto is not None and crypto.encryption_with_footer_key is not None)
        is_one_known = is_known and crypto is not None and len(crypto.struct.ids()) == 1
    except ParquetFormatError as error:
        book.broken("crypto-metadata", str(error), place)
        return None
    message = "the chunk has encrypted metadata and does not say with which key."
    if not book.check("crypto-metadata-set", crypto is not None or not has_hidden, message, place):
        return None
    if crypto is None:
        is_there, message = chunk.meta_data is not None, "a plaintext column has no metadata."
        is_readable = book.check("metadata-visible", is_there, message, place)
        return Column.of(leaf, ColumnEncryption.PLAINTEXT) if is_readable else None
    if not book.check("crypto-metadata", is_one_known, "it does not hold exactly one known kind.", place):
        return None
    if envelope.mode is FooterMode.UNENCRYPTED:
        message = f"column {leaf.dotted_path!r} is encrypted, and the footer names no algorithm."
        book.broken("algorithm-stated", message, place)
        return None
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
        book.holds("algorithm-stated")
        if hidden_ids := hidden_chunk_fields(chunk.struct):
            book.broken("metadata-stripped", f"its chunk shows the fields {sorted(hidden_ids)}.", place)
    message = f"the crypto metadata of {leaf.dotted_path!r} names column {'.'.join(path)!r}."
    book.check("crypto-metadata-path", path == leaf.path, message, place)
    encryption = ColumnEncryption.FOOTER_KEY if own is None else ColumnEncryption.COLUMN_KEY
    is_usable = _check_placement(encryption, chunk.meta_data, has_hidden, envelope, place, book)
    return Column.of(leaf, encryption, None if own is None else own.key_metadata) if is_usable else None


def _check_placement(
    encryption: ColumnEncryption,
    visible: ColumnMetaData | None,
    has_hidden: bool,
    envelope: Envelope,
    place: ModulePlace,
    book: RuleBook,
) -> bool:
    """Check where the metadata of an encrypted chunk is; returns whether its full metadata is there at all."""
    if envelope.mode is FooterMode.PLAINTEXT_FOOTER:
        if book.check("metadata-visible", visible is not None, "meta_data is not set.", place):
            assert visible is not None
            _, hidden_ids = shown_metadata(visible)
            message = f"it shows the fields {sorted(hidden_ids)}."
            book.check("metadata-stripped", not hidden_ids, message, place)
    elif encryption is ColumnEncryption.FOOTER_KEY:
        message = "meta_data is not set." if visible is None else "there is an encrypted copy too."
        book.check("metadata-in-place", visible is not None and not has_hidden, message, place)
        return visible is not None or has_hidden
    else:
        book.check("metadata-hidden", visible is None, "meta_data is set.", place)
    return book.check("metadata-encrypted", has_hidden, "there is none.", place)


# --- Where chunks lie ---


def check_layout(regions: Sequence[Region], footer_offset: int, book: RuleBook) -> frozenset[Region]:
    """Check that regions lie in the file's body and do not overlap; returns those that must not be looked into."""
    unusable: set[Region] = set()
    furthest: Region | None = None
    end = 0
    for region in sorted(regions, key=lambda region: (region.offset, region.length or 0)):
        offset, length = region.offset, 1 if region.length is None else region.length
        place = chunk_place(region.row_group_ordinal, region.column_ordinal)
        if length == 0 and region.kind is RegionKind.PAGES:
            continue
        if offset < MAGIC_LENGTH or length <= 0 or offset + length > footer_offset:
            unusable.add(region)
            message = f"the {region.title} of {length} bytes at {offset} does not lie before the footer at "
            book.broken("layout-range", f"{message}{footer_offset}.", place, offset)
            continue
        if furthest is not None and offset < end:
            unusable |= {region, furthest}
            message = f"the {region.title} begins before the {furthest.title} of row group "
            message += f"{furthest.row_group_ordinal}, column {furthest.column_ordinal} ends at {end}."
            book.broken("layout-overlap", message, place, offset)
        if offset + length > end:
            furthest, end = region, offset + length
    book.holds("layout-overlap", *(["layout-range"] if regions else []))
    return frozenset(unusable)


def check_gaps(ranges: Sequence[tuple[int, int]], footer_offset: int, book: RuleBook) -> list[tuple[int, int]]:
    """Check that nothing lies between what is known; returns offset and length of what does."""
    gaps: list[tuple[int, int]] = []
    at = MAGIC_LENGTH
    for offset, length in [*sorted(ranges), (footer_offset, 0)]:
        if offset > at:
            gaps.append((at, offset - at))
            book.broken("layout-gap", f"{offset - at} bytes belong to nothing.", offset=at)
        at = max(at, offset + length)
    book.holds("layout-gap")
    return gaps


def check_row_groups(
    footer: OpenFooter,
    metadata: Mapping[ChunkKey, ChunkNumbers],
    regions: Iterable[Region],
    book: RuleBook,
) -> None:
    """Compare what row groups say of their offset and size with their chunks, where all of these are known."""
    starts: dict[int, int] = {}
    for region in regions:
        if region.kind is RegionKind.PAGES and region.length:
            ordinal = region.row_group_ordinal
            starts[ordinal] = min(starts.get(ordinal, region.offset), region.offset)
    for ordinal, row_group in enumerate(footer.row_groups):
        chunks = [metadata.get((ordinal, column.ordinal)) for column in footer.columns]
        known = [chunk for chunk in chunks if chunk is not None]
        if len(known) < len(chunks):
            continue
        start, size = starts.get(ordinal), sum(chunk.places.total_compressed_size for chunk in known)
        if row_group.file_offset and start is not None:
            message = f"row group {ordinal} states {row_group.file_offset}, and its pages begin at {start}."
            book.check("row-group-offset", row_group.file_offset == start, message)
        stated = row_group.total_compressed_size
        if stated is not None:
            message = f"row group {ordinal} states {stated} bytes, and its chunks have {size}."
            book.check("row-group-size", stated == size, message)
