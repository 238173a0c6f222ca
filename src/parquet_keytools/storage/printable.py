"""Text from files, paths and addresses made fit for people.

A hostile file must not steer the terminal of whoever looks into it, and no address shows what it is signed with.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_MOST_CHARACTERS = 1000
_SHOWN_OF_THE_END = 200


def printable(text: str) -> str:
    """Return a text with escapes for what is not printable, and without its middle where it is very long.

    Names of columns, writers and files are anyone's. Control characters in them could overwrite what was printed
    before, and characters that turn the direction of text could make one name look like another.
    """
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - _SHOWN_OF_THE_END]} ... {text[-_SHOWN_OF_THE_END:]}"
    return _escaped(text)


def escaped_bytes(data: bytes) -> str:
    """Return bytes as text: printable characters as they are, all else escaped, so that no two look alike."""
    return _escaped(data.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace"))


def escaped_path(path: str) -> str:
    """Return a path with escapes for what is not UTF-8, and for what would steer a terminal."""
    return path if path.isprintable() else _escaped(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def is_url(text: str) -> bool:
    """Tell whether a path is the address of a file on a web server."""
    return text.lower().startswith(("https://", "http://"))


def shown_url(url: str) -> str:
    """Return an address for people, without credentials: neither a user nor what it is signed with."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
