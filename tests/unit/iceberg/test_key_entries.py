"""Which KEK a new snapshot gets, and when there is a new one."""

from __future__ import annotations

import base64
import time
from dataclasses import replace

import pytest
from iceberg_reader import KEYS, key_metadata, open_sealed

from parquet_keytools import parse_configuration
from parquet_keytools.errors import KmsResponseInvalidError, MasterKeyNotTrustedError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.key_chain import (
    CLOCK_SKEW_MS,
    KEK_LIFETIME_MS,
    IcebergKeys,
    KeyChain,
    NewKeys,
    as_json,
    key_length_bits,
)
from parquet_keytools.iceberg.metadata import EncryptionKey, StandardKeyMetadata, TableEncryption

NOW = 1_800_000_000.0
NOW_MS = int(NOW * 1000)


def keys() -> IcebergKeys:
    master_key = base64.b64encode(KEYS["keyA"]).decode()
    document = {"version": 1, "kms": {"type": "in_memory", "keys": {"keyA": master_key}}}
    return IcebergKeys(KeyService(parse_configuration(document), None, time.monotonic))


def table(*entries: EncryptionKey, **properties: str) -> TableEncryption:
    return TableEncryption(
        metadata_location="file:/t/00001.metadata.json",
        location="file:/t",
        table_uuid="",
        properties={"encryption.key-id": "keyA", **properties},
        keys={entry.key_id: entry for entry in entries},
        snapshots=(),
        current_snapshot_id=None,
        statistics=(),
    )


def kek(name: str, age_ms: int, of: IcebergKeys) -> EncryptionKey:
    """Return a KEK of some age; its first bytes are the bytes of its name."""
    fresh = NewKeys(of, lambda: (NOW_MS - age_ms) / 1000)
    state = table()
    entry, _ = fresh.entries_for(KeyChain(state, of), StandardKeyMetadata.fresh(128))
    return replace(entry, key_id=name)


def made(of: IcebergKeys, state: TableEncryption) -> tuple[EncryptionKey, ...]:
    return NewKeys(of, lambda: NOW).entries_for(KeyChain(state, of), StandardKeyMetadata.fresh(128))


def test_the_newest_kek_is_taken_until_it_is_730_days_old() -> None:
    of = keys()
    young, younger = kek("a", 9_000_000, of), kek("b", 8_000_000, of)
    (entry,) = made(of, table(young, younger))
    assert entry.encrypted_by_id == "b" and entry.timestamp is None
    last, over = kek("c", KEK_LIFETIME_MS - 1, of), kek("d", KEK_LIFETIME_MS, of)
    (entry,) = made(of, table(last, over))
    assert entry.encrypted_by_id == "c"
    new, entry = made(of, table(over))
    assert (new.encrypted_by_id, new.timestamp, entry.encrypted_by_id) == ("keyA", str(NOW_MS), new.key_id)
    assert KEK_LIFETIME_MS == 730 * 86_400_000


def test_a_kek_from_the_future_is_not_taken_but_where_a_clock_may_be_ahead() -> None:
    of = keys()
    ahead, too_far = kek("a", -CLOCK_SKEW_MS, of), kek("b", -CLOCK_SKEW_MS - 1, of)
    (entry,) = made(of, table(ahead, too_far))
    assert entry.encrypted_by_id == "a"
    new, entry = made(of, table(too_far))
    assert (new.timestamp, entry.encrypted_by_id) == (str(NOW_MS), new.key_id)
    assert CLOCK_SKEW_MS == 86_400_000


def test_a_kek_without_a_time_is_not_taken() -> None:
    of = keys()
    assert len(made(of, table(replace(kek("a", 0, of), timestamp=None)))) == 2


def test_a_new_kek_is_made_once_for_all_attempts() -> None:
    of = keys()
    new_keys = NewKeys(of, lambda: NOW)
    state = table()
    kms = of.service.kms
    assert kms is not None
    results = [new_keys.entries_for(KeyChain(state, of), StandardKeyMetadata.fresh(128)) for _ in range(3)]
    assert len({kek_entry for kek_entry, _ in results}) == 1
    assert len({entry.key_id for _, entry in results}) == 3
    assert dict(kms.call_counts) == {"wrap": 1, "unwrap": 1}


def test_a_master_key_of_anybody_encrypts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of the metadata file must not get new data encrypted under a key of theirs."""
    of = keys()
    kms = of.service.kms
    assert kms is not None
    monkeypatch.setattr(kms, "_may_be_of_others", lambda master_key_id: True)
    kms.trust(["keyB"])
    state = table()
    with pytest.raises(MasterKeyNotTrustedError):
        NewKeys(of).entries_for(KeyChain(state, of), StandardKeyMetadata.fresh(128))
    kms.trust(["keyA"])
    assert len(NewKeys(of).entries_for(KeyChain(state, of), StandardKeyMetadata.fresh(128))) == 2


@pytest.mark.parametrize(("length", "bits"), [(None, 128), ("16", 128), ("24", 192), ("32", 256)])
def test_entries_open_as_the_format_says(length: str | None, bits: int) -> None:
    of = keys()
    state = table(**({} if length is None else {"encryption.data-key-length": length}))
    metadata = replace(StandardKeyMetadata.fresh(key_length_bits(state)), file_length=99)
    entries = NewKeys(of, lambda: NOW).entries_for(KeyChain(state, of), metadata)
    wrapped, sealed = map(as_json, entries)
    opened = open_sealed(KEYS["keyA"], base64.b64decode(wrapped["encrypted-key-metadata"]), None)
    assert len(opened) * 8 == bits
    timestamp = wrapped["properties"]["KEY_TIMESTAMP"].encode()
    content = open_sealed(opened, base64.b64decode(sealed["encrypted-key-metadata"]), timestamp)
    assert key_metadata(content) == (metadata.encryption_key.reveal(), metadata.aad_prefix, 99)


def test_a_kms_that_wraps_wrongly_replaces_no_kek(monkeypatch: pytest.MonkeyPatch) -> None:
    of = keys()
    old, other = kek("a", 0, of), kek("b", 0, of)
    kms = of.service.kms
    assert kms is not None
    monkeypatch.setattr(kms, "wrap_raw", lambda key, master_key_id: other.encrypted)
    with pytest.raises(KmsResponseInvalidError, match="does not unwrap to the KEK"):
        KeyChain(table(old), of).rewrapped(old)


def test_a_table_under_one_of_several_kmss() -> None:
    """Metadata names the KMS, except for the default KMS: other clients know only the identifier."""
    master_key = base64.b64encode(KEYS["keyA"]).decode()
    kms = {"type": "in_memory", "keys": {"keyA": master_key}}
    document = {
        "version": 1,
        "kms": {"default": "eu", "eu": kms, "us": kms},
        "master_keys": {"pii": {"kms": "us", "id": "keyA"}, "other": {"kms": "eu", "id": "keyA"}},
    }
    several = IcebergKeys(KeyService(parse_configuration(document), None, time.monotonic))
    assert [several.id_in_table(name) for name in ("pii", "other")] == ["us::keyA", "keyA"]
    for name in ("us::keyA", "keyA"):
        properties = {"encryption.key-id": name}
        fresh = made(several, table(**properties))
        state = replace(table(*fresh, **properties), keys={entry.key_id: entry for entry in fresh})
        assert {entry.encrypted_by_id for entry in state.keks} == {name}
        assert several.kek(state.keks[0].encrypted, name)
    assert several.service.kms is not None and several.service.kms.parts("us::keyA")[0].call_counts["wrap"] == 1
