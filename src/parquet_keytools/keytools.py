"""The facade that users import: one configuration, and all that can be done with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

import pyarrow as pa

from parquet_keytools import audit
from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.config.settings import Configuration, HashKeySettings
from parquet_keytools.conformance import verification
from parquet_keytools.conformance.data_set import ListKeeper, updated_list
from parquet_keytools.conformance.file_keys import TableFiles
from parquet_keytools.conformance.inspection import Inspection
from parquet_keytools.conformance.report import DataSetReport, FileReport
from parquet_keytools.erasure.key_erasure import Erasure
from parquet_keytools.erasure.rewrite import FileRewrite, rewrite_rows
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files import conversion
from parquet_keytools.files.denied_columns import unwrapped_secret, wrapped_secret
from parquet_keytools.files.key_service import KeyService, TenantKey, create_tenant_keys
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.keys.key_wrapping import Clock
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation import rekeying
from parquet_keytools.rotation.data_set_run import OnFile, RunOptions
from parquet_keytools.rotation.file_keys import same_master_key
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory
from parquet_keytools.rotation.report import FileRotation, RotationReport
from parquet_keytools.rotation.rotate import Rewrapping, master_key_id, plan_rotation, prefix_of, rotate_data_set
from parquet_keytools.runtime.presentation import Summarised, install_hint
from parquet_keytools.storage.locations import FileLocation, PathLike, PathOrPaths
from parquet_keytools.tables import writing
from parquet_keytools.tables.properties import ArrowEncryptor, decryption_properties, polars_decryption
from parquet_keytools.tables.writing import EncryptedParquetWriter, WriteResult
from parquet_keytools.view.plain_file import PlainFiles, PlainInput

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

    from parquet_keytools.scan.scanner import ScanReport
    from parquet_keytools.tables.reading import Filters, ReadOptions, ReadRequest
    from parquet_keytools.view.file_system import KeytoolsFileSystem


class Keytools(Summarised):
    """Encrypts and decrypts Parquet files according to a configuration.

    An object may be used by any number of threads, and after a fork. It may be pickled to worker processes: the
    pickle holds the configuration without its secrets, and no key.

    Where a method does not say otherwise, its arguments mean:

    - `path`, `folder`, `source`, `target`: a path, or a URI such as `s3://bucket/key.parquet`.
    - `filesystem`, `source_filesystem`, `target_filesystem`: a `pyarrow.fs` or fsspec file system, in which the
      paths are.
    - `table_name`: the table of the files in the configuration, whose policy they follow and whose AAD prefix they
      must have; None if the configuration has only one.
    - `aad_prefix`: the AAD prefix that files must have that are read; None for the prefix of the table.
    - `overwrite`: whether an existing file is replaced. If not, a file is an error, even one that appears during
      the work.
    - `key_values`: placeholder in names of keys -> value, such as `{"tenant": "acme"}`, for all files.
    - `on_progress`: called with the number of bytes after each write, from any thread.
    - `keep_results`: whether a report lists all files, or only failed ones: a million files take memory.
    - `on_file`: called with the outcome of each file.
    - `follow_links`: whether to change files outside `path` that links lead to. If not, they count as failed.
    - `list_key`: the master key of lists of files; None for the footer key of the table. Anyone who can
      unwrap keys with it can forge a list.

    A file or folder that does not exist is a `FileNotFoundError`, a folder without Parquet files a
    `NoParquetFilesError`. Whatever else is wrong with a file or its keys is a subclass of `KeytoolsError`.

    Attributes:
        configuration: The configuration.
    """

    def __init__(
        self, configuration: Configuration, *, kms: KmsClient | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Take a configuration; no KMS call is made yet.

        Args:
            configuration: Made by `load_configuration` or `parse_configuration`.
            kms: A KMS client to use instead of the one that the configuration describes. A configuration that was
                loaded with it needs no `kms`.
            clock: Seconds, for the expiry of caches.

        Raises:
            ConfigurationError: The configuration names keys that do not exist.
            TypeError: The configuration is the path of a file, or a mapping.
        """
        if not isinstance(configuration, Configuration):
            method = "from_mapping" if isinstance(configuration, Mapping) else "from_yaml"
            raise TypeError(
                f"Keytools takes a Configuration, not {type(configuration).__name__}: use Keytools.{method}(...)."
            )
        self.configuration = configuration
        self._keys = KeyService(configuration, kms, clock)
        self._arrow_encryptor = ArrowEncryptor(self._keys, clock)

    @classmethod
    def from_yaml(cls, path: PathLike, *, kms: KmsClient | None = None) -> Self:
        """Load a configuration from a YAML file.

        Args:
            path: The file.
            kms: A KMS client to use. The file then needs no `kms`, and no client is made from one that it has.

        Raises:
            ConfigurationError: The file has mistakes; the message names each line, and what to write instead.
        """
        return cls(load_configuration(path, kms=kms), kms=kms)

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any], *, kms: KmsClient | None = None) -> Self:
        """Take a configuration from a mapping that has the same content as a YAML file.

        Args:
            document: The mapping.
            kms: As with `from_yaml`.

        Raises:
            ConfigurationError: The mapping has mistakes.
        """
        return cls(parse_configuration(document, kms=kms), kms=kms)

    @property
    def kms(self) -> KmsClient | None:
        """The KMS client; None if the configuration has only data keys.

        With several KMSs, it is one client for all, and the identifiers of master keys begin with the name of the
        KMS: `eu::alias/pii`.
        """
        return self._keys.kms

    def clear_caches(self) -> None:
        """Forget all keys: reading calls the KMS again, and new files get fresh KEKs."""
        self._keys.clear_caches()
        self._arrow_encryptor.clear_cache()

    def close(self) -> None:
        """Close the connections of the KMS client, and forget all keys."""
        self.clear_caches()
        if self._keys.kms is not None:
            self._keys.kms.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def summary(self) -> Mapping[str, object]:
        """Return a short description: the KMS and the tables."""
        kms = self._keys.kms
        backend = None if kms is None else ", ".join(sorted(kms.instances)) or kms.backend
        return {"kms": backend, "tables": sorted(self.configuration.tables)}

    def __reduce__(self) -> tuple[Any, ...]:
        _, (configuration, identities) = self._keys.__reduce__()
        return type(self), (configuration,), identities

    def __setstate__(self, identities: FileIdentities) -> None:
        self._keys.identities = identities

    # --- tables ---

    def write_table(
        self,
        data: Any,
        path: PathLike,
        *,
        table_name: str | None = None,
        overwrite: bool = True,
        filesystem: Any = None,
        key_values: Mapping[str, str] | None = None,
        **options: Any,
    ) -> WriteResult:
        """Write data to an encrypted Parquet file, as its table in the configuration says.

        The file appears whole under its name or not at all. pyarrow encrypts it if it supports what the table asks
        for; otherwise the module encryptor does. The result says which.

        Args:
            data: A pyarrow table, batch, reader, data set or scanner; a list of tables or batches; or an object
                with `__arrow_c_stream__`, such as a pandas or Polars DataFrame or a DuckDB relation.
            path: A path, or a URI such as `s3://bucket/key.parquet`.
            options: Further arguments of `pyarrow.parquet.write_table`, such as `compression`.

        Raises:
            TypeError: An option does not exist, or has a value of the wrong type.
            ValueError: An option has an invalid value.
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
            OutputError: The file cannot be written.
        """
        location = FileLocation.resolve(path, filesystem)
        with audit.about(location):
            return writing.write_table(
                self._arrow_encryptor,
                data,
                location,
                table_name,
                options,
                overwrite=overwrite,
                key_values=key_values,
            )

    def writer(
        self,
        path: PathLike,
        schema: pa.Schema,
        *,
        table_name: str | None = None,
        overwrite: bool = True,
        filesystem: Any = None,
        key_values: Mapping[str, str] | None = None,
        **options: Any,
    ) -> EncryptedParquetWriter:
        """Return a writer of one encrypted file, with the methods of `pyarrow.parquet.ParquetWriter`.

        The writer works for every table. If pyarrow cannot encrypt the row groups, the module encryptor does, one
        row group at a time, so that only one is in memory. The file appears whole when the writer is closed; after
        an exception there is no file.

        `with keytools.writer("flights.parquet", schema) as writer: writer.write_table(table)`

        Args:
            path: A path, or a URI such as `s3://bucket/key.parquet`.
            schema: The schema of the data.
            options: Further arguments of `pyarrow.parquet.ParquetWriter`, such as `compression`.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
            OutputError: The file cannot be written.
        """
        location = FileLocation.resolve(path, filesystem)
        return EncryptedParquetWriter(
            self._arrow_encryptor,
            location,
            schema,
            table_name,
            options,
            overwrite=overwrite,
            key_values=key_values,
        )

    def read_table(
        self,
        path: PathOrPaths,
        *,
        columns: Sequence[str] | None = None,
        filters: Filters = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        **options: Any,
    ) -> pa.Table:
        """Read an encrypted Parquet file, a folder of them, or several.

        Args:
            path: A path or URI of a file or folder, a glob such as `data/year=*/*.parquet`, or a list of these.
            columns: Names of columns; None reads all of them.
            filters: As `pyarrow.parquet.read_table` takes them.
            options: Further arguments of `pyarrow.parquet.read_table`, the same for files and folders, such as
                `use_threads`, `pre_buffer`, `read_dictionary` or `coerce_int96_timestamp_unit`.

        Raises:
            ColumnAccessDeniedError: The keys of requested columns are unavailable.
            NotEncryptedError: A file is not encrypted.
            ReusedKeysError: Two files share data keys and file unique.
            TypeError: An option does not exist, or `columns` is not a list of names.
        """
        from parquet_keytools.tables.reading import ReadOptions, ReadRequest, read_table

        read_options = ReadOptions.parse(options, method="read_table")
        request = ReadRequest(columns, filters, table_name, aad_prefix)
        return read_table(self._keys, FileLocation.resolve_all(path, filesystem), request, read_options)

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
        overwrite: bool = True,
        durable: bool = True,
        key_values: Mapping[str, str] | None = None,
        **options: Any,
    ) -> WriteResult:
        """Write a data set of encrypted files. The files appear when all of them are complete.

        Args:
            data: As with `write_table`. Streams are written as they arrive.
            partitioning: Names of columns, or a pyarrow partitioning.
            partitioning_flavor: `hive`, unless `partitioning` says otherwise.
            write_options: For the Parquet writer, such as `compression`.
            overwrite: Whether files of the same names may be replaced, if `existing_data_behavior` allows it.
                Otherwise, such a file is an error, even one that appears during the work; other files of the data
                set may be in their places then.
            durable: Whether all local files are synced to disk before the first of them appears. If not, a crash
                of the machine may leave empty or damaged files.
            options: Further arguments of `pyarrow.dataset.write_dataset`.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
        """
        location = FileLocation.resolve(folder, filesystem)
        with audit.about(location):
            return writing.write_dataset(
                self._arrow_encryptor,
                data,
                location,
                table_name,
                partitioning=partitioning,
                partitioning_flavor=partitioning_flavor,
                write_options=write_options or {},
                overwrite=overwrite,
                durable=durable,
                options=options,
                key_values=key_values,
            )

    def dataset(
        self,
        folder: PathOrPaths,
        *,
        columns: Sequence[str] | None = None,
        filters: Filters = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        partitioning: Any = "hive",
        filesystem: Any = None,
        schema: pa.Schema | None = None,
        **options: Any,
    ) -> ds.Dataset:
        """Return a pyarrow data set of encrypted files, with projection, filters and batches.

        This call opens the first file, for the schema. A scan opens the others when it reaches them, some of them
        in advance, and reports what is wrong with them. Files that a filter excludes by the names of their folders
        are never opened.

        The schema leaves out columns whose keys are refused, if the configuration says `denied_columns: hide` or
        if `columns` does not name them. To find these columns, this call opens all files that `filters` select.

        Args:
            folder: A path or URI of a folder or file, a glob such as `data/year=*/*.parquet`, or a list of these.
            columns: The columns that will be read or filtered; None means all of them.
            filters: The filters that the data will be read with; a scan still needs its own filter.
            partitioning: As `pyarrow.dataset.dataset` takes it.
            schema: The schema of the data set; by default, the schema of its first file.
            options: How pyarrow reads files, as with `read_table`: `pre_buffer`, `read_dictionary`
                and others. `use_threads` is an option of the scan.

        Raises:
            ColumnAccessDeniedError: The keys of requested columns are unavailable.
            NotEncryptedError: A file is not encrypted.
            TypeError: An option does not exist, or `columns` is not a list of names.
        """
        from parquet_keytools.tables.reading import ReadOptions, ReadRequest

        read_options = ReadOptions.parse(options, method="dataset")
        request = ReadRequest(columns, filters, table_name, aad_prefix)
        location = FileLocation.resolve_all(folder, filesystem)
        return self._open_dataset(location, request, read_options, partitioning, None, schema)

    def _open_dataset(
        self,
        folder: FileLocation,
        request: ReadRequest,
        options: ReadOptions,
        partitioning: Any,
        paths: Sequence[str] | None,
        schema: pa.Schema | None,
    ) -> ds.Dataset:
        from parquet_keytools.tables.reading import open_dataset

        reopen = partial(self._open_dataset, folder, request, options, partitioning)
        return open_dataset(self._keys, folder, request, options, partitioning, schema, paths, reopen)

    # --- lazy frames of Polars ---

    def scan_polars(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        partitioning: Any = "hive",
        filesystem: Any = None,
    ) -> pl.LazyFrame:
        """Return a Polars lazy frame over an encrypted file, or a folder of them.

        Projections, and filters that pyarrow supports, are passed to pyarrow's reader. Collecting a query unwraps
        only the keys of the columns that it needs. If the key of one of them is refused, the query fails, or shows
        the column as `denied_columns` in the configuration says.

        Args:
            path: A path or URI of a folder, or of one file.
            partitioning: As `pyarrow.dataset.dataset` takes it.

        Raises:
            ConfigurationError: Polars is not installed.
            NotEncryptedError: The first file is not encrypted.
        """
        from parquet_keytools.tables.reading import scan_polars

        location = FileLocation.resolve(path, filesystem)
        return scan_polars(
            partial(
                self.dataset,
                path,
                table_name=table_name,
                aad_prefix=aad_prefix,
                partitioning=partitioning,
                filesystem=filesystem,
            ),
            partial(_open_file, location, PlainFiles(self._keys, table_name, aad_prefix)),
        )

    # --- footers, authenticated and decrypted ---

    def metadata(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pq.FileMetaData:
        """Return the authenticated metadata of a file, as `pyarrow.parquet.read_metadata` does.

        Only the footer is read. Statistics are decrypted; offsets are offsets in the encrypted file. Columns whose
        keys are refused are left out if the configuration says `denied_columns: hide`.

        Raises:
            ColumnAccessDeniedError: The keys of columns are unavailable.
            NotEncryptedError: The file is not encrypted.
            OSError: The file cannot be read, or is a folder.
        """
        from parquet_keytools.tables.reading import read_metadata

        return read_metadata(self._keys, FileLocation.resolve(path, filesystem), table_name, aad_prefix)

    def schema(
        self,
        path: PathOrPaths,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pa.Schema:
        """Return the schema of a file, as `pyarrow.parquet.read_schema` does, or of a data set, as `dataset` does.

        Args:
            path: A path or URI, a glob, or a list of these.

        Raises:
            KeytoolsError: As with `metadata` and `dataset`.
        """
        from parquet_keytools.tables.reading import read_schema

        location = FileLocation.resolve_all(path, filesystem)
        return read_schema(self._keys, location, table_name, aad_prefix)

    # --- views: encrypted files as plain Parquet, for other programs ---

    def filesystem(self, table_name: str | None = None, filesystem: Any = None) -> KeytoolsFileSystem:
        """Return an fsspec file system that encrypts what is written through it, for every policy.

        Pass it to `DataFrame.to_parquet`, `pyarrow.parquet.write_to_dataset`, Dask, Ray or DuckDB as `filesystem`.
        Its attribute `arrow` is the same file system for `pyarrow.fs`. Each file gets keys of its own, and appears
        whole when it is closed, or not at all. Only Parquet can be written.

        A file is collected before it is encrypted. All files that are being written share 64 MiB of memory; the
        rest is in an unnamed temporary file beside them, encrypted with a key of this process.

        Args:
            filesystem: The underlying `pyarrow.fs` or fsspec file system, or the URI of a folder at which paths
                begin; None for the local file system.

        Raises:
            ConfigurationError: The table does not exist, or fsspec is not installed.
        """
        if table_name is not None and table_name not in self.configuration.tables and "/" in table_name:
            raise ConfigurationError(
                f"{table_name!r} is a path, and `filesystem` takes the name of a table.",
                hint="Open files by their paths: `keytools.filesystem().open(path)`; `filesystem=` is the file "
                "system that holds them. For a file system whose root is a folder, use `keytools.view(path)`.",
            )
        return self._file_system(table_name, filesystem, None)

    def view(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> KeytoolsFileSystem:
        """Return an fsspec file system in which the encrypted files of a folder read as plain Parquet.

        Its paths begin at the folder; the path of a single file is empty. Pass it to DuckDB
        (`register_filesystem`), pandas, Dask or Ray. Its attribute `arrow` is the same file system for
        `pyarrow.fs`. The view decrypts the ranges that an engine reads, and returns a page only after it
        authenticates. Every guarantee of `read_table` holds for each file. Columns whose keys are refused appear
        as `denied_columns` in the configuration says. Files that are written into the view are encrypted, as with
        `filesystem`.

        Do not pass it to `pyarrow.dataset.dataset`: a scan of such a data set that DuckDB starts, or any other
        caller of `Scanner.to_reader`, can hang in pyarrow. Use `dataset` of this class.

        Args:
            path: A path or URI of a folder, or of one file.

        Raises:
            ConfigurationError: The table does not exist, or fsspec is not installed.
        """
        return self._file_system(table_name, None, FileLocation.resolve(path, filesystem), aad_prefix)

    def open(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> BinaryIO:
        """Open an encrypted file as a seekable file object that reads as plain Parquet.

        Raises:
            NotEncryptedError: The file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with the file or its keys. Reading the file may
                raise it, too.
        """
        location = FileLocation.resolve(path, filesystem)
        file = PlainFiles(self._keys, table_name, aad_prefix).open(location)
        reopen = partial(self.open, location, table_name=table_name, aad_prefix=aad_prefix)
        return cast("BinaryIO", PlainInput(file, reopen))

    def _file_system(
        self,
        table_name: str | None,
        filesystem: Any,
        root: FileLocation | None,
        aad_prefix: str | bytes | None = None,
    ) -> KeytoolsFileSystem:
        try:
            from parquet_keytools.view.file_system import PlainView, class_over
        except ModuleNotFoundError as error:
            if error.name != "fsspec":
                raise
            raise ConfigurationError("fsspec is not installed.", hint=install_hint("fsspec")) from None
        if root is None or table_name is not None or self.configuration.tables:
            self.configuration.select_table(table_name)
        kind = class_over(filesystem) if root is None else PlainView
        return kind(self, self._keys, table_name, filesystem, root, aad_prefix)

    # --- properties and options for pyarrow's and Spark's own readers and writers ---

    def encryption_properties(
        self, table_name: str | None, schema: pa.Schema, path: PathLike, *, filesystem: Any = None
    ) -> pq.FileEncryptionProperties:
        """Return encryption properties for one file that pyarrow writes.

        Use them for one file only. Two files with the same properties share DEKs and file unique, and reading both
        from one folder is refused. To write a folder, as pandas' `DataFrame.to_parquet` does with
        `partition_cols`, use `filesystem` or `write_dataset`; to write many row groups, use `writer`.

        Args:
            schema: The schema of the data.
            path: Where the file will be written.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            UnsupportedByArrowError: pyarrow does not support what the table asks for; `writer` and `filesystem`
                do.
            OutputError: External key material would make an existing file unreadable.
            KmsError: A key cannot be wrapped.
        """
        return self._arrow_encryptor.properties(table_name, schema, FileLocation.resolve(path, filesystem))

    def decryption_properties(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pq.FileDecryptionProperties:
        """Return decryption properties for one file. This call unwraps the keys, not pyarrow.

        They hold the keys of `columns`, or of all columns. Name every column that pyarrow will read or filter: if
        pyarrow asks for another key while it scans, its process may hang or abort. `read_table` and `dataset` of
        this class have no such limit.

        Args:
            columns: The columns that will be read or filtered; None for all of them.

        Raises:
            NotEncryptedError: The file is not encrypted.
            ColumnAccessDeniedError: One of the columns cannot be read.
            TypeError: `columns` is not a list of names.
            ValueError: The file has no column of a name in `columns`.
            UnsupportedByArrowError: pyarrow cannot decrypt the file; `read_table` can.
        """
        location = FileLocation.resolve(path, filesystem)
        return decryption_properties(self._keys, location, columns, table_name, aad_prefix)

    def polars_decryption(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pl.ParquetDecryptionProperties:
        """Return what `polars.scan_parquet(path, decryption=...)` takes for one file, with its keys unwrapped.

        This call checks the file and compares it with its table, as every read does. Polars opens the path again
        later, and compares nothing: it reads a plaintext file that took the place of the encrypted file, without
        an error. Use it where no one else can replace the file; `scan_polars` has no such limit.

        The result holds data keys in memory that Polars owns. Polars does not pickle or serialise it.

        Args:
            columns: The columns that will be read or filtered; None for all of them.

        Raises:
            ConfigurationError: Polars is not installed, or is too old.
            NotEncryptedError: The file is not encrypted.
            ColumnAccessDeniedError: One of the columns cannot be read.
            TypeError: `columns` is not a list of names.
            ValueError: The file has no column of a name in `columns`.
            UnsupportedByPolarsError: Polars cannot decrypt the file; `scan_polars` can read it.
        """
        location = FileLocation.resolve(path, filesystem)
        return polars_decryption(self._keys, location, columns, table_name, aad_prefix)

    def spark_options(
        self,
        table_name: str | None,
        schema: StructType,
        *,
        partition_by: Sequence[str] = (),
        key_values: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Return the options with which Spark writes a frame as a file of a table.

        They need a session that was made with `parquet_keytools.spark.configure` and this configuration:
        `frame.write.options(**keytools.spark_options("flights", frame.schema)).parquet(path)`.

        Args:
            schema: The schema of the frame.
            partition_by: The columns that the write passes to `partitionBy`. Their values are not protected.
            key_values: Placeholder in names of keys -> value, such as `{"tenant": "acme"}`; by default, each file
                has the value of its folder.

        Raises:
            ConfigurationError: The table's columns do not fit the schema, an encrypted column is in
                `partition_by`, or a value is not allowed.
            UnsupportedBySparkError: Spark's writer does not support what the table asks for.
        """
        from parquet_keytools.files.field_labels import labels_of_spark
        from parquet_keytools.spark.table_options import spark_leaf_paths, table_options

        if self._keys.given_kms:
            raise ConfigurationError(
                "a KMS client that was passed in cannot be sent to Spark's executors.",
                hint="Describe the KMS under `kms:` in the configuration instead.",
            )
        labels = partial(labels_of_spark, schema.jsonValue())
        return table_options(
            self._keys, table_name, spark_leaf_paths(schema), partition_by, labels, key_values or {}
        )

    def spark_read_options(self, table_name: str | None = None) -> dict[str, str]:
        """Return the options with which Spark reads files of a table, and refuses other files.

        `spark.read.options(**keytools.spark_read_options("flights")).parquet(path)`. If the configuration has only
        one table, Spark takes all files for files of this table without these options. Catalog tables that were
        written with `spark_options` do not need them either.

        Raises:
            ConfigurationError: The table does not exist.
        """
        from parquet_keytools.spark.table_options import read_options

        return read_options(self.configuration, table_name)

    # --- whole files, converted without decoding a value ---

    def encrypt_file(
        self,
        source: PathLike,
        target: PathLike,
        *,
        table_name: str | None = None,
        overwrite: bool = True,
        skip_existing: conversion.SkipExisting = False,
        source_filesystem: Any = None,
        target_filesystem: Any = None,
        on_progress: conversion.Progress | None = None,
        key_values: Mapping[str, str] | None = None,
    ) -> conversion.FileResult:
        """Encrypt a plaintext Parquet file. The target appears whole or not at all.

        Args:
            skip_existing: Whether to skip a target that is newer than the source, has the same rows, columns and
                statistics, and is encrypted with the keys that the table wants now. The result says whether the
                file was skipped. `"unauthenticated"` needs no right to unwrap: it compares algorithm, AAD prefix
                and the footer's master key, with a plaintext footer also rows, columns and their master keys, and
                authenticates nothing.

        Raises:
            AlreadyEncryptedError: The source is encrypted; use `rekey_file`.
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
            key_values=key_values,
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
        """Decrypt a Parquet file. The target appears whole or not at all.

        A plaintext file is copied if the configuration says `plaintext_files: allow`.

        Args:
            skip_existing: As with `encrypt_file`.
            mode: Permissions of a local target, such as `0o640`. By default, only its owner may read and write it.
            identities: One `FileIdentities(refuses=True)` for all files of a folder that are decrypted one by one:
                a file that shares data keys and file unique with another file is refused. Without it, there is
                only a warning.

        Raises:
            NotEncryptedError: The source is not encrypted.
            ColumnAccessDeniedError: The key of a column is unavailable.
            DecryptionError: A part of the source does not authenticate.
            ReusedKeysError: The source shares data keys and file unique with another file.
            OutputError: The target is the source, or cannot be written.
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
        key_values: Mapping[str, str] | None = None,
    ) -> conversion.FileResult:
        """Encrypt an encrypted Parquet file with new data keys, under another table if one is named.

        Args:
            new_table_name: The table of the target; by default `table_name`.
            new_keytools: A `Keytools` with another configuration, whose keys and tables the target uses.
            skip_existing: As with `encrypt_file`.

        Raises:
            KeytoolsError: As with `decrypt_file` and `encrypt_file`.
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
            key_values=key_values,
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
    ) -> verification.SalvageResult:
        """Decrypt the intact row groups of a damaged file. The result lists what is missing.

        Args:
            mode: As with `decrypt_file`.

        Raises:
            DecryptionError: The footer is damaged, or no row group is intact.
            KeytoolsError: As with `decrypt_file`.
        """
        location = FileLocation.resolve(source, source_filesystem)
        with audit.about(location):
            return verification.salvage_file(
                self._keys,
                location,
                FileLocation.resolve(target, target_filesystem),
                table_name,
                aad_prefix,
                on_progress,
                overwrite=overwrite,
                mode=mode,
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
        """Show how a file is protected, from its footer and, with keys, from the headers of its pages.

        The result reports what is wrong with the file or its keys.

        Args:
            with_keys: Whether to decrypt encrypted metadata. If not, only public metadata is shown.
            aad_prefix: The AAD prefix, for a file that does not store its prefix.

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
        """Check a file against all rules: authenticate every module, and compare every number.

        The report lists what is wrong, and what could not be checked because a key was refused.

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
        allow_plaintext: Sequence[str] = (),
        expect: PathLike | FileLocation | None = None,
        record: PathLike | FileLocation | None = None,
        list_key: str | None = None,
        filesystem: Any = None,
        on_progress: Callable[[FileReport], None] | None = None,
    ) -> DataSetReport:
        """Check each file of a folder as `verify_file` does, and the folder as one data set.

        Args:
            part_count: The number of parts that there must be, numbered from 0; None if it is not known.
            allow_plaintext: Globs of paths within the folder of accepted plaintext files; `*` matches `/`, too.
            expect: A list that `record` wrote: each encrypted file must be in it, unchanged, and no other may be
                missing. A path or URI outside the folder.
            record: Where to write a list of the encrypted files, if they conform.
            on_progress: Called with the report of each file.

        Raises:
            FileListError: The list is not valid or not authentic.
            OSError: The folder or the list cannot be read.
        """
        return verification.verify_folder(
            self._keys,
            FileLocation.resolve(folder, filesystem),
            table_name,
            aad_prefix,
            part_count=part_count,
            allow_plaintext=allow_plaintext,
            expect=None if expect is None else FileLocation.resolve(expect),
            record=None if record is None else FileLocation.resolve(record),
            list_key=list_key,
            find_tables=None if self._keys.kms is None else self._tables_of_iceberg,
            on_progress=on_progress,
        )

    def _tables_of_iceberg(self, metadata_files: Sequence[FileLocation]) -> TableFiles:
        try:
            from parquet_keytools.iceberg.table_audit import tables_in_folder
        except ModuleNotFoundError as error:
            reason = f"{error.name} is not installed. {install_hint('iceberg')}"
            return TableFiles(refused=dict.fromkeys((file.path for file in metadata_files), reason))
        return tables_in_folder(metadata_files, self._keys)

    # --- unprotected personal data ---

    def scan(
        self,
        path: PathOrPaths | FileLocation,
        *,
        table_name: str | None = None,
        sample: int = 500,
        filesystem: Any = None,
        on_file: Callable[[object], None] = lambda _: None,
    ) -> ScanReport:
        """Find columns that look like personal data, and are plaintext or under another key than their table says.

        The report has counts, and no value. Needs the extra `scan`.

        Args:
            path: A file, a folder, a glob, or a list of these: paths or URIs.
            table_name: The table of the files; with several tables and None, keys are not compared with a table.
            sample: How many values of each column of a file are looked at; 0 for footers alone.
            on_file: Called for each file.

        Raises:
            ConfigurationError: The table does not exist, or the extra is not installed.
        """
        from parquet_keytools.scan.scanner import scan

        location = FileLocation.resolve_all(path, filesystem)
        return scan(self._keys, location, table_name, sample=sample, on_file=on_file)

    # --- keys of tenants ---

    def create_tenant_keys(
        self,
        values: Collection[str],
        *,
        table_name: str | None = None,
        placeholder: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        on_key: Callable[[TenantKey], None] | None = None,
    ) -> list[TenantKey]:
        """Create the master keys of values of a placeholder in the KMS, as the templates of a table name them.

        All values are checked before the first key is created. A master key that exists stays as it is. After an
        error, repeat the call.

        Args:
            values: The values, such as names of tenants.
            placeholder: The placeholder; not needed if the table has only one.
            tags: Tags, or labels, of the new keys; the placeholder in braces stands for the value.
            policy: Their policy, in the form of the KMS, with the same placeholder.
            on_key: Called after each key.

        Raises:
            ConfigurationError: The pattern refuses a value, or a value would name another key.
            KmsConfigurationError: The backend cannot create master keys, or none with tags or a policy.
            KmsError: The KMS refuses, or is unreachable.
        """
        return create_tenant_keys(
            self._keys,
            values,
            table_name,
            placeholder=placeholder,
            tags=tags,
            policy=policy,
            on_key=on_key,
        )

    # --- rotation of keys ---

    def rotate(
        self,
        path: PathLike | FileLocation,
        *,
        moves: Mapping[str, str] | None = None,
        only_master_keys: Collection[str] | None = None,
        older_than: str | None = None,
        new_keks: bool = False,
        dry_run: bool = False,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        follow_links: bool = False,
        update_list: PathLike | FileLocation | None = None,
        list_key: str | None = None,
    ) -> RotationReport:
        """Re-wrap the keys of a file, or of all files under a folder. Their data stays as it is.

        Without options, keys are re-wrapped with the current version of their master keys, unless they are known
        to be wrapped with it already. Each file is replaced in one step after its new keys have been checked, and
        the report lists files that failed.

        After an interrupted run, call the method again with the same arguments: files whose keys show that they
        are current stay as they are. Where the KMS hides versions, and with `new_keks`, all keys are re-wrapped
        again.

        Args:
            moves: Old master key -> new master key; names from the configuration, or identifiers. All other master
                keys stay as they are. None takes the moves of the configuration.
            only_master_keys: The master keys to rotate.
            older_than: Re-wrap only keys that were wrapped with an older version than this one, or with an unknown
                version.
            new_keks: Whether to make fresh KEKs, as after the leak of a KEK. If not, KEKs that the KMS re-wraps
                stay the same.
            dry_run: Change nothing. The report says what would change, and which KMS calls would be made.
            table_name: The table of the files, for an AAD prefix that they do not store.
            update_list: A list that `verify_folder` recorded: the files are compared with it first, and a new
                list replaces it afterwards.

        Raises:
            ConfigurationError: The configuration has no KMS, or the moves are not possible.
            FileListError: The list is not authentic, or the files differ from it.
            KmsError: A new master key does not exist, or is disabled.
        """
        plan = plan_rotation(
            self._keys,
            moves=moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            dry_run=dry_run,
            table_name=table_name,
            aad_prefix=aad_prefix,
        )
        location = FileLocation.resolve(path, filesystem)
        with self._updated_list(
            None if dry_run else update_list, location, self, table_name, list_key, moves=moves
        ):
            return rotate_data_set(
                location,
                Rewrapping(self._keys, plan),
                RunOptions(keep_results=keep_results, on_file=on_file, follow_links=follow_links),
            )

    @contextmanager
    def _updated_list(
        self,
        update_list: PathLike | FileLocation | None,
        folder: FileLocation,
        after: Keytools,
        table_name: str | None,
        list_key: str | None,
        new_table_name: str | None = None,
        rekeyed: Collection[str] = (),
        moves: Mapping[str, str] | None = None,
    ) -> Iterator[None]:
        """Update a list of files, if there is one, after a `with` block; see `data_set.updated_list`."""
        if update_list is None:
            yield
            return
        before = ListKeeper(self._keys, table_name, list_key)
        keeper = ListKeeper(after._keys, new_table_name or table_name, list_key)
        keeper.follow(moves)
        with updated_list(FileLocation.resolve(update_list), folder, before, keeper, rekeyed):
            yield

    def encrypt_in_place(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        on_progress: conversion.Progress | None = None,
        follow_links: bool = False,
        key_values: Mapping[str, str] | None = None,
    ) -> RotationReport:
        """Encrypt a plaintext file, or all plaintext files under a folder, in place.

        Each encrypted file is written beside the plaintext file and synced. Its keys are unwrapped and each page
        is authenticated before it replaces the plaintext file in one step, unless the plaintext file changed after
        it was read. Files that are encrypted as the table says stay as they are: after an interruption, call the
        method again. A file with several hard links fails, because its other names would keep the plaintext.

        The plaintext is not erased: its blocks remain on the disk until the file system reuses them, and so do
        older versions in a store with versioning, snapshots and backups.

        Args:
            key_values: Placeholder in names of keys -> value, such as `{"tenant": "acme"}`, for all files. A file
                that is encrypted under the keys of other values fails.

        Raises:
            ConfigurationError: The table does not exist.
            KeytoolsError: The file failed. For a folder, the report lists files that failed.
        """
        encrypting = rekeying.Encrypting(self._keys, table_name, key_values, on_progress)
        options = RunOptions(keep_results, on_file, follow_links=follow_links)
        return encrypting.run(FileLocation.resolve(path, filesystem), options)

    def rekey_in_place(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        new_table_name: str | None = None,
        new_keytools: Self | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        on_progress: conversion.Progress | None = None,
        follow_links: bool = False,
        update_list: PathLike | FileLocation | None = None,
        list_key: str | None = None,
        key_values: Mapping[str, str] | None = None,
    ) -> RotationReport:
        """Encrypt a file, or all files under a folder, with new data keys, in place.

        Each new file is written beside the old file, checked, and replaces it in one step, unless the old file
        changed after it was read. Without `new_table_name` and `new_keytools`, a file keeps its AAD prefix, and
        all encrypted columns stay encrypted. A run that is repeated encrypts all files again, also after an
        interruption. With one of them, a file that is no file of the old table, and is already under the keys that
        the new table gives it, stays as it is: the repeated run does the rest.

        Args:
            new_table_name: The table whose policy they follow afterwards; by default `table_name`.
            new_keytools: A `Keytools` with another configuration, whose keys and tables they use afterwards.
            update_list: As with `rotate`. After SIGKILL, the list does not fit the files that already have new
                keys: verify them, and record a new list.

        Raises:
            ConfigurationError: The table does not exist.
            FileListError: The list is not authentic, or the files differ from it.
            KeytoolsError: The file failed. For a folder, the report lists files that failed.
        """
        is_other = new_keytools is not None
        # A KEK that leaked may be in the cache.
        self.clear_caches()
        rekeyed: set[str] = set()

        def on_file_done(file: FileRotation) -> None:
            if file.error is None:
                rekeyed.add(file.path)
            if on_file is not None:
                on_file(file)

        location, after = FileLocation.resolve(path, filesystem), new_keytools or self
        rekeys = rekeying.Rekeying(
            self._keys,
            after._keys,
            table_name=table_name,
            new_table_name=new_table_name or (None if is_other else table_name),
            aad_prefix=aad_prefix,
            as_before=new_table_name in (None, table_name) and not is_other,
            key_values=key_values,
            on_progress=on_progress,
        )
        # `rotation.moves` is for rotations: a rekeyed file is under the keys of its table.
        with self._updated_list(
            update_list, location, after, table_name, list_key, new_table_name, rekeyed, moves={}
        ):
            return rekeys.run(location, RunOptions(keep_results, on_file_done, follow_links=follow_links))

    # --- keys in use ---

    def key_inventory(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        ignore_skipped: bool = False,
    ) -> Iterator[FileKeyUses]:
        """Yield the master keys and versions that a file, or each file under a folder, depends on.

        An entry that cannot be checked, such as a broken link, is yielded with `unknown`.

        Args:
            ignore_skipped: Whether to leave out encrypted files that readers of data sets ignore because their
                name, or the name of a folder, begins with a dot or an underscore. If not, they are yielded with
                `unknown`.
        """
        inventory = Inventory(self._keys, prefix_of(self._keys, table_name, aad_prefix))
        return inventory.list(FileLocation.resolve(path, filesystem), ignore_skipped=ignore_skipped)

    def files_using(
        self,
        key: str,
        path: PathLike | FileLocation,
        *,
        version: str | None = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> Iterator[FileKeyUses]:
        """Yield the files that need a master key, or a version of it, and the files for which this is unknown.

        Args:
            key: Name of the master key in the configuration, or its identifier.
            version: The version; None means any version.
        """
        wanted, same = master_key_id(self.configuration, key), same_master_key(self.kms)
        for file in self.key_inventory(path, table_name=table_name, aad_prefix=aad_prefix, filesystem=filesystem):
            if file.depends_on(wanted, version, same) is not False:
                yield file

    def erasure(
        self,
        path: PathLike | FileLocation,
        where: Mapping[str, str],
        *,
        table_name: str | None = None,
        filesystem: Any = None,
    ) -> Erasure:
        """Prepare the erasure of one value of a key template, by the end of its master keys.

        Args:
            path: A path or URI of the data set.
            where: The placeholder and its value, such as `{"tenant": "acme"}`.

        Raises:
            ConfigurationError: No key of the table has this placeholder, its pattern refuses the value, or the
                value would name another key.
        """
        return Erasure(self._keys, FileLocation.resolve(path, filesystem), where, table_name)

    def erase_rows(
        self,
        path: PathLike | FileLocation,
        *,
        where: str,
        table_name: str | None = None,
        dry_run: bool = False,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        on_search: Callable[[Iterable[FileRewrite]], None] | None = None,
    ) -> RotationReport:
        """Remove the rows that match a filter from a file, or from all files under a folder.

        All files are searched before the first is replaced. A file with matching rows is replaced by one without
        them, with new data keys, after that was written beside it, synced, and read. Other files are not touched.
        A run that is repeated goes on where an earlier one ended.

        Args:
            where: The filter, such as `customer_id = 4711`; see docs/erase-rows.md.
            dry_run: Change nothing: the report says what would be.
            on_file: Called with the outcome of each file, a `FileRewrite` if it was read.
            on_search: Called with the files that were read, before the first of them is replaced.

        Raises:
            ConfigurationError: The filter is not valid or does not fit a file; or the folder belongs to a table of
                Iceberg, Delta Lake or Hudi. Nothing was changed.
            ColumnAccessDeniedError: A column of the filter, or of a file with matching rows, cannot be read.
                Nothing was changed.
            KeytoolsError: The file failed. For a folder, the report lists files that failed.
        """
        return rewrite_rows(
            self._keys,
            FileLocation.resolve(path, filesystem),
            where=where,
            table_name=table_name,
            dry_run=dry_run,
            keep_results=keep_results,
            on_file=on_file,
            on_search=on_search,
        )

    # --- secrets of the digests that `denied_columns: hash` shows ---

    def check_hash_keys(self) -> None:
        """Unwrap each secret under `hash_keys`.

        Raises:
            ConfigurationError: An unwrapped secret is invalid.
            KmsError: The KMS does not unwrap a secret.
        """
        for name in self.configuration.hash_keys:
            unwrapped_secret(self.configuration, name, self._keys.kms_keys())

    def wrap_hash_key(self, name: str, master_key: str | None = None) -> HashKeySettings:
        """Return the settings of a secret, for the configuration's `hash_keys`.

        A secret that the configuration already has is re-wrapped with the current version of its master key, or
        with another master key, and digests stay the same. Otherwise the secret is new: random bytes.

        Args:
            name: Name of the secret.
            master_key: Name of the master key that wraps the secret; None for the master key in the configuration.

        Raises:
            ConfigurationError: The master key is unknown, a data key, or not given for a new secret.
            KmsResponseInvalidError: The wrapped key that the KMS returned does not unwrap to the secret.
            KmsError: The KMS does not wrap or unwrap the secret.
        """
        return wrapped_secret(self.configuration, self._keys.kms_keys(), self.kms, name, master_key)


def _open_file(folder: FileLocation, files: PlainFiles, path: str) -> PlainInput:
    return PlainInput(files.open(FileLocation(folder.filesystem, path)))
