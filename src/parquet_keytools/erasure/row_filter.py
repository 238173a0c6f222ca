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

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>'(?:[^']|'')*') | (?P<name>"(?:[^"]|"")+")
    | (?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w)) | (?P<word>[^\W\d]\w*(?:\.\w+)*)
    | (?P<sign><=|>=|!=|<>|[=<>(),]) )""",
    re.VERBOSE,
)
_GRAMMAR = (
    "A filter is COLUMN OPERATOR LITERAL, joined by AND. Operators: =, !=, <, <=, >, >=, IN (...), IS NULL, "
    "IS NOT NULL. Texts, dates and timestamps stand in single quotes; other names of columns in double quotes."
)
_COMPARE: Mapping[str, Callable[..., Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "IN": lambda values, literals: pc.if_else(pc.is_valid(values), pc.is_in(values, literals), None),
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
    """Parse a filter.

    Raises:
        ConfigurationError: It is not valid.
    """
    tokens = _Tokens(text)
    conditions = [_condition(tokens)]
    while tokens.take("AND"):
        conditions.append(_condition(tokens))
    tokens.expect("")
    return tuple(conditions)


class _Tokens:
    """The tokens of a filter, pairs of kind and text; the last is of kind `end`."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            found = _TOKEN.match(text, position)
            if found is None:
                raise self._error(text[position:].strip())
            self._tokens.append((str(found.lastgroup), found[found.lastgroup or 0]))
            position = found.end()
        self._tokens = [*self._tokens, ("end", "")][::-1]

    def take(self, *words: str) -> str | None:
        """Take the next token if it is one of these words or signs; return it in capitals."""
        kind, text = self._tokens[-1]
        if kind not in ("word", "sign", "end") or text.upper() not in words:
            return None
        self._next()
        return text.upper()

    def take_kind(self, *kinds: str) -> tuple[str, str]:
        """Take the next token, which is of one of these kinds, without its quotes."""
        kind, text = self._tokens[-1]
        if kind not in kinds:
            raise self._error(text)
        self._next()
        quote = text[0] if kind in ("text", "name") else ""
        return kind, text[1:-1].replace(quote * 2, quote) if quote else text

    def expect(self, *words: str) -> str:
        """Take the next token, which is one of these words or signs."""
        found = self.take(*words)
        if found is None:
            raise self._error(self._tokens[-1][1])
        return found

    def _next(self) -> None:
        if len(self._tokens) > 1:
            self._tokens.pop()

    @staticmethod
    def _error(text: str) -> ConfigurationError:
        where = f"at {text[:40]!r}" if text else "at its end"
        return ConfigurationError(f"the filter is not valid {where}.", hint=_GRAMMAR)


def _condition(tokens: _Tokens) -> Condition:
    _, column = tokens.take_kind("word", "name")
    operator = tokens.expect(*_COMPARE.keys() - {"IS NULL", "IS NOT NULL"}, "IS")
    if operator == "IS":
        negation = "NOT " if tokens.take("NOT") else ""
        tokens.expect("NULL")
        return Condition(column, f"IS {negation}NULL")
    if operator != "IN":
        return _with_literals(column, operator, [_literal(tokens)])
    tokens.expect("(")
    literals = [_literal(tokens)]
    while tokens.expect(",", ")") == ",":
        literals.append(_literal(tokens))
    return _with_literals(column, operator, literals)


def _literal(tokens: _Tokens) -> tuple[bool, str]:
    if word := tokens.take("TRUE", "FALSE"):
        return False, word.lower()
    kind, text = tokens.take_kind("text", "number")
    return kind == "text", text


def _with_literals(column: str, operator: str, literals: Sequence[tuple[bool, str]]) -> Condition:
    if len({is_quoted for is_quoted, _ in literals}) > 1:
        raise ConfigurationError(f"the literals for column {column!r} are of several types.")
    return Condition(column, operator, tuple(text for _, text in literals), literals[0][0])


class FileFilter:
    """A filter for files of one schema, and for the values that the folders of a file give.

    Attributes:
        columns: Names and dotted paths of the columns that it reads.
    """

    def __init__(
        self, conditions: Sequence[Condition], schema: pa.Schema, folder_values: Mapping[str, str | None]
    ) -> None:
        """Type the literals.

        Args:
            conditions: See `parse_filter`.
            schema: Schema of the file.
            folder_values: Name of a column -> its value in the path of the file; None for NULL.

        Raises:
            ConfigurationError: A column does not exist, is in path and file, or has another type than literals.
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
                known = [*schema.names, *folder_values]
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
