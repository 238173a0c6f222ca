"""`parquet-keytools pkcs11`: the master keys in a PKCS#11 token."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from parquet_keytools.cli.keystore import KeyVersionOption, NameArgument
from parquet_keytools.cli.options import JsonOption, WideOption, config_option
from parquet_keytools.cli.output import answer, print_json, print_table

if TYPE_CHECKING:
    from parquet_keytools.kms.pkcs11 import Pkcs11Kms

app = typer.Typer(name="pkcs11", help="Manage master keys in an HSM with PKCS#11.", no_args_is_help=True)

ConfigOption = Annotated[Path, config_option("A configuration whose `kms:` names the token and its PIN.")]


@app.command("create-key")
def create_key(name: NameArgument, config: ConfigOption) -> None:
    """Create a master key: an AES key of 256 bits that never leaves the token."""
    with _kms(config) as kms:
        kms.create_key(name)
    answer(f"Created the master key {name!r}.")


@app.command("rotate-key")
def rotate_key(name: NameArgument, config: ConfigOption) -> None:
    """Give a master key a new version.

    The new version wraps keys from now on; older versions still unwrap.
    """
    with _kms(config) as kms:
        version = kms.rotate_key(name)
    answer(f"Version {version} of the master key {name!r} now wraps keys.")


@app.command()
def disable(name: NameArgument, config: ConfigOption, key_version: KeyVersionOption = None) -> None:
    """Disable a master key, or one version of it, if the token allows it.

    A disabled key neither wraps nor unwraps. It stays in the token.
    """
    with _kms(config) as kms:
        kms.set_enabled(name, False, key_version)
    answer(f"Disabled {_key_text(name, key_version)}.")


@app.command()
def enable(name: NameArgument, config: ConfigOption, key_version: KeyVersionOption = None) -> None:
    """Enable a master key, or one version of it, again."""
    with _kms(config) as kms:
        kms.set_enabled(name, True, key_version)
    answer(f"Enabled {_key_text(name, key_version)}.")


def _key_text(name: str, key_version: int | None) -> str:
    return f"the master key {name!r}" if key_version is None else f"version {key_version} of {name!r}"


@app.command("list")
def list_keys(config: ConfigOption, as_json: JsonOption = False, wide: WideOption = False) -> None:
    """List the secret keys of the token that have a label, and whether they can be used."""
    with _kms(config) as kms:
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
        str(config),
        ["master key", "version", "origin", "state"],
        [(row["name"], str(row["version"] or ""), row["origin"], state_of(row)) for row in rows],
    )


def _kms(config: Path) -> Pkcs11Kms:
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.errors import ConfigurationError
    from parquet_keytools.kms.named import kmss_of
    from parquet_keytools.kms.registry import make_client

    configuration = load_configuration(config)
    tokens = [settings for settings in kmss_of(configuration.kms) if settings.type == "pkcs11"]
    if len(tokens) != 1:
        many = f"{len(tokens)} KMSs" if tokens else "no KMS"
        raise ConfigurationError(
            f"this configuration has {many} of the type pkcs11.",
            file=str(config),
            hint="Name a configuration with one token.",
        )
    kms = make_client(tokens[0], configuration.folder)
    return cast("Pkcs11Kms", kms)
