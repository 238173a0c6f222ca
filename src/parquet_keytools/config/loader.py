"""Load configurations from YAML files and mappings, and report their mistakes."""

from __future__ import annotations

import os
import stat
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from parquet_keytools.config.document import (
    MOST_BYTES,
    WITHHELD,
    DocumentSource,
    Mistake,
    UnreadableYamlError,
    YamlDocument,
    YamlPath,
    configuration_error,
    did_you_mean,
    expand,
    exposed_to,
    map_values,
    one_of,
    read_yaml,
    redacted,
    yaml_path_text,
)
from parquet_keytools.config.key_policy import check_key_names, covers
from parquet_keytools.config.labels import Labels, read_labels
from parquet_keytools.config.settings import BROKEN_RULES, Configuration, ConfigurationWarning
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.named import NAME, RESERVED_NAMES, NamedKmsSettings
from parquet_keytools.kms.registry import client_class, is_known, known_names
from parquet_keytools.runtime.presentation import expanded


def load_configuration(
    file: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None, kms: KmsClient | None = None
) -> Configuration:
    """Load a configuration from a YAML file.

    Args:
        file: Path of the file; `~` is the home folder.
        environment: The variables that `${NAME}` refers to; by default, the environment of this process.
        kms: The client that will be passed to `Keytools`. The configuration then needs no `kms`.

    Raises:
        ConfigurationError: The file cannot be read, or has mistakes. The error reports all mistakes in single
            values or, without such mistakes, all contradictions between values.
    """
    configuration = _load(file, os.environ if environment is None else environment, kms)
    _warn(configuration)
    return configuration


def parse_configuration(
    document: str | bytes | Mapping[str, Any],
    *,
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    kms: KmsClient | None = None,
) -> Configuration:
    """Make a configuration from YAML text, or from a mapping with the same content.

    Args:
        document: YAML text, or a mapping.
        file: The file that contained the text, for errors, relative paths, and worker processes.
        environment: The variables that `${NAME}` refers to; by default, the environment of this process.
        kms: As in `load_configuration`.

    Raises:
        ConfigurationError: As in `load_configuration`.
    """
    configuration = _parse(document, file, os.environ if environment is None else environment, kms)
    _warn(configuration)
    return configuration


def portable_source(configuration: Configuration, sent: str) -> DocumentSource:
    """Return the document for another process, which must find the secrets itself.

    `sent` ends errors: `pickled`, or another word for what is done with the configuration.
    """
    source = configuration.source
    if source is None:
        raise ConfigurationError(
            f"a configuration that was built in Python cannot be {sent}.",
            hint="Use load_configuration, or parse_configuration with a mapping.",
        )
    if source.document.get("kms") == WITHHELD:
        raise ConfigurationError(
            f"a configuration that was made for a KMS client in this process cannot be {sent}.",
            hint="Describe the KMS under `kms:` in the configuration instead.",
        )
    if source.path is None and (redacted := source.redacted_paths):
        places = ", ".join(map(yaml_path_text, redacted))
        raise ConfigurationError(
            f"the configuration contains secrets, which must not be {sent}: {places}.",
            hint="Put each secret into an environment variable and write ${NAME} in its place, or load the "
            "configuration from a YAML file that every worker can read.",
        )
    return source


def restore_configuration(source: DocumentSource) -> Configuration:
    """Restore a configuration in another process; refuse a file with the secrets that changed meanwhile."""
    if not source.redacted_paths:
        return _build(source.document, source, os.environ)
    assert source.path is not None
    hint = "Put each secret into an environment variable and write ${NAME} in its place."
    try:
        configuration = _load(source.path, os.environ)
    except ConfigurationError as error:
        message = (
            "this process received a configuration without its secrets, and cannot use the file that holds them:"
        )
        raise ConfigurationError(f"{message} {error}", file=source.file, hint=hint) from None
    if configuration._source is None or configuration._source.document != source.document:
        message = "the configuration changed after it was sent to this process."
        raise ConfigurationError(message, file=source.file, hint=f"Start again. {hint}")
    configuration._source = replace(configuration._source, file=source.file)
    return configuration


def _warn(configuration: Configuration) -> None:
    for text in configuration.warnings:
        warnings.warn(text, ConfigurationWarning, stacklevel=3)


def _load(
    file: str | os.PathLike[str], environment: Mapping[str, str], kms: KmsClient | None = None
) -> Configuration:
    try:
        file = expanded(file)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{error.strerror}.", file=os.fspath(file)) from None
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
            found = os.fstat(stream.fileno())
    except OSError as error:
        reason = {FileNotFoundError: "there is no such file.", IsADirectoryError: "this is a folder."}.get(
            type(error), f"the file cannot be read: {error.strerror}."
        )
        raise ConfigurationError(reason, file=os.fspath(file)) from None
    configuration = _parse(content, file, environment, kms)
    assert configuration._source is not None
    source = replace(configuration._source, exposed_to=exposed_to(found))
    path = file.absolute()
    if not stat.S_ISREG(found.st_mode) or any(path.is_relative_to(place) for place in _OF_ONE_PROCESS):
        # Other processes cannot read the same content, for example of `<(command)`.
        source = replace(source, path=None, folder=Path.cwd())
    configuration._source = source
    return configuration


_OF_ONE_PROCESS = tuple(map(Path, ("/dev/stdin", "/dev/fd", "/proc")))


def _parse(
    document: str | bytes | Mapping[str, Any],
    file: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    kms: KmsClient | None,
) -> Configuration:
    name = None if file is None else os.fspath(file)
    path = None if file is None else Path(file).absolute()
    if isinstance(document, Mapping):
        yaml = YamlDocument(map_values(document, lambda value: value))
    else:
        yaml = _read(document, name)
    source = DocumentSource(name, path, path.parent if path else Path.cwd(), yaml.lines)
    written = yaml.value
    if kms is not None and isinstance(written, dict) and written.get("kms") is None:
        # The real settings of a client from the caller are unknown.
        written = {**written, "kms": KmsSettings(type=kms.backend, instance_id=kms.instance_id)}
    return _build(written, source, environment, yaml.mistakes)


def _read(content: str | bytes, name: str | None) -> YamlDocument:
    try:
        return read_yaml(content)
    except UnreadableYamlError as error:
        mistake = error.mistake
    # Raised outside the handler: no error of YAML, whose text may hold a secret, is its context.
    raise configuration_error([mistake], file=name, lines={})


def _build(
    written: Any, source: DocumentSource, environment: Mapping[str, str], found: Sequence[Mistake] = ()
) -> Configuration:
    """Make a configuration from a document, or report all mistakes."""
    mistakes = list(found)
    document = expand(written, environment, mistakes)
    if not isinstance(document, dict):
        raise source.error(
            [*mistakes, Mistake((), "a configuration is a mapping.", "It starts with `version: 1`.")]
        )
    kms, later_mistakes = _kms_settings(document.get("kms"))
    configuration = None
    try:
        configuration = Configuration.model_validate({**document, "kms": kms})
    except ValidationError as error:
        later_mistakes += mistakes_of(error, Configuration, document)
    # A value with an earlier mistake was replaced, so later mistakes below it are meaningless.
    broken = [mistake.path for mistake in mistakes]
    mistakes += [
        mistake for mistake in later_mistakes if not any(mistake.path[: len(path)] == path for path in broken)
    ]
    # Raised outside the handler, since pydantic's error holds the values, which may be secrets.
    if mistakes or configuration is None:
        raise source.error(mistakes)
    mistakes += _read_labels(configuration, source)
    if mistakes:
        raise source.error(mistakes)
    with_labels = _with_labels(written, configuration)
    configuration._source = replace(source, document=redacted(with_labels, configuration.kms))
    check_key_names(configuration)
    return configuration


def _read_labels(configuration: Configuration, source: DocumentSource) -> Iterator[Mistake]:
    """Read the labels that tables refer to, and yield the mistakes."""
    for name, table in configuration.tables.items():
        if not table.labels_from:
            continue
        labels, mistakes = read_labels(
            table.labels_from, name, source.folder, configuration.classes, partial(covers, table.column_keys)
        )
        yield from (replace(mistake, path=("tables", name, *mistake.path)) for mistake in mistakes)
        field = next((one.arrow.field for one in table.labels_from if one.arrow is not None), None)
        iceberg = next((one for one in table.labels_from if one.iceberg is not None), None)
        unlabelled = configuration.classes.get(table.unlabelled or "error")
        table._labels = Labels(tuple(labels), field, unlabelled, configuration.classes, iceberg)


def _with_labels(document: dict[str, Any], configuration: Configuration) -> dict[str, Any]:
    """Return a document with the labels that were read, so that other processes need not have the files."""
    tables = dict(document.get("tables") or {})
    for name, table in configuration.tables.items():
        if any(source.kind not in ("arrow", "iceberg", "columns") for source in table.labels_from):
            labels = table.labels.by_column.values()
            read = {
                "columns": {_literal(label.column): _literal(label.class_name) for label in labels},
                "places": {_literal(label.column): _literal(label.place) for label in labels},
            }
            of_data = [one for one in tables[name]["labels_from"] if "arrow" in one or "iceberg" in one]
            tables[name] = {**tables[name], "labels_from": [*of_data, read]}
    return {**document, "tables": tables} if tables else document


def _literal(text: str) -> str:
    """Return a text in which nothing refers to an environment variable."""
    return text.replace("${", "$${")


def _kms_settings(document: Any) -> tuple[KmsSettings | None, list[Mistake]]:
    """Return the settings under `kms`, validated by the class of the KMS client, and the mistakes in them."""
    if document is None or isinstance(document, KmsSettings):
        return document, []
    if not isinstance(document, dict):
        message = "this has to be a mapping with a `type`, or of names to such mappings."
        return KmsSettings(type="unknown"), [Mistake(("kms",), message)]
    named, default = {name: one for name, one in document.items() if name != "default"}, document.get("default")
    if not named or "type" in document or not all(isinstance(one, dict) for one in named.values()):
        return _one_kms_settings(document, ("kms",))
    mistakes: list[Mistake] = []
    kmss: dict[str, KmsSettings] = {}
    for name, one in named.items():
        path = ("kms", name)
        if not NAME.fullmatch(name) or name in RESERVED_NAMES:
            message = "the name of a KMS has up to 64 letters, digits, `-` and `_`, and is not `DEFAULT`."
            mistakes.append(Mistake(path, message))
        if "instance_id" in one:
            message = f"files name this KMS {name!r}: with several KMSs, there is no other instance_id."
            mistakes.append(Mistake((*path, "instance_id"), message, "Leave it out."))
        kmss[name], found = _one_kms_settings(one, path)
        mistakes += found
    if default is not None and default not in kmss:
        hint = did_you_mean(str(default), kmss) or one_of(kmss)
        mistakes.append(Mistake(("kms", "default"), "no KMS has this name.", hint))
        default = None
    return NamedKmsSettings(kmss=kmss, default=default), mistakes


def _one_kms_settings(document: dict[str, Any], path: YamlPath) -> tuple[KmsSettings, list[Mistake]]:
    broken = KmsSettings(type="unknown")
    name = document.get("type")
    if not isinstance(name, str):
        return broken, [Mistake((*path, "type"), "the name of a KMS client is required.", one_of(known_names()))]
    if not is_known(name):
        hint = did_you_mean(name, known_names()) or one_of(known_names())
        return broken, [Mistake((*path, "type"), "there is no KMS client with this name.", hint)]
    try:
        settings = client_class(name).Settings
    except ConfigurationError as error:
        return broken, [Mistake((*path, "type"), str(error.args[0]), error.hint)]
    try:
        return settings.model_validate(document), []
    except ValidationError as error:
        return broken, list(mistakes_of(error, settings, document, path))


# --- mistakes that pydantic found ---


_EXPECTED = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "a mapping, such as `name: value`",
    "model": "a mapping, such as `name: value`",
}
"""The first word of pydantic's error type -> what is expected, if the type ends with one of these."""
_ENDINGS = ("_type", "_parsing", "_from_float", "_number")
_OF_OURS = ("identifier", "data_key", "template")
_SHORTEST_SECRET = 4
_NOTHING = object()


def mistakes_of(
    error: ValidationError, model: type[BaseModel], document: Any, path: YamlPath = ()
) -> Iterator[Mistake]:
    """Yield the mistakes that a validation found, without any value of the document.

    `document` is at `path` in the configuration, with environment variables expanded.
    """
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            # pydantic counts only valid items, and reports invalid items separately.
            continue
        place = _place(details, document)
        if details["type"] == BROKEN_RULES:
            for mistake in details["ctx"]["mistakes"]:
                yield Mistake((*path, *place, *mistake.path), mistake.message, mistake.hint)
        else:
            yield Mistake((*path, *place), *_message(details, model, place))


def _place(details: ErrorDetails, document: Any) -> YamlPath:
    """Return the part of pydantic's location that is in the document, without the variants of unions."""
    place: YamlPath = ()
    for position, step in enumerate(details["loc"]):
        inner: Any = _NOTHING
        if isinstance(document, Mapping):
            inner = document.get(step, _NOTHING)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            inner = document[step]
        is_missing = details["type"] == "missing" and position == len(details["loc"]) - 1
        if inner is not _NOTHING or is_missing:
            document = inner
            place = (*place, step)
    return place


def _message(details: ErrorDetails, model: type[BaseModel], place: YamlPath) -> tuple[str, str]:
    """Return message and hint."""
    kind, given, facts = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        return "this field is not known.", did_you_mean(str(place[-1]), known) or one_of(known)
    if kind == "missing":
        return "this field is required.", ""
    if kind == "literal_error":
        expected = facts["expected"]
        # pydantic's list: `'a', 'b' or 'c'`.
        close = did_you_mean(given, expected.split("'")[1::2]) if isinstance(given, str) else ""
        but = "" if type(given) in (str, int) and isinstance(given, str) == ("'" in expected) else _but(given)
        return f"this has to be {expected}{but}.", close
    if kind.endswith(_ENDINGS) and (expected := _EXPECTED.get(kind.partition("_")[0])) is not None:
        return f"this has to be {expected}{_but(given, expected)}.", _hint(kind, given)
    if kind in ("string_too_short", "too_short"):
        return "this must not be empty.", ""
    if kind == "greater_than_equal":
        return f"this has to be at least {facts['ge']:g}.", ""
    if kind in _OF_OURS or not _quotes(details["msg"], given):
        message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return message if message.endswith(".") else f"{message}.", ""
    return "this value is not valid.", ""


def _but(given: Any, expected: str = "") -> str:
    if isinstance(given, bool):
        return ", but YAML reads it as true or false"
    if isinstance(given, int | float) and "number" in expected:
        return ""
    kinds = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return f", but it is {kinds.get(type(given), 'empty' if given is None else 'something else')}"


def _hint(kind: str, given: Any) -> str:
    if given is None:
        return "Fill it in, or leave it out."
    if kind == "string_type" and isinstance(given, bool):
        return "Put it in quotes: without them, yes, no, on and off mean true and false."
    if kind == "string_type" and isinstance(given, int | float):
        return "Put it in quotes."
    if kind in ("bool_type", "int_type", "float_type") and isinstance(given, str):
        return "Write it without quotes; environment variables stand for texts only."
    return ""


def _quotes(message: str, given: Any) -> bool:
    """Return whether a message repeats a given text, which may be a secret."""
    if isinstance(given, str):
        return len(given) >= _SHORTEST_SECRET and given in message
    if isinstance(given, Mapping):
        return any(_quotes(message, item) for item in given.values())
    return isinstance(given, list | tuple) and any(_quotes(message, item) for item in given)


def _fields_at(model: type[BaseModel], place: YamlPath) -> list[str]:
    """Return the names of the fields that a mapping may have at a place in a document."""
    annotation: Any = model
    for step in place:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(step))
            annotation = field.annotation if field else None
        else:
            # The type of the values of a mapping or list.
            annotation = (typing.get_args(annotation) or (None,))[-1]
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            variants = typing.get_args(annotation)
            models = (one for one in variants if isinstance(one, type) and issubclass(one, BaseModel))
            annotation = next(models, annotation)
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return list(annotation.model_fields) if is_model else []
