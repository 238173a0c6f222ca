"""What finds the DEKs that key metadata stands for (spec 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.secret_bytes import SecretBytes


class KeyRetriever(Protocol):
    """Finds the DEK that key metadata stands for (spec 4.3)."""

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the DEK of the footer.

        Args:
            key_metadata: As the file carries it, or None where it carries none.

        Raises:
            KeytoolsError: The key is unavailable; the error says why.
        """
        ...

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return the DEKs of columns, asked for together so that a KMS can be asked once.

        Args:
            columns: For each column its path in the schema and its key metadata, None where there is none.

        Returns:
            In the same order the DEK, or the error that says why it is unavailable.
        """
        ...
