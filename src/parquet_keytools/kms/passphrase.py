"""A keystore's passphrase, and files that only their owner may read.

Such a file is replaced in one step, by one writer at a time. On Windows, permissions are not checked, because
Python does not report access lists there.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from parquet_keytools.errors import KmsConfigurationError, KmsUnavailableError
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes

PassphraseSource = Callable[[], SecretBytes]
"""Returns the passphrase each time that it is needed, so that no object keeps it."""

_MAX_PASSPHRASE_LENGTH = 4096
"""In bytes."""

_LOCK_TIMEOUT_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.02


def passphrase_source(
    text: SecretStr | None, file: Path | None, folder: Path, *, what: str = "passphrase", backend: str = "keystore"
) -> PassphraseSource:
    """Return the source of a passphrase, or another secret, that a setting holds, or else a file in a folder."""
    if text is not None:
        return lambda: passphrase_from_text(text.get_secret_value(), what=what, backend=backend)
    return partial(passphrase_from_file, folder / expanded(file or ""), what=what, backend=backend)


def passphrase_from_text(text: str, *, what: str = "passphrase", backend: str = "keystore") -> SecretBytes:
    """Return the passphrase, or another secret, in a text: its bytes in UTF-8."""
    passphrase = b""
    # Not raised within a handler: the exception in the context would contain the text.
    with suppress(UnicodeEncodeError):
        # Bytes of an environment variable that are not UTF-8 are surrogates in Python: encode them as bytes.
        passphrase = text.encode("utf-8", "surrogateescape")
    return _checked_passphrase(passphrase, f"the {what}", backend)


def passphrase_from_file(path: Path, *, what: str = "passphrase", backend: str = "keystore") -> SecretBytes:
    """Return the passphrase, or another secret, in a file: its bytes, without a final newline.

    Raises:
        KmsConfigurationError: The file is missing, empty, or readable for other users.
        KmsUnavailableError: The file system failed.
    """
    content, _ = read_private_file(path, max_length=_MAX_PASSPHRASE_LENGTH + 1, backend=backend)
    if not operating_system.POSIX:
        # Editors on Windows end lines like this.
        content = content.removesuffix(b"\r\n")
    return _checked_passphrase(content.removesuffix(b"\n"), f"the {what} in {path}", backend)


def _checked_passphrase(passphrase: bytes, what: str, backend: str) -> SecretBytes:
    if not passphrase or len(passphrase) > _MAX_PASSPHRASE_LENGTH:
        detail = f"{what} is empty, longer than {_MAX_PASSPHRASE_LENGTH} bytes, or not text"
        raise KmsConfigurationError(detail, backend=backend, operation="connect")
    return SecretBytes(passphrase)


# --- private files ---


FileIdentity = tuple[int, ...]
"""Differs after each replacement of a file."""


def identity(path: Path) -> FileIdentity | None:
    """Return the identity of a file, or None if it cannot be inspected."""
    try:
        return _identity(path.stat())
    except OSError:
        return None


def read_private_file(
    path: Path, *, max_length: int, hint_if_missing: str = "", backend: str = "keystore"
) -> tuple[bytes, FileIdentity]:
    """Return the bytes of a file that only its owner may read (not checked on Windows), at most `max_length`.

    Raises `KmsUnavailableError` if the file system failed, and `KmsConfigurationError` for another file.
    """
    detail = hint = ""
    try:
        # Opening a named pipe does not wait for its writer.
        with open(path, "rb", opener=partial(operating_system.open_file, follow_link=True)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                detail = f"{path} is not a regular file"
            elif operating_system.permissions(status, 0o077):
                detail = f"others than its owner may read or write {path}"
                hint = f"Run: chmod 600 {str(path)!r}"
            elif len(content := file.read(max_length + 1)) > max_length:
                detail = f"{path} is longer than {max_length} bytes"
            else:
                return content, _identity(status)
    except FileNotFoundError:
        detail, hint = f"there is no file {path}", hint_if_missing
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        detail = f"{path} cannot be opened ({error.strerror})"
    except OSError as error:
        detail = f"{path}: {error.strerror}"
        raise KmsUnavailableError(detail, backend=backend, operation="connect", hint="Try again.") from None
    raise KmsConfigurationError(detail, backend=backend, operation="connect", hint=hint)


def replace_private_file(path: Path, content: bytes) -> None:
    """Replace a file, or create it. A crash at any point leaves the old or the new content.

    The caller holds `exclusive_lock`.
    """
    new = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        new.unlink()  # left by a crash
    descriptor = operating_system.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow_link=False)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Kept, so that root can rotate a service's keystore.
            with suppress(FileNotFoundError, PermissionError):
                owner = path.stat()
                operating_system.change_owner(descriptor, owner.st_uid, owner.st_gid)
            file.write(content)
            file.flush()
            operating_system.sync(descriptor)
        _put_in_place(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    folder = operating_system.open_folder(path.parent)
    if folder is not None:
        try:
            operating_system.sync(folder)  # without this, the new name might not survive a loss of power
        finally:
            os.close(folder)


_TRIES_ON_WINDOWS = 100


def _put_in_place(new: Path, path: Path) -> None:
    """Rename a file over another one; Windows does not replace a file while a reader has it open for a moment."""
    for left in reversed(range(1 if operating_system.POSIX else _TRIES_ON_WINDOWS)):
        try:
            new.replace(path)
        except PermissionError:
            if not left:
                raise
            time.sleep(0.02)
        else:
            return


@contextmanager
def exclusive_lock(path: Path, *, timeout_seconds: float = _LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """Hold a lock against all other processes and threads; raise `TimeoutError` if others hold it for too long.

    The lock is on a file of its own beside `path`, because `path` itself is replaced by another file.
    """
    lock = path.with_name(f".{path.name}.lock")
    if not operating_system.POSIX:
        with operating_system.locked_path(lock, timeout_seconds):
            yield
        return
    descriptor = operating_system.open_file(lock, os.O_RDWR | os.O_CREAT, follow_link=False)
    try:
        deadline = time.monotonic() + timeout_seconds
        while not operating_system.try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {lock} for {timeout_seconds:g} seconds")
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> FileIdentity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
