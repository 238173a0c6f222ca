"""How long does it take to verify a file, against decrypting it; and to show what anyone can see of it?

    python benchmarks/verify.py [--megabytes 700] [--rounds 5] [--folder DIR]

prints medians of ratios, each within one round: `verify` of the file, in one thread, against `decrypt_file` of it
in two threads; and how much longer than a command that does nothing `inspect` without keys takes, for a small file
and for this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from generated_files import write_generated
from module_encryptor import OneKey, decrypt_source

from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.encryption.file_encryption import FileEncryption, encrypt_source
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.outputs import LocalSink

_NOTHING = """
import sys
import parquet_keytools.cli.check as command
from parquet_keytools.cli import app
command._inspect = lambda *arguments: sys.exit(0)
app()
"""


class KnownKey(OneKey):
    """The only key, for the verifier."""

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return nothing: the key is known."""

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return nothing: it has no name."""

    def kek_length_bits(self, material: KeyMaterial) -> int | None:
        """Return nothing: there is no KEK."""


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def decrypt(source: Path, target: Path, key: KnownKey) -> None:
    """Decrypt a file."""
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        with open_source(FileLocation.resolve(source)) as opened:
            decrypt_source(opened, LocalSink(descriptor), key)
    finally:
        os.close(descriptor)


def verify(source: Path, key: KnownKey) -> None:
    """Verify a file; it must conform."""
    with open_source(FileLocation.resolve(source)) as opened:
        report, _ = verify_source(opened, key)
    assert report.conforms, report.findings


def run(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return how long a process takes, in milliseconds."""
    return 1000 * seconds(lambda: subprocess.run(command, check=True, capture_output=True, env=environment))


def inspection_overhead(path: Path, rounds: int, bytecode: Path) -> float:
    """Return how much longer `inspect` takes than a command that does nothing, in milliseconds.

    Bytecode is cached, as in an installed program, whatever the settings of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    inspecting, nothing = (
        [sys.executable, "-c", program, "inspect", str(path)]
        for program in ("from parquet_keytools.cli import main; main()", _NOTHING)
    )
    run(inspecting, environment)
    pairs = [(run(inspecting, environment), run(nothing, environment)) for _ in range(rounds)]
    return statistics.median(inspected - idle for inspected, idle in pairs)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="Where the files go; a temporary folder if not given.")
    options = parser.parse_args()
    key = KnownKey(SecretBytes.random(128))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        plain, target = folder / "plain.parquet", folder / "decrypted.parquet"
        write_generated(plain, options.megabytes)
        files = {algorithm: folder / f"{algorithm.value}.parquet" for algorithm in Algorithm}
        for algorithm, path in files.items():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
            with open_source(FileLocation.resolve(plain)) as source:
                encrypt_source(source, LocalSink(descriptor), FileEncryption(key.dek, algorithm=algorithm))
            os.close(descriptor)
        plain.unlink()
        size = files[Algorithm.AES_GCM_V1].stat().st_size
        print(f"{size / 1e6:,.0f} MB, medians of {options.rounds} rounds\n")
        print(f"{'algorithm':16} {'decrypt s':>10} {'verify s':>10} {'ratio':>7}")
        for algorithm, path in files.items():
            rounds = []
            for _ in range(options.rounds):
                decrypting = seconds(lambda path=path: decrypt(path, target, key))
                rounds.append((decrypting, seconds(lambda path=path: verify(path, key))))
            decrypting, verifying = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(b / a for a, b in rounds)
            print(f"{algorithm.value:16} {decrypting:10.3f} {verifying:10.3f} {ratio:7.2f}")
        print("\ninspect without keys, above a command that does nothing")
        small = folder / "small.parquet"
        write_generated(small, 1)
        for path in (small, files[Algorithm.AES_GCM_V1]):
            overhead = inspection_overhead(path, 4 * options.rounds, folder / "bytecode")
            print(f"{path.stat().st_size / 1e6:10,.1f} MB {overhead:8.0f} ms")


if __name__ == "__main__":
    main()
