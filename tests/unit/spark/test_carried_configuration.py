from __future__ import annotations

import base64
from pathlib import Path

import pytest

from parquet_keytools import load_configuration, parse_configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.spark.session import (
    carried,
    carried_file,
    configuration_identity,
    received_configuration,
)

SECRET = "canary-of-the-passphrase"
YAML = """
version: 1
kms: {type: keystore, path: keys/keystore.json, passphrase: "${PASSPHRASE_OF_TEST}"}
tables:
  t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: plaintext}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASSPHRASE_OF_TEST", SECRET)
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    return path


def test_it_arrives_as_it_was_without_its_secrets(file: Path, tmp_path: Path) -> None:
    configuration = load_configuration(file)
    text = carried(configuration)
    assert "${PASSPHRASE_OF_TEST}" in text and SECRET not in text
    assert base64.b64encode(SECRET.encode()).decode() not in text
    arrived = received_configuration(text, tmp_path / "elsewhere")
    assert arrived == configuration
    assert arrived.folder == tmp_path, "the keystore's path starts there"


def test_variables_are_those_of_the_worker(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = carried(load_configuration(file))
    monkeypatch.delenv("PASSPHRASE_OF_TEST")
    with pytest.raises(ConfigurationError, match=r"c\.yaml:3: kms.passphrase: .*PASSPHRASE_OF_TEST is not set"):
        received_configuration(text, Path("/"))


def test_a_file_with_secrets_in_it_stays_where_it_is(file: Path) -> None:
    file.write_text(YAML.replace("${PASSPHRASE_OF_TEST}", SECRET))
    configuration = load_configuration(file)
    text = carried(configuration)
    assert SECRET not in text and str(file) in text
    assert received_configuration(text, Path("/")) == configuration


def test_secrets_without_a_file_cannot_travel() -> None:
    document = {"version": 1, "kms": {"type": "keystore", "path": "k.json", "passphrase": SECRET}, "tables": {}}
    with pytest.raises(ConfigurationError, match=r"kms\.passphrase") as caught:
        carried(parse_configuration(document))
    assert SECRET not in str(caught.value)


def test_what_was_put_together_in_python_cannot_travel(file: Path) -> None:
    configuration = load_configuration(file).model_copy(update={"tables": {}})
    with pytest.raises(ConfigurationError, match="built in Python"):
        carried(configuration)


def test_one_of_sparks_files(file: Path, tmp_path: Path) -> None:
    assert received_configuration(carried_file("c.yaml"), tmp_path) == load_configuration(file)
    assert received_configuration(carried_file(str(file)), Path("/")) == load_configuration(file)


def test_a_file_in_the_home_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable of Iceberg's client names it, and no shell has expanded it."""
    monkeypatch.setenv("HOME", str(file.parent))
    assert received_configuration(carried_file("~/c.yaml"), tmp_path / "elsewhere") == load_configuration(file)


def test_identity_is_of_what_it_says_and_not_of_where_it_is(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(YAML)
    changed = tmp_path / "changed.yaml"
    changed.write_text(YAML.replace("pii: [a]", "pii: [b]"))
    identities = [configuration_identity(load_configuration(path)) for path in (file, other, changed)]
    assert identities[0] == identities[1] != identities[2]
