"""What do wide tables, many row groups and many files cost? Every row beside pyarrow, in one run.

    python benchmarks/metadata.py [--rounds 3] [--files 1000] [--only read,encrypt] [--cpu] [--folder DIR]
        [--json FILE]

pyarrow's side is its own `CryptoFactory` with a KMS client of a few lines, on the same tables. What pyarrow
cannot do (`encrypt_file` and the like) is compared with what a user would do instead: read the file and write
it encrypted. Ratios are medians over rounds, and each is taken within one round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from arrow_overhead import FewLinesKms, keytools_for

from parquet_keytools.errors import KeytoolsError


@dataclass(frozen=True)
class Case:
    """One row: an operation, and its counterpart.

    Attributes:
        name: The name in the table.
        ours: Done with parquet-keytools.
        peer: The same, or the nearest equivalent, with pyarrow.
        aim: The maximum ratio of ours to the peer; None where there is no aim.
    """

    name: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    aim: float | None


class Pyarrow:
    """The peer: files under the same master keys, written and read by pyarrow alone."""

    def __init__(self, columns: list[str]) -> None:
        self._factory = pe.CryptoFactory(FewLinesKms)
        self._connection = pe.KmsConnectionConfig()
        self._configuration = pe.EncryptionConfiguration(
            "footer", column_keys={"first": columns[::2], "second": columns[1::2]}
        )

    def write(self, table: pa.Table, path: Path, rows: int | None = None) -> None:
        """Write a table, with new keys."""
        properties = self._factory.file_encryption_properties(self._connection, self._configuration)
        pq.write_table(table, path, row_group_size=rows, encryption_properties=properties)

    def write_dataset(self, table: pa.Table, folder: Path, files: int) -> None:
        """Write a table in partitions of its column `part`."""
        encryption = ds.ParquetEncryptionConfig(self._factory, self._connection, self._configuration)
        file_format = ds.ParquetFileFormat()
        ds.write_dataset(
            table,
            folder,
            format=file_format,
            file_options=file_format.make_write_options(encryption_config=encryption),
            partitioning=ds.partitioning(pa.schema([("part", pa.int64())]), flavor="hive"),
            max_partitions=files,
        )

    def properties(self) -> Any:
        """Return the properties that read such files."""
        return self._factory.file_decryption_properties(self._connection)

    def dataset(self, folder: Path) -> ds.Dataset:
        """Open a folder."""
        configuration = ds.ParquetDecryptionConfig(self._factory, self._connection, pe.DecryptionConfiguration())
        options = ds.ParquetFragmentScanOptions(decryption_config=configuration)
        return ds.dataset(
            folder, format=ds.ParquetFileFormat(default_fragment_scan_options=options), partitioning="hive"
        )


def wide_table(columns: int, rows: int) -> pa.Table:
    """Return a table of many columns of doubles."""
    random = np.random.default_rng(2)
    return pa.table({f"column_{number}": random.random(rows) for number in range(columns)})


def file_cases(folder: Path, columns: int, row_groups: int) -> list[Case]:
    """Return the rows about one file with these numbers of columns and row groups."""
    table = wide_table(columns, row_groups * 10)
    names = table.column_names
    keytools, pyarrow = keytools_for(names), Pyarrow(names)
    plain, theirs, ours = (
        folder / f"{name}-{columns}x{row_groups}.parquet" for name in ("plain", "theirs", "ours")
    )
    pq.write_table(table, plain, row_group_size=10)
    pyarrow.write(table, theirs, 10)
    keytools.encrypt_file(plain, ours, overwrite=True)
    target = folder / "target.parquet"
    shape = f"{columns:,} x {row_groups}"

    def read_theirs() -> None:
        pq.read_table(theirs, columns=["column_1"], decryption_properties=pyarrow.properties())

    def encrypt_theirs() -> None:
        pyarrow.write(pq.read_table(plain), target, 10)

    def read_ours() -> None:
        keytools.read_table(ours, columns=["column_1"])

    def encrypt_ours() -> None:
        keytools.encrypt_file(plain, target, overwrite=True)

    def decrypt_ours() -> None:
        keytools.decrypt_file(ours, target, overwrite=True)

    def rekey_ours() -> None:
        keytools.rekey_file(ours, target, overwrite=True)

    def rotate_ours() -> None:
        copy = folder / "rotated"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copyfile(ours, copy / "file.parquet")
        keytools.rotate(copy)

    aim = {(1000, 10): 4.0, (100, 50): 5.0}.get((columns, row_groups))
    return [
        Case(f"read 1 column of {shape}", read_ours, read_theirs, aim),
        Case(f"encrypt_file {shape}", encrypt_ours, encrypt_theirs, 1),
        Case(f"decrypt_file {shape}", decrypt_ours, encrypt_theirs, 1.5),
        Case(f"rekey_file {shape}", rekey_ours, encrypt_theirs, 1.5),
        Case(f"rotate {shape}", rotate_ours, encrypt_theirs, 1.5),
        Case(f"verify {shape}", lambda: keytools.verify_file(ours), encrypt_theirs, 1.5),
        Case(f"inspect {shape}", lambda: keytools.inspect_file(ours), encrypt_theirs, 1.5),
    ]


def folder_cases(folder: Path, files: int) -> list[Case]:
    """Return the rows about a data set of small files of 20 columns, each in a partition."""
    table = wide_table(20, 100)
    names = table.column_names
    keytools, pyarrow = keytools_for(names), Pyarrow(names)
    ours, theirs = folder / "ours", folder / "theirs"
    for number in range(files):
        for root in (ours, theirs):
            (root / f"part={number}").mkdir(parents=True)
        pyarrow.write(table, theirs / f"part={number}" / "data.parquet")
        keytools.write_table(table, ours / f"part={number}" / "data.parquet")
    wanted = ds.field("part") == files // 2
    new = folder / "new"

    def write_ours() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for number in range(files):
            keytools.write_table(table, new / f"{number}.parquet")

    def write_theirs() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for number in range(files):
            pyarrow.write(table, new / f"{number}.parquet")

    partitions = np.repeat(np.arange(files), table.num_rows)
    partitioned = pa.concat_tables([table] * files).append_column("part", pa.array(partitions))
    written = folder / "written"

    def write_dataset_ours() -> None:
        shutil.rmtree(written, ignore_errors=True)
        keytools.write_dataset(partitioned, written, partitioning=["part"], max_partitions=files)

    def write_dataset_theirs() -> None:
        shutil.rmtree(written, ignore_errors=True)
        pyarrow.write_dataset(partitioned, written, files)

    shape = f"{files:,} files"
    return [
        Case(f"dataset() of {shape}, open", lambda: keytools.dataset(ours), lambda: pyarrow.dataset(theirs), None),
        Case(
            f"one partition of {shape}",
            lambda: keytools.dataset(ours).to_table(filter=wanted),
            lambda: pyarrow.dataset(theirs).to_table(filter=wanted),
            3,
        ),
        Case(
            f"first batch of {shape}",
            lambda: next(iter(keytools.dataset(ours).to_batches())),
            lambda: next(iter(pyarrow.dataset(theirs).to_batches())),
            None,
        ),
        Case(
            f"open and scan {shape}",
            lambda: keytools.dataset(ours).to_table(),
            lambda: pyarrow.dataset(theirs).to_table(),
            2,
        ),
        Case(f"write_dataset of {shape}", write_dataset_ours, write_dataset_theirs, 2),
        # Each of our files is on the disk when the call returns; pyarrow's are not.
        Case(f"write_table of {shape}", write_ours, write_theirs, None),
    ]


def seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return how long a call takes."""
    start = clock()
    call()
    return clock() - start


def measure(case: Case, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Return the medians and their ratio; the two sides take turns."""
    ours, peer = [], []
    for _ in range(rounds):
        peer.append(seconds(case.peer, clock))
        ours.append(seconds(case.ours, clock))
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    return {
        "work": case.name,
        "pyarrow_seconds": statistics.median(peer),
        "seconds": statistics.median(ours),
        "ratio": ratio,
        "aim": case.aim,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--only", default="", help="words, separated by commas: rows whose name has one of them")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None, help="where the rows go as JSON, too")
    parser.add_argument("--cpu", action="store_true", help="time of the processor: for a machine that others use")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    words = [word for word in arguments.only.split(",") if word]
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        cases: list[Case] = []
        if "files" not in words:
            cases += file_cases(folder, 1_000, 10) + file_cases(folder, 100, 50)
        if not words or "files" in words:
            cases += folder_cases(folder, arguments.files)
        print(f"{'work':36} {'pyarrow':>10} {'ours':>10} {'ratio':>7} {'aim':>5}")
        for case in cases:
            if words and not any(word in case.name for word in words):
                continue
            try:
                row = measure(case, arguments.rounds, clock)
            except KeytoolsError as error:
                print(f"{case.name:36} {error}")
                continue
            rows.append(row)
            aim = f"{row['aim']:g}" if row["aim"] else ""
            print(
                f"{row['work']:36} {row['pyarrow_seconds']:8.3f} s {row['seconds']:8.3f} s"
                f" {row['ratio']:7.2f} {aim:>5}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
