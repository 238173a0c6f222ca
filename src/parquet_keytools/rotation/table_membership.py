"""Whether a file belongs to the table whose keys move to other master keys, which other people may use.

A rotation to a new version of the same master keys opens nothing to anybody, and takes every file. A move does:
a file of another table under the same master key, copied into the folder, would become readable to whoever may
use the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parquet_keytools.config.column_policy import ColumnPath
from parquet_keytools.errors import TableMismatchError
from parquet_keytools.files.file_opening import check_column_keys, check_footer_key
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.keys.file_key_retriever import DataKeys
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.rotation.held_keys import HeldKeys
from parquet_keytools.rotation.rotation_plan import RotationPlan


class TableMembership:
    """Refuses files that are of none of some tables.

    Args:
        checks: Of the tables; without any, no file is refused.
        data_keys: The data keys that the caller manages.
    """

    def __init__(self, checks: Sequence[TableCheck], data_keys: DataKeys) -> None:
        self._checks = checks
        self._data_keys = data_keys

    @classmethod
    def of(cls, keys: KeyService, table_name: str | None, plan: RotationPlan) -> TableMembership:
        """Return what a rotation asks of files: those of the table, or where none is named, of one of the tables.

        Files that an earlier run has moved already are of the table, too.
        """
        names = [table_name] if table_name is not None else sorted(keys.configuration.tables)
        checks = [TableCheck(keys.configuration, name, moves=plan.moves.items()) for name in names]
        return cls(checks if plan.opens_to_others else [], keys.data_keys)

    def check_footer(self, keys: HeldKeys) -> None:
        """Refuse a file by its footer's key, before that is unwrapped.

        Raises:
            TableMismatchError: It is not that of a table.
            KeyMaterialError: The key metadata is not valid.
        """
        source = _HeldKeySource(keys, self._data_keys)
        self._one_passes(lambda check: check_footer_key(check, str(keys.location), keys.envelope, source))

    def check_columns(self, keys: HeldKeys) -> None:
        """Refuse a file by the keys of its columns, before these are unwrapped; its footer is authentic by now.

        Raises:
            TableMismatchError: They are not those of the table that has the footer's key, either.
            ConfigurationError: A table has two keys for one of the columns.
        """
        source, footer = _HeldKeySource(keys, self._data_keys), keys.footer
        if footer is None:
            return

        def check_both(check: TableCheck) -> None:
            check_footer_key(check, str(keys.location), keys.envelope, source)
            check_column_keys(check, str(keys.location), footer, source)

        self._one_passes(check_both)

    def _one_passes(self, check: Callable[[TableCheck], None]) -> None:
        mismatches = []
        for table in self._checks:
            try:
                check(table)
            except TableMismatchError as error:
                mismatches.append(error)
            else:
                return
        if mismatches:
            raise mismatches[0]


@dataclass(frozen=True)
class _HeldKeySource:
    """A `KeySource` of the keys that a rotation has read."""

    keys: HeldKeys
    data_keys: DataKeys

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        held = self.keys.key_of(key_metadata)
        return None if held is None else held.material

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        if column_path is None:
            return self.data_keys.footer_without_metadata
        return self.data_keys.columns_without_metadata.get(".".join(column_path))
