import json
from dataclasses import replace
from pathlib import Path

import pytest
from faults import FaultyKms, TurnedClock

from parquet_keytools.config.key_policy import MasterKeyReference
from parquet_keytools.errors import KeyMaterialError, KeyNotAvailableError, KmsAccessDeniedError
from parquet_keytools.files.table_check import seen_key
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, KeyReference
from parquet_keytools.keys.key_wrapping import (
    DataKeys,
    DekToWrap,
    FileKeyRetriever,
    KeyUnwrapper,
    KeyWrapper,
    KmsKeys,
)
from parquet_keytools.keys.material_store import write_key_materials
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation

DATA_KEYS = {"kf": SecretBytes(b"0" * 16), "kc1": SecretBytes(b"1" * 16), "kc2": SecretBytes(b"2" * 32)}
DEK = SecretBytes(b"d" * 16)


@pytest.fixture
def kms() -> FaultyKms:
    return FaultyKms({"mf": b"0123456789012345", "mc": b"1234567890123450"})


@pytest.fixture
def location(tmp_path: Path) -> FileLocation:
    return FileLocation.resolve(tmp_path / "x.parquet")


@pytest.fixture
def material(kms: FaultyKms) -> KeyMaterial:
    (material,) = KeyWrapper(kms, TurnedClock()).wrap(
        [DekToWrap(DEK, "mc", False)], "DEFAULT", kek_length_bits=128
    )
    return material


def test_key_material_of_a_column_is_not_the_footers(
    kms: FaultyKms, location: FileLocation, material: KeyMaterial
) -> None:
    """Arrow refuses it; we must refuse it first."""
    with pytest.raises(KeyMaterialError, match="isFooterKey"):
        retriever(kms, location).footer_dek(material.serialise(internal=True).encode())


def retriever(
    kms: FaultyKms | None, location: FileLocation, data_keys: DataKeys | None = None
) -> FileKeyRetriever:
    keys = KmsKeys(KeyUnwrapper(kms, TurnedClock()), 600)
    return FileKeyRetriever(keys, data_keys or DataKeys(DATA_KEYS), location)


def test_identifiers_that_pyarrow_carried_are_decoded_once(
    kms: FaultyKms, location: FileLocation, material: KeyMaterial
) -> None:
    keys = retriever(kms, location)
    for written, meant in {"arn%3Aaws%3Akms": "arn:aws:kms", "arn%253Aaws": "arn%3Aaws"}.items():
        key_metadata = replace(material, master_key_id=written).serialise(internal=True).encode()
        assert seen_key(keys, key_metadata, None) == MasterKeyReference(meant)


def test_internal_key_material(kms: FaultyKms, location: FileLocation, material: KeyMaterial) -> None:
    found = retriever(kms, location)
    footer = replace(material, is_footer_key=True)
    assert found.footer_dek(footer.serialise(internal=True).encode()) == DEK
    assert found.column_deks([(("a",), material.serialise(internal=True).encode())]) == [DEK]
    assert not found.uses_data_keys and found.key_materials is None


def test_external_key_material_is_read_once(kms: FaultyKms, location: FileLocation, material: KeyMaterial) -> None:
    """A rotation between two reads would mix old and new."""
    write_key_materials(location, {"columnKey0": material})
    found = retriever(kms, location)
    reference = KeyReference("columnKey0").serialise()
    assert found.column_deks([(("a",), reference)]) == [DEK]
    write_key_materials(location, {})
    assert found.column_deks([(("a",), reference)]) == [DEK]
    assert found.key_materials == {"columnKey0": material}


def test_key_material_that_could_not_be_read_stays_unread(
    kms: FaultyKms, location: FileLocation, material: KeyMaterial
) -> None:
    """A key that failed the comparison with the table must not be available a moment later."""
    found = retriever(kms, location)
    wanted = [(("a",), KeyReference("columnKey0").serialise())]
    (missing,) = found.column_deks(wanted)
    assert isinstance(missing, KeyMaterialError)
    write_key_materials(location, {"columnKey0": material})
    assert found.column_deks(wanted) == [missing]
    assert found.key_materials is None
    assert retriever(kms, location).column_deks(wanted) == [DEK]


def test_reference_that_leads_nowhere(kms: FaultyKms, location: FileLocation, material: KeyMaterial) -> None:
    write_key_materials(location, {"columnKey0": material})
    found = retriever(kms, location)
    (outcome,) = found.column_deks([(("a",), KeyReference("columnKey1").serialise())])
    assert isinstance(outcome, KeyMaterialError) and "'columnKey1'" in str(outcome)


def test_key_material_file_is_missing(kms: FaultyKms, location: FileLocation) -> None:
    with pytest.raises(KeyMaterialError, match=r"_KEY_MATERIAL_FOR_x\.parquet\.json' is missing"):
        retriever(kms, location).footer_dek(KeyReference("footerKey").serialise())


def test_data_keys(location: FileLocation) -> None:
    found = retriever(None, location)
    assert found.footer_dek(b"kf") == DATA_KEYS["kf"]
    columns = [(("double_field",), b"kc1"), (("a", "b"), DataKeyId("kc2").serialise())]
    assert found.column_deks(columns) == [DATA_KEYS["kc1"], DATA_KEYS["kc2"]]
    assert found.uses_data_keys


def test_unknown_data_key(location: FileLocation) -> None:
    with pytest.raises(KeyNotAvailableError, match=r"the footer .* data key 'nobody'"):
        retriever(None, location).footer_dek(b"nobody")


def test_an_enormous_data_key_id_is_not_quoted_whole(location: FileLocation) -> None:
    with pytest.raises(KeyNotAvailableError) as caught:
        retriever(None, location).footer_dek(b"x" * 60_000)
    assert len(str(caught.value)) < 500


def test_files_without_key_metadata(location: FileLocation) -> None:
    data_keys = DataKeys(DATA_KEYS, "kf", {"double_field": "kc1", "a.b": "kc2"})
    found = retriever(None, location, data_keys)
    assert found.footer_dek(None) == DATA_KEYS["kf"]
    assert found.footer_dek(b"") == DATA_KEYS["kf"]
    outcomes = found.column_deks([(("double_field",), None), (("a", "b"), b""), (("other", "x"), None)])
    assert outcomes[:2] == [DATA_KEYS["kc1"], DATA_KEYS["kc2"]]
    assert isinstance(outcomes[2], KeyNotAvailableError)
    assert "column 'other.x' has no key metadata" in str(outcomes[2])


def test_key_metadata_goes_before_the_configuration(location: FileLocation) -> None:
    """`keys_without_metadata` is for files without key metadata; it must not override a file that has it."""
    found = retriever(None, location, DataKeys(DATA_KEYS, "kf"))
    assert found.footer_dek(b"kc1") == DATA_KEYS["kc1"]


def test_one_kms_round_for_all_columns_and_each_its_own_outcome(
    kms: FaultyKms, location: FileLocation, material: KeyMaterial
) -> None:
    good = material.serialise(internal=True).encode()
    (refused,) = KeyWrapper(kms, TurnedClock()).wrap(
        [DekToWrap(DEK, "mf", False)], "DEFAULT", kek_length_bits=None
    )
    kms.fail("refused", "mf")
    outcomes = retriever(kms, location).column_deks(
        [
            (("a",), good),
            (("b",), b'{"keyMaterialType": "PKMT1"'),
            (("c",), refused.serialise(internal=True).encode()),
            (("d",), b"kc1"),
            (("e",), None),
        ]
    )
    assert outcomes[0] == DEK
    assert isinstance(outcomes[1], KeyMaterialError)
    assert isinstance(outcomes[2], KmsAccessDeniedError)
    assert outcomes[3] == DATA_KEYS["kc1"]
    assert isinstance(outcomes[4], KeyNotAvailableError)
    assert kms.unwrap_rounds == [2]


def test_no_columns_no_call(kms: FaultyKms, location: FileLocation) -> None:
    assert retriever(kms, location).column_deks([]) == []
    assert kms.unwrap_rounds == []


def test_key_material_that_points_to_key_material(
    kms: FaultyKms, location: FileLocation, material: KeyMaterial
) -> None:
    """A reference inside the key material file is not followed: it could go round in circles."""
    inner = json.dumps({"columnKey0": KeyReference("columnKey0").serialise().decode()})
    (Path(location.path).parent / "_KEY_MATERIAL_FOR_x.parquet.json").write_text(inner)
    (outcome,) = retriever(kms, location).column_deks([(("a",), KeyReference("columnKey0").serialise())])
    assert isinstance(outcome, KeyMaterialError)
