"""`parquet-keytools check`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
import errno
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli.options import (
    CONFIG_VARIABLE,
    AadPrefixOption,
    JsonOption,
    PathsArgument,
    ProcessesOption,
    TableOption,
    checked_aad_prefix,
    config_option,
    location_of,
    locations_of,
)
from parquet_keytools.cli.output import ExitStatus, answer, file_counter, print_json, print_table, status_of
from parquet_keytools.runtime.presentation import expanded

if TYPE_CHECKING:
    from parquet_keytools.configuration_check import ColumnCheck, MasterKeyCheck
    from parquet_keytools.conformance.inspection import Inspection

ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", envvar=CONFIG_VARIABLE, help="The YAML configuration.")
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Do not call the KMS.")]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="FILE", help="Show which key each column of this Parquet file gets: its path or URI."
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
SchemaOption = Annotated[
    bool,
    typer.Option("--schema", help="Print the JSON Schema of configurations, for editors, and do nothing else."),
]


def check_command(
    config: ConfigArgument = None,
    offline: OfflineOption = False,
    against: AgainstOption = None,
    table: TableOption = None,
    aad_prefix: AgainstPrefixOption = None,
    schema: SchemaOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a configuration and its master keys.

    The KMS wraps and unwraps a test key with each master key of the configuration.
    """
    if schema:
        from parquet_keytools.config.settings import configuration_json_schema

        print_json(configuration_json_schema())
        return
    if config is None:
        raise typer.BadParameter("a configuration is needed, or --schema.", param_hint="CONFIG")

    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import check_columns, check_master_keys, with_short_timeout
    from parquet_keytools.keytools import Keytools

    configuration = with_short_timeout(load_configuration(config))
    if table is not None:
        configuration.select_table(table)
    file = None if against is None else location_of(against, "--against")
    with nullcontext() if offline else Keytools(configuration) as keytools:
        kms = None if keytools is None else keytools.kms
        columns = None if file is None else check_columns(configuration, file, table, aad_prefix, kms)
        master_keys = None if kms is None else check_master_keys(configuration, kms)
        if keytools is not None and not any(key.error for key in master_keys or ()):
            keytools.check_hash_keys()

    if as_json:
        print_json(
            {
                "configuration": str(config),
                "tables": list(configuration.tables),
                "warnings": list(configuration.warnings),
                "columns": None if columns is None else [asdict(column) for column in columns],
                "master_keys": None if master_keys is None else list(map(_facts, master_keys)),
            }
        )
    if columns is not None:
        _show_columns(f"Columns of {file}", columns)
    if master_keys:
        _show_master_keys(master_keys)
    status = max((status_of(key.error) for key in master_keys or () if key.error), default=ExitStatus.DONE)
    if status is not ExitStatus.DONE:
        raise typer.Exit(status)
    answer(f"{config}: no mistakes." + (" The KMS was not called." if offline else ""))


def _facts(key: MasterKeyCheck) -> dict[str, str | None]:
    return {
        "name": key.name,
        "master_key_id": key.master_key_id,
        "backend": key.backend,
        "outcome": "ok" if key.error is None else "failed",
        "version": key.version,
        "error": None if key.error is None else type(key.error).__name__,
        "message": None if key.error is None else str(key.error),
    }


def _show_columns(title: str, columns: list[ColumnCheck]) -> None:
    rows = [(column.dotted_path, column.kind, column.key_name, column.master_key_id) for column in columns]
    print_table(title, ["column", "kind", "key", "master key"], rows)


def _show_master_keys(master_keys: list[MasterKeyCheck]) -> None:
    rows = [
        (key.name, key.master_key_id, key.backend, "ok" if key.error is None else str(key.error), key.version)
        for key in master_keys
    ]
    print_table("Master keys", ["name", "master key", "backend", "outcome", "version"], rows)


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

    Without keys, what anyone can see of it; with those of a configuration, every module of it. Only the footer is
    read, and with keys the headers of pages. Nothing is compared with a table: `verify` does that. Exits 1 if
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

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        answer(render_inspection(shown, width))
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
    from parquet_keytools.conformance.inspector import inspect_source
    from parquet_keytools.encryption.aad import ExpectedAadPrefix

    prefix = None if aad_prefix is None else ExpectedAadPrefix.of(aad_prefix)
    if "://" not in file:
        from parquet_keytools.conformance.inspector import open_local

        _refuse_irregular(file)
        with open_local(file) as local_source:
            path = str(expanded(file).absolute())
            return inspect_source(local_source, aad_prefix=prefix, path=path)
    from parquet_keytools.storage.sources import open_source

    location = location_of(file, "FILE")
    with open_source(location) as source:
        return inspect_source(source, aad_prefix=prefix, path=location.path)


def _refuse_irregular(file: str) -> None:
    """Refuse a pipe before it is opened: that would wait for its other end."""
    path = expanded(file)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise typer.BadParameter(f"{file} is not a regular file.", param_hint="FILE")


VerifyConfigOption = Annotated[
    Path | None, config_option("The YAML configuration: its keys, and the table to compare with.")
]
PartsOption = Annotated[
    int | None, typer.Option("--parts", metavar="N", min=1, help="The folder must have parts 0 to N-1, each once.")
]


def verify_command(
    paths: PathsArgument,
    config: VerifyConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    parts: PartsOption = None,
    processes: ProcessesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check files against the encryption specification, rule by rule.

    Without a configuration, what needs no key is checked, and nothing is authenticated. With one, every module is,
    and the file is compared with what its table wants. A folder is checked as one data set. The exit status is 0
    only if everything that was asked for was checked and conforms.
    """
    from parquet_keytools.cli.conformance_report import say_data_set, say_file
    from parquet_keytools.conformance import verification
    from parquet_keytools.conformance.report import data_set_document, file_document
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.runtime.worker_processes import command_line_processes

    if table is not None and config is None:
        raise typer.BadParameter("--table needs --config.")
    location = locations_of(paths, "PATH")
    kind = location.info().type.name
    if parts is not None and kind == "File":
        raise typer.BadParameter("parts are files of a folder, and PATH is one file.")
    if kind == "NotFound":
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", paths[0])
    with contextlib.ExitStack() as stack:
        verify_folder = partial(verification.verify_folder, None)
        verify_file = partial(verification.verify_file, None)
        if config is not None:
            keytools = stack.enter_context(Keytools.from_yaml(config))
            if table is not None:
                keytools.configuration.select_table(table)
            verify_folder = partial(keytools.verify_folder, table_name=table)
            verify_file = partial(keytools.verify_file, table_name=table)
        if kind == "Directory":
            with file_counter() as count, command_line_processes(processes):
                data_set = verify_folder(
                    location,
                    aad_prefix=aad_prefix,
                    part_count=parts,
                    on_progress=count,
                )
            print_json(data_set_document(data_set)) if as_json else say_data_set(data_set)
            conforms = data_set.conforms
        else:
            report = verify_file(location, aad_prefix=aad_prefix)
            print_json(file_document(report)) if as_json else say_file(report)
            conforms = report.conforms
    if not conforms:
        raise typer.Exit(ExitStatus.NO)
