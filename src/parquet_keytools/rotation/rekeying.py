"""Files encrypted anew in their place, page by page, with new data keys: after a DEK or a KEK leaked."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from parquet_keytools import audit
from parquet_keytools.encryption import file_encryptor
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import ColumnEncryption, Footer, FooterMode
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.errors import KeytoolsError, KmsUnavailableError, NotEncryptedError, OutputError
from parquet_keytools.format.byte_ranges import ByteSink
from parquet_keytools.key_service import KeyService, NewFileKeys, new_reference_suffix
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_metadata import DataKeyId, parse_key_metadata
from parquet_keytools.keys.material_store import (
    key_material_location,
    read_key_materials,
    remove_key_materials,
    serialise_key_materials,
)
from parquet_keytools.opened_file import OpenedFile, as_verified
from parquet_keytools.rotation.claimed_output import claimed_output, without_leftovers
from parquet_keytools.rotation.external_material import state_with_material
from parquet_keytools.rotation.journal import Journal, kms_digest
from parquet_keytools.rotation.rekey_check import check_rekeyed
from parquet_keytools.rotation.replacement import real_location, sink_like
from parquet_keytools.rotation.report import FileRotation, Outcome
from parquet_keytools.rotation.rotation_files import rotation_files
from parquet_keytools.rotation.tail import ChangedMeanwhileError, Tail, check_unchanged, read_tail
from parquet_keytools.storage import FileLocation, exclusive_folder, open_source

TURNS = 3
"""How often a file is tried that others change at the same time; the last time its folder is kept from them."""


class RekeyOutcome(Enum):
    """What became of a file."""

    REKEYED = "rekeyed"
    NOT_ENCRYPTED = "not encrypted"
    FINISHED_BEFORE = "finished before"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FileRekeying:
    """What became of one file.

    Attributes:
        path: The Parquet file, as in `FileLocation`'s text.
        outcome: What became of it.
        old_size_bytes: Its length before; 0 where nothing was done.
        new_size_bytes: Its length now.
        error: Why it failed, without traceback; None where it did not.
    """

    path: str
    outcome: RekeyOutcome
    old_size_bytes: int = 0
    new_size_bytes: int = 0
    error: KeytoolsError | OSError | None = None


@dataclass
class RekeyReport:
    """What became of a data set.

    Attributes:
        counts: How many files had each outcome.
        files: What became of each; only of those that failed, where not all results were to be kept.
        bytes_written: How long the new files are.
        journal: Path of the journal, if it is still there: the same call goes on where this one ended.
        stopped_by: Why the run ended before all files had their turn; None where it did not.
    """

    counts: Counter[RekeyOutcome] = field(default_factory=Counter)
    files: list[FileRekeying] = field(default_factory=list)
    bytes_written: int = 0
    journal: str | None = None
    stopped_by: KeytoolsError | None = None

    @property
    def failures(self) -> list[FileRekeying]:
        """The files that failed."""
        return [file for file in self.files if file.outcome is RekeyOutcome.FAILED]

    @property
    def succeeded(self) -> bool:
        """Whether all files had their turn and none failed."""
        return self.stopped_by is None and not self.counts[RekeyOutcome.FAILED]


@dataclass(frozen=True)
class RekeyRequest:
    """What a caller asks for; see `Keytools.rekey_in_place`."""

    table_name: str | None = None
    new_table_name: str | None = None
    aad_prefix: str | None = None
    as_before: bool = True
    verify: bool = True
    journal: Path | None = None
    keep_results: bool = True
    on_file: Callable[[FileRekeying], None] | None = None
    on_progress: Callable[[int], None] | None = None


def rekey_data_set(
    keys: KeyService, new_keys: KeyService, path: FileLocation, request: RekeyRequest
) -> RekeyReport:
    """Encrypt a file anew in its place, or all Parquet files under a folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ConfigurationError: There is no such table.
        KeytoolsError: The one file failed; failures of a folder's files are in the report.
        OutputError: The journal is of another run, or cannot be written.
    """
    is_folder = path.is_folder()
    if not is_folder and not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    new_keys.configuration.select_table(request.new_table_name)
    # Whoever rekeys after a leak must not get the KEK that leaked once more.
    keys.clear_caches()
    new_keys.clear_caches()
    report = RekeyReport()
    rekeying = _Rekeying(keys, new_keys, request)
    with _journal(path, keys, new_keys, request) as journal:
        for location in without_leftovers(rotation_files(path)):
            result = rekeying.rekey(location, journal)
            if not is_folder and result.error is not None:
                raise result.error
            if not is_folder and result.outcome is RekeyOutcome.NOT_ENCRYPTED:
                raise NotEncryptedError(f"{location} is not encrypted.")
            report.counts[result.outcome] += 1
            report.bytes_written += result.new_size_bytes
            if request.keep_results or result.error is not None:
                report.files.append(result)
            if request.on_file is not None:
                request.on_file(result)
            if isinstance(result.error, KmsUnavailableError):
                # The other files would fare no better.
                report.stopped_by = result.error
                report.journal = None if journal is None else str(journal.path)
                break
        if journal is not None and report.stopped_by is None:
            journal.close(remove=True)
    return report


@contextlib.contextmanager
def _journal(
    path: FileLocation, keys: KeyService, new_keys: KeyService, request: RekeyRequest
) -> Iterator[Journal | None]:
    """Open the journal, if one is wanted; it stays unless the run removes it.

    Only where one is named: a run after another leak must not pass over what an earlier one finished.
    """
    if request.journal is None:
        yield None
        return
    parameters = {
        "path": str(path),
        "rekey": True,
        "table": request.table_name,
        "to_table": request.new_table_name,
        "kms": kms_digest(keys.configuration, new_keys.configuration),
    }
    journal = Journal(request.journal, parameters)
    try:
        yield journal
    finally:
        # After a run to its end it is closed and gone.
        with contextlib.suppress(OSError):
            journal.close(remove=False)


class _Rekeying:
    def __init__(self, keys: KeyService, new_keys: KeyService, request: RekeyRequest) -> None:
        self._keys = keys
        self._new_keys = new_keys
        self._request = request

    def rekey(self, location: FileLocation, journal: Journal | None) -> FileRekeying:
        """Encrypt one file anew; what fails with it is in the result."""
        path = str(location)
        try:
            if journal is not None and journal.is_finished(path, state_with_material(location)):
                return FileRekeying(path, RekeyOutcome.FINISHED_BEFORE)
            with audit.about(location):
                result = self._rekey_in_turns(location)
            if journal is not None:
                journal.add(FileRotation(path, Outcome.ROTATED), state_with_material(location))
            return result
        except NotEncryptedError:
            return FileRekeying(path, RekeyOutcome.NOT_ENCRYPTED)
        except (KeytoolsError, OSError) as error:
            # Frames hold keys and footers, and a report may be kept for long.
            error.__cause__ = error.__context__ = None
            return FileRekeying(path, RekeyOutcome.FAILED, error=error.with_traceback(None))

    def _rekey_in_turns(self, location: FileLocation) -> FileRekeying:
        target = real_location(location)
        for turn in range(TURNS):
            is_last = turn == TURNS - 1
            with exclusive_folder(target) if is_last else contextlib.nullcontext():
                try:
                    return self._rekey(location, target, is_locked=is_last)
                except ChangedMeanwhileError:
                    continue
        raise OutputError(
            f"{location} is changed by others all the time.", hint="Stop its writers, and try again."
        )

    def _rekey(self, location: FileLocation, target: FileLocation, *, is_locked: bool) -> FileRekeying:
        tail, _ = read_tail(location)
        try:
            opened = self._open(location)
            new = self._new_file_keys(opened)
        except (KeytoolsError, OSError):
            # What was opened may be half old and half new: then it is told as that, and tried again.
            check_unchanged(location, tail)
            raise
        with contextlib.ExitStack() as lock:
            with claimed_output(target) as pending:
                try:
                    self._write(opened, new, sink=sink_like(pending, location))
                except (KeytoolsError, OSError):
                    check_unchanged(location, tail)
                    raise
                with open_source(pending.location) as written:
                    check_rekeyed(
                        written, new, opened.footer, self._new_keys.kms_keys(), all_modules=self._request.verify
                    )
                if not is_locked:
                    lock.enter_context(exclusive_folder(target))
                check_unchanged(location, tail)
                _place_key_materials(location, new)
            _finish_key_materials(location, new)
        return _rekeyed(location, tail)

    def _open(self, location: FileLocation) -> OpenedFile:
        request = self._request
        (opened,) = self._keys.open_files([location], request.table_name, request.aad_prefix)
        opened.refuse_unencrypted()
        opened.refuse_denied(None)
        return opened

    def _new_file_keys(self, opened: OpenedFile) -> NewFileKeys:
        """Make the keys of the new file. It keeps its AAD prefix, unless another table was named."""
        location, footer = opened.location, opened.footer
        policy = self._new_keys.policy(self._request.new_table_name, [leaf.path for leaf in footer.leaves])
        suffix = new_reference_suffix() if _existing_key_materials(location) else ""
        new = self._new_keys.new_file_keys(policy, location, suffix)
        _refuse_two_names(opened, new)
        if not self._request.as_before:
            return new
        _refuse_same_keys(opened, new.encryption)
        _refuse_less_protection(location, footer, new.encryption, policy.table_name)
        stored = footer.envelope.aad_prefix
        prefix = self._keys.expected_aad_prefix(
            location, self._request.table_name, self._request.aad_prefix, stored
        )
        encryption = replace(
            new.encryption, aad_prefix=stored or prefix or None, store_aad_prefix=stored is not None
        )
        return NewFileKeys(encryption, new.key_materials)

    def _write(
        self, opened: OpenedFile, new: NewFileKeys, sink: contextlib.AbstractContextManager[ByteSink]
    ) -> None:
        with open_source(opened.location) as source, sink as opened_sink:
            file_encryptor.encrypt_opened(
                as_verified(opened, source),
                opened_sink,
                opened.footer,
                opened.deks,
                new.encryption,
                on_progress=self._request.on_progress,
            )


def _rekeyed(location: FileLocation, old: Tail) -> FileRekeying:
    return FileRekeying(str(location), RekeyOutcome.REKEYED, old.size_bytes, location.info().size or 0)


# --- key material beside the file, as docs/adr/0005 has it ---


def _existing_key_materials(location: FileLocation) -> dict[str, KeyMaterial]:
    return read_key_materials(location) if key_material_location(location).is_file() else {}


def _place_key_materials(location: FileLocation, new: NewFileKeys) -> None:
    """Write key material that fits the old and the new file, just before the new one takes its place."""
    if new.key_materials is not None:
        # As it is now: a rotation may have replaced it since the file was opened.
        _write_key_materials(location, _existing_key_materials(location) | new.key_materials)


def _finish_key_materials(location: FileLocation, new: NewFileKeys) -> None:
    """Take the keys of the old file out, which nobody needs any more."""
    if new.key_materials is not None:
        _write_key_materials(location, new.key_materials)
    else:
        remove_key_materials(location)


def _write_key_materials(location: FileLocation, materials: dict[str, KeyMaterial]) -> None:
    beside = key_material_location(location)
    like = beside if beside.is_file() else location
    with claimed_output(real_location(beside)) as pending, sink_like(pending, like) as sink:
        sink.write_at(0, serialise_key_materials(materials))


# --- what is refused ---


def _refuse_two_names(opened: OpenedFile, new: NewFileKeys) -> None:
    """Refuse a link where the file's name matters, which is another one for who does not come by the link."""
    location, real = opened.location, real_location(opened.location)
    is_elsewhere = location.is_local and os.path.realpath(Path(location.path).parent) != str(
        Path(real.path).parent
    )
    is_external = new.key_materials is not None or opened.retriever.key_materials is not None
    if location.name != real.name or (is_elsewhere and is_external):
        raise OutputError(
            f"{location} is a link: its key material or AAD prefix belong to one of its names.",
            hint=f"Rekey the file that it leads to: {real}",
        )


def _refuse_same_keys(opened: OpenedFile, new: FileEncryption) -> None:
    """Refuse data keys that the file has already: after a leak it would pass for done."""
    keys = [(new.footer_dek, new.footer_key_metadata)]
    keys += [(key.dek, key.key_metadata) for key in new.columns.values() if isinstance(key, ColumnKey)]
    for dek, key_metadata in keys:
        parsed = parse_key_metadata(key_metadata)
        is_old = dek in opened.deks.values() or opened.footer.envelope.is_sealed_by(
            ModuleCipher(dek, opened.footer.file_aad)
        )
        if isinstance(parsed, DataKeyId) and is_old:
            raise OutputError(
                f"{opened.location} has the data key {parsed.name!r} already, and would keep it.",
                hint="Name a configuration that has another data key in its place, with --to-config.",
            )


def _refuse_less_protection(location: FileLocation, old: Footer, new: FileEncryption, table_name: str) -> None:
    """Refuse to write in plaintext what is encrypted: in its place that would be for good."""
    lost = [
        ".".join(column.path)
        for column in old.columns
        if column.encryption is not ColumnEncryption.PLAINTEXT
        and new.columns.get(column.path, new.unlisted_columns) is ColumnEncryption.PLAINTEXT
    ]
    if old.mode is FooterMode.ENCRYPTED_FOOTER and new.plaintext_footer:
        lost.append("the footer")
    if lost:
        raise OutputError(
            f"{location}: encrypted now, and in plaintext in the table {table_name!r}: {', '.join(lost)}.",
            hint="Name the table that the file is of; or name this one as the new table, if that is meant.",
        )
