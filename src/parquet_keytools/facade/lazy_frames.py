"""Lazy frames of Polars over encrypted data sets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from parquet_keytools.facade.tables import Tables
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.view.plain_files import PlainFiles
from parquet_keytools.view.plain_input import PlainInput

if TYPE_CHECKING:
    import polars as pl


class LazyFrames(Tables):
    """Makes lazy frames of what `Tables` reads."""

    def scan_polars(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
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
        from parquet_keytools.arrow.polars_scan import scan_polars

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


def _open_file(folder: FileLocation, files: PlainFiles, path: str) -> PlainInput:
    return PlainInput(files.open(FileLocation(folder.filesystem, path)))
