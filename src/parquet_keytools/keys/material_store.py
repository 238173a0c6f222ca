"""External key material in a file `_KEY_MATERIAL_FOR_<name>.json` beside the Parquet file.

`files/placement.py` decides between internal and external key material, and writes both files in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pyarrow import fs as pafs

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.storage.local_files import FolderIdentity, remove_from_folder
from parquet_keytools.storage.locations import FileLocation, read_whole
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.walk import KEY_MATERIAL_PREFIX

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size limit of a key material file; the keys of 32,767 columns take a quarter of it."""

_FLAT = re.compile(r'\s*\{(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\s,:]++)*+\}\s*', re.DOTALL)
"""An object of strings, whatever the order of its marks."""

_MOST_COLONS = 1 << 21
"""The keys of 32,767 columns before and after a rotation have 1.2 million, with ARNs and a URL."""


def key_material_location(parquet_file: FileLocation) -> FileLocation:
    """Return the location of the key material of a Parquet file."""
    return parquet_file.sibling(f"{KEY_MATERIAL_PREFIX}{parquet_file.name}.json")


def named_parquet_file(key_material: FileLocation) -> FileLocation | None:
    """Return the place of the file whose key material this is by its name; None if the name is another one."""
    name = key_material.name.removeprefix(KEY_MATERIAL_PREFIX).removesuffix(".json")
    parquet_file = key_material.sibling(name or "_")
    return parquet_file if key_material_location(parquet_file).name == key_material.name else None


def parquet_file_of(key_material: FileLocation) -> FileLocation | None:
    """Return the Parquet file to which key material belongs; None if there is none."""
    parquet_file = named_parquet_file(key_material)
    return parquet_file if parquet_file is not None and parquet_file.is_file() else None


def serialise_key_materials(materials: Mapping[str, KeyMaterial]) -> bytes:
    """Return the content of a key material file: a JSON object of references and key material as JSON strings."""
    texts = {reference: material.serialise(internal=False) for reference, material in materials.items()}
    return json.dumps(texts, separators=(",", ":")).encode()


def parse_key_materials(content: bytes, path: str) -> dict[str, KeyMaterial]:
    """Parse the content of a key material file."""
    materials: dict[str, KeyMaterial] = {}
    try:
        text = content.decode("utf-8")
        # Not trusted: nested values would take many times their length in memory.
        if text.count(":") > _MOST_COLONS or not _FLAT.fullmatch(text):
            raise KeyMaterialError("not valid JSON, or not a JSON object whose values are strings", path=path)
        entries: list[tuple[str, str]] = json.loads(text, object_pairs_hook=list)
    except ValueError:
        raise KeyMaterialError("not valid JSON", path=path) from None
    for reference, value in entries:
        if reference in materials:
            raise KeyMaterialError("a reference is repeated", path=path)
        try:
            materials[reference] = KeyMaterial.parse(value)
        except KeyMaterialError as error:
            raise KeyMaterialError(f"{reference[:64]!r}: {error}", path=path) from None
    return materials


def read_key_materials(parquet_file: FileLocation) -> dict[str, KeyMaterial]:
    """Read the key material of a Parquet file; `KeyMaterialError` if it is missing or not valid."""
    content = read_key_material_file(parquet_file)
    return parse_key_materials(content, str(key_material_location(parquet_file)))


def read_key_material_file(parquet_file: FileLocation) -> bytes:
    """Return the content of the key material file of a Parquet file; `KeyMaterialError` if it is missing."""
    location = key_material_location(parquet_file)
    try:
        return read_whole(location, MAX_FILE_BYTES)
    except FileNotFoundError:
        raise KeyMaterialError(
            f"the key material file {location.name!r} is missing",
            path=str(parquet_file),
            hint="It belongs to the Parquet file: copy, move and keep both together.",
        ) from None


def write_key_materials(
    parquet_file: FileLocation,
    materials: Mapping[str, KeyMaterial],
    *,
    like: FileLocation | None = None,
    folder: FolderIdentity | None = None,
) -> None:
    """Write the key material of a Parquet file atomically.

    A new file gets the owner and permissions of `like`; an existing file keeps its own. `folder` is the expected
    identity of the folder; None for any.
    """
    location = key_material_location(parquet_file)
    if like is not None and location.is_file():
        like = location
    write_whole(location, serialise_key_materials(materials), like=like, folder=folder)


def remove_key_materials(parquet_file: FileLocation, folder: FolderIdentity | None) -> None:
    """Remove the key material file of a Parquet file, if it exists; `folder` as in `write_key_materials`."""
    location = key_material_location(parquet_file)
    if location.info().type == pafs.FileType.File:
        remove_from_folder(location, folder)
