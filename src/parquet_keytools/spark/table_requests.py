"""What a JVM of Spark saw of a file, compared with the file's table by the one check that all readers have."""

from __future__ import annotations

import json
from typing import Any

from parquet_keytools.config.key_names import KeyReference, MasterKeyReference
from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files.table_check import SeenColumn, TableCheck, refuse_values_of_folders
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.spark.session import table_aad_prefix


class TableRequests:
    """Compares files with the tables of one configuration; `CheckedFile.java` is the other side.

    A request is a JSON object: `table`, empty where the reader named none; `file`, for messages; `algorithm`;
    `footer_key`, the footer's master key as the file names it; and `columns`, once the footer is authentic: each a
    path, a kind of encryption, and a master key or null; and with these `folders`, the names of columns that
    folders above the file give values to. May be used by any number of threads.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._checks: dict[str, TableCheck] = {}

    def check(self, content: bytes) -> bytes:
        """Refuse a file that is not what its table says. Without tables there is nothing to compare with.

        Returns:
            The AAD prefix that its table has, `{file_name}` in it; empty where it has none.

        Raises:
            TableMismatchError: It is not.
            DecryptionError: A folder gives values to a column that is under a key.
            ConfigurationError: There is no such table, or none was named and there are several.
            ValueError: The content is no such request.
        """
        request = json.loads(content)
        columns = [_column(*column) for column in request.get("columns", [])]
        # Names of columns that differ in the case of letters are the same to Spark.
        folders = [name.lower() for name in request.get("folders", [])]
        encrypted = [c.path[0].lower() for c in columns if c.encryption is not ColumnEncryption.PLAINTEXT]
        if not self._configuration.tables:
            refuse_values_of_folders(None, request["file"], folders, encrypted)
            return b""
        check = self._check_of(request["table"], request["file"])
        algorithm = Algorithm(request["algorithm"])
        footer_key = _key(request["footer_key"])
        mismatches = check.footer_mismatches(algorithm, footer_key)
        check.refuse(request["file"], [*mismatches, *check.column_mismatches(footer_key, columns)])
        refuse_values_of_folders(check, request["file"], folders, encrypted)
        return (table_aad_prefix(self._configuration, check.table_name) or "").encode()

    def _check_of(self, table_name: str, file: str) -> TableCheck:
        if not table_name and len(self._configuration.tables) > 1:
            raise ConfigurationError(
                f"{file} is read without a table, and the configuration has {len(self._configuration.tables)}.",
                hint='Give the read the options of its table: .options(**keytools.spark_read_options("TABLE")).',
            )
        check = self._checks.get(table_name)
        if check is None:
            name, _ = self._configuration.select_table(table_name or None)
            check = self._checks[table_name] = TableCheck(self._configuration, name, ignores_case=True)
        return check


def _key(master_key_id: str) -> KeyReference:
    return MasterKeyReference(decode_master_key_id(master_key_id))


def _column(path: list[str], kind: str, master_key_id: Any) -> SeenColumn:
    if kind not in ColumnEncryption.__members__:
        raise ValueError("there is no such kind of encryption")
    return SeenColumn(tuple(path), ColumnEncryption[kind], None if master_key_id is None else _key(master_key_id))
