"""`parquet-keytools scan`: columns that look like personal data, as text, JSON and SARIF."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.config.settings import Configuration, TableSettings
    from parquet_keytools.scan.scanner import Baseline, Finding, ScanReport


@opt.with_options(opt.ReportOptions)
def scan_command(
    paths: opt.PathsArgument,
    config: Path | None = None,
    table: str | None = None,
    sample: int = 500,
    sarif: str | None = None,
    baseline: Path | None = None,
    fix: bool = False,
) -> None:
    """Find columns that look like personal data and are not protected.

    Names, types and statistics are read from footers, and some values of each column. No value is printed.
    Plaintext columns are findings, and encrypted columns that are under another key than their table says. The
    exit status is 1 if there are findings, or if something could not be scanned. Ctrl-C ends the scan, and prints
    what was found until then.

    Options:
        --sample N>=0: How many values of each column of a file are looked at; 0 reads footers alone.
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration: its keys open what is encrypted, its
            table is compared.
        --sarif FILE: Write the findings to this file or URI, as SARIF 2.1.0.
        --baseline FILE: Accepted findings, each with a reason and an expiry date: YAML or JSON.
        --fix: Print the lines of a configuration that would protect the columns, as YAML.
    """
    from parquet_keytools.errors import kms_failure
    from parquet_keytools.scan.scanner import Baseline, read_baseline, scan

    location = opt.locations_of(paths, "PATH")
    target = None if sarif is None else opt.location_of(sarif, "--sarif")
    accepted_before = Baseline() if baseline is None else read_baseline(baseline)
    with contextlib.ExitStack() as stack:
        run, configuration = partial(scan, None, location), None
        keytools = stack.enter_context(opt.reading_keytools(config, table))
        if keytools is not None:
            configuration = keytools.configuration
            run = partial(keytools.scan, location, table_name=table)
        with out.progress_bar() as progress:
            report = run(sample=sample, on_file=progress.count)
    results = _Results(report, accepted_before, configuration, table)
    if target is not None:
        from parquet_keytools.storage.outputs import write_whole

        write_whole(target, json.dumps(results.sarif(), indent=2).encode())
        out.say(f"The findings are in {target}.")
    if out.json_wanted():
        out.print_json(results.document())
    results.show()
    if fix and results.findings:
        out.answer(results.yaml())
    if results.findings or report.is_interrupted:
        raise typer.Exit(out.ExitStatus.NO)
    if not report.is_complete:
        raise typer.Exit(out.status_of_all([error for error in report.failures if kms_failure(error)]))


class _Results:
    """The findings that count, the accepted ones, and which line of a configuration would protect a column."""

    def __init__(
        self, report: ScanReport, baseline: Baseline, configuration: Configuration | None, table_name: str | None
    ) -> None:
        self._report = report
        self._baseline = baseline
        self.findings, self._accepted = baseline.divide(report.findings)
        self._table: tuple[str, TableSettings] | None = None
        if configuration is not None and (table_name is not None or len(configuration.tables) == 1):
            self._table = configuration.select_table(table_name)

    def _remedy(self, finding: Finding) -> str:
        """Return the line, or what else to do."""
        if finding.protection == "names of folders":
            return "Partition by another column: names of folders are readable."
        if finding.expected is not None:
            return f"The configuration has it under {finding.expected}: encrypt or rekey these files."
        from parquet_keytools.config.document import as_yaml

        table, key, _ = self._line(finding)
        return f"tables.{table}.column_keys.{key}: {as_yaml([finding.column])}"

    def yaml(self) -> str:
        """Return lines to paste into a configuration."""
        from parquet_keytools.config.document import as_yaml

        notes: list[str] = []
        tables: dict[str, dict[str, dict[str, list[str]]]] = {}
        for finding in self.findings:
            if finding.protection == "names of folders" or finding.expected is not None:
                notes.append(f"# {printable(finding.column)}: {printable(self._remedy(finding))}")
                continue
            table, key, is_listed = self._line(finding)
            columns = tables.setdefault(table, {}).setdefault("column_keys", {}).setdefault(key, [])
            if finding.column not in columns:
                columns.append(finding.column)
                notes += [f"# Take out of plaintext_columns: {printable(finding.column)}"] if is_listed else []
        return "\n".join([*notes, *([as_yaml({"tables": tables})] if tables else [])])

    def _line(self, finding: Finding) -> tuple[str, str, bool]:
        """Return table, key, and whether the table lists the column as plaintext."""
        if self._table is None:
            folder = finding.data_set.rstrip("/").rpartition("/")[2]
            return folder.rpartition(":")[2] or "TABLE", "pii", False
        name, settings = self._table
        keys = list(settings.column_keys)
        key = next(
            (key for key in keys if re.search("pii|person", key, re.IGNORECASE)), keys[0] if keys else "pii"
        )
        return name, key, finding.column in settings.plaintext_columns

    def show(self) -> None:
        report = self._report
        out.say_left_out(report.left_out)
        missed = out.Messages("Not scanned")
        for entry in report.not_scanned:
            what = f"column {entry.column}: " if entry.column is not None else ""
            more = f" In {out.number_of(entry.files, 'file')}." if entry.files > 1 else ""
            missed.add(entry.examples[0], f"{printable(what + entry.reason)}{more}")
        missed.print()
        for finding in self.findings:
            out.answer(f"{printable(_sentence(finding))} For example: {printable(finding.examples[0])}")
            out.answer(f"    {printable(self._remedy(finding))}")
        if report.protected:
            headings = ["column", "looks like", "by", "share", "key", "files"]
            rows = [
                (f.column, _looks_like(f), f.by, _share(f), f.protection, f"{f.files:,}") for f in report.protected
            ]
            out.print_table("Personal data under keys", headings, rows)
        for finding, why in self._accepted:
            out.answer(f"Accepted until {why.expires}: {printable(finding.column)}: {printable(why.reason)}")
        for why in self._baseline.expired:
            out.answer(f"Expired on {why.expires}: {printable(why.column)} ({why.kind}) is no longer accepted.")
        for why in self._baseline.unmatched:
            out.answer(f"Matches nothing: {printable(why.column)} ({why.kind}). Remove it from the baseline.")
        if report.is_interrupted:
            out.answer("Interrupted: these are partial results.")
        scanned = out.number_of(report.files, "file")
        verdict = "complete" if report.is_complete else "incomplete"
        out.answer(f"{out.number_of(len(self.findings), 'finding')} in {scanned}; the scan is {verdict}.")

    def document(self) -> dict[str, Any]:
        report = self._report
        return {
            "complete": report.is_complete,
            "interrupted": report.is_interrupted,
            "files": report.files,
            "findings": [_finding_document(finding) | {"fix": self._remedy(finding)} for finding in self.findings],
            "protected": [_finding_document(finding) for finding in report.protected],
            "accepted": [
                _finding_document(finding) | {"reason": entry.reason, "expires": str(entry.expires)}
                for finding, entry in self._accepted
            ],
            "baseline": {
                "expired": [entry.model_dump(mode="json") for entry in self._baseline.expired],
                "unmatched": [entry.model_dump(mode="json") for entry in self._baseline.unmatched],
            },
            "not_scanned": report.not_scanned,
            "left_out": out.left_out_document(report.left_out),
            "fix": self.yaml(),
        }

    def sarif(self) -> dict[str, Any]:
        """Return the findings as a SARIF 2.1.0 document; accepted ones are suppressed there."""
        from parquet_keytools import __version__
        from parquet_keytools.scan.recognition import Kind

        report = self._report
        results = [self._result(finding) for finding in self.findings]
        for finding, entry in self._accepted:
            suppression = {"kind": "external", "status": "accepted", "justification": entry.reason}
            results.append(self._result(finding) | {"suppressions": [suppression]})
        notifications: list[dict[str, Any]] = []
        for missed in report.not_scanned:
            text = f"Not scanned: {f'column {missed.column}: ' if missed.column else ''}{missed.reason}"
            locations = [_location(example, missed.column) for example in missed.examples]
            notifications.append({"level": "error", "message": {"text": text}, "locations": locations})
        if report.is_interrupted:
            text = "Interrupted: these are partial results."
            notifications.append({"level": "error", "message": {"text": text}})
        rules = []
        for kind in Kind:
            text = f"A column looks like {kind.description} and is not protected."
            rules.append({"id": kind, "shortDescription": {"text": text}})
        driver = {"name": "parquet-keytools", "version": __version__, "rules": rules}
        invocation = {"executionSuccessful": report.is_complete, "toolExecutionNotifications": notifications}
        return {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results, "invocations": [invocation]}],
        }

    def _result(self, finding: Finding) -> dict[str, Any]:
        identity = "\n".join((finding.data_set, finding.column, finding.kind))
        return {
            "ruleId": finding.kind,
            "level": "error",
            "message": {"text": f"{_sentence(finding)} {self._remedy(finding)}"},
            "locations": [_location(example, finding.column) for example in finding.examples],
            "partialFingerprints": {"column/v1": hashlib.sha256(identity.encode()).hexdigest()},
            "properties": {"share": finding.share, "files": finding.files, "protection": finding.protection},
        }


def _looks_like(finding: Finding) -> str:
    return f"{finding.kind.description} ({finding.detail})" if finding.detail else finding.kind.description


def _share(finding: Finding) -> str:
    return "" if finding.share is None else f"{finding.share:.0%}"


def _sentence(finding: Finding) -> str:
    share = f"{_share(finding)} of {finding.values:,} values, " if finding.values else ""
    files = out.number_of(finding.files, "file")
    is_open = finding.protection in ("plaintext", "names of folders")
    protection = finding.protection if is_open else f"under {finding.protection}"
    what = f"Column {finding.column} looks like {_looks_like(finding)}"
    return f"{what} ({share}by {finding.by}): {protection}, in {files}."


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {**finding.__dict__, "share": finding.share}


def _location(path: str, column: str | None) -> dict[str, Any]:
    scheme, colon, rest = path.partition(":")
    with contextlib.suppress(ValueError):
        path = str(Path(path).relative_to(Path.cwd()))
    uri = f"{scheme}://{quote(rest)}" if colon and not path.startswith("/") else quote(path)
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri}}}
    if column is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": column, "kind": "member"}]
    return location
