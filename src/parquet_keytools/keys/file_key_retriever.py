"""Finds the keys of one file: what its key metadata stands for, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parquet_keytools.errors import KeyMaterialError, KeyNotAvailableError, KeytoolsError, value_or_raise
from parquet_keytools.keys.key_material import (
    DataKeyId,
    KeyMaterial,
    KeyMetadata,
    KeyReference,
    parse_key_metadata,
)
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.keys.material_store import read_key_materials
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation


@dataclass(frozen=True)
class DataKeys:
    """Data keys that the caller manages (spec 4.3).

    Attributes:
        footer_without_metadata: Name of the key of footers that carry no key metadata.
        columns_without_metadata: Dotted column path -> name of its key, where there is no key metadata.
    """

    by_name: Mapping[str, SecretBytes] = field(default_factory=dict)
    footer_without_metadata: str | None = None
    columns_without_metadata: Mapping[str, str] = field(default_factory=dict)

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """Return the name of the data key of what carries no key metadata: the footer (None), or a column."""
        if column_path is None:
            return self.footer_without_metadata
        return self.columns_without_metadata.get(".".join(column_path))

    def find(self, name: str | None, what: str) -> SecretBytes:
        """Return a data key.

        Raises:
            KeyNotAvailableError: No name is given, or no such key.
        """
        if name is None:
            raise KeyNotAvailableError(
                f"{what} has no key metadata.", hint="Name its data key under `reading.keys_without_metadata`."
            )
        key = self.by_name.get(name)
        if key is None:
            raise KeyNotAvailableError(
                f"{what} is encrypted with the data key {name[:128]!r}, which is not known.",
                hint="Add it to `data_keys`.",
            )
        return key


class FileKeyRetriever:
    """A `KeyRetriever` for one file.

    Attributes:
        uses_data_keys: Whether any key of the file is a data key.
        key_materials: External key material of the file, as it was read; None where none was needed.
    """

    def __init__(self, kms_keys: KmsKeys, data_keys: DataKeys, parquet_file: FileLocation) -> None:
        self._kms_keys = kms_keys
        self._data_keys = data_keys
        self._parquet_file = parquet_file
        self.uses_data_keys = False
        self.key_materials: dict[str, KeyMaterial] | None = None
        self._not_read: KeytoolsError | None = None
        self._parsed: dict[bytes | None, KeyMetadata | None] = {}

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the DEK of the footer; see `KeyRetriever`."""
        material = self.material(key_metadata)
        if material is not None and not material.is_footer_key:
            raise KeyMaterialError("isFooterKey: is false in the footer's", path=str(self._parquet_file))
        name = self.name_without_metadata(None)
        return value_or_raise(self._deks([("the footer", name, key_metadata)])[0])

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return the DEKs of columns; see `KeyRetriever`."""
        return self._deks(
            [
                (f"column {'.'.join(path)!r}", self.name_without_metadata(path), metadata)
                for path, metadata in columns
            ]
        )

    def parsed(self, key_metadata: bytes | None) -> KeyMetadata | None:
        """Return what `parse_key_metadata` does; each is parsed once."""
        if key_metadata not in self._parsed:
            self._parsed[key_metadata] = parse_key_metadata(key_metadata)
        return self._parsed[key_metadata]

    def name_without_metadata(self, column_path: tuple[str, ...] | None) -> str | None:
        """See `DataKeys.name_without_metadata`."""
        return self._data_keys.name_without_metadata(column_path)

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material that key metadata is or refers to; None where it is a data key's.

        Raises:
            KeyMaterialError: It is not valid, or cannot be found.
        """
        parsed = self.parsed(key_metadata)
        if isinstance(parsed, KeyReference):
            material = self._external().get(parsed.reference)
            if material is None:
                raise KeyMaterialError(
                    f"the key material file has no {parsed.reference!r}", path=str(self._parquet_file)
                )
            return material
        return parsed if isinstance(parsed, KeyMaterial) else None

    def _external(self) -> dict[str, KeyMaterial]:
        """Return the external key material of the file.

        It is read once, and what is wrong with it then stays wrong: a rotation that replaces it in between must
        not mix old and new, and a key that could not be compared with the table must not be there later.
        """
        if self._not_read is not None:
            raise self._not_read
        if self.key_materials is None:
            try:
                self.key_materials = read_key_materials(self._parquet_file)
            except KeytoolsError as error:
                self._not_read = error
                raise
        return self.key_materials

    def _deks(self, wanted: Sequence[tuple[str, str | None, bytes | None]]) -> list[SecretBytes | KeytoolsError]:
        outcomes: list[SecretBytes | KeytoolsError | None] = [None] * len(wanted)
        materials: dict[int, KeyMaterial] = {}
        for position, (what, default_name, key_metadata) in enumerate(wanted):
            try:
                material = self.material(key_metadata)
                if material is None:
                    parsed = self.parsed(key_metadata)
                    name = parsed.name if isinstance(parsed, DataKeyId) else default_name
                    outcomes[position] = self._data_keys.find(name, what)
                    self.uses_data_keys = True
                else:
                    materials[position] = material
            except KeytoolsError as error:
                outcomes[position] = error
        deks = self._kms_keys.deks(list(materials.values()))
        for position, dek in zip(materials, deks, strict=True):
            outcomes[position] = dek
        return [outcome for outcome in outcomes if outcome is not None]
