import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import (
    MAX_KEY_METADATA_BYTES,
    DataKeyId,
    KeyMaterial,
    KeyReference,
    parse_key_metadata,
)

MATERIAL = KeyMaterial(True, "kf", "d2Rlaw==")


def test_internal_key_material() -> None:
    assert parse_key_metadata(MATERIAL.serialise(internal=True).encode()) == MATERIAL


def test_reference_has_exactly_arrows_fields() -> None:
    metadata = KeyReference("columnKey0").serialise()
    assert json.loads(metadata) == {
        "keyMaterialType": "PKMT1",
        "internalStorage": False,
        "keyReference": "columnKey0",
    }
    assert parse_key_metadata(metadata) == KeyReference("columnKey0")


@pytest.mark.parametrize("metadata", [None, b""])
def test_no_key_metadata(metadata: bytes | None) -> None:
    assert parse_key_metadata(metadata) is None


@pytest.mark.parametrize("name", ["kf", "key 1", "ключ", "PKMT1", "a{b}"])
def test_id_of_a_data_key(name: str) -> None:
    assert parse_key_metadata(DataKeyId(name).serialise()) == DataKeyId(name)


def reference(text: object) -> bytes:
    fields = {"keyMaterialType": "PKMT1", "internalStorage": False, "keyReference": text}
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "text",
    ["../../etc/passwd", "a/b", "a\\b", "", "a b", "x" * 129, "footerKey\n", "C:x", "%2e", "ключ", "a\0b"],
)
def test_a_reference_that_is_a_path_is_refused(text: str) -> None:
    with pytest.raises(KeyMaterialError, match="keyReference: not a plain name"):
        parse_key_metadata(reference(text))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (b"{", "not valid JSON"),
        (b"{}", "keyMaterialType: is missing"),
        (b'  {"keyMaterialType": "PKMT9"}', "'PKMT9' is not 'PKMT1'"),
        (b'{"keyMaterialType": "PKMT1"}', "internalStorage: is missing"),
        (b'{"keyMaterialType": "PKMT1", "internalStorage": "no"}', "internalStorage: is not a boolean"),
        (b'{"keyMaterialType": "PKMT1", "internalStorage": false}', "keyReference: is missing"),
        (reference(5), "keyReference: is not a string"),
        (b'{"keyMaterialType": "PKMT1", "internalStorage": true}', "is missing"),
        (b'{"internalStorage": true, "internalStorage": false}', "is repeated"),
        (b"\xff\xfe", "neither JSON nor the id of a data key"),
        (b"k" * (MAX_KEY_METADATA_BYTES + 1), "longer than"),
        (b"{" * MAX_KEY_METADATA_BYTES, "not valid JSON"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_every_mistake_is_one_clear_error(metadata: bytes, words: str) -> None:
    with pytest.raises(KeyMaterialError, match=words):
        parse_key_metadata(metadata)


@given(st.binary() | st.text().map(lambda text: ("{" + text).encode("utf-8", "surrogatepass")))
def test_nothing_but_key_material_errors_leave(metadata: bytes) -> None:
    try:
        parse_key_metadata(metadata)
    except KeyMaterialError as error:
        str(error).encode()


# --- what is remembered of other key metadata ---

USUAL = KeyMaterial(False, "kc", "d2Rlaw==", bytes(16), "d2tlaw==").serialise(internal=True).encode()


@pytest.mark.parametrize(
    "changed",
    [
        USUAL,
        USUAL.replace(b"d2Rlaw==", b"vault:v1:b3RoZXI="),
        USUAL.replace(b"d2Rlaw==", "ä".encode()),
        USUAL.replace(b"d2Rlaw==", b"\\u0041"),
        USUAL.replace(b"d2Rlaw==", b""),
        USUAL.replace(b"d2Rlaw==", b"a\nb"),
        USUAL.replace(b"d2Rlaw==", b'a"b'),
        USUAL.replace(b'"d2Rlaw=="', b'"d2Rlaw=='),
        USUAL.replace(b'"wrappedDEK"', b'"x\\"wrappedDEK"'),
        USUAL.replace(b'"wrappedDEK":', b'"wrappedDEK" :'),
        USUAL.replace(b'"wrappedDEK":', b'"wrappedDEK":"A","wrappedDEK":'),
        USUAL.replace(b'"wrappedDEK":', b'"wrapped\\u0044EK":"A","wrappedDEK":'),
        USUAL.replace(b'"wrappedDEK":', b'"wrappedDEK" :"A","x":{"wrappedDEK":"B"},"y":'),
        USUAL.replace(b'"wrappedDEK":', b'"x":{"wrappedDEK":"A"},"wrappedDEK" :'),
        USUAL.replace(b'"wrappedDEK":', b'"x":{"wrappedDEK":"A"},"y":'),
        USUAL + b"x",
        b" " + USUAL,
        b"x" + USUAL,
    ],
)
def test_key_metadata_means_the_same_whether_or_not_what_is_around_its_dek_is_known(changed: bytes) -> None:
    def outcome(parse: Callable[[bytes], object]) -> object:
        try:
            return parse(changed)
        except KeyMaterialError as error:
            return str(error).replace("key metadata", "key material")

    first, again = outcome(parse_key_metadata), outcome(parse_key_metadata)

    is_name = changed.startswith(b"x")
    assert first == again == (DataKeyId(changed.decode()) if is_name else outcome(KeyMaterial.parse))
