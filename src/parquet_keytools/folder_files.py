"""What lies in a folder: its Parquet files, and what is left out when they are converted."""

from __future__ import annotations

import os
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


def walk_parquet_files(folder: FileLocation) -> Iterator[FileLocation]:
    """Yield the Parquet files under a folder that `list_folder` finds, with one folder in memory at a time.

    A folder is listed before the first of its files is yielded: one that is replaced meanwhile comes once.
    """
    yield from _walk(folder, folder, frozenset())


def _walk(root: FileLocation, folder: FileLocation, above: frozenset[str]) -> Iterator[FileLocation]:
    real = str(Path(folder.path).resolve()) if folder.is_local else folder.path
    if real in above:
        return
    # A folder that is removed meanwhile has no files any more.
    infos = folder.filesystem.get_file_info(pafs.FileSelector(folder.path, allow_not_found=True))
    for info in sorted(infos, key=lambda info: str(info.path)):
        location, kind = FileLocation(folder.filesystem, info.path), info.type
        if kind == pafs.FileType.Directory:
            if not _is_passed_over(root, location):
                yield from _walk(root, location, above | {real})
        elif kind == pafs.FileType.File and _reason_to_leave_out(root, _Entry(location, 0)) is None:
            yield location


def walk_folder(folder: FileLocation) -> Iterator[ParquetFile | LeftOut]:
    """Yield the same as `list_folder`, in no order, with little in memory: a folder may have a million files."""
    for entry in _walked_entries(folder, folder, frozenset()):
        reason = _reason_to_leave_out(folder, entry)
        if reason is None:
            yield ParquetFile(entry.location, entry.size_bytes)
        elif reason != _KEY_MATERIAL or not _is_used(entry.location):
            yield LeftOut(entry.location, reason)


def _is_used(key_material: FileLocation) -> bool:
    """Return whether the Parquet file that a key material file is named after is there."""
    name = key_material.name.removeprefix("_KEY_MATERIAL_FOR_").removesuffix(".json")
    parquet_file = key_material.sibling(name)
    return key_material_location(parquet_file).path == key_material.path and parquet_file.is_file()


def _walked_entries(root: FileLocation, folder: FileLocation, above: frozenset[str]) -> Iterator[_Entry]:
    if not root.is_local:
        for info in root.filesystem.get_file_info(pafs.FileSelector(folder.path, allow_not_found=True)):
            location = FileLocation(root.filesystem, info.path)
            if info.type == pafs.FileType.Directory:
                yield from _walked_entries(root, location, above)
            else:
                flaw = None if info.type == pafs.FileType.File else _NO_REGULAR_FILE
                yield _Entry(location, info.size or 0, flaw)
        return
    # Links may lead in circles, which Arrow would follow many times.
    real = os.path.realpath(folder.path)
    if real in above:
        yield _Entry(folder, 0, _LINK_LOOP)
        return
    with os.scandir(folder.path) as entries:
        for found in entries:
            location = FileLocation(root.filesystem, found.path)
            if found.is_dir():
                yield from _walked_entries(root, location, above | {real})
            elif found.is_file():
                yield _Entry(location, found.stat().st_size)
            else:
                # A link that leads nowhere fails when its turn comes, if data is expected there.
                is_lost = found.is_symlink() and not Path(found.path).exists() and ".parquet" in found.name
                yield _Entry(location, 0, None if is_lost else _NO_REGULAR_FILE)


@dataclass(frozen=True)
class _Entry:
    location: FileLocation
    size_bytes: int
    flaw: str | None = None


def _entries(folder: FileLocation) -> Iterator[_Entry]:
    """Yield all that is under a folder, except folders."""
    if folder.is_local:
        yield from _walked_entries(folder, folder, frozenset())
        return
    # All at once: Arrow looks into many folders of an object store at a time.
    for info in folder.filesystem.get_file_info(pafs.FileSelector(folder.path, recursive=True)):
        if info.type != pafs.FileType.Directory:
            flaw = None if info.type == pafs.FileType.File else _NO_REGULAR_FILE
            yield _Entry(FileLocation(folder.filesystem, info.path), info.size or 0, flaw)


def _reason_to_leave_out(folder: FileLocation, entry: _Entry) -> str | None:
    """Return why a file has no counterpart, or None for a Parquet file."""
    name = entry.location.name
    if entry.flaw is not None:
        return entry.flaw
    if name in SUMMARY_FILE_NAMES:
        return _SUMMARY
    if name.startswith("_KEY_MATERIAL_FOR_"):
        return _KEY_MATERIAL
    if _is_passed_over(folder, entry.location):
        return _PASSED_OVER
    return None if ".parquet" in name or _has_magic(entry.location) else _OTHER


def _is_passed_over(folder: FileLocation, location: FileLocation) -> bool:
    # As Spark has it: an underscore may begin the name of a partition column.
    parts = PurePosixPath(location.path).relative_to(folder.path).parts
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)


def _has_magic(location: FileLocation) -> bool:
    try:
        with location.filesystem.open_input_file(location.path) as file:
            ends = (file.read_at(MAGIC_LENGTH, 0), file.read_at(MAGIC_LENGTH, max(0, file.size() - MAGIC_LENGTH)))
    except OSError:
        return True  # The reason why it cannot be read is told when its turn comes.
    return not {MAGIC, MAGIC_ENCRYPTED_FOOTER}.isdisjoint(ends)
