"""Base64 of which there is only one spelling."""

from __future__ import annotations

import binascii
import contextlib


def encode(data: bytes) -> str:
    """Return the base64 text (RFC 4648, section 4) of some bytes."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def decode(text: str) -> bytes:
    """Return the bytes that `encode` would have made this very text of.

    Two texts for the same bytes would let an altered file pass as unaltered.

    Raises:
        ValueError: The text is not base64, or is another spelling. The error does not quote it.
    """
    data = None
    # Not raised from within a handler: an exception in its context would carry the text along.
    with contextlib.suppress(ValueError):
        data = binascii.a2b_base64(text, strict_mode=True)
    if data is None or encode(data) != text:
        raise ValueError("not valid base64")
    return data
