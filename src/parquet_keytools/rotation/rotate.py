"""Rotation of master keys: which keys change, and how the keys of many files are re-wrapped together.

`plan_rotation` checks the request before any file is touched. `rotate_data_set` then takes batches of files:

1. The key of each footer is re-wrapped, or unwrapped if it stays. Its DEK authenticates the footer. Before
   that, nothing in the footer is trusted.
2. The keys of columns that the authentic footer refers to are re-wrapped or unwrapped. Metadata of each column
   proves its DEK. All other entries of a key material file belong to no column.
3. Each file is replaced, with all of its keys or none.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from parquet_keytools.config.document import Mistake, did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import check_moves
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    OutputError,
    TableMismatchError,
    value_or_raise,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities, check_column_keys, check_footer_key
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.keys.key_wrapping import dek_of
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.data_set_run import (
    FileChange,
    FileOutcome,
    RunOptions,
    change_data_set,
    outcome_of,
)
from parquet_keytools.rotation.file_keys import (
    AadPrefixOf,
    BatchFile,
    FileKey,
    check_unchanged,
    read_batch,
    step,
    step_each,
)
from parquet_keytools.rotation.report import FileRotation, KeyChange, RotationOutcome, RotationReport
from parquet_keytools.rotation.rewrapper import (
    KmsInstance,
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
from parquet_keytools.rotation.tail import (
    ReplacedTail,
    check_new_tail,
    new_tail,
    replace_external_material,
    replace_tail,
)
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import storage_failure
from parquet_keytools.storage.locations import FileLocation

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
        other_kms: Whether another KMS wraps the keys afterwards.
        dry_run: Whether nothing is changed.
        instance: The KMS that footer key material names afterwards; None leaves it as it is.
        table_name: The table of the files; None for any table of the configuration.
        aad_prefix: The AAD prefix that the files must have.
        known_versions: The newest versions of master keys, as far as they were looked up.
    """

    moves: Mapping[str, str] = field(default_factory=dict)
    only_master_keys: frozenset[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    other_kms: bool = False
    dry_run: bool = False
    instance: KmsInstance | None = None
    table_name: str | None = None
    aad_prefix: str | bytes | None = None
    known_versions: KnownVersions = field(default_factory=dict)

    def __post_init__(self) -> None:
        chained = sorted(self.moves.keys() & set(self.moves.values())) if not self.other_kms else []
        if chained:
            # A repeated run could not distinguish keys that were moved to it from keys to be moved away.
            raise ConfigurationError(
                f"the master key {chained[0]!r} is to be moved and is the target of a move.",
                hint="Do these moves in separate rotations, one after the other.",
            )
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
        return self.other_kms or bool(self.moves)

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change."""
        if self.only_master_keys is not None:
            return master_key_id in self.only_master_keys
        return self.other_kms or not self.moves or master_key_id in self.moves

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
        if self.older_than is not None and version is not None and not is_older_version(version, self.older_than):
            return None
        target = self.moves.get(master_key_id, master_key_id)
        certain = self.other_kms or target != master_key_id or (self.new_keks and has_kek)
        if certain or self.older_than is not None or version is None:
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
    new_kms: KmsClient | None = None,
    new_configuration: Configuration | None = None,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
) -> RotationPlan:
    """Plan a rotation; see `Keytools.rotate` for the arguments.

    `new_kms` wraps the keys afterwards, and `new_configuration` names its master keys; None for the same KMS.

    Raises:
        ConfigurationError: There is no KMS, a master key does not exist, or the moves are not possible.
        KmsError: A new master key cannot be used.
    """
    if only_master_keys is not None:
        list_of_names("only_master_keys", only_master_keys)
    is_other = new_kms is not None or new_configuration is not None
    wanted = _configured_moves(keys, is_other_kms=is_other) if moves is None else moves
    kms = keys.kms
    if kms is None:
        raise ConfigurationError(
            "there are no master keys to rotate: the configuration has no KMS.",
            hint="Add a `kms:` section to the configuration.",
        )
    if new_configuration is not None and new_kms is None:
        # Otherwise the rotation would stay within the old KMS.
        raise ConfigurationError(
            "there are no master keys to move to: the other configuration has no KMS.",
            hint="Add a `kms:` section to it.",
        )
    new_kms = new_kms or kms
    if is_other and (kms.instances or new_kms.instances):
        raise ConfigurationError(
            "a rotation between two configurations needs one KMS in each, and one of them has several.",
            hint="Name all KMSs in one configuration, and move master keys from one to another there.",
        )
    new_configuration = new_configuration or (keys.configuration if new_kms is kms else None)
    identifiers = {
        master_key_id(keys.configuration, old): master_key_id(new_configuration, new)
        for old, new in wanted.items()
    }
    if len(identifiers) < len(wanted):
        raise ConfigurationError("two names of master keys to be moved mean the same one.", hint="Name it once.")
    only = None
    if only_master_keys is not None:
        only = frozenset(master_key_id(keys.configuration, key) for key in only_master_keys)
    plan = RotationPlan(
        moves=identifiers,
        only_master_keys=only,
        older_than=older_than,
        new_keks=new_keks,
        other_kms=new_kms is not kms,
        dry_run=dry_run,
        instance=_instance_of(new_configuration) if new_kms is not kms else None,
        table_name=table_name,
        aad_prefix=aad_prefix,
    )
    trust_master_keys(plan, kms, new_kms)
    versions = MasterKeyVersions(kms, new_kms)
    _check_known(kms, versions, plan.named)
    for target in sorted(set(plan.moves.values())):
        description = versions.describe(target, new=True)
        if description is not None and not description.enabled:
            backend = new_kms.parts(target)[0].backend
            raise MasterKeyDisabledError(backend=backend, operation="wrap", master_key_id=target)
    check_names(plan, versions)
    if new_kms is kms:
        _warn_of_readers(keys, plan)
    return replace(plan, known_versions=versions.known)


def _configured_moves(keys: KeyService, *, is_other_kms: bool) -> Mapping[str, str]:
    moves = keys.configuration.rotation.moves
    if moves and is_other_kms:
        mistake = Mistake(("rotation", "moves"), "moves are within one KMS, but another one is given.")
        raise keys.configuration.error_for([mistake])
    if moves and keys.kms is not None:
        check_moves(keys.configuration, keys.kms.master_key_ids())
    return moves


def master_key_id(configuration: Configuration | None, key: str) -> str:
    """Return the identifier of a master key, given the identifier or its name in the configuration.

    Raises:
        ConfigurationError: It is the name of a data key.
    """
    if configuration is None:
        return key
    if key in configuration.data_keys and key not in configuration.master_keys:
        raise ConfigurationError(
            f"{key!r} is a data key: a rotation changes master keys.", hint="Use rekey for new data keys."
        )
    return configuration.master_key_id(key)


def _instance_of(configuration: Configuration | None) -> KmsInstance:
    settings = configuration.kms if configuration is not None else None
    if settings is None:
        return KmsInstance()
    return KmsInstance(settings.instance_id, getattr(settings, "instance_url", "DEFAULT"))


def trust_master_keys(plan: RotationPlan, kms: KmsClient, new_kms: KmsClient) -> None:
    """Trust the master keys that the request names: the user vouches for them."""
    kms.trust_also({*plan.moves, *(plan.only_master_keys or ())})
    new_kms.trust_also(plan.moves.values())


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
    """Refuse moves that contradict each other because two names mean one master key.

    Raises:
        ConfigurationError: A master key has two targets, or is a target and is to be moved itself.
    """
    for old, target in sorted(plan.moves.items()):
        other = versions.as_named(old, frozenset(plan.moves.keys() - {old}))
        if plan.moves[other] != target:
            raise ConfigurationError(
                f"{old!r} and {other!r} are one master key, and are to be moved to different ones.",
                hint="Name one target for both.",
            )
        if plan.other_kms:
            continue
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
    change_data_set(path, rewrapping, report, options)
    report.kms_calls = rewrapping.rewrapper.calls + rewrapping.versions.calls
    if report.dry_run:
        # Master keys were described in the dry run, too.
        report.expected_kms_calls = rewrapping.rewrapper.expected_calls + rewrapping.versions.calls
    return report


class Rewrapping(FileChange):
    """Re-wraps the keys of files as planned, in batches.

    A rotation to a new version of the same master keys opens nothing to others, and takes every file. A move does:
    a file of another table under the same master key, copied into the folder, would become readable to users of
    the new one. Only files of the configuration's tables are moved.

    Args:
        keys: The keys of the configuration, which has a KMS.
        plan: What changes.
        new_kms: The KMS that wraps the keys afterwards; None for the same one.
        rewrapper: Calls the KMS; None makes one.
    """

    def __init__(
        self,
        keys: KeyService,
        plan: RotationPlan,
        new_kms: KmsClient | None = None,
        rewrapper: Rewrapper | None = None,
    ) -> None:
        assert keys.kms is not None
        self.plan = plan
        self.kms = keys.kms
        self.new_kms = new_kms or keys.kms
        self.versions = MasterKeyVersions(keys.kms, new_kms, plan.known_versions)
        self.rewrapper = rewrapper or Rewrapper(keys.kms, new_kms, new_keks=plan.new_keks, only_count=plan.dry_run)
        self.aad_prefix_of = prefix_of(
            keys, plan.table_name, plan.aad_prefix, opens_to_others=plan.opens_to_others
        )
        self.identities = FileIdentities(refuses=False)
        self._data_keys = keys.data_keys
        self._table_checks: list[TableCheck] = []
        if plan.opens_to_others:
            names = [plan.table_name] if plan.table_name is not None else sorted(keys.configuration.tables)
            # Files that an earlier run moved belong to the table, too.
            self._table_checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]

    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Re-wrap the keys of the next files."""
        return _Batch(self, pool, locked_folder).rotate(read_batch(pool, locations, self._data_keys, self.kms))

    def take_end(self) -> KmsUnavailableError | None:
        """Return the last error of the KMS if it has answered nothing since the last call of this method."""
        return self.rewrapper.take_unreachable()

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

    def __init__(self, run: Rewrapping, pool: Executor, locked_folder: str | None) -> None:
        self._run = run
        self._plan = run.plan
        self._pool = pool
        self._locked_folder = locked_folder
        self._rewrapped: dict[RewrapTask, Rewrapped | KmsError] = {}
        self._unwrapped: dict[WrappedKey, SecretBytes | KmsError] = {}
        self._lock = threading.Lock()
        # Set when the storage is full; the remaining files are then not processed.
        self._stopped = threading.Event()

    def rotate(self, works: Sequence[BatchFile]) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Yield the result of each file, in their order; see `FileChange.change`."""
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
            if work.result is not None:
                yield work.location, replace(work.result, shares_keys_with=work.shares_keys_with)
            elif work.failure is not None:
                yield work.location, outcome_of(work.location, work.failure)
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
            if held is not None and (not self._is_planned(work, held) or self._plan.dry_run):
                staying.append((held.wrapped_key, id(held) not in work.tasks))
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
                if held is keys.footer_key or self._is_planned(work, held):
                    continue
                if held.reference is not None or self._concerns(held):
                    staying.append((held.wrapped_key, True))
                    work.unwrapped.add(id(held))
        self._ask_kms(works, staying)

    def _ask_kms(self, works: Sequence[BatchFile], staying: Iterable[tuple[WrappedKey, bool]]) -> None:
        rewrapper = self._run.rewrapper
        tasks = dict.fromkeys(task for work in works for _, task in work.tasks.values())
        self._rewrapped.update(rewrapper.rewrap(task for task in tasks if task not in self._rewrapped))
        staying = [(key, is_staying) for key, is_staying in staying if key not in self._unwrapped]
        if self._plan.dry_run:
            rewrapper.expect_unwraps(key for key, is_staying in staying if is_staying)
        self._unwrapped.update(rewrapper.unwrap(key for key, _ in staying))

    def _is_planned(self, work: BatchFile, held: FileKey) -> bool:
        """Decide whether a key changes. What the file says of it is proven when it is unwrapped."""
        old = held.wrapped_key
        target = self._run.target_of(old, has_kek=held.material.double_wrapping)
        if target is None:
            return False
        work.tasks[id(held)] = (held, RewrapTask(old, target, held.material.double_wrapping))
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
        if held is not None and id(held) in work.tasks and not self._plan.dry_run:
            _, task = work.tasks[id(held)]
            work.footer_dek = dek_of(held.material, value_or_raise(self._rewrapped[task]).key)
        else:
            work.footer_dek = keys.footer_dek(self._unwrapped)
        keys.open(work.footer_dek, work.aad_prefix)
        file_unique = keys.envelope.aad_file_unique or b""
        other = self._run.identities.other(work.location, work.footer_dek, file_unique)
        work.shares_keys_with = None if other is None else str(other)
        footer = keys.footer
        assert footer is not None

        def check(table: TableCheck) -> None:
            check_footer_key(table, str(keys.location), keys.envelope, keys)
            check_column_keys(table, str(keys.location), footer, keys)

        self._run.refuse_other_tables(check)

    def _prove_columns(self, work: BatchFile) -> None:
        """Prove each DEK that is known by now with metadata of its column."""
        for column, held in work.read_keys.column_keys():
            if id(held) in work.unwrapped:
                work.read_keys.prove(column, work.read_keys.dek(held, self._unwrapped))
            elif id(held) in work.tasks and not self._plan.dry_run:
                work.read_keys.prove(column, self._new(work, held).dek)

    def _new(self, work: BatchFile, held: FileKey) -> NewMaterial:
        if id(held) not in work.new:
            _, task = work.tasks[id(held)]
            rewrapped = value_or_raise(self._rewrapped[task])
            written_id = self._run.new_kms.id_in_file(rewrapped.new_master_key_id, self._new_instance_id(work))
            instance = self._plan.instance
            if self._run.new_kms.instances:
                instance = KmsInstance(self._run.new_kms.instance_of(rewrapped.new_master_key_id))
            work.new[id(held)] = new_material(held.text, held.material, rewrapped, written_id, instance)
        return work.new[id(held)]

    def _new_instance_id(self, work: BatchFile) -> str | None:
        """Return the KMS that the footer names afterwards."""
        held = work.read_keys.footer_key
        if held is None or id(held) not in work.tasks:
            return work.read_keys.instance_id
        return self._run.new_kms.instance_of(work.tasks[id(held)][1].new_master_key_id)

    def _new_texts(self, work: BatchFile) -> dict[int, str]:
        """Return id -> new key material of the keys that change.

        Keys that stay may have to be named in another way: their identifiers begin with the name of their KMS
        where it is not the KMS of the footer.
        """
        texts = {id(held): self._new(work, held).text for held, _ in work.tasks.values()}
        if self._run.new_kms.instances and not self._plan.other_kms:
            instance_id = self._new_instance_id(work)
            for held in work.read_keys.referenced:
                written_id = self._run.new_kms.id_in_file(held.material.master_key_id, instance_id)
                if id(held) not in texts and (text := renamed_material(held.text, written_id)) is not None:
                    texts[id(held)] = text
        return texts

    # --- files ---

    def _finish(self, work: BatchFile) -> None:
        if self._stopped.is_set():
            return
        try:
            self._prove_columns(work)
            self._replace(work)
        except (KeytoolsError, OSError) as error:
            failure = storage_failure(error, work.location)
            if failure is None:
                raise
            with self._lock:
                is_first = not self._stopped.is_set()
                self._stopped.set()
            if is_first:
                # Other files would fail in the same way, and count as not processed.
                raise failure from None

    def _replace(self, work: BatchFile) -> None:
        """Replace all keys of a file that change, or none."""
        path, keys, plan = str(work.location), work.read_keys, self._plan
        staying = len(keys.referenced) > len(work.tasks)
        self._leave_moved_before(work)
        dropped = self._dropped(work)
        if not work.tasks and not dropped:
            work.result = self._unchanged(work)
            return
        if work.tasks and plan.other_kms and staying:
            raise OutputError(
                f"{path}: some keys would move to the other KMS and some would stay: no reader could open it.",
                hint="Do not select keys.",
            )
        moves_footer = plan.other_kms or self._new_instance_id(work) != keys.instance_id
        if moves_footer and len({held.reference is None for held, _ in work.tasks.values()}) > 1:
            # After a crash between the two, either KMS would have some of the keys.
            raise OutputError(
                f"{path}: some of its keys are in the footer, and some in the key material file. Two files cannot "
                "be replaced in one step.",
                hint="Re-encrypt it with `rekey --in-place`, and repeat the rotation.",
            )
        changes, how = self._changes(work), _dropped_text(dropped)
        if plan.dry_run:
            work.result = FileRotation(path, RotationOutcome.WOULD_ROTATE, changes, how)
            return
        texts = self._new_texts(work) if work.tasks else {}
        done = [*self._replace_external(work, texts, dropped), *self._replace_tail(work, texts)]
        work.result = FileRotation(
            path,
            RotationOutcome.ROTATED,
            changes,
            "; ".join(filter(None, [*(part.how for part in done), how])),
            sum(part.bytes_written for part in done),
            sum(part.bytes_copied for part in done),
        )

    def _leave_moved_before(self, work: BatchFile) -> None:
        """Leave keys as they are that an earlier run, which was interrupted, moved to the other KMS."""
        for held, task in list(work.tasks.values()):
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped) and outcome.was_there:
                del work.tasks[id(held)]

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
        self, work: BatchFile, new_texts: Mapping[int, str], dropped: frozenset[str]
    ) -> Iterator[ReplacedTail]:
        keys = work.read_keys
        texts = {
            held.reference: new_texts[id(held)]
            for held in keys.referenced
            if held.reference is not None and id(held) in new_texts
        }
        if keys.external is None or not (texts or dropped):
            return
        new = keys.external.with_new(texts, dropped)
        replace_external_material(
            keys.external.location,
            keys.external.content,
            new,
            lambda: check_unchanged(keys.location, keys.tail),
            locked_folder=self._locked_folder,
        )
        yield ReplacedTail("new key material file", len(new), 0)

    def _replace_tail(self, work: BatchFile, new_texts: Mapping[int, str]) -> Iterator[ReplacedTail]:
        keys, footer, dek = work.read_keys, work.read_keys.footer, work.footer_dek
        metadata = {
            held.text: new_texts[id(held)].encode()
            for held in keys.referenced
            if held.reference is None and isinstance(held.text, bytes) and id(held) in new_texts
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
            locked_folder=self._locked_folder,
        )

    def _changes(self, work: BatchFile) -> tuple[KeyChange, ...]:
        """Count the keys of a file by their changes."""
        versions = self._run.versions
        counts: Counter[tuple[str, str, str | None, str | None]] = Counter()
        for _, task in work.tasks.values():
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped):
                new_version = versions.of(WrappedKey(task.new_master_key_id, outcome.wrapped_key), new=True)
            else:
                new_version = versions.current(task.new_master_key_id, new=True)
            counts[task.old.master_key_id, task.new_master_key_id, versions.of(task.old), new_version] += 1
        changes = [KeyChange(*names, number) for names, number in counts.items()]
        return tuple(sorted(changes, key=lambda change: (change.master_key_id, change.version or "")))


def _dropped_text(dropped: frozenset[str]) -> str:
    if not dropped:
        return ""
    number = "1 entry" if len(dropped) == 1 else f"{len(dropped)} entries"
    return f"{number} of the key material file dropped that its footer does not refer to"
