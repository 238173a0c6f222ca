"""What does protection cost over pyarrow? Writes and reads the same tables three ways, in one run.

    python benchmarks/arrow_overhead.py [--megabytes 700] [--rounds 5] [--folder DIR]

Ways: pyarrow without encryption, pyarrow with its own CryptoFactory and a KMS client of a few lines, and
`Keytools.write_table` / `read_table`. Rounds alternate between them, so that a slow moment of the machine hits
all; the ratios are medians over rounds, against CryptoFactory.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import Keytools
from parquet_keytools.demo import read_flights

MASTER_KEYS = {name: os.urandom(16) for name in ("footer", "first", "second")}


class FewLinesKms(pe.KmsClient):
    """The client that a user of CryptoFactory would write for a test."""

    def __init__(self, config: pe.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        nonce = os.urandom(12)
        aad = master_key_identifier.encode()
        return base64.b64encode(nonce + AESGCM(MASTER_KEYS[master_key_identifier]).encrypt(nonce, key_bytes, aad))

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        data = base64.b64decode(wrapped_key)
        aad = master_key_identifier.encode()
        return AESGCM(MASTER_KEYS[master_key_identifier]).decrypt(data[:12], data[12:], aad)


def keytools_for(columns: list[str]) -> Keytools:
    """Return a Keytools that encrypts all columns, half of them under each of two master keys."""
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {
                "type": "in_memory",
                "keys": {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()},
            },
            "tables": {
                "t": {
                    "footer_key": "footer",
                    "column_keys": {"first": columns[::2], "second": columns[1::2]},
                    "unlisted_columns": "plaintext",
                }
            },
        }
    )


def ways(table: pa.Table, folder: Path) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return functions that write and read the table, for each way."""
    columns = table.column_names
    keytools = keytools_for(columns)
    factory = pe.CryptoFactory(FewLinesKms)
    connection = pe.KmsConnectionConfig()
    configuration = pe.EncryptionConfiguration(
        "footer", column_keys={"first": columns[::2], "second": columns[1::2]}
    )
    plain, theirs, ours = (str(folder / f"{name}.parquet") for name in ("plain", "theirs", "ours"))

    def write_theirs() -> None:
        properties = factory.file_encryption_properties(connection, configuration)
        pq.write_table(table, theirs, encryption_properties=properties)

    def read_theirs() -> pa.Table:
        return pq.read_table(theirs, decryption_properties=factory.file_decryption_properties(connection))

    return {
        "plain": (lambda: pq.write_table(table, plain), lambda: pq.read_table(plain)),
        "CryptoFactory": (write_theirs, read_theirs),
        "Keytools": (lambda: keytools.write_table(table, ours), lambda: keytools.read_table(ours)),
    }


def measure(table: pa.Table, rounds: int, folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each round, by way and by operation; the order of the ways changes every round."""
    seconds: dict[tuple[str, str], list[float]] = {}
    in_turn = list(ways(table, folder).items())
    for round_number in range(rounds + 1):
        in_turn = in_turn[1:] + in_turn[:1]
        for name, operations in in_turn:
            for operation, call in zip(("write", "read"), operations, strict=True):
                start = time.perf_counter()
                call()
                if round_number:  # The first is a warm-up.
                    seconds.setdefault((name, operation), []).append(time.perf_counter() - start)
    return seconds


def large_table(megabytes: int) -> pa.Table:
    """Return a table of floats, ints and strings of about this size in memory."""
    rows = megabytes * 1_000_000 // 48
    random = np.random.default_rng(1)
    strings = pa.array([f"passenger-{number:07d}" for number in range(5_000)])
    return pa.table(
        {
            "f1": random.random(rows),
            "f2": random.random(rows),
            "i1": random.integers(0, 1 << 40, rows),
            "i2": random.integers(0, 1_000, rows),
            "s1": strings.take(pa.array(random.integers(0, 5_000, rows))),
        }
    )


def report(title: str, table: pa.Table, rounds: int, folder: Path) -> None:
    """Measure one table and print the figures."""
    seconds = measure(table, rounds, folder)
    print(f"\n{title}: {table.num_rows:,} rows, {table.nbytes / 1e6:,.0f} MB in memory, {rounds} rounds")
    for operation in ("write", "read"):
        base = seconds["CryptoFactory", operation]
        for name in ("plain", "CryptoFactory", "Keytools"):
            these = seconds[name, operation]
            ratio = statistics.median(a / b for a, b in zip(these, base, strict=True))
            print(f"  {operation:5} {name:14} {statistics.median(these) * 1e3:10.1f} ms   ratio {ratio:5.2f}")
    for operation in ("write", "read"):
        added = statistics.median(seconds["Keytools", operation]) - statistics.median(seconds["plain", operation])
        print(f"  {operation}: Keytools adds {added * 1e3:.1f} ms to plain")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        table = read_flights()
        report("1,000 rows of the flights", table.slice(0, 1_000).combine_chunks(), arguments.rounds * 10, folder)
        report("flights", table, arguments.rounds, folder)
        report("large table", large_table(arguments.megabytes), arguments.rounds, folder)


if __name__ == "__main__":
    main()
