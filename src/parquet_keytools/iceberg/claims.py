"""What a metadata file claims about places and numbers, and what a commit may believe of it.

Nothing authenticates a metadata file. A commit writes where it says, deletes what it lists, and numbers columns,
rows and snapshots by its counters. So a commit writes and deletes within the folder that the catalog names, and at
places that the catalog lists in `keytools.write-locations`; and no counter may be below what the files of the
table have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import TableProperties

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.iceberg.table_files import MAPPING_PROPERTY, mapped_location, store_of

PLACES_PROPERTY = "keytools.write-locations"

PATH_PROPERTIES = (
    TableProperties.WRITE_DATA_PATH,
    TableProperties.WRITE_METADATA_PATH,
    # Iceberg's Java library knows these, too.
    "write.object-storage.path",
    "write.folder-storage.path",
)

_METADATA_FOLDER = "metadata"
RESERVED_COLUMN_ID = 2**31 - 201
"""From here on, field ids belong to columns that no schema has, such as `_row_id`."""
_LARGEST = {"last-column-id": RESERVED_COLUMN_ID, "last-partition-id": 2**31 - 1}
_LARGEST_LONG = 2**62
"""A table never comes near it, and a number beyond what Avro has would make manifests unreadable."""


class TablePlaces:
    """The places of one table: the folder that has its metadata file, and what the catalog names beside it.

    Args:
        metadata_location: The metadata file, as the catalog names it.
        properties: Properties of the catalog.
    """

    def __init__(self, metadata_location: str, properties: Mapping[str, str]) -> None:
        self._mapping = properties.get(MAPPING_PROPERTY, "")
        self._metadata_folder, _, _ = metadata_location.rpartition("/")
        above, _, name = self._metadata_folder.rpartition("/")
        self.folder = above if name == _METADATA_FOLDER and above else self._metadata_folder
        listed = [place.strip() for place in properties.get(PLACES_PROPERTY, "").split(",")]
        self._roots = [_place(root, self._mapping) for root in (self.folder, *filter(None, listed))]

    def holds(self, location: str) -> bool:
        """Return whether a location is at one of the places; one that could be read in two ways is at none."""
        place = _place(location, self._mapping)
        return place is not None and any(
            root is not None and place[: len(root)] == root and len(place) > len(root) for root in self._roots
        )

    def check(self, location: str) -> None:
        """Refuse a location at which only the catalog may let a commit write or delete (`ParquetFormatError`)."""
        if not self.holds(location):
            raise ParquetFormatError(
                f"{location[:200]} is outside of the folder of the table, {self.folder}.",
                hint="Do not trust the metadata file that names it. If the table does write there, name the place "
                f"in the property {PLACES_PROPERTY} of the catalog.",
            )

    def has_metadata(self, location: str) -> bool:
        """Return whether a location is a file in the folder of the metadata file, by the name of one."""
        folder, _, name = location.rpartition("/")
        place = _place(folder, self._mapping)
        return (
            place is not None
            and place == _place(self._metadata_folder, self._mapping)
            and name.endswith((".metadata.json", ".metadata.json.gz"))
        )

    def is_same(self, location: str, other: str) -> bool:
        """Return whether two locations are one file, however they are written."""
        return location == other or _place(location, self._mapping) == _place(other, self._mapping)

    def problems(self, document: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the places at which a metadata file lets commits write."""
        properties = document.get("properties") or {}
        paths = {f"property {name}": str(properties[name]) for name in PATH_PROPERTIES if properties.get(name)}
        if not {TableProperties.WRITE_DATA_PATH, TableProperties.WRITE_METADATA_PATH} <= properties.keys():
            paths["location"] = str(document.get("location") or "")
        for what, path in paths.items():
            if not self.holds(f"{path.rstrip('/')}/file"):
                yield (
                    f"its {what} is {path[:200]}, which is outside of the folder of the table, {self.folder}, and "
                    f"commits would write there: only the catalog may say so, by its property {PLACES_PROPERTY}"
                )


def _place(location: str, mapping: str) -> tuple[str, ...] | None:
    """Return the store and the parts of the path, or None where it is not certain which place this is."""
    mapped = mapped_location(location, mapping)
    store = store_of(mapped)
    try:
        _, netloc, path = PyArrowFileIO.parse_location(mapped)
    except ValueError:
        return None
    decoded = unquote(path)
    parts = [part for text in (path, decoded) for part in text.replace("\\", "/").split("/")]
    if ".." in parts or "." in parts or "\0" in decoded or decoded.count("/") != path.count("/"):
        return None
    if store == "file":
        # With a host, PyIceberg would take the path as one below the current folder.
        if netloc or not path.startswith("/"):
            return None
        path = os.path.realpath(path)
    return store, netloc, *path.rstrip("/").split("/")


@dataclass(frozen=True)
class Counters:
    """The highest numbers that a table has given: what its metadata file says, or what its files have.

    Attributes:
        column_id: Field id of a column.
        partition_id: Field id of a partition field.
        spec_id: Number of a partition spec.
        sequence_number: Sequence number of a snapshot.
        next_row_id: The first row id that no row has.
    """

    column_id: int = 0
    partition_id: int = 0
    spec_id: int = 0
    sequence_number: int = 0
    next_row_id: int = 0

    def __or__(self, other: Counters) -> Counters:
        return Counters(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


_CONSEQUENCES = {
    "column_id": ("last-column-id", "a new column would show values of a deleted one"),
    "partition_id": ("last-partition-id", "filters would take values of one partition field for another's"),
    "spec_id": ("highest spec-id", "filters would read partitions by another partition spec"),
    "sequence_number": ("last-sequence-number", "deletes would apply to rows that were written after them"),
    "next_row_id": ("next-row-id", "two rows would have one id"),
}


def counters_of(document: Mapping[str, Any]) -> Counters:
    """Return the counters that a metadata file states."""
    specs = _objects(document.get("partition-specs"))
    return Counters(
        _number(document.get("last-column-id")),
        _number(document.get("last-partition-id"), 999),
        max((_number(spec.get("spec-id")) for spec in specs), default=0),
        _number(document.get("last-sequence-number")),
        _number(document.get("next-row-id")),
    )


def counters_in(document: Mapping[str, Any]) -> Counters:
    """Return the highest numbers of the schemas, partition specs and snapshots in a metadata file."""
    found = Counters()
    for schema in _objects(document.get("schemas")):
        found |= Counters(column_id=highest_column_id(schema))
    for spec in _objects(document.get("partition-specs")):
        found |= Counters(partition_id=highest_partition_id(spec.get("fields")))
    for snapshot in _objects(document.get("snapshots")):
        rows = _number(snapshot.get("first-row-id")) + _number(snapshot.get("added-rows"))
        found |= Counters(sequence_number=_number(snapshot.get("sequence-number")), next_row_id=rows)
    return found


def counter_problems(document: Mapping[str, Any], of_files: Counters | None = None) -> Iterator[str]:
    """Yield which counters of a metadata file are below what it, or the table's authentic files, have."""
    stated = counters_of(document)
    found = counters_in(document) | (of_files or Counters())
    for name, (counter, consequence) in _CONSEQUENCES.items():
        value, highest = getattr(stated, name), getattr(found, name)
        if value < highest:
            yield f"its {counter} is {value}, and the table has given {highest}: {consequence}"
        elif not 0 <= value < _LARGEST.get(counter, _LARGEST_LONG):
            yield f"its {counter} is {value}, which no table reaches: what is written after it could not be read"


def highest_column_id(schema: Any) -> int:
    """Return the highest field id in the JSON of a schema or of a type, nested ones included."""
    highest, waiting = 0, [schema]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, dict):
            for name in ("id", "element-id", "key-id", "value-id"):
                highest = max(highest, _number(kind.get(name)))
            waiting += [kind[name] for name in ("type", "element", "key", "value") if name in kind]
            waiting += _objects(kind.get("fields"))
    return highest


def highest_partition_id(partition_fields: Any) -> int:
    """Return the highest field id in the JSON of the fields of a partition spec."""
    return max((_number(field.get("field-id")) for field in _objects(partition_fields)), default=0)


def refuse(problems: Iterable[str], metadata_location: str) -> None:
    """Raise `ParquetFormatError` with the first of the problems of a metadata file, if there is one."""
    for problem in problems:
        raise ParquetFormatError(
            f"{problem}.",
            path=metadata_location,
            hint="Do not trust this metadata file; restore it from a backup.",
        )


def _objects(items: Any) -> Sequence[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _number(value: Any, default: int = 0) -> int:
    return value if type(value) is int else default
