"""Parquet columns protected by keys in a KMS: one YAML file says which column is under which master key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parquet_keytools.config.loader import load_configuration, parse_configuration
    from parquet_keytools.config.settings import Configuration
    from parquet_keytools.errors import KeytoolsError
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.kms.client import KmsClient
    from parquet_keytools.secret_bytes import SecretBytes

__version__ = "0.1.0"

_HOMES = {
    "Configuration": "parquet_keytools.config.settings",
    "Keytools": "parquet_keytools.keytools",
    "KeytoolsError": "parquet_keytools.errors",
    "KmsClient": "parquet_keytools.kms.client",
    "SecretBytes": "parquet_keytools.secret_bytes",
    "load_configuration": "parquet_keytools.config.loader",
    "parse_configuration": "parquet_keytools.config.loader",
}

__all__ = [
    "Configuration",
    "Keytools",
    "KeytoolsError",
    "KmsClient",
    "SecretBytes",
    "load_configuration",
    "parse_configuration",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if not TYPE_CHECKING:  # Type checkers would take any name for a public one.

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: importing the package itself stays cheap."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(home), name)
