"""Which keys a rotation changes, to what, and of which files; and which versions of master keys wrap them."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parquet_keytools.config.document import Mistake, did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import ColumnPath, check_moves
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.errors import (
    ConfigurationError,
    KmsError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    TableMismatchError,
)
from parquet_keytools.files.file_opening import check_column_keys, check_footer_key
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import DataKeys
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription
from parquet_keytools.rotation.file_keys import AadPrefixOf, FileKeys
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.rotation.rewrapper import KmsInstance, WrappedKey
from parquet_keytools.storage.locations import FileLocation

SameMasterKey = Callable[[str, str], "bool | None"]
"""Whether two identifiers mean one master key; None where the KMS does not tell."""

KnownVersions = Mapping[tuple[bool, str], str | None]
"""Whether it is one of the new KMS, where that is another one, and the master key -> its newest version."""

_NUMBER = re.compile(r"v?([0-9]{1,18})")


def same_master_key(kms: KmsClient | None) -> SameMasterKey:
    """Return what compares identifiers of master keys: an alias and the key that it stands for are one."""
    identities: dict[str, str | None] = {}

    def same(one: str, other: str) -> bool | None:
        if one == other or kms is None:
            return one == other
        for name in (one, other):
            if name not in identities:
                identities[name] = kms.identity(name)
        found = identities[one], identities[other]
        return None if None in found else found[0] == found[1]

    return same


class MasterKeyVersions:
    """Versions, as two KMS clients tell them; each master key is described once in a run.

    Args:
        kms: The KMS whose master keys wrapped what is there.
        new_kms: The one whose master keys shall wrap it; None for the same.
        known: Versions that are not asked for again, as `known` of another one has them.
    """

    def __init__(
        self, kms: KmsClient, new_kms: KmsClient | None = None, known: KnownVersions | None = None
    ) -> None:
        self._kms = kms
        self._new_kms = kms if new_kms is None else new_kms
        self._lock = threading.Lock()
        self._current = dict(known or {})
        self._same = same_master_key(kms)
        self._named: dict[tuple[str, frozenset[str]], str] = {}

    def as_named(self, master_key_id: str, names: frozenset[str]) -> str:
        """Return which of some names means this master key; its own where none does, as far as the KMS tells."""
        if not names or master_key_id in names:
            return master_key_id
        with self._lock:
            found = self._named.get((master_key_id, names))
        if found is None:
            found = next((name for name in sorted(names) if self._same(master_key_id, name)), master_key_id)
            with self._lock:
                self._named[master_key_id, names] = found
        return found

    @property
    def calls(self) -> KmsCalls:
        """How often a KMS was asked."""
        return KmsCalls(describe=len(self._current))

    @property
    def known(self) -> KnownVersions:
        """What was asked for so far."""
        with self._lock:
            return dict(self._current)

    def of(self, key: WrappedKey, *, new: bool = False) -> str | None:
        """Return the version that wrapped a key, of the new KMS or the other one; None where nobody can tell."""
        kms = self._new_kms if new else self._kms
        return kms.wrapped_key_version(key.wrapped_key, key.master_key_id)

    def describe(self, master_key_id: str, *, new: bool = False) -> MasterKeyDescription | None:
        """Return what the new KMS, or the other one, says of a master key; None where it does not tell.

        Raises:
            MasterKeyNotFoundError: There is no such master key.
        """
        kms = self._new_kms if new else self._kms
        try:
            description = kms.describe(master_key_id)
        except MasterKeyNotFoundError:
            raise
        except KmsError:
            description = None
        with self._lock:
            key = (kms is not self._kms, master_key_id)
            self._current[key] = description.current_version if description is not None else None
        return description

    def current(self, master_key_id: str, *, new: bool = False) -> str | None:
        """Return the version of a master key that wraps now, or None where the KMS does not tell."""
        kms = self._new_kms if new else self._kms
        with self._lock:
            key = (kms is not self._kms, master_key_id)
            if key not in self._current:
                try:
                    self._current[key] = kms.describe(master_key_id).current_version
                except KmsError:
                    # Who may wrap need not be allowed to describe; then its keys are simply re-wrapped.
                    self._current[key] = None
            return self._current[key]


@dataclass(frozen=True)
class RotationPlan:
    """What a rotation changes; `plan_rotation` makes it. It holds no secret, and goes to the tasks of a cluster.

    Attributes:
        moves: Identifier of an old master key -> identifier of the new one.
        only_master_keys: Identifiers of the master keys that are rotated; None means all, or with `moves` the
            master keys that are moved.
        older_than: Only keys that an older version wrapped, or an unknown version.
        new_keks: Whether fresh KEKs replace the old ones.
        other_kms: Whether another KMS wraps the keys from now on.
        dry_run: Whether nothing is changed.
        instance: What footer key material says of the KMS from now on; None leaves it as it is.
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
            # A run after a crash could not distinguish keys that were moved to it from keys to be moved away.
            raise ConfigurationError(
                f"the master key {chained[0]!r} is to be moved and is the target of a move.",
                hint="Do these moves in rotations of their own, one after the other.",
            )
        ambiguous = sorted(new for old, new in self.moves.items() if "%" in new)
        if ambiguous:
            # Readers decode what key material says: they would look for another master key, and not find it.
            raise ConfigurationError(f"the identifier {ambiguous[0]!r} of a master key must not contain `%`.")

    @property
    def named(self) -> frozenset[str]:
        """The master keys that it is asked for by name; empty where it is about all."""
        return frozenset(self.moves) | (self.only_master_keys or frozenset())

    @property
    def opens_to_others(self) -> bool:
        """Whether other people may unwrap the keys from then on than before."""
        return self.other_kms or bool(self.moves)

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change at all."""
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
        """Return the master key to re-wrap a key under, or None where the key stays as it is.

        Args:
            master_key_id: The one that wraps it now, as the KMS knows it.
            version: Its version that wraps the key; None where nobody can tell.
            current_version: Returns the newest version of a master key; called only where it matters.
            has_kek: Whether what is wrapped is a KEK.

        Raises:
            ConfigurationError: `older_than` is no number, and the versions of the KMS are.
        """
        if not self.concerns(master_key_id):
            return None
        if self.older_than is not None and version is not None and not _is_older(version, self.older_than):
            return None
        target = self.moves.get(master_key_id, master_key_id)
        certain = self.other_kms or target != master_key_id or (self.new_keks and has_kek)
        if certain or self.older_than is not None or version is None:
            return target
        return None if version == current_version(master_key_id) else target


def check_names(plan: RotationPlan, versions: MasterKeyVersions) -> None:
    """Refuse moves that contradict each other where two names mean one master key, as far as the KMS tells.

    Raises:
        ConfigurationError: A master key is to be moved to two others, or to one that is to be moved on.
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
        # An alias may be moved to the key that it stands for: that only writes another name.
        next_one = versions.as_named(target, frozenset(plan.moves))
        if plan.moves.get(next_one, target) != target:
            raise ConfigurationError(
                f"the master key {next_one!r} is to be moved and is the target of a move, as {target!r}.",
                hint="Do these moves in rotations of their own, one after the other.",
            )


class TableMembership:
    """Refuses files that are of none of some tables, where keys move to other master keys, which others may use.

    A rotation to a new version of the same master keys opens nothing to anybody, and takes every file. A move
    does: a file of another table under the same master key, copied into the folder, would become readable to
    whoever may use the new one.

    Args:
        checks: Of the tables; without any, no file is refused.
    """

    def __init__(self, checks: Sequence[TableCheck], data_keys: DataKeys) -> None:
        self._checks = checks
        self._data_keys = data_keys

    @classmethod
    def of(cls, keys: KeyService, plan: RotationPlan) -> TableMembership:
        """Return what a rotation requires of files: they belong to the named table, or to one of the tables.

        Files that an earlier run moved belong to the table, too.
        """
        names = [plan.table_name] if plan.table_name is not None else sorted(keys.configuration.tables)
        checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]
        return cls(checks if plan.opens_to_others else [], keys.data_keys)

    def check_footer(self, keys: FileKeys) -> None:
        """Refuse a file by its footer's key, before that is unwrapped.

        Raises:
            TableMismatchError: It is not that of a table.
            KeyMaterialError: The key metadata is not valid.
        """
        source = _KeysOfFile(keys, self._data_keys)
        self._one_passes(lambda check: check_footer_key(check, str(keys.location), keys.envelope, source))

    def check_columns(self, keys: FileKeys) -> None:
        """Refuse a file by the keys of its columns, before these are unwrapped; its footer is authentic by now.

        Raises:
            TableMismatchError: They are not those of the table that has the footer's key, either.
            ConfigurationError: A table has two keys for one of the columns.
        """
        source, footer = _KeysOfFile(keys, self._data_keys), keys.footer
        assert footer is not None

        def check_both(check: TableCheck) -> None:
            check_footer_key(check, str(keys.location), keys.envelope, source)
            check_column_keys(check, str(keys.location), footer, source)

        self._one_passes(check_both)

    def _one_passes(self, check: Callable[[TableCheck], None]) -> None:
        mismatches = []
        for table in self._checks:
            try:
                check(table)
            except TableMismatchError as error:
                mismatches.append(error)
            else:
                return
        if mismatches:
            raise mismatches[0]


@dataclass(frozen=True)
class _KeysOfFile:
    """A `KeySource` of the keys that a rotation has read."""

    keys: FileKeys
    data_keys: DataKeys

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        held = self.keys.key_of(key_metadata)
        return None if held is None else held.material

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        return self.data_keys.name_without_metadata(column_path)


def is_same_version(version: str, other: str) -> bool:
    """Return whether two names mean the same version: `v2` is 2."""
    return _version(version) == _version(other)


def check_version(master_key_id: str, version: str, newest: str | None) -> None:
    """Refuse a version that a master key cannot have; nothing would seem to need it.

    Raises:
        ConfigurationError: The KMS counts versions, and this is none up to the newest.
    """
    number, newest_number = _version(version), _version(newest or "")
    if isinstance(newest_number, int) and not (isinstance(number, int) and 1 <= number <= newest_number):
        raise ConfigurationError(
            f"the master key {master_key_id!r} has no version {version!r}: its newest is {newest}."
        )


def _is_older(version: str, than: str) -> bool:
    """Compare versions; names that are no numbers have no order, so that any other one counts as older."""
    number, than_number = _version(version), _version(than)
    if isinstance(number, int) and isinstance(than_number, int):
        return number < than_number
    if isinstance(number, int):
        raise ConfigurationError(f"{than!r} is no version of this KMS, which counts them: {version} is one.")
    return version != than


def _version(name: str) -> int | str:
    number = _NUMBER.fullmatch(name)
    return int(number[1]) if number else name


# --- what is refused, or warned of, before a file is touched ---


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

    `new_kms` wraps the keys from now on, and `new_configuration` names its master keys; None for the same KMS.

    Raises:
        ConfigurationError: There is no KMS, or a name means no master key, or the moves are not possible.
        KmsError: A master key to move to cannot be used.
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
        # Else the rotation would stay within the KMS that is to be left.
        raise ConfigurationError(
            "there are no master keys to move to: the other configuration has no KMS.",
            hint="Add a `kms:` section to it.",
        )
    new_kms = new_kms or kms
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
        _check_usable(new_kms, versions, target)
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


def _warn_of_readers(keys: KeyService, plan: RotationPlan) -> None:
    """Warn of moves after which tables would refuse their files, before any of these is touched."""
    tables = keys.configuration.tables if plan.table_name is None else [plan.table_name]
    for name in sorted(tables):
        check = TableCheck(keys.configuration, name)
        for old, new in sorted(plan.moves.items()):
            if check.loses_by_move(old, new):
                # Shown at the call of `Keytools.rotate`.
                warnings.warn(
                    f"files of the table {name!r} that are moved from the master key {old!r} to {new!r} cannot be "
                    "read by this configuration from then on, for the table does not name that one. Add the move "
                    "under `rotation: {moves: ...}`, here and in the configurations of all readers, before you "
                    "rotate.",
                    ConfigurationWarning,
                    stacklevel=4,
                )


def trust_master_keys(plan: RotationPlan, kms: KmsClient, new_kms: KmsClient) -> None:
    """Trust the master keys that a rotation names: who asks for it says with it that these are theirs."""
    kms.trust_also({*plan.moves, *(plan.only_master_keys or ())})
    new_kms.trust_also(plan.moves.values())


def master_key_id(configuration: Configuration | None, key: str) -> str:
    """Return the identifier of a master key, given that or its name in the configuration.

    Raises:
        ConfigurationError: It is the name of a data key.
    """
    if configuration is None:
        return key
    if key in configuration.data_keys and key not in configuration.master_keys:
        raise ConfigurationError(
            f"{key!r} is a data key: a rotation changes master keys.", hint="Use rekey for new data keys."
        )
    return configuration.master_keys.get(key, key)


def _check_known(kms: KmsClient, versions: MasterKeyVersions, master_key_ids: Collection[str]) -> None:
    """Refuse master keys that the KMS does not have: a name with a typing error would rotate nothing."""
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


def _check_usable(kms: KmsClient, versions: MasterKeyVersions, target: str) -> None:
    """Refuse to move to a master key that is not there, before any file is touched."""
    description = versions.describe(target, new=True)
    if description is not None and not description.enabled:
        raise MasterKeyDisabledError(backend=kms.backend, operation="wrap", master_key_id=target)


def _instance_of(configuration: Configuration | None) -> KmsInstance:
    """Return what new files say of their KMS."""
    settings = configuration.kms if configuration is not None else None
    if settings is None:
        return KmsInstance()
    return KmsInstance(settings.instance_id, getattr(settings, "instance_url", "DEFAULT"))


def prefix_of(
    keys: KeyService, table_name: str | None, aad_prefix: str | bytes | None, *, opens_to_others: bool = False
) -> AadPrefixOf:
    """Return what tells the AAD prefix that a file must have, given what it stores, or that it has none.

    Args:
        keys: Of the configuration.
        table_name: The table; None where there is only one, or where files may be of any.
        aad_prefix: What the caller expects.
        opens_to_others: Whether other people may unwrap the keys from then on.
    """
    is_one_table = table_name is not None or len(keys.configuration.tables) == 1
    is_strict = opens_to_others and is_one_table

    def expected(location: FileLocation, stored: bytes | None) -> AadPrefix:
        if stored is not None and aad_prefix is None and not is_strict:
            # Nobody else can read it afterwards; a file under another prefix, or under none, must not be left
            # behind.
            return None
        return keys.expected_aad_prefix(location, table_name, aad_prefix, stored)

    return expected
