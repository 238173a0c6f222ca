"""Manifest lists and manifests: which files a table has, and the key metadata of each.

They are Avro, and PyIceberg decodes whole records; only the fields that encryption needs are kept. Plaintext may
be anybody's, and is read within bounds: PyIceberg's fast decoder does not look where its buffer ends, and its
codecs decompress without end.
"""

from __future__ import annotations

import bz2
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import zstandard
from pyiceberg.avro.codecs import AVRO_CODEC_KEY
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.avro.file import META_SCHEMA, SYNC_SIZE, AvroFile, AvroFileHeader
from pyiceberg.avro.resolver import construct_reader, resolve_reader
from pyiceberg.io import InputFile
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import FixedType, IcebergType, ListType, MapType, StructType, UnknownType

from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.iceberg.claims import RESERVED_COLUMN_ID, Counters, highest_column_id, highest_partition_id
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes

_LIST_FIELDS = (500, 501, 519)
"""Field ids: location, length and key metadata of a manifest."""
_DATA_FILE = 2
_MANIFEST_FIELDS = (0, 134, 100, 101, 104, 131)
"""Status of the entry; content, location, format, length and key metadata of the file."""

_LIST_NUMBERS = (502, 515, 512, 513, 520)
"""Partition spec and sequence number of a manifest, its added and existing rows, and its first row id."""
_MAPS_BY_COLUMN = (108, 109, 110, 137, 125, 128)
"""Sizes, counts and bounds of the columns of a file."""

_SNAPSHOT_ID = "snapshot-id"
"""Of the Avro header of a manifest list, and so within its stream."""

_DELETED = 2
_CONTENTS = {None: "data file", 0: "data file", 1: "position delete file", 2: "equality delete file"}

MAX_STORED_BYTES = 64 << 20
MAX_PLAINTEXT_BYTES = 256 << 20
MAX_RECORDS = 1_000_000
"""Manifests have 8 MiB and some ten thousand records."""
MAX_RECORD_BYTES = 8 << 20
"""A record has some 100 bytes for each column, and takes several times its bytes once it is decoded."""


@dataclass(frozen=True)
class ListedFile:
    """A file as the file above it in the key chain lists it.

    Attributes:
        location: Where it lies.
        kind: `manifest`, `data file`, `deletion vector file`, `equality delete file`, ...
        format: `AVRO`, `PARQUET`, `PUFFIN` or `ORC`.
        length: Its bytes, as listed.
        is_live: Whether it is still a part of the table; an entry of a deleted file stays for a while.
        encoded_key: Its key metadata, or None where it is plaintext.
    """

    location: str
    kind: str
    format: str
    length: int
    is_live: bool
    encoded_key: SecretBytes | None = field(repr=False)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.kind} {self.location}"

    def key_metadata(self) -> StandardKeyMetadata | None:
        """Return its key, or None where it is plaintext; errors as `StandardKeyMetadata.decode`."""
        return (
            None if self.encoded_key is None else StandardKeyMetadata.decode(self.encoded_key, f"the {self.name}")
        )


def manifests_in(content: bytes, name: str, snapshot_id: int, *, authentic: bool) -> list[ListedFile]:
    """Return the manifests in the plaintext of a manifest list; one that is not `authentic` may be anybody's.

    Raises:
        ParquetFormatError: It is no manifest list.
        DecryptionError: It says that it is the list of another snapshot.
    """
    records, _ = _records(content, _LIST_FIELDS, name, authentic, snapshot_id)
    return [
        ListedFile(path, "manifest", "AVRO", length, is_live=True, encoded_key=_secret(key))
        for path, length, key in records
    ]


def files_in(content: bytes, name: str, *, authentic: bool) -> list[ListedFile]:
    """Return the files in the plaintext of a manifest; one that is not `authentic` may be anybody's.

    Raises:
        ParquetFormatError: It is no manifest.
    """
    files = []
    records, _ = _records(content, _MANIFEST_FIELDS, name, authentic)
    for status, content_type, path, file_format, length, key in records:
        file_format = str(file_format).upper()
        kind = "deletion vector file" if file_format == "PUFFIN" else _CONTENTS.get(content_type, "file")
        files.append(ListedFile(path, kind, file_format, length, status != _DELETED, _secret(key)))
    return files


def _secret(key_metadata: bytes | None) -> SecretBytes | None:
    return None if key_metadata is None else SecretBytes(key_metadata)


class _InMemory(InputFile):
    def __init__(self, content: bytes) -> None:
        super().__init__("")
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> io.BytesIO:
        return io.BytesIO(self._content)


def counters_of_list(content: bytes, name: str) -> Counters:
    """Return the highest numbers in the plaintext of an authentic manifest list; errors as `manifests_in`."""
    records, _ = _records(content, _LIST_NUMBERS, name, authentic=True)
    found = Counters()
    for spec_id, sequence_number, added_rows, existing_rows, first_row_id in records:
        rows = 0 if first_row_id is None else first_row_id + (added_rows or 0) + (existing_rows or 0)
        found |= Counters(spec_id=spec_id or 0, sequence_number=sequence_number or 0, next_row_id=rows)
    return found


def counters_of_manifest(content: bytes, name: str) -> Counters:
    """Return the highest field ids in the plaintext of an authentic manifest; errors as `files_in`.

    The columns come from the schema that it was written with, and from its files, which may be older.
    """
    records, header = _records(content, _MAPS_BY_COLUMN, name, authentic=True)
    of_files = [
        column_id
        for record in records
        for column_map in record
        for column_id in column_map or ()
        if column_id < RESERVED_COLUMN_ID
    ]
    try:
        schema, spec = (json.loads(header.get(key, "null")) for key in ("schema", "partition-spec"))
    except (ValueError, RecursionError):
        schema, spec = None, None
    return Counters(column_id=max([highest_column_id(schema), *of_files]), partition_id=highest_partition_id(spec))


def _records(
    content: bytes, field_ids: Sequence[int], name: str, authentic: bool, snapshot_id: int | None = None
) -> tuple[list[tuple[Any, ...]], Mapping[str, str]]:
    """Return some fields of all records, and the header; of a manifest list, if it belongs to the snapshot."""
    kind = ""
    try:
        avro_file: AvroFile[Record] | _BoundedAvroFile
        avro_file = AvroFile(_InMemory(content)) if authentic else _BoundedAvroFile(content)
        with avro_file as reader:
            # Records are decoded whole, by the writer's schema: PyIceberg's readers skip decimals wrongly.
            places = _places(reader.schema.as_struct(), field_ids)
            records = [tuple(_at(record, place) for place in places) for record in reader]
        header = reader.header.meta
    except Exception as error:
        # The text of a decoder's exception may quote what it decoded, and with it keys.
        kind = type(error).__name__
    if kind:
        raise ParquetFormatError(f"the {name} cannot be decoded ({kind}).", hint="Restore it from a backup.")
    # Nothing else binds a list to its snapshot: the metadata file names it, with its key, and can be changed.
    stated = header.get(_SNAPSHOT_ID)
    if snapshot_id is not None and stated not in (None, str(snapshot_id)):
        raise DecryptionError(
            f"the {name} is that of another snapshot, {str(stated)[:20]}: the metadata file was changed.",
            hint="Do not trust this metadata file; restore it from a backup.",
        )
    return records, header


def _places(struct: StructType, field_ids: Sequence[int]) -> list[tuple[int, ...] | None]:
    """Return where each field is in a record, or in the data file in it; None for a field that is in neither."""
    places: dict[int, tuple[int, ...]] = {}
    for position, own in enumerate(struct.fields):
        places[own.field_id] = (position,)
        if own.field_id == _DATA_FILE and isinstance(own.field_type, StructType):
            for inner, of_file in enumerate(own.field_type.fields):
                places[of_file.field_id] = (position, inner)
    return [places.get(field_id) for field_id in field_ids]


def _at(record: Record, place: tuple[int, ...] | None) -> Any:
    if place is None:
        return None
    value: Any = record
    for position in place:
        value = value[position]
    return value


def read_plaintext(stored: pa.NativeFile) -> bytes:
    """Return a file; of one that is too large for a manifest, one byte more than a manifest may have."""
    return bytes(stored.read(min(stored.size(), MAX_STORED_BYTES + 1)))


class _RecordDecoder(StreamingBinaryDecoder):
    """Decodes the records of a block; `left` is what the current one may still have."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.left = MAX_RECORD_BYTES

    def read(self, n: int) -> bytes:
        self.left -= n
        if self.left < 0:
            raise ValueError("a record is larger than any")
        return super().read(n)


class _BoundedAvroFile:
    """Reads what PyIceberg's `AvroFile` reads, up to the limits.

    Raises:
        ValueError: A limit is exceeded, or blocks, lists or maps have more elements than bytes.
    """

    header: AvroFileHeader
    schema: Schema

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> _BoundedAvroFile:
        if len(self._content) > MAX_STORED_BYTES:
            raise ValueError("it is larger than any manifest")
        self._decoder = StreamingBinaryDecoder(self._content)
        self.header = construct_reader(META_SCHEMA, {-1: AvroFileHeader}).read(self._decoder)
        self.schema = self.header.get_schema()
        self._reader = resolve_reader(self.schema, self.schema)
        if _has_elements_without_bytes(self.schema.as_struct()):
            raise ValueError("a list of elements without bytes would have no end")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Record]:
        bytes_left, records_left = MAX_PLAINTEXT_BYTES, MAX_RECORDS
        while self._decoder.tell() < len(self._content):
            try:
                records = self._decoder.read_int()
                data = self._decoder.read_bytes()
            except EOFError:
                # PyIceberg would take it for the end of the file.
                raise ValueError("it is cut within a block") from None
            data = self._decompressed(data, bytes_left + 1)
            bytes_left -= len(data)
            records_left -= records
            if bytes_left < 0 or records_left < 0 or records > len(data):
                raise ValueError("it is larger than any manifest")
            decoder = _RecordDecoder(data)
            for _ in range(records):
                decoder.left = MAX_RECORD_BYTES
                yield self._reader.read(decoder)
            if self._decoder.read(SYNC_SIZE) != self.header.sync:
                raise ValueError("a block ends elsewhere")

    def _decompressed(self, data: bytes, limit: int) -> bytes:
        codec = self.header.meta.get(AVRO_CODEC_KEY, "null")
        if decompress := _CODECS.get(codec):
            return decompress(data, limit)
        if codec_class := self.header.compression_codec():
            # Snappy says its length first, and PyIceberg has no library for it but where somebody installs it.
            return bytes(codec_class.decompress(data))
        return data


def _unzstd(data: bytes, limit: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=MAX_PLAINTEXT_BYTES).stream_reader(io.BytesIO(data)) as reader:
        return bytes(reader.read(limit))


_CODECS: dict[str, Callable[[bytes, int], bytes]] = {
    "deflate": lambda data, limit: zlib.decompressobj(-15).decompress(data, limit),
    "bzip2": lambda data, limit: bz2.BZ2Decompressor().decompress(data, limit),
    "zstandard": _unzstd,
}


def _has_elements_without_bytes(kind: IcebergType) -> bool:
    match kind:
        case StructType():
            return any(_has_elements_without_bytes(field.field_type) for field in kind.fields)
        case ListType():
            return (kind.element_required and _may_be_empty(kind.element_type)) or _has_elements_without_bytes(
                kind.element_type
            )
        case MapType():
            # A key has bytes: the length of a string.
            return _may_be_empty(kind.key_type) or _has_elements_without_bytes(kind.value_type)
    return False


def _may_be_empty(kind: IcebergType) -> bool:
    if isinstance(kind, StructType):
        return all(field.required and _may_be_empty(field.field_type) for field in kind.fields)
    return isinstance(kind, UnknownType) or (isinstance(kind, FixedType) and not len(kind))
