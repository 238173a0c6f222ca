import json
import warnings
from pathlib import Path

import jsonschema
import pytest
import yaml

from parquet_keytools.config.key_policy import check_key_names, resolve_columns
from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import (
    Configuration,
    ReadingSettings,
    TableSettings,
    configuration_json_schema,
)

FOLDER = Path(__file__).parents[3] / "configs"
FLIGHTS = [
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
]
CONFIGS = [FOLDER / "in_memory.yaml", FOLDER / "keystore.yaml"]


@pytest.fixture(scope="module")
def validator():
    return jsonschema.Draft202012Validator(configuration_json_schema())


def places(validator, document):
    return {".".join(map(str, error.absolute_path)) for error in validator.iter_errors(document)}


def test_it_is_a_valid_schema_in_json():
    schema = configuration_json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(schema)))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_the_configurations_that_are_shipped_are_valid(validator, file):
    assert places(validator, yaml.safe_load(file.read_text())) == set()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_they_load_and_fit_the_flights(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = load_configuration(file, environment={"PARQUET_KEYTOOLS_PASSPHRASE": "a passphrase"})
    check_key_names(made, frozenset({"footer", "pii", "times"}))
    keys = resolve_columns(made, "flights", [(name,) for name in FLIGHTS])
    named = {name for (name,), key in keys.items() if key.key_name == "times"}
    assert keys[("tailnum",)].key_name == "pii"
    assert {"dep_time", "arr_time", "time_hour"} <= named
    assert keys[("carrier",)].kind == "plaintext"


def test_no_configuration_that_is_shipped_holds_a_secret():
    for file in CONFIGS:
        made = load_configuration(file, environment={"PARQUET_KEYTOOLS_PASSPHRASE": "a passphrase"})
        assert made.__reduce__()[1][0].redacted_paths == []


def document(**changes):
    made = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer"]},
        "tables": {"t": {"footer_key": "footer", "column_keys": {"pii": ["a"]}}},
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"kms": None}, set()),
        ({"kms": {"type": "keystore", "path": "a", "passphrase": "${P}"}}, set()),
        ({"kms": {"type": "acme", "anything": {"goes": 1}}}, set()),
        ({"kms": {"keys": ["a"]}}, {"kms"}),
        ({"kms": {"type": 1}}, {"kms.type"}),
        ({"kms": {"type": "in_memory"}}, {"kms"}),
        ({"kms": {"type": "keystore", "path": "a", "token": "b"}}, {"kms"}),
        ({"version": 2}, {"version"}),
        ({"unknown": 1}, {""}),
        ({"tables": {"t": {}}}, {"tables.t"}),
        ({"tables": {"t": {"footer_key": "a", "algorithm": "AES"}}}, {"tables.t.algorithm"}),
        ({"tables": {"t": {"footer_key": 1}}}, {"tables.t.footer_key"}),
        ({"tables": {"t": {"footer_key": "a", "column_keys": {"k": []}}}}, {"tables.t.column_keys.k"}),
        ({"tables": {"t": {"footer_key": "a", "kek_length_bits": 512}}}, {"tables.t.kek_length_bits"}),
        ({"reading": {"cache_lifetime_seconds": -1}}, {"reading.cache_lifetime_seconds"}),
        ({"data_keys": {"kf": 1}}, {"data_keys.kf"}),
    ],
)
def test_it_finds_the_mistakes_that_a_schema_can_find(validator, changes, expected):
    assert places(validator, document(**changes)) == expected


def test_every_field_is_described():
    schema = configuration_json_schema()
    models = {"TableSettings": TableSettings, "ReadingSettings": ReadingSettings}
    for name, model in models.items():
        assert set(schema["$defs"][name]["properties"]) == set(model.model_fields)
        assert all(field.description for field in model.model_fields.values())
    assert all(field.description for field in Configuration.model_fields.values())
    assert set(schema["properties"]) == set(Configuration.model_fields)
