"""What a file shows: without keys what anyone can see of it; with keys every module."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from parquet_keytools.conformance.findings import Finding
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import KeyMaterialError, KeytoolsError
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, KeyReference, parse_key_metadata
from parquet_keytools.runtime.presentation import Summarised

if TYPE_CHECKING:
    from parquet_keytools.conformance.file_keys import MaterialFinder

PLAINTEXT = "plaintext"
"""What stands for bytes under no key."""
FOOTER = "footer"
"""What stands for the bytes of the footer."""

_WRAPPING_OVERHEAD = 28


@dataclass(frozen=True)
class KeyDescription:
    """What key metadata says, decoded.

    Attributes:
        kind: `none`, `data key`, `internal` or `external` key material, `unknown`; with `none`, a configuration
            may still know the name.
        name: Identifier of the master key, or id of the data key; None where it is not known.
        double_wrapping: Whether a KEK stands in between; None where that is not known.
        kek_id: Of the KEK, in hexadecimal.
        dek_length_bits: As far as it shows without a key: with double wrapping.
        reference: To external key material.
        kms_instance_id: As the writer knew the KMS.
        kms_instance_url: Likewise.
        flaw: Why it cannot be decoded.
    """

    kind: Literal["none", "data key", "internal", "external", "unknown"]
    name: str | None = None
    double_wrapping: bool | None = None
    kek_id: str | None = None
    dek_length_bits: int | None = None
    reference: str | None = None
    kms_instance_id: str | None = None
    kms_instance_url: str | None = None
    flaw: str | None = None

    @property
    def title(self) -> str:
        """What its bytes are counted under: its name, which differs from what is no key."""
        name = self.name or self.reference
        if name is None:
            return "a key without key metadata" if self.kind == "none" else "an unknown key"
        return f"key {name}" if name in (PLAINTEXT, FOOTER) else name


@dataclass(frozen=True)
class InspectedColumn:
    """A column.

    Attributes:
        path: Its dotted path.
        ordinal: Its position among the leaves.
        encryption: What it is encrypted with.
        key: Its own key, where it has one.
        shows: What the footer shows of it although it is encrypted: names of fields.
        denied: Why its key is unavailable, where keys were looked for.
    """

    path: str
    ordinal: int
    encryption: ColumnEncryption
    key: KeyDescription | None = None
    shows: tuple[str, ...] = ()
    denied: str | None = None

    def key_title(self, footer_key: KeyDescription | None) -> str:
        """Return what its bytes are counted under."""
        if self.encryption is ColumnEncryption.PLAINTEXT:
            return PLAINTEXT
        key = self.key if self.encryption is ColumnEncryption.COLUMN_KEY else footer_key
        return (key or KeyDescription("none")).title


class InspectedModule(NamedTuple):
    """A module, or what would be one if it were encrypted.

    Attributes:
        module_type: Its type.
        offset: Where it begins, in bytes from the start of the file.
        length: In bytes with framing.
        page_ordinal: Of data pages and their headers.
    """

    module_type: ModuleType
    offset: int
    length: int
    page_ordinal: int | None = None


class InspectedChunk(NamedTuple):
    """A column chunk.

    Attributes:
        row_group_ordinal: Of its row group.
        column_ordinal: Of its column.
        num_values: How many values it has.
        modules: Pages with their headers, indexes and Bloom filter; ranges only where pages were not looked for.
        is_whole: Whether all of its pages were found.
    """

    row_group_ordinal: int
    column_ordinal: int
    num_values: int
    modules: tuple[InspectedModule, ...]
    is_whole: bool = True


class InspectedRowGroup(NamedTuple):
    """A row group."""

    ordinal: int
    num_rows: int
    total_compressed_size: int | None
    file_offset: int | None


@dataclass(frozen=True, repr=False)
class Inspection(Summarised):
    """What a file shows.

    Attributes:
        path: The file.
        size_bytes: Its length.
        mode: How its footer is protected; None where that cannot be told.
        algorithm: As stated.
        aad_prefix: The stored prefix as readers take it, without the NUL that marks its end: a text, or `base64:`
            with base64 of bytes.
        aad_prefix_escaped: The stored prefix, with NUL, backslashes and whatever is not printable escaped: no two
            prefixes look alike.
        aad_file_unique: As stored.
        supply_aad_prefix: Whether readers must supply the prefix.
        footer_offset: Where the footer begins.
        footer_length: Of footer and crypto metadata or signature.
        footer_key: The footer's key.
        footer_is_authentic: Whether the footer was authenticated; None without its key.
        footer_denied: Why its key is unavailable, where keys were looked for.
        created_by: The writer.
        num_rows: How many rows there are.
        key_values: The application's own metadata: key -> length of the value in bytes.
        columns: The leaf columns.
        row_groups: The row groups.
        chunks: The column chunks, as far as their metadata can be read.
        bytes_by_key: `KeyDescription.title`, `plaintext` or `footer` -> bytes under it, as far as that is known.
        flaws: What was found to be wrong on the way; `verify` looks for all of it.
    """

    path: str
    size_bytes: int
    mode: FooterMode | None = None
    algorithm: str | None = None
    aad_prefix: str | None = None
    aad_prefix_escaped: str | None = None
    aad_file_unique: str | None = None
    supply_aad_prefix: bool = False
    footer_offset: int | None = None
    footer_length: int | None = None
    footer_key: KeyDescription | None = None
    footer_is_authentic: bool | None = None
    footer_denied: str | None = None
    created_by: str | None = None
    num_rows: int | None = None
    key_values: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[InspectedColumn, ...] = ()
    row_groups: tuple[InspectedRowGroup, ...] = ()
    chunks: tuple[InspectedChunk, ...] = ()
    bytes_by_key: Mapping[str, int] = field(default_factory=dict)
    flaws: tuple[Finding, ...] = ()

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        return {
            "path": self.path,
            "mode": self.mode.value if self.mode is not None else None,
            "algorithm": self.algorithm,
            "footer_key": self.footer_key.title if self.footer_key is not None else None,
            "columns": len(self.columns),
            "rows": self.num_rows,
        }


def describe_key(
    key_metadata: bytes | None, user: tuple[str, ...], finder: MaterialFinder | None = None
) -> KeyDescription:
    """Decode key metadata; external key material, and what the caller knows, only where `finder` can get it.

    Args:
        key_metadata: As the file carries it.
        user: Path of the column, empty for the footer.
        finder: Where keys come from.
    """
    try:
        parsed = parse_key_metadata(key_metadata)
        if parsed is None:
            known = None if finder is None else finder.name_without_metadata(user or None)
            return KeyDescription("none", known)
        if isinstance(parsed, DataKeyId):
            return KeyDescription("data key", parsed.name)
        if isinstance(parsed, KeyMaterial):
            return _describe_material("internal", parsed, None)
        material = finder.material(key_metadata) if finder is not None else None
        return _describe_material("external", material, parsed)
    except (KeytoolsError, OSError) as error:
        kind: Literal["external", "unknown"] = "unknown" if isinstance(error, KeyMaterialError) else "external"
        return KeyDescription(kind, flaw=str(error))


def _describe_material(
    kind: Literal["internal", "external"], material: KeyMaterial | None, reference: KeyReference | None
) -> KeyDescription:
    name = reference.reference if reference is not None else None
    if material is None:
        return KeyDescription(kind, reference=name)
    length_bits = None
    if material.double_wrapping:
        try:
            length_bits = (len(base64.b64decode(material.wrapped_dek)) - _WRAPPING_OVERHEAD) * 8
        except (binascii.Error, ValueError):
            length_bits = None
    return KeyDescription(
        kind,
        material.master_key_id,
        material.double_wrapping,
        material.kek_id.hex() if material.kek_id is not None else None,
        length_bits,
        name,
        material.kms_instance_id,
        material.kms_instance_url,
    )
