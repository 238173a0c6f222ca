import base64

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_wrapping import Kek
from parquet_keytools.secret_bytes import SecretBytes

KEK_ID = b"sixteen byte id."
KEY = b"sixteen byte KEK"


@pytest.mark.parametrize("kek_length_bits", [128, 192, 256])
@pytest.mark.parametrize("dek_length_bits", [128, 192, 256])
def test_unwraps_what_it_wrapped(kek_length_bits: int, dek_length_bits: int) -> None:
    kek = Kek.generate(kek_length_bits)
    assert kek.key.length_bits == kek_length_bits and len(kek.kek_id) == 16
    dek = SecretBytes.random(dek_length_bits)
    assert kek.unwrap_dek(kek.wrap_dek(dek)) == dek


def test_form_is_that_of_parquet_java() -> None:
    """Nonce, ciphertext and tag without a length, the KEK id as AAD: with another AAD, it does not decrypt."""
    buffer = base64.b64decode(Kek(KEK_ID, SecretBytes(KEY)).wrap_dek(SecretBytes(b"d" * 16)))
    assert len(buffer) == 12 + 16 + 16
    assert AESGCM(KEY).decrypt(buffer[:12], buffer[12:], KEK_ID) == b"d" * 16


def test_reads_what_parquet_java_wrote() -> None:
    """The footer key of external_key_material_java.parquet.encrypted, unwrapped by its own primitives."""
    wrapped_kek = base64.b64decode("kWHNReXsULhmTplhvImESLFTXV91t5CyoqaEVYLk7k0jD8oeTDDJCUnIiCs=")
    key = AESGCM(b"0123456789012345").decrypt(wrapped_kek[:12], wrapped_kek[12:], b"kf")
    kek = Kek(base64.b64decode("NFkiTmDXYzZMTb+O3b9nSA=="), SecretBytes(key))
    dek = kek.unwrap_dek("FLQDczpR9upRCqUjtzac5N1PbdduFekfeklLxi4VwOLul7un1iBcdAsJAXc=")
    assert dek.length_bits == 128


def test_two_keks_and_two_wraps_differ() -> None:
    """A nonce or an id used twice."""
    first, second = Kek.generate(128), Kek.generate(128)
    assert first.kek_id != second.kek_id and first.key != second.key
    dek = SecretBytes.random(128)
    assert len({first.wrap_dek(dek)[:16] for _ in range(50)}) == 50


def test_every_flipped_bit_is_found() -> None:
    kek = Kek(KEK_ID, SecretBytes(KEY))
    buffer = base64.b64decode(kek.wrap_dek(SecretBytes.random(128)))
    for place in range(len(buffer)):
        damaged = bytearray(buffer)
        damaged[place] ^= 1
        with pytest.raises(KeyMaterialError, match="does not belong to its KEK"):
            kek.unwrap_dek(base64.b64encode(damaged).decode())


@pytest.mark.parametrize(
    "other", [Kek(b"another KEK id!!", SecretBytes(KEY)), Kek(KEK_ID, SecretBytes(b"k" * 16))]
)
def test_another_kek_or_another_id(other: Kek) -> None:
    wrapped_dek = Kek(KEK_ID, SecretBytes(KEY)).wrap_dek(SecretBytes.random(128))
    with pytest.raises(KeyMaterialError, match="does not belong to its KEK"):
        other.unwrap_dek(wrapped_dek)


@pytest.mark.parametrize(
    ("wrapped_dek", "words"),
    [
        ("!", "wrappedDEK: is not base64"),
        ("é", "wrappedDEK: is not base64"),
        ("", "too short"),
        (base64.b64encode(bytes(28)).decode(), "too short"),
        (base64.b64encode(bytes(29)).decode(), "does not belong"),
    ],
)
def test_text_that_is_no_wrapped_dek(wrapped_dek: str, words: str) -> None:
    with pytest.raises(KeyMaterialError, match=words):
        Kek(KEK_ID, SecretBytes(KEY)).unwrap_dek(wrapped_dek)


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_a_dek_of_a_length_that_aes_does_not_have(length: int) -> None:
    """Authentic, but not a key: ciphers would raise ValueError later."""
    wrapped = bytes(12) + AESGCM(KEY).encrypt(bytes(12), bytes(length), KEK_ID)
    with pytest.raises(KeyMaterialError, match=f"holds a key of {8 * length} bits"):
        Kek(KEK_ID, SecretBytes(KEY)).unwrap_dek(base64.b64encode(wrapped).decode())


def test_no_text_shows_the_key_in_any_spelling() -> None:
    kek = Kek(KEK_ID, SecretBytes(KEY))
    texts = [repr(kek), str(kek), f"{kek}", repr(vars(kek)), repr([kek])]
    encoded = base64.b64encode(KEY).decode().rstrip("=")
    spellings = [KEY.decode(), KEY.hex(), KEY.hex(" "), KEY.hex().upper(), encoded, repr(list(KEY))[1:-1]]
    assert [spelling for spelling in spellings for text in texts if spelling in text] == []
    assert KEK_ID.hex() in repr(kek) or repr(KEK_ID) in repr(kek), "the id is no secret, and helps to find the KEK"
