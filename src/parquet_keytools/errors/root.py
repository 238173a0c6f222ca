"""The root of all errors, and the errors of a configuration and of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

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
