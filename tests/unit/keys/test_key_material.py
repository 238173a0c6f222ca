import base64
import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from soak import how_many

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import (
    MAX_KEY_METADATA_BYTES,
    KeyMaterial,
    KeyReference,
    parse_key_metadata,
)

KEK_ID = bytes(range(16))
FOOTER = KeyMaterial(True, "kf", "d2Rlaw==", KEK_ID, "d2tlaw==", "instance", "https://kms.example")
COLUMN = KeyMaterial(False, "kc", "d2Rlaw==", KEK_ID, "d2tlaw==")
SINGLE = KeyMaterial(False, "kc", "d2Rlaw==")


def fields(**changes: object) -> dict[str, object]:
    """Return valid internal key material with some fields changed, or removed where they are Ellipsis."""
    valid = json.loads(FOOTER.serialise(internal=True)) | changes
    return {name: value for name, value in valid.items() if value is not ...}


# --- the form that parquet-java and Arrow know ---


@pytest.mark.parametrize(
    ("material", "internal", "expected"),
    [
        (
            FOOTER,
            True,
            {
                "keyMaterialType": "PKMT1",
                "internalStorage": True,
                "isFooterKey": True,
                "kmsInstanceID": "instance",
                "kmsInstanceURL": "https://kms.example",
                "masterKeyID": "kf",
                "wrappedDEK": "d2Rlaw==",
                "doubleWrapping": True,
                "keyEncryptionKeyID": base64.b64encode(KEK_ID).decode(),
                "wrappedKEK": "d2tlaw==",
            },
        ),
        (
            COLUMN,
            False,
            {
                "keyMaterialType": "PKMT1",
                "isFooterKey": False,
                "masterKeyID": "kc",
                "wrappedDEK": "d2Rlaw==",
                "doubleWrapping": True,
                "keyEncryptionKeyID": base64.b64encode(KEK_ID).decode(),
                "wrappedKEK": "d2tlaw==",
            },
        ),
        (
            SINGLE,
            True,
            {
                "keyMaterialType": "PKMT1",
                "internalStorage": True,
                "isFooterKey": False,
                "masterKeyID": "kc",
                "wrappedDEK": "d2Rlaw==",
                "doubleWrapping": False,
            },
        ),
    ],
)
def test_fields_are_exactly_those_of_parquet_java(
    material: KeyMaterial, internal: bool, expected: dict[str, object]
) -> None:
    assert json.loads(material.serialise(internal=internal)) == expected


def test_reads_what_parquet_java_wrote(parquet_test_data) -> None:
    """parquet-java orders its fields differently, and has no internalStorage in the external form."""
    (file,) = parquet_test_data.glob("_KEY_MATERIAL_FOR_*.json")
    materials = {name: KeyMaterial.parse(text) for name, text in json.loads(file.read_text()).items()}
    assert {name: material.master_key_id for name, material in materials.items()} == {
        "footerKey": "kf",
        "columnKey0": "kc1",
        "columnKey1": "kc2",
    }
    assert all(len(material.kek_id or b"") == 16 for material in materials.values())
    assert materials["footerKey"].is_footer_key and not materials["columnKey0"].is_footer_key


@pytest.mark.parametrize("material", [FOOTER, COLUMN, SINGLE])
@pytest.mark.parametrize("internal", [True, False])
def test_round_trip(material: KeyMaterial, internal: bool) -> None:
    assert KeyMaterial.parse(material.serialise(internal=internal)) == material
    assert KeyMaterial.parse(material.serialise(internal=internal).encode()) == material


def test_what_the_kms_unwraps() -> None:
    """With double wrapping, it is the KEK; every KMS would refuse the wrapped DEK."""
    assert FOOTER.kms_wrapped_key == "d2tlaw==" and FOOTER.double_wrapping
    assert SINGLE.kms_wrapped_key == "d2Rlaw==" and not SINGLE.double_wrapping


def test_fields_that_are_unknown_do_no_harm() -> None:
    """A later writer may add fields; key material that other readers accept must not be refused."""
    assert KeyMaterial.parse(json.dumps(fields(future="x"))) == FOOTER


def test_columns_have_no_instance() -> None:
    text = json.dumps(fields(isFooterKey=False, kmsInstanceID=..., kmsInstanceURL=...))
    material = KeyMaterial.parse(text)
    assert (material.kms_instance_id, material.kms_instance_url) == ("DEFAULT", "DEFAULT")


# --- strictness ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keyMaterialType": ...}, "keyMaterialType: is missing"),
        ({"keyMaterialType": "PKMT2"}, "'PKMT2' is not 'PKMT1'"),
        ({"keyMaterialType": "pkmt1"}, "'pkmt1' is not 'PKMT1'"),
        ({"keyMaterialType": 1}, "keyMaterialType: is not a string"),
        ({"isFooterKey": ...}, "isFooterKey: is missing"),
        ({"isFooterKey": "true"}, "isFooterKey: is not a boolean"),
        ({"isFooterKey": 1}, "isFooterKey: is not a boolean"),
        ({"isFooterKey": None}, "isFooterKey: is not a boolean"),
        ({"doubleWrapping": ...}, "doubleWrapping: is missing"),
        ({"doubleWrapping": 0}, "doubleWrapping: is not a boolean"),
        ({"masterKeyID": ...}, "masterKeyID: is missing"),
        ({"masterKeyID": 5}, "masterKeyID: is not a string"),
        ({"masterKeyID": ["kf"]}, "masterKeyID: is not a string"),
        ({"masterKeyID": ""}, "must not be empty"),
        ({"wrappedDEK": ...}, "wrappedDEK: is missing"),
        ({"wrappedDEK": {}}, "wrappedDEK: is not a string"),
        ({"wrappedDEK": ""}, "must not be empty"),
        ({"wrappedKEK": ...}, "wrappedKEK: is missing"),
        ({"wrappedKEK": None}, "wrappedKEK: is not a string"),
        ({"wrappedKEK": ""}, "must not be empty"),
        ({"keyEncryptionKeyID": ...}, "keyEncryptionKeyID: is missing"),
        ({"keyEncryptionKeyID": 16}, "keyEncryptionKeyID: is not a string"),
        ({"keyEncryptionKeyID": "%%%="}, "keyEncryptionKeyID: is not base64"),
        ({"keyEncryptionKeyID": "AA"}, "keyEncryptionKeyID: is not base64"),
        ({"keyEncryptionKeyID": "é==="}, "keyEncryptionKeyID: is not base64"),
        ({"keyEncryptionKeyID": "AA\nAA"}, "keyEncryptionKeyID: is not base64"),
        ({"kmsInstanceID": ...}, "kmsInstanceID: is missing"),
        ({"kmsInstanceURL": ...}, "kmsInstanceURL: is missing"),
        ({"kmsInstanceID": 7}, "kmsInstanceID: is not a string"),
        ({"kmsInstanceURL": True}, "kmsInstanceURL: is not a string"),
        ({"kmsInstanceURL": "\ud800"}, "kmsInstanceURL: is not valid Unicode"),
        ({"masterKeyID": "kf\udfff"}, "masterKeyID: is not valid Unicode"),
    ],
)
def test_every_mistake_is_one_clear_error(changes: dict[str, object], words: str) -> None:
    with pytest.raises(KeyMaterialError) as caught:
        KeyMaterial.parse(json.dumps(fields(**changes)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("kf", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('"PKMT1"', "not a JSON object"),
        ("null", "not a JSON object"),
        ("{} {}", "not valid JSON"),
        ('{"keyMaterialType": NaN}', "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 60_000, "not valid JSON"),
        ('{"a":' * 10_000, "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        ("x" * (MAX_KEY_METADATA_BYTES + 1), "longer than"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_text_that_is_no_key_material(text: str | bytes, words: str) -> None:
    with pytest.raises(KeyMaterialError, match=words):
        KeyMaterial.parse(text)


def test_a_mistake_says_where_it_is() -> None:
    with pytest.raises(KeyMaterialError, match=r"^key material: not valid JSON"):
        KeyMaterial.parse("{")
    with pytest.raises(KeyMaterialError, match=r"^key metadata: not valid JSON"):
        parse_key_metadata(b"{")


def test_no_byte_is_white_space() -> None:
    """Each file has this text once for each column."""
    texts = (
        FOOTER.serialise(internal=True),
        COLUMN.serialise(internal=False),
        KeyReference("a").serialise().decode(),
    )
    assert not any(set(text) & set(string.whitespace) for text in texts)


@pytest.mark.parametrize("name", ["masterKeyID", "wrappedKEK", "internalStorage", "unknown"])
def test_a_field_that_comes_twice(name: str) -> None:
    """Parsers differ in which of the two they use: one checks a field, another uses its duplicate."""
    text = json.dumps(fields(unknown="x"))[:-1] + f', "{name}": "other"}}'
    with pytest.raises(KeyMaterialError, match="is repeated"):
        KeyMaterial.parse(text)


def test_an_escaped_name_is_the_same_field() -> None:
    text = json.dumps(fields())[:-1] + ', "\\u006dasterKeyID": "other"}'
    with pytest.raises(KeyMaterialError, match="is repeated"):
        KeyMaterial.parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


@given(st.text() | st.binary() | json_values.map(json.dumps))
@example('{"keyMaterialType":"PKMT1","isFooterKey":true,"doubleWrapping":false,"masterKeyID":"\\ud800"}')
@settings(max_examples=how_many(40, 1_000))
def test_nothing_but_key_material_errors_leave(text: str | bytes) -> None:
    try:
        KeyMaterial.parse(text)
    except KeyMaterialError as error:
        str(error).encode()  # A text with half a surrogate pair could not be printed.


@given(st.dictionaries(st.sampled_from(sorted(fields())), json_values, max_size=4))
@settings(max_examples=how_many(40, 1_000))
def test_no_value_of_a_field_gets_another_error(changes: dict[str, object]) -> None:
    try:
        KeyMaterial.parse(json.dumps(fields(**changes)))
    except KeyMaterialError as error:
        str(error).encode()


@given(
    st.builds(
        KeyMaterial,
        is_footer_key=st.booleans(),
        master_key_id=st.text(min_size=1),
        wrapped_dek=st.text(string.printable, min_size=1),
        kms_instance_id=st.just("DEFAULT"),
        kms_instance_url=st.just("DEFAULT"),
    )
)
def test_whatever_is_written_is_read_the_same(material: KeyMaterial) -> None:
    assert KeyMaterial.parse(material.serialise(internal=True)) == material
