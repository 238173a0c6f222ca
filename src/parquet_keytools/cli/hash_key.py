"""`parquet-keytools hash-key`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from typing import Annotated

import typer

from parquet_keytools.cli.options import ConfigOption

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret in the configuration.")]
MasterKeyOption = Annotated[
    str | None,
    typer.Option(
        "--master-key",
        metavar="KEY",
        help="The master key that wraps the secret. Otherwise, for a secret that is there, the one that it has.",
    ),
]


def hash_key_command(name: NameArgument, config: ConfigOption, master_key: MasterKeyOption = None) -> None:
    """Make a secret for `denied_columns: hash`, or re-wrap one.

    Prints the lines for the configuration. A secret that the configuration has under this name is re-wrapped, and
    digests stay the same; otherwise it is a new one.
    """
    import json

    from parquet_keytools.cli.file_work import open_keytools
    from parquet_keytools.cli.output import answer, say

    with open_keytools(config) as keytools:
        is_known = name in keytools.configuration.hash_keys
        made = keytools.wrap_hash_key(name, master_key)
    say(
        "This is the same secret, re-wrapped: digests stay the same."
        if is_known
        else "This is a new secret. Keep it: without it, no digest can be made again."
    )
    # Texts of JSON are texts of YAML.
    lines = [
        "hash_keys:",
        f"  {json.dumps(name)}:",
        f"    master_key: {json.dumps(made.master_key)}",
        f"    wrapped_key: {json.dumps(made.wrapped_key)}",
    ]
    answer("\n".join(lines))
