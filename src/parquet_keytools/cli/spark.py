"""`parquet-keytools spark encrypt|decrypt|rotate|rekey|verify|keys`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    DryRunOption,
    FollowLinksOption,
    FromOption,
    IgnorePassedOverOption,
    JsonOption,
    NewKeksOption,
    OlderThanOption,
    OnlyOption,
    OtherKmsOption,
    OverwriteOption,
    SkipExistingOption,
    SourceArgument,
    TableOption,
    TargetArgument,
    ToOption,
    moves_of,
    pairs_of,
)
from parquet_keytools.cli.output import ExitStatus, FilesDocument, answer, print_table, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from parquet_keytools.spark.pipelines import PipelineReport

app = typer.Typer(
    name="spark", help="Work on whole data sets as jobs of Spark.", no_args_is_help=True, rich_markup_mode=None
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="File or folder, or its URI, the same on every node.")
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark's master, such as spark://host:7077, yarn or local[4]. "
        "Default: that of spark-submit or Spark's own settings, else all cores of this machine.",
    ),
]
SettingOption = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A Spark setting. Repeatable.")
]
TasksOption = Annotated[
    int | None, typer.Option("--max-tasks", metavar="N", min=1, help="Maximum number of tasks.")
]
FileOnNodesOption = Annotated[
    str | None,
    typer.Option(
        "--file-on-nodes", metavar="FILE", help="The path of the YAML file on every node, instead of sending it."
    ),
]

_MOST_SHOWN = 20


@app.command("encrypt")
def encrypt_with_spark(
    source: SourceArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Encrypt the Parquet files of a folder.

    To continue an interrupted run, add --skip-existing. DST has _SUCCESS when every file is there.
    """
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.encrypt(
            session,
            source,
            target,
            config,
            table,
            overwrite=overwrite,
            skip_existing=skip_existing,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
        )
        _tell(report, as_json=as_json)


@app.command("decrypt")
def decrypt_with_spark(
    source: SourceArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decrypt the Parquet files of a folder.

    The written files are not encrypted. To continue an interrupted run, add --skip-existing.
    """
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.decrypt(
            session,
            source,
            target,
            config,
            table,
            aad_prefix=aad_prefix,
            overwrite=overwrite,
            skip_existing=skip_existing,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
        )
        _tell(report, as_json=as_json)


@app.command("rotate")
def rotate_with_spark(
    path: PathArgument,
    config: ConfigOption,
    from_keys: FromOption = None,
    to_keys: ToOption = None,
    to_config: OtherKmsOption = None,
    only_master_keys: OnlyOption = None,
    older_than: OlderThanOption = None,
    new_keks: NewKeksOption = False,
    dry_run: DryRunOption = False,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    follow_links: FollowLinksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    Each distinct wrapped key is re-wrapped once, however many files have it.
    """
    moves = moves_of(from_keys or [], to_keys or [])
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.rotate(
            session,
            path,
            config,
            moves=moves or None,
            only_master_keys=only_master_keys or None,
            older_than=older_than,
            new_keks=new_keks,
            dry_run=dry_run,
            to=to_config,
            table_name=table,
            aad_prefix=aad_prefix,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
            follow_links=follow_links,
        )
        _tell(report, as_json=as_json)


@app.command("rekey")
def rekey_with_spark(
    path: PathArgument,
    config: ConfigOption,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    follow_links: FollowLinksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Re-encrypt files in place, with new data keys."""
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.rekey(
            session,
            path,
            config,
            table_name=table,
            aad_prefix=aad_prefix,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
            follow_links=follow_links,
        )
        _tell(report, as_json=as_json)


@app.command("verify")
def verify_with_spark(
    path: PathArgument,
    config: ConfigOption,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    parts: Annotated[
        int | None,
        typer.Option("--parts", metavar="N", min=1, help="The folder must have parts 0 to N-1, each once."),
    ] = None,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check files against the encryption specification.

    Each is checked rule by rule, and all of them as one data set.
    """
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.verify(
            session,
            path,
            config,
            table_name=table,
            aad_prefix=aad_prefix,
            part_count=parts,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
        )
        _tell(report, as_json=as_json, rules=[row for row in report.rule_rows() if row["outcome"] == "broken"])


@app.command("keys")
def keys_with_spark(
    path: PathArgument,
    config: ConfigOption,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    master: MasterOption = None,
    conf: SettingOption = None,
    max_tasks: TasksOption = None,
    file_on_nodes: FileOnNodesOption = None,
    ignore_passed_over: IgnorePassedOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """List which master keys the files depend on."""
    with _session(master, conf) as session:
        from parquet_keytools.spark import pipelines

        report = pipelines.keys(
            session,
            path,
            config,
            table_name=table,
            aad_prefix=aad_prefix,
            file_on_nodes=file_on_nodes,
            max_tasks=max_tasks,
            ignore_passed_over=ignore_passed_over,
        )
        if not as_json:
            _say_keys(report)
        _tell(report, as_json=as_json)


@contextmanager
def _session(master: str | None, settings: list[str] | None) -> Iterator[SparkSession]:
    """Start a session, and stop it; what Spark itself prints is cut down to errors.

    Raises:
        ConfigurationError: There is no pyspark, or no Java, or Spark does not start.
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
    # The Python that runs this has what tasks need; on a cluster with others, say spark.pyspark.python.
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
        # A traceback would end with the status that means that something was checked, and is not in order.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"Spark did not start: {reason}", hint="Check --master and --conf; what Spark itself says is above."
        ) from None
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def _tell(report: PipelineReport, *, as_json: bool, rules: list[dict[str, Any]] | None = None) -> None:
    """Tell what came of a pipeline.

    Raises:
        typer.Exit: Not all went well.
    """
    from parquet_keytools import errors

    if as_json:
        document: dict[str, Any] = {
            "outcomes": dict(report.outcomes),
            "kms_keys": dict(report.kms_keys),
            "tasks": report.tasks,
            "seconds": round(report.seconds, 3),
        }
        with FilesDocument(wanted=True) as files:
            for row in report.rows():
                files.add(row)
            files.end(document if rules is None else document | {"broken_rules": rules})
    kinds = set()
    shown = 0
    for row in report.rows():
        if row["error_class"] is not None:
            kinds.add(getattr(errors, row["error_class"], OSError))
        text = row["error"] or (row["detail"] if row["outcome"] == "left out" else None)
        if text is not None:
            shown += 1
            if shown <= _MOST_SHOWN:
                say(f"{row['outcome'].capitalize()}: {row['path']}: {text}")
    if shown > _MOST_SHOWN:
        say(f"{shown - _MOST_SHOWN} more; --json lists all.")
    for rule in (rules or [])[:_MOST_SHOWN]:
        answer(f"{rule['severity'].capitalize()}: {rule['file']}: {rule['rule']}: {rule['message']}")
    if rules is not None and len(rules) > _MOST_SHOWN:
        answer(f"{len(rules) - _MOST_SHOWN} more; --json lists all.")
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    asked = ", ".join(f"{number} {operation}" for operation, number in report.kms_keys.items()) or "nothing"
    answer(
        f"{outcomes or 'No files'} in {report.seconds:.1f} s and {report.tasks} tasks; keys asked for: {asked}."
    )
    if report.succeeded:
        return
    kms_failed = kinds and all(issubclass(kind, errors.KmsError) for kind in kinds)
    raise typer.Exit(ExitStatus.KMS_FAILED if kms_failed else ExitStatus.NO)


def _say_keys(report: PipelineReport) -> None:
    """Tell how many files need which version of which master key."""
    from collections import Counter

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
