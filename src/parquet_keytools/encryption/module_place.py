"""What a module is and where it belongs (spec 4.4.2)."""

from __future__ import annotations

from typing import NamedTuple

from parquet_keytools.encryption.aad import ModuleType, module_aad
from parquet_keytools.errors import DecryptionError

_HINT = "The key or the AAD prefix is not the one it was encrypted with, or the file was altered."


class ModulePlace(NamedTuple):
    """What a module is and where it belongs; says which AAD it has, and where an error is."""

    module_type: ModuleType
    row_group_ordinal: int | None = None
    column_ordinal: int | None = None
    page_ordinal: int | None = None

    def aad(self, file_aad: bytes) -> bytes:
        """Return the module AAD (spec 4.4); see `module_aad`."""
        return module_aad(file_aad, *self)

    def error(self, message: str, *, hint: str = "") -> DecryptionError:
        """Return an error that names this place."""
        return DecryptionError(
            message,
            module_type=self.module_type.title,
            row_group_ordinal=self.row_group_ordinal,
            column_ordinal=self.column_ordinal,
            page_ordinal=self.page_ordinal,
            hint=hint,
        )

    def not_authentic(self) -> DecryptionError:
        """Return the error for a module whose tag is wrong."""
        return self.error("the module does not authenticate.", hint=_HINT)


FOOTER_PLACE = ModulePlace(ModuleType.FOOTER)
