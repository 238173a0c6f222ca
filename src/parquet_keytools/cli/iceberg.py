"""`parquet-keytools iceberg`: keys of encrypted Apache Iceberg tables."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import installed

if TYPE_CHECKING:
    from parquet_keytools.iceberg.metadata import TableEncryption
    from parquet_keytools.iceberg.table_audit import ChainLink, KekReport, LocatedTable, TableReport

app = typer.Typer(
    name="iceberg", help="Look at the keys of encrypted Iceberg tables, and rotate them.", no_args_is_help=True
)

TableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="A metadata file or its URI, or with --catalog the name of a table, such as db.people.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TableOptions(opt.ReportOptions):
    """Where a table is, and which KMS opens its keys.

    Options:
        --property NAME=VALUE: A property of PyIceberg, of catalog or FileIO. Repeatable.
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration: its KMS opens the keys.
        --catalog NAME: A catalog that PyIceberg knows, as in .pyiceberg.yaml.
    """

    config: Path | None = None
    catalog: str | None = None
    property: list[str] | None = None

    def located(self, table: str) -> LocatedTable:
        """Return the table to read."""
        with installed("iceberg"):
            from parquet_keytools.iceberg.table_audit import located_table

        return located_table(table, self.config, self.catalog, opt.pairs_of(self.property, "--property"))

    def to_write(self, table: str, option: str) -> Any:
        """Return the table to write; `option` needs a catalog."""
        if self.catalog is None:
            raise typer.BadParameter("this commits to a catalog: give --catalog, too.", param_hint=option)
        with installed("iceberg"):
            from parquet_keytools.iceberg.encrypted_table import load_table_to_write

        return load_table_to_write(self.catalog, table, self.config, opt.pairs_of(self.property, "--property"))


@app.command("inspect")
@opt.with_options(TableOptions)
def inspect_table_command(table: TableArgument, options: TableOptions) -> None:
    """Show the key chain: master keys, KEKs with their age, snapshots, manifests and files.

    Manifest lists and manifests are decrypted, files are not. Exits with 1 if the chain is broken, or if plaintext
    files are in an encrypted table.
    """
    _audit(options.located(table), with_data=False)


@app.command("verify")
@opt.with_options(TableOptions)
def verify_table_command(table: TableArgument, options: TableOptions) -> None:
    """Check each link of the key chain, and each file of every snapshot to its last byte.

    Detects plaintext files, truncated streams, changed or swapped files, and data keys that files share. Exits
    with 1 if something is wrong.
    """
    _audit(options.located(table), with_data=True)


@app.command("keys")
@opt.with_options(TableOptions)
def table_keys_command(
    table: TableArgument,
    options: TableOptions,
    remove_unneeded: bool = False,
) -> None:
    """Show which master keys and KEKs a table depends on, and keys that nothing needs.

    Only the metadata file is read, and no KMS is called.

    Options:
        --remove-unneeded: First remove the keys that no snapshot needs, as one commit; with --catalog only.
    """
    if remove_unneeded:
        options.to_write(table, "--remove-unneeded").remove_unneeded_keys()
    encryption = options.located(table).encryption
    if out.json_wanted():
        out.print_json(_keys_document(encryption))
    else:
        _show_keys(encryption)


@app.command("rotate")
@opt.with_options(TableOptions)
def rotate_table_command(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table, such as db.people.")],
    options: TableOptions,
) -> None:
    """Re-wrap the KEKs of a table under the current version of their master key, as one commit.

    Needs --catalog. Only the metadata file is replaced. The property encryption.key-id never changes. If the
    rotation fails, the table stays as it is.
    """
    loaded = options.to_write(table, "rotate")
    rotated = loaded.rotate()
    master_key_id = loaded.known().encryption.master_key_id
    if out.json_wanted():
        out.print_json({"table": table, "master_key_id": master_key_id, "rotated_keks": list(rotated)})
    else:
        keks = out.number_of(len(rotated), "KEK")
        out.answer(f"{table}: {keks} re-wrapped under the current version of {master_key_id}.")


def _audit(located: LocatedTable, *, with_data: bool) -> None:
    """Audit a table. The key chain is shown unless data files are checked; problems always are."""
    from parquet_keytools.iceberg.table_audit import TableAudit

    report = TableAudit(located, with_data=with_data).run()
    if out.json_wanted():
        out.print_json(_table_document(report))
    else:
        if not with_data:
            out.answer("\n".join(_tree(report).lines()))
        _show_findings(report)
    if report.findings:
        raise typer.Exit(out.ExitStatus.KMS_FAILED if report.kms_failed else out.ExitStatus.NO)


# --- results ---


_MOST_CHILDREN = 50


def _table_document(report: TableReport) -> dict[str, Any]:
    encryption = report.encryption
    return {
        "metadata": encryption.metadata_location,
        **out.picked(encryption, "location", "table_uuid", "is_encrypted", "master_key_id"),
        **out.picked(report, "master_key_ids", "keks"),
        **out.picked(encryption, "unneeded_keys", "snapshots"),
        "files": [
            out.picked(link, "location", "kind", "length", "is_encrypted", "snapshot_ids", "problems")
            | {"lists": [child.location for child in link.children]}
            for link in report.files
        ],
        "orphan_files": report.orphans,
        "plaintext_files": report.plaintext_files if encryption.is_encrypted else [],
        "findings": [{"link": link, "problem": problem} for link, problem in report.findings],
    }


def _keys_document(encryption: TableEncryption) -> dict[str, Any]:
    return {
        "metadata": encryption.metadata_location,
        "master_key_id": encryption.master_key_id,
        "master_key_ids": sorted({kek.encrypted_by_id for kek in encryption.keks}),
        "keks": [
            out.picked(kek, "key_id", "timestamp_ms")
            | {"master_key_id": kek.encrypted_by_id, "snapshot_ids": _snapshots_under(encryption, kek.key_id)}
            for kek in encryption.keks
        ],
        "unneeded_keys": encryption.unneeded_keys,
    }


def _snapshots_under(encryption: TableEncryption, kek_id: str) -> list[int]:
    return [
        snapshot.snapshot_id
        for snapshot in encryption.snapshots
        if (entry := encryption.keys.get(snapshot.key_id or "")) is not None and entry.encrypted_by_id == kek_id
    ]


_END_OF_YEAR_9999_MS = 253_402_300_800_000


def _date(timestamp_ms: int | None) -> str:
    if timestamp_ms is None or not 0 <= timestamp_ms < _END_OF_YEAR_9999_MS:
        return "unknown"
    return f"{datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC):%Y-%m-%d}"


def _show_keys(encryption: TableEncryption) -> None:
    if not encryption.is_encrypted:
        out.answer(f"{encryption.metadata_location}: the table is not encrypted.")
        return
    rows = [
        [k.encrypted_by_id, k.key_id, _date(k.timestamp_ms), str(len(_snapshots_under(encryption, k.key_id)))]
        for k in encryption.keks
    ]
    title = f"KEKs of {encryption.metadata_location}"
    out.print_table(title, ["Master key", "KEK", "Made", "Snapshots"], rows)
    out.answer(f"New KEKs are wrapped by the master key {encryption.master_key_id!r}.")
    _show_unneeded(encryption.unneeded_keys)


def _show_unneeded(keys: Sequence[str]) -> None:
    if keys:
        out.answer(f"No snapshot needs {out.number_of(len(keys), 'key')}: {', '.join(keys)}")


_RED = partial(typer.style, fg="red")


def _tree(report: TableReport) -> out.Branch:
    """Return the key chain as a tree."""
    encryption = report.encryption
    root = out.Branch(encryption.metadata_location, partial(typer.style, bold=True))
    shown: set[str] = set()

    def add(parent: out.Branch, text: str, problems: Sequence[str] = ()) -> out.Branch:
        branch = parent.add(text, _RED if problems else str)
        for problem in problems:
            branch.add(problem, _RED)
        return branch

    def add_link(parent: out.Branch, link: ChainLink) -> None:
        size = "" if link.length is None else f", {out.size_text(link.length)}"
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

    def add_lists(parent: out.Branch, kek_id: str | None) -> None:
        for link in report.lists:
            if _kek_of(report, link) == kek_id:
                add_link(add(parent, f"snapshot {link.snapshot_ids[0]}"), link)

    for master_key_id in report.master_key_ids:
        is_current = " (for new KEKs)" if master_key_id == encryption.master_key_id else ""
        master = add(root, f"master key {master_key_id}{is_current}")
        for kek in report.keks:
            if kek.master_key_id == master_key_id:
                add_lists(add(master, _kek_text(kek), kek.problems), kek.key_id)
    if any(_kek_of(report, link) is None for link in report.lists):
        add_lists(add(root, "without a KEK"), None)
    for link in report.statistics:
        add_link(root, link)
    return root


def _kek_of(report: TableReport, link: ChainLink) -> str | None:
    encryption = report.encryption
    snapshot = encryption.snapshot(link.snapshot_ids[0])
    entry = encryption.keys.get(snapshot.key_id or "") if snapshot is not None else None
    return entry.encrypted_by_id if entry is not None and entry.encrypted_by_id in encryption.keys else None


def _kek_text(kek: KekReport) -> str:
    age = "of unknown age" if kek.age_days is None else f"{out.number_of(kek.age_days, 'day')} old"
    if kek.age_days is not None and kek.age_days < 0:
        age = "made in the future, as its KEY_TIMESTAMP says"
    due = ", due: the next writer makes a new one" if kek.is_due else ""
    return f"KEK {kek.key_id}, {age}{due}, {out.number_of(kek.manifest_lists, 'manifest list')}"


def _show_findings(report: TableReport) -> None:
    """Print the problems, and a summary."""
    encryption = report.encryption
    problems = out.Messages(_RED("problem"), out.answer, noun="link")
    for link, problem in report.findings:
        problems.add(link, f"{link}: {problem}")
    problems.print()
    _show_unneeded(list(encryption.unneeded_keys))
    orphans = out.Messages("orphan", out.answer)
    for orphan in report.orphans or []:
        orphans.add(orphan, f"{orphan}: nothing names it.")
    orphans.print()
    if report.orphans:
        out.answer("Expired snapshots leave such files, and so do commits that failed or are in progress.")
    shared = sum(link.is_shared for link in report.links.values())
    files = out.number_of(len(report.files), "file")
    snapshots = out.number_of(len(encryption.snapshots), "snapshot")
    master_keys = ", ".join(report.master_key_ids) or "none"
    out.answer(f"{snapshots}, {files}, {shared:,} of them shared by snapshots; master keys: {master_keys}.")
    if not encryption.is_encrypted:
        out.answer("The table is not encrypted.")
    elif report.findings:
        out.answer(f"{out.number_of(len(report.findings), 'problem')}.")
    else:
        out.answer("Nothing is wrong.")
