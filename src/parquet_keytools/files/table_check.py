"""Whether a file is what its table says: the one answer, for every reader, for the verifier, and for Spark.

What is compared is which keys a file is under, not what is encrypted with them: key metadata of the footer can be
anybody's before the footer is authentic, and key material beside the file always can. That is enough, for the KMS
unwraps only under the very master key that was compared: who names another one than was used gets no key.
"""

from __future__ import annotations

import functools
import re
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol
from urllib.parse import unquote

from parquet_keytools.config.key_policy import (
    WILDCARD,
    ChosenKey,
    ColumnPath,
    DataKeyReference,
    KeyReference,
    MasterKeyReference,
    moved_master_key_ids,
    resolve_columns,
    resolve_key,
)
from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import (
    ConfigurationError,
    FolderNameError,
    TableMismatch,
    TableMismatchError,
)
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, parse_key_metadata
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.printable import is_url

_MOST_SCHEMAS = 64
"""So many schemas are remembered a table; the files of a data set have one, or a few."""

_HINT = (
    "Name the table that it is of. If it is of this one, from before a change of keys, say so in the "
    "configuration: `also_trusted` of the table, or `moves` under `rotation`; or rekey it from a table that "
    "describes it as it is. If neither is so, somebody put it there."
)
_WITHOUT_METADATA = "a key that the file does not name"


@dataclass(frozen=True, slots=True)
class SeenColumn:
    """A column as the footer of a file describes it.

    Attributes:
        path: Names from below the root to the leaf.
        encryption: What it is encrypted with.
        key: Its own key; None with another one, and where the file does not say which it is.
    """

    path: ColumnPath
    encryption: ColumnEncryption
    key: KeyReference | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a table has for a column.

    Attributes:
        key: The key that it names; None for plaintext.
        trusted: The keys that the column may be under.
        text: What messages call it.
    """

    key: KeyReference | None
    trusted: frozenset[KeyReference]
    text: str


class TableCheck:
    """Compares files with one table of a configuration.

    Trust is the table's: a key is good for footer or column where the table names it for that, where a move under
    `rotation` has it at one end and the key that the table names at the other, or where the table has it under
    `also_trusted`. May be used by any number of threads.

    Attributes:
        table_name: Name of the table.
        settings: Its settings.
    """

    def __init__(
        self,
        configuration: Configuration,
        table_name: str,
        *,
        ignores_case: bool = False,
        moves: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Resolve the names of keys; the KMS is asked nothing.

        Args:
            configuration: Where the table is.
            table_name: The table.
            ignores_case: Whether the reader of its files makes no difference between names of columns that differ
                in the case of letters.
            moves: Old and new master key of each move that is under way, beside those under `rotation`.

        Raises:
            ConfigurationError: There is no such table, or it names a key that is not declared.
        """
        self.table_name, self.settings = configuration.select_table(table_name)
        table = self.settings
        self._configuration = configuration
        self._ignores_case = ignores_case
        self._algorithm = Algorithm(table.algorithm)
        self._column_keys, self._unlisted = table.column_keys, table.unlisted_columns
        self._plaintext_columns = [pattern.replace("[", "[[]") for pattern in table.plaintext_columns]
        self._keys = {name: resolve_key(configuration, name) for _, name in table.key_names()}
        also_trusted = frozenset(self._keys[name] for name in table.also_trusted)
        self._trusted: dict[str, frozenset[KeyReference]] = {}
        for _, name in table.key_uses():
            key = self._keys[name]
            self._trusted[name] = (
                also_trusted | {key} | _moved([*moved_master_key_ids(configuration), *moves], key)
            )
        self._own = frozenset().union(*self._trusted.values())
        self._footer = self._wanted(ChosenKey("footer_key", table.footer_key))
        self._schemas: dict[tuple[ColumnPath, ...], list[_Wanted]] = {}

    def check_patterns(self, leaf_paths: Sequence[ColumnPath]) -> None:
        """Raise `ConfigurationError` where the patterns of the table do not fit a file with these columns."""
        resolve_columns(self._configuration, self.table_name, leaf_paths)

    def names_key(self, path: ColumnPath, leaf_paths: Sequence[ColumnPath], key: KeyReference | None) -> bool:
        """Return whether a key is the very one that the table names for a column, and not one in its place."""
        wanted = dict(zip(leaf_paths, self._of_schema(leaf_paths), strict=True)).get(path)
        return wanted is not None and wanted.key is not None and wanted.key == key

    def loses_by_move(self, old_master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether files that are re-wrapped from one master key to another are refused from then on."""
        old, new = MasterKeyReference(old_master_key_id), MasterKeyReference(new_master_key_id)
        return any(old in trusted and new not in trusted for trusted in self._trusted.values())

    def keyed(self, names: Collection[str]) -> dict[str, str]:
        """Return which names of top-level columns patterns of the table put under a key, as a whole or in parts.

        Returns:
            Name of the column -> name of the key.

        Raises:
            ConfigurationError: The table has two keys for one of them.
        """
        columns = resolve_columns(
            self._configuration,
            self.table_name,
            [(name,) for name in names],
            for_reading=True,
            ignores_case=self._ignores_case,
        )
        whole = {path[0]: key.key_name for path, key in columns.items() if key.is_listed}
        keys = {name: whole.get(name) or self._listed_key(name) for name in names}
        return {name: key_name for name, key_name in keys.items() if key_name is not None}

    @functools.cached_property
    def listed_names(self) -> frozenset[str]:
        """Names, folded, of columns and parents of columns that `column_keys` lists letter by letter."""
        patterns = [pattern for patterns in self._column_keys.values() for pattern in patterns]
        parts = [pattern.split(".") for pattern in patterns]
        names = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
        return frozenset(_folded(name) for name in names if not WILDCARD.search(name))

    def refuse_folder_names(self, paths: Iterable[str], *, is_planned: bool = False) -> None:
        """Refuse to leave values of columns under a key in the names of folders, where everyone reads them.

        A column that is named letter by letter is missed in the files; a glob may fit others. Columns that are
        encrypted without being listed only get a warning, if the folders are there already.

        Args:
            paths: Of files, from the folder of the data set on.
            is_planned: Whether the folders are to be made; else they are there.

        Raises:
            ConfigurationError: There is such a column, or the table has two keys for it.
        """
        names = sorted({name for path in paths for name in names_in_folders(path)})
        keyed = self.keyed(names)
        verb, what = ("would be", "Partition") if is_planned else ("are", "Partition the source")
        for name in names:
            message = f"the values of column {name!r} {verb} in the names of folders, in plaintext"
            if name in keyed:
                raise ConfigurationError(
                    f"{message}, and the table {self.table_name!r} has it under the key {keyed[name]!r}.",
                    hint=f"{what} by another column, or take this one out of column_keys.",
                )
        for name in partition_names(names):
            if is_planned and self._unlisted == "error" and not self._stays_plaintext(name):
                raise ConfigurationError(
                    f"column {name!r} is not listed in the table {self.table_name!r}, and its values would be in "
                    "the names of folders, in plaintext.",
                    hint="List it under plaintext_columns, or partition by another column.",
                )
            message = f"the values of column {name!r} {verb} in the names of folders, in plaintext"
            if self._unlisted == "error" and not self._stays_plaintext(name):
                raise ConfigurationError(
                    f"{message}, and the table {self.table_name!r} does not list it.",
                    hint="List it under plaintext_columns, or partition the source by another column.",
                )
            if self._unlisted == "footer_key" and not is_planned:
                warnings.warn(message, UserWarning, stacklevel=3)

    def _stays_plaintext(self, name: str) -> bool:
        folded = str.lower if self._ignores_case else str
        return any(fnmatchcase(folded(name), folded(pattern)) for pattern in self._plaintext_columns)

    def _listed_key(self, name: str) -> str | None:
        """Return the key of a pattern that names a column in another spelling, or a part that no file may have."""
        folded = _folded(name)
        for key_name, patterns in self._column_keys.items():
            if any(f"{_folded(pattern)}.".startswith(f"{folded}.") for pattern in patterns):
                return key_name
        return None

    def footer_mismatches(self, algorithm: Algorithm, key: KeyReference | None) -> list[TableMismatch]:
        """Return what is wrong with algorithm and key of a footer; to be called before that key is asked for."""
        found = []
        if algorithm is not self._algorithm:
            found.append(TableMismatch("algorithm", None, self._algorithm.value, algorithm.value))
        if key not in self._footer.trusted:
            found.append(TableMismatch("footer key", None, self._footer.text, _text(key)))
        return found

    def column_mismatches(
        self, footer_key: KeyReference | None, columns: Sequence[SeenColumn]
    ) -> list[TableMismatch]:
        """Return what is wrong with columns; to be called before their keys are asked for.

        A column under the footer's DEK is under the footer's key. One that the table has in plaintext may be under
        any of the table's keys, for then it was made by somebody who has one.

        Raises:
            ConfigurationError: The table has two keys for one of the columns.
        """
        found = []
        for column, wanted in zip(columns, self._of_schema([column.path for column in columns]), strict=True):
            if column.encryption is ColumnEncryption.PLAINTEXT:
                if wanted.key is not None:
                    name = ".".join(column.path)
                    found.append(TableMismatch("plaintext column", name, wanted.text, "plaintext"))
                continue
            key = footer_key if column.encryption is ColumnEncryption.FOOTER_KEY else column.key
            if key not in wanted.trusted:
                found.append(TableMismatch("column key", ".".join(column.path), wanted.text, _text(key)))
        return found

    def refuse(self, path: str, mismatches: Sequence[TableMismatch]) -> None:
        """Raise `TableMismatchError` if there are any mismatches."""
        if not mismatches:
            return
        hint = _HINT
        if any(mismatch.found == _WITHOUT_METADATA for mismatch in mismatches):
            hint = f"Which data keys such files are under is said under `reading.keys_without_metadata`. {hint}"
        raise TableMismatchError(path, self.table_name, mismatches, hint=hint)

    def _of_schema(self, paths: Sequence[ColumnPath]) -> list[_Wanted]:
        schema = tuple(paths)
        wanted = self._schemas.get(schema)
        if wanted is None:
            columns = resolve_columns(
                self._configuration, self.table_name, schema, for_reading=True, ignores_case=self._ignores_case
            )
            wanted = [self._wanted(columns[path]) for path in schema]
            if len(self._schemas) >= _MOST_SCHEMAS:
                self._schemas.clear()
            self._schemas[schema] = wanted
        return wanted

    def _wanted(self, column: ChosenKey) -> _Wanted:
        if column.key_name is None:
            return _Wanted(None, self._own, "it in plaintext, or under a key of its own")
        key = self._keys[column.key_name]
        name = f" ({column.key_name!r})" if column.key_name != _id_of(key) else ""
        return _Wanted(key, self._trusted[column.key_name], f"{_text(key)}{name}")


# --- names of folders ---

FolderNames = Mapping[str, str]
"""Name of a column to which a folder gives values -> the name of the folder."""

_SEPARATOR = re.compile(r"[/\\]")


@functools.lru_cache(maxsize=1_024)
def names_in_folders(path: str) -> FolderNames:
    """Return the names of columns to which the folders of a path give values, by any reader's rules.

    Readers differ in what they decode first, in which `=` ends a name, and in whether a backslash separates
    folders: every name counts that one of them may see. The name of the file itself gives no values.

    Args:
        path: Of a file, as readers see it: links are not followed. It may be an address with a query.
    """
    text = path.partition("?")[0] if is_url(path) else path
    found: dict[str, str] = {}
    while "=" in text or "%" in text:
        for folder in _SEPARATOR.split(text)[:-1]:
            for position, character in enumerate(folder):
                if character == "=" and position:
                    found.setdefault(folder[:position], folder)
        decoded = unquote(text)
        if decoded == text:
            break
        text = decoded
    return found


def partition_names(names: Iterable[str]) -> list[str]:
    """Return the names that a writer means, of all that readers may see: decoded, and without a `=`."""
    return [name for name in names if "=" not in name and unquote(name) == name]


def protected_names(
    names: Iterable[str], protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> dict[str, str]:
    """Return which names of folders mean a protected column: THE decision, for every reader and command.

    Whether names that differ in case are one column is a matter of the reader, so they are one here, and so are
    different Unicode forms of a name.

    Args:
        names: Names of columns to which folders give values.
        protected: Leaf paths of columns that are under a key, in this file or in others of the data set. Parts of
            a nested column protect its parents.
        table_check: Of its table, whose `column_keys` protect columns that the file lacks; None without a table.

    Returns:
        The name that a folder has -> the name of the column.
    """
    folded = {name: _folded(name) for name in names}
    if not folded:
        return {}
    columns = {} if table_check is None else dict.fromkeys(table_check.listed_names, "")
    for leaf in protected:
        for length in range(1, len(leaf) + 1):
            name = ".".join(leaf[:length])
            columns[_folded(name)] = name
    return {name: columns[known] or name for name, known in folded.items() if known in columns}


def refuse_values_of_folders(
    path: str, names: FolderNames, protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> None:
    """Refuse a file whose folders give values to a protected column; see `protected_names`.

    Readers of data sets take the values of `name=value` folders for those of a column, also in place of values
    that a file has. No key is needed to name a folder.

    Raises:
        FolderNameError: A folder gives values to such a column.
    """
    for name, column in protected_names(names, protected, table_check).items():
        raise FolderNameError(path, names[name], column)


def refuse_folders_above(
    location: FileLocation, protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> None:
    """Refuse a file that lies below folders which give values to a protected column; see `protected_names`.

    Raises:
        FolderNameError: A folder gives values to such a column.
    """
    refuse_values_of_folders(str(location), names_in_folders(location.path), protected, table_check)


def _folded(name: str) -> str:
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


class KeySource(Protocol):
    """What finds the keys of a file; `FileKeyRetriever` does."""

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material that key metadata is or refers to; None where it is a data key's."""
        ...

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        """Return the name of the data key of what carries no key metadata: the footer (None), or a column."""
        ...


def seen_key(source: KeySource, key_metadata: bytes | None, column_path: ColumnPath | None) -> KeyReference | None:
    """Return which key some key metadata means; None where neither the file nor the configuration says it.

    Args:
        source: What the key itself will be asked for from: the key that is compared is the one that is used.
        key_metadata: As the file carries it.
        column_path: The column that it is of; None for the footer.

    Raises:
        KeyMaterialError: It is not valid, or refers to key material that is not there.
    """
    material = source.material(key_metadata)
    if material is not None:
        return _master_key(material.master_key_id)
    parsed = parse_key_metadata(key_metadata)
    name = parsed.name if isinstance(parsed, DataKeyId) else source.name_without_metadata(column_path)
    return None if name is None else DataKeyReference(name)


@functools.lru_cache(maxsize=1_024)
def _master_key(written_id: str) -> MasterKeyReference:
    return MasterKeyReference(decode_master_key_id(written_id))


def _moved(moves: Iterable[tuple[str, str]], key: KeyReference) -> set[KeyReference]:
    """Return the keys at the other ends of moves."""
    found: set[KeyReference] = set()
    for old, new in moves:
        if key == MasterKeyReference(new):
            found.add(MasterKeyReference(old))
        if key == MasterKeyReference(old):
            found.add(MasterKeyReference(new))
    return found


def _id_of(key: KeyReference) -> str:
    return key.master_key_id if isinstance(key, MasterKeyReference) else key.name


def _text(key: KeyReference | None) -> str:
    if key is None:
        return _WITHOUT_METADATA
    kind = "master key" if isinstance(key, MasterKeyReference) else "data key"
    return f"the {kind} {_id_of(key)[:200]!r}"
