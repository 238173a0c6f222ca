"""Files and folders verified with the keys and the tables of a configuration, and damaged files salvaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from parquet_keytools import audit
from parquet_keytools.conformance.data_set import (
    ListKeeper,
    folder_report,
    is_table_metadata,
    listed_files,
    matches_any,
    unreadable,
)
from parquet_keytools.conformance.file_keys import (
    Expectation,
    FileNonces,
    MaterialFinder,
    NoncePart,
    OneKey,
    SharedNonces,
    TableFiles,
    fingerprint_key,
    use_fingerprint_key,
)
from parquet_keytools.conformance.file_verifier import FileFacts, verify_source
from parquet_keytools.conformance.inspection import Inspection, inspect_source
from parquet_keytools.conformance.report import DataSetReport, FileReport, Loss
from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.file_encryption import column_deks, decrypt_columns
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    DecryptionError,
    KeytoolsError,
    KmsUnavailableError,
    NotEncryptedError,
    ParquetFormatError,
    without_frames,
)
from parquet_keytools.files.conversion import FileResult, Progress, plaintext_output, refuse_same_file
from parquet_keytools.files.denied_columns import refuse_digests
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities, as_verified, open_files
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.format.file_layout import ByteSource
from parquet_keytools.keys.key_wrapping import FileKeyRetriever, KmsKeys
from parquet_keytools.runtime.worker_processes import FileWorkers
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.outputs import written_bytes
from parquet_keytools.storage.walk import LeftOut, ParquetFile, data_set

_FILES_AT_A_TIME = 8
_FILES_PER_REQUEST = 100
"""For how many files keys are unwrapped together."""


def finder_of(
    keys: KeyService | None, location: FileLocation, kms_keys: KmsKeys | None = None
) -> MaterialFinder | None:
    """Return what finds the keys of a file; None without a configuration."""
    if keys is None:
        return None
    return FileKeyRetriever(kms_keys or keys.kms_keys(), keys.data_keys, location)


def verify_file(
    keys: KeyService | None,
    location: FileLocation,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
) -> FileReport:
    """Verify a file; see `Keytools.verify_file`. Without keys, what needs none is checked."""
    return MemberVerifier(keys, table_name, aad_prefix).verify(location)[0]


def inspect_file(
    keys: KeyService,
    location: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    *,
    with_keys: bool,
) -> Inspection:
    """Show how a file is protected; see `Keytools.inspect_file`."""
    with audit.about(location), open_source(location) as source:
        prefix = expected_prefix(keys, source, location, table_name, aad_prefix)
        return inspect_source(source, finder_of(keys if with_keys else None, location), prefix, location.path)


def verify_folder(
    keys: KeyService | None,
    folder: FileLocation,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    *,
    part_count: int | None = None,
    allow_plaintext: Sequence[str] = (),
    expect: FileLocation | None = None,
    record: FileLocation | None = None,
    list_key: str | None = None,
    find_tables: Callable[[Sequence[FileLocation]], TableFiles] | None = None,
    on_progress: Callable[[FileReport], None] | None = None,
) -> DataSetReport:
    """Verify the files of a folder, and all of them as a data set; see `Keytools.verify_folder`.

    `find_tables` returns the files of the tables that some metadata files describe: files of authentic tables that
    keep their keys elsewhere are verified with these keys. `on_progress` is called with the report of each file.
    """
    expected, keeper = None, None
    if keys is not None and (expect is not None or record is not None):
        keeper = ListKeeper(keys, table_name, list_key)
        for target in filter(None, (expect, record)):
            keeper.refuse_inside(target, folder)
        expected = None if expect is None else keeper.read(expect)
    found = sorted(
        data_set(folder, into_passed_over=True, with_key_material=True), key=lambda entry: entry.location.path
    )
    reports: list[FileReport] = []
    members: list[FileFacts] = []
    files = [entry for entry in found if isinstance(entry, ParquetFile)]
    verify = MemberVerifier(keys, table_name, aad_prefix, folder, allow_plaintext)
    locations = {file.location.path_within(folder): file.location for file in files}
    tables = TableFiles()
    metadata_files = [e.location for e in found if isinstance(e, LeftOut) and is_table_metadata(e.location)]
    if metadata_files and find_tables is not None:
        tables = find_tables(metadata_files)
        verify.keys_of_tables = tables.keys

    def read_again(names: Collection[str], part: NoncePart) -> Iterator[tuple[str, FileNonces | None]]:
        return ((name, verify.look_at(locations[name], nonce_part=part)[1].nonces) for name in names)

    nonces = SharedNonces(read_again)
    not_attempted: list[FileLocation] = []
    of_tables = [file.location for file in files if file.location.path in tables.keys]
    others = [file for file in files if file.location.path not in tables.keys]
    outcomes = _verified(others, verify, visible=folder.is_for_all_processes)
    for location, outcome in chain(outcomes, ((location, verify.look_at(location)) for location in of_tables)):
        if isinstance(outcome, KmsUnavailableError):
            unavailable = replace(unreadable(str(location), f"not attempted: {outcome}"), kms_is_unavailable=True)
            reports.append(unavailable)
            not_attempted.append(location)
            continue
        report, facts = outcome
        reports.append(report)
        name = location.path_within(folder)
        if facts.nonces is not None:
            nonces.add_file(name, facts.nonces.invocations)
        members.append(replace(facts, name=name, nonces=None))
        if on_progress is not None:
            on_progress(report)
    data_set_report = folder_report(
        folder,
        reports,
        members,
        nonces,
        found,
        part_count=part_count,
        not_attempted=not_attempted,
        allow_plaintext=allow_plaintext,
        expected=expected,
        tables=tables,
    )
    if keeper is not None and record is not None and data_set_report.conforms:
        keeper.write(record, listed_files(members))
    return data_set_report


@dataclass(eq=False, repr=False)
class MemberVerifier:
    """Verifies files with one table of a configuration, here or in worker processes.

    Globs of accepted plaintext files are compared with paths within the folder.
    """

    keys: KeyService | None
    table_name: str | None
    aad_prefix: str | bytes | None
    folder: FileLocation | None = None
    allow_plaintext: Sequence[str] = ()
    keys_of_tables: Mapping[str, OneKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kms_keys = self.keys.kms_keys() if self.keys is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.keys, self.table_name, self.aad_prefix, self.folder, self.allow_plaintext)
        return _verifier_in_worker, (fingerprint_key(), arguments)

    @property
    def unavailable(self) -> KmsUnavailableError | None:
        """Why the KMS could not be reached, in this process."""
        return None if self._kms_keys is None else self._kms_keys.unavailable

    def prepare(self, locations: Sequence[FileLocation]) -> None:
        """Unwrap the keys of files with two requests to the KMS. The files are verified afterwards, one by one.

        A file that cannot be opened has its keys unwrapped when it is verified: it must not hold up the others.
        The audit log names the folder, since one request is for several files.
        """
        with audit.about(locations[0] if len(locations) == 1 or self.folder is None else self.folder):
            self._unwrap_together(locations)

    def _unwrap_together(self, locations: Sequence[FileLocation]) -> None:
        keys, kms_keys = self.keys, self._kms_keys
        if keys is None or keys.kms is None or kms_keys is None or kms_keys.unavailable is not None:
            return
        try:
            opened = open_files(
                locations,
                kms_keys,
                keys.data_keys,
                aad_prefix_of=lambda location, stored: keys.expected_aad_prefix(
                    location, self.table_name, self.aad_prefix, stored
                ),
                table_check=self._table,
                allow_plaintext=True,
                wanted=lambda _: (),
            )
        except (KeytoolsError, OSError, UnicodeError):
            if len(locations) > 1:
                half = len(locations) // 2
                self._unwrap_together(locations[:half])
                self._unwrap_together(locations[half:])
            return
        kms_keys.fetch(material for file in opened for material in file.column_materials())

    @property
    def _table(self) -> TableCheck | None:
        """The table of the files; None if there is none, or several and none is named."""
        assert self.keys is not None
        one = self.table_name is not None or len(self.keys.configuration.tables) == 1
        return self.keys.table_check(self.table_name) if one else None

    def __call__(self, location: FileLocation) -> tuple[FileReport, FileFacts]:
        """Verify a file of a folder; see `look_at`. Raises if the KMS could not be reached for an earlier file."""
        if self.unavailable is not None:
            raise without_frames(self.unavailable)
        return self.look_at(location)

    def look_at(self, location: FileLocation, nonce_part: NoncePart | None = None) -> tuple[FileReport, FileFacts]:
        """Verify a file of a folder: one that cannot be read must not hide what is wrong with the others."""
        try:
            return self.verify(location, nonce_part)
        except OSError as error:
            return unreadable(str(location), error.strerror or type(error).__name__), FileFacts()
        except UnicodeError:
            return unreadable(str(location), "its name is not UTF-8, and so has no AAD prefix"), FileFacts()

    def verify(self, location: FileLocation, nonce_part: NoncePart | None = None) -> tuple[FileReport, FileFacts]:
        """Verify a file, or only collect some of its nonces."""
        try:
            with audit.about(location), open_source(location) as source:
                finder = self.keys_of_tables.get(location.path) or finder_of(self.keys, location, self._kms_keys)
                expectation = self._expectation(source, location)
                report, facts = verify_source(source, finder, expectation, nonce_part=nonce_part)
                answers = {} if self._kms_keys is None else self._kms_keys.answers
                if report.denied and any(isinstance(one, KmsUnavailableError) for one in answers.values()):
                    report = replace(report, kms_is_unavailable=True)
                return report, facts
        except PermissionError as error:
            return unreadable(str(location), error.strerror or "permission denied"), FileFacts()
        except ParquetFormatError as error:
            # A file that becomes shorter while it is read.
            return unreadable(str(location), str(error)), FileFacts()

    def _expectation(self, source: ByteSource, location: FileLocation) -> Expectation:
        if (one_key := self.keys_of_tables.get(location.path)) is not None:
            prefix = ExpectedAadPrefix((one_key.aad_prefix,)) if one_key.aad_prefix else None
            return Expectation(prefix, path=location.path)
        keys, aad_prefix = self.keys, self.aad_prefix
        is_allowed = self.folder is not None and matches_any(
            location.path_within(self.folder), self.allow_plaintext
        )
        if keys is None:
            prefix = None if aad_prefix is None else ExpectedAadPrefix.of(aad_prefix)
            return Expectation(prefix, accept_plaintext=is_allowed, path=location.path)
        number, table = len(keys.configuration.tables), self._table
        return Expectation(
            aad_prefix=expected_prefix(keys, source, location, self.table_name, aad_prefix),
            allow_plaintext=keys.configuration.reading.plaintext_files == "allow",
            accept_plaintext=is_allowed,
            table=table,
            without_table=f"there are {number} tables, and none was named" if table is None and number else "",
            path=location.path,
        )


def _verifier_in_worker(key: bytes, arguments: tuple[Any, ...]) -> MemberVerifier:
    use_fingerprint_key(key)
    return MemberVerifier(*arguments)


def _verified(
    files: Sequence[ParquetFile], verify: MemberVerifier, *, visible: bool
) -> Iterator[tuple[FileLocation, tuple[FileReport, FileFacts] | KmsUnavailableError]]:
    """Yield the files, in their order, with what `verify` says of them; some are verified at a time.

    When the KMS cannot be reached, the files that were not begun have its error.
    """
    unavailable: KmsUnavailableError | None = None

    def prepared(locations: Iterator[FileLocation]) -> Iterator[FileLocation]:
        # Worker processes prepare their own files.
        while batch := list(islice(locations, _FILES_PER_REQUEST)):
            if workers.processes == 1 and unavailable is None:
                verify.prepare(batch)
            yield from batch

    workers = FileWorkers(verify, len(files) - 1, _FILES_AT_A_TIME, visible=visible, prepare=verify.prepare)
    # The first alone: it finds what is wrong with the configuration, and fetches shared keys.
    for file in files[:1]:
        try:
            yield file.location, verify(file.location)
        except KmsUnavailableError as error:
            yield file.location, error
        unavailable = verify.unavailable
    rest = [file.location for file in files[1:]]
    if unavailable is not None:
        yield from ((location, unavailable) for location in rest)
        return
    with workers:
        for location, outcome in workers.outcomes(prepared(iter(rest))):
            if isinstance(outcome, KmsUnavailableError):
                unavailable = outcome
            elif isinstance(outcome, Exception):
                raise outcome
            yield location, outcome


def expected_prefix(
    keys: KeyService,
    source: ByteSource,
    location: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
) -> ExpectedAadPrefix | None:
    """Return the AAD prefix that a file must have; which table it seems to be of, its stored prefix may say."""
    stored = None
    if table_name is None and len(keys.configuration.tables) != 1:
        with suppress(ParquetFormatError):
            stored = read_envelope(source).aad_prefix
    return keys.expected_aad_prefix(location, table_name, aad_prefix, stored)


# --- What can still be read of a damaged file, written to a new one (data-pages.md, error recovery) ---


@dataclass(frozen=True)
class SalvageResult(FileResult):
    """What was written of a damaged file, and what is missing in it.

    Attributes:
        missing_row_groups: Ordinals, in the source, of row groups that were left out.
        losses: What is lost of which chunk, page by page.
        dropped_indexes: (row group ordinal, column ordinal), in the source, of chunks whose page index or Bloom
            filter was damaged and left out; their values are all there.
    """

    row_groups: int
    missing_row_groups: tuple[int, ...]
    losses: tuple[Loss, ...]
    dropped_indexes: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing_row_groups and not self.dropped_indexes


def salvage_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    mode: int | None = None,
) -> SalvageResult:
    """Decrypt the row groups of a file that are whole; see `Keytools.salvage_file`."""
    refuse_digests(
        keys.configuration,
        "a file is not decrypted where columns are shown as digests.",
        "Salvage it with another configuration.",
    )
    refuse_same_file(source, target)
    # A column whose metadata is damaged costs its row groups alone: here, no column is opened.
    identities = FileIdentities(refuses=False)
    try:
        (opened,) = keys.open_files([source], table_name, aad_prefix, wanted=lambda _: (), identities=identities)
        opened.refuse_unencrypted()
    except NotEncryptedError:
        raise NotEncryptedError(f"{source} is not encrypted.") from None
    footer = opened.footer
    with open_source(source) as opened_source:
        prefix = expected_prefix(keys, opened_source, source, table_name, aad_prefix)
        data = as_verified(opened, opened_source)
        deks = column_deks(footer, opened.retriever)
        # Where the algorithm was exchanged no page can be read, and that is not what damage looks like.
        check_stated_algorithm(data, footer, deks)
        report, _ = verify_source(data, opened.retriever, Expectation(prefix, path=source.path))
        damage = report.damage
        if damage is None or damage.file_is_lost or (damage.row_groups and not damage.readable_row_groups):
            raise DecryptionError(
                f"{source}: nothing can be salvaged: no row group is whole.", hint="`verify` says what is damaged."
            )
        readable = damage.readable_row_groups
        with plaintext_output(target, mode, overwrite=overwrite) as pending, pending.open_sink() as sink:
            decrypt_columns(
                data,
                sink,
                footer,
                deks,
                row_group_ordinals=readable,
                without_indexes=frozenset(damage.damaged_indexes),
                on_progress=on_progress,
            )
        return SalvageResult(
            str(source),
            str(target),
            data.size_bytes,
            written_bytes([target]),
            damage.row_groups,
            tuple(ordinal for ordinal in range(damage.row_groups) if ordinal not in readable),
            damage.losses,
            tuple(place for place in damage.damaged_indexes if place[0] in readable),
        )
