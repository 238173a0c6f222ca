"""Whole files: encrypted, decrypted, shown, checked and salvaged, without decoding a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from parquet_keytools import audit
from parquet_keytools.conformance import salvage, verification
from parquet_keytools.conformance.inspection import Inspection
from parquet_keytools.conformance.report import DataSetReport, FileReport
from parquet_keytools.facade import Configured
from parquet_keytools.files import conversion
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.storage.locations import FileLocation, PathLike


class WholeFiles(Configured):
    """Encrypts, decrypts, shows, checks and salvages whole files."""

    def encrypt_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        overwrite: bool = True,
        skip_existing: bool = False,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: conversion.Progress | None = None,
    ) -> conversion.FileResult:
        """Encrypt a plaintext Parquet file with the module encryptor; the target appears whole or not at all.

        Args:
            source: A path or URI.
            target: A path or URI.
            table_name: The table in the configuration; None where it has only one.
            overwrite: Whether what is there is replaced; else that is an error, also where it comes meanwhile.
            skip_existing: Whether a target is left alone that is newer than the source and says the same of rows,
                columns and statistics under the keys that are wanted now; the result says so.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            AlreadyEncryptedError: The source is encrypted; `rekey_file` is for that.
            ConfigurationError: The table's columns do not fit the file.
            OutputError: The target is the source, or cannot be written.
            ParquetFormatError: The source is damaged, or not a Parquet file.
            KmsError: A key cannot be wrapped.
        """
        return conversion.encrypt_file(
            self._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            on_progress,
            overwrite=overwrite,
            skip_existing=skip_existing,
        )

    def decrypt_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        overwrite: bool = True,
        skip_existing: bool = False,
        mode: int | None = None,
        identities: FileIdentities | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: conversion.Progress | None = None,
    ) -> conversion.FileResult:
        """Decrypt a Parquet file as a whole; the target appears whole or not at all.

        A file that is in plaintext already is copied, if the configuration says `plaintext_files: allow`.

        Args:
            source: A path or URI.
            target: A path or URI.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            overwrite: Whether what is there is replaced; else that is an error, also where it comes meanwhile.
            skip_existing: Whether a target is left alone that is newer than the source and says the same of rows,
                columns and statistics under the keys that are wanted now; the result says so.
            mode: Permissions of a local target, such as `0o640`; only its owner may read and write it by default.
            identities: One `FileIdentities(refuses=True)` for the files of a folder that are decrypted one by
                one: a file that shares data keys and file unique with another one is refused. Without, there is
                a warning.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            NotEncryptedError: The source is not encrypted.
            ColumnAccessDeniedError: The key of a column is unavailable.
            DecryptionError: A part of the source does not authenticate.
            ReusedKeysError: It shares data keys and file unique with another file.
            OutputError: The target is the source, or cannot be written.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
        """
        return conversion.decrypt_file(
            self._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            aad_prefix,
            on_progress,
            overwrite=overwrite,
            skip_existing=skip_existing,
            mode=mode,
            identities=identities,
        )

    def rekey_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        new_table_name: str | None = None,
        new_keytools: Self | None = None,
        aad_prefix: str | bytes | None = None,
        overwrite: bool = True,
        skip_existing: bool = False,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: conversion.Progress | None = None,
    ) -> conversion.FileResult:
        """Encrypt an encrypted Parquet file with new data keys, and as another table says if one is named.

        Args:
            source: A path or URI.
            target: A path or URI.
            table_name: The table of the source, whose AAD prefix it must have.
            new_table_name: The table whose policy the target follows; `table_name` if not given.
            new_keytools: Of another configuration, whose keys and tables the target uses.
            aad_prefix: The AAD prefix that the source must have.
            overwrite: Whether what is there is replaced; else that is an error, also where it comes meanwhile.
            skip_existing: Whether a target is left alone that is newer than the source and says the same of rows,
                columns and statistics under the keys that are wanted now; the result says so.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            KeytoolsError: As `decrypt_file` and `encrypt_file`.
        """
        return conversion.rekey_file(
            self._keys,
            (new_keytools or self)._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            new_table_name or (table_name if new_keytools is None else None),
            aad_prefix,
            on_progress,
            overwrite=overwrite,
            skip_existing=skip_existing,
        )

    # --- inspection and verification ---

    def inspect_file(
        self,
        path: PathLike | FileLocation,
        *,
        with_keys: bool = True,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> Inspection:
        """Show how a file is protected, from its footer, and with keys from the headers of its pages.

        What is wrong with the file or its keys is reported in the result.

        Args:
            path: A path or URI.
            with_keys: Whether to open what is encrypted; else only what anyone can see is shown.
            table_name: Its table, whose AAD prefix it has; None where the configuration has only one.
            aad_prefix: The AAD prefix, for files that do not store theirs.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            OSError: The file cannot be read.
        """
        location = FileLocation.resolve(path, filesystem)
        return verification.inspect_file(self._keys, location, table_name, aad_prefix, with_keys=with_keys)

    def verify_file(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> FileReport:
        """Check a file against all rules: every module is authenticated, every number compared.

        What is wrong is in the report; so is what could not be checked because a key was refused.

        Args:
            path: A path or URI.
            table_name: Its table, whose policy it must follow; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            OSError: The file cannot be read.
        """
        location = FileLocation.resolve(path, filesystem)
        return verification.verify_file(self._keys, location, table_name, aad_prefix)

    def verify_folder(
        self,
        folder: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        part_count: int | None = None,
        filesystem: Any = None,
        on_progress: Callable[[FileReport], None] | None = None,
        processes: int | None = 1,
    ) -> DataSetReport:
        """Check all files of a folder as `verify_file` does, and all of them as one data set.

        Args:
            folder: A path or URI.
            table_name: Their table; None where the configuration has only one.
            aad_prefix: The AAD prefix that every file must have.
            part_count: How many parts there must be, numbered from 0; None where that is not known.
            filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the report of each file.
            processes: How many processes share the small files; None takes as many as pay. More than one need a
                `Keytools` that can be pickled, and files that other processes see; otherwise this process does
                all.

        Raises:
            ValueError: `processes` is less than 1.
            WorkerProcessEndedError: A worker process was killed.
            OSError: The folder cannot be read.
        """
        location = FileLocation.resolve(folder, filesystem)
        return verification.verify_folder(
            self._keys,
            location,
            table_name,
            aad_prefix,
            part_count=part_count,
            on_progress=on_progress,
            processes=processes,
        )

    def salvage_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        overwrite: bool = True,
        mode: int | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: conversion.Progress | None = None,
    ) -> salvage.SalvageResult:
        """Decrypt the row groups of a damaged file that are whole; the result lists what is missing.

        Args:
            source: A path or URI.
            target: A path or URI.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            overwrite: Whether what is there is replaced; else that is an error, also where it comes meanwhile.
            mode: Permissions of a local target, such as `0o640`; only its owner may read and write it by default.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            DecryptionError: The footer is damaged, or no row group is whole.
            KeytoolsError: As `decrypt_file`.
        """
        location = FileLocation.resolve(source, source_filesystem)
        with audit.about(location):
            return salvage.salvage_file(
                self._keys,
                location,
                FileLocation.resolve(target, target_filesystem),
                table_name,
                aad_prefix,
                on_progress,
                overwrite=overwrite,
                mode=mode,
            )
