"""The encrypted tables whose metadata files are in a folder: which are authentic, and the keys of their files.

Unlike `table_audit`, which is given a table, only files of the table's own folder are read: anyone may have put a
metadata file into a folder of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import pyarrow as pa

from parquet_keytools.conformance.file_keys import OneKey, TableFiles
from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.metadata import TableEncryption, parse_table_metadata, read_metadata_file
from parquet_keytools.iceberg.table_audit import AuditedTable, TableAudit, TableReport
from parquet_keytools.storage.locations import FileLocation


@dataclass(frozen=True)
class _TableInFolder(AuditedTable):
    """A table that lies where it was found, also if its folder was copied or moved."""

    root: FileLocation

    def stored(self, location: str) -> FileLocation:
        """Return a file of the table; `ParquetFormatError` if it is not in the folder of the table."""
        within = location.removeprefix(f"{self.encryption.location.rstrip('/')}/")
        if within == location or ".." in within.split("/"):
            raise ParquetFormatError(f"{location[:200]} is not in the folder of the table.")
        return self.root.below(within)

    def open_stored(self, location: str) -> pa.NativeFile:
        file = self.stored(location)
        if not file.is_file():
            raise ParquetFormatError(f"{location[:200]} is not there, or not a regular file.")
        return file.filesystem.open_input_file(file.path)

    def path_of(self, location: str) -> str:
        return self.stored(location).path

    def folder(self) -> FileLocation:
        return self.root


def tables_in_folder(metadata_files: Sequence[FileLocation], service: KeyService) -> TableFiles:
    """Check the tables of metadata files as `iceberg inspect` does: down to the lengths of their data files.

    The newest metadata file of a table is checked first. Earlier ones that its log names are of the table if they
    have its UUID: their snapshots may have expired.
    """
    accepted: set[str] = set()
    refused: dict[str, str] = {}
    not_checked: dict[str, str] = {}
    keys: dict[str, OneKey] = {}
    kms_is_unavailable = False
    tables: dict[str, _TableInFolder] = {}
    for file in metadata_files:
        try:
            tables[file.path] = _table_of(file, service)
        except (KeytoolsError, OSError) as error:
            refused[file.path] = str(error)
    newest_first = sorted(tables, key=lambda path: _updated_ms(tables[path].encryption), reverse=True)
    for path in newest_first:
        table = tables[path]
        if path in accepted:
            continue
        audit = TableAudit(table, with_data=False)
        report = audit.run()
        if reason := _refusal(report):
            (not_checked if report.kms_failed else refused)[path] = reason
            kms_is_unavailable |= report.kms_is_unavailable
            continue
        accepted.add(path)
        accepted.update(_logged(table, tables))
        for location, key in audit.parquet_keys.items():
            keys[table.stored(location).path] = OneKey(key.encryption_key, key.aad_prefix)
    return TableFiles(frozenset(accepted), refused, not_checked, keys, kms_is_unavailable)


def _table_of(file: FileLocation, service: KeyService) -> _TableInFolder:
    with file.filesystem.open_input_file(file.path) as stored:
        encryption = parse_table_metadata(read_metadata_file(stored, file.path), file.path)
    folder = PurePosixPath(file.path).parent
    if folder.name != "metadata":
        raise ParquetFormatError("it is not in a folder `metadata`.")
    root = FileLocation(file.filesystem, str(folder.parent))
    location = f"{encryption.location.rstrip('/')}/metadata/{file.name}"
    table = replace(encryption, metadata_location=location)
    return _TableInFolder(table, service, "", TablePlaces(location, {}), root)


def _updated_ms(table: TableEncryption) -> int:
    updated = table.document.get("last-updated-ms")
    return updated if type(updated) is int else 0


def _refusal(report: TableReport) -> str:
    """Return what is wrong with a table; nothing if it is authentic."""
    if not report.encryption.is_encrypted:
        return "its table is not encrypted"
    return next((f"{link}: {problem}" for link, problem in report.findings), "")


def _logged(table: _TableInFolder, tables: Mapping[str, _TableInFolder]) -> Iterator[str]:
    """Yield the paths of earlier metadata files of a table."""
    for location in table.encryption.earlier_metadata:
        with suppress(ParquetFormatError):
            path = table.stored(location).path
            if path in tables and tables[path].encryption.table_uuid == table.encryption.table_uuid:
                yield path
