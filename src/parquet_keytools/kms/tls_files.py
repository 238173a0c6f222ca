"""The files that TLS needs, looked at before the first connection.

A wrong one would make the KMS look as if it could not be reached, and for the passphrase of a private key OpenSSL
would ask a terminal.
"""

from __future__ import annotations

import ssl

from parquet_keytools.errors import KmsConfigurationError


def check_certificates(file: str, *, backend: str) -> None:
    """Check a file of the certificates that vouch for a server.

    Raises:
        KmsConfigurationError: It cannot be read, or has no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except OSError as error:
        raise _mistake(f"{file} cannot be used as certificates", error, backend) from None


def check_client_certificate(file: str, key_file: str | None, *, backend: str) -> None:
    """Check a client certificate and its private key, which may be in the same file.

    Raises:
        KmsConfigurationError: They cannot be read, do not belong together, or the key needs a passphrase.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(file, key_file, password="")
    except OSError as error:
        what = file if key_file is None else f"{file} with {key_file}"
        hint = "It takes a certificate and its private key, both PEM, the key without a passphrase."
        raise _mistake(f"{what} cannot be used as a client certificate", error, backend, hint) from None


def _mistake(detail: str, error: OSError, backend: str, hint: str = "") -> KmsConfigurationError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return KmsConfigurationError(
        f"{detail} ({reason or type(error).__name__})", backend=backend, operation="connect", hint=hint
    )
