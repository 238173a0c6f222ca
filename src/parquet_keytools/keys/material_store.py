"""External key material in a file `_KEY_MATERIAL_FOR_<name>.json` beside the Parquet file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from pyarrow import fs as pafs

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.storage.local_files import FolderIdentity, remove_from_folder
from parquet_keytools.storage.locations import FileLocation, key_material_location, read_whole
from parquet_keytools.storage.outputs import write_whole

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size limit of a key material file; the keys of 32,767 columns take a quarter of it."""

_MARK = re.compile(r"[ \t\n\r]*([^ \t\n\r])")
"""Matches the next character of JSON that is not white space."""


def serialise_key_materials(materials: Mapping[str, KeyMaterial]) -> bytes:
    """Return the content of a key material file: a JSON object of references and key material as JSON strings."""
    texts = {reference: material.serialise(internal=False) for reference, material in materials.items()}
    return json.dumps(texts, separators=(",", ":")).encode()


def parse_key_materials(content: bytes, path: str) -> dict[str, KeyMaterial]:
    """Parse the content of a key material file.

    Raises:
        KeyMaterialError: The content is not valid.
    """
    materials: dict[str, KeyMaterial] = {}
    try:
        for reference, text in _entries(content.decode("utf-8")):
            if text is None:
                raise KeyMaterialError(f"{reference[:64]!r}: not a string that holds JSON", path=path)
            if reference in materials:
                raise KeyMaterialError("a reference is repeated", path=path)
            try:
                materials[reference] = KeyMaterial.parse(text)
            except KeyMaterialError as error:
                raise KeyMaterialError(f"{reference[:64]!r}: {error}", path=path) from None
    except ValueError:
        raise KeyMaterialError("not valid JSON, or not a JSON object", path=path) from None
    return materials


def _entries(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield names and string values of a JSON object; a value of another type yields None and ends it.

    The file is not trusted, and a nested value would take many times its length in memory, so it is not parsed.

    Raises:
        ValueError: The text is not a JSON object.
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
    """Return the next mark and its end.

    Raises:
        ValueError: The next character is not in `marks`, or the text ends.
    """
    found = _MARK.match(text, at)
    if found is None or found[1] not in marks:
        raise ValueError
    return found[1], found.end()


def read_key_materials(parquet_file: FileLocation) -> dict[str, KeyMaterial]:
    """Read the key material of a Parquet file.

    Raises:
        KeyMaterialError: The key material file is missing or not valid.
    """
    content = read_key_material_file(parquet_file)
    return parse_key_materials(content, str(key_material_location(parquet_file)))


def read_key_material_file(parquet_file: FileLocation) -> bytes:
    """Return the content of the key material file of a Parquet file.

    Raises:
        KeyMaterialError: The key material file is missing.
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
    """Write the key material of a Parquet file atomically.

    Args:
        parquet_file: The Parquet file.
        materials: Reference -> key material.
        like: File whose owner and permissions a new key material file gets; an existing file keeps its own.
        folder: Expected device and inode of the folder of the Parquet file; None for any.
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
