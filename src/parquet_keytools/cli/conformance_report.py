"""The text of an inspection, as a tree and a map, and of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle

import typer

from parquet_keytools.cli.output import Branch, Style, answer, is_verbose, number_of, size_text
from parquet_keytools.conformance.inspection import (
    FOOTER,
    PLAINTEXT,
    InspectedChunk,
    InspectedColumn,
    Inspection,
    KeyDescription,
)
from parquet_keytools.conformance.report import (
    Damage,
    DataSetReport,
    FileReport,
    Loss,
    Outcome,
    Rule,
    RuleResult,
    Severity,
    Verdict,
)
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.runtime.presentation import printable

_MAP_WIDTH = 64
_MAX_MAP_LINES = 8
_MOST_ROW_GROUPS = 12
_KEY_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_RED: Style = partial(typer.style, fg="red")
_YELLOW: Style = partial(typer.style, fg="yellow")


class _Palette:
    """The symbol and the colour of each key."""

    def __init__(self, names: Iterable[str]) -> None:
        keys = [name for name in dict.fromkeys(names) if name not in (PLAINTEXT, FOOTER)]
        self._looks = dict(zip(keys, zip(cycle(_SYMBOLS), cycle(_KEY_COLOURS), strict=False), strict=False))
        self._looks |= {PLAINTEXT: ("-", "red"), FOOTER: ("#", "white")}

    def symbol(self, name: str) -> str:
        return self._looks.get(name, ("?", ""))[0]

    def style(self, name: str) -> Style:
        return partial(typer.style, fg=self._looks.get(name, ("", "white"))[1])


def render_inspection(shown: Inspection) -> str:
    """Return the tree and the map. Anyone may have written the texts in a file: each is made printable."""
    root = Branch(f"{printable(shown.path)}  {size_text(shown.size_bytes)}", partial(typer.style, bold=True))
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
    lines = list(root.lines())
    if shown.mode is not None:
        lines += ["", *_map(shown, palette)]
    return "\n".join(lines)


def _add_protection(root: Branch, shown: Inspection) -> None:
    assert shown.mode is not None
    if shown.mode is FooterMode.UNENCRYPTED:
        root.add("not encrypted", _RED)
    else:
        seen = {None: "not authenticated: no key", True: "authentic", False: "NOT authentic"}
        branch = root.add(f"{shown.mode.value}, {shown.algorithm}, {seen[shown.footer_is_authentic]}")
        if shown.supply_aad_prefix:
            branch.add("AAD prefix: not stored, readers must supply it")
        else:
            stored = "none" if shown.aad_prefix_escaped is None else f"'{shown.aad_prefix_escaped}'"
            branch.add(f"AAD prefix: {printable(stored)}")
        branch.add(f"file unique: {printable(shown.aad_file_unique or 'none')}")
        if shown.footer_key is not None:
            branch.add(f"key: {_key_text(shown.footer_key)}")
        if shown.footer_denied is not None:
            branch.add(f"key unavailable: {printable(shown.footer_denied)}", _RED)
        branch.add(f"at byte {shown.footer_offset:,}, {shown.footer_length:,} bytes")
    if shown.num_rows is not None:
        root.add(
            f"{number_of(shown.num_rows, 'row')}, written by {printable(shown.created_by or 'an unnamed writer')}"
        )
    if shown.key_values:
        values = ", ".join(f"{printable(key)} ({size_text(length)})" for key, length in shown.key_values.items())
        root.add(f"key-value metadata: {values}")


def _add_columns(root: Branch, shown: Inspection, palette: _Palette) -> None:
    if not shown.columns:
        return
    branch = root.add(number_of(len(shown.columns), "column"))
    for column in shown.columns:
        style = palette.style(column.key_title(shown.footer_key))
        leaf = branch.add(f"{printable(column.path)}: {_column_text(column)}", style)
        if column.denied is not None:
            leaf.add(f"key unavailable: {printable(column.denied)}", _RED)
        if column.shows:
            leaf.add(f"shows: {', '.join(column.shows)}")


def _column_text(column: InspectedColumn) -> str:
    if column.encryption is ColumnEncryption.PLAINTEXT:
        return "plaintext"
    if column.encryption is ColumnEncryption.FOOTER_KEY:
        return "footer key"
    return _key_text(column.key) if column.key else ""


def _add_row_groups(root: Branch, shown: Inspection, palette: _Palette) -> None:
    if not shown.row_groups:
        return
    branch = root.add(number_of(len(shown.row_groups), "row group"))
    for row_group in shown.row_groups[:_MOST_ROW_GROUPS]:
        size = "" if row_group.total_compressed_size is None else f", {size_text(row_group.total_compressed_size)}"
        place = "" if row_group.file_offset is None else f" at byte {row_group.file_offset:,}"
        leaf = branch.add(f"row group {row_group.ordinal}: {number_of(row_group.num_rows, 'row')}{size}{place}")
        for chunk in shown.chunks:
            if chunk.row_group_ordinal == row_group.ordinal:
                column = shown.columns[chunk.column_ordinal]
                style = palette.style(column.key_title(shown.footer_key))
                leaf.add(f"{printable(column.path)}: {_chunk_text(chunk)}", style)
    if len(shown.row_groups) > _MOST_ROW_GROUPS:
        branch.add(f"and {len(shown.row_groups) - _MOST_ROW_GROUPS} more; --json shows all")


def _chunk_text(chunk: InspectedChunk) -> str:
    counts = Counter(module.module_type for module in chunk.modules)
    size = size_text(sum(module.length for module in chunk.modules))
    start = min((module.offset for module in chunk.modules), default=0)
    parts = [f"{number_of(chunk.num_values, 'value')}, {size} from byte {start:,}"]
    if counts[ModuleType.DATA_PAGE_HEADER]:
        parts.append(number_of(counts[ModuleType.DATA_PAGE], "data page"))
    if counts[ModuleType.DICTIONARY_PAGE]:
        parts.append("dictionary")
    if counts[ModuleType.OFFSET_INDEX] or counts[ModuleType.COLUMN_INDEX]:
        parts.append("page index")
    if counts[ModuleType.BLOOM_FILTER_HEADER]:
        parts.append("Bloom filter")
    if not chunk.is_whole:
        parts.append("DAMAGED")
    return ", ".join(parts)


def _add_shares(root: Branch, shown: Inspection, palette: _Palette) -> None:
    branch = root.add("bytes under each key")
    for name, length in shown.bytes_by_key.items():
        share = 100 * length / shown.size_bytes
        text = f"{palette.symbol(name)}  {share:5.1f} %  {size_text(length)}  {printable(name)}"
        branch.add(text, palette.style(name))
    unknown = shown.size_bytes - sum(shown.bytes_by_key.values())
    if unknown > 0:
        text = f".  {100 * unknown / shown.size_bytes:5.1f} %  {size_text(unknown)}  "
        branch.add(text + "unknown without keys, or belongs to nothing")


def _map(shown: Inspection, palette: _Palette) -> Iterator[str]:
    """Yield lines of symbols; each symbol stands for the same number of bytes."""
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
        yield "".join(palette.style(name)(palette.symbol(name)) if name else "." for name in line)


def _key_text(key: KeyDescription) -> str:
    if key.flaw is not None:
        return f"unknown: {printable(key.flaw)}"
    if key.kind == "none":
        known = "" if key.name is None else f"; here data key {printable(key.name)!r}"
        return f"no key metadata: readers must know the key{known}"
    if key.kind == "data key":
        return f"data key {printable(str(key.name))!r}"
    beside = "key material in the file beside it"
    parts = [beside if key.name is None else f"master key {printable(key.name)!r}"]
    if key.reference is not None:
        parts.append(f"reference {printable(key.reference)!r}")
    if key.double_wrapping is not None:
        parts.append("double wrapping" if key.double_wrapping else "single wrapping")
    if key.dek_length_bits is not None:
        parts.append(f"DEK of {key.dek_length_bits} bits")
    if key.kek_id is not None:
        parts.append(f"KEK {printable(key.kek_id)}")
    if key.kms_instance_id not in (None, "DEFAULT", ""):
        parts.append(f"KMS instance {printable(repr(key.kms_instance_id))}")
    if key.kms_instance_url not in (None, "DEFAULT", ""):
        parts.append(f"names the KMS {printable(repr(key.kms_instance_url))}")
    return ", ".join(parts)


# --- verification ---


_MOST_FINDINGS = 5
_MOST_LOSSES = 20
_MOST_ALIKE = 3

_SEVERITY_COLOURS = {Severity.VIOLATION: "red", Severity.WEAKNESS: "yellow", Severity.NOTE: "cyan"}
_VERDICTS = {
    Verdict.CONFORMS: ("conforms", "green"),
    Verdict.WEAK: ("conforms, with weaknesses", "yellow"),
    Verdict.VIOLATED: ("DOES NOT CONFORM", "red"),
    Verdict.INCOMPLETE: ("COULD NOT BE FULLY CHECKED", "yellow"),
}


def show_file(report: FileReport) -> None:
    """Print the report on a file."""
    answer(typer.style(printable(report.path), bold=True))
    _show_broken(report.rules)
    if report.with_keys:
        # Each reason once, with the number of rules that could not be checked because of it.
        for reason, number in Counter(reason for result in report.rules for reason in result.reasons).items():
            answer(f"  {typer.style('not checked', fg='yellow', bold=True)} {number_of(number, 'rule')}: {reason}")
    if report.modules:
        _show_modules(report.modules)
    if report.damage is not None:
        _show_damage(report.damage)
    counts = Counter(result.outcome for result in report.rules)
    words = {outcome: outcome.value for outcome in Outcome}
    if counts[Outcome.HOLDS] != 1:
        words[Outcome.HOLDS] = "hold"
    outcomes = [f"{counts[outcome]} {word}" for outcome, word in words.items() if counts[outcome]]
    answer(f"  rules: {', '.join(outcomes)}")
    answer(f"  {_verdict_text(report.verdict, [report])}")


def show_data_set(report: DataSetReport) -> None:
    """Print the report on a folder. Of files that do not conform in the same way, the first is shown in full."""
    groups: dict[object, list[FileReport]] = {}
    for file in report.files:
        groups.setdefault(_flaws(file), []).append(file)
    conforming = groups.pop((), [])
    for files in groups.values():
        most = len(files) if is_verbose() else 1
        for file in files[:most]:
            show_file(file)
        if alike := [printable(file.path) for file in files[most:]]:
            examples = ", ".join(alike[:_MOST_ALIKE])
            answer(
                f"{number_of(len(alike), 'more file')} with the same broken or unchecked rules, such as {examples}"
            )
    _show_conforming(conforming)
    for path, reason in report.skipped.items():
        answer(f"Skipped: {printable(path)}: {reason}.")
    title = f"{printable(report.path)}: {number_of(len(report.files), 'file')} as a data set"
    answer(typer.style(title, bold=True))
    _show_broken(report.rules)
    rules_of: dict[str, list[str]] = {}
    for result in sorted(report.rules, key=lambda result: _severity(result.rule)):
        for reason in result.reasons:
            rules_of.setdefault(reason, []).append(result.rule.id)
    for reason, rule_ids in rules_of.items():
        answer(f"  {_YELLOW('not checked')} {', '.join(rule_ids)}: {reason}")
    verdicts = Counter(file.verdict for file in report.files)
    counts = "; ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict if verdicts[verdict])
    answer(f"  files: {counts or 'none'}")
    answer(f"  {_verdict_text(report.verdict, report.files)}")


def _flaws(file: FileReport) -> tuple[object, ...]:
    """Return a value that is equal for files that do not conform in the same way; empty if the file conforms."""
    if file.verdict.conforms:
        return ()
    return (
        file.verdict,
        *((r.rule.id, r.outcome) for r in file.rules if r.outcome is Outcome.BROKEN or r.reasons),
    )


def _show_conforming(files: Sequence[FileReport]) -> None:
    """Print the files that conform, and once each rule that many of them break."""
    most = len(files) if is_verbose() else _MOST_ALIKE
    for file in files[:most]:
        answer(f"{printable(file.path)}: {_verdict_text(file.verdict, [file])}")
    if len(files) > most:
        answer(f"{len(files) - most:,} more conform; --verbose lists all.")
    broken: dict[Rule, int] = Counter(
        result.rule for file in files for result in file.rules if result.outcome is Outcome.BROKEN
    )
    for rule in sorted(broken, key=_severity):
        answer(f"  {_heading(rule)} in {broken[rule]:,} of them")
        _show_rule(rule)


def _heading(rule: Rule) -> str:
    label = typer.style(rule.severity.value, fg=_SEVERITY_COLOURS[rule.severity], bold=True)
    return f"{label} {rule.id}"


def _verdict_text(verdict: Verdict, files: Sequence[FileReport]) -> str:
    text, colour = _VERDICTS[verdict]
    if not all(file.with_keys for file in files):
        text += " as far as visible without keys; nothing was authenticated"
    elif not all(file.table for file in files):
        text += "; nothing was compared with a table"
    return typer.style(text, fg=colour, bold=True)


def _severity(rule: Rule) -> int:
    """Return a sort key that puts the most severe rules first."""
    return list(Severity).index(rule.severity)


def _show_broken(results: Iterable[RuleResult]) -> None:
    for result in sorted(results, key=lambda result: _severity(result.rule)):
        if result.outcome is Outcome.BROKEN:
            first, *others = [
                f"{finding.where}: {finding.message}" if finding.where else finding.message
                for finding in result.findings[:_MOST_FINDINGS]
            ]
            answer(f"  {_heading(result.rule)}: {first}")
            for text in others:
                answer(f"    {text}")
            if result.breaches > _MOST_FINDINGS:
                answer(f"    and {result.breaches - _MOST_FINDINGS:,} more")
            _show_rule(result.rule)


def _show_rule(rule: Rule) -> None:
    answer(f"    rule (section {rule.section}): {rule.holds}")
    answer(f"    risk: {rule.gain}")


def _show_modules(modules: Mapping[str, int]) -> None:
    parts = [f"{modules.get('authentic', 0):,} authentic"]
    if broken := modules.get("broken"):
        parts.append(_RED(f"{broken:,} not authentic"))
    if unauthenticated := modules.get("unauthenticated"):
        parts.append(_YELLOW(f"{unauthenticated:,} that nothing authenticates (AES-CTR)"))
    answer(f"  modules: {', '.join(parts)}")


def _show_damage(damage: Damage) -> None:
    if damage.file_is_lost:
        answer(f"  {_RED('lost')}: the whole file: its footer cannot be read or is not authentic")
        return
    for loss in damage.losses[:_MOST_LOSSES]:
        answer(f"  {_RED('lost')}: {loss_text(loss)}")
    if len(damage.losses) > _MOST_LOSSES:
        answer(f"  and parts of {len(damage.losses) - _MOST_LOSSES} more chunks")
    if damage.losses:
        answer(
            f"  readable: {len(damage.readable_row_groups)} of {number_of(damage.row_groups, 'row group')}; "
            "`decrypt --salvage` writes these"
        )


def loss_text(loss: Loss) -> str:
    """Describe the lost part of a chunk."""
    chunk = f"row group {loss.row_group_ordinal}, column {loss.column!r}"
    if loss.pages is None:
        return f"{chunk}: all of it"
    pages = [f"page {page}" for page in loss.pages[:10]]
    if len(loss.pages) > 10:
        pages.append(f"{len(loss.pages) - 10} more pages")
    if loss.from_page is not None:
        pages.append(f"all from page {loss.from_page} on")
    return f"{chunk}: {', '.join(pages)}"
