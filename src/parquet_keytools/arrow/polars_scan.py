"""Polars' lazy frames over encrypted data sets: projections and filters go to pyarrow's reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from parquet_keytools.arrow.decryption_properties import columns_mentioned
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError
from parquet_keytools.view.plain_files import PlainInput

if TYPE_CHECKING:
    import polars as pl


_BATCHES_AHEAD_OF_A_THREAD = 2
_BATCHES_AHEAD = 16
"""What Arrow reads ahead by default."""


class OpenColumns(Protocol):
    """Opens a data set."""

    def __call__(self, *, columns: Sequence[str] | None) -> ds.Dataset:
        """Open it for these columns only; None for all."""
        ...


@dataclass(frozen=True)
class PolarsSource:
    """What Polars takes for a pyarrow data set: it is opened when it is scanned, for the columns of the query.

    So only their keys are fetched, and columns that nobody asks for may be refused.

    Attributes:
        schema: Of the whole data set.
        open_columns: Opens it.
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
    """Return a lazy frame; see `Keytools.scan_polars`.

    Args:
        open_columns: Opens the data set.
        open_file: Opens the view of one of its files.

    Raises:
        ConfigurationError: Polars is not installed.
    """
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
