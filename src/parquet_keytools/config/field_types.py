"""Types of fields in a configuration, and what pydantic finds wrong in the words of a configuration."""

from __future__ import annotations

import string
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from parquet_keytools import strict_base64
from parquet_keytools.config.document import Mistake, YamlPath, did_you_mean, one_of
from parquet_keytools.kms.client import KEY_LENGTHS_BYTES
from parquet_keytools.secret_bytes import SecretBytes

BROKEN_RULES = "broken_rules"
"""Type of the pydantic error that carries mistakes of rules over several fields."""

_PLACEHOLDERS = ("file_name", "table_name")


def _checked_identifier(text: str) -> str:
    # Identifiers reach pyarrow percent-encoded: the `:`, `;` and `,` of ARNs mean something in the language
    # in which pyarrow takes column keys. So a `%` of their own would be ambiguous there.
    if "%" in text:
        raise PydanticCustomError("identifier", "a key's name or identifier must not contain `%`.")
    if any(character < " " or "\x7f" <= character < "\xa0" for character in text):
        raise PydanticCustomError(
            "identifier", "a key's name or identifier must not contain line ends or control characters."
        )
    return text


def _checked_data_key(value: Any) -> Any:
    if isinstance(value, SecretBytes):
        key = value
    elif isinstance(value, str):
        try:
            key = SecretBytes(strict_base64.decode(value))
        except ValueError:
            key = SecretBytes(b"")
    else:
        raise PydanticCustomError("string_type", "")
    if len(key) not in KEY_LENGTHS_BYTES:
        raise PydanticCustomError("data_key", "a data key is base64 of 16, 24 or 32 bytes.")
    return key


def _checked_whole_number(value: Any) -> Any:
    # `Literal[1]` takes True and 1.0, for they are equal.
    if isinstance(value, (bool, float)):
        raise PydanticCustomError("int_type", "")
    return value


def _checked_template(text: str) -> str:
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        parts = [("", "", "", None)]
    if any(name is not None and (name not in _PLACEHOLDERS or more or how) for _, name, more, how in parts):
        raise PydanticCustomError(
            "template", "the only placeholders are {file_name} and {table_name}; a literal brace is doubled."
        )
    if "\0" in text:
        raise PydanticCustomError(
            "template", "an AAD prefix contains no NUL: parquet-keytools writes one to mark its end."
        )
    return text


def broken_rules(mistakes: list[Mistake]) -> PydanticCustomError:
    """Make the error that a validator of several fields raises; paths start at its model."""
    text = " ".join(mistake.text for mistake in mistakes)
    return PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "mistakes": mistakes})


Text = Annotated[str, Field(min_length=1)]
KeyName = Annotated[str, Field(min_length=1), AfterValidator(_checked_identifier)]
DataKey = Annotated[
    InstanceOf[SecretBytes],
    BeforeValidator(_checked_data_key),
    PlainSerializer(repr, return_type=str),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "writeOnly": True}),
]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
AadPrefixTemplate = Annotated[str, Field(min_length=1), AfterValidator(_checked_template)]
Version = Annotated[Literal[1], BeforeValidator(_checked_whole_number)]
DeniedColumns = Annotated[
    Literal["error", "hide", "null", "hash"],
    # In YAML the word without quotes is no text.
    BeforeValidator(
        lambda value: "null" if value is None else value,
        json_schema_input_type=Literal["error", "hide", "null", "hash", None],
    ),
]
KeyLength = Annotated[Literal[128, 192, 256], BeforeValidator(_checked_whole_number)]


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
