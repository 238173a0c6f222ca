"""What footers of files say, authenticated and decrypted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parquet_keytools.facade.configured import Configured
from parquet_keytools.storage.locations import FileLocation, PathLike, PathOrPaths

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


class Footers(Configured):
    """Reads footers, and nothing else of files."""

    def metadata(
        self,
        path: PathLike,
        *,
        table_name: str | None = None,
        aad_prefix: str | None = None,
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
        aad_prefix: str | None = None,
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
