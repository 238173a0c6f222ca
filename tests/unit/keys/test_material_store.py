import json
import stat
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools.errors import KeyMaterialError, OutputError, ParquetFormatError
from parquet_keytools.keys import material_store
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.material_store import (
    key_material_location,
    parse_key_materials,
    read_key_materials,
    remove_key_materials,
    serialise_key_materials,
    write_key_materials,
)
from parquet_keytools.storage.local_files import identity_of_folder
from parquet_keytools.storage.locations import FileLocation

MATERIALS = {
    "footerKey": KeyMaterial(True, "kf", "d2Rlaw==", bytes(16), "d2tlaw=="),
    "columnKey0": KeyMaterial(False, "kc", "d2Rlaw=="),
}


TWICE = serialise_key_materials(MATERIALS).replace(b"columnKey0", b"footerKey")
ENTRY = json.dumps({"a": MATERIALS["columnKey0"].serialise(internal=False)})[1:-1]
BROKEN = [
    *(
        "{",
        "}",
        "{,}",
        "{a}",
        '{"a"}',
        '{"a',
        '{"a" "b"}',
        "{} {}",
        "{}x",
        '{1: "a"}',
        "\ufeff{}",
        "{}\0",
    ),
    *(f"{{{ENTRY}", f"{{{ENTRY},", f"{{{ENTRY},}}", f"{{,{ENTRY}}}", f"{{{ENTRY} {ENTRY}}}", f"{{{ENTRY}}}}}"),
    *(f"{{{ENTRY[:-1]}}}", f"{{{ENTRY}\x0b}}", f"[{{{ENTRY}}}]"),
]


@pytest.fixture
def location(tmp_path: Path) -> FileLocation:
    return FileLocation.resolve(tmp_path / "x.parquet")


def test_name_is_that_of_parquet_java(location: FileLocation) -> None:
    assert key_material_location(location).name == "_KEY_MATERIAL_FOR_x.parquet.json"
    assert Path(key_material_location(location).path).parent == Path(location.path).parent


def test_round_trip(location: FileLocation) -> None:
    write_key_materials(location, MATERIALS)
    assert read_key_materials(location) == MATERIALS
    assert [path.name for path in Path(location.path).parent.iterdir()] == ["_KEY_MATERIAL_FOR_x.parquet.json"]


def test_form_is_references_to_strings_of_json(location: FileLocation) -> None:
    """No nested objects, and no internalStorage: parquet-java reads nothing else."""
    content = json.loads(serialise_key_materials(MATERIALS))
    assert list(content) == ["footerKey", "columnKey0"]
    assert all(isinstance(text, str) for text in content.values())
    assert "internalStorage" not in json.loads(content["footerKey"])


def test_reads_what_parquet_java_wrote(parquet_test_data: Path) -> None:
    location = FileLocation.resolve(parquet_test_data / "external_key_material_java.parquet.encrypted")
    materials = read_key_materials(location)
    assert {name: material.master_key_id for name, material in materials.items()} == {
        "footerKey": "kf",
        "columnKey0": "kc1",
        "columnKey1": "kc2",
    }


def test_missing(location: FileLocation) -> None:
    with pytest.raises(KeyMaterialError, match="is missing") as caught:
        read_key_materials(location)
    assert caught.value.path == location.path and "copy, move and keep both together" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"footerKey": {}}', "whose values are strings"),
        (b'{"footerKey": null}', "whose values are strings"),
        (b'{"footerKey": "{}"}', "'footerKey': .*keyMaterialType: is missing"),
        (b'{"footerKey": ""}', "'footerKey': .*not valid JSON"),
        (TWICE, "a reference is repeated"),
        (b"{" + b'"" :"",' * (1 << 21) + b'"" :""}', "not valid JSON"),
        (b'{"a":' * 20_000, "whose values are strings"),
        (b'{"a": ' + b"9" * 5000 + b"}", "whose values are strings"),
        *((text.encode(), "not valid JSON") for text in BROKEN),
        (json.dumps({"x" * 1000: "{}"}).encode(), "'x{64}':"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_every_mistake_is_one_clear_error(content: bytes, words: str) -> None:
    with pytest.raises(KeyMaterialError, match=words) as caught:
        parse_key_materials(content, "some/path.json")
    assert caught.value.path == "some/path.json"
    assert len(str(caught.value)) < 300


def test_too_long(location: FileLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material_store, "MAX_FILE_BYTES", 100)
    write_key_materials(location, MATERIALS)
    with pytest.raises(ParquetFormatError, match="longer than 100 bytes"):
        read_key_materials(location)


def test_a_failed_write_leaves_the_old(location: FileLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial key material makes the Parquet file permanently unreadable."""
    write_key_materials(location, MATERIALS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OutputError, match="no space"):
        write_key_materials(location, {})
    monkeypatch.undo()
    assert read_key_materials(location) == MATERIALS
    assert len(list(Path(location.path).parent.iterdir())) == 1


@given(st.binary() | st.dictionaries(st.text(), st.text()).map(lambda value: json.dumps(value).encode()))
def test_nothing_but_key_material_errors_leave(content: bytes) -> None:
    try:
        parse_key_materials(content, "x")
    except KeyMaterialError as error:
        str(error).encode()


def test_white_space_of_json_is_none_of_ours() -> None:
    text = json.dumps(json.loads(serialise_key_materials(MATERIALS)), indent="\t").replace("\n", "\r\n ")
    assert parse_key_materials(f" \n{text}\t ".encode(), "x") == MATERIALS
    assert parse_key_materials(b" {\n}\r", "x") == {}


@pytest.mark.parametrize("nested", ["[],", "{},", "0,", '"",', "["])
def test_what_nobody_authenticated_is_not_built(nested: str) -> None:
    """A reader parses it before anything else, and anyone who can write to the storage can replace it."""
    content = b'{"a": [' + (nested * (4_000_000 // len(nested))).encode()
    tracemalloc.start()
    try:
        with pytest.raises(KeyMaterialError, match="whose values are strings"):
            parse_key_materials(content, "x")
        assert tracemalloc.get_traced_memory()[1] < 3 * len(content)
    finally:
        tracemalloc.stop()


def test_what_is_wrong_is_said_of_the_key_material_file(location: FileLocation) -> None:
    written = Path(key_material_location(location).path)
    written.write_bytes(b"[]")
    with pytest.raises(KeyMaterialError) as caught:
        read_key_materials(location)
    assert caught.value.path == str(written)


def _mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_permissions_are_those_of_the_parquet_file_or_of_what_was_there(location: FileLocation) -> None:
    """Otherwise, more users could read the key material than before, or its readers no longer could."""
    Path(location.path).touch()
    Path(location.path).chmod(0o640)
    write_key_materials(location, MATERIALS, like=location)
    written = key_material_location(location).path
    assert _mode(written) == 0o640
    Path(written).chmod(0o604)
    write_key_materials(location, {}, like=location)
    assert _mode(written) == 0o604 and read_key_materials(location) == {}


def test_another_folder_of_the_same_name_is_left_alone(location: FileLocation, tmp_path: Path) -> None:
    """Another user replaced the folder while its files were rotated."""
    there, elsewhere = identity_of_folder(str(tmp_path)), identity_of_folder("/")
    write_key_materials(location, MATERIALS, folder=there)
    with pytest.raises(OutputError, match="folder"):
        write_key_materials(location, {}, folder=elsewhere)
    with pytest.raises(OutputError, match="folder"):
        remove_key_materials(location, elsewhere)
    assert read_key_materials(location) == MATERIALS
    remove_key_materials(location, there)
    assert not Path(key_material_location(location).path).exists()
    remove_key_materials(location, there)


def test_content_has_no_white_space(location: FileLocation) -> None:
    write_key_materials(location, MATERIALS)
    content = Path(key_material_location(location).path).read_bytes()
    assert content.startswith(b'{"footerKey":"{') and b'","columnKey0":"{' in content
