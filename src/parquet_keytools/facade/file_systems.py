"""File systems for programs that know nothing of encryption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.facade.configured import Configured
from parquet_keytools.runtime.extras import install_hint

if TYPE_CHECKING:
    from parquet_keytools.view.file_system import KeytoolsFileSystem


class FileSystems(Configured):
    """Makes file systems that encrypt and decrypt."""

    def filesystem(self, table_name: str | None = None, filesystem: Any = None) -> KeytoolsFileSystem:
        """Return an fsspec file system that encrypts what is written through it, for every policy.

        Give it to `DataFrame.to_parquet`, `pyarrow.parquet.write_to_dataset`, Dask, Ray or DuckDB, as
        `filesystem`; its attribute `arrow` is the same as a `pyarrow.fs` file system. Each file gets keys of its
        own, and appears whole when it is closed, or not at all. Nothing but Parquet can be written.

        A file is collected before it is encrypted. Of all that are being written at a time 64 MiB are in memory;
        the rest is in an unnamed temporary file beside them, encrypted under a key of this process.

        Args:
            table_name: The table of all files; None where the configuration has only one.
            filesystem: The `pyarrow.fs` or fsspec file system below; None for the local one.

        Raises:
            ConfigurationError: There is no such table, or fsspec is not installed.
        """
        try:
            from parquet_keytools.view.file_system import KeytoolsFileSystem
        except ModuleNotFoundError as error:
            if error.name != "fsspec":
                raise
            raise ConfigurationError("fsspec is not installed.", hint=install_hint("fsspec")) from None
        self.configuration.select_table(table_name)
        return KeytoolsFileSystem(self, self._keys, table_name, filesystem)
