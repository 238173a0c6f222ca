"""How the footer of a file is protected, and with which algorithm its modules are (spec 4.2, 5.4, 5.5)."""

from __future__ import annotations

from enum import Enum


class FooterMode(Enum):
    """How the footer of a file is protected."""

    UNENCRYPTED = "unencrypted"
    PLAINTEXT_FOOTER = "plaintext footer"
    ENCRYPTED_FOOTER = "encrypted footer"


class Algorithm(Enum):
    """Encryption algorithm of a file (spec 4.2)."""

    AES_GCM_V1 = "AES_GCM_V1"
    AES_GCM_CTR_V1 = "AES_GCM_CTR_V1"
