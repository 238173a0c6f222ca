"""What the configuration says under `denied_columns`, for readers of pyarrow."""

from __future__ import annotations

import pyarrow as pa

from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.files.digested_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile


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
