"""Files re-encrypted in place, page by page, with new data keys: after a leak of a DEK or a KEK."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parquet_keytools.config.key_policy import HOW_TO_DECIDE, ColumnPath, undecided_columns
from parquet_keytools.encryption import file_encryption
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KeytoolsError,
    KmsUnavailableError,
    NotEncryptedError,
    OutputError,
    StorageFailedError,
    value_or_raise,
)
from parquet_keytools.files.conversion import Contents, labelled_contents, policy_of
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.files.key_service import KeyService, NewFileKeys, TablePolicy, new_reference_suffix
from parquet_keytools.files.opened_file import FileIdentities, OpenedFile, as_verified
from parquet_keytools.files.replacement import NewKeyMaterial, existing_key_materials, replacement
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.file_layout import ByteSink, ByteSource
from parquet_keytools.keys.key_material import DataKeyId, KeyReference, parse_key_metadata
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.rotation.data_set_run import InPlaceRequest, change_each_file
from parquet_keytools.rotation.file_keys import Tail, check_unchanged, read_tail
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.rotation.rotate import REFUSED_HINT, proving
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source, real_location
from parquet_keytools.storage.walk import file_or_folder


def check_rekeyed(
    written: ByteSource, new: NewFileKeys, old: Footer, kms_keys: KmsKeys, *, all_modules: bool
) -> None:
    """Open a new file with the content of an old one; see `check_new_file`."""
    footer, _ = check_new_file(written, new, kms_keys, all_modules=all_modules)
    if _content(footer) != _content(old):
        raise OutputError(
            f"{written.path}: the content of the new file differs from the old file.", hint=REFUSED_HINT
        )


def check_new_file(
    written: ByteSource, new: NewFileKeys, kms_keys: KmsKeys, *, all_modules: bool
) -> tuple[Footer, dict[ColumnPath, SecretBytes]]:
    """Open a new file as its readers will, after the KMS has unwrapped its keys.

    Args:
        written: The new file.
        new: Its keys.
        kms_keys: Unwraps keys.
        all_modules: Whether to authenticate all modules, or only the footer and column metadata.

    Returns:
        Its footer, and the DEK of each column that has one.

    Raises:
        KeyMaterialError: A wrapped key does not unwrap to the key that encrypts.
        KmsError: The KMS does not unwrap a new key.
        OutputError: The new file does not authenticate.
        FileChangedError: It changed just now.
    """
    wrapped = [(dek, material) for dek, metadata in new.encryption.deks if (material := new.material(metadata))]
    for (dek, _), outcome in zip(wrapped, kms_keys.deks([material for _, material in wrapped]), strict=True):
        if value_or_raise(outcome) != dek:
            raise KeyMaterialError("a new key does not unwrap to itself", path=written.path)
    encryption = new.encryption
    with proving("the new file", written.path):
        footer = read_envelope(written).open(encryption.footer_dek, encryption.aad_prefix)
        deks = {path: key.dek for path, key in encryption.columns.items() if isinstance(key, ColumnKey)}
        for column in footer.columns:
            cipher = footer.cipher_of(column, deks.get(column.path))
            for row_group_ordinal in range(len(footer.row_groups)):
                footer.chunk_metadata(row_group_ordinal, column, cipher)
        if all_modules:
            file_encryption.authenticate_columns(written, footer, deks)
    return footer, deks


def _content(footer: Footer) -> tuple[object, ...]:
    rows = [row_group.num_rows for row_group in footer.row_groups]
    return footer.metadata.num_rows, rows, [leaf.path for leaf in footer.leaves]


@dataclass(frozen=True)
class RekeyRequest(InPlaceRequest):
    """Arguments of `Keytools.rekey_in_place`.

    Attributes:
        as_before: Whether files keep their AAD prefix, and encrypted columns stay encrypted.
    """

    new_table_name: str | None = None
    aad_prefix: str | bytes | None = None
    as_before: bool = True
    verify: bool = True


def rekey_data_set(
    keys: KeyService, new_keys: KeyService, path: FileLocation, request: RekeyRequest
) -> RotationReport:
    """Re-encrypt a file in place, or all Parquet files under a folder.

    Raises:
        FileNotFoundError: The file or folder does not exist.
        ConfigurationError: The table does not exist, or no table is named and there are several.
        KeytoolsError: The file failed. For a folder, the report lists files that failed.
    """
    is_file = file_or_folder(path).is_file
    keys.configuration.table_of_files(request.table_name)
    new_keys.configuration.select_table(request.new_table_name)
    # A KEK that leaked may be in the cache.
    keys.clear_caches()
    new_keys.clear_caches()
    rekeying = _Rekeying(keys, new_keys, request, raises_not_encrypted=is_file)
    return change_each_file(path, rekeying.rekey, request, raises_failures=is_file)


class _Rekeying:
    def __init__(
        self,
        keys: KeyService,
        new_keys: KeyService,
        request: RekeyRequest,
        *,
        raises_not_encrypted: bool,
    ) -> None:
        self._keys = keys
        self._new_keys = new_keys
        # Worker processes get a pickled copy.
        self._request = replace(request, on_file=None)
        self._raises_not_encrypted = raises_not_encrypted

    def rekey(self, location: FileLocation) -> FileRotation:
        """Re-encrypt one file."""
        tail, envelope = read_tail(location)
        try:
            with unless_changed(location, tail):
                if envelope.mode is FooterMode.UNENCRYPTED:
                    # Encrypted columns would contradict the footer, which is an error.
                    envelope.open(None)
                opened, is_done = self._open(location)
                if is_done:
                    return FileRotation(str(location), RotationOutcome.ALREADY_CURRENT)
                policy, new = self._new_file_keys(opened)
        except NotEncryptedError:
            if self._raises_not_encrypted:
                raise NotEncryptedError(f"{location} is not encrypted.") from None
            return FileRotation(str(location), RotationOutcome.NOT_ENCRYPTED)
        return replaced_whole(
            location,
            tail,
            new,
            RotationOutcome.REKEYED,
            policy,
            lambda sink: self._write(opened, new, sink),
            lambda written: check_rekeyed(
                written, new, opened.footer, self._new_keys.kms_keys(), all_modules=self._request.verify
            ),
        )

    def _open(self, location: FileLocation) -> tuple[OpenedFile, bool]:
        """Open a file of the old table, or one that an earlier run moved; return whether nothing is left to do."""
        request = self._request
        # The file gets new keys, so sharing the old keys with another file does not matter.
        identities = FileIdentities(refuses=False)
        try:
            (opened,) = self._keys.open_files(
                [location], request.table_name, request.aad_prefix, again=False, identities=identities
            )
            opened.refuse_unencrypted()
            opened.refuse_denied(None)
        except (NotEncryptedError, KmsUnavailableError):
            raise
        except KeytoolsError:
            moved = None if request.as_before else self._moved(location)
            if moved is None:
                raise
            return moved, not self._has_left_over(moved)
        return opened, False

    def _has_left_over(self, opened: OpenedFile) -> bool:
        """Return whether the key material file of a file has entries of its old keys, as after a crash."""
        footer = opened.footer
        used = map(parse_key_metadata, [footer.key_metadata, *(column.key_metadata for column in footer.columns)])
        references = {key.reference for key in used if isinstance(key, KeyReference)}
        return not existing_key_materials(opened.location).keys() <= references

    def _moved(self, location: FileLocation) -> OpenedFile | None:
        """Open a file that is as the new table says, with the keys that it would get; None if it is not."""
        identities = FileIdentities(refuses=False)
        try:
            (opened,) = self._new_keys.open_files(
                [location], self._request.new_table_name, again=False, identities=identities
            )
            opened.refuse_denied(None)
            return opened if self._new_keys.has_keys_of(opened, self._new_policy(opened)) else None
        except KeytoolsError:
            return None

    def _new_policy(self, opened: OpenedFile) -> TablePolicy:
        return _policy_of(self._new_keys, opened, self._request.new_table_name, self._request.key_values)

    def _new_file_keys(self, opened: OpenedFile) -> tuple[TablePolicy, NewFileKeys]:
        table_name, as_before = self._request.new_table_name, self._request.as_before
        found = keys_of_new_version(
            self._new_keys, opened, table_name, self._request.key_values, as_before=as_before
        )
        if as_before:
            _refuse_same_keys(opened, found[1].encryption)
        return found

    def _write(self, opened: OpenedFile, new: NewFileKeys, sink: ByteSink) -> None:
        with open_source(opened.location) as source:
            file_encryption.encrypt_opened(
                as_verified(opened, source),
                sink,
                opened.footer,
                opened.deks,
                new.encryption,
                on_progress=self._request.on_progress,
            )


def _policy_of(
    keys: KeyService, opened: OpenedFile, table_name: str | None, key_values: Mapping[str, str] | None
) -> TablePolicy:
    leaves, labels = [leaf.path for leaf in opened.footer.leaves], labels_of_footer(opened.footer)
    policy = keys.policy(table_name, leaves, labels, key_values)
    return policy.with_column_values(opened.footer, opened.deks)


def keys_of_new_version(
    keys: KeyService,
    opened: OpenedFile,
    table_name: str | None,
    key_values: Mapping[str, str] | None = None,
    *,
    as_before: bool = True,
) -> tuple[TablePolicy, NewFileKeys]:
    """Make the keys of a file that replaces another one.

    Args:
        keys: Wraps the keys.
        opened: The file.
        table_name: The table of the new file.
        key_values: Placeholder in names of keys -> value.
        as_before: Whether the file keeps its AAD prefix, and encrypted columns stay encrypted.

    Raises:
        OutputError: The file is a link and its name matters, or it would be less protected.
        ConfigurationError: The table's columns do not fit the file.
        KmsError: A key cannot be wrapped.
    """
    location, footer = opened.location, opened.footer
    policy = _policy_of(keys, opened, table_name, key_values)
    suffix = new_reference_suffix() if existing_key_materials(location) else ""
    new = keys.new_file_keys(policy, location, suffix)
    is_external = new.key_materials is not None or opened.retriever.key_materials is not None
    refuse_two_names(location, is_external=is_external)
    if not as_before:
        return policy, new
    _refuse_less_protection(location, footer, new.encryption, policy.table_name)
    encryption = replace(
        new.encryption,
        aad_prefix=footer.aad_prefix or None,
        store_aad_prefix=footer.envelope.aad_prefix is not None,
    )
    return policy, replace(new, encryption=encryption)


def replaced_whole(
    location: FileLocation,
    tail: Tail,
    new: NewFileKeys,
    outcome: RotationOutcome,
    policy: TablePolicy,
    write: Callable[[ByteSink], object],
    check_written: Callable[[ByteSource], object],
    *,
    other_names_keep: str = "",
) -> FileRotation:
    """Replace a file by one with new keys, if it still has the tail that was read.

    `other_names_keep` is what the other names of a file with hard links would still show, if that matters.

    Raises:
        ChangedMeanwhileError: The file changed at the same time; it is not replaced.
        KeytoolsError: The file is unchanged.
    """

    def check() -> None:
        check_unchanged(location, tail)
        if other_names_keep:
            _refuse_hard_links(location, other_names_keep)

    check()
    new_material = NewKeyMaterial(location, new.key_materials)
    with replacement(location, check, key_material=new_material) as pending:
        with unless_changed(location, tail), pending.open_sink() as sink:
            write(sink)
        with pending.open_written() as written:
            check_written(written)
            size_bytes = written.size_bytes
    return FileRotation(
        str(location),
        outcome,
        bytes_written=size_bytes,
        old_size_bytes=tail.size_bytes,
        new_size_bytes=size_bytes,
        plaintext_columns=policy.plaintext_columns,
    )


@contextlib.contextmanager
def unless_changed(location: FileLocation, tail: Tail) -> Iterator[None]:
    """Raise `ChangedMeanwhileError` in place of an error if the file changed after its tail was read."""
    try:
        yield
    except StorageFailedError:
        raise
    except (KeytoolsError, OSError):
        check_unchanged(location, tail)
        raise


# --- what is refused ---


def refuse_two_names(location: FileLocation, *, is_external: bool) -> None:
    """Refuse a link if the file's name matters: readers that do not use the link see another name.

    Args:
        location: The file.
        is_external: Whether it has, or gets, a key material file.
    """
    real = real_location(location)
    folder = Path(os.path.realpath(Path(location.path).parent))
    is_elsewhere = location.is_local and folder != Path(real.path).parent
    if location.name != real.name or (is_elsewhere and is_external):
        raise OutputError(
            f"{location} is a link: its key material or AAD prefix belong to one of its names.",
            hint=f"Name the file that it leads to: {real}",
        )


def _refuse_same_keys(opened: OpenedFile, new: FileEncryption) -> None:
    """Refuse data keys that the file already has: a file with a leaked key would count as rekeyed."""
    for dek, key_metadata in new.deks:
        parsed = parse_key_metadata(key_metadata)
        is_old = dek in opened.deks.values() or opened.footer.envelope.is_sealed_by(
            ModuleCipher(dek, opened.footer.file_aad)
        )
        if isinstance(parsed, DataKeyId) and is_old:
            raise OutputError(
                f"{opened.location} has the data key {parsed.name!r} already, and would keep it.",
                hint="Name a configuration that has another data key in its place, with --to-config.",
            )


def _refuse_less_protection(location: FileLocation, old: Footer, new: FileEncryption, table_name: str) -> None:
    """Refuse to replace encrypted data by plaintext."""
    lost = [
        ".".join(column.path)
        for column in old.columns
        if column.encryption is not ColumnEncryption.PLAINTEXT
        and new.columns.get(column.path, new.unlisted_columns) is ColumnEncryption.PLAINTEXT
    ]
    if old.mode is FooterMode.ENCRYPTED_FOOTER and new.plaintext_footer:
        lost.append("the footer")
    if lost:
        raise OutputError(
            f"{location}: encrypted now, and in plaintext in the table {table_name!r}: {', '.join(lost)}.",
            hint="Name the table of the file; or name this table as the new table, if that is intended.",
        )


# --- Plaintext files encrypted in place ---


def encrypt_data_set(keys: KeyService, path: FileLocation, request: InPlaceRequest) -> RotationReport:
    """Encrypt a file in place, or all Parquet files under a folder; see `Keytools.encrypt_in_place`."""
    table_name, _ = keys.configuration.select_table(request.table_name)
    # Worker processes get a pickled copy.
    encrypting = _Encrypting(keys, replace(request, table_name=table_name, on_file=None))
    return change_each_file(path, encrypting.encrypt, request, raises_failures=file_or_folder(path).is_file)


class _Encrypting:
    def __init__(self, keys: KeyService, request: InPlaceRequest) -> None:
        self._keys = keys
        self._request = request

    def encrypt(self, location: FileLocation) -> FileRotation:
        """Encrypt one file."""
        tail, envelope = read_tail(location)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            # As an earlier run leaves it. Any other encrypted file is an error.
            self._refuse_undecided(location, labelled_contents(self._keys, location, self._request.table_name))
            if self._request.key_values:
                self._refuse_other_values(location)
            return FileRotation(str(location), RotationOutcome.ALREADY_ENCRYPTED)

        with open_source(location) as source:
            with unless_changed(location, tail):
                footer = file_encryption.read_plaintext_footer(source)
                folders = names_in_folders(location.path)
                policy = policy_of(self._keys, self._request.table_name, footer, folders, self._request.key_values)
                new = self._keys.new_file_keys(policy, location)
                refuse_two_names(location, is_external=new.key_materials is not None)
            return replaced_whole(
                location,
                tail,
                new,
                RotationOutcome.ENCRYPTED,
                policy,
                lambda sink: file_encryption.encrypt_opened(
                    source, sink, footer, {}, new.encryption, on_progress=self._request.on_progress
                ),
                # The plaintext is the only other copy: every page must decrypt before it goes.
                lambda written: check_rekeyed(written, new, footer, self._keys.kms_keys(), all_modules=True),
                other_names_keep="the plaintext",
            )

    def _refuse_other_values(self, location: FileLocation) -> None:
        """Refuse a file from before that is not under the keys of the values that the caller gives."""
        (opened,) = self._keys.open_files([location], self._request.table_name)
        policy = _policy_of(self._keys, opened, self._request.table_name, self._request.key_values)
        if not self._keys.has_keys_of(opened, policy):
            raise ConfigurationError(
                f"{location} is encrypted, and not under the keys of the given values.",
                hint="Leave it out, or give it new keys: `rekey --in-place`.",
            )

    def _refuse_undecided(self, location: FileLocation, contents: Contents) -> None:
        """Refuse a file from before with plaintext columns that the table does not decide about."""
        name, settings = self._keys.configuration.select_table(self._request.table_name)
        undecided = set(undecided_columns(settings, [column.path for column in contents.footer.columns]))
        names = [
            ".".join(column.path)
            for column in contents.footer.columns
            if column.path in undecided and column.encryption is ColumnEncryption.PLAINTEXT
        ]
        if names:
            raise ConfigurationError(
                f"{location} is encrypted, but columns are plaintext that table {name!r} does not list: "
                f"{', '.join(map(repr, names))}.",
                hint=HOW_TO_DECIDE,
            )


def _refuse_hard_links(location: FileLocation, content: str) -> None:
    """Refuse a file with several hard links: its other names would still lead to its old content."""
    if location.is_local and (names := Path(location.path).stat().st_nlink) > 1:
        raise OutputError(
            f"{location} has {names} names (hard links), and the others would keep {content}.",
            hint="Remove the other names first.",
        )
