"""Whether a file matches its table: the one answer, for every reader, for the verifier, and for Spark.

The comparison covers the keys that a file names. An attacker can change these names, in a footer that is not
authenticated yet and in a key material file. But the KMS unwraps a key only with the master key that was compared,
so a false name gives no key.
"""

from __future__ import annotations

import copy
import functools
import re
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    covers,
    keys_of_value,
    moved_master_key_ids,
    resolve_columns,
    resolve_key,
)
from parquet_keytools.config.labels import FieldLabels, no_field_labels
from parquet_keytools.config.settings import Configuration, one_value, placeholders, value_in, values_in_folders
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import (
    ConfigurationError,
    FolderNameError,
    ParquetFormatError,
    TableMismatch,
    TableMismatchError,
)
from parquet_keytools.format.structs import (
    ChunkStatistics,
    ColumnMetaData,
    FileMetaData,
    SchemaElement,
    Statistics,
)
from parquet_keytools.keys.key_material import DataKeyId, KeyMaterial, parse_key_metadata
from parquet_keytools.runtime.presentation import is_url
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation

_MOST_VALUES = 4_096
"""For how many values of placeholders the keys are remembered."""

_MOST_SCHEMAS = 64
"""How many schemas are remembered for a table; the files of a data set have one, or a few."""

_HINT = (
    "Name the table of the file. If it belongs to this table and was written before a change of keys, add the old "
    "key to `also_trusted` of the table, or to `moves` under `rotation`; or rekey the file from a table that "
    "describes it as it is. Otherwise, the file does not belong here."
)
_WITHOUT_METADATA = "a key that the file does not name"


@dataclass(frozen=True, slots=True)
class SeenColumn:
    """A column as a footer describes it; its own key is None if the file does not name it."""

    path: ColumnPath
    encryption: ColumnEncryption
    key: KeyReference | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The key that the table names for a column (None: plaintext), and all that may encrypt it."""

    key: KeyReference | None
    trusted: frozenset[KeyReference]
    text: str


class TableCheck:
    """Compares files with one table of a configuration; thread-safe.

    A key is trusted for the footer or a column if the table names it for that, if a move under `rotation` connects
    it with the key that the table names, or if the table lists it under `also_trusted`.
    """

    def __init__(
        self,
        configuration: Configuration,
        table_name: str,
        *,
        ignores_case: bool = False,
        moves: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Resolve the names of keys, without a KMS call; `moves` are old and new master keys of current moves."""
        self.table_name, self.settings = configuration.select_table(table_name)
        table = self.settings
        self._configuration = configuration
        self._ignores_case = ignores_case
        self._algorithm = Algorithm(table.algorithm)
        self._unlisted = table.treats_unlisted
        labels = table.labels.labels
        self._column_keys = [*table.column_keys.items(), *((one.key, [one.column]) for one in labels if one.key)]
        plaintext = [*table.plaintext_columns, *(one.column for one in labels if one.key is None)]
        self._plaintext_columns = [pattern.replace("[", "[[]") for pattern in plaintext]
        self._moves = [*moved_master_key_ids(configuration), *moves]
        self._of_values: dict[tuple[tuple[str, str], ...], TableCheck] = {}
        self._values: Mapping[str, str] = {}
        self._set_keys({name: resolve_key(configuration, name) for _, name in table.key_names()}, {})

    def _set_keys(self, keys: dict[str, KeyReference], of_values: Mapping[str, KeyReference]) -> None:
        """Set the key of each name, and of each template whose placeholder has a value."""
        table = self.settings
        self._keys = {**keys, **of_values}
        # A template without a value is no key: a file could name a key with braces in its identifier.
        unknown = frozenset(name for name in keys if placeholders(name) and name not in of_values)
        also_trusted = frozenset(self._keys[name] for name in table.also_trusted if name not in unknown)
        self._unknown = unknown
        self._trusted: dict[str, frozenset[KeyReference]] = {}
        for _, name in table.key_uses():
            key = self._keys[name]
            own = frozenset() if name in unknown else {key} | _moved(self._moves, key)
            self._trusted[name] = also_trusted | own
        self._own = frozenset().union(*self._trusted.values())
        self._footer = self._wanted(ChosenKey("footer_key", table.footer_key))
        self._schemas: dict[tuple[ColumnPath, ...], list[_Wanted]] = {}

    def for_file(self, path: str, seen: Iterable[KeyReference | None]) -> TableCheck:
        """Return the comparison with the table, with the keys of the values that a file has."""
        if not self.settings.has_templates:
            return self
        values = tuple(sorted(self.values_of(path, seen).items()))
        check = self._of_values.get(values)
        if check is None:
            try:
                keys = keys_of_value(self._configuration, self.table_name, dict(values))
            except ConfigurationError:
                # The value would name another key, which is no key of a value.
                keys = {}
            check = copy.copy(self)
            check._set_keys(self._keys, keys)
            check._values = dict(values)
            if len(self._of_values) >= _MOST_VALUES:
                self._of_values.clear()
            self._of_values[values] = check
        return check

    def values_of(self, path: str, seen: Iterable[KeyReference | None]) -> dict[str, str]:
        """Return placeholder -> value of a file, as far as it has one value that is allowed."""
        # A value comes from folders in the path, and with `from: argument` or `column` from the keys in the file.
        # All must agree. A template without one value has no key, and matches no file.
        identifiers = {key.master_key_id for key in seen if isinstance(key, MasterKeyReference)}
        identifiers -= {_id_of(key) for name, key in self._keys.items() if not placeholders(name)}
        values: dict[str, str] = {}
        for placeholder, setting in self.settings.key_values.items():
            found = values_in_folders(path, placeholder)
            if setting.source != "partition":
                templates = [
                    _id_of(self._keys[name]) for name in self._keys if placeholders(name) == [placeholder]
                ]
                of_keys = {value_in(template, one) for template in templates for one in identifiers}
                found |= {value for value in of_keys if value is not None}
            value = one_value(found, setting.pattern)
            if value is not None:
                values[placeholder] = value
        return values

    def check_patterns(self, leaf_paths: Sequence[ColumnPath]) -> None:
        """Raise `ConfigurationError` if the patterns of the table do not fit a file with these columns."""
        resolve_columns(self._configuration, self.table_name, leaf_paths, may_be_undecided=True)

    def names_key(self, path: ColumnPath, leaf_paths: Sequence[ColumnPath], key: KeyReference | None) -> bool:
        """Return whether a key is the one that the table names for a column, and not only trusted."""
        wanted = dict(zip(leaf_paths, self._of_schema(leaf_paths), strict=True)).get(path)
        return wanted is not None and wanted.key is not None and wanted.key == key

    def loses_by_move(self, old_master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether files that are moved from one master key to another will be refused."""
        old, new = MasterKeyReference(old_master_key_id), MasterKeyReference(new_master_key_id)
        return any(old in trusted and new not in trusted for trusted in self._trusted.values())

    def keyed(self, names: Collection[str]) -> dict[str, str]:
        """Return the top-level columns that the table encrypts, completely or in part: name -> name of the key."""
        columns = resolve_columns(
            self._configuration,
            self.table_name,
            [(name,) for name in names],
            for_reading=True,
            ignores_case=self._ignores_case,
        )
        whole = {path[0]: key.key_name for path, key in columns.items() if key.is_listed}
        keys = {name: whole.get(name) or self.listed.get(_folded(name)) for name in names}
        return {name: key_name for name, key_name in keys.items() if key_name is not None}

    @functools.cached_property
    def listed(self) -> dict[str, str]:
        """Folded names and patterns of `column_keys`, and their parents -> name of the key."""
        found: dict[str, str] = {}
        for key_name, patterns in self._column_keys:
            for pattern in patterns:
                parts = pattern.split(".")
                for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
                    found.setdefault(_folded(name), key_name)
        return found

    def refuse_folder_names(self, paths: Iterable[str], *, is_planned: bool = False) -> None:
        """Refuse values of encrypted columns in the names of folders, where they are readable."""
        # Existing folders only cause a warning for columns that are encrypted without being listed. The paths are
        # of files, relative to the folder of the data set.
        names = sorted({name for path in paths for name in names_in_folders(path)})
        keyed = self.keyed(names)
        are_shown = f"{'would be' if is_planned else 'are'} in the names of folders, in plaintext"
        for name in keyed:
            raise ConfigurationError(
                f"the values of column {name!r} {are_shown}, and the table {self.table_name!r} has it under the "
                f"key {keyed[name]!r}.",
                hint="Partition by another column, or take this one out of column_keys.",
            )
        for name in partition_names(names):
            folded = str.lower if self._ignores_case else str
            is_plaintext = any(fnmatchcase(folded(name), folded(one)) for one in self._plaintext_columns)
            if self._unlisted == "error" and not is_plaintext:
                raise ConfigurationError(
                    f"the table {self.table_name!r} does not say how to protect column {name!r}, and its values "
                    f"{are_shown}.",
                    hint="List it in plaintext_columns, or partition by another column.",
                )
            if self._unlisted == "footer_key" and not is_planned:
                warnings.warn(f"the values of column {name!r} {are_shown}", UserWarning, stacklevel=3)

    def footer_mismatches(self, algorithm: Algorithm, key: KeyReference | None) -> list[TableMismatch]:
        """Return the mismatches of algorithm and key of a footer; to be called before that key is unwrapped."""
        found = []
        if algorithm is not self._algorithm:
            found.append(TableMismatch("algorithm", None, self._algorithm.value, algorithm.value))
        if key not in self._footer.trusted:
            found.append(TableMismatch("footer key", None, self._footer.text, _text(key)))
        return found

    def column_mismatches(
        self,
        footer_key: KeyReference | None,
        columns: Sequence[SeenColumn],
        field_labels: FieldLabels | None = None,
    ) -> list[TableMismatch]:
        """Return the mismatches of columns; to be called before their keys are unwrapped."""
        # A column with the footer's DEK has the footer's key. A column that is plaintext in the table may have any
        # key of the table, because then its writer had one. Readers leave `field_labels` out: what a file says
        # about itself is no policy.
        found = []
        all_wanted = self._of_schema([column.path for column in columns], field_labels)
        for column, wanted in zip(columns, all_wanted, strict=True):
            if column.encryption is ColumnEncryption.PLAINTEXT:
                if wanted.key is not None:
                    name = ".".join(column.path)
                    found.append(TableMismatch("plaintext column", name, wanted.text, "plaintext"))
                continue
            key = footer_key if column.encryption is ColumnEncryption.FOOTER_KEY else column.key
            if key not in wanted.trusted:
                found.append(TableMismatch("column key", ".".join(column.path), wanted.text, _text(key)))
        return found

    def value_mismatches(self, values: Mapping[str, ColumnValue]) -> list[TableMismatch]:
        """Return which columns have another value than the keys of the file, whose check `for_file` returned."""
        mismatches = []
        for name, found in values.items():
            wanted = self._values.get(name)
            if wanted is None:
                # Its keys depend on no value: the table trusts them for all files.
                continue
            if found.problem or (found.value is not None and found.value != wanted):
                what = found.problem or "it has another value"
                mismatches.append(TableMismatch("column value", name, f"the keys of {wanted!r}", what))
        return mismatches

    def refuse(self, path: str, mismatches: Sequence[TableMismatch]) -> None:
        """Raise `TableMismatchError` if there are any mismatches."""
        if not mismatches:
            return
        hint = _HINT
        if any(mismatch.found == _WITHOUT_METADATA for mismatch in mismatches):
            hint = f"`reading.keys_without_metadata` names the data keys of such files. {hint}"
        raise TableMismatchError(path, self.table_name, mismatches, hint=hint)

    def _of_schema(self, paths: Sequence[ColumnPath], field_labels: FieldLabels | None = None) -> list[_Wanted]:
        schema = tuple(paths)
        wanted = None if field_labels else self._schemas.get(schema)
        if wanted is None:
            columns = resolve_columns(
                self._configuration,
                self.table_name,
                schema,
                for_reading=True,
                ignores_case=self._ignores_case,
                field_labels=field_labels or no_field_labels,
            )
            wanted = [
                self._by_label_of_data(self._wanted(columns[path]))
                if self.settings.labels.may_come_with_data(columns[path].label)
                and not covers(self.settings.column_keys, ".".join(path))
                else self._wanted(columns[path])
                for path in schema
            ]
            if field_labels:
                return wanted
            if len(self._schemas) >= _MOST_SCHEMAS:
                self._schemas.clear()
            self._schemas[schema] = wanted
        return wanted

    def _by_label_of_data(self, wanted: _Wanted) -> _Wanted:
        """Return what a column of the class of `unlabelled` may be under: a label of the data chose any class."""
        names = {found.key for found in self.settings.labels.classes.values()}
        trusted = frozenset().union(*(self._trusted[name] for name in names if name is not None))
        return replace(wanted, trusted=trusted, text=f"{wanted.text}, or the key of another class")

    def _wanted(self, column: ChosenKey) -> _Wanted:
        if column.key_name is None:
            return _Wanted(None, self._own, "it in plaintext, or under a key of its own")
        key = self._keys[column.key_name]
        if column.key_name in self._unknown:
            what = f"the key {column.key_name!r} of one value, which the folders and keys of the file do not show"
            return _Wanted(key, self._trusted[column.key_name], what)
        name = f" ({column.key_name!r})" if column.key_name != _id_of(key) else ""
        return _Wanted(key, self._trusted[column.key_name], f"{_text(key)}{name}")


# --- names of folders ---

FolderNames = Mapping[str, str]
"""Name of a column to which a folder gives values -> name of the folder."""

_SEPARATOR = re.compile(r"[/\\]")


@functools.lru_cache(maxsize=1_024)
def names_in_folders(path: str) -> FolderNames:
    """Return the names of columns to which the folders of a path give values, by the rules of any reader."""
    # Readers differ in what they decode first, in which `=` ends a name, and in whether a backslash separates
    # folders. The name of the file itself gives no values.
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
    """Return the names that a writer can have meant: decoded, and without `=`."""
    return [name for name in names if "=" not in name and unquote(name) == name]


def protected_names(
    names: Iterable[str], protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> dict[str, str]:
    """Return the names of folders that mean a protected column, and the column: the one decision, everywhere."""
    # Some readers ignore case, so names that differ in case, or in Unicode form, are the same here. Leaf paths
    # protect their parents; `column_keys` of the table also protect columns that the file lacks.
    folded = {name: _folded(name) for name in names}
    if not folded:
        return {}
    listed = () if table_check is None else table_check.listed
    columns = dict.fromkeys((name for name in listed if not WILDCARD.search(name)), "")
    for leaf in protected:
        for length in range(1, len(leaf) + 1):
            name = ".".join(leaf[:length])
            columns[_folded(name)] = name
    return {name: columns[known] or name for name, known in folded.items() if known in columns}


def refuse_values_of_folders(
    path: str, names: FolderNames, protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> None:
    """Raise `FolderNameError` if the folders of a file give values to a protected column: readers use them."""
    for name, column in protected_names(names, protected, table_check).items():
        raise FolderNameError(path, names[name], column)


def refuse_folders_above(
    location: FileLocation, protected: Iterable[ColumnPath], table_check: TableCheck | None
) -> None:
    """Raise `FolderNameError` if a folder above a file gives values to a protected column."""
    refuse_values_of_folders(str(location), names_in_folders(location.path), protected, table_check)


def _folded(name: str) -> str:
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


class KeySource(Protocol):
    """The keys of a file, as `FileKeyRetriever` finds them."""

    def material(self, key_metadata: bytes | None) -> KeyMaterial | None:
        """Return the key material of key metadata; None for a data key."""
        ...

    def name_without_metadata(self, column_path: ColumnPath | None) -> str | None:
        """Return the name of the data key of the footer (None) or a column without key metadata."""
        ...


def seen_key(source: KeySource, key_metadata: bytes | None, column_path: ColumnPath | None) -> KeyReference | None:
    """Return the key that key metadata names; None if neither the file nor the configuration names it."""
    # The source is the same as for the key itself, so that the compared key is the one that is used.
    material = source.material(key_metadata)
    if material is not None:
        return MasterKeyReference(material.master_key_id)
    parsed = parse_key_metadata(key_metadata)
    name = parsed.name if isinstance(parsed, DataKeyId) else source.name_without_metadata(column_path)
    return None if name is None else DataKeyReference(name)


def _moved(moves: Sequence[tuple[str, str]], key: KeyReference) -> set[KeyReference]:
    """Return the keys at the other ends of moves."""
    both_ways = [*moves, *((new, old) for old, new in moves)]
    return {MasterKeyReference(other) for one, other in both_ways if key == MasterKeyReference(one)}


def _id_of(key: KeyReference) -> str:
    return key.master_key_id if isinstance(key, MasterKeyReference) else key.name


def _text(key: KeyReference | None) -> str:
    if key is None:
        return _WITHOUT_METADATA
    kind = "master key" if isinstance(key, MasterKeyReference) else "data key"
    return f"the {kind} {_id_of(key)[:200]!r}"


# --- the one value that a column has in a file, on which the keys of the file depend ---

# It comes from the statistics in the footer, so no page is read. Minimum and maximum of each row group must
# be equal, and no value may be null. A writer that shortens long values makes the two differ.

_INT32, _INT64, _BYTE_ARRAY = 1, 2, 6
_CONVERTED_TYPE, _LOGICAL_TYPE = 6, 10


@dataclass(frozen=True)
class ColumnValue:
    """The value of a file, None without rows; or the problem why the column gives none."""

    value: str | None = None
    problem: str = ""


def column_value(footer: Footer, name: str, deks: Mapping[tuple[str, ...], SecretBytes]) -> ColumnValue | None:
    """Return the value of a top-level column; None if its metadata is encrypted with a key that is not given."""
    column = next((column for column in footer.columns if column.path == (name,)), None)
    if column is None:
        return ColumnValue(problem=f"there is no column {name!r} at the top level")
    dek = deks.get(column.path)
    if column.encryption is ColumnEncryption.COLUMN_KEY and dek is None:
        return None
    cipher = footer.cipher_of(column, dek)
    chunks = [footer.chunk_metadata(ordinal, column, cipher) for ordinal in range(len(footer.row_groups))]
    return value_of_chunks(name, footer.metadata.schema, column.ordinal, chunks)


def values_in_footer(data: bytes, names: Iterable[str]) -> dict[str, ColumnValue]:
    """Return the values of top-level columns, from the bytes of a plaintext or decrypted footer."""
    footer, _ = FileMetaData.read(data)
    return {name: _value_in(footer, name) for name in names}


def _value_in(footer: FileMetaData, name: str) -> ColumnValue:
    chunks: list[ColumnMetaData] = []
    position = 0
    for group in footer.row_groups:
        for ordinal, chunk in enumerate(group.columns):
            crypto = chunk.crypto_metadata
            own_key = None if crypto is None else crypto.encryption_with_column_key
            if own_key is not None and tuple(own_key.path_in_schema) == (name,):
                return ColumnValue(problem=f"column {name!r} has a key of its own, which is not known here")
            if chunk.meta_data is not None and tuple(chunk.meta_data.path_in_schema) == (name,):
                position = ordinal
                chunks.append(chunk.meta_data)
    if footer.row_groups and not chunks:
        return ColumnValue(problem=f"there is no column {name!r} at the top level")
    return value_of_chunks(name, footer.schema, position, chunks) if chunks else ColumnValue()


def value_of_chunks(
    name: str, schema: Sequence[SchemaElement], ordinal: int, chunks: Iterable[ColumnMetaData]
) -> ColumnValue:
    """Return the value of a top-level column."""
    element = [node for node in schema[1:] if not node.num_children][ordinal]
    is_plain = all(element.struct.entry(field) is None for field in (_CONVERTED_TYPE, _LOGICAL_TYPE))
    if element.type != _BYTE_ARRAY and not (element.type in (_INT32, _INT64) and is_plain):
        return ColumnValue(problem=f"column {name!r} has neither strings nor integers of 32 or 64 bits")
    found: set[bytes] = set()
    for chunk in chunks:
        try:
            number, stated = chunk.num_values, ChunkStatistics(chunk.struct).statistics or Statistics()
            nulls, least, greatest = stated.null_count, stated.min_value, stated.max_value
        except ParquetFormatError:
            return ColumnValue(problem=f"the statistics of column {name!r} are damaged")
        if number == 0:
            continue
        if nulls:
            return ColumnValue(problem=f"column {name!r} has nulls")
        if nulls is None or least is None or greatest is None:
            return ColumnValue(problem=f"column {name!r} has no complete statistics")
        found |= {bytes(least), bytes(greatest)}
    if len(found) > 1:
        return ColumnValue(problem=f"column {name!r} has several values")
    for data in found:
        if element.type != _BYTE_ARRAY:
            return ColumnValue(str(int.from_bytes(data, "little", signed=True)))
        try:
            return ColumnValue(data.decode())
        except UnicodeDecodeError:
            return ColumnValue(problem=f"column {name!r} has a value that is not UTF-8")
    return ColumnValue()
