"""An inspection as people read it: a tree, and a map of the file."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import typer

from parquet_keytools.cli.output import size_text
from parquet_keytools.conformance.inspection import (
    FOOTER,
    PLAINTEXT,
    InspectedChunk,
    InspectedColumn,
    Inspection,
    KeyDescription,
)
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.storage.printable import printable

_MAP_WIDTH = 64
_MAX_MAP_LINES = 8
_MOST_ROW_GROUPS = 12
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_LEAST_WIDTH = 40
"""So much of a line is text, however narrow the terminal is."""

_Style = Callable[[str], str]
_RED: _Style = partial(typer.style, fg="red")


@dataclass
class _Branch:
    text: str
    style: _Style = str
    children: list[_Branch] = field(default_factory=list)

    def add(self, text: str, style: _Style = str) -> _Branch:
        branch = _Branch(text, style)
        self.children.append(branch)
        return branch

    def lines(self, width: int | None, first: str = "", rest: str = "") -> Iterator[str]:
        """Yield the lines; where there is a width, longer ones go on below themselves and leave the tree whole."""
        indent = f"{rest}{'│   ' if self.children else '    '}"
        lines = [self.text]
        if width is not None:
            room = max(_LEAST_WIDTH, width - len(indent))
            lines = textwrap.wrap(self.text, room, break_on_hyphens=False) or lines
        yield f"{first}{self.style(lines[0])}"
        for line in lines[1:]:
            yield f"{indent}{self.style(line)}"
        for position, child in enumerate(self.children):
            is_last = position == len(self.children) - 1
            begin, beside = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            yield from child.lines(width, f"{rest}{begin}", f"{rest}{beside}")


class _Palette:
    """Gives each key a symbol and a colour, the same everywhere."""

    def __init__(self, names: Iterable[str]) -> None:
        keys = [name for name in dict.fromkeys(names) if name not in (PLAINTEXT, FOOTER)]
        self.symbols = {name: _SYMBOLS[position % len(_SYMBOLS)] for position, name in enumerate(keys)}
        self.colours = {name: _COLOURS[position % len(_COLOURS)] for position, name in enumerate(keys)}
        self.symbols |= {PLAINTEXT: "-", FOOTER: "#"}
        self.colours |= {PLAINTEXT: "red", FOOTER: "white"}

    def style(self, name: str) -> _Style:
        return partial(typer.style, fg=self.colours.get(name, "white"))


def render_inspection(shown: Inspection, width: int | None = None) -> str:
    """Return the tree and the map, in lines no longer than a width in columns, where there is one."""
    shown = _printable(shown)
    root = _Branch(f"{shown.path}  {size_text(shown.size_bytes)}", partial(typer.style, bold=True))
    if shown.mode is None:
        root.add("nothing can be read", _RED)
    else:
        titles = [column.key_title(shown.footer_key) for column in shown.columns]
        palette = _Palette([*shown.bytes_by_key, *titles])
        _add_protection(root, shown)
        _add_columns(root, shown, palette)
        _add_row_groups(root, shown, palette)
        _add_shares(root, shown, palette)
    if shown.flaws:
        flaws = root.add("wrong; run `verify` for details", _RED)
        for finding in shown.flaws[:10]:
            flaws.add(f"{finding.rule.id}: {finding.message}")
    lines = list(root.lines(width))
    if shown.mode is not None:
        lines += ["", *_map(shown, palette)]
    return "\n".join(lines)


def _printable(shown: Inspection) -> Inspection:
    """Return the same without anything that would steer a terminal: most texts in a file are anyone's."""
    columns = (
        replace(
            column,
            path=printable(column.path),
            key=_printable_key(column.key),
            denied=_printable_text(column.denied),
        )
        for column in shown.columns
    )
    bytes_by_key: Counter[str] = Counter()
    for name, length in shown.bytes_by_key.items():
        bytes_by_key[printable(name)] += length
    return replace(
        shown,
        path=printable(shown.path),
        created_by=_printable_text(shown.created_by),
        footer_key=_printable_key(shown.footer_key),
        footer_denied=_printable_text(shown.footer_denied),
        key_values={printable(key): length for key, length in shown.key_values.items()},
        columns=tuple(columns),
        bytes_by_key=bytes_by_key,
    )


def _printable_key(key: KeyDescription | None) -> KeyDescription | None:
    if key is None:
        return None
    return replace(
        key,
        name=_printable_text(key.name),
        reference=_printable_text(key.reference),
        flaw=_printable_text(key.flaw),
    )


def _printable_text(text: str | None) -> str | None:
    return None if text is None else printable(text)


def _add_protection(root: _Branch, shown: Inspection) -> None:
    assert shown.mode is not None
    text = shown.mode.value
    if shown.mode is FooterMode.UNENCRYPTED:
        root.add("not encrypted", _RED)
    else:
        seen = {None: "not authenticated: no key", True: "authentic", False: "NOT authentic"}
        branch = root.add(f"{text}, {shown.algorithm}, {seen[shown.footer_is_authentic]}")
        if shown.supply_aad_prefix:
            branch.add("AAD prefix: not stored, readers must supply it")
        else:
            stored = "none" if shown.aad_prefix_escaped is None else f"'{shown.aad_prefix_escaped}'"
            branch.add(f"AAD prefix: {printable(stored)}")
        branch.add(f"file unique: {printable(shown.aad_file_unique or 'none')}")
        if shown.footer_key is not None:
            branch.add(f"key: {_key_text(shown.footer_key)}")
        if shown.footer_denied is not None:
            branch.add(f"key unavailable: {shown.footer_denied}", _RED)
        branch.add(f"at byte {shown.footer_offset:,}, {shown.footer_length:,} bytes")
    if shown.num_rows is not None:
        root.add(f"{shown.num_rows:,} rows, written by {shown.created_by or 'an unnamed writer'}")
    if shown.key_values:
        values = ", ".join(f"{key} ({size_text(length)})" for key, length in shown.key_values.items())
        root.add(f"key-value metadata: {values}")


def _add_columns(root: _Branch, shown: Inspection, palette: _Palette) -> None:
    if not shown.columns:
        return
    branch = root.add(f"{len(shown.columns)} columns")
    for column in shown.columns:
        style = palette.style(column.key_title(shown.footer_key))
        leaf = branch.add(f"{column.path}: {_column_text(column)}", style)
        if column.denied is not None:
            leaf.add(f"key unavailable: {column.denied}", _RED)
        if column.shows:
            leaf.add(f"shows: {', '.join(column.shows)}")


def _column_text(column: InspectedColumn) -> str:
    if column.encryption is ColumnEncryption.PLAINTEXT:
        return "plaintext"
    if column.encryption is ColumnEncryption.FOOTER_KEY:
        return "footer key"
    return _key_text(column.key) if column.key else ""


def _add_row_groups(root: _Branch, shown: Inspection, palette: _Palette) -> None:
    if not shown.row_groups:
        return
    branch = root.add(f"{len(shown.row_groups)} row groups")
    for row_group in shown.row_groups[:_MOST_ROW_GROUPS]:
        size = "" if row_group.total_compressed_size is None else f", {size_text(row_group.total_compressed_size)}"
        place = "" if row_group.file_offset is None else f" at byte {row_group.file_offset:,}"
        leaf = branch.add(f"row group {row_group.ordinal}: {row_group.num_rows:,} rows{size}{place}")
        for chunk in shown.chunks:
            if chunk.row_group_ordinal == row_group.ordinal:
                column = shown.columns[chunk.column_ordinal]
                style = palette.style(column.key_title(shown.footer_key))
                leaf.add(f"{column.path}: {_chunk_text(chunk)}", style)
    if len(shown.row_groups) > _MOST_ROW_GROUPS:
        branch.add(f"and {len(shown.row_groups) - _MOST_ROW_GROUPS} more; --json shows all")


def _chunk_text(chunk: InspectedChunk) -> str:
    counts = Counter(module.module_type for module in chunk.modules)
    size = size_text(sum(module.length for module in chunk.modules))
    start = min((module.offset for module in chunk.modules), default=0)
    parts = [f"{chunk.num_values:,} values, {size} from byte {start:,}"]
    if counts[ModuleType.DATA_PAGE_HEADER]:
        parts.append(f"{counts[ModuleType.DATA_PAGE]} data pages")
    if counts[ModuleType.DICTIONARY_PAGE]:
        parts.append("dictionary")
    if counts[ModuleType.OFFSET_INDEX] or counts[ModuleType.COLUMN_INDEX]:
        parts.append("page index")
    if counts[ModuleType.BLOOM_FILTER_HEADER]:
        parts.append("Bloom filter")
    if not chunk.is_whole:
        parts.append("DAMAGED")
    return ", ".join(parts)


def _add_shares(root: _Branch, shown: Inspection, palette: _Palette) -> None:
    branch = root.add("bytes under each key")
    known = 0
    for name, length in shown.bytes_by_key.items():
        known += length
        share = 100 * length / shown.size_bytes
        text = f"{palette.symbols.get(name, '?')}  {share:5.1f} %  {size_text(length)}  {name}"
        branch.add(text, palette.style(name))
    unknown = shown.size_bytes - known
    if unknown > 0:
        text = f".  {100 * unknown / shown.size_bytes:5.1f} %  {size_text(unknown)}  "
        branch.add(text + "unknown without keys, or belongs to nothing")


def _map(shown: Inspection, palette: _Palette) -> Iterator[str]:
    """Yield lines of symbols, each of which stands for the same number of bytes."""
    cells_wanted = _MAP_WIDTH * min(_MAX_MAP_LINES, max(1, shown.size_bytes // 65_536))
    cell_bytes = max(1, -(-shown.size_bytes // cells_wanted))
    cells = [""] * -(-shown.size_bytes // cell_bytes)
    ranges = [
        (module.offset, module.length, shown.columns[chunk.column_ordinal].key_title(shown.footer_key))
        for chunk in shown.chunks
        for module in chunk.modules
    ]
    if shown.footer_offset is not None:
        ranges.append((shown.footer_offset, shown.size_bytes - shown.footer_offset, FOOTER))
    for offset, length, name in ranges:
        first, last = offset // cell_bytes, -(-(offset + max(length, 1)) // cell_bytes)
        cells[first:last] = [name] * (min(last, len(cells)) - first)
    yield f"one character for {size_text(cell_bytes)}"
    for start in range(0, len(cells), _MAP_WIDTH):
        line = cells[start : start + _MAP_WIDTH]
        yield "".join(palette.style(name)(palette.symbols.get(name, "?")) if name else "." for name in line)


def _key_text(key: KeyDescription) -> str:
    if key.flaw is not None:
        return f"unknown: {key.flaw}"
    if key.kind == "none":
        known = "" if key.name is None else f"; here data key {key.name!r}"
        return f"no key metadata: readers must know the key{known}"
    if key.kind == "data key":
        return f"data key {key.name!r}"
    parts = [f"master key {key.name!r}" if key.name is not None else "key material in the file beside it"]
    if key.reference is not None:
        parts.append(f"reference {key.reference!r}")
    if key.double_wrapping is not None:
        parts.append("double wrapping" if key.double_wrapping else "single wrapping")
    if key.dek_length_bits is not None:
        parts.append(f"DEK of {key.dek_length_bits} bits")
    if key.kek_id is not None:
        parts.append(f"KEK {printable(key.kek_id)}")
    if key.kms_instance_url not in (None, "DEFAULT", ""):
        parts.append(f"names the KMS {printable(repr(key.kms_instance_url))}")
    return ", ".join(parts)
