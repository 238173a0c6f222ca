import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, KeytoolsError


def keys_of(done) -> set[tuple[str, str | None, int, int, tuple[str, ...]]]:
    return {
        (key["key"], key["version"], key["files"], key["footers"], tuple(key["columns"]))
        for key in json.loads(done.stdout)["master_keys"]
    }


@pytest.mark.parametrize("key_material", ["internal", "external"])
@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_which_files_and_columns(run, keystore_case, key_material: str, plaintext_footer: bool) -> None:
    case = keystore_case(key_material=key_material, plaintext_footer=plaintext_footer)
    case.keystore.rotate_key("pii")
    assert run("rotate", case.files[0], "--config", case.config).exit_code == 0
    done = run("keys", case.data, "--config", case.config, "--json")
    assert done.exit_code == 0
    assert keys_of(done) == {
        ("footer", "1", 2, 2, ()),
        ("pii", "1", 1, 0, ("name",)),
        ("pii", "2", 1, 0, ("name",)),
    }
    document = json.loads(done.stdout)
    (file,) = [file for file in document["files"] if file["path"] == str(case.files[0])]
    assert {(key["column"], key["master_key_id"], key["version"]) for key in file["keys"]} == {
        (None, "footer", "1"),
        ("name", "pii", "2"),
    }
    assert document["counts"] == {
        "encrypted": 2,
        "not_encrypted": 0,
        "unknown_keys": 0,
        "unreadable": 0,
        "skipped": 0,
    }
    assert "2 encrypted files, 0 not encrypted; all keys are visible." in done.stderr


@pytest.mark.parametrize("key", ["pii", "footer", "times"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rotated", [True, False])
def test_the_answer_is_what_happens_when_a_version_is_disabled(
    run, keystore_case, key: str, version: int, rotated: bool
) -> None:
    case = keystore_case()
    for name in ("pii", "footer", "times"):
        case.keystore.rotate_key(name)
    if rotated:
        assert run("rotate", case.data, "--config", case.config).exit_code == 0
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", f"{key}@{version}", "--json")
    assert done.exit_code in (0, 1)
    case.keystore.set_enabled(key, False, version)
    try:
        case.read()
        reads = True
    except KeytoolsError:
        reads = False
    assert reads == (done.exit_code == 0)
    (answer,) = json.loads(done.stdout)["fail_if_uses"]
    assert answer["needed_by"] == (0 if reads else 2)
    assert answer["unknown"] == 0
    assert ("Nothing here needs" in done.stderr) == reads


def test_an_unknown_need_is_1(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.set_enabled("footer", False)
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", "times", "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["counts"]["unknown_keys"] == 2
    assert document["fail_if_uses"][0]["unknown"] == 2
    assert {file["error"] for file in document["files"]} == {"MasterKeyDisabledError"}
    assert "For 2 files it is unknown whether times is needed: assume that it is." in done.stderr
    assert done.stderr.count("Keys unknown: ") == 1 and "Keys unknown: 2 files: " in done.stderr
    every = run("keys", case.data, "--config", case.config, "--verbose")
    assert every.stdout.count("Keys unknown: ") == 2 and "2 files: " not in every.stdout
    # It reports what it can see; the KMS refused the rest.
    assert run("keys", case.data, "--config", case.config).exit_code == 3
    case.files[0].write_bytes(b"no Parquet file")
    counts = json.loads(run("keys", case.data, "--config", case.config, "--json").stdout)["counts"]
    assert (counts["unknown_keys"], counts["unreadable"]) == (1, 1), "an unreadable file is not counted twice"
    assert keys_of(done) == {("footer", "1", 2, 2, ())}


def test_a_file_whose_folder_gives_values_to_a_column_does_not_pass(run, keystore_case) -> None:
    case = keystore_case()
    folder = case.data / "Name=x"
    folder.mkdir()
    case.files[0].rename(folder / "a.parquet")
    done = run("keys", case.data, "--config", case.config, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["complete"] is False
    assert "'name'" in done.stderr and "Keys unknown" in done.stderr


def test_whether_damaged_files_need_a_key_is_unknown(run, keystore_case) -> None:
    case = keystore_case()
    case.files[0].write_bytes(b"PAR1, and no more")
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", "times")
    assert done.exit_code == 1
    assert "Keys unknown" in done.stdout and "a.parquet" in done.stdout


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, {("footer", None, 2, 2, ())}),
        ({"plaintext_footer": True}, {("footer", None, 2, 2, ()), ("pii", None, 2, 0, ("name",))}),
        ({"key_material": "external"}, {("footer", None, 2, 2, ()), ("pii", None, 2, 0, ())}),
    ],
)
def test_without_a_kms(run, keystore_case, settings, seen) -> None:
    case = keystore_case(**settings)
    done = run("keys", case.data, "--json")
    assert done.exit_code == 0
    assert keys_of(done) == seen
    assert run("keys", case.data, "--fail-if-uses", "footer").exit_code == 1
    assert run("keys", case.data, "--fail-if-uses", "pii").exit_code == 1
    # What files say about themselves proves nothing: it does not count as a no.
    done = run("keys", case.data, "--fail-if-uses", "times")
    assert done.exit_code == 1
    assert "is unknown" in done.stdout
    # Without a KMS, versions are unknown.
    assert run("keys", case.data, "--fail-if-uses", "pii@2").exit_code == 1


def test_names_of_the_configuration_and_identifiers_with_an_at(run, config: Path, tmp_path: Path) -> None:
    text = config.read_text().replace("times:", "'a@1':")
    config.write_text(text.replace("tables:", "master_keys: {alias: a@1}\ntables:").replace("pii: [", "alias: ["))
    with Keytools.from_yaml(config) as keytools:
        keytools.write_table(pa.table({"name": ["x"]}), tmp_path / "a.parquet")
    for key in ("alias", "a@1"):
        done = run("keys", tmp_path / "a.parquet", "--config", config, "--fail-if-uses", key)
        assert done.exit_code == 1
        assert f"{key} is still needed by 1 file," in done.stdout
    assert run("keys", tmp_path / "a.parquet", "--config", config, "--fail-if-uses", "pii").exit_code == 0


def test_data_keys_and_plaintext_files(run, tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(
        "version: 1\ndata_keys: {own: MDEyMzQ1Njc4OTAxMjM0NQ==}\n"
        "tables: {t: {footer_key: own, unlisted_columns: footer_key}}\n"
    )
    data = tmp_path / "data"
    data.mkdir()
    with Keytools.from_yaml(config) as keytools:
        keytools.write_table(pa.table({"a": [1]}), data / "a.parquet")
    pq.write_table(pa.table({"a": [1]}), data / "b.parquet")
    done = run("keys", data, "--config", config, "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [(key["kind"], key["key"]) for key in document["master_keys"]] == [("data key", "own")]
    assert document["counts"] | {"unreadable": 0, "skipped": 0} == document["counts"]
    assert (document["counts"]["encrypted"], document["counts"]["not_encrypted"]) == (1, 1)
    assert run("keys", data, "--config", config, "--fail-if-uses", "pii").exit_code == 0
    done = run("keys", data, "--config", config, "--fail-if-uses", "own")
    assert done.exit_code == 2
    assert "'own' is a data key, not a master key." in done.stderr


def test_mistakes(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case()
    # A misspelt name would never match.
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", "pi@1")
    assert done.exit_code == 2
    assert "the KMS has no master key 'pi'. Did you mean 'pii'?" in done.stderr
    # Nor would a version from a variable that is not set.
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", "pii@")
    assert done.exit_code == 2
    assert "'pii@' names no version." in done.stderr
    assert run("keys", case.data, "--config", case.config, "--fail-if-uses", "pii@v1").exit_code == 1
    for version in ("2", "0", "x", "1.0"):
        done = run("keys", case.data, "--config", case.config, "--fail-if-uses", f"pii@{version}")
        assert done.exit_code == 2
        assert f"the master key 'pii' has no version '{version}': its newest is 1." in done.stderr
    done = run("keys", tmp_path / "nowhere", "--config", case.config, "--json")
    assert done.exit_code == 2
    assert "there is no file or folder" in done.stderr
    assert done.stdout == ""
    assert run("keys", case.data, "--config", tmp_path / "none.yaml").exit_code == 2


def test_it_changes_nothing(run, keystore_case) -> None:
    case = keystore_case(key_material="external")
    before = case.digest()
    assert run("keys", case.data, "--config", case.config).exit_code == 0
    assert case.digest() == before


@pytest.mark.parametrize("plaintext_footer", [True, False])
@pytest.mark.parametrize(
    "name", ["_x.parquet", ".x", "_delta_log/1.checkpoint", "_temporary/0/part-0", "_metadata"]
)
def test_an_encrypted_file_that_readers_pass_over(run, keystore_case, name: str, plaintext_footer: bool) -> None:
    case = keystore_case(plaintext_footer=plaintext_footer)
    hidden = case.data / name
    hidden.parent.mkdir(parents=True, exist_ok=True)
    case.files[0].rename(hidden)
    ask = ("keys", case.data, "--config", case.config, "--fail-if-uses", "times", "--json")
    done = run(*ask)
    assert done.exit_code == 1 and "Nothing here needs times" not in done.stderr
    assert "all keys are visible" not in done.stderr and str(hidden) in done.stderr
    document = json.loads(done.stdout)
    assert document["complete"] is False and document["skipped"] == [str(hidden)]
    assert document["fail_if_uses"][0]["unknown"] == 1
    (file,) = [file for file in document["files"] if file["path"] == str(hidden)]
    assert file["error"] == "IncompleteDataSetError" and not file["all_keys_seen"]
    done = run(*ask, "--ignore-skipped")
    assert done.exit_code == 0 and "Nothing here needs times" in done.stderr and str(hidden) not in done.stdout
    # Its name can be given like any other.
    done = run("keys", hidden, "--config", case.config, "--fail-if-uses", "footer")
    assert done.exit_code == 1 and "footer is still needed by 1 file," in done.stdout


def test_what_is_passed_over_and_needs_no_key(run, keystore_case) -> None:
    case = keystore_case()
    (case.data / "_delta_log").mkdir()
    pq.write_table(pa.table({"a": [1]}), case.data / "_delta_log" / "1.checkpoint.parquet")
    encrypted = case.files[0].read_bytes()
    for name, content in {
        "_SUCCESS": b"",
        ".x.parquet.crc": b"crc\x00" + bytes(100),
        "_cut-off.parquet": encrypted[:-20],
    }.items():
        (case.data / name).write_bytes(content)
    (case.data / ".#lock").symlink_to("somebody@machine:1")
    done = run("keys", case.data, "--config", case.config, "--fail-if-uses", "times", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["skipped"] == []


def test_whether_a_truncated_file_is_encrypted_is_unknown(run, keystore_case) -> None:
    case = keystore_case()
    case.files[0].write_bytes(case.files[0].read_bytes()[:-20])
    document = json.loads(run("keys", case.data, "--config", case.config, "--json").stdout)
    assert {file["path"]: file["encrypted"] for file in document["files"]} == {
        str(case.files[0]): None,
        str(case.files[1]): True,
    }
    assert document["counts"]["unreadable"] == 1


def test_plaintext_columns_and_plaintext_files(run, keystore_case) -> None:
    case = keystore_case(unlisted_columns="plaintext")
    open_file = case.data / "year=2" / "open.parquet"
    pq.write_table(case.table, open_file)
    done = run("keys", case.data, "--config", case.config, "--json")
    document = json.loads(done.stdout)
    assert document["plaintext_columns"] == {"id": 2}
    assert {file["path"]: (file["encrypted"], file["plaintext_columns"]) for file in document["files"]} == {
        str(case.files[0]): (True, ["id"]),
        str(case.files[1]): (True, ["id"]),
        str(open_file): (False, ["id", "name"]),
    }
    assert "wrapped" not in done.stdout.replace("wrapping", "")
    text = run("keys", case.data, "--config", case.config).stdout
    assert "Plaintext columns of encrypted files: id" in text
    assert f"Not encrypted: {open_file}: the whole file is plaintext." in text


def test_an_encrypted_file_without_rows_has_no_plaintext_columns(run, keystore_case) -> None:
    case = keystore_case(unlisted_columns="footer_key")
    empty = case.data / "empty.parquet"
    with Keytools.from_yaml(case.config) as keytools:
        keytools.write_table(case.table.slice(0, 0), empty)
    document = json.loads(run("keys", case.data, "--config", case.config, "--json").stdout)
    assert document["plaintext_columns"] == {}
    assert [file["footer_key_columns"] for file in document["files"] if file["path"] != str(empty)] == [["id"]] * 2
