"""A catalog in a folder, with an in-memory KMS, for tests that write encrypted Iceberg tables."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from iceberg_reader import KEYS, Warehouse, current_metadata
from pyiceberg.catalog import sql
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io import OutputFile
from sqlalchemy import Engine, create_engine, event

from parquet_keytools.iceberg import create_table, load_table
from parquet_keytools.iceberg.encrypted_table import EncryptedTable
from parquet_keytools.iceberg.table_audit import TableAudit, located_table
from parquet_keytools.iceberg.written_files import StoredFileIO

CANARY = "canary-4711"


@lru_cache(8)
def _engine(url: str, **options: Any) -> Engine:
    """Return one engine for all catalogs of a database; each new one would compile its statements again."""
    engine = create_engine(url, **options)
    # No test survives a power failure, and to wait for the disk takes a tenth of the time.
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    return engine


sql.create_engine = _engine  # type: ignore[assignment]


def rows(start: int, stop: int) -> pa.Table:
    """Rows whose name begins with the canary."""
    ids = range(start, stop)
    names = [f"{CANARY}-{n}" for n in ids]
    return pa.table({"id": pa.array(ids, pa.int64()), "name": pa.array(names, pa.string())})


@dataclass
class Lake:
    """A catalog in SQLite, and its warehouse.

    Attributes:
        folder: Holds the database, the warehouse and the configuration.
        keys: Name of a master key -> its versions, base64.
    """

    folder: Path
    keys: dict[str, list[str]] = field(
        default_factory=lambda: {name: [base64.b64encode(key).decode()] for name, key in KEYS.items()}
    )

    def __post_init__(self) -> None:
        self.configure()
        self.catalog().create_namespace_if_not_exists("db")

    def configure(self) -> None:
        """Write the configuration."""
        keys = "".join(f"    {name}: [{', '.join(versions)}]\n" for name, versions in self.keys.items())
        text = f"version: 1\nkms:\n  type: in_memory\n  keys:\n{keys}master_keys: {{pii: keyA}}\n"
        path = self.folder / "keytools.yaml"
        path.write_text(text)
        path.chmod(0o600)

    def catalog(self, **properties: str) -> SqlCatalog:
        """Open the catalog."""
        return SqlCatalog(
            "lake",
            **{
                "uri": f"sqlite:///{self.folder}/catalog.db",
                "warehouse": f"file://{self.warehouse}",
                "py-io-impl": "parquet_keytools.iceberg.EncryptedFileIO",
                "keytools.config": str(self.folder / "keytools.yaml"),
                **properties,
            },
        )

    @property
    def warehouse(self) -> Path:
        return self.folder / "warehouse"

    def create(self, schema: pa.Schema | None = None, **named: Any) -> EncryptedTable:
        """Make the table."""
        return create_table(
            self.catalog(), "db.people", schema or rows(0, 1).schema, encryption_key="pii", **named
        )

    def load(self, name: str = "db.people", **properties: str) -> EncryptedTable:
        """Load the table with a catalog and a FileIO of its own."""
        table = load_table(self.catalog(**properties), name)
        assert isinstance(table, EncryptedTable)
        return table

    def findings(self, metadata_location: str) -> list[tuple[str, str]]:
        """Read all files of a table and return what is wrong with it: place and text of each finding."""
        located = located_table(metadata_location, self.folder / "keytools.yaml")
        return TableAudit(located, with_data=True).run().findings

    def ids(self) -> list[int]:
        """Return the column `id` as a fresh reader of ours reads it."""
        found: list[int] = self.load().scan().to_arrow()["id"].to_pylist()
        return sorted(found)

    # --- without our code ---

    @property
    def table_folder(self) -> Path:
        return self.warehouse / "db" / "people"

    @property
    def outsider(self) -> Warehouse:
        return Warehouse(self.warehouse, f"file://{self.warehouse}")

    def metadata(self) -> dict[str, Any]:
        """Return the newest metadata file."""
        return current_metadata(self.table_folder)

    def outside_ids(self) -> list[int]:
        """Return what a reader that shares no code with ours reads."""
        return self._ids(self.metadata())

    def outside_ids_of(self, metadata_location: str) -> list[int]:
        """Return the same for an older metadata file."""
        return self._ids(json.loads(self.outsider.read(metadata_location)))

    def _ids(self, metadata: dict[str, Any]) -> list[int]:
        table = self.outsider.table(metadata, metadata["current-snapshot-id"])
        return sorted(table["id"].to_pylist()) if len(table) else []

    def files(self) -> set[Path]:
        """Return all files of the table."""
        return {path for path in self.table_folder.rglob("*") if path.is_file()}

    def assert_no_plaintext(self) -> None:
        for path in self.folder.rglob("*"):
            assert CANARY not in str(path)
            if path.is_file():
                assert CANARY.encode() not in path.read_bytes(), path


def put_back(saved: Path, folder: Path) -> None:
    """Restore a folder of a lake to the state of a copy; metadata files have absolute locations."""
    sql.create_engine.cache_clear()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)


class Killed(BaseException):
    """Simulates the end of the process: nothing happens after it."""


@contextlib.contextmanager
def storage_that(act: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Call `act` with number and name before each storage step; yields the names."""
    steps: list[str] = []

    def step(name: str) -> None:
        steps.append(name)
        act(len(steps) - 1, name)

    class Output(OutputFile):
        def __init__(self, file: OutputFile) -> None:
            super().__init__(file.location)
            self.file = file

        def __len__(self) -> int:
            return len(self.file)

        def exists(self) -> bool:
            return self.file.exists()

        def to_input_file(self) -> Any:
            return self.file.to_input_file()

        def create(self, overwrite: bool = False) -> Any:
            name = "".join(Path(self.location).suffixes[-1:])
            step(f"create {name}")
            return Stream(self.file.create(overwrite), name)

    class Stream:
        def __init__(self, stream: Any, name: str) -> None:
            self.stream = stream
            self.name = name

        def write(self, data: bytes) -> int:
            try:
                step(f"write {self.name}")
            except BaseException:
                self.stream.write(data[: len(data) // 2])
                self.stream.close()
                raise
            self.stream.write(data)
            return len(data)

        def close(self) -> None:
            if not self.stream.closed:
                step(f"close {self.name}")
                self.stream.close()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

    new_output, delete = StoredFileIO.new_output, StoredFileIO.delete

    def deleting(self: StoredFileIO, location: Any) -> None:
        step("delete")
        delete(self, location)

    with (
        mock.patch.object(StoredFileIO, "new_output", lambda self, location: Output(new_output(self, location))),
        mock.patch.object(StoredFileIO, "delete", deleting),
    ):
        yield steps
