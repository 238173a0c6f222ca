"""What became of each file whose keys were rotated: its master keys, or its data keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from enum import Enum

from parquet_keytools.errors import KeytoolsError, without_frames
from parquet_keytools.runtime.presentation import Summarised
from parquet_keytools.storage.walk import BehindLink, Unseen

MOST_LEFT_BEHIND = 100
"""How much of what is left behind, or shared, a report names; where nothing may be listed, each file has some."""


class RotationOutcome(Enum):
    """What became of a file."""

    ROTATED = "rotated"
    WOULD_ROTATE = "would rotate"
    ALREADY_CURRENT = "already current"
    REKEYED = "rekeyed"
    NOTHING_TO_ROTATE = "nothing to rotate"
    NOT_ENCRYPTED = "not encrypted"
    FAILED = "failed"


Outcome = RotationOutcome
"""The name of former versions; that of a rule of conformance is another one."""


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


@dataclass(frozen=True, slots=True, repr=False)
class FileRotation(Summarised):
    """What became of one file.

    Attributes:
        path: The Parquet file, as in `FileLocation`'s text.
        outcome: What became of it.
        keys: What changed, or would change.
        how: In which way it was replaced, or why there was nothing to do; for people.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
        error: Why it failed, without traceback; None where it did not.
        old_size_bytes: Its length before it was rekeyed; 0 for all else.
        new_size_bytes: Its length since then; 0 for all else.
        shares_keys_with: Another file of the run that has its data keys and file unique, if there is one.
    """

    path: str
    outcome: RotationOutcome
    keys: tuple[KeyChange, ...] = ()
    how: str = ""
    bytes_written: int = 0
    bytes_copied: int = 0
    error: KeytoolsError | OSError | None = None
    old_size_bytes: int = 0
    new_size_bytes: int = 0
    shares_keys_with: str | None = None

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        facts = {"path": self.path, "outcome": self.outcome.value, "keys": len(self.keys), "how": self.how}
        return facts | ({"error": self.error} if self.error is not None else {})

    @property
    def error_class(self) -> str | None:
        """Name of the error's class."""
        return None if self.error is None else type(self.error).__name__

    @classmethod
    def failed(cls, path: str, error: KeytoolsError | OSError) -> FileRotation:
        """Return that of a file that could not be done and stays as it is."""
        return cls(path, RotationOutcome.FAILED, error=without_frames(error))

    @classmethod
    def of_link(cls, behind: BehindLink) -> FileRotation:
        """Return the result for a file or folder behind a link: outside of what was named, it fails."""
        if behind.is_outside:
            return cls.failed(behind.path, behind.error())
        return cls(behind.path, RotationOutcome.NOTHING_TO_ROTATE, how="another name of a file of this run")

    @classmethod
    def of_unseen(cls, unseen: Unseen) -> FileRotation:
        """Return that of what could not be looked into; a folder that was removed meanwhile has no files."""
        if unseen.is_gone:
            return cls(unseen.path, RotationOutcome.NOTHING_TO_ROTATE, how="removed meanwhile")
        return cls.failed(unseen.path, unseen.error)


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
        return sum(astuple(self))

    def __add__(self, other: KmsCalls) -> KmsCalls:
        return KmsCalls(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(repr=False)
class RotationReport(Summarised):
    """What became of a data set.

    Attributes:
        dry_run: Whether nothing was to be changed.
        counts: How many files had each outcome.
        files: What became of each; only of those that failed, where not all results were to be kept.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
        kms_calls: What the KMS was asked for.
        expected_kms_calls: After a dry run, what the rotation itself would ask.
        stopped_by: Why the run ended before all files were processed; None where it did not.
        shared_keys: Files that share data keys and file unique, two in each text; for people. At most
            `MOST_LEFT_BEHIND`.
        left_behind: What stays in a store because it could not be removed, or looked for; for people. At most
            `MOST_LEFT_BEHIND`.
    """

    dry_run: bool = False
    counts: Counter[RotationOutcome] = field(default_factory=Counter)
    files: list[FileRotation] = field(default_factory=list)
    bytes_written: int = 0
    bytes_copied: int = 0
    kms_calls: KmsCalls = field(default_factory=KmsCalls)
    expected_kms_calls: KmsCalls = field(default_factory=KmsCalls)
    stopped_by: KeytoolsError | None = None
    shared_keys: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
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

    def note_left_behind(self, text: str) -> None:
        """Name something that stays in a store, once."""
        if len(self.left_behind) < MOST_LEFT_BEHIND and text not in self.left_behind:
            self.left_behind.append(text)

    def add(self, results: Iterable[FileRotation], *, keep_results: bool) -> None:
        """Count results."""
        for result in results:
            self.counts[result.outcome] += 1
            self.bytes_written += result.bytes_written
            self.bytes_copied += result.bytes_copied
            if result.shares_keys_with is not None and len(self.shared_keys) < MOST_LEFT_BEHIND:
                self.shared_keys.append(f"{result.path} and {result.shares_keys_with}")
            if keep_results or result.outcome is RotationOutcome.FAILED:
                self.files.append(result)
