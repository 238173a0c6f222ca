"""Files and folders that are named on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import typer

from parquet_keytools.cli.options import refuse_other_encoding
from parquet_keytools.storage.locations import FileLocation


def location_of(text: str, name: str) -> FileLocation:
    """Return where an argument points, whatever characters it has.

    Args:
        text: A path or URI.
        name: Of the argument.

    Raises:
        typer.BadParameter: It is a URI of a kind that nothing here opens, or no valid one; or it is not UTF-8.
    """
    refuse_other_encoding(text, name)
    with _opened_uri(name):
        return FileLocation.resolve(text)


def locations_of(texts: Sequence[str], name: str) -> FileLocation:
    """Return what arguments name: a file or folder, or several of them, or globs.

    Args:
        texts: Paths or URIs.
        name: Of the arguments.

    Raises:
        typer.BadParameter: As with `location_of`; or they lie on several file systems.
    """
    for text in texts:
        refuse_other_encoding(text, name)
    with _opened_uri(name):
        return FileLocation.resolve_all(texts[0] if len(texts) == 1 else texts)


@contextlib.contextmanager
def _opened_uri(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        # Ours; it does not quote the URI, which may hold credentials. Those of Arrow do.
        text = str(error).removesuffix(".") if type(error) is ValueError else "not a valid URI"
        raise typer.BadParameter(f"{text}.", param_hint=name) from None
    except NotImplementedError:
        raise typer.BadParameter(
            "pyarrow was built without the file system of this URI.", param_hint=name
        ) from None
