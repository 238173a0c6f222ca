"""Reading encrypted files and folders with pyarrow, and with lazy frames of Polars over them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.data_sets import DataSetFiles, ReadRequest
from parquet_keytools.arrow.read_options import (
    ReadOptions,
    columns_mentioned,
    hides_denied,
    hint_for_denied,
    nulls_denied,
    pandas_index,
    refuse_denied_filter,
    schema_for_all,
    shows_stand_ins,
)
from parquet_keytools.arrow.view_files import FOOTER_READ_BYTES, ViewHandler
from parquet_keytools.config.document import did_you_mean, one_of
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError
from parquet_keytools.files.denied_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, as_verified, read_again_if_changed
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile
from parquet_keytools.view.plain_files import PlainInput

if TYPE_CHECKING:
    import polars as pl

_log = logging.getLogger(__name__)


def read_table(keys: KeyService, location: FileLocation, request: ReadRequest, options: ReadOptions) -> pa.Table:
    """Read a file, or a folder as a data set; see `Keytools.read_table`.

    Raises:
        ColumnAccessDeniedError: A column that is asked for, or that a filter looks at, cannot be read.
        DecryptionError: A part of the file does not authenticate.
    """
    location = options.mapped(location)

    def read() -> pa.Table:
        if location.only or location.is_folder():
            return _read_folder(keys, location, request, options)
        # With `use_pandas_metadata` pyarrow reads the columns of the index, too.
        wanted = tuple if options.table.get("use_pandas_metadata") else request.wanted
        (opened,) = keys.open_files(
            [location],
            request.table_name,
            request.aad_prefix,
            again=False,
            wanted=wanted,
            holds_metadata=True,
            reads_folder_names=options.table.get("partitioning", "hive") is not None,
        )
        return _read_file(keys, opened, request, options)

    return read_again_if_changed(read)


def read_metadata(
    keys: KeyService, location: FileLocation, table_name: str | None, aad_prefix: str | bytes | None
) -> pq.FileMetaData:
    """Return what the footer of a file says, decrypted; see `Keytools.metadata`."""
    if location.is_folder():
        raise IsADirectoryError(f"{location} is a folder: name one of its files")
    (opened,) = keys.open_files([location], table_name, aad_prefix)
    hint = NEEDS_KEY
    if opened.digests is None:
        hint = "To leave these columns out, set `denied_columns: hide` under `reading`."
    opened.refuse_denied(None, hint=hint, hides_refused=hides_denied(keys) or shows_stand_ins(keys))
    shown = "hide" if opened.digests is None else "hash"
    with open_source(location) as source:
        view = PlainFile(opened, as_verified(opened, source), shown, PageCache(), gap=FOOTER_READ_BYTES)
        return pq.read_metadata(PlainInput(view))


def read_schema(
    keys: KeyService, location: FileLocation, table_name: str | None, aad_prefix: str | bytes | None
) -> pa.Schema:
    """Return the schema of a file or a data set; see `Keytools.schema`."""
    # What is shown as nulls may be null, whatever the file says.
    if not (location.only or location.is_folder() or nulls_denied(keys)):
        return read_metadata(keys, location, table_name, aad_prefix).schema.to_arrow_schema()
    files = DataSetFiles(keys, location, ReadRequest(None, None, table_name, aad_prefix), ReadOptions())
    return files.dataset("hive", None, knows_denied=hides_denied(keys)).schema


def _read_file(keys: KeyService, opened: OpenedFile, request: ReadRequest, options: ReadOptions) -> pa.Table:
    columns = request.columns
    stand_ins = shows_stand_ins(keys)
    refuse_denied_filter(opened, request.filters, has_stand_ins=stand_ins)
    if hides_denied(keys) and opened.denied:
        opened.refuse_denied(columns, hides_refused=True)
        columns = _without_denied(opened, columns)
    opened.refuse_denied(columns, hint=hint_for_denied(keys), hides_refused=stand_ins)
    denied_columns = keys.configuration.reading.denied_columns
    handler = ViewHandler(
        opened.location.filesystem, {opened.location.path: opened}, denied_columns=denied_columns
    )
    table = pq.read_table(
        opened.location.path,
        filesystem=pafs.PyFileSystem(handler),
        columns=None if columns is None else list(columns),
        filters=request.filters,
        # Its file system maps memory.
        **options.format,
        # Before pyarrow 25, a file in a folder `name=value` would get a column of that name.
        **{"partitioning": None, **options.table},
    )
    return table.cast(schema_for_all(table.schema, opened)) if nulls_denied(keys) else table


def _read_folder(keys: KeyService, folder: FileLocation, request: ReadRequest, options: ReadOptions) -> pa.Table:
    partitioning, schema = options.table.get("partitioning", "hive"), options.table.get("schema")
    if partitioning == "hive":
        # As in `pyarrow.parquet.read_table`, and other than in data sets.
        partitioning = ds.HivePartitioning.discover(infer_dictionary=True)
    of_files = options
    if "arrow_extensions_enabled" in inspect.signature(pq.read_table).parameters:
        # Its default, which data sets do not have; versions before 21 lack it.
        of_files = replace(options, format={"arrow_extensions_enabled": True, **options.format})
    # What is not asked for is not read: other columns may be refused. The index is known when a file was opened.
    finds_index = bool(options.table.get("use_pandas_metadata"))
    files = DataSetFiles(keys, folder, request, of_files, wanted=tuple if finds_index else request.wanted)
    dataset = files.dataset(partitioning, schema, knows_denied=hides_denied(keys))
    if finds_index and request.columns is not None:
        index = set(pandas_index(dataset.schema.metadata)) - set(request.columns)
        if index:
            request = replace(request, columns=[*request.columns, *sorted(index)])
            files = DataSetFiles(keys, folder, request, of_files, files.paths)
            dataset = files.dataset(partitioning, schema, knows_denied=hides_denied(keys))
    expression = None if request.filters is None else pq.filters_to_expression(request.filters)
    names = None if request.columns is None else [name for name in request.columns if name not in files.hidden]
    known = files.names
    for name in names or ():
        if name not in known and name.partition(".")[0] not in known:
            raise ValueError(f"{folder} has no column {name!r}. {did_you_mean(name, known) or one_of(known)}")
    threads = options.table.get("use_threads", True)
    return dataset.to_table(columns=names, filter=expression, use_threads=threads)


def _without_denied(opened: OpenedFile, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        columns = list(dict.fromkeys(column.path[0] for column in opened.footer.columns))
    denied = opened.denied_top_level
    return [name for name in columns if not any(column.path[0] in denied for column in opened.columns_named(name))]


_BATCHES_AHEAD_OF_A_THREAD = 2
_BATCHES_AHEAD = 16
"""What Arrow reads ahead by default."""


OpenColumns = Callable[..., ds.Dataset]
"""Opens a data set for the `columns` that it is called with only; None for all."""


@dataclass(frozen=True)
class PolarsSource:
    """What Polars takes for a pyarrow data set: it is opened when it is scanned, for the columns of the query.

    So only their keys are fetched, and columns that nobody asks for may be refused.
    """

    schema: pa.Schema
    open_columns: OpenColumns

    def to_batches(
        self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Scan; see `pyarrow.dataset.Dataset.to_batches`.

        By default Arrow decodes two million rows ahead, however few threads there are: memory that is new for each
        of them costs more than what the threads wait for.
        """
        options.setdefault("batch_readahead", min(_BATCHES_AHEAD, _BATCHES_AHEAD_OF_A_THREAD * pa.cpu_count()))
        names = list(self.schema.names if columns is None else columns)
        wanted = dict.fromkeys(names)
        if filter is not None:
            wanted |= dict.fromkeys(columns_mentioned(filter, self.schema.names))
        dataset = self.open_columns(columns=list(wanted))
        batches: Iterator[pa.RecordBatch] = dataset.to_batches(columns=names, filter=filter, **options)
        return batches


def scan_polars(open_columns: OpenColumns, open_file: Callable[[str], PlainInput]) -> pl.LazyFrame:
    """Return a lazy frame over a data set, and the view of one of its files; see `Keytools.scan_polars`."""
    try:
        import polars as pl
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        raise ConfigurationError("Polars is not installed.", hint="pip install polars") from None
    return pl.scan_pyarrow_dataset(PolarsSource(_schema(open_columns, open_file), open_columns))


def _schema(open_columns: OpenColumns, open_file: Callable[[str], PlainInput]) -> pa.Schema:
    """Return the schema of all columns, also of those that cannot be read."""
    try:
        return open_columns(columns=None).schema
    except ColumnAccessDeniedError:
        dataset = open_columns(columns=[])
        with open_file(next(dataset.get_fragments()).path) as file:
            whole = pq.read_schema(file)
        found = [whole.field(name) for name in whole.names if name not in dataset.schema.names]
        return pa.schema([*dataset.schema, *found])
