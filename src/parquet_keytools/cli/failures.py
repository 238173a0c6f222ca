"""The text of an error, for people and programs."""

from __future__ import annotations

from parquet_keytools.cli.exit_status import ExitStatus
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    DecryptionError,
    IncompleteDataSetError,
    KmsConfigurationError,
    KmsError,
    NoParquetFilesError,
    ReusedKeysError,
    TableMismatchError,
)


def status_of(error: Exception) -> ExitStatus:
    """Return the exit status of a command that ends with this error.

    Args:
        error: A `KeytoolsError`, an `OSError` or a `UnicodeEncodeError`.
    """
    match error:
        case KmsConfigurationError():
            return ExitStatus.WRONG_USAGE
        case KmsError():
            return ExitStatus.KMS_FAILED
        case DecryptionError() | IncompleteDataSetError() | NoParquetFilesError() | TableMismatchError():
            return ExitStatus.NO
        case ReusedKeysError():
            return ExitStatus.NO
        case ColumnAccessDeniedError():
            return max(map(status_of, error.causes), default=ExitStatus.NO)
        case _:
            return ExitStatus.WRONG_USAGE


def error_text(error: Exception) -> str:
    """Return the one text that says what happened."""
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror.removesuffix('.')}."
    if isinstance(error, UnicodeEncodeError):
        # Bytes of an argument or a file name that are not UTF-8 are kept by Python as lone surrogates.
        return f"{error.object.encode(errors='backslashreplace').decode()}: this name or text is not valid UTF-8."
    return str(error) or type(error).__name__
