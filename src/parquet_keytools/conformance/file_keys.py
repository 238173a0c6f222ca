"""The keys of a file that is verified, the nonces of its modules, and what is expected of it.

Which keys are available, what is wrong with others, and which are the same; and what a table wants of the file.

No nonce may come twice under one DEK, nor too many (spec 4.1.3, 4.1.4). A nonce takes 22 bytes, and no more than
`MEMORY_BYTES` of them are kept. Files with more are read several times: each pass compares the nonces of one part.
A keyed hash divides them into parts, so that no file can be written whose nonces are all in one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from parquet_keytools.conformance.footer_rules import Column, OpenFooter
from parquet_keytools.conformance.report import RuleBook, Scope
from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS, NONCE_LENGTH
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    TableMismatch,
    WrappedKeyInvalidError,
)
from parquet_keytools.format.structs import ColumnMetaData
from parquet_keytools.keys.key_material import (
    DataKeyId,
    KeyMaterial,
    KeyReference,
    parse_key_metadata,
)
from parquet_keytools.secret_bytes import SecretBytes

if TYPE_CHECKING:
    # These take long to import, for a look at a file without a configuration.
    from parquet_keytools.config.key_policy import KeyReference as ConfiguredKey
    from parquet_keytools.files.table_check import SeenColumn, TableCheck
    from parquet_keytools.keys.key_wrapping import FileKeyRetriever

_AES_KEY_LENGTHS = (128, 192, 256)

_KEY_MATERIAL = b'"keyMaterialType"'
"""Occurs in all key metadata that is key material, or a reference to it."""


class _Fingerprints:
    key = secrets.token_bytes(32)
    """Fingerprints of DEKs mean nothing outside of this process, or of those that share a job."""


def fingerprint_key() -> bytes:
    """Return the key of this process's fingerprints."""
    return _Fingerprints.key


def use_fingerprint_key(key: bytes) -> None:
    """Make the fingerprints of this process comparable with the fingerprints of others with the same key."""
    _Fingerprints.key = key


KeyUser = tuple[str, ...] | None
"""Whom a key is for: the path of a column, or None for the footer."""


def title_of(user: KeyUser) -> str:
    """Return what people call it: `footer`, or the dotted path of a column."""
    title = "footer" if user is None else ".".join(user)
    return "column footer" if user == ("footer",) else title


@dataclass(frozen=True)
class OneKey:
    """The key of a file whose table keeps it outside of the file, as Iceberg does; a `MaterialFinder`.

    It encrypts the footer and all columns. The AAD prefix may be empty.
    """

    dek: SecretBytes
    aad_prefix: bytes
    kms_instances: frozenset[str] = frozenset()

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the key; `KeyMaterialError` if the file has key metadata of its own."""
        if key_metadata is not None:
            raise KeyMaterialError("the file has key metadata of its own, and its table keeps the key elsewhere.")
        return self.dek

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return an error for each column that has a key of its own."""
        return [KeyMaterialError("the table has one key for all columns of a file.") for _ in columns]

    def material(self, key_metadata: bytes | None) -> None:
        """Return None: no KMS is needed."""

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> None:
        """Return None: the key has no name."""

    def kek_length_bits(self, material: KeyMaterial) -> None:
        """Return None: there is no key material."""


MaterialFinder: TypeAlias = "FileKeyRetriever | OneKey"
"""Finds the keys of a file, and the key material that they are in."""


@dataclass(frozen=True)
class TableFiles:
    """The files of authentic tables that keep keys outside of their data files, as Iceberg does, by their paths.

    Metadata files are plaintext by design. Of others there is a reason why no authentic table has them, or why
    they could not be checked.
    """

    metadata_files: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    not_checked: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, OneKey] = field(default_factory=dict, repr=False)
    kms_is_unavailable: bool = False


@dataclass
class FileKeys:
    """Finds keys and says what is wrong with them.

    Attributes:
        finder: Where keys come from; None where no keys are given.
        denied: Why keys are unavailable.
        key_names: Identifier of the master key, or id of the data key.
        refers_to_material_file: Whether key metadata refers to the key material file, as far as it was read.
    """

    finder: MaterialFinder | None
    book: RuleBook
    fingerprints: set[bytes] = field(default_factory=set)
    denied: dict[KeyUser, str] = field(default_factory=dict)
    key_names: dict[KeyUser, str] = field(default_factory=dict)
    dek_lengths_bits: dict[KeyUser, int] = field(default_factory=dict)
    refers_to_material_file: bool = False
    _of_wrong_kind: set[KeyUser] = field(default_factory=set)

    def deks(self, wanted: Sequence[tuple[KeyUser, bytes | None]]) -> list[SecretBytes | None]:
        """Return DEKs, asked for together; None where one is unavailable, and the reason is in `denied`."""
        found: list[SecretBytes | None] = [None] * len(wanted)
        materials: dict[int, KeyMaterial | None] = {}
        for position, (user, key_metadata) in enumerate(wanted):
            try:
                materials[position] = self._material(user, key_metadata)
            except (KeytoolsError, OSError) as error:
                self.denied[user] = str(error)
        outcomes = self._ask([wanted[position] for position in materials]) if materials else []
        for (position, material), outcome in zip(materials.items(), outcomes, strict=True):
            user = wanted[position][0]
            if isinstance(outcome, KeytoolsError):
                self._refused(user, outcome, material)
            elif outcome.length_bits not in _AES_KEY_LENGTHS:
                self.denied[user] = f"its key has {outcome.length_bits} bits"
                self.book.broken("key-wrap", f"{title_of(user)}: {self.denied[user]}.")
            else:
                found[position] = outcome
                self.fingerprints.add(fingerprint(outcome))
                self.dek_lengths_bits[user] = outcome.length_bits
                if material is not None:
                    self.book.holds("key-wrap")
                    self._check_kek(user, material, outcome)
        return found

    def _ask(self, wanted: Sequence[tuple[KeyUser, bytes | None]]) -> Sequence[SecretBytes | KeytoolsError]:
        assert self.finder is not None
        if columns := [(user, key_metadata) for user, key_metadata in wanted if user is not None]:
            return self.finder.column_deks(columns)
        try:
            return [self.finder.footer_dek(wanted[0][1])]
        except KeytoolsError as error:
            return [error]

    def _check_material(self, user: KeyUser, material: KeyMaterial) -> None:
        self.key_names[user] = material.master_key_id
        if material.is_footer_key is (user is None):
            self.book.holds("key-material-kind")
        else:
            kind = "a footer" if material.is_footer_key else "a column"
            self._of_wrong_kind.add(user)
            self.book.broken("key-material-kind", f"{title_of(user)}: the key material is for {kind}.")
        known = {"DEFAULT", ""} if self.finder is None else {"DEFAULT", "", *self.finder.kms_instances}
        named = {material.kms_instance_id, material.kms_instance_url} - known
        if named:
            self.book.broken("kms-named", f"{title_of(user)}: {', '.join(sorted(map(repr, named)))[:300]}.")
        elif user is None:
            self.book.holds("kms-named")

    def _material(self, user: KeyUser, key_metadata: bytes | None) -> KeyMaterial | None:
        """Check key metadata, and return the key material that it is, or refers to; raises if there is no key."""
        book, finder, title = self.book, self.finder, title_of(user)
        try:
            parsed = parse_key_metadata(key_metadata)
        except KeyMaterialError as error:
            # Bytes of any other kind, also JSON, are legal (spec 4.3), and of no use here.
            if key_metadata is not None and _KEY_MATERIAL in key_metadata:
                book.broken("key-material", f"{title}: {error}")
            raise KeyMaterialError(f"its key metadata: {error}") from None
        is_reference = isinstance(parsed, KeyReference)
        self.refers_to_material_file = self.refers_to_material_file or is_reference
        if is_reference or isinstance(parsed, KeyMaterial):
            book.holds("key-material")
        elif isinstance(parsed, DataKeyId):
            self.key_names[user] = parsed.name
        elif finder is not None and (known := finder.name_without_metadata(user)) is not None:
            self.key_names[user] = known
        if isinstance(parsed, KeyMaterial):
            self._check_material(user, parsed)
        try:
            if finder is None:
                raise KeyNotAvailableError("no keys are given")
            material = finder.material(key_metadata)
        except KeyNotAvailableError as error:
            if is_reference and finder is None:
                book.not_checked("key-material-file", f"{title}: {error}")
            if is_reference or isinstance(parsed, KeyMaterial):
                self._not_unwrapped(user, parsed if isinstance(parsed, KeyMaterial) else None, str(error))
            raise
        except (KeytoolsError, OSError) as error:
            book.broken("key-material-file", f"{title}: {error}")
            raise
        if is_reference and material is not None:
            book.holds("key-material-file")
            self._check_material(user, material)
        return material

    def _refused(self, user: KeyUser, error: KeytoolsError, material: KeyMaterial | None) -> None:
        # Our own retriever refuses key material of the wrong kind too.
        if isinstance(error, KeyMaterialError | WrappedKeyInvalidError) and user not in self._of_wrong_kind:
            self.book.broken("key-wrap", f"{title_of(user)}: {error}")
        elif material is not None:
            self._not_unwrapped(user, material, str(error))
        self.denied[user] = str(error)

    def _not_unwrapped(self, user: KeyUser, material: KeyMaterial | None, reason: str) -> None:
        self.book.not_checked("key-wrap", f"{title_of(user)}: {reason}")
        if material is None or material.double_wrapping:
            self.book.not_checked("kek-length", f"{title_of(user)}: {reason}")

    def _check_kek(self, user: KeyUser, material: KeyMaterial, dek: SecretBytes) -> None:
        assert self.finder is not None
        length_bits = self.finder.kek_length_bits(material)
        if length_bits is not None:
            message = f"a KEK of {length_bits} bits wraps a DEK of {dek.length_bits} bits."
            is_long = length_bits >= dek.length_bits
            self.book.check("kek-length", is_long, f"{title_of(user)}: {message}")


def fingerprint(dek: SecretBytes) -> bytes:
    """Return what tells DEKs apart within this process and says nothing of them."""
    return hashlib.blake2b(dek.reveal(), key=_Fingerprints.key, digest_size=16).digest()


def check_deks(footer_fingerprint: bytes | None, columns: Sequence[tuple[Column, bytes]], keys: FileKeys) -> None:
    """Check that keys that have two names are two."""
    book = keys.book
    names: defaultdict[bytes, dict[str, str]] = defaultdict(dict)
    for column, fingerprint in columns:
        book.holds("dek-distinct")
        if fingerprint == footer_fingerprint:
            message = f"column {column.name!r} says that it has a key of its own, and that is the footer's DEK."
            book.broken("dek-distinct", message)
        name = keys.key_names.get(column.path, repr(column.key_metadata))
        names[fingerprint].setdefault(name, column.name)
    for users in names.values():
        if len(users) > 1:
            shown = ", ".join(f"{key[:200]!r} (column {column!r})" for key, column in list(users.items())[:5])
            book.broken("dek-distinct", f"one DEK has several names: {shown}.")


# --- What is expected of a file ---


@dataclass(frozen=True)
class Expectation:
    """What is expected of one file.

    Attributes:
        path: Where it lies, whose folders must not give values to its protected columns.
        aad_prefix: The AAD prefix that it must have; None takes what it stores.
        allow_plaintext: Whether it may be plaintext, and is compared with its table nevertheless, as readers do.
        accept_plaintext: Whether it may be plaintext, and then is not compared.
        table: Compares it with its table, as readers do; None where there is none.
        without_table: Why there is none, though there are tables; empty where there are none.
    """

    aad_prefix: ExpectedAadPrefix | None = None
    allow_plaintext: bool = False
    accept_plaintext: bool = False
    table: TableCheck | None = None
    without_table: str = ""
    path: str = ""


_RULE_OF = {
    "algorithm": "wanted-algorithm",
    "footer key": "wanted-keys",
    "column key": "wanted-keys",
    "plaintext column": "wanted-encryption",
    "column value": "wanted-keys",
}


def check_table_of_footer(expectation: Expectation, envelope: Envelope, keys: FileKeys) -> None:
    """Compare what is visible of a file with what its table wants; this needs no key."""
    table, book = expectation.table, keys.book
    if table is None:
        if expectation.without_table:
            book.scope_not_checked(Scope.CONFIGURATION, expectation.without_table)
        return
    is_hidden = envelope.mode is FooterMode.ENCRYPTED_FOOTER
    book.check("wanted-footer", is_hidden or table.settings.plaintext_footer, "the footer is in plaintext.")
    if envelope.algorithm is None:
        book.broken("wanted-algorithm", "the file is not encrypted, and the table has it encrypted.")
        return
    is_stored = envelope.aad_prefix is not None
    may_be_stored = table.settings.store_aad_prefix
    book.check("wanted-prefix", may_be_stored or not is_stored, "the prefix is stored.")
    is_known, key = _key(None, envelope.key_metadata, keys)
    found = table.for_file(expectation.path, [key]).footer_mismatches(envelope.algorithm, key)
    _note(found if is_known else [mismatch for mismatch in found if mismatch.what == "algorithm"], table, book)
    book.holds("wanted-algorithm", *(["wanted-keys"] if is_known else []))


def check_table_of_columns(
    expectation: Expectation,
    envelope: Envelope,
    footer: OpenFooter,
    keys: FileKeys,
    kept: Mapping[str, Sequence[ColumnMetaData]],
) -> None:
    """Compare the columns of a file with what its table wants; `kept` has the metadata of its value columns."""
    table, book = expectation.table, keys.book
    if table is None:
        return
    try:
        table.check_patterns([column.path for column in footer.columns])
        book.holds("wanted-columns")
    except ConfigurationError as error:
        # Readers take files of another schema, and compare the columns that are there: so the rest is done, too.
        book.broken("wanted-columns", str(error))
    is_known, footer_key = _key(None, envelope.key_metadata, keys)
    if envelope.algorithm is not None:
        _check_length(None, footer_key, table, keys)
    if not footer.row_groups or not is_known:
        return
    from parquet_keytools.config.key_policy import undecided_columns
    from parquet_keytools.files.table_check import SeenColumn

    undecided = set(undecided_columns(table.settings, [column.path for column in footer.columns]))
    seen: list[SeenColumn] = []
    for column in footer.columns:
        if column.path in undecided and column.encryption is ColumnEncryption.PLAINTEXT:
            message = f"table {table.table_name!r} does not say how to protect it."
            book.broken("wanted-encryption", f"column {column.name!r} is plaintext; {message}")
        key = None
        if column.encryption is ColumnEncryption.COLUMN_KEY:
            is_known, key = _key(column.path, column.key_metadata, keys)
            if not is_known:
                continue
            _check_length(column.path, key, table, keys)
        seen.append(SeenColumn(column.path, column.encryption, key))
    try:
        of_file = table.for_file(expectation.path, [footer_key, *(column.key for column in seen)])
        _note(of_file.column_mismatches(footer_key, seen), table, book)
        if envelope.algorithm is not None:
            _check_values(of_file, footer, kept, book)
    except ConfigurationError as error:
        for rule_id in ("wanted-keys", "wanted-encryption"):
            book.not_checked(rule_id, str(error))
    if any(column.encryption is not ColumnEncryption.PLAINTEXT for column in seen):
        book.holds("wanted-keys", "wanted-encryption")


def _check_values(
    table: TableCheck, footer: OpenFooter, kept: Mapping[str, Sequence[ColumnMetaData]], book: RuleBook
) -> None:
    """Compare the values of columns with the keys of the file, which depend on them."""
    from parquet_keytools.files.table_check import ColumnValue, value_of_chunks

    ordinals = {column.name: column.ordinal for column in footer.columns}
    values: dict[str, ColumnValue] = {}
    for name in table.settings.value_columns:
        if name not in ordinals:
            values[name] = ColumnValue(problem=f"there is no column {name!r} at the top level")
        elif len(kept.get(name, ())) == len(footer.row_groups):
            values[name] = value_of_chunks(name, footer.metadata.schema, ordinals[name], kept[name])
        else:
            book.not_checked("wanted-keys", f"column {name!r}: its metadata cannot be read")
    _note(table.value_mismatches(values), table, book)


def _key(user: KeyUser, key_metadata: bytes | None, keys: FileKeys) -> tuple[bool, ConfiguredKey | None]:
    """Return whether it is known what key metadata says, and the key that it names."""
    from parquet_keytools.files.table_check import seen_key

    assert keys.finder is not None
    try:
        return True, seen_key(keys.finder, key_metadata, user)
    except (KeytoolsError, OSError):
        # What is wrong with it is a matter of other rules.
        keys.book.not_checked("wanted-keys", f"{title_of(user)}: its key is unknown")
        return False, None


def _note(mismatches: Sequence[TableMismatch], table: TableCheck, book: RuleBook) -> None:
    for mismatch in mismatches:
        text = str(mismatch)
        if mismatch.what == "plaintext column":
            text = f"column {mismatch.column!r} is plaintext; table {table.table_name!r} says {mismatch.wanted}"
        book.broken(_RULE_OF[mismatch.what], f"{text}.")


def _check_length(user: KeyUser, key: ConfiguredKey | None, table: TableCheck, keys: FileKeys) -> None:
    """Check the length of a DEK that a master key wraps; the length of a data key is its owner's affair."""
    from parquet_keytools.config.key_policy import MasterKeyReference

    if not isinstance(key, MasterKeyReference):
        return
    least, length = table.settings.data_key_length_bits, keys.dek_lengths_bits.get(user)
    if length is None:
        keys.book.not_checked("wanted-key-length", f"{title_of(user)}: its key is unavailable")
    else:
        message = f"the DEK of {title_of(user)} has {length} bits, and {least} are wanted."
        keys.book.check("wanted-key-length", length >= least, message)


# --- Nonces by DEK, of a file or of a data set ---

MEMORY_BYTES = 8 * 1024 * 1024
"""How much the nonces of a pass take; to compare the nonces of several files takes three times as much again."""

_MOST_REPEATED = 1000

_OFFSET_LENGTH, _CHECK_LENGTH, _FILE_LENGTH = 6, 4, 4
ENTRY_LENGTH = NONCE_LENGTH + _OFFSET_LENGTH + _CHECK_LENGTH


class Invocations(NamedTuple):
    """How often a DEK encrypted."""

    modules: int
    pages: int

    @property
    def are_allowed(self) -> bool:
        """Whether they are not more than the limit, and pages not more than half of it (spec 4.1.4)."""
        return self.modules <= MAX_INVOCATIONS and 2 * self.pages <= MAX_INVOCATIONS


def nonce_entry(nonce: bytes | memoryview, offset: int, check: bytes | memoryview) -> bytes:
    """Return what is kept of a module at an offset.

    `check` is four bytes that tell a copy of the module from another module: the end of its tag, or the CRC of
    both ends of a page that has none.
    """
    return b"".join((nonce, offset.to_bytes(_OFFSET_LENGTH), check))


class NoncePart(NamedTuple):
    """Which part of the nonces one pass keeps; `only` under DEKs with these fingerprints, or None for all."""

    part: int
    parts: int
    only: frozenset[bytes] | None = None


class FileNonces:
    """The nonces of one file, or a part of them, by the fingerprint of their DEK; for one thread.

    All are kept, unless a part is `wanted`, or memory demands that only a `part` is. `invocations` has how often
    each DEK encrypted.
    """

    def __init__(self, wanted: NoncePart | None = None) -> None:
        self.part = wanted or NoncePart(0, 1)
        self._is_fixed = wanted is not None
        self._entries: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        self.invocations: dict[bytes, Invocations] = {}
        self._repeated: list[tuple[bytes, bytes]] = []
        self.kept_bytes = 0

    def add(self, fingerprint: bytes, entries: bytes | bytearray, pages: int = 0) -> None:
        """Add one `nonce_entry` after another under the DEK with a fingerprint; some of them are of pages."""
        if not entries:
            return
        before = self.invocations.get(fingerprint, Invocations(0, 0))
        modules = before.modules + len(entries) // ENTRY_LENGTH
        self.invocations[fingerprint] = Invocations(modules, before.pages + pages)
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
            for entry in _split(entries, ENTRY_LENGTH)
            if int.from_bytes(hashlib.blake2b(entry[:NONCE_LENGTH], key=key, digest_size=4).digest()) % parts
            == part
        )

    def _make_room(self) -> None:
        """Keep each nonce once, and then only half of them as often as needed."""
        for fingerprint, entries in self._entries.items():
            self._repeated += islice(_repeated(entries, ENTRY_LENGTH), _MOST_REPEATED - len(self._repeated))
            distinct = [entry for first, entry in _with_first(entries, ENTRY_LENGTH) if first is entry]
            self._entries[fingerprint] = bytearray().join(distinct)
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
        return _split(self._entries.get(fingerprint, b""), ENTRY_LENGTH)

    def check(self, book: RuleBook) -> None:
        """Check both rules about nonces, as far as nonces are kept here."""
        for found in self.invocations.values():
            message = f"one DEK encrypts {found.modules} modules, of which {found.pages} are pages."
            book.check("invocations", found.are_allowed, message)
        self.check_repeated(book)

    def check_repeated(self, book: RuleBook) -> None:
        """Check that no nonce that is kept comes twice."""
        if self._entries:
            book.holds("nonce-reuse")
        found = (repeated for entries in self._entries.values() for repeated in _repeated(entries, ENTRY_LENGTH))
        for pair in chain(self._repeated, found):
            # The same module may have been met twice.
            first, offset = sorted(int.from_bytes(rest[:_OFFSET_LENGTH]) for rest in pair)
            if first != offset:
                book.broken("nonce-reuse", f"it has the nonce of the module at byte {first}.", offset=offset)


def _split(entries: bytes | bytearray, length: int) -> Iterator[bytes]:
    data = memoryview(entries)
    return (bytes(data[at : at + length]) for at in range(0, len(data), length))


def _with_first(entries: bytes | bytearray, length: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries in the order of nonces and offsets, each after the first entry with its nonce."""
    first = nonce = b""
    for entry in sorted(_split(entries, length)):
        if not nonce or not entry.startswith(nonce):
            first, nonce = entry, entry[:NONCE_LENGTH]
        yield first, entry


def _repeated(entries: bytes | bytearray, length: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield what follows the nonce, in the first entry and in its own, for each whose nonce was there before."""
    for first, entry in _with_first(entries, length):
        if first is not entry:
            yield first[NONCE_LENGTH:], entry[NONCE_LENGTH:]


ReadAgain = Callable[[Collection[str], NoncePart], Iterable[tuple[str, FileNonces | None]]]
"""Returns nonces of files, by their names; a file that cannot be read again has None, or is missing."""

NOT_READ_AGAIN = "changed or could not be read again"
"""Why nonces of a file were not compared."""


class SharedNonces:
    """Compares the nonces of files that share DEKs; these files are read again, since nonces take much memory."""

    def __init__(self, read_again: ReadAgain) -> None:
        self._read_again = read_again
        self._users: defaultdict[bytes, dict[str, Invocations]] = defaultdict(dict)

    def add_file(self, name: str, invocations: Mapping[bytes, Invocations]) -> None:
        """Add a file."""
        for fingerprint, number in invocations.items():
            self._users[fingerprint][name] = number

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
        parts = total * (ENTRY_LENGTH + _FILE_LENGTH) // MEMORY_BYTES + 1
        for part in range(parts):
            pairs += self._pairs(names, NoncePart(part, parts, frozenset(shared)), book)
        for (first_file, file), number in sorted(pairs.items()):
            modules = "one module has" if number == 1 else f"{number} modules have"
            message = f"{modules} the same DEK and nonce in {names[first_file]} and {names[file]}."
            book.broken("nonce-shared", message)

    def _pairs(self, names: list[str], part: NoncePart, book: RuleBook) -> Counter[tuple[int, int]]:
        """Return how many modules have the nonce of a module in another file, by the positions of both files.

        Files that are not what they were when they were added are noted. What they still have is compared, too: a
        breach that shows is one.
        """
        positions = {name: position for position, name in enumerate(names)}
        left = dict.fromkeys(names)
        entries: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        for name, nonces in self._read_again(names, part):
            if nonces is None or name not in positions:
                continue
            file, invocations, is_same = positions[name].to_bytes(_FILE_LENGTH, "big"), nonces.invocations, True
            for fingerprint in part.only or ():
                is_same &= self._users[fingerprint].get(name) == invocations.get(fingerprint)
                for entry in nonces.entries(fingerprint):
                    entries[fingerprint] += entry[:NONCE_LENGTH] + file + entry[NONCE_LENGTH:]
            if is_same:
                left.pop(name, None)
        for name in left:
            book.not_checked("nonce-shared", f"{name}: it {NOT_READ_AGAIN}")
        pairs: Counter[tuple[int, int]] = Counter()
        for found in entries.values():
            for first, rest in _repeated(found, ENTRY_LENGTH + _FILE_LENGTH):
                # A module that ends alike is a copy.
                files_of = int.from_bytes(first[:_FILE_LENGTH]), int.from_bytes(rest[:_FILE_LENGTH])
                if files_of[0] != files_of[1] and first[-_CHECK_LENGTH:] != rest[-_CHECK_LENGTH:]:
                    pairs[files_of] += 1
        return pairs
