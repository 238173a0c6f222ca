"""An encrypted file that is written row group by row group, as these are finished: no more than one is held."""

from __future__ import annotations

from parquet_keytools.encryption.aad import MAX_COUNT
from parquet_keytools.encryption.chunk_rewrite import INDEX_FIELD_IDS, ChunkRewrite, PagesMemory
from parquet_keytools.encryption.file_decryptor import open_chunks
from parquet_keytools.encryption.file_encryption import FileEncryption, OutputKeys
from parquet_keytools.encryption.file_encryptor import read_plaintext_footer
from parquet_keytools.encryption.file_rewriter import RowGroupRewrite, in_order, new_row_group
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.output_parts import BytesPart, Part, write_parts
from parquet_keytools.errors import FormatLimitError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.collector import paused_collector
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, RegionKind, with_trailer
from parquet_keytools.format.structs import FileMetaData, RowGroup
from parquet_keytools.format.thrift_outline import UnreadStruct
from parquet_keytools.format.thrift_values import Struct, WireType

Index = tuple[Struct, int, bytes]
"""The chunk that an index is of, the id of the field that has the index's offset, and the bytes of its module."""


class StreamedFile:
    """Takes plaintext Parquet files of one schema, and makes their row groups those of one encrypted file.

    Page indexes are held until the end, and lie together before the footer: readers take those of many row groups
    by one read.
    """

    def __init__(self, sink: ByteSink, encryption: FileEncryption, template: ByteSource, *, threads: int = 2):
        """Begin the file.

        Args:
            sink: Where it goes.
            encryption: How it is encrypted.
            template: A plaintext file with the schema.
            threads: How many threads work.

        Raises:
            ConfigurationError: A key is given for a column that is not in the schema.
            OSError: The sink cannot be written.
        """
        self.num_rows = 0
        self.size_bytes = 0
        self._sink = sink
        self._threads = threads
        footer = read_plaintext_footer(template)
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
        with paused_collector():
            footer = read_plaintext_footer(source)
            if footer.metadata.bytes_of(FileMetaData.schema) != self._schema:
                raise ParquetFormatError("a row group has another schema than the file.", path=source.path)
            first = len(self._row_groups)
            if first + len(footer.row_groups) > MAX_COUNT:
                raise FormatLimitError(
                    f"{source.path}: more than {MAX_COUNT} row groups are more than an encrypted file can have.",
                    hint="Write larger row groups, or more files.",
                )
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
                struct_of_it = UnreadStruct(written, 0, len(written), None) if its_indexes else None
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
        for region, chunk in in_order(
            source, row_groups, footer.envelope.footer_offset, footer.metadata.created_by
        ):
            part = chunk.lay_out(source, region, offset, memory)
            if isinstance(part, BytesPart) and region.kind in self._indexes:
                indexes.setdefault(chunk, []).append((region.kind, bytes(part.make())))
                continue
            parts.append(part)
            offset += part.length
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
        with paused_collector():
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
        write_parts(parts, self._sink, offset=self.size_bytes, threads=self._threads)
        self.size_bytes += sum(part.length for part in parts)


def _bytes_part(data: bytes) -> BytesPart:
    return BytesPart(len(data), lambda: data)
