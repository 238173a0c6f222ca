"""A JSON Schema of configurations, for editors."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsSettings
from parquet_keytools.kms.registry import client_class, known_names

_ABOUT = {
    "title": "parquet-keytools",
    "description": "Which column of which table is protected by which key. In texts, ${NAME} stands for an "
    "environment variable.",
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def configuration_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a whole configuration.

    By their `type` it knows the fields of all KMS clients that are installed; any other type may be a plug-in
    of another machine, whose fields it does not check. Rules over several fields are beyond it.
    """
    settings = _installed_settings()
    references, shared = models_json_schema(
        [(Configuration, "validation"), *((model, "validation") for model in settings.values())]
    )
    definitions: dict[str, Any] = shared["$defs"]
    schema = definitions.pop("Configuration")
    schema["properties"]["kms"] = _kms_schema(
        {name: references[model, "validation"] for name, model in settings.items()},
        description=schema["properties"]["kms"]["description"],
    )
    definitions.pop("KmsSettings", None)
    return {"$schema": DIALECT, **schema, **_ABOUT, "$defs": definitions}


def _installed_settings() -> dict[str, type[KmsSettings]]:
    settings = {}
    for name in known_names():
        try:
            settings[name] = client_class(name).Settings
        except ConfigurationError:
            # It is there but cannot be imported: then it is like a plug-in of another machine.
            continue
    return settings


def _kms_schema(variants: dict[str, Any], *, description: str) -> dict[str, Any]:
    """Return a schema that chooses by `type`; with if and then, editors name the one field that is wrong."""
    return {
        "description": description,
        "type": ["object", "null"],
        "properties": {
            "type": {
                "description": "Name of the KMS client.",
                "type": "string",
                "anyOf": [{"enum": sorted(variants)}, {}],
            }
        },
        "required": ["type"],
        "allOf": [
            {
                "if": {"type": "object", "properties": {"type": {"const": name}}, "required": ["type"]},
                "then": variant,
            }
            for name, variant in variants.items()
        ],
    }
