"""pyarrow's decryption properties for one file whose keys are at hand."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.delegating_filesystem import MaterialFolder
from parquet_keytools.arrow.encryption_properties import NO_ARROW_ENCRYPTION, has_arrow_encryption
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import UnsupportedByArrowError
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.keys.material_store import serialise_key_materials
from parquet_keytools.storage.locations import key_material_location

if TYPE_CHECKING:
    import pyarrow.parquet.encryption as pe

FOREVER = timedelta(days=36_500)
_NAME_COLUMNS = "Name the columns that you need: decryption_properties(path, columns=[...])."


def arrow_read_limits(opened: OpenedFile) -> list[str]:
    """Return why pyarrow cannot decrypt a file by itself, a phrase each; empty if it can."""
    limits = [] if has_arrow_encryption() else [NO_ARROW_ENCRYPTION]
    if opened.digests is not None:
        limits.append("it shows values, and `denied_columns: hash` is set")
    has_own_keys = any(column.encryption is ColumnEncryption.COLUMN_KEY for column in opened.footer.columns)
    if opened.retriever.uses_data_keys and (has_own_keys or opened.kms_keys.answers):
        limits.append("it has no data keys for single columns")
    if opened.footer.envelope.supply_aad_prefix and not opened.retriever.uses_data_keys:
        limits.append("it has no AAD prefix together with KMS keys")
    return limits


def make_decryption_properties(
    opened: OpenedFile, columns: Sequence[str] | None = None
) -> pq.FileDecryptionProperties:
    """Make decryption properties for one file.

    Args:
        opened: The file.
        columns: The columns that will be read; None where that is not known yet.

    Raises:
        UnsupportedByArrowError: pyarrow cannot decrypt the file by itself.
        ColumnAccessDeniedError: One of `columns` cannot be read.
    """
    limits = arrow_read_limits(opened)
    if limits:
        raise UnsupportedByArrowError(limits, hint="Keytools.read_table can read it.")
    from parquet_keytools.arrow.arrow_kms import READING_CONNECTION, pe

    if columns is not None:
        _check_names(opened, columns)
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
    return decryption_factory(opened, columns).file_decryption_properties(
        pe.KmsConnectionConfig(**READING_CONNECTION),
        pe.DecryptionConfiguration(cache_lifetime=FOREVER),
        opened.location.name,
        pafs.PyFileSystem(folder),
    )


def _check_names(opened: OpenedFile, columns: Sequence[str]) -> None:
    """Refuse names that mean nothing: what is read instead would not have been looked at."""
    if isinstance(columns, str):
        raise TypeError("columns is a sequence of names, not one name")
    for name in columns:
        if not opened.columns_named(name):
            raise ValueError(f"{opened.location} has no column {name!r}")


def decryption_factory(opened: OpenedFile, columns: Sequence[str] | None) -> pe.CryptoFactory:
    """Return a CryptoFactory that answers from the keys of the opened file, and nothing else."""
    from parquet_keytools.arrow.arrow_kms import AnsweringKms, pe

    kms = AnsweringKms(opened.kms_keys.answers, _RefusalBeforeArrow(opened, columns).check)
    return pe.CryptoFactory(lambda _: kms)


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
    """Return the columns of the index of a DataFrame that was written.

    Args:
        metadata: Of its schema.

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

    Args:
        opened: The file.
        filters: What looks at columns.
        has_stand_ins: Whether something else is shown in place of refused columns; filters then look at that.
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
