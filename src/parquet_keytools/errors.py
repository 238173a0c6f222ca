"""Every error that parquet-keytools raises, in one tree with one root.

Each error carries its facts as attributes, and its text says what happened, where, and what to do next. No
text and no attribute ever holds a key, a token or the body of a KMS response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class KeytoolsError(Exception):
    """Root of all errors of this package.

    Attributes:
        hint: What to do next; empty if there is no general advice.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.hint}" if self.hint else message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[KeytoolsError], args: tuple[Any, ...], facts: dict[str, Any]) -> KeytoolsError:
    """Make an unpickled error; worker processes send errors back to their parents."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ConfigurationError(KeytoolsError):
    """The configuration is wrong.

    Attributes:
        file: The YAML file, or None if the configuration came from Python.
        line: Line of the file, counted from 1, or None.
        yaml_path: Place in the document, such as `tables.flights.column_keys.pii`.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        yaml_path: str = "",
        hint: str = "",
    ) -> None:
        place = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        where = f"{yaml_path}: " if yaml_path else ""
        super().__init__(f"{place}{where}{message}", hint=hint)
        self.file = file
        self.line = line
        self.yaml_path = yaml_path


class _UnsupportedError(KeytoolsError):
    """An engine cannot do what a table or a file needs."""

    _who: ClassVar[str] = "this engine"

    def __init__(self, reasons: Sequence[str], *, hint: str = "") -> None:
        super().__init__(f"{self._who} does not support this: {'; '.join(reasons)}.", hint=hint)
        self.reasons = tuple(reasons)


class UnsupportedByArrowError(_UnsupportedError):
    """The table asks for something that pyarrow's encryption properties cannot express.

    Attributes:
        reasons: One sentence for each unsupported setting.
    """

    _who = "pyarrow"


class UnsupportedByPolarsError(_UnsupportedError):
    """The file needs something that Polars' own decryption does not have.

    Attributes:
        reasons: One sentence for each unsupported setting.
    """

    _who = "Polars"


class UnsupportedBySparkError(_UnsupportedError):
    """The table asks for something that Spark's own Parquet writer cannot do.

    Attributes:
        reasons: One sentence for each unsupported setting.
    """

    _who = "Spark's own writer"


class SparkJobFailedError(KeytoolsError):
    """A Spark job failed, and no file is the cause: executors were lost, or ran out of memory."""


class WorkerProcessEndedError(KeytoolsError):
    """A worker process of the command line was killed before it reported a result, or cannot be started."""


def without_frames(error: E) -> E:
    """Return an error without its traceback, cause and context.

    Frames hold keys and footers, and an error may be kept for a long time. The text of another library's exception
    may hold keys and tokens, and a traceback would print it.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def value_or_raise(outcome: T | KeytoolsError) -> T:
    """Return the outcome if it is a value; raise it if it is an error."""
    if isinstance(outcome, KeytoolsError):
        raise outcome
    return outcome


# --- errors of a KMS ---


class KmsError(KeytoolsError):
    """A call to a KMS failed.

    Attributes:
        backend: Name of the KMS client, such as `vault`.
        operation: `wrap`, `unwrap`, `rewrap`, `describe`, `connect`, `update`, `delete`, `cancel_deletion` or
            `identify`.
        master_key_id: The master key concerned, or None.
        detail: Further facts; empty if there are none.
        tries: Number of attempts.
        kms: Name of the KMS if the configuration has several, else empty; `master_key_id` then begins with it.
        others_may_answer: Whether the configuration has other KMSs that may answer.
        retry_after_seconds: The delay that the KMS asked for; 0 if it did not.
        retryable: Whether the same call may succeed later.
    """

    retryable: ClassVar[bool] = False
    summary: ClassVar[str] = "the KMS failed"
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        detail: str = "",
        *,
        backend: str = "",
        operation: str = "",
        master_key_id: str | None = None,
        hint: str | None = None,
        retry_after_seconds: float = 0.0,
        tries: int = 1,
        kms: str = "",
        others_may_answer: bool = False,
    ) -> None:
        key = f" with master key {master_key_id!r}" if master_key_id is not None else ""
        known = f": {detail}" if detail else ""
        super().__init__(
            f"{f'{kms} ({backend})' if kms else backend}: {operation}{key}: {self.summary}{known}.",
            hint=self._hint_for(operation) if hint is None else hint,
        )
        self.backend = backend
        self.operation = operation
        self.master_key_id = master_key_id
        self.detail = detail
        self.tries = tries
        self.kms = kms
        self.others_may_answer = others_may_answer
        self.retry_after_seconds = retry_after_seconds

    def about(self, backend: str, operation: str, master_key_id: str | None) -> Self:
        """Return this error with the facts of a call that it does not have yet."""
        if self.backend and self.operation:
            return self
        if self.operation or self.master_key_id is not None:
            master_key_id = self.master_key_id  # an error of a connection is about no key
        operation = self.operation or operation
        return self._changed(backend=self.backend or backend, operation=operation, master_key_id=master_key_id)

    def after(self, tries: int, seconds: float) -> Self:
        """Return this error with the number of attempts and the time that they took."""
        taken = f"after {tries} tries in {seconds:.1f} seconds" if tries > 1 else ""
        return self._changed(detail=", ".join(filter(None, [self.detail, taken])), tries=tries)

    def of_kms(self, kms: str, master_key_id: str | None, *, others_may_answer: bool) -> Self:
        """Return this error as an error of one of several KMSs, whose name begins the master key's identifier."""
        if self.master_key_id is None:
            master_key_id = None  # an error of a connection is about no key
        return self._changed(kms=kms, master_key_id=master_key_id, others_may_answer=others_may_answer)

    def not_attempted(self) -> Self:
        """Return the error of a request that was not sent, because of this error of an earlier one."""
        after = f"not attempted, after an earlier request failed: {self.detail or self.summary}"
        return self._changed(detail=after, tries=0)

    @classmethod
    def _hint_for(cls, operation: str) -> str:
        return cls.default_hint

    def _changed(self, **changes: Any) -> Self:
        # Not all attributes: the error of a plug-in may have its own.
        facts = {name: getattr(self, name) for name in ("detail", *(KmsError.__init__.__kwdefaults__ or ()))}
        if self.hint == self._hint_for(self.operation):
            facts["hint"] = None
        return type(self)(**{**facts, **changes})


class KmsAccessDeniedError(KmsError):
    """The KMS does not let this principal use the master key."""

    summary = "access denied"
    default_hint = "Ask for the permission, or read without the columns under this master key."

    @classmethod
    def _hint_for(cls, operation: str) -> str:
        # Nothing can be written without the key.
        return cls.default_hint if operation in ("", "unwrap") else "Ask for the permission."


class MasterKeyNotFoundError(KmsError):
    """The KMS does not have the master key."""

    summary = "no such master key"
    default_hint = "Check the key's identifier, and that the configuration points to the right KMS."


class MasterKeyNotTrustedError(KmsError):
    """Key material names a master key that the configuration does not name, and that may be an attacker's."""

    summary = "the configuration does not name this master key"
    default_hint = (
        "Anyone who can write to the storage can make files under a master key of their own. If the key is "
        "yours, add it to `master_keys`."
    )


class MasterKeyDisabledError(KmsError):
    """The master key, or the version of it that is needed, is disabled or scheduled for deletion."""

    summary = "the master key is disabled"
    default_hint = "Enable it in the KMS, or rotate the files to another master key while it is enabled."


class WrappedKeyInvalidError(KmsError):
    """The wrapped key was wrapped by another master key, or is damaged."""

    summary = "the wrapped key does not belong to this master key, or is damaged"
    default_hint = "Check that the file was written with this KMS, and restore it if it was altered."


KEY_REFUSALS = (KmsAccessDeniedError, MasterKeyDisabledError, MasterKeyNotFoundError)
"""The errors by which a KMS denies a reader a key. Any other error may be temporary, or an attack."""


class KmsThrottledError(KmsError):
    """The KMS asked for fewer calls."""

    retryable = True
    summary = "too many requests"
    default_hint = "Retry later, or raise the KMS's quota."


class KmsUnavailableError(KmsError):
    """The KMS could not be reached, or did not respond in time."""

    retryable = True
    summary = "the KMS is unavailable"
    default_hint = "Check the network and the KMS, then retry."

    def at(self, address: str) -> Self:
        """Return this error with the address of the KMS in its text."""
        detail = f"{address}: {self.detail}" if self.detail else address
        return self._changed(detail=detail) if address else self


class KmsConfigurationError(KmsError):
    """The KMS client is configured wrongly."""

    summary = "wrong configuration"


class KmsResponseInvalidError(KmsError):
    """The KMS, or a proxy on the way, returned an invalid response."""

    summary = "the answer is not valid"
    default_hint = "Check that the configuration points to the right KMS, and proxies in between."


def kms_failure(error: Exception) -> KmsError | None:
    """Return the error of the KMS or its credentials that all other files would have, too; None if there is none.

    With several KMSs, other files may need another one, as long as one may answer.
    """
    causes = error.causes if isinstance(error, ColumnAccessDeniedError) else (error,)
    ends = (KmsUnavailableError, KmsConfigurationError)
    return next((cause for cause in causes if isinstance(cause, ends) and not cause.others_may_answer), None)


# --- errors of a file: its format, table, place, modules or keys ---


class ParquetFormatError(KeytoolsError):
    """Bytes break a rule of the Parquet format.

    Attributes:
        path: The file, or None if only its bytes are known.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class DraftFormatError(ParquetFormatError):
    """The file follows a draft of the encryption specification that was never in force."""


class FormatLimitError(KeytoolsError):
    """The file would break a limit of the format or of its ciphers (spec 4.1.4, 4.4.2)."""


class FileChangedError(ParquetFormatError):
    """The file was replaced or altered while it was being read."""


class NoParquetFilesError(ParquetFormatError):
    """A folder that should be a data set has no Parquet files."""

    def __init__(
        self,
        message: str = "the folder has no Parquet files.",
        *,
        path: str | None = None,
        hint: str = "Check the path.",
    ) -> None:
        super().__init__(message, path=path, hint=hint)


class IncompleteDataSetError(KeytoolsError):
    """An entry of a data set cannot be checked, such as a broken link, so rows might be missing.

    Attributes:
        entries: Path of each entry, and the reason.
    """

    def __init__(self, entries: Sequence[tuple[str, str]], *, hint: str = "") -> None:
        shown = "; ".join(f"{path}: {reason}" for path, reason in entries[:5])
        more = f"; and {len(entries) - 5} more" if len(entries) > 5 else ""
        super().__init__(f"parts of the data set could not be checked: {shown}{more}.", hint=hint)
        self.entries = tuple(entries)


class KeyMaterialError(ParquetFormatError):
    """Key metadata or key material is not valid."""


class ErasureRefusedError(KeytoolsError):
    """Deleting the master keys of a value would lose other data, or leave data of the value readable."""


class FileListError(KeytoolsError):
    """A list of files is not authentic or not valid, or the files of a folder differ from it."""


class VisibleMetadataError(KeytoolsError):
    """A plaintext footer would show metadata that may hold values of encrypted columns."""


class NotEncryptedError(KeytoolsError):
    """A file is in plaintext where an encrypted one is expected."""


_MOST_MISMATCHES = 5
"""How many mismatches the text of an error lists."""


@dataclass(frozen=True, slots=True)
class TableMismatch:
    """One difference between a file and its table.

    Attributes:
        what: `algorithm`, `footer key`, `column key`; `plaintext column`: a column that the table encrypts; or
            `column value`: a column whose value is not the value of the file's keys.
        column: Dotted path of the column; None if the difference concerns the whole file.
        wanted: What the table says.
        found: What the file says. An attacker may have chosen this text.
    """

    what: Literal["algorithm", "footer key", "column key", "plaintext column", "column value"]
    column: str | None
    wanted: str
    found: str

    def __str__(self) -> str:
        if self.what == "algorithm":
            return f"the algorithm is {self.found}, and the table has {self.wanted}"
        if self.column is None:
            return f"the footer is under {self.found}, and the table has {self.wanted}"
        if self.what == "column value":
            return f"column {self.column[:200]!r} does not fit {self.wanted}: {self.found}"
        state = "in plaintext" if self.what == "plaintext column" else f"under {self.found}"
        return f"column {self.column[:200]!r} is {state}, and the table has {self.wanted}"


class TableMismatchError(KeytoolsError):
    """The file differs from its table in keys, algorithm, or columns in plaintext.

    Attributes:
        path: The file.
        table: Name of the table.
        mismatches: All differences.
    """

    def __init__(self, path: str, table: str, mismatches: Sequence[TableMismatch], *, hint: str = "") -> None:
        shown = "; ".join(map(str, mismatches[:_MOST_MISMATCHES]))
        others = len(mismatches) - _MOST_MISMATCHES
        more = f"; and {others} more" if others > 0 else ""
        super().__init__(f"{path}: this is not a file of the table {table!r}: {shown}{more}.", hint=hint)
        self.path = path
        self.table = table
        self.mismatches = tuple(mismatches)


class ReusedKeysError(KeytoolsError):
    """Two files share data keys and file unique: encryption properties were used twice, or one file is a copy.

    Attributes:
        path: The file.
        other_path: The file that was opened earlier.
    """

    def __init__(self, path: str, other_path: str, *, hint: str = "") -> None:
        super().__init__(
            f"{path} and {other_path} share their data keys and file unique: both were written with the same "
            "encryption properties, or one is a copy of the other. Parts of one can replace parts of the other "
            "undetected.",
            hint=hint,
        )
        self.path = path
        self.other_path = other_path


class AlreadyEncryptedError(KeytoolsError):
    """The file to encrypt is already encrypted."""


class OutputError(KeytoolsError):
    """The output cannot be written to its target."""


class StorageFailedError(OutputError):
    """The file system is full, read-only or broken, so writing other files would fail, too.

    Attributes:
        error_number: Error number of the operating system, as in `errno`; 0 if it gave none.
    """

    def __init__(self, message: str, *, error_number: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.error_number = error_number


class ChangedMeanwhileError(KeytoolsError):
    """A file was replaced after it was read; it must be read again."""


class DecryptionError(KeytoolsError):
    """Bytes do not authenticate, or cannot be decrypted.

    Attributes:
        path: The file, or None if only its bytes are known.
        column: Dotted path of the column, or None.
        module_type: Name of the module type (spec 4.4.2), or None if no module is concerned.
        row_group_ordinal: From 0, or None.
        column_ordinal: From 0, or None.
        page_ordinal: From 0, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        module_type: str | None = None,
        row_group_ordinal: int | None = None,
        column_ordinal: int | None = None,
        page_ordinal: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.path: str | None = None
        self.column: str | None = None
        self.module_type = module_type
        self.row_group_ordinal = row_group_ordinal
        self.column_ordinal = column_ordinal
        self.page_ordinal = page_ordinal

    def __str__(self) -> str:
        text = super().__str__()
        facts = (
            (self.module_type, "{}"),
            (self.row_group_ordinal, "row group {}"),
            (self.column_ordinal, "column {}" if self.column is None else f"column {{}} ({self.column!r})"),
            (self.page_ordinal, "page {}"),
        )
        place = ", ".join(form.format(fact) for fact, form in facts if fact is not None)
        # Some texts already begin with the path.
        path = self.path if self.path is not None and not text.startswith(self.path) else None
        return ": ".join(filter(None, [path, place, text]))


class FooterSignatureError(DecryptionError):
    """The signature of a plaintext footer is missing or wrong (spec 5.5)."""


class AadPrefixError(DecryptionError):
    """The AAD prefix is missing, or differs from the expected one (spec 4.4.1)."""


class FolderNameError(DecryptionError):
    """The name of a folder gives values to an encrypted column, and readers would take them for its own values.

    Attributes:
        folder: Name of the folder.
        column: Name of the column.
    """

    def __init__(self, path: str, folder: str, column: str) -> None:
        super().__init__(
            f"{path}: the name of a folder gives values to {column[:200]!r}, which is under a key: "
            f"{folder[:200]!r}. Nothing authenticates the names of folders.",
            hint="The file was moved there, or a writer partitioned by that column. Move the file to a folder "
            "with another name.",
        )
        self.path = path
        self.folder = folder
        self.column = column


class KeyNotAvailableError(KeytoolsError):
    """The key of a part of the file is unknown: its key metadata is empty, or names a key that we do not have."""


class ColumnAccessDeniedError(KeytoolsError):
    """A read asks for columns whose keys are unavailable.

    Attributes:
        columns: Dotted paths of these columns.
        causes: For each column, the error that says why its key is unavailable.
    """

    def __init__(self, columns: Sequence[str], causes: Sequence[KeytoolsError], *, hint: str = "") -> None:
        reasons = " ".join(dict.fromkeys(str(cause) for cause in causes))
        super().__init__(f"cannot read {', '.join(map(repr, columns))}: {reasons}", hint=hint)
        self.columns = tuple(columns)
        self.causes = tuple(causes)
