"""A configuration on its way to the workers, in Spark's own configuration, where everyone may read it.

It travels without secrets: environment variables are expanded where the worker runs, and a file with secrets in
it stays where it is; then only its path travels.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from parquet_keytools.config.document import DocumentSource, yaml_path_text
from parquet_keytools.config.loader import load_configuration, restore_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.runtime.home_folder import expanded


def carried(configuration: Configuration) -> str:
    """Return a configuration as text without secrets.

    Raises:
        ConfigurationError: It holds secrets itself and has no file, or did not come from a document.
    """
    source = configuration.source
    if source is None:
        raise ConfigurationError(
            "a configuration that was put together in Python cannot be sent to Spark's executors.",
            hint="Make it with load_configuration, or with parse_configuration from a mapping.",
        )
    if source.redacted_paths:
        if source.path is None:
            places = ", ".join(map(yaml_path_text, source.redacted_paths))
            raise ConfigurationError(
                f"the configuration holds secrets itself, which must not be sent to executors: {places}.",
                hint="Put each into an environment variable and write ${NAME} in its place, or load the "
                "configuration from a YAML file that every node can read.",
            )
        return carried_file(str(source.path))
    return _text(
        {
            "file": source.file,
            "path": None if source.path is None else str(source.path),
            "folder": str(source.folder),
            "lines": [[list(path), line] for path, line in sorted(source.lines.items(), key=str)],
            "document": source.document,
        }
    )


def carried_file(path: str) -> str:
    """Return what makes a worker load a file: a path, or the name of one of Spark's files (`spark.files`)."""
    return _text({"load": path})


def configuration_identity(configuration: Configuration) -> str:
    """Return what is the same for two configurations that say the same, wherever their files are. No secret."""
    document = None if configuration.source is None else configuration.source.document
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]


def received_configuration(text: str, files_folder: Path) -> Configuration:
    """Make the configuration again, where it arrived.

    Args:
        text: What `carried` or `carried_file` returned.
        files_folder: Where Spark puts its files; relative paths start there.

    Raises:
        ConfigurationError: An environment variable is not set here, or a file is missing or has mistakes.
    """
    parts = json.loads(text)
    if "load" in parts:
        return load_configuration(files_folder / expanded(parts["load"]))
    return restore_configuration(
        DocumentSource(
            parts["file"],
            None if parts["path"] is None else Path(parts["path"]),
            Path(parts["folder"]),
            {tuple(path): line for path, line in parts["lines"]},
            parts["document"],
        )
    )


def kms_for_spark(configuration: Configuration) -> KmsSettings:
    """Return the settings of the KMS that Spark's own reader and writer need.

    Raises:
        ConfigurationError: There is none.
    """
    if configuration.kms is None:
        raise ConfigurationError(
            "the configuration has no kms, and Spark does not support data keys.",
            hint="Read and write with Keytools, or with parquet-keytools spark.",
        )
    return configuration.kms


def refuse_generated_keys(kms: KmsClient | None) -> None:
    """Refuse a KMS client that another process cannot make again.

    Raises:
        ConfigurationError: It generated its master keys itself.
    """
    if getattr(kms, "has_generated_keys", False):
        raise ConfigurationError(
            "the in_memory KMS generates master keys, and every executor would have different ones.",
            hint="Write the keys into the configuration, or use a keystore.",
        )


def _text(parts: dict[str, Any]) -> str:
    return json.dumps(parts, sort_keys=True)
