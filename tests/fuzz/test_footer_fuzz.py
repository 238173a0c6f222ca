"""Mutants of valid files end in our errors, and in no others."""

from __future__ import annotations

import contextlib
import io
import time

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import MemorySink, MemorySource, NamedKeys, decrypt_source, encrypted
from soak import how_many

from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption, encrypt_source
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.secret_bytes import SecretBytes


def _plain() -> bytes:
    stream = io.BytesIO()
    table = pa.table({"a": list(range(100)), "b": [[1], None] * 50, "c": [{"d": "x"}] * 100})
    pq.write_table(table, stream, write_page_index=True, row_group_size=50, compression="none")
    return stream.getvalue()


_KEYS = NamedKeys({b"kf": SecretBytes(bytes(16)), b"ka": SecretBytes(bytes(range(32)))})
_PLAIN = _plain()
_FILES = [_PLAIN] + [
    encrypted(
        _PLAIN,
        FileEncryption(
            _KEYS.deks[b"kf"], b"kf", {("a",): ColumnKey(_KEYS.deks[b"ka"], b"ka")}, plaintext_footer=mode
        ),
    )
    for mode in (False, True)
]


@st.composite
def _mutants(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(_FILES)))
    # Most changes are near the end, where the footer is.
    for _ in range(draw(st.integers(1, 4))):
        from_end = draw(st.one_of(st.integers(1, 1_500), st.integers(1, len(data))))
        position = max(0, len(data) - from_end)
        kind = draw(st.sampled_from(["set", "cut", "insert", "splice"]))
        if kind == "set":
            data[position] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[position : position + draw(st.integers(1, 50))]
        elif kind == "insert":
            data[position:position] = draw(st.binary(max_size=20))
        else:
            start = draw(st.integers(0, max(0, len(data) - 60)))
            data[position : position + 40] = data[start : start + 40]
        if not data:
            data = bytearray(b"PAR1")
    return bytes(data)


@given(_mutants())
@settings(max_examples=how_many(150, 10_000))
def test_mutants_end_in_our_errors(data: bytes) -> None:
    start = time.process_time()
    try:
        envelope = read_envelope(MemorySource(data))
        envelope.unverified_footer()
    except ParquetFormatError:
        pass
    for work in (
        lambda: decrypt_source(MemorySource(data), MemorySink(), _KEYS),
        lambda: encrypt_source(MemorySource(data), MemorySink(), FileEncryption(_KEYS.deks[b"kf"])),
    ):
        try:
            work()
        except KeytoolsError:
            continue
    assert time.process_time() - start < 1


@given(st.binary(max_size=500), st.sampled_from([b"PAR1", b"PARE"]))
@settings(max_examples=how_many(80, 10_000))
def test_any_footer_ends_in_a_format_error(footer: bytes, magic: bytes) -> None:
    data = magic + footer + len(footer).to_bytes(4, "little") + magic
    with contextlib.suppress(KeytoolsError):
        read_envelope(MemorySource(data)).open(SecretBytes(bytes(16)))
