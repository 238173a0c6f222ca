import base64
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools import strict_base64


@given(st.binary(max_size=100))
def test_round_trip(data: bytes) -> None:
    text = strict_base64.encode(data)
    assert text == base64.b64encode(data).decode()
    assert strict_base64.decode(text) == data


@pytest.mark.parametrize(
    "text",
    ["QQ", "QQ=", "QQ===", "QR==", "Q Q==", "QQ==\n", "\nQQ==", "QQ==QQ==", "Q-__", "é", "\ud800", "=", "A"],
)
def test_other_spellings_are_refused_without_a_trace(text: str) -> None:
    with pytest.raises(ValueError, match="not valid base64") as caught:
        strict_base64.decode(text)
    assert caught.value.__context__ is None
    assert str(caught.value) == "not valid base64"
    assert len(traceback.format_exception(caught.value)[-1]) < 50
