"""Types of fields in a configuration."""

from __future__ import annotations

import string
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from parquet_keytools import strict_base64
from parquet_keytools.config.mistakes import Mistake
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
            "template",
            "the only placeholders are {file_name} and {table_name}; a literal brace is doubled.",
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
    Literal["error", "hide", "null"],
    # In YAML the word without quotes is no text.
    BeforeValidator(
        lambda value: "null" if value is None else value,
        json_schema_input_type=Literal["error", "hide", "null", None],
    ),
]
KeyLength = Annotated[Literal[128, 192, 256], BeforeValidator(_checked_whole_number)]


class Settings(BaseModel):
    """Root of the settings: frozen, without unknown fields."""

    # Errors of pydantic quote what they got; here that may be a key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
