"""The filter of `erase --rewrite`: conditions joined by AND, as `customer = 4711 AND country IN ('DE', 'FR')`.

A literal has the type of its column. As in SQL, NULL matches only `IS NULL`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from parquet_keytools.config.document import did_you_mean, one_of
from parquet_keytools.errors import ConfigurationError

_LITERAL = r"(?:'(?:[^']|'')*'|-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?(?!\w)|true\b|false\b)"
_LITERALS = re.compile(_LITERAL, re.IGNORECASE)
_CONDITION = re.compile(
    rf"""\s*(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<name>[^\W\d][\w.]*))\s*
    (?: (?P<operator><=|>=|!=|<>|[=<>])\s*(?P<literal>{_LITERAL})
      | \bIN\s*\((?P<literals>\s*{_LITERAL}\s*(?:,\s*{_LITERAL}\s*)*)\)
      | \bIS\s+(?P<negation>NOT\s+)?NULL\b )
    \s*(?:(?P<more>\bAND\b)|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_GRAMMAR = (
    "A filter is COLUMN OPERATOR LITERAL, joined by AND. Operators: =, !=, <, <=, >, >=, IN (...), IS NULL, "
    "IS NOT NULL. Write texts, dates and timestamps in single quotes, and names of columns that are not words in "
    "double quotes."
)


def _is_in(values: Any, literals: pa.Array) -> Any:
    if pa.types.is_floating(literals.type):
        # As for `=`, -0.0 is 0.0: pyarrow's function compares bits.
        values, literals = (pc.if_else(pc.equal(each, 0.0), 0.0, each) for each in (values, literals))
    return pc.if_else(pc.is_valid(values), pc.is_in(values, literals), None)


_COMPARE: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "IN": _is_in,
    "IS NULL": lambda values, _: pc.is_null(values),
    "IS NOT NULL": lambda values, _: pc.is_valid(values),
}
_TEMPORAL = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_time)
_QUOTED = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_TEMPORAL)
_BARE = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
_UUID = pa.binary(16)
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""How the name of a folder says NULL."""


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with literals.

    Attributes:
        column: Name of the column, or dotted path of a field of a struct.
        operator: One of `_COMPARE`.
        literals: The literals as they are written, without quotes.
        is_quoted: Whether they are in quotes.
    """

    column: str
    operator: str
    literals: tuple[str, ...] = ()
    is_quoted: bool = False

    def typed(self, kind: pa.DataType) -> pa.Array:
        """Return the literals in the type of the column.

        Raises:
            ConfigurationError: They are not of this type.
        """
        if not self.literals:
            return None
        if not any(is_kind(kind) for is_kind in (*_QUOTED, *_BARE)) and kind != _UUID:
            raise ConfigurationError(f"column {self.column!r} is {kind}, which a filter cannot compare.")
        wants_quotes = kind == _UUID or any(is_kind(kind) for is_kind in _QUOTED)
        if self.is_quoted is not wants_quotes:
            quotes = "with" if wants_quotes else "without"
            raise ConfigurationError(
                f"column {self.column!r} is {kind}: its literals are written {quotes} single quotes."
            )
        try:
            if kind == _UUID:
                return pa.array([uuid.UUID(text).bytes for text in self.literals], kind)
            return pa.array(self.literals, pa.string()).cast(kind)
        except (pa.ArrowException, ValueError) as error:
            raise ConfigurationError(
                f"column {self.column!r} is {kind}, and a literal of the filter is not: {error}"
            ) from None


def parse_filter(text: str) -> tuple[Condition, ...]:
    """Parse a filter."""
    conditions: list[Condition] = []
    position, more = 0, True
    while more:
        found = _CONDITION.match(text, position)
        if found is None:
            where = f"at {text[position:].strip()[:40]!r}" if text[position:].strip() else "at its end"
            raise ConfigurationError(f"the filter is not valid {where}.", hint=_GRAMMAR)
        name = found["name"] or found["quoted"].replace('""', '"')
        operator = found["operator"] or ("IN" if found["literals"] else "IS NULL")
        if found["negation"]:
            operator = "IS NOT NULL"
        literals = _LITERALS.findall(found["literal"] or found["literals"] or "")
        quoted = {literal[0] == "'" for literal in literals}
        if len(quoted) > 1:
            raise ConfigurationError(f"the literals for column {name!r} are of several types.")
        plain = tuple(text[1:-1].replace("''", "'") if text[0] == "'" else text.lower() for text in literals)
        conditions.append(Condition(name, operator, plain, quoted == {True}))
        position, more = found.end(), bool(found["more"])
    return tuple(conditions)


class FileFilter:
    """A filter for files of one schema, and for the values that the folders of a file give.

    Attributes:
        columns: Names and dotted paths of the columns that it reads.
    """

    def __init__(
        self,
        conditions: Sequence[Condition],
        schema: pa.Schema,
        folder_values: Mapping[str, str | None],
        names: Sequence[str] = (),
    ) -> None:
        """Type the literals.

        Args:
            conditions: See `parse_filter`.
            schema: Schema of the file, with the columns of the filter at least.
            folder_values: Name of a column -> its value in the path of the file; None for NULL.
            names: Names of other columns of the file, for errors.
        """
        self._checks: list[tuple[Condition, tuple[str, ...] | pa.Scalar, pa.Array]] = []
        for condition in conditions:
            name = condition.column
            path = _path_in(schema, name)
            if path is not None and name in folder_values:
                raise ConfigurationError(f"column {name!r} is in the file and in the names of its folders.")
            place: tuple[str, ...] | pa.Scalar
            if path is not None:
                place, kind = path, _type_of(schema, path)
            elif name in folder_values:
                kind = pa.string() if condition.is_quoted or not condition.literals else pa.float64()
                if kind == pa.float64() and all(re.fullmatch(r"-?\d+", text) for text in condition.literals):
                    kind = pa.int64()
                place = _folder_value(name, folder_values[name], kind)
            else:
                known = list(dict.fromkeys([*schema.names, *names, *folder_values]))
                raise ConfigurationError(
                    f"there is no column {name!r}.", hint=did_you_mean(name, known) or one_of(known)
                )
            self._checks.append((condition, place, condition.typed(kind)))
        self.columns = [check.column for check, place, _ in self._checks if isinstance(place, tuple)]

    def matches(self, table: pa.Table, num_rows: int) -> pa.ChunkedArray | pa.Array:
        """Return for each row whether it matches; never null.

        Args:
            table: The columns of the filter, at least.
            num_rows: Number of rows.
        """

        def results() -> Iterator[Any]:
            for condition, place, literals in self._checks:
                values = _values(table, place) if isinstance(place, tuple) else pa.repeat(place, num_rows)
                one = literals[0] if literals is not None and condition.operator != "IN" else literals
                yield _COMPARE[condition.operator](values, one)

        return pc.fill_null(reduce(pc.and_kleene, results()), False)


def _path_in(schema: pa.Schema, name: str) -> tuple[str, ...] | None:
    """Return the path of a column, or of a field of structs; None if there is none."""
    if name in schema.names:
        return (name,)
    path = tuple(name.split("."))
    fields: Any = schema
    for part in path:
        if not isinstance(fields, pa.Schema) and not pa.types.is_struct(fields):
            return None
        position = fields.get_field_index(part)
        if position < 0:
            return None
        fields = fields.field(position).type
    return path


def _type_of(schema: pa.Schema, path: tuple[str, ...]) -> pa.DataType:
    kind = schema.field(path[0]).type
    for part in path[1:]:
        kind = kind.field(kind.get_field_index(part)).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _values(table: pa.Table, path: tuple[str, ...]) -> Any:
    values = table.column(path[0])
    if len(path) > 1:
        values = pc.struct_field(values, list(path[1:]))
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _folder_value(name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(text, pa.string()).cast(kind)
    except pa.ArrowInvalid:
        raise ConfigurationError(
            f"a folder has the value {str(text)[:80]!r} for {name!r}, which is not a number.",
            hint="Write the literal in single quotes.",
        ) from None
