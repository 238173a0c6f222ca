"""Which files and columns depend on which master key: the question before one is disabled or destroyed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from parquet_keytools import audit
from parquet_keytools.errors import KeytoolsError, KmsError, value_or_raise
from parquet_keytools.keys.file_key_retriever import DataKeys
from parquet_keytools.keys.kek import Kek
from parquet_keytools.keys.key_metadata import DataKeyId, parse_key_metadata
from parquet_keytools.rotation.data_set_rotation import CONCURRENT_FILES
from parquet_keytools.rotation.file_keys import FileKeys, own_key_columns, stated_aad_prefix
from parquet_keytools.rotation.file_work import FileWork, read_window
from parquet_keytools.rotation.held_key import HeldKey
from parquet_keytools.rotation.master_key_versions import MasterKeyVersions
from parquet_keytools.rotation.rewrap_task import WrappedKey
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.rotation_files import rotation_files
from parquet_keytools.rotation.rotation_plan import is_same_version
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage import FileLocation
from parquet_keytools.strict_base64 import encode


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key of a file.

    Attributes:
        column: Dotted path of the column; None for the footer, and where the columns cannot be seen.
        is_footer: Whether it is the key of the footer.
        master_key_id: The master key that wraps it, as the KMS knows it; None for a data key.
        version: The version that wraps it; None where nobody can tell.
        wrapping: With a KEK in between, or without; None for a data key.
        kek_id: Of the KEK, as base64; None without one.
        reference: Its name in the key material file; None where there is none.
        data_key: Name of the data key, where the file carries one.
    """

    column: str | None
    is_footer: bool
    master_key_id: str | None = None
    version: str | None = None
    wrapping: Literal["single", "double"] | None = None
    kek_id: str | None = None
    reference: str | None = None
    data_key: str | None = None


@dataclass(frozen=True, slots=True)
class FileKeyUses:
    """The keys of one file.

    Attributes:
        path: The file.
        is_encrypted: Whether it is encrypted; also true where that cannot be told.
        uses: Its keys, as far as they can be seen.
        unknown: Why there may be more keys, such as a footer key that the KMS refuses; None where all are seen.
    """

    path: str
    is_encrypted: bool
    uses: tuple[KeyUse, ...] = ()
    unknown: KeytoolsError | OSError | None = None

    def depends_on(self, master_key_id: str, version: str | None = None) -> bool | None:
        """Whether the file needs a master key, or a version of it; None where that cannot be told."""
        uncertain = self.unknown is not None
        for use in self.uses:
            if use.master_key_id == master_key_id:
                if version is None or (use.version is not None and is_same_version(use.version, version)):
                    return True
                uncertain |= use.version is None
        return None if uncertain else False


class Inventory:
    """Lists the keys of files.

    Args:
        rewrapper: Asks the KMS for footer keys; None where there is no KMS.
        versions: Of wrapped keys.
        data_keys: The data keys that the caller manages.
        aad_prefix_of: Returns the AAD prefix of a file that does not store it; None where it stores it.
    """

    def __init__(
        self,
        rewrapper: Rewrapper | None,
        versions: MasterKeyVersions | None,
        data_keys: DataKeys,
        aad_prefix_of: Callable[[FileLocation, bytes | None], bytes | None],
    ) -> None:
        self._rewrapper = rewrapper
        self._versions = versions
        self._data_keys = data_keys
        self._aad_prefix_of = aad_prefix_of

    def list(self, path: FileLocation) -> Iterator[FileKeyUses]:
        """Yield the keys of a file, or of each Parquet file under a folder.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        locations = rotation_files(path)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="parquet-keytools-inventory") as pool:
            while works := read_window(pool, locations):
                footer_keys = [
                    work.keys.footer_key.wrapped_key
                    for work in works
                    if work.keys is not None and work.keys.hides_names and work.keys.footer_key is not None
                ]
                with audit.about(path):
                    unwrapped = self._rewrapper.unwrap(footer_keys) if self._rewrapper is not None else {}
                yield from pool.map(self._list_one, works, itertools.repeat(unwrapped))

    def _list_one(self, work: FileWork, unwrapped: dict[WrappedKey, SecretBytes | KmsError]) -> FileKeyUses:
        path = str(work.location)
        if work.keys is None:
            return FileKeyUses(path, True, (), _alone(work.failure))
        if not work.keys.is_encrypted:
            return FileKeyUses(path, False)
        unknown: KeytoolsError | OSError | None = None
        if work.keys.hides_names:
            try:
                self._open(work.keys, unwrapped)
            except (KeytoolsError, OSError) as error:
                unknown = _alone(error)
        return FileKeyUses(path, True, tuple(self._uses(work.keys)), unknown)

    def _open(self, keys: FileKeys, unwrapped: dict[WrappedKey, SecretBytes | KmsError]) -> None:
        held = keys.footer_key
        if held is None:
            dek = keys.data_key(self._data_keys)
        else:
            key = value_or_raise(unwrapped[held.wrapped_key])
            kek_id = held.material.kek_id
            dek = key if kek_id is None else Kek(kek_id, key).unwrap_dek(held.material.wrapped_dek)
        prefix = self._aad_prefix_of(keys.location, stated_aad_prefix(keys.envelope))
        keys.take_footer(keys.envelope.open(dek, prefix))

    def _uses(self, keys: FileKeys) -> Iterator[KeyUse]:
        seen: set[int] = set()
        yield self._use(keys, keys.envelope.key_metadata, None, seen, is_footer=True)
        footer = keys.footer or keys.envelope.unverified_footer()
        for column in own_key_columns(footer) if footer is not None else ():
            yield self._use(keys, column.key_metadata, ".".join(column.path), seen, is_footer=False)
        for held in keys.held:
            # Of columns that cannot be seen, or left over from a writer that was cut off.
            if id(held) not in seen:
                yield self._wrapped_use(held, None, is_footer=held.material.is_footer_key)

    def _use(
        self, keys: FileKeys, key_metadata: bytes | None, column: str | None, seen: set[int], *, is_footer: bool
    ) -> KeyUse:
        held = keys.key_of(key_metadata)
        if held is not None:
            seen.add(id(held))
            return self._wrapped_use(held, column, is_footer=is_footer)
        parsed = parse_key_metadata(key_metadata)
        return KeyUse(column, is_footer, data_key=parsed.name if isinstance(parsed, DataKeyId) else None)

    def _wrapped_use(self, held: HeldKey, column: str | None, *, is_footer: bool) -> KeyUse:
        key, kek_id = held.wrapped_key, held.material.kek_id
        return KeyUse(
            column,
            is_footer,
            key.master_key_id,
            None if self._versions is None else self._versions.of(key),
            "single" if kek_id is None else "double",
            None if kek_id is None else encode(kek_id),
            held.reference,
        )


def _alone(error: KeytoolsError | OSError | None) -> KeytoolsError | OSError | None:
    """Return an error without the frames that hang on it."""
    if error is not None:
        error.__cause__ = error.__context__ = None
        error.__traceback__ = None
    return error
