"""What does it cost to rotate the master keys of a data set? Against CryptoFactory.rotate_master_keys of pyarrow.

    python benchmarks/rotation.py [--files 1000] [--milliseconds 5] [--megabytes 200] [--rounds 1]

External key material: files with six keys, once with KEKs of their own, as if each was written by another process,
and once with KEKs that one process shares among all. Theirs is rotate_master_keys in a loop, with one
CryptoFactory; it makes new KEKs, and syncs nothing to the disk. Ours is `Keytools.rotate`: by default, if the KMS
re-wraps and each new wrapped key is proven by unwrapping it; with `new_keks=True`, with the same calls as theirs;
and with a KMS that accepts a hundred keys in a call. All use the same master keys in this process, one after the
other, and each call to them takes the given time.

Internal key material, which theirs cannot rotate: how many bytes of a large file we write, against copying it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet.encryption as pe
from pyarrow import fs as pafs

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KmsError, value_or_raise
from parquet_keytools.kms.client import (
    KmsSettings,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings
from parquet_keytools.secret_bytes import SecretBytes

COLUMNS = ("a", "b", "c", "d", "e")
MASTER_KEYS = ("footer", *(f"key_{name}" for name in COLUMNS))
TABLE = pa.table({name: range(100) for name in (*COLUMNS, "plain")})
BATCH = 100

R = TypeVar("R", UnwrapRequest, RewrapRequest)
T = TypeVar("T")


class SlowMasterKeys:
    """Master keys whose calls take a fixed time."""

    def __init__(self, seconds: float) -> None:
        self.kms = InMemoryKms({name: name.ljust(16).encode()[:16] for name in MASTER_KEYS})
        self._seconds = seconds
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()

    def call(self, operation: str, answer: Callable[[], T]) -> T:
        """Make one call."""
        with self._lock:
            self.calls[operation] += 1
        time.sleep(self._seconds)
        return answer()

    def take_calls(self) -> str:
        """Return the calls since the last time."""
        counts, self.calls = self.calls, Counter()
        return f"{counts.total():>6,}   " + ", ".join(
            f"{number:,} {name}" for name, number in sorted(counts.items())
        )


class SlowSettings(RemoteKmsSettings):
    """Settings of the client below."""

    type: Literal["slow"] = "slow"


class SlowKms(RemoteKmsClient):
    """A KMS across an imaginary network, whose calls are for one key each."""

    backend = "slow"
    Settings = SlowSettings

    def __init__(self, master_keys: SlowMasterKeys) -> None:
        super().__init__(SlowSettings())
        self._master_keys = master_keys

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> SlowKms:
        raise NotImplementedError

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._one_by_one("wrap", requests, self._master_keys.kms.wrap_many)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._one_by_one("unwrap", requests, self._master_keys.kms.unwrap_many)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return self._one_by_one("rewrap", requests, self._master_keys.kms.rewrap_many)

    def _one_by_one(
        self, operation: str, requests: Sequence[R], ask: Callable[[Sequence[R]], list[T | KmsError]]
    ) -> list[T | KmsError]:
        def send(request: R, _: float) -> T:
            return self._master_keys.call(operation, lambda: value_or_raise(ask([request])[0]))

        return self._operation(operation).each(requests, send)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        kms = self._master_keys.kms

        def send(_: float) -> MasterKeyDescription:
            return self._master_keys.call("describe", lambda: kms.describe(master_key_id))

        return self._operation("describe").call(master_key_id, send)


class SlowBatchKms(SlowKms):
    """The same with calls for many keys, as in Vault."""

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_batches("unwrap", requests, self._master_keys.kms.unwrap_many)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return self._in_batches("rewrap", requests, self._master_keys.kms.rewrap_many)

    def _in_batches(
        self, operation: str, requests: Sequence[R], ask: Callable[[Sequence[R]], list[T | KmsError]]
    ) -> list[T | KmsError]:
        def send(batch: Sequence[R], _: float) -> list[T | KmsError]:
            return self._master_keys.call(operation, lambda: ask(batch))

        batches = [requests[start : start + BATCH] for start in range(0, len(requests), BATCH)]
        answers = self._operation(operation).each(batches, send, lambda batch: batch[0].master_key_id)
        return [answer for batch in answers for answer in value_or_raise(batch)]


class TheirKms(pe.KmsClient):  # type: ignore[misc]
    """The client that pyarrow users write."""

    def __init__(self, master_keys: SlowMasterKeys) -> None:
        super().__init__()
        self._master_keys = master_keys

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        """Wrap one key."""
        kms, request = self._master_keys.kms, WrapRequest(SecretBytes(key_bytes), master_key_identifier)
        return self._master_keys.call("wrap", lambda: value_or_raise(kms.wrap_many([request])[0]))

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        """Unwrap one key."""
        kms, request = self._master_keys.kms, UnwrapRequest(wrapped_key, master_key_identifier)
        return self._master_keys.call("unwrap", lambda: value_or_raise(kms.unwrap_many([request])[0]).reveal())


@dataclass(frozen=True)
class Contestant:
    """One way to rotate.

    Attributes:
        name: The name in the table.
        rotate: Rotates all files of a folder.
    """

    name: str
    rotate: Callable[[Path], object]


def keytools(kms: RemoteKmsClient | InMemoryKms, **settings: Any) -> Keytools:
    """Return tools for the data sets here."""
    table = {
        "footer_key": "footer",
        "column_keys": {f"key_{name}": [name] for name in COLUMNS},
        "unlisted_columns": "plaintext",
        **settings,
    }
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table},
    }
    return Keytools(parse_configuration(document), kms=kms)


def write_files(folder: Path, count: int, master_keys: SlowMasterKeys, *, own_keks: bool) -> None:
    """Write a data set with external key material."""
    tools = keytools(master_keys.kms, key_material="external")
    for number in range(count):
        if own_keks:
            tools.clear_caches()
        tools.write_table(TABLE, folder / f"{number:05}.parquet")


def contestants(master_keys: SlowMasterKeys) -> list[Contestant]:
    """Return all ways to rotate external key material; the others are compared with the first."""

    def theirs(folder: Path) -> None:
        factory = pe.CryptoFactory(lambda _: TheirKms(master_keys))
        for path in sorted(folder.glob("*.parquet")):
            factory.rotate_master_keys(pe.KmsConnectionConfig(), str(path), pafs.LocalFileSystem())

    def ours(kms: type[SlowKms], **options: bool) -> Callable[[Path], None]:
        def rotate(folder: Path) -> None:
            with keytools(kms(master_keys)) as tools:
                report = tools.rotate(folder, **options)  # type: ignore[arg-type]
                assert report.succeeded, report.failures[:3]

        return rotate

    return [
        Contestant("CryptoFactory.rotate_master_keys, in a loop", theirs),
        Contestant("rotate, calls for one key", ours(SlowKms)),
        Contestant("rotate, new_keks=True, calls for one key", ours(SlowKms, new_keks=True)),
        Contestant("rotate, calls for 100 keys", ours(SlowBatchKms)),
    ]


def compare(folder: Path, count: int, seconds: float, rounds: int, *, own_keks: bool) -> None:
    """Print a table for one data set."""
    master_keys = SlowMasterKeys(seconds)
    original = folder / "original"
    original.mkdir()
    write_files(original, count, master_keys, own_keks=own_keks)
    whose = "of their own" if own_keks else "of one writer"
    print(f"\n{count:,} files with {len(MASTER_KEYS)} keys, external, KEKs {whose}; {seconds * 1000:g} ms a call")
    print(f"{'':45}{'seconds':>9}{'ratio':>8}   calls")
    baseline = None
    for contestant in contestants(master_keys):
        taken, said = [], ""
        for _ in range(rounds):
            copy = folder / "copy"
            shutil.copytree(original, copy)
            master_keys.take_calls()
            started = time.perf_counter()
            contestant.rotate(copy)
            taken.append(time.perf_counter() - started)
            said = master_keys.take_calls()
            check(copy, master_keys)
            shutil.rmtree(copy)
        median = statistics.median(taken)
        baseline = baseline or median
        print(f"{contestant.name:45}{median:>9.2f}{baseline / median:>7.1f}x{said}")
    shutil.rmtree(original)


def check(folder: Path, master_keys: SlowMasterKeys) -> None:
    """Check that some of the files can still be read."""
    tools = keytools(master_keys.kms)
    paths = sorted(folder.glob("*.parquet"))
    for path in paths[:: max(1, len(paths) // 20)]:
        assert tools.read_table(path).equals(TABLE)


def internal(folder: Path, megabytes: int, rounds: int) -> None:
    """Print how much of a file with internal key material is written."""
    kms = InMemoryKms({name: name.ljust(16).encode()[:16] for name in MASTER_KEYS})
    path = folder / "large.parquet"
    values = np.random.default_rng(1).integers(0, 2**62, megabytes * 1_000_000 // 8 // len(COLUMNS))
    table = pa.table(dict.fromkeys((*COLUMNS, "plain"), values)).drop_columns(["plain"])
    tools = keytools(kms, unlisted_columns="footer_key")
    tools.write_table(table, path, compression="none", use_dictionary=False)
    print(f"\nInternal key material, a file of {path.stat().st_size:,} bytes")
    for _ in range(rounds):
        started = time.perf_counter()
        (file,) = tools.rotate(path).files
        seconds = time.perf_counter() - started
        print(f"  written by us {file.bytes_written:,} bytes; {file.how}: {file.bytes_copied:,}; {seconds:.2f} s")
        started = time.perf_counter()
        shutil.copyfile(path, folder / "copy.parquet")
        copied = time.perf_counter() - started
        started = time.perf_counter()
        tools.rekey_file(path, folder / "copy.parquet")
        rekeyed = time.perf_counter() - started
        print(f"  to copy it takes {copied:.2f} s and is not synced; to rekey it takes {rekeyed:.2f} s")
    assert tools.read_table(path).num_rows == len(values)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for own_keks in (True, False):
            compare(folder, options.files, options.milliseconds / 1000, options.rounds, own_keks=own_keks)
        internal(folder, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
