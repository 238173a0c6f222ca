"""Arguments and options that several commands share, and what they mean."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from parquet_keytools.cli.output import keep_context

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.storage.locations import FileLocation


def refuse_other_encoding(text: str, name: str) -> None:
    """Refuse an argument that is not UTF-8, since neither AAD prefixes nor pyarrow accept it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("not valid UTF-8.", param_hint=name) from None


def checked_aad_prefix(text: str | None) -> str | None:
    """Return an AAD prefix from the command line; refuse an invalid one."""
    if text is not None:
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
    return text


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
"""The environment variable that replaces --config."""


def config_option(help_text: str) -> Any:
    """Return the option `--config`; its help says what the command needs the configuration for."""
    return typer.Option("--config", metavar="FILE", envvar=CONFIG_VARIABLE, help=help_text)


ConfigOption = Annotated[Path, config_option("The YAML configuration.")]
TableOption = Annotated[
    str | None,
    typer.Option("--table", metavar="NAME", help="A table of the configuration. Not needed if it has only one."),
]
AadPrefixOption = Annotated[
    str | None,
    typer.Option(
        "--aad-prefix",
        metavar="TEXT",
        help="The AAD prefix that the file must have, instead of its table's: text, or base64:... for bytes.",
        callback=checked_aad_prefix,
    ),
]
PartsOption = Annotated[
    int | None, typer.Option("--parts", metavar="N", min=1, help="The folder must have parts 0 to N-1, each once.")
]
AllowPlaintextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-plaintext",
        metavar="GLOB",
        help="Accept plaintext files of a folder whose path within it this glob matches; may be repeated.",
    ),
]
VerifyStrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 for weaknesses, too, unless the table accepts them.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, or files of the same names in the folder DST.")
]
SkipExistingOption = Annotated[
    bool,
    typer.Option(
        "--skip-existing",
        help="Skip files that an earlier run wrote: newer than their source, with the same columns, rows and "
        "statistics, under the same keys. Other existing files are errors, unless --overwrite replaces them.",
    ),
]
SkipUnauthenticatedOption = Annotated[
    bool,
    typer.Option(
        SKIP_UNAUTHENTICATED,
        help="The same, for writers that may not unwrap keys; also --skip-existing=unauthenticated. Compares what "
        "files show without keys: algorithm, AAD prefix and footer key, with a plaintext footer also rows and "
        "columns. Nothing is authenticated.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON to standard output, and text to standard error.",
        callback=keep_context,
    ),
]
WideOption = Annotated[
    bool,
    typer.Option(
        "--wide",
        help="Print long names in tables in full. By default, a terminal shows them without their middle.",
        callback=keep_context,
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        help="Number of processes that share the small files of a folder. By default one for each processor, if "
        "there are hundreds of files.",
    ),
]
IgnoreSkippedOption = Annotated[
    bool,
    typer.Option(
        "--ignore-skipped",
        help="Do not look for encrypted files whose names, or the names of their folders, begin with . or _.",
    ),
]
FollowLinksOption = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Also change files outside of the named folder that links lead to. Otherwise, they count as failed.",
    ),
]

UpdateListOption = Annotated[
    str | None,
    typer.Option(
        "--update-list",
        metavar="LIST",
        help="Compare the files with this list of `verify --record` first, and replace the list afterwards.",
    ),
]
ListKeyOption = Annotated[
    str | None,
    typer.Option(
        "--list-key",
        metavar="KEY",
        help="The master key that authenticates lists. Default: the footer key of the table.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of commands that report on many files. Their callbacks tell `output`."""

    as_json: JsonOption = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print each failure. By default, equal failures are one line with a count and three examples.",
            callback=keep_context,
        ),
    ] = False
    wide: WideOption = False


@dataclass(frozen=True, kw_only=True)
class RotationOptions(ReportOptions):
    """Options of `rotate`, here and on Spark."""

    config: ConfigOption
    table: TableOption = None
    from_keys: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="KEY", help="Move keys from this master key to the --to that follows."),
    ] = None
    to_keys: Annotated[
        list[str] | None, typer.Option("--to", metavar="KEY", help="The master key that replaces it.")
    ] = None
    only_master_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--only-master-key", metavar="KEY", help="Rotate only keys that this master key wraps. Repeatable."
        ),
    ] = None
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="VERSION", help="Rotate only keys under older versions of their master key."
        ),
    ] = None
    new_keks: Annotated[
        bool, typer.Option("--new-keks", help="Create new KEKs, after a KEK leaked. DEKs stay: see rekey.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would change, and the KMS calls.")
    ] = False
    aad_prefix: AadPrefixOption = None
    follow_links: FollowLinksOption = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Keytools.rotate`."""
        old, new = self.from_keys or [], self.to_keys or []
        if len(old) != len(new):
            raise typer.BadParameter(
                f"each --from needs its --to, but there are {len(old)} --from and {len(new)} --to.",
                param_hint="--from",
            )
        for key in old:
            if old.count(key) > 1:
                raise typer.BadParameter(
                    f"{key!r} comes twice: it can move to one master key.", param_hint="--from"
                )
        return {
            "moves": dict(zip(old, new, strict=True)) or None,
            "only_master_keys": self.only_master_keys or None,
            "older_than": self.older_than,
            "new_keks": self.new_keks,
            "dry_run": self.dry_run,
            "table_name": self.table,
            "aad_prefix": self.aad_prefix,
            "follow_links": self.follow_links,
        }


def with_options(group: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of a dataclass to the options of a command, passed as `options` if it has this argument."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True) | get_type_hints(group, include_extras=True)
        parameters = list(inspect.signature(command).parameters.values())
        own = [parameter for parameter in parameters if parameter.name != "options"]
        shared = inspect.signature(group).parameters

        def run(**given: Any) -> None:
            options = group(**{name: given.pop(name) for name in shared})
            if len(own) < len(parameters):
                given["options"] = options
            command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
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
