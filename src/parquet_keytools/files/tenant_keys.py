"""Creates the master keys of new values of a placeholder, such as a new tenant."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parquet_keytools.config.document import list_of_names, one_of
from parquet_keytools.config.key_policy import keys_of_value
from parquet_keytools.config.settings import placeholders
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files.key_service import KeyService


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
