"""Mutants of valid files go through inspect, verify and decrypt.

No mutant passes as the original file, none ends in anything but our errors, none takes long or much memory. The
environment variable MUTANTS sets their number; `make soak` uses 100,000. A writer with the keys makes
some more: all of their modules are authentic, with any content.
"""

from __future__ import annotations

import base64
import random
import resource
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from key_services import key_service
from memory_files import MemorySink, MemorySource, decrypt_source
from soak import how_many
from vector_kit.good_files import good_vectors
from vector_kit.sealed_file import Module, Place
from vector_kit.vector import MASTER_KEYS, SealedFile, recipe
from vector_kit.write_kit import data_keys

from parquet_keytools import Keytools
from parquet_keytools.cli.conformance_report import render_inspection
from parquet_keytools.conformance.file_keys import Expectation, MaterialFinder
from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.conformance.inspection import inspect_source
from parquet_keytools.conformance.report import FileReport, Outcome, Verdict
from parquet_keytools.conformance.verification import finder_of
from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.format.thrift import Struct, ThriftList, WireType, read_struct
from parquet_keytools.storage.locations import FileLocation

MUTANTS = how_many(100, 100_000)
BASES = ("column-keys", "uniform", "plaintext-footer", "v2-pages", "nested", "zstd", "double-wrapping", "ctr-crc")
"""Every byte of these is authenticated, or covered by a CRC, or checked by a rule."""

_MAX_SECONDS = 1.0
_MAX_MEMORY_BYTES = 200_000_000


@dataclass
class Base:
    """A valid file, and the facts known about it."""

    data: bytes
    keytools: Keytools
    report: FileReport
    decrypted: bytes


def finder(keytools: Keytools) -> MaterialFinder:
    found = finder_of(key_service(keytools), FileLocation.resolve("/nowhere/mutant.parquet"))
    assert found is not None
    return found


def decrypted(data: bytes, keytools: Keytools) -> bytes:
    sink = MemorySink()
    decrypt_source(MemorySource(data), sink, finder(keytools), threads=1)
    return sink.contents()


def verified(data: bytes, keytools: Keytools) -> FileReport:
    return verify_source(MemorySource(data), finder(keytools))[0]


def kit_keytools() -> Keytools:
    encoded = {key: base64.b64encode(value).decode() for key, value in MASTER_KEYS.items()}
    keys = {key: base64.b64encode(value).decode() for key, value in data_keys().items()}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": encoded}, "data_keys": keys}
    return Keytools.from_mapping(document)


def base(name: str) -> Base:
    vector = next(vector for vector in good_vectors() if vector.name == f"good/{name}.parquet")
    (data,) = vector.contents().values()
    keytools = kit_keytools()
    return Base(data, keytools, verified(data, keytools), decrypted(data, keytools))


def mutant(data: bytes, generator: random.Random) -> bytes:
    """Return a mutant: bits, bytes, lengths, truncations, splices; half of them in the footer."""
    length = len(data)
    footer = struct.unpack("<I", data[-8:-4])[0] + 8
    at = length - 1 - generator.randrange(footer) if generator.random() < 0.5 else generator.randrange(length)
    kind = generator.randrange(8)
    if kind < 3:
        out = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            out[(at + generator.randrange(16)) % length] ^= 1 << generator.randrange(8)
        return bytes(out)
    if kind == 3:
        return data[:at] + bytes([generator.randrange(256)]) + data[at + 1 :]
    if kind == 4:
        number = generator.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, length, generator.randrange(1 << 32)))
        return data[:at] + struct.pack("<I", number) + data[at + 4 :]
    if kind == 5:
        return data[:at]
    size, other = generator.randrange(1, 200), generator.randrange(length)
    if kind == 6:
        return data[:at] + data[other : other + size] + data[at + size :]
    return data[:at] + (data[other : other + size] if generator.random() < 0.5 else b"") + data[at + 1 :]


def shape(report: FileReport) -> object:
    """Return the contents of a report, except for the number of modules."""
    return (
        report.verdict,
        [(result.rule.id, result.outcome, result.reasons) for result in report.rules],
        [finding.message for finding in report.findings],
    )


def check(original: Base, data: bytes) -> None:
    inspect_source(MemorySource(data), finder(original.keytools))
    inspect_source(MemorySource(data))
    report = verified(data, original.keytools)
    assert shape(report) != shape(original.report), "verify takes the mutant for the file that it was"
    try:
        found = decrypted(data, original.keytools)
    except KeytoolsError:
        return
    if found == original.decrypted:
        return
    broken = {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}
    # No key authenticates the algorithm beside an encrypted footer.
    assert broken & {"algorithm-of-pages", "ctr"}, "decrypt gives other data and does not say so"
    assert report.verdict is Verdict.VIOLATED


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BASES)
def test_mutants(name: str, tmp_path: Path) -> None:
    original = base(name)
    assert original.report.conforms
    generator = random.Random(f"mutants of {name}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    for number in range(MUTANTS // len(BASES)):
        data = mutant(original.data, generator)
        if data == original.data:
            continue
        started = time.thread_time()
        try:
            check(original, data)
        except Exception as error:
            path = tmp_path / f"{name}.{number}.parquet"
            path.write_bytes(data)
            raise AssertionError(f"mutant {number} of {name}, kept in {path}: {error!r}") from error
        slowest = max(slowest, time.thread_time() - started)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert slowest < 4 * _MAX_SECONDS, f"one mutant took {slowest:.2f} seconds for all four"
    assert grown < _MAX_MEMORY_BYTES, f"memory grew by {grown:,} bytes"


# --- Writers with the keys ---------------------------------------------------------------------------------

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    4,
    12,
    16,
    28,
    29,
    32,
    100,
    2**15,
    2**16,
    2**31 - 1,
    -(2**31),
    2**62,
    2**63 - 1,
    -(2**63),
)
_BITS = {WireType.I16: 16, WireType.I32: 32, WireType.I64: 64}
_OTHERS = (
    (WireType.BINARY, b"x"),
    (WireType.I32, 5),
    (WireType.TRUE, None),
    (WireType.STRUCT, Struct()),
    (WireType.LIST, ThriftList(WireType.I32, [1, 2])),
    (WireType.DOUBLE, bytes(8)),
)


class HostileWriter:
    """Changes one or two fields, or bytes, of one module or structure of a file before they are sealed."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(f"hostile writer {seed}")
        self.modules_before = self.generator.randrange(120)
        self.where = self.generator.choice(("module", "module", "footer", "crypto", "page header", "sealed"))

    def file(self) -> bytes:
        generator = self.generator
        hooks: dict[str, Any] = {
            "module": self.module,
            "footer": lambda footer: self.where == "footer" and self.change(footer.struct),
            "crypto": lambda crypto: self.where == "crypto" and self.change(crypto.struct),
            "page_header": self.page_header,
            "sealed": self.sealed,
        }
        kind: dict[str, Any] = generator.choice(
            ({}, {"plaintext_footer": True}, {"is_ctr": True}, {"columns": {}})
        )
        plain = generator.choice(({}, {"v2": True}, {"v2": True, "compression": "snappy"}, {"nested": True}))
        return SealedFile(recipe(1, **hooks, **kind), plain).make()

    def its_turn(self) -> bool:
        self.modules_before -= 1
        return self.modules_before == 0

    def module(self, module: Module) -> None:
        if self.where == "module" and self.its_turn():
            module.plaintext = self.changed_bytes(module.plaintext)

    def page_header(self, place: Place, header: object) -> None:
        if self.where == "page header" and self.generator.random() < 0.1:
            self.change(header.struct)  # type: ignore[attr-defined]

    def sealed(self, place: Place, data: bytes) -> bytes:
        return self.changed_bytes(data) if self.where == "sealed" and self.its_turn() else data

    def changed_bytes(self, data: bytes) -> bytes:
        generator = self.generator
        if generator.random() < 0.8:
            try:
                struct_of, end = read_struct(data)
            except ParquetFormatError:
                pass
            else:
                self.change(struct_of)
                return struct_of.as_bytes() + data[end:]
        at = generator.randrange(len(data) + 1)
        return generator.choice((data[:at], data[:at] + b"\0" + data[at + 1 :], data + bytes(at), b""))

    def change(self, root: Struct) -> None:
        fields = list(_fields(root))
        for _ in range(self.generator.choice((1, 1, 2)) if fields else 0):
            holder, field_id = self.generator.choice(fields)
            if field_id in holder.fields:
                self.change_field(holder, field_id)

    def change_field(self, holder: Struct, field_id: int) -> None:
        generator = self.generator
        wire_type, value = holder.fields[field_id]
        kind = generator.randrange(8)
        if kind == 0:
            holder.set_entry(field_id, None)
        elif kind == 1:
            holder.set_entry(field_id, generator.choice(_OTHERS))
        elif wire_type in _BITS:
            most = (1 << _BITS[wire_type] - 1) - 1
            number = generator.choice((*_NUMBERS, value + 1, value - 1, value * 2))
            holder.set_entry(field_id, (wire_type, number if -most <= number <= most else most))
        elif wire_type is WireType.BINARY:
            other = generator.choice((b"", value[:-1], value + b"\0", b"\xff" * 5))
            holder.set_entry(field_id, (wire_type, other))
        elif wire_type is WireType.LIST:
            elements = list(value.elements)
            elements = generator.choice(([], elements[:-1], elements + elements[:1], elements[::-1]))
            holder.set_entry(field_id, (wire_type, ThriftList(value.element_type, elements)))


def _fields(root: Struct) -> Iterator[tuple[Struct, int]]:
    for field_id, (_, value) in root.fields.items():
        yield root, field_id
        for inner in value.elements if isinstance(value, ThriftList) else [value]:
            if isinstance(inner, Struct):
                yield from _fields(inner)


@pytest.mark.timeout(3600)
def test_files_of_hostile_writers(tmp_path: Path) -> None:
    """Nothing that a writer with keys can put into a file stops `verify` or `inspect`, or makes them slow."""
    keytools = kit_keytools()
    slowest = 0.0
    for seed in range(MUTANTS // 10):
        try:
            data = HostileWriter(seed).file()
        except (KeytoolsError, AttributeError, TypeError, ValueError):
            continue  # The sealer itself could not continue with it.
        started = time.thread_time()
        try:
            for found in (finder(keytools), None):
                for expectation in (Expectation(), Expectation(allow_plaintext=True)):
                    verify_source(MemorySource(data), found, expectation)
                render_inspection(inspect_source(MemorySource(data), found))
        except Exception as error:
            path = tmp_path / f"hostile.{seed}.parquet"
            path.write_bytes(data)
            raise AssertionError(f"hostile file {seed}, kept in {path}: {error!r}") from error
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < 6 * _MAX_SECONDS, f"one file took {slowest:.2f} seconds for all six"
