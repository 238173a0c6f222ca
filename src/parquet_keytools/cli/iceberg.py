"""`parquet-keytools iceberg`: encrypted tables of Apache Iceberg."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli.options import CONFIG_VARIABLE, JsonOption

if TYPE_CHECKING:
    from parquet_keytools.iceberg.located_tables import LocatedTable
    from parquet_keytools.iceberg.table_audit import TableReport

app = typer.Typer(
    name="iceberg", help="Look at the keys of encrypted Iceberg tables, and rotate them.", no_args_is_help=True
)

IcebergTableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="A metadata file or its URI, or with --catalog the name of a table, such as db.people.",
    ),
]
CatalogOption = Annotated[
    str | None,
    typer.Option("--catalog", metavar="NAME", help="A catalog that PyIceberg knows, as in .pyiceberg.yaml."),
]
PropertyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--property", metavar="NAME=VALUE", help="A property of PyIceberg, of catalog or FileIO. Repeatable."
    ),
]
IcebergConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="The YAML configuration: its KMS opens the keys."
    ),
]


@app.command("inspect")
def inspect_table_command(
    table: IcebergTableArgument,
    config: IcebergConfigOption = None,
    catalog: CatalogOption = None,
    properties: PropertyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the key chain: master keys, KEKs with their age, snapshots, manifests and files.

    Manifest lists and manifests are decrypted, files are not. Exits 1 if the chain is broken, or if plaintext
    files lie in an encrypted table.
    """
    _show(_audit(table, config, catalog, properties, with_data=False), as_json, as_tree=True)


@app.command("verify")
def verify_table_command(
    table: IcebergTableArgument,
    config: IcebergConfigOption = None,
    catalog: CatalogOption = None,
    properties: PropertyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check each link of the key chain, and each file of every snapshot to its last byte.

    Finds plaintext files, streams that were cut, files that were changed or swapped, and data keys that files
    share. Exits 1 if something is wrong.
    """
    _show(_audit(table, config, catalog, properties, with_data=True), as_json, as_tree=False)


@app.command("keys")
def table_keys_command(
    table: IcebergTableArgument,
    config: IcebergConfigOption = None,
    catalog: CatalogOption = None,
    properties: PropertyOption = None,
    remove_unneeded: Annotated[
        bool,
        typer.Option(
            "--remove-unneeded",
            help="First remove the keys that no snapshot needs, as one commit; with --catalog alone.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which master keys and KEKs a table depends on, and keys that nothing needs.

    Only the metadata file is read, and no KMS is called.
    """
    from parquet_keytools.cli.iceberg_report import print_keys, table_keys_document
    from parquet_keytools.cli.output import print_json

    if remove_unneeded:
        if catalog is None:
            raise typer.BadParameter(
                "it commits to a catalog: give --catalog, too.", param_hint="--remove-unneeded"
            )
        with _iceberg_installed():
            from parquet_keytools.iceberg.loading import load_table_to_write
        load_table_to_write(catalog, table, config, _given(properties)).remove_unneeded_keys()
    encryption = _located(table, config, catalog, properties).encryption
    if as_json:
        print_json(table_keys_document(encryption))
    else:
        print_keys(encryption)


@app.command("rotate")
def rotate_table_command(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table, such as db.people.")],
    catalog: Annotated[
        str,
        typer.Option("--catalog", metavar="NAME", help="Its catalog that PyIceberg knows, as in .pyiceberg.yaml."),
    ],
    config: IcebergConfigOption = None,
    properties: PropertyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Re-wrap the KEKs of a table under the current version of their master key, as one commit.

    The metadata file alone is replaced. The property encryption.key-id never changes. If it fails, the table
    is as it was.
    """
    from parquet_keytools.cli.output import answer, number_of, print_json

    with _iceberg_installed():
        from parquet_keytools.iceberg.loading import load_table_to_write

    loaded = load_table_to_write(catalog, table, config, _given(properties))
    rotated = loaded.rotate()
    master_key_id = loaded.known().encryption.master_key_id
    if as_json:
        print_json({"table": table, "master_key_id": master_key_id, "rotated_keks": list(rotated)})
    else:
        answer(
            f"{table}: {number_of(len(rotated), 'KEK')} re-wrapped under the current version of {master_key_id}."
        )


@contextmanager
def _iceberg_installed() -> Iterator[None]:
    from parquet_keytools.errors import ConfigurationError
    from parquet_keytools.runtime.extras import install_hint

    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed.", hint=install_hint("iceberg")) from None


def _given(properties: list[str] | None) -> dict[str, str]:
    given = [text.partition("=") for text in properties or []]
    if any(not name or not separator for name, separator, _ in given):
        raise typer.BadParameter("it is not NAME=VALUE.", param_hint="--property")
    return {name: value for name, _, value in given}


def _located(table: str, config: Path | None, catalog: str | None, properties: list[str] | None) -> LocatedTable:
    with _iceberg_installed():
        from parquet_keytools.iceberg.located_tables import located_table

    return located_table(table, config, catalog, _given(properties))


def _audit(
    table: str, config: Path | None, catalog: str | None, properties: list[str] | None, *, with_data: bool
) -> TableReport:
    from parquet_keytools.iceberg.table_audit import TableAudit

    located = _located(table, config, catalog, properties)
    return TableAudit(located, with_data=with_data).run()


def _show(report: TableReport, as_json: bool, *, as_tree: bool) -> None:
    from parquet_keytools.cli.failures import ExitStatus
    from parquet_keytools.cli.iceberg_report import print_findings, print_tree, table_document
    from parquet_keytools.cli.output import print_json

    if as_json:
        print_json(table_document(report))
    else:
        if as_tree:
            print_tree(report)
        print_findings(report)
    if report.findings:
        raise typer.Exit(ExitStatus.KMS_FAILED if report.kms_failed else ExitStatus.NO)
