"""Scans data sets whose files go wrong after they were opened; a program, since Arrow might abort or hang.

It prints the name of each fault that it survived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from faults import FaultyKms

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    DecryptionError,
    KmsUnavailableError,
    NotEncryptedError,
)

MASTER_KEYS = {name: name.encode() * 4 for name in ("foot", "cola")}
TABLE = pa.table({"a": range(50), "b": range(50)})
FILES = 4
BAD = 2


def tools_of(kms: FaultyKms) -> Keytools:
    table = {
        "footer_key": "foot",
        "column_keys": {"cola": ["a"]},
        "unlisted_columns": "plaintext",
        "double_wrapping": False,
    }
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table},
    }
    return Keytools(parse_configuration(document), kms=kms)


def delete(kms: FaultyKms, bad: Path) -> None:
    bad.unlink()


def alter_the_footer(kms: FaultyKms, bad: Path) -> None:
    data = bytearray(bad.read_bytes())
    data[-60] ^= 1
    bad.write_bytes(data)


def replace_by_plaintext(kms: FaultyKms, bad: Path) -> None:
    pq.write_table(TABLE, bad)


def refuse_a_key(kms: FaultyKms, bad: Path) -> None:
    kms.fail("refused", "cola")


def stop_the_kms(kms: FaultyKms, bad: Path) -> None:
    kms.fail("timeout")


FAULTS: dict[str, tuple[Callable[[FaultyKms, Path], None], type[Exception], bool]] = {
    # name -> what happens after the data set was opened, the error, and whether it is about the bad file alone
    "deleted file": (delete, FileNotFoundError, True),
    "altered footer": (alter_the_footer, DecryptionError, True),
    "plaintext file": (replace_by_plaintext, NotEncryptedError, True),
    "refused key": (refuse_a_key, ColumnAccessDeniedError, False),
    "KMS gone": (stop_the_kms, KmsUnavailableError, False),
}


def with_duckdb(dataset: Any) -> object:
    return duckdb.connect().execute("select sum(a), count(*) from dataset").fetchall()


def with_datafusion(dataset: Any) -> object:
    context = datafusion.SessionContext()
    context.register_dataset("wide", dataset)
    return context.sql("select sum(a), count(*) from wide").collect()


WAYS: dict[str, Callable[[Any], object]] = {
    "to_table": lambda dataset: dataset.to_table(),
    "to_table, filtered by values": lambda dataset: dataset.to_table(columns=["b"], filter=pc.field("a") > 5),
    "to_table on one thread": lambda dataset: dataset.to_table(use_threads=False),
    "to_batches": lambda dataset: list(dataset.to_batches()),
    "head": lambda dataset: dataset.head(FILES * 50),
    "count_rows": lambda dataset: dataset.count_rows(),
    "scanner": lambda dataset: dataset.scanner(columns=["b"]).to_reader().read_all(),
    "filter": lambda dataset: dataset.filter(pc.field("b") >= 0).to_table(),
    "fragments": lambda dataset: [fragment.to_table() for fragment in dataset.get_fragments()],
    "sort_by": lambda dataset: dataset.sort_by("b"),
    "polars": lambda dataset: pl.scan_pyarrow_dataset(dataset).select(pl.col("a").sum()).collect(),
    "duckdb": with_duckdb,
    "datafusion": with_datafusion,
}


def main(name: str, folder: Path) -> None:
    """Run all ways to read."""
    fault, kind, is_of_one_file = FAULTS[name]
    kms = FaultyKms(MASTER_KEYS)
    tools = tools_of(kms)
    paths = [folder / f"p={number:02}" / "x.parquet" for number in range(FILES)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        tools.write_table(TABLE, path)
    good = paths[BAD].read_bytes()

    def reads() -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {}
        if name != "deleted file":  # Otherwise the folder would be listed without it.
            found["read_table"] = lambda: tools.read_table(folder)
        for way, read in WAYS.items():
            dataset = tools.dataset(folder)
            found[way] = lambda read=read, dataset=dataset: read(dataset)  # type: ignore[misc]
        return found

    for way, read in reads().items():
        fault(kms, paths[BAD])
        tools.clear_caches()
        if is_of_one_file:
            # The state of columns that are not requested does not matter.
            wanted = tools.dataset(folder).to_table(filter=pc.field("p") < BAD)
            assert wanted.num_rows == BAD * 50, way
        try:
            read()
        except Exception as error:
            # These get only the text.
            assert isinstance(error, kind) or way in ("duckdb", "polars", "datafusion"), f"{way}: {error!r}"
            text = f"{error} {getattr(error, 'path', '')}"
            assert not is_of_one_file or str(paths[BAD]) in text, f"{way}: {error!r}"
            assert kind is not KmsUnavailableError or "unavailable" in text, f"{way}: {error!r}"
            assert kind is not ColumnAccessDeniedError or "a" in text, f"{way}: {error!r}"
        else:
            sys.exit(f"{name}: {way} did not fail")
        # It is over when it is over.
        kms.failure = None
        paths[BAD].write_bytes(good)
        tools.clear_caches()
        assert tools.dataset(folder).to_table().num_rows == FILES * 50, way
    print(name, flush=True)


if __name__ == "__main__":
    for each in FAULTS:
        main(each, Path(sys.argv[1]) / each)
