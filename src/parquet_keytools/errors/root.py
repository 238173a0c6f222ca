"""The root of all errors, and the errors of a configuration, of the engines, and of a KMS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

# In the order in which the reference shows them.
__all__ = [  # noqa: RUF022
    "KeytoolsError",
    "ConfigurationError",
    "UnsupportedByArrowError",
    "UnsupportedBySparkError",
    "SparkJobFailedError",
    "WorkerProcessEndedError",
    "value_or_raise",
    "without_frames",
    "KmsError",
    "KmsAccessDeniedError",
    "MasterKeyNotFoundError",
    "MasterKeyNotTrustedError",
    "MasterKeyDisabledError",
    "WrappedKeyInvalidError",
    "KEY_REFUSALS",
    "KmsThrottledError",
    "KmsUnavailableError",
    "KmsConfigurationError",
    "KmsResponseInvalidError",
]

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


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
        super().__init__("pyarrow does not support this: " + "; ".join(reasons) + ".", hint=hint)
        self.reasons = tuple(reasons)


class UnsupportedBySparkError(KeytoolsError):
    """The table asks for something that Spark's own Parquet writer cannot do.

    Attributes:
        reasons: One sentence for each such thing.
    """

    def __init__(self, reasons: Sequence[str], *, hint: str = "") -> None:
        super().__init__("Spark's own writer does not support this: " + "; ".join(reasons) + ".", hint=hint)
        self.reasons = tuple(reasons)


class SparkJobFailedError(KeytoolsError):
    """A job of Spark failed for a reason that is not one of a file: executors are lost, or out of memory."""


class WorkerProcessEndedError(KeytoolsError):
    """A worker process ended before it reported what became of its work: it was killed, or memory was short.

    Attributes:
        has_begun: Whether it may have done this work, or a part of it; else the work was not begun at all.
    """

    def __init__(self, message: str, *, has_begun: bool, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.has_begun = has_begun


def without_frames(error: E) -> E:
    """Return an error without what hangs on it: frames hold keys and footers, and it may be kept for long.

    A foreign exception in its context would print its text, which may hold keys and tokens, in a traceback.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def value_or_raise(outcome: T | KeytoolsError) -> T:
    """Return an outcome that is a value, and raise one that is an error."""
    if isinstance(outcome, KeytoolsError):
        raise outcome
    return outcome


# --- what a KMS refuses, and how it fails ---


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
        error = self._with_detail(
            ", ".join(filter(None, [self.detail, f"after {tries} tries in {seconds:.1f} seconds"]))
        )
        error.tries = tries
        return error

    def _with_detail(self, detail: str) -> Self:
        error = type(self)(
            detail,
            backend=self.backend,
            operation=self.operation,
            master_key_id=self.master_key_id,
            hint=self.hint,
            retry_after_seconds=self.retry_after_seconds,
        )
        error.tries = self.tries
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
        "Whoever can write to the storage can make files under a master key of their own. If the key is "
        "yours, add it to `master_keys`."
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
    default_hint = "Retry later, or raise the KMS's quota."


class KmsUnavailableError(KmsError):
    """The KMS could not be reached, or did not answer in time."""

    retryable = True
    summary = "the KMS is unavailable"
    default_hint = "Check the network and the KMS, then retry."

    def at(self, address: str) -> Self:
        """Return this error with the address of the KMS in it."""
        detail = f"{address}: {self.detail}" if self.detail else address
        return self._with_detail(detail) if address else self


class KmsConfigurationError(KmsError):
    """The KMS client is configured wrongly."""

    summary = "wrong configuration"


class KmsResponseInvalidError(KmsError):
    """The KMS, or something in between, answered with what cannot be a right answer."""

    summary = "the answer is not valid"
    default_hint = "Check that the configuration points to the right KMS, and proxies in between."
