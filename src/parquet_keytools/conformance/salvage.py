"""What can still be read of a damaged file, written to a new one (data-pages.md, error recovery)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from parquet_keytools.conformance.expectations import Expectation
from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.conformance.report import Loss
from parquet_keytools.conformance.verification import RetrieverFinder, expected_prefix
from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.file_decryptor import column_deks, decrypt_columns
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import FooterColumn, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import DecryptionError, NotEncryptedError
from parquet_keytools.files.conversion import FileResult, Progress, plaintext_output, refuse_same_file
from parquet_keytools.files.denied_columns import refuse_digests
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import check_column_keys, check_footer_key, refuse_ctr
from parquet_keytools.files.table_check import TableCheck, refuse_folders_above
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import written_bytes
from parquet_keytools.storage.sources import open_source


@dataclass(frozen=True)
class SalvageResult(FileResult):
    """What was written of a damaged file, and what is missing in it.

    Attributes:
        row_groups: How many the source has.
        missing_row_groups: Ordinals, in the source, of those that were left out.
        losses: What is lost of which chunk, page by page.
        dropped_indexes: (row group ordinal, column ordinal), in the source, of chunks whose page index or Bloom
            filter was damaged and left out; their values are all there.
    """

    row_groups: int
    missing_row_groups: tuple[int, ...]
    losses: tuple[Loss, ...]
    dropped_indexes: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing_row_groups and not self.dropped_indexes


@dataclass(frozen=True)
class _WithoutIndexes(Footer):
    """A footer whose damaged page indexes and Bloom filters are not mentioned.

    Attributes:
        damaged: (row group ordinal, column ordinal) of their chunks.
    """

    damaged: frozenset[tuple[int, int]] = frozenset()

    def chunk_metadata(
        self, row_group_ordinal: int, column: FooterColumn, cipher: ModuleCipher | None
    ) -> ColumnMetaData:
        """Return the metadata of a chunk, without its Bloom filter where something is damaged."""
        metadata = super().chunk_metadata(row_group_ordinal, column, cipher)
        if (row_group_ordinal, column.ordinal) in self.damaged:
            metadata = metadata.shallow_copy()
            metadata.bloom_filter_offset = None
            metadata.bloom_filter_length = None
        return metadata


def salvage_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    mode: int | None = None,
) -> SalvageResult:
    """Decrypt the row groups of a file that are whole; see `Keytools.salvage_file`."""
    refuse_digests(
        keys.configuration,
        "a file is not decrypted where columns are shown as digests.",
        "Salvage it with another configuration.",
    )
    refuse_same_file(source, target)
    finder = RetrieverFinder(keys, keys.kms_keys(), source)
    with open_source(source) as opened:
        prefix = expected_prefix(keys, opened, source, table_name, aad_prefix)
        if keys.configuration.reading.ctr_files == "reject":
            refuse_ctr(read_envelope(opened), str(source))
        footer = _own_footer(keys.table_check(table_name), source, opened, finder, prefix)
        deks = column_deks(footer, finder)
        # Where the algorithm was exchanged no page can be read, and that is not what damage looks like.
        check_stated_algorithm(opened, footer, deks)
        report, _ = verify_source(opened, finder, Expectation(prefix))
        damage = report.damage
        if damage is None or damage.file_is_lost or (damage.row_groups and not damage.readable_row_groups):
            raise DecryptionError(
                f"{source}: nothing can be salvaged: no row group is whole.", hint="`verify` says what is damaged."
            )
        readable = damage.readable_row_groups
        with plaintext_output(target, mode, overwrite=overwrite) as pending, pending.open_sink() as sink:
            decrypt_columns(
                opened,
                sink,
                _without_indexes(footer, frozenset(damage.damaged_indexes)),
                deks,
                row_group_ordinals=readable,
                on_progress=on_progress,
            )
        return SalvageResult(
            str(source),
            str(target),
            opened.size_bytes,
            written_bytes([target]),
            damage.row_groups,
            tuple(ordinal for ordinal in range(damage.row_groups) if ordinal not in readable),
            damage.losses,
            tuple(place for place in damage.damaged_indexes if place[0] in readable),
        )


def _own_footer(
    table_check: TableCheck | None,
    location: FileLocation,
    source: ByteSource,
    finder: RetrieverFinder,
    aad_prefix: ExpectedAadPrefix | None,
) -> Footer:
    """Return the footer of an encrypted file that is what its table says."""
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(f"{location} is not encrypted.")
    if table_check is not None:
        check_footer_key(table_check, str(location), envelope, finder)
    # What is wrong with the AAD is found before the KMS is asked.
    envelope.file_aads(aad_prefix)
    footer = envelope.open(finder.footer_dek(envelope.key_metadata), aad_prefix)
    if table_check is not None:
        check_column_keys(table_check, str(location), footer, finder)
    refuse_folders_above(location, footer.protected_columns, table_check)
    return footer


def _without_indexes(footer: Footer, damaged: frozenset[tuple[int, int]]) -> Footer:
    chunks = [list(row_group_chunks) for row_group_chunks in footer.chunks]
    for row_group_ordinal, column_ordinal in damaged:
        chunk: ColumnChunk = chunks[row_group_ordinal][column_ordinal].shallow_copy()
        chunk.column_index_offset = chunk.column_index_length = None
        chunk.offset_index_offset = chunk.offset_index_length = None
        chunks[row_group_ordinal][column_ordinal] = chunk
    parts: Mapping[str, object] = {part.name: getattr(footer, part.name) for part in fields(footer)}
    return replace(_WithoutIndexes(**parts), chunks=chunks, damaged=damaged)  # type: ignore[arg-type]
