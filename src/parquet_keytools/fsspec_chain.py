"""The fsspec protocol `keytools`: a URL such as `keytools::s3://bucket/key` opens a view of the target URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.keytools import Keytools

CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG"
"""Environment variable with the path of the configuration, unless `storage_options` has it."""


class KeytoolsUrls(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The class that fsspec calls for the protocol; it returns a `KeytoolsFileSystem`.

    fsspec caches the file system for further URLs with the same options.
    """

    protocol = "keytools"
    root_marker = ""
    cachable = True

    def __new__(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        table: str | None = None,
        *,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Make a file system.

        Args:
            config: `storage_options["config"]`: path of the configuration, or a mapping with its content. The
                default is the environment variable `PARQUET_KEYTOOLS_CONFIG`, as for the command line.
            table: `storage_options["table"]`: the table of the files; None if the configuration has one table.
            fo: The file or folder after `keytools::` in a chain of URLs, without its protocol.
            target_protocol: The protocol of `fo`.
            target_options: The options of `target_protocol`.
            options: Options of fsspec itself; others are refused.

        Raises:
            ConfigurationError: The configuration is missing or has mistakes, or an option is not known.
        """
        unknown = options.keys() - {"skip_instance_cache", "use_listings_cache", "asynchronous", "loop"}
        if unknown:
            raise ConfigurationError(
                f"storage_options has {', '.join(sorted(map(repr, unknown)))}, which keytools does not know.",
                hint="It knows `config` and `table`; put options for the next URL under its protocol.",
            )
        config = os.environ.get(CONFIG_VARIABLE) if config is None else config
        if not config:
            raise ConfigurationError(
                "a keytools URL needs a configuration.",
                hint=f"Pass storage_options={{'config': 'keytools.yaml'}}, or set {CONFIG_VARIABLE}.",
            )
        keytools = Keytools.from_mapping(config) if isinstance(config, Mapping) else Keytools.from_yaml(config)
        if fo is None:
            return keytools.filesystem(table)
        below = fsspec.filesystem(target_protocol or "file", **(target_options or {}))
        return keytools.view(fo, table_name=table, filesystem=below)
