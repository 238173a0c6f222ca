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
import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from parquet_keytools.config.document import did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import check_moves
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.encryption.aad import FOOTER_PLACE, AadPrefix
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    ChangedMeanwhileError,
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
from parquet_keytools.files.replacement import replacement
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
from parquet_keytools.rotation.data_set_run import (
    Outcomes,
    RunOptions,
    change_data_set,
    outcome_of,
)
from parquet_keytools.rotation.file_keys import (
    AadPrefixOf,
    BatchFile,
    FileKey,
    Tail,
    changed_while_rotated,
    check_unchanged,
    read_batch,
    step,
    step_each,
)
from parquet_keytools.rotation.report import FileRotation, KeyChange, RotationOutcome, RotationReport
from parquet_keytools.rotation.rewrapper import (
    KnownVersions,
    MasterKeyVersions,
    NewMaterial,
    Rewrapped,
    Rewrapper,
    RewrapTask,
    WrappedKey,
    is_older_version,
    new_material,
    renamed_material,
)
from parquet_keytools.runtime import operating_system
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, ends_with, open_source, read_whole
from parquet_keytools.storage.outputs import LocalSink

# --- the plan ---


@dataclass(frozen=True)
class RotationPlan:
    """The changes of a rotation, without secrets; pickled for the tasks of a cluster.

    Attributes:
        moves: Identifier of an old master key -> identifier of the new one.
        only_master_keys: Identifiers of the master keys that are rotated; None means all, or with `moves` the
            master keys that are moved.
        older_than: Re-wrap only keys that were wrapped with an older version, or an unknown version.
        new_keks: Whether fresh KEKs replace the old ones.
        dry_run: Whether nothing is changed.
        table_name: The table of the files; None for any table of the configuration.
        aad_prefix: The AAD prefix that the files must have.
        known_versions: The newest versions of master keys, as far as they were looked up.
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

    @property
    def opens_to_others(self) -> bool:
        """Whether other people than before may unwrap the keys afterwards."""
        return bool(self.moves)

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

        Args:
            master_key_id: The master key that wraps it now.
            version: The version that wraps it; None if it is unknown.
            current_version: Returns the newest version of a master key; called only if it matters.
            has_kek: Whether the key is a KEK.

        Raises:
            ConfigurationError: The versions of the KMS are numbers, and `older_than` is not.
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
    older_than: str | None = None,
    new_keks: bool = False,
    dry_run: bool = False,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
) -> RotationPlan:
    """Plan a rotation; see `Keytools.rotate` for the arguments.

    Raises:
        ConfigurationError: There is no KMS, a master key does not exist, or the moves are not possible.
        KmsError: A new master key cannot be used.
    """
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
    plan = RotationPlan(
        moves=identifiers,
        only_master_keys=only,
        older_than=older_than,
        new_keks=new_keks,
        dry_run=dry_run,
        table_name=table_name,
        aad_prefix=aad_prefix,
    )
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
    """Return the identifier of a master key, given the identifier or its name in the configuration.

    Raises:
        ConfigurationError: It is the name of a data key.
    """
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

    Args:
        keys: The keys of the configuration.
        table_name: The table; None if there is only one, or for files of any table.
        aad_prefix: The prefix that the caller expects.
        opens_to_others: Whether other people than before may unwrap the keys afterwards.
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
    """Rotate the master keys of a file, or of all Parquet files under a folder.

    Raises:
        FileNotFoundError: The file or folder does not exist.
        NoParquetFilesError: The folder has no Parquet files.
    """
    report = RotationReport(dry_run=rewrapping.plan.dry_run)
    change_data_set(path, rewrapping.change, report, options)
    report.kms_calls = rewrapping.rewrapper.calls + rewrapping.versions.calls
    if report.dry_run:
        # Master keys were described in the dry run, too.
        report.expected_kms_calls = rewrapping.rewrapper.expected_calls + rewrapping.versions.calls
    return report


class Rewrapping:
    """Re-wraps the keys of files as planned, in batches.

    A rotation to a new version of the same master keys opens nothing to others, and takes every file. A move does:
    a file of another table under the same master key, copied into the folder, would become readable to users of
    the new one. Only files of the configuration's tables are moved.

    Args:
        keys: The keys of the configuration, which has a KMS.
        plan: What changes.
        rewrapper: Calls the KMS; None makes one.
    """

    def __init__(
        self,
        keys: KeyService,
        plan: RotationPlan,
        rewrapper: Rewrapper | None = None,
    ) -> None:
        assert keys.kms is not None
        self.plan = plan
        self.kms = keys.kms
        self.versions = MasterKeyVersions(keys.kms, plan.known_versions)
        self.rewrapper = rewrapper or Rewrapper(keys.kms, new_keks=plan.new_keks, dry_run=plan.dry_run)
        self.aad_prefix_of = prefix_of(
            keys, plan.table_name, plan.aad_prefix, opens_to_others=plan.opens_to_others
        )
        self._data_keys = keys.data_keys
        self._table_checks: list[TableCheck] = []
        if plan.opens_to_others:
            names = [plan.table_name] if plan.table_name is not None else sorted(keys.configuration.tables)
            # Files that an earlier run moved belong to the table, too.
            self._table_checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]

    def change(self, pool: Executor, locations: Iterator[FileLocation]) -> Outcomes:
        """Re-wrap the keys of files, batch by batch; see `ChangeFiles`."""
        while works := read_batch(pool, locations, self._data_keys, self.kms):
            yield from _Batch(self, pool).rotate(works)

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change, whichever of its names a file uses."""
        return self.plan.concerns(self.versions.as_named(master_key_id, self.plan.named))

    def target_of(self, old: WrappedKey, *, has_kek: bool) -> str | None:
        """Return the master key to re-wrap a key with, or None if the key stays as it is."""
        named = self.versions.as_named(old.master_key_id, self.plan.named)
        target = self.plan.new_master_key_id(
            named, version=self.versions.of(old), current_version=self.versions.current, has_kek=has_kek
        )
        return old.master_key_id if target == named else target

    def refuse_other_tables(self, check: Callable[[TableCheck], None]) -> None:
        """Raise the first `TableMismatchError` if no table passes a check."""
        mismatches = []
        for table in self._table_checks:
            try:
                check(table)
            except TableMismatchError as error:
                mismatches.append(error)
            else:
                return
        if mismatches:
            raise mismatches[0]


class _Batch:
    """Files for whose keys the KMS is called together."""

    def __init__(self, run: Rewrapping, pool: Executor) -> None:
        self._run = run
        self._plan = run.plan
        self._pool = pool
        self._rewrapped: dict[RewrapTask, Rewrapped | KmsError] = {}
        self._unwrapped: dict[WrappedKey, SecretBytes | KmsError] = {}

    def rotate(self, works: Sequence[BatchFile]) -> Outcomes:
        """Yield the result of each file, in their order."""
        # AAD and table are checked before any key is unwrapped.
        going = list(step(self._pool, self._check, [work for work in works if work.failure is None]))
        self._ask_footers(going)
        going = list(step(self._pool, self._open, going))
        self._ask_columns(going)
        waited_for = {id(work) for work in going}
        finished = step_each(self._pool, self._finish, going)
        for work in works:
            if id(work) in waited_for:
                next(finished)
            if work.failure is not None:
                yield work.location, outcome_of(work.location, work.failure)
            elif work.result is not None:
                yield work.location, work.result
            # Parsed footers take much memory.
            work.keys = None

    # --- keys ---

    def _check(self, work: BatchFile) -> None:
        keys = work.read_keys
        work.aad_prefix = keys.expected_prefix(self._run.aad_prefix_of)
        self._run.refuse_other_tables(
            lambda table: check_footer_key(table, str(keys.location), keys.envelope, keys)
        )

    def _ask_footers(self, works: Sequence[BatchFile]) -> None:
        """Re-wrap the footers' keys, or unwrap them if they stay or nothing is to be changed."""
        staying = []
        for work in works:
            held = work.read_keys.footer_key
            if held is not None and (not self._is_planned(held) or self._plan.dry_run):
                staying.append(held.wrapped_key)
        self._ask_kms(works, staying)

    def _ask_columns(self, works: Sequence[BatchFile]) -> None:
        """Do the same with the keys of columns, except for those that the authentic footer vouches for.

        An authentic footer is as the writer, or the last rotation, left it: internal key material that names a
        master key outside this rotation is trusted.
        """
        staying = []
        for work in works:
            keys = work.read_keys
            for held in keys.referenced:
                if held is keys.footer_key or self._is_planned(held):
                    continue
                if held.reference is not None or self._concerns(held):
                    staying.append(held.wrapped_key)
                    held.is_proven = True
        self._ask_kms(works, staying)

    def _ask_kms(self, works: Sequence[BatchFile], staying: Iterable[WrappedKey]) -> None:
        rewrapper = self._run.rewrapper
        staying = list(staying)
        tasks = dict.fromkeys(held.task for work in works for held in work.changing if held.task is not None)
        if self._plan.dry_run:
            # Keys of footers are unwrapped in place of being re-wrapped.
            changing = {task.old for task in tasks}
            rewrapper.expect([*tasks, *(key for key in staying if key not in changing)])
        self._rewrapped.update(rewrapper.rewrap(task for task in tasks if task not in self._rewrapped))
        self._unwrapped.update(rewrapper.unwrap(key for key in staying if key not in self._unwrapped))

    def _is_planned(self, held: FileKey) -> bool:
        """Decide whether a key changes. What the file says of it is proven when it is unwrapped."""
        old = held.wrapped_key
        target = self._run.target_of(old, has_kek=held.material.double_wrapping)
        if target is None:
            return False
        held.task = RewrapTask(old, target, held.material.double_wrapping)
        return True

    def _concerns(self, held: FileKey) -> bool:
        return self._run.concerns(held.wrapped_key.master_key_id)

    def _open(self, work: BatchFile) -> None:
        """Authenticate the footer."""
        keys = work.read_keys
        if not keys.is_encrypted:
            # Encrypted columns would contradict the footer, which is an error.
            keys.open(None, None)
            return
        held = keys.footer_key
        if held is not None and held.task is not None and not self._plan.dry_run:
            work.footer_dek = dek_of(held.material, value_or_raise(self._rewrapped[held.task]).key)
        else:
            work.footer_dek = keys.footer_dek(self._unwrapped)
        keys.open(work.footer_dek, work.aad_prefix)
        footer = keys.footer
        assert footer is not None

        def check(table: TableCheck) -> None:
            check_footer_key(table, str(keys.location), keys.envelope, keys)
            check_column_keys(table, str(keys.location), footer, keys)

        self._run.refuse_other_tables(check)

    def _prove_columns(self, work: BatchFile) -> None:
        """Prove each DEK that is known by now with metadata of its column."""
        for column, held in work.read_keys.column_keys():
            if held.is_proven:
                work.read_keys.prove(column, work.read_keys.dek(held, self._unwrapped))
            elif held.task is not None and not self._plan.dry_run:
                work.read_keys.prove(column, self._new(work, held).dek)

    def _new(self, work: BatchFile, held: FileKey) -> NewMaterial:
        if held.new is None:
            assert held.task is not None
            kms, master_key_id = self._run.kms, held.task.new_master_key_id
            written_id = kms.id_in_file(master_key_id, self._new_instance_id(work))
            instance_id = kms.instance_of(master_key_id) if kms.instances else None
            rewrapped = value_or_raise(self._rewrapped[held.task])
            held.new = new_material(held.text, held.material, rewrapped, written_id, instance_id)
        return held.new

    def _new_instance_id(self, work: BatchFile) -> str | None:
        """Return the KMS that the footer names afterwards."""
        held = work.read_keys.footer_key
        if held is None or held.task is None:
            return work.read_keys.instance_id
        return self._run.kms.instance_of(held.task.new_master_key_id)

    def _new_texts(self, work: BatchFile) -> dict[FileKey, str]:
        """Return the new key material of the keys that change.

        Keys that stay may have to be named in another way: their identifiers begin with the name of their KMS
        where it is not the KMS of the footer.
        """
        texts = {held: self._new(work, held).text for held in work.changing}
        if self._run.kms.instances:
            instance_id = self._new_instance_id(work)
            for held in work.read_keys.referenced:
                written_id = self._run.kms.id_in_file(held.material.master_key_id, instance_id)
                if held not in texts and (text := renamed_material(held.text, written_id)) is not None:
                    texts[held] = text
        return texts

    # --- files ---

    def _finish(self, work: BatchFile) -> None:
        self._prove_columns(work)
        self._replace(work)

    def _replace(self, work: BatchFile) -> None:
        """Replace all keys of a file that change, or none."""
        path, keys = str(work.location), work.read_keys
        dropped = self._dropped(work)
        changing = work.changing
        if not changing and not dropped:
            work.result = self._unchanged(work)
            return
        moves_footer = self._run.kms.instances and self._new_instance_id(work) != keys.instance_id
        if moves_footer and len({held.reference is None for held in changing}) > 1:
            # After a crash between the two, either KMS would have some of the keys.
            raise OutputError(
                f"{path}: some of its keys are in the footer, and some in the key material file. Two files cannot "
                "be replaced in one step.",
                hint="Re-encrypt it with `rekey --in-place`, and repeat the rotation.",
            )
        changes, how = self._changes(work), _dropped_text(dropped)
        if self._plan.dry_run:
            work.result = FileRotation(path, RotationOutcome.WOULD_ROTATE, changes, how)
            return
        texts = self._new_texts(work) if changing else {}
        done = [*self._replace_external(work, texts, dropped), *self._replace_tail(work, texts)]
        work.result = FileRotation(
            path,
            RotationOutcome.ROTATED,
            changes,
            "; ".join(filter(None, [*(part.how for part in done), how])),
            sum(part.bytes_written for part in done),
            sum(part.bytes_copied for part in done),
        )

    def _dropped(self, work: BatchFile) -> frozenset[str]:
        """Return the entries of the key material file to drop, because the footer does not refer to them.

        They are not re-wrapped either: a key that an attacker put there must not outlive its master key.
        """
        external, unreferenced = work.read_keys.external, work.read_keys.unreferenced
        if not unreferenced or external is None or external.may_be_in_the_making:
            return frozenset()
        return frozenset(held.reference for held in unreferenced if held.reference is not None)

    def _unchanged(self, work: BatchFile) -> FileRotation:
        path, keys = str(work.location), work.read_keys
        why = ""
        if not keys.is_encrypted:
            why = "not encrypted"
        elif not keys.referenced:
            why = "data keys only"
        elif not any(self._concerns(held) for held in keys.referenced):
            why = "none of the master keys"
        outcome = RotationOutcome.NOTHING_TO_ROTATE if why else RotationOutcome.ALREADY_CURRENT
        return FileRotation(path, outcome, how=why)

    def _replace_external(
        self, work: BatchFile, new_texts: Mapping[FileKey, str], dropped: frozenset[str]
    ) -> Iterator[ReplacedTail]:
        keys = work.read_keys
        texts = {
            held.reference: new_texts[held]
            for held in keys.referenced
            if held.reference is not None and held in new_texts
        }
        if keys.external is None or not (texts or dropped):
            return
        new = keys.external.with_new(texts, dropped)
        replace_external_material(
            keys.external.location,
            keys.external.content,
            new,
            lambda: check_unchanged(keys.location, keys.tail),
        )
        yield ReplacedTail("new key material file", len(new), 0)

    def _replace_tail(self, work: BatchFile, new_texts: Mapping[FileKey, str]) -> Iterator[ReplacedTail]:
        keys, footer, dek = work.read_keys, work.read_keys.footer, work.footer_dek
        metadata = {
            held.text: new_texts[held].encode()
            for held in keys.referenced
            if held.reference is None and isinstance(held.text, bytes) and held in new_texts
        }
        if not metadata:
            return
        assert footer is not None
        assert dek is not None
        tail, new = keys.tail, new_tail(keys.tail, footer, metadata)
        yield replace_tail(
            keys.location,
            tail,
            new,
            lambda source: check_new_tail(source, tail.offset, new, dek, work.aad_prefix, footer, metadata),
        )

    def _changes(self, work: BatchFile) -> tuple[KeyChange, ...]:
        """Count the keys of a file by their changes."""
        versions = self._run.versions
        counts: Counter[tuple[str, str, str | None, str | None]] = Counter()
        for task in (held.task for held in work.changing):
            assert task is not None
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped):
                new_version = versions.of(WrappedKey(task.new_master_key_id, outcome.wrapped_key))
            else:
                new_version = versions.current(task.new_master_key_id)
            counts[task.old.master_key_id, task.new_master_key_id, versions.of(task.old), new_version] += 1
        changes = [KeyChange(*names, number) for names, number in counts.items()]
        return tuple(sorted(changes, key=lambda change: (change.master_key_id, change.version or "")))


def _dropped_text(dropped: frozenset[str]) -> str:
    if not dropped:
        return ""
    number = "1 entry" if len(dropped) == 1 else f"{len(dropped)} entries"
    return f"{number} of the key material file dropped that its footer does not refer to"


# --- a new tail ---


def footer_of(tail: bytes) -> bytes:
    """Return a tail without length and magic."""
    return tail[:-TRAILER_LENGTH]


def new_tail(tail: Tail, footer: Footer, new_key_metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a tail with key metadata replaced; all other fields stay as they are.

    The footer's DEK encrypts or signs once more, with a fresh nonce. Rotations stay far below the limit of 2**32
    invocations (spec 4.1.4), so they are not counted.

    Args:
        tail: The tail as it was read.
        footer: Its footer, authenticated. It is not changed: `check_new_tail` compares with it.
        new_key_metadata: Old key metadata -> new.
    """
    assert footer.cipher is not None
    known: dict[bytes, bytes] = {}

    def changed(crypto: bytes) -> bytes:
        # Usually the same in every row group.
        if crypto not in known:
            read, _ = ColumnCryptoMetaData.read(crypto)
            column = read.encryption_with_column_key
            if column is not None:
                column.key_metadata = _replaced(column.key_metadata, new_key_metadata)
            known[crypto] = read.serialise()
        return known[crypto]

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
    """Read new bytes as a reader does.

    Args:
        what: What they are, for people.
        path: The file.
    """
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
    """Read a file with a new tail as a reader does, and compare its footer with the old one.

    Args:
        source: The file.
        offset: Where the tail begins.
        tail: What was written there.
        footer_dek: The DEK that the new key material leads to.
        aad_prefix: The expected AAD prefix.
        old: The old footer. What `new_tail` made of it is no proof.
        new_key_metadata: As for `new_tail`.
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
    known: dict[bytes | None, object] = {None: None}

    def of_crypto(crypto: bytes | None) -> object:
        if crypto not in known:
            known[crypto] = _content_of_crypto(crypto, new_key_metadata)
        return known[crypto]

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


def _content_of_crypto(crypto: bytes | None, new_key_metadata: Mapping[bytes, bytes]) -> object:
    assert crypto is not None
    read, _ = ColumnCryptoMetaData.read(crypto)
    column = read.encryption_with_column_key
    if column is None:
        return _without(read)
    return (
        _without(read, ColumnCryptoMetaData.encryption_with_column_key.field_id),
        _without(column, EncryptionWithColumnKey.key_metadata.field_id),
        _replaced(column.key_metadata, new_key_metadata),
    )


def _without(record: Record, *field_ids: int) -> dict[int, Entry]:
    return {field_id: entry for field_id, entry in record.struct.fields.items() if field_id not in field_ids}


# --- new bytes put in place ---


CheckWritten = Callable[[ByteSource], None]
"""Raises an error if a file was not written as intended; called before it replaces the old file."""

COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time if they go through this process."""


@dataclass(frozen=True)
class ReplacedTail:
    """How a tail was replaced.

    Attributes:
        how: For people.
        bytes_written: Bytes that went through this process.
        bytes_copied: Bytes that the operating system or the store copied.
    """

    how: str
    bytes_written: int
    bytes_copied: int


def replace_tail(location: FileLocation, tail: Tail, new: bytes, check: CheckWritten) -> ReplacedTail:
    """Give a file a new tail."""
    reason = why_unconditional(location)
    if reason is None:
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return ReplacedTail(*replace_object_tail(location, tail, new, check))
    with replacement(location, lambda: check_unchanged(location, tail)) as pending:
        with pending.open_sink() as sink:
            if location.is_local:
                assert isinstance(sink, LocalSink)
                with Path(location.path).open("rb") as opened:
                    how = copy_beginning(opened.fileno(), sink.file_descriptor, tail.offset)
            else:
                how = None
                sink.reserve(tail.offset + len(new))
                with open_source(location) as source:
                    for offset in range(0, tail.offset, COPY_LENGTH):
                        sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
            sink.write_at(tail.offset, new)
        with pending.open_written() as written:
            check(written)
    by_hand = 0 if how == COPIED_IN_KERNEL else tail.offset
    text = f"new tail, data {how}" if how is not None else f"rewritten whole{f'; {reason}' if reason else ''}"
    return ReplacedTail(text, len(new) + by_hand, tail.offset - by_hand)


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition, its data copied by the store; None if it can.

    Returns:
        The reason for people if the file is in S3; else an empty text.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.rotation.s3_replacement import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, no proxy, and no role that Arrow assumes, the store would copy the data"


COPIED_IN_KERNEL = "copied in the kernel"
COPIED = "copied"

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY)
"""Errors of a file system whose files the kernel cannot copy; all others are errors of the disk."""


def copy_beginning(source: int, target: int, length: int) -> str:
    """Copy the first `length` bytes of a file into an empty one.

    Returns:
        How they were copied.
    """
    copied = _copy_in_kernel(source, target, length)
    if copied == length:
        return COPIED_IN_KERNEL
    while copied < length:
        data = operating_system.read_at(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = operating_system.write_at(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


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


def replace_external_material(
    location: FileLocation,
    old: bytes,
    new: bytes,
    check_parquet_file: Callable[[], None],
) -> None:
    """Replace a key material file."""

    def check() -> None:
        try:
            check_parquet_file()
            if read_whole(location, MAX_FILE_BYTES) == old:
                return
        except FileNotFoundError:
            pass
        raise changed_while_rotated(location)

    if why_unconditional(location) is None:
        from parquet_keytools.rotation.s3_replacement import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, new)
        with pending.open_written() as written:
            check_read_back(written, 0, new)
