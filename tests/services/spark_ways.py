"""Jobs that write and read Parquet in all ways that Spark has; each in a session of its own.

A job returns what came of each way:

{"folder": ..., "configured": true, "port": 15002}

Values are hashes that no query, plan or setting holds, so that whatever file has one got it from the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_driver import Sessions, SparkDriver, new_session

from parquet_keytools import Keytools
from parquet_keytools.spark import PLAINTEXT_FILES, configure, configure_session

ROWS = 20
SETTINGS = {
    "spark.eventLog.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
    # Compressed, values would be there and not be found.
    "spark.sql.parquet.compression.codec": "uncompressed",
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    # The default one starts two processes to rename a file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
}

Options = dict[str, str]
Reader = Callable[[Options, str], int]


def canaries(label: str) -> list[bytes]:
    """Return the values that the frame of one attempt has."""
    return [
        hashlib.sha1(f"{label}-{number}".encode(), usedforsecurity=False).hexdigest().encode()
        for number in range(ROWS)
    ]


class Session:
    """A session of one kind, and where it works.

    Args:
        spark: The session.
        folder: Of this session.
        connect: What asks a client of Spark Connect, `client`, to do something; a client itself has none.
    """

    def __init__(self, spark: Any, folder: Path, connect: Callable[..., Any] | None = None) -> None:
        self.spark = spark
        self.folder = folder
        self.connect = connect
        self.keytools = Keytools.from_yaml(folder / "c.yaml")
        self.label = ""

    @property
    def name(self) -> str:
        """Name of a table or a query of this attempt."""
        return "t_" + hashlib.sha1(self.label.encode(), usedforsecurity=False).hexdigest()[:10]

    @property
    def path(self) -> str:
        """Folder of this attempt."""
        return str(self.folder / "ways" / self.name)

    def frame(self, source: Any = None) -> Any:
        """Return the frame of this attempt, from its numbers."""
        # One partition, for one file of it, and none for a shuffle to write.
        numbers = self.spark.range(0, ROWS, numPartitions=1) if source is None else source
        name = f"sha1(concat('{self.label}-', cast(id AS string)))"
        return numbers.selectExpr("id", f"{name} AS name", "cast(id % 2 AS int) AS part")

    def stream(self) -> Any:
        """Return the frame as a stream."""
        return self.frame(self.spark.readStream.schema("id BIGINT").csv(str(self.folder / "numbers")))

    def options(self, *, partitioned: bool = False) -> Options:
        """Return the options of the table."""
        by = ["part"] if partitioned else []
        return self.keytools.spark_options("few", self.frame().schema, partition_by=by)


def sql(options: Options, word: str = "OPTIONS") -> str:
    """Return options as SQL has them."""
    listed = ", ".join(f"'{name}' = '{value}'" for name, value in options.items())
    return f"{word} ({listed})" if options else ""


def run(writer: Any, start: Callable[[Any], Any]) -> None:
    """Run a stream to the end of what is there."""
    start(writer.trigger(availableNow=True)).awaitTermination()


# --- ways to write -----------------------------------------------------------------------------------------


def created(session: Session, options: Options, *, partitioned: bool = False) -> str:
    """Create an empty catalog table."""
    by = "PARTITIONED BY (part)" if partitioned else ""
    columns = "(id BIGINT, name STRING, part INT)"
    session.spark.sql(f"CREATE TABLE {session.name} {columns} USING parquet {sql(options)} {by}")
    return session.name


def v2_source(session: Session, options: Options) -> None:
    session.spark.conf.set("spark.sql.sources.useV1SourceList", "")
    try:
        session.frame().write.mode("append").options(**options).parquet(session.path)
    finally:
        session.spark.conf.unset("spark.sql.sources.useV1SourceList")


def dynamic_overwrite(session: Session, options: Options) -> None:
    options = session.options(partitioned=True) if options else {}
    writer = session.frame().write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy("part").options(**options).parquet(session.path)


def sql_insert(session: Session, options: Options) -> None:
    session.frame().createOrReplaceTempView("rows")
    session.spark.sql(f"INSERT INTO {created(session, options)} SELECT * FROM rows")


def sql_overwrite(session: Session, options: Options) -> None:
    session.frame().createOrReplaceTempView("rows")
    options = session.options(partitioned=True) if options else {}
    session.spark.sql(
        f"INSERT OVERWRITE {created(session, options, partitioned=True)} PARTITION (part) SELECT * FROM rows"
    )


def insert_into_like(session: Session, options: Options) -> None:
    session.spark.sql(f"CREATE TABLE {session.name}_like LIKE {created(session, options)} USING parquet")
    session.frame().write.insertInto(f"{session.name}_like")


def create_as_select(session: Session, options: Options) -> None:
    session.frame().createOrReplaceTempView("rows")
    session.spark.sql(f"CREATE TABLE {session.name} USING parquet {sql(options)} AS SELECT * FROM rows")


def insert_directory(session: Session, options: Options) -> None:
    session.frame().createOrReplaceTempView("rows")
    session.spark.sql(
        f"INSERT OVERWRITE DIRECTORY '{session.path}' USING parquet {sql(options)} SELECT * FROM rows"
    )


def file_sink(session: Session, options: Options) -> None:
    writer = session.stream().writeStream.format("parquet").option("path", session.path).options(**options)
    run(writer.option("checkpointLocation", f"{session.path}.checkpoint"), lambda stream: stream.start())


def stream_to_table(session: Session, options: Options) -> None:
    writer = session.stream().writeStream.options(**options)
    run(writer.option("checkpointLocation", f"{session.path}.checkpoint"), lambda s: s.toTable(session.name))


def for_each_batch(session: Session, options: Options) -> None:
    writer = session.stream().writeStream.foreachBatch(
        lambda batch, _: batch.write.mode("append").options(**options).parquet(session.path)
    )
    run(writer.option("checkpointLocation", f"{session.path}.checkpoint"), lambda stream: stream.start())


def ml_save(session: Session, options: Options) -> None:
    from pyspark.ml.feature import StringIndexer

    writer = StringIndexer(inputCol="name", outputCol="number").fit(session.frame()).write()
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save(session.path)


def pandas_api() -> Any:
    """Import pandas on Spark, which asks pandas 3 for two names that it does not have any more."""
    import pandas as pd
    from pandas.core.dtypes import common
    from pandas.tseries import frequencies

    vars(frequencies).setdefault("DateOffset", pd.DateOffset)
    vars(common).setdefault("infer_dtype_from_object", None)
    import pyspark.pandas

    return pyspark.pandas


def pandas_on_spark(session: Session, options: Options) -> None:
    pandas_api()
    session.frame().pandas_api().to_parquet(session.path, **options)


def checkpoint(session: Session, _: Options) -> None:
    session.frame().checkpoint()


def cache(session: Session, _: Options) -> None:
    from pyspark import StorageLevel

    session.frame().persist(StorageLevel.DISK_ONLY).count()


def shuffle(session: Session, _: Options) -> None:
    session.frame().repartition(2, "name").sortWithinPartitions("name").foreach(lambda _: None)


def to_local_iterator(session: Session, _: Options) -> None:
    # Without a shuffle before it, which leaves files of its own.
    assert len(list(session.frame(session.spark.range(ROWS)).toLocalIterator())) == ROWS


def connect_client(session: Session, options: Options) -> None:
    session.connect("write", label=session.label, options=options)


WRITES: dict[str, Callable[[Session, Options], object]] = {
    "`df.write.parquet`": lambda s, o: s.frame().write.options(**o).parquet(s.path),
    '`df.write.format("parquet").save`': lambda s, o: s.frame().write.format("parquet").options(**o).save(s.path),
    "`df.write.partitionBy`": lambda s, o: (
        s.frame().write.partitionBy("part").options(**s.options(partitioned=True) if o else {}).parquet(s.path)
    ),
    "dynamic partition overwrite": dynamic_overwrite,
    "Spark's V2 source of Parquet": v2_source,
    "`df.write.saveAsTable`": lambda s, o: s.frame().write.options(**o).saveAsTable(s.name),
    "`bucketBy`": lambda s, o: s.frame().write.bucketBy(2, "id").options(**o).saveAsTable(s.name),
    '`df.writeTo(...).using("parquet").create`': lambda s, o: (
        s.frame().writeTo(s.name).using("parquet").options(**o).create()
    ),
    "`df.writeTo(...).append`": lambda s, o: s.frame().writeTo(created(s, o)).append(),
    "`CREATE TABLE ... USING parquet`, `INSERT`": sql_insert,
    "`INSERT OVERWRITE` of partitions": sql_overwrite,
    "`CREATE TABLE`, `df.write.insertInto`": lambda s, o: s.frame().write.insertInto(created(s, o)),
    "`CREATE TABLE ... LIKE`, `insertInto`": insert_into_like,
    '`saveAsTable` with `mode("append")`': lambda s, o: s.frame().write.mode("append").saveAsTable(created(s, o)),
    "`CREATE TABLE ... AS SELECT`": create_as_select,
    "`INSERT OVERWRITE DIRECTORY`": insert_directory,
    "the Parquet sink of a stream": file_sink,
    "`writeStream.toTable`": stream_to_table,
    "`foreachBatch`": for_each_batch,
    "pandas on Spark: `to_parquet`": pandas_on_spark,
    "Spark Connect: `df.write.parquet`": connect_client,
    "`TBLPROPERTIES` in place of `OPTIONS`": lambda s, o: (
        s.spark.sql(
            f"CREATE TABLE {s.name} (id BIGINT, name STRING, part INT) USING parquet {sql(o, 'TBLPROPERTIES')}"
        ),
        s.frame().write.insertInto(s.name),
    ),
    "Spark ML: `model.save`": ml_save,
    "`df.checkpoint`": checkpoint,
    "`df.persist` on disk": cache,
    "shuffles": shuffle,
    "`df.toLocalIterator`": to_local_iterator,
}


# --- ways to read ------------------------------------------------------------------------------------------


def v2_read(session: Session, options: Options, path: str) -> int:
    session.spark.conf.set("spark.sql.sources.useV1SourceList", "")
    try:
        return len(session.spark.read.options(**options).parquet(path).collect())
    finally:
        session.spark.conf.unset("spark.sql.sources.useV1SourceList")


def table_read(session: Session, options: Options, path: str) -> int:
    session.label = f"table {path} {bool(options)}"
    session.spark.sql(
        f"CREATE TABLE {session.name} (id BIGINT, name STRING, part INT) USING parquet {sql(options)} "
        f"LOCATION '{path}'"
    )
    return len(session.spark.sql(f"SELECT * FROM {session.name}").collect())


def stream_read(session: Session, options: Options, path: str) -> int:
    session.label = f"stream {path} {bool(options)}"
    schema = "id BIGINT, name STRING, part INT"
    stream = session.spark.readStream.schema(schema).options(**options).parquet(path)
    run(stream.writeStream.format("memory").queryName(session.name), lambda writer: writer.start())
    return int(session.spark.table(session.name).count())


READS: dict[str, Callable[[Session, Options, str], int]] = {
    "`spark.read.parquet`": lambda s, o, path: len(s.spark.read.options(**o).parquet(path).collect()),
    "`spark.read.parquet(...).toLocalIterator`": lambda s, o, path: len(
        list(s.spark.read.options(**o).parquet(path).toLocalIterator())
    ),
    "`SELECT` from a catalog table": table_read,
    "Spark's V2 source of Parquet": v2_read,
    "the Parquet source of a stream": stream_read,
    "pandas on Spark: `read_parquet`": lambda s, o, path: read_pandas(path, o),
}
CONNECT_READ = "Spark Connect: `spark.read.parquet`"
FOLDERS = ("encrypted", "plaintext", "both", "of another table", "column of another key")


def read_pandas(path: str, options: Options) -> int:
    return len(pandas_api().read_parquet(path, **options).to_pandas())


# --- what came of it ---------------------------------------------------------------------------------------


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return what lies under a folder, with what changes when it is written."""
    found = {}
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file() and "events" not in path.parts:
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def outcome_of(call: Callable[[], object], folder: Path, label: str) -> dict[str, Any]:
    """Return what an attempt to write left."""
    before = files(folder)
    error = ""
    try:
        call()
    except Exception as caught:
        error = text_of(caught)
    new = {path for path, state in files(folder).items() if before.get(path) != state}
    content = {path: path.read_bytes() for path in new}
    open_files = [str(path) for path in new if any(canary in content[path] for canary in canaries(label))]
    parquet = [path for path in new if path.suffix == ".parquet"]
    if open_files:
        outcome = "plaintext"
    elif error:
        outcome = "refused"
    elif new:
        outcome = "encrypted" if all(content[path][-4:] == b"PARE" for path in parquet) else "not encrypted"
    else:
        outcome = "nothing written"
    return {"outcome": outcome, "error": error, "open files": open_files, "new files": len(new)}


def text_of(error: BaseException) -> str:
    """Return class and text of an error with all its causes."""
    text = f"{type(error).__name__}: {error}"
    cause = getattr(error, "java_exception", None)
    while cause is not None:
        text = f"{text}\n{cause.toString()}"
        cause = cause.getCause()
    return text[-6000:]


def client(driver: SparkDriver, folder: Path, port: int) -> Callable[..., Any]:
    """Return what lets a client of Spark Connect do something, in a process of its own."""

    def call(action: str, **arguments: Any) -> Any:
        done = driver.do(action=action, port=port, folder=folder, **arguments)
        if "error" in done:
            raise RuntimeError(done["error"])
        return done["result"]

    return call


def main(sessions: Sessions, clients: SparkDriver, arguments: dict[str, Any]) -> dict[str, Any]:
    """Go all ways in one session."""
    folder = Path(arguments["folder"])
    settings = SETTINGS | {
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.checkpoint.dir": str(folder / "checkpoints"),
        "spark.connect.grpc.binding.port": str(arguments["port"]),
        "spark.io.encryption.enabled": str(arguments["configured"]).lower(),
    }
    sessions.stop()
    spark = new_session(
        "local[2]",
        settings,
        lambda builder: configure(builder, folder / "c.yaml") if arguments["configured"] else builder,
        log_level="ERROR",
    )
    try:
        spark.sparkContext.setCheckpointDir(str(folder / "checkpoints"))
        connect = client(clients, folder, arguments["port"])
        session = Session(spark, folder, connect)
        return configured_later(session) if arguments["later"] else go_all_ways(session, arguments["configured"])
    finally:
        # It would go on with the server that is gone.
        clients.close()
        spark.stop()


def go_all_ways(session: Session, configured: bool) -> dict[str, Any]:
    """Write and read, and what else is of one kind of session."""
    spark, folder = session.spark, session.folder
    results: dict[str, Any] = {"writes": {}, "reads": {}}
    for way, write in WRITES.items():
        for given in ("with options", "without options"):
            session.label = f"{configured}-{way}-{given}".replace("'", "").replace("`", "")
            options = session.options() if given == "with options" else {}
            call = lambda write=write, options=options: write(session, options)  # noqa: E731
            results["writes"][f"{way}|{given}"] = outcome_of(call, folder, session.label)
    ways: dict[str, Reader] = {
        way: lambda options, path, read=read: read(session, options, path)  # type: ignore[misc]
        for way, read in READS.items()
    }
    assert session.connect is not None
    by_client = session.connect("reads")
    results["connect"] = by_client.pop("configure")
    results["reads"] = by_client | read_all(folder, ways)
    if configured:
        results["ddl"] = stored_table(session)
        results["meant"] = attempt(
            lambda: len(
                spark.read.options(**PLAINTEXT_FILES).parquet(str(folder / "inputs" / "plaintext")).collect()
            )
        )
    else:
        results["insert"] = insert_into_stored_table(session)
        results["ddl"] = definition_of_stored_table(session)
        # Hadoop remembers that the class of the options was not there.
        results["configured too late"] = attempt(lambda: configure_session(spark, folder / "c.yaml"))
    return results


def read_all(folder: Path, ways: dict[str, Reader]) -> dict[str, object]:
    """Return the number of rows that each way reads of each folder, or an error."""
    tools = Keytools.from_yaml(folder / "c.yaml")
    found = {}
    for way, read in ways.items():
        for kind in FOLDERS:
            for given in ("with options", "without options"):
                options = tools.spark_read_options("few") if given == "with options" else {}
                path = str(folder / "inputs" / kind)
                call = lambda read=read, options=options, path=path: read(options, path)  # noqa: E731
                found[f"{way}|{kind}|{given}"] = attempt(call)
    return found


def attempt(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return text_of(error)


def stored_table(session: Session) -> str:
    """Make a catalog table, which stores the options; return how it can be made again."""
    session.label = "stored"
    session.frame().write.options(**session.options()).saveAsTable("stored")
    return definition_of_stored_table(session)


def definition_of_stored_table(session: Session) -> str:
    """Return the statement that makes the table again, with the options that the catalog has stored."""
    ddl: str = session.spark.sql("SHOW CREATE TABLE stored").collect()[0][0]
    return ddl


def insert_into_stored_table(session: Session) -> dict[str, Any]:
    """Insert into a table like the one that a configured session stores; the test compares their definitions."""
    session.label = "inserted"
    columns = "(id BIGINT, name STRING, part INT)"
    session.spark.sql(f"CREATE TABLE stored {columns} USING parquet {sql(session.options())}")
    return outcome_of(lambda: session.frame().write.insertInto("stored"), session.folder, session.label)


def configured_later(session: Session) -> dict[str, Any]:
    """Configure the session that runs, as a notebook does; what wrote plaintext before writes it no more."""
    found: dict[str, Any] = {
        "returned": configure_session(session.spark, session.folder / "c.yaml") is session.spark
    }
    for given in ("with options", "without options"):
        session.label = f"later-{given}"
        options = session.options() if given == "with options" else {}
        call = lambda options=options: session.frame().write.options(**options).parquet(session.path)  # noqa: E731
        found[given] = outcome_of(call, session.folder, session.label)
        if given == "with options":
            reader = session.spark.read.options(**session.keytools.spark_read_options("few"))
            found["read"] = attempt(lambda path=session.path, reader=reader: len(reader.parquet(path).collect()))
            before, overwrite = files(Path(session.path)), session.frame().write.mode("overwrite")
            found["overwritten"] = attempt(lambda path=session.path, write=overwrite: write.parquet(path))
            found["kept"] = files(Path(session.path)) == before
    found["plaintext"] = attempt(
        lambda: session.spark.read.parquet(str(session.folder / "inputs" / "plaintext")).count()
    )
    found["other configuration"] = attempt(lambda: configure_session(session.spark, session.folder / "other.yaml"))
    return found
