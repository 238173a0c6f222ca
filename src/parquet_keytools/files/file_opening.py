"""Files opened: footers authenticated and keys fetched, for all files together, each held against its table."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterColumn, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    KEY_REFUSALS,
    DecryptionError,
    FileChangedError,
    KeyMaterialError,
    KeyNotAvailableError,
    KeytoolsError,
    NotEncryptedError,
    TableMismatchError,
)
from parquet_keytools.files.opened_file import OpenedFile, VerifiedTail, name_place, naming_place
from parquet_keytools.files.table_check import KeySource, SeenColumn, TableCheck, seen_key
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import DataKeys, FileKeyRetriever, KmsKeys
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source

_log = logging.getLogger(__name__)

WantedColumns = Callable[[Sequence[FooterColumn]], Sequence[FooterColumn]]
"""Says which of a file's columns will be read."""

_CONCURRENT_FILES = 16
"""How many footers are read at a time; each takes two reads, which on an object store is mostly waiting."""

_FAST_SECONDS = 0.001
_MOST_SECONDS = 0.02
"""Local footers are read one after another as long as they do not take longer than this: together, and each."""


def open_files(
    locations: Sequence[FileLocation],
    kms_keys: KmsKeys,
    data_keys: DataKeys,
    *,
    aad_prefix_of: Callable[[FileLocation, bytes | None], AadPrefix] = lambda _, stored: None,
    table_check: TableCheck | None = None,
    allow_plaintext: bool = False,
    allow_ctr: bool = True,
    wanted: WantedColumns = tuple,
    holds_metadata: bool = False,
) -> list[OpenedFile]:
    """Open files: read and authenticate their footers, and get the keys of the columns that are wanted.

    The KMS is asked twice for all files together: for the footer keys, then for those of columns. Before each, all
    files are compared with their table: one that is of another table gets nothing unwrapped.

    Args:
        locations: The files.
        kms_keys: Collects what the KMS answers.
        data_keys: The data keys that the caller manages.
        aad_prefix_of: Returns the AAD prefix that is expected of a file that stores this one; None takes that.
        table_check: What compares them with their table; None where there is none.
        allow_plaintext: Whether a file that is not encrypted may be among them.
        allow_ctr: Whether a file may be among them whose page data is not authenticated.
        wanted: Which columns of a file will be read: no key is fetched for others, and they cannot be read.
        holds_metadata: Whether metadata of all chunks is kept once it is decrypted, to be used at once.

    Raises:
        NotEncryptedError: A file is not encrypted.
        FileChangedError: A file was replaced just now.
        TableMismatchError: A file is not what its table says.
        ConfigurationError: The table has two keys for a column of a file.
        DecryptionError: A file says AES-CTR and must not, or was written with AES-GCM; or a footer does not
            authenticate.
        KeytoolsError: A footer cannot be read; columns that cannot be are in `OpenedFile.denied`.
    """
    with ThreadPoolExecutor(min(_CONCURRENT_FILES, max(1, len(locations)))) as pool:
        envelopes = _read_envelopes(locations, pool)
        retrievers = [FileKeyRetriever(kms_keys, data_keys, location) for location in locations]
        for location, (envelope, _) in zip(locations, envelopes, strict=True):
            if envelope.mode is FooterMode.UNENCRYPTED and not allow_plaintext:
                raise NotEncryptedError(
                    f"{location} is not encrypted.",
                    hint="If that is intended, set `plaintext_files: allow` under `reading`.",
                )
            if not allow_ctr:
                refuse_ctr(envelope, str(location))
        for location, retriever, (envelope, tail) in zip(locations, retrievers, envelopes, strict=True):
            if table_check is not None:
                with _of_this_file(location, tail):
                    check_footer_key(table_check, str(location), envelope, retriever)
        # What is wrong with the AAD is found before the KMS is asked.
        prefixes = [
            _checked_prefix(envelope, aad_prefix_of(location, envelope.aad_prefix))
            for location, (envelope, _) in zip(locations, envelopes, strict=True)
        ]
        kms_keys.fetch(
            material
            for retriever, (envelope, _) in zip(retrievers, envelopes, strict=True)
            for material in _materials(retriever, [envelope.key_metadata])
        )
        footers = []
        for location, retriever, (envelope, tail), prefix in zip(
            locations, retrievers, envelopes, prefixes, strict=True
        ):
            with _of_this_file(location, tail), naming_place(location):
                footers.append(_open_footer(envelope, retriever, prefix))
        for location, retriever, footer, (_, tail) in zip(locations, retrievers, footers, envelopes, strict=True):
            if table_check is not None:
                with _of_this_file(location, tail):
                    check_column_keys(table_check, str(location), footer, retriever)
        columns = [
            footer.columns if footer.mode is FooterMode.UNENCRYPTED else wanted(footer.columns)
            for footer in footers
        ]
        kms_keys.fetch(
            material
            for retriever, these in zip(retrievers, columns, strict=True)
            for material in _materials(retriever, [column.key_metadata for column in _with_own_key(these)])
        )
        files = [
            _open_columns(
                OpenedFile(location, footer, tail, retriever, kms_keys, {}, {}), these, table_check, holds_metadata
            )
            for location, footer, these, retriever, (_, tail) in zip(
                locations, footers, columns, retrievers, envelopes, strict=True
            )
        ]
        stating_ctr = [opened for opened in files if opened.footer.algorithm is Algorithm.AES_GCM_CTR_V1]
        list(pool.map(_check_algorithm, stating_ctr))
        return files


def _read_envelopes(
    locations: Sequence[FileLocation], pool: ThreadPoolExecutor
) -> list[tuple[FooterEnvelope, VerifiedTail]]:
    """Read the footers of files: on this thread if that is fast, else many at a time.

    A footer on a local disk is read sooner than it is handed to another thread. A local path may lead to a server
    nevertheless, and there it is mostly waiting.
    """
    envelopes: list[tuple[FooterEnvelope, VerifiedTail]] = []
    if all(location.is_local for location in locations):
        start = time.monotonic()
        for location in locations:
            envelopes.append(_read_envelope(location))
            if time.monotonic() - start > _MOST_SECONDS + len(envelopes) * _FAST_SECONDS:
                break
    return envelopes + list(pool.map(_read_envelope, locations[len(envelopes) :]))


def _read_envelope(location: FileLocation) -> tuple[FooterEnvelope, VerifiedTail]:
    with open_source(location) as source:
        envelope = read_envelope(source)
        return envelope, VerifiedTail.of(envelope)


def refuse_ctr(envelope: FooterEnvelope, path: str) -> None:
    """Raise `DecryptionError` if page data of a file is not authenticated, or the file says so."""
    if envelope.algorithm is Algorithm.AES_GCM_CTR_V1:
        raise DecryptionError(
            f"{path} is encrypted with AES_GCM_CTR_V1, and the configuration rejects such files.",
            hint="If page data need not be authenticated, set `ctr_files: allow` under `reading`.",
        )


def check_footer_key(table_check: TableCheck, path: str, envelope: FooterEnvelope, keys: KeySource) -> None:
    """Refuse an encrypted file whose footer is not under its table's key; to be called before that is unwrapped.

    Raises:
        TableMismatchError: It is not, or the algorithm is not the table's.
        KeyMaterialError: Its key metadata is not valid.
    """
    if envelope.algorithm is not None:
        key = seen_key(keys, envelope.key_metadata, None)
        table_check.refuse(path, table_check.footer_mismatches(envelope.algorithm, key))


def check_column_keys(table_check: TableCheck, path: str, footer: Footer, keys: KeySource) -> None:
    """Refuse an encrypted file whose columns are not under their table's keys; the footer is authentic by now.

    To be called before the keys of columns are unwrapped. A column whose key metadata is not valid is passed over:
    it cannot be read.

    Raises:
        TableMismatchError: They are not, or one is in plaintext that the table has under a key.
        ConfigurationError: The table has two keys for one of the columns.
    """
    if footer.mode is FooterMode.UNENCRYPTED or not footer.row_groups:
        return
    seen = []
    for column in footer.columns:
        key = None
        if column.encryption is ColumnEncryption.COLUMN_KEY:
            try:
                key = seen_key(keys, column.key_metadata, column.path)
            except KeytoolsError:
                continue
        seen.append(SeenColumn(column.path, column.encryption, key))
    footer_key = seen_key(keys, footer.key_metadata, None)
    table_check.refuse(path, table_check.column_mismatches(footer_key, seen))


@contextlib.contextmanager
def _of_this_file(location: FileLocation, tail: VerifiedTail) -> Iterator[None]:
    """Tell a file that is wrong from one that was replaced while its key material was looked for."""
    try:
        yield
    except (KeyMaterialError, TableMismatchError):
        _check_still_there(location, tail)
        raise


def _check_still_there(location: FileLocation, tail: VerifiedTail) -> None:
    """Raise `FileChangedError` if a file is another one now: then its key material was found, not that of this."""
    try:
        _, now = _read_envelope(location)
        is_there = now == tail
    except (KeytoolsError, OSError):
        is_there = False
    if not is_there:
        raise FileChangedError(
            "the file was replaced while its keys were fetched.", path=str(location), hint="Open it again."
        )


def _materials(retriever: FileKeyRetriever, all_key_metadata: Iterable[bytes | None]) -> Iterator[KeyMaterial]:
    """Yield the key materials among key metadata; what is wrong is reported where its key is needed."""
    for key_metadata in all_key_metadata:
        try:
            material = retriever.material(key_metadata)
        except KeytoolsError:
            continue
        if material is not None:
            yield material


def _checked_prefix(envelope: FooterEnvelope, aad_prefix: AadPrefix) -> AadPrefix:
    """Return the AAD prefix that is expected, if the file may have it."""
    if envelope.mode is not FooterMode.UNENCRYPTED:
        envelope.file_aads(aad_prefix)
    return aad_prefix


def _open_footer(envelope: FooterEnvelope, retriever: FileKeyRetriever, aad_prefix: AadPrefix) -> Footer:
    if envelope.mode is FooterMode.UNENCRYPTED:
        return envelope.open(None)
    if envelope.algorithm is Algorithm.AES_GCM_CTR_V1:
        _log.warning(
            "%s is encrypted with AES_GCM_CTR_V1: changes to its page data would go undetected", envelope.path
        )
    return envelope.open(retriever.footer_dek(envelope.key_metadata), aad_prefix)


def _with_own_key(columns: Iterable[FooterColumn]) -> list[FooterColumn]:
    return [column for column in columns if column.encryption is ColumnEncryption.COLUMN_KEY]


def _open_columns(
    opened: OpenedFile, wanted: Sequence[FooterColumn], table_check: TableCheck | None, holds_metadata: bool
) -> OpenedFile:
    footer = opened.footer
    not_wanted: frozenset[tuple[str, ...]] = frozenset()
    if len(wanted) < len(footer.columns):
        kept = {column.ordinal for column in wanted}
        not_wanted = frozenset(column.path for column in footer.columns if column.ordinal not in kept)
        reason = KeyNotAvailableError("it was not asked for when the file was opened.")
        opened.denied.update(dict.fromkeys(not_wanted, reason))
    columns = _with_own_key(wanted)
    outcomes = opened.retriever.column_deks([(column.path, column.key_metadata) for column in columns])
    refused = frozenset(
        column.path
        for column, outcome in zip(columns, outcomes, strict=True)
        if isinstance(outcome, KEY_REFUSALS)
        and table_check is not None
        and _is_refused(opened, column, outcome, table_check)
    )
    for column, outcome in zip(columns, outcomes, strict=True):
        if isinstance(outcome, KeytoolsError):
            opened.denied[column.path] = outcome
        else:
            opened.deks[column.path] = outcome
    # Arrow aborts the process on column metadata that does not decrypt: it must not be the first to try.
    for column in wanted:
        if column.path in opened.denied:
            continue
        try:
            footer.check_column(column, opened.deks.get(column.path), holds_metadata=holds_metadata)
        except KeytoolsError as error:
            name_place(error, opened.location, footer.columns)
            opened.denied[column.path] = error
            opened.deks.pop(column.path, None)
    return dataclasses.replace(opened, refused=refused, not_wanted=not_wanted)


def _is_refused(opened: OpenedFile, column: FooterColumn, error: KeytoolsError, table_check: TableCheck) -> bool:
    """Return whether the KMS refuses the very key that the table names for a column, and not one in its place."""
    material = opened.retriever.material(column.key_metadata)
    key = seen_key(opened.retriever, column.key_metadata, column.path)
    paths = [leaf.path for leaf in opened.footer.columns]
    return (
        material is not None
        and table_check.names_key(column.path, paths, key)
        and opened.kms_keys.refuses_key(material, error)
    )


def _check_algorithm(opened: OpenedFile) -> None:
    """Refuse a file that says AES-CTR and was written with AES-GCM; pyarrow would believe it."""
    with open_source(opened.location) as source, naming_place(opened.location, opened.footer.columns):
        check_stated_algorithm(source, opened.footer, opened.deks)
