"""What an auditor asks of a data set: which column is under which key, who can read it, and what was not examined.

A report counts; it does not decide. Which keys files name comes from the inventory behind `keys`, whether files
conform from the verification behind `verify`, and who reads a column from the KMS, which unwraps the files' keys.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from parquet_keytools.conformance.report import DataSetReport, FileReport, Outcome, Severity, document_of
from parquet_keytools.errors import (
    KEY_REFUSALS,
    KeyNotAvailableError,
    KmsConfigurationError,
    KmsError,
    KmsUnavailableError,
)
from parquet_keytools.keytools import Keytools
from parquet_keytools.kms.client import KmsClient, UnwrapRequest
from parquet_keytools.rotation.inventory import FileKeyUses, UsedKey
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import LeftOut, LeftOutReason, ParquetFile, data_set

Part = Literal["footer", "hidden", "column"]
"""The footer, the columns of encrypted footers that could not be opened, or a column."""

NOT_STATED = "not stated by the KMS"

EXAMPLES = 5
"""How many files an exception names at most."""

_WhyNot = tuple[bool, str] | None
"""None if a key can be unwrapped; otherwise whether it was refused, and why it cannot."""

_FILES_AT_A_TIME = 1000
_THREADS = 16


# --- the report ---


@dataclass(frozen=True)
class ProtectingKey:
    """A key that protects columns.

    Attributes:
        kind: A master key with its version, or a data key that the caller manages.
        key: Identifier of the master key in the KMS, or name of the data key; empty if it is unknown.
        version: Version of the master key; None if it is not visible.
        files: How many files need it.
        created: When the version was created, as ISO 8601 in UTC; None if it is not known.
        created_note: Why it is not known, or what the time is about.
        first_modified: Earliest modification time of these files, as ISO 8601 in UTC.
        last_modified: Latest modification time.
    """

    kind: Literal["master key", "data key"]
    key: str
    version: str | None
    files: int
    created: str | None = None
    created_note: str = ""
    first_modified: str | None = None
    last_modified: str | None = None


@dataclass(frozen=True)
class KeyVersion:
    """A version of a master key that the KMS states, whether or not a file needs it; `created` is ISO 8601."""

    key: str
    version: str | None
    """None for the master key itself."""
    created: str


@dataclass
class Access:
    """Whether a configuration reads a column: in how many files the KMS unwraps all keys that this needs.

    Attributes:
        reads: Number of files whose keys the KMS unwrapped.
        refused: Number of files for which it refused a key.
        unknown: Number of files for which it could not be asked.
        reasons: Why not -> number of files.
    """

    reads: int = 0
    refused: int = 0
    unknown: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, why_not: _WhyNot) -> None:
        """Count a file."""
        if why_not is None:
            self.reads += 1
        else:
            self.refused += why_not[0]
            self.unknown += not why_not[0]
            self.reasons[why_not[1]] += 1


@dataclass
class ColumnReport:
    """A column, or the footer.

    Attributes:
        part: What it is.
        column: Dotted path of the column; empty for the footer, and for columns whose names are hidden.
        files: In how many files it was seen.
        keys: Position in `ProtectionReport.keys` -> number of files in which this key protects it.
        plaintext_files: Number of files in which it is plaintext, including plaintext files.
        access: Name of a configuration -> whether it reads the column where it is encrypted.
    """

    part: Part
    column: str = ""
    files: int = 0
    keys: Counter[int] = field(default_factory=Counter)
    plaintext_files: int = 0
    access: dict[str, Access] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What to call it."""
        titles = {"footer": "(the footer)", "hidden": "(columns with hidden names)"}
        return titles.get(self.part, self.column)


@dataclass(frozen=True)
class ReportedFile:
    """A Parquet file, which is encrypted, or may be; `modified` is ISO 8601 in UTC, and not authenticated."""

    path: str
    modified: str | None
    encrypted: bool
    keys: tuple[int, ...] = ()
    """Positions in `ProtectionReport.keys`."""
    problem: str = ""
    """Why its keys are not all proven; empty if they are."""


@dataclass(frozen=True)
class Remark:
    """An exception, or something that was not examined.

    Attributes:
        is_problem: Whether it needs action; otherwise it is worth knowing.
        text: What.
        count: How many files, columns or keys it is about.
        examples: The first of them.
    """

    is_problem: bool
    text: str
    count: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProtectionReport:
    """What was found.

    Attributes:
        paths: What was examined.
        made: When, as ISO 8601 in UTC.
        verdict: The verdict of `verify`; None if it was not run.
        conforms: Whether the files conform; None if they were not verified.
        counts: Number of `encrypted`, `plaintext`, `unreadable` and `not_parquet` files, and of encrypted files
            that are `skipped` by readers because of their names.
        exceptions: What deviates, problems first.
        not_examined: What was not examined, and why.
        keys: The keys that files need.
        columns: The footer and all columns.
        timeline: The versions of these master keys, oldest first.
        readers: Names of the configurations whose access was measured.
        plaintext_files: Paths of the plaintext files.
        not_parquet: Paths of files that are not Parquet.
        files: All Parquet files.
        failures: The errors of files whose keys could not be proven.
    """

    paths: tuple[str, ...]
    made: str
    verdict: str | None
    conforms: bool | None
    counts: Mapping[str, int]
    exceptions: tuple[Remark, ...]
    not_examined: tuple[Remark, ...]
    keys: tuple[ProtectingKey, ...]
    columns: tuple[ColumnReport, ...]
    timeline: tuple[KeyVersion, ...]
    readers: tuple[str, ...]
    plaintext_files: tuple[str, ...]
    not_parquet: tuple[str, ...]
    files: tuple[ReportedFile, ...]
    failures: tuple[Exception, ...] = field(default=(), repr=False)

    @property
    def has_problems(self) -> bool:
        """Whether an exception needs action."""
        return any(remark.is_problem for remark in self.exceptions)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {name: document_of(getattr(self, name)) for name in self.__dataclass_fields__ if name != "failures"}


def make_report(
    keytools: Keytools,
    location: FileLocation,
    readers: Mapping[str, Keytools],
    *,
    table_name: str | None = None,
    aad_prefix: str | None = None,
    verify: bool = True,
    on_file: Callable[[object], None] = lambda _: None,
) -> ProtectionReport:
    """Examine a file, or the files of a folder.

    `keytools` has the configuration of the auditor: its KMS opens the files. `readers` are configurations whose
    access is measured. `on_file` is called with each file when it is listed, and when it is verified.
    """
    report = _Report(readers, keytools.configuration.template_of)
    report.look_around(location)
    options: dict[str, Any] = {"table_name": table_name, "aad_prefix": aad_prefix}
    files = keytools.key_inventory(location, **options)
    while batch := list(itertools.islice(files, _FILES_AT_A_TIME)):
        report.add(batch)
        for file in batch:
            on_file(file)
    report.date_keys(keytools.kms)
    checked: DataSetReport | FileReport | None = None
    if verify:
        if location.is_folder():
            checked = keytools.verify_folder(location, on_progress=on_file, **options)
        else:
            checked = keytools.verify_file(location, **options)
        report.add_verification(checked)
    return report.end(location, checked)


# --- access ---


class _Reader:
    """Asks the KMS of a configuration to unwrap keys, each distinct wrapped key once."""

    def __init__(self, kms: KmsClient | None) -> None:
        self._kms = kms
        self._answers: dict[UnwrapRequest, KmsError | None] = {}
        self.unreachable: KmsError | None = None

    def ask(self, wanted: Iterable[UnwrapRequest]) -> None:
        missing = [request for request in dict.fromkeys(wanted) if request not in self._answers]
        if self._kms is None or not missing or self.unreachable is not None:
            return
        for request, key in zip(missing, self._kms.unwrap_many(missing), strict=True):
            # The key itself is forgotten at once.
            self._answers[request] = key.with_traceback(None) if isinstance(key, KmsError) else None
        answers = [self._answers[request] for request in missing]
        # Such as expired credentials.
        ends = (KmsUnavailableError, KmsConfigurationError)
        if all(isinstance(answer, ends) and not answer.others_may_answer for answer in answers):
            self.unreachable = answers[0]

    def why_not(self, use: UsedKey) -> _WhyNot:
        request = _request(use)
        if request is None:
            return False, "a data key, which no KMS unwraps"
        if self._kms is None:
            return True, "the configuration has no KMS"
        if request not in self._answers:
            return False, "not asked: the KMS could not be reached"
        error = self._answers[request]
        if error is None:
            return None
        return isinstance(error, KEY_REFUSALS), f"{use.master_key_id}: {type(error).__name__}"


def _request(use: UsedKey) -> UnwrapRequest | None:
    if use.wrapped_key is None or use.master_key_id is None:
        return None
    return UnwrapRequest(use.wrapped_key, use.master_key_id)


# --- making a report ---


_KeyName = tuple[Literal["master key", "data key"], str, str | None]
_ColumnName = tuple[Part, str]
_FOOTER: _ColumnName = ("footer", "")


def _column_of(use: UsedKey) -> _ColumnName:
    if use.is_footer:
        return _FOOTER
    return ("hidden", "") if use.column is None else ("column", use.column)


class _Some:
    """How many names there are, and the first of them: a folder may have millions of files."""

    def __init__(self) -> None:
        self._count = 0
        self._first: list[str] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> list[str]:
        return self._first[part]

    def append(self, name: str) -> None:
        self._count += 1
        if len(self._first) < EXAMPLES:
            self._first.append(name)


class _Report:
    """A report in the making."""

    def __init__(self, readers: Mapping[str, Keytools], template_of: Callable[[str], str | None]) -> None:
        self._template_of = template_of
        self._readers = {name: _Reader(reader.kms) for name, reader in readers.items()}
        self._modified: dict[str, datetime | None] = {}
        self._left_out: dict[LeftOutReason, _Some] = defaultdict(_Some)
        self._not_parquet: list[str] = []
        self._columns: dict[_ColumnName, ColumnReport] = {}
        self._positions: dict[_KeyName, int] = {}
        self._key_files: Counter[int] = Counter()
        self._key_times: dict[int, tuple[datetime, datetime]] = {}
        self._dates: dict[str, dict[str | None, datetime] | str] = {}
        self._files: list[ReportedFile] = []
        self._plaintext: list[str] = []
        self._plaintext_columns: dict[str, _Some] = defaultdict(_Some)
        self._failed: dict[str, _Some] = defaultdict(_Some)
        self._failures: list[Exception] = []
        self._problems: list[Remark] = []
        self._not_examined: list[Remark] = []
        self._unreadable = self._skipped = 0

    def look_around(self, location: FileLocation) -> None:
        """Note the modification times of Parquet files, and what else there is."""
        found: list[FileLocation] = []
        for entry in data_set(location, into_passed_over=True):
            if isinstance(entry, ParquetFile):
                found.append(entry.location)
            elif isinstance(entry, LeftOut):
                is_parquet = entry.reason is not LeftOutReason.NOT_PARQUET
                (self._left_out[entry.reason] if is_parquet else self._not_parquet).append(entry.path)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="parquet-keytools-report") as pool:
            for file, modified in zip(found, pool.map(_modified, found), strict=True):
                self._modified[str(file)] = modified

    def add(self, batch: Sequence[FileKeyUses]) -> None:
        """Count files; the KMS of each reader is asked for the keys of all of them together."""
        wanted = [request for file in batch for use in file.uses if (request := _request(use)) is not None]
        for reader in self._readers.values():
            reader.ask(wanted)
        for file in batch:
            self._add_file(file)

    def _add_file(self, file: FileKeyUses) -> None:
        problem = ""
        if file.unknown is not None:
            problem = _general(file.unknown, file.path)
            self._failed[problem].append(file.path)
            self._failures.append(file.unknown)
        self._unreadable += file.is_unseen
        self._skipped += file.is_skipped
        modified = self._modified.get(file.path)
        # The footer first: its key protects other columns, too.
        uses = sorted(file.uses, key=lambda use: not use.is_footer)
        protected = list(dict.fromkeys((_column_of(use), self._position(use)) for use in uses))
        keys = {position for _, position in protected}
        if uses and uses[0].is_footer:
            protected += [(("column", column), protected[0][1]) for column in file.footer_key_columns]
        for name, position in protected:
            self._column(name).keys[position] += 1
        for column in file.plaintext_columns:
            self._column(("column", column)).plaintext_files += 1
            if file.is_encrypted:
                self._plaintext_columns[column].append(file.path)
        for name in {*dict(protected), *(("column", column) for column in file.plaintext_columns)}:
            self._columns[name].files += 1
        if not file.is_encrypted:
            self._plaintext.append(file.path)
        if uses and uses[0].is_footer:
            self._note_access(file, uses[0])
        for position in keys:
            self._key_files[position] += 1
            if modified is not None:
                first, last = self._key_times.get(position, (modified, modified))
                self._key_times[position] = min(first, modified), max(last, modified)
        self._files.append(
            ReportedFile(file.path, _text(modified), file.is_encrypted, tuple(sorted(keys)), problem)
        )

    def _position(self, use: UsedKey) -> int:
        name: _KeyName = ("data key", use.data_key or "", None)
        if use.master_key_id is not None:
            name = "master key", use.master_key_id, use.version
        return self._positions.setdefault(name, len(self._positions))

    def _column(self, name: _ColumnName) -> ColumnReport:
        return self._columns.setdefault(name, ColumnReport(*name))

    def _note_access(self, file: FileKeyUses, footer: UsedKey) -> None:
        # Keys in a file that is not authentic show nothing about who reads a column.
        is_shown = file.unknown is None or isinstance(file.unknown, KmsError | KeyNotAvailableError)
        for name, reader in self._readers.items():
            opening = reader.why_not(footer) if is_shown else (False, "the file is not authentic")
            outcomes: dict[_ColumnName, _WhyNot]
            outcomes = {("column", column): opening for column in file.footer_key_columns}
            for use in file.uses:
                # Several columns with hidden names are one line.
                name_of_use = _column_of(use)
                outcomes[name_of_use] = outcomes.get(name_of_use) or opening or reader.why_not(use)
            for part, why_not in outcomes.items():
                self._columns[part].access.setdefault(name, Access()).count(why_not)

    def date_keys(self, kms: KmsClient | None) -> None:
        """Ask the KMS when the versions were created: one call, or a few, for each master key."""
        for kind, key, _ in self._positions:
            if kind == "master key" and kms is not None and key not in self._dates:
                try:
                    self._dates[key] = kms.version_dates(key)
                except KmsError as error:
                    self._dates[key] = f"{NOT_STATED}: {type(error).__name__}"

    def add_verification(self, checked: DataSetReport | FileReport) -> None:
        """Note the broken rules, and the rules that could not be checked."""
        files = checked.files if isinstance(checked, DataSetReport) else (checked,)
        broken: dict[tuple[bool, str], _Some] = defaultdict(_Some)
        unchecked: dict[str, _Some] = defaultdict(_Some)
        results = [(file.path, result) for file in files for result in file.rules]
        if isinstance(checked, DataSetReport):
            results += [(checked.path, result) for result in checked.rules]
        for path, result in results:
            if result.outcome is Outcome.BROKEN:
                rule = result.rule
                text = f"{rule.severity.value} of rule {rule.id} (section {rule.section}). Risk: {rule.gain}"
                finding = result.findings[0].message if result.findings else rule.holds
                broken[rule.severity is Severity.VIOLATION, text].append(f"{path}: {finding}")
        # One file has many rules that the same reason leaves unchecked.
        for path, reason in dict.fromkeys((path, reason) for path, result in results for reason in result.reasons):
            unchecked[reason.replace(path, "<file>")].append(path)
        if not checked.conforms:
            self._problems.append(Remark(True, f"The verdict of verification: {checked.verdict.value}."))
        for (is_violation, text), found in broken.items():
            self._problems.append(_listed(is_violation, f"Verification: {text}", found))
        for reason, paths in unchecked.items():
            text = f"Rules that verification could not check: {reason}"
            self._not_examined.append(_listed(False, text, paths))

    def end(self, location: FileLocation, checked: DataSetReport | FileReport | None) -> ProtectionReport:
        names = sorted(self._positions, key=lambda name: tuple(part or "" for part in name))
        order = {self._positions[name]: position for position, name in enumerate(names)}
        for column in self._columns.values():
            column.keys = Counter({order[old]: count for old, count in column.keys.items()})
        encrypted = sum(file.encrypted for file in self._files) - self._unreadable - self._skipped
        columns = sorted(
            self._columns.values(), key=lambda column: (column.part == "column", column.part, column.column)
        )
        return ProtectionReport(
            paths=location.only or (str(location),),
            made=_text(datetime.now(UTC)) or "",
            verdict=None if checked is None else checked.verdict.value,
            conforms=None if checked is None else checked.conforms,
            counts={
                "encrypted": encrypted,
                "plaintext": len(self._plaintext),
                "unreadable": self._unreadable,
                "skipped": self._skipped,
                "not_parquet": len(self._not_parquet),
            },
            exceptions=tuple(sorted(self._exceptions(columns, names), key=lambda remark: not remark.is_problem)),
            not_examined=tuple(self._unexamined(names, is_verified=checked is not None)),
            keys=tuple(self._key(name) for name in names),
            columns=tuple(columns),
            timeline=self._timeline(),
            readers=tuple(self._readers),
            plaintext_files=tuple(self._plaintext),
            not_parquet=tuple(self._not_parquet),
            files=tuple(
                replace(file, keys=tuple(sorted(order[key] for key in file.keys))) for file in self._files
            ),
            failures=tuple(self._failures),
        )

    def _key(self, name: _KeyName) -> ProtectingKey:
        kind, key, version = name
        created, note = self._created(name)
        first, last = self._key_times.get(self._positions[name], (None, None))
        files = self._key_files[self._positions[name]]
        return ProtectingKey(kind, key, version, files, created, note, _text(first), _text(last))

    def _created(self, name: _KeyName) -> tuple[str | None, str]:
        kind, key, version = name
        dates = self._dates.get(key, NOT_STATED)
        if kind == "data key":
            return None, "not known: it is not in a KMS"
        if isinstance(dates, str):
            return None, dates
        if version not in dates:
            return None, NOT_STATED
        note = "" if version is not None else "the master key; the version is not visible"
        return _text(dates[version]), note

    def _timeline(self) -> tuple[KeyVersion, ...]:
        stated = [
            (created, key, version)
            for key, dates in self._dates.items()
            if not isinstance(dates, str)
            for version, created in dates.items()
        ]
        stated.sort(key=lambda entry: (entry[0], entry[1], entry[2] or ""))
        return tuple(KeyVersion(key, version, _text(created) or "") for created, key, version in stated)

    def _exceptions(self, columns: Sequence[ColumnReport], names: Sequence[_KeyName]) -> Iterator[Remark]:
        yield from self._problems
        if self._plaintext:
            yield _listed(True, "Files that are not encrypted at all.", self._plaintext)
        for text, paths in self._failed.items():
            yield _listed(True, f"Files whose keys could not be proven: {text}", paths)
        mixed = [column.title for column in columns if column.keys and column.plaintext_files]
        if mixed:
            yield _listed(True, "Columns that are encrypted in some files and plaintext in others.", mixed)
        for name, reader in self._readers.items():
            if reader.unreachable is not None:
                text = f"The KMS of configuration {name} did not answer: what it reads is unknown."
                yield Remark(True, text, 1, (str(reader.unreachable),))
        for name, paths in self._plaintext_columns.items():
            yield _listed(False, f"Column {name} is plaintext in encrypted files.", paths)
        several = [
            column.title
            for column in columns
            if column.part != "hidden"
            and len({self._template_of(names[key][1]) or names[key][:2] for key in column.keys}) > 1
        ]
        if several:
            yield _listed(False, "Columns, or the footer, under different keys in different files.", several)
        if self._not_parquet:
            yield _listed(False, "Files that are not Parquet.", self._not_parquet)

    def _unexamined(self, names: Sequence[_KeyName], *, is_verified: bool) -> Iterator[Remark]:
        for reason, paths in self._left_out.items():
            yield _listed(False, f"Skipped: {reason.value}.", paths)
        if self._not_parquet:
            text = "The content of files that are not Parquet was not examined."
            yield _listed(False, text, self._not_parquet)
        yield from self._not_examined
        if not is_verified:
            text = "Page data was not authenticated, and no rules were checked: --no-verify was given."
            yield Remark(False, text)
        if hidden := self._columns.get(("hidden", "")):
            text = "Columns in footers that could not be opened: their names are hidden."
            yield Remark(False, text, hidden.files)
        unstated = [f"{name[1]}@{name[2] or '?'}" for name in names if self._created(name)[0] is None]
        if unstated:
            yield _listed(False, f"The creation time of key versions: {NOT_STATED}.", unstated)
        text = "Who reads which column: no configuration was named with --as."
        if self._readers:
            text = "Who else may read: the access of other principals, which the KMS's policies state."
        yield Remark(False, text)
        yield Remark(False, "Modification times are from the file system, and nothing authenticates them.")


def _listed(is_problem: bool, text: str, names: Sequence[str] | _Some) -> Remark:
    return Remark(is_problem, text, len(names), tuple(names[:EXAMPLES]))


def _general(error: Exception, path: str) -> str:
    """Return the message of an error without the path of its file."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.replace(path, "<file>")


def _modified(file: FileLocation) -> datetime | None:
    try:
        found: datetime | None = file.info().mtime
    except OSError:
        return None
    return None if found is None else found.astimezone(UTC)


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")
