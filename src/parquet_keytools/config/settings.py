"""What a configuration says, typed and validated. Instances are frozen and may be shared by threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, SerializeAsAny, StrictBool, model_validator

from parquet_keytools.config.document_source import DocumentSource, Redacted
from parquet_keytools.config.field_types import (
    DataKey,
    KeyName,
    Seconds,
    Settings,
    Text,
    Version,
    broken_rules,
)
from parquet_keytools.config.mistakes import (
    Mistake,
    YamlPath,
    configuration_error,
    did_you_mean,
    one_of,
    yaml_path_text,
)
from parquet_keytools.config.table_settings import TableSettings
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsSettings

__all__ = [
    "Configuration",
    "ConfigurationWarning",
    "KeysWithoutMetadata",
    "ReadingSettings",
    "RotationSettings",
    "TableSettings",
]


class ConfigurationWarning(UserWarning):
    """The configuration is legal, but protects less than one may think."""


class KeysWithoutMetadata(Settings):
    """Data keys for files that do not say which keys they need."""

    footer: KeyName | None = Field(default=None, description="Name of the data key of the footer.")
    columns: dict[Text, KeyName] = Field(
        default={}, description="Dotted path of a column to the name of its data key."
    )


class ReadingSettings(Settings):
    """How files are read."""

    plaintext_files: Literal["reject", "allow"] = Field(
        default="reject",
        description="What happens where a plaintext file lies in place of an encrypted one, as an attacker "
        "may put it there.",
    )
    ctr_files: Literal["allow", "reject"] = Field(
        default="allow",
        description="What happens to files of AES_GCM_CTR_V1, whose page data is not authenticated.",
    )
    denied_columns: Literal["error", "hide"] = Field(
        default="error",
        description="What happens to columns whose keys the KMS refuses. Whatever else fails is always an error.",
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long unwrapped KEKs are kept for reading, in seconds; 0 keeps none."
    )
    keys_without_metadata: KeysWithoutMetadata = Field(
        default=KeysWithoutMetadata(), description="Data keys for files that carry no key metadata."
    )


class RotationSettings(Settings):
    """What a rotation does unless it is told otherwise."""

    moves: dict[KeyName, KeyName] = Field(
        default={},
        description="Name of a master key to the one of the same KMS that takes its place. Then other master keys "
        "stay as they are.",
    )
    keep_old: StrictBool = Field(
        default=False, description="Keep the old keys beside the files, so that the rotation can be undone."
    )


class Configuration(Settings):
    """A whole configuration; `load_configuration` makes it from a YAML file.

    It pickles without its secrets, for worker processes: there environment variables are expanded anew, and
    secrets that stand in the file are read from the file again.
    """

    version: Version = Field(description="Version of this form of configuration.")
    kms: SerializeAsAny[KmsSettings] | None = Field(
        default=None, description="The KMS that holds the master keys."
    )
    master_keys: dict[KeyName, KeyName] = Field(
        default={}, description="Name of a master key to its identifier in the KMS, where they differ."
    )
    data_keys: dict[KeyName, DataKey] = Field(
        default={}, description="Data keys that the caller manages: name to base64 of 16, 24 or 32 bytes."
    )
    tables: dict[Text, TableSettings] = Field(default={}, description="Name of a table to its settings.")
    reading: ReadingSettings = Field(default=ReadingSettings(), description="How files are read.")
    rotation: RotationSettings = Field(
        default=RotationSettings(), description="What a rotation does unless it is told otherwise."
    )

    _source: DocumentSource | None = PrivateAttr(default=None)

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
            message = f"there are {len(self.tables)} tables, so the one that is meant has to be named."
            raise self.error_for([Mistake(("tables",), message, one_of(self.tables))])
        if name not in self.tables:
            hint = did_you_mean(name, self.tables) or one_of(self.tables)
            raise self.error_for([Mistake(("tables",), f"there is no table {name!r}.", hint)])
        return name, self.tables[name]

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
        yield from self._impossible_moves()

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
        for name, table in self.tables.items():
            if table.algorithm == "AES_GCM_CTR_V1":
                message = "page data is not authenticated: whoever changes encrypted values goes unnoticed."
                yield Mistake(("tables", name, "algorithm"), message, "AES_GCM_V1 protects it.")
            if not table.column_keys and table.unlisted_columns == "plaintext":
                what = "nothing is encrypted" if table.plaintext_footer else "only the footer is encrypted"
                message = f"{what}: there are no column_keys, and unlisted_columns is plaintext."
                yield Mistake(("tables", name), message)

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
                hint="Say under `kms:` in the configuration how to make the client.",
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
