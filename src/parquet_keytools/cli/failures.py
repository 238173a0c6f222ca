"""What an error means for whoever gave a command: an exit status, and one text."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses; those above 128 are what shells say of a process that a signal has ended."""

    DONE = 0
    NO = 1
    WRONG_USAGE = 2
    KMS_FAILED = 3
    INTERRUPTED = 130
    NOBODY_READS = 141
    TERMINATED = 143


def status_of(error: Exception) -> ExitStatus:
    """Return the exit status of a command that ends with this error."""
    from parquet_keytools import errors

    match error:
        case errors.KmsConfigurationError():
            return ExitStatus.WRONG_USAGE
        case errors.KmsError():
            return ExitStatus.KMS_FAILED
        case errors.DecryptionError() | errors.TableMismatchError():
            return ExitStatus.NO
        case errors.IncompleteDataSetError() | errors.NoParquetFilesError() | errors.ReusedKeysError():
            return ExitStatus.NO
        case errors.ColumnAccessDeniedError():
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
