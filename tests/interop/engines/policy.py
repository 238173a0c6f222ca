"""How a file is encrypted, in terms that all engines share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

AAD_PREFIX = "interop"


@dataclass(frozen=True)
class Policy:
    """How a file is encrypted.

    Attributes:
        title: Its special feature; column keys under an encrypted footer are the norm.
        column_keys: Whether columns have their own keys; if not, all are encrypted with the footer key.
        unlisted_with_footer_key: Whether columns without their own key are encrypted with the footer key.
        data_page_version: The version of data pages; 1 if it makes no difference.
        flat: Whether there are only columns that are not nested, with one page a chunk and no Bloom filters.
        data_keys: Whether the caller manages the data keys, and no KMS is called.
    """

    title: str
    column_keys: bool = True
    unlisted_with_footer_key: bool = False
    plaintext_footer: bool = False
    algorithm: Literal["AES_GCM_V1", "AES_GCM_CTR_V1"] = "AES_GCM_V1"
    length_bits: int = 128
    double_wrapping: bool = True
    key_material: Literal["internal", "external"] = "internal"
    aad_prefix: Literal["none", "stored", "supplied"] = "none"
    data_keys: bool = False
    data_page_version: Literal[1, 2] = 1
    flat: bool = False


COLUMN_KEYS = Policy("column keys")
FOOTER_KEY = Policy("footer key for all columns", column_keys=False)
FLAT = Policy(
    "footer key, flat columns of one page, 256 bits, single wrapping",
    column_keys=False,
    length_bits=256,
    double_wrapping=False,
    flat=True,
)
UNLISTED = Policy("column keys, and footer key for the others", unlisted_with_footer_key=True)
PLAINTEXT_FOOTER = Policy("plaintext footer", plaintext_footer=True)
CTR = Policy("AES_GCM_CTR_V1", algorithm="AES_GCM_CTR_V1")
SINGLE_256 = Policy("256 bits, single wrapping", length_bits=256, double_wrapping=False)
EXTERNAL = Policy("external key material", key_material="external")
V2_PAGES = Policy("V2 data pages", data_page_version=2)
PREFIX_STORED = Policy("AAD prefix, stored", aad_prefix="stored")
PREFIX_SUPPLIED = Policy("AAD prefix, supplied by the reader", aad_prefix="supplied")

ARROW_CAN = (COLUMN_KEYS, FOOTER_KEY, FLAT, PLAINTEXT_FOOTER, CTR, SINGLE_256, EXTERNAL, V2_PAGES)
"""The policies that Arrow can write with keys from a KMS."""

DATA_KEYS = Policy("data keys: column keys", data_keys=True)
DATA_KEYS_FOOTER_KEY = Policy("data keys: footer key for all columns", data_keys=True, column_keys=False)
DATA_KEYS_FLAT = Policy(
    "data keys: footer key, flat columns of one page", data_keys=True, column_keys=False, flat=True
)
DATA_KEYS_PLAINTEXT_FOOTER = Policy("data keys: plaintext footer", data_keys=True, plaintext_footer=True)
DATA_KEYS_PREFIX = Policy(
    "data keys: footer key, AAD prefix supplied by the reader",
    data_keys=True,
    column_keys=False,
    aad_prefix="supplied",
)

WITHOUT_KMS = (DATA_KEYS, DATA_KEYS_FOOTER_KEY, DATA_KEYS_FLAT, DATA_KEYS_PLAINTEXT_FOOTER, DATA_KEYS_PREFIX)
"""The policies that can be written with data keys that the caller manages."""


@dataclass(frozen=True)
class EncryptedFile:
    """A file of the matrix: its writer, its policy, and its path."""

    writer: str
    policy: Policy
    path: Path
