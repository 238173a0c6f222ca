"""What commands print: everything for people to stderr, everything for programs to stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer

_WIDTH_WITHOUT_TERMINAL = 160
"""In columns; what is longer is broken, never cut."""


def say(text: str) -> None:
    """Tell people something."""
    typer.echo(text, err=True)


def print_json(document: Any) -> None:
    """Give programs a document."""
    import json

    typer.echo(json.dumps(document, indent=2))


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str | None]]) -> None:
    """Show people a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = [Column(heading, overflow="fold") for heading in headings]
    table = Table(*columns, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(cell or "") for cell in row))
    console = Console(stderr=True)
    console.print(table, width=None if console.is_terminal else _WIDTH_WITHOUT_TERMINAL)


def size_text(size_bytes: float) -> str:
    """Return a size as people read it."""
    units = ["bytes", "kB", "MB", "GB"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1000
        units.pop(0)
    return f"{size_bytes:,.0f} bytes" if units[0] == "bytes" else f"{size_bytes:,.1f} {units[0]}"
