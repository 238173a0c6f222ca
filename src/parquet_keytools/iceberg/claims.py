"""What a metadata file claims about places, properties and numbers, and what is believed.

A metadata file is not authenticated, so anyone who can change it could let us read from other stores, write and
delete elsewhere, call other code, and reuse numbers of columns, rows and snapshots. Therefore:

- files are read from the kind of store that holds the metadata file, or where the catalog maps them;
- a commit writes and deletes within the folder that the catalog names, and at the places that the catalog lists in
  `keytools.write-locations`;
- properties that choose code, configuration or servers are valid in catalogs only;
- no counter may be below what the files of the table have.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pyiceberg.io import PY_IO_IMPL
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import TableProperties

from parquet_keytools.errors import ConfigurationError, ParquetFormatError

MAPPING_PROPERTY = "keytools.location-mapping"
PLACES_PROPERTY = "keytools.write-locations"

PATH_PROPERTIES = (
    TableProperties.WRITE_DATA_PATH,
    TableProperties.WRITE_METADATA_PATH,
    # Iceberg's Java library knows these, too.
    "write.object-storage.path",
    "write.folder-storage.path",
)

_FAMILIES = {
    "": "file",
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "abfss": "abfs",
    "wasb": "abfs",
    "wasbs": "abfs",
    "viewfs": "hdfs",
}
"""Schemes that name the same store as another scheme."""

_OURS = "parquet_keytools.iceberg.EncryptedFileIO"
_CLASSES = (PY_IO_IMPL, TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL)
"""Properties that name classes, which PyIceberg imports and calls."""
_STORAGE_PREFIXES = ("s3.", "gcs.", "adls.", "hdfs.", "hf.", "client.")
"""Properties of PyIceberg's FileIO: endpoints, and credentials that are sent to them."""

_METADATA_FOLDER = "metadata"
RESERVED_COLUMN_ID = 2**31 - 201
"""Field ids from here on belong to columns that no schema has, such as `_row_id`."""
_LARGEST = {"last-column-id": RESERVED_COLUMN_ID, "last-partition-id": 2**31 - 1}
_LARGEST_LONG = 2**62
"""No table comes near it, and manifests with a number that does not fit into Avro could not be read."""


# --- properties ---


def is_of_catalogs(name: str) -> bool:
    """Return whether a property is valid in catalogs only: it says how files are opened, or by whom."""
    return name in _CLASSES or name.startswith(("keytools.", *_STORAGE_PREFIXES))


def misplaced_properties(properties: Mapping[str, str]) -> list[str]:
    """Return the properties of a table that only catalogs may have; our own `py-io-impl` is harmless."""
    return [n for n, value in properties.items() if is_of_catalogs(n) and (n, value) != (PY_IO_IMPL, _OURS)]


# --- places ---


def mapped_location(location: str, mapping: str) -> str:
    """Return where a location lies according to `keytools.location-mapping`; the longest `from` decides."""
    begin, replacement = _mapped_beginning(location, mapping)
    return replacement + location[len(begin) :]


def _mapped_beginning(location: str, mapping: str) -> tuple[str, str]:
    if not mapping:
        return "", ""
    pairs = [pair.split("=", 1) for pair in mapping.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ConfigurationError(
            f"{MAPPING_PROPERTY} is not `from=to`, several with commas between them.", hint="Write both locations."
        )
    return max(
        ((begin, to) for begin, to in pairs if location.startswith(begin)),
        key=lambda pair: len(pair[0]),
        default=("", ""),
    )


def store_of(location: str) -> str:
    """Return the kind of store that a location is in, the same for all schemes of the store."""
    scheme = location.partition(":")[0].lower() if ":" in location.partition("/")[0] else ""
    return _FAMILIES.get(scheme, scheme)


def check_place(location: str, metadata_location: str, mapping: str) -> None:
    """Refuse to read a location in another kind of store than the metadata file that names it.

    Otherwise a changed metadata file would let us send requests anywhere. A location that `keytools.location-
    mapping` names is accepted.
    """
    if _mapped_beginning(location, mapping)[0]:
        return
    expected = store_of(mapped_location(metadata_location, mapping))
    if (store := store_of(location)) != expected:
        raise ParquetFormatError(
            f"it names {location[:200]}, which is in {store!r}, and the metadata file is in {expected!r}.",
            path=metadata_location,
            hint="Do not trust this metadata file. If the table does lie in both, name the location in "
            f"{MAPPING_PROPERTY}.",
        )


class TablePlaces:
    """Where commits to a table may write: the folder of its metadata file, and places that the catalog lists."""

    def __init__(self, metadata_location: str, properties: Mapping[str, str]) -> None:
        self._mapping = properties.get(MAPPING_PROPERTY, "")
        self._metadata_folder, _, _ = metadata_location.rpartition("/")
        above, _, name = self._metadata_folder.rpartition("/")
        self.folder = above if name == _METADATA_FOLDER and above else self._metadata_folder
        listed = [place.strip() for place in properties.get(PLACES_PROPERTY, "").split(",")]
        self._roots = [_place(root, self._mapping) for root in (self.folder, *filter(None, listed))]

    def holds(self, location: str) -> bool:
        """Return whether a location is in one of the places; an ambiguous location is in none."""
        place = _place(location, self._mapping)
        return place is not None and any(
            root is not None and place[: len(root)] == root and len(place) > len(root) for root in self._roots
        )

    def check(self, location: str) -> None:
        """Refuse a location outside of the places (`ParquetFormatError`)."""
        if not self.holds(location):
            raise ParquetFormatError(
                f"{location[:200]} is outside of the folder of the table, {self.folder}.",
                hint="Do not trust the metadata file that names it. If the table does write there, name the place "
                f"in the property {PLACES_PROPERTY} of the catalog.",
            )

    def has_metadata(self, location: str) -> bool:
        """Return whether a location is in the folder of the metadata file and has the name of a metadata file."""
        folder, _, name = location.rpartition("/")
        place = _place(folder, self._mapping)
        return (
            place is not None
            and place == _place(self._metadata_folder, self._mapping)
            and name.endswith((".metadata.json", ".metadata.json.gz"))
        )

    def is_same(self, location: str, other: str) -> bool:
        """Return whether two locations, however they are written, are one file."""
        return location == other or _place(location, self._mapping) == _place(other, self._mapping)

    def problems(self, document: Mapping[str, Any]) -> Iterator[str]:
        """Yield the places outside of these at which a metadata file lets commits write."""
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
    """Return the store and the parts of the path, or None for an ambiguous location."""
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
        # With a host, PyIceberg would take the path as relative to the current folder.
        if netloc or not path.startswith("/"):
            return None
        path = os.path.realpath(path)
    return store, netloc, *path.rstrip("/").split("/")


# --- numbers ---


COLUMN_ID, PARTITION_ID, SPEC_ID = "last-column-id", "last-partition-id", "highest spec-id"
SEQUENCE_NUMBER, NEXT_ROW_ID = "last-sequence-number", "next-row-id"
_CONSEQUENCES = {
    COLUMN_ID: "a new column would show values of a deleted one",
    PARTITION_ID: "filters would take values of one partition field for another's",
    SPEC_ID: "filters would read partitions by another partition spec",
    SEQUENCE_NUMBER: "deletes would apply to rows that were written after them",
    NEXT_ROW_ID: "two rows would have one id",
}
"""Counters of a metadata file -> what happens if a table gives a number again."""


def counter_problems(document: Mapping[str, Any], of_files: Counter[str] | None = None) -> Iterator[str]:
    """Yield the counters of a metadata file below what the file itself, or authentic files of the table, have."""
    specs = _objects(document.get("partition-specs"))
    found = Counter[str](of_files)
    for schema in _objects(document.get("schemas")):
        found |= Counter({COLUMN_ID: highest_column_id(schema)})
    for spec in specs:
        found |= Counter({PARTITION_ID: highest_partition_id(spec.get("fields"))})
    for snapshot in _objects(document.get("snapshots")):
        rows = _number(snapshot.get("first-row-id")) + _number(snapshot.get("added-rows"))
        found |= Counter({SEQUENCE_NUMBER: _number(snapshot.get("sequence-number")), NEXT_ROW_ID: rows})
    for counter, consequence in _CONSEQUENCES.items():
        value = _number(document.get(counter), 999 if counter == PARTITION_ID else 0)
        if counter == SPEC_ID:
            value = max((_number(spec.get("spec-id")) for spec in specs), default=0)
        if value < found[counter]:
            yield f"its {counter} is {value}, and the table has given {found[counter]}: {consequence}"
        elif not 0 <= value < _LARGEST.get(counter, _LARGEST_LONG):
            yield f"its {counter} is {value}, which no table reaches: what is written after it could not be read"


def highest_column_id(schema: Any) -> int:
    """Return the highest field id, nested ones included, in the JSON of a schema or a type."""
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
    """Raise `ParquetFormatError` with the first problem of a metadata file, if there is one."""
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
