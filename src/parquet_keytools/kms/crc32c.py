"""CRC32C (Castagnoli), the checksum that Cloud KMS uses."""

from __future__ import annotations

_REVERSED_POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_REVERSED_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))


def crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes. Wrapped keys are short, so plain Python is fast enough."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
