import copy
import json
import warnings

import pytest
from pydantic import ValidationError

from parquet_keytools.config.loader import parse_configuration
from parquet_keytools.config.settings import (
    Configuration,
    ConfigurationWarning,
    ReadingSettings,
    TableSettings,
)
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.secret_bytes import SecretBytes

KEY_TEXT = "MDEyMzQ1Njc4OTAxMjM0NQ=="
KMS = {"type": "in_memory", "keys": ["footer", "pii"]}


def configuration(**table):
    document = {"version": 1, "kms": KMS, "tables": {"flights": {"footer_key": "footer", **table}}}
    if "hash_key" in table:
        document["hash_keys"] = {table["hash_key"]: {"master_key": "pii", "wrapped_key": "x"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse_configuration(document)


def table(**fields):
    return configuration(**fields).tables["flights"]


def test_defaults():
    assert table(column_keys={"pii": ["tailnum"]}).model_dump() == {
        "footer_key": "footer",
        "column_keys": {"pii": ("tailnum",)},
        "hash_key": None,
        "shown_columns": (),
        "unlisted_columns": "error",
        "plaintext_columns": (),
        "labels_from": (),
        "unlabelled": None,
        "plaintext_footer": False,
        "plaintext_footer_key_values": "drop",
        "plaintext_footer_keys": (),
        "algorithm": "AES_GCM_V1",
        "key_values": {},
        "also_trusted": (),
        "data_key_length_bits": 128,
        "kek_length_bits": None,
        "double_wrapping": True,
        "key_material": "internal",
        "aad_prefix": None,
        "store_aad_prefix": True,
        "cache_lifetime_seconds": 600,
    }
    assert ReadingSettings().model_dump() == {
        "plaintext_files": "reject",
        "ctr_files": "allow",
        "reused_encryption_properties": "reject",
        "denied_columns": "error",
        "file_unique_lengths": "exact",
        "cache_lifetime_seconds": 600,
        "max_footer_bytes": 64 * 1024 * 1024,
        "keys_without_metadata": {"footer": None, "columns": {}},
    }


def test_everything_can_be_said():
    fields = {
        "column_keys": {"pii": ["tailnum", "passenger.*"]},
        "key_values": {},
        "also_trusted": ["pii_2024"],
        "hash_key": "pseudonyms",
        "shown_columns": ["passenger.seat"],
        "unlisted_columns": "error",
        "plaintext_columns": ["year"],
        "labels_from": [],
        "unlabelled": None,
        "plaintext_footer": True,
        "plaintext_footer_key_values": "refuse",
        "plaintext_footer_keys": ["owner"],
        "algorithm": "AES_GCM_CTR_V1",
        "data_key_length_bits": 256,
        "kek_length_bits": 192,
        "double_wrapping": True,
        "key_material": "external",
        "aad_prefix": "flights/{file_name}",
        "store_aad_prefix": False,
        "cache_lifetime_seconds": 0.5,
    }
    dumped = table(**fields).model_dump(mode="json")
    assert dumped == {"footer_key": "footer", **fields}


@pytest.mark.parametrize("length_bits", [128, 192, 256])
def test_keks_are_as_long_as_deks_unless_set(length_bits):
    assert table(data_key_length_bits=length_bits).effective_kek_length_bits == length_bits
    assert table(data_key_length_bits=length_bits, kek_length_bits=192).effective_kek_length_bits == 192


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("flights/{file_name}", "flights/a{b}.parquet"),
        ("{table_name}:{file_name}", "t:a{b}.parquet"),
        ("fixed", "fixed"),
        ("{{literal}} {table_name}", "{literal} t"),
    ],
)
def test_aad_prefix_is_rendered_for_a_file(template, rendered):
    settings = table(aad_prefix=template)
    assert settings.rendered_aad_prefix(table_name="t", file_name="a{b}.parquet") == rendered


def test_no_aad_prefix_renders_to_none():
    assert table().rendered_aad_prefix(table_name="t", file_name="f") is None


@pytest.mark.parametrize(
    "template",
    [
        "{file}",
        "{}",
        "{0}",
        "{file_name!r}",
        "{file_name:>10}",
        "{file_name.__class__}",
        "{file_name",
        "}",
        "{",
    ],
)
def test_aad_prefix_knows_two_placeholders_only(template):
    with pytest.raises(ConfigurationError, match=r"only placeholders are {file_name} and {table_name};") as caught:
        configuration(aad_prefix=template)
    assert caught.value.yaml_path == "tables.flights.aad_prefix"


def test_models_are_frozen_and_closed():
    whole = configuration()
    for model, name in (
        (whole, "kms"),
        (whole.reading, "denied_columns"),
        (whole.tables["flights"], "footer_key"),
    ):
        with pytest.raises(ValidationError):
            setattr(model, name, None)
    with pytest.raises(ValidationError):
        TableSettings(footer_key="a", unknown=1)  # type: ignore[call-arg]


def test_rules_hold_for_models_made_in_python_too():
    with pytest.raises(ValidationError, match="no aad_prefix that could be stored"):
        TableSettings(footer_key="a", store_aad_prefix=False)
    with pytest.raises(ValidationError, match="no kms that could hold master keys"):
        Configuration(version=1, master_keys={"a": "b"})


def test_data_keys_are_secret():
    made = parse_configuration({"version": 1, "data_keys": {"kf": KEY_TEXT}})
    assert made.data_keys == {"kf": SecretBytes(b"0123456789012345")}
    texts = [repr(made), str(made), made.model_dump_json(), json.dumps(made.model_dump(mode="json"))]
    assert not any(KEY_TEXT in text or "0123456789012345" in text for text in texts)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        (
            {"algorithm": "AES_GCM_CTR_V1", "column_keys": {"pii": ["a"]}},
            "tables.flights.algorithm: ",
            "not authent",
        ),
        ({}, "tables.flights: ", "no column can be written"),
        ({"unlisted_columns": "plaintext"}, "tables.flights: ", "only the footer is encrypted"),
        ({"plaintext_columns": ["a"], "plaintext_footer": True}, "tables.flights: ", "nothing is encrypted"),
    ],
)
def test_weak_settings_warn(fields, path, words):
    document = {"version": 1, "kms": KMS, "tables": {"flights": {"footer_key": "footer", **fields}}}
    with pytest.warns(ConfigurationWarning, match=words) as caught:
        made = parse_configuration(document)
    assert caught[0].filename == __file__
    (text,) = made.warnings
    assert text.startswith(path)
    assert words in text
    assert str(caught[0].message) == text


@pytest.mark.parametrize("fields", [{"column_keys": {"pii": ["a"]}}, {"unlisted_columns": "footer_key"}])
def test_strong_settings_do_not_warn(fields):
    assert configuration(**fields).warnings == ()


def test_the_only_table_needs_no_name():
    made = configuration()
    assert made.select_table() == ("flights", made.tables["flights"])
    assert made.select_table("flights") == ("flights", made.tables["flights"])


def test_a_wrong_table_name_gets_a_suggestion():
    with pytest.raises(ConfigurationError, match=r"no table 'flight'\. Did you mean 'flights'\?"):
        configuration().select_table("flight")


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_table_must_be_named_unless_there_is_one(names):
    tables = {name: {"footer_key": "footer", "unlisted_columns": "footer_key"} for name in names}
    made = parse_configuration({"version": 1, "kms": KMS, "tables": tables})
    with pytest.raises(ConfigurationError, match=f"{len(names)} tables") as caught:
        made.select_table()
    assert caught.value.yaml_path == "tables"


def test_folder_is_that_of_the_file(tmp_path, monkeypatch):
    text = "version: 1"
    assert parse_configuration(text, file=tmp_path / "a.yaml").folder == tmp_path
    monkeypatch.chdir(tmp_path)
    assert parse_configuration(text).folder == tmp_path
    assert Configuration(version=1).folder == tmp_path


def test_copies_share_the_secrets():
    made = parse_configuration({"version": 1, "data_keys": {"kf": KEY_TEXT}})
    assert copy.deepcopy(made) == made
    assert copy.copy(made) == made
