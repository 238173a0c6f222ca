"""Runs a conversion over a file or a folder of files, and reports the results."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import typer

from parquet_keytools.cli.exit_status import ExitStatus
from parquet_keytools.cli.failures import error_text, status_of
from parquet_keytools.cli.file_argument import location_of
from parquet_keytools.cli.output import answer, number_of, print_json, say, size_text
from parquet_keytools.cli.progress import ByteProgress, progress_bar
from parquet_keytools.errors import ConfigurationError, KeytoolsError
from parquet_keytools.files.conversion import FileResult
from parquet_keytools.files.file_plan import FilePlan, PlannedFile, plan_files
from parquet_keytools.keytools import Keytools
from parquet_keytools.storage.failures import storage_failure
from parquet_keytools.storage.locations import FileLocation

_MOST_LEFT_OUT_SHOWN = 20
_OBJECT_STORES = ("s3", "gcs", "abfs")
"""They have no folders; to create one would leave an empty object of its name."""


class Convert(Protocol):
    """Converts one file, such as `Keytools.encrypt_file`."""

    def __call__(
        self,
        source: str,
        target: str,
        *,
        source_filesystem: Any,
        target_filesystem: Any,
        on_progress: Callable[[int], None],
        overwrite: bool,
    ) -> FileResult:
        """Read the source and write the target."""
        ...


@dataclass(frozen=True)
class Failure:
    """A file that could not be converted."""

    file: PlannedFile
    error: Exception

    @property
    def status(self) -> ExitStatus:
        """The exit status that this failure alone would have."""
        return status_of(self.error)


def open_keytools(config: Path) -> Keytools:
    """Load a configuration for files that outlive this process.

    Raises:
        ConfigurationError: It has mistakes, or its master keys are gone when this process ends.
    """
    keytools = Keytools.from_yaml(config)
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
    source: str, target: str, participle: str, convert: Convert, *, overwrite: bool, as_json: bool
) -> None:
    """Convert a file, or all Parquet files of a folder.

    In a folder a file that fails does not keep the others from being converted, unless it is the first and fails
    for a mistake in the configuration: then all would.

    Args:
        source: A path or URI.
        target: A path or URI.
        participle: What was done to a file, such as `encrypted`.
        convert: Does it to one file.
        overwrite: Whether the target may be there.
        as_json: Whether the outcome goes to stdout as JSON.

    Raises:
        typer.Exit: Some files of a folder failed.
        KeytoolsError: The plan is not possible, the one file failed, or the configuration fits none.
    """
    started = time.monotonic()
    plan = plan_files(location_of(source, "SRC"), location_of(target, "DST"), overwrite=overwrite)
    results: list[FileResult] = []
    failures: list[Failure] = []
    with progress_bar(plan.size_bytes) as progress:
        try:
            _convert_all(plan, convert, progress, results, failures, overwrite=overwrite)
        except KeyboardInterrupt:
            if plan.source_is_folder:
                say(
                    f"{len(results):,} of {number_of(len(plan.files), 'file')} were {participle} before this. "
                    "To do all of them again, say --overwrite."
                )
            raise
    if as_json:
        print_json(_document(plan, results, failures))
    _tell(plan, results, failures, participle, time.monotonic() - started)
    if failures or plan.unseen:
        kms_failed = not plan.unseen and all(failure.status is ExitStatus.KMS_FAILED for failure in failures)
        raise typer.Exit(ExitStatus.KMS_FAILED if kms_failed else ExitStatus.NO)


def _convert_all(
    plan: FilePlan,
    convert: Convert,
    progress: ByteProgress,
    results: list[FileResult],
    failures: list[Failure],
    *,
    overwrite: bool,
) -> None:
    done_bytes = 0
    for file in plan.files:
        try:
            if plan.source_is_folder:
                _create_folder_of(file.target)
            results.append(
                convert(
                    file.source.path,
                    file.target.path,
                    source_filesystem=file.source.filesystem,
                    target_filesystem=file.target.filesystem,
                    on_progress=progress.advance,
                    overwrite=overwrite,
                )
            )
        except (KeytoolsError, OSError, UnicodeEncodeError, pa.ArrowException) as error:
            if not plan.source_is_folder:
                raise
            if isinstance(error, ConfigurationError) and not done_bytes:
                say(f"Stopped at the first of {number_of(len(plan.files), 'file')}, {file.source}.")
                raise
            failures.append(Failure(file, error))
            if storage_failure(error, file.target) is not None:
                # The others would fare no better.
                return
        done_bytes += file.size_bytes
        progress.move_to(done_bytes)


def _create_folder_of(file: FileLocation) -> None:
    if file.filesystem.type_name not in _OBJECT_STORES:
        file.filesystem.create_dir(file.path.rpartition("/")[0], recursive=True)


def _document(plan: FilePlan, results: list[FileResult], failures: list[Failure]) -> dict[str, Any]:
    document = {
        "files": [asdict(result) for result in results],
        "failures": [
            {
                "source": str(failure.file.source),
                "target": str(failure.file.target),
                "error": type(failure.error).__name__,
                "message": error_text(failure.error),
            }
            for failure in failures
        ]
        + [
            {
                "source": unseen.path,
                "target": None,
                "error": type(unseen.error).__name__,
                "message": error_text(unseen.error),
            }
            for unseen in plan.unseen
        ],
        "left_out": [{"path": left.path, "reason": left.reason} for left in plan.left_out],
    }
    if not_begun := _not_begun(plan, results, failures):
        document["not_begun"] = [str(file.source) for file in not_begun]
    return document


def _not_begun(plan: FilePlan, results: list[FileResult], failures: list[Failure]) -> tuple[PlannedFile, ...]:
    """Return the files that were left when the file system failed."""
    return plan.files[len(results) + len(failures) :]


def _tell(
    plan: FilePlan, results: list[FileResult], failures: list[Failure], participle: str, seconds: float
) -> None:
    # What may be data first: somebody may miss it.
    left_out = sorted(plan.left_out, key=lambda left: ".parquet" not in left.location.name.lower())
    for left in left_out[:_MOST_LEFT_OUT_SHOWN]:
        say(f"Left out: {left.path}: {left.reason}.")
    if len(plan.left_out) > _MOST_LEFT_OUT_SHOWN:
        say(f"Left out: {len(plan.left_out) - _MOST_LEFT_OUT_SHOWN} more; --json lists all.")
    for failure in failures:
        text = error_text(failure.error)
        say(f"Failed: {text}" if str(failure.file.source) in text else f"Failed: {failure.file.source}: {text}")
    if not_begun := _not_begun(plan, results, failures):
        say(
            f"Stopped: {len(not_begun):,} of {number_of(len(plan.files), 'file')} not started, because they would "
            "fail too. Solve the problem, then repeat the command with --overwrite."
        )
    for unseen in plan.unseen[:_MOST_LEFT_OUT_SHOWN]:
        say(f"Failed: could not be checked: {error_text(unseen.error)}")
    if len(plan.unseen) > _MOST_LEFT_OUT_SHOWN:
        say(f"Failed: {len(plan.unseen) - _MOST_LEFT_OUT_SHOWN} more could not be checked; --json lists all.")
    size = size_text(sum(result.source_bytes for result in results))
    if not plan.source_is_folder:
        answer(f"{participle.capitalize()} {results[0].source} to {results[0].target}: {size} in {seconds:.1f} s.")
        return
    total = len(plan.files) + len(plan.unseen)
    of_all = f"{len(results):,} of " if failures or plan.unseen else ""
    answer(f"{participle.capitalize()} {of_all}{number_of(total, 'file')}: {size} in {seconds:.1f} s.")
