"""The protocol `keytools` of fsspec: URLs such as `keytools::s3://bucket/key` open a view of what follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.keytools import Keytools

CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG"
"""Names the configuration where `storage_options` does not."""

_WILDCARDS = frozenset("*?")
"""Readers that look for files in a file or folder `fo` would say of a pattern there only that nothing is found."""


class KeytoolsUrls(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """What fsspec makes file systems of the protocol with: it is called, and returns a `KeytoolsFileSystem`.

    fsspec keeps the file system for further URLs with the same options.
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
            config: `storage_options["config"]`: path of the configuration, or a mapping with its content. By
                default the environment says which, as for the command line.
            table: `storage_options["table"]`: the table of the files; None where the configuration has only one.
            fo: What follows `keytools::` in a chain of URLs, without its protocol: a file or a folder.
            target_protocol: The protocol of that.
            target_options: Its options.
            options: Those that fsspec itself knows; others are refused.

        Raises:
            ConfigurationError: There is no configuration, or it has mistakes.
            FileNotFoundError: A pattern follows `keytools::`.
        """
        unknown = options.keys() - {"skip_instance_cache", "use_listings_cache", "asynchronous", "loop"}
        if unknown:
            raise ConfigurationError(
                f"storage_options has {', '.join(sorted(map(repr, unknown)))}, which keytools does not know.",
                hint="It knows `config` and `table`; options of what follows `keytools::` go under its protocol.",
            )
        config = os.environ.get(CONFIG_VARIABLE) if config is None else config
        if not config:
            raise ConfigurationError(
                "a URL of keytools needs a configuration.",
                hint=f"Give storage_options={{'config': 'keytools.yaml'}}, or set {CONFIG_VARIABLE}.",
            )
        keytools = Keytools.from_mapping(config) if isinstance(config, Mapping) else Keytools.from_yaml(config)
        if fo is None:
            return keytools.filesystem(table)
        below = fsspec.filesystem(target_protocol or "file", **(target_options or {}))
        if not _WILDCARDS.isdisjoint(fo) and not below.exists(fo):
            raise FileNotFoundError(
                f"there is no file or folder {fo}. A pattern stands before the folder that it begins at: "
                "'keytools://2013/*.parquet::s3://lake/flights'."
            )
        return keytools.view(fo, table_name=table, filesystem=below)
