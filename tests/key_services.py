"""The key service of a `Keytools`, for tests of the layers below it."""

from __future__ import annotations

import time

from parquet_keytools import Keytools
from parquet_keytools.files.key_service import KeyService


def key_service(keytools: Keytools) -> KeyService:
    """Return a key service with the same configuration and KMS, and caches of its own."""
    return KeyService(keytools.configuration, keytools.kms, time.monotonic)
