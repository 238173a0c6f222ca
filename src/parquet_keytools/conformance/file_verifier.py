"""A whole file verified, rule by rule."""

from __future__ import annotations

import hashlib
import hmac
import struct
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from parquet_keytools.conformance.chunk_layout import (
    ChunkKey,
    ChunkNumbers,
    Column,
    OpenFooter,
    check_gaps,
    check_layout,
    check_row_groups,
    chunk_place,
    chunk_regions,
)
from parquet_keytools.conformance.chunk_verifier import (
    Chunk,
    ChunkVerifier,
    ColumnCiphers,
    IndexVerifier,
    check_padding,
    ends_of_runs,
    index_windows,
    note_defect,
    verify_chunks,
)
from parquet_keytools.conformance.file_keys import (
    FOOTER,
    Expectation,
    FileKeys,
    MaterialFinder,
    check_deks,
    check_table_of_columns,
    check_table_of_footer,
    fingerprint,
)
from parquet_keytools.conformance.footer_rules import (
    check_envelope,
    check_footer,
    check_required,
    plaintext_metadata,
)
from parquet_keytools.conformance.nonces import NOT_READ_AGAIN, FileNonces, NoncePart, nonce_entry
from parquet_keytools.conformance.report import FILE_SCOPES, Damage, FileReport, Loss, ModuleTally, RuleBook, Scope
from parquet_keytools.encryption.aad import (
    FILE_UNIQUE_LENGTH_BYTES,
    FOOTER_PLACE,
    ExpectedAadPrefix,
    ModuleType,
    module_behind,
    without_delimiter,
)
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    NONCE_LENGTH,
    TAG_LENGTH,
    InvalidTag,
    ModuleCipher,
)
from parquet_keytools.encryption.page_walk import HeaderWindow, PageDefect, walk_pages
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import ByteSource, Region, RegionKind
from parquet_keytools.format.partial_footers import shown_metadata
from parquet_keytools.format.structs import ColumnMetaData, FileMetaData
from parquet_keytools.format.thrift import WireType
from parquet_keytools.runtime.presentation import escaped_bytes
from parquet_keytools.secret_bytes import SecretBytes

# --- The footer, opened, and the metadata of column chunks ---

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
            metadata, end = FileMetaData.read_whole(plaintext)
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

    def __init__(
        self, envelope: Envelope, footer: OpenFooter, book: RuleBook, keeps: Collection[str] = ()
    ) -> None:
        """Make one that keeps, in `kept`, the readable metadata of columns with the dotted paths in `keeps`."""
        self.kept: defaultdict[str, list[ColumnMetaData]] = defaultdict(list)
        self._keeps = keeps
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
        if column.name in self._keeps and found is not None and (hidden is None or found is not visible):
            self.kept[column.name].append(found)
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


# --- A file ---

_FILE_IS_LOST = Damage(file_is_lost=True)


@dataclass(frozen=True)
class FileEnd:
    """What tells one state of a file from another.

    Attributes:
        size_bytes: Length of the file.
        footer_sha256: SHA-256, in hexadecimal, of the bytes from the footer's start to the end of the file.
    """

    size_bytes: int
    footer_sha256: str

    @classmethod
    def of(cls, footer_offset: int, tail: bytes) -> FileEnd:
        """Return the end of a file from its footer's offset and the bytes from there on."""
        return cls(footer_offset + len(tail), hashlib.sha256(tail).hexdigest())


@dataclass(frozen=True)
class FileFacts:
    """What a data set is checked by.

    Attributes:
        aad_prefix: The text of the prefix, stored or supplied, without NUL at its end.
        column_paths: Leaf paths; None where they are not known.
        mode: How the footer is protected; None where that cannot be told.
        nonces: The nonces of all modules that were found, or of the part that was asked for.
        unknown: Why not all of its DEKs and nonces are known; None where they are.
        uses_material_file: Whether it refers to the key material file beside it, which is key material.
        end: Size and footer; None where no footer was found.
    """

    aad_prefix: bytes | None = None
    file_unique: bytes | None = None
    dek_fingerprints: frozenset[bytes] = frozenset()
    column_paths: tuple[tuple[str, ...], ...] | None = None
    mode: FooterMode | None = None
    nonces: FileNonces | None = None
    unknown: str | None = None
    uses_material_file: bool = False
    end: FileEnd | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is."""
        return self.mode not in (None, FooterMode.UNENCRYPTED)


def verify_source(
    source: ByteSource,
    finder: MaterialFinder | None,
    expectation: Expectation | None = None,
    *,
    threads: int = 2,
    nonce_part: NoncePart | None = None,
) -> tuple[FileReport, FileFacts]:
    """Verify a file against all rules of a file.

    Args:
        source: The file.
        finder: Where its keys come from; None verifies what needs no key.
        expectation: What is expected of it beyond the specification.
        threads: How many threads work.
        nonce_part: Only collects these nonces, and authenticates no page; None verifies the file.

    Raises:
        OSError: The file cannot be read. Whatever is wrong with its bytes is in the report.
    """
    expectation = expectation or Expectation()
    report, facts = _FileVerifier(source, finder, expectation, threads, nonce_part).run()
    return report, facts


class _FileVerifier:
    def __init__(
        self,
        source: ByteSource,
        finder: MaterialFinder | None,
        expectation: Expectation,
        threads: int,
        nonce_part: NoncePart | None,
    ) -> None:
        self._source = source
        self._expectation = expectation
        self._threads = threads
        self._only_nonces = nonce_part is not None
        self._book = RuleBook(FILE_SCOPES)
        self._keys = FileKeys(finder, self._book)
        self._nonces = FileNonces(nonce_part)
        self._footer_counts: Counter[str] = Counter()
        self._ciphers: dict[int, ColumnCiphers] = {}
        self._metadata: dict[ChunkKey, ChunkNumbers] = {}
        self._walkable: dict[ChunkKey, Chunk] = {}
        self._regions: list[Region] = []
        self._unusable: frozenset[Region] = frozenset()
        self._losses: list[Loss] = []
        self._damaged_indexes: list[ChunkKey] = []
        self._facts = FileFacts()

    # --- From the end of the file to its beginning ---------------------------------------------------------

    def run(self) -> tuple[FileReport, FileFacts]:
        envelope = check_envelope(self._source, self._book)
        damage: Damage | None = _FILE_IS_LOST
        if envelope is None:
            self._nothing_behind("what is visible of the footer cannot be read")
        elif envelope.mode is FooterMode.UNENCRYPTED:
            damage = self._unencrypted(envelope)
        else:
            expected = self._expectation.aad_prefix
            prefix = envelope.aad_prefix or (None if expected is None else expected.candidates[0])
            self._facts = FileFacts(
                None if prefix is None else without_delimiter(prefix), envelope.aad_file_unique, mode=envelope.mode
            )
            damage = self._encrypted(envelope)
        has_all_keys = self._keys.finder is not None and not self._keys.denied
        for ciphers in self._ciphers.values():
            ciphers.note_held(self._book)
        if not self._only_nonces:
            self._check_nonces()
        table = self._expectation.table
        report = FileReport(
            self._source.path,
            self._keys.finder is not None,
            self._book.results(),
            self._tallies(),
            damage if has_all_keys else None,
            self._keys.denied_by_title(),
            frozenset() if self._expectation.aad_prefix is None else frozenset({"prefix-expected"}),
            None if table is None else table.table_name,
            accepted=frozenset({"no-prefix"} if table is not None and table.settings.aad_prefix is None else ()),
        )
        facts = replace(
            self._facts,
            dek_fingerprints=frozenset(self._keys.fingerprints),
            nonces=self._nonces,
            unknown=next(iter(report.result("nonce-reuse").reasons), None),
            uses_material_file=self._keys.uses_material_file,
            end=None if envelope is None else FileEnd.of(envelope.footer_offset, envelope.tail),
        )
        return report, facts

    def _check_nonces(self) -> None:
        """Check the rules about nonces; where they do not fit into memory, the file is read once for each part.

        What the first reading found stays found, whatever becomes of the file meanwhile.
        """
        self._nonces.check(self._book)
        parts = self._nonces.part.parts
        for part in range(1, parts):
            wanted = NoncePart(part, parts)
            again = _FileVerifier(self._source, self._keys.finder, self._expectation, self._threads, wanted)
            try:
                again.run()
            except (OSError, ParquetFormatError):
                self._book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
                continue
            if again._nonces.invocations != self._nonces.invocations:
                self._book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
            again._nonces.check_repeated(self._book)

    def _tallies(self) -> tuple[ModuleTally, ...]:
        counts: defaultdict[tuple[ModuleType, str | None], Counter[str]] = defaultdict(Counter)
        if self._footer_counts:
            counts[ModuleType.FOOTER, None] = self._footer_counts
        for ciphers in self._ciphers.values():
            for (module_type, outcome), number in ciphers.counts.items():
                counts[module_type, ciphers.column.name][outcome] += number
        return tuple(
            ModuleTally(*key, *(counts[key][name] for name in ("authentic", "broken", "unauthenticated")))
            for key in sorted(counts, key=lambda key: (key[0], key[1] or ""))
        )

    def _unencrypted(self, envelope: Envelope) -> Damage | None:
        self._facts = replace(self._facts, mode=envelope.mode)
        footer = self._footer(envelope, plaintext_metadata(envelope, self._book))
        if self._expectation.accept_plaintext and not self._book.is_broken("algorithm-stated"):
            return None
        if not self._expectation.allow_plaintext and not self._book.is_broken("algorithm-stated"):
            self._book.broken("encrypted", "the file is a plaintext Parquet file.")
        if footer is None:
            return _FILE_IS_LOST
        if not self._expectation.allow_plaintext:
            return None
        # Readers may take plaintext files, and what is expected of this one is still not there.
        if self._expectation.aad_prefix is not None:
            self._book.broken("prefix-expected", "the file is in plaintext, and has none.")
        self._columns(envelope, footer, None)
        check_table_of_footer(self._expectation, envelope, self._keys, self._book)
        check_table_of_columns(self._expectation, envelope, footer, self._keys, self._book)
        return self._damage(len(footer.row_groups))

    def _encrypted(self, envelope: Envelope) -> Damage | None:
        check_table_of_footer(self._expectation, envelope, self._keys, self._book)
        opened = FooterOpener(envelope, self._expectation, self._keys, self._nonces).open()
        if opened is None:
            self._nothing_behind("the footer cannot be read")
            is_prefix_missing = envelope.supply_aad_prefix and self._expectation.aad_prefix is None
            return None if is_prefix_missing and envelope.aad_prefix is None else _FILE_IS_LOST
        if opened.cipher is not None:
            outcome = "authentic" if opened.is_authentic else "broken"
            self._footer_counts[outcome] += 1
        footer = self._footer(envelope, opened.metadata)
        if footer is None:
            return _FILE_IS_LOST
        self._columns(envelope, footer, opened)
        check_table_of_columns(self._expectation, envelope, footer, self._keys, self._book, self._kept)
        # What a footer says that is not authentic is of no use to readers.
        return self._damage(len(footer.row_groups)) if opened.is_authentic else _FILE_IS_LOST

    def _footer(self, envelope: Envelope, metadata: FileMetaData | None) -> OpenFooter | None:
        expected = self._expectation
        footer = None
        if metadata is not None:
            footer = check_footer(envelope, metadata, expected.path, self._book, expected.table)
        if footer is None:
            self._nothing_behind("the footer cannot be read")
        else:
            self._facts = replace(self._facts, column_paths=tuple(column.path for column in footer.columns))
        return footer

    def _nothing_behind(self, reason: str) -> None:
        for scope in (Scope.FOOTER, Scope.COLUMN):
            self._book.scope_not_checked(scope, reason)
        if self._expectation.table is not None or self._expectation.without_table:
            self._book.scope_not_checked(Scope.CONFIGURATION, reason)

    # --- Columns -------------------------------------------------------------------------------------------

    def _columns(self, envelope: Envelope, footer: OpenFooter, opened: OpenedEnvelope | None) -> None:
        self._ciphers = self._column_ciphers(envelope, footer, opened)
        table = self._expectation.table
        reader = MetadataReader(
            envelope, footer, self._book, keeps=() if table is None else table.settings.value_columns
        )
        for row_group_ordinal, chunks in enumerate(footer.chunks):
            for ordinal, ciphers in self._ciphers.items():
                chunk = Chunk(ciphers, row_group_ordinal)
                is_plaintext = ciphers.column.encryption is ColumnEncryption.PLAINTEXT
                is_readable = is_plaintext or ciphers.cipher is not None
                numbers = reader.read(chunk)
                key = (row_group_ordinal, ordinal)
                if numbers is None:
                    if is_readable:
                        self._lose_chunk(chunk)
                    continue
                self._metadata[key] = numbers
                if is_readable:
                    self._walkable[key] = chunk
                self._regions += chunk_regions(chunks[ordinal], numbers, *key, self._book)
        self._kept = reader.kept
        self._unusable = check_layout(self._regions, envelope.footer_offset, self._book)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            check_row_groups(footer, self._metadata, self._regions, self._book)
        lengths = self._verify_chunks(footer, envelope.footer_offset)
        is_complete = len(self._metadata) == len(footer.row_groups) * len(footer.columns)
        if is_complete and not self._unusable and None not in lengths.values():
            ranges = [(region.offset, lengths.get(region, region.length) or 0) for region in self._regions]
            gaps = check_gaps(ranges, envelope.footer_offset, self._book)
            check_left_metadata(self._source, gaps, footer.columns, self._book)
        else:
            for rule_id in ("layout-gap", "metadata-leaked"):
                self._book.not_checked(rule_id, "not all parts of the file are known")

    def _column_ciphers(
        self, envelope: Envelope, footer: OpenFooter, opened: OpenedEnvelope | None
    ) -> dict[int, ColumnCiphers]:
        """Return how columns are decrypted, by ordinal, as far as their keys are available."""
        ciphers = {column.ordinal: ColumnCiphers(column) for column in footer.columns}
        if opened is None:
            return ciphers
        own: list[tuple[Column, bytes]] = []
        for column, cipher, key in column_ciphers(footer, opened, self._keys):
            if column.encryption is ColumnEncryption.COLUMN_KEY and key:
                own.append((column, key))
            if cipher is not None:
                ciphers[column.ordinal] = ColumnCiphers(column, cipher, key, envelope.algorithm, self._nonces)
            elif key:
                self._denied(column, "no AAD can be built")
            elif column.encryption is ColumnEncryption.COLUMN_KEY:
                self._denied(column, self._keys.denied[column.path])
            else:
                self._denied(column, self._keys.denied.get(FOOTER, "no keys are given"))
        check_deks(opened.fingerprint or None, own, self._keys, self._book)
        return ciphers

    def _denied(self, column: Column, reason: str) -> None:
        self._keys.denied.setdefault(column.path, reason)
        self._book.scope_not_checked(Scope.COLUMN, f"column {column.name!r}: {reason}")

    # --- Modules -------------------------------------------------------------------------------------------

    def _verify_chunks(self, footer: OpenFooter, footer_offset: int) -> dict[Region, int | None]:
        """Verify the chunks whose keys are available.

        Returns the lengths of Bloom filters whose length is not stated; None where a length is not known.
        """
        lengths: dict[Region, int | None] = {}
        pages: dict[ChunkKey, Region] = {}
        others: defaultdict[ChunkKey, list[tuple[Region, int]]] = defaultdict(list)
        for region, limit in self._with_limits(footer_offset):
            key = region.chunk_key
            if key in self._walkable and (not self._unusable or region not in self._unusable):
                if region.kind is RegionKind.PAGES:
                    pages[key] = region
                else:
                    others[key].append((region, limit))
                continue
            if region.length is None:
                lengths[region] = None
            if key not in self._walkable:
                continue
            if region.kind is RegionKind.PAGES:
                name = self._walkable[key].ciphers.column.name
                self._book.scope_not_checked(Scope.COLUMN, f"{name!r}: a chunk is not where it can be read")
            else:
                self._damaged_indexes.append(key)
        verifiers: list[ChunkVerifier] = []
        windows = index_windows(self._source)
        for key, chunk in self._walkable.items():
            indexes = None
            if key in others:
                indexes = IndexVerifier(self._source, windows, chunk, self._book, others[key])
            num_rows = footer.row_groups[key[0]].num_rows
            verifiers.append(
                ChunkVerifier(chunk, self._metadata[key], num_rows, pages.get(key), indexes, self._book)
            )
        verify_chunks(self._source, verifiers, self._threads, only_walk=self._only_nonces)
        for key, verifier in zip(self._walkable, verifiers, strict=True):
            loss = verifier.finish()
            if loss is not None:
                self._losses.append(loss)
            if verifier.indexes is not None:
                lengths.update(verifier.indexes.lengths)
                if verifier.indexes.is_damaged:
                    self._damaged_indexes.append(key)
        if any(verifier.region is not None and not verifier.is_whole for verifier in verifiers):
            self._book.scope_not_checked(Scope.COLUMN, "the pages of a chunk could not all be walked")
        return lengths

    def _with_limits(self, footer_offset: int) -> Iterator[tuple[Region, int]]:
        """Yield all regions, each with the place up to which it may be read: see `IndexVerifier.regions`."""
        starts = sorted({region.offset for region in self._regions if region.length != 0} | {footer_offset})
        limits: dict[Region, int] = {}
        for kind in (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX):
            # What must not be looked into may lie outside of the file.
            found = [region for region in self._regions if region.kind is kind and region not in self._unusable]
            ends = ends_of_runs([(region.offset, region.offset + (region.length or 0)) for region in found])
            limits.update(zip(found, ends, strict=True))
        for region in self._regions:
            limit = footer_offset
            if region.kind is not RegionKind.PAGES and region not in self._unusable:
                limit = limits.get(region) or starts[bisect_right(starts, region.offset)]
            yield region, limit

    # --- What it comes to ----------------------------------------------------------------------------------

    def _lose_chunk(self, chunk: Chunk) -> None:
        column = chunk.ciphers.column
        self._losses.append(Loss(chunk.row_group_ordinal, column.ordinal, column.name, None))

    def _damage(self, row_groups: int) -> Damage:
        lost = {loss.row_group_ordinal for loss in self._losses}
        return Damage(
            losses=tuple(sorted(self._losses, key=lambda loss: (loss.row_group_ordinal, loss.column_ordinal))),
            row_groups=row_groups,
            readable_row_groups=tuple(ordinal for ordinal in range(row_groups) if ordinal not in lost),
            damaged_indexes=tuple(dict.fromkeys(self._damaged_indexes)),
        )


def column_ciphers(
    footer: OpenFooter, opened: OpenedEnvelope, keys: FileKeys
) -> Iterator[tuple[Column, ModuleCipher | None, bytes]]:
    """Yield each encrypted column, its cipher, and the fingerprint of its DEK, which is empty without the DEK."""
    own = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    for column in footer.columns:
        if column.encryption is ColumnEncryption.FOOTER_KEY:
            yield column, opened.cipher, opened.fingerprint if opened.cipher is not None else b""
    deks = keys.column_deks([(column.path, column.key_metadata) for column in own])
    for column, dek in zip(own, deks, strict=True):
        if dek is None:
            yield column, None, b""
        else:
            yield column, None if opened.file_aad is None else ModuleCipher(dek, opened.file_aad), fingerprint(dek)


# --- For an inspection ---


FoundModule = tuple[ModuleType, int, int, int | None]
"""Type, offset, length with framing, and page ordinal of a module."""


class ModuleFinder:
    """The part of an inspection that needs keys.

    Attributes:
        denied: Path of a column, empty for the footer -> why its key is unavailable.
    """

    def __init__(
        self,
        source: ByteSource,
        envelope: Envelope,
        finder: MaterialFinder,
        aad_prefix: ExpectedAadPrefix | None,
        book: RuleBook,
    ) -> None:
        self._source = source
        self._envelope = envelope
        self._book = book
        self._keys = FileKeys(finder, book)
        self._expectation = Expectation(aad_prefix)
        self._opened: OpenedEnvelope | None = None
        self._ciphers: dict[int, ColumnCiphers] = {}
        self._window = HeaderWindow(source, 0, envelope.footer_offset)
        self.denied = self._keys.denied

    def open(self) -> OpenedEnvelope | None:
        """Open the footer of an encrypted file; None where it cannot be read."""
        opener = FooterOpener(self._envelope, self._expectation, self._keys, FileNonces())
        self._opened = opener.open()
        return self._opened

    def find_keys(self, footer: OpenFooter) -> None:
        """Ask for the keys of all columns."""
        opened = self._opened
        plaintext = [column for column in footer.columns if column.encryption is ColumnEncryption.PLAINTEXT]
        self._ciphers = {column.ordinal: ColumnCiphers(column) for column in plaintext}
        if opened is None or opened.file_aad is None:
            return
        for column, cipher, _ in column_ciphers(footer, opened, self._keys):
            if cipher is not None:
                self._ciphers[column.ordinal] = ColumnCiphers(column, cipher, b"", self._envelope.algorithm)

    def chunk_metadata(self, row_group_ordinal: int, column: Column, hidden: bytes) -> ColumnMetaData | None:
        """Return the metadata of a chunk from its module; None without its key, or where it is not authentic."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None or chunk.ciphers.cipher is None:
            return None
        plaintext = chunk.plaintext(ModuleType.COLUMN_META_DATA, hidden, None, self._book)
        try:
            return None if plaintext is None else ColumnMetaData.read(plaintext)[0]
        except ParquetFormatError as error:
            self._book.broken("metadata-path", str(error), chunk_place(row_group_ordinal, column.ordinal))
            return None

    def pages(
        self, row_group_ordinal: int, column: Column, dictionary_page_offset: int | None, region: Region
    ) -> tuple[list[FoundModule], bool] | None:
        """Return the pages of a chunk and their headers, and whether all were found; None without its key."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        end = self._window.end = region.offset + (region.length or 0)
        modules: list[FoundModule] = []
        defects: list[PageDefect] = []
        for ordinal, facts, header_offset, offset, _ in walk_pages(
            self._window,
            region.offset,
            end,
            chunk.reader,
            expects_dictionary_page=bool(dictionary_page_offset),
            path="",
            on_defect=defects.append,
        ):
            page_ordinal = None if ordinal == NO_PAGE_ORDINAL else ordinal
            for place, start, length in (
                (chunk.page_place(ordinal, is_header=True), header_offset, offset - header_offset),
                (chunk.page_place(ordinal), offset, facts.page_length),
            ):
                modules.append((place.module_type, start, length, page_ordinal))
        for defect in defects:
            note_defect(chunk, defect, self._book)
        return modules, not defects

    def bloom_filter(
        self, row_group_ordinal: int, column: Column, region: Region, limit: int
    ) -> list[FoundModule] | None:
        """Return header and bitset of a Bloom filter; None without its key, or where the header is damaged."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        lengths = IndexVerifier(self._source, {}, chunk, self._book).bloom_filter_lengths(region, limit)
        if lengths is None:
            return None
        return [
            (ModuleType.BLOOM_FILTER_HEADER, region.offset, lengths[0], None),
            (ModuleType.BLOOM_FILTER_BITSET, region.offset + lengths[0], lengths[1], None),
        ]

    def _chunk(self, row_group_ordinal: int, column: Column) -> Chunk | None:
        """Return how a chunk is decrypted; None without its key."""
        ciphers = self._ciphers.get(column.ordinal)
        return None if ciphers is None else Chunk(ciphers, row_group_ordinal)
