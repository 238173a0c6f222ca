"""Runs operations against a KMS that fails, in separate processes: such failures used to kill some of them.

    python kms_failure_worker.py FOLDER

prepares files, forks once for a batch of cases, and writes outcomes.json. If such a process ends by a signal, with
an error, or not at all, each of its cases runs again in its own process, and so gets its own outcome.
Imports are done before the forks, which saves most of the time. pyarrow is not used before them: its threads
would not exist in the children.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import opentelemetry.metrics
import opentelemetry.trace  # noqa: F401
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.parquet.encryption
from faults import FAILURES, FaultyKms

import parquet_keytools.tables.reading
import parquet_keytools.tables.writing  # noqa: F401
from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError

SECONDS_PER_PROCESS = 50
CASES_PER_PROCESS = 60
MASTER_KEYS = {"kf": b"0123456789012345", "kc": b"1234567890123450", "kd": b"1234567890123451"}
ROWS = 3000


@cache
def table() -> pa.Table:
    """Return plain columns, one column under each column key, and one that is the index of a data frame."""
    frame = pd.DataFrame(
        {"plain": range(ROWS), "refused": [f"text {i}" for i in range(ROWS)], "other": range(ROWS)},
        index=pd.Index([f"row {i}" for i in range(ROWS)], name="refused_index"),
    )
    return pa.Table.from_pandas(frame)


@dataclass
class Context:
    """The inputs of an operation."""

    folder: Path
    kms: FaultyKms
    double: bool
    output_name: str = "none"

    @property
    def file(self) -> Path:
        return self.folder / ("double" if self.double else "single") / "one" / "x.parquet"

    @property
    def data_set(self) -> Path:
        return self.folder / ("double" if self.double else "single") / "many"

    def output(self) -> Path:
        return self.folder / "outputs" / self.output_name / "x.parquet"

    def keytools(self, **settings: Any) -> Keytools:
        table_settings = {
            "footer_key": "kf",
            "column_keys": {"kc": ["refused", "refused_index"], "kd": ["other"]},
            "unlisted_columns": "plaintext",
            "double_wrapping": self.double,
        }
        document = {
            "version": 1,
            "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
            "tables": {"t": table_settings | settings},
        }
        return Keytools(parse_configuration(document), kms=self.kms)

    def properties(self, columns: list[str] | None = None) -> Any:
        return self.keytools().decryption_properties(self.file, columns=columns)

    def fragment_options(self, columns: list[str] | None = None) -> Any:
        options = ds.ParquetFragmentScanOptions(decryption_properties=self.properties(columns))
        return ds.ParquetFileFormat(default_fragment_scan_options=options)


Operation = Callable[[Context], object]
WRITES: dict[str, Operation] = {}
READS: dict[str, Operation] = {}
"""Reads that need the column `refused`."""
OTHER_READS: dict[str, Operation] = {}
"""Reads that do not need it."""


def operation(group: dict[str, Operation]) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        group[function.__name__] = function
        return function

    return register


# --- writing ---


@operation(WRITES)
def write_table(c: Context) -> object:
    return c.keytools().write_table(table(), c.output())


@operation(WRITES)
def write_table_by_module_encryptor(c: Context) -> object:
    return c.keytools(aad_prefix="x").write_table(table(), c.output())


@operation(WRITES)
def write_table_with_external_key_material(c: Context) -> object:
    return c.keytools(key_material="external").write_table(table(), c.output())


@operation(WRITES)
def write_with_encryption_properties(c: Context) -> object:
    properties = c.keytools().encryption_properties("t", table().schema, c.output())
    return pq.write_table(table(), c.output(), encryption_properties=properties)


@operation(WRITES)
def write_with_parquet_writer(c: Context) -> object:
    properties = c.keytools().encryption_properties("t", table().schema, c.output())
    with pq.ParquetWriter(c.output(), table().schema, encryption_properties=properties) as writer:
        writer.write_table(table())
    return None


@operation(WRITES)
def write_with_pandas(c: Context) -> object:
    properties = c.keytools().encryption_properties("t", table().schema, c.output())
    return table().to_pandas().to_parquet(c.output(), encryption_properties=properties)


@operation(WRITES)
def write_dataset(c: Context) -> object:
    return c.keytools().write_dataset(table(), c.output(), max_rows_per_file=500, max_rows_per_group=500)


@operation(WRITES)
def write_dataset_by_module_encryptor(c: Context) -> object:
    return c.keytools(aad_prefix="{file_name}").write_dataset(
        table(), c.output(), max_rows_per_file=500, max_rows_per_group=500
    )


# --- reading with Keytools ---


@operation(READS)
def read_table(c: Context) -> object:
    return c.keytools().read_table(c.file)


@operation(READS)
def read_table_column(c: Context) -> object:
    return c.keytools().read_table(c.file, columns=["refused"])


@operation(READS)
def read_table_filter_tuple(c: Context) -> object:
    return c.keytools().read_table(c.file, columns=["plain"], filters=[("refused", "==", "text 7")])


@operation(READS)
def read_table_filter_expression(c: Context) -> object:
    return c.keytools().read_table(c.file, columns=["plain"], filters=pc.field("refused") == "text 7")


@operation(READS)
def read_table_filter_by_position(c: Context) -> object:
    return c.keytools().read_table(c.file, columns=["plain"], filters=pc.field(1) == "text 7")


@operation(READS)
def read_table_as_pandas_with_index(c: Context) -> object:
    """The index is read without being named."""
    return c.keytools().read_table(c.file, columns=["plain"], use_pandas_metadata=True)


@operation(READS)
def read_table_with_schema(c: Context) -> object:
    return c.keytools().read_table(c.file, schema=table().schema)


@operation(READS)
def read_folder(c: Context) -> object:
    return c.keytools().read_table(c.data_set)


@operation(READS)
def read_folder_filter(c: Context) -> object:
    return c.keytools().read_table(c.data_set, columns=["plain"], filters=pc.field("refused") == "text 7")


@operation(READS)
def dataset(c: Context) -> object:
    return c.keytools().dataset(c.data_set).to_table()


@operation(READS)
def dataset_filter(c: Context) -> object:
    return c.keytools().dataset(c.data_set, columns=["plain"], filters=[("refused", "==", "text 7")])


@operation(READS)
def dataset_of_another_schema(c: Context) -> object:
    """A caller who replaces the schema requests columns that they did not name."""
    found = c.keytools().dataset(c.data_set, columns=["plain"]).replace_schema(table().schema)
    return found.to_table(filter=pc.field("refused") == "text 7")


@operation(READS)
def dataset_of_another_schema_count_rows(c: Context) -> object:
    found = c.keytools().dataset(c.data_set, columns=["plain"]).replace_schema(table().schema)
    return found.count_rows(filter=pc.field("refused") == "text 7")


@operation(READS)
def dataset_of_another_schema_head(c: Context) -> object:
    return c.keytools().dataset(c.data_set, columns=["plain"]).replace_schema(table().schema).head(5)


@operation(READS)
def dataset_of_another_schema_batches(c: Context) -> object:
    found = c.keytools().dataset(c.data_set, columns=["plain"]).replace_schema(table().schema)
    return list(found.to_batches(columns=["refused"]))


@operation(READS)
def dataset_fragment_filter(c: Context) -> object:
    found = c.keytools().dataset(c.data_set, columns=["plain"])
    return [fragment.to_table(filter=pc.field("refused") == "text 7") for fragment in found.get_fragments()]


@operation(READS)
def dataset_fragment_read(c: Context) -> object:
    found = c.keytools().dataset(c.data_set, columns=["plain"])
    return [fragment.to_table(columns=["refused"]) for fragment in found.get_fragments()]


# --- reading with plain pyarrow and our properties ---


@operation(READS)
def plain_read_table(c: Context) -> object:
    return pq.read_table(c.file, decryption_properties=c.properties())


@operation(READS)
def plain_read_table_column(c: Context) -> object:
    return pq.read_table(c.file, columns=["refused"], decryption_properties=c.properties())


@operation(READS)
def plain_read_table_filter_tuple(c: Context) -> object:
    filters = [("refused", "==", "text 7")]
    return pq.read_table(c.file, columns=["plain"], filters=filters, decryption_properties=c.properties())


@operation(READS)
def plain_read_table_filter_expression(c: Context) -> object:
    filters = pc.field("refused") == "text 7"
    return pq.read_table(c.file, columns=["plain"], filters=filters, decryption_properties=c.properties())


@operation(READS)
def plain_read_table_filter_by_position(c: Context) -> object:
    filters = pc.field(1) == "text 7"
    return pq.read_table(c.file, columns=["plain"], filters=filters, decryption_properties=c.properties())


@operation(READS)
def plain_read_table_with_schema(c: Context) -> object:
    filters = pc.field("refused") == "text 7"
    return pq.read_table(c.file, schema=table().schema, filters=filters, decryption_properties=c.properties())


@operation(READS)
def plain_read_table_with_index(c: Context) -> object:
    return pq.read_table(c.file, columns=["plain"], use_pandas_metadata=True, decryption_properties=c.properties())


@operation(READS)
def parquet_file(c: Context) -> object:
    return pq.ParquetFile(c.file, decryption_properties=c.properties()).read()


@operation(READS)
def parquet_file_batches(c: Context) -> object:
    return list(pq.ParquetFile(c.file, decryption_properties=c.properties()).iter_batches())


@operation(READS)
def parquet_dataset(c: Context) -> object:
    return pq.ParquetDataset(c.file, decryption_properties=c.properties()).read()


@operation(READS)
def plain_metadata(c: Context) -> object:
    return pq.read_metadata(c.file, decryption_properties=c.properties()).to_dict()


@operation(READS)
def plain_metadata_of_column(c: Context) -> object:
    return pq.ParquetFile(c.file, decryption_properties=c.properties()).metadata.row_group(0).column(1)


@operation(READS)
def plain_schema(c: Context) -> object:
    return pq.read_schema(c.file, decryption_properties=c.properties())


@operation(READS)
def properties_with_column(c: Context) -> object:
    return c.properties(["plain", "refused"])


@operation(READS)
def pandas(c: Context) -> object:
    return pd.read_parquet(c.file, decryption_properties=c.properties())


@operation(READS)
def pandas_column(c: Context) -> object:
    return pd.read_parquet(c.file, columns=["refused"], decryption_properties=c.properties())


@operation(READS)
def pandas_filter(c: Context) -> object:
    filters = [("refused", "==", "text 7")]
    return pd.read_parquet(c.file, columns=["plain"], filters=filters, decryption_properties=c.properties())


@operation(READS)
def plain_dataset_filter(c: Context) -> object:
    found = ds.dataset(c.file, format=c.fragment_options())
    return found.to_table(columns=["plain"], filter=pc.field("refused") == "text 7")


@operation(READS)
def plain_dataset_head(c: Context) -> object:
    return ds.dataset(c.file, format=c.fragment_options()).head(3)


# --- operations that continue without the column ---


@operation(OTHER_READS)
def read_table_other_columns(c: Context) -> object:
    return c.keytools().read_table(c.file, columns=["plain", "other"]).num_rows


@operation(OTHER_READS)
def read_table_other_filter(c: Context) -> object:
    found = c.keytools().read_table(c.file, columns=["plain"], filters=[("other", ">=", 0)])
    return found.num_rows


@operation(OTHER_READS)
def read_folder_other_columns(c: Context) -> object:
    return c.keytools().read_table(c.data_set, columns=["plain", "other"]).num_rows


@operation(OTHER_READS)
def dataset_other_columns(c: Context) -> object:
    found = c.keytools().dataset(c.data_set, columns=["plain", "other"])
    assert found.schema.names == ["plain", "other"]
    assert found.count_rows(filter=pc.field("other") >= 0) == ROWS
    assert sum(batch.num_rows for batch in found.to_batches()) == ROWS
    assert found.head(5).num_rows == 5
    return found.to_table(filter=pc.field("other") >= 0).num_rows


@operation(OTHER_READS)
def dataset_metadata(c: Context) -> object:
    """Each access to metadata of fragments that crashed Arrow after one refused key."""
    rows = 0
    for fragment in c.keytools().dataset(c.data_set, columns=["plain"]).get_fragments():
        fragment.ensure_complete_metadata()
        rows += sum(row_group.num_rows for row_group in fragment.row_groups)
        str(fragment.metadata.to_dict())
        assert [row_group.statistics for row_group in fragment.row_groups]
        fragment.split_by_row_group(pc.field("refused") == "text 7")
    return rows


@operation(OTHER_READS)
def plain_read_table_other_columns(c: Context) -> object:
    properties = c.properties(["plain", "other"])
    return pq.read_table(c.file, columns=["plain", "other"], decryption_properties=properties).num_rows


@operation(OTHER_READS)
def plain_read_table_other_filter(c: Context) -> object:
    filters = pc.field("other") >= 0
    properties = c.properties(["plain", "other"])
    return pq.read_table(c.file, columns=["plain"], filters=filters, decryption_properties=properties).num_rows


@operation(OTHER_READS)
def parquet_file_named_columns(c: Context) -> object:
    file = pq.ParquetFile(c.file, decryption_properties=c.properties(["plain", "other"]))
    return file.read(columns=["plain", "other"]).num_rows


@operation(OTHER_READS)
def plain_dataset_named_columns(c: Context) -> object:
    found = ds.dataset(c.file, format=c.fragment_options(["plain", "other"]))
    return found.to_table(columns=["plain"], filter=pc.field("other") >= 0).num_rows


# --- cases ---


@dataclass(frozen=True)
class Case:
    """One operation, and the KMS failure that it meets."""

    group: str
    operation: str
    failure: str
    double: bool
    failing: str
    """`column`: the master key of the column `refused` fails; `footer`: the master key of the footer fails."""

    @property
    def name(self) -> str:
        wrapping = "double" if self.double else "single"
        return f"{self.operation}-{self.failure}-{wrapping}-{self.failing}"


def cases() -> Iterator[Case]:
    """Yield every operation with every failure; wrappings and master keys alternate, to save time."""
    names = list(itertools.product(WRITES, FAILURES))
    for number, (name, failure) in enumerate(names):
        for failing in ("column", "footer"):
            yield Case("writes", name, failure, bool((number + number // 6) % 2) == (failing == "footer"), failing)
    for group, found in (("reads", READS), ("others", OTHER_READS)):
        for number, (name, failure) in enumerate(itertools.product(found, FAILURES)):
            yield Case(group, name, failure, bool((number + number // 6) % 2), "column")
    # If the footer's key fails, nothing has been read yet: two kinds of failure stand for all.
    for number, name in enumerate(READS | OTHER_READS):
        for failure in ("refused", "wrong_key"):
            yield Case("footer", name, failure, bool((number + (failure == "refused")) % 2), "footer")
    # These used to end by a signal.
    for name, double in itertools.product(READS, (True, False)):
        if "filter" in name or "metadata" in name:
            yield Case("reads", name, "refused", double, "column")


def run(case: Case, folder: Path) -> dict[str, Any]:
    kms = FaultyKms(MASTER_KEYS)
    kms.fail(case.failure, "kc" if case.failing == "column" else "kf")
    context = Context(folder, kms, case.double, f"{os.getpid()}-{case.name}")
    context.output().parent.mkdir(parents=True)
    found = (WRITES | READS | OTHER_READS)[case.operation]
    try:
        result = found(context)
    except Exception as error:
        return {
            "error": type(error).__name__,
            "ours": isinstance(error, KeytoolsError),
            "text": "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)),
            "left": _left_over(context),
        }
    outcome = {"result": result if isinstance(result, int) else repr(type(result)), "left": _left_over(context)}
    if case.operation in WRITES:
        kms.failure = None
        outcome["read"] = _error_of_reading(context)
    return outcome


def _error_of_reading(context: Context) -> str:
    """Return the class of the error in reading what was written, or an empty text."""
    try:
        context.keytools().read_table(context.output())
    except Exception as error:
        return type(error).__name__
    return ""


def _left_over(context: Context) -> list[str]:
    """Return files under the name of the output, in a folder of that name, or beside it; folders do not count."""
    return sorted(str(path) for path in context.output().parent.rglob("*") if path.is_file())


def prepare(folder: Path) -> None:
    """Write the input files, in a separate process."""
    process_id = os.fork()
    if process_id:
        assert os.waitpid(process_id, 0)[1] == 0
        return
    for double in (True, False):
        context = Context(folder, FaultyKms(MASTER_KEYS), double)
        context.file.parent.mkdir(parents=True)
        context.keytools().write_table(table(), context.file, row_group_size=500)
        context.keytools().write_dataset(table(), context.data_set, max_rows_per_file=1000, max_rows_per_group=500)
    os._exit(0)


def start(batch: list[Case], place: Path, folder: Path) -> int | None:
    """Fork for a batch of cases; returns the process id, or None in the child when it is done."""
    process_id = os.fork()
    if process_id:
        return process_id
    output = os.open(place.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.disable()
    place.with_suffix(".json").write_text(json.dumps([run(case, folder) for case in batch]))
    return None


def batches() -> list[list[Case]]:
    """Return all cases, grouped by operation."""
    found = list({case.name: case for case in cases()}.values())
    return [found[i : i + CASES_PER_PROCESS] for i in range(0, len(found), CASES_PER_PROCESS)]


def main(folder: Path) -> None:
    prepare(folder)
    # The first configuration takes longer than later ones.
    Context(folder, FaultyKms(MASTER_KEYS), False).keytools()
    # Otherwise each child would visit, and so copy, all of the parent's memory when it ends.
    gc.freeze()
    waiting = batches()[::-1]
    running: dict[int, tuple[int, list[Case], Path, float]] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    numbers = itertools.count()
    poll = select.poll()
    while waiting or running:
        while waiting and len(running) < 2:
            batch, place = waiting.pop(), folder / f"process {next(numbers)}"
            process_id = start(batch, place, folder)
            if process_id is None:
                return  # Ends like any program: Arrow may abort at that point, too.
            descriptor = os.pidfd_open(process_id)
            poll.register(descriptor, select.POLLIN)
            running[descriptor] = (process_id, batch, place, time.monotonic() + SECONDS_PER_PROCESS)
        ended = {descriptor for descriptor, _ in poll.poll(1000)}
        for descriptor, (process_id, batch, place, deadline) in list(running.items()):
            if descriptor not in ended:
                if time.monotonic() < deadline:
                    continue
                os.kill(process_id, 9)
            _, status = os.waitpid(process_id, 0)
            poll.unregister(descriptor)
            os.close(descriptor)
            del running[descriptor]
            end = "hang" if descriptor not in ended else os.waitstatus_to_exitcode(status)
            if end != 0 and len(batch) > 1:
                waiting += [[case] for case in batch]
                continue
            found = place.with_suffix(".json")
            results = json.loads(found.read_text()) if found.exists() else [{} for _ in batch]
            output = place.with_suffix(".txt").read_text(errors="replace")
            for case, result in zip(batch, results, strict=True):
                outcomes[case.name] = {"exit": end, **result, "output": output}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
