"""Reports of a rotation: the result for each file whose master keys or data keys were changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import Enum

from parquet_keytools.errors import KeytoolsError, without_frames
from parquet_keytools.runtime.presentation import Summarised
from parquet_keytools.storage.walk import BehindLink, LeftOut, Unseen


class RotationOutcome(Enum):
    """The outcome for a file."""

    ROTATED = "rotated"
    WOULD_ROTATE = "would rotate"
    ALREADY_CURRENT = "already current"
    REKEYED = "rekeyed"
    ENCRYPTED = "encrypted"
    ALREADY_ENCRYPTED = "already encrypted"
    ROWS_REMOVED = "rewritten without rows"
    WOULD_REMOVE_ROWS = "with matching rows"
    NO_MATCHING_ROWS = "without matching rows"
    NOTHING_TO_ROTATE = "nothing to rotate"
    NOT_ENCRYPTED = "not encrypted"
    FAILED = "failed"
    NOT_ATTEMPTED = "not attempted"
    """Left when the KMS or the storage failed, and unchanged."""


Outcome = RotationOutcome
"""A shorter name."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Keys of a file that moved from one master key, or one version of it, to another.

    Attributes:
        master_key_id: Identifier of the old master key in its KMS.
        new_master_key_id: Identifier of the new master key; often the same.
        version: The old version; None if it is unknown.
        new_version: The new version; None if it is unknown.
        keys: Number of DEKs of the file, wrapped directly or through a KEK.
    """

    master_key_id: str
    new_master_key_id: str
    version: str | None
    new_version: str | None
    keys: int


@dataclass(frozen=True, slots=True, repr=False)
class FileRotation(Summarised):
    """The result for one file.

    Attributes:
        path: The Parquet file, as the text of its `FileLocation`.
        outcome: The outcome.
        keys: What changed, or would change.
        how: How the file was replaced, or why there was nothing to do; for people.
        bytes_written: Bytes that went through this process.
        bytes_copied: Bytes that the operating system or the store copied.
        error: Why it failed, without traceback; None if it did not.
        old_size_bytes: Length before the file was encrypted or rekeyed; otherwise None.
        new_size_bytes: Length after it was encrypted or rekeyed; otherwise None.
        plaintext_columns: Dotted paths of the leaf columns in plaintext, of a file that was encrypted or rekeyed.
    """

    path: str
    outcome: RotationOutcome
    keys: tuple[KeyChange, ...] = ()
    how: str = ""
    bytes_written: int = 0
    bytes_copied: int = 0
    error: KeytoolsError | OSError | None = None
    old_size_bytes: int | None = None
    new_size_bytes: int | None = None
    plaintext_columns: tuple[str, ...] = ()

    def summary(self) -> Mapping[str, object]:
        """Return the main facts."""
        facts = {"path": self.path, "outcome": self.outcome.value, "keys": len(self.keys), "how": self.how}
        return facts | ({"error": self.error} if self.error is not None else {})

    @property
    def error_class(self) -> str | None:
        """Name of the error's class."""
        return None if self.error is None else type(self.error).__name__

    @classmethod
    def failed(cls, path: str, error: KeytoolsError | OSError) -> FileRotation:
        """Return the result for a file that failed and is unchanged."""
        return cls(path, RotationOutcome.FAILED, error=without_frames(error))

    @classmethod
    def of_link(cls, behind: BehindLink) -> FileRotation:
        """Return the result for a file or folder behind a link: a failure if it is outside the given folder."""
        if behind.is_outside:
            return cls.failed(behind.path, behind.error())
        return cls(behind.path, RotationOutcome.NOTHING_TO_ROTATE, how="another name of a file of this run")

    @classmethod
    def of_unseen(cls, unseen: Unseen) -> FileRotation:
        """Return the result for an entry that could not be checked, or was removed meanwhile."""
        if unseen.is_gone:
            return cls(unseen.path, RotationOutcome.NOTHING_TO_ROTATE, how="removed meanwhile")
        return cls.failed(unseen.path, unseen.error)


@dataclass(frozen=True, slots=True)
class KmsCalls:
    """Number of distinct keys in KMS calls, by operation."""

    rewrap: int = 0
    unwrap: int = 0
    wrap: int = 0
    describe: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(astuple(self))

    def __add__(self, other: KmsCalls) -> KmsCalls:
        return KmsCalls(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(repr=False)
class RotationReport(Summarised):
    """The results for a file or a data set.

    Attributes:
        dry_run: Whether nothing was to be changed.
        counts: Number of files by outcome.
        files: The result for each file; if not all results were kept, only for files that failed.
        bytes_written: Bytes that went through this process.
        bytes_copied: Bytes that the operating system or the store copied.
        kms_calls: KMS calls that were made.
        expected_kms_calls: After a dry run, the KMS calls that the rotation itself would make.
        stopped_by: Why the run ended before all files were processed; None if it did not.
        skipped: Entries of a folder that do not belong to the data set, and were not encrypted or rekeyed.
    """

    dry_run: bool = False
    counts: Counter[RotationOutcome] = field(default_factory=Counter)
    files: list[FileRotation] = field(default_factory=list)
    bytes_written: int = 0
    bytes_copied: int = 0
    kms_calls: KmsCalls = field(default_factory=KmsCalls)
    expected_kms_calls: KmsCalls = field(default_factory=KmsCalls)
    stopped_by: KeytoolsError | None = None
    skipped: list[LeftOut] = field(default_factory=list)

    def summary(self) -> Mapping[str, object]:
        """Return the main facts."""
        return {
            "files": {outcome.value: number for outcome, number in self.counts.items()},
            "dry_run": self.dry_run,
            "bytes_written": self.bytes_written,
            "stopped_by": self.stopped_by,
        }

    @property
    def failures(self) -> list[FileRotation]:
        """The files that failed."""
        return [file for file in self.files if file.outcome is RotationOutcome.FAILED]

    @property
    def succeeded(self) -> bool:
        """Whether all files were processed and none failed."""
        return self.stopped_by is None and not self.counts[RotationOutcome.FAILED]

    def add(self, result: FileRotation, *, keep_results: bool) -> None:
        """Add the result for a file; without `keep_results`, list only failures."""
        self.counts[result.outcome] += 1
        self.bytes_written += result.bytes_written
        self.bytes_copied += result.bytes_copied
        if keep_results or result.outcome is RotationOutcome.FAILED:
            self.files.append(result)
