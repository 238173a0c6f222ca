import json

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
