"""`parquet-keytools mount`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parquet_keytools.cli.options import ConfigOption, TableOption, ViewedArgument

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="An empty folder.", exists=True, file_okay=False)
]


def mount_command(
    path: ViewedArgument, folder: FolderArgument, config: ConfigOption, table: TableOption = None
) -> None:
    """Mount encrypted files as a folder of plain Parquet files, until Ctrl-C or `umount`.

    Files are decrypted range by range as they are read, with the columns that you may have. Only you see them, and
    nothing can be written. Needs the extra `fuse`, libfuse, and a machine that allows mounts.
    """
    from parquet_keytools.cli.file_work import open_keytools
    from parquet_keytools.cli.output import answer
    from parquet_keytools.cli.viewed_tree import KMS_SECONDS, viewed_tree
    from parquet_keytools.serve.fuse_mount import mount

    if next(folder.iterdir(), None) is not None:
        raise typer.BadParameter("this folder is not empty.", param_hint="FOLDER")
    with open_keytools(config, KMS_SECONDS) as keytools:
        tree, _ = viewed_tree(keytools, path, table)
        mount(tree, folder, lambda: answer(f"Mounted at {folder} until Ctrl-C or umount."))
