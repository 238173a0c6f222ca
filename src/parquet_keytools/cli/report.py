"""`parquet-keytools report`: the report for an auditor as text, JSON and HTML."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.protection_report import Access, ColumnReport, ProtectingKey, ProtectionReport, Remark


@opt.with_options(opt.ReportOptions)
def report_command(
    paths: opt.PathsArgument,
    config: Path,
    readers: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="NAME=CONFIG",
            help="A configuration whose access is measured: its KMS is asked to unwrap the files' keys. "
            "Repeatable.",
        ),
    ] = None,
    html: str | None = None,
    overwrite: bool = False,
    no_verify: bool = False,
    table: str | None = None,
    aad_prefix: str | None = None,
    processes: int | None = None,
) -> None:
    """Report which column is under which key, and who reads it.

    The exit status is 0 only if the report has no problem: the files conform, none is plaintext, and all keys are
    proven. With --no-verify, nothing is looked for in hidden folders and under names that readers skip. Column
    access is measured with the keys of the files, not read from configurations or policies.

    Options:
        --html FILE: Write the report to this file or URI, as HTML.
        --overwrite: Replace the file of --html.
        --no-verify: Do not verify the files, which reads all of them. The report says so.
    """
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.protection_report import make_report
    from parquet_keytools.runtime.worker_processes import command_line_processes
    from parquet_keytools.storage.outputs import discarded_unless_done, exists_already, pending_output

    location = opt.locations_of(paths, "PATH")
    target = None if html is None else opt.location_of(html, "--html")
    if target is not None and not overwrite and target.is_file():
        raise exists_already(target)
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(Keytools.from_yaml(config))
        if table is not None:
            keytools.configuration.select_table(table)
        named = {
            name: stack.enter_context(Keytools.from_yaml(Path(file)))
            for name, file in opt.pairs_of(readers, "--as").items()
        }
        with out.progress_bar() as progress, command_line_processes(processes):
            report = make_report(
                keytools,
                location,
                named,
                table_name=table,
                aad_prefix=aad_prefix,
                verify=not no_verify,
                on_file=progress.count,
            )
    shown = report.grouped(keytools.configuration.template_of, out.MOST_OF_A_TEMPLATE)
    if target is not None:
        page = html_page(shown).encode()
        with discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending:
            with pending.open_sink() as sink:
                sink.write_at(0, page)
            pending.commit()
        out.say(f"The report is in {target}.")
    if out.json_wanted():
        out.print_json(report.to_dict())
    else:
        _show(shown)
    status = out.status_of_all(report.failures)
    if report.failures and status is not out.ExitStatus.NO:
        raise typer.Exit(status)
    if any(remark.is_problem for remark in report.exceptions):
        raise typer.Exit(out.ExitStatus.NO)


# --- text ---


def _show(report: ProtectionReport) -> None:
    for remark in report.exceptions:
        out.answer(f"{'Problem' if remark.is_problem else 'Note'}: {_remark_text(remark)}")
    rows = []
    for column in report.columns:
        access = [_access_text(column, column.access.get(reader)) for reader in report.readers]
        rows.append((column.title, f"{column.files:,}", _keys_text(report, column), *access))
    out.print_table("Columns", ["column", "files", "keys", *report.readers], rows)
    key_rows = [
        (key.key, key.version or "?", f"{key.files:,}", _created_text(key), key.first_modified, key.last_modified)
        for key in report.keys
    ]
    out.print_table("Keys", ["key", "version", "files", "created", "first file", "last file"], key_rows)
    for remark in report.not_examined:
        out.answer(f"Not examined: {_remark_text(remark)}")
    out.answer(_summary(report))


def _remark_text(remark: Remark) -> str:
    parts = [printable(remark.text)]
    if remark.count:
        parts.append(f"({remark.count:,})")
    if remark.examples:
        parts.append(f"For example: {', '.join(map(printable, remark.examples))}")
    return " ".join(parts)


def _keys_text(report: ProtectionReport, column: ColumnReport) -> str:
    texts = [
        f"{report.keys[position].key}@{report.keys[position].version or '?'} ({count:,})"
        for position, count in sorted(column.keys.items())
    ]
    if column.plaintext_files:
        texts.append(f"plaintext ({column.plaintext_files:,})")
    return ", ".join(texts)


def _access_text(column: ColumnReport, access: Access | None) -> str:
    """Return whether a configuration reads a column where it is encrypted."""
    if access is None:
        return "plaintext" if column.plaintext_files else ""
    counts = {"yes": access.reads, "no": access.refused, "unknown": access.unknown}
    found = {word: count for word, count in counts.items() if count}
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{word} in {n:,}" for word, n in found.items())


def _created_text(key: ProtectingKey) -> str:
    if key.created is None:
        return key.created_note
    return f"{key.created} ({key.created_note})" if key.created_note else key.created


def _summary(report: ProtectionReport) -> str:
    counts = report.counts
    words = {
        "plaintext": "plaintext",
        "unreadable": "that could not be checked",
        "skipped": "skipped because of their names",
        "not_parquet": "not Parquet",
    }
    others = "".join(f", {counts[name]:,} {word}" for name, word in words.items() if counts[name])
    verdict = "not verified" if report.verdict is None else f"verification: {report.verdict}"
    return f"{out.number_of(counts['encrypted'], 'encrypted file')}{others}; {verdict}."


# --- HTML ---


def html_page(report: ProtectionReport) -> str:
    """Return one HTML page: without a script, and without anything to load.

    Anyone may have named the files, columns and keys: each text goes through `_text`.
    """
    page = resources.files("parquet_keytools.cli").joinpath("report.html").read_text("utf-8")
    style = page.partition("<style>")[2].partition("</style>")[0]
    return Template(page).substitute(
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        paths=", ".join(map(_text, report.paths)),
        made=_text(report.made),
        summary=_text(_summary(report)),
        exceptions=_list(map(_remark_item, report.exceptions), "There are no exceptions."),
        columns_by_keys="\n".join(_columns_by_keys(report)),
        columns_by_readers="\n".join(_columns_by_readers(report)),
        chart="\n".join(_chart(report)),
        keys="\n".join(_keys(report)),
        plaintext_files=_list(map(_path_item, report.plaintext_files), "All Parquet files are encrypted."),
        not_parquet=_list(map(_path_item, report.not_parquet), "There are none."),
        not_examined=_list(map(_remark_item, report.not_examined), "Everything was examined."),
        number=f"{len(report.files):,}",
        files="\n".join(_files(report)),
    )


def _text(text: object) -> str:
    return escape(printable(str(text)), quote=True)


def _remark_item(remark: Remark) -> str:
    kind = "problem" if remark.is_problem else "note"
    count = f" ({remark.count:,})" if remark.count else ""
    examples = "".join(f"<li>{_text(example)}</li>" for example in remark.examples)
    if examples and remark.count > len(remark.examples):
        examples += f"<li>and {remark.count - len(remark.examples):,} more</li>"
    inner = f"\n<ul>{examples}</ul>" if examples else ""
    return f'<li class="{kind}"><strong>{kind.capitalize()}:</strong> {_text(remark.text)}{count}{inner}</li>\n'


def _path_item(path: str) -> str:
    return f"<li>{_text(path)}</li>\n"


def _list(items: Iterable[str], if_none: str) -> str:
    inner = "".join(items)
    return f"<ul>\n{inner}</ul>" if inner else f"<p>{_text(if_none)}</p>"


def _table(label: str, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table, whose headings and cells are HTML; the first cell of a row is its heading.

    Its surroundings scroll, also with the keyboard.
    """
    yield f'<div class="wide" role="region" aria-label="{_text(label)}" tabindex="0">'
    yield f"<table>\n<caption>{_text(label)}</caption>\n<thead><tr>"
    yield "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    yield "</tr></thead>\n<tbody>"
    for first, *others in rows:
        yield f'<tr><th scope="row">{first}</th>{"".join(others)}</tr>'
    yield "</tbody>\n</table>\n</div>"


def _cell(text: object, kind: str = "") -> str:
    return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"


def _key_title(report: ProtectionReport, position: int) -> str:
    key = report.keys[position]
    version = f", version {key.version or 'not visible'}" if key.kind == "master key" else " (data key)"
    return f"K{position + 1}: {key.key or 'unknown'}{version}"


_KEYS_AT_A_TIME = 5


def _columns_by_keys(report: ProtectionReport) -> Iterator[str]:
    # Tables of a few keys each fit on paper.
    for first in range(0, max(len(report.keys), 1), _KEYS_AT_A_TIME):
        positions = range(first, min(first + _KEYS_AT_A_TIME, len(report.keys)))
        yield from _columns_by_some_keys(report, positions, with_sums=first == 0)


def _columns_by_some_keys(report: ProtectionReport, positions: range, *, with_sums: bool) -> Iterator[str]:
    headings = ["Column", *(_text(_key_title(report, position)) for position in positions)]
    rows = []
    for column in report.columns:
        counts = [column.keys.get(position, 0) for position in positions]
        if not with_sums and not any(counts):
            continue
        cells = [_cell(f"{count:,}" if count else "", "number") for count in counts]
        if with_sums:
            plaintext = column.plaintext_files
            cells.append(_cell(f"{plaintext:,}", "number plaintext") if plaintext else _cell("", "number"))
            cells.append(_cell(f"{column.files:,}", "number"))
        rows.append([_text(column.title), *cells])
    label = "Number of files in which a key protects a column"
    if len(positions) < len(report.keys):
        label += f": keys K{positions[0] + 1} to K{positions[-1] + 1}"
    yield from _table(label, headings + ["Plaintext", "Files"] * with_sums, rows)


def _columns_by_readers(report: ProtectionReport) -> Iterator[str]:
    if not report.readers:
        yield "<p>No configuration was named with --as.</p>"
        return
    yield (
        "<p>Measured: the KMS was asked, with each configuration, to unwrap the keys of the files. "
        "Plaintext columns can be read by anyone who can open the files.</p>"
    )
    reasons: dict[str, None] = {}
    rows = []
    for column in report.columns:
        cells = []
        for reader in report.readers:
            access = column.access.get(reader)
            text = _access_text(column, access)
            cells.append(_cell(text, text if text in ("yes", "no", "unknown", "plaintext") else ""))
            if access is not None:
                reasons |= {f"{reader}: {reason}": None for reason in access.reasons}
        rows.append([_text(column.title), *cells])
    yield from _table("Access to the column where it is encrypted", ["Column", *map(_text, report.readers)], rows)
    if reasons:
        yield "<p>Why not:</p>"
        yield _list(map(_path_item, reasons), "")


def _keys(report: ProtectionReport) -> Iterator[str]:
    rows = (
        [
            _text(_key_title(report, position)),
            _cell(_created_text(key), "" if key.created_note else "time"),
            _cell(f"{key.files:,}", "number"),
            _cell(key.first_modified or "unknown", "time"),
            _cell(key.last_modified or "unknown", "time"),
        ]
        for position, key in enumerate(report.keys)
    )
    yield from _table("Keys that files need", ["Key", "Created", "Files", "First file", "Last file"], rows)
    versions = (
        [_text(v.key), _cell(v.version or "the master key"), _cell(v.created, "time")] for v in report.timeline
    )
    if report.timeline:
        label = "All versions of these master keys that the KMS states, oldest first"
        yield from _table(label, ["Master key", "Version", "Created"], versions)


_CHART_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT = 1000, 60, 26


def _chart(report: ProtectionReport) -> Iterator[str]:
    """Yield a drawing: a line from the creation of each key to its last file, and a bar for its files."""
    times = [time for key in report.keys for time in (key.created, key.first_modified, key.last_modified)]
    known = sorted(filter(None, times))
    if not known:
        return
    first, last = (datetime.fromisoformat(time).timestamp() for time in (known[0], known[-1]))

    def place(time: str) -> float:
        share = (datetime.fromisoformat(time).timestamp() - first) / (last - first or 1.0)
        return round(_LABEL_WIDTH + share * (_CHART_WIDTH - _LABEL_WIDTH - 20), 1)

    height = _ROW_HEIGHT * (len(report.keys) + 1)
    label = "Time line: when each key was created (circle), and when its files were written (bar)"
    yield f'<svg viewBox="0 0 {_CHART_WIDTH} {height}" role="img" aria-label="{label}">'
    for row, key in enumerate(report.keys):
        y = _ROW_HEIGHT * row + 14
        yield f'<text x="0" y="{y + 5}" font-size="14">K{row + 1}</text>'
        begin = key.created or key.first_modified
        if begin and key.last_modified:
            yield f'<line x1="{place(begin)}" x2="{place(key.last_modified)}" y1="{y}" y2="{y}" stroke="#555"/>'
        if key.first_modified and key.last_modified:
            x = place(key.first_modified)
            width = max(4.0, round(place(key.last_modified) - x, 1))
            yield f'<rect x="{x}" y="{y - 6}" width="{width}" height="12" fill="#1f5f99"/>'
        if key.created:
            yield f'<circle cx="{place(key.created)}" cy="{y}" r="6" fill="#fff" stroke="#1b1b1b"/>'
    y = height - 6
    yield f'<text x="{_LABEL_WIDTH}" y="{y}" font-size="14">{_text(known[0])}</text>'
    yield f'<text x="{_CHART_WIDTH}" y="{y}" font-size="14" text-anchor="end">{_text(known[-1])}</text>\n</svg>'


def _files(report: ProtectionReport) -> Iterator[str]:
    rows = (
        [
            _text(file.path),
            _cell(file.modified or "unknown", "time"),
            _cell(", ".join(f"K{position + 1}" for position in file.keys) if file.encrypted else "plaintext"),
            _cell(file.problem),
        ]
        for file in report.files
    )
    headings = ["File", "Modification time (not authenticated)", "Keys", "Problem"]
    yield from _table("Parquet files", headings, rows)
