"""Mutants of valid files go through inspect, verify and decrypt.

None is taken for the file that it was, none ends in anything but our errors, none takes long or much memory. The
environment variable MUTANTS says how many there are; `make mutants` takes 100,000.
"""

from __future__ import annotations

import base64
import os
import random
import resource
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from memory_files import MemorySink, MemorySource
from vector_kit.good_files import good_vectors
from vector_kit.vector import MASTER_KEYS
from vector_kit.write_kit import data_keys

from parquet_keytools import Keytools
from parquet_keytools.conformance.file_keys import MaterialFinder
from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.conformance.findings import Outcome
from parquet_keytools.conformance.inspector import inspect_source
from parquet_keytools.conformance.report import FileReport, Verdict
from parquet_keytools.encryption.file_decryptor import decrypt_file
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.file_verification import finder_of
from parquet_keytools.storage import FileLocation

MUTANTS = int(os.environ.get("MUTANTS", "3000"))
BASES = ("column-keys", "uniform", "plaintext-footer", "v2-pages", "nested", "zstd", "double-wrapping", "ctr-crc")
"""Every byte of these is authenticated, or covered by a CRC, or stands where the rules look at it."""

_MAX_SECONDS = 1.0
_MAX_MEMORY_BYTES = 200_000_000


@dataclass
class Base:
    """A valid file, and what is known of it."""

    data: bytes
    keytools: Keytools
    report: FileReport
    decrypted: bytes


def finder(keytools: Keytools) -> MaterialFinder:
    found = finder_of(keytools._keys, FileLocation.resolve("/nowhere/mutant.parquet"))
    assert found is not None
    return found


def decrypted(data: bytes, keytools: Keytools) -> bytes:
    sink = MemorySink()
    decrypt_file(MemorySource(data), sink, finder(keytools), threads=1)
    return sink.contents()


def verified(data: bytes, keytools: Keytools) -> FileReport:
    return verify_source(MemorySource(data), finder(keytools), threads=1)[0]


def base(name: str) -> Base:
    vector = next(vector for vector in good_vectors() if vector.name == f"good/{name}.parquet")
    (data,) = vector.contents().values()
    encoded = {key: base64.b64encode(value).decode() for key, value in MASTER_KEYS.items()}
    keys = {key: base64.b64encode(value).decode() for key, value in data_keys().items()}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": encoded}, "data_keys": keys}
    keytools = Keytools.from_mapping(document)
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
    """Return all that a report says, apart from how many modules there are."""
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
