"""Several KMSs in a configuration: names, mistakes in them, and secrets."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools import Keytools, load_configuration, parse_configuration
from parquet_keytools.config.settings import ConfigurationWarning
from parquet_keytools.errors import ConfigurationError

KEY = base64.b64encode(b"k" * 32).decode()
YAML = f"""
version: 1
kms:
  eu: {{type: in_memory, keys: {{footer: {KEY}, pii: {KEY}}}}}
  us: {{type: in_memory, keys: {{pii: {KEY}}}}}
master_keys:
  footer: {{kms: eu, id: footer}}
  pii: {{kms: us, id: pii}}
tables:
  t: {{footer_key: footer, column_keys: {{pii: [a]}}, unlisted_columns: plaintext}}
"""


def document() -> dict[str, Any]:
    keys = {"type": "in_memory", "keys": {"footer": KEY, "pii": KEY}}
    return {
        "version": 1,
        "kms": {"eu": keys, "us": copy.deepcopy(keys)},
        "master_keys": {"footer": {"kms": "eu", "id": "footer"}, "pii": {"kms": "us", "id": "pii"}},
        "tables": {"t": {"footer_key": "footer", "column_keys": {"pii": ["a"]}, "unlisted_columns": "plaintext"}},
    }


def test_an_identifier_begins_with_the_name_of_its_kms() -> None:
    configuration = parse_configuration(document())
    assert configuration.master_key_id("pii") == "us::pii"
    assert configuration.master_key_id("eu::pii") == "eu::pii"
    with pytest.raises(ConfigurationError, match="the KMS of the master key 'other' is not named"):
        configuration.master_key_id("other")
    with_default = document()
    with_default["kms"]["default"] = "eu"
    assert parse_configuration(with_default).master_key_id("other") == "eu::other"


def test_names_without_a_kms_are_looked_up_in_the_default_kms() -> None:
    made = document()
    del made["master_keys"]["footer"]
    with pytest.raises(ConfigurationError, match=r"tables\.t\.footer_key: the KMS of the master key 'footer'"):
        parse_configuration(made)
    made["kms"]["default"] = "eu"
    assert Keytools.from_mapping(made).kms is not None
    made["tables"]["t"]["footer_key"] = "foot"
    with pytest.raises(ConfigurationError, match="there is no key 'foot'"):
        Keytools.from_mapping(made)


def one_kms(made: dict[str, Any]) -> None:
    made["kms"] = made["kms"]["eu"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda made: made["master_keys"]["pii"].update(kms="su"),
            r"master_keys\.pii\.kms: there is no KMS named 'su'",
        ),
        (lambda made: made["master_keys"].update(pii="ue::pii"), r"master_keys\.pii: there is no KMS named 'ue'"),
        (
            lambda made: made["master_keys"].update(pii="pii"),
            r"master_keys\.pii: the KMS of .* there is no default",
        ),
        (lambda made: made["master_keys"]["pii"].pop("id"), r"master_keys\.pii\.id: this field is required"),
        (
            lambda made: made["master_keys"]["pii"].update(url="u"),
            r"master_keys\.pii\.url: this field is not known",
        ),
        (lambda made: made["master_keys"].update(pii=3), r"master_keys\.pii: this has to be a mapping"),
        (lambda made: made["kms"].update(default="su"), r"kms\.default: no KMS has this name"),
        (lambda made: made["kms"].update(DEFAULT=made["kms"]["eu"]), r"kms\.DEFAULT: the name of a KMS"),
        (lambda made: made["kms"].update({"e:u": made["kms"]["eu"]}), r"the name of a KMS has up to 64"),
        (
            lambda made: made["kms"]["eu"].update(instance_id="x"),
            r"kms\.eu\.instance_id: files name this KMS 'eu'",
        ),
        (lambda made: made["kms"]["eu"].pop("type"), r"kms\.eu\.type: the name of a KMS client is required"),
        (lambda made: made["kms"]["eu"].update(kyes=[]), r"kms\.eu\.kyes: this field is not known.*'keys'"),
        (
            lambda made: made["rotation"]["moves"].update(x="pii"),
            r"rotation\.moves\.x: the KMS of the master key 'x'",
        ),
        (lambda made: made["rotation"]["moves"].update({"us::pii": "pii"}), "both names are the same master key"),
        (one_kms, r"master_keys\.pii: there is one KMS"),
    ],
)
def test_mistakes(change: Callable[[dict[str, Any]], object], text: str) -> None:
    made = document() | {"rotation": {"moves": {}}}
    change(made)
    with pytest.raises(ConfigurationError, match=text):
        parse_configuration(made)


def test_a_mistake_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML.replace("pii: {kms: us", "pii: {kms: uss"))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"c\.yaml:8: master_keys\.pii\.kms"):
        load_configuration(path)


def test_secrets_of_each_kms_stay_here(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    path.chmod(0o600)
    keytools = Keytools.from_yaml(path)
    data = pickle.dumps(keytools)
    assert KEY.encode() not in data and KEY not in repr(keytools.configuration)
    source = keytools.configuration.source
    assert source is not None and KEY not in json.dumps(source.document)
    assert [path[:3] for path in source.redacted_paths] == [("kms", "eu", "keys")] * 2 + [("kms", "us", "keys")]
    restored = pickle.loads(data)
    assert restored.kms.master_key_ids() == {"eu::footer", "eu::pii", "us::pii"}
    assert restored.summary()["kms"] == "eu, us"


def test_a_secret_file_of_each_kms_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "token").chmod(0o644)
    kms = {"type": "vault", "url": "https://vault.example", "token_file": str(tmp_path / "token")}
    with pytest.warns(ConfigurationWarning):
        configuration = parse_configuration({"version": 1, "kms": {"a": kms}})
    assert "kms.a.token_file" in configuration.warnings[0]
