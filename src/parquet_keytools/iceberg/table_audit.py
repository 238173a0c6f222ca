"""The key chain of a table, link by link: which keys it depends on, and what is wrong with it.

Nothing stops at the first finding. What a broken link leads to is not reached, and the report says so by the link.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from parquet_keytools.errors import KeyMaterialError, KeytoolsError, KmsError, WrappedKeyInvalidError
from parquet_keytools.iceberg.ags1 import MAGIC
from parquet_keytools.iceberg.claims import Counters, counter_problems
from parquet_keytools.iceberg.key_chain import IcebergKeys, KeyChain, is_young, master_key_of
from parquet_keytools.iceberg.located_table import LocatedTable
from parquet_keytools.iceberg.manifests import (
    ListedFile,
    counters_of_list,
    counters_of_manifest,
    files_in,
    manifests_in,
    read_plaintext,
)
from parquet_keytools.iceberg.metadata import (
    SnapshotKey,
    StandardKeyMetadata,
    TableEncryption,
    parse_table_metadata,
    read_metadata_file,
)
from parquet_keytools.iceberg.table_files import (
    check_length,
    check_place,
    decrypt_data_file,
    misplaced_properties,
    read_stream,
)
from parquet_keytools.storage.sources import ArrowSource
from parquet_keytools.storage.walk import all_files

_MS_A_DAY = 86_400_000
_PARQUET = "PARQUET"
_ENCRYPTED = (MAGIC, b"PARE")
_PLAINTEXT = (b"PAR1", b"Obj\x01", b"PFA1")
_BESIDE_TABLES = (".crc", "version-hint.text")
"""Files of Hadoop that no metadata file names."""
_UNREADABLE = (KeytoolsError, OSError, ValueError, pa.ArrowException)
"""Also what a location is refused with: a scheme that PyIceberg does not know is a ValueError."""


@dataclass
class ChainLink:
    """A file of the table.

    Attributes:
        location: Where it lies.
        kind: `manifest list`, `manifest`, `data file`, ...
        length: Its bytes, as listed; None where nothing lists them.
        is_encrypted: Whether it has a key; a file that has one and is plaintext is a problem.
        problems: What is wrong with it.
        snapshot_ids: The snapshots that have it.
        children: The files that it lists.
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
    """A KEK of a table.

    Attributes:
        key_id: Its name in the table.
        master_key_id: What wraps it.
        age_days: Its age, or None where it has no valid `KEY_TIMESTAMP`.
        is_due: Whether writers make a new one, for it is 730 days old, or from the future.
        manifest_lists: How many keys of manifest lists it encrypts.
        problems: What is wrong with it.
    """

    key_id: str
    master_key_id: str
    age_days: int | None
    is_due: bool
    manifest_lists: int
    problems: list[str] = field(default_factory=list)


@dataclass
class TableReport:
    """What was found out about a table.

    Attributes:
        encryption: What its metadata file says.
        keks: Its KEKs.
        lists: The manifest lists of its snapshots, in their order.
        statistics: Files with statistics, of the table and of its partitions.
        plaintext_orphans: Plaintext files in the folder of an encrypted table that nothing names.
        problems: What is wrong with the metadata file itself.
        unneeded_keys: Entries of `encryption-keys` that no snapshot needs.
        links: All files, each once.
        orphans: Locations of files in the folder of the table that nothing names; None where that is unknown.
        expired: The orphans that belonged to expired snapshots.
        kms_failed: Whether the KMS could not be reached or refused: then it is the reason of other problems too.
    """

    encryption: TableEncryption
    keks: list[KekReport] = field(default_factory=list)
    lists: list[ChainLink] = field(default_factory=list)
    statistics: list[ChainLink] = field(default_factory=list)
    plaintext_orphans: list[ChainLink] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unneeded_keys: list[str] = field(default_factory=list)
    links: dict[str, ChainLink] = field(default_factory=dict)
    orphans: list[str] | None = None
    expired: list[str] = field(default_factory=list)
    kms_failed: bool = False

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
        """All files that were looked at."""
        return [*self.links.values(), *self.statistics, *self.plaintext_orphans]

    @property
    def plaintext_files(self) -> list[str]:
        """Locations of the plaintext files in this encrypted table."""
        return [link.location for link in self.files if not link.is_encrypted]

    @property
    def master_key_ids(self) -> list[str]:
        """The master keys that the table depends on, and the one for new KEKs."""
        ids = [self.encryption.master_key_id, *(kek.master_key_id for kek in self.keks)]
        return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


class TableAudit:
    """Walks down the key chain; it decrypts every file `with_data`, else manifest lists and manifests alone."""

    def __init__(self, located: LocatedTable, *, with_data: bool) -> None:
        self._located = located
        self._chain = KeyChain(located.encryption, IcebergKeys(located.service))
        self._open_stored = located.open_stored
        self._with_data = with_data
        self._report = TableReport(located.encryption)
        self._fingerprint_key = secrets.token_bytes(32)
        self._fingerprints: dict[bytes, str] = {}
        self._is_complete = True
        self._counters = Counters()

    def run(self) -> TableReport:
        """Return what was found."""
        encryption = self._report.encryption
        self._add_keks()
        for snapshot in encryption.snapshots:
            self._report.lists.append(self._list_of(snapshot))
        for location in encryption.statistics:
            self._add_statistics(location)
        if encryption.is_encrypted:
            self._report.problems += self._located.places.problems(encryption.document)
            self._report.problems += counter_problems(encryption.document, self._counters)
            for location in encryption.earlier_metadata:
                if not self._located.places.has_metadata(location):
                    self._report.problems.append(
                        f"its metadata log names {location}, which is no metadata file in the folder of this one: "
                        "writers that delete old metadata files would delete it"
                    )
        if self._with_data:
            self._add_orphans()
            if not encryption.is_encrypted:
                self._report.problems.append(
                    "the table is not encrypted, and nothing of it was verified: it never was, or lost its keys"
                )
        if encryption.is_encrypted and encryption.master_key_id is None:
            self._report.problems.append(
                "the property encryption.key-id is missing: writers would make plaintext files"
            )
        elif encryption.is_encrypted:
            try:
                master_key_of(encryption)
            except KeyMaterialError as error:
                self._report.problems.append(str(error))
        if encryption.is_encrypted:
            self._report.problems += [
                f"it has the property {name}, which catalogs alone have: it says who opens files, or where"
                for name in misplaced_properties(encryption.properties)
            ]
            for link in self._report.files:
                if not link.is_encrypted:
                    link.problems.insert(0, "it is a plaintext file in an encrypted table")
        return self._report

    # --- keys ---

    def _add_keks(self) -> None:
        encryption = self._report.encryption
        needed = {snapshot.key_id for snapshot in encryption.snapshots}
        uses = Counter(entry.encrypted_by_id for entry in encryption.keys.values())
        now_ms = time.time() * 1000
        for entry in encryption.keks:
            if entry.timestamp is None and not uses[entry.key_id] and entry.key_id in needed:
                continue  # the key of a manifest list whose KEK is missing: its snapshot says so
            made = entry.timestamp_ms
            age = None if made is None else int((now_ms - made) // _MS_A_DAY)
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
            self._report.keks.append(kek)
        self._report.unneeded_keys += encryption.unneeded_keys

    # --- files ---

    def _list_of(self, snapshot: SnapshotKey) -> ChainLink:
        link = ChainLink(snapshot.manifest_list, "manifest list", None, snapshot.key_id is not None)
        link.snapshot_ids.append(snapshot.snapshot_id)
        if (known := self._report.links.get(link.location)) is not None:
            known.problems.append(f"snapshot {snapshot.snapshot_id} has the same manifest list as another one")
            return link
        self._report.links[link.location] = link
        encryption = self._report.encryption
        name = f"manifest list {snapshot.manifest_list} of snapshot {snapshot.snapshot_id}"
        with self._noting(link, leads_on=True):
            key = self._chain.manifest_list_key(snapshot)
            self._note_key(link, key)
            check_place(snapshot.manifest_list, encryption.metadata_location, self._located.mapping)
            content = self._content(link, key, name)
            if key is not None:
                self._counters |= counters_of_list(content, name)
            manifests = manifests_in(content, name, snapshot.snapshot_id, authentic=key is not None)
            link.children = [self._manifest(file, snapshot.snapshot_id) for file in manifests]
        return link

    def _manifest(self, file: ListedFile, snapshot_id: int) -> ChainLink:
        known = self._report.links.get(file.location)
        link = known or self._new_link(file)
        if known is None:
            with self._noting(link, leads_on=True):
                key = file.key_metadata()
                self._note_key(link, key)
                content = self._content(link, key, file.name)
                files = files_in(content, file.name, authentic=key is not None)
                if key is not None:
                    self._counters |= counters_of_manifest(content, file.name)
                # An entry of a deleted file is history: the file itself may be gone.
                link.children = [self._data_file(child) for child in files if child.is_live]
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
            key = file.key_metadata()
            self._note_key(link, key)
            if key is not None:
                with self._open_stored(file.location) as stored:
                    check_length(stored.size(), key, file.length, file.name)
                    if self._with_data and file.format == _PARQUET:
                        decrypt_data_file(ArrowSource(f"the {file.name}", stored, stored.size()), key, file.name)
                    elif self._with_data:
                        read_stream(stored, key, file.length, file.name)
        return link

    @contextlib.contextmanager
    def _noting(self, link: ChainLink, *, leads_on: bool = False) -> Iterator[None]:
        """Note why a file cannot be read, and whether the audit misses what it leads to."""
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

    def _content(self, link: ChainLink, key: StandardKeyMetadata | None, name: str) -> bytes:
        with self._open_stored(link.location) as stored:
            if key is None:
                return read_plaintext(stored)
            if key.file_length is None:
                link.problems.append("its key metadata has no file_length, so blocks cut off its end go unseen")
            listed_length, link.length = link.length, stored.size()
            return read_stream(stored, key, listed_length, name)

    def _note_key(self, link: ChainLink, key: StandardKeyMetadata | None) -> None:
        """Report a DEK that two files share: one nonce would be used twice some day."""
        if key is None:
            return
        if not key.aad_prefix:
            link.problems.append(
                "its key metadata has no AAD prefix: another file under its key would be accepted"
            )
        fingerprint = hashlib.blake2b(key.encryption_key.reveal(), key=self._fingerprint_key).digest()
        other = self._fingerprints.setdefault(fingerprint, link.location)
        if other != link.location:
            link.problems.append(f"it has the same data key as {other}")

    def _add_statistics(self, location: str) -> None:
        link = ChainLink(location, "statistics file", None, is_encrypted=False)
        with self._noting(link):
            check_place(location, self._report.encryption.metadata_location, self._located.mapping)
            with self._open_stored(location) as stored:
                # The format gives statistics no key: what begins like a stream is at least no plaintext.
                link.is_encrypted = stored.read(len(MAGIC)) in _ENCRYPTED
                link.length = stored.size()
        self._report.statistics.append(link)

    def _add_orphans(self) -> None:
        """Find what lies in the folder of the table and nothing names: commits that were killed leave it.

        Expired snapshots leave files, too; which ones, earlier metadata files say, as far as the log names them.
        """
        encryption, located = self._report.encryption, self._located
        folder = located.folder()
        if folder is None or not self._is_complete or not encryption.is_encrypted:
            return
        links = (*self._report.links.values(), *self._report.statistics)
        of_table = (encryption.metadata_location, *encryption.earlier_metadata)
        named = {located.path_of(location) for location in (*of_table, *(link.location for link in links))}
        prefix = encryption.metadata_location.rsplit("/", 2)[0]
        self._report.orphans = []
        for file in all_files(folder):
            if file.path in named or file.name.endswith(_BESIDE_TABLES):
                continue
            location = f"{prefix}/{file.path_within(folder)}"
            self._report.orphans.append(location)
            with contextlib.suppress(*_UNREADABLE), self._open_stored(location) as stored:
                if stored.read(len(MAGIC)) in _PLAINTEXT:
                    self._report.plaintext_orphans.append(ChainLink(location, "orphan", stored.size(), False))
        if self._report.orphans:
            expired = {located.path_of(location) for location in self._files_of_expired_snapshots()}
            self._report.expired = [o for o in self._report.orphans if located.path_of(o) in expired]

    def _files_of_expired_snapshots(self) -> Iterator[str]:
        """Yield what the snapshots had that only earlier metadata files have; what cannot be read is left out."""
        encryption, keys = self._report.encryption, IcebergKeys(self._located.service)
        seen = {snapshot.manifest_list for snapshot in encryption.snapshots}
        for location in reversed(encryption.earlier_metadata):
            earlier = None
            with contextlib.suppress(*_UNREADABLE):
                if self._located.places.has_metadata(location):
                    with self._open_stored(location) as stored:
                        earlier = parse_table_metadata(read_metadata_file(stored, location), location)
            if earlier is None or earlier.table_uuid != encryption.table_uuid:
                continue
            chain = KeyChain(earlier, keys)
            for snapshot in earlier.snapshots:
                if snapshot.manifest_list not in seen and snapshot.key_id is not None:
                    seen.add(snapshot.manifest_list)
                    yield snapshot.manifest_list
                    yield from self._files_of_snapshot(chain, snapshot, seen)

    def _files_of_snapshot(self, chain: KeyChain, snapshot: SnapshotKey, seen: set[str]) -> Iterator[str]:
        """Yield the manifests and files of a snapshot, except for manifests that were seen."""
        with contextlib.suppress(*_UNREADABLE):
            check_place(snapshot.manifest_list, chain.table.metadata_location, self._located.mapping)
            content = self._decrypted(snapshot.manifest_list, chain.manifest_list_key(snapshot))
            for manifest in manifests_in(content, "manifest list", snapshot.snapshot_id, authentic=True):
                if manifest.location in seen:
                    continue
                seen.add(manifest.location)
                yield manifest.location
                with contextlib.suppress(*_UNREADABLE):
                    content = self._decrypted(manifest.location, manifest.key_metadata())
                    yield from (file.location for file in files_in(content, "manifest", authentic=True))

    def _decrypted(self, location: str, key: StandardKeyMetadata | None) -> bytes:
        if key is None:
            raise KeyMaterialError(f"{location} has no key")
        with self._open_stored(location) as stored:
            return read_stream(stored, key, None, location)
