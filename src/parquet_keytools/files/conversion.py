"""Whole files through the module encryptor, with the keys that a configuration gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from parquet_keytools.encryption import file_decryptor, file_encryptor
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.errors import OutputError
from parquet_keytools.files.file_plan import encrypted_contents, is_there_already, plaintext_contents
from parquet_keytools.files.key_service import KeyService, TablePolicy, new_reference_suffix
from parquet_keytools.files.opened_file import FileIdentities, as_verified, naming_place
from parquet_keytools.files.replacement import NewKeyMaterial, existing_key_materials, put_in_place
from parquet_keytools.files.table_check import partition_names
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import (
    PLAINTEXT_MODE,
    PendingOutput,
    discarded_unless_done,
    pending_output,
    written_bytes,
)
from parquet_keytools.storage.sources import open_source

_COPIED_BYTES = 1 << 20

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
        skipped: Whether it was there already.
        copied: Whether it was copied as it is, because it is in plaintext and the configuration allows that.
    """

    source: str
    target: str
    source_bytes: int
    target_bytes: int
    skipped: bool = field(default=False, kw_only=True)
    copied: bool = field(default=False, kw_only=True)


def encrypt_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    skip_existing: bool = False,
    threads: int = 2,
) -> FileResult:
    """Encrypt a plaintext file; see `Keytools.encrypt_file`."""
    refuse_same_file(source, target)
    opens_target = partial(encrypted_contents, keys, table_name=table_name)
    if skip_existing and is_there_already(source, target, plaintext_contents, opens_target, overwrite=overwrite):
        return _skipped(source, target)
    with (
        open_source(source) as opened_source,
        discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending,
    ):
        put_in_place(
            pending, encrypt_pending(keys, table_name, opened_source, pending, on_progress, threads=threads)
        )
        return _result(source, target, opened_source)


def decrypt_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    skip_existing: bool = False,
    mode: int | None = None,
    identities: FileIdentities | None = None,
) -> FileResult:
    """Decrypt a file as a whole; see `Keytools.decrypt_file`."""
    refuse_same_file(source, target)
    opens_source = partial(
        encrypted_contents, keys, table_name=table_name, aad_prefix=aad_prefix, or_allowed_plaintext=True
    )
    if skip_existing and is_there_already(source, target, opens_source, plaintext_contents, overwrite=overwrite):
        return _skipped(source, target)
    (opened,) = keys.open_files([source], table_name, aad_prefix, identities=identities, holds_metadata=True)
    opened.refuse_denied(None)
    with open_source(source) as opened_source, plaintext_output(target, mode, overwrite=overwrite) as pending:
        data = as_verified(opened, opened_source)
        with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
            if opened.is_encrypted:
                file_decryptor.decrypt_columns(data, sink, opened.footer, opened.deks, on_progress=on_progress)
            else:
                _copy(data, sink, on_progress)
    copied = not opened.is_encrypted
    return FileResult(str(source), str(target), opened.tail.size_bytes, written_bytes([target]), copied=copied)


def _copy(source: ByteSource, sink: ByteSink, on_progress: Progress | None) -> None:
    for offset in range(0, source.size_bytes, _COPIED_BYTES):
        data = source.read_at(offset, min(_COPIED_BYTES, source.size_bytes - offset))
        sink.write_at(offset, data)
        if on_progress is not None:
            on_progress(len(data))


def rekey_file(
    keys: KeyService,
    new_keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    new_table_name: str | None,
    aad_prefix: str | bytes | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    skip_existing: bool = False,
) -> FileResult:
    """Encrypt an encrypted file with new keys; see `Keytools.rekey_file`."""
    refuse_same_file(source, target)
    opens_source = partial(encrypted_contents, keys, table_name=table_name, aad_prefix=aad_prefix)
    opens_target = partial(encrypted_contents, new_keys, table_name=new_table_name)
    if skip_existing and is_there_already(source, target, opens_source, opens_target, overwrite=overwrite):
        return _skipped(source, target)
    (opened,) = keys.open_files([source], table_name, aad_prefix, holds_metadata=True)
    opened.refuse_unencrypted()
    opened.refuse_denied(None)
    with open_source(source) as opened_source:
        data = as_verified(opened, opened_source)
        policy = new_keys.policy(new_table_name, [leaf.path for leaf in opened.footer.leaves])
        with discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending:
            encryption, key_material = new_file_encryption(new_keys, policy, target)
            with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
                file_encryptor.encrypt_opened(
                    data, sink, opened.footer, opened.deks, encryption, on_progress=on_progress
                )
            put_in_place(pending, key_material)
        return _result(source, target, opened_source)


@contextlib.contextmanager
def plaintext_output(target: FileLocation, mode: int | None, *, overwrite: bool) -> Iterator[PendingOutput]:
    """Write a file with decrypted values, which takes its place when the block ends.

    Args:
        target: Where it will be.
        mode: Its permissions; None for those of a file that only its owner may read and write.
        overwrite: Whether it may replace a file.

    Raises:
        OutputError: As with `pending_output`; or permissions are given, and the file system has none.
    """
    if mode is not None and not target.is_local:
        raise OutputError(f"{target} is not on a local file system: it has no mode.", hint="Leave the mode out.")
    mode = PLAINTEXT_MODE if mode is None else mode
    with discarded_unless_done(pending_output(target, mode=mode, overwrite=overwrite)) as pending:
        yield pending
        put_in_place(pending, NewKeyMaterial(target))


def encrypt_pending(
    keys: KeyService,
    table_name: str | None,
    source: ByteSource,
    pending: PendingOutput,
    on_progress: Progress | None = None,
    *,
    threads: int = 2,
    folder_names: Collection[str] = (),
) -> NewKeyMaterial:
    """Encrypt a plaintext file into a pending output; `put_in_place` takes what it returns.

    Args:
        keys: Of the configuration.
        table_name: The table; None where it has only one.
        source: The plaintext file.
        pending: The output.
        on_progress: Called with the number of bytes after each write, by any thread.
        threads: How many threads work.
        folder_names: Names of columns to which the file's folders give values; see `names_in_folders`.

    Raises:
        AlreadyEncryptedError: The file is encrypted.
        ConfigurationError: The table's columns do not fit the file.
        KmsError: A key cannot be wrapped.
        ParquetFormatError: The source is not a valid Parquet file.
    """
    footer = file_encryptor.read_plaintext_footer(source)
    paths = [leaf.path for leaf in footer.leaves]
    if names := partition_names(folder_names):
        with_partitions = dict.fromkeys([*paths, *((name,) for name in names)])
        keys.policy(table_name, list(with_partitions)).check_partition_columns(names)
    policy = keys.policy(table_name, paths)
    policy.refuse_folder_names(folder_names)
    encryption, key_material = new_file_encryption(keys, policy, pending.target)
    with pending.open_sink() as sink:
        file_encryptor.encrypt_opened(
            source, sink, footer, {}, encryption, threads=threads, on_progress=on_progress
        )
    return key_material


def new_file_encryption(
    keys: KeyService, policy: TablePolicy, target: FileLocation
) -> tuple[FileEncryption, NewKeyMaterial]:
    """Make the keys of a file that is to be written, and what lies beside it.

    Raises:
        KmsError: A key cannot be wrapped.
    """
    replaces = policy.table.key_material == "external" and bool(existing_key_materials(target))
    new = keys.new_file_keys(policy, target, new_reference_suffix() if replaces else "")
    return new.encryption, NewKeyMaterial(target, new.key_materials)


def refuse_same_file(source: FileLocation, target: FileLocation) -> None:
    """Raise `OutputError` if a file would be written onto itself."""
    if source.is_same_file(target):
        raise OutputError(f"{target} is the source itself.", hint="Choose another file for the output.")


def _result(source: FileLocation, target: FileLocation, opened_source: ByteSource) -> FileResult:
    return FileResult(str(source), str(target), opened_source.size_bytes, written_bytes([target]))


def _skipped(source: FileLocation, target: FileLocation) -> FileResult:
    return FileResult(str(source), str(target), source.size_bytes(), target.size_bytes(), skipped=True)
