"""Labels of columns, from where data is modelled: dbt, data contracts, CSV files, and metadata of fields.

Anyone who makes data chooses the labels of its fields: these give keys to columns, and never take one away.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.document import (
    Mistake,
    UnreadableYamlError,
    YamlPath,
    did_you_mean,
    one_of,
    read_yaml,
)
from parquet_keytools.runtime.presentation import expanded

if TYPE_CHECKING:
    from parquet_keytools.config.settings import ClassSettings, LabelSource

_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Label:
    """A label of a column; `key` is the key of its class, None for plaintext.

    `column` is the dotted path of a leaf column, or of a parent whose children it covers; lists and maps may leave
    out the names that Parquet adds, such as `list.element`. `place` is where it was found, with the line if known.
    """

    column: str
    class_name: str
    key: str | None
    place: str

    @property
    def text(self) -> str:
        """The label and its place, for errors."""
        return f"{self.class_name!r} by {self.place}"


ColumnPath = tuple[str, ...]

FieldLabels = Callable[[str], Mapping[ColumnPath, str]]
"""Takes the name of the metadata field that holds a label; returns path of each labelled field -> label."""


def no_field_labels(field: str) -> Mapping[ColumnPath, str]:
    """Return no labels: for data whose fields carry no metadata."""
    return {}


# --- which label a column has ---


@dataclass(frozen=True)
class Labels:
    """The labels of a table that its configuration refers to.

    Attributes:
        field: The name of the metadata field that holds labels of Arrow and Spark fields; None without `arrow`.
        unlabelled: What columns without a label are; None for an error.
        iceberg: The source that has the labels of Iceberg tables; None without `iceberg`.
    """

    labels: tuple[Label, ...] = ()
    field: str | None = None
    unlabelled: ClassSettings | None = None
    classes: Mapping[str, ClassSettings] = dataclasses.field(default_factory=dict)
    iceberg: LabelSource | None = None

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys that columns may get by labels."""
        used = [label.key for label in self.labels]
        if self.unlabelled is not None:
            used.append(self.unlabelled.key)
        if self.field is not None or self.iceberg is not None:
            used += [found.key for found in self.classes.values()]
        return tuple(dict.fromkeys(key for key in used if key is not None))

    @property
    def iceberg_keys(self) -> tuple[str, ...]:
        """Names of keys that Iceberg tables may be under instead of the keys of their columns."""
        return self.iceberg.iceberg.keys if self.iceberg and self.iceberg.iceberg else ()

    def may_come_with_data(self, label: Label | None) -> bool:
        """Return whether a column may be under the key of any class: no label file has its label."""
        return (
            label is None and self.field is not None and self.unlabelled is not None and bool(self.unlabelled.key)
        )

    @cached_property
    def by_column(self) -> dict[str, Label]:
        """Dotted path in lower case -> its label; of several, one with a key."""
        found: dict[str, Label] = {}
        for label in self.labels:
            name = label.column.casefold()
            if name not in found or (found[name].key is None and label.key is not None):
                found[name] = label
        return found

    def of(self, leaf: ColumnPath) -> Label | None:
        """Return the label of a leaf column: its own, or else the nearest parent's. Case is ignored."""
        if not self.labels:
            return None
        names = (".".join(path).casefold() for path in nearest_first(leaf))
        return next((self.by_column[name] for name in names if name in self.by_column), None)

    def of_fields(
        self,
        leaves: Collection[ColumnPath],
        field_labels: FieldLabels,
        path: YamlPath,
        mistakes: list[Mistake],
        *,
        is_iceberg: bool,
    ) -> dict[ColumnPath, Label]:
        """Return the labels that come with the data and give a column a key.

        `mistakes` receives labels that are no class, and labels that no column has if it would be plaintext.
        """
        field_name = self.field
        if is_iceberg:
            field_name = self.iceberg.iceberg.field if self.iceberg and self.iceberg.iceberg else None
        if field_name is None:
            return {}
        by_field: dict[ColumnPath, Label] = {}
        for field, class_name in field_labels(field_name).items():
            place = f"the field {'.'.join(field)!r}"
            found = self.classes.get(class_name)
            if found is None:
                mistakes.append(Mistake((*path, "labels_from"), *unknown_class(class_name, place, self.classes)))
            elif found.key is not None:
                by_field[field] = Label(".".join(field), class_name, found.key, place)
        labels = {}
        there: set[ColumnPath] = set()
        for leaf in leaves if by_field else ():
            near = list(nearest_first(leaf))
            there.update(near)
            if (nearest := next((name for name in near if name in by_field), None)) is not None:
                labels[leaf] = by_field[nearest]
        for field, label in by_field.items() if self._leaves_plaintext else ():
            if field not in there:
                message = f"no column is named {label.column!r}, which has the label {label.text}."
                hint = "Columns without a label would be plaintext."
                mistakes.append(Mistake((*path, "labels_from"), message, hint))
        return labels

    @property
    def _leaves_plaintext(self) -> bool:
        return self.unlabelled is not None and self.unlabelled.key is None

    def unmatched(self, leaves: Sequence[ColumnPath]) -> Iterator[Label]:
        """Yield the labels with a key that no column has, if an unlabelled column would be plaintext."""
        if not self._leaves_plaintext:
            return
        names = {".".join(path).casefold() for leaf in leaves for path in nearest_first(leaf)}
        for label in self.by_column.values():
            if label.key is not None and label.column.casefold() not in names:
                yield label


_OF_LISTS = frozenset(
    {("list", "element"), ("list", "item"), ("list", "array"), ("bag", "array_element"), ("bag", "array")}
)
_OF_MAPS = frozenset((outer, inner) for outer in ("key_value", "entries", "map") for inner in ("key", "value"))
_ALONE = "array"
"""The only name between a list and its elements in files of old writers."""


def nearest_first(leaf: ColumnPath) -> Iterator[ColumnPath]:
    """Yield the path of a leaf column and its parents, each with and without the names of `without_wrappers`."""
    for length in range(len(leaf), 0, -1):
        yield leaf[:length]
        yield without_wrappers(leaf[:length])


def without_wrappers(leaf: ColumnPath) -> ColumnPath:
    """Return the path of a leaf column without the names that Parquet adds to lists and maps."""
    names: list[str] = []
    position = 0
    while position < len(leaf):
        pair = leaf[position : position + 2]
        if position and pair in _OF_LISTS:
            position += 2
        elif position and (pair in _OF_MAPS or pair[0] == _ALONE):
            position += 1
        else:
            names.append(leaf[position])
            position += 1
    return tuple(names)


def unknown_class(name: str, place: str, classes: Iterable[str]) -> tuple[str, str]:
    """Return message and hint for a label that is no class."""
    known = list(classes)
    return f"{place} has the label {name!r}, and there is no such class.", did_you_mean(name, known) or one_of(
        known
    )


# --- reading labels ---


_Entry = tuple[str, str, str, bool]
"""A column, its label, where it was found, and whether it is a tag, which need not be a class."""


class _NotReadError(Exception):
    """Labels of a source cannot be read; has message and hint."""


def _entries(source: LabelSource, name: str, folder: Path) -> Iterator[_Entry]:
    """Yield the labels of one source; `name` is of the model or schema."""
    if source.columns is not None:
        for column, label in source.columns.items():
            yield column, label, source.places.get(column, "the configuration"), False
    elif source.csv is not None:
        yield from _of_csv(source.csv, folder)
    elif source.dbt is not None:
        yield from _of_dbt(source.dbt, name, source.field, folder)
    elif source.contract is not None:
        yield from _of_contract(source.contract, name, folder)


def _text(file_name: str, folder: Path) -> str:
    with (folder / expanded(file_name)).open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise _NotReadError(f"the file is larger than {_MOST_BYTES:,} bytes.", "")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NotReadError("the file is not UTF-8 text.", "") from None


def _of_csv(file_name: str, folder: Path) -> Iterator[_Entry]:
    rows = csv.reader(_text(file_name, folder).splitlines())
    header = [cell.strip() for cell in next(rows, [])]
    if header[:2] != ["column", "class"]:
        raise _NotReadError("the first line of the CSV file has to be `column,class`.", "")
    for row in rows:
        if not any(row):
            continue
        column, label = [cell.strip() for cell in (*row, "", "")][:2]
        if not column or not label:
            raise _NotReadError(f"line {rows.line_num} of the CSV file has no column or no class.", "")
        yield column, label, f"{file_name}:{rows.line_num}", False


def _of_dbt(file_name: str, name: str, field: str, folder: Path) -> Iterator[_Entry]:
    from dbt_artifacts_parser.parser import parse_manifest

    try:
        manifest: Any = parse_manifest(json.loads(_text(file_name, folder)), fallback_to_latest=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _NotReadError("this is not a manifest that dbt writes.", "") from None
    nodes = [*(manifest.nodes or {}).values(), *(manifest.sources or {}).values()]
    found = [node for node in nodes if node.name == name and getattr(node, "columns", None) is not None]
    kinds = ("model", "source", "seed", "snapshot")
    found = [node for node in found if getattr(node.resource_type, "value", node.resource_type) in kinds]
    if len(found) != 1:
        hint = did_you_mean(name, {node.name for node in nodes}) or "Name it: `name:` beside `dbt:`."
        raise _NotReadError(
            f"the manifest has {len(found) or 'no'} models or sources with the name {name!r}.", hint
        )
    (node,) = found
    lines = _dbt_lines((folder / expanded(file_name)).parent.parent, node)
    for key, column in (node.columns or {}).items():
        column_name = getattr(column, "name", None) or key
        place = lines.get(column_name, f"{file_name} ({node.unique_id})")
        parts = (column, getattr(column, "config", None))
        metas = [getattr(part, "meta", None) or {} for part in parts]
        for label in dict.fromkeys(meta[field] for meta in metas if field in meta):
            yield column_name, str(label), place, False
        tags = [getattr(part, "tags", None) or [] for part in parts]
        listed = [tag for some in tags for tag in ([some] if isinstance(some, str) else map(str, some))]
        for tag in dict.fromkeys(listed):
            yield column_name, tag, place, True


def _dbt_lines(project: Path, node: Any) -> dict[str, str]:
    """Return the place of each column in the YAML file that describes a model, as far as it is there."""
    described_in = getattr(node, "patch_path", None) or getattr(node, "original_file_path", "")
    patch = str(described_in).rpartition("://")[2]
    try:
        document = read_yaml((project / patch).read_bytes())
    except (OSError, UnreadableYamlError):
        return {}
    places: dict[str, str] = {}
    for path, line in document.lines.items():
        match path:
            case ("models" | "seeds" | "snapshots", int(model), "columns", int(column)):
                # A file that dbt does not read may have any form.
                with suppress(KeyError, TypeError, IndexError):
                    described = document.value[path[0]][model]
                    if described["name"] == node.name:
                        places[described["columns"][column]["name"]] = f"{patch}:{line}"
    return places


def _of_contract(file_name: str, name: str, folder: Path) -> Iterator[_Entry]:
    from open_data_contract_standard.model import OpenDataContractStandard

    text = _text(file_name, folder)
    try:
        contract = OpenDataContractStandard.from_string(text)
    except Exception as error:
        raise _NotReadError(f"this is not a data contract (ODCS): {type(error).__name__}.", "") from None
    schemas = list(enumerate(contract.schema_ or []))
    found = [(at, schema) for at, schema in schemas if name in (schema.name, schema.physicalName)]
    if len(found) != 1:
        names = {schema.name or "" for _, schema in schemas}
        hint = did_you_mean(name, names) or f"Name it: `name:` beside `contract:`. {one_of(names)}"
        raise _NotReadError(f"the contract has {len(found) or 'no'} schemas with the name {name!r}.", hint)
    lines: Mapping[YamlPath, int] = {}
    with suppress(UnreadableYamlError):
        lines = read_yaml(text).lines

    def of_properties(properties: Any, parents: ColumnPath, path: YamlPath) -> Iterator[_Entry]:
        for position, one in enumerate(properties or []):
            column = (*parents, one.physicalName or one.name or "")
            yield from of_property(one, column, (*path, "properties", position))

    def of_property(one: Any, column: ColumnPath, path: YamlPath) -> Iterator[_Entry]:
        place = f"{file_name}:{lines[path]}" if path in lines else file_name
        if one.classification is not None:
            yield ".".join(column), one.classification, place, False
        for tag in one.tags or []:
            yield ".".join(column), tag, place, True
        yield from of_properties(one.properties, column, path)
        if one.items is not None:
            yield from of_property(one.items, column, (*path, "items"))
        for part in ("key", "value"):
            if (inner := getattr(one.map, part, None)) is not None:
                yield from of_property(inner, (*column, part), (*path, "map", part))

    at, schema = found[0]
    yield from of_properties(schema.properties, (), ("schema", at))


def read_labels(
    sources: Sequence[LabelSource],
    table_name: str,
    folder: Path,
    classes: Mapping[str, ClassSettings],
    is_overridden: Callable[[str], bool],
) -> tuple[list[Label], list[Mistake]]:
    """Return the labels of a table, and the mistakes in their sources, with paths that begin at the table.

    `is_overridden` says whether `column_keys` covers a column, so that its labels may contradict each other.
    """
    labels: list[Label] = []
    mistakes: list[Mistake] = []
    for position, source in enumerate(sources):
        path: YamlPath = ("labels_from", position)
        try:
            for column, class_name, place, is_tag in _entries(source, source.name or table_name, folder):
                if class_name in classes:
                    labels.append(Label(column, class_name, classes[class_name].key, place))
                elif not is_tag:
                    problem = unknown_class(class_name, f"column {column!r} in {place}", classes)
                    mistakes.append(Mistake(path, *problem))
        except OSError as error:
            mistakes.append(Mistake(path, f"the file cannot be read: {error.strerror or type(error).__name__}."))
        except ImportError as error:
            extra = "dbt" if source.dbt is not None else "contract"
            hint = f"pip install 'parquet-keytools[{extra}]'"
            mistakes.append(Mistake(path, f"{error.name} is not installed.", hint))
        except _NotReadError as error:
            mistakes.append(Mistake(path, *error.args))
    # Without a schema, `column_keys` may only seem to cover a column: the labels are kept.
    decided = [label for label in labels if not is_overridden(label.column)]
    return labels, [*mistakes, *_contradictions(decided)]


def _contradictions(labels: Sequence[Label]) -> Iterator[Mistake]:
    """Yield labels of one column that protect it differently, and plaintext within a column that has a key."""
    first: dict[str, Label] = {}
    for label in labels:
        name = ".".join(without_wrappers(tuple(label.column.casefold().split("."))))
        other = first.setdefault(name, label)
        if other.key != label.key:
            yield _contradiction(label, other)
    for column, label in first.items():
        parts = column.split(".")
        parents = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
        parent = next((first[parent] for parent in parents if parent in first), label)
        if parent.key is not None and label.key is None:
            yield _contradiction(label, parent)


def _contradiction(label: Label, other: Label) -> Mistake:
    return Mistake(
        ("labels_from",),
        f"column {label.column!r} has contradicting labels: {label.text}, and {other.text}.",
        "Correct one of them, or list the column under column_keys, which overrides labels.",
    )
