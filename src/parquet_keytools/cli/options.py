"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def refuse_other_encoding(text: str, name: str) -> None:
    """Refuse an argument whose bytes were not UTF-8: neither an AAD prefix nor pyarrow takes others.

    Raises:
        typer.BadParameter: They were not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("not valid UTF-8.", param_hint=name) from None


def _checked_aad_prefix(text: str | None) -> str | None:
    if text is not None:
        refuse_other_encoding(text, "--aad-prefix")
    return text


SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="File or folder, or its URI, such as s3://bucket/folder.")
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="DST", help="File or folder to be written, or its URI. A folder mirrors SRC.")
]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="File or folder, or its URI.")]
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
        "--aad-prefix",
        metavar="TEXT",
        help="The AAD prefix that SRC must have, if not what its table says.",
        callback=_checked_aad_prefix,
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, or files of the same names in the folder DST.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
