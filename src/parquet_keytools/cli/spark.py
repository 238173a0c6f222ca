"""`parquet-keytools spark encrypt|decrypt|rotate|rekey|verify|keys`."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    FollowLinksOption,
    IgnorePassedOverOption,
    OverwriteOption,
    PartsOption,
    ReportOptions,
    RotationOptions,
    SkipExistingOption,
    SourceArgument,
    TableOption,
    TargetArgument,
    pairs_of,
    with_options,
)
from parquet_keytools.cli.output import (
    ExitStatus,
    FilesDocument,
    Messages,
    answer,
    json_wanted,
    print_table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from parquet_keytools.spark.pipelines import PipelineReport

app = typer.Typer(
    name="spark", help="Process whole data sets as Spark jobs.", no_args_is_help=True, rich_markup_mode=None
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="File or folder, or its URI, the same on every node.")
]


@dataclass(frozen=True, kw_only=True)
class SessionOptions(ReportOptions):
    """Options of all commands."""

    config: ConfigOption
    table: TableOption = None
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="URL",
            help="Spark's master, such as spark://host:7077, yarn or local[4]. "
            "Default: the master of spark-submit or of Spark's own settings, else all cores of this machine.",
        ),
    ] = None
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A Spark setting. Repeatable.")
    ] = None
    max_tasks: Annotated[
        int | None, typer.Option("--max-tasks", metavar="N", min=1, help="Maximum number of tasks.")
    ] = None
    file_on_nodes: Annotated[
        str | None,
        typer.Option(
            "--file-on-nodes",
            metavar="FILE",
            help="The path of the YAML file on every node, instead of sending it.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(SessionOptions):
    """Options of commands that read encrypted files."""

    aad_prefix: AadPrefixOption = None


@dataclass(frozen=True, kw_only=True)
class SparkRotationOptions(SessionOptions, RotationOptions):
    """Options of `spark rotate`."""


@app.command("encrypt")
@with_options(SessionOptions)
def encrypt_with_spark(
    source: SourceArgument,
    target: TargetArgument,
    options: SessionOptions,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
) -> None:
    """Encrypt the Parquet files of a folder.

    To continue an interrupted run, add --skip-existing. When every file is there, DST contains _SUCCESS.
    """
    arguments = {"overwrite": overwrite, "skip_existing": skip_existing}
    _run("encrypt", options, source, target, table_name=options.table, **arguments)


@app.command("decrypt")
@with_options(ReadingOptions)
def decrypt_with_spark(
    source: SourceArgument,
    target: TargetArgument,
    options: ReadingOptions,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
) -> None:
    """Decrypt the Parquet files of a folder.

    The written files are not encrypted. To continue an interrupted run, add --skip-existing.
    """
    arguments = {"overwrite": overwrite, "skip_existing": skip_existing}
    _run("decrypt", options, source, target, **_table_and_prefix(options), **arguments)


@app.command("rotate")
@with_options(SparkRotationOptions)
def rotate_with_spark(path: PathArgument, options: SparkRotationOptions) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    Each distinct wrapped key is re-wrapped once, however many files contain it.
    """
    _run("rotate", options, path, **options.arguments(), to=options.to_config)


@app.command("rekey")
@with_options(ReadingOptions)
def rekey_with_spark(path: PathArgument, options: ReadingOptions, follow_links: FollowLinksOption = False) -> None:
    """Re-encrypt files in place, with new data keys."""
    _run("rekey", options, path, **_table_and_prefix(options), follow_links=follow_links)


@app.command("verify")
@with_options(ReadingOptions)
def verify_with_spark(path: PathArgument, options: ReadingOptions, parts: PartsOption = None) -> None:
    """Check files against the encryption specification.

    Each file is checked rule by rule, and all files as one data set.
    """
    _run("verify", options, path, **_table_and_prefix(options), part_count=parts)


@app.command("keys")
@with_options(ReadingOptions)
def keys_with_spark(
    path: PathArgument, options: ReadingOptions, ignore_passed_over: IgnorePassedOverOption = False
) -> None:
    """List which master keys the files depend on."""
    _run("keys", options, path, **_table_and_prefix(options), ignore_passed_over=ignore_passed_over)


def _table_and_prefix(options: ReadingOptions) -> dict[str, Any]:
    return {"table_name": options.table, "aad_prefix": options.aad_prefix}


def _run(name: str, options: SessionOptions, *places: str, **arguments: Any) -> None:
    """Run a pipeline, and show its report.

    Raises:
        typer.Exit: Something failed.
    """
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
        if name == "keys" and not json_wanted():
            _show_keys(report)
        _show(report)


@contextmanager
def _session(master: str | None, settings: list[str] | None) -> Iterator[SparkSession]:
    """Start a session, and stop it; of Spark's own messages, only errors are printed.

    Raises:
        ConfigurationError: pyspark or Java is missing, or Spark does not start.
    """
    from parquet_keytools.errors import ConfigurationError

    pairs = pairs_of(settings, "--conf")
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        from parquet_keytools.runtime.presentation import install_hint

        raise ConfigurationError("pyspark is not installed.", hint=install_hint("spark")) from None
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


def _show(report: PipelineReport) -> None:
    """Print a report.

    Raises:
        typer.Exit: Something failed.
    """
    from parquet_keytools import errors
    from parquet_keytools.spark.pipelines import VerificationReport

    rules = None
    if isinstance(report, VerificationReport):
        rules = [row for row in report.rule_rows() if row["outcome"] == "broken"]
    document = {
        "outcomes": dict(report.outcomes),
        "kms_keys": dict(report.kms_keys),
        "tasks": report.tasks,
        "seconds": round(report.seconds, 3),
    } | ({} if rules is None else {"broken_rules": rules})
    kinds = set()
    messages: dict[str, Messages] = {}
    with FilesDocument() as files:
        for row in report.rows():
            files.add(row)
            if row["error_class"] is not None:
                kinds.add(getattr(errors, row["error_class"], OSError))
            if text := row["error"] or (row["detail"] if row["outcome"] == "left out" else None):
                label = row["outcome"].capitalize()
                messages.setdefault(label, Messages(label)).add(row["path"], text)
        files.end(document)
    for group in messages.values():
        group.print()
    broken: dict[str, Messages] = {}
    for rule in rules or []:
        label = f"{rule['severity'].capitalize()} {rule['rule']}"
        broken.setdefault(label, Messages(label, answer)).add(rule["file"], rule["message"])
    for group in broken.values():
        group.print()
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    asked = ", ".join(f"{number} {operation}" for operation, number in report.kms_keys.items()) or "nothing"
    answer(
        f"{outcomes or 'No files'} in {report.seconds:.1f} s and {report.tasks} tasks; keys asked for: {asked}."
    )
    if report.succeeded:
        return
    kms_failed = kinds and all(issubclass(kind, errors.KmsError) for kind in kinds)
    raise typer.Exit(ExitStatus.KMS_FAILED if kms_failed else ExitStatus.NO)


def _show_keys(report: PipelineReport) -> None:
    """Print how many files need which version of which master key."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in report.rows():
        counts.update(
            {
                (key["master_key"] or key["data_key"] or "unknown", key["version"] or "unknown")
                for key in row["keys"]
            }
        )
    rows = [(name, version, f"{number:,}") for (name, version), number in sorted(counts.items())]
    print_table("Files that depend on master keys", ["master key", "version", "files"], rows)
