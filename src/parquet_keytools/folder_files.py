"""What lies in a folder: its Parquet files, and what is left out when they are converted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pyarrow import fs as pafs

from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, MAGIC_LENGTH
from parquet_keytools.keys.material_store import key_material_location
from parquet_keytools.storage import FileLocation

SUMMARY_FILE_NAMES = frozenset({"_metadata", "_common_metadata"})
"""Files that hold the footers of all others."""

_CONCURRENT_FILES = 16
"""How many files are looked into at a time, which on an object store is mostly waiting."""

_SUMMARY = "a summary of footers: it would show statistics in plaintext, and would not fit the new files"
_LINK_LOOP = "a link to a folder that it lies in"
_NO_REGULAR_FILE = "neither a file nor a folder"
_PASSED_OVER = "readers of data sets pass over names that begin with a dot or an underscore"
_KEY_MATERIAL = "key material of a Parquet file that is not here"
_OTHER = "not a Parquet file"


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file of a folder."""

    location: FileLocation
    size_bytes: int


@dataclass(frozen=True)
class LeftOut:
    """Something else in the folder, and why it is left out."""

    location: FileLocation
    reason: str


def list_folder(folder: FileLocation) -> tuple[list[ParquetFile], list[LeftOut]]:
    """Return the Parquet files under a folder, and what else is there, both by path.

    Parquet files are those that have Parquet's magic at one of their ends, or say in their name that they are: a
    damaged one then fails, and does not stay behind unnoticed. Key material belongs to its Parquet file.
    """
    entries = sorted(_entries(folder), key=lambda entry: entry.location.path)
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        reasons = list(pool.map(lambda entry: _reason_to_leave_out(folder, entry), entries))
    classified = list(zip(entries, reasons, strict=True))
    files = [ParquetFile(entry.location, entry.size_bytes) for entry, reason in classified if reason is None]
    key_materials = {key_material_location(file.location).path for file in files}
    left_out = [
        LeftOut(entry.location, reason)
        for entry, reason in classified
        if reason is not None and entry.location.path not in key_materials
    ]
    return files, left_out


@dataclass(frozen=True)
class _Entry:
    location: FileLocation
    size_bytes: int
    flaw: str | None = None


def _entries(folder: FileLocation) -> Iterator[_Entry]:
    """Yield all that is under a folder, except folders."""
    if folder.is_local:
        yield from _local_entries(folder, Path(folder.path), frozenset())
        return
    for info in folder.filesystem.get_file_info(pafs.FileSelector(folder.path, recursive=True)):
        if info.type != pafs.FileType.Directory:
            flaw = None if info.type == pafs.FileType.File else _NO_REGULAR_FILE
            yield _Entry(FileLocation(folder.filesystem, info.path), info.size or 0, flaw)


def _local_entries(root: FileLocation, folder: Path, above: frozenset[Path]) -> Iterator[_Entry]:
    """Yield the same on this machine, where links may lead in circles, which Arrow would follow many times."""
    real = folder.resolve()
    if real in above:
        yield _Entry(FileLocation(root.filesystem, str(folder)), 0, _LINK_LOOP)
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _local_entries(root, path, above | {real})
            continue
        is_file = path.is_file()
        location = FileLocation(root.filesystem, str(path))
        yield _Entry(location, path.stat().st_size if is_file else 0, None if is_file else _NO_REGULAR_FILE)


def _reason_to_leave_out(folder: FileLocation, entry: _Entry) -> str | None:
    """Return why a file has no counterpart, or None for a Parquet file."""
    name = entry.location.name
    if entry.flaw is not None:
        return entry.flaw
    if name in SUMMARY_FILE_NAMES:
        return _SUMMARY
    if name.startswith("_KEY_MATERIAL_FOR_"):
        return _KEY_MATERIAL
    # As Spark has it: an underscore may begin the name of a partition column.
    parts = PurePosixPath(entry.location.path).relative_to(folder.path).parts
    if any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts):
        return _PASSED_OVER
    return None if ".parquet" in name or _has_magic(entry.location) else _OTHER


def _has_magic(location: FileLocation) -> bool:
    try:
        with location.filesystem.open_input_file(location.path) as file:
            ends = (file.read_at(MAGIC_LENGTH, 0), file.read_at(MAGIC_LENGTH, max(0, file.size() - MAGIC_LENGTH)))
    except OSError:
        return True  # The reason why it cannot be read is told when its turn comes.
    return not {MAGIC, MAGIC_ENCRYPTED_FOOTER}.isdisjoint(ends)
