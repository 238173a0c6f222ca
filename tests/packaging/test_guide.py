"""docs/guide.md has every field of a configuration, with its default."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython

from parquet_keytools.config.settings import configuration_json_schema

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.MULTILINE)
SECTIONS = {
    "Configuration": "A configuration",
    "InMemorySettings": "kms: in_memory",
    "KeystoreSettings": "kms: keystore",
    "AwsSettings": "kms: aws",
    "AssumeRoleSettings": "assume_role",
    "GcpSettings": "kms: gcp",
    "AzureSettings": "kms: azure",
    "VaultSettings": "kms: vault",
    "Pkcs11Settings": "kms: pkcs11",
    "AppRoleSettings": "approle",
    "KubernetesSettings": "kubernetes",
    "JwtSettings": "jwt",
    "TableSettings": "tables",
    "ClassSettings": "Classes and labels",
    "KeyValueSettings": "key_values",
    "LabelSource": "labels_from",
    "FieldMetadata": "arrow",
    "IcebergLabels": "iceberg",
    "ReadingSettings": "reading",
    "HashKeySettings": "hash_keys",
    "RotationSettings": "rotation",
    "KeysWithoutMetadata": "keys_without_metadata",
    "NamedMasterKey": "Several KMSs",
}
"""Settings class -> heading."""

COMMON = {"kms: every kind": "audit_log", "kms: across a network": "call_timeout_seconds"}
"""Heading that several KMSs share -> a field by which a settings class shows that it belongs there, too."""


@cache
def settings_classes() -> dict[str, dict[str, Any]]:
    schema = configuration_json_schema()
    classes = {name: definition for name, definition in schema["$defs"].items() if name != "Kms"}
    return {"Configuration": schema} | classes


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


def rows_under(heading: str) -> dict[str, str]:
    (section,) = re.findall(rf"^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", GUIDE, re.M | re.S)
    return dict(ROW.findall(section))


@pytest.mark.parametrize("class_name", SECTIONS)
def test_every_field_is_there_with_its_default(class_name: str) -> None:
    schema = settings_classes()[class_name]
    expected = {name: default_text({"required": [], **schema}, name) for name in schema["properties"]}
    # A section's own text takes precedence over text for several sections.
    documented: dict[str, str] = {}
    for heading, field in COMMON.items():
        if field in expected:
            documented |= rows_under(heading)
    assert documented | rows_under(SECTIONS[class_name]) == expected


def test_python_blocks_run(tmp_path: Path, warm_python: WarmPython) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S):
        command = [warm_python.python, "-c", block]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
