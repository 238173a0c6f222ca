"""Rotation of master keys: which keys change, and how the keys of many files are re-wrapped together.

`plan_rotation` checks the request before any file is touched. `rotate_data_set` then takes batches of files:

1. The key of each footer is re-wrapped, or unwrapped if it stays. Its DEK authenticates the footer. Before
   that, nothing in the footer is trusted.
2. The keys of columns that the authentic footer refers to are re-wrapped or unwrapped. Metadata of each column
   proves its DEK. All other entries of a key material file belong to no column.
3. Each file is replaced, with all of its keys or none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parquet_keytools.config.document import did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import check_moves
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.encryption.aad import FOOTER_PLACE, AadPrefix
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    ConfigurationError,
    FileChangedError,
    KeytoolsError,
    KmsError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    OutputError,
    TableMismatchError,
    value_or_raise,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import check_column_keys, check_footer_key
from parquet_keytools.files.placement import replacement
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_ENCRYPTED_FOOTER,
    TRAILER_LENGTH,
    ByteSource,
    with_trailer,
)
from parquet_keytools.format.structs import (
    ColumnCryptoMetaData,
    EncryptionWithColumnKey,
    FileCryptoMetaData,
    FileMetaData,
    Record,
    RowGroup,
)
from parquet_keytools.format.thrift import Entry
from parquet_keytools.keys.key_wrapping import dek_of
from parquet_keytools.keys.material_store import MAX_FILE_BYTES
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.data_set_run import Outcomes, RunOptions, change_data_set, outcome_of
from parquet_keytools.rotation.file_keys import (
    AadPrefixOf,
    ExternalMaterial,
    FileKey,
    FileKeys,
    KnownVersions,
    MasterKeyVersions,
    Rewrapped,
    Rewrapper,
    RewrapTask,
    Tail,
    WrappedKey,
    changed_while_rotated,
    check_unchanged,
    is_older_version,
    outcomes,
    read_batch,
    step,
    unless_changed,
)
from parquet_keytools.rotation.report import FileRotation, KeyChange, RotationOutcome, RotationReport
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, ends_with, open_source, read_whole
from parquet_keytools.storage.outputs import LocalSink

# --- the plan ---


@dataclass(frozen=True)
class RotationPlan:
    """The arguments of `Keytools.rotate` with identifiers of master keys, and the versions that were looked up.

    It has no secrets, and is pickled for the tasks of a cluster.
    """

    moves: Mapping[str, str] = field(default_factory=dict)
    only_master_keys: frozenset[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    dry_run: bool = False
    table_name: str | None = None
    aad_prefix: str | bytes | None = None
    known_versions: KnownVersions = field(default_factory=dict)

    def __post_init__(self) -> None:
        ambiguous = sorted(new for new in self.moves.values() if "%" in new)
        if ambiguous:
            # Readers decode identifiers in key material, and would look for another master key.
            raise ConfigurationError(f"the identifier {ambiguous[0]!r} of a master key must not contain `%`.")

    @property
    def named(self) -> frozenset[str]:
        """The master keys that the request names; empty if it is about all."""
        return frozenset(self.moves) | (self.only_master_keys or frozenset())

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change."""
        if self.only_master_keys is not None:
            return master_key_id in self.only_master_keys
        return not self.moves or master_key_id in self.moves

    def new_master_key_id(
        self,
        master_key_id: str,
        *,
        version: str | None,
        current_version: Callable[[str], str | None],
        has_kek: bool,
    ) -> str | None:
        """Return the master key to re-wrap a key with, or None if the key stays as it is.

        `version` wraps it now, and is None if that is unknown. `current_version` is called only if it matters.
        """
        if not self.concerns(master_key_id):
            return None
        target = self.moves.get(master_key_id, master_key_id)
        if self.older_than is not None:
            return target if version is None or is_older_version(version, self.older_than) else None
        certain = target != master_key_id or (self.new_keks and has_kek)
        if certain or version is None:
            return target
        return None if version == current_version(master_key_id) else target


def plan_rotation(
    keys: KeyService,
    *,
    moves: Mapping[str, str] | None = None,
    only_master_keys: Collection[str] | None = None,
    **options: Any,
) -> RotationPlan:
    """Check the arguments of `Keytools.rotate`, and raise its errors; `options` are other fields of the plan."""
    if only_master_keys is not None:
        list_of_names("only_master_keys", only_master_keys)
    configuration, kms = keys.configuration, keys.kms
    wanted = configuration.rotation.moves if moves is None else moves
    if kms is None:
        raise ConfigurationError(
            "there are no master keys to rotate: the configuration has no KMS.",
            hint="Add a `kms:` section to the configuration.",
        )
    if moves is None:
        check_moves(configuration, kms.master_key_ids())
    identifiers = {
        master_key_id(configuration, old): master_key_id(configuration, new) for old, new in wanted.items()
    }
    if len(identifiers) < len(wanted):
        raise ConfigurationError("two names of master keys to be moved mean the same one.", hint="Name it once.")
    only = None
    if only_master_keys is not None:
        only = frozenset(master_key_id(configuration, key) for key in only_master_keys)
    plan = RotationPlan(moves=identifiers, only_master_keys=only, **options)
    trust_master_keys(plan, kms)
    versions = MasterKeyVersions(kms)
    _check_known(kms, versions, plan.named)
    for target in sorted(set(plan.moves.values())):
        description = versions.describe(target)
        if description is not None and not description.enabled:
            backend = kms.parts(target)[0].backend
            raise MasterKeyDisabledError(backend=backend, operation="wrap", master_key_id=target)
    check_names(plan, versions)
    _warn_of_readers(keys, plan)
    return replace(plan, known_versions=versions.known)


def master_key_id(configuration: Configuration, key: str) -> str:
    """Return the identifier of a master key, given the identifier or its name in the configuration."""
    if key in configuration.data_keys and key not in configuration.master_keys:
        raise ConfigurationError(
            f"{key!r} is a data key: a rotation changes master keys.", hint="Use rekey for new data keys."
        )
    return configuration.master_key_id(key)


def trust_master_keys(plan: RotationPlan, kms: KmsClient) -> None:
    """Trust the master keys that the request names: the user vouches for them."""
    kms.trust_also({*plan.named, *plan.moves.values()})


def _check_known(kms: KmsClient, versions: MasterKeyVersions, master_key_ids: Collection[str]) -> None:
    """Refuse master keys that do not exist: a name with a typing error would rotate nothing."""
    known = kms.master_key_ids()
    for wanted in sorted(master_key_ids):
        if known is not None and wanted not in known:
            hint = did_you_mean(wanted, known) or one_of(known)
            raise ConfigurationError(f"the KMS has no master key {wanted!r}.", hint=hint)
        if known is None:
            try:
                versions.describe(wanted)
            except MasterKeyNotFoundError as error:
                raise ConfigurationError(str(error)) from None


def check_names(plan: RotationPlan, versions: MasterKeyVersions) -> None:
    """Refuse moves that contradict each other because two names mean one master key."""
    for old, target in sorted(plan.moves.items()):
        other = versions.as_named(old, frozenset(plan.moves.keys() - {old}))
        if plan.moves[other] != target:
            raise ConfigurationError(
                f"{old!r} and {other!r} are one master key, and are to be moved to different ones.",
                hint="Name one target for both.",
            )
        # A repeated run could not distinguish keys that were moved to it from keys to be moved away.
        # An alias may be moved to its own key: that only changes the stored name.
        next_one = versions.as_named(target, frozenset(plan.moves))
        if plan.moves.get(next_one, target) != target:
            raise ConfigurationError(
                f"the master key {next_one!r} is to be moved and is the target of a move, as {target!r}.",
                hint="Do these moves in separate rotations, one after the other.",
            )


def _warn_of_readers(keys: KeyService, plan: RotationPlan) -> None:
    """Warn of moves after which tables would refuse their own files."""
    tables = keys.configuration.tables if plan.table_name is None else [plan.table_name]
    for name in sorted(tables):
        check = TableCheck(keys.configuration, name)
        for old, new in sorted(plan.moves.items()):
            if check.loses_by_move(old, new):
                # Shown at the call of `Keytools.rotate`.
                warnings.warn(
                    f"this configuration cannot read files of the table {name!r} after they are moved from the "
                    f"master key {old!r} to {new!r}, because the table does not name the new key. Add the move "
                    "under `rotation: {moves: ...}`, here and in the configurations of all readers, before you "
                    "rotate.",
                    ConfigurationWarning,
                    stacklevel=4,
                )


def prefix_of(
    keys: KeyService, table_name: str | None, aad_prefix: str | bytes | None, *, opens_to_others: bool = False
) -> AadPrefixOf:
    """Return a function that returns the AAD prefix that a file must have.

    `opens_to_others` says whether other people than before may unwrap the keys afterwards.
    """
    is_one_table = table_name is not None or len(keys.configuration.tables) == 1
    is_strict = opens_to_others and is_one_table

    def expected(location: FileLocation, stored: bytes | None) -> AadPrefix:
        if stored is not None and aad_prefix is None and not is_strict:
            # The rotation opens nothing to others, and a file with another prefix must not be left behind.
            return None
        return keys.expected_aad_prefix(location, table_name, aad_prefix, stored)

    return expected


# --- the run ---


def rotate_data_set(path: FileLocation, rewrapping: Rewrapping, options: RunOptions) -> RotationReport:
    """Rotate the master keys of a file, or of all Parquet files under a folder."""
    report = RotationReport(dry_run=rewrapping.plan.dry_run)
    change_data_set(path, rewrapping.change, report, options)
    report.kms_calls = rewrapping.rewrapper.calls + rewrapping.versions.calls
    if report.dry_run:
        # Master keys were described in the dry run, too.
        report.expected_kms_calls = rewrapping.rewrapper.expected_calls + rewrapping.versions.calls
    return report


class Rewrapping:
    """Re-wraps the keys of files as planned, one run at a time, in batches for which the KMS is called together.

    A rotation to a new version of the same master keys opens nothing to others, and takes every file. A move does:
    a file of another table under the same master key, copied into the folder, would become readable to users of
    the new one. Only files of the configuration's tables are moved.
    """

    def __init__(self, keys: KeyService, plan: RotationPlan, rewrapper: Rewrapper | None = None) -> None:
        assert keys.kms is not None
        self.plan = plan
        self.versions = MasterKeyVersions(keys.kms, plan.known_versions)
        self.rewrapper = rewrapper or Rewrapper(keys.kms, new_keks=plan.new_keks, dry_run=plan.dry_run)
        self._kms = keys.kms
        self._aad_prefix_of = prefix_of(keys, plan.table_name, plan.aad_prefix, opens_to_others=bool(plan.moves))
        self._data_keys = keys.data_keys
        self._table_checks: list[TableCheck] = []
        if plan.moves:
            names = [plan.table_name] if plan.table_name is not None else sorted(keys.configuration.tables)
            # Files that an earlier run moved belong to the table, too.
            self._table_checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]
        # Results for the current batch.
        self._rewrapped: dict[RewrapTask, Rewrapped | KmsError] = {}
        self._unwrapped: dict[WrappedKey, SecretBytes | KmsError] = {}

    def change(self, pool: Executor, locations: Iterator[FileLocation]) -> Outcomes:
        """Re-wrap the keys of files, batch by batch; see `ChangeFiles`."""
        while files := read_batch(pool, locations, self._data_keys, self._kms):
            self._rewrapped, self._unwrapped = {}, {}
            # AAD and table are checked before any key is unwrapped.
            self._ask_footers(step(pool, self._check, files))
            self._ask_columns(step(pool, self._open, files))
            names = [file.location for file in files]
            finished = outcomes(pool, self._finish, files)
            # Parsed footers take much memory.
            files.clear()
            for location, outcome in zip(names, finished, strict=True):
                yield location, outcome if isinstance(outcome, FileRotation) else outcome_of(location, outcome)

    # --- keys ---

    def _concerns(self, held: FileKey) -> bool:
        """Whether keys under this master key may change, whichever of its names a file uses."""
        return self.plan.concerns(self.versions.as_named(held.wrapped_key.master_key_id, self.plan.named))

    def _is_planned(self, held: FileKey) -> bool:
        """Decide whether a key changes. What the file says of it is proven when it is unwrapped."""
        old, has_kek = held.wrapped_key, held.material.double_wrapping
        named = self.versions.as_named(old.master_key_id, self.plan.named)
        target = self.plan.new_master_key_id(
            named, version=self.versions.of(old), current_version=self.versions.current, has_kek=has_kek
        )
        if target is None:
            return False
        held.task = RewrapTask(old, old.master_key_id if target == named else target, has_kek)
        return True

    def _refuse_other_tables(self, file: FileKeys, footer: Footer | None = None) -> None:
        """Raise the first `TableMismatchError` if a file is of no table."""
        mismatches = []
        for table in self._table_checks:
            try:
                check_footer_key(table, str(file.location), file.envelope, file)
                if footer is not None:
                    check_column_keys(table, str(file.location), footer, file)
            except TableMismatchError as error:
                mismatches.append(error)
            else:
                return
        if mismatches:
            raise mismatches[0]

    def _check(self, file: FileKeys) -> None:
        file.expect_prefix(self._aad_prefix_of)
        self._refuse_other_tables(file)

    def _ask_footers(self, files: Sequence[FileKeys]) -> None:
        """Re-wrap the footers' keys, or unwrap them if they stay or nothing is to be changed."""
        staying = []
        for file in files:
            held = file.footer_key
            if held is not None and (not self._is_planned(held) or self.plan.dry_run):
                staying.append(held.wrapped_key)
        self._ask_kms(files, staying)

    def _ask_columns(self, files: Sequence[FileKeys]) -> None:
        """Re-wrap or unwrap the keys of columns, except internal keys that an authentic footer vouches for.

        An authentic footer is as the writer, or the last rotation, left it: internal key material that names a
        master key outside this rotation is trusted.
        """
        staying = []
        for file in files:
            for held in file.referenced:
                if held is file.footer_key or self._is_planned(held):
                    continue
                if held.reference is not None or self._concerns(held):
                    staying.append(held.wrapped_key)
                    held.is_proven = True
        self._ask_kms(files, staying)

    def _ask_kms(self, files: Sequence[FileKeys], staying: Sequence[WrappedKey]) -> None:
        tasks = dict.fromkeys(held.task for file in files for held in file.changing if held.task is not None)
        if self.plan.dry_run:
            # Keys of footers are unwrapped in place of being re-wrapped.
            changing = {task.old for task in tasks}
            self.rewrapper.expect([*tasks, *(key for key in staying if key not in changing)])
        self._rewrapped.update(self.rewrapper.rewrap(task for task in tasks if task not in self._rewrapped))
        self._unwrapped.update(self.rewrapper.unwrap(key for key in staying if key not in self._unwrapped))

    def _open(self, file: FileKeys) -> None:
        """Authenticate the footer."""
        if not file.is_encrypted:
            # Encrypted columns would contradict the footer, which is an error.
            file.open(None)
            return
        held = file.footer_key
        if held is not None and held.task is not None and not self.plan.dry_run:
            footer_dek = dek_of(held.material, value_or_raise(self._rewrapped[held.task]).key)
        else:
            footer_dek = file.find_footer_dek(self._unwrapped)
        self._refuse_other_tables(file, file.open(footer_dek))

    def _new(self, file: FileKeys, held: FileKey) -> tuple[str, SecretBytes]:
        """Return the new key material of a key that changes, and its DEK."""
        if held.new is None:
            assert held.task is not None
            master_key_id = held.task.new_master_key_id
            written_id = self._kms.id_in_file(master_key_id, self._new_instance_id(file))
            instance_id = self._kms.instance_of(master_key_id) if self._kms.instances else None
            held.new = held.replaced(value_or_raise(self._rewrapped[held.task]), written_id, instance_id)
        return held.new

    def _new_instance_id(self, file: FileKeys) -> str | None:
        """Return the KMS that the footer names afterwards."""
        held = file.footer_key
        if held is None or held.task is None:
            return file.instance_id
        return self._kms.instance_of(held.task.new_master_key_id)

    def _new_texts(self, file: FileKeys) -> dict[FileKey, str]:
        """Return the new key material of the keys that change.

        Keys that stay may have to be named in another way: their identifiers begin with the name of their KMS
        where it is not the KMS of the footer.
        """
        texts = {held: self._new(file, held)[0] for held in file.changing}
        if texts and self._kms.instances:
            instance_id = self._new_instance_id(file)
            for held in file.referenced:
                written_id = self._kms.id_in_file(held.material.master_key_id, instance_id)
                if held not in texts and (text := held.renamed(written_id)) is not None:
                    texts[held] = text
        return texts

    # --- files ---

    def _finish(self, file: FileKeys) -> FileRotation:
        """Prove each DEK that is known with metadata of its column; replace all keys that change, or none."""
        for column, held in file.column_keys():
            if held.is_proven:
                file.prove(column, file.dek(held, self._unwrapped))
            elif held.task is not None and not self.plan.dry_run:
                file.prove(column, self._new(file, held)[1])
        path, changing, dropped = str(file.location), file.changing, file.dropped
        if not changing and not dropped:
            return self._unchanged(file)
        moves_footer = self._kms.instances and self._new_instance_id(file) != file.instance_id
        if moves_footer and len({held.reference is None for held in changing}) > 1:
            # After a crash between the two, either KMS would have some of the keys.
            raise OutputError(
                f"{path}: some of its keys are in the footer, and some in the key material file. Two files cannot "
                "be replaced in one step.",
                hint="Re-encrypt it with `rekey --in-place`, and repeat the rotation.",
            )
        number = "1 entry" if len(dropped) == 1 else f"{len(dropped)} entries"
        how = f"{number} of the key material file dropped that its footer does not refer to" if dropped else ""
        result = FileRotation(path, RotationOutcome.WOULD_ROTATE, self._changes(changing), how)
        if self.plan.dry_run:
            return result
        texts = self._new_texts(file)
        done: list[Replaced] = []
        external = {held.reference: text for held, text in texts.items() if held.reference is not None}
        if file.external is not None and (external or dropped):
            new = file.external.with_new(external, dropped)
            replace_external_material(file, file.external, new)
            done.append(("new key material file", len(new), 0))
        internal = {held.text: text.encode() for held, text in texts.items() if isinstance(held.text, bytes)}
        if internal:
            done.append(_replace_internal(file, internal))
        hows, written, copied = zip(*done, strict=True)
        return replace(
            result,
            outcome=RotationOutcome.ROTATED,
            how="; ".join(filter(None, [*hows, how])),
            bytes_written=sum(written),
            bytes_copied=sum(copied),
        )

    def _unchanged(self, file: FileKeys) -> FileRotation:
        why = ""
        if not file.is_encrypted:
            why = "not encrypted"
        elif not file.referenced:
            why = "data keys only"
        elif not any(self._concerns(held) for held in file.referenced):
            why = "none of the master keys"
        outcome = RotationOutcome.NOTHING_TO_ROTATE if why else RotationOutcome.ALREADY_CURRENT
        return FileRotation(str(file.location), outcome, how=why)

    def _changes(self, changing: Sequence[FileKey]) -> tuple[KeyChange, ...]:
        """Count the keys of a file by their changes."""
        versions = self.versions
        counts: Counter[tuple[str, str, str | None, str | None]] = Counter()
        for task in (held.task for held in changing):
            assert task is not None
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped):
                new_version = versions.of(WrappedKey(task.new_master_key_id, outcome.wrapped_key))
            else:
                new_version = versions.current(task.new_master_key_id)
            counts[task.old.master_key_id, task.new_master_key_id, versions.of(task.old), new_version] += 1
        changes = [KeyChange(*names, number) for names, number in counts.items()]
        return tuple(sorted(changes, key=lambda change: (change.master_key_id, change.version or "")))


def _replace_internal(file: FileKeys, metadata: Mapping[bytes, bytes]) -> Replaced:
    footer, dek, tail = file.footer, file.footer_dek, file.tail
    assert footer is not None
    assert dek is not None
    new = new_tail(tail, footer, metadata)
    return replace_tail(
        file.location,
        tail,
        new,
        lambda source: check_new_tail(source, tail.offset, new, dek, file.aad_prefix, footer, metadata),
    )


# --- a new tail ---


def footer_of(tail: bytes) -> bytes:
    """Return a tail without length and magic."""
    return tail[:-TRAILER_LENGTH]


def new_tail(tail: Tail, footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a tail with key metadata replaced; all other fields stay as they are.

    The footer's DEK encrypts or signs once more, with a fresh nonce. Rotations stay far below the limit of 2**32
    invocations (spec 4.1.4), so they are not counted. `footer` is not changed: `check_new_tail` compares with it.
    """
    assert footer.cipher is not None

    @functools.cache  # Usually the same in every row group.
    def changed(crypto: bytes) -> bytes:
        read, _ = ColumnCryptoMetaData.read(crypto)
        column = read.encryption_with_column_key
        if column is not None:
            column.key_metadata = _replaced(column.key_metadata, new_key_metadata)
        return read.serialise()

    metadata = footer.metadata.shallow_copy()
    metadata.row_groups = [
        row_group.with_chunks(
            [
                None if crypto is None else b"".join((before, changed(crypto), after))
                for before, crypto, after in row_group.cut_chunks()
            ]
        )
        for row_group in footer.row_groups
    ]
    if footer.mode is FooterMode.ENCRYPTED_FOOTER:
        crypto_metadata, _ = FileCryptoMetaData.read(footer_of(tail.data))
        crypto_metadata.key_metadata = _replaced(crypto_metadata.key_metadata, new_key_metadata)
        module = footer.cipher.encrypt(metadata.serialise(), FOOTER_PLACE)
        return with_trailer(crypto_metadata.serialise() + module, MAGIC_ENCRYPTED_FOOTER)
    metadata.footer_signing_key_metadata = _replaced(metadata.footer_signing_key_metadata, new_key_metadata)
    return with_trailer(footer.cipher.signed(metadata.serialise()), MAGIC)


def _replaced(key_metadata: bytes | None, new: Mapping[bytes, bytes]) -> bytes | None:
    return None if key_metadata is None else new.get(key_metadata, key_metadata)


# --- checks of a new file, before it replaces the old one ---


REFUSED_HINT = (
    "The file is as it was: it was changed while it was rotated, or this is a fault of parquet-keytools. Check it "
    "with `verify`, and rotate it again. If it conforms and is refused again, report that with this message."
)


@contextlib.contextmanager
def proving(what: str, path: str) -> Iterator[None]:
    """Read new bytes of a file as a reader does; `what` names them."""
    try:
        yield
    except (FileChangedError, OutputError):
        raise
    except KeytoolsError as error:
        # Its hint is for readers of the file, which is as it was.
        reason = str(error).removesuffix(error.hint).removeprefix(f"{path}: ").rstrip(" .")
        raise OutputError(f"{path}: {what} cannot be read: {reason}.", hint=REFUSED_HINT) from error


def check_new_tail(
    source: ByteSource,
    offset: int,
    tail: bytes,
    footer_dek: SecretBytes,
    aad_prefix: AadPrefix,
    old: Footer,
    new_key_metadata: Mapping[bytes, bytes],
) -> None:
    """Read a file with a new tail as a reader does, with the DEK that the new key material leads to.

    Its footer is compared with the old one: what `new_tail` made of that is no proof.
    """
    check_read_back(source, offset, tail)
    with proving("the new footer", source.path):
        new = read_envelope(source).open(footer_dek, aad_prefix)
    if _content(new, {}) != _content(old, new_key_metadata):
        raise OutputError(f"{source.path}: the new footer does not match the file.", hint=REFUSED_HINT)


def check_read_back(source: ByteSource, offset: int, written: bytes) -> None:
    """Raise `OutputError` if a file does not end, from an offset on, with what was written there."""
    if not ends_with(source, offset, written):
        raise OutputError(f"{source.path}: what was written does not read back.", hint="Check the disk.")


def _content(footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> tuple[object, ...]:
    """Return all that a footer says, with key metadata replaced."""
    replaced = [FileMetaData.row_groups.field_id]
    crypto_metadata: dict[int, Entry] = {}
    if footer.mode is FooterMode.PLAINTEXT_FOOTER:
        replaced.append(FileMetaData.footer_signing_key_metadata.field_id)
    else:
        read, _ = FileCryptoMetaData.read(footer_of(footer.envelope.tail))
        crypto_metadata = _without(read, FileCryptoMetaData.key_metadata.field_id)

    @functools.cache
    def of_crypto(crypto: bytes | None) -> object:
        if crypto is None:
            return None
        read, _ = ColumnCryptoMetaData.read(crypto)
        column = read.encryption_with_column_key
        if column is None:
            return _without(read)
        return (
            _without(read, ColumnCryptoMetaData.encryption_with_column_key.field_id),
            _without(column, EncryptionWithColumnKey.key_metadata.field_id),
            _replaced(column.key_metadata, new_key_metadata),
        )

    return (
        footer.mode,
        footer.file_aad,
        _replaced(footer.key_metadata, new_key_metadata),
        crypto_metadata,
        _without(footer.metadata, *replaced),
        [
            (
                _without(row_group, RowGroup.columns.field_id),
                [(before, of_crypto(crypto), after) for before, crypto, after in row_group.cut_chunks()],
            )
            for row_group in footer.row_groups
        ],
    )


def _without(record: Record, *field_ids: int) -> dict[int, Entry]:
    return {field_id: entry for field_id, entry in record.struct.fields.items() if field_id not in field_ids}


# --- new bytes put in place ---


COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time if they go through this process."""

Replaced = tuple[str, int, int]
"""How a tail or a key material file was replaced, and the bytes written and copied; see `FileRotation`."""


def replace_tail(location: FileLocation, tail: Tail, new: bytes, check: Callable[[ByteSource], None]) -> Replaced:
    """Give a file a new tail. `check` raises an error if the new file, not yet in place, is not as intended."""
    if copies_in_store(location):
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return replace_object_tail(location, tail, new, check)
    in_kernel = 0
    with replacement(location, lambda: check_unchanged(location, tail)) as pending:
        with unless_changed(location, tail), pending.open_sink() as sink:
            if isinstance(sink, LocalSink):
                with Path(location.path).open("rb") as opened:
                    in_kernel = _copy_in_kernel(opened.fileno(), sink.file_descriptor, tail.offset)
            with open_source(location) as source:
                for offset in range(in_kernel, tail.offset, COPY_LENGTH):
                    sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
            sink.write_at(tail.offset, new)
        with pending.open_written() as written:
            check(written)
    if in_kernel == tail.offset and location.is_local:
        return "new tail, data copied in the kernel", len(new), tail.offset
    return "new tail, data copied" if location.is_local else "rewritten whole", len(new) + tail.offset, 0


def copies_in_store(location: FileLocation) -> bool:
    """Return whether the store copies the data of a file, and replaces it on a condition."""
    if not location.is_in_s3 or importlib.util.find_spec("boto3") is None:
        return False
    from parquet_keytools.rotation.s3_replacement import can_reach

    return can_reach(location.filesystem)


_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY)
"""Errors of a file system whose files the kernel cannot copy; all others are errors of the disk."""


def _copy_in_kernel(source: int, target: int, length: int) -> int:
    """Return how many bytes the kernel copied, or shared between the files; fewer than all if it cannot go on."""
    copied = 0
    if sys.platform != "linux" or not hasattr(os, "copy_file_range"):
        return copied
    while copied < length:
        try:
            # At most about 2 GiB at a time, and possibly less.
            count = os.copy_file_range(source, target, length - copied, copied, copied)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            raise
        if count == 0:
            break  # Some file systems return 0 if they do not support it; the copy by hand finds the end.
        copied += count
    return copied


def replace_external_material(file: FileKeys, old: ExternalMaterial, new: bytes) -> None:
    """Replace a key material file."""
    location = old.location

    def check() -> None:
        try:
            check_unchanged(file.location, file.tail)
            if read_whole(location, MAX_FILE_BYTES) == old.content:
                return
        except FileNotFoundError:
            pass
        raise changed_while_rotated(location)

    if copies_in_store(location):
        from parquet_keytools.rotation.s3_replacement import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, new)
        with pending.open_written() as written:
            check_read_back(written, 0, new)
