"""Jobs that overwrite data: a write that is refused leaves every file, and every table, as it was.

A job makes attempts in a session of its own, and returns what came of each:

{"folder": ..., "yaml": "c.yaml", "attempts": ["..."], "port": 15002}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from spark_driver import Sessions, SparkDriver, new_session
from spark_ways import client, run, sql, text_of

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore, KeystoreSettings
from parquet_keytools.spark import PLAINTEXT_FILES, configure

COLUMNS = "(id BIGINT, name STRING, part INT)"


class Data:
    """A session, and the data that its attempts overwrite.

    Args:
        spark: The session.
        folder: Where all data is.
        yaml: Its configuration.
        connect: What lets a client of Spark Connect do something.
    """

    def __init__(self, spark: Any, folder: Path, yaml: str, connect: Callable[..., Any]) -> None:
        self.spark = spark
        self.folder = folder
        self.connect = connect
        self.keytools = Keytools.from_yaml(folder / yaml)
        self.frame = spark.range(0, 8, numPartitions=1).selectExpr(
            "id", "cast(id AS string) AS name", "cast(id % 2 AS int) AS part"
        )
        self.frame.createOrReplaceTempView("rows")

    def path(self, name: str) -> str:
        return str(self.folder / "data" / name)

    def options(self, table: str = "few", frame: Any = None, **arguments: Any) -> dict[str, str]:
        schema = (self.frame if frame is None else frame).schema
        return self.keytools.spark_options(table, schema, **arguments)

    def writer(self, frame: Any = None, **options: str) -> Any:
        return (self.frame if frame is None else frame).write.mode("overwrite").options(**options)

    def wider(self) -> Any:
        return self.frame.selectExpr("*", "id AS more")

    def variants(self) -> Any:
        return self.spark.sql("""SELECT id, name, parse_json('{"a": 1, "b": [true]}') AS part FROM rows""")

    def with_setting(self, name: str, value: str, call: Callable[[], object]) -> None:
        self.spark.conf.set(name, value)
        try:
            call()
        finally:
            self.spark.conf.unset(name)

    def stream(self, format_name: str, target: str = "files", **options: str) -> None:
        numbers = self.spark.readStream.schema("id BIGINT").csv(str(self.folder / "numbers"))
        stream = numbers.selectExpr("id", "cast(id AS string) AS name", "cast(id % 2 AS int) AS part")
        writer = stream.writeStream.format(format_name).options(**options).option("path", self.path(target))
        checkpoint = self.folder / "checkpoints" / f"{format_name}-{target}-{len(options)}"
        run(writer.option("checkpointLocation", str(checkpoint)), lambda stream: stream.start())


def prepare(data: Data) -> None:
    """Write what is overwritten later."""
    options, by_part = data.options(), data.options(partition_by=["part"])
    data.writer(**options).parquet(data.path("files"))
    data.writer(**by_part).partitionBy("part").parquet(data.path("parts"))
    data.writer(data.frame.selectExpr("id")).options(**PLAINTEXT_FILES).csv(str(data.folder / "numbers"))
    data.writer(**options).saveAsTable("saved")
    data.writer(**by_part).partitionBy("part").saveAsTable("parted")
    data.writer(**options).bucketBy(2, "id").saveAsTable("bucketed")
    data.writer(**options).option("path", data.path("external")).saveAsTable("external")
    data.writer(**data.options("readable")).saveAsTable("grown")
    data.spark.sql("ALTER TABLE grown ADD COLUMNS (more STRING)")
    data.writer(**options).saveAsTable("covered")
    data.spark.sql("ALTER TABLE covered ADD COLUMNS (surname STRING, more STRING)")
    for name, words in {
        "bare": "USING parquet",
        "csvs": f"USING csv {sql(options)}",
        "orcs": f"USING orc {sql(options, 'TBLPROPERTIES')}",
        "hive": f"STORED AS PARQUET {sql(options, 'TBLPROPERTIES')}",
        "hive_bare": "STORED AS PARQUET",
    }.items():
        data.spark.sql(f"CREATE TABLE {name} {COLUMNS} {words}")
    data.frame.write.insertInto("hive")


def explain(data: Data) -> None:
    settings = data.keytools.configuration.kms
    assert isinstance(settings, KeystoreSettings)
    keystore = Keystore(*settings.located(data.folder))
    for name in ("footer", "pii"):
        keystore.set_enabled(name, enabled=False)
    try:
        for mode in ("", "EXTENDED", "FORMATTED"):
            for table in ("saved", "bare"):
                (row,) = data.spark.sql(f"EXPLAIN {mode} INSERT OVERWRITE {table} SELECT * FROM rows").collect()
                assert "Physical Plan" in row.plan, "an EXPLAIN calls no KMS"
    finally:
        for name in ("footer", "pii"):
            keystore.set_enabled(name, enabled=True)


def grow(data: Data) -> None:
    """Do what the error says, and insert again."""
    insert = "INSERT OVERWRITE grown SELECT id, name, part, name FROM rows"
    try:
        data.spark.sql(insert)
    except Exception as error:
        text = text_of(error)
        data.spark.sql(text[text.index("ALTER TABLE") :].splitlines()[0])
    data.spark.sql(insert)
    assert data.spark.table("grown").where("more = name").count() == 8


def grow_covered(data: Data) -> None:
    """Insert into a table whose options know nothing of two columns; the configuration says their keys."""
    data.spark.sql("INSERT OVERWRITE covered SELECT id, name, part, name, name FROM rows")
    assert data.spark.table("covered").where("surname = name AND more = name").count() == 8
    # Keytools refuses a file whose columns have other keys than the table says.
    found = data.keytools.read_table(data.folder / "warehouse" / "covered", table_name="few")
    assert found.column("surname").to_pylist() == found.column("more").to_pylist()


def change(data: Data) -> None:
    """Insert into a table whose configuration has changed, as the error says."""
    insert = "INSERT OVERWRITE saved SELECT * FROM rows"
    try:
        data.spark.sql(insert)
    except Exception as error:
        text = text_of(error)
        data.spark.sql(text[text.index("ALTER TABLE") :].splitlines()[0])
    data.spark.sql(insert)


def write_variants(data: Data) -> None:
    frame = data.variants()
    data.writer(frame, **data.options(frame=frame)).parquet(data.path("variants"))
    read = data.spark.read.options(**data.keytools.spark_read_options("few")).parquet(data.path("variants"))
    assert read.selectExpr("variant_get(part, '$.a', 'int') AS a").where("a = 1").count() == 8


PLAINTEXT = "would be written in plaintext"
OTHERS = "Spark encrypts only Parquet files"
Attempt = Callable[[Data], object]

REFUSED: dict[str, tuple[Attempt, str]] = {
    "files": (lambda d: d.writer().parquet(d.path("files")), PLAINTEXT),
    "save": (lambda d: d.writer().format("parquet").save(d.path("files")), PLAINTEXT),
    "option path": (lambda d: d.writer(path=d.path("files")).format("parquet").save(), PLAINTEXT),
    "more columns": (
        lambda d: d.writer(d.wider(), **d.options("readable")).parquet(d.path("files")),
        "new are [more]",
    ),
    "fewer columns": (
        lambda d: d.writer(d.frame.drop("part"), **d.options()).parquet(d.path("files")),
        "missing are [part]",
    ),
    "a key that is disabled": (
        lambda d: d.writer(**d.options("locked")).parquet(d.path("files")),
        "the master key is disabled",
    ),
    "partitions": (lambda d: d.writer().partitionBy("part").parquet(d.path("parts")), PLAINTEXT),
    "partitioned unannounced": (
        lambda d: d.writer(**d.options()).partitionBy("part").parquet(d.path("parts")),
        "missing are [part]",
    ),
    "dynamic partition overwrite": (
        lambda d: d.writer(partitionOverwriteMode="dynamic").partitionBy("part").parquet(d.path("parts")),
        PLAINTEXT,
    ),
    "V2 pages": (
        lambda d: d.writer(**d.options(), **{"parquet.writer.version": "v2"}).parquet(d.path("files")),
        "levels of V2 data pages",
    ),
    "V2 source": (
        lambda d: d.with_setting(
            "spark.sql.sources.useV1SourceList", "", lambda: d.writer().parquet(d.path("files"))
        ),
        PLAINTEXT,
    ),
    "saveAsTable": (lambda d: d.writer().saveAsTable("saved"), PLAINTEXT),
    "saveAsTable, other columns": (
        lambda d: d.writer(d.wider(), **d.options("readable")).saveAsTable("saved"),
        "new are [more]",
    ),
    "saveAsTable, a disabled key": (
        lambda d: d.writer(**d.options("locked")).saveAsTable("saved"),
        "the master key is disabled",
    ),
    "saveAsTable, partitioned": (lambda d: d.writer().partitionBy("part").saveAsTable("parted"), PLAINTEXT),
    "saveAsTable, bucketed": (lambda d: d.writer().bucketBy(2, "id").saveAsTable("bucketed"), PLAINTEXT),
    "saveAsTable, external": (
        lambda d: d.writer(path=d.path("external")).saveAsTable("external"),
        PLAINTEXT,
    ),
    "saveAsTable, CSV": (lambda d: d.writer(**d.options()).format("csv").saveAsTable("saved"), OTHERS),
    "saveAsTable, Hive": (
        lambda d: d.writer(fileFormat="parquet").format("hive").saveAsTable("hive"),
        PLAINTEXT,
    ),
    "insertInto": (lambda d: d.frame.write.mode("overwrite").insertInto("bare"), PLAINTEXT),
    "a new column": (
        lambda d: d.spark.sql("INSERT OVERWRITE grown SELECT id, name, part, name FROM rows"),
        "new are [more]. Give the table its new options: ALTER TABLE",
    ),
    "CREATE TABLE AS SELECT": (
        lambda d: d.spark.sql("CREATE TABLE made USING parquet AS SELECT * FROM rows"),
        PLAINTEXT,
    ),
    "writeTo": (lambda d: d.frame.writeTo("made").using("parquet").create(), PLAINTEXT),
    "a directory": (
        lambda d: d.spark.sql(f"INSERT OVERWRITE DIRECTORY '{d.path('files')}' USING parquet SELECT * FROM rows"),
        PLAINTEXT,
    ),
    "several inserts": (
        lambda d: d.spark.sql("FROM rows INSERT OVERWRITE saved SELECT * INSERT OVERWRITE bare SELECT *"),
        PLAINTEXT,
    ),
    "EXECUTE IMMEDIATE": (
        lambda d: d.spark.sql("EXECUTE IMMEDIATE 'INSERT OVERWRITE bare SELECT * FROM rows'"),
        PLAINTEXT,
    ),
    "after an EXPLAIN": (
        lambda d: (explain(d), d.spark.sql("INSERT OVERWRITE bare SELECT * FROM rows")),
        PLAINTEXT,
    ),
    "another session": (
        lambda d: d.spark.newSession().range(3).write.mode("overwrite").parquet(d.path("files")),
        PLAINTEXT,
    ),
    "Spark Connect": (
        lambda d: d.connect("write", label="connected", options={}, mode="overwrite"),
        PLAINTEXT,
    ),
    "Hive": (lambda d: d.spark.sql("INSERT OVERWRITE hive_bare SELECT * FROM rows"), PLAINTEXT),
    "Hive, its own writer": (
        lambda d: d.with_setting(
            "spark.sql.hive.convertMetastoreParquet",
            "false",
            lambda: d.spark.sql("INSERT OVERWRITE hive SELECT * FROM rows"),
        ),
        "Hive's own Parquet writer",
    ),
    "Hive, CREATE TABLE AS SELECT": (
        lambda d: d.spark.sql("CREATE TABLE made STORED AS PARQUET AS SELECT * FROM rows"),
        PLAINTEXT,
    ),
    "Hive, a directory": (
        lambda d: d.spark.sql(
            f"INSERT OVERWRITE DIRECTORY '{d.path('files')}' STORED AS PARQUET SELECT * FROM rows"
        ),
        PLAINTEXT,
    ),
    "variants that Spark would shred": (
        lambda d: d.writer(d.variants(), **d.options()).parquet(d.path("files")),
        "spark.sql.variant.inferShreddingSchema=false",
    ),
    "a stream": (lambda d: d.stream("parquet"), PLAINTEXT),
    "a stream, a disabled key": (
        lambda d: d.stream("parquet", **d.options("locked")),
        "the master key is disabled",
    ),
    "a stream of CSV": (lambda d: d.stream("csv", **d.options()), OTHERS),
    **{
        name: (
            lambda d, name=name: (
                d.writer(d.frame.select("name"), **d.options()).format(name).save(d.path("files"))
            ),
            OTHERS,
        )
        for name in ("csv", "json", "orc", "text")
    },
    "a crypto factory alone": (
        lambda d: d.writer(**{"parquet.crypto.factory.class": "org.example.Factory"}).csv(d.path("files")),
        OTHERS,
    ),
    "no file at all": (lambda d: d.writer(**d.options()).format("noop").save(), OTHERS),
    "a table of CSV": (lambda d: d.spark.sql("INSERT OVERWRITE csvs SELECT * FROM rows"), OTHERS),
    "properties of a table of ORC": (lambda d: d.spark.sql("INSERT OVERWRITE orcs SELECT * FROM rows"), OTHERS),
    "CSV, and a session with a key": (
        lambda d: d.with_setting(
            "parquet.encryption.uniform.key", "footer", lambda: d.writer().csv(d.path("files"))
        ),
        OTHERS,
    ),
}
"""Name -> what is tried, and what its error says."""

WRITTEN: dict[str, Attempt] = {
    "EXPLAIN": explain,
    "a retry with options": lambda d: d.writer(**d.options()).parquet(d.path("files")),
    "nothing to be written": lambda d: d.frame.write.mode("ignore").parquet(d.path("files")),
    "dynamic partition overwrite with options": lambda d: (
        d.writer(partitionOverwriteMode="dynamic", **d.options(partition_by=["part"]))
        .partitionBy("part")
        .parquet(d.path("parts"))
    ),
    "saveAsTable with options": lambda d: d.writer(**d.options()).saveAsTable("saved"),
    "INSERT OVERWRITE": lambda d: d.spark.sql("INSERT OVERWRITE saved SELECT * FROM rows"),
    "Hive with options": lambda d: d.spark.sql("INSERT OVERWRITE hive SELECT * FROM rows"),
    "a new column, as the error says": grow,
    "new columns that the table covers": grow_covered,
    "variants": write_variants,
    "a stream with options": lambda d: d.stream("parquet", "stream", **d.options()),
    "plaintext that is meant": lambda d: d.writer(**PLAINTEXT_FILES).parquet(d.path("plain")),
    "CSV without options": lambda d: d.writer().csv(d.path("csv")),
}
"""Name -> what is written, after all that was refused."""

CHANGED: dict[str, tuple[Attempt, str]] = {
    "a changed table": (
        lambda d: d.spark.sql("INSERT OVERWRITE saved SELECT * FROM rows"),
        "they differ in parquet.encryption.data.key.length.bits, parquet.encryption.kek.length.bits",
    )
}
AGAIN: dict[str, Attempt] = {
    # Only the other table changed.
    "an unrelated change": lambda d: d.spark.sql("INSERT OVERWRITE grown SELECT id, name, part, name FROM rows"),
    "a changed table, as the error says": change,
}
ATTEMPTS: dict[str, Attempt] = {
    **{name: attempt for name, (attempt, _) in (REFUSED | CHANGED).items()},
    **WRITTEN,
    **AGAIN,
}


def contents(data: Data) -> dict[str, Any]:
    """Return all files that data consists of, and the catalog's tables."""
    folders = [data.folder / name for name in ("data", "warehouse", "ways")]
    files = {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
    # The log of a stream hides all files that it does not list, also while it is empty.
    files |= {str(path): b"" for folder in folders for path in folder.rglob("_spark_metadata")}
    # The catalog itself lists them: Spark would plan and run a query each time.
    catalog = data.spark._jsparkSession.sharedState().externalCatalog()
    return {**files, "tables": catalog.listTables("default").mkString(",")}


def tried(data: Data, attempts: Iterable[str]) -> dict[str, Any]:
    """Make attempts, one after the other; return the error of each, and what it changed."""
    found: dict[str, Any] = {}
    before = contents(data)
    for name in attempts:
        error = ""
        try:
            ATTEMPTS[name](data)
        except Exception as caught:
            error = text_of(caught)
        after = contents(data)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        found[name], before = {"error": error, "changed": sorted(changed)}, after
    return found


def main(sessions: Sessions, clients: SparkDriver, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make attempts in one session."""
    folder = Path(arguments["folder"])
    settings = {
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": str(arguments["port"]),
        "spark.hadoop.javax.jdo.option.ConnectionURL": (
            f"jdbc:derby:;databaseName={folder / 'metastore'};create=true"
        ),
    }
    sessions.stop()
    spark = new_session(
        "local[2]",
        settings,
        lambda builder: configure(builder.enableHiveSupport(), folder / arguments["yaml"]),
        log_level="OFF",
    )
    try:
        connect = client(clients, folder, arguments["port"])
        data = Data(spark, folder, arguments["yaml"], connect)
        if arguments.get("prepare"):
            prepare(data)
            connect("write", label="connected", options=data.options())
        return tried(data, arguments["attempts"])
    finally:
        clients.close()
        spark.stop()
