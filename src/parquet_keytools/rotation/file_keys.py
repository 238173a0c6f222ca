"""Which keys a file has: what its key metadata and its key material file say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from parquet_keytools.encryption.footer import (
    ColumnEncryption,
    Footer,
    FooterColumn,
    FooterEnvelope,
    FooterMode,
)
from parquet_keytools.errors import KeyMaterialError, KeyNotAvailableError
from parquet_keytools.keys.file_key_retriever import DataKeys
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_metadata import DataKeyId, KeyReference, parse_key_metadata
from parquet_keytools.rotation.external_material import ExternalMaterial, read_external_material
from parquet_keytools.rotation.held_key import HeldKey
from parquet_keytools.rotation.tail import Tail, check_unchanged, read_tail
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage import FileLocation


@dataclass
class FileKeys:
    """The keys of one file, as far as they can be seen.

    Attributes:
        location: The Parquet file.
        tail: Its tail as it was read.
        envelope: What its footer says without a key.
        external: Its key material file; None where no key that was seen refers to it.
        internal: Key metadata that is key material -> the key.
        footer: The footer, once it was opened.
    """

    location: FileLocation
    tail: Tail
    envelope: FooterEnvelope
    external: ExternalMaterial | None = None
    internal: dict[bytes, HeldKey] = field(default_factory=dict)
    footer: Footer | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is encrypted at all."""
        return self.envelope.mode is not FooterMode.UNENCRYPTED

    @property
    def held(self) -> list[HeldKey]:
        """All wrapped keys that were seen."""
        return [*self.internal.values(), *(self.external.held if self.external is not None else ())]

    @property
    def footer_key(self) -> HeldKey | None:
        """The footer's key; None where a data key takes its place, or the key material file lacks it."""
        return self.key_of(self.envelope.key_metadata)

    @property
    def hides_columns(self) -> bool:
        """Whether keys of columns may be inside of the encrypted footer.

        No writer keeps the footer's key material outside and that of columns inside.
        """
        if not self.hides_names:
            return False
        return not isinstance(parse_key_metadata(self.envelope.key_metadata), KeyReference)

    @property
    def hides_names(self) -> bool:
        """Whether the columns are inside of an encrypted footer that was not opened."""
        return self.envelope.mode is FooterMode.ENCRYPTED_FOOTER and self.footer is None

    def key_of(self, key_metadata: bytes | None) -> HeldKey | None:
        """Return the wrapped key that key metadata stands for; None for a data key."""
        if key_metadata in self.internal:
            return self.internal[key_metadata]
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference) and self.external is not None:
            return self.external.by_reference.get(parsed.reference)
        return None

    def data_key(self, data_keys: DataKeys) -> SecretBytes:
        """Return the data key of the footer.

        Raises:
            KeyNotAvailableError: It is not known.
            KeyMaterialError: The footer has a key reference that leads nowhere.
        """
        parsed = parse_key_metadata(self.envelope.key_metadata)
        if isinstance(parsed, KeyReference | KeyMaterial):
            raise KeyMaterialError("the key material file lacks the footer's key", path=str(self.location))
        name = parsed.name if isinstance(parsed, DataKeyId) else data_keys.footer_without_metadata
        try:
            return data_keys.find(name, "the footer")
        except KeyNotAvailableError as error:
            raise KeyNotAvailableError(
                f"{self.location}: {error} Which keys its columns have cannot be seen."
            ) from None

    def add(self, all_key_metadata: Iterable[bytes | None]) -> None:
        """Take in key metadata of the footer or of columns.

        Raises:
            KeyMaterialError: It is not valid, or refers to what is not there.
        """
        try:
            for key_metadata in all_key_metadata:
                if key_metadata is None or key_metadata in self.internal:
                    continue
                parsed = parse_key_metadata(key_metadata)
                if isinstance(parsed, KeyMaterial):
                    self.internal[key_metadata] = HeldKey(parsed, key_metadata, None)
                elif isinstance(parsed, KeyReference):
                    if self.external is None:
                        self.external = read_external_material(self.location)
                    if parsed.reference not in self.external.by_reference:
                        raise KeyMaterialError(f"the key material file has no {parsed.reference!r}")
        except KeyMaterialError as error:
            if error.path is not None:
                raise
            raise KeyMaterialError(str(error), path=str(self.location)) from None

    def take_footer(self, footer: Footer) -> None:
        """Take in what an opened footer says of columns.

        Raises:
            KeyMaterialError: See `add`.
        """
        self.footer = footer
        self.add(column.key_metadata for column in own_key_columns(footer))


def stated_aad_prefix(envelope: FooterEnvelope) -> bytes | None:
    """Return the AAD prefix of a file, empty where it has none; None where it has one that it does not store."""
    if envelope.aad_prefix is None and not envelope.supply_aad_prefix:
        return b""
    return envelope.aad_prefix


def own_key_columns(footer: Footer) -> list[FooterColumn]:
    """Return the columns that have a key of their own."""
    return [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]


def read_file_keys(location: FileLocation) -> FileKeys:
    """Read what shows without a key: all external key material, the footer's, and in a plaintext footer all.

    Raises:
        ChangedMeanwhileError: Somebody replaces the file just now, and its key material is that of the other one.
        KeyMaterialError: Key metadata or key material is not valid, or its file is missing.
        ParquetFormatError: It is not a Parquet file.
        OSError: It cannot be read.
    """
    tail, envelope = read_tail(location)
    keys = FileKeys(location, tail, envelope)
    if keys.is_encrypted:
        try:
            keys.add([envelope.key_metadata])
            visible = envelope.unverified_footer()
            if visible is not None:
                keys.add(column.key_metadata for column in own_key_columns(visible))
        except KeyMaterialError:
            check_unchanged(location, tail)
            raise
    return keys
