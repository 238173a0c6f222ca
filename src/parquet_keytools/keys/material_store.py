"""Key material outside of the Parquet file: `_KEY_MATERIAL_FOR_<name>.json` beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from pyarrow import fs as pafs

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.storage.local_files import FolderIdentity, remove_from_folder
from parquet_keytools.storage.locations import FileLocation, key_material_location
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.sources import read_whole

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Largest key material file that is read: 32,767 columns take a quarter of it."""

_MARK = re.compile(r"[ \t\n\r]*([^ \t\n\r])")
"""The next character of JSON that is not white space."""


def serialise_key_materials(materials: Mapping[str, KeyMaterial]) -> bytes:
    """Return the content of a key material file: references to JSON strings."""
    texts = {reference: material.serialise(internal=False) for reference, material in materials.items()}
    return json.dumps(texts, separators=(",", ":")).encode()


def parse_key_materials(content: bytes, path: str) -> dict[str, KeyMaterial]:
    """Read the content of a key material file.

    Raises:
        KeyMaterialError: It is not valid.
    """
    materials: dict[str, KeyMaterial] = {}
    try:
        for reference, text in _entries(content.decode("utf-8")):
            if text is None:
                raise KeyMaterialError(f"{reference[:64]!r}: not a string that holds JSON", path=path)
            if reference in materials:
                raise KeyMaterialError("a reference comes twice", path=path)
            try:
                materials[reference] = KeyMaterial.parse(text)
            except KeyMaterialError as error:
                raise KeyMaterialError(f"{reference[:64]!r}: {error}", path=path) from None
    except ValueError:
        raise KeyMaterialError("not valid JSON, or not a JSON object", path=path) from None
    return materials


def _entries(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the names and texts of a JSON object one by one, and None for the first that is not a text.

    Anybody can have written it, and what is not a text would take many times its length in memory: it is not
    built.

    Raises:
        ValueError: It is not a JSON object.
    """
    decoder = json.JSONDecoder()
    _, at = _next_mark(text, 0, "{")
    mark, behind = _next_mark(text, at, '"}')
    while mark != "}":
        reference, at = decoder.raw_decode(text, behind - 1)
        _, at = _next_mark(text, at, ":")
        found = _MARK.match(text, at)
        if found is None or found[1] != '"':
            yield reference, None
            return
        value, at = decoder.raw_decode(text, found.end() - 1)
        yield reference, value
        mark, behind = _next_mark(text, at, ",}")
        if mark == ",":
            mark, behind = _next_mark(text, behind, '"')
    if _MARK.match(text, behind):
        raise ValueError


def _next_mark(text: str, at: int, marks: str) -> tuple[str, int]:
    """Return the mark that comes next, and where it ends.

    Raises:
        ValueError: Something else comes, or nothing.
    """
    found = _MARK.match(text, at)
    if found is None or found[1] not in marks:
        raise ValueError
    return found[1], found.end()


def read_key_materials(parquet_file: FileLocation) -> dict[str, KeyMaterial]:
    """Read the key material of a Parquet file.

    Raises:
        KeyMaterialError: There is no key material file, or it is not valid.
    """
    content = read_key_material_file(parquet_file)
    return parse_key_materials(content, str(key_material_location(parquet_file)))


def read_key_material_file(parquet_file: FileLocation) -> bytes:
    """Read the key material file of a Parquet file, as it is.

    Raises:
        KeyMaterialError: There is none.
    """
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
    """Write the key material of a Parquet file, whole or not at all.

    Args:
        parquet_file: The Parquet file.
        materials: Its key material by reference.
        like: From what a new key material file takes owner and permissions; one that is there keeps its own.
        folder: Device and inode of the folder that the Parquet file is in; None for any.
    """
    location = key_material_location(parquet_file)
    if like is not None and location.is_file():
        like = location
    write_whole(location, serialise_key_materials(materials), like=like, folder=folder)


def remove_key_materials(parquet_file: FileLocation, folder: FolderIdentity | None) -> None:
    """Remove the key material of a Parquet file that has none any more; `folder` as in `write_key_materials`."""
    location = key_material_location(parquet_file)
    if location.info().type == pafs.FileType.File:
        remove_from_folder(location, folder)
