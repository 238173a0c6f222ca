"""Nonces of all files of a data set: two files under one DEK must not share one (spec 4.1.3, 4.1.4)."""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import IO

from parquet_keytools.conformance.nonce_ledger import Invocations, NonceLedger
from parquet_keytools.conformance.rule_book import RuleBook

MEMORY_BYTES = 64 * 1024 * 1024
"""How much is kept in memory; what is more goes to a temporary file, which has no name."""

_BUCKETS = 1024
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
                self._buckets[zlib.crc32(nonce) % _BUCKETS] += _RECORD.pack(dek, file, nonce, check)
                self._kept_bytes += _RECORD.size
                if self._kept_bytes > self._memory_bytes:
                    self._spill_buckets()

    def check(self, book: RuleBook, invocation_limit: int) -> None:
        """Check both rules about the nonces of several files."""
        shared = {dek: users for dek, users in self._users.items() if len(users) > 1}
        for users in shared.values():
            modules = sum(invocations.modules for _, invocations in users)
            pages = sum(invocations.pages for _, invocations in users)
            message = f"one DEK encrypts {modules} modules of {len(users)} files, of which {pages} are pages."
            book.check("invocations-shared", Invocations(modules, pages).are_allowed(invocation_limit), message)
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
