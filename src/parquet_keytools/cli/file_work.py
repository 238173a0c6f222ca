"""Runs a conversion over a file or a folder of files, and reports the results."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import typer

from parquet_keytools.cli.options import location_of, locations_of
from parquet_keytools.cli.output import (
    ByteProgress,
    ExitStatus,
    answer,
    error_fields,
    error_text,
    failure_text,
    number_of,
    print_json,
    progress_bar,
    say,
    say_first,
    size_text,
    status_of_all,
)
from parquet_keytools.config.loader import load_configuration
from parquet_keytools.configuration_check import with_short_timeout
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsConfigurationError,
    WorkerProcessEndedError,
)
from parquet_keytools.files.conversion import FileResult
from parquet_keytools.files.file_plan import FilePlan, PlannedFile, plan_files
from parquet_keytools.keytools import Keytools
from parquet_keytools.runtime.worker_processes import FileWorkers, command_line_processes
from parquet_keytools.storage.failures import storage_failure
from parquet_keytools.storage.locations import OBJECT_STORES, FileLocation
from parquet_keytools.storage.printable import printable

if TYPE_CHECKING:
    from parquet_keytools.conformance.salvage import SalvageResult

_SMALL_BYTES = 4 << 20
"""Larger files are written by several threads each."""

_SMALL_FILES_AT_A_TIME = 4


_Numbered = tuple[int, PlannedFile]
"""A file, and its place in the plan."""


class Convert(Protocol):
    """Converts one file, such as `Keytools.encrypt_file`."""

    def __call__(
        self,
        source: str,
        target: str,
        *,
        source_filesystem: Any,
        target_filesystem: Any,
        on_progress: Callable[[int], None] | None,
        overwrite: bool,
    ) -> FileResult:
        """Read the source and write the target."""
        ...


@dataclass(frozen=True)
class Failure:
    """A file that could not be converted."""

    file: PlannedFile
    error: Exception


def open_keytools(config: Path, kms_seconds: float = math.inf) -> Keytools:
    """Load a configuration for files that outlive this process.

    Args:
        config: The file.
        kms_seconds: How long one call of the KMS takes at most, whatever the configuration allows.

    Raises:
        ConfigurationError: It has mistakes, or its master keys are gone when this process ends.
    """
    keytools = Keytools(with_short_timeout(load_configuration(config), kms_seconds))
    if getattr(keytools.kms, "has_generated_keys", False):
        keytools.close()
        raise ConfigurationError(
            "the in_memory KMS makes new random master keys in each process: what one command encrypts, no "
            "other can decrypt.",
            file=str(config),
            yaml_path="kms.keys",
            hint="Use a keystore or another KMS, or for a test write the keys into the configuration.",
        )
    return keytools


def parsed_mode(text: str | None) -> int | None:
    """Return permissions that were given as octal digits; None where none were given.

    Raises:
        typer.BadParameter: They are none.
    """
    if text is None:
        return None
    if not re.fullmatch(r"0?[0-7]{3}", text) or int(text, 8) & 0o600 != 0o600:
        raise typer.BadParameter(
            "this is three octal digits, and the owner may read and write, such as 640.", param_hint="--mode"
        )
    return int(text, 8)


def convert_files(
    sources: Sequence[str],
    target: str,
    participle: str,
    convert: Convert,
    *,
    overwrite: bool,
    as_json: bool,
    skip_existing: bool = False,
    check: Callable[[list[str]], object] = lambda _: None,
    processes: int | None = 1,
) -> None:
    """Convert a file, or all Parquet files of a folder.

    In a folder a file that fails does not keep the others from being converted, unless it is the first and fails
    for a mistake in the configuration or for credentials: then all would.

    Args:
        sources: Paths, URIs or globs.
        target: A path or URI.
        participle: What was done to a file, such as `encrypted`.
        convert: Does it to one file.
        overwrite: Whether the target may be there.
        as_json: Whether the outcome goes to stdout as JSON.
        skip_existing: Whether `convert` skips what an earlier run has made.
        check: Refuses paths of files, from the folder on; called before anything is written.
        processes: How many processes convert small files; None takes as many as pay.

    Raises:
        typer.Exit: Some files of a folder failed.
        KeytoolsError: The plan is not possible, the one file failed, or the configuration fits none.
    """
    started = time.monotonic()
    may_be_there = overwrite or skip_existing
    plan = plan_files(locations_of(sources, "SRC"), location_of(target, "DST"), overwrite=may_be_there)
    check(plan.paths_in_folder)
    with progress_bar(plan.size_bytes) as progress:
        work = _Work(plan, convert, progress, overwrite=overwrite)
        try:
            with command_line_processes(processes):
                work.run()
        except (KeyboardInterrupt, WorkerProcessEndedError):
            if plan.source_is_folder:
                say(
                    f"{len(work.results):,} of {number_of(len(plan.files), 'file')} were {participle} before "
                    "this. Continue with --skip-existing, or do all of them again with --overwrite."
                )
            raise
    if as_json:
        print_json(_document(work))
    _tell(work, participle, time.monotonic() - started)
    if work.failures or plan.unseen:
        raise typer.Exit(ExitStatus.NO if plan.unseen else status_of_all(failed.error for failed in work.failures))


class _Work:
    """The conversion of the files of a plan: small ones several at a time, for they mostly wait for the disk."""

    def __init__(self, plan: FilePlan, convert: Convert, progress: ByteProgress, *, overwrite: bool) -> None:
        self.plan = plan
        self._progress = progress
        first = plan.files[0] if plan.files else None
        self._visible = first is None or (first.source.is_for_all_processes and first.target.is_for_all_processes)
        # All files of a plan lie on one file system, and so do their targets.
        self._convert = partial(
            convert,
            source_filesystem=first and first.source.filesystem,
            target_filesystem=first and first.target.filesystem,
            overwrite=overwrite,
        )
        self._outcomes: dict[int, FileResult | Failure] = {}
        self._done_bytes = 0
        self._is_stopped = False

    @property
    def results(self) -> list[FileResult]:
        """What was converted, in the order of the plan."""
        return [found for found in self._in_order() if isinstance(found, FileResult)]

    @property
    def failures(self) -> list[Failure]:
        """What could not be converted, in the order of the plan."""
        return [found for found in self._in_order() if isinstance(found, Failure)]

    @property
    def not_begun(self) -> list[PlannedFile]:
        """The files that were left when the file system failed."""
        return [file for number, file in enumerate(self.plan.files) if number not in self._outcomes]

    def _in_order(self) -> list[FileResult | Failure]:
        return [outcome for _, outcome in sorted(self._outcomes.items())]

    def run(self) -> None:
        """Convert all files.

        Raises:
            KeytoolsError: The one file failed, or the configuration fits none.
            WorkerProcessEndedError: A worker process was killed.
        """
        convert = partial(self._convert, on_progress=self._progress.advance)
        numbered = list(enumerate(self.plan.files))
        small = sum(file.size_bytes <= _SMALL_BYTES for _, file in numbered[1:])
        # No progress within small files.
        convert_small = partial(_converted, partial(self._convert, on_progress=None), self.plan.source_is_folder)
        with FileWorkers(convert_small, small, _SMALL_FILES_AT_A_TIME, visible=self._visible) as workers:
            # The first alone: for a mistake in the configuration all would fail.
            self._one_by_one(convert, numbered[:1])
            for is_small, files in groupby(numbered[1:], key=lambda entry: entry[1].size_bytes <= _SMALL_BYTES):
                if not is_small:
                    # In this thread, which Ctrl-C interrupts at once; a pool would first finish the file.
                    self._one_by_one(convert, files)
                    continue
                for (number, file), outcome in workers.outcomes(self._left(files)):
                    self._take(number, file, outcome)

    def _left(self, files: Iterable[_Numbered]) -> Iterator[_Numbered]:
        """Yield files until they are given up."""
        return takewhile(lambda _: not self._is_stopped, files)

    def _one_by_one(self, convert: Callable[[str, str], FileResult], files: Iterable[_Numbered]) -> None:
        for number, file in self._left(files):
            try:
                outcome: FileResult | Exception = _converted(convert, self.plan.source_is_folder, (number, file))
            except Exception as error:
                outcome = error
            self._take(number, file, outcome)

    def _take(self, number: int, file: PlannedFile, outcome: FileResult | Exception) -> None:
        """Take what became of a file; what stops all others is said by each that is under way, and kept once."""
        kept = self._failure(file, outcome) if isinstance(outcome, Exception) else outcome
        if kept is not None:
            self._outcomes[number] = kept
            self._done_bytes += file.size_bytes
            self._progress.move_to(self._done_bytes)

    def _failure(self, file: PlannedFile, error: Exception) -> Failure | None:
        """Return a failure, or None where the file counts as not started.

        Raises:
            Exception: It is the one file, or the others would fail, too.
        """
        is_expected = isinstance(error, KeytoolsError | OSError | UnicodeEncodeError | pa.ArrowException)
        if not (is_expected and self.plan.source_is_folder):
            raise error
        if isinstance(error, ConfigurationError | KmsConfigurationError) and not self._outcomes:
            say(f"Stopped at the first of {number_of(len(self.plan.files), 'file')}, {file.source}.")
            raise error
        if storage_failure(error, file.target) is not None:
            # The others would fare no better.
            if self._is_stopped:
                return None
            self._is_stopped = True
        return Failure(file, error)


def _converted(
    convert: Callable[[str, str], FileResult], source_is_folder: bool, numbered: _Numbered
) -> FileResult:
    """Convert a file; also called in worker processes."""
    _, file = numbered
    if source_is_folder:
        _create_folder_of(file.target)
    return convert(file.source.path, file.target.path)


def _create_folder_of(file: FileLocation) -> None:
    if file.filesystem.type_name not in OBJECT_STORES:
        file.filesystem.create_dir(file.path.rpartition("/")[0], recursive=True)


def _document(work: _Work) -> dict[str, Any]:
    plan = work.plan
    document: dict[str, Any] = {
        "files": [asdict(result) for result in work.results],
        "failures": [
            {"source": source, "target": target, **error_fields(error)}
            for source, target, error in (
                *((str(failed.file.source), str(failed.file.target), failed.error) for failed in work.failures),
                *((unseen.path, None, unseen.error) for unseen in plan.unseen),
            )
        ],
        "left_out": [{"path": left.path, "reason": left.reason} for left in plan.left_out],
    }
    if not_begun := work.not_begun:
        document["not_begun"] = [str(file.source) for file in not_begun]
    return document


def _tell(work: _Work, participle: str, seconds: float) -> None:
    plan, results, failures = work.plan, work.results, work.failures
    # What may be data first: somebody may miss it.
    left_out = sorted(plan.left_out, key=lambda left: ".parquet" not in left.location.name.lower())
    texts = [f"Left out: {left.path}: {left.reason}." for left in left_out]
    say_first(texts, "Left out: {} more; --json lists all.")
    for failure in failures:
        say(f"Failed: {failure_text(str(failure.file.source), failure.error)}")
    if not_begun := work.not_begun:
        say(
            f"Stopped: {len(not_begun):,} of {number_of(len(plan.files), 'file')} not started, because they would "
            "fail too. Solve the problem, then repeat the command with --skip-existing."
        )
    texts = [f"Failed: could not be checked: {error_text(unseen.error)}" for unseen in plan.unseen]
    say_first(texts, "Failed: {} more could not be checked; --json lists all.")
    written = [result for result in results if not result.skipped]
    if copied := sum(result.copied for result in written):
        say(f"Copied as they are: {number_of(copied, 'file')} in plaintext, as `plaintext_files: allow` says.")
    size = size_text(sum(result.target_bytes for result in written))
    if not plan.source_is_folder:
        if not written:
            answer(f"Skipped: {results[0].target} was made from {results[0].source} before.")
            return
        answer(f"{participle.capitalize()} {results[0].source} to {results[0].target}: {size} in {seconds:.1f} s.")
        return
    total = len(plan.files) + len(plan.unseen)
    of_all = f"{len(written):,} of " if len(written) < total else ""
    skipped = f" {len(results) - len(written):,} skipped, made before." if len(written) < len(results) else ""
    answer(f"{participle.capitalize()} {of_all}{number_of(total, 'file')}: {size} in {seconds:.1f} s.{skipped}")


def salvage_files(
    sources: Sequence[str], target: str, salvage: Callable[..., SalvageResult], *, overwrite: bool, as_json: bool
) -> None:
    """Decrypt the whole row groups of files by `Keytools.salvage_file`, and list what is missing.

    Raises:
        typer.Exit: Something is missing.
    """
    results: list[SalvageResult] = []

    def convert(source: str, target: str, **options: Any) -> SalvageResult:
        result = salvage(source, target, **options)
        results.append(result)
        return result

    try:
        convert_files(sources, target, "salvaged", convert, overwrite=overwrite, as_json=as_json)
    finally:
        for result in results:
            _say_missing(result)
    if not all(result.is_whole for result in results):
        raise typer.Exit(ExitStatus.NO)


def _say_missing(result: SalvageResult) -> None:
    from parquet_keytools.cli.conformance_report import loss_text

    if result.missing_row_groups:
        ordinals = ", ".join(map(str, result.missing_row_groups))
        answer(f"Missing in {printable(result.target)}: row groups {ordinals} of {result.row_groups}.")
    for loss in result.losses:
        answer(f"  lost: {loss_text(loss)}")
    for row_group_ordinal, column_ordinal in result.dropped_indexes:
        answer(f"  without page index and Bloom filter: row group {row_group_ordinal}, column {column_ordinal}")
