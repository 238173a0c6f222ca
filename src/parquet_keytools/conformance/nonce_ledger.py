"""Nonces by DEK, of a file or of a data set: none may come twice, nor too many (spec 4.1.3, 4.1.4)."""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS

_BUCKETS = 256
_SPLIT_BYTES = 1024 * 1024
"""From how many bytes on the nonces of a DEK are split: few DEKs have many, and many DEKs have few."""

_OFFSET_LENGTH = 6
_CHECK_LENGTH = 4
_ENTRY_LENGTH = NONCE_LENGTH + _OFFSET_LENGTH + _CHECK_LENGTH


class Invocations(NamedTuple):
    """How often a DEK encrypted."""

    modules: int
    pages: int

    @property
    def are_allowed(self) -> bool:
        """Whether they are not more than the limit, and pages not more than half of it (spec 4.1.4)."""
        return self.modules <= MAX_INVOCATIONS and 2 * self.pages <= MAX_INVOCATIONS


def nonce_entry(nonce: bytes | memoryview, offset: int, check: bytes | memoryview) -> bytes:
    """Return what a ledger keeps of a module.

    Args:
        nonce: 12 bytes.
        offset: Where the module lies; a module that is met twice there counts as one.
        check: Four bytes by which a copy of the module is told from another module: the end of its tag, or the
            CRC of both ends of a page that has none.
    """
    return b"".join((nonce, offset.to_bytes(_OFFSET_LENGTH, "little"), check))


@dataclass(slots=True)
class DekNonces:
    """The nonces under one DEK, 22 bytes each, so that millions of modules take little memory.

    Attributes:
        buckets: Their entries: all in one, or by their first bytes.
        pages: How many of them are those of pages.
    """

    buckets: list[bytearray] = field(default_factory=lambda: [bytearray()])
    pages: int = 0

    def add(self, entries: bytes | bytearray, pages: int = 0) -> None:
        """Add the nonces of one module or of several.

        Args:
            entries: One `nonce_entry` after another.
            pages: How many of them are those of pages.
        """
        self.pages += pages
        buckets = self.buckets
        if len(buckets) == 1:
            bucket = buckets[0]
            bucket += entries
            if len(bucket) <= _SPLIT_BYTES:
                return
            buckets = self.buckets = [bytearray() for _ in range(_BUCKETS)]
            entries = bucket
        for entry in _entries(entries):
            buckets[entry[0]] += entry

    @property
    def invocations(self) -> Invocations:
        """How often the DEK encrypted."""
        return Invocations(sum(map(len, self.buckets)) // _ENTRY_LENGTH, self.pages)


class NonceLedger:
    """Nonces and where they were used, by DEK; for one thread."""

    def __init__(self) -> None:
        self._nonces: dict[bytes, DekNonces] = {}

    def of(self, fingerprint: bytes) -> DekNonces:
        """Return the nonces under one DEK, to be added to."""
        found = self._nonces.get(fingerprint)
        if found is None:
            found = self._nonces[fingerprint] = DekNonces()
        return found

    def check(self, book: RuleBook) -> None:
        """Check both rules about nonces."""
        for fingerprint in self.fingerprints:
            nonces = self._nonces[fingerprint]
            invocations = nonces.invocations
            message = f"one DEK encrypts {invocations.modules} modules, of which {invocations.pages} are pages."
            book.check("invocations", invocations.are_allowed, message)
            book.holds("nonce-reuse")
            for bucket in nonces.buckets:
                _check_bucket(bucket, book)

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """Those of all DEKs that encrypted something."""
        return tuple(fingerprint for fingerprint, nonces in self._nonces.items() if any(nonces.buckets))

    def invocations(self, fingerprint: bytes) -> Invocations:
        """Return how often a DEK encrypted."""
        return self._nonces[fingerprint].invocations

    def nonces(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each nonce of a DEK with the check of its module."""
        for bucket in self._nonces[fingerprint].buckets:
            for entry in _entries(bucket):
                yield entry[:NONCE_LENGTH], entry[-_CHECK_LENGTH:]


def _entries(bucket: bytes | bytearray) -> Iterator[bytes]:
    data = bytes(bucket)
    return (data[at : at + _ENTRY_LENGTH] for at in range(0, len(data), _ENTRY_LENGTH))


def _check_bucket(bucket: bytearray, book: RuleBook) -> None:
    data = bytes(bucket)
    starts = range(0, len(data), _ENTRY_LENGTH)
    if len({data[at : at + NONCE_LENGTH] for at in starts}) == len(starts):
        return
    seen: dict[bytes, int] = {}
    for entry in _entries(bucket):
        offset = int.from_bytes(entry[NONCE_LENGTH : NONCE_LENGTH + _OFFSET_LENGTH], "little")
        first = seen.setdefault(entry[:NONCE_LENGTH], offset)
        if first != offset:
            # Threads do not add them in order.
            first, offset = min(first, offset), max(first, offset)
            book.broken("nonce-reuse", f"it has the nonce of the module at byte {first}.", offset=offset)


MEMORY_BYTES = 64 * 1024 * 1024
"""How much is kept in memory; what is more goes to a temporary file, which has no name."""

_SHARED_BUCKETS = 1024
"""Nonces are compared bucket by bucket: only one of them is looked at, and unpacked, at a time."""

_RECORD = struct.Struct("<II12s4s")
"""Number of the DEK, number of the file, nonce, check of the module."""


class SharedNonces:
    """Takes the nonces of one file after another, 24 bytes each.

    Which DEKs are shared shows only when all files were seen, so all nonces are kept until then. Nonces are in the
    files for everyone to see: the temporary file holds no secret.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._files: list[str] = []
        self._deks: dict[bytes, int] = {}
        self._users: defaultdict[int, list[tuple[int, Invocations]]] = defaultdict(list)
        self._buckets: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._kept_bytes = 0
        self._spilled: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._spill: IO[bytes] | None = None
        self._flaw: str | None = None

    def add_file(self, name: str, ledger: NonceLedger) -> None:
        """Take the nonces of one file."""
        file = len(self._files)
        self._files.append(name)
        for fingerprint in ledger.fingerprints:
            dek = self._deks.setdefault(fingerprint, len(self._deks))
            self._users[dek].append((file, ledger.invocations(fingerprint)))
            for nonce, check in ledger.nonces(fingerprint):
                # Some writers count their nonces up: no single byte of them would spread evenly.
                self._buckets[zlib.crc32(nonce) % _SHARED_BUCKETS] += _RECORD.pack(dek, file, nonce, check)
                self._kept_bytes += _RECORD.size
                if self._kept_bytes > self._memory_bytes:
                    self._spill_buckets()

    def check(self, book: RuleBook) -> None:
        """Check both rules about the nonces of several files."""
        shared = {dek: users for dek, users in self._users.items() if len(users) > 1}
        for users in shared.values():
            modules = sum(invocations.modules for _, invocations in users)
            pages = sum(invocations.pages for _, invocations in users)
            message = f"one DEK encrypts {modules} modules of {len(users)} files, of which {pages} are pages."
            book.check("invocations-shared", Invocations(modules, pages).are_allowed, message)
        if self._users:
            book.holds("invocations-shared", "nonce-shared")
        if self._flaw is not None and shared:
            book.not_checked("nonce-shared", self._flaw)
        elif shared:
            self._compare(shared.keys(), book)
        self.close()

    def close(self) -> None:
        """Give back the temporary file."""
        if self._spill is not None:
            self._spill.close()

    def _compare(self, shared: Collection[int], book: RuleBook) -> None:
        pairs: Counter[tuple[int, int]] = Counter()
        for bucket in self._buckets.keys() | self._spilled.keys():
            seen: dict[tuple[int, bytes], tuple[int, bytes]] = {}
            for dek, file, nonce, check in _RECORD.iter_unpack(self._bucket(bucket)):
                if dek not in shared:
                    continue
                first_file, first_check = seen.setdefault((dek, nonce), (file, check))
                if first_file != file and first_check != check:
                    pairs[first_file, file] += 1
        for (first_file, file), number in sorted(pairs.items()):
            modules = "one module has" if number == 1 else f"{number} modules have"
            book.broken(
                "nonce-shared",
                f"{modules} the same DEK and nonce in {self._files[first_file]} and {self._files[file]}.",
            )

    def _bucket(self, bucket: int) -> bytes:
        data = bytearray()
        for offset, length in self._spilled[bucket]:
            assert self._spill is not None
            self._spill.seek(offset)
            data += self._spill.read(length)
        return bytes(data + self._buckets[bucket])

    def _spill_buckets(self) -> None:
        try:
            if self._spill is None:
                self._spill = tempfile.TemporaryFile()  # noqa: SIM115
            for bucket, data in self._buckets.items():
                self._spilled[bucket].append((self._spill.seek(0, 2), len(data)))
                self._spill.write(data)
        except OSError as error:
            self._flaw = f"there is no room for a temporary file of nonces: {error.strerror}"
        self._buckets.clear()
        self._kept_bytes = 0
