"""How one table is encrypted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from parquet_keytools.config.field_types import (
    AadPrefixTemplate,
    KeyLength,
    KeyName,
    Seconds,
    Settings,
    Text,
    broken_rules,
)
from parquet_keytools.config.mistakes import Mistake, YamlPath


class TableSettings(Settings):
    """How one table is encrypted: an entry under `tables`."""

    footer_key: KeyName = Field(description="Name of the master key, or data key, of the footer.")
    column_keys: dict[KeyName, Annotated[tuple[Text, ...], Field(min_length=1)]] = Field(
        default={},
        description="Name of a key to the columns under it: dotted paths of leaf columns, parents of nested "
        "columns, or globs with * and ?.",
    )
    unlisted_columns: Literal["plaintext", "footer_key"] = Field(
        default="plaintext", description="What happens to columns that no key lists."
    )
    plaintext_footer: StrictBool = Field(
        default=False,
        description="Sign the footer instead of encrypting it: tools without keys then read the schema and "
        "the plaintext columns.",
    )
    algorithm: Literal["AES_GCM_V1", "AES_GCM_CTR_V1"] = Field(
        default="AES_GCM_V1",
        description="AES_GCM_CTR_V1 does not authenticate page data: changes of it go unnoticed.",
    )
    # 128 is what pyarrow does throughout: its KEKs always have 128 bits, whatever the DEKs have. AES-128 is
    # not weak; 256 bits are for those whose rules ask for them.
    data_key_length_bits: KeyLength = Field(default=128, description="Length of the DEKs, in bits.")
    kek_length_bits: KeyLength | None = Field(
        default=None,
        description="Length of the KEKs, in bits; that of the DEKs where it is not set.",
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
        "stand for these.",
    )
    store_aad_prefix: StrictBool = Field(
        default=True,
        description="Store the AAD prefix in the file; where not, readers must supply it.",
    )
    cache_lifetime_seconds: Seconds = Field(
        default=600, description="How long KEKs for writing are kept, in seconds; 0 keeps none."
    )

    @property
    def effective_kek_length_bits(self) -> Literal[128, 192, 256]:
        """Length of the KEKs, in bits."""
        return self.kek_length_bits or self.data_key_length_bits

    def key_uses(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield each use of a key: its path within the table, and the key's name."""
        yield ("footer_key",), self.footer_key
        for name in self.column_keys:
            yield ("column_keys", name), name

    def rendered_aad_prefix(self, *, table_name: str, file_name: str) -> str | None:
        """Return the AAD prefix of one file, or None where the table has none."""
        if self.aad_prefix is None:
            return None
        return self.aad_prefix.format(table_name=table_name, file_name=file_name)

    @model_validator(mode="after")
    def _check_rules(self) -> TableSettings:
        mistakes = list(self._listed_twice())
        if not self.store_aad_prefix and self.aad_prefix is None:
            mistakes.append(Mistake(("store_aad_prefix",), "there is no aad_prefix that could be stored."))
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
