"""A file on its way through a rotation, and the steps that many files take at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.file_keys import FileKeys, read_file_keys
from parquet_keytools.rotation.held_key import HeldKey
from parquet_keytools.rotation.new_material import NewMaterial
from parquet_keytools.rotation.report import FileRotation, Outcome
from parquet_keytools.rotation.rewrap_task import RewrapTask
from parquet_keytools.rotation.tail import ChangedMeanwhileError
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage import FileLocation

FILES_PER_WINDOW = 1000
"""For how many files, about, the KMS is asked together."""

BYTES_PER_WINDOW = 8 * 1024 * 1024
"""To how many bytes, about, their footers and key material may come; parsed they take many times that."""

FILES_PER_READ = 64

RotatedOrChanged = FileRotation | ChangedMeanwhileError


@dataclass
class FileWork:
    """A file on its way.

    Attributes:
        location: The file.
        keys: Its keys, once they were read.
        tasks: For each wrapped key that shall change, what is to be done.
        aad_prefix: The AAD prefix that the file does not store.
        footer_dek: The DEK of its footer, once that is needed and known.
        new: For each wrapped key that changed, what it became.
        result: What became of the file.
        failure: Why it goes no further.
    """

    location: FileLocation
    keys: FileKeys | None = None
    tasks: dict[int, tuple[HeldKey, RewrapTask]] = field(default_factory=dict)
    aad_prefix: bytes | None = None
    footer_dek: SecretBytes | None = None
    new: dict[int, NewMaterial] = field(default_factory=dict)
    result: FileRotation | None = None
    failure: KeytoolsError | OSError | None = None

    @property
    def read_keys(self) -> FileKeys:
        """Its keys; only after they were read."""
        assert self.keys is not None
        return self.keys

    @property
    def size_bytes(self) -> int:
        """How much of the file is kept in memory, before it is parsed."""
        if self.keys is None:
            return 0
        return len(self.keys.tail.data) + len(self.keys.external.content if self.keys.external else b"")

    def outcome(self) -> RotatedOrChanged:
        """What became of it."""
        if self.result is not None:
            return self.result
        assert self.failure is not None
        if isinstance(self.failure, ChangedMeanwhileError):
            return self.failure
        if isinstance(self.failure, FileNotFoundError):
            if self.location.is_file():
                # Not there for a moment, or its key material: somebody replaces it just now.
                return ChangedMeanwhileError(f"{self.location} changed while its keys were rotated.")
            return FileRotation(str(self.location), Outcome.NOTHING_TO_ROTATE, how="removed meanwhile")
        return FileRotation.failed(str(self.location), self.failure)


def read_window(pool: Executor, locations: Iterator[FileLocation]) -> list[FileWork]:
    """Read the keys of the next files, as many as one window takes; of none when there are no more."""
    works: list[FileWork] = []
    size_bytes = 0
    while len(works) < FILES_PER_WINDOW and size_bytes < BYTES_PER_WINDOW:
        batch = [FileWork(location) for location in itertools.islice(locations, FILES_PER_READ)]
        if not batch:
            break
        size_bytes += sum(work.size_bytes for work in step(pool, _read, batch))
        works += batch
    return works


def _read(work: FileWork) -> None:
    work.keys = read_file_keys(work.location)


def step(pool: Executor, function: Callable[[FileWork], None], works: Sequence[FileWork]) -> Iterator[FileWork]:
    """Do a step with each file by itself; yield those that go on: what fails is nothing to the others."""
    return (work for work in step_each(pool, function, works) if work.failure is None)


def step_each(
    pool: Executor, function: Callable[[FileWork], None], works: Sequence[FileWork]
) -> Iterator[FileWork]:
    """Do a step with each file, by several threads; yield each when it is done."""

    def guarded(work: FileWork) -> FileWork:
        try:
            function(work)
        except (KeytoolsError, OSError) as error:
            work.failure = error
        return work

    return pool.map(guarded, works)
