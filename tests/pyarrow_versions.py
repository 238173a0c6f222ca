"""What older versions of pyarrow cannot do, for tests that do the rest without it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_VERSION = int(pa.__version__.partition(".")[0])

DECRYPTS_IN_THREADS = _VERSION >= 20
"""Older versions refuse `decryption_properties`."""

WRITES_IN_ORDER = _VERSION >= 21
"""In older versions, `write_dataset` has no `preserve_order`."""

WRITES_STREAMS = _VERSION >= 21
"""In older versions, `pyarrow.dataset.write_dataset` takes no object with `__arrow_c_stream__`."""

WRITES_BLOOM_FILTERS = _VERSION >= 24


def bloom_filters(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the write option for Bloom filters of columns; empty where pyarrow cannot write them."""
    return {"bloom_filter_options": columns} if WRITES_BLOOM_FILTERS else {}


def rows_per_page(rows: int) -> dict[str, Any]:
    """Return write options for pages of some rows; before pyarrow 23, for pages of some values of a list."""
    return {"write_batch_size": rows, **({"max_rows_per_page": rows} if _VERSION >= 23 else {"data_page_size": 1})}
