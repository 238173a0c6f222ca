"""Files as other programs see them: file systems, file objects, footers, and lazy frames of Polars."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.facade.tables import Tables
from parquet_keytools.runtime.presentation import install_hint
from parquet_keytools.storage.locations import FileLocation, PathLike, PathOrPaths
from parquet_keytools.view.plain_files import PlainFiles, PlainInput

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    from parquet_keytools.view.file_system import KeytoolsFileSystem


class Views(Tables):
    """Shows files to programs that know nothing of encryption, and what their footers say."""

    def filesystem(self, table_name: str | None = None, filesystem: Any = None) -> KeytoolsFileSystem:
        """Return an fsspec file system that encrypts what is written through it, for every policy.

        Give it to `DataFrame.to_parquet`, `pyarrow.parquet.write_to_dataset`, Dask, Ray or DuckDB, as
        `filesystem`; its attribute `arrow` is the same as a `pyarrow.fs` file system. Each file gets keys of its
        own, and appears whole when it is closed, or not at all. Nothing but Parquet can be written.

        A file is collected before it is encrypted. Of all that are being written at a time 64 MiB are in memory;
        the rest is in an unnamed temporary file beside them, encrypted under a key of this process.

        Args:
            table_name: The table of all files; None where the configuration has only one.
            filesystem: The `pyarrow.fs` or fsspec file system below, or the URI of a folder, at which paths begin;
                None for the local one.

        Raises:
            ConfigurationError: There is no such table, or fsspec is not installed.
        """
        if table_name is not None and table_name not in self.configuration.tables and "/" in table_name:
            raise ConfigurationError(
                f"{table_name!r} is a place, and `filesystem` takes the name of a table.",
                hint="Open files by paths: `keytools.filesystem().open(path)`; `filesystem=` is where they are. "
                "For a file system whose root is a folder, use `keytools.view(path)`.",
            )
        return self._make(table_name, filesystem, None)

    def view(
        self, path: PathLike | FileLocation, *, table_name: str | None = None, filesystem: Any = None
    ) -> KeytoolsFileSystem:
        """Return an fsspec file system in which the encrypted files of a folder are plain Parquet.

        Paths in it begin at the folder; of a single file the path is empty. Give it to DuckDB
        (`register_filesystem`), pandas, Dask or Ray; its attribute `arrow` is the same as a `pyarrow.fs` file
        system. What engines read is decrypted range by range, each page only when it is authentic. Every guarantee
        of `read_table` holds for each file, and columns whose keys are refused are as the configuration says under
        `denied_columns`. What is written into it is encrypted, as with `filesystem`.

        Args:
            path: A path or URI of a folder, or of one file.
            table_name: The table of all files; None where the configuration has only one.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            ConfigurationError: There is no such table, or fsspec is not installed.
        """
        return self._make(table_name, None, FileLocation.resolve(path, filesystem))

    def open(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> BinaryIO:
        """Open an encrypted file as a file object with plain Parquet, to read and seek in.

        Args:
            path: A path or URI.
            table_name: Its table; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have; None for what the table says.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            NotEncryptedError: It is not encrypted.
            KeytoolsError: Another subclass says what is wrong with the file or its keys; so does reading it.
        """
        location = FileLocation.resolve(path, filesystem)
        file = PlainFiles(self._keys, table_name, aad_prefix).open(location)
        reopen = partial(self.open, location, table_name=table_name, aad_prefix=aad_prefix)
        return cast("BinaryIO", PlainInput(file, reopen))

    # --- footers, authenticated and decrypted ---

    def metadata(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pq.FileMetaData:
        """Return what the footer of a file says, as `pyarrow.parquet.read_metadata` does; it is authenticated.

        Only the footer is read. Statistics are decrypted, and offsets are those in the encrypted file. Columns
        whose keys are refused are left out, if the configuration says `denied_columns: hide`.

        Args:
            path: A path or URI of a file.
            table_name: Its table; None where the configuration has only one.
            aad_prefix: The AAD prefix that it must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            ColumnAccessDeniedError: The keys of columns are unavailable.
            NotEncryptedError: The file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with the file or its keys.
            OSError: It cannot be read, or is a folder.
        """
        from parquet_keytools.arrow.reading import read_metadata

        return read_metadata(self._keys, FileLocation.resolve(path, filesystem), table_name, aad_prefix)

    def schema(
        self,
        path: PathOrPaths,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> pa.Schema:
        """Return the schema of a file, as `pyarrow.parquet.read_schema` does, or of a data set, see `dataset`.

        Args:
            path: A path or URI, a glob, or a list of these.
            table_name: The table; None where the configuration has only one.
            aad_prefix: The AAD prefix that each file must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            KeytoolsError: As with `metadata` and `dataset`.
        """
        from parquet_keytools.arrow.reading import read_schema

        location = FileLocation.resolve_all(path, filesystem)
        return read_schema(self._keys, location, table_name, aad_prefix)

    # --- lazy frames ---

    def scan_polars(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        partitioning: Any = "hive",
        filesystem: Any = None,
    ) -> pl.LazyFrame:
        """Return a lazy frame of Polars over an encrypted file, or a folder of them.

        Projections, and filters that pyarrow knows, go to pyarrow's reader. Only the keys of columns that a query
        needs are fetched, when it is collected; a column whose key is refused is an error for queries that ask for
        it, or what the configuration says under `denied_columns`.

        Args:
            path: A path or URI of a folder, or of one file.
            table_name: Its table; None where the configuration has only one.
            aad_prefix: The AAD prefix that every file must have.
            partitioning: As `pyarrow.dataset.dataset` takes it.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            ConfigurationError: Polars is not installed.
            NotEncryptedError: The first file is not encrypted.
            KeytoolsError: Another subclass says what is wrong with the first file or its keys.
        """
        from parquet_keytools.arrow.reading import scan_polars

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

    def _make(self, table_name: str | None, filesystem: Any, root: FileLocation | None) -> KeytoolsFileSystem:
        try:
            from parquet_keytools.view.file_system import PlainView, class_over
        except ModuleNotFoundError as error:
            if error.name != "fsspec":
                raise
            raise ConfigurationError("fsspec is not installed.", hint=install_hint("fsspec")) from None
        if root is None or table_name is not None or self.configuration.tables:
            self.configuration.select_table(table_name)
        kind = class_over(filesystem) if root is None else PlainView
        return kind(self, self._keys, table_name, filesystem, root)


def _open_file(folder: FileLocation, files: PlainFiles, path: str) -> PlainInput:
    return PlainInput(files.open(FileLocation(folder.filesystem, path)))
