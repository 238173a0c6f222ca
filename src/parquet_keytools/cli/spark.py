"""`parquet-keytools spark encrypt|decrypt|rotate|rekey|verify|keys|settings`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from parquet_keytools.config.key_policy import ColumnPath
    from parquet_keytools.config.labels import FieldLabels
    from parquet_keytools.config.settings import Configuration
    from parquet_keytools.files.key_service import KeyService
    from parquet_keytools.spark.pipelines import PipelineReport

app = typer.Typer(
    name="spark",
    help="Process data sets as Spark jobs, and set up Spark.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="File or folder, or its URI, the same on every node.")
]


@dataclass(frozen=True, kw_only=True)
class SessionOptions(opt.ReportOptions):
    """Options of all commands.

    Options:
        --max-tasks N>=1: Maximum number of tasks.
        --master URL: Spark's master, such as spark://host:7077, yarn or local[4]. Default: the master of
            spark-submit or of Spark's own settings, else all cores of this machine.
        --conf NAME=VALUE: A Spark setting. Repeatable.
    """

    config: Path
    table: str | None = None
    master: str | None = None
    conf: list[str] | None = None
    max_tasks: int | None = None
    file_on_nodes: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(SessionOptions):
    """Options of commands that read encrypted files."""

    aad_prefix: str | None = None

    def table_and_prefix(self) -> dict[str, Any]:
        """Return arguments of the pipelines."""
        return {"table_name": self.table, "aad_prefix": self.aad_prefix}


@dataclass(frozen=True, kw_only=True)
class SparkRotationOptions(SessionOptions, opt.RotationOptions):
    """Options of `spark rotate`."""


@app.command("encrypt")
@opt.with_options(SessionOptions)
def encrypt_with_spark(
    source: opt.SourceArgument,
    target: opt.TargetArgument,
    options: SessionOptions,
    overwrite: bool = False,
    skip_existing: bool = False,
) -> None:
    """Encrypt the Parquet files of a folder.

    To continue an interrupted run, add --skip-existing. When every file is there, DST contains _SUCCESS.
    """
    arguments = {"overwrite": overwrite, "skip_existing": skip_existing}
    _run("encrypt", options, source, target, table_name=options.table, **arguments)


@app.command("decrypt")
@opt.with_options(ReadingOptions)
def decrypt_with_spark(
    source: opt.SourceArgument,
    target: opt.TargetArgument,
    options: ReadingOptions,
    overwrite: bool = False,
    skip_existing: bool = False,
) -> None:
    """Decrypt the Parquet files of a folder.

    The written files are not encrypted. To continue an interrupted run, add --skip-existing.
    """
    arguments = {"overwrite": overwrite, "skip_existing": skip_existing}
    _run("decrypt", options, source, target, **options.table_and_prefix(), **arguments)


@app.command("rotate")
@opt.with_options(SparkRotationOptions)
def rotate_with_spark(path: PathArgument, options: SparkRotationOptions) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    Each distinct wrapped key is re-wrapped once, however many files contain it.
    """
    _run("rotate", options, path, **options.arguments())


@app.command("rekey")
@opt.with_options(ReadingOptions)
def rekey_with_spark(path: PathArgument, options: ReadingOptions, follow_links: bool = False) -> None:
    """Re-encrypt files in place, with new data keys."""
    _run("rekey", options, path, **options.table_and_prefix(), follow_links=follow_links)


@app.command("verify")
@opt.with_options(ReadingOptions)
def verify_with_spark(
    path: PathArgument,
    options: ReadingOptions,
    parts: int | None = None,
    allow_plaintext: list[str] | None = None,
    strict: bool = False,
) -> None:
    """Check files against the encryption specification.

    Each file is checked rule by rule, and all files as one data set, with the verdicts of `verify`.
    """
    arguments = {"part_count": parts, "allow_plaintext": allow_plaintext or ()}
    _run("verify", options, path, strict=strict, **options.table_and_prefix(), **arguments)


@app.command("keys")
@opt.with_options(ReadingOptions)
def keys_with_spark(path: PathArgument, options: ReadingOptions, ignore_skipped: bool = False) -> None:
    """List which master keys the files depend on."""
    _run("keys", options, path, **options.table_and_prefix(), ignore_skipped=ignore_skipped)


# --- settings for spark-sql, Scala and servers ---


@app.command("settings")
@opt.with_options()
def settings_command(
    config: Path,
    table: str | None = None,
    schema_from: str | None = None,
    ddl: str | None = None,
    partition_by: list[str] | None = None,
    python: str | None = None,
    jar: str | None = None,
    file_on_nodes: str | None = None,
    json: bool = False,
) -> None:
    """Print the settings of Spark, and the options of a table.

    With them, spark-sql, Scala and servers of Spark Connect need no Python program. The options of a table need
    its columns: --schema-from or --ddl. Nothing that is printed is secret.

    Options:
        --schema-from PATH: A Parquet file with the columns of the table, or its folder.
        --ddl COLUMNS: The columns in SQL, such as 'id BIGINT, name STRING'.
        --partition-by COLUMN: A column of PARTITIONED BY. Repeatable.
        --python PATH: The Python on every node that has parquet-keytools.
        --jar PATH: Path or URL of our jar on the cluster, instead of a new one.
    """
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.spark.session import session_settings
    from parquet_keytools.spark.table_options import read_options

    if schema_from is not None and ddl is not None:
        raise typer.BadParameter("--schema-from and --ddl exclude each other.")
    if partition_by and schema_from is None and ddl is None:
        raise typer.BadParameter("--partition-by needs --schema-from or --ddl.")
    configuration = load_configuration(config)
    settings = session_settings(configuration, file_on_nodes=file_on_nodes, python=python, jar=jar)
    document: dict[str, Any] = {"settings": settings}
    if table is not None or schema_from is not None or ddl is not None:
        document["read_options"] = read_options(configuration, table)
    if schema_from is not None or ddl is not None:
        document["table_options"] = _table_options(configuration, table, schema_from, ddl, partition_by or [])
    if out.json_wanted():
        out.print_json(document)
        return
    out.answer("# For the command line of spark-sql, spark-shell and spark-submit:")
    out.answer(" \\\n".join(f"--conf {shlex.quote(f'{name}={value}')}" for name, value in settings.items()))
    out.answer("\n# For spark-defaults.conf, or a file for --properties-file:")
    for name, value in settings.items():
        # A properties file of Java.
        out.answer(f"{name} " + value.replace("\\", r"\\"))
    if "read_options" in document:
        out.answer("\n# For a read in Scala or Python, by option(name, value):")
        for name, value in document["read_options"].items():
            out.answer(f"{name} {value}")
    if "table_options" in document:
        out.answer("\n# For CREATE TABLE ... USING parquet, and by option(name, value) for a write:")
        out.answer(_sql_list("OPTIONS", document["table_options"]))
        out.answer("\n# For a table of Hive, CREATE TABLE ... STORED AS PARQUET:")
        out.answer(_sql_list("TBLPROPERTIES", document["table_options"]))


def _sql_list(clause: str, options: Mapping[str, str]) -> str:
    from parquet_keytools.spark.table_options import sql_text

    listed = ",\n".join(f"  {sql_text(name)} = {sql_text(value)}" for name, value in options.items())
    return f"{clause} (\n{listed}\n)"


def _table_options(
    configuration: Configuration,
    table: str | None,
    schema_from: str | None,
    ddl: str | None,
    partition_by: Sequence[str],
) -> dict[str, str]:
    from parquet_keytools.config.labels import no_field_labels
    from parquet_keytools.files.key_service import KeyService
    from parquet_keytools.spark.session import refuse_generated_keys
    from parquet_keytools.spark.table_options import table_options

    keys = KeyService(configuration, None, time.monotonic)
    try:
        refuse_generated_keys(keys.kms)
        leaves: list[ColumnPath] = []
        labels: FieldLabels = no_field_labels
        if ddl is not None:
            leaves = _leaves_of_ddl(ddl)
        elif schema_from is not None:
            leaves, labels = _schema_of_file(keys, table, schema_from)
            # A file of a partitioned table does not have them.
            leaves += [(name,) for name in partition_by if (name,) not in leaves]
        return table_options(keys, table, leaves, partition_by, labels, {})
    finally:
        if keys.kms is not None:
            keys.kms.close()


def _schema_of_file(keys: KeyService, table: str | None, path: str) -> tuple[list[ColumnPath], FieldLabels]:
    from parquet_keytools.configuration_check import schema_of
    from parquet_keytools.storage.walk import ParquetFile, data_set

    name, _ = keys.configuration.select_table(table)
    for entry in data_set(opt.location_of(path, "--schema-from")):
        if isinstance(entry, ParquetFile):
            return schema_of(keys.configuration, entry.location, name, None, keys.kms)
    raise typer.BadParameter("no Parquet file there can be read.", param_hint="--schema-from")


def _leaves_of_ddl(ddl: str) -> list[ColumnPath]:
    # Spark itself reads its types; that takes a session.
    with _session("local[1]", ["spark.ui.enabled=false"]):
        from pyspark.errors import ParseException
        from pyspark.sql.types import StructType

        from parquet_keytools.spark.table_options import spark_leaf_paths

        try:
            schema = StructType.fromDDL(ddl)
        except ParseException as error:
            reason = str(error).strip().splitlines()[0]
            raise typer.BadParameter(f"Spark does not understand it: {reason}", param_hint="--ddl") from None
        if not isinstance(schema, StructType):
            raise typer.BadParameter("it is a type, and not a list of columns.", param_hint="--ddl")
        return spark_leaf_paths(schema)


def _run(name: str, options: SessionOptions, *places: str, strict: bool = False, **arguments: Any) -> None:
    """Run a pipeline, and show its report; if `strict`, weaknesses fail."""
    with _session(options.master, options.conf) as session:
        from parquet_keytools.spark import pipelines

        report: PipelineReport = getattr(pipelines, name)(
            session,
            *places,
            options.config,
            file_on_nodes=options.file_on_nodes,
            max_tasks=options.max_tasks,
            **arguments,
        )
        if name == "keys" and not out.json_wanted():
            from parquet_keytools.config.loader import load_configuration

            _show_keys(report, load_configuration(options.config).template_of)
        _show(report, strict=strict)


@contextmanager
def _session(master: str | None, settings: list[str] | None) -> Iterator[SparkSession]:
    """Start a session, and stop it; of Spark's own messages, only errors are printed."""
    from parquet_keytools.errors import ConfigurationError

    pairs = opt.pairs_of(settings, "--conf")
    with installed("spark"):
        from pyspark.sql import SparkSession
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=str(Path(home) / "bin") if home else None) is None:
        raise ConfigurationError(
            "there is no Java, which Spark needs.",
            hint="Install Java 17, on Debian with: apt-get install openjdk-17-jre-headless",
        )
    # This Python has the packages that tasks need. On a cluster with another Python, set spark.pyspark.python.
    if "spark.pyspark.python" not in pairs:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("parquet-keytools")
    if master is not None:
        builder = builder.master(master)
    for name, value in ({"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()} | pairs).items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        # A traceback would end with status 1, which means that a check failed.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"Spark did not start: {reason}", hint="Check --master and --conf; Spark's own messages are above."
        ) from None
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def _show(report: PipelineReport, *, strict: bool) -> None:
    """Print a report, and end the command with the status of its failures."""
    from parquet_keytools import errors
    from parquet_keytools.spark.pipelines import VerificationReport

    rules, verdict = None, None
    if isinstance(report, VerificationReport):
        rules, verdict = [row for row in report.rule_rows() if row["outcome"] == "broken"], report.verdict
    document = {
        "outcomes": dict(report.outcomes),
        "kms_keys": dict(report.kms_keys),
        "tasks": report.tasks,
        "seconds": round(report.seconds, 3),
    } | ({} if verdict is None else {"verdict": verdict.value, "broken_rules": rules})
    kinds = set()
    groups: dict[str, out.Messages] = {}
    with out.FilesDocument() as files:
        for row in report.rows():
            files.add(row)
            if row["error_class"] is not None:
                kinds.add(getattr(errors, row["error_class"], OSError))
            if text := row["error"] or (row["detail"] if row["outcome"] == "skipped" else None):
                label = row["outcome"].capitalize()
                groups.setdefault(label, out.Messages(label)).add(row["path"], text)
        files.end(document)
    for rule in rules or []:
        label = f"{rule['severity'].capitalize()} {rule['rule']}"
        groups.setdefault(label, out.Messages(label, out.answer)).add(rule["file"], rule["message"])
    for group in groups.values():
        group.print()
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    asked = ", ".join(f"{number} {operation}" for operation, number in report.kms_keys.items()) or "nothing"
    out.answer(
        f"{outcomes or 'No files'} in {report.seconds:.1f} s and {report.tasks} tasks; keys asked for: {asked}."
    )
    if verdict is not None:
        out.answer(f"The data set: {verdict.value}")
    if report.conforms_strictly if strict and isinstance(report, VerificationReport) else report.succeeded:
        return
    kms_failed = kinds and all(issubclass(kind, errors.KmsError) for kind in kinds)
    raise typer.Exit(out.ExitStatus.KMS_FAILED if kms_failed else out.ExitStatus.NO)


def _show_keys(report: PipelineReport, template_of: Callable[[str], str | None]) -> None:
    """Print how many files need which version of which master key."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in report.rows():
        names = ((key["master_key"] or key["data_key"], key["version"]) for key in row["keys"])
        counts.update({(name or "unknown", version or "unknown") for name, version in names})
    rows = out.grouped_rows(((*names, number) for names, number in sorted(counts.items())), template_of)
    out.print_table("Files that depend on master keys", ["master key", "version", "files"], rows)
