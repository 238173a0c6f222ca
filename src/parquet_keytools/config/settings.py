"""What a configuration says, typed and validated, and as a JSON Schema for editors.

Instances are frozen and may be shared by threads.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, SerializeAsAny, StrictBool, model_validator
from pydantic.json_schema import models_json_schema

from parquet_keytools.config.document import (
    DocumentSource,
    Mistake,
    Redacted,
    YamlPath,
    configuration_error,
    did_you_mean,
    one_of,
    yaml_path_text,
)
from parquet_keytools.config.table_settings import (
    DataKey,
    DeniedColumns,
    KeyName,
    Seconds,
    TableSettings,
    Text,
    Version,
    broken_rules,
    prefixes_that_begin_another,
)
from parquet_keytools.encryption.aad import BASE64
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsSettings
from parquet_keytools.kms.contract import StrictSettings
from parquet_keytools.kms.registry import client_class, known_names
from parquet_keytools.runtime.presentation import expanded

__all__ = [
    "Configuration",
    "ConfigurationWarning",
    "HashKeySettings",
    "KeysWithoutMetadata",
    "ReadingSettings",
    "RotationSettings",
    "TableSettings",
]


class ConfigurationWarning(UserWarning):
    """The configuration is legal, but protects less than one may think."""


class KeysWithoutMetadata(StrictSettings):
    """Data keys for files that do not say which keys they need."""

    footer: KeyName | None = Field(default=None, description="Name of the data key of the footer.")
    columns: dict[Text, KeyName] = Field(
        default={}, description="Dotted path of a column to the name of its data key."
    )


class HashKeySettings(StrictSettings):
    """The secret of digests that are shown in place of values, wrapped by a master key."""

    master_key: KeyName = Field(description="Name of the master key that wraps the secret.")
    wrapped_key: Text = Field(
        description="The secret of 32 bytes as the KMS wrapped it; `parquet-keytools hash-key` makes one."
    )


class ReadingSettings(StrictSettings):
    """How files are read."""

    plaintext_files: Literal["reject", "allow"] = Field(
        default="reject",
        description="What happens where a plaintext file lies in place of an encrypted one, as an attacker "
        "may put it there.",
    )
    ctr_files: Literal["allow", "reject"] = Field(
        default="allow",
        description="What happens to files encrypted with AES_GCM_CTR_V1, whose page data is not authenticated.",
    )
    reused_encryption_properties: Literal["reject", "allow"] = Field(
        default="reject",
        description="What happens to files of one folder that share data keys and file unique: those that pyarrow "
        "wrote with one and the same encryption properties, and copies.",
    )
    denied_columns: DeniedColumns = Field(
        default="error",
        description="What happens to columns whose keys the KMS refuses: reading them is an error, they are left "
        "out, or their values are null. Any other failure is always an error. With hash, refused columns are an "
        "error, and the other columns under column_keys are shown as keyed digests of their values.",
    )
    file_unique_lengths: Literal["exact", "any"] = Field(
        default="exact",
        description="Lengths of the file unique where an AAD prefix is expected: exactly 8 bytes, or any, for "
        "files of writers that use others. With any, no prefix of a table may be the beginning of another.",
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long unwrapped KEKs are kept for reading, in seconds; 0 keeps none."
    )
    keys_without_metadata: KeysWithoutMetadata = Field(
        default=KeysWithoutMetadata(), description="Data keys for files that carry no key metadata."
    )


class RotationSettings(StrictSettings):
    """Defaults of rotations."""

    moves: dict[KeyName, KeyName] = Field(
        default={},
        description="Name of a master key to the one of the same KMS that replaces it. Keys under other master "
        "keys then stay.",
    )
    keep_old: StrictBool = Field(
        default=False, description="Keep the old keys beside the files, so that the rotation can be undone."
    )


class Configuration(StrictSettings):
    """A whole configuration; `load_configuration` makes it from a YAML file.

    It pickles without its secrets, for worker processes: there environment variables are expanded again, and
    secrets that stand in the file are read from the file again.
    """

    version: Version = Field(description="Version of the configuration format.")
    kms: SerializeAsAny[KmsSettings] | None = Field(
        default=None, description="The KMS that holds the master keys."
    )
    master_keys: dict[KeyName, KeyName] = Field(
        default={}, description="Name of a master key to its identifier in the KMS, where they differ."
    )
    data_keys: dict[KeyName, DataKey] = Field(
        default={}, description="Data keys that the caller manages: name to base64 of 16, 24 or 32 bytes."
    )
    hash_keys: dict[KeyName, HashKeySettings] = Field(
        default={}, description="Name to a secret for digests, with which tables name it as their hash_key."
    )
    tables: dict[Text, TableSettings] = Field(default={}, description="Name of a table to its settings.")
    reading: ReadingSettings = Field(default=ReadingSettings(), description="How files are read.")
    rotation: RotationSettings = Field(default=RotationSettings(), description="Defaults of rotations.")

    _source: DocumentSource | None = PrivateAttr(default=None)

    @property
    def source(self) -> DocumentSource | None:
        """The document that it was made from, without its secrets; None where it was put together in Python."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where relative paths in the configuration start: the folder of its file, or the current one."""
        return self._source.folder if self._source else Path.cwd()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal but protects less than one may think; each with file, line and YAML path."""
        return tuple(str(self.error_for([mistake])) for mistake in self._doubts())

    def select_table(self, name: str | None = None) -> tuple[str, TableSettings]:
        """Return the name and settings of a table; the name may be left out where there is only one.

        Raises:
            ConfigurationError: There is no such table, or not exactly one to choose from.
        """
        if name is None:
            if len(self.tables) == 1:
                return next(iter(self.tables.items()))
            message = f"there are {len(self.tables)} tables, so name the one that you mean."
            hint = f"Use table_name=, or --table on the command line. {one_of(self.tables)}" if self.tables else ""
            raise self.error_for([Mistake(("tables",), message, hint)])
        if name not in self.tables:
            hint = did_you_mean(name, self.tables) or one_of(self.tables)
            raise self.error_for([Mistake(("tables",), f"there is no table {name!r}.", hint)])
        return name, self.tables[name]

    def table_of_files(self, name: str | None = None) -> str | None:
        """Return the name of the table that files to be read are of; None where there are no tables at all.

        Raises:
            ConfigurationError: There is no such table, or several to choose from.
        """
        if name is None and not self.tables:
            return None
        return self.select_table(name)[0]

    def error_for(self, mistakes: Sequence[Mistake]) -> ConfigurationError:
        """Make the one error that reports all mistakes, with file and lines where these are known."""
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
        if self.master_keys and self.kms is None:
            yield Mistake(("master_keys",), "there is no kms that could hold master keys.")
        for name in self.data_keys:
            if name in self.master_keys:
                yield Mistake(("data_keys", name), "a master key under master_keys has this name too.")
        path: YamlPath = ("reading", "keys_without_metadata")
        without_metadata = self.reading.keys_without_metadata
        uses: list[tuple[YamlPath, str]] = [
            ((*path, "columns", column), name) for column, name in without_metadata.columns.items()
        ]
        if without_metadata.footer is not None:
            uses.append(((*path, "footer"), without_metadata.footer))
        for use, name in uses:
            if name not in self.data_keys:
                hint = did_you_mean(name, self.data_keys)
                yield Mistake(use, f"no key under data_keys is named {name!r}.", hint)
        yield from self._impossible_digests()
        yield from self._ambiguous_prefixes()
        yield from self._impossible_moves()

    def _impossible_digests(self) -> Iterator[Mistake]:
        for name, hash_key in self.hash_keys.items():
            path: YamlPath = ("hash_keys", name, "master_key")
            if self.kms is None:
                yield Mistake(path, "there is no kms that could hold master keys.")
            elif hash_key.master_key in self.data_keys and hash_key.master_key not in self.master_keys:
                yield Mistake(path, f"{hash_key.master_key!r} is a data key: master keys wrap secrets of digests.")
        shows_digests = self.reading.denied_columns == "hash"
        if shows_digests and not self.tables:
            message = "without tables nothing says which columns are shown as digests."
            yield Mistake(("reading", "denied_columns"), message, "Describe them under `tables:`.")
        for name, table in self.tables.items():
            if table.hash_key is None and shows_digests:
                message = "with `denied_columns: hash` each table needs a hash_key."
                hint = one_of(self.hash_keys) or "`parquet-keytools hash-key` makes one."
                yield Mistake(("tables", name), message, hint)
            elif table.hash_key is not None and table.hash_key not in self.hash_keys:
                hint = did_you_mean(table.hash_key, self.hash_keys) or one_of(self.hash_keys)
                message = f"no secret under hash_keys is named {table.hash_key!r}."
                yield Mistake(("tables", name, "hash_key"), message, hint)

    def _ambiguous_prefixes(self) -> Iterator[Mistake]:
        templates = {name: table.aad_prefix for name, table in self.tables.items() if table.aad_prefix is not None}
        for name, template in templates.items():
            if not template.startswith(BASE64) and "\0" in template.format(table_name=name, file_name=""):
                yield Mistake(("tables", name), "an AAD prefix contains no NUL, and the name of the table does.")
        if self.reading.file_unique_lengths != "any":
            return
        for name, longer in prefixes_that_begin_another(templates):
            other = "of another file" if name == longer else f"of the table {longer!r}"
            yield Mistake(
                ("tables", name, "aad_prefix"),
                f"it may be the beginning of the prefix {other}, and with `file_unique_lengths: any` one file "
                "could be presented as the other.",
                "End it with `/`, which no name of a file contains; or leave file_unique_lengths at `exact`.",
            )

    def _impossible_moves(self) -> Iterator[Mistake]:
        moves = self.rotation.moves
        if moves and self.kms is None:
            yield Mistake(("rotation", "moves"), "there is no kms that could hold master keys.")
        targets = {self.master_keys.get(new, new) for new in moves.values()}
        for old, new in moves.items():
            path = ("rotation", "moves", old)
            for name in (old, new):
                if name in self.data_keys and name not in self.master_keys:
                    yield Mistake(path, f"{name!r} is a data key: a rotation moves between master keys.")
            if self.master_keys.get(old, old) == self.master_keys.get(new, new):
                yield Mistake(path, "both names are the same master key.")
            elif self.master_keys.get(old, old) in targets:
                hint = "Do these moves in rotations of their own, one after the other."
                yield Mistake(path, f"the master key {old!r} is to be moved and is the target of a move.", hint)

    def _doubts(self) -> Iterator[Mistake]:
        if self._source is not None and self._source.exposed_to and (secrets := self._source.redacted_paths):
            message = f"this secret is in the file itself, which {self._source.exposed_to} may read."
            hint = "Put it into an environment variable or a file of its own, or run: chmod 600 on this file."
            yield Mistake(secrets[0], message, hint)
        yield from self._exposed_files()
        for name, table in self.tables.items():
            if table.algorithm == "AES_GCM_CTR_V1":
                message = "page data is not authenticated: changes to encrypted values go undetected."
                yield Mistake(("tables", name, "algorithm"), message, "AES_GCM_V1 protects it.")
            if not table.column_keys and table.unlisted_columns != "footer_key":
                what = "nothing is encrypted" if table.plaintext_footer else "only the footer is encrypted"
                message = f"{what}: there are no column_keys, and unlisted_columns is {table.unlisted_columns}."
                yield Mistake(("tables", name), message)

    def _exposed_files(self) -> Iterator[Mistake]:
        # Imported here, for loader.py makes configurations.
        from parquet_keytools.config.loader import exposed_to

        for names, setting in (self.kms.secret_files() if self.kms else {}).items():
            try:
                file = self.folder / expanded(setting)
                others = exposed_to(file.stat())
            except OSError:
                # The KMS client reports it when it needs the secret.
                continue
            if others:
                message = f"the file {file} holds a secret, and {others} may read it."
                yield Mistake(("kms", *names), message, f"Run: chmod 600 {shlex.quote(str(file))}")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; one with updates does not pickle, for its document says something else."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._source = None
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Imported here, for loader.py makes configurations.
        from parquet_keytools.config.loader import restore_configuration

        if self._source is None:
            raise ConfigurationError(
                "a configuration that was put together in Python cannot be pickled.",
                hint="Make it with load_configuration, or with parse_configuration from a mapping.",
            )
        if self._source.document.get("kms") is Redacted.SECRET:
            raise ConfigurationError(
                "a configuration that was made for a KMS client in this process cannot be pickled.",
                hint="Describe the KMS under `kms:` in the configuration instead.",
            )
        redacted = self._source.redacted_paths
        if redacted and self._source.path is None:
            places = ", ".join(map(yaml_path_text, redacted))
            raise ConfigurationError(
                f"the configuration holds secrets itself, which must not be pickled: {places}.",
                hint="Put each into an environment variable and write ${NAME} in its place, or load the "
                "configuration from a YAML file that every worker can read.",
            )
        return restore_configuration, (self._source,)


_ABOUT = {
    "title": "parquet-keytools",
    "description": "Which column of which table is protected by which key. In texts, ${NAME} stands for an "
    "environment variable.",
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def configuration_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a whole configuration.

    By their `type` it knows the fields of all KMS clients that are installed; any other type may be a plug-in
    of another machine, whose fields it does not check. Rules over several fields are beyond it.
    """
    settings = _installed_settings()
    references, shared = models_json_schema(
        [(Configuration, "validation"), *((model, "validation") for model in settings.values())]
    )
    definitions: dict[str, Any] = shared["$defs"]
    schema = definitions.pop("Configuration")
    schema["properties"]["kms"] = _kms_schema(
        {name: references[model, "validation"] for name, model in settings.items()},
        description=schema["properties"]["kms"]["description"],
    )
    definitions.pop("KmsSettings", None)
    return {"$schema": DIALECT, **schema, **_ABOUT, "$defs": definitions}


def _installed_settings() -> dict[str, type[KmsSettings]]:
    settings = {}
    for name in known_names():
        try:
            settings[name] = client_class(name).Settings
        except ConfigurationError:
            # It is there but cannot be imported: then it is like a plug-in of another machine.
            continue
    return settings


def _kms_schema(variants: dict[str, Any], *, description: str) -> dict[str, Any]:
    """Return a schema that chooses by `type`; with if and then, editors name the one field that is wrong."""
    return {
        "description": description,
        "type": ["object", "null"],
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
