"""Which files and columns depend on which master key: the question before a master key is disabled or destroyed.

The keys that a file names are shown. A file needs no other keys only if its footer was authenticated, and each key
that the footer refers to was unwrapped and proven.
"""

from __future__ import annotations

import contextlib
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Literal

from parquet_keytools import audit
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.errors import (
    IncompleteDataSetError,
    KeyMaterialError,
    KeytoolsError,
    KmsError,
    ParquetFormatError,
    kms_failure,
    without_frames,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.table_check import refuse_folders_above
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, MAGIC_LENGTH, TRAILER_LENGTH
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, parse_key_metadata
from parquet_keytools.rotation.data_set_run import CONCURRENT_FILES, files_of
from parquet_keytools.rotation.file_keys import (
    AadPrefixOf,
    FileKey,
    FileKeys,
    Rewrapper,
    SameMasterKey,
    Unwrapped,
    is_same_version,
    read_batch,
    step,
)
from parquet_keytools.runtime.presentation import Summarised
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.walk import LeftOut, LeftOutReason, Unseen, data_set
from parquet_keytools.strict_base64 import encode


@dataclass(frozen=True, slots=True)
class UsedKey:
    """A key of a file.

    Attributes:
        column: Dotted path of the column; None for the footer, and if the column is unknown.
        is_footer: Whether it is the key of the footer.
        master_key_id: Identifier in the KMS of the master key that wraps it; None for a data key.
        version: The version that wraps it; None if it is unknown.
        wrapping: With a KEK (double) or without; None for a data key.
        kek_id: Id of the KEK, as base64; None without a KEK.
        reference: Its name in the key material file; None if it is internal.
        data_key: Name of the data key, if the file stores it.
        wrapped_key: The key that the KMS wrapped, KEK or DEK, as stored; None for a data key.
    """

    column: str | None
    is_footer: bool
    master_key_id: str | None = None
    version: str | None = None
    wrapping: Literal["single", "double"] | None = None
    kek_id: str | None = None
    reference: str | None = None
    data_key: str | None = None
    wrapped_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class FileKeyUses(Summarised):
    """The keys of one file.

    Attributes:
        path: The file.
        is_encrypted: Whether it is encrypted, or may be.
        uses: Its keys, as far as they can be seen.
        unknown: Why it may need other keys, such as a key that the KMS refuses; None if all are proven.
            `IncompleteDataSetError` if readers of data sets skip the file because of its name.
        plaintext_columns: Dotted paths of the columns that are not encrypted, as far as they can be seen.
        footer_key_columns: Dotted paths of the columns under the key of the footer, as far as they can be seen.
        size_bytes: Length of the file; None if it could not be read.
        footer_sha256: SHA-256, in hexadecimal, of the bytes from the footer's start to the end of the file.
    """

    path: str
    is_encrypted: bool
    uses: tuple[UsedKey, ...] = ()
    unknown: KeytoolsError | OSError | None = None
    plaintext_columns: tuple[str, ...] = ()
    footer_key_columns: tuple[str, ...] = ()
    size_bytes: int | None = None
    footer_sha256: str | None = None

    def summary(self) -> Mapping[str, object]:
        """Return the main facts."""
        keys = sorted({use.master_key_id or use.data_key or "unknown" for use in self.uses})
        return {"path": self.path, "is_encrypted": self.is_encrypted, "keys": keys, "unknown": self.unknown}

    @property
    def is_unseen(self) -> bool:
        """Whether the file could not be checked."""
        return isinstance(self.unknown, (OSError, ParquetFormatError))

    @property
    def is_skipped(self) -> bool:
        """Whether readers of data sets skip the file because of its name."""
        return isinstance(self.unknown, IncompleteDataSetError)

    def depends_on(
        self, master_key_id: str, version: str | None = None, same: SameMasterKey = operator.eq
    ) -> bool | None:
        """Whether the file needs a master key, or a version of it; None if that is unknown.

        `same` compares identifiers: a master key may have several.
        """
        uncertain = self.unknown is not None
        for use in self.uses:
            is_same = False if use.master_key_id is None else same(use.master_key_id, master_key_id)
            uncertain |= is_same is None
            if is_same:
                if version is None or (use.version is not None and is_same_version(use.version, version)):
                    return True
                uncertain |= use.version is None
        return None if uncertain else False


class Inventory:
    """Lists the keys of files."""

    def __init__(self, keys: KeyService, aad_prefix_of: AadPrefixOf) -> None:
        kms = keys.kms
        self._rewrapper = None if kms is None else Rewrapper(kms)
        self._data_keys = keys.data_keys
        self._kms = kms
        self._aad_prefix_of = aad_prefix_of
        self._unavailable: KmsError | None = None

    def list(
        self, path: FileLocation, *, ignore_skipped: bool = False, proves_columns: bool = True
    ) -> Iterator[FileKeyUses]:
        """Yield the keys of a file, or of each Parquet file under a folder; see `Keytools.key_inventory`.

        Without `proves_columns`, the keys of columns are as the authentic footer names them.
        """
        unseen: list[Unseen] = []
        left_out: list[LeftOut] = []
        entries = data_set(path, into_passed_over=not ignore_skipped)
        locations = files_of(entries, unseen.append, None if ignore_skipped else left_out.append)
        with _pool() as pool:
            for uses in self._batches(pool, path, locations, proves_columns=proves_columns):
                yield from uses
                yield from _others(pool, unseen, left_out)
            yield from _others(pool, unseen, left_out)

    def of(self, path: FileLocation, locations: Iterator[FileLocation]) -> Iterator[FileKeyUses]:
        """Yield the keys of files of a data set in their order, without a proof of the keys of columns."""
        with _pool() as pool:
            for uses in self._batches(pool, path, locations, proves_columns=False):
                yield from uses

    def _batches(
        self, pool: Executor, path: FileLocation, locations: Iterator[FileLocation], *, proves_columns: bool
    ) -> Iterator[Iterator[FileKeyUses]]:
        while files := read_batch(pool, locations, self._data_keys, self._kms):
            read = step(pool, lambda file: file.expect_prefix(self._aad_prefix_of), files)
            unwrapped = self._unwrap(path, (held for file in read if (held := file.footer_key) is not None))
            opened = step(pool, partial(self._open, unwrapped=unwrapped), read)
            if proves_columns:
                unwrapped = self._unwrap(path, (held for file in opened for _, held in file.column_keys()))
                step(pool, partial(_prove, unwrapped=unwrapped), opened)
            del read, opened
            # None is kept: parsed footers take much memory.
            files.reverse()
            yield (self._uses_of(files.pop()) for _ in range(len(files)))

    def _unwrap(self, path: FileLocation, wanted: Iterable[FileKey]) -> Unwrapped | None:
        """Unwrap keys; after the KMS could not be reached, call it no more."""
        if self._rewrapper is None:
            return None
        keys = [held.wrapped_key for held in wanted]
        if self._unavailable is not None:
            return dict.fromkeys(keys, self._unavailable)
        with audit.about(path):
            unwrapped = self._rewrapper.unwrap(keys)
        errors = (outcome for outcome in unwrapped.values() if isinstance(outcome, KmsError))
        self._unavailable = next(filter(None, map(kms_failure, errors)), None)
        return unwrapped

    def _open(self, file: FileKeys, unwrapped: Unwrapped | None) -> None:
        footer = file.open(file.find_footer_dek(unwrapped) if file.is_encrypted else None)
        refuse_folders_above(file.location, footer.protected_columns, None)

    def _uses_of(self, file: FileKeys) -> FileKeyUses:
        path = str(file.location)
        failure = None if file.failure is None else without_frames(file.failure)
        if not file.is_read:
            return FileKeyUses(path, True, (), failure)
        footer = file.footer
        if footer is None:
            with contextlib.suppress(KeytoolsError):
                footer = file.envelope.unverified_footer()
        columns = () if footer is None else footer.columns
        under: dict[ColumnEncryption, list[str]] = {kind: [] for kind in ColumnEncryption}
        # A column of an encrypted file without row groups has nothing that is plaintext.
        if not file.is_encrypted or file.footer is None or file.footer.row_groups:
            for column in columns:
                under[column.encryption].append(".".join(column.path))
        return FileKeyUses(
            path,
            file.is_encrypted or failure is not None,
            tuple(self._uses(file, columns)) if file.is_encrypted else (),
            failure,
            tuple(under[ColumnEncryption.PLAINTEXT]),
            tuple(under[ColumnEncryption.FOOTER_KEY]),
            file.tail.size_bytes,
            sha256(file.tail.data).hexdigest(),
        )

    def _uses(self, file: FileKeys, columns: Iterable[FooterColumn]) -> Iterator[UsedKey]:
        own = [column for column in columns if column.encryption is ColumnEncryption.COLUMN_KEY]
        keys: list[tuple[str | None, bytes | None]] = [(None, file.envelope.key_metadata)]
        keys += [(".".join(column.path), column.key_metadata) for column in own]
        seen: set[FileKey] = set()
        for column, key_metadata in keys:
            # Invalid key metadata is why the file has failed.
            with contextlib.suppress(KeyMaterialError):
                held, parsed = file.key_of(key_metadata), parse_key_metadata(key_metadata)
                if held is None and isinstance(parsed, KeyMaterial):
                    # From a footer that is not authentic: shown, but not trusted.
                    held = FileKey(parsed, b"", None)
                if held is None:
                    data_key = parsed.name if isinstance(parsed, DataKeyId) else None
                    yield UsedKey(column, column is None, data_key=data_key)
                else:
                    seen.add(held)
                    yield self._wrapped_use(held, column, is_footer=column is None)
        for held in file.external.by_reference.values() if file.external is not None else ():
            # For unknown columns, or left over from a writer that was interrupted.
            if held not in seen:
                yield self._wrapped_use(held, None, is_footer=held.material.is_footer_key)

    def _wrapped_use(self, held: FileKey, column: str | None, *, is_footer: bool) -> UsedKey:
        key, kek_id = held.wrapped_key, held.material.kek_id
        return UsedKey(
            column,
            is_footer,
            key.master_key_id,
            None if self._kms is None else self._kms.wrapped_key_version(key.wrapped_key, key.master_key_id),
            "single" if kek_id is None else "double",
            None if kek_id is None else encode(kek_id),
            held.reference,
            wrapped_key=key.wrapped_key,
        )


def _prove(file: FileKeys, unwrapped: Unwrapped | None) -> None:
    for column, held in file.column_keys():
        file.prove(column, file.dek(held, unwrapped))


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="parquet-keytools-inventory")


def _others(pool: Executor, unseen: list[Unseen], left_out: list[LeftOut]) -> Iterator[FileKeyUses]:
    """Yield the entries that could not be checked or are not part of the data set, and clear the lists."""
    for entry in unseen:
        yield FileKeyUses(entry.path, True, (), entry.error)
    yield from uses_of_left_out(pool, left_out)
    unseen.clear()
    left_out.clear()


def uses_of_left_out(pool: Executor, left_out: Sequence[LeftOut]) -> Iterator[FileKeyUses]:
    """Yield the files that readers of data sets leave out and that may need keys."""
    for entry, unknown in zip(left_out, pool.map(why_unknown, left_out), strict=True):
        if unknown is not None:
            yield FileKeyUses(entry.path, True, (), unknown)


_MAGIC = (MAGIC, MAGIC_ENCRYPTED_FOOTER)
_HINT = "Run the command on it, move it away, or ignore skipped files."


def why_unknown(entry: LeftOut) -> IncompleteDataSetError | None:
    """Return why an entry that readers leave out may need master keys; None if it needs none.

    An encrypted Parquet file may, whatever the end of its name, and so may a file that cannot be read.
    """
    if entry.reason is LeftOutReason.NOT_PARQUET:
        return None
    try:
        if entry.location.is_local and _holds_nothing(entry.location.path):
            return None
        reason = "it is encrypted, and skipped because of its name" if _is_encrypted(entry.location) else None
    except FileNotFoundError:
        # Dangling links are also used as locks by some editors.
        is_link = entry.may_be_data and entry.location.is_local
        reason = "it is a dangling link, and skipped because of its name" if is_link else None
    except OSError as error:
        reason = f"it is skipped because of its name, and cannot be read: {error.strerror or type(error).__name__}"
    except KeytoolsError as error:
        reason = f"it is skipped because of its name: {error}"
    return None if reason is None else IncompleteDataSetError([(entry.path, reason)], hint=_HINT)


def _holds_nothing(path: str) -> bool:
    """Return whether a local file is too short for Parquet, even if it cannot be opened."""
    found = os.stat(path)  # noqa: PTH116 - one call for each of many
    # A folder is here only if it cannot be listed. Pipes and devices have no length.
    return found.st_size < MAGIC_LENGTH + TRAILER_LENGTH and not stat.S_ISDIR(found.st_mode)


def _is_encrypted(location: FileLocation) -> bool:
    with open_source(location) as source:
        if source.size_bytes < MAGIC_LENGTH + TRAILER_LENGTH:
            return False
        # A file without a footer is incomplete. Some readers look only at the end.
        if bytes(source.read_at(source.size_bytes - MAGIC_LENGTH, MAGIC_LENGTH)) not in _MAGIC:
            return False
        return read_envelope(source).mode is not FooterMode.UNENCRYPTED
