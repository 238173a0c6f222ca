"""Labels of columns, from where data is modelled: dbt, data contracts, CSV files, and metadata of fields.

Anyone who makes data chooses the labels of its fields: these give keys to columns, and never take one away.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
        for path in nearest_first(leaf):
            label = self.by_column.get(".".join(path).casefold())
            if label is not None:
                return label
        return None

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
        for leaf in leaves if by_field else ():
            near = (by_field.get(path) for path in nearest_first(leaf))
            label = next((label for label in near if label is not None), None)
            if label is not None:
                labels[leaf] = label
        if self._leaves_plaintext:
            there = {path for leaf in leaves for path in nearest_first(leaf)}
            for field, label in by_field.items():
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


Lines = Mapping[YamlPath, int]


@dataclass(frozen=True)
class _Reading:
    """Reads the labels of one source; `name` is of the model or schema, and `problems` messages and hints."""

    source: LabelSource
    name: str
    folder: Path
    classes: Mapping[str, ClassSettings]
    labels: list[Label] = dataclasses.field(default_factory=list)
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, column: str, class_name: str, place: str) -> None:
        found = self.classes.get(class_name)
        if found is None:
            self.problems.append(unknown_class(class_name, f"column {column!r} in {place}", self.classes))
        else:
            self.labels.append(Label(column, class_name, found.key, place))

    def add_tags(self, column: str, tags: Iterable[str], place: str) -> None:
        """Add the tags that are classes. Others mean something else."""
        for tag in tags:
            if tag in self.classes:
                self.add(column, tag, place)

    def read(self) -> None:
        source = self.source
        try:
            if source.columns is not None:
                for column, class_name in source.columns.items():
                    self.add(column, class_name, source.places.get(column, "the configuration"))
            elif source.csv is not None:
                self._csv(source.csv)
            elif source.dbt is not None:
                self._dbt(source.dbt)
            elif source.contract is not None:
                self._contract(source.contract)
        except OSError as error:
            self.problems.append((f"the file cannot be read: {error.strerror or type(error).__name__}.", ""))
        except ImportError as error:
            extra = "dbt" if source.dbt is not None else "contract"
            self.problems.append((f"{error.name} is not installed.", f"pip install 'parquet-keytools[{extra}]'"))
        except _NotValidError as error:
            self.problems.append((f"{error}.", ""))

    def _text(self, name: str) -> str:
        with (self.folder / expanded(name)).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise _NotValidError(f"the file is larger than {_MOST_BYTES:,} bytes")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _NotValidError("the file is not UTF-8 text") from None

    def _csv(self, name: str) -> None:
        rows = csv.reader(self._text(name).splitlines())
        header = [cell.strip() for cell in next(rows, [])]
        if header[:2] != ["column", "class"]:
            raise _NotValidError("the first line of the CSV file has to be `column,class`")
        for row in rows:
            if not any(row):
                continue
            if len(row) < 2 or not row[0].strip() or not row[1].strip():
                raise _NotValidError(f"line {rows.line_num} of the CSV file has no column or no class")
            self.add(row[0].strip(), row[1].strip(), f"{name}:{rows.line_num}")

    def _dbt(self, name: str) -> None:
        from dbt_artifacts_parser.parser import parse_manifest

        try:
            manifest: Any = parse_manifest(json.loads(self._text(name)), fallback_to_latest=True)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _NotValidError("this is not a manifest that dbt writes") from None
        nodes = [*(manifest.nodes or {}).values(), *(manifest.sources or {}).values()]
        found = [node for node in nodes if node.name == self.name and getattr(node, "columns", None) is not None]
        kinds = ("model", "source", "seed", "snapshot")
        found = [node for node in found if getattr(node.resource_type, "value", node.resource_type) in kinds]
        if len(found) != 1:
            many = "no" if not found else f"{len(found)}"
            hint = did_you_mean(self.name, {node.name for node in nodes}) or "Name it: `name:` beside `dbt:`."
            self.problems.append((f"the manifest has {many} models or sources with the name {self.name!r}.", hint))
            return
        (node,) = found
        lines = self._dbt_lines(name, node)
        for key, column in (node.columns or {}).items():
            column_name = getattr(column, "name", None) or key
            place = lines.get(column_name, f"{name} ({node.unique_id})")
            config = getattr(column, "config", None)
            metas = [getattr(column, "meta", None), getattr(config, "meta", None)]
            for class_name in dict.fromkeys(
                meta[self.source.field] for meta in metas if meta and self.source.field in meta
            ):
                self.add(column_name, str(class_name), place)
            tags = [*_tags(getattr(column, "tags", None)), *_tags(getattr(config, "tags", None))]
            self.add_tags(column_name, dict.fromkeys(tags), place)

    def _dbt_lines(self, manifest: str, node: Any) -> dict[str, str]:
        """Return the place of each column in the YAML file that describes a model, as far as it is there."""
        patch = str(getattr(node, "patch_path", None) or getattr(node, "original_file_path", "")).rpartition(
            "://"
        )[2]
        project = (self.folder / expanded(manifest)).parent.parent
        try:
            document = read_yaml((project / patch).read_bytes())
        except (OSError, UnreadableYamlError):
            return {}
        places: dict[str, str] = {}
        for path, line in document.lines.items():
            match path:
                case ("models" | "seeds" | "snapshots", int(model), "columns", int(column)):
                    value = document.value
                    try:
                        described = value[path[0]][model]
                        if described["name"] == node.name:
                            places[described["columns"][column]["name"]] = f"{patch}:{line}"
                    except (KeyError, TypeError, IndexError):
                        continue
        return places

    def _contract(self, name: str) -> None:
        from open_data_contract_standard.model import OpenDataContractStandard

        text = self._text(name)
        try:
            contract = OpenDataContractStandard.from_string(text)
        except Exception as error:
            raise _NotValidError(f"this is not a data contract (ODCS): {type(error).__name__}") from None
        schemas = list(enumerate(contract.schema_ or []))
        found = [(at, schema) for at, schema in schemas if self.name in (schema.name, schema.physicalName)]
        if len(found) != 1:
            names = {schema.name or "" for _, schema in schemas}
            hint = did_you_mean(self.name, names) or f"Name it: `name:` beside `contract:`. {one_of(names)}"
            many = "no" if not found else f"{len(found)}"
            self.problems.append((f"the contract has {many} schemas with the name {self.name!r}.", hint))
            return
        try:
            lines = dict(read_yaml(text).lines)
        except UnreadableYamlError:
            lines = {}
        at, schema = found[0]
        self._properties(name, schema.properties, (), ("schema", at), lines)

    def _properties(self, name: str, properties: Any, parents: ColumnPath, path: YamlPath, lines: Lines) -> None:
        for position, found in enumerate(properties or []):
            column = (*parents, found.physicalName or found.name or "")
            self._property(name, found, column, (*path, "properties", position), lines)

    def _property(self, name: str, found: Any, column: ColumnPath, path: YamlPath, lines: Lines) -> None:
        place = f"{name}:{lines[path]}" if path in lines else name
        if found.classification is not None:
            self.add(".".join(column), found.classification, place)
        self.add_tags(".".join(column), found.tags or [], place)
        self._properties(name, found.properties, column, path, lines)
        if found.items is not None:
            self._property(name, found.items, column, (*path, "items"), lines)
        if found.map is not None:
            for part in ("key", "value"):
                if (inner := getattr(found.map, part, None)) is not None:
                    self._property(name, inner, (*column, part), (*path, "map", part), lines)


class _NotValidError(Exception):
    pass


def _tags(tags: Any) -> list[str]:
    return [tags] if isinstance(tags, str) else [str(tag) for tag in tags or []]


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
        reading = _Reading(source, source.name or table_name, folder, classes)
        reading.read()
        labels += reading.labels
        mistakes += [Mistake(("labels_from", position), *problem) for problem in reading.problems]
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
            yield _contradiction(label.column, label, other)
    for column, label in first.items():
        parts = column.split(".")
        parents = (first.get(".".join(parts[:length])) for length in range(len(parts) - 1, 0, -1))
        parent = next((parent for parent in parents if parent is not None), None)
        if parent is not None and parent.key is not None and label.key is None:
            yield _contradiction(label.column, label, parent)


def _contradiction(column: str, label: Label, other: Label) -> Mistake:
    return Mistake(
        ("labels_from",),
        f"column {column!r} has contradicting labels: {label.text}, and {other.text}.",
        "Correct one of them, or list the column under column_keys, which overrides labels.",
    )
