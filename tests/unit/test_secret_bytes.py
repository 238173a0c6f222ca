import copy
import json
import pickle
import traceback

import pytest

from parquet_keytools.secret_bytes import SecretBytes

KEY = b"0123456789abcdef"


def test_reveals_what_it_was_given() -> None:
    for value in (KEY, bytearray(KEY), memoryview(KEY)):
        assert SecretBytes(value).reveal() == KEY
    changing = bytearray(KEY)
    secret = SecretBytes(changing)
    changing[0] = 0
    assert secret.reveal() == KEY


def test_length() -> None:
    assert len(SecretBytes(KEY)) == 16
    assert SecretBytes(KEY).length_bits == 128
    assert SecretBytes.random(192).length_bits == 192


def test_random_keys_differ() -> None:
    assert len({SecretBytes.random(128).reveal() for _ in range(100)}) == 100


def test_compares_by_value_with_its_own_kind_only() -> None:
    assert SecretBytes(KEY) == SecretBytes(KEY)
    assert SecretBytes(KEY) != SecretBytes(KEY[::-1])
    assert SecretBytes(KEY) != KEY


@pytest.mark.parametrize("show", [repr, str, "{}".format, "%s".__mod__, lambda s: repr([s]), ascii])
def test_no_text_shows_it(show) -> None:
    text = show(SecretBytes(KEY))
    assert "0123" not in text and KEY.hex()[:8] not in text
    assert "128 bits" in text


def test_cannot_leave_the_process() -> None:
    secret = SecretBytes(KEY)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(secret, protocol)
    with pytest.raises(TypeError):
        copy.deepcopy(secret)
    with pytest.raises(TypeError):
        json.dumps(secret)
    with pytest.raises(TypeError):
        bytes(secret)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        hash(secret)


def test_cannot_be_changed() -> None:
    secret = SecretBytes(KEY)
    with pytest.raises(AttributeError):
        secret._value = b"x"
    with pytest.raises(AttributeError):
        secret.other = 1
    assert secret.reveal() == KEY
    assert not hasattr(secret, "__dict__")


def test_a_traceback_with_local_variables_does_not_show_it() -> None:
    def fail(secret: SecretBytes) -> None:
        raise RuntimeError("no")

    try:
        fail(SecretBytes(KEY))
    except RuntimeError as error:
        printed = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert "SecretBytes, 128 bits" in printed
    assert "b'0123" not in printed
