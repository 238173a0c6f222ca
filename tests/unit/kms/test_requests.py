"""Requests to a KMS, and the checks of its answers."""

from __future__ import annotations

import pytest

from parquet_keytools.errors import KmsResponseInvalidError, KmsThrottledError
from parquet_keytools.kms.client import checked_key, mistake_in_wrapped_key
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.secret_bytes import SecretBytes


def test_an_error_has_the_facts_of_its_call() -> None:
    error = Meaning(KmsThrottledError, "slow down", "Wait.").error(2.5).about("acme", "unwrap", "kc")
    assert (error.backend, error.operation, error.master_key_id) == ("acme", "unwrap", "kc")
    assert error.retry_after_seconds == 2.5 and error.hint == "Wait." and "slow down" in str(error)
    assert Meaning(KmsThrottledError).error().retry_after_seconds == 0.0
    # Facts that the error already has stay: another master key, or that no master key is concerned.
    other = KmsThrottledError(master_key_id="kf").about("acme", "rewrap", "kc")
    assert (other.operation, other.master_key_id) == ("rewrap", "kf")
    connecting = KmsThrottledError(operation="connect").about("acme", "wrap", "kc")
    assert (connecting.backend, connecting.operation, connecting.master_key_id) == ("acme", "connect", None)
    assert connecting.about("other", "unwrap", "kf") is connecting


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 24, 32, 33])
def test_a_key_has_16_24_or_32_bytes(length: int) -> None:
    data = bytes(range(length))
    if length in (16, 24, 32):
        assert checked_key(data) == SecretBytes(data)
        return
    with pytest.raises(KmsResponseInvalidError, match="16, 24 or 32 bytes"):
        checked_key(data)


def test_how_long_a_wrapped_key_may_be() -> None:
    """CONTRIBUTING.md promises this to authors of backends."""
    assert mistake_in_wrapped_key("a" * 16_384) == ""
    assert mistake_in_wrapped_key("a" * 16_385) != ""
