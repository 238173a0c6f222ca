import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parquet_keytools.cli import keystore as cli
from parquet_keytools.errors import ConfigurationError, KmsConfigurationError, MasterKeyNotFoundError
from parquet_keytools.kms import keystore_file
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.secret_bytes import SecretBytes

PASSPHRASE = "correct horse battery"
VARIABLE = "PARQUET_KEYTOOLS_PASSPHRASE"
NEW_VARIABLE = "PARQUET_KEYTOOLS_NEW_PASSPHRASE"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    create = Keystore.create.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Keystore, "create", classmethod(lambda *args, **named: create(*args, **named, scrypt_n=2**14))
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keystore.json"


def run(*arguments: object, env: dict[str, str | None] | None = None, input: str | None = None):
    environment = {VARIABLE: PASSPHRASE, NEW_VARIABLE: None} | (env or {})
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=environment, input=input)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert PASSPHRASE not in done.output
    return done


def rows(path: Path) -> list[dict[str, object]]:
    done = run("list", "--path", path, "--json")
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_life_of_a_keystore(path: Path) -> None:
    done = run("create", "--path", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Created the keystore" in done.stdout
    assert rows(path) == []
    assert run("create-key", "pii", "--path", path).stdout == "Created the master key 'pii'.\n"
    assert "Version 2" in run("rotate-key", "pii", "--path", path).stdout
    run("disable", "pii", "--key-version", 1, "--path", path)
    listed = rows(path)
    assert [(row["name"], row["version"], row["enabled"], row["current"]) for row in listed] == [
        ("pii", 1, False, False),
        ("pii", 2, True, True),
    ]
    assert str(listed[0]["created"]).endswith("Z")
    run("enable", "pii", "--key-version", 1, "--path", path)
    assert [row["enabled"] for row in rows(path)] == [True, True]
    run("disable", "pii", "--path", path)
    assert [row["enabled"] for row in rows(path)] == [False, False]
    run("enable", "pii", "--path", path)
    assert [row["enabled"] for row in rows(path)] == [True, True]


def test_create_key_creates_the_keystore(path: Path) -> None:
    done = run("create-key", "footer", "--path", path)
    assert "Created the keystore" in done.stdout and "'footer'" in done.stdout
    assert [row["name"] for row in rows(path)] == ["footer"]


def test_the_table_is_for_people(path: Path) -> None:
    run("create-key", "[red]footer[/red]", "--path", path)
    run("rotate-key", "[red]footer[/red]", "--path", path)
    done = run("list", "--path", path, env={"COLUMNS": "200"})
    assert done.stderr == ""
    assert "[red]footer[/red]" in done.stdout
    assert "enabled, wraps" in done.stdout


def test_errors_are_those_of_the_package(path: Path) -> None:
    with pytest.raises(KmsConfigurationError, match="there is no file"):
        run("rotate-key", "pii", "--path", path)
    run("create-key", "pii", "--path", path)
    with pytest.raises(KmsConfigurationError, match="exists already"):
        run("create", "--path", path)
    with pytest.raises(KmsConfigurationError, match="already"):
        run("create-key", "pii", "--path", path)
    with pytest.raises(MasterKeyNotFoundError):
        run("disable", "none", "--path", path)
    with pytest.raises(MasterKeyNotFoundError, match="no version 2"):
        run("disable", "pii", "--path", path, "--key-version", 2)
    with pytest.raises(KmsConfigurationError, match="passphrase does not belong"):
        run("list", "--path", path, env={VARIABLE: "another one"})
    path.chmod(0o644)
    with pytest.raises(KmsConfigurationError, match="chmod 600"):
        run("list", "--path", path)


@pytest.mark.parametrize("arguments", [["rotate-key"], ["create"], ["disable", "x", "--key-version", "0"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_no_option_takes_the_passphrase_itself(path: Path) -> None:
    done = run("create", "--path", path, "--passphrase", "x")
    assert done.exit_code == 2
    assert not path.exists()


def test_a_passphrase_file_comes_before_the_environment(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "passphrase"
    file.touch(0o600)
    file.write_text("another passphrase\n")
    run("create-key", "pii", "--path", path, "--passphrase-file", file)
    assert Keystore(path, lambda: SecretBytes(b"another passphrase")).open()
    with pytest.raises(KmsConfigurationError, match="passphrase does not belong"):
        run("list", "--path", path)
    file.chmod(0o644)
    with pytest.raises(KmsConfigurationError, match="others than its owner"):
        run("list", "--path", path, "--passphrase-file", file)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_passphrase_and_a_terminal(path: Path, value: str | None) -> None:
    with pytest.raises(ConfigurationError, match="no terminal") as caught:
        run("create", "--path", path, env={VARIABLE: value})
    assert "--passphrase-file" in caught.value.hint and VARIABLE in caught.value.hint
    assert not path.exists()


def test_a_terminal_is_asked_and_shows_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class FakeSys:
        stdin = Terminal()

    monkeypatch.setattr(cli, "sys", FakeSys)
    nothing: dict[str, str | None] = {VARIABLE: None}
    done = run("create-key", "pii", "--path", path, env=nothing, input=f"{PASSPHRASE}\n{PASSPHRASE}\n")
    assert done.exit_code == 0
    assert "assphrase" not in done.stdout, "the prompt is for people"
    assert Keystore(path, lambda: SecretBytes(PASSPHRASE.encode())).open()
    # An existing keystore needs no confirmation.
    assert run("rotate-key", "pii", "--path", path, env=nothing, input=f"{PASSPHRASE}\n").exit_code == 0
    for command in (["create"], ["create-key", "pii"]):
        two = path.with_name("two")
        assert run(*command, "--path", two, env=nothing, input=f"{PASSPHRASE}\nmistyped\n").exit_code != 0
        assert not two.exists()


def test_change_passphrase(path: Path, tmp_path: Path) -> None:
    run("create-key", "pii", "--path", path)
    run("change-passphrase", "--path", path, env={NEW_VARIABLE: "a second passphrase"})
    with pytest.raises(KmsConfigurationError, match="passphrase does not belong"):
        rows(path)
    file = tmp_path / "new"
    file.touch(0o600)
    file.write_text("a third passphrase")
    run(
        "change-passphrase",
        "--path",
        path,
        "--new-passphrase-file",
        file,
        env={VARIABLE: "a second passphrase"},
    )
    assert Keystore(path, lambda: SecretBytes(b"a third passphrase")).open().master_keys
    with pytest.raises(ConfigurationError, match="no terminal") as caught:
        run("change-passphrase", "--path", path, env={VARIABLE: "a third passphrase"})
    assert NEW_VARIABLE in caught.value.hint


def test_a_wrong_passphrase_is_found_before_a_new_one_is_asked_for(path: Path) -> None:
    run("create-key", "pii", "--path", path)
    with pytest.raises(KmsConfigurationError, match="passphrase does not belong"):
        run("change-passphrase", "--path", path, env={VARIABLE: "wrong one"})


def test_help_imports_nothing_slow() -> None:
    program = """
import sys
from typer.testing import CliRunner
from parquet_keytools.cli import keystore
done = CliRunner().invoke(keystore.app, ["--help"])
assert "create-key" in done.output and "change-passphrase" in done.output
slow = {"cryptography", "pydantic", "pyarrow", "yaml", "parquet_keytools.kms", "parquet_keytools.errors"}
print(sorted(slow & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_new_keystores_are_as_slow_to_guess_as_others() -> None:
    """Only the tests above make scrypt cheap."""
    assert keystore_file.DEFAULT_SCRYPT_N == 2**17


def test_the_keystore_of_a_configuration(tmp_path: Path) -> None:
    """Detects a keystore that is created in another place than the configuration's."""
    config = tmp_path / "tables.yaml"
    config.write_text(f"version: 1\nkms: {{type: keystore, path: keys.json, passphrase: '${{{VARIABLE}}}'}}\n")
    run("create-key", "pii", "--config", config)
    run("rotate-key", "pii", "--config", config)
    assert [row["version"] for row in rows(tmp_path / "keys.json")] == [1, 2]
    config.write_text("version: 1\nkms: {type: in_memory, keys: [pii]}\n")
    with pytest.raises(ConfigurationError, match="not a keystore"):
        run("list", "--config", config)


def test_path_and_config_together(path: Path, tmp_path: Path) -> None:
    assert run("list", "--path", path, "--config", tmp_path / "tables.yaml").exit_code == 2


def test_a_backup_is_a_checked_copy_that_replaces_nothing(path: Path, tmp_path: Path) -> None:
    run("create-key", "pii", "--path", path)
    run("rotate-key", "pii", "--path", path)
    copy = tmp_path / "backup.json"
    done = run("backup", copy, "--path", path)
    assert done.stdout == f"Copied {path} to {copy}: 1 master key, 2 versions. The passphrase is not in it.\n"
    assert copy.stat().st_mode & 0o777 == 0o600
    checked = json.loads(run("check", copy, "--json").stdout)
    assert [(row["name"], row["version"]) for row in checked] == [("pii", 1), ("pii", 2)]
    before = copy.read_bytes()
    with pytest.raises(KmsConfigurationError, match="exists already"):
        run("backup", copy, "--path", path)
    assert copy.read_bytes() == before
    path.unlink()
    path.write_bytes(copy.read_bytes())
    path.chmod(0o600)
    assert [row["version"] for row in rows(path)] == [1, 2]


def test_a_backup_with_the_passphrase_of_a_configuration(path: Path, tmp_path: Path) -> None:
    run("create-key", "pii", "--path", path)
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nkms: {{type: keystore, path: {path.name}, passphrase: {PASSPHRASE}}}\n")
    run("backup", tmp_path / "backup.json", "--config", config)
    done = run("check", tmp_path / "backup.json", "--config", config, env={VARIABLE: None})
    assert "pii" in done.stdout


@pytest.mark.parametrize("change", ["version", "key"])
def test_a_damaged_backup_fails_its_check(path: Path, change: str) -> None:
    run("create-key", "pii", "--path", path)
    document = json.loads(path.read_bytes())
    version = document["master_keys"]["pii"]["versions"][0]
    if change == "version":
        version["created"] = "2020-01-01T00:00:00Z"
    else:
        version["wrapped_master_key"] = "A" * 80
    path.write_text(json.dumps(document))
    done = run("check", path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "was altered, or is damaged" in done.stderr


def test_a_wrong_passphrase_fails_the_check_of_a_backup(path: Path) -> None:
    run("create-key", "pii", "--path", path)
    with pytest.raises(KmsConfigurationError, match="the passphrase does not belong to"):
        run("check", path, env={VARIABLE: "another passphrase"})


def test_a_missing_keystore_says_first_that_a_backup_is_needed(path: Path) -> None:
    with pytest.raises(KmsConfigurationError) as caught:
        run("list", "--path", path)
    assert caught.value.hint.startswith("Restore it from a backup: with new master keys, even of the same names,")
    assert caught.value.hint.endswith(f"keystore create-key NAME --path '{path}'")


def test_a_long_name_is_shortened_on_a_terminal_unless_wide(path: Path) -> None:
    arn = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    run("create-key", arn, "--path", path)
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}
    lines = re.sub(r"\x1b\[[0-9;]*m", "", run("list", "--path", path, env=terminal).stdout).splitlines()
    (row,) = [line for line in lines if "enabled" in line]
    assert len(row) <= 80
    assert "arn:aws" in row and row.split()[0].endswith("…56ef-1234567890ab")
    assert arn in run("list", "--path", path, "--wide", env=terminal).stdout
