"""Joins configuration, KMS and keys: the keys of new files of a table, and files opened for reading."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parquet_keytools import audit
from parquet_keytools.config.document import did_you_mean, list_of_names, one_of
from parquet_keytools.config.key_policy import (
    ChosenKey,
    ColumnPath,
    DataKeyReference,
    MasterKeyReference,
    check_key_names,
    configured_master_key_ids,
    keys_of_value,
    moved_master_key_ids,
    resolve_columns,
    resolve_key,
)
from parquet_keytools.config.labels import FieldLabels
from parquet_keytools.config.settings import Configuration, TableSettings, placeholders, values_in_folders
from parquet_keytools.encryption import file_encryption
from parquet_keytools.encryption.aad import ExpectedAadPrefix, delimited_prefix, expected_aad_prefix
from parquet_keytools.encryption.file_encryption import FileEncryption, KeyChoice
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.errors import ConfigurationError, value_or_raise
from parquet_keytools.files.denied_columns import with_digests
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    WantedColumns,
    open_files,
    read_again_if_changed,
)
from parquet_keytools.files.placement import land_keys, new_references
from parquet_keytools.files.table_check import (
    ColumnValue,
    TableCheck,
    column_value,
    protected_names,
    refuse_folders_above,
    seen_key,
)
from parquet_keytools.format.file_layout import accept_footers_up_to
from parquet_keytools.format.partial_footers import VisibleKeyValues
from parquet_keytools.keys.key_material import KeyMaterial, KeyReference, parse_key_metadata
from parquet_keytools.keys.key_wrapping import (
    Clock,
    DataKeys,
    DekToWrap,
    KeyUnwrapper,
    KeyWrapper,
    KmsKeys,
)
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.registry import make_client
from parquet_keytools.runtime.presentation import warn_caller
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation


def no_one_value(path: str, problem: str) -> ConfigurationError:
    """Return the error for a file whose column does not give it one value."""
    return ConfigurationError(
        f"{path}: {problem}, and the keys of a file depend on its one value.",
        hint="Write the rows of each value to a file of their own, with statistics; or use `from: partition`, and "
        "`write_dataset` with `partitioning`.",
    )


@dataclass(frozen=True)
class TablePolicy:
    """The policy of a table for one schema: leaf path -> key, and name of a master key -> its identifier.

    Of a key with a placeholder, the identifier is a template. `key_values` come from the caller, `column_values`
    from the file; None stands for a file without rows.
    """

    table_name: str
    table: TableSettings
    columns: Mapping[ColumnPath, ChosenKey]
    master_key_ids: Mapping[str, str]
    key_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    column_values: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def plaintext_columns(self) -> tuple[str, ...]:
        """Dotted paths of the leaf columns that are written in plaintext."""
        return tuple(".".join(path) for path, key in self.columns.items() if key.kind == "plaintext")

    def used_master_key_ids(self) -> list[str]:
        """Return the identifiers of the master keys that every file of this schema needs, so not of templates."""
        used = {self.table.footer_key, *(key.key_name for key in self.columns.values())}
        identifiers = {master_key_id for name, master_key_id in self.master_key_ids.items() if name in used}
        return sorted(identifier for identifier in identifiers if not placeholders(identifier))

    def with_column_values(
        self, footer: Footer, deks: Mapping[ColumnPath, SecretBytes] | None = None
    ) -> TablePolicy:
        """Return the policy for a file, if keys depend on values of its columns, each of which must be unique."""
        values: dict[str, str | None] = {}
        for name in self.table.value_columns:
            found = column_value(footer, name, deks or {}) or ColumnValue(
                problem=f"column {name!r} has no key here"
            )
            if found.problem:
                raise no_one_value(footer.path, found.problem)
            values[name] = found.value
        return dataclasses.replace(self, column_values=values) if values else self

    def check_partition_columns(self, names: Collection[str]) -> None:
        """Refuse to partition by columns under `column_keys`, and warn of others that are encrypted."""
        for path, key in self.columns.items():
            if path[0] not in names or key.kind == "plaintext":
                continue
            message = f"the values of column {path[0]!r} would be in the names of folders, in plaintext"
            if key.is_listed:
                raise ConfigurationError(
                    f"{message}, and the table {self.table_name!r} has it under the key {key.key_name!r}.",
                    hint="Partition by another column, or take this one out of column_keys.",
                )
            warn_caller(f"{message}, for the data set is partitioned by it")

    def refuse_folder_names(self, names: Iterable[str]) -> None:
        """Refuse names of folders that would give values to encrypted columns: no reader opens such files."""
        protected = [path for path, key in self.columns.items() if key.kind != "plaintext"]
        for name, column in protected_names(names, protected, None).items():
            raise ConfigurationError(
                f"folders with the name {name!r} would give values to column {column!r}, which is encrypted in "
                "the files: readers refuse such files.",
                hint="Partition by another column, or leave this one out of the files.",
            )


@dataclass(frozen=True)
class NewFileKeys:
    """The keys of a new file, its external key material by reference, and the KMS that the footer names."""

    encryption: FileEncryption
    key_materials: dict[str, KeyMaterial] | None
    kms_instance_id: str | None

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material of key metadata; None for a data key."""
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference):
            return (self.key_materials or {}).get(parsed.reference)
        return parsed if isinstance(parsed, KeyMaterial) else None


class KeyService:
    """The keys of one configuration, with the caches that belong to its KMS client."""

    def __init__(self, configuration: Configuration, kms: KmsClient | None, clock: Clock) -> None:
        self.given_kms = kms is not None
        if kms is None and configuration.kms is not None:
            kms = make_client(configuration.kms, configuration.folder)
        check_key_names(configuration, kms.master_key_ids() if kms is not None else None)
        self.configuration = configuration
        accept_footers_up_to(configuration.reading.max_footer_bytes)
        self.kms = kms
        if kms is not None:
            kms.trust(configured_master_key_ids(configuration), configuration.template_of)
        self._wrapper = KeyWrapper(kms, clock) if kms is not None else None
        self._unwrapper = KeyUnwrapper(kms, clock)
        without_metadata = configuration.reading.keys_without_metadata
        self.data_keys = DataKeys(configuration.data_keys, without_metadata.footer, without_metadata.columns)
        self._table_checks: dict[str, TableCheck] = {}
        self.identities = FileIdentities(refuses=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.given_kms:
            raise ConfigurationError(
                "a Keytools whose KMS client was passed in cannot be pickled.",
                hint="Describe the KMS under `kms:` in the configuration instead.",
            )
        if getattr(self.kms, "has_generated_keys", False):
            raise ConfigurationError(
                "a Keytools with random master keys cannot be pickled: another process would have other keys.",
                hint="Write the keys of the in_memory KMS into the configuration, or use a keystore.",
            )
        return _restored, (self.configuration, self.identities)

    def clear_caches(self) -> None:
        """Forget all keys, so that the KMS is called again."""
        self._unwrapper.clear_cache()
        if self._wrapper is not None:
            self._wrapper.clear_cache()

    def policy(
        self,
        table_name: str | None,
        leaf_paths: Sequence[ColumnPath],
        field_labels: FieldLabels,
        key_values: Mapping[str, str] | None = None,
    ) -> TablePolicy:
        """Return the policy of a table for leaf columns and labels, with placeholder -> value from the caller."""
        name, table = self.configuration.select_table(table_name)
        for placeholder in key_values or {}:
            if placeholder not in table.key_values:
                raise ConfigurationError(
                    f"no key of the table {name!r} has the placeholder {placeholder!r}.",
                    hint=did_you_mean(placeholder, table.key_values) or one_of(table.key_values),
                )
        master_key_ids: dict[str, str] = {}
        for _, key in table.key_uses():
            reference = resolve_key(self.configuration, key)
            if isinstance(reference, MasterKeyReference):
                master_key_ids[key] = reference.master_key_id
        columns = resolve_columns(self.configuration, name, leaf_paths, field_labels=field_labels)
        return TablePolicy(name, table, columns, master_key_ids, key_values or {})

    def with_values(self, policy: TablePolicy, location: FileLocation | str) -> TablePolicy:
        """Return the policy with the master keys of the values that a file has, of which none may be ambiguous."""
        if not policy.table.has_templates:
            return policy
        values: dict[str, str] = {}
        for placeholder, setting in policy.table.key_values.items():
            given = {policy.key_values.get(placeholder), policy.column_values.get(placeholder)} - {None}
            in_path = values_in_folders(str(location), placeholder)
            found = in_path | {value for value in given if value is not None}
            if len(found) > 1:
                shown = ", ".join(repr(value[:200]) for value in sorted(found))
                raise ConfigurationError(
                    f"{location}: the values of {placeholder} in its folders, its column and the argument differ: "
                    f"{shown}.",
                    hint="Each file has one value, and so one key.",
                )
            if (
                not found
                or (setting.source == "partition" and not in_path)
                or (setting.source == "column" and placeholder not in policy.column_values)
            ):
                how = {
                    "partition": f"Write it into a folder `{placeholder}=VALUE`, or partition by {placeholder}.",
                    "argument": f'Give key_values={{"{placeholder}": VALUE}}, or --set {placeholder}=VALUE.',
                    "column": f"Write rows with a value of the column {placeholder!r}.",
                }[setting.source]
                raise ConfigurationError(
                    f"{location} has no value of {placeholder}, on which its keys depend.", hint=how
                )
            values[placeholder] = found.pop()
        keys = keys_of_value(self.configuration, policy.table_name, values)
        identifiers = {name: key.master_key_id for name, key in keys.items() if name in policy.master_key_ids}
        return dataclasses.replace(policy, master_key_ids={**policy.master_key_ids, **identifiers})

    def table_check(self, table_name: str | None) -> TableCheck | None:
        """Return the comparison with a table, None standing for the only one; None without tables."""
        name = self.configuration.table_of_files(table_name)
        if name is None:
            return None
        if name not in self._table_checks:
            self._table_checks[name] = TableCheck(self.configuration, name)
        return self._table_checks[name]

    def expected_aad_prefix(
        self,
        location: FileLocation,
        table_name: str | None,
        aad_prefix: str | bytes | None,
        stored: bytes | None = None,
    ) -> ExpectedAadPrefix | None:
        """Return the AAD prefix that a file must have (spec 4.4.1); None if it may have any."""
        # `aad_prefix` is from the caller, in place of the table's; `stored` is in the file, and not authenticated.
        any_file_unique = self.configuration.reading.file_unique_lengths == "any"
        if table_name is None and len(self.configuration.tables) != 1:
            # The prefix of the table that the file seems to belong to, or of all tables if each has one.
            every = [
                table.rendered_aad_prefix(table_name=name, file_name=location.name)
                for name, table in self.configuration.tables.items()
            ]
            rendered = [prefix for prefix in every if prefix is not None]
            own = [prefix for prefix in rendered if stored in ExpectedAadPrefix.of(prefix).candidates]
            if own:
                rendered = own
            elif len(rendered) < len(every):
                rendered = []
        else:
            name, table = self.configuration.select_table(table_name)
            prefix = table.rendered_aad_prefix(table_name=name, file_name=location.name)
            rendered = [] if prefix is None else [prefix]
        return expected_aad_prefix(aad_prefix, rendered, any_file_unique=any_file_unique)

    def kms_keys(self, known: Mapping[tuple[str, str], SecretBytes] | None = None) -> KmsKeys:
        """Return the keys of one operation, which may know some of them."""
        return KmsKeys(self._unwrapper, self.configuration.reading.cache_lifetime_seconds, known)

    def master_key_id(self, name: str) -> str:
        """Return the identifier of a master key."""
        reference = resolve_key(self.configuration, name)
        if not isinstance(reference, MasterKeyReference):
            raise ConfigurationError(
                f"{name!r} is a data key, and only a master key can wrap the key of a list.",
                hint="Name a master key.",
            )
        return reference.master_key_id

    def is_under(self, material: KeyMaterial, name: str) -> bool:
        """Return whether key material of a list names a master key, or one that a move connects with it."""
        wanted = self.master_key_id(name)
        moves = moved_master_key_ids(self.configuration)
        connected = {wanted, *(key for move in moves if wanted in move for key in move)}
        return self._of_file(material).master_key_id in connected

    def new_wrapped_key(self, name: str) -> tuple[SecretBytes, KeyMaterial]:
        """Return a new key of 256 bits, and its key material under a master key, which wraps it directly."""
        assert self._wrapper is not None
        key = SecretBytes.random(256)
        assert self.kms is not None
        master_key_id = self.master_key_id(name)
        to_wrap = DekToWrap(key, master_key_id, is_footer_key=True)
        return key, self._wrapper.wrap([to_wrap], self.kms.instance_of(master_key_id), kek_length_bits=None)[0]

    def unwrap_key(self, material: KeyMaterial) -> SecretBytes:
        """Return the key of key material; raise `KeytoolsError` if it is unavailable."""
        return value_or_raise(self.kms_keys().deks([self._of_file(material)])[0])

    def _of_file(self, material: KeyMaterial) -> KeyMaterial:
        return self._unwrapper.of_file(material, material.kms_instance_id)

    def open_files(
        self,
        locations: Sequence[FileLocation],
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        *,
        again: bool = True,
        wanted: WantedColumns = tuple,
        kms_keys: KmsKeys | None = None,
        identities: FileIdentities | None = None,
        reads_folder_names: bool = True,
    ) -> list[OpenedFile]:
        """Open files for reading, if they match their table; see `opened_file.open_files`."""
        # Without `again`, the caller opens files again if one changed. `identities` are of a data set; else
        # files are compared with all that were opened. `reads_folder_names`: a reader may use names of folders.
        about = audit.about(locations[0]) if len(locations) == 1 else contextlib.nullcontext()

        def opening() -> list[OpenedFile]:
            opened = open_files(
                locations,
                kms_keys or self.kms_keys(),
                self.data_keys,
                aad_prefix_of=lambda location, stored: self.expected_aad_prefix(
                    location, table_name, aad_prefix, stored
                ),
                table_check=self.table_check(table_name),
                allow_plaintext=self.configuration.reading.plaintext_files == "allow",
                allow_ctr=self.configuration.reading.ctr_files == "allow",
                wanted=wanted,
            )
            files = with_digests(self.configuration, self.kms_keys, table_name, opened)
            for file in files if reads_folder_names else ():
                refuse_folders_above(file.location, file.protected_columns, self.table_check(table_name))
            return files

        with about:
            # A file that is being replaced may be read with key material of the other one.
            files = read_again_if_changed(opening) if again else opening()
        if self.configuration.reading.reused_encryption_properties == "reject":
            for opened in files:
                (identities or self.identities).compare(opened)
        return files

    def has_keys_of(self, opened: OpenedFile, policy: TablePolicy) -> bool:
        """Return whether a file is protected as a new file would be: with the same keys for the same columns."""
        policy = self.with_values(policy, opened.location)
        footer, keys = opened.footer, opened.retriever

        def is_key(key_metadata: bytes | None, path: ColumnPath | None, name: str | None) -> bool:
            seen = seen_key(keys, key_metadata, path)
            return seen is not None and name is not None and seen == wanted.get(name, DataKeyReference(name))

        table, columns = policy.table, policy.columns
        wanted = {name: MasterKeyReference(master_key_id) for name, master_key_id in policy.master_key_ids.items()}
        is_plaintext_footer = footer.mode is FooterMode.PLAINTEXT_FOOTER
        if is_plaintext_footer != table.plaintext_footer or not is_key(
            footer.key_metadata, None, table.footer_key
        ):
            return False
        for column in footer.columns:
            key = columns[column.path]
            if column.encryption.name.lower() != key.kind:
                return False
            if key.kind == "column_key" and not is_key(column.key_metadata, column.path, key.key_name):
                return False
        return True

    def wrap_keks(self, policy: TablePolicy) -> None:
        """Wrap the KEKs of a table, if it has any, so that its next files need no KMS call."""
        if self._wrapper is not None and policy.table.double_wrapping:
            any_dek = SecretBytes.random(policy.table.data_key_length_bits)
            deks = [DekToWrap(any_dek, one, is_footer_key=False) for one in policy.used_master_key_ids()]
            self._wrap(policy, deks)

    def new_file_keys(self, policy: TablePolicy, location: FileLocation) -> NewFileKeys:
        """Make the keys of a new file, and wrap them; raise `KmsError` if one cannot be wrapped."""
        policy = self.with_values(policy, location)
        table = policy.table
        own = {path: key.key_name for path, key in policy.columns.items() if key.kind == "column_key"}
        names = [table.footer_key, *(name for name in own.values() if name is not None)]
        deks = [
            SecretBytes.random(table.data_key_length_bits)
            if name in policy.master_key_ids
            else self.data_keys.by_name[name]
            for name in names
        ]
        references = new_references(location, len(names)) if table.key_material == "external" else None
        to_wrap = {
            position: DekToWrap(dek, policy.master_key_ids[name], is_footer_key=position == 0)
            for position, (name, dek) in enumerate(zip(names, deks, strict=True))
            if name in policy.master_key_ids
        }
        materials: dict[int, KeyMaterial] = {}
        if to_wrap:
            assert self._wrapper is not None
            with audit.about(location):
                wrapped = self._wrap(policy, list(to_wrap.values()))
            materials = dict(zip(to_wrap, wrapped, strict=True))
        metadata, key_materials = land_keys(names, materials, references)
        columns: dict[ColumnPath, KeyChoice] = {
            path: ColumnEncryption.FOOTER_KEY if key.kind == "footer_key" else ColumnEncryption.PLAINTEXT
            for path, key in policy.columns.items()
        }
        columns |= {
            path: file_encryption.ColumnKey(dek, key_metadata)
            for path, dek, key_metadata in zip(own, deks[1:], metadata[1:], strict=True)
        }
        prefix = table.rendered_aad_prefix(table_name=policy.table_name, file_name=location.name)
        return NewFileKeys(
            FileEncryption(
                algorithm=Algorithm(table.algorithm),
                footer_dek=deks[0],
                footer_key_metadata=metadata[0],
                columns=columns,
                plaintext_footer=table.plaintext_footer,
                aad_prefix=None if prefix is None else delimited_prefix(prefix),
                visible_key_values=VisibleKeyValues(
                    frozenset(table.plaintext_footer_keys), table.plaintext_footer_key_values == "refuse"
                ),
                store_aad_prefix=table.store_aad_prefix,
            ),
            key_materials,
            self.kms_instance_id(policy),
        )

    def kms_instance_id(self, policy: TablePolicy) -> str | None:
        """Return the KMS that footers of a table name; None if their key is in none."""
        footer_key = policy.master_key_ids.get(policy.table.footer_key)
        return None if footer_key is None or self.kms is None else self.kms.instance_of(footer_key)

    def _wrap(self, policy: TablePolicy, deks: Sequence[DekToWrap]) -> list[KeyMaterial]:
        assert self._wrapper is not None
        table = policy.table
        return self._wrapper.wrap(
            deks,
            self.kms_instance_id(policy),
            kek_length_bits=table.effective_kek_length_bits if table.double_wrapping else None,
            cache_lifetime_seconds=table.cache_lifetime_seconds,
        )


def _restored(configuration: Configuration, identities: FileIdentities) -> KeyService:
    """Create an unpickled `KeyService`, which has no keys yet."""
    keys = KeyService(configuration, None, time.monotonic)
    keys.identities = identities
    return keys


# --- master keys of new values of a placeholder, such as a new tenant ---


@dataclass(frozen=True)
class TenantKey:
    """The master key of a value.

    Attributes:
        value: The value, such as the name of a tenant.
        master_key_id: Identifier of its master key.
        created: Whether the master key was created; False if it existed already.
    """

    value: str
    master_key_id: str
    created: bool


def create_tenant_keys(
    keys: KeyService,
    values: Collection[str],
    table_name: str | None,
    *,
    placeholder: str | None,
    tags: Mapping[str, str] | None,
    policy: Mapping[str, Any] | None,
    on_key: Callable[[TenantKey], None] | None,
) -> list[TenantKey]:
    """Create the master keys of values; see `Keytools.create_tenant_keys`."""
    table_name, table = keys.configuration.select_table(table_name)
    if placeholder is None and len(table.key_values) == 1:
        (placeholder,) = table.key_values
    if placeholder not in table.key_values:
        what = "several placeholders" if placeholder is None else f"no placeholder {placeholder!r}"
        if not table.key_values:
            what = "no key_values"
        raise ConfigurationError(
            f"the table {table_name!r} has {what}.",
            hint=f"Name a placeholder: {one_of(table.key_values)}" if table.key_values else "See docs/tenants.md.",
        )
    used = {name for _, name in table.key_uses() if placeholders(name) == [placeholder]}
    # All values are checked before the first key is created.
    wanted = {
        value: [
            key.master_key_id
            for template, key in keys_of_value(keys.configuration, table_name, {placeholder: value}).items()
            if template in used
        ]
        for value in list_of_names("values", values)
    }
    assert keys.kms is not None
    found = []
    for value, master_key_ids in wanted.items():
        # As JSON, so that no value changes the structure of a policy.
        text = json.dumps([dict(tags or {}), policy]).replace(f"{{{placeholder}}}", json.dumps(value)[1:-1])
        own_tags, own_policy = json.loads(text)
        for master_key_id in master_key_ids:
            policy_text = None if own_policy is None else json.dumps(own_policy)
            created = keys.kms.create_master_key(master_key_id, own_tags, policy_text)
            found.append(TenantKey(value, master_key_id, created))
            if on_key is not None:
                on_key(found[-1])
    return found
