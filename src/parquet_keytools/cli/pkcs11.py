"""`parquet-keytools pkcs11`: the master keys in a PKCS#11 token."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from parquet_keytools.cli.keystore import NameArgument, add_key_commands
from parquet_keytools.cli.options import JsonOption, WideOption, config_option, with_options
from parquet_keytools.cli.output import answer, print_json, print_table

if TYPE_CHECKING:
    from parquet_keytools.kms.pkcs11 import Pkcs11Kms

app = typer.Typer(name="pkcs11", help="Manage master keys in an HSM with PKCS#11.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Which token."""

    config: Annotated[Path, config_option("A configuration whose `kms:` names the token and its PIN.")]

    def keys(self) -> Pkcs11Kms:
        """Return the client of the token."""
        from parquet_keytools.config.loader import load_configuration
        from parquet_keytools.errors import ConfigurationError
        from parquet_keytools.kms.named import kmss_of
        from parquet_keytools.kms.registry import make_client

        configuration = load_configuration(self.config)
        tokens = [settings for settings in kmss_of(configuration.kms) if settings.type == "pkcs11"]
        if len(tokens) != 1:
            raise ConfigurationError(
                f"this configuration has {len(tokens) or 'no'} KMS of the type pkcs11.",
                file=str(self.config),
                hint="Name a configuration with one token.",
            )
        return cast("Pkcs11Kms", make_client(tokens[0], configuration.folder))


@app.command("create-key")
@with_options(TokenOptions)
def create_key(name: NameArgument, options: TokenOptions) -> None:
    """Create a master key: an AES key of 256 bits that never leaves the token."""
    with options.keys() as kms:
        kms.create_key(name)
    answer(f"Created the master key {name!r}.")


add_key_commands(app, TokenOptions)


@app.command("list")
@with_options(TokenOptions)
def list_keys(options: TokenOptions, as_json: JsonOption = False, wide: WideOption = False) -> None:
    """List the secret keys of the token that have a label, and whether they can be used."""
    with options.keys() as kms:
        keys = kms.list_versions()
        mechanism = kms.mechanism
    newest = {key.master_key_id: key.version for key in keys}
    rows: list[dict[str, Any]] = [
        {
            "name": key.master_key_id,
            "version": key.version or None,
            "current": key.version == newest[key.master_key_id],
            "wraps": key.version == newest[key.master_key_id] and key.may("wrap", mechanism),
            "unwraps": key.may("unwrap"),
            "origin": key.origin,
            "refused": key.obstacle or None,
        }
        for key in keys
    ]
    if as_json:
        print_json(rows)
        return

    def state_of(row: dict[str, Any]) -> str:
        if row["refused"] or not row["version"]:
            return f"refused: {row['refused'] or 'its CKA_ID is no version'}"
        uses = [use for use in ("wraps", "unwraps") if row[use]]
        return ", ".join(uses) or "disabled"

    print_table(
        str(options.config),
        ["master key", "version", "origin", "state"],
        [(row["name"], str(row["version"] or ""), row["origin"], state_of(row)) for row in rows],
    )
