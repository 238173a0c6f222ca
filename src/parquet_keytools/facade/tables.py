"""Tables and data sets, written and read by pyarrow and by Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from parquet_keytools import audit
from parquet_keytools.arrow import writing
from parquet_keytools.arrow.encryption_properties import ArrowEncryptor
from parquet_keytools.arrow.file_writer import EncryptedParquetWriter, WriteResult
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.facade import Configured
from parquet_keytools.keys.kek import Clock
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.storage.locations import FileLocation, PathLike, PathOrPaths

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

    from parquet_keytools.arrow.data_sets import ReadRequest
    from parquet_keytools.arrow.read_options import Filters, ReadOptions


class Tables(Configured):
    """Writes and reads tables and data sets."""

    def __init__(self, configuration: Configuration, *, kms: KmsClient | None, clock: Clock) -> None:
        super().__init__(configuration, kms=kms, clock=clock)
        self._arrow_encryptor = ArrowEncryptor(self._keys, clock)

    def clear_caches(self) -> None:
        """Forget all keys: the KMS is asked again, and new files get fresh KEKs."""
        super().clear_caches()
        self._arrow_encryptor.clear_cache()

    # --- pyarrow's own readers and writers ---

    def encryption_properties(
        self, table_name: str | None, schema: pa.Schema, path: PathLike, *, filesystem: Any = None
    ) -> pq.FileEncryptionProperties:
        """Return encryption properties for one file that pyarrow writes.

        They serve one file. Two files with the same properties share DEKs and file unique, and are refused in one
        folder: for a folder, as `DataFrame.to_parquet` of pandas writes it with `partition_cols`, use `filesystem`
        or `write_dataset`, and for many row groups `writer`.

        Args:
            table_name: The table in the configuration; None where it has only one.
            schema: Of the data.
            path: Where the file will be written.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            UnsupportedByArrowError: pyarrow cannot do what the table asks for; `writer` and `filesystem` can.
            OutputError: External key material would make the file that is there unreadable.
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
            TypeError: `columns` is no list of names.
            UnsupportedByArrowError: pyarrow cannot decrypt the file; `read_table` can.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
        """
        # Not earlier: pyarrow's data sets import pandas, where it is installed.
        from parquet_keytools.arrow.read_options import make_decryption_properties

        location = FileLocation.resolve(path, filesystem)
        (opened,) = self._keys.open_files([location], table_name, aad_prefix)
        return make_decryption_properties(opened, columns)

    # --- tables ---

    def write_table(
        self,
        data: Any,
        path: PathLike,
        *,
        table_name: str | None = None,
        filesystem: Any = None,
        **options: Any,
    ) -> WriteResult:
        """Write data as an encrypted Parquet file, with everything that its configuration asks for.

        The file appears whole under its name or not at all. pyarrow encrypts it where it can do what the table
        asks for, the module encryptor where it cannot; the result says which.

        Args:
            data: A pyarrow table, batch, reader, data set or scanner, a list of tables or batches, or what
                has `__arrow_c_stream__`, such as a DataFrame of pandas or Polars or a relation of DuckDB.
            path: A path, or a URI such as `s3://bucket/key.parquet`.
            table_name: The table in the configuration; None where it has only one.
            filesystem: A `pyarrow.fs` or fsspec file system.
            options: Further arguments of `pyarrow.parquet.write_table`, such as `compression`.

        Raises:
            TypeError: There is no such option, or it takes another type.
            ValueError: An option has no such value.
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
            OutputError: The file cannot be written there.
        """
        location = FileLocation.resolve(path, filesystem)
        with audit.about(location):
            return writing.write_table(self._arrow_encryptor, data, location, table_name, options)

    def writer(
        self,
        path: PathLike,
        schema: pa.Schema,
        *,
        table_name: str | None = None,
        filesystem: Any = None,
        **options: Any,
    ) -> EncryptedParquetWriter:
        """Return a writer of one encrypted file, with the methods of `pyarrow.parquet.ParquetWriter`.

        It works for every table: row groups that pyarrow cannot encrypt go through the module encryptor one by
        one, so that no more than one is in memory. The file appears whole when the writer is closed; after an
        exception there is none.

        `with keytools.writer("flights.parquet", schema) as writer: writer.write_table(table)`

        Args:
            path: A path, or a URI such as `s3://bucket/key.parquet`.
            schema: Of the data.
            table_name: The table in the configuration; None where it has only one.
            filesystem: A `pyarrow.fs` or fsspec file system.
            options: Further arguments of `pyarrow.parquet.ParquetWriter`, such as `compression`.

        Raises:
            ConfigurationError: The table's columns do not fit the schema.
            KmsError: A key cannot be wrapped; nothing is written.
            OutputError: The file cannot be written there.
        """
        location = FileLocation.resolve(path, filesystem)
        return EncryptedParquetWriter(self._arrow_encryptor, location, schema, table_name, options)

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
            columns: Names of columns; None reads all.
            filters: As `pyarrow.parquet.read_table` takes them.
            table_name: Its table, whose AAD prefix it must have; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            options: Further arguments of `pyarrow.parquet.read_table`, the same for files and folders, such as
                `use_threads`, `pre_buffer`, `memory_map`, `read_dictionary` or `coerce_int96_timestamp_unit`.

        Raises:
            ColumnAccessDeniedError: The keys of columns that are asked for are unavailable.
            NotEncryptedError: The file is not encrypted.
            ReusedKeysError: Two files share data keys and file unique.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
            TypeError: There is no such option, or `columns` is no list of names.
        """
        from parquet_keytools.arrow.data_sets import ReadRequest
        from parquet_keytools.arrow.read_options import ReadOptions
        from parquet_keytools.arrow.reading import read_table

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
        durable: bool = True,
        **options: Any,
    ) -> WriteResult:
        """Write a data set of encrypted files; they appear when all are complete.

        Args:
            data: As with `write_table`. Streams are written as they come.
            folder: A path or URI.
            table_name: The table in the configuration; None where it has only one.
            partitioning: Names of columns, or a pyarrow partitioning.
            partitioning_flavor: `hive` unless a partitioning says otherwise.
            filesystem: A `pyarrow.fs` or fsspec file system.
            write_options: For the Parquet writer, such as `compression`.
            durable: Whether local files are on the disk before the first appears. If not, a crash of the machine
                may leave empty or damaged files.
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
                durable=durable,
                options=options,
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
        """Return a pyarrow data set of encrypted files: projection, filters, batches.

        The first file is opened here, for the schema. Others are opened when a scan comes to them, some ahead
        of it, and then it is found what is wrong with them; those that a filter leaves out by the names of
        folders are not opened at all.

        Columns whose keys are refused are left out of its schema where the configuration says
        `denied_columns: hide`, or where `columns` does not name them. To know these, all files that `filters`
        leave are opened here.

        Args:
            folder: A path or URI of a folder or file, a glob such as `data/year=*/*.parquet`, or a list of these.
            columns: The columns that will be read or filtered; None means all.
            filters: What the data will be filtered by; the scan takes a filter of its own.
            table_name: Its table; None where the configuration has only one.
            aad_prefix: The AAD prefix that every file must have.
            partitioning: As `pyarrow.dataset.dataset` takes it.
            filesystem: A `pyarrow.fs` or fsspec file system.
            schema: Of the data set; that of its first file if not given.
            options: How pyarrow reads files, as with `read_table`: `pre_buffer`, `memory_map`, `read_dictionary`
                and others. `use_threads` is one of the scan.

        Raises:
            ColumnAccessDeniedError: The keys of columns that are asked for are unavailable.
            NotEncryptedError: A file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with a file or its keys.
            TypeError: There is no such option, or `columns` is no list of names.
        """
        from parquet_keytools.arrow.data_sets import ReadRequest
        from parquet_keytools.arrow.read_options import ReadOptions

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
        from parquet_keytools.arrow.data_sets import open_dataset

        reopen = partial(self._open_dataset, folder, request, options, partitioning)
        return open_dataset(self._keys, folder, request, options, partitioning, schema, paths, reopen)

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
        from parquet_keytools.spark.table_options import spark_leaf_paths, table_options

        if self._keys.given_kms:
            raise ConfigurationError(
                "a KMS client that was passed in cannot be sent to Spark's executors.",
                hint="Describe the KMS under `kms:` in the configuration instead.",
            )
        return table_options(self._keys, table_name, spark_leaf_paths(schema), partition_by)

    def spark_read_options(self, table_name: str | None = None) -> dict[str, str]:
        """Return the options with which Spark reads files of a table, and refuses others.

        `spark.read.options(**keytools.spark_read_options("flights")).parquet(path)`. Where the configuration has
        one table, files are of that one, and these options are not needed; nor are they to read a catalog table
        that was written with `spark_options`.

        Args:
            table_name: The table in the configuration; None where it has only one.

        Raises:
            ConfigurationError: There is no such table.
        """
        from parquet_keytools.spark.table_options import read_options

        return read_options(self.configuration, table_name)
