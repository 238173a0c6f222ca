"""Expressions for what most of a footer is: column chunks as writers write them, in Thrift's compact protocol.

They match nothing that is not a struct or a list, and a part of what is: fields in their order, no long texts or
lists. No repetition is tried again, so that matching takes time proportional to the bytes.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable

from parquet_keytools.format.thrift_values import IntegerFields, WireType
from parquet_keytools.runtime.operating_system import register_at_fork

Match = Callable[[bytes, int], re.Match[bytes] | None]

COLUMN_FIELDS = (
    (1, WireType.I32),
    (2, WireType.LIST),
    (3, WireType.LIST),
    (4, WireType.I32),
    (5, WireType.I64),
    (6, WireType.I64),
    (7, WireType.I64),
    (9, WireType.I64),
    (11, WireType.I64),
    (12, WireType.STRUCT),
    (13, WireType.LIST),
    (14, WireType.I64),
    (15, WireType.I32),
    (16, WireType.STRUCT),
)
"""Ids and types of the fields of column metadata: the groups of the third expression of `usual`, in order."""

ALWAYS_MATCHED = dict(COLUMN_FIELDS[:8])
"""Ids and types of those of them that every struct has that the expression matches."""

COLUMN_GROUPS = {field_id: (group, wire_type) for group, (field_id, wire_type) in enumerate(COLUMN_FIELDS, 1)}
"""Id of such a field -> its group, and its type."""


def column_groups(fields: IntegerFields) -> tuple[int, ...]:
    """Return the groups of fields, 0 where such a struct never has one of that type; and keep them there."""
    found = [(COLUMN_GROUPS.get(field_id, (0, None)), wire_type) for field_id, wire_type in fields.types]
    fields.groups = tuple(group if its_type is wire_type else 0 for (group, its_type), wire_type in found)
    return fields.groups


CRYPTO_GROUP = 4

_lock = threading.Lock()


def _start_anew() -> None:
    """In a forked child: the thread that compiled is not there."""
    global _lock
    _lock = threading.Lock()


register_at_fork(after_in_child=_start_anew)


@functools.cache
def usual() -> tuple[Match, Match, Match, Match, Match]:
    """Return what matches structs and lists.

    Returns:
        What matches the structs of usual footers, down to a column chunk; what matches lists in them; what matches
        structs with the fields of column metadata and no other, whose groups are the values; what matches a column
        chunk up to the value of its crypto metadata, and then has `CRYPTO_GROUP`, or up to its end; and what
        matches crypto metadata for the footer key, or up to the length of the key metadata of another key, and
        then has group 1.
    """
    # Threads that come together would each compile them, a tenth of a second of the processor each.
    with _lock:
        return _compiled()


@functools.cache
def _compiled() -> tuple[Match, Match, Match, Match, Match]:
    """Compile what `usual` returns."""

    def headers(*codes: int) -> bytes:
        return b"[" + b"".join(b"\\x%02x" % (delta << 4 | code) for code in codes for delta in range(1, 16)) + b"]"

    def texts(lengths: int) -> bytes:
        groups = []
        for first in range(0, lengths, 16):
            each = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(first, first + 16))
            groups.append(b"(?=[\\x%02x-\\x%02x])(?:%s)" % (first, first + 15, each))
        return b"(?:" + b"|".join(groups) + b")"

    def lists(code: int, element: bytes, most: int) -> bytes:
        return b"|".join(b"\\x%02x(?:%s){%d}" % (count << 4 | code, element, count) for count in range(most + 1))

    def struct_of(*fields: bytes) -> bytes:
        # Not as a possessive repetition, which Python before 3.11.5 matches wrongly (python/cpython#106052).
        return b"(?>(?:" + b"|".join(fields) + rb"){0,32})\x00"

    i32 = rb"(?:[\x80-\xff]{0,3}+[\x00-\x7f]|[\x80-\xff]{4}[\x00-\x0f])"
    i64 = rb"(?:[\x80-\xff]{0,8}+[\x00-\x7f]|[\x80-\xff]{9}[\x00\x01])"
    numbers = b"|".join((headers(5) + i32, headers(6) + i64, headers(1, 2)))
    leaves = numbers + b"|" + headers(8) + texts(128)
    number_lists = lists(5, i32, 14) + b"|" + lists(6, i64, 14)
    other_lists = lists(8, texts(48), 4) + b"|" + lists(12, struct_of(numbers), 6)
    usual_list = b"(?:" + number_lists + b"|" + other_lists + b")"
    every_list = headers(9) + usual_list
    statistics = struct_of(leaves, headers(9) + b"(?:" + number_lists + b")")
    column_metadata = struct_of(leaves, every_list, headers(12) + statistics)
    chunk = struct_of(leaves, every_list, headers(12) + column_metadata)
    # The header of a field depends on which field was the last one; groups 9 to 13 are those that may be missing.
    column_fields = (
        (rb"\x15(" + i32 + rb")\x19(" + usual_list + rb")\x19(" + usual_list + rb")\x15(" + i32 + b")")
        + (rb"\x16(" + i64 + rb")\x16(" + i64 + rb")\x16(" + i64 + rb")\x26(" + i64 + b")")
        + (rb"(?:\x26(" + i64 + b"))?")
        + (rb"(?:(?(9)\x1c|\x3c)(" + statistics + b"))?")
        + (rb"(?:(?(10)\x19|(?(9)\x29|\x49))(" + usual_list + b"))?")
        + (rb"(?:(?(11)\x16|(?(10)\x26|(?(9)\x36|\x56)))(" + i64 + b"))?")
        + (rb"(?:(?(12)\x15|(?!))(" + i32 + b"))?")
        + (rb"(?:(?(13)\x1c|(?(12)\x2c|(?(11)\x3c|(?(10)\x4c|(?(9)\x5c|\x7c)))))(" + column_metadata + rb"))?\x00")
    )
    # Which fields come before the crypto metadata: metadata (1), offset index (2), column index (3).
    chunk_head = (
        (rb"\x26" + i64 + rb"(\x1c" + column_metadata + b")?")
        + (rb"((?(1)\x16|\x26)" + i64 + rb"\x15" + i32 + b")?")
        + (rb"((?(2)\x16|(?(1)\x36|\x46))" + i64 + rb"\x15" + i32 + b")?")
        + rb"((?(3)\x1c|(?(2)\x3c|(?(1)\x5c|\x6c))))?"
    )
    crypto = rb"\x1c\x00\x00|\x2c\x19(?:" + lists(8, texts(128), 4) + rb")(\x18)"
    return (
        re.compile(chunk, re.DOTALL).match,
        re.compile(usual_list, re.DOTALL).match,
        re.compile(column_fields, re.DOTALL).match,
        re.compile(chunk_head, re.DOTALL).match,
        re.compile(crypto, re.DOTALL).match,
    )
