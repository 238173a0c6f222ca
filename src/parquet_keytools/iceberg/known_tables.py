"""What this process has learnt of encrypted tables: the key of each manifest list, manifest and file.

PyIceberg makes a FileIO for reading the metadata file and another one for the table, and tells neither of the
other. So what one learns is kept here, for all of the same configuration, by location.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.key_chain import IcebergKeys, KeyChain
from parquet_keytools.iceberg.manifests import ListedFile, files_in
from parquet_keytools.iceberg.metadata import SnapshotKey, TableEncryption
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.view.chunk_view import PageCache

_KEPT_TABLES = 128
"""So many states of tables are kept for other FileIOs; one that a FileIO uses is kept by it as well."""


class KnownTable:
    """One state of an encrypted table, and the files of it that were seen so far."""

    def __init__(self, encryption: TableEncryption, keys: IcebergKeys) -> None:
        self.encryption = encryption
        self.chain = KeyChain(encryption, keys)
        self._lists = {snapshot.manifest_list: snapshot for snapshot in encryption.snapshots}
        self._files: dict[str, ListedFile] = {}
        self._lock = ForkSafeLock()
        self._pending: dict[str, tuple[SecretBytes, bool]] = {}
        self._read: set[str] = set()

    def snapshot_of(self, manifest_list: str) -> SnapshotKey | None:
        """Return the snapshot that has a manifest list, or None."""
        return self._lists.get(manifest_list)

    def file_at(self, location: str) -> ListedFile | None:
        """Return the manifest or data file at a location, if it is known; errors as `files_in`."""
        found = self._files.get(location)
        if found is None and self._pending:
            with self._lock:
                # It stays pending until it is learnt: other threads wait for it here.
                for manifest, (content, authentic) in self._pending.items():
                    name = f"manifest {manifest}"
                    self.learn(manifest, files_in(content.reveal(), name, authentic=authentic))
                self._pending = {}
            found = self._files.get(location)
        return found

    def learn_later(self, manifest: str, content: bytes, *, authentic: bool) -> None:
        """Take a manifest, which is looked into once one of its files is opened: planning a scan opens none."""
        with self._lock:
            if manifest not in self._read:
                self._pending[manifest] = SecretBytes(content), authentic
                self._read.add(manifest)

    def learn(self, read_location: str, files: Iterable[ListedFile]) -> None:
        """Take what a manifest list or a manifest says of its files."""
        for file in files:
            known = self._files.get(file.location)
            # Once a file is known to be encrypted, nothing makes it a plaintext one.
            if known is None or file.encoded_key is not None:
                self._files[file.location] = file
        self._read.add(read_location)

    def unread(self, manifests: bool) -> Iterator[str]:
        """Yield the locations of manifest lists, or of manifests known so far, that were not read yet."""
        if manifests:
            locations = [file.location for file in list(self._files.values()) if file.kind == "manifest"]
        else:
            current = self.encryption.current_snapshot_id
            newest_first = sorted(
                self.encryption.snapshots, key=lambda s: (s.snapshot_id == current, s.timestamp_ms), reverse=True
            )
            locations = [snapshot.manifest_list for snapshot in newest_first]
        return (location for location in locations if location not in self._read)


class KnownTables:
    """The states of encrypted tables that were read with one configuration, the newest last, and their pages."""

    def __init__(self, keys: IcebergKeys) -> None:
        self.keys = keys
        self.pages = PageCache()
        self._lock = ForkSafeLock()
        self._tables: OrderedDict[str, KnownTable] = OrderedDict()

    def add(self, encryption: TableEncryption) -> KnownTable:
        """Take a state of a table. What was learnt of the very same state stays."""
        location = encryption.metadata_location
        with self._lock:
            table = self._tables.pop(location, None)
            if table is None or table.encryption != encryption:
                table = KnownTable(encryption, self.keys)
            self._tables[location] = table
            while len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
            return table

    def with_file(self, location: str) -> KnownTable | None:
        """Return the newest state that knows a manifest list, manifest or data file, or None."""
        for table in reversed(self._all()):
            # What is wrong with a manifest of another table is none of this one's business.
            with contextlib.suppress(ParquetFormatError):
                if table.snapshot_of(location) is not None or table.file_at(location) is not None:
                    return table
        return None

    def metadata_locations(self, properties: Mapping[str, str]) -> list[str]:
        """Return the metadata files of tables whose properties are among these, the newest last."""
        return [
            table.encryption.metadata_location
            for table in self._all()
            if table.encryption.properties.items() <= properties.items()
        ]

    def holding(self, location: str) -> KnownTable | None:
        """Return the newest state of an encrypted table in whose folder a location is, or None."""
        for table in reversed(self._all()):
            folder = table.encryption.location
            if folder and location.startswith(f"{folder.rstrip('/')}/"):
                return table
        return None

    def _all(self) -> list[KnownTable]:
        with self._lock:
            return list(self._tables.values())


_of_configurations: dict[Path, tuple[tuple[int, int], KnownTables]] = {}
_lock = ForkSafeLock()


def known_tables(configuration_file: str) -> KnownTables:
    """Return the one object of this process for a configuration file; a changed file is read again."""
    path = expanded(configuration_file).absolute()
    status = path.stat()
    identity = (status.st_mtime_ns, status.st_size)
    with _lock:
        found = _of_configurations.get(path)
        if found is None or found[0] != identity:
            service = KeyService(load_configuration(path), None, time.monotonic)
            found = _of_configurations[path] = identity, KnownTables(IcebergKeys(service))
        return found[1]
