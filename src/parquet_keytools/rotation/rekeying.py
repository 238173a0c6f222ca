"""Files re-encrypted in place, page by page, with new data keys: after a leak of a DEK or a KEK."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    value_or_raise,
)
from parquet_keytools.files.conversion import labelled_file, policy_of
from parquet_keytools.files.key_service import KeyService, NewFileKeys, TablePolicy
from parquet_keytools.files.opened_file import FileIdentities, OpenedFile, as_verified
from parquet_keytools.files.placement import existing_key_materials, replacement
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.file_layout import ByteSink, ByteSource
from parquet_keytools.keys.key_material import DataKeyId, KeyReference, parse_key_metadata
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.rotation.data_set_run import RunOptions, change_each_file
from parquet_keytools.rotation.file_keys import Tail, check_unchanged, read_tail, unless_changed
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.rotation.rotate import REFUSED_HINT, proving
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source, real_location
from parquet_keytools.storage.walk import file_or_folder


def check_rekeyed(written: ByteSource, new: NewFileKeys, old: Footer, kms_keys: KmsKeys) -> None:
    """Open a new file with the content of an old one; see `check_new_file`."""
    footer, _ = check_new_file(written, new, kms_keys)
    if _content(footer) != _content(old):
        raise OutputError(
            f"{written.path}: the content of the new file differs from the old file.", hint=REFUSED_HINT
        )


def check_new_file(
    written: ByteSource, new: NewFileKeys, kms_keys: KmsKeys
) -> tuple[Footer, dict[ColumnPath, SecretBytes]]:
    """Open a new file as its readers will, and authenticate all modules, after the KMS has unwrapped its keys.

    Returns the footer and the DEKs of columns.
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
        file_encryption.authenticate_columns(written, footer, deks)
    return footer, deks


def _content(footer: Footer) -> tuple[object, ...]:
    rows = [row_group.num_rows for row_group in footer.row_groups]
    return footer.metadata.num_rows, rows, [leaf.path for leaf in footer.leaves]


@dataclass(eq=False, repr=False)
class Rekeying:
    """Re-encrypts files in place; see `Keytools.rekey_in_place`. Pickled for worker processes.

    Attributes:
        as_before: Whether files keep their AAD prefix, and encrypted columns stay encrypted.
        raises_not_encrypted: Whether a file that is not encrypted is an error.
    """

    keys: KeyService
    new_keys: KeyService
    table_name: str | None = None
    new_table_name: str | None = None
    aad_prefix: str | bytes | None = None
    as_before: bool = True
    key_values: Mapping[str, str] | None = None
    on_progress: Callable[[int], None] | None = None
    raises_not_encrypted: bool = False

    def run(self, path: FileLocation, options: RunOptions) -> RotationReport:
        """Re-encrypt a file, or all Parquet files under a folder."""
        self.raises_not_encrypted = file_or_folder(path).is_file
        self.keys.configuration.table_of_files(self.table_name)
        self.new_keys.configuration.select_table(self.new_table_name)
        # A KEK that leaked may be in the cache.
        self.keys.clear_caches()
        self.new_keys.clear_caches()
        return change_each_file(path, self.rekey, options)

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
                policy, new = keys_of_new_version(
                    self.new_keys, opened, self.new_table_name, self.key_values, as_before=self.as_before
                )
                if self.as_before:
                    _refuse_same_keys(opened, new.encryption)
        except NotEncryptedError:
            if self.raises_not_encrypted:
                raise NotEncryptedError(f"{location} is not encrypted.") from None
            return FileRotation(str(location), RotationOutcome.NOT_ENCRYPTED)
        return replaced_whole(
            location,
            tail,
            new,
            RotationOutcome.REKEYED,
            policy,
            lambda sink: self._write(opened, new, sink),
            lambda written: check_rekeyed(written, new, opened.footer, self.new_keys.kms_keys()),
        )

    def _open(self, location: FileLocation) -> tuple[OpenedFile, bool]:
        """Open a file of the old table, or one that an earlier run moved; return whether nothing is left to do."""
        # The file gets new keys, so sharing the old keys with another file does not matter.
        identities = FileIdentities(refuses=False)
        try:
            (opened,) = self.keys.open_files(
                [location], self.table_name, self.aad_prefix, again=False, identities=identities
            )
            opened.refuse_unencrypted()
            opened.refuse_denied(None)
        except (NotEncryptedError, KmsUnavailableError):
            raise
        except KeytoolsError:
            moved = None if self.as_before else self._moved(location)
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
            (opened,) = self.new_keys.open_files(
                [location], self.new_table_name, again=False, identities=identities
            )
            opened.refuse_denied(None)
            policy = policy_of(self.new_keys, self.new_table_name, opened.footer, (), self.key_values, opened.deks)
            return opened if self.new_keys.has_keys_of(opened, policy) else None
        except KeytoolsError:
            return None

    def _write(self, opened: OpenedFile, new: NewFileKeys, sink: ByteSink) -> None:
        with open_source(opened.location) as source:
            file_encryption.encrypt_opened(
                as_verified(opened, source),
                sink,
                opened.footer,
                opened.deks,
                new.encryption,
                on_progress=self.on_progress,
            )


def keys_of_new_version(
    keys: KeyService,
    opened: OpenedFile,
    table_name: str | None,
    key_values: Mapping[str, str] | None = None,
    *,
    as_before: bool = True,
) -> tuple[TablePolicy, NewFileKeys]:
    """Make the keys of a file that replaces another one; `key_values` has the values of placeholders in key names.

    With `as_before`, it keeps its AAD prefix, and is not less protected.
    """
    location, footer = opened.location, opened.footer
    policy = policy_of(keys, table_name, footer, (), key_values, opened.deks)
    existing_key_materials(location)  # Damaged key material is an error, and is not replaced.
    new = keys.new_file_keys(policy, location)
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
    """

    def check() -> None:
        check_unchanged(location, tail)
        if other_names_keep:
            _refuse_hard_links(location, other_names_keep)

    check()
    with replacement(location, check, has_new_keys=True, key_materials=new.key_materials) as pending:
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


# --- what is refused ---


def refuse_two_names(location: FileLocation, *, is_external: bool) -> None:
    """Refuse a link if the file's name matters: readers that do not use the link see another name.

    `is_external` says whether the file has, or gets, a key material file.
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


@dataclass(eq=False, repr=False)
class Encrypting:
    """Encrypts plaintext files in place; see `Keytools.encrypt_in_place`. Pickled for worker processes."""

    keys: KeyService
    table_name: str | None = None
    key_values: Mapping[str, str] | None = None
    on_progress: Callable[[int], None] | None = None

    def run(self, path: FileLocation, options: RunOptions) -> RotationReport:
        """Encrypt a file, or all Parquet files under a folder."""
        self.table_name, _ = self.keys.configuration.select_table(self.table_name)
        return change_each_file(path, self.encrypt, options)

    def encrypt(self, location: FileLocation) -> FileRotation:
        """Encrypt one file."""
        tail, envelope = read_tail(location)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            # As an earlier run leaves it. Any other encrypted file is an error.
            self._refuse_undecided(location, labelled_file(self.keys, location, self.table_name))
            if self.key_values:
                self._refuse_other_values(location)
            return FileRotation(str(location), RotationOutcome.ALREADY_ENCRYPTED)

        with open_source(location) as source:
            with unless_changed(location, tail):
                footer = file_encryption.read_plaintext_footer(source)
                folders = names_in_folders(location.path)
                policy = policy_of(self.keys, self.table_name, footer, folders, self.key_values)
                new = self.keys.new_file_keys(policy, location)
                refuse_two_names(location, is_external=new.key_materials is not None)
            return replaced_whole(
                location,
                tail,
                new,
                RotationOutcome.ENCRYPTED,
                policy,
                lambda sink: file_encryption.encrypt_opened(
                    source, sink, footer, {}, new.encryption, on_progress=self.on_progress
                ),
                # The plaintext is the only other copy: every page must decrypt before it goes.
                lambda written: check_rekeyed(written, new, footer, self.keys.kms_keys()),
                other_names_keep="the plaintext",
            )

    def _refuse_other_values(self, location: FileLocation) -> None:
        """Refuse a file from before that is not under the keys of the values that the caller gives."""
        (opened,) = self.keys.open_files([location], self.table_name)
        policy = policy_of(self.keys, self.table_name, opened.footer, (), self.key_values, opened.deks)
        if not self.keys.has_keys_of(opened, policy):
            raise ConfigurationError(
                f"{location} is encrypted, and not under the keys of the given values.",
                hint="Leave it out, or give it new keys: `rekey --in-place`.",
            )

    def _refuse_undecided(self, location: FileLocation, opened: OpenedFile) -> None:
        """Refuse a file from before with plaintext columns that the table does not decide about."""
        name, settings = self.keys.configuration.select_table(self.table_name)
        undecided = set(undecided_columns(settings, [column.path for column in opened.footer.columns]))
        names = [
            ".".join(column.path)
            for column in opened.footer.columns
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
