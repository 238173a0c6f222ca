"""`parquet-keytools iceberg`: encrypted tables of Apache Iceberg."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import JsonOption, config_option, pairs_of
from parquet_keytools.cli.output import (
    WIDTH_WITHOUT_TERMINAL,
    ExitStatus,
    answer,
    number_of,
    print_json,
    print_table,
    size_text,
    without_controls,
)

if TYPE_CHECKING:
    from parquet_keytools.iceberg.metadata import TableEncryption
    from parquet_keytools.iceberg.table_audit import ChainLink, KekReport, LocatedTable, TableReport

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
IcebergConfigOption = Annotated[Path | None, config_option("The YAML configuration: its KMS opens the keys.")]


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
    _audit(table, config, catalog, properties, as_json, with_data=False)


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
    _audit(table, config, catalog, properties, as_json, with_data=True)


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
    if remove_unneeded:
        if catalog is None:
            raise typer.BadParameter(
                "it commits to a catalog: give --catalog, too.", param_hint="--remove-unneeded"
            )
        with _iceberg_installed():
            from parquet_keytools.iceberg.encrypted_table import load_table_to_write
        load_table_to_write(catalog, table, config, pairs_of(properties, "--property")).remove_unneeded_keys()
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
    with _iceberg_installed():
        from parquet_keytools.iceberg.encrypted_table import load_table_to_write

    loaded = load_table_to_write(catalog, table, config, pairs_of(properties, "--property"))
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
    from parquet_keytools.runtime.presentation import install_hint

    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed.", hint=install_hint("iceberg")) from None


def _located(table: str, config: Path | None, catalog: str | None, properties: list[str] | None) -> LocatedTable:
    with _iceberg_installed():
        from parquet_keytools.iceberg.table_audit import located_table

    return located_table(table, config, catalog, pairs_of(properties, "--property"))


def _audit(
    table: str,
    config: Path | None,
    catalog: str | None,
    properties: list[str] | None,
    as_json: bool,
    *,
    with_data: bool,
) -> None:
    """Show the key chain, or with data only what is wrong with it."""
    located = _located(table, config, catalog, properties)
    from parquet_keytools.iceberg.table_audit import TableAudit

    report = TableAudit(located, with_data=with_data).run()
    if as_json:
        print_json(table_document(report))
    else:
        if not with_data:
            print_tree(report)
        print_findings(report)
    if report.findings:
        raise typer.Exit(ExitStatus.KMS_FAILED if report.kms_failed else ExitStatus.NO)


# --- the key chain, for people and for programs ---


_MOST_CHILDREN = 50


def table_document(report: TableReport) -> dict[str, Any]:
    """Return a report for programs."""
    encryption = report.encryption
    return {
        "metadata": encryption.metadata_location,
        "location": encryption.location,
        "table_uuid": encryption.table_uuid,
        "is_encrypted": encryption.is_encrypted,
        "master_key_id": encryption.master_key_id,
        "master_key_ids": report.master_key_ids,
        "keks": list(map(asdict, report.keks)),
        "unneeded_keys": list(encryption.unneeded_keys),
        "snapshots": [
            {
                "snapshot_id": snapshot.snapshot_id,
                "key_id": snapshot.key_id,
                "manifest_list": snapshot.manifest_list,
            }
            for snapshot in encryption.snapshots
        ],
        "files": [
            {
                "location": link.location,
                "kind": link.kind,
                "length": link.length,
                "is_encrypted": link.is_encrypted,
                "snapshot_ids": link.snapshot_ids,
                "lists": [child.location for child in link.children],
                "problems": link.problems,
            }
            for link in report.files
        ],
        "orphan_files": report.orphans,
        "plaintext_files": report.plaintext_files if encryption.is_encrypted else [],
        "findings": [{"link": link, "problem": problem} for link, problem in report.findings],
    }


def table_keys_document(encryption: TableEncryption) -> dict[str, Any]:
    """Return for programs what `keys` shows."""
    keks = {kek.key_id: kek for kek in encryption.keks}
    return {
        "metadata": encryption.metadata_location,
        "master_key_id": encryption.master_key_id,
        "master_key_ids": sorted({kek.encrypted_by_id for kek in keks.values()}),
        "keks": [
            {
                "key_id": kek.key_id,
                "master_key_id": kek.encrypted_by_id,
                "timestamp_ms": kek.timestamp_ms,
                "snapshot_ids": _snapshots_under(encryption, kek.key_id),
            }
            for kek in keks.values()
        ],
        "unneeded_keys": list(encryption.unneeded_keys),
    }


def _snapshots_under(encryption: TableEncryption, kek_id: str) -> list[int]:
    return [
        snapshot.snapshot_id
        for snapshot in encryption.snapshots
        if (entry := encryption.keys.get(snapshot.key_id or "")) is not None and entry.encrypted_by_id == kek_id
    ]


def print_keys(encryption: TableEncryption) -> None:
    """Print the master keys and KEKs that a table depends on."""
    import datetime

    def made(timestamp_ms: int | None) -> str:
        if timestamp_ms is None or not 0 <= timestamp_ms < 253_402_300_800_000:
            return "unknown"
        return f"{datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC):%Y-%m-%d}"

    if not encryption.is_encrypted:
        answer(f"{encryption.metadata_location}: the table is not encrypted.")
        return
    print_table(
        f"KEKs of {encryption.metadata_location}",
        ["Master key", "KEK", "Made", "Snapshots"],
        [
            [k.encrypted_by_id, k.key_id, made(k.timestamp_ms), str(len(_snapshots_under(encryption, k.key_id)))]
            for k in encryption.keks
        ],
    )
    answer(f"New KEKs are wrapped by the master key {encryption.master_key_id!r}.")
    _say_unneeded(encryption.unneeded_keys)


def _say_unneeded(keys: Sequence[str]) -> None:
    if keys:
        answer(f"No snapshot needs {number_of(len(keys), 'key')}: {', '.join(keys)}")


def print_tree(report: TableReport) -> None:
    """Print the key chain as a tree."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    encryption = report.encryption

    def line(text: str, style: str = "") -> Text:
        return Text(without_controls(text), style=style, overflow="fold")

    root = Tree(line(encryption.metadata_location, "bold"))

    def add(parent: Tree, text: str, problems: list[str]) -> Tree:
        branch = parent.add(line(text, "red" if problems else ""))
        for problem in problems:
            branch.add(line(problem, "red"))
        return branch

    shown: set[str] = set()

    def add_link(parent: Tree, link: ChainLink) -> None:
        size = "" if link.length is None else f", {size_text(link.length)}"
        state = "" if link.is_encrypted or not encryption.is_encrypted else ", PLAINTEXT"
        shared = f", shared by {len(link.snapshot_ids)} snapshots" if link.is_shared else ""
        branch = add(parent, f"{link.kind} {link.location}{size}{state}{shared}", link.problems)
        if link.location in shown and link.children:
            branch.add("as above")
            return
        shown.add(link.location)
        for child in link.children[:_MOST_CHILDREN]:
            add_link(branch, child)
        if len(link.children) > _MOST_CHILDREN:
            branch.add(f"and {len(link.children) - _MOST_CHILDREN:,} more")

    def add_lists(parent: Tree, kek_id: str | None) -> None:
        for link in report.lists:
            if _kek_of(report, link) == kek_id:
                add_link(add(parent, f"snapshot {link.snapshot_ids[0]}", []), link)

    for master_key_id in report.master_key_ids:
        is_current = " (for new KEKs)" if master_key_id == encryption.master_key_id else ""
        master = add(root, f"master key {master_key_id}{is_current}", [])
        for kek in report.keks:
            if kek.master_key_id == master_key_id:
                add_lists(add(master, _kek_text(kek), kek.problems), kek.key_id)
    if any(_kek_of(report, link) is None for link in report.lists):
        add_lists(add(root, "without a KEK", []), None)
    for link in report.statistics:
        add_link(root, link)
    # A narrower console would cut the width that is asked for.
    Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL).print(root)


def _kek_of(report: TableReport, link: ChainLink) -> str | None:
    encryption = report.encryption
    snapshot = encryption.snapshot(link.snapshot_ids[0])
    entry = encryption.keys.get(snapshot.key_id or "") if snapshot is not None else None
    return entry.encrypted_by_id if entry is not None and entry.encrypted_by_id in encryption.keys else None


def _kek_text(kek: KekReport) -> str:
    age = "of unknown age" if kek.age_days is None else f"{number_of(kek.age_days, 'day')} old"
    if kek.age_days is not None and kek.age_days < 0:
        age = "made in the future, as its KEY_TIMESTAMP says"
    due = ", due: the next writer makes a new one" if kek.is_due else ""
    return f"KEK {kek.key_id}, {age}{due}, {number_of(kek.manifest_lists, 'manifest list')}"


def print_findings(report: TableReport) -> None:
    """Print what is wrong, and a summary."""
    encryption = report.encryption
    for link, problem in report.findings:
        answer(f"{typer.style('problem', fg='red')}: {link}: {problem}")
    _say_unneeded(encryption.unneeded_keys)
    orphans = report.orphans or []
    for orphan in orphans[:_MOST_CHILDREN]:
        answer(f"orphan: nothing names {orphan}")
    if orphans:
        more = len(orphans) - _MOST_CHILDREN
        answer(
            (f"And {more:,} more orphans. " if more > 0 else "")
            + "Expired snapshots leave such files, and so do commits that failed or are in progress."
        )
    shared = sum(link.is_shared for link in report.links.values())
    files = number_of(len(report.files), "file")
    snapshots = number_of(len(encryption.snapshots), "snapshot")
    master_keys = ", ".join(report.master_key_ids) or "none"
    answer(f"{snapshots}, {files}, {shared:,} of them shared by snapshots; master keys: {master_keys}.")
    if not encryption.is_encrypted:
        answer("The table is not encrypted.")
    else:
        problems = len(report.findings)
        answer("Nothing is wrong." if not problems else f"{number_of(problems, 'problem')}.")
