"""`parquet-keytools encrypt`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from functools import partial

from parquet_keytools.cli.options import (
    ConfigOption,
    JsonOption,
    OverwriteOption,
    SkipExistingOption,
    SourcesArgument,
    TableOption,
    TargetArgument,
)


def encrypt_command(
    sources: SourcesArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    as_json: JsonOption = False,
) -> None:
    """Encrypt a Parquet file, or all those of a folder.

    Works page by page, without decoding values.
    """
    from parquet_keytools.cli.file_work import convert_files, open_keytools
    from parquet_keytools.files.table_check import TableCheck

    with open_keytools(config) as keytools:
        table_name, _ = keytools.configuration.select_table(table)
        convert_files(
            sources,
            target,
            "encrypted",
            partial(keytools.encrypt_file, table_name=table_name, skip_existing=skip_existing),
            overwrite=overwrite,
            skip_existing=skip_existing,
            as_json=as_json,
            check=TableCheck(keytools.configuration, table_name).refuse_folder_names,
        )
