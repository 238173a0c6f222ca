"""Old key material put back, or dropped, over a file or a data set.

What is kept beside a file may have been put there by others. So it is believed only if it leads to the keys of the
file itself: the old footer key must open the footer that is in place, and each old key of a column must decrypt
metadata of its column. That is more than a comparison with what the new keys unwrap to, and works also where these
cannot be used any more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    KeyMaterialError,
    KeytoolsError,
    KmsUnavailableError,
    OutputError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import WithTail
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.keys.key_material import KeyReference, parse_key_metadata
from parquet_keytools.rotation.data_set_run import EachFile, RunOptions, change_data_set, data_set_files
from parquet_keytools.rotation.held_keys import (
    AadPrefixOf,
    HeldKey,
    HeldKeys,
    external_material,
    own_key_columns,
    read_file_keys,
    require_footer_key,
)
from parquet_keytools.rotation.replaced_keys import (
    KeptFile,
    KeptKeys,
    kept_files_in,
    read_kept,
    remove_kept,
    replace_external_material,
    replace_tail,
)
from parquet_keytools.rotation.report import FileRotation, KmsCalls, RotationOutcome, RotationReport
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.tail import ReplacedTail, check_read_back, check_unchanged
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.walk import Unseen, raise_for_unseen


class RestoredCheck:
    """Has the KMS unwrap old keys, each distinct one once in a run, and proves them.

    What readers have in their caches proves nothing: the KMS may refuse it by now.
    """

    def __init__(self, keys: KeyService, aad_prefix_of: AadPrefixOf) -> None:
        self._rewrapper = None if keys.kms is None else Rewrapper(keys.kms)
        self._data_keys = keys.data_keys
        self._aad_prefix_of = aad_prefix_of

    @property
    def calls(self) -> KmsCalls:
        """What the KMS was asked for."""
        return KmsCalls() if self._rewrapper is None else self._rewrapper.calls

    def material(self, keys: HeldKeys, old: bytes) -> bytes:
        """Check the content of a key material file.

        Returns:
            The entries of it that the footer refers to; others are not put back.

        Raises:
            KmsError: The KMS does not unwrap an old key.
            KeytoolsError: An old key is not that of the file, or is missing, or the footer is not authentic.
        """
        assert keys.external is not None
        path = str(keys.external.location)
        old_external = external_material(keys.external.location, old)
        aad_prefix = keys.expected_prefix(self._aad_prefix_of)

        def old_key(key_metadata: bytes | None) -> HeldKey | None:
            parsed = parse_key_metadata(key_metadata)
            if not isinstance(parsed, KeyReference):
                return keys.key_of(key_metadata)
            if parsed.reference not in old_external.by_reference:
                raise KeyMaterialError(f"the old key material lacks {parsed.reference!r}", path=path)
            return old_external.by_reference[parsed.reference]

        held = old_key(keys.envelope.key_metadata)
        require_footer_key(held, path)
        keys.open(self._dek(keys, held), aad_prefix)
        assert keys.footer is not None
        needed = [] if held is None or held.reference is None else [held.reference]
        for column in own_key_columns(keys.footer):
            held = old_key(column.key_metadata)
            if held is None or held.reference is None:
                continue
            needed.append(held.reference)
            now = keys.key_of(column.key_metadata)
            # Keys that the rotation left alone need not be there for its undoing.
            if now is None or now.material != held.material:
                keys.prove(column, self._dek(keys, held))
        others = old_external.by_reference.keys() - needed
        return old_external.with_new({}, others) if others else old

    def tail(self, keys: HeldKeys, restored: ByteSource) -> None:
        """Check the tail of a Parquet file.

        Raises:
            KmsError: The KMS does not unwrap an old key.
            KeytoolsError: The old footer is another one, or an old key is not that of the file, or the footer that
                is in place is not authentic.
        """
        path = str(keys.location)
        old = HeldKeys(keys.location, keys.tail, read_envelope(restored), keys.external)
        if old.envelope.footer_offset != keys.tail.offset or not _is_alike(old.envelope, keys.envelope):
            raise _other_footer(path)
        old.add_footer_key()
        aad_prefix = old.expected_prefix(self._aad_prefix_of)
        dek = self._dek(old, old.footer_key)
        old.open(dek, aad_prefix)
        keys.open(dek, aad_prefix)
        assert old.footer is not None
        assert keys.footer is not None
        if _without_key_metadata(old.footer) != _without_key_metadata(keys.footer):
            raise _other_footer(path)
        there = {column.key_metadata for column in own_key_columns(keys.footer)}
        for column, held in old.column_keys():
            if column.key_metadata not in there:
                keys.prove(column, self._dek(old, held))

    def _dek(self, keys: HeldKeys, held: HeldKey | None) -> SecretBytes:
        if held is None:
            return keys.data_key(self._data_keys)
        return keys.dek(held, None if self._rewrapper is None else self._rewrapper.unwrap([held.wrapped_key]))


def _is_alike(old: FooterEnvelope, now: FooterEnvelope) -> bool:
    """Return whether two footers say the same of how they are protected, but for their key."""
    return (old.mode, old.algorithm, old.aad_prefix, old.aad_file_unique, old.supply_aad_prefix) == (
        now.mode,
        now.algorithm,
        now.aad_prefix,
        now.aad_file_unique,
        now.supply_aad_prefix,
    )


def _without_key_metadata(footer: Footer) -> FileMetaData:
    """Return what a footer says, but for its key metadata."""
    metadata, _ = FileMetaData.read(footer.metadata.serialise())
    for row_group in metadata.row_groups:
        for chunk in row_group.columns:
            crypto = chunk.crypto_metadata
            column = crypto.encryption_with_column_key if crypto is not None else None
            if column is not None:
                column.key_metadata = None
    if footer.mode is FooterMode.PLAINTEXT_FOOTER:
        metadata.footer_signing_key_metadata = None
    return metadata


def _other_footer(path: str) -> KeyMaterialError:
    return KeyMaterialError("the old footer that was kept is not that of the file", path=path)


_LISTED_FOLDERS = 16
_NOT_REGULAR = "it is not a regular file"
_NOT_KEPT = "it is named like old keys, and holds none"
_ELSEWHERE = "it lies in another folder than the one that was named, behind a link"


def restore_data_set(path: FileLocation, check: RestoredCheck, *, follow_links: bool = False) -> RotationReport:
    """Put back the old keys of a file, or of all files under a folder, as far as they were kept.

    Raises:
        FileNotFoundError: There is no such file or folder.
    """
    report = RotationReport()
    kept_of = _KeptOf()

    def restore(location: FileLocation, locked_folder: str | None) -> FileRotation:
        return _restore(location, kept_of(location), check, locked_folder)

    change_data_set(path, EachFile(restore), report, RunOptions(follow_links=follow_links))
    report.kms_calls = check.calls
    return report


def drop_data_set(
    path: FileLocation, on_left: Callable[[str, str], None] | None = None, *, follow_links: bool = False
) -> int:
    """Remove the old keys that were kept of a file, or of all files under a folder. Returns how many there were.

    Args:
        path: The file or folder.
        on_left: Called with the path of what is named like old keys and is left in place, and why.
        follow_links: Whether old keys are removed, too, that lie outside of what was named, behind a link.

    Raises:
        FileNotFoundError: There is no such file or folder.
        IncompleteDataSetError: Something could not be looked into; what was found is removed.
    """
    count = 0
    kept_of = _KeptOf()
    unseen: list[Unseen] = []
    for location in data_set_files(path, unseen.append):
        kept_files = kept_of(location)
        is_elsewhere = bool(kept_files) and not follow_links and _is_elsewhere(path, location)
        for kept in kept_files:
            if is_elsewhere and on_left is not None:
                on_left(str(kept.location), _ELSEWHERE)
            elif is_elsewhere:
                continue
            elif kept.looks_kept():
                kept.location.filesystem.delete_file(kept.location.path)
                count += 1
            elif on_left is not None:
                on_left(str(kept.location), _NOT_KEPT if kept.is_regular else _NOT_REGULAR)
    raise_for_unseen(unseen, hint=f"{count} kept files were removed. Repeat the command when this is solved.")
    return count


def _is_elsewhere(root: FileLocation, location: FileLocation) -> bool:
    """Return whether a link leads out of the folder that was named, to that of a file.

    Whoever may write to one data set may put a link to another one there, whose rotation nobody wants to undo.
    """
    if not location.is_local or location.path == root.path:
        return False
    top, folder = (os.path.realpath(path) for path in (root.path, Path(location.path).parent))
    return os.path.commonpath([top, folder]) != top


class _KeptOf:
    """Finds what is kept of files, listing each folder once while one goes through its files."""

    def __init__(self) -> None:
        self._by_folder: dict[str, dict[str, list[KeptFile]]] = {}

    def __call__(self, parquet_file: FileLocation) -> list[KeptFile]:
        folder = parquet_file.path[: -len(parquet_file.name)]
        if folder not in self._by_folder:
            if len(self._by_folder) >= _LISTED_FOLDERS:
                self._by_folder.clear()
            self._by_folder[folder] = kept_files_in(parquet_file.filesystem, folder)
        return self._by_folder[folder].get(parquet_file.name, [])


def _restore(
    location: FileLocation, files: list[KeptFile], check: RestoredCheck, locked_folder: str | None
) -> FileRotation:
    if not files:
        return FileRotation(str(location), RotationOutcome.NOTHING_TO_RESTORE)
    done: list[ReplacedTail] = []
    refused: list[str] = []
    is_begun = False
    for kind, restore in (("key_material", _restore_material), ("tail", _restore_tail)):
        of_kind = [file for file in files if file.kind == kind]
        if of_kind:
            try:
                done += _newest_that_is_proven(location, of_kind, restore, check, refused, locked_folder)
            except ChangedMeanwhileError as error:
                if not is_begun:
                    raise
                # Another attempt would put back what an earlier rotation kept of the other part.
                raise OutputError(str(error), hint="Undo the rotation again.") from None
            is_begun = True
    how = "; ".join([*(part.how for part in done), *refused])
    written, copied = sum(part.bytes_written for part in done), sum(part.bytes_copied for part in done)
    return FileRotation(str(location), RotationOutcome.RESTORED, (), how, written, copied)


_Restore = Callable[[FileLocation, KeptKeys, RestoredCheck, "str | None"], "list[ReplacedTail] | None"]


def _newest_that_is_proven(
    location: FileLocation,
    files: list[KeptFile],
    restore: _Restore,
    check: RestoredCheck,
    refused: list[str],
    locked_folder: str | None,
) -> list[ReplacedTail]:
    """Put back the newest that fits and is proven; others stay where they are, and are named.

    Raises:
        KeytoolsError: None is.
    """
    failure: KeytoolsError | None = None
    for file in files:
        try:
            kept = _read(location, file)
            # One that a run that was cut off left behind fits nothing.
            done = restore(location, kept, check, locked_folder)
        except (ChangedMeanwhileError, KmsUnavailableError, OutputError):
            raise
        except KeytoolsError as error:
            refused.append(f"{file.location} was left in place: {error}")
            failure = failure or error
        else:
            if done is not None:
                remove_kept(kept.location)
                return done
    if failure is None:
        raise KeyMaterialError(
            "the file changed since its old keys were kept: they are not restored.",
            path=str(location),
            hint="Restore the file from a backup, or drop the old keys.",
        )
    left = "; ".join(dict.fromkeys(str(file.location) for file in files if str(file.location) not in str(failure)))
    if left:
        failure.args = (f"{failure.args[0]} Nothing was restored of {left}.", *failure.args[1:])
    raise failure


def _read(location: FileLocation, file: KeptFile) -> KeptKeys:
    try:
        return read_kept(file)
    except FileNotFoundError:
        # This run must not go on with what an earlier rotation kept.
        raise OutputError(
            f"{location}: its old keys were put back or dropped by another process meanwhile.",
            hint="Undo the rotation again if an earlier one is to be undone, too.",
        ) from None


def _restore_material(
    location: FileLocation, kept: KeptKeys, check: RestoredCheck, locked_folder: str | None
) -> list[ReplacedTail] | None:
    keys = read_file_keys(location)
    keys.take_external()
    if keys.external is None:
        return None
    content = keys.external.content
    is_there = content == kept.old
    if not is_there and kept.new_sha256 != hashlib.sha256(content).hexdigest():
        return None
    old = check.material(keys, kept.old)
    if is_there:
        return []
    replace_external_material(
        keys.external.location,
        content,
        old,
        lambda: check_unchanged(location, keys.tail),
        locked_folder=locked_folder,
    )
    return [ReplacedTail("old key material file", len(old), 0)]


def _restore_tail(
    location: FileLocation, kept: KeptKeys, check: RestoredCheck, locked_folder: str | None
) -> list[ReplacedTail] | None:
    keys = read_file_keys(location)
    tail = keys.tail
    is_there = tail.data == kept.old
    if kept.offset != tail.offset or not (is_there or kept.new_sha256 == tail.sha256):
        return None
    # Before anything is written: what is kept may be anybody's.
    with open_source(location) as source:
        check.tail(keys, WithTail(source, tail.offset, kept.old))
    if is_there:
        return []

    def check_written(source: ByteSource) -> None:
        check_read_back(source, tail.offset, kept.old)

    return [replace_tail(location, tail, kept.old, check_written, locked_folder=locked_folder)]
