"""Where a configuration came from: for error texts, and for pickles without secrets."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pydantic

from parquet_keytools.config.environment import references_only
from parquet_keytools.config.mistakes import Mistake, YamlPath, configuration_error
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.secret_bytes import SecretBytes

_SECRET_TYPES = (SecretBytes, pydantic.Secret, pydantic.SecretStr, pydantic.SecretBytes)


class Redacted(enum.Enum):
    """What stands in place of a secret that was written into the document itself."""

    SECRET = "redacted"  # noqa: S105 - this is what is left of a secret


@dataclass(frozen=True)
class DocumentSource:
    """The document behind a configuration. Holds no secret, so that it may be pickled.

    Attributes:
        file: The YAML file as the caller named it, for error texts; None where there is none.
        path: The same, absolute.
        folder: Where relative paths in the document start; absolute.
        lines: Path in the document to line, counted from 1.
        document: The document with `${NAME}` as written and `Redacted.SECRET` for secrets.
    """

    file: str | None
    path: Path | None
    folder: Path
    lines: Mapping[YamlPath, int]
    document: Any = field(default=None, repr=False)

    def error(self, mistakes: Sequence[Mistake]) -> ConfigurationError:
        """Make the one error that reports all mistakes, with file and lines."""
        return configuration_error(mistakes, file=self.file, lines=self.lines)

    @property
    def redacted_paths(self) -> list[YamlPath]:
        """Where the document holds a secret itself."""
        return list(_redacted_paths(self.document, ()))


def _redacted_paths(value: Any, path: YamlPath) -> Sequence[YamlPath]:
    if value is Redacted.SECRET:
        return [path]
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in _redacted_paths(item, (*path, name))]
    if isinstance(value, list):
        return [found for place, item in enumerate(value) for found in _redacted_paths(item, (*path, place))]
    return []


def redacted(document: Mapping[str, Any], kms: pydantic.BaseModel | None) -> dict[str, Any]:
    """Return a document without its secrets: data keys, and every field of the KMS settings that holds one.

    Args:
        document: As written, environment variables not expanded.
        kms: The settings made from what stands under `kms`: their types tell which fields are secret.
    """
    safe = {name: _without_objects(value) for name, value in document.items()}
    if "data_keys" in document:
        safe["data_keys"] = _redact(document["data_keys"])
    if isinstance(document.get("kms"), dict) and kms is not None:
        safe["kms"] = {
            name: _redact(value) if _is_secret(kms, name) else _without_objects(value)
            for name, value in document["kms"].items()
        }
    return safe


def _is_secret(settings: pydantic.BaseModel, name: str) -> bool:
    """Return whether a field holds a secret. A name that is no field is an alias, and counts as one."""
    return name not in type(settings).model_fields or _holds_secret(getattr(settings, name))


def _holds_secret(value: Any) -> bool:
    if isinstance(value, _SECRET_TYPES):
        return True
    if isinstance(value, pydantic.BaseModel):
        return any(_holds_secret(item) for item in vars(value).values())
    if is_dataclass(value):
        return any(_holds_secret(getattr(value, entry.name)) for entry in fields(value))
    if isinstance(value, Mapping):
        return any(_holds_secret(item) for item in value.values())
    return isinstance(value, (list, tuple, set, frozenset)) and any(_holds_secret(item) for item in value)


def _redact(value: Any) -> Any:
    """Return a value with everything in it redacted that is not a name or an environment variable."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and references_only(value)):
        return value
    if isinstance(value, dict):
        return {name: _redact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return Redacted.SECRET


def _without_objects(value: Any) -> Any:
    """Return a value with everything redacted that YAML could not have said, such as a `SecretStr`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        safe = {name: _without_objects(item) for name, item in items}
        return safe if isinstance(value, dict) else list(safe.values())
    return Redacted.SECRET
