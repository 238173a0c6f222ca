"""Manifest lists and manifests: which files a table has, and the key metadata of each.

They are Avro. PyIceberg decodes whole records, and only the fields that encryption needs are kept. Only authentic
manifests are decoded: PyIceberg's decoder does not check where its buffer ends, and its codecs have no limit.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.avro.file import AvroFile
from pyiceberg.io import InputFile
from pyiceberg.typedef import Record
from pyiceberg.types import StructType

from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.iceberg.claims import (
    COLUMN_ID,
    NEXT_ROW_ID,
    PARTITION_ID,
    RESERVED_COLUMN_ID,
    SEQUENCE_NUMBER,
    SPEC_ID,
    highest_column_id,
    highest_partition_id,
)
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.secret_bytes import SecretBytes

_LIST_FIELDS = (500, 501, 519)
"""Field ids: location, length and key metadata of a manifest."""
_DATA_FILE = 2
_MANIFEST_FIELDS = (0, 134, 100, 101, 104, 131)
"""Status of the entry; content, location, format, length and key metadata of the file."""
_LIST_NUMBERS = (502, 515, 512, 513, 520)
"""Partition spec and sequence number of a manifest, its added and existing rows, and its first row id."""
_ROW_IDS_OF_LIST = (500, 520)
"""Location and first row id of a manifest."""
_ROW_IDS_OF_MANIFEST = (0, 100, 103, 142)
"""Status of the entry; location, number of rows and first row id of the file."""
_MAPS_BY_COLUMN = (108, 109, 110, 137, 125, 128)
"""Sizes, counts and bounds of the columns of a file."""
_SNAPSHOT_ID = "snapshot-id"
"""In the Avro header of a manifest list, which is encrypted with the list."""

_DELETED = 2
_CONTENTS = {None: "data file", 0: "data file", 1: "position delete file", 2: "equality delete file"}


@dataclass(frozen=True)
class ListedFile:
    """A file, as a manifest list or a manifest lists it.

    `kind` is `manifest`, `data file`, `deletion vector file`, ...; `format` `AVRO`, `PARQUET`, `PUFFIN` or `ORC`.
    The entry of a deleted file, which is not live, stays for a while. A plaintext file has no `encoded_key`.
    """

    location: str
    kind: str
    format: str
    length: int
    is_live: bool
    encoded_key: SecretBytes | None = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the file in errors."""
        return f"{self.kind} {self.location}"

    def key_metadata(self) -> StandardKeyMetadata | None:
        """Return its key, or None if it is plaintext."""
        return (
            None if self.encoded_key is None else StandardKeyMetadata.decode(self.encoded_key, f"the {self.name}")
        )


def manifests_in(content: bytes, name: str, snapshot_id: int) -> list[ListedFile]:
    """Return the manifests in the plaintext of an authentic manifest list."""
    records, header = _records(content, _LIST_FIELDS, name)
    # Nothing else binds a list to its snapshot: the metadata file, which names it with its key, can be changed.
    stated = header.get(_SNAPSHOT_ID)
    if stated not in (None, str(snapshot_id)):
        raise DecryptionError(
            f"the {name} belongs to another snapshot, {str(stated)[:20]}: the metadata file was changed.",
            hint="Do not trust this metadata file; restore it from a backup.",
        )
    return [
        ListedFile(path, "manifest", "AVRO", length, is_live=True, encoded_key=_secret(key))
        for path, length, key in records
    ]


def files_in(content: bytes, name: str) -> list[ListedFile]:
    """Return the files in the plaintext of an authentic manifest."""
    files = []
    records, _ = _records(content, _MANIFEST_FIELDS, name)
    for status, content_type, path, file_format, length, key in records:
        file_format = str(file_format).upper()
        kind = "deletion vector file" if file_format == "PUFFIN" else _CONTENTS.get(content_type, "file")
        files.append(ListedFile(path, kind, file_format, length, status != _DELETED, _secret(key)))
    return files


def _secret(key_metadata: bytes | None) -> SecretBytes | None:
    return None if key_metadata is None else SecretBytes(key_metadata)


def row_ids_of_list(content: bytes, name: str) -> dict[str, int | None]:
    """Return the first row id of each manifest in the plaintext of a manifest list, by its location."""
    records, _ = _records(content, _ROW_IDS_OF_LIST, name)
    return dict(records)


def row_ids_of_manifest(content: bytes, name: str, first_row_id: int | None) -> Iterator[tuple[str, int | None]]:
    """Yield location and first row id of each live file in the plaintext of a manifest.

    A file without one inherits it: the first such file has the first row id of the manifest, and the rows of the
    next such file follow.
    """
    records, _ = _records(content, _ROW_IDS_OF_MANIFEST, name)
    for status, path, rows, row_id in records:
        if status == _DELETED:
            continue
        if row_id is None and first_row_id is not None:
            row_id = first_row_id
            first_row_id += rows
        yield path, row_id


def counters_of_list(content: bytes, name: str) -> Counter[str]:
    """Return the highest numbers in the plaintext of an authentic manifest list."""
    records, _ = _records(content, _LIST_NUMBERS, name)
    found = Counter[str]()
    for spec_id, sequence_number, added_rows, existing_rows, first_row_id in records:
        rows = 0 if first_row_id is None else first_row_id + (added_rows or 0) + (existing_rows or 0)
        found |= Counter({SPEC_ID: spec_id or 0, SEQUENCE_NUMBER: sequence_number or 0, NEXT_ROW_ID: rows})
    return found


def counters_of_manifest(content: bytes, name: str) -> Counter[str]:
    """Return the highest field ids of the schema and of the files, maybe older ones, of an authentic manifest."""
    records, header = _records(content, _MAPS_BY_COLUMN, name)
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
    column_id = max([highest_column_id(schema), *of_files])
    return Counter({COLUMN_ID: column_id, PARTITION_ID: highest_partition_id(spec)})


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


def _records(
    content: bytes, field_ids: Sequence[int], name: str
) -> tuple[list[tuple[Any, ...]], Mapping[str, str]]:
    """Return some fields of all records, and the header."""
    kind = ""
    try:
        with AvroFile[Record](_InMemory(content)) as reader:
            # Records are decoded whole, by the writer's schema: PyIceberg's readers skip decimals wrongly.
            places = _places(reader.schema.as_struct(), field_ids)
            records = [tuple(_at(record, place) for place in places) for record in reader]
        header = reader.header.meta
    except Exception as error:
        # The text of a decoder's exception may quote what it decoded, and with it keys.
        kind = type(error).__name__
    if kind:
        raise ParquetFormatError(f"the {name} cannot be decoded ({kind}).", hint="Restore it from a backup.")
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
