"""`parquet-keytools check`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli.options import CONFIG_VARIABLE, JsonOption, TableOption, checked_aad_prefix
from parquet_keytools.cli.output import answer, print_json, print_table

if TYPE_CHECKING:
    from parquet_keytools.configuration_check import ColumnCheck, MasterKeyCheck

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
AadPrefixOption = Annotated[
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
    aad_prefix: AadPrefixOption = None,
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

    from parquet_keytools.cli.failures import ExitStatus, status_of
    from parquet_keytools.cli.options import location_of
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
