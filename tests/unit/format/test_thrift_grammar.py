"""The expression for column metadata finds what is found field by field, and nothing where that is an error."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format import thrift_grammar, thrift_skim
from parquet_keytools.format.thrift_compact import read_struct
from parquet_keytools.format.thrift_grammar import COLUMN_GROUPS, usual
from parquet_keytools.format.thrift_outline import read_outline
from parquet_keytools.format.thrift_skim import Skimmer, Spans
from parquet_keytools.format.thrift_values import (
    Changes,
    IntegerFields,
    Struct,
    ThriftList,
    WireType,
    write_struct,
)

I32, I64, BINARY, LIST, STRUCT = (
    WireType.I32,
    WireType.I64,
    WireType.BINARY,
    WireType.LIST,
    WireType.STRUCT,
)

REQUIRED: dict[int, tuple[WireType, Any]] = {
    1: (I32, 5),
    2: (LIST, ThriftList(I32, [0, 3, 8])),
    3: (LIST, ThriftList(BINARY, [b"point", b"x"])),
    4: (I32, 6),
    5: (I64, 1 << 40),
    6: (I64, 300),
    7: (I64, 200_000),
    9: (I64, 4),
}
OPTIONAL: dict[int, tuple[WireType, Any]] = {
    8: (LIST, ThriftList(STRUCT, [Struct({1: (BINARY, b"key")})])),
    10: (I64, 77),
    11: (I64, 9_000_000),
    12: (STRUCT, Struct({3: (I64, 0), 5: (BINARY, b"zz"), 6: (BINARY, b"aa"), 7: (WireType.TRUE, None)})),
    13: (LIST, ThriftList(STRUCT, [Struct({1: (I32, 0), 2: (I32, 3), 3: (I32, 1)})])),
    14: (I64, -5),
    15: (I32, 47),
    16: (STRUCT, Struct({1: (I64, 8), 2: (LIST, ThriftList(I64, [1, 2, 3]))})),
    17: (STRUCT, Struct()),
    300: (I64, 1),
}


def by_field(data: bytes) -> tuple[Spans, int]:
    """Walk through a struct without an expression."""
    skimmer = Skimmer(data, 0, uses_expression=False)
    spans: Spans = {}
    skimmer.struct_fields(0, spans)
    return spans, skimmer.offset


def by_expression(data: bytes) -> tuple[Spans, int] | None:
    """Return what the expression finds; None where it does not match."""
    found = usual()[2](data, 0)
    if found is None:
        return None
    places = {
        field_id: (wire_type, *found.span(group), None) for field_id, (group, wire_type) in COLUMN_GROUPS.items()
    }
    return {field_id: place for field_id, place in places.items() if place[1] >= 0}, found.end()


def subsets() -> list[bytes]:
    """Return metadata with every choice of optional fields."""
    return [
        write_struct(Struct(dict(sorted((REQUIRED | {i: OPTIONAL[i] for i in chosen}).items()))))
        for count in range(len(OPTIONAL) + 1)
        for chosen in itertools.combinations(OPTIONAL, count)
    ]


def test_every_choice_of_fields() -> None:
    matched = 0
    for data in subsets():
        found = by_expression(data + b"tail")
        if found is not None:
            matched += 1
            assert found == by_field(data + b"tail")
    # Fields 11, 12, 13, 14 with or without 15, and 16, in all combinations.
    assert matched == 2 * 2 * 2 * 3 * 2


def test_changed_bytes() -> None:
    generator = random.Random(7)
    matched = 0
    for data in subsets():
        for _ in range(20):
            changed = bytearray(data)
            for _ in range(generator.randint(1, 2)):
                changed[generator.randrange(len(changed))] = generator.choice(
                    (0, 1, 0x1C, 0x7F, 0x80, 0xFF, 0x26, 0x16)
                )
            found = by_expression(bytes(changed))
            if found is not None:
                matched += 1
                assert found == by_field(bytes(changed))
    assert matched > 100


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_cut_off(cut: int) -> None:
    data = write_struct(Struct(REQUIRED))
    assert by_expression(data[:-cut]) is None
    with pytest.raises(ParquetFormatError, match=r"ends before it is complete|does not fit"):
        read_outline(data[:-cut], 0, 0)


def test_fields_are_read_and_set_as_in_other_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift_skim, "_MANY_BYTES", 0)
    for data in subsets():
        if by_expression(data) is None:
            continue
        outline, end = read_outline(b"\0" * 3 + data + b"tail", 3, 0)
        general = Struct(
            {field: entry for field, entry in (REQUIRED | OPTIONAL).items() if field in by_field(data)[0]}
        )
        assert end == 3 + len(data)
        assert outline.types() == general.types()
        wanted = IntegerFields(*((field, wire_type) for field in range(1, 18) for wire_type in (I32, I64)))
        assert outline.numbers(wanted) == general.numbers(wanted)
        for field in range(1, 18):
            assert outline.entry_bytes(field) == general.entry_bytes(field)
        copied = outline.copy()
        for field, entry in ((7, (I64, 12)), (9, (I64, 1 << 33)), (11, None), (14, (I64, 3)), (10, (I64, 2))):
            copied.set_entry(field, entry)
            general.set_entry(field, entry)
        assert copied.as_bytes() == write_struct(general)
        assert outline.as_bytes() == data
        assert outline.fields.keys() == by_field(data)[0].keys()


CHANGES: tuple[Changes, ...] = (
    {},
    {7: (I64, 12), 9: (I64, 1 << 33)},
    {9: (I64, 5), 7: (I64, 12), 11: (I64, 4)},
    {7: (I64, -3), 11: None},
    {11: None, 12: None, 8: None, 40: None},
    {14: (I64, 1), 15: (I32, 2)},
    {7: (I32, 1)},
    {10: (I64, 2), 300: (I64, 5)},
    {2: None, 3: None, 18: (WireType.TRUE, None), 400: (BINARY, b"x" * 200)},
    {3: (STRUCT, Struct({1: (I32, 4)}))},
    {-7: (I64, 1)},
)


@pytest.mark.parametrize("many_bytes", [0, 1 << 60])
def test_changed_bytes_are_those_of_a_changed_struct(monkeypatch: pytest.MonkeyPatch, many_bytes: int) -> None:
    monkeypatch.setattr(thrift_skim, "_MANY_BYTES", many_bytes)
    generator = random.Random(3)
    for data in subsets()[::9]:
        general, _ = read_struct(data)
        fields = list(general.fields.items())
        generator.shuffle(fields)
        for fields_in_some_order in (general.fields, dict(fields)):
            written = write_struct(Struct(fields_in_some_order))
            for changes in CHANGES:
                changed = Struct(dict(fields_in_some_order))
                for field_id, entry in sorted(changes.items()):
                    changed.set_entry(field_id, entry)
                outline, _ = read_outline(written, 0, 0)
                assert outline.changed_bytes(changes) == write_struct(changed)
                assert outline.as_bytes() == written
                for field_id, entry in changes.items():
                    outline.set_entry(field_id, entry)
                assert outline.as_bytes() == outline.changed_bytes({}) == write_struct(changed)
                assert Struct(fields_in_some_order).changed_bytes(changes) == write_struct(changed)


def test_a_struct_may_be_given_as_its_bytes() -> None:
    inner = Struct({1: (I32, 4)})
    outline, _ = read_outline(write_struct(Struct(REQUIRED)), 0, 0)
    as_struct = outline.changed_bytes({20: (STRUCT, inner), 21: (LIST, ThriftList(STRUCT, [inner, inner]))})
    written = write_struct(inner)
    for elements in ([written, written], [inner, written]):
        entry = (LIST, ThriftList(STRUCT, elements))
        assert outline.changed_bytes({20: (STRUCT, written), 21: entry}) == as_struct


@pytest.fixture
def not_compiled() -> Iterator[None]:
    """As in a process that has read nothing; threads take turns all the time."""
    interval = sys.getswitchinterval()
    usual.cache_clear()
    thrift_grammar._compiled.cache_clear()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_that_come_together_compile_once(monkeypatch: pytest.MonkeyPatch, not_compiled: None) -> None:
    compiled: list[object] = []
    together = threading.Barrier(4)

    class Compiling:
        DOTALL = re.DOTALL

        @staticmethod
        def compile(expression: bytes, flags: int) -> re.Pattern[bytes]:
            compiled.append(expression)
            return re.compile(expression, flags)

    def come(_: int) -> object:
        together.wait(60)
        return usual()

    monkeypatch.setattr(thrift_grammar, "re", Compiling)
    re.purge()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(come, range(4)))
    assert len(compiled) == len(usual()) == 5
    assert all(each is found[0] for each in found)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(not_compiled: None) -> None:
    with thrift_grammar._lock:  # As the thread that compiles has it.
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if len(usual()) == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
