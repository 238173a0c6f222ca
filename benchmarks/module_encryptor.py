"""How fast is the module encryptor, and how much memory does it take?

    python benchmarks/module_encryptor.py [--megabytes 700] [--rounds 5] [--page-bytes 140000] [--folder DIR]
    python benchmarks/module_encryptor.py --memory [--megabytes 4000]

The first form prints medians of ratios, each within one round, against `shutil.copyfile` of the same file, and
against pyarrow, which reads the file and writes it encrypted. Nothing is synced to the disk, as in copyfile.
The second form prints the peak private memory (RssAnon) of encryption.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from generated_files import PAGE_BYTES, write_generated

from parquet_keytools.encryption.file_encryption import (
    FileEncryption,
    decrypt_columns,
    encrypt_opened,
    encrypt_source,
)
from parquet_keytools.encryption.footer import read_footer
from parquet_keytools.encryption.protection import Algorithm, KeyRetriever
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.format.file_layout import ByteSink, ByteSource
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.outputs import LocalSink


@dataclass(frozen=True)
class OneKey:
    """A key retriever that knows one key."""

    dek: SecretBytes

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return it."""
        return self.dek

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return it for each column."""
        return [self.dek for _ in columns]


def decrypt_source(source: ByteSource, sink: ByteSink, keys: KeyRetriever, *, threads: int = 2) -> None:
    """Decrypt a file with the functions that `Keytools.decrypt_file` calls."""
    decrypt_columns(source, sink, read_footer(source, keys), {}, threads=threads)


def rekey_source(
    source: ByteSource, sink: ByteSink, keys: KeyRetriever, encryption: FileEncryption, *, threads: int = 2
) -> None:
    """Re-key a file with the functions that `Keytools.rekey_file` calls."""
    encrypt_opened(source, sink, read_footer(source, keys), {}, encryption, threads=threads)


def rewritten(source: Path, target: Path, work: Callable[[ByteSource, ByteSink], None]) -> None:
    """Open both files and do the work."""
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        with open_source(FileLocation.resolve(source)) as opened:
            work(opened, LocalSink(descriptor))
    finally:
        os.close(descriptor)


def arrow_encrypted(source: Path, target: Path, dek: SecretBytes) -> None:
    """Read the file with pyarrow and write it encrypted, with the same row groups."""
    file = pq.ParquetFile(source)
    properties = pe.create_encryption_properties(dek.reveal())
    with pq.ParquetWriter(
        target,
        file.schema_arrow,
        compression="none",
        use_dictionary=["word"],
        data_page_size=PAGE_BYTES,
        encryption_properties=properties,
    ) as writer:
        for ordinal in range(file.num_row_groups):
            writer.write_table(file.read_row_group(ordinal))


def seconds(work: Callable[[], object], target: Path) -> float:
    """Return how long it takes to write `target`.

    The time excludes the removal of the previous output, and the kernel's pending writes of it.
    """
    target.unlink(missing_ok=True)
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_speed(folder: Path, megabytes: int, rounds: int, page_bytes: int) -> None:
    """Print the table of ratios."""
    plain, target = folder / "plain.parquet", folder / "target.parquet"
    write_generated(plain, megabytes, page_bytes)
    metadata = pq.read_metadata(plain)
    print(
        f"{plain.stat().st_size / 1e6:.0f} MB, {metadata.num_row_groups} row groups of {metadata.num_columns} "
        f"columns, pages of about {page_bytes:,} bytes, {os.cpu_count()} processors, {rounds} rounds"
    )
    dek = SecretBytes.random(128)
    keys = OneKey(dek)
    jobs: dict[str, Callable[[], object]] = {"shutil.copyfile": lambda: shutil.copyfile(plain, target)}
    for algorithm in Algorithm:
        stored = folder / f"{algorithm.name}.parquet"
        encryption = FileEncryption(dek, b"kf", algorithm=algorithm)
        rewritten(plain, stored, lambda s, t, e=encryption: encrypt_source(s, t, e))  # type: ignore[misc]
        for threads in (2, 1):
            name = f"{algorithm.name}, {threads} thread{'s' * (threads > 1)}"
            jobs[f"encrypt, {name}"] = lambda a=algorithm, n=threads: rewritten(  # type: ignore[misc]
                plain,
                target,
                lambda s, t: encrypt_source(s, t, FileEncryption(dek, b"kf", algorithm=a), threads=n),
            )
            jobs[f"decrypt, {name}"] = lambda f=stored, n=threads: rewritten(  # type: ignore[misc]
                f, target, lambda s, t: decrypt_source(s, t, keys, threads=n)
            )
            jobs[f"rekey, {name}"] = lambda a=algorithm, f=stored, n=threads: rewritten(  # type: ignore[misc]
                f,
                target,
                lambda s, t: rekey_source(s, t, keys, FileEncryption(dek, b"kf", algorithm=a), threads=n),
            )
    jobs["pyarrow: read, write encrypted"] = lambda: arrow_encrypted(plain, target, dek)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        # No job always follows the same job.
        order = random.Random(number).sample(sorted(jobs), len(jobs))
        for name in order:
            job = jobs[name]
            times[name].append(seconds(job, target))
    copies, arrow = times["shutil.copyfile"], times["pyarrow: read, write encrypted"]
    print(f"{'':42}{'seconds':>10}{'of a copy':>12}{'of pyarrow':>12}")
    for name, measured in times.items():
        of_copy = statistics.median(a / b for a, b in zip(measured, copies, strict=True))
        of_arrow = statistics.median(a / b for a, b in zip(measured, arrow, strict=True))
        print(f"{name:42}{statistics.median(measured):10.3f}{of_copy:12.2f}{of_arrow:12.3f}")


def private_bytes() -> int:
    """Return the private memory of this process; clean pages of memory maps do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def print_memory(folder: Path, megabytes: int, page_bytes: int) -> None:
    """Print the peak private memory of encryption and decryption."""
    plain, stored, target = folder / "plain.parquet", folder / "stored.parquet", folder / "target.parquet"
    write_generated(plain, megabytes, page_bytes)
    dek = SecretBytes.random(128)
    for name, source, sink, work in (
        ("encrypt", plain, stored, lambda s, t: encrypt_source(s, t, FileEncryption(dek))),
        ("decrypt", stored, target, lambda s, t: decrypt_source(s, t, OneKey(dek))),
    ):
        most, stop = [private_bytes()], threading.Event()
        before = most[0]

        def watch(most: list[int] = most, stop: threading.Event = stop) -> None:
            while not stop.wait(0.01):
                most[0] = max(most[0], private_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            took = seconds(lambda: rewritten(source, sink, work), sink)  # noqa: B023
        finally:
            stop.set()
            watcher.join()
        print(
            f"{name}: {source.stat().st_size / 1e6:.0f} MB in {took:.2f} s, most private memory "
            f"{most[0] / 1e6:.0f} MB, of which {before / 1e6:.0f} MB before it began"
        )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page-bytes", type=int, default=PAGE_BYTES)
    parser.add_argument("--folder", type=Path, help="where the files are made; best with free memory behind it")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.memory:
            print_memory(Path(folder), options.megabytes or 4_000, options.page_bytes)
        else:
            print_speed(Path(folder), options.megabytes or 700, options.rounds, options.page_bytes)


if __name__ == "__main__":
    main()
