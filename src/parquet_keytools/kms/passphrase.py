"""The passphrase of a keystore: from a text or from a file of its own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.private_file import read_private_file
from parquet_keytools.secret_bytes import SecretBytes

_MAX_LENGTH_BYTES = 4096


def passphrase_from_text(text: str) -> SecretBytes:
    """Return the passphrase that a text stands for: its bytes in UTF-8.

    Raises:
        KmsConfigurationError: The text is empty, too long, or no text at all.
    """
    passphrase = b""
    # Not raised from within a handler: an exception in its context would carry the text along.
    with suppress(UnicodeEncodeError):
        # An environment variable that is not UTF-8 has its bytes as surrogates: they become bytes again.
        passphrase = text.encode("utf-8", "surrogateescape")
    return _checked(passphrase, "the passphrase")


def passphrase_from_file(path: Path) -> SecretBytes:
    """Return the passphrase in a file: its bytes, without one newline at the end.

    Raises:
        KmsConfigurationError: There is no such file, others than its owner may read it, or it is empty.
        KmsUnavailableError: The file system failed.
    """
    content, _ = read_private_file(path, backend="keystore", max_length=_MAX_LENGTH_BYTES + 1)
    return _checked(content.removesuffix(b"\n"), f"the passphrase in {path}")


def _checked(passphrase: bytes, what: str) -> SecretBytes:
    if not passphrase or len(passphrase) > _MAX_LENGTH_BYTES:
        detail = f"{what} is empty, longer than {_MAX_LENGTH_BYTES} bytes, or not text"
        raise KmsConfigurationError(detail, backend="keystore", operation="connect")
    return SecretBytes(passphrase)
