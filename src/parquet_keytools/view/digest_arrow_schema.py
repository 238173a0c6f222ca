"""Arrow's schema of a file in which columns are shown as digests; some readers compare it with the file's own."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.view.digest_kinds import DigestKind


def digest_arrow_schema(value: str, leaves: Sequence[LeafColumn], kinds: Mapping[int, DigestKind]) -> str | None:
    """Return the entry with types of digests, or None where it does not fit the columns.

    Args:
        value: The entry of the file.
        leaves: The leaf columns of the file.
        kinds: Leaf ordinal -> what it holds in the file, for columns that are shown as digests.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except (pa.ArrowException, ValueError, OSError):
        return None
    fields = []
    for position, field in enumerate(schema):
        ordinals = [leaf.ordinal for leaf in leaves if leaf.top_level_position == position]
        if not kinds.keys().isdisjoint(ordinals):
            rest = iter(ordinals)
            try:
                field = field.with_type(_with_digests(field.type, rest, kinds))
            except StopIteration:
                return None
            if next(rest, None) is not None:
                return None
        fields.append(field)
    return base64.b64encode(pa.schema(fields, schema.metadata).serialize()).decode()


def _with_digests(of: pa.DataType, ordinals: Iterator[int], kinds: Mapping[int, DigestKind]) -> pa.DataType:
    """Return a type with those of digests in its leaves, which are taken from the ordinals one by one."""
    if isinstance(of, pa.BaseExtensionType):
        return _with_digests(of.storage_type, ordinals, kinds)
    if pa.types.is_struct(of):
        fields = [of.field(position) for position in range(of.num_fields)]
        return pa.struct([field.with_type(_with_digests(field.type, ordinals, kinds)) for field in fields])
    if pa.types.is_map(of):
        key = of.key_field.with_type(_with_digests(of.key_type, ordinals, kinds))
        return pa.map_(key, of.item_field.with_type(_with_digests(of.item_type, ordinals, kinds)))
    if pa.types.is_nested(of) and of.num_fields == 1:
        # Whatever kind of list: readers make the one that they want.
        return pa.list_(of.value_field.with_type(_with_digests(of.value_type, ordinals, kinds)))
    kind = kinds.get(next(ordinals))
    if kind is None:
        return of
    return pa.binary() if kind.is_binary else pa.string()
