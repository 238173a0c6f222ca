"""Settings that all backends share: bytes that bind wrapped keys, limits of several processes, and secrets."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

from parquet_keytools.kms.client import KmsSettings, StrictSettings, holds_secret
from parquet_keytools.kms.remote_client import RemoteKmsSettings, bytes_of_context
from parquet_keytools.secret_bytes import SecretBytes


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (None, b""),
        ("", b""),
        ("näme", b"n\xc3\xa4me"),
        ({}, b"{}"),
        ({"b": "ü", "a": "1, 2: 3"}, b'{"a":"1, 2: 3","b":"\xc3\xbc"}'),
    ],
)
def test_a_context_has_one_spelling(context: Any, expected: bytes) -> None:
    """A KMS that wrapped a key with other bytes does not unwrap it: they must not change while files exist."""
    assert bytes_of_context(context) == expected


@pytest.mark.parametrize(
    ("processes", "calls", "per_second"), [(1, 10, 6.0), (2, 5, 3.0), (3, 3, 2.0), (10, 1, 0.6), (20, 1, 0.3)]
)
def test_processes_call_no_more_often_than_one(processes: int, calls: int, per_second: float) -> None:
    settings = RemoteKmsSettings(type="any", max_concurrent_calls=10, max_calls_per_second=6, max_tries=7)
    shared = settings.shared_by(processes)
    assert (shared.max_concurrent_calls, shared.max_calls_per_second) == (calls, per_second)
    assert shared.max_tries == 7 and (shared is settings) == (processes == 1)
    unlimited = RemoteKmsSettings(type="any").shared_by(processes)
    assert unlimited.max_calls_per_second is None and unlimited.max_concurrent_calls == max(1, 32 // processes)


class Inner(StrictSettings):
    token: pydantic.SecretStr | None = None


@dataclass
class Plain:
    name: str
    value: Any


class AnySettings(KmsSettings):
    first: Any = None
    second: Any = None


SECRET = SecretBytes(b"0123456789abcdef")


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        pydantic.SecretStr("x"),
        pydantic.SecretBytes(b"x"),
        Inner(token=pydantic.SecretStr("x")),
        Plain("x", SECRET),
        {"a": "x", "b": SECRET},
        ["x", SECRET],
        ("x", [{"a": Plain("x", (SECRET,))}]),
        frozenset({"x", pydantic.SecretStr("x")}),
    ],
)
def test_settings_that_hold_a_secret_stay_in_their_process(value: Any) -> None:
    assert holds_secret(value)
    with pytest.raises(TypeError, match="hold a secret"):
        pickle.dumps(AnySettings(type="any", first="x", second=value))


@pytest.mark.parametrize("value", ["x", None, 1, Inner(), {"a": ["x"]}, ("x",), {"x"}, []])
def test_others_are_handed_over(value: Any) -> None:
    assert not holds_secret(value) and not holds_secret(Plain("x", value))
    settings = AnySettings(type="any", second=value)
    assert pickle.loads(pickle.dumps(settings)) == settings
