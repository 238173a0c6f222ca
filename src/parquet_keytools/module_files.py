"""Whole files through the module encryptor, with the keys that a configuration gives them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.encryption import file_decryptor, file_encryptor
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.column_selection import ARROW_SCHEMA_KEY
from parquet_keytools.key_service import KeyService, TablePolicy, new_reference_suffix
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.material_store import (
    key_material_location,
    read_key_materials,
    remove_key_materials,
    write_key_materials,
)
from parquet_keytools.opened_file import OpenedFile, as_verified, naming_place
from parquet_keytools.storage import (
    BufferSink,
    FileLocation,
    PendingOutput,
    exclusive_folder,
    open_source,
    whole_output,
    written_meanwhile,
)

Finish = Callable[[], None]
"""What is left to do when the file is in its place."""

Place = Callable[[], Finish]
"""Puts key material beside the file, just before the file takes its place."""


Progress = Callable[[int], None]
"""Called with the number of bytes after each write, by any thread."""


@dataclass(frozen=True)
class FileResult:
    """A file that was written.

    Attributes:
        source: What was read.
        target: What was written.
        source_bytes: Length of the source.
        target_bytes: Length of the target.
    """

    source: str
    target: str
    source_bytes: int
    target_bytes: int


def encrypt_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    on_progress: Progress | None = None,
    *,
    threads: int = 2,
) -> FileResult:
    """Encrypt a plaintext file; see `Keytools.encrypt_file`."""
    _refuse_same_file(source, target)
    with open_source(source) as opened_source, contextlib.ExitStack() as replacement:
        finish: Finish
        with whole_output(target) as pending:
            place = encrypt_pending(keys, table_name, opened_source, pending, on_progress, threads=threads)
            replacement.enter_context(exclusive_folder(target))
            finish = place()
        finish()
        return _result(source, target, opened_source)


def decrypt_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    aad_prefix: str | None,
    on_progress: Progress | None = None,
) -> FileResult:
    """Decrypt a file as a whole; see `Keytools.decrypt_file`."""
    _refuse_same_file(source, target)
    (opened,) = keys.open_files([source], table_name, aad_prefix)
    opened.refuse_unencrypted()
    opened.refuse_denied(None)
    with open_source(source) as opened_source, whole_output(target, as_private_as=source) as pending:
        data = as_verified(opened, opened_source)
        with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
            file_decryptor.decrypt_columns(data, sink, opened.footer, opened.deks, on_progress=on_progress)
    remove_key_materials(target)
    return FileResult(str(source), str(target), opened.tail.size_bytes, target.info().size)


def rekey_file(
    keys: KeyService,
    new_keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    new_table_name: str | None,
    aad_prefix: str | None,
    on_progress: Progress | None = None,
) -> FileResult:
    """Encrypt an encrypted file with new keys; see `Keytools.rekey_file`."""
    _refuse_same_file(source, target)
    (opened,) = keys.open_files([source], table_name, aad_prefix)
    opened.refuse_unencrypted()
    opened.refuse_denied(None)
    with open_source(source) as opened_source, contextlib.ExitStack() as replacement:
        data = as_verified(opened, opened_source)
        policy = new_keys.policy(new_table_name, [leaf.path for leaf in opened.footer.leaves])
        finish: Finish
        with whole_output(target) as pending:
            new_file = _NewFile(new_keys, policy, pending)
            with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
                file_encryptor.encrypt_opened(
                    data, sink, opened.footer, opened.deks, new_file.encryption, on_progress=on_progress
                )
            replacement.enter_context(exclusive_folder(target))
            finish = new_file.place_key_materials()
        finish()
        return _result(source, target, opened_source)


def encrypt_pending(
    keys: KeyService,
    table_name: str | None,
    source: ByteSource,
    pending: PendingOutput,
    on_progress: Progress | None = None,
    *,
    threads: int = 2,
) -> Place:
    """Encrypt a plaintext file into a pending output; what it returns is to be called before its commit.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ConfigurationError: The table's columns do not fit the file.
        KmsError: A key cannot be wrapped.
        ParquetFormatError: The source is not a valid Parquet file.
    """
    envelope = read_envelope(source)
    file_encryptor.refuse_encrypted(envelope)
    policy = keys.policy(table_name, [leaf.path for leaf in envelope.open(None).leaves])
    new_file = _NewFile(keys, policy, pending)
    with pending.open_sink() as sink:
        file_encryptor.encrypt_file(source, sink, new_file.encryption, threads=threads, on_progress=on_progress)
    return new_file.place_key_materials


class _NewFile:
    """The keys of a file that is being written, and what becomes of its key material file."""

    def __init__(self, keys: KeyService, policy: TablePolicy, pending: PendingOutput) -> None:
        self._target = pending.target
        is_external = policy.table.key_material == "external"
        self._replaces = is_external and bool(_existing_key_materials(pending.target))
        new = keys.new_file_keys(policy, pending.target, new_reference_suffix() if self._replaces else "")
        self.encryption = new.encryption
        self._key_materials = new.key_materials

    def place_key_materials(self) -> Finish:
        """Write key material that fits the old and the new file; what is left is to take the old out of it.

        At each moment, also after a crash, the Parquet file that is there finds its key material. To be called
        in an `exclusive_folder` that is left after what it returns was called.

        Raises:
            OutputError: Another writer made the file meanwhile.
        """
        key_materials = self._key_materials
        if key_materials is None:
            return lambda: remove_key_materials(self._target)
        existing = _existing_key_materials(self._target)
        if existing and not self._replaces:
            raise written_meanwhile(self._target)
        write_key_materials(self._target, existing | key_materials)
        if not existing:
            return _nothing
        return lambda: write_key_materials(self._target, key_materials)


def _nothing() -> None:
    """Nothing is left to do."""


def _refuse_same_file(source: FileLocation, target: FileLocation) -> None:
    if source.is_same_file(target):
        raise OutputError(f"{target} is the source itself.", hint="Name another file for the output.")


def _result(source: FileLocation, target: FileLocation, opened_source: ByteSource) -> FileResult:
    return FileResult(str(source), str(target), opened_source.size_bytes, target.info().size)


def _existing_key_materials(target: FileLocation) -> dict[str, KeyMaterial]:
    if key_material_location(target).info().type == pafs.FileType.NotFound:
        return {}
    if target.info().type == pafs.FileType.NotFound:
        return {}  # Left over from a Parquet file that is gone.
    return read_key_materials(target)


def decrypted_buffer(opened: OpenedFile, names: Sequence[str] | None) -> pa.Buffer:
    """Decrypt a file, or some top-level columns of it, in memory; columns that cannot be read are left out."""
    wanted = None if names is None else {column.path[0] for name in names for column in opened.columns_named(name)}
    kept = {
        column.path
        for column in opened.footer.columns
        if column.path[0] not in opened.denied_top_level and (wanted is None or column.path[0] in wanted)
    }
    sink = BufferSink()
    with open_source(opened.location) as source, naming_place(opened.location, opened.footer.columns):
        file_decryptor.decrypt_columns(
            as_verified(opened, source),
            sink,
            opened.footer,
            opened.deks,
            columns=kept,
            key_values={ARROW_SCHEMA_KEY: _arrow_schema(opened, {path[0] for path in kept})},
        )
    return pa.py_buffer(sink.buffer)


def _arrow_schema(opened: OpenedFile, top_level: set[str]) -> str | None:
    """Return the schema entry of a file for some of its columns, or None where it has none that fits."""
    for entry in opened.footer.metadata.key_value_metadata or []:
        if entry.key == ARROW_SCHEMA_KEY and entry.value is not None:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(entry.value)))
            except (pa.ArrowException, ValueError):
                return None
            fields = [field for field in schema if field.name in top_level]
            return base64.b64encode(pa.schema(fields, schema.metadata).serialize()).decode()
    return None
