"""The keys of a file that is verified: which are available, what is wrong with others, and which are the same."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parquet_keytools.conformance.chunk_layout import Column
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.encryption.protection import KeyRetriever
from parquet_keytools.errors import KeyMaterialError, KeytoolsError, WrappedKeyInvalidError
from parquet_keytools.keys.key_material import (
    DataKeyId,
    KeyMaterial,
    KeyMetadata,
    KeyReference,
    parse_key_metadata,
)
from parquet_keytools.secret_bytes import SecretBytes

_AES_KEY_LENGTHS = (128, 192, 256)

_KEY_MATERIAL = b'"keyMaterialType"'
"""What is in all key metadata that is to be key material, or a reference to it."""


class _Fingerprints:
    key = secrets.token_bytes(32)
    """Fingerprints of DEKs mean nothing outside of this process, or of those that share a job."""


def fingerprint_key() -> bytes:
    """Return the key of this process's fingerprints."""
    return _Fingerprints.key


def use_fingerprint_key(key: bytes) -> None:
    """Let the fingerprints of this process be comparable to those of others that were given the same key."""
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

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return what key metadata is or refers to; see `FileKeyRetriever.material`."""
        ...

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return the id of the data key that is known to be that of the footer (None) or of a column."""
        ...

    def kek_length_bits(self, material: KeyMaterial) -> int | None:
        """Return the length of the KEK of key material, if it has one that is known by now."""
        ...


@dataclass
class FileKeys:
    """Finds keys and says what is wrong with them.

    Attributes:
        finder: Where keys come from; None where no keys are given.
        fingerprints: Of the DEKs that were found, by a key of this process.
        key_names: Identifier of the master key, or id of the data key.
    """

    finder: MaterialFinder | None
    book: RuleBook
    fingerprints: set[bytes] = field(default_factory=set)
    denied: dict[KeyUser, str] = field(default_factory=dict)
    key_names: dict[KeyUser, str] = field(default_factory=dict)
    dek_lengths_bits: dict[KeyUser, int] = field(default_factory=dict)
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
            self.book.broken("key-material-kind", f"{title_of(user)}: the key material is that of {kind}.")
        named = {material.kms_instance_id, material.kms_instance_url} - {"DEFAULT", ""}
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
                self.book.not_checked("key-material-file", f"{title_of(user)}: no keys are given")
            if isinstance(parsed, KeyReference | KeyMaterial):
                material = parsed if isinstance(parsed, KeyMaterial) else None
                self._not_unwrapped(user, material, "no keys are given")
            return None, False
        try:
            material = self.finder.material(key_metadata)
        except (KeytoolsError, OSError) as error:
            self.book.broken("key-material-file", f"{title_of(user)}: {error}")
            self.denied[user] = str(error)
            return None, False
        if material is not None and isinstance(parsed, KeyReference):
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
            book.broken("dek-distinct", f"one DEK is that of {shown}.")
