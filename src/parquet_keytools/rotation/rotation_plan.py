"""Which keys a rotation changes, to what, and of which files; and which versions of master keys wrap them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parquet_keytools.config.key_policy import ColumnPath
from parquet_keytools.errors import ConfigurationError, KmsError, MasterKeyNotFoundError, TableMismatchError
from parquet_keytools.files.file_opening import check_column_keys, check_footer_key
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import DataKeys
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription
from parquet_keytools.rotation.batch import KmsInstance
from parquet_keytools.rotation.held_keys import AadPrefixOf, HeldKeys
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.rotation.rewrapper import Rewrapper, WrappedKey

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

    @property
    def known_new(self) -> dict[str, str | None]:
        """Master key of the new KMS -> its newest version, as far as it was asked for."""
        is_new = self._new_kms is not self._kms
        return {key: version for (is_of_new, key), version in self.known.items() if is_of_new == is_new}

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
    """What a rotation is asked for.

    Attributes:
        moves: Identifier of an old master key -> that of the one that takes its place.
        only_master_keys: Identifiers of the master keys that are rotated; None means all, or with `moves` those
            that are moved.
        older_than: Only keys that an older version wrapped, or one that nobody can tell.
    """

    moves: Mapping[str, str] = field(default_factory=dict)
    only_master_keys: frozenset[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    other_kms: bool = False

    def __post_init__(self) -> None:
        chained = sorted(self.moves.keys() & set(self.moves.values())) if not self.other_kms else []
        if chained:
            # A run that goes on after a crash could not tell what was moved to it from what shall be moved away.
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

    def parameters(self) -> dict[str, object]:
        """Return what tells two rotations apart, for the journal."""
        return {
            "moves": dict(sorted(self.moves.items())),
            "only_master_keys": None if self.only_master_keys is None else sorted(self.only_master_keys),
            "older_than": self.older_than,
            "new_keks": self.new_keks,
            "other_kms": self.other_kms,
        }


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
    def of(cls, keys: KeyService, table_name: str | None, plan: RotationPlan) -> TableMembership:
        """Return what a rotation asks of files: those of the table, or where none is named, of one of the tables.

        Files that an earlier run has moved already are of the table, too.
        """
        names = [table_name] if table_name is not None else sorted(keys.configuration.tables)
        checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]
        return cls(checks if plan.opens_to_others else [], keys.data_keys)

    def check_footer(self, keys: HeldKeys) -> None:
        """Refuse a file by its footer's key, before that is unwrapped.

        Raises:
            TableMismatchError: It is not that of a table.
            KeyMaterialError: The key metadata is not valid.
        """
        source = _HeldKeySource(keys, self._data_keys)
        self._one_passes(lambda check: check_footer_key(check, str(keys.location), keys.envelope, source))

    def check_columns(self, keys: HeldKeys) -> None:
        """Refuse a file by the keys of its columns, before these are unwrapped; its footer is authentic by now.

        Raises:
            TableMismatchError: They are not those of the table that has the footer's key, either.
            ConfigurationError: A table has two keys for one of the columns.
        """
        source, footer = _HeldKeySource(keys, self._data_keys), keys.footer
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
class _HeldKeySource:
    """A `KeySource` of the keys that a rotation has read."""

    keys: HeldKeys
    data_keys: DataKeys

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        held = self.keys.key_of(key_metadata)
        return None if held is None else held.material

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        return self.data_keys.name_without_metadata(column_path)


@dataclass(frozen=True)
class RotationContext:
    """What all files of a run share.

    Attributes:
        instance: What footer key material says of the KMS from now on; None leaves that as it is.
        kms_digest: What tells the KMSs from others; for the journal.
        keep_old: The id of this rotation if old key material is to be kept; else None.
        identities: Finds files that share data keys and file unique.
    """

    plan: RotationPlan
    rewrapper: Rewrapper
    versions: MasterKeyVersions
    data_keys: DataKeys
    aad_prefix_of: AadPrefixOf
    membership: TableMembership
    instance: KmsInstance | None = None
    kms_digest: str = ""
    keep_old: str | None = None
    dry_run: bool = False
    identities: FileIdentities = field(default_factory=lambda: FileIdentities(refuses=False))

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change at all, by whichever of its names a file calls it."""
        return self.plan.concerns(self.versions.as_named(master_key_id, self.plan.named))

    def target_of(self, old: WrappedKey, *, has_kek: bool) -> str | None:
        """Return the master key that shall re-wrap a key, or None where the key stays as it is."""
        named = self.versions.as_named(old.master_key_id, self.plan.named)
        target = self.plan.new_master_key_id(
            named, version=self.versions.of(old), current_version=self.versions.current, has_kek=has_kek
        )
        return old.master_key_id if target == named else target


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
