"""How one table is encrypted, and the types of fields in a configuration."""

from __future__ import annotations

import base64
import string
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from parquet_keytools import strict_base64
from parquet_keytools.config.document import Mistake, YamlPath
from parquet_keytools.encryption.aad import BASE64, prefix_bytes
from parquet_keytools.errors import AadPrefixError
from parquet_keytools.kms.client import KEY_LENGTHS_BYTES
from parquet_keytools.kms.contract import StrictSettings
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
    if text.startswith(BASE64):
        try:
            prefix_bytes(text)
        except AadPrefixError as error:
            raise PydanticCustomError("template", "{reason}", {"reason": str(error)}) from None
        return text
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


def _text_of_prefix(value: Any) -> Any:
    """Return the text form of a prefix that a mapping gives as bytes."""
    return BASE64 + base64.b64encode(value).decode() if isinstance(value, bytes) and value else value


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
AadPrefixTemplate = Annotated[
    str, BeforeValidator(_text_of_prefix), Field(min_length=1), AfterValidator(_checked_template)
]
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


class TableSettings(StrictSettings):
    """How one table is encrypted: an entry under `tables`."""

    footer_key: KeyName = Field(description="Name of the master key, or data key, of the footer.")
    column_keys: dict[KeyName, Annotated[tuple[Text, ...], Field(min_length=1)]] = Field(
        default={},
        description="Name of a key to the columns under it: dotted paths of leaf columns, parents of nested "
        "columns, or globs with * and ?.",
    )
    also_trusted: tuple[KeyName, ...] = Field(
        default=(),
        description="Names of keys that files of this table may be under in place of any key that it names, such "
        "as keys from before a change of the table. Nothing new is encrypted with them.",
    )
    hash_key: KeyName | None = Field(
        default=None,
        description="Name under hash_keys of the secret for digests of this table's columns, for readers with "
        "`denied_columns: hash`. Equal values have equal digests in all tables that name the same one.",
    )
    shown_columns: tuple[Text, ...] = Field(
        default=(),
        description="Columns under column_keys whose values readers with `denied_columns: hash` see, in place of "
        "digests: dotted paths, parents, or globs.",
    )
    unlisted_columns: Literal["plaintext", "footer_key", "error"] = Field(
        default="plaintext",
        description="What happens to columns that no key lists: they stay plaintext, are encrypted with the "
        "footer's key, or nothing is written until each is under column_keys or plaintext_columns.",
    )
    plaintext_columns: tuple[Text, ...] = Field(
        default=(),
        description="Columns that stay plaintext with `unlisted_columns: error`: dotted paths, parents, or globs.",
    )
    plaintext_footer: StrictBool = Field(
        default=False,
        description="Sign the footer instead of encrypting it: tools without keys then read the schema and "
        "the plaintext columns.",
    )
    plaintext_footer_key_values: Literal["drop", "refuse"] = Field(
        default="drop",
        description="What happens, with plaintext_footer, to key-value metadata of the file that may hold values "
        "of encrypted columns (pandas, geo, all that is not known to say the schema only): it is left out with a "
        "warning, or the file is refused.",
    )
    plaintext_footer_keys: tuple[Text, ...] = Field(
        default=(), description="Keys of key-value metadata that a plaintext footer shows with their whole values."
    )
    algorithm: Literal["AES_GCM_V1", "AES_GCM_CTR_V1"] = Field(
        default="AES_GCM_V1", description="AES_GCM_CTR_V1 does not authenticate page data: changes go undetected."
    )
    # 128 is what pyarrow does throughout: its KEKs always have 128 bits, whatever the DEKs have. AES-128 is
    # not weak; 256 bits are for those whose rules ask for them.
    data_key_length_bits: KeyLength = Field(default=128, description="Length of the DEKs, in bits.")
    kek_length_bits: KeyLength | None = Field(
        default=None, description="Length of the KEKs, in bits; that of the DEKs where it is not set."
    )
    double_wrapping: StrictBool = Field(
        default=True,
        description="Wrap DEKs with KEKs and only these with master keys: far fewer calls to the KMS.",
    )
    key_material: Literal["internal", "external"] = Field(
        default="internal",
        description="Where key material is kept: in the Parquet file, or in a JSON file beside it.",
    )
    aad_prefix: AadPrefixTemplate | None = Field(
        default=None,
        description="AAD prefix, which ties a file to its name: a text, where {file_name} and {table_name} "
        "stand for these; or `base64:` with base64 of bytes. In the file it ends with NUL.",
    )
    store_aad_prefix: StrictBool = Field(
        default=True, description="Store the AAD prefix in the file; where not, readers must supply it."
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long KEKs for writing are kept, in seconds; 0 keeps none."
    )

    @property
    def effective_kek_length_bits(self) -> Literal[128, 192, 256]:
        """Length of the KEKs, in bits."""
        return self.kek_length_bits or self.data_key_length_bits

    def key_uses(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield each key that new files are encrypted with: its path within the table, and the key's name."""
        yield ("footer_key",), self.footer_key
        for name in self.column_keys:
            yield ("column_keys", name), name

    def key_names(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield each key that the table names, for new files or for those that are there."""
        yield from self.key_uses()
        for position, name in enumerate(self.also_trusted):
            yield ("also_trusted", position), name

    def rendered_aad_prefix(self, *, table_name: str, file_name: str) -> str | None:
        """Return the AAD prefix of one file as `prefix_bytes` takes it, or None where the table has none.

        What is written has NUL at its end; `encryption.aad` says which forms are read.
        """
        if self.aad_prefix is None or self.aad_prefix.startswith(BASE64):
            return self.aad_prefix
        return self.aad_prefix.format(table_name=table_name, file_name=file_name)

    @model_validator(mode="after")
    def _check_rules(self) -> TableSettings:
        mistakes = list(self._listed_twice())
        for position, name in enumerate(self.also_trusted):
            if name in self.also_trusted[:position]:
                mistakes.append(Mistake(("also_trusted", position), f"the key {name!r} is listed twice."))
        if not self.store_aad_prefix and self.aad_prefix is None:
            mistakes.append(Mistake(("store_aad_prefix",), "there is no aad_prefix that could be stored."))
        if self.plaintext_columns and self.unlisted_columns != "error":
            message = "columns that may stay plaintext are listed with `unlisted_columns: error` only."
            mistakes.append(Mistake(("plaintext_columns",), message))
        if not self.plaintext_footer:
            mistakes += [
                Mistake((name,), "plaintext_footer is not set: an encrypted footer hides all metadata.")
                for name in ("plaintext_footer_key_values", "plaintext_footer_keys")
                if name in self.model_fields_set
            ]
        if self.shown_columns and self.hash_key is None:
            message = "without hash_key no columns are shown as digests, and none needs to be excepted."
            mistakes.append(Mistake(("shown_columns",), message))
        if self.kek_length_bits is not None and not self.double_wrapping:
            mistakes.append(Mistake(("kek_length_bits",), "without double_wrapping there are no KEKs."))
        if mistakes:
            raise broken_rules(mistakes)
        return self

    def _listed_twice(self) -> Iterator[Mistake]:
        listed: dict[str, str] = {}
        for key_name, patterns in self.column_keys.items():
            for position, pattern in enumerate(patterns):
                if pattern not in listed:
                    listed[pattern] = key_name
                    continue
                again = "twice" if listed[pattern] == key_name else f"under the key {listed[pattern]!r} already"
                path = ("column_keys", key_name, position)
                yield Mistake(path, f"column {pattern!r} is listed {again}.")


_NAME = None
"""Stands for the name of a file: any characters, one at least, but `/` and NUL."""

_Template = tuple[str | None, ...]


def prefixes_that_begin_another(templates: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tables: a prefix of the first can be the beginning of a longer one of the second.

    Prefixes of one table are compared with each other, too. Without a fixed length of the file unique nothing else
    tells the two apart: `part-1` begins `part-10`.

    Args:
        templates: Name of a table -> template of its AAD prefix.
    """
    parsed = {name: _parsed(template, name) for name, template in templates.items()}
    for one, first in parsed.items():
        for other, second in parsed.items():
            if _can_begin(first, second):
                yield one, other


def _parsed(template: str, table_name: str) -> _Template:
    """Return a template as characters and `_NAME`, as pairs of literals and placeholders of a format string.

    Where a template is bytes, each of them is a character, and so it is where a text is encoded.
    """
    if template.startswith(BASE64):
        return tuple(prefix_bytes(template).decode("latin-1"))
    parts: list[str | None] = []
    for literal, placeholder, _, _ in string.Formatter().parse(template):
        parts += literal.encode().decode("latin-1")
        if placeholder == "table_name":
            parts += table_name.encode().decode("latin-1")
        elif placeholder is not None:
            parts.append(_NAME)
    return tuple(parts)


def _can_begin(one: _Template, other: _Template) -> bool:
    """Return whether a rendering of one is the beginning of a longer rendering of the other.

    Both are read at the same time, a character at a time. A place is a number of parts that are behind, and
    whether the last of them is a name that may go on. Each name is taken for itself, also where a template has it
    twice: that errs to the safe side.
    """
    seen = {((0, False), (0, False))}
    waiting = list(seen)
    while waiting:
        first, second = waiting.pop()
        if first[0] == len(one) and (second[0] < len(other) or second[1]):
            return True
        for part, next_first in _steps(one, first):
            for other_part, next_second in _steps(other, second):
                places = (next_first, next_second)
                if _share_a_character(part, other_part) and places not in seen:
                    seen.add(places)
                    waiting.append(places)
    return False


def _steps(template: _Template, place: tuple[int, bool]) -> Iterator[tuple[str | None, tuple[int, bool]]]:
    behind, may_go_on = place
    if may_go_on:
        yield _NAME, place
    if behind < len(template):
        yield template[behind], (behind + 1, template[behind] is _NAME)


def _share_a_character(one: str | None, other: str | None) -> bool:
    if one is _NAME or other is _NAME:
        return not {one, other} & {"/", "\0"}
    return one == other
