"""Nonces by DEK, of a file or of a data set: none may come twice, nor too many (spec 4.1.3, 4.1.4).

A nonce takes 22 bytes, and no more than `MEMORY_BYTES` of them are kept. Files with more are read several times:
each pass compares the nonces of one part. A keyed hash divides them into parts, so that no file can be written
whose nonces are all in one.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from parquet_keytools.conformance.file_keys import fingerprint_key
from parquet_keytools.conformance.report import RuleBook
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS, NONCE_LENGTH

MEMORY_BYTES = 8 * 1024 * 1024
"""How much the nonces of a pass take; to compare the nonces of several files takes three times as much again."""

_BUCKET_BYTES = 1024 * 1024
"""How much is compared at once: Python objects take ten times as much."""

_MOST_REPEATED = 1000

_OFFSET_LENGTH, _CHECK_LENGTH, _FILE_LENGTH = 6, 4, 4
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
    """Return what is kept of a module.

    Args:
        nonce: 12 bytes.
        offset: Where the module lies.
        check: Four bytes that tell a copy of the module from another module: the end of its tag, or the CRC of
            both ends of a page that has none.
    """
    return b"".join((nonce, offset.to_bytes(_OFFSET_LENGTH, "little"), check))


class NoncePart(NamedTuple):
    """The nonces that one pass keeps.

    Attributes:
        part: Which part of the nonces.
        parts: How many parts there are.
        only: Fingerprints of the DEKs; None for all.
    """

    part: int
    parts: int
    only: frozenset[bytes] | None = None


class FileNonces:
    """The nonces of one file, or a part of them, by the fingerprint of their DEK; for one thread.

    Args:
        wanted: Which to keep; None for all, or for as many parts as memory demands.

    Attributes:
        part: Which are kept.
    """

    def __init__(self, wanted: NoncePart | None = None) -> None:
        self.part = wanted or NoncePart(0, 1)
        self._is_fixed = wanted is not None
        self._entries: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        self._modules: Counter[bytes] = Counter()
        self._pages: Counter[bytes] = Counter()
        self._repeated: list[tuple[int, int]] = []
        self.kept_bytes = 0

    @property
    def invocations(self) -> dict[bytes, Invocations]:
        """How often each DEK encrypted, by its fingerprint."""
        return {key: Invocations(modules, self._pages[key]) for key, modules in self._modules.items()}

    def add(self, fingerprint: bytes, entries: bytes | bytearray, pages: int = 0) -> None:
        """Add the nonces of one module or of several.

        Args:
            fingerprint: Of the DEK.
            entries: One `nonce_entry` after another.
            pages: How many of them are pages.
        """
        if not entries:
            return
        self._modules[fingerprint] += len(entries) // _ENTRY_LENGTH
        self._pages[fingerprint] += pages
        if self.part.only is not None and fingerprint not in self.part.only:
            return
        if self.part.parts > 1:
            entries = self._of_part(entries)
        self._entries[fingerprint] += entries
        self.kept_bytes += len(entries)
        if self.kept_bytes > MEMORY_BYTES:
            self._make_room()

    def _of_part(self, entries: bytes | bytearray) -> bytes:
        part, parts, _ = self.part
        key = fingerprint_key()
        return b"".join(
            entry
            for entry in _split(entries, _ENTRY_LENGTH)
            if int.from_bytes(hashlib.blake2b(entry[:NONCE_LENGTH], key=key, digest_size=4).digest()) % parts
            == part
        )

    def _make_room(self) -> None:
        """Keep each nonce once, and then only half of them as often as needed."""
        for fingerprint, entries in self._entries.items():
            self._repeated += list(_repeated(entries))[: _MOST_REPEATED - len(self._repeated)]
            self._entries[fingerprint] = _distinct(entries)
        self._count_kept()
        while self.kept_bytes > MEMORY_BYTES // 2 and not self._is_fixed:
            self.part = self.part._replace(parts=2 * self.part.parts)
            for fingerprint, entries in self._entries.items():
                self._entries[fingerprint] = bytearray(self._of_part(entries))
            self._count_kept()

    def _count_kept(self) -> None:
        self.kept_bytes = sum(map(len, self._entries.values()))

    def entries(self, fingerprint: bytes) -> Iterator[bytes]:
        """Yield the entries under one DEK."""
        return _split(self._entries.get(fingerprint, b""), _ENTRY_LENGTH)

    def check(self, book: RuleBook) -> None:
        """Check both rules about nonces, as far as nonces are kept here."""
        for modules, pages in self.invocations.values():
            message = f"one DEK encrypts {modules} modules, of which {pages} are pages."
            book.check("invocations", Invocations(modules, pages).are_allowed, message)
        self.check_repeated(book)

    def check_repeated(self, book: RuleBook) -> None:
        """Check that no nonce that is kept comes twice."""
        for first, offset in self._repeated:
            _note_repeated(first, offset, book)
        for entries in self._entries.values():
            book.holds("nonce-reuse")
            for first, offset in _repeated(entries):
                _note_repeated(first, offset, book)


def _note_repeated(first: int, offset: int, book: RuleBook) -> None:
    # Threads do not add them in order.
    first, offset = min(first, offset), max(first, offset)
    book.broken("nonce-reuse", f"it has the nonce of the module at byte {first}.", offset=offset)


def _split(entries: bytes | bytearray, length: int) -> Iterator[bytes]:
    data = memoryview(entries)
    return (bytes(data[at : at + length]) for at in range(0, len(data), length))


def _buckets(entries: bytes | bytearray, length: int) -> Iterable[bytes | bytearray]:
    """Return the entries in buckets that are small, unless nonces repeat: equal nonces are in one bucket."""
    count = len(entries) // _BUCKET_BYTES + 1
    if count == 1:
        return (entries,)
    buckets = [bytearray() for _ in range(count)]
    for entry in _split(entries, length):
        buckets[hash(entry[:NONCE_LENGTH]) % count] += entry
    return buckets


def _repeated(entries: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the offsets of each module whose nonce was there before: of the first one, and its own."""
    for bucket in _buckets(entries, _ENTRY_LENGTH):
        data = bytes(bucket)
        starts = range(0, len(data), _ENTRY_LENGTH)
        if len({data[at : at + NONCE_LENGTH] for at in starts}) == len(starts):
            continue
        seen: dict[bytes, int] = {}
        for entry in _split(data, _ENTRY_LENGTH):
            offset = int.from_bytes(entry[NONCE_LENGTH:-_CHECK_LENGTH], "little")
            first = seen.setdefault(entry[:NONCE_LENGTH], offset)
            if first != offset:
                yield first, offset


def _distinct(entries: bytearray) -> bytearray:
    kept = bytearray()
    for bucket in _buckets(entries, _ENTRY_LENGTH):
        kept += b"".join({entry[:NONCE_LENGTH]: entry for entry in _split(bucket, _ENTRY_LENGTH)}.values())
    return kept


ReadAgain = Callable[[Collection[str], NoncePart], Iterable[tuple[str, FileNonces | None]]]
"""Returns nonces of files, by their names; a file that cannot be read again has None, or is missing."""

NOT_READ_AGAIN = "changed or could not be read again"
"""Why nonces of a file were not compared."""


class SharedNonces:
    """Compares the nonces of files that share DEKs.

    Which DEKs are shared shows only when all files were seen. Until then nonces are kept as long as they
    fit into memory; if they do not, files that share DEKs are read again.
    """

    def __init__(self, read_again: ReadAgain) -> None:
        self._read_again = read_again
        self._users: defaultdict[bytes, dict[str, Invocations]] = defaultdict(dict)
        self._kept: dict[str, FileNonces] | None = {}
        self._kept_bytes = 0

    def add_file(self, name: str, invocations: Mapping[bytes, Invocations], nonces: FileNonces | None) -> None:
        """Add a file; its nonces are None where they are to be read when they are needed."""
        if not invocations:
            return
        for fingerprint, number in invocations.items():
            self._users[fingerprint][name] = number
        if nonces is None or nonces.part.parts > 1:
            self._kept = None
        if self._kept is not None and nonces is not None:
            self._kept[name] = nonces
            self._kept_bytes += nonces.kept_bytes
            if self._kept_bytes > MEMORY_BYTES:
                self._kept = None

    def check(self, book: RuleBook) -> None:
        """Check both rules about the nonces of several files; where not all can be compared, that is no pass."""
        shared = {key: users for key, users in self._users.items() if len(users) > 1}
        total = 0
        for users in shared.values():
            found = Invocations(*map(sum, zip(*users.values(), strict=True)))
            total += found.modules
            message = f"one DEK encrypts {found.modules} modules of {len(users)} files, of which {found.pages} "
            book.check("invocations-shared", found.are_allowed, f"{message}are pages.")
        if self._users:
            book.holds("invocations-shared", "nonce-shared")
        if not shared:
            return
        names = list(dict.fromkeys(name for users in shared.values() for name in users))
        pairs: Counter[tuple[int, int]] = Counter()
        if self._kept is not None:
            pairs += _pairs(names, self._kept.items(), shared)
        else:
            parts = total * (_ENTRY_LENGTH + _FILE_LENGTH) // MEMORY_BYTES + 1
            for part in range(parts):
                files = self._read_again(names, NoncePart(part, parts, frozenset(shared)))
                pairs += _pairs(names, self._again(names, files, shared, book), shared)
        for (first_file, file), number in sorted(pairs.items()):
            modules = "one module has" if number == 1 else f"{number} modules have"
            message = f"{modules} the same DEK and nonce in {names[first_file]} and {names[file]}."
            book.broken("nonce-shared", message)

    def _again(
        self,
        names: list[str],
        files: Iterable[tuple[str, FileNonces | None]],
        shared: Collection[bytes],
        book: RuleBook,
    ) -> Iterator[tuple[str, FileNonces]]:
        """Yield the nonces of one pass, and note the files that are not what they were when they were added.

        What such a file still has is compared, too: a breach that shows is one.
        """
        left = dict.fromkeys(names)
        for name, nonces in files:
            if nonces is None:
                continue
            before = {key: self._users[key][name] for key in shared if name in self._users[key]}
            if before == {key: number for key, number in nonces.invocations.items() if key in shared}:
                left.pop(name, None)
            yield name, nonces
        for name in left:
            book.not_checked("nonce-shared", f"{name}: it {NOT_READ_AGAIN}")


def _pairs(
    names: list[str], files: Iterable[tuple[str, FileNonces]], shared: Collection[bytes]
) -> Counter[tuple[int, int]]:
    """Return how many modules have the nonce of a module in another file, by the positions of both files."""
    positions = {name: position for position, name in enumerate(names)}
    entries: defaultdict[bytes, bytearray] = defaultdict(bytearray)
    for name, nonces in files:
        if name in positions:
            file = positions[name].to_bytes(_FILE_LENGTH, "big")
            for fingerprint in shared:
                for entry in nonces.entries(fingerprint):
                    entries[fingerprint] += entry + file
    pairs: Counter[tuple[int, int]] = Counter()
    for found in entries.values():
        for bucket in _buckets(found, _ENTRY_LENGTH + _FILE_LENGTH):
            seen: dict[bytes, tuple[int, bytes]] = {}
            for entry in _split(bucket, _ENTRY_LENGTH + _FILE_LENGTH):
                number = int.from_bytes(entry[-_FILE_LENGTH:])
                check = entry[-_FILE_LENGTH - _CHECK_LENGTH : -_FILE_LENGTH]
                first_number, first_check = seen.setdefault(entry[:NONCE_LENGTH], (number, check))
                if first_number != number and first_check != check:
                    pairs[first_number, number] += 1
    return pairs
