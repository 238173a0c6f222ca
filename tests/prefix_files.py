"""Files under AAD prefixes of any form, and attackers who move bytes between the prefix and the file unique."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from key_services import key_service

from parquet_keytools import Keytools
from parquet_keytools.config.labels import no_field_labels
from parquet_keytools.encryption import file_encryption
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.format.structs import Aes, FileCryptoMetaData, FileMetaData
from parquet_keytools.keys.material_store import write_key_materials
from parquet_keytools.storage.locations import FileLocation, open_source

UNIQUE = b"8 bytes!"


def data(first: int = 0) -> pa.Table:
    """Return data."""
    return pa.table(
        {"name": [f"name {n}" for n in range(first, first + 20)], "other": list(range(first, first + 20))}
    )


def write(
    tools: Keytools,
    path: Path,
    prefix: bytes | None,
    unique: bytes = UNIQUE,
    *,
    table: pa.Table | None = None,
    table_name: str | None = None,
) -> Path:
    """Write a file as another writer would: with exactly this prefix and file unique."""
    from memory_files import MemorySink, MemorySource

    plain = pa.BufferOutputStream()
    table = data() if table is None else table
    pq.write_table(table, plain, row_group_size=10)
    location = FileLocation.resolve(path)
    keys = key_service(tools)
    policy = keys.policy(table_name, [(name,) for name in table.column_names], no_field_labels)
    new = keys.new_file_keys(policy, location)
    encryption = replace(new.encryption, aad_prefix=prefix, aad_file_unique=unique)
    sink = MemorySink()
    file_encryption.encrypt_source(MemorySource(plain.getvalue().to_pybytes()), sink, encryption)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sink.contents())
    if new.key_materials is not None:
        write_key_materials(location, new.key_materials)
    return path


def aad_fields(path: Path) -> tuple[bytes | None, bytes | None, bool]:
    """Return the prefix and file unique that a file stores, and whether readers must supply the prefix."""
    with open_source(FileLocation.resolve(path)) as source:
        envelope = read_envelope(source)
    return envelope.aad_prefix, envelope.aad_file_unique, envelope.supply_aad_prefix


def present(path: Path, prefix: bytes | None, unique: bytes, *, supply: bool = False) -> None:
    """Change a file's AAD fields, as anyone without a key can."""
    content = path.read_bytes()
    start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    footer, magic = content[start:-8], content[-4:]
    stored: FileCryptoMetaData | FileMetaData
    if magic == b"PARE":
        stored, end = FileCryptoMetaData.read(footer)
        algorithm = stored.encryption_algorithm
    else:
        stored, end = FileMetaData.read(footer)
        found = stored.encryption_algorithm
        assert found is not None
        algorithm = found
    parameters: Aes | None = algorithm.aes_gcm_v1 or algorithm.aes_gcm_ctr_v1
    assert parameters is not None
    parameters.aad_prefix, parameters.aad_file_unique = prefix, unique
    parameters.supply_aad_prefix = True if supply else None
    footer = stored.serialise() + footer[end:]
    path.write_bytes(content[:start] + footer + struct.pack("<I", len(footer)) + magic)


def document(**changes: Any) -> dict[str, Any]:
    """Return a configuration with a table `t`; `tables` and `reading` are used as given."""
    table = {"footer_key": "kf", "column_keys": {"kc": ["name"]}, "unlisted_columns": "footer_key"}
    parts = {name: changes.pop(name) for name in ("tables", "reading") if name in changes}
    return {
        "version": 1,
        "kms": {"type": "in_memory", "keys": dict.fromkeys(("kf", "kc", "new"), "MDEyMzQ1Njc4OTAxMjM0NQ==")},
        "tables": {"t": table | {"aad_prefix": "t/{file_name}"} | changes},
    } | parts
