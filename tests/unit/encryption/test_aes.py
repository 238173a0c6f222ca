"""AES against published vectors: the GCM specification's (McGrew and Viega), and RFC 3686 for CTR.

RFC 3686 builds its counter blocks as Parquet does: 12 bytes of nonce, and a counter that starts at 1.
"""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.encryption import module_cipher
from parquet_keytools.encryption.module_cipher import AesCtr, AesGcm, InvalidTag
from parquet_keytools.errors import FormatLimitError
from parquet_keytools.secret_bytes import SecretBytes

_KEY = "feffe9928665731c6d6a8f9467308308"
_NONCE = "cafebabefacedbaddecaf888"
_AAD = "feedfacedeadbeeffeedfacedeadbeefabaddad2"
_PLAINTEXT = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
)

GCM_VECTORS = [
    ("00" * 16, "00" * 12, "", "", "", "58e2fccefa7e3061367f1d57a4e7455a"),
    (
        "00" * 16,
        "00" * 12,
        "00" * 16,
        "",
        "0388dace60b6a392f328c2b971b2fe78",
        "ab6e47d42cec13bdf53a67b21257bddf",
    ),
    (
        _KEY,
        _NONCE,
        _PLAINTEXT,
        _AAD,
        "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
        "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091",
        "5bc94fbc3221a5db94fae95ae7121a47",
    ),
    ("00" * 24, "00" * 12, "", "", "", "cd33b28ac773f74ba00ed1f312572435"),
    (
        "00" * 24,
        "00" * 12,
        "00" * 16,
        "",
        "98e7247c07f0fe411c267e4384b0f600",
        "2ff58d80033927ab8ef4d4587514f0fb",
    ),
    (
        _KEY + _KEY[:16],
        _NONCE,
        _PLAINTEXT,
        _AAD,
        "3980ca0b3c00e841eb06fac4872a2757859e1ceaa6efd984628593b40ca1e19c"
        "7d773d00c144c525ac619d18c84a3f4718e2448b2fe324d9ccda2710",
        "2519498e80f1478f37ba55bd6d27618c",
    ),
    ("00" * 32, "00" * 12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
    (
        "00" * 32,
        "00" * 12,
        "00" * 16,
        "",
        "cea7403d4d606b6e074ec5d3baf39d18",
        "d0d1c8a799996bf0265b98b5d48ab919",
    ),
    (
        _KEY * 2,
        _NONCE,
        _PLAINTEXT,
        _AAD,
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662",
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
]

CTR_VECTORS = [
    (
        "ae6852f8121067cc4bf7a5765577f39e",
        "000000300000000000000000",
        b"Single block msg".hex(),
        "e4095d4fb7a7b3792d6175a3261311b8",
    ),
    (
        "7e24067817fae0d743d6ce1f32539163",
        "006cb6dbc0543b59da48d90b",
        bytes(range(32)).hex(),
        "5104a106168a72d9790d41ee8edad388eb2e1efc46da57c8fce630df9141be28",
    ),
    (
        "16af5b145fc9f579c175f93e3bfb0eed863d06ccfdb78515",
        "0000004836733c147d6d93cb",
        b"Single block msg".hex(),
        "4b55384fe259c9c84e7935a003cbe928",
    ),
    (
        "776beff2851db06f4c8a0542c8696f6c6a81af1eec96b4d37fc1d689e6c1c104",
        "00000060db5672c97aa8f0b2",
        b"Single block msg".hex(),
        "145ad01dbf824ec7560863dc71e3e0c0",
    ),
]


@pytest.mark.parametrize(("key", "nonce", "plaintext", "aad", "ciphertext", "tag"), GCM_VECTORS)
def test_gcm_gives_the_published_ciphertext_and_tag(
    key: str, nonce: str, plaintext: str, aad: str, ciphertext: str, tag: str
) -> None:
    cipher = AesGcm(SecretBytes(bytes.fromhex(key)))
    data, nonce_bytes, aad_bytes = bytes.fromhex(plaintext), bytes.fromhex(nonce), bytes.fromhex(aad)
    out = bytearray(len(data) + 16)
    cipher.encrypt_into(nonce_bytes, data, aad_bytes, out)
    assert out.hex() == ciphertext + tag
    assert cipher.tag(nonce_bytes, data, aad_bytes).hex() == tag
    back = bytearray(len(data))
    cipher.decrypt_into(nonce_bytes, out, aad_bytes, back)
    assert back == data


@pytest.mark.parametrize(("key", "nonce", "plaintext", "aad", "ciphertext", "tag"), GCM_VECTORS)
@pytest.mark.parametrize("altered", ["nonce", "aad", "tag", "ciphertext"])
def test_gcm_refuses_what_was_altered(
    key: str, nonce: str, plaintext: str, aad: str, ciphertext: str, tag: str, altered: str
) -> None:
    parts = {name: bytearray.fromhex(text) for name, text in
             (("nonce", nonce), ("aad", aad), ("tag", tag), ("ciphertext", ciphertext))}  # fmt: skip
    if parts[altered]:
        parts[altered][-1] ^= 1
    else:
        parts[altered] += b"\0"
    cipher = AesGcm(SecretBytes(bytes.fromhex(key)))
    module = bytes(parts["ciphertext"] + parts["tag"])
    with pytest.raises(InvalidTag):
        cipher.decrypt_into(bytes(parts["nonce"]), module, bytes(parts["aad"]), bytearray(len(module) - 16))


class _OldAesGcm:
    """AESGCM as before cryptography 48: without `encrypt_into` and `decrypt_into`."""

    def __init__(self, key: bytes) -> None:
        cipher = AESGCM(key)
        self.encrypt, self.decrypt = cipher.encrypt, cipher.decrypt


@pytest.mark.parametrize(("key", "nonce", "plaintext", "aad", "ciphertext", "tag"), GCM_VECTORS)
def test_an_old_cryptography_does_the_same(
    monkeypatch: pytest.MonkeyPatch, key: str, nonce: str, plaintext: str, aad: str, ciphertext: str, tag: str
) -> None:
    monkeypatch.setattr(module_cipher, "AESGCM", _OldAesGcm)
    cipher = AesGcm(SecretBytes(bytes.fromhex(key)))
    data, nonce_bytes, aad_bytes = bytes.fromhex(plaintext), bytes.fromhex(nonce), bytes.fromhex(aad)
    # Views into larger memory, as for the pages of a file.
    room = bytearray(len(data) + 20)
    out = memoryview(room)[2:-2]
    assert cipher.encrypt_into(memoryview(nonce_bytes), memoryview(data), aad_bytes, out) == len(out)
    assert room.hex() == "0000" + ciphertext + tag + "0000"
    back = bytearray(len(data))
    assert cipher.decrypt_into(memoryview(nonce_bytes), out, aad_bytes, memoryview(back)) == len(data)
    assert back == data
    room[-3] ^= 1
    with pytest.raises(InvalidTag):
        cipher.decrypt_into(nonce_bytes, out, aad_bytes, bytearray(len(data)))
    with pytest.raises(ValueError):
        cipher.encrypt_into(nonce_bytes, data, aad_bytes, bytearray(len(data) + 15))


@pytest.mark.parametrize(("key", "nonce", "plaintext", "ciphertext"), CTR_VECTORS)
def test_ctr_gives_the_published_ciphertext(key: str, nonce: str, plaintext: str, ciphertext: str) -> None:
    cipher = AesCtr(SecretBytes(bytes.fromhex(key)))
    data = bytes.fromhex(plaintext)
    for _ in range(2):  # One object encrypts many pages, each with its own nonce.
        out = bytearray(len(data))
        cipher.apply_into(bytes.fromhex(nonce), data, b"", out)
        assert out.hex() == ciphertext
        cipher.apply_into(bytes(12), b"another page", b"", bytearray(12))
    back = bytearray(len(data))
    cipher.apply_into(memoryview(bytes.fromhex(nonce)), out, b"", back)
    assert back == data


@pytest.mark.parametrize("cipher", [AesGcm, AesCtr])
@pytest.mark.parametrize("length_bytes", [0, 15, 17, 33])
def test_a_key_of_another_length_is_refused(cipher: type[AesGcm | AesCtr], length_bytes: int) -> None:
    with pytest.raises(FormatLimitError, match="not an AES key"):
        cipher(SecretBytes(bytes(length_bytes)))
