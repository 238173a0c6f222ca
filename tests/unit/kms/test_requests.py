"""Requests to a KMS, and what is checked of its answers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from parquet_keytools.errors import KmsError, KmsResponseInvalidError, KmsThrottledError
from parquet_keytools.kms.contract import (
    CallFacts,
    WrapRequest,
    checked_answers,
    mistake_in_wrapped_key,
)
from parquet_keytools.secret_bytes import SecretBytes

FACTS = CallFacts("acme", "unwrap", "kc")
REQUESTS = [WrapRequest(SecretBytes(bytes(16)), name) for name in ("kf", "kc")]


def test_an_error_has_the_facts_of_its_call() -> None:
    error = FACTS.error(KmsThrottledError, "slow down", "Wait.", 2.5)
    assert (error.backend, error.operation, error.master_key_id) == ("acme", "unwrap", "kc")
    assert error.retry_after_seconds == 2.5 and error.hint == "Wait." and "slow down" in str(error)
    assert FACTS.error(KmsThrottledError).retry_after_seconds == 0.0


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 24, 32, 33])
def test_a_key_has_16_24_or_32_bytes(length: int) -> None:
    data = bytes(range(length))
    if length in (16, 24, 32):
        assert FACTS.checked_key(data) == SecretBytes(data)
        return
    with pytest.raises(KmsResponseInvalidError, match="16, 24 or 32 bytes") as caught:
        FACTS.checked_key(data)
    assert (caught.value.operation, caught.value.master_key_id) == ("unwrap", "kc")


def test_how_long_a_wrapped_key_may_be() -> None:
    """CONTRIBUTING.md promises this to authors of backends."""
    assert mistake_in_wrapped_key("a" * 16_384) == ""
    assert mistake_in_wrapped_key("a" * 16_385) != ""


@pytest.mark.parametrize("answers", [[], ["a"], ["a", "b", "c"], ("a", "b"), None])
def test_another_number_of_answers_is_an_error_for_all(answers: Any) -> None:
    """An answer that is missing would give one file the key of another."""
    outcomes = checked_answers(partial(CallFacts, "acme"), "wrap", REQUESTS, answers, mistake_in_wrapped_key)
    assert len(outcomes) == 2
    for error in outcomes:
        assert isinstance(error, KmsResponseInvalidError)
        assert "the number of answers is not that of the requests" in str(error)
        assert (error.backend, error.operation, error.master_key_id) == ("acme", "wrap", None)


def test_an_answer_of_another_form_is_an_error_of_its_own() -> None:
    answers: list[str | KmsError] = ["fine", "line\nbreak"]
    good, bad = checked_answers(partial(CallFacts, "acme"), "wrap", REQUESTS, answers, mistake_in_wrapped_key)
    assert good == "fine" and isinstance(bad, KmsResponseInvalidError)
    assert "not a short string of printable ASCII" in str(bad) and "break" not in str(bad)
    assert (bad.operation, bad.master_key_id) == ("wrap", "kc")
