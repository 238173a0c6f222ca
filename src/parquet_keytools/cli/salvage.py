"""What `parquet-keytools decrypt --salvage` does beside decrypting: it lists what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from parquet_keytools.cli.exit_status import ExitStatus
from parquet_keytools.cli.file_work import convert_files
from parquet_keytools.cli.output import answer
from parquet_keytools.cli.verify_report import loss_text
from parquet_keytools.conformance.salvage import SalvageResult
from parquet_keytools.keytools import Keytools
from parquet_keytools.storage.printable import printable


def salvage_files(
    keytools: Keytools,
    sources: Sequence[str],
    target: str,
    *,
    table: str | None,
    aad_prefix: str | None,
    mode: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Decrypt the whole row groups of files, and list what is missing.

    Raises:
        typer.Exit: Something is missing.
    """
    results: list[SalvageResult] = []

    def convert(source: str, target: str, **options: Any) -> SalvageResult:
        result = keytools.salvage_file(
            source, target, table_name=table, aad_prefix=aad_prefix, mode=mode, **options
        )
        results.append(result)
        return result

    try:
        convert_files(sources, target, "salvaged", convert, overwrite=overwrite, as_json=as_json)
    finally:
        for result in results:
            _say_missing(result)
    if not all(result.is_whole for result in results):
        raise typer.Exit(ExitStatus.NO)


def _say_missing(result: SalvageResult) -> None:
    if result.missing_row_groups:
        ordinals = ", ".join(map(str, result.missing_row_groups))
        answer(f"Missing in {printable(result.target)}: row groups {ordinals} of {result.row_groups}.")
    for loss in result.losses:
        answer(f"  lost: {loss_text(loss)}")
    for row_group_ordinal, column_ordinal in result.dropped_indexes:
        answer(f"  without page index and Bloom filter: row group {row_group_ordinal}, column {column_ordinal}")
