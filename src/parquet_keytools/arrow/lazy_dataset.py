"""A pyarrow data set whose files are opened when a scan comes to them, and what serves them to Arrow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import called_by_arrow
from parquet_keytools.arrow.read_options import columns_mentioned
from parquet_keytools.arrow.verified_filesystem import VerifiedHandler
from parquet_keytools.files.conversion import check_modules
from parquet_keytools.files.files_ahead import FilesAhead
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.secret_bytes import SecretBytes


class LazyDataset(ds.FileSystemDataset):  # type: ignore[misc]
    """A data set whose files are opened when they are scanned, some of them ahead of the scan.

    Arrow leaves out partitions by the names of folders. What is left is opened by threads of ours: Arrow waits for
    them, and gets a file or our error. Nothing is kept here: `filter` makes another data set of the same files.
    Its methods take what those of pyarrow take, also by position.
    """

    @property
    def partitioning(self) -> ds.Partitioning | None:
        """What the names of folders and files mean."""
        return self.filesystem.handler.partitioning

    def to_table(self, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> pa.Table:
        """Scan; see `pyarrow.dataset.Dataset`.

        Raises:
            DecryptionError: A module does not authenticate; all ways to scan raise it.
        """
        with self._naming_damage(columns, filter):
            return super().to_table(columns, filter, *more, **options)

    def to_batches(
        self, columns: Any = None, filter: Any = None, *more: Any, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Scan; see `pyarrow.dataset.Dataset`."""
        batches = super().to_batches(columns, filter, *more, **options)
        return self._named(batches, columns, filter)

    def head(self, num_rows: int, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> pa.Table:
        """Scan the beginning; see `pyarrow.dataset.Dataset`."""
        with self._naming_damage(columns, filter):
            return super().head(num_rows, columns, filter, *more, **options)

    def take(self, indices: Any, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> pa.Table:
        """Pick rows; see `pyarrow.dataset.Dataset`."""
        with self._naming_damage(columns, filter):
            return super().take(indices, columns, filter, *more, **options)

    def count_rows(self, filter: Any = None, *more: Any, **options: Any) -> int:
        """Count rows; see `pyarrow.dataset.Dataset`."""
        with self._naming_damage([], filter):
            return int(super().count_rows(filter, *more, **options))

    def scanner(self, columns: Any = None, filter: Any = None, *more: Any, **options: Any) -> ds.Scanner:
        """Return a scanner; its files begin to be opened."""
        self._read_ahead(filter)
        return super().scanner(columns, filter, *more, **options)

    def sort_by(self, *arguments: Any, **options: Any) -> ds.InMemoryDataset:
        """Sort; see `pyarrow.dataset.Dataset`. Here, and in joins, Arrow does not ask for a scanner."""
        self._read_ahead(None)
        return super().sort_by(*arguments, **options)

    def join(self, *arguments: Any, **options: Any) -> ds.InMemoryDataset:
        """Join; see `pyarrow.dataset.Dataset`."""
        self._read_ahead(None)
        return super().join(*arguments, **options)

    def join_asof(self, *arguments: Any, **options: Any) -> ds.InMemoryDataset:
        """Join by the nearest key; see `pyarrow.dataset.Dataset`."""
        self._read_ahead(None)
        return super().join_asof(*arguments, **options)

    def replace_schema(self, schema: pa.Schema) -> LazyDataset:
        """Return the same files under another schema."""
        other = super().replace_schema(schema)
        replaced = LazyDataset(list(other._get_fragments(None)), schema, self.format, self.filesystem)
        expression = self._whole_filter(None)
        return replaced if expression is None else replaced.filter(expression)

    def __reduce__(self) -> tuple[Any, ...]:
        # No key leaves the process: the files are opened again, with the keys of who unpickles.
        paths = [fragment.path for fragment in self.get_fragments()]
        return self.filesystem.handler.reopen, (paths, self.schema)

    def _named(self, batches: Iterator[pa.RecordBatch], columns: Any, expression: Any) -> Iterator[pa.RecordBatch]:
        with self._naming_damage(columns, expression):
            yield from batches

    @contextlib.contextmanager
    def _naming_damage(self, columns: Any, expression: Any) -> Iterator[None]:
        """Say which module of which file is damaged, if a scan ends so: pyarrow does not. All is scanned again."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # Else it is the operating system's own.
                decrypted = self._decrypted(columns, expression)
                for fragment in self._get_fragments(self._whole_filter(expression)):
                    check_modules(self.filesystem.handler.opened[fragment.path], decrypted)
            raise

    def _decrypted(self, columns: Any, expression: Any) -> list[str] | None:
        """Return names of the columns that a scan decrypts; None for all."""
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            return None
        whole_filter = self._whole_filter(expression)
        mentioned = [] if whole_filter is None else columns_mentioned(whole_filter, self.schema.names)
        return [*columns, *mentioned]

    def _whole_filter(self, expression: Any) -> Any:
        """Return the filter of a scan together with that of the data set, which `filter` made."""
        return self._scanner_options({"filter": expression}).get("filter")

    def _read_ahead(self, expression: Any) -> None:
        fragments = self._get_fragments(self._whole_filter(expression))
        self.filesystem.handler.opened.read_ahead(fragment.path for fragment in fragments)


Reopen = Callable[[list[str], pa.Schema], ds.Dataset]
"""Makes the data set again, of these files and with this schema; can be pickled."""


@called_by_arrow
class DataSetHandler(VerifiedHandler):
    """Serves the files of a data set to Arrow, which decrypts all of them with one factory.

    Those in `with_properties` it decrypts with properties of their own instead.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        opened: FilesAhead,
        known: Mapping[tuple[str, str], SecretBytes],
        reopen: Reopen,
        *,
        denied_columns: str,
    ) -> None:
        super().__init__(filesystem, opened, denied_columns=denied_columns)
        self.opened = opened
        self.reopen = reopen
        self.with_properties: set[str] = set()
        self.partitioning: ds.Partitioning | None = None
        self._known = known
        self._keks: dict[bytes, SecretBytes] = {}

    def is_left_to_arrow(self, opened: OpenedFile) -> bool:
        """Tell whether Arrow decrypts a file.

        Its factory for all files knows neither data keys nor external key material. And it keeps KEKs by their id
        alone: a file with another KEK of the same id, which nobody makes by accident, is none for it.
        """
        if not super().is_left_to_arrow(opened):
            return False
        if opened.location.path in self.with_properties:
            return True
        if needs_properties(opened):
            return False
        keyed = [column.key_metadata for column in opened.footer.columns if column.path in opened.deks]
        materials = map(opened.retriever.material, {opened.footer.key_metadata, *keyed})
        used = {
            (material.kek_id, material.kms_wrapped_key, material.master_key_id)
            for material in materials
            if material is not None and material.kek_id is not None
        }
        for kek_id, wrapped_kek, master_key_id in used:
            kek = self._known[wrapped_kek, master_key_id]
            if self._keks.setdefault(kek_id, kek) != kek:
                return False
        return True


def needs_properties(opened: OpenedFile) -> bool:
    """Tell whether Arrow has to be given decryption properties for just this file to decrypt it."""
    return opened.retriever.uses_data_keys or opened.retriever.key_materials is not None
