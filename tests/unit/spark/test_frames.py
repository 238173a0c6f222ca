from __future__ import annotations

import io
import struct

import pytest
from fake_spark import key_request_bytes
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools.spark.kms_worker import (
    MOST_BYTES,
    Frame,
    KeyRequest,
    MalformedFrameError,
    Operation,
    frame_bytes,
    read_frame,
    read_key_request,
)


@given(st.integers(0, 2**64 - 1), st.integers(0, 255), st.binary(max_size=300))
def test_a_frame_comes_back(request_id: int, kind: int, content: bytes) -> None:
    stream = io.BytesIO(frame_bytes(Frame(request_id, kind, content)) * 2)
    assert read_frame(stream) == read_frame(stream) == Frame(request_id, kind, content)
    assert read_frame(stream) is None


def test_a_frame_is_what_the_java_side_writes() -> None:
    sent = struct.pack(">IQB", 9 + 3, 5, 2) + b"abc"
    assert frame_bytes(Frame(5, Operation.WRAP, b"abc")) == sent


@pytest.mark.parametrize("length", [0, 8, MOST_BYTES + 1, 2**32 - 1])
def test_a_length_that_cannot_be_one_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(MalformedFrameError, match=f"{length} bytes"):
        read_frame(io.BytesIO(struct.pack(">I", length)))


@pytest.mark.parametrize("missing", [1, 4, 12, 14])
def test_a_stream_that_ends_within_a_frame_is_refused(missing: int) -> None:
    data = frame_bytes(Frame(1, 2, b"abcd"))
    with pytest.raises(MalformedFrameError, match="ends"):
        read_frame(io.BytesIO(data[: len(data) - missing]))


@given(st.binary(max_size=40))
def test_bytes_of_any_kind_are_a_frame_or_an_error(data: bytes) -> None:
    stream = io.BytesIO(data)
    try:
        while read_frame(stream) is not None:
            pass
    except MalformedFrameError:
        return


@given(st.text(min_size=1, max_size=40), st.binary(max_size=40))
def test_a_key_request_comes_back(master_key_id: str, key: bytes) -> None:
    request = KeyRequest(master_key_id, key)
    assert read_key_request(key_request_bytes(request)) == request


@pytest.mark.parametrize("content", [b"", b"\0", b"\0\0key", b"\0\5abc", b"\0\1\xff"])
def test_a_key_request_without_a_name_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="master key id"):
        read_key_request(content)


def test_keys_do_not_show() -> None:
    assert "secret" not in repr(Frame(1, 2, b"secret")) + repr(KeyRequest("pii", b"secret"))
