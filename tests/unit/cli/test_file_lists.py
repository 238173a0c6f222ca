"""`verify --record` and `--expect`, and lists that `rotate` and `rekey` update."""

import json
import shutil
from pathlib import Path

import pytest

from parquet_keytools import Keytools
from parquet_keytools.conformance.data_set import ListKeeper
from parquet_keytools.errors import KmsUnavailableError

BOTH = pytest.mark.parametrize(
    "settings",
    [{}, {"plaintext_footer": True}, {"key_material": "external"}, {"double_wrapping": False}],
    ids=["encrypted footer", "plaintext footer", "external", "single wrapping"],
)


class Listed:
    """A data set with a list of its files."""

    def __init__(self, run, case, path: Path) -> None:
        self.run, self.case, self.list = run, case, path
        done = self.verify("--record", path)
        assert done.exit_code == 0 and f"Recorded in {path}." in done.stderr

    def verify(self, *arguments):
        return self.run("verify", self.case.data, "--config", self.case.config, *arguments)

    def expect(self):
        return self.verify("--expect", self.list)

    def findings(self) -> list[str]:
        done = self.verify("--expect", self.list, "--json")
        assert done.exit_code == 1, done.output
        rules = {rule["id"]: rule for rule in json.loads(done.stdout)["rules"]}
        return [finding["message"] for finding in rules["file-list"]["findings"]]

    def change(self, **fields) -> None:
        document = json.loads(self.list.read_text())
        self.list.write_text(json.dumps({**document, **fields}))


@pytest.fixture
def listed(run, keystore_case, tmp_path: Path):
    def make(**settings) -> Listed:
        return Listed(run, keystore_case(**settings), tmp_path / "list.json")

    return make


@BOTH
def test_files_as_they_were_recorded(listed, settings) -> None:
    one = listed(**settings)
    done = one.expect()
    assert done.exit_code == 0, done.output
    # Without a list, nothing is compared.
    assert one.verify().exit_code == 0


def test_a_removed_an_added_and_an_older_file(listed) -> None:
    one = listed()
    older, other = one.case.files
    kept = older.read_bytes()
    with Keytools.from_yaml(one.case.config) as keytools:
        keytools.write_table(one.case.table.slice(1), older)
        keytools.write_table(one.case.table, other.with_name("added.parquet"))
    done = one.verify("--record", one.list)
    assert done.exit_code == 0
    assert one.expect().exit_code == 0
    # Each file is authentic, and from this data set.
    older.write_bytes(kept)
    other.unlink()
    shutil.copy(other.with_name("added.parquet"), other.with_name("copy.parquet"))
    folder = one.case.data
    names = [str(path.relative_to(folder)) for path in (older, other, other.with_name("copy.parquet"))]
    found = one.findings()
    assert any(message.startswith(f"{names[0]} has another ") for message in found)
    assert f"{names[1]} is in the list, and not in the folder." in found
    assert f"{names[2]} is not in the list." in found
    assert len(found) == 3


def test_a_list_is_not_believed_before_it_is_authentic(listed) -> None:
    one = listed()
    good = json.loads(one.list.read_text())
    entries = dict(good["files"])
    name = next(iter(entries))
    entries.pop(name)
    (one.case.data / name).unlink()
    for fields in (
        {"files": entries},
        {"recorded_at": "2031-01-01T00:00:00+00:00"},
        {"extra": 1},
        {"hmac_sha256": "00" * 32},
    ):
        one.change(**{**good, **fields})
        done = one.expect()
        assert done.exit_code == 1 and "HMAC is wrong" in done.stderr, done.output
        # It was not used for verification.
        assert not done.stdout
        one.list.write_text(json.dumps(good))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", b'{"format": "parquet-keytools file list", "version": 2}', b"[" * 100_000],
    ids=["empty", "array", "object", "no text", "version", "deep"],
)
def test_what_is_no_list(listed, content) -> None:
    one = listed()
    one.list.write_bytes(content)
    done = one.expect()
    assert done.exit_code == 1 and "is not valid" in done.stderr


def test_a_list_under_another_master_key_is_refused(listed) -> None:
    # A reader of the column could forge a list under the column's key.
    one = listed()
    assert one.verify("--record", one.list, "--list-key", "pii").exit_code == 0
    done = one.expect()
    assert done.exit_code == 1 and "--list-key" in done.stderr
    assert one.verify("--expect", one.list, "--list-key", "pii").exit_code == 0


def test_key_material_of_a_file_authenticates_no_list(listed) -> None:
    # Readers of the file know its DEK.
    one = listed()
    with Keytools.from_yaml(one.case.config) as keytools:
        inspected = keytools.inspect_file(one.case.files[0])
    assert inspected.footer_key is not None
    document = json.loads(one.list.read_text())
    material = json.loads(document["key_material"])
    assert material["doubleWrapping"] is False and material["masterKeyID"] == "footer"
    other = json.loads(json.dumps(document))
    one.change(key_material=json.dumps({**material, "masterKeyID": "pii"}))
    assert one.expect().exit_code == 1
    one.list.write_text(json.dumps(other))
    assert one.expect().exit_code == 0


def test_files_that_do_not_conform_are_not_recorded(listed, tmp_path: Path) -> None:
    one = listed()
    data = bytearray(one.case.files[0].read_bytes())
    data[-20] ^= 1
    one.case.files[0].write_bytes(data)
    target = tmp_path / "second.json"
    done = one.verify("--record", target)
    assert done.exit_code == 1 and "Not recorded" in done.stderr
    assert not target.exists()


def test_where_a_list_may_be(listed) -> None:
    one = listed()
    inside = one.case.data / "list.json"
    for option in ("--record", "--expect"):
        done = one.verify(option, inside)
        assert done.exit_code == 2 and "in the folder of its files" in done.stderr
    assert not inside.exists()
    done = one.run("verify", one.case.data, "--expect", one.list)
    assert done.exit_code == 2
    done = one.run("verify", one.case.files[0], "--config", one.case.config, "--expect", one.list)
    assert done.exit_code == 2


@BOTH
def test_rotate_keeps_the_list_up_to_date(listed, settings) -> None:
    one = listed(**settings)
    case = one.case
    case.keystore.rotate_key("pii")
    case.keystore.rotate_key("footer")
    before = one.list.read_bytes()
    arguments = ["rotate", case.data, "--config", case.config, "--update-list", one.list]
    assert one.run(*arguments, "--dry-run").exit_code == 0
    assert one.list.read_bytes() == before
    assert one.run(*arguments).exit_code == 0
    assert one.expect().exit_code == 0
    # The list does not need the old version of its own master key either.
    case.keystore.set_enabled("footer", False, 1)
    assert one.expect().exit_code == 0


def test_rotate_after_an_interruption(listed) -> None:
    one = listed()
    case = one.case
    case.keystore.rotate_key("pii")
    # As if the run had been killed after the first file.
    assert one.run("rotate", case.files[0], "--config", case.config).exit_code == 0
    assert one.expect().exit_code == 1
    assert one.run("rotate", case.data, "--config", case.config, "--update-list", one.list).exit_code == 0
    assert one.expect().exit_code == 0


@pytest.mark.parametrize(
    ("command", "hint"),
    [(("rotate",), "Repeat the command."), (("rekey", "--in-place"), "Verify the files, and record a new list.")],
)
def test_what_was_changed_is_reported_if_the_kms_fails_at_the_end(
    listed, monkeypatch: pytest.MonkeyPatch, command, hint
) -> None:
    one = listed()
    one.case.keystore.rotate_key("pii")
    before = one.list.read_bytes()
    write = ListKeeper.write

    def fail(*_: object) -> None:
        raise KmsUnavailableError("it is down").about("keystore", "wrap", "footer")

    monkeypatch.setattr(ListKeeper, "write", fail)
    arguments = [*command, one.case.data, "--config", one.case.config, "--update-list", one.list]
    done = one.run(*arguments)
    assert done.exit_code == 3
    changed = "rotated" if command == ("rotate",) else "rekeyed"
    assert f"Before this: 2 files: 2 {changed}. {hint}" in done.stderr and "it is down" in done.stderr
    assert one.list.read_bytes() == before
    monkeypatch.setattr(ListKeeper, "write", write)
    if command == ("rotate",):
        assert one.run(*arguments).exit_code == 0
    else:
        one.list.unlink()
        assert one.verify("--record", one.list).exit_code == 0
    assert one.expect().exit_code == 0


@pytest.mark.parametrize("command", [("rotate",), ("rekey", "--in-place")])
def test_files_that_are_not_listed_stop_a_change(listed, command) -> None:
    one = listed()
    one.case.keystore.rotate_key("pii")
    shutil.copy(one.case.files[0], one.case.files[0].with_name("copy.parquet"))
    one.case.files[1].unlink()
    before = one.case.files[0].read_bytes(), one.list.read_bytes()
    done = one.run(*command, one.case.data, "--config", one.case.config, "--update-list", one.list)
    assert done.exit_code == 1
    assert "copy.parquet is not in the list" in done.stderr and "is missing" in done.stderr
    assert (one.case.files[0].read_bytes(), one.list.read_bytes()) == before


def test_rekey_in_place_keeps_the_list_up_to_date(listed) -> None:
    one = listed()
    before = json.loads(one.list.read_text())
    case = one.case
    done = one.run("rekey", case.data, "--in-place", "--config", case.config, "--update-list", one.list)
    assert done.exit_code == 0, done.output
    assert one.expect().exit_code == 0
    after = json.loads(one.list.read_text())
    assert after["files"].keys() == before["files"].keys()
    for name, entry in after["files"].items():
        assert entry["file_unique"] != before["files"][name]["file_unique"]


def test_a_rotation_that_moves_the_key_of_the_list(listed) -> None:
    one = listed()
    case = one.case
    arguments = ["rotate", case.data, "--config", case.config, "--from", "footer", "--to", "times"]
    assert one.run(*arguments, "--update-list", one.list).exit_code == 0
    case.keystore.set_enabled("footer", False, 1)
    case.config.write_text(case.config.read_text().replace('"footer_key": "footer"', '"footer_key": "times"'))
    assert one.expect().exit_code == 0


def test_a_link_into_the_folder(listed, tmp_path: Path) -> None:
    one = listed()
    (tmp_path / "link").symlink_to(one.case.data)
    done = one.verify("--record", tmp_path / "link" / "list.json")
    assert done.exit_code == 2 and "in the folder of its files" in done.stderr
