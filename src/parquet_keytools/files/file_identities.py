"""Which files were opened with which data key and file unique: no two files may have the same ones.

They are the same where pyarrow's encryption properties served two files, and where a file is a copy of another.
Modules can be moved between such files, and nothing detects that (spec 4.4.1). A file unique has 8 random bytes:
by chance two of 100,000 files share one with a probability of 1 in 3 billion, and never the data key too.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections import OrderedDict
from typing import Any

from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import KeytoolsError, ReusedKeysError
from parquet_keytools.files.opened_file import OpenedFile, VerifiedTail
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.runtime.presentation import levels_inside
from parquet_keytools.runtime.worker_processes import StaysInParent
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source

MOST_REMEMBERED = 100_000
"""How many files are remembered; the one that was opened first is forgotten first."""

REMEDY = "Remove copies, and give the others keys of their own: `parquet-keytools rekey FOLDER --in-place`."


class KnownFiles(StaysInParent):
    """Digest of data key and file unique -> the file that has them; of all worker processes together."""

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, FileLocation] = OrderedDict()
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another program has opened other files.
        return KnownFiles, ()

    def remember(self, digest: bytes, location: FileLocation, *, first_stays: bool) -> FileLocation | None:
        """Remember a file; return the one that was remembered with this digest before."""
        with self._lock:
            found = self._files.pop(digest, None)
            self._files[digest] = found if found is not None and first_stays else location
            if len(self._files) > MOST_REMEMBERED:
                self._files.popitem(last=False)
        return found

    def forget(self, digest: bytes) -> None:
        """Forget the file that is remembered with a digest."""
        with self._lock:
            self._files.pop(digest, None)


class FileIdentities:
    """Remembers the files of one folder, or all that one process opened. May be used by any number of threads.

    In worker processes it remembers those of all of them.

    Args:
        refuses: Whether a file with keys of another one is refused, as in a folder; else there is a warning.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        # What is remembered of a data key is no hash that anybody else could make.
        self._salt = secrets.token_bytes(16)
        self._known = KnownFiles()

    def compare(self, opened: OpenedFile) -> None:
        """Remember a file; refuse it, or warn, if it shares data key and file unique with another one.

        There is no warning of a file that was moved or replaced since, nor of the same bytes elsewhere, as in a
        backup: there is nothing to be exchanged.

        Raises:
            ReusedKeysError: It does, and is refused.
        """
        if not opened.is_encrypted:
            return
        envelope = opened.footer.envelope
        file_unique = envelope.aad_file_unique or b""
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        other = self.other(opened.location, dek, file_unique)
        if other is None:
            return
        if self._refuses and not _is_there(other, file_unique):
            # It was moved here, or replaced there: a view lives longer than files keep their names.
            self.forget(dek, file_unique)
            self.other(opened.location, dek, file_unique)
            return
        if not (self._refuses or _differs(other, opened)):
            return
        error = ReusedKeysError(
            str(opened.location),
            str(other),
            hint=f"{REMEDY} To read them as they are, set `reused_encryption_properties: allow` under `reading`.",
        )
        if self._refuses:
            raise error
        warnings.warn(str(error), UserWarning, stacklevel=levels_inside())

    def other(self, location: FileLocation, footer_dek: SecretBytes, file_unique: bytes) -> FileLocation | None:
        """Remember a file; return another one that was opened before with the same data key and file unique.

        One file under two names, by way of links, is no other one.

        Args:
            location: The file.
            footer_dek: Of its footer.
            file_unique: The random part of its AAD (spec 4.4.1).
        """
        # Who is refused once is refused again when it is opened again: the first file is the one that stays.
        digest = self._digest(footer_dek, file_unique)
        found = self._known.remember(digest, location, first_stays=self._refuses)
        return None if found is None or found == location or found.is_same_file(location) else found

    def forget(self, footer_dek: SecretBytes, file_unique: bytes) -> None:
        """Forget the file that is remembered with this data key and file unique."""
        self._known.forget(self._digest(footer_dek, file_unique))

    def _digest(self, footer_dek: SecretBytes, file_unique: bytes) -> bytes:
        return hashlib.sha256(self._salt + footer_dek.reveal() + file_unique).digest()[:16]


def _is_there(location: FileLocation, file_unique: bytes) -> bool:
    """Tell whether a file is still there, as far as its file unique says; who cannot look says that it is."""
    try:
        with open_source(location) as source:
            return (read_envelope(source).aad_file_unique or b"") == file_unique
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (KeytoolsError, OSError):
        return True


def _differs(location: FileLocation, opened: OpenedFile) -> bool:
    """Tell whether another file is there that has the file unique of the one that was opened, and other data."""
    try:
        with open_source(location) as source:
            envelope = read_envelope(source)
    except (KeytoolsError, OSError):
        return False
    is_copy = VerifiedTail.of(envelope) == opened.tail
    return not is_copy and envelope.aad_file_unique == opened.footer.envelope.aad_file_unique
