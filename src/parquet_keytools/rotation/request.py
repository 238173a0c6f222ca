"""What a caller asks for, in the words of a configuration, brought to the parts that do it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parquet_keytools.config.mistakes import did_you_mean, one_of
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, MasterKeyDisabledError, MasterKeyNotFoundError
from parquet_keytools.key_service import KeyService
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.data_set_rotation import OnFile, RunOptions, rotate_data_set
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory
from parquet_keytools.rotation.journal import kms_digest
from parquet_keytools.rotation.kept_keys import new_rotation_id
from parquet_keytools.rotation.master_key_versions import MasterKeyVersions
from parquet_keytools.rotation.new_material import KmsInstance
from parquet_keytools.rotation.report import RotationReport
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.rotation_plan import RotationPlan
from parquet_keytools.rotation.window import RotationContext
from parquet_keytools.storage import FileLocation

PrefixOf = Callable[[FileLocation, bytes | None], bytes | None]


@dataclass(frozen=True)
class RotationRequest:
    """What a rotation is asked for; see `Keytools.rotate`."""

    moves: Mapping[str, str] = field(default_factory=dict)
    only_master_keys: Collection[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    keep_old: bool = False
    dry_run: bool = False
    journal: Path | None = None
    new_kms: KmsClient | None = None
    new_configuration: Configuration | None = None
    table_name: str | None = None
    aad_prefix: str | None = None
    keep_results: bool = True
    on_file: OnFile | None = None


def run_rotation(keys: KeyService, path: FileLocation, request: RotationRequest) -> RotationReport:
    """Rotate master keys; see `Keytools.rotate`.

    Raises:
        ConfigurationError: There is no KMS, or a name means no master key, or the moves are not possible.
        KmsError: A master key to move to cannot be used.
        FileNotFoundError: There is no such file or folder.
        OutputError: The journal is of a rotation with other parameters, or cannot be written.
    """
    options = RunOptions(request.journal, request.keep_results, request.on_file)
    return rotate_data_set(path, rotation_context(keys, request), options)


def rotation_context(keys: KeyService, request: RotationRequest) -> RotationContext:
    """Return what all files of a rotation share.

    Raises:
        ConfigurationError: There is no KMS, or a name means no master key, or the moves are not possible.
        KmsError: A master key to move to cannot be used.
    """
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
        for old, new in request.moves.items()
    }
    if len(moves) < len(request.moves):
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
    return RotationContext(
        plan=plan,
        rewrapper=Rewrapper(kms, new_kms, new_keks=request.new_keks, only_count=request.dry_run),
        versions=versions,
        data_keys=keys.data_keys,
        aad_prefix_of=prefix_of(keys, request.table_name, request.aad_prefix),
        instance=_instance_of(new_configuration) if new_kms is not kms else None,
        kms_digest=kms_digest(keys.configuration, new_configuration),
        keep_old=new_rotation_id() if request.keep_old else None,
        dry_run=request.dry_run,
    )


def trust_master_keys(plan: RotationPlan, kms: KmsClient, new_kms: KmsClient) -> None:
    """Trust the master keys that a rotation names: who asks for it says with it that these are theirs."""
    kms.trust_also({*plan.moves, *(plan.only_master_keys or ())})
    new_kms.trust_also(plan.moves.values())


def list_keys(
    keys: KeyService, path: FileLocation, table_name: str | None, aad_prefix: str | None
) -> Iterator[FileKeyUses]:
    """Yield the keys of files; see `Keytools.key_inventory`."""
    kms = keys.kms
    inventory = Inventory(
        Rewrapper(kms, kms, new_keks=False, only_count=False) if kms is not None else None,
        MasterKeyVersions(kms, kms) if kms is not None else None,
        keys.data_keys,
        prefix_of(keys, table_name, aad_prefix),
    )
    return inventory.list(path)


def master_key_id(configuration: Configuration | None, key: str) -> str:
    """Return the identifier of a master key, given that or its name in the configuration.

    Raises:
        ConfigurationError: It is the name of a data key.
    """
    if configuration is None:
        return key
    if key in configuration.data_keys and key not in configuration.master_keys:
        raise ConfigurationError(
            f"{key!r} is a data key: a rotation changes master keys.",
            hint="Use rekey for new data keys.",
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
    description = versions.describe_new(target)
    if description is not None and not description.enabled:
        raise MasterKeyDisabledError(backend=kms.backend, operation="wrap", master_key_id=target)


def _instance_of(configuration: Configuration | None) -> KmsInstance:
    """Return what new files say of their KMS."""
    settings = configuration.kms if configuration is not None else None
    if settings is None:
        return KmsInstance()
    return KmsInstance(settings.instance_id, getattr(settings, "instance_url", "DEFAULT"))


def prefix_of(keys: KeyService, table_name: str | None, aad_prefix: str | None) -> PrefixOf:
    """Return what tells the AAD prefix that a file must have, given what it stores, or that it has none."""

    def expected(location: FileLocation, stored: bytes | None) -> bytes | None:
        if stored is not None and aad_prefix is None:
            # A rotation shows no data and changes no AAD; a file under another prefix, or under none, must not be
            # left behind.
            return None
        return keys.expected_aad_prefix(location, table_name, aad_prefix, stored)

    return expected
