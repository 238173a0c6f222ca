"""Where key material lands: the one decision, and the order in which a file and its key material are written.

Internal key material is the key metadata in the Parquet file itself. External key material is in a file of its own
beside it, whose name and content are in `keys/material_store.py`; the key metadata then has references to it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from pyarrow import fs as pafs

from parquet_keytools.errors import ChangedMeanwhileError, KeytoolsError, OutputError
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, KeyReference
from parquet_keytools.keys.material_store import (
    MAX_FILE_BYTES,
    key_material_location,
    read_key_materials,
    remove_key_materials,
    serialise_key_materials,
    write_key_materials,
)
from parquet_keytools.runtime.threads_and_forks import in_threads
from parquet_keytools.storage.local_files import FolderIdentity, exclusive_folder
from parquet_keytools.storage.locations import FileLocation, read_whole, real_location
from parquet_keytools.storage.outputs import (
    Check,
    PendingOutput,
    TargetExistsError,
    discarded_unless_done,
    pending_output,
    sync_folder,
    write_whole,
)

_FILES_AT_A_TIME = 16


KeyMaterials = Mapping[str, KeyMaterial]
"""External key material of a Parquet file, by reference; None in its place stands for internal key material."""


def new_references(location: FileLocation, count: int) -> list[str]:
    """Return references to the external key material of a new file: the footer's, then its columns'."""
    # Until the new file is in its place, the old file of this name needs its own.
    suffix = f".{secrets.token_hex(4)}" if existing_key_materials(location) else ""
    return [f"{name}{suffix}" for name in ("footerKey", *(f"columnKey{n}" for n in range(count - 1)))]


def land_keys(
    names: Sequence[str], materials: Mapping[int, KeyMaterial], references: Sequence[str] | None
) -> tuple[list[bytes], dict[str, KeyMaterial] | None]:
    """Decide where the key material of a new file lands: return its key metadata, and external key material.

    `names` has the footer's key and the column keys, and `materials` the key material of each position with a key
    in a KMS. Without `references`, key material is internal.
    """
    metadata: list[bytes] = []
    external: dict[str, KeyMaterial] = {}
    for position, name in enumerate(names):
        material = materials.get(position)
        if material is None:
            metadata.append(DataKeyId(name).serialise())
        elif references is None:
            metadata.append(material.serialise(internal=True).encode())
        else:
            external[references[position]] = material
            metadata.append(KeyReference(references[position]).serialise())
    return metadata, None if references is None else external


def existing_key_materials(parquet_file: FileLocation) -> dict[str, KeyMaterial]:
    """Return the external key material of a Parquet file; empty if one of the two files does not exist."""
    if key_material_location(parquet_file).info().type == pafs.FileType.NotFound:
        return {}
    if parquet_file.info().type == pafs.FileType.NotFound:
        return {}  # Left over from a Parquet file that is gone.
    return read_key_materials(parquet_file)


@contextlib.contextmanager
def replacement(
    location: FileLocation,
    check: Check,
    *,
    has_new_keys: bool = False,
    key_materials: KeyMaterials | None = None,
) -> Iterator[PendingOutput]:
    """Write a file that replaces another one when the block ends, unless `check` raises or that one changed."""
    # The new file gets the owner, permissions and attributes of the old one. A link stays; its target is replaced.
    # Unless it `has_new_keys`, a key material file stays as it is; otherwise see `put_in_place`.
    target = real_location(location)
    with discarded_unless_done(pending_output(target, like=location)) as pending:
        yield pending
        if has_new_keys:
            put_in_place(pending, key_materials, check=check, beside=location)
            return
        pending.sync()
        with exclusive_folder(target):
            pending.commit(check)


def put_in_place(
    pending: PendingOutput,
    key_materials: KeyMaterials | None,
    *,
    check: Check | None = None,
    beside: FileLocation | None = None,
) -> None:
    """Put a complete Parquet file and its key material in place; for `check` see `PendingOutput.commit`."""
    # At each moment, also after a crash, the current Parquet file has its key material: first comes key material
    # for the old file and the new one, then the new file, and then the old keys are removed (docs/adr/0005).
    # External key material is `beside` the file, or a link to it.
    pending.sync()
    _place([(pending, key_materials)], check, beside)


def put_all_in_place(
    outputs: Iterable[tuple[PendingOutput, KeyMaterials | None]], *, durable: bool = True
) -> None:
    """Put Parquet files in place, each as `put_in_place` does, but many at a time; after an error, some may be."""
    # All are synced to the disk before the first appears, and their folders afterwards, if they are `durable`.
    folders: dict[str, list[tuple[PendingOutput, KeyMaterials | None]]] = {}
    for pending, key_materials in outputs:
        # Objects in a store have no folder to lock or sync.
        path = PurePosixPath(pending.target.path)
        folder = str(path.parent if pending.target.is_local else path)
        folders.setdefault(folder, []).append((pending, key_materials))
    if durable:
        every = [pending for group in folders.values() for pending, _ in group]
        in_threads(lambda pending: pending.sync(), every, _FILES_AT_A_TIME)
    in_threads(partial(_place, durable=durable), list(folders.values()), _FILES_AT_A_TIME)


def _place(
    outputs: Sequence[tuple[PendingOutput, KeyMaterials | None]],
    check: Check | None = None,
    beside: FileLocation | None = None,
    *,
    durable: bool = True,
) -> None:
    """Put files of one folder in place; old keys are removed after the new file names are on the disk."""
    target = outputs[0][0].target
    with exclusive_folder(target):
        finishes = [_place_one(pending, beside or pending.target, new, check) for pending, new in outputs]
        if durable or any(new is not None for _, new in outputs):
            sync_folder(target)
        for finish in finishes:
            finish()


def _place_one(
    pending: PendingOutput, parquet_file: FileLocation, key_materials: KeyMaterials | None, check: Check | None
) -> Callable[[], None]:
    if key_materials is None:
        pending.commit(check, syncs_folder=False)
        return lambda: remove_key_materials(parquet_file, pending.folder)
    if check is not None:
        check()
    # Read again: a rotation may have replaced it since the file was opened.
    existing = existing_key_materials(parquet_file)
    if not existing.keys().isdisjoint(key_materials):
        raise OutputError(f"{parquet_file} was written by another process meanwhile.", hint="Try again.")
    before = _content(parquet_file)
    # A new version of a file keeps its owner and permissions.
    like = None if check is None else pending.target
    write_key_materials(parquet_file, {**existing, **key_materials}, like=like, folder=pending.folder)
    try:
        pending.commit(check, syncs_folder=False)
    except (ChangedMeanwhileError, TargetExistsError):
        # Only these errors mean that the new file, which needs its key material, is not in place.
        _take_back(parquet_file, before, {**existing, **key_materials}, pending.folder)
        raise
    if not existing:
        return lambda: None
    return lambda: write_key_materials(parquet_file, key_materials, like=like, folder=pending.folder)


def _content(parquet_file: FileLocation) -> bytes | None:
    try:
        return read_whole(key_material_location(parquet_file), MAX_FILE_BYTES)
    except FileNotFoundError:
        return None


def _take_back(
    parquet_file: FileLocation,
    before: bytes | None,
    placed: Mapping[str, KeyMaterial],
    folder: FolderIdentity | None,
) -> None:
    """Restore a key material file after its new Parquet file was not put in place, unless it changed again."""
    with contextlib.suppress(KeytoolsError, OSError):
        if _content(parquet_file) == serialise_key_materials(placed):
            if before is None:
                remove_key_materials(parquet_file, folder)
            else:
                write_whole(key_material_location(parquet_file), before, folder=folder)
