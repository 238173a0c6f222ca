"""Each configuration in configs/ loads, and has the contents that its text describes."""

import warnings
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from parquet_keytools import Keytools, load_configuration
from parquet_keytools.cli import app
from parquet_keytools.config.settings import configuration_json_schema

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


class AnyVariable(dict[str, str]):
    """An environment in which every variable is set."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"value of {name}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_loads_without_a_warning(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configuration = load_configuration(path, environment=AnyVariable())
    assert configuration.tables
    assert configuration.kms is not None


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(configuration_json_schema())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_fits_the_json_schema(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_there_are_configs() -> None:
    assert {"in_memory", "keystore"} <= {path.stem for path in CONFIGS}


def test_in_memory_needs_nothing_else() -> None:
    with Keytools.from_yaml(ROOT / "configs" / "in_memory.yaml") as keytools:
        assert keytools.kms is not None
        assert set(keytools.kms.master_key_ids() or ()) == {"footer", "pii", "times"}


def test_the_committed_schema_is_what_the_command_prints() -> None:
    """If not: `.venv/bin/parquet-keytools check --schema > configs/schema.json`."""
    done = CliRunner().invoke(app, ["check", "--schema"])
    assert done.stdout == (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
