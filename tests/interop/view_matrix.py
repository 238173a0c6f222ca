"""Which engine reads encrypted files through which way of showing them as plain Parquet, with correct answers.

    python tests/interop/view_matrix.py

updates the table in docs/interoperability.md.
"""

from __future__ import annotations

import hmac
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from matrix import CALLED_WRONGLY

from parquet_keytools import Keytools
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer

ROWS = 3_000
FILES = 100
FLIGHTS = pa.table(
    {
        "distance": list(range(ROWS)),
        "carrier": ["UA", "AA", "B6"] * (ROWS // 3),
        "place": [{"city": f"city {row % 7}", "zip": row % 100} for row in range(ROWS)],
        "tailnum": [f"N{row:05d}" for row in range(ROWS)],
    }
)
CARRIERS = pa.table(
    {"carrier": ["UA", "AA", "B6"], "name": ["United", "American", "JetBlue"], "tailnum": ["a", "b", "c"]}
)

QUERIES = {
    "projection": [(row, FLIGHTS["carrier"][row].as_py()) for row in range(ROWS)],
    "filter": [(row,) for row in range(100)],
    "filter on nested": [(row,) for row in range(42, ROWS, 100)],
    "count": [(ROWS,)],
    "join": [("American", 1_000), ("JetBlue", 1_000), ("United", 1_000)],
    "100 files": [(ROWS, sum(range(ROWS)))],
}
"""Query -> its correct answer."""

POLICIES = ("error", "hide", "null", "hash")
COLUMNS = (*QUERIES, *(f"refused: {policy}" for policy in POLICIES))

SQL = {
    "projection": "select distance, carrier from {flights} order by distance",
    "filter": "select distance from {flights} where distance < 100 order by distance",
    "filter on nested": "select distance from {flights} where {zip} = 42 order by distance",
    "count": "select count(*) from {flights}",
    "join": (
        "select c.name, count(*) from {flights} f join {carriers} c on f.carrier = c.carrier "
        "group by c.name order by c.name"
    ),
    "100 files": "select count(*), sum(distance) from {many}",
    "refused": "select distance, tailnum from {flights} order by distance",
}


@dataclass(frozen=True)
class Shown:
    """Encrypted files, as views show them.

    A data set gets the columns that will be read: with all of them, a refused one is an error at once.

    Attributes:
        keytools: Decrypts.
        folder: The files' folder.
        server: Serves them.
        files: How many files the folder `many` has.
    """

    keytools: Keytools
    folder: Path
    server: ViewServer
    files: int

    def data_set(self, name: str, query: str) -> Any:
        """Return a pyarrow data set."""
        columns = {"projection": ["distance", "carrier"], "refused": ["distance", "tailnum"]}.get(query)
        path = name if name == "many" else f"{name}.parquet"
        return self.keytools.dataset(self.folder / path, columns=columns)

    @property
    def view(self) -> Any:
        """An fsspec file system."""
        return self.keytools.view(self.folder)

    @property
    def credentials(self) -> dict[str, str]:
        """Key ID and secret for S3."""
        pair = self.server.key_pair
        assert pair is not None
        return {"key_id": pair.access_key_id, "secret": pair.secret.reveal().decode()}


Answer = list[tuple[Any, ...]]
Engine = Callable[[Shown, str], Answer]
"""Returns an engine's rows for a query; the query `refused` reads a column that may be refused."""


# --- SQL ---


def duckdb_on_a_data_set(shown: Shown, query: str) -> Answer:
    import duckdb

    connection = duckdb.connect()
    for name in ("flights", "carriers", "many"):
        if f"{{{name}}}" in SQL[query]:
            connection.register(name, shown.data_set(name, query))
    text = SQL[query].format(flights="flights", carriers="carriers", many="many", zip="place.zip")
    return connection.sql(text).fetchall()


def duckdb_on_fsspec(shown: Shown, query: str) -> Answer:
    import duckdb

    connection = duckdb.connect()
    connection.register_filesystem(shown.view)
    names = {name: f"'keytools://{name}.parquet'" for name in ("flights", "carriers")}
    text = SQL[query].format(**names, many="'keytools://many/*.parquet'", zip="place.zip")
    return connection.sql(text).fetchall()


def _datafusion(query: str, register: Callable[[Any, str], None]) -> Answer:
    from datafusion import SessionContext

    context = SessionContext()
    for name in ("flights", "carriers", "many"):
        if f"{{{name}}}" in SQL[query]:
            register(context, name)
    text = SQL[query].format(flights="flights", carriers="carriers", many="many", zip="place['zip']")
    return _rows(context.sql(text).to_arrow_table())


def datafusion_on_a_data_set(shown: Shown, query: str) -> Answer:
    def register(context: Any, name: str) -> None:
        context.register_dataset(name, shown.data_set(name, query))

    return _datafusion(query, register)


def datafusion_on_s3(shown: Shown, query: str) -> Answer:
    from datafusion.object_store import AmazonS3

    def register(context: Any, name: str) -> None:
        store = AmazonS3(
            bucket_name="view",
            region="us-east-1",
            endpoint=shown.server.endpoint,
            allow_http=True,
            access_key_id=shown.credentials["key_id"],
            secret_access_key=shown.credentials["secret"],
        )
        context.register_object_store("s3://view/", store)
        context.register_parquet(name, f"s3://view/{name}/" if name == "many" else f"s3://view/{name}.parquet")

    return _datafusion(query, register)


def chdb_over_http(shown: Shown, query: str) -> Answer:
    names = {name: f"url('{shown.server.url}{name}.parquet', 'Parquet')" for name in ("flights", "carriers")}
    many = f"url('{shown.server.url}many/{{000..{shown.files - 1:03}}}.parquet', 'Parquet')"
    return _chdb(SQL[query].format(**names, many=many, zip="place.zip"))


def chdb_on_s3(shown: Shown, query: str) -> Answer:
    def source(path: str) -> str:
        facts = shown.credentials
        return f"s3('{shown.server.endpoint}/view/{path}', '{facts['key_id']}', '{facts['secret']}', 'Parquet')"

    names = {name: source(f"{name}.parquet") for name in ("flights", "carriers")}
    return _chdb(SQL[query].format(**names, many=source("many/*.parquet"), zip="place.zip"))


def _chdb(text: str) -> Answer:
    import chdb

    found = chdb.query(f"{text} settings http_max_tries = 1, s3_retry_attempts = 0", "ArrowStream")
    return _rows(pa.ipc.open_stream(pa.py_buffer(found.bytes())).read_all()) if found.bytes() else []


# --- frames ---


def _polars(query: str, scan: Callable[[str], Any]) -> Answer:
    import polars as pl

    match query:
        case "projection":
            found = scan("flights").select("distance", "carrier").sort("distance")
        case "filter":
            found = scan("flights").filter(pl.col("distance") < 100).select("distance").sort("distance")
        case "filter on nested":
            nested = pl.col("place").struct.field("zip") == 42
            found = scan("flights").filter(nested).select("distance").sort("distance")
        case "count":
            found = scan("flights").select(pl.len())
        case "join":
            joined = scan("flights").join(scan("carriers").select("carrier", "name"), on="carrier")
            found = joined.group_by("name").agg(pl.len()).sort("name")
        case "100 files":
            found = scan("many").select(pl.len(), pl.col("distance").sum())
        case _:
            found = scan("flights").select("distance", "tailnum").sort("distance")
    return found.collect().rows()


def polars_on_a_data_set(shown: Shown, query: str) -> Answer:
    import polars as pl

    def scan(name: str) -> Any:
        return pl.scan_pyarrow_dataset(shown.data_set(name, query))

    return _polars(query, scan)


def polars_over_http(shown: Shown, query: str) -> Answer:
    import polars as pl

    def scan(name: str) -> Any:
        names = [f"many/{number:03}" for number in range(shown.files)] if name == "many" else [name]
        return pl.scan_parquet([f"{shown.server.url}{each}.parquet" for each in names])

    return _polars(query, scan)


def polars_on_s3(shown: Shown, query: str) -> Answer:
    import polars as pl

    options = {
        "aws_endpoint_url": shown.server.endpoint,
        "aws_access_key_id": shown.credentials["key_id"],
        "aws_secret_access_key": shown.credentials["secret"],
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }

    def scan(name: str) -> Any:
        path = "many/*.parquet" if name == "many" else f"{name}.parquet"
        return pl.scan_parquet(f"s3://view/{path}", storage_options=options)

    return _polars(query, scan)


def _pandas(query: str, read: Callable[..., Any]) -> Answer:
    import pyarrow.compute as pc

    match query:
        case "projection":
            frame = read("flights", columns=["distance", "carrier"])
        case "filter":
            frame = read("flights", columns=["distance"], filters=[("distance", "<", 100)])
        case "filter on nested":
            frame = read("flights", columns=["distance"], filters=pc.field("place", "zip") == 42)
        case "count":
            return [(len(read("flights", columns=["distance"])),)]
        case "join":
            joined = read("flights", columns=["carrier"]).merge(read("carriers", columns=["carrier", "name"]))
            counts = joined.groupby("name").size()
            return sorted((str(name), int(count)) for name, count in counts.items())
        case "100 files":
            frame = read("many", columns=["distance"])
            return [(len(frame), int(frame.distance.sum()))]
        case _:
            frame = read("flights", columns=["distance", "tailnum"])
    return _rows(pa.Table.from_pandas(frame, preserve_index=False))


def pandas_on_fsspec(shown: Shown, query: str) -> Answer:
    import pandas as pd

    view = shown.view

    def read(name: str, **options: Any) -> Any:
        return pd.read_parquet(name if name == "many" else f"{name}.parquet", filesystem=view, **options)

    return _pandas(query, read)


def dask_on_fsspec(shown: Shown, query: str) -> Answer:
    import dask.dataframe as dd

    view = shown.view

    def read(name: str, columns: list[str], filters: Any = None) -> Any:
        path = "many/*.parquet" if name == "many" else f"{name}.parquet"
        if filters is None or isinstance(filters, list):
            frame = dd.read_parquet(path, filesystem=view, columns=columns, filters=filters)
            return frame.compute(scheduler="sync")
        frame = dd.read_parquet(path, filesystem=view, columns=[*columns, "place"])
        wanted = frame["place"].map(lambda place: place["zip"] == 42, meta=("place", bool))
        return frame[wanted][columns].compute(scheduler="sync")

    return _pandas(query, read)


def ray_on_fsspec(shown: Shown, query: str) -> Answer:
    import ray.data

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    view = shown.view.arrow

    def read(name: str, columns: list[str], filters: Any = None) -> Any:
        data = ray.data.read_parquet(
            name if name == "many" else f"{name}.parquet",
            filesystem=view,
            columns=None if filters is not None else columns,
        )
        if isinstance(filters, list):
            data = data.filter(lambda row: row["distance"] < 100)
        elif filters is not None:
            data = data.filter(lambda row: row["place"]["zip"] == 42)
        return data.to_pandas()[columns].sort_values(columns[0], ignore_index=True)

    return _pandas(query, read)


# --- hyparquet ---

_NODE = """
import { asyncBufferFromUrl, parquetReadObjects } from 'hyparquet'
import { compressors } from 'hyparquet-compressors'
const [url, ...queries] = process.argv.slice(2)
const read = async (name, columns, filter) => {
  const file = await asyncBufferFromUrl({ url: `${url}${name}.parquet` })
  return parquetReadObjects({ file, columns, filter, compressors })
}
const answers = {
  'projection': async () =>
    (await read('flights', ['distance', 'carrier'])).map(row => [row.distance, row.carrier]),
  'filter': async () =>
    (await read('flights', ['distance'], { distance: { $lt: 100n } })).map(row => [row.distance]),
  'filter on nested': async () =>
    (await read('flights', ['distance', 'place'])).filter(row => row.place.zip == 42).map(row => [row.distance]),
  'count': async () => [[(await read('flights', ['distance'])).length]],
  'join': async () => {
    const names = new Map((await read('carriers', ['carrier', 'name'])).map(row => [row.carrier, row.name]))
    const counts = {}
    for (const row of await read('flights', ['carrier'])) {
      const name = names.get(row.carrier)
      counts[name] = (counts[name] ?? 0) + 1
    }
    return Object.entries(counts).sort()
  },
  '100 files': async () => {
    let rows = 0, sum = 0n
    for (let i = 0; i < 100; i++)
      for (const row of await read(`many/${String(i).padStart(3, '0')}`, ['distance'])) {
        rows++
        sum += row.distance
      }
    return [[rows, sum]]
  },
  'refused': async () => (await read('flights', ['distance', 'tailnum'])).map(row => {
    if (!('tailnum' in row)) throw new Error('there is no column tailnum')
    return [row.distance, row.tailnum]
  }),
}
// Of several requests that fail, one is waited for.
process.on('unhandledRejection', () => {})
const found = {}
for (const query of queries) found[query] = await answers[query]().catch(error => String(error))
console.log(JSON.stringify(found, (_, value) => typeof value == 'bigint' ? Number(value) : value))
"""


class Hyparquet:
    """Runs hyparquet, which is installed from npm into a folder; one program answers all queries of a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, dict[str, Any]] = {}

    @classmethod
    def install(cls, folder: Path) -> Hyparquet | None:
        """Install it; None on a machine without node, npm or access to their registry."""
        (folder / "package.json").write_text('{"type": "module"}')
        (folder / "read.js").write_text(_NODE)
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--fetch-retries=0",
            *HYPARQUET,
        ]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
        return cls(folder)

    def __call__(self, shown: Shown, query: str) -> Answer:
        url = shown.server.url
        if url not in self._found:
            command = ["node", "read.js", url, *SQL]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self._found[url] = json.loads(done.stdout)
        found = self._found[url][query]
        if isinstance(found, str):
            raise RuntimeError(found)
        return [tuple(row) for row in found]


HYPARQUET = ("hyparquet@1", "hyparquet-compressors@1")

ENGINES: dict[tuple[str, str], Engine] = {
    ("pandas", "fsspec"): pandas_on_fsspec,
    ("Polars", "pyarrow data set"): polars_on_a_data_set,
    ("Polars", "HTTP"): polars_over_http,
    ("Polars", "S3"): polars_on_s3,
    ("DuckDB", "pyarrow data set"): duckdb_on_a_data_set,
    ("DuckDB", "fsspec"): duckdb_on_fsspec,
    ("DataFusion", "pyarrow data set"): datafusion_on_a_data_set,
    ("DataFusion", "S3"): datafusion_on_s3,
    ("Dask", "fsspec"): dask_on_fsspec,
    ("Ray", "fsspec"): ray_on_fsspec,
    ("ClickHouse (chDB)", "HTTP"): chdb_over_http,
    ("ClickHouse (chDB)", "S3"): chdb_on_s3,
}
HYPARQUET_ROW = ("hyparquet (JavaScript)", "HTTP")


def _rows(table: pa.Table) -> Answer:
    return [
        tuple(value.decode() if isinstance(value, bytes) else value for value in row.values())
        for row in table.to_pylist()
    ]


class ViewMatrix:
    """The files, shown with all rights, and with a refused column under each policy."""

    def __init__(self, folder: Path, stack: ExitStack, files: int) -> None:
        self._files = files
        passphrase = folder / "passphrase"
        passphrase.touch(mode=0o600)
        passphrase.write_text("a passphrase of the tests, long enough")
        keystore = Keystore.create(folder / "all.json", lambda: passphrase_from_file(passphrase), scrypt_n=2**14)
        for name in ("footer", "pii"):
            keystore.create_key(name)
        shutil.copy(folder / "all.json", folder / "some.json")
        some = Keystore(folder / "some.json", lambda: passphrase_from_file(passphrase))
        some.set_enabled("pii", False)
        self._folder = folder
        self._passphrase = passphrase
        self._stack = stack
        self._shown: dict[str, Shown] = {}
        data = folder / "data"
        (data / "many").mkdir(parents=True)
        self._hash_keys: dict[str, Any] = {}
        keytools = self._keytools("all")
        assert keytools.kms is not None
        hash_key = keytools.wrap_hash_key("p", "footer")
        self._hash_keys["p"] = hash_key.model_dump()
        secret = unwrap_one(keytools.kms, hash_key.wrapped_key, "footer").reveal()
        self._digests = [
            hmac.digest(secret, b"string\0" + name.encode(), "sha256")[:16].hex()
            for name in FLIGHTS["tailnum"].to_pylist()
        ]
        keytools.write_table(FLIGHTS, data / "flights.parquet", row_group_size=1_000)
        keytools.write_table(CARRIERS, data / "carriers.parquet")
        for number in range(files):
            rows = FLIGHTS.slice(number * ROWS // files, ROWS // files)
            keytools.write_table(rows, data / "many" / f"{number:03}.parquet")

    def _keytools(self, policy: str) -> Keytools:
        document = {
            "version": 1,
            "kms": {
                "type": "keystore",
                "path": str(self._folder / ("all.json" if policy in ("all", "hash") else "some.json")),
                "passphrase_file": str(self._passphrase),
            },
            "hash_keys": self._hash_keys,
            "tables": {
                "t": {
                    "hash_key": "p" if self._hash_keys else None,
                    "footer_key": "footer",
                    "column_keys": {"pii": ["tailnum"]},
                    "unlisted_columns": "footer_key",
                }
            },
            "reading": {} if policy == "all" else {"denied_columns": policy},
        }
        return Keytools.from_mapping(document)

    def shown(self, policy: str) -> Shown:
        """Return the files under a policy; `all` has all rights."""
        if policy not in self._shown:
            keytools = self._keytools(policy)
            tree = ServedTree(keytools.view(self._folder / "data"), folder=self._folder / "data")
            server = self._stack.enter_context(ViewServer(tree, with_s3=True))
            self._shown[policy] = Shown(keytools, self._folder / "data", server, self._files)
        return self._shown[policy]

    def outcome(self, engine: Engine, column: str) -> str:
        """Return the contents of a cell of the table.

        Raises:
            AssertionError: An answer is wrong.
        """
        if column in QUERIES:
            assert engine(self.shown("all"), column) == QUERIES[column]
            return "yes"
        shown = self.shown(column.removeprefix("refused: "))
        assert engine(shown, "projection") == QUERIES["projection"]
        try:
            found = engine(shown, "refused")
        except Exception as error:
            assert not isinstance(error, CALLED_WRONGLY), error
            return "error"
        if column.endswith("null") and found == [(row, None) for row in range(ROWS)]:
            return "null"
        if column.endswith("hash") and found == list(enumerate(self._digests)):
            return "digests"
        raise AssertionError(f"a refused column was read as {found[:2]}")


@contextmanager
def view_matrix(folder: Path, files: int = FILES) -> Iterator[ViewMatrix]:
    """Serve the files of the matrix."""
    with ExitStack() as stack:
        yield ViewMatrix(folder, stack, files)


PAGE = Path(__file__).parents[2] / "docs" / "interoperability.md"
_PLACE = re.compile(r"(?<=<!-- views: begin -->\n\n).*?(?=\n\n<!-- views: end -->)", re.DOTALL)


def table_text(cells: dict[tuple[str, str], list[str]]) -> str:
    """Return the table as Markdown."""
    lines = [
        ("engine", "way", *COLUMNS),
        ("---",) * (2 + len(COLUMNS)),
        *((*row, *found) for row, found in cells.items()),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells_of_page() -> dict[tuple[str, str], list[str]]:
    """Return the cells in the documentation."""
    found = _PLACE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]
    return {(row[0], row[1]): row[2:] for row in rows}


def main() -> None:
    """Update the table in the documentation."""
    with tempfile.TemporaryDirectory() as name, view_matrix(Path(name)) as matrix:
        (Path(name) / "node").mkdir()
        hyparquet = Hyparquet.install(Path(name) / "node")
        assert hyparquet is not None, "node or npm is missing"
        engines = ENGINES | {HYPARQUET_ROW: hyparquet}
        cells = {row: [matrix.outcome(engine, column) for column in COLUMNS] for row, engine in engines.items()}
        text = _PLACE.sub(lambda _: table_text(cells), PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
