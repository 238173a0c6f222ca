"""The keys of a file that is verified: which can be had, and what is wrong with those that cannot."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parquet_keytools.conformance.rule_book import RuleBook
from parquet_keytools.encryption.key_retriever import KeyRetriever
from parquet_keytools.encryption.module_place import ModulePlace
from parquet_keytools.errors import KeyMaterialError, KeytoolsError, WrappedKeyInvalidError
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_metadata import DataKeyId, KeyReference, parse_key_metadata
from parquet_keytools.secret_bytes import SecretBytes

_AES_KEY_LENGTHS = (128, 192, 256)
_FINGERPRINT_KEY = secrets.token_bytes(32)
"""Fingerprints of DEKs mean nothing outside of this process."""


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
        book: Where findings go.
        fingerprints: Of the DEKs that were found, by a key of this process.
        denied: Dotted column path, or `footer` -> why its key cannot be had.
        key_names: Dotted column path, or `footer` -> identifier of its master key, or id of its data key.
    """

    finder: MaterialFinder | None
    book: RuleBook
    fingerprints: set[bytes] = field(default_factory=set)
    denied: dict[str, str] = field(default_factory=dict)
    key_names: dict[str, str] = field(default_factory=dict)
    _of_wrong_kind: set[str] = field(default_factory=set)

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes | None:
        """Return the DEK of the footer; None where it cannot be had, and the reason is in `denied`."""
        return self._deks([("footer", (), key_metadata)], None)[0]

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]], place: ModulePlace
    ) -> list[SecretBytes | None]:
        """Return the DEKs of columns, asked for together."""
        return self._deks([(".".join(path), path, key_metadata) for path, key_metadata in columns], place)

    def _deks(
        self, wanted: Sequence[tuple[str, tuple[str, ...], bytes | None]], place: ModulePlace | None
    ) -> list[SecretBytes | None]:
        found: list[SecretBytes | None] = [None] * len(wanted)
        materials: dict[int, KeyMaterial | None] = {}
        for position, (name, path, key_metadata) in enumerate(wanted):
            if not key_metadata and self.finder is not None:
                known = self.finder.name_without_metadata(path or None)
                self.key_names.update({} if known is None else {name: known})
            if self._check_metadata(name, key_metadata, is_footer=place is None):
                material, is_there = self._material(name, key_metadata)
                if is_there:
                    materials[position] = material
        if self.finder is None:
            self.denied.update((name, "no keys are given") for name, _, _ in wanted if name not in self.denied)
            return found
        for position, outcome in zip(materials, self._ask(wanted, list(materials), place is None), strict=True):
            name = wanted[position][0]
            if isinstance(outcome, KeytoolsError):
                self._refused(name, outcome)
                continue
            if outcome.length_bits not in _AES_KEY_LENGTHS:
                self.book.broken("key-wrap", f"{name}: the key has {outcome.length_bits} bits.")
                self.denied[name] = f"its key has {outcome.length_bits} bits"
                continue
            found[position] = outcome
            self.fingerprints.add(fingerprint(outcome))
            material = materials[position]
            if material is not None:
                self.book.holds("key-wrap")
                self._check_kek(name, material, outcome)
        return found

    def _ask(
        self, wanted: Sequence[tuple[str, tuple[str, ...], bytes | None]], positions: list[int], is_footer: bool
    ) -> Sequence[SecretBytes | KeytoolsError]:
        assert self.finder is not None
        if not is_footer:
            return self.finder.column_deks([wanted[position][1:] for position in positions])
        outcomes: list[SecretBytes | KeytoolsError] = []
        for position in positions:
            try:
                outcomes.append(self.finder.footer_dek(wanted[position][2]))
            except KeytoolsError as error:
                outcomes.append(error)
        return outcomes

    def _check_metadata(self, name: str, key_metadata: bytes | None, *, is_footer: bool) -> bool:
        try:
            parsed = parse_key_metadata(key_metadata)
        except KeyMaterialError as error:
            if key_metadata is not None and key_metadata.lstrip().startswith(b"{"):
                self.book.broken("key-material", f"{name}: {error}")
            # Bytes of any other kind are legal (spec 4.3), and of no use here.
            self.denied[name] = f"its key metadata: {error}"
            return False
        if isinstance(parsed, KeyMaterial):
            self._check_material(name, parsed, is_footer=is_footer)
        elif isinstance(parsed, KeyReference):
            self.book.holds("key-material")
        elif isinstance(parsed, DataKeyId):
            self.key_names[name] = parsed.name
        return True

    def _check_material(self, name: str, material: KeyMaterial, *, is_footer: bool) -> None:
        self.book.holds("key-material")
        self.key_names[name] = material.master_key_id
        if material.is_footer_key is is_footer:
            self.book.holds("key-material-kind")
        else:
            kind = "a footer" if material.is_footer_key else "a column"
            self._of_wrong_kind.add(name)
            self.book.broken("key-material-kind", f"{name}: the key material is that of {kind}.")
        named = {material.kms_instance_id, material.kms_instance_url} - {"DEFAULT", ""}
        if named:
            self.book.broken("kms-named", f"{name}: {', '.join(sorted(map(repr, named)))[:300]}.")
        elif is_footer:
            self.book.holds("kms-named")

    def _material(self, name: str, key_metadata: bytes | None) -> tuple[KeyMaterial | None, bool]:
        """Return the key material, also from the key material file, and whether the key can be asked for."""
        if self.finder is None:
            return None, False
        try:
            material = self.finder.material(key_metadata)
        except (KeytoolsError, OSError) as error:
            self.book.broken("key-material-file", f"{name}: {error}")
            self.denied[name] = str(error)
            return None, False
        if material is not None and isinstance(parse_key_metadata(key_metadata), KeyReference):
            self.book.holds("key-material-file")
            self._check_material(name, material, is_footer=name == "footer")
        return material, True

    def _refused(self, name: str, error: KeytoolsError) -> None:
        # Our own retriever refuses key material of the wrong kind too.
        if isinstance(error, KeyMaterialError | WrappedKeyInvalidError) and name not in self._of_wrong_kind:
            self.book.broken("key-wrap", f"{name}: {error}")
        self.denied[name] = str(error)

    def _check_kek(self, name: str, material: KeyMaterial, dek: SecretBytes) -> None:
        assert self.finder is not None
        length_bits = self.finder.kek_length_bits(material)
        if length_bits is None:
            return
        if length_bits >= dek.length_bits:
            self.book.holds("kek-length")
        else:
            message = f"{name}: a KEK of {length_bits} bits wraps a DEK of {dek.length_bits} bits."
            self.book.broken("kek-length", message)


def fingerprint(dek: SecretBytes) -> bytes:
    """Return what tells DEKs apart within this process and says nothing of them."""
    return hashlib.blake2b(dek.reveal(), key=_FINGERPRINT_KEY, digest_size=16).digest()
