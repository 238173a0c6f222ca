"""Old key material put back, or dropped, over a file or a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from parquet_keytools import audit
from parquet_keytools.errors import KeyMaterialError, KeytoolsError, OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.keys.material_store import MAX_FILE_BYTES, key_material_location
from parquet_keytools.rotation.claimed_output import without_leftovers
from parquet_keytools.rotation.external_material import replace_external_material
from parquet_keytools.rotation.kept_keys import KeptFile, KeptKeys, kept_files_in, read_kept
from parquet_keytools.rotation.report import FileRotation, Outcome, RotationReport
from parquet_keytools.rotation.restored_check import RestoredCheck
from parquet_keytools.rotation.rotation_files import rotation_files
from parquet_keytools.rotation.tail import read_tail
from parquet_keytools.rotation.tail_rewriter import ReplacedTail, tail_rewriter
from parquet_keytools.storage import FileLocation, read_whole

_LISTED_FOLDERS = 16


def restore_data_set(path: FileLocation, check: RestoredCheck) -> RotationReport:
    """Put back the old keys of a file, or of all files under a folder, as far as they were kept.

    Args:
        path: The file or folder.
        check: Proves old keys before they are put back.

    Raises:
        FileNotFoundError: There is no such file or folder.
    """
    report = RotationReport()
    kept_of = _KeptOf()
    for location in without_leftovers(rotation_files(path)):
        try:
            with audit.about(location):
                result = _restore(location, kept_of(location), check)
        except (KeytoolsError, OSError) as error:
            result = FileRotation.failed(str(location), error)
        report.add([result], keep_results=True)
    report.kms_calls = check.calls
    return report


def drop_data_set(path: FileLocation) -> int:
    """Remove the old keys that were kept of a file, or of all files under a folder. Returns how many there were.

    Raises:
        FileNotFoundError: There is no such file or folder.
    """
    count = 0
    kept_of = _KeptOf()
    for location in rotation_files(path):
        for kept in kept_of(location):
            kept.location.filesystem.delete_file(kept.location.path)
            count += 1
    return count


class _KeptOf:
    """Finds what is kept of files, listing each folder once while one goes through its files."""

    def __init__(self) -> None:
        self._by_folder: dict[str, dict[str, list[KeptFile]]] = {}

    def __call__(self, parquet_file: FileLocation) -> list[KeptFile]:
        folder = parquet_file.path[: -len(parquet_file.name)]
        if folder not in self._by_folder:
            if len(self._by_folder) >= _LISTED_FOLDERS:
                self._by_folder.clear()
            self._by_folder[folder] = kept_files_in(parquet_file.filesystem, folder)
        return self._by_folder[folder].get(parquet_file.name, [])


def _restore(location: FileLocation, files: list[KeptFile], check: RestoredCheck) -> FileRotation:
    if not files:
        return FileRotation(str(location), Outcome.NOTHING_TO_RESTORE)
    done: list[ReplacedTail] = []
    for kind, restore in (("key_material", _restore_material), ("tail", _restore_tail)):
        # The newest first; one that a run that was cut off left behind fits nothing.
        kept = [read_kept(file) for file in files if file.kind == kind]
        if kept:
            done += restore(location, kept, check)
    how = "; ".join(part.how for part in done)
    written, copied = sum(part.bytes_written for part in done), sum(part.bytes_copied for part in done)
    return FileRotation(str(location), Outcome.RESTORED, (), how, written, copied)


def _restore_material(
    location: FileLocation, all_kept: list[KeptKeys], check: RestoredCheck
) -> Iterator[ReplacedTail]:
    material = key_material_location(location)
    content = read_whole(material, MAX_FILE_BYTES)
    kept, is_there = _fitting(location, all_kept, hashlib.sha256(content).hexdigest(), None)
    if not is_there:
        check.material(kept.old, content, str(material))
        replace_external_material(material, content, kept.old)
        yield ReplacedTail("old key material file", len(kept.old), 0)
    kept.location.filesystem.delete_file(kept.location.path)


def _restore_tail(
    location: FileLocation, all_kept: list[KeptKeys], check: RestoredCheck
) -> Iterator[ReplacedTail]:
    tail, envelope = read_tail(location)
    kept, is_there = _fitting(location, all_kept, tail.sha256, tail.offset)
    if not is_there:

        def check_written(source: ByteSource) -> None:
            length = source.size_bytes - tail.offset
            if length != len(kept.old) or bytes(source.read_at(tail.offset, length)) != kept.old:
                raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")
            check.tail(location, source, envelope)

        yield tail_rewriter(location).replace(location, tail, kept.old, check_written)
    kept.location.filesystem.delete_file(kept.location.path)


def _fitting(
    location: FileLocation, all_kept: list[KeptKeys], sha256: str, offset: int | None
) -> tuple[KeptKeys, bool]:
    """Return the newest kept keys that belong to the state of now, and whether they are in place already."""
    for kept in all_kept:
        if offset is None or kept.offset == offset:
            if kept.new_sha256 == sha256:
                return kept, False
            if hashlib.sha256(kept.old).hexdigest() == sha256:
                return kept, True
    raise KeyMaterialError(
        "the file changed since its old keys were kept: they are not put back.",
        path=str(location),
        hint="Restore the file from a backup, or drop the old keys.",
    )
