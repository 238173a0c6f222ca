"""What the errors of AWS KMS, and those of its SDK, mean.

Only codes that are listed here get into our errors, never a text of the SDK: that may hold what was sent.
"""

from __future__ import annotations

import re
import ssl
from typing import Any, NamedTuple

from botocore import exceptions as sdk
from botocore.exceptions import ClientError

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.contract import CallFacts
from parquet_keytools.kms.transport import retry_after_seconds, tls_error, unreachable_because

_CREDENTIALS_HINT = (
    "Check the AWS credentials of this process: `aws sts get-caller-identity` says whose they are and whether "
    "they are valid."
)
_CLOCK_HINT = "Check this machine's clock, then the AWS credentials of this process."
_GRANT_HINT = (
    "Ask for the permission in the key's policy or in IAM. AWS says the same of a key of another account that "
    "does not exist."
)
_CONTEXT_HINT = (
    "AWS does not say which: check that `encryption_context` is the one the file was written with, then restore "
    "the file if it was altered."
)
_OTHER_KEY_HINT = (
    "If an alias was moved to another key since the file was written, name the key by its ARN under `master_keys`."
)
_KEY_USAGE_HINT = "Choose a symmetric key for encryption: KeySpec SYMMETRIC_DEFAULT, KeyUsage ENCRYPT_DECRYPT."


class _Meaning(NamedTuple):
    kind: type[KmsError]
    detail: str = ""
    hint: str | None = None


_EXPIRED = _Meaning(KmsConfigurationError, "the AWS credentials have expired", _CREDENTIALS_HINT)
_UNKNOWN = _Meaning(KmsConfigurationError, "AWS does not know these credentials", _CREDENTIALS_HINT)
_BAD_SIGNATURE = _Meaning(KmsConfigurationError, "AWS does not accept the signature of the request", _CLOCK_HINT)
_NO_CREDENTIALS = _Meaning(KmsConfigurationError, "there are no usable AWS credentials", _CREDENTIALS_HINT)
_NOT_FOUND = _Meaning(MasterKeyNotFoundError)
_UNAVAILABLE = _Meaning(KmsUnavailableError)
_THROTTLED = _Meaning(KmsThrottledError)
_KEY_STORE = _Meaning(KmsUnavailableError, "the master key's own key store cannot be reached")

# Credentials that are wrong say nothing about the right to use a key. As "access denied" they would let a reader
# that hides denied columns return less than it should.
_MEANINGS = {
    "AccessDeniedException": _Meaning(KmsAccessDeniedError, "", _GRANT_HINT),
    "AccessDenied": _Meaning(KmsAccessDeniedError, "", _GRANT_HINT),
    "InvalidGrantTokenException": _Meaning(KmsAccessDeniedError, "a grant token is not valid"),
    "NotFoundException": _NOT_FOUND,
    "InvalidArnException": _Meaning(MasterKeyNotFoundError, "its ARN is not valid"),
    "InvalidAliasNameException": _Meaning(MasterKeyNotFoundError, "its alias is not valid"),
    "DisabledException": _Meaning(MasterKeyDisabledError),
    "InvalidCiphertextException": _Meaning(
        WrappedKeyInvalidError, "it was altered, or the encryption context is another one", _CONTEXT_HINT
    ),
    "IncorrectKeyException": _Meaning(WrappedKeyInvalidError, "another master key wrapped it", _OTHER_KEY_HINT),
    "InvalidKeyUsageException": _Meaning(
        KmsConfigurationError, "the master key is not one that wraps", _KEY_USAGE_HINT
    ),
    "UnsupportedOperationException": _Meaning(
        KmsConfigurationError, "the master key does not support this", _KEY_USAGE_HINT
    ),
    "ValidationException": _Meaning(
        KmsConfigurationError,
        "AWS does not accept the form of the request",
        "Check the identifier of the master key, and `encryption_context`.",
    ),
    "DryRunOperationException": _Meaning(KmsResponseInvalidError, "it answered as if only a trial was asked for"),
    # The key, or what is behind it, cannot be reached.
    "KeyUnavailableException": _Meaning(KmsUnavailableError, "the master key is not available now"),
    "DependencyTimeoutException": _Meaning(KmsUnavailableError, "it timed out within AWS"),
    "KMSInternalException": _UNAVAILABLE,
    "InternalFailure": _UNAVAILABLE,
    "InternalServiceError": _UNAVAILABLE,
    "ServiceUnavailable": _UNAVAILABLE,
    "ServiceUnavailableException": _UNAVAILABLE,
    "RequestTimeout": _UNAVAILABLE,
    "RequestTimeoutException": _UNAVAILABLE,
    "IDPCommunicationError": _UNAVAILABLE,
    "CloudHsmClusterNotActiveException": _KEY_STORE,
    "CustomKeyStoreInvalidStateException": _KEY_STORE,
    "XksProxyUriUnreachableException": _KEY_STORE,
    "XksProxyInvalidResponseException": _KEY_STORE,
    "XksProxyVpcEndpointServiceNotFoundException": _KEY_STORE,
    "XksProxyIncorrectAuthenticationCredentialException": _Meaning(
        KmsConfigurationError, "the external key store does not accept AWS's credentials"
    ),
    "XksProxyInvalidConfigurationException": _Meaning(
        KmsConfigurationError, "the external key store is configured wrongly"
    ),
    "XksKeyInvalidConfigurationException": _Meaning(
        KmsConfigurationError, "the key in the external key store is configured wrongly"
    ),
    "XksKeyNotFoundException": _Meaning(MasterKeyNotFoundError, "the external key store does not have it"),
    # Too many calls.
    "ThrottlingException": _THROTTLED,
    "Throttling": _THROTTLED,
    "ThrottledException": _THROTTLED,
    "RequestThrottled": _THROTTLED,
    "RequestThrottledException": _THROTTLED,
    "RequestLimitExceeded": _THROTTLED,
    "LimitExceededException": _THROTTLED,
    "TooManyRequestsException": _THROTTLED,
    # Who we are.
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _BAD_SIGNATURE,
    "RequestTimeTooSkewed": _BAD_SIGNATURE,
    "SignatureDoesNotMatch": _BAD_SIGNATURE,
    "InvalidSignatureException": _BAD_SIGNATURE,
    "IncompleteSignature": _BAD_SIGNATURE,
    "UnrecognizedClientException": _UNKNOWN,
    "InvalidClientTokenId": _UNKNOWN,
    "InvalidAccessKeyId": _UNKNOWN,
    "AuthFailure": _UNKNOWN,
    "OptInRequired": _UNKNOWN,
    "MissingAuthenticationToken": _NO_CREDENTIALS,
    "MissingAuthenticationTokenException": _NO_CREDENTIALS,
}

EXPIRED_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
"""Codes after which new credentials may help."""

_STATES = {
    # What KMSInvalidStateException says in its text -> what it means.
    "pending deletion": _Meaning(
        MasterKeyDisabledError,
        "it waits for its deletion",
        "Cancel the deletion in the KMS at once: after it, what it protects is lost.",
    ),
    "pending replica deletion": _Meaning(
        MasterKeyDisabledError, "it waits for the deletion of its replicas", "Cancel the deletion in the KMS."
    ),
    "pending import": _Meaning(
        MasterKeyDisabledError, "its key material is not imported", "Import the same key material again."
    ),
    "creating": _Meaning(KmsUnavailableError, "the master key is being made"),
    "updating": _Meaning(KmsUnavailableError, "the master key is being updated"),
    "unavailable": _Meaning(
        MasterKeyDisabledError, "its key store is not connected", "Connect the custom key store in AWS KMS."
    ),
    "disabled": _Meaning(MasterKeyDisabledError),
}

_NAME_OF_KEY = re.compile(r"(arn:|alias/)\S+")
"""An alias may have any word in it, that of a state included."""

_SDK_MEANINGS: list[tuple[tuple[type[Exception], ...], _Meaning]] = [
    ((sdk.ConnectTimeoutError, sdk.ReadTimeoutError), _Meaning(KmsUnavailableError, "no answer in time")),
    (
        (sdk.ConnectionError, sdk.HTTPClientError, sdk.ResponseStreamingError, sdk.MetadataRetrievalError),
        _UNAVAILABLE,
    ),
    (
        (sdk.NoRegionError, sdk.InvalidRegionError),
        _Meaning(KmsConfigurationError, "the region is not known", "Set `region`, or AWS_REGION."),
    ),
    ((sdk.ProfileNotFound,), _Meaning(KmsConfigurationError, "there is no such profile", "Check `profile`.")),
    (
        (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError, sdk.SSOError),
        _NO_CREDENTIALS,
    ),
    ((sdk.TokenRetrievalError, sdk.NoAuthTokenError, sdk.RefreshWithMFAUnsupportedError), _NO_CREDENTIALS),
    (
        (sdk.ParamValidationError,),
        _Meaning(
            KmsConfigurationError,
            "the SDK does not accept the request",
            "Check the identifier of the master key, and `encryption_context`.",
        ),
    ),
    ((sdk.BotoCoreError,), _Meaning(KmsConfigurationError)),
]


def code_of(error: ClientError) -> str:
    """Return the code of an error if it is one that is known here; else nothing of it may be shown."""
    code = error.response.get("Error", {}).get("Code")
    if not isinstance(code, str):
        return ""
    # Some answers have a namespace before it, or a URL behind it.
    code = code.rpartition("#")[2].partition(":")[0]
    return code if code in _MEANINGS or code == "KMSInvalidStateException" else ""


def aws_error(
    error: Exception, operation: str, master_key_id: str | None, hint_for_missing_key: str | None = None
) -> KmsError | None:
    """Return the `KmsError` that stands for an exception of the SDK, or None if it is none of those."""
    meaning: _Meaning | None
    if isinstance(error, ClientError):
        meaning, source = _meaning_of_answer(error)
    else:
        meaning, source = _meaning_in_sdk(error), type(error).__name__
    if meaning is None:
        return None
    hint = meaning.hint
    if meaning.kind is MasterKeyNotFoundError and hint_for_missing_key:
        hint = hint_for_missing_key
    if meaning.kind is KmsConfigurationError and hint is None:
        hint = "Check the configuration of AWS on this machine."
    known = meaning.detail or (unreachable_because(error) if meaning.kind is KmsUnavailableError else "")
    detail = f"{known} ({source})" if known else source
    return CallFacts("aws", operation, master_key_id).error(meaning.kind, detail, hint, _retry_after(error))


def _meaning_of_answer(error: ClientError) -> tuple[_Meaning, str]:
    code = code_of(error)
    status = _metadata(error).get("HTTPStatusCode")
    role = " of sts:AssumeRole" if error.operation_name == "AssumeRole" else ""
    if code == "KMSInvalidStateException":
        return _meaning_of_state(error), code
    if code:
        meaning = _MEANINGS[code]
        if role and meaning.kind is KmsAccessDeniedError:
            # Not the master key is denied, but the role.
            meaning = _Meaning(
                KmsConfigurationError, "the role may not be assumed", "Check `assume_role` and its trust policy."
            )
        return meaning, code + role
    source = f"HTTP status {status}{role}" if isinstance(status, int) else f"an unknown error{role}"
    if isinstance(status, int) and status >= 500:
        return _UNAVAILABLE, source
    if status == 429:
        return _THROTTLED, source
    if isinstance(status, int) and 300 <= status < 400:
        return _Meaning(KmsResponseInvalidError, "a redirect, which is not followed"), source
    return _Meaning(KmsResponseInvalidError), source


def _meaning_of_state(error: ClientError) -> _Meaning:
    text = _NAME_OF_KEY.sub("", str(error.response.get("Error", {}).get("Message", ""))).lower()
    found = [meaning for state, meaning in _STATES.items() if state in text]
    return found[0] if found else _Meaning(MasterKeyDisabledError, "its state does not allow this")


def _meaning_in_sdk(error: Exception) -> _Meaning | None:
    if isinstance(error, sdk.SSLError) and isinstance(tls_error(error), ssl.SSLCertVerificationError):
        return _Meaning(
            KmsConfigurationError,
            "the server's certificate is not trusted",
            "Check `endpoint_url`; set `ca_bundle` if its certificates are your own.",
        )
    if type(error) is sdk.HTTPClientError and isinstance(
        error.kwargs.get("error"), (TypeError, ValueError, LookupError)
    ):
        # The SDK stumbled over an answer, such as a redirect with status 303.
        return _Meaning(KmsResponseInvalidError, "the SDK cannot read it")
    return next((meaning for kinds, meaning in _SDK_MEANINGS if isinstance(error, kinds)), None)


def _metadata(error: ClientError) -> dict[str, Any]:
    return dict(error.response.get("ResponseMetadata") or {})


def _retry_after(error: Exception) -> float:
    if not isinstance(error, ClientError):
        return 0.0
    return retry_after_seconds((_metadata(error).get("HTTPHeaders") or {}).get("retry-after"))
