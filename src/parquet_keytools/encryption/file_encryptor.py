"""Files encrypted or re-keyed, as a whole or row group by row group, without decoding a value."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.encryption.aad import refuse_more_than_ordinals
from parquet_keytools.encryption.file_decryptor import Deks, open_chunks
from parquet_keytools.encryption.file_encryption import FileEncryption, OutputKeys
from parquet_keytools.encryption.file_rewriter import (
    INDEX_FIELD_IDS,
    BytesPart,
    ChunkRewrite,
    PagesMemory,
    Part,
    RowGroupRewrite,
    chunk_of,
    in_order,
    new_row_group,
    rewrite_file,
    warn_of_dropped_indexes,
    write_parts,
)
from parquet_keytools.encryption.footer import Footer, FooterEnvelope
from parquet_keytools.encryption.protection import FooterMode, naming_file
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import AlreadyEncryptedError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    RegionKind,
    read_footer_bytes,
    unauthenticated_limit,
    with_trailer,
)
from parquet_keytools.format.structs import FileMetaData, RowGroup
from parquet_keytools.format.thrift import Struct, WireType, read_struct


def encrypt_source(
    source: ByteSource,
    sink: ByteSink,
    encryption: FileEncryption,
    *,
    threads: int = 2,
) -> None:
    """Encrypt a plaintext file.

    Args:
        source: The file.
        sink: Where the encrypted file goes.
        encryption: How to encrypt it.
        threads: How many threads work.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ParquetFormatError: The file is not what the format says, or a page is damaged.
        FormatLimitError: The output would break a limit of the format; nothing was written then.
        ConfigurationError: A key is given for a column that the file does not have.
    """
    footer = read_plaintext_footer(source)
    encrypt_opened(source, sink, footer, {}, encryption, threads=threads)


def read_plaintext_footer(source: ByteSource) -> Footer:
    """Read the footer of a file that is not encrypted.

    All of it is read at once, where `read_envelope` only skims it: there is nothing to authenticate before.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ParquetFormatError: As `read_envelope` and `FooterEnvelope.open`.
    """
    footer = read_footer_bytes(source)
    read = None
    with naming_file(source.path):
        if not footer.is_encrypted:
            data = footer.data
            read = FileMetaData.read_whole(data, max_memory=unauthenticated_limit(len(data)))
        envelope = FooterEnvelope.of(footer, source.path, read)
    if read is None or envelope.mode is not FooterMode.UNENCRYPTED:
        raise AlreadyEncryptedError(
            f"{source.path} is encrypted already.", hint="Use rekey to encrypt it with other keys."
        )
    return envelope.with_metadata(read[0], None, b"")


def encrypt_opened(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    deks: Deks,
    encryption: FileEncryption,
    *,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Encrypt a file whose footer is open: a plaintext file, or an encrypted one with other keys.

    Args:
        source: The file that the footer is from.
        sink: Where the new file goes.
        footer: Its footer.
        deks: DEKs of the columns that have a column key.
        encryption: How to encrypt it.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        DecryptionError: A part of it does not authenticate.
        ParquetFormatError: It is not what the format says, or a page is damaged.
        FormatLimitError: The output would break a limit of the format; nothing was written then.
        ConfigurationError: A key is given for a column that the file does not have.
    """
    refuse_more_than_ordinals(source.path, row_groups=len(footer.row_groups), columns=len(footer.leaves))
    check_stated_algorithm(source, footer, deks)
    keys = OutputKeys(encryption, footer.leaves)
    row_groups = open_chunks(footer, deks, keys.writer_of)

    def make_footer() -> bytes:
        new_row_groups = []
        for ordinal, (row_group, chunks) in enumerate(row_groups):
            columns: list[bytes | Struct] = [
                keys.protected(chunk, column_ordinal) for column_ordinal, chunk in enumerate(chunks)
            ]
            new_row_groups.append(new_row_group(ordinal, row_group, chunks, columns))
        return keys.footer(footer, new_row_groups)

    rewrite_file(
        source,
        sink,
        row_groups,
        footer_offset=footer.envelope.footer_offset,
        created_by=footer.metadata.created_by,
        magic=MAGIC if encryption.plaintext_footer else MAGIC_ENCRYPTED_FOOTER,
        make_footer=make_footer,
        threads=threads,
        on_progress=on_progress,
    )


Index = tuple[Struct, int, bytes]
"""The chunk that an index is of, the id of the field that has the index's offset, and the bytes of its module."""


class StreamedFile:
    """An encrypted file written row group by row group: no more than one is held.

    Takes plaintext Parquet files of one schema, and makes their row groups those of one encrypted file.

    Page indexes are held until the end, and lie together before the footer: readers take those of many row groups
    by one read.
    """

    def __init__(self, sink: ByteSink, encryption: FileEncryption, template: ByteSource):
        """Begin the file.

        Args:
            sink: Where it goes.
            encryption: How it is encrypted.
            template: A plaintext file with the schema.

        Raises:
            ConfigurationError: A key is given for a column that is not in the schema.
            FormatLimitError: The schema has more columns than an encrypted file can have.
            OSError: The sink cannot be written.
        """
        self.num_rows = 0
        self.size_bytes = 0
        self._sink = sink
        footer = read_plaintext_footer(template)
        refuse_more_than_ordinals(template.path, columns=len(footer.leaves))
        self._schema = footer.metadata.bytes_of(FileMetaData.schema)
        self._keys = OutputKeys(encryption, footer.leaves)
        self._magic = MAGIC if encryption.plaintext_footer else MAGIC_ENCRYPTED_FOOTER
        self._row_groups: list[RowGroup] = []
        self._indexes: dict[RegionKind, list[Index]] = {RegionKind.COLUMN_INDEX: [], RegionKind.OFFSET_INDEX: []}
        self._write([_bytes_part(self._magic)])

    def append(self, source: ByteSource) -> None:
        """Encrypt and write the row groups of a plaintext file; nothing of it is held afterwards.

        Raises:
            ParquetFormatError: It is not what the format says, or has another schema.
            FormatLimitError: The output would break a limit of the format.
            OSError: The sink cannot be written.
        """
        footer = read_plaintext_footer(source)
        if footer.metadata.bytes_of(FileMetaData.schema) != self._schema:
            raise ParquetFormatError("a row group has another schema than the file.", path=source.path)
        first = len(self._row_groups)
        refuse_more_than_ordinals(source.path, row_groups=first + len(footer.row_groups))
        row_groups = open_chunks(
            footer, {}, lambda row_group, column: self._keys.writer_of(first + row_group, column)
        )
        parts, indexes = self._laid_out(source, footer, row_groups)
        self._write(parts)
        for ordinal, (row_group, chunks) in enumerate(row_groups, first):
            columns: list[bytes | Struct] = []
            for column_ordinal, chunk in enumerate(chunks):
                written = self._keys.protected(chunk, column_ordinal)
                its_indexes = indexes.get(chunk, ())
                struct_of_it = read_struct(written)[0] if its_indexes else None
                columns.append(struct_of_it or written)
                for kind, module in its_indexes:
                    assert struct_of_it is not None
                    self._indexes[kind].append((struct_of_it, INDEX_FIELD_IDS[kind][0], module))
            self._row_groups.append(new_row_group(ordinal, row_group, chunks, columns))
        self.num_rows += footer.metadata.num_rows

    def _laid_out(
        self, source: ByteSource, footer: Footer, row_groups: list[RowGroupRewrite]
    ) -> tuple[list[Part], dict[ChunkRewrite, list[tuple[RegionKind, bytes]]]]:
        """Return what is written now, and the indexes, which are kept."""
        parts: list[Part] = []
        indexes: dict[ChunkRewrite, list[tuple[RegionKind, bytes]]] = {}
        offset, memory = self.size_bytes, PagesMemory()
        regions = in_order(source, row_groups, footer.envelope.footer_offset, footer.metadata.created_by)
        for region in regions:
            chunk = chunk_of(region, row_groups)
            part = chunk.lay_out(source, region, offset, memory)
            if isinstance(part, BytesPart) and region.kind in self._indexes:
                if part.length:
                    indexes.setdefault(chunk, []).append((region.kind, bytes(part.make())))
                continue
            parts.append(part)
            offset += part.length
        warn_of_dropped_indexes(source.path, row_groups)
        return parts, indexes

    def finish(self, template: ByteSource) -> None:
        """Write what comes after the row groups.

        Args:
            template: A plaintext file without rows, whose footer has the key-value metadata.

        Raises:
            VisibleMetadataError: A plaintext footer would lack metadata, and that is to be refused.
            ParquetFormatError: It has another schema.
            OSError: The sink cannot be written.
        """
        footer = read_plaintext_footer(template)
        if footer.metadata.bytes_of(FileMetaData.schema) != self._schema:
            raise ParquetFormatError("the footer has another schema than the file.", path=template.path)
        offset = self.size_bytes
        parts: list[Part] = []
        for chunk, offset_field_id, module in (index for kind in self._indexes.values() for index in kind):
            chunk.set_entry(offset_field_id, (WireType.I64, offset))
            parts.append(_bytes_part(module))
            offset += len(module)
        footer.metadata.num_rows = self.num_rows
        data = self._keys.footer(footer, self._row_groups)
        parts.append(_bytes_part(with_trailer(data, self._magic)))
        self._write(parts)

    def _write(self, parts: list[Part]) -> None:
        write_parts(parts, self._sink, offset=self.size_bytes)
        self.size_bytes += sum(part.length for part in parts)


def _bytes_part(data: bytes) -> BytesPart:
    return BytesPart(len(data), lambda: data)
