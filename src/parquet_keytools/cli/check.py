"""`parquet-keytools check`, `inspect` and `verify`."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import contextlib
import errno
import shlex
import warnings
from contextlib import nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    CONFIG_VARIABLE,
    AadPrefixOption,
    AllowPlaintextOption,
    JsonOption,
    ListKeyOption,
    PartsOption,
    PathsArgument,
    ProcessesOption,
    ReportOptions,
    TableOption,
    VerifyStrictOption,
    WideOption,
    checked_aad_prefix,
    config_option,
    location_of,
    locations_of,
    reading_keytools,
    with_options,
)
from parquet_keytools.cli.output import (
    ExitStatus,
    Messages,
    answer,
    answer_plaintext_columns,
    error_fields,
    error_text,
    json_wanted,
    number_of,
    print_json,
    print_table,
    progress_bar,
    say,
    say_not_attempted,
    status_of,
    terminal_width,
    to_dict,
)
from parquet_keytools.runtime.presentation import expanded

if TYPE_CHECKING:
    from parquet_keytools.config.settings import Configuration
    from parquet_keytools.conformance.inspection import Inspection
    from parquet_keytools.conformance.report import DataSetReport, FileReport

ConfigsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CONFIG", envvar=CONFIG_VARIABLE, help="The YAML configuration, or several."),
]


class Role(Enum):
    """The roles of `--as`."""

    WRITER = "writer"
    READER = "reader"
    ROTATOR = "rotator"


RoleOption = Annotated[
    Role | None,
    typer.Option("--as", help="Try only what this role needs. By default, keys are wrapped and unwrapped."),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Do not call the KMS.")]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="FILE",
        help="Show which key each column of this Parquet file gets: its path or URI. Of a configuration (.yaml, "
        ".yml): show what changed since.",
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="REV",
        help="Show what changed since this revision of git, in configuration and labels.",
    ),
]
AllowWeakerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-weaker", metavar="COLUMN", help="Let this column (or TABLE.COLUMN) lose protection. Repeatable."
    ),
]
AgainstPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--aad-prefix",
        metavar="TEXT",
        help="The AAD prefix of FILE, if FILE does not store it.",
        callback=checked_aad_prefix,
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a configuration has warnings.")]
SchemaOption = Annotated[
    bool,
    typer.Option("--schema", help="Print the JSON Schema of configurations, for editors, and do nothing else."),
]


def check_command(
    configs: ConfigsArgument = None,
    offline: OfflineOption = False,
    against: AgainstOption = None,
    table: TableOption = None,
    aad_prefix: AgainstPrefixOption = None,
    role: RoleOption = None,
    since: SinceOption = None,
    allow_weaker: AllowWeakerOption = None,
    strict: StrictOption = False,
    schema: SchemaOption = False,
    as_json: JsonOption = False,
    wide: WideOption = False,
) -> None:
    """Check configurations and their master keys.

    The KMS wraps and unwraps a test key with each master key of a configuration, or does only what a role needs.
    With several configurations, all are checked, and the exit status is the highest of theirs. Compared with an
    earlier configuration, columns that lose protection are a mistake.
    """
    if schema:
        from parquet_keytools.config.settings import configuration_json_schema

        print_json(configuration_json_schema())
        return
    if not configs:
        raise typer.BadParameter("a configuration is needed, or --schema.", param_hint="CONFIG")

    from parquet_keytools.errors import KeytoolsError

    documents: list[dict[str, Any]] = []
    statuses: list[ExitStatus] = []
    for config in configs:
        try:
            old = _old_configuration(config, against, since)
            file = None if old is not None and since is None else against
            status, document = _check(config, offline, file, table, aad_prefix, role, strict)
            if old is not None:
                is_weaker, document["changes"] = _compare(config, old, file, table, aad_prefix, allow_weaker or [])
                status = max(status, ExitStatus.NO) if is_weaker else status
        except (KeytoolsError, OSError) as error:
            if len(configs) == 1:
                raise
            say(f"Error: {error_text(error)}")
            status, document = status_of(error), {"configuration": str(config), **error_fields(error)}
        statuses.append(status)
        documents.append(document)
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"configurations": documents})
    if max(statuses) is not ExitStatus.DONE:
        raise typer.Exit(max(statuses))


def _old_configuration(config: Path, against: str | None, since: str | None) -> Configuration | None:
    """Return the configuration to compare with; None if there is none."""
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.policy_changes import configuration_at

    with warnings.catch_warnings():
        # It is not this configuration that is checked.
        warnings.simplefilter("ignore")
        if since is not None:
            return configuration_at(config, since)
        if against is not None and against.lower().endswith((".yaml", ".yml")):
            return load_configuration(against)
    return None


def _compare(
    config: Path,
    old: Configuration,
    against: str | None,
    table: str | None,
    aad_prefix: str | None,
    allowed: list[str],
) -> tuple[bool, list[dict[str, Any]]]:
    """Print what changed, and return whether something lost protection, and the changes for JSON."""
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import schema_of
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.policy_changes import policy_changes, refuse_weaker

    with warnings.catch_warnings():
        # They are shown once.
        warnings.simplefilter("ignore")
        configuration = load_configuration(config)
    if against is None:
        changes = policy_changes(old, configuration, table_name=table)
    else:
        name, _ = configuration.select_table(table)
        with Keytools(configuration) as keytools:
            file = location_of(against, "--against")
            leaves, labels = schema_of(configuration, file, name, aad_prefix, keytools.kms)
        changes = policy_changes(old, configuration, leaves, name, labels)
    if changes:
        headings = ["table", "column", "before", "now", "label"]
        rows = [(change.table, change.what, change.before, change.after, change.place) for change in changes]
        print_table("What changed", headings, rows)
    else:
        answer("No column is protected in another way than before.")
    weaker = refuse_weaker(changes, allowed)
    for change in weaker:
        say(
            f"{change.table}.{change.what} loses protection: {change.before} before, {change.after} now. "
            f"If that is meant: --allow-weaker {shlex.quote(f'{change.table}.{change.what}')}"
        )
    return bool(weaker), [to_dict(change) for change in changes]


def _check(
    config: Path,
    offline: bool,
    against: str | None,
    table: str | None,
    aad_prefix: str | None,
    role: Role | None,
    strict: bool,
) -> tuple[ExitStatus, dict[str, Any]]:
    """Check one configuration, print the result, and return the exit status and the JSON document."""
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import (
        CHECK_SECONDS,
        check_columns,
        check_master_keys,
        with_short_timeout,
    )
    from parquet_keytools.keytools import Keytools

    configuration = with_short_timeout(load_configuration(config))
    if table is not None:
        configuration.select_table(table)
    file = None if against is None else location_of(against, "--against")
    with nullcontext() if offline else Keytools(configuration) as keytools:
        kms = None if keytools is None else keytools.kms
        if kms is not None:
            kms.end_within(CHECK_SECONDS)
        columns = None if file is None else check_columns(configuration, file, table, aad_prefix, kms)
        master_keys = None if kms is None else check_master_keys(configuration, kms, role and role.value)
        unwraps = role in (None, Role.READER)
        if keytools is not None and unwraps and not any(key.error for key in master_keys or ()):
            keytools.check_hash_keys()

    document = {
        "configuration": str(config),
        "tables": list(configuration.tables),
        "warnings": list(configuration.warnings),
        "columns": columns,
        "master_keys": None
        if master_keys is None
        else [
            to_dict(key) | {"outcome": key.outcome, "missing_permission": key.missing_permission}
            for key in master_keys
        ],
    }
    if columns is not None:
        with_labels = any(column.class_name is not None for column in columns)
        print_table(
            f"Columns of {file}",
            ["column", "kind", "key", "master key", *(["class", "label"] if with_labels else [])],
            [
                (column.dotted_path, column.kind, column.key_name, column.master_key_id)
                + ((column.class_name, column.label_place) if with_labels else ())
                for column in columns
            ],
        )
        answer_plaintext_columns(column.dotted_path for column in columns if column.kind == "plaintext")
    if master_keys:
        print_table(
            "Master keys",
            ["name", "master key", "backend", "outcome", "version"],
            [(k.name, k.master_key_id, k.backend, k.outcome, k.version) for k in master_keys],
        )
    # Of a KMS that is down, all keys say the same.
    failures = Messages("Failed", noun="master key")
    for key in master_keys or ():
        if key.error is not None and key.outcome == "failed":
            failures.add(key.master_key_id, str(key.error))
    failures.print()
    failed = [key.error for key in master_keys or () if key.error and key.outcome == "failed"]
    status = max(map(status_of, failed), default=ExitStatus.DONE)
    if not_tried := sum(key.outcome == "not tried" for key in master_keys or ()):
        of_all = number_of(len(master_keys or ()), "master key")
        reason = next(str(key.error) for key in master_keys or () if key.outcome == "not tried")
        say(f"Not tried: {not_tried:,} of {of_all}. {reason}")
        status = max(status, ExitStatus.NO)
    for permission in ("wrap", "unwrap", "rewrap"):
        if names := [key.name for key in master_keys or () if key.missing_permission == permission]:
            say(f"Missing permission: {permission} with {', '.join(names)}.")
    if status is not ExitStatus.DONE:
        return status, document
    if strict and configuration.warnings:
        say(f"{config}: {number_of(len(configuration.warnings), 'warning')}, which --strict counts as mistakes.")
        return ExitStatus.NO, document
    answer(f"{config}: no mistakes." + (" The KMS was not called." if offline else ""))
    return ExitStatus.DONE, document


FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A Parquet file, or its URI.")]
InspectConfigOption = Annotated[
    Path | None, config_option("The YAML configuration: its keys open what is encrypted.")
]


def inspect_command(
    file: FileArgument,
    config: InspectConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a Parquet file is protected.

    Without keys, shows what anyone can see; with the keys of a configuration, every module. Only the footer is
    read, and with keys the page headers. Nothing is compared with a table: `verify` does that. Exits with 1 if
    nothing can be read.
    """
    if table is not None and config is None:
        raise typer.BadParameter("--table needs --config.")
    shown = _inspect(file, config, table, aad_prefix)
    if as_json:
        from parquet_keytools.conformance.report import document_of

        print_json(document_of(shown))
    else:
        from parquet_keytools.cli.conformance_report import render_inspection

        answer(render_inspection(shown, terminal_width()))
        if config is not None:
            answer("Nothing was compared with a table: `verify --config` does that.")
    if shown.mode is None:
        raise typer.Exit(ExitStatus.NO)


def _inspect(file: str, config: Path | None, table: str | None, aad_prefix: str | None) -> Inspection:
    if expanded(file).is_dir():
        raise typer.BadParameter(
            f"{file} is a folder, and `inspect` shows one file. `verify` checks all files of a folder, and `keys` "
            "shows the master keys that they need.",
            param_hint="FILE",
        )
    if config is not None:
        from parquet_keytools.keytools import Keytools

        with Keytools.from_yaml(config) as keytools:
            return keytools.inspect_file(location_of(file, "FILE"), table_name=table, aad_prefix=aad_prefix)
    from parquet_keytools.conformance.inspection import inspect_source
    from parquet_keytools.encryption.aad import ExpectedAadPrefix

    prefix = None if aad_prefix is None else ExpectedAadPrefix.of(aad_prefix)
    if "://" not in file:
        from parquet_keytools.conformance.inspection import open_local

        _refuse_irregular(file)
        with open_local(file) as local_source:
            path = str(expanded(file).absolute())
            return inspect_source(local_source, aad_prefix=prefix, path=path)
    from parquet_keytools.storage.locations import open_source

    location = location_of(file, "FILE")
    with open_source(location) as source:
        return inspect_source(source, aad_prefix=prefix, path=location.path)


def _refuse_irregular(file: str) -> None:
    """Refuse a pipe before it is opened: opening would wait for its other end."""
    path = expanded(file)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise typer.BadParameter(f"{file} is not a regular file.", param_hint="FILE")


VerifyConfigOption = Annotated[
    Path | None, config_option("The YAML configuration: its keys, and the table to compare with.")
]


ExpectOption = Annotated[
    str | None,
    typer.Option(
        "--expect", metavar="LIST", help="Compare the files of a folder with this list, which --record wrote."
    ),
]
RecordOption = Annotated[
    str | None,
    typer.Option(
        "--record", metavar="LIST", help="Write an authenticated list of the files of a folder, if they conform."
    ),
]


@with_options(ReportOptions)
def verify_command(
    paths: PathsArgument,
    config: VerifyConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    parts: PartsOption = None,
    allow_plaintext: AllowPlaintextOption = None,
    expect: ExpectOption = None,
    record: RecordOption = None,
    list_key: ListKeyOption = None,
    strict: VerifyStrictOption = False,
    processes: ProcessesOption = None,
) -> None:
    """Check files against the encryption specification, rule by rule.

    Without a configuration, only rules that need no key are checked, and nothing is authenticated. With a
    configuration, every module is authenticated, and the file is compared with its table. A folder is checked as
    one data set, and may hold no plaintext data, under any name. The verdict is *conforms*, *conforms, with
    weaknesses*, *does not conform*, or *incomplete* if not everything could be checked. The exit status is 0 for
    the first two, and 3 if the KMS cannot be reached.
    """
    from parquet_keytools.cli.conformance_report import show_data_set, show_file
    from parquet_keytools.conformance import verification
    from parquet_keytools.conformance.report import Verdict
    from parquet_keytools.runtime.worker_processes import command_line_processes

    location = locations_of(paths, "PATH")
    kind = location.info().type.name
    if parts is not None and kind == "File":
        raise typer.BadParameter("parts are files of a folder, and PATH is one file.")
    if allow_plaintext and kind == "File":
        raise typer.BadParameter("--allow-plaintext is for files of a folder, and PATH is one file.")
    for option, value in (("--expect", expect), ("--record", record)):
        if value and (kind == "File" or config is None):
            raise typer.BadParameter(f"{option} needs --config and a folder.")
    if kind == "NotFound":
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", paths[0])
    with contextlib.ExitStack() as stack:
        verify_folder = partial(verification.verify_folder, None)
        verify_file = partial(verification.verify_file, None)
        keytools = stack.enter_context(reading_keytools(config, table))
        if keytools is not None:
            verify_folder = partial(
                keytools.verify_folder, table_name=table, expect=expect, record=record, list_key=list_key
            )
            verify_file = partial(keytools.verify_file, table_name=table)
        if kind == "Directory":
            with progress_bar() as progress, command_line_processes(processes):
                data_set = verify_folder(
                    location,
                    aad_prefix=aad_prefix,
                    part_count=parts,
                    allow_plaintext=allow_plaintext or (),
                    on_progress=progress.count,
                )
            print_json(data_set.to_dict()) if json_wanted() else show_data_set(data_set)
            say_not_attempted(len(data_set.not_attempted), len(data_set.files))
            if record is not None:
                say(
                    f"Recorded in {record}."
                    if data_set.conforms
                    else f"Not recorded in {record}: see the verdict."
                )
            checked: DataSetReport | FileReport = data_set
        else:
            report = verify_file(location, aad_prefix=aad_prefix)
            print_json(report.to_dict()) if json_wanted() else show_file(report)
            checked = report
    if checked.verdict is Verdict.INCOMPLETE and checked.kms_is_unavailable:
        raise typer.Exit(ExitStatus.KMS_FAILED)
    if not (checked.conforms_strictly if strict else checked.conforms):
        raise typer.Exit(ExitStatus.NO)
