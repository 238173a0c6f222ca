"""The keys of a file whose key material does not match its footer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rotation_case import TABLE, Case, external_entries, key_material_file, tree_digest

from parquet_keytools.rotation import file_keys
from parquet_keytools.rotation.file_keys import ExternalMaterial
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.storage.locations import FileLocation

every_entry = pytest.mark.parametrize("reference", ["footerKey", "columnKey0"])


def rewritten(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    key_material_file(path).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))


@every_entry
def test_an_entry_that_is_missing(tmp_path: Path, reference: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    case.add_version()
    entries = external_entries(path)
    del entries[reference]
    rewritten(path, entries)
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(case.folder).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "KeyMaterialError")
    assert str(file.error).count(str(path)) == 1
    assert f"the key material file has no {reference!r}" in str(file.error)
    assert tree_digest(case.folder) == before
    (found,) = case.tools().key_inventory(path)
    assert f"has no {reference!r}" in str(found.unknown)


@every_entry
def test_a_file_that_is_replaced_before_its_key_material_is_read(
    tmp_path: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references of one file and the entries of the other are no damage: the next attempt has both."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    case.add_version()
    read = file_keys.read_external_material
    attempts: list[FileLocation] = []

    def of_the_next_one(location: FileLocation) -> ExternalMaterial:
        attempts.append(location)
        found = read(location)
        if len(attempts) > 1:
            return found
        shutil.copy(path, tmp_path / "next")
        (tmp_path / "next").replace(path)
        others = {name: held for name, held in found.by_reference.items() if name != reference}
        return replace(found, content=found.with_new({}, [reference]), by_reference=others)

    monkeypatch.setattr(file_keys, "read_external_material", of_the_next_one)
    (file,) = case.tools().rotate(case.folder).files
    assert file.outcome is Outcome.ROTATED and len(attempts) == 2
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


def test_a_footers_key_that_says_that_it_is_none(tmp_path: Path) -> None:
    """No reader accepts it, so it is not reported as rotated."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    case.add_version()
    entries = external_entries(path)
    entries["footerKey"]["isFooterKey"] = False
    rewritten(path, entries)
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(case.folder).files
    assert (file.outcome, file.error_class) == (Outcome.FAILED, "KeyMaterialError")
    assert "isFooterKey" in str(file.error) and str(path) in str(file.error)
    assert tree_digest(case.folder) == before
    (found,) = case.tools().key_inventory(path)
    assert "isFooterKey" in str(found.unknown)


def test_for_a_file_under_another_prefix_no_key_is_unwrapped(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write(tools=case.tools(aad_prefix="one"))
    before = case.kms.call_counts
    (file,) = case.tools().rotate(path, aad_prefix="other", new_keks=True).files
    assert file.error_class == "AadPrefixError"
    assert case.kms.call_counts - before == {}
