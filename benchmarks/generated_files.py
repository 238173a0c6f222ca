"""Files for benchmarks: uncompressed doubles and integers, and a dictionary column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ("first", "second", "third", "fourth", "number", "other_number", "word")
PAGE_BYTES = 140_000
"""With 700 MB: about 5,000 pages."""

_ROW_BYTES = 49
_ROW_GROUP_ROWS = 1_000_000


def write_generated(path: Path, megabytes: int, page_bytes: int = PAGE_BYTES) -> None:
    """Write a plaintext file.

    Args:
        path: The file's path.
        megabytes: Its approximate length.
        page_bytes: The approximate length of its pages.
    """
    random = np.random.default_rng(0)
    words = pa.array([f"word {number}" for number in range(200)])
    rows = megabytes * 1_000_000 // _ROW_BYTES
    writer: pq.ParquetWriter | None = None
    for start in range(0, rows, _ROW_GROUP_ROWS):
        count = min(_ROW_GROUP_ROWS, rows - start)
        columns = [random.random(count) for _ in range(4)] + [random.integers(0, 2**62, count) for _ in range(2)]
        word = pa.DictionaryArray.from_arrays(random.integers(0, len(words), count, np.int32), words)
        table = pa.table([*columns, word.cast(pa.string())], names=list(COLUMNS))
        if writer is None:
            writer = pq.ParquetWriter(
                path,
                table.schema,
                compression="none",
                use_dictionary=["word"],
                data_page_size=page_bytes,
                # The interval at which the page size is checked.
                write_batch_size=min(1024, max(1, page_bytes // 8)),
            )
        writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
    assert writer is not None
    writer.close()
