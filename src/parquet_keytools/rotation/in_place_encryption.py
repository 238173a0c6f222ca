"""Plaintext files encrypted in place: each is replaced when its encrypted form is complete, synced and proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parquet_keytools.config.key_policy import HOW_TO_DECIDE, undecided_columns
from parquet_keytools.encryption import file_encryptor
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import (
    AlreadyEncryptedError,
    ConfigurationError,
    KeytoolsError,
    OutputError,
    StorageFailedError,
)
from parquet_keytools.files.conversion import Contents, labelled_contents, policy_of
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.replacement import NewKeyMaterial, replacement
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.rotation.data_set_run import InPlaceRequest, change_each_file
from parquet_keytools.rotation.file_keys import check_unchanged, read_tail
from parquet_keytools.rotation.rekeying import check_rekeyed, refuse_two_names
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.walk import file_or_folder


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

    def encrypt(self, location: FileLocation, locked_folder: str | None) -> FileRotation:
        """Encrypt one file.

        Raises:
            ChangedMeanwhileError: The file changed at the same time; it is not replaced.
            KeytoolsError: The file failed and is unchanged.
        """
        tail, envelope = read_tail(location)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            # As an earlier run leaves it. Any other encrypted file is an error.
            self._refuse_undecided(location, labelled_contents(self._keys, location, self._request.table_name))
            return FileRotation(str(location), RotationOutcome.ALREADY_ENCRYPTED)

        def check() -> None:
            check_unchanged(location, tail)
            _refuse_hard_links(location)

        _refuse_hard_links(location)
        with open_source(location) as source:
            try:
                footer = file_encryptor.read_plaintext_footer(source)
            except AlreadyEncryptedError:
                check_unchanged(location, tail)
                raise
            policy = policy_of(self._keys, self._request.table_name, footer, names_in_folders(location.path))
            new = self._keys.new_file_keys(policy, location)
            refuse_two_names(location, is_external=new.key_materials is not None)
            with replacement(
                location,
                check,
                key_material=NewKeyMaterial(location, new.key_materials),
                locked_folder=locked_folder,
            ) as pending:
                try:
                    with pending.open_sink() as sink:
                        file_encryptor.encrypt_opened(
                            source, sink, footer, {}, new.encryption, on_progress=self._request.on_progress
                        )
                except StorageFailedError:
                    raise
                except (KeytoolsError, OSError):
                    check_unchanged(location, tail)
                    raise
                # The plaintext is the only other copy: every page must decrypt before it goes.
                with pending.open_written() as written:
                    check_rekeyed(written, new, footer, self._keys.kms_keys(), all_modules=True)
                    size_bytes = written.size_bytes
        return FileRotation(
            str(location),
            RotationOutcome.ENCRYPTED,
            bytes_written=size_bytes,
            old_size_bytes=tail.size_bytes,
            new_size_bytes=size_bytes,
            plaintext_columns=policy.plaintext_columns,
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


def _refuse_hard_links(location: FileLocation) -> None:
    """Refuse a file with several hard links: its other names would still lead to the plaintext."""
    if location.is_local and (names := Path(location.path).stat().st_nlink) > 1:
        raise OutputError(
            f"{location} has {names} names (hard links), and the others would keep the plaintext.",
            hint="Remove the other names, or encrypt into another folder.",
        )
