"""All nonces of a file by DEK: none may come twice (spec 4.1.3), and there may not be too many (4.1.4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.aes import NONCE_LENGTH

_BUCKETS = 256
_SPLIT_BYTES = 1024 * 1024
"""From how many bytes on the nonces of a DEK are split: few DEKs have many, and many DEKs have few."""

_OFFSET_LENGTH = 6
_CHECK_LENGTH = 4
_ENTRY_LENGTH = NONCE_LENGTH + _OFFSET_LENGTH + _CHECK_LENGTH


class Invocations(NamedTuple):
    """How often a DEK encrypted.

    Attributes:
        modules: Modules of all types.
        pages: Pages among them.
    """

    modules: int
    pages: int

    def are_allowed(self, limit: int) -> bool:
        """Whether they are not more than `limit`, and pages not more than half of it (spec 4.1.4)."""
        return self.modules <= limit and 2 * self.pages <= limit


@dataclass(slots=True)
class _Nonces:
    buckets: list[bytearray] = field(default_factory=lambda: [bytearray()])
    pages: int = 0

    def add(self, entry: bytes) -> None:
        bucket = self.buckets[entry[0] % len(self.buckets)]
        bucket += entry
        if len(bucket) > _SPLIT_BYTES and len(self.buckets) == 1:
            self.buckets = [bytearray() for _ in range(_BUCKETS)]
            for found in _entries(bucket):
                self.buckets[found[0]] += found


class NonceLedger:
    """Nonces and where they were used, 22 bytes each, so that millions of modules take little memory.

    Any number of threads may add to it.
    """

    def __init__(self) -> None:
        self._nonces: dict[bytes, _Nonces] = {}
        self._lock = threading.Lock()

    def add(
        self, fingerprint: bytes, nonce: bytes | memoryview, offset: int, check: bytes, *, is_page: bool = False
    ) -> None:
        """Add the nonce of a module.

        Args:
            fingerprint: Of its DEK.
            nonce: 12 bytes.
            offset: Where the module lies; a module that is met twice there counts as one.
            check: Four bytes by which a copy of the module is told from another module: the end of its tag, or
                the CRC of both ends of a page that has none.
            is_page: Whether it is a page.
        """
        entry = bytes(nonce) + offset.to_bytes(_OFFSET_LENGTH, "little") + check
        with self._lock:
            nonces = self._nonces.get(fingerprint)
            if nonces is None:
                nonces = self._nonces[fingerprint] = _Nonces()
            nonces.add(entry)
            nonces.pages += is_page

    def check(self, book: RuleBook, invocation_limit: int) -> None:
        """Check both rules about nonces."""
        for fingerprint, nonces in self._nonces.items():
            invocations = self.invocations(fingerprint)
            message = f"one DEK encrypts {invocations.modules} modules, of which {invocations.pages} are pages."
            book.check("invocations", invocations.are_allowed(invocation_limit), message)
            book.holds("nonce-reuse")
            for bucket in nonces.buckets:
                _check_bucket(bucket, book)

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """Those of all DEKs."""
        return tuple(self._nonces)

    def invocations(self, fingerprint: bytes) -> Invocations:
        """Return how often a DEK encrypted."""
        nonces = self._nonces[fingerprint]
        return Invocations(sum(map(len, nonces.buckets)) // _ENTRY_LENGTH, nonces.pages)

    def nonces(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each nonce of a DEK with the check of its module."""
        for bucket in self._nonces[fingerprint].buckets:
            for entry in _entries(bucket):
                yield entry[:NONCE_LENGTH], entry[-_CHECK_LENGTH:]


def _entries(bucket: bytearray) -> Iterator[bytes]:
    data = bytes(bucket)
    return (data[at : at + _ENTRY_LENGTH] for at in range(0, len(data), _ENTRY_LENGTH))


def _check_bucket(bucket: bytearray, book: RuleBook) -> None:
    seen: dict[bytes, int] = {}
    for entry in _entries(bucket):
        offset = int.from_bytes(entry[NONCE_LENGTH : NONCE_LENGTH + _OFFSET_LENGTH], "little")
        first = seen.setdefault(entry[:NONCE_LENGTH], offset)
        if first != offset:
            # Threads do not add them in order.
            first, offset = min(first, offset), max(first, offset)
            book.broken("nonce-reuse", f"it has the nonce of the module at byte {first}.", offset=offset)
