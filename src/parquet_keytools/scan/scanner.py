"""Scans files for columns that look like personal data and are not protected as they should be.

The footer of each file is read first: names, types and statistics. Where these leave a question, some values of
some row groups follow, with the dictionaries of their chunks. A verdict is made for each file, and values are
dropped at once: a report has counts, and never a value.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError

from parquet_keytools import audit
from parquet_keytools.config.document import UnreadableYamlError, configuration_error, read_yaml
from parquet_keytools.config.key_policy import ColumnPath, KeyReference, MasterKeyReference
from parquet_keytools.config.loader import mistakes_of
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.errors import (
    ConfigurationError,
    KeyNotAvailableError,
    KeytoolsError,
    ParquetFormatError,
    kms_failure,
)
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, as_verified, open_files
from parquet_keytools.files.table_check import SeenColumn, TableCheck, names_in_folders, seen_key
from parquet_keytools.format.file_layout import MAGIC, with_trailer
from parquet_keytools.runtime.presentation import installed
from parquet_keytools.runtime.threads_and_forks import end
from parquet_keytools.scan.recognition import Kind, TypeClass, Value, Verdict, judge, kinds_by_name
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.walk import AT_A_TIME, LeftOut, ParquetFile, Unseen, data_set
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, PlainInput

DEFAULT_SAMPLE = 500
"""How many values of each column of a file are looked at."""

EXAMPLES = 3
_FILES_TOGETHER = 32
"""How many files are opened with the same requests to the KMS."""
_ROW_GROUPS = 3
_MOST_SAMPLED_BYTES = 8 << 20
"""How many bytes of a file are decoded together; long values lower the number of rows."""
_READ_BYTES = 256 << 10
_LEAST_IDENTIFIER = 10**8
"""Smaller numbers are no identifier that could be recognised without a name."""

PLAINTEXT = "plaintext"
FOLDER_NAMES = "names of folders"


# --- the report ---


@dataclass
class Finding:
    """A column that looks like personal data.

    Attributes:
        data_set: The folder of its files, without partitions.
        column: Its dotted path.
        kind: What it looks like.
        protection: `plaintext`, `names of folders`, or the key that it is under.
        expected: What the table of the configuration says instead; None if it says nothing else.
        by: Whether its name, its values, or both say so.
        detail: Which national identifier.
        matching: How many of the distinct sampled values have the format.
        values: How many distinct values were sampled; 0 if only the name says so.
        files: In how many files.
        examples: Some of them.
    """

    data_set: str
    column: str
    kind: Kind
    protection: str
    expected: str | None
    by: str
    detail: str
    matching: int = 0
    values: int = 0
    files: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Share of the sampled values that have the format; None if only the name says so."""
        return round(self.matching / self.values, 3) if self.values else None


@dataclass
class NotScanned:
    """Files, or a column of files, that could not be scanned.

    Attributes:
        column: Dotted path of the column; None for whole files.
        reason: Why not.
        files: How many files.
        examples: Some of them.
    """

    column: str | None
    reason: str
    files: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class ScanReport:
    """The result of a scan.

    Attributes:
        files: How many files were scanned, completely or in part.
        findings: Columns that look like personal data, and are plaintext, or under another key than their table
            says.
        protected: The other columns that look like personal data.
        not_scanned: What could not be scanned.
        left_out: Entries that do not belong to the data sets.
        is_interrupted: Whether the scan was interrupted, and the rest was not scanned.
        failures: The errors behind `not_scanned`.
    """

    files: int = 0
    findings: list[Finding] = field(default_factory=list)
    protected: list[Finding] = field(default_factory=list)
    not_scanned: list[NotScanned] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    is_interrupted: bool = False
    failures: list[Exception] = field(default_factory=list, repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether everything was scanned."""
        return not self.is_interrupted and not self.not_scanned


# --- a scan ---


def scan(
    keys: KeyService | None,
    location: FileLocation,
    table_name: str | None = None,
    *,
    sample: int = DEFAULT_SAMPLE,
    on_file: Callable[[object], None] = lambda _: None,
) -> ScanReport:
    """Scan a file, or the files of folders; see `Keytools.scan`. Without keys, plaintext columns only."""
    with installed("scan"):
        import phonenumbers  # noqa: F401
        import stdnum  # noqa: F401
    return _Scan(keys, table_name, sample).run(location, on_file)


_OpenedFiles = list[OpenedFile | Exception | None]


@dataclass
class _Seen:
    """What one file shows."""

    location: FileLocation
    columns: list[tuple[str, Verdict, str, str | None]] = field(default_factory=list)
    """Dotted path, verdict, protection, and what the policy says instead."""
    not_scanned: list[tuple[str | None, Exception]] = field(default_factory=list)


@dataclass
class _Partition:
    """The values that names of folders give to a column."""

    values: dict[Value, None] = field(default_factory=dict)
    files: int = 0
    examples: list[str] = field(default_factory=list)


def _count(counted: Finding | NotScanned | _Partition, paths: list[str], files: int = 1) -> None:
    counted.files += files
    counted.examples += paths[: EXAMPLES - len(counted.examples)]


class _Scan:
    def __init__(self, keys: KeyService | None, table_name: str | None, sample: int) -> None:
        self._keys = keys
        self._table_name = table_name
        self._sample = sample
        self._table_check: TableCheck | None = None
        # With several tables and none named, files may be of any of them.
        if keys is not None and (table_name is not None or len(keys.configuration.tables) == 1):
            self._table_check = keys.table_check(table_name)
        self._kms_keys = None if keys is None else keys.kms_keys()
        self._kms_failure: KeytoolsError | None = None
        self._cache = PageCache()
        self._report = ScanReport()
        self._found: dict[tuple[object, ...], Finding] = {}
        self._missed: dict[tuple[str | None, str], NotScanned] = {}
        self._pending: deque[Future[_Seen]] = deque()
        self._partitions: dict[tuple[str, str], _Partition] = {}

    def run(self, location: FileLocation, on_file: Callable[[object], None]) -> ScanReport:
        report = self._report
        outcomes = self._outcomes(location)
        try:
            for seen in outcomes:
                self._add(seen)
                on_file(seen)
        except KeyboardInterrupt:
            report.is_interrupted = True
            outcomes.close()
            for future in self._pending:
                if not future.cancelled() and future.exception() is None:
                    self._add(future.result())
        self._judge_partitions()
        for finding in self._found.values():
            is_open = finding.protection in (PLAINTEXT, FOLDER_NAMES) or finding.expected is not None
            (report.findings if is_open else report.protected).append(finding)
        for some in (report.findings, report.protected):
            some.sort(key=lambda finding: (finding.data_set, finding.column, finding.kind))
        report.not_scanned = list(self._missed.values())
        self._mask_values_in_paths()
        return report

    def _outcomes(self, location: FileLocation) -> Generator[_Seen, None, None]:
        """Yield what each file shows, some files at a time."""
        pending = self._pending
        threads = 4 if location.is_local else AT_A_TIME
        pool = ThreadPoolExecutor(threads, thread_name_prefix="parquet-keytools-scan")
        entries = iter(data_set(location))
        try:
            while batch := list(islice(entries, _FILES_TOGETHER)):
                files = [entry.location for entry in batch if isinstance(entry, ParquetFile)]
                found: _OpenedFiles = [None] * len(files)
                if self._keys is not None:
                    found = self._open_together(location, files)
                pending.extend(pool.submit(self._look, *one) for one in zip(files, found, strict=True))
                for entry in batch:
                    if isinstance(entry, LeftOut):
                        self._report.left_out.append(entry)
                    elif isinstance(entry, Unseen) and not entry.is_gone:
                        self._miss(entry.path, None, entry.error)
                while len(pending) > _FILES_TOGETHER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            end(pool, pending)

    # --- what was seen ---

    def _add(self, seen: _Seen) -> None:
        path = str(seen.location)
        self._report.files += all(column is not None for column, _ in seen.not_scanned)
        folder = _data_set_of(path)
        for column, verdict, protection, expected in seen.columns:
            self._note((folder, column, verdict.kind, protection, expected), verdict, [path], 1)
        for missed_column, error in seen.not_scanned:
            self._miss(path, missed_column, error)
        for name, folder_name in names_in_folders(seen.location.path).items():
            partition = self._partitions.setdefault((folder, name), _Partition())
            _count(partition, [path])
            if len(partition.values) < max(self._sample, 1):
                partition.values[unquote(folder_name.partition("=")[2])] = None

    def _note(
        self, what: tuple[str, str, Kind, str, str | None], verdict: Verdict, paths: list[str], files: int
    ) -> None:
        finding = self._found.setdefault(what, Finding(*what, verdict.by, verdict.detail))
        finding.matching += verdict.matching
        finding.values += verdict.values
        _count(finding, paths, files)

    def _miss(self, path: str, column: str | None, error: Exception) -> None:
        reason = _reason(error, path)
        missed = self._missed.setdefault((column, reason), NotScanned(column, reason))
        if not missed.files:
            self._report.failures.append(error)
        _count(missed, [path])

    def _judge_partitions(self) -> None:
        for (folder, name), partition in self._partitions.items():
            verdict = judge((name,), "text", partition.values)
            if verdict is not None:
                what = folder, name, verdict.kind, FOLDER_NAMES, None
                self._note(what, verdict, partition.examples, partition.files)

    def _mask_values_in_paths(self) -> None:
        """Take values out of paths: names of folders such as `email=...` are values of a column."""
        report = self._report
        names = {name for _, name in self._partitions}
        names.update(*(names_in_folders(left.path) for left in report.left_out))
        names.update(*(names_in_folders(path) for missed in report.not_scanned for path in missed.examples))
        personal = {finding.column for finding in report.findings if finding.protection == FOLDER_NAMES}
        personal |= {name for name in names if kinds_by_name((name,))}
        if not personal:
            return
        folders = re.compile(rf"(?<![^/])({'|'.join(map(re.escape, sorted(personal)))})=[^/]*(?=/|$)")

        def masked(path: str) -> str:
            return folders.sub(r"\1=...", path)

        for finding in (*report.findings, *report.protected):
            finding.data_set = masked(finding.data_set)
            finding.examples = list(map(masked, finding.examples))
        for missed in report.not_scanned:
            missed.examples = list(map(masked, missed.examples))
        report.left_out = [
            replace(left, location=replace(left.location, path=masked(left.location.path)))
            for left in report.left_out
        ]

    # --- one file ---

    def _look(self, location: FileLocation, found: OpenedFile | Exception | None) -> _Seen:
        """Return what a file shows; called in other threads. With keys, it was opened, or could not be."""
        seen = _Seen(location)
        try:
            if isinstance(found, OpenedFile):
                self._look_into(seen, found.footer, found)
            else:
                self._look_into(seen, self._visible_footer(location, found), None)
        except (KeytoolsError, OSError) as error:
            if isinstance(error, ConfigurationError):
                raise
            self._kms_failure = self._kms_failure or kms_failure(error)
            seen.not_scanned.append((None, error))
        return seen

    def _open_together(self, data_set: FileLocation, files: Sequence[FileLocation]) -> _OpenedFiles:
        """Open files with two requests to the KMS; a file that cannot be opened does not hold up the others.

        Readers refuse a file that differs from its table. A scan looks for the difference, and shows no value.
        """
        keys, kms_keys = self._keys, self._kms_keys
        assert keys is not None and kms_keys is not None
        if self._kms_failure is not None:
            return [self._kms_failure for _ in files]
        try:
            with audit.about(files[0] if len(files) == 1 else data_set):
                opened = open_files(
                    files,
                    kms_keys,
                    keys.data_keys,
                    aad_prefix_of=lambda file, stored: keys.expected_aad_prefix(
                        file, self._table_name, None, stored
                    ),
                    allow_plaintext=True,
                    allow_ctr=keys.configuration.reading.ctr_files == "allow",
                )
            return list(opened)
        except (KeytoolsError, OSError) as error:
            if len(files) == 1:
                self._kms_failure = self._kms_failure or kms_failure(error)
                return [error]
        half = len(files) // 2
        return [*self._open_together(data_set, files[:half]), *self._open_together(data_set, files[half:])]

    def _visible_footer(self, location: FileLocation, failure: Exception | None) -> Footer:
        """Return the footer of a file that was not opened, as it is without keys: nothing is authenticated."""
        if failure is not None and failure is not self._kms_failure:
            raise failure
        with open_source(location) as source:
            # One request for each file, and not two.
            envelope = read_envelope(source, reads_head=False)
        footer = envelope.unverified_footer()
        if failure is not None and envelope.mode is not FooterMode.UNENCRYPTED:
            raise failure
        if footer is None:
            raise KeyNotAvailableError("its footer is encrypted.", hint="--config names its keys.")
        return footer

    def _look_into(self, seen: _Seen, footer: Footer, opened: OpenedFile | None) -> None:
        footer_key, columns = _seen_columns(footer, opened)
        wanted = self._wanted(footer, footer_key, columns)
        asked: dict[ColumnPath, TypeClass] = {}
        sampled: dict[ColumnPath, dict[Value, None]] = {}
        average_bytes = 0.0
        dictionaries: list[str] = []
        with contextlib.ExitStack() as stack:
            view = None
            if opened is not None and opened.is_encrypted:
                source = as_verified(opened, stack.enter_context(open_source(opened.location)))
                view = stack.enter_context(PlainInput(PlainFile(opened, source, "error", self._cache)))
            metadata = _metadata(footer, view)
            for column in footer.columns:
                type_class = _type_class(metadata.schema.column(column.ordinal))
                if type_class == "other":
                    continue
                error = _denial(column, opened)
                if error is not None:
                    self._kms_failure = self._kms_failure or kms_failure(error)
                    seen.not_scanned.append((".".join(column.path), error))
                    continue
                ordinals = _spread(len(footer.row_groups))
                chunks = [metadata.row_group(ordinal).column(column.ordinal) for ordinal in ordinals]
                statistics = list(map(_statistics, chunks))
                if _is_out_of_question(column.path, type_class, statistics):
                    continue
                asked[column.path] = type_class
                sampled[column.path] = {value: None for values in statistics for value in values}
                if type_class == "text" and all(chunk.has_dictionary_page for chunk in chunks):
                    dictionaries.append(".".join(column.path))
                average_bytes += sum(chunk.total_uncompressed_size / max(1, chunk.num_values) for chunk in chunks)
            if self._sample and asked and footer.row_groups:
                rows = max(10, min(self._sample, int(_MOST_SAMPLED_BYTES / max(1.0, average_bytes))))
                place = view or stack.enter_context(seen.location.filesystem.open_input_file(seen.location.path))
                values, errors = _sampled_each(place, metadata, list(asked), dictionaries, footer, rows)
                sampled |= values
                for failed, why in errors.items():
                    seen.not_scanned.append((".".join(failed), why))
                    del asked[failed]
        for seen_column in columns:
            path = seen_column.path
            verdict = judge(path, asked[path], sampled.get(path, {})) if path in asked else None
            if verdict is not None:
                key = footer_key if seen_column.encryption is ColumnEncryption.FOOTER_KEY else seen_column.key
                is_plaintext = seen_column.encryption is ColumnEncryption.PLAINTEXT
                name = ".".join(path)
                seen.columns.append(
                    (name, verdict, PLAINTEXT if is_plaintext else _key_text(key), wanted.get(name))
                )

    def _wanted(
        self, footer: Footer, footer_key: KeyReference | None, columns: Sequence[SeenColumn]
    ) -> Mapping[str, str]:
        """Return what the policy says of each column that is protected in another way: dotted path -> its key.

        Labels of the file's own fields count, too.
        """
        if self._table_check is None:
            return {}
        labels = labels_of_footer(footer) if self._table_check.settings.labels.field else None
        try:
            found = self._table_check.column_mismatches(footer_key, columns, labels)
        except ConfigurationError as error:
            if labels is None:
                raise
            # Labels of the file that are no class, or contradict others.
            raise ParquetFormatError(str(error), path=footer.path) from None
        return {mismatch.column: mismatch.wanted for mismatch in found if mismatch.column is not None}


def _metadata(footer: Footer, view: PlainInput | None) -> pq.FileMetaData:
    """Return the metadata of the plain file that pyarrow will read. A footer that was read is not read again."""
    try:
        if view is not None:
            return pq.read_metadata(view)
        return pq.read_metadata(pa.BufferReader(MAGIC + with_trailer(bytes(footer.metadata.serialise()), MAGIC)))
    except (pa.ArrowException, ValueError) as error:
        # Arrow's texts may quote values.
        raise ParquetFormatError(f"its footer could not be decoded ({type(error).__name__}).") from None


def _seen_columns(footer: Footer, opened: OpenedFile | None) -> tuple[KeyReference | None, list[SeenColumn]]:
    footer_key, keys = None, {}
    if opened is not None and opened.is_encrypted:
        footer_key = seen_key(opened.retriever, footer.key_metadata, None)
        for column in footer.columns:
            if column.encryption is ColumnEncryption.COLUMN_KEY:
                with contextlib.suppress(KeytoolsError):  # Then the column is denied.
                    keys[column.ordinal] = seen_key(opened.retriever, column.key_metadata, column.path)
    return footer_key, [SeenColumn(each.path, each.encryption, keys.get(each.ordinal)) for each in footer.columns]


def _denial(column: FooterColumn, opened: OpenedFile | None) -> KeytoolsError | None:
    """Return why a column cannot be read; None if it can."""
    if opened is not None:
        return opened.denied.get(column.path)
    if column.encryption is ColumnEncryption.PLAINTEXT:
        return None
    return KeyNotAvailableError("it is encrypted.", hint="--config names its keys.")


def _key_text(key: KeyReference | None) -> str:
    if key is None:
        return "a key that the file does not name"
    return f"master key {key.master_key_id}" if isinstance(key, MasterKeyReference) else f"data key {key.name}"


def _data_set_of(path: str) -> str:
    *folders, _ = path.split("/")
    while folders and "=" in folders[-1]:
        folders.pop()
    return "/".join(folders)


def _reason(error: Exception, path: str) -> str:
    """Return why something could not be scanned, without the path of the file."""
    text = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
    return text.removeprefix(f"{path}: ").replace(path, "<file>")


# --- types and statistics ---


_CLASSES: dict[str, TypeClass] = {
    **dict.fromkeys(("STRING", "ENUM", "JSON", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"), "text"),
    **dict.fromkeys(("INT", "INT32", "INT64", "FLOAT", "DOUBLE"), "number"),
    **dict.fromkeys(("DATE", "TIMESTAMP", "INT96"), "date"),
}
"""By pyarrow's name of the logical type; without one, of the physical type."""


def _type_class(column: pq.ColumnSchema) -> TypeClass:
    logical = column.logical_type.type
    return _CLASSES.get(column.physical_type if logical == "NONE" else logical, "other")


def _statistics(chunk: pq.ColumnChunkMetaData) -> list[Value]:
    """Return the least and the greatest value of a chunk, as far as they are stated and can be decoded."""
    with contextlib.suppress(pa.ArrowException, ValueError, OverflowError):
        stated = chunk.statistics
        if stated is not None and stated.has_min_max:
            return list(_usable((stated.min, stated.max)))
    return []


def _is_out_of_question(path: ColumnPath, type_class: TypeClass, statistics: Sequence[Sequence[Value]]) -> bool:
    """Return whether name, type and statistics show that a column is no personal data that can be recognised."""
    if kinds_by_name(path):
        return False
    if type_class == "date":
        return True
    numbers = [value for values in statistics for value in values if isinstance(value, int | float)]
    return type_class == "number" and len(numbers) == 2 * len(statistics) > 0 and max(numbers) < _LEAST_IDENTIFIER


# --- values ---


def _spread(row_groups: int) -> list[int]:
    """Return the ordinals of some row groups: the first, one in the middle, and the last."""
    return sorted({0, row_groups // 2, row_groups - 1} if row_groups else set())[:_ROW_GROUPS]


def _sampled_each(
    place: Any,
    metadata: pq.FileMetaData,
    asked: list[ColumnPath],
    dictionaries: list[str],
    footer: Footer,
    rows: int,
) -> tuple[dict[ColumnPath, dict[Value, None]], dict[ColumnPath, Exception]]:
    """Return some distinct values of columns, and the errors of columns that cannot be decoded."""
    try:
        # Without the buffer, Arrow reads whole chunks.
        file = pq.ParquetFile(
            place, metadata=metadata, buffer_size=_READ_BYTES, pre_buffer=False, read_dictionary=dictionaries
        )
        return _sampled(file, asked, footer, rows), {}
    except (pa.ArrowException, KeytoolsError, OSError, OverflowError, ValueError) as error:
        if len(asked) == 1:
            is_ours = isinstance(error, KeytoolsError) or getattr(error, "errno", None) is not None
            # Arrow's texts may quote values.
            text = f"its pages could not be decoded ({type(error).__name__})."
            return {}, {asked[0]: error if is_ours else ParquetFormatError(text)}
    found, errors = {}, {}
    for path in asked:
        values, failed = _sampled_each(place, metadata, [path], dictionaries, footer, rows)
        found.update(values)
        errors.update(failed)
    return found, errors


def _sampled(
    file: pq.ParquetFile, asked: Sequence[ColumnPath], footer: Footer, rows: int
) -> dict[ColumnPath, dict[Value, None]]:
    """Return some distinct values of columns."""
    names = {".".join(path) for path in asked}
    # As Arrow selects columns: where names have dots, two leaves can have one dotted path.
    leaves = [
        leaf.path
        for leaf in footer.leaves
        if any(".".join(leaf.path[:length]) in names for length in range(1, len(leaf.path) + 1))
    ]
    # Arrow returns columns in the order in which they are named.
    selected = list(dict.fromkeys(".".join(path) for path in asked))
    sampled: dict[ColumnPath, dict[Value, None]] = {path: {} for path in leaves}
    ordinals = [ordinal for ordinal in _spread(len(footer.row_groups)) if footer.row_groups[ordinal].num_rows]
    for ordinal in ordinals:
        batches = file.iter_batches(
            max(1, -(-rows // len(ordinals))), row_groups=[ordinal], columns=selected, use_threads=False
        )
        batch = next(iter(batches), None)
        if batch is None:
            continue
        arrays = [array for column in batch.columns for array in _leaf_arrays(column)]
        for path, array in zip(leaves, arrays, strict=True):
            for value in _values(array, rows):
                sampled[path][value] = None
    return {path: sampled[path] for path in asked}


def _leaf_arrays(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the arrays of the leaves of a column, in the order of the schema."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _leaf_arrays(array.storage)
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _leaf_arrays(child)
    elif pa.types.is_map(kind):
        yield from _leaf_arrays(array.keys)
        yield from _leaf_arrays(array.items)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaf_arrays(array.flatten())
    else:
        yield array


def _values(array: pa.Array, most: int) -> Iterator[Value]:
    """Yield some values; of a chunk with a dictionary, values of all its rows."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary
    array = array.drop_null()[:most]
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.date32(), safe=False)
    yield from _usable(array.to_pylist())


def _usable(values: Iterable[Any]) -> Iterator[Value]:
    """Yield the values that may be personal data."""
    for value in values:
        if isinstance(value, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                yield value.decode()
        elif isinstance(value, str | int | float | date) and value == value:
            yield value


# --- findings that were looked at and accepted: each for a column and a kind, with a reason, until a date ---


def _checked_date(value: Any) -> date:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError("this is no date: write it as '2027-01-31'") from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Accepted(_Strict):
    """A finding that is accepted, up to a day."""

    column: str
    kind: Kind
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    expires: Annotated[date, BeforeValidator(_checked_date)]


class _File(_Strict):
    accepted: tuple[Accepted, ...]


@dataclass
class Baseline:
    """The entries of a baseline, and those that accepted nothing in a scan."""

    entries: Sequence[Accepted] = ()
    expired: list[Accepted] = field(default_factory=list)
    unmatched: list[Accepted] = field(default_factory=list)

    def divide(self, findings: Sequence[Finding]) -> tuple[list[Finding], list[tuple[Finding, Accepted]]]:
        """Return the findings that count, and the accepted ones, each with its entry."""
        today = datetime.now(UTC).date()
        keys = {(finding.column, finding.kind) for finding in findings}
        self.expired = [entry for entry in self.entries if entry.expires < today]
        self.unmatched = [entry for entry in self.entries if (entry.column, entry.kind) not in keys]
        valid = {(entry.column, entry.kind): entry for entry in self.entries if entry.expires >= today}
        accepted = [(f, valid[f.column, f.kind]) for f in findings if (f.column, f.kind) in valid]
        return [f for f in findings if (f.column, f.kind) not in valid], accepted


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from a YAML or JSON file."""
    try:
        document = read_yaml(path.read_bytes())
    except UnreadableYamlError as error:
        raise configuration_error([error.mistake], file=str(path), lines={}) from None
    mistakes = list(document.mistakes)
    try:
        entries = _File.model_validate(document.value).accepted
    except ValidationError as error:
        mistakes += mistakes_of(error, _File, document.value)
    if mistakes:
        raise configuration_error(mistakes, file=str(path), lines=document.lines)
    return Baseline(entries)
