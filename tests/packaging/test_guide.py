"""docs/guide.md has every field of a configuration, with its default."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools.config.json_schema import configuration_json_schema

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)
SECTIONS = {
    "Configuration": "A configuration",
    "InMemorySettings": "kms: in_memory",
    "KeystoreSettings": "kms: keystore",
    "TableSettings": "tables",
    "ReadingSettings": "reading",
    "KeysWithoutMetadata": "keys_without_metadata",
}
"""Settings class -> heading."""


def settings_classes() -> dict[str, dict[str, Any]]:
    schema = configuration_json_schema()
    return {"Configuration": schema} | schema["$defs"]


def default_text(schema: dict[str, Any], name: str) -> str:
    field = schema["properties"][name]
    if name in schema["required"]:
        return "required"
    default = field.get("default")
    if default is None:
        return "none"
    if isinstance(default, dict):
        return "{}"
    return default if isinstance(default, str) else json.dumps(default)


def test_every_settings_class_has_its_section() -> None:
    assert settings_classes().keys() == SECTIONS.keys()


@pytest.mark.parametrize("class_name", SECTIONS)
def test_every_field_is_there_with_its_default(class_name: str) -> None:
    schema = settings_classes()[class_name]
    (section,) = re.findall(rf"^##+ {re.escape(SECTIONS[class_name])}$(.*?)(?=^##|\Z)", GUIDE, re.M | re.S)
    expected = {name: default_text({"required": [], **schema}, name) for name in schema["properties"]}
    assert dict(ROW.findall(section)) == expected
