"""Tables of a catalog with their keys, whether or not the catalog reads the metadata file itself."""

from __future__ import annotations

from pyiceberg.catalog import Catalog
from pyiceberg.table import Table
from pyiceberg.typedef import Identifier

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.iceberg.file_io import EncryptedFileIO


def load_table(catalog: Catalog, identifier: str | Identifier) -> Table:
    """Load a table, and learn its keys from its metadata file.

    PyIceberg reads this file itself with most catalogs. A REST catalog sends its content, of which PyIceberg keeps
    no keys; so the file is read here.

    Args:
        catalog: Any catalog of PyIceberg whose `py-io-impl` is `parquet_keytools.iceberg.EncryptedFileIO`.
        identifier: Name of the table.

    Raises:
        ConfigurationError: The catalog has another FileIO.
        KeytoolsError: Another subclass says what is wrong with the metadata file.
    """
    table = catalog.load_table(identifier)
    if not isinstance(table.io, EncryptedFileIO):
        raise ConfigurationError(
            f"the catalog {catalog.name!r} has another FileIO than ours.",
            hint="Set its property py-io-impl to parquet_keytools.iceberg.EncryptedFileIO.",
        )
    if table.metadata_location not in table.io.tables:
        table.io.read_metadata(table.metadata_location)
    return table
