"""How files are read: options of pyarrow, filters, and what stands for denied columns."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.files.denied_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.storage.locations import FileLocation

_OURS = frozenset({"source", "columns", "filters", "filesystem", "decryption_properties"})
_OF_A_TABLE = frozenset({"use_threads", "use_pandas_metadata", "schema", "partitioning"})
"""What `pyarrow.parquet.read_table` takes, and data sets take in another place."""

_REFUSED = {
    "decryption_properties": "the decryption properties are made here, for each file",
    "ignore_prefixes": "one rule says which files belong to a data set: names that begin with `.` or `_` do not",
}


@dataclass(frozen=True)
class ReadOptions:
    """Options of one read.

    Attributes:
        format: For a file format of pyarrow: names as `pyarrow.parquet.read_table` has them.
        memory_map: Whether local files are mapped into memory.
        table: For a read into a table: `use_threads`, `use_pandas_metadata`, `schema`, `partitioning`.
    """

    format: Mapping[str, Any] = field(default_factory=dict)
    memory_map: bool = False
    table: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, method: str) -> ReadOptions:
        """Take what a caller gave to `read_table`, or to `dataset`, which has no options of tables."""
        known = inspect.signature(pq.read_table).parameters.keys() - _OURS - _REFUSED.keys()
        if method != "read_table":
            known -= _OF_A_TABLE
        options = {name: value for name, value in options.items() if name not in _REFUSED or value is not None}
        if options.get("read_dictionary") is not None:
            list_of_names("read_dictionary", options["read_dictionary"])
        for name in options:
            if name in _REFUSED:
                raise TypeError(f"{method} does not take {name!r}: {_REFUSED[name]}.")
            if name not in known:
                raise TypeError(
                    f"{method} has no option {name!r}. Options of pyarrow: {', '.join(sorted(known))}."
                )
        return cls(
            {name: value for name, value in options.items() if name not in {"memory_map", *_OF_A_TABLE}},
            bool(options.get("memory_map")),
            {name: options[name] for name in options if name in _OF_A_TABLE},
        )

    def file_format(self) -> ds.ParquetFileFormat:
        """Return a file format for data sets."""
        given = {name: value for name, value in self.format.items() if value is not None}
        if "read_dictionary" in given:
            given["dictionary_columns"] = given.pop("read_dictionary")
        # 0 is no buffer.
        if buffer_size := given.pop("buffer_size", 0):
            given |= {"use_buffered_stream": True, "buffer_size": buffer_size}
        # Arrow reads small gaps along. A damaged page of another column there would break the scan.
        given.setdefault("cache_options", pa.CacheOptions(hole_size_limit=0))
        return ds.ParquetFileFormat(**given)

    def mapped(self, location: FileLocation) -> FileLocation:
        """Return a location whose files are mapped into memory, if that is wanted and they are local."""
        if not (self.memory_map and location.is_local):
            return location
        return FileLocation(pafs.LocalFileSystem(use_mmap=True), location.path, location.only)


def hides_denied(keys: KeyService) -> bool:
    """Tell whether columns whose keys are refused are left out."""
    return keys.configuration.reading.denied_columns == "hide"


def nulls_denied(keys: KeyService) -> bool:
    """Tell whether columns whose keys are refused are null."""
    return keys.configuration.reading.denied_columns == "null"


def shows_stand_ins(keys: KeyService) -> bool:
    """Tell whether something else is shown in place of the columns in `OpenedFile.refused`: nulls, or digests."""
    return keys.configuration.reading.denied_columns in ("null", "hash")


def hint_for_denied(keys: KeyService) -> str:
    """Return what to do where a column cannot be read."""
    hints = {
        "hash": f"Name the columns that you need. {NEEDS_KEY}",
        "error": "Name the columns that you need, or set `denied_columns: hide` under `reading`.",
    }
    return hints.get(keys.configuration.reading.denied_columns, "")


def schema_for_all(schema: pa.Schema, opened: OpenedFile) -> pa.Schema:
    """Return a schema in which all columns under keys of their own may be null, as they are for some readers."""
    keyed = {c.path[0] for c in opened.footer.columns if c.encryption is ColumnEncryption.COLUMN_KEY}
    fields = [field.with_nullable(field.nullable or field.name in keyed) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def has_stand_ins(opened: OpenedFile, denied_columns: str) -> bool:
    """Return whether something else is shown in place of columns of a file."""
    return opened.digests is not None or (denied_columns == "null" and bool(opened.refused))


def pandas_index(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """Return the columns of the index of a DataFrame that was written, from the metadata of its schema.

    Raises:
        ValueError, TypeError, KeyError: What it says of pandas is not what pandas writes.
    """
    if not metadata or b"pandas" not in metadata:
        return []
    return [name for name in json.loads(metadata[b"pandas"])["index_columns"] if isinstance(name, str)]


Filters = Any
"""As `pyarrow.parquet.read_table` takes them: an expression, or tuples in disjunctive normal form."""


def refuse_denied_filter(opened: OpenedFile, filters: Filters, *, has_stand_ins: bool = False) -> None:
    """Raise `ColumnAccessDeniedError` if filters look at a column that cannot be read.

    Where something else is shown in place of refused columns, filters look at that.
    """
    if filters is not None and opened.denied:
        names = columns_mentioned(filters, sorted(opened.denied_top_level))
        opened.refuse_denied(names, hides_refused=has_stand_ins)


def columns_mentioned(filters: Filters, names: Iterable[str]) -> list[str]:
    """Return the names of columns that filters look at.

    An expression does not list its fields; its text is searched, which may take a literal for a column. A field
    that is given by its position may be any column. More names are returned then, and never fewer.
    """
    text = str(pq.filters_to_expression(filters))
    if "FieldPath(" in text:
        return list(names)
    return [name for name in names if name in text and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
