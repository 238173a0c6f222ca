"""Old keys, proven before they take the place of the new ones: nobody has those any more after that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parquet_keytools.encryption.footer import FooterEnvelope, read_envelope
from parquet_keytools.errors import value_or_raise
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.key_service import KeyService
from parquet_keytools.keys.file_key_retriever import DataKeys, FileKeyRetriever
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_unwrapper import KeyUnwrapper, KmsKeys
from parquet_keytools.keys.material_store import parse_key_materials
from parquet_keytools.rotation.file_keys import own_key_columns, stated_aad_prefix
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.storage import FileLocation


@dataclass(frozen=True)
class RestoredCheck:
    """Has the KMS unwrap the old keys that differ from those that are in place; other keys are not its concern.

    Attributes:
        kms_keys: Asks the KMS, each distinct key once in a run.
        data_keys: The data keys that the caller manages.
        aad_prefix_of: Returns the AAD prefix of a file that does not store it; None where it stores it.
    """

    kms_keys: KmsKeys
    data_keys: DataKeys
    aad_prefix_of: Callable[[FileLocation, bytes | None], bytes | None]

    @classmethod
    def make(
        cls, keys: KeyService, aad_prefix_of: Callable[[FileLocation, bytes | None], bytes | None]
    ) -> RestoredCheck:
        """Make one for a run. What readers have in their caches proves nothing: the KMS may refuse it by now."""
        return cls(KmsKeys(KeyUnwrapper(keys.kms, time.monotonic), 0), keys.data_keys, aad_prefix_of)

    @property
    def calls(self) -> KmsCalls:
        """What the KMS was asked for."""
        return KmsCalls(unwrap=len(self.kms_keys.answers))

    def material(self, old: bytes, now: bytes, path: str) -> None:
        """Check a key material file.

        Args:
            old: What is to be put back.
            now: What is there.
            path: Of the file, for error texts.

        Raises:
            KmsError: The KMS does not unwrap an old key.
            KeyMaterialError: It unwraps to a key that leads nowhere, or key material is not valid.
        """
        there = parse_key_materials(now, path)
        self._unwrap(
            material
            for reference, material in parse_key_materials(old, path).items()
            if there.get(reference) != material
        )

    def tail(self, location: FileLocation, restored: ByteSource, now: FooterEnvelope) -> None:
        """Check the tail of a Parquet file.

        Args:
            location: The file.
            restored: As it will be.
            now: What the footer that is in place says without a key.

        Raises:
            KmsError: The KMS does not unwrap an old key.
            KeytoolsError: The footer cannot be opened with it, or key material is not valid.
        """
        envelope = read_envelope(restored)
        retriever = FileKeyRetriever(self.kms_keys, self.data_keys, location)
        prefix = self.aad_prefix_of(location, stated_aad_prefix(envelope))
        dek = retriever.footer_dek(envelope.key_metadata)
        there = {column.key_metadata for column in own_key_columns(now.open(dek, prefix))}
        columns = own_key_columns(envelope.open(dek, prefix))
        changed = [
            retriever.material(column.key_metadata) for column in columns if column.key_metadata not in there
        ]
        self._unwrap(material for material in changed if material is not None)

    def _unwrap(self, materials: Iterable[KeyMaterial]) -> None:
        for dek in self.kms_keys.deks(list(materials)):
            value_or_raise(dek)
