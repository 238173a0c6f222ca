"""`parquet-keytools keystore`: the master keys in a keystore file."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import CONFIG_VARIABLE, JsonOption
from parquet_keytools.cli.output import answer, print_json, print_table

if TYPE_CHECKING:
    from parquet_keytools.kms.keystore_file import Keystore
    from parquet_keytools.kms.passphrase import PassphraseSource
    from parquet_keytools.secret_bytes import SecretBytes

ENVIRONMENT_VARIABLE = "PARQUET_KEYTOOLS_PASSPHRASE"
NEW_ENVIRONMENT_VARIABLE = "PARQUET_KEYTOOLS_NEW_PASSPHRASE"

app = typer.Typer(
    name="keystore", help="Keep master keys in a file on this machine, under a passphrase.", no_args_is_help=True
)

PathOption = Annotated[Path | None, typer.Option("--path", metavar="FILE", help="The keystore file.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A configuration whose `kms:` names the keystore file and its passphrase."
    ),
]
PassphraseFileOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help=f"File with the passphrase. Otherwise ${ENVIRONMENT_VARIABLE}, or a prompt.",
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Identifier of the master key.")]
KeyVersionOption = Annotated[
    int | None, typer.Option("--key-version", min=1, help="Only this version. Otherwise the whole key.")
]


@app.command()
def create(
    path: PathOption = None, config: ConfigOption = None, passphrase_file: PassphraseFileOption = None
) -> None:
    """Create a keystore without master keys."""
    from parquet_keytools.kms.keystore_file import Keystore

    path, source = _located(path, config, passphrase_file, confirm=True)
    Keystore.create(path, source)
    answer(f"Created the keystore {path}.")


@app.command("create-key")
def create_key(
    name: NameArgument,
    path: PathOption = None,
    config: ConfigOption = None,
    passphrase_file: PassphraseFileOption = None,
) -> None:
    """Create a master key, and the keystore if needed."""
    from parquet_keytools.kms.keystore_file import Keystore
    from parquet_keytools.kms.passphrase import identity

    path, source = _located(path, config, passphrase_file, confirm=True)
    if identity(path) is None:
        keystore = Keystore.create(path, source, exist_ok=True)
        answer(f"Created the keystore {path}.")
    else:
        keystore = Keystore(path, source)
    keystore.create_key(name)
    answer(f"Created the master key {name!r}.")


@app.command("rotate-key")
def rotate_key(
    name: NameArgument,
    path: PathOption = None,
    config: ConfigOption = None,
    passphrase_file: PassphraseFileOption = None,
) -> None:
    """Give a master key a new version.

    It wraps keys from now on; older versions still unwrap.
    """
    version = _keystore(path, config, passphrase_file).rotate_key(name)
    answer(f"Version {version} of the master key {name!r} now wraps keys.")


@app.command()
def disable(
    name: NameArgument,
    path: PathOption = None,
    config: ConfigOption = None,
    key_version: KeyVersionOption = None,
    passphrase_file: PassphraseFileOption = None,
) -> None:
    """Disable a master key, or one version of it.

    It neither wraps nor unwraps any more.
    """
    _keystore(path, config, passphrase_file).set_enabled(name, False, key_version)
    answer(f"Disabled {_what(name, key_version)}.")


@app.command()
def enable(
    name: NameArgument,
    path: PathOption = None,
    config: ConfigOption = None,
    key_version: KeyVersionOption = None,
    passphrase_file: PassphraseFileOption = None,
) -> None:
    """Enable a master key, or one version of it, again."""
    _keystore(path, config, passphrase_file).set_enabled(name, True, key_version)
    answer(f"Enabled {_what(name, key_version)}.")


@app.command("list")
def list_keys(
    path: PathOption = None,
    config: ConfigOption = None,
    passphrase_file: PassphraseFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the master keys and their versions."""
    master_keys = _keystore(path, config, passphrase_file).open().master_keys
    rows = [
        {
            "name": name,
            "version": version.version,
            "current": version is master_key.versions[-1],
            "enabled": master_key.enabled and version.enabled,
            "created": version.created,
        }
        for name, master_key in sorted(master_keys.items())
        for version in master_key.versions
    ]
    if as_json:
        print_json(rows)
        return

    def state_of(row: dict[str, Any]) -> str:
        return ("enabled" if row["enabled"] else "disabled") + (", wraps" if row["current"] else "")

    print_table(
        str(path or config),
        ["master key", "version", "created", "state"],
        [(str(row["name"]), str(row["version"]), str(row["created"]), state_of(row)) for row in rows],
    )


@app.command("change-passphrase")
def change_passphrase(
    path: PathOption = None,
    config: ConfigOption = None,
    passphrase_file: PassphraseFileOption = None,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option(
            "--new-passphrase-file",
            metavar="FILE",
            help=f"File with the new passphrase. Otherwise ${NEW_ENVIRONMENT_VARIABLE}, or a prompt.",
        ),
    ] = None,
) -> None:
    """Put all master keys under another passphrase. Copies of the file keep the old one."""
    keystore = _keystore(path, config, passphrase_file)
    keystore.open()  # a wrong passphrase is found before a new one is asked for
    keystore.change_passphrase(
        _passphrase_source(new_passphrase_file, variable=NEW_ENVIRONMENT_VARIABLE, confirm=True)
    )
    answer(f"Changed the passphrase of {path or config}.")


def _keystore(path: Path | None, config: Path | None, passphrase_file: Path | None) -> Keystore:
    from parquet_keytools.kms.keystore_file import Keystore

    return Keystore(*_located(path, config, passphrase_file))


def _located(
    path: Path | None, config: Path | None, passphrase_file: Path | None, *, confirm: bool = False
) -> tuple[Path, PassphraseSource]:
    """Return where the keystore file is, and what gives its passphrase; a new one is asked for twice."""
    from parquet_keytools.errors import ConfigurationError

    if path is None and config is None and (named := os.environ.get(CONFIG_VARIABLE)):
        config = Path(named)
    if (path is None) == (config is None):
        raise typer.BadParameter("Give either --path FILE or --config FILE.")
    if path is not None:
        from parquet_keytools.kms.passphrase import identity

        is_new = identity(path) is None
        return path, _passphrase_source(passphrase_file, confirm=confirm and is_new)
    assert config is not None
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.kms.keystore_file import KeystoreSettings

    configuration = load_configuration(config)
    if not isinstance(configuration.kms, KeystoreSettings):
        raise ConfigurationError("the KMS of this configuration is not a keystore.", file=str(config))
    located, source = configuration.kms.located(configuration.folder)
    return located, source if passphrase_file is None else _passphrase_source(passphrase_file)


def _passphrase_source(
    file: Path | None, *, variable: str = ENVIRONMENT_VARIABLE, confirm: bool = False
) -> PassphraseSource:
    """Return what gives the passphrase: of the file, of the environment, or of a prompt, asked once."""
    from functools import cache

    return cache(lambda: _passphrase(file, variable, confirm))


def _passphrase(file: Path | None, variable: str, confirm: bool) -> SecretBytes:
    from parquet_keytools.errors import ConfigurationError
    from parquet_keytools.kms.passphrase import passphrase_from_file, passphrase_from_text

    if file is not None:
        return passphrase_from_file(file)
    if text := os.environ.get(variable):
        return passphrase_from_text(text)
    if not sys.stdin.isatty():
        option = "--passphrase-file" if variable == ENVIRONMENT_VARIABLE else "--new-passphrase-file"
        raise ConfigurationError(
            "the keystore needs a passphrase, and there is no terminal to prompt for it.",
            hint=f"Give {option} FILE, or set {variable} in the environment.",
        )
    label = "Passphrase" if variable == ENVIRONMENT_VARIABLE else "New passphrase"
    return passphrase_from_text(typer.prompt(label, hide_input=True, confirmation_prompt=confirm, err=True))


def _what(name: str, key_version: int | None) -> str:
    return f"the master key {name!r}" if key_version is None else f"version {key_version} of {name!r}"
