"""Whole files converted: encrypted, decrypted or rekeyed with the keys of a configuration, alone or in folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from pyarrow import fs as pafs

from parquet_keytools.config.key_policy import resolve_columns
from parquet_keytools.encryption import file_encryption
from parquet_keytools.encryption.footer import Footer, read_envelope, read_footer
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    KeytoolsError,
    KmsError,
    OutputError,
)
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.files.key_service import KeyService, TablePolicy
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    as_verified,
    check_column_keys,
    check_footer_key,
    naming_place,
)
from parquet_keytools.files.placement import KeyMaterials, put_in_place
from parquet_keytools.files.table_check import partition_names
from parquet_keytools.format.file_layout import ByteSource
from parquet_keytools.format.structs import ColumnMetaData
from parquet_keytools.keys.key_wrapping import FileKeyRetriever
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source, real_location
from parquet_keytools.storage.outputs import (
    PLAINTEXT_MODE,
    PendingOutput,
    check_target,
    discarded_unless_done,
    pending_output,
    written_bytes,
)
from parquet_keytools.storage.walk import LeftOut, ParquetFile, Unseen, all_files, data_set, file_or_folder

_COPIED_BYTES = 1 << 20

SkipExisting = bool | Literal["unauthenticated"]
"""Whether results of an earlier run are skipped; `unauthenticated` compares what they show without keys."""

Progress = Callable[[int], None]
"""Called with the number of bytes after each write, from any thread."""


@dataclass(frozen=True)
class FileResult:
    """A file that was written.

    Attributes:
        source: The file that was read.
        target: The file that was written.
        source_bytes: Length of the source.
        target_bytes: Length of the target.
        skipped: Whether the target existed already.
        copied: Whether a plaintext file was copied unchanged, as the configuration allows.
        plaintext_columns: Dotted paths of the leaf columns that an encrypted target has in plaintext; empty if it
            was skipped.
    """

    source: str
    target: str
    source_bytes: int
    target_bytes: int
    skipped: bool = field(default=False, kw_only=True)
    copied: bool = field(default=False, kw_only=True)
    plaintext_columns: tuple[str, ...] = field(default=(), kw_only=True)


def encrypt_file(
    keys: KeyService,
    source: FileLocation,
    target: FileLocation,
    table_name: str | None,
    on_progress: Progress | None = None,
    *,
    overwrite: bool = True,
    skip_existing: SkipExisting = False,
    threads: int = 2,
    key_values: Mapping[str, str] | None = None,
) -> FileResult:
    """Encrypt a plaintext file; see `Keytools.encrypt_file`."""
    refuse_same_file(source, target)

    def is_same() -> bool:
        footer = _decided_footer(keys, table_name, source)
        if skip_existing == "unauthenticated":
            return _shows_the_same(keys, footer, target, table_name)
        return _agree(footer, lambda: labelled_file(keys, target, table_name))

    if skip_existing and is_there_already(source, target, is_same, overwrite=overwrite, key_values=key_values):
        return _result(source, target, source.size_bytes(), skipped=True)
    with (
        open_source(source) as opened_source,
        discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending,
    ):
        key_materials, policy = encrypt_pending(
            keys, table_name, opened_source, pending, on_progress, threads=threads, key_values=key_values
        )
        put_in_place(pending, key_materials)
        return _result(source, target, opened_source.size_bytes, policy)


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

    def is_same() -> bool:
        opened = _opened(keys, source, table_name, aad_prefix, or_allowed_plaintext=True)
        return _agree(opened, lambda: plaintext_footer(target))

    if skip_existing and is_there_already(source, target, is_same, overwrite=overwrite):
        return _result(source, target, source.size_bytes(), skipped=True)
    (opened,) = keys.open_files([source], table_name, aad_prefix, identities=identities)
    opened.refuse_denied(None)
    with open_source(source) as opened_source, plaintext_output(target, mode, overwrite=overwrite) as pending:
        data = as_verified(opened, opened_source)
        with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
            if opened.is_encrypted:
                file_encryption.decrypt_columns(data, sink, opened.footer, opened.deks, on_progress=on_progress)
            else:
                for offset in range(0, data.size_bytes, _COPIED_BYTES):
                    part = data.read_at(offset, min(_COPIED_BYTES, data.size_bytes - offset))
                    sink.write_at(offset, part)
                    if on_progress is not None:
                        on_progress(len(part))
    return _result(source, target, opened.tail.size_bytes, copied=not opened.is_encrypted)


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
    key_values: Mapping[str, str] | None = None,
) -> FileResult:
    """Encrypt an encrypted file with new keys; see `Keytools.rekey_file`."""
    refuse_same_file(source, target)

    def is_same() -> bool:
        opened = _opened(keys, source, table_name, aad_prefix)
        return _agree(opened, lambda: labelled_file(new_keys, target, new_table_name))

    if skip_existing and is_there_already(source, target, is_same, overwrite=overwrite, key_values=key_values):
        return _result(source, target, source.size_bytes(), skipped=True)
    opened = _opened(keys, source, table_name, aad_prefix)
    with open_source(source) as opened_source:
        data = as_verified(opened, opened_source)
        policy = policy_of(new_keys, new_table_name, opened.footer, (), key_values, opened.deks)
        with discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending:
            new = new_keys.new_file_keys(policy, target)
            with pending.open_sink() as sink, naming_place(source, opened.footer.columns):
                file_encryption.encrypt_opened(
                    data, sink, opened.footer, opened.deks, new.encryption, on_progress=on_progress
                )
            put_in_place(pending, new.key_materials)
        return _result(source, target, opened_source.size_bytes, policy)


@contextlib.contextmanager
def plaintext_output(target: FileLocation, mode: int | None, *, overwrite: bool) -> Iterator[PendingOutput]:
    """Write a file with decrypted values; without a mode, only its owner may read and write it."""
    if mode is not None and not target.is_local:
        raise OutputError(f"{target} is not on a local file system: it has no mode.", hint="Leave the mode out.")
    mode = PLAINTEXT_MODE if mode is None else mode
    with discarded_unless_done(pending_output(target, mode=mode, overwrite=overwrite)) as pending:
        yield pending
        put_in_place(pending, None)


def encrypt_pending(
    keys: KeyService,
    table_name: str | None,
    source: ByteSource,
    pending: PendingOutput,
    on_progress: Progress | None = None,
    *,
    threads: int = 2,
    folder_names: Collection[str] = (),
    key_values: Mapping[str, str] | None = None,
) -> tuple[KeyMaterials | None, TablePolicy]:
    """Encrypt a plaintext file into a pending output; return its key material, for `put_in_place`, and policy."""
    footer = file_encryption.read_plaintext_footer(source)
    policy = policy_of(keys, table_name, footer, folder_names, key_values)
    new = keys.new_file_keys(policy, pending.target)
    with pending.open_sink() as sink:
        file_encryption.encrypt_opened(
            source, sink, footer, {}, new.encryption, threads=threads, on_progress=on_progress
        )
    return new.key_materials, policy


def policy_of(
    keys: KeyService,
    table_name: str | None,
    footer: Footer,
    folder_names: Collection[str],
    key_values: Mapping[str, str] | None = None,
    deks: Mapping[tuple[str, ...], SecretBytes] | None = None,
) -> TablePolicy:
    """Return how a table encrypts a plaintext file, or with DEKs an encrypted one."""
    paths = [leaf.path for leaf in footer.leaves]
    labels = labels_of_footer(footer)
    if names := partition_names(folder_names):
        with_partitions = dict.fromkeys([*paths, *((name,) for name in names)])
        keys.policy(table_name, list(with_partitions), labels).check_partition_columns(names)
    policy = keys.policy(table_name, paths, labels, key_values)
    policy.refuse_folder_names(folder_names)
    return policy.with_column_values(footer, deks)


def refuse_same_file(source: FileLocation, target: FileLocation) -> None:
    """Raise `OutputError` if a file would be written onto itself."""
    if source.is_same_file(target):
        raise OutputError(f"{target} is the source itself.", hint="Choose another file for the output.")


def _result(
    source: FileLocation,
    target: FileLocation,
    source_bytes: int,
    policy: TablePolicy | None = None,
    *,
    skipped: bool = False,
    copied: bool = False,
) -> FileResult:
    return FileResult(
        str(source),
        str(target),
        source_bytes,
        target.size_bytes() if skipped else written_bytes([target]),
        skipped=skipped,
        copied=copied,
        plaintext_columns=() if policy is None else policy.plaintext_columns,
    )


# --- conversions that were done before ---


def plaintext_footer(location: FileLocation) -> Footer:
    """Read the footer of a plaintext file; raise `KeytoolsError` if the file is not one."""
    with open_source(location) as source:
        return read_footer(source, None)


def _decided_footer(keys: KeyService, table_name: str | None, location: FileLocation) -> Footer:
    """Read the footer of a plaintext file whose columns the table decides about: an old result may show more."""
    footer = plaintext_footer(location)
    keys.policy(table_name, [leaf.path for leaf in footer.leaves], labels_of_footer(footer))
    return footer


def _opened(
    keys: KeyService,
    location: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None = None,
    *,
    or_allowed_plaintext: bool = False,
) -> OpenedFile:
    """Open an encrypted file that matches its table, or a plaintext file if that is allowed here."""
    (opened,) = keys.open_files([location], table_name, aad_prefix)
    if not or_allowed_plaintext:
        opened.refuse_unencrypted()
    opened.refuse_denied(None)
    return opened


def labelled_file(keys: KeyService, location: FileLocation, table_name: str | None) -> OpenedFile:
    """Open an encrypted file, and refuse a plaintext column whose label in its own schema asks for a key."""
    opened = _opened(keys, location, table_name)
    footer, (name, table) = opened.footer, keys.configuration.select_table(table_name)
    if table.labels.field is not None:
        leaves = [column.path for column in footer.columns]
        columns = resolve_columns(
            keys.configuration, name, leaves, may_be_undecided=True, field_labels=labels_of_footer(footer)
        )
        for column in footer.columns:
            label = columns[column.path].label
            if column.encryption is ColumnEncryption.PLAINTEXT and label is not None and label.key is not None:
                raise ConfigurationError(
                    f"{location} is encrypted, but column {'.'.join(column.path)!r} is plaintext and has the "
                    f"label {label.text}.",
                    hint="Give the file new keys for its columns: `rekey`.",
                )
    return opened


def is_there_already(
    source: FileLocation,
    target: FileLocation,
    is_same: Callable[[], bool],
    *,
    overwrite: bool,
    key_values: Mapping[str, str] | None = None,
) -> bool:
    """Return whether a conversion was done: the target is newer than the source, and their footers agree."""
    if key_values:
        raise ConfigurationError(
            "files cannot be skipped with key_values: an existing file may be under the key of another value.",
            hint="Leave skip_existing out, or keep each value's files in a folder, with `from: partition`.",
        )
    info = target.info()
    if info.type != pafs.FileType.File:
        return False
    made, changed = info.mtime_ns, source.info().mtime_ns
    # Without times, the source may be newer.
    if made is not None and changed is not None and made >= changed and is_same():
        return True
    if not overwrite:
        raise OutputError(
            f"{target} exists already, and differs from what converting {source} makes now.",
            hint="Remove it, or give --overwrite to replace it.",
        )
    return False


def _agree(source: OpenedFile | Footer, open_target: Callable[[], OpenedFile | Footer]) -> bool:
    """Return whether two files agree in schema, rows, and metadata and statistics of each chunk; not in values."""
    try:
        target = open_target()
        return _description(source) == _description(target)
    except (KmsError, ColumnAccessDeniedError):
        raise
    except KeytoolsError:
        return False


def _shows_the_same(keys: KeyService, footer: Footer, target: FileLocation, table_name: str | None) -> bool:
    """Return whether an encrypted file shows without keys what encrypting the source would make."""
    # The comparison covers algorithm, AAD prefix and the footer's master key; with a plaintext footer also schema,
    # rows, and which column is under which key. Nothing is authenticated: anyone may have written the target.
    check, retriever = keys.table_check(table_name), FileKeyRetriever(keys.kms_keys(), keys.data_keys, target)
    assert check is not None
    try:
        with open_source(target) as opened:
            envelope = read_envelope(opened)
        is_plaintext_footer = envelope.mode is FooterMode.PLAINTEXT_FOOTER
        if envelope.mode is FooterMode.UNENCRYPTED or is_plaintext_footer != check.settings.plaintext_footer:
            return False
        check_footer_key(check, str(target), envelope, retriever)
        envelope.file_aads(keys.expected_aad_prefix(target, table_name, None, envelope.aad_prefix))
        visible = envelope.unverified_footer()
        if visible is not None:
            check_column_keys(check, str(target), visible, retriever)
    except KeytoolsError:
        return False
    return visible is None or _shape(visible) == _shape(footer)


def _shape(footer: Footer) -> tuple[object, ...]:
    return footer.metadata.num_rows, footer.leaves, [group.num_rows for group in footer.row_groups]


def _description(of: OpenedFile | Footer) -> tuple[object, ...]:
    footer, deks = (of.footer, of.deks) if isinstance(of, OpenedFile) else (of, {})
    chunks = footer.column_metadata(deks)
    return *_shape(footer), {place: _of_chunk(metadata) for place, metadata in chunks.items()}


def _of_chunk(metadata: ColumnMetaData) -> bytes:
    """Return the metadata of a chunk without offsets and lengths, which encryption changes."""
    rest = metadata.shallow_copy()
    rest.total_uncompressed_size = rest.total_compressed_size = rest.data_page_offset = 0
    rest.index_page_offset = rest.dictionary_page_offset = rest.bloom_filter_offset = None
    rest.bloom_filter_length = None
    return rest.serialise()


# --- the files of a folder ---


@dataclass(frozen=True)
class PlannedFile:
    """A file to convert; `path_in_folder` is relative to the mirrored folder, or the name of the only source."""

    source: FileLocation
    target: FileLocation
    size_bytes: int
    path_in_folder: str


@dataclass(frozen=True)
class FilePlan:
    """The files to convert, and others, each sorted by path; `unseen` entries may hide files to convert."""

    source_is_folder: bool
    files: tuple[PlannedFile, ...]
    left_out: tuple[LeftOut, ...] = ()
    unseen: tuple[Unseen, ...] = ()

    @property
    def paths_in_folder(self) -> list[str]:
        """`path_in_folder` of each file."""
        return [file.path_in_folder for file in self.files]

    @property
    def size_bytes(self) -> int:
        """Total length of the sources."""
        return sum(file.size_bytes for file in self.files)


def plan_files(source: FileLocation, target: FileLocation, *, overwrite: bool = False) -> FilePlan:
    """Plan the conversion of a file, or of a folder that the target will mirror; nothing is written."""
    # With `overwrite`, the target may exist; files without a counterpart in the source stay in it.
    if not file_or_folder(source).is_file:
        return _plan_folder(source, target, overwrite)
    refuse_same_file(source, target)
    check_target(target, overwrite=overwrite)
    return FilePlan(False, (PlannedFile(source, target, source.size_bytes(), source.name),))


def _plan_folder(source: FileLocation, target: FileLocation, overwrite: bool) -> FilePlan:
    _check_target_folder(source, target, overwrite=overwrite)
    found = sorted(data_set(source, into_passed_over=True), key=lambda entry: entry.location.path)
    parquet_files = [entry for entry in found if isinstance(entry, ParquetFile)]
    paths = [file.location.path_within(source) for file in parquet_files]
    files = tuple(
        PlannedFile(file.location, target.below(path), file.size_bytes, path)
        for file, path in zip(parquet_files, paths, strict=True)
    )
    if target.is_local:
        root = PurePosixPath(_real_path(target))
        for file in files:
            if not PurePosixPath(_real_path(file.target)).is_relative_to(root):
                raise OutputError(
                    f"{file.target} is not written: a link leads out of the folder {target}.",
                    hint="Remove the link, or name another folder.",
                )
    if target.filesystem == source.filesystem:
        sources = {_real_path(file.source) for file in files}
        for file in files:
            if _real_path(file.target) in sources:
                raise OutputError(
                    f"{file.target} would be overwritten, and is itself a source.", hint="Name another folder."
                )
    return FilePlan(
        True,
        files,
        tuple(entry for entry in found if isinstance(entry, LeftOut)),
        tuple(entry for entry in found if isinstance(entry, Unseen)),
    )


def _check_target_folder(source: FileLocation, target: FileLocation, *, overwrite: bool) -> None:
    # Files that are named one by one may be in the same folder as the target.
    if target.filesystem == source.filesystem and not source.only:
        ours, theirs = PurePosixPath(_real_path(target)), PurePosixPath(_real_path(source))
        if ours == theirs:
            raise OutputError(f"{target} is the source itself.", hint="Choose another folder for the output.")
        if ours.is_relative_to(theirs):
            raise OutputError(f"{target} is inside the source {source}.", hint="Name a folder outside of it.")
    found = target.info()
    if found.type == pafs.FileType.NotFound:
        return
    if found.type != pafs.FileType.Directory:
        what = "s are several" if source.only else " is a folder"
        raise OutputError(f"{target} is a file, and the source{what}.", hint="Name a folder.")
    # Empty folders may be left from a failed run.
    if not overwrite and next(all_files(target), None) is not None:
        raise OutputError(
            f"the folder {target} is not empty.",
            hint="Name another one, give --skip-existing to continue an interrupted run, or --overwrite to "
            "replace files of the same names in it.",
        )


def _real_path(location: FileLocation) -> str:
    """Return the path with links resolved, as far as it exists."""
    return real_location(location).path if location.is_local else location.path.rstrip("/")
