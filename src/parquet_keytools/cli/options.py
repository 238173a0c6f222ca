"""Arguments and options that several commands have."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.output import answer_with_json

if TYPE_CHECKING:
    from parquet_keytools.storage.locations import FileLocation


def refuse_other_encoding(text: str, name: str) -> None:
    """Refuse an argument whose bytes were not UTF-8: neither an AAD prefix nor pyarrow takes others.

    Raises:
        typer.BadParameter: They were not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("not valid UTF-8.", param_hint=name) from None


def checked_aad_prefix(text: str | None) -> str | None:
    """Return an AAD prefix from the command line, unless it is empty or not UTF-8."""
    if text is not None:
        refuse_other_encoding(text, "--aad-prefix")
        if not text:
            # A variable of the shell that is not set: it must not pass for "any prefix".
            raise typer.BadParameter("it is empty.", param_hint="--aad-prefix")
        from parquet_keytools.encryption.aad import prefix_bytes
        from parquet_keytools.errors import AadPrefixError

        try:
            prefix_bytes(text)
        except AadPrefixError as error:
            raise typer.BadParameter(str(error), param_hint="--aad-prefix") from None
    return text


SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="File or folder, or its URI, such as s3://bucket/folder.")
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="DST", help="File or folder to be written, or its URI. A folder mirrors SRC.")
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
"""The environment variable that stands for --config."""


def config_option(help_text: str) -> Any:
    """Return the option `--config`; what a command needs the configuration for is in its help."""
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
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, or files of the same names in the folder DST.")
]
SkipExistingOption = Annotated[
    bool,
    typer.Option(
        "--skip-existing",
        help="Skip files that an earlier run has made: newer than their source, with the same columns, rows and "
        "statistics, under the keys that are wanted now. Other files in their places are errors, unless "
        "--overwrite replaces them.",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="OCTAL",
        help="Permissions of the written files, such as 640. By default only their owner may read them.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON to standard output, and text for people to standard error.",
        callback=answer_with_json,
    ),
]

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        help="How many processes share the small files of a folder. By default as many as pay: one for each "
        "processor, if there are hundreds of files.",
        show_default=False,
    ),
]

IgnorePassedOverOption = Annotated[
    bool,
    typer.Option(
        "--ignore-passed-over",
        help="Do not look for encrypted files whose names, or those of their folders, begin with . or _.",
    ),
]

FromOption = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="KEY", help="Move keys from this master key to the --to that follows."),
]
ToOption = Annotated[
    list[str] | None, typer.Option("--to", metavar="KEY", help="The master key that replaces it.")
]
OtherKmsOption = Annotated[
    Path | None,
    typer.Option("--to-config", metavar="FILE", help="Another configuration, whose KMS re-wraps the keys."),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only-master-key", metavar="KEY", help="Rotate only keys that this master key wraps. Repeatable."
    ),
]
OlderThanOption = Annotated[
    str | None,
    typer.Option(
        "--older-than", metavar="VERSION", help="Rotate only keys under older versions of their master key."
    ),
]
NewKeksOption = Annotated[
    bool, typer.Option("--new-keks", help="Make new KEKs, after a KEK leaked. DEKs stay: see rekey.")
]
FollowLinksOption = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Also change files outside of the named folder, where links lead. Without, they count as failed.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; tell what would change, and the KMS be asked for.")
]


def moves_of(old: list[str], new: list[str]) -> dict[str, str]:
    """Return the moves that pairs of --from and --to mean.

    Raises:
        typer.BadParameter: They are no pairs.
    """
    if len(old) != len(new):
        raise typer.BadParameter(
            f"each --from needs its --to: there are {len(old)} of one and {len(new)} of the other.",
            param_hint="--from",
        )
    twice = [key for key in old if old.count(key) > 1]
    if twice:
        raise typer.BadParameter(f"{twice[0]!r} comes twice: it can move to one master key.", param_hint="--from")
    return dict(zip(old, new, strict=True))


def location_of(text: str, name: str) -> FileLocation:
    """Return where an argument points, whatever characters it has.

    Raises:
        typer.BadParameter: It is a URI of a kind that nothing here opens, or no valid one; or it is not UTF-8.
    """
    from parquet_keytools.storage.locations import FileLocation

    refuse_other_encoding(text, name)
    with _opened_uri(name):
        return FileLocation.resolve(text)


def locations_of(texts: Sequence[str], name: str) -> FileLocation:
    """Return what arguments name: a file or folder, or several of them, or globs.

    Raises:
        typer.BadParameter: As with `location_of`; or they lie on several file systems.
    """
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
        # Ours; it does not quote the URI, which may hold credentials. Those of Arrow do.
        text = str(error).removesuffix(".") if type(error) is ValueError else "not a valid URI"
        raise typer.BadParameter(f"{text}.", param_hint=name) from None
    except NotImplementedError:
        raise typer.BadParameter(
            "pyarrow was built without the file system of this URI.", param_hint=name
        ) from None


def pairs_of(texts: Sequence[str] | None, name: str) -> dict[str, str]:
    """Return what an option says that takes NAME=VALUE and is repeatable; a value may be a secret.

    Raises:
        typer.BadParameter: One of them has another form.
    """
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise typer.BadParameter("it is not of the form NAME=VALUE.", param_hint=name)
        found[key] = value
    return found
