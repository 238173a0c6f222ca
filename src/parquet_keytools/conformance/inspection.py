"""What a file shows: without keys what anyone can see of it; with keys every module. No more of it is read."""

from __future__ import annotations

import base64
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from parquet_keytools.conformance.file_keys import Expectation, KeyUser, MaterialFinder
from parquet_keytools.conformance.file_verifier import ChunkVerifier, Depth, FileVerifier, InspectedModule
from parquet_keytools.conformance.footer_rules import Column, OpenFooter
from parquet_keytools.conformance.report import Finding, Severity
from parquet_keytools.encryption.aad import ExpectedAadPrefix, ModuleType, prefix_text
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import KeyMaterialError, KeytoolsError
from parquet_keytools.format.file_layout import ByteSource, FileSource, RegionKind
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, parse_key_metadata
from parquet_keytools.runtime.presentation import Summarised, escaped_bytes, expanded

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
        kek_id: Of the KEK, in hexadecimal.
        dek_length_bits: As far as it shows without a key: with double wrapping.
        kms_instance_id: As the writer knew the KMS.
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
    """A leaf column.

    Attributes:
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


class InspectedChunk(NamedTuple):
    """A column chunk, with all of its pages if it is whole.

    Its modules are pages with their headers, indexes and Bloom filter; ranges only where pages were not looked
    for.
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
        mode: How its footer is protected; None where that cannot be told.
        aad_prefix: The stored prefix as readers take it, without the NUL that marks its end: a text, or `base64:`
            with base64 of bytes.
        aad_prefix_escaped: The stored prefix, with NUL, backslashes and whatever is not printable escaped: no two
            prefixes look alike.
        supply_aad_prefix: Whether readers must supply the prefix.
        footer_length: Of footer and crypto metadata or signature.
        footer_is_authentic: Whether the footer was authenticated; None without its key.
        footer_denied: Why its key is unavailable, where keys were looked for.
        key_values: The application's own metadata: key -> length of the value in bytes.
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
    key_metadata: bytes | None, user: KeyUser, finder: MaterialFinder | None = None
) -> KeyDescription:
    """Decode key metadata of a column, or of the footer.

    External key material, and what the caller knows, only where `finder` can get it.
    """
    try:
        parsed = parse_key_metadata(key_metadata)
        if parsed is None:
            known = None if finder is None else finder.name_without_metadata(user)
            return KeyDescription("none", known)
        if isinstance(parsed, DataKeyId):
            return KeyDescription("data key", parsed.name)
        if isinstance(parsed, KeyMaterial):
            return _describe_material("internal", parsed, None)
        material = finder.material(key_metadata) if finder is not None else None
        return _describe_material("external", material, parsed.reference)
    except (KeytoolsError, OSError) as error:
        kind: Literal["external", "unknown"] = "unknown" if isinstance(error, KeyMaterialError) else "external"
        return KeyDescription(kind, flaw=str(error))


def _describe_material(
    kind: Literal["internal", "external"], material: KeyMaterial | None, name: str | None
) -> KeyDescription:
    if material is None:
        return KeyDescription(kind, reference=name)
    length_bits = None
    if material.double_wrapping:
        with contextlib.suppress(ValueError):
            length_bits = (len(base64.b64decode(material.wrapped_dek)) - _WRAPPING_OVERHEAD) * 8
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


# --- The look into a file ---


_REGION_TYPES = {
    RegionKind.PAGES: ModuleType.DATA_PAGE,
    RegionKind.BLOOM_FILTER: ModuleType.BLOOM_FILTER_HEADER,
    RegionKind.COLUMN_INDEX: ModuleType.COLUMN_INDEX,
    RegionKind.OFFSET_INDEX: ModuleType.OFFSET_INDEX,
}

_FIELD_NAMES = {
    1: "type",
    2: "encodings",
    3: "path",
    4: "codec",
    5: "number of values",
    6: "uncompressed size",
    7: "compressed size",
    8: "key-value metadata",
    9: "data page offset",
    10: "index page offset",
    11: "dictionary page offset",
    12: "statistics",
    13: "page encoding statistics",
    14: "Bloom filter offset",
    15: "Bloom filter length",
    16: "size statistics",
    17: "geospatial statistics",
}


def inspect_source(
    source: ByteSource,
    finder: MaterialFinder | None = None,
    aad_prefix: ExpectedAadPrefix | None = None,
    path: str | None = None,
) -> Inspection:
    """Return what a file shows; only its footer is read, and with a finder of keys the headers of its pages.

    The folders of `path` must not give values to protected columns; None takes the path of the source.
    """
    expectation = Expectation(aad_prefix, allow_plaintext=True, path=source.path if path is None else path)
    verifier = FileVerifier(source, finder, expectation, Depth.FOOTER if finder is None else Depth.HEADERS)
    verifier.run()
    flaws = tuple(
        finding
        for result in verifier.book.results()
        for finding in result.findings
        if result.rule.severity is Severity.VIOLATION
    )
    envelope, footer = verifier.envelope, verifier.footer
    if envelope is None:
        return Inspection(source.path, source.size_bytes, flaws=flaws)
    is_encrypted = envelope.mode is not FooterMode.UNENCRYPTED
    denied = {} if finder is None else verifier.keys.denied
    prefix, file_unique = envelope.aad_prefix, envelope.aad_file_unique
    footer_key = describe_key(envelope.key_metadata, None, finder) if is_encrypted else None
    columns: tuple[InspectedColumn, ...] = ()
    if footer is not None:
        columns = tuple(_column(column, footer, envelope.mode, denied, finder) for column in footer.columns)
    titles = [column.key_title(footer_key) for column in columns]
    bytes_by_key: Counter[str] = Counter({FOOTER: source.size_bytes - envelope.footer_offset})
    chunks = tuple(_chunk(chunk) for chunk in verifier.chunks if chunk.numbers is not None)
    for chunk in chunks:
        bytes_by_key[titles[chunk.column_ordinal]] += sum(module.length for module in chunk.modules)
    metadata = None if footer is None else footer.metadata
    key_values = () if metadata is None else metadata.key_value_metadata or ()
    return Inspection(
        path=source.path,
        size_bytes=source.size_bytes,
        mode=envelope.mode,
        algorithm=envelope.algorithm.value if envelope.algorithm is not None else None,
        aad_prefix=None if prefix is None else prefix_text(prefix),
        aad_prefix_escaped=None if prefix is None else escaped_bytes(prefix),
        aad_file_unique=None if file_unique is None else file_unique.hex(),
        supply_aad_prefix=envelope.supply_aad_prefix,
        footer_offset=envelope.footer_offset,
        footer_length=envelope.footer_length,
        footer_key=footer_key,
        footer_is_authentic=None if verifier.cipher is None else verifier.is_authentic,
        footer_denied=denied.get(None) if is_encrypted else None,
        created_by=None if metadata is None else metadata.created_by,
        num_rows=None if metadata is None else metadata.num_rows,
        key_values={
            entry.key: len((entry.value or "").encode("utf-8", "surrogateescape")) for entry in key_values
        },
        columns=columns,
        row_groups=tuple(
            InspectedRowGroup(ordinal, group.num_rows, group.total_compressed_size, group.file_offset)
            for ordinal, group in enumerate(() if footer is None else footer.row_groups)
        ),
        chunks=chunks,
        bytes_by_key=bytes_by_key,
        flaws=flaws,
    )


def _column(
    column: Column,
    footer: OpenFooter,
    mode: FooterMode,
    denied: Mapping[KeyUser, str],
    finder: MaterialFinder | None,
) -> InspectedColumn:
    is_encrypted = column.encryption is not ColumnEncryption.PLAINTEXT
    own = column.encryption is ColumnEncryption.COLUMN_KEY
    ids: set[int] = set()
    for chunks in footer.chunks if is_encrypted and mode is FooterMode.PLAINTEXT_FOOTER else ():
        visible = chunks[column.ordinal].meta_data
        ids |= set() if visible is None else set(visible.struct.ids())
    return InspectedColumn(
        column.name,
        column.ordinal,
        column.encryption,
        describe_key(column.key_metadata, column.path, finder) if own else None,
        tuple(_FIELD_NAMES.get(field_id, f"field {field_id}") for field_id in sorted(ids)),
        denied.get(column.path if own else None) if is_encrypted else None,
    )


def _chunk(chunk: ChunkVerifier) -> InspectedChunk:
    """Return a chunk with its modules, or with byte ranges where these were not looked for."""
    assert chunk.numbers is not None
    found = sorted(chunk.modules, key=lambda module: module.offset)
    seen = {module_type for module_type, *_ in found}
    for kind, region in chunk.regions.items():
        if _REGION_TYPES[kind] not in seen and (kind is not RegionKind.PAGES or not found):
            found.append(InspectedModule(_REGION_TYPES[kind], region.offset, region.length or 0))
    return InspectedChunk(*chunk.key, chunk.numbers.num_values, tuple(found), chunk.is_whole)


@contextlib.contextmanager
def open_local(path: str) -> Iterator[FileSource]:
    """Open a file for reading, without any other library: to show a footer must take no time."""
    with expanded(path).open("rb") as file:
        yield FileSource.of(path, file.fileno())
