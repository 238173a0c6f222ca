"""How files and folders are read: options of pyarrow, and what stands for columns that are denied."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.files.digested_columns import NEEDS_KEY
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
        """Take the options that a caller gave.

        Args:
            options: By name.
            method: Which takes them: `read_table`, or `dataset`, which has no options of tables.

        Raises:
            TypeError: One is not known, or not taken.
        """
        known = inspect.signature(pq.read_table).parameters.keys() - _OURS - _REFUSED.keys()
        if method != "read_table":
            known -= _OF_A_TABLE
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

    def for_file(self) -> dict[str, Any]:
        """Return them as `pyarrow.parquet.read_table` takes them for one file; its file system maps memory."""
        return {**self.format, **self.table}

    def file_format(self, **decryption: Any) -> ds.ParquetFileFormat:
        """Return a file format for data sets.

        Args:
            decryption: `decryption_config` or `decryption_properties`.
        """
        given = {name: value for name, value in self.format.items() if value is not None}
        if "read_dictionary" in given:
            given["dictionary_columns"] = given.pop("read_dictionary")
        # 0 is no buffer.
        if buffer_size := given.pop("buffer_size", 0):
            given |= {"use_buffered_stream": True, "buffer_size": buffer_size}
        return ds.ParquetFileFormat(**given, **decryption)

    def mapped(self, location: FileLocation) -> FileLocation:
        """Return a location whose files are mapped into memory, if that is wanted and they are local."""
        if not (self.memory_map and location.is_local):
            return location
        return FileLocation(pafs.LocalFileSystem(use_mmap=True), location.path, location.only)


def with_extensions(options: ReadOptions) -> ReadOptions:
    """Return options with the default of `pyarrow.parquet.read_table`, which data sets do not have."""
    return ReadOptions({"arrow_extensions_enabled": True, **options.format}, options.memory_map, options.table)


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
    policy = keys.configuration.reading.denied_columns
    if policy == "hash":
        return f"Name the columns that you need. {NEEDS_KEY}"
    return (
        ""
        if policy != "error"
        else "Name the columns that you need, or set `denied_columns: hide` under `reading`."
    )


def schema_for_all(schema: pa.Schema, opened: OpenedFile) -> pa.Schema:
    """Return a schema in which all columns under keys of their own may be null, as they are for some readers."""
    keyed = {c.path[0] for c in opened.footer.columns if c.encryption is ColumnEncryption.COLUMN_KEY}
    fields = [field.with_nullable(field.nullable or field.name in keyed) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def has_stand_ins(opened: OpenedFile, denied_columns: str) -> bool:
    """Return whether something else is shown in place of columns of a file."""
    return opened.digests is not None or (denied_columns == "null" and bool(opened.refused))
