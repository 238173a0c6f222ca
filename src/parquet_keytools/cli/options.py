"""Arguments and options that several commands share, and what they mean."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from parquet_keytools.cli.output import ExitStatus, known_options, picked, say

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.storage.locations import FileLocation


def refuse_other_encoding(text: str, name: str) -> None:
    """Refuse an argument that is not UTF-8, since neither AAD prefixes nor pyarrow accept it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("not valid UTF-8.", param_hint=name) from None


def _check_aad_prefix(text: str | None) -> None:
    """Refuse an invalid AAD prefix from the command line."""
    if text is None:
        return
    refuse_other_encoding(text, "--aad-prefix")
    if not text:
        # Probably an unset shell variable. It must not mean "any prefix".
        raise typer.BadParameter("it is empty.", param_hint="--aad-prefix")
    from parquet_keytools.encryption.aad import prefix_bytes
    from parquet_keytools.errors import AadPrefixError

    try:
        prefix_bytes(text)
    except AadPrefixError as error:
        raise typer.BadParameter(str(error), param_hint="--aad-prefix") from None


SKIP_UNAUTHENTICATED = "--skip-existing-unauthenticated"


def with_flags(arguments: list[str]) -> list[str]:
    """Return arguments with `--skip-existing=unauthenticated` as a flag: flags take no values."""
    return [SKIP_UNAUTHENTICATED if text == "--skip-existing=unauthenticated" else text for text in arguments]


SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="File or folder, or its URI, such as s3://bucket/folder.")
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="DST", help="File or folder to write, or its URI. A folder mirrors SRC.")
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(metavar="SRC", help="Files, folders or globs, or their URIs, such as s3://bucket/folder."),
]
PathsArgument = Annotated[
    list[str], typer.Argument(metavar="PATH", help="Files, folders or globs, or their URIs.")
]
ViewedArgument = Annotated[str, typer.Argument(metavar="PATH", help="File or folder, or its URI.")]
CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG"
"""The environment variable that replaces --config; docstrings have its name, too."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of commands that report on many files. `output` knows them.

    Options:
        --verbose: Print each failure. By default, equal failures are one line with a count and three examples.
    """

    json: bool = False
    verbose: bool = False
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class RotationOptions(ReportOptions):
    """Options of `rotate`, here and on Spark.

    Options:
        --only-master-key KEY: Rotate only keys that this master key wraps. Repeatable.
        --older-than VERSION: Rotate only keys under older versions of their master key.
        --new-keks: Create new KEKs, after a KEK leaked. DEKs stay: see rekey.
        --dry-run: Change nothing; show what would change, and the KMS calls.
    """

    config: Path
    table: str | None = None
    from_keys: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="KEY", help="Move keys from this master key to the --to that follows."),
    ] = None
    to_keys: Annotated[
        list[str] | None, typer.Option("--to", metavar="KEY", help="The master key that replaces it.")
    ] = None
    only_master_key: list[str] | None = None
    older_than: str | None = None
    new_keks: bool = False
    dry_run: bool = False
    aad_prefix: str | None = None
    follow_links: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Keytools.rotate`."""
        old, new = self.from_keys or [], self.to_keys or []
        if len(old) != len(new):
            raise typer.BadParameter(
                f"each --from needs its --to, but there are {len(old)} --from and {len(new)} --to.",
                param_hint="--from",
            )
        if twice := [key for key in old if old.count(key) > 1]:
            raise typer.BadParameter(
                f"{twice[0]!r} comes twice: it can move to one master key.", param_hint="--from"
            )
        return picked(self, "older_than", "new_keks", "dry_run", "aad_prefix", "follow_links") | {
            "moves": dict(zip(old, new, strict=True)) or None,
            "only_master_keys": self.only_master_key or None,
            "table_name": self.table,
        }


_SHARED = """
Options:
    --json: Print JSON to standard output, and text to standard error.
    --wide: Print long names in tables in full. By default, a terminal shows them without their middle.
    --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration.
    --in-place: Replace each file of SRC when the new file is complete and checked.
    --aad-prefix TEXT: The AAD prefix that the file must have, instead of its table's: text, or base64:... for
        bytes.
    --parts N>=1: The folder must have parts 0 to N-1, each once.
    --processes N>=1: Number of processes that share the small files of a folder. By default one for each
        processor, if there are hundreds of files.
    --file-on-nodes FILE: The path of the YAML file on every node, instead of sending it.
    --passphrase-file FILE: File with the passphrase. Otherwise $PARQUET_KEYTOOLS_PASSPHRASE, or a prompt.
    --set NAME=VALUE: The value of a placeholder in names of keys, such as tenant=acme; see key_values in the
        table.
    --table NAME: A table of the configuration. Not needed if it has only one.
    --allow-plaintext GLOB: Accept plaintext files of a folder whose path within it this glob matches; may be
        repeated.
    --strict: Exit with 1 for weaknesses, too, unless the table accepts them.
    --overwrite: Replace DST, or files of the same names in the folder DST.
    --skip-existing: Skip files that an earlier run wrote: newer than their source, with the same columns, rows
        and statistics, under the same keys. Other existing files are errors, unless --overwrite replaces them.
    --ignore-skipped: Do not look for encrypted files whose names, or the names of their folders, begin with .
        or _.
    --follow-links: Also change files outside of the named folder that links lead to. Otherwise, they count as
        failed.
    --update-list LIST: Compare the files with this list of `verify --record` first, and replace the list
        afterwards.
    --list-key KEY: The master key that authenticates lists. Default: the footer key of the table.
"""
"""Options of several commands."""

_OPTION = re.compile(r"(--\S+?)(?: (\S+?)(?:>=(\d+))?)?(?: or \$(\w+))?: (.+)")


def _documented(docstring: str | None) -> dict[str, Any]:
    """Return name -> option for lines under `Options:` in a docstring, such as `--where FILTER: Which.`."""
    _, _, text = f"\n{inspect.cleandoc(docstring or '')}".partition("\nOptions:\n")
    found = {}
    for entry in re.split(r"^ {4}(?=--)", text, flags=re.MULTILINE)[1:]:
        parsed = _OPTION.fullmatch(text := " ".join(entry.split()))
        if parsed is None:
            raise ValueError(f"no description of an option: {text}")
        flag, metavar, least, variable, shown = parsed.groups()
        name = flag.partition("/")[0].removeprefix("--").replace("-", "_")
        found[name] = typer.Option(
            flag, metavar=metavar, min=int(least) if least else None, envvar=variable, help=shown
        )
    return found


def with_options(group: type[Any] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make options of a command from the arguments that its docstring has under `Options:`.

    The fields of a dataclass are further options, passed as `options` if the command has this argument.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        if command.__doc__ is None:
            say("Error: Python runs without docstrings, which describe the options. Run it without -OO.")
            raise SystemExit(ExitStatus.WRONG_USAGE)
        hints = get_type_hints(command, include_extras=True)
        docstrings: list[str | None] = [_SHARED, command.__doc__]
        parameters = list(inspect.signature(command).parameters.values())
        own = [parameter for parameter in parameters if parameter.name != "options"]
        shared: Mapping[str, inspect.Parameter] = {}
        if group is not None:
            hints |= get_type_hints(group, include_extras=True)
            shared = inspect.signature(group).parameters
            docstrings += [each.__doc__ for each in group.__mro__]
        documented = {name: option for each in docstrings for name, option in _documented(each).items()}
        for name, hint in hints.items():
            if name in documented and get_origin(hint) is not Annotated:
                hints[name] = Annotated[hint, documented[name]]
        unknown = [part.name for part in (*own, *shared.values()) if get_origin(hints[part.name]) is not Annotated]
        assert not unknown, f"{command.__name__} does not describe {unknown}"

        def run(**given: Any) -> None:
            options = {name: given.pop(name) for name in shared}
            known = given | options
            _check_aad_prefix(known.get("aad_prefix"))
            with known_options(known):
                if len(own) < len(parameters) and group is not None:
                    given["options"] = group(**options)
                command(**given)

        # From 3.13 on, Python itself removes the indentation of docstrings.
        run.__name__ = command.__name__
        run.__doc__, _, _ = inspect.cleandoc(command.__doc__).partition("\nOptions:\n")
        run.__annotations__ = {name: hint for name, hint in hints.items() if name != "options"}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
                for parameter in (*own, *shared.values())
            ]
        )
        return run

    return decorated


def open_keytools(config: Path, kms_seconds: float = math.inf) -> Keytools:
    """Load a configuration for a command that writes files; the KMS has at most `kms_seconds` for an answer."""
    from parquet_keytools.config.loader import load_configuration
    from parquet_keytools.configuration_check import with_short_timeout
    from parquet_keytools.errors import ConfigurationError
    from parquet_keytools.keytools import Keytools

    keytools = Keytools(with_short_timeout(load_configuration(config), kms_seconds))
    if getattr(keytools.kms, "has_generated_keys", False):
        keytools.close()
        raise ConfigurationError(
            "the in_memory KMS makes new random master keys in each process: what one command encrypts, no "
            "other can decrypt.",
            file=str(config),
            yaml_path="kms.keys",
            hint="Use a keystore or another KMS, or for a test write the keys into the configuration.",
        )
    return keytools


@contextlib.contextmanager
def reading_keytools(config: Path | None, table: str | None) -> Iterator[Keytools | None]:
    """Load a configuration for a command that reads files; without one, the block gets None."""
    if config is None:
        if table is not None:
            raise typer.BadParameter("--table needs --config.")
        yield None
        return
    from parquet_keytools.keytools import Keytools

    with Keytools.from_yaml(config) as keytools:
        if table is not None:
            keytools.configuration.select_table(table)
        yield keytools


def location_of(text: str, name: str) -> FileLocation:
    """Return the location that an argument names, whatever characters it has."""
    from parquet_keytools.storage.locations import FileLocation

    refuse_other_encoding(text, name)
    with _opened_uri(name):
        return FileLocation.resolve(text)


def new_file(text: str | None, name: str) -> FileLocation | None:
    """Return the location of a file that an option names, and that must not exist; None without the option."""
    location = None if text is None else location_of(text, name)
    if location is not None and location.is_file():
        raise typer.BadParameter(f"{location} exists already; name another file.", param_hint=name)
    return location


def locations_of(texts: Sequence[str], name: str) -> FileLocation:
    """Return the location of a file or folder, or of several files, folders or globs."""
    from parquet_keytools.storage.locations import FileLocation

    for text in texts:
        refuse_other_encoding(text, name)
    with _opened_uri(name):
        return FileLocation.resolve_all(texts[0] if len(texts) == 1 else texts)


@contextlib.contextmanager
def _opened_uri(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        # Our own errors do not quote the URI, which may contain credentials. Arrow's errors do.
        text = str(error).removesuffix(".") if type(error) is ValueError else "not a valid URI"
        raise typer.BadParameter(f"{text}.", param_hint=name) from None
    except NotImplementedError:
        raise typer.BadParameter(
            "pyarrow was built without the file system of this URI.", param_hint=name
        ) from None


def pairs_of(texts: Sequence[str] | None, name: str) -> dict[str, str]:
    """Return the pairs of a repeatable option NAME=VALUE; errors do not quote values, which may be secret."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise typer.BadParameter("it is not of the form NAME=VALUE.", param_hint=name)
        if key in found:
            raise typer.BadParameter(f"{key!r} is given twice.", param_hint=name)
        found[key] = value
    return found
