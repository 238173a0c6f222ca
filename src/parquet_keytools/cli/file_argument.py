"""Files and folders that are named on the command line."""

from __future__ import annotations

import typer

from parquet_keytools.cli.options import refuse_other_encoding
from parquet_keytools.storage.locations import FileLocation


def location_of(text: str, name: str) -> FileLocation:
    """Return where an argument points.

    Args:
        text: A path or URI.
        name: Of the argument.

    Raises:
        typer.BadParameter: It is a URI of a kind that pyarrow does not know, or no valid one; or it is not UTF-8.
    """
    refuse_other_encoding(text, name)
    try:
        return FileLocation.resolve(text)
    except (ValueError, NotImplementedError):
        # Arrow's text quotes the URI, which may hold credentials.
        raise typer.BadParameter("not a URI that pyarrow can open.", param_hint=name) from None
