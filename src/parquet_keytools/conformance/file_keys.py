"""The keys of a file that is verified: which are available, what is wrong with others, and which are the same.

And what is expected of a file beyond the specification: the rules about what a table wants of it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parquet_keytools.conformance.chunk_layout import Column, OpenFooter
from parquet_keytools.conformance.report import RuleBook, Scope
from parquet_keytools.encryption.aad import ExpectedAadPrefix
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode, KeyRetriever
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
    KeyMetadata,
    KeyReference,
    parse_key_metadata,
)
from parquet_keytools.secret_bytes import SecretBytes

if TYPE_CHECKING:
    # These take long to import, for a look at a file without a configuration.
    from parquet_keytools.config.key_policy import KeyReference as ConfiguredKey
    from parquet_keytools.files.table_check import SeenColumn, TableCheck

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


KeyUser = tuple[str, ...]
"""Whom a key is for: the path of a column, or `FOOTER`."""

FOOTER: KeyUser = ()
"""The footer; no column has an empty path."""


def title_of(user: KeyUser) -> str:
    """Return what people call it: `footer`, or the dotted path of a column."""
    title = ".".join(user)
    if user == FOOTER:
        return "footer"
    return title if title != "footer" else "column footer"


class MaterialFinder(KeyRetriever, Protocol):
    """A `KeyRetriever` that also shows the key material that it works with."""

    @property
    def kms_instances(self) -> frozenset[str]:
        """The names of KMSs that files may name; see `KmsClient.instances`."""
        ...

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return what key metadata is or refers to; see `FileKeyRetriever.material`."""
        ...

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return the id of the data key of the footer (None) or of a column, if it is known."""
        ...

    def kek_length_bits(self, material: KeyMaterial) -> int | None:
        """Return the length of the KEK of key material, if it has one that is known by now."""
        ...


@dataclass(frozen=True)
class OneKey:
    """The key of a file whose table keeps it outside of the file, as Iceberg does; a `MaterialFinder`.

    Attributes:
        dek: Encrypts the footer and all columns.
        aad_prefix: The AAD prefix of the file; may be empty.
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


@dataclass(frozen=True)
class TableFiles:
    """The files of authentic tables that keep keys outside of their data files, as Iceberg does.

    Attributes:
        metadata_files: Paths of metadata files, which are plaintext by design.
        refused: Path of each other metadata file -> why no authentic table has it.
        not_checked: Path of each metadata file that could not be checked -> why.
        keys: Path of each Parquet file -> its key.
        kms_is_unavailable: Whether files could not be checked because the KMS could not be reached.
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
        fingerprints: Of the DEKs that were found, by a key of this process.
        key_names: Identifier of the master key, or id of the data key.
        uses_material_file: Whether key metadata refers to a key material file that has it, as far as it was read.
    """

    finder: MaterialFinder | None
    book: RuleBook
    fingerprints: set[bytes] = field(default_factory=set)
    denied: dict[KeyUser, str] = field(default_factory=dict)
    key_names: dict[KeyUser, str] = field(default_factory=dict)
    dek_lengths_bits: dict[KeyUser, int] = field(default_factory=dict)
    uses_material_file: bool = False
    _of_wrong_kind: set[KeyUser] = field(default_factory=set)

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes | None:
        """Return the DEK of the footer; None where it is unavailable, and the reason is in `denied`."""
        return self._deks([(FOOTER, key_metadata)])[0]

    def column_deks(self, columns: Sequence[tuple[KeyUser, bytes | None]]) -> list[SecretBytes | None]:
        """Return the DEKs of columns, asked for together."""
        return self._deks(columns) if columns else []

    def denied_by_title(self) -> dict[str, str]:
        """Return why keys are unavailable, for people."""
        return {title_of(user): reason for user, reason in self.denied.items()}

    def _deks(self, wanted: Sequence[tuple[KeyUser, bytes | None]]) -> list[SecretBytes | None]:
        found: list[SecretBytes | None] = [None] * len(wanted)
        materials: dict[int, KeyMaterial | None] = {}
        for position, (user, key_metadata) in enumerate(wanted):
            if not key_metadata and self.finder is not None:
                known = self.finder.name_without_metadata(user or None)
                self.key_names.update({} if known is None else {user: known})
            try:
                parsed = self._checked_metadata(user, key_metadata)
            except KeyMaterialError as error:
                # Bytes of any other kind, also JSON, are legal (spec 4.3), and of no use here.
                self.denied[user] = f"its key metadata: {error}"
                continue
            material, is_there = self._material(user, key_metadata, parsed)
            if is_there:
                materials[position] = material
        if self.finder is None:
            self.denied.update((user, "no keys are given") for user, _ in wanted if user not in self.denied)
            return found
        outcomes = self._ask([wanted[position] for position in materials])
        for position, outcome in zip(materials, outcomes, strict=True):
            if self._take(wanted[position][0], outcome, materials[position]):
                assert isinstance(outcome, SecretBytes)
                found[position] = outcome
        return found

    def _ask(self, wanted: Sequence[tuple[KeyUser, bytes | None]]) -> Sequence[SecretBytes | KeytoolsError]:
        assert self.finder is not None
        if [user for user, _ in wanted] != [FOOTER]:
            return self.finder.column_deks(wanted) if wanted else []
        try:
            return [self.finder.footer_dek(wanted[0][1])]
        except KeytoolsError as error:
            return [error]

    def _take(self, user: KeyUser, outcome: SecretBytes | KeytoolsError, material: KeyMaterial | None) -> bool:
        """Check what was answered; returns whether it is a key that can be used."""
        if isinstance(outcome, KeytoolsError):
            self._refused(user, outcome, material)
            return False
        if outcome.length_bits not in _AES_KEY_LENGTHS:
            self.book.broken("key-wrap", f"{title_of(user)}: the key has {outcome.length_bits} bits.")
            self.denied[user] = f"its key has {outcome.length_bits} bits"
            return False
        self.fingerprints.add(fingerprint(outcome))
        self.dek_lengths_bits[user] = outcome.length_bits
        if material is not None:
            self.book.holds("key-wrap")
            self._check_kek(user, material, outcome)
        return True

    def _checked_metadata(self, user: KeyUser, key_metadata: bytes | None) -> KeyMetadata | None:
        """Return what key metadata says; raises `KeyMaterialError` where that cannot be read."""
        try:
            parsed = parse_key_metadata(key_metadata)
        except KeyMaterialError as error:
            if key_metadata is not None and _KEY_MATERIAL in key_metadata:
                self.book.broken("key-material", f"{title_of(user)}: {error}")
            raise
        if isinstance(parsed, KeyMaterial):
            self._check_material(user, parsed)
        elif isinstance(parsed, KeyReference):
            self.book.holds("key-material")
        elif isinstance(parsed, DataKeyId):
            self.key_names[user] = parsed.name
        return parsed

    def _check_material(self, user: KeyUser, material: KeyMaterial) -> None:
        self.book.holds("key-material")
        self.key_names[user] = material.master_key_id
        if material.is_footer_key is (user == FOOTER):
            self.book.holds("key-material-kind")
        else:
            kind = "a footer" if material.is_footer_key else "a column"
            self._of_wrong_kind.add(user)
            self.book.broken("key-material-kind", f"{title_of(user)}: the key material is for {kind}.")
        known = {"DEFAULT", ""} if self.finder is None else {"DEFAULT", "", *self.finder.kms_instances}
        named = {material.kms_instance_id, material.kms_instance_url} - known
        if named:
            self.book.broken("kms-named", f"{title_of(user)}: {', '.join(sorted(map(repr, named)))[:300]}.")
        elif user == FOOTER:
            self.book.holds("kms-named")

    def _material(
        self, user: KeyUser, key_metadata: bytes | None, parsed: KeyMetadata | None
    ) -> tuple[KeyMaterial | None, bool]:
        """Return the key material, also from the key material file, and whether the key can be asked for."""
        if self.finder is None:
            if isinstance(parsed, KeyReference):
                self.uses_material_file = True
                self.book.not_checked("key-material-file", f"{title_of(user)}: no keys are given")
            if isinstance(parsed, KeyReference | KeyMaterial):
                material = parsed if isinstance(parsed, KeyMaterial) else None
                self._not_unwrapped(user, material, "no keys are given")
            return None, False
        try:
            material = self.finder.material(key_metadata)
        except KeyNotAvailableError as error:
            self._not_unwrapped(user, None, str(error))
            self.denied[user] = str(error)
            return None, False
        except (KeytoolsError, OSError) as error:
            self.book.broken("key-material-file", f"{title_of(user)}: {error}")
            self.denied[user] = str(error)
            return None, False
        if material is not None and isinstance(parsed, KeyReference):
            self.uses_material_file = True
            self.book.holds("key-material-file")
            self._check_material(user, material)
        return material, True

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


def check_deks(
    footer_fingerprint: bytes | None, columns: Sequence[tuple[Column, bytes]], keys: FileKeys, book: RuleBook
) -> None:
    """Check that keys that have two names are two."""
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


def check_table_of_footer(expectation: Expectation, envelope: Envelope, keys: FileKeys, book: RuleBook) -> None:
    """Compare what is visible of a file with what its table wants; this needs no key."""
    table = expectation.table
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
    is_known, key = _key(FOOTER, envelope.key_metadata, keys, book)
    found = table.for_file(expectation.path, [key]).footer_mismatches(envelope.algorithm, key)
    _note(found if is_known else [mismatch for mismatch in found if mismatch.what == "algorithm"], table, book)
    book.holds("wanted-algorithm", *(["wanted-keys"] if is_known else []))


def check_table_of_columns(
    expectation: Expectation,
    envelope: Envelope,
    footer: OpenFooter,
    keys: FileKeys,
    book: RuleBook,
    kept: Mapping[str, Sequence[ColumnMetaData]] | None = None,
) -> None:
    """Compare the columns of a file with what its table wants; `kept` has the metadata of its value columns."""
    table = expectation.table
    if table is None:
        return
    try:
        table.check_patterns([column.path for column in footer.columns])
        book.holds("wanted-columns")
    except ConfigurationError as error:
        # Readers take files of another schema, and compare the columns that are there: so the rest is done, too.
        book.broken("wanted-columns", str(error))
    is_known, footer_key = _key(FOOTER, envelope.key_metadata, keys, book)
    if envelope.algorithm is not None:
        _check_length(FOOTER, footer_key, table, keys, book)
    if not footer.row_groups or not is_known:
        return
    from parquet_keytools.config.key_policy import undecided_columns
    from parquet_keytools.files.table_check import SeenColumn

    undecided = set(undecided_columns(table.settings, [column.path for column in footer.columns]))
    for column in footer.columns:
        if column.path in undecided and column.encryption is ColumnEncryption.PLAINTEXT:
            name = ".".join(column.path)
            message = f"column {name!r} is plaintext; table {table.table_name!r} does not say how to protect it."
            book.broken("wanted-encryption", message)
    seen: list[SeenColumn] = []
    for column in footer.columns:
        key = None
        if column.encryption is ColumnEncryption.COLUMN_KEY:
            is_known, key = _key(column.path, column.key_metadata, keys, book)
            if not is_known:
                continue
            _check_length(column.path, key, table, keys, book)
        seen.append(SeenColumn(column.path, column.encryption, key))
    try:
        of_file = table.for_file(expectation.path, [footer_key, *(column.key for column in seen)])
        _note(of_file.column_mismatches(footer_key, seen), table, book)
        if envelope.algorithm is not None:
            _check_values(of_file, footer, kept or {}, book)
    except ConfigurationError as error:
        for rule_id in ("wanted-keys", "wanted-encryption"):
            book.not_checked(rule_id, str(error))
    if any(column.encryption is not ColumnEncryption.PLAINTEXT for column in seen):
        book.holds("wanted-keys", "wanted-encryption")


def _check_values(
    table: TableCheck, footer: OpenFooter, kept: Mapping[str, Sequence[ColumnMetaData]], book: RuleBook
) -> None:
    """Compare the values of columns with the keys of the file, which depend on them."""
    from parquet_keytools.files.column_values import ColumnValue, value_of_chunks

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


def _key(
    user: KeyUser, key_metadata: bytes | None, keys: FileKeys, book: RuleBook
) -> tuple[bool, ConfiguredKey | None]:
    """Return whether it is known what key metadata says, and the key that it names."""
    from parquet_keytools.files.table_check import seen_key

    assert keys.finder is not None
    try:
        return True, seen_key(keys.finder, key_metadata, user or None)
    except (KeytoolsError, OSError):
        # What is wrong with it is a matter of other rules.
        book.not_checked("wanted-keys", f"{title_of(user)}: its key is unknown")
        return False, None


def _note(mismatches: Sequence[TableMismatch], table: TableCheck, book: RuleBook) -> None:
    for mismatch in mismatches:
        text = str(mismatch)
        if mismatch.what == "plaintext column":
            text = f"column {mismatch.column!r} is plaintext; table {table.table_name!r} says {mismatch.wanted}"
        book.broken(_RULE_OF[mismatch.what], f"{text}.")


def _check_length(
    user: KeyUser, key: ConfiguredKey | None, table: TableCheck, keys: FileKeys, book: RuleBook
) -> None:
    """Check the length of a DEK that a master key wraps; the length of a data key is its owner's affair."""
    from parquet_keytools.config.key_policy import MasterKeyReference

    if not isinstance(key, MasterKeyReference):
        return
    least, length = table.settings.data_key_length_bits, keys.dek_lengths_bits.get(user)
    if length is None:
        book.not_checked("wanted-key-length", f"{title_of(user)}: its key is unavailable")
    else:
        message = f"the DEK of {title_of(user)} has {length} bits, and {least} are wanted."
        book.check("wanted-key-length", length >= least, message)
