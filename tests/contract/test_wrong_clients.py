"""The contract over clients that are wrong, each in one way: authors would not learn of a missed mistake."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ConfigDict

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.client import (
    KmsClient,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.contract_tests import KmsClientContract
from parquet_keytools.kms.in_memory import InMemoryKms, InMemorySettings
from parquet_keytools.secret_bytes import SecretBytes


class Contract(KmsClientContract):
    """An author's test class; its tests are called here one by one."""

    @pytest.fixture
    def kms(self) -> KmsClient:
        raise NotImplementedError

    @pytest.fixture
    def master_key_id(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def other_master_key_id(self) -> str:
        raise NotImplementedError

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.disable(master_key_id)

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.deny(master_key_id)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        assert isinstance(kms, InMemoryKms)
        kms.add_version(master_key_id)


TESTS = [name for name, _ in inspect.getmembers(Contract, inspect.isfunction) if name.startswith("test_")]


def run(test: str, client: type[InMemoryKms]) -> None:
    kms = client({"one": None, "two": None})
    values = {
        "kms": kms,
        "master_key_id": "one",
        "other_master_key_id": "two",
        "unknown_master_key_id": "no-such-master-key",
        "length": 17 if test == "test_refuses_a_key_that_is_no_aes_key" else 16,
    }
    method = getattr(Contract(), test)
    method(**{name: values[name] for name in inspect.signature(method).parameters})


class VersionedKms(InMemoryKms):
    """States in a wrapped key which version wrapped it, and unwraps only with that version."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        wrapped_key = super()._wrap(key, master_key_id)
        return f"v{len(self._master_keys[master_key_id].versions)}:{wrapped_key}"

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        self._usable(master_key_id, "unwrap")
        version, _, rest = wrapped_key.partition(":")
        key = super()._unwrap(rest, master_key_id)
        versions = self._master_keys[master_key_id].versions
        for number in range(1, len(versions) + 1):
            if version == f"v{number}":
                alone = InMemoryKms({master_key_id: versions[number - 1].key})
                return alone._unwrap(rest, master_key_id) and key
        raise WrappedKeyInvalidError

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        version, colon, _ = wrapped_key.partition(":")
        return version[1:] if colon and version[:1] == "v" and version[1:].isdecimal() else None


@pytest.mark.parametrize("client", [InMemoryKms, VersionedKms])
@pytest.mark.parametrize("test", TESTS)
def test_right_clients_keep_it(test: str, client: type[InMemoryKms]) -> None:
    run(test, client)


# --- clients that are wrong ---


class NoCipher(InMemoryKms):
    """Its wrapped keys are the keys."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return strict_base64.encode(key.reveal())

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return SecretBytes(strict_base64.decode(wrapped_key))


class OneMasterKey(InMemoryKms):
    """Wraps with the same master key for all."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return super()._wrap(key, "one" if master_key_id == "two" else master_key_id)

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return super()._unwrap(wrapped_key, "one" if master_key_id == "two" else master_key_id)


class NoTag(InMemoryKms):
    """Detects no damage, as with AES-CTR."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        self._usable(master_key_id, "wrap")
        return strict_base64.encode(bytes(byte ^ 0x5A for byte in key.reveal()))

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        self._usable(master_key_id, "unwrap")
        return SecretBytes(bytes(byte ^ 0x5A for byte in strict_base64.decode(wrapped_key)))


class TakesMore(InMemoryKms):
    """Ignores bytes after a wrapped key."""

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        for end in range(40, len(wrapped_key) + 1, 4):
            try:
                return super()._unwrap(wrapped_key[:end], master_key_id)
            except WrappedKeyInvalidError:
                continue
        raise WrappedKeyInvalidError


class CallsDamageAnOutage(InMemoryKms):
    """Readers would retry for a minute, and a rotation would stop."""

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        try:
            return super()._unwrap(wrapped_key, master_key_id)
        except WrappedKeyInvalidError:
            raise KmsUnavailableError from None


class NamesAnotherMasterKey(InMemoryKms):
    """The error would be about an unrelated master key."""

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        try:
            return super()._unwrap(wrapped_key, master_key_id)
        except KmsError as error:
            raise type(error)(master_key_id="another") from None


class CreatesMasterKeys(InMemoryKms):
    """A misspelt name becomes a master key."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        if master_key_id not in self._master_keys:
            self.create_key(master_key_id)
        return super()._wrap(key, master_key_id)


class CallsAMissingKeyDenied(InMemoryKms):
    """Readers that hide denied columns would return less data than there is."""

    def _existing(self, master_key_id: str, operation: str) -> Any:
        if master_key_id not in self._master_keys:
            raise KmsAccessDeniedError
        return super()._existing(master_key_id, operation)


class DescribesWhatIsMissing(InMemoryKms):
    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return MasterKeyDescription(master_key_id, enabled=True)


class AnyLength(InMemoryKms):
    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return ["x" for _ in requests]


class OtherOrder(InMemoryKms):
    """Each answer belongs to another request."""

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return super()._unwrap_many(requests)[::-1]


class OneFailureIsAll(InMemoryKms):
    """The failure of one request is raised for all."""

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return [self._unwrap(request.wrapped_key, request.master_key_id) for request in requests]

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return [value_or_raise(outcome) for outcome in super()._rewrap_many(requests)]


class FirstHundred(InMemoryKms):
    """Accepts no more in one call."""

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return super()._wrap_many(requests[:100])


class AsksTwice(InMemoryKms):
    """Repeats equal requests, and makes a call for no requests."""

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        self._call_counts["unwrap"] += len(requests) or 1
        return self._unwrap_many(requests)


class RewrapsToTheOldOne(InMemoryKms):
    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return super()._rewrap_many([replace(r, new_master_key_id=r.master_key_id) for r in requests])


class RewrapsNothing(VersionedKms):
    """Leaves the version as it is, so that the old one can never be destroyed."""

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        outcomes = super()._rewrap_many(requests)
        return [
            request.wrapped_key
            if isinstance(outcome, str) and request.master_key_id == request.new_master_key_id
            else outcome
            for request, outcome in zip(requests, outcomes, strict=True)
        ]


class ForgetsOldVersions(InMemoryKms):
    def add_version(self, master_key_id: str, key: SecretBytes | bytes | None = None) -> int:
        count = super().add_version(master_key_id, key)
        del self._master_keys[master_key_id].versions[0]
        return count


class BelievesTheVersion(VersionedKms):
    """An attacker makes old wrapped keys look new: they would never be re-wrapped."""

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return InMemoryKms._unwrap(self, wrapped_key.partition(":")[2], master_key_id)


class StumblesOverText(VersionedKms):
    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        return str(int(wrapped_key[1 : wrapped_key.index(":")]))


class DescribesAsDisabled(InMemoryKms):
    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        self._existing(master_key_id, "describe")
        return MasterKeyDescription(master_key_id, enabled=False)


class ListsOthers(InMemoryKms):
    def master_key_ids(self) -> frozenset[str]:
        return frozenset({"three"})


class DisabledUnwraps(InMemoryKms):
    """As with a cache of master keys."""

    def _usable(self, master_key_id: str, operation: str) -> Any:
        master_key = self._existing(master_key_id, operation)
        return master_key if operation == "unwrap" else super()._usable(master_key_id, operation)


class CallsADisabledKeyMissing(InMemoryKms):
    def _usable(self, master_key_id: str, operation: str) -> Any:
        try:
            return super()._usable(master_key_id, operation)
        except MasterKeyDisabledError:
            raise MasterKeyNotFoundError from None


class DescribesADisabledKeyAsEnabled(InMemoryKms):
    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        self._existing(master_key_id, "describe")
        return MasterKeyDescription(master_key_id, enabled=True)


class OneDisabledIsAll(InMemoryKms):
    def _usable(self, master_key_id: str, operation: str) -> Any:
        if not all(key.enabled and not key.denied for key in self._master_keys.values()):
            kind = KmsAccessDeniedError if self._master_keys["one"].denied else MasterKeyDisabledError
            raise kind
        return super()._usable(master_key_id, operation)


class CallsADeniedKeyDisabled(InMemoryKms):
    def _usable(self, master_key_id: str, operation: str) -> Any:
        try:
            return super()._usable(master_key_id, operation)
        except KmsAccessDeniedError:
            raise MasterKeyDisabledError from None


class SharedBuffer(InMemoryKms):
    """Gives a thread what another thread passed in."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        super().__init__(keys)
        self._calls = itertools.count()
        self._all_are_there = threading.Barrier(16)

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        self._last = key
        if next(self._calls) < 16:
            self._all_are_there.wait(60)
        return super()._wrap(self._last, master_key_id)


class CountsNothing(InMemoryKms):
    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._wrap_many(requests)


class ShowsTheKey(InMemoryKms):
    """In the text of an error, as an SDK that quotes its request."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        if master_key_id not in self._master_keys:
            raise MasterKeyNotFoundError(f"not for {key.reveal().hex()}")
        return super()._wrap(key, master_key_id)


class ShowsItself(InMemoryKms):
    def __repr__(self) -> str:
        return f"ShowsItself({getattr(self, '_last', b'')!r})"

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        self._last = key.reveal()
        return super()._wrap(key, master_key_id)


class ClosesOnce(InMemoryKms):
    is_open = True

    def close(self) -> None:
        if not self.is_open:
            raise ValueError("I/O operation on closed connection")
        self.is_open = False


class OpenSettings(InMemorySettings):
    model_config = ConfigDict(extra="allow")


class TakesAnySettings(InMemoryKms):
    """Ignores a misspelt setting."""

    Settings = OpenSettings


class NoName(InMemoryKms):
    backend = ""


FOUND_BY: dict[str, list[type[InMemoryKms]]] = {
    "test_unwraps_what_it_wrapped": [NoCipher],
    "test_wraps_with_the_master_key_asked_for": [OneMasterKey, NoTag],
    "test_refuses_a_key_that_is_no_aes_key": [AnyLength],
    "test_refuses_a_damaged_wrapped_key": [NoTag, TakesMore, CallsDamageAnOutage, NamesAnotherMasterKey],
    "test_knows_that_a_master_key_is_missing": [CreatesMasterKeys, CallsAMissingKeyDenied, DescribesWhatIsMissing],
    "test_many_keys_have_their_own_outcomes": [OtherOrder, OneFailureIsAll],
    "test_many_keys_may_be_very_many": [OtherOrder, FirstHundred],
    "test_duplicates_are_asked_for_once": [AsksTwice],
    "test_nothing_is_asked_for_nothing": [AsksTwice],
    "test_rewraps_to_another_master_key": [RewrapsToTheOldOne, OneMasterKey],
    "test_rewraps_many_with_their_own_outcomes": [OneFailureIsAll, OneMasterKey],
    "test_rewraps_to_the_current_version": [RewrapsNothing, ForgetsOldVersions],
    "test_a_changed_version_is_not_unwrapped": [BelievesTheVersion],
    "test_reads_a_version_from_whatever_it_is_given": [StumblesOverText],
    "test_describes_a_master_key": [DescribesAsDisabled, ListsOthers],
    "test_a_disabled_key_does_nothing": [
        DisabledUnwraps,
        CallsADisabledKeyMissing,
        DescribesADisabledKeyAsEnabled,
        OneDisabledIsAll,
        NamesAnotherMasterKey,
    ],
    "test_a_denied_key_does_nothing": [DisabledUnwraps, CallsADeniedKeyDisabled, OneDisabledIsAll],
    "test_many_threads_share_a_client": [SharedBuffer, CountsNothing],
    "test_no_error_shows_a_key": [ShowsTheKey, ShowsItself],
    "test_closes_twice": [ClosesOnce],
    "test_has_a_name_and_settings": [TakesAnySettings, NoName],
}


@pytest.mark.parametrize("test", TESTS)
def test_wrong_clients_are_found(test: str) -> None:
    """By the contract test that is meant for it."""
    for client in FOUND_BY[test]:
        with pytest.raises((AssertionError, pytest.fail.Exception, KmsError, ValueError)) as caught:
            run(test, client)
        # The client is wrong in this way only.
        assert "unexpected " not in str(caught.value)
