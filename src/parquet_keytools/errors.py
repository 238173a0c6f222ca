"""Every error that parquet-keytools raises, in one tree with one root.

Each error carries its facts as attributes, and its text says what happened, where, and what to do next. No
text and no attribute ever holds a key, a token or the body of a KMS response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

T = TypeVar("T")


class KeytoolsError(Exception):
    """Root of all errors of this package.

    Attributes:
        hint: What to do next; empty where nothing general can be said.
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
        file: The YAML file, or None where the configuration came from Python.
        line: Line in it, counted from 1, or None.
        yaml_path: Where in the document, such as `tables.flights.column_keys.pii`.
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


class UnsupportedByArrowError(KeytoolsError):
    """The table asks for something that pyarrow's encryption properties cannot express.

    Attributes:
        reasons: One sentence for each such thing.
    """

    def __init__(self, reasons: Sequence[str], *, hint: str = "") -> None:
        super().__init__("pyarrow cannot do what is asked for: " + "; ".join(reasons) + ".", hint=hint)
        self.reasons = tuple(reasons)


class UnsupportedBySparkError(KeytoolsError):
    """The table asks for something that Spark's own Parquet writer cannot do.

    Attributes:
        reasons: One sentence for each such thing.
    """

    def __init__(self, reasons: Sequence[str], *, hint: str = "") -> None:
        super().__init__("Spark's own writer cannot do what is asked for: " + "; ".join(reasons) + ".", hint=hint)
        self.reasons = tuple(reasons)


class SparkJobFailedError(KeytoolsError):
    """A job of Spark failed for a reason that is not one of a file: executors are lost, or out of memory."""


def value_or_raise(outcome: T | KeytoolsError) -> T:
    """Return an outcome that is a value, and raise one that is an error."""
    if isinstance(outcome, KeytoolsError):
        raise outcome
    return outcome


# --- KMS ---------------------------------------------------------------------------------------------------


class KmsError(KeytoolsError):
    """A KMS did not do what it was asked for.

    Attributes:
        backend: Name of the KMS client, such as `vault`.
        operation: `wrap`, `unwrap`, `rewrap`, `describe`, `connect` or `update`.
        master_key_id: The master key concerned, or None.
        detail: What is known beyond the kind of error; empty where nothing is.
        tries: How often the KMS was asked.
        retry_after_seconds: How long the KMS itself wants to be left alone; 0 where it does not say.
        retryable: Whether the same call may succeed later.
    """

    retryable: ClassVar[bool] = False
    summary: ClassVar[str] = "the KMS failed"
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        detail: str = "",
        *,
        backend: str,
        operation: str,
        master_key_id: str | None = None,
        hint: str | None = None,
        retry_after_seconds: float = 0.0,
    ) -> None:
        key = f" with master key {master_key_id!r}" if master_key_id is not None else ""
        known = f": {detail}" if detail else ""
        super().__init__(
            f"{backend}: {operation}{key}: {self.summary}{known}.",
            hint=self.default_hint if hint is None else hint,
        )
        self.backend = backend
        self.operation = operation
        self.master_key_id = master_key_id
        self.detail = detail
        self.tries = 1
        self.retry_after_seconds = retry_after_seconds

    def after(self, tries: int, seconds: float) -> Self:
        """Return this error as it stands after so many tries."""
        if tries == 1:
            return self
        detail = ", ".join(filter(None, [self.detail, f"after {tries} tries in {seconds:.1f} seconds"]))
        error = type(self)(
            detail,
            backend=self.backend,
            operation=self.operation,
            master_key_id=self.master_key_id,
            hint=self.hint,
            retry_after_seconds=self.retry_after_seconds,
        )
        error.tries = tries
        return error


class KmsAccessDeniedError(KmsError):
    """The KMS does not let this principal use the master key."""

    summary = "access denied"
    default_hint = "Ask for the permission, or read without the columns under this master key."


class MasterKeyNotFoundError(KmsError):
    """The KMS has no such master key."""

    summary = "no such master key"
    default_hint = "Check the key's identifier, and that the configuration points to the right KMS."


class MasterKeyNotTrustedError(KmsError):
    """Key material names a master key that could be anybody's, and that the configuration does not name."""

    summary = "the configuration does not name this master key"
    default_hint = (
        "Whoever can write to the storage can make files under a master key of their own. If it is yours, add it "
        "under `master_keys`."
    )


class MasterKeyDisabledError(KmsError):
    """The master key, or the version of it that is needed, is disabled, or waits for its deletion."""

    summary = "the master key is disabled"
    default_hint = "Enable it in the KMS, or rotate the files to another master key while it is enabled."


class WrappedKeyInvalidError(KmsError):
    """The wrapped key was not made by this master key, or was damaged."""

    summary = "the wrapped key does not belong to this master key, or is damaged"
    default_hint = "Check that the file was written with this KMS, and restore it if it was altered."


KEY_REFUSALS = (KmsAccessDeniedError, MasterKeyDisabledError, MasterKeyNotFoundError)
"""How a KMS says that this reader is not to have a key; all else may be another answer tomorrow, or an attack."""


class KmsThrottledError(KmsError):
    """The KMS asked for fewer calls."""

    retryable = True
    summary = "too many requests"
    default_hint = "Try again later, or raise the KMS's quota."


class KmsUnavailableError(KmsError):
    """The KMS could not be reached, or did not answer in time."""

    retryable = True
    summary = "the KMS cannot be reached"
    default_hint = "Check the network and the KMS, then try again."


class KmsConfigurationError(KmsError):
    """The KMS client is configured wrongly."""

    summary = "wrong configuration"


class KmsResponseInvalidError(KmsError):
    """The KMS, or something in between, answered with what cannot be a right answer."""

    summary = "the answer is not valid"
    default_hint = "Check that the configuration points to the right KMS, and what lies between."


# --- Files -------------------------------------------------------------------------------------------------


class ParquetFormatError(KeytoolsError):
    """Bytes are not what the Parquet format says.

    Attributes:
        path: The file, or None where only bytes are known.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class DraftFormatError(ParquetFormatError):
    """The file follows a draft of the encryption specification that was never in force."""


class FormatLimitError(KeytoolsError):
    """The file would break a limit of the format or of its ciphers (spec 4.1.4, 4.4.2)."""


class FileChangedError(ParquetFormatError):
    """The file is another one than a moment ago: it was written anew, or altered."""


class KeyMaterialError(ParquetFormatError):
    """Key metadata or key material is not valid."""


class NotEncryptedError(KeytoolsError):
    """A plaintext file lies where an encrypted one is expected."""


class AlreadyEncryptedError(KeytoolsError):
    """The file to be encrypted is encrypted already."""


class OutputError(KeytoolsError):
    """The output cannot be written there."""


# --- Decryption --------------------------------------------------------------------------------------------


class DecryptionError(KeytoolsError):
    """Bytes do not authenticate, or cannot be decrypted.

    Attributes:
        path: The file, or None where only bytes are known.
        column: Dotted path of the column, or None.
        module_type: Name of the module type (spec 4.4.2), or None where no module is concerned.
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
        # Some texts begin with the file.
        path = self.path if self.path is not None and not text.startswith(self.path) else None
        return ": ".join(filter(None, [path, place, text]))


class FooterSignatureError(DecryptionError):
    """The signature of a plaintext footer is missing or wrong (spec 5.5)."""


class AadPrefixError(DecryptionError):
    """The AAD prefix is missing, or not the one that is expected (spec 4.4.1)."""


class KeyNotAvailableError(KeytoolsError):
    """No key is known for a part of the file: its key metadata is empty or names no key of ours."""


class ColumnAccessDeniedError(KeytoolsError):
    """A read asks for columns whose keys cannot be had.

    Attributes:
        columns: Dotted paths of these columns.
        causes: For each of them the error that says why its key cannot be had.
    """

    def __init__(self, columns: Sequence[str], causes: Sequence[KeytoolsError], *, hint: str = "") -> None:
        reasons = " ".join(dict.fromkeys(str(cause) for cause in causes))
        super().__init__(f"cannot read {', '.join(map(repr, columns))}: {reasons}", hint=hint)
        self.columns = tuple(columns)
        self.causes = tuple(causes)
