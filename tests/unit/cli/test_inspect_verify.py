import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.text import Text
from vector_kit.vector import SealedFile, as_metadata, data_key, key_material, recipe

from parquet_keytools import Keytools
from parquet_keytools.cli.conformance_report import render_inspection
from parquet_keytools.conformance.inspection import Inspection, inspect_source, open_local

PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]


def unstyle(text: str) -> str:
    """Return a text without terminal colours."""
    return Text.from_ansi(text).plain


@pytest.fixture
def encrypted(config: Path, plain: Path, tmp_path: Path) -> Path:
    path = tmp_path / "encrypted" / "e.parquet"
    path.parent.mkdir()
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(plain, path)
    return path


def inspect_file(path: Path) -> Inspection:
    with open_local(str(path)) as source:
        return inspect_source(source)


def flip_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def test_inspect_shows_a_tree_and_a_map(run, config: Path, encrypted: Path) -> None:
    without = run("inspect", encrypted)
    assert without.exit_code == 0
    assert without.stderr == ""
    assert "encrypted footer, AES_GCM_V1, not authenticated: no key" in without.stdout
    assert "master key 'footer', double wrapping" in without.stdout
    assert "name" not in without.stdout.replace(str(encrypted), "")
    opened = run("inspect", encrypted, "--config", config)
    assert "AES_GCM_V1, authentic" in opened.stdout
    assert "name: master key 'pii'" in opened.stdout
    assert "100 values" in opened.stdout
    assert "one character for" in opened.stdout


def test_inspect_says_why_a_footer_is_not_opened(run, config: Path, encrypted: Path, deny) -> None:
    deny("footer")
    assert (
        "key unavailable: in_memory: unwrap with master key 'footer'"
        in run("inspect", encrypted, "--config", config).stdout
    )
    document = json.loads(run("inspect", encrypted, "--config", config, "--json").stdout)
    assert "access denied" in document["footer_denied"]


def test_inspect_gives_json(run, config: Path, encrypted: Path) -> None:
    document = json.loads(run("inspect", encrypted, "--config", config, "--json").stdout)
    assert document["mode"] == "encrypted footer"
    assert [column["path"] for column in document["columns"]] == ["id", "name"]
    modules = [module for chunk in document["chunks"] for module in chunk["modules"]]
    assert {"data page", "data page header"} <= {module["module_type"] for module in modules}


@pytest.mark.parametrize("with_keys", [False, True])
def test_inspect_of_a_folder_says_what_takes_folders(run, config: Path, encrypted: Path, with_keys: bool) -> None:
    done = run("inspect", encrypted.parent, *(["--config", config] if with_keys else []))
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "is a folder, and `inspect` shows one file. `verify` checks all files of a folder, and `keys`" in said


def test_inspect_takes_any_file(run, plain: Path, tmp_path: Path) -> None:
    assert "not encrypted" in run("inspect", plain).stdout
    # The folder's name has a number that grows from run to run.
    assert "12" not in run("inspect", plain).stdout.replace(str(plain.parent), "")
    (tmp_path / "garbage").write_bytes(b"x" * 100)
    garbage = run("inspect", tmp_path / "garbage")
    assert garbage.exit_code == 1
    assert "nothing can be read" in garbage.stdout
    missing = run("inspect", tmp_path / "missing")
    assert missing.exit_code == 2
    assert "No such file" in missing.stderr


def test_what_stands_in_a_file_does_not_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2K\x07\r\nconforms"
    table = pa.table({evil: [1]}).replace_schema_metadata({evil: "value"})
    pq.write_table(table, tmp_path / "evil.parquet")
    shown = render_inspection(inspect_file(tmp_path / "evil.parquet"))
    assert "\\x1b[2K\\x07\\r\\nconforms" in shown
    assert "\x1b[2K" not in shown
    assert "\x07" not in shown
    assert "\r" not in shown


def test_long_texts_in_a_file_do_not_fill_the_terminal(tmp_path: Path) -> None:
    url, prefix = "https://" + "k" * 20_000, b"p" * 100_000
    material = as_metadata(key_material(1, data_key("kf"), is_footer_key=True, kmsInstanceURL=url))
    made = recipe(1, footer_key_metadata=material, aad_prefix=prefix, file_unique_length=50_000)
    path = tmp_path / "long.parquet"
    path.write_bytes(SealedFile(made).make())
    shown = render_inspection(inspect_file(path))
    assert "names the KMS 'https://kkk" in shown
    assert len(shown) < 10_000


def test_inspect_is_coloured_on_a_terminal(on_a_terminal, plain: Path) -> None:
    shown, _ = on_a_terminal("inspect", plain, stdout_too=True)
    assert "\x1b[31m" in shown


def test_inspect_without_keys_imports_no_pyarrow(encrypted: Path) -> None:
    program = f"""
import sys
from parquet_keytools.cli import app
try:
    app(["inspect", {str(encrypted)!r}])
except SystemExit:
    pass
heavy = [name for name in ("pyarrow", "rich", "yaml") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verify_a_good_file(run, config: Path, encrypted: Path) -> None:
    done = run("verify", encrypted, "--config", config)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("conforms, with weaknesses\n")
    without = run("verify", encrypted)
    assert without.exit_code == 0
    assert "nothing was authenticated" in without.stdout


def test_verify_says_no(run, config: Path, encrypted: Path, plain: Path) -> None:
    flip_a_page(encrypted)
    # Column `id` is plaintext and has no CRC; the damage is in bytes that the rules check, or in `name`.
    done = run("verify", plain)
    assert done.exit_code == 1
    assert "violation encrypted" in done.stdout
    data = bytearray(encrypted.read_bytes())
    data[-30] ^= 1
    encrypted.write_bytes(data)
    done = run("verify", encrypted, "--config", config, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["verdict"] == "does not conform"
    assert document["damage"]["file_is_lost"]
    broken = [rule["id"] for rule in document["rules"] if rule["outcome"] == "broken"]
    assert "footer-authentic" in broken


def test_verify_with_a_refused_key_is_no_pass(run, config: Path, encrypted: Path, deny) -> None:
    deny("pii")
    done = run("verify", encrypted, "--config", config)
    assert done.exit_code == 1
    assert "COULD NOT BE FULLY CHECKED" in done.stdout
    assert "'name'" in done.stdout


def test_verify_a_folder(run, config: Path, encrypted: Path, plain: Path) -> None:
    done = run("verify", encrypted.parent, "--config", config, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"] == "conforms, with weaknesses"
    (encrypted.parent / "plain.parquet").write_bytes(plain.read_bytes())
    done = run("verify", encrypted.parent, "--config", config)
    assert done.exit_code == 1
    assert "as a data set" in done.stdout
    assert run("verify", encrypted.parent, "--config", config, "--parts", 2).exit_code == 1


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("plain.parquet", None, "plaintext-among"),
        ("_tmp/part-0", None, "plaintext-skipped"),
        (".hidden/people", None, "plaintext-skipped"),
        ("people.csv", b"id,name\n1,Ada\n", "other-data"),
        ("_tmp/parents.csv", b"PARENT_ID,NAME\n1,Ada\n", "other-data"),
        ("_tmp/streams.csv", b"AGS1,NAME\n1,Ada\n", "other-data"),
        ("_tmp/people.JSON.gz", b"\x1f\x8b1", "other-data"),
        (".hidden/0", b"Obj\x01avro", "other-data"),
        ("_people.orc", b"ORC", "other-data"),
    ],
)
def test_plaintext_in_a_folder_fails_unless_it_is_accepted(
    run, config: Path, encrypted: Path, plain: Path, name: str, content: bytes | None, rule: str
) -> None:
    folder = encrypted.parent
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").write_text("About this folder.")
    assert run("verify", folder, "--config", config).exit_code == 0
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(plain.read_bytes() if content is None else content)
    for options in (("--config", config), ()):
        done = run("verify", folder, *options, "--json")
        document = json.loads(done.stdout)
        assert (done.exit_code, document["verdict"]) == (1, "does not conform")
        assert [rule["id"] for rule in document["rules"] if rule["outcome"] == "broken"] == [rule]
        done = run("verify", folder, *options, "--allow-plaintext", "other/*", "--allow-plaintext", name)
        assert done.exit_code == 0, done.stdout
        assert run("verify", folder, *options, "--allow-plaintext", "other/*").exit_code == 1


@pytest.fixture
def external(config: Path, plain: Path, tmp_path: Path) -> Path:
    """A file with external key material."""
    config.write_text(config.read_text() + "    key_material: external\n")
    path = tmp_path / "external" / "e.parquet"
    path.parent.mkdir()
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(plain, path)
    return path


def broken_rules(done) -> dict[str, list[str]]:
    rules = json.loads(done.stdout)["rules"]
    return {
        rule["id"]: [str(found) for found in rule["findings"]] for rule in rules if rule["outcome"] == "broken"
    }


def test_key_material_to_which_a_footer_refers_is_no_plaintext(run, config: Path, external: Path, deny) -> None:
    folder = external.parent
    assert {path.name for path in folder.iterdir()} == {"e.parquet", "_KEY_MATERIAL_FOR_e.parquet.json"}
    assert run("verify", folder, "--config", config).exit_code == 0
    assert run("verify", folder).exit_code == 0
    deny("footer")
    done = run("verify", folder, "--config", config, "--json")
    assert (done.exit_code, broken_rules(done)) == (1, {})  # incomplete


@pytest.mark.parametrize("of", ["e.parquet", "gone.parquet", "notes.txt", "_hidden.parquet"])
def test_rows_under_the_name_of_key_material_are_plaintext(run, config: Path, encrypted: Path, of: str) -> None:
    folder = encrypted.parent
    (folder / "notes.txt").write_text("About this folder.")
    (folder / "_hidden.parquet").write_bytes(b"PARE")
    name = f"_KEY_MATERIAL_FOR_{of}.json"
    (folder / name).write_text('{"id": 1, "name": "Ada"}\n{"id": 2, "name": "Grace"}\n')
    for options in (("--config", config), ()):
        done = run("verify", folder, *options, "--json")
        assert done.exit_code == 1
        assert list(broken_rules(done)) == ["other-data"]
        assert f"{name} is JSON that is not key material" in str(broken_rules(done))
        assert run("verify", folder, *options, "--allow-plaintext", name).exit_code == 0


def test_a_parquet_file_named_almost_as_key_material_is_plaintext(
    run, config: Path, external: Path, plain: Path
) -> None:
    (external.parent / "_KEY_MATERIAL_FOR_e.parquet").write_bytes(plain.read_bytes())
    done = run("verify", external.parent, "--config", config, "--json")
    assert list(broken_rules(done)) == ["plaintext-skipped"]


def test_key_material_must_be_that_of_its_file(run, config: Path, encrypted: Path, external: Path) -> None:
    name = f"_KEY_MATERIAL_FOR_{encrypted.name}.json"
    (encrypted.parent / name).write_bytes((external.parent / name).read_bytes())
    (external.parent / name).write_text('{"id": 1, "name": "Ada"}')
    for options in (("--config", config), ()):
        done = run("verify", encrypted.parent, *options, "--json")
        assert f"{name} is JSON that e.parquet does not refer to" in str(broken_rules(done)["other-data"])
        done = run("verify", external.parent, *options, "--json")
        assert f"{name} is JSON that is not key material" in str(broken_rules(done)["other-data"])


def test_an_encrypted_file_is_verified_where_plaintext_is_accepted(run, config: Path, encrypted: Path) -> None:
    data = bytearray(encrypted.read_bytes())
    data[-30] ^= 1
    encrypted.write_bytes(data)
    assert run("verify", encrypted.parent, "--config", config, "--allow-plaintext", "*").exit_code == 1
    assert run("verify", encrypted, "--config", config, "--allow-plaintext", "*").exit_code == 2


def test_weaknesses_are_part_of_the_verdict_and_fail_if_strict(
    run, config: Path, encrypted: Path, plain: Path
) -> None:
    # It has no AAD prefix, and its table requires none.
    keys_only = config.with_name("keys.yaml")
    keys_only.write_text(config.read_text().partition("tables:")[0])
    keys_only.chmod(0o600)
    for path in (encrypted, encrypted.parent):
        done = run("verify", path, "--config", config)
        assert (done.exit_code, done.stdout.splitlines()[-1].strip()) == (0, "conforms, with weaknesses")
        for used, status in ((config, 0), (keys_only, 1)):
            done = run("verify", path, "--config", used, "--strict", "--json")
            assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (status, "conforms, with weaknesses")
        assert run("verify", path, "--strict").exit_code == 1
    assert " hold, 1 broken" in run("verify", encrypted, "--config", config).stdout
    config.write_text(config.read_text() + "    plaintext_footer: true\n    algorithm: AES_GCM_CTR_V1\n")
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(plain, encrypted)
    assert run("verify", encrypted, "--config", config).exit_code == 0
    assert run("verify", encrypted, "--config", config, "--strict").exit_code == 1
    assert run("verify", encrypted.parent, "--config", config, "--strict").exit_code == 1


def test_without_weaknesses_a_strict_verification_succeeds(run, config: Path, plain: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + '    aad_prefix: "people/{file_name}"\n')
    run("encrypt", plain, tmp_path / "bound.parquet", "--config", config)
    done = run("verify", tmp_path / "bound.parquet", "--config", config, "--strict")
    assert (done.exit_code, done.stdout.splitlines()[-1].strip()) == (0, "conforms")


def test_a_plaintext_column_that_the_table_protects_is_named(run, config: Path, encrypted: Path) -> None:
    text = config.read_text()
    stricter = config.with_name("stricter.yaml")
    stricter.write_text(text.replace("unlisted_columns: plaintext", "plaintext_columns: [nothing]"))
    done = run("verify", encrypted, "--config", stricter)
    assert done.exit_code == 1 and "violation wanted-encryption: column 'id' is plaintext; " in done.stdout
    assert "does not say how to protect it" in done.stdout and "risk: Anyone reads them." in done.stdout
    assert "file of another table" not in done.stdout
    stricter.write_text(text.replace("pii: [", "pii: [id, "))
    done = run("verify", encrypted, "--config", stricter)
    assert "column 'id' is plaintext; table 'people' says the master key" in done.stdout
    assert "file of another table" not in done.stdout


def test_files_with_the_same_flaws_are_shown_once(run, config: Path, encrypted: Path, plain: Path) -> None:
    for number in range(6):
        (encrypted.parent / f"plain.{number}.parquet").write_bytes(plain.read_bytes())
    done = run("verify", encrypted.parent, "--config", config)
    assert done.exit_code == 1 and done.stdout.count("violation encrypted: ") == 1
    examples = ", ".join(str(encrypted.parent / f"plain.{number}.parquet") for number in (1, 2, 3))
    assert f"5 more files with the same broken or unchecked rules, such as {examples}\n" in done.stdout
    every = run("verify", encrypted.parent, "--config", config, "--verbose").stdout
    assert every.count("violation encrypted: ") == 6 and "more files" not in every


def test_verify_of_a_folder_tells_once_what_many_files_have(run, config: Path, encrypted: Path) -> None:
    for number in range(24):
        (encrypted.parent / f"copy {number:02}.parquet").write_bytes(encrypted.read_bytes())
    done = run("verify", encrypted.parent, "--config", config)
    assert done.exit_code == 1  # many copies of one part
    lines = done.stdout.splitlines()
    assert sum(line.endswith(": conforms, with weaknesses") for line in lines) == 3
    assert "22 more conform; --verbose lists all." in lines
    assert sum("weakness no-prefix in 25 of them" in line for line in lines) == 1
    done = run("verify", encrypted.parent, "--config", config, "--verbose")
    assert sum(line.endswith(": conforms, with weaknesses") for line in done.stdout.splitlines()) == 25
    done = run("verify", encrypted.parent)
    assert all("nothing was authenticated" in line for line in done.stdout.splitlines() if ": conforms" in line)


def test_verify_of_a_folder_shows_progress_on_a_terminal_only(
    run, on_a_terminal, config: Path, encrypted: Path
) -> None:
    shown, stdout = on_a_terminal("verify", encrypted.parent, "--config", config, "--json")
    assert "━" in shown and "1 files" in shown
    assert len(json.loads(stdout)["files"]) == 1
    assert "━" not in run("verify", encrypted.parent, "--config", config).output


def test_options_that_would_check_nothing_are_refused(run, encrypted: Path) -> None:
    for arguments in (["verify", encrypted, "--table", "t"], ["verify", encrypted, "--parts", "2"]):
        done = run(*arguments)
        assert done.exit_code == 2, done.stderr
    assert run("inspect", encrypted, "--table", "t").exit_code == 2


def test_a_folder_without_keys_is_not_said_to_be_authentic(run, encrypted: Path) -> None:
    assert "nothing was authenticated" in run("verify", encrypted.parent).stdout.splitlines()[-1]


def test_verify_what_is_not_there(run, config: Path, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "missing").exit_code == 2
    assert run("verify", config, "--config", config, "--table", "peeple").exit_code == 2


def test_the_name_of_what_is_salvaged_does_not_steer_the_terminal(run, config: Path, tmp_path: Path) -> None:
    table = pa.table({"id": range(100), "name": [f"name {number}" for number in range(100)]})
    pq.write_table(table, tmp_path / "plain.parquet", row_group_size=50)
    encrypted = tmp_path / "e.parquet"
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(tmp_path / "plain.parquet", encrypted)
        page = keytools.inspect_file(encrypted).chunks[1].modules[-1]
    data = bytearray(encrypted.read_bytes())
    data[page.offset + 20] ^= 1
    encrypted.write_bytes(data)
    done = run("decrypt", encrypted, tmp_path / "\x1b[2Krest.parquet", "--config", config, "--salvage")
    missing = next(line for line in done.stdout.splitlines() if line.startswith("Missing in"))
    assert missing.endswith("\\x1b[2Krest.parquet: row groups 0 of 2.")


def test_salvage(run, config: Path, tmp_path: Path) -> None:
    table = pa.table({"id": range(90), "name": [f"name {number}" for number in range(90)]})
    plain, encrypted, rest = (tmp_path / name for name in ("many.parquet", "e.parquet", "rest.parquet"))
    pq.write_table(table, plain, row_group_size=30, use_dictionary=False, compression="none")
    with Keytools.from_yaml(config) as keytools:
        keytools.encrypt_file(plain, encrypted)
        shown = keytools.inspect_file(encrypted)
    module = next(c for c in shown.chunks if (c.row_group_ordinal, c.column_ordinal) == (1, 1)).modules[-1]
    data = bytearray(encrypted.read_bytes())
    data[module.offset + 20] ^= 1
    encrypted.write_bytes(data)
    refused = run("decrypt", encrypted, rest, "--config", config)
    assert refused.exit_code == 1
    done = run("decrypt", encrypted, rest, "--config", config, "--salvage", "--json")
    assert done.exit_code == 1
    (file,) = json.loads(done.stdout)["files"]
    assert file["missing_row_groups"] == [1]
    assert "row group 1, column 'name': page 0" in done.stderr
    assert pq.read_table(rest).equals(pa.concat_tables([table.slice(0, 30), table.slice(60)]))
