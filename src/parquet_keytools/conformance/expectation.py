"""What is expected of a file beyond the specification: by its configuration, or by whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parquet_keytools.encryption.footer_columns import ColumnEncryption
from parquet_keytools.encryption.footer_modes import Algorithm
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS


@dataclass(frozen=True)
class ExpectedColumn:
    """What a table wants of a column.

    Attributes:
        encryption: What it is to be encrypted with.
        key_name: Identifier of its master key, or id of its data key; None where it has no key of its own.
    """

    encryption: ColumnEncryption
    key_name: str | None = None


@dataclass(frozen=True)
class ExpectedTable:
    """What a table wants of a file with a certain schema.

    Attributes:
        footer_key_name: Identifier of the footer's master key, or id of its data key.
        columns: Leaf path -> what is wanted of it.
        algorithm: The algorithm.
        plaintext_footer: Whether the footer may be in plaintext.
        dek_lengths_bits: Identifier of a master key -> the least length of DEKs under it.
        stores_aad_prefix: Whether the AAD prefix may be stored.
    """

    footer_key_name: str
    columns: Mapping[tuple[str, ...], ExpectedColumn]
    algorithm: Algorithm
    plaintext_footer: bool
    dek_lengths_bits: Mapping[str, int] = field(default_factory=dict)
    stores_aad_prefix: bool = True


@dataclass(frozen=True)
class Expectation:
    """What is expected of one file.

    Attributes:
        aad_prefix: The AAD prefix that it must have; None takes what it stores.
        allow_plaintext: Whether it may be unencrypted.
        table_of: Returns what a table wants of a file with these leaf paths, or raises `ConfigurationError`
            where it is not a file of that table; None where nothing is wanted.
        invocation_limit: How often one DEK may encrypt (spec 4.1.4); lower ones are for tests.
    """

    aad_prefix: bytes | None = None
    allow_plaintext: bool = False
    table_of: Callable[[Sequence[tuple[str, ...]]], ExpectedTable] | None = None
    invocation_limit: int = MAX_INVOCATIONS
