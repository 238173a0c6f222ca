"""What an error of a file or of the KMS is as an answer."""

from __future__ import annotations

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    FileChangedError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.serve.requests_and_answers import RefusedRequestError


def refusal_of(error: Exception) -> RefusedRequestError:
    """Return how an error is answered; errors of ours hold no secrets, others are not quoted."""
    match error:
        case RefusedRequestError():
            return error
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return RefusedRequestError(404, "NoSuchKey", "There is no such file.")
        case FileChangedError():
            return RefusedRequestError(412, "PreconditionFailed", str(error))
        case KmsUnavailableError() | KmsThrottledError():
            return RefusedRequestError(503, "ServiceUnavailable", str(error), {"Retry-After": "5"})
        case ColumnAccessDeniedError() | KmsAccessDeniedError():
            return RefusedRequestError(403, "AccessDenied", str(error))
        case PermissionError():
            return RefusedRequestError(403, "AccessDenied", "The server may not read this.")
        case KmsError():
            return RefusedRequestError(502, "InternalError", str(error))
        case KeytoolsError():
            # No status of 500 and more: engines would try the same again, for minutes.
            return RefusedRequestError(422, "InvalidObjectState", str(error))
        case OSError():
            return RefusedRequestError(502, "InternalError", f"The storage failed: {type(error).__name__}.")
        case _:
            return RefusedRequestError(500, "InternalError", f"The server failed: {type(error).__name__}.")


def logged_outcome(error: BaseException | None) -> tuple[str, str]:
    """Return what the log says of an error: its kind, and what was wrong; texts of others may hold secrets."""
    match error:
        case None:
            return "ok", ""
        case RefusedRequestError():
            return error.code, str(error)
        case KeytoolsError():
            return type(error).__name__, str(error)
        case _:
            return type(error).__name__, ""
