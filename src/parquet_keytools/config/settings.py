"""Typed, validated settings of a configuration, and their JSON Schema for editors.

Instances are frozen, so threads may share them.
"""

from __future__ import annotations

import itertools
import re
import shlex
import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    InstanceOf,
    PlainSerializer,
    PrivateAttr,
    SerializeAsAny,
    StrictBool,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError

from parquet_keytools import strict_base64
from parquet_keytools.config.document import (
    DocumentSource,
    Mistake,
    YamlPath,
    configuration_error,
    did_you_mean,
    exposed_to,
    one_of,
)
from parquet_keytools.config.labels import Labels
from parquet_keytools.encryption.aad import BASE64, filled_prefix, prefix_bytes
from parquet_keytools.errors import AadPrefixError, ConfigurationError
from parquet_keytools.kms.client import KEY_LENGTHS_BYTES, KmsSettings, StrictSettings
from parquet_keytools.kms.named import NAME, NamedKmsSettings, split_name, with_name
from parquet_keytools.kms.registry import client_class, known_names
from parquet_keytools.runtime.presentation import expanded, is_url
from parquet_keytools.secret_bytes import SecretBytes


class ConfigurationWarning(UserWarning):
    """The configuration is valid, but protects less than it may seem to."""


# --- types of fields ---


BROKEN_RULES = "broken_rules"
"""Type of the pydantic error for rules across several fields; it carries the mistakes."""

_PLACEHOLDERS = ("file_name", "table_name")


def _checked_identifier(text: str) -> str:
    # pyarrow gets identifiers percent-encoded, since `:`, `;` and `,` of ARNs separate names in its list of column
    # keys. An identifier that contains `%` would be ambiguous.
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
    # `Literal[1]` accepts True and 1.0, which are equal to 1.
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
            "template", "an AAD prefix must not contain NUL: parquet-keytools writes NUL to mark its end."
        )
    return text


def broken_rules(mistakes: list[Mistake]) -> PydanticCustomError:
    """Make the error of a validator across several fields. Paths begin at the model of the validator."""
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
    str,
    # A mapping may hold bytes.
    BeforeValidator(
        lambda value: BASE64 + strict_base64.encode(value) if value and isinstance(value, bytes) else value
    ),
    Field(min_length=1),
    AfterValidator(_checked_template),
]
Version = Annotated[Literal[1], BeforeValidator(_checked_whole_number)]
DeniedColumns = Annotated[
    Literal["error", "hide", "null", "hash"],
    # YAML reads an unquoted `null` as None.
    BeforeValidator(
        lambda value: "null" if value is None else value,
        json_schema_input_type=Literal["error", "hide", "null", "hash", None],
    ),
]
KeyLength = Annotated[Literal[128, 192, 256], BeforeValidator(_checked_whole_number)]


# --- classes and labels ---


class ClassSettings(StrictSettings):
    """How columns with a label are protected: an entry under `classes`."""

    key: KeyName | None = Field(description="Name of the key of these columns; null, or `plaintext`, for none.")
    denied: Literal["hash"] | None = Field(
        default=None,
        description="`hash` shows readers with this configuration digests instead of the values of columns with "
        "this label, and of all columns under this key.",
    )


Class = Annotated[
    ClassSettings,
    BeforeValidator(
        lambda value: {"key": None} if value == "plaintext" else value,
        json_schema_input_type=ClassSettings | Literal["plaintext"],
    ),
]


class FieldMetadata(StrictSettings):
    """Where labels are in the metadata of Arrow and Spark fields."""

    field: Text = Field(default="class", description="The name of the metadata entry that holds the label.")


class IcebergLabels(StrictSettings):
    """Where labels are in Iceberg tables, and which keys these may be under."""

    field: Text = Field(
        default="class",
        description="The name of the label in docs of fields, as in `[class: pii]`, and in properties of the "
        "table, as in `class.email = pii`.",
    )
    keys: tuple[KeyName, ...] = Field(
        default=(),
        description="Names of keys that the table may be under instead of the keys of its columns' classes. Its "
        "files are encrypted whole: a table with columns of several classes needs one.",
    )


_KINDS = ("arrow", "iceberg", "dbt", "contract", "csv", "columns")


class LabelSource(StrictSettings):
    """One place that labels of columns come from: an entry under `labels_from`. It has one kind."""

    arrow: FieldMetadata | None = Field(
        default=None,
        description="The metadata of the fields of Arrow and Spark schemas. Such labels give keys to columns, and "
        "take none away.",
    )
    iceberg: IcebergLabels | None = Field(
        default=None,
        description="Docs of fields, and properties, of the Iceberg table with the table's name. Such labels give "
        "keys to columns, and take none away.",
    )
    dbt: Text | None = Field(default=None, description="Path of dbt's manifest.json: meta and tags of columns.")
    contract: Text | None = Field(
        default=None,
        description="Path of a contract of the Open Data Contract Standard: classification and tags.",
    )
    csv: Text | None = Field(default=None, description="Path of a CSV file with the header `column,class`.")
    columns: dict[Text, Text] | None = Field(default=None, description="Dotted path of a column -> label.")
    name: Text | None = Field(
        default=None,
        description="Name of the dbt model, of the contract's schema, or of the Iceberg table; by default, of the "
        "table.",
    )
    field: Text = Field(default="class", description="The name of the entry of dbt's meta that holds the label.")
    places: dict[Text, Text] = Field(
        default={}, description="Dotted path of a column under columns -> where the label was found, for errors."
    )

    @property
    def kind(self) -> str:
        """The one kind that is set."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _check_rules(self) -> LabelSource:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise broken_rules([Mistake((), f"this needs one of {', '.join(_KINDS)}.")])
        return self


# --- tables ---


def _checked_pattern(text: str) -> str:
    try:
        matches_nothing = re.fullmatch(text, "") is not None
    except re.error as error:
        raise PydanticCustomError(
            "pattern", "this is not a regular expression: {reason}.", {"reason": str(error)}
        ) from None
    if matches_nothing:
        raise PydanticCustomError("pattern", "the pattern must not match the empty value.")
    return text


class KeyValueSettings(StrictSettings):
    """Where the values of a placeholder in names of keys come from: an entry under `key_values`."""

    source: Literal["partition", "argument", "column"] = Field(
        alias="from",
        description="`partition`: folders such as `tenant=acme` in the path of each file. `argument`: the caller, "
        "with key_values= or --set. `column`: the column of this name, which has one value in each file.",
    )
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_checked_pattern)] = Field(
        description="A regular expression that matches the whole of each allowed value."
    )


class TableSettings(StrictSettings):
    """The encryption settings of one table: an entry under `tables`."""

    footer_key: KeyName = Field(description="Name of the master key, or data key, of the footer.")
    column_keys: dict[KeyName, Annotated[tuple[Text, ...], Field(min_length=1)]] = Field(
        default={},
        description="Name of a key -> the columns that it encrypts: dotted paths of leaf columns, parents of "
        "nested columns, or globs with * and ?.",
    )
    key_values: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], KeyValueSettings] = Field(
        default={},
        description="Placeholder in names of this table's keys, such as `tenant` in `tenant-{tenant}` -> where "
        "its value comes from. Each value has a master key of its own.",
    )
    also_trusted: tuple[KeyName, ...] = Field(
        default=(),
        description="Names of keys that existing files of this table may use instead of any key of the table, "
        "such as keys from before a change of the table. New files do not use them.",
    )
    hash_key: KeyName | None = Field(
        default=None,
        description="Name under hash_keys of the secret for digests of this table's columns, for readers with "
        "`denied_columns: hash`. Equal values have equal digests in all tables with the same secret.",
    )
    shown_columns: tuple[Text, ...] = Field(
        default=(),
        description="Columns under column_keys whose values readers with `denied_columns: hash` see instead of "
        "digests: dotted paths, parents, or globs.",
    )
    unlisted_columns: Literal["plaintext", "footer_key", "error"] = Field(
        default="error",
        description="How to treat columns that no key lists: refuse to write until each is under column_keys or "
        "plaintext_columns, leave them in plaintext, or encrypt them with the footer's key.",
    )
    plaintext_columns: tuple[Text, ...] = Field(
        default=(),
        description="Columns that stay plaintext: dotted paths, parents, or globs.",
    )
    labels_from: tuple[LabelSource, ...] = Field(
        default=(),
        description="Where labels of columns come from, in the order in which they are consulted; a class under "
        "classes says what a label means. column_keys overrides labels.",
    )
    unlabelled: Text | None = Field(
        default=None,
        description="How to treat columns without a label that column_keys does not list: `error`, the default, "
        "or a class.",
    )
    plaintext_footer: StrictBool = Field(
        default=False,
        description="Sign the footer instead of encrypting it: tools without keys then read the schema and "
        "the plaintext columns.",
    )
    plaintext_footer_key_values: Literal["drop", "refuse"] = Field(
        default="drop",
        description="With plaintext_footer, how to treat key-value metadata that may hold values of encrypted "
        "columns (pandas, geo, and every key that is not known to describe the schema only): drop it with a "
        "warning, or refuse the file.",
    )
    plaintext_footer_keys: tuple[Text, ...] = Field(
        default=(), description="Keys of key-value metadata that a plaintext footer shows with their full values."
    )
    algorithm: Literal["AES_GCM_V1", "AES_GCM_CTR_V1"] = Field(
        default="AES_GCM_V1", description="AES_GCM_CTR_V1 does not authenticate page data: changes go undetected."
    )
    # The default matches pyarrow, whose KEKs always have 128 bits. AES-128 is not weak; 256 bits serve users whose
    # rules demand them.
    data_key_length_bits: KeyLength = Field(default=128, description="Length of the DEKs, in bits.")
    kek_length_bits: KeyLength | None = Field(
        default=None, description="Length of the KEKs, in bits; by default, the length of the DEKs."
    )
    double_wrapping: StrictBool = Field(
        default=True,
        description="Wrap DEKs with KEKs, and only KEKs with master keys, which needs far fewer KMS calls.",
    )
    key_material: Literal["internal", "external"] = Field(
        default="internal",
        description="Where to store key material: in the Parquet file, or in a JSON file beside it.",
    )
    aad_prefix: AadPrefixTemplate | None = Field(
        default=None,
        description="AAD prefix, which ties a file to its name: text with the placeholders {file_name} and "
        "{table_name}, or `base64:` and base64 of bytes. In the file it ends with NUL.",
    )
    store_aad_prefix: StrictBool = Field(
        default=True, description="Store the AAD prefix in the file; otherwise, readers must supply it."
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long KEKs for writing are kept, in seconds; 0 keeps none."
    )
    _labels: Labels = PrivateAttr(default_factory=Labels)

    @property
    def labels(self) -> Labels:
        """The labels of the table, which were read when the configuration was loaded."""
        return self._labels

    @property
    def effective_kek_length_bits(self) -> Literal[128, 192, 256]:
        """Length of the KEKs in bits."""
        return self.kek_length_bits or self.data_key_length_bits

    @property
    def treats_unlisted(self) -> Literal["plaintext", "footer_key", "key", "error"]:
        """How columns are treated that nothing lists and no label covers; `key` is the key of `unlabelled`."""
        if self._labels.unlabelled is None:
            return self.unlisted_columns
        return "plaintext" if self._labels.unlabelled.key is None else "key"

    @property
    def value_columns(self) -> list[str]:
        """The columns that give values to placeholders in names of keys."""
        return [name for name, values in self.key_values.items() if values.source == "column"]

    @property
    def has_templates(self) -> bool:
        """Whether names of keys have placeholders, so that the keys depend on the file."""
        return bool(self.key_values)

    def key_uses(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield path within the table and name of each key that encrypts new files."""
        yield ("footer_key",), self.footer_key
        for name in self.column_keys:
            yield ("column_keys", name), name
        for name in self._labels.keys:
            yield ("labels_from",), name

    def key_names(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield path within the table and name of each key for new or existing files."""
        yield from self.key_uses()
        for position, name in enumerate(self.also_trusted):
            yield ("also_trusted", position), name

    def rendered_aad_prefix(self, *, table_name: str, file_name: str) -> str | None:
        """Return the AAD prefix of a file in the form of `prefix_bytes`; None if the table has none."""
        if self.aad_prefix is None:
            return None
        return filled_prefix(
            self.aad_prefix, lambda template: template.format(table_name=table_name, file_name=file_name)
        )

    @model_validator(mode="after")
    def _check_rules(self) -> TableSettings:
        mistakes = list(self._listed_twice())
        for position, name in enumerate(self.also_trusted):
            if name in self.also_trusted[:position]:
                mistakes.append(Mistake(("also_trusted", position), f"the key {name!r} is listed twice."))
        if not self.store_aad_prefix and self.aad_prefix is None:
            mistakes.append(Mistake(("store_aad_prefix",), "there is no aad_prefix that could be stored."))
        if self.unlabelled is not None and not self.labels_from:
            mistakes.append(Mistake(("unlabelled",), "there are no labels_from."))
        if self.labels_from and "unlisted_columns" in self.model_fields_set:
            message = "with labels_from, `unlabelled` says what other columns are."
            mistakes.append(Mistake(("unlisted_columns",), message, "Set unlabelled to error, or to a class."))
        for kind in ("arrow", "iceberg"):
            if sum(getattr(source, kind) is not None for source in self.labels_from) > 1:
                mistakes.append(Mistake(("labels_from",), f"{kind} is listed twice."))
        if self.plaintext_columns and self.unlisted_columns != "error":
            message = "plaintext_columns needs `unlisted_columns: error`."
            mistakes.append(Mistake(("plaintext_columns",), message))
        if not self.plaintext_footer:
            mistakes += [
                Mistake((name,), "plaintext_footer is not set: an encrypted footer hides all metadata.")
                for name in ("plaintext_footer_key_values", "plaintext_footer_keys")
                if name in self.model_fields_set
            ]
        if self.shown_columns and self.hash_key is None:
            message = "shown_columns needs hash_key: without it, no columns are shown as digests."
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


# --- the whole configuration ---


class KeysWithoutMetadata(StrictSettings):
    """Data keys for files without key metadata."""

    footer: KeyName | None = Field(default=None, description="Name of the data key of the footer.")
    columns: dict[Text, KeyName] = Field(
        default={}, description="Dotted path of a column -> name of its data key."
    )


class HashKeySettings(StrictSettings):
    """The secret for digests that replace values, wrapped by a master key."""

    master_key: KeyName = Field(description="Name of the master key that wraps the secret.")
    wrapped_key: Text = Field(
        description="The secret of 32 bytes, wrapped by the KMS; `parquet-keytools hash-key` makes it."
    )


class ReadingSettings(StrictSettings):
    """Settings for reading files."""

    plaintext_files: Literal["reject", "allow"] = Field(
        default="reject",
        description="How to treat a plaintext file in place of an encrypted file: an attacker may have "
        "replaced it.",
    )
    ctr_files: Literal["allow", "reject"] = Field(
        default="allow",
        description="How to treat files encrypted with AES_GCM_CTR_V1, whose page data is not authenticated.",
    )
    reused_encryption_properties: Literal["reject", "allow"] = Field(
        default="reject",
        description="How to treat files of one folder that share data keys and file unique: copies, and files "
        "that pyarrow wrote with the same encryption properties.",
    )
    denied_columns: DeniedColumns = Field(
        default="error",
        description="How to treat columns whose keys the KMS refuses: raise an error when they are read, leave "
        "them out, or show nulls. Any other failure is always an error. With hash, refused columns are an error, "
        "and the other columns under column_keys are shown as keyed digests of their values.",
    )
    file_unique_lengths: Literal["exact", "any"] = Field(
        default="exact",
        description="Length of the file unique where an AAD prefix is expected: exactly 8 bytes, or any length, "
        "for files of other writers. With any, a table's prefix must not be the beginning of another prefix.",
    )
    max_footer_bytes: Annotated[int, Field(strict=True, gt=0)] = Field(
        default=64 * 1024 * 1024,
        description="Length of the longest footer that is read, in bytes. A reader holds a footer in memory, and "
        "anyone who can write to the storage can write one.",
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long unwrapped KEKs are kept for reading, in seconds; 0 keeps none."
    )
    keys_without_metadata: KeysWithoutMetadata = Field(
        default=KeysWithoutMetadata(), description="Data keys for files that carry no key metadata."
    )


class RotationSettings(StrictSettings):
    """Defaults for rotations."""

    moves: dict[KeyName, KeyName] = Field(
        default={},
        description="Name of a master key -> master key that replaces it. Keys under other master "
        "keys are then not re-wrapped.",
    )


class NamedMasterKey(StrictSettings):
    """A master key in one of several KMSs: an entry under `master_keys`."""

    kms: Text = Field(description="Name of the KMS under kms.")
    id: KeyName = Field(description="Identifier of the master key in this KMS.")


MasterKey = Annotated[
    Annotated[KeyName, Tag("text")] | Annotated[NamedMasterKey, Tag("mapping")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "mapping"),
]


class Configuration(StrictSettings):
    """A whole configuration; `load_configuration` makes it from a YAML file.

    A pickle of it holds no secrets: the worker process expands environment variables again, and reads literal
    secrets from the file again.
    """

    version: Version = Field(description="Version of the configuration format.")
    kms: SerializeAsAny[KmsSettings] | None = Field(
        default=None,
        description="The KMS that holds the master keys; or name -> KMS where there are several, and `default`, "
        "the name of the KMS of master keys and files that name none.",
    )
    master_keys: dict[KeyName, MasterKey] = Field(
        default={},
        description="Name of a master key -> its identifier in the KMS, where they differ; with several KMSs, "
        "`{kms: ..., id: ...}`.",
    )
    data_keys: dict[KeyName, DataKey] = Field(
        default={}, description="Data keys that the caller manages: name -> base64 of 16, 24 or 32 bytes."
    )
    hash_keys: dict[KeyName, HashKeySettings] = Field(
        default={}, description="Name -> secret for digests; tables name it as their hash_key."
    )
    classes: dict[Text, Class] = Field(
        default={}, description="Name of a class of columns, which labels name -> its key, or plaintext."
    )
    tables: dict[Text, TableSettings] = Field(default={}, description="Name of a table -> its settings.")
    reading: ReadingSettings = Field(default=ReadingSettings(), description="Settings for reading files.")
    rotation: RotationSettings = Field(default=RotationSettings(), description="Defaults for rotations.")
    _source: DocumentSource | None = PrivateAttr(default=None)

    @property
    def source(self) -> DocumentSource | None:
        """The document of the configuration, without its secrets; None if it was built in Python."""
        return self._source

    @property
    def folder(self) -> Path:
        """The folder in which relative paths start: the folder of the file, or the current folder."""
        return self._source.folder if self._source else Path.cwd()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about settings that protect less than they seem to; each with file, line and YAML path."""
        return tuple(str(self.error_for([mistake])) for mistake in self._doubts())

    @property
    def denied_columns(self) -> str:
        """What readers see of columns that are denied: `reading.denied_columns`, or `hash` if a class says so."""
        by_class = any(found.denied for found in self.classes.values())
        return "hash" if by_class else self.reading.denied_columns

    def template_of(self, master_key_id: str) -> str | None:
        """Return the template that gives this identifier for a value that its table allows; None if none does."""
        for table in self.tables.values():
            for _, name in table.key_names():
                for placeholder in placeholders(name):
                    template = self.master_key_id(name)
                    value = value_in(template, master_key_id)
                    if value is not None and is_value(table.key_values[placeholder].pattern, value):
                        return template
        return None

    def master_key_id(self, name: str) -> str:
        """Return the identifier of a master key, by its name under `master_keys` or the identifier itself.

        With several KMSs, identifiers begin with the name of the KMS, such as `eu::alias/pii`.

        Raises:
            ConfigurationError: It is in none of the KMSs.
        """
        identifier, mistake = self._master_key(name)
        if mistake is not None:
            raise self.error_for([mistake])
        return identifier

    def _master_key(self, name: str) -> tuple[str, Mistake | None]:
        """Return the identifier of a master key, and what is wrong with the entry that names it."""
        found = self.master_keys.get(name, name)
        path: YamlPath = ("master_keys", name) if name in self.master_keys else ("kms",)
        if not isinstance(self.kms, NamedKmsSettings):
            if isinstance(found, str):
                return found, None
            message = "there is one KMS, so a master key is the text of its identifier."
            return found.id, Mistake(path, message, "Several KMSs are under `kms`, each under its name.")
        if isinstance(found, str):
            kms, within = split_name(found)
            kms = self.kms.default if kms is None else kms
        else:
            path, kms, within = (*path, "kms"), found.kms, found.id
        if kms is None:
            message = f"the KMS of the master key {found!r} is not named, and there is no default."
            hint = "Write {kms: NAME, id: IDENTIFIER} under `master_keys`, or `default: NAME` under `kms`."
            return within, Mistake(path, message, hint)
        if kms not in self.kms.kmss:
            hint = did_you_mean(kms, self.kms.kmss) or one_of(self.kms.kmss)
            return within, Mistake(path, f"there is no KMS named {kms!r}.", hint)
        return with_name(kms, within), None

    def select_table(self, name: str | None = None) -> tuple[str, TableSettings]:
        """Return the name and settings of a table.

        Args:
            name: Name of the table; None selects the only table.

        Raises:
            ConfigurationError: The table does not exist, or no name is given and there is not exactly one.
        """
        if name is None:
            if len(self.tables) == 1:
                return next(iter(self.tables.items()))
            message = f"there are {len(self.tables)} tables, so a table name is required."
            hint = f"Use table_name=, or --table on the command line. {one_of(self.tables)}" if self.tables else ""
            raise self.error_for([Mistake(("tables",), message, hint)])
        if name not in self.tables:
            hint = did_you_mean(name, self.tables) or one_of(self.tables)
            raise self.error_for([Mistake(("tables",), f"there is no table {name!r}.", hint)])
        return name, self.tables[name]

    def table_of_files(self, name: str | None = None) -> str | None:
        """Return the name of the table for reading files; None if the configuration has no tables.

        Raises:
            ConfigurationError: The table does not exist, or the name is needed since there are several tables.
        """
        if name is None and not self.tables:
            return None
        return self.select_table(name)[0]

    def error_for(self, mistakes: Sequence[Mistake]) -> ConfigurationError:
        """Return one error that reports all mistakes, with file and lines if known."""
        if self._source:
            return self._source.error(mistakes)
        return configuration_error(mistakes, file=None, lines={})

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        mistakes = list(self._broken_rules())
        if mistakes:
            raise broken_rules(mistakes)
        return self

    def _broken_rules(self) -> Iterator[Mistake]:
        yield from self._impossible_keys()
        for name, table in self.tables.items():
            for mistake in chain(self._impossible_templates(table), self._impossible_settings(name, table)):
                yield replace(mistake, path=("tables", name, *mistake.path))
        if "error" in self.classes:
            yield Mistake(("classes", "error"), "no class can have this name, which `unlabelled` gives a meaning.")
        path = ("reading", "denied_columns")
        for name, found in self.classes.items():
            if found.denied and found.key is None:
                message = "columns in plaintext are not denied: a key is missing."
                yield Mistake(("classes", name, "denied"), message)
            if found.denied and self.reading.denied_columns in ("hide", "null"):
                message = f"`denied_columns: {self.reading.denied_columns}` contradicts the class {name!r}."
                yield Mistake(path, message, "Leave it out, or take `denied` out.")
        if self.denied_columns == "hash" and not self.tables:
            message = "only tables say which columns are shown as digests."
            yield Mistake(path, message, "Describe them under `tables:`.")
        if self.reading.file_unique_lengths == "any":
            templates = {name: table.aad_prefix for name, table in self.tables.items() if table.aad_prefix}
            for name, longer in prefixes_that_begin_another(templates):
                other = "of another file" if name == longer else f"of the table {longer!r}"
                yield Mistake(
                    ("tables", name, "aad_prefix"),
                    f"it may be the beginning of the prefix {other}, and with `file_unique_lengths: any` one file "
                    "could pass as the other.",
                    "End it with `/`, which file names do not contain, or leave file_unique_lengths at `exact`.",
                )

    def _impossible_keys(self) -> Iterator[Mistake]:
        """Yield names of keys that are in no KMS, or in two places, or of the wrong kind."""
        uses: list[tuple[YamlPath, str, str]] = []
        for table_name, table in self.tables.items():
            uses += [(("tables", table_name, *path), name, "") for path, name in table.key_names()]
        for name, hash_key in self.hash_keys.items() if self.kms is not None else ():
            use = ("hash_keys", name, "master_key")
            uses.append((use, hash_key.master_key, "master keys wrap secrets of digests."))
        moves = self.rotation.moves
        for old, new in moves.items():
            uses += [(("rotation", "moves", old), n, "a rotation moves between master keys.") for n in (old, new)]
        if self.kms is None:
            places: list[YamlPath] = [("master_keys",)] if self.master_keys else []
            places += [("hash_keys", name, "master_key") for name in self.hash_keys]
            places += [("rotation", "moves")] if moves else []
            yield from (Mistake(place, "there is no kms that could hold master keys.") for place in places)
        else:
            yield from filter(None, (self._master_key(name)[1] for name in self.master_keys))
        for name in self.data_keys:
            if name in self.master_keys:
                yield Mistake(("data_keys", name), "a master key under master_keys has this name too.")
        for path, name, no_data_key in uses:
            if name in self.data_keys and name not in self.master_keys:
                if no_data_key:
                    yield Mistake(path, f"{name!r} is a data key: {no_data_key}")
            elif name not in self.master_keys and (mistake := self._master_key(name)[1]):
                yield replace(mistake, path=path)
        identifiers = {name: self._master_key(name)[0] for move in moves.items() for name in move}
        targets = {identifiers[new] for new in moves.values()}
        for old, new in moves.items():
            path = ("rotation", "moves", old)
            if identifiers[old] == identifiers[new]:
                yield Mistake(path, "both names are the same master key.")
            elif identifiers[old] in targets:
                hint = "Do these moves in separate rotations, one after the other."
                yield Mistake(path, f"the master key {old!r} is to be moved and is the target of a move.", hint)
        given = self.reading.keys_without_metadata
        named: dict[YamlPath, str | None] = {("columns", column): name for column, name in given.columns.items()}
        for path, data_key in (named | {("footer",): given.footer}).items():
            if data_key is not None and data_key not in self.data_keys:
                hint = did_you_mean(data_key, self.data_keys)
                path = ("reading", "keys_without_metadata", *path)
                yield Mistake(path, f"no key under data_keys is named {data_key!r}.", hint)

    def _impossible_templates(self, table: TableSettings) -> Iterator[Mistake]:
        """Yield names of keys with impossible placeholders; paths begin at the table."""
        patterns = table.key_values.keys()
        paths = {name: path for path, name in table.key_names()}
        for name, path in paths.items():
            found = placeholders(name)
            identifier = self._master_key(name)[0] if name in self.master_keys else name
            if len(found) > 1:
                # Two values could otherwise give the key of two other values.
                yield Mistake(path, "the name of a key has at most one placeholder.")
            elif found and found[0] not in patterns:
                message = f"key_values does not say where the values of {{{found[0]}}} come from."
                yield Mistake(path, message)
            elif found and placeholders(identifier) != found:
                message = f"its identifier under master_keys needs the placeholder {{{found[0]}}}, once."
                yield Mistake(path, message)
            if found and name in self.data_keys:
                yield Mistake(path, "data keys have no placeholders: templates name master keys.")
        for unused in patterns - set(chain.from_iterable(map(placeholders, paths))):
            message = f"no key of the table has the placeholder {{{unused}}} in its name."
            yield Mistake(("key_values", unused), message)
        if any(map(placeholders, table.labels.keys)):
            yield Mistake(("labels_from",), "keys of classes have no placeholders.", "Use column_keys.")

    def _impossible_settings(self, name: str, table: TableSettings) -> Iterator[Mistake]:
        """Yield settings of a table that contradict other parts; paths begin at the table."""
        if table.labels_from and not self.classes:
            message = "there are no classes, which say what labels mean."
            yield Mistake(("labels_from",), message, "Describe them under `classes:`.")
        if table.unlabelled not in (None, "error", *self.classes):
            hint = did_you_mean(str(table.unlabelled), self.classes) or one_of(self.classes)
            yield Mistake(("unlabelled",), f"there is no class {table.unlabelled!r}.", hint)
        if table.hash_key is None and self.denied_columns == "hash":
            hint = one_of(self.hash_keys) or "`parquet-keytools hash-key` makes one."
            yield Mistake((), "with `denied_columns: hash` each table needs a hash_key.", hint)
        elif table.hash_key is not None and table.hash_key not in self.hash_keys:
            hint = did_you_mean(table.hash_key, self.hash_keys) or one_of(self.hash_keys)
            yield Mistake(("hash_key",), f"no secret under hash_keys is named {table.hash_key!r}.", hint)
        prefix = table.aad_prefix or BASE64
        if not prefix.startswith(BASE64) and "\0" in prefix.format(table_name=name, file_name=""):
            yield Mistake((), "an AAD prefix must not contain NUL, but the name of the table does.")

    def _doubts(self) -> Iterator[Mistake]:
        if self._source is not None and self._source.exposed_to and (secrets := self._source.redacted_paths):
            message = f"this secret is in the file itself, which {self._source.exposed_to} may read."
            hint = "Put it into an environment variable or a separate file, or run chmod 600 on this file."
            yield Mistake(secrets[0], message, hint)
        yield from self._exposed_files()
        for name, table in self.tables.items():
            if table.algorithm == "AES_GCM_CTR_V1":
                message = "page data is not authenticated: changes to encrypted values go undetected."
                yield Mistake(("tables", name, "algorithm"), message, "AES_GCM_V1 protects it.")
            if not table.column_keys and table.unlisted_columns != "footer_key" and not table.labels_from:
                what = "nothing is encrypted" if table.plaintext_footer else "only the footer is encrypted"
                if table.unlisted_columns == "error" and not table.plaintext_columns:
                    what = "no column can be written"
                message = f"{what}: there are no column_keys, and unlisted_columns is {table.unlisted_columns}."
                yield Mistake(("tables", name), message)

    def _exposed_files(self) -> Iterator[Mistake]:
        for names, setting in (self.kms.secret_files() if self.kms else {}).items():
            try:
                file = self.folder / expanded(setting)
                others = exposed_to(file.stat())
            except OSError:
                # The KMS client reports this when it needs the secret.
                continue
            if others:
                message = f"the file {file} holds a secret, and {others} may read it."
                yield Mistake(("kms", *names), message, f"Run: chmod 600 {shlex.quote(str(file))}")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy. A copy with updates cannot be pickled, since its document does not contain them."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._source = None
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Imported here, since loader.py imports this module.
        from parquet_keytools.config.loader import portable_source, restore_configuration

        return restore_configuration, (portable_source(self, "pickled"),)


# --- keys by template ---

# `tenant-{tenant}` names one master key for each value of `tenant`. A value becomes part of a master key's
# identifier, and folders and arguments are not authenticated. So a value is used only if the table's pattern
# matches all of it, and only in a template of the configuration.

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NEVER_IN_VALUES = re.compile(r"[%{}\x00-\x1f\x7f-\x9f]|__HIVE_DEFAULT_PARTITION__")
_SEPARATOR = re.compile(r"[/\\]")
_DOTS = {".", ".."}
"""A part of a path that a server may resolve, so that the identifier names another key."""


def placeholders(text: str) -> list[str]:
    """Return the placeholders of a key's name or identifier, in order."""
    return _PLACEHOLDER.findall(text)


def with_value(template: str, value: str) -> str:
    """Return a template whose placeholder is replaced by a value."""
    return _PLACEHOLDER.sub(lambda _: value, template)


def is_value(pattern: str, value: str) -> bool:
    """Return whether a pattern allows a value: it matches all of it, and keys can have such a name."""
    if _NEVER_IN_VALUES.search(value) or not _DOTS.isdisjoint(_SEPARATOR.split(value)):
        return False
    return re.fullmatch(pattern, value) is not None


def alike(identifier: str) -> str:
    """Return the same text for identifiers that differ only in case or Unicode form, which some KMSs ignore."""
    return unicodedata.normalize("NFKC", identifier).casefold()


def value_in(template: str, master_key_id: str) -> str | None:
    """Return the value with which a template gives an identifier; None if no value does."""
    before, after = _PLACEHOLDER.sub("\0", template).split("\0")
    if not master_key_id.startswith(before) or not master_key_id.endswith(after):
        return None
    return master_key_id[len(before) : len(master_key_id) - len(after)] or None


def values_in_folders(path: str, placeholder: str) -> set[str]:
    """Return the values that the folders of a path, or URL, give to a placeholder, such as `tenant=acme`.

    Readers differ in the case of names and in what they decode, so every reading counts: one that differs makes
    the value ambiguous. The path is used without following links.
    """
    text = path.partition("?")[0] if is_url(path) else path
    found: set[str] = set()
    while True:
        decoded = unquote(text)
        for folder in _SEPARATOR.split(text)[:-1]:
            name, mark, value = folder.partition("=")
            if mark and unquote(name).lower() == placeholder.lower():
                # As Arrow and Spark write it: percent-encoded once.
                found.add(unquote(value))
        if decoded == text:
            return found
        text = decoded


def one_value(values: Iterable[str], pattern: str) -> str | None:
    """Return the only one of some values if the pattern allows it; None otherwise."""
    found = set(values)
    value = found.pop() if len(found) == 1 else None
    return value if value is not None and is_value(pattern, value) else None


# --- AAD prefixes that begin another ---


_NAME = chr(256)
"""Stands for a file name in a template: one or more characters other than `/` and NUL."""


def prefixes_that_begin_another(templates: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tables in which an AAD prefix of the first can begin a longer prefix of the second.

    If the file unique has no fixed length, these are ambiguous; so are `part-1` and `part-10` of one table.
    """
    parsed = {name: _parsed(template, name) for name, template in templates.items()}
    for one, other in itertools.product(parsed, repeat=2):
        if _can_begin(parsed[one], parsed[other]):
            yield one, other


def _parsed(template: str, table_name: str) -> str:
    """Return a template with a character for each byte, and `_NAME` for each file name."""
    if template.startswith(BASE64):
        return prefix_bytes(template).decode("latin-1")
    rendered = template.format(table_name=table_name, file_name="\0")
    return rendered.encode().decode("latin-1").replace("\0", _NAME)


def _can_begin(one: str, other: str) -> bool:
    """Return whether a rendering of `one` can be the beginning of a longer rendering of `other`.

    Both are read in parallel, character by character. If a template has the name twice, each occurrence counts as
    independent, which errs on the safe side.
    """
    waiting = [(0, 0)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        place = first, second = waiting.pop()
        if first == len(one) and second < len(other):
            return True
        if place in seen or first == len(one) or second == len(other):
            continue
        seen.add(place)
        characters = {one[first], other[second]}
        if len(characters) == 1 or (_NAME in characters and characters.isdisjoint("/\0")):
            # A name may continue.
            next_first = (first, first + 1) if one[first] == _NAME else (first + 1,)
            next_second = (second, second + 1) if other[second] == _NAME else (second + 1,)
            waiting += itertools.product(next_first, next_second)
    return False


# --- the JSON Schema ---


_ABOUT = {
    "title": "parquet-keytools",
    "description": "Which column of which table is protected by which key. In texts, ${NAME} stands for an "
    "environment variable.",
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def configuration_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a whole configuration.

    It has the fields of installed KMS clients by `type`, and accepts any other type. Rules across several fields
    are not checked.
    """
    models: dict[str, type[KmsSettings]] = {}
    for kms in known_names():
        # Treat a client that cannot be imported like a plug-in on another machine.
        with suppress(ConfigurationError):
            models[kms] = client_class(kms).Settings
    references, shared = models_json_schema(
        [(Configuration, "validation"), *((model, "validation") for model in models.values())]
    )
    definitions: dict[str, Any] = shared["$defs"]
    schema = definitions.pop("Configuration")
    definitions["Kms"] = _kms_schema({name: references[model, "validation"] for name, model in models.items()})
    schema["properties"]["kms"] = _kmss_schema(description=schema["properties"]["kms"]["description"])
    for name in ("KmsSettings", "NamedKmsSettings"):
        definitions.pop(name, None)
    return {"$schema": DIALECT, **schema, **_ABOUT, "$defs": definitions}


def _kms_schema(variants: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that selects by `type`, with `if` and `then` so that editors name the wrong field."""
    return {
        "type": "object",
        "properties": {
            "type": {
                "description": "Name of the KMS client.",
                "type": "string",
                "anyOf": [{"enum": sorted(variants)}, {}],
            }
        },
        "required": ["type"],
        "allOf": [
            {
                "if": {"type": "object", "properties": {"type": {"const": name}}, "required": ["type"]},
                "then": variant,
            }
            for name, variant in variants.items()
        ],
    }


def _kmss_schema(*, description: str) -> dict[str, Any]:
    """Return the schema of one KMS, or where there is no `type`, of several, each under its name."""
    kms = {"$ref": "#/$defs/Kms"}
    return {
        "description": description,
        "type": ["object", "null"],
        "if": {"type": "object", "required": ["type"]},
        "then": kms,
        "else": {
            "if": {"properties": {"default": {}}, "additionalProperties": {"type": "object"}},
            "then": {
                "properties": {"default": {"description": "The KMS where none is named.", "type": "string"}},
                "patternProperties": {f"^(?!default$){NAME.pattern}$": kms},
                "additionalProperties": False,
            },
            "else": {"required": ["type"]},
        },
    }
