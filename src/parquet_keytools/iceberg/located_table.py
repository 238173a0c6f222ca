"""Finds a table and reads its metadata file, with nothing decrypted yet: for verification and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT

from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.errors import ConfigurationError, KeytoolsError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.file_io import CONFIG_PROPERTY
from parquet_keytools.iceberg.metadata import TableEncryption, parse_table_metadata, read_metadata_file
from parquet_keytools.iceberg.table_files import MAPPING_PROPERTY, mapped_location, open_as_stored, stored_location
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.storage.locations import FileLocation

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class LocatedTable:
    """A table, and how its files are opened; without a configuration, its service has an empty one."""

    encryption: TableEncryption
    service: KeyService
    file_io: FileIO
    mapping: str
    places: TablePlaces

    def open_stored(self, location: str) -> pa.NativeFile:
        """Open a file as it is stored."""
        return open_as_stored(lambda _: self.file_io, location, self.mapping)

    def path_of(self, location: str) -> str:
        """Return the path of a location on its file system."""
        mapped = mapped_location(location, self.mapping)
        try:
            return PyArrowFileIO.parse_location(mapped)[2]
        except ValueError:
            return mapped

    def folder(self) -> FileLocation | None:
        """Return the folder of the table: that of the folder `metadata` with its metadata file, or None.

        The location in the file is not taken: whoever changed it could let us list anything.
        """
        folder, _, _ = self.encryption.metadata_location.rpartition("/")
        above, _, name = folder.rpartition("/")
        if name != "metadata" or not above:
            return None
        return stored_location(self.file_io, mapped_location(above, self.mapping))


def catalog_named(name: str, properties: Mapping[str, str]) -> Catalog:
    """Return a catalog that PyIceberg knows; its errors are no context of ours, for they may hold anything."""
    try:
        return load_catalog(name, **properties)
    except (KeytoolsError, OSError):
        raise
    except ValueError as error:
        text, hint = f"PyIceberg has no catalog {name!r}: {error}.", "Describe it in .pyiceberg.yaml."
    except Exception as error:
        text = f"the catalog {name!r} cannot be used ({_in_short(error)})."
        hint = "Check its properties in .pyiceberg.yaml."
    raise ConfigurationError(text, hint=hint)


def table_named(catalog: Catalog, name: str, load: Callable[[Catalog, str], Loaded]) -> Loaded:
    """Return a table of a catalog, by a function that loads it; errors as with `catalog_named`."""
    try:
        return load(catalog, name)
    except (KeytoolsError, OSError):
        raise
    except (NoSuchTableError, NoSuchNamespaceError):
        text = f"the catalog {catalog.name!r} has no table {name!r}."
    except Exception as error:
        text = f"the catalog {catalog.name!r} does not load the table {name!r} ({_in_short(error)})."
    raise ConfigurationError(text, hint="Name it with its namespace: db.people.")


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def located_table(
    table: str,
    config: Path | None = None,
    catalog_name: str | None = None,
    properties: Mapping[str, str] = EMPTY_DICT,
) -> LocatedTable:
    """Find a table, by the location of its metadata file or its name in a catalog, and read that file.

    The configuration is by default the one that the properties name, of the catalog or given ones. Without any,
    no key can be unwrapped.

    Raises:
        KeytoolsError: The configuration or the metadata file is wrong.
        OSError: A file cannot be read.
    """
    given = dict(properties)
    if catalog_name is not None:
        if config is not None:
            given.setdefault(CONFIG_PROPERTY, str(config))
        catalog = catalog_named(catalog_name, given)
        loaded = table_named(catalog, table, lambda catalog, name: catalog.load_table(name))
        # Of ours, those of the catalog hold: a table's own may be anybody's.
        of_storage = {n: v for n, v in loaded.io.properties.items() if not n.startswith("keytools.")}
        ours = {n: v for n, v in catalog.properties.items() if n.startswith("keytools.")}
        table, given = loaded.metadata_location, {**of_storage, **ours, **given}
    elif "://" not in table and not table.startswith("file:"):
        table = str(expanded(table).absolute())
    if config is None and CONFIG_PROPERTY in given:
        config = Path(given[CONFIG_PROPERTY])
    configuration = load_configuration(config) if config is not None else parse_configuration({"version": 1})
    service = KeyService(configuration, None, time.monotonic)
    beneath = {name: value for name, value in given.items() if name != PY_IO_IMPL}
    mapping = given.get(MAPPING_PROPERTY, "")
    file_io = load_file_io(beneath, mapped_location(table, mapping))
    with open_as_stored(lambda _: file_io, table, mapping) as file:
        encryption = parse_table_metadata(read_metadata_file(file, table), table)
    return LocatedTable(encryption, service, file_io, mapping, TablePlaces(table, given))
