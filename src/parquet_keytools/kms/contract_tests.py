"""The tests that every KMS client must pass. Authors of plug-ins run them over their clients, too.

    import pytest
    from parquet_keytools.kms.contract_tests import KmsClientContract

    class TestAcmeKms(KmsClientContract):
        @pytest.fixture
        def kms(self):
            with AcmeKms(...) as kms:
                yield kms

        @pytest.fixture
        def master_key_id(self): return "one"

        @pytest.fixture
        def other_master_key_id(self): return "two"

Override `disable_key`, `deny_key` and `add_version` if the backend supports them; otherwise, the tests that need
them are skipped. `pytest.register_assert_rewrite("parquet_keytools.kms.contract_tests")` in a conftest.py
shows the values in failed assertions.
"""

from __future__ import annotations

import base64
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.client import (
    KEY_LENGTHS_BYTES,
    KmsClient,
    KmsSettings,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.secret_bytes import SecretBytes

CANARY = SecretBytes(b"\xf0\x01 a key to be looked for \xfe\xff\x00\n!!")
"""A key whose bytes must not appear in any text."""


def wrap_one(kms: KmsClient, key: SecretBytes, master_key_id: str) -> str:
    """Wrap one key, or raise why not."""
    return value_or_raise(kms.wrap_many([WrapRequest(key, master_key_id)])[0])


def unwrap_one(kms: KmsClient, wrapped_key: str, master_key_id: str) -> SecretBytes:
    """Unwrap one key, or raise why not."""
    return value_or_raise(kms.unwrap_many([UnwrapRequest(wrapped_key, master_key_id)])[0])


def rewrap_one(kms: KmsClient, wrapped_key: str, master_key_id: str, new_master_key_id: str | None = None) -> str:
    """Re-wrap one key, by default under the current version of its master key, or raise why not."""
    request = RewrapRequest(wrapped_key, master_key_id, new_master_key_id or master_key_id)
    return value_or_raise(kms.rewrap_many([request])[0])


class KmsClientContract(ABC):
    """The tests. A subclass provides the client."""

    # --- override these ---

    @pytest.fixture
    @abstractmethod
    def kms(self) -> KmsClient:
        """A client that is ready for use."""

    @pytest.fixture
    @abstractmethod
    def master_key_id(self) -> str:
        """A master key that can wrap and unwrap."""

    @pytest.fixture
    @abstractmethod
    def other_master_key_id(self) -> str:
        """Another such master key."""

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        """A well-formed identifier of a master key that does not exist."""
        return "no-such-master-key"

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        """Disable a master key in the KMS."""
        pytest.skip("this backend has no way for the tests to disable a master key")

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        """Take the permission to use a master key from the client."""
        pytest.skip("this backend has no way for the tests to deny a master key")

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        """Rotate a master key in the KMS."""
        pytest.skip("this backend has no way for the tests to rotate a master key")

    # --- one key ---

    @pytest.mark.parametrize("length", KEY_LENGTHS_BYTES)
    def test_unwraps_what_it_wrapped(self, kms: KmsClient, master_key_id: str, length: int) -> None:
        """A key comes back as it was, and is not in its wrapped key."""
        key = SecretBytes.random(length * 8)
        wrapped_key = wrap_one(kms, key, master_key_id)
        assert unwrap_one(kms, wrapped_key, master_key_id) == key
        assert wrapped_key.isascii() and wrapped_key.isprintable()
        assert not _shown(key, wrapped_key)

    def test_wraps_with_the_master_key_asked_for(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """A key that one master key wrapped cannot be unwrapped with another."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(kms, wrapped_key, other_master_key_id)

    @pytest.mark.parametrize("length", [0, 1, 15, 17, 33])
    def test_refuses_a_key_that_is_no_aes_key(self, kms: KmsClient, master_key_id: str, length: int) -> None:
        """A key of another length is refused before the KMS is called."""
        with pytest.raises(ValueError, match="16, 24 or 32"):
            wrap_one(kms, SecretBytes(bytes(length)), master_key_id)
        assert kms.call_counts["wrap"] == 0

    def test_refuses_a_damaged_wrapped_key(self, kms: KmsClient, master_key_id: str) -> None:
        """Every damage is detected, with one class of error that names the master key."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        damaged = _damaged(wrapped_key)
        outcomes = kms.unwrap_many([UnwrapRequest(text, master_key_id) for text in damaged])
        for text, outcome in zip(damaged, outcomes, strict=True):
            assert isinstance(outcome, WrappedKeyInvalidError), text[:200]
            assert (outcome.backend, outcome.operation) == (kms.parts(master_key_id)[0].backend, "unwrap")
            assert outcome.master_key_id == master_key_id
            assert not outcome.retryable

    def test_knows_that_a_master_key_is_missing(
        self, kms: KmsClient, master_key_id: str, unknown_master_key_id: str
    ) -> None:
        """Each operation reports that the master key does not exist, and creates none."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        calls: list[Callable[[], object]] = [
            lambda: wrap_one(kms, CANARY, unknown_master_key_id),
            lambda: unwrap_one(kms, wrapped_key, unknown_master_key_id),
            lambda: rewrap_one(kms, wrapped_key, master_key_id, unknown_master_key_id),
            lambda: kms.describe(unknown_master_key_id),
        ]
        for call in calls * 2:
            with pytest.raises(MasterKeyNotFoundError) as caught:
                call()
            assert caught.value.master_key_id == unknown_master_key_id

    # --- many keys ---

    def test_many_keys_have_their_own_outcomes(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str, unknown_master_key_id: str
    ) -> None:
        """Outcomes are in the order of the requests, and a failure affects no other request."""
        keys = [SecretBytes.random(length * 8) for length in KEY_LENGTHS_BYTES]
        wrapped = kms.wrap_many(
            [
                WrapRequest(keys[0], master_key_id),
                WrapRequest(keys[1], unknown_master_key_id),
                WrapRequest(keys[1], other_master_key_id),
                WrapRequest(keys[2], master_key_id),
            ]
        )
        first, missing, second, third = wrapped
        assert isinstance(missing, MasterKeyNotFoundError)
        assert isinstance(first, str) and isinstance(second, str) and isinstance(third, str)
        outcomes = kms.unwrap_many(
            [
                UnwrapRequest(third, master_key_id),
                UnwrapRequest(second[:-5], other_master_key_id),
                UnwrapRequest(first, master_key_id),
                UnwrapRequest(first, unknown_master_key_id),
                UnwrapRequest(second, other_master_key_id),
                UnwrapRequest("", master_key_id),
                UnwrapRequest(third, master_key_id),
            ]
        )
        expected = [
            keys[2],
            WrappedKeyInvalidError,
            keys[0],
            MasterKeyNotFoundError,
            keys[1],
            WrappedKeyInvalidError,
            keys[2],
        ]
        assert [o if isinstance(o, SecretBytes) else type(o) for o in outcomes] == expected

    def test_many_keys_may_be_very_many(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """More keys than any KMS takes in one call are returned in order."""
        keys = [SecretBytes.random(128) for _ in range(300)]
        ids = [master_key_id, other_master_key_id] * 150
        wrapped = kms.wrap_many([WrapRequest(*pair) for pair in zip(keys, ids, strict=True)])
        requests = [
            UnwrapRequest(text, id_) for text, id_ in zip(wrapped, ids, strict=True) if isinstance(text, str)
        ]
        assert kms.unwrap_many(requests) == keys

    def test_duplicates_are_asked_for_once(self, kms: KmsClient, master_key_id: str) -> None:
        """Equal requests to unwrap are sent once."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        before = kms.call_counts["unwrap"]
        outcomes = kms.unwrap_many([UnwrapRequest(wrapped_key, master_key_id) for _ in range(20)])
        assert outcomes == [CANARY] * 20
        assert kms.call_counts["unwrap"] == before + 1

    def test_nothing_is_asked_for_nothing(self, kms: KmsClient) -> None:
        """Without requests, there is no call."""
        assert kms.wrap_many([]) == kms.unwrap_many([]) == kms.rewrap_many([]) == []
        assert not kms.call_counts

    # --- rewrap, versions ---

    def test_rewraps_to_another_master_key(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """The new wrapped key belongs to the new master key only. The old wrapped key stays valid."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        rewrapped = rewrap_one(kms, wrapped_key, master_key_id, other_master_key_id)
        assert unwrap_one(kms, rewrapped, other_master_key_id) == CANARY
        assert unwrap_one(kms, wrapped_key, master_key_id) == CANARY
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(kms, rewrapped, master_key_id)

    def test_rewraps_many_with_their_own_outcomes(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """A wrapped key that is damaged, or belongs to another master key, does not affect the others."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        good, bad, foreign, again = kms.rewrap_many(
            [
                RewrapRequest(wrapped_key, master_key_id, master_key_id),
                RewrapRequest(wrapped_key[:-5], master_key_id, other_master_key_id),
                RewrapRequest(wrap_one(kms, CANARY, other_master_key_id), master_key_id, other_master_key_id),
                RewrapRequest(wrapped_key, master_key_id, other_master_key_id),
            ]
        )
        assert isinstance(good, str) and isinstance(again, str)
        assert isinstance(bad, WrappedKeyInvalidError) and isinstance(foreign, KmsError)
        assert unwrap_one(kms, good, master_key_id) == unwrap_one(kms, again, other_master_key_id) == CANARY

    def test_rewraps_to_the_current_version(self, kms: KmsClient, master_key_id: str) -> None:
        """After a rotation, the old wrapped key can be unwrapped, and a re-wrapped key has the new version."""
        old = wrap_one(kms, CANARY, master_key_id)
        old_version = kms.wrapped_key_version(old, master_key_id)
        self.add_version(kms, master_key_id)
        new = rewrap_one(kms, old, master_key_id)
        assert unwrap_one(kms, old, master_key_id) == unwrap_one(kms, new, master_key_id) == CANARY
        assert kms.wrapped_key_version(old, master_key_id) == old_version
        new_version = kms.wrapped_key_version(new, master_key_id)
        if new_version is not None:
            assert new_version != old_version
            assert new_version == kms.describe(master_key_id).current_version

    def test_a_changed_version_is_not_unwrapped(self, kms: KmsClient, master_key_id: str) -> None:
        """Unwrapping proves the version that a wrapped key names."""
        old = wrap_one(kms, CANARY, master_key_id)
        self.add_version(kms, master_key_id)
        new = wrap_one(kms, CANARY, master_key_id)
        version = kms.wrapped_key_version(old, master_key_id)
        if version is None:
            return
        for wrapped_key in (old, new):
            said = kms.wrapped_key_version(wrapped_key, master_key_id)
            for position in range(len(wrapped_key) if len(wrapped_key) < 40 else 40):
                for digit in "0123456789":
                    changed = wrapped_key[:position] + digit + wrapped_key[position + 1 :]
                    if kms.wrapped_key_version(changed, master_key_id) not in (None, said):
                        with pytest.raises(KmsError):
                            unwrap_one(kms, changed, master_key_id)
                        break

    def test_reads_a_version_from_whatever_it_is_given(self, kms: KmsClient, master_key_id: str) -> None:
        """A text that is not a wrapped key has no version, and causes no error."""
        for text in ["", "é", "keystore:v1", "vault:v:", "A" * 100_000, "\ud800"]:
            assert kms.wrapped_key_version(text, master_key_id) is None, text[:50]

    # --- states of a master key ---

    def test_describes_a_master_key(self, kms: KmsClient, master_key_id: str) -> None:
        """A master key that works is described as enabled."""
        description = kms.describe(master_key_id)
        assert description.enabled
        known = kms.master_key_ids()
        assert known is None or master_key_id in known

    def test_a_disabled_key_does_nothing(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """A disabled master key neither wraps nor unwraps. Other keys work."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        self.disable_key(kms, master_key_id)
        _each_raises(MasterKeyDisabledError, kms, wrapped_key, master_key_id)
        assert not kms.describe(master_key_id).enabled
        assert unwrap_one(kms, wrap_one(kms, CANARY, other_master_key_id), other_master_key_id) == CANARY

    def test_a_denied_key_does_nothing(self, kms: KmsClient, master_key_id: str, other_master_key_id: str) -> None:
        """A principal without permission gets an error that says so. Its other master keys work."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        self.deny_key(kms, master_key_id)
        _each_raises(KmsAccessDeniedError, kms, wrapped_key, master_key_id)
        assert unwrap_one(kms, wrap_one(kms, CANARY, other_master_key_id), other_master_key_id) == CANARY

    # --- threads, secrets, end ---

    def test_many_threads_share_a_client(
        self, kms: KmsClient, master_key_id: str, other_master_key_id: str
    ) -> None:
        """16 threads get their own keys, and every call is counted."""

        def work(number: int) -> None:
            id_ = (master_key_id, other_master_key_id)[number % 2]
            for _ in range(10):
                key = SecretBytes.random(256)
                assert unwrap_one(kms, wrap_one(kms, key, id_), id_) == key

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(work, range(16)))
        assert kms.call_counts["wrap"] == kms.call_counts["unwrap"] == 160

    def test_no_error_shows_a_key(self, kms: KmsClient, master_key_id: str, unknown_master_key_id: str) -> None:
        """Neither text, repr, traceback nor pickle of an error or of the client holds key bytes."""
        wrapped_key = wrap_one(kms, CANARY, master_key_id)
        calls: list[Callable[[], object]] = [
            lambda: wrap_one(kms, CANARY, unknown_master_key_id),
            lambda: unwrap_one(kms, wrapped_key, unknown_master_key_id),
            lambda: unwrap_one(kms, wrapped_key[:-5], master_key_id),
            lambda: rewrap_one(kms, wrapped_key, master_key_id, unknown_master_key_id),
        ]
        for call in calls:
            with pytest.raises(KmsError) as caught:
                call()
            error = caught.value
            printed = "".join(traceback.format_exception(error))
            again = pickle.loads(pickle.dumps(error))  # noqa: S301 - the test pickled it
            assert (type(again), str(again)) == (type(error), str(error))
            for text in (str(error), repr(error), printed, repr(error.__dict__), str(pickle.dumps(error))):
                assert not _shown(CANARY, text)
        assert not _shown(CANARY, repr(kms))

    def test_closes_twice(self, kms: KmsClient, master_key_id: str) -> None:
        """Closing twice is harmless."""
        wrap_one(kms, CANARY, master_key_id)
        kms.close()
        kms.close()

    def test_has_a_name_and_settings(self, kms: KmsClient) -> None:
        """A configuration can name the backend, and a mistake in it is an error."""
        assert kms.backend and issubclass(type(kms).Settings, KmsSettings)
        assert type(kms).Settings.model_config["extra"] == "forbid"


def _each_raises(kind: type[KmsError], kms: KmsClient, wrapped_key: str, master_key_id: str) -> None:
    """Check that neither wrap nor unwrap works, and that the error names what was refused."""
    calls: dict[str, Callable[[], object]] = {
        "wrap": lambda: wrap_one(kms, CANARY, master_key_id),
        "unwrap": lambda: unwrap_one(kms, wrapped_key, master_key_id),
    }
    for operation, call in calls.items():
        with pytest.raises(kind) as caught:
            call()
        error = caught.value
        assert (error.operation, error.master_key_id, error.retryable) == (operation, master_key_id, False)


def _damaged(wrapped_key: str) -> list[str]:
    """Return a wrapped key in the ways in which files are damaged or forged."""
    places = {0, len(wrapped_key) - 1, *range(1, len(wrapped_key), max(1, len(wrapped_key) // 40))}
    changed = [
        wrapped_key[:place] + ("B" if wrapped_key[place] == "A" else "A") + wrapped_key[place + 1 :]
        for place in sorted(places)
    ]
    shortened = [wrapped_key[:length] for length in (0, 1, len(wrapped_key) // 2, len(wrapped_key) - 1)]
    return [
        *changed,
        *shortened,
        wrapped_key[1:],
        wrapped_key[::-1],
        wrapped_key * 2,
        wrapped_key + "=",
        wrapped_key + "AAAA",
        wrapped_key + "\n",
        " " + wrapped_key,
        wrapped_key[:-4] + "é===",
        wrapped_key[:-1] + "\0",
        "\ud800",
        "{}",
        "A" * 64,
        "A" * 1_000_000,
    ]


def _shown(key: SecretBytes, text: str) -> bool:
    """Return whether a text shows a key in plain, hex or base64."""
    data = key.reveal()
    encoded = base64.b64encode(data).decode()
    spellings = (data.hex(), encoded.rstrip("="), repr(data)[2:-1], repr(bytearray(data))[12:-2], str(data))
    return any(spelling in text for spelling in (*spellings, encoded[:16], data.hex()[:16]))
