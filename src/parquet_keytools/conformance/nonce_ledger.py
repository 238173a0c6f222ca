"""All nonces of a file by DEK: none may come twice (spec 4.1.3), and there may not be too many (4.1.4)."""

from __future__ import annotations

from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.aes import NONCE_LENGTH

_BUCKETS = 256
_OFFSET_LENGTH = 6
_ENTRY_LENGTH = NONCE_LENGTH + _OFFSET_LENGTH


class NonceLedger:
    """Nonces and where they were used, 18 bytes each, so that millions of modules take little memory."""

    def __init__(self) -> None:
        self._buckets: dict[bytes, list[bytearray]] = {}
        self._pages: dict[bytes, int] = {}

    def add(self, fingerprint: bytes, nonce: bytes | memoryview, offset: int, *, is_page: bool = False) -> None:
        """Add the nonce of a module under the DEK of this fingerprint."""
        buckets = self._buckets.get(fingerprint)
        if buckets is None:
            buckets = self._buckets[fingerprint] = [bytearray() for _ in range(_BUCKETS)]
        buckets[nonce[0]] += bytes(nonce) + offset.to_bytes(_OFFSET_LENGTH, "little")
        if is_page:
            self._pages[fingerprint] = self._pages.get(fingerprint, 0) + 1

    def check(self, book: RuleBook, invocation_limit: int) -> None:
        """Check both rules about nonces."""
        for fingerprint, buckets in self._buckets.items():
            invocations = sum(map(len, buckets)) // _ENTRY_LENGTH
            pages = self._pages.get(fingerprint, 0)
            message = f"one DEK encrypts {invocations} modules, of which {pages} are pages."
            book.check("invocations", invocations <= invocation_limit and 2 * pages <= invocation_limit, message)
            book.holds("nonce-reuse")
            for bucket in buckets:
                _check_bucket(bytes(bucket), book)


def _check_bucket(bucket: bytes, book: RuleBook) -> None:
    seen: dict[bytes, int] = {}
    for at in range(0, len(bucket), _ENTRY_LENGTH):
        nonce = bucket[at : at + NONCE_LENGTH]
        offset = int.from_bytes(bucket[at + NONCE_LENGTH : at + _ENTRY_LENGTH], "little")
        first = seen.setdefault(nonce, offset)
        if first != offset:
            book.broken("nonce-reuse", f"it has the nonce of the module at byte {first}.", offset=offset)
