"""Turns errors of AWS KMS and its SDK into errors of this package.

Only the codes listed here appear in errors, never a text of the SDK, which may contain the request.
"""

from __future__ import annotations

import re
from typing import Any

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
from parquet_keytools.kms.contract import Meaning
from parquet_keytools.kms.transport import retry_after_seconds, tls_failure, unreachable_because

_CREDENTIALS_HINT = (
    "Check the AWS credentials of this process: `aws sts get-caller-identity` prints their owner, and whether "
    "they are valid."
)
_CLOCK_HINT = "Check this machine's clock, then the AWS credentials of this process."
_GRANT_HINT = (
    "Request the permission in the key's policy or in IAM. AWS gives the same error for a key that does not exist "
    "in another account."
)
_CONTEXT_HINT = (
    "AWS does not say which: check that the file was written with this `encryption_context`, then restore the "
    "file if it was altered."
)
_OTHER_KEY_HINT = (
    "If an alias was moved to another key since the file was written, name the key by its ARN under `master_keys`."
)
_KEY_USAGE_HINT = "Choose a symmetric key for encryption: KeySpec SYMMETRIC_DEFAULT, KeyUsage ENCRYPT_DECRYPT."


# Invalid credentials do not mean that the master key is denied: with "access denied", a reader that hides denied
# columns would silently return fewer columns.
_EXPIRED = Meaning(KmsConfigurationError, "the AWS credentials have expired", _CREDENTIALS_HINT)
_BAD_SIGNATURE = Meaning(KmsConfigurationError, "AWS does not accept the signature of the request", _CLOCK_HINT)
_NO_CREDENTIALS = Meaning(KmsConfigurationError, "there are no usable AWS credentials", _CREDENTIALS_HINT)
_UNAVAILABLE = Meaning(KmsUnavailableError)
_THROTTLED = Meaning(KmsThrottledError)
_REQUEST_HINT = "Check the identifier of the master key, and `encryption_context`."

_CODES = {
    Meaning(KmsAccessDeniedError, "", _GRANT_HINT): "AccessDeniedException AccessDenied",
    Meaning(KmsAccessDeniedError, "a grant token is not valid"): "InvalidGrantTokenException",
    Meaning(MasterKeyNotFoundError): "NotFoundException",
    Meaning(MasterKeyNotFoundError, "its ARN is not valid"): "InvalidArnException",
    Meaning(MasterKeyNotFoundError, "its alias is not valid"): "InvalidAliasNameException",
    Meaning(MasterKeyNotFoundError, "the external key store does not have it"): "XksKeyNotFoundException",
    Meaning(MasterKeyDisabledError): "DisabledException",
    Meaning(
        WrappedKeyInvalidError, "it was altered, or the encryption context is another one", _CONTEXT_HINT
    ): "InvalidCiphertextException",
    Meaning(WrappedKeyInvalidError, "another master key wrapped it", _OTHER_KEY_HINT): "IncorrectKeyException",
    Meaning(KmsConfigurationError, "the master key cannot wrap", _KEY_USAGE_HINT): "InvalidKeyUsageException",
    Meaning(
        KmsConfigurationError, "the master key does not support this", _KEY_USAGE_HINT
    ): "UnsupportedOperationException",
    Meaning(
        KmsConfigurationError, "AWS does not accept the form of the request", _REQUEST_HINT
    ): "ValidationException",
    Meaning(KmsResponseInvalidError, "it answered as if to a dry run"): "DryRunOperationException",
    Meaning(KmsUnavailableError, "the master key is not available now"): "KeyUnavailableException",
    Meaning(KmsUnavailableError, "it timed out within AWS"): "DependencyTimeoutException",
    Meaning(
        KmsUnavailableError, "the master key's own key store cannot be reached"
    ): "CloudHsmClusterNotActiveException CustomKeyStoreInvalidStateException XksProxyUriUnreachableException "
    "XksProxyInvalidResponseException XksProxyVpcEndpointServiceNotFoundException",
    Meaning(
        KmsConfigurationError, "the external key store does not accept AWS's credentials"
    ): "XksProxyIncorrectAuthenticationCredentialException",
    Meaning(
        KmsConfigurationError, "the external key store is configured wrongly"
    ): "XksProxyInvalidConfigurationException",
    Meaning(
        KmsConfigurationError, "the key in the external key store is configured wrongly"
    ): "XksKeyInvalidConfigurationException",
    _UNAVAILABLE: "KMSInternalException InternalFailure InternalServiceError ServiceUnavailable "
    "ServiceUnavailableException RequestTimeout RequestTimeoutException IDPCommunicationError",
    _THROTTLED: "ThrottlingException Throttling ThrottledException RequestThrottled RequestThrottledException "
    "RequestLimitExceeded LimitExceededException TooManyRequestsException",
    _EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired",
    _BAD_SIGNATURE: "RequestExpired RequestTimeTooSkewed SignatureDoesNotMatch InvalidSignatureException "
    "IncompleteSignature",
    Meaning(
        KmsConfigurationError, "AWS does not know these credentials", _CREDENTIALS_HINT
    ): "UnrecognizedClientException InvalidClientTokenId InvalidAccessKeyId AuthFailure OptInRequired",
    _NO_CREDENTIALS: "MissingAuthenticationToken MissingAuthenticationTokenException",
}
_MEANINGS = {code: meaning for meaning, codes in _CODES.items() for code in codes.split()}

EXPIRED_CREDENTIALS = frozenset(_CODES[_EXPIRED].split())
"""Codes that new credentials may resolve."""

_STATES = {
    # Text of a KMSInvalidStateException -> its meaning.
    "pending deletion": Meaning(
        MasterKeyDisabledError,
        "it is pending deletion",
        "Cancel the deletion in the KMS at once: after it, the data under this key is lost.",
    ),
    "pending replica deletion": Meaning(
        MasterKeyDisabledError, "it is pending the deletion of its replicas", "Cancel the deletion in the KMS."
    ),
    "pending import": Meaning(
        MasterKeyDisabledError, "its key material is not imported", "Import the same key material again."
    ),
    "creating": Meaning(KmsUnavailableError, "the master key is being created"),
    "updating": Meaning(KmsUnavailableError, "the master key is being updated"),
    "unavailable": Meaning(
        MasterKeyDisabledError, "its key store is not connected", "Connect the custom key store in AWS KMS."
    ),
    "disabled": Meaning(MasterKeyDisabledError),
}

_NAME_OF_KEY = re.compile(r"(arn:|alias/)\S+")
"""An alias may contain any word, also the name of a state."""

_SDK_MEANINGS: list[tuple[Meaning, tuple[type[Exception], ...]]] = [
    (
        Meaning(KmsUnavailableError, "it did not answer in time"),
        (sdk.ConnectTimeoutError, sdk.ReadTimeoutError),
    ),
    (
        _UNAVAILABLE,
        (sdk.ConnectionError, sdk.HTTPClientError, sdk.ResponseStreamingError, sdk.MetadataRetrievalError),
    ),
    (
        Meaning(KmsConfigurationError, "the region is not known", "Set `region`, or AWS_REGION."),
        (sdk.NoRegionError, sdk.InvalidRegionError),
    ),
    (Meaning(KmsConfigurationError, "there is no such profile", "Check `profile`."), (sdk.ProfileNotFound,)),
    (
        _NO_CREDENTIALS,
        (
            *(sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError, sdk.SSOError),
            *(sdk.TokenRetrievalError, sdk.NoAuthTokenError, sdk.RefreshWithMFAUnsupportedError),
        ),
    ),
    (
        Meaning(KmsConfigurationError, "the SDK does not accept the request", _REQUEST_HINT),
        (sdk.ParamValidationError,),
    ),
    (Meaning(KmsConfigurationError), (sdk.BotoCoreError,)),
]


def code_of(error: ClientError) -> str:
    """Return the code of an error if it is listed here; other codes must not be shown."""
    code = error.response.get("Error", {}).get("Code")
    if not isinstance(code, str):
        return ""
    # Some answers have a namespace before the code, or a URL after it.
    code = code.rpartition("#")[2].partition(":")[0]
    return code if code in _MEANINGS or code == "KMSInvalidStateException" else ""


def aws_error(error: Exception, hint_for_missing_key: str | None = None) -> KmsError | None:
    """Return the `KmsError` that replaces an exception of the SDK, or None for any other exception."""
    meaning: Meaning | None
    if isinstance(error, ClientError):
        meaning, source = _meaning_of_answer(error)
    else:
        meaning, source = _meaning_in_sdk(error), type(error).__name__
    if meaning is None:
        return None
    kind, known, hint = meaning
    if kind is MasterKeyNotFoundError and hint_for_missing_key:
        hint = hint_for_missing_key
    if kind is KmsConfigurationError and hint is None:
        hint = "Check the configuration of AWS on this machine."
    if kind is KmsUnavailableError and not known:
        known = unreachable_because(error)
    return Meaning(kind, f"{known} ({source})" if known else source, hint).error(_retry_after(error))


def _meaning_of_answer(error: ClientError) -> tuple[Meaning, str]:
    code = code_of(error)
    status = _metadata(error).get("HTTPStatusCode")
    role = " of sts:AssumeRole" if error.operation_name == "AssumeRole" else ""
    if code == "KMSInvalidStateException":
        return _meaning_of_state(error), code
    if code:
        meaning = _MEANINGS[code]
        if role and meaning.kind is KmsAccessDeniedError:
            # Not the master key is denied, but the role.
            meaning = Meaning(
                KmsConfigurationError, "the role may not be assumed", "Check `assume_role` and its trust policy."
            )
        return meaning, code + role
    source = f"HTTP status {status}{role}" if isinstance(status, int) else f"an unknown error{role}"
    if isinstance(status, int) and status >= 500:
        return _UNAVAILABLE, source
    if status == 429:
        return _THROTTLED, source
    if isinstance(status, int) and 300 <= status < 400:
        return Meaning(KmsResponseInvalidError, "a redirect, which is not followed"), source
    return Meaning(KmsResponseInvalidError), source


def _meaning_of_state(error: ClientError) -> Meaning:
    text = _NAME_OF_KEY.sub("", str(error.response.get("Error", {}).get("Message", ""))).lower()
    found = [meaning for state, meaning in _STATES.items() if state in text]
    return found[0] if found else Meaning(MasterKeyDisabledError, "its state does not allow this")


def _meaning_in_sdk(error: Exception) -> Meaning | None:
    if isinstance(error, sdk.SSLError) and (found := tls_failure(error, "endpoint_url", "ca_bundle")):
        return found
    if type(error) is sdk.HTTPClientError and isinstance(
        error.kwargs.get("error"), (TypeError, ValueError, LookupError)
    ):
        # The SDK failed to parse an answer, such as a redirect with status 303.
        return Meaning(KmsResponseInvalidError, "the SDK cannot read it")
    return next((meaning for meaning, kinds in _SDK_MEANINGS if isinstance(error, kinds)), None)


def _metadata(error: ClientError) -> dict[str, Any]:
    return dict(error.response.get("ResponseMetadata") or {})


def _retry_after(error: Exception) -> float:
    if not isinstance(error, ClientError):
        return 0.0
    return retry_after_seconds((_metadata(error).get("HTTPHeaders") or {}).get("retry-after"))
