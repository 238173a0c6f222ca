"""The key material file beside a Parquet file: read as it is, and replaced in one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from parquet_keytools.errors import OutputError
from parquet_keytools.keys.material_store import (
    MAX_FILE_BYTES,
    key_material_location,
    parse_key_materials,
    read_key_material_file,
)
from parquet_keytools.rotation.held_key import HeldKey
from parquet_keytools.rotation.replacement import replacement, sink_like
from parquet_keytools.rotation.tail import ChangedMeanwhileError, file_state
from parquet_keytools.rotation.tail_rewriter import why_unconditional
from parquet_keytools.storage import FileLocation, read_whole


@dataclass(frozen=True)
class ExternalMaterial:
    """A key material file as it was read.

    Attributes:
        location: Where it lies.
        content: Its bytes.
        by_reference: Reference -> the key.
    """

    location: FileLocation
    content: bytes = field(repr=False)
    by_reference: Mapping[str, HeldKey]

    @property
    def held(self) -> tuple[HeldKey, ...]:
        """Its keys, also those that the Parquet file does not refer to."""
        return tuple(self.by_reference.values())

    def with_new(self, new_texts: Mapping[str, str]) -> bytes:
        """Return the content with some entries replaced; the others and their order stay."""
        texts = {reference: held.text for reference, held in self.by_reference.items()}
        return json.dumps({**texts, **new_texts}, separators=(",", ":")).encode()


def read_external_material(parquet_file: FileLocation) -> ExternalMaterial:
    """Read the key material file of a Parquet file.

    Raises:
        KeyMaterialError: There is none, or it is not valid.
    """
    location, content = key_material_location(parquet_file), read_key_material_file(parquet_file)
    materials = parse_key_materials(content, str(location))
    texts: dict[str, str] = json.loads(content)
    held = {reference: HeldKey(material, texts[reference], reference) for reference, material in materials.items()}
    return ExternalMaterial(location, content, held)


def state_with_material(parquet_file: FileLocation) -> tuple[object, ...]:
    """Return what changes when a Parquet file or its key material file is replaced.

    Raises:
        FileNotFoundError: There is no such Parquet file.
    """
    own = file_state(parquet_file)
    try:
        return own, file_state(key_material_location(parquet_file))
    except FileNotFoundError:
        return own, None


def replace_external_material(
    location: FileLocation, old: bytes, new: bytes, *, locked_folder: str | None = None
) -> None:
    """Replace a key material file.

    Args:
        location: The key material file.
        old: Its content as it was read.
        new: What takes its place.
        locked_folder: Path of a folder whose lock the caller has.

    Raises:
        ChangedMeanwhileError: Its content is another one now.
        OutputError: It cannot be written, or does not read back as it was written.
    """

    def check() -> None:
        try:
            if read_whole(location, MAX_FILE_BYTES) == old:
                return
        except FileNotFoundError:
            pass
        raise ChangedMeanwhileError(f"{location} changed while its keys were rotated.", hint="Try again.")

    if why_unconditional(location) is None:
        from parquet_keytools.rotation.s3_tail import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check, locked_folder=locked_folder) as pending:
        with sink_like(pending, location) as sink:
            sink.write_at(0, new)
        if read_whole(pending.location, MAX_FILE_BYTES) != new:
            raise OutputError(f"{location}: what was written does not read back.", hint="Check the disk.")
