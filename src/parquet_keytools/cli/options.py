"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="File or folder, or its URI, such as s3://bucket/folder.")
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="DST", help="File or folder to be written, or its URI. A folder mirrors SRC.")
]
ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="The YAML configuration.")]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--table", metavar="NAME", help="A table of the configuration. Not needed where it has only one."
    ),
]
AadPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--aad-prefix", metavar="TEXT", help="The AAD prefix that SRC must have, if not what its table says."
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, or files of the same names in the folder DST.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
