"""Addresses of files on web servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_url(text: str) -> bool:
    """Tell whether a path is the address of a file on a web server."""
    return text.lower().startswith(("https://", "http://"))


def shown_url(url: str) -> str:
    """Return an address for people, without credentials: neither a user nor what it is signed with."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
