import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import TableMismatchError
from parquet_keytools.rotation import rotate


def test_the_old_version_is_needed_no_more(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    done = run("rotate", case.data, "--config", case.config, "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [file["outcome"] for file in document["files"]] == ["rotated", "rotated"]
    assert [file["path"] for file in document["files"]] == list(map(str, case.files))
    change = {"master_key_id": "pii", "new_master_key_id": "pii", "version": "1", "new_version": "2"}
    assert document["keys"] == [{**change, "keys": 2, "files": 2}]
    assert document["files"][0]["keys"] == [{**change, "keys": 1}]
    assert document["complete"] and document["counts"] == {"rotated": 2}
    # Both files have one KEK under pii: it is re-wrapped once.
    assert document["kms_calls"]["rewrap"] == 1
    assert "2 files: 2 rotated" in done.stderr
    case.keystore.set_enabled("pii", False, 1)
    case.read()
    done = run("rotate", case.data, "--config", case.config)
    assert done.exit_code == 0
    assert "2 files: 2 already current" in done.stdout


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_moves_to_another_master_key(run, keystore_case, key_material: str) -> None:
    case = keystore_case(key_material=key_material, also_trusted=["times"])
    arguments = ["rotate", case.data, "--config", case.config]
    done = run(*arguments, "--from", "pii", "--to", "times", "--from", "footer", "--to", "times", "--json")
    assert done.exit_code == 0
    found = {(key["master_key_id"], key["new_master_key_id"]) for key in json.loads(done.stdout)["keys"]}
    assert found == {("pii", "times"), ("footer", "times")}
    for name in ("pii", "footer"):
        case.keystore.set_enabled(name, False)
    case.read()


def test_a_single_file(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.rotate_key("footer")
    assert run("rotate", case.files[0], "--config", case.config).exit_code == 0
    case.keystore.set_enabled("footer", False, 1)
    with Keytools.from_yaml(case.config) as keytools:
        assert keytools.read_table(case.files[0]).equals(case.table)


def test_a_dry_run_changes_nothing(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    before = case.digest()
    done = run("rotate", case.data, "--config", case.config, "--dry-run", "--json")
    assert done.exit_code == 0
    assert case.digest() == before
    document = json.loads(done.stdout)
    assert document["counts"] == {"would rotate": 2}
    assert document["expected_kms_calls"]["rewrap"] == 1
    calls = "to rewrap 1, unwrap 2, describe 2 keys."
    assert f"Nothing was changed. The rotation would ask the KMS {calls}" in done.stderr
    done = run("rotate", case.data, "--config", case.config)
    assert f"The KMS was asked {calls}" in done.stdout


def test_selection(run, keystore_case) -> None:
    case = keystore_case()
    for name in ("pii", "footer"):
        case.keystore.rotate_key(name)
    arguments = ["rotate", case.data, "--config", case.config, "--json"]
    document = json.loads(run(*arguments, "--only-master-key", "times").stdout)
    assert document["counts"] == {"nothing to rotate": 2}
    document = json.loads(run(*arguments, "--older-than", "1").stdout)
    assert document["counts"] == {"already current": 2}
    document = json.loads(run(*arguments, "--only-master-key", "pii", "--older-than", "2").stdout)
    assert [key["master_key_id"] for key in document["keys"]] == ["pii"]
    document = json.loads(run(*arguments, "--new-keks").stdout)
    assert [(key["master_key_id"], key["version"]) for key in document["keys"]] == [("footer", "1"), ("pii", "2")]
    case.read()


def test_what_the_configuration_says(run, keystore_case) -> None:
    case = keystore_case("rotation: {moves: {pii: times}}\n")
    case.keystore.rotate_key("footer")
    arguments = ["rotate", case.data, "--config", case.config, "--json"]
    document = json.loads(run(*arguments).stdout)
    assert [(key["master_key_id"], key["new_master_key_id"]) for key in document["keys"]] == [("pii", "times")]
    # Options take precedence.
    document = json.loads(run(*arguments, "--from", "footer", "--to", "times").stdout)
    assert [key["master_key_id"] for key in document["keys"]] == ["footer"]
    assert case.names() == ["a.parquet", "b.parquet"]


def test_a_run_that_was_cut_off_goes_on(run, keystore_case, monkeypatch) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    original = rotate.replace_tail

    def replace_tail(location, *arguments, **options):
        if location.name == "b.parquet":
            raise KeyboardInterrupt
        return original(location, *arguments, **options)

    arguments = ["rotate", case.data, "--config", case.config, "--json"]
    monkeypatch.setattr(rotate, "replace_tail", replace_tail)
    done = run(*arguments)
    assert done.exit_code == 130
    assert "Before this: 1 file: 1 rotated. Repeat the command." in done.stderr
    document = json.loads(done.stdout)
    assert [file["path"] for file in document["files"]] == [str(case.files[0])]
    assert document["complete"] is False
    monkeypatch.undo()
    document = json.loads(run(*arguments).stdout)
    # The file itself shows that it is finished: its version is current, and is proven.
    assert document["counts"] == {"already current": 1, "rotated": 1}
    case.keystore.set_enabled("pii", False, 1)
    case.read()


def test_others_in_between_are_reported_and_not_harmed(run, keystore_case, table: pa.Table) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    pq.write_table(table, case.data / "plain.parquet")
    (case.data / "broken.parquet").write_bytes(b"PAR1, and no more")
    before = case.digest()
    done = run("rotate", case.data, "--config", case.config, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["counts"] == {"rotated": 2, "nothing to rotate": 1, "failed": 1}
    (failed,) = [file for file in document["files"] if file["error"]]
    assert failed["path"].endswith("broken.parquet") and failed["error"] == "ParquetFormatError"
    assert "1 nothing to rotate, 1 failed (1 not encrypted)" in done.stderr
    assert "Failed: " in done.stderr and "broken.parquet" in done.stderr
    after = case.digest()
    rotated = set(map(str, case.files))
    assert len(rotated) == 2 and {path for path in before if after.get(path) != before[path]} == rotated
    # No new file is left in any folder.
    assert after.keys() == before.keys()
    case.read()


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--table", "people"]])
def test_a_move_that_the_table_would_refuse_is_warned_of(
    run, keystore_case, recwarn, arguments: list[str]
) -> None:
    case = keystore_case()
    done = run("rotate", case.data, "--config", case.config, "--from", "pii", "--to", "times", *arguments)
    assert done.exit_code == 0
    text = " ".join(done.stderr.split())
    assert "moved from the master key 'pii' to 'times'" in text
    assert "Add the move under `rotation: {moves: ...}`" in text
    with Keytools.from_yaml(case.config) as keytools:
        if "--dry-run" in arguments:
            assert keytools.read_table(case.files[0]).equals(case.table)
        else:
            with pytest.raises(TableMismatchError):
                keytools.read_table(case.files[0])


@pytest.mark.parametrize("settings", [{"also_trusted": ["times"]}, {"more": "rotation: {moves: {pii: times}}"}])
def test_no_warning_of_a_move_that_the_configuration_knows(
    run, keystore_case, settings: dict[str, object]
) -> None:
    case = keystore_case(**settings)
    done = run("rotate", case.data, "--config", case.config, "--from", "pii", "--to", "times")
    assert done.exit_code == 0 and "cannot be read" not in " ".join(done.stderr.split())
    case.read()


def test_a_kms_that_refuses_is_3(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    case.keystore.set_enabled("pii", False, 1)
    before = case.digest()
    done = run("rotate", case.data, "--config", case.config, "--json")
    assert done.exit_code == 3
    assert {file["error"] for file in json.loads(done.stdout)["files"]} == {"MasterKeyDisabledError"}
    assert case.digest() == before


def test_a_target_that_is_disabled_is_3_before_any_file_is_touched(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.set_enabled("times", False)
    before = case.digest()
    done = run("rotate", case.data, "--config", case.config, "--from", "pii", "--to", "times", "--json")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert case.digest() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--from", "pii"], "each --from needs its --to"),
        (["--from", "pii", "--to", "times", "--from", "pii", "--to", "footer"], "'pii' comes twice"),
        (["--from", "pi", "--to", "times"], "Did you mean 'pii'?"),
        (["--from", "pii", "--to", "tmes"], "no such master key"),
        (["--from", "pii", "--to", "times", "--from", "times", "--to", "footer"], "is the target of a move"),
        (["--only-master-key", "pi"], "Did you mean 'pii'?"),
        (["--table", "peple"], "Did you mean 'people'?"),
    ],
)
def test_mistakes_change_nothing(run, keystore_case, arguments: list[str], text: str) -> None:
    case = keystore_case()
    before = case.digest()
    done = run("rotate", case.data, "--config", case.config, *arguments)
    assert done.exit_code in ((3,) if "such" in text else (2,))
    assert text in " ".join(done.stderr.split())
    assert case.digest() == before


@pytest.mark.parametrize(
    ("rotation", "text"),
    [
        ("{moves: {pi: times}}", "rotation.moves.pi: there is no key 'pi' in"),
        ("{moves: {pii: tmes}}", "Did you mean 'times'?"),
        ("{moves: {pii: times, times: footer}}", "is to be moved and is the target of a move"),
        ("{moves: {pii: pii}}", "both names are the same master key"),
        ("{moves: {pii: own}}", "'own' is a data key"),
        ("{move: {pii: times}}", "rotation.move"),
    ],
)
def test_mistakes_in_the_configuration_have_their_line(run, keystore_case, rotation: str, text: str) -> None:
    case = keystore_case()
    config = case.config.with_name("other.yaml")
    config.write_text(
        case.config.read_text() + f"data_keys: {{own: MDEyMzQ1Njc4OTAxMjM0NQ==}}\nrotation: {rotation}\n"
    )
    done = run("rotate", case.data, "--config", config)
    assert done.exit_code == 2
    assert f"{config}:6: " in done.stderr
    assert text in done.stderr


def test_a_folder_without_files(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case()
    (tmp_path / "empty").mkdir()
    done = run("rotate", tmp_path / "empty", "--config", case.config, "--json")
    assert done.exit_code == 1
    assert "the folder has no Parquet files" in done.stderr
    assert not list((tmp_path / "empty").iterdir())
    assert run("rotate", tmp_path / "nowhere", "--config", case.config).exit_code == 2


def test_master_keys_made_anew_in_each_process_are_refused(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case()
    config = tmp_path / "generated.yaml"
    config.write_text("version: 1\nkms: {type: in_memory, keys: [footer, pii]}\n")
    done = run("rotate", case.data, "--config", config)
    assert done.exit_code == 2
    assert "makes new random master keys in each process" in done.stderr


def test_progress_on_a_terminal(on_a_terminal, keystore_case) -> None:
    case = keystore_case()
    case.keystore.rotate_key("pii")
    shown, stdout = on_a_terminal("rotate", case.data, "--config", case.config)
    assert "━" in shown and "rotated" not in shown
    assert b"2 files: 2 rotated" in stdout and "━" not in stdout.decode()
