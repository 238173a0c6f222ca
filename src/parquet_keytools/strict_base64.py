"""Strict base64, in which each byte string has one encoding."""

from __future__ import annotations

import binascii


def encode(data: bytes) -> str:
    """Return the base64 text of bytes (RFC 4648, section 4)."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def decode(text: str) -> bytes:
    """Return the bytes of a text that `encode` made.

    Other encodings of the same bytes are refused, so that an altered file does not pass as unaltered.

    Raises:
        ValueError: The text is not base64, or not the encoding of `encode`. The error does not quote the text.
    """
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        data = None
    # Raised outside a handler, since the context of an exception would hold the text.
    if data is None or encode(data) != text:
        raise ValueError("not valid base64")
    return data


def decode_or_empty(text: str) -> bytes:
    """Return the bytes of a text that `encode` made, or no bytes for any other text."""
    try:
        return decode(text)
    except ValueError:
        return b""
