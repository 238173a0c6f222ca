"""Single modules: framing, AAD, invocation limit."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from parquet_keytools.encryption import module_cipher
from parquet_keytools.encryption.aad import FOOTER_PLACE, MAX_ORDINAL, ModulePlace, ModuleType, module_aad
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    NO_PAGE_ORDINAL,
    AesCtr,
    ChunkCipher,
    ModuleCipher,
)
from parquet_keytools.errors import DecryptionError, FormatLimitError
from parquet_keytools.secret_bytes import SecretBytes

_DEK = SecretBytes(bytes(range(16)))
_PLACE = ModulePlace(ModuleType.DATA_PAGE, 1, 2, 3)


@pytest.mark.parametrize("plaintext", [b"", b"x", bytes(100_000)])
def test_a_module_has_its_framing_and_comes_back(plaintext: bytes) -> None:
    cipher = ModuleCipher(_DEK, b"file")
    module = cipher.encrypt(plaintext, _PLACE)
    assert len(module) == len(plaintext) + GCM_FRAMING == len(plaintext) + 32
    assert struct.unpack("<I", module[:4]) == (len(module) - 4,)
    assert ModuleCipher(_DEK, b"file").decrypt(module, _PLACE) == plaintext


def test_nonces_differ() -> None:
    cipher = ModuleCipher(_DEK, b"file")
    assert len({cipher.encrypt(b"", _PLACE)[4:16] for _ in range(1_000)}) == 1_000


@pytest.mark.parametrize(
    "place",
    [
        _PLACE._replace(row_group_ordinal=0),
        _PLACE._replace(column_ordinal=3),
        _PLACE._replace(page_ordinal=2),
        _PLACE._replace(module_type=ModuleType.DATA_PAGE_HEADER),
    ],
)
def test_a_module_in_another_place_does_not_authenticate(place: ModulePlace) -> None:
    module = ModuleCipher(_DEK, b"file").encrypt(b"secret", _PLACE)
    with pytest.raises(DecryptionError) as caught:
        ModuleCipher(_DEK, b"file").decrypt(module, place)
    assert caught.value.module_type == place.module_type.title
    assert caught.value.row_group_ordinal == place.row_group_ordinal
    assert caught.value.column_ordinal == place.column_ordinal
    assert caught.value.page_ordinal == place.page_ordinal


def test_a_module_of_another_file_does_not_authenticate() -> None:
    module = ModuleCipher(_DEK, b"file").encrypt(b"secret", _PLACE)
    with pytest.raises(DecryptionError, match="does not authenticate") as caught:
        ModuleCipher(_DEK, b"eilf").decrypt(module, _PLACE)
    assert caught.value.hint is not None and "the AAD prefix is not the one" in caught.value.hint


@pytest.mark.parametrize("change", [-1, 1, 1 << 31])
def test_the_length_field_must_be_that_of_the_container(change: int) -> None:
    module = bytearray(ModuleCipher(_DEK, b"file").encrypt(b"secret", _PLACE))
    struct.pack_into("<I", module, 0, len(module) - 4 + change)
    with pytest.raises(DecryptionError, match=f"length field says {len(module) - 4 + change} bytes") as caught:
        ModuleCipher(_DEK, b"file").decrypt(module, _PLACE)
    assert caught.value.hint is not None and "parquet-java" in caught.value.hint


def test_pages_alone_may_have_a_length_field_of_parquet_java() -> None:
    place = _PLACE._replace(module_type=ModuleType.DATA_PAGE_HEADER)
    module = bytearray(ModuleCipher(_DEK, b"file").encrypt(b"secret", place))
    module[0] += 1
    with pytest.raises(DecryptionError, match="length field") as caught:
        ModuleCipher(_DEK, b"file").decrypt(module, place)
    assert not caught.value.hint


def test_a_module_has_a_length_that_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_cipher, "MAX_MODULE_LENGTH", 100)
    cipher = ModuleCipher(_DEK, b"file")
    assert len(cipher.encrypt(bytes(72), _PLACE)) == 4 + 100
    with pytest.raises(FormatLimitError, match="data page: 105 bytes are too long for a module"):
        cipher.encrypt(bytes(73), _PLACE)


@pytest.mark.parametrize("ordinal", [0, 1, 255, 256, MAX_ORDINAL])
def test_pages_have_the_aad_of_their_place(ordinal: int) -> None:
    chunk = ChunkCipher(ModuleCipher(_DEK, b"file"), None, 3, 4)
    assert chunk.page_aads(ordinal) == (
        module_aad(b"file", ModuleType.DATA_PAGE_HEADER, 3, 4, ordinal),
        module_aad(b"file", ModuleType.DATA_PAGE, 3, 4, ordinal),
    )
    assert chunk.page_aads(NO_PAGE_ORDINAL) == (
        module_aad(b"file", ModuleType.DICTIONARY_PAGE_HEADER, 3, 4),
        module_aad(b"file", ModuleType.DICTIONARY_PAGE, 3, 4),
    )
    for one_more in ((MAX_ORDINAL + 1, 4), (3, MAX_ORDINAL + 1)):
        with pytest.raises(FormatLimitError, match=f"ordinal {MAX_ORDINAL + 1} is not in 0..{MAX_ORDINAL}"):
            ChunkCipher(ModuleCipher(_DEK, b"file"), None, *one_more)
    # It is never truncated: with fewer bits, it would be the AAD of another page.
    with pytest.raises(struct.error):
        chunk.page_aads(MAX_ORDINAL + 1)


def test_ctr_has_the_same_key() -> None:
    outs = bytearray(6), bytearray(6)
    for ctr, out in zip((ModuleCipher(_DEK, b"file").ctr(), AesCtr(_DEK)), outs, strict=True):
        ctr.apply_into(bytes(12), b"secret", b"", out)
    assert outs[0] == outs[1] != b"secret"


@pytest.mark.parametrize("length", [0, 3, 31])
def test_a_module_that_is_too_short_is_refused(length: int) -> None:
    with pytest.raises(DecryptionError, match="too short"):
        ModuleCipher(_DEK, b"file").decrypt(bytes(length), _PLACE)


def test_the_invocation_limit_holds() -> None:
    cipher = ModuleCipher(_DEK, b"file", invocation_limit=3)
    cipher.reserve(2)
    cipher.encrypt(b"", _PLACE)
    with pytest.raises(FormatLimitError, match="no key may encrypt more than 3") as caught:
        cipher.encrypt(b"", _PLACE)
    assert caught.value.hint is not None and "write more and smaller files" in caught.value.hint


def test_a_signature_is_an_invocation() -> None:
    cipher = ModuleCipher(_DEK, b"file", invocation_limit=2)
    cipher.signed(b"footer")
    cipher.signed(b"footer")
    with pytest.raises(FormatLimitError, match="would encrypt 3 modules of a file"):
        cipher.signed(b"footer")


def test_the_invocation_limit_cannot_be_raised() -> None:
    cipher = ModuleCipher(_DEK, b"file", invocation_limit=2**40)
    cipher.reserve(2**32)
    with pytest.raises(FormatLimitError):
        cipher.reserve(1)


def nonce_of_a_module(cipher: ModuleCipher) -> bytes:
    return cipher.encrypt(b"", FOOTER_PLACE)[4:16]


def test_threads_get_different_nonces() -> None:
    cipher = ModuleCipher(SecretBytes(bytes(16)), b"file")
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: nonce_of_a_module(cipher), range(2000)))
    assert len(set(taken)) == len(taken)


def test_a_forked_child_takes_no_nonce_of_its_parent() -> None:
    cipher = ModuleCipher(SecretBytes(bytes(16)), b"file")
    nonce_of_a_module(cipher)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"".join(nonce_of_a_module(cipher) for _ in range(10)))
        os._exit(0)
    os.close(writing)
    ours = b"".join(nonce_of_a_module(cipher) for _ in range(10))
    with os.fdopen(reading, "rb") as pipe:
        theirs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == len(ours) == 120
    pieces = [data[start : start + 12] for data in (ours, theirs) for start in range(0, 120, 12)]
    assert len(set(pieces)) == 20
