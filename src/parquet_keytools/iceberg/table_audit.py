"""Finds tables, and audits the key chain of each: which keys it depends on, and what is wrong with it.

The audit does not stop at the first finding. It does not reach what a broken link leads to, and reports the link.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow as pa
from pyarrow import fs as pafs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.io.fsspec import FsspecFileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT

from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.conformance.file_keys import OneKey, TableFiles
from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KeytoolsError,
    KmsError,
    KmsUnavailableError,
    ParquetFormatError,
    WrappedKeyInvalidError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.ags1 import ENCRYPTED_MAGICS, MAGIC, PLAINTEXT_MAGICS
from parquet_keytools.iceberg.claims import (
    MAPPING_PROPERTY,
    TablePlaces,
    check_place,
    counter_problems,
    mapped_location,
    misplaced_properties,
)
from parquet_keytools.iceberg.file_io import (
    CONFIG_PROPERTY,
    check_data_file,
    check_length,
    open_as_stored,
    read_stream,
)
from parquet_keytools.iceberg.key_chain import IcebergKeys, KeyChain, is_young, master_key_of
from parquet_keytools.iceberg.manifests import (
    ListedFile,
    counters_of_list,
    counters_of_manifest,
    files_in,
    manifests_in,
)
from parquet_keytools.iceberg.metadata import (
    SnapshotKey,
    StandardKeyMetadata,
    TableEncryption,
    parse_table_metadata,
    read_metadata_file,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.storage.locations import ArrowSource, FileLocation
from parquet_keytools.storage.walk import all_files

_MS_PER_DAY = 86_400_000
_PARQUET = "PARQUET"
_BESIDE_TABLES = (".crc", "version-hint.text")
"""Files of Hadoop that no metadata file names."""
_UNREADABLE = (KeytoolsError, OSError, ValueError, pa.ArrowException)
"""Includes the ValueError for a scheme that PyIceberg does not know."""

Loaded = TypeVar("Loaded")


# --- finding a table ---


@dataclass(frozen=True)
class LocatedTable:
    """A table, of which only the metadata file was read, and how its files are opened."""

    encryption: TableEncryption
    service: KeyService
    mapping: str
    places: TablePlaces
    file_io: FileIO | None

    def open_stored(self, location: str) -> pa.NativeFile:
        """Open a file as it is stored."""
        file_io = self.file_io
        assert file_io is not None
        return open_as_stored(lambda _: file_io, location, self.mapping)

    def path_of(self, location: str) -> str:
        """Return the path of a location on its file system."""
        mapped = mapped_location(location, self.mapping)
        try:
            return PyArrowFileIO.parse_location(mapped)[2]
        except ValueError:
            return mapped

    def folder(self) -> FileLocation | None:
        """Return the folder above the folder `metadata` of the metadata file; None if it is in no such folder.

        The location in the metadata file is not used: anyone who changed it could let us list anything.
        """
        folder, _, _ = self.encryption.metadata_location.rpartition("/")
        above, _, name = folder.rpartition("/")
        if name != "metadata" or not above:
            return None
        scheme, netloc, path = PyArrowFileIO.parse_location(mapped_location(above, self.mapping))
        if isinstance(self.file_io, PyArrowFileIO):
            return FileLocation(self.file_io.fs_by_scheme(scheme, netloc), path)
        if isinstance(self.file_io, FsspecFileIO):
            return FileLocation(pafs.PyFileSystem(pafs.FSSpecHandler(self.file_io.get_fs(scheme))), path)
        return None


def located_table(
    table: str,
    config: Path | None = None,
    catalog_name: str | None = None,
    properties: Mapping[str, str] = EMPTY_DICT,
) -> LocatedTable:
    """Find a table by the location of its metadata file, or by its name in a catalog, and read that file.

    Without `config`, the properties of the catalog, or the given ones, name the configuration. Without any
    configuration, no key can be unwrapped.
    """
    given = dict(properties)
    if catalog_name is not None:
        if config is not None:
            given.setdefault(CONFIG_PROPERTY, str(config))
        loaded = table_of_catalog(catalog_name, given, table, lambda catalog, name: catalog.load_table(name))
        # Our own properties are taken from the catalog: anyone may have set properties of the table.
        of_storage = {n: v for n, v in loaded.io.properties.items() if not n.startswith("keytools.")}
        ours = {n: v for n, v in loaded.catalog.properties.items() if n.startswith("keytools.")}
        table, given = loaded.metadata_location, {**of_storage, **ours, **given}
    elif "://" not in table and not table.startswith("file:"):
        table = str(expanded(table).absolute())
    if config is None and CONFIG_PROPERTY in given:
        config = Path(given[CONFIG_PROPERTY])
    configuration = load_configuration(config) if config is not None else parse_configuration({"version": 1})
    service = KeyService(configuration, None, time.monotonic)
    mapping = given.get(MAPPING_PROPERTY, "")
    beneath = {name: value for name, value in given.items() if name != PY_IO_IMPL}
    file_io = load_file_io(beneath, mapped_location(table, mapping))
    with open_as_stored(lambda _: file_io, table, mapping) as file:
        encryption = parse_table_metadata(read_metadata_file(file, table), table)
    return LocatedTable(encryption, service, mapping, TablePlaces(table, given), file_io)


def table_of_catalog(
    catalog_name: str, properties: Mapping[str, str], table: str, load: Callable[[Catalog, str], Loaded]
) -> Loaded:
    """Load a table, by a function, from a catalog that PyIceberg knows by name.

    PyIceberg's errors are not the context of ours: they may quote anything.
    """
    try:
        return load(load_catalog(catalog_name, **properties), table)
    except (KeytoolsError, OSError):
        raise
    except (NoSuchTableError, NoSuchNamespaceError):
        text = f"the catalog {catalog_name!r} has no table {table!r}."
        hint = "Name it with its namespace: db.people."
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        text = f"the catalog {catalog_name!r} cannot be used, or does not load the table {table!r} ({reason})."
        hint = "Describe it in .pyiceberg.yaml, and name the table with its namespace: db.people."
    raise ConfigurationError(text, hint=hint)


# --- the report ---


@dataclass
class ChainLink:
    """A file of the table: a manifest list, manifest, data file or other; `children` are the files that it lists.

    `is_encrypted` says whether it has a key, and `length` its bytes as listed, None if nothing lists it.
    """

    location: str
    kind: str
    length: int | None
    is_encrypted: bool
    problems: list[str] = field(default_factory=list)
    snapshot_ids: list[int] = field(default_factory=list)
    children: list[ChainLink] = field(default_factory=list)

    @property
    def is_shared(self) -> bool:
        """Whether several snapshots have it."""
        return len(self.snapshot_ids) > 1


@dataclass
class KekReport:
    """A KEK of a table. If it `is_due`, 730 days old or from the future, writers make a new one.

    `age_days` is None without a valid `KEY_TIMESTAMP`; `manifest_lists` is the number of keys that it encrypts.
    """

    key_id: str
    master_key_id: str
    age_days: int | None
    is_due: bool
    manifest_lists: int
    problems: list[str] = field(default_factory=list)


@dataclass
class TableReport:
    """The result of an audit.

    Attributes:
        lists: The manifest lists of its snapshots, in order.
        statistics: Files with statistics of the table and of its partitions.
        problems: What is wrong with the metadata file itself.
        links: All files of the key chain, and plaintext files in the folder that no readable link names.
        orphans: Locations of files in the folder of the table that nothing names; None if unknown.
        kms_failed: Whether the KMS refused or could not be reached, which causes other problems, too.
    """

    encryption: TableEncryption
    keks: list[KekReport] = field(default_factory=list)
    lists: list[ChainLink] = field(default_factory=list)
    statistics: list[ChainLink] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    links: dict[str, ChainLink] = field(default_factory=dict)
    orphans: list[str] | None = None
    kms_failed: bool = False
    kms_is_unavailable: bool = False

    @property
    def findings(self) -> list[tuple[str, str]]:
        """All problems: the link, and what is wrong with it."""
        return [
            *((f"metadata file {self.encryption.metadata_location}", problem) for problem in self.problems),
            *((f"KEK {kek.key_id!r}", problem) for kek in self.keks for problem in kek.problems),
            *((f"{link.kind} {link.location}", problem) for link in self.files for problem in link.problems),
        ]

    @property
    def files(self) -> list[ChainLink]:
        """All files that were examined."""
        return [*self.links.values(), *self.statistics]

    @property
    def plaintext_files(self) -> list[str]:
        """Locations of the plaintext files in this encrypted table."""
        return [link.location for link in self.files if not link.is_encrypted]

    @property
    def master_key_ids(self) -> list[str]:
        """The master key for new KEKs, and the other master keys that the table depends on."""
        ids = [self.encryption.master_key_id, *(kek.master_key_id for kek in self.keks)]
        return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


# --- the audit ---


class TableAudit:
    """Walks down the key chain, and decrypts manifest lists, manifests and, `with_data`, all other files.

    After `run`, `parquet_keys` has the key of each encrypted Parquet file, by its location.
    """

    def __init__(self, located: LocatedTable, *, with_data: bool) -> None:
        self._located = located
        self._chain = KeyChain(located.encryption, IcebergKeys(located.service))
        self._open_stored = located.open_stored
        self._with_data = with_data
        self._report = TableReport(located.encryption)
        self._fingerprint_key = secrets.token_bytes(32)
        self._fingerprints: dict[bytes, str] = {}
        self._is_complete = True
        self._counters = Counter[str]()
        self.parquet_keys: dict[str, StandardKeyMetadata] = {}

    def run(self) -> TableReport:
        """Return what was found."""
        encryption, report = self._report.encryption, self._report
        self._add_keks()
        for snapshot in encryption.snapshots:
            report.lists.append(self._list_of(snapshot))
        for location in encryption.statistics:
            self._add_statistics(location)
        if not encryption.is_encrypted:
            if self._with_data:
                report.problems.append(
                    "the table is not encrypted, and nothing of it was verified: it never was, or lost its keys"
                )
            return report
        if self._with_data:
            self._add_orphans()
        self._add_problems_of_claims()
        for link in report.files:
            if not link.is_encrypted:
                link.problems.insert(0, "it is a plaintext file in an encrypted table")
        return report

    def _add_problems_of_claims(self) -> None:
        encryption, problems = self._report.encryption, self._report.problems
        problems += self._located.places.problems(encryption.document)
        problems += counter_problems(encryption.document, self._counters)
        for location in encryption.earlier_metadata:
            if not self._located.places.has_metadata(location):
                problems.append(
                    f"its metadata log names {location}, which is not a metadata file in the folder of this one: "
                    "writers that delete old metadata files would delete it"
                )
        if encryption.master_key_id is None:
            problems.append("the property encryption.key-id is missing: writers would make plaintext files")
        else:
            try:
                master_key_of(encryption)
            except KeyMaterialError as error:
                problems.append(str(error))
        problems += [
            f"it has the property {name}, which catalogs alone have: it says who opens files, or where"
            for name in misplaced_properties(encryption.properties)
        ]

    # --- keys ---

    def _add_keks(self) -> None:
        encryption = self._report.encryption
        needed = {snapshot.key_id for snapshot in encryption.snapshots}
        uses = Counter(entry.encrypted_by_id for entry in encryption.keys.values())
        now_ms = time.time() * 1000
        for entry in encryption.keks:
            if entry.timestamp is None and not uses[entry.key_id] and entry.key_id in needed:
                continue  # the key of a manifest list whose KEK is missing, which is reported with its snapshot
            made = entry.timestamp_ms
            age = None if made is None else int((now_ms - made) // _MS_PER_DAY)
            is_due = made is not None and not is_young(entry, now_ms)
            kek = KekReport(entry.key_id, entry.encrypted_by_id, age, is_due, uses[entry.key_id])
            if made is None:
                kek.problems.append("it has no valid KEY_TIMESTAMP")
            try:
                self._chain.kek(entry.key_id)
            except KeytoolsError as error:
                kek.problems.append(str(error))
                if isinstance(error, KmsError) and not isinstance(error, WrappedKeyInvalidError):
                    self._report.kms_failed = True
                    self._report.kms_is_unavailable |= isinstance(error, KmsUnavailableError)
            self._report.keks.append(kek)

    def _note_key(self, link: ChainLink, key: StandardKeyMetadata) -> None:
        """Report a file without an AAD prefix, and files that share a DEK, under which a nonce would repeat."""
        if not key.aad_prefix:
            link.problems.append(
                "its key metadata has no AAD prefix: another file under its key would be accepted"
            )
        fingerprint = hashlib.blake2b(key.encryption_key.reveal(), key=self._fingerprint_key).digest()
        other = self._fingerprints.setdefault(fingerprint, link.location)
        if other != link.location:
            link.problems.append(f"it has the same data key as {other}")

    # --- files ---

    def _list_of(self, snapshot: SnapshotKey) -> ChainLink:
        link = ChainLink(snapshot.manifest_list, "manifest list", None, snapshot.key_id is not None)
        link.snapshot_ids.append(snapshot.snapshot_id)
        if (known := self._report.links.get(link.location)) is not None:
            known.problems.append(f"snapshot {snapshot.snapshot_id} has the same manifest list as another one")
            return link
        self._report.links[link.location] = link
        name = f"manifest list {snapshot.manifest_list} of snapshot {snapshot.snapshot_id}"
        with self._noting(link, leads_on=True):
            check_place(link.location, self._report.encryption.metadata_location, self._located.mapping)
            content = self._content(link, self._chain.manifest_list_key(snapshot), name)
            if content is not None:
                self._counters |= counters_of_list(content, name)
                manifests = manifests_in(content, name, snapshot.snapshot_id)
                link.children = [self._manifest(file, snapshot.snapshot_id) for file in manifests]
        return link

    def _manifest(self, file: ListedFile, snapshot_id: int) -> ChainLink:
        known = self._report.links.get(file.location)
        link = known or self._new_link(file)
        if known is None:
            with self._noting(link, leads_on=True):
                content = self._content(link, file.key_metadata(), file.name)
                if content is not None:
                    self._counters |= counters_of_manifest(content, file.name)
                    # A file whose entry says that it was deleted may be gone.
                    link.children = [self._data_file(f) for f in files_in(content, file.name) if f.is_live]
        for each in (link, *link.children):
            if snapshot_id not in each.snapshot_ids:
                each.snapshot_ids.append(snapshot_id)
        return link

    def _data_file(self, file: ListedFile) -> ChainLink:
        link = self._report.links.get(file.location)
        if link is not None:
            return link
        link = self._new_link(file)
        with self._noting(link):
            if (key := file.key_metadata()) is not None:
                self._note_key(link, key)
                if file.format == _PARQUET:
                    self.parquet_keys[file.location] = key
                with self._open_stored(file.location) as stored:
                    check_length(stored.size(), key, file.length, file.name)
                    if self._with_data and file.format == _PARQUET:
                        check_data_file(ArrowSource(f"the {file.name}", stored, stored.size()), key, file.name)
                    elif self._with_data:
                        read_stream(stored, key, file.length, file.name)
        return link

    @contextlib.contextmanager
    def _noting(self, link: ChainLink, *, leads_on: bool = False) -> Iterator[None]:
        """Note why a file cannot be read; `leads_on` if the audit then misses other files."""
        try:
            yield
        except _UNREADABLE as error:
            text = str(error)
            link.problems.append(text if isinstance(error, KeytoolsError) else f"it cannot be read: {text}")
            self._is_complete = self._is_complete and not leads_on

    def _new_link(self, file: ListedFile) -> ChainLink:
        link = ChainLink(file.location, file.kind, file.length, file.encoded_key is not None)
        self._report.links[file.location] = link
        return link

    def _content(self, link: ChainLink, key: StandardKeyMetadata | None, name: str) -> bytes | None:
        """Return the plaintext of a manifest list or manifest; None without a key: anyone may have made it."""
        if key is None:
            self._is_complete = False
            return None
        self._note_key(link, key)
        with self._open_stored(link.location) as stored:
            if key.file_length is None:
                link.problems.append("its key metadata has no file_length, so blocks cut off its end go unseen")
            listed_length, link.length = link.length, stored.size()
            return read_stream(stored, key, listed_length, name)

    def _add_statistics(self, location: str) -> None:
        link = ChainLink(location, "statistics file", None, is_encrypted=False)
        with self._noting(link):
            check_place(location, self._report.encryption.metadata_location, self._located.mapping)
            with self._open_stored(location) as stored:
                # The format has no key for statistics: a file that begins like a stream is at least not plaintext.
                link.is_encrypted = stored.read(len(MAGIC)) in ENCRYPTED_MAGICS
                link.length = stored.size()
        self._report.statistics.append(link)

    def _add_orphans(self) -> None:
        """Find files in the folder of the table that nothing names: of expired snapshots or killed commits."""
        encryption, located = self._report.encryption, self._located
        folder = located.folder()
        if folder is None:
            return
        links = (*self._report.links.values(), *self._report.statistics)
        of_table = (encryption.metadata_location, *encryption.earlier_metadata)
        named = {located.path_of(location) for location in (*of_table, *(link.location for link in links))}
        prefix = encryption.metadata_location.rsplit("/", 2)[0]
        orphans = []
        for file in all_files(folder):
            if file.path in named or file.name.endswith(_BESIDE_TABLES):
                continue
            location = f"{prefix}/{file.path_within(folder)}"
            orphans.append(location)
            with contextlib.suppress(*_UNREADABLE), self._open_stored(location) as stored:
                if stored.read(len(MAGIC)) in PLAINTEXT_MAGICS:
                    kind = "orphan" if self._is_complete else "file"
                    self._report.links[location] = ChainLink(location, kind, stored.size(), is_encrypted=False)
        # Below a broken link, it is unknown what the table names.
        if self._is_complete:
            self._report.orphans = orphans


# --- the encrypted tables whose metadata files are in a folder ---


@dataclass(frozen=True)
class _TableInFolder(LocatedTable):
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

    Only files of a table's own folder are read: anyone may have put a metadata file into a folder of data. The
    newest metadata file of a table is checked first. Earlier ones that its log names are of the table if they have
    its UUID: their snapshots may have expired.
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

    def updated_ms(path: str) -> int:
        updated = tables[path].encryption.document.get("last-updated-ms")
        return updated if type(updated) is int else 0

    for path in sorted(tables, key=updated_ms, reverse=True):
        table = tables[path]
        if path in accepted:
            continue
        audit = TableAudit(table, with_data=False)
        report = audit.run()
        reason = next((f"{link}: {problem}" for link, problem in report.findings), "")
        if not report.encryption.is_encrypted:
            reason = "its table is not encrypted"
        if reason:
            (not_checked if report.kms_failed else refused)[path] = reason
            kms_is_unavailable |= report.kms_is_unavailable
            continue
        accepted.add(path)
        for location in table.encryption.earlier_metadata:
            with contextlib.suppress(ParquetFormatError):
                earlier = tables.get(table.stored(location).path)
                if earlier is not None and earlier.encryption.table_uuid == table.encryption.table_uuid:
                    accepted.add(table.stored(location).path)
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
    return _TableInFolder(table, service, "", TablePlaces(location, {}), None, root)
