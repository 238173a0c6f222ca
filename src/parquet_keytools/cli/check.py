"""`parquet-keytools check`, `inspect` and `verify`."""

from __future__ import annotations

import contextlib
import errno
import shlex
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import expanded

if TYPE_CHECKING:
    from parquet_keytools.config.settings import Configuration
    from parquet_keytools.configuration_check import ColumnCheck, MasterKeyCheck
    from parquet_keytools.conformance.inspection import Inspection
    from parquet_keytools.conformance.report import DataSetReport, FileReport


class Role(Enum):
    """The roles of `--as`."""

    WRITER = "writer"
    READER = "reader"
    ROTATOR = "rotator"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `check`.

    Options:
        --offline: Do not call the KMS.
        --against FILE: Show which key each column of this Parquet file gets: its path or URI. Of a
            configuration (.yaml, .yml): show what changed since.
        --aad-prefix TEXT: The AAD prefix of FILE, if FILE does not store it.
        --since REV: Show what changed since this revision of git, in configuration and labels.
        --allow-weaker COLUMN: Let this column (or TABLE.COLUMN) lose protection. Repeatable.
        --strict: Exit with 1 if a configuration has warnings.
        --schema: Print the JSON Schema of configurations, for editors, and do nothing else.
    """

    offline: bool = False
    against: str | None = None
    table: str | None = None
    aad_prefix: str | None = None
    role: Annotated[
        Role | None,
        typer.Option("--as", help="Try only what this role needs. By default, keys are wrapped and unwrapped."),
    ] = None
    since: str | None = None
    allow_weaker: list[str] | None = None
    strict: bool = False
    schema: bool = False
    json: bool = False
    wide: bool = False


@opt.with_options(CheckOptions)
def check_command(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CONFIG", envvar=opt.CONFIG_VARIABLE, help="The YAML configuration, or several."),
    ] = None,
    *,
    options: CheckOptions,
) -> None:
    """Check configurations and their master keys.

    The KMS wraps and unwraps a test key with each master key of a configuration, or does only what a role needs.
    With several configurations, all are checked, and the exit status is the highest of theirs. Compared with an
    earlier configuration, columns that lose protection are a mistake.
    """
    if options.schema:
        from parquet_keytools.config.settings import configuration_json_schema

        out.print_json(configuration_json_schema())
        return
    if not configs:
        raise typer.BadParameter("a configuration is needed, or --schema.", param_hint="CONFIG")

    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import with_short_timeout
    from parquet_keytools.errors import KeytoolsError

    documents: list[dict[str, Any]] = []
    statuses: list[out.ExitStatus] = []
    for config in configs:
        try:
            old = _old_configuration(config, options.against, options.since)
            file = None if old is not None and options.since is None else options.against
            configuration = with_short_timeout(load_configuration(config))
            status, document = _check(config, configuration, file, options)
            if old is not None:
                is_weaker, document["changes"] = _compare(configuration, old, file, options)
                status = max(status, out.ExitStatus.NO) if is_weaker else status
        except (KeytoolsError, OSError) as error:
            if len(configs) == 1:
                raise
            out.say(f"Error: {out.error_text(error)}")
            status, document = out.status_of(error), {"configuration": str(config), **out.error_fields(error)}
        statuses.append(status)
        documents.append(document)
    if options.json:
        out.print_json(documents[0] if len(documents) == 1 else {"configurations": documents})
    if max(statuses) is not out.ExitStatus.DONE:
        raise typer.Exit(max(statuses))


def _old_configuration(config: Path, against: str | None, since: str | None) -> Configuration | None:
    """Return the configuration to compare with; None if there is none."""
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import configuration_at

    with warnings.catch_warnings():
        # Warnings about the earlier configuration do not matter here.
        warnings.simplefilter("ignore")
        if since is not None:
            return configuration_at(config, since)
        if against is not None and against.lower().endswith((".yaml", ".yml")):
            return load_configuration(against)
    return None


def _compare(
    configuration: Configuration, old: Configuration, against: str | None, options: CheckOptions
) -> tuple[bool, list[dict[str, Any]]]:
    """Print what changed, and return whether something lost protection, and the changes for JSON."""
    from parquet_keytools.configuration_check import policy_changes, refuse_weaker, schema_of
    from parquet_keytools.keytools import Keytools

    if against is None:
        changes = policy_changes(old, configuration, table_name=options.table)
    else:
        name, _ = configuration.select_table(options.table)
        with Keytools(configuration) as keytools:
            file = opt.location_of(against, "--against")
            leaves, labels = schema_of(configuration, file, name, options.aad_prefix, keytools.kms)
        changes = policy_changes(old, configuration, leaves, name, labels)
    if changes:
        headings = ["table", "column", "before", "now", "label"]
        rows = [(change.table, change.what, change.before, change.after, change.place) for change in changes]
        out.print_table("What changed", headings, rows)
    else:
        out.answer("No column is protected in another way than before.")
    weaker = refuse_weaker(changes, options.allow_weaker or [])
    for change in weaker:
        out.say(
            f"{change.table}.{change.what} loses protection: {change.before} before, {change.after} now. "
            f"If that is meant: --allow-weaker {shlex.quote(f'{change.table}.{change.what}')}"
        )
    return bool(weaker), [out.to_dict(change) for change in changes]


def _check(
    config: Path, configuration: Configuration, against: str | None, options: CheckOptions
) -> tuple[out.ExitStatus, dict[str, Any]]:
    """Check one configuration, print the result, and return the exit status and the JSON document."""
    from parquet_keytools import configuration_check
    from parquet_keytools.keytools import Keytools

    table, role = options.table, options.role
    if table is not None:
        configuration.select_table(table)
    file = None if against is None else opt.location_of(against, "--against")
    columns: list[ColumnCheck] | None = None
    master_keys: list[MasterKeyCheck] | None = None
    with nullcontext() if options.offline else Keytools(configuration) as keytools:
        kms = None if keytools is None else keytools.kms
        if kms is not None:
            kms.end_within(configuration_check.CHECK_SECONDS)
        if file is not None:
            columns = configuration_check.check_columns(configuration, file, table, options.aad_prefix, kms)
        if kms is not None:
            master_keys = configuration_check.check_master_keys(configuration, kms, role and role.value)
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
            out.to_dict(key) | {"outcome": key.outcome, "missing_permission": key.missing_permission}
            for key in master_keys
        ],
    }
    if columns is not None:
        with_labels = any(column.class_name is not None for column in columns)
        out.print_table(
            f"Columns of {file}",
            ["column", "kind", "key", "master key", *(["class", "label"] if with_labels else [])],
            [
                (column.dotted_path, column.kind, column.key_name, column.master_key_id)
                + ((column.class_name, column.label_place) if with_labels else ())
                for column in columns
            ],
        )
        out.answer_plaintext_columns(column.dotted_path for column in columns if column.kind == "plaintext")
    if master_keys:
        out.print_table(
            "Master keys",
            ["name", "master key", "backend", "outcome", "version"],
            [(k.name, k.master_key_id, k.backend, k.outcome, k.version) for k in master_keys],
        )
    keys = master_keys or []
    failed, not_tried = ([key for key in keys if key.outcome == outcome] for outcome in ("failed", "not tried"))
    # Of a KMS that is down, all keys say the same.
    failures = out.Messages("Failed", noun="master key")
    for key in failed:
        failures.add(key.master_key_id, str(key.error))
    failures.print()
    status = max((out.status_of(key.error) for key in failed if key.error), default=out.ExitStatus.DONE)
    if not_tried:
        of_all = out.number_of(len(keys), "master key")
        out.say(f"Not tried: {len(not_tried):,} of {of_all}. {not_tried[0].error}")
        status = max(status, out.ExitStatus.NO)
    for permission in ("wrap", "unwrap", "rewrap"):
        if names := [key.name for key in keys if key.missing_permission == permission]:
            out.say(f"Missing permission: {permission} with {', '.join(names)}.")
    if status is not out.ExitStatus.DONE:
        return status, document
    if options.strict and configuration.warnings:
        warned = out.number_of(len(configuration.warnings), "warning")
        out.say(f"{config}: {warned}, which --strict counts as mistakes.")
        return out.ExitStatus.NO, document
    out.answer(f"{config}: no mistakes." + (" The KMS was not called." if options.offline else ""))
    return out.ExitStatus.DONE, document


@opt.with_options()
def inspect_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A Parquet file, or its URI.")],
    config: Path | None = None,
    table: str | None = None,
    aad_prefix: str | None = None,
    json: bool = False,
) -> None:
    """Show how a Parquet file is protected.

    Without keys, shows what anyone can see; with the keys of a configuration, every module. Only the footer is
    read, and with keys the page headers. Nothing is compared with a table: `verify` does that. Exits with 1 if
    nothing can be read.

    Options:
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration: its keys open what is encrypted.
    """
    shown = _inspect(file, config, table, aad_prefix)
    if out.json_wanted():
        from parquet_keytools.conformance.report import document_of

        out.print_json(document_of(shown))
    else:
        from parquet_keytools.cli.conformance_report import render_inspection

        out.answer(render_inspection(shown))
        if config is not None:
            out.answer("Nothing was compared with a table: `verify --config` does that.")
    if shown.mode is None:
        raise typer.Exit(out.ExitStatus.NO)


def _inspect(file: str, config: Path | None, table: str | None, aad_prefix: str | None) -> Inspection:
    path = expanded(file)
    if path.is_dir():
        raise typer.BadParameter(
            f"{file} is a folder, and `inspect` shows one file. `verify` checks all files of a folder, and `keys` "
            "shows the master keys that they need.",
            param_hint="FILE",
        )
    with opt.reading_keytools(config, table) as keytools:
        if keytools is not None:
            return keytools.inspect_file(opt.location_of(file, "FILE"), table_name=table, aad_prefix=aad_prefix)
    from parquet_keytools.conformance.inspection import inspect_source
    from parquet_keytools.encryption.aad import ExpectedAadPrefix

    prefix = None if aad_prefix is None else ExpectedAadPrefix.of(aad_prefix)
    if "://" not in file:
        from parquet_keytools.conformance.inspection import open_local

        if path.exists() and not path.is_file():
            # Opening a pipe would wait for its other end.
            raise typer.BadParameter(f"{file} is not a regular file.", param_hint="FILE")
        with open_local(file) as local_source:
            return inspect_source(local_source, aad_prefix=prefix, path=str(path.absolute()))
    from parquet_keytools.storage.locations import open_source

    location = opt.location_of(file, "FILE")
    with open_source(location) as source:
        return inspect_source(source, aad_prefix=prefix, path=location.path)


@opt.with_options(opt.ReportOptions)
def verify_command(
    paths: opt.PathsArgument,
    config: Path | None = None,
    table: str | None = None,
    aad_prefix: str | None = None,
    parts: int | None = None,
    allow_plaintext: list[str] | None = None,
    expect: str | None = None,
    record: str | None = None,
    list_key: str | None = None,
    strict: bool = False,
    processes: int | None = None,
) -> None:
    """Check files against the encryption specification, rule by rule.

    Without a configuration, only rules that need no key are checked, and nothing is authenticated. With a
    configuration, every module is authenticated, and the file is compared with its table. A folder is checked as
    one data set, and may hold no plaintext data, under any name. The verdict is *conforms*, *conforms, with
    weaknesses*, *does not conform*, or *incomplete* if not everything could be checked. The exit status is 0 for
    the first two, and 3 if the KMS cannot be reached.

    Options:
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration: its keys, and the table to compare
            with.
        --expect LIST: Compare the files of a folder with this list, which --record wrote.
        --record LIST: Write an authenticated list of the files of a folder, if they conform.
    """
    from parquet_keytools.cli.conformance_report import show_data_set, show_file
    from parquet_keytools.conformance import verification
    from parquet_keytools.conformance.report import Verdict
    from parquet_keytools.runtime.worker_processes import command_line_processes

    location = opt.locations_of(paths, "PATH")
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
        keytools = stack.enter_context(opt.reading_keytools(config, table))
        if keytools is not None:
            verify_folder = partial(
                keytools.verify_folder, table_name=table, expect=expect, record=record, list_key=list_key
            )
            verify_file = partial(keytools.verify_file, table_name=table)
        checked: DataSetReport | FileReport
        if kind == "Directory":
            with out.progress_bar() as progress, command_line_processes(processes):
                checked = data_set = verify_folder(
                    location,
                    aad_prefix=aad_prefix,
                    part_count=parts,
                    allow_plaintext=allow_plaintext or (),
                    on_progress=progress.count,
                )
            out.print_json(data_set.to_dict()) if out.json_wanted() else show_data_set(data_set)
            out.say_not_attempted(len(data_set.not_attempted), len(data_set.files))
            if record is not None:
                recorded, missing = f"Recorded in {record}.", f"Not recorded in {record}: see the verdict."
                out.say(recorded if data_set.conforms else missing)
        else:
            checked = report = verify_file(location, aad_prefix=aad_prefix)
            out.print_json(report.to_dict()) if out.json_wanted() else show_file(report)
    if checked.verdict is Verdict.INCOMPLETE and checked.kms_is_unavailable:
        raise typer.Exit(out.ExitStatus.KMS_FAILED)
    if not (checked.conforms_strictly if strict else checked.conforms):
        raise typer.Exit(out.ExitStatus.NO)
