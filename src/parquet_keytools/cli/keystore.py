"""`parquet-keytools keystore` and `pkcs11`: the master keys in a keystore file, and in a PKCS#11 token."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out

if TYPE_CHECKING:
    from parquet_keytools.kms.keystore_file import Keystore, OpenKeystore
    from parquet_keytools.kms.passphrase import PassphraseSource
    from parquet_keytools.kms.pkcs11 import Pkcs11Kms
    from parquet_keytools.secret_bytes import SecretBytes

ENVIRONMENT_VARIABLE = "PARQUET_KEYTOOLS_PASSPHRASE"
NEW_ENVIRONMENT_VARIABLE = "PARQUET_KEYTOOLS_NEW_PASSPHRASE"

app = typer.Typer(
    name="keystore", help="Keep master keys in a file on this machine, under a passphrase.", no_args_is_help=True
)


@dataclass(frozen=True, kw_only=True)
class KeystoreOptions:
    """Where the keystore is, and its passphrase.

    Options:
        --path FILE: The keystore file.
        --config FILE: A configuration whose `kms:` names the keystore file and its passphrase.
    """

    path: Path | None = None
    config: Path | None = None
    passphrase_file: Path | None = None

    @property
    def name(self) -> str:
        """The file that was named."""
        return str(self.path or self.config)

    def keystore(self) -> Keystore:
        """Return the keystore."""
        from parquet_keytools.kms.keystore_file import Keystore

        return Keystore(*self.located())

    def keys(self) -> AbstractContextManager[Keystore]:
        """Return the keystore, which needs no end."""
        return nullcontext(self.keystore())

    def located(self, *, confirm: bool = False) -> tuple[Path, PassphraseSource]:
        """Return the keystore file and its passphrase; the prompt for a new passphrase asks twice if `confirm`."""
        from parquet_keytools.errors import ConfigurationError

        config = self.config
        if self.path is None and config is None and (named := os.environ.get(opt.CONFIG_VARIABLE)):
            config = Path(named)
        if (self.path is None) == (config is None):
            raise typer.BadParameter("Give either --path FILE or --config FILE.")
        if config is None:
            assert self.path is not None
            from parquet_keytools.kms.passphrase import identity

            is_new = identity(self.path) is None
            return self.path, _passphrase_source(self.passphrase_file, confirm=confirm and is_new)
        from parquet_keytools.config.loader import load_configuration
        from parquet_keytools.kms.keystore_file import KeystoreSettings
        from parquet_keytools.kms.named import kmss_of

        configuration = load_configuration(config)
        keystores = [kms for kms in kmss_of(configuration.kms) if isinstance(kms, KeystoreSettings)]
        if not keystores:
            raise ConfigurationError("the KMS of this configuration is not a keystore.", file=str(config))
        if len(keystores) > 1:
            raise ConfigurationError(
                "this configuration has several keystores.", file=str(config), hint="Name one with --path FILE."
            )
        path, source = keystores[0].located(configuration.folder)
        return path, source if self.passphrase_file is None else _passphrase_source(self.passphrase_file)


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Identifier of the master key.")]
KeyVersionOption = Annotated[
    int | None, typer.Option("--key-version", min=1, help="Only this version. Otherwise the whole key.")
]


@app.command()
@opt.with_options(KeystoreOptions)
def create(options: KeystoreOptions) -> None:
    """Create a keystore without master keys."""
    from parquet_keytools.kms.keystore_file import Keystore

    path, source = options.located(confirm=True)
    Keystore.create(path, source)
    out.answer(f"Created the keystore {path}.")


@app.command("create-key")
@opt.with_options(KeystoreOptions)
def create_key(name: NameArgument, options: KeystoreOptions) -> None:
    """Create a master key, and the keystore if needed."""
    from parquet_keytools.kms.keystore_file import Keystore
    from parquet_keytools.kms.passphrase import identity

    path, source = options.located(confirm=True)
    if identity(path) is None:
        keystore = Keystore.create(path, source, exist_ok=True)
        out.answer(f"Created the keystore {path}.")
    else:
        keystore = Keystore(path, source)
    keystore.create_key(name)
    out.answer(f"Created the master key {name!r}.")


def add_key_commands(app: typer.Typer, options_class: type[Any]) -> None:
    """Add the commands that change a master key; `options.keys()` is a context with what changes it."""

    @app.command("rotate-key")
    @opt.with_options(options_class)
    def rotate_key(name: NameArgument, options: Any) -> None:
        """Give a master key a new version.

        The new version wraps keys from now on; older versions still unwrap.
        """
        with options.keys() as keys:
            version = keys.rotate_key(name)
        out.answer(f"Version {version} of the master key {name!r} now wraps keys.")

    @app.command()
    @opt.with_options(options_class)
    def disable(name: NameArgument, options: Any, key_version: KeyVersionOption = None) -> None:
        """Disable a master key, or one version of it.

        A disabled key neither wraps nor unwraps.
        """
        with options.keys() as keys:
            keys.set_enabled(name, False, key_version)
        out.answer(f"Disabled {_key_text(name, key_version)}.")

    @app.command()
    @opt.with_options(options_class)
    def enable(name: NameArgument, options: Any, key_version: KeyVersionOption = None) -> None:
        """Enable a master key, or one version of it, again."""
        with options.keys() as keys:
            keys.set_enabled(name, True, key_version)
        out.answer(f"Enabled {_key_text(name, key_version)}.")


add_key_commands(app, KeystoreOptions)


def _key_text(name: str, key_version: int | None) -> str:
    return f"the master key {name!r}" if key_version is None else f"version {key_version} of {name!r}"


@app.command("list")
@opt.with_options(KeystoreOptions)
def list_keys(options: KeystoreOptions, json: bool = False, wide: bool = False) -> None:
    """List the master keys and their versions."""
    _show_keys(options.keystore().open(), options.name)


def _show_keys(opened: OpenKeystore, title: str) -> None:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "version": version.version,
            "current": version is master_key.versions[-1],
            "enabled": master_key.enabled and version.enabled,
            "created": version.created,
        }
        for name, master_key in sorted(opened.master_keys.items())
        for version in master_key.versions
    ]

    def state_of(row: dict[str, Any]) -> str:
        return ("enabled" if row["enabled"] else "disabled") + (", wraps" if row["current"] else "")

    _show_versions(rows, title, "created", state_of)


def _show_versions(
    rows: list[dict[str, Any]], title: str, third: str, state_of: Callable[[dict[str, Any]], str]
) -> None:
    if out.json_wanted():
        out.print_json(rows)
        return
    cells = [(row["name"], str(row["version"] or ""), str(row[third]), state_of(row)) for row in rows]
    out.print_table(title, ["master key", "version", third, "state"], cells)


@app.command()
@opt.with_options(KeystoreOptions)
def backup(
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The file to write. It must not exist.")],
    options: KeystoreOptions,
) -> None:
    """Copy the keystore to a new file, and check the copy.

    The copy has the same passphrase, which is not part of it: keep the passphrase somewhere else.
    """
    copied = options.keystore().back_up(copy)
    versions = sum(len(master_key.versions) for master_key in copied.master_keys.values())
    out.answer(
        f"Copied {options.name} to {copy}: {out.number_of(len(copied.master_keys), 'master key')}, "
        f"{out.number_of(versions, 'version')}. The passphrase is not in it."
    )


@app.command()
@opt.with_options()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The keystore, or a backup of it.")],
    config: Path | None = None,
    passphrase_file: Path | None = None,
    json: bool = False,
) -> None:
    """Check a keystore or a backup, and list its keys.

    Each version of each master key is unwrapped. Exit status: 0 if all of them can be used, 1 if the file is
    damaged, 2 if the passphrase does not belong to it.

    Options:
        --config FILE: A configuration that has the passphrase of the keystore.
    """
    from parquet_keytools.errors import KmsResponseInvalidError
    from parquet_keytools.kms.keystore_file import Keystore

    if config is not None and passphrase_file is None:
        _, source = KeystoreOptions(config=config).located()
    else:
        source = _passphrase_source(passphrase_file)
    try:
        opened = Keystore(file, source).open()
        opened.check()
    except KmsResponseInvalidError as error:
        out.say(f"Error: {error}")
        raise typer.Exit(out.ExitStatus.NO) from None
    _show_keys(opened, f"{file} can be restored")


@app.command("change-passphrase")
@opt.with_options(KeystoreOptions)
def change_passphrase(
    options: KeystoreOptions,
    new_passphrase_file: Path | None = None,
) -> None:
    """Encrypt the master keys with another passphrase.

    Copies of the file keep the old passphrase.

    Options:
        --new-passphrase-file FILE: File with the new passphrase. Otherwise $PARQUET_KEYTOOLS_NEW_PASSPHRASE,
            or a prompt.
    """
    keystore = options.keystore()
    keystore.open()  # Detects a wrong passphrase before the prompt for a new one.
    keystore.change_passphrase(
        _passphrase_source(new_passphrase_file, variable=NEW_ENVIRONMENT_VARIABLE, confirm=True)
    )
    out.answer(f"Changed the passphrase of {options.name}.")


def _passphrase_source(
    file: Path | None, *, variable: str = ENVIRONMENT_VARIABLE, confirm: bool = False
) -> PassphraseSource:
    """Return a function that gets the passphrase once, from the file, the environment or a prompt."""
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


# --- pkcs11 ---


pkcs11_app = typer.Typer(name="pkcs11", help="Manage master keys in an HSM with PKCS#11.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Which token.

    Options:
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: A configuration whose `kms:` names the token and its PIN.
    """

    config: Path

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


@pkcs11_app.command("create-key")
@opt.with_options(TokenOptions)
def create_key_in_token(name: NameArgument, options: TokenOptions) -> None:
    """Create a master key: an AES key of 256 bits that never leaves the token."""
    with options.keys() as kms:
        kms.create_key(name)
    out.answer(f"Created the master key {name!r}.")


add_key_commands(pkcs11_app, TokenOptions)


@pkcs11_app.command("list")
@opt.with_options(TokenOptions)
def list_keys_of_token(options: TokenOptions, json: bool = False, wide: bool = False) -> None:
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

    def state_of(row: dict[str, Any]) -> str:
        if row["refused"] or not row["version"]:
            return f"refused: {row['refused'] or 'its CKA_ID is no version'}"
        return ", ".join(use for use in ("wraps", "unwraps") if row[use]) or "disabled"

    _show_versions(rows, str(options.config), "origin", state_of)
