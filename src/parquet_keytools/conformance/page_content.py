"""Whether a page begins as its codec lets pages begin.

A page of AES_GCM_CTR_V1 has no tag: any bytes decrypt to something (spec 4.2.2). What another key, or a counter
that begins elsewhere, makes of it shows here; a few altered values do not. In other pages it shows where the
codec, or with Snappy the length in the header, is not that of the content.
"""

from __future__ import annotations

_SNAPPY = 1
_MAGICS = {2: b"\x1f\x8b\x08", 6: b"\x28\xb5\x2f\xfd"}
"""Codec of parquet.thrift (gzip, Zstandard) -> what its output begins with. Brotli and LZ4 have no such thing."""

START_LENGTH = 5
"""How many bytes are looked at, at most."""


def can_be_told(codec: int) -> bool:
    """Return whether pages of a codec begin in a way of their own."""
    return codec == _SNAPPY or codec in _MAGICS


def begins_as_compressed(codec: int, start: bytes, length: int) -> bool:
    """Return whether a page may begin with these bytes.

    Args:
        codec: Of parquet.thrift.
        start: The first `START_LENGTH` bytes, or all there are.
        length: Of what the page decompresses to, in bytes.
    """
    if codec != _SNAPPY:
        return start.startswith(_MAGICS[codec])
    # Snappy begins with the length, seven bits in each byte.
    value = 0
    for position, byte in enumerate(start):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value == length
    return False
