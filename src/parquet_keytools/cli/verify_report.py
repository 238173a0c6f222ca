"""Reports as people read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer

from parquet_keytools.cli.output import answer, number_of
from parquet_keytools.conformance.report import (
    Damage,
    DataSetReport,
    FileReport,
    Loss,
    ModuleTally,
    Outcome,
    RuleResult,
    Verdict,
)
from parquet_keytools.conformance.rules import Rule, Severity
from parquet_keytools.storage.printable import printable

_MOST_FINDINGS = 5
_MOST_LOSSES = 20
_MOST_CONFORMING = 20

_COLOURS = {Severity.VIOLATION: "red", Severity.WEAKNESS: "yellow", Severity.NOTE: "cyan"}
_VERDICTS = {
    Verdict.CONFORMS: ("conforms", "green"),
    Verdict.VIOLATED: ("DOES NOT CONFORM", "red"),
    Verdict.INCOMPLETE: ("COULD NOT BE FULLY CHECKED", "yellow"),
}


def say_file(report: FileReport) -> None:
    """Tell what was found in a file."""
    answer(typer.style(printable(report.path), bold=True))
    for result in _worst_first(report.rules):
        _say_broken(result)
    _say_not_checked(report)
    _say_modules(report.modules)
    if report.damage is not None:
        _say_damage(report.damage)
    counts = Counter(result.outcome for result in report.rules)
    answer(f"  rules: {', '.join(f'{counts[outcome]} {outcome.value}' for outcome in Outcome if counts[outcome])}")
    _say_verdict(report.verdict, with_keys=report.with_keys, with_table=report.table is not None)


def say_data_set(report: DataSetReport) -> None:
    """Tell what was found in the files of a folder: all of those that do not conform, a summary of the others."""
    for file in report.files:
        if file.verdict is not Verdict.CONFORMS:
            say_file(file)
    _say_conforming([file for file in report.files if file.verdict is Verdict.CONFORMS])
    for path, reason in report.left_out.items():
        answer(f"Left out: {printable(path)}: {reason}.")
    answer(
        typer.style(f"{printable(report.path)}: {number_of(len(report.files), 'file')} as a data set", bold=True)
    )
    for result in _worst_first(report.rules):
        _say_broken(result)
        for reason in result.reasons:
            answer(f"  {typer.style('not checked', fg='yellow')} {result.rule.id}: {reason}")
    verdicts = Counter(file.verdict for file in report.files)
    counts = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict if verdicts[verdict])
    answer(f"  files: {counts or 'none'}")
    with_keys = all(file.with_keys for file in report.files)
    _say_verdict(report.verdict, with_keys=with_keys, with_table=all(file.table for file in report.files))


def _say_conforming(files: Sequence[FileReport]) -> None:
    """Tell once what is broken in many files: they mostly come from one writer."""
    for file in files[:_MOST_CONFORMING]:
        verdict = _verdict_text(file.verdict, with_keys=file.with_keys, with_table=file.table is not None)
        answer(f"{printable(file.path)}: {verdict}")
    if len(files) > _MOST_CONFORMING:
        answer(f"{len(files) - _MOST_CONFORMING:,} more conform; --json lists all.")
    broken: dict[Rule, int] = Counter(
        result.rule for file in files for result in file.rules if result.outcome is Outcome.BROKEN
    )
    for rule in sorted(broken, key=lambda rule: list(Severity).index(rule.severity)):
        answer(f"  {_heading(rule)} in {broken[rule]:,} of them")
        _print_rule(rule)


def _heading(rule: Rule) -> str:
    label = typer.style(rule.severity.value, fg=_COLOURS[rule.severity], bold=True)
    return f"{label} {rule.id}"


def _say_verdict(verdict: Verdict, *, with_keys: bool, with_table: bool) -> None:
    answer(f"  {_verdict_text(verdict, with_keys=with_keys, with_table=with_table)}")


def _verdict_text(verdict: Verdict, *, with_keys: bool, with_table: bool) -> str:
    text, colour = _VERDICTS[verdict]
    if not with_keys:
        text += " as far as visible without keys; nothing was authenticated"
    elif not with_table:
        text += "; nothing was compared with a table"
    return typer.style(text, fg=colour, bold=True)


def _worst_first(results: tuple[RuleResult, ...]) -> list[RuleResult]:
    order = list(Severity)
    return sorted(results, key=lambda result: order.index(result.rule.severity))


def _say_broken(result: RuleResult) -> None:
    if result.outcome is not Outcome.BROKEN:
        return
    rule = result.rule
    first, *others = [
        f"{finding.where}: {finding.message}" if finding.where else finding.message
        for finding in result.findings[:_MOST_FINDINGS]
    ]
    answer(f"  {_heading(rule)}: {first}")
    for text in others:
        answer(f"    {text}")
    if result.breaches > _MOST_FINDINGS:
        answer(f"    and {result.breaches - _MOST_FINDINGS:,} more")
    _print_rule(rule)


def _print_rule(rule: Rule) -> None:
    answer(f"    rule (section {rule.section}): {rule.holds}")
    answer(f"    risk: {rule.gain}")


def _say_not_checked(report: FileReport) -> None:
    """Tell reasons once each, with the number of rules that they keep from being checked."""
    if not report.with_keys:
        return
    reasons = Counter(reason for result in report.rules for reason in result.reasons)
    for reason, number in reasons.items():
        answer(f"  {typer.style('not checked', fg='yellow', bold=True)} {number_of(number, 'rule')}: {reason}")


def _say_modules(tallies: tuple[ModuleTally, ...]) -> None:
    if not tallies:
        return
    authentic = sum(tally.authentic for tally in tallies)
    broken = sum(tally.broken for tally in tallies)
    unauthenticated = sum(tally.unauthenticated for tally in tallies)
    parts = [f"{authentic:,} authentic"]
    if broken:
        parts.append(typer.style(f"{broken:,} not authentic", fg="red"))
    if unauthenticated:
        parts.append(typer.style(f"{unauthenticated:,} that nothing authenticates (AES-CTR)", fg="yellow"))
    answer(f"  modules: {', '.join(parts)}")


def _say_damage(damage: Damage) -> None:
    if damage.file_is_lost:
        answer(f"  {typer.style('lost', fg='red')}: the whole file: its footer cannot be read or is not authentic")
        return
    for loss in damage.losses[:_MOST_LOSSES]:
        answer(f"  {typer.style('lost', fg='red')}: {loss_text(loss)}")
    if len(damage.losses) > _MOST_LOSSES:
        answer(f"  and parts of {len(damage.losses) - _MOST_LOSSES} more chunks")
    if damage.losses:
        answer(
            f"  readable: {len(damage.readable_row_groups)} of {damage.row_groups} row groups; "
            "`decrypt --salvage` writes these"
        )


def loss_text(loss: Loss) -> str:
    """Return what is lost of a chunk."""
    chunk = f"row group {loss.row_group_ordinal}, column {loss.column!r}"
    if loss.pages is None:
        return f"{chunk}: all of it"
    pages = [f"page {page}" for page in loss.pages[:10]]
    if len(loss.pages) > 10:
        pages.append(f"{len(loss.pages) - 10} more pages")
    if loss.from_page is not None:
        pages.append(f"all from page {loss.from_page} on")
    return f"{chunk}: {', '.join(pages)}"
