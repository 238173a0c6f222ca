"""The facade that users import: one configuration, and all that can be done with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools import audit, file_verification, module_files, salvage
from parquet_keytools.arrow import reading, writing
from parquet_keytools.arrow.decryption_properties import Filters, make_decryption_properties
from parquet_keytools.arrow.encryption_properties import ArrowEncryptor, arrow_limits
from parquet_keytools.arrow.leaf_paths import leaf_paths
from parquet_keytools.arrow.output_filesystem import Encrypt
from parquet_keytools.config.key_names import check_moves
from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.config.mistakes import Mistake
from parquet_keytools.config.settings import Configuration
from parquet_keytools.conformance.inspection import Inspection
from parquet_keytools.conformance.report import DataSetReport, FileReport
from parquet_keytools.errors import (
    ConfigurationError,
    FileChangedError,
    OutputError,
    UnsupportedByArrowError,
)
from parquet_keytools.key_service import KeyService
from parquet_keytools.keys.kek_cache import Clock
from parquet_keytools.keys.material_store import write_key_materials
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.opened_file import OpenedFile
from parquet_keytools.rotation import rekeying, restoring
from parquet_keytools.rotation.data_set_rotation import OnFile
from parquet_keytools.rotation.inventory import FileKeyUses
from parquet_keytools.rotation.inventory_without_kms import InventoryWithoutKms
from parquet_keytools.rotation.report import RotationReport
from parquet_keytools.rotation.request import RotationRequest, list_keys, master_key_id, prefix_of, run_rotation
from parquet_keytools.rotation.restored_check import RestoredCheck
from parquet_keytools.storage import FileLocation, PathLike

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

_LOOKS = 8
"""How often a file is opened for one read, where others change it all the time."""


class Keytools:
    """Encrypts and decrypts Parquet files as a configuration says.

    May be used from any number of threads, after a fork, and pickled to worker processes; a pickle holds the
    configuration without its secrets, and no key.
    """

    def __init__(
        self, configuration: Configuration, *, kms: KmsClient | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Make one; the KMS is asked nothing yet.

        Args:
            configuration: Made by `load_configuration` or `parse_configuration`.
            kms: A KMS client to use in place of the configuration's; a configuration that was made with it
                needs no `kms`.
            clock: Seconds for the expiry of caches.

        Raises:
            ConfigurationError: The configuration names keys that do not exist.
        """
        self.configuration = configuration
        self._given_kms = kms is not None
        self._keys = KeyService(configuration, kms, clock)
        self._arrow_encryptor = None
        if self._keys.kms is not None:
            instance_id = configuration.kms.instance_id if configuration.kms is not None else "DEFAULT"
            self._arrow_encryptor = ArrowEncryptor(self._keys.kms, clock, instance_id)

    @classmethod
    def from_yaml(cls, path: PathLike, *, kms: KmsClient | None = None) -> Self:
        """Load a configuration from a YAML file.

        Args:
            path: The file.
            kms: A KMS client to use; with it the file needs no `kms`, and no client is made of what it says there.

        Raises:
            ConfigurationError: It has mistakes; the text says in which line, and what to write instead.
        """
        return cls(load_configuration(path, kms=kms), kms=kms)

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any], *, kms: KmsClient | None = None) -> Self:
        """Take a configuration from a mapping with the same content as a YAML file.

        Args:
            document: The mapping.
            kms: As with `from_yaml`.

        Raises:
            ConfigurationError: It has mistakes.
        """
        return cls(parse_configuration(document, kms=kms), kms=kms)

    @property
    def kms(self) -> KmsClient | None:
        """The KMS client; None where the configuration has data keys only."""
        return self._keys.kms

    # --- pyarrow's own readers and writers ---

    def encryption_properties(
        self, table_name: str | None, schema: pa.Schema, path: PathLike, *, filesystem: Any = None
    ) -> pq.FileEncryptionProperties:
        """Return encryption properties for one file that pyarrow writes.

        They serve one file: two files with the same properties would share DEKs and file unique.

        Args:
            table_name: The table in the configuration; None where it has only one.
            schema: Of the data.
            path: Where the file will be written.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            UnsupportedByArrowError: pyarrow cannot do what the table asks for; `write_table` can.
            OutputError: External key material would make the file that is there unreadable.
            KmsError: A key cannot be wrapped.
        """
        location = FileLocation.resolve(path, filesystem)
        policy = self._keys.policy(table_name, leaf_paths(schema))
        if policy.table.key_material == "external" and location.info().type != pafs.FileType.NotFound:
            raise OutputError(
                f"{location} is there: it would lose its key material before it is replaced.",
                hint="Use Keytools.write_table, which replaces both safely, or remove the file first.",
            )
        if self._arrow_encryptor is None:
            raise UnsupportedByArrowError(arrow_limits(policy), hint="Keytools.write_table can.")
        with audit.about(location):
            encryption = self._arrow_encryptor.encryption(policy, location.name)
        if encryption.key_materials is not None:
            write_key_materials(location, encryption.key_materials)
        return encryption.properties

    def decryption_properties(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
    ) -> pq.FileDecryptionProperties:
        """Return decryption properties for one file; its keys are unwrapped here, not while pyarrow reads.

        Where the KMS refuses the keys of some columns, `pyarrow.parquet.read_table` reads the others, and
        refuses these with our error. Other readers of pyarrow would hang or abort on them: for these, say in
        `columns` what will be read. In this case make new properties for each read: Arrow keeps what it was
        told for the first one. `read_table` and `dataset` of this class have none of these limits.

        Args:
            path: The file.
            columns: The columns that will be read; None for those that pyarrow is asked for.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            NotEncryptedError: The file is not encrypted.
            ColumnAccessDeniedError: One of `columns` cannot be read.
            UnsupportedByArrowError: pyarrow cannot decrypt the file; `read_table` can.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
        """
        opened = self._open(FileLocation.resolve(path, filesystem), table_name, aad_prefix)
        return make_decryption_properties(opened, columns)

    # --- tables ---

    def write_table(
        self,
        table: pa.Table,
        path: PathLike,
        *,
        table_name: str | None = None,
        filesystem: Any = None,
        **options: Any,
    ) -> writing.WriteResult:
        """Write a table as an encrypted Parquet file, with everything that its configuration asks for.

        The file appears whole under its name or not at all. pyarrow encrypts it where it can do what the table
        asks for, the module encryptor where it cannot; the result says which.

        Args:
            table: The data.
            path: A path, or a URI such as `s3://bucket/key.parquet`.
            table_name: The table in the configuration; None where it has only one.
            filesystem: A `pyarrow.fs` or fsspec file system.
            options: Further arguments of `pyarrow.parquet.write_table`, such as `compression`.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
            OutputError: The file cannot be written there.
        """
        if "encryption_properties" in options:
            raise TypeError("write_table makes the encryption properties itself")
        policy = self._keys.policy(table_name, leaf_paths(table.schema, options))
        location = FileLocation.resolve(path, filesystem)
        with audit.about(location):
            return writing.write_table(
                table,
                location,
                policy,
                self._arrow_encryptor,
                self._encrypt(policy.table_name),
                options,
            )

    def read_table(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        filters: Filters = None,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
        **options: Any,
    ) -> pa.Table:
        """Read an encrypted Parquet file, or a folder of them.

        Args:
            path: A path or URI.
            columns: Names of columns; None reads all.
            filters: As `pyarrow.parquet.read_table` takes them.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            options: Further arguments of `pyarrow.parquet.read_table`.

        Raises:
            ColumnAccessDeniedError: The keys of columns that are asked for cannot be had.
            NotEncryptedError: The file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
        """
        location = FileLocation.resolve(path, filesystem)
        for _ in range(_LOOKS - 1):
            # Files are replaced while they are read. A new look tells that from an attack.
            with contextlib.suppress(FileChangedError):
                return self._read_table(location, columns, filters, table_name, aad_prefix, dict(options))
        return self._read_table(location, columns, filters, table_name, aad_prefix, options)

    def _read_table(
        self,
        location: FileLocation,
        columns: Sequence[str] | None,
        filters: Filters,
        table_name: str | None,
        aad_prefix: str | None,
        options: dict[str, Any],
    ) -> pa.Table:
        """Read a file or a folder as it is now; see `read_table`."""
        if location.info().type == pafs.FileType.Directory:
            files = self._open_dataset_files(location, table_name, aad_prefix)
            partitioning, schema = options.pop("partitioning", "hive"), options.pop("schema", None)
            if options:
                raise TypeError(f"not taken for a folder: {', '.join(options)}")
            dataset = self._dataset(location, files, columns, filters, partitioning, schema)
            hidden = reading.denied_columns(files) if self._hides_denied else frozenset[str]()
            try:
                return reading.dataset_to_table(dataset, columns, filters, hidden)
            except OSError:
                # pyarrow does not say which module of which file failed. Going over them again does.
                for opened in files:
                    module_files.decrypted_buffer(opened, columns if filters is None else None)
                raise
        return reading.read_table(
            self._open(location, table_name, aad_prefix),
            module_files.decrypted_buffer,
            columns=columns,
            filters=filters,
            hide_denied=self._hides_denied,
            options=options,
        )

    # --- data sets ---

    def write_dataset(
        self,
        data: Any,
        folder: PathLike,
        *,
        table_name: str | None = None,
        partitioning: Any = None,
        partitioning_flavor: str | None = None,
        filesystem: Any = None,
        write_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write a data set of encrypted files; they appear when all are complete.

        Args:
            data: A table, a data set, or what else `pyarrow.dataset.write_dataset` takes.
            folder: A path or URI.
            table_name: The table in the configuration; None where it has only one.
            partitioning: Names of columns, or a pyarrow partitioning.
            partitioning_flavor: `hive` unless a partitioning says otherwise.
            filesystem: A `pyarrow.fs` or fsspec file system.
            write_options: For the Parquet writer, such as `compression`.
            options: Further arguments of `pyarrow.dataset.write_dataset`.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
        """
        location = FileLocation.resolve(folder, filesystem)
        with audit.about(location):
            writing.write_dataset(
                data,
                location,
                lambda schema: self._keys.policy(table_name, leaf_paths(schema, dict(write_options or {}))),
                self._arrow_encryptor,
                self._encrypt(table_name),
                self._keys.wrap_keks,
                partitioning=partitioning,
                partitioning_flavor=partitioning_flavor,
                write_options=dict(write_options or {}),
                options=options,
            )

    def dataset(
        self,
        folder: PathLike,
        *,
        columns: Sequence[str] | None = None,
        filters: Filters = None,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        partitioning: Any = "hive",
        filesystem: Any = None,
        schema: pa.Schema | None = None,
    ) -> ds.Dataset:
        """Return a pyarrow data set of encrypted files: projection, filters, batches.

        All keys are unwrapped here, together. Columns whose keys are refused are left out of its schema where
        the configuration says `denied_columns: hide`, or where `columns` does not name them.

        Args:
            folder: A path or URI of a folder, or of one file.
            columns: The columns that will be read or filtered; None means all.
            filters: What the data will be filtered by.
            table_name: Its table; None where the configuration has only one.
            aad_prefix: The AAD prefix that every file must have.
            partitioning: As `pyarrow.dataset.dataset` takes it.
            filesystem: A `pyarrow.fs` or fsspec file system.
            schema: Of the data set; that of its first file if not given.

        Raises:
            ColumnAccessDeniedError: The keys of columns that are asked for cannot be had.
            NotEncryptedError: A file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with a file or its keys.
        """
        location = FileLocation.resolve(folder, filesystem)
        for _ in range(_LOOKS - 1):
            # As `read_table` does, while the schema is read; who then reads a file that was replaced is told.
            with contextlib.suppress(FileChangedError):
                files = self._open_dataset_files(location, table_name, aad_prefix)
                return self._dataset(location, files, columns, filters, partitioning, schema)
        files = self._open_dataset_files(location, table_name, aad_prefix)
        return self._dataset(location, files, columns, filters, partitioning, schema)

    # --- whole files, without decoding a value ---

    def encrypt_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: module_files.Progress | None = None,
    ) -> module_files.FileResult:
        """Encrypt a plaintext Parquet file with the module encryptor; the target appears whole or not at all.

        Args:
            source: A path or URI.
            target: A path or URI; what is there is replaced.
            table_name: The table in the configuration; None where it has only one.
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
        return module_files.encrypt_file(
            self._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            on_progress,
        )

    def decrypt_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: module_files.Progress | None = None,
    ) -> module_files.FileResult:
        """Decrypt a Parquet file as a whole; the target appears whole or not at all.

        Args:
            source: A path or URI.
            target: A path or URI; what is there is replaced.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            NotEncryptedError: The source is not encrypted.
            ColumnAccessDeniedError: The key of a column cannot be had.
            DecryptionError: A part of the source does not authenticate.
            OutputError: The target is the source, or cannot be written.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
        """
        return module_files.decrypt_file(
            self._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            aad_prefix,
            on_progress,
        )

    def rekey_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        new_table_name: str | None = None,
        new_keytools: Keytools | None = None,
        aad_prefix: str | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: module_files.Progress | None = None,
    ) -> module_files.FileResult:
        """Encrypt an encrypted Parquet file with new data keys, and as another table says if one is named.

        Args:
            source: A path or URI.
            target: A path or URI; what is there is replaced.
            table_name: The table of the source, whose AAD prefix it must have.
            new_table_name: The table whose policy the target follows; `table_name` if not given.
            new_keytools: Of another configuration, whose keys and tables the target uses.
            aad_prefix: The AAD prefix that the source must have.
            source_filesystem: A `pyarrow.fs` or fsspec file system.
            target_filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            KeytoolsError: As `decrypt_file` and `encrypt_file`.
        """
        return module_files.rekey_file(
            self._keys,
            (new_keytools or self)._keys,
            FileLocation.resolve(source, source_filesystem),
            FileLocation.resolve(target, target_filesystem),
            table_name,
            new_table_name or (table_name if new_keytools is None else None),
            aad_prefix,
            on_progress,
        )

    def rekey_in_place(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        new_table_name: str | None = None,
        new_keytools: Keytools | None = None,
        aad_prefix: str | None = None,
        verify: bool = True,
        journal: PathLike | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: Callable[[rekeying.FileRekeying], None] | None = None,
        on_progress: module_files.Progress | None = None,
    ) -> rekeying.RekeyReport:
        """Encrypt a file, or all files under a folder, with new data keys, each in its place.

        Each file is written anew beside the old one, checked, and takes its place in one step, only while the old
        one is what was read. Without another table or other tools a file keeps its AAD prefix, and nothing that is
        encrypted comes to lie in plaintext.

        Args:
            path: A path or URI of a file or a folder.
            table_name: The table of the files, whose policy and AAD prefix they have.
            new_table_name: The table whose policy they follow from now on; `table_name` if not given.
            new_keytools: Of another configuration, whose keys and tables they use from now on.
            aad_prefix: The AAD prefix that they must have.
            verify: Authenticate every page of the new file; else its footer and metadata of columns alone.
            journal: A local path for a journal: a run that was cut off then goes on when it is called again.
                Without one, all files are encrypted anew.
            filesystem: A `pyarrow.fs` or fsspec file system.
            keep_results: Whether the report has all files, or only those that failed.
            on_file: Called with what became of each file.
            on_progress: Called with the number of bytes after each write, by any thread.

        Raises:
            FileNotFoundError: There is no such file or folder.
            ConfigurationError: There is no such table.
            KeytoolsError: The one file failed; what fails of a folder is in the report.
        """
        is_other = new_keytools is not None
        # KEKs of this process may be what leaked.
        self.clear_caches()
        request = rekeying.RekeyRequest(
            table_name=table_name,
            new_table_name=new_table_name or (None if is_other else table_name),
            aad_prefix=aad_prefix,
            as_before=new_table_name in (None, table_name) and not is_other,
            verify=verify,
            journal=None if journal is None else Path(journal),
            keep_results=keep_results,
            on_file=on_file,
            on_progress=on_progress,
        )
        return rekeying.rekey_data_set(
            self._keys, (new_keytools or self)._keys, FileLocation.resolve(path, filesystem), request
        )

    # --- inspection and verification ---

    def inspect_file(
        self,
        path: PathLike | FileLocation,
        *,
        with_keys: bool = True,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
    ) -> Inspection:
        """Show how a file is protected, from its footer, and with keys from the headers of its pages.

        Whatever is wrong with the file or its keys is told in what is returned.

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
        return file_verification.inspect_file(self._keys, location, table_name, aad_prefix, with_keys=with_keys)

    def verify_file(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
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
        return file_verification.verify_file(self._keys, location, table_name, aad_prefix)

    def verify_folder(
        self,
        folder: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        part_count: int | None = None,
        filesystem: Any = None,
        on_progress: Callable[[FileReport], None] | None = None,
    ) -> DataSetReport:
        """Check all files of a folder as `verify_file` does, and all of them as one data set.

        Args:
            folder: A path or URI.
            table_name: Their table; None where the configuration has only one.
            aad_prefix: The AAD prefix that every file must have.
            part_count: How many parts there must be, numbered from 0; None where that is not known.
            filesystem: A `pyarrow.fs` or fsspec file system.
            on_progress: Called with the report of each file.

        Raises:
            OSError: The folder cannot be read.
        """
        location = FileLocation.resolve(folder, filesystem)
        return file_verification.verify_folder(
            self._keys, location, table_name, aad_prefix, part_count=part_count, on_progress=on_progress
        )

    def salvage_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: module_files.Progress | None = None,
    ) -> salvage.SalvageResult:
        """Decrypt the row groups of a damaged file that are whole; the result lists what is missing.

        Args:
            source: A path or URI.
            target: A path or URI; what is there is replaced.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
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
            )

    # --- Spark's own writer ---

    def spark_options(
        self, table_name: str | None, schema: StructType, *, partition_by: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the options with which Spark writes a frame as a table asks for.

        They go into a session that was made with `parquet_keytools.spark.configure` and this configuration:
        `frame.write.options(**keytools.spark_options("flights", frame.schema)).parquet(path)`.

        Args:
            table_name: The table in the configuration; None where it has only one.
            schema: Of the frame.
            partition_by: The columns of the write's own `partitionBy`, whose values are not protected.

        Raises:
            ConfigurationError: The table's columns do not fit the schema, or one of them names folders.
            UnsupportedBySparkError: Spark's writer cannot do what the table asks for.
        """
        from parquet_keytools.spark.spark_columns import leaf_paths as spark_leaf_paths
        from parquet_keytools.spark.table_options import table_options

        if self._given_kms:
            raise ConfigurationError(
                "a KMS client that was passed in cannot be sent to Spark's executors.",
                hint="Say under `kms:` in the configuration how to make the client.",
            )
        return table_options(self._keys, table_name, spark_leaf_paths(schema), partition_by)

    # --- rotation of master keys ---

    def rotate(
        self,
        path: PathLike | FileLocation,
        *,
        moves: Mapping[str, str] | None = None,
        only_master_keys: Collection[str] | None = None,
        older_than: str | None = None,
        new_keks: bool = False,
        keep_old: bool | None = None,
        dry_run: bool = False,
        journal: PathLike | None = None,
        to: Keytools | KmsClient | None = None,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
    ) -> RotationReport:
        """Wrap the keys of a file, or of all files under a folder, anew; their data stays as it is.

        Without options: with the current version of their master keys, where they are not known to be. Each file
        is replaced in one step after its new keys were proven, and what fails with one is in the report. A run
        that was cut off goes on when it is called again in the same way.

        Args:
            path: A path or URI of a file or a folder.
            moves: Old master key -> the one that takes its place; names of the configuration, or identifiers.
                Then other master keys stay as they are. None takes those of the configuration.
            only_master_keys: The master keys that are rotated.
            older_than: Only keys that an older version wrapped, or one that nobody can tell.
            new_keks: Make fresh KEKs, as after a leak of one; without, KEKs stay the same.
            keep_old: Keep the old keys beside the files, for `undo_rotation`, until `drop_old_keys`; None does as
                the configuration says.
            dry_run: Change nothing; the report says what would change and what the KMS would be asked for.
            journal: A local path for the journal; local folders keep their own if it is not given.
            to: Another KMS, or the tools of another configuration, whose master keys wrap from now on. A journal
                tells configurations apart, and not KMS clients without one.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            keep_results: Whether the report has all files, or only those that failed: a million take memory.
            on_file: Called with what became of each file.

        Raises:
            ConfigurationError: There is no KMS, or the moves are not possible.
            KmsError: A master key to move to does not exist, or is disabled.
            FileNotFoundError: There is no such file or folder.
            OutputError: The journal is of a rotation with other parameters, or cannot be written.
        """
        request = RotationRequest(
            moves=self._configured_moves(to) if moves is None else moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            keep_old=self.configuration.rotation.keep_old if keep_old is None else keep_old,
            dry_run=dry_run,
            journal=None if journal is None else Path(journal),
            new_kms=to.kms if isinstance(to, Keytools) else to,
            new_configuration=to.configuration if isinstance(to, Keytools) else None,
            table_name=table_name,
            aad_prefix=aad_prefix,
            keep_results=keep_results,
            on_file=on_file,
        )
        return run_rotation(self._keys, FileLocation.resolve(path, filesystem), request)

    def _configured_moves(self, to: Keytools | KmsClient | None) -> Mapping[str, str]:
        moves = self.configuration.rotation.moves
        if moves and to is not None:
            mistake = Mistake(("rotation", "moves"), "these moves are within one KMS, and another one is named.")
            raise self.configuration.error_for([mistake])
        if moves and self.kms is not None:
            check_moves(self.configuration, self.kms.master_key_ids())
        return moves

    def undo_rotation(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
    ) -> RotationReport:
        """Put back the keys that `rotate` kept of a file, or of all files under a folder.

        A file that changed since is left as it is, and reported; so is one whose old keys the KMS does not unwrap.
        Several rotations are undone one a call.

        Args:
            path: A path or URI of a file or a folder.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        check = RestoredCheck.make(self._keys, prefix_of(self._keys, table_name, aad_prefix))
        return restoring.restore_data_set(FileLocation.resolve(path, filesystem), check)

    def drop_old_keys(self, path: PathLike | FileLocation, *, filesystem: Any = None) -> int:
        """Remove the keys that `rotate` kept of a file, or of all files under a folder.

        Args:
            path: A path or URI of a file or a folder.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Returns:
            How many kept files were removed.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        return restoring.drop_data_set(FileLocation.resolve(path, filesystem))

    def key_inventory(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
    ) -> Iterator[FileKeyUses]:
        """Yield which master keys and versions a file, or each file under a folder, depends on.

        Args:
            path: A path or URI of a file or a folder.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        location = FileLocation.resolve(path, filesystem)
        if self.kms is None:

            def prefix_of(file: FileLocation, stored: bytes | None) -> bytes | None:
                return self._keys.expected_aad_prefix(file, table_name, aad_prefix, stored)

            return InventoryWithoutKms(None, None, self._keys.data_keys, prefix_of).list(location)
        return list_keys(self._keys, location, table_name, aad_prefix)

    def files_using(
        self,
        key: str,
        path: PathLike | FileLocation,
        *,
        version: str | None = None,
        table_name: str | None = None,
        aad_prefix: str | None = None,
        filesystem: Any = None,
    ) -> Iterator[FileKeyUses]:
        """Yield the files that need a master key, or a version of it, and those of which that cannot be told.

        Args:
            key: Name of the master key in the configuration, or its identifier.
            path: A path or URI of a file or a folder.
            version: The version; None means any.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        wanted = master_key_id(self.configuration, key)
        for file in self.key_inventory(path, table_name=table_name, aad_prefix=aad_prefix, filesystem=filesystem):
            if file.depends_on(wanted, version) is not False:
                yield file

    # --- the rest ---

    def clear_caches(self) -> None:
        """Forget all keys: the KMS is asked again, and new files get fresh KEKs."""
        self._keys.clear_caches()
        if self._arrow_encryptor is not None:
            self._arrow_encryptor.clear_cache()

    def close(self) -> None:
        """Give back the connections of the KMS client, and forget all keys."""
        self.clear_caches()
        if self._keys.kms is not None:
            self._keys.kms.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given_kms:
            raise ConfigurationError(
                "a Keytools whose KMS client was passed in cannot be pickled.",
                hint="Say under `kms:` in the configuration how to make the client.",
            )
        if getattr(self._keys.kms, "has_generated_keys", False):
            raise ConfigurationError(
                "a Keytools with generated master keys cannot be pickled: the other process would have others.",
                hint="Write the keys of the in_memory KMS into the configuration, or use a keystore.",
            )
        return type(self), (self.configuration,)

    def __repr__(self) -> str:
        backend = self._keys.kms.backend if self._keys.kms is not None else "no KMS"
        return f"<Keytools, {backend}, tables {sorted(self.configuration.tables)}>"

    @property
    def _hides_denied(self) -> bool:
        return self.configuration.reading.denied_columns == "hide"

    def _open_dataset_files(
        self, folder: FileLocation, table_name: str | None, aad_prefix: str | None
    ) -> list[OpenedFile]:
        with audit.about(folder):
            return self._keys.open_files(reading.dataset_files(folder), table_name, aad_prefix)

    def _dataset(
        self,
        folder: FileLocation,
        files: list[OpenedFile],
        columns: Sequence[str] | None,
        filters: Filters,
        partitioning: Any,
        schema: pa.Schema | None = None,
    ) -> ds.Dataset:
        return reading.open_dataset(
            folder,
            files,
            module_files.decrypted_buffer,
            columns=columns,
            filters=filters,
            hide_denied=self._hides_denied,
            partitioning=partitioning,
            schema=schema,
        )

    def _encrypt(self, table_name: str | None) -> Encrypt:
        return lambda source, pending: module_files.encrypt_pending(self._keys, table_name, source, pending)

    def _open(self, location: FileLocation, table_name: str | None, aad_prefix: str | None) -> OpenedFile:
        (opened,) = self._keys.open_files([location], table_name, aad_prefix)
        return opened
