"""YAML files and mappings to configurations."""

from __future__ import annotations

import os
import stat
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from parquet_keytools.config.document import (
    DocumentSource,
    Mistake,
    YamlPath,
    configuration_error,
    did_you_mean,
    expand,
    one_of,
    redacted,
)
from parquet_keytools.config.key_policy import check_key_names
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.config.table_settings import BROKEN_RULES
from parquet_keytools.config.yaml_document import MOST_BYTES, UnreadableYamlError, YamlDocument, read_yaml
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.registry import client_class, is_known, known_names
from parquet_keytools.runtime.operating_system import own_user_id, permissions
from parquet_keytools.runtime.presentation import expanded


def load_configuration(
    file: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None, kms: KmsClient | None = None
) -> Configuration:
    """Load a configuration from a YAML file.

    Args:
        file: Its path; `~` is the home folder, wherever the path comes from.
        environment: What `${NAME}` stands for; the environment of this process where it is not given.
        kms: The client that `Keytools` will be given: with it the configuration needs no `kms`.

    Raises:
        ConfigurationError: The file cannot be read, or what it says is wrong; the error reports all mistakes
            of one kind together: first those of single values, then those of values that contradict others.
    """
    configuration = _load(file, os.environ if environment is None else environment, _standing_for(kms))
    _warn(configuration)
    return configuration


def parse_configuration(
    document: str | bytes | Mapping[str, Any],
    *,
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    kms: KmsClient | None = None,
) -> Configuration:
    """Make a configuration of YAML text, or of a mapping with the same content.

    Args:
        document: YAML text, or mapping.
        file: Where the text came from: for error texts, relative paths, and worker processes.
        environment: What `${NAME}` stands for; the environment of this process where it is not given.
        kms: As with `load_configuration`.

    Raises:
        ConfigurationError: As with `load_configuration`.
    """
    configuration = _parse(document, file, os.environ if environment is None else environment, _standing_for(kms))
    _warn(configuration)
    return configuration


def restore_configuration(source: DocumentSource) -> Configuration:
    """Make in a worker process the configuration that was pickled without its secrets.

    Raises:
        ConfigurationError: An environment variable is not set here, or secrets stand in a file that is not
            here or says something else now.
    """
    if not source.redacted_paths:
        return _build(source.document, source, os.environ)
    assert source.path is not None
    hint = "Put each secret into an environment variable and write ${NAME} in its place."
    try:
        configuration = _load(source.path, os.environ)
    except ConfigurationError as error:
        message = "a configuration with secrets in it was sent here, and its file cannot be used here:"
        raise ConfigurationError(f"{message} {error}", file=source.file, hint=hint) from None
    if configuration._source is None or configuration._source.document != source.document:
        message = "the configuration changed after it was sent here."
        raise ConfigurationError(message, file=source.file, hint=f"Start again. {hint}")
    configuration._source = replace(configuration._source, file=source.file)
    return configuration


def _warn(configuration: Configuration) -> None:
    for text in configuration.warnings:
        warnings.warn(text, ConfigurationWarning, stacklevel=3)


def _standing_for(kms: KmsClient | None) -> KmsSettings | None:
    """Return settings in place of those that a client was made from, which nobody knows here."""
    return None if kms is None else KmsSettings(type=kms.backend, instance_id=kms.instance_id)


def _load(
    file: str | os.PathLike[str], environment: Mapping[str, str], kms: KmsSettings | None = None
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
        unreadable = ConfigurationError(reason, file=os.fspath(file))
    else:
        configuration = _parse(content, file, environment, kms)
        if configuration._source is not None:
            configuration._source = replace(configuration._source, exposed_to=exposed_to(found))
            if not _can_be_read_again(file, found):
                configuration._source = replace(configuration._source, path=None, folder=Path.cwd())
        return configuration
    raise unreadable


_OF_ONE_PROCESS = tuple(map(Path, ("/dev/stdin", "/dev/fd", "/proc")))


def _can_be_read_again(file: Path, found: os.stat_result) -> bool:
    """Return whether other processes find in a file what was found: not in that of `<(command)` in a shell."""
    path = file.absolute()
    return stat.S_ISREG(found.st_mode) and not any(path.is_relative_to(place) for place in _OF_ONE_PROCESS)


def exposed_to(found: os.stat_result) -> str:
    """Return who may read a file beside this user and the superuser; on Windows it is unknown."""
    if permissions(found, stat.S_IROTH):
        return "everybody on this machine"
    if permissions(found, stat.S_IRGRP):
        return "its group"
    # Who owns a file can change its permissions.
    return "" if found.st_uid in (0, own_user_id()) else "its owner, another user,"


def _parse(
    document: str | bytes | Mapping[str, Any],
    file: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    kms: KmsSettings | None,
) -> Configuration:
    name = None if file is None else os.fspath(file)
    path = None if file is None else Path(file).absolute()
    yaml = YamlDocument(_plain(document)) if isinstance(document, Mapping) else _read(document, name)
    source = DocumentSource(name, path, path.parent if path else Path.cwd(), yaml.lines)
    written = yaml.value
    if kms is not None and isinstance(written, dict) and written.get("kms") is None:
        written = {**written, "kms": kms}
    return _build(written, source, environment, yaml.mistakes)


def _read(content: str | bytes, name: str | None) -> YamlDocument:
    try:
        return read_yaml(content)
    except UnreadableYamlError as error:
        mistake = error.mistake
    raise configuration_error([mistake], file=name, lines={})


def _plain(value: Any) -> Any:
    """Return a document from Python as YAML would have given it."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _build(
    written: Any, source: DocumentSource, environment: Mapping[str, str], found: Sequence[Mistake] = ()
) -> Configuration:
    """Make a configuration of a document as it was written, or report all mistakes."""
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
    # What lies under a mistake found before was made up in its place.
    broken = [mistake.path for mistake in mistakes]
    mistakes += [
        mistake for mistake in later_mistakes if not any(mistake.path[: len(path)] == path for path in broken)
    ]
    # Raised outside of the handler: pydantic's error holds the values, and with them secrets.
    if mistakes or configuration is None:
        raise source.error(mistakes)
    configuration._source = replace(source, document=redacted(written, configuration.kms))
    check_key_names(configuration)
    return configuration


def _kms_settings(document: Any) -> tuple[KmsSettings | None, list[Mistake]]:
    """Return what the KMS's own class makes of the settings under `kms`, and the mistakes in it."""
    broken = KmsSettings(type="unknown")
    if document is None or isinstance(document, KmsSettings):
        return document, []
    if not isinstance(document, dict):
        return broken, [Mistake(("kms",), "this has to be a mapping with a `type`.")]
    name = document.get("type")
    if not isinstance(name, str) or not is_known(name):
        message = (
            "no KMS client has this name." if isinstance(name, str) else "the name of a KMS client is required."
        )
        hint = did_you_mean(name, known_names()) if isinstance(name, str) else ""
        return broken, [Mistake(("kms", "type"), message, hint or one_of(known_names()))]
    try:
        settings = client_class(name).Settings
    except ConfigurationError as error:
        return broken, [Mistake(("kms", "type"), str(error.args[0]), error.hint)]
    try:
        return settings.model_validate(document), []
    except ValidationError as error:
        return broken, list(mistakes_of(error, settings, document, ("kms",)))


# --- what pydantic found wrong ---


_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list, such as [a, b]",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping, such as `name: value`",
    "model_type": "a mapping, such as `name: value`",
    "model_attributes_type": "a mapping, such as `name: value`",
}
_OF_OURS = ("identifier", "data_key", "template")
_SHORTEST_SECRET = 4
_NOTHING = object()


def mistakes_of(
    error: ValidationError, model: type[BaseModel], document: Any, path: YamlPath = ()
) -> Iterator[Mistake]:
    """Yield the mistakes that a validation found.

    Args:
        error: What pydantic raised; nothing of the values in it goes into a mistake.
        model: What `document` was validated against.
        document: Environment variables expanded.
        path: Where `document` stands in the whole.
    """
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            # pydantic counts valid items only; what is wrong with the others it reports, too.
            continue
        place = _place(details, document)
        if details["type"] == BROKEN_RULES:
            for mistake in details["ctx"]["mistakes"]:
                yield Mistake((*path, *place, *mistake.path), mistake.message, mistake.hint)
        else:
            yield Mistake((*path, *place), *_message(details, model, place))


def _place(details: ErrorDetails, document: Any) -> YamlPath:
    """Return that part of pydantic's location that is in the document: it names variants of unions, too."""
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
        close = did_you_mean(given, _quoted(facts["expected"])) if isinstance(given, str) else ""
        expected = facts["expected"]
        but = "" if type(given) in (str, int) and isinstance(given, str) == ("'" in expected) else _but(given)
        return f"this has to be {expected}{but}.", close
    if kind in _EXPECTED:
        return f"this has to be {_EXPECTED[kind]}{_but(given, kind)}.", _hint(kind, given)
    if kind in ("string_too_short", "too_short"):
        return "this must not be empty.", ""
    if kind == "greater_than_equal":
        return f"this has to be at least {facts['ge']:g}.", ""
    if kind in _OF_OURS or not _quotes(details["msg"], given):
        message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return message if message.endswith(".") else f"{message}.", ""
    return "this value is not valid.", ""


def _but(given: Any, kind: str = "") -> str:
    if isinstance(given, bool):
        return ", but YAML reads it as true or false"
    if isinstance(given, int | float) and "number" in _EXPECTED.get(kind, ""):
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


def _quoted(expected: str) -> list[str]:
    """Return the names in pydantic's list of what it expected: `'a', 'b' or 'c'`."""
    return expected.split("'")[1::2]


def _quotes(message: str, given: Any) -> bool:
    """Return whether a message repeats a text of what was given; that may be a secret."""
    if isinstance(given, str):
        return len(given) >= _SHORTEST_SECRET and given in message
    if isinstance(given, Mapping):
        return any(_quotes(message, item) for item in given.values())
    return isinstance(given, list | tuple) and any(_quotes(message, item) for item in given)


def _fields_at(model: type[BaseModel], place: YamlPath) -> list[str]:
    """Return the names of the fields that a mapping at a place in a document may have."""
    annotation: Any = model
    for step in place:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(step))
            annotation = field.annotation if field else None
        else:
            # The values of a mapping or a list.
            annotation = (typing.get_args(annotation) or (None,))[-1]
        annotation = _model_in(annotation)
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return list(annotation.model_fields) if is_model else []


def _model_in(annotation: Any) -> Any:
    """Return the model among the variants of a union; other annotations as they are."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for variant in typing.get_args(annotation):
            if isinstance(variant, type) and issubclass(variant, BaseModel):
                return variant
    return annotation
