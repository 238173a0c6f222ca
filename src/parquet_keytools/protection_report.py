"""What an auditor asks of a data set: which column is under which key, who can read it, and what was not examined.

A report counts; it does not decide. Which keys files name comes from the inventory behind `keys`, whether files
conform from the verification behind `verify`, and who reads a column from the KMS, which unwraps the files' keys.
"""

from __future__ import annotations

import itertools
from collections import Counter
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


@dataclass
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
    files: int = 0
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


@dataclass
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
    examples: list[str] = field(default_factory=list)

    def about(self, *names: str) -> Remark:
        """Count names, and return this remark."""
        self.count += len(names)
        self.examples += names[: EXAMPLES - len(self.examples)]
        return self


class _Remarks(dict[str, Remark]):
    """Text -> remark: a folder may have millions of files."""

    def add(self, text: str, *names: str, is_problem: bool = False) -> None:
        self.setdefault(text, Remark(is_problem, text)).about(*names)


@dataclass
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

    paths: Sequence[str]
    made: str = ""
    verdict: str | None = None
    conforms: bool | None = None
    counts: dict[str, int] = field(default_factory=dict)
    exceptions: list[Remark] = field(default_factory=list)
    not_examined: list[Remark] = field(default_factory=list)
    keys: list[ProtectingKey] = field(default_factory=list)
    columns: list[ColumnReport] = field(default_factory=list)
    timeline: list[KeyVersion] = field(default_factory=list)
    readers: Sequence[str] = ()
    plaintext_files: list[str] = field(default_factory=list)
    not_parquet: list[str] = field(default_factory=list)
    files: list[ReportedFile] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {name: document_of(getattr(self, name)) for name in self.__dataclass_fields__ if name != "failures"}

    def grouped(self, template_of: Callable[[str], str | None], most: int) -> ProtectionReport:
        """Return a report for people, in which more than `most` keys of one template, in one version, are one."""
        groups: dict[object, list[int]] = {}
        for position, key in enumerate(self.keys):
            template = template_of(key.key)
            groups.setdefault((template, key.version) if template else position, []).append(position)
        many = [group for group in groups.values() if len(group) > most]
        merged = {position for group in many for position in group}
        lines = sorted([*many, *([position] for position in range(len(self.keys)) if position not in merged)])
        names = {self.keys[position].key for position in merged}
        timeline = [version for version in self.timeline if version.key not in names]
        return replace(self.with_keys(lines, template_of), timeline=timeline)

    def with_keys(
        self, lines: Sequence[Sequence[int]], template_of: Callable[[str], str | None] = lambda _: None
    ) -> ProtectionReport:
        """Return a report with these keys, by their positions here; keys of one line are one key."""
        place = {position: number for number, line in enumerate(lines) for position in line}

        def key_of(line: Sequence[int]) -> ProtectingKey:
            members = [self.keys[position] for position in line]
            if len(members) == 1:
                return members[0]
            return replace(
                members[0],
                key=f"{template_of(members[0].key)} ({len(members):,} values)",
                files=sum(key.files for key in members),
                created=min((key.created for key in members if key.created), default=None),
                created_note=members[0].created_note or "the first of them",
                first_modified=min((key.first_modified for key in members if key.first_modified), default=None),
                last_modified=max((key.last_modified for key in members if key.last_modified), default=None),
            )

        def counted(column: ColumnReport) -> ColumnReport:
            counts: Counter[int] = Counter()
            for position, number in column.keys.items():
                counts[place[position]] += number
            return replace(column, keys=counts)

        files = [replace(file, keys=tuple(sorted({place[key] for key in file.keys}))) for file in self.files]
        columns = list(map(counted, self.columns))
        return replace(self, keys=list(map(key_of, lines)), columns=columns, files=files)


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
    report = _Report(location, readers, keytools.configuration.template_of)
    report.look_around(location)
    options: dict[str, Any] = {"table_name": table_name, "aad_prefix": aad_prefix}
    files = keytools.key_inventory(location, **options)
    while batch := list(itertools.islice(files, _FILES_AT_A_TIME)):
        report.add(batch)
        for file in batch:
            on_file(file)
    report.date_keys(keytools.kms)
    if verify and location.is_folder():
        report.add_verification(keytools.verify_folder(location, on_progress=on_file, **options))
    elif verify:
        report.add_verification(keytools.verify_file(location, **options))
    return report.end()


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


def _column_of(use: UsedKey) -> _ColumnName:
    if use.is_footer:
        return "footer", ""
    return ("hidden", "") if use.column is None else ("column", use.column)


class _Report:
    """A report in the making; its keys are in the order in which they were seen."""

    def __init__(
        self, location: FileLocation, readers: Mapping[str, Keytools], template_of: Callable[[str], str | None]
    ) -> None:
        self._report = ProtectionReport(location.only or (str(location),), readers=tuple(readers))
        self._report.counts = dict.fromkeys(("encrypted", "plaintext", "unreadable", "skipped", "not_parquet"), 0)
        self._template_of = template_of
        self._readers = {name: _Reader(reader.kms) for name, reader in readers.items()}
        self._modified: dict[str, str | None] = {}
        self._columns: dict[_ColumnName, ColumnReport] = {}
        self._positions: dict[_KeyName, int] = {}
        self._dates: dict[str, dict[str | None, datetime] | str] = {}
        self._left_out, self._failed, self._plaintext_columns = _Remarks(), _Remarks(), _Remarks()
        self._broken, self._unchecked = _Remarks(), _Remarks()

    def look_around(self, location: FileLocation) -> None:
        """Note the modification times of Parquet files, and what else there is."""
        found: list[FileLocation] = []
        for entry in data_set(location, into_passed_over=True):
            if isinstance(entry, ParquetFile):
                found.append(entry.location)
            elif isinstance(entry, LeftOut) and entry.reason is LeftOutReason.NOT_PARQUET:
                self._report.not_parquet.append(entry.path)
            elif isinstance(entry, LeftOut):
                self._left_out.add(f"Skipped: {entry.reason.value}.", entry.path)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="parquet-keytools-report") as pool:
            self._modified = dict(zip(map(str, found), pool.map(_modified, found), strict=True))

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
            self._failed.add(f"Files whose keys could not be proven: {problem}", file.path, is_problem=True)
            self._report.failures.append(file.unknown)
        kind = "encrypted" if file.is_encrypted else "plaintext"
        self._report.counts["unreadable" if file.is_unseen else "skipped" if file.is_skipped else kind] += 1
        modified = self._modified.get(file.path)
        # The footer first: its key protects other columns, too.
        uses = sorted(file.uses, key=lambda use: not use.is_footer)
        protected = list(dict.fromkeys((_column_of(use), self._position(use)) for use in uses))
        keys = sorted({position for _, position in protected})
        if uses and uses[0].is_footer:
            protected += [(("column", column), protected[0][1]) for column in file.footer_key_columns]
        for name, position in protected:
            self._column(name).keys[position] += 1
        for column in file.plaintext_columns:
            self._column(("column", column)).plaintext_files += 1
            if file.is_encrypted:
                self._plaintext_columns.add(f"Column {column} is plaintext in encrypted files.", file.path)
        for name in {*dict(protected), *(("column", column) for column in file.plaintext_columns)}:
            self._columns[name].files += 1
        if not file.is_encrypted:
            self._report.plaintext_files.append(file.path)
        if uses and uses[0].is_footer:
            self._note_access(file, uses[0])
        for key in map(self._report.keys.__getitem__, keys):
            key.files += 1
            if modified is not None:
                key.first_modified = min(key.first_modified or modified, modified)
                key.last_modified = max(key.last_modified or modified, modified)
        self._report.files.append(ReportedFile(file.path, modified, file.is_encrypted, tuple(keys), problem))

    def _position(self, use: UsedKey) -> int:
        name: _KeyName = ("data key", use.data_key or "", None)
        if use.master_key_id is not None:
            name = "master key", use.master_key_id, use.version
        position = self._positions.setdefault(name, len(self._report.keys))
        if position == len(self._report.keys):
            self._report.keys.append(ProtectingKey(*name))
        return position

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
        for key in self._report.keys:
            dates = self._dates.get(key.key, NOT_STATED)
            if key.kind == "data key":
                key.created_note = "not known: it is not in a KMS"
                continue
            if kms is not None and key.key not in self._dates:
                try:
                    dates = kms.version_dates(key.key)
                except KmsError as error:
                    dates = f"{NOT_STATED}: {type(error).__name__}"
                self._dates[key.key] = dates
            if isinstance(dates, str) or key.version not in dates:
                key.created_note = dates if isinstance(dates, str) else NOT_STATED
            else:
                key.created = _text(dates[key.version])
                key.created_note = "" if key.version is not None else "the master key; the version is not visible"

    def add_verification(self, checked: DataSetReport | FileReport) -> None:
        """Note the broken rules, and the rules that could not be checked."""
        results = [(file.path, result) for file in getattr(checked, "files", (checked,)) for result in file.rules]
        if isinstance(checked, DataSetReport):
            results += [(checked.path, result) for result in checked.rules]
        self._report.verdict, self._report.conforms = checked.verdict.value, checked.conforms
        if not checked.conforms:
            self._broken.add(f"The verdict of verification: {checked.verdict.value}.", is_problem=True)
        for path, result in results:
            if result.outcome is Outcome.BROKEN:
                rule = result.rule
                text = f"{rule.severity.value} of rule {rule.id} (section {rule.section}). Risk: {rule.gain}"
                finding = result.findings[0].message if result.findings else rule.holds
                is_problem = rule.severity is Severity.VIOLATION
                self._broken.add(f"Verification: {text}", f"{path}: {finding}", is_problem=is_problem)
        # One file has many rules that the same reason leaves unchecked.
        for path, reason in dict.fromkeys((path, reason) for path, result in results for reason in result.reasons):
            text = f"Rules that verification could not check: {reason.replace(path, '<file>')}"
            self._unchecked.add(text, path)

    def end(self) -> ProtectionReport:
        report = self._report
        report.made = _text(datetime.now(UTC)) or ""
        report.counts["not_parquet"] = len(report.not_parquet)
        report.columns = sorted(
            self._columns.values(), key=lambda column: (column.part == "column", column.part, column.column)
        )
        report.timeline = self._timeline()
        report.exceptions = sorted(self._exceptions(), key=lambda remark: not remark.is_problem)
        names = sorted(self._positions, key=lambda name: tuple(part or "" for part in name))
        report = report.with_keys([[self._positions[name]] for name in names])
        report.not_examined = list(self._unexamined(report))
        return report

    def _timeline(self) -> list[KeyVersion]:
        stated = [
            (created, key, version)
            for key, dates in self._dates.items()
            if not isinstance(dates, str)
            for version, created in dates.items()
        ]
        stated.sort(key=lambda entry: (entry[0], entry[1], entry[2] or ""))
        return [KeyVersion(key, version, _text(created) or "") for created, key, version in stated]

    def _exceptions(self) -> Iterator[Remark]:
        yield from self._broken.values()
        if self._report.plaintext_files:
            yield Remark(True, "Files that are not encrypted at all.").about(*self._report.plaintext_files)
        yield from self._failed.values()
        if mixed := [column.title for column in self._report.columns if column.keys and column.plaintext_files]:
            text = "Columns that are encrypted in some files and plaintext in others."
            yield Remark(True, text).about(*mixed)
        for name, reader in self._readers.items():
            if reader.unreachable is not None:
                text = f"The KMS of configuration {name} did not answer: what it reads is unknown."
                yield Remark(True, text).about(str(reader.unreachable))
        yield from self._plaintext_columns.values()
        several = []
        for column in self._report.columns:
            keys = [self._report.keys[position] for position in column.keys]
            if (
                column.part != "hidden"
                and len({self._template_of(key.key) or (key.kind, key.key) for key in keys}) > 1
            ):
                several.append(column.title)
        if several:
            text = "Columns, or the footer, under different keys in different files."
            yield Remark(False, text).about(*several)
        if self._report.not_parquet:
            yield Remark(False, "Files that are not Parquet.").about(*self._report.not_parquet)

    def _unexamined(self, report: ProtectionReport) -> Iterator[Remark]:
        yield from self._left_out.values()
        if self._report.not_parquet:
            text = "The content of files that are not Parquet was not examined."
            yield Remark(False, text).about(*self._report.not_parquet)
        yield from self._unchecked.values()
        if report.verdict is None:
            text = "Page data was not authenticated, and no rules were checked: --no-verify was given."
            yield Remark(False, text)
        if hidden := self._columns.get(("hidden", "")):
            text = "Columns in footers that could not be opened: their names are hidden."
            yield Remark(False, text, hidden.files)
        if unstated := [f"{key.key}@{key.version or '?'}" for key in report.keys if key.created is None]:
            yield Remark(False, f"The creation time of key versions: {NOT_STATED}.").about(*unstated)
        text = "Who reads which column: no configuration was named with --as."
        if self._readers:
            text = "Who else may read: the access of other principals, which the KMS's policies state."
        yield Remark(False, text)
        yield Remark(False, "Modification times are from the file system, and nothing authenticates them.")


def _general(error: Exception, path: str) -> str:
    """Return the message of an error without the path of its file."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.replace(path, "<file>")


def _modified(file: FileLocation) -> str | None:
    try:
        found: datetime | None = file.info().mtime
    except OSError:
        return None
    return _text(found)


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
