"""What became of each file of a rotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from parquet_keytools.errors import KeytoolsError


class Outcome(Enum):
    """What became of a file."""

    ROTATED = "rotated"
    WOULD_ROTATE = "would rotate"
    ALREADY_CURRENT = "already current"
    NOTHING_TO_ROTATE = "nothing to rotate"
    FINISHED_BEFORE = "finished before"
    RESTORED = "restored"
    NOTHING_TO_RESTORE = "nothing to restore"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Keys of a file that went from one master key, or one version of it, to another.

    Attributes:
        master_key_id: Identifier of the old master key in its KMS.
        new_master_key_id: Identifier of the new one; often the same.
        version: The version that wrapped, or None where nobody can tell.
        new_version: The version that wraps now, or None.
        keys: How many keys of the file: DEKs, whether or not a KEK stands between.
    """

    master_key_id: str
    new_master_key_id: str
    version: str | None
    new_version: str | None
    keys: int


@dataclass(frozen=True, slots=True)
class FileRotation:
    """What became of one file.

    Attributes:
        path: The Parquet file, as in `FileLocation`'s text.
        outcome: What became of it.
        keys: What changed, or would change.
        how: In which way it was replaced, or why there was nothing to do; for people.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
        error: Why it failed, without traceback; None where it did not.
    """

    path: str
    outcome: Outcome
    keys: tuple[KeyChange, ...] = ()
    how: str = ""
    bytes_written: int = 0
    bytes_copied: int = 0
    error: KeytoolsError | OSError | None = None

    @property
    def error_class(self) -> str | None:
        """Name of the error's class."""
        return None if self.error is None else type(self.error).__name__

    @classmethod
    def failed(cls, path: str, error: KeytoolsError | OSError) -> FileRotation:
        """Return that of a file that could not be done and stays as it is."""
        # Frames hold keys and footers, and a report may be kept for long.
        error.__cause__ = error.__context__ = None
        return cls(path, Outcome.FAILED, error=error.with_traceback(None))


@dataclass(frozen=True, slots=True)
class KmsCalls:
    """How many distinct keys a KMS was, or would be, asked for, by operation."""

    rewrap: int = 0
    unwrap: int = 0
    wrap: int = 0
    describe: int = 0

    @property
    def total(self) -> int:
        """All together."""
        return self.rewrap + self.unwrap + self.wrap + self.describe

    def __add__(self, other: KmsCalls) -> KmsCalls:
        return KmsCalls(
            self.rewrap + other.rewrap,
            self.unwrap + other.unwrap,
            self.wrap + other.wrap,
            self.describe + other.describe,
        )


@dataclass
class RotationReport:
    """What became of a data set.

    Attributes:
        dry_run: Whether nothing was to be changed.
        counts: How many files had each outcome.
        files: What became of each; only of those that failed, where not all results were to be kept.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
        kms_calls: What the KMS was asked for.
        expected_kms_calls: After a dry run, what the rotation itself would ask.
        journal: Path of the journal, if it is still there: the same call goes on where this one ended.
        journal_in_use: Whether another run holds the journal, so that this one went without.
        stopped_by: Why the run ended before all files had their turn; None where it did not.
    """

    dry_run: bool = False
    counts: Counter[Outcome] = field(default_factory=Counter)
    files: list[FileRotation] = field(default_factory=list)
    bytes_written: int = 0
    bytes_copied: int = 0
    kms_calls: KmsCalls = field(default_factory=KmsCalls)
    expected_kms_calls: KmsCalls = field(default_factory=KmsCalls)
    journal: str | None = None
    journal_in_use: bool = False
    stopped_by: KeytoolsError | None = None

    @property
    def failures(self) -> list[FileRotation]:
        """The files that failed."""
        return [file for file in self.files if file.outcome is Outcome.FAILED]

    @property
    def succeeded(self) -> bool:
        """Whether all files had their turn and none failed."""
        return self.stopped_by is None and not self.counts[Outcome.FAILED]

    def add(self, results: Iterable[FileRotation], *, keep_results: bool) -> None:
        """Count results."""
        for result in results:
            self.counts[result.outcome] += 1
            self.bytes_written += result.bytes_written
            self.bytes_copied += result.bytes_copied
            if keep_results or result.outcome is Outcome.FAILED:
                self.files.append(result)
