"""How master keys of AWS KMS are named: by key id, key ARN, alias or alias ARN."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ARN = re.compile(r"arn:(aws[a-z-]*):kms:([a-z0-9-]+):([0-9]{12}):(key|alias)/([A-Za-z0-9/_-]{1,256})")
_KEY_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}")
_MULTI_REGION = "mrk-"


@dataclass(frozen=True)
class KmsArn:
    """ARN of a key or an alias.

    Attributes:
        partition: `aws`, `aws-cn`, `aws-us-gov`, ...
        region: Where it is.
        account: Whose it is, 12 digits.
        kind: `key` or `alias`.
        name: The key id, or the alias without `alias/`.
    """

    partition: str
    region: str
    account: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: object) -> KmsArn | None:
        """Return what an ARN says, or None for anything else."""
        parts = _ARN.fullmatch(text) if isinstance(text, str) else None
        return cls(*parts.groups()) if parts else None

    @property
    def is_multi_region_key(self) -> bool:
        """Whether the key has, or may have, replicas in other regions, all with the same key id."""
        return self.kind == "key" and self.name.startswith(_MULTI_REGION)

    def __str__(self) -> str:
        return f"arn:{self.partition}:kms:{self.region}:{self.account}:{self.kind}/{self.name}"


def as_asked(master_key_id: str, region: str | None) -> str:
    """Return how to name a master key to the KMS of a region.

    A multi-Region key has a replica in each of its regions, and each KMS knows only its own. A file written in
    one region names that region's replica; its reader in another one has to ask for the replica there.
    """
    arn = KmsArn.parse(master_key_id)
    if arn and arn.is_multi_region_key and region:
        return str(replace(arn, region=region))
    return master_key_id


def is_alias(master_key_id: str) -> bool:
    """Return whether an identifier is an alias, which may be moved from one key to another."""
    arn = KmsArn.parse(master_key_id)
    return arn.kind == "alias" if arn else master_key_id.startswith("alias/")


def may_stand_for(asked: str, answered: KmsArn) -> bool:
    """Return whether the key of an answer may be the one that was asked for.

    Of an alias that is all that its name can tell; which key it stands for, only the KMS knows.
    """
    arn = KmsArn.parse(asked)
    if answered.kind != "key":
        return False
    if arn is None:
        return is_alias(asked) or answered.name == asked
    same_place = (arn.partition, arn.region, arn.account) == (
        answered.partition,
        answered.region,
        answered.account,
    )
    return same_place and (arn.kind == "alias" or arn.name == answered.name)


def hint_for_missing_key(master_key_id: str, region: str | None) -> str | None:
    """Return what is likely wrong with an identifier that the KMS does not know, or None."""
    arn = KmsArn.parse(master_key_id)
    if arn and region and arn.region != region and not arn.is_multi_region_key:
        return f"It is in {arn.region}, but the configuration asks the KMS of {region}: set `region`."
    if (
        arn is None
        and "/" not in master_key_id
        and ":" not in master_key_id
        and not _KEY_ID.fullmatch(master_key_id)
    ):
        return (
            f"This is neither a key id, an ARN nor an alias: an alias is written {f'alias/{master_key_id}'!r}. "
            "Under `master_keys` a name can be given to any of them."
        )
    return None
