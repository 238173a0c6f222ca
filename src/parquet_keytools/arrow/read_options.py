"""How files are read: options of pyarrow, what stands for denied columns, decryption properties of a file."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import MaterialFolder
from parquet_keytools.arrow.encryption_properties import (
    FOREVER,
    NO_ARROW_ENCRYPTION,
    arrow_encryption,
    has_arrow_encryption,
    takes_file_path,
)
from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import UnsupportedByArrowError
from parquet_keytools.files.denied_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.keys.material_store import serialise_key_materials
from parquet_keytools.storage.locations import FileLocation, key_material_location

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

    def file_format(self, **decryption: Any) -> ds.ParquetFileFormat:
        """Return a file format for data sets, with `decryption_config` or `decryption_properties`."""
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


_NAME_COLUMNS = "Name the columns that you need: decryption_properties(path, columns=[...])."


_DECRYPTS_IN_THREADS = 20
"""Before this version of pyarrow, threads share a cipher: reads fail, or end the process (apache/arrow#43057)."""


def arrow_read_limits(opened: OpenedFile) -> list[str]:
    """Return why pyarrow cannot decrypt a file by itself, a phrase each; empty if it can."""
    limits = [] if has_arrow_encryption() else [NO_ARROW_ENCRYPTION]
    if int(pa.__version__.partition(".")[0]) < _DECRYPTS_IN_THREADS:
        limits.append(f"version {pa.__version__} does not decrypt correctly in several threads")
    if opened.digests is not None:
        limits.append("it shows values, and `denied_columns: hash` is set")
    has_own_keys = any(column.encryption is ColumnEncryption.COLUMN_KEY for column in opened.footer.columns)
    if opened.retriever.uses_data_keys and (has_own_keys or opened.kms_keys.answers):
        limits.append("it has no data keys for single columns")
    if opened.footer.envelope.supply_aad_prefix and not opened.retriever.uses_data_keys:
        limits.append("it has no AAD prefix together with KMS keys")
    if (
        not limits
        and opened.retriever.uses_data_keys
        and not hasattr(arrow_encryption(), "create_decryption_properties")
    ):
        limits.append(f"version {pa.__version__} has no data keys that the caller manages")
    if not limits and opened.retriever.key_materials is not None and not takes_file_path():
        limits.append(f"version {pa.__version__} does not read external key material")
    return limits


def make_decryption_properties(
    opened: OpenedFile, columns: Sequence[str] | None = None
) -> pq.FileDecryptionProperties:
    """Make decryption properties for one file; `columns` will be read, or None where that is not known yet.

    Raises:
        UnsupportedByArrowError: pyarrow cannot decrypt the file by itself.
        ColumnAccessDeniedError: One of `columns` cannot be read.
    """
    limits = arrow_read_limits(opened)
    if limits:
        raise UnsupportedByArrowError(limits, hint="Keytools.read_table can read it.")
    from parquet_keytools.arrow.arrow_kms import READING_CONNECTION, AnsweringKms, pe

    if columns is not None:
        columns = list_of_names("columns", columns)
        for name in columns:
            # What is read instead of a name that means nothing would not have been looked at.
            if not opened.columns_named(name):
                raise ValueError(f"{opened.location} has no column {name!r}")
        opened.refuse_denied(columns)
    if opened.retriever.uses_data_keys:
        envelope = opened.footer.envelope
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        return pe.create_decryption_properties(
            dek.reveal(), aad_prefix=opened.footer.aad_prefix if envelope.supply_aad_prefix else None
        )
    folder = MaterialFolder()
    if opened.retriever.key_materials is not None:
        name = key_material_location(opened.location).name
        folder.contents[name] = serialise_key_materials(opened.retriever.key_materials)
    # It answers from the keys of the opened file, and nothing else.
    kms = AnsweringKms(opened.kms_keys.answers, _RefusalBeforeArrow(opened, columns).check)
    place = (opened.location.name, pafs.PyFileSystem(folder)) if takes_file_path() else ()
    return pe.CryptoFactory(lambda _: kms).file_decryption_properties(
        pe.KmsConnectionConfig(**READING_CONNECTION), pe.DecryptionConfiguration(cache_lifetime=FOREVER), *place
    )


class _RefusalBeforeArrow:
    """Refuses columns that cannot be read when Arrow opens the file, before its threads work on it.

    An exception for the key of a column can abort or hang the process: a filter on such a column does, and so
    does a look at its metadata. When Arrow asks for the footer key, the thread of the caller waits for it, and
    an exception arrives whole. pyarrow does not say there what it will read. `pyarrow.parquet.read_table` has
    it in its arguments, which are looked up; for all other ways to read, the columns have to be named before.
    """

    def __init__(self, opened: OpenedFile, columns: Sequence[str] | None) -> None:
        self._opened = opened
        self._named = columns is not None
        self._passed = False
        self._footer_key: tuple[str, str] | None = None
        if opened.denied and (material := opened.retriever.material(opened.footer.key_metadata)) is not None:
            self._footer_key = material.kms_wrapped_key, material.master_key_id

    def check(self, wrapped_key: str, master_key_id: str, is_thread_of_arrow: bool) -> None:
        """Raise if what Arrow is about to read cannot be read; the keys of columns are asked for later.

        With double wrapping Arrow keeps the KEK of the footer, and asks for it once only: of further reads with
        the same properties nothing is known here.
        """
        if not self._opened.denied or self._footer_key != (wrapped_key, master_key_id):
            return
        arguments = _arguments_of_read_table()
        if arguments is not None:
            self._opened.refuse_denied(_columns_read(self._opened, arguments))
            refuse_denied_filter(self._opened, arguments["filters"])
        elif not self._named and not (self._passed and is_thread_of_arrow):
            self._opened.refuse_denied(None, hint=_NAME_COLUMNS)
        self._passed = True


_LOOKED_AT = ("columns", "filters", "use_pandas_metadata")
"""Arguments of `pyarrow.parquet.read_table` that say what it will read."""


def _arguments_of_read_table() -> Mapping[str, Any] | None:
    """Return the arguments of the `pyarrow.parquet.read_table` that is running on this thread, if one is.

    A pyarrow whose `read_table` is another function than we know is one of the other ways to read: columns have to
    be named then, and nothing is read that cannot be. A test fails first (tests/unit/arrow).
    """
    code = getattr(inspect.unwrap(pq.read_table), "__code__", None)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or not set(frame.f_locals) >= set(_LOOKED_AT):
        return None
    return {name: frame.f_locals[name] for name in _LOOKED_AT}


def _columns_read(opened: OpenedFile, arguments: Mapping[str, Any]) -> Sequence[str] | None:
    """Return what a `read_table` will read: with `use_pandas_metadata`, also the columns of the index."""
    columns: Sequence[str] | None = arguments["columns"]
    if columns is None or not arguments["use_pandas_metadata"]:
        return columns
    texts = [entry.value for entry in opened.footer.metadata.key_value_metadata or [] if entry.key == "pandas"]
    try:
        return [*columns, *pandas_index({b"pandas": (texts[0] or "").encode()} if texts else None)]
    except (ValueError, TypeError, KeyError):
        return None


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
