"""AAD prefixes in Spark, through our factory: with NUL at their end, without, and with moved bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from prefix_files import UNIQUE, data, document, present, write
from spark_cluster import PASSPHRASE, VARIABLE
from spark_driver import SparkDriver

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(600),
]

RIGHT, MOVED = list(range(20)), list(range(1000, 1020))
OPTION = "parquet.keytools.aad.prefix"


class Place:
    """A keystore, configurations, and the files that Spark reads."""

    def __init__(self, folder: Path, driver: SparkDriver) -> None:
        self.folder = folder
        self._driver = driver
        keystore = Keystore.create(
            folder / "keystore.json", lambda: passphrase_from_text(PASSPHRASE), scrypt_n=2**14
        )
        for name in ("kf", "kc"):
            keystore.create_key(name)

    def config(self, **changes: Any) -> Path:
        """Write a configuration whose table has the prefix `t/{file_name}`, unless `changes` override it."""
        kms = {"type": "keystore", "path": str(self.folder / "keystore.json"), "passphrase": f"${{{VARIABLE}}}"}
        path = self.folder / f"keys{len(list(self.folder.glob('*.yaml')))}.yaml"
        path.write_text(json.dumps(document(**changes) | {"kms": kms}))
        return path

    def file(self, name: str, prefix: bytes, unique: bytes = UNIQUE, first: int = 0, **settings: Any) -> Path:
        """Write a file `part1` in a new folder."""
        with Keytools.from_yaml(self.config(**settings)) as writer:
            return write(writer, self.folder / name / "part1", prefix, unique, table=data(first))

    def read(self, config: Path, reads: list[tuple[Path, dict[str, str]]]) -> list[list[int] | str]:
        """Read files with Spark, in a separate session."""
        found: list[list[int] | str] = self._driver.do(kind="prefixes", config=config, reads=reads)
        return found


def key_material(path: Path) -> Path:
    return path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json")


SUPPLIED: dict[str, Any] = {"store_aad_prefix": False}
SIGNED: dict[str, Any] = {"plaintext_footer": True}


@pytest.fixture
def place(tmp_path: Path, spark_driver: SparkDriver, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(VARIABLE, PASSPHRASE)
    return Place(tmp_path, spark_driver)


def test_both_forms_are_read_and_moved_bytes_are_not(place: Place) -> None:
    reads: list[tuple[Path, dict[str, str]]] = []
    for number, settings in enumerate(({}, SIGNED, SUPPLIED, SUPPLIED | SIGNED)):
        for prefix in (b"t/part1\0", b"t/part1"):
            reads.append((place.file(f"good{number}{len(prefix)}", prefix, **settings), {}))
    good = len(reads)
    moves = [
        (b"t/part10", b"t/part1", b"0" + UNIQUE, UNIQUE),
        (b"t/part10\0", b"t/part1", b"0\0" + UNIQUE, UNIQUE),
        (b"t/part1\0", b"t/part1", b"\0" + UNIQUE, UNIQUE),
        (b"t/part", b"t/part1", UNIQUE[1:], b"1" + UNIQUE[1:]),
    ]
    lengths = []
    for number, settings in enumerate(({}, SIGNED, SUPPLIED)):
        for position, (prefix, shown, shown_unique, unique) in enumerate(moves):
            path = place.file(f"moved{number}{position}", prefix, unique, 1000, **settings)
            supplied = settings is SUPPLIED
            present(path, None if supplied else shown, shown_unique, supply=supplied)
            reads.append((path, {}))
            lengths.append(len(shown_unique))
    others = [
        (place.file("other", b"t/part10\0"), {}),
        (place.file("other supplied", b"t/part10\0", **SUPPLIED), {}),
        (reads[0][0], {OPTION: "t/part10"}),
        (reads[0][0], {OPTION: "t/part1\0"}),
    ]
    given = [(place.file("given", b"u/part1\0"), {OPTION: "u/{file_name}"})]
    found = place.read(place.config(), [*reads, *others, *given])
    assert found[:good] == [RIGHT] * good
    for outcome, length in zip(found[good:], lengths, strict=False):
        assert f"/part1: an AAD prefix is expected, and the file unique has {length} bytes, not 8" in outcome
        assert "reading.file_unique_lengths" in outcome
    of_others = found[good + len(lengths) : -1]
    assert len(of_others) == len(others)
    assert all(isinstance(outcome, str) for outcome in of_others)
    assert "/part1: the file stores another AAD prefix than the one expected" in of_others[0]
    assert "contains NUL" in of_others[3]
    assert found[-1] == RIGHT


def test_any_length_where_no_prefix_begins_another(place: Place) -> None:
    settings: dict[str, Any] = {"aad_prefix": "t/{file_name}/", "reading": {"file_unique_lengths": "any"}}
    reads: list[tuple[Path, dict[str, str]]] = []
    for number, more in enumerate(({}, SIGNED, SUPPLIED)):
        for prefix in (b"t/part1/\0", b"t/part1/"):
            reads.append(
                (place.file(f"good{number}{len(prefix)}", prefix, b"12 bytes, no", **settings, **more), {})
            )
    good = len(reads)
    path = place.file("moved", b"t/part10/", bytes(11), 1000, **settings)
    present(path, b"t/part1", b"0/" + bytes(11))
    reads += [(path, {}), (path, {OPTION: "t/part1"})]
    given = place.file("given", b"u/part1", bytes(11), **settings)
    delimited = place.file("given, delimited", b"u/part1\0", bytes(11), **settings)
    reads += [(given, {OPTION: "u/part1"}), (delimited, {OPTION: "u/part1"})]
    found = place.read(place.config(**settings), reads)
    assert found[:good] == [RIGHT] * good
    for outcome in found[good : good + 3]:
        assert "/part1: the file stores another AAD prefix than the one expected" in outcome
    assert found[-1] == RIGHT


PAGE_BEHIND = bytes(range(100, 108)) + b"\2\0\0\0\0\0"
"""Turns the AAD of a footer into the AAD of the first data page."""


def test_a_page_in_the_place_of_a_footer(place: Place) -> None:
    """Wherever its AAD is cut into prefix and file unique, if no prefix is expected."""
    reads: list[tuple[Path, dict[str, str]]] = [
        (place.file("stored", b"u/other"), {}),
        (place.file("stored, delimited", b"u/other\0"), {}),
    ]
    for kept in (14, 11, 8, 3):
        path = place.file(f"kept{kept}", b"u/other", first=1000)
        present(path, PAGE_BEHIND[: 14 - kept] or None, PAGE_BEHIND[14 - kept :])
        reads.append((path, {}))
    found = place.read(place.config(aad_prefix=None), reads)
    assert found[:2] == [RIGHT, RIGHT]
    for outcome in found[2:]:
        assert "a data page is in the place of the footer" in outcome


def test_a_page_in_the_place_of_a_footer_where_any_length_is_allowed(place: Place) -> None:
    settings: dict[str, Any] = {"aad_prefix": "t/{file_name}/", "reading": {"file_unique_lengths": "any"}}
    path = place.file("page", b"t/part1/", first=1000, **settings)
    present(path, b"t/part1/", PAGE_BEHIND)
    good = place.file("good", b"t/part1/", b"12 bytes, no", **settings)
    found = place.read(place.config(**settings), [(good, {}), (path, {})])
    assert found[0] == RIGHT
    assert "a data page is in the place of the footer" in found[1]


def test_a_folder_gives_no_values_to_a_column_under_a_key(place: Place) -> None:
    """An attacker without a key moves an authentic file to `other=7`: Spark would take 7 as the value of it."""
    reads: list[tuple[Path, dict[str, str]]] = []
    for number, folder in enumerate(("year=2020", "other=7", "OTHER=7", "year=2020/name=x", "othe%72=7")):
        place.file(f"tree{number}/{folder}", b"t/part1\0")
        reads.append((place.folder / f"tree{number}", {}))
    found = place.read(place.config(), reads)
    assert found[0] == RIGHT
    for outcome, name in zip(found[1:], ("other", "other", "name", "other"), strict=True):
        assert f"part1: the name of a folder gives values to '{name}', which is under a key" in outcome


def test_key_material_that_is_another_when_the_same_footer_comes_again(place: Place) -> None:
    """An attacker may use only the footer's key: an earlier check of the columns' keys must not be reused."""
    honest = place.file("honest", b"t/part1\0", key_material="external")
    forged = place.file("forged", b"t/part1\0", first=1000, column_keys={"kf": ["name"]}, key_material="external")
    said = place.folder / "said otherwise" / "part1"
    said.parent.mkdir()
    said.write_bytes(forged.read_bytes())
    entries = json.loads(key_material(forged).read_text())
    claimed = {
        name: text.replace('"kf"', '"kc"') if name != "footerKey" else text for name, text in entries.items()
    }
    assert claimed != entries
    key_material(said).write_text(json.dumps(claimed))
    found = place.read(place.config(), [(path, {}) for path in (honest, said, forged, honest)])
    assert found[0] == found[3] == RIGHT
    assert "does not belong to this master key" in found[1]
    assert "column 'name' is under the master key 'kf', and the table has the master key 'kc'" in found[2]
