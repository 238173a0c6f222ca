"""What a caller asks for, in the words of a configuration, brought to the parts that do it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from parquet_keytools.config.document import Mistake, did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import check_moves
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.errors import ConfigurationError, MasterKeyDisabledError, MasterKeyNotFoundError, OutputError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.batch import KmsInstance
from parquet_keytools.rotation.data_set_run import OnFile, RunOptions, change_data_set
from parquet_keytools.rotation.held_keys import AadPrefixOf
from parquet_keytools.rotation.journal import (
    FORMER_JOURNAL_NAME,
    Journal,
    JournalInUseError,
    JournalUnsafeError,
    is_inside,
    journal_folder,
    kms_digest,
    refuse_inside,
)
from parquet_keytools.rotation.replaced_keys import new_rotation_id
from parquet_keytools.rotation.report import RotationReport
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.rewrapping import Rewrapping
from parquet_keytools.rotation.rotation_plan import (
    MasterKeyVersions,
    RotationContext,
    RotationPlan,
    TableMembership,
    check_names,
)
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import file_or_folder


@dataclass(frozen=True)
class RotationRequest:
    """What a rotation is asked for; see `Keytools.rotate`."""

    # None, here and in `keep_old`, is what the configuration says.
    moves: Mapping[str, str] | None = None
    only_master_keys: Collection[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    keep_old: bool | None = None
    dry_run: bool = False
    journal: Path | None = None
    new_kms: KmsClient | None = None
    new_configuration: Configuration | None = None
    table_name: str | None = None
    aad_prefix: str | bytes | None = None
    keep_results: bool = True
    on_file: OnFile | None = None
    follow_links: bool = False

    def __post_init__(self) -> None:
        """Refuse one name in place of several."""
        if self.only_master_keys is not None:
            list_of_names("only_master_keys", self.only_master_keys)


def run_rotation(keys: KeyService, path: FileLocation, request: RotationRequest) -> RotationReport:
    """Rotate master keys; see `Keytools.rotate`.

    Raises:
        ConfigurationError: There is no KMS, or a name means no master key, or the moves are not possible.
        KmsError: A master key to move to cannot be used.
        FileNotFoundError: There is no such file or folder.
        OutputError: The journal is of a rotation with other parameters, or cannot be written.
    """
    options = RunOptions(request.journal, request.keep_results, request.on_file, follow_links=request.follow_links)
    return rotate_data_set(path, rotation_context(keys, request), options)


def rotate_data_set(path: FileLocation, context: RotationContext, options: RunOptions) -> RotationReport:
    """Rotate the master keys of a file, or of all Parquet files under a folder.

    Raises:
        ConfigurationError: The journal would lie in the data set.
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: The folder has no Parquet files.
        OutputError: The journal is of a rotation with other parameters, or others may write it, or it cannot be
            written.
    """
    report = RotationReport(dry_run=context.dry_run)
    is_folder = not file_or_folder(path).is_file
    if is_folder and path.is_local and (former := Path(path.path) / FORMER_JOURNAL_NAME).is_file():
        report.ignored_journal = str(former)
    journal = _open_journal(path, context, options, report, is_folder=is_folder)
    change_data_set(path, Rewrapping(context, journal), report, options, journal)
    report.kms_calls = context.rewrapper.calls + context.versions.calls
    if context.dry_run:
        # To describe master keys changes nothing, so it was done.
        report.expected_kms_calls = context.rewrapper.expected_calls + context.versions.calls
    return report


def _open_journal(
    path: FileLocation, context: RotationContext, options: RunOptions, report: RotationReport, *, is_folder: bool
) -> Journal | None:
    if context.dry_run or (options.journal is None and not is_folder):
        return None
    if options.journal is not None:
        refuse_inside(options.journal, path)
    parameters = {
        "path": str(path) if not path.only else [path.path, *path.only],
        **context.plan.parameters(),
        "keep_old": context.keep_old is not None,
        "kms": context.kms_digest,
    }
    try:
        if options.journal is None and is_inside(journal_folder(), path):
            report.no_journal = f"{journal_folder()} lies in the data set itself"
            return None
        journal = Journal(options.journal, parameters)
    except JournalInUseError:
        # Two rotations of one data set do no harm; the second goes without.
        report.journal_in_use = True
        return None
    except JournalUnsafeError:
        raise
    except OutputError as error:
        if options.journal is not None:
            raise
        # Nobody asked for one: such as with a home that is read-only.
        report.no_journal = str(error)
        return None
    for master_key_id, version in journal.versions.items():
        now = context.versions.current(master_key_id, new=True)
        if None not in (version, now) and version != now:
            # A newer version is there since: what was made is not current any more.
            journal.forget_made()
            break
    return journal


def rotation_context(keys: KeyService, request: RotationRequest) -> RotationContext:
    """Return what all files of a rotation share.

    Raises:
        ConfigurationError: There is no KMS, or a name means no master key, or the moves are not possible.
        KmsError: A master key to move to cannot be used.
    """
    wanted = _configured_moves(keys, request) if request.moves is None else request.moves
    keep_old = keys.configuration.rotation.keep_old if request.keep_old is None else request.keep_old
    kms = _kms_of(keys)
    if request.new_configuration is not None and request.new_kms is None:
        # Else the rotation would stay within the KMS that is to be left.
        raise ConfigurationError(
            "there are no master keys to move to: the other configuration has no KMS.",
            hint="Add a `kms:` section to it.",
        )
    new_kms = request.new_kms or kms
    new_configuration = request.new_configuration or (keys.configuration if new_kms is kms else None)
    only = None
    if request.only_master_keys is not None:
        only = frozenset(master_key_id(keys.configuration, key) for key in request.only_master_keys)
    moves = {
        master_key_id(keys.configuration, old): master_key_id(new_configuration, new)
        for old, new in wanted.items()
    }
    if len(moves) < len(wanted):
        raise ConfigurationError("two names of master keys to be moved mean the same one.", hint="Name it once.")
    plan = RotationPlan(
        moves=moves,
        only_master_keys=only,
        older_than=request.older_than,
        new_keks=request.new_keks,
        other_kms=new_kms is not kms,
    )
    trust_master_keys(plan, kms, new_kms)
    versions = MasterKeyVersions(kms, new_kms)
    _check_known(kms, versions, {*plan.moves, *(only or ())})
    for target in sorted(set(plan.moves.values())):
        _check_usable(new_kms, versions, target)
    check_names(plan, versions)
    if new_kms is kms:
        _warn_of_readers(keys, request.table_name, plan)
    return RotationContext(
        plan=plan,
        rewrapper=Rewrapper(kms, new_kms, new_keks=request.new_keks, only_count=request.dry_run),
        versions=versions,
        data_keys=keys.data_keys,
        aad_prefix_of=prefix_of(keys, request.table_name, request.aad_prefix, plan),
        membership=TableMembership.of(keys, request.table_name, plan),
        instance=_instance_of(new_configuration) if new_kms is not kms else None,
        kms_digest=kms_digest(keys.configuration, new_configuration),
        keep_old=new_rotation_id() if keep_old else None,
        dry_run=request.dry_run,
    )


def _configured_moves(keys: KeyService, request: RotationRequest) -> Mapping[str, str]:
    moves = keys.configuration.rotation.moves
    if moves and (request.new_kms is not None or request.new_configuration is not None):
        mistake = Mistake(("rotation", "moves"), "moves are within one KMS, but another one is given.")
        raise keys.configuration.error_for([mistake])
    if moves and keys.kms is not None:
        check_moves(keys.configuration, keys.kms.master_key_ids())
    return moves


def _warn_of_readers(keys: KeyService, table_name: str | None, plan: RotationPlan) -> None:
    """Warn of moves after which tables would refuse their files, before any of these is touched."""
    tables = keys.configuration.tables if table_name is None else [table_name]
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
                    stacklevel=5,
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


def _kms_of(keys: KeyService) -> KmsClient:
    if keys.kms is None:
        raise ConfigurationError(
            "there are no master keys to rotate: the configuration has no KMS.",
            hint="Add a `kms:` section to the configuration.",
        )
    return keys.kms


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
    keys: KeyService, table_name: str | None, aad_prefix: str | bytes | None, plan: RotationPlan | None = None
) -> AadPrefixOf:
    """Return what tells the AAD prefix that a file must have, given what it stores, or that it has none.

    Args:
        keys: Of the configuration.
        table_name: The table; None where there is only one, or where files may be of any.
        aad_prefix: What the caller expects.
        plan: What is done with the files; None where nothing is.
    """
    is_one_table = table_name is not None or len(keys.configuration.tables) == 1
    is_strict = plan is not None and plan.opens_to_others and is_one_table

    def expected(location: FileLocation, stored: bytes | None) -> AadPrefix:
        if stored is not None and aad_prefix is None and not is_strict:
            # Nobody else can read it afterwards; a file under another prefix, or under none, must not be left
            # behind.
            return None
        return keys.expected_aad_prefix(location, table_name, aad_prefix, stored)

    return expected
